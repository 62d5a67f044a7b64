"""The harness's --use_cache files: of one spec, of any number of ranks, safe to read, and never in the way of a run."""

import itertools
import os
import pickle
import re
import shutil
import sqlite3

import pytest
from harness_requests import ask, cached
from lm_eval.api.model import CachingLM, hash_args
from lm_eval.models.dummy import DummyLM
from sqlitedict import SqliteDict

from lm_eval_duel import rules
from lm_eval_duel.errors import DuelError, InconsistentOutput
from lm_eval_duel.harness import store
from lm_eval_duel.harness.store import Answers
from lm_eval_duel.results import trace

TEXTS = [("a b c",), ("d e",), ("f g h i",), ("a",)]


def requests(texts=TEXTS, kind="loglikelihood_rolling"):
    return ask(kind, *texts)


def computed(wrapped):
    return wrapped.lm.estimator.counts.windows


def keys(wrapped, begins=""):
    """The keys of windows, or of answers: those of other records begin with a word."""
    every = sorted(key for (key,) in wrapped.dbdict.file.execute("SELECT key FROM unnamed"))
    if begins:
        return [key for key in every if key.startswith(begins)]
    return [key for key in every if " " not in key]


def change(path, query, *values):
    with sqlite3.connect(path) as file:
        file.execute(query, values)
    file.close()


def test_a_file_of_another_law_is_refused_in_words(model, tmp_path):
    first = cached(model(), tmp_path)
    first.loglikelihood_rolling(requests())
    cached(model(batch_size=7), tmp_path)  # the same spec
    other = model(rule="margin", block=8)
    message = (
        f"c_rank0.db was written under another spec ({first.lm.fingerprint}, this run is {other.fingerprint}): "
        "block: this run 8, the other 4; rule: this run margin:k=1, the other greedy:k=1."
    )
    with pytest.raises(DuelError, match=re.escape(message)):
        cached(other, tmp_path)
    with pytest.raises(DuelError, match=re.escape(message)):  # another rank's counts as well
        cached(other, tmp_path, rank=3)


def test_the_fingerprint_of_a_file_does_not_depend_on_the_rules_that_a_lattice_follows(model, tmp_path):
    first = cached(model(estimator="mixture", lattice_rules="greedy"), tmp_path)
    with pytest.raises(DuelError, match=re.escape(f"({first.lm.fingerprint}, this run is ")):
        cached(model(block=2), tmp_path)


class Followed(rules.RULES["greedy"]):
    """A user's own rule."""


def test_the_code_of_a_rule_that_a_lattice_follows_is_in_the_results(model):
    """And not in the fingerprint, which is that of the value over all orders."""
    plain = model(estimator="mixture").get_model_info()
    followed = model(estimator="mixture", lattice_rules="test_cache:Followed").get_model_info()
    assert followed["fingerprint"] == plain["fingerprint"]
    assert followed["duel"]["lattice_rule_code"] == Followed().describe()["rule_code"]
    assert "lattice_rule_code" not in plain["duel"]


def test_a_file_of_another_format_is_refused(model, tmp_path):
    first = cached(model(), tmp_path)
    cached(model(), tmp_path)  # it has no answers yet
    first.loglikelihood_rolling(requests())
    change(tmp_path / "c_rank0.db", 'DELETE FROM "unnamed" WHERE key = ?', store.VERSION)  # as the first ones had none
    with pytest.raises(DuelError, match=f"records of format 1, and this release reads {store.FORMAT}"):
        cached(model(), tmp_path)


@pytest.mark.parametrize("spec", [{}, {"estimator": "two_phase", "sample": 0.5}, {"estimator": "oracle"}], ids=str)
def test_a_score_is_read_as_it_was_written(model, spec):
    """Records are plain values: they are pickled, and read without running code."""
    lm = model(**spec)
    for score in lm.estimator.log_prob(lm.text.windows("a b c d e f")):
        record = pickle.loads(pickle.dumps(store.encode(score)))
        assert store.decode(record) == score
        short = store.without_order(score)
        assert short.log_prob == score.log_prob
        assert short.value == score.value
        assert short.reveal_steps == ()
        assert store.decode_request(store.encode_request([score]), 1) == [short]


@pytest.mark.parametrize(("before", "after"), [(2, 1), (3, 4)])
def test_answers_are_found_whatever_the_number_of_ranks_was(model, tmp_path, before, after):
    asked = requests()
    whole = [0.0] * len(TEXTS)
    for rank in range(before):
        whole[rank::before] = cached(model(), tmp_path, rank).loglikelihood_rolling(asked[rank::before])
    for rank in range(after):
        again = cached(model(), tmp_path, rank)
        assert again.loglikelihood_rolling(asked[rank::after]) == whole[rank::after]
        assert computed(again) == 0


def test_no_code_of_a_record_runs(model, tmp_path):
    class Code:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "ran"),)

    first = cached(model(), tmp_path)
    first.loglikelihood_rolling(requests())
    change(tmp_path / "c_rank0.db", 'UPDATE "unnamed" SET value = ?', pickle.dumps(Code()))
    with pytest.raises(DuelError, match="no spec of duel-mdm"):  # its spec is none any more, either
        cached(model(), tmp_path)
    assert not (tmp_path / "ran").exists()


