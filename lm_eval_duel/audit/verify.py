"""`verify=N` and `audit`: some windows of a run, scored once more in float32. A coarser run is reported, not judged."""

from __future__ import annotations

import dataclasses
import logging
import random
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from lm_eval_duel import denoisers
from lm_eval_duel.audit.checked import CheckedWindow, summary
from lm_eval_duel.audit.recompute import recompute
from lm_eval_duel.core.scores import Score
from lm_eval_duel.core.windows import Window
from lm_eval_duel.demo import BUNDLED
from lm_eval_duel.errors import first_line
from lm_eval_duel.estimators import registry
from lm_eval_duel.estimators.base import Estimator
from lm_eval_duel.options import Options
from lm_eval_duel.text.text import TextEncoder

if TYPE_CHECKING:
    from lm_eval.api.instance import Instance

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
                option = f", option {requests[n].idx}" if requests[n].idx else ""
                where = f"task {requests[n].task_name}, document {requests[n].doc_id}{option}, window {part}"
                window, run = self.windows[n][part], self.scores[n, part]
                checked.append(CheckedWindow(where, window, run.log_prob, recompute(estimator, window, run), n))
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
