"""Bodies of the paper's LaTeX tables: the rows between \\toprule and \\bottomrule.

Columns without a value are left out.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from lm_eval_duel.estimators.registry import find
from lm_eval_duel.report import pairs
from lm_eval_duel.report.cells import unknown
from lm_eval_duel.report.gaps import UNCLEAR
from lm_eval_duel.report.headline import WORDS, fixed
from lm_eval_duel.report.headline import number as decimals
from lm_eval_duel.report.latex_text import (
    PM,
    Entry,
    bare,
    between,
    body,
    escape,
    grouped,
    interval,
    nats,
    number,
    percent,
    row,
    rule_name,
    with_interval,
)
from lm_eval_duel.report.names import free, safe_name, subject
from lm_eval_duel.report.read import NO_CACHE
from lm_eval_duel.report.rows import SEES_TRUTH, WHOLE

METHODS = {  # estimators that the paper does not print by their own name
    "duel": r"\textsc{DUEL}",
    "two_phase": r"\textsc{DUEL} estimate",
}
NEAR = 0.15  # relative distance up to which a value counts as one at a column's NFE
LEVEL = r"95\% interval"


def bodies(report: Mapping[str, Any]) -> dict[str, str]:
    """The body of every table of a report, by file name."""
    files: dict[str, str] = {}

    def add(stem: str, body: str) -> None:
        files[free(stem, ".tex", files)] = body

    if len(report["tasks"]) > 1:
        add("perplexity", perplexity(report["tasks"]))
        if any(value is not None for row in report["averages"] for value in row["tasks"].values()):
            add("gap_closed", gap_closed(report))
    for name, task in report["tasks"].items():
        safe = safe_name(name)
        if any(duels(task)):
            add(f"gap_{safe}", gap(task))
        add(f"methods_{safe}", methods(task))
        if any(entry["cache_cost"] for entry in task["rows"]):
            add(f"cache_{safe}", cache_costs(task))
        if task["pairs"]:
            add(f"pairs_{safe}", differences(task))
        for sweep in task["rules"]:
            end = "" if len(task["rules"]) == 1 else f"_{subject(sweep['title'])}"
            add(f"rules_{safe}{end}", rules(task, sweep))
    for table in report["accuracies"]:
        add(f"accuracy_{safe_name(table['task'])}", accuracies(table))
    return files


def gap(task: Mapping[str, Any]) -> str:
    """Model & ELBO & DUEL & Gap Closed."""
    entries, metric = task["rows"], task["metric"]
    lines = []
    for entry, cache in zip(duels(task), caches(duels(task)), strict=True):
        elbo = "" if entry["elbo"] is None else number(entries[entry["elbo"]], metric)
        mine = [other for other in duels(task) if other["model"] == entry["model"]]
        model = ", ".join(filter(None, [escape(entry["model"]), apart(entry, mine)]))
        closed = (
            UNCLEAR if entry["distinguishable"] is False else percent(entry["gap_closed"], entry["gap_closed_stderr"])
        )
        limits = between(entry["gap_closed_interval"], lambda value: fixed(value, 1))
        lines.append([model, cache, elbo, number(entry, metric), interval(entry, metric), closed, limits])
    head, lines = bare(["Model", "Cache", "ELBO", "DUEL", LEVEL, "Gap Closed", LEVEL], lines)
    return body(f"{' & '.join(head)}   ({WORDS[metric]})", [row(*line) for line in lines])


def methods(task: Mapping[str, Any]) -> str:
    """Model & Method & Rule & Perplexity."""
    cache_of = dict(zip(map(id, task["rows"]), caches(task["rows"]), strict=True))
    tables, lines = [], []
    for entries in _models(task["rows"]):
        for entry in entries:
            alike = [other for other in entries if other["estimator"] == entry["estimator"]]
            rule = rf"\emph{{{SEES_TRUTH}}}" if entry["flag"] else rule_name(entry["rule"]) if entry["rule"] else ""
            labels = ", ".join(filter(None, [rule, apart(entry, alike, with_rule=False)])) or "---"
            values = [number(entry, task["metric"]), interval(entry, task["metric"])]
            lines.append([_method(entry), labels, cache_of[id(entry)], *values])
        tables.append((escape(entries[0]["model"]), len(entries)))
    head, lines = bare(["Method", "Unmasking rule", "Cache", WORDS[task["metric"]], LEVEL], lines)
    left = iter(lines)
    groups = [grouped(model, [next(left) for _ in range(size)]) for model, size in tables]
    return body(f"Model & {' & '.join(head)}", *groups)


def cache_costs(task: Mapping[str, Any]) -> str:
    """Model & Method & Rule & Block & Cache & values without and with it & their paired difference & interval."""
    entries, metric = task["rows"], task["metric"]
    lines = []
    for position, entry in enumerate(entries):
        if (cost := entry["cache_cost"]) is None:
            continue
        rule = rule_name(entry["rule"]) if entry["rule"] else ""
        both = cost["second"], position
        values = ["" if n is None else number({**entries[n], "best": False}, metric) for n in both]
        labels = [escape(entry["model"]), _method(entry), rule, _block(entry), escape(entry["cache"])]
        limits = between(cost["interval"], lambda value: fixed(value, 4))
        lines.append([*labels, *values, nats(cost["difference"]), limits])
    heads = ["no cache", "with the cache", f"difference, nats per {pairs.unit(metric)}", LEVEL]
    head, lines = bare(["Model", "Method", "Unmasking rule", "Block", "Cache", *heads], lines)
    return body(f"{' & '.join(head)}   ({WORDS[metric]})", [row(*line) for line in lines])


def differences(task: Mapping[str, Any]) -> str:
    """Model & Block & Cache & first & second & their paired difference & interval & verdict."""
    entries, cached = task["rows"], caches(task["rows"])
    lines = []
    for pair in task["pairs"]:
        first, second = (entries[pair[key]] for key in ("first", "second"))
        shared = [escape(first["model"]), _block(first), cached[pair["first"]]]
        same = [first[key] == second[key] for key in ("model", "block", "cache")]
        labels = [label if equal else "" for label, equal in zip(shared, same, strict=True)]
        limits = between(pair["interval"], lambda value: fixed(value, 4))
        lines.append([*labels, *map(escape, pair["names"]), nats(pair["difference"]), limits, escape(pair["verdict"])])
    labels = ["Model", "Block", "Cache", "First", "Second"]
    head, lines = bare([*labels, f"first - second, nats per {pairs.unit(task['metric'])}", LEVEL, "Verdict"], lines)
    return body(" & ".join(head), [row(*line) for line in lines])


def rules(task: Mapping[str, Any], sweep: Mapping[str, Any]) -> str:
    """Rule & perplexity by NFE: a column for each NFE of the fixed rules.

    Adaptive rules are placed in the nearest column, with their measured NFE.
    """
    entries = task["rows"]
    fixed_rules = [point for family in sweep["families"] if not family["adaptive"] for point in family["points"]]
    anchors = fixed_rules or [point for family in sweep["families"] for point in family["points"]]
    columns = sorted({round(entries[point["index"]]["nfe_per_token"], 3) for point in anchors})
    cells: list[dict[int, Entry]] = []
    for family in sweep["families"]:
        placed: dict[int, Entry] = {}
        for point in family["points"]:
            entry = entries[point["index"]]
            at = min(range(len(columns)), key=lambda at: _distance(entry, columns[at]))
            if at not in placed or _distance(entry, columns[at]) < _distance(placed[at], columns[at]):
                placed[at] = entry
        cells.append(placed)
    near = [{at: e for at, e in line.items() if _distance(e, columns[at]) <= math.log1p(NEAR)} for line in cells]
    best = {at: min((line[at]["value"] for line in near if at in line), default=None) for at in range(len(columns))}
    lines = []
    for family, placed, close in zip(sweep["families"], cells, near, strict=True):
        shown = []
        for at in range(len(columns)):
            text = decimals(placed[at]["value"], task["metric"]) if at in placed else ""
            text = rf"\textbf{{{text}}}" if at in close and placed[at]["value"] == best[at] else text
            limits = interval(placed[at], task["metric"]) if at in placed else ""
            text += f" ({placed[at]['nfe_per_token']:.3f})" if at in placed and family["adaptive"] else ""
            shown.append(text + (rf" {{\scriptsize {limits}}}" if limits else ""))
        lines.append(row(rule_name(family["family"]), *shown))
    head = " & ".join(f"{column:g}" for column in columns)
    legend = f"{WORDS[task['metric']]} by NFE per token; dagger: adaptive, in the nearest column, with its own NFE"
    cache = "" if sweep["cache"] in (None, NO_CACHE) else f"; cache={escape(sweep['cache'])}"
    return body(f"Unmasking rule & {head}   ({legend}{cache})", lines)


def _distance(entry: Entry, nfe: float) -> float:
    return abs(math.log(entry["nfe_per_token"] / nfe))


def perplexity(tasks: Mapping[str, Any]) -> str:
    """Model & Method & one column per task."""
    lines: dict[str, dict[tuple, dict[str, Entry]]] = {}
    for name, task in tasks.items():
        for entry in task["rows"]:
            lines.setdefault(entry["model"], {}).setdefault((entry["estimator"], entry["name"]), {})[name] = entry
    groups = []
    for model, methods in lines.items():
        lines_of_model = []
        firsts = [next(iter(cells.values())) for cells in methods.values()]
        for entry, cells in zip(firsts, methods.values(), strict=True):
            alike = [other for other in firsts if other["estimator"] == entry["estimator"]]
            method = _method(entry) + (f" ({SEES_TRUTH})" if entry["flag"] else "")
            cache = caches(firsts)[firsts.index(entry)]
            cache = f"cache={cache}" if cache not in ("", NO_CACHE) else ""
            method = ", ".join(filter(None, [method, apart(entry, alike), cache]))
            values = [with_interval(cells[n], tasks[n]["metric"]) if n in cells else "" for n in tasks]
            lines_of_model.append([method, *values])
        groups.append(grouped(escape(model), lines_of_model))
    heads = [f"{escape(name)}, {WORDS[task['metric']]}" for name, task in tasks.items()]
    return body(f"Model & Method & {' & '.join(heads)}", *groups)


def gap_closed(report: Mapping[str, Any]) -> str:
    """Dataset & one column per model; tasks without a gap to close are left out, as in the paper."""
    columns = report["averages"]
    columns = [line for line in columns if line["unclear"] or any(v is not None for v in line["tasks"].values())]
    names = [
        name
        for name in report["tasks"]
        if any(name in line["unclear"] or line["tasks"].get(name) is not None for line in columns)
    ]

    def cell(line: Mapping[str, Any], name: str) -> str:
        return UNCLEAR if name in line["unclear"] else percent(line["tasks"].get(name), line["stderrs"].get(name))

    def average(line: Mapping[str, Any]) -> str:
        return UNCLEAR if line["average_unclear"] else percent(line["average"], line["average_stderr"])

    lines = [row(escape(name), *(cell(column, name) for column in columns)) for name in names]
    last = [row(r"\textit{Average}", *map(average, columns))]
    heads = [escape(f"{column['model']}, {column['name']}") for column in columns]
    return body(f"Dataset & {' & '.join(heads)}", lines, last)


def accuracies(table: Mapping[str, Any]) -> str:
    """Model & Method & one column per metric, with its standard error."""
    lines = []
    for entry, cache in zip(table["rows"], caches(table["rows"]), strict=True):
        rule = rule_name(entry["rule"]) if entry["rule"] else ""
        block = f"$L'$={escape(entry['block'])}" if entry["block"] not in (None, "none") else ""
        method = ", ".join(filter(None, [_method(entry), rule, block]))
        scores = [_score(entry["scores"].get(metric)) for metric in table["metrics"]]
        lines.append([escape(entry["model"]), method, cache, *scores])
    head, lines = bare(["Model", "Method", "Cache", *map(escape, table["metrics"])], lines)
    return body(f"{' & '.join(head)}   ({escape(table['task'])})", [row(*line) for line in lines])


# ---------------------------------------------------------------- cells


def duels(task: Mapping[str, Any]) -> list[Entry]:
    """The DUEL rows of a task."""
    return [entry for entry in task["rows"] if find(entry["estimator"]).follows_rule and not entry["ar"]]


def caches(entries: Sequence[Entry]) -> list[str]:
    """The column `Cache` of a table: empty if no row is under a cache."""
    used = any(entry["cache"] not in (None, NO_CACHE) for entry in entries)
    return [escape(entry["cache"] or "") if used else "" for entry in entries]


def _block(entry: Entry) -> str:
    return WHOLE if entry["block"] == "none" else escape(entry["block"] or "")


def apart(entry: Entry, alike: Sequence[Entry], with_rule: bool = True) -> str:
    """What distinguishes an entry from others in a table: rule and block if they differ, and special remarks."""
    parts = []
    if with_rule and entry["rule"] and len(alike) > 1:
        parts.append(rule_name(entry["rule"]))
    if len({other["block"] for other in alike}) > 1:
        parts.append(WHOLE if entry["block"] == "none" else f"$L'$={escape(entry['block'] or '')}")
    return ", ".join([*parts, *map(escape, filter(None, [entry["aside"], unknown(entry)]))])


def _method(entry: Entry) -> str:
    return METHODS.get(entry["estimator"]) or escape(find(entry["estimator"]).display)


def _models(entries: Sequence[Entry]) -> list[list[Entry]]:
    """Entries by model; the AR baseline and the oracle each form a group of their own."""
    groups: dict[tuple, list[Entry]] = {}
    for entry in entries:
        groups.setdefault((entry["model"], entry["ar"], entry["flag"]), []).append(entry)
    return list(groups.values())


def _score(score: Mapping[str, Any] | None) -> str:
    if score is None:
        return ""
    return f"{score['value']:.4f}{PM}" + ("?" if score["stderr"] is None else f"{score['stderr']:.4f}")
