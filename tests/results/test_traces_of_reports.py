"""The traces of a report: how windows are joined, which orders are shown, and which trace and which window counts."""

import re

import pytest
from results import documents, ours, put, trace

from lm_eval_duel.errors import DuelError
from lm_eval_duel.results import read, traced
from lm_eval_duel.results import trace as trace_files

DOCS = {"sotu": documents([-60, -150, -90], [20, 40, 30])}
WINDOW = {"task": "sotu", "doc": 0, "request": 0, "window": 0, "ids": [5, 6, 7], "starts": [0, 2]}
WINDOW |= {"reveal_steps": [1, 0, 0], "token_logprobs": [-0.5, -1.0, -2.0], "values": {"duel": -3.5}}


def test_windows_of_a_document_are_joined_in_their_order():
    joined = traced.Order("M", "t")

    joined.add(WINDOW, WINDOW)
    joined.add(WINDOW, WINDOW)

    assert joined.starts == [0, 2, 3, 5]
    assert joined.ids == [5, 6, 7, 5, 6, 7]
    assert joined.steps == [1, 0, 0, 1, 0, 0]
    assert joined.nats == [0.5, 1.0, 2.0, 0.5, 1.0, 2.0]


@pytest.mark.parametrize(
    ("change", "rules"),
    [
        ({}, ["greedy"]),
        ({"task": None}, []),
        ({"doc": None}, []),
        ({"generated": {}}, []),
        ({"request": 1}, []),
        ({"repeat": 1}, []),
        ({"repeat": 0}, ["greedy"]),
        ({"reveal_steps": []}, []),
        ({"rules": {"margin": WINDOW, "none": {"reveal_steps": []}}}, ["greedy", "margin"]),
    ],
)
def test_the_orders_of_a_window(change, rules):
    orders = traced._orders(WINDOW | change, {"rule": "greedy"})

    assert [rule for rule, _ in orders] == rules


@pytest.mark.parametrize(
    ("spec", "rule", "label"),
    [
        ({"estimator": "duel", "block": "4", "cache": "none"}, "greedy:k=1", "M, greedy, block 4, cache=none"),
        ({"estimator": "duel", "block": "none"}, "greedy:k=1", "M, greedy, whole target"),
        ({"estimator": "oracle", "block": "4"}, "greedy:k=1", "M, greedy, block 4"),
        ({"estimator": "two_phase", "block": "4"}, "greedy:k=1", "M, DUEL estimate*, greedy, block 4"),
        ({"estimator": "ar"}, "", "M, autoregressive"),
        ({"estimator": "later", "block": "4"}, "greedy:k=1", "M, greedy, block 4"),
    ],
)
def test_the_label_of_an_order(spec, rule, label):
    pattern = re.escape(label).replace(r"\*", "[^,]*")
    shown = traced._label("M", spec, rule)

    assert re.fullmatch(pattern, shown), shown


def test_a_named_trace_is_taken_before_the_one_that_the_run_wrote(tmp_path):
    file = ours(tmp_path, docs=DOCS)
    written = trace(tmp_path / "written.jsonl", file, [WINDOW])
    put(file, "config.duel.trace", str(written))
    named = trace(tmp_path / "named.jsonl", file, [WINDOW | {"values": {"duel": -9.0}}])
    runs = read.runs([tmp_path])

    for places, nats in (([], -3.5), ([named], -9.0)):
        [with_trace], notes = traced.Traces(places).attach(runs)
        assert with_trace.traced["sotu", "duel"] == {0: nats}
        assert notes == []


def test_of_equal_windows_the_last_written_counts_and_a_request_is_replaced_whole(tmp_path):
    """As written by a run that was continued: the second time the request has one window fewer."""
    file = ours(tmp_path, docs=DOCS)
    first = [WINDOW, WINDOW | {"window": 1}, WINDOW | {"doc": 1}]
    path = trace(tmp_path / "t.jsonl", file, [*first, WINDOW | {"values": {"duel": -9.0}}])

    windows = trace_files.read(path)

    written = [(line["doc"], line["window"], line["values"]["duel"]) for line in windows]
    assert written == [(0, 0, -9.0), (1, 0, -3.5)]


@pytest.mark.parametrize("key", ["fingerprint", "rules", "lattice_rule_code"])
def test_a_trace_is_continued_under_the_same_header_only(tmp_path, key):
    header = {"fingerprint": "f", "rules": ["greedy"], "lattice_rule_code": "c", "spec": {}}
    for given in (header, header | {"pretrained": "elsewhere"}):
        trace_files.Writer(tmp_path / "t.jsonl").begin(given)
    with pytest.raises(DuelError, match=key):
        trace_files.Writer(tmp_path / "t.jsonl").begin(header | {key: "other"})


@pytest.mark.parametrize("changed", ["reveal_steps", "token_logprobs", "confidence", "margin", "entropy"])
@pytest.mark.parametrize("length", [0, 2, 3, 4])
def test_lists_of_a_window_have_a_number_for_each_id_or_none(changed, length):
    line = WINDOW | {changed: [0] * length}
    if length in (0, 3):
        trace_files._window(line)
        return
    with pytest.raises(ValueError, match="length"):
        trace_files._window(line)
