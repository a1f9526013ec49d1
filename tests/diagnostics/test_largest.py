"""The largest invariant learning rate and batch size: a bracket, at a cost that is told beforehand."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import invariant_adam as ia

X = torch.randn(512, 6, generator=torch.Generator().manual_seed(0))
Y = X.sum(1).gt(0).long()


def search(**options):
    asked = {"batch_size": 16, "micro_batch_size": 4, "low": 1e-4, "high": 1.0, "resolution": 10, "samples": 224}
    return ia.largest_invariant_lr(
        lambda: nn.Sequential(nn.Linear(6, 12), nn.LayerNorm(12), nn.GELU(), nn.Linear(12, 2)),
        lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]),
        (X, Y),
        **(asked | options),
    )


def test_the_bracket_holds_the_crossing_and_costs_no_more_than_was_told():
    told = []
    planned = search(dry_run=True)
    assert planned.tried == {}
    assert planned.cost == "at most 8 runs of 224 samples, 1,792 samples in all"
    found = search(progress=lambda *news: told.append(news))
    assert found.tried[found.passes] <= found.threshold < found.tried[found.fails]
    assert found.fails / found.passes == pytest.approx(10)
    assert told[0][1] == planned.runs * planned.samples
    assert told[-1][0] == 2 * len(found.tried) * 224 <= planned.runs * planned.samples
    assert f"between {found.passes:g}, which is invariant, and {found.fails:g}, which is not" in str(found)


def test_a_range_that_holds_no_crossing_is_told():
    assert search(high=1e-3).fails is None
    assert search(low=0.3, high=3.0).passes is None


def test_the_batch_size_can_be_searched():
    found = search(vary="batch_size", lr=0.03, batch_size=24, samples=None, low=1e-9)
    assert found.passes is None or found.passes in (8, 16, 24)
    assert set(found.tried) <= {8, 16, 24}
    assert found.runs == 4
    assert search(vary="batch_size", lr=1e-5).passes == 16


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"vary": "betas"}, 'vary must be "lr" or "batch_size"'),
        ({"lr": 1e-3}, "lr=0.001 is what is searched"),
        ({"vary": "batch_size"}, 'vary="batch_size" needs lr'),
        ({"low": 1.0, "high": 0.1}, "0 < low < high"),
        ({"resolution": 1.0}, "resolution must be a ratio above 1"),
        ({"batch_size": 6}, "multiples of micro_batch_size = 4"),
    ],
)
def test_what_cannot_be_searched_is_refused_by_name(options, message):
    with pytest.raises(ValueError, match=message):
        search(**options)
