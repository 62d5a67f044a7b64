"""Paired differences between rows of a task: nats per unit on the same documents, with a verdict in words.

The difference of two rows is rate(first) - rate(second), where a rate is -log p / units over all documents. Below 0 the
first row is better. The interval is from the bootstrap over documents that all rows share.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence

import numpy as np

from lm_eval_duel.results import headline, stats
from lm_eval_duel.results.read import NO_CACHE
from lm_eval_duel.results.records import UNCLEAR, Pair, Row
from lm_eval_duel.results.rows import VARIES
from lm_eval_duel.rules.tables import short

UNITS = {"token_perplexity": "token", "perplexity": "document", "word_perplexity": "word"}  # of others: byte
BOTH, RULES, MODELS, ALL, NONE = "both", "rules", "models", "all", "none"
CHOICES = (BOTH, RULES, MODELS, ALL, NONE)  # of --pairs
MOST_ROWS = 5  # of which all pairs are listed; of more, each is compared with the lowest
FEW = 10  # documents below which a bootstrap interval is too narrow for a verdict
EQUAL = 1e-6  # nats per unit that are float noise
Rates = Mapping[int, np.ndarray]  # row number -> bootstrap draws of its rate


def unit(metric: str) -> str:
    """What a metric counts: `token`, `word`, ..."""
    return UNITS.get(metric, "byte")


# ---------------------------------------------------------------- one pair


def pair(rows: Sequence[Row], rates: Rates, documents: int, first: int, second: int) -> Pair:
    """The difference of two rows with its interval (or the reason why there is none) and verdict."""
    both = rows[first], rows[second]
    values = [stats.rate(row.metric, row.value) for row in both]
    difference = values[0] - values[1] if all(map(math.isfinite, values)) else None
    lacking = [rows[n] for n in (first, second) if n not in rates]
    interval = None if lacking or difference is None else stats.interval(rates[first] - rates[second])
    reason, word, names = "", "", apart(*both)
    if difference is None:
        reason = "no difference of an infinite perplexity"
    elif lacking:
        reason = f"no interval: {lacking[0].model}, {lacking[0].name}: {lacking[0].reason}"
    else:
        reasons = [
            f"{name} is neither a likelihood nor a bound" if row.eps else row.stderr_reason
            for row, name in zip(both, names, strict=True)
        ]
        word = verdict(names, interval, documents, [row.bound for row in both], reasons)
    return Pair(first, second, list(names), difference, interval, reason, word)


def verdict(
    names: Sequence[str], interval: Sequence[float], documents: int, bounds: Sequence[bool], reasons: Sequence[str]
) -> str:
    """Which of two is better, by the interval of their difference. `reasons`: why there can be no verdict."""
    low, high = interval
    if reason := next(filter(None, reasons), ""):
        return f"no verdict: {reason}"
    if max(abs(low), abs(high)) < EQUAL:
        return "equal"
    if documents < FEW:
        return f"no verdict from {documents} documents"
    if low <= 0 <= high:
        return UNCLEAR
    better = 0 if high < 0 else 1
    if bounds[1 - better]:  # its own value may be lower than its bound
        return f"no verdict: {names[1 - better]} is an upper bound"
    return f"{names[better]} is better"


def apart(first: Row, second: Row) -> tuple[str, str]:
    """The shortest names that tell two rows apart."""
    labels = [_labels(first), _labels(second)]
    differing = [(a, b) for a, b in zip(*labels, strict=True) if a != b]
    here, there = (", ".join(filter(None, part)) for part in zip(*differing, strict=True)) if differing else ("", "")
    return here or first.name, there or second.name


def _labels(row: Row) -> list[str]:
    method = short(row.rule) if row.rule else row.entry.title
    block = row.block_name if row.block in (None, "none") else f"block {row.block}"
    return [row.model, method, block, "" if row.cache is None else f"cache={row.cache}", row.qualifiers]


# ---------------------------------------------------------------- which pairs


def of(choice: str, entries: Sequence[Row], rates: Rates, documents: int) -> list[Pair]:
    """The pairs of `--pairs`.

    `rules`: the DUEL rows of a network with one block and one cache against each other; of more than five, each against
    the lowest. `models`: the row of each model that its headline is about, in the same way; `both`: these two. `all`:
    every two rows. The oracle, which is not a likelihood, is in no pair.
    """
    if choice == ALL:
        numbers = list(itertools.combinations([n for n, e in enumerate(entries) if e.likelihood], 2))
    else:
        groups = [_of_models(entries)] if choice in (BOTH, MODELS) else []
        groups += _groups(entries) if choice in (BOTH, RULES) else []
        numbers = [pair for group in groups for pair in _within(group, entries)]
    return [pair(entries, rates, documents, *two) for two in numbers]


def _of_models(entries: Sequence[Row]) -> list[int]:
    """The number of each model's row: that of its headline, the AR row, or else its lowest likelihood or bound."""
    chosen = []
    for model in dict.fromkeys(entry.model for entry in entries):
        mine = [entry for entry in entries if entry.model == model and entry.likelihood]
        row = next((entry for entry in mine if entry.ar), None) or headline.chosen_row(mine)
        row = row or min(mine, key=lambda entry: (entry.bound, entry.value), default=None)
        chosen += [n for n, entry in enumerate(entries) if entry is row]
    return chosen


