"""The context manager: what it leaves, what it restores, what it refuses, and what it works
with."""

from __future__ import annotations

import copy
import gc
import weakref
from concurrent.futures import ThreadPoolExecutor
from threading import Event

import pytest
import torch
import torch.nn.functional as F
from loop_oracle import assert_exact, loop
from problems import failing
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from invariant_adam import InvariantAdam
from invariant_adam.fold import pair
from invariant_adam.one_pass import UnsupportedUse, one_pass
from invariant_adam.one_pass.exchange import Open

B, T, D, V = 8, 6, 16, 11
# torch warns about its own internals while it traces.
TRACING = pytest.mark.filterwarnings("default")


class Net(nn.Module):
    """Attention, a tied head, a raw linear, a raw product and a raw position table, with
    checkpoints on request."""

    def __init__(self, reentrant: bool | None = None, dropout: float = 0.0) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.emb, self.pos = nn.Embedding(V, D), nn.Parameter(torch.randn(T, D) * 0.1)
        self.enc = nn.TransformerEncoderLayer(D, 2, 32, dropout, batch_first=True)
        self.w, self.b = nn.Parameter(torch.randn(D, D) / 4), nn.Parameter(torch.zeros(D))
        self.mm = nn.Parameter(torch.randn(D, D) / 4)
        self.l1, self.ln, self.head = nn.Linear(D, D), nn.LayerNorm(D), nn.Linear(D, V)
        self.head.weight = self.emb.weight

    def body(self, x: Tensor) -> Tensor:
        x = self.enc(x)
        return self.ln(x + F.gelu(self.l1(F.gelu(F.linear(x, self.w, self.b)))))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.emb(ids) + self.pos[: ids.shape[1]]
        x = self.body(x) if self.reentrant is None else checkpoint(self.body, x, use_reentrant=self.reentrant)
        return self.head(x @ self.mm)


def loss(model: nn.Module, batch: tuple) -> Tensor:
    return F.cross_entropy(model(batch[0]).flatten(0, 1).float(), batch[1].flatten())


def exact_loss(model: nn.Module, batch: tuple) -> Tensor:
    return F.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())


@pytest.fixture
def batch() -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    return torch.randint(V, (B, T)), torch.randint(V, (B, T))


def mean_square(model: nn.Module, batch: tuple) -> Tensor:
    return model(batch[0]).square().mean()


@pytest.mark.parametrize("M", [1, 2])
def test_checkpointing_without_reentry(batch, M: int) -> None:
    assert_exact(Net(False).double(), batch, exact_loss, M)


def test_reentrant_checkpointing(batch) -> None:
    model = Net(True).double()
    judge = copy.deepcopy(model)
    judge.reentrant = None
    want = loop(judge, batch, exact_loss, 2, B)
    with one_pass(model, 2):
        exact_loss(model, batch).backward()
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.grad_sq, want[name][1], rtol=1e-9, atol=1e-15)


def test_reentrant_checkpoints_that_share_a_layer_are_refused() -> None:
    layer = nn.Linear(4, 4)

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inp, self.layer = nn.Linear(4, 4), layer

        def forward(self, x: Tensor) -> Tensor:
            x = self.inp(x)
            for _ in range(2):
                x = checkpoint(self.layer, x, use_reentrant=True)
            return x

    model = Twice()
    with pytest.raises(UnsupportedUse, match=r"layer\.weight.*squared 2 times"), one_pass(model, 1):
        mean_square(model, (torch.randn(4, 4),)).backward()
    assert all(p.grad is None and type(p) is nn.Parameter for p in model.parameters())


@pytest.mark.parametrize("reentrant", [None, False])
def test_autocast(batch, reentrant: bool | None) -> None:
    def reduced(model: nn.Module, batch: tuple) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return loss(model, batch)

    assert_exact(Net(reentrant), batch, reduced, 2, tol=3e-2)


@TRACING
@pytest.mark.parametrize("reentrant", [None, False])
def test_compile_is_one_graph_without_recompiles(batch, reentrant: bool | None) -> None:
    torch._dynamo.reset()
    from torch._dynamo.utils import counters

    counters.clear()
    model = Net(reentrant).double()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    for step in range(5):
        torch.manual_seed(step)
        assert_exact(model, (torch.randint(V, (B, T)), batch[1]), exact_loss, 2, run=compiled)
    assert counters["stats"]["unique_graphs"] == 1
    assert not counters["graph_break"]


@TRACING
def test_compile_batch_norm() -> None:
    torch._dynamo.reset()
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 2)).double()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    for _ in range(2):
        assert_exact(model, (torch.randn(B, 3, 6, 6, dtype=torch.float64),), mean_square, 4, run=compiled)


@TRACING
def test_compiled_model_must_be_the_one_that_is_passed() -> None:
    torch._dynamo.reset()
    model = nn.Linear(3, 2)
    compiled = torch.compile(model, backend="aot_eager")
    with pytest.raises(UnsupportedUse, match=r"give one_pass what torch\.compile returned"), one_pass(model, 1):
        compiled(torch.randn(4, 3)).sum().backward()
    assert type(model.weight) is nn.Parameter


