"""Compiled models whose loss is outside of the graph, against the loop: nothing is lost, or it is refused."""

from __future__ import annotations

import copy
import threading
from contextlib import nullcontext
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from loop_oracle import assert_exact
from test_one_pass_rules import CASES
from test_one_pass_rules import loss as mean_loss
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd

import invariant_adam as ia
from invariant_adam.one_pass.groups import UnsupportedUse
from invariant_adam.one_pass.tracing import Tuples
from invariant_adam_lab import models

pytestmark = pytest.mark.filterwarnings("default")  # torch warns of itself while tracing
M, KAPPA = 2, 4


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()
    torch.manual_seed(0)


MODELS = {
    "vit": lambda: models.build("vit-cifar", width=8, depth=1, heads=2, hidden=8),
    "resnet": lambda: models.build("resnet18", width=4, depths=(1,)),
    "resnet-layer-norm": lambda: models.build("resnet18", width=4, depths=(1,), norm="layer"),
    "gpt": lambda: models.build("gpt-char", width=8, depth=1, heads=2, context=6),
    "gpt-tied": lambda: models.build("gpt-char", width=8, depth=1, heads=2, context=6, tied=True),
}


def loss_of(answers: Tensor, targets: Tensor) -> Tensor:
    answers = answers.float() if answers.dtype == torch.bfloat16 else answers
    return F.cross_entropy(answers.flatten(0, -2), targets.flatten(), label_smoothing=0.1)


def moments_agree(first, second, tolerance):
    """The moments of two optimizers over the same parameters, each relative to its largest or to a part of them all."""
    for key, part in (("exp_avg", 1e-3), ("exp_avg_sq", 1e-6)):
        largest = max(float(state[key].abs().max()) for state in first.state.values())
        for p, q in zip(first.param_groups[0]["params"], second.param_groups[0]["params"], strict=True):
            assert (p in first.state) == (q in second.state)
            if p in first.state:
                a, b = first.state[p][key], second.state[q][key]
                assert float((a - b).abs().max()) <= tolerance * max(float(a.abs().max()), part * largest)


def against_loop(model, x, y, *, into, autocast=False, updates=2, **how):
    """Updates of a model compiled so and of its copy by the loop, from the same weights each time."""
    judge, dtype = copy.deepcopy(model), next(model.parameters()).dtype
    theirs, ours = (ia.InvariantAdam(m.parameters(), lr=1e-3, state_dtype=torch.float64) for m in (judge, model))
    run = torch.compile(model, dynamic=False, **(how or {"backend": "aot_eager"}))
    for _ in range(updates):
        with torch.autocast(x.device.type, torch.bfloat16) if autocast else nullcontext():
            for piece, target in zip(x.split(M), y.split(M), strict=True):
                loss_of(judge(piece), target).backward()
            with ia.one_pass(run, M, **({"into": ours} if into else {})):
                loss_of(run(x), y).backward()
        theirs.step()
        ours.step()
        moments_agree(theirs, ours, 0.1 if autocast else 1e-9 if dtype == torch.float64 else 1e-3)
        with torch.no_grad():
            for p, q in zip(judge.parameters(), model.parameters(), strict=True):
                q.copy_(p)


def lab_case(name, dtype, device="cpu"):
    with torch.device(device):
        model = MODELS[name]().to(dtype)
        B = M * KAPPA
        if isinstance(model, models.GPT):
            return model, torch.randint(65, (B, 6)), torch.randint(65, (B, 6))
        return model, torch.randn(B, 3, 32, 32, dtype=dtype), torch.randint(10, (B,))


@pytest.mark.parametrize("into", [False, True])
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.slow
def test_a_compiled_model_with_its_loss_outside_equals_the_loop(name, into):
    against_loop(*lab_case(name, torch.float64), into=into)


@pytest.mark.parametrize("into", [False, True])
@pytest.mark.slow
def test_a_compiled_class_token_under_autocast(into):
    against_loop(*lab_case("vit", torch.float32), into=into, autocast=True)


