"""The time and memory that scoring texts takes on this machine: a few windows are timed, and scaled up to all.

The counts of rows and positions are those of `estimators/cost.py`, of the timed windows and of all.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import math
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from lm_eval_duel.console.command_line import plain_table
from lm_eval_duel.core.windows import Window
from lm_eval_duel.errors import DuelError, counted
from lm_eval_duel.estimators import cost
from lm_eval_duel.estimators.base import Estimator
from lm_eval_duel.estimators.checks import rule_for
from lm_eval_duel.estimators.two_phase import TwoPhase
from lm_eval_duel.harness.stats import peak_memory
from lm_eval_duel.options import Options
from lm_eval_duel.results.table import number
from lm_eval_duel.rules import LeftToRight
from lm_eval_duel.tasks import files

if TYPE_CHECKING:
    from lm_eval.api.task import Task

    from lm_eval_duel.harness.lm import DuelMDM

TIMED = ("duel", "two_phase", "elbo")  # besides the run's own estimator
WINDOWS = 4  # are timed together
SECONDS = 10.0  # unless the first of them takes longer than this
AT_LEAST = "≥ "
AT_MOST = "≤ "
ABOUT = "~ "
HEADER = ("estimator", "NFE", "calls", "rows", "token-rows", "time", "peak MiB", "what it gives")


@dataclasses.dataclass(frozen=True)
class TimedEstimator:
    """One way to score the windows. Counts and time are of all windows, and None if no formula counts them."""

    estimator: str
    gives: str
    windows: int  # that were timed
    seconds: float  # of all windows
    peak_memory: int  # bytes, while the windows were timed; on a CPU that of the process so far
    nfe: float | None = None
    calls: int | None = None  # at least
    rows: float | None = None
    token_rows: float | None = None
    is_expected: bool = False  # blocks are drawn, and these are the counts to expect


def read_documents(lm: DuelMDM, options: argparse.Namespace, tasks: Sequence[Task]) -> list[list[Window]]:
    """The windows of each document of the tasks and of --files; raises DuelError if there is no token to score."""
    from lm_eval_duel.harness.requests import continuation_windows, document_windows

    whole_texts = []
    continuations = []
    for task in tasks:
        for request in task.instances:
            if request.request_type == "loglikelihood_rolling":
                whole_texts.append(request)
            else:
                continuations.append(request)
    documents = document_windows(lm.text, whole_texts)
    of_continuations, _ = continuation_windows(lm.text, continuations)
    documents += of_continuations
    if options.files:
        texts = files.texts(options.files, options.field, options.lines)
        files.warn_of_unused(options.files, options.field, options.lines)
        for text in texts[: options.limit]:
            documents.append(lm.text.windows(text.text))
    if not _scored(documents):
        raise DuelError("These texts have no token to score.")
    return documents


def _scored(documents: Sequence[Sequence[Window]]) -> list[Window]:
    """The windows with a token to score."""
    scored = []
    for windows in documents:
        for window in windows:
            if window.target:
                scored.append(window)
    return scored


def measure(lm: DuelMDM, documents: Sequence[Sequence[Window]]) -> tuple[list[TimedEstimator], list[str]]:
    """Each way to score the documents, timed, and why others are left out."""
    windows = _scored(documents)
    timed = []
    notes = []
    for name in _estimators(lm):
        try:
            estimator = Estimator.from_options(lm.denoiser, _options(lm.options, name))
        except DuelError as error:
            notes.append(f"{name}: {error}")
            continue
        timed.append(_timed(lm, estimator, windows))
    return timed, notes


def _estimators(lm: DuelMDM) -> list[str]:
    """The estimators to time: only the run's own if the others are for other networks."""
    estimator = lm.options.estimator
    if lm.denoiser.attention == "causal" or lm.denoiser.noise_training is not None:
        return [estimator]
    return list(dict.fromkeys((estimator, *TIMED)))


def _options(options: Options, name: str) -> Options:
    """The run's options with another estimator, whose own arguments have their defaults."""
    if name == options.estimator:
        return options
    return dataclasses.replace(options, estimator=name, estimator_args=None)