@TRACING
def test_a_model_compiled_in_place(batch) -> None:
    """`model.compile()`, after which hooks of the model are traced with it."""
    torch._dynamo.reset()
    from torch._dynamo.utils import counters

    counters.clear()
    model = Net().double()
    model.compile(fullgraph=True, backend="aot_eager")
    for M in (2, B, 2):
        before = counters["stats"]["unique_graphs"]
        assert_exact(model, batch, exact_loss, M)
    assert counters["stats"]["unique_graphs"] == before


def test_sum_reduction() -> None:
    torch.manual_seed(0)
    model = nn.Linear(3, 2).double()
    x = torch.randn(B, 3, dtype=torch.float64)
    with one_pass(model, 2, reduction="sum"):
        model(x).square().sum().backward()
    shares = [torch.autograd.grad(model(x[k : k + 2]).square().sum(), model.weight)[0] for k in range(0, B, 2)]
    torch.testing.assert_close(model.weight.grad, torch.stack(shares).mean(0))
    torch.testing.assert_close(model.weight.grad_sq, torch.stack(shares).square().mean(0))


def test_token_weights_make_a_padded_mean_exact(batch) -> None:
    ids, targets = batch
    model = Net().double()
    lengths = torch.tensor([6, 2, 3, 5, 1, 1, 4, 6])
    mask = (torch.arange(T) < lengths[:, None]).double()

    def padded(model: nn.Module, b: tuple) -> Tensor:
        each = F.cross_entropy(model(b[0]).flatten(0, 1), b[1].flatten(), reduction="none")
        return (each * b[2].flatten()).sum() / b[2].sum()

    with one_pass(model, 2, weights=mask):
        padded(model, (ids, targets, mask)).backward()
    # Each micro-batch's own mean over its tokens, weighed by its tokens.
    params = list(model.parameters())
    total, square = [0.0] * len(params), [0.0] * len(params)
    for k in range(0, B, 2):
        part = (ids[k : k + 2], targets[k : k + 2], mask[k : k + 2])
        share = part[2].sum() / mask.sum()
        for i, g in enumerate(torch.autograd.grad(padded(model, part), params)):
            total[i] = total[i] + share * g
            square[i] = square[i] + share * g.square()
    for p, g, s in zip(params, total, square, strict=True):
        torch.testing.assert_close(p.grad, g, rtol=1e-9, atol=1e-13)
        torch.testing.assert_close(p.grad_sq, s, rtol=1e-9, atol=1e-13)


@pytest.mark.parametrize("samples", [8, 7, 2])
def test_a_usual_weight_makes_micro_batches_independent_of_each_other(batch, samples) -> None:
    """The gradient of micro-batch k is that of its sum over n̄, a ragged one's over n̄ n/M, whatever the others weigh."""
    ids, targets = (t[:samples] for t in batch)
    model, usual = Net().double(), 7.0
    mask = (torch.arange(T) < torch.tensor([6, 2, 3, 5, 1, 1, 4, 6])[:samples, None]).double()

    def summed(b: slice) -> Tensor:
        each = F.cross_entropy(model(ids[b]).flatten(0, 1), targets[b].flatten(), reduction="none")
        return (each * mask[b].flatten()).sum()

    with one_pass(model, 2, weights=mask, usual_weight=usual):
        (summed(slice(None)) / mask.sum()).backward()
    params = list(model.parameters())
    total, square = [0.0] * len(params), [0.0] * len(params)
    for k in range(0, samples, 2):
        n = min(2, samples - k)
        for i, g in enumerate(torch.autograd.grad(summed(slice(k, k + 2)) / (usual * n / 2), params)):
            total[i] = total[i] + n / samples * g
            square[i] = square[i] + n / samples * g.square()
    for p, g, s in zip(params, total, square, strict=True):
        torch.testing.assert_close(p.grad, g, rtol=1e-9, atol=1e-13)
        torch.testing.assert_close(p.grad_sq, s, rtol=1e-9, atol=1e-13)
        assert p.grad_kappa == samples / 2


def test_a_usual_weight_needs_weights_and_a_positive_number() -> None:
    for options in ({"usual_weight": 3.0}, {"usual_weight": 0.0, "weights": torch.ones(4)}):
        with pytest.raises(ValueError, match="usual_weight must be positive and needs weights="):
            one_pass(nn.Linear(2, 1), 2, **options)


@pytest.mark.parametrize("fold", ["backward", "call"])
@pytest.mark.parametrize("into", [False, True])
def test_another_micro_batch_size_than_the_optimizers_is_refused(fold, into) -> None:
    model, x = nn.Linear(3, 1), torch.randn(8, 3)
    with one_pass(model, 2):
        model(x).square().mean().backward()
    model.zero_grad()
    opt = InvariantAdam(model.parameters(), micro_batch_size=4, fold=fold)
    with (
        pytest.raises(ValueError, match=r"one_pass\(micro_batch_size=2\) on weight.*micro_batch_size=4.*off by 2"),
        one_pass(model, 2, into=opt if into else None),
    ):
        pass
    model(x[:4]).square().mean().backward()  # nothing has changed
    if fold == "call":
        opt.fold()
    opt.step()
    assert opt.samples_seen == 4


class WithLoss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Embedding(V, 5), nn.Linear(5, V)).double()

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.net(ids).flatten(0, 1), labels.flatten(), ignore_index=-100)


