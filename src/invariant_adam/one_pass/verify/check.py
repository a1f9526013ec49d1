"""Establish, by running the model, that the rows a parameter sees stay with their samples.

Sizes alone cannot tell a batch from a sequence of the same length, or rows in order from rows that were permuted. So
the first time a model meets a shape of input it is run again with the samples of one micro-batch exchanged:

    every row that a rule assigns to another micro-batch must be as before;
    what a rule takes for a constant must be as before;
    the model's outputs for other samples must be as before (nothing couples samples);
    a scalar output (a loss) must be a sum over micro-batches: f(a',b') - f(a',b) - f(a,b') + f(a,b) = 0.

It is also run with fewer micro-batches: a tensor whose size does not shrink with the batch is not batched. Then the
gradients and squares themselves are held against a loop (`against_loop`). A compiled model is checked as it is written,
on a part of its micro-batches.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.utils.parametrizations import _SpectralNorm
from torch.utils._pytree import tree_leaves

from ..groups import Groups, UnsupportedUse, without_samples
from ..mini_batch import MiniBatch
from ..model import ModelFacts, Site
from ..ops.base import Squaring
from ..ops.batch_norm import ghosts
from ..routing import sample_groups
from ..weight import Lifted
from .against_loop import check_gradients, coincides, few_of, sizes
from .lengths import Look, extremes, input_sizes, look, surprising
from .probe import Probe, Record, Trial, close, setting, summed_up
from .progress import Progress
from .rehearsal import rehearse
from .shares import check_losses, refuse_unequal_rows

ROUNDS = 8  # at most: each but the last reclassifies a use


def _outside(record: Record, groups: Groups, changed: int) -> Tensor:
    """The rows of a record that do not belong to group `changed`."""
    x, ids = record.rows[record.axis or 0], record.ids
    if ids is None:
        ids = sample_groups(groups, x.shape[0], x.device)
    return x[ids != changed]


def _signature(trial: Trial, additive: bool, shapes: bool = True) -> Any:
    """What a check holds for: the inputs' shapes and plain values, the mini-batch, the loss and the modes.

    Each shape is checked on its own, since inside the model any length may come out as the batch's; see `lengths`.
    """

    def what(t: Any) -> Any:
        plain = t if isinstance(t, (bool, int, str, type(None))) else str(type(t))
        return (tuple(t.shape) if shapes else t.ndim) if isinstance(t, Tensor) else plain

    leaves = tuple(what(t) for t in tree_leaves(trial.inputs))
    modes, groups = tuple([m.training for m in trial.mini.facts.modules]), trial.mini.groups
    return leaves, groups.batch, groups.c is None, additive, trial.mini.reduction, modes


def verify(mini: MiniBatch, module: nn.Module, args: Any, kwargs: Any, additive: bool = True) -> None:
    """Check the model on these inputs, once per shape."""
    trial = Trial(mini, getattr(module, "_orig_mod", module), (args, kwargs))
    key, facts, groups = _signature(trial, additive), mini.facts, mini.groups
    if key in facts.findings.checked:
        return
    form = _signature(trial, additive, shapes=False)
    looks = facts.findings.looks.get(form, ())
    if len(looks) == 2 and not surprising(*looks, input_sizes(trial), groups.batch, groups.micro):
        facts.find(checked=facts.findings.checked | {key})
        return
    tell, compiled, first = Progress(), _is_compiled(module), not facts.findings.passed
    # cuDNN would try its algorithms for shapes and dtypes that no other update has, with gigabytes of workspace.
    with torch.compiler.set_stance("force_eager"), setting(torch.backends.cudnn, "benchmark", False):
        if first and not compiled and facts.norms:
            rehearse(trial, tell, backward=False)  # the check has forwards of the whole mini-batch
        seen, now = _look_at_part_or_whole(trial, additive, tell, compiled)
        if first and not compiled:  # a graph has other kernels, and less memory than the model as it is written
            rehearse(trial, tell)
    facts.find(passed=True)
    if seen:
        looks = extremes((*looks, now))
        facts.find(checked=facts.findings.checked | {key}, looks={**facts.findings.looks, form: looks})


def _is_compiled(module: nn.Module) -> bool:
    """Whether torch.compile makes graphs of the model, or of a part of it."""
    return any(hasattr(m, "_orig_mod") or getattr(m, "_compiled_call_impl", None) for m in module.modules())


def _look_at_part_or_whole(
    trial: Trial, additive: bool, tell: Callable[[str], None], compiled: bool
) -> tuple[bool, Look]:
    """Establish it on all micro-batches, or on a part of them: of a compiled model, or where there is no more memory.

    A graph may need a fraction of the memory of the model as it is written, which is how it is checked. A part will do
    if no size inside of the model is that of the whole batch, for which it might then be taken.
    """
    part, batch, facts = _part(trial), trial.mini.groups.batch, trial.mini.facts
    before = facts.findings

    def by_part() -> tuple[bool, Look] | None:
        if part is None:
            return None
        with trial.of_few(part) as small:
            found = _establish(small, additive, tell)
        return None if found[1].has(batch) else found

    found = None
    if compiled:
        try:
            found = by_part()
        except UnsupportedUse:  # perhaps because a size inside is the part's: the whole decides
            facts.findings = before
    if found is not None:
        return found
    try:
        return _establish(trial, additive, tell)
    except torch.OutOfMemoryError as error:
        short = error.with_traceback(None)  # whose frames hold the tensors that there is no room beside
    facts.findings = before
    torch.cuda.empty_cache()
    found = None if compiled else by_part()
    if found is None:
        raise torch.OutOfMemoryError(
            f"{short}\none_pass checks a model on its first mini-batch, uncompiled; a part of these {batch} samples "
            "would not tell as much as all: another size in the model is the same, or there are too few micro-batches. "
            "Choose another batch size, or check the model at a smaller one and pass check=False here"
        ) from short
    return found


def _part(trial: Trial) -> int | None:
    """A quarter of the micro-batches, or a few more; None where that would not tell as much as all of them."""
    groups, taken = trial.mini.groups, sizes(trial)
    if groups.batch in taken:
        return None
    least = max(2, groups.kappa // 4)
    return next((k for k in range(least, min(least + 4, groups.kappa)) if k * groups.micro not in taken), None)


def _establish(trial: Trial, additive: bool, tell: Callable[[str], None]) -> tuple[bool, Look]:
    """All of the check: whether any two micro-batches differ, so that there was something to see, and its sizes."""
    facts = trial.mini.facts
    rounds = (_round(trial, additive, tell) for _ in range(ROUNDS))
    settled = next((found for found in rounds if found is not None), None)
    if settled is None:
        raise UnsupportedUse("the check of the model does not settle; loop over micro-batches")
    base, outputs, seen = settled
    now = look(trial, base)
    tell("its buffers and its losses")
    _compare_unrounded(trial)
    _check_buffers(trial, base.written)
    if additive:
        check_losses(trial, outputs)
    _find_tied(facts, base)
    if not facts.findings.passed or coincides(trial):
        check_gradients(trial, tell)
    return seen, now


def _round(trial: Trial, additive: bool, tell: Callable[[str], None]) -> tuple[Probe, list[Any], bool] | None:
    """A run, held against the plain one, against one with samples exchanged, and against one of fewer micro-batches.

    Returns its record, its outputs, and whether the exchange changed any sample. None where a use had to be
    reclassified: rules then see the batch elsewhere, and another round must look again.
    """
    mini, facts, groups = trial.mini, trial.mini.facts, trial.mini.groups
    try:
        base, outputs = trial.run()
    except UnsupportedUse as error:
        _reconsider(trial, error)
        return None
    before = facts.findings  # replaced as a whole where a use is reclassified
    alone = [o for o in outputs if isinstance(o, Lifted)]
    _find_leaks(mini, outputs)
    if additive and mini.reduction == "mean":
        refuse_unequal_rows(groups, outputs)
    outputs = summed_up(outputs, groups.batch)
    if not any(isinstance(m, _BatchNorm) and ghosts(m) for m in trial.model.modules()):
        tell("its forward beside the plain one")
        _compare_forward(trial, outputs)
    tell("its forward with samples exchanged")
    seen = False
    for k in {0, groups.kappa - 1}:
        exchanged, visible = trial.exchanged(k)
        if not visible:
            continue
        seen = True
        other, changed = exchanged.run(partial(summed_up, batch=groups.batch))
        _compare_uses(mini, base, other, k)
        if facts.findings is not before:
            return None
        _compare_outputs(groups, outputs, changed, k)
    _compare_shapes(trial, base)
    if facts.findings is not before:
        return None
    for o in alone:
        raise without_samples(o.handle.label, f"is returned by the model, with the shape {tuple(o.shape)}")
    return base, outputs, seen


def _find_tied(facts: ModelFacts, base: Probe) -> None:
    """Note which parameters a run has used several times, and which of them as a table: embeddings, then one linear."""
    for entry in facts.order:
        entry.tied = entry.tied or base.uses[entry.name] > 1
        if entry.tied:
            used = base.served[entry.name]
            table = used == ["embedding"] * used.count("embedding") + ["linear"] * ("linear" in used)
            entry.table = table and entry.table is not False


def _reconsider(trial: Trial, error: UnsupportedUse) -> None:
    """Where a run is refused, find uses before it that were taken for constants, or for the batch's, and are not.

    What changes with the samples is the batch's, or with their number alone, as a mask that is drawn for each. What has
    the batch's size, whatever that is, is a constant. If there is nothing to find, it stays refused; by the name of a
    custom Function, where one is behind it.
    """
    groups, facts = trial.mini.groups, trial.mini.facts
    base, before = error.probe or Probe(), facts.findings
    error.probe = None  # it may be kept for long, and this is large
    with trial.plainly():
        try:
            outputs = trial.run()[1]
        except Exception:
            raise error from None
    _find_leaks(trial.mini, outputs)
    others = [trial.exchanged(k)[0].seen() for k in {0, groups.kappa - 1}]
    with trial.of_few(_fewer(trial)) as small:
        others.append(small.seen())
    for site, records in base.records.items():
        if site not in facts.findings.batched and any(_changed(records, o.records.get(site, [])) for o in others):
            facts.find_batched(site)
    _compare_shapes(trial, base)
    if facts.findings is before:
        raise error


def _compare_forward(trial: Trial, outputs: list[Any]) -> None:
    """The forward through the rules must be the model's own, in its own precision, autocast included.

    Not that of a batch norm, whose statistics change.
    """
    with trial.plainly():
        plain = trial.run(partial(summed_up, batch=trial.mini.groups.batch))[1]
    for a, b in zip(outputs, plain, strict=False):
        if not (isinstance(a, (Tensor, Record)) and isinstance(b, (Tensor, Record))):
            continue
        if a.dtype != b.dtype:
            raise UnsupportedUse(
                f"the model's forward in one_pass gives {a.dtype} where its own gives {b.dtype}: an operation's rule "
                "does not follow autocast; please report it, and loop over micro-batches"
            )
        x, y = (t.whole if isinstance(t, Record) else t for t in (a, b))
        if a.shape != b.shape or not close(x, y, slack=100, dtype=a.dtype):
            raise UnsupportedUse(
                "the model's forward in one_pass differs from its own: an operation writes over a value of parameters, "
                "or an operation's rule does not cover its use; please report it, and loop over micro-batches"
            )


def _compare_uses(mini: MiniBatch, base: Probe, other: Probe, changed: int) -> None:
    """Compare two runs; where a use has to be reclassified, that is found, and the runs must be repeated."""
    groups, facts, before = mini.groups, mini.facts, mini.facts.findings
    for site in dict.fromkeys((*base.records, *other.records)):  # in the order of the forward: the first one is named
        found = facts.findings
        first, second = base.records.get(site, []), other.records.get(site, [])
        if _changed(first, second):
            if site in found.batched:
                raise _unclear(site)
            facts.find_batched(site)
        elif not _rows_agree(first, second, groups, changed):
            axis = _other_axis(first, second, groups, changed)
            if axis is None or site in found.axes:
                if found is not before:
                    return  # perhaps because of a use before it, which is known better now
                raise UnsupportedUse(
                    f"{site[0]} goes through {site[1]} on rows that change when samples of another micro-batch change: "
                    "the samples are mixed, permuted or not where batch_dim says; keep the batch in its dimension and "
                    "samples apart, or loop over micro-batches"
                )
            facts.find(axes={**found.axes, site: axis})
        elif site not in found.batched and any(map(_untouched, first, second)):
            facts.find(constant=found.constant | {site})


def _changed(first: list[Record], second: list[Record]) -> bool:
    """Whether a use that was taken for one of a constant has changed with the samples."""
    both = zip(first, second, strict=False)
    return any(not r.placed and not (r.shape == s.shape and _agree(r.whole, s.whole, r)) for r, s in both)


def _untouched(r: Record, s: Record) -> bool:
    """Whether a use was not touched by the exchange and is not the same for all samples: a constant of fitting size."""
    if r.axis is None or r.varies or not r.shape.numel():
        return False
    along = r.rows[r.axis]  # equal, not "close": beside one large sample all others are
    return torch.equal(r.whole, s.whole) and not _agree(along[:1].expand_as(along), along, r)


def _agree(x: Tensor, y: Tensor, record: Record, slack: float = 1) -> bool:
    """Whether summaries are equal, up to the rounding of the tensors that they are of."""
    return close(x, y, slack, record.dtype)


def _compare_shapes(trial: Trial, base: Probe) -> None:
    """Compare with a run of a few micro-batches: a tensor that is as large there as here is not batched.

    This finds a constant whose length is the batch's and whose rows are all the same, as the types of tokens are.
    """
    facts = trial.mini.facts
    with trial.of_few(_fewer(trial)) as small:
        other = small.seen()  # if it does not run on a few alone, the loop will say so
    for site, records in base.records.items():
        same = {r.shape for r in other.records.get(site, ()) if r.ids is None and (r.axis is None or not r.varies)}
        if any(r.axis is not None and not r.varies and r.shape in same for r in records):
            if site in facts.findings.batched:
                raise _unclear(site)
            facts.find(constant=facts.findings.constant | {site})


def _fewer(trial: Trial) -> int:
    """Fewer micro-batches than there are."""
    few, kappa = few_of(trial), trial.mini.groups.kappa
    return few if few < kappa else kappa // 2


def _rows_agree(first: list[Record], second: list[Record], groups: Groups, changed: int) -> bool:
    """Whether the rows of the groups that were left alone are the same in two runs."""
    rows = ([(_outside(r, groups, changed), r) for r in records if r.placed] for records in (first, second))
    left, right = ([(x, r) for x, r in each if len(x)] for each in rows)
    return len(left) == len(right) and all(_agree(x, y, r) for (x, r), (y, _) in zip(left, right, strict=True))


def _other_axis(first: list[Record], second: list[Record], groups: Groups, changed: int) -> int | None:
    """Another dimension of size B that holds the batch in all records of a use but constants, if there is one."""
    first, second = ([r for r in records if r.placed] for records in (first, second))
    both = (*first, *second)
    if any(r.axis is None for r in both) or not first:
        return None
    for axis in range(min(len(r.shape) for r in both)):
        left, right = ([r._replace(axis=axis) for r in records] for records in (first, second))
        if all(r.shape[axis] == groups.batch for r in both) and _rows_agree(left, right, groups, changed):
            return axis
    return None


def _unclear(site: Site) -> UnsupportedUse:
    return UnsupportedUse(
        f"{site[0]} goes through {site[1]} both with the batch and with constants of the batch's size; "
        "choose another batch size, or loop over micro-batches"
    )


def _compare_outputs(groups: Groups, outputs: list[Any], changed: list[Any], k: int, slack: float = 1) -> None:
    for a, b in zip(outputs, changed, strict=False):
        if not isinstance(a, Record) or not a.varies or a.shape != b.shape:
            continue
        axes = [d for d, n in enumerate(a.shape) if n == groups.batch]
        others = ([_outside(r._replace(axis=d), groups, k) for r in (a, b)] for d in axes)
        if axes and not any(_agree(x, y, a, slack) for x, y in others):
            raise UnsupportedUse(
                "the model's output for one sample depends on samples of other micro-batches, so its loss is not a "
                "mean over micro-batches (batch statistics? in-batch negatives?); loop over micro-batches"
            )


def _compare_unrounded(trial: Trial) -> None:
    """Where autocast is on, exchange samples once more, without it and on a few micro-batches.

    One of many micro-batches may change the others by less than autocast rounds. The loop does not see that in a model
    that draws random numbers, which is held against it in eval mode.
    """
    mini = trial.mini
    kinds = {entry.param.device.type for entry in mini.facts.order}
    few = min(few_of(trial), mini.groups.batch // mini.groups.micro, 7)
    if few < 2 or not any(map(torch.is_autocast_enabled, kinds)):
        return
    with trial.of_few(few) as small, ExitStack() as stack:
        for kind in kinds:
            stack.enter_context(torch.autocast(kind, enabled=False))
        exchanged, visible = small.exchanged(0)
        try:
            summed = partial(summed_up, batch=mini.groups.batch)
            before, after = small.run(summed)[1], exchanged.run(summed)[1]
        except Exception:  # it needs autocast
            return
        if visible:
            _compare_outputs(mini.groups, before, after, 0, slack=100)  # of a few, each moves the others much


def _check_buffers(trial: Trial, written: set[str]) -> None:
    """Buffers that a forward changes must end up as after the loop, which would change them κ times."""
    model = trial.model
    for path, m in model.named_modules():
        if isinstance(m, _SpectralNorm) and m.training:  # nearly converged at first, so that a comparison could miss it
            raise UnsupportedUse(
                f"{path} is a spectral norm, whose power iteration the loop would run for each micro-batch; put it in "
                "eval mode, loop over micro-batches, or pass check=False if once per mini-batch will do"
            )
    norms = {path for path, m in model.named_modules() if isinstance(m, _BatchNorm)}
    names = sorted(name for name in written if name.rpartition(".")[0] not in norms)
    if not names:
        return

    def values(_: Any) -> list[Tensor]:
        return [model.get_buffer(name).clone() for name in names]

    def loop(_: Any) -> list[Tensor]:
        for k in range(1, trial.mini.groups.kappa):
            args, kwargs = trial.cut(k).inputs
            model(*args, **kwargs)
        return values(None)

    got = trial.run(values)[1]
    with trial.plainly():
        wants = trial.cut(0).run(loop)[1]
    for name, x, y in zip(names, got, wants, strict=True):
        if not close(x, y):
            raise UnsupportedUse(
                f"the buffer {name} is changed in the forward, and would be changed otherwise by a loop over "
                "micro-batches (running statistics of your own? a power iteration?); put its module in eval mode, loop "
                "over micro-batches, or pass check=False if the difference is welcome"
            )


def _find_leaks(mini: MiniBatch, outputs: list[Any]) -> None:
    """A custom autograd.Function takes parameters without being seen: find it in the graph."""
    by_param = {id(e.param): e for e in mini.facts.order}
    stack: list[Any] = [o.grad_fn for o in outputs if isinstance(o, Tensor)]
    seen = {None}
    while stack:
        node = stack.pop()
        if node in seen:
            continue
        seen.add(node)
        maker = getattr(node, "_forward_cls", None)
        for parent, _ in node.next_functions:
            entry = by_param.get(id(getattr(parent, "variable", None)))
            if entry is not None and maker is not None and not issubclass(maker, Squaring):
                raise UnsupportedUse(
                    f"{entry.name} goes through {maker.__name__}, a custom autograd.Function that "
                    "hides it; write it with torch operations, or loop over micro-batches"
                )
            stack.append(parent)
