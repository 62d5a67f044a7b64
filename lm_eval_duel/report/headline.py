"""How far each model is from the autoregressive one, and how much of the gap was the yardstick: one sentence each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lm_eval_duel.report.rows import short

WORDS = {
    "token_perplexity": "perplexity per token",
    "perplexity": "perplexity",
    "word_perplexity": "perplexity per word",
    "byte_perplexity": "perplexity per byte",
    "bits_per_byte": "bits per byte",
}
PAPERS = "greedy:k=1"  # the rule of the paper's perplexity tables
Entry = Mapping[str, Any]


def number(value: float, metric: str) -> str:
    """A value of a metric with the decimals that tell models apart."""
    return fixed(value, 4 if metric in ("bits_per_byte", "byte_perplexity") else 2)


def fixed(value: float, decimals: int, sign: str = "") -> str:
    """A number with its decimals; zero has no sign."""
    return f"{round(value, decimals) + 0.0:{sign}.{decimals}f}"


def of(name: str, task: Mapping[str, Any]) -> list[str]:
    """A sentence for each model of a task but the baseline."""
    entries = task["rows"]
    base = next((entry for entry in entries if entry["ar"]), None)
    models = dict.fromkeys(entry["model"] for entry in entries if not entry["ar"] and entry["estimator"] != "exact")
    return [
        _sentence(name, task, [e for e in entries if e["model"] == model and not e["ar"]], base) for model in models
    ]


def _sentence(name: str, task: Mapping[str, Any], mine: Sequence[Entry], base: Entry | None) -> str:
    metric, chosen = task["metric"], _chosen(mine)
    unit = "" if metric in ("token_perplexity", "perplexity") else f", {WORDS[metric]}"
    start = f"**{mine[0]['model']}** on {name}{unit}"
    if chosen is None:
        bound = min(
            (e for e in mine if e["estimator"] != "oracle"), key=lambda e: (e["bound"], e["value"]), default=None
        )
        shown = "the oracle only" if bound is None else f"{_bounded(bound, metric)} ({bound['name']})"
        against = _against(bound, base, metric) if bound is not None else ""
        return f"{start}: {shown}{against}; no DUEL result (estimator=duel)."
    text = f"{start}: {number(chosen['value'], metric)} under `{short(chosen['rule'])}` (DUEL)"
    text += f" against {number(base['value'], metric)} for {base['model']}" if base else ""
    elbo = None if chosen["elbo"] is None else task["rows"][chosen["elbo"]]
    text += "." if elbo is None and base is None else _yardstick(chosen, elbo, base, metric)
    likely = min((e for e in mine if e["estimator"] in ("duel", "mixture")), key=lambda e: e["value"])
    if likely is not chosen:
        said = f"`{short(likely['rule'])}`" if likely["estimator"] == "duel" else "mixture of orders"
        text += f" Lowest of its likelihoods: {said}, {number(likely['value'], metric)}."
    return text


def _chosen(mine: Sequence[Entry]) -> Entry | None:
    """The DUEL row of the headline: the paper's rule, else the best one; first where the gap closed is known."""
    duels = [entry for entry in mine if entry["estimator"] == "duel"]
    duels = [entry for entry in duels if entry["rule"] == PAPERS] or duels
    return min(duels, key=lambda entry: (entry["gap_closed"] is None, entry["value"]), default=None)


def _yardstick(chosen: Entry, elbo: Entry | None, base: Entry | None, metric: str) -> str:
    """What the ELBO says, and what that makes of the gap."""
    if elbo is None:
        return f", a gap of {number(chosen['gap'], metric)}; {chosen['gap_closed_reason']}."
    said = f"; the ELBO says {_bounded(elbo, metric)}"
    if base is None:
        return f"{said} ({chosen['gap_closed_reason']})."
    gap, closed = f"the gap of {number(elbo['gap'], metric)}", chosen["gap_closed"]
    if closed is None:
        return f"{said} ({chosen['gap_closed_reason']}); the gap is {number(chosen['gap'], metric)}."
    if closed < 0:
        return f"{said}, less than DUEL: none of {gap} was the yardstick (gap closed {fixed(closed, 1)} %)."
    between = chosen["gap_closed_interval"]
    interval = "" if between is None else f" ({fixed(between[0], 1)} to {fixed(between[1], 1)})"
    return f"{said}, so {fixed(closed, 1)} %{interval} of {gap} was the yardstick."


def _bounded(entry: Entry, metric: str) -> str:
    eps = f" (eps={entry['eps']:g}: no bound)" if entry["eps"] else ""
    return ("<= " if entry["bound"] else "") + number(entry["value"], metric) + eps


def _against(entry: Entry, base: Entry | None, metric: str) -> str:
    if base is None:
        return ""
    most = "at most " if entry["bound"] else ""
    return (
        f" against {number(base['value'], metric)} for {base['model']}, a gap of {most}{number(entry['gap'], metric)}"
    )
