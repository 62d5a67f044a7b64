"""Texts to windows and back: what `Duel.score`, `estimate` and `generate` have in common with the harness."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from lm_eval_duel.core.scores import IndexedScores, WindowScore
from lm_eval_duel.core.windows import Window
from lm_eval_duel.errors import naming
from lm_eval_duel.library.results import GeneratedText
from lm_eval_duel.text.generation import Generator
from lm_eval_duel.text.text import Text

log = logging.getLogger("lm_eval.duel_mdm")


def score_texts(
    text_side: Text, texts: Sequence[str], stream: Callable[[Sequence[Window]], IndexedScores]
) -> Iterator[tuple[int, int, list[Window], list[WindowScore]]]:
    """(index, tokens, windows, their scores) of each text as it is finished, in any order."""
    lengths: list[int] = []
    windows: list[list[Window]] = []
    for n, text in enumerate(texts):
        with naming(f"Text {n}"):
            ids = text_side.encode(text)
            lengths.append(len(ids))
            windows.append(text_side.document(ids))
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


def generate_texts(
    generator: Generator, prompts: Sequence[str], keys: Sequence[int]
) -> Iterator[tuple[int, GeneratedText]]:
    """(index, generated text) of each prompt as it is finished, in any order."""
    text_side, settings = generator.text, generator.settings
    for note in generator.notes:
        log.warning("%s", note)
    contexts = []
    cut_before = text_side.cut_contexts
    for n, prompt in enumerate(prompts):
        with naming(f"Prompt {n}"):
            contexts.append(generator.context(prompt))
    if cut := text_side.cut_contexts - cut_before:
        log.warning("%d prompts were cut from the left to leave room for max_new_tokens=%d", cut, settings.length)
    with naming("Prompt {}".format):
        for n, text, window, sample in generator.stream(contexts, keys):
            yield n, GeneratedText.from_sample(prompts[n], text, window, sample, generator.duel, text_side.tokenizer)
