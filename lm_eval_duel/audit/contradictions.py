"""Values that contradict each other, whoever computed them, and draws that do not have their distribution.

In log p, for one block and one network:

    elbo_exact <= mixture <= oracle        the mean, the log-mean-exp and the largest value over all orders
    duel, one position at a time <= oracle
    elbo = elbo_exact                      within four standard errors of a sum over windows; `ratio`: not above it
    two_phase = duel                       within four standard errors of a sum over windows

The audit computes the sums over all orders itself, for windows whose blocks have at most `SMALL` positions. An estimate
is compared on its own draws elsewhere, so here the draws are: their numbers, places, shares, times and noise.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator, Sequence

from lm_eval_duel.audit.checked import CheckedWindow
from lm_eval_duel.audit.estimates import SMALL, noise_of, over_orders
from lm_eval_duel.audit.wrapped_networks import one_row
from lm_eval_duel.core.float_noise import PER_WINDOW, nats_tolerance
from lm_eval_duel.core.windows import Window
from lm_eval_duel.denoisers.dit.denoiser import NOISE_EPS
from lm_eval_duel.errors import counted
from lm_eval_duel.estimators.base import Estimator
from lm_eval_duel.estimators.duel import DuelEstimator
from lm_eval_duel.estimators.elbo import Elbo
from lm_eval_duel.estimators.lattice import Lattice
from lm_eval_duel.estimators.noised_elbo import NoisedElbo
from lm_eval_duel.estimators.totals import FEW, TwoPhaseBlocks
from lm_eval_duel.estimators.two_phase import TwoPhase

ERRORS = 4  # standard errors by which right estimates may differ
STATES = 2_000  # rows that the audit evaluates for sums over all orders, over all windows
DRAWN_WINDOWS = 50  # whose draws are looked at
ROUNDING = 1e-9  # of a draw's time


class Comparisons:
    """The comparisons that were made, and the contradictions found, as text."""

    def __init__(self) -> None:
        self.compared: list[str] = []
        self.problems: list[str] = []

    def add(self, what: str, problems: Iterable[str]) -> None:
        """Add a comparison that was made, and its problems."""
        self.compared.append(what)
        self.problems.extend(problems)


def contradictions(estimator: Estimator, checked: Sequence[CheckedWindow]) -> Comparisons:
    """Compare the values of a run's windows that follow from each other, and look at its draws."""
    comparisons = Comparisons()
    windows = []
    for each in checked:
        if each.score is not None and each.window.target:
            windows.append(each)

    exact = dict(_over_all_orders(estimator, windows))
    of_windows = counted(len(exact), "window")
    if len(exact) < len(windows):
        of_windows = f"{len(exact)} of {counted(len(windows), 'window')}"
    if isinstance(estimator, Lattice):
        comparisons.problems.extend(_lattice(estimator, windows))
        recomputed = sum(each.independent for each in windows)
        if recomputed:  # else the run's own values are compared with each other, which counts for nothing
            comparisons.compared.append(f"the order of the values over all orders of {counted(recomputed, 'window')}")
    if isinstance(estimator, DuelEstimator) and exact:
        comparisons.add(f"the best order of {of_windows}", _below_oracle(windows, exact))
    if isinstance(estimator, Elbo) and exact and _is_bound(estimator):
        comparisons.add(f"the mean over all orders of {of_windows}", _elbo(estimator, windows, exact))
    if isinstance(estimator, TwoPhase) and _has_error(windows):
        comparisons.add("the exact value", _two_phase(estimator, windows))

    distinct = list(dict.fromkeys(each.window for each in windows))
    drawn = distinct[:DRAWN_WINDOWS]
    statistics = draw_statistics(estimator, drawn)
    if statistics:
        comparisons.add("draws", _unlikely(statistics))
    if isinstance(estimator, Elbo):
        for window in drawn:
            comparisons.problems.extend(_uneven(estimator, window))
    return comparisons


