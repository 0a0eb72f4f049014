"""AG News, 127,600 short news texts of four classes, as rows of word numbers; what fastText takes.

    data.load("agnews")                           words, 200 a text, as the papers' code has it
    data.load("agnews", length=400, ngrams=2)     other lengths, or pairs of words too

Source: X. Zhang, J. Zhao, Y. LeCun, Character-level convolutional networks for text classification, NeurIPS 2015.
Words are torchtext's; it is imported here, when a text is wanted, and nowhere else.
"""

import csv
import io
from collections import Counter
from itertools import islice
from pathlib import Path

import numpy as np
import torch

from pflkit import checks
from pflkit.download import fetch, from_mirror

CLASSES = ("World", "Sports", "Business", "Sci/Tech")  # 1..4 in the files
HEADER = ("class index", "class", "label", "class label")  # what the first field of a header row may be
ROWS = {"train.csv": 120_000, "test.csv": 7_600}
URL = "https://raw.githubusercontent.com/mhjabreel/CharCnn_Keras/master/data/ag_news_csv/"  # as torchtext has it
MD5 = {"train.csv": "b1a00f826fdfbd249f79597b59e1dc12", "test.csv": "d52ea96a97a2d943681189a97654912d"}


def ag_news(folder, download=True, length=200, ngrams=1):
    """x int64 [n, length], y int64 [n], the class names and the size V of the vocabulary; train rows, then test rows.

    A text is its title and description; its words are torchtext's basic_english. Row i of x holds their numbers, 0
    behind the last one; what is beyond `length` is dropped. With ngrams=2 the pairs of neighbours follow the words,
    with 3 the triples too. 0 is also any word that no training row has; the others are 1..V-1, see `vocabulary`.
    The papers' code numbers the test rows' words too: V = 98,635. Here test rows bring no word.

    Backslashes and entities (`dwindling\\band`, `#39;`) are left in the words, as torchtext and the papers' code do.
    A file of other than the official number of rows is used, and one printed line says so.

    folder: holds train.csv and test.csv; what is missing there is downloaded unless download=False. ImportError where
    torchtext is missing, FileNotFoundError for files that are missing and cannot be downloaded, ValueError, with file
    and line, for a file that is none of AG News; each in one line.
    """
    checks.boolean("download", download)
    checks.integer("length", length, 1)
    tokens = tokenizer(ngrams)
    folder = Path(folder)
    # What is there is read first: a corrupt file is named before any download.
    found = {name: [*read(folder / name)] for name in ROWS if (folder / name).is_file()}
    missing = [name for name in ROWS if name not in found]
    if missing:
        _fetch(folder, missing, download)
        found |= {name: [*read(folder / name)] for name in missing}
    for name, official in ROWS.items():
        if (here := len(found[name])) != official:
            print(f"{folder / name} holds {here:,} rows, the official file {official:,}", flush=True)
    train, test = (found[name] for name in ROWS)
    numbers = vocabulary(tokens(text) for _, text in train)
    rows = train + test
    x = np.zeros((len(rows), length), np.int64)
    for row, (_, text) in zip(x, rows, strict=True):
        ids = [numbers.get(token, 0) for token in islice(tokens(text), length)]
        row[: len(ids)] = ids
    y = np.array([label for label, _ in rows], np.int64)
    return torch.from_numpy(x), y, CLASSES, len(numbers) + 1


def tokenizer(ngrams=1):
    """The function from a text to its words, an iterator, followed by its pairs of words, triples, ... up to `ngrams`.

    torchtext.data.utils.get_tokenizer("basic_english") and ngrams_iterator, of torchtext 0.6.0.
    """
    checks.integer("ngrams", ngrams, 1)
    try:
        from torchtext.data.utils import get_tokenizer, ngrams_iterator
    except (ImportError, OSError) as error:  # OSError: a compiled release that does not fit torch
        why = " ".join(str(error).split())
        raise ImportError(f"AG News needs torchtext, `pip install torchtext==0.6.0` ({why})") from None
    words = get_tokenizer("basic_english")
    return lambda text: ngrams_iterator(words(text), ngrams)


def vocabulary(texts):
    """{token: number} of all tokens of `texts`: 1 for the most frequent, ties by alphabet, the same on every machine.

    torchtext.vocab.Vocab's order; but 0 is both its <unk> and its <pad>, one zero vector, as in the papers' code.

    >>> vocabulary([["to", "be", "or"], ["not", "to", "be"], ["to"]])
    {'to': 1, 'be': 2, 'not': 3, 'or': 4}
    """
    counts = Counter()
    for tokens in texts:
        counts.update(tokens)
    return {token: i for i, token in enumerate(sorted(counts, key=lambda token: (-counts[token], token)), 1)}


def read(path):
    """Yields class 0..3 and text of every row (class 1..4, title, description) of a csv file in UTF-8.

    A first row of names (Class Index, Title, Description) is passed over, and so are empty lines. ValueError, with
    the line where the row begins, for anything else.
    """
    raw = path.read_bytes()
    try:
        content = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise _corrupt(path, raw.count(b"\n", 0, error.start) + 1, "is not UTF-8") from None
    rows = csv.reader(io.StringIO(content, newline=""), strict=True)
    labels = {str(i): i - 1 for i in range(1, len(CLASSES) + 1)}
    line, found = 1, False
    try:
        for row in rows:
            label = row[0].strip() if row else ""
            if row and not (line == 1 and len(row) == 3 and label.lower().replace("_", " ") in HEADER):
                if len(row) != 3:
                    raise _corrupt(path, line, f"has {len(row)} fields, not class, title, description")
                if label not in labels:
                    raise _corrupt(path, line, f"has class {label[:20]!r}, not 1, 2, 3 or 4")
                yield labels[label], f"{row[1]} {row[2]}"
                found = True
            line = rows.line_num + 1
    except csv.Error as error:
        raise _corrupt(path, line, f"begins a row that is not csv ({error})") from None
    if not found:
        raise _corrupt(path, line, "is the end, and no row came before")


def _corrupt(path, line, wrong):
    advice = "delete it to have it downloaded again, or put an intact copy in its place"
    return ValueError(f"{path} is corrupt: line {line} {wrong}; {advice}")


def _fetch(folder, names, download):
    """Download files `names` into `folder`; where that cannot be, FileNotFoundError that says what to do."""
    advice = f"put them there, from {URL}, or let root or PFLKIT_DATA name a folder with ag_news_csv"
    attempt = f"AG News from {URL}", from_mirror(URL, MD5, names, folder)
    fetch(folder, [attempt], download, f"{folder} lacks {', '.join(names)}", advice)
