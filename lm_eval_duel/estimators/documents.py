"""Documents of several windows: scored together, and finished one by one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType

from lm_eval_duel.core.scores import IndexedScores, Score
from lm_eval_duel.core.windows import Window
from lm_eval_duel.errors import naming


def score_documents(
    documents: Sequence[Sequence[Window]],
    stream: Callable[[Sequence[Window]], IndexedScores],
    name: Callable[[int], str] = "Document {}".format,
    known: Mapping[Window, Score] = MappingProxyType({}),
    keep: Callable[[Window, Score], None] | None = None,
) -> Iterator[tuple[int, list[Score]]]:
    """(index, scores of its windows) of each document, in any order, as the last of its windows is scored.

    Args:
        documents: The windows of each document.
        stream: A function that scores windows, such as `Estimator.stream`.
        name: The name of a document in error messages, by its index.
        known: Windows that have a score already; they are not scored again.
        keep: Called with each window and its score as soon as it is scored, before its document is finished.

    Raises:
        DuelError: If a window cannot be scored; the message names its document.
    """
    scores: dict[int, dict[int, Score]] = {}  # of each unfinished document, by window
    missing: list[tuple[int, int]] = []  # the document of each window without a score, and its place there
    for n, windows in enumerate(documents):
        scores[n] = {place: known[window] for place, window in enumerate(windows) if window in known}
        missing += [(n, place) for place in range(len(windows)) if place not in scores[n]]
    for n, windows in enumerate(documents):
        if len(scores[n]) == len(windows):
            yield n, _in_order(scores.pop(n))
    with naming(lambda index: name(missing[index][0])):
        for index, score in stream([documents[n][place] for n, place in missing]):
            n, place = missing[index]
            if keep is not None:
                keep(documents[n][place], score)
            scores[n][place] = score
            if len(scores[n]) == len(documents[n]):
                yield n, _in_order(scores.pop(n))


def _in_order(scores: Mapping[int, Score]) -> list[Score]:
    return [score for _, score in sorted(scores.items())]
