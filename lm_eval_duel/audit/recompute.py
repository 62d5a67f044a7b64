"""A window's score once more, by `reference.py` as far as it goes.

    reference                       its algorithm, and its rule, bound or sum over orders
    reference with the run's rule   its algorithm, for a rule that the paper does not have
    run alone                       the run's own code, one row a call: not checked independently

Of the run's code only the network takes part, called by networks.py, and on the second route its rule. On the third the
window says why.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence

from lm_eval_duel import reference, rules
from lm_eval_duel.audit import estimates
from lm_eval_duel.audit.checked import ALONE, REFERENCE, RUNS_RULE, Recomputed, distance, unequal
from lm_eval_duel.audit.commit_once import given_noise
from lm_eval_duel.audit.networks import OneRow, one_row
from lm_eval_duel.audit.replay import Followed, RunsRule, rule_of
from lm_eval_duel.core.float_noise import nats_tolerance
from lm_eval_duel.core.scores import Score
from lm_eval_duel.core.windows import Window
from lm_eval_duel.estimators.base import Estimator
from lm_eval_duel.estimators.duel import DuelEstimator
from lm_eval_duel.estimators.duel_seeds import DuelSeeds
from lm_eval_duel.estimators.registry import LOG_MEAN

# Standard deviations by which the logits of a row of masks differ between positions.
UNLIKE = 0.01  # above this, it is no float noise
ALIKE = 1e-4  # below this, it is nothing else


def recompute(estimator: Estimator, window: Window, score: Score) -> Recomputed:
    """The score of a window by the reference; where that does not reach, by the estimator alone."""
    if not window.target:
        return Recomputed(0.0, other_picks=0, ties=0)
    network = _network(estimator, window)
    if network is None:
        return _alone(estimator, window, "the network overrides how rows are opened")

    if isinstance(estimator, DuelSeeds):
        again: Recomputed | str = _over_seeds(estimator, window, score)
    elif isinstance(estimator, DuelEstimator) and estimator.name in ("duel", "ar"):
        again = _along_the_order(network, estimator.rule, score)
    else:
        again = estimates.value(estimator, network, window, score)
    if isinstance(again, str):  # the reason that the reference has no value
        return _alone(estimator, window, again)
    return dataclasses.replace(again, problems=(*again.problems, *_wrong_tie(network)))


def _network(estimator: Estimator, window: Window) -> OneRow | None:
    """The network of the window as the reference calls it; None if what it is shown is not known."""
    denoiser = estimator.denoiser
    if denoiser.noise_training is not None and isinstance(estimator, DuelEstimator):
        return given_noise(denoiser, window, estimator.block, estimator.grid, estimator.noise_seed)
    return one_row(denoiser, window, estimator.block, estimator.grid)


def _alone(estimator: Estimator, window: Window, why: str) -> Recomputed:
    """The run's own code once more, one row a call."""
    estimator.use_single_rows()
    [score] = estimator.log_prob([window])
    return Recomputed(score.log_prob, ALONE, why_alone=why)


def _wrong_tie(network: OneRow) -> list[str]:
    """A problem if the logits of a row of masks contradict `relative_positions`."""
    if network.unlike is None:  # there was no such row
        return []
    logits = f"the logits of a row of masks differ by {network.unlike:.2g} standard deviations between positions"
    if network.relative_positions and network.unlike > UNLIKE:
        return [f"{logits}, but count as equal"]
    if not network.relative_positions and 0 < network.unlike < ALIKE:
        return [f"{logits}, but do not count as equal"]
    return []


# ---------------------------------------------------------------- Algorithm 2 along the run's order


