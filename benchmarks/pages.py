"""Fill the tables of README.md and docs/ from benchmarks/results, so that no figure there is typed by hand.

python benchmarks/pages.py          rewrite the pages
python benchmarks/pages.py --check  exit code 1 when a page and the results differ
"""

import json
import math
import re
import sys
import tempfile
import textwrap
from pathlib import Path

import coverage_page
import models_page

from invariant_adam_lab.grids import cost

ROOT = Path(__file__).parents[1]
DEMOS = {
    "demo-lr-1e-4": "`invariant-adam demo --lr 1e-4`",
    "demo": "`invariant-adam demo` (learning rate 2e-4)",
    "demo-lr-5e-4": "`invariant-adam demo --lr 5e-4`",
    "demo-lr-1e-3": "`invariant-adam demo --lr 1e-3`",
    "demo-no-grow": "`invariant-adam demo --no-grow`",
    "demo-standard-linear": "`invariant-adam demo --standard-rule linear`",
}
LONG_DEMOS = {
    "demo-200-epochs": "`invariant-adam demo --epochs 200`",
    "demo-200-epochs-lr-1e-3": "`invariant-adam demo --epochs 200 --lr 1e-3`",
}
PART = 20  # epochs at the begin and at the end of a long run


def load(name):
    return json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text(encoding="utf-8"))


def prose(text):
    """A paragraph as lines of at most 120 characters; code is not broken."""
    text = re.sub("`[^`]*`", lambda code: code[0].replace(" ", "\0"), text)
    for line in textwrap.wrap(text, 120, break_long_words=False, break_on_hyphens=False):
        yield line.replace("\0", " ")


def verify_rows():
    pairs = zip(load("verify")["claims"], load("verify-standard")["claims"], strict=True)
    yield "| | rule | debiased | change of | order, invariant Adam | order, standard Adam in its place |"
    yield "|---|---|---|---|---|---|"
    for ours, standard in pairs:
        # SGD has no v to square: standard Adam cannot take a place there
        adam = ours["rule"] != "sgd"
        debiased = ("yes" if ours["debiased"] else "no") if adam else ""
        orders = f"{ours['order']:.3f} | {abs(round(standard['order'], 2)):.2f}" if adam else f"{ours['order']:.3f} | "
        yield f"| {ours['theorem']} | `{ours['rule']}` | {debiased} | {ours['quantity']} | {orders} |"


def demo_rows():
    yield "| command | spread, standard Adam | spread, invariant Adam | ratio | order floor |"
    yield "|---|---|---|---|---|"
    for name, command in DEMOS.items():
        result = load(name)
        cells = (
            f"{result['spread']['standard']:.3f}",
            f"{result['spread']['invariant']:.4f}",
            f"{result['ratio']:.0f}",
        )
        yield "| " + " | ".join((command, *cells, f"{result['order_floor']:.4f}")) + " |"


def spread_of(runs, part):
    """The spread over some of the epochs."""
    epochs = list(zip(*[[math.log(loss) for loss in run["losses"][part]] for run in runs], strict=True))
    return sum(max(epoch) - min(epoch) for epoch in epochs) / len(epochs)


def long_demo_rows():
    yield (
        "| command | optimizer | final training loss | test accuracy | "
        f"spread, first {PART} epochs | last {PART} | all |"
    )
    yield "|---|---|---|---|---|---|---|"
    for name, command in LONG_DEMOS.items():
        result = load(name)
        by = {kind: [run for run in result["runs"] if run["optimizer"] == kind] for kind in ("standard", "invariant")}
        usual = min(by["invariant"], key=lambda run: run["batch_size"])
        what = {"standard": "standard Adam", "invariant": "invariant Adam", "order": "B = M in other orders"}
        for kind, runs in (by | {"order": [usual, *result["reordered"]]}).items():
            losses, right = ([run[key] for run in runs] for key in ("losses", "accuracy"))
            final = [each[-1] for each in losses]
            spreads = (spread_of(runs, part) for part in (slice(PART), slice(-PART, None), slice(None)))
            accuracy = " to ".join(dict.fromkeys(f"{100 * each:.1f}" for each in (min(right), max(right))))
            cells = (
                f"{min(final):.2e} to {max(final):.2e}",
                f"{accuracy} %",
                *(f"{spread:.4f}" for spread in spreads),
            )
            yield f"| {command} | {what[kind]} | " + " | ".join(cells) + " |"


def headline_rows():
    result = load("demo")
    spread, sizes = result["spread"], result["settings"]["batch_sizes"]
    floor = result["order_floor"]
    over = spread["invariant"] / floor
    beside = "about as much as" if 0.5 < over < 2 else "less than" if over < 1 else "more than"
    yield from prose(
        f"*A small CNN on handwritten digits at batch sizes {sizes[0]} to {sizes[-1]}: same samples, same order. The "
        f"curves of standard Adam spread by {spread['standard']:.2f} in log loss, those of invariant Adam by "
        f"{spread['invariant']:.4f}: {result['ratio']:.0f} times less, and {beside} reordering the samples "
        f"does ({floor:.4f}). `make demo` makes the figure in a minute or two on two cores.*"
    )


