"""Paired differences of averages other than perplexities, such as `acc`, over documents that two runs share."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from typing import Any, TypeAlias

import numpy as np

from lm_eval_duel.errors import counted
from lm_eval_duel.estimators import registry
from lm_eval_duel.results import bootstrap, compare, gaps, match, order, read, rows, stats
from lm_eval_duel.results.rows import Row
from lm_eval_duel.results.runs import STOCK, Run, parts_of_average
from lm_eval_duel.results.spec_entries import bos_of
from lm_eval_duel.results.table import Note

NOT_DECODED = "counts whether greedy decoding would produce the text, which this estimator does not know"
FROM_BOUND = "from a bound: options are ranked by bounds of their log-likelihoods, not by the log-likelihoods"
EQUAL = "equal in every document"
WITHOUT_BOS = (
    "its texts have a BOS only if the tokenizer adds one, and those of our results do; add_bos_token=True adds it to "
    "--model hf (in a run of its own, since of whole texts it would be scored), and bos=none leaves it out of ours"
)
COUNTED = "acc"  # in a loglikelihood task, the share of texts that greedy decoding would produce

RowPair: TypeAlias = tuple[Row, Row]
Scores: TypeAlias = dict[str, dict[str, float]]  # of the documents of a run, by average
Draws: TypeAlias = dict[str, np.ndarray]  # of a run, by average


def about_bos(run: Run, others: Iterable[Run]) -> str:
    """A remark on a result of `--model hf` whose texts may lack the BOS that those of others have; empty for others."""
    if run.config.ours or run.config.model not in STOCK or "add_bos_token" in run.config.model_args:
        return ""
    with_bos = any(other.config.ours and bos_of(other.spec) != "none" for other in others)
    return WITHOUT_BOS if with_bos else ""


def about_contexts(run: Run, name: str) -> str:
    """The number of contexts of a task that a run has cut, for remarks; empty if there are none."""
    return match.cut_contexts(run, name) if run.cut_contexts(name) else ""


def remark(run: Run, name: str, metric: str) -> str:
    """A remark on what an average of a task is not, under the run's estimator; empty if it is what its name says."""
    without_filter, _ = parts_of_average(metric)
    output_type = run.every_task[name].output_type
    entry = registry.find(run.config.estimator)
    if output_type == "loglikelihood" and without_filter == COUNTED and not entry.decodes:
        return NOT_DECODED
    if output_type == "multiple_choice" and entry.kind.is_bound:
        return FROM_BOUND
    return ""


@dataclasses.dataclass(frozen=True)
class AveragePair:
    """An average of two rows of one task: first minus second, over the same documents.

    `difference`: None, with the `reason`, if the documents differ. `interval`: 95 %, by the bootstrap over documents;
    None with the `reason`. `verdict`: which run is better, or that nobody can say, with the `verdict_reason` if it is
    not the interval.
    """

    first: Row
    second: Row
    names: tuple[str, str]
    metric: str
    difference: float | None = None
    interval: tuple[float, float] | None = None
    reason: Note = dataclasses.field(default_factory=Note)
    verdict: str = ""
    verdict_reason: Note = dataclasses.field(default_factory=Note)


# ---------------------------------------------------------------- which rows are compared


def chosen_pairs(choice: str, in_order: Sequence[Row]) -> list[RowPair]:
    """The pairs of `--pairs`, of the rows that `compare.choose` takes. Averages have no value that decides on rows.

    So of more than five rows each is compared with the main one. Cached rows are compared with uncached ones among the
    rules, not in a table of their own. Of several results of a value, each pair has those that fit best.
    """
    results = {of_value[-1]: of_value for of_value in _likelihoods(in_order)}
    chosen = []
    for first, second in _pairs_of_values(choice, list(results)):
        chosen.append(max(itertools.product(results[first], results[second]), key=_fit))
    return chosen


def _pairs_of_values(choice: str, likelihoods: Sequence[Row]) -> list[RowPair]:
    """The pairs of rows of different values."""
    if choice == compare.ALL:
        return list(itertools.combinations(likelihoods, 2))
    pairs: list[RowPair] = []
    if choice in (compare.BOTH, compare.MODELS):
        models: dict[str, list[Row]] = {}
        for row in likelihoods:
            models.setdefault(row.model, []).append(row)
        pairs += _pairs_of(list(map(_main_row, models.values())))
    if choice in (compare.BOTH, compare.RULES):
        for group in compare.by_setting(likelihoods):
            pairs += _pairs_of(group)
        for row in likelihoods:
            if row.run.has_cache:
                uncached, _ = gaps.uncached(row, likelihoods)
                if uncached is not None:
                    pairs.append((row, uncached))
    return pairs


