import importlib
import inspect
import json
import re
from pathlib import Path

import pytest
import torch
from test_cli import python, run
from torch import nn

from invariant_adam import one_pass
from invariant_adam_lab.bench import memory as bench_memory
from invariant_adam_lab.bench import one_pass as bench_one_pass
from invariant_adam_lab.bench import step as bench_step
from invariant_adam_lab.bench import timing
from invariant_adam_lab.record import Rows, read_json, write_json

CPU = torch.device("cpu")
GPT = ["--model", "gpt-char", *(f"--set={s}" for s in ("context=6", "width=16", "heads=2", "depth=1", "vocab=11"))]
RESNET = ["--model", "resnet18", "--set=width=4", "--set=depths=1,1"]
SIZES = ["--batch", "4", "--micro-batch", "2"]
SMALL = ["--device", "cpu", *SIZES]
INTO = ["into"] if "into" in inspect.signature(one_pass).parameters else []
METHODS = ",".join(["plain", "accumulate", "loop", "one-pass", *INTO])


def bench(command, *arguments, out):
    result = run("bench", command, *arguments, "--json", "--out", str(out))
    assert result.exit_code == 0, result.output
    told = json.loads(result.stdout)
    assert told == json.loads(out.read_text())
    return told


@pytest.mark.parametrize("model", [GPT, RESNET])
@pytest.mark.slow
def test_one_pass_times_each_method_over_plain(tmp_path, model, device):
    how = ["--device", device, "--eager", "--precision", "float32", "--rounds", "2"]
    told = bench("one-pass", *model, *SIZES, *how, "--methods", METHODS, out=tmp_path / "rows.json")
    assert {"benchmark", "device", "torch", "triton", "python", "invariant_adam"} <= set(told)
    rows = told["rows"]
    assert [row["method"] for row in rows] == METHODS.split(",")
    assert [row["micro_batch"] for row in rows] == [None, 2, 2, 2, *(2 for _ in INTO)]
    for row in rows:
        assert row["ratio"] == pytest.approx(row["ms"] / row["plain_ms"], rel=0.01)
        assert row["of_gemm"] == pytest.approx(row["tflops"] / row["gemm_tflops"], rel=0.01, abs=1e-4)
        assert (row["rounds"], row["precision"], row["compiled"]) == (2, "float32", False)
        assert row["date"]
        assert row["code"]
        assert row["peak_gib"] > 0
        assert row["first_gib"] > 0
        assert ("where" in row) == (row["method"] not in bench_one_pass.LOOPS)
    assert rows[0]["ratio"] == 1


SPOILED = """
import torch

class Spoiled(torch.nn.Linear):
    left = 3  # updates that are numbers

    def forward(self, x):
        self.left -= 1
        return super().forward(x).square().mean() * (torch.nan if self.left < 0 else 1.0)

def make():
    return Spoiled(4, 2), lambda samples: (torch.randn(samples, 4),)
"""


def test_what_trains_no_more_is_not_timed(tmp_path, monkeypatch):
    (tmp_path / "spoiled_model.py").write_text(SPOILED)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    how = ["--model", "spoiled_model:make", "--methods", "accumulate", "--eager", "--rounds", "1"]
    result = run("bench", "one-pass", *SMALL, *how, "--out", str(tmp_path / "rows.json"))
    assert result.exit_code != 0
    (row,) = json.loads((tmp_path / "rows.json").read_text())["rows"]
    assert "the loss is nan: nothing is trained" in row["error"]


@pytest.mark.slow
def test_a_second_run_measures_only_what_is_missing(tmp_path):
    out = tmp_path / "rows.json"
    first = bench("one-pass", *GPT, *SMALL, "--methods", "plain,loop", "--rounds", "1", out=out)
    more = ["--micro-batch", "1", "--methods", "plain,loop,one-pass", "--rounds", "1"]
    second = bench("one-pass", *GPT, *SMALL, *more, out=out)
    assert second["rows"][:2] == first["rows"]
    added = [(row["method"], row["micro_batch"]) for row in second["rows"][2:]]
    assert added == [("one-pass", 2), ("loop", 1), ("one-pass", 1)]
    assert bench("one-pass", *GPT, *SMALL, *more, out=out) == second


def test_graphs_without_a_gpu_are_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = run("bench", "one-pass", *SMALL, "--model", "gpt-char", "--graph")
    assert result.exit_code != 0
    assert "--graph captures updates in CUDA graphs" in result.output
    assert not list(tmp_path.iterdir())


