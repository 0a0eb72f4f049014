"""pflkit.data: what is loaded, where it is looked for, one line for what cannot be used. No test needs a network."""

import gzip
import hashlib
import io
import os
import pickle
import random
import re
import shutil
import subprocess
import sys
import threading
import zipfile
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
import torch
import torchvision.datasets.cifar
import torchvision.datasets.utils
from PIL import Image
from torchvision.datasets import CIFAR10, CIFAR100

from pflkit import data, images, inventory
from pflkit.data import Dataset, data_root, load

SIZES = {"train": 40, "t10k": 20}  # small stand-ins for 60,000 and 10,000
NAMES = [f"{part}-{kind}-ubyte" for part in SIZES for kind in ("images-idx3", "labels-idx1")]


def idx(array):
    """The bytes of an idx file, written down from its description: 0 0 8 dimensions, sizes big-endian, values."""
    return bytes([0, 0, 8, array.ndim]) + b"".join(n.to_bytes(4, "big") for n in array.shape) + array.tobytes()


@pytest.fixture
def files(tmp_path, monkeypatch):
    """A folder <tmp>/FashionMNIST/raw with four small gzipped idx files, to be found under PFLKIT_DATA."""
    monkeypatch.setattr(data, "MNIST_SIZES", SIZES)
    monkeypatch.setenv("PFLKIT_DATA", str(tmp_path))
    raw = tmp_path / "FashionMNIST" / "raw"
    raw.mkdir(parents=True)
    for start, (part, n) in zip((0, 100), SIZES.items(), strict=True):
        pixels = np.zeros((n, 28, 28), np.uint8)
        pixels[:, 0, 0] = start + np.arange(n)  # every image is known by its first pixel
        pixels[:, 27, 27] = 255
        for kind, array in (("images-idx3", pixels), ("labels-idx1", np.arange(n, dtype=np.uint8) % 10)):
            (raw / f"{part}-{kind}-ubyte.gz").write_bytes(gzip.compress(idx(array), 1))
    return raw


def message(error, call, *args, **kwargs):
    """The text of the `error` that the call raises: one line, without a chain of other tracebacks."""
    with pytest.raises(error) as caught:
        call(*args, **kwargs)
    assert type(caught.value) is error
    assert caught.value.__cause__ is None
    assert caught.value.__suppress_context__ or caught.value.__context__ is None
    assert "\n" not in str(caught.value)
    return str(caught.value)


def unpack(raw, name):
    """Replace `name`.gz by the unpacked file; its path."""
    packed = raw / f"{name}.gz"
    (raw / name).write_bytes(gzip.decompress(packed.read_bytes()))
    packed.unlink()
    return raw / name


# --- digits ----------------------------------------------------------------------------------------------------------


def test_digits():
    digits = load("digits")
    assert (digits.name, digits.shape, digits.num_classes) == ("digits", (1, 8, 8), 10)
    assert digits.x.shape == (1797, 1, 8, 8) and digits.x.dtype == torch.float32 and digits.x.is_contiguous()
    assert digits.y.shape == (1797,) and digits.y.dtype == np.int64
    assert digits.classes == tuple(range(10))
    assert (digits.x.min(), digits.x.max()) == (-1, 1)
    # The class distribution of the test part in UCI's optdigits.names.
    assert np.bincount(digits.y).tolist() == [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]
    # Pixels 0..16 give (p/16 - 0.5)/0.5 = p/8 - 1, exact in float32; the first image begins with 0 0 5 13 9 1 0 0.
    assert digits.x[0, 0, 0].tolist() == [p / 8 - 1 for p in (0, 0, 5, 13, 9, 1, 0, 0)]
    assert digits.y[0] == 0


def test_digits_use_no_network(no_requests):
    load("digits")


def test_fingerprint_changes_with_any_value():
    digits = load("digits")
    assert re.fullmatch("[0-9a-f]{16}", digits.fingerprint)
    assert load("digits").fingerprint == digits.fingerprint
    x = digits.x.clone()
    x[1000, 0, 3, 4] += 0.125
    y = digits.y.copy()
    y[-1] = (y[-1] + 1) % 10
    others = [
        Dataset("digits", x, digits.y, digits.classes),
        Dataset("digits", digits.x, y, digits.classes),
        Dataset("digits", digits.x.flatten(1), digits.y, digits.classes),
    ]
    assert len({digits.fingerprint, *(other.fingerprint for other in others)}) == 4
    # Values count, not how they lie in memory.
    turned = digits.x.transpose(2, 3).contiguous().transpose(2, 3)
    assert Dataset("digits", turned, digits.y, digits.classes).fingerprint == digits.fingerprint


def test_global_random_states_are_left_alone(files, no_requests):
    before = random.getstate(), np.random.get_state(), torch.get_rng_state()
    for name in ("digits", "fashion-mnist"):
        load(name).fingerprint  # noqa: B018
    assert random.getstate() == before[0]
    assert all(np.array_equal(a, b) for a, b in zip(np.random.get_state(), before[1], strict=True))
    assert torch.equal(torch.get_rng_state(), before[2])


# --- names and folders -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["cifar", "Digits", "", None, 3, "images.npy", Path("digits"), ["digits"]])
def test_unknown_names_are_answered_with_the_known_ones(name):
    text = message(ValueError, load, name)
    known = ["digits", "fashion-mnist", "mnist", "cifar10", "cifar100", "tiny-imagenet", "agnews", "FILE.npz"]
    assert text == f"dataset={name!r}: must be one of {', '.join(map(repr, known))}"


def test_download_must_be_a_boolean():
    assert message(ValueError, load, "digits", download="false") == "download='false': must be True or False"