@pytest.mark.slow
@pytest.mark.parametrize("into", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_inductor_with_the_loss_outside_equals_the_loop(name, into):
    against_loop(*lab_case(name, torch.float32), into=into, backend="inductor")


@pytest.mark.slow
def test_a_compiled_ghost_batch_norm_keeps_no_image_in_float32():
    """Where backward asked for the forward's x̂, the compiler kept it in float32 and not x in bfloat16."""
    torch.manual_seed(0)
    model, x, kept = models.build("resnet18", classes=10, width=8, depths=(1, 1)), torch.randn(12, 3, 8, 8), []
    run = torch.compile(model)

    def keep(t):
        kept.append(t)
        return t

    with ia.one_pass(run, 3):
        with torch.autocast("cpu", torch.bfloat16), torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
            out = run(x)
        out.float().square().mean().backward()
    images = [t for t in kept if t.ndim >= 4 and 12 in (t.shape[0], t.shape[:2].numel())]
    assert images
    assert torch.float32 not in {t.dtype for t in images}


class ConvNeXtBlock(nn.Module):
    """A convolution with a bias, whose gradient lies in memory as a norm over channels leaves it."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.depthwise = nn.Conv2d(channels, channels, 7, padding=3, groups=channels)
        self.norm = nn.LayerNorm(channels)
        self.wide, self.narrow = nn.Linear(channels, 4 * channels), nn.Linear(4 * channels, channels)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.depthwise(x).permute(0, 2, 3, 1))
        return x + self.narrow(F.gelu(self.wide(y))).permute(0, 3, 1, 2)


@pytest.mark.slow
def test_a_graph_copies_what_it_copies_without_one_pass():
    """No gradient is copied to another layout, and what a product takes is kept in the shape that it has there."""
    torch.manual_seed(0)
    x, found = torch.randn(8, 3, 32, 32), []

    def count(graph, _):
        found.append([str(node.target) for node in graph.graph.nodes if node.op == "call_function"])
        return graph

    for once in (False, True):
        torch._dynamo.reset()
        model = nn.Sequential(nn.Conv2d(3, 16, 4, 4), ConvNeXtBlock(16), ConvNeXtBlock(16))
        run = torch.compile(model, backend=aot_autograd(fw_compiler=count, bw_compiler=count))
        with ia.one_pass(run, 2) if once else nullcontext():
            run(x).square().mean().backward()
    forward, backward, own_forward, own_backward = found
    for name in ("aten.clone.default", "aten.addmm.default", "aten.mm.default", "aten.bmm.default"):
        assert own_forward.count(name) == forward.count(name)
    assert own_backward.count("aten.clone.default") == backward.count("aten.clone.default")


@pytest.mark.gpu
@pytest.mark.parametrize("into", [False, True])
@pytest.mark.parametrize("name", ["vit", "resnet", "gpt-tied"])
def test_cuda_graphs_of_torch_compile_equal_the_loop(name, into):
    """They are recorded in the second update and replayed from the third on: scalars and counts stay the host's."""
    against_loop(*lab_case(name, torch.float32, "cuda"), into=into, updates=5, mode="reduce-overhead")


def test_no_graph_is_cut_where_pairs_are_taken_as_they_are_made():
    """torch 2.11 reads what is joined before a cut and used behind it from memory that nobody has written."""
    model, before = nn.Linear(2, 1), torch._inductor.config.graph_partition
    opt = ia.InvariantAdam(model.parameters(), lr=0.1)
    with ia.one_pass(model, 1, into=opt):
        assert not torch._inductor.config.graph_partition
    assert torch._inductor.config.graph_partition is before


@pytest.mark.slow
def test_a_backward_whose_graph_would_be_cut_is_refused():
    """From torch 2.13 on the setting holds in one thread, and another one may call the first backward."""
    model, found = nn.Sequential(nn.Linear(3, 64), nn.Tanh(), nn.Linear(64, 2)), []
    opt = ia.InvariantAdam(model.parameters(), lr=0.1)
    run = torch.compile(model, mode="reduce-overhead")

    def backward(loss):
        try:
            loss.backward()
        except Exception as error:
            found.append(str(error))

    with ia.one_pass(run, 2, into=opt):
        loss = run(torch.randn(6, 5, 3)).square().mean()
        cut = []
        for work in (lambda: cut.append(torch._inductor.config.graph_partition), lambda: backward(loss)):
            thread = threading.Thread(target=work)
            thread.start()
            thread.join()
    assert ["compiled to CUDA graphs" in message for message in found] == [True] * cut[0]


@pytest.mark.gpu
def test_tuned_graphs_of_torch_compile_equal_the_loop():
    against_loop(*lab_case("vit", torch.float32, "cuda"), into=False, updates=4, mode="max-autotune")


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_every_rule_compiled_equals_the_loop(name):
    model, *batch = CASES[name]()
    model = model.double()
    assert_exact(model, tuple(batch), mean_loss, 3, run=torch.compile(model, backend="aot_eager", dynamic=False))


class Block(nn.Module):
    """A layer, and others inside of it."""

    def __init__(self, *inside: nn.Module) -> None:
        super().__init__()
        self.inside, self.linear, self.norm = nn.ModuleList(inside), nn.Linear(3, 3), nn.LayerNorm(3)

    def forward(self, x: Tensor) -> Tensor:
        for module in self.inside:
            x = module(x)
        return self.norm(self.linear(x).tanh())


def compiled(model: Block, how: str) -> nn.Module:
    """The model, compiled in one of torch's ways."""
    if how == "in place":
        model.compile(backend="aot_eager")
    elif how == "its forward":
        model.forward = torch.compile(model.forward, backend="aot_eager")
    elif how == "a part":
        model.inside[0].compile(backend="aot_eager")
    else:
        return torch.compile(model, backend="aot_eager")
    return model


@pytest.mark.parametrize("into", [False, True])
@pytest.mark.parametrize("how", ["wrapped", "in place", "its forward", "a part"])
def test_models_compiled_in_any_way_equal_the_loop_without_another_graph(how, into):
    model, x = Block(Block(), Block()).double(), torch.randn(8, 3).double()
    judge = copy.deepcopy(model)
    theirs, ours = (ia.InvariantAdam(m.parameters(), state_dtype=torch.float64) for m in (judge, model))
    run, counted = compiled(model, how), torch._dynamo.utils.counters["stats"]
    before = model._compiled_call_impl
    counted.clear()
    for _ in range(3):
        for piece in x.split(M):
            judge(piece).square().mean().backward()
        with ia.one_pass(run, M, **({"into": ours} if into else {})):
            run(x).square().mean().backward()
        theirs.step()
        ours.step()
        moments_agree(theirs, ours, 1e-12)
        assert counted["unique_graphs"] == 1
    assert model._compiled_call_impl is before


class Chosen(nn.Module):
    """As many layers as the batch asks for: a loop that a trace leaves to Python."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(3, 3) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for i in (x.abs().amax(0) > 0).nonzero().flatten():
            x = self.layers[i](x).tanh() * self.layers[i].bias
        return x


def test_the_dispatcher_alone_makes_no_graph():
    model, x = Chosen().double(), torch.randn(8, 3).double()
    counted = torch._dynamo.utils.counters["stats"]

    def graphs(run: nn.Module) -> int:
        torch._dynamo.reset()
        counted.clear()
        run(x).square().mean().backward()
        return counted["unique_graphs"]

    plain = graphs(torch.compile(model, backend="aot_eager"))
    model.zero_grad()
    run = torch.compile(model, backend="aot_eager")
    with ia.one_pass(run, M):
        assert graphs(run) == plain
    for _ in range(2):
        assert_exact(model, (x,), lambda m, batch: m(*batch).square().mean(), M, run=run)
    assert counted["unique_graphs"] == plain


class Experts(nn.Module):
    """Sorted rows, which a trace of one pass leaves to Python."""

    def __init__(self) -> None:
        super().__init__()
        self.expert = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        order = x.detach().flatten(0, 1).sum(1).argsort()
        return self.expert(x.flatten(0, 1)[order])[order.argsort()].view(x.shape)


class Layer(nn.Module):
    """Experts between two layers that a graph has."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.experts, self.after = nn.Linear(3, 3), Experts(), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.before(x).tanh()
        torch._dynamo.graph_break()
        x = self.experts(x)
        torch._dynamo.graph_break()
        return self.after(x).tanh()


def test_a_graph_serves_all_layers_of_a_model_with_experts():
    """No guard of it names a parameter of one layer; else the ninth layer would run uncompiled."""
    layers = nn.ModuleList(Layer() for _ in range(3)).double()
    model = Block(*layers).double()
    for layer in layers:
        layer.compile(backend="aot_eager")
    x, counted = torch.randn(8, 2, 3).double(), torch._dynamo.utils.counters["stats"]
    counted.clear()
    for _ in range(2):
        assert_exact(model, (x,), lambda m, batch: m(*batch).square().mean(), M)
        assert counted["unique_graphs"] == 2


class Own(list):
    """A list of one's own class."""


class Both(NamedTuple):
    """A sequence that torch's own traces do not look into."""

    first: Tensor
    second: Tensor


class Meeting(nn.Module):
    """Parameters that meet the batch or each other in a sequence of tensors."""

    def __init__(self, how: str, elsewhere: bool = False) -> None:
        super().__init__()
        self.how, self.elsewhere = how, elsewhere
        self.token, self.linear = nn.ParameterList([torch.randn(1, 1, 3)]), nn.Linear(3, 3)
        self.kept = Both(self.token[0], self.token[0])

    def forward(self, x: Tensor) -> Tensor:
        x, t = self.linear(x), self.token[0]
        if self.elsewhere:
            x = x * t
        sequence = {"named": Both, "own": lambda *args: Own(args)}.get(self.how.split()[-1], lambda *args: args)
        if "kept" in self.how:
            return x + torch.cat(self.kept, 1).sum(1, keepdim=True)
        if "stack" in self.how:
            return x + torch.stack(sequence(t, 2 * t)).sum(0)
        if "einsum" in self.how:
            return x + torch.einsum("abi,abj->abij", sequence(t, t)).sum(3)
        if "minus" in self.how:
            return x * (1 - t)
        return torch.cat(sequence(t.expand(len(x), -1, -1), x), 1)


@pytest.mark.parametrize(
    "how", ["cat", "stack", "einsum", "minus", "cat named", "stack named", "einsum named", "kept named"]
)
@pytest.mark.parametrize("elsewhere", [False, True])
def test_parameters_in_tuples_are_seen_by_a_trace(how, elsewhere):
    """Also where another use of the same parameter has its square, so that a missing one would not be noticed."""
    model = Meeting(how, elsewhere).double()
    run = torch.compile(model, backend="aot_eager", fullgraph=True)
    x = torch.randn(8, 2, 3, dtype=torch.float64)
    assert_exact(model, (x,), lambda m, batch: m(*batch).square().mean(), M, run=run)


@pytest.mark.parametrize("turned", ["T", "mT"])
def test_a_property_of_a_parameter_breaks_no_graph(turned):
    """torch 2.11 does not see which property is asked for."""

    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(20, 4)

        def forward(self, ids: Tensor) -> Tensor:
            return self.table(ids) @ getattr(self.table.weight, turned)

    def loss(model, batch):
        return model(*batch).square().mean()

    model, ids = Tied().double(), torch.randint(20, (M * KAPPA, 3))
    assert_exact(model, (ids,), loss, M, run=torch.compile(model, backend="aot_eager", fullgraph=True))


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("check", [False, True])
def test_parameters_in_a_list_of_another_class_are_refused(compiled, check):
    model = Meeting("cat own")
    run = torch.compile(model, backend="aot_eager") if compiled else model
    refused = pytest.raises(UnsupportedUse, match=r"token\.0 goes through cat in a Own|must be checked before")
    with refused, ia.one_pass(run, M, check=check):
        run(torch.randn(8, 2, 3)).square().mean().backward()


@pytest.mark.parametrize("into", [False, True])
@pytest.mark.parametrize("how", ["cat named", "stack named"])
def test_what_a_trace_overlooks_is_refused(how, into):
    """No parameter but the overlooked one is in its module, so that nothing else would tell."""
    model = Meeting(how)
    opt = ia.InvariantAdam(model.parameters())
    run = torch.compile(model, backend="aot_eager")

    def train() -> None:
        with ia.one_pass(run, M, **({"into": opt} if into else {})) as context:
            for undo in context.undo:
                if isinstance(undo, Tuples):
                    undo.remove()  # as with a torch that finds arguments in another way
            run(torch.randn(8, 2, 3)).square().mean().backward()

    with pytest.raises(UnsupportedUse, match=r"token\.0: a gradient without a square .*pass a list"):
        train()
    if into:
        opt.abandon()


def test_traces_look_where_torch_does_once_the_context_is_closed():
    from torch._dynamo.variables import torch_function as home

    before = home._flatten_vts
    model = nn.Linear(3, 3)
    with ia.one_pass(model, M):
        assert home._flatten_vts is not before
    assert home._flatten_vts is before
    opt = ia.InvariantAdam(nn.Linear(2, 2).parameters())
    with pytest.raises(ValueError, match="must hold all"), ia.one_pass(model, M, into=opt):
        pass
    assert home._flatten_vts is before