# --------------------------------------------------------------------------- speed and memory

NAMES = {
    "gpt2-124m": "GPT-2 124M", "gpt2-350m": "GPT-2 350M", "gpt-char": "GPT, char level", "vit-b16": "ViT-B/16, 224²",
    "vit-cifar": "ViT, 32²", "resnet18": "ResNet-18, 32²", "resnet18-224": "ResNet-18, 224²",
    "resnet50": "ResNet-50, 224²", "100x1e7": "10⁹", "100x99856": "10⁷",
}  # fmt: skip
METHODS = {
    "plain": "plain AdamW", "accumulate": "AdamW, loop of micro-batches", "loop": "loop of micro-batches",
    "one-pass": "one pass", "into": "one pass, `into=opt`",
}  # fmt: skip


def measured(*names):
    """The results among these that exist, with their rows that are not errors."""
    for name in names:
        if (ROOT / "benchmarks" / "results" / f"{name}.json").exists():
            result = load(name)
            yield name, result, [row for row in result["rows"] if "error" not in row]


# Scripts that are gone, and the commands that took their place.
REPLACED = {"python benchmarks/step.py --device cpu": "invariant-adam bench step --device cpu"}


def source(name, result):
    count = result.get("threads")
    threads = f", {count} thread{'s' if count > 1 else ''}" if count else ""
    command, _, commit = result["command"].partition(", as of commit ")
    made = f"`{REPLACED.get(command, command)}`" + (f" (a script of commit {commit} then)" if commit else "")
    return prose(f"{result['device']}{threads}, torch {result['torch']}; {made}, kept as `{name}.json`.")


def what(row):
    options = "".join(f", {key}={value}" for key, value in row["options"].items())
    how = (
        (", compiled" if row["compiled"] else "")
        + (", CUDA graph" if row.get("graph") else "")
        + (", float32" if row["precision"] == "float32" else "")
    )
    return f"{NAMES[row['model']]}{options}, B={row['batch']}{how}"


def number(row, key, form):
    return format(row[key], form) if key in row else ""


def memory(row, key):
    return f", {row[key]:.1f} GiB" if key in row else ""


def gpu_rows():
    for name, result, rows in measured("one_pass_h200"):
        methods = [m for m in METHODS if m != "plain" and any(row["method"] == m for row in rows)]
        yield f"The time of a training step over that of a plain step with fused AdamW ({result['device']}, bfloat16):"
        yield ""
        yield "| | plain | " + " | ".join(METHODS[m] for m in methods) + " |"
        yield "|---|---|" + "---|" * len(methods)
        table = {}
        for row in rows:
            if row["method"] != "plain":
                table.setdefault((what(row), row["micro_batch"]), {})[row["method"]] = row
        for (label, micro), by_method in table.items():
            plain = next(iter(by_method.values()))
            cells = [f"{plain['plain_ms']:.0f} ms" + memory(plain, "plain_peak_gib")]
            for method in methods:
                row = by_method.get(method)
                cells.append(f"{row['ratio']:.2f}×" + memory(row, "peak_gib") if row else "")
            yield f"| {label}, M={micro} | " + " | ".join(cells) + " |"
        yield ""
        yield f"(`{result['command']}`, kept as `benchmarks/results/{name}.json`.)"


def speed_line():
    """The time of one pass over a plain step, in a sentence."""
    for _, result, rows in measured("one_pass_h200"):
        newer = [row for _, _, found in measured("models_h200") for row in found if row["method"] == "one-pass"]
        said = []
        for row in rows:
            if row["method"] == "into" and row["model"] in ("gpt2-124m", "vit-b16", "resnet18"):
                same = (r for r in newer if r["model"] == row["model"] and what(r) == what(row))
                row = next((r for r in same if not (r.get("mode") or r.get("beside"))), row)
                said.append(f"{row['ratio']:.2f} ({what(row)})")
        yield from prose(
            f"Time of an update in one pass, divided by that of fused AdamW, on an {result['device']}: "
            f"{', '.join(said)}. "
            "[Speed](docs/speed.md) has unmodified models of timm and transformers, and what limits small ones."
        )


def training_rows():
    for name, result, rows in measured("one_pass_h200", "one_pass_cpu"):
        yield from source(name, result)
        yield ""
        yield "| | M | method | ms | over plain | TFLOP/s | of a GEMM | peak GiB | first update, s |"
        yield "|---|---|---|---|---|---|---|---|---|"
        for row in sorted(rows, key=lambda row: [what(r) for r in rows].index(what(row))):
            cells = [what(row), str(row["micro_batch"] or ""), METHODS[row["method"]], number(row, "ms", ".1f")]
            cells += [f"{row['ratio']:.2f}", number(row, "tflops", ".0f"), number(row, "of_gemm", ".0%")]
            yield "| " + " | ".join([*cells, number(row, "peak_gib", ".1f"), number(row, "first_s", ".0f")]) + " |"
        yield ""


