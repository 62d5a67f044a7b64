"""Results of one task side by side: intervals, gap closed as the paper defines it, paired differences, speeds."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from lm_eval_duel.errors import DuelError
from lm_eval_duel.results import arrange, elbos, headline, match, pairs, rows, stats
from lm_eval_duel.results.read import Run
from lm_eval_duel.results.records import UNCLEAR, Average, Comparison, Family, Point, Speeds, TaskComparison
from lm_eval_duel.results.rows import Row
from lm_eval_duel.results.samples import METRICS
from lm_eval_duel.results.table import WORDS, number
from lm_eval_duel.rules.tables import adaptive, family

OTHER_UNITS = ("word_perplexity", "byte_perplexity")
BETTER = "the MDM is already better under the ELBO"
Traced = Mapping[str, Mapping[str, Mapping[str, Mapping[int, float]]]]  # results file -> task -> value -> document


@dataclasses.dataclass(frozen=True)
class Choice:
    """How to compare: the metric (None: the first that all have), `--as-published`, `--pairs`."""

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
    every = [row for run in compared for row in rows.of(run, name, traced.get(run.name, {}).get(name))]
    shown, at, twice = arrange.table((row for row in every if metric in row.values), base)
    rates, documents = _rates(metric, shown)
    draws = {n: stats.value(metric, -rate, 1.0) for n, rate in rates.items()}
    found = [_comparison(metric, row, n == at, draws.get(n)) for n, row in enumerate(shown)]
    found = _best(found)
    found, used = _with_gaps(name, shown, found, draws, metric, at, choice.as_published)
    costs = pairs.cache_costs(metric, shown, found, rates, documents)
    found = [replace(row, cache_cost=costs.get(n)) for n, row in enumerate(found)]
    sizes = {run.tasks[name].size for run in compared} - {None}
    notes = [*_unknown(name, compared), *used, *_dtypes(compared), *_windows(compared)]
    notes += dict.fromkeys([*(remark for row in every for remark in row.remarks), *twice])
    if metric in OTHER_UNITS and any(row.gap_closed is not None for row in found):
        notes.append(f"gap closed is of {WORDS[metric]} here: the paper's numbers are per token and not these")
    result = TaskComparison(
        metric=metric,
        documents=sizes.pop() if len(sizes) == 1 else None,
        rows=found,
        rules=_speeds(shown, found),
        pairs=pairs.of(choice.pairs, metric, found, rates, documents),
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


def _rates(metric: str, shown: Sequence[Row]) -> tuple[dict[int, np.ndarray], int]:
    """Bootstrap draws of nats per unit of each row with known documents, by row number, and the number of documents.

    All rows use the same resampling. The draws of a Monte Carlo ELBO include its Monte Carlo error.
    """
    known = [n for n, row in enumerate(shown) if len(row.documents.get(metric, {})) > 1]
    known = [n for n in known if math.isfinite(shown[n].values[metric])]
    if not known:
        return {}, 0
    keys = sorted(shown[known[0]].documents[metric])
    known = [n for n in known if shown[n].documents[metric].keys() == set(keys)]
    table = np.array([[shown[n].documents[metric][key] for n in known] for key in keys])  # (documents, rows, 2)
    sums = stats.resample(table.reshape(len(keys), -1)).reshape(-1, len(known), 2)
    with np.errstate(divide="ignore", invalid="ignore"):
        drawn = sums[..., 0] / sums[..., 1]  # (draws, rows)
    rates = {}
    for column, n in enumerate(known):
        log_prob, error = drawn[:, column], shown[n].nats_stderr
        if error and math.isfinite(error):
            log_prob = stats.with_error(drawn, column, error / table[:, column, 1].sum())
        rates[n] = -log_prob
    return rates, len(keys)


def _comparison(metric: str, row: Row, ar: bool, draws: np.ndarray | None) -> Comparison:
    reason = ""
    if draws is None:
        reason = row.missing or ("one document" if row.documents.get(metric) else "no values per document")
    return Comparison(
        model=row.model,
        name=row.name,
        estimator=row.estimator,
        rule=row.rule,
        block=row.block if row.run.ours and row.estimator != "ar" else None,
        cache=row.cache,
        qualifiers=row.qualifiers,
        unknown=row.run.unknown(row.task),
        eps=row.eps,
        mc_samples=row.run.spec.get("mc_samples") if row.estimator == "elbo" else None,
        ar=ar,
        likelihood=row.is_likelihood,
        bound=row.bound,
        flag="" if row.is_likelihood else rows.SEES_TRUTH,
        value=row.values[metric],
        interval=None if draws is None else stats.interval(draws),
        stderr=row.error(metric, row.nats_stderr),
        stderrs={name: row.error(name, row.nats_stderr) for name in row.values},
        stderr_bound=_error_bound(row, metric),
        stderr_reason=_no_error(row, metric),
        window_stderr=row.error(metric, row.window_stderr) if draws is None else None,
        reason=reason,
        metrics=row.values,
        tokens=row.tokens,
        nfe=row.nfe,
        nfe_per_token=row.nfe / row.tokens if row.nfe and row.tokens else None,
        dtype=row.run.dtype,
        fingerprint=row.run.fingerprint,
        file=row.run.name,
    )


def _error_bound(row: Row, metric: str) -> float | None:
    """An upper bound of the error of a value that is drawn, such as a Monte Carlo ELBO; None for other values.

    If the error itself is not known, the error over windows bounds it, since their spread contains that of the draws.
    Infinite if neither is known.
    """
    if row.entry.drawn is None:
        return None
    known = row.error(metric, row.nats_stderr)
    bound = row.error(metric, row.window_stderr) if known is None else known
    return math.inf if bound is None else bound


def _no_error(row: Row, metric: str) -> str:
    """Why a value that is drawn has no error; empty if it has one, and for other rows."""
    drawn = row.entry.drawn
    if drawn is None or row.error(metric, row.nats_stderr) is not None:
        return ""
    count = row.run.spec.get(drawn.argument, "")
    few = count.isdecimal() and int(count) < 8
    why = f"{drawn.argument}={count}; it takes 8 or more" if few else drawn.no_error
    return f"{drawn.error} error not known ({why})"


def _best(found: Sequence[Comparison]) -> list[Comparison]:
    """Mark the lowest likelihood of each model with several rows. Bounds and the oracle do not count."""
    best = set()
    for model in {row.model for row in found}:
        proper = [n for n, row in enumerate(found) if row.model == model and row.likelihood and not row.ar]
        exact = [n for n in proper if found[n].proper and math.isfinite(found[n].value)]
        best |= {min(exact, key=lambda n: found[n].value)} if len(proper) > 1 and exact else set()
    return [replace(row, best=n in best) for n, row in enumerate(found)]


# ---------------------------------------------------------------- gap closed


def _with_gaps(
    name: str,
    shown: Sequence[Row],
    found: Sequence[Comparison],
    draws: Mapping[int, np.ndarray],
    metric: str,
    ar: int | None,
    as_published: bool,
) -> tuple[list[Comparison], list[str]]:
    """The rows with gap and gap closed, and descriptions of the ELBOs used. `ar`: the baseline's row number."""
    rows_with_gaps, used = list(found), {}
    for n, (row, one) in enumerate(zip(shown, found, strict=True)):
        if n == ar:
            continue
        if ar is not None:
            known = n in draws and ar in draws
            interval = stats.interval(draws[n] - draws[ar]) if known else None
            one = replace(one, gap=one.value - found[ar].value, gap_interval=interval)
        if row.entry.follows_rule:
            elbo, why = elbos.of(row, shown, as_published)
            one = replace(one, elbo=elbo)
            if elbo is not None:
                used[elbo] = elbos.in_words(shown[elbo], found[elbo].stderr) + (f" ({why})" if why else "")
            if metric == "bits_per_byte":
                one = replace(one, gap_closed_reason="gap closed is defined for perplexities")
            elif ar is None or elbo is None:
                one = replace(one, gap_closed_reason=why if elbo is None else f"no AR result of {name} (--ar)")
            else:
                one = _with_gap_closed(one, found[elbo], found[ar], [draws.get(i) for i in (elbo, n, ar)])
        rows_with_gaps[n] = one
    return rows_with_gaps, [text for _, text in sorted(used.items())]