def possible_pairs(rows: Sequence[Row]) -> int:
    """The number of pairs of `--pairs all`."""
    return math.comb(len(_likelihoods(rows)), 2)


def _fit(pair: RowPair) -> tuple:
    """Prefers rows of the same documents, then of equally many, then those of most documents, then the newest."""
    first, second = (row.run.every_task[row.task] for row in pair)
    same = not any(match.identity_differences(first, second, sampled=False))
    documents = (first.size or 0) + (second.size or 0)
    return same, first.size == second.size, documents, *(row.run.header.date for row in pair)


def _likelihoods(rows: Iterable[Row]) -> list[list[Row]]:
    """The results of each value but the oracle's."""
    results: dict[tuple, list[Row]] = {}  # oldest first, as rows are
    for row in rows:
        if row.score.is_likelihood:
            results.setdefault((order.method_key(row), order.identity(row)), []).append(row)
    return list(results.values())


def _pairs_of(group: Sequence[Row]) -> list[RowPair]:
    return compare.pairs_of(group, _main_row(group)) if group else []


def _main_row(rows: Iterable[Row]) -> Row:
    """The row that stands for others: the baseline, else a DUEL row as in headlines, else the first."""

    def preference(row: Row) -> tuple:
        is_of_paper = row.rule == compare.PAPER_RULE
        seed = float(row.noise_seed or 0)
        return not row.ar, row.estimator != "duel", not row.is_duel, not is_of_paper, row.run.has_cache, seed

    return min(rows, key=preference)


# ---------------------------------------------------------------- differences


def pairs(name: str, chosen: Sequence[RowPair]) -> list[AveragePair]:
    """The paired differences of the averages of a task, of pairs of its rows."""
    scores: dict[Run, Scores] = {}
    draws: dict[Run, Draws] = {}
    for row in itertools.chain.from_iterable(chosen):
        if row.run not in scores:
            scores[row.run] = read.document_scores(row.run, name)
            draws[row.run] = _draws(scores[row.run])
    compared: list[AveragePair] = []
    for first, second in chosen:
        compared += _of_two(name, (first, second), scores, draws)
    return compared


def _draws(scores_of_run: Scores) -> Draws:
    """The averages of a run in each draw of the bootstrap over its documents.

    Runs with the same documents draw the same ones, since these are in one order and the seed is fixed.
    """
    draws = {}
    for metric, scores in scores_of_run.items():
        table = np.array([[score, 1.0] for score in scores.values()])  # (documents, 2)
        once = bootstrap.of_distinct(table, [bootstrap.text_of(key) for key in scores])  # (distinct documents, 2)
        sums = bootstrap.resample(once)  # (draws, 2)
        draws[metric] = sums[:, 0] / sums[:, 1]  # (draws,)
    return draws


def _of_two(
    name: str, pair: RowPair, scores: Mapping[Run, Scores], draws: Mapping[Run, Draws]
) -> Iterator[AveragePair]:
    """The differences of each average that two runs share."""
    first_name, second_name = rows.names(pair)
    first, second = pair
    for metric in first.run.scores(name):
        if metric in second.run.scores(name):
            without_values = AveragePair(first, second, (first_name, second_name), metric)
            yield _with_values(name, without_values, scores, draws)


