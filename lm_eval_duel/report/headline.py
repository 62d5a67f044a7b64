"""One sentence per model: its perplexity, its ELBO, and the share of the gap to the AR model that DUEL closes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lm_eval_duel.estimators import registry
from lm_eval_duel.report.markdown import code, plain
from lm_eval_duel.report.read import NO_CACHE
from lm_eval_duel.rules.tables import short

WORDS = {
    "token_perplexity": "perplexity per token",
    "perplexity": "perplexity",
    "word_perplexity": "perplexity per word",
    "byte_perplexity": "perplexity per byte",
    "bits_per_byte": "bits per byte",
}
PAPER_RULE = "greedy:k=1"  # the rule of the paper's perplexity tables
Entry = Mapping[str, Any]


def number(value: float, metric: str) -> str:
    """A metric's value with enough decimals to tell models apart."""
    return fixed(value, 4 if metric in ("bits_per_byte", "byte_perplexity") else 2)


def fixed(value: float, decimals: int, sign: str = "") -> str:
    """A number with fixed decimals, without negative zero."""
    return f"{round(value, decimals) + 0.0:{sign}.{decimals}f}"


def plus_minus(error: float | None, metric: str) -> str:
    """` +- ` and the Monte Carlo standard error of a metric; empty if there is none."""
    if error is None:
        return ""
    text = number(error, metric)
    return f" +- {text if text.strip('0.') else format(error, '.1g')}"


def of(name: str, task: Mapping[str, Any]) -> list[str]:
    """A sentence for each model of a task except the baseline."""
    entries = task["rows"]
    base = next((entry for entry in entries if entry["ar"]), None)
    models = dict.fromkeys(entry["model"] for entry in entries if not entry["ar"] and entry["estimator"] != "ar")
    return [
        _sentence(name, task, [e for e in entries if e["model"] == model and not e["ar"]], base) for model in models
    ]


def _sentence(name: str, task: Mapping[str, Any], mine: Sequence[Entry], base: Entry | None) -> str:
    metric, chosen = task["metric"], chosen_row(mine)
    unit = "" if metric in ("token_perplexity", "perplexity") else f", {WORDS[metric]}"
    start = f"**{plain(mine[0]['model'])}** on {plain(name)}{unit}"
    if chosen is None:
        bound = min((e for e in mine if e["likelihood"]), key=lambda e: (e["bound"], e["value"]), default=None)
        shown = "the oracle only" if bound is None else f"{_bounded(bound, metric)} ({plain(bound['name'])})"
        against = _against(bound, base, metric) if bound is not None else ""
        return f"{start}: {shown}{against}; no DUEL result (estimator=duel)."
    text = f"{start}: {_bounded(chosen, metric)} under {_rule(chosen)} ({_method(chosen)})"
    text += f" against {number(base['value'], metric)} for {plain(base['model'])}" if base else ""
    elbo = None if chosen["elbo"] is None else task["rows"][chosen["elbo"]]
    text += "." if elbo is None and base is None else _gap(chosen, elbo, base, metric)
    kinds = {entry["estimator"]: registry.find(entry["estimator"]).kind for entry in mine}
    likelihoods = [entry for entry in mine if kinds[entry["estimator"]] is registry.Kind.LIKELIHOOD]
    likely = min(likelihoods, key=lambda entry: entry["value"], default=chosen)
    if likely is not chosen:
        display = registry.find(likely["estimator"]).display.lower()
        lowest = _rule(likely) if likely["estimator"] == "duel" else f"{display}{_cache(likely)}"
        text += f" Lowest of its likelihoods: {lowest}, {number(likely['value'], metric)}."
    return text


def _rule(entry: Entry) -> str:
    return f"{code(short(entry['rule']))}{_cache(entry)}"


def _cache(entry: Entry) -> str:
    return f" with cache={plain(entry['cache'])}" if entry["cache"] not in (None, NO_CACHE) else ""


def chosen_row(mine: Sequence[Entry]) -> Entry | None:
    """The DUEL row of the headline: the paper's rule, else the best; rows without a cache, then with an ELBO, first."""
    duels = [entry for entry in mine if entry["estimator"] == "duel"]
    duels = duels or [entry for entry in mine if registry.find(entry["estimator"]).follows_rule]
    duels = [entry for entry in duels if entry["rule"] == PAPER_RULE] or duels
    return min(duels, key=lambda entry: (bool(_cache(entry)), entry["elbo"] is None, entry["value"]), default=None)


def _method(chosen: Entry) -> str:
    """DUEL, or the name of an estimate of it."""
    return registry.find(chosen["estimator"]).display


def _gap(chosen: Entry, elbo: Entry | None, base: Entry | None, metric: str) -> str:
    """The ELBO, and how much of its gap to the autoregressive model DUEL closes."""
    if elbo is None:
        return f", a gap of {number(chosen['gap'], metric)}; {plain(chosen['gap_closed_reason'])}."
    text = f"; the ELBO gives {_bounded(elbo, metric)}"
    if base is None:
        return f"{text} ({plain(chosen['gap_closed_reason'])})."
    gap, closed = f"the ELBO's gap of {number(elbo['gap'], metric)}", chosen["gap_closed"]
    if chosen["distinguishable"] is False:
        return (
            f"{text}, not distinguishable from DUEL (within two standard errors). To learn how much of {gap} DUEL "
            "closes, raise mc_samples."
        )
    if closed is None:
        return f"{text} ({plain(chosen['gap_closed_reason'])}); the gap is {number(chosen['gap'], metric)}."
    interval = _interval(chosen)
    if closed < 0:
        interval = interval.replace("(", "").replace(")", "")
        return f"{text}, lower than DUEL, which closes none of {gap} (gap closed {fixed(closed, 1)} %{interval})."
    return f"{text}. DUEL closes {fixed(closed, 1)} %{interval} of {gap}."


def _interval(chosen: Entry) -> str:
    """The interval of gap closed, or else its Monte Carlo error."""
    if (between := chosen["gap_closed_interval"]) is not None:
        return f" ({fixed(between[0], 1)} to {fixed(between[1], 1)})"
    error = chosen["gap_closed_stderr"]
    return "" if error is None else f" (+- {fixed(error, 1)})"


def _bounded(entry: Entry, metric: str) -> str:
    remarks = [f"eps={entry['eps']:g}: no bound" if entry["eps"] else "", entry["stderr_reason"]]
    remark = f" ({'; '.join(filter(None, remarks))})" if any(remarks) else ""
    bound = "<= " if entry["bound"] else ""
    return f"{bound}{number(entry['value'], metric)}{plus_minus(entry['stderr'], metric)}{remark}"


def _against(entry: Entry, base: Entry | None, metric: str) -> str:
    if base is None:
        return ""
    most = "at most " if entry["bound"] else ""
    return (
        f" against {number(base['value'], metric)} for {plain(base['model'])}, "
        f"a gap of {most}{number(entry['gap'], metric)}"
    )