def test_a_loss_inside_the_model() -> None:
    torch.manual_seed(0)
    ids = torch.randint(V, (B, T))
    assert_exact(WithLoss(), (ids, ids), lambda m, b: m(*b), 2)


def test_unequal_groups_that_can_be_seen_are_refused_without_weights() -> None:
    torch.manual_seed(0)
    ids = torch.randint(V, (B, T))
    labels = ids.masked_fill(torch.arange(T) >= torch.tensor([6, 2, 3, 5, 1, 1, 4, 6])[:, None], -100)
    model = WithLoss()
    with (
        pytest.raises(UnsupportedUse, match="not a mean over micro-batches.*weights="),  # noqa: RUF043
        one_pass(model, 2),
    ):
        model(ids, labels).backward()
    with one_pass(model, 2, weights=labels != -100):
        model(ids, labels).backward()
    assert model.net[1].weight.grad_sq is not None


OUTSIDE = "targets of micro-batches weigh {}.*Pass weights="


@pytest.mark.parametrize(
    ("options", "targets", "match"),
    [
        ({"ignore_index": 0}, [1, 0, 1, 1, 2, 2, 0, 0], OUTSIDE.format("1, 2, 2, 0")),
        ({"ignore_index": -100}, [1, -100, 1, -100, -100, 2, 0, -100], None),
        ({"weight": torch.tensor([1.0, 2.0, 4.0])}, [1, 0, 1, 1, 2, 2, 0, 0], OUTSIDE.format("3, 4, 8, 2")),
        ({"weight": torch.tensor([1.0, 2.0, 4.0]), "label_smoothing": 0.1}, [0] * 8, None),
        ({"label_smoothing": 0.1}, [1, 0, 1, 1, 2, 2, 0, 0], None),
        ({"reduction": "sum"}, [1, 0, 1, 1, 2, 2, 0, 0], r"is a sum over samples.*one_pass\(..., reduction=.sum"),
    ],
)
@pytest.mark.parametrize("image", [False, True])
def test_the_shares_of_a_cross_entropy_outside_of_the_model(options, targets, match, image: bool) -> None:
    """Before the backward, so that the optimizer has nothing of it; and not again where weights are given."""
    torch.manual_seed(0)
    model = Apply(lambda s, x: s.m[0](x).movedim(-1, 1), nn.Linear(4, 3)).double()
    options = {k: v.double() if isinstance(v, Tensor) else v for k, v in options.items()}
    shape = (B, 2, 5) if image else (B,)
    y = torch.tensor(targets)[:, None, None].expand(shape) if image else torch.tensor(targets)
    batch = (torch.randn(*shape, 4, dtype=torch.float64), y)

    def outside(model: nn.Module, batch: tuple) -> Tensor:
        return 2 * F.cross_entropy(model(batch[0]), batch[1], **options) if match is None else plain(model, batch)

    def plain(model: nn.Module, batch: tuple) -> Tensor:
        return F.cross_entropy(model(batch[0]), batch[1], **options)

    if match is None:
        assert_exact(model, batch, outside, 2)
        return
    backward = torch.autograd.backward
    with pytest.raises(UnsupportedUse, match=match if not image else match.split("weigh")[0]), one_pass(model, 2):
        outside(model, batch).backward()
    assert torch.autograd.backward is backward
    assert model.m[0].weight.grad is None
    weights = torch.ones(B)  # the user's word is taken
    with one_pass(model, 2, **({"reduction": "sum"} if "reduction" in options else {"weights": weights})):
        outside(model, batch).backward()


def test_a_sum_of_the_means_of_micro_batches_is_theirs() -> None:
    """A loop over micro-batches in the loss: each has its own mean, whatever its targets weigh."""
    model = Apply(lambda s, x: s.m[0](x), nn.Linear(4, 3)).double()
    y = torch.randint(3, (B, 8)).masked_fill(torch.rand(B, 8) < 0.4, -100)
    y[:, 0] = 1

    def means(model: nn.Module, batch: tuple) -> Tensor:
        out = model(batch[0])
        parts = list(zip(out.split(2), batch[1].split(2), strict=True))
        return sum(F.cross_entropy(a.flatten(0, 1), b.flatten()) for a, b in parts) / len(parts)

    assert_exact(model, (torch.randn(B, 8, 4, dtype=torch.float64), y), means, 2)


def test_ragged_is_refused_on_request() -> None:
    model = nn.Linear(3, 2)
    with pytest.raises(ValueError, match="does not divide"), one_pass(model, 3, ragged="refuse"):
        model(torch.randn(B, 3)).sum().backward()
    with pytest.raises(ValueError, match='reduction="mean"'), one_pass(model, 3, reduction="sum"):
        model(torch.randn(B, 3)).sum().backward()


def test_a_mini_batch_smaller_than_a_micro_batch_counts_its_part() -> None:
    model = nn.Linear(3, 2)
    with one_pass(model, 16):
        model(torch.randn(4, 3)).square().mean().backward()
    assert model.weight.grad_kappa == 0.25
    torch.testing.assert_close(model.weight.grad_sq, model.weight.grad.square())


