"""CIFAR-10, CIFAR-100 and Tiny-ImageNet from their official files; downloads go through a scratch folder."""

import hashlib
import os
import re
import stat
import sys
import urllib.request
import zipfile
from pathlib import PurePosixPath

import numpy as np

from pflkit.data import data_root, images
from pflkit.download import fetch

CIFAR_SIZES = (50_000, 10_000)  # images in the training and the test part
TINY = "tiny-imagenet-200"
TINY_CLASSES, TINY_EACH = 200, 550  # images of each class: 500 to train, 50 to validate
TINY_URL = f"http://cs231n.stanford.edu/{TINY}.zip"
TINY_MD5 = "90528d7ca1a48142e341f4ef8d21d0de"  # of 248,100,043 bytes; as avalanche-lib and others list it


def cifar(source, root, download):
    """x [n, 3, 32, 32], y, classes from the batches of `source` (torchvision's CIFAR10 or CIFAR100), read or fetched.

    Torchvision compares each file's md5 before it unpickles any; here a file whose md5 is wrong is named first.
    """
    folder, missing, corrupt = cifar_files(source, root)
    if corrupt:
        advice = "delete them to have them downloaded again, or put intact copies in their place"
        raise ValueError(f"{folder}: corrupt (md5) {', '.join(corrupt)}; {advice}")
    if missing:

        def get(scratch):
            source(scratch, download=True)
            folder.mkdir(exist_ok=True)
            for name in missing:
                os.replace(scratch / folder.name / name, folder / name)

        _fetch(folder, missing, source.url, get, download)
    parts = [source(folder.parent, train=train) for train in (True, False)]
    x, y = np.concatenate([part.data for part in parts]), np.concatenate([part.targets for part in parts])
    n, classes = sum(CIFAR_SIZES), tuple(parts[0].classes)
    if x.dtype != np.uint8 or x.shape != (n, 32, 32, 3) or y.shape != (n,) or not set(y) <= set(range(len(classes))):
        raise ValueError(f"{folder} must hold {n} images 32 x 32 with labels 0..{len(classes) - 1}; it does not")
    return images(x, 255), y.astype(np.int64), classes


def cifar_files(source, root):
    """The folder of the files of `source`; the names of those that are missing; of those whose md5 is wrong."""
    from torchvision.datasets.utils import check_md5

    folder = data_root(root) / source.base_folder
    md5 = dict([*source.train_list, *source.test_list, (source.meta["filename"], source.meta["md5"])])
    missing = [name for name in md5 if not (folder / name).is_file()]
    return folder, missing, [name for name in md5 if name not in missing and not check_md5(folder / name, md5[name])]


def tiny_imagenet(root, download):
    """x [n, 3, 64, 64], y, classes of Tiny-ImageNet: the classes that have a training folder, in wnids.txt's order.

    Training images first, then validation images (the official test images have no labels). The classes are named by
    the first of their words in words.txt, where it is there. A download starts only where there is no such folder.
    """
    folder = data_root(root) / TINY
    if not folder.exists():
        _fetch(folder, [TINY], TINY_URL, lambda scratch: _get_tiny(scratch, folder), download)
    wnids, files = tiny_files(folder)
    if len(files) != (official := TINY_EACH * len(wnids)):
        print(f"{folder} holds {len(files):,} images of {len(wnids)} classes, officially {official:,}", flush=True)
    x = np.empty((len(files), 64, 64, 3), np.uint8)
    for i, (path, _) in enumerate(files):
        x[i] = _jpeg(path)
    words = dict(line.split("\t", 1) for line in _lines(folder / "words.txt") if "\t" in line)
    classes = tuple(words.get(wnid, wnid).split(",")[0].strip() for wnid in wnids)
    return images(x, 255), np.array([k for _, k in files], np.int64), classes


