"""One row against another: intervals, paired differences, the cost of a cache, the gap that DUEL closes."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Collection, Mapping, Sequence

import numpy as np

from lm_eval_duel.results import bootstrap, match, rows, stats
from lm_eval_duel.results.rows import Row
from lm_eval_duel.results.runs import NO_CACHE
from lm_eval_duel.results.spec_entries import ESTIMATOR_KEYS, NON_IDENTITY_KEYS
from lm_eval_duel.results.stats import UNCLEAR, PairedDifference, Side
from lm_eval_duel.results.table import Note, number

CONVENTIONS = {"special_tokens", "windows", "max_length", "sigma"}  # entries in which published figures may differ
UNITS = {"token_perplexity": "token", "perplexity": "document", "word_perplexity": "word"}  # of others: byte
EXACT = "exact"  # an ELBO: the mean over all orders
MONTE_CARLO = "Monte Carlo"  # an estimate of it
CLOSE = f"{UNCLEAR}: the ELBO is within two standard errors of DUEL"
BETTER = "no gap to close: the ELBO is not above the autoregressive model's value"
NOT_OF_PERPLEXITY = Note("gap closed is defined for perplexities")
Draws = Mapping[Row, np.ndarray]  # of nats per unit, by the bootstrap over documents that all rows share
Interval = list[float]  # low, high


# ---------------------------------------------------------------- draws and intervals


def draw(shown: Sequence[Row]) -> Draws:
    """Bootstrap draws of the rows that have the documents of the first that has any. All use the same resampling."""
    drawable: list[Row] = []
    for row in shown:
        if len(row.documents) < 2 or math.isinf(row.value):
            continue
        if not drawable or row.documents.keys() == drawable[0].documents.keys():
            drawable.append(row)  # rows of other documents cannot be resampled together with these
    if not drawable:
        return {}
    documents = sorted(drawable[0].documents)
    table = np.empty((len(documents), len(drawable), 2))  # (documents, rows, nats and units)
    for n, row in enumerate(drawable):
        table[:, n] = [row.documents[key] for key in documents]
    texts = [bootstrap.text_of(key) for key in documents]
    return dict(zip(drawable, bootstrap.bootstrap_rates(table, texts), strict=True))


def values(compared: Sequence[Row], draws: Draws) -> list[np.ndarray]:
    """The values of rows that are compared in each draw of the bootstrap, with their Monte Carlo errors."""
    rates = []
    errors = []
    for row in compared:
        rates.append(draws[row])
        errors.append(row.per_unit.interval_error)
    result = []
    for row, with_error in zip(compared, bootstrap.with_errors(rates, errors), strict=True):
        result.append(stats.value(row.metric, -with_error, 1.0))
    return result


def interval(row: Row, draws: Draws) -> Interval | None:
    """The interval of a row's value over documents."""
    if row not in draws:
        return None
    [of_row] = values([row], draws)
    return bootstrap.percentile_interval(of_row, row.distinct)


def about_interval(row: Row, draws: Draws) -> Note:
    """The reason that a row's value has no interval, or that the interval is from few documents; else empty."""
    return Note(stats.too_few(row.texts)) if row in draws else row.no_interval


def gap_interval(row: Row, ar: Row | None, draws: Draws) -> Interval | None:
    """The interval of a row's gap to the baseline."""
    if ar is None or row is ar or row not in draws or ar not in draws:
        return None
    of_row, of_baseline = values([row, ar], draws)
    return bootstrap.percentile_interval(of_row - of_baseline, row.distinct)


def no_interval(row: Row) -> Note:
    """The reason that nothing with this row has an interval: it has no draws."""
    return row.no_interval.after(f"no interval: {row.model}, {row.name}: ")


# ---------------------------------------------------------------- paired differences


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pair(PairedDifference):
    """The paired difference of two rows; `second` is None, with the `reason`, if there is no row to compare with.

    The difference and its interval are in `difference_unit`: under bits per byte in bits, like the values.
    """

    first: Row
    second: Row | None
    reason: Note  # why there is no difference, or no interval

    @property
    def difference_unit(self) -> str:
        return difference_unit(self.first.metric)


