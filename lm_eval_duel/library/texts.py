"""Texts, contexts and prompts, as `Duel` is given them -> windows, with a note on each that was cut."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Mapping, Sequence, Set
from typing import Any, NamedTuple, TypeAlias

from lm_eval_duel.core.windows import Ids, Window
from lm_eval_duel.errors import DuelError, counted, naming
from lm_eval_duel.text.annotated import split_at_borders
from lm_eval_duel.text.generation import Generator
from lm_eval_duel.text.text import TextEncoder

TextOrIds: TypeAlias = "str | Ids"

log = logging.getLogger("lm_eval.duel_mdm")


class EncodedText(NamedTuple):
    """A text as it is scored, or a prompt as it is continued."""

    windows: list[Window]
    scored: str = ""  # see `TextScore`
    cut: str = ""  # a note, if its context or suffix did not fit

    @property
    def tokens(self) -> int:
        """The number of scored tokens."""
        return sum(window.scored_tokens for window in self.windows)


def text_windows(
    encoder: TextEncoder,
    texts: Sequence[str],
    around: Sequence[tuple[TextOrIds, TextOrIds]] | None = None,
) -> list[EncodedText]:
    """Each text as it is scored, as in the harness.

    `around`: the context and the suffix of each; None: whole texts. Raises DuelError, naming the text, for one that
    cannot be scored.
    """
    if around is None:
        whole_texts = []
        for n, text in enumerate(texts):
            with naming(f"Text {n}"):
                whole_texts.append(EncodedText(encoder.document(encoder.encode(text)), text))
        return whole_texts

    limit = f"to fit max_length={encoder.denoiser.max_length}"
    note = f"with its context or suffix cut {limit}"
    encoded = []
    for n, (text, (before, after)) in enumerate(zip(texts, around, strict=True)):
        cut_before = encoder.cut_contexts
        with naming(f"Text {n}"):
            window = encoder.gap(before, text, after)
        is_cut = encoder.cut_contexts > cut_before
        scored = text
        if isinstance(before, str) and isinstance(after, str):
            _, scored, _ = split_at_borders(before, text, after or None)
        encoded.append(EncodedText([window] if window.target else [], scored, note if is_cut else ""))
    cut = sum(1 for each in encoded if each.cut)
    if cut:
        log.warning("The context or suffix of %s was cut %s", counted(cut, "text"), limit)
    return encoded


def prompt_windows(
    generator: Generator, prompts: Sequence[TextOrIds], suffixes: Sequence[TextOrIds]
) -> list[EncodedText]:
    """Each prompt as it is continued; raises DuelError, naming the prompt, for one that cannot be."""
    encoder = generator.text
    limit = f"to leave room for max_new_tokens={generator.settings.length}"
    note = f"with its prompt or suffix cut {limit}"
    encoded = []
    for n, (prompt, suffix) in enumerate(zip(prompts, suffixes, strict=True)):
        cut_before = encoder.cut_contexts
        with naming(f"Prompt {n}"):
            window = generator.prompt(prompt, suffix)
        is_cut = encoder.cut_contexts > cut_before
        encoded.append(EncodedText([window], cut=note if is_cut else ""))
    cut = sum(1 for each in encoded if each.cut)
    if cut:
        log.warning("%d of %d prompts cut %s", cut, len(prompts), limit)
    return encoded


def as_list(given: Any, name: str) -> Any:
    """Texts in their order: a column of a table is indexed by its labels, and a generator not at all.

    A single text is left as it is, to be refused. Raises DuelError for what holds no texts, for a missing one, for a
    table, since a loop over it gives the names of its columns, and for a set, whose order is not known.
    """
    if isinstance(given, str):
        return given
    if isinstance(given, Mapping) or hasattr(given, "columns"):
        raise DuelError(f"{name} is a list of texts; got a {type(given).__name__}. Pass one of its columns.")
    if isinstance(given, Set):
        raise DuelError(f"{name} is a list of texts; got a {type(given).__name__}, which has no order.")
    if not isinstance(given, Iterable):
        raise DuelError(f"{name} is a list of texts; got an object of the class {type(given).__name__}.")
    texts = list(given)
    for n, text in enumerate(texts):
        if text is None or (isinstance(text, float) and math.isnan(text)):  # as in a column of a table
            raise DuelError(f"{name} is a list of texts; number {n} is missing. Write '' for an empty one.")
    return texts


def one_each(
    texts: Sequence[Any],
    given: Sequence[TextOrIds] | None,
    name: str,
    nothing: TextOrIds = "",
) -> Sequence[TextOrIds]:
    """The context or suffix of each text; raises DuelError if there is not one for each."""
    if given is None:
        return [nothing] * len(texts)
    given = as_list(given, name)
    if isinstance(given, str) or len(given) != len(texts):
        came = "one text" if isinstance(given, str) else str(len(given))
        raise DuelError(f"{name} takes a text or ids for each of the {len(texts)} texts; got {came}.")
    return given
