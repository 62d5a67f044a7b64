"""The registry of estimators: its entries and their classes agree, and an entry is all that a new estimator needs."""

import importlib
import inspect

import pytest
from attends import Attends
from toys import Causal, Toy

from lm_eval_duel.arguments import COUNT, Argument
from lm_eval_duel.errors import DuelError
from lm_eval_duel.estimators import registry
from lm_eval_duel.estimators.duel import DuelEstimator
from lm_eval_duel.options import Options


@pytest.mark.parametrize("name", registry.ESTIMATORS)
def test_each_entry_makes_an_estimator_of_its_name(name):
    kind = Causal if registry.find(name).causal else Attends if registry.find(name).own_cache else Toy
    toy = kind(length=9)
    options = Options.parse({"estimator": name, "block": 4})
    estimator = registry.make(toy, options)
    assert estimator.name == name and estimator.decodes is registry.find(name).decodes
    module, kind = registry.find(name).target.split(":")
    takes = inspect.signature(getattr(importlib.import_module(module), kind)).parameters
    assert set(registry.find(name).settings(options)) <= set(takes)


def test_an_entry_is_all_that_options_need(monkeypatch):
    class Twice(DuelEstimator):
        name = "twice"

    entry = registry.Entry(
        "twice",
        "Twice",
        "twice the likelihood",
        registry.Kind.LIKELIHOOD,
        f"{__name__}:Twice",
        lambda options: {"rule": options.rule, "block": options.estimator_args["times"]},
        {"times": Argument(COUNT, 2)},
        ignored_args=("block",),
        decodes=True,
    )
    monkeypatch.setitem(registry.ESTIMATORS, "twice", entry)
    monkeypatch.setitem(globals(), "Twice", Twice)
    assert "times" in registry.arguments() and Options.parse({"estimator": "twice"}).estimator_args == {"times": 2}
    with pytest.raises(DuelError, match="'times' is read by estimator=twice only, and this run has estimator=duel"):
        Options.parse({"times": 3})
    with pytest.raises(DuelError, match=r"Unknown estimator 'twise'\. Did you mean twice\?"):
        Options.parse({"estimator": "twise"})
    assert registry.ignored_args({"block": 4, "rule": "greedy"}, "twice") == ["block"]
    made = registry.make(Toy(length=9), Options.parse({"estimator": "twice", "times": "3"}))
    assert isinstance(made, Twice) and made.block == 3 and made.decodes
