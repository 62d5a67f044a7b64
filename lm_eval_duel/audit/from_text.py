"""From raw text to the printed number, without anything that a run computes but the network.

text of the documents -> ids, by the tokenizer alone -> tokens, words and bytes, counted
log-probabilities, by the reference -> their sum -> perplexities and bits per byte, compared with the printed ones
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from lm_eval_duel.audit.checked import distance
from lm_eval_duel.console.command_line import REASONS
from lm_eval_duel.core.float_noise import nats_tolerance
from lm_eval_duel.core.scores import Value, perplexity
from lm_eval_duel.core.windows import Window
from lm_eval_duel.errors import counted, told_apart
from lm_eval_duel.text.annotated import TokenText
from lm_eval_duel.text.unigram import unigram_sentence, unigram_warning

COUNTED = "duel_tokens"  # a column of the tasks of this package, which count their documents' tokens


@dataclasses.dataclass
class FromText:
    """The documents of a task, counted and added up.

    `bos` says which special tokens of a row are scored; `length` is that of the longest row; `prefix` and `suffix` are
    its special tokens; `vocabulary` is the number of tokens that the network may predict; `at_most` is True for bounds.
    """

    task: str
    tokenizer: Any
    bos: str
    length: int
    prefix: Sequence[int] = ()
    suffix: Sequence[int] = ()
    vocabulary: int = 1
    at_most: bool = False
    documents: int = 0
    log_prob: float = 0.0
    tokens: int = 0
    words: int = 0
    bytes: int = 0
    counted_before: bool = False  # words and bytes are the task's, of texts that its documents do not hold
    ids: Counter[int] = dataclasses.field(default_factory=Counter)  # how often each occurs
    alone: int = 0  # windows that the reference did not compute
    problems: list[str] = dataclasses.field(default_factory=list)

    def add(self, name: str, doc: Mapping[str, Any], text: str, windows: Sequence[Window], nats: float) -> None:
        """Add a document, its windows in the run and its log-probability by the reference."""
        if isinstance(text, TokenText):  # its task has made the row
            expected = scored_of_row(text, self.bos)
        else:
            ids = self.tokenizer(str(text), add_special_tokens=False, verbose=False)["input_ids"]
            expected = self.scored_of_text(ids)
        self.tokens += len(expected)

        scored: list[int] = []
        for window in windows:
            scored += window.target
        if scored != expected:
            self.problems.append(
                f"{name}: of its text, {len(expected)} ids are to be scored, but not these {len(scored)}"
            )
        self.ids.update(expected)
        self.documents += 1
        self.log_prob += nats
        self._count_words_and_bytes(doc, text)

    def scored_of_text(self, ids: Sequence[int]) -> list[int]:
        """The ids that are scored of a text of these ids, which is cut into rows."""
        before = len(self.prefix)
        after = len(self.suffix)
        room = self.length - before - after
        not_scored = {"official": (0, 1), "scored": (0, after), "first": (1, 0)}
        begin, end = not_scored.get(self.bos, (before, after))  # at the beginning and the end of each row

        scored: list[int] = []
        for start in range(0, len(ids), room):
            row = [*self.prefix, *ids[start : start + room], *self.suffix]
            scored += row[begin : len(row) - end]
        return scored

    def _count_words_and_bytes(self, doc: Mapping[str, Any], text: str) -> None:
        if "page" not in doc and {COUNTED, "words", "bytes"} <= doc.keys():
            self.words += doc["words"]
            self.bytes += doc["bytes"]
            self.counted_before = True
            return
        columns = [doc[column] for column in ("page", "text") if isinstance(doc.get(column), str)]
        raw = columns[0] if columns else text
        # as lm-eval counts words: white space at either end makes an empty one
        self.words += len(re.split(r"\s+", raw)) if raw.strip() else 0
        self.bytes += len(raw.encode())

    # ---------------------------------------------------------------- the numbers

    @property
    def counts(self) -> dict[str, tuple[int, str]]:
        """The divisor of each metric that a task may print, and the divisor's name."""
        counts = {}
        if self.tokens:
            counts["token_perplexity"] = self.tokens, "tokens"
        if self.words:
            counts["word_perplexity"] = self.words, "words"
        if self.bytes:
            counts["byte_perplexity"] = self.bytes, "bytes"
            counts["bits_per_byte"] = self.bytes, "bytes"
        return counts

    def value(self, metric: str) -> float:
        """A metric from the counts and the sum."""
        count, _ = self.counts[metric]
        nats_per_unit = -self.log_prob / count
        if metric == "bits_per_byte":
            return nats_per_unit / math.log(2)
        return perplexity(nats_per_unit)

    def _error(self, metric: str, stderr: float) -> float:
        """The Monte Carlo error of a metric (delta method) of the one of the sum, in nats."""
        count, _ = self.counts[metric]
        if metric == "bits_per_byte":
            return stderr / count / math.log(2)
        return self.value(metric) * stderr / count

    def differing(self, printed: Mapping[str, float]) -> list[str]:
        """The differences from the numbers that the task prints, as text."""
        noise = nats_tolerance(sum(self.ids.values()))
        differences = []
        for metric, (count, units) in self.counts.items():
            if metric not in printed:
                continue
            value = printed[metric]
            nats_per_unit = value * math.log(2) if metric == "bits_per_byte" else math.log(value)
            if distance(-count * nats_per_unit, self.log_prob) > noise:
                printed_value, expected = told_apart(value, self.value(metric))
                differences.append(
                    f"{self.task} prints a {metric} of {printed_value}, not {expected} over {count:,} {units}"
                )
        return [*self.problems, *differences]

    def warnings(self, printed: Mapping[str, float], stderr: float | None = None) -> list[str]:
        """Signs of what is no fault of the package, but points to a wrong argument, such as the shift or the mask.

        `stderr`: the Monte Carlo error of the token perplexity, if it has one and it is known.
        """
        value = printed.get("token_perplexity", math.nan)
        if value == math.inf:
            return [
                f"the token perplexity of {self.task} is {REASONS[math.inf]}. Audit texts whose probability is "
                "positive, or leave out top_k and top_p"
            ]
        warning = unigram_warning(self.task, value, self.ids, self.vocabulary, self.at_most, stderr)
        return [warning] if warning else []

    def lines(self, printed: Mapping[str, float], value: Value, drawn: bool = False) -> list[str]:
        """Lines for the terminal: the counts, and the sum and metrics if the reference computed every window.

        `value`: the sum in the run, with its kind and its error; `drawn`: it has one, even if that is not known.
        """
        sizes = {"document": self.documents, "byte": self.bytes, "word": self.words, "token": self.tokens}
        counts = ", ".join(counted(number, noun) for noun, number in sizes.items())
        if self.counted_before:
            counts += " (bytes and words are the task's: its documents do not hold the texts before detokenizing)"
        if self.alone:
            return [
                f"From the text of {self.task}, by the tokenizer alone:",
                f"  {counts}",
                f"  log-probabilities and perplexities: not checked independently ({counted(self.alone, 'window')})",
            ]
        kind = value.label
        if value.error is not None:
            kind += "; ± is the Monte Carlo error"
        elif drawn:
            kind += "; its error is not known"
        lines = [
            f"From the text of {self.task}, by the tokenizer and the reference alone ({kind}):",
            f"  {counts}, {self.log_prob:.4f} nats",
        ]
        sign = "≤ " if self.at_most else ""
        for metric in self.counts:
            if metric in printed:
                error = "" if value.error is None else f" ± {self._error(metric, value.error):.4f}"
                computed = f"{sign}{self.value(metric):.4f}"
                lines.append(f"  {metric:<17} {computed:>14}   printed {f'{sign}{printed[metric]:.4f}':>14}{error}")
        lines.append(f"  {unigram_sentence(self.ids, self.vocabulary)}")
        return lines


def scored_of_row(text: TokenText, bos: str) -> list[int]:
    """The ids that are scored of a row that its task has cut."""
    before, after = text.special_tokens
    not_scored = {"given": (1, 0), "official": (0, 1), "scored": (0, 0), "first": (before + 1, after)}
    begin, end = not_scored.get(bos, (before, after))
    return list(text.token_ids[begin : len(text.token_ids) - end])
