"""Texts to windows, as in the harness, for `Duel.score`, `estimate` and `sample`."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, TypeAlias

from lm_eval_duel.core.windows import Ids, Window
from lm_eval_duel.errors import DuelError, naming
from lm_eval_duel.text.text import TextEncoder

TextOrIds: TypeAlias = "str | Ids"

log = logging.getLogger("lm_eval.duel_mdm")


def text_windows(
    encoder: TextEncoder, texts: Sequence[str], around: Sequence[tuple[TextOrIds, TextOrIds]] | None = None
) -> list[tuple[int, list[Window]]]:
    """(tokens, windows) of each text, as in the harness.

    `around`: the context and the suffix of each; None: whole texts. Raises DuelError, naming the text, for one that
    cannot be scored.
    """
    found = []
    cut_before = encoder.cut_contexts
    for n, text in enumerate(texts):
        with naming(f"Text {n}"):
            if around is None:
                ids = encoder.encode(text)
                found.append((len(ids), encoder.document(ids)))
            else:
                before, after = around[n]
                window = encoder.gap(before, text, after)
                found.append((len(window.target), [window] if window.target else []))
    if cut := encoder.cut_contexts - cut_before:
        log.warning("%d texts lost a part of their context or suffix: max_length=%d", cut, encoder.denoiser.max_length)
    return found


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
