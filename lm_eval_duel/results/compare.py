"""Results of one task side by side: intervals, gaps, gap closed as the paper defines it, paired differences, speeds.

`task` reads from top to bottom: rows, their bootstrap draws, the baseline, and then one `ComparedRow` for each row.
Tables, pages and figures show these and compute nothing.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Collection, Mapping, Sequence

import numpy as np

from lm_eval_duel.core.scores import METRICS
from lm_eval_duel.errors import DuelError
from lm_eval_duel.results import match, rows, stats
from lm_eval_duel.results.gaps import Draws, GapClosed, Interval, close_gap, find_elbos, nearest, no_interval, values
from lm_eval_duel.results.rows import NON_IDENTITY_KEYS, Row
from lm_eval_duel.results.runs import NO_CACHE, Run
from lm_eval_duel.results.stats import PairedDifference, Side
from lm_eval_duel.results.table import WORDS, Note, number
from lm_eval_duel.rules.tables import family

UNITS = {"token_perplexity": "token", "perplexity": "document", "word_perplexity": "word"}  # of others: byte
BOTH, RULES, MODELS, ALL, NONE = "both", "rules", "models", "all", "none"
CHOICES = (BOTH, RULES, MODELS, ALL, NONE)  # of --pairs
MOST_ROWS = 5  # of which all pairs are listed; of more, each is compared with the lowest
PAPER_RULE = "greedy:k=1"  # the rule of the paper's perplexity tables
OTHER_UNITS = ("word_perplexity", "byte_perplexity")


# ---------------------------------------------------------------- what is known of a row among others


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pair(PairedDifference):
    """The paired difference of two rows; `second` is None, with the `reason`, if there is no row to compare with."""

    first: Row
    second: Row | None
    reason: Note  # why there is no difference, or no interval


@dataclasses.dataclass(frozen=True, eq=False)
class ComparedRow:
    """A row among the others of its table."""

    row: Row
    interval: Interval | None  # 95 %, over documents
    window_stderr: float | None  # over windows, if there is no interval
    no_interval: Note  # why not
    best: bool  # the lowest likelihood of its model
    gap: float | None  # to the baseline
    gap_interval: Interval | None
    closed: GapClosed
    drawn_elbo: Row | None  # the best Monte Carlo ELBO of a DUEL row
    cache_cost: Pair | None


@dataclasses.dataclass(frozen=True)
class Speeds:
    """The rows of one model, block and cache against NFE. `families`: each rule at several speeds, fastest first."""

    title: str
    elbo: Row | None
    ar: Row | None
    oracle: Row | None
    families: dict[str, list[ComparedRow]]

    @property
    def rows(self) -> list[ComparedRow]:
        return [row for points in self.families.values() for row in points]


@dataclasses.dataclass(frozen=True)
class Comparison:
    """The results of one task side by side. `documents`: their number. `same`: rows that one stands for."""

    name: str
    metric: str
    documents: int | None
    rows: list[ComparedRow]
    rules: list[Speeds]
    pairs: list[Pair]
    differences: list[str]
    as_published: bool
    notes: list[str]
    draws: Draws
    same: Mapping[Row, list[Row]]

    def pair(self, first: Row, second: Row) -> Pair:
        """The difference of two of its rows."""
        return pair(first, second, self.draws)


def task(
    name: str,
    runs: Sequence[Run],
    baselines: Collection[Run] = (),
    metric: str | None = None,
    as_published: bool = False,
    choice: str = NONE,
) -> Comparison:
    """One task: its rows with intervals and gap closed, paired differences, and the notes under its tables.

    `runs`: oldest first. `baselines`: those of the autoregressive model of the gaps. `metric`: the default is the first
    that all results have. `choice`: of pairs, as in `--pairs`.
    """
    compared = [run for run in runs if name in run.tasks]
    base = next((run for run in reversed(compared) if run in baselines), None)
    compared.sort(key=lambda run: run is not base)
    metric = shared_metric(name, metric, compared)
    differences = match.check(name, metric, compared, as_published)
    made, remarks = [], []
    for run in compared:
        of_run, left_out = rows.of_run(run, name, metric, baseline=run is base)
        made += [row for row in of_run if metric in row.metrics]
        remarks += left_out
    table = rows.in_order(made)
    ar = next((row for row in table.rows if row.ar), None)
    if base is not None and ar is None:
        raise DuelError(f"The autoregressive baseline {base.name} has no row; name one result of one model as --ar.")
    draws = _draws(table.rows)
    best = _best(table.rows)
    elbos = {row: find_elbos(row, table.rows, as_published) for row in table.rows if row.duel}
    shown = []
    for row in table.rows:
        found, why = elbos.get(row, ([], ""))
        own = draws.get(row)
        shown.append(
            ComparedRow(
                row=row,
                interval=None if own is None else stats.stats_interval(*values([row], draws)),
                window_stderr=row.error(row.nats_window_stderr) if own is None else None,
                no_interval=row.no_interval if own is None else Note(),
                best=row in best,
                gap=None if ar is None or row is ar else row.value - ar.value,
                gap_interval=_gap_interval(row, ar, draws),
                closed=close_gap(row, found[0] if found else None, ar, draws, why) if row.duel else GapClosed(),
                drawn_elbo=next((elbo for elbo in found if elbo.drawn_bound), None),
                cache_cost=cache_cost(row, table.rows, draws),
            )
        )
    described = {elbo: _describe(elbo, why) for found, why in elbos.values() for elbo in found[:1]}
    notes = [
        *_notes(name, compared),
        *(described[row] for row in table.rows if row in described),
        *_precision(compared),
        _windows(compared),
        *dict.fromkeys([*remarks, *table.notes]),
    ]
    if metric in OTHER_UNITS and any(row.closed.percent is not None for row in shown):
        here = f"Gap closed is computed from {WORDS[metric]} here."
        notes.append(f"{here} The paper computes it per token, so the two cannot be compared.")
    sizes = {run.tasks[name].size for run in compared} - {None}
    return Comparison(
        name=name,
        metric=metric,
        documents=sizes.pop() if len(sizes) == 1 else None,
        rows=shown,
        rules=_speeds(shown, ar),
        pairs=choose(choice, shown, draws),
        differences=differences,
        as_published=as_published,
        notes=notes,
        draws=draws,
        same=table.same,
    )


def shared_metric(name: str, requested: str | None, compared: Sequence[Run]) -> str:
    """The metric of a task's table: the requested one, else the first that all results have."""
    shared = [metric for metric in METRICS if all(metric in run.tasks[name].metrics for run in compared)]
    if requested in shared or (requested is None and shared):
        return requested or shared[0]
    available = "; ".join(f"{run.name}: {', '.join(run.tasks[name].metrics)}" for run in compared)
    wanted = f"{requested} of {name}" if requested else f"a metric of {name} that all results have"
    raise DuelError(f"Wanted {wanted}, but there is: {available}. Name another with --metric, or leave the task out.")


