"""Texts to windows and back: what `Duel.score`, `estimate` and `generate` have in common with the harness."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

from lm_eval_duel.core.scores import IndexedScores, WindowScore
from lm_eval_duel.core.windows import Ids, Window
from lm_eval_duel.errors import DuelError, naming
from lm_eval_duel.library.results import GeneratedText
from lm_eval_duel.text.generation import Generator
from lm_eval_duel.text.text import Text

TextOrIds: TypeAlias = "str | Ids"

log = logging.getLogger("lm_eval.duel_mdm")


def score_texts(
    text_side: Text,
    texts: Sequence[str],
    stream: Callable[[Sequence[Window]], IndexedScores],
    contexts: Sequence[TextOrIds] | None = None,
    suffixes: Sequence[TextOrIds] | None = None,
) -> Iterator[tuple[int, int, list[Window], list[WindowScore]]]:
    """(index, tokens, windows, their scores) of each text as it is finished, in any order."""
    lengths: list[int] = []
    windows: list[list[Window]] = []
    before, after = one_each(texts, contexts, "contexts"), one_each(texts, suffixes, "suffixes")
    cut_before = text_side.cut_contexts
    for n, text in enumerate(texts):
        with naming(f"Text {n}"):
            if contexts is None and suffixes is None:
                ids = text_side.encode(text)
                lengths.append(len(ids))
                windows.append(text_side.document(ids))
            else:
                window = text_side.gap(before[n], text, after[n])
                lengths.append(len(window.target))
                windows.append([window] if window.target else [])
    if cut := text_side.cut_contexts - cut_before:
        log.warning(
            "%d texts lost a part of their context or suffix: max_length=%d", cut, text_side.denoiser.max_length
        )
    owners = [(n, place) for n, parts in enumerate(windows) for place in range(len(parts))]
    unfinished: list[dict[int, Any]] = [{} for _ in texts]  # scores of each text's windows so far
    for n, parts in enumerate(windows):
        if not parts:
            yield n, lengths[n], [], []
    with naming(lambda index: f"Text {owners[index][0]}"):
        for index, score in stream([windows[n][place] for n, place in owners]):
            n, place = owners[index]
            unfinished[n][place] = score
            if len(unfinished[n]) == len(windows[n]):
                scores = [unfinished[n][place] for place in range(len(windows[n]))]
                yield n, lengths[n], windows[n], scores


def one_each(
    texts: Sequence[Any], given: Sequence[TextOrIds] | None, name: str, nothing: TextOrIds = ""
) -> Sequence[TextOrIds]:
    """The context or suffix of each text; raises DuelError if there is not one for each."""
    if given is None:
        return [nothing] * len(texts)
    if isinstance(given, str) or len(given) != len(texts):
        came = "one text" if isinstance(given, str) else str(len(given))
        raise DuelError(f"{name} takes a text or ids for each of the {len(texts)} texts; got {came}.")
    return given


def generate_texts(
    generator: Generator,
    prompts: Sequence[TextOrIds],
    keys: Sequence[int],
    suffixes: Sequence[TextOrIds] | None = None,
) -> Iterator[tuple[int, GeneratedText]]:
    """(index, generated text) of each prompt as it is finished, in any order."""
    text_side, settings = generator.text, generator.settings
    for note in generator.notes:
        log.warning("%s", note)
    windows, after = [], one_each(prompts, suffixes, "suffixes")
    cut_before = text_side.cut_contexts
    for n, prompt in enumerate(prompts):
        with naming(f"Prompt {n}"):
            windows.append(generator.prompt(prompt, after[n]))
    if cut := text_side.cut_contexts - cut_before:
        log.warning("%d prompts were cut to leave room for max_new_tokens=%d", cut, settings.length)
    with naming("Prompt {}".format):
        for n, text, window, sample in generator.stream(windows, keys):
            yield n, GeneratedText.from_sample(prompts[n], text, window, sample, generator.duel, text_side.tokenizer)