def _with_values(name: str, pair: AveragePair, scores: Mapping[Run, Scores], draws: Mapping[Run, Draws]) -> AveragePair:
    """The pair with its difference, interval and verdict, or the reasons for none."""
    metric = pair.metric
    runs = (pair.first.run, pair.second.run)
    first, second = runs
    reason = _no_difference(name, metric, runs, scores)
    if reason:
        return dataclasses.replace(pair, reason=reason)
    difference = first.scores(name)[metric][0] - second.scores(name)[metric][0]
    scores_of_first = scores[first].get(metric, {})
    reason = _no_interval(name, metric, runs, scores)
    if reason:
        return dataclasses.replace(pair, difference=difference, reason=reason)
    distinct = _distinct(scores_of_first)
    low, high = bootstrap.percentile_interval(draws[first][metric] - draws[second][metric], distinct)
    verdict = "no verdict"
    doubt = _doubt(name, metric, runs)
    remarks = [doubt, *(about_bos(run, runs) for run in runs)]
    if doubt:
        remarks.append(stats.too_few(list(map(bootstrap.text_of, scores_of_first))))
    else:
        verdict = _verdict(name, metric, runs, pair.names, (low, high), distinct)
    verdict_reason = Note("; ".join(filter(None, remarks)))
    return dataclasses.replace(
        pair, difference=difference, interval=(low, high), verdict=verdict, verdict_reason=verdict_reason
    )


def _no_difference(name: str, metric: str, runs: tuple[Run, Run], scores: Mapping[Run, Scores]) -> Note:
    """The reason that an average of two runs has no difference: the documents are not, or may not be, the same.

    Without samples of both, equal numbers of documents have to do.
    """
    first, second = (run.every_task[name] for run in runs)
    keys, other_keys = (_documents_of(scores[run], metric) for run in runs)
    sampled = bool(keys and other_keys)
    for difference in match.identity_differences(first, second, sampled):
        return Note(
            f"no difference: the runs have other {difference.field}: {difference.first} and {difference.second}"
        )
    if sampled and keys != other_keys:
        shared = f"{len(keys & other_keys)} of them in both"
        numbers = f"{len(keys)} and {len(other_keys)}, {shared}"
        return Note(f"no difference: the runs have other documents or prompts ({numbers})")
    if not sampled and None in (first.size, second.size):
        return Note("no difference: nothing says that the documents are the same", "run lm_eval with --log_samples")
    return Note()


def _documents_of(scores: Scores, metric: str) -> Set[str]:
    """The documents of an average; where it is no mean over documents, those of another average of the run."""
    of_another = next(iter(scores.values()), {})
    return scores.get(metric, of_another).keys()


def _no_interval(name: str, metric: str, runs: tuple[Run, Run], scores: Mapping[Run, Scores]) -> Note:
    """The reason that two runs of the same documents have no paired interval; empty if they have the scores of each."""
    for run in runs:
        of_documents = scores[run].get(metric, {})
        if not of_documents and not read.has_samples(run.file, name):
            return Note("no interval: a run has no samples", "run lm_eval with --log_samples")
        if not of_documents:
            return Note(f"no interval: {metric} is not the mean of the samples' scores")
        if len(of_documents) < 2:
            return Note("no interval from one document")
    return Note()


def _doubt(name: str, metric: str, runs: tuple[Run, Run]) -> str:
    """The reasons not to say which of two runs is better in an average, whatever its interval; empty without any."""
    doubts: dict[str, None] = {}
    cut_alike = match.are_contexts_alike(*runs, name)
    for run in runs:
        of_contexts = "" if cut_alike else about_contexts(run, name)
        doubts |= dict.fromkeys([remark(run, name, metric), of_contexts, *run.doubts])
    return "; ".join(filter(None, doubts))


def _distinct(keys: Iterable[str]) -> int:
    """The number of different documents among keys, which number the copies of one."""
    return len({bootstrap.text_of(key) for key in keys})


def _verdict(
    name: str,
    metric: str,
    runs: tuple[Run, Run],
    names: tuple[str, str],
    interval: tuple[float, float],
    distinct: int,
) -> str:
    """The better of two runs in an average, or why nobody can say. `distinct`: the number of different documents."""
    low, high = interval
    if low == high == 0:
        return EQUAL
    if distinct < stats.FEW:
        return f"no verdict from {counted(distinct, 'distinct document')}"
    if low <= 0 <= high:
        return stats.UNCLEAR
    higher_is_better = _higher_is_better(runs[0], name, metric)
    if higher_is_better is None:
        return f"{names[0] if low > 0 else names[1]} is higher"
    is_first = (low > 0) == higher_is_better
    return f"{names[0] if is_first else names[1]} is better"


def _higher_is_better(run: Run, name: str, metric: str) -> Any:
    """True or False, as the harness writes it; None if it does not say."""
    without_filter, _ = parts_of_average(metric)
    return run.content.get("higher_is_better", {}).get(name, {}).get(without_filter)
