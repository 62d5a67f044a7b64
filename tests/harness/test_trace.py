"""Traces: written as documents finish, read back as plain Python, shown in a terminal."""

import json
import math

import pytest
from harness_requests import ask

from lm_eval_duel.errors import DuelError
from lm_eval_duel.harness.lm import DuelMDM
from lm_eval_duel.results import trace


def writer(path, header, rank=0, ranks=1):
    """A trace that has begun."""
    begun = trace.Writer(path, rank, ranks)
    begun.begin(header)
    return begun


HEADER = {"fingerprint": "abc", "spec": {"rule": "greedy:k=1"}, "tokenizer": "demo-mdm"}
TEXTS = ["a b c d e f g h i j k l m n o p q r s t", "the of and", "", "z y x w v u the"]


def scored(folder, path, block=4, **arguments):
    """The harness's model with a trace, and its values of the texts."""
    lm = DuelMDM(pretrained=folder, device="cpu", max_length=16, trace=str(path), block=block, **arguments)
    requests = ask("loglikelihood_rolling", *[(text,) for text in TEXTS])
    return lm, lm.loglikelihood_rolling(requests)


def entries(path, *names):
    """The entries of these names of each window of a trace."""
    return [tuple(record[name] for name in names) for record in trace.read(path)]


def test_a_trace_holds_every_window_as_it_was_scored(folder, tmp_path):
    path = tmp_path / "t.jsonl"

    lm, answers = scored(folder, path)

    records = trace.read(path)
    assert entries(path, "task", "request") == [("toy", 0)] * 4
    assert entries(path, "doc", "window") == [(0, 0), (0, 1), (1, 0), (3, 0)]
    for doc, text in enumerate(TEXTS):
        ids = []
        log_probs = []
        for record in records:
            if record["doc"] == doc:
                ids += record["ids"]
                log_probs.append(record["log_prob"])
        assert ids == lm.tok_encode(text)
        assert math.fsum(log_probs) == pytest.approx(answers[doc], abs=1e-9)

    for record in records:
        size = len(record["ids"])
        assert record["context"] == 1
        assert record["starts"] == list(range(0, size, 4))
        assert record["nfe"] == size
        assert record["values"] == {"duel": record["log_prob"]}
        assert math.fsum(record["token_logprobs"]) == pytest.approx(record["log_prob"], abs=1e-9)
        for name in ("reveal_steps", "token_logprobs", "confidence", "margin", "entropy"):
            assert len(record[name]) == size
        assert min(record["entropy"]) > 0
        assert max(record["entropy"]) < math.log(40)
        assert min(record["margin"]) >= 0
        assert max(record["margin"]) <= 1
        for nats, odds in zip(record["token_logprobs"], record["confidence"], strict=True):
            most = -math.log1p(math.exp(-odds))
            assert nats <= most + 1e-4, "the truth is never more probable than the top token"

    header = trace.spec(path)
    assert header["fingerprint"] == lm.fingerprint
    assert header["spec"] == lm.spec
    assert header["pretrained"] == str(folder)


def require_totals(lm, answers, records):
    """Assert that the results hold the sums of a trace's windows."""
    totals = lm.get_model_info()["duel"]["tasks"]["toy"]
    assert totals["documents"] == 4
    assert totals["windows"] == 4
    assert totals["tokens"] == 30
    for name, total in totals["values"].items():
        log_prob = math.fsum(record["values"][name] for record in records)
        assert total["log_prob"] == pytest.approx(log_prob, abs=1e-6)
    assert totals["values"][lm.estimator.name]["log_prob"] == pytest.approx(math.fsum(answers), abs=1e-6)


