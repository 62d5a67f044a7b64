"""The encoder of texts: text in, windows with special tokens, context and scored tokens out. It needs no lm-eval.

Below this room there are only ids.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import Any

from lm_eval_duel.core.denoiser import Denoiser
from lm_eval_duel.core.windows import Ids, Window, as_ids, from_row, independent, infilled, rolling, target_capacity
from lm_eval_duel.denoisers.load_options import WHOLE_ROW_BOS
from lm_eval_duel.denoisers.vocabulary import convention, end_of_text
from lm_eval_duel.errors import DuelError, UsageError
from lm_eval_duel.fingerprint import of_tokenizer
from lm_eval_duel.text.annotated import Gap, Residues, TokenText, split_at_borders

NORMALISED = (  # what a tokenizer may leave out, and two texts that differ in it
    ("lower case", "The House", "the house"),
    ("accents", "caf\u00e9", "cafe"),
)


class TextEncoder:
    """An encoder of texts as windows of a network.

    `scheme`: how long texts are cut, "independent" or "harness"; `block`: the block in force. `cut_contexts` and
    `merged_borders` count contexts that were truncated, and continuations that were encoded alone.
    """

    def __init__(self, tokenizer: Any, denoiser: Denoiser, scheme: str, block: int | None):
        self.tokenizer = tokenizer
        self.denoiser = denoiser
        self.scheme = scheme
        self.block = block
        self.bos, self.prefix, self.suffix = convention(tokenizer, denoiser)
        self.cut_contexts = 0
        self.merged_borders = 0

    # ------------------------------------------------------------ special tokens

    @cached_property
    def fingerprint(self) -> str:
        """The digest of everything that the tokenizer does."""
        return of_tokenizer(self.tokenizer)

    @property
    def end(self) -> int | None:
        """The id of the end of a text, or the closest one that the tokenizer has."""
        return end_of_text(self.tokenizer)

    @property
    def start(self) -> int | None:
        """The id before the first of the harness's rolling windows, as for stock models."""
        if self.prefix:
            return self.prefix[-1]
        bos = self.tokenizer.bos_token_id
        return bos if bos is not None else self.end

    @property
    def unk_id(self) -> int | None:
        """The id of text that the tokenizer does not know; None if it has none, or uses its end of text (GPT-2)."""
        unk = self.tokenizer.unk_token_id
        if unk in (self.tokenizer.eos_token_id, self.tokenizer.bos_token_id):
            return None
        return unk

    def unknown(self, windows: Iterable[Window], text: str) -> int:
        """The number of scored tokens that stand for something in `text` that the tokenizer does not know.

        An unknown token that the text itself spells out, as in WikiText, does not count.
        """
        if self.unk_id is None:
            return 0
        scored = sum(window.target.count(self.unk_id) for window in windows)
        if not scored:
            return 0
        return max(0, scored - text.count(self.tokenizer.unk_token))

    @cached_property
    def normalises(self) -> str:
        """The distinctions that the tokenizer does not make, such as "lower case": such texts have one probability."""
        lost = []
        for what, text, other in NORMALISED:
            ids = self.encode(text)
            if ids and self.unk_id not in ids and ids == self.encode(other):
                lost.append(what)
        return ", ".join(lost)

    @property
    def capacity(self) -> int:
        """Target positions of a row."""
        prefix = [self.start] if self.scheme == "harness" else self.prefix
        return target_capacity(self.denoiser.max_length, prefix, self.suffix)

    def describe(self) -> dict[str, object]:
        """The part of the spec that concerns text."""
        special_tokens = f"{self.prefix} text {self.suffix}, bos={self.bos}"
        if self.scheme == "harness" and not self.prefix:
            special_tokens += f", windows after {self.start}"
        entries = {
            "windows": self.scheme,
            "max_length": self.denoiser.max_length,
            "special_tokens": special_tokens,
            "tokenizer": self.fingerprint,
        }
        if self.normalises:
            entries["normalises"] = self.normalises
        return entries

    # ------------------------------------------------------------ ids

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        """The ids of a text alone; special tokens are added to windows, not to texts.

        Raises DuelError for a text with a lone surrogate.
        """
        require_unicode(text)
        return self.tokenizer(text, add_special_tokens=add_special_tokens, verbose=False)["input_ids"]

    def encode_pair(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        """The ids of a context and its continuation, split as the harness does.

        Both are encoded together, and the context's trailing spaces belong to the continuation. If a token spans the
        border, so that the joint ids do not begin with the context's, the continuation is encoded alone and these ids
        are scored.
        """
        context, continuation, _ = split_at_borders(context, continuation)
        if not continuation:
            return self.encode(context), []
        before = self.encode(context) if context else []
        joint = self.encode(context + continuation)
        if joint[: len(before)] == before and len(joint) > len(before):
            return before, joint[len(before) :]
        self.merged_borders += 1
        alone = self.encode(continuation)
        if not alone:
            raise DuelError(f"The continuation {continuation!r} has no tokens in this tokenizer, so it has no score.")
        return before, alone

    def encode_gap(self, context: str, gap: Gap) -> tuple[list[int], list[int], list[int]]:
        """The ids of a context, of the text in the gap after it, and of what follows.

        All are encoded together, with white space at the borders as in `split_at_borders`. If a token spans a border,
        the text after that border is encoded alone.
        """
        context, inside, suffix = split_at_borders(context, str(gap), gap.suffix)
        merged_before = self.merged_borders
        before, target = self.encode_pair(context, inside)
        joint = self.encode(context + inside + suffix)
        if joint[: len(before) + len(target)] == before + target:
            return before, target, joint[len(before) + len(target) :]
        self.merged_borders = merged_before + 1  # one continuation, even if a token spans each of its borders
        return before, target, self.encode(suffix)

    def encode_residues(self, residues: str) -> list[int]:
        """The token of each letter; raises DuelError for a letter that is no token."""
        tokens = self.tokenizer.convert_tokens_to_ids(list(residues))
        unknown = set()
        for letter, token in zip(residues, tokens, strict=True):
            if token in (self.tokenizer.unk_token_id, None):
                unknown.add(letter)
        if unknown:
            letters = ", ".join(sorted(unknown))
            raise DuelError(f"The tokenizer has no token for the residues {letters}; use a protein model.")
        return tokens

    def scorable(self, ids: list[int]) -> list[int]:
        """The ids of a text; raises DuelError if the mask token is among them."""
        mask_id = self.denoiser.mask_id
        count = ids.count(mask_id)
        if not count:
            return ids
        times = "1 time" if count == 1 else f"{count} times"
        remedy = "Remove it from the text."
        if mask_id not in self.tokenizer.all_special_ids:  # DiffuGPT, DiffuLLaMA
            remedy = (
                "This checkpoint took an ordinary token as its [MASK], so such texts cannot be scored: leave them out, "
                "for every model that you compare."
            )
        raise DuelError(
            f"the text holds the mask token {self.tokenizer.decode([mask_id])!r} (id {mask_id}, {times}), which a "
            f"masked diffusion model can neither score nor see as context. {remedy}"
        )

    # ------------------------------------------------------------ windows

    def continuation(self, context: list[int], target: list[int], after: Sequence[int] = ()) -> Window:
        """The window of a continuation, with `after` visible behind it; what does not fit is truncated and counted.

        The context loses its beginning, and `after` its end. Raises DuelError if there is no room for a context, or for
        the continuation.
        """
        if self.bos in WHOLE_ROW_BOS:
            raise DuelError(
                f"bos={self.bos} scores the row from its first position on, so it has no room for a context: use it "
                "for whole texts (loglikelihood_rolling), and bos=given or none for tasks with a context."
            )
        context = self.scorable(context)
        target = self.scorable(target)
        if not context and target and self.denoiser.attention == "causal":
            context, target = self._after_start(target)
        if self.prefix and context[: len(self.prefix)] == self.prefix:  # a chat template has added it already
            context = context[len(self.prefix) :]
        after = self.scorable(list(after))
        window, lost = infilled(context, target, after, self.denoiser.max_length, self.prefix, self.suffix)
        if lost:
            self.cut_contexts += 1
        return window

    def _after_start(self, target: list[int]) -> tuple[list[int], list[int]]:
        """A context for a causal network where there is none: a BOS (or EOS), as under `--model hf`.

        A BOS that `target` begins with is that context, and is not scored.
        """
        if target[0] == self.start:
            return target[:1], target[1:]
        if self.start is None:
            return [], target
        return [self.start], target

    def gap(self, before: str | Ids, inside: str | Ids, after: str | Ids = "") -> Window:
        """The window of a text between two others, with special tokens around them; each is given as text or as ids.

        Three texts are encoded together, as the harness does; if one is given as ids, a text is encoded alone. Raises
        DuelError as `continuation` does.
        """
        if isinstance(before, str) and isinstance(inside, str) and isinstance(after, str):
            return self.pair(before, Gap(inside, after) if after else inside)
        parts = []
        for part in (before, inside, after):
            parts.append(self.encode(part) if isinstance(part, str) else [*as_ids(part)])
        return self.continuation(*parts)

    def pair(self, context: str, continuation: str) -> Window:
        """The window of a context and its continuation, which may be a Gap or Residues, encoded as the harness does."""
        if isinstance(continuation, Residues):
            before = self.encode_residues(context)
            inside = self.encode_residues(continuation)
            after = self.encode_residues(continuation.suffix)
            window = self.continuation(before, inside, after)
            return dataclasses.replace(window, known=continuation.known)
        if isinstance(continuation, Gap):
            return self.continuation(*self.encode_gap(context, continuation))
        return self.continuation(*self.encode_pair(context, continuation))

    def prompt(self, before: str | Ids, length: int, after: str | Ids = "") -> Window:
        """The window of `length` positions to generate; its target is a placeholder. What does not fit is truncated.

        Raises UsageError if `length` alone is too long.
        """
        capacity = target_capacity(self.denoiser.max_length, self.prefix, self.suffix)
        if length > capacity:
            raise UsageError(
                f"{length} positions to generate do not fit a row of max_length={self.denoiser.max_length} ({capacity} "
                "positions besides special tokens). Generate fewer (length of Duel.sample, max_new_tokens of generate, "
                "or max_gen_toks in the harness's gen_kwargs), or raise max_length if the network allows it."
            )
        any_token = 1 if self.denoiser.mask_id == 0 else 0  # a placeholder; [MASK] would be refused
        return self.gap(before, [any_token] * length, after)

    def room(self, before: str | Ids, after: str | Ids = "") -> int:
        """The positions that a prompt and its suffix leave of a row; at least half, since `prompt` truncates them."""
        capacity = target_capacity(self.denoiser.max_length, self.prefix, self.suffix)
        around = 0
        for part in (before, after):
            around += len(self.encode(part) if isinstance(part, str) else as_ids(part))
        return max(capacity - around, capacity // 2)

    def windows(self, text: str, counted: int | None = None) -> list[Window]:
        """The windows of a whole text.

        `counted`: the number of tokens that its task divides by; raises DuelError if another number is scored.
        """
        if isinstance(text, TokenText):
            windows = [self.row(text)]
            scored = len(windows[0].target)
            remedy = f"Say which positions are scored: --metadata bos={self.bos}"
        else:
            ids = self.encode(text)
            windows = self.document(ids)
            # The task counts the ids of the text. By `bos`, a row may also score special tokens, or take its first id
            # as context, so its target is longer or shorter than its text.
            before = len(self.prefix)
            after = len(self.suffix)
            longer = {"scored": before, "official": before + after - 1, "first": -1}
            extra = longer.get(self.bos, 0)  # of each row
            scored = sum(len(window.target) - extra for window in windows)
            remedy = "Name the tokenizer: --metadata tokenizer=<folder or hub name>"
        if counted not in (None, scored):
            raise DuelError(
                f"the task counted {counted} tokens but this model's tokenizer has {scored}: token perplexity would be "
                f"wrong. {remedy}."
            )
        return windows

    def row(self, text: TokenText) -> Window:
        """The window of a row that a task has made, special tokens included, by the convention of `bos`.

        Raises DuelError for ids of another tokenizer, or a row that does not fit.
        """
        name, digest = text.tokenizer
        if digest != self.fingerprint:
            raise DuelError(
                f"the ids come from the tokenizer {name} ({digest}), but this model's is "
                f"{self.tokenizer.name_or_path} ({self.fingerprint}). Name the model's: --metadata tokenizer=..."
            )
        if text.bos not in ("", self.bos):
            raise DuelError(
                f"the scored positions were counted with bos={text.bos}, but this model has bos={self.bos}. Use one "
                f"for both: --metadata bos={self.bos} or the model arg bos={text.bos}."
            )
        if len(text.token_ids) > self.denoiser.max_length:
            raise DuelError(
                f"the row has {len(text.token_ids)} ids but the network holds {self.denoiser.max_length}, and rows of "
                "a wrapped task are not cut again. Make them shorter: --metadata length=..."
            )
        ids = self.scorable(list(text.token_ids))
        window = from_row(ids, *text.special_tokens, self.bos)
        return self._without_unseen(window)

    def document(self, ids: list[int]) -> list[Window]:
        """The windows of a text's ids, by the scheme."""
        ids = self.scorable(ids)
        if self.scheme == "independent":
            windows = independent(ids, self.denoiser.max_length, self.prefix, self.suffix, self.bos)
            return [self._without_unseen(window) for window in windows]
        if self.start is None:
            raise DuelError("windows=harness needs a BOS or EOS token, and this tokenizer has none. Use independent.")
        return rolling(ids, self.start, self.capacity, self.suffix)

    def note_on_blocks(self, windows: Iterable[Window]) -> str:
        """A sentence if no target fills a block, so that another `block` would give the same value; empty otherwise."""
        if self.denoiser.by_blocks:  # it has no other block
            return ""
        return shorter_than_a_block(windows, self.block)

    def _without_unseen(self, window: Window) -> Window:
        """A window without its suffix if that begins a block of its own, which no block with a target sees."""
        if not self.denoiser.by_blocks or not window.suffix:
            return window
        ends_on_a_border = not window.context and len(window.target) % (self.block or 1) == 0
        return dataclasses.replace(window, suffix=()) if ends_on_a_border else window


def shorter_than_a_block(windows: Iterable[Window], block: int | None) -> str:
    """A sentence if no target fills a block: the value is then that without blocks. Empty otherwise."""
    longest = max((len(window.target) for window in windows), default=0)
    if block is None or not 0 < longest < block:
        return ""
    return (
        f"every window is shorter than a block (block={block}, at most {longest} positions): the value is that of "
        "block=none, under another fingerprint"
    )


def unknown_share(unknown: int, tokens: int) -> str:
    """A sentence on how many tokens are [UNK], and its meaning for the numbers."""
    return (
        f"{unknown:,} of {tokens:,} tokens ({unknown / tokens:.1%}) are [UNK], text that the tokenizer does not know. "
        "Bits per byte and word perplexity are then not a likelihood of the text, nor comparable between tokenizers"
    )


def require_unicode(text: str) -> None:
    """Raise DuelError for a text with half a character, as in JSON of truncated strings: no tokenizer accepts it."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        at = error.start
        before = text[max(0, at - 20) : at]
        raise DuelError(
            f"the text holds a lone surrogate, {text[at]!a} at character {at} (after {before!a}): half of a surrogate "
            "pair, which no tokenizer accepts. Repair the text, for example by "
            "text.encode('utf-16', 'surrogatepass').decode('utf-16', 'replace')."
        ) from None


def find_chat_template(tokenizer: Any, wanted: bool | str) -> str:
    """The chat template of a tokenizer: its default (`wanted` is True), or the one of this name.

    Raises:
        UsageError: It has none, or none of this name.
    """
    templates = getattr(tokenizer, "chat_template", None)
    if not templates:
        raise UsageError(
            "The tokenizer has no chat template: leave --apply_chat_template out, or pass tokenizer=<a folder or hub "
            "name that has one>."
        )
    if isinstance(templates, str):
        if isinstance(wanted, str):  # transformers would take the name for the text of a template
            raise UsageError(
                f"--apply_chat_template {wanted}: the tokenizer has a single chat template, which has no name. Leave "
                "the name out."
            )
        return templates
    name = wanted if isinstance(wanted, str) else "default"
    if name not in templates:
        names = ", ".join(sorted(templates))
        raise UsageError(
            f"The tokenizer has no chat template named '{name}': pass --apply_chat_template NAME with one of {names}."
        )
    return str(templates[name])
