"""Results without figures, which take a second each; the tests of figures ask for them."""

import pytest

from lm_eval_duel.results import figures


@pytest.fixture(autouse=True)
def no_figures(monkeypatch):
    monkeypatch.setattr(figures, "available", lambda: False)
