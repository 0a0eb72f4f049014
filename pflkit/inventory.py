"""What of each data set is where: a line per set. What `load` would call corrupt is called so here, by the same checks:
idx and csv files are read, CIFAR's md5 compared. Only Tiny-ImageNet's images, whose decoding takes half a minute, are
just counted, and the line says so.
"""

from torchvision import datasets
from torchvision.datasets.utils import check_md5

from pflkit import images, text
from pflkit.data import data_root, idx_files, read_idx

LOADED = "the first run on it downloads what is missing"


def _idx(source):
    def found(root):
        raw, shapes, paths = idx_files(source, root)
        wrong = [path.name for name, path in paths.items() if _tried(read_idx, path, shapes[name]) is None]
        n = sum(shape[0] for shape in shapes.values() if len(shape) == 1)
        return _say(raw, [name for name in shapes if name not in paths], wrong, n)

    return found


def _tried(read, *what):
    """What `read` makes of a file; None where it calls it corrupt."""
    try:
        return read(*what)
    except ValueError:
        return None


def _cifar(source, name):
    def found(root):
        folder, missing, corrupt = images.cifar_files(source, root)
        if not folder.exists() and (converted := data_root(root) / f"{name}.npz").is_file():
            return f"converted images, not read here, in {converted}"
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
    n, whole = images.TINY_CLASSES, images.TINY_CLASSES * images.TINY_EACH
    if (len(wnids), len(files)) == (n, whole):
        return f"complete, {whole:,} images (counted, not decoded) in {folder}"
    return (
        f"{len(wnids)} of {n} classes, {len(files):,} images (counted, not decoded) in {folder}; used as they are; "
        f"for all {whole:,} move that folder away and run again"
    )


def _agnews(root):
    folder = data_root(root) / "ag_news_csv"
    missing = [name for name in text.ROWS if not (folder / name).is_file()]
    rows = {name: _tried(_rows, folder / name) for name in text.ROWS if name not in missing}
    corrupt = [name for name, n in rows.items() if n is None]
    if missing or corrupt:
        return _say(folder, missing, corrupt, 0)
    if all(check_md5(folder / name, md5) for name, md5 in text.MD5.items()):
        return f"complete, {sum(rows.values()):,} texts in {folder}"
    counts = " and ".join(f"{rows[name]:,} of {n:,} rows in {name}" for name, n in text.ROWS.items())
    return f"not the official files: {counts}, {folder}; used as they are; move them away to have all downloaded"


def _rows(path):
    return sum(1 for _ in text.read(path))


FOUND = {  # name: function (root) -> what is there; the names are those of data.LOADERS
    "digits": lambda root: "complete, 1,797 images, installed with scikit-learn",
    "fashion-mnist": _idx(datasets.FashionMNIST),
    "mnist": _idx(datasets.MNIST),
    "cifar10": _cifar(datasets.CIFAR10, "cifar10"),
    "cifar100": _cifar(datasets.CIFAR100, "cifar100"),
    "tiny-imagenet": _tiny_imagenet,
    "agnews": _agnews,
}
