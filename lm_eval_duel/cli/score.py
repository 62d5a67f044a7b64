"""`lm-eval-duel score`: the log-likelihood of the user's own texts, one line a document and the total."""

from __future__ import annotations

import argparse
import dataclasses
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lm_eval_duel.arguments import MISSING, TEXT, TRUTH
from lm_eval_duel.cli.models import OtherModel, other_model
from lm_eval_duel.console.command_line import FILE, FLAGS, PATH, STDOUT, Flag, Parser, process, write_json
from lm_eval_duel.core.scores import perplexity, ratio
from lm_eval_duel.errors import DuelError, too_few_documents, usage
from lm_eval_duel.estimators.registry import Kind, find, is_bound, kind_of
from lm_eval_duel.options import Options, model_of
from lm_eval_duel.results import columns as table_columns
from lm_eval_duel.results import compare, match, read, report, traced
from lm_eval_duel.results import stats as paired
from lm_eval_duel.results.rows import Row
from lm_eval_duel.results.runs import Run
from lm_eval_duel.results.stats import key_of
from lm_eval_duel.results.table import LEVEL, Table, csv_text, number, spaced
from lm_eval_duel.tasks import files
from lm_eval_duel.text.annotated import count_units

if TYPE_CHECKING:
    from lm_eval_duel.harness.lm import DuelMDM

RATES = {"token_perplexity": ".2f", "word_perplexity": ".2f", "bits_per_byte": ".4f"}  # format of each column
FORMS = {"tokens": "d", "log_prob": ".2f", "log_prob_stderr": ".2f", **RATES}
TASK = "score"  # what traces and results call these documents
DIFFERENCE = (  # entries of a comparison in --json
    *("names", "unit", "documents", "perplexities", "stderrs", "kinds"),
    *("difference", "interval", "verdict"),
)
TO_A_VERDICT = (
    f"A verdict takes {paired.FEW} or more distinct documents: score several files, each line of a .txt file "
    "(--lines), or a .jsonl file with a document in each row."
)
PRINTS = f"""\
Prints a line for each document (tokens, log-probability in nats, perplexity per token and per word, bits per byte) and
the total with its standard error over documents. The numbers equal the harness's: the same windows, special tokens and
model args. An estimate or a bound has its Monte Carlo error in a separate column.
--compare scores the same texts under other models. What one does not set is as in --model_args; arguments that do not
apply to its estimator are ignored, and named. It prints a line for each model, then the paired differences to the
first: in nats per token if all count the same tokens, else per byte. Each has its {LEVEL} (bootstrap over
documents; it includes the Monte Carlo error of estimates and bounds) and, from {paired.FEW} documents on, a verdict.
--documents prints the lines of single documents, too.
A .jsonl, .json, .parquet or .csv file has a document in each row (--field names the column); a .txt or .md file is one
document, without the line end at its end, or with --lines one for each line. The file - is standard input, read as a
.txt file. Files may be packed (.gz); of a folder, what is not read is named.
"""


@dataclasses.dataclass(frozen=True)
class Line:
    """One line of the output: a document, or the total. `key`: equal for equal texts."""

    key: str
    log_prob: float  # nats
    tokens: int
    words: int
    bytes: int
    stderr: float | None  # Monte Carlo, nats
    name: str = ""
    unknown: int = 0  # [UNK] tokens

    def figures(self) -> dict[str, Any]:
        """The entries of JSON and CSV. None: there is no such value."""
        return {
            "document": self.name,
            "sha256": self.key,
            "tokens": self.tokens,
            "unk_tokens": self.unknown,
            "words": self.words,
            "bytes": self.bytes,
            "log_prob": self.log_prob,
            "log_prob_stderr": self.stderr,
            "token_perplexity": perplexity(-self.log_prob / self.tokens) if self.tokens else None,
            "word_perplexity": perplexity(-self.log_prob / self.words) if self.words else None,
            "bits_per_byte": -self.log_prob / math.log(2) / self.bytes if self.bytes else None,
        }


def main(arguments: Sequence[str]) -> None:
    """Score texts: `lm-eval-duel score`."""
    options = parse(arguments)
    with usage():
        texts = files.texts(options.file, options.field, options.lines)[: options.limit]
        if len(texts) < (ranks := process()[1]):
            raise too_few_documents("The input", len(texts), ranks)
    from lm_eval.utils import setup_logging

    from lm_eval_duel.harness.lm import DuelMDM
    from lm_eval_duel.text.loading import require_loadable

    setup_logging()
    for model in options.models:  # all of them before the first is scored
        if model.note and process()[0] == 0:
            print(model.note, file=sys.stderr)
        with model.naming_conflicts():
            require_loadable(Options.parse(model.args))
    every: list[dict[str, Any]] = []
    try:
        for model in options.models:
            with model.naming_conflicts():
                lm = DuelMDM(**model.args)
            if (lines := score(lm, texts)) is not None:
                every.append(figures_of(lm, lines))
                if options.json != STDOUT and (options.documents or len(options.models) == 1):
                    print(("\n" if len(every) > 1 else "") + table(every[-1]), flush=True)
    finally:  # models that are finished are kept if a later one fails
        if every:
            write(options, every)


