"""Fill the tables of docs/theory.md from benchmarks/results, so that no figure on the page is typed by hand.

python benchmarks/theory_tables.py          rewrite the page
python benchmarks/theory_tables.py --check  exit code 1 when the page and the results differ
"""

import json
import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "theory.md"
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
        yield f"| {ours['theorem']} | `{ours['rule']}` | {ours['quantity']} | {ours['order']:.3f} | {other} |"


def demo_rows():
    yield "| command | spread, standard Adam | spread, invariant Adam | ratio |"
    yield "|---|---|---|---|"
    for name, command in DEMOS.items():
        result = load(name)
        spread = result["spread"]
        yield f"| {command} | {spread['standard']:.3f} | {spread['invariant']:.4f} | {result['ratio']:.0f} |"


def fill(text):
    for name, rows in (("verify", verify_rows()), ("demo", demo_rows())):
        block = f"<!-- {name} -->\n" + "\n".join(rows) + f"\n<!-- /{name} -->"
        text, count = re.subn(rf"<!-- {name} -->\n.*?<!-- /{name} -->", block, text, flags=re.DOTALL)
        assert count == 1, f"{PAGE} has {count} blocks named {name}"
    return text.replace("-0.00 |", "0.00 |")


if __name__ == "__main__":
    before = PAGE.read_text(encoding="utf-8")
    after = fill(before)
    if "--check" in sys.argv[1:]:
        sys.exit(before != after and f"{PAGE.relative_to(ROOT)} differs from the results: run {sys.argv[0]}")
    PAGE.write_text(after, encoding="utf-8")
