"""The report as markdown: report.md, and what the command prints."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import quote

from lm_eval_duel.estimators.registry import find
from lm_eval_duel.report.gaps import UNCLEAR
from lm_eval_duel.report.headline import WORDS, fixed, number, plus_minus
from lm_eval_duel.report.markdown import Footnotes, bullets, code, listed, plain, spaced
from lm_eval_duel.report.rows import WHOLE
from lm_eval_duel.rules.tables import short
from lm_eval_duel.tables import markdown_table, one_line

SPEC = (  # of a spec, what tells most
    *("estimator", "rule", "block", "elbo_form", "elbo_block", "elbo_eps", "mc_samples"),
    *("pretrained", "revision", "dtype", "windows", "max_length", "special_tokens"),
)
AVERAGED = "tasks where gap closed cannot be told from 0 are in the average: without them it would be too high"
Entry = Mapping[str, Any]


def markdown(report: Mapping[str, Any]) -> str:
    """report.md."""
    parts = ["# How far from autoregressive, and how much of it is the yardstick"]
    parts += [listed(line for task in report["tasks"].values() for line in task["headlines"])]
    parts += [bullets(report["notes"])]
    for name, task in report["tasks"].items():
        said = "" if task["documents"] is None else f", {task['documents']} documents"
        parts += [
            f"## {plain(name)}: {WORDS[task['metric']]}{said}",
            values(task),
            *_figures(report, name, "perplexity"),
        ]
        if task["differences"]:
            said = "Compared as published, although these differ" if task["as_published"] else "These differ"
            parts += [f"**{said}:**", bullets(task["differences"])]
        if any(entry["estimator"] == "duel" and not entry["ar"] for entry in task["rows"]):
            parts += ["### Gap to the autoregressive model", gaps(task)]
        for sweep in task["rules"]:
            parts += [f"### Rules against NFE: {plain(_sweep(sweep))}", rules(task, sweep)]
        parts += [*_figures(report, name, "rules"), "### Notes", bullets(task["notes"])]
    if len(report["tasks"]) > 1 and any_closed(report):
        parts += ["## Gap closed over tasks, %", averages(report)]
    for found in report["accuracies"]:
        parts += [f"## {plain(_accuracy_title(found))}", accuracies(found)]
    if report["cost"]:
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
        rest = [_value(entry, m) if m in entry["metrics"] else "" for m in other]
        error = notes.mark(entry["stderr_reason"]) if entry["stderr"] is None else f"{entry['stderr']:.2g}"
        block = WHOLE if entry["block"] == "none" else entry["block"] or ""
        what = [plain(entry["model"]), _method(entry), _rule(entry), plain(block)]
        lines.append([*what, shown(entry, metric), _interval(entry, metric, notes), error, *rest])
    return notes.under(markdown_table([*head, *(WORDS[m] for m in other)], lines))


def gaps(task: Mapping[str, Any]) -> str:
    """ELBO, DUEL, their gaps to the AR model, and gap closed, of each DUEL row."""
    entries, metric, notes = task["rows"], task["metric"], Footnotes()
    lines = []
    for entry in entries:
        if entry["estimator"] != "duel" or entry["ar"]:
            continue
        elbo = entries[entry["elbo"]] if entry["elbo"] is not None else None
        closed = UNCLEAR if entry["distinguishable"] is False else percent(entry["gap_closed"])
        between = _between(entry["gap_closed_interval"], lambda value: fixed(value, 1), " %")
        if not between and entry["gap_closed_stderr"] is not None:
            closed += f" +- {fixed(entry['gap_closed_stderr'], 1)}"
        mark = notes.mark(entry["gap_closed_reason"])
        lines.append(
            [
                plain(entry["model"]),
                ", ".join(filter(None, [_rule(entry), *map(plain, entry["name"].split(", ")[2:])])),
                "" if elbo is None else shown(elbo, metric),
                shown(entry, metric),
                "" if elbo is None else f"{_gap(elbo, metric)}{plus_minus(elbo['stderr'], metric)}",
                _gap(entry, metric),
                _between(entry["gap_interval"], lambda value: number(value, metric)),
                closed if between else " ".join(filter(None, [closed, mark])),
                " ".join([between, mark]).strip() if between else "",
            ]
        )
    head = ["model", "rule", "ELBO", "DUEL", "ELBO's gap", "DUEL's gap", "95 % interval", "gap closed", "95 % interval"]
    return notes.under(markdown_table(head, lines))


def rules(task: Mapping[str, Any], sweep: Mapping[str, Any]) -> str:
    """Each rule's perplexity at its NFE."""
    lines = []
    for family in sweep["families"]:
        for point in family["points"]:
            entry = task["rows"][point["index"]]
            measured = " (adaptive)" if family["adaptive"] else ""
            value = number(entry["value"], task["metric"])
            lines.append([f"{_rule(entry)}{measured}", f"{entry['nfe_per_token']:.3f}", value])
    return markdown_table(["rule", "NFE per token", f"DUEL, {WORDS[task['metric']]}"], lines)


def averages(report: Mapping[str, Any]) -> str:
    """Gap closed over tasks, one column a task."""
    names, notes = list(report["tasks"]), Footnotes()
    lines = []
    for row in report["averages"]:
        cells = [UNCLEAR if n in row["unclear"] else _closed(row["tasks"].get(n), row["stderrs"].get(n)) for n in names]
        mean = UNCLEAR if row["average_unclear"] else _closed(row["average"], row["average_stderr"])
        mark = notes.mark(AVERAGED) if row["unclear"] and mean else ""
        mean = f"{mean} (of {row['averaged']}) {mark}".strip() if mean else ""
        lines.append([plain(row["model"]), plain(row["name"]), *cells, mean])
    return notes.under(markdown_table(["model", "estimator", *map(plain, names), "average"], lines))


