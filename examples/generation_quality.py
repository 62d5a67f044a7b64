"""Quality of samples under several unmasking rules: generative perplexity, entropy, repetition and MAUVE.

python examples/generation_quality.py demo-mdm --block 16 --rules greedy:k=1 greedy:k=4 threshold:mu=0.3 --judge demo-ar

Every rule draws samples from exactly the distribution whose likelihood `Duel.log_prob` computes. The last row of the
table is a text that people wrote, in pieces of the same length: all of these measures depend on length. Intervals are
95 %, by the bootstrap of `compare`, over samples. `--mauve` needs the package mauve-text.

To compare the rules by the likelihood of a text instead, run lm_eval once a rule, then `lm-eval-duel report`.
"""

import argparse
import json
import math
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np

from lm_eval_duel import Duel
from lm_eval_duel.demo import FOLDER
from lm_eval_duel.results import bootstrap

SOTU = FOLDER / "text" / "sotu.jsonl"
Tokens = tuple[int, ...]


class Mean(NamedTuple):
    """A mean over samples, with its 95 % interval; None for a single sample."""

    value: float
    interval: tuple[float, float] | None = None

    def __str__(self) -> str:
        ends = "" if self.interval is None else " ({:.4g} to {:.4g})".format(*self.interval)
        return f"{self.value:.4g}{ends}"

    def exp(self) -> "Mean":
        return Mean(math.exp(self.value), self.interval and tuple(map(math.exp, self.interval)))


class Quality(NamedTuple):
    """A row of the table. None: not computed."""

    name: str
    nfe: float | None  # rule steps a token
    own: Mean | None  # the negative log-likelihood under the rule that drew them, nats a token
    perplexity: Mean | None  # under the judge, a token of its tokenizer
    entropy: Mean
    repetition: Mean
    distinct: float
    mauve: float | None


def mean(values: Sequence[float], sizes: Sequence[int] | None = None) -> Mean:
    """The sum of `values` over that of `sizes` (default: of ones)."""
    sizes = [1] * len(values) if sizes is None else sizes
    value = math.fsum(values) / sum(sizes)
    if len(values) < 2:
        return Mean(value)
    log_probs = np.array([[[-value, size]] for value, size in zip(values, sizes, strict=True)])  # (N, 1, 2)
    samples = [str(n) for n in range(len(values))]  # equal ones were drawn apart, so each counts
    [draws] = bootstrap.bootstrap_rates(log_probs, samples)
    low, high = bootstrap.percentile_interval(draws, len(values))
    return Mean(value, (low + 0.0, high + 0.0))  # no -0


def entropy(tokens: Tokens) -> float:
    """The entropy of the token histogram of a sample, as in the paper, in nats."""
    shares = [count / len(tokens) for count in Counter(tokens).values()]
    return -math.fsum(share * math.log(share) for share in shares)


def ngrams(tokens: Tokens, n: int) -> list[Tokens]:
    return [tokens[start : start + n] for start in range(len(tokens) - n + 1)]


def repetition(tokens: Tokens) -> float:
    """The share of a sample's 4-grams that occur earlier in it."""
    grams = ngrams(tokens, 4)
    return 1 - len(set(grams)) / len(grams)


def mauve(texts: Sequence[str], references: Sequence[str], model: str, length: int) -> float:
    """MAUVE of texts (Pillutla et al. 2021) by mauve-text. It has no error: compare equal numbers of samples."""
    from mauve import compute_mauve

    found = compute_mauve(
        p_text=references, q_text=texts, featurize_model_name=model, max_text_length=length, verbose=False
    )
    return float(found.mauve)


def quality(name: str, samples: Sequence[Tokens], texts: Sequence[str], judge: Duel | None) -> Quality:
    """The measures of samples that do not depend on how they were drawn."""
    perplexity = None
    if judge is not None:  # the judge reads text, so samples are tokenized again
        scores = judge.score(texts)
        perplexity = mean([-score.log_prob for score in scores], [len(score.tokens) for score in scores]).exp()
    pairs = [pair for tokens in samples for pair in ngrams(tokens, 2)]
    means = mean(list(map(entropy, samples))), mean(list(map(repetition, samples)))
    return Quality(name, None, None, perplexity, *means, len(set(pairs)) / len(pairs), None)


def compare(options: argparse.Namespace) -> Iterator[Quality]:
    """A row for each rule, and one for the pieces of the text."""
    judge = Duel.from_pretrained(options.judge, estimator="ar") if options.judge else None
    first = Duel.from_pretrained(options.name, block=options.block)
    documents = [json.loads(line)["text"] for line in Path(options.text).read_text(encoding="utf-8").splitlines()]
    windows = [window for document in documents for window in first.windows(document)]
    stream = [token for window in windows for token in window.target]
    starts = range(0, len(stream) - options.length + 1, options.length)
    pieces = [tuple(stream[start : start + options.length]) for start in starts][: options.samples]
    decode = partial(first.tokenizer.batch_decode, clean_up_tokenization_spaces=False)
    references = decode(pieces)

    before = windows[0].context  # special tokens
    after = windows[0].suffix
    for rule in options.rules:
        duel = Duel(first.denoiser, rule=rule, block=options.block, tokenizer=first.tokenizer)
        drawn = duel.sample(
            [before] * options.samples, options.length, suffixes=[after] * options.samples, seed=options.seed
        )
        samples = [sample.tokens for sample in drawn]
        texts = decode(samples)
        yield quality(rule, samples, texts, judge)._replace(
            nfe=sum(sample.nfe for sample in drawn) / options.length / options.samples,
            own=mean([-sample.log_prob for sample in drawn], [options.length] * options.samples),
            mauve=mauve(texts, references, options.mauve, options.length) if options.mauve else None,
        )
    yield quality(f"{len(pieces)} pieces of the text", pieces, references, judge)


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", help="the network that writes: a folder, a hub name or a bundled name")
    parser.add_argument("--rules", nargs="+", default=["greedy:k=1", "greedy:k=4"])
    parser.add_argument("--block", type=lambda text: int(text) if text.isdigit() else text, default="auto")
    parser.add_argument("--samples", type=int, default=48, help="of each rule")
    parser.add_argument("--length", type=int, default=128, help="tokens of a sample")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--text", default=SOTU, help="a JSONL file whose rows have a text, to compare the samples with")
    parser.add_argument("--judge", help="an autoregressive model, for generative perplexity")
    parser.add_argument("--mauve", metavar="MODEL", help="compute MAUVE by the features of MODEL, such as gpt2-large")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    options = parse(sys.argv[1:])
    print("| rule | NFE | own nll, nats a token | generative perplexity | entropy | repetition | distinct-2 | MAUVE |")
    print("|---|---|---|---|---|---|---|---|", flush=True)
    for row in compare(options):
        cells = ["" if cell is None else f"{cell:.3g}" if isinstance(cell, float) else str(cell) for cell in row]
        print(f"| {' | '.join(cells)} |", flush=True)
