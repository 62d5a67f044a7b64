"""The tables of a report: what their rows are, and which columns they have."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from lm_eval_duel.results import gaps
from lm_eval_duel.results.averages import AveragePair
from lm_eval_duel.results.compare import ComparedRow, Comparison, Speeds
from lm_eval_duel.results.gaps import Pair
from lm_eval_duel.results.ranks import TIED, is_tied
from lm_eval_duel.results.rows import Row
from lm_eval_duel.results.standings import MEAN, ORACLE, Standing, Standings
from lm_eval_duel.results.stats import UNCLEAR
from lm_eval_duel.results.table import (
    LEVEL,
    MINUS,
    WORDS,
    Bold,
    Cell,
    Columns,
    Head,
    Note,
    Table,
    form_of,
    number,
    span,
)
from lm_eval_duel.rules import adaptive, without_defaults

SHORT = {  # heads of values after the name of a task
    "token_perplexity": "ppl/token",
    "perplexity": "ppl/document",
    "word_perplexity": "ppl/word",
    "byte_perplexity": "ppl/byte",
    "bits_per_byte": "bits/byte",
}
WHOLE_TARGET = "whole target"


# ---------------------------------------------------------------- names


def names_of_rows(rows: Sequence[Row]) -> Columns:
    """The columns that name rows."""
    any_cache = any(row.run.has_cache for row in rows)
    return {
        "model": lambda row: row.model,
        "estimator": lambda row: row.title,
        "rule": lambda row: without_defaults(row.rule or ""),
        "block": lambda row: WHOLE_TARGET if row.block == "none" else row.block,
        "cache": lambda row: row.cache if any_cache else "",
    }


def names_of_compared(compared: Sequence[ComparedRow]) -> Columns:
    """The columns that name rows of a table."""
    return through(lambda each: each.row, names_of_rows([each.row for each in compared]))


def through(record: Callable[[Any], Any], columns: Columns) -> Columns:
    """Columns for objects that hold a record: `record(each)` is what `columns` show."""
    shown: Columns = {}
    for head, cell in columns.items():
        shown[head] = lambda each, cell=cell: cell(record(each))  # bound now: `cell` changes with the loop
    return shown


# ---------------------------------------------------------------- cells


def value(row: Row | None, metric: str | None = None) -> str:
    """A row's value, or its value in another metric, with its bound and its Monte Carlo error."""
    if row is None:
        return ""
    metric = metric or row.metric
    error = row.error(row.score.error, metric)
    return number(row.metrics.get(metric), form_of(metric), error, row.score.is_bound, bool(row.stderr_reason))


def value_with_remark(row: Row | None) -> Cell:
    """A row's value, with what puts it in doubt, or the reason that it has no error."""
    return None if row is None else (value(row), row.about_value)


def marked(each: ComparedRow) -> str:
    """A row's value, in bold if it is the best of its model."""
    text = value(each.row)
    return Bold(text) if each.best else text


def marked_with_remark(each: ComparedRow) -> Cell:
    """The same, with what puts the value in doubt, or the reason that it has no error."""
    return marked(each), each.row.about_value


def interval(each: ComparedRow) -> str:
    """The interval over documents of a row's value, or else its error over windows."""
    if each.interval is not None:
        return span(each.interval, form_of(each.row.metric))
    return "" if each.window_stderr is None else f"s.e. {number(each.window_stderr, '.2g')} over windows"


def interval_with_remark(each: ComparedRow) -> Cell:
    """The same, with the reason that there is no interval, or a remark on one from few documents."""
    return interval(each), each.about_interval


def with_interval(each: ComparedRow) -> Cell:
    """A row's value with its interval in brackets, and the remarks on both."""
    text = marked(each)
    start = "no interval: "
    if each.interval is not None:
        text = type(text)(f"{text} ({span(each.interval, form_of(each.row.metric))})")  # bold stays bold
        start = "interval "
    return text, Note.joined([each.row.about_value, each.about_interval.after(start)])


