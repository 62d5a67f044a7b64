"""`lm-eval-duel so-far`: the perplexity of a run that is not finished, from its response cache.

    lm-eval-duel so-far runs/llada          as in --use_cache runs/llada

The cache holds the documents of each process, in the order in which they are taken, and the answers of those that are
finished. Nothing else is read: no task, no tokenizer, no weights.
"""

from __future__ import annotations

import argparse
import glob
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lm_eval_duel.arguments import MISSING
from lm_eval_duel.command_line import PATH, STDOUT, Flag, Parser, write_json
from lm_eval_duel.errors import DuelError, UsageError
from lm_eval_duel.estimators.registry import ESTIMATORS, Kind, of_spec
from lm_eval_duel.tables import plain_table

if TYPE_CHECKING:
    from lm_eval_duel.harness.so_far import Document

# entries of the spec that are shown
SHOWN = ("estimator", "rule", "block", "cache", "cheap_cache", "sample", "mc_samples", "beam", "tolerance")
ERRORS = {  # what the intervals leave out
    Kind.ESTIMATE: " Its sampling error is not shown here: the finished run prints it.",
    Kind.UPPER_BOUND: " The Monte Carlo error of estimator=elbo is not shown here: the finished run prints it.",
}
UNITS = {"tokens": "per token", "words": "per word", "bytes": "per byte"}
PRINTS = """\
Prints for each task of whole texts how many of its documents are finished, and the perplexity per token, word and
byte (where the task counts them), with a 95 % interval for the value that the finished run will print. The estimate
uses the first documents of the run's random order that are all finished: a random sample, whatever their lengths.
"""


def so_far(path: str) -> dict[str, Any]:
    """The estimates of a response cache, by task; `path` as in --use_cache, or one of its files."""
    from lm_eval_duel.harness import cache
    from lm_eval_duel.harness.so_far import read

    contents = [cache.contents(file) for file in _files(path)]
    spec = next((spec for part in contents if isinstance(spec := part.get(cache.SPEC), dict)), {})
    try:
        order, strata = read(contents)
    except (KeyError, TypeError, ValueError) as error:
        raise DuelError(f"{path} is damaged: its order of documents cannot be read ({error!r}).") from None
    if not any(strata):
        raise DuelError(
            f"{path} holds no order of documents: it was written by an earlier release, or no task of whole texts "
            "(loglikelihood_rolling) has begun."
        )
    tasks = dict.fromkeys(document.task for documents in strata for document in documents)
    return {
        "path": path,
        "spec": spec,
        "order": order,
        "tasks": {
            name: _task([[document for document in documents if document.task == name] for documents in strata], order)
            for name in tasks
        },
    }


def _task(strata: list[list[Document]], order: str) -> dict[str, Any]:
    """One task's figures; `strata`: its documents of each process, in their order."""
    from lm_eval_duel.harness.so_far import estimate

    everything = [document for documents in strata for document in documents]
    finished = [document for document in everything if document.log_prob is not None]
    is_random = order == "random" or len(finished) == len(everything)
    values = {unit: estimate(strata if is_random else [finished], unit) if finished else None for unit in UNITS}
    return {
        "documents": len(everything),
        "finished": len(finished),
        "sample": max((value.sample for value in values.values() if value), default=0),
        "tokens": sum(document.tokens for document in everything),
        "finished_tokens": sum(document.tokens for document in finished),
        "partial": len(finished) < len(everything),
        "random_sample": is_random,
        "perplexity": {
            unit: {"value": v.perplexity, "low": v.low if is_random else None, "high": v.high if is_random else None}
            for unit, v in values.items()
            if v
        },
    }


def table(figures: dict[str, Any]) -> str:
    """The figures as text."""
    from lm_eval_duel.harness.so_far import FEWEST

    rows, tasks = [], figures["tasks"].values()
    for name, task in figures["tasks"].items():
        status = "PARTIAL" if task["partial"] else "complete"
        counts = [f"{task['finished']:,} of {task['documents']:,}", f"{task['sample']:,}"]
        rows.append([name, status, *counts, *(_cell(task["perplexity"].get(unit)) for unit in UNITS)])
    spec = figures["spec"]
    shown = [f"{key}={spec[key]}" for key in SHOWN if key in spec]
    lines = [f"{figures['path']}: {', '.join(shown)}", ""]
    lines.append(plain_table(("task", "", "finished documents", "in the estimate", *UNITS.values()), rows))
    kind = of_spec(spec["estimator"], spec).kind if spec.get("estimator") in ESTIMATORS else Kind.LIKELIHOOD
    notes = [] if kind is Kind.LIKELIHOOD else [f"The value is {kind.value}.{ERRORS.get(kind, '')}"]
    if "beam" in spec:
        notes.append("Where a block has not converged, it is a bound.")
    if any(task["partial"] for task in tasks):
        notes.append(
            "PARTIAL: perplexities are estimates from a random sample of documents, with the 95 % interval for the "
            "values that the finished run will print. Do not publish them. Documents are taken in a random order; in "
            f"the estimate are those before the first that is not finished. An interval takes {FEWEST}."
            if all(task["random_sample"] for task in tasks)
            else "PARTIAL, and NOT a random sample: the run takes the longest windows first (order=longest). Do not "
            "publish these values."
        )
    return "\n".join([*lines, *([""] if notes else []), *notes])


def _cell(value: dict[str, float | None] | None) -> str:
    """A perplexity with its interval."""
    from lm_eval_duel.harness.so_far import Estimate

    return "" if value is None else str(Estimate(value["value"], value["low"], value["high"], 0, 0))


def _files(path: str) -> list[Path]:
    """The files of --use_cache `path`, one for each process; raises UsageError if there is none."""
    given = Path(path)
    if given.is_file():
        return [given]
    files = given.parent.glob(f"{glob.escape(given.name)}_rank*.db")
    ranks = {file.stem.removeprefix(f"{given.name}_rank"): file for file in files}
    if not (ranks := {int(rank): file for rank, file in ranks.items() if rank.isdecimal()}):
        raise UsageError(f"There is no {path}_rank0.db: name a run's --use_cache PATH, or one of its files.")
    return [file for _, file in sorted(ranks.items())]


def main(arguments: list[str]) -> None:
    """Print the estimates of an unfinished run: `lm-eval-duel so-far`."""
    options = parse(arguments)
    figures = so_far(options.path)
    if options.json != STDOUT:
        print(table(figures))
    if options.json:
        write_json(options.json, figures)


def parse(arguments: list[str]) -> argparse.Namespace:
    """The parsed command line; raises UsageError."""
    return Parser(
        "so-far",
        "Print the perplexity of a run that is not finished, from its response cache (--use_cache).",
        PRINTS,
        "runs/llada",
        "json",
        PATH=Flag(PATH, MISSING, "the PATH of --use_cache, or one of its files"),
    ).parse_args(arguments)
