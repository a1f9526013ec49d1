"""What mkdocs does beside turning docs/ into pages: README, changelog, scripts, the live report, formulas."""

import html
import json
import re
from pathlib import Path

from latex2mathml.converter import convert
from mkdocs.structure.files import File

ROOT = Path(__file__).parents[1]
PAGES = {"index.md": "README.md", "contributing.md": "CONTRIBUTING.md", "changelog.md": "CHANGELOG.md"}
LAB = ROOT / "benchmarks" / "results" / "lab"


def on_files(files, config):
    """Add the pages whose text is elsewhere, and the report that the results page shows."""
    for page, source in PAGES.items():
        text = (ROOT / source).read_text(encoding="utf-8")
        files.append(File.generated(config, page, content=re.sub(r"(\]\(|src=\")docs/", r"\1", text)))
    files.append(File.generated(config, "examples.md", content="\n".join(examples())))
    if any(LAB.glob("*/results.csv")):
        from invariant_adam_lab.results import curves, page

        files.append(File.generated(config, "report.html", content=page.report(curves.load(LAB))))
    return files


def examples():
    """Yield the lines of a page with the notebook and the scripts of examples/, each under its name."""
    yield "# Examples\n\nScripts to copy from, and a notebook. Each is tested.\n"
    for notebook in sorted((ROOT / "examples").glob("*.ipynb")):
        yield f"## {notebook.name}\n"
        for cell in json.loads(notebook.read_text(encoding="utf-8"))["cells"]:
            text = "".join(cell["source"])
            yield f"```python\n{text}\n```\n" if cell["cell_type"] == "code" else re.sub("^#+", "###", text) + "\n"
    for script in sorted((ROOT / "examples").glob("*.py")):
        yield f"## {script.name}\n\n```python\n{script.read_text(encoding='utf-8')}```\n"


def on_page_markdown(markdown, page, config, files):
    """Let links to files outside of docs/ lead to the pages made of them."""
    for made, source in PAGES.items():
        markdown = re.sub(rf"\]\((\.\./)?{source}(?=[)#])", f"]({made}", markdown)
    markdown = re.sub(
        r"\]\((?:\.\./)?examples/(\w+)\.(py|ipynb)\)", lambda found: f"](examples.md#{found[1]}{found[2]})", markdown
    )
    return re.sub(r"\[([^\]]*)\]\((?:\.\./)?(?:CITATION\.cff|NOTICE|LICENSE)\)", r"`\1`", markdown)


def on_page_content(text, page, config, files):
    """Turn formulas into MathML, which browsers show without a script."""
    return re.sub(r'<(div|span) class="arithmatex">(.*?)</\1>', formula, text, flags=re.DOTALL)


def formula(found):
    latex = html.unescape(found[2]).strip()
    display = "block" if latex.startswith("\\[") else "inline"
    shown = convert(latex[2:-2].strip(), display=display)
    return f'<div class="formula">{shown}</div>' if display == "block" else shown
