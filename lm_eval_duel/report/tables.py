"""The report as markdown: report.md, and what the command prints."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from lm_eval_duel.report.headline import WORDS, fixed, number
from lm_eval_duel.report.markdown import Footnotes, bullets, spaced, table
from lm_eval_duel.report.rows import NAMES, WHOLE, short

LAW = (  # of a law, what tells most
    *("estimator", "rule", "block", "elbo_form", "elbo_block", "elbo_eps", "mc_samples"),
    *("pretrained", "revision", "dtype", "windows", "max_length", "framing"),
)
Entry = Mapping[str, Any]


def markdown(report: Mapping[str, Any]) -> str:
    """report.md."""
    parts = ["# How far from autoregressive, and how much of it is the yardstick"]
    parts += [bullets([line for task in report["tasks"].values() for line in task["headlines"]])]
    parts += [bullets(report["notes"])]
    for name, task in report["tasks"].items():
        said = "" if task["documents"] is None else f", {task['documents']} documents"
        parts += [f"## {name}: {WORDS[task['metric']]}{said}", values(task), *_figures(report, name, "perplexity")]
        if task["differences"]:
            listed = "Compared as published, although these differ" if task["as_published"] else "These differ"
            parts += [f"**{listed}:**", bullets(task["differences"])]
        if any(entry["estimator"] == "duel" and not entry["ar"] for entry in task["rows"]):
            parts += ["### Gap to the autoregressive model", gaps(task)]
        for sweep in task["rules"]:
            parts += [f"### Rules against NFE: {_sweep(sweep)}", rules(task, sweep)]
        parts += [*_figures(report, name, "rules"), "### Notes", bullets(task["notes"])]
    if len(report["tasks"]) > 1 and report["averages"]:
        parts += ["## Gap closed over tasks, %", averages(report)]
    parts += ["## Cost", cost(report["cost"])]
    if report["traces"]:
        parts += ["## Orders, from traces", traces(report["traces"]), *_figures(report, "traces", "trace")]
    parts += ["## Files", files(report["results"])]
    return spaced(parts)


def values(task: Mapping[str, Any]) -> str:
    """Perplexity of every row, with its interval, or its standard error, or the number of a reason for neither."""
    metric, notes = task["metric"], Footnotes()
    head = ["model", "estimator", "rule", "block", WORDS[metric], "95 % interval", "s.e. (Monte Carlo)"]
    other = [] if metric == "bits_per_byte" else ["bits_per_byte"]
    lines = []
    for entry in task["rows"]:
        rest = [f"{_bound(entry)}{number(entry['metrics'][m], m)}" if m in entry["metrics"] else "" for m in other]
        error = "" if entry["stderr"] is None else f"{entry['stderr']:.2g}"
        block = WHOLE if entry["block"] == "none" else entry["block"] or ""
        what = [entry["model"], _method(entry), _rule(entry), block]
        lines.append([*what, shown(entry, metric), _interval(entry, metric, notes), error, *rest])
    return notes.under(table([*head, *(WORDS[m] for m in other)], lines))


def gaps(task: Mapping[str, Any]) -> str:
    """ELBO, DUEL, their gaps to the AR model, and gap closed, of each DUEL row."""
    entries, metric, notes = task["rows"], task["metric"], Footnotes()
    lines = []
    for entry in entries:
        if entry["estimator"] != "duel" or entry["ar"]:
            continue
        elbo = entries[entry["elbo"]] if entry["elbo"] is not None else None
        closed = "" if entry["gap_closed"] is None else f"{fixed(entry['gap_closed'], 1)} %"
        between = _between(entry["gap_closed_interval"], lambda value: fixed(value, 1), " %")
        mark = notes.mark(entry["gap_closed_reason"])
        lines.append(
            [
                entry["model"],
                ", ".join(filter(None, [_rule(entry), *entry["name"].split(", ")[2:]])),
                "" if elbo is None else shown(elbo, metric),
                shown(entry, metric),
                "" if elbo is None else _gap(elbo, metric),
                _gap(entry, metric),
                _between(entry["gap_interval"], lambda value: number(value, metric)),
                closed if between else " ".join(filter(None, [closed, mark])),
                " ".join([between, mark]).strip() if between else "",
            ]
        )
    head = ["model", "rule", "ELBO", "DUEL", "ELBO's gap", "DUEL's gap", "95 % interval", "gap closed", "95 % interval"]
    return notes.under(table(head, lines))


def rules(task: Mapping[str, Any], sweep: Mapping[str, Any]) -> str:
    """Each rule's perplexity at its NFE."""
    lines = []
    for family in sweep["families"]:
        for point in family["points"]:
            entry = task["rows"][point["index"]]
            measured = " (adaptive)" if family["adaptive"] else ""
            value = number(entry["value"], task["metric"])
            lines.append([f"{_rule(entry)}{measured}", f"{entry['nfe_per_token']:.3f}", value])
    return table(["rule", "NFE per token", f"DUEL, {WORDS[task['metric']]}"], lines)


def averages(report: Mapping[str, Any]) -> str:
    """Gap closed over tasks, one column a task."""
    names = list(report["tasks"])
    lines = []
    for row in report["averages"]:
        cells = ["" if row["tasks"].get(n) is None else fixed(row["tasks"][n], 1) for n in names]
        mean = "" if row["average"] is None else f"{fixed(row['average'], 1)} (of {row['averaged']})"
        lines.append([row["model"], row["name"], *cells, mean])
    return table(["model", "estimator", *names, "average"], lines)


