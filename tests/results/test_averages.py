"""Averages other than perplexities: their order, and paired differences over the same documents."""

import csv
import json
import re
import shutil
import statistics
from pathlib import Path

import pytest
from results import GONE, ours, per_token, put, report

from lm_eval_duel.errors import DuelError
from lm_eval_duel.results import averages, stats
from lm_eval_duel.results.standings import KINDS, KINDS_OF_AVERAGES
from lm_eval_duel.results.table import MINUS

TASK = "choice"


def result(folder, scores, rule="greedy:k=1", metric="acc", copies=1, **more):
    """A results file with an average over documents, of which as many in a row are `copies`, and its samples."""
    file = ours(folder, {TASK: {"token_perplexity": 9.0}}, rule=rule, size=len(scores), **more)
    put(file, f"results.{TASK}", {f"{metric},none": statistics.mean(scores), f"{metric}_stderr,none": 0.125})
    put(file, f"configs.{TASK}.output_type", "multiple_choice")
    put(file, "higher_is_better", {TASK: {metric: True}})
    lines = []
    for n, score in enumerate(scores):
        lines.append(json.dumps({"doc_id": n, "doc_hash": f"text {n // copies}", "filter": "none", metric: score}))
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


def test_copies_do_not_narrow_the_interval_of_a_difference(tmp_path):
    """Of 20 documents, 10 of them copies, it is that of 10 with the mean scores of both."""
    twice = [n / 20 for n in range(20)]
    once = [statistics.mean(twice[n : n + 2]) for n in range(0, 20, 2)]
    intervals = []
    for copies, scores in ((1, once), (2, twice)):
        folder = tmp_path / str(copies)
        result(folder / "results", scores, copies=copies)
        result(folder / "results", [0.0] * len(scores), "margin", copies=copies)
        intervals.append(pairs(folder)[0]["interval"])
    assert intervals[0] == pytest.approx(intervals[1])


@pytest.mark.parametrize("cut_in", [(), ("greedy",), ("greedy", "margin")])
def test_contexts_that_are_cut_in_one_run_alone_leave_no_verdict(tmp_path, cut_in):
    for rule, scores in (("greedy", BETTER), ("margin", WORSE)):
        file = result(tmp_path / "results", scores, rule)
        put(file, "config.duel.cut_contexts", {TASK: 7} if rule in cut_in else {"other": 7})
    made = report(tmp_path)
    [pair] = made["accuracy_pairs"][TASK]
    assert (pair["verdict"] == "no verdict") == (len(cut_in) == 1)
    assert ("7 contexts cut" in pair["verdict_reason"]) == (len(cut_in) == 1)
    assert ("7 contexts cut" in (tmp_path / "out" / "report.md").read_text()) == (len(cut_in) > 0)


@pytest.mark.parametrize("lengths", [(100, 100), (100, 200)])
@pytest.mark.parametrize("tokenizers", [("A", "A"), ("A", "B")])
def test_contexts_are_cut_alike_at_the_same_length_by_the_same_tokenizer(tmp_path, lengths, tokenizers):
    """If not, both runs are named."""
    for rule, scores, length, tokenizer in zip(("greedy", "margin"), (BETTER, WORSE), lengths, tokenizers, strict=True):
        file = result(tmp_path / "results", scores, rule)
        put(file, "config.duel.cut_contexts", {TASK: 7})
        put(file, "config.duel.row_capacity", length - 1)
        put(file, "config.spec.max_length", str(length))
        put(file, "config.spec.tokenizer", tokenizer)
    [pair] = pairs(tmp_path)
    alike = len({*lengths}) == len({*tokenizers}) == 1
    assert (pair["verdict"] == "no verdict") != alike
    for length in lengths:
        assert (f"7 contexts cut at {length}" in pair["verdict_reason"]) != alike


@pytest.mark.parametrize(
    ("other", "metric", "verdict"),
    [
        (BETTER, "acc", averages.EQUAL),
        ([0.0] * 2 + [1.0] * 13 + [0.0] * 5, "acc", stats.UNCLEAR),
        (WORSE[::-1], "acc", "greedy is better"),
    ],
)
def test_verdicts(tmp_path, other, metric, verdict):
    result(tmp_path / "results", BETTER, metric=metric)
    result(tmp_path / "results", other, "margin", metric=metric)
    [pair] = pairs(tmp_path)
    assert pair["verdict"] == verdict


