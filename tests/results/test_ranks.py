"""Ranks: which rows have one, which two others each is compared with, and what a reader is told about ties."""

import html
import itertools
import math
import re

import numpy as np
import pytest
from results import documents, hf, ours, put

from lm_eval_duel.cli.report import parse
from lm_eval_duel.estimators import registry
from lm_eval_duel.results import columns, gaps, page, ranks
from lm_eval_duel.results.report import collect, markdown

TOKENS = np.array([40, 55, 61, 70, 48, 52, 66, 59, 44, 50, 63, 57])
HARD = np.array([3.1, 3.4, 2.9, 3.6, 3.3, 3.0, 3.5, 3.2, 3.4, 3.1, 2.8, 3.3])  # nats per token
SHIFTS = {"left_to_right:k=1": 0.0, "greedy:k=1": 0.2, "margin:k=1": 0.2001, "greedy:k=2": 0.8}


@pytest.fixture
def content(tmp_path):
    """A baseline, four rules of which two are tied, a bound that is lower than all, and an oracle."""
    chance = np.random.default_rng(3)

    def docs(shift):
        rates = HARD + shift + chance.normal(0, 0.02, len(HARD))
        return {"sotu": documents(-TOKENS * rates, TOKENS)}

    hf(tmp_path, model="AR", docs=docs(0.1))
    for rule, shift in SHIFTS.items():
        ours(tmp_path, docs=docs(shift), rule=rule)
    ours(tmp_path, docs=docs(-0.5), estimator="elbo", spec={"mc_samples": "16"})
    ours(tmp_path, docs=docs(-0.9), estimator="oracle")
    return collect(parse([str(tmp_path), "--page", "--out", "unused"]))


def test_every_likelihood_is_compared_with_the_next_lower_and_with_the_lowest(content):
    """The differences add up along the ranks, each interval is that of the pair alone, and others have no place."""
    task = content.tasks["sotu"]
    ranked = sorted((each for each in task.rows if each.place), key=lambda each: each.row.value)

    assert [each.place.rank for each in ranked] == [1, 2, 3, 4, 5]
    assert {each.row.estimator for each in task.rows if not each.place} == {"elbo", "oracle"}
    first = ranked[0]
    assert first.place.next_lower is None
    assert first.place.lowest is None
    steps = []
    for before, each in itertools.pairwise(ranked):
        place = each.place
        assert (place.next_lower.second, place.lowest.second) == (before.row, first.row)
        steps.append(place.next_lower.difference)
        assert place.lowest.difference == pytest.approx(math.fsum(steps))
        assert place.lowest.interval == pytest.approx(task.pair(each.row, first.row).interval)
        low, _ = place.next_lower.interval
        assert place.is_tied == (low <= 0)
        assert (columns.is_worse(place.next_lower) == "yes") == (low > 0)
    tied = {each.row.rule for each in ranked if each.place.is_tied}
    assert tied == {"margin:k=1"} or tied == {"greedy:k=1"}


def test_two_pairs_a_row_are_computed_and_not_every_pair(monkeypatch):
    """A table of many rows stays quick: the paired differences are as many as rows, twice."""
    rows = []
    for n in range(40):
        row = type("Row", (), {})()
        row.model = "M"
        row.noise_seed = None
        row.value = 20.0 + n
        row.score = type("Score", (), {"is_bound": False, "doubt": ""})
        rows.append(row)
    made = []
    monkeypatch.setattr(gaps, "pair", lambda *pair: made.append(pair))

    places = ranks.places(rows, {})

    assert [places[row].rank for row in rows] == list(range(1, 41))
    assert len(made) == 1 + 2 * 38  # the second row is next to the lowest


def test_values_given_the_noise_of_several_seeds_do_not_compete(tmp_path):
    for seed, shift in (("0", 0.0), ("1", 0.1), ("2", 0.2)):
        docs = {"sotu": documents(-TOKENS * (HARD + shift), TOKENS)}
        ours(tmp_path, docs=docs, spec={"noise_seed": seed})
    [task] = collect(parse([str(tmp_path), "--out", "unused"])).tasks.values()

    for each in task.rows:
        assert each.place.rank == 1
        assert each.place.next_lower is None


