from __future__ import annotations

import os

import pytest
import torch
from hypothesis import settings

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # the kernels run on the CPU, slowly; before they are imported

collect_ignore = ["kernels/compile_for_chip.py"]  # a script, for a process where nothing is interpreted

settings.register_profile("default", deadline=None, max_examples=40, derandomize=True)
settings.load_profile("default")


@pytest.fixture(autouse=True)
def _the_same_every_time():
    """Whatever ran before: the same random weights; and one thread, on which tiny nets are faster and sums the same."""
    torch.manual_seed(0)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request):
    return request.param


@pytest.fixture
def setup(tmp_path):
    """How a small grid of the lab is run, into a folder of its own."""
    from invariant_adam_lab.grids.store import Setup

    return Setup(tmp_path, "vit-curves-smoke-e1-n40", "cpu", "made-up", small=True, made_up=True)
