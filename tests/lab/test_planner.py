import json
import math
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_cli import app, run
from typer.testing import CliRunner

from invariant_adam_lab.planner import TunedRun, grown_updates, plan, read_config

TUNED = ["scale", "--lr", "3e-4", "--betas", "0.9", "0.95", "--from", "512"]
TRAINER = {
    "learning_rate": 3e-4,
    "adam_beta1": 0.9,
    "adam_beta2": 0.95,
    "weight_decay": 0.1,
    "per_device_train_batch_size": 16,
    "gradient_accumulation_steps": 4,
    "world_size": 8,
    "max_steps": 2000,
    "warmup_ratio": 0.1,
    "lr_scheduler_type": "cosine",
    "report_to": ["tensorboard"],
}


def told(*arguments):
    result = run(*arguments, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def test_the_values_are_those_of_the_rule_and_the_share_is_that_of_an_update():
    found = told(*TUNED, "--to", "4096,512", "--weight-decay", "0.1")
    small, large = found["rows"]
    assert (small["batch"], small["kappa"], small["lr"], small["betas"]) == (512, 1, 3e-4, [0.9, 0.95])
    assert (large["kappa"], large["rho"], large["lr"]) == (8, 8.0, pytest.approx(2.4e-3))
    assert large["betas"] == pytest.approx([0.9**8, 0.95**8])
    assert large["shares"] == pytest.approx([1 - 0.9**8, 1 - 0.95**8])
    assert large["weight_decay"] == pytest.approx((1 - (1 - 3e-5) ** 8) / 2.4e-3)


def test_a_large_share_is_warned_of_with_the_batch_size_that_has_none():
    (warning,) = told(*TUNED, "--to", "4096")["warnings"]
    assert warning.startswith("at B = 4,096 an update is 57% of m.")
    assert "stay at or below 3,072 samples, or tune with a larger beta1" in warning
    assert told(*TUNED, "--to", "3072")["warnings"] == []
    assert told(*TUNED, "--to", "128", "--micro-batch", "32")["warnings"] == []


def test_the_example_of_the_help_text_warns_of_nothing():
    example = "invariant-adam scale --lr 3e-4 --betas 0.9 0.95 --from 512 --to 1024,2048"
    assert example in " ".join(run("--help").output.split())
    assert told(*example.split()[1:])["warnings"] == []


def test_updates_and_warm_up_are_counted_with_growing_in():
    run = TunedRun(3e-4, batch=64, samples=64_000, warmup=6_400)
    as_tuned, larger = plan(run, [64, 512]).rows
    assert (as_tuned.updates, as_tuned.warmup_updates, as_tuned.growth_updates) == (1000, 100, 0)
    assert larger.updates == 125 + larger.growth_updates
    assert larger.warmup_updates == math.ceil(100 / 8) + larger.growth_updates
    whole = plan(run, [512], grow=False).rows[0]
    assert (whole.updates, whole.growth_updates) == (125, 0)
    assert plan(run._replace(samples=100), [512]).rows[0].updates == 2  # still growing: one micro-batch, then the rest


@given(kappa=st.integers(1, 300))
def test_no_grown_update_is_larger_than_a_tenth_of_what_was_seen_nor_crosses_a_mini_batch(kappa):
    updates, seen = grown_updates(kappa), 0
    for size in updates:
        assert size <= max(1, seen / 10)
        assert seen // kappa == (seen + size - 1) // kappa
        seen += size
    assert seen % kappa == 0
    assert kappa == 1 or seen >= 10 * kappa  # from here on a whole mini-batch is small enough


def test_time_and_the_noise_scale():
    run = TunedRun(3e-4, batch=100, samples=3_600_000, samples_per_second=1000.0)
    assert [row.hours for row in plan(run, [100, 200]).rows] == pytest.approx([1, 0.5])
    rows = plan(run._replace(noise_scale=300.0), [100, 300, 900])
    assert [row.needs for row in rows.rows] == pytest.approx([1, 2 / (4 / 3), 4 / (4 / 3)])
    assert [row.hours for row in rows.rows] == pytest.approx([1, 1.5 / 3, 3 / 9])
    assert any(warning.startswith("B = 900 is past the noise scale, 300 samples") for warning in rows.warnings)


@pytest.mark.parametrize("form", ["json", "yaml"])
def test_a_trainers_arguments(tmp_path, form):
    pytest.importorskip("yaml")
    path = tmp_path / f"args.{form}"
    text = "\n".join(f"{key}: {value}" for key, value in TRAINER.items())
    path.write_text(json.dumps(TRAINER) if form == "json" else text.replace("0.0003", "3e-4"))  # a word in YAML
    assert read_config(path) == {
        "lr": 3e-4, "betas": (0.9, 0.95), "weight_decay": 0.1, "batch": 512, "samples": 1_024_000, "warmup": 102_400,
    }  # fmt: skip
    found = told("scale", "--from-config", str(path), "--to", "1024", "--lr", "1e-3")
    assert (found["tuned"]["lr"], found["tuned"]["batch"]) == (1e-3, 512)  # an option wins
    assert found["rows"][0]["warmup_updates"] == 100 + 10


def test_a_pickle_is_never_opened(tmp_path):
    class Trap:
        def __reduce__(self):
            return (tmp_path.joinpath("sprung").touch, ())

    for name in ("training_args.bin", "args.json"):
        path = tmp_path / name
        path.write_bytes(pickle.dumps(Trap()))
        result = run("scale", "--from-config", str(path))
        assert result.exit_code == 2
        assert f"--from-config {path} is no" in result.stderr
    assert (
        "json.dump(args.to_dict(), file)" in run("scale", "--from-config", str(tmp_path / "training_args.bin")).stderr
    )
    assert not (tmp_path / "sprung").exists()


@pytest.mark.parametrize("noise", [[], ["--noise-scale", "3000", "--samples-per-second", "1e3"]])
def test_the_tables_fit_80_columns(noise):
    more = ["--samples", "1000000000", "--warmup", "20000000", "--weight-decay", "0.1", *noise]
    result = CliRunner().invoke(app, [*TUNED, "--micro-batch", "8", *more], env={"COLUMNS": "80"})
    assert result.exit_code == 0, result.output
    assert max(map(len, result.output.splitlines())) <= 80
    assert "…" not in result.output


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (
            [*TUNED, "--to", "4096", "--micro-batch", "48"],
            "--micro-batch 48 does not divide --to 4096: an update is a whole number of micro-batches; "
            "use --to 4080 or 4128, or --micro-batch 16",
        ),
        ([*TUNED, "--to", "4096", "--micro-batch", "8192"], "use --to 8192, or --micro-batch 4096"),
        ([*TUNED, "--micro-batch", "0"], "--micro-batch must be at least 1 sample, got 0"),
        ([*TUNED, "--to", "0"], "--to must be at least 1 sample, got 0"),
        ([*TUNED, "--to", "many"], "--to must be whole numbers with commas between them, got 'many'"),
        (
            [*TUNED, "--to", "8192", "--rule", "linear"],
            'rule="linear" needs rho*(1-beta1) < 1, got 1.6 at batch size 8192 (tuned at 512); use rule="exponential"',
        ),
        ([*TUNED, "--weight-decay", "-1"], "weight_decay must be a finite number of at least 0, got -1"),
        ([*TUNED, "--noise-scale", "0"], "--noise-scale must be a finite number above 0, got 0"),
        (["scale", "--from", "512"], "--lr is needed: the value at which the run was tuned"),
        (["scale", "--from-config", "nowhere.json"], "--from-config nowhere.json cannot be read: No such file"),
    ],
)
def test_a_wrong_argument_is_named_with_its_remedy(arguments, text):
    result = run(*arguments)
    assert result.exit_code == 2
    assert text in result.stderr
    assert not result.stdout


def test_a_file_that_says_something_else(tmp_path):
    path = tmp_path / "args.json"
    for content, text in (
        ("[1]", "must hold names and values, and holds a list"),
        ('{"lr": "fast"}', "lr must be a number, got 'fast'"),
        ('{"betas": 0.9}', "betas must be two numbers, got 0.9"),
        ('{"max_steps": true}', "max_steps must be a number, got True"),
    ):
        path.write_text(content)
        with pytest.raises(ValueError, match=text.replace("'", ".")):
            read_config(path)


def test_default_batch_sizes_are_those_that_the_rule_allows():
    tuned = TunedRun(3e-4, (0.9, 0.95), batch=64)
    assert [row.batch for row in plan(tuned, rule="linear").rows] == [64, 128, 256, 512]
    assert [row.batch for row in plan(tuned).rows][-1] == 2048


def test_a_run_shorter_than_an_update_is_refused():
    with pytest.raises(ValueError, match="--samples must be at least the 512 of one update"):
        plan(TunedRun(3e-4, (0.9, 0.95), batch=512, samples=10))
