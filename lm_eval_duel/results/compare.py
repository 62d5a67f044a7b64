"""Results of one task side by side: intervals, gaps, gap closed as the paper defines it, paired differences, speeds.

`task` reads from top to bottom: rows, their bootstrap draws, the baseline, and then one `ComparedRow` for each row.
Tables, pages and figures show these and compute nothing.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Collection, Iterable, Mapping, Sequence

from lm_eval_duel.core.scores import METRICS
from lm_eval_duel.errors import DuelError, counted
from lm_eval_duel.results import gaps, match, notes, order, ranks, rows
from lm_eval_duel.results.gaps import Draws, GapClosed, Interval, Pair
from lm_eval_duel.results.ranks import Place
from lm_eval_duel.results.rows import Row
from lm_eval_duel.results.runs import Run, size_in_words
from lm_eval_duel.results.table import WORDS, Note
from lm_eval_duel.rules import family

RULES = "rules"
MODELS = "models"
BOTH = "both"
ALL = "all"
NONE = "none"
CHOICES = (BOTH, RULES, MODELS, ALL, NONE)  # of --pairs
MOST_ROWS = 5  # of which all pairs are listed; of more, each is compared with the lowest
PAPER_RULE = "greedy:k=1"  # the rule of the paper's perplexity tables
OTHER_UNITS = ("word_perplexity", "byte_perplexity")


# ---------------------------------------------------------------- a row compared with the others


@dataclasses.dataclass(frozen=True, eq=False)
class ComparedRow:
    """A row among the others of its table."""

    row: Row
    interval: Interval | None  # 95 %, over documents
    window_stderr: float | None  # over windows, of a value per token without an interval
    about_interval: Note  # why there is none, or that it is from few documents
    best: bool  # the lowest likelihood of its model
    place: Place | None  # its rank; None for bounds and the oracle
    gap: float | None  # to the baseline
    gap_interval: Interval | None
    about_gap: Note  # what differs from the baseline, under --as_published
    closed: GapClosed
    drawn_elbo: Row | None  # the best Monte Carlo ELBO of a DUEL row
    cache_cost: Pair | None


@dataclasses.dataclass(frozen=True)
class Speeds:
    """The rows of one model, block and cache against NFE, in the order of the task's table.

    `families`: each rule at several speeds, fastest first.
    """

    title: str
    rows: list[ComparedRow]
    elbo: Row | None
    ar: Row | None
    oracle: Row | None
    families: dict[str, list[ComparedRow]]


@dataclasses.dataclass(frozen=True)
class Comparison:
    """The results of one task side by side. `same`: rows that one stands for.

    `documents`: their number; `available`: those of the task without --limit. None: not known, or not the same.
    """

    name: str
    metric: str
    documents: int | None
    available: int | None
    rows: list[ComparedRow]
    rules: list[Speeds]
    pairs: list[Pair]
    differences: list[str]
    as_published: bool
    windows: str  # the note on how documents were cut
    notes: list[str]
    draws: Draws
    same: Mapping[Row, list[Row]]

    @property
    def size(self) -> str:
        """The number of documents, as `36 documents` or `12 of 36 documents`; empty if it is not known."""
        return size_in_words(self.documents, self.available)

    @property
    def tokens(self) -> int | None:
        """The number of their tokens; None if it is not known, or if the tokenizers of several models differ in it."""
        return _shared(each.row.tokens for each in self.rows)

    @property
    def has_gap(self) -> bool:
        """True if a row has a gap to a baseline."""
        return any(each.gap is not None for each in self.rows)

    @property
    def closes_a_gap(self) -> bool:
        """True if the share that a row closes of a gap is known."""
        return _closes_a_gap(self.rows)

    @property
    def possible_pairs(self) -> int:
        """The number of pairs of its rows, those with the oracle left out, as in `choose`."""
        return math.comb(sum(each.row.score.is_likelihood for each in self.rows), 2)

    def pair(self, first: Row, second: Row) -> Pair:
        """The difference of two of its rows."""
        return gaps.pair(first, second, self.draws)


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
    base = _newest(baselines, compared)
    compared.sort(key=lambda run: run is not base)
    metric = shared_metric(name, metric, compared)
    differences = match.check(name, metric, compared, as_published)

    table, left_out = _table(name, metric, compared, base)
    ar = next((row for row in table.rows if row.ar), None)
    if base is not None and ar is None:
        raise DuelError(f"The autoregressive baseline {base.name} has no row; name one result of one model as --ar.")

    draws = gaps.draw(table.rows)
    best = _best(table.rows)
    places = ranks.places(table.rows, draws)
    shown = []
    described: dict[Row, str] = {}  # each ELBO whose gap is closed, in words
    for row in table.rows:
        closed = GapClosed()
        drawn_elbo = None
        if row.is_duel:
            elbos, why = gaps.find_elbos(row, table.rows, as_published)
            elbo = elbos[0] if elbos else None
            closed = gaps.close_gap(row, elbo, ar, draws, why)
            drawn_elbo = next((other for other in elbos if other.is_drawn_bound), None)
            if elbo is not None:
                described[elbo] = notes.about_elbo(elbo, why)
        shown.append(
            ComparedRow(
                row=row,
                interval=gaps.interval(row, draws),
                window_stderr=None if row in draws else row.window_stderr,
                about_interval=gaps.about_interval(row, draws),
                best=row in best,
                place=places.get(row),
                gap=None if ar is None or row is ar else row.value - ar.value,
                gap_interval=gaps.gap_interval(row, ar, draws),
                about_gap=gaps.as_published([row, ar]),
                closed=closed,
                drawn_elbo=drawn_elbo,
                cache_cost=gaps.cache_cost(row, table.rows, draws),
            )
        )

    notes_of_task = notes.tokenizers(name, compared)
    for row in table.rows:  # in the order of the table
        if row in described:
            notes_of_task.append(described[row])
    notes_of_task += notes.precision(compared)
    notes_of_task += notes.contexts(name, compared)
    notes_of_task += notes.copies(table.rows)
    windows = notes.windows(name, compared)
    notes_of_task.append(windows)
    notes_of_task += dict.fromkeys([*left_out, *table.notes])
    if metric in OTHER_UNITS and _closes_a_gap(shown):
        computed = f"Gap closed is computed from {WORDS[metric]} here."
        notes_of_task.append(f"{computed} The paper computes it per token, so the two cannot be compared.")

    return Comparison(
        name=name,
        metric=metric,
        documents=_shared(run.tasks[name].size for run in compared),
        available=_shared(run.tasks[name].available for run in compared),
        rows=shown,
        rules=_speeds(shown, ar),
        pairs=choose(choice, shown, draws),
        differences=differences,
        as_published=as_published,
        windows=windows,
        notes=notes_of_task,
        draws=draws,
        same=table.same,
    )


def _newest(baselines: Collection[Run], compared: Sequence[Run]) -> Run | None:
    """The newest baseline among the runs of a task, which are oldest first; None if there is none."""
    newest = None
    for run in compared:
        if run in baselines:
            newest = run
    return newest


def _closes_a_gap(shown: Iterable[ComparedRow]) -> bool:
    return any(each.closed.percent is not None for each in shown)


def _shared(counts: Iterable[int | None]) -> int | None:
    """The count on which all runs that know it agree; None if they differ, or none knows it."""
    known = set(counts) - {None}
    return known.pop() if len(known) == 1 else None


def _table(name: str, metric: str, compared: Sequence[Run], base: Run | None) -> tuple[order.Ordered, list[str]]:
    """The rows of all runs that have the metric, in order, and notes on values that are left out."""
    every_row: list[Row] = []
    notes: list[str] = []
    for run in compared:
        rows_of_run, left_out = rows.from_run(run, name, metric, baseline=run is base)
        every_row += [row for row in rows_of_run if metric in row.metrics]
        notes += left_out
    return order.in_order(every_row), notes


def shared_metric(name: str, requested: str | None, compared: Sequence[Run]) -> str:
    """The metric of a task's table: the requested one, else the first that all results have."""
    shared = set(METRICS)
    for run in compared:
        shared &= run.tasks[name].metrics.keys()
    if requested in shared:
        return requested
    if requested is None and shared:
        return min(shared, key=METRICS.index)
    files: dict[str, list[str]] = {}  # by the metrics that they have
    for run in compared:
        files.setdefault(", ".join(run.tasks[name].metrics), []).append(run.name)
    available = []
    for metrics, names in files.items():
        place = counted(len(names), "result") if len(files) == 1 else ", ".join(names)
        available.append(f"{metrics} in {place}")
    wanted = f"{requested} of {name}" if requested else f"a metric of {name} that all results have"
    advice = "Report results that share one metric"
    if shared:
        names_of_shared = ", ".join(sorted(shared, key=METRICS.index))
        advice = f"Name one of {names_of_shared} with --metric" if len(files) > 1 else "Name one of these with --metric"
    raise DuelError(f"Wanted {wanted}, but there is: {'; '.join(available)}. {advice}.")


