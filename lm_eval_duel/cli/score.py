"""`lm-eval-duel score`: the log-likelihood of the user's own texts, one line a document and the total."""

from __future__ import annotations

import argparse
import dataclasses
import logging
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lm_eval_duel.arguments import MISSING, TEXT, TRUTH
from lm_eval_duel.cli.models import OtherModel, other_model
from lm_eval_duel.console.command_line import FILE, FLAGS, PATH, STDOUT, Flag, Parser, process, write_json
from lm_eval_duel.core.scores import Value, perplexity, ratio
from lm_eval_duel.errors import DuelError, counted, too_few_documents, usage
from lm_eval_duel.estimators import registry
from lm_eval_duel.options import Options, model_of
from lm_eval_duel.results import columns, compare, match, read, report, stats, traced
from lm_eval_duel.results.gaps import Pair
from lm_eval_duel.results.rows import Row
from lm_eval_duel.results.runs import Run
from lm_eval_duel.results.table import LEVEL, Columns, Table, csv_text, form_of, number, spaced
from lm_eval_duel.tasks import files
from lm_eval_duel.text.annotated import count_units

if TYPE_CHECKING:
    from lm_eval_duel.harness.lm import DuelMDM

log = logging.getLogger("lm_eval.duel_mdm")

METHOD = ("rule", "block", "cache")  # entries of a spec that name a method, after its estimator
RATES = ("token_perplexity", "word_perplexity", "bits_per_byte")  # columns of the output
TASK = "score"  # what traces and results call these documents
DIFFERENCE = (  # entries of a comparison in --json
    *("names", "unit", "documents", "perplexities", "stderrs", "kinds"),
    *("difference", "interval", "verdict"),
)
CUT_APART = "texts longer than a window are cut at different places"
SAME_MODEL = "both models are the same"
TO_A_VERDICT = (
    f"A verdict takes {stats.FEW} or more distinct documents: score several files, each line of a .txt file "
    "(--lines), or a .jsonl file with a document in each row."
)
PRINTS = f"""\
Prints a line for each document (tokens, log-probability in nats, perplexity per token and per word, bits per byte) and
the total with its standard error over documents. The numbers equal the harness's: the same windows, special tokens and
model args. A bound is marked by ≥ and ≤; ± is the Monte Carlo error of an estimate or a bound.
--compare scores the same texts under other models. Each inherits the arguments of --model_args that it does not set;
those that do not apply to its estimator are ignored, with a message. It prints a line for each model, then the paired
differences to the first: in nats per token if all count the same tokens, else per byte. Each has its {LEVEL}
(bootstrap over documents; it includes the Monte Carlo error of estimates and bounds) and, from {stats.FEW} documents
on, a verdict, unless the models cut long texts at different places.
--documents prints the lines of single documents, too.
A .jsonl, .json, .parquet or .csv file has a document in each row (--field names the column); a .txt or .md file is one
document, without the line end at its end, or with --lines one for each line. The file - is standard input, read as a
.txt file. Files may be packed (.gz); of a folder, what is not read is named.
"""


def main(arguments: Sequence[str]) -> None:
    """Score texts: `lm-eval-duel score`."""
    options = parse(arguments)
    rank, ranks = process()
    with usage():
        texts = files.texts(options.file, options.field, options.lines)[: options.limit]
        if len(texts) < ranks:
            raise too_few_documents("The input", len(texts), ranks)
    from lm_eval.utils import setup_logging

    from lm_eval_duel.harness.lm import DuelMDM
    from lm_eval_duel.text.loading import require_loadable

    setup_logging()
    for model in options.models[1:]:  # before the first, which is checked as it is loaded
        if model.note and rank == 0:
            log.info("%s", model.note)
        with model.naming_conflicts():
            require_loadable(Options.parse(model.args))
    note = trace_note(options.models)
    if note and rank == 0:
        log.info("%s", note)
    show_documents = options.json != STDOUT and (options.documents or len(options.models) == 1)
    scored: list[ScoredModel] = []
    try:
        for model in options.models:
            with model.naming_conflicts():
                lm = DuelMDM(**model.args)
            scored_model = score(lm, texts)
            if scored_model is None:
                continue  # another process prints and writes
            scored.append(scored_model)
            if show_documents:
                blank_line = "\n" if len(scored) > 1 else ""
                print(f"{blank_line}{scored_model.table()}", flush=True)
    finally:  # models that are finished are kept if a later one fails
        if scored:
            write(options, scored)


