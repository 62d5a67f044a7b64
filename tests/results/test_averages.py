"""Averages other than perplexities: their order, and paired differences over the same documents."""

import json
import statistics

import pytest
from results import ours, put, report

from lm_eval_duel.results import stats
from lm_eval_duel.results.standings import KINDS

TASK = "choice"


def result(folder, scores, rule="greedy", metric="acc", **more):
    """A results file with an average over documents, and its samples."""
    file = ours(folder, {TASK: {"token_perplexity": 9.0}}, rule=rule, **more)
    put(file, f"results.{TASK}", {f"{metric},none": statistics.mean(scores), f"{metric}_stderr,none": 0.125})
    put(file, f"configs.{TASK}.output_type", "multiple_choice")
    put(file, "higher_is_better", {TASK: {metric: True}})
    lines = []
    for n, score in enumerate(scores):
        lines.append(json.dumps({"doc_id": n, "doc_hash": f"text {n}", "filter": "none", metric: score}))
    samples = file.with_name(file.name.replace("results_", f"samples_{TASK}_")).with_suffix(".jsonl")
    samples.write_text("\n".join(lines))
    return file


def pairs(folder, *arguments):
    return report(folder, *arguments)["accuracy_pairs"].get(TASK, [])


BETTER = [1.0] * 14 + [0.0] * 6
WORSE = [1.0] * 4 + [0.0] * 16


def test_the_difference_is_paired(tmp_path):
    """Its interval is that of the differences of documents, not of two independent averages."""
    result(tmp_path / "results", BETTER)
    result(tmp_path / "results", WORSE, "margin")
    [pair] = pairs(tmp_path)
    assert pair["difference"] == pytest.approx(0.5)
    assert pair["verdict"] == "greedy is better"
    differences = [one - other for one, other in zip(BETTER, WORSE, strict=True)]
    error = statistics.stdev(differences) / len(differences) ** 0.5
    low, high = pair["interval"]
    assert low == pytest.approx(0.5 - 1.96 * error, abs=0.03)
    assert high == pytest.approx(0.5 + 1.96 * error, abs=0.03)


@pytest.mark.parametrize(
    ("other", "metric", "verdict"),
    [
        (BETTER, "acc", stats.EQUAL_VALUES),
        ([0.0] * 2 + [1.0] * 13 + [0.0] * 5, "acc", stats.UNCLEAR),
        (WORSE[::-1], "acc", "greedy is better"),
    ],
)
def test_verdicts(tmp_path, other, metric, verdict):
    result(tmp_path / "results", BETTER, metric=metric)
    result(tmp_path / "results", other, "margin", metric=metric)
    [pair] = pairs(tmp_path)
    assert pair["verdict"] == verdict


def test_lower_may_be_better_and_a_metric_of_no_known_direction_is_only_higher(tmp_path):
    file = result(tmp_path / "results", BETTER, metric="brier_score")
    result(tmp_path / "results", WORSE, "margin", metric="brier_score")
    put(file, "higher_is_better", {TASK: {"brier_score": False}})
    assert pairs(tmp_path)[0]["verdict"] == "margin is better"
    put(file, "higher_is_better", {TASK: {}})
    assert pairs(tmp_path)[0]["verdict"] == "greedy is higher"


def test_there_is_no_verdict_from_few_documents_from_bounds_or_in_doubt(tmp_path):
    result(tmp_path / "few" / "results", BETTER[:9])
    result(tmp_path / "few" / "results", [0.0] * 9, "margin")
    [pair] = pairs(tmp_path / "few")
    assert pair["verdict"] == "no verdict from 9 distinct documents"

    result(tmp_path / "bound" / "results", BETTER)
    result(tmp_path / "bound" / "results", WORSE, None, estimator="elbo")
    [pair] = pairs(tmp_path / "bound")
    assert pair["verdict"].startswith("no verdict: from a bound")

    file = result(tmp_path / "doubt" / "results", BETTER)
    result(tmp_path / "doubt" / "results", WORSE, "margin")
    put(file, "config.duel.decisions_differing", 1)
    [pair] = pairs(tmp_path / "doubt")
    assert pair["verdict"].startswith("no verdict: 1 of")


def test_documents_must_be_the_same(tmp_path):
    result(tmp_path / "results", BETTER)
    file = result(tmp_path / "results", BETTER[:12], "margin")
    [pair] = pairs(tmp_path)
    assert pair["interval"] is None
    assert "other documents" in pair["reason"]
    next(file.parent.glob(f"samples_{TASK}_{file.stem.removeprefix('results_')}*")).unlink()
    [pair] = pairs(tmp_path)
    assert "samples" in pair["reason"]
    assert pairs(tmp_path, "--pairs", "none") == []


def test_samples_whose_mean_is_not_the_average_are_left_out(tmp_path):
    """They are of another metric of that name, such as one that is no mean over documents."""
    file = result(tmp_path / "results", BETTER)
    result(tmp_path / "results", WORSE, "margin")
    put(file, f"results.{TASK}.acc,none", 0.9)
    [pair] = pairs(tmp_path)
    assert pair["interval"] is None


def test_each_filter_of_answers_has_scores_of_its_own(tmp_path):
    """The harness writes each document once for every filter."""
    for scores, rule in ((BETTER, "greedy"), (WORSE, "margin")):
        file = result(tmp_path / "results", scores, rule)
        opposite = [1 - score for score in scores]
        put(file, ["results", TASK, "acc,strict"], statistics.mean(opposite))
        samples = next(file.parent.glob(f"samples_{TASK}_{file.stem.removeprefix('results_')}*"))
        lines = [samples.read_text()]
        for n, score in enumerate(opposite):
            lines.append(json.dumps({"doc_id": n, "doc_hash": f"text {n}", "filter": "strict", "acc": score}))
        samples.write_text("\n".join(lines))
    verdicts = {pair["metric"]: pair["verdict"] for pair in pairs(tmp_path)}
    assert verdicts == {"acc": "greedy is better", "acc (strict)": "margin is better"}


def test_of_many_runs_each_is_compared_with_the_first(tmp_path):
    rules = ("left_to_right", "right_to_left", "greedy", "margin", "entropy", "random")
    for rule in rules:
        result(tmp_path / "results", BETTER, rule)
    assert len(pairs(tmp_path)) == len(rules) - 1


def test_rows_of_averages_are_in_the_order_of_all_rows(tmp_path):
    """By estimator and rule, whatever the order of the runs; tables and report.json alike."""
    result(tmp_path / "results", WORSE, "margin")
    result(tmp_path / "results", WORSE, None, estimator="elbo")
    result(tmp_path / "results", BETTER, "greedy")
    report(tmp_path)
    text = (tmp_path / "out" / "accuracy_choice.tex").read_text()
    assert text.index("ELBO") < text.index("greedy") < text.index("margin")


def test_the_page_of_averages_has_their_differences_and_a_meaning_for_each_kind(tmp_path):
    result(tmp_path / "results", BETTER)
    result(tmp_path / "results", WORSE, "margin")
    report(tmp_path, "--page")
    html = (tmp_path / "out" / "index.html").read_text()
    assert "greedy is better" in html
    assert KINDS["exact"] in html
    assert KINDS["AR"] not in html
