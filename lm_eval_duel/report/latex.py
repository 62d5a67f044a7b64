"""Bodies of the paper's LaTeX tables: rows only, to be put between \\toprule and \\bottomrule."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from lm_eval_duel.report.rows import SEES_TRUTH, adaptive

RULES = {
    "left_to_right": "Left-to-Right",
    "right_to_left": "Right-to-Left",
    "random": "Random",
    "greedy": "Greedy Conf.",
    "margin": "Prob. Margin",
    "log_margin": "Log-Prob. Margin",
    "threshold": "Conf. Thresh.",
    "klass": "KLASS",
    "entropy_bound": "Entropy Bound",
    "entropy": "Entropy",
}
DAGGER = r"$^\dagger$"  # adaptive NFE
METHODS = {
    "exact": "Exact",
    "elbo": "ELBO",
    "elbo_exact": "ELBO (all orders)",
    "mixture": "Mixture of orders",
    "duel": r"\textsc{DUEL}",
    "oracle": "Oracle",
}
GREEK = {"mu": r"\mu", "nu": r"\nu", "gamma": r"\gamma"}
LEQ = r"$\leq$"
Entry = Mapping[str, Any]


def bodies(report: Mapping[str, Any]) -> dict[str, str]:
    """File name -> body of every table of a report."""
    found = {}
    for name, task in report["tasks"].items():
        safe = safe_name(name)
        if any(duels(task)):
            found[f"gap_{safe}.tex"] = gap(task)
        found[f"methods_{safe}.tex"] = methods(task)
        for number, sweep in enumerate(task["rules"], 1):
            number = "" if len(task["rules"]) == 1 else f"_{number}"
            found[f"rules_{safe}{number}.tex"] = rules(task, sweep)
    if len(report["tasks"]) > 1:
        found["perplexity.tex"] = perplexity(report["tasks"])
        if report["averages"]:
            found["gap_closed.tex"] = gap_closed(report)
    return found


def gap(task: Mapping[str, Any]) -> str:
    """Model & ELBO & DUEL & Gap Closed."""
    entries = task["rows"]
    lines = []
    for entry in duels(task):
        elbo = "" if entry["elbo"] is None else number(entries[entry["elbo"]])
        closed = "" if entry["gap_closed"] is None else rf"{entry['gap_closed']:.1f}\%"
        lines.append(_row(label(entry, duels(task)), elbo, number(entry), closed))
    return _body("Model & ELBO & DUEL & Gap Closed", lines)


def methods(task: Mapping[str, Any]) -> str:
    """Model & Method & Rule & Perplexity."""
    groups = []
    for entries in _models(task["rows"]):
        lines = []
        for entry in entries:
            rule = rf"\emph{{{SEES_TRUTH}}}" if entry["flag"] else rule_name(entry["rule"]) if entry["rule"] else "---"
            if entry["estimator"] == "duel" and len({e["block"] for e in entries if e["estimator"] == "duel"}) > 1:
                rule += f", $L'$={entry['block']}"
            lines.append([METHODS[entry["estimator"]], rule, number(entry)])
        groups.append(_grouped(escape(entries[0]["model"]), lines))
    return _body("Model & Method & Unmasking rule & Perplexity", *groups)


def rules(task: Mapping[str, Any], sweep: Mapping[str, Any]) -> str:
    """Rule & perplexity by NFE: a column for each NFE of the fixed rules; adaptive rules stand at the nearest one."""
    entries = task["rows"]
    fixed = [point for family in sweep["families"] if not family["adaptive"] for point in family["points"]]
    anchors = fixed or [point for family in sweep["families"] for point in family["points"]]
    columns = sorted({round(entries[point["index"]]["nfe_per_token"], 3) for point in anchors})
    cells: list[dict[int, Entry]] = []
    for family in sweep["families"]:
        placed: dict[int, tuple[float, Entry]] = {}
        for point in family["points"]:
            entry = entries[point["index"]]
            away = [abs(math.log(entry["nfe_per_token"] / column)) for column in columns]
            at = away.index(min(away))
            if at not in placed or away[at] < placed[at][0]:
                placed[at] = (away[at], entry)
        cells.append({at: entry for at, (_, entry) in placed.items()})
    best = {at: min(row[at]["value"] for row in cells if at in row) for at in range(len(columns))}
    lines = []
    for family, row in zip(sweep["families"], cells, strict=True):
        name = rule_name(family["family"])
        shown = []
        for at in range(len(columns)):
            text = f"{row[at]['value']:.2f}" if at in row else ""
            shown.append(rf"\textbf{{{text}}}" if at in row and row[at]["value"] == best[at] else text)
        lines.append(_row(name, *shown))
    head = " & ".join(f"{column:g}" for column in columns)
    return _body(f"Unmasking rule & {head}   (NFE per token; with a dagger: adaptive, at the nearest NFE)", lines)


def perplexity(tasks: Mapping[str, Any]) -> str:
    """Model & Method & one column a task."""
    table: dict[str, dict[tuple, dict[str, Entry]]] = {}
    everything = [entry for task in tasks.values() for entry in task["rows"]]
    for name, task in tasks.items():
        for entry in task["rows"]:
            table.setdefault(entry["model"], {}).setdefault((entry["estimator"], entry["name"]), {})[name] = entry
    groups = []
    for model, methods in table.items():
        lines = []
        several = [key for key in methods if key[0] == "duel"]
        for (estimator, _), cells in methods.items():
            entry = next(iter(cells.values()))
            method = METHODS[estimator] + (f" ({SEES_TRUTH})" if entry["flag"] else "")
            if estimator == "duel" and len(several) > 1:
                mine = [e for e in everything if e["model"] == model and e["estimator"] == "duel"]
                method += f", {_apart(entry, mine)}"
            lines.append([method, *(number(cells[name]) if name in cells else "" for name in tasks)])
        groups.append(_grouped(escape(model), lines))
    return _body(f"Model & Method & {' & '.join(map(escape, tasks))}", *groups)


def gap_closed(report: Mapping[str, Any]) -> str:
    """Data set & one column a model; tasks without a gap to close are left out, as in the paper."""
    columns = report["averages"]
    names = [name for name in report["tasks"] if any(row["tasks"].get(name) is not None for row in columns)]

    def percent(value: float | None) -> str:
        return "" if value is None else rf"{value:.1f}\%"

    lines = [_row(escape(name), *(percent(row["tasks"].get(name)) for row in columns)) for name in names]
    last = [_row(r"\textit{Average}", *(percent(row["average"]) for row in columns))]
    heads = [escape(f"{row['model']}, {row['name']}") for row in columns]
    return _body(f"Dataset & {' & '.join(heads)}", lines, last)


# ---------------------------------------------------------------- cells


def duels(task: Mapping[str, Any]) -> list[Entry]:
    """The DUEL rows of a task."""
    return [entry for entry in task["rows"] if entry["estimator"] == "duel" and not entry["ar"]]


def number(entry: Entry) -> str:
    r"""A value: $\leq$ before a bound, the best of a model in bold."""
    text = (LEQ if entry["bound"] else "") + f"{entry['value']:.2f}"
    return rf"\textbf{{{text}}}" if entry["best"] else text


def label(entry: Entry, others: Sequence[Entry]) -> str:
    """The model, and its rule and block where it stands more than once."""
    mine = [other for other in others if other["model"] == entry["model"]]
    return escape(entry["model"]) + (f", {_apart(entry, mine)}" if len(mine) > 1 else "")


def _apart(entry: Entry, others: Sequence[Entry]) -> str:
    parts = [rule_name(entry["rule"])]
    if len({other["block"] for other in others}) > 1:
        parts.append(f"$L'$={entry['block']}")
    return ", ".join(parts)


def rule_name(rule: str) -> str:
    """A rule as the paper prints it; parameters other than k=1 follow."""
    name, *parameters = rule.split(":")
    pairs = [p.partition("=") for p in parameters if p != "k=1"]
    shown = [f"${GREEK.get(key, escape(key))}$={escape(value)}" for key, _, value in pairs]
    return ", ".join([RULES.get(name, escape(name)) + (DAGGER if adaptive(rule) else ""), *shown])


def escape(text: str) -> str:
    """Text with LaTeX's special characters made harmless."""
    special = {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"}
    return "".join(special.get(c, f"\\{c}" if c in "&%$#_{}" else c) for c in text)


def safe_name(name: str) -> str:
    """A task's name as part of a file name."""
    return "".join(c if c.isalnum() or c in "-_." else "_" for c in name)


def _row(*cells: str) -> str:
    return rf"{' & '.join(cells)} \\"


def _models(entries: Sequence[Entry]) -> list[list[Entry]]:
    """Entries by model, the AR baseline apart, what sees the truth last and apart."""
    groups: dict[tuple, list[Entry]] = {}
    for entry in entries:
        groups.setdefault((entry["model"], entry["ar"], entry["flag"]), []).append(entry)
    return list(groups.values())


def _grouped(model: str, lines: Sequence[Sequence[str]]) -> list[str]:
    if len(lines) == 1:
        return [_row(model, *lines[0])]
    return [rf"\multirow{{{len(lines)}}}{{*}}{{{model}}}", *(f"  & {_row(*line)}" for line in lines)]


def _body(columns: str, *groups: Sequence[str]) -> str:
    """Groups with a rule between them; the first line, a comment, names the columns."""
    return f"% {columns}\n" + "\n\\midrule\n".join("\n".join(group) for group in groups) + "\n"
