"""Results on disk: JSON that is either whole or absent, and says where it came from."""

from __future__ import annotations

import datetime
import hashlib
import json
import os
import platform
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

import invariant_adam


def provenance() -> dict[str, Any]:
    """Return the machine, the versions and the date that a result was measured with."""
    return {
        "invariant_adam": invariant_adam.__version__,
        "torch": str(torch.__version__),
        "python": platform.python_version(),
        "machine": f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores",
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
    }


def source_digest() -> str:
    """Return a hash of the code of library and lab, which tells results of one code from those of another."""
    digest = hashlib.sha256()
    for package in (Path(invariant_adam.__file__).parent, Path(__file__).parent):
        for path in sorted(package.rglob("*.py")):
            digest.update(path.relative_to(package.parent).as_posix().encode() + b"\0" + path.read_bytes())
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


def version(package: str) -> str | None:
    """Return the version of a package, or None where it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def environment(device: torch.device) -> dict[str, Any]:
    """Return the device and the versions, which all rows of one benchmark file must share."""
    found: dict[str, Any] = {"device": _device_name(device)}
    if device.type == "cpu":
        found["threads"] = torch.get_num_threads()
    return found | {
        "torch": str(torch.__version__),
        "triton": version("triton"),
        "python": platform.python_version(),
        "invariant_adam": invariant_adam.__version__,
    }


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    try:  # platform knows the architecture only
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


class Rows:
    """The rows of a benchmark in a file, written after each row, so that an interrupted run keeps what it measured.

    A row is its settings and what was measured, flat, with the date and the `source_digest` of the code. A row of the
    same settings and code is not measured again; one of other code is replaced.
    """

    def __init__(self, path: Path, command: str, benchmark: str, device: torch.device) -> None:
        self.path = path
        self.head = {"benchmark": benchmark, "command": command, **environment(device)}
        self.code = source_digest()
        self.rows: list[dict[str, Any]] = []
        self.new: list[dict[str, Any]] = []
        if not path.exists():
            try:  # now, not when the first row is measured
                write_json(path, self.result())
                path.unlink()
            except OSError as error:
                raise ValueError(f"cannot write to --out {path}: {error}; choose another file") from error
            return
        found = read_json(path)
        if not isinstance(found, dict) or not isinstance(found.get("rows"), list):
            raise ValueError(f"--out {path} is not a result of this command; choose another file")
        for key, here in self.head.items():
            if found.get(key) != here:
                raise ValueError(
                    f"--out {path} holds rows of {key} = {found.get(key)}, and here it is {here}: one file holds "
                    "rows that can be compared; choose another file"
                )
        self.rows = found["rows"]

    def has(self, settings: dict[str, Any]) -> bool:
        """Whether this code has measured a row of these settings without an error."""
        settings = _as_read(settings)
        return any(
            self._same(row, settings) and row.get("code") == self.code and "error" not in row for row in self.rows
        )

    def add(self, settings: dict[str, Any], measured: dict[str, Any]) -> dict[str, Any]:
        """Write a row in the place of the one with the same settings, and return it."""
        date = datetime.datetime.now(datetime.timezone.utc).date().isoformat()
        settings = _as_read(settings)
        row = {**settings, **measured, "date": date, "code": self.code}
        places = [i for i, other in enumerate(self.rows) if self._same(other, settings)]
        if places:
            self.rows[places[0]] = row
        else:
            self.rows.append(row)
        self.new.append(row)
        write_json(self.path, self.result())
        return row

    def result(self) -> dict[str, Any]:
        """Return what the file holds."""
        return {**self.head, "rows": self.rows}

    @staticmethod
    def _same(row: dict[str, Any], settings: dict[str, Any]) -> bool:
        return all(key in row and row[key] == value for key, value in settings.items())


def _as_read(settings: dict[str, Any]) -> dict[str, Any]:
    """Return settings as JSON gives them back: a tuple becomes a list."""
    read: dict[str, Any] = json.loads(json.dumps(settings))
    return read
