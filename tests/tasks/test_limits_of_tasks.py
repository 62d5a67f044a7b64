"""Counts, limits and messages of tasks and of the user's files, by literal loops and in golden/. Nothing is loaded.

LM_EVAL_DUEL_RECORD=1 writes the golden files anew: read what has changed.
"""

import dataclasses
import gzip
import itertools
import json
import logging
import math
import random
import re
import statistics
from pathlib import Path

import golden
import pytest

from lm_eval_duel.errors import DuelError
from lm_eval_duel.tasks import corpora, data, files, infilling, metadata
from lm_eval_duel.tasks.data import Wrapping

GOLDEN = Path(__file__).parent / "golden"
B = 900
E = 901


# ---------------------------------------------------------------- wrapped rows


def rows_by_hand(documents, length, framed, insert_eos, remainder):
    """One token after the other."""
    size = length - 2 if framed else length
    rows = []
    row = []
    for count, document in enumerate(documents, 1):
        tokens = [*document, E] if insert_eos else document
        for token in tokens:
            row.append(token)
            if len(row) == size:
                rows.append(row)
                row = []
        if remainder == "official" and count in (1000, 2000, 3000):
            row = []
    if row and remainder == "keep":
        rows.append(row)
    return [[B, *row, E] for row in rows] if framed else rows


@pytest.mark.parametrize("count", [0, 1, 1000, 1001, 2000])
def test_rows_are_cut_token_by_token(count):
    draw = random.Random(count)
    documents = []
    for _ in range(count):
        size = draw.randrange(3)
        documents.append([draw.randrange(90) for _ in range(size)])

    options = itertools.product((3, 7), (True, False), (True, False), ("keep", "drop", "official"))
    for length, framed, insert_eos, remainder in options:
        wrapping = Wrapping(length, B, E, framed, insert_eos, remainder)
        assert list(wrapping.rows(documents)) == rows_by_hand(documents, length, framed, insert_eos, remainder)


def test_the_shortest_rows():
    for framed, least in ((True, 3), (False, 1)):
        assert len(list(Wrapping(least, B, E, framed).rows([[1, 2]]))) == 2
        with pytest.raises(DuelError, match=f"length={least - 1}"):
            Wrapping(least - 1, B, E, framed)


@pytest.mark.parametrize("count", [0, 1, 3, 4, 5, 8])
def test_lists_of_a_size(count):
    expected = [list(range(start, min(start + 4, count))) for start in range(0, count, 4)]
    assert [list(batch) for batch in metadata.batched(range(count), 4)] == expected


# ---------------------------------------------------------------- metrics


def test_calibration_is_that_of_a_loop_over_bins():
    """Confidences at the borders of bins, in the middle of them, and at 1; right and wrong ones."""
    items = []  # a confidence, and whether the answer is right
    bins = [[] for _ in range(10)]
    for tenth in range(11):
        confidence = tenth / 10 if tenth in (0, 5, 10) else tenth / 10 + 0.03
        for right in (0.0, 1.0, 1.0):
            items.append((confidence, right))
            bins[min(tenth, 9)].append((confidence, right))

    expected = 0.0
    for members in bins:
        confidences, rights = zip(*members, strict=True)
        accuracy = statistics.mean(rights)
        expected += len(members) / len(items) * abs(accuracy - statistics.mean(confidences))
    assert infilling.expected_calibration_error(items) == pytest.approx(expected)


@pytest.mark.parametrize("label", [0, 1, 2, 3])
def test_the_score_of_a_choice(label):
    """Of equal options the first is taken; one that is impossible has probability 0."""
    scores = infilling.calibration([-800.0, -800.0, -math.inf, -801.0], label)

    weights = [1.0, 1.0, 0.0, math.exp(-1.0)]
    brier = 0.0
    for n, weight in enumerate(weights):
        right = 1.0 if n == label else 0.0
        brier += (weight / sum(weights) - right) ** 2
    assert scores["brier"] == pytest.approx(brier)
    assert scores["ece"] == (pytest.approx(1.0 / sum(weights)), float(label == 0))