def _groups(entries: Sequence[Row]) -> list[list[int]]:
    """The numbers of the DUEL rows that differ in the rule only."""
    groups: dict[tuple, list[int]] = {}
    for n, entry in enumerate(entries):
        if entry.estimator == "duel" and not entry.ar:
            key = entry.model, entry.block, entry.cache, entry.qualifiers
            groups.setdefault(key, []).append(n)
    return list(groups.values())


def _within(group: Sequence[int], entries: Sequence[Row]) -> list[tuple[int, int]]:
    if len(group) <= MOST_ROWS:
        return list(itertools.combinations(group, 2))
    lowest = min(group, key=lambda n: entries[n].value)
    return [(n, lowest) for n in group if n != lowest]


# ---------------------------------------------------------------- the cost of a cache


def cache_costs(rows: Sequence[Row], rates: Rates, documents: int) -> dict[int, Pair]:
    """row number -> cached minus uncached, everything else in the spec the same, of the rows under a cache."""
    costs = {}
    for n, row in enumerate(rows):
        if row.cached:
            partner, reason = _uncached(row, rows)
            costs[n] = Pair(n, None, [], None, None, reason, "")
            if partner is not None:
                costs[n] = pair(rows, rates, documents, n, partner)
    return costs


def _uncached(row: Row, rows: Sequence[Row]) -> tuple[int | None, str]:
    """The number of the row of the same network, estimator, rule and spec without a cache, or None and the reason."""
    alike = {
        n: _differences(row, other)
        for n, other in enumerate(rows)
        if other.cache == NO_CACHE
        and (other.run.key, other.estimator, other.rule) == (row.run.key, row.estimator, row.rule)
    }
    if not alike:
        return None, "there is no result of this network and rule with cache=none"
    number, differences = min(alike.items(), key=lambda item: len(item[1]))
    if differences:
        return None, f"the result with cache=none is of another spec: {'; '.join(differences)}"
    return number, ""


def _differences(cached: Row, plain: Row) -> list[str]:
    kept = VARIES if cached.estimator != "elbo" else {"estimator"}  # the draws of an ELBO are part of its value
    keys = sorted({*cached.run.spec, *plain.run.spec} - kept - {"cache"})
    pairs = [(key, plain.run.spec.get(key, "not set"), cached.run.spec.get(key, "not set")) for key in keys]
    return [f"{key}={there} there, {here} here" for key, there, here in pairs if here != there]
