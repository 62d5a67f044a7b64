"""A measured value compared with the published one, and the table of them.

All documents scored: they are the authors' documents, so there is no sampling error. What may differ is the rounding of
the published figure, and the known differences of data packing, precision and weights, for which `tolerance` per cent
are allowed. An ELBO of few draws has a Monte Carlo error, in both figures.

A subset scored: the published figure is that of all N documents. The standard error s of a value over n of them, with
the correction for a finite number, is s sqrt(1 - n / N).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any

from lm_eval_duel.cli.paper.recipes import Line
from lm_eval_duel.errors import DuelError
from lm_eval_duel.rates import ratio
from lm_eval_duel.results import read, rows, stats
from lm_eval_duel.results.records import Row
from lm_eval_duel.results.table import MARKDOWN, Cell, Column, Table, bullets, markdown, plain, spaced
from lm_eval_duel.rules import parse

FEWEST = 8  # documents from which a standard error is an estimate of anything
AGREES, DIFFERS, UNDECIDED, OTHER = "agrees", "differs", "undecided", "not comparable"
AUTHORS = "Turok, De Sa and Kuleshov"
COMMON = (
    "The authors pack rows in each worker process, so the rows at the ends of batches differ; their precision is "
    "bfloat16 autocast, ours float32 (8B: bfloat16 weights). More: docs/paper_tables.md."
)
Entries = Mapping[str, Any]  # a line of paper.json


@dataclasses.dataclass(frozen=True)
class Measured:
    """A value of a results file. `stderr`: over documents. `random_stderr`: Monte Carlo; None if unknown or none."""

    measured: float
    stderr: float | None
    random_stderr: float | None
    is_random: bool
    documents: int
    of: int  # documents of the whole task
    fingerprint: str | None = None

    @property
    def subset(self) -> bool:
        return self.documents < self.of

    @property
    def comparison_error(self) -> float | None:
        """The standard error of measured minus published; None if it cannot be known.

        Exact values: that of a subset against all documents, 0 if all were scored. With random draws in both figures
        the variance of the draws is part of the spread over documents, or known by itself for all documents.
        """
        if not self.subset and not self.is_random:
            return 0.0
        if not self.subset and self.random_stderr is not None:
            return math.sqrt(2) * self.random_stderr
        if self.stderr is None or self.documents < FEWEST:
            return None
        share = self.documents / self.of if self.of else 1.0
        return self.stderr * math.sqrt(1 + share if self.is_random else 1 - share)


def measure(line: Line, file: Path) -> Measured:
    """The value of a line in its job's results file; raises DuelError if the file does not hold it."""
    run = read.run(file)
    task, metric, rule = run.tasks[line.job.task], line.figure["metric"], line.figure["rule"]
    for row in rows.from_run(run, line.job.task):  # a lattice run has one for each rule
        same = row.estimator == line.figure["estimator"] and (not rule or parse(row.rule or "") == parse(rule))
        if same and metric in row.metrics:
            size = task.size or 0
            whole = run.content.get("n-samples", {}).get(task.key, {}).get("original") or size
            drawn = row.error(metric, row.nats_stderr), row.estimator == "elbo"
            return Measured(row.metrics[metric], over_documents(row, metric), *drawn, size, whole, run.fingerprint)
    raise DuelError(f"{file} has no {metric} of this line.")


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


def judge(line: Line, result: Measured, tolerance: float) -> tuple[str, float | None, str]:
    """Whether a measured value agrees with the published one, the largest difference that would, and why there is none.

    `tolerance`: per cent of the published figure.
    """
    if line.job.other_data:
        return OTHER, None, f"other data than the published figure's: {', '.join(line.job.changed)}"
    if (error := result.comparison_error) is None:
        few = f"{result.documents} documents" if result.documents < FEWEST else "no standard error"
        return UNDECIDED, None, f"{few}: too few for a verdict; at least {FEWEST} are needed"
    rounding = 0.5 * 10.0 ** int(Decimal(line.figure["printed"]).as_tuple().exponent)
    allowed = rounding + tolerance / 100 * line.figure["value"] + stats.CLEAR * error
    return AGREES if abs(result.measured - line.figure["value"]) <= allowed else DIFFERS, allowed, ""


