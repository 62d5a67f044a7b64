"""Gap closed: the ELBO of a row, and the share of its gap to the autoregressive baseline that the row closes."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Collection, Mapping, Sequence

import numpy as np

from lm_eval_duel.results import stats
from lm_eval_duel.results.rows import NON_IDENTITY_KEYS, OF_ESTIMATOR, Row
from lm_eval_duel.results.stats import UNCLEAR
from lm_eval_duel.results.table import Note, number

CONVENTIONS = {"special_tokens", "windows", "max_length", "sigma"}  # entries in which published figures may differ
EXACT = "exact"  # an ELBO: the mean over all orders
MONTE_CARLO = "Monte Carlo"  # an estimate of it
BETTER = "the MDM is already better under the ELBO"
Draws = Mapping[Row, np.ndarray]  # of nats per unit, by the bootstrap over documents that all rows share
Interval = list[float]  # low, high


@dataclasses.dataclass(frozen=True)
class GapClosed:
    """The share of the ELBO's gap to the autoregressive baseline that a DUEL row closes, in per cent.

    `distinguishable`: whether the ELBO and DUEL differ by more than their errors; None if that is not asked. `percent`
    is None if they do not. `reason`: why `percent`, its error or its interval is not known.
    """

    elbo: Row | None = None
    elbo_gap: float | None = None
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
        return MONTE_CARLO if self.elbo.drawn_bound else EXACT


def find_elbos(duel: Row, shown: Sequence[Row], as_published: bool) -> tuple[list[Row], str]:
    """The ELBOs of a DUEL row, the one to close a gap of first; or none of them, and the reason.

    An ELBO is of the same model under the same spec, except for the entries of the estimator. It covers the whole
    target for bidirectional networks and the trained blocks for block-causal ones, where the mean over all orders
    (elbo_exact) is the ELBO itself, and a Monte Carlo ELBO its estimate. So bounds are preferred, then the exact one,
    then more draws. `as_published`: without an ELBO of the same spec, accept one with other windows or scored
    positions, and return the differences.
    """
    if "noise_seed" in duel.run.spec:
        return [], "commit-once and ancestral sampling are two samplers, so neither value bounds the other"
    causal = duel.run.duel.get("attention") in ("block_causal", "causal_prefix")
    wanted = duel.run.block if causal else "none"

    def fits(row: Row) -> bool:
        return row.block == wanted and (row.drawn_bound or (causal and row.estimator == "elbo_exact"))

    found, differences = nearest(duel, shown, fits, NON_IDENTITY_KEYS | OF_ESTIMATOR)
    if not found:
        return [], f"no ELBO (estimator=elbo, elbo_block={wanted})"
    listed = "; ".join(differences.values())
    if differences and not (as_published and differences.keys() <= CONVENTIONS):
        return [], f"no ELBO of the same spec; the nearest differs: {listed}"

    def worth(row: Row) -> tuple:
        draws = row.run.spec.get("mc_samples", "")
        return not row.eps, not row.drawn_bound, float(draws) if draws not in ("", "none") else 1.0

    why = f"as published, under another convention: {listed}" if differences else ""
    return sorted(found, key=worth, reverse=True), why


def nearest(
    row: Row, shown: Sequence[Row], fits: Callable[[Row], bool], ignored: Collection[str]
) -> tuple[list[Row], dict[str, str]]:
    """The fitting rows of the same model whose specs are nearest to a row's, and how they differ."""
    here = row.run.spec
    found: list[tuple[Row, dict[str, str]]] = []
    for other in shown:
        if other.run.key == row.run.key and fits(other):
            there = other.run.spec
            differences = {
                key: f"{key}={here.get(key, 'not set')} in this row, {there.get(key, 'not set')} in that one"
                for key in sorted({*here, *there} - set(ignored))
                if here.get(key, "not set") != there.get(key, "not set")
            }
            found.append((other, differences))
    least = min((differences for _, differences in found), key=len, default={})
    return [other for other, differences in found if differences == least], least


def close_gap(row: Row, elbo: Row | None, ar: Row | None, draws: Draws, why: str) -> GapClosed:
    """Gap closed of a DUEL row with its errors, or the reason why there is none. `why`: why there is no ELBO."""
    if elbo is None:
        reason = "gap closed is defined for perplexities" if row.metric == "bits_per_byte" else why
        return GapClosed(reason=Note(reason))
    gap = None if ar is None else elbo.value - ar.value
    if reason := _no_gap(row, elbo, ar):
        return GapClosed(elbo, gap, reason=reason)
    known = [error for error in (elbo.stderr_bound, row.stderr_bound) if error is not None]
    distinguishable = stats.is_distinguishable(elbo.value, row.value, math.hypot(*known) if known else None)
    reasons = [Note(elbo.stderr_reason), Note(row.stderr_reason)]
    percent = stderr = interval = None
    if distinguishable:
        percent = 100 * (elbo.value - row.value) / gap
        own = 0.0 if row.stderr_bound is None else row.stderr  # an exact value has no error
        stderr = stats.gap_closed_stderr(elbo.value, row.value, ar.value, elbo.stderr, own)
    else:
        reasons.insert(0, Note(f"{UNCLEAR}: ELBO {with_error(elbo)} and DUEL {with_error(row)}"))
    if lacking := next((each for each in (elbo, row, ar) if each not in draws), None):
        reasons.append(no_interval(lacking))
    else:
        interval, remark = stats.gap_interval(*values([elbo, row, ar], draws))
        reasons.append(Note(remark))
    return GapClosed(elbo, gap, distinguishable, percent, stderr, interval, Note.joined(reasons))


def _no_gap(row: Row, elbo: Row, ar: Row | None) -> Note:
    """The reason that a row closes no gap; empty if the ELBO and the baseline make one."""
    if row.metric == "bits_per_byte":
        return Note("gap closed is defined for perplexities")
    if ar is None:
        return Note(f"no AR result of {row.task}", "--ar")
    if not all(map(math.isfinite, (elbo.value, row.value, ar.value))):
        return Note("no gap closed of an infinite perplexity")
    if not stats.is_distinguishable(elbo.value, ar.value, elbo.stderr_bound):
        return Note(f"{UNCLEAR}: ELBO {with_error(elbo)} and {ar.model} {number(ar.value)}")
    return Note(BETTER if elbo.value <= ar.value else "")


def with_error(row: Row) -> str:
    return number(row.value, error=row.stderr, unsure=row.stderr_bound is not None)


def values(compared: Sequence[Row], draws: Draws) -> list[np.ndarray]:
    """The values of rows that are compared in each draw of the bootstrap, with their Monte Carlo errors."""
    drawn = stats.with_errors([draws[row] for row in compared], [row.rate_stderr for row in compared])
    return [stats.value(row.metric, -rates, 1.0) for row, rates in zip(compared, drawn, strict=True)]


def no_interval(lacking: Row) -> Note:
    return lacking.no_interval.after(f"no interval: {lacking.model}, {lacking.name}: ")
