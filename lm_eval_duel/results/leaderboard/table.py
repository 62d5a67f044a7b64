"""What a leaderboard shows: the heads of its columns, and the cells of its rows, for every form."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from typing import Any

from lm_eval_duel.results.records import UNCLEAR
from lm_eval_duel.results.table import CODE, HTML, TEXT, WORDS, Cell, Column, form_of

GROUPS = {  # of columns, which the page can hide
    "name": "names",
    "mean": "means",
    "value": "perplexity",
    "bits": "bits per byte",
    "gap": "gap",
    "closed": "gap closed",
    "cost": "cost",
    "source": "provenance",
}
MANY = 2  # tasks beyond which the page first shows names, means, perplexities and cost only
FIRST_HIDDEN = ("bits", "gap", "closed", "source")
SHORT = {  # heads of the metric's own columns
    "token_perplexity": "ppl/token",
    "perplexity": "ppl",
    "word_perplexity": "ppl/word",
    "byte_perplexity": "ppl/byte",
    "bits_per_byte": "bits/byte",
}
Row = Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class Head:
    """A column: its key, its group, what stands above it (`unit` in small print), and the task column it is of."""

    key: str
    group: str
    title: str
    form: str = ".2f"
    unit: str = ""
    about: str = ""
    column: str = ""

    @property
    def numeric(self) -> bool:
        return self.shown.numeric

    @property
    def shown(self) -> Column:
        return Column(" ".join(filter(None, [self.title, self.unit])), self.form)


def heads(board: Mapping[str, Any]) -> list[Head]:
    """The columns of a leaderboard."""
    metric, several = board["metric"], len(board["columns"]) > 1
    form = form_of(metric)
    heads = [
        Head("rank", "name", "#", ",d", about=f"rank among likelihoods, by {ranked_by(board)}"),
        Head("model", "name", "model", TEXT),
        Head("display", "name", "estimator", TEXT),
        Head("rule", "name", "rule", CODE),
        Head("block", "name", "block", ",d"),
        Head("cache", "name", "cache", TEXT),
    ]
    if board["mean_of"]:
        kind, of = "mean" if metric == "bits_per_byte" else "geometric mean", f"{len(board['mean_of'])} tasks"
        heads += [
            Head("mean", "mean", kind, form, of, "over the tasks that all rows have"),
            Head("mean_rank", "mean", "mean rank", ".2f", of, "over the tasks that all have"),
        ]
    forms = {"value": form, "bits": ".4f", "gap": f"+{form}", "closed": ".1f"}
    for group, unit in (("value", SHORT[metric]), ("bits", "bits/byte"), ("gap", "gap"), ("closed", "gap closed, %")):
        if not _shown(board, group):
            continue
        for column in board["columns"]:
            about = {"gap": f"minus {board['ar']}"}.get(group, column["about"])
            key = f"{column['id']}_{group}"
            heads.append(Head(key, group, column["label"], forms[group], unit, about, column["id"]))
        if group == "closed" and several:
            about = "over the tasks in which it is known"
            heads.append(Head("gap_closed", group, "average", ".1f", unit, about))
    heads += [
        Head("nfe_per_token", "cost", "NFE", ".3f", "per token", "rule steps per token"),
        Head("seconds_per_token", "cost", "seconds", ".2g", "per token", "of scoring; depends on the device"),
        Head("device", "source", "device", TEXT),
        Head("parameters", "source", "parameters", "si"),
        Head("fingerprint", "source", "fingerprint", CODE, "of the spec"),
        Head("versions", "source", "versions", TEXT),
        Head("date", "source", "date", TEXT, "UTC"),
    ]
    return heads


def _shown(board: Mapping[str, Any], group: str) -> bool:
    """Whether a group of task columns has anything to show."""
    if group == "bits" and board["metric"] == "bits_per_byte":
        return False
    key = {"bits": "bits_per_byte", "gap": "gap", "closed": "distinguishable"}.get(group)
    return key is None or any(cell[key] is not None for row in board["rows"] for cell in row["cells"].values())


def ranked_by(board: Mapping[str, Any]) -> str:
    """What rows are ranked by, in words."""
    if board["by"] == "mean":
        return "the mean over tasks"
    name = next((column["label"] for column in board["columns"] if column["id"] == board["by"]), "nothing")
    return f"{WORDS[board['metric']]} of {name}"


def cells(board: Mapping[str, Any], row: Row) -> Iterator[tuple[Head, Cell]]:
    """The heads and cells of a row."""
    for head in heads(board):
        if head.column:
            cell = row["cells"].get(head.column)
            yield head, Cell() if cell is None else of_task(head.group, cell, row)
        else:
            yield head, _of_row(head.key, row)


def of_task(group: str, cell: Row, row: Row) -> Cell:
    """A cell of a task's column. Errors are those of Monte Carlo or sampling, intervals are over documents."""
    bound, unsure = row["kind"] == "bound", bool(cell["stderr_reason"])
    if group == "bits":
        error = cell["bits_per_byte_stderr"]
        return Cell(cell["bits_per_byte"], stderr=error, bound=bound, unsure=unsure and error is None)
    if group == "closed":
        value = UNCLEAR if cell["distinguishable"] is False else cell["gap_closed"]
        interval = None if value is None else cell["gap_closed_interval"]
        return Cell(value, interval, cell["gap_closed_stderr"], note=cell["gap_closed_reason"])
    error = cell["stderr"]
    unsure = unsure and error is None
    if group == "gap":
        return Cell(cell["gap"], cell["gap_interval"], error, bound, unsure=unsure)
    windows = cell["window_stderr"]
    instead = "" if cell["interval"] is not None or windows is None else f"s.e. {windows:.2g} over windows"
    reason = "" if cell["interval"] is not None or instead else cell["reason"]
    note = "; ".join(filter(None, [cell["stderr_reason"], reason]))
    return Cell(cell["value"], cell["interval"], error, bound, unsure=unsure, note=note, instead=instead)


def _of_row(key: str, row: Row) -> Cell:
    if key == "mean":
        unsure = row["mean_stderr"] is None and any(cell["stderr_reason"] for cell in row["cells"].values())
        return Cell(row["mean"], stderr=row["mean_stderr"], bound=row["kind"] == "bound", unsure=unsure)
    if key == "gap_closed" and row["gap_closed"] is not None:
        return Cell(row["gap_closed"], stderr=row["gap_closed_stderr"], instead=f"{row['gap_closed_tasks']} tasks")
    if key == "block" and row["block"]:
        return Cell(
            "whole" if row["block"] == "none" else int(row["block"]) if row["block"].isdecimal() else row["block"]
        )
    if key == "versions":
        return Cell(", ".join(f"{name} {version}" for name, version in row["versions"].items()))
    notes = {"model": row["remarks"], "display": row["about"], "seconds_per_token": row["seconds_reason"]}
    value = row[key][:10] if key == "date" else row[key]
    return Cell(value, note=notes.get(key, ""))


@dataclasses.dataclass(frozen=True)
class Shown:
    """A cell of the page. `sort`: a number, a text, or None (last); `small`: the interval; `about`: a remark."""

    text: str
    sort: float | str | None
    small: str
    about: str


def shown(head: Head, cell: Cell) -> Shown:
    """A cell as the page shows it."""
    sort = cell.value if cell.value != "" else None
    if head.numeric and isinstance(sort, str):
        sort = math.inf if sort == "whole" else None
    return Shown(HTML.value(cell, head.shown), sort, HTML.interval(cell, head.shown), cell.note)