def unit(metric: str) -> str:
    """The unit that a metric counts: `token`, `word`, ..."""
    return UNITS.get(metric, "byte")


def difference_unit(metric: str) -> str:
    """The unit of paired differences, such as `nats per token`."""
    return "bits per byte" if metric == "bits_per_byte" else f"nats per {unit(metric)}"


def pair(first: Row, second: Row, draws: Draws) -> Pair:
    """The difference of two rows with its interval (or the reason why there is none) and verdict.

    It has no verdict if the two differ in what `report` refuses to compare without --as_published.
    """
    names = rows.names((first, second))
    sides = []
    for row, name in zip((first, second), names, strict=True):
        sides.append(Side(name, row.per_unit, row.stderr_reason, draws.get(row), row.lost))
    paired = stats.difference(*sides, unit(first.metric), first.texts)
    reason = Note()
    if paired.difference is None:
        reason = Note("no difference of an infinite perplexity")
    elif paired.interval is None:
        reason = no_interval(second if first in draws else first)
    if first.metric == "bits_per_byte":
        paired = _in_bits(paired)
    of_rows = Pair(**vars(paired), first=first, second=second, reason=reason)
    differs = caveat([first, second])
    return dataclasses.replace(of_rows, better="", verdict=f"no verdict: {differs}") if differs else of_rows


def caveat(compared: Sequence[Row]) -> str:
    """A sentence on what differs between rows although `report` refuses to compare such results otherwise.

    It is on the first difference of any two; empty if there is none.
    """
    for first, second in itertools.combinations(compared, 2):
        for difference in match.differences(first.run, second.run, first.task):
            if not difference.is_allowed(first.metric):
                return difference.sentence
    return ""


def as_published(compared: Sequence[Row | None]) -> Note:
    """The caveat as a remark on what is computed from rows; empty without one."""
    differs = caveat([row for row in compared if row is not None])
    return Note(f"compared as published, although {differs}" if differs else "")


def _in_bits(paired: PairedDifference) -> PairedDifference:
    """The same difference in bits: its verdict stays."""
    difference = None
    interval = None
    if paired.difference is not None:
        difference = paired.difference / math.log(2)
    if paired.interval is not None:
        low, high = paired.interval
        interval = (low / math.log(2), high / math.log(2))
    return dataclasses.replace(paired, difference=difference, interval=interval)


def cache_cost(row: Row, shown: Sequence[Row], draws: Draws) -> Pair | None:
    """Cached minus uncached, everything else in the spec the same; None for a row without a cache."""
    if not row.run.has_cache:
        return None
    other, reason = uncached(row, shown)
    if other is not None:
        return pair(row, other, draws)
    return Pair(first=row, second=None, reason=Note(reason))


def uncached(row: Row, shown: Sequence[Row]) -> tuple[Row | None, str]:
    """The row without a cache that a cached one is compared with, or the reason that there is none."""
    ignored = {"estimator"} if row.is_drawn else NON_IDENTITY_KEYS  # the draws are part of its value

    def fits(other: Row) -> bool:
        return other.cache == NO_CACHE and (other.estimator, other.rule) == (row.estimator, row.rule)

    fitting, differences = nearest(row, shown, fits, ignored | {"cache"})
    if fitting and not differences:
        return fitting[0], ""
    if differences:
        listed = "; ".join(differences.values())
        return None, f"no result with cache=none has the same spec; the nearest differs: {listed}"
    return None, "no result of this network and rule has cache=none"


def nearest(
    row: Row, shown: Sequence[Row], fits: Callable[[Row], bool], ignored: Collection[str]
) -> tuple[list[Row], dict[str, str]]:
    """The fitting rows of the same model whose specs are nearest to a row's, and how they differ."""
    nearest_rows: list[Row] = []
    least: dict[str, str] = {}
    for other in shown:
        if other.run.key != row.run.key or not fits(other):
            continue
        differences = _differing_entries(row.run.spec, other.run.spec, ignored)
        if not nearest_rows or len(differences) < len(least):
            nearest_rows = [other]
            least = differences
        elif differences == least:  # rows that are equally near in other entries are left out
            nearest_rows.append(other)
    return nearest_rows, least


