import json
import pickle
import tarfile
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from typer.testing import CliRunner

from invariant_adam_lab.cli import app
from invariant_adam_lab.training import data

NAMES = [*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]
EACH = 4  # images in a batch of these tests


@pytest.fixture
def images() -> data.Images:
    return data.synthetic(5 * EACH, EACH, classes=4)


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    """An empty cache on a machine without a network and without npm."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("INVARIANT_ADAM_DATA", str(folder))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("no_proxy", "*")
    monkeypatch.setattr(data, "CIFAR10_ADDRESS", "http://127.0.0.1:9/cifar-10-python.tar.gz")
    monkeypatch.setattr(data, "SHAKESPEARE_ADDRESS", "http://127.0.0.1:9/input.txt")
    return folder


def parts(images: data.Images) -> list[tuple[str, np.ndarray, list[int]]]:
    x, y = torch.cat((images.x, images.test_x)).numpy(), [*images.y.tolist(), *images.test_y.tolist()]
    return [(name, x[i * EACH :][:EACH], y[i * EACH :][:EACH]) for i, name in enumerate(NAMES)]


def write_pngs(images: data.Images, folder: Path) -> None:
    folder.mkdir(parents=True)
    for name, x, _ in parts(images):
        Image.fromarray(x.transpose(0, 2, 3, 1).reshape(len(x), 1024, 3)).save(folder / f"{name}.png")
    (folder / "train_lables.json").write_text(json.dumps(images.y.tolist()))
    (folder / "test_lables.json").write_text(json.dumps(images.test_y.tolist()))


def write_pickles(images: data.Images, folder: Path) -> None:
    folder.mkdir(parents=True)
    for name, x, y in parts(images):
        content = {b"data": x.reshape(len(x), -1), b"labels": y, b"batch_label": b"of a test"}
        (folder / name).write_bytes(pickle.dumps(content, protocol=2))


def pack(folder: Path, path: Path, inside: str) -> Path:
    with tarfile.open(path, "w:gz") as archive:
        archive.add(folder, inside)
    return path


@pytest.mark.parametrize("form", ["png", "package", "pickles", "parent", "archive", "archive in a folder", "npz"])
def test_every_form_gives_the_same_images(form, images, tmp_path):
    folder = tmp_path / "source"
    if form in ("png", "package"):
        write_pngs(images, folder)
        path = folder if form == "png" else pack(folder, tmp_path / "p.tgz", "package")
    elif form == "npz":
        path = tmp_path / "images.npz"
        data._store(images, path)
    else:
        write_pickles(images, folder / "cifar-10-batches-py")
        path = folder / "cifar-10-batches-py" if form == "pickles" else folder
        if form.startswith("archive"):
            (tmp_path / "deep").mkdir()
            path = pack(path, tmp_path / "deep" / "cifar-10-python.tar.gz", "cifar-10-batches-py")
            path = path.parent if form == "archive in a folder" else path
    found = data._read_images(path)
    assert all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(found, images, strict=True))


def test_the_cache_is_filled_once_and_read_after(images, cache, monkeypatch):
    monkeypatch.setattr(data, "_verify", lambda found, source: found)  # these are not CIFAR-10's bytes
    write_pngs(images, cache)
    _, source = data.cifar10()
    assert str(cache) in source
    for path in cache.glob("*.png"):
        path.unlink()
    found, source = data.cifar10()
    assert source == str(cache / "cifar10.npz")
    assert torch.equal(found.x, images.x)


def test_missing_files_are_named(images, tmp_path):
    write_pngs(images, tmp_path / "some")
    (tmp_path / "some" / "data_batch_3.png").unlink()
    with pytest.raises(data.DataError, match=r"lacks data_batch_3\.png"):
        data.cifar10(tmp_path / "some")
    write_pngs(images, tmp_path / "other")
    for name in ("train", "test"):
        (tmp_path / "other" / f"{name}_lables.json").unlink()
    with pytest.raises(data.DataError, match=r"lacks train_lables\.json, test_lables\.json"):
        data.cifar10(tmp_path / "other")
    with pytest.raises(data.DataError, match="does not exist"):
        data.cifar10(tmp_path / "nowhere")


@pytest.mark.parametrize("name", ["data_batch_3.png", "test_lables.json", "data_batch_2"])
def test_a_damaged_file_is_named(name, images, tmp_path):
    (write_pickles if name == "data_batch_2" else write_pngs)(images, tmp_path / "some")
    (tmp_path / "some" / name).write_bytes(b"half of something")
    with pytest.raises(data.DataError, match=rf"{name} in .*some is damaged \(.*\); fetch it again"):
        data.cifar10(tmp_path / "some")


def test_what_holds_no_cifar10_is_told_in_a_line(tmp_path):
    with pytest.raises(data.DataError, match=r"holds no CIFAR-10: no cifar-10-python\.tar\.gz, no data_batch_1"):
        data.cifar10(tmp_path)
    (tmp_path / "file").write_text("no archive")
    with pytest.raises(data.DataError) as caught:
        data.cifar10(tmp_path / "file")
    assert str(caught.value).startswith(f"{tmp_path / 'file'} is no tar archive, or not a whole one (")
    assert "\n" not in str(caught.value)
    (tmp_path / "file").write_text("")
    with pytest.raises(data.DataError, match=r"file: a text must have 2 to 256 different characters"):
        data.tinyshakespeare(tmp_path / "file")


def test_what_is_not_cifar10_is_refused():
    x, y = torch.zeros(50_000, 3, 32, 32, dtype=torch.uint8), torch.arange(50_000) % 10
    right = data.Images(x, y, x[:10_000], y[:10_000])
    with pytest.raises(data.DataError, match="not CIFAR-10's 50,000"):
        data._verify(right._replace(x=x[:-1]), "here")
    with pytest.raises(data.DataError, match="per class"):
        data._verify(right._replace(y=y // 2), "here")
    with pytest.raises(data.DataError, match="channel means"):
        data._verify(right, "here")
    for channel, mean in enumerate(data.CIFAR10_MEAN):  # the right means and counts, but other bytes
        x[:, channel] = int(mean * 255)
        x[: round((mean * 255 % 1) * 50_000), channel] += 1
    with pytest.raises(data.DataError, match="SHA-256"):
        data._verify(right, "here")


def test_a_pickle_that_would_run_code_is_not_opened(images, tmp_path):
    write_pickles(images, tmp_path / "bad")

    class Evil:
        def __reduce__(self):
            return (Path.touch, (tmp_path / "it ran",))

    (tmp_path / "bad" / "data_batch_2").write_bytes(pickle.dumps(Evil(), protocol=2))
    with pytest.raises(data.DataError, match="should not"):
        data.cifar10(tmp_path / "bad")
    assert not (tmp_path / "it ran").exists()


def test_offline_it_says_what_it_tried_and_what_to_put_where(cache):
    with pytest.raises(data.DataError) as caught:
        data.cifar10()
    for word in (data.CIFAR10_ADDRESS, "npm", str(cache), "cifar-10-batches-py", "--path"):
        assert word in str(caught.value)
    assert "it cannot be reached ([Errno" in str(caught.value)
    with pytest.raises(data.DataError, match=r"tinyshakespeare\.txt"):
        data.tinyshakespeare()
    assert not cache.exists() or not list(cache.iterdir())


def test_a_cache_that_cannot_be_made_is_blamed_and_not_the_address(cache, monkeypatch):
    (cache.parent / "a file").touch()
    monkeypatch.setenv("INVARIANT_ADAM_DATA", str(cache.parent / "a file" / "cache"))
    for find in (data.tinyshakespeare, data.cifar10):
        with pytest.raises(data.DataError, match=r"cannot be written \(.*\); set INVARIANT_ADAM_DATA to a folder that"):
            find()


@pytest.mark.parametrize("sent", [1.0, 0.5, 0.0])
def test_an_interrupted_download_leaves_nothing(sent, cache, monkeypatch):
    text = "to be, or not to be\n" * 500
    monkeypatch.setattr(data, "SHAKESPEARE_DIGEST", data.encode(text).digest())

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text.encode()[: int(sent * len(text))])

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        monkeypatch.setattr(data, "SHAKESPEARE_ADDRESS", f"http://127.0.0.1:{server.server_port}/input.txt")
        try:
            if sent == 1:
                told: list[str] = []
                found, source = data.tinyshakespeare(tell=told.append)
                assert told[-1] == "  0.0 of 0.0 MB"
                assert source.startswith("http")
                assert found.vocab == "".join(sorted(set(text)))
                assert data.tinyshakespeare()[1] == str(cache / "tinyshakespeare.txt")
            else:
                with pytest.raises(data.DataError, match=r"bytes|more expected|SHA"):
                    data.tinyshakespeare()
                assert list(cache.iterdir()) == []
        finally:
            server.shutdown()
            thread.join()


def test_a_damaged_cache_is_told(cache):
    cache.mkdir()
    (cache / "cifar10.npz").write_bytes(b"half of something")
    with pytest.raises(data.DataError, match="delete it"):
        data.cifar10()
    (cache / "tinyshakespeare.txt").write_text("to be " * 10)
    with pytest.raises(data.DataError, match="it is another text; delete it"):
        data.tinyshakespeare()


def test_any_text_will_do(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("Die Größe des Bündels.\n" * 20, encoding="utf-8")
    text = data.text(path)
    assert len(text.ids) == 414
    assert "".join(text.vocab[i] for i in text.ids[:22].tolist()) == "Die Größe des Bündels."
    assert text.decode() == path.read_bytes().decode()
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(data.DataError, match="UTF-8"):
        data.text(path)


def of_command(*arguments: object) -> dict[str, str]:
    found = CliRunner().invoke(app, ["data", *map(str, arguments), "--json"])
    assert found.exit_code == 0, found.output
    return json.loads(found.stdout)


@pytest.mark.parametrize(
    ("name", "place", "cause"),
    [
        ("cifar10", "images", "holds arrays of"),
        ("tinyshakespeare", "text.txt", "it is another text; `reproduce gpt --data` trains on any text"),
    ],
)
def test_a_path_is_verified_and_kept(name, place, cause, images, tmp_path, cache, monkeypatch):
    write_pngs(images, tmp_path / "images")
    (tmp_path / "text.txt").write_text("round and round\n" * 20)
    place = tmp_path / place
    refused = CliRunner().invoke(app, ["data", name, "--path", str(place)])
    assert refused.exit_code == 2
    assert f"--path: {place} h" in refused.stderr
    assert cause in refused.stderr
    assert not cache.exists()
    monkeypatch.setattr(data, "_verify", lambda found, source: found)  # these are the right ones from here on
    monkeypatch.setattr(data, "SHAKESPEARE_DIGEST", data.text(tmp_path / "text.txt").digest())
    first, again = of_command(name, "--path", place), of_command(name)
    assert first["source"] == str(place)
    assert again == {**first, "source": first["cache"]}
    Path(first["cache"]).unlink()
    cache.rmdir()
    cache.write_text("in the way of the folder")
    found = CliRunner().invoke(app, ["data", name, "--path", str(place), "--json"])
    assert found.exit_code == 0
    assert "not cached in" in found.stderr
    assert "cache" not in json.loads(found.stdout)


def test_a_path_may_be_a_string(images, tmp_path, monkeypatch):
    write_pngs(images, tmp_path / "images")
    monkeypatch.setattr(data, "_verify", lambda found, source: found)  # these are not CIFAR-10's bytes
    assert torch.equal(data.cifar10(str(tmp_path / "images"))[0].x, images.x)
    path = tmp_path / "input.txt"
    path.write_text("to be, or not to be\n")
    monkeypatch.setattr(data, "SHAKESPEARE_DIGEST", data.text(path).digest())
    assert data.tinyshakespeare(str(tmp_path))[0].decode() == data.text(str(path)).decode() == path.read_text()


def test_the_command(tmp_path, cache, monkeypatch):
    path = tmp_path / "text.txt"
    path.write_text("round and round\n" * 20)
    monkeypatch.setattr(data, "SHAKESPEARE_DIGEST", data.text(path).digest())
    shown = CliRunner().invoke(app, ["data", "tinyshakespeare", "--path", str(path)])
    assert shown.exit_code == 0
    assert "288" in shown.stdout
    failed = CliRunner().invoke(app, ["data", "cifar10"])
    assert failed.exit_code == 2
    assert "--path" in failed.stderr


def test_synthetic_images_can_be_told_apart():
    found = data.synthetic(200, 100)
    x, test = (part.float().flatten(1) for part in (found.x, found.test_x))
    centres = torch.stack([x[found.y == k].mean(0) for k in range(found.classes)])
    assert (torch.cdist(test, centres).argmin(1) == found.test_y).float().mean() > 0.9
