"""`lm-eval-duel score`: the log-likelihood of the user's own texts, one line a document and the total."""

from __future__ import annotations

import argparse
import csv
import dataclasses
import functools
import json
import math
import operator
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lm_eval_duel.arguments import COUNT
from lm_eval_duel.command_line import Parser, file_to_write, process
from lm_eval_duel.errors import DuelError, too_few_documents, usage
from lm_eval_duel.estimators.registry import Kind, find, kind_of
from lm_eval_duel.harness.key_values import key_values, model_args
from lm_eval_duel.options import Options
from lm_eval_duel.rates import perplexity, ratio
from lm_eval_duel.results.paired import PairedDifference, Scored, difference, key_of
from lm_eval_duel.results.records import plain
from lm_eval_duel.results.table import Cell as TableCell
from lm_eval_duel.results.table import Column, Table
from lm_eval_duel.results.table import plain as text_of
from lm_eval_duel.rules.tables import short
from lm_eval_duel.strict_json import finite
from lm_eval_duel.tables import csv_cell
from lm_eval_duel.tasks import own_text

if TYPE_CHECKING:
    from lm_eval_duel.harness.lm import DuelMDM

FORMAT = "lm_eval_duel score"
TASK = "score"  # what traces and results call these documents
PRINTS = """\
Prints a line for each document (tokens, log-probability in nats, perplexity per token and per word, bits per byte) and
the total with its standard error over documents. The numbers are those of the harness: the same windows, special tokens
and model args. Words are those of the text without white space around it; the harness counts one more for a text that
ends in a newline. An estimate or a bound has its Monte Carlo error in a column of its own.
--compare scores the same texts under other models and ends with the paired differences: in nats per token if both
count the same tokens, else per byte, each with its 95 % interval over documents and a verdict.
A .jsonl, .json, .parquet or .csv file has a document in each row (--field names the column); a .txt or .md file is one
document, or with --lines one for each line. The file - is standard input.
"""


@dataclasses.dataclass(frozen=True)
class Size:
    """The units of a text."""

    tokens: int
    words: int
    bytes: int

    def __add__(self, other: Size) -> Size:
        return Size(self.tokens + other.tokens, self.words + other.words, self.bytes + other.bytes)


@dataclasses.dataclass(frozen=True)
class Row:
    """One line of the output. `log_prob` in nats; `stderr`: its Monte Carlo error, if the estimator has one."""

    name: str
    log_prob: float
    size: Size
    stderr: float | None = None
    unknown: int = 0  # [UNK] tokens
    key: str = ""  # equal for equal texts

    def figures(self) -> dict[str, Any]:
        """For JSON and CSV; None stands for a value that does not exist or is infinite."""
        tokens, words, size = dataclasses.astuple(self.size)
        return finite(
            {
                "document": self.name,
                "sha256": self.key,
                "tokens": tokens,
                "unk_tokens": self.unknown,
                "words": words,
                "bytes": size,
                "log_prob": self.log_prob,
                "log_prob_stderr": self.stderr,
                "token_perplexity": perplexity(-self.log_prob / tokens) if tokens else None,
                "word_perplexity": perplexity(-self.log_prob / words) if words else None,
                "bits_per_byte": -self.log_prob / math.log(2) / size if size else None,
            }
        )


