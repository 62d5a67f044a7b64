"""Bodies of the paper's LaTeX tables: the rows between \\toprule and \\bottomrule."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from lm_eval_duel.estimators.registry import find
from lm_eval_duel.report.gaps import UNCLEAR
from lm_eval_duel.report.headline import WORDS, fixed, plus_minus
from lm_eval_duel.report.headline import number as decimals
from lm_eval_duel.report.names import free, safe_name
from lm_eval_duel.report.rows import SEES_TRUTH, WHOLE
from lm_eval_duel.rules.tables import adaptive, kind, label, short
from lm_eval_duel.tables import one_line

DAGGER = r"$^\dagger$"  # adaptive NFE
METHODS = {
    "duel": r"\textsc{DUEL}",
    "two_phase": r"\textsc{DUEL} estimate",
}  # estimators that the paper does not print by their own name
GREEK = {"mu": r"\mu", "nu": r"\nu", "gamma": r"\gamma"}
LEQ, PM = r"$\leq$", r" $\pm$ "  # before a standard error: Monte Carlo, or for accuracies over documents
SPECIAL = {
    **{"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "`": r"\textasciigrave{}"},
    **{"<": r"\textless{}", ">": r"\textgreater{}", "|": r"\textbar{}"},
    **{"[": "{[}", "*": "{*}"},  # arguments of the \\ that ends the row before
}
NEAR = 0.15  # relative distance up to which a value counts as one at a column's NFE
Entry = Mapping[str, Any]


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
        for number, sweep in enumerate(task["rules"], 1):
            add(f"rules_{safe}" + ("" if len(task["rules"]) == 1 else f"_{number}"), rules(task, sweep))
    for table in report["accuracies"]:
        add(f"accuracy_{safe_name(table['task'])}", accuracies(table))
    return files


def gap(task: Mapping[str, Any]) -> str:
    """Model & ELBO & DUEL & Gap Closed."""
    entries, metric = task["rows"], task["metric"]
    lines = []
    for entry in duels(task):
        elbo = "" if entry["elbo"] is None else number(entries[entry["elbo"]], metric)
        mine = [other for other in duels(task) if other["model"] == entry["model"]]
        model = ", ".join(filter(None, [escape(entry["model"]), apart(entry, mine)]))
        closed = (
            UNCLEAR if entry["distinguishable"] is False else percent(entry["gap_closed"], entry["gap_closed_stderr"])
        )
        lines.append(_row(model, elbo, number(entry, metric), closed))
    return _body(f"Model & ELBO & DUEL & Gap Closed   ({WORDS[metric]})", lines)


def methods(task: Mapping[str, Any]) -> str:
    """Model & Method & Rule & Perplexity."""
    groups = []
    for entries in _models(task["rows"]):
        lines = []
        for entry in entries:
            alike = [other for other in entries if other["estimator"] == entry["estimator"]]
            rule = rf"\emph{{{SEES_TRUTH}}}" if entry["flag"] else rule_name(entry["rule"]) if entry["rule"] else ""
            said = ", ".join(filter(None, [rule, apart(entry, alike, with_rule=False)])) or "---"
            lines.append([_method(entry), said, number(entry, task["metric"])])
        groups.append(_grouped(escape(entries[0]["model"]), lines))
    return _body(f"Model & Method & Unmasking rule & {WORDS[task['metric']]}", *groups)


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
    near = [{at: e for at, e in row.items() if _distance(e, columns[at]) <= math.log1p(NEAR)} for row in cells]
    best = {at: min((row[at]["value"] for row in near if at in row), default=None) for at in range(len(columns))}
    lines = []
    for family, row, close in zip(sweep["families"], cells, near, strict=True):
        shown = []
        for at in range(len(columns)):
            text = decimals(row[at]["value"], task["metric"]) if at in row else ""
            text = rf"\textbf{{{text}}}" if at in close and row[at]["value"] == best[at] else text
            shown.append(text + (f" ({row[at]['nfe_per_token']:.3f})" if at in row and family["adaptive"] else ""))
        lines.append(_row(rule_name(family["family"]), *shown))
    head = " & ".join(f"{column:g}" for column in columns)
    legend = f"{WORDS[task['metric']]} by NFE per token; dagger: adaptive, in the nearest column, with its own NFE"
    return _body(f"Unmasking rule & {head}   ({legend})", lines)


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
        body = []
        firsts = [next(iter(cells.values())) for cells in methods.values()]
        for entry, cells in zip(firsts, methods.values(), strict=True):
            alike = [other for other in firsts if other["estimator"] == entry["estimator"]]
            method = _method(entry) + (f" ({SEES_TRUTH})" if entry["flag"] else "")
            method = ", ".join(filter(None, [method, apart(entry, alike)]))
            body.append([method, *(number(cells[n], tasks[n]["metric"]) if n in cells else "" for n in tasks)])
        groups.append(_grouped(escape(model), body))
    heads = [f"{escape(name)}, {WORDS[task['metric']]}" for name, task in tasks.items()]
    return _body(f"Model & Method & {' & '.join(heads)}", *groups)


def gap_closed(report: Mapping[str, Any]) -> str:
    """Dataset & one column per model; tasks without a gap to close are left out, as in the paper."""
    columns = report["averages"]
    columns = [row for row in columns if row["unclear"] or any(value is not None for value in row["tasks"].values())]
    names = [
        name
        for name in report["tasks"]
        if any(name in row["unclear"] or row["tasks"].get(name) is not None for row in columns)
    ]

    def cell(row: Mapping[str, Any], name: str) -> str:
        return UNCLEAR if name in row["unclear"] else percent(row["tasks"].get(name), row["stderrs"].get(name))

    def average(row: Mapping[str, Any]) -> str:
        return UNCLEAR if row["average_unclear"] else percent(row["average"], row["average_stderr"])

    lines = [_row(escape(name), *(cell(row, name) for row in columns)) for name in names]
    last = [_row(r"\textit{Average}", *map(average, columns))]
    heads = [escape(f"{row['model']}, {row['name']}") for row in columns]
    return _body(f"Dataset & {' & '.join(heads)}", lines, last)


def accuracies(table: Mapping[str, Any]) -> str:
    """Model & Method & one column per metric, with its standard error."""
    lines = []
    for entry in table["rows"]:
        rule = rule_name(entry["rule"]) if entry["rule"] else ""
        block = f"$L'$={escape(entry['block'])}" if entry["block"] not in (None, "none") else ""
        method = ", ".join(filter(None, [_method(entry), rule, block]))
        scores = [entry["scores"].get(metric) for metric in table["metrics"]]
        lines.append(_row(escape(entry["model"]), method, *map(_score, scores)))
    head = " & ".join(escape(metric) for metric in table["metrics"])
    return _body(f"Model & Method & {head}   ({escape(table['task'])})", lines)


def _score(score: Mapping[str, Any] | None) -> str:
    if score is None:
        return ""
    return f"{score['value']:.4f}{PM}" + ("?" if score["stderr"] is None else f"{score['stderr']:.4f}")


# ---------------------------------------------------------------- cells


def duels(task: Mapping[str, Any]) -> list[Entry]:
    """The DUEL rows of a task."""
    return [entry for entry in task["rows"] if find(entry["estimator"]).follows_rule and not entry["ar"]]


def number(entry: Entry, metric: str) -> str:
    r"""A value with its Monte Carlo error (`?` if not known); $\leq$ before a bound, the best of a model in bold."""
    error = " +- ?" if entry["stderr_reason"] else plus_minus(entry["stderr"], metric)
    text = (LEQ if entry["bound"] else "") + decimals(entry["value"], metric) + error.replace(" +- ", PM)
    return rf"\textbf{{{text}}}" if entry["best"] else text


def percent(value: float | None, error: float | None) -> str:
    """A percentage with its Monte Carlo error."""
    if value is None:
        return ""
    return fixed(value, 1).replace("-", "$-$") + r"\%" + ("" if error is None else f"{PM}{fixed(error, 1)}")


def apart(entry: Entry, alike: Sequence[Entry], with_rule: bool = True) -> str:
    """What distinguishes an entry from others in a table: rule and block if they differ, and special remarks."""
    parts = []
    if with_rule and entry["rule"] and len(alike) > 1:
        parts.append(rule_name(entry["rule"]))
    if len({other["block"] for other in alike}) > 1:
        parts.append(WHOLE if entry["block"] == "none" else f"$L'$={escape(entry['block'] or '')}")
    return ", ".join([*parts, *([escape(entry["aside"])] if entry["aside"] else [])])


def _method(entry: Entry) -> str:
    return METHODS.get(entry["estimator"]) or escape(find(entry["estimator"]).display)


def rule_name(rule: str) -> str:
    """A rule as the paper prints it, followed by its non-default parameters."""
    _, *parameters = short(rule).split(":")
    if not kind(rule).label:  # module:Name
        return escape(rule)
    pairs = [parameter.partition("=") for parameter in parameters]
    letters = {
        key: f"${GREEK.get(key, key)}$"
        for key, _, _ in pairs
        if key in GREEK or (key.isascii() and len(key) == 1 and key.isalpha())
    }
    shown = [f"{letters.get(key, escape(key))}={escape(value)}" for key, _, value in pairs]
    return ", ".join([label(rule) + (DAGGER if adaptive(rule) else ""), *shown])


def escape(text: str) -> str:
    """Escape LaTeX's special characters."""
    return "".join(SPECIAL.get(c, f"\\{c}" if c in "&%$#_{}" else c) for c in one_line(text))


def _row(*cells: str) -> str:
    return rf"{' & '.join(cells)} \\"


def _models(entries: Sequence[Entry]) -> list[list[Entry]]:
    """Entries by model; the AR baseline and the oracle each form a group of their own."""
    groups: dict[tuple, list[Entry]] = {}
    for entry in entries:
        groups.setdefault((entry["model"], entry["ar"], entry["flag"]), []).append(entry)
    return list(groups.values())


def _grouped(model: str, lines: Sequence[Sequence[str]]) -> list[str]:
    if len(lines) == 1:
        return [_row(model, *lines[0])]
    return [rf"\multirow{{{len(lines)}}}{{*}}{{{model}}}", *(f"  & {_row(*line)}" for line in lines)]


def _body(columns: str, *groups: Sequence[str]) -> str:
    """Groups separated by \\midrule; the first line is a comment with the names of the columns."""
    return f"% {columns}\n" + "\n\\midrule\n".join("\n".join(group) for group in groups) + "\n"
