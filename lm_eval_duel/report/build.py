"""The tasks of a report as dicts: compared rows with intervals, gap closed, pairs, rules against NFE.

Tables and figures only display these dicts; nothing is computed there.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from lm_eval_duel.errors import DuelError
from lm_eval_duel.estimators import registry
from lm_eval_duel.report import arrange, gaps, headline, match, pairs, rows, stats
from lm_eval_duel.report.headline import WORDS
from lm_eval_duel.report.read import Run
from lm_eval_duel.report.rows import Row
from lm_eval_duel.report.samples import METRICS
from lm_eval_duel.rules.tables import adaptive, family

OTHER_UNITS = ("word_perplexity", "byte_perplexity")

Traced = Mapping[str, Mapping[str, Mapping[str, Mapping[int, float]]]]  # results file -> task -> value -> document


def tasks(runs: Sequence[Run], ar: Sequence[Run], options: argparse.Namespace, traced: Traced) -> dict[str, Any]:
    """Every task that is in a result other than the AR ones, by name."""
    if options.ar:
        _once(ar)
    baseline = {run.file for run in ar}
    names = dict.fromkeys(name for run in runs if run.file not in baseline for name in run.tasks)
    if not names:
        if any(run.others for run in runs):
            return {}  # accuracies
        raise DuelError("Nothing to compare: RESULTS holds no perplexity other than those of the --ar result.")
    settings = options.metric, options.as_published, traced, options.pairs
    return {name: task(name, runs, ar, *settings) for name in names}


def _once(ar: Sequence[Run]) -> None:
    for name in {name for run in ar for name in run.tasks}:
        holding = [run.name for run in ar if name in run.tasks]
        if len(holding) > 1:
            raise DuelError(f"--ar holds {name} more than once: {', '.join(holding)}. Name one of these files.")


def task(
    name: str,
    runs: Sequence[Run],
    ar: Sequence[Run],
    metric: str | None,
    as_published: bool,
    traced: Traced,
    compare: str = pairs.NONE,
) -> dict[str, Any]:
    """One task: its rows with intervals and gap closed, paired differences, and the notes under its tables."""
    base = next((run for run in reversed(ar) if name in run.tasks), None)
    others = [run for run in runs if name in run.tasks and (base is None or run.file != base.file)]
    compared = others if base is None else [base, *others]
    metric = _metric(name, metric, compared)
    listed = match.check(name, metric, compared, as_published)
    every = [row for run in compared for row in rows.of(run, name, traced.get(run.name, {}).get(name))]
    remarks = [remark for row in every for remark in row.remarks]
    shown, at, twice = arrange.table((row for row in every if metric in row.values), base)
    rates, documents = _rates(metric, shown)
    draws = {n: stats.value(metric, -rate, 1.0) for n, rate in rates.items()}
    entries = [_entry(metric, row, n == at, draws.get(n)) for n, row in enumerate(shown)]
    _mark_best(entries)
    elbos = gaps.write(name, shown, entries, draws, metric, at, as_published)
    pairs.write_cache_costs(metric, shown, entries, rates, documents)
    sizes = {run.tasks[name].size for run in compared} - {None}
    notes = [*_unknown(name, compared), *elbos, *_dtypes(compared), *_windows(compared)]
    notes += dict.fromkeys([*remarks, *twice])
    if metric in OTHER_UNITS and any(entry["gap_closed"] is not None for entry in entries):
        notes.append(f"gap closed is of {WORDS[metric]} here: the paper's numbers are per token and not these")
    content = {
        "metric": metric,
        "documents": sizes.pop() if len(sizes) == 1 else None,
        "rows": entries,
        "rules": _rules(shown, entries),
        "pairs": pairs.of(compare, metric, entries, rates, documents),
        "elbo": elbos,
        "differences": listed,
        "as_published": as_published,
        "notes": notes,
    }
    return content | {"headlines": headline.of(name, content)}


def _metric(name: str, requested: str | None, compared: Sequence[Run]) -> str:
    shared = [metric for metric in METRICS if all(metric in run.tasks[name].metrics for run in compared)]
    if requested is None and shared:
        return shared[0]
    if requested in shared:
        return requested
    available = "; ".join(f"{run.name}: {', '.join(run.tasks[name].metrics)}" for run in compared)
    wanted = f"{requested} of {name}" if requested else f"a metric of {name} that all results have"
    raise DuelError(f"Wanted {wanted}, but there is: {available}. Name another with --metric, or leave the task out.")


# ---------------------------------------------------------------- rows


def _rates(metric: str, shown: Sequence[Row]) -> tuple[dict[int, np.ndarray], int]:
    """Bootstrap draws of nats per unit of each row with known documents, by row number, and the number of documents.

    All rows use the same resampling. The draws of a Monte Carlo ELBO include its Monte Carlo error.
    """
    known = [n for n, row in enumerate(shown) if len(row.documents.get(metric, {})) > 1]
    known = [n for n in known if math.isfinite(shown[n].values[metric])]
    if not known:
        return {}, 0
    keys = sorted(shown[known[0]].documents[metric])
    known = [n for n in known if shown[n].documents[metric].keys() == set(keys)]
    table = np.array([[shown[n].documents[metric][key] for n in known] for key in keys])  # (documents, rows, 2)
    sums = stats.resample(table.reshape(len(keys), -1)).reshape(-1, len(known), 2)
    with np.errstate(divide="ignore", invalid="ignore"):
        drawn = sums[..., 0] / sums[..., 1]  # (draws, rows)
    rates = {}
    for column, n in enumerate(known):
        log_prob, error = drawn[:, column], shown[n].nats_stderr
        if error and math.isfinite(error):
            log_prob = stats.with_error(drawn, column, error / table[:, column, 1].sum())
        rates[n] = -log_prob
    return rates, len(keys)


def _entry(metric: str, row: Row, ar: bool, draws: np.ndarray | None) -> dict[str, Any]:
    likelihood = registry.find(row.estimator).kind is not registry.Kind.NOT_A_LIKELIHOOD
    reason = ""
    if draws is None:
        reason = row.missing or ("one document" if row.documents.get(metric) else "no values per document")
    per_token = row.nfe / row.tokens if row.nfe and row.tokens else None
    return {
        "model": row.model,
        "name": row.name,
        "estimator": row.estimator,
        "rule": row.rule,
        "block": row.block if row.run.ours and row.estimator != "ar" else None,
        "cache": row.cache,
        "aside": row.aside,
        "unknown": row.run.unknown(row.task),
        "eps": row.eps,
        "mc_samples": row.run.spec.get("mc_samples") if row.estimator == "elbo" else None,
        "ar": ar,
        "likelihood": likelihood,
        "bound": row.bound,
        "flag": "" if likelihood else rows.SEES_TRUTH,
        "value": row.values[metric],
        "interval": None if draws is None else stats.interval(draws),
        "stderr": row.error(metric, row.nats_stderr),
        "stderrs": {name: row.error(name, row.nats_stderr) for name in row.values},
        "stderr_bound": _error_bound(row, metric),
        "stderr_reason": _no_error(row, metric),
        "window_stderr": row.error(metric, row.window_stderr) if draws is None else None,
        "reason": reason,
        "metrics": row.values,
        "tokens": row.tokens,
        "nfe": row.nfe,
        "nfe_per_token": per_token,
        "best": False,
        "gap": None,
        "gap_interval": None,
        "elbo": None,
        "gap_closed": None,
        "gap_closed_stderr": None,
        "gap_closed_interval": None,
        "distinguishable": None,
        "gap_closed_reason": "",
        "cache_cost": None,
        "dtype": row.run.dtype,
        "fingerprint": row.run.fingerprint,
        "file": row.run.name,
    }


def _error_bound(row: Row, metric: str) -> float | None:
    """An upper bound of the error of a value that is drawn, such as a Monte Carlo ELBO; None for other values.

    If the error itself is not known, the error over windows bounds it, since their spread contains that of the draws.
    Infinite if neither is known.
    """
    if registry.find(row.estimator).drawn is None:
        return None
    known = row.error(metric, row.nats_stderr)
    bound = row.error(metric, row.window_stderr) if known is None else known
    return math.inf if bound is None else bound


def _no_error(row: Row, metric: str) -> str:
    """Why a value that is drawn has no error; empty if it has one, and for other rows."""
    drawn = registry.find(row.estimator).drawn
    if drawn is None or row.error(metric, row.nats_stderr) is not None:
        return ""
    count = row.run.spec.get(drawn.argument, "")
    few = count.isdecimal() and int(count) < 8
    why = f"{drawn.argument}={count}; it takes 8 or more" if few else drawn.no_error
    return f"{drawn.error} error not known ({why})"


def _mark_best(entries: Sequence[dict[str, Any]]) -> None:
    """Mark the lowest likelihood of each model with several rows. Bounds and the oracle do not count."""
    for model in {entry["model"] for entry in entries}:
        proper = [e for e in entries if e["model"] == model and e["likelihood"] and not e["ar"]]
        likelihoods = [e for e in proper if _is_likelihood(e["estimator"]) and math.isfinite(e["value"])]
        if len(proper) > 1 and likelihoods:
            min(likelihoods, key=lambda entry: entry["value"])["best"] = True


def _is_likelihood(estimator: str) -> bool:
    return registry.find(estimator).kind is registry.Kind.LIKELIHOOD


# ---------------------------------------------------------------- notes, rules


def _unknown(name: str, compared: Sequence[Run]) -> list[str]:
    """Notes on networks whose tokenizers do not know a part of the text: bits and words of it are then not modelled."""
    shares = {(run.label, run.unknown(name)): None for run in compared if run.unknown(name)}
    return [
        f"{share:.1%} of the tokens of {label} are [UNK]: its bits per byte, byte and word perplexity are not a "
        "likelihood of the text"
        for label, share in shares
    ]


def _dtypes(compared: Sequence[Run]) -> list[str]:
    """Notes on networks that ran in low precision: their orders and sums are coarser."""
    low = [run for run in compared if run.dtype not in ("float32", "float64")]
    default = " (the default of --model hf; dtype=float32 changes it)"
    return [f"{run.label} ran in {run.dtype}{default if not run.ours else ''}: {run.short_name}" for run in low]


def _windows(compared: Sequence[Run]) -> list[str]:
    labels: dict[str, dict[str, None]] = {}
    for run in compared:
        labels.setdefault(run.label, {})[str(match.windows(run))] = None
    return ["windows: " + "; ".join(f"{label}: {' and '.join(cuts)}" for label, cuts in labels.items())]


def _rules(shown: Sequence[Row], entries: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rule families against NFE, for each model, block and cache with two or more different NFEs."""
    groups: dict[tuple, dict[str, list]] = {}
    for n, (row, entry) in enumerate(zip(shown, entries, strict=True)):
        if row.estimator == "duel" and entry["nfe_per_token"]:
            name, speed = family(row.rule)
            points = groups.setdefault((row.model, row.block, row.cache, row.variant), {}).setdefault(name, [])
            points.append({"rule": row.rule, "speed": speed, "index": n})
    sweeps = []
    for (model, block, cache, variant), families in groups.items():
        members = [point["index"] for points in families.values() for point in points]
        if len({round(entries[n]["nfe_per_token"], 3) for n in members}) < 2:
            continue
        for points in families.values():
            points.sort(key=lambda point: entries[point["index"]]["nfe_per_token"])
        sought = model, "oracle", block, cache
        oracles = [n for n, row in enumerate(shown) if (row.model, row.estimator, row.block, row.cache) == sought]
        sweeps.append(
            {
                "model": model,
                "block": block,
                "cache": cache,
                "variant": variant,
                "title": ", ".join(filter(None, [model, rows.block_name(block), rows.cache_name(cache), variant])),
                "elbo": next((entries[n]["elbo"] for n in members if entries[n]["elbo"] is not None), None),
                "ar": next((n for n, entry in enumerate(entries) if entry["ar"]), None),
                "oracle": next(iter(oracles), None),
                "families": [
                    {"family": name, "adaptive": adaptive(name), "points": points} for name, points in families.items()
                ],
            }
        )
    return sweeps
