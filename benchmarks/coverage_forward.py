"""The models of coverage.py under autocast and torch.compile: is the forward the model's own, are pairs exact?

    python benchmarks/coverage_forward.py --out benchmarks/results/coverage_forward_cpu.json
    python benchmarks/coverage_forward.py --how compiled --only transformers:llama,timm:resnet

Looks at the models that `coverage_cpu.json` has as exact. Each look has a process of its own; rows that the file has
are not made again.

    bf16, fp16   under autocast, everything that any module returns is held against what it returns outside of
                 `one_pass`: `same`, or `other` where a dtype or one bit differs. Batch norms are in eval mode for that,
                 as each micro-batch has statistics of its own. `checked` is one pass with its check, in train mode: its
                 pairs are held against the loop under the same autocast, which rounds as much. `warned` where it says
                 what a plain step does not.
    compiled     three calls of the model under torch.compile (aot_eager), each held against the loop of the plain model
                 as in coverage.py. `graphs` were made in the first call, `more` in the two after it; `plain_graphs`
                 and `plain_more` are torch's without one pass, where there is more than one.

Other outcomes are those of coverage.py, and `failed` where anything else was raised.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import warnings
from collections import Counter
from contextlib import nullcontext
from pathlib import Path

import coverage

HOWS = ("bf16", "fp16", "compiled")
EXACT = Path(__file__).resolve().parent / "results" / "coverage_cpu.json"
ROUNDING = 4  # a pair may be so many times as far from the loop's as those are from float32's


def returns(model, call):
    """What all modules return in a call, in order: each tensor with the name of its module."""
    import torch
    from torch.nn.modules.module import register_module_forward_hook
    from torch.utils._pytree import tree_leaves

    names, found = {m: n for n, m in model.named_modules() if n}, []

    def look(module, _, out):
        name = names.get(module, type(module).__name__)
        leaves = tree_leaves(out.to_tuple() if hasattr(out, "to_tuple") else out)
        found.extend((name, t.detach().clone()) for t in leaves if isinstance(t, torch.Tensor))

    handle = register_module_forward_hook(look)
    try:
        call()
    finally:
        handle.remove()
    return found


def compare(model, batch, forward, dtype):
    """Whether the modules return the same inside of one pass as outside, under autocast to this dtype."""
    import torch

    from invariant_adam.one_pass import one_pass

    start = {n: b.clone() for n, b in model.named_buffers()}

    def call():
        for n, b in model.named_buffers():
            b.copy_(start[n])
        torch.manual_seed(1)
        with torch.autocast("cpu", dtype):
            return returns(model, lambda: forward(batch))

    plain, again = call(), call()
    if differences(plain, again):
        return {"outcome": "left out", "why": "returns other values each time"}
    with one_pass(model, coverage.MICRO, check=False):
        inside = call()
    other = differences(plain, inside)
    if not other:
        return {"outcome": "same", "tensors": len(plain)}
    return {"outcome": "other", "tensors": len(plain), "others": len(other), "why": other[0]}


def differences(plain, inside):
    """What differs, in words."""
    import torch

    if [name for name, _ in plain] != [name for name, _ in inside]:
        return ["other modules are called"]
    found = []
    for (name, want), (_, got) in zip(plain, inside, strict=True):
        if got.dtype != want.dtype:
            found.append(f"{name}: {want.dtype} outside, {got.dtype} inside")
        elif not torch.equal(got.nan_to_num(), want.nan_to_num()):
            found.append(f"{name}: off by {(got.double() - want.double()).abs().max():.1e}, {want.dtype}")
    return found


def loss_of(out):
    """A loss of what a model returns: a mean over samples."""
    out = getattr(out, "logits", out)
    out = out[0] if isinstance(out, (tuple, list)) else out
    return (out.float() if out.element_size() < 4 else out).flatten(1).sin().sum(1).mean()


def loop(model, batch, forward):
    """Mean and mean square of the gradients of the micro-batches, in float64, for each parameter that has some."""
    import torch

    named = {n: p for n, p in model.named_parameters() if p.requires_grad and p.numel()}
    start, pairs = {n: b.clone() for n, b in model.named_buffers()}, {}
    for part in batch.split(coverage.MICRO):
        grads = torch.autograd.grad(loss_of(forward(part)), list(named.values()), allow_unused=True)
        for n, g in zip(named, grads, strict=True):
            if g is not None:
                share, (mean, square) = len(part) / coverage.SAMPLES, pairs.get(n, (0, 0))
                pairs[n] = mean + share * g.double(), square + share * g.double().square()
    for n, b in model.named_buffers():
        b.copy_(start[n])
    return pairs


def checked(model, batch, forward, dtype):
    """One pass with its check under autocast: its outcome beside a loop that rounds as much, and its warnings.

    A channel that batch norm finds nearly constant magnifies what is rounded by hundreds, in the loop as well, and not
    among other samples. A single number may be rounded little by chance. So a pair that is far off is looked at in
    other micro-batches, and beside all that the loop was off by.
    """
    import torch

    from invariant_adam.one_pass import UnsupportedUse, one_pass

    rounded = {}
    for _ in range(3):
        with warnings.catch_warnings(record=True) as usual:
            warnings.simplefilter("always")
            true = loop(model, batch, forward)
            with torch.autocast("cpu", dtype):
                wants = loop(model, batch, forward)
        model.zero_grad()
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            try:
                with one_pass(model, coverage.MICRO):
                    with torch.autocast("cpu", dtype):
                        value = loss_of(forward(batch))
                    value.backward()
            except UnsupportedUse as error:
                return {"outcome": "refused", "why": str(error)}
        new = {str(w.message) for w in said} - {str(w.message) for w in usual}
        if new:
            return {"outcome": "warned", "why": sorted(new)[0]}
        if not all(bool(t.isfinite().all()) for pair in wants.values() for t in pair):
            return {"outcome": "left out", "why": "the gradients of the loop are not finite"}
        for n, pair in wants.items():
            now = [float((want - exact).norm()) for want, exact in zip(pair, true[n], strict=True)]
            rounded[n] = [max(both) for both in zip(rounded.get(n, now), now, strict=True)]
        row = beside(model, wants, rounded)
        if row["outcome"] == "exact":
            break
        batch = batch.roll(1, 0)
    return row


def beside(model, wants, rounded):
    """The pairs that are left on a model, beside those of a loop in few bits, which has `rounded` by so much itself."""
    named, worst, where = dict(model.named_parameters()), 0.0, ""
    least = [share * max(float(pair[i].norm()) for pair in wants.values()) for i, share in ((0, 1e-2), (1, 1e-4))]
    for n, pair in wants.items():
        p = named[n]
        for got, want, usual, small in zip((p.grad, p.grad_sq), pair, rounded[n], least, strict=True):
            usual += 0.02 * max(float(want.norm()), small)
            error = float((got.double() - want).norm()) / usual
            if error > worst:
                worst, where = error, n
        del p.grad_sq, p.grad_kappa
    return {"outcome": "wrong" if worst > ROUNDING else "exact", "error": float(f"{worst:.2g}"), "worst": where}


def autocast(model, batch, forward, how):
    """The row of one model under autocast."""
    import torch

    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[how]
    model = model.float()
    batch = batch.float() if batch.is_floating_point() else batch
    try:
        with torch.autocast("cpu", dtype):
            loss_of(forward(batch)).backward()
    except Exception as error:
        return {"outcome": "left out", "why": f"does not run so by itself: {type(error).__name__}: {error}"}
    model.zero_grad()
    found = checked(model, batch, forward, dtype)  # what it finds out, `compare` needs
    model.zero_grad()
    for m in model.modules():
        if isinstance(m, torch.nn.modules.batchnorm._BatchNorm):
            m.eval()
    return compare(model, batch, forward, dtype) | {"checked": found}


def compiled(model, batch, forward):
    """The row of one model under torch.compile."""
    import torch

    experts = any("Experts" in type(m).__name__ for m in model.modules())
    together = hold(model, batch, forward, torch.float32) if experts else None
    if experts:
        model.set_experts_implementation("eager")
    torch._dynamo.reset()
    try:
        row = hold(model, batch, forward, torch.float64)
    except RuntimeError:  # perhaps because it makes tensors of its own in the default precision
        torch.set_default_dtype(torch.float64)
        torch._dynamo.reset()
        row = hold(model, batch, forward, torch.float64)
    return row | ({"experts_by_default": together} if experts else {})


def hold(model, batch, forward, dtype):
    """Hold one pass of the compiled model against the loop of the plain one, three times."""
    import torch
    from torch._dynamo.utils import counters

    from invariant_adam.one_pass import UnsupportedUse, one_pass

    model = model.to(dtype)
    batch = batch.to(dtype) if batch.is_floating_point() else batch
    wants, given = loop(model, batch, forward), []
    hook = model.register_forward_pre_hook(lambda _, args, kwargs: given.append((args, kwargs)), with_kwargs=True)
    with torch.no_grad():
        forward(batch)
    hook.remove()
    ((args, kwargs),) = given
    start = {n: b.clone() for n, b in model.named_buffers()}
    run = torch.compile(model, backend="aot_eager")
    counters.clear()

    def call(around):
        for n, b in model.named_buffers():
            b.copy_(start[n])
        model.zero_grad()
        before = counters["stats"]["unique_graphs"]
        with around:
            loss_of(run(*args, **kwargs)).backward()
        return counters["stats"]["unique_graphs"] - before

    least = 1e-4 * max(float(mean.abs().max()) for mean, _ in wants.values())
    graphs, error = [], 0.0
    for _ in range(3):
        try:
            graphs.append(call(one_pass(run, coverage.MICRO)))
        except UnsupportedUse as refusal:
            return {"outcome": "refused", "why": str(refusal)}
        except Exception as error:
            torch._dynamo.reset()
            run = torch.compile(model, backend="aot_eager")
            try:
                call(nullcontext())
            except Exception:
                why = f"torch does not compile it by itself: {type(error).__name__}: {error}"
                return {"outcome": "left out", "why": why}
            raise
        for n, p in model.named_parameters():
            if n in wants:
                mean, square = wants[n]
                error = max(error, coverage.far(p.grad, mean, least), coverage.far(p.grad_sq, square, least**2))
                del p.grad_sq, p.grad_kappa
    limit = coverage.LIMITS[str(dtype).removeprefix("torch.")]
    row = {"outcome": "exact" if error <= limit else "wrong", "error": float(f"{error:.2g}")}
    row |= {"graphs": graphs[0], "more": sum(graphs[1:])}
    if graphs != [1, 0, 0]:  # or is it torch's own doing?
        torch._dynamo.reset()
        run, graphs = torch.compile(model, backend="aot_eager"), [call(nullcontext()) for _ in range(3)]
        row |= {"plain_graphs": graphs[0], "plain_more": sum(graphs[1:])}
    return row


def child(case, answer):
    """A row for another process, which gets it."""
    coverage.quiet()
    import torch

    library, name, task, how = case
    torch.set_num_threads(1)
    torch.manual_seed(0)
    try:
        if library == "timm":
            coverage.find_timm()
        made = coverage.of_timm(name) if library == "timm" else coverage.of_transformers(name, task)
        model, batch, forward = made
        coverage.still(model)
        row = compiled(model, batch, forward) if how == "compiled" else autocast(model, batch, forward, how)
    except Exception as error:
        row = {"outcome": "failed", "why": f"{type(error).__name__}: {error}"}
    for each in (row, row.get("checked", {}), row.get("experts_by_default", {})):
        if "why" in each:
            each["why"] = " ".join(each["why"].split())[:400]
    answer.send(row)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/coverage_forward.json"), help="results, a row at a time")
    parser.add_argument("--how", default=",".join(HOWS), help="with commas (default: %(default)s)")
    parser.add_argument("--only", help="some models, with commas, such as transformers:llama,timm:resnet")
    parser.add_argument("--limit", type=int, default=180, help="seconds for one look (default: %(default)s)")
    options = parser.parse_args()
    coverage.quiet()
    import torch

    from invariant_adam_lab import record

    exact = [row for row in json.loads(EXACT.read_text(encoding="utf-8"))["rows"] if row["outcome"] == "exact"]
    known = {f"{row['library']}:{row['name']}": row for row in exact}
    wanted = options.only.split(",") if options.only else list(known)
    if not known.keys() >= set(wanted):
        parser.error(f"--only names {', '.join(sorted(set(wanted) - known.keys()))}, which {EXACT} has not as exact")
    rows = record.Rows(options.out, "python benchmarks/coverage_forward.py", "coverage forward", torch.device("cpu"))
    todo = []
    for how in options.how.split(","):
        for row in map(known.get, wanted):
            settings = {key: row[key] for key in ("library", "name", "task", "version")} | {"how": how}
            if not rows.has(settings):
                todo.append(settings)
    begun = time.monotonic()
    for i, how in enumerate(todo, 1):
        case = tuple(how[key] for key in ("library", "name", "task", "how"))
        row = rows.add(how, coverage.run(case, options.limit, child))
        left = (time.monotonic() - begun) / i * (len(todo) - i) / 60
        said = " ".join(str(each.get("outcome")) for each in (row, row.get("checked", {})) if each)
        print(f"[{i}/{len(todo)}, {left:.0f} min left] {':'.join(case[:2])} {case[3]}: {said}", flush=True)
    print(dict(Counter(f"{row['how']} {row['outcome']}" for row in rows.rows)))


if __name__ == "__main__":
    sys.exit(main())