def share_rows():
    """A step's kernels by what they do; among the library's products _NT is that of a weight gradient."""
    for name, result, rows in measured("shares_h200"):
        yield from source(name, result)
        yield ""
        yield "| | M | method | all kernels, ms | weight gradients | moments | sums and embeddings, ours | all else |"
        yield "|---|---|---|---|---|---|---|---|"
        for row in rows:
            parts, total = row["parts"], row["kernels_ms"]
            library = sum(ms for kernel, ms in row["top"].items() if re.search("_NT[NT]$", kernel))
            each = [parts.get("squares of products", 0) + library, parts["moments"], parts.get("small", 0)]
            cells = [what(row), str(row["micro_batch"] or ""), METHODS[row["method"]], f"{total:.1f}"]
            small = f"{each[2]:.2f} ({each[2] / total:.2%})" if each[2] else ""
            cells += [f"{each[0]:.1f}", f"{each[1]:.2f}", small, f"{total - sum(each):.1f}"]
            yield "| " + " | ".join(cells) + " |"
        yield ""


def kernel_rows():
    """The passes over memory, each with its TB/s."""
    for name, result, rows in measured("step_h200", "step_cpu"):
        rows = [row for row in rows if row["kappa"] is None]
        if not rows:
            continue
        yield from source(name, result)
        yield ""
        yield "| parameters | work | ms | TB/s | of a copy | over fused AdamW |"
        yield "|---|---|---|---|---|---|"
        for row in rows:
            label = f"{NAMES.get(row['tensors'], row['tensors'])}, {row['number']} tensors"
            copy = next(r["tb_per_s"] for r in rows if (r["tensors"], r["work"]) == (row["tensors"], "copy"))
            share = f"{row['tb_per_s'] / copy:.0%}" if "tb_per_s" in row else ""
            cells = [label, f"`{row['work']}`", f"{row['ms']:.2f}", number(row, "tb_per_s", ".2f"), share]
            yield "| " + " | ".join([*cells, f"{row['ms'] / row['adamw_ms']:.2f}"]) + " |"
        yield ""


def update_rows():
    """Whole updates over AdamW's, by the number of micro-batches."""
    works = {"net": "chain of linear layers", "handed": "gradients handed over", "alone": "the optimizer alone"}
    for name, result, rows in measured("step_h200", "step_cpu"):
        rows = [row for row in rows if row["kappa"] is not None]
        if not rows:
            continue
        yield from source(name, result)
        yield ""
        yield "| parameters | micro-batches per update | " + " | ".join(works.values()) + " |"
        yield "|---|---|---|---|---|"
        for tensors, kappa in sorted({(row["tensors"], row["kappa"]) for row in rows}):
            same = {row["work"]: row for row in rows if (row["tensors"], row["kappa"]) == (tensors, kappa)}
            label = f"{NAMES.get(tensors, tensors)}, {next(iter(same.values()))['number']} tensors"
            cells = [f"{same[work]['ratio']:.2f}" if work in same else "" for work in works]
            yield f"| {label} | {kappa} | " + " | ".join(cells) + " |"
        yield ""


def host_rows():
    """What each operation on parameters costs the host beyond a plain update, of two versions in one run."""
    for name, result, rows in measured("host_cpu"):
        yield from source(name, result)
        yield ""
        yield "| version | plain AdamW, ms | one pass, ms | `into=opt`, ms | more per operation, µs |"
        yield "|---|---|---|---|---|"
        for row in rows:
            times = " | ".join(f"{row[key]:.1f}" for key in ("plain_ms", "one_pass_ms", "into_ms"))
            which = row["version"] + (f", commit {row['commit']}" if "commit" in row else "")
            yield f"| {which} | {times} | {row['one_pass_us']:.0f}, `into=opt` {row['into_us']:.0f} |"
        yield ""


def memory_rows():
    for name, result, rows in measured("memory_h200", "memory_cpu"):
        yield from source(name, result)
        yield ""
        yield "| | M | method | tensors per parameter | state and gradients, MiB | peak, MiB | peak − bare, MiB |"
        yield "|---|---|---|---|---|---|---|"
        for row in sorted(rows, key=lambda row: [what(r) for r in rows].index(what(row))):
            sizes = (row["held_bytes"], row["peak_bytes"], row["peak_bytes"] - row["bare_bytes"])
            cells = [what(row), str(row["micro_batch"] or ""), METHODS[row["method"]], f"{row['tensors']:.2f}"]
            yield "| " + " | ".join([*cells, *(f"{size / 2**20:,.0f}" for size in sizes)]) + " |"
        yield ""


def gemm_rows():
    result = load("gemm_square_h200")
    yield "| rows | rows per group | o × i | plain product, TFLOP/s | with the squares, time over it |"
    yield "|---|---|---|---|---|"
    for row in result["rows"]:
        shape = f"{row['rows']} | {row['rows_per_group']} | {row['o']} × {row['i']}"
        yield f"| {shape} | {row['plain_tflops']:.0f} | {row['ratio']:.2f} |"


