"""One sentence per model: its perplexity, its ELBO, and the share of the gap to the AR model that DUEL closes."""

from __future__ import annotations

from collections.abc import Sequence

from lm_eval_duel.results.records import Row, TaskComparison
from lm_eval_duel.results.table import MARKDOWN, WORDS, form_of, number, plus_minus
from lm_eval_duel.rules.tables import short

PAPER_RULE = "greedy:k=1"  # the rule of the paper's perplexity tables
plain, code = MARKDOWN.escape, MARKDOWN.code


def of(name: str, task: TaskComparison) -> list[str]:
    """A sentence for each model of a task except the baseline."""
    entries, base = task.rows, task.baseline
    models = dict.fromkeys(entry.model for entry in entries if not entry.ar and entry.estimator != "ar")
    return [_sentence(name, task, [e for e in entries if e.model == model and not e.ar], base) for model in models]


def _sentence(name: str, task: TaskComparison, mine: Sequence[Row], base: Row | None) -> str:
    metric, chosen = task.metric, chosen_row(mine)
    unit = "" if metric in ("token_perplexity", "perplexity") else f", {WORDS[metric]}"
    start = f"**{plain(mine[0].model)}** on {plain(name)}{unit}"
    if chosen is None:
        bound = min((e for e in mine if e.likelihood), key=lambda e: (e.bound, e.value), default=None)
        shown = "the oracle only" if bound is None else f"{_bounded(bound, metric)} ({plain(bound.name)})"
        against = _against(bound, base, metric) if bound is not None else ""
        return f"{start}: {shown}{against}; no DUEL result (estimator=duel)."
    text = f"{start}: {_bounded(chosen, metric)} under {_rule(chosen)} ({_method(chosen)})"
    text += f" against {number(base.value, form_of(metric))} for {plain(base.model)}" if base else ""
    elbo = None if chosen.elbo is None else task.rows[chosen.elbo]
    text += "." if elbo is None and base is None else _gap(chosen, elbo, base, metric)
    likelihoods = [entry for entry in mine if entry.proper]
    likely = min(likelihoods, key=lambda entry: entry.value, default=chosen)
    if likely is not chosen:
        display = likely.entry.display.lower()
        lowest = _rule(likely) if likely.estimator == "duel" else f"{display}{_cache(likely)}"
        text += f" Lowest of its likelihoods: {lowest}, {number(likely.value, form_of(metric))}."
    return text


def _rule(entry: Row) -> str:
    return f"{code(short(entry.rule))}{_cache(entry)}"


def _cache(entry: Row) -> str:
    return f" with cache={plain(entry.cache)}" if entry.has_cache else ""


def chosen_row(mine: Sequence[Row]) -> Row | None:
    """The DUEL row of the headline: the paper's rule, else the best; rows without a cache, then with an ELBO, first."""
    duels = [entry for entry in mine if entry.estimator == "duel"]
    duels = duels or [entry for entry in mine if entry.entry.follows_rule]
    duels = [entry for entry in duels if entry.rule == PAPER_RULE] or duels
    return min(duels, key=lambda entry: (bool(_cache(entry)), entry.elbo is None, entry.value), default=None)


def _method(chosen: Row) -> str:
    """DUEL, or the name of an estimate of it."""
    return chosen.entry.display


def _gap(chosen: Row, elbo: Row | None, base: Row | None, metric: str) -> str:
    """The ELBO, and how much of its gap to the autoregressive model DUEL closes."""
    if elbo is None:
        return f", a gap of {number(chosen.gap, form_of(metric))}; {plain(chosen.gap_closed_reason)}."
    text = f"; the ELBO gives {_bounded(elbo, metric)}"
    if base is None:
        return f"{text} ({plain(chosen.gap_closed_reason)})."
    gap, closed = f"the ELBO's gap of {number(elbo.gap, form_of(metric))}", chosen.gap_closed
    if chosen.distinguishable is False:
        return (
            f"{text}, not distinguishable from DUEL (within two standard errors). To learn how much of {gap} DUEL "
            "closes, raise mc_samples."
        )
    if closed is None:
        return f"{text} ({plain(chosen.gap_closed_reason)}); the gap is {number(chosen.gap, form_of(metric))}."
    interval = _interval(chosen)
    if closed < 0:
        interval = interval.replace("(", "").replace(")", "")
        return f"{text}, lower than DUEL, which closes none of {gap} (gap closed {number(closed, '.1f')} %{interval})."
    return f"{text}. DUEL closes {number(closed, '.1f')} %{interval} of {gap}."


def _interval(chosen: Row) -> str:
    """The interval of gap closed, or else its Monte Carlo error."""
    if (between := chosen.gap_closed_interval) is not None:
        return f" ({number(between[0], '.1f')} to {number(between[1], '.1f')})"
    error = chosen.gap_closed_stderr
    return "" if error is None else f" (+- {number(error, '.1f')})"


def _bounded(entry: Row, metric: str) -> str:
    remarks = [f"eps={entry.eps:g}: no bound" if entry.eps else "", entry.stderr_reason]
    remark = f" ({'; '.join(filter(None, remarks))})" if any(remarks) else ""
    bound = "<= " if entry.bound else ""
    return f"{bound}{number(entry.value, form_of(metric))}{plus_minus(entry.stderr, metric)}{remark}"


def _against(entry: Row, base: Row | None, metric: str) -> str:
    if base is None:
        return ""
    most = "at most " if entry.bound else ""
    return (
        f" against {number(base.value, form_of(metric))} for {plain(base.model)}, "
        f"a gap of {most}{number(entry.gap, form_of(metric))}"
    )