def _along_the_order(network: OneRow, rule: rules.Rule, score: Score) -> Recomputed:
    """The run's order through the reference: every value along it, and the rule's pick at every state."""
    route = REFERENCE
    make = rule_of(rule)
    if make is None:
        route = RUNS_RULE
        make = _runs_rule(network, rule)

    target = range(network.origin, network.end)
    steps = dict(zip(target, score.reveal_steps, strict=True))
    if any(steps[ell] < 0 for ell in network.scored):
        return Recomputed(math.nan, route, problems=("the recorded order does not reveal every position",))
    followed = Followed(network, steps, make())
    path = network.path(followed)
    # where the rule picks otherwise, the reference's own order has another value: that of the run is still compared
    # along the run's order
    own_order = network.path(make()).ll if followed.other_picks or followed.ties else None

    nats = [path.log_p.get(ell, 0.0) for ell in target]  # 0: known positions, which are not scored
    problems = _differing_tokens(nats, score)
    if followed.is_greedy != score.is_greedy and not (followed.is_greedy and followed.top_tokens_tie):
        problems.append(f"is_greedy is {score.is_greedy}")
    if score.nfe is not None and score.nfe != len(path.sigma) and not rule.may_pick_none:
        problems.append(f"its order has {len(path.sigma)} steps, not {score.nfe}")
    return Recomputed(path.ll, route, followed.other_picks, followed.ties, own_order, tuple(problems))


def _differing_tokens(nats: Sequence[float], score: Score) -> list[str]:
    """The token that differs most from the reference's nats, if it does; and the sum of the run's tokens."""
    noise = nats_tolerance(len(nats))
    problems = []
    worst = max(range(len(nats)), key=lambda n: distance(nats[n], score.token_logprobs[n]))
    if distance(nats[worst], score.token_logprobs[worst]) > noise:
        problems.append(f"token {worst} has {score.token_logprobs[worst]:.4f} nats, not {nats[worst]:.4f}")
    total = math.fsum(score.token_logprobs)
    if distance(total, score.log_prob) > noise:
        problems.append(f"its tokens add up to {total:.4f} nats")
    return problems


def _runs_rule(network: OneRow, rule: rules.Rule) -> Callable[[], RunsRule]:
    """The run's rule, which may keep a history over blocks: the target is then one chain of them."""
    if not rule.spans_blocks:
        return lambda: RunsRule(rule, network)
    chained = rules.blockwise(rule, network.block)
    network.blocks = [network.scored]
    return lambda: RunsRule(chained, network, chain=True)


# ---------------------------------------------------------------- a mean over noise seeds


def _over_seeds(estimator: DuelSeeds, window: Window, score: Score) -> Recomputed:
    """The path of each seed. A mean over seeds records no orders, so `duel` is run once more for each of them."""
    runs: list[Score] = []
    paths: list[Recomputed] = []
    problems: list[str] = []
    blocks: Sequence[Sequence[int]] = []
    for seed in estimator.seeds:
        network = given_noise(estimator.denoiser, window, estimator.block, estimator.grid, seed)
        assert network is not None  # it was not for the first seed
        [run] = estimator.of_seed(seed).log_prob([window])
        path = _along_the_order(network, estimator.rule, run)
        # A rule that spans blocks has joined them to one chain by now: its history carries the noise of one block into
        # the next, so their probabilities are not independent, and the product of their means bounds nothing.
        blocks = network.blocks
        problems += [f"noise_seed {seed}: {problem}" for problem in path.problems]
        runs.append(run)
        paths.append(path)

    values = [path.log_prob for path in paths]
    mean, error = reference.mean_and_error(values, len(values))
    pairs = {}
    for seed, run_value, value in zip(estimator.seeds, score.seeds, values, strict=True):
        pairs[f"noise_seed {seed}"] = (run_value, value)
    origin = len(window.context)
    log_mean = math.fsum(_log_mean([ell - origin for ell in block], runs) for block in blocks)
    pairs[LOG_MEAN] = (score.others[LOG_MEAN].log_prob, log_mean)
    if len(values) > 1 and math.isfinite(mean):
        pairs["stderr"] = (math.nan if score.stderr is None else score.stderr, error)
    problems += unequal(pairs, nats_tolerance(len(window.target)))

    along_own_orders = [path.log_prob if path.own_order is None else path.own_order for path in paths]
    return Recomputed(
        mean,
        paths[0].route,
        sum(path.other_picks or 0 for path in paths),
        sum(path.ties or 0 for path in paths),
        math.fsum(along_own_orders) / len(paths),
        tuple(problems),
    )


def _log_mean(places: Sequence[int], runs: Sequence[Score]) -> float:
    """The log of the mean over seeds of the probability of one block, the target positions `places`."""
    of_seeds = [math.fsum(run.token_logprobs[place] for place in places) for run in runs]  # (S,)
    return reference.log_mean_exp(of_seeds)