# ---------------------------------------------------------------- draws


def _draws(shown: Sequence[Row]) -> dict[Row, np.ndarray]:
    """Bootstrap draws of the rows that have the documents of the first that has any. All use the same resampling."""
    known = [row for row in shown if len(row.documents) > 1 and math.isfinite(row.value)]
    known = [row for row in known if row.documents.keys() == known[0].documents.keys()]
    if not known:
        return {}
    table = np.array([[row.documents[key] for row in known] for key in sorted(known[0].documents)])
    return dict(zip(known, stats.stats_rates(table), strict=True))


def _gap_interval(row: Row, ar: Row | None, draws: Draws) -> Interval | None:
    """The interval of a row's gap to the baseline."""
    if ar is None or row is ar or row not in draws or ar not in draws:
        return None
    value, baseline = values([row, ar], draws)
    return stats.stats_interval(value - baseline)


def _best(shown: Sequence[Row]) -> set[Row]:
    """The lowest likelihood of each model with several rows. Bounds and the oracle do not count."""
    best = set()
    for model in {row.model for row in shown}:
        mine = [row for row in shown if row.model == model and row.likelihood and not row.ar]
        proper = [row for row in mine if row.proper and math.isfinite(row.value)]
        if len(mine) > 1 and proper:
            best.add(min(proper, key=lambda row: row.value))
    return best


