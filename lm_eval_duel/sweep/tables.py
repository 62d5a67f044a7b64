"""The tables of a sweep."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import combinations, pairwise
from typing import Any

from lm_eval_duel.results.stats import CLEAR
from lm_eval_duel.results.table import CODE, MARKDOWN, Cell, Column, Table, bullets, spaced
from lm_eval_duel.results.table import markdown as as_markdown
from lm_eval_duel.sweep.metrics import NGRAMS

TIE = 1e-6  # relative difference up to which two perplexities are equal
Report = Mapping[str, Any]


def markdown(report: Report) -> str:
    """sweep.md."""
    task, drawn, escape = report["task"], report["samples"], MARKDOWN.escape
    head = f"{escape(report['model'])}, block {report['block'] or 'none'}, on {escape(task['name'])}: "
    head += f"{task['documents']:,} documents, {task['windows']:,} windows, {task['tokens']:,} tokens"
    if drawn:
        head += f"; {drawn['count']:,} samples of {drawn['length']} tokens per setting"
    parts = [f"{head}.", as_markdown(settings(report))]
    if report["rankings"]:
        parts += ["Rankings, best first, at equal NFE:", as_markdown(ranked(report["rankings"]))]
    if report["kl"]:
        matrix = as_markdown(divergences(report["kl"]))
        parts += ["KL(row || column) in nats per token, from samples of the row:", matrix]
    return spaced([*parts, bullets(_notes(report))])


def settings(report: Report) -> Table:
    """One line per setting, and one for the task's own text."""
    columns = [
        Column("setting", CODE, cell=lambda row: row["name"]),
        Column("NFE/token", ".3f", cell=entry("text", "nfe_per_token")),
        Column("perplexity (DUEL)", ".2f", cell=lambda row: judged(row["text"])),
        Column("bits per byte", ".4f", cell=_bits),
        Column("NFE/token, samples", ".3f", cell=entry("samples", "nfe_per_token")),
        Column("generative perplexity", ".2f", cell=generative),
        Column("entropy", ".3f", cell=entry("samples", "entropy", "entropy_stderr")),
        *(Column(f"distinct-{n}", ".3f", cell=entry("samples", f"distinct_{n}")) for n in NGRAMS),
        Column("repetition", ".3f", cell=entry("samples", "repetition", "repetition_stderr")),
        Column("own nll/token", ".2f", cell=entry("samples", "own_nll_per_token", "own_stderr")),
        Column("MAUVE", ".3f", cell=entry("samples", "mauve")),
    ]
    own = {"name": Cell("the task's own text", prose=True), "text": None, "samples": report["reference"]}
    return Table.from_records([*report["settings"], *([own] if report["reference"] else [])], columns)


def entry(part: str, key: str, error: str = "") -> Callable[[Report], Cell]:
    """An entry of a setting's text or samples, with its error."""
    return lambda row: Cell((row[part] or {}).get(key), stderr=(row[part] or {}).get(error))


def judged(scored: Report | None) -> Cell:
    """A perplexity and its standard error, of which results hold the one per token."""
    if not scored:
        return Cell()
    value, error = scored["perplexity"], scored["stderr"]
    return Cell(value, stderr=None if error is None else value * error)


def generative(row: Report) -> Cell:
    """The generative perplexity of a setting's samples."""
    return judged((row["samples"] or {}).get("generative"))


def _bits(row: Report) -> Cell:
    text = row["text"]
    if not text or text["bits_per_byte"] is None:
        return Cell()
    per_nat = text["bits_per_byte"] / text["nll_per_token"] if text["nll_per_token"] else 0.0
    return Cell(text["bits_per_byte"], stderr=None if text["stderr"] is None else per_nat * text["stderr"])


# ---------------------------------------------------------------- rankings


def rankings(settings: Sequence[Report]) -> list[dict[str, Any]]:
    """At each k with several rules: their order by DUEL and by generative perplexity, ties grouped.

    `not_distinguishable`: neighbours by generative perplexity that are within two standard errors of their difference.
    `same_order`: None without a judge, or if the orders differ only in pairs that are not distinguishable.
    """
    result = []
    for k in sorted({setting["k"] for setting in settings} - {None}):
        members = {setting["family"]: setting for setting in settings if setting["k"] == k}
        if len(members) < 2:
            continue
        values = {name: setting["text"]["perplexity"] for name, setting in members.items()}
        cells = {name: generative(setting) for name, setting in members.items()}
        ranking: dict[str, Any] = {"k": k, "duel": _order(values), "generative": None}
        ranking |= {"not_distinguishable": [], "same_order": None}
        if all(cell.value is not None for cell in cells.values()):
            ranking["generative"] = order = _order({name: cell.value for name, cell in cells.items()})
            close = {frozenset((a, b)) for a, b in combinations(cells, 2) if _close(cells[a], cells[b])}
            names = [name for tied in order for name in tied]
            ranking["not_distinguishable"] = [[a, b] for a, b in pairwise(names) if {a, b} in close]
            apart = _pairs(ranking["duel"]) ^ _pairs(order)
            clear = [pair for pair in apart if frozenset(pair) not in close]
            ranking["same_order"] = False if clear else None if apart else True
        result.append(ranking)
    return result


