"""The headlines of a report: a sentence about each model of a task, in Markdown."""

from __future__ import annotations

from collections.abc import Sequence

from lm_eval_duel.results import columns, compare, gaps
from lm_eval_duel.results.compare import ComparedRow
from lm_eval_duel.results.rows import Row
from lm_eval_duel.results.table import LEVEL, WORDS, escape, form_of, number, plus_minus
from lm_eval_duel.rules import without_defaults


def of_task(name: str, rows: Sequence[ComparedRow]) -> list[str]:
    """One sentence per model of a task except the baseline, in Markdown: its perplexity, its ELBO and gap closed."""
    base = None
    others = []
    for each in rows:
        if each.row.ar:
            base = each.row
        else:
            others.append(each)
    lines = []
    for of_model in compare.by_model(others).values():
        estimators = {each.row.estimator for each in of_model}
        if estimators != {"ar"}:
            lines.append(_headline(name, base, of_model))
    return lines


def _headline(name: str, base: Row | None, of_model: Sequence[ComparedRow]) -> str:
    """The sentence about a model, and a second one if the paper's rule is not its best."""
    first = of_model[0].row
    form = form_of(first.metric)
    subject = f"**{escape(first.model)}** on {escape(name)}"
    if first.metric != "token_perplexity":
        subject += f", {WORDS[first.metric]}"
    against = "" if base is None else f" against {_value(base)} for {escape(base.model)}"
    chosen = compare.headline(of_model)
    if chosen is None:
        text = f"{subject}: {_without_duel(of_model, against)}; no DUEL result (estimator=duel)."
        return text + _caveat([compare.lowest(of_model).row, base])

    method = chosen.row.entry.display
    if chosen.row.noise_seed is not None:
        method += f", noise seed {chosen.row.noise_seed}"
    text = f"{subject}: {_value(chosen.row)} under {_rule(chosen.row, of_model)} ({method}){against}"
    if base is None and chosen.closed.elbo is None:  # there is no gap to speak of
        text += "."
    else:
        text += _gap(chosen, form)
    lowest = _lowest(chosen.row, of_model)
    if lowest is not chosen.row:
        text += f" Its lowest exact value: {_rule(lowest, of_model)}, {_value(lowest)}."
    return text + _caveat([chosen.row, base, chosen.closed.elbo])


def _caveat(rows: Sequence[Row | None]) -> str:
    """A sentence on what differs between the rows of a headline, although they are compared; empty if nothing does."""
    about_runs = str(gaps.as_published(rows))
    return f" {about_runs[0].upper()}{about_runs[1:]}." if about_runs else ""


def _lowest(chosen: Row, of_model: Sequence[ComparedRow]) -> Row:
    """The lowest exact value of a model, given the noise of the same seed as the chosen one."""
    lowest = chosen
    for each in of_model:
        competes = each.row.score.is_exact and each.row.noise_seed == chosen.noise_seed
        if competes and each.row.value < lowest.value:
            lowest = each.row
    return lowest


def _without_duel(of_model: Sequence[ComparedRow], against: str) -> str:
    """The sentence about a model without a DUEL row: its lowest likelihood or bound. `against`: the baseline."""
    lowest = compare.lowest([each for each in of_model if each.row.score.is_likelihood])
    if lowest is None:
        return "the oracle only"
    if lowest.gap is not None:
        at_most = "at most " if lowest.row.score.is_bound else ""
        against += f", a gap of {at_most}{number(lowest.gap, form_of(lowest.row.metric))}"
    return f"{_value(lowest.row)} ({escape(lowest.row.name)}){against}"


def _rule(row: Row, of_model: Sequence[ComparedRow]) -> str:
    """The rule of a DUEL row, or the estimator of another, with the block if there are several, and the cache."""
    method = escape(without_defaults(row.rule)) if row.is_duel else row.entry.display.lower()
    blocks = {each.row.block for each in of_model if each.row.is_duel}
    if row.is_duel and len(blocks) > 1:
        method += " over the whole target" if row.block == "none" else f" in blocks of {row.block}"
    if row.run.has_cache:
        method += f" with cache={escape(row.cache)}"
    return method


def _value(row: Row) -> str:
    """A row's value, with its bound and its error."""
    text = number(row.value, form_of(row.metric), row.stderr, row.score.is_bound)
    no_bound = f"eps={row.eps:g}: no bound" if row.eps else ""
    in_doubt = "in doubt, see the table" if row.run.in_doubt else ""
    remarks = "; ".join(filter(None, [no_bound, row.stderr_reason, in_doubt]))
    return f"{text} ({remarks})" if remarks else text


def _gap(chosen: ComparedRow, form: str) -> str:
    """The end of the sentence: the ELBO, and the share of its gap to the autoregressive model that DUEL closes."""
    closed = chosen.closed
    reason = escape(str(closed.reason))
    if closed.elbo is None:
        return f", a gap of {number(chosen.gap, form)}; {reason}."
    text = f"; the {closed.of} ELBO gives {_value(closed.elbo)}"
    if closed.elbo_gap is None:
        return f"{text} ({reason})."
    gap = f"the ELBO's gap of {number(closed.elbo_gap, form)}"
    if closed.distinguishable is False:
        return (
            f"{text}, not distinguishable from DUEL (within two standard errors). To learn how much of {gap} DUEL "
            "closes, raise mc_samples."
        )
    if closed.percent is None:
        return f"{text} ({reason}); the gap is {number(chosen.gap, form)}."

    percent = f"{number(closed.percent, '.1f')} %"
    interval = columns.closed_interval(chosen)
    error = f"{LEVEL}: {interval}"
    if not interval:
        stderr = plus_minus(closed.stderr, ".1f").strip()
        error = ", ".join(filter(None, [stderr, "no interval"]))
    if closed.percent < 0:
        share = ", ".join(filter(None, [percent, error, closed.verdict]))
        return f"{text}, lower than DUEL, which closes none of {gap} (gap closed {share})."
    about = "an estimated " if closed.of == gaps.MONTE_CARLO else ""
    verdict = f", {closed.verdict}," if closed.verdict else ""
    return f"{text}. DUEL closes {about}{percent} ({error}){verdict} of {gap}."