def _best(shown: Sequence[Row]) -> set[Row]:
    """The lowest likelihood of each model with several rows. Bounds and the oracle do not count.

    Values given the noise of different seeds do not compete: a model with several of them has no best row.
    """
    models: dict[str, list[Row]] = {}
    for row in shown:
        if row.score.is_likelihood and not row.ar:
            models.setdefault(row.model, []).append(row)
    best = set()
    for rows_of_model in models.values():
        if len(rows_of_model) < 2:
            continue
        exact = []
        for row in rows_of_model:
            if row.score.is_exact and math.isfinite(row.value):
                exact.append(row)
        seeds = {row.noise_seed for row in exact}  # None for values without noise
        if len(seeds) == 1:
            best.add(min(exact, key=lambda row: row.value))
    return best


# ---------------------------------------------------------------- pairs


def choose(choice: str, shown: Sequence[ComparedRow], draws: Draws) -> list[Pair]:
    """The pairs of `--pairs`.

    `rules`: the DUEL rows of one setting (`by_setting`) against each other; of more than five, each against the lowest.
    `models`: the row of each model that its headline is about, in the same way; `both`: these two. `all`: every two
    rows. The oracle, which is not a likelihood, is in no pair.
    """
    likelihoods = [each for each in shown if each.row.score.is_likelihood]
    pairs: list[tuple[Row, Row]] = []
    if choice == ALL:
        every_row = [each.row for each in likelihoods]
        pairs += itertools.combinations(every_row, 2)
    if choice in (BOTH, MODELS):
        of_models = by_model(likelihoods).values()
        pairs += _with_lowest(list(map(main_row, of_models)))
    if choice in (BOTH, RULES):
        for group in by_setting([each.row for each in shown]):
            pairs += _with_lowest(group)
    differences = [gaps.pair(first, second, draws) for first, second in pairs]
    return _in_groups(differences)