def counter_rows():
    """What the hardware's counters say of the kernel and of the library's product: the first of each."""
    result = load("gemm_square_ncu_h200")
    yield "| o × i | kernel | µs | tensor cores busy | L2 | registers a thread |"
    yield "|---|---|---|---|---|---|"
    seen = set()
    for row in result["rows"]:
        key = (row["o"], row["kernel"])
        if key not in seen:
            seen.add(key)
            cells = (f"{row['us']:.0f}", f"{row['tensor_pipe_active_percent']:.0f} %", f"{row['l2_percent']:.0f} %")
            name = "`gemm_square`" if row["kernel"] == "_gemm_square" else f"the library's, `{row['kernel']}`"
            yield f"| {row['o']} × {row['i']} | {name} | " + " | ".join(cells) + f" | {row['registers']:.0f} |"
    yield ""
    command = f"{result['command'].partition(' --metrics')[0]} … {result['command'].partition(' -c 8 ')[2]}"
    yield from prose(f"(`{command}`, kept as `gemm_square_ncu_h200.json`.)")


CONVOLUTIONS = {
    "resnet18": "ResNet-18, 800 images of 32², M = 25:",
    "resnet50": "ResNet-50, 64 images of 224², M = 8:",
    "grouped": "In channel groups (a ResNeXt-50 32×4d) and depthwise (a MobileNetV2), 64 images of 224², M = 8:",
}


def conv_rows():
    for name, result, _ in measured("conv_square_h200", "conv_square_grouped_h200"):
        for model, rows in by_model(result["rows"]):
            yield CONVOLUTIONS[model]
            yield ""
            yield "| layers | channels | image | kernel, stride | library's gradient, ms | with squares | way |"
            yield "|---|---|---|---|---|---|---|"
            for row in rows:
                if "inner" in row:
                    groups = f", {row['groups']} groups" if row.get("groups", 1) > 1 else ""
                    cells = [str(row["times"]), f"{row['inner']} → {row['out']}{groups}", f"{row['pixels']}²"]
                    cells += [f"{row['kernel']}×{row['kernel']}, {row['stride']}", f"{row['plain_ms']:.3f}"]
                    yield "| " + " | ".join([*cells, f"{row['ratio']:.2f}×", row.get("way", "")]) + " |"
                elif "all_plain_ms" in row:
                    yield f"| all | | | | {row['all_plain_ms']:.2f} | {row['ratio']:.2f}× | |"
            yield ""
        yield f"(`{result['command']}`, kept as `{name}.json`.)"
        yield ""


def by_model(rows):
    """The rows of each model's convolutions, in the order in which they came."""
    found = {}
    for row in rows:
        if "inner" in row or "all_plain_ms" in row:
            found.setdefault(row["model"], []).append(row)
    return found.items()


def rivals_rows():
    result = load("rivals_cpu")
    yield "| method | learning rate | spread | loss | time over AdamW | tensors |"
    yield "|---|---|---|---|---|---|"
    for row in result["rows"]:
        losses = row["losses"].values()
        cells = (row["method"], f"∝ {row['law']}", f"{row['spread']:.4f}", f"{min(losses):.3f} to {max(losses):.3f}")
        yield "| " + " | ".join((*cells, f"{row['ratio']:.2f}", f"{row['tensors']:.2f}")) + " |"
    optimi = next(row["optimi"] for row in result["rows"] if "optimi" in row)
    yield ""
    yield from source("rivals_cpu", result | {"torch": f"{result['torch']}, torch-optimi {optimi}"})


def peers_rows():
    from invariant_adam_lab.bench.peers import table

    yield table(load("peers_cpu"))


# --------------------------------------------------------------------------- ranks that die, come and go


def outcome(result):
    """How far a disturbed run ended from the undisturbed one, and in which state."""
    names = {"weights": "weights", "exp_avg": "m", "exp_avg_sq": "v"}
    apart = ", ".join(f"{result[key]:.1g} in {name}" for key, name in names.items())
    whole = "Every checkpoint on the disk was whole" if not result["damaged"] else "; ".join(result["damaged"])
    return f"{apart}. {whole}. The loss on held-out text is {result['loss']:.6f} in both."


def tokens_rows():
    from token_weights import NORMALISERS

    yield "| each loss is a sum over its tokens, divided by | tokens | κ = 4 | κ = 16 |"
    yield "|---|---|---|---|"
    for row in load("token_weights")["rows"]:
        what = NORMALISERS[row["normaliser"]]
        if row["betas"] != [0.9, 0.99]:
            what += f", betas {tuple(row['betas'])}"
        if row["grow"]:
            what += "; each update at most a tenth of the samples seen before it"
        yield f"| {what} | {row['lengths']} | {row['kappa 4']:.1%} | {row['kappa 16']:.1%} |"


def noise_rows():
    yield "| problem | gradients by | truth, samples | `noise_scale()` | off by |"
    yield "|---|---|---|---|---|"
    for row in load("noise_scale")["rows"]:
        if row["problem"] != "synthetic":
            found = f"{row['found']:.1f} ± {row['stderr']:.1f}"
            off = abs(row["found"] / row["truth"] - 1)
            yield f"| {row['problem']} | {row['mode']} | {row['truth']:.1f} | {found} | {off:.1%} |"


