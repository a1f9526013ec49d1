"""The passes in C: threads, versions, and what happens without a compiler."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from invariant_adam.kernels import adam
from invariant_adam.kernels.adam import native

pytestmark = pytest.mark.skipif(native.library() is None, reason="no C compiler")
FOLD = {"keep": (0.9, 0.99), "gain": (0.3, 0.02)}
STEP = {"size": 0.25, "eps": 0.1, "decay": 0.5}


@pytest.mark.parametrize("threads", [1, 2, 3, 7])
def test_threads_share_the_elements_of_all_tensors(threads):
    sizes = [5, 70_001, 0, 1, 130_000, 17, 33_000]
    w, g, m, v = ([torch.rand(n, dtype=torch.float64) for n in sizes] for _ in range(4))
    g[1][::1000] = torch.nan
    count = torch.tensor(0)
    clean = [x.nan_to_num() for x in g]
    expected_m = [0.9 * a + 0.3 * b for a, b in zip(m, clean, strict=True)]
    expected_v = [0.99 * a + 0.02 * b * b for a, b in zip(v, clean, strict=True)]
    expected_w = [0.5 * a - 0.25 * b / (c.sqrt() + 0.1) for a, b, c in zip(w, expected_m, expected_v, strict=True)]
    torch.set_num_threads(threads)  # conftest.py sets it back
    native.fold_step(w, g, None, m, v, **FOLD, **STEP, count=count)
    assert count.item() == 71
    torch.testing.assert_close([w, m, v], [expected_w, expected_m, expected_v], rtol=1e-14, atol=1e-15)


def test_what_is_written_in_place_says_so():
    w, g, m, v = ([torch.rand(4)] for _ in range(4))
    w[0].requires_grad_()
    loss = w[0].square().sum()
    with torch.no_grad():
        native.fold(g, None, m, v, **FOLD, count=torch.tensor(0))
        native.step(w, m, v, **STEP)
    assert m[0]._version == v[0]._version == w[0]._version == 1
    assert g[0]._version == 0
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_gradients_of_16_bits_and_odd_layouts_are_folded_all_the_same():
    for g in (torch.rand(4, 6).bfloat16(), torch.rand(6, 4).t(), torch.rand(8, 6)[::2]):
        m, v, count = torch.zeros(4, 6), torch.zeros(4, 6), torch.tensor(0)
        adam.fold([g], None, [m], [v], keep=(1.0, 1.0), gain=(1.0, 1.0), count=count)
        torch.testing.assert_close([m, v], [g.float(), g.float().square()])


WHICH = "from invariant_adam.kernels.adam import native; print(native.library() is not None)"


@pytest.mark.parametrize(
    ("environment", "built"),
    [({}, True), ({"INVARIANT_ADAM_NATIVE": "0"}, False), ({"PATH": "/nowhere"}, False), ({"CC": "false"}, False)],
    ids=["as is", "switched off", "no compiler", "a broken compiler"],
)
def test_a_machine_without_a_compiler_goes_without_a_word(tmp_path, environment, built):
    where = {**os.environ, "INVARIANT_ADAM_CACHE": str(tmp_path / "new"), **environment}
    done = subprocess.run([sys.executable, "-W", "error", "-c", WHICH], env=where, capture_output=True, text=True)
    assert (done.stdout, done.stderr) == (f"{built}\n", "")
    left = [file.suffix for file in (tmp_path / "new").glob("*")]
    assert left == ([".so"] if built else [])