@pytest.mark.parametrize(
    ("text", "words", "size"),
    [("", 0, 0), (" \n", 0, 2), ("a", 1, 1), ("a  b\n\u00e9", 3, 7), (" a b", 3, 4), ("a b ", 3, 4)],
)
def test_units_of_a_document(text, words, size):
    """White space at an end of a text adds an empty word, as the harness counts them."""
    metrics = data.perplexity({"text": text, data.TOKENS: 5}, [-3.0])
    assert metrics == {
        "word_perplexity": (-3.0, words),
        "byte_perplexity": (-3.0, size),
        "bits_per_byte": (-3.0, size),
        "token_perplexity": (-3.0, 5),
    }

    of_text_before = data.perplexity({"text": "x", data.TOKENS: 5, "words": 7, "bytes": 9}, [-3.0])
    assert of_text_before["word_perplexity"] == (-3.0, 7)
    assert of_text_before["byte_perplexity"] == (-3.0, 9)
    assert of_text_before["bits_per_byte"] == (-3.0, 9)

    assert data.token_perplexity({data.TOKENS: 5}, [-3.0]) == {"token_perplexity": (-3.0, 5)}


# ---------------------------------------------------------------- files of the user


def test_five_names_of_what_is_not_read_are_listed(tmp_path):
    names = ["a.pdf", "b.xlsx", "c", "d.py", "e.zip", "f.doc", "g.png"]
    (tmp_path / "read.txt").write_text("x")
    (tmp_path / ".hidden.pdf").write_text("x")
    assert files.left_out(str(tmp_path)) == files.left_out(str(tmp_path / "read.txt")) == ""
    for count, name in enumerate(names, 1):
        (tmp_path / name).write_text("x")
        note = files.left_out(str(tmp_path))
        more = f" and {count - 5} more" if count > 5 else ""
        assert f"not read: {', '.join(names[: min(count, 5)])}{more} (" in note
    (tmp_path / "0").mkdir()
    assert "not read: 0/, a.pdf" in files.left_out(str(tmp_path))


CSV = 'text,n\none,1\n"two\nlines",2\n\nlast,4\n'
READ = {  # files, and how they are read
    "table.csv": CSV,
    "packed.CSV.gz": CSV,
    "lines.jsonl": '{"text": "a"}\n\n{"text": "b"}\n',
    "one.json": '{"data": [{"text": "a"}, {"text": "b"}]}',
    "only_entry.json": '{"rows": [{"text": "a"}]}',
    "record.json": '{"text": "a", "data": []}',
    "list.json": '[{"text": "a"},\n {"text": "b"}]',
    "several.json": '{"text":\n "a"}\n{"text":\n "b"}',
    "empty.jsonl": "",
    "plain.md": "\n a \r\n\nb\n\n",
    "plain.txt": "a",
}
BROKEN = {
    "cells.csv": "text,n\na,1\nb\n",
    "twice.csv": "text,n,text\na,1,b\n",
    "quote.csv": 'text\n"a\n',
    "line.jsonl": '{"text": "a"}\n{"text": \n{"text": "b"}\n',
    "value.jsonl": '{"text": "a"}\n7\n',
    "not_a_list.json": '[{"text": "a"},\n {"text": b}]',
    "null.jsonl": '{"text": "a"}\n{"text": null}\n',
    "number.jsonl": '{"text": "a"}\n\n{"text": 7}\n',
    "column.jsonl": '{"txt": "a", "n": null}\n',
    "latin.txt": "caf\u00e9 au lait".encode("latin-1"),
    "empty.txt": "\n",
    "format.pdf": "x",
}


def write(folder, name, content):
    content = content if isinstance(content, bytes) else content.encode()
    (folder / name).write_bytes(gzip.compress(content) if name.endswith(".gz") else content)


def test_what_is_read_and_what_is_wrong_with_the_rest(tmp_path, monkeypatch):
    """Names and texts of all documents; of an error its class and the numbers, names and quotes in its message."""
    monkeypatch.chdir(tmp_path)
    lines = []
    for name, content in {**READ, **BROKEN}.items():
        write(tmp_path, name, content)
        for each_line in (False, True):
            try:
                read = [f"{document.name} {document.text!r}" for document in files.texts([name], lines=each_line)]
            except DuelError as error:
                named = re.findall(r"'[^']*'|\S*\d\S*|\w+\.\w+", str(error))
                read = [type(error).__name__, *named]
            lines.append(f"{name} lines={each_line}: {read}")
            if not name.endswith((".txt", ".md")):
                break
    golden.check(GOLDEN / "files.txt", "\n".join(lines) + "\n")


