"""Results of one task side by side: intervals, gap closed as the paper defines it, paired differences, speeds."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from lm_eval_duel.errors import DuelError
from lm_eval_duel.rates import METRICS
from lm_eval_duel.results import arrange, elbos, headline, match, pairs, stats
from lm_eval_duel.results.read import Run
from lm_eval_duel.results.records import UNCLEAR, Average, Family, Point, Row, Speeds, TaskComparison
from lm_eval_duel.results.rows import of as rows_of
from lm_eval_duel.results.table import WORDS, number
from lm_eval_duel.rules.tables import adaptive, family

OTHER_UNITS = ("word_perplexity", "byte_perplexity")
BETTER = "the MDM is already better under the ELBO"
Traced = Mapping[str, Mapping[str, Mapping[str, Mapping[int, float]]]]  # results file -> task -> value -> document


@dataclasses.dataclass(frozen=True)
class Choice:
    """How to compare: the metric (None: the first that all have), `--as_published`, `--pairs`."""

    metric: str | None = None
    as_published: bool = False
    pairs: str = pairs.NONE


def tasks(
    runs: Sequence[Run], ar: Sequence[Run], choice: Choice, traced: Traced, named: bool = True
) -> dict[str, TaskComparison]:
    """Every task that is in a result other than the AR ones, by name. `named`: the user named the AR results."""
    baseline = {run.file for run in ar}
    for name in {name for run in ar for name in run.tasks} if named else ():
        holding = [run.name for run in ar if name in run.tasks]
        if len(holding) > 1:
            raise DuelError(f"--ar holds {name} more than once: {', '.join(holding)}. Name one of these files.")
    names = dict.fromkeys(name for run in runs if run.file not in baseline for name in run.tasks)
    if not names and not any(run.others for run in runs):
        raise DuelError("Nothing to compare: RESULTS holds no perplexity other than those of the --ar result.")
    return {name: task(name, runs, ar, choice, traced) for name in names}


def task(name: str, runs: Sequence[Run], ar: Sequence[Run], choice: Choice, traced: Traced) -> TaskComparison:
    """One task: its rows with intervals and gap closed, paired differences, and the notes under its tables."""
    base = next((run for run in reversed(ar) if name in run.tasks), None)
    others = [run for run in runs if name in run.tasks and (base is None or run.file != base.file)]
    compared = others if base is None else [base, *others]
    metric = _metric(name, choice.metric, compared)
    listed = match.check(name, metric, compared, choice.as_published)
    every = [row for run in compared for row in rows_of(run, name, traced.get(run.name, {}).get(name))]
    unique, at, twice = arrange.table((row for row in every if metric in row.metrics), base)
    rows = [replace(row, metric=metric, ar=n == at) for n, row in enumerate(unique)]
    rates, documents = _rates(metric, rows)
    draws = {n: stats.value(metric, -rate, 1.0) for n, rate in rates.items()}
    rows = [replace(row, interval=stats.interval(draws[n]) if n in draws else None) for n, row in enumerate(rows)]
    rows, used = _with_gaps(name, _best(rows), draws, at, choice.as_published)
    costs = pairs.cache_costs(rows, rates, documents)
    rows = [replace(row, cache_cost=costs.get(n)) for n, row in enumerate(rows)]
    sizes = {run.tasks[name].size for run in compared} - {None}
    notes = [*_unknown(name, compared), *used, *_dtypes(compared), *_windows(compared)]
    notes += dict.fromkeys([*(remark for row in every for remark in row.remarks), *twice])
    if metric in OTHER_UNITS and any(row.gap_closed is not None for row in rows):
        notes.append(f"gap closed is of {WORDS[metric]} here: the paper's numbers are per token and not these")
    result = TaskComparison(
        metric=metric,
        documents=sizes.pop() if len(sizes) == 1 else None,
        rows=rows,
        rules=_speeds(rows),
        pairs=pairs.of(choice.pairs, rows, rates, documents),
        elbo=used,
        differences=listed,
        as_published=choice.as_published,
        notes=notes,
    )
    return replace(result, headlines=headline.of(name, result))


def _metric(name: str, requested: str | None, compared: Sequence[Run]) -> str:
    shared = [metric for metric in METRICS if all(metric in run.tasks[name].metrics for run in compared)]
    if requested is None and shared:
        return shared[0]
    if requested in shared:
        return requested
    available = "; ".join(f"{run.name}: {', '.join(run.tasks[name].metrics)}" for run in compared)
    wanted = f"{requested} of {name}" if requested else f"a metric of {name} that all results have"
    raise DuelError(f"Wanted {wanted}, but there is: {available}. Name another with --metric, or leave the task out.")


# ---------------------------------------------------------------- rows


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


def _best(found: Sequence[Row]) -> list[Row]:
    """Mark the lowest likelihood of each model with several rows. Bounds and the oracle do not count."""
    best = set()
    for model in {row.model for row in found}:
        proper = [n for n, row in enumerate(found) if row.model == model and row.likelihood and not row.ar]
        exact = [n for n in proper if found[n].proper and math.isfinite(found[n].value)]
        best |= {min(exact, key=lambda n: found[n].value)} if len(proper) > 1 and exact else set()
    return [replace(row, best=n in best) for n, row in enumerate(found)]


# ---------------------------------------------------------------- gap closed


def _with_gaps(
    name: str, rows: Sequence[Row], draws: Mapping[int, np.ndarray], ar: int | None, as_published: bool
) -> tuple[list[Row], list[str]]:
    """The rows with gap and gap closed, and descriptions of the ELBOs used. `ar`: the baseline's row number."""
    result, used = list(rows), {}
    for n, row in enumerate(rows):
        if n == ar:
            continue
        if ar is not None:
            interval = stats.interval(draws[n] - draws[ar]) if n in draws and ar in draws else None
            row = replace(row, gap=row.value - rows[ar].value, gap_interval=interval)
        if row.entry.follows_rule:
            elbo, why = elbos.of(row, rows, as_published)
            row = replace(row, elbo=elbo)
            if elbo is not None:
                used[elbo] = elbos.in_words(rows[elbo]) + (f" ({why})" if why else "")
            if row.metric == "bits_per_byte":
                row = replace(row, gap_closed_reason="gap closed is defined for perplexities")
            elif ar is None or elbo is None:
                row = replace(row, gap_closed_reason=why if elbo is None else f"no AR result of {name} (--ar)")
            else:
                row = _with_gap_closed(row, rows[elbo], rows[ar], [draws.get(i) for i in (elbo, n, ar)])
        result[n] = row
    return result, [text for _, text in sorted(used.items())]


