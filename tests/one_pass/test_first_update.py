"""The check of the first update: it takes no more memory than the step, and sees what it saw on all samples."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from loop_oracle import assert_exact
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import invariant_adam as ia
from invariant_adam.kernels import Serving
from invariant_adam.one_pass import one_pass
from invariant_adam.one_pass.groups import UnsupportedUse
from invariant_adam.one_pass.verify import against_loop, progress
from invariant_adam.one_pass.verify.probe import summary
from invariant_adam_lab.bench.memory import growth

B, D = 24, 8


def loss(model: nn.Module, batch: tuple) -> Tensor:
    return model(*batch).flatten(1).sin().sum(1).mean()


class Deep(nn.Module):
    """Activations that outweigh the parameters, or the reverse."""

    def __init__(self, width: int, depth: int, again: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
        self.again = again

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = checkpoint(lambda t, f=layer: f(t).tanh(), x, use_reentrant=False) if self.again else layer(x).tanh()
        return x


@pytest.mark.parametrize("again", [False, True], ids=["kept", "checkpointed"])
@pytest.mark.parametrize(("width", "length"), [(32, 128), (512, 4)], ids=["activations", "parameters"])
@pytest.mark.parametrize("M", [1, 8])
@pytest.mark.slow
def test_the_first_update_takes_the_memory_of_the_second(width: int, length: int, M: int, again: bool) -> None:
    torch.manual_seed(0)
    model, x = Deep(width, 6, again), torch.randn(B, length, width)
    opt = ia.InvariantAdam(model.parameters())

    def update() -> None:
        with one_pass(model, M), torch.autocast("cpu", torch.bfloat16):
            model(x).float().square().mean().backward()
        opt.step()

    first, second = (growth(update, lambda: None, torch.device("cpu")).peak for _ in range(2))
    held = 3 * sum(p.numel() * p.element_size() for p in model.parameters())  # weights and moments
    room = 28 * 512 * 512  # that of the largest parameter in the comparison
    assert held + first <= 1.15 * (held + second) + room


def test_parameters_are_compared_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(against_loop, "PIECE", 1)
    torch.manual_seed(0)
    model = Deep(D, 5).double()
    assert len(list(against_loop._pieces([_Sized(p.numel()) for p in model.parameters()]))) > 2
    assert_exact(model, (torch.randn(B, 3, D, dtype=torch.float64),), loss, 4)


class _Sized:
    def __init__(self, size: int) -> None:
        self.size = size


class Mixed(nn.Module):
    """Samples that are apart by `distance` meet, in the values or in the rows of a layer alone."""

    def __init__(self, distance: int, strength: float, back: bool) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(D, D), nn.Linear(D, D)
        self.distance, self.strength, self.back = distance, strength, back

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x).tanh()
        if self.back:  # the outputs do not tell: each sample comes back to its place
            return self.second(h.roll(self.distance, 0)).roll(-self.distance, 0)
        return self.second(h + self.strength * h.roll(self.distance, 0))


@pytest.mark.parametrize("back", [False, True], ids=["values", "rows"])
@pytest.mark.parametrize("distance", [1, 2, 3, 4, 6, 12])
def test_samples_far_apart_that_meet_are_seen(distance: int, back: bool) -> None:
    """A check on a few samples would not see it: there the distance may be a whole turn."""
    torch.manual_seed(0)
    model, x = Mixed(distance, 0.01, back), torch.randn(B, D)
    with pytest.raises(UnsupportedUse, match="micro-batch"), one_pass(model, 1):
        loss(model, (x,)).backward()


@pytest.mark.parametrize("M", [1, 2])
@pytest.mark.parametrize("strength", [1e-3, 0.3])
def test_weak_influence_is_seen(strength: float, M: int) -> None:
    torch.manual_seed(0)
    model, x = Mixed(B // 2, strength, False), torch.randn(B, D)
    with pytest.raises(UnsupportedUse, match="micro-batch"), one_pass(model, M):
        loss(model, (x,)).backward()


class Force(nn.Module):
    """A model that differentiates in its forward, and so needs what a check's run would not keep."""

    def __init__(self) -> None:
        super().__init__()
        self.energy = nn.Linear(D, 1)

    def forward(self, x: Tensor) -> Tensor:
        at = torch.ones_like(x, requires_grad=True)
        (slope,) = torch.autograd.grad((at * x).sin().sum(), at)
        return self.energy(slope.detach())


@pytest.mark.parametrize("M", [1, 5])
def test_a_model_that_differentiates_in_its_forward(M: int) -> None:
    torch.manual_seed(0)
    assert_exact(Force().double(), (torch.randn(B, D, dtype=torch.float64),), loss, M)