def gap(row: Row | None, difference: float | None) -> str:
    """A gap to the autoregressive model, with the bound and the error of the row's value."""
    if row is None:
        return ""
    return number(difference, f"+{form_of(row.metric)}", row.stderr, row.score.is_bound, bool(row.stderr_reason))


def gap_interval(each: ComparedRow) -> str:
    return span(each.gap_interval, f"+{form_of(each.row.metric)}")


def closed(each: ComparedRow, unit: str = "") -> str:
    """Gap closed, or that it is not distinguishable from 0."""
    if each.closed.percent is None:
        return UNCLEAR if each.closed.distinguishable is False else ""
    return number(each.closed.percent, ".1f", each.closed.stderr) + unit


def closed_with_remark(each: ComparedRow) -> Cell:
    """The same, with what puts the values in doubt that it is computed from, or the reason that it is not known."""
    text = closed(each)
    if not text:
        return text, each.closed.reason
    doubts = doubts_of(each.row, each.closed.elbo, each.closed.ar)
    return text, Note.joined([doubts, each.closed.reason])


def closed_interval(each: ComparedRow) -> str:
    return span(each.closed.interval, ".1f")


# ---------------------------------------------------------------- of a task


SINGLE = (
    "Each 95 % interval holds for its pair alone. Among twenty pairs that do not differ, about one is still called "
    "different."
)
OVER_DOCUMENTS = "95 % intervals are over documents."
WITH_ERRORS = "95 % intervals are over documents, and include the Monte Carlo error of each value."
IN_BRACKETS = "A 95 % interval stands in brackets."
UNKNOWN_ERRORS = (
    "A value with ± ? has an unknown error: its interval includes only the part of it that varies between documents."
)
BEST = "Bold: the lowest exact value of a model with several rows."
ALONE = "± is the Monte Carlo or sampling error alone."
PLACES = (
    f"Differences are of {MINUS}log p, from the row with the next lower value and from the row of rank 1: above 0 the "
    f"row is worse. {TIED.capitalize()}: the interval contains 0."
)
NAMES_OF_PAIR = f"first {MINUS} second"
SIGN = f"Differences are of {MINUS}log p, first {MINUS} second: below 0 the first is better."
SHARED = "The first columns name what both rows share: a cell is empty where they differ."
NO_VERDICT = "no verdict"
SIGN_OF_COST = f"Costs are of {MINUS}log p, with the cache {MINUS} without it: above 0 the cache makes it worse."


def of_task(task: Comparison) -> Iterator[tuple[str, Table]]:
    """The tables of a task, each with the stem of its file."""
    duels = [each for each in task.rows if each.row.is_duel]
    if duels:
        yield "gap", gaps_of(duels)
    yield "methods", values(task)
    ranked = [each for each in task.rows if each.place]
    if len(ranked) > 1:
        yield "ranks", places(ranked)
    cached = [each for each in task.rows if each.cache_cost]
    if cached:
        yield "cache", cache_costs(cached)
    if task.pairs:
        yield "pairs", differences(task)
    if task.rules:
        yield "rules", speeds(task.rules)


def values(task: Comparison) -> Table:
    """Perplexity of every row with its interval or standard error, or a remark that says why it has neither."""
    shown: Columns = {
        **names_of_compared(task.rows),
        WORDS[task.metric]: marked_with_remark,
        LEVEL: interval_with_remark,
    }
    if task.metric != "bits_per_byte":
        shown["bits per byte"] = lambda each: value(each.row, "bits_per_byte")
    return Table.from_records(WORDS[task.metric], task.rows, shown, about_errors(task.rows), BEST)


def about_errors(compared: Sequence[ComparedRow]) -> str:
    """Sentences on the intervals of values and on the errors of drawn ones; empty without either."""
    behind_intervals = [each.row for each in compared if each.interval]
    return _about_errors(behind_intervals, [each.row for each in compared])


