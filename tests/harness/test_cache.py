"""The harness's --use_cache files: of one spec, of any number of ranks, safe to read, and never in the way of a run."""

import itertools
import os
import pickle
import re
import sqlite3

import pytest
import tiny
from close import close_nats
from lm_eval.api.model import CachingLM, hash_args
from lm_eval.models.dummy import DummyLM
from sqlitedict import SqliteDict

from lm_eval_duel.errors import DuelError
from lm_eval_duel.harness import trace
from lm_eval_duel.harness.lm import DuelMDM
from lm_eval_duel.harness.versions import request as make_request

TEXTS = [("a b c",), ("d e",), ("f g h i",), ("a",)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny.checkpoint(tmp_path_factory.mktemp("bert"), "bert", length=16)


@pytest.fixture
def model(folder):
    """A model of one spec unless told otherwise."""
    return lambda **other: DuelMDM(**{"pretrained": folder, "rule": "greedy", "block": 4, "device": "cpu", **other})


def requests(texts=TEXTS, kind="loglikelihood_rolling"):
    return [make_request(kind, {}, args, "toy", n, 1) for n, args in enumerate(texts)]


def cached(model, folder, rank=0):
    """The model as the harness wraps it, with the file of one rank."""
    return CachingLM(model, str(folder / f"c_rank{rank}.db"))


def computed(wrapped):
    return wrapped.lm.estimator.counts.windows


def keys(wrapped, begins=""):
    """The keys of windows, or of answers: those of other records begin with a word."""
    found = sorted(key for (key,) in wrapped.dbdict.file.execute("SELECT key FROM unnamed"))
    return [key for key in found if (key.startswith(begins) if begins else " " not in key)]


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


def test_a_file_of_another_model_is_refused(model, tmp_path):
    first = cached(model(), tmp_path)
    first.loglikelihood_rolling(requests())
    change(tmp_path / "c_rank0.db", 'DELETE FROM "unnamed" WHERE key = ?', "lm_eval_duel spec")
    with pytest.raises(DuelError, match="holds answers of another model"):
        cached(model(), tmp_path)


@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1), (3, 4)])
def test_answers_are_found_whatever_the_number_of_ranks_was(model, tmp_path, before, after):
    asked, whole = requests(), [0.0] * len(TEXTS)
    for rank in range(before):
        whole[rank::before] = cached(model(), tmp_path, rank).loglikelihood_rolling(asked[rank::before])
    for rank in range(after):
        again = cached(model(), tmp_path, rank)
        assert again.loglikelihood_rolling(asked[rank::after]) == whole[rank::after]
        assert computed(again) == 0


def test_a_killed_rank_loses_no_finished_request(model, tmp_path):
    """Every answer is in the file before the next one is computed: a run that ends in the middle left what it had."""
    first = cached(model(batch_size=1, max_batch_size=1), tmp_path)
    stream = first.lm.estimator.stream

    def killed(windows):
        for done, finished in enumerate(stream(windows)):
            if done == 2:
                raise KeyboardInterrupt
            yield finished

    first.lm.estimator.stream = killed
    with pytest.raises(KeyboardInterrupt):
        first.loglikelihood_rolling(requests())
    again = cached(model(), tmp_path)
    assert again.loglikelihood_rolling(requests()) == close_nats(model().loglikelihood_rolling(requests()))
    assert computed(again) == len(TEXTS) - 2


@pytest.mark.parametrize(
    "record",
    [pickle.dumps(-1.5)[:-3], b"", pickle.dumps(None), pickle.dumps(os.getcwd)],
    ids=["cut", "empty", "nothing", "code"],
)
def test_a_broken_record_is_dropped_and_scored_again(model, tmp_path, record, caplog):
    first = cached(model(), tmp_path)
    values = first.loglikelihood_rolling(requests())
    key = keys(first)[0]
    change(tmp_path / "c_rank0.db", 'UPDATE "unnamed" SET value = ? WHERE key = ?', record, key)
    again = cached(model(), tmp_path)
    with caplog.at_level("WARNING", logger="lm_eval.duel_mdm"):
        assert again.loglikelihood_rolling(requests()) == close_nats(values)
    assert computed(again) == 1
    assert "has a truncated or invalid record: it is dropped" in caplog.text
    assert cached(model(), tmp_path).dbdict.find(key, tuple)[0] in [close_nats(value, 1) for value in values]  # anew


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
    assert waiting and f"{waiting} answers are not in " in caplog.text
    full.file.execute("PRAGMA max_page_count = 100000")  # somebody made room
    with caplog.at_level("INFO", logger="lm_eval.duel_mdm"):
        wrapped.loglikelihood_rolling(requests([("z",)]))
    assert not full.waiting and "answers that waited are saved" in caplog.text
    again = cached(model(), tmp_path)
    assert again.loglikelihood_rolling(many) == values
    assert computed(again) == 0