@pytest.mark.parametrize("shape", [(4, 3, 1000), (6, 700), (5,), (0, 3)])
@pytest.mark.parametrize("axis", [0, 1, None])
def test_a_summary_tells_of_every_element(shape: tuple[int, ...], axis: int | None) -> None:
    torch.manual_seed(0)
    if axis is not None and axis >= len(shape):
        return
    x = torch.randn(shape)
    before = summary(x, axis)
    assert before.shape[0] == (1 if axis is None else shape[axis])
    for place in [0, x.numel() // 2, x.numel() - 1] if x.numel() else []:
        y = x.clone()
        y.view(-1)[place] += 1e-3
        changed = (summary(y, axis) != before).any(1)
        assert changed.sum() == 1
    if x.numel():
        assert before.numel() <= 2 * x.shape.numel() // 256 + 2 * before.shape[0]


class Reader(nn.Module):
    """Positions, and layers before and after every second place is dropped; `first` has time before the batch."""

    def __init__(self, time_first: bool) -> None:
        super().__init__()
        self.places, self.layer, self.halved = nn.Embedding(200, D), nn.Linear(D, D), nn.Embedding(100, D)
        self.time_first, self.runs = time_first, 0

    def forward(self, x: Tensor) -> Tensor:
        self.runs += 1
        h = x + self.places(torch.arange(x.shape[1]))
        h = self.layer(h.transpose(0, 1)).transpose(0, 1) if self.time_first else self.layer(h)
        h = h[:, ::2].tanh()
        return h + self.halved(torch.arange(h.shape[1]))


@pytest.mark.parametrize("time_first", [False, True])
def test_lengths_are_looked_at_twice_and_where_they_could_be_the_batch(time_first: bool) -> None:
    torch.manual_seed(0)
    model, runs = Reader(time_first).double(), {}
    for length in (9, 33, 60, B, B - 1, 2 * B, 2 * B - 1, 77, 101):
        model.runs = 0
        assert_exact(model, (torch.randn(B, length, D, dtype=torch.float64),), loss, 4)
        runs[length] = model.runs
    quiet = min(runs.values())
    assert [n for n in runs if runs[n] == quiet] == [60, 77]


def test_what_takes_long_is_told(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(progress, "PATIENCE", 0.0)
    model = nn.Linear(D, D)
    with caplog.at_level("INFO", "invariant_adam"), one_pass(model, 4):
        loss(model, (torch.randn(B, D),)).backward()
    assert "gradients beside those of a loop" in caplog.text
    assert "samples exchanged" in caplog.text


class Sizes(nn.Module):
    """Notes the samples of each call; `inside` places come out of it, which may be as many as the samples."""

    def __init__(self, inside: int = 5) -> None:
        super().__init__()
        self.layer, self.mixed = nn.Linear(D, inside), nn.Linear(3, 3)
        self.seen: list[int] = []
        self.served: set[tuple[int, bool]] = set()  # samples, and whether Triton's kernels would serve
        self.full = False  # there is no memory for a whole mini-batch, once
        self.held: Any = None  # what was there when it was found out

    def forward(self, x: Tensor) -> Tensor:
        if not torch.compiler.is_compiling():
            self.seen.append(len(x))
            self.served.add((len(x), Serving.fused))
            if self.full:
                self.full, large = False, x.clone()
                self.held = weakref.ref(large)
                raise torch.OutOfMemoryError("no room for so many samples")
            assert self.held is None or self.held() is None  # it would be in the way
        return self.mixed(self.layer(x)[..., None].expand(-1, -1, 3).transpose(0, 1).tanh()).transpose(0, 1)


@pytest.mark.parametrize(("inside", "largest"), [(5, 6), (B, B), (2 * B, B)], ids=["free", "the batch", "a multiple"])
@pytest.mark.filterwarnings("ignore:.*should not be instantiated")  # by the tracer itself
def test_a_compiled_model_is_checked_on_a_part_that_tells_as_much(inside: int, largest: int) -> None:
    torch.manual_seed(0)
    torch._dynamo.reset()
    model, x = Sizes(inside).double(), torch.randn(B, D, dtype=torch.float64)
    compiled = torch.compile(model, backend="aot_eager")
    with one_pass(compiled, 1):
        loss(compiled, (x,)).backward()
    model.zero_grad()
    assert max(model.seen) == largest
    assert largest == B or not any(fused for _, fused in model.served)  # a few are not worth compiling kernels for
    assert_exact(model, (x,), loss, 1)


def test_without_memory_for_all_samples_a_part_is_checked() -> None:
    torch.manual_seed(0)
    model, x = Sizes().double(), torch.randn(B, D, dtype=torch.float64)
    model.full = True
    with one_pass(model, 2):
        loss(model, (x,)).backward()
    assert (model.seen[0], model.seen[-1]) == (B, B)
    assert max(model.seen[1:-1]) == 6
    model.zero_grad()
    assert_exact(model, (x,), loss, 2)
    model = Sizes(B).double()  # where a part would not tell as much, there is no way
    model.full = True
    with (
        one_pass(model, 2),
        pytest.raises(torch.OutOfMemoryError, match=rf"no room[\s\S]*these {B} [\s\S]*check=False"),
    ):
        loss(model, (x,))


class Chunked(nn.Module):
    """Mixes the samples of some batch sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer(x)
        return x - x.mean(0) if B // 2 < len(x) < 2 * B else x


@pytest.mark.filterwarnings("ignore:.*should not be instantiated")  # by the tracer itself
def test_a_part_refuses_no_compiled_model() -> None:
    torch.manual_seed(0)
    torch._dynamo.reset()
    model, x = Chunked().double(), torch.randn(2 * B, D, dtype=torch.float64)
    with one_pass(torch.compile(model, backend="aot_eager"), B // 2) as opened:
        loss(opened.model, (x,)).backward()
    model.zero_grad()
    assert_exact(model, (x,), loss, B // 2)


class Normed(nn.Module):
    """Deep, with batch norms and ReLUs, so that in bfloat16 rounding alone moves its gradients by themselves."""

    def __init__(self, width: int, depth: int = 24) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(width, width), nn.BatchNorm1d(width)) for _ in range(depth))
        self.whole: Any = None  # what a gradient of all samples is multiplied by on its way

    def forward(self, x: Tensor) -> Tensor:
        whole = self.whole
        for layer in self.layers:
            x = layer(x).relu()
        if whole is not None and x.requires_grad:
            x.register_hook(lambda g: g * whole.to(g) if len(g) == len(whole) else g)
        return x


def told(model: nn.Module, x: Tensor, M: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> str:
    """What the check of a model in bfloat16 says of itself."""
    monkeypatch.setattr(progress, "PATIENCE", 0.0)
    with caplog.at_level("INFO", "invariant_adam"), one_pass(model, M), torch.autocast("cpu", torch.bfloat16):
        model(x).float().sin().sum(1).mean().backward()
    return caplog.text


@pytest.mark.parametrize("M", [1, 4, 12])
def test_a_deep_model_with_a_size_of_the_batch_is_held_on_all_samples_in_its_own_precision(
    M: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    torch.manual_seed(0)
    model = Normed(B).eval() if M == 1 else Normed(B)
    said = told(model, torch.randn(B, B), M, monkeypatch, caplog)
    assert f"sums over {B} samples" in said
    assert f"loop over {B} samples" not in said


def test_a_short_micro_batch_is_held_against_the_loop(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    torch.manual_seed(0)
    said = told(nn.Linear(B - 2, B - 2), torch.randn(B - 2, B - 2), 4, monkeypatch, caplog)
    assert f"loop over {B - 2} samples" in said
    assert f"loop over {B - 2} samples, in" not in said


@pytest.mark.parametrize("M", [4, 12])
def test_what_differs_on_all_samples_alone_is_refused(M: int) -> None:
    """Each of a few micro-batches is as it should be; of all, one has another share in the backward."""
    torch.manual_seed(0)
    model = Normed(B, 2).double()
    model.whole = torch.linspace(0.5, 1.5, B)[:, None]
    with one_pass(model, M), pytest.raises(UnsupportedUse, match="disagree"):
        loss(model, (torch.randn(B, B, dtype=torch.float64),))


class Viewed(nn.Module):
    """Takes its images as they lie in memory, with channels last."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4 * B, B)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x.permute(0, 2, 3, 1).view(len(x), -1))


def test_micro_batches_made_alike_lie_in_memory_as_they_did() -> None:
    torch.manual_seed(0)
    x = torch.randn(B, B, 2, 2, dtype=torch.float64).to(memory_format=torch.channels_last)
    assert_exact(Viewed().double(), (x,), loss, 4)


def test_a_batch_in_another_dimension_is_found_beside_one_of_its_size(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A sequence of as many places as samples, which come second."""
    monkeypatch.setattr(progress, "PATIENCE", 0.0)
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(D, D), nn.Tanh(), nn.Linear(D, D)), torch.randn(B, B, D)
    with (
        caplog.at_level("INFO", "invariant_adam"),
        one_pass(model, 4, batch_dim=1),
        torch.autocast("cpu", torch.bfloat16),
    ):
        model(x).float().square().mean().backward()
    assert f"sums over {B} samples" in caplog.text
    assert f"loop over {B} samples" not in caplog.text


def test_a_first_micro_batch_without_gradient_tells_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    torch.manual_seed(0)
    x = torch.randn(B, B)
    x[:4] = 0
    said = told(nn.Linear(B, B, bias=False), x, 4, monkeypatch, caplog)
    assert f"sums over {B} samples" in said
    assert f"loop over {B} samples" in said
