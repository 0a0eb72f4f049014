"""pflkit.data: what is loaded, where it is looked for, one line for what cannot be used. No test needs a network."""

import gzip
import os
import pickle
import random
import re
import socket
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
import torchvision.datasets.utils

from pflkit import data
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


@pytest.fixture
def no_requests(monkeypatch):
    """Any use of the network fails the test: an AssertionError is not taken for a dead network."""

    def touched(*args, **kwargs):
        raise AssertionError("the network was touched")

    monkeypatch.setattr(socket.socket, "connect", touched)
    monkeypatch.setattr(socket, "getaddrinfo", touched)


@pytest.fixture
def no_network(monkeypatch):
    """A machine without a network."""

    def unreachable(*args, **kwargs):
        raise OSError(101, "Network is unreachable")

    monkeypatch.setattr(socket.socket, "connect", unreachable)
    monkeypatch.setattr(socket, "getaddrinfo", unreachable)


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
    assert text == f"dataset={name!r}: must be one of 'digits', 'fashion-mnist', 'FILE.npz'"


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
