"""The autoregressive baseline of a report: of --ar, or the only one among its results."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from lm_eval_duel.errors import DuelError, usage
from lm_eval_duel.results import match, order, read
from lm_eval_duel.results.runs import Run
from lm_eval_duel.results.table import Note


def read_runs(options: argparse.Namespace) -> tuple[list[Run], list[Run]]:
    """The runs of --ar, and all runs; raises DuelError for an --ar that is not of an autoregressive model.

    --ar is a file, a folder, or the name of a model in the results. Of a file of `score --compare`, which has several
    models, the autoregressive ones are meant.
    """
    with usage():
        if options.ar and not Path(options.ar).exists():
            runs = read.runs(options.results)
            return of_model(options.ar, runs), runs
        places = [options.ar] if options.ar else []
        runs = read.runs([*options.results, *places])
        ar_files = read.files(places)
    ar = [run for run in runs if run.written in ar_files]
    causal = [run for run in ar if run.config.autoregressive]
    if causal and all(run.is_of_score for run in ar):
        ar = causal
    for run in ar:
        if run.config.autoregressive:
            continue
        model = f"estimator={run.config.estimator}" if run.config.ours else f"--model {run.config.model}"
        raise DuelError(
            f"--ar {run.name} is a result of {model}, not of an autoregressive model; name one of ours "
            f"({match.TWIN}), or one of `--model hf` or of another autoregressive model of the harness."
        )
    return ar, runs


def of_model(name: str, runs: Sequence[Run]) -> list[Run]:
    """The autoregressive runs of a model, or the one that messages call by this name (`FILE#2`)."""
    causal = []
    for run in runs:
        if run.config.autoregressive and name in (run.label, run.pretrained, run.name):
            causal.append(run)
    return causal


def check_single(ar: Sequence[Run]) -> None:
    """Raise DuelError if the runs of --ar hold a task more than once."""
    holding: dict[str, list[str]] = {}
    for run in ar:
        for name in run.tasks:
            holding.setdefault(name, []).append(run.name)
    for name, files_of_task in holding.items():
        if len(files_of_task) > 1:
            listed = ", ".join(files_of_task)
            raise DuelError(f"--ar holds {name} more than once: {listed}. Name one of these files.")


def find(runs: Sequence[Run]) -> tuple[list[Run], Note]:
    """The results of the only autoregressive model among others, or none of them and a note that says why.

    Of several results of a task under one spec it is the newest, or the one with samples if they are the same value.
    """
    with_averages = [run for run in runs if run.config.autoregressive and run.has_results]
    runs = [run for run in runs if run.tasks]
    causal = [run for run in runs if run.config.autoregressive]
    if len(causal) == len(runs):  # there is nothing to measure a gap of
        return [], Note()
    note = _no_baseline(causal, runs, with_averages)
    if note:
        return [], note
    kept: dict[str, Run] = {}
    for run in causal:  # oldest first
        for name, task in run.tasks.items():
            before = kept.setdefault(name, run)
            if before.spec != run.spec:
                several = f"No gaps: there are several results of {run.label} on {run.label_of(name)}."
                return [], Note(several, "name one with --ar")
            task_before = before.tasks[name]
            lost_samples = task_before.documents is not None and task.documents is None
            if not (lost_samples and order.are_equal(task_before.metrics, task.metrics)):
                kept[name] = run
    once = {run.name: run for run in kept.values()}  # a run may be the one of several tasks
    return list(once.values()), Note()


def of_averages(runs: Sequence[Run], of_perplexities: Sequence[Run]) -> list[Run]:
    """The results without a perplexity of the baseline's model, or of the only autoregressive one: no gap is of them.

    So there may be several results of a task.
    """
    with_results = [run for run in runs if run.has_results]
    causal = [run for run in with_results if run.config.autoregressive]
    models = {run.key for run in of_perplexities or causal}
    if len(models) > 1 or len(causal) == len(with_results):
        return []
    found = []
    for run in causal:
        if run.key in models and not run.tasks and run not in of_perplexities:
            found.append(run)
    return found


def how_to_make_one(runs: Sequence[Run]) -> str:
    """Advice to score an autoregressive model as the results of `runs` were scored."""
    of_score = all(run.is_of_score for run in runs)
    return match.TWIN_IN_SCORE if of_score else match.TWIN


def _no_baseline(causal: Sequence[Run], runs: Sequence[Run], with_averages: Sequence[Run]) -> Note:
    """The reason that those of `runs` that are autoregressive are no baseline; empty if they are of one model.

    `with_averages`: the autoregressive results with any value, perplexities or others.
    """
    models = {run.key: run.label for run in causal}
    if not models and with_averages:
        names = ", ".join(dict.fromkeys(run.label for run in with_averages))
        tasks = ",".join(dict.fromkeys(name for run in runs for name in run.tasks))
        return Note(f"No gaps: the results of {names} have no perplexity.", f"score it on them: --tasks {tasks}")
    if not models:
        return Note("No gaps: gap closed needs an autoregressive result.", how_to_make_one(runs))
    if len(models) == 1:
        return Note()
    several = f"No gaps: there are {len(models)} autoregressive models ({', '.join(models.values())})."
    return Note(several, "name one with --ar")
