"""pflkit.text: what is read from AG News's csv files, and which numbers its words get. No test needs a network."""

import csv
import hashlib
import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
import torchvision.datasets.utils
from click.testing import CliRunner

from pflkit import inventory, text
from pflkit.__main__ import main
from pflkit.data import data_root, load
from pflkit.text import ag_news, read, tokenizer, vocabulary

TRAIN = '"1","To be","or not"\n"4","","To be, to go!"\n'
TEST = '"3","To be","or never"\n'
# By hand: to 3, be 2, then once each, by alphabet: ! , go not or
NUMBERS = {"to": 1, "be": 2, "!": 3, ",": 4, "go": 5, "not": 6, "or": 7}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder <tmp>/ag_news_csv with three rows, under PFLKIT_DATA."""
    monkeypatch.setenv("PFLKIT_DATA", str(tmp_path))
    (tmp_path / "ag_news_csv").mkdir()
    (tmp_path / "ag_news_csv" / "train.csv").write_text(TRAIN)
    (tmp_path / "ag_news_csv" / "test.csv").write_text(TEST)
    return tmp_path / "ag_news_csv"


def rows(tmp_path, content):
    """What is read from a file of this content, text or bytes."""
    path = tmp_path / "train.csv"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return [*read(path)]


def message(error, call, *args, **kwargs):
    """The text of the `error` that the call raises: one line, without a chain of other tracebacks."""
    with pytest.raises(error) as caught:
        call(*args, **kwargs)
    assert type(caught.value) is error and caught.value.__cause__ is None
    assert caught.value.__suppress_context__ or caught.value.__context__ is None
    assert "\n" not in str(caught.value)
    return str(caught.value)


# --- the data set ----------------------------------------------------------------------------------------------------


def test_agnews(folder, no_requests, capsys):
    news = load("agnews")
    assert news.name == "agnews" and news.shape == (200,) and news.x.dtype == torch.int64 and news.x.is_contiguous()
    assert news.y.dtype == np.int64 and news.y.tolist() == [0, 3, 2]  # train first, then test
    assert news.classes == ("World", "Sports", "Business", "Sci/Tech") and news.num_classes == 4
    assert news.vocabulary == 8
    assert news.x[:, :6].tolist() == [[1, 2, 7, 6, 0, 0], [1, 2, 4, 1, 5, 3], [1, 2, 7, 0, 0, 0]]  # never: unknown
    assert not news.x[:, 6:].any()
    assert load("agnews").fingerprint == news.fingerprint
    assert capsys.readouterr().out.splitlines()[0] == f"{folder}/train.csv holds 2 rows, the official file 120,000"


def test_images_have_no_vocabulary():
    assert load("digits").vocabulary is None


def test_length_cuts_and_fills(folder):
    x, y, classes, size = ag_news(folder, length=4)
    assert x.tolist() == [[1, 2, 7, 6], [1, 2, 4, 1], [1, 2, 7, 0]]
    assert (y.tolist(), classes, size) == ([0, 3, 2], text.CLASSES, 8)  # words beyond the length have numbers too


def test_pairs_follow_the_words(folder):
    # to 3, be 2, "to be" 2, then once each, by alphabet: ! "," ", to" "be ," "be or" go "go !" not or "or not" "to go"
    x, _, _, size = ag_news(folder, length=12, ngrams=2)
    assert size == 15
    assert x.tolist() == [
        [1, 2, 12, 11, 3, 8, 13, 0, 0, 0, 0, 0],
        [1, 2, 5, 1, 9, 4, 3, 7, 6, 14, 10, 0],
        [1, 2, 12, 0, 3, 8, 0, 0, 0, 0, 0, 0],
    ]


def test_settings_are_passed_and_kept(folder):
    news = load("agnews", length=12, ngrams=2)
    x, _, _, size = ag_news(folder, length=12, ngrams=2)
    assert torch.equal(news.x, x) and news.vocabulary == size
    assert news.settings == {"length": 12, "ngrams": 2}
    assert load("agnews").settings == {"length": 200, "ngrams": 1} and load("digits").settings == {}


@pytest.mark.parametrize(
    ("dataset", "settings", "why"),
    [
        ("agnews", {"lenght": 9}, "lenght=9: not a setting of data set 'agnews', which has length, ngrams"),
        ("fashion-mnist", {"ngrams": 2}, "ngrams=2: not a setting of data set 'fashion-mnist', which has none"),
        ("mine.npz", {"length": 9}, "length=9: not a setting of data set 'mine.npz', which has none"),
        ("agnews", {"ngrams": 0}, "ngrams=0: must be a whole number, at least 1"),
        ("agnews", {"length": -1}, "length=-1: must be a whole number, at least 1"),
    ],
)
def test_settings_are_refused_before_anything_is_read(tmp_path, no_requests, dataset, settings, why):
    assert message(ValueError, load, dataset, root=tmp_path, **settings) == why  # and no word of missing files
    if settings.keys() <= {"length", "ngrams"}:
        options = [f"--{name}={value}" for name, value in settings.items()]
        done = CliRunner().invoke(main, ["run", "local", f"--dataset={dataset}", f"--data-root={tmp_path}", *options])
        assert (done.exit_code, done.stderr) == (2, f"pflkit: {why}\n")
    assert list(tmp_path.iterdir()) == []


def test_length_and_ngrams_name_the_results(folder, tmp_path, capsys):
    words = [f"{word} {place}" for word in "abcde" for place in "pqrs"]
    (folder / "train.csv").write_text("".join(f'"{i % 4 + 1}","{title}","x y z"\n' for i, title in enumerate(words)))
    names = []
    for options in ({}, {"length": 200, "ngrams": 1}, {"length": 3}, {"ngrams": 2}):
        arguments = [f"--{name}={value}" for name, value in options.items()]
        arguments += ["--partition=iid", "--clients=2", "--rounds=1", f"--out={tmp_path}/runs{len(names)}"]
        done = CliRunner().invoke(main, ["run", "local", "--dataset=agnews", *arguments])
        assert done.exit_code == 0, done.output
        (run,) = (tmp_path / f"runs{len(names)}").iterdir()
        about = json.loads((run / "config.json").read_text())["dataset"]
        assert about == {"name": "agnews", "length": 200, "ngrams": 1, "fingerprint": about["fingerprint"]} | options
        names.append((run.name, about["fingerprint"]))
    assert names[0] == names[1] and all(len(set(column)) == 3 for column in zip(*names, strict=True))


def test_a_text_without_words_is_zeros(folder):
    (folder / "test.csv").write_text('"2","","  "":;"\n')
    assert not load("agnews").x[2].any()


@pytest.mark.parametrize("name", ["length", "ngrams"])
@pytest.mark.parametrize("value", [0, -1, 1.5, "2", True, None])
def test_impossible_parameters(folder, name, value):
    line = message(ValueError, ag_news, folder, **{name: value})
    assert line == f"{name}={value!r}: must be a whole number, at least 1"


@pytest.mark.parametrize("dtype", ["i2", "u1", "i8"])
def test_word_numbers_in_an_npz_are_refused(tmp_path, dtype):
    np.savez(tmp_path / "mine.npz", x=np.ones((40, 9), dtype), y=np.arange(40) % 2)
    line = message(ValueError, load, tmp_path / "mine.npz")
    assert line.startswith(f"{tmp_path}/mine.npz: ") and ("must be images" if dtype == "u1" else "word numbers") in line
    done = CliRunner().invoke(main, ["run", "local", "--model=fasttext", f"--dataset={tmp_path}/mine.npz"])
    assert (done.exit_code, done.stderr) == (2, f"pflkit: {line}\n")


# --- words -----------------------------------------------------------------------------------------------------------


def test_basic_english():
    words = tokenizer()
    shown = " ".join(words('It\'s "Wall St.", e.g. (AP): up; 3.5%!'))
    assert shown == "it ' s wall st . , e . g . ( ap ) up 3 . 5% !"
    shown = " ".join(words("Oracle #39;s\\bid is &lt;b&gt; \\$7.7bn<br />?"))
    assert shown == "oracle #39 s\\bid is &lt b&gt \\$7 . 7bn ?"


def test_ngrams():
    assert [*tokenizer(3)("a b c")] == ["a", "b", "c", "a b", "b c", "a b c"]
    assert [*tokenizer(3)("a b")] == ["a", "b", "a b"]
    assert [*tokenizer(2)("")] == []


def test_vocabulary_by_hand():
    assert vocabulary(tokenizer()(line) for line in ("To be or not", "To be, to go!")) == NUMBERS
    assert vocabulary([["b", "B", "é", "a b", "a"], ["é"]]) == {"é": 1, "B": 2, "a": 3, "a b": 4, "b": 5}


def test_vocabulary_is_torchtexts():
    from torchtext.vocab import Vocab

    draw = np.random.default_rng(0)
    texts = [draw.choice([*"abcdefgh", "a b", "é", "Z"], 9).tolist() for _ in range(5)]
    assert ["<unk>", *vocabulary(texts)] == Vocab(
        Counter(word for words in texts for word in words), specials=["<unk>"]
    ).itos


def test_another_process_finds_the_same_numbers(folder):
    code = f"from pflkit.text import ag_news; print(ag_news({str(folder)!r}, ngrams=2)[0].tolist())"
    environment = os.environ | {"PYTHONHASHSEED": "1"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, check=True, capture_output=True, text=True)
    assert done.stdout.splitlines()[-1] == str(ag_news(folder, ngrams=2)[0].tolist())


# --- csv -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "found"),
    [
        ('"1","a","b"\n"4","c","d"\n', [(0, "a b"), (3, "c d")]),
        ('"2","a","b"', [(1, "a b")]),
        ('"2","a","b"\r\n"3","c","d"\r\n', [(1, "a b"), (2, "c d")]),
        ("2,a,b\n 3 ,c,d\n", [(1, "a b"), (2, "c d")]),
        ('\n"2","a","b"\n\n\n', [(1, "a b")]),
        ('\ufeff"2","a","b"\n', [(1, "a b")]),
        ('Class Index,Title,Description\n"2","a","b"\n', [(1, "a b")]),
        ('\ufeff"class_index","title","description"\r\n"2","a","b"\r\n', [(1, "a b")]),
        ('"2","","b"\n', [(1, " b")]),
        ('"2","a","the ""b"", c, d"\n', [(1, 'a the "b", c, d')]),
        ('"2","""a""","b"\n', [(1, '"a" b')]),
        ('"2","a, b","c\nd\r\ne"\n"3","f","g"\n', [(1, "a, b c\nd\r\ne"), (2, "f g")]),
        (
            '"2","dwindling\\band","\\$46, \\n and \\\\"\n"3","a\\","""b\\"""\n',
            [(1, "dwindling\\band \\$46, \\n and \\\\"), (2, 'a\\ "b\\"')],
        ),
        ('"2","été","日本"\n', [(1, "été 日本")]),
    ],
)
def test_rows(tmp_path, content, found):
    assert rows(tmp_path, content) == found


GOOD = '"1","a","b\nc"\n'  # two lines


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ("", "line 1 is the end, and no row came before"),
        ("Class Index,Title,Description\n", "line 2 is the end, and no row came before"),
        (GOOD + '"2","a"\n', "line 3 has 2 fields, not class, title, description"),
        (GOOD + '"2","a","b","c"\n', "line 3 has 4 fields, not class, title, description"),
        (GOOD + '"2', "line 3 begins a row that is not csv (unexpected end of data)"),
        (GOOD * 2 + '"2","a","b\nb\nb', "line 5 begins a row that is not csv (unexpected end of data)"),
        (GOOD + '"2","a","b" c"\n', "line 3 begins a row that is not csv"),
        (GOOD + '"2","a","b\n"3","a","b"\n', "line 3 begins a row that is not csv"),
        (GOOD + '"2","a","' + "b" * 200_000, "line 3 begins a row that is not csv (field larger than field limit"),
        (GOOD + '"0","a","b"\n', "line 3 has class '0', not 1, 2, 3 or 4"),
        (GOOD + '"5","a","b"\n', "line 3 has class '5', not 1, 2, 3 or 4"),
        (GOOD + '"","a","b"\n', "line 3 has class '', not 1, 2, 3 or 4"),
        (GOOD + '"1.0","a","b"\n', "line 3 has class '1.0', not 1, 2, 3 or 4"),
        (GOOD + "Class Index,Title,Description\n", "line 3 has class 'Class Index', not 1, 2, 3 or 4"),
        ("<html>\n404", "line 1 has 1 fields"),
        (GOOD.encode() + b'"1","a","b\xff"\n', "line 3 is not UTF-8"),
        (b"\x1f\x8b\x08\x00", "line 1 is not UTF-8"),
        (bytes(30), "line 1 has 1 fields"),
    ],
)
def test_what_is_no_such_file_is_named_by_file_and_line(folder, no_requests, content, why):
    (folder / "test.csv").write_bytes(content if isinstance(content, bytes) else content.encode())
    line = message(ValueError, load, "agnews")
    assert line.startswith(f"{folder}/test.csv is corrupt: {why}") and "delete it" in line
    assert inventory.FOUND["agnews"](None).startswith(f"corrupt: test.csv in {folder}; delete what is corrupt")


def test_data_counts_rows_as_load_does(folder, no_requests, monkeypatch, capsys):
    """A row may have several lines, and the last one need not end in a newline."""
    (folder / "test.csv").write_text('"3","a","b\nc\n"\n\n"3","a","b"')
    load("agnews")
    assert "test.csv holds 2 rows, the official file 7,600" in capsys.readouterr().out
    listed = inventory.FOUND["agnews"](None)
    assert listed.startswith("not the official files: 2 of 120,000 rows in train.csv and 2 of 7,600 rows in test.csv, ")
    monkeypatch.setattr(text, "MD5", {n: hashlib.md5((folder / n).read_bytes()).hexdigest() for n in text.ROWS})
    assert inventory.FOUND["agnews"](None) == f"complete, 4 texts in {folder}"


def test_field_limit_is_left_alone(folder):
    before = csv.field_size_limit()
    load("agnews")
    assert csv.field_size_limit() == before


# --- missing files ---------------------------------------------------------------------------------------------------


def test_missing_files_are_named_and_where_they_are_published(tmp_path, no_requests):
    line = message(FileNotFoundError, load, "agnews", root=tmp_path, download=False)
    assert line.startswith(f"{tmp_path}/ag_news_csv lacks train.csv, test.csv (download=False)")
    assert text.URL in line and "PFLKIT_DATA" in line
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("corrupt", "missing"), [("train.csv", "test.csv"), ("test.csv", "train.csv")])
def test_a_corrupt_file_is_named_before_the_missing_one_is_downloaded(folder, no_requests, corrupt, missing):
    (folder / corrupt).write_text("<html>404")
    (folder / missing).unlink()
    assert message(ValueError, load, "agnews").startswith(f"{folder}/{corrupt} is corrupt: line 1 has 1 fields")
    assert inventory.FOUND["agnews"](None).startswith(f"missing: {missing}; corrupt: {corrupt} in {folder}; ")
    assert [path.name for path in folder.iterdir()] == [corrupt]


def test_without_a_network(folder, no_network):
    (folder / "test.csv").unlink()
    line = message(FileNotFoundError, load, "agnews")
    assert line.startswith(f"{folder} lacks test.csv (download failed, ") and "Network is unreachable" in line
    assert [path.name for path in folder.iterdir()] == ["train.csv"]


def test_only_missing_files_are_downloaded(folder, monkeypatch, no_requests):
    (folder / "test.csv").unlink()
    asked = []

    def download_url(url, root, filename, md5):
        asked.append((url, md5))
        Path(root, filename).write_text(TEST)

    monkeypatch.setattr(torchvision.datasets.utils, "download_url", download_url)
    assert load("agnews").y.tolist() == [0, 3, 2]
    assert asked == [(f"{text.URL}test.csv", "d52ea96a97a2d943681189a97654912d")]
    assert {path.name for path in folder.iterdir()} == {"train.csv", "test.csv"}


def test_broken_download_leaves_nothing_behind(tmp_path, monkeypatch):
    def download_url(url, root, filename, md5):
        Path(root, filename).write_bytes(b"half of it")
        raise RuntimeError("File not found or corrupted.\n")

    monkeypatch.setattr(torchvision.datasets.utils, "download_url", download_url)
    assert "File not found or corrupted." in message(FileNotFoundError, load, "agnews", root=tmp_path)
    assert list((tmp_path / "ag_news_csv").iterdir()) == []


# --- torchtext -------------------------------------------------------------------------------------------------------


def test_images_do_not_import_torchtext():
    code = """
