"""Results of one task side by side: intervals, gap closed as the paper defines it, paired differences, speeds.

`task` makes the rows once and fills them in the order of the text: values and intervals, baseline, ELBO and gap closed,
cost of the cache. Tables, pages and figures show them and compute nothing.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

from lm_eval_duel.core.rates import METRICS
from lm_eval_duel.errors import DuelError
from lm_eval_duel.results import match, pairs, stats
from lm_eval_duel.results import rows as task_rows
from lm_eval_duel.results.paired import UNCLEAR
from lm_eval_duel.results.read import Run
from lm_eval_duel.results.rows import Pair, Row
from lm_eval_duel.results.table import WORDS, number
from lm_eval_duel.rules.tables import family

OTHER_UNITS = ("word_perplexity", "byte_perplexity")
BETTER = "the MDM is already better under the ELBO"


@dataclasses.dataclass(frozen=True)
class Speeds:
    """The rows of one model, block and cache against NFE. `families`: each rule at several speeds, fastest first."""

    title: str
    elbo: Row | None
    ar: Row | None
    oracle: Row | None
    families: dict[str, list[Row]]

    @property
    def rows(self) -> list[Row]:
        return [row for points in self.families.values() for row in points]


@dataclasses.dataclass(frozen=True)
class Comparison:
    """The results of one task side by side. `documents`: their number."""

    metric: str
    documents: int | None
    rows: list[Row]
    rules: list[Speeds]
    pairs: list[Pair]
    differences: list[str]
    as_published: bool
    notes: list[str]


def task(
    name: str,
    runs: Sequence[Run],
    metric: str | None = None,
    as_published: bool = False,
    choice: str = pairs.NONE,
) -> Comparison:
    """One task: its rows with intervals and gap closed, paired differences, and the notes under its tables.

    `metric`: the default is the first that all results have. `choice`: of pairs, as in `--pairs`.
    """
    compared = [run for run in runs if name in run.tasks]  # oldest first
    base = next((run for run in reversed(compared) if run.baseline), None)
    compared.sort(key=lambda run: run is not base)
    metric = _metric(name, metric, compared)
    differences = match.check(name, metric, compared, as_published)
    remarks: list[str] = []
    made = [row for run in compared for row in task_rows.of_run(run, name, metric, remarks)]
    for row in made:
        row.ar = base is not None and (row.run, row.estimator) == (base, base.estimator)
    rows = task_rows.in_order([row for row in made if metric in row.metrics], base, remarks)
    ar = rows[0] if base else None
    _add_intervals(rows)
    _mark_best(rows)
    for row in rows:
        if ar is not None and row is not ar:
            row.gap = row.value - ar.value
            if row.draws is not None and ar.draws is not None:
                value, baseline = task_rows.drawn_values(row, ar)
                row.gap_interval = stats.interval(value - baseline)
    elbos = _close_gaps(rows, ar, as_published)
    for row in rows:
        row.cache_cost = pairs.cache_cost(row, rows)
    notes = [*_notes(name, compared, elbos), *dict.fromkeys(remarks)]
    if metric in OTHER_UNITS and any(row.gap_closed is not None for row in rows):
        notes.append(f"gap closed is of {WORDS[metric]} here: the paper's numbers are per token and not these")
    sizes = {run.tasks[name].size for run in compared} - {None}
    return Comparison(
        metric=metric,
        documents=sizes.pop() if len(sizes) == 1 else None,
        rows=rows,
        rules=_speeds(rows, ar),
        pairs=pairs.choose(choice, rows),
        differences=differences,
        as_published=as_published,
        notes=notes,
    )


def _metric(name: str, requested: str | None, compared: Sequence[Run]) -> str:
    shared = [metric for metric in METRICS if all(metric in run.tasks[name].metrics for run in compared)]
    if requested in shared or (requested is None and shared):
        return requested or shared[0]
    available = "; ".join(f"{run.name}: {', '.join(run.tasks[name].metrics)}" for run in compared)
    wanted = f"{requested} of {name}" if requested else f"a metric of {name} that all results have"
    raise DuelError(f"Wanted {wanted}, but there is: {available}. Name another with --metric, or leave the task out.")


# ---------------------------------------------------------------- the steps that fill rows


def _add_intervals(rows: Sequence[Row]) -> None:
    """Give bootstrap draws to rows that have the documents of the first that has any. All use the same resampling."""
    known = [row for row in rows if len(row.documents) > 1 and math.isfinite(row.value)]
    known = [row for row in known if row.documents.keys() == known[0].documents.keys()]
    if known:
        table = np.array([[row.documents[key] for row in known] for key in sorted(known[0].documents)])
        for row, draws in zip(known, stats.rates(table), strict=True):
            row.draws = draws
            row.interval = stats.interval(*task_rows.drawn_values(row))


def _mark_best(rows: Sequence[Row]) -> None:
    """Mark the lowest likelihood of each model with several rows. Bounds and the oracle do not count."""
    for model in {row.model for row in rows}:
        mine = [row for row in rows if row.model == model and row.likelihood and not row.ar]
        proper = [row for row in mine if row.proper and math.isfinite(row.value)]
        if len(mine) > 1 and proper:
            min(proper, key=lambda row: row.value).best = True


def _close_gaps(rows: Sequence[Row], ar: Row | None, as_published: bool) -> list[str]:
    """Enter the ELBO and gap closed of each DUEL row; return descriptions of these ELBOs."""
    used: dict[int, str] = {}
    for row in rows:
        if row.duel:
            row.elbo, why = pairs.find_elbo(row, rows, as_published)
            _close_gap(row, ar, why)
            if row.elbo is not None:
                used[rows.index(row.elbo)] = _describe(row.elbo, why)
    return [used[n] for n in sorted(used)]


def _close_gap(row: Row, ar: Row | None, why: str) -> None:
    """Enter gap closed with its errors, or the reason why there is none. `why`: why there is no ELBO."""
    elbo = row.elbo
    if row.metric == "bits_per_byte":
        row.gap_closed_reason = "gap closed is defined for perplexities"
    elif elbo is None:
        row.gap_closed_reason = why
    elif ar is None:
        row.gap_closed_reason = f"no AR result of {row.task} (--ar)"
    elif not all(map(math.isfinite, (elbo.value, row.value, ar.value))):
        row.gap_closed_reason = "no gap closed of an infinite perplexity"
    elif not stats.is_distinguishable(elbo.value, ar.value, elbo.stderr_bound):
        row.gap_closed_reason = f"{UNCLEAR}: ELBO {_with_error(elbo)} and {ar.model} {number(ar.value)}"
    elif elbo.value <= ar.value:
        row.gap_closed_reason = BETTER
    else:
        known = [error for error in (elbo.stderr_bound, row.stderr_bound) if error is not None]
        row.distinguishable = stats.is_distinguishable(elbo.value, row.value, math.hypot(*known) if known else None)
        reasons = [elbo.stderr_reason, row.stderr_reason]
        if row.distinguishable:
            row.gap_closed = 100 * (elbo.value - row.value) / (elbo.value - ar.value)
            stderr = 0.0 if row.stderr_bound is None else row.stderr  # an exact value has no error
            row.gap_closed_stderr = stats.gap_closed_stderr(elbo.value, row.value, ar.value, elbo.stderr, stderr)
        else:
            reasons.insert(0, f"{UNCLEAR}: ELBO {_with_error(elbo)} and DUEL {_with_error(row)}")
        if lacking := next((other for other in (elbo, row, ar) if other.draws is None), None):
            reasons.append(f"no interval: {lacking.model}, {lacking.name}: {lacking.reason}")
        else:
            row.gap_closed_interval, remark = stats.gap_interval(*task_rows.drawn_values(elbo, row, ar))
            reasons.append(remark)
        row.gap_closed_reason = "; ".join(filter(None, reasons))


def _with_error(row: Row) -> str:
    return number(row.value, error=row.stderr, unsure=row.stderr_bound is not None)


def _describe(elbo: Row, why: str) -> str:
    """A description of an ELBO with its standard error. `why`: how its spec differs from the row's."""
    spec, stderr = elbo.run.spec, elbo.stderr
    if elbo.entry.lattice:
        text = f"the mean over all orders in blocks of {elbo.block} (elbo_exact; there is no Monte Carlo ELBO)"
    else:
        form = f", elbo_form={spec['elbo_form']}" if "elbo_form" in spec else ""
        eps = f", elbo_eps={elbo.eps:g} (above 0: NO bound)" if elbo.eps else ""
        error = f", standard error {number(stderr, '.2g')}" if stderr is not None else ", no standard error"
        text = f"Monte Carlo, mc_samples={spec.get('mc_samples', '?')}{form}, elbo_block={elbo.block}{eps}{error}"
    variant = f" ({elbo.variant})" if elbo.variant else ""
    return f"ELBO of {elbo.model}{variant}: {text}{f' ({why})' if why else ''}"