def noise_line():
    rows = [row for row in load("noise_scale")["rows"] if row["problem"] == "synthetic"]
    truths = [row["truth"] for row in rows]
    worst = max(abs(row["found"] / row["truth"] - 1) for row in rows)
    errors = max(abs(row["found"] - row["truth"]) / row["stderr"] for row in rows)
    yield from prose(
        f"A synthetic gradient has a noise scale that is set, from {min(truths):.0f} to {max(truths):,.0f} samples. "
        f"What is found is off by {worst:.1%} and by {errors:.1f} standard errors at most, over {len(rows)} runs:"
    )


def kills_rows():
    for mode in ("ddp", "fsdp2"):
        for name, result, rows in measured(f"faults_kills_{mode}"):
            yield from prose(
                f"`{result['command']}`, {result['ranks']} ranks, {result['dtype']}, torch {result['torch']}, kept as "
                f"`{name}.json`. Largest difference at the end from the undisturbed run: {outcome(result)}"
            )
            yield ""
            yield "| | rank | killed in | at (samples) | last saved | went on from |"
            yield "|---|---|---|---|---|---|"
            for i, row in enumerate(rows, 1):
                where = f"{row['kind']} (`{row['place']}`)"
                cells = [i, row["rank"], where, row["samples"], row["saved"], row["resumed"]]
                yield "| " + " | ".join(map(str, cells)) + " |"
            yield ""


def elastic_rows():
    for mode in ("ddp", "fsdp2"):
        for name, result, rows in measured(f"faults_elastic_{mode}"):
            yield from prose(
                f"`{result['command']}`, {result['dtype']}, torch {result['torch']}, kept as `{name}.json`. Largest "
                f"difference at the end from one process that ran through: {outcome(result)}"
            )
            yield ""
            yield "| ranks | from (samples) | to |"
            yield "|---|---|---|"
            for row, following in zip(rows, [*rows[1:], {"from": result["samples"]}], strict=True):
                yield f"| {row['ranks']} | {row['from']} | {following['from']} |"
            yield ""


def silence_rows():
    for name, result, rows in measured("faults_silence_ddp"):
        yield from prose(
            f"`{result['command']}`, {result['ranks']} ranks, gloo, a process-group timeout of {result['timeout']} s, "
            f"kept as `{name}.json`:"
        )
        yield ""
        yield "| rank 1 is | the last of the others raises after | its error |"
        yield "|---|---|---|"
        for row in rows:
            yield f"| {row['rank_1']} | {row['seconds']:.1f} s | {row['errors']['0'].split(' The transport')[0]} |"
        yield ""


MODES = {
    "plain": "plain module", "ddp": "DDP", "shard_state": "DDP, `shard_state=True`", "fsdp2": "FSDP2", "hsdp": "HSDP",
    "tensor": "tensor parallel",
}  # fmt: skip


def distributed_rows():
    result = load("distributed")
    yield "| | ranks | local micro-batches | by | Δw | Δm | Δv | sent, ×4P bytes | moments, ×4P | gradients kept, ×4P |"
    yield "|---|---|---|---|---|---|---|---|---|---|"
    for row in result["rows"]:
        unit = 4 * row["parameters"]
        what = MODES[row["mode"]] + (f", squares in {row['squares']}" if "squares" in row else "")
        cells = [what, row["world"], row["accumulation"], row["how"]]
        cells += [f"{row[f'diff_{name}']:.0e}" if f"diff_{name}" in row else "" for name in "wmv"]
        cells += [f"{row[key] / unit:.2f}" for key in ("sent_bytes", "moment_bytes", "gradient_bytes")]
        yield "| " + " | ".join(map(str, cells)) + " |"


def floor_rows():
    """How far float32 is from float64 without any ranks, and with them."""
    result = load("distributed")
    yield "| network | κ | one process: Δw | Δm | Δv | ranks, largest of all modes: Δw | Δm | Δv |"
    yield "|---|---|---|---|---|---|---|---|"
    ranked = {"net": result["rows"], "gpt": result["gpt"]}
    for row in result["one_process"]:
        same = [
            r for r in ranked[row["network"]]
            if "diff_w" in r and "squares" not in r and r["world"] * r["accumulation"] == row["kappa"]
        ]  # fmt: skip
        what = f"{ {'net': 'the one above', 'gpt': 'GPT'}[row['network']] }, ε = {result['eps'][row['network']]:g}"
        cells = [what, row["kappa"], *(f"{row[f'diff_{n}']:.0e}" for n in "wmv")]
        cells += [f"{max(r[f'diff_{n}'] for r in same):.0e}" for n in "wmv"]
        yield "| " + " | ".join(map(str, cells)) + " |"


def squares_rows():
    yield "| | ranks | updates | weights, over the way they went | v, relative |"
    yield "|---|---|---|---|---|"
    for row in load("distributed")["effects"]:
        cells = [MODES[row["mode"]], row["world"], row["updates"], f"{row['weights']:.1e}", f"{row['v']:.1e}"]
        yield "| " + " | ".join(map(str, cells)) + " |"