def test_root_is_the_argument_else_the_variable_else_the_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("PFLKIT_DATA", str(tmp_path / "variable"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert data_root("argument") == Path("argument")
    assert data_root(Path("~/argument")) == tmp_path / "argument"
    assert data_root() == data_root("") == tmp_path / "variable"
    monkeypatch.setenv("PFLKIT_DATA", "~/home")
    assert data_root() == tmp_path / "home"
    monkeypatch.setenv("PFLKIT_DATA", "")
    assert data_root() == tmp_path / "cache" / "pflkit"
    monkeypatch.delenv("PFLKIT_DATA")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert data_root() == tmp_path / ".cache" / "pflkit"


def test_files_are_looked_for_under_the_root(files, monkeypatch, tmp_path, no_requests):
    empty = tmp_path / "empty"
    assert str(empty / "FashionMNIST" / "raw") in message(
        FileNotFoundError, load, "fashion-mnist", root=empty, download=False
    )
    assert not empty.exists()
    monkeypatch.setenv("PFLKIT_DATA", str(empty))
    assert len(load("fashion-mnist", root=tmp_path).y) == 60
    with pytest.raises(FileNotFoundError):
        load("fashion-mnist", download=False)


# --- Fashion-MNIST ---------------------------------------------------------------------------------------------------


def test_true_sizes():
    assert data.MNIST_SIZES == {"train": 60_000, "t10k": 10_000}


@pytest.mark.parametrize("unpacked", [[], NAMES, NAMES[1:3]], ids=["gz", "unpacked", "mixed"])
def test_fashion_mnist_from_files_makes_no_request(files, no_requests, unpacked):
    for name in unpacked:
        unpack(files, name)
    before = {path.name: path.stat().st_mtime_ns for path in files.iterdir()}
    fashion = load("fashion-mnist")
    assert {path.name: path.stat().st_mtime_ns for path in files.iterdir()} == before  # nothing is written there
    assert fashion.x.shape == (60, 1, 28, 28) and fashion.x.dtype == torch.float32 and fashion.x.is_contiguous()
    assert fashion.y.dtype == np.int64
    assert fashion.num_classes == 10 and fashion.classes[0] == "T-shirt/top" and fashion.classes[9] == "Ankle boot"
    # Train first, then test; pixel p is (p/255 - 0.5)/0.5 = 2p/255 - 1.
    assert fashion.y.tolist() == [i % 10 for i in (*range(40), *range(20))]
    first = 2 * np.array([*range(40), *range(100, 120)]) / 255 - 1
    np.testing.assert_allclose(fashion.x[:, 0, 0, 0].numpy(), first, atol=1e-6)
    assert (fashion.x[:, 0, 27, 27] == 1).all() and (fashion.x[:, 0, 13] == -1).all()


def test_read_only_folder_is_enough(files, no_requests):
    files.chmod(0o500)
    try:
        assert len(load("fashion-mnist").y) == 60
    finally:
        files.chmod(0o700)


def test_gz_is_not_read_where_the_unpacked_file_is(files, no_requests):
    for name in NAMES:
        unpack(files, name)
        (files / f"{name}.gz").write_bytes(b"not read")
    assert len(load("fashion-mnist").y) == 60


def test_missing_files_without_a_network(tmp_path, no_network):
    raw = tmp_path / "FashionMNIST" / "raw"
    text = message(FileNotFoundError, load, "fashion-mnist", root=tmp_path)
    assert all(word in text for word in (str(raw), *NAMES, ".gz", "PFLKIT_DATA", "Network is unreachable"))
    assert list(raw.iterdir()) == []


def test_download_false_makes_no_request_and_names_what_is_missing(files, no_requests):
    (files / f"{NAMES[2]}.gz").unlink()
    text = message(FileNotFoundError, load, "fashion-mnist", download=False)
    assert str(files) in text and "download=False" in text
    assert [name in text for name in NAMES] == [False, False, True, False]


def test_only_missing_files_are_downloaded(files, monkeypatch, no_requests, capsys):
    packed = {f"{name}.gz": (files / f"{name}.gz").read_bytes() for name in NAMES}
    (files / f"{NAMES[3]}.gz").unlink()
    asked = []

    def download_url(url, root, filename, md5):
        asked.append((url.rpartition("/")[2], filename, md5))
        Path(root, filename).write_bytes(packed[filename])

    monkeypatch.setattr(torchvision.datasets.utils, "download_url", download_url)
    assert len(load("fashion-mnist").y) == 60
    # The md5 of the official file, as torchvision lists it.
    assert asked == [(f"{NAMES[3]}.gz", f"{NAMES[3]}.gz", "bb300cfdad3c16e7a12a480ee83cd310")]
    assert {path.name for path in files.iterdir()} == set(packed)
    assert capsys.readouterr().out.count("\n") == 1


def test_broken_download_leaves_nothing_behind(tmp_path, monkeypatch):
    def download_url(url, root, filename, md5):
        Path(root, filename).write_bytes(b"half of it")
        raise RuntimeError("File not found or corrupted.\n")

    monkeypatch.setattr(torchvision.datasets.utils, "download_url", download_url)
    assert "File not found or corrupted." in message(FileNotFoundError, load, "fashion-mnist", root=tmp_path)
    assert list((tmp_path / "FashionMNIST" / "raw").iterdir()) == []


def gz(change):
    """Damage to the archive itself."""
    return lambda raw, name: (raw / f"{name}.gz").write_bytes(change((raw / f"{name}.gz").read_bytes()))


def content(change, packed=True):
    """Damage to what the file holds, in an intact archive or unpacked."""

    def damage(raw, name):
        path = unpack(raw, name)
        path.write_bytes(change(path.read_bytes()))
        if packed:
            (raw / f"{name}.gz").write_bytes(gzip.compress(path.read_bytes()))
            path.unlink()

    return damage


IMAGES, LABELS = NAMES[0], NAMES[3]


@pytest.mark.parametrize("complete", [True, False], ids=["complete", "partial"])
@pytest.mark.parametrize(
    ("name", "damage", "why"),
    [
        (IMAGES, gz(lambda b: b[: len(b) // 2]), "broken gzip"),
        (IMAGES, gz(lambda b: b[:-6]), "broken gzip"),
        (LABELS, gz(lambda b: b[:-8] + bytes(4) + b[-4:]), "broken gzip"),  # wrong checksum
        (LABELS, gz(lambda b: b[:12] + b"\xff" * 12 + b[24:]), "broken gzip"),
        (LABELS, gz(lambda b: b"<html>404</html>"), "broken gzip"),
        (LABELS, gz(lambda b: b""), "idx header"),
        (IMAGES, content(lambda b: b[:-1], packed=False), f"holds {40 * 784 + 15} bytes of {40 * 784 + 16}"),
        (IMAGES, content(lambda b: b[:7], packed=False), "idx header"),
        (LABELS, content(lambda b: b"", packed=False), "idx header"),
        (LABELS, content(lambda b: b[:8]), "holds 8 bytes of 28"),
        (IMAGES, content(lambda b: b + b"\0"), f"more than {40 * 784 + 16} bytes"),
        (IMAGES, content(lambda b: b"\0\0\x0d\x03" + b[4:]), "idx header of uint8 (40, 28, 28)"),
        (IMAGES, content(lambda b: b[:7] + bytes([41]) + b[8:]), "idx header of uint8 (40, 28, 28)"),
        (LABELS, content(lambda b: b[:-1] + b"\x0a"), "label 10 is not in 0..9"),
        (LABELS, content(lambda b: b[:-1] + b"\xff", packed=False), "label 255 is not in 0..9"),
    ],
)
def test_corrupt_file_is_named_and_neither_used_nor_replaced(files, no_requests, name, damage, why, complete):
    damage(files, name)
    if not complete:
        (files / f"{NAMES[1]}.gz").unlink()  # another one is missing: that is no leave to download
    before = {path: path.read_bytes() for path in files.iterdir()}
    text = message(ValueError, load, "fashion-mnist")
    path = next(path for path in before if path.name in (name, f"{name}.gz"))
    assert text.startswith(f"{path} is corrupt: ") and why in text and "delete it" in text
    assert f"corrupt: {path.name} in {files}; " in inventory.FOUND["fashion-mnist"](None)
    assert {path: path.read_bytes() for path in files.iterdir()} == before


@pytest.mark.data
def test_real_fashion_mnist(no_requests):
    if not os.environ.get("PFLKIT_DATA") or not (data_root() / "FashionMNIST" / "raw").is_dir():
        pytest.skip("PFLKIT_DATA names no folder with FashionMNIST/raw")
    fashion = load("fashion-mnist", download=False)
    assert fashion.x.shape == (70_000, 1, 28, 28)
    assert np.bincount(fashion.y[:60_000]).tolist() == [6000] * 10
    assert np.bincount(fashion.y[60_000:]).tolist() == [1000] * 10
    assert (fashion.x.min(), fashion.x.max()) == (-1, 1)
    # The training pixels' mean and standard deviation on [0, 1], 0.2860 and 0.3530, as widely published.
    pixels = (fashion.x[:60_000].double() + 1) / 2
    assert (pixels.mean().item(), pixels.std().item()) == pytest.approx((0.2860, 0.3530), abs=1e-4)


# --- MNIST -----------------------------------------------------------------------------------------------------------


def test_mnist_lies_in_its_own_folder(files, tmp_path, no_requests):
    assert str(tmp_path / "MNIST" / "raw") in message(FileNotFoundError, load, "mnist", download=False)
    shutil.copytree(files, tmp_path / "MNIST" / "raw")
    mnist = load("mnist")
    assert (mnist.name, mnist.shape, len(mnist.y), mnist.classes[3]) == ("mnist", (1, 28, 28), 60, "3 - three")
    assert torch.equal(mnist.x, load("fashion-mnist").x)


def real(name, folder):
    """A real data set, or a test skipped for want of it."""
    if not os.environ.get("PFLKIT_DATA") or not (data_root() / folder).is_dir():
        pytest.skip(f"PFLKIT_DATA names no folder with {folder}")
    return load(name, download=False)


@pytest.mark.data
def test_real_mnist(no_requests):
    mnist = real("mnist", "MNIST/raw")
    assert mnist.x.shape == (70_000, 1, 28, 28)
    assert mnist.y[:8].tolist() == [5, 0, 4, 1, 9, 2, 1, 3]
    # Digits of each kind in the training part, and the pixels' mean and deviation there, as widely published.
    assert np.bincount(mnist.y[:60_000]).tolist() == [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949]
    pixels = (mnist.x[:60_000].double() + 1) / 2
    assert (pixels.mean().item(), pixels.std().item()) == pytest.approx((0.1307, 0.3081), abs=1e-4)


# --- CIFAR -----------------------------------------------------------------------------------------------------------


def batch(first, labels, key):
    """A CIFAR batch as its site describes it: a row has 1,024 red values, 1,024 green, 1,024 blue, row by row."""
    rows = np.zeros((len(labels), 3072), np.uint8)
    rows[:, 0] = first + np.arange(len(labels))  # an image is known by the red of its first pixel
    rows[:, 1024 + 1] = 51  # green, first row, second column
    rows[:, 2048 + 32] = 102  # blue, second row, first column
    return pickle.dumps({"data": rows, key: labels}, protocol=2)


@pytest.fixture(params=[CIFAR10, CIFAR100], ids=["cifar10", "cifar100"])
def cifar(request, tmp_path, monkeypatch):
    """cifar(): a folder of small batches under PFLKIT_DATA, in the official format, whose md5 torchvision is told."""
    source, ten = request.param, request.param is CIFAR10
    key, last = ("labels", 9) if ten else ("fine_labels", 99)
    content = {name: batch(10 * i, [i, last], key) for i, (name, _) in enumerate(source.train_list)}
    content[source.test_list[0][0]] = batch(200, [1, 0, 2], key)
    content[source.meta["filename"]] = pickle.dumps({source.meta["key"]: [f"c{k}" for k in range(last + 1)]}, 2)
    monkeypatch.setenv("PFLKIT_DATA", str(tmp_path))
    monkeypatch.setattr(images, "CIFAR_SIZES", (2 * len(source.train_list), 3))

    def write(**changed):
        folder = tmp_path / source.base_folder
        folder.mkdir()
        for name, value in (content | changed).items():
            (folder / name).write_bytes(value)

        def md5(name):
            return hashlib.md5((folder / name).read_bytes()).hexdigest()

        for part in ("train_list", "test_list"):
            monkeypatch.setattr(source, part, [[name, md5(name)] for name, _ in getattr(source, part)])
        monkeypatch.setattr(source, "meta", source.meta | {"md5": md5(source.meta["filename"])})
        return folder

    write.name, write.source, write.key = "cifar10" if ten else "cifar100", source, key
    return write


def test_cifar_from_files_makes_no_request(cifar, no_requests):
    folder = cifar()
    before = {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}
    loaded = load(cifar.name)
    assert {path.name: path.stat().st_mtime_ns for path in folder.iterdir()} == before
    parts = len(cifar.source.train_list)
    assert loaded.x.shape == (2 * parts + 3, 3, 32, 32) and loaded.x.dtype == torch.float32 and loaded.x.is_contiguous()
    last = len(loaded.classes) - 1
    assert (loaded.classes[0], loaded.classes[-1]) == ("c0", f"c{last}") and last in (9, 99)
    assert loaded.y.dtype == np.int64
    assert loaded.y.tolist() == [label for i in range(parts) for label in (i, last)] + [1, 0, 2]
    firsts = [10 * i + j for i in range(parts) for j in (0, 1)] + [200, 201, 202]
    np.testing.assert_allclose(loaded.x[:, 0, 0, 0].numpy(), 2 * np.array(firsts) / 255 - 1, atol=1e-6)
    np.testing.assert_allclose(loaded.x[:, 1, 0, 1].numpy(), -0.6, atol=1e-6)  # 51/255 = 0.2
    np.testing.assert_allclose(loaded.x[:, 2, 1, 0].numpy(), -0.2, atol=1e-6)  # 102/255 = 0.4
    assert (loaded.x[:, 1:, 0, 0] == -1).all() and (loaded.x[:, 0, 1:] == -1).all()


def test_cifar_missing_files(cifar, no_network, tmp_path):
    names = [name for name, _ in cifar.source.train_list + cifar.source.test_list]
    empty = tmp_path / "empty"
    for options, why in (({}, "Network is unreachable"), ({"download": False}, "download=False")):
        text = message(FileNotFoundError, load, cifar.name, root=empty, **options)
        assert text.startswith(f"{empty / cifar.source.base_folder} lacks {', '.join(names)}, ") and why in text
        assert not empty.exists() or list(empty.iterdir()) == []


def test_cifar_downloads_only_what_is_missing(cifar, monkeypatch, no_requests, tmp_path):
    folder = cifar()
    before = {path.name: (path.stat().st_ino, path.read_bytes()) for path in folder.iterdir()}
    gone = cifar.source.test_list[0][0]
    (folder / gone).unlink()

    def download_and_extract_archive(url, root, filename, md5):
        assert (url, md5) == (cifar.source.url, cifar.source.tgz_md5)
        Path(root, folder.name).mkdir()
        for name, (_, content) in before.items():
            Path(root, folder.name, name).write_bytes(content)

    monkeypatch.setattr(torchvision.datasets.cifar, "download_and_extract_archive", download_and_extract_archive)
    assert load(cifar.name).y[-3:].tolist() == [1, 0, 2]
    after = {path.name: (path.stat().st_ino, path.read_bytes()) for path in folder.iterdir()}
    assert after.keys() == before.keys() and all(after[name] == before[name] for name in before if name != gone)
    assert list(tmp_path.iterdir()) == [folder]


@pytest.mark.parametrize("complete", [True, False], ids=["complete", "partial"])
@pytest.mark.parametrize("damage", [lambda b: b[:-1], lambda b: b"", lambda b: pickle.dumps(Armed())])
def test_corrupt_cifar_is_named_and_neither_unpickled_nor_replaced(cifar, monkeypatch, no_requests, damage, complete):
    folder = cifar()
    monkeypatch.chdir(folder.parent)
    name = cifar.source.train_list[0][0]
    (folder / name).write_bytes(damage((folder / name).read_bytes()))
    if not complete:
        (folder / cifar.source.test_list[0][0]).unlink()
    before = {path: path.read_bytes() for path in folder.iterdir()}
    text = message(ValueError, load, cifar.name)
    assert text.startswith(f"{folder}: corrupt (md5) {name}; ") and "delete" in text
    assert f"corrupt: {name} in {folder}; " in inventory.FOUND[cifar.name](None)
    assert {path: path.read_bytes() for path in folder.iterdir()} == before
    assert not Path("fired").exists()


@pytest.mark.parametrize("labels", [[1, 0, 100], [1, 0, -1], [1, 0]])
def test_cifar_content_is_looked_at(cifar, labels, no_requests):
    folder = cifar(**{cifar.source.test_list[0][0]: batch(0, labels, cifar.key)})
    assert message(ValueError, load, cifar.name).startswith(f"{folder} must hold ")


@pytest.mark.data
@pytest.mark.parametrize(
    ("name", "folder", "classes"), [("cifar10", "cifar-10-batches-py", 10), ("cifar100", "cifar-100-python", 100)]
)
def test_real_cifar(no_requests, name, folder, classes):
    loaded = real(name, folder)
    assert loaded.x.shape == (60_000, 3, 32, 32)
    assert np.bincount(loaded.y[:50_000]).tolist() == [50_000 // classes] * classes
    assert np.bincount(loaded.y[50_000:]).tolist() == [10_000 // classes] * classes
    if name == "cifar10":  # the training pixels' means, red, green, blue, as widely published
        means = (loaded.x[:50_000].mean((0, 2, 3), dtype=torch.float64) + 1) / 2
        assert means.tolist() == pytest.approx([0.4914, 0.4822, 0.4465], abs=1e-4)


# --- Tiny-ImageNet ---------------------------------------------------------------------------------------------------

TINY_COLOURS = {"n09": (255, 0, 0), "n01": (0, 255, 0), "n05": (0, 0, 255)}  # in wnids.txt's order


def jpeg(colour, size=(64, 64)):
    """A JPEG of one colour; of one number, a grey one."""
    file = io.BytesIO()
    Image.new("L" if isinstance(colour, int) else "RGB", size, colour).save(file, "JPEG", quality=95)
    return file.getvalue()


def tiny_files():
    """Three classes, two training images and a validation image each, in the official layout: {path: bytes}."""
    files = {"wnids.txt": b"n09\nn01\nn05\n", "words.txt": b"n01\tgoldfish, Carassius auratus\nn02\tx\nn05\tcrane\n"}
    for wnid, colour in TINY_COLOURS.items():
        files |= {f"train/{wnid}/images/{wnid}_{i}.JPEG": jpeg(colour) for i in (0, 1)}
    files |= {f"val/images/val_{i}.JPEG": jpeg(colour) for i, colour in enumerate(TINY_COLOURS.values())}
    lines = [f"val_{i}.JPEG\t{wnid}\t0\t0\t63\t63\n" for i, wnid in reversed([*enumerate(TINY_COLOURS)])]
    return files | {"val/val_annotations.txt": "".join(lines).encode()}


@pytest.fixture
def tiny(tmp_path, monkeypatch):
    """The folder of a small Tiny-ImageNet under PFLKIT_DATA."""
    monkeypatch.setenv("PFLKIT_DATA", str(tmp_path))
    folder = tmp_path / "tiny-imagenet-200"
    for name, content in tiny_files().items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    return folder


def test_tiny_imagenet_from_files_makes_no_request(tiny, no_requests):
    (tiny / "train/n01/images/n01_1.JPEG").write_bytes(jpeg(102))  # a grey one, 102/255 = 0.4
    loaded = load("tiny-imagenet")
    assert loaded.x.shape == (9, 3, 64, 64) and loaded.x.dtype == torch.float32 and loaded.x.is_contiguous()
    assert loaded.classes == ("n09", "goldfish", "crane")
    assert loaded.y.dtype == np.int64 and loaded.y.tolist() == [0, 0, 1, 1, 2, 2, 2, 1, 0]
    for i, k in enumerate(loaded.y):
        expected = [-0.2] * 3 if i == 3 else [1 if channel == k else -1 for channel in range(3)]
        np.testing.assert_allclose(loaded.x[i].mean((1, 2)).numpy(), expected, atol=0.03)


def test_tiny_imagenet_of_some_classes(tiny, no_requests):
    shutil.rmtree(tiny / "train/n01")
    (tiny / "words.txt").unlink()
    (tiny / "wnids.txt").write_text("n09\nn05\n")  # whether it has more than is there or not
    loaded = load("tiny-imagenet")
    assert loaded.classes == ("n09", "n05") and loaded.y.tolist() == [0, 0, 1, 1, 1, 0]


@pytest.mark.parametrize(
    ("name", "content", "why"),
    [
        ("train/n05/images/n05_1.JPEG", jpeg((9, 9, 9))[:-20], "truncated"),
        ("train/n05/images/n05_1.JPEG", b"", "no intact JPEG"),
        ("train/n05/images/n05_1.JPEG", b"<html>404</html>", "no intact JPEG"),
        ("train/n05/images/n05_1.JPEG", jpeg(9, (64, 63)), "64 x 63 pixels"),
        ("val/val_annotations.txt", b"val_0.JPEG\tn09\nval_1.JPEG\n", "line 2 must be"),
        ("val/val_annotations.txt", b"val_0.JPEG\tn09\nval_1.JPEG\t n05\n", "line 2 must be"),
        ("val/val_annotations.txt", b"val_0.JPEG\tn09\nval_0.JPEG\tn05\n", "line 2 must be"),
        ("val/val_annotations.txt", b"../../train/n01/images/n01_0.JPEG\tn09\n", "line 1 must be"),
        ("val/val_annotations.txt", b"val_0.JPEG\tn09\n", "names no image of n01: it is cut short"),
        ("val/val_annotations.txt", b"", "names no image of n01: it is cut short"),
    ],
)
def test_tiny_imagenet_that_is_broken(tiny, no_requests, name, content, why):
    (tiny / name).write_bytes(content)
    text = message(ValueError, load, "tiny-imagenet")
    assert text.startswith(str(tiny / name)) and why in text
    listed = inventory.FOUND["tiny-imagenet"](None)
    assert listed == f"unusable: {text}" or (name.endswith(".JPEG") and "(counted, not decoded)" in listed)


def test_tiny_imagenet_that_lacks_something_is_not_downloaded(tiny, no_requests):
    (tiny / "val/images/val_2.JPEG").rename(tiny / "val/images/kept")
    assert f"{tiny}/val/images lacks 1 images" in message(FileNotFoundError, load, "tiny-imagenet")
    (tiny / "val/images/kept").rename(tiny / "val/images/val_2.JPEG")
    for path in (tiny / "train/n05/images").iterdir():
        path.unlink()
    assert f"{tiny}/train/n05/images holds no .JPEG" in message(ValueError, load, "tiny-imagenet")
    shutil.rmtree(tiny / "train/n05")
    shutil.rmtree(tiny / "train/n01")
    assert f"{tiny}/train holds folders of 1 classes" in message(ValueError, load, "tiny-imagenet")
    (tiny / "val/val_annotations.txt").unlink()
    (tiny / "wnids.txt").unlink()
    text = message(FileNotFoundError, load, "tiny-imagenet")
    assert text.startswith(f"{tiny} lacks wnids.txt, val/val_annotations.txt; ")


def test_missing_tiny_imagenet(tmp_path, no_network):
    for options, why in (({}, "Network is unreachable"), ({"download": False}, "download=False")):
        text = message(FileNotFoundError, load, "tiny-imagenet", root=tmp_path, **options)
        assert text.startswith(f"{tmp_path} lacks tiny-imagenet-200 (") and why in text
        assert list(tmp_path.iterdir()) == []


def archive(*members):
    """A zip of (name or ZipInfo, bytes)."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as opened:
        for name, content in members:
            opened.writestr(name, content)
    return file.getvalue()


GOOD = [(f"tiny-imagenet-200/{name}", content) for name, content in tiny_files().items()]


@pytest.fixture
def served(monkeypatch):
    """served(body): a server on this machine's own address has it, and Tiny-ImageNet is looked for there.

    together: no request is answered before so many have come.
    """
    servers = []

    def start(body, status=200, md5=None, length=None, together=1):
        come = threading.Barrier(together, timeout=60)

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                come.wait()
                self.send_response(status)
                self.send_header("Content-Length", str(len(body) if length is None else length))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *args):
                pass

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        servers.append((server, threading.Thread(target=server.serve_forever, args=(0.01,))))
        servers[-1][1].start()
        monkeypatch.setattr(images, "TINY_URL", f"http://127.0.0.1:{server.server_port}/tiny.zip")
        monkeypatch.setattr(images, "TINY_MD5", md5 or hashlib.md5(body).hexdigest())

    yield start
    for server, thread in servers:
        server.shutdown()
        thread.join()
        server.server_close()


def test_tiny_imagenet_is_downloaded_once(served, tmp_path, capsys):
    served(archive(*GOOD, ("tiny-imagenet-200/filler", os.urandom(2_000_000))))
    root = tmp_path / "new" / "root"
    loaded = load("tiny-imagenet", root=root)
    assert loaded.y.tolist() == [0, 0, 1, 1, 2, 2, 2, 1, 0]
    assert [path.name for path in root.iterdir()] == ["tiny-imagenet-200"]
    out, progress = capsys.readouterr()
    said = f"{root}/tiny-imagenet-200 holds 9 images of 3 classes, officially 1,650\n"
    assert out.count("\n") == 2 and str(root) in out and out.endswith(said)
    assert 9 <= progress.count("\n") <= 10 and progress.endswith(": 2 of 2 MB\n")
    served(b"", status=404)
    assert load("tiny-imagenet", root=root).fingerprint == loaded.fingerprint


def link(name, target):
    info = zipfile.ZipInfo(name)
    info.create_system, info.external_attr = 3, 0o120777 << 16
    return info, target


@pytest.mark.parametrize(
    ("body", "options", "why"),
    [
        (archive(*GOOD), {"md5": "0" * 32}, "not 00000000"),
        (archive(*GOOD)[:-9], {"length": len(archive(*GOOD)), "md5": "0" * 32}, "not 00000000"),
        (archive(*GOOD), {"status": 404}, "404"),
        (b"<html>moved</html>", {}, "not a zip file"),
        (archive(*GOOD)[:-100], {}, "not a zip file"),
        (archive(*GOOD).replace(b"goldfish", b"goldfisk"), {}, "Bad CRC-32"),
        (archive(*GOOD, ("../evil", b"")), {}, "'../evil'"),
        (archive(*GOOD, ("tiny-imagenet-200/../../evil", b"")), {}, "evil'"),
        (archive(*GOOD, ("/evil", b"")), {}, "'/evil'"),
        (archive(*GOOD, ("tiny-imagenet-200/..\\evil", b"")), {}, "evil'"),
        (archive(*GOOD, ("evil", b"")), {}, "'evil'"),
        (archive(link("tiny-imagenet-200/evil", "/etc"), *GOOD), {}, "'tiny-imagenet-200/evil'"),
        (archive(), {}, "No such file"),
    ],
    ids=["md5", "cut", "404", "html", "truncated", "crc", "..", "inner ..", "/", "\\", "outside", "link", "empty"],
)
def test_tiny_imagenet_download_that_fails_leaves_nothing_behind(served, tmp_path, body, options, why):
    root = tmp_path / "a" / "root"
    served(body, **options)
    text = message(FileNotFoundError, load, "tiny-imagenet", root=root)
    assert text.startswith(f"{root} lacks tiny-imagenet-200 (download failed, ") and why in text
    assert [path for path in tmp_path.rglob("*") if path.name not in ("a", "root")] == []


@pytest.mark.parametrize("whole", [True, False], ids=["whole", "cut"])
def test_two_processes_download_tiny_imagenet_at_once(served, tmp_path, whole):
    """Each has the other's download beside its own; one puts the folder in place, and both read it."""
    body = archive(*GOOD, ("tiny-imagenet-200/filler", os.urandom(2_000_000)))
    served(body if whole else body[:-9], md5=hashlib.md5(body).hexdigest(), together=2)
    code = """
import sys
from pflkit import data, images
images.TINY_URL, images.TINY_MD5, root = sys.argv[1:]
try:
    print(data.load("tiny-imagenet", root=root).y.tolist())
except FileNotFoundError as error:
    print(error)
"""
    command = [sys.executable, "-W", "error", "-c", code, images.TINY_URL, images.TINY_MD5, str(tmp_path)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    both = [subprocess.Popen(command, env=os.environ | {"OMP_NUM_THREADS": "1"}, **pipes) for _ in range(2)]
    try:
        printed = [process.communicate(timeout=120) for process in both]
    finally:
        for process in both:
            process.kill()
    assert [process.returncode for process in both] == [0, 0], printed
    for out, _ in printed:
        first, *_, last = out.splitlines()
        assert first == f"downloading {images.TINY_URL} into {tmp_path}"
        if whole:
            assert last == "[0, 0, 1, 1, 2, 2, 2, 1, 0]"
        else:
            assert last.startswith(f"{tmp_path} lacks tiny-imagenet-200 (download failed, {len(body) - 9} bytes came")
            assert out.count("\n") == 2
    assert [path.name for path in tmp_path.iterdir()] == ["tiny-imagenet-200"] * whole
    if whole:
        there = {str(p.relative_to(tmp_path / "tiny-imagenet-200")) for p in tmp_path.rglob("*") if p.is_file()}
        assert there == {*tiny_files(), "filler"}


@pytest.mark.data
def test_real_tiny_imagenet(no_requests):
    tiny = real("tiny-imagenet", "tiny-imagenet-200")
    assert tiny.shape == (3, 64, 64) and tiny.num_classes == len(np.unique(tiny.y)) <= 200
    assert "goldfish" in tiny.classes and len(np.unique(np.bincount(tiny.y))) == 1


# --- .npz ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def npz(tmp_path):
    """npz(x=..., y=...): the path of an .npz file with these arrays, missing ones filled in with good ones."""

    def write(**arrays):
        np.savez(tmp_path / "mine.npz", **({"x": np.zeros((4, 2)), "y": np.array([0, 1, 0, 1])} | arrays))
        return tmp_path / "mine.npz"

    return write


@pytest.mark.parametrize("channels", [1, 3, 4])
def test_npz_uint8_images_channel_last(npz, channels):
    pixels = np.arange(4 * 5 * 6 * channels, dtype=np.uint8).reshape(4, 5, 6, channels)
    mine = load(npz(x=pixels))
    assert (mine.name, mine.shape) == ("mine.npz", (channels, 5, 6))
    assert mine.x.dtype == torch.float32 and mine.x.is_contiguous()
    expected = 2 * (pixels.transpose(0, 3, 1, 2) / 255) - 1
    np.testing.assert_allclose(mine.x.numpy(), expected, atol=1e-6)


def test_npz_uint8_grey_images(npz):
    pixels = np.array([0, 51, 255, 102], np.uint8).reshape(4, 1, 1)  # 51/255 = 0.2 and 102/255 = 0.4
    mine = load(str(npz(x=pixels)))
    assert mine.x.shape == (4, 1, 1, 1)
    assert mine.x.flatten().tolist() == pytest.approx([-1, -0.6, 1, -0.2])


@pytest.mark.parametrize("dtype", ["f2", "<f4", ">f4", "f8"])
@pytest.mark.parametrize("shape", [(4, 7), (4, 3, 5, 6), (4, 5, 6), (4, 2, 3, 4, 5)])
def test_npz_floats_are_taken_as_they_are(npz, dtype, shape):
    values = np.asfortranarray(np.arange(np.prod(shape)).reshape(shape) * 0.25 - 3, dtype=dtype)
    mine = load(npz(x=values))
    assert mine.shape == ((1, 5, 6) if shape == (4, 5, 6) else shape[1:])
    assert mine.x.dtype == torch.float32 and mine.x.is_contiguous()
    np.testing.assert_array_equal(mine.x.numpy().reshape(shape), values)


@pytest.mark.parametrize(
    ("labels", "classes"),
    [
        (np.array([9, 3, 7, 3]), (3, 7, 9)),
        (np.array([9, 3, 7, 3], np.uint8), (3, 7, 9)),
        (np.array([9, 3, 7, 3], ">u8"), (3, 7, 9)),
        (np.array([2.0, -1.0, 0.0, -1.0], np.float16), (-1, 0, 2)),
        (np.array(["zebra", "ant", "ärmel", "ant"])[[2, 1, 0, 1]], ("ant", "zebra", "ärmel")),
        (np.array([b"cat", b"ant", b"bee", b"ant"]), ("ant", "bee", "cat")),
    ],
    ids=["gaps", "uint8", "big-endian", "whole floats", "strings", "bytes"],
)
def test_npz_labels_become_0_to_k_and_the_map_is_kept(npz, labels, classes):
    mine = load(npz(y=labels))
    assert mine.y.dtype == np.int64
    assert mine.classes == classes and mine.num_classes == len(classes)
    assert all(type(label) in (int, str) for label in mine.classes)
    back = [mine.classes[k] for k in mine.y]
    assert back == [label.decode() if isinstance(label, bytes) else label for label in labels.tolist()]


def test_npz_path_may_start_in_the_home_folder(npz, monkeypatch, tmp_path):
    npz()
    monkeypatch.setenv("HOME", str(tmp_path))
    assert load("~/mine.npz").name == "mine.npz"


X = np.zeros((4, 2))


@pytest.mark.parametrize(
    ("arrays", "why"),
    [
        ({"x": np.where(np.eye(4, 2) > 0, np.nan, 0)}, "x holds NaN or infinity (as float32) in 2 of 4 samples"),
        ({"x": X - np.inf}, "x holds NaN or infinity (as float32) in 4 of 4 samples"),
        ({"x": X + 1e39}, "x holds NaN or infinity (as float32) in 4 of 4 samples"),
        ({"x": X[:0], "y": np.array([], int)}, "x must hold samples [n, ...], not an array of shape (0, 2)"),
        ({"x": X[:, :0]}, "x must hold samples [n, ...], not an array of shape (4, 0)"),
        ({"x": X[:, 0]}, "x must hold samples [n, ...], not an array of shape (4,)"),
        ({"x": X[:3]}, "x holds 3 samples, y 4 labels"),
        ({"x": X.astype(int)}, "x must be uint8 images or floats, not int64"),
        ({"x": np.ones((4, 9), np.int16)}, "not int16; images as x.astype(np.uint8), word numbers by data.Dataset"),
        ({"x": np.ones((4, 9), np.uint8)}, "uint8 x must be images [n, H, W] or [n, H, W, C] with C 1, 3 or 4, not"),
        ({"x": X.astype(bool)}, "x must be uint8 images or floats, not bool"),
        ({"x": X.astype(complex)}, "x must be uint8 images or floats, not complex128"),
        ({"x": X.astype(str)}, "x must be uint8 images or floats, not <U32"),
        ({"x": np.zeros((4, 2), np.uint8)}, "uint8 x must be images [n, H, W] or [n, H, W, C] with C 1, 3 or 4, not"),
        ({"x": np.zeros((4, 3, 8, 8), np.uint8)}, "with C 1, 3 or 4, not (4, 3, 8, 8)"),
        ({"x": X.astype(object)}, "no objects"),
        ({"y": np.array([0, "a", 0, 1], object)}, "no objects"),
        ({"y": np.eye(4)}, "y must hold one label a sample, [n], not an array of shape (4, 4)"),
        ({"y": np.zeros((4, 1), int)}, "y must hold one label a sample, [n], not an array of shape (4, 1)"),
        ({"y": np.array(1)}, "y must hold one label a sample, [n], not an array of shape ()"),
        ({"y": np.array([0, 1, 0.5, 1])}, "y must hold whole numbers, not [0.5]"),
        ({"y": np.array([0, 1, np.nan, 1])}, "y must hold whole numbers, not [nan]"),
        ({"y": np.array([0, 1, np.inf, 1])}, "y must hold whole numbers, not [inf]"),
        ({"y": np.array([0, 1, 1e300, 1])}, "y must hold whole numbers, not [1e+300]"),
        ({"y": np.array([0, 1, 2, 3], complex)}, "y must hold integers or strings, not complex128"),
        ({"y": np.array(["2020", "2021"] * 2, "M8[Y]")}, "y must hold integers or strings, not datetime64[Y]"),
        ({"y": np.full(4, 7)}, "y holds one class, [7]; at least 2 are needed"),
    ],
)
def test_npz_content_that_does_not_fit(npz, arrays, why):
    path = npz(**arrays)
    text = message(ValueError, load, path)
    assert text.startswith(f"{path}") and why in text


@pytest.mark.parametrize("key", ["x", "y"])
def test_npz_without_x_or_y(tmp_path, key):
    np.savez(tmp_path / "mine.npz", **{key: np.zeros((4, 2))})
    path, rule, missing = message(ValueError, load, tmp_path / "mine.npz").partition(
        " is no .npz file of plain arrays x and y"
    )
    assert path == str(tmp_path / "mine.npz") and rule and f"{'y' if key == 'x' else 'x'} is not a file" in missing


class Armed:
    """An object whose unpickling would be noticed."""

    def __reduce__(self):
        return os.mkdir, ("fired",)


def zipped(**members):
    def write(path):
        with zipfile.ZipFile(path, "w") as file:
            for name, content in members.items():
                file.writestr(name, content)

    return write


@pytest.mark.parametrize(
    "write",
    [
        lambda path: path.write_bytes(b""),
        lambda path: path.write_bytes(b"x,y\n1,2\n"),
        lambda path: path.write_bytes(pickle.dumps(Armed())),
        lambda path: np.savez(path, x=np.array([Armed()] * 4), y=np.arange(4)),
        lambda path: np.save(path.with_suffix(".npy"), np.zeros((4, 2))) or path.with_suffix(".npy").replace(path),
        lambda path: path.write_bytes(path.read_bytes()[:-30]),
        lambda path: path.write_bytes(path.read_bytes().replace(b"NUMPY", b"DUMPY")),
        zipped(x=b"raw bytes", y=b"raw bytes"),
    ],
    ids=["empty", "text", "pickle", "pickled x", "npy", "truncated", "checksum", "no arrays"],
)
def test_npz_that_is_none(npz, tmp_path, monkeypatch, write):
    monkeypatch.chdir(tmp_path)
    path = npz()
    write(path)
    assert str(path) in message(ValueError, load, path)
    assert not Path("fired").exists()


def test_npz_that_does_not_exist(tmp_path):
    with pytest.raises(FileNotFoundError, match=re.escape(str(tmp_path / "none.npz"))):
        load(tmp_path / "none.npz")


# --- a part of a data set, and CIFAR converted ------------------------------------------------------------------------


def test_some_samples_of_a_data_set():
    digits = load("digits")
    some = digits.some(100, seed=3)
    assert len(some.y) == len(some.x) == 100 and some.classes == digits.classes and some.settings == {"samples": 100}
    rows = [int((digits.x == x).flatten(1).all(1).nonzero()[0]) for x in some.x]  # no two digits are the same image
    assert rows == sorted(set(rows)) and digits.y[rows].tolist() == some.y.tolist()
    assert some.fingerprint == digits.some(100, seed=3).fingerprint != digits.some(100, seed=4).fingerprint
    assert digits.some(1797).fingerprint == digits.fingerprint
    for samples in (0, 1798, 2.5):
        assert "samples=" in message(ValueError, digits.some, samples)


def test_cifar_from_a_converted_file(tmp_path, no_requests, capsys):
    """It stands in for the official folder where that is missing, and says how much it holds."""
    pixels = np.random.default_rng(0).integers(0, 256, (100, 32, 32, 3), dtype=np.uint8)
    np.savez(tmp_path / "cifar100.npz", x=pixels, y=np.arange(100)[::-1])
    loaded = load("cifar100", root=tmp_path)
    assert loaded.name == "cifar100" and torch.equal(loaded.x, data.images(pixels, 255))
    assert loaded.y.tolist() == list(range(100))[::-1]
    assert "holds 100 images, officially 60,000" in capsys.readouterr().out
    assert "converted" in inventory.FOUND["cifar100"](tmp_path)
    np.savez(tmp_path / "cifar10.npz", x=pixels, y=np.arange(100))
    assert "cifar10.npz: must hold images" in message(ValueError, load, "cifar10", root=tmp_path)
    (tmp_path / "cifar-100-python").mkdir()
    assert "lacks" in message(FileNotFoundError, load, "cifar100", root=tmp_path, download=False)