def described(line: Line, file: Path | None, failed: str, tolerance: float) -> dict[str, Any]:
    """A line of the table, for JSON. `file`: the results of its job; `failed`: why there are none, if it was run."""
    figure, job, result = line.figure, line.job, None
    verdict, allowed, why = None, None, failed
    if file is not None:
        try:
            result = measure(line, file)
            verdict, allowed, why = judge(line, result, tolerance)
        except DuelError as error:
            why = str(error)
    return {
        "table": figure["table"],
        "row": job.row,
        "task": job.task,
        **{key: figure.get(key) or None for key in ("model", "estimator", "rule", "block", "metric", "source")},
        "published": figure["value"],
        "bound": figure["kind"] == "bound",
        "status": "finished" if result else "FAILED" if why else "not run",
        **{field.name: getattr(result, field.name, None) for field in dataclasses.fields(Measured)},
        "difference": result and result.measured - figure["value"],
        "subset": result and result.subset,
        "file": result and str(file),
        "limit": job.limit,
        "changed": list(job.changed),
        "verdict": verdict,
        "allowed": allowed,
        "why": why or None,
        "notes": job.notes or None,
    }


# ---------------------------------------------------------------- as text


def table(lines: Sequence[Entries]) -> Table:
    """The lines as a table."""

    def difference(line: Entries) -> str:
        difference = line["difference"]
        return "" if difference is None else f"{difference:+.2f} ({100 * difference / line['published']:+.1f} %)"

    def documents(line: Entries) -> str:
        if line["documents"] is None:
            return ""
        return f"{line['documents']:,} of {line['of']:,}" if line["subset"] else f"all {line['documents']:,}"

    def verdict(line: Entries) -> str:
        return f"{'subset: ' if line['subset'] else ''}{line['verdict'] or line['status']}"

    columns = [Column(name, cell=lambda line, name=name: line[name]) for name in ("row", "task")]
    columns.append(Column("method", cell=lambda line: line["rule"] or line["estimator"]))
    for name in ("published", "measured"):
        columns.append(Column(name, ".2f", cell=lambda line, name=name: Cell(line[name], bound=line["bound"])))
    columns += [Column("difference", cell=difference), Column("allowed", ".2f", cell=lambda line: line["allowed"])]
    columns.append(Column("+-", ".2f", cell=lambda line: line["stderr"]))
    return Table.from_records(lines, [*columns, Column("documents", cell=documents), Column("verdict", cell=verdict)])


def notes(lines: Sequence[Entries], tolerance: float) -> list[str]:
    """What the columns mean, and why lines differ."""
    measured = [line for line in lines if line["measured"] is not None]
    remarks = [f"{line['row']}, {line['task']}: FAILED: {line['why']}" for line in lines if line["status"] == "FAILED"]
    if measured:
        remarks.append("+- is the standard error of the measured value over documents (rows of a wrapped task).")
    if any(not line["subset"] for line in measured):
        remarks.append(
            "All documents scored: the published figure has the same ones, so sampling error does not apply, and +- "
            f"is only context. A value agrees if it differs by at most the rounding of the published figure plus "
            f"{tolerance:g} % of it; for an ELBO, plus two standard errors of the random draws of both figures."
        )
    if any(line["subset"] for line in measured):
        remarks.append(
            "Subset: only the first documents of the task were scored, and the published figure is of all. A value "
            f"agrees if it differs by at most the rounding, plus {tolerance:g} %, plus two standard errors. The first "
            "documents are not a random sample. Do not publish these values."
        )
    for line in measured:
        differs = line["verdict"] == DIFFERS
        remarks += [f"{line['row']}: changed by you: {', '.join(line['changed'])}."] if line["changed"] else []
        remarks += [f"{line['row']}, {line['task']}: {line['why']}."] if line["why"] else []
        remarks += [f"{line['row']}: {line['notes']}"] if differs and line["notes"] else []
    if any(line["verdict"] == DIFFERS and str(line["source"]).startswith(AUTHORS) for line in measured):
        remarks.append(COMMON)
    return list(dict.fromkeys(remarks))


def terminal(lines: Sequence[Entries], tolerance: float) -> str:
    """The lines for the terminal."""
    return "\n".join([plain(table(lines)), "", *notes(lines, tolerance)]).rstrip("\n")


def page(lines: Sequence[Entries], tolerance: float) -> str:
    """The lines as a Markdown page, a table for each table of the paper."""
    escape = MARKDOWN.escape
    parts = ["# Published and measured"]
    for name in dict.fromkeys(line["table"] for line in lines):
        own = [line for line in lines if line["table"] == name]
        sources = dict.fromkeys(line["source"] for line in own)
        parts += [f"## {escape(name)}", f"Published: {escape('; '.join(sources))}.", markdown(table(own))]
        parts.append(bullets(notes(own, tolerance)))
    prints = {line["fingerprint"]: line["row"] for line in lines if line["fingerprint"]}
    if prints:
        parts.append("Fingerprints: " + ", ".join(f"{escape(row)} `{digest}`" for digest, row in prints.items()) + ".")
    return spaced(parts)