@pytest.mark.gpu
def test_graphs_are_timed_beside_a_graph(tmp_path):
    how = ["--device", "cuda", *SIZES, "--eager", "--graph", "--methods", "plain,one-pass,into", "--rounds", "1"]
    told = bench("one-pass", *GPT, *how, out=tmp_path / "rows.json")
    assert [row.get("error") for row in told["rows"]] == [None] * 3


@pytest.mark.slow
def test_rows_of_other_code_or_with_an_error_are_measured_again(tmp_path):
    out = tmp_path / "rows.json"
    told = bench("one-pass", *GPT, *SMALL, "--methods", "plain,loop", "--rounds", "1", out=out)
    told["rows"][0]["code"] = "other"
    told["rows"][1] = {k: v for k, v in told["rows"][1].items() if k != "ms"} | {"error": "RuntimeError: no memory"}
    write_json(out, told)
    again = bench("one-pass", *GPT, *SMALL, "--methods", "plain,loop", "--rounds", "1", out=out)
    assert [row["method"] for row in again["rows"]] == ["plain", "loop"]
    assert all("error" not in row and row["code"] != "other" for row in again["rows"])


def test_a_method_that_fails_is_a_row_and_the_others_go_on(tmp_path):
    out = tmp_path / "rows.json"
    # Batch norm over one value per channel: a micro-batch of one sample, of one pixel at the end.
    model = ["--model", "resnet18", "--set=width=2", "--set=depths=1,1,1,1,1,1"]
    small = ["--device", "cpu", "--batch", "4", "--micro-batch", "1", "--methods", "loop,plain", "--rounds", "1"]
    result = run("bench", "one-pass", *model, *small, "--out", str(out))
    assert result.exit_code == 1
    assert "Expected more than 1 value per channel" in result.output
    loop, plain = read_json(out)["rows"]
    assert loop["error"].startswith("ValueError: Expected more than 1 value")
    assert plain["ratio"] == 1


@pytest.mark.slow
def test_the_table_is_for_people(tmp_path):
    out = tmp_path / "rows.json"
    small = [*GPT, *SMALL, "--methods", "plain,one-pass", "--rounds", "1", "--out", str(out)]
    result = python("-m", "invariant_adam", "bench", "one-pass", *small)
    assert result.returncode == 0, result.stderr
    for text in ("gpt-char", "B = 4, float32, eager", "× plain", "one-pass", f"2 measured, 0 found; wrote {out}"):
        assert text in result.stdout
    assert "[2/2] gpt-char context=6 width=16" in result.stderr
    assert re.search(r"eager: one-pass, M 2, ms [\d.]+, × plain [\d.]+, TFLOP/s", result.stderr)


def test_step_times_kernels_and_updates(tmp_path, device):
    out = tmp_path / "rows.json"
    small = ["--device", device, "--tensors", "3x64", "--kappa", "1", "--kappa", "3", "--rounds", "2"]
    rows = bench("step", *small, "--work", "kernels,alone,handed,net", out=out)["rows"]
    found = {(row["work"], row["kappa"]): row for row in rows}
    assert {"copy", "fold", "step", "fold+step", "adamw"} <= {work for work, _ in found}
    assert {(work, kappa) for work in ("alone", "handed", "net") for kappa in (1, 3)} <= set(found)
    for row in rows:
        assert (row["parameters"], row["number"]) == (192, 3)
        assert row["ratio"] == pytest.approx(row["ms"] / row["adamw_ms"], rel=0.05)
    assert found["copy", None]["of_copy"] == 1
    again = bench("step", *small, "--kappa", "2", "--work", "alone", out=out)["rows"]
    assert again[: len(rows)] == rows
    assert [(row["work"], row["kappa"]) for row in again[len(rows) :]] == [("alone", 2)]


