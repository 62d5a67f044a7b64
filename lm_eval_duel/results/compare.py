"""The rows that are compared: pairs with their differences, the ELBO of a row, and the row without its cache."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Collection, Sequence

import numpy as np

from lm_eval_duel.core.scores import METRICS
from lm_eval_duel.errors import DuelError
from lm_eval_duel.results import match, rows, stats
from lm_eval_duel.results import rows as task_rows
from lm_eval_duel.results import stats as paired
from lm_eval_duel.results.read import NO_CACHE, Run
from lm_eval_duel.results.rows import NON_IDENTITY_KEYS, OF_ESTIMATOR, Pair, Row
from lm_eval_duel.results.stats import UNCLEAR, Side
from lm_eval_duel.results.table import WORDS, number
from lm_eval_duel.rules.tables import family

UNITS = {"token_perplexity": "token", "perplexity": "document", "word_perplexity": "word"}  # of others: byte
BOTH, RULES, MODELS, ALL, NONE = "both", "rules", "models", "all", "none"
CHOICES = (BOTH, RULES, MODELS, ALL, NONE)  # of --pairs
MOST_ROWS = 5  # of which all pairs are listed; of more, each is compared with the lowest
PAPER_RULE = "greedy:k=1"  # the rule of the paper's perplexity tables
CONVENTIONS = {"special_tokens", "windows", "max_length", "sigma"}  # entries in which published figures may differ


def unit(metric: str) -> str:
    """The unit that a metric counts: `token`, `word`, ..."""
    return UNITS.get(metric, "byte")


def pair(first: Row, second: Row) -> Pair:
    """The difference of two rows with its interval (or the reason why there is none) and verdict."""
    sides = []
    for row, name in zip((first, second), rows.names((first, second)), strict=True):
        sides.append(Side(name, row.kind, row.rate, row.rate_stderr, row.stderr_reason, row.draws))
    found = paired.difference(*sides, unit(first.metric), [key.rpartition(":")[0] for key in first.documents])
    reason = ""
    if found.difference is None:
        reason = "no difference of an infinite perplexity"
    elif found.interval is None:
        lacking = first if first.draws is None else second
        reason = f"no interval: {lacking.model}, {lacking.name}: {lacking.reason}"
    return Pair(**vars(found), first=first, second=second, reason=reason)


def choose(choice: str, shown: Sequence[Row]) -> list[Pair]:
    """The pairs of `--pairs`.

    `rules`: the DUEL rows of a network with one block and one cache against each other; of more than five, each against
    the lowest. `models`: the row of each model that its headline is about, in the same way; `both`: these two. `all`:
    every two rows. The oracle, which is not a likelihood, is in no pair.
    """
    likelihoods = [row for row in shown if row.likelihood]
    if choice == ALL:
        return list(itertools.starmap(pair, itertools.combinations(likelihoods, 2)))
    groups: dict[tuple, list[Row]] = {}
    if choice in (BOTH, MODELS):
        models = dict.fromkeys(row.model for row in likelihoods)
        groups[()] = [main_row([row for row in likelihoods if row.model == model]) for model in models]
    for row in likelihoods if choice in (BOTH, RULES) else ():
        if row.estimator == "duel" and not row.ar:
            groups.setdefault((row.model, row.block, row.run.cache, row.qualifiers), []).append(row)
    found: list[tuple[Row, Row]] = []
    for group in groups.values():
        lowest = min(group, key=lambda row: row.value, default=None)
        every = itertools.combinations(group, 2) if len(group) <= MOST_ROWS else ((row, lowest) for row in group)
        found += [(first, second) for first, second in every if first is not second]
    return list(itertools.starmap(pair, found))


def main_row(likelihoods: Sequence[Row]) -> Row:
    """A model's row: the baseline, the row of its headline, or else its lowest likelihood or bound."""
    baseline = next((row for row in likelihoods if row.ar), None)
    return baseline or headline(likelihoods) or min(likelihoods, key=lambda row: (row.bound, row.value))


def headline(shown: Sequence[Row]) -> Row | None:
    """The DUEL row of a headline: the paper's rule, else the best; rows without a cache, then with an ELBO, first."""
    duels = [row for row in shown if row.estimator == "duel"] or [row for row in shown if row.entry.follows_rule]
    duels = [row for row in duels if row.rule == PAPER_RULE] or duels
    return min(duels, key=lambda row: (row.run.has_cache, row.elbo is None, row.value), default=None)


# ---------------------------------------------------------------- which rows belong together


