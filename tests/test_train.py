import math

import pytest
import torch
import torch.nn.functional as F
from lab_runs import CPU, MAX, M, run, small_source

from invariant_adam.lab import train
from invariant_adam.lab.runs import TASKS, Run
from invariant_adam.lab.source import Source
from invariant_adam.lab.updates import Optimizer


@pytest.fixture(scope="module")
def sources() -> dict[str, Source]:
    return {model: small_source(model) for model in TASKS}


def losses(rows: list[train.Row]) -> list[float]:
    return [row["train_loss"] for row in rows]


def by_hand(settings: Run, source: Source, second: str, lr: float, betas: tuple[float, float]) -> list[float]:
    """The losses of a plain loop over micro-batches; `second` says what v gets."""
    model = train.make_model(settings, source)
    params = list(model.parameters())
    m, v = ([torch.zeros_like(p) for p in params] for _ in range(2))
    take = source.count // MAX * MAX
    found, t, B, kappa = [], 0, settings.batch_size, settings.batch_size // M
    for number in range(settings.epochs):
        total = 0.0
        for samples in zip(*(part.split(B) for part in source.epoch(0, number, 0, take)), strict=True):
            g, sq = ([torch.zeros_like(p) for p in params] for _ in range(2))
            for x, y in zip(*(part.split(M) for part in samples), strict=True):
                x, y = source.inputs((x, y))
                loss = F.cross_entropy(model(x), y, label_smoothing=TASKS[settings.model].smoothing)
                for i, part in enumerate(torch.autograd.grad(loss, params)):
                    g[i] += part / kappa
                    sq[i] += {"invariant": part**2 / kappa, "adama": (part / kappa) ** 2, "standard": 0 * part}[second]
                total += loss.item() * M / take
            t += 1
            with torch.no_grad():
                for i, p in enumerate(params):
                    square = g[i] ** 2 if second == "standard" else sq[i]
                    m[i] = betas[0] * m[i] + (1 - betas[0]) * g[i]
                    v[i] = betas[1] * v[i] + (1 - betas[1]) * square
                    p -= lr * (m[i] / (1 - betas[0] ** t)) / ((v[i] / (1 - betas[1] ** t)).sqrt() + 1e-8)
        found.append(total)
    return found


@pytest.mark.parametrize("model", ["resnet-ln", "vit"])
@pytest.mark.parametrize(
    ("algorithm", "rule", "batch", "second", "lr", "gammas"),
    [
        ("invariant", "linear", 10, "invariant", 0.5e-3, (0.05, 0.0005)),
        ("invariant", "exponential", 10, "invariant", 0.5e-3, (1 - 0.9**0.5, 1 - 0.999**0.5)),
        ("standard", "square_root", 10, "standard", math.sqrt(0.5) * 1e-3, (0.05, 0.0005)),
        ("standard", "linear", 5, "standard", 0.25e-3, (0.025, 0.00025)),
        ("accumulate", "square_root", 20, "standard", 1e-3, (0.1, 0.001)),
        ("micro", "linear", 5, "invariant", 0.25e-3, (0.025, 0.00025)),
        ("adama", "square_root", 10, "adama", math.sqrt(0.5) * 1e-3, (0.05, 0.0005)),
        ("halflife", "none", 10, "standard", 1e-3, (0.1, 1 - 0.999**0.5)),
    ],
)
def test_each_algorithm_is_its_formula(model, algorithm, rule, batch, second, lr, gammas, sources):
    settings = run(model, algorithm, rule, batch)
    rows = train.finish(train.train(settings, sources[model]))
    want = by_hand(settings, sources[model], second, lr, (1 - gammas[0], 1 - gammas[1]))
    assert losses(rows) == pytest.approx(want, rel=2e-4)
    assert rows[-1]["lr"] == pytest.approx(lr)
    assert [row["samples"] for row in rows] == [80, 160]
    assert [row["epoch"] for row in rows] == [1, 2]


@pytest.mark.parametrize("model", TASKS)
def test_one_pass_and_loop_agree(model, sources):
    settings = run(model, epochs=1)
    loop, one_pass = (
        train.finish(train.train(settings, sources[model], engine=engine))[0] for engine in ("loop", "one-pass")
    )
    for key in ("train_loss", "test_loss"):
        assert loop[key] == pytest.approx(one_pass[key], rel=1e-4)
    assert 0 <= loop["test_accuracy"] <= 1


@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # torch warns of itself while tracing
@pytest.mark.parametrize("model", TASKS)
@pytest.mark.parametrize(("algorithm", "rule"), [("invariant", "linear"), ("standard", "square_root")])
def test_compiled_runs_agree_with_eager_ones(model, algorithm, rule, sources):
    settings = run(model, algorithm, rule, 10, epochs=1)
    eager, compiled = (
        train.finish(train.train(settings, sources[model], compiled=compiled))[0] for compiled in (False, True)
    )
    for key in ("train_loss", "test_loss"):
        assert compiled[key] == pytest.approx(eager[key], rel=1e-4)


@pytest.mark.parametrize("model", TASKS)
def test_invariant_curves_are_closer_than_standard_ones(model, sources):
    gaps, source = {}, sources[model]
    for algorithm, rule in (("invariant", "linear"), ("standard", "square_root")):
        ends = [
            losses(train.finish(train.train(run(model, algorithm, rule, batch, lr0=3e-4, epochs=6), source)))[-1]
            for batch in (M, MAX)
        ]
        gaps[algorithm] = abs(math.log(ends[0] / ends[1]))
    assert gaps["invariant"] < 0.5 * gaps["standard"]