def nccl_rows():
    wrappers = {"none": "no wrapper", "ddp": "DDP", "fsdp2": "FSDP2"}
    for name, result, rows in measured("distributed_nccl"):
        yield from prose(
            f"{NAMES[result['model']]}, B={result['batch']}, eager, bfloat16, one {result['device']}, torch "
            f"{result['torch']}; `{result['command']}`, kept as `{name}.json`. Each figure is a time over that of "
            "fused AdamW on the same B samples at once, in the same wrapper:"
        )
        yield ""
        methods = list(dict.fromkeys(row["method"] for row in rows))
        names = [{"AdamW": "AdamW, ms", "shard_state": "one micro-batch, `shard_state`"}.get(m, m) for m in methods]
        yield "| | " + " | ".join(names) + " |"
        yield "|---|" + "---|" * len(methods)
        for mode, label in wrappers.items():
            found = {row["method"]: row for row in rows if row["mode"] == mode}
            if not found:
                continue
            cells = [f"{found[m]['ratio']:.2f}" if m in found else "" for m in methods[1:]]
            yield "| " + " | ".join([label, f"{found['AdamW']['ms']:.1f}", *cells]) + " |"
        yield ""
        yield from prose(
            f"The small network above in float32, after {result['updates']} updates of 3 micro-batches: largest "
            "differences from the reference in float64."
        )
        yield ""
        yield "| | by | Δw | Δm | Δv |"
        yield "|---|---|---|---|---|"
        for row in result["exact"]:
            mode = wrappers.get(row["mode"]) or MODES[row["mode"]]
            cells = [mode, row["how"], *(f"{row[f'diff_{key}']:.0e}" for key in "wmv")]
            yield "| " + " | ".join(cells) + " |"


def matched_rows():
    """The honest ratio: how much closer the curves of batch sizes lie, where both optimizers reach the same loss."""
    import lab_speed

    from invariant_adam_lab.results import curves

    found = curves.load(ROOT / LAB)
    shown = {}
    for model, _, ours, lr0, _, _ in lab_speed.pairs(found):
        cells = shown.setdefault(curves.MODELS[model], {})
        grown = ours._replace(grow=0.1)
        sizes = [{run.batch_size for run in found.group(model, series, lr0)} for series in (ours, grown)]
        cells[curves.rate(lr0), False] = lab_speed.at_loss(found, model, ours, lr0)
        cells[curves.rate(lr0), True] = lab_speed.at_loss(found, model, grown, lr0) if sizes[0] == sizes[1] else ""
    yield from prose(
        "Spread over batch sizes of standard Adam (lr ∝ √B), divided by that of invariant Adam, at equal final loss "
        "(10 epochs). Below 1 standard Adam's curves are closer. Not reached: at all these batch sizes, standard "
        "Adam's loss was higher at every lr tried."
    )
    yield ""
    yield "| lr at the largest batch size | " + " | ".join(shown) + " |"
    yield "|---|" + "---|" * len(shown)
    for rate in ("1e-4", "1e-3"):
        for grown in (True, False):
            cells = [each[rate, grown] for each in shown.values()]
            if any(cells):
                yield f"| {rate}{', grown in' if grown else ''} | " + " | ".join(cells) + " |"


def claim_rows():
    import paper_page

    yield from paper_page.claim_rows(ROOT)


def curve_rows():
    import paper_page

    yield from paper_page.curve_rows(ROOT)


TRAINERS = {
    "invariant": "`InvariantTrainer`",
    "adamw": "`Trainer`, AdamW",
    "adamw-root": "`Trainer`, AdamW, lr ∝ √B",
}


def transfer_rows():
    from trainer_transfer import PARTS, by_method, spreads

    result = load("trainer_transfer")
    found = [by_method(result["rows"], part) for part in PARTS]
    *sizes, largest = found[0][2]["invariant"]
    losses_at = " | ".join(f"B = {size}" for size in (*sizes, largest))
    yield f"| lr at B = 4 | | spread, mean | at the end | the same without B = {largest} | {losses_at} |"
    yield "|---|---|---|---|---|" + "---|" * (len(sizes) + 1)
    for lr, _, by in found:
        for method, runs in by.items():
            each = spreads(runs)
            cells = [f"{lr:.0e}".replace("e-0", "e-"), TRAINERS[method], f"{sum(each) / len(each):.3f}"]
            cells += [f"{each[-1]:.3f}", f"{spreads({size: runs[size] for size in sizes})[-1]:.3f}"]
            cells += [f"{losses[-1]:.3f}" for losses in runs.values()]
            yield "| " + " | ".join(cells) + " |"
    yield ""
    yield from source("trainer_transfer", result | {"torch": f"{result['torch']}, {versions(result['rows'])}"})