def main(arguments: Sequence[str]) -> None:
    """Score texts: `lm-eval-duel score`."""
    options = parse(arguments)
    with usage():
        texts = own_text.texts(options.files, options.field, options.lines)[: options.limit]
        if len(texts) < options.ranks:
            raise too_few_documents("The input", len(texts), options.ranks)
    from lm_eval.utils import setup_logging

    from lm_eval_duel.harness.lm import DuelMDM

    setup_logging()
    every = []
    for model in (options.model, *options.others):
        lm = DuelMDM(**model)
        if (rows := score(lm, texts)) is not None:
            every.append((figures_of(lm, rows), rows))
            print(("\n" if len(every) > 1 else "") + table(every[-1][0]), flush=True)
    if not every:
        return
    (figures, rows), *others = every
    if others:
        differences = compared(every)
        figures["compared"] = [
            other | {"difference": plain(d)} for (other, _), d in zip(others, differences, strict=True)
        ]
        print(f"\n{text_of(differences_table(differences))}")
    if options.json:
        Path(options.json).write_text(json.dumps(figures, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    if options.csv:
        lines = [
            ({"model": f["pretrained"], **row.figures()} if others else row.figures()) for f, r in every for row in r
        ]
        with open(options.csv, "w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, list(lines[0]))
            writer.writeheader()
            writer.writerows({key: csv_cell(value) for key, value in line.items()} for line in lines)


def figures_of(lm: DuelMDM, rows: Sequence[Row]) -> dict[str, Any]:
    """The content of --json for one model. Null stands for a value that does not exist or is infinite."""
    info = lm.get_model_info()
    return {
        "format": FORMAT,
        "version": 1,
        "pretrained": info["duel"]["pretrained"],
        "fingerprint": info["fingerprint"],
        "spec": info["spec"],
        "estimator": lm.estimator.name,
        "kind": kind_of(lm.estimator.name, info["spec"]),
        "documents": [row.figures() for row in rows],
        "total": _total(lm, rows),
        "duel": finite(info["duel"]),
    }


# ---------------------------------------------------------------- several models


def compared(every: Sequence[tuple[dict[str, Any], Sequence[Row]]]) -> list[PairedDifference]:
    """The first model against each of the others, on the same texts."""
    (figures, rows), *others = every
    return [
        difference(_scored(rows), _scored(theirs), _names(figures, other), (figures["kind"], other["kind"]))
        for other, theirs in others
    ]


def _scored(rows: Sequence[Row]) -> list[Scored]:
    return [Scored(row.key, row.log_prob, *dataclasses.astuple(row.size), row.stderr) for row in rows]


def _names(first: dict[str, Any], second: dict[str, Any]) -> tuple[str, str]:
    """The shortest names that tell two models apart."""
    labels = []
    for figures in (first, second):
        spec, entry = figures["spec"], find(figures["estimator"])
        method = short(spec["rule"]) if entry.follows_rule and "rule" in spec else entry.display
        block = f"block {spec['block']}" if "block" in spec and not entry.causal else ""
        cache = f"cache={spec['cache']}" if "cache" in spec else ""
        labels.append([figures["pretrained"], method, block, cache, figures["fingerprint"]])
    differing = [pair for pair in zip(*labels, strict=True) if pair[0] != pair[1]]
    kept = differing[:-1] if len(differing) > 1 else differing or [(first["pretrained"], second["pretrained"])]
    here, there = (", ".join(filter(None, names)) for names in zip(*kept, strict=True))
    return here, there


def differences_table(differences: Sequence[PairedDifference]) -> Table:
    """The differences as a table; below 0 the first is better."""
    columns = [Column("first - second"), Column("unit"), Column("difference, nats per unit", "+.4f"), Column("verdict")]
    rows = [[" - ".join(d.names), d.unit, TableCell(d.difference, d.interval), d.verdict] for d in differences]
    return Table(columns, rows)


@usage()
def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The parsed command line, with `model` (the arguments of the model) and `ranks` (how many share the texts).

    Raises UsageError for wrong arguments.
    """
    parser = Parser(
        "score",
        "Score your own texts: log-probability, perplexity and bits per byte of each document.",
        PRINTS,
        "notes.txt 'articles/*.jsonl' --model_args pretrained=demo-mdm,rule=greedy,block=32",
    )
    add = parser.add_argument
    parser.add("model_args", "limit", "device", "batch_size")
    add("files", nargs="+", metavar="FILE", help=f"{', '.join(own_text.FORMATS)}, a folder, a pattern, or - for stdin")
    add("--field", default="text", help="the column of tables that holds the text (text)")
    add(
        "--compare",
        nargs="+",
        default=[],
        metavar="MODEL",
        help="other models: model args (without pretrained: those of --model_args but for these), or a name",
    )
    add("--lines", action="store_true", help="each line of a .txt or .md file is a document")
    add("--json", metavar="FILE", help="also write the figures, with the spec, to this file")
    add("--csv", metavar="FILE", help="also write the line of each document to this file")
    add("--trace", metavar="FILE", help="also write a trace, which `show` and `leaderboard` display")
    options = parser.parse_args(arguments)
    options.limit = COUNT("--limit", options.limit)
    if "-" in options.files and process()[1] > 1:
        raise DuelError("Standard input (-) cannot be read by several processes; name a file.")
    for flag in ("json", "csv"):
        if getattr(options, flag) is not None:
            file_to_write(f"--{flag}", getattr(options, flag))
    model = model_args(options.model_args)
    if options.trace is not None:
        model["trace"] = options.trace
    options.model = {**model, "device": options.device, "batch_size": options.batch_size}
    Options.parse(options.model)
    options.others = [_other(text, options.model) for text in options.compare]
    options.ranks = process()[1]
    return options


def _other(text: str, model: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a model of --compare."""
    given = key_values("--compare", text if "=" in text else f"pretrained={text}")
    kept = ("device", "batch_size") if "pretrained" in given else tuple(key for key in model if key != "trace")
    other = {**{key: model[key] for key in kept}, **given}
    Options.parse(other)
    return other


def score(lm: DuelMDM, texts: Sequence[own_text.OwnText]) -> list[Row] | None:
    """The score of each text under a model of the harness; None on ranks other than the first."""
    from lm_eval_duel.harness import versions
    from lm_eval_duel.harness.requests import FILE

    mine = lm.ranks.deal([1 + len(text) for _, text in texts])
    requests = [
        versions.request("loglikelihood_rolling", {"text": texts[n][1], FILE: texts[n][0]}, (texts[n][1],), TASK, n)
        for n in mine
    ]
    answers = lm.loglikelihood_rolling(requests)
    found = lm.run.stats.tasks[TASK].unknown if mine else {}  # by the names of documents
    rows = {
        n: Row(name, float(answer), size_of(text, answer.tokens), answer.stderr, found.get(name, 0), key=key_of(text))
        for n, (name, text), answer in zip(mine, (texts[n] for n in mine), answers, strict=True)
    }
    if (shares := lm.gather_object(rows)) is None:
        return None
    every = {n: row for share in shares for n, row in share.items()}
    return [every[n] for n in range(len(texts))]


def size_of(text: str, tokens: int) -> Size:
    """The units of a text. Words are those of the text without the white space around it."""
    from lm_eval_duel.tasks import sizes

    return Size(tokens, sizes(text.strip())[0], sizes(text)[1])


def _total(lm: DuelMDM, rows: Sequence[Row]) -> dict[str, Any]:
    """The figures of all documents together.

    `bits_per_byte_stderr`: over documents, as a ratio to bytes.
    """
    statistics = lm.run.total().tasks[TASK]
    stderr = next(iter(statistics.values.values())).stderr if statistics.values else None  # equal windows: one error
    size = functools.reduce(operator.add, (row.size for row in rows))
    total = Row("total", math.fsum(row.log_prob for row in rows), size, stderr, sum(row.unknown for row in rows))
    bits, sizes = [-row.log_prob / math.log(2) for row in rows], [row.size.bytes for row in rows]
    error = ratio(bits, sizes)[1] if size.bytes else None
    return {**total.figures(), "bits_per_byte_stderr": error}


def table(figures: dict[str, Any]) -> str:
    """The figures as text, with what the numbers are below."""
    total = figures["total"]
    rows = [*figures["documents"], total] if len(figures["documents"]) > 1 else figures["documents"]
    forms = {"tokens": "d", "log_prob": ".2f", "log_prob_stderr": ".2f"}
    forms |= {"token_perplexity": ".2f", "word_perplexity": ".2f", "bits_per_byte": ".4f"}
    columns = [Column("document"), *(Column(name, form) for name, form in forms.items())]
    shown = Table(columns, [[row["document"], *(row[name] for name in forms)] for row in rows])
    spec = figures["spec"]
    method = ", ".join(f"{key}={spec[key]}" for key in ("rule", "block", "cache") if key in spec)
    lines = [text_of(shown), "", f"estimator={figures['estimator']}, {method}".rstrip(", ")]
    if figures["kind"] != Kind.LIKELIHOOD.value:
        lines[-1] += f" ({figures['kind']})"
    drawn = find(figures["estimator"]).drawn
    if drawn and total["log_prob_stderr"] is None:
        lines.append(f"{drawn.error} error unknown: it takes at least 8 {drawn.units}")
    if total["bits_per_byte_stderr"] is not None:
        error = total["bits_per_byte_stderr"]
        lines.append(f"bits per byte {total['bits_per_byte']:.4f} +- {error:.4f} (standard error over documents)")
    if total["unk_tokens"]:
        from lm_eval_duel.harness.run_stats import unknown_share

        lines.append(unknown_share(total["unk_tokens"], total["tokens"]))
    return "\n".join([*lines, f"fingerprint {figures['fingerprint']}"])
