"""The columns of the page: their cells, what stands below their heads, and the notes that they refer to."""

import re
from pathlib import Path
from types import SimpleNamespace

import pytest
from results import board, hf, ours, put, three_documents

from lm_eval_duel.results import page, page_columns, run_tables
from lm_eval_duel.results.table import Note, split


def test_notes_of_the_page_say_for_which_tasks_they_hold():
    def task(*notes, differences=()):
        return SimpleNamespace(notes=notes, differences=differences)

    tasks = {
        "a": task("all", "two", "one"),
        "b": task("all", "two"),
        "c": task("all", differences=["in /home/me/r/x.json"]),
    }
    run_of_x = SimpleNamespace(file=Path("/home/me/r/x.json"), name="/home/me/r/x.json")
    content = SimpleNamespace(tasks=tasks, runs=[run_of_x], notes=[Note("fact", "advice"), Note("", "advice")])

    assert page.notes(content) == ["fact", "all", "a, b: two", "a: one", "c: in x.json"]


@pytest.mark.parametrize(
    ("size", "tokens", "averages", "below_heads", "remarks"),
    [
        (None, (90, 90), (12, 12), ["3 of 99 documents, 90 tokens", "12 of 99 documents"], [None, None]),
        (99, (90, 90), (99, 99), ["99 documents, 90 tokens", "99 documents"], [None, None]),
        (None, (90, 70), (12, 12), ["3 of 99 documents", "12 of 99 documents"], [None, None]),  # other tokenizers
        (None, (90, 90), (12, 99), ["3 of 99 documents, 90 tokens"], ["12 of 99 documents", "99 documents"]),
    ],
)
def test_a_head_of_the_page_says_what_its_values_are_over(tmp_path, size, tokens, averages, below_heads, remarks):
    """How many documents and tokens, if all rows agree; averages of different documents say so one by one."""
    for model, count, of_average in zip("MN", tokens, averages, strict=True):
        file = ours(tmp_path, docs=three_documents("sotu"), model=model, size=size)
        put(file, "config.duel.tasks.sotu.tokens", count)
        put(file, "config.duel.tasks.sotu.values", {})
        put(file, "config.duel.tasks.sotu.documents", size or 3)
        put(file, "results.choice", {"acc,none": 0.5, "acc_stderr,none": 0.125})
        put(file, ["n-samples", "choice"], {"original": 99, "effective": of_average})

    content = board(tmp_path)

    shown = page.html(content, None)
    heads = re.findall(r"</button><small>(.*?)</small></th>", shown)
    assert [head.replace("\u00a0", " ") for head in heads] == below_heads
    [average] = [column for column in page_columns.columns_of(content) if column.head == "choice acc"]
    for row, remark in zip(content.standings.rows, remarks, strict=True):
        _, note = split(average.cell(row))
        assert note.fact == (remark or "")


def test_a_remark_belongs_to_all_groups_of_columns_that_refer_to_it():
    def cell(text):
        return lambda row: (text, Note("why"))

    every_column = [
        page_columns.Column("a", cell("1"), "value"),
        page_columns.Column("empty", lambda row: "", "value", about="a remark on no cell"),
        page_columns.Column("b", cell("2"), "gap"),
        page_columns.Column("c", cell("3"), "gap"),
    ]

    shown, cells = page_columns.cells_of(["row"], every_column)
    remarks = page_columns.remarks_of(shown, cells.values(), hidden=())
    texts = [page_columns.marked(cell.text, cell.remark, remarks) for cell in cells["row"]]
    [remark] = remarks.values()

    assert remark.mark == "[1]"
    assert remark.text == "why"
    assert remark.groups == ["value", "gap"]
    assert [column.head for column in shown] == ["a", "b", "c"]
    assert texts == ["1\u00a0[1]", "2\u00a0[1]", "3\u00a0[1]"]


def test_remarks_of_hidden_columns_have_the_last_numbers():
    every_column = [
        page_columns.Column("a", lambda row: "1", "hidden", about="on a whole column"),
        page_columns.Column("b", lambda row: ("", Note(f"on {row}")), "hidden"),
        page_columns.Column("c", lambda row: ("", Note(f"of {row}")), "shown"),
    ]

    shown, cells = page_columns.cells_of(["x", "y"], every_column)
    remarks = page_columns.remarks_of(shown, cells.values(), {"hidden"})

    assert list(remarks) == ["of x", "of y", "on a whole column", "on x", "on y"]
    assert [remark.mark for remark in remarks.values()] == ["[1]", "[2]", "[3]", "[4]", "[5]"]


@pytest.mark.parametrize("tasks", [("sotu",), ("sotu", "news")])
def test_columns_of_the_page(tmp_path, tasks):
    """Its columns of bits have the bits; of several tasks most groups are hidden until they are asked for."""
    hf(tmp_path, docs=three_documents(*tasks), model="AR")
    ours(tmp_path, docs=three_documents(*tasks, shift=30), estimator="elbo", spec={"mc_samples": "16"})
    file = ours(tmp_path, docs=three_documents(*tasks, shift=15))
    put(file, "results.choice", {"acc,none": 0.5, "acc_stderr,none": 0.125})

    content = board(tmp_path)
    shown = page.html(content, None)

    groups = set(re.findall(r'data-group="(\w+)"', shown))
    checked = set(re.findall(r'data-group="(\w+)" checked', shown))
    hidden = {"lowest", "bits", "time", "source"}
    if len(tasks) > 1:
        hidden |= {"next", "gap", "closed"}
    assert groups - checked == hidden
    assert {"value", "next", "lowest", "bits", "gap", "closed", "average", "cost", "time", "source"} <= groups
    assert run_tables.WALL_TIME in shown

    [duel] = [row for row in content.standings.rows if row.method.is_duel]
    cells = {column.head: column.cell(duel) for column in page_columns.columns_of(content)}
    for name in tasks:
        row = duel.method.rows[name].row
        assert cells[f"{name} bits/byte"] == f"{row.metrics['bits_per_byte']:.4f}"
        assert split(cells[f"{name} gap"])[0].startswith("+")
        percent, remark = cells[f"{name} gap closed, %"]
        assert percent.startswith("62")
        assert "Monte Carlo" in str(remark)
    assert split(cells["choice acc"])[0] == "0.5000 ± 0.1250"
    kinds = set(page._legend(content.standings.rows))
    assert kinds == {"AR", "exact", "bound"}
