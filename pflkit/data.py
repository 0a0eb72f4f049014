"""Data sets by name, as two arrays in memory: samples x and labels y, train and test parts merged.

    load(a key of LOADERS, as "digits", or "FILE.npz") -> Dataset

The parts are merged (train first, then test) because every partition splits each client's own samples again. Files
that are present are used as they are, and no network is touched then. The only pickles read are CIFAR's own, by
torchvision and once their md5 is right; none is written.
"""

import gzip
import hashlib
import inspect
import math
import os
import zipfile
import zlib
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import torch

from pflkit import checks, text
from pflkit.download import fetch, from_mirror
from pflkit.streams import rng

MNIST_SIZES = {"train": 60_000, "t10k": 10_000}  # images in the two parts of MNIST and its look-alikes


@dataclass(frozen=True, eq=False)
class Dataset:
    """`x` float32 [n, *shape], images [n, C, H, W], or word numbers int64 [n, length]; `y` int64 [n] in 0..K-1;
    `classes`, the K original labels; `settings`, what else was asked of the loader.
    """

    name: str
    x: torch.Tensor
    y: np.ndarray
    classes: tuple
    vocabulary: int | None = None  # of texts: x holds int64 word numbers 0..vocabulary-1, [n, length]
    settings: dict = field(default_factory=dict)

    @property
    def shape(self):
        """The shape of one sample."""
        return tuple(self.x.shape[1:])

    @property
    def num_classes(self):
        return len(self.classes)

    def some(self, samples, seed=0):
        """A data set of so many of these samples, drawn at random, with all classes of this one."""
        rows = rng(checks.integer("seed", seed, 0), "some").permutation(len(self.y))
        rows = np.sort(rows[: checks.integer("samples", samples, 1, len(self.y))])
        settings = self.settings | {"samples": samples}
        return replace(self, x=self.x[torch.from_numpy(rows)], y=self.y[rows], settings=settings)

    @property
    def fingerprint(self):
        """16 hex digits that change with any value of x or y: sha256 over their shapes and bytes."""
        digest = hashlib.sha256(repr((tuple(self.x.shape), self.y.shape)).encode())
        for array in (self.x.cpu().numpy(), self.y):
            digest.update(memoryview(np.ascontiguousarray(array)).cast("B"))
        return digest.hexdigest()[:16]


def load(dataset, root=None, download=True, **settings):
    """A data set by name: a key of LOADERS, or the path of an .npz file that holds x and y (rules: see `_npz`).

    root: folder of the data files, see `data_root`. download=False forbids the network; files that are there are never
    downloaded again. settings: the loader's own; only AG News has any, see `text.ag_news`. ValueError for an unknown
    name or setting or an unusable file, FileNotFoundError for files that are missing and cannot be downloaded; each in
    one line that names it.

    >>> data = load("digits")
    >>> data.shape, data.num_classes, len(data.y)
    ((1, 8, 8), 10, 1797)
    """
    checks.boolean("download", download)
    npz = isinstance(dataset, str | os.PathLike) and Path(dataset).suffix == ".npz"
    defaults = {} if npz else settings_of(dataset)
    for key, value in settings.items():
        if key not in defaults:
            has = ", ".join(defaults) or "none"
            raise ValueError(f"{key}={value!r}: not a setting of data set {str(dataset)!r}, which has {has}")
    if npz:
        path = Path(os.path.expanduser(dataset))
        if not path.is_file():
            raise FileNotFoundError(f"dataset={str(dataset)!r}: no such file")
        return Dataset(path.name, *_npz(path))
    settings = defaults | settings
    return Dataset(dataset, *LOADERS[dataset](root, download, **settings), settings=settings)


def settings_of(dataset):
    """{name: default value} of the settings of a key of LOADERS."""
    loader = LOADERS[checks.choice("dataset", dataset, [*LOADERS, "FILE.npz"])]
    return {name: parameter.default for name, parameter in [*inspect.signature(loader).parameters.items()][2:]}


def data_root(root=None):
    """The folder of data files: `root`, else $PFLKIT_DATA, else pflkit/ in the user's cache. Empty means not given."""
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(os.path.expanduser(root or os.environ.get("PFLKIT_DATA") or Path(cache, "pflkit")))


def images(pixels, top):
    """float32 [n, C, H, W] in [-1, 1] from pixels 0..top, [n, H, W] or [n, H, W, C].

    (pixel / top - 0.5) / 0.5: the papers' "normalised to mean 0.5, standard deviation 0.5" in every channel.
    """
    x = pixels[:, None] if pixels.ndim == 3 else pixels.transpose(0, 3, 1, 2)
    return torch.from_numpy(x.astype(np.float32, order="C")).div_(top).sub_(0.5).div_(0.5)