# ---------------------------------------------------------------- scores


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

    @property
    def kind(self) -> str:
        """The kind of its values, with what limits them."""
        return self.total.value.label

    @property
    def pretrained(self) -> str:
        return self.info["duel"]["pretrained"]

    @property
    def documents_stderr(self) -> float | None:
        """The standard error of the total's bits per byte over documents, as a ratio to bytes."""
        if not self.total.bytes:
            return None
        bits = []
        sizes = []
        for line in self.lines:
            bits.append(-line.value.nats / math.log(2))
            sizes.append(line.bytes)
        _, error = ratio(bits, sizes)
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
        for line in self.lines:
            yield names | line.figures()

    # ------------------------------------------------------------ as text

    def table(self) -> str:
        """The scores as text, with what the numbers are below."""
        lines = [*self.lines, self.total] if len(self.lines) > 1 else self.lines
        drawn = registry.find(self.estimator).drawn is not None
        shown: Columns = {
            "document": lambda line: line.name,
            "tokens": lambda line: number(line.tokens, "d"),
            "log_prob": lambda line: _log_prob(line.value, drawn),
        }
        for metric in RATES:
            shown[metric] = _rate(metric, drawn)
        table = Table.from_records("", lines, shown).text()
        return "\n".join([table, "", *self._about(), f"fingerprint {self.info['fingerprint']}"])

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
        kind = "" if value.is_exact and not value.note else f" ({self.kind})"
        yield f"{self.method}{kind}"
        drawn = registry.find(self.estimator).drawn
        if drawn is not None and value.error is None:
            yield drawn.unknown(spec)
        if self.documents_stderr is not None:
            bits = number(self.total.figures()["bits_per_byte"], form_of("bits_per_byte"), bound=value.is_bound)
            yield f"bits per byte {bits}, standard error over documents {number(self.documents_stderr, '.2g')}"
        if self.total.unknown:
            from lm_eval_duel.text.text import unknown_share

            yield unknown_share(self.total.unknown, self.total.tokens)


def _log_prob(value: Value, drawn: bool) -> str:
    """A log-probability: a bound of the perplexity from above is one of the log-probability from below."""
    sign = "≥ " if value.is_bound else ""
    return f"{sign}{number(value.nats, error=value.error, unsure=drawn)}"


def _rate(metric: str, drawn: bool) -> Callable[[Line], str]:
    """The cells of a perplexity, or of bits per byte."""

    def cell(line: Line) -> str:
        rate = line.figures()[metric]
        if rate is None:
            return ""
        error = stats.stderr(metric, rate, line.value.nats, line.value.error)
        return number(rate, form_of(metric), error, line.value.is_bound, unsure=drawn)

    return cell


def score(lm: DuelMDM, texts: Sequence[files.OwnText]) -> ScoredModel | None:
    """The scores of texts under a model of the harness; None on ranks other than the first."""
    from lm_eval_duel.harness.requests import FILE, make_request

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
            value=lm.estimator.worth.with_nats(float(answer), answer.stderr),
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
    return ScoredModel(lm.get_model_info(), lm.estimator.name, in_order, _total(in_order, error))


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


# ---------------------------------------------------------------- several models


def write(options: argparse.Namespace, scored: Sequence[ScoredModel]) -> None:
    """Print the comparison and write the files that were asked for. The scores are kept if they have no comparison."""
    if options.csv:
        lines: list[dict[str, Any]] = []
        for model in scored:
            lines += model.csv_lines()
        Path(options.csv).write_text(csv_text(lines), encoding="utf-8", newline="")
    content, *others = [model.figures() for model in scored]
    text = ""
    try:
        if others:
            content["compared"] = others
            task, text = compared(scored)
            for other, pair in zip(others, task.pairs, strict=True):
                other["difference"] = {key: getattr(pair, key) for key in DIFFERENCE}
    finally:  # also if the comparison fails: the scores are finished work
        if options.json:
            write_json(options.json, content)
        # There is no comparison: print the tables in its place, unless they are printed already.
        if options.json != STDOUT and options.compare and not (text or options.documents):
            print("\n\n".join(model.table() for model in scored))
    if options.json != STDOUT and text:
        print(f"\n{text}" if options.documents else text, end="")


def compared(scored: Sequence[ScoredModel]) -> tuple[compare.Comparison, str]:
    """The models on the same texts, as `report` compares them, and its text. The pairs: the first with each other.

    Raises DuelError if the texts are empty.
    """
    if not scored[0].total.bytes:
        raise DuelError("The texts are empty, so there is nothing to compare.")
    runs = []
    for n, model in enumerate(scored, 1):
        run = read.read_of_score(_place(n, model), model.figures())
        flag = "--trace FILE" if n == 1 else "trace=FILE in its --compare"
        runs.append(dataclasses.replace(run, trace_advice=f"run with {flag}"))
    runs, notes = traced.Traces([]).attach(read.distinguish(runs))
    baselines, _ = report.baseline(runs)
    same_tokens = all(match.same_tokens(runs[0], run, TASK) for run in runs)
    metric = match.PER_TOKEN if same_tokens else "bits_per_byte"
    task = compare.task(TASK, runs, baselines, metric, as_published=True)

    first, *others = runs
    task = dataclasses.replace(task, pairs=[_pair(task, first, other) for other in others])

    remarks = [*_sizes(scored), *_differences(task, runs)]
    any_cut = any(match.is_cut(run, TASK) for run in runs)
    for note in task.notes:
        if any_cut or note != task.windows:
            remarks.append(note)
    remarks += map(str, notes)
    distinct_texts = {line.key for line in scored[0].lines}
    if len(distinct_texts) < stats.FEW:
        remarks.append(TO_A_VERDICT)
    values = columns.values(task).text()
    differences = columns.differences(task).text()
    return task, spaced([values, differences, "\n".join(remarks)])


