"""`verify=N`: some windows are scored again, one row per network call in float32, and compared with the run's scores.

Differences show the effect of batching, padding and a coarser dtype.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import random
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from lm_eval_duel.core.scores import WindowScore, known_sum
from lm_eval_duel.core.windows import Window
from lm_eval_duel.demo import BUNDLED
from lm_eval_duel.errors import DuelError

if TYPE_CHECKING:
    from lm_eval.api.instance import Instance

    from lm_eval_duel.core.denoiser import Denoiser
    from lm_eval_duel.harness.run import Run

log = logging.getLogger("lm_eval.duel_mdm")


@dataclasses.dataclass
class Verified:
    """The comparison, summed over windows and ranks."""

    windows: int = 0
    tokens: int = 0
    largest_difference: float = 0.0  # nats, of a window
    where: str = ""
    changed_picks: int | None = 0  # positions whose reveal step differs; None: the estimator has no single order
    changed_windows: int = 0  # that have any
    near_tie_windows: int = 0  # that had near ties in the run

    def merge(self, other: Verified) -> None:
        """Add the comparison of other windows."""
        if other.largest_difference >= self.largest_difference and other.where:
            self.largest_difference, self.where = other.largest_difference, other.where
        self.changed_picks = known_sum(self.changed_picks, other.changed_picks)
        for name in ("windows", "tokens", "changed_windows", "near_tie_windows"):
            setattr(self, name, getattr(self, name) + getattr(other, name))

    def describe(self) -> dict[str, Any]:
        """For the results JSON. If the largest difference is infinite it is null, and `where` has the two values."""
        largest = self.largest_difference if math.isfinite(self.largest_difference) else None
        return {**dataclasses.asdict(self), "largest_difference": largest}

    @property
    def summary(self) -> str:
        """For the log."""
        order = "no order to compare"
        if self.changed_picks is not None:
            order = f"{self.changed_picks} of {self.tokens} reveal steps differ, in {self.changed_windows} windows"
        return (
            f"verify: {self.windows} windows scored again, one row at a time in float32: largest difference "
            f"{self.largest_difference:.3g} nats ({self.where}); {order}; {self.near_tie_windows} have near ties"
        )


class Verification:
    """A random sample of the windows of requests, drawn by (`draw_seed`, rank), and the run's scores of them."""

    def __init__(self, run: Run, windows: Sequence[Sequence[Window]]):
        self.run, self.windows = run, windows
        options, rank, ranks = run.options, run.ranks.rank, run.ranks.world_size
        candidates = [(n, part) for n, parts in enumerate(windows) for part in range(len(parts)) if parts[part].target]
        share = options.verify // ranks + (rank < options.verify % ranks)
        chance = random.Random(f"{options.draw_seed} {rank}")
        self.drawn = frozenset(chance.sample(candidates, min(share, len(candidates))))
        self.scores: dict[tuple[int, int], WindowScore] = {}

    def keep(self, n: int, scores: Sequence[WindowScore]) -> None:
        """Remember the run's scores of the drawn windows of request `n`."""
        self.scores |= {(n, part): score for part, score in enumerate(scores) if (n, part) in self.drawn}

    def compare(self, requests: Sequence[Instance]) -> Verified:
        """Score the drawn windows again. If that fails (out of memory, say), log why: the run's scores are kept."""
        verified = Verified()
        try:
            for (n, part), again in self._score_again():
                name = f"Request of task {requests[n].task_name}, document {requests[n].doc_id}"
                verified.merge(_compare(self.windows[n][part], self.scores[n, part], again, name))
        except (DuelError, RuntimeError) as error:
            log.error("verify failed, so no window is verified; scores are unaffected: %s", str(error).splitlines()[0])
            return Verified()
        if verified.windows:
            log.info("%s", verified.summary)
        elif self.run.options.verify and not self.windows:
            log.warning("verify: all answers came from the response cache, so no window is verified")
        return verified

    def _score_again(self) -> Iterator[tuple[tuple[int, int], WindowScore]]:
        from lm_eval_duel.estimators import registry

        if not self.scores:
            return
        options = dataclasses.replace(self.run.options, batch_size=2)  # any number: skips the search for a batch size
        estimator = registry.make(float32_network(self.run), options)
        estimator.use_single_rows()
        estimator.adopt(self.run.estimator)
        for n, part in sorted(self.scores):
            yield (n, part), estimator.log_prob([self.windows[n][part]])[0]


def float32_network(run: Run) -> Denoiser:
    """The network in float32, or in float64 if that is what it runs in."""
    from lm_eval_duel import denoisers

    denoiser, options = run.estimator.denoiser, run.options
    if str(denoiser.describe()["dtype"]) in ("float32", "float64"):
        return denoiser
    arguments = {**options.network, "dtype": "float32", "compile": False}
    name = options.pretrained or BUNDLED
    return denoisers.load(name, device=run.ranks.device, tokenizer=run.text.tokenizer, **arguments)


def _compare(window: Window, score: WindowScore, again: WindowScore, name: str) -> Verified:
    changed = None
    if score.reveal_steps:
        changed = sum(step != other for step, other in zip(score.reveal_steps, again.reveal_steps, strict=True))
    equal = score.log_prob == again.log_prob  # both may be -infinity
    return Verified(
        windows=1,
        tokens=len(window.target),
        largest_difference=0.0 if equal else abs(score.log_prob - again.log_prob),
        where=f"{name}: {score.log_prob:.6f} in the run, {again.log_prob:.6f} alone",
        changed_picks=changed,
        changed_windows=int(bool(changed)),
        near_tie_windows=int(bool(score.near_ties)),
    )