def _digits(root, download):
    """Scikit-learn's handwritten digits, installed with it: 1,797 grey images 8 x 8, pixels 0..16."""
    from sklearn.datasets import load_digits  # here, because importing scikit-learn takes a second

    digits = load_digits()
    return images(digits.images, 16), digits.target.astype(np.int64), tuple(range(10))


def _fashion_mnist(root, download):
    """70,000 grey images 28 x 28 of clothes; the classes are their English names."""
    from torchvision.datasets import FashionMNIST

    return _mnist_like(FashionMNIST, root, download)


def _mnist(root, download):
    """70,000 grey images 28 x 28 of handwritten digits."""
    from torchvision.datasets import MNIST

    return _mnist_like(MNIST, root, download)


def _cifar10(root, download):
    """60,000 colour images 32 x 32 in 10 classes."""
    from torchvision.datasets import CIFAR10

    return _cifar("cifar10", CIFAR10, root, download)


def _cifar100(root, download):
    """60,000 colour images 32 x 32 in 100 classes, the fine ones."""
    from torchvision.datasets import CIFAR100

    return _cifar("cifar100", CIFAR100, root, download)


def _cifar(name, source, root, download):
    """CIFAR from its official files; or, where their folder is missing, from images converted to <name>.npz."""
    from pflkit.images import CIFAR_SIZES, cifar

    converted = data_root(root) / f"{name}.npz"
    if (converted.parent / source.base_folder).exists() or not converted.is_file():
        return cifar(source, root, download)
    x, y, classes = _npz(converted)
    fits = x.shape[1:] == (3, 32, 32) and len(classes) == int(name.removeprefix("cifar"))
    _need(fits, f"{converted}: must hold images 32 x 32 x 3 of all classes of {name}, not {len(classes)} of {x.shape}")
    if len(y) != (official := sum(CIFAR_SIZES)):
        print(f"{converted} holds {len(y):,} images, officially {official:,}", flush=True)
    return x, y, classes


def _tiny_imagenet(root, download):
    """110,000 colour images 64 x 64 in 200 classes, or what is there of them."""
    from pflkit.images import tiny_imagenet

    return tiny_imagenet(root, download)


def _agnews(root, download, length=200, ngrams=1):
    """127,600 texts in 4 classes, as rows of `length` word numbers."""
    return text.ag_news(data_root(root) / "ag_news_csv", download, length, ngrams)


LOADERS = {  # name: function (root, download, its settings) -> x, y, classes, and of texts the size of the vocabulary
    "digits": _digits,
    "fashion-mnist": _fashion_mnist,
    "mnist": _mnist,
    "cifar10": _cifar10,
    "cifar100": _cifar100,
    "tiny-imagenet": _tiny_imagenet,
    "agnews": _agnews,
}


def _mnist_like(source, root, download):
    """The four idx files of `source` (a torchvision class: its folder, addresses and class names), read or fetched."""
    raw, shapes, paths = idx_files(source, root)
    # What is there is read first: a corrupt file is named, not replaced behind the user's back.
    arrays = {name: read_idx(paths[name], shapes[name]) for name in paths}
    missing = [name for name in shapes if name not in arrays]
    if missing:
        _fetch(source, raw, missing, download)
        arrays |= {name: read_idx(raw / f"{name}.gz", shapes[name]) for name in missing}
    x, y = (np.concatenate([arrays[name] for name in shapes if kind in name]) for kind in ("images", "labels"))
    return images(x, 255), y.astype(np.int64), tuple(source.classes)


def idx_files(source, root):
    """The folder of the idx files of `source`, their shapes by name, and the paths of those there, unpacked or .gz."""
    raw = data_root(root) / source.__name__ / "raw"
    shapes = {f"{part}-images-idx3-ubyte": (n, 28, 28) for part, n in MNIST_SIZES.items()}
    shapes |= {f"{part}-labels-idx1-ubyte": (n,) for part, n in MNIST_SIZES.items()}
    found = {name: [path for path in (raw / name, raw / f"{name}.gz") if path.is_file()] for name in shapes}
    return raw, shapes, {name: paths[0] for name, paths in found.items() if paths}


