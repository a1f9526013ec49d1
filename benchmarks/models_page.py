"""Blocks about what people bring: models of timm and transformers, Trainer; and version 0.1 beside this code."""

import statistics

HOW = {
    (False, False, None): "eager",
    (True, False, None): "compiled",
    (True, False, "reduce-overhead"): "compiled, `reduce-overhead`",
    (False, True, None): "CUDA graph",
}
NAMES = {
    "timm:vit_small_patch16_224": "timm ViT-S/16",
    "timm:convnext_tiny": "timm ConvNeXt-T",
    "timm:swin_tiny_patch4_window7_224": "timm Swin-T",
    "timm:efficientnet_b0": "timm EfficientNet-B0",
    "hf:gpt2": "transformers GPT-2 124M, tied",
    "hf:llama": "transformers Llama 0.55B",
    "benchmarks.models:checkpointed_llama": "transformers Llama 0.55B, checkpointing",
    "resnet18": "our ResNet-18, 32²",
    "resnet50": "our ResNet-50, 224²",
    "gpt2-124m": "our GPT-2 124M",
}


def label(row):
    """The model with its batch."""
    tokens = f", T={row['options']['tokens']}" if "tokens" in row["options"] else ""
    name = NAMES[row["model"]] + (", tied" if row["options"].get("tie_word_embeddings") else "")
    return f"{name}, B={row['batch']}{tokens}"


def how(row):
    """How its update is run."""
    return HOW[row["compiled"], bool(row["graph"]), row.get("mode")] + ", not alone" * bool(row.get("beside"))


def gib(row, own, plain):
    """Two peaks beside each other."""
    return f"{row[own]:.1f} ({row[plain]:.1f})" if row.get(own) is not None and row.get(plain) is not None else ""


def ratio_of(row):
    """The ratio to plain AdamW, and those of the two times that it was measured."""
    if "error" in row:
        return row["error"].partition(":")[0]
    twice = ", ".join(f"{ratio:.2f}" for ratio in row.get("ratios", ()))
    return f"{row['ratio']:.2f} ({twice})" if twice else f"{row['ratio']:.2f}"


def model_rows(measured, source):
    for name, result, rows in measured("models_h200"):
        by_case = {}
        for row in rows:
            if row["method"] != "plain":
                by_case.setdefault((label(row), how(row), row["micro_batch"]), {})[row["method"]] = row
        yield "| model | how | M | plain ms | one pass | `into=opt` | peak GiB (plain) | first update GiB (plain), s |"
        yield "|---|---|---|---|---|---|---|---|"
        for (model, way, micro), each in by_case.items():
            row = next(row for row in (*each.values(), {}) if "error" not in row)
            if not row:  # nothing of it could be measured
                yield f"| {model} | {way} | {micro} | | {' | '.join(map(ratio_of, each.values()))} | | |"
                continue
            ratios = [ratio_of(each[m]) if m in each else "" for m in ("one-pass", "into")]
            first = gib(row, "first_gib", "plain_first_gib")
            cells = [model, way, str(micro), f"{row['plain_ms']:.1f}", *ratios, gib(row, "peak_gib", "plain_peak_gib")]
            yield "| " + " | ".join([*cells, f"{first}, {row['first_s']:.0f}".lstrip(", ")]) + " |"
        yield ""
        yield from source(name, result)


def limit_rows(measured, source):
    """What limits an update: the device's time and the host's, of plain and of one pass, and what a layer adds."""
    for name, result, rows in measured("models_h200"):
        found = [row for row in rows if "kernels_ms" in row.get("where", {})]
        plain = {(label(row), how(row)): row["where"] for row in found if row["method"] == "plain"}
        yield (
            "| model | how | ms (plain) | kernels, ms (plain) | host, ms (plain) | layers with weights | "
            "host, µs more per layer |"
        )
        yield "|---|---|---|---|---|---|---|"
        for row in found:
            if row["method"] != "one-pass":
                continue
            where, before = row["where"], plain[label(row), how(row)]
            times = f"{row['ms']:.1f} ({row['plain_ms']:.1f})"
            for part in ("kernels_ms", "host_ms"):
                times += f" | {where[part]:.1f} ({before[part]:.1f})"
            layers = row.get("layers")  # older rows were not counted, and have the host's time of one update
            more = f"{1e3 * (where['host_ms'] - before['host_ms']) / layers:.0f}" if layers else ""
            yield f"| {label(row)} | {how(row)} | {times} | {layers or ''} | {more} |"
        yield ""
        yield from source(name, result)


PARTS = {  # of the host's time: what is on Python's stack
    "launches of our kernels": "invariant_adam/kernels/launch.py:__call__",
    "folds": "invariant_adam/one_pass/context.py:_hand_over",
    "opening the context": "invariant_adam/one_pass/context.py:__enter__",
    "`opt.step()`": "src/invariant_adam/optimizer.py:step",
}