def _with_gap_closed(
    one: Comparison, elbo: Comparison, ar: Comparison, draws: Sequence[np.ndarray | None]
) -> Comparison:
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


def _errors(elbo: Comparison, one: Comparison) -> tuple[float | None, float | None]:
    """The Monte Carlo errors of the ELBO and of DUEL, for that of gap closed; an exact DUEL has the error 0."""
    return elbo.stderr, 0.0 if one.stderr_bound is None else one.stderr


def _with_error(row: Comparison) -> str:
    return f"{number(row.value)} +- {'?' if row.stderr is None else number(row.stderr)}"


def averages(compared: Mapping[str, Sequence[Comparison]]) -> list[Average]:
    """Gap closed of each DUEL row over tasks.

    The average includes every task with a gap closed, also those where it is within its error of 0: without them the
    average would be too high. It has a standard error if all of them have one, and is not shown if it is within two
    standard errors of 0.
    """
    table: dict[tuple[str, str], dict[str, tuple[Comparison, Sequence[Comparison]]]] = {}
    for name, found in compared.items():
        for row in found:
            if row.duel:
                table.setdefault((row.model, row.name), {})[name] = (row, found)
    return [_average(model, name, of_row) for (model, name), of_row in table.items()]


def _average(model: str, name: str, found: Mapping[str, tuple[Comparison, Sequence[Comparison]]]) -> Average:
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


def _closed(row: Comparison, found: Sequence[Comparison]) -> tuple[float, float | None]:
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


def _speeds(shown: Sequence[Row], found: Sequence[Comparison]) -> list[Speeds]:
    """Rule families against NFE, for each model, block and cache with two or more different NFEs."""
    groups: dict[tuple, dict[str, list[Point]]] = {}
    for n, (row, one) in enumerate(zip(shown, found, strict=True)):
        if row.estimator == "duel" and one.nfe_per_token:
            name, speed = family(row.rule)
            points = groups.setdefault((row.model, row.block, row.cache, row.variant), {}).setdefault(name, [])
            points.append(Point(row.rule, speed, n))
    result = []
    for (model, block, cache, variant), families in groups.items():
        members = [point.index for points in families.values() for point in points]
        if len({round(found[n].nfe_per_token, 3) for n in members}) < 2:
            continue
        sought = model, "oracle", block, cache
        oracles = [n for n, row in enumerate(shown) if (row.model, row.estimator, row.block, row.cache) == sought]
        names = [model, rows.block_name(block), rows.cache_name(cache), variant]
        result.append(
            Speeds(
                model,
                block,
                cache,
                variant,
                title=", ".join(filter(None, names)),
                elbo=next((found[n].elbo for n in members if found[n].elbo is not None), None),
                ar=next((n for n, row in enumerate(found) if row.ar), None),
                oracle=next(iter(oracles), None),
                families=[
                    Family(name, adaptive(name), sorted(points, key=lambda point: found[point.index].nfe_per_token))
                    for name, points in families.items()
                ],
            )
        )
    return result
