"""A window's score once more, by `reference.py` as far as it goes. The route says how far that was.

    reference                        the reference's algorithm, and its rule at each state of the run's order
    reference with the run's rule    the same with the rule of the run, which `reference.py` does not have
    run alone                        the estimator of the run, one row in each network call: not checked independently

On the first two routes the network is called by one_row.py, so of the run's code only the network itself and, on the
second, the rule take part.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import cast

from lm_eval_duel import rules
from lm_eval_duel.audit import estimates
from lm_eval_duel.audit.one_row import OneRow
from lm_eval_duel.audit.other_networks import one_row
from lm_eval_duel.audit.replay import NoOrder, replay, rule_of
from lm_eval_duel.audit.runs_rule import ReadsFeatures, RunsRule
from lm_eval_duel.core.scores import Score
from lm_eval_duel.core.windows import Window
from lm_eval_duel.estimators.base import Estimator
from lm_eval_duel.estimators.duel import DuelEstimator

REFERENCE, RUNS_RULE, ALONE = ROUTES = ("reference", "reference with the run's rule", "run alone")
ABSOLUTE, PER_TOKEN = 1e-4, 1e-6  # nats: float32 noise of a window's score
UNLIKE, ALIKE = 0.01, 1e-4  # standard deviations of logits: above and below, they are no float noise, or only that


@dataclasses.dataclass(frozen=True)
class Recomputed:
    """A window's log-probability in nats, along the run's order if it has one, and what else was compared."""

    log_prob: float
    route: str
    other_picks: int | None = None  # states at which the rule picks otherwise; None: there is no order to compare
    ties: int | None = None  # states at which it does so within a tie of the reference's numbers
    own_order: float | None = None  # the log-probability along the reference's order, where that is another one
    problems: tuple[str, ...] = ()  # what else differs
    why_alone: str = ""


def tolerance(tokens: int) -> float:
    """The largest difference of two float32 scores of a window that is noise, in nats."""
    return max(ABSOLUTE, PER_TOKEN * tokens)


def recompute(estimator: Estimator, window: Window, score: Score) -> Recomputed:
    """The score of a window by the reference; where that does not reach, by the estimator alone."""
    if not window.target:
        return Recomputed(0.0, REFERENCE, 0, 0)
    network = one_row(estimator.denoiser, window, estimator.block, estimator.grid)
    if network is None:
        found: Recomputed | str = "the network overrides how rows are opened"
    elif isinstance(estimator, DuelEstimator) and estimator.name in ("duel", "ar"):
        found = _along_the_order(network, estimator.rule, window, score)
    else:
        value = estimates.value(estimator, network, window, score)
        found = value if isinstance(value, str) else Recomputed(value.log_prob, REFERENCE, problems=value.problems)
    if isinstance(found, str):
        estimator.use_single_rows()
        [again] = estimator.log_prob([window])
        return Recomputed(again.log_prob, ALONE, why_alone=found)
    if network is not None and network.unlike is not None:
        about = f"the logits of a row of masks differ by {network.unlike:.2g} standard deviations between positions"
        if network.relative_positions and network.unlike > UNLIKE:
            found = dataclasses.replace(found, problems=(*found.problems, f"{about}, but count as equal"))
        if not network.relative_positions and 0 < network.unlike < ALIKE:
            found = dataclasses.replace(found, problems=(*found.problems, f"{about}, but do not count as equal"))
    return found


def _along_the_order(network: OneRow, rule: rules.Rule, window: Window, score: Score) -> Recomputed | str:
    """The run's order through the reference; a reason if that cannot be done."""
    make, route = rule_of(rule), REFERENCE
    if make is None:
        route, make = RUNS_RULE, _runs_rule(network, rule)
    try:
        found = replay(network, make, score.reveal_steps)
    except ReadsFeatures:
        return "the rule reads the input of the LM head, and under guidance there are two"
    except NoOrder:
        return Recomputed(math.nan, route, problems=("the recorded order does not reveal every position",))
    path, problems = found.path, []
    nats = [path.log_p.get(ell, 0.0) for ell in range(network.origin, network.end)]
    worst = max(range(len(nats)), key=lambda n: distance(nats[n], score.token_logprobs[n]))
    if distance(nats[worst], score.token_logprobs[worst]) > tolerance(len(nats)):
        problems.append(f"token {worst} has {score.token_logprobs[worst]:.4f} nats, not {nats[worst]:.4f}")
    if distance(math.fsum(score.token_logprobs), score.log_prob) > tolerance(len(nats)):
        problems.append(f"its tokens add up to {math.fsum(score.token_logprobs):.4f} nats")
    if found.is_greedy not in (None, score.is_greedy):
        problems.append(f"is_greedy is {score.is_greedy}")
    if score.nfe is not None and score.nfe != len(path.sigma) and not rule.may_pick_none:
        problems.append(f"its order has {len(path.sigma)} steps, not {score.nfe}")
    return Recomputed(path.ll, route, found.other_picks, found.ties, found.own_order, tuple(problems))


def _runs_rule(network: OneRow, rule: rules.Rule) -> Callable[[], RunsRule]:
    """The run's rule, which may keep a history over blocks: the target is then one chain of them."""
    if not rule.spans_blocks:
        return lambda: RunsRule(rule, network)
    chained, block = rules.blockwise(rule, network.block), cast(Sequence[int], network.scored)
    network.blocks = [block]
    return lambda: RunsRule(chained, network, chain=True)


def distance(one: float, other: float) -> float:
    """The absolute difference; 0 if both are -infinity, and infinite if one is no number."""
    apart = 0.0 if one == other else abs(one - other)
    return math.inf if math.isnan(apart) else apart
