"""Text of LaTeX tables: escaped names, numbers with errors and intervals, rules as the paper prints them, rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from lm_eval_duel.report.headline import fixed, plus_minus
from lm_eval_duel.report.headline import number as decimals
from lm_eval_duel.rules.tables import adaptive, kind, label, short
from lm_eval_duel.tables import one_line

DAGGER = r"$^\dagger$"  # adaptive NFE
GREEK = {"mu": r"\mu", "nu": r"\nu", "gamma": r"\gamma"}
LEQ, PM = r"$\leq$", r" $\pm$ "  # before a standard error: Monte Carlo, or for accuracies over documents
SPECIAL = {
    **{"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "`": r"\textasciigrave{}"},
    **{"<": r"\textless{}", ">": r"\textgreater{}", "|": r"\textbar{}"},
    **{"[": "{[}", "*": "{*}"},  # arguments of the \\\\ that ends the row before
}
Entry = Mapping[str, Any]


def number(entry: Entry, metric: str) -> str:
    r"""A value with its Monte Carlo error (`?` if not known); $\leq$ before a bound, the best of a model in bold."""
    error = " +- ?" if entry["stderr_reason"] else plus_minus(entry["stderr"], metric)
    text = (LEQ if entry["bound"] else "") + decimals(entry["value"], metric) + error.replace(" +- ", PM)
    return rf"\textbf{{{text}}}" if entry["best"] else text


def between(interval: Sequence[float] | None, form: Callable[[float], str]) -> str:
    """An interval in brackets: braces keep LaTeX from reading it as an option of the line break before it."""
    return "" if interval is None else f"{{[{form(interval[0])}, {form(interval[1])}]}}".replace("-", "$-$")


def interval(entry: Entry, metric: str) -> str:
    """The 95 % interval of a row's value; empty if there is none."""
    return between(entry["interval"], lambda value: decimals(value, metric))


def with_interval(entry: Entry, metric: str) -> str:
    """A value followed by its 95 % interval, if there is one, in small print."""
    limits = interval(entry, metric)
    return number(entry, metric) + (rf" {{\scriptsize {limits}}}" if limits else "")


def nats(difference: float | None) -> str:
    """A difference in nats per unit, with its sign."""
    return "" if difference is None else fixed(difference, 4, "+").replace("-", "$-$")


def percent(value: float | None, error: float | None) -> str:
    """A percentage with its Monte Carlo error."""
    if value is None:
        return ""
    return fixed(value, 1).replace("-", "$-$") + r"\%" + ("" if error is None else f"{PM}{fixed(error, 1)}")


def rule_name(rule: str) -> str:
    """A rule as the paper prints it, followed by its non-default parameters."""
    _, *parameters = short(rule).split(":")
    if not kind(rule).label:  # module:Name
        return escape(rule)
    pairs = [parameter.partition("=") for parameter in parameters]
    letters = {key: f"${GREEK.get(key, key)}$" for key, _, _ in pairs if key in GREEK or one_letter(key)}
    shown = [f"{letters.get(key, escape(key))}={escape(value)}" for key, _, value in pairs]
    return ", ".join([label(rule) + (DAGGER if adaptive(rule) else ""), *shown])


def one_letter(key: str) -> bool:
    """Whether a parameter's name is one letter, which stands in formulas as it is."""
    return len(key) == 1 and key.isascii() and key.isalpha()


def escape(text: str) -> str:
    """Escape LaTeX's special characters."""
    return "".join(SPECIAL.get(c, f"\\{c}" if c in "&%$#_{}" else c) for c in one_line(text))


def row(*cells: str) -> str:
    return rf"{' & '.join(cells)} \\"


def grouped(model: str, lines: Sequence[Sequence[str]]) -> list[str]:
    if len(lines) == 1:
        return [row(model, *lines[0])]
    return [rf"\multirow{{{len(lines)}}}{{*}}{{{model}}}", *(f"  & {row(*line)}" for line in lines)]


def body(columns: str, *groups: Sequence[str]) -> str:
    """Groups separated by \\midrule; the first line is a comment with the names of the columns."""
    return f"% {columns}\n" + "\n\\midrule\n".join("\n".join(group) for group in groups) + "\n"


def bare(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> tuple[list[str], list[list[str]]]:
    """Columns and rows without the columns that no row has a value for."""
    kept = [n for n in range(len(columns)) if any(cells[n] for cells in rows)]
    return [columns[n] for n in kept], [[cells[n] for n in kept] for cells in rows]