# ---------------------------------------------------------------- values


def _over_all_orders(estimator: Estimator, windows: Sequence[CheckedWindow]) -> Iterator[tuple[int, float]]:
    """(number of a window, its value over all orders) of those whose blocks are small, while they cost little.

    The estimator's own value is compared with it: the mean for an ELBO, the best order for a rule.
    """
    if not isinstance(estimator, DuelEstimator | Elbo):
        return
    if estimator.denoiser.attention == "causal":  # it has one order
        return
    if estimator.denoiser.noise_training is not None:  # its states depend on the step
        return
    name = "elbo_exact" if isinstance(estimator, Elbo) else "oracle"
    left = STATES
    for n, each in enumerate(windows):
        if each.log_prob == -math.inf:  # it is below every other value
            continue
        network = one_row(estimator.denoiser, each.window, estimator.block, estimator.grid)
        if network is None or any(len(block) > SMALL for block in network.blocks):
            continue
        left -= sum(2 ** len(block) - 1 for block in network.blocks)
        if left < 0:
            return
        yield n, over_orders(network, name)


def _lattice(estimator: Lattice, windows: Sequence[CheckedWindow]) -> Iterator[str]:
    """elbo_exact <= mixture <= oracle, and every rule that was followed one at a time <= oracle."""
    for each in windows:
        assert each.score is not None
        values = {estimator.name: each.score, **each.score.others}
        noise = nats_tolerance(each.tokens)
        for low, high in (("elbo_exact", "mixture"), ("mixture", "oracle")):
            if not values[low].log_prob <= values[high].log_prob + noise:
                yield f"{each.where}: {low} is above {high}"

        best = values["oracle"].log_prob + noise
        positions = each.tokens - len(each.window.known)
        for name, value in values.items():
            one_at_a_time = value.nfe == positions and bool(value.reveal_steps)
            if one_at_a_time and value.log_prob > best:
                yield f"{each.where}: {name}, one position at a time, is above the oracle"


def _below_oracle(windows: Sequence[CheckedWindow], exact: dict[int, float]) -> Iterator[str]:
    """A rule that reveals one position at a time follows one of the orders of which the oracle is the best."""
    for n, oracle in exact.items():
        each = windows[n]
        assert each.score is not None
        one_at_a_time = each.score.nfe == each.tokens - len(each.window.known)
        if one_at_a_time and each.log_prob > oracle + nats_tolerance(each.tokens):
            yield f"{each.where}: {each.log_prob:.4f} nats are above the best order's {oracle:.4f}"


def _is_bound(elbo: Elbo) -> bool:
    """True for the ELBO whose expectation is the mean over all orders."""
    return not elbo.arguments.elbo_eps and elbo.arguments.elbo_form != "score_entropy"


def _elbo(elbo: Elbo, windows: Sequence[CheckedWindow], exact: dict[int, float]) -> Iterator[str]:
    """The drawn bound of all windows together, against the mean over all orders."""
    errors = {}  # of different windows: equal ones share their draws
    deviations = {}
    for n, mean in exact.items():
        each = windows[n]
        assert each.score is not None
        if each.score.stderr is None:
            return
        errors[each.window] = each.score.stderr
        deviations[each.window] = each.log_prob - mean

    error = math.hypot(*errors.values())
    deviation = math.fsum(deviations.values())
    noise = ERRORS * error + PER_WINDOW
    # Form "ratio" weights by 1 / t, so that a rare draw at a small t may lie far below.
    is_too_low = deviation < -noise and elbo.arguments.elbo_form == "count"
    if deviation > noise or is_too_low:
        yield (
            f"the ELBO of {counted(len(errors), 'window')} is {deviation:+.4f} nats from its exact value, which is "
            f"{abs(deviation) / max(error, 1e-12):.1f} of its standard errors"
        )


