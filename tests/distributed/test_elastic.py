import pytest
from test_faults import run


@pytest.mark.slow
@pytest.mark.parametrize(("mode", "close"), [("ddp", 1e-12), ("fsdp2", 1e-5)])  # float64; float32, which FSDP2 needs
def test_a_run_that_loses_and_gains_nodes_stays_on_the_trajectory_of_one_process(tmp_path, mode, close):
    result = run(tmp_path, "elastic", "--mode", mode)
    assert [row["ranks"] for row in result["rows"]] == [4, 2, 3]
    starts = [row["from"] for row in result["rows"]]
    assert starts == sorted(starts)
    assert starts[0] == 0 < starts[1]
    assert result["damaged"] == []
    assert result["samples"] == result["samples_alone"]
    for key in ("weights", "exp_avg", "exp_avg_sq"):
        assert result[key] <= close, key  # what is left is the order of sums
    assert result["loss"] == pytest.approx(result["loss_alone"], abs=2e-6)