def test_a_bound_leaves_a_trace_without_an_order(folder, tmp_path):
    lm, answers = scored(folder, tmp_path / "t.jsonl", estimator="elbo", mc_samples=16)
    records = trace.read(tmp_path / "t.jsonl")
    require_totals(lm, answers, records)
    for record in records:
        assert record["values"] == {"elbo": record["log_prob"]}
        assert record["stderr"] > 0
        assert not record["reveal_steps"]
        assert math.fsum(record["token_logprobs"]) == pytest.approx(record["log_prob"], abs=1e-9)
    [total] = lm.get_model_info()["duel"]["tasks"]["toy"]["values"].values()
    assert total["stderr"] == pytest.approx(math.hypot(*(record["stderr"] for record in records)))


def test_a_lattice_leaves_a_trace_with_the_order_of_each_rule(folder, tmp_path):
    lm, answers = scored(folder, tmp_path / "t.jsonl", estimator="oracle", lattice_rules="greedy+margin:k=2")
    records = trace.read(tmp_path / "t.jsonl")
    require_totals(lm, answers, records)
    for record in records:
        values = record["values"]
        assert next(iter(values)) == "oracle"
        assert values["elbo_exact"] <= values["mixture"] <= values["oracle"] == record["log_prob"]
        for name in ("greedy:k=1", "margin:k=2"):
            rule = record["rules"][name]
            assert math.fsum(rule["token_logprobs"]) == pytest.approx(values[name], abs=1e-9)
            assert len(rule["entropy"]) == len(rule["reveal_steps"]) == len(record["ids"])
            assert rule["near_ties"] is not None

    scored(folder, tmp_path / "duel.jsonl")
    for record, alone in zip(records, trace.read(tmp_path / "duel.jsonl"), strict=True):
        if alone["near_ties"]:
            continue
        followed = record["rules"]["greedy:k=1"]
        assert followed["reveal_steps"] == alone["reveal_steps"]
        assert followed["nfe"] == alone["nfe"]
        assert followed["margin"] == pytest.approx(alone["margin"], abs=1e-3)
        assert record["values"]["greedy:k=1"] == pytest.approx(alone["log_prob"], abs=5e-4)


def test_a_trace_goes_on_where_it_was_cut_off(tmp_path):
    path = tmp_path / "t.jsonl"
    window = {"task": "t", "doc": 0, "request": 0, "window": 0}
    writer(str(path), HEADER).write([{**window, "n": 1}])
    with path.open("a") as file:
        file.write('{"task": "t", "doc": 1, "requ')
    assert entries(path, "doc") == [(0,)]
    writer(str(path), HEADER).write([{**window, "n": 2}])
    assert entries(path, "n") == [(2,)]  # the last of equal windows
    assert len(path.read_text().splitlines()) == 3

    with pytest.raises(DuelError, match=r"written under another spec \(fingerprint abc; this run's is xyz\)"):
        writer(str(path), {**HEADER, "fingerprint": "xyz"})
    with pytest.raises(DuelError, match=r"under another spec \(rules None; this run's is \['margin:k=1'\]\)"):
        writer(str(path), {**HEADER, "rules": ["margin:k=1"]})

    for cut in ('{"duel_trace": 1, "finger', '{"due', ""):  # killed in its first line
        path.write_text(cut)
        writer(str(path), HEADER)
        assert trace.spec(path)["fingerprint"] == "abc"

    notes = tmp_path / "notes.txt"
    notes.write_text("my notes")
    with pytest.raises(DuelError, match=r"notes.txt is not a trace: its first line has no spec"):
        writer(str(notes), HEADER)
    assert notes.read_text() == "my notes"


def test_lines_wait_while_the_disk_is_full_and_keep_their_order(tmp_path, caplog):
    path = tmp_path / "t.jsonl"
    writer(str(path), HEADER).write([{"n": 1}])
    with path.open("ab") as file:
        file.write(b"x" * 200_000)  # cut off
    full = writer(str(path), HEADER)
    file = full.file
    with caplog.at_level("ERROR", logger="lm_eval.duel_mdm"), open("/dev/full", "wb", buffering=0) as full.file:
        for n in (2, 3):
            full.write([{"n": n}])
        full.flush()
    assert caplog.text.count("No space left on device): the run continues, and lines wait in memory") == 1
    assert "2 lines could not be written to" in caplog.text
    full.file = file
    full.write([{"n": 4}])
    _, *lines = path.read_text().splitlines()
    assert [json.loads(line)["n"] for line in lines] == [1, 2, 3, 4]


