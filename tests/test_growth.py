"""BatchGrowth: updates are cut as the equation says, and a run that grows in is the reference fed the same cuts."""

from __future__ import annotations

import copy
import math
import warnings

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from problems import distance, flat, gradient_of, loss, mlp, moments

import invariant_adam as ia
from invariant_adam import BatchGrowth, InvariantAdam, reference
from invariant_adam.growth import grown_kappa

M = 2


def data(samples, seed=3):
    return torch.randn(samples, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def optimizer_of(model):
    return InvariantAdam(model.parameters(), lr=1e-2, betas=(0.9, 0.99), weight_decay=0.1, micro_batch_size=M)


def train(model, opt, growth, samples, batch, start=0, once=False):
    """Grow in over mini-batches of `batch` samples; return the samples of each update."""
    xs, sizes = data(samples), []
    for first in range(start, samples, batch):
        for x in growth.split(xs[first : first + batch]):
            if once:
                with ia.one_pass(model, M, into=opt):
                    loss(model, x).backward()
            else:
                for part in x.split(M):
                    with opt.ragged(len(part)):
                        loss(model, part).backward()
            opt.step()
            sizes.append(len(x))
    return sizes


@given(
    kappa=st.integers(1, 9),
    batches=st.integers(1, 5),
    ratio=st.sampled_from([0.05, 0.1, 0.25, 1.0]),
    short=st.integers(0, 2 * M - 1),
)
def test_updates_are_cut_as_the_equation_says(kappa, batches, ratio, short):
    model = mlp()
    opt = optimizer_of(model)
    samples = max(1, kappa * M * batches - short)
    sizes = train(model, opt, BatchGrowth(opt, ratio), samples, kappa * M)
    assert sum(sizes) == samples == opt.samples_seen
    seen = 0
    for size in sizes:
        left = min(kappa * M - seen % (kappa * M), samples - seen)  # of the mini-batch
        assert size == min(left, M * max(1, math.floor(ratio * seen / M + 1e-9)))
        seen += size


@given(
    kappa=st.integers(1, 9),
    batches=st.integers(1, 4),
    ratio=st.sampled_from([0.1, 0.5, math.inf]),
    short=st.integers(0, 2 * M - 1),
    once=st.booleans(),
    powers=st.booleans(),
)
@settings(max_examples=20)
def test_it_is_the_reference_fed_the_same_cuts(kappa, batches, ratio, short, once, powers):
    model = mlp()
    start = copy.deepcopy(model)
    opt = optimizer_of(model)
    samples = max(1, kappa * M * batches - short)
    growth = BatchGrowth(opt, ratio, powers_of_two=powers)
    sizes = train(model, opt, growth, samples, kappa * M, once=once)
    state, xs, first = reference.start(flat(start.parameters())), data(samples), 0
    probe = copy.deepcopy(start)
    for size in sizes:
        parts = xs[first : first + size].split(M)
        # A short micro-batch counts n/M; the reference takes each sample's weight from how often it is there.
        grads = [gradient_of(probe, x) for x in parts for _ in x]
        h = ia.scaling.scale(1e-2, (0.9, 0.99), 0.1, from_batch=M, to_batch=size, rule="exponential")
        state = reference.invariant_adam(state, grads, h)
        first += size
    assert distance(flat(model.parameters()), state.w) < 1e-10
    assert distance(moments(opt)[1], state.v) < 1e-10


@given(
    seen=st.integers(0, 400),
    whole=st.integers(1, 40),
    done=st.integers(0, 39),
    ratio=st.sampled_from([0.05, 0.1, 0.3, math.inf]),
)
def test_sizes_are_few_powers_of_two(seen, whole, done, ratio):
    left = max(1, whole - done)
    plain = grown_kappa(left, seen, ratio)
    size = grown_kappa(left, seen, ratio, whole=whole, powers_of_two=True)
    assert 1 <= size <= plain <= left
    assert plain == min(left, max(1, math.floor(ratio * seen + 1e-9) if ratio < math.inf else left))
    assert size == whole or size & (size - 1) == 0
    assert size > plain / 2


def test_a_resumed_run_goes_on_where_it_was():
    model, whole = mlp(), mlp()
    opt = optimizer_of(whole)
    sizes = train(whole, opt, BatchGrowth(opt), 96, 16)
    opt = optimizer_of(model)
    before = train(model, opt, BatchGrowth(opt), 48, 16)
    resumed = optimizer_of(model)
    resumed.load_state_dict(opt.state_dict())
    after = train(model, resumed, BatchGrowth(resumed), 96, 16, start=48)
    assert before + after == sizes
    assert distance(flat(model.parameters()), flat(whole.parameters())) < 1e-12


def test_nested_batches_and_other_leaves():
    opt = optimizer_of(mlp())
    batch = {"x": torch.arange(4), "more": [torch.arange(8).view(4, 2), "a name"], "number": torch.tensor(3.0)}
    (first, *_) = BatchGrowth(opt).split(batch)
    assert first["x"].tolist() == [0, 1]
    assert first["more"][0].tolist() == [[0, 1], [2, 3]]
    assert first["more"][1] == "a name"
    assert first["number"] == 3


def test_lists_and_arrays_with_an_item_per_sample_are_cut():
    growth = BatchGrowth(optimizer_of(mlp()))
    batch = {"x": torch.arange(4), "names": list("abcd"), "sizes": [1, 2, 3, 4], "shape": (2, 3, 4, 5), "two": ["a"]}
    parts = [batch | {"array": torch.arange(4).numpy()}]
    for part in growth.split(*parts):
        assert len(part["x"]) == len(part["names"]) == len(part["sizes"]) == len(part["array"]) == 2
        assert part["x"].tolist() == part["array"].tolist() == [size - 1 for size in part["sizes"]]
        assert "abcd"[part["x"][0]] == part["names"][0]
        assert (part["shape"], part["two"]) == ((2, 3, 4, 5), ["a"])
        growth.optimizer.abandon()


def test_mistakes_are_named():
    model = mlp()
    opt = optimizer_of(model)
    with pytest.raises(ValueError, match="ratio must be positive, got 0"):
        BatchGrowth(opt, 0)
    growth = BatchGrowth(opt)
    with pytest.raises(ValueError, match="limit must be at least one micro-batch, got 0"):
        growth.next_kappa(0)
    with pytest.raises(ValueError, match="ratio must be positive, got nan"):
        BatchGrowth(opt, math.nan)
    with pytest.raises(ValueError, match=r"as many samples each, got \[4, 6\]"):
        next(growth.split(torch.ones(4), torch.ones(6)))
    with pytest.raises(ValueError, match="give it micro_batch_size"):
        next(BatchGrowth(InvariantAdam(mlp().parameters())).split(torch.ones(4)))
    loss(model, data(2)).backward()
    with pytest.raises(RuntimeError, match="BatchGrowth"):
        growth.next_kappa(4)


def first_update(kappa, prepare=lambda opt: None, **options):
    model = mlp()
    opt = InvariantAdam(model.parameters(), micro_batch_size=M, **options)
    prepare(opt)
    for x in data(kappa * M).split(M):
        loss(model, x).backward()
    opt.step()
    return model, opt


def test_a_large_first_update_warns_once_with_the_remedy():
    message = r"first update has 4 micro-batches, 4 times the tuned batch.*BatchGrowth\(opt\)"
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model, opt = first_update(4)
        for x in data(4 * M).split(M):
            loss(model, x).backward()
        opt.step()
    (one,) = caught
    assert one.category is ia.FirstUpdateWarning
    assert one.filename == __file__  # the line that calls step()
    with pytest.warns(ia.FirstUpdateWarning, match=message):
        first_update(4)


@pytest.mark.parametrize(
    ("kappa", "options", "prepare"),
    [
        (1, {}, lambda opt: None),
        (4, {"tuned_batch_size": 4 * M}, lambda opt: None),  # as tuned
        (4, {}, BatchGrowth),
        (4, {}, lambda opt: BatchGrowth(opt, math.inf)),  # a large first update is meant
    ],
    ids=["one", "tuned", "growth", "chosen"],
)
def test_a_first_update_that_is_small_or_chosen_does_not_warn(kappa, options, prepare):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        first_update(kappa, prepare, **options)


def test_the_warning_has_a_switch():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.simplefilter("ignore", ia.FirstUpdateWarning)
        first_update(4)


def test_gradients_that_shrink_while_a_run_grows_in_are_no_divided_loss():
    w = torch.nn.Parameter(torch.ones(50, dtype=torch.float64))
    opt = InvariantAdam([w], lr=0.0, micro_batch_size=1)
    growth = BatchGrowth(opt)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(20):
            for x in growth.split(torch.ones(4)):
                for _ in x:
                    (w.sum() / max(1.0, opt.queue.update.expected)).backward()
                opt.step()


def test_a_compiled_model_has_one_graph_of_the_whole_mini_batch():
    """The pieces of the first mini-batches have many sizes, and a graph for all sizes would be slower for good."""
    from torch._dynamo.testing import CompileCounterWithBackend

    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    plain, model = mlp(), mlp()
    compiled, runs = torch.compile(model, backend=counter), []
    for run, inner in ((plain, plain), (compiled, model)):
        opt = optimizer_of(inner)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*should not be instantiated")  # by the tracer itself
            runs.append(train(run, opt, BatchGrowth(opt, 0.5), 64, 16, once=True))
    assert runs[0] == runs[1]
    assert len(set(runs[0])) > 3
    assert counter.frame_count == 1
    shapes = [node.meta["example_value"].shape for node in counter.graphs[0].graph.nodes if node.op == "placeholder"]
    assert all(isinstance(n, int) for shape in shapes for n in shape)
    assert any(shape[:1] == (16,) for shape in shapes)
    assert distance(flat(plain.parameters()), flat(model.parameters())) < 1e-12
    assert torch._dynamo.eval_frame._stance.stance == "default"


def test_torch_compile_is_left_as_it_was_where_growing_in_fails():
    model = mlp()
    opt = optimizer_of(model)
    assert BatchGrowth(opt).next_kappa(4) == 1  # a part of the mini-batch
    stances = []

    def fail():
        stances.append(torch._dynamo.eval_frame._stance.stance)
        raise ValueError("a batch that cannot be read")

    with pytest.raises(ValueError, match="cannot be read"), ia.one_pass(model, M):
        fail()
    assert stances == ["force_eager"]
    assert torch._dynamo.eval_frame._stance.stance == "default"
