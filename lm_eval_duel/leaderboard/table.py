"""What a leaderboard shows: the heads of its columns, and the text of every cell with the value that it sorts by.

The page, Markdown and CSV are made from these, so they show the same.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from lm_eval_duel.report.gaps import UNCLEAR
from lm_eval_duel.report.headline import WORDS, fixed, number

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
    unit: str = ""
    about: str = ""
    numeric: bool = True
    column: str = ""


@dataclasses.dataclass(frozen=True)
class Cell:
    """`sort`: a number, a text, or None (last). `small`: the interval; `about`: a remark, such as why it is empty."""

    text: str = ""
    sort: float | str | None = None
    small: str = ""
    about: str = ""


def heads(board: Mapping[str, Any]) -> list[Head]:
    """The columns of a leaderboard."""
    metric, columns, several = board["metric"], board["columns"], len(board["columns"]) > 1
    heads = [
        Head("rank", "name", "#", about=f"rank among likelihoods, by {ranked_by(board)}"),
        Head("model", "name", "model", numeric=False),
        Head("estimator", "name", "estimator", numeric=False),
        Head("rule", "name", "rule", numeric=False),
        Head("block", "name", "block"),
        Head("cache", "name", "cache", numeric=False),
    ]
    if board["mean_of"]:
        kind = "mean" if metric == "bits_per_byte" else "geometric mean"
        heads += [
            Head("mean", "mean", kind, f"{len(board['mean_of'])} tasks", "over the tasks that all rows have"),
            Head("mean_rank", "mean", "mean rank", f"{len(board['mean_of'])} tasks", "over the tasks that all have"),
        ]
    for group, unit in (("value", SHORT[metric]), ("bits", "bits/byte"), ("gap", "gap"), ("closed", "gap closed, %")):
        if not _shown(board, group):
            continue
        for column in columns:
            about = {"gap": f"minus {board['ar']}"}.get(group, column["about"])
            heads.append(Head(f"{column['id']}_{group}", group, column["label"], unit, about, column=column["id"]))
        if group == "closed" and several:
            heads.append(Head("gap_closed", group, "average", unit, "over the tasks in which it is known"))
    heads += [
        Head("nfe_per_token", "cost", "NFE", "per token", "rule steps per token"),
        Head("seconds_per_token", "cost", "seconds", "per token", "of scoring; depends on the device"),
        Head("device", "source", "device", numeric=False),
        Head("parameters", "source", "parameters"),
        Head("fingerprint", "source", "fingerprint", "of the spec", numeric=False),
        Head("versions", "source", "versions", numeric=False),
        Head("date", "source", "date", "UTC", numeric=False),
    ]
    return heads


def _shown(board: Mapping[str, Any], group: str) -> bool:
    """Whether a group of task columns has anything to show."""
    if group == "bits":
        return board["metric"] != "bits_per_byte" and _any(board, "bits_per_byte")
    key = {"gap": "gap", "closed": "distinguishable"}.get(group)
    return key is None or _any(board, key)


def _any(board: Mapping[str, Any], key: str) -> bool:
    return any(cell[key] is not None for row in board["rows"] for cell in row["cells"].values())


def ranked_by(board: Mapping[str, Any]) -> str:
    """What rows are ranked by, in words."""
    if board["by"] == "mean":
        return "the mean over tasks"
    name = next((column["label"] for column in board["columns"] if column["id"] == board["by"]), "nothing")
    return f"{WORDS[board['metric']]} of {name}"


def cells(board: Mapping[str, Any], row: Row) -> Iterator[Cell]:
    """The cells of a row, in the order of `heads`."""
    for head in heads(board):
        if head.column:
            cell = row["cells"].get(head.column)
            yield Cell() if cell is None else TASK_CELLS[head.group](cell, row, board["metric"])
        else:
            yield ROW_CELLS.get(head.key, _text)(row, head.key, board["metric"])


# ---------------------------------------------------------------- cells of a task


def bounded(row: Row) -> str:
    """`≤ ` before a bound."""
    return "≤ " if row["kind"] == "bound" else ""


def error(value: float | None, metric: str) -> str:
    """` ± ` and a standard error; with one digit if it is smaller than the shown decimals."""
    if value is None:
        return ""
    text = number(value, metric)
    return f" ± {text if text.strip('0.') else format(value, '.1g')}"


def _own_error(value: float | None, cell: Row, metric: str) -> str:
    """The error of a value of its own; `?` if it has one that is not known."""
    return " ± ?" if value is None and cell["stderr_reason"] else error(value, metric)


def between(interval: Sequence[float] | None, form: Any) -> str:
    """An interval."""
    return "" if interval is None else f"{form(interval[0])} to {form(interval[1])}"


def value(cell: Row, row: Row, metric: str) -> Cell:
    """A perplexity with its own error (Monte Carlo or sampling), and its interval over documents."""
    own = _own_error(cell["stderr"], cell, metric)
    small = between(cell["interval"], lambda x: number(x, metric))
    if not small and cell["window_stderr"] is not None:
        small = f"s.e. {cell['window_stderr']:.2g} over windows"
    remark = "; ".join(filter(None, [cell["stderr_reason"], "" if small else cell["reason"]]))
    return Cell(f"{bounded(row)}{number(cell['value'], metric)}{own}", cell["value"], small, remark)


def _bits(cell: Row, row: Row, metric: str) -> Cell:
    if cell["bits_per_byte"] is None:
        return Cell()
    own = _own_error(cell["bits_per_byte_stderr"], cell, "bits_per_byte").strip()
    return Cell(f"{bounded(row)}{number(cell['bits_per_byte'], 'bits_per_byte')}", cell["bits_per_byte"], own)


def _gap(cell: Row, row: Row, metric: str) -> Cell:
    if cell["gap"] is None:
        return Cell()
    sign = "+" if cell["gap"] > 0 else ""
    small = between(cell["gap_interval"], lambda x: number(x, metric))
    own = _own_error(cell["stderr"], cell, metric)
    return Cell(f"{bounded(row)}{sign}{number(cell['gap'], metric)}{own}", cell["gap"], small)


def _closed(cell: Row, row: Row, metric: str) -> Cell:
    if cell["distinguishable"] is False:
        return Cell(UNCLEAR, None, between(cell["gap_closed_interval"], _percent), cell["gap_closed_reason"])
    if cell["gap_closed"] is None:
        return Cell(about=cell["gap_closed_reason"])
    own = "" if cell["gap_closed_stderr"] is None else f" ± {_percent(cell['gap_closed_stderr'])}"
    small = between(cell["gap_closed_interval"], _percent)
    return Cell(f"{_percent(cell['gap_closed'])}{own}", cell["gap_closed"], small, cell["gap_closed_reason"])


def _percent(share: float) -> str:
    return fixed(share, 1)


TASK_CELLS = {"value": value, "bits": _bits, "gap": _gap, "closed": _closed}


# ---------------------------------------------------------------- cells of a row


def _text(row: Row, key: str, metric: str) -> Cell:
    return Cell(str(row[key] or ""), str(row[key] or "") or None)


def _model(row: Row, key: str, metric: str) -> Cell:
    return Cell(row["model"], row["model"], row["remarks"])


def _estimator(row: Row, key: str, metric: str) -> Cell:
    return Cell(row["display"], row["display"], "", row["about"])


def _rank(row: Row, key: str, metric: str) -> Cell:
    return Cell("" if row["rank"] is None else str(row["rank"]), row["rank"])


def _block(row: Row, key: str, metric: str) -> Cell:
    text = "whole" if row["block"] == "none" else row["block"]
    return Cell(text, math.inf if row["block"] == "none" else float(text) if text.isdecimal() else None)


def _mean(row: Row, key: str, metric: str) -> Cell:
    if row["mean"] is None:
        return Cell()
    unknown = row["mean_stderr"] is None and any(cell["stderr_reason"] for cell in row["cells"].values())
    own = " ± ?" if unknown else error(row["mean_stderr"], metric)
    return Cell(f"{bounded(row)}{number(row['mean'], metric)}{own}", row["mean"])


def _mean_rank(row: Row, key: str, metric: str) -> Cell:
    return Cell() if row["mean_rank"] is None else Cell(fixed(row["mean_rank"], 2), row["mean_rank"])


def _gap_closed(row: Row, key: str, metric: str) -> Cell:
    if row["gap_closed"] is None:
        return Cell()
    own = "" if row["gap_closed_stderr"] is None else f" ± {_percent(row['gap_closed_stderr'])}"
    return Cell(f"{_percent(row['gap_closed'])}{own}", row["gap_closed"], f"{row['gap_closed_tasks']} tasks")


def _nfe(row: Row, key: str, metric: str) -> Cell:
    nfe = row["nfe_per_token"]
    return Cell() if nfe is None else Cell(fixed(nfe, 3), nfe)


def _seconds(row: Row, key: str, metric: str) -> Cell:
    seconds = row["seconds_per_token"]
    return Cell(about=row["seconds_reason"]) if seconds is None else Cell(f"{seconds:.2g}", seconds)


def _parameters(row: Row, key: str, metric: str) -> Cell:
    count = row["parameters"]
    if count is None:
        return Cell()
    scale, unit = next((s, u) for s, u in ((10**9, " B"), (10**6, " M"), (1, "")) if count >= s)
    return Cell(f"{count / scale:.3g}{unit}" if scale > 1 else str(count), count)


def _date(row: Row, key: str, metric: str) -> Cell:
    return Cell(row["date"][:10], row["date"] or None)


def _versions(row: Row, key: str, metric: str) -> Cell:
    text = ", ".join(f"{name} {version}" for name, version in row["versions"].items())
    return Cell(text, text or None)


ROW_CELLS = {
    "model": _model,
    "estimator": _estimator,
    "rank": _rank,
    "block": _block,
    "mean": _mean,
    "mean_rank": _mean_rank,
    "gap_closed": _gap_closed,
    "nfe_per_token": _nfe,
    "seconds_per_token": _seconds,
    "parameters": _parameters,
    "versions": _versions,
    "date": _date,
}
