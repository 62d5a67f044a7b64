"""The cost of runs: seconds, network calls and memory, compared with the ELBO and the AR model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lm_eval_duel.estimators import registry
from lm_eval_duel.results.read import Run
from lm_eval_duel.results.records import SEES_TRUTH, Row
from lm_eval_duel.rules.tables import place

WHOLE = "times of whole runs, loading included: results of other models hold no other time, and no device"
CACHED = "some answers came from a response cache, so the time covers only a part of the run"


def table(runs: Sequence[Run], ar: Sequence[Run], tasks: Mapping[str, Sequence[Row]]) -> list[dict[str, Any]]:
    """One entry per run. Ratios are of seconds per token; they are left out if two runs cannot be compared.

    The ELBO is the one that gap closed uses in the report's `tasks`.
    """
    autoregressive = {run.file for run in ar}
    everything = [*ar, *(run for run in runs if run.file not in autoregressive)]
    entries = [_entry(run, run.file in autoregressive) for run in everything if run.tasks]
    files = {entry["file"]: entry for entry in entries}
    bases = [entry for entry in entries if entry["ar"]]
    elbos = _elbos(tasks)
    for entry in entries:
        if entry["ar"]:
            continue
        if entry["estimator"] != "elbo":
            used = elbos.get(entry["file"])
            bounds = [files[used.run.name]] if used else []
            note = (
                f"the ELBO of {entry['model']}: {used.name}, mc_samples={used.run.spec['mc_samples']}" if used else ""
            )
            entry["times_elbo"], entry["times_elbo_reason"] = _ratio(entry, bounds, "Monte Carlo ELBO", note)
        entry["times_ar"], entry["times_ar_reason"] = _ratio(entry, bases, "AR run", "")
    models, order = [entry["model"] for entry in entries], [*registry.ESTIMATORS]
    return sorted(
        entries,
        key=lambda e: (not e["ar"], models.index(e["model"]), order.index(e["estimator"]), *place(e["rule"])),
    )


def _elbos(tasks: Mapping[str, Sequence[Row]]) -> dict[str, Row]:
    """File of a run -> the row of the Monte Carlo ELBO that its gap closed uses."""
    elbos: dict[str, Row] = {}
    for rows in tasks.values():
        for row in rows:
            if row.elbo is not None and rows[row.elbo].estimator == "elbo":
                elbos.setdefault(row.run.name, rows[row.elbo])
    return elbos


def _entry(run: Run, ar: bool) -> dict[str, Any]:
    duel, lattice = run.duel, registry.find(run.estimator).lattice
    tokens = duel.get("tokens") or _counted(run)
    seconds = duel.get("seconds")
    return {
        "model": run.label,
        "estimator": run.estimator,
        "name": "lattice: all estimators in one run" if lattice else run.estimator,
        "flag": f"oracle is {SEES_TRUTH}" if lattice else "",
        "rule": run.rule,
        "block": run.block if run.ours and run.estimator != "ar" else None,
        "cache": run.cache if run.estimator != "ar" else None,
        "ar": ar,
        "tasks": sorted([*run.tasks, *run.others]),
        "cached": run.cached,
        "device": duel.get("device"),
        "ranks": duel.get("ranks"),
        "tokens": tokens,
        "seconds": seconds,
        "seconds_per_token": seconds / tokens if seconds and tokens else None,
        "whole_run_seconds": run.whole_run_seconds,
        "forwards": duel.get("forwards"),
        "rows": duel.get("rows"),
        "nfe": duel.get("nfe"),
        "peak_memory_bytes": duel.get("peak_memory_bytes"),
        "times_elbo": None,
        "times_elbo_reason": "",
        "times_ar": None,
        "times_ar_reason": "",
        "file": run.name,
    }


def _counted(run: Run) -> int | None:
    """Tokens of a run of another model, from its samples."""
    total = 0.0
    for task in run.tasks.values():
        if task.documents is None or any("token_perplexity" not in d.values for d in task.documents):
            return None
        total += sum(document.values["token_perplexity"][1] for document in task.documents)
    return int(total) or None


def _ratio(entry: dict[str, Any], others: Sequence[dict[str, Any]], what: str, note: str) -> tuple[float | None, str]:
    """Seconds per token over those of another run of the same tasks, and a note: which run, or why there is none."""
    if not others:
        return None, f"no {what} to compare with"
    same = [other for other in others if other["tasks"] == entry["tasks"]]
    if not same:
        return None, f"the {what} is of other tasks"
    if entry["cached"] or any(other["cached"] for other in same):
        return None, CACHED
    timed = [other for other in same if other["seconds_per_token"]]
    if timed and entry["seconds_per_token"]:
        alike = [o for o in timed if (o["device"], o["ranks"]) == (entry["device"], entry["ranks"])]
        if not alike:
            return None, f"the {what} ran on {timed[0]['device']} x {timed[0]['ranks']}"
        return entry["seconds_per_token"] / alike[-1]["seconds_per_token"], note
    whole = [other for other in same if other["whole_run_seconds"]]
    if whole and entry["whole_run_seconds"]:
        return entry["whole_run_seconds"] / whole[-1]["whole_run_seconds"], "; ".join(filter(None, [note, WHOLE]))
    return None, f"no time of the {what}"
