"""Both sides of every limit in results: where a verdict, a mark, an interval, a unit or a file name changes.

Each line has the last case on one side and the first on the other.
"""

import dataclasses
import json
import math
from pathlib import Path
from statistics import NormalDist
from types import SimpleNamespace

import numpy as np
import pytest
import results
from results import documents, edit_samples, hf, ours, text_score

from lm_eval_duel.errors import DuelError
from lm_eval_duel.results import bootstrap, files, gaps, match, page, read, rerun, stats, trace, traced
from lm_eval_duel.results import compare as comparison
from lm_eval_duel.results.order import _first_kept, _twice
from lm_eval_duel.results.table import Note, number, percent, plus_minus, span
from lm_eval_duel.results.text_scores import compare

ERROR = 0.25  # a power of two, so that limits are hit exactly


@pytest.mark.parametrize(
    ("value", "form", "shown"),
    [
        (0.004999, ".2f", "0.00"),
        (0.0050001, ".2f", "0.01"),
        (-0.004, ".2f", "0.00"),  # no negative zero
        (-0.004, "+.2f", "+0.00"),
        (99.96, ".3g", "100"),
        (100.0, ".3g", "100"),
        (1234.4, ".2g", "1,234"),
        (-100.4, ".3g", "-100"),
        (9.996, ".3g", "10"),
        (123456789, ",d", "123,456,789"),
        (999_999_999_999.0, ".2f", "999999999999.00"),
        (1e12, ".2f", "1.0000e+12"),
        (-1e12, "+.2f", "-1.0000e+12"),
        (math.inf, ".2f", "inf"),
        (None, ".2f", ""),
    ],
)
def test_numbers(value, form, shown):
    assert number(value, form) == shown


@pytest.mark.parametrize(
    ("error", "form", "shown"),
    [
        (None, ".2f", ""),
        (0.0, ".2f", " ± 0"),
        (0.0049, ".2f", " ± 0.005"),  # smaller than the shown decimals: one digit
        (0.0051, ".2f", " ± 0.01"),
        (0.00004, "+.4f", " ± 4e-05"),
        (0.00006, "+.4f", " ± 0.0001"),
        (150.0, ".3g", " ± 150"),
    ],
)
def test_errors(error, form, shown):
    assert plus_minus(error, form) == shown


def test_marks_of_a_number():
    assert number(2.0, error=0.5, bound=True) == "≤ 2.00 ± 0.50"
    assert number(2.0, unsure=True) == "2.00 ± ?"
    assert number(2.0, error=0.5, unsure=True) == "2.00 ± 0.50"
    assert number(None, error=0.5, bound=True, unsure=True) == ""


def test_intervals_shares_and_notes_as_text():
    assert span((-0.001, 2.0), "+.2f") == "+0.00 to +2.00"
    assert span(None, ".2f") == ""

    assert percent(0.0) == "0.0%"
    assert percent(0.0004) == "0.0%"
    assert percent(0.0006) == "0.1%"
    assert percent(1.0) == "100.0%"

    assert str(Note("a.", "b")) == "a (b)."
    assert str(Note("a", "b")) == "a (b)"
    assert str(Note("a")) == "a"
    assert str(Note("", "b")) == "b"
    assert str(Note()) == ""


# ---------------------------------------------------------------- verdicts


@pytest.mark.parametrize(
    ("interval", "may_be_zero"),
    [
        ([0.1, 9.0], False),
        ([0.0, 9.0], True),
        ([-1.0, 9.0], True),
        ([-9.0, 0.0], True),
        ([-9.0, -0.1], False),
        (None, False),
    ],
)
def test_a_gap_closed_may_be_zero_if_its_interval_holds_zero(interval, may_be_zero):
    assert bool(gaps.GapClosed(interval=interval).verdict) == may_be_zero


def test_two_values_are_distinguishable_beyond_two_errors():
    assert not stats.is_distinguishable(1.0, 1.0 + 2 * ERROR, ERROR)
    assert not stats.is_distinguishable(1.0 + 2 * ERROR, 1.0, ERROR)
    assert stats.is_distinguishable(1.0, 1.0 + 2.01 * ERROR, ERROR)
    assert stats.is_distinguishable(1.0, 1.0, None)
    assert not stats.is_distinguishable(1.0, 1.0, 0.0)
    assert not stats.is_distinguishable(1.0, 2.0, math.inf)


