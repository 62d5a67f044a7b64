"""The scores of documents under one model: each line, the total, and these as text, JSON and CSV."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from lm_eval_duel.console.command_line import infinities, with_nulls
from lm_eval_duel.core.scores import Value, perplexity, ratio
from lm_eval_duel.errors import counted
from lm_eval_duel.estimators import registry
from lm_eval_duel.results import read, stats
from lm_eval_duel.results.doubts import doubts, remarks
from lm_eval_duel.results.notes import LOWEST_FIRST
from lm_eval_duel.results.runs import size_in_words
from lm_eval_duel.results.spec_entries import lost_distinctions
from lm_eval_duel.results.table import Columns, Table, form_of, number
from lm_eval_duel.tasks import files
from lm_eval_duel.text.annotated import count_units

if TYPE_CHECKING:
    from lm_eval_duel.harness.lm import DuelMDM

METHOD = ("rule", "block", "cache")  # entries of a spec that name a method, after its estimator
RATES = ("token_perplexity", "word_perplexity", "bits_per_byte")  # columns of the output
TASK = "score"  # what traces and results call these documents


@dataclasses.dataclass(frozen=True)
class Line:
    """One line of the output: a document, or the total. `key`: equal for equal texts."""

    name: str
    key: str
    value: Value
    tokens: int
    words: int
    bytes: int
    unknown: int  # [UNK] tokens

    def figures(self) -> dict[str, Any]:
        """The entries of JSON and CSV. None: there is no such value."""
        nats = self.value.nats
        return {
            "document": self.name,
            "sha256": self.key,
            "tokens": self.tokens,
            "unk_tokens": self.unknown,
            "words": self.words,
            "bytes": self.bytes,
            "log_prob": nats,
            "log_prob_stderr": self.value.error,
            "token_perplexity": perplexity(-nats / self.tokens) if self.tokens else None,
            "word_perplexity": perplexity(-nats / self.words) if self.words else None,
            "bits_per_byte": -nats / math.log(2) / self.bytes if self.bytes else None,
        }


@dataclasses.dataclass(frozen=True)
class ScoredModel:
    """The scores of all documents under one model."""

    info: dict[str, Any]  # of its results file: `fingerprint`, `spec`, `duel`
    estimator: str
    lines: list[Line]
    total: Line
    available: int  # documents without --limit

    @property
    def kind(self) -> str:
        """The kind of its values: exact, estimate, bound, no bound or oracle."""
        return self.total.value.word

    @property
    def note(self) -> str:
        """The reasons that limit its values, or put them in doubt."""
        return "; ".join(filter(None, [self.total.value.note, *doubts(self.info["duel"])]))

    @property
    def _is_drawn(self) -> bool:
        """True if its values depend on random numbers, and so have an error."""
        return registry.find(self.estimator).is_drawn

    @property
    def pretrained(self) -> str:
        return self.info["duel"]["pretrained"]

    @property
    def documents_stderr(self) -> float | None:
        """The standard error of the total's bits per byte over documents, as a ratio to bytes.

        Copies of a text are one document, and say nothing about other texts. None: there is one text only.
        """
        if not self.total.bytes:
            return None
        bits: dict[str, float] = {}  # of each text, with its copies
        sizes: dict[str, int] = {}
        for line in self.lines:
            bits[line.key] = bits.get(line.key, 0.0) - line.value.nats / math.log(2)
            sizes[line.key] = sizes.get(line.key, 0) + line.bytes
        _, error = ratio(list(bits.values()), list(sizes.values()))
        return error

    def figures(self) -> dict[str, Any]:
        """The content of --json."""
        return {
            "format": read.SCORE,
            "version": read.SCORE_VERSION,
            "pretrained": self.pretrained,
            "fingerprint": self.info["fingerprint"],
            "spec": self.info["spec"],
            "estimator": self.estimator,
            "kind": self.kind,
            "note": self.note,
            "available_documents": self.available,
            "documents": [line.figures() for line in self.lines],
            "total": {**self.total.figures(), "bits_per_byte_documents_stderr": self.documents_stderr},
            "duel": self.info["duel"],
        }

    def csv_lines(self) -> Iterator[dict[str, Any]]:
        """The lines of --csv: each begins with what names the model."""
        spec = self.info["spec"]
        names = {"model": self.pretrained, "estimator": self.estimator}
        for key in METHOD:
            names[key] = spec.get(key, "")
        names["fingerprint"] = self.info["fingerprint"]
        names["kind"] = self.kind
        names["note"] = self.note
        for line in self.lines:
            yield names | line.figures()

    # ------------------------------------------------------------ as text

    def table(self) -> str:
        """The scores as text, with what the numbers are below."""
        lines = [*self.lines, self.total] if len(self.lines) > 1 else self.lines
        shown: Columns = {
            "document": lambda line: line.name,
            "tokens": lambda line: number(line.tokens, "d"),
            "log_prob": lambda line: shown_log_prob(line.value, self._is_drawn),
        }
        for metric in RATES:
            shown[metric] = _rate(metric, self._is_drawn)
        table = Table.from_records("", lines, shown).text()
        infinite = about_infinities([line.figures() for line in lines])
        return "\n".join([table, "", *infinite, *self._about(), f"fingerprint {self.info['fingerprint']}"])

    @property
    def method(self) -> str:
        """The model and how it was scored."""
        spec = self.info["spec"]
        method = [f"estimator={self.estimator}"]
        for key in (*METHOD, *registry.find(self.estimator).label_args):
            if key in spec:
                method.append(f"{key}={spec[key]}")
        return f"{self.pretrained}, {', '.join(method)}"

    def _about(self) -> Iterator[str]:
        """Lines on what the numbers are."""
        spec = self.info["spec"]
        value = self.total.value
        kind = "" if value.is_exact and not value.note else f" ({value.label})"
        yield f"{self.method}{kind}"
        unknown_error = registry.find(self.estimator).unknown_error(value.error, spec)
        if unknown_error:
            yield unknown_error
        if self.documents_stderr is not None:
            bits = _rate("bits_per_byte", self._is_drawn)(self.total)
            yield f"bits per byte {bits}, standard error over documents {number(self.documents_stderr, '.2g')}"
        size = size_in_words(len(self.lines), self.available)
        windows = self.info["duel"]["tasks"][TASK]["windows"]
        if windows > len(self.lines):
            hint = "; with --lines, each line of a .txt or .md file is a document" if len(self.lines) == 1 else ""
            yield f"{size} in {counted(windows, 'window')}{hint}"
        elif len(self.lines) < self.available:
            yield size
        if self.info["duel"].get("all_mask_starts"):
            yield LOWEST_FIRST
        about_copies = stats.about_copies([line.key for line in self.lines])
        if about_copies:
            yield about_copies
        yield from remarks(self.info["duel"])
        if self.total.unknown:
            from lm_eval_duel.text.text import unknown_share

            yield unknown_share(self.total.unknown, self.total.tokens)
        dropped = lost_distinctions(spec, 0.0).values()
        if dropped:
            what = " and ".join(dropped)
            yield f"the tokenizer {what}: bits per byte and word perplexity are not a likelihood of the text"


def about_infinities(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """A line on each infinity that a table of these rows shows, once for all of them."""
    nulls = with_nulls({"rows": rows}).get("nulls", {})
    return [f"{value} is {reason}" for value, reason in infinities(nulls).items()]


def shown_log_prob(value: Value, drawn: bool, form: str = ".2f") -> str:
    """A log-probability: a bound of the perplexity from above is one of the log-probability from below.

    `drawn`: it has an error, which is `± ?` if it is not known.
    """
    sign = "≥ " if value.is_bound else ""
    return f"{sign}{number(value.nats, form, value.error, unsure=drawn)}"


def _rate(metric: str, drawn: bool) -> Callable[[Line], str]:
    """The cells of a perplexity, or of bits per byte."""

    def cell(line: Line) -> str:
        rate = line.figures()[metric]
        if rate is None:
            return ""
        error = stats.stderr(metric, rate, line.value.nats, line.value.error)
        return number(rate, form_of(metric), error, line.value.is_bound, unsure=drawn)

    return cell


def score(lm: DuelMDM, texts: Sequence[files.OwnText], available: int) -> ScoredModel | None:
    """The scores of texts under a model of the harness; None on ranks other than the first.

    `available`: the number of texts without --limit.
    """
    from lm_eval_duel.harness.requests import make_request
    from lm_eval_duel.text.annotated import FILE

    lengths = [1 + len(text) for _, text in texts]
    mine = lm.ranks.deal(lengths)  # the indices of this rank's texts
    requests = []
    for n in mine:
        name, text = texts[n]
        requests.append(make_request("loglikelihood_rolling", {"text": text, FILE: name}, (text,), TASK, n))
    answers = lm.loglikelihood_rolling(requests)

    unknown = lm.evaluation.stats.tasks[TASK].unknown if mine else {}  # by the names of documents
    lines_of_rank = {}
    for n, answer in zip(mine, answers, strict=True):
        name, text = texts[n]
        words, size = count_units(text)
        lines_of_rank[n] = Line(
            name=name,
            key=stats.key_of(text),
            value=lm.estimator.value_template.with_nats(float(answer), answer.stderr),
            tokens=answer.tokens,
            words=words,
            bytes=size,
            unknown=unknown.get(name, 0),
        )

    lines_of_ranks = lm.gather_object(lines_of_rank)
    if lines_of_ranks is None:
        return None
    by_index: dict[int, Line] = {}
    for lines in lines_of_ranks:
        by_index |= lines
    in_order = [by_index[n] for n in range(len(texts))]
    error = lm.evaluation.total().tasks[TASK].total.stderr  # not from the lines: equal windows share their draws
    return ScoredModel(lm.get_model_info(), lm.estimator.name, in_order, _total(in_order, error), available)


def _total(lines: Sequence[Line], error: float | None) -> Line:
    """The line of all documents together. `error`: of the sum."""
    nats = math.fsum(line.value.nats for line in lines)
    return Line(
        name="total",
        key="",
        value=dataclasses.replace(lines[0].value, nats=nats, error=error),
        tokens=sum(line.tokens for line in lines),
        words=sum(line.words for line in lines),
        bytes=sum(line.bytes for line in lines),
        unknown=sum(line.unknown for line in lines),
    )