def test_mini_batches_accumulate_in_contexts_and_within_one() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    x = torch.randn(12, 3, dtype=torch.float64)
    want = loop(model, (x,), mean_square, 2, 12)
    with one_pass(model, 2):
        mean_square(model, (x[:8],)).backward()
    with one_pass(model, 2):
        mean_square(model, (x[8:],)).backward()
    accumulated = {n: (p.grad.clone(), p.grad_sq.clone(), p.grad_kappa) for n, p in model.named_parameters()}
    for p in model.parameters():
        pair.take(p)
    with one_pass(model, 2):
        mean_square(model, (x[:8],)).backward()
        mean_square(model, (x[8:],)).backward()
    for name, p in model.named_parameters():
        for grad, square, kappa in (accumulated[name], (p.grad, p.grad_sq, p.grad_kappa)):
            torch.testing.assert_close(grad, want[name][0])
            torch.testing.assert_close(square, want[name][1])
            assert kappa == 6


def test_one_micro_batch_is_standard_adam(batch) -> None:
    model = Net().double()
    with one_pass(model, B):
        exact_loss(model, batch).backward()
    for p in model.parameters():
        assert torch.equal(p.grad_sq, p.grad.square())
        assert p.grad_kappa == 1


def test_an_optimizer_that_subscribes_gets_each_pair_in_backward() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    x = torch.randn(8, 3, dtype=torch.float64)
    want = loop(model, (x,), mean_square, 2, 8)
    taken, alive = {}, []

    def taker(params: list[Tensor], pairs: list[pair.Pair]) -> None:
        taken.update((id(p), found.means()) for p, found in zip(params, pairs, strict=True))
        alive.append(sum(q.grad is not None for q in model.parameters()))

    for p in model.parameters():
        pair.subscribe(p, taker)
    with one_pass(model, 2):
        mean_square(model, (x,)).backward()
        assert len(taken) == 4  # before the context closes
    assert max(alive) <= 2
    for name, p in model.named_parameters():
        assert p.grad is None
        torch.testing.assert_close(taken[id(p)].grad, want[name][0])
        torch.testing.assert_close(taken[id(p)].grad_sq, want[name][1])
        assert taken[id(p)].kappa == 4


def snapshot(model: nn.Module) -> list:
    return [
        [(n, type(p), p.detach().clone(), p.grad, sorted(vars(p))) for n, p in model.named_parameters()],
        [(n, b.clone()) for n, b in model.named_buffers()],
        [(n, sorted(vars(m)), len(m._forward_pre_hooks)) for n, m in model.named_modules()],
    ]


def same(a: list, b: list) -> bool:
    return str(a) == str(b)


@pytest.mark.parametrize("where", ["forward", "backward", "between"])
def test_an_exception_leaves_the_model_as_it_was(where: str) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.n, self.b = (
                nn.Linear(3, 4),
                nn.BatchNorm1d(4, affine=False),
                nn.Linear(4, 2),
            )
            self.fail = False

        def forward(self, x: Tensor) -> Tensor:
            x = self.n(self.a(x))
            if self.fail and where == "forward":
                raise KeyboardInterrupt
            return self.b(failing(KeyboardInterrupt)(x) if self.fail and where == "backward" else x)

    model = Model()
    x = torch.randn(8, 3)
    with one_pass(model, 2):
        mean_square(model, (x,)).backward()
    model.fail = True
    before = snapshot(model)[0::2]  # not the running statistics: the forward itself has moved them
    with pytest.raises(KeyboardInterrupt), one_pass(model, 2):  # noqa: PT012
        out = mean_square(model, (x,))
        if where == "between":
            raise KeyboardInterrupt
        out.backward()
    assert same(before, snapshot(model)[0::2])
    assert Open.mini_batch is None
    assert not any(pair.is_armed(p) for p in model.parameters())


def test_frozen_and_unused_parameters_and_evaluation_inside() -> None:
    model = nn.ModuleDict({"a": nn.Linear(3, 4), "b": nn.Linear(4, 2), "c": nn.Linear(3, 2)})

    class Run(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.m = model

        def forward(self, x: Tensor) -> Tensor:
            return self.m["b"](self.m["a"](x).tanh())

    run = Run().double()
    model["a"].weight.requires_grad_(False)
    x = torch.randn(B, 3, dtype=torch.float64)
    with one_pass(run, 2):
        mean_square(run, (x,)).backward()
        with torch.no_grad():
            run(x[:3])
            run.m["c"](x[:3])
    assert model["a"].weight.grad is None
    assert model["c"].weight.grad is None
    assert not hasattr(model["c"].weight, "grad_sq")
    model["a"].bias.grad = model["b"].weight.grad = model["b"].bias.grad = None
    assert_exact(run, (x,), mean_square, 2)


def test_dropout_runs_and_is_checked_in_eval_mode(batch) -> None:
    model = Net(dropout=0.2).double()
    with one_pass(model, 2):
        exact_loss(model, batch).backward()
    assert all(p.grad_sq is not None for p in model.parameters())
    assert model.enc.training


def test_the_check_leaves_random_numbers_and_buffers_alone() -> None:
    def build() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 2)).double()

    x = torch.randn(8, 3, dtype=torch.float64)
    grads = []
    for check in (True, False):
        model = build()
        torch.manual_seed(1)
        with one_pass(model, 2, check=check):
            mean_square(model, (x,)).backward()
        grads.append([model[0].weight.grad_sq, model[1].running_mean, torch.rand(1)])
    for a, b in zip(*grads, strict=True):
        assert torch.equal(a, b)


