"""Checkpoints that are whole or absent, and that any number of ranks can read.

A folder holds one directory per checkpoint, named after the samples seen. It is written aside by
`torch.distributed.checkpoint` (each rank its own shards), flushed to the disk, and renamed into place: whenever a
process dies, what has the name of a checkpoint is one. The ranks of a run must share the folder's file system.
"""

from __future__ import annotations

import os
import pickle
import re
import secrets
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load as read_checkpoint
from torch.distributed.checkpoint.state_dict_saver import save as write_checkpoint
from torch.distributed.checkpoint.stateful import Stateful

from ..optimizer import InvariantAdam
from ..unwrap import unwrap
from .wire import lost_rank_named

T = TypeVar("T")
Folder = str | os.PathLike[str]
Group = dist.ProcessGroup | None
_NAME = re.compile(r"samples-(\d{12,})")


def save(
    folder: Folder,
    model: nn.Module,
    optimizer: InvariantAdam,
    *,
    keep: int = 2,
    process_group: Group = None,
    **others: Stateful,
) -> Path:
    """Write a checkpoint of the run after an update, on all ranks together; return its directory.

    When it returns, the checkpoint is on the disk and whole. A process that dies earlier leaves what was there before.

    Args:
        folder: where the run keeps its checkpoints; made if need be, and shared by all ranks.
        model: the model, plain or wrapped (DDP, FSDP2).
        optimizer: its optimizer, between updates.
        keep: how many checkpoints stay, this one included; older ones are removed afterwards.
        process_group: the ranks that save; by default all.
        others: more objects with a `state_dict()`, under names to load them by (`scheduler=scheduler`): a schedule, a
            weight average, a sampler. It holds tensors, numbers, strings, and lists and dicts of them.

    >>> import tempfile
    >>> folder = tempfile.mkdtemp()
    >>> model = nn.Linear(2, 1)
    >>> opt = InvariantAdam(model.parameters(), micro_batch_size=4)
    >>> model(torch.ones(4, 2)).sum().backward()
    >>> opt.step()
    >>> save(folder, model, opt).name
    'samples-000000000004'
    >>> load_latest(folder, model, opt).name
    'samples-000000000004'
    """
    if keep < 1:
        raise ValueError(f"keep={keep} checkpoints would remove the one that is being written; give 1 or more")
    optimizer = unwrap(optimizer)
    state = _state(model, optimizer, others)  # refuses in mid-update, before anything is written
    root = Path(folder)
    name = f"samples-{optimizer.samples_seen:012d}"
    aside = _on_first(lambda: _begin(root, name), process_group)
    with _together(f"cannot write {root / name}"):
        # Each rank flushes its own files.
        write_checkpoint(state, storage_writer=FileSystemWriter(aside), process_group=process_group)
    return _on_first(lambda: _publish(aside, root / name, keep), process_group)


def load_latest(
    folder: Folder, model: nn.Module, optimizer: InvariantAdam, *, process_group: Group = None, **others: Stateful
) -> Path | None:
    """Load the latest whole checkpoint into model and optimizer; return its directory, or None where there is none.

    The ranks may be more or fewer than those that saved, and the model wrapped otherwise. Loading runs no code from
    the files (`weights_only=True`).

    Args:
        folder: where the run keeps its checkpoints.
        model: the model, built and wrapped as for training.
        optimizer: its optimizer; its hyperparameters become the checkpoint's.
        process_group: the ranks that load; by default all.
        others: the objects that were saved beside them, under the same names.
    """
    path = _on_first(lambda: latest(folder), process_group)
    if path is None:
        return None
    optimizer = unwrap(optimizer)
    state = _state(model, optimizer, others)
    # In place, as torch loads: so the one refusal that torch does not make beforehand is made here.
    head: dict[str, Any] = {"micro_batch_size": None}
    _read(path, {"optimizer": {"param_groups": [head]}}, process_group)
    size = head["micro_batch_size"]
    if size != optimizer.micro_batch_size:
        raise ValueError(
            f"{path} was saved with micro_batch_size={size}, and this optimizer has {optimizer.micro_batch_size}: its "
            f"v is at the scale of its own micro-batch; build InvariantAdam with micro_batch_size={size}"
        )
    _read(path, state, process_group)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    for name, other in others.items():
        other.load_state_dict(state[name])
    return path


def latest(folder: Folder) -> Path | None:
    """Return the directory of the latest checkpoint in `folder` that is whole, or None.

    What a dying process left is never seen; one that was damaged later (a copy cut short, a file lost) is passed over
    with a warning.
    """
    for path in reversed(_checkpoints(Path(folder))):
        damage = find_damage(path)
        if damage is None:
            return path
        warnings.warn(f"passing over the checkpoint {path}: {damage}", RuntimeWarning, stacklevel=2)
    return None


def find_damage(path: Path) -> str | None:
    """Return what is missing from a checkpoint's directory, or None when all files are there at their full length."""
    try:
        metadata = _Reader(path).read_metadata()
    except FileNotFoundError:
        return "its .metadata, which is written last, is missing"
    except (OSError, EOFError, pickle.UnpicklingError, AttributeError) as error:
        return f"its .metadata cannot be read: {error}"
    ends: dict[str, int] = {}
    for item in metadata.storage_data.values():
        ends[item.relative_path] = max(ends.get(item.relative_path, 0), item.offset + item.length)
    for name, end in ends.items():
        if not (path / name).exists():
            return f"its file {name} is missing"
        if (size := (path / name).stat().st_size) < end:
            return f"its file {name} has {size} of {end} bytes"
    return None


