"""The columns of a leaderboard, shared by the page, Markdown, the terminal and CSV."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from lm_eval_duel.results import as_json, columns, published
from lm_eval_duel.results.board import KINDS, Board, BoardRow
from lm_eval_duel.results.rows import Row
from lm_eval_duel.results.table import Cell, Table, bullets, csv_text, escape, form_of, number, span

SHORT = {  # heads of the metric's own columns
    "token_perplexity": "ppl/token",
    "perplexity": "ppl",
    "word_perplexity": "ppl/word",
    "byte_perplexity": "ppl/byte",
    "bits_per_byte": "bits/byte",
}


class Head(NamedTuple):
    """A column: its title, the group that the page can hide, and what it shows of a row."""

    title: str
    group: str
    cell: Callable[[BoardRow], Cell]
    numeric: bool = True


def heads(board: Board) -> list[Head]:
    """The columns of a leaderboard. Errors are of Monte Carlo or sampling, intervals over documents."""
    form, bits = form_of(board.metric), "bits_per_byte"
    every = [
        Head("#", "name", lambda row: str(row.rank or "")),
        Head("model", "name", _model, numeric=False),
        Head("estimator", "name", lambda row: row.display, numeric=False),
        Head("rule", "name", lambda row: row.rule, numeric=False),
        Head("block", "name", lambda row: "whole" if row.block == "none" else row.block),
        Head("cache", "name", lambda row: row.cache, numeric=False),
    ]
    if board.mean_of:
        kind = "mean" if board.metric == bits else "geometric mean"
        every += [
            Head(f"{kind}, {len(board.mean_of)} tasks", "mean", lambda row: _mean(row, form)),
            Head("mean rank", "mean", lambda row: "" if row.mean_rank is None else number(row.mean_rank)),
        ]
    results = [result for row in board.rows for result in row.results.values()]
    there: dict[str, tuple[bool, str, Callable[[Row], Cell]]] = {
        "value": (True, SHORT[board.metric], _value),
        "bits": (board.metric != bits, "bits/byte", lambda result: columns.value(result, bits)),
        "gap": (any(result.gap is not None for result in results), "gap", _gap),
        "closed": (any(r.distinguishable is not None for r in results), "gap closed, %", _closed),
    }
    for group, (shown, short, read) in there.items():
        for column in board.columns if shown else ():
            every.append(Head(f"{column.label} {short}", group, _of(column.id, read)))
    return [
        *every,
        Head("NFE per token", "cost", lambda row: _number(row.nfe_per_token, ".3f")),
        Head("seconds per token", "cost", lambda row: _number(row.seconds_per_token, ".2g")),
        Head("device", "source", lambda row: row.device, numeric=False),
        Head("parameters", "source", lambda row: _number(row.parameters, ",d")),
        Head("fingerprint", "source", lambda row: row.fingerprint, numeric=False),
        Head("versions", "source", lambda row: ", ".join(map(" ".join, row.versions.items())), numeric=False),
        Head("date", "source", lambda row: row.date[:10], numeric=False),
    ]


def table(board: Board, heads: Sequence[Head], rows: Sequence[BoardRow]) -> Table:
    return Table.of(board.title, rows, {head.title: head.cell for head in heads})


def _of(column: str, read: Callable[[Row], Cell]) -> Callable[[BoardRow], Cell]:
    return lambda row: read(row.results[column]) if column in row.results else ""


def _model(row: BoardRow) -> str:
    remarks = filter(None, ["AR" if row.autoregressive else "", row.remarks])
    return " ".join([row.model, *(f"({remark})" for remark in remarks)])


def _number(value: float | None, form: str) -> str:
    return "" if value is None else number(value, form)


def _in_brackets(text: str, more: str) -> str:
    return f"{text} ({more})" if more else text


def _value(result: Row) -> Cell:
    """A result's value. Its remark says why it has no error or interval."""
    more = columns.interval(result)
    reasons = [result.stderr_reason, "" if result.window_stderr is not None else result.reason]
    return _in_brackets(str(columns.value(result)), more), "; ".join(filter(None, reasons))