def _differing_entries(this: Mapping[str, str], that: Mapping[str, str], ignored: Collection[str]) -> dict[str, str]:
    """The entries in which the specs of two rows differ, as text."""
    differences = {}
    for key in sorted({*this, *that} - set(ignored)):
        one = this.get(key, "not set")
        other = that.get(key, "not set")
        if one != other:
            differences[key] = f"{key}={one} in this row, {other} in that one"
    return differences


# ---------------------------------------------------------------- gap closed


@dataclasses.dataclass(frozen=True)
class GapClosed:
    """The share of the ELBO's gap to the autoregressive baseline that a DUEL row closes, in per cent.

    `ar`: the baseline. `about_elbo_gap`: what differs between it and the ELBO although they are compared.
    `distinguishable`: whether the ELBO and DUEL differ by more than their errors; None if that is
    not tested. `percent` is None if they do not. `reason`: why `percent`, its error or its interval is not known, and
    what differs between the three although they are compared.
    """

    elbo: Row | None = None
    ar: Row | None = None
    elbo_gap: float | None = None
    about_elbo_gap: Note = dataclasses.field(default_factory=Note)
    distinguishable: bool | None = None
    percent: float | None = None
    stderr: float | None = None
    interval: Interval | None = None
    reason: Note = dataclasses.field(default_factory=Note)

    @property
    def of(self) -> str:
        """The ELBO whose gap is closed: itself, or an estimate of it. Empty without one."""
        if self.elbo is None:
            return ""
        return MONTE_CARLO if self.elbo.is_drawn_bound else EXACT

    @property
    def verdict(self) -> str:
        """That the share is not distinguishable from 0; empty if its interval does not contain 0, or is not known."""
        if self.interval is None:
            return ""
        low, high = self.interval
        return f"{UNCLEAR} from 0" if low <= 0 <= high else ""


def find_elbos(duel: Row, shown: Sequence[Row], as_published: bool) -> tuple[list[Row], str]:
    """The ELBOs of a DUEL row, the one to close a gap of first; or none of them, and the reason.

    An ELBO is of the same model under the same spec, except for the entries of the estimator. It covers the whole
    target for bidirectional networks and the trained blocks for block-causal ones, where the mean over all orders
    (elbo_exact) is the ELBO itself, and a Monte Carlo ELBO its estimate. So bounds are preferred, then the exact one,
    then more draws. `as_published`: without an ELBO of the same spec, accept one with other windows or scored
    positions, and return the differences.
    """
    if "noise_seed" in duel.run.spec:
        return [], _no_elbo_under_noise(duel, shown)
    causal = duel.run.config.duel.get("attention") in ("block_causal", "causal_prefix")
    block = duel.run.config.block if causal else "none"

    def fits(row: Row) -> bool:
        if row.block != block:
            return False
        return row.is_drawn_bound or (causal and row.estimator == "elbo_exact")

    elbos, differences = nearest(duel, shown, fits, NON_IDENTITY_KEYS | ESTIMATOR_KEYS)
    if not elbos:
        return [], f"no ELBO (estimator=elbo, elbo_block={block})"
    listed = "; ".join(differences.values())
    if differences and not (as_published and differences.keys() <= CONVENTIONS):
        return [], f"no ELBO of the same spec; the nearest differs: {listed}"

    def preference(row: Row) -> tuple:
        draws = row.run.spec.get("mc_samples", "none")
        count = 1.0 if draws == "none" else float(draws)
        return not row.eps, not row.is_drawn_bound, count

    why = f"as published, under another convention: {listed}" if differences else ""
    return sorted(elbos, key=preference, reverse=True), why


def _no_elbo_under_noise(duel: Row, shown: Sequence[Row]) -> str:
    """The reason that a value given the noise of a seed has no ELBO: the network's bound is that of another sampler."""
    for row in shown:
        if row.run.key == duel.run.key and row.entry.takes_noise == "only" and not row.entry.follows_rule:
            return "commit-once and ancestral sampling are two samplers, so neither value bounds the other"
    return "no ELBO bounds a likelihood given the noise of a seed"


