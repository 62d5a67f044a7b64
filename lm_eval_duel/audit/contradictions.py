"""Values that cannot all be right, whoever computed them; and draws that are not drawn as they are said to be.

In log p, for one block and one network:

    elbo_exact <= mixture <= oracle        the mean, the log-mean-exp and the largest value over all orders
    duel, one position at a time <= oracle
    elbo = elbo_exact                      within four standard errors of a sum over windows; `ratio`: not above it
    two_phase = duel                       within four standard errors of a sum over windows

The audit computes the sums over all orders itself, for windows whose blocks have at most `SMALL` positions. An estimate
is compared on its own draws elsewhere, so here the draws are: their numbers, places, shares, times and noise.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence

import torch

from lm_eval_duel import reference
from lm_eval_duel.audit.checked import CheckedWindow
from lm_eval_duel.audit.estimates import COMBINED, SMALL, noise_of
from lm_eval_duel.audit.networks import one_row
from lm_eval_duel.core.float_noise import nats_tolerance
from lm_eval_duel.core.windows import Window
from lm_eval_duel.denoisers.dit.denoiser import NOISE_EPS
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


class Held:
    """The comparisons that were made, and the contradictions found, in words."""

    def __init__(self) -> None:
        self.compared: list[str] = []
        self.problems: list[str] = []

    def hold(self, what: str, problems: Iterable[str]) -> None:
        """Add a comparison that was made, and its problems."""
        self.compared.append(what)
        self.problems.extend(problems)


def contradictions(estimator: Estimator, checked: Sequence[CheckedWindow]) -> Held:
    """All comparisons of the windows of a run with each other's values."""
    held = Held()
    windows = [each for each in checked if each.score is not None and each.window.target]
    exact = dict(_over_all_orders(estimator, windows))
    if isinstance(estimator, Lattice):
        held.hold("the order of the values over all orders", _lattice(estimator, windows))
    if isinstance(estimator, DuelEstimator) and exact:
        held.hold(f"the best order of {len(exact)} windows", _below_oracle(windows, exact))
    if (
        isinstance(estimator, Elbo)
        and exact
        and not estimator.arguments.elbo_eps
        and estimator.arguments.elbo_form != "score_entropy"
    ):
        held.hold(f"the mean over all orders of {len(exact)} windows", _elbo(estimator, windows, exact))
    if isinstance(estimator, TwoPhase) and sum(_blocks(each).drawn for each in windows) >= FEW:
        held.hold("the exact value", _two_phase(estimator, windows))
    distinct = list(dict.fromkeys(each.window for each in windows))[:DRAWN_WINDOWS]
    if draws := list(_draws(estimator, distinct)):
        held.hold("draws", [problem for _, problem in draws if problem])
    return held


# ---------------------------------------------------------------- values


def _over_all_orders(estimator: Estimator, windows: Sequence[CheckedWindow]) -> Iterator[tuple[int, dict[str, float]]]:
    """(number of a window, its values over all orders) of those whose blocks are small, while they cost little."""
    if not isinstance(estimator, DuelEstimator | Elbo) or estimator.denoiser.attention == "causal":
        return
    if estimator.denoiser.noise_training is not None:  # its states depend on the step
        return
    left = STATES
    for n, each in enumerate(windows):
        network = one_row(estimator.denoiser, each.window, estimator.block, estimator.grid)
        if network is None or any(len(block) > SMALL for block in network.blocks):
            continue
        left -= sum(2 ** len(block) - 1 for block in network.blocks)
        if left < 0:
            return
        names = ["elbo_exact"] if isinstance(estimator, Elbo) else ["oracle"]
        arguments = network.x, network.blocks, network, network.m
        yield (
            n,
            {name: reference.over_orders(*arguments, COMBINED[name], network.relative_positions) for name in names},
        )


def _lattice(estimator: Lattice, windows: Sequence[CheckedWindow]) -> Iterator[str]:
    """elbo_exact <= mixture <= oracle, and every rule that was followed one at a time <= oracle."""
    for each in windows:
        assert each.score is not None
        values = {estimator.name: each.score, **each.score.others}
        noise = nats_tolerance(each.tokens)
        for low, high in (("elbo_exact", "mixture"), ("mixture", "oracle")):
            if not values[low].log_prob <= values[high].log_prob + noise:
                yield f"{each.where}: {low} is above {high}"
        for name, value in values.items():
            if value.nfe == each.tokens and value.reveal_steps and value.log_prob > values["oracle"].log_prob + noise:
                yield f"{each.where}: {name}, one position at a time, is above the oracle"


def _below_oracle(windows: Sequence[CheckedWindow], exact: dict[int, dict[str, float]]) -> Iterator[str]:
    """A rule that reveals one position at a time follows one of the orders of which the oracle is the best."""
    for n, values in exact.items():
        each = windows[n]
        assert each.score is not None
        one_at_a_time = each.score.nfe == len(each.window.target) - len(each.window.known)
        if one_at_a_time and each.log_prob > values["oracle"] + nats_tolerance(each.tokens):
            yield f"{each.where}: {each.log_prob:.4f} nats are above the best order's {values['oracle']:.4f}"


def _elbo(elbo: Elbo, windows: Sequence[CheckedWindow], exact: dict[int, dict[str, float]]) -> Iterator[str]:
    """The drawn bound of the windows together, beside the mean over all orders."""
    once = {windows[n].window: n for n in exact}.values()  # equal windows share their draws
    errors = [score.stderr for n in once if (score := windows[n].score) is not None]
    if any(error is None for error in errors):
        return
    error = math.hypot(*(error or 0.0 for error in errors))
    above = math.fsum(windows[n].log_prob - exact[n]["elbo_exact"] for n in once)
    if above > ERRORS * error + 1e-4 or (elbo.arguments.elbo_form == "count" and above < -ERRORS * error - 1e-4):
        yield (
            f"the ELBO of {len(errors)} windows is {above:+.4f} nats from its exact value, which is "
            f"{abs(above) / max(error, 1e-12):.1f} of its standard errors"
        )


