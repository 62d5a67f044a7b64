"""A value of the wrong kind, in any argument of the library, is a DuelError or has a meaning; no error of Python."""

import contextlib
import math

import numpy as np
import pytest
from attends import Attends

from lm_eval_duel import (
    Duel,
    DuelError,
    TextEstimate,
    Window,
    compare,
    load_tokenizer,
    planned_tokens,
    training_metrics,
)

WINDOW = Window((), (300, 517, 261))
WRONG = [None, "x", 5, -1, 1.5, math.nan, [None], [[5]], {"a": 1}, object(), b"x", np.array([1.5, 2.5]), WINDOW]


@pytest.fixture(scope="module")
def calls():
    """Functions, with arguments that work."""
    duel = Duel.from_pretrained("demo-mdm", block=8, max_length=16, device="cpu")
    scores = duel.score(["We the"])
    estimates = duel.estimate(["We the"], sample=1.0)
    network = Attends(length=8)
    orders = {"windows": [WINDOW], "reveal_steps": [(0, 1, 2)]}
    return {
        "score": (duel.score, {"texts": ["We"], "contexts": ["a"], "suffixes": ["a"]}),
        "estimate": (duel.estimate, {"texts": ["We"], "sample": 1.0, "seed": 0}),
        "generate": (duel.generate, {"prompts": ["We"], "suffixes": ["a"], "max_new_tokens": 2, "until": "a"}),
        "draws": (duel.generate, {"prompts": ["We"], "max_new_tokens": 2, "do_sample": True, "seed": 1, "keys": [1]}),
        "warped": (duel.generate, {"prompts": ["We"], "max_new_tokens": 2, "temperature": 2, "top_k": 5, "top_p": 0.9}),
        "sample": (duel.sample, {"contexts": ["We"], "length": 2, "suffixes": ["a"], "tail": 0, "do_sample": True}),
        "keyed": (duel.sample, {"contexts": ["We"], "length": 2, "seed": 0, "keys": [1], "stop": lambda *_: False}),
        "log_prob": (duel.log_prob, {"windows": [WINDOW]}),
        "replay": (duel.replay, orders),
        "differentiable": (duel.differentiable, {**orders, "batch_size": 1}),
        "follow": (duel.follow, {**orders, "sampler": {"n": 1}}),
        "windows": (duel.windows, {"text": "We"}),
        "compare": (compare, {"a": scores, "b": scores, "names": ("a", "b")}),
        "total": (TextEstimate.total, {"estimates": estimates}),
        "Window": (Window, {"context": (), "target": (3,), "suffix": (), "tail": 0, "known": ()}),
        "Duel": (Duel, {"denoiser": network, "rule": "greedy", "block": 2, "grid": "row", "k": 1, "batch_size": 1}),
        "Elbo": (Duel, {"denoiser": network, "estimator": "elbo", "mc_samples": 4, "windows": "harness"}),
        "from_model": (Duel.from_model, {"model": network, "tokenizer": None, "module": None, "weights": "a"}),
        "load_tokenizer": (load_tokenizer, {"arguments": "demo-mdm"}),
        "planned_tokens": (planned_tokens, {"duel": duel, "texts": ["We"], "sample": 0.5}),
        "training_metrics": (
            training_metrics,
            {"model": duel.denoiser, "tokenizer": duel.tokenizer, "texts": ["We"], "rules": ["greedy"]},
        ),
    }


NAMES = (
    *("score", "estimate", "generate", "draws", "warped", "sample", "keyed", "log_prob", "replay", "differentiable"),
    *("follow", "windows", "compare", "total", "Window", "Duel", "Elbo", "from_model", "load_tokenizer"),
    *("planned_tokens", "training_metrics"),
)


@pytest.mark.parametrize("name", NAMES)
def test_a_value_of_the_wrong_kind_is_refused_or_has_a_meaning(calls, name):
    assert {*NAMES} == {*calls}
    function, given = calls[name]
    function(**given)
    for argument in given:
        for value in WRONG:
            with contextlib.suppress(DuelError):
                function(**{**given, argument: value})


@pytest.mark.parametrize(
    ("name", "argument", "value"),
    [
        ("keyed", "stop", "x"),
        ("keyed", "seed", -1),
        ("sample", "do_sample", "x"),
        ("sample", "length", None),
        ("from_model", "weights", 5),
        ("planned_tokens", "sample", 2.0),
        ("planned_tokens", "texts", "We"),
    ],
)
def test_a_value_that_would_be_ignored_or_misread_is_refused(calls, name, argument, value):
    function, given = calls[name]
    with pytest.raises(DuelError, match=argument):
        function(**{**given, argument: value})
