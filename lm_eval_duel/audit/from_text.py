"""From raw text to the printed number, without anything that a run computes but the network.

text of the documents -> ids by the tokenizer alone -> tokens, words and bytes counted
log-probabilities by the reference -> sums -> perplexities and bits per byte -> compared with the task's
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from lm_eval_duel.audit.checked import distance
from lm_eval_duel.core.scores import perplexity
from lm_eval_duel.core.windows import Window
from lm_eval_duel.text.annotated import TokenText

COUNTED = "duel_tokens"  # a column of the tasks of this package, which count their documents' tokens


@dataclasses.dataclass
class FromText:
    """The documents of a task.

    `bos`: which positions of a row are scored; `length`: of the longest row; `prefix`, `suffix`: its special tokens.
    """

    task: str
    tokenizer: Any
    bos: str
    length: int
    prefix: Sequence[int] = ()
    suffix: Sequence[int] = ()
    documents: int = 0
    log_prob: float = 0.0
    noise: float = 0.0  # nats by which the run's sum may differ
    tokens: int = 0
    words: int = 0
    bytes: int = 0
    counted_before: bool = False  # words and bytes are the task's, of texts that its documents do not hold
    ids: Counter[int] = dataclasses.field(default_factory=Counter)  # how often each comes
    alone: int = 0  # windows that the reference did not compute
    problems: list[str] = dataclasses.field(default_factory=list)

    def add(self, name: str, doc: Mapping[str, Any], text: str, windows: Sequence[Window], nats: float) -> None:
        """Add a document, its windows in the run and its log-probability by the reference."""
        ids = self.tokenizer(str(text), add_special_tokens=False, verbose=False)["input_ids"]
        scored = [token for window in windows for token in window.target]
        wanted = of_row(text, self.bos) if isinstance(text, TokenText) else self.of_text(ids)
        if scored != wanted:
            self.problems.append(
                f"{name}: of its text, {len(wanted)} ids are to be scored, but not these {len(scored)}"
            )
        self.ids.update(wanted)
        self.documents += 1
        self.log_prob += nats
        self.tokens += len(wanted) if isinstance(text, TokenText) else len(ids)
        raw = next((doc[column] for column in ("page", "text") if isinstance(doc.get(column), str)), text)
        words = len(re.split(r"\s+", raw)) if raw.strip() else 0
        size = len(raw.encode())
        if "page" not in doc and {COUNTED, "words", "bytes"} <= doc.keys():
            words, size, self.counted_before = doc["words"], doc["bytes"], True
        self.words += words
        self.bytes += size

    def of_text(self, ids: Sequence[int]) -> list[int]:
        """The ids that are scored of a text of these ids, which is cut into rows."""
        before, after = len(self.prefix), len(self.suffix)
        found, room = [], self.length - before - after
        for start in range(0, len(ids), room):
            row = [*self.prefix, *ids[start : start + room], *self.suffix]
            begin, end = {"official": (0, 1), "scored": (0, after), "first": (1, 0)}.get(self.bos, (before, after))
            found += row[begin : len(row) - end]
        return found

    @property
    def counts(self) -> dict[str, tuple[int, str]]:
        """The divisor of each metric that a task may print, and the divisor's name."""
        found = {f"{unit}_perplexity": (getattr(self, f"{unit}s"), f"{unit}s") for unit in ("token", "word", "byte")}
        return {name: each for name, each in {**found, "bits_per_byte": (self.bytes, "bytes")}.items() if each[0]}

    def value(self, metric: str) -> float:
        """A metric from the counts and the sum."""
        rate = -self.log_prob / self.counts[metric][0]
        return rate / math.log(2) if metric == "bits_per_byte" else perplexity(rate)

    def differing(self, printed: Mapping[str, float]) -> list[str]:
        """The differences from the numbers that the task prints, as text."""
        differences = []
        for metric, (count, units) in self.counts.items():
            if metric in printed:
                value = printed[metric]
                nats = -count * (value * math.log(2) if metric == "bits_per_byte" else math.log(value))
                if distance(nats, self.log_prob) > self.noise:
                    expected = f"{self.value(metric):.4f} over {count:,} {units}"
                    differences.append(f"{self.task} prints a {metric} of {value:.4f}, not {expected}")
        return [*self.problems, *differences]

    @property
    def unigram(self) -> float:
        """The token perplexity of these texts under their own shares of tokens: a network that reads is below it."""
        count = sum(self.ids.values())
        return math.exp(-math.fsum(n / count * math.log(n / count) for n in self.ids.values())) if count else math.nan

    def odd(self, printed: Mapping[str, float]) -> list[str]:
        """Notes on faults of arguments, such as a wrong shift or mask, or of the network itself."""
        value = printed.get("token_perplexity", math.nan)
        if not value > self.unigram:
            return []
        return [
            f"the token perplexity of {self.task} is {value:.2f}, and that of a unigram of this very text is "
            f"{self.unigram:.2f}: check the mask, shift_logits, the special tokens and the tokenizer"
        ]

    def lines(self, printed: Mapping[str, float]) -> list[str]:
        """Lines for the terminal: the counts, and the sum and metrics if the reference computed every window."""
        counts = f"{self.documents} documents, {self.bytes:,} bytes, {self.words:,} words, {self.tokens:,} tokens"
        if self.counted_before:
            counts += " (bytes and words are the task's: its documents do not hold the texts before detokenizing)"
        if self.alone:
            return [
                f"From the text of {self.task}, by the tokenizer alone:",
                f"  {counts}",
                f"  log-probabilities and perplexities: not checked independently ({self.alone} windows)",
            ]
        return [
            f"From the text of {self.task}, by the tokenizer and the reference alone:",
            f"  {counts}, {self.log_prob:.4f} nats",
            *(
                f"  {metric:<17} {self.value(metric):>14.4f}   printed {printed[metric]:>14.4f}"
                for metric in self.counts
                if metric in printed
            ),
            f"  a unigram of this very text: token perplexity {self.unigram:.4f}",
        ]


def of_row(text: TokenText, bos: str) -> list[int]:
    """The ids that are scored of a row that its task has cut."""
    before, after = text.special_tokens
    begin, end = {"given": (1, 0), "official": (0, 1), "scored": (0, 0), "first": (before + 1, after)}.get(
        bos, (before, after)
    )
    return list(text.token_ids[begin : len(text.token_ids) - end])
