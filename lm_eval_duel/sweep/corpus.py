"""The text of a task, as the harness loads and counts it."""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import TYPE_CHECKING, Any

from lm_eval_duel.core.windows import Window
from lm_eval_duel.errors import DuelError
from lm_eval_duel.harness.requests import answer_for, arguments_of
from lm_eval_duel.tasks import named as tasks
from lm_eval_duel.tasks.columns import TOKENS
from lm_eval_duel.tasks.metrics import sizes
from lm_eval_duel.text.text import Text

if TYPE_CHECKING:
    from lm_eval.api.instance import Instance
    from lm_eval.api.task import Task

UNITS = {"bits_per_byte": "bytes", "byte_perplexity": "bytes", "word_perplexity": "words"}


@dataclasses.dataclass(frozen=True)
class Corpus:
    """The documents of a task, and the total `bytes` and `words` that its metrics divide by."""

    name: str
    texts: list[str]
    counted: list[int | None]  # tokens per document, as the task counts them
    units: dict[str, int]

    def windows(self, text: Text) -> list[Window]:
        """All windows of all documents."""
        windows = []
        for n, (document, counted) in enumerate(zip(self.texts, self.counted, strict=True)):
            try:
                windows += text.windows(document, counted)
            except DuelError as error:
                raise DuelError(f"Document {n} of task {self.name}: {error}") from None
        if not any(window.target for window in windows):
            raise DuelError(f"Task {self.name} has no token to score.")
        return windows


def show_log() -> None:
    """Set up logging as the harness does."""
    from lm_eval.utils import setup_logging

    setup_logging()


def load(name: str, metadata: dict[str, Any], limit: int | None, include_path: str | None = None) -> Corpus:
    """The first `limit` documents of a loglikelihood_rolling task; raises DuelError for any other task."""
    task = tasks.load(name, metadata, include_path)
    if task.OUTPUT_TYPE != "loglikelihood_rolling":
        raise DuelError(f"'{name}' is a {task.OUTPUT_TYPE} task; a sweep scores whole texts (loglikelihood_rolling).")
    task.build_all_requests(limit=limit)
    documents, units = [request.doc for request in task.instances], Counter[str]()
    for request in task.instances:
        units.update(_units(task, request))
    return Corpus(
        str(task.config.task),
        [arguments_of(request)[0] for request in task.instances],
        [document.get(TOKENS) if isinstance(document, dict) else None for document in documents],
        dict(units),
    )


def _units(task: Task, request: Instance) -> dict[str, int]:
    """The bytes and words that the metrics of a document divide by."""
    results = task.process_results(request.doc, [answer_for(request, 0.0)])
    if results is None:  # lm-eval 0.5, which counts them in its own metrics
        (text,) = arguments_of(request)
        return dict(zip(("words", "bytes"), sizes(text), strict=True))
    return {UNITS[metric]: value[1] for metric, value in results.items() if metric in UNITS}
