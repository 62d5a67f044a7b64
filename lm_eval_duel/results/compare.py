"""Results of one task side by side: intervals, gap closed as the paper defines it, paired differences, speeds."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from lm_eval_duel.core.rates import METRICS
from lm_eval_duel.errors import DuelError
from lm_eval_duel.results import headline, match, pairs, rows, stats
from lm_eval_duel.results.read import Run
from lm_eval_duel.results.records import UNCLEAR, Average, GapClosed, Row, Speeds, TaskComparison
from lm_eval_duel.results.table import WORDS, number
from lm_eval_duel.rules.tables import family

OTHER_UNITS = ("word_perplexity", "byte_perplexity")
BETTER = "the MDM is already better under the ELBO"


def task(
    name: str,
    runs: Sequence[Run],
    metric: str | None = None,
    as_published: bool = False,
    choice: str = pairs.NONE,
) -> TaskComparison:
    """One task: its rows with intervals and gap closed, paired differences, and the notes under its tables.

    `metric`: the default is the first that all results have. `choice`: of pairs, as in `--pairs`.
    """
    compared = [run for run in runs if name in run.tasks]  # oldest first
    base = next((run for run in reversed(compared) if run.baseline), None)
    compared.sort(key=lambda run: run is not base)
    metric = _metric(name, metric, compared)
    listed = match.check(name, metric, compared, as_published)
    every = [row for run in compared for row in rows.from_run(run, name)]
    ordered, twice = rows.in_order((replace(row, metric=metric) for row in every if metric in row.metrics), base)
    shown = _with_draws([replace(row, number=n) for n, row in enumerate(ordered)])
    best, ar = _best(shown), next((row for row in shown if row.ar), None)
    shown = [replace(row, best=row in best, baseline=None if row is ar else ar) for row in shown]
    elbos = {row: pairs.find_elbo(row, shown, as_published) for row in shown if row.duel}
    used = {elbo.number: _describe(elbo, why) for elbo, why in elbos.values() if elbo is not None}
    closed = {row: replace(row, elbo=elbo, closed=_gap_closed(row, elbo, why)) for row, (elbo, why) in elbos.items()}
    shown = [closed.get(row, row) for row in shown]
    shown = [replace(row, cache_cost=pairs.cache_cost(row, shown)) for row in shown]
    sizes = {run.tasks[name].size for run in compared} - {None}
    described = [used[number] for number in sorted(used)]
    notes = _notes(name, compared, described)
    notes += dict.fromkeys([*(remark for row in every for remark in row.remarks), *twice])
    if metric in OTHER_UNITS and any(row.closed.value is not None for row in shown):
        notes.append(f"gap closed is of {WORDS[metric]} here: the paper's numbers are per token and not these")
    return TaskComparison(
        metric=metric,
        documents=sizes.pop() if len(sizes) == 1 else None,
        rows=shown,
        rules=_speeds(shown),
        pairs=pairs.chosen(choice, shown),
        elbo=described,
        differences=listed,
        as_published=as_published,
        notes=notes,
        headlines=headline.sentences(name, shown),
    )


def _metric(name: str, requested: str | None, compared: Sequence[Run]) -> str:
    shared = [metric for metric in METRICS if all(metric in run.tasks[name].metrics for run in compared)]
    if requested in shared or (requested is None and shared):
        return requested or shared[0]
    available = "; ".join(f"{run.name}: {', '.join(run.tasks[name].metrics)}" for run in compared)
    wanted = f"{requested} of {name}" if requested else f"a metric of {name} that all results have"
    raise DuelError(f"Wanted {wanted}, but there is: {available}. Name another with --metric, or leave the task out.")


def _with_draws(rows: Sequence[Row]) -> list[Row]:
    """Rows with bootstrap draws if they have the documents of the first that has any. All use the same resampling."""
    known = [row for row in rows if len(row.documents.get(row.metric, ())) > 1 and math.isfinite(row.value)]
    known = [row for row in known if row.documents[row.metric].keys() == known[0].documents[known[0].metric].keys()]
    if not known:
        return list(rows)
    keys = sorted(known[0].documents[known[0].metric])
    table = np.array([[row.documents[row.metric][key] for row in known] for key in keys])  # (documents, rows, 2)
    draws = dict(zip(known, stats.rates(table, [row.nats_stderr for row in known]).T, strict=True))
    return [replace(row, draws=draws.get(row)) for row in rows]


def _best(rows: Sequence[Row]) -> set[Row]:
    """The lowest likelihood of each model with several rows. Bounds and the oracle do not count."""
    best = set()
    for model in {row.model for row in rows}:
        mine = [row for row in rows if row.model == model and row.likelihood and not row.ar]
        proper = [row for row in mine if row.proper and math.isfinite(row.value)]
        if len(mine) > 1 and proper:
            best.add(min(proper, key=lambda row: row.value))
    return best


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
    groups: dict[tuple, list[Row]] = {}
    for row in rows:
        if row.estimator == "duel" and row.nfe_per_token:
            groups.setdefault((row.model, row.block, row.run.cache, row.variant), []).append(row)
    speeds = []
    for (model, block, cache, variant), members in groups.items():
        if len({round(row.nfe_per_token, 3) for row in members}) > 1:
            families: dict[str, list[Row]] = {}
            for row in members:
                families.setdefault(family(row.rule)[0], []).append(row)
            for points in families.values():
                points.sort(key=lambda row: row.nfe_per_token)
            elbo = next((row.elbo for row in members if row.elbo is not None), None)
            ar = next((row for row in rows if row.ar), None)
            oracle = model, "oracle", block, cache
            alike = (row for row in rows if (row.model, row.estimator, row.block, row.run.cache) == oracle)
            title = ", ".join(filter(None, [model, *members[0].setting, variant]))
            speeds.append(Speeds(title, elbo, ar, next(alike, None), families))
    return speeds


# ---------------------------------------------------------------- gap closed


def _describe(elbo: Row, why: str) -> str:
    """A description of an ELBO with its standard error. `why`: how its spec differs from the row's."""
    spec, stderr = elbo.run.spec, elbo.stderr
    if elbo.estimator == "elbo_exact":
        text = f"the mean over all orders in blocks of {elbo.block} (elbo_exact; there is no Monte Carlo ELBO)"
    else:
        form = f", elbo_form={spec['elbo_form']}" if "elbo_form" in spec else ""
        eps = f", elbo_eps={elbo.eps:g} (above 0: NO bound)" if elbo.eps else ""
        error = f", standard error {stderr:.2g}" if stderr is not None else ", no standard error"
        text = f"Monte Carlo, mc_samples={spec.get('mc_samples', '?')}{form}, elbo_block={elbo.block}{eps}{error}"
    variant = f" ({elbo.variant})" if elbo.variant else ""
    return f"ELBO of {elbo.model}{variant}: {text}{f' ({why})' if why else ''}"


