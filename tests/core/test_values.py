"""Values: what they say of themselves, their sums, and JSON there and back."""

import json
import math

import numpy as np
import pytest

from lm_eval_duel import Window
from lm_eval_duel.core.scores import Kind, Score, Value, weaker
from lm_eval_duel.estimators import registry
from lm_eval_duel.estimators.totals import Total

VALUES = [
    Value(-3.0),
    Value(-3.0, 0.5, Kind.ESTIMATE),
    Value(-3.0, 0.0, Kind.ESTIMATE),  # every block was in the sample
    Value(-3.0, None, Kind.UPPER_BOUND, "of ancestral sampling in 48 steps"),
    Value(-math.inf),
    Value.from_seeds((-3.0, -5.0)),
    Value.from_seeds((-3.0, -math.inf)),
]


@pytest.mark.parametrize("value", VALUES)
def test_a_value_is_read_as_it_was_written(value):
    written = json.loads(json.dumps(value.describe(), allow_nan=False))
    assert Value.read(written) == value
    assert ("reason" in written) == (value.nats == -math.inf)


def test_a_file_without_kinds_has_those_of_its_spec():
    """As results are that were written before values had kinds."""
    value_template = registry.value_template("noised_elbo", {"steps": "48"})
    value = Value.read({"log_prob": -3.0, "stderr": 0.5}, value_template)
    assert value == Value(-3.0, 0.5, Kind.UPPER_BOUND, "of ancestral sampling in 48 steps")
    assert value.is_bound
    assert not value.is_exact
    assert value.is_likelihood
    assert Value.read({"log_prob": None}) is None


@pytest.mark.parametrize(
    ("estimator", "spec", "kind"),
    [
        ("duel", {}, Kind.LIKELIHOOD),
        ("elbo", {"elbo_eps": "0.0"}, Kind.UPPER_BOUND),
        ("elbo", {"elbo_eps": "0.001"}, Kind.NO_BOUND),
        ("two_phase", {}, Kind.ESTIMATE),
        ("oracle", {}, Kind.NOT_A_LIKELIHOOD),
    ],
)
def test_the_kind_of_an_estimator_with_a_spec(estimator, spec, kind):
    assert registry.value_template(estimator, spec).kind is kind


def test_the_weaker_kind_is_that_of_the_sum():
    for n, one in enumerate(Kind):
        for m, other in enumerate(Kind):
            weakest = list(Kind)[max(n, m)]
            assert weaker(one, other) is weakest
            assert (Value(-1.0, kind=one) + Value(-2.0, kind=other)).kind is weakest


def test_values_of_shared_seeds_are_summed_seed_by_seed():
    """Two windows whose draws go together: the error of their sum is the sum of their errors, not the hypotenuse."""
    one = Value.from_seeds((-1.0, -2.0, -4.0))
    other = Value.from_seeds((-2.0, -4.0, -8.0))
    windows = [Window((), (1,)), Window((), (2,))]
    scores = [Score(value.nats, kind=value.kind, stderr=value.error, seeds=value.seeds) for value in (one, other)]

    total = Total.from_scores(windows, scores, "duel").value

    assert total.seeds == (-3.0, -6.0, -12.0)
    assert total.nats == pytest.approx(-7.0)
    assert total.error == pytest.approx(one.error + other.error)
    assert total.kind is Kind.UPPER_BOUND
    parts = map(Total.from_score, windows, scores, ["duel", "duel"])
    assert Total.from_parts([*parts]).value == total


@pytest.mark.parametrize("count", [2, 3, 8, pytest.param(40, marks=pytest.mark.slow)])
def test_intervals_from_few_seeds_cover(count):
    """Of 20,000 means of normal log-probabilities 95 % lie within 1.96 errors for intervals, 0.6 % at most off."""
    drawn = np.random.default_rng(count).normal(-3.0, 2.0, (20_000, count))
    values = map(Value.from_seeds, drawn.tolist())

    covered = [abs(value.nats + 3.0) < 1.96 * value.interval_error for value in values]

    assert abs(np.mean(covered) - 0.95) < 0.006
    assert Value(-3.0, 0.5).interval_error == 0.5
    assert Value(-3.0).interval_error is None
