"""A window's score once more, by `reference.py` as far as it goes. The route says how far that was: docs/audit.md.

Where the reference goes, one_row.py calls the network, so of the run's code only the network itself and, on the route
with the run's rule, the rule take part.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import random
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, cast

from lm_eval_duel import denoisers, reference, rules
from lm_eval_duel.audit import estimates
from lm_eval_duel.audit.checked import (
    ALONE,
    REFERENCE,
    RUNS_RULE,
    CheckedWindow,
    Recomputed,
    distance,
    summary,
)
from lm_eval_duel.audit.commit_once import given_noise
from lm_eval_duel.audit.networks import OneRow, one_row
from lm_eval_duel.audit.replay import Followed, RunsRule, rule_of
from lm_eval_duel.core.float_noise import nats_tolerance
from lm_eval_duel.core.scores import Score
from lm_eval_duel.core.windows import Window
from lm_eval_duel.demo import BUNDLED
from lm_eval_duel.errors import first_line
from lm_eval_duel.estimators import registry
from lm_eval_duel.estimators.base import Estimator
from lm_eval_duel.estimators.duel import DuelEstimator
from lm_eval_duel.estimators.duel_seeds import LOG_MEAN, DuelSeeds
from lm_eval_duel.options import Options
from lm_eval_duel.text.text import TextEncoder

if TYPE_CHECKING:
    from lm_eval.api.instance import Instance

COMPANY = "company of the windows that are audited"  # the task of requests that a run scores, and that no one checks
UNLIKE, ALIKE = 0.01, 1e-4  # standard deviations of logits: above and below, they are no float noise, or only that


def recompute(estimator: Estimator, window: Window, score: Score) -> Recomputed:
    """The score of a window by the reference; where that does not reach, by the estimator alone."""
    if not window.target:
        return Recomputed(0.0, REFERENCE, 0, 0)
    network = one_row(estimator.denoiser, window, estimator.block, estimator.grid)
    if estimator.denoiser.noise_training is not None and isinstance(estimator, DuelEstimator):
        network = given_noise(estimator.denoiser, window, estimator.block, estimator.grid, estimator.noise_seed)
    if network is None:
        found: Recomputed | str = "the network overrides how rows are opened"
    elif isinstance(estimator, DuelEstimator) and estimator.name in ("duel", "ar"):
        found = _along_the_order(network, estimator.rule, score)
    elif isinstance(estimator, DuelSeeds):
        found = _over_seeds(estimator, window, score)
    else:
        found = estimates.value(estimator, network, window, score)
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


def _along_the_order(network: OneRow, rule: rules.Rule, score: Score) -> Recomputed:
    """The run's order through the reference."""
    make, route = rule_of(rule), REFERENCE
    if make is None:
        route, make = RUNS_RULE, _runs_rule(network, rule)
    steps = dict(zip(range(network.origin, network.end), score.reveal_steps, strict=True))
    if any(steps[ell] < 0 for ell in network.scored):
        return Recomputed(math.nan, route, problems=("the recorded order does not reveal every position",))
    followed, problems = Followed(network, steps, make()), []
    path = network.path(followed)
    own_order = network.path(make()).ll if followed.other_picks or followed.ties else None
    nats = [path.log_p.get(ell, 0.0) for ell in range(network.origin, network.end)]
    worst = max(range(len(nats)), key=lambda n: distance(nats[n], score.token_logprobs[n]))
    if distance(nats[worst], score.token_logprobs[worst]) > nats_tolerance(len(nats)):
        problems.append(f"token {worst} has {score.token_logprobs[worst]:.4f} nats, not {nats[worst]:.4f}")
    if distance(math.fsum(score.token_logprobs), score.log_prob) > nats_tolerance(len(nats)):
        problems.append(f"its tokens add up to {math.fsum(score.token_logprobs):.4f} nats")
    if followed.is_greedy != score.is_greedy and not (followed.is_greedy and followed.top_tokens_tie):
        problems.append(f"is_greedy is {score.is_greedy}")
    if score.nfe is not None and score.nfe != len(path.sigma) and not rule.may_pick_none:
        problems.append(f"its order has {len(path.sigma)} steps, not {score.nfe}")
    return Recomputed(path.ll, route, followed.other_picks, followed.ties, own_order, tuple(problems))


