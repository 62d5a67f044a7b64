"""Gap closed, as the paper defines it, and which ELBO stands for a model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from lm_eval_duel.report import rows, stats
from lm_eval_duel.report.rows import Row

BETTER = "the MDM is already better under the ELBO"


def elbo_of(found: Sequence[Row]) -> tuple[int | None, str]:
    """The number of the row that is the model's ELBO, else why there is none.

    Over the whole target for bidirectional networks, over the trained blocks for block-causal ones; there the mean
    over all orders (elbo_exact) stands in for a Monte Carlo one.
    """
    causal = [row for row in found if row.run.duel.get("attention") == "block_causal"]
    trained = min((row.estimator == "elbo", row.run.block) for row in causal)[1] if causal else "none"
    fitting = [n for n, row in enumerate(found) if row.estimator == "elbo" and row.block == trained]
    if fitting:
        return max(fitting, key=lambda n: int(found[n].run.law.get("mc_samples", 1))), ""
    exact = [n for n, row in enumerate(found) if row.estimator == "elbo_exact" and causal and row.block == trained]
    if exact:
        return exact[0], ""
    return None, f"no ELBO (estimator=elbo, elbo_block={trained})"


def write(
    name: str,
    found: Sequence[Row],
    entries: Sequence[dict[str, Any]],
    draws: Mapping[int, np.ndarray],
    metric: str,
    has_ar: bool,
) -> dict[str, str]:
    """Write gap and gap closed into the entries; which ELBO was used for each model, in words."""
    used = {}
    ar = 0 if has_ar else None
    for model in dict.fromkeys(row.model for row in found):
        mine = [n for n, row in enumerate(found) if row.model == model and n != ar]
        at, why = elbo_of([found[n] for n in mine])
        elbo = None if at is None else mine[at]
        if elbo is not None:
            used[model] = _elbo_in_words(found[elbo], entries[elbo], [found[n] for n in mine])
        for n in mine:
            entry = entries[n]
            if ar is not None and metric != "bits_per_byte":
                entry["gap"] = entry["value"] - entries[ar]["value"]
            if entry["estimator"] != "duel":
                continue
            entry["elbo"] = elbo
            if metric == "bits_per_byte":
                entry["gap_closed_reason"] = "defined for perplexities"
            elif ar is None or elbo is None:
                entry["gap_closed_reason"] = why if elbo is None else f"no AR result of {name} (--ar)"
            else:
                _gap(entry, entries[elbo], entries[ar], [draws.get(i) for i in (elbo, n, ar)])
    return used


def _gap(entry: dict[str, Any], elbo: dict[str, Any], ar: dict[str, Any], draws: list[np.ndarray | None]) -> None:
    closed = stats.gap_closed(elbo["value"], entry["value"], ar["value"])
    if closed is None:
        entry["gap_closed_reason"] = BETTER
        return
    entry["gap_closed"] = closed
    if any(drawn is None for drawn in draws):
        lacking = next(e for e, drawn in zip((elbo, entry, ar), draws, strict=True) if drawn is None)
        entry["gap_closed_reason"] = f"no interval: {lacking['model']}, {lacking['name']}: {lacking['reason']}"
        return
    entry["gap_closed_interval"], entry["gap_closed_reason"] = stats.gap_interval(*draws)


def _elbo_in_words(elbo: Row, entry: dict[str, Any], others: Sequence[Row]) -> str:
    law = elbo.run.law
    if elbo.estimator == "elbo_exact":
        said = f"the mean over all orders in blocks of {elbo.block} (elbo_exact; no Monte Carlo one is there)"
    else:
        error = f", standard error {entry['stderr']:.2g}" if entry["stderr"] is not None else ""
        form = f", elbo_form={law['elbo_form']}" if "elbo_form" in law else ""
        said = f"Monte Carlo, mc_samples={law.get('mc_samples', '?')}{form}, elbo_block={elbo.block}{error}"
    text = f"ELBO of {elbo.model}: {said}"
    ignored = rows.VARIES | {"block", "grid", "version"}
    apart = {
        f"{key}={value} there, {row.run.law[key]} in {row.run.file.name}"
        for row in others
        if row.estimator == "duel"
        for key, value in law.items()
        if key not in ignored and row.run.law.get(key, value) != value
    }
    return f"{text}; it differs from DUEL in {'; '.join(sorted(apart))}" if apart else text


def averages(found: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Gap closed of each DUEL row over tasks; the average is over the tasks that have one."""
    table: dict[tuple[str, str], dict[str, float | None]] = {}
    for name, one in found.items():
        for entry in one["rows"]:
            if entry["estimator"] == "duel" and not entry["ar"]:
                table.setdefault((entry["model"], entry["name"]), {})[name] = entry["gap_closed"]
    shown = []
    for (model, name), values in table.items():
        known = [value for value in values.values() if value is not None]
        average = sum(known) / len(known) if len(known) > 1 else None
        shown.append({"model": model, "name": name, "tasks": values, "average": average, "averaged": len(known)})
    return shown
