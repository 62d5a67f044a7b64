"""Text in, windows out: the tokenizer, the framing tokens of a row, and what is given and what is scored.

No room below this one sees text.
"""

from __future__ import annotations

import dataclasses
from functools import cached_property
from typing import Any

from lm_eval_duel.denoisers.base import Denoiser
from lm_eval_duel.denoisers.load_options import WHOLE_ROW_BOS
from lm_eval_duel.denoisers.special_tokens import convention, end_of_text
from lm_eval_duel.engine.windows import Window, conditional, independent, of_row, target_capacity
from lm_eval_duel.errors import DuelError
from lm_eval_duel.fingerprint import of_tokenizer
from lm_eval_duel.tasks.tokenized_text import TokenText


class Text:
    """A tokenizer and the rows of a network: texts as windows.

    `scheme`: how long texts become windows, "independent" or "harness"; `block`: the block in force.
    """

    def __init__(self, tokenizer: Any, denoiser: Denoiser, scheme: str, block: int | None):
        self.tokenizer, self.denoiser, self.scheme, self.block = tokenizer, denoiser, scheme, block
        self.bos, self.prefix, self.suffix = convention(tokenizer, denoiser)
        self.cut_contexts = self.merged_borders = 0

    # ------------------------------------------------------------ framing

    @cached_property
    def fingerprint(self) -> str:
        """Of everything that the tokenizer does."""
        return of_tokenizer(self.tokenizer)

    @property
    def end(self) -> int | None:
        """The id of the end of a text, or what comes nearest."""
        return end_of_text(self.tokenizer)

    @property
    def start(self) -> int | None:
        """The id that stands before the first of the harness's rolling windows, as stock models have it."""
        if self.prefix:
            return self.prefix[-1]
        bos = self.tokenizer.bos_token_id
        return bos if bos is not None else self.end

    @property
    def capacity(self) -> int:
        """Target positions of a row."""
        frame = [self.start] if self.scheme == "harness" else self.prefix
        return target_capacity(self.denoiser.max_length, frame, self.suffix)

    def describe(self) -> dict[str, object]:
        """What of the text side defines the spec."""
        after = f", windows after {self.start}" if self.scheme == "harness" and not self.prefix else ""
        return {
            "windows": self.scheme,
            "max_length": self.denoiser.max_length,
            "framing": f"{self.prefix} text {self.suffix}, bos={self.bos}{after}",
            "tokenizer": self.fingerprint,
        }

    # ------------------------------------------------------------ ids

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        """The ids of a text alone; framing tokens are added to windows, not to texts.

        Raises DuelError for a text with a lone surrogate.
        """
        require_unicode(text)
        return self.tokenizer(text, add_special_tokens=add_special_tokens, verbose=False)["input_ids"]

    def encode_pair(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        """The ids of a context and of what continues it, as the harness cuts them: the whole text is encoded, and the
        context's trailing spaces belong to the continuation.

        Where a merge crosses the border, so that the whole does not begin with the context's ids, the continuation is
        encoded by itself: the ids that are scored are those of the continuation, as the tokenizer writes it alone.
        """
        if not continuation:
            return self.encode(context), []
        kept = context.rstrip()
        continuation = context[len(kept) :] + continuation
        before, whole = self.encode(kept) if kept else [], self.encode(kept + continuation)
        if whole[: len(before)] == before and len(whole) > len(before):
            return before, whole[len(before) :]
        self.merged_borders += 1
        if not (alone := self.encode(continuation)):
            raise DuelError(f"The continuation {continuation!r} has no tokens in this tokenizer, so it has no score.")
        return before, alone

    def scorable(self, ids: list[int]) -> list[int]:
        """The ids of a text; raises DuelError where they hold the mask token."""
        if self.denoiser.mask_id in ids:
            raise DuelError(
                f"the text holds the mask token {self.tokenizer.decode([self.denoiser.mask_id])!r}, which a masked "
                "diffusion model cannot score or be given. Remove it from the text."
            )
        return ids

    # ------------------------------------------------------------ windows

    def continuation(self, context: list[int], target: list[int]) -> Window:
        """The window of a continuation; a context too long is cut from the left and counted.

        Raises DuelError where there is no place for a context, or for the continuation.
        """
        if self.bos in WHOLE_ROW_BOS:
            raise DuelError(
                f"bos={self.bos} scores the row from its first position on, so it has no place for a context: use it "
                "for whole texts (loglikelihood_rolling), and bos=given or none for tasks with a context."
            )
        context, target = self.scorable(context), self.scorable(target)
        if self.prefix and context[: len(self.prefix)] == self.prefix:  # a chat template writes it as well
            context = context[len(self.prefix) :]
        window, lost = conditional(context, target, self.denoiser.max_length, self.prefix, self.suffix)
        self.cut_contexts += lost > 0
        return window

    def prompt(self, text: str, length: int) -> list[int]:
        """The ids before a generation of `length` positions, framing included; a text too long is cut from the left.

        Raises DuelError where `length` alone is too long.
        """
        capacity = target_capacity(self.denoiser.max_length, self.prefix, self.suffix)
        if length > capacity:
            raise DuelError(
                f"{length} positions to generate (max_gen_toks) do not fit a row of max_length="
                f"{self.denoiser.max_length} ({capacity} positions beside framing tokens). Raise max_length if the "
                "network allows it, or shorten it: --gen_kwargs max_gen_toks=..."
            )
        hidden = next(token for token in range(length + 2) if token != self.denoiser.mask_id)  # any that may be scored
        return list(self.continuation(self.encode(text), [hidden] * length).context)

    def windows(self, text: str, counted: int | None = None) -> list[Window]:
        """The windows of a whole text.

        `counted`: the tokens that its task divides by; raises DuelError where others are scored.
        """
        if isinstance(text, TokenText):
            windows = self.row(text)
            scored, remedy = len(windows[0].target), f"Say which positions are scored: --metadata bos={self.bos}"
        else:
            ids = self.encode(text)
            windows = self.document(ids)
            scored, remedy = len(ids), "Name the tokenizer: --metadata tokenizer=<folder or hub name>"
        if counted not in (None, scored):
            raise DuelError(
                f"the task counted {counted} tokens but this model's tokenizer has {scored}: token perplexity would be "
                f"wrong. {remedy}."
            )
        return windows

    def row(self, text: TokenText) -> list[Window]:
        """The window of a row that a task has cut and framed, by the convention of `bos`.

        Raises DuelError for ids of another tokenizer, or a row that does not fit.
        """
        name, written = text.tokenizer
        if written != self.fingerprint:
            raise DuelError(
                f"its ids were written by the tokenizer {name} ({written}), and this model's is "
                f"{self.tokenizer.name_or_path} ({self.fingerprint}). Name the model's: --metadata tokenizer=..."
            )
        if text.bos not in ("", self.bos):
            raise DuelError(
                f"its scored positions were counted by bos={text.bos}, and this model's is bos={self.bos}: say one of "
                f"them for both, --metadata bos={self.bos} or the model arg bos={text.bos}."
            )
        if len(text.token_ids) > self.denoiser.max_length:
            raise DuelError(
                f"its row has {len(text.token_ids)} ids and the network holds {self.denoiser.max_length}: rows of a "
                "wrapped task are not cut again. Give the task fewer: --metadata length=..."
            )
        window = of_row(self.scorable(list(text.token_ids)), *text.framing, self.bos)
        return [self._without_unseen(window)]

    def document(self, ids: list[int]) -> list[Window]:
        """A text's windows, by the scheme."""
        ids = self.scorable(ids)
        if self.scheme == "independent":
            windows = independent(ids, self.denoiser.max_length, self.prefix, self.suffix, self.bos)
            return [self._without_unseen(window) for window in windows]
        if self.start is None:
            raise DuelError("windows=harness starts with a prefix token and this tokenizer has none; use independent.")
        from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

        rolling = get_rolling_token_windows(ids, self.start, self.capacity, context_len=1)
        pairs = map(make_disjoint_window, rolling)
        return [Window(tuple(context), tuple(target), tuple(self.suffix)) for context, target in pairs]

    def _without_unseen(self, window: Window) -> Window:
        """A window without the suffix that no block of a block-causal network sees (after the last block's border)."""
        unseen = self.denoiser.attention == "block_causal" and len(window.target) % (self.block or 1) == 0
        return dataclasses.replace(window, suffix=()) if window.suffix and not window.context and unseen else window


def require_unicode(text: str) -> None:
    """Raise DuelError where a text holds half a character, as JSON of cut strings does: no tokenizer takes it."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        at = error.start
        raise DuelError(
            f"the text holds a lone surrogate, {text[at]!a} at character {at} (after {text[max(0, at - 20) : at]!a}): "
            "half a character, which no tokenizer takes. Repair the text, for example by "
            "text.encode('utf-16', 'surrogatepass').decode('utf-16', 'replace')."
        ) from None
