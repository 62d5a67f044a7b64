"""examples/paper/reproduce.py: all of it on tiny random networks, what it says without files, and its page."""

import importlib.util
import json
import socket

import pytest
from pages import ROOT, read

from lm_eval_duel.audit import plain_networks
from lm_eval_duel.errors import DuelError


@pytest.fixture
def script(monkeypatch):
    folder = ROOT / "examples" / "paper"
    monkeypatch.syspath_prepend(str(folder))
    spec = importlib.util.spec_from_file_location("reproduce", folder / "reproduce.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
def test_try_runs_all_of_it_and_resumes(script, tmp_path, monkeypatch, capsys):
    words = ["--try", "--out", str(tmp_path), "--device", "cpu", "--documents", "3"]
    assert script.main(words) == 0
    printed = capsys.readouterr().out
    assert printed.count("PASS: ") == 3
    for name, checkpoint in script.CHECKPOINTS.items():
        text = (tmp_path / "try" / f"{name}-try-3.json").read_text(encoding="utf-8")
        assert str(tmp_path) not in text and socket.gethostname() not in text
        record = json.loads(text)
        assert record["checkpoint"] == checkpoint.name and record["random_weights"]
        assert 0 < record["network"]["largest_difference_nats"] < 1e-3
        low, high = record["cell"]["interval_95"]
        assert low < record["cell"]["value"] < high
        assert record["cell"]["documents"] == 3 and len(record["cell"]["protocol_differs"]) > len(checkpoint.differs)
        assert {"torch", "lm_eval_duel"} <= record["versions"].keys()
        assert record["spec"]["weights"] and record["fingerprint"]
    monkeypatch.setattr(script, "compare_network", None)
    monkeypatch.setattr(script, "measure", None)
    assert script.main(words) == 0 and capsys.readouterr().out.count("PASS: ") == 3


@pytest.mark.slow
def test_a_network_that_differs_fails(script, tmp_path, monkeypatch):
    right = plain_networks.dit
    monkeypatch.setattr(plain_networks, "dit", lambda *row: 1.1 * right(*row))
    words = ["--try", "--checkpoint", "mdlm", "--out", str(tmp_path), "--device", "cpu"]
    assert script.main(words) == 1


@pytest.mark.parametrize("missing", ["checkpoint", "tokenizer", "data"])
def test_what_is_missing_is_named(missing, script, tmp_path):
    """With the command that fetches it, before a network is loaded."""
    checkpoint = script.CHECKPOINTS["mdlm"]
    script.write_tiny(tmp_path, ["mdlm"])
    place = tmp_path / "mdlm-owt"
    lost = {
        "checkpoint": place / "config.json",
        "tokenizer": place / "tokenizer.json",
        "data": tmp_path / "data" / "ag_news.jsonl",
    }
    script.require_files(checkpoint, tmp_path)
    lost[missing].unlink()
    with pytest.raises(DuelError, match=f"hf download {checkpoint.name}"):
        script.require_files(checkpoint, tmp_path)


def test_paths_are_left_out(script):
    found = script.anonymous({"a": ["no file /home/ann/x.json here", "C:\\Users\\ann\\x", "~/models/x", 1]})
    assert "ann" not in json.dumps(found) and "models" not in json.dumps(found)
    assert script.anonymous("kuleshov-group/mdlm-owt, 3 of 4/5") == "kuleshov-group/mdlm-owt, 3 of 4/5"


def test_the_page_is_what_the_script_prints(script):
    """Write it again with `python examples/paper/reproduce.py --table > docs/evidence.md`."""
    assert read("docs/evidence.md") == script.page(script.EVIDENCE)


def test_a_record_is_a_line_of_the_page(script, tmp_path):
    cell = {"task": "duel_ag_news", "value": 56.5, "interval_95": [55.25, 57.75], "published": 56.73}
    network = {"verdict": "PASS", "against": ["OwnClass"], "largest_difference_nats": 0.00002}
    record = {"checkpoint": "a/b", "revision": "c0ffee", "device": "H100", "network": network, "random_weights": False}
    record["bundled"] = False
    record["cell"] = cell | {"documents": 100, "of": 7600}
    (tmp_path / "one.json").write_text(json.dumps(record))
    (tmp_path / "tried.json").write_text(json.dumps(record | {"checkpoint": "tiny", "random_weights": True}))
    page = script.page(tmp_path)
    assert "| a/b | c0ffee | H100 | PASS, at most 2e-05 nats from OwnClass | duel_ag_news | 100 of 7,600 |" in page
    assert "tiny" not in page and script.ONLY_DEMOS not in page
    (tmp_path / "one.json").write_text(json.dumps(record | {"checkpoint": "demo-mdm", "bundled": True}))
    page = script.page(tmp_path)
    assert "| demo-mdm |" in page and script.ONLY_DEMOS in page
