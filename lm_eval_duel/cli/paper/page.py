"""The lines as tables: for the terminal, as Markdown, and the forecasts of --plan."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from lm_eval_duel.cli.paper.forecast import Forecast, describe
from lm_eval_duel.cli.paper.recipes import Line
from lm_eval_duel.cli.paper.verdict import DIFFERS, FAILED
from lm_eval_duel.cli.plan import TFLOPS
from lm_eval_duel.cli.plan.table import hours_as_text
from lm_eval_duel.results.table import MARKDOWN, bullets
from lm_eval_duel.tables import markdown_table, plain_table

escape = MARKDOWN.escape
HEADER = ("row", "task", "method", "published", "measured", "difference", "allowed", "+-", "documents", "verdict")
PLAN_HEADER = ("row", "task", "windows", "calls", "rows", "time", "")
RATES = f"Time{{1}} at {{0:.0%}} of the device's dense rate ({TFLOPS['float32']:g} TFLOP/s in float32, "
RATES += f"{TFLOPS['bfloat16']:g} in bfloat16, an H200's); see --tflops, --utilization. Network calls: at least."
AUTHORS = "Turok, De Sa and Kuleshov"
COMMON = (
    "The authors pack rows in each worker process, so the rows at the ends of batches differ; their precision is "
    "bfloat16 autocast, ours float32 (8B: bfloat16 weights). More: docs/paper_tables.md."
)


def cells(line: Mapping[str, Any]) -> list[str]:
    """A line as cells."""
    bound = "<= " if line["bound"] else ""
    shown = line["rule"] or line["estimator"] or ""
    published = "" if line["published"] is None else f"{bound}{line['published']:.2f}"
    if line["measured"] is None:
        return [line["row"], line["task"], shown, published, "", "", "", "", "", line["status"]]
    difference = line["difference"]
    relative = "" if difference is None else f"{difference:+.2f} ({100 * difference / line['published']:+.1f} %)"
    error = "" if line["stderr"] is None else f"{line['stderr']:.2f}"
    documents = f"{line['documents']:,} of {line['of']:,}" if line["subset"] else f"all {line['documents']:,}"
    verdict, allowed = line["verdict"] or "", "" if line["allowed"] is None else f"{line['allowed']:.2f}"
    return [
        *(line["row"], line["task"], shown, published, f"{bound}{line['measured']:.2f}", relative, allowed, error),
        *(documents, f"subset: {verdict}" if line["subset"] and verdict else verdict),
    ]


def notes(lines: Iterable[Mapping[str, Any]], tolerance: float) -> list[str]:
    """What the columns mean, and why lines differ."""
    lines = list(lines)
    measured = [line for line in lines if line["measured"] is not None]
    remarks = [f"{line['row']}, {line['task']}: FAILED: {line['why']}" for line in lines if line["status"] == FAILED]
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
        if line["changed"]:
            remarks.append(f"{line['row']}: changed by you: {', '.join(line['changed'])}.")
        if line["why"]:
            remarks.append(f"{line['row']}, {line['task']}: {line['why']}.")
    differing = [line for line in measured if line["verdict"] == DIFFERS]
    remarks += [f"{line['row']}: {line['notes']}" for line in differing if line["notes"]]
    remarks += [COMMON] if any(str(line["source"]).startswith(AUTHORS) for line in differing) else []
    return list(dict.fromkeys(remarks))


def terminal(lines: Sequence[Mapping[str, Any]], tolerance: float) -> str:
    """The lines for the terminal."""
    remarks = notes(lines, tolerance)
    table = plain_table(HEADER, [cells(line) for line in lines])
    return "\n".join([table, *([""] if remarks else []), *remarks])


def markdown(lines: Sequence[Mapping[str, Any]], tolerance: float, heading: str) -> str:
    """The lines as a Markdown page, a table for each table of the paper."""
    parts = [f"# {heading}"]
    for table in dict.fromkeys(line["table"] for line in lines):
        own = [line for line in lines if line["table"] == table]
        sources = dict.fromkeys(line["source"] for line in own if line["source"])
        parts.append(f"## {escape(table)}")
        parts += [f"Published: {escape('; '.join(sources))}."] if sources else []
        parts.append(markdown_table(HEADER, [[escape(cell) for cell in cells(line)] for line in own]))
        parts += [bullets(remarks)] if (remarks := notes(own, tolerance)) else []
    prints = {line["fingerprint"]: line["row"] for line in lines if line["fingerprint"]}
    if prints:
        parts.append("Fingerprints: " + ", ".join(f"{escape(row)} `{digest}`" for digest, row in prints.items()) + ".")
    return "\n\n".join(parts) + "\n"


def plans(lines: Iterable[tuple[Line, Forecast | str]], utilization: float, devices: int = 1) -> str:
    """Forecasts as a table, with hours on so many `devices`; a text instead of one says why there is none."""
    rows, forecasts = [], []
    for line, forecast in lines:
        if isinstance(forecast, str):
            rows.append([line.job.row, line.job.task, "", "", "", "", forecast])
            continue
        forecasts.append(forecast)
        about, most = "about " if forecast.rough else "", "<= " if forecast.most else ""
        counts = [f"{about}{forecast.windows:,}", *(f"{most}{number:,}" for number in (forecast.calls, forecast.rows))]
        rows.append([line.job.row, line.job.task, *counts, f"{most}{hours_as_text(forecast.hours)}", ""])
    total = describe(forecasts)
    text = [plain_table(PLAN_HEADER, rows), ""]
    runs = f"{len(forecasts)} run{'s' * (len(forecasts) != 1)}"
    text.append(f"{runs}, {total['windows']:,} windows, {hours_as_text(total['hours'])}.")
    text.append(RATES.format(utilization, f" on {devices} devices" if devices > 1 else ""))
    if total["rough"]:
        text.append("about: the data set is not on this machine, and its size is known within a quarter.")
    return "\n".join(text)
