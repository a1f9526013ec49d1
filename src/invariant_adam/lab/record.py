"""Results on disk: JSON that is either whole or absent, and says where it came from."""

from __future__ import annotations

import datetime
import hashlib
import json
import os
import platform
from pathlib import Path
from typing import Any

import torch

from .. import __version__


def provenance() -> dict[str, Any]:
    """Return the machine, the versions and the date that a result was measured with."""
    return {
        "invariant_adam": __version__,
        "torch": str(torch.__version__),
        "python": platform.python_version(),
        "machine": f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores",
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
    }


def source_digest() -> str:
    """Return a hash of the package's code, so that a result is not taken for one of other code."""
    package = Path(__file__).parents[1]
    digest = hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        digest.update(path.relative_to(package).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]


def write(path: Path, content: str | bytes) -> Path:
    """Write a file aside, flush it to the disk and rename it into place, so that a kill leaves no half of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with aside.open("wb") as f:
            f.write(content.encode() if isinstance(content, str) else content)
            f.flush()
            os.fsync(f.fileno())
        os.replace(aside, path)
    finally:
        aside.unlink(missing_ok=True)
    return path


def write_json(path: Path, result: Any) -> Path:
    """Write a result as JSON, whole or not at all."""
    return write(path, json.dumps(result, indent=1, ensure_ascii=False) + "\n")


def read_json(path: Path) -> Any:
    """Return what `write_json` wrote, or None where there is nothing readable."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