def write(options: argparse.Namespace, every: Sequence[dict[str, Any]]) -> None:
    """Print the comparison and write the files that were asked for. The scores are kept if they have no comparison."""
    first, *others = every
    lines = [names_of(each) | line for each in every for line in each["documents"]]
    if options.csv:
        Path(options.csv).write_text(csv_text(lines), encoding="utf-8", newline="")
    text = ""
    try:
        if others:
            first["compared"] = others
            task, text = compared(every)
            for other, pair in zip(others, task.pairs, strict=True):
                other["difference"] = {key: getattr(pair, key) for key in DIFFERENCE}
    finally:
        if options.json:
            write_json(options.json, first)
        if options.json != STDOUT and options.compare and not (text or options.documents):
            print("\n\n".join(map(table, every)))
    if options.json != STDOUT and text:
        print(f"\n{text}" if options.documents else text, end="")


def names_of(figures: Mapping[str, Any]) -> dict[str, str]:
    """The columns of --csv that name the model of a line."""
    spec = {key: figures["spec"].get(key, "") for key in ("rule", "block", "cache")}
    names = {"model": figures["pretrained"], "estimator": figures["estimator"], **spec}
    return names | {"fingerprint": figures["fingerprint"], "kind": figures["kind"]}


def figures_of(lm: DuelMDM, rows: Sequence[Line]) -> dict[str, Any]:
    """The content of --json for one model."""
    info = lm.get_model_info()
    return {
        "format": read.SCORE,
        "version": read.SCORE_VERSION,
        "pretrained": info["duel"]["pretrained"],
        "fingerprint": info["fingerprint"],
        "spec": info["spec"],
        "estimator": lm.estimator.name,
        "kind": kind_of(lm.estimator.name, info["spec"]),
        "documents": [row.figures() for row in rows],
        "total": _total(lm, rows),
        "duel": info["duel"],
    }


# ---------------------------------------------------------------- several models


def compared(every: Sequence[dict[str, Any]]) -> tuple[compare.Comparison, str]:
    """The models on the same texts, as `report` compares them, and its text. The pairs: the first with each other.

    Raises DuelError if the texts are empty.
    """
    if not every[0]["total"]["bytes"]:
        raise DuelError("The texts are empty, so there is nothing to compare.")
    runs = [read.read_of_score(_place(n, figures), figures) for n, figures in enumerate(every, 1)]
    runs, notes = traced.Traces([]).attach(read.distinguish(runs))
    baselines = report.baseline(runs)[0]
    same = all(match.same_tokens(runs[0], run, TASK) for run in runs)
    metric = match.PER_TOKEN if same else "bits_per_byte"
    task = compare.task(TASK, runs, baselines, metric, as_published=True)

    def row_of(run: Run) -> Row:
        """The row of a model's value, or the one that stands for it: the same model twice has one row."""
        return next(row for row, same in task.same.items() if _is_value(run, row, *same))

    task = dataclasses.replace(task, pairs=[task.pair(row_of(runs[0]), row_of(run)) for run in runs[1:]])
    parts = [table_columns.values(task).text(), table_columns.differences(task).text()]
    listed = [*(f"differs: {line}" for line in task.differences), *task.notes, *map(str, notes)]
    if len({document["sha256"] for document in every[0]["documents"]}) < paired.FEW:
        listed.append(TO_A_VERDICT)
    return task, spaced([*parts, "\n".join(listed)])


def _is_value(run: Run, *rows: Row) -> bool:
    """True if one of the rows is a run's own value."""
    return any((row.run, row.estimator) == (run, run.estimator) for row in rows)


def _place(number: int, figures: Mapping[str, Any]) -> Path:
    """The name of a model in notes, by its place on the command line: tables are in another order."""
    return Path(f"model {number} ({Path(figures['pretrained']).name}, estimator={figures['estimator']})")


