"""`lm-eval-duel score`: the log-likelihood of the user's own texts, one line a document and the total."""

from __future__ import annotations

import argparse
import csv
import dataclasses
import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from lm_eval_duel.arguments import MISSING, TEXT, TRUTH
from lm_eval_duel.console.command_line import FILE, FLAGS, PATH, STDOUT, Flag, Parser, process, write_json
from lm_eval_duel.console.strict_json import finite
from lm_eval_duel.console.tables import csv_cell
from lm_eval_duel.core.rates import perplexity, ratio
from lm_eval_duel.errors import DuelError, too_few_documents, usage
from lm_eval_duel.estimators.registry import Kind, arguments, find, kind_of, of_spec
from lm_eval_duel.estimators.subsets.sums import BeamSums
from lm_eval_duel.options import Options, model_of
from lm_eval_duel.results.paired import PairedDifference, Scored, Texts, difference, key_of, unknown_error
from lm_eval_duel.results.records import plain
from lm_eval_duel.results.table import Cell as TableCell
from lm_eval_duel.results.table import Column, Table
from lm_eval_duel.results.table import plain as text_of
from lm_eval_duel.rules import PARAMETERS, RULES
from lm_eval_duel.rules.tables import without_defaults
from lm_eval_duel.tasks import own_text

if TYPE_CHECKING:
    from lm_eval_duel.harness.lm import DuelMDM
    from lm_eval_duel.harness.totals import Total

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
class Row(Scored):
    """One line of the output."""

    name: str = ""
    unknown: int = 0  # [UNK] tokens

    def figures(self) -> dict[str, Any]:
        """For JSON and CSV; None stands for a value that does not exist or is infinite."""
        tokens, words, size = self.tokens, self.words, self.bytes
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
        texts = own_text.texts(options.file, options.field, options.lines)[: options.limit]
        if len(texts) < (ranks := process()[1]):
            raise too_few_documents("The input", len(texts), ranks)
    from lm_eval.utils import setup_logging

    from lm_eval_duel.harness.lm import DuelMDM

    setup_logging()
    every: list[tuple[dict[str, Any], list[Row]]] = []
    try:
        for model in (options.model, *options.others):
            lm = DuelMDM(**model)
            if (rows := score(lm, texts)) is not None:
                every.append((figures_of(lm, rows), rows))
                if options.json != STDOUT:
                    print(("\n" if len(every) > 1 else "") + table(every[-1][0]), flush=True)
    finally:  # models that are finished are kept if a later one fails
        if every:
            write(options, every)


