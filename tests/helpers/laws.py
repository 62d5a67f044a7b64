"""What the tests of the laws share: rules, strings of a length and the sum of their probabilities, slow parameters."""

import dataclasses
import itertools
import math

import pytest

from lm_eval_duel.core.scores import Kind
from lm_eval_duel.core.windows import Window

RULES = [
    "left_to_right:k=1",
    "left_to_right:k=2",
    "left_to_right:k=3",
    "right_to_left:k=1",
    "right_to_left:k=2",
    "random:k=1:seed=0",
    "random:k=2:seed=7",
    "greedy:k=1",
    "greedy:k=2",
    "greedy:k=3",
    "margin:k=1",
    "margin:k=2",
    "log_margin:k=1",
    "log_margin:k=3",
    "entropy:k=1",
    "entropy:k=2",
    "threshold:mu=0.0",
    "threshold:mu=0.45",
    "threshold:mu=0.6",
    "threshold:mu=1.0",
    "klass:mu=0.4:nu=0.3",
    "klass:mu=0.3:nu=0.5:history=2",
    "klass:mu=0.4:nu=0.3:kl=authors",
    "entropy_bound:gamma=0.0",
    "entropy_bound:gamma=0.7",
    "entropy_bound:gamma=2.5",
    "threshold:mu=0.45:strict=true",
    "entropy_threshold:tau=0.8",
    "factor:f=1.5",
    "factor:f=1.5:variant=c",
    "hierarchy:low=0.4:tau=0.6",
    "dinfer_threshold:mu=0.5",
    "high_or_topk:n=2:tau=0.5",
    "entropy_bound:gamma=1.5:inclusive=true",
    "threshold_fixed:mu=0.4:n=2",
    "threshold_ref:mu=0.4:f=1.5",
    "threshold_bound:mu=0.7:floor=0.4:f=1.2",
    "cumulative_error:mu=0.25",
    "falling_threshold:mu=0.6:low=0.3:steps=3",
    "quota:steps=2",
    "cumulative_quota:steps=2:tau=0.6",
    "threshold_until:mu=0.6:steps=2",
    "quota:steps=3:eos=conf:eos_id=1",
    "dream:alg=topk_margin:steps=2",
    "dream:alg=confidence_threshold:steps=1:tau=0.5",
]
AROUND = [  # within a block
    "threshold:mu=0.45:sub_block=2",
    "quota:steps=2:sub_block=2:seed_first=true",
    "klass:mu=0.4:nu=0.3:sub_block=2",
    "dream:alg=entropy:steps=3:seed_first=true",
]


def slow_but(cases, fast):
    """Parameters of a test: all `cases`, those outside `fast` marked slow."""
    parameters = []
    for case in cases:
        if case in fast:
            parameters.append(case)
        else:
            values = case if isinstance(case, tuple) else (case,)
            parameters.append(pytest.param(*values, marks=pytest.mark.slow))
    return parameters


def numbers(value):
    """All numbers of scores, in order."""
    if dataclasses.is_dataclass(value):
        return numbers([getattr(value, field.name) for field in dataclasses.fields(value)])
    if isinstance(value, dict):
        return numbers([*value.values()])
    if isinstance(value, Kind | str):
        return []
    if isinstance(value, list | tuple):
        return list(itertools.chain(*map(numbers, value)))
    return [math.nan if value is None else float(value)]


def strings(tokens, length):
    return list(itertools.product(range(tokens), repeat=length))


def total(duel, length, context=(), suffix=(), tail=0, tokens=3):
    """The sum of the probabilities of all strings of a length."""
    scores = duel.log_prob([Window(context, string, suffix, tail) for string in strings(tokens, length)])
    return math.fsum(math.exp(score.log_prob) for score in scores)