def test_evaluating_leaves_the_model_as_it_was(sources):
    model = train.make_model(run("resnet-bn"), sources["resnet-bn"])
    before = {name: value.clone() for name, value in model.state_dict().items()}
    loss, right = train.evaluate(model, sources["resnet-bn"]).tolist()
    assert loss > 0
    assert 0 <= right <= 1
    assert model.training
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_the_test_loss_is_not_smoothed(sources):
    source = sources["vit"]
    model = train.make_model(run("vit"), source)
    x, y = source.inputs((source.found.test_x, source.found.test_y))
    with torch.no_grad():
        want = F.cross_entropy(model.eval()(x), y).item()
    assert train.evaluate(model, source)[0].item() == pytest.approx(want, rel=1e-5)


def test_warm_up_gives_each_update_the_mean_over_its_samples(sources, monkeypatch):
    seen: dict[int, list[float]] = {}
    for batch in (M, MAX):
        factors = seen[batch] = []
        set_lr = Optimizer.set_lr

        def note(self, factor, factors=factors, set_lr=set_lr):
            factors.append(factor)
            set_lr(self, factor)

        monkeypatch.setattr(Optimizer, "set_lr", note)
        rows = train.finish(train.train(run(batch=batch, warmup_samples=60), sources["resnet-ln"]))
        monkeypatch.setattr(Optimizer, "set_lr", set_lr)
        assert rows[-1]["lr"] == pytest.approx(1e-3 * batch / MAX)
    assert seen[MAX][:4] == pytest.approx([10 / 60, 30 / 60, 50 / 60, 1.0])
    assert seen[M][0] == pytest.approx(2.5 / 60)
    assert sum(seen[M]) * M == pytest.approx(sum(seen[MAX]) * MAX)


@pytest.mark.parametrize(("algorithm", "rule"), [("invariant", "linear"), ("standard", "square_root")])
def test_a_ramp_is_the_small_batch_first_and_the_large_one_after(algorithm, rule, sources):
    settings = run(algorithm=algorithm, rule=rule, batch=M, epochs=4)
    constant = train.finish(train.train(settings, sources["resnet-ln"]))
    ramp = train.finish(train.train(settings._replace(ramp=f"{M}-{MAX}"), sources["resnet-ln"]))
    assert losses(ramp)[:2] == losses(constant)[:2]
    assert losses(ramp)[2:] != losses(constant)[2:]
    assert [row["lr"] for row in ramp][2:] == [1e-3, 1e-3]
    if algorithm == "invariant":
        assert losses(ramp)[2:] == pytest.approx(losses(constant)[2:], rel=5e-3)


def test_runs_that_take_turns_are_the_runs_alone(sources):
    wanted = [run("resnet-ln", batch=batch, epochs=epochs) for batch, epochs in ((M, 2), (MAX, 1), (10, 2))]
    alone = {settings: train.finish(train.train(settings, sources["resnet-ln"])) for settings in wanted}
    works = ((settings, train.train(settings, sources["resnet-ln"])) for settings in wanted)
    together = dict(train.lanes(works, 2, CPU))
    assert {k: losses(v) for k, v in together.items()} == {k: losses(v) for k, v in alone.items()}


def test_a_run_that_fails_leaves_the_others_alone(sources):
    good, bad = run(epochs=1), run(batch=7)
    works = ((settings, train.train(settings, sources["resnet-ln"])) for settings in (bad, good))
    outcome = dict(train.lanes(works, 2, CPU))
    assert isinstance(outcome[bad], ValueError)
    assert len(outcome[good]) == 1


def test_too_few_samples_are_refused(sources):
    with pytest.raises(ValueError, match="make no update"):
        train.finish(train.train(run(samples=10), sources["resnet-ln"]))


def test_epochs_are_heard_of_in_order(sources):
    heard: list[train.Row] = []
    rows = train.finish(train.train(run(epochs=3), sources["resnet-ln"], on_epoch=heard.append))
    assert heard == rows
    assert all(row["seconds"] > 0 for row in rows)


@pytest.mark.parametrize("engine", ["loop", "one-pass"])
def test_in_bfloat16_weights_stay_float32(engine, sources):
    source = small_source("vit", precision="bfloat16")
    reduced = losses(train.finish(train.train(run("vit"), source, engine=engine)))
    whole = losses(train.finish(train.train(run("vit"), sources["vit"], engine=engine)))
    assert reduced == pytest.approx(whole, rel=1e-2)
    assert reduced != whole
    assert {p.dtype for p in train.make_model(run("vit"), source).parameters()} == {torch.float32}


@pytest.mark.gpu
@pytest.mark.filterwarnings("default")  # torch warns of itself while tracing
@pytest.mark.parametrize("model", TASKS)
@pytest.mark.parametrize(("algorithm", "rule"), [("invariant", "linear"), ("standard", "square_root")])
@pytest.mark.parametrize("compiled", [False, True])
def test_graphs_give_the_runs_without_them(model, algorithm, rule, compiled):
    device = torch.device("cuda")
    source = small_source(model, device)
    settings = run(model, algorithm, rule, 10, warmup_samples=60)
    ways = {True: {"graphs": True, "compiled": compiled}, False: {"graphs": False}}
    works = ((graphs, train.train(settings, source, **how)) for graphs, how in ways.items())
    outcome = dict(train.lanes(works, 2, device))
    assert not any(isinstance(rows, Exception) for rows in outcome.values()), outcome
    assert losses(outcome[True]) == pytest.approx(losses(outcome[False]), rel=1e-2)