@pytest.mark.parametrize(("distance", "clear"), [(2.82, False), (2.84, True)])
def test_an_elbo_and_an_estimate_differ_beyond_two_errors_of_their_difference(monkeypatch, distance, clear):
    """Their draws are independent, so the error of the difference is sqrt(1 + 1): neither 1 nor 2."""
    monkeypatch.setattr(gaps, "caveat", lambda rows: "")  # these are of no runs

    def row(value, error):
        return SimpleNamespace(
            metric="token_perplexity",
            task="t",
            model="M",
            name="",
            value=value,
            stderr=error,
            stderr_bound=error,
            stderr_reason="",
            no_interval=Note("no documents"),
            lost={},
        )

    elbo = row(40.0, 1.0)
    estimate = row(40.0 - distance, 1.0)
    baseline = row(20.0, None)

    closed = gaps.close_gap(estimate, elbo, baseline, [], "")

    assert closed.distinguishable is clear
    assert closed.percent == (pytest.approx(100 * distance / 20) if clear else None)


@pytest.mark.parametrize(
    ("of_model", "of_baseline"), [({"accents": "drops accents"}, {}), ({}, {"t": "has 1.0% [UNK]"})]
)
def test_no_gap_closed_between_tokenizers_of_which_one_merges_texts(monkeypatch, of_model, of_baseline):
    monkeypatch.setattr(gaps, "caveat", lambda rows: "")

    def row(value, model, lost):
        return SimpleNamespace(
            metric="token_perplexity", value=value, model=model, lost=lost, stderr_bound=None, stderr_reason=""
        )

    closed = gaps.close_gap(row(30.0, "M", of_model), row(40.0, "M", of_model), row(20.0, "T", of_baseline), [], "")

    assert closed.percent is None
    assert "the tokenizers of M and T" in str(closed.reason)


@pytest.mark.parametrize(
    ("without", "documents", "has_interval"),
    [(0, 3, True), (1, 3, False), (10, 12, True), (11, 12, False), (24, 1000, True), (25, 1000, False)],
)
def test_as_many_draws_may_have_no_gap_as_an_interval_leaves_out_at_one_end(without, documents, has_interval):
    elbo = np.full(1000, 3.0)
    elbo[:without] = 1.0  # a gap of 0 is not positive

    interval, remark = stats.gap_interval(elbo, np.full(1000, 2.5), np.full(1000, 1.0), documents)

    if has_interval:
        assert interval == pytest.approx([25.0, 25.0])
    else:
        assert interval is None
    if without == 0:
        assert remark == ""
    else:
        assert f"{without} of 1,000 draws" in remark


def test_the_ends_of_an_interval_are_its_percentiles():
    """Of 0 to 1,000: of many documents, 2.5 % lie below 25, and 2.5 % above 975. What is not finite is left out."""
    values = np.concatenate([np.arange(1001.0), [math.nan, math.inf]])
    assert bootstrap.percentile_interval(values, 10**9) == pytest.approx([25.0, 975.0])
    of_twelve = 1000 * NormalDist().cdf(-2.201 * math.sqrt(12 / 11))
    assert bootstrap.percentile_interval(values, 12) == pytest.approx([of_twelve, 1000 - of_twelve], abs=0.1)
    assert bootstrap.percentile_interval(values, 1) == pytest.approx([25.0, 975.0])


def side(name, rate, spread):
    """A side of a comparison whose draws lie evenly in `rate` ± `spread`."""
    value = stats.Value(-rate)
    return stats.Side(name, value, "", np.linspace(rate - spread, rate + spread, 2001))


@pytest.mark.parametrize(
    ("rate", "spread", "texts", "verdict"),
    [
        (0.9, 0.01, 10, "a is better"),
        (0.9, 0.01, 9, "no verdict from 9 distinct documents"),
        (0.9, 0.01, 1, "no verdict from 1 distinct document"),
        (1.1, 0.01, 10, "b is better"),
        (1 + 0.99e-6, 0.0, 10, "equal"),
        (1 + 0.99e-6, 0.0, 2, "equal"),  # copies of one text, too
        (1 + 1.01e-6, 0.0, 10, "b is better"),
        (1 - 1.01e-6, 0.0, 10, "a is better"),
        (1.97, 0.99, 10, "not distinguishable"),  # 0.983 of the spread is the 95 % interval
        (1.98, 0.99, 10, "b is better"),
    ],
)
def test_verdicts(rate, spread, texts, verdict):
    flat = stats.Side("b", stats.Value(-1.0), "", np.ones(2001))
    keys = [*map(str, range(texts)), "0"]  # a copy of the first

    compared = stats.difference(side("a", rate, spread), flat, "token", keys)

    assert compared.verdict == verdict
    assert compared.documents == texts + 1
    assert compared.unit == "token"
    assert compared.difference == pytest.approx(rate - 1, abs=1e-12)
    shown = {1: 0.95, 2: 1.0, 9: 0.9855, 10: 0.9829}[texts]  # the share of the draws inside the interval
    low, high = compared.interval
    assert low == pytest.approx(rate - 1 - shown * spread, abs=1e-4)
    assert high == pytest.approx(rate - 1 + shown * spread, abs=1e-4)


