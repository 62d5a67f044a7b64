"""`verify=N` and `audit`: some windows of a run, scored once more in float32, and a summary of the differences.

A run in a coarser dtype is measured against float32, not judged.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from lm_eval_duel import denoisers
from lm_eval_duel.audit.checked import CheckedWindow
from lm_eval_duel.audit.recompute import recompute
from lm_eval_duel.core import reveal as signals
from lm_eval_duel.core.scores import Score
from lm_eval_duel.core.windows import Window
from lm_eval_duel.demo import BUNDLED
from lm_eval_duel.errors import counted, first_line
from lm_eval_duel.estimators.base import Estimator
from lm_eval_duel.options import Options
from lm_eval_duel.text.annotated import document_of
from lm_eval_duel.text.text import TextEncoder

if TYPE_CHECKING:
    from lm_eval.api.instance import Instance

log = logging.getLogger("lm_eval.duel_mdm")

OTHER_TEXTS = "other texts (not audited)"  # the task of requests that are scored beside those of an audit


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
        self.options = options
        self.windows = windows  # by the index of their request
        self.device = device
        self.drawn = self._draw(rank, ranks)
        self.scores: dict[tuple[int, int], Score] = {}  # by request, and window of it
        self.failure = ""  # the reason why some windows are not verified

    def _draw(self, rank: int, ranks: int) -> frozenset[tuple[int, int]]:
        """This rank's share of N windows, each as (request, window of it)."""
        candidates = []
        for request, windows in self.windows.items():
            for part, window in enumerate(windows):
                if window.target:
                    candidates.append((request, part))
        count = self.options.verify // ranks
        if rank < self.options.verify % ranks:  # the first ranks share what is left over
            count += 1
        generator = random.Random(f"{self.options.draw_seed} {rank}")
        drawn = generator.sample(candidates, min(count, len(candidates)))
        return frozenset(drawn)

    def keep(self, request: int, scores: Sequence[Score]) -> None:
        """Remember the run's scores of the drawn windows of a request."""
        for part, score in enumerate(scores):
            if (request, part) in self.drawn:
                self.scores[request, part] = score

    def compare(self, requests: Sequence[Instance], text: TextEncoder, hidden: bool = False) -> list[CheckedWindow]:
        """Score the drawn windows again; an error in the log if one differs, unless the run's dtype is coarse.

        If that fails (out of memory, say, or in a rule of the user), `failure` and the log say why: the run's scores
        are kept, and the windows that were compared before are returned. `hidden`: show no progress bar.
        """
        checked: list[CheckedWindow] = []
        try:
            self._compare_each(requests, text, checked, hidden)
        except Exception as error:
            self.failure = first_line(error)
            count = f"{len(checked)} of {counted(len(self.scores), 'window')}"
            log.error("verify failed after %s; scores are unaffected: %s", count, self.failure)
        if not self.windows:
            log.warning("verify: all answers came from the response cache, so no window is verified")
        if checked:
            wrong = any(each.differs for each in checked) and not text.denoiser.coarse
            log.log(logging.ERROR if wrong else logging.INFO, "%s", summary(checked))
        return checked

    def _compare_each(
        self,
        requests: Sequence[Instance],
        text: TextEncoder,
        checked: list[CheckedWindow],
        hidden: bool,
    ) -> None:
        """Append the windows to `checked`, so that an error loses none of those before it."""
        if not self.scores:
            return
        estimator = float32_estimator(self.options, text, self.device)
        drawn = []
        for index, part in sorted(self.scores):
            if requests[index].task_name != OTHER_TEXTS:
                drawn.append((index, part))
        with_options = {(request.task_name, request.doc_id) for request in requests if request.idx}
        no_bar = {"disable": True} if hidden else {}  # tqdm reads TQDM_DISABLE only if `disable` is not passed
        for index, part in tqdm(drawn, "Scoring windows again", unit="window", **no_bar):
            signals.check()  # the reference takes long for a window
            score = self.scores[index, part]
            request = requests[index]
            option = f", option {request.idx}" if (request.task_name, request.doc_id) in with_options else ""
            where = f"task {request.task_name}, document {document_of(request)}{option}, window {part}"
            window = self.windows[index][part]
            again = recompute(estimator, window, score)
            checked.append(CheckedWindow(where, window, score.log_prob, again, index, score))


def float32_estimator(options: Options, text: TextEncoder, device: str | None) -> Estimator:
    """The estimator of the run with its network in float32, or in float64 if that is what it runs in."""
    network = text.denoiser
    if network.coarse:
        arguments = {**options.network, "dtype": "float32", "compile": False}
        network = denoisers.load(
            options.pretrained or BUNDLED,
            device=device,
            tokenizer=text.tokenizer,
            **arguments,
        )
    options = dataclasses.replace(options, batch_size=2)  # any size: skips the search for one
    return Estimator.from_options(network, options)


# ---------------------------------------------------------------- a summary


def describe(checked: Sequence[CheckedWindow]) -> dict[str, Any]:
    """The comparison of at least one window, for the results JSON; null for a largest difference that is infinite.

    `where`: the window that differs most, with its problems; if none differs, that with the largest difference.
    """
    largest = max(checked, key=lambda each: each.difference)
    by_order = max(checked, key=lambda each: each.order_difference)

    tokens = 0
    routes: Counter[str] = Counter()
    alone = 0
    changed_picks = 0
    ties = 0
    differing = 0
    for each in checked:
        tokens += each.tokens
        routes[each.again.route] += 1
        alone += not each.independent
        changed_picks += each.again.other_picks or 0
        ties += each.again.ties or 0
        differing += each.differs
    return {
        "windows": len(checked),
        "tokens": tokens,
        "routes": dict(routes),
        "not_checked_independently": alone,
        "largest_difference": _finite(largest.difference),
        "largest_order_difference": _finite(by_order.order_difference),
        "where": _where(checked),
        "changed_picks": changed_picks,
        "ties": ties,
        "differing_windows": differing,
    }


def _where(checked: Sequence[CheckedWindow]) -> str:
    """The window that differs most, and how."""
    worst = max(checked, key=lambda each: (each.differs, each.difference, each.order_difference))
    values = f"{worst.log_prob:.6f} in the run, {worst.again.log_prob:.6f} by {worst.again.route}"
    differences = "; ".join(worst.problems) or values  # the values may agree where something else differs
    return f"{worst.where}: {differences}"


def _finite(nats: float) -> float | None:
    return nats if math.isfinite(nats) else None


def summary(checked: Sequence[CheckedWindow]) -> str:
    """A summary of the comparison of at least one window, for the log."""
    counts = describe(checked)
    largest = max(checked, key=lambda each: each.difference)
    by_order = max(checked, key=lambda each: each.order_difference)
    routes = ", ".join(f"{count} by {route}" for route, count in counts["routes"].items())
    alone = counts["not_checked_independently"]
    at_largest = largest.where if counts["differing_windows"] else counts["where"]
    return (
        f"verify: {counted(counts['windows'], 'window')} scored again in float32 ({routes}): largest difference "
        f"{by_order.order_difference:.3g} nats along the rule's order in float32 ({by_order.where}), "
        f"{largest.difference:.3g} nats along the run's order ({at_largest}); "
        f"{counted(counts['changed_picks'], 'pick')} other than the rule's, {counted(counts['ties'], 'tie')}; "
        f"differences beyond float32 noise in {counted(counts['differing_windows'], 'window')}"
        + (f", the largest in {counts['where']}" if counts["differing_windows"] else "")
        + (f"; {alone} not checked independently" if alone else "")
    )