# ---------------------------------------------------------------- pairs


def unit(metric: str) -> str:
    """The unit that a metric counts: `token`, `word`, ..."""
    return UNITS.get(metric, "byte")


def pair(first: Row, second: Row, draws: Draws) -> Pair:
    """The difference of two rows with its interval (or the reason why there is none) and verdict."""
    sides = []
    for row, name in zip((first, second), rows.names((first, second)), strict=True):
        sides.append(Side(name, row.kind, row.rate, row.rate_stderr, row.stderr_reason, draws.get(row)))
    found = stats.difference(*sides, unit(first.metric), [key.rpartition(":")[0] for key in first.documents])
    reason = Note()
    if found.difference is None:
        reason = Note("no difference of an infinite perplexity")
    elif found.interval is None:
        reason = no_interval(second if first in draws else first)
    return Pair(**vars(found), first=first, second=second, reason=reason)


def choose(choice: str, shown: Sequence[ComparedRow], draws: Draws) -> list[Pair]:
    """The pairs of `--pairs`.

    `rules`: the DUEL rows of a network with one block and one cache against each other; of more than five, each against
    the lowest. `models`: the row of each model that its headline is about, in the same way; `both`: these two. `all`:
    every two rows. The oracle, which is not a likelihood, is in no pair.
    """
    likelihoods = [each.row for each in shown if each.row.likelihood]
    if choice == ALL:
        return [pair(*both, draws) for both in itertools.combinations(likelihoods, 2)]
    groups: dict[tuple, list[Row]] = {}
    if choice in (BOTH, MODELS):
        models = dict.fromkeys(row.model for row in likelihoods)
        groups[()] = [main_row([each for each in shown if each.row.model == model]) for model in models]
    for row in likelihoods if choice in (BOTH, RULES) else ():
        if row.estimator == "duel" and not row.ar:
            groups.setdefault((row.model, row.block, row.run.cache, row.qualifiers), []).append(row)
    found: list[tuple[Row, Row]] = []
    for group in groups.values():
        lowest = min(group, key=lambda row: row.value, default=None)
        every = itertools.combinations(group, 2) if len(group) <= MOST_ROWS else ((row, lowest) for row in group)
        found += [(first, second) for first, second in every if first is not second]
    return [pair(first, second, draws) for first, second in found]


def main_row(of_model: Sequence[ComparedRow]) -> Row:
    """A model's row: the baseline, the row of its headline, or else its lowest likelihood or bound."""
    likelihoods = [each for each in of_model if each.row.likelihood]
    baseline = next((each for each in likelihoods if each.row.ar), None)
    lowest = min(likelihoods, key=lambda each: (each.row.bound, each.row.value))
    return (baseline or headline(likelihoods) or lowest).row


def headline(shown: Sequence[ComparedRow]) -> ComparedRow | None:
    """The DUEL row of a headline: the paper's rule, else the best; rows without a cache, then with an ELBO, first."""
    duels = [each for each in shown if each.row.estimator == "duel"]
    duels = duels or [each for each in shown if each.row.entry.follows_rule]
    duels = [each for each in duels if each.row.rule == PAPER_RULE] or duels
    return min(duels, key=lambda each: (each.row.run.has_cache, each.closed.elbo is None, each.row.value), default=None)


# ---------------------------------------------------------------- which rows belong together


def cache_cost(row: Row, shown: Sequence[Row], draws: Draws) -> Pair | None:
    """Cached minus uncached, everything else in the spec the same; None for a row without a cache."""
    if not row.run.has_cache:
        return None
    ignored = {"estimator"} if row.of_draws else NON_IDENTITY_KEYS  # the draws are part of its value

    def fits(other: Row) -> bool:
        return other.run.cache == NO_CACHE and (other.estimator, other.rule) == (row.estimator, row.rule)

    found, differences = nearest(row, shown, fits, ignored | {"cache"})
    if found and not differences:
        return pair(row, found[0], draws)
    reason = "no result of this network and rule has cache=none"
    if differences:
        reason = f"no result with cache=none has the same spec; the nearest differs: {'; '.join(differences.values())}"
    return Pair(first=row, second=None, reason=Note(reason))


