"""Real processes that run cases of distributed training on gloo: started once, fed one case after another."""

from __future__ import annotations

import contextlib
import datetime
import importlib
import multiprocessing
import os
import shutil
import tempfile
import traceback
from pathlib import Path
from typing import Any


def _work(rank: int, pipe: Any) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    while True:
        task = pipe.recv()
        if task is None:
            os._exit(0)  # gloo may abort in its teardown
        name, world, store, kwargs = task
        try:
            dist.init_process_group(
                "gloo",
                init_method=f"file://{store}",
                rank=rank,
                world_size=world,
                timeout=datetime.timedelta(seconds=60),
            )
            case = getattr(importlib.import_module("rank_cases"), name)
            result = case(**kwargs)
            dist.barrier()
            pipe.send((True, result))
        except BaseException:
            pipe.send((False, f"rank {rank} of {world}:\n{traceback.format_exc()}"))
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()


class RankPool:
    """Up to four ranks; `run` gives a case to the first `world` of them and returns what each returned."""

    def __init__(self) -> None:
        self.workers: list[tuple[Any, Any]] = []
        self.folder = Path(tempfile.mkdtemp())
        self.runs = 0

    def _grow(self, world: int) -> None:
        self.folder.mkdir(exist_ok=True)
        context = multiprocessing.get_context("spawn")
        while len(self.workers) < world:
            ours, theirs = context.Pipe()
            process = context.Process(target=_work, args=(len(self.workers), theirs), daemon=True)
            process.start()
            theirs.close()
            self.workers.append((process, ours))

    def run(self, name: str, world: int, **kwargs: Any) -> list[Any]:
        self._grow(world)
        self.runs += 1
        store = self.folder / f"store{self.runs}"
        pipes = [pipe for _, pipe in self.workers[:world]]
        for pipe in pipes:
            pipe.send((name, world, str(store), kwargs))
        answers = []
        for rank, pipe in enumerate(pipes):
            try:
                answers.append(pipe.recv() if pipe.poll(150) else (False, f"rank {rank} of {world} is silent"))
            except EOFError:
                answers.append((False, f"rank {rank} of {world} died"))
        wrong = [answer for fine, answer in answers if not fine]
        if wrong:
            self.close()
            raise AssertionError("\n".join(wrong))
        return [answer for _, answer in answers]

    def close(self) -> None:
        for process, pipe in self.workers:
            with contextlib.suppress(OSError):
                pipe.send(None)
            process.join(5)
            if process.is_alive():
                process.kill()
        self.workers = []
        shutil.rmtree(self.folder, ignore_errors=True)