@pytest.mark.row_checks
def test_suspect_answers_are_kept_and_not_used_again(model, tmp_path, monkeypatch):
    """A network that changes after some calls ends the run; what was saved stays, and the file says why."""
    first = cached(model(batch_size=2), tmp_path)
    network = first.lm.denoiser
    features = network.features
    calls = itertools.count(1)

    def changing(*arguments, **more):
        factor = 1 if next(calls) <= 10 else 2
        return features(*arguments, **more) * factor

    monkeypatch.setattr(network, "features", changing)
    asked = requests([(" ".join(words),) for words in itertools.product("abcdefgh", repeat=2)])
    with pytest.raises(InconsistentOutput, match=rf"task toy: .*{first.lm.fingerprint} in .*c_rank0.db"):
        first.loglikelihood_rolling(asked)
    assert 0 < len(keys(first)) == first.lm.evaluation.progress.finished < len(asked)
    with pytest.raises(DuelError, match="db are suspect"):
        cached(model(), tmp_path)
    with pytest.raises(DuelError, match="db are suspect"):  # another rank's counts as well
        cached(model(), tmp_path, rank=1)


def test_a_full_disk_stops_nothing(model, tmp_path, caplog):
    wrapped = cached(model(), tmp_path)
    full = wrapped.dbdict
    full.file.execute("PRAGMA max_page_count = 1")  # SQLite's own "database or disk is full"
    many = requests([(" ".join(words),) for words in itertools.product("abcdefgh", repeat=2)])
    with caplog.at_level("INFO", logger="lm_eval.duel_mdm"):
        values = wrapped.loglikelihood_rolling(many)
    assert values == pytest.approx(model().loglikelihood_rolling(many), abs=1e-4)
    assert "cannot be written (database or disk is full): the run continues" in caplog.text
    waiting = len(full.waiting)
    assert waiting
    assert f"{waiting} answers are not in " in caplog.text
    scored = computed(wrapped)
    assert wrapped.loglikelihood_rolling(many) == values
    assert computed(wrapped) == scored  # those that wait are known

    full.file.execute("PRAGMA max_page_count = 100000")  # somebody made room
    with caplog.at_level("INFO", logger="lm_eval.duel_mdm"):
        wrapped.loglikelihood_rolling(requests([("z",)]))
    assert not full.waiting
    assert "answers that waited are saved" in caplog.text

    again = cached(model(), tmp_path)
    assert again.loglikelihood_rolling(many) == values
    assert computed(again) == 0


@pytest.mark.parametrize(("rank", "begins"), [(0, b""), (1, b"SQLite format 3\0")])
def test_a_file_that_cannot_be_read_is_named(model, tmp_path, rank, begins):
    """The harness opens this rank's own before anybody else sees it."""
    cached(model(), tmp_path).loglikelihood_rolling(requests())
    (tmp_path / f"c_rank{rank}.db").write_bytes(begins + b"\xff" * 5000)
    with pytest.raises(DuelError, match=f"c_rank{rank}.db cannot be read"):
        cached(model(), tmp_path)


TIES = ("near_ties", "near_tie_windows", "all_mask_starts")  # counts of the results


@pytest.mark.parametrize(
    "spec", [{}, {"estimator": "elbo", "mc_samples": 16}, {"estimator": "two_phase", "sample": 0.4}], ids=str
)
def test_the_results_of_a_resumed_run_are_whole(model, tmp_path, monkeypatch, spec):
    """What tasks hold, errors and documents with close picks included; cost is of what was computed."""
    monkeypatch.setattr("lm_eval_duel.core.decision.NEAR_TIE", 1e9)  # every pick is close
    asked = requests([TEXTS[0], ("",), *TEXTS])  # an empty one, and one that comes twice
    whole = model(**spec)
    whole.loglikelihood_rolling(asked)
    cached(model(**spec), tmp_path).loglikelihood_rolling(asked[:3])
    again = cached(model(**spec), tmp_path)
    again.loglikelihood_rolling(asked)

    resumed = again.get_model_info()["duel"]
    uninterrupted = whole.get_model_info()["duel"]
    assert resumed["answers_from_cache"] == 3
    assert "answers_from_cache" not in uninterrupted
    assert resumed["empty_requests"] == uninterrupted["empty_requests"] == 1
    assert resumed["windows"] < uninterrupted["windows"]
    for count in TIES:
        assert resumed[count] == uninterrupted[count], "an empty document and a repeated one count as they would"
    if not spec:
        assert uninterrupted["near_ties"] > uninterrupted["near_tie_windows"] > 0

    task = resumed["tasks"]["toy"]
    expected = uninterrupted["tasks"]["toy"]
    if not spec:
        assert task["near_tie_documents"] == [0, 2, 3, 4], "those of more than one token"
    values = task.pop("values")
    expected_values = expected.pop("values")
    assert task == expected
    assert values.keys() == expected_values.keys()
    for name, figures in expected_values.items():
        for figure, value in figures.items():
            close = value if value is None else pytest.approx(value, abs=1e-4)
            assert values[name][figure] == close, (name, figure)

    fewer = cached(model(**spec), tmp_path)
    fewer.loglikelihood_rolling(asked[2:4])
    task = fewer.get_model_info()["duel"]["tasks"]["toy"]
    assert task["documents"] == 2
    assert task["requests"] == 2
    assert task["tokens"] == 5