def cost(entries: Sequence[Entry]) -> str:
    """Time, calls and memory of each run."""
    head = ["model", "estimator", "rule", "block", "s per token", "forwards", "rows", "peak MiB"]
    notes = Footnotes()
    lines = []
    for entry in entries:
        peak, each = entry["peak_memory_bytes"], entry["seconds_per_token"]
        ratios = [
            f"{'' if entry[key] is None else format(entry[key], '.3g')} {notes.mark(entry[f'{key}_reason'])}".strip()
            for key in ("times_elbo", "times_ar")
        ]
        lines.append(
            [
                entry["model"],
                f"{entry['name']} ({entry['flag']})" if entry["flag"] else entry["name"],
                _rule(entry),
                WHOLE if entry["block"] == "none" else entry["block"] or "",
                "" if each is None else f"{each:.3g}",
                *("" if entry[key] is None else f"{entry[key]:,}" for key in ("forwards", "rows")),
                "" if peak is None else f"{peak / 2**20:,.0f}",
                *ratios,
                "" if entry["whole_run_seconds"] is None else f"{entry['whole_run_seconds']:.1f}",
            ]
        )
    return notes.under(table([*head, "x ELBO", "x AR", "whole run, s"], lines))


def traces(found: Sequence[Mapping[str, Any]]) -> str:
    """What each trace holds in a few numbers; the arrays are in report.json."""
    lines = []
    for trace in found:
        means = trace["by_step"]["mean_nats"] if trace["by_step"] else None
        order = trace.get("left_to_right")
        lines.append(
            [
                trace["label"],
                f"{trace['windows']:,}",
                f"{trace['tokens']:,}",
                "" if trace["mean_nats"] is None else f"{trace['mean_nats']:.3f}",
                "" if means is None else f"{means[0]:.3f}",
                "" if means is None else f"{means[-1]:.3f}",
                "no order" if not trace["ordered"] else "" if order is None else fixed(order, 2, "+"),
                trace["flag"],
            ]
        )
    head = ["trace", "windows", "tokens", "nats per token", "at the first step", "at the last", "position x step", " "]
    said = "position x step: correlation of position in block with step; +1 is left to right, -1 right to left."
    return f"{table(head, lines)}\n\n{said}"


def files(results: Sequence[Mapping[str, Any]]) -> str:
    """The results that were read, with what defines their numbers."""
    folder = os.path.commonpath([os.path.dirname(result["file"]) for result in results])
    lines = []
    for result in results:
        law = ", ".join(f"{key}={result['law'][key]}" for key in LAW if result["law"].get(key, "none") != "none")
        name = f"{result['model']} (AR baseline)" if result["ar"] else result["model"]
        lines.append([os.path.relpath(result["file"], folder), name, result["fingerprint"] or "", law])
    return f"Below {folder}:\n\n{table(['file', 'model', 'fingerprint', 'law'], lines)}"


def console(report: Mapping[str, Any]) -> str:
    """What the command prints: headlines, values, and where the rest is."""
    parts = [line.replace("**", "") for task in report["tasks"].values() for line in task["headlines"]]
    for name, task in report["tasks"].items():
        parts += [f"{name}, {WORDS[task['metric']]}", values(task)]
        parts += ["\n".join(f"differs: {difference}" for difference in task["differences"])]
    parts += ["\n".join(report["notes"]), f"wrote to {report['folder']}: {', '.join(report['files'])}"]
    return spaced(parts).rstrip("\n")


# ---------------------------------------------------------------- cells


def shown(entry: Entry, metric: str) -> str:
    """A value: bounds as <=, the best of a model in bold."""
    text = f"{_bound(entry)}{number(entry['value'], metric)}"
    return f"**{text}**" if entry["best"] else text


def _bound(entry: Entry) -> str:
    return "<= " if entry["bound"] else ""


def _method(entry: Entry) -> str:
    """The estimator; the baseline, a bound that is none and other laws say so."""
    said = ", ".join(filter(None, ["AR baseline" if entry["ar"] else "", entry["aside"]]))
    return f"{NAMES[entry['estimator']]}{f' ({said})' if said else ''}"


def _rule(entry: Entry) -> str:
    return f"`{short(entry['rule'])}`" if entry["rule"] else ""


def _gap(entry: Entry, metric: str) -> str:
    return "" if entry["gap"] is None else f"{'+' if entry['gap'] > 0 else ''}{number(entry['gap'], metric)}"


def _between(interval: Sequence[float] | None, told: Any, unit: str = "") -> str:
    return "" if interval is None else f"{told(interval[0])} to {told(interval[1])}{unit}"


def _interval(entry: Entry, metric: str, notes: Footnotes) -> str:
    if entry["interval"] is not None:
        return _between(entry["interval"], lambda value: number(value, metric))
    error = "" if entry["window_stderr"] is None else f"s.e. {entry['window_stderr']:.2g} over windows"
    return f"{error} {notes.mark(entry['reason'])}".strip()


def _sweep(sweep: Mapping[str, Any]) -> str:
    return ", ".join(filter(None, [sweep["model"], f"block {sweep['block']}", sweep["variant"]]))


def _figures(report: Mapping[str, Any], about: str, kind: str) -> list[str]:
    drawn = [figure for figure in report["figures"] if (figure["about"], figure["kind"]) == (about, kind)]
    return [f"![{figure['what']}]({figure['file']})" for figure in drawn]
