import math

import pytest
import torch
import torch.nn.functional as F

from invariant_adam.lab import data, train
from invariant_adam.lab.train import Run

CPU = torch.device("cpu")
M, MAX = 5, 20
TEXT = "".join(chr(97 + (i * i + i // 7) % 17) for i in range(4_000))


@pytest.fixture(scope="module")
def sources() -> dict[str, train.Source]:
    images = data.synthetic(90, 30)
    return {
        model: train.load(model, CPU, small=True, found=data.encode(TEXT) if model == "gpt" else images)
        for model in train.TASKS
    }


def run(model: str = "resnet-ln", algorithm: str = "invariant", rule: str = "linear", batch: int = MAX, **more) -> Run:
    settings = {"micro_batch_size": M, "max_batch_size": MAX, "lr0": 1e-3, "seed": 0, "epochs": 2, "small": True}
    return Run(model, algorithm, rule, batch, **{**settings, **more})


def losses(rows: list[train.Row]) -> list[float]:
    return [row["train_loss"] for row in rows]


def by_hand(settings: Run, source: train.Source, second: str, lr: float, betas: tuple[float, float]) -> list[float]:
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
                loss = F.cross_entropy(model(x), y, label_smoothing=train.TASKS[settings.model].smoothing)
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


@pytest.mark.parametrize("model", train.TASKS)
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
@pytest.mark.parametrize("model", train.TASKS)
@pytest.mark.parametrize(("algorithm", "rule"), [("invariant", "linear"), ("standard", "square_root")])
def test_compiled_runs_agree_with_eager_ones(model, algorithm, rule, sources):
    settings = run(model, algorithm, rule, 10, epochs=1)
    eager, compiled = (
        train.finish(train.train(settings, sources[model], compiled=compiled))[0] for compiled in (False, True)
    )
    for key in ("train_loss", "test_loss"):
        assert compiled[key] == pytest.approx(eager[key], rel=1e-4)


@pytest.mark.parametrize("model", train.TASKS)
def test_invariant_curves_are_closer_than_standard_ones(model, sources):
    gaps, source = {}, sources[model]
    for algorithm, rule in (("invariant", "linear"), ("standard", "square_root")):
        ends = [
            losses(train.finish(train.train(run(model, algorithm, rule, batch, lr0=3e-4, epochs=6), source)))[-1]
            for batch in (M, MAX)
        ]
        gaps[algorithm] = abs(math.log(ends[0] / ends[1]))
    assert gaps["invariant"] < 0.5 * gaps["standard"]


def test_every_run_sees_the_same_samples_in_the_same_order(sources):
    source = sources["vit"]
    first = source.epoch(0, 1, 0, 80)
    assert first[0].shape == (80, 3, 32, 32)
    source.epoch(0, 0, 0, 80)  # drops what was kept
    again = source.epoch(0, 1, 0, 80)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    fewer = source.epoch(0, 1, 40, 40)
    assert set(fewer[1].tolist()) <= set(range(10))
    assert not torch.equal(first[0], source.epoch(1, 1, 0, 80)[0])


def test_sequences_follow_each_other(sources):
    source = sources["gpt"]
    (x,) = source.epoch(3, 0, 0, source.count)
    assert x.shape == (source.count, source.context + 1)
    whole = data.encode(TEXT)
    text = "".join(whole.vocab[i] for i in whole.ids.tolist())
    for row in x[:5].tolist():
        assert "".join(whole.vocab[i] for i in row) in text
    starts = {text.find("".join(whole.vocab[i] for i in row)) % source.context for row in x.tolist()}
    assert len(starts) < source.count  # all cut at the same places, up to repetitions in the text


def test_the_test_set_is_all_there(sources):
    assert sum(len(y) for _, y in sources["vit"].test()) == 30
    model = train.make_model(run("resnet-bn"), sources["resnet-bn"])
    before = {name: value.clone() for name, value in model.state_dict().items()}
    loss, right = train.evaluate(model, sources["resnet-bn"]).tolist()
    assert loss > 0
    assert 0 <= right <= 1
    assert model.training
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_warm_up_gives_each_update_the_mean_over_its_samples(sources, monkeypatch):
    seen: dict[int, list[float]] = {}
    for batch in (M, MAX):
        factors = seen[batch] = []
        set_lr = train.Optimizer.set_lr

        def note(self, factor, factors=factors, set_lr=set_lr):
            factors.append(factor)
            set_lr(self, factor)

        monkeypatch.setattr(train.Optimizer, "set_lr", note)
        rows = train.finish(train.train(run(batch=batch, warmup_samples=60), sources["resnet-ln"]))
        monkeypatch.setattr(train.Optimizer, "set_lr", set_lr)
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
        train.check(run()._replace(**change))


def test_too_few_samples_are_refused(sources):
    with pytest.raises(ValueError, match="make no update"):
        train.finish(train.train(run(samples=10), sources["resnet-ln"]))
    with pytest.raises(ValueError, match="longer text"):
        train.load("gpt", CPU, small=True, found=data.encode("abc" * 20))


def test_epochs_are_heard_of_in_order(sources):
    heard: list[train.Row] = []
    rows = train.finish(train.train(run(epochs=3), sources["resnet-ln"], on_epoch=heard.append))
    assert heard == rows
    assert all(row["seconds"] > 0 for row in rows)


def test_the_loss_is_the_papers(sources):
    source = sources["vit"]
    x, y = source.epoch(0, 0, 0, 80)
    model = train.make_model(run("vit"), source)
    inputs, target = source.inputs((x[:20], y[:20]))
    wanted = (x[:20].double() / 255 - source.mean) / source.std
    assert torch.allclose(inputs.double(), wanted, atol=1e-6)
    logits = model(inputs)
    loss = train.loss_of(logits, target, 0.1)
    log = logits.double().log_softmax(1)
    by_formula = -(0.9 * log[torch.arange(20), y[:20]] + 0.1 * log.mean(1)).mean()
    assert loss.item() == pytest.approx(by_formula.item(), rel=1e-5)
    assert train.accuracy(logits, target).item() == (logits.argmax(1) == y[:20]).double().mean().item()


@pytest.mark.parametrize("engine", ["loop", "one-pass"])
def test_in_bfloat16_weights_stay_float32(engine, sources):
    source = train.load("vit", CPU, small=True, found=sources["vit"].found, precision="bfloat16")
    reduced = losses(train.finish(train.train(run("vit"), source, engine=engine)))
    whole = losses(train.finish(train.train(run("vit"), sources["vit"], engine=engine)))
    assert reduced == pytest.approx(whole, rel=1e-2)
    assert reduced != whole
    assert {p.dtype for p in train.make_model(run("vit"), source).parameters()} == {torch.float32}


def test_a_captured_update_has_made_its_first_three(sources):
    """On a CPU nothing is captured, but the first updates are made in the same place, each prepared for its samples."""
    source = sources["resnet-ln"]
    settings = run(batch=10)
    model = train.make_model(settings, source)
    optimizer = train.Optimizer(settings, model, CPU)
    epoch = train.Epoch(source, settings, 80)
    epoch.begin(0)
    prepared: list[int] = []
    update = train.Update(settings, model, optimizer, source, epoch, "loop")
    train._captured(update, prepared.append, 160)
    assert prepared == [160, 170, 180]
    assert epoch.place.item() == 30
    assert optimizer.inner.samples_seen == 30


@pytest.mark.gpu
def test_one_micro_batch_is_torchs_adam_on_a_gpu():
    device = torch.device("cuda")
    source = train.load("vit", device, small=True, found=data.synthetic(90, 30))
    settings = run("vit", "invariant", "linear", M)
    model = train.make_model(settings, source)
    assert isinstance(train.Optimizer(settings, model, device).inner, torch.optim.Adam)


@pytest.mark.gpu
@pytest.mark.filterwarnings("default")  # torch warns of itself while tracing
@pytest.mark.parametrize("model", train.TASKS)
@pytest.mark.parametrize(("algorithm", "rule"), [("invariant", "linear"), ("standard", "square_root")])
@pytest.mark.parametrize("compiled", [False, True])
def test_graphs_give_the_runs_without_them(model, algorithm, rule, compiled):
    device = torch.device("cuda")
    found = data.encode(TEXT) if model == "gpt" else data.synthetic(90, 30)
    source = train.load(model, device, small=True, found=found)
    settings = run(model, algorithm, rule, 10, warmup_samples=60)
    ways = {True: {"graphs": True, "compiled": compiled}, False: {"graphs": False}}
    works = ((graphs, train.train(settings, source, **how)) for graphs, how in ways.items())
    outcome = dict(train.lanes(works, 2, device))
    assert not any(isinstance(rows, Exception) for rows in outcome.values()), outcome
    assert losses(outcome[True]) == pytest.approx(losses(outcome[False]), rel=1e-2)
