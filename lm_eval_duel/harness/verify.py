"""`verify=N` and `audit`: some windows are scored once more, by another route, and compared with the run's scores.

The route is that of `estimators/recompute.py`: the reference's loop over whole rows, in float32, or the estimator with
one row in each network call. Differences show faults, and the effect of batches, padding and a coarser dtype.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import random
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from lm_eval_duel.core.scores import WindowScore
from lm_eval_duel.core.windows import Window
from lm_eval_duel.demo import BUNDLED
from lm_eval_duel.errors import DuelError

if TYPE_CHECKING:
    from lm_eval.api.instance import Instance

    from lm_eval_duel.core.denoiser import Denoiser
    from lm_eval_duel.estimators.recompute import Recomputed
    from lm_eval_duel.harness.distributed import Ranks
    from lm_eval_duel.options import Options
    from lm_eval_duel.text.text import Text

log = logging.getLogger("lm_eval.duel_mdm")
ABSOLUTE, PER_TOKEN = 1e-4, 1e-6  # nats: how far two float32 scores of a window without near ties may be apart


@dataclasses.dataclass(frozen=True)
class Checked:
    """One window scored twice, in nats."""

    where: str
    tokens: int
    log_prob: float  # in the run
    again: float
    route: str
    changed_picks: int | None  # positions whose reveal step differs; None: the estimator has no single order
    near_ties: int | None  # of the run; None: the rule does not know

    @classmethod
    def from_scores(cls, where: str, window: Window, score: WindowScore, again: Recomputed) -> Checked:
        """The comparison of a run's score of a window with its second one."""
        changed = None
        if score.reveal_steps:
            changed = sum(step != other for step, other in zip(score.reveal_steps, again.reveal_steps, strict=True))
        return cls(where, len(window.target), score.log_prob, again.log_prob, again.route, changed, score.near_ties)

    @property
    def difference(self) -> float:
        """The absolute difference; 0 if both are -infinity, and infinite if one is no number."""
        apart = 0.0 if self.log_prob == self.again else abs(self.log_prob - self.again)
        return math.inf if math.isnan(apart) else apart

    @property
    def differs(self) -> bool:
        """Whether float32 noise does not explain the difference: too large, or another order, without a near tie."""
        apart = self.difference > max(ABSOLUTE, PER_TOKEN * self.tokens)
        return (apart or bool(self.changed_picks)) and not self.near_ties


def describe(checked: Sequence[Checked]) -> dict[str, Any]:
    """The comparison of at least one window, for the results JSON; null for a largest difference that is infinite."""
    largest = max(checked, key=lambda each: each.difference)
    changed = [each.changed_picks for each in checked]
    return {
        "windows": len(checked),
        "tokens": sum(each.tokens for each in checked),
        "routes": dict(Counter(each.route for each in checked)),
        "largest_difference": largest.difference if math.isfinite(largest.difference) else None,
        "where": f"{largest.where}: {largest.log_prob:.6f} in the run, {largest.again:.6f} by {largest.route}",
        "changed_picks": None if None in changed else sum(changed),
        "changed_windows": sum(map(bool, changed)),
        "near_tie_windows": sum(bool(each.near_ties) for each in checked),
        "differing_windows": sum(each.differs for each in checked),
    }


def in_words(checked: Sequence[Checked]) -> str:
    """The comparison of at least one window, for the log."""
    of = describe(checked)
    order = "no order to compare"
    if of["changed_picks"] is not None:
        order = f"{of['changed_picks']} of {of['tokens']} reveal steps differ, in {of['changed_windows']} windows"
    routes = ", ".join(f"{count} by {route}" for route, count in of["routes"].items())
    return (
        f"verify: {of['windows']} windows scored again in float32 ({routes}): largest difference "
        f"{max(each.difference for each in checked):.3g} nats ({of['where']}); {order}; {of['near_tie_windows']} have "
        f"near ties; {of['differing_windows']} differ by more than float32 noise"
    )


class Verification:
    """A random sample of the windows of requests, drawn by (`draw_seed`, rank), and the run's scores of them."""

    def __init__(self, options: Options, ranks: Ranks, windows: Mapping[int, Sequence[Window]]):
        self.options, self.ranks, self.windows = options, ranks, windows
        candidates = [(n, part) for n, parts in windows.items() for part in range(len(parts)) if parts[part].target]
        share = options.verify // ranks.world_size + (ranks.rank < options.verify % ranks.world_size)
        chance = random.Random(f"{options.draw_seed} {ranks.rank}")
        self.drawn = frozenset(chance.sample(candidates, min(share, len(candidates))))
        self.scores: dict[tuple[int, int], WindowScore] = {}

    def keep(self, n: int, scores: Sequence[WindowScore]) -> None:
        """Remember the run's scores of the drawn windows of request `n`."""
        self.scores |= {(n, part): score for part, score in enumerate(scores) if (n, part) in self.drawn}

    def compare(self, requests: Sequence[Instance], text: Text) -> list[Checked]:
        """Score the drawn windows again; an error in the log if one differs, unless the run's dtype is coarse.

        If that fails (out of memory, say), log why: the run's scores are kept.
        """
        checked: list[Checked] = []
        try:
            for (n, part), again in self._score_again(text):
                where = f"task {requests[n].task_name}, document {requests[n].doc_id}, window {part}"
                checked.append(Checked.from_scores(where, self.windows[n][part], self.scores[n, part], again))
        except (DuelError, RuntimeError) as error:
            log.error("verify failed, so no window is verified; scores are unaffected: %s", str(error).splitlines()[0])
            return []
        if not self.windows:
            log.warning("verify: all answers came from the response cache, so no window is verified")
        if checked:
            wrong = any(each.differs for each in checked) and not is_coarse(text.denoiser)
            log.log(logging.ERROR if wrong else logging.INFO, "%s", in_words(checked))
        return checked

    def _score_again(self, text: Text) -> Iterator[tuple[tuple[int, int], Recomputed]]:
        from lm_eval_duel.estimators import registry
        from lm_eval_duel.estimators.recompute import recompute

        if not self.scores:
            return
        options = dataclasses.replace(self.options, batch_size=2)  # any number: skips the search for a batch size
        estimator = registry.make(float32_network(options, text, self.ranks.device), options)
        for n, part in sorted(self.scores):
            yield (n, part), recompute(estimator, self.windows[n][part])


def is_coarse(denoiser: Denoiser) -> bool:
    """Whether a network runs in a dtype below float32."""
    return str(denoiser.describe()["dtype"]) not in ("float32", "float64")


def float32_network(options: Options, text: Text, device: str | None) -> Denoiser:
    """The network in float32, or in float64 if that is what it runs in."""
    from lm_eval_duel import denoisers

    if not is_coarse(text.denoiser):
        return text.denoiser
    arguments = {**options.network, "dtype": "float32", "compile": False}
    return denoisers.load(options.pretrained or BUNDLED, device=device, tokenizer=text.tokenizer, **arguments)