def any_closed(report: Mapping[str, Any]) -> bool:
    """Whether there is a gap closed on any task."""
    return any(value is not None for row in report["averages"] for value in row["tasks"].values())


def _closed(value: float | None, error: float | None) -> str:
    return "" if value is None else fixed(value, 1) + ("" if error is None else f" +- {fixed(error, 1)}")


def accuracies(found: Mapping[str, Any]) -> str:
    """What is no perplexity of a task, each with the harness's standard error."""
    metrics, notes = found["metrics"], Footnotes()
    lines = []
    for entry in found["rows"]:
        cells = [_score(entry["scores"].get(metric)) for metric in metrics]
        mark = notes.mark(entry["reason"])
        what = [plain(entry["model"]), plain(entry["name"]), _rule(entry), plain(entry["block"] or "")]
        lines.append([*what, *(f"{cell} {mark}".strip() for cell in cells)])
    return notes.under(markdown_table(["model", "estimator", "rule", "block", *map(plain, metrics)], lines))


def _score(score: Mapping[str, Any] | None) -> str:
    if score is None:
        return ""
    return f"{score['value']:.4f} +- " + ("?" if score["stderr"] is None else f"{score['stderr']:.4f}")


def _accuracy_title(found: Mapping[str, Any]) -> str:
    said = "" if found["documents"] is None else f", {found['documents']} documents"
    return f"{found['task']}: {', '.join(found['metrics'])}, +- standard error{said}{found['apart']}"


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
                plain(entry["model"]),
                plain(f"{entry['name']} ({entry['flag']})" if entry["flag"] else entry["name"]),
                _rule(entry),
                WHOLE if entry["block"] == "none" else plain(entry["block"] or ""),
                "" if each is None else f"{each:.3g}",
                *("" if entry[key] is None else f"{entry[key]:,}" for key in ("forwards", "rows")),
                "" if peak is None else f"{peak / 2**20:,.0f}",
                *ratios,
                "" if entry["whole_run_seconds"] is None else f"{entry['whole_run_seconds']:.1f}",
            ]
        )
    return notes.under(markdown_table([*head, "x ELBO", "x AR", "whole run, s"], lines))


def traces(found: Sequence[Mapping[str, Any]]) -> str:
    """What each trace holds in a few numbers; the arrays are in report.json."""
    lines = []
    for trace in found:
        means = trace["by_step"]["mean_nats"] if trace["by_step"] else None
        order = trace.get("left_to_right")
        lines.append(
            [
                plain(trace["label"]),
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
    return f"{markdown_table(head, lines)}\n\n{said}"


def files(results: Sequence[Mapping[str, Any]]) -> str:
    """The results that were read, with what defines their numbers."""
    folder = os.path.commonpath([os.path.dirname(result["file"]) for result in results])
    lines = []
    for result in results:
        spec = ", ".join(f"{key}={result['spec'][key]}" for key in SPEC if result["spec"].get(key, "none") != "none")
        name = f"{result['model']} (AR baseline)" if result["ar"] else result["model"]
        lines.append(
            list(map(plain, [os.path.relpath(result["file"], folder), name, result["fingerprint"] or "", spec]))
        )
    return f"Below {plain(folder)}:\n\n{markdown_table(['file', 'model', 'fingerprint', 'spec'], lines)}"


def console(report: Mapping[str, Any]) -> str:
    """What the command prints: headlines, values, and where the rest is."""
    parts = [line.replace("**", "") for task in report["tasks"].values() for line in task["headlines"]]
    for name, task in report["tasks"].items():
        parts += [f"{one_line(name)}, {WORDS[task['metric']]}", values(task)]
        parts += ["\n".join(f"differs: {difference}" for difference in task["differences"])]
    for found in report["accuracies"]:
        parts += [one_line(_accuracy_title(found)), accuracies(found)]
    parts += ["\n".join(map(one_line, report["notes"])), f"wrote to {report['folder']}: {', '.join(report['files'])}"]
    return spaced(parts).rstrip("\n")


# ---------------------------------------------------------------- cells


def shown(entry: Entry, metric: str) -> str:
    """A value: bounds as <=, with a Monte Carlo error beside it, the best of a model in bold."""
    text = f"{_bound(entry)}{number(entry['value'], metric)}{_error(entry, entry['stderr'], metric)}"
    return f"**{text}**" if entry["best"] else text


def percent(value: float | None) -> str:
    """A share with its sign."""
    return "" if value is None else f"{fixed(value, 1)} %"


def _value(entry: Entry, metric: str) -> str:
    error = _error(entry, entry["stderrs"].get(metric), metric)
    return f"{_bound(entry)}{number(entry['metrics'][metric], metric)}{error}"


def _error(entry: Entry, error: float | None, metric: str) -> str:
    """The error of a Monte Carlo value; `?` where it is not known."""
    return " +- ?" if error is None and entry["stderr_reason"] else plus_minus(error, metric)


def _bound(entry: Entry) -> str:
    return "<= " if entry["bound"] else ""


def _method(entry: Entry) -> str:
    """The estimator; the baseline, a bound that is none and other specs say so."""
    said = ", ".join(filter(None, ["AR baseline" if entry["ar"] else "", plain(entry["aside"])]))
    return f"{find(entry['estimator']).title}{f' ({said})' if said else ''}"


def _rule(entry: Entry) -> str:
    return code(short(entry["rule"])) if entry["rule"] else ""


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
    return [f"![{plain(figure['what'])}]({quote(figure['file'])})" for figure in drawn]
