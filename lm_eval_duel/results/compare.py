"""Results of one task side by side: intervals, gap closed as the paper defines it, paired differences, speeds."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from lm_eval_duel.errors import DuelError
from lm_eval_duel.rates import METRICS
from lm_eval_duel.results import headline, match, pairs, partners, rows, stats
from lm_eval_duel.results.read import Run
from lm_eval_duel.results.records import UNCLEAR, Average, Row, Speeds, TaskComparison
from lm_eval_duel.results.table import WORDS, number
from lm_eval_duel.rules.tables import family

OTHER_UNITS = ("word_perplexity", "byte_perplexity")
BETTER = "the MDM is already better under the ELBO"


@dataclasses.dataclass(frozen=True)
class Choice:
    """How to compare: the metric (None: the first that all have), `--as_published`, `--pairs`."""

    metric: str | None = None
    as_published: bool = False
    pairs: str = pairs.NONE


def tasks(runs: Sequence[Run], ar: Sequence[Run], choice: Choice, named: bool = True) -> dict[str, TaskComparison]:
    """Every task that is in a result other than the AR ones, by name. `named`: the user named the AR results."""
    for name in {name for run in ar for name in run.tasks} if named else ():
        holding = [run.name for run in ar if name in run.tasks]
        if len(holding) > 1:
            raise DuelError(f"--ar holds {name} more than once: {', '.join(holding)}. Name one of these files.")
    baseline = {run.file for run in ar}
    names = dict.fromkeys(name for run in runs if run.file not in baseline for name in run.tasks)
    if not names and not any(run.others for run in runs):
        raise DuelError("Nothing to compare: RESULTS holds no perplexity other than those of the --ar result.")
    return {name: task(name, runs, ar, choice) for name in names}


def task(name: str, runs: Sequence[Run], ar: Sequence[Run], choice: Choice) -> TaskComparison:
    """One task: its rows with intervals and gap closed, paired differences, and the notes under its tables."""
    base = next((run for run in reversed(ar) if name in run.tasks), None)
    compared = [run for run in runs if name in run.tasks and (base is None or run.file != base.file)]
    compared = compared if base is None else [base, *compared]
    metric = _metric(name, choice.metric, compared)
    listed = match.check(name, metric, compared, choice.as_published)
    every = [row for run in compared for row in rows.of(run, name)]
    shown, twice = rows.in_order((row for row in every if metric in row.metrics), base)
    shown = [replace(row, metric=metric) for row in shown]
    rates, documents = _rates(metric, shown)
    draws = {n: stats.value(metric, -rate, 1.0) for n, rate in rates.items()}
    shown = [replace(row, interval=stats.interval(draws[n]) if n in draws else None) for n, row in enumerate(shown)]
    shown, used = _with_gaps(name, _best(shown), draws, choice.as_published)
    shown = [replace(row, cache_cost=pairs.cache_cost(shown, rates, documents, n)) for n, row in enumerate(shown)]
    sizes = {run.tasks[name].size for run in compared} - {None}
    notes = _notes(name, compared, used) + list(dict.fromkeys([*(r for row in every for r in row.remarks), *twice]))
    if metric in OTHER_UNITS and any(row.gap_closed is not None for row in shown):
        notes.append(f"gap closed is of {WORDS[metric]} here: the paper's numbers are per token and not these")
    result = TaskComparison(
        metric=metric,
        documents=sizes.pop() if len(sizes) == 1 else None,
        rows=shown,
        rules=_speeds(shown),
        pairs=pairs.of(choice.pairs, shown, rates, documents),
        elbo=used,
        differences=listed,
        as_published=choice.as_published,
        notes=notes,
    )
    return replace(result, headlines=headline.of(name, result))


def _metric(name: str, requested: str | None, compared: Sequence[Run]) -> str:
    shared = [metric for metric in METRICS if all(metric in run.tasks[name].metrics for run in compared)]
    if requested in shared or (requested is None and shared):
        return requested or shared[0]
    available = "; ".join(f"{run.name}: {', '.join(run.tasks[name].metrics)}" for run in compared)
    wanted = f"{requested} of {name}" if requested else f"a metric of {name} that all results have"
    raise DuelError(f"Wanted {wanted}, but there is: {available}. Name another with --metric, or leave the task out.")


def _rates(metric: str, rows: Sequence[Row]) -> tuple[dict[int, np.ndarray], int]:
    """Bootstrap draws of nats per unit of each row with known documents, by row number, and the number of documents.

    All rows use the same resampling. The draws of a Monte Carlo ELBO include its Monte Carlo error.
    """
    known = [n for n, row in enumerate(rows) if len(row.documents.get(metric, {})) > 1 and math.isfinite(row.value)]
    if not known:
        return {}, 0
    keys = sorted(rows[known[0]].documents[metric])
    known = [n for n in known if rows[n].documents[metric].keys() == set(keys)]
    table = np.array([[rows[n].documents[metric][key] for n in known] for key in keys])  # (documents, rows, 2)
    drawn = stats.rates(table, [rows[n].nats_stderr for n in known])
    return {n: drawn[:, column] for column, n in enumerate(known)}, len(keys)


def _best(rows: Sequence[Row]) -> list[Row]:
    """Mark the lowest likelihood of each model with several rows. Bounds and the oracle do not count."""
    best = set()
    for model in {row.model for row in rows}:
        proper = [n for n, row in enumerate(rows) if row.model == model and row.likelihood and not row.ar]
        exact = [n for n in proper if rows[n].proper and math.isfinite(rows[n].value)]
        best |= {min(exact, key=lambda n: rows[n].value)} if len(proper) > 1 and exact else set()
    return [replace(row, best=n in best) for n, row in enumerate(rows)]


def _notes(name: str, compared: Sequence[Run], elbos: Sequence[str]) -> list[str]:
    """Notes on unknown tokens, ELBOs, networks in low precision (whose orders and sums are coarser), and windows."""
    shares = dict.fromkeys((run.label, run.unknown(name)) for run in compared if run.unknown(name))
    notes = [
        f"{share:.1%} of the tokens of {label} are [UNK]: its bits per byte, byte and word perplexity are not a "
        "likelihood of the text"
        for label, share in shares
    ]
    notes += elbos
    cuts: dict[str, dict[str, None]] = {}
    for run in compared:
        cuts.setdefault(run.label, {})[str(match.windows(run))] = None
        if run.dtype not in ("float32", "float64"):
            default = "" if run.ours else " (the default of --model hf; dtype=float32 changes it)"
            notes.append(f"{run.label} ran in {run.dtype}{default}: {run.short_name}")
    return [*notes, "windows: " + "; ".join(f"{label}: {' and '.join(of_label)}" for label, of_label in cuts.items())]


def _speeds(rows: Sequence[Row]) -> list[Speeds]:
    """Rule families against NFE, for each model, block and cache with two or more different NFEs."""
    groups: dict[tuple, list[int]] = {}
    for n, row in enumerate(rows):
        if row.estimator == "duel" and row.nfe_per_token:
            groups.setdefault((row.model, row.block, row.cache, row.variant), []).append(n)
    result = []
    for (model, block, cache, variant), members in groups.items():
        if len({round(rows[n].nfe_per_token, 3) for n in members}) < 2:
            continue
        families: dict[str, list[int]] = {}
        for n in members:
            families.setdefault(family(rows[n].rule)[0], []).append(n)
        oracle = model, "oracle", block, cache
        result.append(
            Speeds(
                title=", ".join(filter(None, [model, *rows[members[0]].setting, variant])),
                elbo=next((rows[n].elbo for n in members if rows[n].elbo is not None), None),
                ar=next((n for n, row in enumerate(rows) if row.ar), None),
                oracle=next(
                    (n for n, r in enumerate(rows) if (r.model, r.estimator, r.block, r.cache) == oracle), None
                ),
                families={
                    name: sorted(points, key=lambda n: rows[n].nfe_per_token) for name, points in families.items()
                },
            )
        )
    return result


# ---------------------------------------------------------------- gap closed


def _with_gaps(
    name: str, rows: Sequence[Row], draws: Mapping[int, np.ndarray], as_published: bool
) -> tuple[list[Row], list[str]]:
    """The rows with gap and gap closed, and descriptions of the ELBOs used."""
    result, used = [], {}
    base = 0 if rows and rows[0].ar else None
    for n, row in enumerate(rows):
        if base is not None and n != base:
            interval = stats.interval(draws[n] - draws[base]) if n in draws and base in draws else None
            row = replace(row, gap=row.value - rows[base].value, gap_interval=interval)
        if row.duel:
            elbo, why = partners.elbo(row, rows, as_published)
            row = replace(row, elbo=elbo)
            if elbo is not None:
                used[elbo] = partners.elbo_in_words(rows[elbo]) + (f" ({why})" if why else "")
            if row.metric == "bits_per_byte":
                row = replace(row, gap_closed_reason="gap closed is defined for perplexities")
            elif base is None or elbo is None:
                row = replace(row, gap_closed_reason=why if elbo is None else f"no AR result of {name} (--ar)")
            else:
                row = _with_gap_closed(row, rows[elbo], rows[base], [draws.get(i) for i in (elbo, n, base)])
        result.append(row)
    return result, [text for _, text in sorted(used.items())]


def _with_gap_closed(row: Row, elbo: Row, ar: Row, draws: Sequence[np.ndarray | None]) -> Row:
    if not all(math.isfinite(one.value) for one in (elbo, row, ar)):
        return replace(row, gap_closed_reason="no gap closed of an infinite perplexity")
    if not stats.clear(elbo.value, ar.value, elbo.stderr_bound):
        reason = f"{UNCLEAR}: ELBO {_with_error(elbo)} and {ar.model} {number(ar.value)}"
        return replace(row, gap_closed_reason=reason)
    closed, error = _closed(elbo, row, ar)
    if closed is None:
        return replace(row, gap_closed_reason=BETTER)
    known = [e for e in (elbo.stderr_bound, row.stderr_bound) if e is not None]
    clear = stats.clear(elbo.value, row.value, math.hypot(*known) if known else None)
    value = number(row.value) if row.stderr_bound is None else _with_error(row)
    reasons = ["" if clear else f"{UNCLEAR}: ELBO {_with_error(elbo)} and DUEL {value}"]
    reasons += [elbo.stderr_reason, row.stderr_reason]
    interval = None
    if any(drawn is None for drawn in draws):
        lacking = next(one for one, drawn in zip((elbo, row, ar), draws, strict=True) if drawn is None)
        reasons.append(f"no interval: {lacking.model}, {lacking.name}: {lacking.reason}")
    else:
        interval, remark = stats.gap_interval(*draws)
        reasons.append(remark)
    return replace(
        row,
        distinguishable=clear,
        gap_closed=closed if clear else None,
        gap_closed_stderr=error if clear else None,
        gap_closed_interval=interval,
        gap_closed_reason="; ".join(filter(None, reasons)),
    )


def _closed(elbo: Row, row: Row, ar: Row) -> tuple[float | None, float | None]:
    """Gap closed and its Monte Carlo error, whether or not it is distinguishable from 0; an exact DUEL has none."""
    values = elbo.value, row.value, ar.value
    closed = stats.gap_closed(*values)
    own = 0.0 if row.stderr_bound is None else row.stderr
    return closed, None if closed is None else stats.gap_closed_stderr(*values, elbo.stderr, own)


def _with_error(row: Row) -> str:
    return f"{number(row.value)} +- {'?' if row.stderr is None else number(row.stderr)}"


def averages(compared: Mapping[str, Sequence[Row]]) -> list[Average]:
    """Gap closed of each DUEL row over tasks.

    The average includes every task with a gap closed, also those where it is within its error of 0: without them the
    average would be too high. It has a standard error if all of them have one, and is not shown if it is within two
    standard errors of 0.
    """
    found: dict[tuple[str, str], dict[str, tuple[Row, Sequence[Row]]]] = {}
    for task, shown in compared.items():
        for row in shown:
            if row.duel:
                found.setdefault((row.model, row.name), {})[task] = (row, shown)
    result = []
    for (model, name), tasks in found.items():
        known = [
            _closed(beside[row.elbo], row, beside[0])
            for row, beside in tasks.values()
            if row.distinguishable is not None
        ]
        errors = [error for _, error in known]
        average = sum(value for value, _ in known) / len(known) if len(known) > 1 else None
        error = math.hypot(*errors) / len(known) if average is not None and None not in errors else None
        unclear = average is not None and not stats.clear(average, 0.0, error)
        result.append(
            Average(
                model,
                name,
                tasks={task: row.gap_closed for task, (row, _) in tasks.items()},
                stderrs={task: row.gap_closed_stderr for task, (row, _) in tasks.items()},
                unclear=[task for task, (row, _) in tasks.items() if row.distinguishable is False],
                average=None if unclear else average,
                average_stderr=error,
                average_unclear=unclear,
                averaged=len(known),
            )
        )
    return result
