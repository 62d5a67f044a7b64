"""The rows that are compared: pairs with their differences, the ELBO of a row, and the row without its cache."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Sequence

from lm_eval_duel.results import paired, rows
from lm_eval_duel.results.paired import Side
from lm_eval_duel.results.read import NO_CACHE
from lm_eval_duel.results.rows import NON_IDENTITY_KEYS, OF_ESTIMATOR, Pair, Row

UNITS = {"token_perplexity": "token", "perplexity": "document", "word_perplexity": "word"}  # of others: byte
BOTH, RULES, MODELS, ALL, NONE = "both", "rules", "models", "all", "none"
CHOICES = (BOTH, RULES, MODELS, ALL, NONE)  # of --pairs
MOST_ROWS = 5  # of which all pairs are listed; of more, each is compared with the lowest
PAPER_RULE = "greedy:k=1"  # the rule of the paper's perplexity tables
CONVENTIONS = {"special_tokens", "windows", "max_length", "sigma"}  # entries in which published figures may differ


def unit(metric: str) -> str:
    """The unit that a metric counts: `token`, `word`, ..."""
    return UNITS.get(metric, "byte")


def pair(first: Row, second: Row) -> Pair:
    """The difference of two rows with its interval (or the reason why there is none) and verdict."""
    sides = []
    for row, name in zip((first, second), rows.names((first, second)), strict=True):
        sides.append(Side(name, row.kind, row.rate, row.rate_stderr, row.stderr_reason, row.draws))
    found = paired.difference(*sides, unit(first.metric), [key.rpartition(":")[0] for key in first.documents])
    reason = ""
    if found.difference is None:
        reason = "no difference of an infinite perplexity"
    elif found.interval is None:
        lacking = first if first.draws is None else second
        reason = f"no interval: {lacking.model}, {lacking.name}: {lacking.reason}"
    return Pair(**vars(found), first=first, second=second, reason=reason)


def choose(choice: str, shown: Sequence[Row]) -> list[Pair]:
    """The pairs of `--pairs`.

    `rules`: the DUEL rows of a network with one block and one cache against each other; of more than five, each against
    the lowest. `models`: the row of each model that its headline is about, in the same way; `both`: these two. `all`:
    every two rows. The oracle, which is not a likelihood, is in no pair.
    """
    likelihoods = [row for row in shown if row.likelihood]
    if choice == ALL:
        return list(itertools.starmap(pair, itertools.combinations(likelihoods, 2)))
    groups: dict[tuple, list[Row]] = {}
    if choice in (BOTH, MODELS):
        models = dict.fromkeys(row.model for row in likelihoods)
        groups[()] = [main_row([row for row in likelihoods if row.model == model]) for model in models]
    for row in likelihoods if choice in (BOTH, RULES) else ():
        if row.estimator == "duel" and not row.ar:
            groups.setdefault((row.model, row.block, row.run.cache, row.qualifiers), []).append(row)
    found: list[tuple[Row, Row]] = []
    for group in groups.values():
        lowest = min(group, key=lambda row: row.value, default=None)
        every = itertools.combinations(group, 2) if len(group) <= MOST_ROWS else ((row, lowest) for row in group)
        found += [(first, second) for first, second in every if first is not second]
    return list(itertools.starmap(pair, found))


def main_row(likelihoods: Sequence[Row]) -> Row:
    """A model's row: the baseline, the row of its headline, or else its lowest likelihood or bound."""
    baseline = next((row for row in likelihoods if row.ar), None)
    return baseline or headline(likelihoods) or min(likelihoods, key=lambda row: (row.bound, row.value))


def headline(shown: Sequence[Row]) -> Row | None:
    """The DUEL row of a headline: the paper's rule, else the best; rows without a cache, then with an ELBO, first."""
    duels = [row for row in shown if row.estimator == "duel"] or [row for row in shown if row.entry.follows_rule]
    duels = [row for row in duels if row.rule == PAPER_RULE] or duels
    return min(duels, key=lambda row: (row.run.has_cache, row.elbo is None, row.value), default=None)


# ---------------------------------------------------------------- which rows belong together


def cache_cost(row: Row, shown: Sequence[Row]) -> Pair | None:
    """Cached minus uncached, everything else in the spec the same; None for a row without a cache."""
    if not row.run.has_cache:
        return None
    ignored = {"estimator"} if row.of_draws else NON_IDENTITY_KEYS  # the draws are part of its value

    def fits(other: Row) -> bool:
        return other.run.cache == NO_CACHE and (other.estimator, other.rule) == (row.estimator, row.rule)

    nearest, differences = _nearest(row, shown, fits, ignored | {"cache"})
    if nearest and not differences:
        return pair(row, nearest[0])
    reason = "there is no result of this network and rule with cache=none"
    if differences:
        reason = f"the result with cache=none is of another spec: {'; '.join(differences.values())}"
    return Pair(first=row, second=None, reason=reason)


def find_elbo(duel: Row, shown: Sequence[Row], as_published: bool = False) -> tuple[Row | None, str]:
    """The ELBO of a DUEL row, or None and the reason.

    The ELBO is of the same model under the same spec, except for the entries of the estimator. It covers the whole
    target for bidirectional networks and the trained blocks for block-causal ones, where the mean over all orders
    (elbo_exact) may replace a Monte Carlo ELBO. Bounds are preferred, then more draws. `as_published`: without an ELBO
    of the same spec, accept one with other windows or scored positions, and return the differences.
    """
    causal = duel.run.duel.get("attention") in ("block_causal", "causal_prefix")
    wanted = duel.run.block if causal else "none"

    def fits(row: Row) -> bool:
        return row.block == wanted and (row.drawn_bound or (causal and row.estimator == "elbo_exact"))

    nearest, differences = _nearest(duel, shown, fits, NON_IDENTITY_KEYS | OF_ESTIMATOR)
    if not nearest:
        return None, f"no ELBO (estimator=elbo, elbo_block={wanted})"
    listed = "; ".join(differences.values())
    if differences and not (as_published and differences.keys() <= CONVENTIONS):
        return None, f"no ELBO of the same spec: {listed}"

    def worth(row: Row) -> tuple:
        draws = row.run.spec.get("mc_samples", "")
        return not row.eps, row.drawn_bound, float(draws) if draws not in ("", "none") else 1.0

    return max(nearest, key=worth), f"as published, of another convention: {listed}" if differences else ""


def _nearest(
    row: Row, shown: Sequence[Row], fits: Callable[[Row], bool], ignored: Collection[str]
) -> tuple[list[Row], dict[str, str]]:
    """The fitting rows of the same model whose specs are nearest to a row's, and how they differ."""
    here = row.run.spec
    found: list[tuple[Row, dict[str, str]]] = []
    for other in shown:
        if other.run.key == row.run.key and fits(other):
            there = other.run.spec
            differences = {
                key: f"{key}={there.get(key, 'not set')} there, {here.get(key, 'not set')} here"
                for key in sorted({*here, *there} - set(ignored))
                if here.get(key, "not set") != there.get(key, "not set")
            }
            found.append((other, differences))
    least = min((differences for _, differences in found), key=len, default={})
    return [other for other, differences in found if differences == least], least