def test_a_file_that_is_no_database_is_named(model, tmp_path):
    cached(model(), tmp_path).loglikelihood_rolling(requests())
    (tmp_path / "c_rank1.db").write_bytes(b"SQLite format 3\0" + b"\xff" * 5000)
    with pytest.raises(DuelError, match=r"c_rank1.db cannot be read .* Delete it"):
        cached(model(), tmp_path)


def test_a_file_that_was_cut_is_named(model, tmp_path):
    """Which the harness opens before anybody else sees it."""
    cached(model(), tmp_path).loglikelihood_rolling(requests())
    path = tmp_path / "c_rank0.db"
    path.write_bytes(b"\xff" * 5000)
    with pytest.raises(DuelError, match=r"c_rank0.db cannot be read .* Delete it"):
        cached(model(), tmp_path)


def test_what_another_rank_cannot_give_is_scored_again(model, tmp_path, caplog):
    many = requests([(" ".join("abcdefgh"[n % 8] for n in range(m)),) for m in range(1, 60)])
    values = cached(model(), tmp_path, rank=1).loglikelihood_rolling(many)
    path = tmp_path / "c_rank1.db"
    data = bytearray(path.read_bytes())
    wrapped = cached(model(), tmp_path)  # its keys are known ...
    data[4096 * 3 :] = b"\xff" * (len(data) - 4096 * 3)
    path.write_bytes(data)  # ... and most of its pages are lost
    with caplog.at_level("WARNING", logger="lm_eval.duel_mdm"):
        assert wrapped.loglikelihood_rolling(many) == pytest.approx(values, abs=1e-4)
    assert "c_rank1.db" in caplog.text and computed(wrapped) > 0


def test_the_results_of_a_resumed_run_are_whole(model, tmp_path, monkeypatch):
    """What tasks hold, errors and documents with close picks included; cost is of what was computed."""
    monkeypatch.setattr("lm_eval_duel.core.decision.NEAR_TIE", 1e9)  # every pick is close
    for number, spec in enumerate(({}, {"estimator": "elbo", "mc_samples": 16})):
        folder = tmp_path / str(number)
        folder.mkdir()
        asked = requests([TEXTS[0], ("",), *TEXTS])  # an empty one, and one that comes twice
        whole = model(**spec)
        whole.loglikelihood_rolling(asked)
        cached(model(**spec), folder).loglikelihood_rolling(asked[:3])
        again = cached(model(**spec), folder)
        again.loglikelihood_rolling(asked)
        ours, theirs = again.get_model_info()["duel"], whole.get_model_info()["duel"]
        assert ours["answers_from_cache"] == 3 and "answers_from_cache" not in theirs
        assert ours["empty_requests"] == theirs["empty_requests"] == 1
        one, other = ours["tasks"]["toy"], theirs["tasks"]["toy"]
        if not spec:
            assert one["near_tie_documents"] == [0, 2, 3, 4]  # of more than one token
        for name, value in other["values"].items():
            assert one["values"].pop(name) == {
                figure: None if of is None else pytest.approx(of, abs=1e-4) for figure, of in value.items()
            }
        one.pop("values"), other.pop("values")
        assert one == other
        assert ours["windows"] < theirs["windows"]


