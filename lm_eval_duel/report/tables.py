"""The report as markdown: report.md, and the short table that the command prints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

WORDS = {
    "token_perplexity": "perplexity per token",
    "perplexity": "perplexity",
    "word_perplexity": "perplexity per word",
    "byte_perplexity": "perplexity per byte",
    "bits_per_byte": "bits per byte",
}


def markdown(report: Mapping[str, Any]) -> str:
    """report.md."""
    parts = ["# Perplexity of masked diffusion models", *[f"- {note}" for note in report["notes"]]]
    for name, task in report["tasks"].items():
        said = "" if task["documents"] is None else f", {task['documents']} documents"
        parts += [f"## {name}: {WORDS[task['metric']]}{said}", values(task), ""]
        if any(entry["estimator"] == "duel" and not entry["ar"] for entry in task["rows"]):
            parts += ["### Gap closed", gaps(task), ""]
        for sweep in task["rules"]:
            parts += [f"### Rules against NFE: {_sweep(sweep)}", rules(task, sweep), ""]
        parts += _figures(report, name)
        if task["differences"]:
            parts += ["**Compared as published, although these differ:**", _list(task["differences"]), ""]
        parts += [_list(task["notes"]), ""]
    if len(report["tasks"]) > 1 and report["averages"]:
        parts += ["## Gap closed over tasks, %", averages(report), ""]
    parts += ["## Cost", cost(report["cost"]), ""]
    if report["traces"]:
        parts += ["## Orders, from traces", traces(report["traces"]), *_figures(report, "traces")]
    return "\n".join(_spaced(parts)).rstrip() + "\n"


def values(task: Mapping[str, Any]) -> str:
    """Perplexity of every row, with its interval, or its standard error, or the reason for neither."""
    other = [metric for metric in ("bits_per_byte",) if metric != task["metric"]]
    other = [m for m in other if any(m in entry["metrics"] for entry in task["rows"])]
    head = ["model", "estimator", "rule", "block", WORDS[task["metric"]], "95 % interval", *(WORDS[m] for m in other)]
    lines = []
    for entry in task["rows"]:
        rest = [f"{_bound(entry)}{entry['metrics'][m]:.4f}" if m in entry["metrics"] else "" for m in other]
        lines.append([entry["model"], *_what(entry), shown(entry), _interval(entry), *rest])
    return _table(head, lines)


def gaps(task: Mapping[str, Any]) -> str:
    """ELBO, DUEL and gap closed of each DUEL row."""
    entries = task["rows"]
    lines = []
    for entry in entries:
        if entry["estimator"] != "duel" or entry["ar"]:
            continue
        bound = entries[entry["elbo"]] if entry["elbo"] is not None else None
        closed = "" if entry["gap_closed"] is None else f"{entry['gap_closed']:.1f} %"
        between = (
            "" if entry["gap_closed_interval"] is None else "{:.1f} to {:.1f} %".format(*entry["gap_closed_interval"])
        )
        gap = "" if entry["gap"] is None else f"{entry['gap']:+.2f}"
        lines.append(
            [
                entry["model"],
                f"`{entry['rule']}`, block {entry['block']}",
                "" if bound is None else shown(bound),
                shown(entry),
                gap,
                closed,
                between,
                entry["gap_closed_reason"],
            ]
        )
    return _table(["model", "rule", "ELBO", "DUEL", "gap to AR", "gap closed", "95 % interval", ""], lines)


def rules(task: Mapping[str, Any], sweep: Mapping[str, Any]) -> str:
    """Each rule's perplexity at its NFE."""
    lines = []
    for family in sweep["families"]:
        for point in family["points"]:
            entry = task["rows"][point["index"]]
            measured = "measured" if family["adaptive"] else ""
            lines.append([f"`{point['rule']}`", f"{entry['nfe_per_token']:.3f}", measured, f"{entry['value']:.2f}"])
    return _table(["rule", "NFE per token", "", "DUEL perplexity"], lines)


def averages(report: Mapping[str, Any]) -> str:
    """Gap closed over tasks, one column a task."""
    names = list(report["tasks"])
    lines = []
    for row in report["averages"]:
        cells = ["" if row["tasks"].get(n) is None else f"{row['tasks'][n]:.1f}" for n in names]
        mean = "" if row["average"] is None else f"{row['average']:.1f} (of {row['averaged']})"
        lines.append([row["model"], row["name"], *cells, mean])
    return _table(["model", "estimator", *names, "average"], lines)


