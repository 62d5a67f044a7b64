"""One sentence per model: its perplexity, its ELBO, and the share of the gap to the AR model that DUEL closes."""

from __future__ import annotations

from collections.abc import Sequence

from lm_eval_duel.results.records import Row, TaskComparison
from lm_eval_duel.results.table import MARKDOWN, WORDS, form_of, number, plus_minus
from lm_eval_duel.rules.tables import without_defaults

PAPER_RULE = "greedy:k=1"  # the rule of the paper's perplexity tables
plain, code = MARKDOWN.escape, MARKDOWN.code


def of(name: str, task: TaskComparison) -> list[str]:
    """A sentence for each model of a task except the baseline."""
    models = dict.fromkeys(row.model for row in task.rows if not row.ar and row.estimator != "ar")
    return [_sentence(name, task, [row for row in task.rows if row.model == model and not row.ar]) for model in models]


def chosen_row(mine: Sequence[Row]) -> Row | None:
    """The DUEL row of the headline: the paper's rule, else the best; rows without a cache, then with an ELBO, first."""
    duels = [row for row in mine if row.estimator == "duel"] or [row for row in mine if row.entry.follows_rule]
    duels = [row for row in duels if row.rule == PAPER_RULE] or duels
    return min(duels, key=lambda row: (row.has_cache, row.elbo is None, row.value), default=None)


def _sentence(name: str, task: TaskComparison, mine: Sequence[Row]) -> str:
    chosen, base, form = chosen_row(mine), task.baseline, form_of(task.metric)
    unit = "" if task.metric in ("token_perplexity", "perplexity") else f", {WORDS[task.metric]}"
    start = f"**{plain(mine[0].model)}** on {plain(name)}{unit}"
    against = f" against {number(base.value, form)} for {plain(base.model)}" if base else ""
    if chosen is None:
        bound = min((row for row in mine if row.likelihood), key=lambda row: (row.bound, row.value), default=None)
        if bound is None:
            return f"{start}: the oracle only; no DUEL result (estimator=duel)."
        against += f", a gap of {'at most ' if bound.bound else ''}{number(bound.gap, form)}" if base else ""
        return f"{start}: {_value(bound)} ({plain(bound.name)}){against}; no DUEL result (estimator=duel)."
    text = f"{start}: {_value(chosen)} under {_rule(chosen)} ({chosen.entry.display}){against}"
    elbo = None if chosen.elbo is None else task.rows[chosen.elbo]
    text += "." if elbo is None and base is None else _gap(chosen, elbo, base, form)
    lowest = min((row for row in mine if row.proper), key=lambda row: row.value, default=chosen)
    if lowest is not chosen:
        name = _rule(lowest) if lowest.estimator == "duel" else f"{lowest.entry.display.lower()}{_cache(lowest)}"
        text += f" Lowest of its likelihoods: {name}, {number(lowest.value, form)}."
    return text


def _rule(row: Row) -> str:
    return f"{code(without_defaults(row.rule))}{_cache(row)}"


def _cache(row: Row) -> str:
    return f" with cache={plain(row.cache)}" if row.has_cache else ""


def _value(row: Row) -> str:
    """A row's value, with its bound and its error."""
    remarks = "; ".join(filter(None, [f"eps={row.eps:g}: no bound" if row.eps else "", row.stderr_reason]))
    value = f"{number(row.value, form_of(row.metric))}{plus_minus(row.stderr, row.metric)}"
    return f"{'<= ' if row.bound else ''}{value}{f' ({remarks})' if remarks else ''}"


def _gap(chosen: Row, elbo: Row | None, base: Row | None, form: str) -> str:
    """The ELBO, and how much of its gap to the autoregressive model DUEL closes."""
    reason, closed = plain(chosen.gap_closed_reason), chosen.gap_closed
    if elbo is None:
        return f", a gap of {number(chosen.gap, form)}; {reason}."
    text = f"; the ELBO gives {_value(elbo)}"
    if base is None:
        return f"{text} ({reason})."
    gap = f"the ELBO's gap of {number(elbo.gap, form)}"
    if chosen.distinguishable is False:
        return (
            f"{text}, not distinguishable from DUEL (within two standard errors). To learn how much of {gap} DUEL "
            "closes, raise mc_samples."
        )
    if closed is None:
        return f"{text} ({reason}); the gap is {number(chosen.gap, form)}."
    between = ""  # its interval, or else its Monte Carlo error
    if chosen.gap_closed_interval is not None:
        between = " to ".join(number(end, ".1f") for end in chosen.gap_closed_interval)
    elif chosen.gap_closed_stderr is not None:
        between = f"+- {number(chosen.gap_closed_stderr, '.1f')}"
    percent = f"{number(closed, '.1f')} %"
    if closed < 0:
        percent += f" {between}" if between else ""
        return f"{text}, lower than DUEL, which closes none of {gap} (gap closed {percent})."
    return f"{text}. DUEL closes {percent}{f' ({between})' if between else ''} of {gap}."