def _gap(result: Row) -> str:
    text = ("≤ " if result.bound and result.gap is not None else "") + columns.gap(result)
    return _in_brackets(text, span(result.gap_interval, f"+{form_of(result.metric)}"))


def _closed(result: Row) -> Cell:
    text = _in_brackets(columns.closed(result), span(result.gap_closed_interval, ".1f"))
    return text, result.gap_closed_reason


def _mean(row: BoardRow, form: str) -> str:
    return "" if row.mean is None else ("≤ " if row.kind == "bound" else "") + number(row.mean, form)


# ---------------------------------------------------------------- forms


def about(board: Board) -> str:
    """A description of the numbers."""
    baseline = f" Gaps are to {board.ar}." if board.ar else ""
    return (
        f"{board.unit.capitalize()}, lower is better. Rank: among likelihoods, by {board.ranked_by}; bounds (≤) and "
        f"the oracle have none.{baseline} In brackets: 95 % interval over documents. ±: standard error of a Monte "
        "Carlo or sampled estimate."
    )


def page(board: Board) -> str:
    """leaderboard.md."""
    parts = [f"# {escape(board.title)}", escape(about(board))]
    columns = [head for head in heads(board) if head.title not in ("versions", "device")]
    for title, rows in board.groups:
        parts += [f"## {title}" if title else "", table(board, columns, rows).markdown()]
    for source in board.published:
        parts += [f"## Published: {escape(source['source'])}", published.UNCHECKED, published.table(source).markdown()]
    if several := [column for column in board.columns if column.apart]:
        parts += ["## Columns", bullets(f"{column.label}: {column.apart}" for column in several)]
    parts += ["## Notes", bullets(board.notes)] if board.notes else []
    return "\n\n".join(filter(None, parts)) + "\n"


def console(board: Board) -> str:
    """The text that the command prints: ranks, names, means and perplexities."""

    def bare(head: Head) -> Callable[[BoardRow], str]:
        def shown(row: BoardRow) -> str:
            cell = head.cell(row)
            text = cell[0] if isinstance(cell, tuple) else cell or ""
            return text.partition(" (")[0] if head.group == "value" else text

        return shown

    columns = [head._replace(cell=bare(head)) for head in heads(board) if head.group in ("name", "mean", "value")]
    columns[2] = columns[2]._replace(cell=_estimator)
    rows = [row for _, rows in board.groups for row in rows]
    return "\n\n".join(filter(None, [table(board, columns, rows).text(), "\n".join(board.notes)]))


def _estimator(row: BoardRow) -> str:
    return f"{row.display} ({KINDS[row.kind]})" if row.kind == "oracle" else row.display


def csv(board: Board) -> str:
    """leaderboard.csv: a line for each result, with unrounded numbers."""
    lines = []
    for row in board.rows:
        names = {key: getattr(row, key) for key in ("rank", "model", "estimator", "kind", "rule", "block", "cache")}
        costs = {key: getattr(row, key) for key in ("nfe_per_token", "seconds_per_token", "device", "parameters")}
        costs |= {"dtype": row.run.dtype, "fingerprint": row.fingerprint, "date": row.date}
        for column in board.columns:
            if column.id in row.results:
                means = {"mean": row.mean, "mean_rank": row.mean_rank} if board.mean_of else {}
                own = {"task": column.label, "metric": board.metric, **_flat(as_json.cell(row.results[column.id]))}
                lines.append(names | {"remarks": row.remarks} | means | own | costs)
    return csv_text(lines)


def _flat(entries: dict[str, Any]) -> dict[str, Any]:
    """Entries with the ends of each interval in separate columns."""
    flat: dict[str, Any] = {}
    for key, value in entries.items():
        if key.endswith("interval"):
            low, high = value or (None, None)
            flat |= {f"{key} low": low, f"{key} high": high}
        else:
            flat[key] = value
    return flat