def sample_rows(measured, prose):
    """What the host does in an update, by looking at Python's stack."""
    for name, result, rows in measured("host_samples_h200"):
        cases = {}
        for row in rows:
            cases.setdefault((label(row), how(row)), {})[row["method"]] = row
        yield "| model | how | plain, ms | one pass, ms | of it: " + " | ".join(PARTS) + " | updates in a row, ratio |"
        yield "|---|---|---|---|---|" + "---|" * len(PARTS)
        for (model, way), each in cases.items():
            plain, own = each["plain"], each["one-pass"]
            parts = " | ".join(f"{own['functions'].get(part, 0):.1f}" for part in PARTS.values())
            times = f"{plain['host_ms']:.1f} | {own['host_ms']:.1f} | {parts} | {own['ms'] / plain['ms']:.2f}"
            yield f"| {model} | {way} | {times} |"
        yield ""
        said = f"{result['device']}, torch {result['torch']}; by {result['command']}; kept as `{name}.json`."
        yield from prose(said)


def trainer_rows(measured, source):
    for name, result, rows in measured("trainer_step_h200"):
        times = {}
        for row in rows:
            key = (row["compiled"], row["per_device"], row["accumulation"])
            times.setdefault(key, {}).setdefault(row["trainer"], []).append(row)
        yield (
            "| | sequences per step × steps per update | AdamW, ms | InvariantAdam, ms | ratio (of each turn) | "
            "peak GiB (AdamW) |"
        )
        yield "|---|---|---|---|---|---|"
        for (compiled, size, steps), by_name in times.items():
            ours = next((n for n in by_name if n != "AdamW"), None)
            if ours is None or "AdamW" not in by_name:
                continue
            # A turn has both, one after the other.
            each = [{row["turn"]: row for row in by_name[n]} for n in ("AdamW", ours)]
            turns = [turn for turn in each[0] if turn in each[1]]
            if not turns:
                continue
            plain, own = (statistics.median(rows[turn]["ms"] for turn in turns) for rows in each)
            peaks = [max(rows[turn]["peak_gib"] for turn in turns) for rows in reversed(each)]
            way = f"{ours.partition(', ')[2]}, {'compiled' if compiled else 'eager'}"
            ratios = ", ".join(f"{each[1][turn]['ms'] / each[0][turn]['ms']:.2f}" for turn in turns)
            ratio = f"{own / plain:.2f} ({ratios})" if len(turns) > 1 else f"{own / plain:.2f}"
            cells = f"{plain:.0f} | {own:.0f} | {ratio} | {peaks[0]:.1f} ({peaks[1]:.1f})"
            yield f"| {way} | {size} × {steps} | {cells} |"
        yield ""
        versions = sorted({row["transformers"] for row in rows})
        yield from source(name, result)
        yield f"transformers {', '.join(versions)}, GPT-2 124M with random weights, T={rows[0]['length']}, M=8."


def before_rows(measured, source):
    """The same step by the code of version 0.1 and by this one, in one run."""
    (found,) = measured("before_h200") if any(True for _ in measured("before_h200")) else (None,)
    if found is None:
        return
    name, result, rows = found
    yield "| model | how | version 0.1, ms | now, ms | over plain then | over plain now |"
    yield "|---|---|---|---|---|---|"
    by_case = {}
    for row in rows:
        by_case.setdefault((label(row), how(row)), {})[row["version"]] = row
    for (model, way), each in by_case.items():
        old, new = each["0.1"], each["now"]
        ms = f"{old['ms']:.2f} | {new['ms']:.2f} | {old['ratio']:.3f} | {new['ratio']:.3f}"
        yield f"| {model} | {way} | {ms} |"
    yield ""
    yield from source(name, result)


def thread_rows(measured):
    """An update whose backward runs in torch's thread for the GPU, and in the thread that calls it."""
    for name, result, rows in measured("calling_thread_h200"):
        ms = {(row["model"], row["batch"], row["method"], row["own_thread"]): row["ms"] for row in rows}
        yield "| model, eager | method | torch's thread for the GPU, ms | the calling thread, ms |"
        yield "|---|---|---|---|"
        for model, batch, method in dict.fromkeys(key[:3] for key in ms):
            times = " | ".join(f"{ms[model, batch, method, own]:.1f}" for own in (True, False))
            yield f"| {NAMES[model]}, B={batch} | {'plain AdamW' if method == 'plain' else 'one pass'} | {times} |"
        yield ""
        yield f"{result['device']}, torch {result['torch']}; by {result['command']}, kept as `{name}.json`."