def _in_groups(pairs: Sequence[Pair]) -> list[Pair]:
    """Pairs whose rows share the same model, block and cache together, in each group as `_by_verdict` sorts them."""
    groups: dict[tuple, list[Pair]] = {}
    for pair in pairs:
        shared = []
        for setting in ("model", "block", "cache"):
            of_first = getattr(pair.first, setting)
            of_second = getattr(pair.second, setting)
            shared.append(of_first if of_first == of_second else None)
        groups.setdefault(tuple(shared), []).append(pair)
    ordered = []
    for group in groups.values():
        ordered += sorted(group, key=_by_verdict)
    return ordered


def _by_verdict(pair: Pair) -> tuple[bool, bool, float]:
    """Sorts the pairs in which one is better first, then those with another verdict; the largest difference first."""
    return not pair.better, not pair.verdict, -abs(pair.difference or 0.0)


def by_setting(shown: Sequence[Row]) -> list[list[Row]]:
    """The DUEL rows of each network, block and cache: one distribution over unmasked tokens under several rules.

    A model has several such networks if rows of one name differ in their specs, as with two temperatures. Then its
    other rows belong to one of these, too.
    """
    keys: dict[str, set[str]] = {}  # the entries in which rows of one name differ, of each model
    for row in shown:
        keys.setdefault(row.model, set()).update(row.variant_keys)
    groups: dict[tuple, list[Row]] = {}
    for row in shown:
        if row.estimator == "duel" and not row.ar:
            entries = [row.run.spec.get(key) for key in sorted(keys[row.model])]
            setting = (row.model, row.block, row.cache, row.noise_seed, *entries)
            groups.setdefault(setting, []).append(row)
    return list(groups.values())