def cost(entries: Sequence[Mapping[str, Any]]) -> str:
    """Time, calls and memory of each run."""
    head = [
        "model",
        "estimator",
        "rule",
        "block",
        "s per token",
        "forwards",
        "rows",
        "peak MiB",
        "x ELBO",
        "x AR",
        "whole run, s",
    ]
    lines, remarks = [], []
    for entry in entries:
        peak, each = entry["peak_memory_bytes"], entry["seconds_per_token"]
        ratios = []
        for key in ("times_elbo", "times_ar"):
            reason = entry[f"{key}_reason"]
            if reason and reason not in remarks:
                remarks.append(reason)
            mark = f" [{remarks.index(reason) + 1}]" if reason else ""
            ratios.append(("" if entry[key] is None else f"{entry[key]:.3g}") + mark)
        lines.append(
            [
                entry["model"],
                f"{entry['name']} ({entry['flag']})" if entry["flag"] else entry["name"],
                f"`{entry['rule']}`" if entry["rule"] else "",
                entry["block"] or "",
                "" if each is None else f"{each:.3g}",
                *("" if entry[key] is None else f"{entry[key]:,}" for key in ("forwards", "rows")),
                "" if peak is None else f"{peak / 2**20:,.0f}",
                *ratios,
                "" if entry["whole_run_seconds"] is None else f"{entry['whole_run_seconds']:.1f}",
            ]
        )
    notes = [f"[{n}] {remark}" for n, remark in enumerate(remarks, 1)]
    return _table(head, lines) + ("\n\n" + "  \n".join(notes) if notes else "")


def traces(found: Sequence[Mapping[str, Any]]) -> str:
    """What each trace holds in a few numbers; the arrays are in report.json."""
    lines = []
    for trace in found:
        corner = trace["by_step"]["mean_nats"] if trace["by_step"] else None
        order = trace.get("left_to_right")
        lines.append(
            [
                trace["label"],
                f"{trace['windows']:,}",
                f"{trace['tokens']:,}",
                "" if trace["mean_nats"] is None else f"{trace['mean_nats']:.3f}",
                "" if corner is None else f"{corner[0]:.3f}",
                "" if corner is None else f"{corner[-1]:.3f}",
                "no order" if not trace["ordered"] else "" if order is None else f"{order:+.2f}",
                trace["flag"],
            ]
        )
    head = ["trace", "windows", "tokens", "nats per token", "at the first step", "at the last", "position x step", ""]
    return _table(head, lines) + (
        "\n\nposition x step: correlation of position in block with step; +1 is left to right, -1 right to left."
    )


def console(report: Mapping[str, Any]) -> str:
    """What the command prints: gaps of each task, else its values, and where the rest is."""
    parts = []
    for name, task in report["tasks"].items():
        parts += [f"{name}, {WORDS[task['metric']]}", values(task), ""]
        if any(entry["estimator"] == "duel" and not entry["ar"] for entry in task["rows"]):
            parts += [gaps(task), ""]
        parts += [*(f"differs: {difference}" for difference in task["differences"]), *task["notes"], ""]
    return "\n".join([*parts, *report["notes"], *(f"wrote {file}" for file in report["files"])])


# ---------------------------------------------------------------- cells


def shown(entry: Mapping[str, Any]) -> str:
    """A value: bounds as <=, the best of a model in bold, what sees the truth with its flag."""
    text = f"{_bound(entry)}{entry['value']:.2f}"
    return f"**{text}**" if entry["best"] else text


def _bound(entry: Mapping[str, Any]) -> str:
    return "<= " if entry["bound"] else ""


def _what(entry: Mapping[str, Any]) -> list[str]:
    return [
        entry["name"].split(",")[0] if entry["estimator"] != "elbo_exact" else "ELBO, all orders",
        f"`{entry['rule']}`" if entry["rule"] else "",
        entry["block"] or "",
    ]


def _interval(entry: Mapping[str, Any]) -> str:
    error = "" if entry["stderr"] is None else f"s.e. {entry['stderr']:.2g} (Monte Carlo)"
    if entry["interval"] is not None:
        between = "{:.2f} to {:.2f}".format(*entry["interval"])
        return f"{between}; {error}" if error else between
    return error or entry["reason"]


def _sweep(sweep: Mapping[str, Any]) -> str:
    return ", ".join(filter(None, [sweep["model"], f"block {sweep['block']}", sweep["variant"]]))


def _figures(report: Mapping[str, Any], about: str) -> list[str]:
    return [f"![{figure['what']}]({figure['file']})" for figure in report["figures"] if figure["about"] == about]


def _list(notes: Sequence[str]) -> str:
    return "\n".join(f"- {note}" for note in notes)


def _table(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """A markdown table; columns of numbers are right-aligned."""
    cells = [[str(cell).replace("|", "\\|") for cell in line] for line in (head, *lines)]
    columns = list(zip(*cells, strict=True))
    wide = [max(3, *map(len, column)) for column in columns]
    right = [bool(column[0]) and all(c.strip("<=*+-. ")[:1].isdigit() for c in column[1:] if c) for column in columns]

    def line(cells: Sequence[str]) -> str:
        aligned = [f"{cell:{'>' if r else '<'}{w}}" for cell, w, r in zip(cells, wide, right, strict=True)]
        return f"| {' | '.join(aligned)} |"

    rule = [f"{'-' * (w - 1)}:" if r else "-" * w for w, r in zip(wide, right, strict=True)]
    return "\n".join([line(cells[0]), line(rule), *map(line, cells[1:])])


def _spaced(parts: Sequence[str]) -> list[str]:
    """Blank lines around headings and tables."""
    found: list[str] = []
    for part in parts:
        if part.startswith(("#", "|", "**")) and found and found[-1]:
            found.append("")
        found.append(part)
        if part.startswith(("#", "!")):
            found.append("")
    return [part for n, part in enumerate(found) if part or n == 0 or found[n - 1]]