def refused(model: nn.Module, *batch: Tensor, match: str, M: int = 2, **options) -> None:
    with pytest.raises(UnsupportedUse, match=match), one_pass(model, M, **options):  # noqa: PT012
        out = model(*batch)
        (out if torch.is_tensor(out) else out[0]).square().mean().backward()
    assert all(type(p) is nn.Parameter for p in model.parameters())


class Apply(nn.Module):
    def __init__(self, function, *modules: nn.Module, **params: Tensor) -> None:
        super().__init__()
        self.m, self.function = nn.ModuleList(modules), function
        for name, value in params.items():
            setattr(self, name, nn.Parameter(value))

    def forward(self, *inputs: Tensor) -> Tensor:
        return self.function(self, *inputs)


class Hidden(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return x * w

    @staticmethod
    def backward(ctx, g: Tensor):
        x, w = ctx.saved_tensors
        return g * w, (g * x).sum(0)


class Again(torch.autograd.Function):
    """A layer that runs again in its backward, whose gradients it accumulates there, as reversible layers do."""

    @staticmethod
    def forward(ctx, x: Tensor, layer: nn.Module) -> Tensor:
        ctx.save_for_backward(x)
        ctx.layer = layer
        return layer(x)

    @staticmethod
    def backward(ctx, g: Tensor):
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            ctx.layer(x).backward(g)
        return x.grad, None


@pytest.mark.parametrize("owned", [True, False])
def test_a_backward_inside_of_the_models_backward_is_refused(owned: bool) -> None:
    """The check only asks for gradients: what it accumulated would be left in the first update."""
    model = Apply(lambda s, x: Again.apply(s.m[0](x), s.m[1]), nn.Linear(3, 3), nn.Linear(3, 3))
    opt = InvariantAdam(model.parameters(), fold="backward" if owned else "call")
    refused(model, torch.randn(B, 3), match=r"m\.1\..*a backward that runs inside of the model's backward")
    assert opt.kappa == 0
    assert all(p.grad is None and not opt.state[p]["exp_avg"].any() for p in model.parameters())


@pytest.mark.parametrize("check", [True, False])
def test_a_custom_function_that_hides_a_parameter_is_refused(check: bool) -> None:
    model = Apply(lambda s, x: Hidden.apply(s.m[0](x), s.w), nn.Linear(3, 3), w=torch.randn(3))
    refused(model, torch.randn(B, 3), match="w.*(Hidden|without a square)", check=check)


def test_a_parameter_both_hidden_and_seen_is_refused() -> None:
    model = Apply(lambda s, x: Hidden.apply(s.m[0](x), s.w) * s.w, nn.Linear(3, 3), w=torch.randn(3))
    refused(model, torch.randn(B, 3), match="w goes through Hidden")


def test_a_first_mini_batch_with_a_nan_is_not_taken_for_a_fault_of_the_model() -> None:
    x = torch.randn(B, 4)
    x[3] = torch.nan
    refused(nn.Linear(4, 2), x, match=r"not finite \(weight\).*leave this mini-batch out")


def test_a_custom_function_is_named_where_what_it_made_is_refused_first() -> None:
    """A layer is given a weight that went through a Function, and its bias: the Function is the cause."""

    class Sign(torch.autograd.Function):
        @staticmethod
        def forward(ctx, w: Tensor) -> Tensor:
            return w.sign()

        @staticmethod
        def backward(ctx, g: Tensor) -> Tensor:
            return g

    model = Apply(lambda s, x: F.linear(x, Sign.apply(s.w), s.m[0].bias), nn.Linear(4, 5), w=torch.randn(5, 4))
    refused(model, torch.randn(B, 4), match="w goes through Sign")


def test_operations_inside_of_vmap_are_refused() -> None:
    model = Apply(lambda s, x: torch.func.vmap(s.m[0])(x), nn.Linear(4, 5))
    refused(
        model,
        torch.randn(B, 4),
        match=r"m.0.weight, m.0.bias goes through linear inside of a transform of torch.func \(vmap",
    )


def test_constants_of_the_batchs_size_that_do_not_run_as_the_batch() -> None:
    """Where the layer is as wide as the batch: the vectors of a spectral norm, and a straight-through estimate."""
    through = Apply(
        lambda s, x: F.linear(x, s.w + (s.w.sign() - s.w).detach(), s.m[0].bias), nn.Linear(4, B), w=torch.randn(B, 4)
    )
    spectral = nn.utils.parametrizations.spectral_norm(nn.Linear(4, B)).eval()
    for model in (through, spectral):
        assert_exact(model.double(), (torch.randn(B, 4, dtype=torch.float64),), mean_square, 2)


def test_a_model_that_returns_some_of_its_rows_needs_their_weights() -> None:
    """A loss is then a mean over what is left of each micro-batch, in a loop of its own rows."""
    torch.manual_seed(0)
    model = Apply(lambda s, x: s.m[1](s.m[0](x)[x[:, 0] > 0]), nn.Linear(4, 5), nn.Linear(5, 3)).double()
    x = torch.randn(B, 4, dtype=torch.float64)
    x[:, 0] = torch.tensor([1.0, -1, 1, 1, -1, 1, 1, 1])
    refused(model, x, match="picked by index, 1, 2, 1, 2 of its micro-batches.*weights=")
    with one_pass(model, 2, weights=(x[:, 0] > 0).double()):
        mean_square(model, (x,)).backward()
    got, got_sq = model.m[0].weight.grad, model.m[0].weight.grad_sq
    want = [torch.autograd.grad(mean_square(model, (rows,)), model.m[0].weight)[0] for rows in x.split(2)]
    share = [count / 6 for count in (1, 2, 1, 2)]
    torch.testing.assert_close(got, sum(a * g for a, g in zip(share, want, strict=True)))
    torch.testing.assert_close(got_sq, sum(a * g**2 for a, g in zip(share, want, strict=True)))


@pytest.mark.parametrize(
    ("function", "shape", "match"),
    [
        (
            lambda s, x: s.m[1](s.m[0](x).roll(1, 0)),
            (B, 3),
            "m.1.weight.*linear.*another micro-batch",
        ),
        (lambda s, x: s.m[1](s.m[0](x) - s.m[0](x).mean(0)), (B, 3), "another micro-batch"),
        (lambda s, x: s.m[0](x) / s.m[0](x).norm(), (B, 3), "other micro-batches"),
        (
            lambda s, x: s.m[1](s.m[0](x).transpose(0, 1).reshape(-1, 3)),
            (B, B, 3),
            "another micro-batch",
        ),
        (
            lambda s, x: s.m[1](s.m[0](x)[x[:, 0, 0] > 0][: B // 2].reshape(-1, 3)),
            (B, 4, 3),
            "batch",
        ),
        (  # all rows of the first layer are the same, so that exchanging samples shows nothing
            lambda s, x: x + (s.m[0](x - x) @ s.m[0](x - x).T).softmax(-1) @ s.m[1](s.m[0](x - x)),
            (B, 3),
            "arrives at rows of another: samples meet inside the model",
        ),
        (lambda s, x: s.m[0](x) + s.m[1].weight.square().sum(), (B, 3), None),
    ],
)
def test_mixed_samples_are_refused(function, shape: tuple[int, ...], match: str | None) -> None:
    torch.manual_seed(0)
    model = Apply(function, nn.Linear(3, 3), nn.Linear(3, 3)).double()
    x = torch.randn(*shape, dtype=torch.float64)
    if match is None:
        assert_exact(model, (x,), mean_square, 2)
    else:
        refused(model, x, match=match)


ALONE = "value made of m.0.weight alone {}.*Add a penalty to the loss of each sample inside the model"


@pytest.mark.parametrize("check", [True, False])
@pytest.mark.parametrize("join", [torch.add, lambda a, b: torch.stack((a, b)).sum()])
def test_a_penalty_on_a_parameter_in_the_loss_is_refused_by_name(check: bool, join) -> None:
    model = Apply(lambda s, x: s.m[0](x), nn.Linear(3, 2))
    meets = ALONE.format("goes through (add|stack) with a scalar")
    with pytest.raises(UnsupportedUse, match=meets), one_pass(model, 2, check=check):
        join(model(torch.randn(B, 3)).square().mean(), model.m[0].weight.square().sum()).backward()


@pytest.mark.parametrize("alone", [lambda w: w.square().sum(), lambda w: w.norm(), lambda w: w.t()])
def test_a_value_of_parameters_alone_that_the_model_returns_is_refused_by_name(alone) -> None:
    model = Apply(lambda s, x: (s.m[0](x), alone(s.m[0].weight)), nn.Linear(3, 2))
    with pytest.raises(UnsupportedUse, match=ALONE.format("is returned by the model")), one_pass(model, 2):
        model(torch.randn(B, 3))
    looked_at = Apply(lambda s, x: (s.m[0](x), alone(s.m[0].weight).detach()), nn.Linear(3, 2)).double()
    batch = (torch.randn(B, 3, dtype=torch.float64),)
    assert_exact(looked_at, batch, lambda model, batch: model(*batch)[0].square().mean(), 2)


def test_refusals_name_the_parameter_and_the_remedy() -> None:
    x = torch.randn(B, 4)
    refused(nn.Sequential(nn.Linear(4, 4), nn.SyncBatchNorm(4)), x, match="SyncBatchNorm.*use BatchNorm")
    refused(nn.Embedding(5, 3, max_norm=1.0), torch.randint(5, (B, 2)), match="weight.*max_norm")
    refused(
        nn.Embedding(5, 3, scale_grad_by_freq=True),
        torch.randint(5, (B, 2)),
        match="scale_grad_by_freq",
    )
    track = nn.Sequential(nn.Conv1d(4, 4, 1), nn.InstanceNorm1d(4, affine=True, track_running_stats=True))
    refused(track, torch.randn(B, 4, 5), match="1.weight.*track_running_stats")
    refused(nn.LSTM(4, 3, proj_size=2, batch_first=True), torch.randn(B, 5, 4), match="proj_size")
    pack = Apply(
        lambda s, x: s.m[0](nn.utils.rnn.pack_padded_sequence(x, [5] * B, True))[0].data,
        nn.GRU(4, 3),
    )
    refused(pack, torch.randn(B, 5, 4), match="packed sequence")
    bias = Apply(
        lambda s, x: s.m[0](x, x, x)[0],
        nn.MultiheadAttention(4, 2, add_bias_kv=True, batch_first=True),
    )
    refused(bias, torch.randn(B, 5, 4), match="add_bias_kv")

    drop = Apply(lambda s, x: x + F.dropout(s.w, 0.5), w=torch.randn(4))
    refused(drop, torch.randn(B, 4), match="w goes through dropout before it meets the batch")

    def write(s: Apply, x: Tensor) -> Tensor:
        x = x.clone()
        x[::2] = s.w
        return s.m[0](x)

    refused(
        Apply(write, nn.Linear(4, 4), w=torch.randn(4)),
        torch.randn(B, 3, 4),
        match="w goes through __setitem__",
    )


@pytest.mark.parametrize("same", [True, False])
def test_of_two_threads_at_once_one_is_refused(same: bool) -> None:
    """The second comes while the first is opening its context."""
    opening, refused = Event(), Event()

    class Slow(nn.Linear):
        def register_forward_pre_hook(self, *args, **options):
            opening.set()
            refused.wait(10)
            return super().register_forward_pre_hook(*args, **options)

    model = Slow(3, 2, dtype=torch.float64)
    other = model if same else nn.Linear(3, 2)
    batch = (torch.randn(B, 3, dtype=torch.float64),)

    def square(model: nn.Module, batch: tuple) -> Tensor:
        return model(*batch).square().mean()

    with ThreadPoolExecutor(1) as threads:
        exact = threads.submit(assert_exact, model, batch, square, 2)
        assert opening.wait(10)
        with pytest.raises(RuntimeError, match="already open, in this thread or in another"), one_pass(other, 2):
            pass
        refused.set()
        exact.result()
    with one_pass(other, 2):  # which is free again
        pass


def test_usage_errors() -> None:
    with pytest.raises(TypeError, match=r"model must be a torch\.nn\.Module, got InvariantAdam"):
        one_pass(InvariantAdam(nn.Linear(2, 2).parameters()), 2)  # type: ignore[arg-type]
    model, x = nn.Linear(3, 2), torch.randn(B, 3)
    with pytest.raises(ValueError, match="micro_batch_size"):
        one_pass(model, 0)
    with pytest.raises(ValueError, match="reduction"):
        one_pass(model, 1, reduction="none")
    with pytest.raises(ValueError, match="no meaning"):
        one_pass(model, 1, reduction="sum", weights=torch.ones(B))
    with pytest.raises(RuntimeError, match="already open"), one_pass(model, 1), one_pass(model, 1):
        pass
    assert Open.mini_batch is None
    with (
        pytest.raises(UnsupportedUse, match="before the model was called"),
        one_pass(nn.ModuleList([model]), 1),
    ):
        model(x).sum().backward()
    with (
        pytest.raises(ValueError, match="pass batch_size="),
        one_pass(nn.Bilinear(3, 3, 2), 1) as context,
    ):
        context.model(x, x[:4]).sum().backward()
    model(x).sum().backward()
    with pytest.raises(RuntimeError, match="gradient from outside"), one_pass(model, 1):
        pass


def test_two_forwards_and_a_second_backward_are_refused() -> None:
    model, x = nn.Linear(3, 2), torch.randn(B, 3)
    with pytest.raises(UnsupportedUse, match="weight: squared 2 times"), one_pass(model, 2):
        (model(x) * model(x.flip(1))).mean().backward()
    with pytest.raises(UnsupportedUse, match="weight: squared 2 times"), one_pass(model, 2):  # noqa: PT012
        out = model(x).mean()
        out.backward(retain_graph=True)
        out.backward()


def test_batch_size_without_a_forward_of_the_whole_model() -> None:
    torch.manual_seed(0)
    model = nn.ModuleDict({"a": nn.Linear(3, 4), "b": nn.Linear(4, 2)}).double()
    x = torch.randn(B, 3, dtype=torch.float64)

    def parts(model: nn.Module, batch: tuple) -> Tensor:
        return model["b"](model["a"](batch[0]).tanh()).square().mean()

    assert_exact(model, (x,), parts, 2, batch_size=B, check=False)


@pytest.mark.parametrize("wrong", [1, 2, 3, 2 * B])
def test_a_batch_size_that_the_inputs_do_not_have_is_refused(wrong: int) -> None:
    """One that is no more than M would make the whole mini-batch one micro-batch."""
    model, x = nn.Linear(3, 2), torch.randn(B, 3)
    match = rf"batch_size={wrong}, and the inputs have sizes \[{B}\] in dimension 0"
    with pytest.raises(ValueError, match=match), one_pass(model, 2, batch_size=wrong):
        model(x)


def test_channels_last_and_a_changing_batch_size() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 2, 3)).double()
    model = model.to(memory_format=torch.channels_last)
    for batch in (4, 8, 6):
        x = torch.randn(batch, 3, 7, 7, dtype=torch.float64).to(memory_format=torch.channels_last)
        assert_exact(model, (x,), mean_square, 2)


@TRACING
def test_compiled_graphs_hand_over_early_and_refuse_two_forwards() -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    x = torch.randn(B, 3, dtype=torch.float64)
    want = loop(model, (x,), mean_square, 2, B)
    taken = {}

    def taker(params: list[Tensor], pairs: list[pair.Pair]) -> None:
        taken.update((id(p), found.means()) for p, found in zip(params, pairs, strict=True))

    for p in model.parameters():
        pair.subscribe(p, taker)
    for _ in range(2):
        taken.clear()
        with one_pass(compiled, 2):
            mean_square(compiled, (x,)).backward()
        for name, p in model.named_parameters():
            torch.testing.assert_close(taken[id(p)].grad_sq, want[name][1])
    other = copy.deepcopy(model)
    compiled = torch.compile(other, fullgraph=True, backend="aot_eager")
    with pytest.raises(UnsupportedUse, match="squared 2 times"), one_pass(compiled, 2):
        (compiled(x) * compiled(x.flip(1))).mean().backward()


def test_a_summed_loss_inside_the_model() -> None:
    torch.manual_seed(0)
    model = Apply(lambda s, x: s.m[0](x).square().sum(), nn.Linear(3, 2)).double()
    x = torch.randn(B, 3, dtype=torch.float64)
    with one_pass(model, 2, reduction="sum"):
        model(x).backward()
    w = model.m[0].weight
    shares = [torch.autograd.grad(model(x[k : k + 2]), w)[0] for k in range(0, B, 2)]
    torch.testing.assert_close(w.grad_sq, torch.stack(shares).square().mean(0))


@TRACING
@pytest.mark.slow
def test_compile_with_inductor(batch) -> None:
    torch._dynamo.reset()
    model = Net().double()
    compiled = torch.compile(model, fullgraph=True)
    for _ in range(2):
        assert_exact(model, batch, exact_loss, 2, run=compiled)


def test_squares_of_channels_last_weights_lie_like_their_moments() -> None:
    """So that one launch folds all, and autograd copies none of them."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Tanh(), nn.Conv2d(4, 2, 2), nn.Flatten()).double()
    model = model.to(memory_format=torch.channels_last)
    x = torch.randn(8, 3, 5, 5, dtype=torch.float64).contiguous(memory_format=torch.channels_last)
    want = loop(model, (x,), mean_square, 2, 8)
    with one_pass(model, 2):
        mean_square(model, (x,)).backward()
    for name, p in model.named_parameters():
        assert p.grad_sq.stride() == p.stride()
        torch.testing.assert_close(p.grad_sq, want[name][1])


@pytest.mark.parametrize("sink", [True, False])
def test_what_is_known_of_a_model_does_not_keep_it(sink):
    """Not even until Python looks for cycles: on a GPU the next model needs its memory."""

    def trained():
        net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(16, 2))
        opt = InvariantAdam(net.parameters(), micro_batch_size=2)
        for _ in range(2):
            with one_pass(net, 2, into=opt if sink else None):
                net(torch.randn(8, 3, 4, 4)).sum(1).mean().backward()
            opt.step()
        return [weakref.ref(p) for p in net.parameters()]

    gc.collect()
    gc.disable()
    try:
        assert not any(p() is not None for p in trained())
    finally:
        gc.enable()


def test_backwards_run_in_the_calling_thread_while_a_context_is_open():
    def enabled() -> bool:
        return torch._C._is_multithreading_enabled()

    net = nn.Linear(3, 2)
    for before in (True, False):
        with torch.autograd.set_multithreading_enabled(before):
            with one_pass(net, 2):
                assert not enabled()
                net(torch.randn(4, 3)).sum().backward()
            assert enabled() is before
            with pytest.raises(ZeroDivisionError), one_pass(net, 2):
                raise ZeroDivisionError
            assert enabled() is before
        net.zero_grad()
        del net.weight.grad_sq, net.bias.grad_sq


def test_cudnn_tries_no_algorithms_for_the_check(monkeypatch):
    class Asking(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            asked.append(torch.backends.cudnn.benchmark)
            return super().forward(x)

    asked: list[bool] = []
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    net = Asking(3, 2)
    with one_pass(net, 2):
        net(torch.randn(4, 3)).sum().backward()
    *checks, last = asked
    assert checks
    assert not any(checks)
    assert last


def test_one_sample_beside_a_vector_is_not_a_batch_of_the_vectors_length() -> None:
    """Positions (T,) beside x (1, T): the batch would be taken for T samples, one micro-batch of weight 1."""
    model = Apply(lambda s, x, places: s.m[0](x + places), nn.Linear(5, 2))
    x, places = torch.randn(1, 5), torch.randn(5)
    with one_pass(model, 5), pytest.raises(ValueError, match=r"sizes \[1, 5\] in dimension 0.*pass batch_size="):
        model(x, places)
    with one_pass(model, 5, batch_size=1):
        model(x, places).square().mean().backward()
    assert model.m[0].weight.grad_kappa == 0.2
    model.zero_grad()
    with one_pass(model, 5):  # places (1, T) are spread over the batch
        model(torch.randn(10, 5), places[None]).square().mean().backward()
    assert model.m[0].weight.grad_kappa == 2
