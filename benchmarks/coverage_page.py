"""Blocks about the models that one pass was held against a loop on."""

import re

# Why models were left out, by what is said of them; the last has the rest.
LEFT_OUT = {
    "Needs a package that was not there": "requires the",
    "Takes longer than five minutes here, or is too large": "took more than|parameters",
    "Needs other inputs than tokens or pictures": "embeds|input_features|tokens|out of bounds",
    "Does not run with its own default config": "",
}
LIBRARIES = {"transformers": "types of transformers", "timm": "families of timm"}
HOWS = {"bf16": "bfloat16 autocast", "fp16": "float16 autocast", "compiled": "`torch.compile`"}


def names(rows):
    """Models by name, in one paragraph."""
    return ", ".join(f"`{row['name']}`" for row in sorted(rows, key=lambda row: row["name"]))


def of(rows, library, *outcomes):
    """The rows of a library with one of these outcomes."""
    return [row for row in rows if row["library"] == library and row["outcome"] in outcomes]


def reason(row):
    """Why one pass refused a model: the message up to its remedy."""
    return row["why"].partition("; ")[0].replace("|", "\\|")


def count_line(load, prose):
    """What came of it, in a sentence."""
    rows = load("coverage_cpu")["rows"]
    made = {library: of(rows, library, "exact", "refused") for library in LIBRARIES}
    exact = {library: of(rows, library, "exact") for library in LIBRARIES}
    counts = (f"{len(exact[library])} of {len(made[library])} {what}" for library, what in LIBRARIES.items())
    others = load("coverage_others_cpu")["rows"]
    yield from prose(
        "One pass was held against the loop on small versions of all models of transformers and timm that could be "
        f"made. It is exact on {' and '.join(counts)}, and on {len(of_all(others, 'exact'))} of {len(others)} models "
        "of other libraries, diffusion and speech models among them. The others it refuses by name. [On which "
        "models](docs/models.md) lists them."
    )


def of_all(rows, outcome):
    """The rows with this outcome."""
    return [row for row in rows if row["outcome"] == outcome]


def count_rows(load, source):
    """How many models were looked at, and what came of it."""
    result = load("coverage_cpu")
    rows = result["rows"]
    yield "| | there are | made small | exact | refused | largest difference |"
    yield "|---|---|---|---|---|---|"
    for library, what in LIBRARIES.items():
        exact, refused, wrong, out = (of(rows, library, each) for each in ("exact", "refused", "wrong", "left out"))
        assert not wrong, f"one pass is wrong, and does not say so, on {names(wrong)}"
        made, version = len(exact) + len(refused), exact[0]["version"]
        most = max(row["error"] for row in exact if "precision" not in row)
        yield f"| {what} {version} | {made + len(out)} | {made} | {len(exact)} | {len(refused)} | {most:.0e} |"
    together = [row["experts_by_default"] | {"name": row["name"]} for row in rows if "experts_by_default" in row]
    exact = [row for row in together if row["outcome"] == "exact"]
    refused = [row for row in together if row["outcome"] == "refused"]
    most = max(row["error"] for row in exact)
    made = len(exact) + len(refused)
    single = [row for row in rows if row["outcome"] == "exact" and "precision" in row]
    each = f"| those of them that do not run in float64: {names(single)} |"
    yield f"{each} {len(single)} | {len(single)} | {len(single)} | 0 | {max(row['error'] for row in single):.0e} |"
    yield f"| experts by default, float32 | {len(together)} | {made} | {len(exact)} | {len(refused)} | {most:.0e} |"
    yield ""
    yield from source("coverage_cpu", result)


def other_rows(load, source):
    """The models of other libraries, all by name."""
    result = load("coverage_others_cpu")
    yield "| library | exact | refused | largest difference | models |"
    yield "|---|---|---|---|---|"
    for library in dict.fromkeys(row["library"] for row in result["rows"]):
        exact, refused, wrong = (of(result["rows"], library, each) for each in ("exact", "refused", "wrong"))
        assert not wrong, f"one pass is wrong, and does not say so, on {names(wrong)}"
        most = max(row["error"] for row in exact)
        what = f"{library} {exact[0]['version']}"
        yield f"| {what} | {len(exact)} | {len(refused)} | {most:.0e} | {names(exact + refused)} |"
    yield ""
    yield from source("coverage_others_cpu", result)


def refused_rows(load):
    """The models that one pass refuses, and why."""
    rows = load("coverage_cpu")["rows"]
    yield "| model | why |"
    yield "|---|---|"
    for library in LIBRARIES:
        for row in of(rows, library, "refused"):
            yield f"| {library} `{row['name']}` | {reason(row)} |"
    for row in rows:
        each = row.get("experts_by_default", {})
        if each.get("outcome") == "refused":
            yield f"| transformers `{row['name']}`, experts by default | {reason(each)} |"


def exact_rows(load, prose):
    """The models on which one pass is exact, and those that were left out, by why."""
    rows = load("coverage_cpu")["rows"]
    for library, what in LIBRARIES.items():
        yield f"**Exact, {what}:**"
        yield from prose(f"{names(of(rows, library, 'exact'))}.")
        yield ""
        rest = of(rows, library, "left out")
        if rest:
            yield f"**Left out, {what}:**"
            yield ""
        for why, pattern in LEFT_OUT.items():
            these = [row for row in rest if re.search(pattern, row["why"])]
            rest = [row for row in rest if row not in these]
            if these:
                yield f"- {why}: {names(these)}."
        yield ""


def forward_rows(load, source, prose):
    """The same models under autocast and compiled."""
    result = load("coverage_forward_cpu")
    yield "| | models tried | run by themselves | exact | refused | all modules return the same |"
    yield "|---|---|---|---|---|---|"
    for how, what in HOWS.items():
        rows = [row for row in result["rows"] if row["how"] == how]
        run = [row for row in rows if row["outcome"] != "left out"]
        outcomes = [row["checked"]["outcome"] if "checked" in row else row["outcome"] for row in run]
        odd = set(outcomes) - {"exact", "refused", "left out"}  # the last where a loop overflows
        assert not odd, f"one pass is not what it says, {what}: {odd}"
        assert all(row["outcome"] != "other" for row in run), "a module returns something else"
        same = "" if how == "compiled" else sum(row["outcome"] == "same" for row in run)
        counts = [outcomes.count(outcome) for outcome in ("exact", "refused")]
        yield f"| {what} | {len(rows)} | {len(run)} | {counts[0]} | {counts[1]} | {same} |"
    yield ""
    rows = [row for row in result["rows"] if row["how"] == "compiled"]
    exact = [row for row in rows if row["outcome"] == "exact"]
    whole = [row for row in exact if row["graphs"] == 1]
    assert all(row["plain_graphs"] > 1 for row in exact if row not in whole)
    assert not any(row["more"] for row in exact), "a later update makes another graph"
    together = [row for row in rows if row.get("experts_by_default", {}).get("outcome") == "refused"]
    alone = [row for row in rows if row["outcome"] == "refused"]
    said = (
        f"Compiled, {len(whole)} of the {len(exact)} make one graph, and the others are those that torch cuts into "
        "several by itself. The second and the third update make none."
    )
    if together:
        said += " Experts together, as transformers runs them by default, are refused, since a graph does not tell "
        said += f"where their rows come from ({names(together)}). One by one "
        said += f"only those of {names(alone)} are." if alone else "they are exact."
    yield from prose(said)
    yield ""
    yield from source("coverage_forward_cpu", result)