def transfer_lines():
    """How far the batch size transfers in a trainer: at a small learning rate and at the best one."""
    from trainer_transfer import PARTS, by_method

    rows = load("trainer_transfer")["rows"]
    best, _, small = (by_method(rows, part) for part in PARTS)
    first, *_, last = small[2]["invariant"]
    yield from prose(
        f"A small Llama in Hugging Face's Trainer, tuned at {first} samples per update and run at {last}, nothing "
        "tuned again. Held-out losses:"
    )
    yield ""
    yield f"| learning rate | B = {first} | B = {last}, invariant Adam | AdamW | AdamW, lr ∝ √B |"
    yield "|---|---|---|---|---|"
    for name, (lr, _, by) in (("small", small), ("the best for AdamW", best)):
        ends = [by["invariant"][first][-1], *(runs[last][-1] for runs in by.values())]
        rate = f"{lr:.0e}".replace("e-0", "e-")
        yield f"| {rate}, {name} | " + " | ".join(f"{loss:.2f}" for loss in ends) + " |"


def versions(rows):
    """The trainer's versions, which all rows must share."""
    (both,) = {(row["transformers"], row["accelerate"]) for row in rows}
    return "transformers {}, accelerate {}".format(*both)


def scale_up_lines():
    """What a user who scales up may expect, at the best learning rate of AdamW at B₀ and at a tenth of it or less."""
    rows = load("scale_up")["rows"]
    seeds = {row["seed"] for row in rows}
    losses = scale_up_losses(rows)
    tuned = {lr: loss for (lr, _, method), loss in losses.items() if method == "tuned"}
    best = min(tuned, key=tuned.get)
    small = min(lr for lr, batch, _ in losses if batch > 16)
    ours, same, root, wide = "long_momentum, grown in", "adam, unchanged", "adam, √", "exponential"
    four, sixteen = ({method: losses[best, 16 * rho, method] for method in (ours, same, root, wide)} for rho in (4, 16))
    yield from prose(
        f"At the learning rate that is best for AdamW at B₀, {best:g}, the default rule loses much at 4 times the "
        f'batch: the loss goes from {tuned[best]:.2f} to {four[wide]:.2f}. `rule="long_momentum"` with '
        f"`BatchGrowth` ends at {four[ours]:.2f}, AdamW left alone at {four[same]:.2f}, with lr ∝ √B at "
        f"{four[root]:.2f}. At 16 times the batch nothing keeps the loss: AdamW left alone has {sixteen[same]:.2f}, "
        f"`long_momentum` {sixteen[ours]:.2f}, √B {sixteen[root]:.2f}, the default {sixteen[wide]:.2f}. At {small:g} "
        f"the default rule is the nearest at 4 times the batch, {losses[small, 64, wide] - tuned[small]:+.3f} (√B "
        f"{losses[small, 64, root] - tuned[small]:+.3f}), and `long_momentum` at 16, "
        f"{losses[small, 256, ours] - tuned[small]:+.3f} (√B {losses[small, 256, root] - tuned[small]:+.3f}). One "
        f"small model, {'one seed' if len(seeds) == 1 else f'means of {len(seeds)} seeds'}: a direction."
    )


def scale_up_losses(rows):
    """The mean loss over seeds, by learning rate, batch size and method."""
    found = {}
    for row in rows:
        found.setdefault((row["lr"], row["batch"], row["method"]), []).append(row["loss"])
    return {key: None if None in each else sum(each) / len(each) for key, each in found.items()}


def scale_up_rows(name="scale_up"):
    from invariant_adam_lab.scale_up import table

    result = load(name)
    head, *lines = table(result)
    yield "| lr at B₀, batch | " + " | ".join(head[1:]) + " |"
    yield "|---" * len(head) + "|"
    for line in lines:
        yield "| " + " | ".join(line) + " |"
    yield ""
    tried = sorted((lr, loss) for (lr, _, method), loss in scale_up_losses(result["rows"]).items() if method == "tuned")
    best = ", ".join(f"{'diverged' if loss is None else f'{loss:.3f}'} at {lr:g}" for lr, loss in tried)
    yield from prose(f"AdamW at B₀ alone: {best}.")
    yield ""
    yield from source(name, result)


def scale_up_model_rows():
    """A table for each model of the lab that has results, with what its runs share."""
    from invariant_adam_lab.results.curves import MODELS

    for number, (name, _, rows) in enumerate(measured("scale_up_resnet-ln", "scale_up_gpt2")):
        if number:
            yield ""
        model = name.removeprefix("scale_up_")
        ((samples, epochs),) = {(row["samples"], row["epochs"]) for row in rows}  # others could not be compared
        micro, seeds = min(row["batch"] for row in rows), len({row["seed"] for row in rows})
        yield from prose(
            f"{MODELS[model]} (`{model}`), M = B₀ = {micro}, {samples * epochs:,} samples"
            f"{f' in {epochs} epochs' if epochs > 1 else ''}, "
            f"{'one seed' if seeds == 1 else f'means of {seeds} seeds'}:"
        )
        yield ""
        yield from scale_up_rows(name)
        if said := list(lowest(rows)):
            yield from ("", *said)


