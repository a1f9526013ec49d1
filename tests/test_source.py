import pytest
import torch
from lab_runs import CPU, TEXT, small_source

from invariant_adam.lab import data
from invariant_adam.lab.source import load


def test_every_run_sees_the_same_samples_in_the_same_order():
    source = small_source("vit")
    first = source.epoch(0, 1, 0, 80)
    assert first[0].shape == (80, 3, 32, 32)
    source.epoch(0, 0, 0, 80)  # drops what was kept
    again = source.epoch(0, 1, 0, 80)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    fewer = source.epoch(0, 1, 40, 40)
    assert set(fewer[1].tolist()) <= set(range(10))
    assert not torch.equal(first[0], source.epoch(1, 1, 0, 80)[0])


def test_sequences_follow_each_other():
    source = small_source("gpt")
    (x,) = source.epoch(3, 0, 0, source.count)
    assert x.shape == (source.count, source.context + 1)
    whole = data.encode(TEXT)
    text = "".join(whole.vocab[i] for i in whole.ids.tolist())
    for row in x[:5].tolist():
        assert "".join(whole.vocab[i] for i in row) in text
    starts = {text.find("".join(whole.vocab[i] for i in row)) % source.context for row in x.tolist()}
    assert len(starts) < source.count  # all cut at the same places, up to repetitions in the text


def test_the_test_set_is_all_there():
    assert sum(len(y) for _, y in small_source("vit").test()) == 30


def test_a_text_without_a_sequence_is_refused():
    with pytest.raises(ValueError, match="longer text"):
        load("gpt", CPU, small=True, found=data.encode("abc" * 20))