def test_the_page_and_the_report_say_which_rows_are_tied(content):
    task = content.tasks["sotu"]
    tied = [each for each in task.rows if each.place and each.place.is_tied]
    shown = html.unescape(page.html(content, None))

    cells_of_ranks = re.findall(r'<td class="k-rank[^>]*>(.*?)</td>', shown)
    assert len(cells_of_ranks) == len(task.rows)
    assert [cell for cell in cells_of_ranks if "tied" in cell] == [
        f"{each.place.rank}<small>tied</small>" for each in tied
    ]
    assert shown.count("tied: ") == len(tied)
    [table] = [table for _, kind, table in content.tables() if kind == "ranks"]
    assert table.markdown() in markdown(content)
    worse = [row[table.heads.index("next lower: worse?")] for row in table.rows]
    assert worse.count(ranks.TIED) == len(tied)
    assert table.rows[0][0] == "1"


@pytest.mark.parametrize("estimators", [(), ("elbo",), ("oracle",), ("elbo", "oracle")])
def test_the_page_explains_what_is_on_it_only(tmp_path, estimators):
    docs = {"sotu": documents(-TOKENS * HARD, TOKENS)}
    for rule in ("greedy", "margin"):
        ours(tmp_path, docs=docs, rule=rule)
    for estimator in estimators:
        file = ours(tmp_path, docs=docs, estimator=estimator)
        if estimator == "elbo":
            put(file, "config.duel.tasks.sotu.values.elbo.stderr", 0.5)

    text = page.about(collect(parse([str(tmp_path), "--page", "--out", "unused"])))

    assert ("≤" in text) == ("elbo" in estimators)
    assert ("±" in text) == ("elbo" in estimators)
    assert ("oracle" in text) == ("oracle" in estimators)
    assert ("no rank" in text) == bool(estimators)
    shown = page.html(collect(parse([str(tmp_path), "--page", "--out", "unused"])), None)
    for estimator in ("duel", "elbo", "mixture"):
        what = registry.find(estimator).what.replace("`", "")
        assert (what in shown) == (estimator in ("duel", *estimators))


def test_a_report_says_how_many_pairs_it_leaves_out_and_how_to_get_them(content, tmp_path):
    task = content.tasks["sotu"]
    assert task.possible_pairs == math.comb(6, 2)  # without the oracle
    assert len(task.pairs) < task.possible_pairs
    told = [note for note in content.notes if "--pairs" in note.advice]
    assert len(told) == 1
    assert f"{len(task.pairs)} of {task.possible_pairs}" in told[0].advice
    assert "--pairs" not in page.html(content, None), "advice is for the console"

    everything = collect(parse([str(tmp_path), "--out", "unused", "--pairs", "all"]))
    assert len(everything.tasks["sotu"].pairs) == task.possible_pairs
    assert not any("--pairs" in note.advice for note in everything.notes)


@pytest.mark.parametrize(
    ("metric", "unit"),
    [
        ("token_perplexity", "nats per token"),
        ("word_perplexity", "nats per word"),
        ("bits_per_byte", "bits per byte"),
    ],
)
def test_differences_on_the_page_are_in_the_unit_of_the_values(content, tmp_path, metric, unit):
    """In the remark on the columns of differences, and in the heading of the other pairs."""
    shown = page.html(collect(parse([str(tmp_path), "--page", "--out", "unused", "--metric", metric])), None)

    remarks = re.findall(r"paired differences of .log p over documents, in (\w+ per \w+)", shown)
    headings = re.findall(r"[Pp]aired differences, (\w+ per \w+)", shown)
    assert remarks
    assert headings
    assert {*remarks, *headings} == {unit}


def test_differences_in_bits_are_those_of_the_values(content, tmp_path):
    """With their intervals, which are as much smaller than those per byte as all the values are."""
    words = ["--out", "unused", "--pairs", "all", "--metric"]
    in_bits = collect(parse([str(tmp_path), *words, "bits_per_byte"])).tasks["sotu"].pairs
    in_nats = collect(parse([str(tmp_path), *words, "byte_perplexity"])).tasks["sotu"].pairs

    assert in_bits
    for pair, same in zip(in_bits, in_nats, strict=True):
        assert pair.difference == pytest.approx(pair.first.value - pair.second.value)
        assert pair.interval == pytest.approx([end / math.log(2) for end in same.interval])
        assert pair.verdict == same.verdict


def test_the_page_does_not_speak_of_ties_or_intervals_that_it_does_not_have(content, tmp_path):
    alone = tmp_path / "alone"
    for nats in (-90, -130):
        hf(alone, model=f"AR{nats}", docs={"sotu": documents([nats], [20])})

    without = page.about(collect(parse([str(alone), "--page", "--out", "unused"])))

    for sentence in ("Ranks are by value", "Intervals are"):
        assert sentence in page.about(content)
        assert sentence not in without
