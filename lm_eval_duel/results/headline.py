"""One sentence per model: its perplexity, its ELBO, and the share of the gap to the AR model that DUEL closes."""

from __future__ import annotations

from collections.abc import Sequence

from lm_eval_duel.results import pairs
from lm_eval_duel.results.rows import Row
from lm_eval_duel.results.table import WORDS, escape, form_of, number, plus_minus, span
from lm_eval_duel.rules.tables import without_defaults


def sentences(name: str, rows: Sequence[Row]) -> list[str]:
    """A sentence, in Markdown, for each model of a task except the baseline."""
    base = next((row for row in rows if row.ar), None)
    models = dict.fromkeys(row.model for row in rows if not row.ar and row.estimator != "ar")
    return [_sentence(name, base, [row for row in rows if row.model == model and not row.ar]) for model in models]


def _sentence(name: str, base: Row | None, mine: Sequence[Row]) -> str:
    chosen, metric = pairs.headline(mine), mine[0].metric
    form, unit = form_of(metric), "" if metric in ("token_perplexity", "perplexity") else f", {WORDS[metric]}"
    start = f"**{escape(mine[0].model)}** on {escape(name)}{unit}"
    against = f" against {number(base.value, form)} for {escape(base.model)}" if base else ""
    if chosen is None:
        bound = min((row for row in mine if row.likelihood), key=lambda row: (row.bound, row.value), default=None)
        if bound is None:
            return f"{start}: the oracle only; no DUEL result (estimator=duel)."
        against += f", a gap of {'at most ' if bound.bound else ''}{number(bound.gap, form)}" if base else ""
        return f"{start}: {_value(bound)} ({escape(bound.name)}){against}; no DUEL result (estimator=duel)."
    text = f"{start}: {_value(chosen)} under {_rule(chosen)} ({chosen.entry.display}){against}"
    text += "." if chosen.elbo is None and base is None else _gap(chosen, form)
    lowest = min((row for row in mine if row.proper), key=lambda row: row.value, default=chosen)
    if lowest is not chosen:
        text += f" Lowest of its likelihoods: {_rule(lowest)}, {number(lowest.value, form)}."
    return text


def _rule(row: Row) -> str:
    """The rule of a DUEL row, or the estimator of another, with the cache."""
    method = escape(without_defaults(row.rule)) if row.duel else row.entry.display.lower()
    return f"{method} with cache={escape(row.run.cache)}" if row.run.has_cache else method


def _value(row: Row) -> str:
    """A row's value, with its bound and its error."""
    remarks = "; ".join(filter(None, [f"eps={row.eps:g}: no bound" if row.eps else "", row.stderr_reason]))
    form = form_of(row.metric)
    text = f"{'≤ ' if row.bound else ''}{number(row.value, form)}{plus_minus(row.stderr, form)}"
    return f"{text} ({remarks})" if remarks else text


def _gap(chosen: Row, form: str) -> str:
    """The ELBO, and the share of its gap to the autoregressive model that DUEL closes."""
    reason, closed, elbo = escape(chosen.gap_closed_reason), chosen.gap_closed, chosen.elbo
    if elbo is None:
        return f", a gap of {number(chosen.gap, form)}; {reason}."
    text = f"; the ELBO gives {_value(elbo)}"
    if elbo.gap is None:
        return f"{text} ({reason})."
    gap = f"the ELBO's gap of {number(elbo.gap, form)}"
    if chosen.distinguishable is False:
        return (
            f"{text}, not distinguishable from DUEL (within two standard errors). To learn how much of {gap} DUEL "
            "closes, raise mc_samples."
        )
    if closed is None:
        return f"{text} ({reason}); the gap is {number(chosen.gap, form)}."
    between = span(chosen.gap_closed_interval, ".1f") or plus_minus(chosen.gap_closed_stderr, ".1f").strip()
    percent = f"{number(closed, '.1f')} %"
    if closed < 0:
        percent += f" {between}" if between else ""
        return f"{text}, lower than DUEL, which closes none of {gap} (gap closed {percent})."
    return f"{text}. DUEL closes {percent}{f' ({between})' if between else ''} of {gap}."
