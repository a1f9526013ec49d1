"""Fill the tables of README.md and docs/ from benchmarks/results, so that no figure there is typed by hand.

python benchmarks/pages.py          rewrite the pages
python benchmarks/pages.py --check  exit code 1 when a page and the results differ
"""

import json
import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
DEMOS = {
    "demo-lr-1e-4": "`invariant-adam demo --lr 1e-4`",
    "demo": "`invariant-adam demo` (learning rate 2e-4)",
    "demo-lr-5e-4": "`invariant-adam demo --lr 5e-4`",
    "demo-lr-1e-3": "`invariant-adam demo --lr 1e-3`",
    "demo-standard-linear": "`invariant-adam demo --standard-rule linear`",
}


def load(name):
    return json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text(encoding="utf-8"))


def verify_rows():
    pairs = zip(load("verify")["claims"], load("verify-standard")["claims"], strict=True)
    yield "| | rule | update of | order, invariant Adam | order, standard Adam in its place |"
    yield "|---|---|---|---|---|"
    for ours, standard in pairs:
        # SGD has no v to square: standard Adam cannot take a place there
        other = "" if ours["theorem"] == "SGD" else f"{standard['order']:.2f}"
        row = f"| {ours['theorem']} | `{ours['rule']}` | {ours['quantity']} | {ours['order']:.3f} | {other} |"
        yield row.replace("-0.00 |", "0.00 |")


def demo_rows():
    yield "| command | spread, standard Adam | spread, invariant Adam | ratio |"
    yield "|---|---|---|---|"
    for name, command in DEMOS.items():
        result = load(name)
        spread = result["spread"]
        yield f"| {command} | {spread['standard']:.3f} | {spread['invariant']:.4f} | {result['ratio']:.0f} |"


def headline_rows():
    result = load("demo")
    spread, sizes = result["spread"], result["settings"]["batch_sizes"]
    yield f"*A small CNN on handwritten digits at batch sizes {sizes[0]} to {sizes[-1]}, same samples in the same"
    yield f"order. The curves of standard Adam spread by {spread['standard']:.2f} in log loss, those of invariant Adam"
    yield f"by {spread['invariant']:.4f}: {result['ratio']:.0f} times less. Made by `make demo`, in about a minute on"
    yield "two cores.*"


def step_rows():
    result = load("step_cpu")
    yield "| micro-batches per update | chain of 100 linear layers | gradients handed over | the optimizer alone |"
    yield "|---|---|---|---|"
    for net, handed, alone in zip(result["net"], result["handed"], result["alone"], strict=True):
        yield f"| {net['kappa']} | {net['ratio']:.2f} | {handed['ratio']:.2f} | {alone['ratio']:.2f} |"


def bandwidth_rows():
    result = load("bandwidth_h200")
    yield f"Bandwidth on one {result['device']} in TB/s, and both kernels in turn over fused AdamW's time:"
    yield ""
    yield "| parameters | copy | `fold` | `step` | fused AdamW | `fold`, `step` over fused AdamW |"
    yield "|---|---|---|---|---|---|"
    for name, label in (("gpt2-124m", "GPT-2 124M, 148 tensors"), ("1e9", "10⁹, 100 tensors")):
        row = result[name]
        rates = " | ".join(f"{row['TB_per_s'][key]:.2f}" for key in ("copy", "fold", "step", "adamw"))
        yield f"| {label} | {rates} | {row['fold_and_step_over_adamw']:.2f} |"


def gpu_rows():
    result = load("one_pass_h200")
    yield f"A training step on one {result['device']}, bfloat16, over one plain pass with fused AdamW:"
    yield ""
    yield "| | plain | loop of micro-batches | one pass |"
    yield "|---|---|---|---|"
    table = {}
    for row in result["rows"]:
        table.setdefault((row["model"], row["batch"], row["compiled"]), {})[row["method"]] = row
    for (model, batch, compiled), row in table.items():
        loop = f"{row['loop']['ratio']:.1f}×" if "loop" in row else ""
        once = row["one pass"]
        label = f"{model}, B={batch}, M={once['M']}{', compiled' if compiled else ''}"
        plain = f"{once['plain_ms']:.0f} ms, {once['plain_gib']:.1f} GiB"
        yield f"| {label} | {plain} | {loop} | {once['ratio']:.2f}×, {once['gib']:.1f} GiB |"
    yield ""
    yield "(`python benchmarks/one_pass_gpu.py`, kept as `benchmarks/results/one_pass_h200.json`.)"


def gemm_rows():
    result = load("gemm_square_h200")
    yield "| rows | rows per group | o × i | plain product, TFLOP/s | with the squares, time over it |"
    yield "|---|---|---|---|---|"
    for row in result["rows"]:
        shape = f"{row['rows']} | {row['rows_per_group']} | {row['o']} × {row['i']}"
        yield f"| {shape} | {row['plain_tflops']:.0f} | {row['ratio']:.2f} |"


def one_pass_rows():
    from invariant_adam.lab.bench_one_pass import table

    yield table(load("one_pass_cpu"))


PAGES = {
    "README.md": {"headline": headline_rows, "gpu": gpu_rows},
    "docs/theory.md": {"verify": verify_rows, "demo": demo_rows},
    "docs/one_pass.md": {"table": one_pass_rows, "gpu": gpu_rows, "gemm": gemm_rows},
    "docs/guide.md": {"step": step_rows, "bandwidth": bandwidth_rows},
}


def fill(page, text):
    for name, rows in PAGES[page].items():
        block = f"<!-- {name} -->\n" + "\n".join(rows()) + f"\n<!-- /{name} -->"
        text, count = re.subn(rf"<!-- {name} -->\n.*?<!-- /{name} -->", lambda _, b=block: b, text, flags=re.DOTALL)
        assert count == 1, f"{page} has {count} blocks named {name}"
    return text


if __name__ == "__main__":
    for page in PAGES:
        path = ROOT / page
        before = path.read_text(encoding="utf-8")
        after = fill(page, before)
        if "--check" not in sys.argv[1:]:
            path.write_text(after, encoding="utf-8")
        elif before != after:
            sys.exit(f"{page} differs from the results: run python {sys.argv[0]}")