def _state(model: nn.Module, optimizer: InvariantAdam, others: Mapping[str, Stateful]) -> dict[str, Any]:
    """What is saved, by name: tensors are those of the run itself, not copies."""
    weights, moments = get_state_dict(model, optimizer)
    return {"model": weights, "optimizer": moments, **{name: dict(x.state_dict()) for name, x in others.items()}}


def _read(path: Path, state: dict[str, Any], group: Group) -> None:
    with _together(f"cannot load {path}; build model, optimizer and the other objects as they were when it was saved"):
        read_checkpoint(state, storage_reader=_Reader(path), planner=_Planner(), process_group=group)


# ---------------------------------------------------------------------- files


def _checkpoints(root: Path) -> list[Path]:
    """The checkpoints in a folder, oldest first."""
    found = [(int(match[1]), path) for path in root.glob("samples-*") if (match := _NAME.fullmatch(path.name))]
    return [path for _, path in sorted(found)]


def _begin(root: Path, name: str) -> Path:
    """Make an empty directory to write to, and clear away those that were never finished."""
    if (root / name).exists():
        raise FileExistsError(
            f"{root / name} exists already: another run saves to this folder, or this one did not start from its "
            "latest checkpoint; call load_latest() before training, or choose another folder"
        )
    root.mkdir(parents=True, exist_ok=True)
    for old in root.glob(".samples-*"):
        shutil.rmtree(old, ignore_errors=True)
    # A name of its own: a process of an earlier start that is still dying cannot write into it.
    aside = root / f".{name}.{secrets.token_hex(4)}"
    aside.mkdir()
    return aside


def _publish(aside: Path, path: Path, keep: int) -> Path:
    """Give a written checkpoint its name, for good; then remove the oldest."""
    damage = find_damage(aside)
    if damage is not None:
        raise RuntimeError(
            f"the checkpoint that was to become {path} is not whole: {damage}. Is the folder on a file system that all "
            "ranks share?"
        )
    _flush(aside)
    os.rename(aside, path)
    _flush(path.parent)
    for old in _checkpoints(path.parent)[:-keep]:
        # Its name goes first, so that no half of it is ever taken for a checkpoint.
        gone = old.with_name(f".{old.name}.{secrets.token_hex(4)}")
        os.rename(old, gone)
        shutil.rmtree(gone, ignore_errors=True)
    return path


def _flush(directory: Path) -> None:
    """Have the disk keep the names in a directory."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# ---------------------------------------------------------------------- ranks


@contextmanager
def _together(failed: str) -> Iterator[None]:
    """Let torch save or load on all ranks, or in a single process, which it warns of.

    Its own exception is not an `Exception`: what a user catches around a save would let it pass.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled, unavailable or uninitialized", UserWarning)
        try:
            with lost_rank_named("saving or loading a checkpoint"):
                yield
        except CheckpointException as error:
            causes = sorted({f"{type(cause).__name__}: {cause}" for cause, _ in error.failures.values()})
            raise RuntimeError(f"{failed}: {'; '.join(causes)}") from error


def _on_first(action: Callable[[], T], group: Group) -> T:
    """Do something on the first rank alone, and let all have its result or its error."""
    if not dist.is_initialized():
        return action()
    first = dist.get_global_rank(group, 0) if group is not None else 0
    answer: list[Any] = [None, None]
    failure: Exception | None = None
    if dist.get_rank() == first:
        try:
            answer[0] = action()
        except Exception as error:
            failure, answer[1] = error, f"{type(error).__name__}: {error}"
    with lost_rank_named("saving or loading a checkpoint"):
        dist.broadcast_object_list(answer, src=first, group=group)
    if answer[1] is not None:
        raise failure or RuntimeError(f"rank {first} could not go on: {answer[1]}")
    return cast(T, answer[0])


# ---------------------------------------------------------------------- reading data, never code


_HARMLESS = {
    ("collections", "OrderedDict"),
    ("pathlib", "PosixPath"),
    ("pathlib._local", "PosixPath"),  # Python 3.13's name for it
    ("torch.serialization", "_get_layout"),
}


class _Vetted(pickle.Unpickler):
    """Reads a .metadata file, and refuses whatever torch's own does not contain."""

    def find_class(self, module: str, name: str) -> Any:
        own = ("torch.distributed.checkpoint.metadata", "torch.distributed.checkpoint.filesystem")
        found = getattr(torch, name, None) if module == "torch" else None
        data = found is torch.Size or isinstance(found, (torch.dtype, torch.layout))
        if module in own or data or (module, name) in _HARMLESS:
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it asks for {module}.{name}, which no checkpoint needs")


class _Reader(FileSystemReader):
    """torch's reader, once the .metadata is known to be data."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Any:
        for path in [Path(self.path) / ".metadata", *Path(self.path).glob("__*.metadata")]:
            with path.open("rb") as file:
                _Vetted(file).load()
        return super().read_metadata(*args, **kwargs)


class _Planner(DefaultLoadPlanner):
    """torch's planner, once what is no tensor is known to be data: torch unpickles it without looking."""

    def load_bytes(self, read_item: ReadItem, value: BytesIO) -> None:
        torch.load(value, weights_only=True)
        value.seek(0)
        super().load_bytes(read_item, value)