def write(options: argparse.Namespace, every: Sequence[tuple[dict[str, Any], Sequence[Row]]]) -> None:
    """Print the differences and write the files that were asked for."""
    (figures, _), *others = every
    if others:
        differences = compared(every)
        figures["compared"] = [
            other | {"difference": plain(d)} for (other, _), d in zip(others, differences, strict=True)
        ]
        if options.json != STDOUT:
            print(f"\n{text_of(differences_table(differences))}")
    if options.json:
        write_json(options.json, figures)
    if options.csv:
        names = [{"model": each["pretrained"]} if others else {} for each, _ in every]
        lines = [name | line for name, (each, _) in zip(names, every, strict=True) for line in each["documents"]]
        with open(options.csv, "w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, list(lines[0]))
            writer.writeheader()
            writer.writerows({key: csv_cell(value) for key, value in line.items()} for line in lines)


def figures_of(lm: DuelMDM, rows: Sequence[Row]) -> dict[str, Any]:
    """The content of --json for one model. Null stands for a value that does not exist or is infinite."""
    info, own = lm.get_model_info(), next(iter(_values(lm)), None)
    return {
        "format": FORMAT,
        "version": 1,
        "pretrained": info["duel"]["pretrained"],
        "fingerprint": info["fingerprint"],
        "spec": info["spec"],
        "estimator": lm.estimator.name,
        "kind": kind_of(lm.estimator.name, info["spec"], own.beam if own else None),
        "documents": [row.figures() for row in rows],
        "total": _total(lm, rows),
        **({"beam": own.beam.describe()} if own and own.beam else {}),
        "duel": finite(info["duel"]),
    }


# ---------------------------------------------------------------- several models


def compared(every: Sequence[tuple[dict[str, Any], Sequence[Row]]]) -> list[PairedDifference]:
    """The first model against each of the others, on the same texts."""
    sides = []
    for figures, rows in every:
        stderr = figures["total"]["log_prob_stderr"]
        sides.append(Texts(rows, figures["kind"], stderr, unknown_error(figures["estimator"], figures["spec"], stderr)))
    (first, _), *others = every
    return [
        difference(sides[0], side, _names(first, other)) for side, (other, _) in zip(sides[1:], others, strict=True)
    ]


def _names(first: dict[str, Any], second: dict[str, Any]) -> tuple[str, str]:
    """The shortest names that tell two models apart."""
    labels = []
    for figures in (first, second):
        spec, entry = figures["spec"], find(figures["estimator"])
        method = without_defaults(spec["rule"]) if entry.follows_rule and "rule" in spec else entry.display
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
    """The parsed command line, with `model` and `others` (model args); raises UsageError for wrong arguments."""
    options = Parser(
        "score",
        "Score your own texts: log-probability, perplexity and bits per byte of each document.",
        PRINTS,
        "notes.txt 'articles/*.jsonl' --model_args demo-mdm,rule=greedy,block=32",
        *("model_args", "device", "batch_size", "limit", "json"),
        FILE=Flag(PATH, MISSING, f"{', '.join(own_text.FORMATS)}, a folder, a pattern, or - for stdin", many=True),
        field=Flag(TEXT, "text", "the column of tables that holds the text"),
        lines=Flag(TRUTH, False, "each line of a .txt or .md file is a document"),
        compare=Flag(
            TEXT,
            None,
            "other models: model args (without pretrained: those of --model_args but for these), or a name",
            many=True,
            shows="MODEL",
        ),
        csv=Flag(FILE, None, "also write the line of each document to this file", shows="FILE"),
        trace=Flag(PATH, None, "also write a trace, which `show` and `leaderboard` display", shows="FILE"),
    ).parse_args(arguments)
    if "-" in options.file and process()[1] > 1:
        raise DuelError("Standard input (-) cannot be read by several processes; name a file.")
    options.model = model_of(options) | ({} if options.trace is None else {"trace": options.trace})
    options.others = [_other(text, options.model) for text in options.compare]
    return options


def _other(text: str, model: dict[str, Any]) -> dict[str, Any]:
    """The model args of a model of --compare: those given, and the first model's that still apply.

    Another rule or estimator does not inherit the arguments of the one that it replaces.
    """
    if text.endswith(","):
        raise DuelError(
            f"--compare {text}: nothing follows the last comma; separate model args by commas without spaces."
        )
    given = FLAGS["model_args"].read("--compare", text)
    if text.split(",")[0] in RULES:
        raise DuelError(f"--compare {text}: this is a rule, not a checkpoint. Did you mean rule={text}?")
    dropped = {"trace", *(PARAMETERS if "rule" in given else ()), *(arguments() if "estimator" in given else ())}
    dropped -= {*find(str({**model, **given}.get("estimator", "duel"))).arguments}
    kept = ("device", "batch_size") if "pretrained" in given else [key for key in model if key not in dropped]
    other = {**{key: model[key] for key in kept}, **given}
    Options.parse(other)
    return other


def score(lm: DuelMDM, texts: Sequence[own_text.OwnText]) -> list[Row] | None:
    """The score of each text under a model of the harness; None on ranks other than the first."""
    from lm_eval_duel.harness.requests import FILE, make_request
    from lm_eval_duel.tasks import sizes

    mine = lm.ranks.deal([1 + len(text) for _, text in texts])
    requests = [
        make_request("loglikelihood_rolling", {"text": texts[n][1], FILE: texts[n][0]}, (texts[n][1],), TASK, n)
        for n in mine
    ]
    answers = lm.loglikelihood_rolling(requests)
    unknown = lm.run.stats.tasks[TASK].unknown if mine else {}  # by the names of documents
    rows = {}
    for n, answer in zip(mine, answers, strict=True):
        name, text = texts[n]
        units = answer.tokens, sizes(text.strip())[0], sizes(text)[1]  # words without the white space around the text
        rows[n] = Row(key_of(text), float(answer), *units, answer.stderr, name, unknown.get(name, 0))
    if (shares := lm.gather_object(rows)) is None:
        return None
    every = {n: row for share in shares for n, row in share.items()}
    return [every[n] for n in range(len(texts))]


def _values(lm: DuelMDM) -> Iterable[Total]:
    """The sums over all texts, the estimator's own value first."""
    return lm.run.total().tasks[TASK].values.values()


def _total(lm: DuelMDM, rows: Sequence[Row]) -> dict[str, Any]:
    """The figures of all documents together.

    `bits_per_byte_stderr`: over documents, as a ratio to bytes.
    """
    stderr = next((value.stderr for value in _values(lm)), None)  # equal windows: one error
    counts = [sum(getattr(row, unit) for row in rows) for unit in ("tokens", "words", "bytes", "unknown")]
    total = Row("", math.fsum(row.log_prob for row in rows), *counts[:3], stderr, "total", counts[3])
    bits = [-row.log_prob / math.log(2) for row in rows]
    error = ratio(bits, [row.bytes for row in rows])[1] if total.bytes else None
    return {**total.figures(), "bits_per_byte_stderr": error}


def _cell(name: str, value: Any, is_bound: bool) -> TableCell:
    """A figure; perplexities and bits of a bound are upper bounds."""
    return TableCell(value, bound=is_bound and name.endswith(("_perplexity", "_byte")))


def table(figures: dict[str, Any]) -> str:
    """The figures as text, with what the numbers are below."""
    total = figures["total"]
    rows = [*figures["documents"], total] if len(figures["documents"]) > 1 else figures["documents"]
    forms = {"tokens": "d", "log_prob": ".2f", "log_prob_stderr": ".2f"}
    forms |= {"token_perplexity": ".2f", "word_perplexity": ".2f", "bits_per_byte": ".4f"}
    columns = [Column("document"), *(Column(name, form) for name, form in forms.items())]
    is_bound = figures["kind"] == Kind.UPPER_BOUND.value
    shown = Table(columns, [[row["document"], *(_cell(name, row[name], is_bound) for name in forms)] for row in rows])
    spec = figures["spec"]
    method = ", ".join(f"{key}={spec[key]}" for key in ("rule", "block", "cache") if key in spec)
    lines = [text_of(shown), "", f"{figures['pretrained']}, estimator={figures['estimator']}, {method}".rstrip(", ")]
    if figures["kind"] != Kind.LIKELIHOOD.value:
        lines[-1] += f" ({figures['kind']})"
    drawn = of_spec(figures["estimator"], spec).drawn
    if drawn and total["log_prob_stderr"] is None:
        lines.append(f"{drawn.error} error unknown: it takes at least 8 {drawn.units}")
    if "beam" in figures:
        lines.append(BeamSums.read(figures["beam"]).words)
    if total["bits_per_byte_stderr"] is not None:
        error = total["bits_per_byte_stderr"]
        below = "<= " if is_bound else ""
        lines.append(
            f"bits per byte {below}{total['bits_per_byte']:.4f} +- {error:.4f} (standard error over documents)"
        )
    if total["unk_tokens"]:
        from lm_eval_duel.text.text import unknown_share

        lines.append(unknown_share(total["unk_tokens"], total["tokens"]))
    return "\n".join([*lines, f"fingerprint {figures['fingerprint']}"])
