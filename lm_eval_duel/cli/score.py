"""`lm-eval-duel score`: the log-likelihood of the user's own texts, one line a document and the total."""

from __future__ import annotations

import argparse
import dataclasses
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lm_eval_duel.arguments import MISSING, TEXT, TRUTH
from lm_eval_duel.cli.comparison import compared
from lm_eval_duel.cli.models import OtherModel, other_model
from lm_eval_duel.cli.scored import ScoredModel, score
from lm_eval_duel.console.command_line import FILE, FLAGS, PATH, STDOUT, Flag, Parser, process, write_json
from lm_eval_duel.console.exits import FAILED, stop
from lm_eval_duel.errors import DuelError, too_few_documents, usage
from lm_eval_duel.options import Options, model_of
from lm_eval_duel.results import stats
from lm_eval_duel.results.doubts import verify_doubt
from lm_eval_duel.results.table import LEVEL, csv_text
from lm_eval_duel.tasks import files

log = logging.getLogger("lm_eval.duel_mdm")

DIFFERENCE = (  # entries of a comparison in --json
    *("names", "unit", "documents", "perplexities", "stderrs", "kinds"),
    *("difference", "interval", "difference_unit", "verdict"),
)
PRINTS = f"""\
Prints a line for each document (tokens, log-probability in nats, perplexity per token and per word, bits per byte) and
the total with its standard error over documents. The numbers equal the harness's: the same windows, special tokens and
model args. A bound is marked by ≥ and ≤; ± is the Monte Carlo error of an estimate or a bound.
--compare scores the same texts under other models. Each inherits the arguments of --model_args that it does not set;
those that do not apply to its estimator are ignored, with a message. It prints a line for each model, in the order of
the command, then the paired differences to the first, and the settings in which each model differs from it. The
differences are in nats per token if all count the same tokens, else in bits per byte. Each has its {LEVEL}
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
        every_text = files.texts(options.file, options.field, options.lines)
        texts = every_text[: options.limit]
        if rank == 0:
            files.warn_of_unused(options.file, options.field, options.lines)
        if len(texts) < ranks:
            raise too_few_documents("The input", len(texts), ranks)
    from lm_eval.utils import setup_logging

    from lm_eval_duel.harness.lm import DuelMDM
    from lm_eval_duel.text.loading import require_loadable

    setup_logging()
    # A model alone is checked as it is loaded. Of several, none is loaded before all are checked.
    checked_first = options.models if options.compare else []
    for model in checked_first:
        if model.note and rank == 0:
            log.info("%s", model.note)
        with usage(), model.naming_conflicts():
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
            scored_model = score(lm, texts, len(every_text))
            if scored_model is None:
                continue  # another process prints and writes
            scored.append(scored_model)
            if show_documents:
                blank_line = "\n" if len(scored) > 1 else ""
                print(f"{blank_line}{scored_model.table()}", flush=True)
    finally:  # models that are finished are kept if a later one fails
        if scored:
            write(options, scored)
    for scored_model in scored:
        differing = verify_doubt(scored_model.info["duel"])
        if differing:
            stop(FAILED, differing)


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


# ---------------------------------------------------------------- what is printed and written


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


# ---------------------------------------------------------------- the command line


@usage()
def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The parsed command line, with its `models`; raises UsageError for wrong arguments."""
    options = Parser(
        "score",
        "Score your own texts: log-probability, perplexity and bits per byte of each document.",
        PRINTS,
        "- --model_args demo-mdm,rule=greedy,block=32 <<< 'We the people of the United States'",
        *("model_args", "device", "batch_size", "json", "field", "lines"),
        limit=dataclasses.replace(FLAGS["limit"], help="only the first documents"),
        FILE=Flag(PATH, MISSING, f"{', '.join(files.FORMATS)}, a folder, a pattern, or - for stdin", many=True),
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
    require_traces_apart(options.models)
    files.check_outputs(options.file, {"--json": options.json, "--csv": options.csv})
    return options


def require_traces_apart(models: Sequence[OtherModel]) -> None:
    """Raise DuelError if two models have the same trace, which is of one model."""
    traces = set()
    for model in models:
        trace = model.args.get("trace")
        if trace is None:
            continue
        place = Path(str(trace)).resolve()
        if place in traces:
            raise DuelError(f"Two models have the trace {trace}, and a trace is of one model; name two files.")
        traces.add(place)