def _about_errors(behind_intervals: Sequence[Row], shown: Sequence[Row]) -> str:
    """The same. `behind_intervals`: the rows that intervals of a table are computed from. `shown`: with a value."""
    sentences = []
    drawn = [row for row in behind_intervals if row.is_drawn]
    if any(row.stderr is not None for row in drawn):
        sentences.append(WITH_ERRORS)
    elif behind_intervals:
        sentences.append(OVER_DOCUMENTS)
    if any(row.stderr is None for row in drawn):
        sentences.append(UNKNOWN_ERRORS)
    if any(row.stderr is not None for row in shown):
        sentences.append(ALONE)
    return " ".join(sentences)


def places(ranked: Sequence[ComparedRow]) -> Table:
    """Rank, value, and the paired differences from the next lower value and from the lowest, best first."""
    best_first = sorted(ranked, key=lambda each: each.row.value)
    metric = best_first[0].row.metric
    unit = gaps.difference_unit(metric)
    shown: Columns = {
        "rank": lambda each: str(each.place.rank),
        **names_of_compared(best_first),
        WORDS[metric]: lambda each: value_with_remark(each.row),
    }
    for attribute, title in (("next_lower", "next lower"), ("lowest", "lowest")):
        group = f"from the {title}"
        shown[Head(group, group, unit)] = of_other_row(attribute, _difference)
        shown[Head(f"{title}: {LEVEL}", group, LEVEL)] = of_other_row(attribute, interval_of)
        shown[Head(f"{title}: worse?", group, "worse?")] = of_other_row(attribute, is_worse)
    pairs = []
    for each in best_first:
        pairs += filter(None, [each.place.next_lower, each.place.lowest])
    about = _with_single(PLACES, pairs)
    return Table.from_records(f"Ranks, and paired differences in {unit}", best_first, shown, about)


def of_other_row(attribute: str, cell: Callable[[Pair], Any]) -> Callable[[ComparedRow], Any]:
    """The cells of rows for an attribute of `Place`: what `cell` shows of that pair.

    Empty for the row of rank 1, and for rows without a rank.
    """

    def cell_of_row(each: ComparedRow) -> Any:
        pair = getattr(each.place, attribute) if each.place else None
        return cell(pair) if pair else ""

    return cell_of_row


def interval_of(pair: Pair) -> str:
    return span(pair.interval, "+.4f")


def is_worse(pair: Pair) -> Cell:
    """`yes` if the first row of a pair is worse than the second one, or why that is not known."""
    if is_tied(pair):
        return TIED
    return "yes" if pair.better else _better(pair)


def gaps_of(duels: Sequence[ComparedRow]) -> Table:
    """ELBO, DUEL, their gaps to the AR model, and gap closed, of each DUEL row."""
    names = names_of_compared(duels)
    shown: Columns = {
        "model": names["model"],
        "remarks": lambda each: each.row.qualifiers,
        "rule": names["rule"],
        "block": names["block"],
        "cache": names["cache"],
        Head("ELBO", "ELBO", "value"): lambda each: value_with_remark(each.closed.elbo),
        Head("which ELBO", "ELBO", "which"): lambda each: each.closed.of,
        Head("DUEL", "DUEL", "value"): lambda each: value_with_remark(each.row),
        Head(LEVEL, "DUEL", LEVEL): interval_with_remark,
        "ELBO's gap": elbo_gap_with_remark,
        Head("DUEL's gap", "DUEL's gap", "value"): gap_with_remark,
        Head(f"DUEL's gap: {LEVEL}", "DUEL's gap", LEVEL): gap_interval,
        Head("gap closed", "gap closed", "share"): lambda each: (closed(each, " %"), each.closed.reason),
        Head(f"gap closed: {LEVEL}", "gap closed", LEVEL): closed_interval,
    }
    return Table.from_records("Gap to the autoregressive model", duels, shown, about_gaps(duels))


def about_gaps(duels: Sequence[ComparedRow]) -> str:
    """Sentences on the intervals and errors of DUEL rows, their ELBOs and what is computed from both."""
    behind_intervals = []
    shown = []
    for each in duels:
        of_row = [row for row in (each.row, each.closed.elbo, each.closed.ar) if row is not None]
        shown += of_row
        if each.closed.interval:
            behind_intervals += of_row
        elif each.interval:
            behind_intervals.append(each.row)
    return _about_errors(behind_intervals, shown)