def by_model(rows: Iterable[ComparedRow]) -> dict[str, list[ComparedRow]]:
    """The rows of each model."""
    models: dict[str, list[ComparedRow]] = {}
    for each in rows:
        models.setdefault(each.row.model, []).append(each)
    return models


def _with_lowest(group: Sequence[Row]) -> list[tuple[Row, Row]]:
    lowest_row = min(group, key=lambda row: row.value, default=None)
    return pairs_of(group, lowest_row)


def pairs_of(group: Sequence[Row], main: Row | None) -> list[tuple[Row, Row]]:
    """Every two rows of a group; if it is large, each with its main row."""
    if len(group) <= MOST_ROWS:
        return list(itertools.combinations(group, 2))
    return [(row, main) for row in group if row is not main]


def main_row(likelihoods: Sequence[ComparedRow]) -> Row:
    """The row that stands for a model: the baseline, the row of its headline, or its lowest likelihood or bound.

    Rows without values per document, which have no verdict, stand for a model only if all its rows have none.
    """
    for each in likelihoods:
        if each.row.ar:
            return each.row
    likelihoods = [each for each in likelihoods if each.row.documents] or likelihoods
    return (headline(likelihoods) or lowest(likelihoods)).row


def lowest(likelihoods: Sequence[ComparedRow]) -> ComparedRow | None:
    """The lowest likelihood; of bounds alone, the lowest of these."""
    return min(likelihoods, key=lambda each: (each.row.score.is_bound, each.row.value), default=None)


def headline(shown: Sequence[ComparedRow]) -> ComparedRow | None:
    """The DUEL row of a headline: the paper's rule, else the best; rows without a cache, then with an ELBO, first.

    Of values given the noise of several seeds it is that of the first seed, not of the best.
    """
    exact = [each for each in shown if each.row.estimator == "duel"]
    duels = exact or [each for each in shown if each.row.entry.follows_rule]
    of_paper = [each for each in duels if each.row.rule == PAPER_RULE]

    def preference(each: ComparedRow) -> tuple:
        seed = float(each.row.noise_seed or 0)
        return each.row.run.has_cache, each.closed.elbo is None, seed, each.row.value

    return min(of_paper or duels, key=preference, default=None)


# ---------------------------------------------------------------- speeds


def _speeds(shown: Sequence[ComparedRow], ar: Row | None) -> list[Speeds]:
    """Rule families against NFE, for each setting (`by_setting`) with two or more different NFEs."""
    speeds = []
    compared = {each.row: each for each in shown}
    for group in by_setting(list(compared)):
        members = [compared[row] for row in group if row.nfe_per_token]
        different_nfes = {round(each.row.nfe_per_token, 3) for each in members}
        if len(different_nfes) < 2:
            continue
        first = members[0].row
        elbos = [each.closed.elbo for each in members if each.closed.elbo is not None]
        speeds.append(
            Speeds(
                title=_title_of(members),
                rows=members,
                elbo=elbos[0] if elbos else None,
                ar=ar,
                oracle=_oracle(first, shown),
                families=_families(members),
            )
        )
    return speeds


def _title_of(members: Sequence[ComparedRow]) -> str:
    """The model, block and cache of rows that share these, and what else distinguishes them."""
    first = members[0].row
    parts = first.parts
    cache = parts["cache"] if first.run.has_cache else ""
    qualifiers = max((each.row.qualifiers for each in members), key=len)  # the fullest: some need no variant
    return ", ".join(filter(None, [first.model, parts["block"], cache, qualifiers]))


def _oracle(row: Row, shown: Sequence[ComparedRow]) -> Row | None:
    """The oracle of a row's model, block and cache."""
    for each in shown:
        other = each.row
        if other.estimator != "oracle":
            continue
        if (other.model, other.block, other.cache) == (row.model, row.block, row.cache):
            return other
    return None


def _families(members: Sequence[ComparedRow]) -> dict[str, list[ComparedRow]]:
    """The rows of each rule family, fastest first; families in the order of the table."""
    families: dict[str, list[ComparedRow]] = {}
    for each in members:  # in the order of the table
        name, _ = family(each.row.rule)
        families.setdefault(name, []).append(each)
    for of_family in families.values():
        of_family.sort(key=lambda each: each.row.nfe_per_token)
    return families