def read_idx(path, shape):
    """uint8 array of `shape` from an idx file, MNIST's format; ValueError, naming the file, unless it holds just that.

    The content decides, not the archive's hash: re-packed files (Debian's) are as good. Torchvision's own reader is
    not used: it opens no .gz, and accepts a wrong length and any label.
    """
    header = np.array([0x0800 + len(shape), *shape], ">u4").tobytes()  # magic number (uint8, dimensions), sizes
    size = len(header) + math.prod(shape)
    try:
        with (gzip.open if path.suffix == ".gz" else open)(path, "rb") as file:
            found = file.read(size + 1)  # one byte more than it should hold, to notice what is too long
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        found, wrong = b"", f"broken gzip ({error})"
    else:
        wrong = found[: len(header)] != header and f"does not begin with the idx header of uint8 {shape}"
    values = np.frombuffer(found, np.uint8)[len(header) :]
    if not wrong and len(found) != size:
        wrong = f"holds {len(found)} bytes of {size}" if len(found) < size else f"holds more than {size} bytes"
    if not wrong and len(shape) == 1 and values.max() > 9:
        wrong = f"label {values.max()} is not in 0..9"
    advice = "delete it to have it downloaded again, or put an intact copy in its place"
    _need(not wrong, f"{path} is corrupt: {wrong}; {advice}")
    return values.reshape(shape)


def _fetch(source, raw, names, download):
    """Download idx files `names`, gzipped, into `raw`; where that cannot be, FileNotFoundError that says what to do."""
    packed, md5 = [f"{name}.gz" for name in names], dict(source.resources)
    attempts = [(f"{source.__name__} from {m}", from_mirror(m, md5, packed, raw)) for m in source.mirrors]
    advice = f"put them there, unpacked or as .gz, or let root or PFLKIT_DATA name a folder with {source.__name__}/raw"
    fetch(raw, attempts, download, f"{raw} lacks {', '.join(names)}", advice)


def _npz(path):
    """x, y and classes from the arrays `x` and `y` of an .npz file; ValueError, naming it, where they do not fit.

    x: uint8 [n, H, W] or channel-last [n, H, W, C] with C 1, 3 or 4, pixels 0..255: normalised by `images`. Or
    floats, taken as they are: [n, d], channel-first [n, C, H, W]; [n, H, W] gets one channel.
    y [n]: integers or strings of any kind, or whole floats. Sorted, they become the classes 0..K-1, K at least 2.
    """
    unreadable = (KeyError, TypeError, ValueError, EOFError, RuntimeError, MemoryError, OSError)
    unreadable += (zipfile.BadZipFile, zlib.error)
    try:
        with path.open("rb") as opened, np.load(opened, allow_pickle=False) as file:  # np.load leaks a broken one
            x, y = np.asarray(file["x"]), np.asarray(file["y"])
    except unreadable as error:
        why = " ".join(str(error).split())
        raise ValueError(
            f"{path} is no .npz file of plain arrays x and y (no objects; labels as y.astype(str)): {why}"
        ) from None
    _need(x.ndim >= 2 and x.size > 0, f"{path}: x must hold samples [n, ...], not an array of shape {x.shape}")
    _need(y.ndim == 1, f"{path}: y must hold one label a sample, [n], not an array of shape {y.shape}")
    _need(len(x) == len(y), f"{path}: x holds {len(x)} samples, y {len(y)} labels")
    return _npz_samples(path, x), *_npz_labels(path, y)


def _npz_samples(path, x):
    """x as float32 [n, *shape]."""
    if x.dtype == np.uint8:
        fits = x.ndim == 3 or (x.ndim == 4 and x.shape[3] in (1, 3, 4))
        _need(fits, f"{path}: uint8 x must be images [n, H, W] or [n, H, W, C] with C 1, 3 or 4, not {x.shape}")
        return images(x, 255)
    advice = "images as x.astype(np.uint8), word numbers by data.Dataset and its vocabulary"
    _need(x.dtype.kind == "f", f"{path}: x must be uint8 images or floats, not {x.dtype}; {advice}")
    with np.errstate(over="ignore"):  # what float32 cannot hold becomes infinite, and is refused below
        x = torch.from_numpy(x.astype(np.float32, order="C"))
    bad = int((~torch.isfinite(x)).flatten(1).any(1).sum())
    _need(bad == 0, f"{path}: x holds NaN or infinity (as float32) in {bad} of {len(x)} samples")
    return x[:, None] if x.ndim == 3 else x


def _npz_labels(path, y):
    """y int64 [n] in 0..K-1, and the K original labels, sorted."""
    if y.dtype.kind == "f":
        y = y.astype(np.float64)
        whole = (np.abs(y) < 2**53) & (y == np.floor(y))  # false for NaN and infinity too
        _need(whole.all(), f"{path}: y must hold whole numbers, not {y[~whole][:1].tolist()}")
        y = y.astype(np.int64)
    elif y.dtype.kind == "S":
        y = np.char.decode(y, "utf-8", "backslashreplace")
    _need(y.dtype.kind in "biuU", f"{path}: y must hold integers or strings, not {y.dtype}")
    classes, index = np.unique(y, return_inverse=True)
    _need(len(classes) >= 2, f"{path}: y holds one class, {classes.tolist()}; at least 2 are needed")
    return index.astype(np.int64), tuple(classes.tolist())


def _need(fits, complaint):
    if not fits:
        raise ValueError(complaint)