def elbo_gap_with_remark(each: ComparedRow) -> Cell:
    """The gap of a row's ELBO to the baseline, with what puts the baseline in doubt, and what differs from it."""
    text = gap(each.closed.elbo, each.closed.elbo_gap)
    return (text, Note.joined([doubts_of(each.closed.ar), each.closed.about_elbo_gap])) if text else ""


def gap_with_remark(each: ComparedRow) -> Cell:
    """A row's gap to the baseline, with what puts the baseline in doubt, and what differs from it."""
    text = gap(each.row, each.gap)
    return (text, Note.joined([doubts_of(each.closed.ar), each.about_gap])) if text else ""


def cache_costs(cached: Sequence[ComparedRow]) -> Table:
    """Each row under a cache, the row without one, and their paired difference: above 0, the cache costs."""
    unit = gaps.difference_unit(cached[0].row.metric)
    shown: Columns = {
        **names_of_compared(cached),
        "cache=none": lambda each: value_with_remark(each.cache_cost.second),
        "with the cache": lambda each: value_with_remark(each.row),
        "better": lambda each: _better(each.cache_cost),
        f"cost, {unit}": lambda each: _difference(each.cache_cost),
        LEVEL: lambda each: interval_of(each.cache_cost),
    }
    return Table.from_records(f"Cost of the cache, {unit}", cached, shown, SIGN_OF_COST)


def differences(task: Comparison) -> Table:
    """The task's pairs: what both rows share, their names, which is better, and the paired difference."""
    unit = gaps.difference_unit(task.metric)
    shown = names_of_pairs([each.row for each in task.rows])
    about = f"{SIGN} {about_shared(shown, task.pairs)}".strip()
    shown[NAMES_OF_PAIR] = lambda pair: (joined_names(pair), doubts_of(pair.first, pair.second))
    shown["better"] = _better
    shown[f"difference, {unit}"] = _difference
    shown[LEVEL] = interval_of
    about = _with_single(about, task.pairs)
    return Table.from_records(f"Paired differences, {unit}", task.pairs, shown, about)


def about_shared(names: Columns, pairs: Sequence[Pair | AveragePair]) -> str:
    """The remark on the columns of what both rows of a pair share; empty if no pair shares anything."""
    cells = [cell(pair) for cell in names.values() for pair in pairs]
    return SHARED if any(cells) else ""


def _with_single(sentence: str, pairs: Iterable[Pair]) -> str:
    """The remark on a table of differences; on their intervals only if a pair has one."""
    return f"{sentence} {SINGLE}" if any(pair.interval for pair in pairs) else sentence


def names_of_pairs(rows: Sequence[Row]) -> Columns:
    """The columns for what the two rows of a pair share. `rows`: of all pairs."""
    return {head: _shared(cell) for head, cell in names_of_rows(rows).items()}


def joined_names(pair: Pair | AveragePair) -> str:
    return f" {MINUS} ".join(pair.names)


def _shared(cell: Callable[[Row], Cell]) -> Callable[[Pair | AveragePair], Cell]:
    """The cell of a row as one of a pair: that of both rows, empty if they differ."""

    def cell_of_both(pair: Pair | AveragePair) -> Cell:
        of_first = cell(pair.first)
        return of_first if of_first == cell(pair.second) else ""

    return cell_of_both


def doubts_of(*rows: Row | None) -> Note:
    """The remarks on the values of rows, each once, for what is computed from them."""
    sentences: dict[str, None] = {}
    for row in filter(None, rows):
        sentences |= dict.fromkeys(row.run.doubts)
    return Note("; ".join(sentences))


def _better(pair: Pair) -> Cell:
    """The better of the two, or why there is no verdict."""
    text = pair.better or pair.verdict
    return text or (NO_VERDICT, pair.reason)


def _difference(pair: Pair) -> Cell:
    return number(pair.difference, "+.4f"), pair.reason


