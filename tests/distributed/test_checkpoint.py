import os
import pickle
import shutil
import signal
import warnings
from itertools import count
from pathlib import Path

import pytest
import torch
from torch import nn

from invariant_adam import InvariantAdam, InvariantEMA, SampleLambdaLR, distributed, warmup_cosine
from invariant_adam.distributed import checkpoint


def build(seed=0, *, micro_batch_size=4, width=5):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, width), nn.Tanh(), nn.Linear(width, 1)).double()
    opt = InvariantAdam(model.parameters(), 1e-2, weight_decay=0.1, micro_batch_size=micro_batch_size)
    return model, opt, SampleLambdaLR(opt, warmup_cosine(20, 200))


def train(model, opt, updates, stop=None):
    for update in range(updates) if stop is None else range(updates, stop):
        for k in range(1 + update % 3):
            x = torch.randn(4, 3, dtype=torch.double, generator=torch.Generator().manual_seed(10 * update + k))
            model(x).square().mean().backward()
        opt.step()


def state(model, opt):
    moments = [s[key] for s in opt.state_dict()["state"].values() for key in s]
    return [p.detach().clone() for p in model.parameters()] + [torch.as_tensor(x).clone() for x in moments]


def test_a_run_goes_on_from_its_checkpoint_as_if_it_had_not_stopped(tmp_path):
    model, opt, schedule = build()
    ema = InvariantEMA(model, opt, 0.9)
    train(model, opt, 4)
    ema.update_parameters(model)
    distributed.save(tmp_path, model, opt, schedule=schedule, ema=ema)
    train(model, opt, 4, 7)

    again, opt2, schedule2 = build(seed=1)
    ema2 = InvariantEMA(again, opt2, 0.9)
    path = distributed.load_latest(tmp_path, again, opt2, schedule=schedule2, ema=ema2)
    assert path.name == f"samples-{28:012d}"
    assert all(torch.equal(a, b) for a, b in zip(ema.parameters(), ema2.parameters(), strict=True))
    train(again, opt2, 4, 7)
    for a, b in zip(state(model, opt), state(again, opt2), strict=True):
        assert torch.equal(a, b)
    assert opt2.samples_seen == opt.samples_seen
    assert schedule2.state_dict() == schedule.state_dict()


def test_an_empty_or_absent_folder_has_no_latest(tmp_path):
    model, opt, _ = build()
    assert distributed.load_latest(tmp_path, model, opt) is None
    assert distributed.load_latest(tmp_path / "absent", model, opt) is None


def test_only_the_last_ones_are_kept_and_leftovers_go(tmp_path):
    model, opt, _ = build()
    (tmp_path / ".samples-000000000001.0badcafe").mkdir()  # of a writer that was killed
    (tmp_path / "samples-of-something-else").mkdir()
    for update in range(4):
        train(model, opt, update, update + 1)
        distributed.save(tmp_path, model, opt, keep=3)
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == [f"samples-{n:012d}" for n in (12, 24, 28)] + ["samples-of-something-else"]
    with pytest.raises(ValueError, match="keep=0"):
        distributed.save(tmp_path, model, opt, keep=0)


@pytest.mark.parametrize("damage", ["metadata", "cut metadata", "file", "cut file"])
def test_a_damaged_checkpoint_is_passed_over(tmp_path, damage):
    model, opt, _ = build()
    train(model, opt, 1)
    whole = distributed.save(tmp_path, model, opt)
    train(model, opt, 1, 2)
    broken = distributed.save(tmp_path, model, opt)
    file = broken / ".metadata" if "metadata" in damage else next(broken.glob("*.distcp"))
    if "cut" in damage:
        file.write_bytes(file.read_bytes()[:-100])
    else:
        file.unlink()
    with pytest.warns(RuntimeWarning, match="passing over"):
        assert distributed.load_latest(tmp_path, model, opt) == whole
    assert opt.samples_seen == 4


def test_a_checkpoint_that_exists_is_not_written_again(tmp_path):
    model, opt, _ = build()
    train(model, opt, 1)
    path = distributed.save(tmp_path, model, opt)
    before = {file.name: file.read_bytes() for file in path.iterdir()}
    with pytest.raises(FileExistsError, match="load_latest"):
        distributed.save(tmp_path, model, opt)
    assert {file.name: file.read_bytes() for file in path.iterdir()} == before


def test_half_an_update_is_refused_and_nothing_is_written(tmp_path):
    model, opt, _ = build()
    model(torch.ones(4, 3, dtype=torch.double)).sum().backward()
    with pytest.raises(RuntimeError, match="middle of an update"):
        distributed.save(tmp_path, model, opt)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("other", "message"),
    [({"micro_batch_size": 8}, "micro_batch_size=4"), ({"width": 6}, "[Ss]ize mismatch")],
    ids=["micro-batch", "shape"],
)
def test_the_checkpoint_of_another_run_is_refused_before_anything_changes(tmp_path, other, message):
    model, opt, _ = build()
    train(model, opt, 2)
    distributed.save(tmp_path, model, opt)
    stranger, opt2, _ = build(seed=1, **other)
    before = state(stranger, opt2)
    with pytest.raises((ValueError, RuntimeError), match=message):
        distributed.load_latest(tmp_path, stranger, opt2)
    assert all(torch.equal(a, b) for a, b in zip(before, state(stranger, opt2), strict=True))


