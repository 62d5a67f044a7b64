"""Measures of samples that need another model: generative perplexity and MAUVE."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from lm_eval_duel import denoisers
from lm_eval_duel.errors import DuelError
from lm_eval_duel.estimators.duel import Autoregressive
from lm_eval_duel.fingerprint import digest
from lm_eval_duel.sweep.arguments import MISSING_MAUVE
from lm_eval_duel.text.text import Text

Texts = Sequence[Sequence[int]]


class Judged(NamedTuple):
    """A text under another model. One that is longer than a row is scored in `pieces`."""

    log_prob: float
    tokens: int
    pieces: int


class Scorer:
    """An autoregressive model that scores texts, retokenized unless its tokenizer equals that of `written`."""

    def __init__(self, name: str, written: Text, device: str):
        self.name, self.written = name, written
        self.tokenizer = denoisers.load_tokenizer({"pretrained": name})
        denoiser = denoisers.load(name, device=device, tokenizer=self.tokenizer, attention="causal")
        self.estimator = Autoregressive(denoiser)
        self.text = Text(self.tokenizer, denoiser, "independent", 1)
        self.same = self.text.fingerprint == written.fingerprint
        self.fingerprint = digest({**denoiser.describe(), **self.estimator.describe(), **self.text.describe()})

    @property
    def scored_text(self) -> str:
        """A description of what is scored."""
        return "on the samples' ids" if self.same else "on retokenized text"

    def __call__(self, samples: Texts) -> list[Judged]:
        """What the model says about each sample."""
        windows, owner = [], []
        for n, sample in enumerate(samples):
            ids = list(sample) if self.same else self.text.encode(decode(self.written, sample))
            pieces = self.text.document(ids)
            windows += pieces
            owner += [n] * len(pieces)
        judged = [Judged(0.0, 0, 0)] * len(samples)
        for n, window, score in zip(owner, windows, self.estimator.log_prob(windows), strict=True):
            log_prob, tokens, pieces = judged[n]
            judged[n] = Judged(log_prob + score.log_prob, tokens + len(window.target), pieces + 1)
        return judged


def mauve(samples: Sequence[str], references: Sequence[str], model: str, length: int, device: torch.device) -> float:
    """MAUVE (Pillutla et al. 2021) of texts by the package mauve-text; `length`: tokens per text."""
    try:
        from mauve import compute_mauve
    except ImportError as error:
        raise DuelError(MISSING_MAUVE) from error
    number = (device.index or 0) if device.type == "cuda" else -1
    result = compute_mauve(
        p_text=list(references),
        q_text=list(samples),
        featurize_model_name=model,
        max_text_length=length,
        device_id=number,
        verbose=False,
    )
    return float(result.mauve)


def decode(text: Text, ids: Sequence[int]) -> str:
    """Decode ids without cleaning up spaces."""
    return text.tokenizer.decode(ids, clean_up_tokenization_spaces=False)
