"""Fixtures of the tests of rules."""

import json

import pytest


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    """The counts of tokens 0 and 2 among 20, for examples/rules/pc.py."""
    path = tmp_path_factory.mktemp("pc") / "table.json"
    path.write_text(json.dumps({"num_token": 20, "p_baseline_dict": {"0": 9, "2": 3}}))
    return str(path)
