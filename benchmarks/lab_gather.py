"""Take runs of the lab that another machine made into benchmarks/results/lab, and gather their grids.

    PYTHONPATH=src python benchmarks/lab_gather.py FOLDER...

Each FOLDER is one that `invariant-adam reproduce --out FOLDER` wrote. Of the commands that its grid.json names, the
folders of that machine are left out. Then make figures and pages:

    invariant-adam figures benchmarks/results/lab --out docs/figures/lab
    python benchmarks/pages.py
"""

import argparse
import re
from pathlib import Path

from invariant_adam_lab import record
from invariant_adam_lab.grids import grid, store

LAB = Path("benchmarks/results/lab")


def gather(place, lab=LAB):
    """Take in the finished runs of a grid's folder; return how many they are."""
    about, found = record.read_json(place / "grid.json"), list(store.files(place, "*-lr*.json"))
    if about is None or not found:
        return 0
    new = {lab / place.name / path.name: path.read_bytes() for path, _, _ in found}
    other = [path for path, content in new.items() if path.exists() and path.read_bytes() != content]
    if other:
        raise FileExistsError(f"{other[0]} is there already, made another time; remove it first to replace it")
    for path, content in new.items():
        record.write(path, content)
    plan = grid.Grid(place.name, about["model"], about["grid"], about["preset"], [run for _, run, _ in found])
    _, run, first = found[0]
    how = {"small": run.small, "precision": first["precision"], "made_up": first["dataset"] == "made-up"}
    for command in about["commands"]:
        command = re.sub(r"--out \S+", f"--out {LAB}", re.sub(r"(--data )\S*/", r"\1", command))
        store.gather(plan, store.Setup(lab, place.name, first["device_type"], first["dataset"], **how), command)
    (lab / place.name / "results.parquet").unlink(missing_ok=True)  # not kept in the repository
    return len(found)


def main(words=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="+", type=Path, metavar="FOLDER")
    if not LAB.is_dir():
        parser.error(f"there is no {LAB} here; call this from the repository")
    folders = parser.parse_args(words).folders
    for folder in folders:
        if not folder.is_dir():
            parser.error(f"there is no folder {folder}; name one that reproduce was given as --out")
    for place in sorted(path for folder in folders for path in folder.iterdir() if path.is_dir()):
        try:
            print(f"{place}: {gather(place)} finished runs taken in")
        except FileExistsError as error:
            parser.error(str(error))


if __name__ == "__main__":
    main()
