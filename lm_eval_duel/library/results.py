"""What `Duel.score` and `Duel.generate` return."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from lm_eval_duel.engine.results import Sample, WindowScore, known_sum
from lm_eval_duel.engine.windows import Window
from lm_eval_duel.harness.token_text import token_texts

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclasses.dataclass(frozen=True)
class TextScore:
    """The score of one text.

    `tokens` are the scored tokens as pieces of text. They add up to the text, as far as the tokenizer can write it
    back. `token_logprobs` and `reveal_steps` have an entry for each; steps count from 0 in every block.
    """

    text: str
    log_prob: float  # nats, summed over windows
    perplexity: float  # per token of the text; NaN for a text without tokens
    bits_per_byte: float  # per UTF-8 byte; NaN for an empty text
    tokens: tuple[str, ...]
    token_logprobs: tuple[float, ...]
    reveal_steps: tuple[int, ...]
    nfe: int | None  # rule steps, summed over blocks
    near_ties: int | None  # steps whose order float noise could change; None: the rule does not say
    windows: tuple[Window, ...]  # what was scored, special tokens included
    window_scores: tuple[WindowScore, ...]

    @classmethod
    def of(
        cls,
        text: str,
        length: int,
        windows: Sequence[Window],
        scores: Sequence[WindowScore],
        tokenizer: PreTrainedTokenizerBase,
    ) -> TextScore:
        """The score of a text of `length` tokens from those of its windows."""
        log_prob = math.fsum(score.log_prob for score in scores)
        nfe: int | None = 0
        near_ties: int | None = 0
        for score in scores:
            nfe, near_ties = known_sum(nfe, score.nfe), known_sum(near_ties, score.near_ties)
        return cls(
            text=text,
            log_prob=log_prob,
            perplexity=_exp(-log_prob / length) if length else math.nan,
            bits_per_byte=-log_prob / math.log(2) / len(text.encode()) if text else math.nan,
            tokens=tuple(token_texts([token for window in windows for token in window.target], tokenizer)),
            token_logprobs=tuple(value for score in scores for value in score.token_logprobs),
            reveal_steps=tuple(step for score in scores for step in score.reveal_steps),
            nfe=nfe,
            near_ties=near_ties,
            windows=tuple(windows),
            window_scores=tuple(scores),
        )


@dataclasses.dataclass(frozen=True)
class GeneratedText:
    """One generated text with its own exact log-probability.

    `text` ends before the first stop string or end-of-text token. The other fields cover everything that was
    generated, up to the end of the block in which it stopped. `Duel.log_prob([window])` gives `log_prob` again, unless
    `temperature`, `top_k` or `top_p` changed the distribution.
    """

    prompt: str
    text: str
    log_prob: float  # nats, of all `tokens` given the prompt
    tokens: tuple[str, ...]
    token_logprobs: tuple[float, ...]
    reveal_steps: tuple[int, ...]
    nfe: int | None
    near_ties: int | None
    window: Window

    @classmethod
    def of(
        cls, prompt: str, text: str, window: Window, sample: Sample, tokenizer: PreTrainedTokenizerBase
    ) -> GeneratedText:
        """The text of a sample, and the window under which it is scored again."""
        return cls(
            prompt=prompt,
            text=text,
            log_prob=sample.log_prob,
            tokens=tuple(token_texts(sample.tokens, tokenizer)),
            token_logprobs=sample.token_logprobs,
            reveal_steps=sample.reveal_steps,
            nfe=sample.nfe,
            near_ties=sample.near_ties,
            window=window,
        )


def _exp(value: float) -> float:
    return math.exp(value) if value < 709 else math.inf