@pytest.mark.parametrize(("above", "refused"), [(0.0, False), (9e-6, False), (1.1e-5, True)])
def test_a_probability_above_one_is_float_noise_up_to_a_millionth_of_a_nat_for_each_token(above, refused):
    scores = [text_score(f"text {n}", -30.0, 10) for n in range(3)]
    scores[1] = text_score("text 1", above, 10)
    if not refused:
        compare(scores, scores)
        return
    with pytest.raises(DuelError, match="text 1 of first"):
        compare(scores, scores)


# ---------------------------------------------------------------- files of results and of reports


@pytest.mark.parametrize(("off", "has_documents"), [(0.9e-4, True), (1.1e-4, False)])
def test_samples_belong_to_a_result_if_they_give_its_value(tmp_path, off, has_documents):
    docs = {"sotu": documents([-30.0, -40.0], [10, 12])}
    hf(tmp_path / "ar", docs=docs)
    file = ours(tmp_path / "results", docs=docs)

    def change(record):
        nats, tokens = record["token_perplexity"]
        record["token_perplexity"] = [nats - off * tokens, tokens]

    edit_samples(file, change)
    [row] = results.rows(results.report(tmp_path), "sotu").values()
    assert bool(row["interval"]) is has_documents


@pytest.mark.parametrize(("off", "same"), [(0.9e-6, True), (1.1e-6, False)])
def test_a_file_whose_value_is_not_that_of_its_log_likelihood_contradicts_itself(tmp_path, off, same):
    value = 20.0
    file = ours(tmp_path, {"sotu": {"token_perplexity": value}})
    results.put(file, ("results", "sotu", "token_perplexity,none"), value * (1 + off))
    if same:
        read.runs([file])
        return
    with pytest.raises(DuelError, match="token_perplexity"):
        read.runs([file])


@pytest.mark.parametrize("longest", [1024, 1025])
def test_windows_are_alike_if_every_document_fits_in_one(tmp_path, longest):
    """The baseline has rolling windows of 1,024 tokens, and ours independent ones of 2,048."""
    docs = {"sotu": documents([-3000.0, -40.0], [longest, 12])}
    hf(tmp_path, docs=docs, max_length=1024)
    ours(tmp_path, docs=docs, duel={"row_capacity": 2048}, spec={"windows": "independent", "max_length": "2049"})
    first, second = read.runs([tmp_path])

    differences = match.differences(first, second, "sotu")

    fields = [difference.field for difference in differences]
    assert fields == ([] if longest == 1024 else ["windows"])


def test_names_of_files():
    subjects = [
        ("a", "gap", ""),
        ("A", "gap", ""),
        ("t" * 120, "methods", ""),
        ("", "perplexity", ""),
        ("b/c", "rules", "M, block 4"),
        ("b/c", "rules", "M, block 8"),
    ]

    assert list(files.stems(subjects)) == [
        "gap_a",
        "gap_A_2",
        "methods_" + "t" * 100,
        "perplexity",
        "rules_b_c_M_block_4",
        "rules_b_c_M_block_8",
    ]


@pytest.mark.parametrize(("limit", "flag"), [(None, ""), (40.0, "40"), (0.5, "0.5"), (1234567.0, "1234567")])
def test_the_limit_of_a_command(tmp_path, limit, flag):
    """A share of the documents is no number of them; shots are named if they are not 0 and equal in all tasks."""
    file = ours(tmp_path, {"a": {"token_perplexity": 20.0}, "b": {"token_perplexity": 20.0}})
    results.put(file, "config.limit", limit)

    for shots, shown in (({"a": 0, "b": 0}, ""), ({"a": 3, "b": 3}, 3), ({"a": 3, "b": 0}, ""), ({"a": 3}, 3)):
        results.put(file, ["n-shot"], shots)
        [run] = read.runs([file])
        flags = rerun._flags(run)
        assert flags["--limit"] == flag
        assert flags["--num_fewshot"] == shown
        assert flags["--tasks"] == "a,b"


