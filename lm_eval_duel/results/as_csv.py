"""report.csv: a line for each value of each method and task, with unrounded numbers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from lm_eval_duel.results.as_json import entries
from lm_eval_duel.results.compare import ComparedRow
from lm_eval_duel.results.standings import RankedMethod, Standing, Standings
from lm_eval_duel.results.table import csv_text

SOURCE = ("nfe_per_token", "seconds_per_token", "device", "parameters", "fingerprint", "date")
BITS = "bits_per_byte"


def text(found: Standings) -> str:
    """The file."""
    means = ("mean", "mean_rank") if found.mean_of else ()
    lines = []
    for standing in found.rows:
        start = _names(standing) | entries(standing, means)
        for line in [*_values(standing.method), *_averages(standing.method)]:
            lines.append(start | line | {"dtype": standing.method.named.run.dtype} | entries(standing.method, SOURCE))
    return csv_text(lines)


def _names(standing: Standing) -> dict[str, Any]:
    named = standing.method.named
    return {
        **entries(standing, ("rank",)),
        **entries(named, ("model", "estimator")),
        **entries(standing.method, ("kind",)),
        **entries(named, ("rule", "block", "cache=run.cache")),
        **entries(standing.method, ("remarks",)),
    }


def _values(method: RankedMethod) -> Iterator[dict[str, Any]]:
    """The perplexities of a method, with their errors, gaps and gaps closed."""
    for task, each in method.rows.items():
        yield {
            "task": task,
            **entries(each.row, ("metric", "value")),
            **_ends("interval", each.interval),
            **entries(each.row, ("stderr", "stderr_reason")),
            **entries(each, ("window_stderr", "reason=no_interval", "gap")),
            **_ends("gap_interval", each.gap_interval),
            **_closed(each),
            **entries(each.row, ("nfe", "tokens", "file=run.name")),
            BITS: each.row.metrics.get(BITS),
            f"{BITS}_monte_carlo_stderr": each.row.error(each.row.nats_stderr, BITS),
        }


def _closed(each: ComparedRow) -> dict[str, Any]:
    return {
        "gap_closed": each.closed.percent,
        "gap_closed_stderr": each.closed.stderr,
        **_ends("gap_closed_interval", each.closed.interval),
        "distinguishable": each.closed.distinguishable,
        "gap_closed_reason": str(each.closed.reason),
        "gap_closed_of": each.closed.of,
    }


def _averages(method: RankedMethod) -> Iterator[dict[str, Any]]:
    """The other averages of a method. Their standard errors are over documents."""
    for task, run in method.scored.items():
        for metric, (value, error) in run.scores(task).items():
            yield {"task": task, "metric": metric, "value": value, "documents_stderr": error, "file": run.name}


def _ends(name: str, interval: list[float] | None) -> dict[str, float | None]:
    low, high = interval or (None, None)
    return {f"{name} low": low, f"{name} high": high}
