"""Gap closed, as the paper defines it, and the ELBO that it uses."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from lm_eval_duel.estimators import registry
from lm_eval_duel.report import rows, stats
from lm_eval_duel.report.rows import Row

ESTIMATORS = {
    "block",
    "grid",
    "rule_code",
    "cheap_cache",
}  # entries of a spec that belong to the estimator, as rows.VARIES
CONVENTIONS = {"special_tokens", "windows", "max_length", "sigma"}  # entries in which published figures may differ
BETTER = "the MDM is already better under the ELBO"
UNCLEAR = "not distinguishable"  # within two standard errors


def elbo_of(duel: Row, shown: Sequence[Row], as_published: bool = False) -> tuple[int | None, str]:
    """The number of the row that holds the ELBO of a DUEL row, or None and the reason.

    The ELBO is of the same model under the same spec, except for the estimator's own entries. It covers the whole
    target for bidirectional networks and the trained blocks for block-causal ones, where the mean over all orders
    (elbo_exact) may replace a Monte Carlo ELBO. Bounds are preferred, then more draws. `as_published`: without an ELBO
    of the same spec, accept one with other windows or scored positions, and return the differences.
    """
    causal = duel.run.duel.get("attention") in ("block_causal", "causal_prefix")
    wanted, kinds = (duel.run.block, ("elbo", "elbo_exact")) if causal else ("none", ("elbo",))
    fitting = {
        n: _other_spec(row.run.spec, duel.run.spec)
        for n, row in enumerate(shown)
        if row.run.key == duel.run.key and row.estimator in kinds and row.block == wanted
    }
    if not fitting:
        return None, f"no ELBO (estimator=elbo, elbo_block={wanted})"
    same = [n for n, apart in fitting.items() if not apart]
    other = min(fitting.values(), key=len)
    if not same and not (as_published and set(other) <= CONVENTIONS):
        return None, f"no ELBO of the same spec: {'; '.join(other.values())}"

    def worth(n: int) -> tuple:
        draws = shown[n].run.spec.get("mc_samples", "")
        return not shown[n].eps, shown[n].estimator == "elbo", float(draws) if draws not in ("", "none") else 1.0

    if same:
        return max(same, key=worth), ""
    nearest = [n for n, apart in fitting.items() if apart == other]
    return max(nearest, key=worth), f"as published, of another convention: {'; '.join(other.values())}"


def _other_spec(elbo: Mapping[str, str], duel: Mapping[str, str]) -> dict[str, str]:
    """The differences of two specs, the estimators' entries aside: key -> sentence."""
    keys = sorted({*elbo, *duel} - rows.VARIES - ESTIMATORS)
    pairs = [(key, elbo.get(key, "not set"), duel.get(key, "not set")) for key in keys]
    return {key: f"{key}={there} there, {here} here" for key, there, here in pairs if here != there}


def write(
    name: str,
    shown: Sequence[Row],
    entries: Sequence[dict[str, Any]],
    draws: Mapping[int, np.ndarray],
    metric: str,
    ar: int | None,
    as_published: bool,
) -> list[str]:
    """Fill in gap and gap closed of the entries; describe the ELBOs used. `ar`: the baseline's row number."""
    used = {}
    for n, (row, entry) in enumerate(zip(shown, entries, strict=True)):
        if n == ar:
            continue
        if ar is not None:
            entry["gap"] = entry["value"] - entries[ar]["value"]
            if n in draws and ar in draws:
                entry["gap_interval"] = stats.interval(draws[n] - draws[ar])
        if not registry.find(row.estimator).follows_rule:
            continue
        elbo, why = elbo_of(row, shown, as_published)
        entry["elbo"] = elbo
        if elbo is not None:
            used[elbo] = elbo_in_words(shown[elbo], entries[elbo]) + (f" ({why})" if why else "")
        if metric == "bits_per_byte":
            entry["gap_closed_reason"] = "gap closed is defined for perplexities"
        elif ar is None or elbo is None:
            entry["gap_closed_reason"] = why if elbo is None else f"no AR result of {name} (--ar)"
        else:
            _gap(entry, entries[elbo], entries[ar], [draws.get(i) for i in (elbo, n, ar)])
    return [text for _, text in sorted(used.items())]


