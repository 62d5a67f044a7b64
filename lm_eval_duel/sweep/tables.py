"""The sweep as tables and JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any

from lm_eval_duel.command_line import FIGURES
from lm_eval_duel.results.figures import MISSING, available
from lm_eval_duel.results.stats import CLEAR
from lm_eval_duel.results.table import CODE, MARKDOWN, Cell, Column, Table, bullets, spaced
from lm_eval_duel.results.table import markdown as as_markdown
from lm_eval_duel.strict_json import dumps
from lm_eval_duel.sweep import store
from lm_eval_duel.sweep.metrics import NGRAMS

TIE = 1e-6  # relative difference up to which two perplexities are equal
escape = MARKDOWN.escape
Report = Mapping[str, Any]


def write(report: dict[str, Any], folder: Path, formats: Sequence[str] = ("png",), width: float | None = None) -> None:
    """Write sweep.md, sweep.json and the figure, and enter the rankings and file names in `report`.

    Files of another configuration are kept; these are then named after their configuration: sweep_5f1e....md.
    """
    stem = name_of(folder, report["configuration"])
    if stem != "sweep":
        report["notes"] = [
            *report["notes"],
            f"sweep.md in this folder belongs to another sweep; this one is in {stem}.md.",
        ]
    report["rankings"] = rankings(report["settings"])
    report["folder"], report["files"] = str(folder), [f"{stem}.md", f"{stem}.json"]
    if available():
        from lm_eval_duel.results.figures.style import images
        from lm_eval_duel.sweep.figure import draw

        folder.mkdir(parents=True, exist_ok=True)
        for kind, content in images(draw(report, width), formats, exact=width is not None).items():
            (folder / f"{stem}.{kind}").write_bytes(content)
            report["files"].append(f"{stem}.{kind}")
    else:
        report["notes"] = [*report["notes"], MISSING]
    store.write(folder / f"{stem}.json", dumps(report) + "\n")
    store.write(folder / f"{stem}.md", markdown(report))


def name_of(folder: Path, configuration: str) -> str:
    """The stem of a report's files: `sweep`, unless files of that name belong to another sweep."""
    try:
        earlier = json.loads((folder / "sweep.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        taken = any((folder / f"sweep.{kind}").exists() for kind in ("md", *FIGURES))
    except (OSError, ValueError):
        taken = True
    else:
        taken = not isinstance(earlier, dict) or earlier.get("configuration") != configuration
    return f"sweep_{configuration}" if taken else "sweep"


def console(report: Report) -> str:
    """The text that the command prints."""
    return spaced([markdown(report), f"wrote to {report['folder']}: {', '.join(report['files'])}"]).rstrip("\n")


def markdown(report: Report) -> str:
    """sweep.md."""
    parts = [_head(report), as_markdown(settings(report))]
    if report["rankings"]:
        parts += ["Rankings, best first, at equal NFE:", as_markdown(ranked(report["rankings"]))]
    if report["kl"]:
        parts += [
            "KL(row || column) in nats per token, from samples of the row:",
            as_markdown(divergences(report["kl"])),
        ]
    return spaced([*parts, bullets(_notes(report))])


def settings(report: Report) -> Table:
    """One line per setting, and one for the task's own text."""
    columns = [
        Column("setting", CODE, cell=lambda row: row["name"]),
        Column("NFE/token", ".3f", cell=_of("text", "nfe_per_token")),
        Column("perplexity (DUEL)", ".2f", cell=lambda row: judged(row["text"])),
        Column("bits per byte", ".4f", cell=_bits),
        Column("NFE/token, samples", ".3f", cell=_of("samples", "nfe_per_token")),
        Column("generative perplexity", ".2f", cell=lambda row: judged((row["samples"] or {}).get("generative"))),
        Column("entropy", ".3f", cell=_of("samples", "entropy", "entropy_stderr")),
        *(Column(f"distinct-{n}", ".3f", cell=_of("samples", f"distinct_{n}")) for n in NGRAMS),
        Column("repetition", ".3f", cell=_of("samples", "repetition", "repetition_stderr")),
        Column("own nll/token", ".2f", cell=_of("samples", "own_nll_per_token", "own_stderr")),
        Column("MAUVE", ".3f", cell=_of("samples", "mauve")),
    ]
    own = {"name": Cell("the task's own text", prose=True), "text": None, "samples": report["reference"]}
    return Table.of([*report["settings"], *([own] if report["reference"] else [])], columns)


def _of(part: str, key: str, error: str = "") -> Callable[[Report], Cell]:
    """An entry of a setting's text or samples, with its error."""
    return lambda row: Cell((row[part] or {}).get(key), stderr=(row[part] or {}).get(error))


def judged(scored: Report | None) -> Cell:
    """A perplexity and its standard error, of which results hold the one per token."""
    if not scored:
        return Cell()
    value, error = scored["perplexity"], scored["stderr"]
    return Cell(value, stderr=None if error is None else value * error)


def _bits(row: Report) -> Cell:
    text = row["text"]
    if not text or text["bits_per_byte"] is None:
        return Cell()
    per_nat = text["bits_per_byte"] / text["nll_per_token"] if text["nll_per_token"] else 0.0
    return Cell(text["bits_per_byte"], stderr=None if text["stderr"] is None else per_nat * text["stderr"])


# ---------------------------------------------------------------- rankings


def rankings(settings: list[Report]) -> list[dict[str, Any]]:
    """At each k with several rules: their order by DUEL and by generative perplexity, ties grouped.

    `not_distinguishable`: neighbours by generative perplexity that are within two standard errors of their difference.
    `same_order`: None without a judge, or if the orders differ only in pairs that are not distinguishable.
    """
    result = []
    for k in sorted({setting["k"] for setting in settings} - {None}):
        members = {setting["family"]: setting for setting in settings if setting["k"] == k}
        if len(members) < 2:
            continue
        duel = _order({name: setting["text"]["perplexity"] for name, setting in members.items()})
        ranking: dict[str, Any] = {"k": k, "duel": duel, "generative": None}
        ranking |= {"not_distinguishable": [], "same_order": None}
        cells = {name: judged((setting["samples"] or {}).get("generative")) for name, setting in members.items()}
        if all(cell.value is not None for cell in cells.values()):
            ranking["generative"] = generative = _order({name: cell.value for name, cell in cells.items()})
            names = [name for tied in generative for name in tied]
            ranking["not_distinguishable"] = [[a, b] for a, b in pairwise(names) if _close(cells[a], cells[b])]
            apart = [pair for pair in combinations(names, 2) if _place(duel, *pair) != _place(generative, *pair)]
            clear = [(a, b) for a, b in apart if not _close(cells[a], cells[b])]
            ranking["same_order"] = False if clear else None if apart else True
        result.append(ranking)
    return result


def _close(a: Cell, b: Cell) -> bool:
    """Whether two values from independent samples are within two standard errors of their difference."""
    known = None not in (a.stderr, b.stderr)
    return known and abs(a.value - b.value) <= CLEAR * math.hypot(a.stderr, b.stderr)


def _place(order: list[list[str]], a: str, b: str) -> int:
    """-1 if a is before b, 1 if after, 0 in a tie."""
    here, there = ([name in tied for tied in order].index(True) for name in (a, b))
    return (here > there) - (here < there)


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


def ranked(rankings: list[dict[str, Any]]) -> Table:
    """Both orders side by side."""

    def shown(order: list[list[str]] | None, close: Collection[list[str]] = ()) -> str:
        text = ""
        for n, names in enumerate(order or []):
            mark = "~" if n and [order[n - 1][-1], names[0]] in close else "<"
            text += (f" {mark} " if n else "") + " = ".join(names)
        return text

    same = {True: "yes", False: "no"}
    rows = []
    for ranking in rankings:
        generative = shown(ranking["generative"], ranking["not_distinguishable"])
        order = same.get(ranking["same_order"], "not distinguishable" if ranking["generative"] else "")
        rows.append([ranking["k"], shown(ranking["duel"]), generative, order])
    heads = ("by DUEL perplexity", "by generative perplexity", "same order")
    return Table([Column("k", "d"), *map(Column, heads)], rows)


def divergences(kl: list[dict[str, Any]]) -> Table:
    """KL between settings, as a matrix."""
    names = list(dict.fromkeys(entry["of"] for entry in kl))
    found = {(entry["of"], entry["under"]): entry for entry in kl}

    def cell(a: str, b: str) -> Cell:
        return Cell("0") if a == b else Cell(found[a, b]["kl_per_token"], stderr=found[a, b]["stderr"])

    columns = [Column("samples of", CODE), *(Column(f"under {name}", ".4f") for name in names)]
    return Table(columns, [[a, *(cell(a, b) for b in names)] for a in names])


# ---------------------------------------------------------------- words


def _head(report: Report) -> str:
    task, drawn = report["task"], report["samples"]
    text = f"{escape(report['model'])}, block {report['block'] or 'none'}, on {escape(task['name'])}: "
    text += f"{task['documents']:,} documents, {task['windows']:,} windows, {task['tokens']:,} tokens"
    if drawn:
        text += f"; {drawn['count']:,} samples of {drawn['length']} tokens per setting"
    return f"{text}."


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