# ---------------------------------------------------------------- notes and speeds


def _notes(name: str, compared: Sequence[Run], elbos: Sequence[str]) -> list[str]:
    """Notes on unknown tokens, ELBOs, networks in low precision (whose orders and sums are coarser), and windows."""
    shares = dict.fromkeys((run.label, run.tasks[name].unknown) for run in compared if run.tasks[name].unknown)
    notes = [
        f"{share:.1%} of the tokens of {label} are [UNK]: its bits per byte, byte and word perplexity are not a "
        "likelihood of the text"
        for label, share in shares
    ]
    notes += elbos
    windows: dict[str, dict[str, None]] = {}
    for run in compared:
        windows.setdefault(run.label, {})[match.windows_of(run)] = None
        if run.dtype not in ("float32", "float64"):
            default = "" if run.ours else " (the default of --model hf; dtype=float32 changes it)"
            notes.append(f"{run.label} ran in {run.dtype}{default}: {run.short_name}")
    listed = "; ".join(f"{label}: {' and '.join(of_label)}" for label, of_label in windows.items())
    return [*notes, f"windows: {listed}"]


def _speeds(rows: Sequence[Row], ar: Row | None) -> list[Speeds]:
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
            oracle = (model, "oracle", block, cache)
            alike = (row for row in rows if (row.model, row.estimator, row.block, row.run.cache) == oracle)
            parts = members[0].parts
            title = ", ".join(filter(None, [model, parts["block"], parts["cache"] if cache != "none" else "", variant]))
            speeds.append(Speeds(title, elbo, ar, next(alike, None), families))
    return speeds
