"""`verify=N`: some windows scored once more, one row a network call in float32, beside what the run says of them.

What differs is what batches, padding and a coarser dtype did. A moved pick is a position whose reveal step differs.
"""

from __future__ import annotations

import dataclasses
import logging
import random
from collections.abc import Callable, Sequence

from lm_eval_duel.denoisers.base import Denoiser
from lm_eval_duel.engine.results import WindowScore
from lm_eval_duel.engine.windows import Window
from lm_eval_duel.errors import DuelError
from lm_eval_duel.estimators import registry as switch
from lm_eval_duel.harness.run_stats import Verified
from lm_eval_duel.options import Options

log = logging.getLogger("lm_eval.duel_mdm")


class Verification:
    """Some of these windows, drawn by (`draw_seed`, rank), and what the run says of them."""

    def __init__(self, windows: Sequence[Window], options: Options, rank: int, ranks: int):
        self.windows, self.options = windows, options
        scored = [n for n, window in enumerate(windows) if window.target]
        share = options.verify // ranks + (rank < options.verify % ranks)
        self.drawn = frozenset(random.Random(f"{options.draw_seed} {rank}").sample(scored, min(share, len(scored))))
        self.said: dict[int, WindowScore] = {}

    def keep(self, n: int, scored: WindowScore) -> None:
        """The run's result of window n."""
        if n in self.drawn:
            self.said[n] = scored

    def run(self, fine: Callable[[], Denoiser], name: Callable[[int], str]) -> Verified:
        """Score them again on `fine()`, the network in float32; `name(n)`: how the user knows a window.

        Where that cannot be (no memory for it, say), the log says why: the run's answers are not lost for it.
        """
        found = Verified()
        try:
            for n, again in self._again(fine):
                found.merge(_compared(self.windows[n], self.said[n], again, name(n)))
        except (DuelError, RuntimeError) as error:  # memory has ended, too
            log.error("verify: nothing is verified, and the answers stand: %s", str(error).splitlines()[0])
            return Verified()
        if found.windows:
            log.info("%s", found.words)
        elif self.options.verify:
            log.warning("verify: no window was scored here (the response cache had all), so none is verified")
        return found

    def _again(self, fine: Callable[[], Denoiser]) -> list[tuple[int, WindowScore]]:
        if not self.said:
            return []
        estimator = switch.make(fine(), dataclasses.replace(self.options, batch_size=2))  # any: no trial is made for it
        estimator.use_single_rows()
        return [(n, estimator.log_prob([self.windows[n]])[0]) for n in sorted(self.said)]


def _compared(window: Window, said: WindowScore, again: WindowScore, name: str) -> Verified:
    moved = (
        sum(one != other for one, other in zip(said.reveal_steps, again.reveal_steps, strict=True))
        if said.reveal_steps
        else None
    )
    same = said.log_prob == again.log_prob  # both may be -infinity
    return Verified(
        windows=1,
        tokens=len(window.target),
        largest_difference=0.0 if same else abs(said.log_prob - again.log_prob),
        where=f"{name}: {said.log_prob:.6f} in the run, {again.log_prob:.6f} alone",
        changed_picks=moved,
        changed_windows=int(bool(moved)),
        near_tie_windows=int(bool(said.near_ties)),
    )