def speeds(of_task: Sequence[Speeds]) -> Table:
    """The perplexity and NFE of each rule, its interval with it, of every setting that has several speeds."""
    compared: list[ComparedRow] = []
    for of_setting in of_task:
        compared += of_setting.rows
    metric = compared[0].row.metric
    form = form_of(metric)
    names = names_of_compared(compared)
    shown: Columns = {
        "model": names["model"],
        "remarks": lambda each: each.row.qualifiers,
        "block": names["block"],
        "cache": names["cache"],
        "rule": names["rule"],
        "steps": lambda each: "adaptive" if adaptive(each.row.rule) else "",
        "NFE per token": lambda each: number(each.row.nfe_per_token, ".3f"),
        f"DUEL, {WORDS[metric]}": lambda each: value_with_remark(each.row),
        LEVEL: lambda each: (span(each.interval, form), each.about_interval),
    }
    return Table.from_records("Rules against NFE", compared, shown)


# ---------------------------------------------------------------- over tasks


def perplexities(standings: Standings, tasks: Mapping[str, Comparison]) -> Table:
    """The value of every method on every task, with ranks and means."""
    shown = _over_tasks(tasks, with_interval)
    if standings.mean_of:
        shown[mean_title(standings)] = lambda row: mean(standings, row)
        shown["mean rank"] = mean_rank
    shown["rank"] = rank
    with_perplexities = [row for row in standings.rows if row.method.rows]
    compared = [each for task in tasks.values() for each in task.rows]
    sentences = []
    if any(each.interval for each in compared):
        sentences.append(IN_BRACKETS)
    sentences.append(about_errors(compared))
    if any(row.rank for row in standings.rows):
        sentences.append(ranked_by(standings, tasks))
    return Table.from_records("Perplexities", with_perplexities, shown, " ".join(filter(None, sentences)), BEST)


def ranked_by(standings: Standings, tasks: Mapping[str, Comparison]) -> str:
    """A sentence on the value that rows are ranked by, and on those without a rank."""
    if standings.by == MEAN:
        by = f"the {standings.mean_kind} of {WORDS[standings.metric]} over {len(standings.mean_of)} tasks"
    else:
        by = f"{WORDS[tasks[standings.by].metric]} on {standings.by}"
    kinds = {row.method.kind for row in standings.rows if row.method.rows}
    without = []
    if "bound" in kinds:
        without.append("bounds (≤)")
    if ORACLE in kinds:
        without.append("the oracle")
    sentence = f"Likelihoods and estimates are ranked by {by}"
    if without:
        verb = "has" if without == ["the oracle"] else "have"
        sentence += f"; {' and '.join(without)} {verb} no rank"
    return f"{sentence}."


def gaps_closed(standings: Standings, tasks: Mapping[str, Comparison]) -> Table:
    """Gap closed of every DUEL row on every task."""
    duels = [row for row in standings.rows if row.method.is_duel]
    compared = [each for task in tasks.values() for each in task.rows]
    about = ALONE if any(each.closed.stderr is not None for each in compared) else ""
    return Table.from_records("Gap closed over tasks, %", duels, _over_tasks(tasks, closed_with_remark), about)


def _over_tasks(tasks: Mapping[str, Comparison], cell: Callable[[ComparedRow], Cell]) -> Columns:
    """The names of a method, and a column for each task."""
    shown: Columns = {"model": lambda row: row.method.named.model, "method": lambda row: row.method.named.name}
    for name, task in tasks.items():
        shown[f"{name}, {WORDS[task.metric]}"] = on_task(name, cell)
    return shown


def on_task(name: str, cell: Callable[[ComparedRow], Any]) -> Callable[[Standing], Any]:
    """The cell of a method's row on a task; empty if it has none."""
    return lambda row: cell(row.method.rows[name]) if name in row.method.rows else ""


def rank(row: Standing) -> str:
    return str(row.rank or "")


def mean(standings: Standings, row: Standing) -> str:
    return number(row.mean, form_of(standings.metric), bound=row.method.named.score.is_bound)


def mean_rank(row: Standing) -> str:
    return number(row.mean_rank, ".2f")


def mean_title(standings: Standings) -> str:
    return f"{standings.mean_kind}, {len(standings.mean_of)} tasks"
