import pytest
from lab_runs import run

from invariant_adam.lab.runs import check


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model": "alexnet"}, "model must be one of"),
        ({"algorithm": "lion"}, "algorithm must be one of"),
        ({"rule": "cubic"}, "rule of invariant must be one of"),
        ({"batch_size": 15}, "must divide max_batch_size=20"),
        ({"micro_batch_size": 3}, "multiple of micro_batch_size=3"),
        ({"algorithm": "micro"}, "micro Adam's batch"),
        ({"lr0": 0.0}, "lr0 must be"),
        ({"epochs": 0}, "epochs must be at least 1"),
        ({"ramp": "5 to 20"}, "ramp must be two batch sizes"),
        ({"ramp": "5-20"}, "the first of them 20"),
    ],
)
def test_settings_are_refused_by_name(change, message):
    with pytest.raises(ValueError, match=message):
        check(run()._replace(**change))