def test_the_baseline_is_first_and_a_method_has_the_date_of_its_newest_result(tmp_path):
    """Also if the first task has no result of the baseline."""
    for n, task in enumerate(("first", "second")):
        file = ours(tmp_path / "results", {task: {"token_perplexity": 20.0}}, model="M")
        results.put(file, "date", 86400.0 * (3 - n))
    hf(tmp_path / "ar", {"second": {"token_perplexity": 15.0}})

    baseline, method = results.report(tmp_path, "--as_published")["standings"]["rows"]

    assert baseline["model"] == "ARM"
    assert method["model"] == "M"
    assert method["date"].startswith("1970-01-04")


def test_a_baseline_without_a_perplexity_is_first_too(tmp_path):
    ours(tmp_path / "results", {"first": {"token_perplexity": 20.0}}, model="M")
    hf(tmp_path / "results", {"choice": {"acc": 0.25}}, model="Other")
    hf(tmp_path / "ar", {"choice": {"acc": 0.5}})

    rows = results.report(tmp_path, "--as_published")["standings"]["rows"]

    assert [row["model"] for row in rows] == ["ARM", "M", "Other"]


# ---------------------------------------------------------------- the page


@pytest.mark.parametrize(
    ("low", "high", "ticks"),
    [
        (1.0, 1.00011, [1.0, 1.0001]),
        (20.0, 20.41, [20.0, 20.1, 20.2, 20.3, 20.4]),
        (20.0, 20.5, [20.0, 20.2, 20.4]),
        (20.0, 20.9, [20.0, 20.2, 20.4, 20.6, 20.8]),
        (20.0, 31.0, [20, 30]),
        (19.0, 70.0, [20, 30, 40, 50, 70]),
        (1.0, 10.0, [1, 2, 3, 5, 10]),
        (1.0, 30.0, [1, 3, 10, 30]),
        (0.5, 4.0, [0.5, 1, 2, 3]),
        (1.0, 1e4, [1, 10, 100, 1000, 10000]),
        (1.0, 1e5, [1, 100, 10000]),
        (1.0, 1e6, [1, 100, 10000, 1000000]),
    ],
)
def test_ticks(low, high, ticks):
    computed = page._ticks(low, high)

    assert len(computed) <= 5
    assert low <= min(computed)
    assert max(computed) <= high
    assert computed == pytest.approx(ticks)


def order(tokens):
    """A document's order of `tokens` tokens, in blocks of 512."""
    return traced.Order(
        label="M",
        tokenizer="t",
        ids=[5] * tokens,
        starts=list(range(0, tokens + 1, 512)),
        steps=list(range(tokens)),
        nats=[1.2346 + n for n in range(tokens)],
    )


@pytest.mark.parametrize("tokens", [1, 1023, 1024, 1025, 1536])
def test_a_document_on_the_page_has_at_most_1024_tokens(tokens, monkeypatch):
    monkeypatch.setattr(traced, "_load", lambda name: None)
    monkeypatch.setattr(traced, "token_texts", lambda ids, tokenizer: ["x"] * len(ids))
    shown = min(tokens, 1024)

    document, notes = traced._document(traced.DocumentKey("sotu", 3, label="sotu"), [order(tokens), order(tokens)])

    [pieces] = document["pieces"]
    assert len(pieces) == shown, "orders of one text share it"
    assert len(document["orders"]) == 2
    for order_of_page in document["orders"]:
        assert order_of_page["text"] == 0
        assert order_of_page["steps"] == list(range(shown))
        assert order_of_page["starts"] == ([0] if shown <= 512 else [0, 512])
        assert order_of_page["nats"][0] == pytest.approx(1.235, abs=1e-9)
        assert len(order_of_page["nats"]) == shown
    assert len(notes) == (2 if tokens > 1024 else 0)
    for note in notes:
        assert "1,024" in note.fact


def test_an_order_that_two_traces_hold_is_shown_once():
    """Up to float noise of its nats, and under one label only."""
    first = order(3)
    noise = dataclasses.replace(first, nats=[1.23461, 2.2346, math.inf])
    first.nats[2] = math.inf
    others = [
        dataclasses.replace(first, label="N"),
        dataclasses.replace(first, steps=[0, 2, 1]),
        dataclasses.replace(first, nats=[1.2346, 2.3, math.inf]),
    ]
    oracle = dataclasses.replace(first, label="Oracle", is_oracle=True)

    orders = traced._each_once([oracle, first, noise, *others, first])

    assert orders == [first, *others, oracle], "the page opens on the first two: the oracle is last"