def test_an_average_that_is_no_mean_has_no_interval_although_there_are_samples(tmp_path):
    for rule, scores in (("greedy", BETTER), ("margin", WORSE)):
        file = result(tmp_path / "results", scores, rule)
        put(file, f"results.{TASK}.ece,none", 0.125)
    [ece] = [pair for pair in pairs(tmp_path) if pair["metric"] == "ece"]
    assert ece["reason"].startswith("no interval: ece is not the mean")
    for samples in (tmp_path / "results").rglob("samples_*"):
        samples.unlink()
    for pair in pairs(tmp_path):
        assert "--log_samples" in pair["reason"]


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
    [pair] = pairs(tmp_path / "bound", "--pairs", "all")
    assert pair["verdict"] == "no verdict"
    assert pair["verdict_reason"].startswith("from a bound")
    assert "too narrow" not in pair["verdict_reason"]
    result(tmp_path / "both" / "results", BETTER[:9])
    result(tmp_path / "both" / "results", [0.0] * 9, None, estimator="elbo")
    [pair] = pairs(tmp_path / "both", "--pairs", "all")
    assert "from 9 distinct documents: too narrow" in pair["verdict_reason"]

    file = result(tmp_path / "doubt" / "results", BETTER)
    result(tmp_path / "doubt" / "results", WORSE, "margin")
    put(file, "config.duel.decisions_differing", 1)
    [pair] = pairs(tmp_path / "doubt")
    assert pair["verdict"] == "no verdict"
    assert pair["verdict_reason"].startswith("1 of")


def samples_of(file):
    return next(file.parent.glob(f"samples_{TASK}_{file.stem.removeprefix('results_')}*"))


def test_averages_of_other_documents_have_no_difference(tmp_path):
    result(tmp_path / "results", BETTER)
    result(tmp_path / "results", BETTER[:12], "margin")
    [pair] = pairs(tmp_path, "--page")
    assert pair["difference"] is None
    assert pair["interval"] is None
    assert pair["verdict"] == ""
    assert "12 of them in both" in pair["reason"]
    difference = f"{statistics.mean(BETTER) - statistics.mean(BETTER[:12]):.4f}"
    for name in ("report.md", "accuracy_pairs_choice.tex", "index.html"):
        text = (tmp_path / "out" / name).read_text()
        assert "no difference" in text, name
        assert difference not in text, name
    assert pairs(tmp_path, "--pairs", "none") == []


def test_every_form_says_how_many_documents_a_limit_left(tmp_path):
    for scores, rule in ((BETTER, "greedy:k=1"), (WORSE, "margin")):
        put(result(tmp_path / "results", scores, rule), f"n-samples.{TASK}.original", 40)
    report(tmp_path, "--page")
    for name in ("report.md", "accuracy_pairs_choice.tex", "index.html"):
        text = (tmp_path / "out" / name).read_text()
        differences = text[text.index("paired differences of averages") :]
        assert "20 of 40" in differences, name


def test_equally_many_other_documents_have_no_difference(tmp_path):
    result(tmp_path / "results", BETTER)
    file = result(tmp_path / "results", WORSE, "margin")
    samples = samples_of(file)
    samples.write_text(samples.read_text().replace("text 7", "text 70"))
    [pair] = pairs(tmp_path)
    assert pair["difference"] is None
    assert "19 of them in both" in pair["reason"]


@pytest.mark.parametrize(
    ("place", "value", "stands"),
    [
        (f"n-samples.{TASK}.effective", 20, True),
        (f"n-samples.{TASK}.effective", 12, False),
        (f"n-samples.{TASK}.effective", GONE, False),
        (f"versions.{TASK}", 2.0, False),
    ],
)
def test_without_samples_the_numbers_of_documents_must_agree(tmp_path, place, value, stands):
    file = result(tmp_path / "results", BETTER)
    other = result(tmp_path / "results", WORSE, "margin")
    samples_of(file).unlink()
    put(other, place, value)
    [pair] = pairs(tmp_path)
    assert pair["interval"] is None
    assert (pair["difference"] is not None) == stands
    assert ("no difference" in pair["reason"]) != stands


def test_samples_whose_mean_is_not_the_average_are_left_out(tmp_path):
    """They are of another metric of that name, such as one that is no mean over documents."""
    file = result(tmp_path / "results", BETTER)
    result(tmp_path / "results", WORSE, "margin")
    put(file, f"results.{TASK}.acc,none", 0.9)
    [pair] = pairs(tmp_path)
    assert pair["interval"] is None


def test_each_filter_of_answers_has_scores_of_its_own(tmp_path):
    """The harness writes each document once for every filter."""
    for scores, rule in ((BETTER, "greedy:k=1"), (WORSE, "margin")):
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


# ---------------------------------------------------------------- pairs


