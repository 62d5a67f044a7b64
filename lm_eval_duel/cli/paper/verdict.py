"""A measured value beside the published one.

All documents scored: they are the authors' documents, so there is no sampling error. What may differ is the rounding of
the published figure, and the known differences of data packing, precision and weights, for which `tolerance` per cent
are allowed. An ELBO of few draws has a Monte Carlo error, in both figures.

A subset scored: the published figure is that of all N documents. The standard error s of a value over n of them, with
the correction for a finite number, is s sqrt(1 - n / N).
"""

from __future__ import annotations

import dataclasses
import math
from decimal import Decimal
from pathlib import Path
from typing import Any

from lm_eval_duel.cli.paper.recipes import Line
from lm_eval_duel.errors import DuelError
from lm_eval_duel.estimators.registry import find
from lm_eval_duel.rates import ratio
from lm_eval_duel.results import read, rows, stats
from lm_eval_duel.results.records import Row
from lm_eval_duel.rules import parse

FEWEST = 8  # documents from which a standard error is an estimate of anything
AGREES, DIFFERS, UNDECIDED, OTHER = "agrees", "differs", "undecided", "not comparable"
NOT_RUN, FINISHED, FAILED = "not run", "finished", "FAILED"


@dataclasses.dataclass(frozen=True)
class Measured:
    """A value of a results file. `stderr`: over documents. `random_stderr`: Monte Carlo; None if unknown or none."""

    value: float
    stderr: float | None
    random_stderr: float | None
    is_random: bool
    documents: int
    of: int  # documents of the whole task
    fingerprint: str | None
    file: str

    @property
    def subset(self) -> bool:
        return self.documents < self.of


@dataclasses.dataclass(frozen=True)
class Verdict:
    """`allowed`: the largest difference that counts as agreement; None if there is none."""

    word: str
    allowed: float | None = None
    why: str = ""


def measured(line: Line, file: Path) -> Measured:
    """The value of a line in its job's results file; raises DuelError if the file does not hold it."""
    run = read.run(file)
    task = run.tasks[line.job.task]
    metric = line.figure["metric"] if line.figure else next(iter(task.metrics))
    row = next((row for row in rows.of(run, line.job.task) if _is_value(row, line)), None)
    if row is None or metric not in row.metrics:
        raise DuelError(f"{file} has no {metric} of this line.")
    counts = run.content.get("n-samples", {}).get(task.key, {})
    size = task.size or 0
    return Measured(
        row.metrics[metric],
        over_documents(row, metric),
        row.error(metric, row.nats_stderr),
        find(row.estimator).name == "elbo",
        size,
        counts.get("original") or size,
        run.fingerprint,
        str(file),
    )


def _is_value(row: Row, line: Line) -> bool:
    """Whether a row of a results file is the line's: a lattice run has one for each rule."""
    if line.figure is None or not line.figure["rule"]:
        return line.figure is None or row.estimator == line.figure["estimator"]
    return row.estimator == line.figure["estimator"] and parse(row.rule or "") == parse(line.figure["rule"])


def over_documents(row: Row, metric: str) -> float | None:
    """The standard error of a value over documents, as a ratio to units; over windows if no samples were saved."""
    documents = list(row.documents.get(metric, {}).values())
    if len(documents) < 2:
        return row.error(metric, row.nats_window_stderr)
    nats, units = zip(*documents, strict=True)
    _, error = ratio(nats, units)
    if error is None:
        return None
    return stats.stderr(metric, row.metrics[metric], math.fsum(nats), error * math.fsum(units))


def judge(line: Line, result: Measured, tolerance: float) -> Verdict:
    """Whether a measured value agrees with the published one. `tolerance`: per cent of the published figure."""
    if line.figure is None:
        return Verdict("")
    if line.job.other_data:
        return Verdict(OTHER, why=f"other data than the published figure's: {', '.join(line.job.changed)}")
    error = comparison_error(result)
    if error is None:
        few = f"{result.documents} documents" if result.documents < FEWEST else "no standard error"
        return Verdict(UNDECIDED, why=f"{few}: too few for a verdict; at least {FEWEST} are needed")
    rounding = 0.5 * 10.0 ** int(Decimal(line.figure["printed"]).as_tuple().exponent)
    allowed = rounding + tolerance / 100 * line.figure["value"] + stats.CLEAR * error
    return Verdict(AGREES if abs(result.value - line.figure["value"]) <= allowed else DIFFERS, allowed)


def comparison_error(result: Measured) -> float | None:
    """The standard error of measured minus published; None if it cannot be known.

    Exact values: that of a subset against all documents, 0 if all were scored. With random draws in both figures the
    variance of the draws is part of the spread over documents, or known by itself for all documents.
    """
    share = result.documents / result.of if result.of else 1.0
    if not result.subset and not result.is_random:
        return 0.0
    if not result.subset and result.random_stderr is not None:
        return math.sqrt(2) * result.random_stderr
    if result.stderr is None or result.documents < FEWEST:
        return None
    return result.stderr * math.sqrt(1 + share if result.is_random else 1 - share)


def describe(
    line: Line, status: str, result: Measured | None = None, verdict: Verdict | None = None, why: str = ""
) -> dict[str, Any]:
    """A line of the table, for JSON. `why`: the reason if its job failed."""
    figure = line.figure or {}
    value = None if result is None else result.value
    published = figure.get("value")
    return {
        "table": line.table,
        "row": line.job.row,
        "task": line.job.task,
        "model": figure.get("model"),
        "estimator": figure.get("estimator"),
        "rule": figure.get("rule") or None,
        "block": figure.get("block") or None,
        "metric": figure.get("metric"),
        "published": published,
        "bound": figure.get("kind") == "bound",
        "source": figure.get("source"),
        "status": status,
        "measured": value,
        "difference": None if None in (value, published) else value - published,
        **{
            key: None if result is None else getattr(result, key)
            for key in ("stderr", "random_stderr", "documents", "of", "subset", "fingerprint", "file")
        },
        "limit": line.job.limit,
        "changed": list(line.job.changed),
        "verdict": None if verdict is None else verdict.word or None,
        "allowed": None if verdict is None else verdict.allowed,
        "why": (why if verdict is None else verdict.why) or None,
        "notes": line.job.notes or None,
    }