def _two_phase(estimator: TwoPhase, windows: Sequence[CheckedWindow]) -> Iterator[str]:
    """The estimate of all windows together, against the value that it estimates."""
    once = {each.window: each for each in windows}
    duel = estimator.phases["uncached"].log_prob([*once])
    deviations = []
    errors = []
    tokens = 0
    for each, score in zip(once.values(), duel, strict=True):
        deviations.append(each.log_prob - score.log_prob)
        errors.append(_blocks(each).error)
        tokens += each.tokens

    deviation = math.fsum(deviations)
    error = math.hypot(*errors)
    if abs(deviation) > ERRORS * error + nats_tolerance(tokens):
        yield (
            f"the two-phase estimate of {counted(len(once), 'window')} is {deviation:+.4f} nats from the exact value, "
            f"which is {abs(deviation) / max(error, 1e-12):.1f} of its standard errors"
        )


def _has_error(windows: Sequence[CheckedWindow]) -> bool:
    """True if the two-phase estimate of the windows has a standard error: not from a few drawn blocks.

    If every block is in the sample it is the exact value, with an error of 0.
    """
    blocks = [_blocks(each) for each in windows]
    if all(each.sampled == each.count for each in blocks):
        return True
    return sum(each.drawn for each in blocks) >= FEW


def _blocks(each: CheckedWindow) -> TwoPhaseBlocks:
    assert each.score is not None
    blocks = each.score.blocks
    assert isinstance(blocks, TwoPhaseBlocks)
    return blocks


# ---------------------------------------------------------------- draws


@dataclasses.dataclass
class Statistic:
    """A sum of deviations from their expectation under right draws, and the variance of that sum.

    The variance is that of independent draws. Stratified ones have a smaller one, so that the test errs to the safe
    side: it accuses no right draws.
    """

    deviation: float = 0.0
    variance: float = 0.0

    def add(self, deviation: float, variance: float) -> None:
        """Add a deviation, and its variance."""
        self.deviation += deviation
        self.variance += variance

    @property
    def errors(self) -> float:
        """The deviation in standard errors."""
        return self.deviation / math.sqrt(self.variance) if self.variance > 0 else 0.0


def draw_statistics(estimator: Estimator, windows: Sequence[Window]) -> dict[str, Statistic]:
    """Statistics of the draws of a run, by what they are of; none if nothing is drawn."""
    if isinstance(estimator, Elbo):
        return _elbo_draws(estimator, windows)
    if isinstance(estimator, TwoPhase):
        return _drawn_blocks(estimator, windows)
    if isinstance(estimator, NoisedElbo) and not estimator.block and estimator.conditioning == "none":
        return _noised_draws(estimator, windows)
    return {}


def _unlikely(statistics: dict[str, Statistic]) -> Iterator[str]:
    """The statistics that right draws do not have."""
    for name, statistic in statistics.items():
        if abs(statistic.errors) > ERRORS:
            size = "large" if statistic.errors > 0 else "small"
            yield f"the {name} of the draws is {abs(statistic.errors):.1f} standard errors too {size}"


def _uneven(elbo: Elbo, window: Window) -> Iterator[str]:
    """The first draw of a window that is out of place, if there is one: those of a replicate are evenly spread.

    The n draws of a replicate have one uniform number u in each n-th of 0..1. This finds small faults that the sums
    above cannot, since these are held to the variance of independent draws.
    """
    network = one_row(elbo.denoiser, window, elbo.block, elbo.grid)
    if network is None:
        return
    draws = elbo.draws(window)
    for replicate in range(elbo.replicates):
        of_replicate = draws[replicate :: elbo.replicates]
        for number, block in enumerate(network.blocks):
            of_block = [_uniform(elbo, len(block), *draw[number]) for draw in of_replicate]
            n = len(of_block)
            for i, (low, high) in enumerate(sorted(of_block)):
                if high <= i / n or low >= (i + 1) / n:
                    yield (
                        f"the draws of a window are not evenly spread: in a replicate of {n}, draw {i + 1} by the "
                        f"number of masks has u in {low:.4f}..{high:.4f}, which is not between {i}/{n} and {i + 1}/{n}"
                    )
                    return


