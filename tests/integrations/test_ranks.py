"""The real trainers on two gloo ranks, under DDP and FSDP2, against the plain loop of one process."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("accelerate")

from plain_loop import Sentences, gpt2, grown, llama, optimizer_of, train_plainly, windows
from trainer_runs import NEW, arguments, assert_is_plain, trained

pytestmark = pytest.mark.slow
HERE = Path(__file__).parent
# Of 58 samples Accelerate makes 64 for two ranks: both have as many batches, and all have four samples.
SEEN = [*range(58), *range(6)]


def ranks(mode, folder):
    """Have two ranks train, and leave their results in `folder`."""
    path = os.pathsep.join([str(HERE.parents[1] / "src"), str(HERE)])
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run(
        [*launcher, str(HERE / "trainer_ranks.py"), mode, str(folder)],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def assert_left_is_plain(path, build, data, plan, announced=(), **options):
    found = torch.load(path)
    model = build()
    opt = optimizer_of(model, **options)
    train_plainly(model, opt, data, plan, announced=announced)
    opt.state_dict()
    assert found["samples"] == opt.samples_seen
    params = [p for group in opt.param_groups for p in group["params"]]
    for p, w, v in zip(params, found["w"], found["v"], strict=True):
        expected = opt.state[p]["exp_avg_sq"]
        assert (v - expected).norm() <= 1e-5 * expected.norm(), (path, v.norm() / expected.norm())
        assert (w - p).abs().max() <= 1e-6, path
    return found


def test_replicas_are_one_process(tmp_path):
    folder, data = ranks("replicated", tmp_path), Sentences(58, unequal=True)
    plan = windows(SEEN, 4) * 3
    for name, options in (("ddp", {}), ("clipped", {"max_micro_norm": 0.2, "fold": "call"}), ("one pass", {})):
        assert_left_is_plain(folder / f"{name}.pt", gpt2, data, plan, **options)
    assert_left_is_plain(folder / "grown.pt", gpt2, data, grown(windows(SEEN, 8) * 3, ranks=2)[0])
    first, second = (torch.load(folder / f"nonfinite-{rank}.pt") for rank in (0, 1))
    assert first == second
    assert first[:2] == [0, 0]
    assert first[2] > 0
    # Without a length Accelerate deals samples out, the last two one to each rank.
    streamed = [*windows(range(48), 4), [range(48, 52), range(52, 56), [56], [57]]] * 3
    assert_left_is_plain(folder / "streamed.pt", gpt2, data, streamed)
    if NEW:  # older ones cannot load on several ranks without a GPU
        after = windows(SEEN[48:], 2) + windows(SEEN, 2) * 2
        assert_left_is_plain(folder / "gone on.pt", gpt2, data, plan[:3] + after)
    # One rank goes on with what two began.
    checkpoint = str(folder / "ddp" / "checkpoint-3")
    trainer = trained(gpt2(), arguments(tmp_path, 3), data, resume=checkpoint)
    alone = windows(range(48, 58), 3) + windows(range(58), 3) * 2
    assert_is_plain(trainer, gpt2, data, plan[:3] + alone)


@pytest.mark.skipif(not NEW, reason="FSDP is supported with transformers 5")
def test_shards_are_one_process(tmp_path):
    folder, data = ranks("sharded", tmp_path), Sentences(58, unequal=True)
    plan = windows(SEEN, 4) * 3
    left = assert_left_is_plain(folder / "fsdp.pt", llama, data, plan)
    assert left["sharded"]
    assert left["alone"] > 0
    # One process that has seen the same: what it logs is made of whole moments.
    logging = {"logging_strategy": "steps", "logging_steps": 1}
    alone = trained(llama(), arguments(tmp_path / "alone", 4, **logging), [data[i] for i in SEEN])
    noise = [log["noise_scale"] for log in alone.state.log_history if "noise_scale" in log]
    assert noise
    assert left["noise"] == pytest.approx(noise, rel=1e-3)
    after = windows(SEEN[48:], 2) + windows(SEEN, 2) * 2
    assert_left_is_plain(folder / "gone on.pt", llama, data, plan[:3] + after)
    assert_left_is_plain(folder / "grown.pt", llama, data, grown(windows(SEEN, 8) * 3, ranks=2)[0])


def test_accelerate_is_one_process(tmp_path):
    folder, data = ranks("accelerated", tmp_path), Sentences(58, unequal=True)
    assert_left_is_plain(folder / "accelerated.pt", gpt2, data, windows(SEEN, 4) * 3, announced=None)


def test_lightning_is_one_process(tmp_path):
    pytest.importorskip("lightning")
    folder, data = ranks("lightning", tmp_path), Sentences(58, unequal=True)
    # Each rank has every second sample, 29 of them; the last window of each has five samples.
    plan = [a + b for a, b in zip(*(windows(range(rank, 58, 2), 2) for rank in (0, 1)), strict=True)] * 3
    assert_left_is_plain(folder / "lightning.pt", gpt2, data, plan)
