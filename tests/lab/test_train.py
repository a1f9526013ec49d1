import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from lab_runs import CPU, MAX, M, run, small_source

from invariant_adam.schedules import warmup_cosine
from invariant_adam_lab.results.curves import SAME_AT_M
from invariant_adam_lab.training import source as lab_source
from invariant_adam_lab.training import train
from invariant_adam_lab.training.runs import RECIPES, RULES, Run
from invariant_adam_lab.training.source import Source
from invariant_adam_lab.training.updates import Epoch, ScaledOptimizer


@pytest.fixture(scope="module")
def sources() -> dict[str, Source]:
    return {model: small_source(model) for model in RECIPES}


def losses(rows: list[train.Row]) -> list[float]:
    return [row["train_loss"] for row in rows]


def by_hand(settings: Run, source: Source, second: str, at: Callable[[int], tuple[float, float, float]]) -> list[float]:
    """The losses of a plain loop over micro-batches; `second` says what v gets, `at` lr, γ₁ and γ₂ at a batch size."""
    model = train.make_model(settings, source)
    params = list(model.parameters())
    m, v = ([torch.zeros_like(p) for p in params] for _ in range(2))
    take = source.count // MAX * MAX
    found, zero = [], [1.0, 1.0]  # the weight that m and v still give to the zero they began with
    for number in range(settings.epochs):
        total, sizes = 0.0, settings.update_sizes(number, take)
        for samples in zip(*(part.split(sizes) for part in source.epoch(0, number, 0, take)), strict=True):
            kappa, (lr, *gammas) = len(samples[0]) // M, at(len(samples[0]))
            g, sq = ([torch.zeros_like(p) for p in params] for _ in range(2))
            for x, y in zip(*(part.split(M) for part in samples), strict=True):
                x, y = source.inputs((x, y))
                loss = F.cross_entropy(model(x), y, label_smoothing=RECIPES[settings.model].smoothing)
                for i, part in enumerate(torch.autograd.grad(loss, params)):
                    g[i] += part / kappa
                    sq[i] += {"invariant": part**2 / kappa, "adama": (part / kappa) ** 2, "standard": 0 * part}[second]
                total += loss.item() * M / take
            zero = [P * (1 - gamma) for P, gamma in zip(zero, gammas, strict=True)]
            with torch.no_grad():
                for i, p in enumerate(params):
                    square = g[i] ** 2 if second == "standard" else sq[i]
                    m[i] = (1 - gammas[0]) * m[i] + gammas[0] * g[i]
                    v[i] = (1 - gammas[1]) * v[i] + gammas[1] * square
                    p -= lr * (m[i] / (1 - zero[0])) / ((v[i] / (1 - zero[1])).sqrt() + 1e-8)
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
    want = by_hand(settings, sources[model], second, lambda B: (lr, *gammas))
    assert losses(rows) == pytest.approx(want, rel=2e-4)
    assert rows[-1]["lr"] == pytest.approx(lr)
    assert [row["samples"] for row in rows] == [80, 160]
    assert [row["epoch"] for row in rows] == [1, 2]


@pytest.mark.parametrize(("algorithm", "rule"), [("invariant", "linear"), ("standard", "square_root")])
def test_a_run_that_grows_in_scales_every_update_by_its_own_size(algorithm, rule, sources):
    settings = run("resnet-ln", algorithm, rule, MAX, grow=0.3)
    sizes = settings.update_sizes(0, 80)
    assert len(set(sizes)) > 2
    power = 0.5 if rule == "square_root" else 1.0

    def at(B: int) -> tuple[float, float, float]:
        return 1e-3 * (B / MAX) ** power, 0.1 * B / MAX, 0.001 * B / MAX

    want = by_hand(settings, sources["resnet-ln"], algorithm, at)
    rows = train.finish(train.train(settings, sources["resnet-ln"]))
    assert losses(rows) == pytest.approx(want, rel=2e-4)


def test_growing_in_brings_the_largest_batch_nearer_to_one_micro_batch(sources):
    def end(batch: int, grow: float) -> float:
        settings = run("gpt", batch=batch, grow=grow, epochs=4, lr0=3e-3)
        return math.log(train.finish(train.train(settings, sources["gpt"]))[-1]["end_train_loss"])

    base = end(M, 0.0)
    assert end(M, 0.1) == base
    assert abs(end(MAX, 0.1) - base) < 0.7 * abs(end(MAX, 0.0) - base)


