"""Results with other last digits, and without figures, which take a second each; the tests of figures ask for them."""

import golden
import pytest

from lm_eval_duel.results import figures


@pytest.fixture(autouse=True)
def other_digits(monkeypatch):
    """No test here depends on the last digits of a float: they are others in every run of it."""
    golden.nudge_functions(monkeypatch.setattr)


@pytest.fixture(autouse=True)
def no_figures(monkeypatch):
    monkeypatch.setattr(figures, "available", lambda: False)