def test_an_object_that_was_not_saved_is_named(tmp_path):
    model, opt, schedule = build()
    train(model, opt, 1)
    distributed.save(tmp_path, model, opt)
    with pytest.raises(RuntimeError, match="schedule"):
        distributed.load_latest(tmp_path, model, opt, schedule=schedule)


class Trap:
    """Pickles as a call of `open(path, "w")`: what an attacker would have run."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (self.path, "w")


class Trapped:
    def __init__(self, path):
        self.path = path

    def state_dict(self):
        return {"trap": Trap(self.path)}

    def load_state_dict(self, state_dict):
        raise AssertionError


def test_loading_runs_no_code(tmp_path):
    model, opt, _ = build()
    train(model, opt, 1)
    sprung = tmp_path / "sprung"
    distributed.save(tmp_path / "bytes", model, opt, other=Trapped(str(sprung)))
    with pytest.raises(RuntimeError, match="open"):
        distributed.load_latest(tmp_path / "bytes", model, opt, other=Trapped(str(sprung)))
    path = distributed.save(tmp_path / "metadata", model, opt)
    (path / ".metadata").write_bytes(pickle.dumps(Trap(str(sprung))))
    assert "open" in checkpoint.find_damage(path)
    assert not sprung.exists()


def test_a_checkpoint_may_be_moved(tmp_path):
    model, opt, _ = build()
    train(model, opt, 1)
    path = distributed.save(tmp_path / "here", model, opt)
    shutil.copytree(path, tmp_path / "there" / Path(path).name)
    assert distributed.load_latest(tmp_path / "there", model, opt) is not None


STEPS = ("mkdir", "fsync", "rename", "unlink", "rmdir")  # what save() asks of the file system, beside writing


def save_and_die(folder, model, opt, call):
    """Save in a child process that is killed before the given one of its `STEPS`; return whether it was."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of fork beside threads: the test runner's wait only
        child = os.fork()
    if child == 0:
        try:
            calls = count()

            def deadly(function):
                def step(*args, **kwargs):
                    if next(calls) == call:
                        os.kill(os.getpid(), signal.SIGKILL)
                    return function(*args, **kwargs)

                return step

            for name in STEPS:
                setattr(os, name, deadly(getattr(os, name)))
            distributed.save(folder, model, opt, keep=1)
        finally:
            os._exit(0)
    _, status = os.waitpid(child, 0)
    return os.WIFSIGNALED(status)


def test_a_writer_that_dies_at_any_step_leaves_the_old_checkpoint_or_the_new(tmp_path):
    model, opt, _ = build()
    train(model, opt, 1)
    first = distributed.save(tmp_path / "first", model, opt)
    train(model, opt, 1, 2)
    expected = state(model, opt)
    found = []
    for call in count():
        folder = tmp_path / str(call)
        shutil.copytree(first.parent, folder)
        killed = save_and_die(folder, model, opt, call)
        again, opt2, _ = build(seed=1)
        found.append(distributed.load_latest(folder, again, opt2).name)
        train(again, opt2, opt2.samples_seen // 4, 2)  # what the dead one had not saved
        assert all(torch.equal(a, b) for a, b in zip(expected, state(again, opt2), strict=True))
        if not killed:
            break
        if found[-1] == first.name:
            distributed.save(folder, again, opt2, keep=1)
        else:
            train(again, opt2, 2, 3)
            distributed.save(folder, again, opt2, keep=1)
        assert len(list(folder.iterdir())) == 1  # leftovers are gone
    assert len(found) > 6
    assert found == sorted(found)  # once the new one is there, it stays
    assert len(set(found)) == 2


def test_a_run_can_go_back_to_the_same_checkpoint_twice(tmp_path):
    model, opt, scheduler = build()
    train(model, opt, 3)
    distributed.save(tmp_path, model, opt, scheduler=scheduler)
    train(model, opt, 3, 6)
    ends = [[p.detach().clone() for p in model.parameters()]]
    opt.load_state_dict(opt.state_dict())  # torch adds keys of its own to what it loads
    for _ in range(2):
        distributed.load_latest(tmp_path, model, opt, scheduler=scheduler)
        train(model, opt, 3, 6)
        ends.append([p.detach().clone() for p in model.parameters()])
    torch.testing.assert_close(ends[1], ends[0], rtol=0, atol=0)
    torch.testing.assert_close(ends[2], ends[0], rtol=0, atol=0)