def test_memory_counts_four_tensors_for_an_accumulated_gradient_and_three_without(tmp_path, device):
    # Large matrices and few tokens, so that activations are small.
    wide = ["--model", "gpt-char", *(f"--set={s}" for s in ("context=4", "width=128", "heads=2", "depth=2"))]
    small = ["--device", device, "--batch", "4", "--micro-batch", "1", "--precision", "float32", "--methods", METHODS]
    rows = {row["method"]: row for row in bench("memory", *wide, *small, out=tmp_path / "rows.json")["rows"]}
    for method, tensors in {"plain": 4, "accumulate": 4, "loop": 3, "one-pass": 3, **dict.fromkeys(INTO, 3)}.items():
        row = rows[method]
        weights = 4 * row["parameters"]
        assert row["weight_bytes"] == weights
        assert row["tensors"] == pytest.approx(tensors, abs=0.01)
        assert row["held_bytes"] == pytest.approx((tensors - 1) * weights, rel=0.01)
        assert row["peak_bytes"] > weights + row["held_bytes"]
        assert row["bare_bytes"] > weights
    assert rows["loop"]["peak_bytes"] < rows["accumulate"]["peak_bytes"]


def test_memory_is_counted_to_the_byte():
    kept = []
    grown = bench_memory.growth(
        lambda: kept.append(torch.zeros(1000) + torch.zeros(1000)),  # two operands and a sum at once
        lambda: torch.zeros(250_000).sum(),
        CPU,
    )
    assert grown.between == 4000
    assert 1_004_000 <= grown.peak <= 1_004_000 + 64  # the sum is a scalar
    assert bench_memory.growth(lambda: None, lambda: None, CPU) == (0, 0)


def test_interleaved_calls_each_piece_of_work_as_often():
    calls = []
    work = {name: lambda name=name: calls.append(name) for name in "abc"}
    taken = timing.interleaved(work, CPU, rounds=4, warmup=2)
    assert sorted(calls) == sorted("abc" * 6)
    rounds = [calls[i : i + 3] for i in range(6, 18, 3)]
    assert all(sorted(one) == ["a", "b", "c"] for one in rounds)
    assert len(set(map(tuple, rounds))) > 1  # not always after the same one
    assert all(t.rounds == 4 and t.calls == 1 and t.best_ms <= t.ms for t in taken.values())


def test_short_work_is_repeated_until_the_round_is_full():
    slow = torch.randn(400, 400)
    taken = timing.interleaved({"slow": lambda: slow @ slow, "quick": lambda: None}, CPU, 2, round_ms=1.0)
    assert taken["quick"].calls == 50
    assert taken["slow"].calls < 50


def test_the_updates_that_are_timed_are_those_of_the_loop():
    options = {"context": 6, "width": 8, "heads": 2, "depth": 1, "vocab": 11}
    case = bench_one_pass.Case("gpt-char", 6, 2, "cpu", "float32", options=options)
    updates = {m: bench_one_pass.CaseStep(case, m) for m in METHODS.split(",")}
    for update in updates.values():
        start = nn.utils.parameters_to_vector(update.model.parameters()).detach().clone()
        for _ in range(3):
            update()
        update.moved = nn.utils.parameters_to_vector(update.model.parameters()).detach() - start
    for one, other in (("plain", "accumulate"), ("loop", "one-pass"), *(("loop", m) for m in INTO)):
        difference = (updates[one].moved - updates[other].moved).norm() / updates[one].moved.norm()
        assert difference < 1e-2, (one, other)
    assert (updates["plain"].moved - updates["loop"].moved).norm() > 0.1 * updates["plain"].moved.norm()


def test_flops_are_those_of_the_products():
    case = bench_one_pass.Case("gpt-char", 8, 2, "cpu", options={"context": 4, "width": 8, "heads": 2, "depth": 1})
    B, T, D, V = 8, 4, 8, 65
    linear = 2 * B * T * (3 * D * D + D * D + 8 * D * D + D * V)
    attention = 2 * 2 * B * T * T * D
    # Backward: twice the forward; attention's own product is computed again there.
    assert 3 * (linear + attention) <= bench_one_pass.model_flops(case) <= 3 * (linear + attention) + attention