def _uniform(elbo: Elbo, m: int, masked: Sequence[int], t: float | None) -> tuple[float, float]:
    """The range of the uniform number that a draw of a block of m positions was made of.

    Without a time it has 1 + floor(u m) masked positions.
    """
    if t is None:
        return (len(masked) - 1) / m, len(masked) / m
    eps = elbo.arguments.elbo_eps
    u = (t - eps) / (1 - eps)
    return u - ROUNDING, u + ROUNDING


def _drawn_blocks(estimator: TwoPhase, windows: Sequence[Window]) -> dict[str, Statistic]:
    """Each block is drawn with probability `sample`, independently."""
    sample = estimator.arguments.sample
    share = Statistic()
    for window in windows:
        [weights] = estimator.weights([window])
        count = len(estimator.blocks(window))  # the others are padding
        for weight in weights[:count].tolist():
            share.add((weight > 0) - sample, sample * (1 - sample))
    return {"share of drawn blocks": share}


def _elbo_draws(elbo: Elbo, windows: Sequence[Window]) -> dict[str, Statistic]:
    """The number of masked positions, its spread, their places, and their number at time t."""
    share = Statistic()
    spread = Statistic()
    place = Statistic()
    at_time = Statistic()
    for window in windows:
        network = one_row(elbo.denoiser, window, elbo.block, elbo.grid)
        if network is None:
            continue
        for draw in elbo.draws(window):
            for (masked, t), block in zip(draw, network.blocks, strict=True):
                m = len(block)
                n = len(masked)
                if t is None:  # n is uniform on 1..m
                    u = (n - 0.5) / m - 0.5
                    variance = (1 - 1 / m**2) / 12
                else:  # t is uniform on eps..1, and each position is masked with probability t
                    eps = elbo.arguments.elbo_eps
                    u = (t - eps) / (1 - eps) - 0.5
                    variance = 1 / 12
                    chance = t
                    if elbo.arguments.elbo_form == "score_entropy":  # at SEDD's noise level of this time
                        chance = t * (1 - NOISE_EPS)
                    at_time.add(n - m * chance, m * chance * (1 - chance))
                share.add(u, variance)
                spread.add(u**2 - variance, 1 / 180)  # the variance of u^2, u uniform on -1/2..1/2
                if 0 < n < m:
                    # The mean place of n of m positions, drawn without replacement.
                    index = {column: i for i, column in enumerate(block)}
                    mean = sum(index[column] for column in masked) / n
                    place.add(mean - (m - 1) / 2, (m**2 - 1) / 12 / n * (m - n) / (m - 1))
    return {
        "share of masked positions": share,
        "spread of the share of masked positions": spread,
        "place of masked positions": place,
        "number of masked positions at a time": at_time,
    }


def _noised_draws(elbo: NoisedElbo, windows: Sequence[Window]) -> dict[str, Statistic]:
    """Weights of times, whose mean is the number of steps (or 1, in the limit), and tokens that the noise kept."""
    level = noise_of(elbo)
    weights = Statistic()
    kept = Statistic()
    for window in windows:
        network = one_row(elbo.denoiser, window, elbo.block, elbo.grid)
        assert network is not None
        for s, t, weight, row in elbo.draws(window):
            # The mean weight is the number of steps, 1 / (t - s); in the limit s = t it is 1.
            deviation = weight * float(t - s) - 1 if s < t else weight - 1
            weights.add(deviation, deviation**2)
            a, b = level(t)  # (), (V,)
            for column in network.scored:
                token = network.x[column]
                chance = float(a + b[token])
                kept.add((row[column] == token) - chance, chance * (1 - chance))
    return {"weight": weights, "number of tokens that the noise kept": kept}
