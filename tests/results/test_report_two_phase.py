"""Two-phase estimates in a report: labelled, with both errors; gap closed uses the sampling error as well."""

import json
import math

import pytest
from results import documents, edit, hf, ours

from lm_eval_duel.estimators import registry
from lm_eval_duel.results import figures, stats
from lm_eval_duel.results.report import main as report

TOKENS = 1000
SPEC = {"sample": "0.05", "cheap_cache": "dual", "draw_seed": "0"}


def made(tmp_path, error, value=38.0, elbo=40.25, elbo_error=0.01, ar=36.3):
    """The report of an estimate with a standard error in perplexity, an ELBO and a baseline."""

    def docs(perplexity):
        nats = -math.log(perplexity) * TOKENS / 4
        return {"sotu": documents([nats * share for share in (0.8, 0.9, 1.1, 1.2)], [250] * 4)}

    def with_error(file, name, perplexity, error):
        told = {"stderr": None if error is None else error / perplexity * TOKENS, "nfe": None}
        edit(file, lambda body: body["config"]["duel"]["tasks"]["sotu"]["values"][name].update(told))

    hf(tmp_path / "ar", docs=docs(ar))
    bound = ours(tmp_path / "results", estimator="elbo", spec={"mc_samples": "16"}, docs=docs(elbo))
    with_error(bound, "elbo", elbo, elbo_error)
    estimate = ours(tmp_path / "results", estimator="two_phase", spec=SPEC, docs=docs(value))
    with_error(estimate, "two_phase", value, error)
    out = tmp_path / "out"
    report([str(tmp_path / "results"), "--ar", str(tmp_path / "ar"), "--out", str(out)])
    task = json.loads((out / "report.json").read_text())["tasks"]["sotu"]
    (row,) = [row for row in task["rows"] if row["estimator"] == "two_phase"]
    return row, task, out


@pytest.fixture(autouse=True)
def no_figures(monkeypatch):
    monkeypatch.setattr(figures, "available", lambda: False)


def test_an_estimate_is_labelled_with_its_error_everywhere(tmp_path):
    row, task, out = made(tmp_path, 0.2)
    assert row["stderr"] == pytest.approx(0.2) and row["interval"][0] < 38 < row["interval"][1]
    assert not row["best"] and row["rule"] == "greedy:k=1"
    text = (out / "report.md").read_text()
    assert "DUEL estimate (two-phase, sample=0.05)" in text and "38.00 +- 0.20" in text
    (line,) = task["headlines"]
    assert "38.00 +- 0.20 under `greedy` (DUEL estimate)" in line
    gap = (out / "gap_sotu.tex").read_text()
    assert "two-phase, sample=0.05" in gap and r"38.00 $\pm$ 0.20" in gap


def test_gap_closed_has_both_errors(tmp_path):
    widths = {}
    for error in (0.01, 0.4):
        row, _, _ = made(tmp_path / str(error), error, elbo_error=0.3)
        assert row["gap_closed"] == pytest.approx(100 * (40.25 - 38) / (40.25 - 36.3))
        by_elbo, by_duel = (38 - 36.3) / (40.25 - 36.3) ** 2 * 0.3, error / (40.25 - 36.3)
        assert row["gap_closed_stderr"] == pytest.approx(100 * math.hypot(by_elbo, by_duel))
        low, high = row["gap_closed_interval"]
        assert low < row["gap_closed"] < high
        widths[error] = high - low
    assert widths[0.4] > 3 * 100 * 0.4 / (40.25 - 36.3) > widths[0.01]


def test_an_estimate_of_unknown_error_says_so(tmp_path):
    row, _, out = made(tmp_path, None)
    assert row["stderr"] is None and "fewer than 8 drawn blocks" in row["stderr_reason"]
    text = (out / "report.md").read_text()
    assert "38.00 +- ?" in text and "+1.70 +- ?" in text  # its gap to the baseline, too
    assert row["gap_closed_stderr"] is None


def test_an_estimate_of_ones_own_is_labelled_by_its_entry_alone(tmp_path, monkeypatch):
    drawn = registry.MonteCarlo("guess", "coins", "coin", argument="coins", no_error="nobody flipped")
    coins = {"coins": registry.Argument(registry.COUNT)}
    settings = {"follows_rule": True, "drawn": drawn, "arguments": coins, "named": "of {}"}
    own = registry.Entry("guess", "Guess", "a guess", registry.Kind.ESTIMATE, "my_guess:Guess", dict, **settings)
    monkeypatch.setitem(registry.ESTIMATORS, "guess", own)
    for coins, folder in (("4", "few"), ("40", "many")):
        ours(
            tmp_path / folder,
            model=folder,
            estimator="guess",
            spec={"coins": coins, "rule": "margin:k=1"},
            docs={"sotu": documents([-900.0, -950.0], [250, 250])},
            duel={"rule": "margin:k=1"},
        )
    report([str(tmp_path / "few"), str(tmp_path / "many"), "--out", str(tmp_path / "out")])
    rows = json.loads((tmp_path / "out" / "report.json").read_text())["tasks"]["sotu"]["rows"]
    assert [(row["rule"], row["qualifiers"], row["stderr_reason"]) for row in rows] == [
        ("margin:k=1", "of coins=4", "coin error not known (coins=4; it takes 8 or more)"),
        ("margin:k=1", "of coins=40", "coin error not known (nobody flipped)"),
    ]
    assert "Guess (of coins=4)" in (tmp_path / "out" / "report.md").read_text()


def test_the_error_of_gap_closed_against_a_simulation():
    import numpy as np

    generator = np.random.default_rng(0)
    elbo, duel = 40 + 0.1 * generator.standard_normal(200_000), 38 + 0.2 * generator.standard_normal(200_000)
    simulated = (100 * (elbo - duel) / (elbo - 36)).std()
    assert stats.gap_closed_stderr(40, 38, 36, 0.1, 0.2) == pytest.approx(simulated, rel=0.02)
    assert stats.gap_closed_stderr(40, 38, 36, None, 0.2) is None is stats.gap_closed_stderr(40, 38, 36, 0.1, None)