def test_the_page_has_at_most_a_hundred_thousand_values(monkeypatch):
    """Documents in the most traces come first, then the lowest numbers; `most` of each task."""
    orders = {}
    for n in range(120):
        count = 2 if n in (7, 9) else 1
        orders[traced.DocumentKey("sotu", n, label="sotu")] = [order(1000)] * count
    monkeypatch.setattr(traced, "_load", lambda name: None)
    monkeypatch.setattr(traced, "token_texts", lambda ids, tokenizer: ["x"] * len(ids))
    monkeypatch.setattr(traced, "_orders_of_documents", lambda *_: orders)

    for most, expected in ((0, []), (1, [7]), (3, [7, 9, 0]), (98, [7, 9, *range(7), 8, *range(10, 98)])):
        shown, notes = traced.documents(SimpleNamespace(), [], {}, most)
        assert [document["number"] for document in shown] == expected
        [note] = notes
        assert f" {most} of 120 documents" in note.fact

    shown, [note] = traced.documents(SimpleNamespace(), [], {}, 99)
    assert len(shown) == 98
    assert " 98 of 120 documents" in note.fact
    assert "full" in note.advice


def test_statistics_of_a_trace_have_six_digits():
    score = SimpleNamespace(
        reveal_steps=(0,),
        token_logprobs=(-1.23456789,),
        confidence=(1.23456789,),
        margin=(0.000123456789,),
        entropy=(123456.789,),
        nfe=1,
        near_ties=0,
    )

    line = json.loads(json.dumps(trace._order(score)))

    assert line["confidence"] == [1.23457]
    assert line["margin"] == [0.000123457]
    assert line["entropy"] == [123457.0]
    assert line["token_logprobs"] == [-1.23456789]


# ---------------------------------------------------------------- which of equal rows is kept


def test_of_equal_values_the_baseline_is_kept_then_a_runs_own_then_the_newest():
    """Each pair differs in all that follows as well, where the other one would win."""

    def row(ar, is_the_runs_own, date):
        config = SimpleNamespace(estimator="duel" if is_the_runs_own else "oracle")
        run = SimpleNamespace(config=config, header=SimpleNamespace(date=date))
        return SimpleNamespace(ar=ar, estimator="duel", run=run)

    ranked = [
        row(True, True, 1.0),
        row(True, False, 2.0),
        row(False, True, 3.0),
        row(False, False, 5.0),
        row(False, False, 4.0),
    ]
    shuffled = [ranked[n] for n in (4, 2, 0, 3, 1)]

    assert sorted(shuffled, key=_first_kept) == ranked


@pytest.mark.parametrize(("second", "differs"), [(1 + 0.99e-4, False), (1 + 1.02e-4, True)])
def test_two_results_of_a_value_are_the_same_up_to_a_ten_thousandth(second, differs):
    """In each of the metrics that both have."""

    def row(**metrics):
        return SimpleNamespace(
            model="M", name="DUEL", run=SimpleNamespace(short_name="r", file=Path("r")), metrics=metrics
        )

    first = row(word_perplexity=1.0, byte_perplexity=1.0, bits_per_byte=5.0)
    other_bytes = row(word_perplexity=1.0, byte_perplexity=second)
    other_words = row(word_perplexity=second, byte_perplexity=1.0)

    assert ("ANOTHER" in _twice(first, other_bytes)) == differs
    assert ("ANOTHER" in _twice(first, other_words)) == differs


# ---------------------------------------------------------------- numbers of documents


@pytest.mark.parametrize(
    ("documents", "available", "shown"),
    [
        (None, 36, ""),
        (1, None, "1 document"),
        (1, 1, "1 document"),
        (1, 36, "1 of 36 documents"),
        (36, 36, "36 documents"),
        (1200, 3600, "1,200 of 3,600 documents"),
    ],
)
def test_a_table_says_how_many_of_the_documents_it_is_about(documents, available, shown):
    task = SimpleNamespace(documents=documents, available=available)
    assert comparison.Comparison.size.fget(task) == shown


def test_a_number_of_documents_is_that_of_all_results_that_know_it():
    assert comparison._shared([36, None, 36]) == 36
    assert comparison._shared([36, 40]) is None
    assert comparison._shared([None]) is None