def _timed(lm: DuelMDM, estimator: Estimator, windows: Sequence[Window]) -> TimedEstimator:
    """The time of a few windows, scaled to all of them."""
    ordered = sorted(windows, key=lambda window: window.length)
    sample = [ordered[len(ordered) // 2]]  # the median length
    for gpu in range(torch.cuda.device_count()):
        torch.cuda.reset_peak_memory_stats(gpu)
    seconds = _seconds(estimator, sample)
    if seconds < SECONDS and len(ordered) > 1:
        count = min(WINDOWS, len(ordered))
        sample = []
        for n in range(count):  # the middles of equal parts, so that short and long windows are both timed
            middle = len(ordered) * (2 * n + 1) // (2 * count)
            sample.append(ordered[middle])
        seconds = _seconds(estimator, sample)

    counts: dict[str, Any] = {}
    count_one = cost.count_of(estimator)
    if count_one is None:  # scale by target tokens
        share = _tokens(sample) / _tokens(windows)
    else:
        of_all = cost.sum_over(cost.layouts(windows), count_one)
        of_sample = cost.sum_over(cost.layouts(sample), count_one)
        share = of_sample.token_rows / of_all.token_rows
        # at least the calls that must follow each other, and as many as the rows fill
        calls = max(int(of_all.longest), math.ceil(of_all.weight / estimator.budget.tokens))
        counts = {"nfe": of_all.nfe or None, "calls": calls, "rows": of_all.rows, "token_rows": of_all.token_rows}

    gives = estimator.value_template.short_label
    memory = peak_memory(lm.denoiser.device)
    is_expected = isinstance(estimator, TwoPhase) and estimator.arguments.sample < 1
    return TimedEstimator(
        estimator.name, gives, len(sample), seconds / share, memory, **counts, is_expected=is_expected
    )


def _tokens(windows: Sequence[Window]) -> int:
    """The target tokens of windows."""
    return sum(len(window.target) for window in windows)


def _seconds(estimator: Estimator, windows: Sequence[Window]) -> float:
    began = time.perf_counter()
    estimator.log_prob(windows)
    return time.perf_counter() - began


# ---------------------------------------------------------------- views


def figures(
    documents: Sequence[Sequence[Window]], timed: Sequence[TimedEstimator], notes: Sequence[str]
) -> dict[str, Any]:
    """The entries of --json."""
    windows = list(itertools.chain.from_iterable(documents))
    return {
        "documents": len(documents),
        "windows": len(windows),
        "length": max(window.length for window in windows),
        "tokens": _tokens(windows),
        "estimators": {each.estimator: dataclasses.asdict(each) for each in timed},
        "left_out": list(notes),
    }


def table(
    lm: DuelMDM, documents: Sequence[Sequence[Window]], timed: Sequence[TimedEstimator], notes: Sequence[str]
) -> str:
    """The figures as text."""
    about = figures(documents, timed, notes)
    bounded = _steps(lm)
    rows = []
    for each in timed:
        sign = bounded if each.nfe else ""  # the counts of an ELBO do not depend on the rule
        if each.is_expected:
            sign = ABOUT
        rows.append(
            (
                each.estimator,
                _count(each.nfe, sign),
                _count(each.calls, ABOUT if sign else AT_LEAST),
                _count(each.rows, sign),
                _count(each.token_rows, sign),
                _duration(each.seconds),
                number(each.peak_memory / 2**20, ",.0f"),
                each.gives,
            )
        )
    most = max(each.windows for each in timed)
    verb = "was" if most == 1 else "were"
    lines = [
        f"{counted(about['documents'], 'document')}, {counted(about['tokens'], 'token')} in "
        f"{counted(about['windows'], 'window')} of at most {counted(about['length'], 'position')}. Up to "
        f"{counted(most, 'window')} {verb} timed for each estimator, on {lm.denoiser.device}; the figures "
        "are for all windows:",
        "",
        plain_table(HEADER, rows),
    ]
    cells = [cell for row in rows for cell in row]
    for sign, meaning in ((AT_LEAST, "at least this many"), (ABOUT, "about this many: a run counts its own")):
        if any(cell.startswith(sign) for cell in cells):
            lines.append(f"{sign}{meaning}")
    if bounded:
        known = "are at most that" if bounded == AT_MOST else "have no bound"
        lines.append(f"{bounded}one position a step is counted: this rule's steps depend on the text, and {known}.")
    return "\n".join([*lines, *notes])


def _steps(lm: DuelMDM) -> str:
    """A sign before counts of a rule whose steps depend on the text: an upper bound, or a count without one."""
    rule = LeftToRight() if lm.denoiser.attention == "causal" else rule_for(lm.denoiser, lm.options.rule)
    setting = cost.Setting(lm.denoiser, rule, lm.estimator.block, lm.estimator.grid)
    if setting.is_exact:
        return ""
    return ABOUT if rule.may_pick_none else AT_MOST


def _count(value: float | None, sign: str) -> str:
    return f"{sign}{number(value, ',.0f')}" if value else ""


def _duration(seconds: float) -> str:
    """Hours, minutes or seconds, with three digits."""
    if seconds >= 3600:
        return f"{number(seconds / 3600, '.3g')} h"
    if seconds >= 60:
        return f"{number(seconds / 60, '.3g')} min"
    return f"{number(seconds, '.3g')} s"