@pytest.mark.parametrize("model", RECIPES)
def test_the_loss_at_the_end_is_of_a_fixed_part_that_is_not_augmented(model, sources, monkeypatch):
    monkeypatch.setattr(lab_source, "FIXED_IMAGES", 17)
    monkeypatch.setattr(lab_source, "FIXED_SEQUENCES", 17)
    source, settings = sources[model], run(model, samples=40, epochs=1, lr0=1e-30)  # the weights do not move
    row = train.finish(train.train(settings, source))[-1]
    net = train.make_model(settings, source).eval()
    whole = source.found.ids[: 17 * 32 + 1].long() if model.startswith("gpt") else None
    samples = (source.found.x[:17], source.found.y[:17]) if whole is None else (whole.unfold(0, 33, 32),)
    x, y = source.inputs(samples)
    if model != "resnet-bn":  # whose statistics move with the forward passes
        with torch.no_grad():
            want = F.cross_entropy(net(x).flatten(0, -2), y.flatten()).item()
        assert row["end_train_loss"] == pytest.approx(want, rel=1e-4)
    assert math.isfinite(row["end_train_loss"])


def test_an_order_moves_micro_batches_inside_of_blocks_of_the_largest_batch(sources):
    source = sources["resnet-ln"]

    def epoch(order: int) -> torch.Tensor:
        held = Epoch(source, run(batch=M, order=order), 80)
        held.begin(1)
        return held.samples[0].flatten(1)

    usual, one, other = (epoch(order).view(80 // MAX, MAX // M, -1) for order in (0, 1, 2))
    for moved in (one, other):
        for before, after in zip(usual, moved, strict=True):
            assert sorted(map(bytes, before.numpy())) == sorted(map(bytes, after.numpy()))
        assert not torch.equal(usual, moved)
    assert not torch.equal(one, other)
    rows = [train.finish(train.train(run(batch=M, order=order), source)) for order in (0, 1)]
    assert losses(rows[0]) != losses(rows[1])
    assert losses(rows[0]) == pytest.approx(losses(rows[1]), rel=0.1)


@pytest.mark.parametrize("model", RECIPES)
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
@pytest.mark.parametrize("model", RECIPES)
@pytest.mark.parametrize(("algorithm", "rule"), [("invariant", "linear"), ("standard", "square_root")])
def test_compiled_runs_agree_with_eager_ones(model, algorithm, rule, sources):
    settings = run(model, algorithm, rule, 10, epochs=1)
    eager, compiled = (
        train.finish(train.train(settings, sources[model], compiled=compiled))[0] for compiled in (False, True)
    )
    for key in ("train_loss", "test_loss"):
        assert compiled[key] == pytest.approx(eager[key], rel=1e-4)


@pytest.mark.parametrize("model", RECIPES)
@pytest.mark.slow
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


@pytest.mark.parametrize("model", RECIPES)
def test_the_test_loss_is_the_mean_over_all_test_samples_without_smoothing(model, sources, monkeypatch):
    monkeypatch.setattr(lab_source, "TEST_BATCH", 16)  # 30 images are 16 and 14
    source = sources[model]
    net = train.make_model(run(model), source)
    loss, right = train.evaluate(net, source).tolist()
    if model.startswith("gpt"):
        ids = source.found.test_ids.long()
        samples = [(ids[i : i + 32][None], ids[i + 1 : i + 33]) for i in range(0, len(ids) - 32, 32)]
    else:
        x = (source.found.test_x.float() / 255 - source.mean) / source.std
        samples = [(x[i : i + 1], y.view(1)) for i, y in enumerate(source.found.test_y)]
    terms, hits = [], []
    net.eval()
    with torch.no_grad():
        for x, y in samples:
            logits = net(x).double().view(len(y), -1)
            terms += [(row.exp().sum().log() - row[answer]).item() for row, answer in zip(logits, y, strict=True)]
            hits += [row.argmax() == answer for row, answer in zip(logits, y, strict=True)]
    assert loss == pytest.approx(math.fsum(terms) / len(terms), rel=1e-5)
    assert right == pytest.approx(sum(hits).item() / len(hits))


@pytest.mark.parametrize("model", RECIPES)
def test_a_seed_gives_its_own_weights(model, sources):
    def weights(seed: int) -> torch.Tensor:
        torch.rand(1)  # what the program draws before does not matter
        drawn = train.make_model(run(model, seed=seed), sources[model])
        return torch.cat([p.flatten() for p in drawn.parameters() if p.dim() > 1]).detach()

    first, again, other = map(weights, (0, 0, 1))
    assert torch.equal(first, again)
    assert (first != other).double().mean() > 0.9


def test_warm_up_gives_each_update_the_mean_over_its_samples(sources, monkeypatch):
    seen: dict[int, list[float]] = {}
    for batch in (M, MAX):
        factors = seen[batch] = []
        set_lr = ScaledOptimizer.set_lr

        def note(self, factor, factors=factors, set_lr=set_lr):
            factors.append(factor)
            set_lr(self, factor)

        monkeypatch.setattr(ScaledOptimizer, "set_lr", note)
        rows = train.finish(train.train(run(batch=batch, warmup_samples=60), sources["resnet-ln"]))
        monkeypatch.setattr(ScaledOptimizer, "set_lr", set_lr)
        assert rows[-1]["lr"] == pytest.approx(1e-3 * batch / MAX)
    assert seen[MAX][:4] == pytest.approx([10 / 60, 30 / 60, 50 / 60, 1.0])
    assert seen[M][0] == pytest.approx(2.5 / 60)
    assert sum(seen[M]) * M == pytest.approx(sum(seen[MAX]) * MAX)


@pytest.mark.parametrize(
    ("algorithm", "rule", "power"),
    [
        ("invariant", "linear", 1.0),
        ("standard", "square_root", 0.5),
        ("accumulate", "linear", 1.0),
        ("adama", "square_root", 0.5),
        ("adama", "linear", 1.0),
    ],
)
@pytest.mark.parametrize("sizes", [(M, MAX), (MAX, M)])
def test_a_ramp_is_one_batch_size_first_and_the_other_after(algorithm, rule, power, sizes, sources):
    settings, source = run(algorithm=algorithm, rule=rule, batch=sizes[0], epochs=4), sources["resnet-ln"]
    constant = train.finish(train.train(settings, source))
    settings = settings._replace(ramp="{}-{}".format(*sizes))
    ramp = train.finish(train.train(settings, source))
    assert losses(ramp)[:2] == losses(constant)[:2]
    assert [row["lr"] for row in ramp] == pytest.approx([1e-3 * (B / MAX) ** power for B in sizes for _ in range(2)])

    def at(B: int) -> tuple[float, float, float]:
        return 1e-3 * (B / MAX) ** power, 0.1 * B / MAX, 0.001 * B / MAX

    want = by_hand(settings, source, "standard" if algorithm == "accumulate" else algorithm, at)
    assert losses(ramp) == pytest.approx(want, rel=2e-4)
    if algorithm == "invariant":
        assert losses(ramp)[2:] == pytest.approx(losses(constant)[2:], rel=5e-3)


@pytest.mark.parametrize(("algorithm", "rule"), [("standard", "none"), ("invariant", "long_momentum")])
def test_a_tuned_run_has_a_warm_up_and_a_cosine_in_samples(algorithm, rule, sources):
    """The learning rate of an update is the schedule's mean over its samples, at every batch size."""
    schedule = warmup_cosine(8, 160, floor=0.1)  # 5 % of two epochs of 80 samples
    for batch in (M, MAX):
        rows = train.finish(train.train(run("resnet-ln", algorithm, rule, batch, tuned=M), sources["resnet-ln"]))
        lr = 1e-3 * (1 if rule == "none" else batch / M)
        last = [lr * schedule.mean(end - batch, end) for end in (80, 160)]
        assert [row["lr"] for row in rows] == pytest.approx(last)


@pytest.mark.parametrize("rule", ["linear", "square_root", "exponential"])
@pytest.mark.parametrize("warmup", [0, 30])
def test_of_one_micro_batch_all_algorithms_with_a_rule_are_one(rule, warmup, sources):
    """So that a run of one stands for those of the others; but not for one whose β₁ is another."""

    def curve(algorithm: str, rule: str) -> list[float]:
        settings = run("gpt", algorithm, rule, M, warmup_samples=warmup, lr0=1e-2)
        return [row[key] for row in train.finish(train.train(settings, sources["gpt"])) for key in ("lr", "test_loss")]

    names = [name for name in RULES if rule in RULES[name]]
    assert set(names) == {name for name in SAME_AT_M if rule in RULES[name]}
    first, *others = (curve(name, rule) for name in names)
    for other in others:
        assert other == pytest.approx(first, rel=2e-6)  # float32; 2e-7 seen
    assert curve("halflife", "none")[1::2] != pytest.approx(first[1::2], rel=1e-3)


@pytest.mark.parametrize("model", ["resnet-ln", "gpt"])
@pytest.mark.parametrize("batch", [M, 10, MAX])
def test_adama_is_invariant_adam_at_another_learning_rate(model, batch, sources):
    """Its v is invariant Adam's over κ: η = √(B/B_max)·η₀/√κ_max makes steps of √κ·η = B/B_max·η₀."""
    invariant = run(model, batch=batch)
    adama = run(model, "adama", "square_root", batch, lr0=1e-3 / math.sqrt(MAX / M))
    one, other = (train.finish(train.train(settings, sources[model])) for settings in (invariant, adama))
    for key in ("train_loss", "test_loss"):  # float32; 2e-7 seen
        assert [row[key] for row in other] == pytest.approx([row[key] for row in one], rel=2e-6)


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


def test_a_run_whose_weights_are_no_numbers_ends_there(sources):
    heard: list[train.Row] = []
    settings = run("resnet-ln", "standard", "square_root", epochs=4, lr0=1e30)
    updates = sum(1 for _ in train.train(settings, sources["resnet-ln"], on_epoch=heard.append))
    assert [row["epoch"] for row in heard] == [1, 2, 3, 4]
    assert all(math.isnan(row[loss]) for row in heard for loss in ("train_loss", "test_loss"))
    assert [row["seconds"] > 0 for row in heard] == [True, False, False, False]
    assert updates < 2 * (sources["resnet-ln"].count // MAX)


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
@pytest.mark.parametrize("model", RECIPES)
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