INFILLED = [  # rows of the task of gaps and of the one of choices
    {"prefix": "a", "target": "b", "suffix": "c"},
    {"target": "b"},
    {"prefix": None, "target": "b", "suffix": None},
    {"prefix": "a", "target": ""},
    {"prefix": "a"},
    {"prefix": 3, "target": "b"},
    {"options": ["a", "b"], "label": 1},
    {"options": ["a", "b"], "label": "a", "prefix": "p"},
    {"options": ["a", "b"], "label": 2},
    {"options": ["a", "b"], "label": -1},
    {"options": ["a", "b"], "label": True},
    {"options": ["a"], "label": 0},
    {"options": ["a", ""], "label": 0},
    {"options": "ab", "label": 0},
    {"options": ["a", "b"], "label": "c"},
]


def test_rows_of_gaps_and_choices():
    lines = []
    for row in INFILLED:
        read = infilling._choice if "options" in row else infilling._gap
        try:
            result = read("rows.jsonl:7", row)
        except DuelError as error:
            result = ["DuelError", *re.findall(r"'[^']*'|\d+", str(error))]
        lines.append(f"{json.dumps(row)} -> {result}")
    golden.check(GOLDEN / "infilled.txt", "\n".join(lines) + "\n")


# ---------------------------------------------------------------- the paper's data sets


def test_the_data_sets_are_those_that_are_pinned():
    """Their repositories, revisions, rows, sizes and digests: another row is another benchmark."""
    lines = []
    for name, corpus in corpora.CORPORA.items():
        lines.append(f"{name}: {json.dumps(dataclasses.asdict(corpus), sort_keys=True)}")
    golden.check(GOLDEN / "corpora.txt", "\n".join(lines) + "\n")


@pytest.mark.parametrize("count", [2, 3, 4])
def test_a_copy_has_all_rows_and_no_more_unless_the_end_is_taken(tmp_path, monkeypatch, count):
    whole = corpora.Corpus(repo="o/r", file="f.jsonl", rows=3, size=3)
    end = dataclasses.replace(whole, last=True, size=None)
    monkeypatch.setattr(corpora, "CORPORA", {"whole": whole, "end": end, "ptb": whole})
    texts = [str(n) for n in range(count)]
    lines = [json.dumps({"text": text}) + "\n" for text in texts]
    (tmp_path / "whole.jsonl").write_text("".join(lines))
    (tmp_path / "end.jsonl").write_text("".join(lines))

    for name, fits in (("whole", count == 3), ("end", count >= 3)):
        if fits:
            assert corpora.texts(name, str(tmp_path)) == texts[-3:]
        else:
            with pytest.raises(DuelError, match=f"has {count} rows, but {name} has 3.*rows={count}"):
                corpora.texts(name, str(tmp_path))
        assert corpora.texts(name, str(tmp_path), rows=count) == texts
        with pytest.raises(DuelError):
            corpora.texts(name, str(tmp_path), rows=count + 1)

    monkeypatch.setitem(corpora.CORPORA, "whole", dataclasses.replace(whole, rows=count, size=count + 1))
    with pytest.raises(DuelError, match=f"has {count} bytes.*{count + 1}"):
        corpora.texts("whole", str(tmp_path))


MARKED = (
    "He did n't say 's it s ' here : \" quoted \" and ' single ' ( in ) [ brackets ] N N N years , $ 1 # 1 <unk> "
    "http : / / a.b https : / / c.d a / b ; what ? yes ! end . Next \\/ "
    "\u201cso\u201d $ 5 \u00a3 6 @-@ 1 @,@ 000 = = T = = it 's . "
)


def test_every_replacement_of_the_detokenizers():
    lines = []
    for name, detokenize in corpora.DETOKENIZERS.items():
        for end in (" ", "?", " ?", " !"):
            lines.append(f"{name}: {detokenize(MARKED.strip() + end)!r}")
    golden.check(GOLDEN / "detokenized.txt", "\n".join(lines) + "\n")


def test_the_bundled_texts(caplog):
    caplog.set_level(logging.INFO)
    lines = []
    for name in ("sotu.jsonl", "sotu_full.jsonl.xz", "sotu_choice.jsonl"):
        records = data.bundled(name)["test"]
        size = sum(len(json.dumps(record, sort_keys=True)) for record in records)
        lines.append(f"{name}: {len(records)} rows of {sorted(records.column_names)}, {size} characters")
    assert lines[0].startswith("sotu.jsonl: 36 ")
    assert lines[2].startswith("sotu_choice.jsonl: 40 ")
    golden.check(GOLDEN / "bundled.txt", "\n".join(lines) + "\n")