def _over_seeds(estimator: DuelSeeds, window: Window, score: Score) -> Recomputed:
    """The path of each seed. A mean over seeds records no orders, so `duel` is run once more for each of them."""
    runs, found, problems = [], [], []
    for seed in estimator.seeds:
        network = given_noise(estimator.denoiser, window, estimator.block, estimator.grid, seed)
        assert network is not None  # it was not for the first seed
        [run] = estimator.of_seed(seed).log_prob([window])
        along = _along_the_order(network, estimator.rule, run)
        problems += [f"noise_seed {seed}: {problem}" for problem in along.problems]
        runs.append(run)
        found.append(along)
    values = [along.log_prob for along in found]
    mean, error = reference.mean_and_error(values, len(values))
    places = [[ell - network.origin for ell in block] for block in network.blocks]
    by_block = [[math.fsum(run.token_logprobs[n] for n in place) for run in runs] for place in places]  # (B, S)
    log_mean = math.fsum(reference.log_mean_exp(of_seeds) for of_seeds in by_block)
    told = dict(zip(estimator.seeds, score.seeds, strict=True))
    pairs = {f"noise_seed {seed}": (told[seed], value) for seed, value in zip(told, values, strict=True)}
    pairs[LOG_MEAN] = score.others[LOG_MEAN].log_prob, log_mean
    if len(values) > 1 and math.isfinite(mean):
        pairs["stderr"] = math.nan if score.stderr is None else score.stderr, error
    problems += estimates.unequal(pairs, nats_tolerance(len(window.target)))
    return Recomputed(
        mean,
        found[0].route,
        sum(along.other_picks or 0 for along in found),
        sum(along.ties or 0 for along in found),
        math.fsum(along.log_prob if along.own_order is None else along.own_order for along in found) / len(found),
        tuple(problems),
    )


def _runs_rule(network: OneRow, rule: rules.Rule) -> Callable[[], RunsRule]:
    """The run's rule, which may keep a history over blocks: the target is then one chain of them."""
    if not rule.spans_blocks:
        return lambda: RunsRule(rule, network)
    chained, block = rules.blockwise(rule, network.block), cast(Sequence[int], network.scored)
    network.blocks = [block]
    return lambda: RunsRule(chained, network, chain=True)


# ---------------------------------------------------------------- verify
# `verify=N` and `audit`: some windows of a run, scored once more in float32. A coarser run is reported, not judged.


log = logging.getLogger("lm_eval.duel_mdm")


class Verification:
    """A random sample of the windows of requests, drawn by (`draw_seed`, rank), and the run's scores of them."""

    def __init__(
        self,
        options: Options,
        windows: Mapping[int, Sequence[Window]],
        rank: int = 0,
        ranks: int = 1,
        device: str | None = None,
    ):
        self.options, self.windows, self.device = options, windows, device
        candidates = [(n, part) for n, parts in windows.items() for part in range(len(parts)) if parts[part].target]
        share = options.verify // ranks + (rank < options.verify % ranks)
        chance = random.Random(f"{options.draw_seed} {rank}")
        self.drawn = frozenset(chance.sample(candidates, min(share, len(candidates))))
        self.scores: dict[tuple[int, int], Score] = {}
        self.failure = ""  # the reason why some windows are not verified

    def keep(self, n: int, scores: Sequence[Score]) -> None:
        """Remember the run's scores of the drawn windows of request `n`."""
        self.scores |= {(n, part): score for part, score in enumerate(scores) if (n, part) in self.drawn}

    def compare(self, requests: Sequence[Instance], text: TextEncoder) -> list[CheckedWindow]:
        """Score the drawn windows again; an error in the log if one differs, unless the run's dtype is coarse.

        If that fails (out of memory, say, or in a rule of the user), `failure` and the log say why: the run's scores
        are kept, and the windows that were compared before are returned.
        """
        checked: list[CheckedWindow] = []
        try:
            estimator = float32_estimator(self.options, text, self.device) if self.scores else None
            for n, part in sorted(self.scores):
                if requests[n].task_name == COMPANY:
                    continue
                option = f", option {requests[n].idx}" if requests[n].idx else ""
                where = f"task {requests[n].task_name}, document {requests[n].doc_id}{option}, window {part}"
                window, run = self.windows[n][part], self.scores[n, part]
                checked.append(CheckedWindow(where, window, run.log_prob, recompute(estimator, window, run), n, run))
        except Exception as error:
            self.failure = first_line(error)
            count = f"{len(checked)} of {len(self.scores)} windows"
            log.error("verify failed after %s; scores are unaffected: %s", count, self.failure)
        if not self.windows:
            log.warning("verify: all answers came from the response cache, so no window is verified")
        if checked:
            wrong = any(each.differs for each in checked) and not text.denoiser.coarse
            log.log(logging.ERROR if wrong else logging.INFO, "%s", summary(checked))
        return checked


def float32_estimator(options: Options, text: TextEncoder, device: str | None) -> Estimator:
    """The estimator of the run with its network in float32, or in float64 if that is what it runs in."""
    network = text.denoiser
    if network.coarse:
        arguments = {**options.network, "dtype": "float32", "compile": False}
        network = denoisers.load(options.pretrained or BUNDLED, device=device, tokenizer=text.tokenizer, **arguments)
    return registry.make(network, dataclasses.replace(options, batch_size=2))  # any size: skips the search for one