def test_other_models_caches_are_what_they_were(model, tmp_path):
    """A stock model in the same process looks up its own answers, under lm-eval's own keys."""
    asked = requests([("one", {"until": ["."]}), ("two", {"until": ["."]})], "generate_until")
    ours = cached(model(), tmp_path)
    stock = CachingLM(DummyLM(), str(tmp_path / "stock.db"))

    texts = stock.generate_until(asked)

    assert type(stock.dbdict) is SqliteDict
    for request, text in zip(asked, texts, strict=True):
        assert stock.dbdict[hash_args("generate_until", request.args)] == text
    assert "generate_until" in vars(ours)
    assert "generate_until" not in vars(stock)


def test_a_window_is_kept_while_an_unfinished_document_has_it(model, tmp_path):
    wrapped = cached(model(), tmp_path)
    begin = "a b c d e f g h i j k l m n"  # the first window of both texts
    asked = requests([(f"{begin} x",), (f"{begin} y",)])
    windows = [wrapped.lm.text.windows(request.args[0]) for request in asked]
    (begin_of_one, end_of_one), (begin_of_other, end_of_other) = windows
    assert begin_of_one == begin_of_other
    assert end_of_one != end_of_other

    answers = Answers(wrapped.dbdict, wrapped.lm.estimator, "loglikelihood_rolling", asked, windows)
    for n, parts in enumerate(windows):
        scores = wrapped.lm.estimator.log_prob(parts)
        for window, score in zip(parts, scores, strict=True):
            answers.keep(window, score)
        answers.save(n, scores)
        assert len(keys(wrapped, "window ")) == len(answers.kept([0, 1])) == 1 - n


@pytest.mark.parametrize(
    ("spec", "traced"),
    [
        ({"rule": "klass", "mu": 0.5, "nu": 0.1}, True),
        ({"estimator": "elbo", "mc_samples": 8}, False),
        ({"estimator": "sampled_confidence", "block": 4}, True),
    ],
    ids=str,
)
def test_windows_of_a_document_that_is_not_finished_are_kept(model, tmp_path, monkeypatch, spec, traced):
    """Killed in the middle of its document, a run loses the window in flight; cost and trace come out whole."""
    monkeypatch.setattr("lm_eval_duel.core.decision.NEAR_TIE", 1e9)  # every pick is close
    texts = [(" ".join("abcdefghijklmnopqrstuvwxyz"),)]  # 2 windows

    def options(name):
        arguments = {**spec, "dtype": "float64"}
        if traced:
            arguments["trace"] = str(tmp_path / name)
        return arguments

    first = cached(model(**options("t.jsonl")), tmp_path)
    keep = first.dbdict.__class__.keep
    whole = model(**options("whole.jsonl"))
    values = whole.loglikelihood_rolling(requests(texts))

    class Stop(BaseException):
        pass

    def stopped(self, key, value):
        keep(self, key, value)
        if key.startswith("window "):
            raise Stop

    with pytest.MonkeyPatch.context() as patch, pytest.raises(Stop):
        patch.setattr(type(first.dbdict), "keep", stopped)
        first.loglikelihood_rolling(requests(texts))

    shutil.copytree(tmp_path, tmp_path / "copy")
    with_or_without_trace = {**options("t.jsonl"), "trace": None if traced else str(tmp_path / "o.jsonl")}
    other = cached(model(**with_or_without_trace), tmp_path / "copy")
    assert other.loglikelihood_rolling(requests(texts)) == pytest.approx(values, abs=1e-9)
    assert computed(other) == 2, "a score without the statistics of a trace is none with them"

    again = cached(model(**options("t.jsonl"), batch_size=2), tmp_path)
    assert len(keys(again, "window ")) == 1
    assert again.loglikelihood_rolling(requests(texts)) == pytest.approx(values, abs=1e-9)
    assert computed(again) == 1
    assert whole.estimator.counts.windows == 2
    assert not keys(again, "window ")
    resumed = again.lm.evaluation.stats.tasks["toy"].total
    for count in TIES:
        assert getattr(again.lm.evaluation.counts, count) == getattr(whole.evaluation.counts, count)
    uninterrupted = whole.evaluation.stats.tasks["toy"].total
    for name, total in uninterrupted.named.items():
        assert resumed.named[name].log_prob == pytest.approx(total.log_prob, abs=1e-9)
    if traced:
        lines = trace.read(tmp_path / "t.jsonl")
        for line, expected in zip(lines, trace.read(tmp_path / "whole.jsonl"), strict=True):
            assert line["reveal_steps"] == expected["reveal_steps"]
            assert line["values"].keys() == expected["values"].keys()