def trace_note(models: Sequence[OtherModel]) -> str:
    """A sentence on the models that have no trace, if others have one; else empty."""
    traced_models = []
    others = []
    for model in models:
        name = f"--compare {model.text}" if model.text else "the model of --model_args"
        if model.args.get("trace"):
            traced_models.append(name)
        else:
            others.append(name)
    if not (traced_models and others):
        return ""
    return (
        f"Traced: {', '.join(traced_models)}. Not traced: {', '.join(others)} (a trace is of one model: --trace FILE, "
        "or trace=FILE among the args of a model of --compare)"
    )


def _pair(task: compare.Comparison, first: Run, other: Run) -> Pair:
    """The difference of two models. It has no verdict if the two differ in what `report` refuses to compare."""
    pair = task.pair(_row_of(first, task), _row_of(other, task))
    if first.config.fingerprint == other.config.fingerprint:
        return dataclasses.replace(pair, better="", verdict=SAME_MODEL)
    for difference in match.differences(first, other, TASK):
        if not difference.is_allowed(task.metric):
            return dataclasses.replace(pair, better="", verdict=f"no verdict: the {difference.field} differ")
    return pair


def _sizes(scored: Sequence[ScoredModel]) -> Iterator[str]:
    """Lines on what was scored: the number of documents and tokens, and each model with its fingerprint."""
    documents = counted(len(scored[0].lines), "document")
    tokens = [counted(model.total.tokens, "token") for model in scored]
    each_once = ", ".join(dict.fromkeys(tokens))
    yield f"{documents}, {each_once}"
    for n, model in enumerate(scored, 1):
        of_model = f", {tokens[n - 1]}" if len(set(tokens)) > 1 else ""
        yield f"model {n}: {model.method}{of_model}, fingerprint {model.info['fingerprint']}"


def _differences(task: compare.Comparison, runs: Sequence[Run]) -> list[str]:
    """Lines on what differs between the first model and the others, each once."""
    lines: dict[str, None] = {}
    first, *others = runs
    for other in others:
        for difference in match.differences(first, other, TASK):
            if difference.field != "windows":
                lines[f"differs: {difference.between(first, other)}"] = None
            elif difference.is_allowed(task.metric):
                lines[CUT_APART] = None
            else:
                lines[f"{CUT_APART}, so there is no verdict: {match.equal_windows(runs)}"] = None
    return list(lines)


def _row_of(run: Run, task: compare.Comparison) -> Row:
    """The row of a model's own value, or the one that stands for it: the same model twice has one row."""
    for row, copies in task.same.items():
        for candidate in (row, *copies):
            if candidate.run is run and candidate.estimator == run.config.estimator:
                return row
    raise LookupError(run.name)  # every run of one task has a row


def _place(number: int, model: ScoredModel) -> Path:
    """The name of a model in notes, by its place on the command line: tables are in another order."""
    return Path(f"model {number} ({Path(model.pretrained).name}, estimator={model.estimator})")


# ---------------------------------------------------------------- the command line


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
            "other models, each by its model args or its name; they inherit from --model_args what they do not set",
            many=True,
            shows="MODEL",
        ),
        documents=Flag(TRUTH, False, "with --compare: print the lines of single documents, too"),
        csv=Flag(FILE, None, "also write the line of each document to this file", shows="FILE"),
        trace=Flag(
            PATH,
            None,
            "also write a trace of the model of --model_args, which `report --page` displays; a model of --compare has "
            "its own, trace=FILE among its args",
            shows="FILE",
        ),
    ).parse_args(arguments)
    if options.csv and options.json and Path(options.csv).resolve() == Path(options.json).resolve():
        raise DuelError(f"--csv and --json name the same file, {options.csv}; name two.")
    _, processes = process()
    if "-" in options.file and processes > 1:
        raise DuelError("Standard input (-) cannot be read by several processes; name a file.")
    first = model_of(options)
    if options.trace is not None:
        if "trace" in first:
            raise DuelError(f"--trace {options.trace} and trace={first['trace']} of --model_args are two; give one.")
        first["trace"] = options.trace
    options.models = [OtherModel("", first)]
    for text in options.compare:
        options.models.append(other_model(text, first))
    return options