def _describe(elbo: Row, why: str) -> str:
    """A description of an ELBO with its standard error. `why`: how its spec differs from the row's."""
    spec, stderr = elbo.run.spec, elbo.stderr
    if elbo.entry.lattice:
        text = f"exact, the mean over all orders in blocks of {elbo.block} (elbo_exact)"
    else:
        form = f", elbo_form={spec['elbo_form']}" if "elbo_form" in spec else ""
        eps = f", elbo_eps={elbo.eps:g} (above 0: NO bound)" if elbo.eps else ""
        error = f", standard error {number(stderr, '.2g')}" if stderr is not None else ", no standard error"
        text = f"Monte Carlo, mc_samples={spec.get('mc_samples', '?')}{form}, elbo_block={elbo.block}{eps}{error}"
    variant = f" ({elbo.variant})" if elbo.variant else ""
    return f"ELBO of {elbo.model}{variant}: {text}{f' ({why})' if why else ''}"


# ---------------------------------------------------------------- notes and speeds


def _notes(name: str, compared: Sequence[Run]) -> list[str]:
    """Notes on unknown tokens."""
    shares = dict.fromkeys((run.label, run.tasks[name].unknown) for run in compared if run.tasks[name].unknown)
    return [
        f"{share:.1%} of the tokens of {label} are [UNK]: its bits per byte, byte and word perplexity are not a "
        "likelihood of the text"
        for label, share in shares
    ]


def _precision(compared: Sequence[Run]) -> list[str]:
    """Notes on networks in low precision, whose orders and sums are coarser."""
    notes = []
    for run in compared:
        if run.dtype not in ("float32", "float64"):
            default = "" if run.ours else " (the default of --model hf; dtype=float32 changes it)"
            notes.append(f"{run.label} ran in {run.dtype}{default}: {run.short_name}")
    return notes


def _windows(compared: Sequence[Run]) -> str:
    """A note on how the documents were cut."""
    windows: dict[str, dict[str, None]] = {}
    for run in compared:
        windows.setdefault(run.label, {})[match.windows_of(run)] = None
    listed = "; ".join(f"{label}: {' and '.join(of_label)}" for label, of_label in windows.items())
    return f"windows: {listed}"


def _speeds(shown: Sequence[ComparedRow], ar: Row | None) -> list[Speeds]:
    """Rule families against NFE, for each model, block and cache with two or more different NFEs."""
    groups: dict[tuple, list[ComparedRow]] = {}
    for each in shown:
        row = each.row
        if row.estimator == "duel" and row.nfe_per_token:
            groups.setdefault((row.model, row.block, row.run.cache, row.variant), []).append(each)
    speeds = []
    for (model, block, cache, variant), members in groups.items():
        if len({round(each.row.nfe_per_token, 3) for each in members}) > 1:
            elbo = next((each.closed.elbo for each in members if each.closed.elbo is not None), None)
            oracle = next((each.row for each in shown if _is_oracle(each.row, model, block, cache)), None)
            parts = members[0].row.parts
            title = ", ".join(filter(None, [model, parts["block"], parts["cache"] if cache != "none" else "", variant]))
            speeds.append(Speeds(title, elbo, ar, oracle, _families(members)))
    return speeds


def _is_oracle(row: Row, model: str, block: str | None, cache: str | None) -> bool:
    return (row.model, row.estimator, row.block, row.run.cache) == (model, "oracle", block, cache)


def _families(members: Sequence[ComparedRow]) -> dict[str, list[ComparedRow]]:
    """The rows of each rule family, fastest first."""
    families: dict[str, list[ComparedRow]] = {}
    for each in sorted(members, key=lambda each: each.row.nfe_per_token):
        families.setdefault(family(each.row.rule)[0], []).append(each)
    return {name: families[name] for name in dict.fromkeys(family(each.row.rule)[0] for each in members)}