@usage()
def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The parsed command line, with its `models`; raises UsageError for wrong arguments."""
    options = Parser(
        "score",
        "Score your own texts: log-probability, perplexity and bits per byte of each document.",
        PRINTS,
        "notes.txt 'articles/*.jsonl' --model_args demo-mdm,rule=greedy,block=32",
        *("model_args", "device", "batch_size", "json"),
        limit=dataclasses.replace(FLAGS["limit"], help="only the first documents"),
        FILE=Flag(PATH, MISSING, f"{', '.join(files.FORMATS)}, a folder, a pattern, or - for stdin", many=True),
        field=Flag(TEXT, "text", "the column of tables that holds the text"),
        lines=Flag(TRUTH, False, "each line of a .txt or .md file is a document"),
        compare=Flag(
            TEXT,
            None,
            "other models: model args, or a name; what they do not set is as in --model_args",
            many=True,
            shows="MODEL",
        ),
        documents=Flag(TRUTH, False, "with --compare: print the lines of single documents, too"),
        csv=Flag(FILE, None, "also write the line of each document to this file", shows="FILE"),
        trace=Flag(PATH, None, "also write a trace, which `report --page` displays", shows="FILE"),
    ).parse_args(arguments)
    if options.csv and options.json and Path(options.csv).resolve() == Path(options.json).resolve():
        raise DuelError(f"--csv and --json name the same file, {options.csv}; name two.")
    if "-" in options.file and process()[1] > 1:
        raise DuelError("Standard input (-) cannot be read by several processes; name a file.")
    first = model_of(options) | ({} if options.trace is None else {"trace": options.trace})
    options.models = [OtherModel("", first), *(other_model(text, first) for text in options.compare)]
    return options


def score(lm: DuelMDM, texts: Sequence[files.OwnText]) -> list[Line] | None:
    """The score of each text under a model of the harness; None on ranks other than the first."""
    from lm_eval_duel.harness.requests import FILE, make_request

    mine = lm.ranks.deal([1 + len(text) for _, text in texts])
    requests = [
        make_request("loglikelihood_rolling", {"text": texts[n][1], FILE: texts[n][0]}, (texts[n][1],), TASK, n)
        for n in mine
    ]
    answers = lm.loglikelihood_rolling(requests)
    unknown = lm.evaluation.stats.tasks[TASK].unknown if mine else {}  # by the names of documents
    rows = {}
    for n, answer in zip(mine, answers, strict=True):
        name, text = texts[n]
        units = count_units(text)
        rows[n] = Line(key_of(text), float(answer), answer.tokens, *units, answer.stderr, name, unknown.get(name, 0))
    if (shares := lm.gather_object(rows)) is None:
        return None
    every = {n: row for share in shares for n, row in share.items()}
    return [every[n] for n in range(len(texts))]


def _total(lm: DuelMDM, rows: Sequence[Line]) -> dict[str, Any]:
    """The figures of all documents together.

    `bits_per_byte_documents_stderr`: over documents, as a ratio to bytes. Other errors are of random draws.
    """
    stderr = lm.evaluation.total().tasks[TASK].total.stderr  # equal windows: one error
    counts = [sum(getattr(row, unit) for row in rows) for unit in ("tokens", "words", "bytes", "unknown")]
    total = Line("", math.fsum(row.log_prob for row in rows), *counts[:3], stderr, "total", counts[3])
    bits = [-row.log_prob / math.log(2) for row in rows]
    error = ratio(bits, [row.bytes for row in rows])[1] if total.bytes else None
    return {**total.figures(), "bits_per_byte_documents_stderr": error}


def table(figures: dict[str, Any]) -> str:
    """The figures as text, with what the numbers are below."""
    documents = figures["documents"]
    rows = [*documents, figures["total"]] if len(documents) > 1 else documents
    columns: dict[str, Callable[[dict[str, Any]], str]] = {"document": lambda row: row["document"]}
    for name, form in FORMS.items():
        columns[name] = _column(name, form, is_bound(figures["kind"]))
    lines = [
        Table.from_records("", rows, columns).text(),
        "",
        *_about(figures),
        f"fingerprint {figures['fingerprint']}",
    ]
    return "\n".join(lines)


def _column(name: str, form: str, bound: bool) -> Callable[[dict[str, Any]], str]:
    """The cells of a column; of a bound, rates have the sign of an upper bound, and sums of log-probabilities none."""
    sign = "≤ " if bound and name in RATES else ""
    return lambda row: "" if row[name] is None else f"{sign}{number(row[name], form)}"


def _about(figures: Mapping[str, Any]) -> Iterator[str]:
    """Lines on what the numbers are."""
    total = figures["total"]
    spec = figures["spec"]
    method = ", ".join(f"{key}={spec[key]}" for key in ("rule", "block", "cache") if key in spec)
    kind = "" if figures["kind"] == Kind.LIKELIHOOD.value else f" ({figures['kind']})"
    yield f"{figures['pretrained']}, estimator={figures['estimator']}, {method}".rstrip(", ") + kind
    drawn = find(figures["estimator"]).drawn
    if drawn and total["log_prob_stderr"] is None:
        yield drawn.unknown(spec)
    if (error := total["bits_per_byte_documents_stderr"]) is not None:
        sign = "≤ " if is_bound(figures["kind"]) else ""
        yield f"bits per byte {sign}{total['bits_per_byte']:.4f}, standard error over documents {number(error, '.2g')}"
    if total["unk_tokens"]:
        from lm_eval_duel.text.text import unknown_share

        yield unknown_share(total["unk_tokens"], total["tokens"])