def _with_gap_closed(one: Row, elbo: Row, ar: Row, draws: Sequence[np.ndarray | None]) -> Row:
    values, error = (elbo.value, one.value, ar.value), elbo.stderr_bound
    if not all(map(math.isfinite, values)):
        return replace(one, gap_closed_reason="no gap closed of an infinite perplexity")
    if not stats.clear(elbo.value, ar.value, error):
        reason = f"{UNCLEAR}: ELBO {_with_error(elbo)} and {ar.model} {number(ar.value)}"
        return replace(one, gap_closed_reason=reason)
    closed = stats.gap_closed(*values)
    if closed is None:
        return replace(one, gap_closed_reason=BETTER)
    known = [e for e in (error, one.stderr_bound) if e is not None]
    clear = stats.clear(elbo.value, one.value, math.hypot(*known) if known else None)
    value = number(one.value) if one.stderr_bound is None else _with_error(one)
    reasons = ["" if clear else f"{UNCLEAR}: ELBO {_with_error(elbo)} and DUEL {value}"]
    reasons += [elbo.stderr_reason, one.stderr_reason]
    interval = None
    if any(drawn is None for drawn in draws):
        lacking = next(row for row, drawn in zip((elbo, one, ar), draws, strict=True) if drawn is None)
        reasons.append(f"no interval: {lacking.model}, {lacking.name}: {lacking.reason}")
    else:
        interval, remark = stats.gap_interval(*draws)
        reasons.append(remark)
    return replace(
        one,
        distinguishable=clear,
        gap_closed=closed if clear else None,
        gap_closed_stderr=stats.gap_closed_stderr(*values, *_errors(elbo, one)) if clear else None,
        gap_closed_interval=interval,
        gap_closed_reason="; ".join(filter(None, reasons)),
    )


def _errors(elbo: Row, one: Row) -> tuple[float | None, float | None]:
    """The Monte Carlo errors of the ELBO and of DUEL, for that of gap closed; an exact DUEL has the error 0."""
    return elbo.stderr, 0.0 if one.stderr_bound is None else one.stderr


def _with_error(row: Row) -> str:
    return f"{number(row.value)} +- {'?' if row.stderr is None else number(row.stderr)}"