def test_other_models_caches_are_what_they_were(model, tmp_path):
    """A stock model in the same process looks up its own answers, under lm-eval's own keys."""
    asked = requests([("one", {"until": ["."]}), ("two", {"until": ["."]})], "generate_until")
    ours = cached(model(), tmp_path)
    stock = CachingLM(DummyLM(), str(tmp_path / "stock.db"))
    texts = stock.generate_until(asked)
    keys = [hash_args("generate_until", request.args) for request in asked]
    assert [stock.dbdict[key] for key in keys] == texts and type(stock.dbdict) is SqliteDict
    assert "generate_until" in vars(ours) and "generate_until" not in vars(stock)


def test_files_are_made_as_the_umask_says_and_nowhere_else(model, tmp_path):
    (tmp_path / "here").mkdir()
    before = os.umask(0o077)
    try:
        wrapped = cached(model(trace=str(tmp_path / "here" / "t.jsonl")), tmp_path / "here")
        wrapped.loglikelihood_rolling(requests())
    finally:
        os.umask(before)
    found = {path.name: path.stat().st_mode & 0o777 for path in tmp_path.rglob("*") if path.is_file()}
    assert found == {"c_rank0.db": 0o600, "t.jsonl": 0o600}


def test_samples_of_an_interrupted_run_are_found_again(model, tmp_path):
    drawn = {"until": [], "do_sample": True, "temperature": 1.0, "max_gen_toks": 8}
    prompts = [("a b", drawn), ("c", drawn), ("a b", {**drawn, "temperature": 0.7}), ("d", {**drawn, "temperature": 0})]
    first = cached(model(), tmp_path)
    texts = first.generate_until(requests(prompts, "generate_until"))
    assert texts == model().generate_until(requests(prompts, "generate_until"))
    again = cached(model(), tmp_path)
    assert again.generate_until(requests(prompts, "generate_until")) == texts
    assert again.lm.estimator.counts.forwards == 0
    other = cached(model(draw_seed=1), tmp_path)  # the same spec of scores, another of samples
    assert other.generate_until(requests(prompts, "generate_until")) != texts
    assert other.lm.estimator.counts.forwards > 0


def test_answers_found_are_in_no_trace_and_that_is_said(model, tmp_path, caplog):
    traced = {"trace": str(tmp_path / "t.jsonl")}
    cached(model(**traced), tmp_path).loglikelihood_rolling(requests())
    assert "are not computed again" not in caplog.text
    with caplog.at_level("WARNING", logger="lm_eval.duel_mdm"):
        cached(model(**traced), tmp_path)
    assert "are not computed again" in caplog.text


ESTIMATORS = [
    {"rule": "greedy"},
    {"rule": "klass", "mu": 0.5, "nu": 0.1},
    {"estimator": "elbo", "mc_samples": 8},
    {"estimator": "mixture", "lattice_rules": "greedy+margin"},
    {"estimator": "sampled_confidence", "beam": 16, "block": 8},
]


@pytest.mark.parametrize(
    ("spec", "traced"), list(zip(ESTIMATORS, (True, False, False, True, True), strict=True)), ids=str
)
def test_windows_of_a_document_that_is_not_finished_are_kept(model, tmp_path, spec, traced):
    """Killed in the middle of its document, a run loses the window in flight; cost and trace come out whole."""
    texts = [(" ".join("abcdefghijklmnopqrstuvwxyz"),)]  # 2 windows

    def options(name):
        return {**spec, "dtype": "float64", **({"trace": str(tmp_path / name)} if traced else {})}

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
    again = cached(model(**options("t.jsonl"), batch_size=2), tmp_path)
    assert len(keys(again, "window ")) == 1
    assert again.loglikelihood_rolling(requests(texts)) == pytest.approx(values, abs=1e-9)
    assert computed(again) == 1 < whole.estimator.counts.windows == 2
    assert not keys(again, "window ")
    ours, theirs = again.lm.run.stats.tasks["toy"], whole.run.stats.tasks["toy"]
    for name, total in theirs.values.items():
        assert ours.values[name].log_prob == pytest.approx(total.log_prob, abs=1e-9)
        assert ours.values[name].beam == pytest.approx(total.beam, abs=1e-9)
    if traced:
        lines = [[line["reveal_steps"], line["values"].keys()] for line in trace.read(tmp_path / "t.jsonl")]
        assert lines == [[line["reveal_steps"], line["values"].keys()] for line in trace.read(tmp_path / "whole.jsonl")]