def _close(a: Cell, b: Cell) -> bool:
    """Whether two values from independent samples are within two standard errors of their difference."""
    known = None not in (a.stderr, b.stderr)
    return known and abs(a.value - b.value) <= CLEAR * math.hypot(a.stderr, b.stderr)


def _pairs(order: Sequence[Sequence[str]]) -> set[tuple[str, str]]:
    """Each name with every one that comes after it."""
    return {(a, b) for earlier, later in combinations(order, 2) for a in earlier for b in later}


def _order(values: Mapping[str, float]) -> list[list[str]]:
    """Names sorted by value, with equal values grouped."""
    order: list[list[str]] = []
    last = math.nan
    for name, value in sorted(values.items(), key=lambda item: item[1]):
        if value == last or abs(value - last) <= TIE * abs(last):
            order[-1].append(name)
        else:
            order.append([name])
        last = value
    return [sorted(names) for names in order]


def ranked(rankings: Sequence[Report]) -> Table:
    """Both orders side by side."""

    def shown(order: list[list[str]] | None, close: Collection[list[str]] = ()) -> str:
        text = ""
        for n, names in enumerate(order or []):
            mark = "~" if n and [order[n - 1][-1], names[0]] in close else "<"
            text += (f" {mark} " if n else "") + " = ".join(names)
        return text

    def same(ranking: Report) -> str:
        unclear = "not distinguishable" if ranking["generative"] else ""
        return {True: "yes", False: "no"}.get(ranking["same_order"], unclear)

    columns = [
        Column("k", "d", cell=lambda ranking: ranking["k"]),
        Column("by DUEL perplexity", cell=lambda ranking: shown(ranking["duel"])),
        Column("by generative perplexity", cell=lambda r: shown(r["generative"], r["not_distinguishable"])),
        Column("same order", cell=same),
    ]
    return Table.from_records(rankings, columns)


def divergences(kl: Sequence[Report]) -> Table:
    """KL between settings, as a matrix."""
    names = list(dict.fromkeys(entry["of"] for entry in kl))
    entries = {(entry["of"], entry["under"]): Cell(entry["kl_per_token"], stderr=entry["stderr"]) for entry in kl}
    columns = [Column("samples of", CODE), *(Column(f"under {name}", ".4f") for name in names)]
    return Table(columns, [[a, *(Cell("0") if a == b else entries[a, b] for b in names)] for a in names])


# ---------------------------------------------------------------- words


def _notes(report: Report) -> list[str]:
    notes = list(report["notes"])
    if bound := report["elbo"]:
        error = " (Monte Carlo error not known: it takes 8 draws or more)"
        if bound["stderr"] is not None:
            error = f" +- {bound['perplexity'] * bound['stderr']:.2f} (Monte Carlo standard error)"
        notes.append(
            f"ELBO ({bound['draws']} draws, random unmasking): perplexity <= {bound['perplexity']:.2f}{error}."
        )
    shared = report["shared"]
    if shared["evaluated"] < shared["steps"]:
        saved = 1 - shared["evaluated"] / shared["steps"]
        notes.append(
            f"The task's text took {shared['steps']:,} rule steps, over all settings with state-only rules and all "
            f"runs in this folder; {shared['evaluated']:,} states were evaluated for them ({saved:.0%} saved)."
        )
    if report["scorer"]:
        retokenized = "" if report["settings"][0]["samples"]["generative"]["same_ids"] else ", on retokenized text"
        notes.append(f"Generative perplexity under {report['scorer']}{retokenized}, +- standard error over samples.")
    if report["samples"]:
        mauve = any(setting["samples"]["mauve"] is not None for setting in report["settings"])
        names = "distinct-n and MAUVE are" if mauve else "distinct-n is"
        notes.append(f"{names} of all samples together, with no standard error; compare equal numbers of samples.")
    if any(ranking["not_distinguishable"] for ranking in report["rankings"]):
        notes.append("~: within two standard errors of the difference, so not distinguishable.")
    notes.append(
        "Perplexity (DUEL) and bits per byte: +- standard error over windows, as for other texts of the same kind."
    )
    return notes