def _two_phase(estimator: TwoPhase, windows: Sequence[CheckedWindow]) -> Iterator[str]:
    """The estimate of the windows together, beside the value that it estimates."""
    once = list({each.window: each for each in windows}.values())
    duel = estimator.phases["uncached"].log_prob([each.window for each in once])
    above = math.fsum(each.log_prob - score.log_prob for each, score in zip(once, duel, strict=True))
    error = math.hypot(*(_blocks(each).error for each in once))
    if abs(above) > ERRORS * error + nats_tolerance(sum(each.tokens for each in once)):
        yield (
            f"the two-phase estimate of {len(once)} windows is {above:+.4f} nats from the exact value, which is "
            f"{abs(above) / max(error, 1e-12):.1f} of its standard errors"
        )


def _blocks(each: CheckedWindow) -> TwoPhaseBlocks:
    assert each.score is not None
    blocks = each.score.blocks
    assert isinstance(blocks, TwoPhaseBlocks)
    return blocks


# ---------------------------------------------------------------- draws


def _draws(estimator: Estimator, windows: Sequence[Window]) -> Iterator[tuple[str, str]]:
    """(what, problem or nothing) of each statistic of the draws of a run."""
    if isinstance(estimator, Elbo):
        found = _elbo_draws(estimator, windows)
    elif isinstance(estimator, TwoPhase):
        weights = [estimator.weights([window])[0] for window in windows]
        drawn = torch.cat([weight[: len(estimator.blocks(w))] for weight, w in zip(weights, windows, strict=True)]) > 0
        share = estimator.arguments.sample
        found = {"share of drawn blocks": (drawn.double() - share, share * (1 - share) * len(drawn))}
    elif isinstance(estimator, NoisedElbo) and not estimator.block and estimator.conditioning == "none":
        found = _noised_draws(estimator, windows)
    else:
        return
    for what, (deviations, variance) in found.items():
        z = float(deviations.sum()) / math.sqrt(variance) if variance > 0 else 0.0
        wrong = f"the {what} of the draws is {abs(z):.1f} standard errors too {'large' if z > 0 else 'small'}"
        yield what, wrong if abs(z) > ERRORS else ""


def _elbo_draws(elbo: Elbo, windows: Sequence[Window]) -> dict[str, tuple[torch.Tensor, float]]:
    """Deviations from what is expected, and the variance of their sum under independent draws (stratified ones have a
    smaller one): of the number of masked positions, of its square, of their places, and of their number at time t.
    """
    numbers, squares, places, given = [], [], [], []
    variances = {"number": 0.0, "square": 0.0, "place": 0.0, "given": 0.0}
    for window in windows:
        network = one_row(elbo.denoiser, window, elbo.block, elbo.grid)
        if network is None:
            continue
        for draw in elbo.draws(window):
            for (masked, t), block in zip(draw, network.blocks, strict=True):
                m, n = len(block), len(masked)
                place = {column: index for index, column in enumerate(block)}
                middle = (m - 1) / 2
                if t is None:
                    share = (n - 0.5) / m - 0.5  # n is uniform on 1..m
                    spread = (1 - 1 / m**2) / 12
                else:
                    share, spread = (t - elbo.arguments.elbo_eps) / (1 - elbo.arguments.elbo_eps) - 0.5, 1 / 12
                    chance = t * (1 - NOISE_EPS) if elbo.arguments.elbo_form == "score_entropy" else t
                    given.append(n - m * chance)
                    variances["given"] += m * chance * (1 - chance)
                variances["square"] += 1 / 180  # of the square of a number that is uniform on -1/2..1/2
                numbers.append(share)
                squares.append(share**2 - spread)
                variances["number"] += spread
                if 0 < n < m:
                    places.append(sum(place[column] for column in masked) / n - middle)
                    variances["place"] += (m**2 - 1) / 12 / n * (m - n) / (m - 1)
    return {
        "share of masked positions": (torch.tensor(numbers), variances["number"]),
        "spread of the share of masked positions": (torch.tensor(squares), variances["square"]),
        "place of masked positions": (torch.tensor(places), variances["place"]),
        "number of masked positions at a time": (torch.tensor(given), variances["given"]),
    }


def _noised_draws(elbo: NoisedElbo, windows: Sequence[Window]) -> dict[str, tuple[torch.Tensor, float]]:
    """Weights of times, whose mean is the number of steps (or 1, in the limit), and tokens that the noise kept."""
    level = noise_of(elbo)
    weights, kept = [], []
    variance = 0.0
    for window in windows:
        network = one_row(elbo.denoiser, window, elbo.block, elbo.grid)
        assert network is not None
        for s, t, weight, row in elbo.draws(window):
            weights.append(weight * float(t - s) - 1 if s < t else weight - 1)
            a, b = level(t)
            for column in network.scored:
                chance = float(a + b[network.x[column]])
                kept.append((row[column] == network.x[column]) - chance)
                variance += chance * (1 - chance)
    of_weights = torch.tensor(weights, dtype=torch.float64)
    return {
        "weight": (of_weights, float((of_weights**2).sum())),
        "number of tokens that the noise kept": (torch.tensor(kept, dtype=torch.float64), variance),
    }