def averages(compared: Mapping[str, Sequence[Row]]) -> list[Average]:
    """Gap closed of each DUEL row over tasks.

    The average includes every task with a gap closed, also those where it is within its error of 0: without them the
    average would be too high. It has a standard error if all of them have one, and is not shown if it is within two
    standard errors of 0.
    """
    table: dict[tuple[str, str], dict[str, tuple[Row, Sequence[Row]]]] = {}
    for name, found in compared.items():
        for row in found:
            if row.duel:
                table.setdefault((row.model, row.name), {})[name] = (row, found)
    return [_average(model, name, of_row) for (model, name), of_row in table.items()]


def _average(model: str, name: str, found: Mapping[str, tuple[Row, Sequence[Row]]]) -> Average:
    known = [_closed(*row) for row in found.values() if row[0].distinguishable is not None]
    errors = [error for _, error in known]
    average = sum(value for value, _ in known) / len(known) if len(known) > 1 else None
    error = math.hypot(*errors) / len(known) if average is not None and None not in errors else None
    unclear = average is not None and not stats.clear(average, 0.0, error)
    return Average(
        model,
        name,
        {task: row.gap_closed for task, (row, _) in found.items()},
        {task: row.gap_closed_stderr for task, (row, _) in found.items()},
        [task for task, (row, _) in found.items() if row.distinguishable is False],
        None if unclear else average,
        error,
        unclear,
        len(known),
    )


def _closed(row: Row, found: Sequence[Row]) -> tuple[float, float | None]:
    """Gap closed and its error, whether or not it is distinguishable from 0."""
    elbo, ar = found[row.elbo], next(other for other in found if other.ar)
    values = elbo.value, row.value, ar.value
    return stats.gap_closed(*values), stats.gap_closed_stderr(*values, *_errors(elbo, row))


# ---------------------------------------------------------------- notes, speeds


def _unknown(name: str, compared: Sequence[Run]) -> list[str]:
    """Notes on networks whose tokenizers do not know a part of the text: bits and words of it are then not modelled."""
    shares = {(run.label, run.unknown(name)): None for run in compared if run.unknown(name)}
    return [
        f"{share:.1%} of the tokens of {label} are [UNK]: its bits per byte, byte and word perplexity are not a "
        "likelihood of the text"
        for label, share in shares
    ]


def _dtypes(compared: Sequence[Run]) -> list[str]:
    """Notes on networks that ran in low precision: their orders and sums are coarser."""
    low = [run for run in compared if run.dtype not in ("float32", "float64")]
    default = " (the default of --model hf; dtype=float32 changes it)"
    return [f"{run.label} ran in {run.dtype}{default if not run.ours else ''}: {run.short_name}" for run in low]


def _windows(compared: Sequence[Run]) -> list[str]:
    labels: dict[str, dict[str, None]] = {}
    for run in compared:
        labels.setdefault(run.label, {})[str(match.windows(run))] = None
    return ["windows: " + "; ".join(f"{label}: {' and '.join(cuts)}" for label, cuts in labels.items())]


def _speeds(rows: Sequence[Row]) -> list[Speeds]:
    """Rule families against NFE, for each model, block and cache with two or more different NFEs."""
    groups: dict[tuple, dict[str, list[Point]]] = {}
    for n, row in enumerate(rows):
        if row.estimator == "duel" and row.nfe_per_token:
            name, speed = family(row.rule)
            points = groups.setdefault((row.model, row.block, row.cache, row.variant), {}).setdefault(name, [])
            points.append(Point(row.rule, speed, n))
    result = []
    for (model, block, cache, variant), families in groups.items():
        members = [point.index for points in families.values() for point in points]
        if len({round(rows[n].nfe_per_token, 3) for n in members}) < 2:
            continue
        sought = model, "oracle", block, cache
        oracles = [n for n, row in enumerate(rows) if (row.model, row.estimator, row.block, row.cache) == sought]
        result.append(
            Speeds(
                model,
                block,
                cache,
                variant,
                title=", ".join(filter(None, [model, *rows[members[0]].setting, variant])),
                elbo=next((rows[n].elbo for n in members if rows[n].elbo is not None), None),
                ar=next((n for n, row in enumerate(rows) if row.ar), None),
                oracle=next(iter(oracles), None),
                families=[
                    Family(name, adaptive(name), sorted(points, key=lambda point: rows[point.index].nfe_per_token))
                    for name, points in families.items()
                ],
            )
        )
    return result
