"""A tuned run at other batch sizes: hyperparameters, updates, growing in, warm-up, time, and where it stops paying."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from invariant_adam.growth import grown_kappa
from invariant_adam.scaling import Hyperparameters, scale, update_shares

LARGE = 0.5  # an update that is this share of m is no longer small


class TunedRun(NamedTuple):
    """What is known of a run; None: not known."""

    lr: float
    betas: tuple[float, float] = (0.9, 0.999)
    weight_decay: float = 0.0
    batch: int = 1  # samples per update
    micro_batch: int | None = None  # samples; None: `batch`, where values tuned with AdamW hold
    samples: int | None = None  # of the whole run
    warmup: int | None = None  # samples
    samples_per_second: float | None = None  # at `batch`
    noise_scale: float | None = None  # samples


class Row(NamedTuple):
    """The run at one batch size."""

    batch: int  # samples per update
    kappa: int  # micro-batches per update
    rho: float
    scaled: Hyperparameters  # of one update
    shares: tuple[float, float]  # of one update in m and in v, in the long run
    updates: int | None  # of the whole run
    growth_updates: int  # more than without growing in
    warmup_updates: int | None
    needs: float | None  # samples for the same progress, over those at the tuned batch size
    hours: float | None


class Plan(NamedTuple):
    """A tuned run at several batch sizes, and what to look out for."""

    tuned: TunedRun
    rule: str
    rows: list[Row]
    warnings: list[str]
    notes: list[str]

    def asdict(self) -> dict[str, Any]:
        """Return the plan as JSON holds it."""
        rows = [row._asdict() | row.scaled._asdict() for row in self.rows]
        for row in rows:
            del row["scaled"]
        rest = {"warnings": self.warnings, "notes": self.notes}
        return {"command": "scale", "rule": self.rule, "tuned": self.tuned._asdict(), "rows": rows, **rest}


def plan(tuned: TunedRun, batches: Sequence[int] = (), *, rule: str = "exponential", grow: bool = True) -> Plan:
    """Plan a tuned run at other batch sizes.

    Args:
        tuned: the run.
        batches: in samples, multiples of the micro-batch; none: one to 32 times the tuned one, as far as the rule goes.
        rule: as in `scaling.scale`.
        grow: whether the first updates grow (`BatchGrowth`).

    >>> p = plan(TunedRun(3e-4, (0.9, 0.95), batch=512, samples=1_000_000), [512, 2048])
    >>> [(row.kappa, row.updates, row.growth_updates, round(row.shares[0], 3)) for row in p.rows]
    [(1, 1954, 0, 0.1), (4, 509, 20, 0.344)]
    """
    M = _check(tuned)
    if not batches:
        most = max(1 - beta for beta in tuned.betas) if rule in ("linear", "square_root") else 0.0
        batches = [tuned.batch * 2**i for i in range(6) if not i or 2**i * most < 1]
    rows = [_row(tuned, M, batch, rule, grow) for batch in sorted(set(batches))]
    p = Plan(tuned._replace(micro_batch=M), rule, rows, [], [])
    p.warnings.extend(_warnings(p))
    p.notes.extend(_notes(p))
    return p


def _check(tuned: TunedRun) -> int:
    """Return the micro-batch; refuse a run that cannot be."""
    M = tuned.batch if tuned.micro_batch is None else tuned.micro_batch
    for name, value in (("--from", tuned.batch), ("--micro-batch", M), ("--samples", tuned.samples)):
        if value is not None and value < 1:
            raise ValueError(f"{name} must be at least 1 sample, got {value}")
    for name, rate in (("--samples-per-second", tuned.samples_per_second), ("--noise-scale", tuned.noise_scale)):
        if rate is not None and not 0 < rate < math.inf:
            raise ValueError(f"{name} must be a finite number above 0, got {rate:g}")
    if tuned.samples is not None and tuned.samples < tuned.batch:
        raise ValueError(f"--samples must be at least the {tuned.batch} of one update (--from), got {tuned.samples}")
    if tuned.warmup is not None and tuned.warmup < 0:
        raise ValueError(f"--warmup must be at least 0 samples, got {tuned.warmup}")
    return M


def _row(tuned: TunedRun, M: int, batch: int, rule: str, grow: bool) -> Row:
    if batch < 1:
        raise ValueError(f"--to must be at least 1 sample, got {batch}")
    if batch % M:
        below, above = batch // M * M, -(-batch // M) * M
        raise ValueError(
            f"--micro-batch {M} does not divide --to {batch}: an update is a whole number of micro-batches; use --to "
            f"{f'{below} or {above}' if below else above}, or --micro-batch {math.gcd(batch, M)}"
        )
    kappa = batch // M
    scaled = scale(tuned.lr, tuned.betas, tuned.weight_decay, from_batch=tuned.batch, to_batch=batch, rule=rule)
    first = grown_updates(kappa) if grow and rule != "square_root" else []
    rho, noise = batch / tuned.batch, tuned.noise_scale
    needs = None if noise is None else (1 + batch / noise) / (1 + tuned.batch / noise)
    hours = None
    if tuned.samples and tuned.samples_per_second:
        hours = tuned.samples * (needs or 1) / (tuned.samples_per_second * rho) / 3600
    return Row(
        batch,
        kappa,
        rho,
        scaled,
        update_shares(tuned.betas, from_batch=tuned.batch, to_batch=batch, rule=rule),
        None if tuned.samples is None else _updates(tuned.samples / M, kappa, first),
        len(first) - sum(first) // kappa,
        None if tuned.warmup is None else _updates(tuned.warmup / M, kappa, first),
        needs,
        hours,
    )


def grown_updates(kappa: int, ratio: float = 0.1) -> list[int]:
    """Return the micro-batches of each update of the mini-batches that growing in cuts.

    >>> grown_updates(2)
    [1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1]
    >>> grown_updates(1)
    []
    """
    cut: list[int] = []
    while True:
        left = kappa
        these: list[int] = []
        while left:
            these.append(grown_kappa(left, sum(cut) + sum(these), ratio))
            left -= these[-1]
        if len(these) == 1:
            return cut
        cut += these


def _updates(micro_batches: float, kappa: int, first: Sequence[int]) -> int:
    """How many updates the first so many micro-batches are; a last one may be short."""
    count = 0
    for size in first:
        if micro_batches <= 0:
            return count
        micro_batches -= size
        count += 1
    return count + max(0, math.ceil(micro_batches / kappa - 1e-9))


def _warnings(p: Plan) -> list[str]:
    found = []
    large = [row for row in p.rows if row.shares[0] > LARGE]
    if large:
        limit = _largest_small(p, large[0].kappa) * (p.tuned.micro_batch or 1)
        stay = f"stay at or below {limit:,} samples, or " if limit else ""
        found.append(
            f"at B = {large[0].batch:,} an update is {large[0].shares[0]:.0%} of m. The theory is about small updates, "
            f"so expect a drift from the run at {p.tuned.batch:,}; {stay}tune with a larger beta1"
        )
    if p.tuned.noise_scale is not None:
        past = [row.batch for row in p.rows if row.batch > max(p.tuned.noise_scale, p.tuned.batch)]
        if past:
            found.append(
                f"B = {past[0]:,} is past the noise scale, {p.tuned.noise_scale:,.0f} samples: from there on a batch "
                "twice as large needs almost twice the samples for the same progress, and stops paying"
            )
    return found


def _largest_small(p: Plan, large: int) -> int:
    """The most micro-batches whose share in m is not large, by bisection; 0 where one is too many."""
    small, M = 0, p.tuned.micro_batch or 1
    while large - small > 1:
        kappa = (small + large) // 2
        share, _ = update_shares(p.tuned.betas, from_batch=p.tuned.batch, to_batch=kappa * M, rule=p.rule)
        small, large = (kappa, large) if share <= LARGE else (small, kappa)
    return small


def _notes(p: Plan) -> list[str]:
    found, M = [], p.tuned.micro_batch or 1
    if p.rule == "square_root":
        found.append(
            'rule="square_root" is for standard Adam; invariant Adam takes "exponential", "linear" or "long_momentum"'
        )
    elif any(row.kappa == 1 for row in p.rows):
        found.append(f"at B = {M:,} an update is one micro-batch: standard Adam")
    if p.rule != "square_root" and p.tuned.batch > M:
        found.append(
            f"values tuned with standard Adam at {p.tuned.batch:,} belong to --micro-batch {p.tuned.batch}; squares of "
            f"{M:,} samples hold more noise, so steps are shorter: tune with --micro-batch {M}"
        )
    if p.tuned.noise_scale is not None:
        found.append(
            "samples needed: for the same progress where each batch size has its best learning rate, ∝ 1 + B/noise "
            "scale; at smaller learning rates invariant Adam needs no more at one batch size than at another"
        )
    if any(row.hours is not None for row in p.rows):
        found.append(
            f"hours: as many machines more as B is larger than {p.tuned.batch:,}, each at its samples per second, "
            "without what they lose by waiting for each other"
        )
    return found


# ---------------------------------------------------------------- a trainer's settings

NAMES = {  # ours <- those of Hugging Face's TrainingArguments, Lightning and plain scripts
    "lr": ("lr", "learning_rate"),
    "weight_decay": ("weight_decay",),
    "batch": ("tuned_batch_size", "batch_size", "train_batch_size"),
    "micro_batch": ("micro_batch_size",),
    "samples": ("samples", "train_samples", "max_samples"),
    "warmup": ("warmup_samples",),
    "samples_per_second": ("samples_per_second", "train_samples_per_second"),
    "noise_scale": ("noise_scale",),
}


def read_config(path: Path) -> dict[str, Any]:
    """Read what a JSON or YAML file of a trainer's arguments says of a `TunedRun`.

    Batch size, samples and warm-up come from Trainer's own numbers: its devices' batch, accumulation, `world_size`,
    `max_steps`, and `warmup_steps` or `warmup_ratio`.
    """
    if path.suffix not in (".json", ".yaml", ".yml"):
        raise ValueError(
            f"--from-config {path} is no .json, .yaml or .yml. A training_args.bin is a pickle, which may run code "
            "when it is opened; write JSON instead: json.dump(args.to_dict(), file)"
        )
    try:
        content = path.read_text(encoding="utf-8")
        found = json.loads(content) if path.suffix == ".json" else _yaml(content)
    except OSError as error:
        raise ValueError(f"--from-config {path} cannot be read: {error.strerror}; name another file") from None
    except ValueError as error:
        raise ValueError(
            f"--from-config {path} is not the {path.suffix[1:].upper()} that its name says: {error}"
        ) from None
    if not isinstance(found, Mapping):
        raise ValueError(f"--from-config {path} must hold names and values, and holds a {type(found).__name__}")
    given = {ours: found[name] for ours, names in NAMES.items() for name in names if found.get(name) is not None}
    if "betas" in found or "adam_beta1" in found:
        given["betas"] = found.get("betas") or (found["adam_beta1"], found.get("adam_beta2", 0.999))
    return _checked(path, given | _counted(path, found, given))


def _counted(path: Path, found: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """What has to be multiplied: the batch of all devices, and steps in samples."""
    counts = {
        name: _number(path, name, found.get(name) or usual)
        for name, usual in (
            ("per_device_train_batch_size", 0),
            ("gradient_accumulation_steps", 1),
            ("world_size", 1),
            ("max_steps", 0),
            ("warmup_steps", 0),
            ("warmup_ratio", 0),
        )
    }
    each, accumulation, world, steps, warmup, share = counts.values()
    batch = _number(path, "batch", given.get("batch") or each * accumulation * world)
    more: dict[str, Any] = {"batch": batch} if batch else {}
    if batch and steps > 0:
        more["samples"] = given.get("samples") or batch * steps
    if batch and warmup > 0:  # below 1 it is a share of the steps, as Trainer has it
        more["warmup"] = batch * (warmup if warmup >= 1 else warmup * steps)
    elif batch and share > 0 and steps > 0:
        more["warmup"] = batch * steps * share
    return more


def _checked(path: Path, given: dict[str, Any]) -> dict[str, Any]:
    """Numbers as a `TunedRun` has them."""
    betas = given.pop("betas", None)
    whole = ("batch", "micro_batch", "samples", "warmup")
    numbers = {name: _number(path, name, value) for name, value in given.items()}
    result: dict[str, Any] = {name: round(value) if name in whole else value for name, value in numbers.items()}
    if betas is not None:
        if not isinstance(betas, Sequence) or isinstance(betas, str) or len(betas) != 2:
            raise ValueError(f"--from-config {path}: betas must be two numbers, got {betas!r}")
        result["betas"] = (_number(path, "beta1", betas[0]), _number(path, "beta2", betas[1]))
    return result


def _number(path: Path, name: str, value: Any) -> float:
    """A number; YAML reads 3e-4 as a word."""
    try:
        if isinstance(value, bool):
            raise TypeError
        return float(value)
    except (TypeError, ValueError):
        raise ValueError(f"--from-config {path}: {name} must be a number, got {value!r}") from None


def _yaml(content: str) -> Any:
    try:
        import yaml
    except ModuleNotFoundError:
        raise ValueError("reading YAML needs PyYAML; pip install pyyaml, or write it as JSON") from None
    try:
        return yaml.safe_load(content)  # data only
    except yaml.YAMLError as error:
        raise ValueError(" ".join(str(error).split())) from None