import sys

class Blocker:
    def find_spec(self, name, path=None, target=None):
        assert name.partition(".")[0] != "torchtext", "torchtext was asked for"

sys.meta_path.insert(0, Blocker())
import pflkit.__main__
from pflkit.experiment import experiment
print(len(experiment("fedavg", clients=2, rounds=1).rounds) > 0)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "True"


@pytest.fixture(params=[ModuleNotFoundError("No module\nof it"), OSError("libtorchtext.so: undefined symbol")])
def no_torchtext(request, monkeypatch):
    """A machine without torchtext, or with one that does not fit its torch."""

    class Blocker:
        def find_spec(self, name, path=None, target=None):
            if name.partition(".")[0] == "torchtext":
                raise request.param

    for name in [name for name in sys.modules if name.partition(".")[0] == "torchtext"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "meta_path", [Blocker(), *sys.meta_path])
    return " ".join(str(request.param).split())


def test_where_torchtext_is_missing_one_line_says_what_to_install(folder, no_torchtext):
    line = f"AG News needs torchtext, `pip install torchtext==0.6.0` ({no_torchtext})"
    assert message(ImportError, load, "agnews") == line
    done = CliRunner().invoke(main, ["run", "fedavg", "--dataset", "agnews"])
    assert done.exit_code == 2 and done.output.splitlines() == [f"pflkit: {line}"]


# --- the real files --------------------------------------------------------------------------------------------------


@pytest.mark.data
def test_real_agnews(no_requests):
    folder = data_root() / "ag_news_csv"
    if not os.environ.get("PFLKIT_DATA") or not folder.is_dir():
        pytest.skip("PFLKIT_DATA names no folder with ag_news_csv")
    news = load("agnews", download=False)
    n = len(news.y) - 7600  # train.csv may be a part of the official one
    assert news.x.shape == (n + 7600, 200) and np.bincount(news.y[n:]).tolist() == [1900] * 4
    assert news.x[:n].max() == news.vocabulary - 1 and news.x.min() == 0
    if n == 120_000:
        assert np.bincount(news.y[:n]).tolist() == [30_000] * 4
    names = ["<unk>", *vocabulary(tokenizer()(line) for _, line in read(folder / "train.csv"))]
    assert len(names) == news.vocabulary
    # The first test text begins so; a word that a part of train.csv lacks is <unk>.
    first = [*tokenizer()("Fears for T N pension after talks Unions representing workers at Turner Newall say")]
    assert [names[i] for i in news.x[n][:14]] == [word if word in names else "<unk>" for word in first]