@pytest.fixture
def several(tmp_path):
    """A bound, three rules, one of them with a cache, and two other models, whose rows need their own first."""
    folder = tmp_path / "results"
    result(folder, WORSE, None, estimator="elbo")
    result(folder, WORSE, "margin")
    result(folder, WORSE, "left_to_right")
    result(folder, BETTER)
    result(folder, BETTER, spec={"cache": "dual"})
    result(folder, BETTER, model="BD3")
    result(folder, WORSE, None, estimator="ar", model="ARM")
    return tmp_path


@pytest.mark.parametrize(
    ("choice", "count", "between_models"),
    [("rules", 4, False), ("models", 3, True), ("both", 7, True), ("all", 21, True), ("none", 0, False)],
)
def test_the_choice_of_pairs_is_that_of_perplexities(several, capsys, choice, count, between_models):
    """Rules of one network, cached and uncached rows of one rule, and one row of each model."""
    chosen = [pair["names"] for pair in pairs(several, "--pairs", choice)]
    assert len(chosen) == count
    assert any("ARM" in first for first, _ in chosen) == between_models
    assert ("greedy", "margin") in map(tuple, chosen) or choice in ("models", "none")
    assert ("cache=dual" in str(chosen)) == (choice not in ("models", "none"))
    assert ("ELBO" in str(chosen)) == (choice == "all")
    printed = capsys.readouterr().out
    assert (f"{count} of 21 pairs" in printed) == (0 < count < 21)


def test_pairs_say_which_rows_they_are_of(several):
    """Pairs of one rule under two models, and of two rules under one model, are told apart in every form."""
    result(several / "results", WORSE, "margin", model="BD3")
    written = report(several)
    chosen = written["accuracy_pairs"][TASK]
    rows = written["accuracies"][TASK]
    ends = []
    for pair in chosen:
        numbers = (pair["first"], pair["second"])
        of_pair = [rows[number] for number in numbers]
        for key in ("model", "rule"):
            values = [row[key] for row in of_pair]
            for value, name in zip(values, pair["names"], strict=True):
                assert values[0] == values[1] or (value or "AR").removesuffix(":k=1") in name
        ends.append(numbers)
    assert len(set(ends)) == len(chosen)

    text = (several / "out" / "report.md").read_text()
    table = text[text.index("paired differences of averages") :]
    lines = [line for line in table.splitlines() if f"greedy {MINUS} margin" in line]
    assert [re.findall("MDLM|BD3", line) for line in lines] == [["MDLM"], ["BD3"]]
    [line] = [line for line in table.splitlines() if f"MDLM {MINUS} BD3" in line]
    assert "greedy" in line


def test_the_row_of_a_model_is_that_of_the_papers_rule(several):
    for pair in pairs(several, "--pairs", "models"):
        assert "left_to_right" not in str(pair["names"])
        assert "cache=dual" not in str(pair["names"])


def test_of_many_rules_each_is_compared_with_the_papers(tmp_path):
    rules = ("left_to_right", "right_to_left", "greedy:k=1", "margin", "entropy", "random")
    for rule in rules:
        result(tmp_path / "results", BETTER, rule)
    chosen = [pair["names"] for pair in pairs(tmp_path)]
    assert len(chosen) == len(rules) - 1
    assert {second for _, second in chosen} == {"greedy"}


def test_results_of_one_value_are_not_compared(tmp_path):
    """Of a result that was made twice, the newest is compared with others."""
    result(tmp_path / "results", WORSE)
    result(tmp_path / "results", BETTER)
    result(tmp_path / "results", WORSE, "margin")
    [pair] = pairs(tmp_path, "--pairs", "all")
    assert pair["verdict"] == "greedy is better"


@pytest.mark.parametrize("other", [BETTER, WORSE])
def test_a_result_that_was_made_again_without_samples_keeps_its_intervals(other, tmp_path):
    """If the newest has the same average: else it is the one that is compared, and has no interval."""
    result(tmp_path / "results", BETTER)
    [samples] = tmp_path.rglob("samples_*")
    result(tmp_path / "results", other)
    for again in {*tmp_path.rglob("samples_*")} - {samples}:
        again.unlink()
    result(tmp_path / "results", WORSE, "margin")
    [pair] = pairs(tmp_path)
    assert pair["difference"] == pytest.approx(statistics.mean(other) - statistics.mean(WORSE))
    assert (pair["interval"] is not None) == (other == BETTER)


def copies(folder, file, name):
    """A copy of a results file and its samples in another folder, written later."""
    again = folder / "results" / name
    again.mkdir(parents=True)
    shutil.copy(samples_of(file), again)
    return put(Path(shutil.copy(file, again)), "date", 1e6)


