"""The traces of a report: how windows are joined, which orders are shown, and which trace and which window counts."""

import re
import shutil

import pytest
from results import documents, ours, put, trace

from lm_eval_duel.cli.report import parse
from lm_eval_duel.errors import DuelError
from lm_eval_duel.results import read, stats, traced
from lm_eval_duel.results import trace as trace_files
from lm_eval_duel.results.report import collect

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


def test_each_result_has_its_own_texts_of_a_trace(tmp_path, monkeypatch):
    """Of one that was continued with other texts, and of two under one spec. No result has the third text."""
    monkeypatch.setattr(traced, "token_texts", lambda ids, tokenizer: list(map(str, ids)))
    windows = {}
    for text, nats in (("first", -3.5), ("second", -9.0), ("third", -1.0)):
        windows[text] = WINDOW | {"sha256": stats.key_of(text), "values": {"duel": nats}}
        if text != "third":
            file = ours(tmp_path / text, docs={"sotu": documents([nats], [3], [text])})
    of_another_document = WINDOW | {"doc": 1, "sha256": stats.key_of("fourth")}
    of_all = trace(
        tmp_path / "all.jsonl", file, [windows["second"], windows["first"], windows["third"], of_another_document]
    )
    of_each = [trace(tmp_path / f"{text}.jsonl", file, [line]) for text, line in windows.items()]
    runs = read.runs([tmp_path / "first", tmp_path / "second"])

    for places in ([of_all], of_each):
        attached, notes = traced.Traces(places).attach(runs)
        assert [run.traced["sotu", "duel"] for run in attached] == [{0: -3.5}, {0: -9.0}]
        foreign = [note.advice for note in notes]
        assert len(foreign) == (0 if places == [of_all] else 1)
        assert all("third.jsonl" in advice and "none of the results" in advice for advice in foreign)
    [first, _], [note] = traced.Traces([of_each[1]]).attach(runs)
    assert first.traced == {}
    assert "other texts" in note.advice

    for folder in ("first", "second"):
        shutil.copytree(tmp_path / folder, tmp_path / "both", dirs_exist_ok=True)
    words = ("--apart", "--page", "--tokenizer", "demo-mdm", "--traces", str(of_all), "--out", "unused")
    content = collect(parse([str(tmp_path / "both"), *words]))
    assert [document["title"] for document in content.documents] == ["sotu, document 0", "sotu (2), document 0"]
    for document in content.documents:
        assert len(document["orders"]) == 1


def test_a_trace_that_two_results_share_is_shown_once(tmp_path):
    files = [ours(tmp_path / name, docs=DOCS) for name in ("first", "again")]
    path = trace(tmp_path / "t.jsonl", files[0], [WINDOW])
    traces = traced.Traces([path])
    runs, _ = traces.attach(read.runs([tmp_path / "first", tmp_path / "again"]))

    [orders] = traced._orders_of_documents(traces, runs, {}, None).values()

    [order] = orders
    assert order.ids == WINDOW["ids"]


def test_of_a_trace_without_results_the_last_texts_are_shown(tmp_path):
    file = ours(tmp_path, docs=DOCS)
    lines = [WINDOW | {"sha256": text} for text in ("2", "1", "3", "1")]
    path = trace(tmp_path / "t.jsonl", file, lines)

    [window] = traced.Traces([]).windows(path, None)

    assert window["sha256"] == "1"


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