def close_gap(row: Row, elbo: Row | None, ar: Row | None, draws: Draws, why: str) -> GapClosed:
    """Gap closed of a DUEL row with its errors, or the reason why there is none. `why`: why there is no ELBO."""
    if elbo is None:
        return GapClosed(ar=ar, reason=NOT_OF_PERPLEXITY if row.metric == "bits_per_byte" else Note(why))
    elbo_gap = None if ar is None else elbo.value - ar.value
    about_elbo_gap = as_published([elbo, ar])
    reason = _no_gap(row, elbo, ar)
    if reason:
        return GapClosed(elbo, ar, elbo_gap, about_elbo_gap, reason=reason)

    about_runs = as_published([row, ar, elbo])
    interval_of_percent, about_draws = _gap_closed_interval(elbo, row, ar, draws)
    have_draws = all(each in draws for each in (elbo, row, ar))
    if have_draws and interval_of_percent is None:  # other documents might make no gap
        return GapClosed(elbo, ar, elbo_gap, about_elbo_gap, reason=Note.joined([about_draws, about_runs]))

    errors = [error for error in (elbo.stderr_bound, row.stderr_bound) if error is not None]
    error = math.hypot(*errors) if errors else None  # of the difference: draws of the two are independent
    distinguishable = stats.is_distinguishable(elbo.value, row.value, error)
    percent = None
    stderr = None
    unclear = Note()
    if distinguishable:
        percent = 100 * (elbo.value - row.value) / elbo_gap
        row_stderr = 0.0 if row.stderr_bound is None else row.stderr  # an exact value has no error
        stderr = stats.gap_closed_stderr(elbo.value, row.value, ar.value, elbo.stderr, row_stderr)
    else:
        unclear = Note(CLOSE)

    return GapClosed(
        elbo=elbo,
        ar=ar,
        elbo_gap=elbo_gap,
        about_elbo_gap=about_elbo_gap,
        distinguishable=distinguishable,
        percent=percent,
        stderr=stderr,
        interval=interval_of_percent,
        reason=Note.joined([unclear, Note(elbo.stderr_reason), Note(row.stderr_reason), about_draws, about_runs]),
    )


def _gap_closed_interval(elbo: Row, row: Row, ar: Row, draws: Draws) -> tuple[Interval | None, Note]:
    """The interval of a gap closed, or None, and a remark on draws that it leaves out or lacks."""
    compared = [elbo, row, ar]
    for each in compared:
        if each not in draws:
            return None, no_interval(each)
    low_and_high, remark = stats.gap_interval(*values(compared, draws), row.distinct)
    return low_and_high, Note(remark)


def _no_gap(row: Row, elbo: Row, ar: Row | None) -> Note:
    """The reason that a row closes no gap; empty if the ELBO and the baseline make one."""
    if row.metric == "bits_per_byte":
        return NOT_OF_PERPLEXITY
    if ar is None:
        return Note("no autoregressive result is the baseline of this table", "--ar")
    if not all(map(math.isfinite, (elbo.value, row.value, ar.value))):
        return Note("no gap closed of an infinite perplexity")
    if ar.lost.keys() != row.lost.keys():
        return Note(f"no gap closed: the tokenizers of {row.model} and {ar.model} do not tell the same texts apart")
    if not stats.is_distinguishable(elbo.value, ar.value, elbo.stderr_bound):
        both = f"ELBO {with_error(elbo)} and {ar.model} {number(ar.value)}"
        if elbo.stderr_reason:  # without its error, nothing says that the two are near each other
            return Note(f"no gap closed, {both}: {elbo.stderr_reason}")
        return Note(f"{UNCLEAR}: {both}")
    return Note(BETTER if elbo.value <= ar.value else "")


def with_error(row: Row) -> str:
    """A row's value with its Monte Carlo error, which is `± ?` if it is not known."""
    return number(row.value, error=row.stderr, unsure=row.stderr_bound is not None)