def test_averages_that_two_results_hold_are_shown_once(tmp_path, capsys):
    """In every form, and the report names the files; those with samples stay."""
    first = result(tmp_path / "results", BETTER)
    result(tmp_path / "results", WORSE, "margin")
    again = copies(tmp_path, first, "again/MDLM")
    written = report(tmp_path, "--page")
    assert len(written["accuracies"][TASK]) == 2
    [pair] = written["accuracy_pairs"][TASK]
    assert pair["verdict"] == "greedy is better"
    assert written["accuracies"][TASK][pair["first"]]["file"] == str(again)
    assert "the averages of 1 row of choice" in capsys.readouterr().out
    text = (tmp_path / "out" / "report.md").read_text()
    shown, held = (file.relative_to(tmp_path / "results") for file in (again, first))
    assert f"{shown} is shown, {held} holds it too" in text
    lines = list(csv.DictReader((tmp_path / "out" / "report.csv").open()))
    assert sorted(line["rule"] for line in lines if line["metric"] == "acc") == ["greedy:k=1", "margin"]
    assert len(models_of_page(tmp_path)) == 2

    samples_of(again).unlink()
    written = report(tmp_path)
    assert written["accuracies"][TASK][written["accuracy_pairs"][TASK][0]["first"]]["file"] == str(first)
    assert written["accuracy_pairs"][TASK][0]["interval"]


@pytest.mark.parametrize(
    ("place", "value"),
    [
        (f"results.{TASK}.acc,none", 0.9),
        ("task_hashes", {TASK: "other"}),
        (f"n-samples.{TASK}.effective", 19),
        ("config.spec.version", "2"),
    ],
)
def test_averages_that_may_be_others_are_all_shown(tmp_path, place, value):
    """Of other documents, with another value, or of another spec."""
    file = result(tmp_path / "results", BETTER)
    put(file, "task_hashes", {TASK: "one"})
    result(tmp_path / "results", WORSE, "margin")
    put(copies(tmp_path, file, "again"), place, value)
    assert len(report(tmp_path)["accuracies"][TASK]) == 3


def test_a_baseline_keeps_its_averages(several):
    """Also if a newer copy of it is among the results."""
    ours(several / "results", per_token(["sotu"], [20.0]))
    file = result(several / "ar", WORSE, None, estimator="ar", model="Twin")
    put(file, "results.sotu", {"token_perplexity,none": 10.0})
    copies(several, file, "again")
    rows = [row for row in report(several)["accuracies"][TASK] if row["model"] == "Twin"]
    assert [row["ar"] for row in rows] == [True]


@pytest.mark.parametrize(
    ("counts", "other_counts", "compared"),
    [
        ([20, 12], [20], (20, 20)),
        ([12, 20], [12], (12, 12)),
        ([20, 12], [20, 12], (20, 20)),
        ([20, 12], [12, 20], (20, 20)),
        ([20, 12], [15], (20, 15)),
        ([12, 20], [15, 10], (20, 15)),
    ],
)
@pytest.mark.parametrize("hashes", [True, False])
def test_results_of_the_same_documents_are_compared_else_those_of_most(
    tmp_path, hashes, counts, other_counts, compared
):
    """Hashes cover counts of tokens, so those of two models may differ."""
    for rule, counts_of_rule in (("greedy:k=1", counts), ("margin", other_counts)):
        for count in counts_of_rule:
            file = result(tmp_path / "results", BETTER[:count], rule)
            if hashes:
                put(file, "task_hashes", {TASK: f"{rule} {count}"})
    written = report(tmp_path)
    [pair] = written["accuracy_pairs"][TASK]
    rows = [written["accuracies"][TASK][pair[end]] for end in ("first", "second")]
    assert tuple(int(row["identity"]["documents"]) for row in rows) == compared
    assert (pair["difference"] is None) == (compared[0] != compared[1])


def test_networks_of_two_temperatures_are_not_two_rules(tmp_path):
    result(tmp_path / "results", BETTER, spec={"warpers": "temperature=0.7"})
    result(tmp_path / "results", WORSE)
    assert pairs(tmp_path, "--pairs", "rules") == []
    [pair] = pairs(tmp_path, "--pairs", "all")
    assert "temperature=0.7" in str(pair["names"])


def test_samples_are_read_only_to_compare_averages(several):
    for samples in several.rglob("samples_*"):
        samples.write_text("{broken")
    assert pairs(several, "--pairs", "none") == []
    with pytest.raises(DuelError, match="samples of lm_eval"):
        pairs(several)


# ---------------------------------------------------------------- rows


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


