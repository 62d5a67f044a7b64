"""The registry of estimators: its entries and their classes agree, and an entry is all that a new estimator needs."""

import importlib
import inspect

import pytest
from attends import Attends
from toys import Causal, Toy

from lm_eval_duel.estimators import registry
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
    settings = set(registry.find(name).settings(options))
    assert settings <= {*takes, *(options.estimator_args if "arguments" in takes else ())}
