"""Scores as plain values for response caches: numbers, texts, tuples and dicts.

A finished request has one record, the contribution of each window to the results. A window of an unfinished request has
a record of its whole score. Records are read for an estimator: its `empty_score` has what they lack.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

from lm_eval_duel.core.scores import STATISTICS, BlockSums, Score
from lm_eval_duel.estimators.base import Estimator
from lm_eval_duel.estimators.blocks import BeamBlocks, TwoPhaseBlocks
from lm_eval_duel.estimators.registry import BEAM, LATTICE, find

ORDER = ("log_prob", "is_greedy", "reveal_steps", "token_logprobs", "nfe", "near_ties", "all_mask_starts", *STATISTICS)
BLOCKS = ("cached", "weights", "uncached")  # of a two-phase estimate


def request_record(scores: Sequence[Score], estimator: Estimator) -> tuple[Any, ...]:
    """The record of a request: (log_prob, the values of each window by name, is_greedy, whether there are near ties).

    The first value of a window is its `log_prob`.
    """
    values = [
        {name: _value(value) for name, value in {estimator.name: score, **score.others}.items()} for score in scores
    ]
    is_greedy, near_ties = all(score.is_greedy for score in scores), any(score.near_ties for score in scores)
    return math.fsum(score.log_prob for score in scores), values, is_greedy, near_ties


def read_request(record: tuple[Any, ...], windows: int, estimator: Estimator) -> list[Score] | None:
    """The scores of a request of `windows` windows, without their orders; None if the record is inconsistent."""
    empty = estimator.empty_score
    try:
        log_prob, values, is_greedy, near_ties = record
        scores = []
        for value in values:
            others = {name: _read_value(value[name], other) for name, other in empty.others.items()}
            score = _read_value(value[estimator.name], empty)
            scores.append(dataclasses.replace(score, is_greedy=is_greedy, near_ties=int(near_ties), others=others))
        return scores if len(scores) == windows and math.fsum(score.log_prob for score in scores) == log_prob else None
    except (TypeError, ValueError, KeyError, IndexError):
        return None


def window_record(score: Score, estimator: Estimator) -> dict[str, Any]:
    """The record of a window: its score by name."""
    record, blocks = _order(score), score.blocks
    if estimator.name in LATTICE:
        values = {estimator.name: score, **score.others}
        rules = {name: _order(path) for name, path in score.others.items() if name not in LATTICE}
        return {**record, **{name: values[name].log_prob for name in LATTICE}, "rules": rules}
    if isinstance(blocks, TwoPhaseBlocks):
        of_blocks = {name: getattr(blocks, name) for name in BLOCKS}
        return {**record, "stderr": score.stderr, **of_blocks, "phases": _sums(blocks)}
    if BEAM in find(estimator.name).arguments:
        beam = blocks if isinstance(blocks, BeamBlocks) else BeamBlocks()
        return {**record, "stderr": beam.error, "beam": _sums(beam)}
    return {**record, "stderr": score.stderr} if find(estimator.name).drawn else record


def read_window(record: dict[str, Any], estimator: Estimator) -> Score:
    """The inverse of `window_record`."""
    empty = estimator.empty_score
    score = dataclasses.replace(empty, **{name: record[name] for name in ORDER})
    if isinstance(empty.blocks, TwoPhaseBlocks):
        return _with_blocks(score, TwoPhaseBlocks(*record["phases"], *(record[name] for name in BLOCKS)))
    if isinstance(empty.blocks, BeamBlocks):
        return _with_blocks(score, dataclasses.replace(BeamBlocks(*record["beam"]), errors=record["stderr"]))
    if empty.stderr is not None:
        return dataclasses.replace(score, stderr=record["stderr"])
    others = {
        name: dataclasses.replace(other, **({"log_prob": record[name]} if name in LATTICE else record["rules"][name]))
        for name, other in empty.others.items()
    }
    return dataclasses.replace(score, others=others)


def _order(score: Score) -> dict[str, Any]:
    return {name: getattr(score, name) for name in ORDER}


def _value(score: Score) -> tuple[Any, ...]:
    """(log_prob, stderr, nfe, sums of a two-phase estimate, sums of a beam)."""
    if isinstance(score.blocks, BeamBlocks):
        return score.log_prob, score.blocks.error, score.nfe, None, _sums(score.blocks)
    return score.log_prob, score.stderr, score.nfe, score.blocks and _sums(score.blocks), None


def _read_value(record: tuple[Any, ...], empty: Score) -> Score:
    log_prob, stderr, nfe, two_phase, beam = record
    score = dataclasses.replace(empty, log_prob=log_prob, stderr=stderr, nfe=nfe)
    if two_phase is not None:
        return _with_blocks(score, TwoPhaseBlocks(*two_phase))
    return score if beam is None else _with_blocks(score, dataclasses.replace(BeamBlocks(*beam), errors=stderr))


def _with_blocks(score: Score, blocks: BlockSums) -> Score:
    return dataclasses.replace(score, kind=blocks.kind, stderr=blocks.stderr, blocks=blocks)


def _sums(blocks: BlockSums) -> tuple[float, ...]:
    """The sums over blocks, without the error of a beam, which the record has already."""
    return tuple(value for name, value in vars(blocks).items() if name != "errors" and not isinstance(value, tuple))
