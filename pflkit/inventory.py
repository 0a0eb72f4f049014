"""What of each data set is where: a line per set, from sizes, checksums and counts of files; no image is decoded."""

import math

from torchvision import datasets
from torchvision.datasets.utils import check_md5

from pflkit import images, text
from pflkit.data import data_root, idx_files

LOADED = "the first run on it downloads what is missing"


def _idx(source):
    def found(root):
        raw, shapes, paths = idx_files(source, root)
        wrong = [path.name for name, path in paths.items() if _size(path) != _idx_size(shapes[name])]
        n = sum(shape[0] for shape in shapes.values() if len(shape) == 1)
        return _say(raw, [name for name in shapes if name not in paths], wrong, n)

    return found


def _idx_size(shape):
    return 4 + 4 * len(shape) + math.prod(shape)


def _size(path):
    """Bytes of a file; of a .gz what its last four bytes say that it unpacks to."""
    size = path.stat().st_size
    if path.suffix != ".gz" or size < 18:  # the shortest .gz there is
        return size
    with path.open("rb") as file:
        file.seek(-4, 2)
        return int.from_bytes(file.read(4), "little")


def _cifar(source):
    def found(root):
        folder, missing, corrupt = images.cifar_files(source, root)
        return _say(folder, missing, corrupt, sum(images.CIFAR_SIZES))

    return found


def _say(folder, missing, wrong, n):
    problems = [f"missing: {', '.join(missing)}"] * bool(missing) + [f"corrupt: {', '.join(wrong)}"] * bool(wrong)
    if not problems:
        return f"complete, {n:,} images in {folder}"
    advice = "delete what is corrupt or put intact copies there" if wrong else f"put them there, or {LOADED}"
    return f"{'; '.join(problems)} in {folder}; {advice}"


def _tiny_imagenet(root):
    folder = data_root(root) / images.TINY
    if not folder.exists():
        return f"missing: {folder}; unpack {images.TINY_URL} in {folder.parent}, or {LOADED} (248 MB)"
    try:
        wnids, files = images.tiny_files(folder)
    except (OSError, ValueError) as error:
        return f"unusable: {error}"
    if (len(wnids), len(files)) == (200, 110_000):
        return f"complete, 110,000 images in {folder}"
    return (
        f"{len(wnids)} of 200 classes, {len(files):,} images in {folder}; used as they are; "
        "for all 110,000 move that folder away and run again"
    )


def _agnews(root):
    folder = data_root(root) / "ag_news_csv"
    missing = [name for name in text.ROWS if not (folder / name).is_file()]
    if missing:
        return _say(folder, missing, [], 0)
    if all(check_md5(folder / name, md5) for name, md5 in text.MD5.items()):
        return f"complete, {sum(text.ROWS.values()):,} texts in {folder}"
    rows = {name: (folder / name).read_bytes().count(b"\n") for name in text.ROWS}
    counts = " and ".join(f"{rows[name]:,} of {n:,} lines in {name}" for name, n in text.ROWS.items())
    return f"not the official files: {counts}, {folder}; used as they are; move them away to have all downloaded"


FOUND = {  # name: function (root) -> what is there; the names are those of data.LOADERS
    "digits": lambda root: "complete, 1,797 images, installed with scikit-learn",
    "fashion-mnist": _idx(datasets.FashionMNIST),
    "mnist": _idx(datasets.MNIST),
    "cifar10": _cifar(datasets.CIFAR10),
    "cifar100": _cifar(datasets.CIFAR100),
    "tiny-imagenet": _tiny_imagenet,
    "agnews": _agnews,
}