def cache_cost(row: Row, shown: Sequence[Row]) -> Pair | None:
    """Cached minus uncached, everything else in the spec the same; None for a row without a cache."""
    if not row.run.has_cache:
        return None
    ignored = {"estimator"} if row.of_draws else NON_IDENTITY_KEYS  # the draws are part of its value

    def fits(other: Row) -> bool:
        return other.run.cache == NO_CACHE and (other.estimator, other.rule) == (row.estimator, row.rule)

    nearest, differences = _nearest(row, shown, fits, ignored | {"cache"})
    if nearest and not differences:
        return pair(row, nearest[0])
    reason = "there is no result of this network and rule with cache=none"
    if differences:
        reason = f"the result with cache=none is of another spec: {'; '.join(differences.values())}"
    return Pair(first=row, second=None, reason=reason)


def find_elbo(duel: Row, shown: Sequence[Row], as_published: bool = False) -> tuple[Row | None, str]:
    """The ELBO of a DUEL row, or None and the reason.

    The ELBO is of the same model under the same spec, except for the entries of the estimator. It covers the whole
    target for bidirectional networks and the trained blocks for block-causal ones, where the mean over all orders
    (elbo_exact) may replace a Monte Carlo ELBO. Bounds are preferred, then more draws. `as_published`: without an ELBO
    of the same spec, accept one with other windows or scored positions, and return the differences.
    """
    causal = duel.run.duel.get("attention") in ("block_causal", "causal_prefix")
    wanted = duel.run.block if causal else "none"

    def fits(row: Row) -> bool:
        return row.block == wanted and (row.drawn_bound or (causal and row.estimator == "elbo_exact"))

    nearest, differences = _nearest(duel, shown, fits, NON_IDENTITY_KEYS | OF_ESTIMATOR)
    if not nearest:
        return None, f"no ELBO (estimator=elbo, elbo_block={wanted})"
    listed = "; ".join(differences.values())
    if differences and not (as_published and differences.keys() <= CONVENTIONS):
        return None, f"no ELBO of the same spec: {listed}"

    def worth(row: Row) -> tuple:
        draws = row.run.spec.get("mc_samples", "")
        return not row.eps, row.drawn_bound, float(draws) if draws not in ("", "none") else 1.0

    return max(nearest, key=worth), f"as published, of another convention: {listed}" if differences else ""


def _nearest(
    row: Row, shown: Sequence[Row], fits: Callable[[Row], bool], ignored: Collection[str]
) -> tuple[list[Row], dict[str, str]]:
    """The fitting rows of the same model whose specs are nearest to a row's, and how they differ."""
    here = row.run.spec
    found: list[tuple[Row, dict[str, str]]] = []
    for other in shown:
        if other.run.key == row.run.key and fits(other):
            there = other.run.spec
            differences = {
                key: f"{key}={there.get(key, 'not set')} there, {here.get(key, 'not set')} here"
                for key in sorted({*here, *there} - set(ignored))
                if here.get(key, "not set") != there.get(key, "not set")
            }
            found.append((other, differences))
    least = min((differences for _, differences in found), key=len, default={})
    return [other for other, differences in found if differences == least], least


# ---------------------------------------------------------------- compare
# Results of one task side by side: intervals, gap closed as the paper defines it, paired differences, speeds.
#
# `task` makes the rows once and fills them in the order of the text: values and intervals, baseline, ELBO and gap
# closed,
# cost of the cache. Tables, pages and figures show them and compute nothing.


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
    choice: str = NONE,
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
                row.gap_interval = stats.stats_interval(value - baseline)
    elbos = _close_gaps(rows, ar, as_published)
    for row in rows:
        row.cache_cost = cache_cost(row, rows)
    notes = [*_notes(name, compared, elbos), *dict.fromkeys(remarks)]
    if metric in OTHER_UNITS and any(row.gap_closed is not None for row in rows):
        notes.append(f"gap closed is of {WORDS[metric]} here: the paper's numbers are per token and not these")
    sizes = {run.tasks[name].size for run in compared} - {None}
    return Comparison(
        metric=metric,
        documents=sizes.pop() if len(sizes) == 1 else None,
        rows=rows,
        rules=_speeds(rows, ar),
        pairs=choose(choice, rows),
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
        for row, draws in zip(known, stats.stats_rates(table), strict=True):
            row.draws = draws
            row.interval = stats.stats_interval(*task_rows.drawn_values(row))


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
            row.elbo, why = find_elbo(row, rows, as_published)
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