def models_of_page(folder):
    html = (folder / "out" / "index.html").read_text()
    return re.findall(r'class="k-model" data-text="(\w+)".*?<small>(.*?)</small>', html)


def test_the_autoregressive_row_is_the_first_without_perplexities_too(several):
    """In every form; the rows of the page are in the order of the table."""
    written = report(several, "--page")
    assert [result["ar"] for result in written["results"]] == [True] + [False] * 6
    text = (several / "out" / "accuracy_choice.tex").read_text()
    assert text.index("ARM") < text.index("MDLM") < text.index("BD3")
    lines = list(csv.DictReader((several / "out" / "report.csv").open()))
    estimators = ["ar", "elbo"] + ["duel"] * 5
    assert [line["estimator"] for line in lines] == estimators
    assert [line["rule"] for line in lines] == [
        "",
        "",
        "left_to_right",
        "greedy:k=1",
        "greedy:k=1",
        "margin",
        "greedy:k=1",
    ]
    names = models_of_page(several)
    assert [model for model, _ in names] == ["ARM", *["MDLM"] * 5, "BD3"]
    assert [name.split(",")[0] for _, name in names] == ["AR", "ELBO"] + ["DUEL"] * 5


def test_the_averages_of_a_baseline_may_be_in_a_file_of_their_own(several):
    """Those of other autoregressive models are rows among others."""
    ours(several / "results", per_token(["sotu"], [20.0]))
    ours(several / "results", per_token(["sotu"], [10.0]), model="ARM", estimator="ar")
    result(several / "results", WORSE, None, estimator="ar", model="Other")
    written = report(several)
    baselines = [result["model"] for result in written["results"] if result["ar"]]
    assert baselines == ["ARM", "ARM"]
    [row] = [row for row in written["tasks"]["sotu"]["rows"] if not row["ar"]]
    assert row["gap"] == pytest.approx(10.0)


def test_an_older_perplexity_of_the_baseline_is_no_baseline(several):
    """Only the newest is, however many of its averages there are."""
    ours(several / "results", per_token(["sotu"], [20.0]))
    for value in (11.0, 10.0):
        ours(several / "results", per_token(["sotu"], [value]), model="ARM", estimator="ar")
    written = report(several)
    newest = written["tasks"]["sotu"]["rows"][0]
    assert newest["value"] == pytest.approx(10.0)
    assert [result["file"] for result in written["results"] if result["ar"]].count(newest["file"]) == 1
    assert len(written["ar"]) == 2


def test_the_averages_of_the_model_of_a_named_baseline_are_of_the_baseline(several):
    ours(several / "results", per_token(["sotu"], [20.0]))
    ours(several / "ar", per_token(["sotu"], [10.0]), model="ARM", estimator="ar")
    assert len(report(several)["ar"]) == 2


def test_a_baseline_of_averages_alone_has_no_gaps(several):
    ours(several / "results", per_token(["sotu"], [20.0]))
    written = report(several, "--page")
    assert written["ar"]
    assert any("No gaps" in note for note in written["notes"])
    assert "Gaps are to" not in (several / "out" / "index.html").read_text()


def test_two_autoregressive_models_are_no_baseline_of_averages(several):
    result(several / "results", WORSE, None, estimator="ar", model="Other")
    assert report(several)["ar"] == []


def test_ranks_and_means_in_the_csv_are_of_perplexities(several):
    for value, rule in ((20.0, "greedy"), (30.0, "margin")):
        ours(several / "results", per_token(["one", "two"], [value, value]), rule=rule)
    report(several)
    lines = list(csv.DictReader((several / "out" / "report.csv").open()))
    for line in lines:
        is_perplexity = line["metric"] == "token_perplexity"
        for place in ("rank", "mean", "mean_rank"):
            assert bool(line[place]) == is_perplexity, line
    assert {line["metric"] for line in lines} == {"token_perplexity", "acc"}


def test_a_perplexity_cannot_be_chosen_where_there_is_none(several):
    with pytest.raises(DuelError, match="--metric word_perplexity"):
        report(several, "--metric", "word_perplexity")
    ours(several / "results", per_token(["sotu"], [20.0]))
    report(several, "--metric", "token_perplexity")


def test_the_page_explains_a_bound_by_what_it_bounds(several):
    report(several, "--page")
    assert KINDS_OF_AVERAGES["bound"] in (several / "out" / "index.html").read_text()
    ours(several / "results", per_token(["sotu"], [20.0]), rule=None, estimator="elbo")
    report(several, "--page")
    assert KINDS["bound"] in (several / "out" / "index.html").read_text()
