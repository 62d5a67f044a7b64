"""The models of `score --compare` side by side: their values, paired differences, and what differs between them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path

from lm_eval_duel.cli.scored import RATES, TASK, ScoredModel, about_infinities
from lm_eval_duel.errors import DuelError, counted
from lm_eval_duel.results import baseline, columns, compare, match, read, stats, traced
from lm_eval_duel.results.gaps import Pair
from lm_eval_duel.results.notes import all_mask_starts
from lm_eval_duel.results.rows import Row
from lm_eval_duel.results.runs import Run, size_in_words
from lm_eval_duel.results.table import spaced

CUT_APART = "texts longer than a window are cut at different places"
SAME_MODEL = "both models are the same"
TO_A_VERDICT = (
    f"A verdict takes {stats.FEW} or more distinct documents: score several files, each line of a .txt file "
    "(--lines), or a .jsonl file with a document in each row."
)


def compared(scored: Sequence[ScoredModel]) -> tuple[compare.Comparison, str]:
    """The models on the same texts, as `report` compares them, and its text. The pairs: the first with each other.

    Raises DuelError if the texts are empty.
    """
    if not scored[0].total.bytes:
        raise DuelError("The texts are empty, so there is nothing to compare.")
    runs = []
    for n, model in enumerate(scored, 1):
        run = read.read_of_score(_place(n, model), model.figures())
        flag = "--trace FILE" if n == 1 else "trace=FILE in its --compare"
        runs.append(dataclasses.replace(run, trace_advice=f"run with {flag}"))
    runs, notes = traced.Traces([]).attach(read.distinguish(runs))
    baselines, _ = baseline.find(runs)
    same_tokens = all(match.same_tokens(runs[0], run, TASK) for run in runs)
    metric = match.PER_TOKEN if same_tokens else "bits_per_byte"
    task = compare.task(TASK, runs, baselines, metric, as_published=True)

    first, *others = runs
    differences = []  # of the first model from each other one
    pairs = []
    for other in others:
        from_first = match.differences(first, other, TASK)
        differences.append(from_first)
        pairs.append(_pair(task, first, other))
    task = dataclasses.replace(task, rows=_as_named(task.rows, runs), pairs=pairs)

    remarks = [*_infinities(scored), *_sizes(scored), *_settings(runs), *_differences(task, runs, differences)]
    any_cut = any(match.is_cut(run, TASK) for run in runs)
    for note in task.notes:
        if any_cut or note != task.windows:
            remarks.append(note)
    remarks += map(str, filter(None, [*notes, all_mask_starts(runs)]))
    distinct_texts = {line.key for line in scored[0].lines}
    if len(distinct_texts) < stats.FEW:
        remarks.append(TO_A_VERDICT)
    return task, spaced([columns.values(task).text(), columns.differences(task).text(), "\n".join(remarks)])


def _as_named(rows: Sequence[compare.ComparedRow], runs: Sequence[Run]) -> list[compare.ComparedRow]:
    """The rows in the order in which the command names their models. `report` sorts them by value."""
    places = {id(run): n for n, run in enumerate(runs)}
    return sorted(rows, key=lambda each: places[id(each.row.run)])


def _pair(task: compare.Comparison, first: Run, other: Run) -> Pair:
    """The difference of two models."""
    pair = task.pair(_row_of(first, task), _row_of(other, task))
    if first.config.fingerprint == other.config.fingerprint:
        return dataclasses.replace(pair, better="", verdict=SAME_MODEL)
    return pair


def _infinities(scored: Sequence[ScoredModel]) -> list[str]:
    """Lines on infinite values: perplexities and bits per byte, since the table has no log-probabilities."""
    rows = []
    for model in scored:
        figures = model.total.figures()
        rows.append({rate: figures[rate] for rate in RATES})
    return about_infinities(rows)


def _sizes(scored: Sequence[ScoredModel]) -> Iterator[str]:
    """Lines on what was scored: the number of documents and tokens, and each model with its fingerprint."""
    documents = size_in_words(len(scored[0].lines), scored[0].available)
    tokens = [counted(model.total.tokens, "token") for model in scored]
    each_once = ", ".join(dict.fromkeys(tokens))
    yield f"{documents}, {each_once}"
    for n, model in enumerate(scored, 1):
        of_model = f", {tokens[n - 1]}" if len(set(tokens)) > 1 else ""
        yield f"model {n}: {model.method}{of_model}, fingerprint {model.info['fingerprint']}"


def _settings(runs: Sequence[Run]) -> Iterator[str]:
    """A line for each model but the first: the entries of its spec that differ from the first's, with both values.

    Entries that only one of two estimators has are left out: it has them because it is that estimator.
    """
    first, *others = [run.spec for run in runs]
    for n, spec in enumerate(others, 2):
        entries = []
        same_estimator = spec["estimator"] == first["estimator"]
        for key in dict.fromkeys([*first, *spec]):
            if not same_estimator and not (key in first and key in spec):
                continue
            value = spec.get(key, "not set")
            of_first = first.get(key, "not set")
            if value != of_first:
                entries.append(f"{key}: {value} (model 1: {of_first})")
        if entries:
            yield f"model {n} differs from model 1 in {'; '.join(entries)}"


def _differences(
    task: compare.Comparison, runs: Sequence[Run], differences: Sequence[Sequence[match.Difference]]
) -> list[str]:
    """Lines on what differs between the first model and the others and limits the comparison, each once."""
    lines: dict[str, None] = {}
    first, *others = runs
    for other, from_first in zip(others, differences, strict=True):
        for difference in from_first:
            if difference.field != "windows":
                lines[f"differs: {difference.between(first, other)}"] = None
            elif difference.is_allowed(task.metric):
                lines[CUT_APART] = None
            else:
                lines[f"{CUT_APART}, so there is no verdict: {match.equal_windows(runs)}"] = None
    return list(lines)


def _row_of(run: Run, task: compare.Comparison) -> Row:
    """The row of a model's own value, or the one that stands for it: the same model twice has one row."""
    for row, copies in task.same.items():
        for candidate in (row, *copies):
            if candidate.run is run and candidate.estimator == run.config.estimator:
                return row
    raise LookupError(run.name)  # every run of one task has a row


def _place(number: int, model: ScoredModel) -> Path:
    """The name of a model in notes, by its place on the command line, which is that of its row in the tables."""
    return Path(f"model {number} ({Path(model.pretrained).name}, estimator={model.estimator})")