def test_sizes_of_tensors():
    assert bench_step.sizes_of("100x1e7") == [10**7] * 100
    sizes = bench_step.sizes_of("gpt2-124m")
    assert (len(sizes), sum(sizes)) == (148, 124_439_808)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["one-pass", "--model", "gpt3"], "no --model is named 'gpt3'; there are gpt2-124m, "),
        (["one-pass", "--methods", "magic"], "--methods must be some of plain, accumulate, loop, one-pass, into, got"),
        (["one-pass", *GPT, "--set=colour=red"], "--set does not suit --model gpt-char: "),
        (["one-pass", *GPT, "--set=heads=3"], "--set: width=16 must be a multiple of heads=3; use heads=2"),
        (["one-pass", *GPT, "--set=heads"], "--set takes KEY=VALUE, such as depth=2, got 'heads'"),
        (
            ["one-pass", *GPT, "--batch", "6", "--micro-batch", "4"],
            "--micro-batch 4 does not divide --batch 6; use --batch 8 or --micro-batch 2",
        ),
        (["step", "--tensors", "many"], "--tensors must be the name of a model (gpt2-124m, "),
        (["step", "--tensors", "3x1.5"], "such as 100x1e7, got '3x1.5'"),
        (["step", "--work", "hard"], "--work must be some of kernels, alone, handed, net, got 'hard'"),
        (["step", "--tensors", "3x10", "--work", "net"], "use --tensors 3x9, or another --work"),
        (["memory", "--model", "gpt3"], "no --model is named 'gpt3'"),
        (["peers", "--nets", "rnn"], "--nets must be some of mlp, cnn, gpt, got 'rnn'"),
    ],
)
def test_a_wrong_argument_is_named_with_its_remedy(arguments, text):
    device = [] if arguments[0] == "peers" else ["--device", "cpu"]
    result = run("bench", *arguments, *device)
    assert result.exit_code == 2, result.output
    assert text in result.stderr
    assert not result.stdout


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_device_that_is_not_there():
    result = run("bench", "step", "--device", "cuda")
    assert result.exit_code == 2
    assert "--device cuda: torch sees no CUDA device here; use --device cpu" in result.stderr


def test_a_file_of_another_machine_or_command_is_not_added_to(tmp_path):
    out = tmp_path / "rows.json"
    rows = Rows(out, "invariant-adam bench step", "fold and step over torch.optim.AdamW(fused=True)", CPU)
    rows.add({"work": "fold"}, {"ms": 1.0})
    result = run("bench", "memory", *GPT, *SMALL, "--out", str(out))
    assert result.exit_code == 2
    assert "holds rows of benchmark = fold and step" in result.stderr
    write_json(out, {**rows.result(), "device": "NVIDIA H200"})
    result = run("bench", "step", "--device", "cpu", "--out", str(out))
    assert result.exit_code == 2
    assert "holds rows of device = NVIDIA H200, and here it is" in result.stderr
    out.write_text("[]")
    result = run("bench", "step", "--device", "cpu", "--out", str(out))
    assert result.exit_code == 2
    assert "is not a result of this command; choose another file" in result.stderr


def test_a_file_that_cannot_be_written_is_named_before_anything_is_measured(tmp_path):
    (tmp_path / "file").write_text("")
    out = tmp_path / "file" / "rows.json"
    result = run("bench", "step", "--device", "cpu", "--out", str(out))
    assert result.exit_code == 2
    assert f"cannot write to --out {out}" in " ".join(result.stderr.split())
    left = tmp_path / "new" / "rows.json"
    Rows(left, "a command", "a benchmark", CPU)
    assert not left.exists()


@pytest.mark.slow
def test_peers_compares_and_writes(tmp_path):
    out = tmp_path / "bench.json"
    options = ["--nets", "mlp", "--rounds", "1", "--no-memory", "--json", "--out", str(out)]
    result = python("-m", "invariant_adam", "bench", "peers", *options)
    assert re.search(r"\[16/16\] mlp, M = 16, ours: [\d.]+ ms, [\d.]+ × plain, exact", result.stderr), result.stderr
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout) == json.loads(out.read_text())
    ours = [c for c in json.loads(result.stdout)["cells"] if c["method"] == "ours"]
    assert [c["M"] for c in ours] == [1, 4, 16]
    assert all(c["exact"] for c in ours)


def test_a_kernel_of_a_step_belongs_to_one_part(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    shares = importlib.import_module("shares")
    adam = "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<at::native::TensorListMetadata>"
    for name, model, part in (
        (adam, "gpt2-124m", "moments"),
        ("_fold_one", "vit-b16", "moments"),
        ("_finish_statistics", "resnet18", "batch norm"),
        ("_finish_gradients", "resnet18", "batch norm"),
        ("_finish_gradients", "vit-b16", "small"),
        ("_finish", "resnet18", "squares of products"),
        ("_finish", "gpt2-124m", "small"),
        ("triton_poi_fused_add_0", "gpt2-124m", "rest"),
    ):
        assert shares.part_of(name, model) == part, (name, model)