def _gap(entry: dict[str, Any], elbo: dict[str, Any], ar: dict[str, Any], draws: list[np.ndarray | None]) -> None:
    values, error = (elbo["value"], entry["value"], ar["value"]), elbo["stderr_bound"]
    if not all(map(math.isfinite, values)):
        entry["gap_closed_reason"] = "no gap closed of an infinite perplexity"
        return
    if not stats.clear(elbo["value"], ar["value"], error):
        entry["gap_closed_reason"] = f"{UNCLEAR}: ELBO {_with_error(elbo)} and {ar['model']} {ar['value']:.2f}"
        return
    closed = stats.gap_closed(*values)
    if closed is None:
        entry["gap_closed_reason"] = BETTER
        return
    both = _both(error, entry["stderr_bound"])
    entry["distinguishable"] = stats.clear(elbo["value"], entry["value"], both)
    if entry["distinguishable"]:
        entry["gap_closed"] = closed
        entry["gap_closed_stderr"] = stats.gap_closed_stderr(*values, *_errors(elbo, entry))
    else:
        value = f"{entry['value']:.2f}" if entry["stderr_bound"] is None else _with_error(entry)
        entry["gap_closed_reason"] = f"{UNCLEAR}: ELBO {_with_error(elbo)} and DUEL {value}"
    if any(drawn is None for drawn in draws):
        lacking = next(e for e, drawn in zip((elbo, entry, ar), draws, strict=True) if drawn is None)
        remark = f"no interval: {lacking['model']}, {lacking['name']}: {lacking['reason']}"
    else:
        entry["gap_closed_interval"], remark = stats.gap_interval(*draws)
    entry["gap_closed_reason"] = "; ".join(
        filter(None, [entry["gap_closed_reason"], elbo["stderr_reason"], entry["stderr_reason"], remark])
    )


def _both(*errors: float | None) -> float | None:
    """The error of a difference; None for a value without error."""
    known = [error for error in errors if error is not None]
    return math.hypot(*known) if known else None


def _errors(elbo: Mapping[str, Any], entry: Mapping[str, Any]) -> tuple[float | None, float | None]:
    """The Monte Carlo errors of the ELBO and of DUEL, for that of gap closed; an exact DUEL has the error 0."""
    return elbo["stderr"], 0.0 if entry["stderr_bound"] is None else entry["stderr"]


def _with_error(entry: Mapping[str, Any]) -> str:
    error = "?" if entry["stderr"] is None else f"{entry['stderr']:.2f}"
    return f"{entry['value']:.2f} +- {error}"


def elbo_in_words(elbo: Row, entry: Mapping[str, Any]) -> str:
    """Describe an ELBO and its standard error."""
    spec = elbo.run.spec
    if elbo.estimator == "elbo_exact":
        text = f"the mean over all orders in blocks of {elbo.block} (elbo_exact; there is no Monte Carlo ELBO)"
    else:
        form = f", elbo_form={spec['elbo_form']}" if "elbo_form" in spec else ""
        eps = f", elbo_eps={elbo.eps:g} (above 0: NO bound)" if elbo.eps else ""
        error = f", standard error {entry['stderr']:.2g}" if entry["stderr"] is not None else ", no standard error"
        text = f"Monte Carlo, mc_samples={spec.get('mc_samples', '?')}{form}, elbo_block={elbo.block}{eps}{error}"
    return f"ELBO of {elbo.model}{f' ({elbo.variant})' if elbo.variant else ''}: {text}"


def averages(tasks: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Gap closed of each DUEL row over tasks.

    The average includes every task with a gap closed, also those where it is within its error of 0: without them the
    average would be too high. It has a standard error if all of them have one, and is not shown if it is within two
    standard errors of 0.
    """
    table: dict[tuple[str, str], dict[str, tuple]] = {}
    for name, task in tasks.items():
        for entry in task["rows"]:
            if registry.find(entry["estimator"]).follows_rule and not entry["ar"]:
                table.setdefault((entry["model"], entry["name"]), {})[name] = (entry, task["rows"])
    return [_average(model, name, rows) for (model, name), rows in table.items()]


def _average(model: str, name: str, rows: Mapping[str, tuple]) -> dict[str, Any]:
    known = [_closed(*row) for row in rows.values() if row[0]["distinguishable"] is not None]
    errors = [error for _, error in known]
    average = sum(value for value, _ in known) / len(known) if len(known) > 1 else None
    error = math.hypot(*errors) / len(known) if average is not None and None not in errors else None
    unclear = average is not None and not stats.clear(average, 0.0, error)
    return {
        "model": model,
        "name": name,
        "tasks": {task: entry["gap_closed"] for task, (entry, _) in rows.items()},
        "stderrs": {task: entry["gap_closed_stderr"] for task, (entry, _) in rows.items()},
        "unclear": [task for task, (entry, _) in rows.items() if entry["distinguishable"] is False],
        "average": None if unclear else average,
        "average_stderr": error,
        "average_unclear": unclear,
        "averaged": len(known),
    }


def _closed(entry: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> tuple[float, float | None]:
    """Gap closed and its error, whether or not it is distinguishable from 0."""
    elbo, ar = rows[entry["elbo"]], next(row for row in rows if row["ar"])
    values = elbo["value"], entry["value"], ar["value"]
    return stats.gap_closed(*values), stats.gap_closed_stderr(*values, *_errors(elbo, entry))
