"""Fixtures of the tests of the harness."""

import pytest


@pytest.fixture(autouse=True)
def networks_are_loaded_once(one_load):
    """In every module of this folder."""


@pytest.fixture
def model(folder):
    """A function of other model args: the harness's model of one spec unless told otherwise."""
    from lm_eval_duel.harness.lm import DuelMDM

    return lambda **other: DuelMDM(**{"pretrained": folder, "rule": "greedy", "block": 4, "device": "cpu", **other})