def lowest(rows):
    """Which method ends with the lowest loss, where there are several, and the next."""
    losses = {key: loss for key, loss in scale_up_losses(rows).items() if loss is not None}
    tuned = {lr: loss for (lr, _, method), loss in losses.items() if method == "tuned"}
    columns = {}
    for (lr, batch, method), loss in losses.items():
        if method != "tuned" and lr in tuned:
            columns.setdefault((lr, batch), []).append((loss - tuned[lr], method))
    said = []
    for (lr, batch), found in sorted(columns.items()):
        (first, method), *rest = sorted(found)
        if rest:
            said.append(f"{method} at {lr:g}, B = {batch} ({first:+.3f}; then {rest[0][1]}, {rest[0][0]:+.3f})")
    if said:
        yield from prose(f"Lowest loss: {'; '.join(said)}.")


def on_gpu(rows):
    """A block of `models_page`."""
    return lambda: rows(measured, source)


PAGES = {
    "README.md": {
        "headline": headline_rows,
        "matched": matched_rows,
        "transfer": transfer_lines,
        "speed": speed_line,
        "models": lambda: coverage_page.count_line(load, prose),
    },
    "docs/when_not.md": {"matched": matched_rows, "transfer": transfer_lines},
    "docs/trainer_results.md": {"transfer": transfer_rows, "step": on_gpu(models_page.trainer_rows)},
    "docs/compared.md": {"rivals": rivals_rows},
    "docs/paper.md": {"claims": claim_rows, "curves": curve_rows},
    "docs/scale_up.md": {"answer": scale_up_lines, "scale-up": scale_up_rows, "models": scale_up_model_rows},
    "docs/theory.md": {"verify": verify_rows, "demo": demo_rows, "long": long_demo_rows},
    "docs/one_pass.md": {"tokens": tokens_rows},
    "docs/models.md": {
        "counts": lambda: coverage_page.count_rows(load, source),
        "forward": lambda: coverage_page.forward_rows(load, source, prose),
        "others": lambda: coverage_page.other_rows(load, source),
        "refused": lambda: coverage_page.refused_rows(load),
        "exact": lambda: coverage_page.exact_rows(load, prose),
    },
    "docs/diagnostics.md": {"noise": noise_rows, "calibration": noise_line},
    "docs/kernel_tables.md": {"gemm": gemm_rows, "counters": counter_rows, "conv": conv_rows},
    "docs/distributed_results.md": {
        "table": distributed_rows,
        "floor": floor_rows,
        "squares": squares_rows,
        "nccl": nccl_rows,
        "elastic": elastic_rows,
        "kills": kills_rows,
        "silence": silence_rows,
    },
    "docs/speed.md": {"models": on_gpu(models_page.model_rows), "gpu": gpu_rows},
    "docs/speed_tables.md": {
        "training": training_rows,
        "limits": on_gpu(models_page.limit_rows),
        "before": on_gpu(models_page.before_rows),
        "samples": lambda: models_page.sample_rows(measured, prose),
        "threads": lambda: models_page.thread_rows(measured),
        "shares": share_rows,
        "kernels": kernel_rows,
        "updates": update_rows,
        "host": host_rows,
        "memory": memory_rows,
        "table": peers_rows,
    },
}


LAB, LAB_PAGE = "benchmarks/results/lab", "docs/results.md"  # the page comes with the first results


def lab_pages(root=ROOT):
    """The page of the lab's results, once there are any."""
    if not any((root / LAB).glob("*/results.csv")):
        return {}
    import lab_page

    return {LAB_PAGE: lab_page.blocks(root, root / LAB)}


def fill(blocks, text, page):
    for name, rows in blocks.items():
        lines = list(rows())
        block = "\n".join([f"<!-- {name} -->", *lines, f"<!-- /{name} -->"])
        text, count = re.subn(rf"<!-- {name} -->\n.*?<!-- /{name} -->", lambda _, b=block: b, text, flags=re.DOTALL)
        assert count == 1, f"{page} has {count} blocks named {name}"
    return text


def before(root, page):
    if page == LAB_PAGE and not (root / page).exists():
        import lab_page

        return lab_page.TEMPLATE
    return (root / page).read_text(encoding="utf-8")


if __name__ == "__main__":
    for page, blocks in (PAGES | lab_pages()).items():
        old = before(ROOT, page)
        new = fill(blocks, old, page)
        if "--check" not in sys.argv[1:]:
            (ROOT / page).write_text(new, encoding="utf-8")
        elif old != new:
            sys.exit(f"{page} differs from the results: run python {sys.argv[0]}")
    if lab_pages():  # what the lab's dry runs estimate by
        alone = [row for row in load("lab_seconds_h200")["rows"] if row["way"] == "lab"]
        with tempfile.TemporaryDirectory() as folder:
            new = cost.ship(ROOT / LAB, "cuda", Path(folder) / "seconds.json", alone).read_text(encoding="utf-8")
        if "--check" not in sys.argv[1:]:
            cost.SECONDS.write_text(new, encoding="utf-8")
        elif not cost.SECONDS.exists() or cost.SECONDS.read_text(encoding="utf-8") != new:
            sys.exit(f"{cost.SECONDS.name} differs from the results: run python {sys.argv[0]}")
