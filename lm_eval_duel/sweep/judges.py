"""Measures of samples that need another model: generative perplexity and MAUVE."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from lm_eval_duel import denoisers
from lm_eval_duel.estimators.duel import Autoregressive
from lm_eval_duel.fingerprint import digest
from lm_eval_duel.text.text import Text

Texts = Sequence[tuple[int, ...]]


class Judged(NamedTuple):
    """A text under another model. One that is longer than a row is scored in `pieces`."""

    log_prob: float
    tokens: int
    pieces: int


class Scorer:
    """An autoregressive model that scores texts, retokenized unless its tokenizer equals that of `written`."""

    def __init__(self, name: str, written: Text, device: str):
        self.name, self.written = name, written
        tokenizer = denoisers.load_tokenizer({"pretrained": name})
        denoiser = denoisers.load(name, device=device, tokenizer=tokenizer, attention="causal")
        self.estimator = Autoregressive(denoiser)
        self.text = Text(tokenizer, denoiser, "independent", 1)
        self.same = self.text.fingerprint == written.fingerprint
        self.fingerprint = digest({**denoiser.describe(), **self.estimator.describe(), **self.text.describe()})

    def stream(self, samples: Texts) -> Iterator[tuple[int, Judged]]:
        """(index, what the model says) of each sample as it is finished."""
        windows, owners = [], []
        for n, sample in enumerate(samples):
            ids = list(sample) if self.same else self.text.encode(decode(self.written, sample))
            pieces = self.text.document(ids)
            windows += pieces
            owners += [n] * len(pieces)
        judged, left = [Judged(0.0, 0, 0)] * len(samples), Counter(owners)
        yield from ((n, judged[n]) for n in range(len(samples)) if not left[n])
        for i, score in self.estimator.stream(windows):
            n = owners[i]
            log_prob, tokens, pieces = judged[n]
            judged[n] = Judged(log_prob + score.log_prob, tokens + len(windows[i].target), pieces + 1)
            if judged[n].pieces == left[n]:
                yield n, judged[n]


def mauve(samples: Sequence[str], references: Sequence[str], model: str, length: int, device: torch.device) -> float:
    """MAUVE (Pillutla et al. 2021) of texts by the package mauve-text; `length`: tokens per text."""
    from mauve import compute_mauve

    result = compute_mauve(
        p_text=list(references),
        q_text=list(samples),
        featurize_model_name=model,
        max_text_length=length,
        device_id=(device.index or 0) if device.type == "cuda" else -1,
        verbose=False,
    )
    return float(result.mauve)


def decode(text: Text, ids: Sequence[int]) -> str:
    """Decode ids without cleaning up spaces."""
    return text.tokenizer.decode(ids, clean_up_tokenization_spaces=False)