def _gap_closed(row: Row, elbo: Row | None, why: str) -> GapClosed:
    """Gap closed of a row with its errors, or the reason why there is none. `why`: why there is no ELBO."""
    ar = row.baseline
    if row.metric == "bits_per_byte":
        return GapClosed("gap closed is defined for perplexities")
    if elbo is None:
        return GapClosed(why)
    if ar is None:
        return GapClosed(f"no AR result of {row.task} (--ar)")
    values = elbo.value, row.value, ar.value
    if not all(map(math.isfinite, values)):
        return GapClosed("no gap closed of an infinite perplexity")
    if not stats.clear(elbo.value, ar.value, elbo.stderr_bound):
        return GapClosed(f"{UNCLEAR}: ELBO {_with_error(elbo)} and {ar.model} {number(ar.value)}")
    if (share := stats.gap_closed(*values)) is None:
        return GapClosed(BETTER)
    own = 0.0 if row.stderr_bound is None else row.stderr  # an exact value has no error
    known = [error for error in (elbo.stderr_bound, row.stderr_bound) if error is not None]
    distinguishable = stats.clear(elbo.value, row.value, math.hypot(*known) if known else None)
    reasons, interval = [elbo.stderr_reason, row.stderr_reason], None
    if not distinguishable:
        value = number(row.value) if row.stderr_bound is None else _with_error(row)
        reasons.insert(0, f"{UNCLEAR}: ELBO {_with_error(elbo)} and DUEL {value}")
    if lacking := next((other for other in (elbo, row, ar) if other.draws is None), None):
        reasons.append(f"no interval: {lacking.model}, {lacking.name}: {lacking.reason}")
    else:
        interval, remark = stats.gap_interval(elbo.drawn, row.drawn, ar.drawn)
        reasons.append(remark)
    error = stats.gap_closed_stderr(*values, elbo.stderr, own)
    return GapClosed("; ".join(filter(None, reasons)), share, error, distinguishable, interval)


def _with_error(row: Row) -> str:
    return f"{number(row.value)} +- {'?' if row.stderr is None else number(row.stderr)}"


def averages(compared: Mapping[str, Sequence[Row]]) -> list[Average]:
    """Gap closed of each DUEL row over tasks.

    The average includes every task with a gap closed, also those where it is within its error of 0: without them the
    average would be too high. It has a standard error if all of them have one, and is not shown if it is within two
    standard errors of 0.
    """
    tasks_of: dict[tuple[str, str], dict[str, Row]] = {}
    for task, shown in compared.items():
        for row in shown:
            if row.duel:
                tasks_of.setdefault((row.model, row.name), {})[task] = row
    result = []
    for (model, name), tasks in tasks_of.items():
        known = [row.closed for row in tasks.values() if row.closed.share is not None]
        errors = [closed.error for closed in known]
        average = sum(closed.share for closed in known) / len(known) if len(known) > 1 else None
        error = math.hypot(*errors) / len(known) if average is not None and None not in errors else None
        unclear = average is not None and not stats.clear(average, 0.0, error)
        result.append(
            Average(
                model,
                name,
                tasks={task: row.closed.value for task, row in tasks.items()},
                stderrs={task: row.closed.stderr for task, row in tasks.items()},
                unclear=[task for task, row in tasks.items() if row.closed.distinguishable is False],
                average=None if unclear else average,
                average_stderr=error,
                average_unclear=unclear,
                averaged=len(known),
            )
        )
    return result
