"""Paired differences of two scores of the same texts: `compare`, and files of `score --json` in a report."""

import json
import math
from types import SimpleNamespace

import numpy as np
import pytest

from lm_eval_duel import DuelError, compare
from lm_eval_duel.estimators.registry import NO_BOUND, Kind
from lm_eval_duel.results import figures, paired
from lm_eval_duel.results.report import main as report

SIZE = 40


def scores(shift=0.0, seed=1, tokens=None, kind=Kind.LIKELIHOOD.value, stderr=None):
    """Scores of the same texts; `shift` in nats per token."""
    texts, noise = np.random.default_rng(0), np.random.default_rng(seed)
    found = []
    for n in range(SIZE):
        count, hard = int(texts.integers(20, 60)), texts.normal(3.4, 0.5)
        nats = -count * (hard + shift + noise.normal(0, 0.02))
        text = f"text {n} " + "word " * count
        found.append(SimpleNamespace(text=text, log_prob=nats, tokens=("x",) * count, stderr=stderr, kind=kind))
        found[-1].tokens = ("x",) * (tokens or count)
    return found


def test_a_difference_is_that_of_the_rates_with_the_error_of_a_paired_ratio():
    a, b = scores(0.0), scores(0.05, seed=2)
    found = compare(a, b, ("A", "B"))
    tokens = np.array([len(score.tokens) for score in a])
    nats = np.array([[-score.log_prob for score in scores] for scores in (a, b)])
    expected = (nats[0] - nats[1]).sum() / tokens.sum()
    residuals = nats[0] - nats[1] - expected * tokens
    error = math.sqrt((residuals**2).sum()) / tokens.sum()
    low, high = found.interval
    assert found.difference == pytest.approx(expected, abs=1e-12) and found.unit == "token"
    assert found.perplexities == pytest.approx(tuple(math.exp(row.sum() / tokens.sum()) for row in nats))
    assert (low + high) / 2 == pytest.approx(expected, abs=0.1 * error)
    assert (high - low) / (2 * 1.96) == pytest.approx(error, rel=0.1)
    assert found.verdict == "A is better" and f"{expected:+.4f}" in str(found)
    back = compare(b, a, ("B", "A"))
    assert back.difference == -found.difference and back.interval == pytest.approx((-high, -low))
    assert compare(a, a).verdict == "equal"


def test_other_tokens_are_compared_per_byte():
    a, b = scores(), scores(0.05, seed=2, tokens=7)
    found = compare(a, b)
    size = sum(len(score.text.encode()) for score in a)
    assert found.unit == "byte"
    assert found.difference == pytest.approx(sum(y.log_prob - x.log_prob for x, y in zip(a, b, strict=True)) / size)
    assert compare(a, b, unit="word").unit == "word"
    with pytest.raises(DuelError, match="other tokens"):
        compare(a, b, unit="token")
    with pytest.raises(DuelError, match="'unit'"):
        compare(a, b, unit="line")


@pytest.mark.parametrize("other", [scores()[:-1], scores()[::-1], []], ids=["fewer", "order", "none"])
def test_other_texts_are_refused(other):
    with pytest.raises(DuelError, match="same texts"):
        compare(scores(), other)


@pytest.mark.parametrize(
    ("kind", "shift", "word"),
    [
        (Kind.UPPER_BOUND.value, -0.05, "second is better"),
        (Kind.UPPER_BOUND.value, 0.05, "no verdict: second is an upper bound"),
        (NO_BOUND, 0.05, "no verdict: second is neither a likelihood nor a bound"),
        (Kind.NOT_A_LIKELIHOOD.value, -0.05, "no verdict: second is not a likelihood"),
        (Kind.ESTIMATE.value, 0.05, "no verdict: the error of second is not known"),
    ],
)
def test_a_bound_an_oracle_and_an_unknown_error(kind, shift, word):
    found = compare(scores(), scores(shift, seed=2, kind=kind), ("first", "second"))
    assert found.verdict == word


def test_the_monte_carlo_error_widens_the_interval():
    a, b = scores(), scores(0.05, seed=2)
    drawn = scores(0.05, seed=2, kind=Kind.ESTIMATE.value, stderr=3.0)
    widths = [high - low for low, high in (compare(a, other).interval for other in (b, drawn))]
    tokens = sum(len(score.tokens) for score in a)
    error = 3.0 * math.sqrt(SIZE) / tokens
    assert widths[1] == pytest.approx(math.hypot(widths[0], 2 * 1.96 * error), rel=0.1)


def test_a_report_of_score_files_has_the_same_difference(tmp_path, monkeypatch):
    monkeypatch.setattr(figures, "available", lambda: False)
    files = []
    for name, found in (("A", scores()), ("B", scores(0.05, seed=2))):
        files.append(tmp_path / f"{name}.json")
        files[-1].write_text(json.dumps(score_file(name, found)))
    one = score_file("A", scores()) | {"compared": [score_file("B", scores(0.05, seed=2))]}
    (tmp_path / "both.json").write_text(json.dumps(one))
    expected = compare(scores(), scores(0.05, seed=2))
    for places in (files, [tmp_path / "both.json"]):
        report([*map(str, places), "--out", str(tmp_path / "out"), "--metric", "token_perplexity"])
        (task,) = json.loads((tmp_path / "out" / "report.json").read_text())["tasks"].values()
        (pair,) = task["pairs"]
        assert pair["names"] == ["A", "B"] and pair["verdict"] == "A is better"
        assert pair["difference"] == pytest.approx(expected.difference)
        assert pair["interval"] == pytest.approx(expected.interval)


def score_file(name, found):
    """As `score --json` writes it."""
    documents = [
        {
            "document": f"d:{n}",
            "sha256": paired.key_of(score.text),
            "tokens": len(score.tokens),
            "words": len(score.text.split()),
            "bytes": len(score.text.encode()),
            "log_prob": score.log_prob,
        }
        for n, score in enumerate(found)
    ]
    spec = {"weights": f"w-{name}", "rule": "greedy:k=1", "block": "4", "estimator": "duel", "tokenizer": "t"}
    return {
        "format": "lm_eval_duel score",
        "version": 1,
        "pretrained": name,
        "fingerprint": name,
        "spec": spec,
        "estimator": "duel",
        "documents": documents,
        "duel": {"pretrained": name, "estimator": "duel", "rule": "greedy:k=1", "weights": f"w-{name}", "tasks": {}},
    }