def tiny_files(folder):
    """The wnids that have a training folder, and (path, class 0..K-1) of each image; FileNotFoundError, ValueError."""
    annotations = folder / "val" / "val_annotations.txt"
    missing = [str(p.relative_to(folder)) for p in (folder / "wnids.txt", annotations) if not p.is_file()]
    if missing:
        advice = f"complete it, or move it away to have it downloaded from {TINY_URL}"
        raise FileNotFoundError(f"{folder} lacks {', '.join(missing)}; {advice}")
    listed = dict.fromkeys(line.strip() for line in _lines(folder / "wnids.txt") if line.strip())
    wnids = [wnid for wnid in listed if (folder / "train" / wnid).is_dir()]
    if len(wnids) < 2:
        raise ValueError(f"{folder}/train holds folders of {len(wnids)} classes of wnids.txt; at least 2 are needed")
    files = []
    for k, wnid in enumerate(wnids):
        found = sorted((folder / "train" / wnid / "images").glob("*.JPEG"))
        if not found:
            raise ValueError(f"{folder}/train/{wnid}/images holds no .JPEG file; delete {wnid}, or complete it")
        files += [(path, k) for path in found]
    index, seen = {wnid: k for k, wnid in enumerate(wnids)}, {}
    for number, line in enumerate(_lines(annotations), 1):
        name, wnid = [*line.split("\t"), ""][:2]
        if not name or "/" in name or "\\" in name or name in seen or not re.fullmatch(r"n\d+", wnid):
            allowed = "must be the name of an image, which no line before had, a tab, and a wnid"
            raise ValueError(f"{annotations}: line {number} {allowed}")
        seen[name] = wnid
        if wnid in index:
            files.append((annotations.parent / "images" / name, index[wnid]))
    if bare := index.keys() - set(seen.values()):
        raise ValueError(f"{annotations} names no image of {min(bare)}: it is cut short")
    if lost := [path for path, _ in files if not path.is_file()]:
        raise FileNotFoundError(
            f"{lost[0].parent} lacks {len(lost):,} images of val_annotations.txt, as {lost[0].name}"
        )
    return wnids, files


def _lines(path):
    return path.read_text("utf-8", "replace").splitlines() if path.is_file() else []


def _jpeg(path):
    """The pixels of a JPEG, uint8 [64, 64, 3], grey ones in three channels; ValueError, naming it, if cut short."""
    from PIL import Image

    try:
        with Image.open(path, formats=["JPEG"]) as image:
            if image.size != (64, 64):
                raise ValueError(f"it has {image.width} x {image.height} pixels")
            return np.asarray(image.convert("RGB"))
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        why = " ".join(str(error).split())
    raise ValueError(f"{path} is no intact JPEG of 64 x 64 pixels ({why}); put an intact copy in its place")


def _fetch(folder, names, url, get, download):
    """Has get(scratch) make `folder` complete; where that cannot be, FileNotFoundError that says what to do."""
    root = folder.parent
    lacking = f"{root} lacks {TINY}" if names == [TINY] else f"{folder} lacks {', '.join(names)}"
    advice = f"unpack {url} in {root}, or let root or PFLKIT_DATA name a folder with {folder.name}"
    fetch(root, [(url, get)], download, lacking, advice)


def _get_tiny(scratch, folder):
    """Download the archive, whose md5 must be right, unpack it in `scratch`, and put it in place in one step."""
    archive, digest, done, tenths = scratch / "archive.zip", hashlib.md5(usedforsecurity=False), 0, 0
    with urllib.request.urlopen(TINY_URL, timeout=60) as source, archive.open("wb") as file:
        total = source.length
        while block := source.read(1 << 16):
            file.write(block)
            digest.update(block)
            done += len(block)
            if total and 10 * done // total > tenths:
                tenths = 10 * done // total
                print(f"{TINY}.zip: {done / 1e6:.0f} of {total / 1e6:.0f} MB", file=sys.stderr, flush=True)
    if digest.hexdigest() != TINY_MD5:
        raise OSError(f"{done} bytes came whose md5 is {digest.hexdigest()}, not {TINY_MD5}")
    with zipfile.ZipFile(archive) as opened:
        for member in opened.infolist():
            path = PurePosixPath(member.filename)
            odd = path.is_absolute() or ".." in path.parts or "\\" in member.filename or path.parts[:1] != (TINY,)
            if odd or stat.S_ISLNK(member.external_attr >> 16):
                raise OSError(f"the archive holds {member.filename!r}: links, and paths outside {TINY}, are refused")
        opened.extractall(scratch)
    try:
        os.rename(scratch / TINY, folder)
    except OSError:
        if not (folder / "wnids.txt").is_file():  # else another process has put it there meanwhile
            raise
