from __future__ import annotations

import pytest
from rank_pool import RankPool


@pytest.fixture(scope="module")
def pool():
    pool = RankPool()
    yield pool
    pool.close()


EXACT = {"w": 1e-12, "m": 1e-12, "v": 1e-12, "counters": 1e-12, "samples": 0}

# Micro-batches of each rank, for five updates: as many, one, unequal, none on some rank, all on one.
EVEN = [[[0, 1], [2, 3]], [[4, 5], [6, 7]], [[8, 9], [10, 11]], [[12, 13], [14, 15]], [[16, 17], [18, 19]]]
UNEVEN = [[[1], [2, 3, 4]], [[], [5, 6]], [[7, 8, 9], []], [[3, 6], [9]], [[10], [11]]]


def check(answers, limits=EXACT):
    for found in answers:
        for key, limit in limits.items():
            assert found[key] <= limit, (key, found)
        assert found.get("same", True), found
        assert found.get("gradients", 0) == 0, found


@pytest.mark.parametrize("ddp", [False, True])
@pytest.mark.parametrize("updates", [EVEN, UNEVEN], ids=["even", "uneven"])
@pytest.mark.parametrize("how", [{}, {"expect": True}, {"last": True}], ids=["step", "expect", "last"])
def test_replicas_equal_one_process(pool, ddp, updates, how):
    check(pool.run("replicated", 2, updates=updates, ddp=ddp, **how))


def spread(world: int, each: int, updates: int = 5) -> list[list[list[int]]]:
    """Micro-batches for every rank, `each` per update."""
    return [[[(t * world + r) * each + i for i in range(each)] for r in range(world)] for t in range(updates)]


CLOSE = {"w": 1e-6, "m": 1e-6, "v": 1e-6, "counters": 1e-9, "samples": 0}


@pytest.mark.parametrize("fold", ["backward", "call"])
@pytest.mark.parametrize("world", [1, 2])
def test_fsdp_equals_one_process(pool, world, fold):
    for each in (1, 3):
        check(pool.run("fully_sharded", world, updates=spread(world, each), fold=fold), CLOSE)


def test_hsdp_equals_one_process(pool):
    answers = pool.run("fully_sharded", 4, updates=spread(4, 2), mesh=(2, 2))
    check(answers, CLOSE)
    whole = pool.run("fully_sharded", 1, updates=spread(1, 1))[0]["local"]
    assert max(found["local"] for found in answers) < 0.7 * whole


@pytest.mark.parametrize("fold", ["backward", "call"])
@pytest.mark.parametrize("updates", [EVEN, UNEVEN], ids=["even", "uneven"])
def test_sharded_state_equals_one_process(pool, updates, fold):
    check(pool.run("replicated", 2, updates=updates, prepare={"shard_state": True}, fold=fold))


@pytest.mark.parametrize("fold", ["backward", "call"])
@pytest.mark.parametrize("world", [1, 2])
def test_one_pass_under_fsdp_equals_one_process(pool, world, fold):
    for each in (1, 3):
        check(pool.run("fully_sharded", world, updates=spread(world, each), fold=fold, one_pass=True), CLOSE)


@pytest.mark.parametrize("how", [{}, {"ddp": True}, {"prepare": {"shard_state": True}}], ids=["plain", "ddp", "zero"])
def test_one_pass_of_replicas_equals_one_process(pool, how):
    for updates in (EVEN, UNEVEN):
        check(pool.run("replicated", 2, updates=updates, one_pass=True, **how))