def test_the_files_of_all_ranks_are_one_trace_in_which_a_document_scored_again_is_the_new_one(tmp_path):
    path = tmp_path / "t.jsonl"

    def write(path, doc, rank, ranks, windows=1):
        lines = [{"task": "t", "doc": doc, "request": 0, "window": n, "rank": rank} for n in range(windows)]
        writer(str(path), HEADER, rank, ranks).write(lines)

    for doc in range(7):
        write(path, doc, doc % 3, ranks=3)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["t.rank0.jsonl", "t.rank1.jsonl", "t.rank2.jsonl"]
    assert entries(path, "doc") == [(doc,) for doc in range(7)]

    again = tmp_path / "run[1].jsonl"
    write(again, 0, rank=0, ranks=2, windows=3)
    write(again, 0, rank=1, ranks=2)
    assert entries(again, "window", "rank") == [(0, 1)]
    write(again, 0, rank=0, ranks=1)  # the newest file, of one process
    assert entries(again, "rank") == [(0,)]

    writer(str(tmp_path / "t.rank3.jsonl"), {**HEADER, "fingerprint": "old"})
    with pytest.raises(DuelError, match=r"different specs .*t.rank0.jsonl: abc.*t.rank3.jsonl: old"):
        trace.read(path)


def test_one_process_that_resumes_several_and_scores_nothing_leaves_no_file(tmp_path):
    path = tmp_path / "t.jsonl"
    line = {"task": "t", "doc": 0, "request": 0, "window": 0}
    for rank in range(2):
        writer(path, HEADER, rank, 2).write([{**line, "doc": rank}])

    resumed = writer(path, HEADER)
    resumed.flush()
    assert not path.exists()
    assert entries(path, "doc") == [(0,), (1,)]

    resumed.write([{**line, "doc": 2}])
    resumed.write([{**line, "doc": 3}])
    assert entries(path, "doc") == [(0,), (1,), (2,), (3,)]
    writer(path, HEADER).write([{**line, "doc": 4}])  # the file goes on
    assert entries(path, "doc") == [(0,), (1,), (2,), (3,), (4,)]


def test_what_is_no_trace(tmp_path):
    with pytest.raises(DuelError, match=r"There is no trace .*none.jsonl; write one with --model_args trace="):
        trace.read(tmp_path / "none.jsonl")
    (tmp_path / "other.jsonl").write_text('{"a": 1}\n')
    with pytest.raises(DuelError, match=r"other.jsonl is not a trace: its first line has no spec"):
        trace.read(tmp_path / "other.jsonl")
    (tmp_path / "later.jsonl").write_text('{"duel_trace": 9}\n')
    with pytest.raises(DuelError, match="is a trace of format 9; this release reads 1"):
        trace.spec(tmp_path / "later.jsonl")
    window = {"task": "t", "doc": 0, "window": 0, "ids": [1, 2], "reveal_steps": [0, 1], "token_logprobs": [-1.0, -2.0]}
    lines = ["{"]
    for damage in (
        {"token_logprobs": ["a"]},
        {"reveal_steps": [1]},
        {"reveal_steps": "ab"},
        {"values": [1]},
        {"values": {"duel": "x"}},
        {"doc": []},
    ):
        lines.append(json.dumps(window | damage))
    for n, line in enumerate(lines):
        path = tmp_path / f"bad{n}.jsonl"
        writer(str(path), HEADER)
        with path.open("a") as file:
            file.write(f"{line}\n{{}}\n")
        with pytest.raises(DuelError, match=rf"bad{n}.jsonl, line 2 is not a window of a trace"):
            trace.read(path)
