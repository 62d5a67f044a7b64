"""The sweep as tables and JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lm_eval_duel.report.figures import MISSING, available
from lm_eval_duel.report.headline import fixed
from lm_eval_duel.report.markdown import bullets, spaced, table
from lm_eval_duel.sweep import store
from lm_eval_duel.sweep.metrics import ORDERS
from lm_eval_duel.trace import finite

TIE = 1e-6  # relative difference below which two perplexities are one
HEAD = (
    *("setting", "NFE/token", "perplexity (DUEL)", "bits per byte"),
    *("NFE/token, samples", "generative perplexity", "entropy", *(f"distinct-{n}" for n in ORDERS), "repetition"),
    *("own nats/token", "MAUVE"),
)
Report = Mapping[str, Any]


def write(report: dict[str, Any], folder: Path) -> None:
    """Write sweep.md, sweep.json and sweep.png; `report` learns the rankings and the files' names."""
    report["rankings"] = rankings(report["settings"])
    report["folder"], report["files"] = str(folder), ["sweep.md", "sweep.json"]
    if available():
        from lm_eval_duel.report.figures import save_png
        from lm_eval_duel.sweep.figure import draw

        save_png(draw(report), folder / "sweep.png")
        report["files"].append("sweep.png")
    else:
        report["notes"] = [*report["notes"], MISSING]
    store.write(folder / "sweep.md", markdown(report))
    store.write(folder / "sweep.json", json.dumps(finite(report), indent=1, allow_nan=False) + "\n")


def console(report: Report) -> str:
    """What the command prints."""
    return spaced([markdown(report), f"wrote to {report['folder']}: {', '.join(report['files'])}"]).rstrip("\n")


def markdown(report: Report) -> str:
    parts = [_head(report), settings(report)]
    if report["rankings"]:
        parts += ["Rankings, best first, at equal NFE:", ranked(report["rankings"])]
    if report["kl"]:
        parts += ["KL(row || column), nats per token, from samples of the row:", divergences(report["kl"])]
    return spaced([*parts, bullets(_notes(report))])


def settings(report: Report) -> str:
    """A line for each setting, and the task's own text by the same measures."""
    lines = []
    for found in report["settings"]:
        text = found["text"]
        bits = "" if text["bits_per_byte"] is None else f"{text['bits_per_byte']:.4f}"
        line = [f"`{found['name']}`", f"{text['nfe_per_token']:.3f}", f"{text['perplexity']:.2f}", bits]
        lines.append([*line, *_looks(found["samples"])])
    if report["reference"]:
        lines.append(["the task's own text", "", "", "", *_looks(report["reference"])])
    return table(HEAD, lines)


def _looks(found: Report | None) -> list[str]:
    if found is None:
        return [""] * (len(HEAD) - 4)
    cells = [f"{found['nfe_per_token']:.3f}" if "nfe_per_token" in found else ""]
    judged = found.get("generative")
    cells.append(_error(judged["perplexity"], judged["stderr"], judged["perplexity"]) if judged else "")
    cells.append(f"{found['entropy']:.3f}")
    cells += ["" if found[f"distinct_{n}"] is None else f"{found[f'distinct_{n}']:.3f}" for n in ORDERS]
    cells.append("" if found["repetition"] is None else f"{found['repetition']:.3f}")
    own = found.get("own_nats_per_token")
    cells.append("" if own is None else _error(own, found["own_stderr"], 1.0))
    return [*cells, "" if found.get("mauve") is None else f"{found['mauve']:.3f}"]


def _error(value: float, stderr: float | None, slope: float) -> str:
    return f"{value:.2f}" + ("" if stderr is None else f" +- {slope * stderr:.2f}")


# ---------------------------------------------------------------- rankings


def rankings(found: list[Report]) -> list[dict[str, Any]]:
    """At each k with several rules: their order by DUEL and by generative perplexity, ties together."""
    result = []
    for k in sorted({setting["k"] for setting in found} - {None}):
        mine = [setting for setting in found if setting["k"] == k]
        if len(mine) < 2:
            continue
        duel = _order({s["family"]: s["text"]["perplexity"] for s in mine})
        judged = {s["family"]: s["samples"]["generative"]["perplexity"] for s in mine if _judged(s)}
        generative = _order(judged) if len(judged) == len(mine) else None
        result.append({"k": k, "duel": duel, "generative": generative, "same": generative and generative == duel})
    return result


def _judged(setting: Report) -> bool:
    return bool(setting["samples"] and "generative" in setting["samples"])


def _order(values: Mapping[str, float]) -> list[list[str]]:
    """Names by value, those of one value together."""
    order: list[list[str]] = []
    last = math.nan
    for name, value in sorted(values.items(), key=lambda item: item[1]):
        if value == last or abs(value - last) <= TIE * abs(last):
            order[-1].append(name)
        else:
            order.append([name])
        last = value
    return [sorted(names) for names in order]


def ranked(found: list[dict[str, Any]]) -> str:
    """Both orders side by side."""

    def said(order: list[list[str]] | None) -> str:
        return "" if order is None else " < ".join(" = ".join(f"`{name}`" for name in names) for names in order)

    lines = [
        [f"{one['k']}", said(one["duel"]), said(one["generative"]), {True: "yes", False: "no"}.get(one["same"], "")]
        for one in found
    ]
    return table(["k", "by DUEL perplexity", "by generative perplexity", "the same"], lines)


def divergences(found: list[dict[str, Any]]) -> str:
    """A matrix over settings."""
    names = list(dict.fromkeys(one["of"] for one in found))
    cells = {(one["of"], one["under"]): one for one in found}

    def cell(a: str, b: str) -> str:
        value, error = cells[a, b]["nats_per_token"], cells[a, b]["stderr"]
        return "0" if a == b else fixed(value, 4) + ("" if error is None else f" +- {error:.4f}")

    return table(
        ["samples of", *(f"under `{b}`" for b in names)], [[f"`{a}`", *(cell(a, b) for b in names)] for a in names]
    )


# ---------------------------------------------------------------- words


def _head(report: Report) -> str:
    task, drawn = report["task"], report["samples"]
    said = f"{report['model']}, block {report['block'] or 'none'}, on {task['name']}: {task['documents']:,} documents, "
    said += f"{task['windows']:,} windows, {task['tokens']:,} tokens"
    if drawn:
        said += f"; {drawn['count']:,} samples of {drawn['length']} tokens a setting"
    return f"{said}."


def _notes(report: Report) -> list[str]:
    notes = list(report["notes"])
    if bound := report["elbo"]:
        error = "" if bound["stderr"] is None else f" +- {bound['perplexity'] * bound['stderr']:.2f}"
        notes.append(
            f"ELBO ({bound['draws']} draws, random unmasking): perplexity <= {bound['perplexity']:.2f}{error}."
        )
    shared = report["shared"]
    if shared["evaluated"] < shared["steps"]:
        saved = 1 - shared["evaluated"] / shared["steps"]
        notes.append(
            f"The task's text took {shared['steps']:,} rule steps so far, over all settings that read the state alone "
            f"and all runs in this folder; {shared['evaluated']:,} states were evaluated for them ({saved:.0%} saved)."
        )
    if report["scorer"]:
        again = "" if report["settings"][0]["samples"]["generative"]["same_ids"] else ", in its own tokens"
        notes.append(f"Generative perplexity under {report['scorer']}{again}, +- standard error over samples.")
    return notes
