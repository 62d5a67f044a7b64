"""A window's score once more, by `reference.py` as far as it goes.

    reference                       its algorithm, and its rule, bound or sum over orders
    reference with the run's rule   its algorithm, for a rule that the paper does not have
    run alone                       the run's own code, one row a call: not checked independently

Of the run's code only the network takes part, called by networks.py, and on the second route its rule (runs_rule.py).
On the third the window says why.
"""

from __future__ import annotations

import dataclasses

from lm_eval_duel.audit import estimates
from lm_eval_duel.audit.checked import ALONE, Recomputed
from lm_eval_duel.audit.commit_once import given_noise, over_seeds
from lm_eval_duel.audit.networks import OneRow
from lm_eval_duel.audit.runs_rule import along_any_order
from lm_eval_duel.audit.wrapped_networks import one_row
from lm_eval_duel.core.scores import Score
from lm_eval_duel.core.windows import Window
from lm_eval_duel.estimators.base import Estimator
from lm_eval_duel.estimators.duel import DuelEstimator
from lm_eval_duel.estimators.duel_seeds import DuelSeeds

# Standard deviations by which the logits of a row of masks differ between positions.
NOT_NOISE = 0.01  # more than this is not float noise
NOISE_ALONE = 1e-4  # less than this is float noise alone


def recompute(estimator: Estimator, window: Window, score: Score) -> Recomputed:
    """The score of a window by the reference; where that does not reach, by the estimator alone."""
    if not window.target:
        return Recomputed(0.0, other_picks=0, ties=0)
    network = _network(estimator, window)
    if network is None:
        return _alone(estimator, window, "the network overrides how rows are opened")

    if isinstance(estimator, DuelSeeds):
        again: Recomputed | str = over_seeds(estimator, window, score)
    elif isinstance(estimator, DuelEstimator) and estimator.name in ("duel", "ar"):
        again = along_any_order(network, estimator.rule, score)
    else:
        again = estimates.value(estimator, network, window, score)
    if isinstance(again, str):  # the reason that the reference has no value
        return _alone(estimator, window, again)
    problems = (*again.problems, *_wrong_tie(network))
    return dataclasses.replace(again, problems=problems)


def _network(estimator: Estimator, window: Window) -> OneRow | None:
    """The network of the window as the reference calls it; None if what it is shown is not known."""
    denoiser = estimator.denoiser
    block = estimator.block
    grid = estimator.grid
    if denoiser.noise_training is not None and isinstance(estimator, DuelEstimator):
        return given_noise(denoiser, window, block, grid, estimator.noise_seed)
    return one_row(denoiser, window, block, grid)


def _alone(estimator: Estimator, window: Window, why: str) -> Recomputed:
    """The run's own code once more, one row a call."""
    estimator.use_single_rows()
    [score] = estimator.log_prob([window])
    return Recomputed(score.log_prob, ALONE, why_alone=why)


def _wrong_tie(network: OneRow) -> list[str]:
    """A problem if the logits of a row of masks contradict `relative_positions`."""
    difference = network.difference_under_masks
    if difference is None:  # there was no such row
        return []
    logits = f"the logits of a row of masks differ by {difference:.2g} standard deviations between positions"
    if network.relative_positions and difference > NOT_NOISE:
        return [f"{logits}, but count as equal"]
    if not network.relative_positions and 0 < difference < NOISE_ALONE:
        return [f"{logits}, but do not count as equal"]
    return []
