"""Paired differences, their verdicts, and the cost of a cache."""

import dataclasses
import json
import math

import numpy as np
import pytest
from results import documents, edit, hf, ours

from lm_eval_duel.errors import DuelError
from lm_eval_duel.results import figures, leaderboard, pairs
from lm_eval_duel.results.records import Comparison
from lm_eval_duel.results.report import main as report

DUAL = {"spec": {"cache": "dual"}}


@pytest.fixture(autouse=True)
def no_figures(monkeypatch):
    """Tables only: drawing takes seconds and these tests do not look."""
    monkeypatch.setattr(figures, "available", lambda: False)


def made(size=60, seed=0):
    """Tokens of documents, and their nats under a network; `shift` is in nats per token."""
    generator = np.random.default_rng(seed)
    tokens, hard = generator.integers(50, 150, size), generator.normal(3.4, 0.4, size)

    def nats(shift, noise=0.02):
        return -tokens * (hard + shift + generator.normal(0, noise, size))

    return tokens, nats


def run(folder, *arguments):
    report([str(folder / "results"), "--out", str(folder / "out"), *arguments])
    return json.loads((folder / "out" / "report.json").read_text())["tasks"]["sotu"]


def texts(folder):
    return {path.name: path.read_text() for path in (folder / "out").iterdir()}


# ---------------------------------------------------------------- differences and verdicts


def test_a_difference_is_that_of_the_rates_with_the_error_of_a_paired_ratio(tmp_path):
    tokens, nats = made()
    greedy, margin = nats(0.0), nats(0.01)
    for rule, values in (("greedy:k=1", greedy), ("margin:k=1", margin)):
        ours(tmp_path / "results", docs={"sotu": documents(values, tokens)}, rule=rule)
    (pair,) = run(tmp_path)["pairs"]
    expected = (margin - greedy).sum() / tokens.sum()
    residuals = (margin - greedy) - expected * tokens
    error = math.sqrt((residuals**2).sum()) / tokens.sum()  # of a ratio of sums, by the delta method
    low, high = pair["interval"]
    assert pair["names"] == ["greedy", "margin"] and pair["difference"] == pytest.approx(expected, abs=1e-9)
    assert (low + high) / 2 == pytest.approx(expected, abs=0.1 * error)
    assert (high - low) / (2 * 1.96) == pytest.approx(error, rel=0.1)
    assert pair["verdict"] == "greedy is better"
    found = texts(tmp_path)
    assert "| greedy - margin |" in found["report.md"] and "greedy is better" in found["report.md"]
    assert f"greedy - margin & {expected:+.4f} &".replace(" -0", " $-$0") in found["pairs_sotu.tex"]


def entry(name, value=20.0, **more):
    row = dict.fromkeys((field.name for field in dataclasses.fields(Comparison)), None)
    row |= {"model": "MDM", "name": name, "rule": name, "estimator": "duel", "block": "4", "cache": "none"}
    row |= {"value": value, "eps": 0.0, "stderr_reason": "", "bound": False, "likelihood": True, "ar": False}
    return Comparison(**{**row, "qualifiers": "", "reason": "", **more})


def compared(first, second, low, high, documents=50):
    rates = {0: np.linspace(low, high, 1000) + math.log(20.0), 1: np.full(1000, math.log(20.0))}
    forward = pairs.pair("token_perplexity", [first, second], rates, documents, 0, 1)
    backward = pairs.pair("token_perplexity", [first, second], rates, documents, 1, 0)
    assert forward.verdict == backward.verdict
    assert forward.interval == pytest.approx([-value for value in reversed(backward.interval)])
    return forward.verdict


def test_verdicts():
    elbo = entry("ELBO", rule=None, estimator="elbo", bound=True)
    assert compared(entry("greedy:k=1"), entry("margin:k=1"), -0.2, -0.1) == "greedy is better"
    assert compared(entry("greedy:k=1"), entry("margin:k=1"), 0.1, 0.2) == "margin is better"
    assert compared(entry("greedy:k=1"), entry("margin:k=1"), -0.1, 0.2) == "not distinguishable"
    assert compared(entry("greedy:k=1"), entry("klass:k=1"), -1e-9, 2e-8) == "equal"
    assert compared(entry("greedy:k=1"), entry("margin:k=1"), 0.1, 0.2, 3) == "no verdict from 3 documents"
    assert compared(entry("greedy:k=1"), elbo, 0.1, 0.2) == "ELBO is better"  # its likelihood is better still
    assert compared(entry("greedy:k=1"), elbo, -0.2, -0.1) == "no verdict: ELBO is an upper bound"
    assert compared(entry("greedy:k=1"), dataclasses.replace(elbo, eps=0.1, bound=False), 0.1, 0.2).endswith(
        "nor a bound"
    )
    assert (
        compared(entry("greedy:k=1"), dataclasses.replace(elbo, stderr_reason="not known"), 0.1, 0.2)
        == "no verdict: not known"
    )
    assert compared(entry("greedy:k=1"), entry("greedy:k=1", block="8"), 0.1, 0.2) == "block 8 is better"


def test_rows_that_are_compared():
    rules = [entry(f"threshold:mu=0.{n}", 20.0 + (n - 3) ** 2) for n in range(1, 8)]
    others = [entry("greedy:k=1", block="8"), entry("margin:k=1", block="8"), entry("margin:k=1", cache="dual")]
    oracle = entry("oracle", rule=None, estimator="oracle", likelihood=False)
    entries = [*rules, *others, oracle]

    def chosen(choice):
        return [(p.first, p.second) for p in pairs.of(choice, "token_perplexity", entries, {}, 0)]

    assert chosen("rules") == [*((n, 2) for n in (0, 1, 3, 4, 5, 6)), (7, 8)]  # more than five: with the lowest
    assert len(chosen("all")) == 10 * 9 // 2 and all(10 not in pair for pair in chosen("all"))
    assert chosen("none") == []


def test_without_samples_there_is_a_difference_and_the_reason(tmp_path):
    for rule, value in (("greedy:k=1", 20.0), ("margin:k=1", 22.0)):
        ours(tmp_path / "results", {"sotu": {"token_perplexity": value}}, rule=rule)
    (pair,) = run(tmp_path)["pairs"]
    assert pair["difference"] == pytest.approx(math.log(20 / 22)) and pair["interval"] is None
    assert pair["verdict"] == "" and "no samples of sotu" in pair["reason"]
    assert "no interval: MDLM, DUEL, greedy, block 4: no samples" in texts(tmp_path)["report.md"]
    assert run(tmp_path, "--pairs", "none")["pairs"] == [] and "pairs_sotu.tex" not in texts(tmp_path)


# ---------------------------------------------------------------- caches


def cached(folder, tokens, values, **more):
    return ours(folder / "results", docs={"sotu": documents(values, tokens)}, **{**DUAL, **more})


def test_the_cost_of_a_cache_stands_next_to_the_row_without(tmp_path):
    tokens, nats = made()
    without, under = nats(0.0, 0.0), nats(0.02, 0.01)
    ours(tmp_path / "results", docs={"sotu": documents(without, tokens)}, nfe=0.5)
    ours(tmp_path / "results", docs={"sotu": documents(without * 1.1, tokens)}, rule="margin:k=1")
    cached(tmp_path, tokens, under, nfe=0.7)
    task = run(tmp_path)
    plain, under_dual, margin = task["rows"]
    assert [row["cache"] for row in task["rows"]] == ["none", "dual", "none"]
    assert [row["name"] for row in task["rows"]] == [
        f"DUEL, {n}" for n in ("greedy, block 4", "greedy, block 4, cache=dual", "margin, block 4")
    ]
    cost = under_dual["cache_cost"]
    assert plain["cache_cost"] is None and margin["cache_cost"] is None
    assert cost["second"] == 0 and cost["difference"] == pytest.approx((without - under).sum() / tokens.sum())
    assert 0 < cost["interval"][0] < cost["difference"] < cost["interval"][1]
    assert cost["verdict"] == "cache=none is better"
    assert [(sweep["cache"], len(sweep["families"])) for sweep in task["rules"]] == [("none", 2)]  # apart from dual
    found = texts(tmp_path)
    assert found["report.md"].count("| cache ") >= 3  # the values, the cost of the cache, the cost of runs
    assert f"+{cost['difference']:.4f}" in found["report.md"] and "cache=none is better" in found["report.md"]
    assert (
        f"& dual & {plain['value']:.2f} & {under_dual['value']:.2f} & +{cost['difference']:.4f}"
        in found["cache_sotu.tex"]
    )
    assert r"rule & block & cache & perplexity per token & 95 \% interval" in found["methods_sotu.tex"]
    assert task["headlines"] == [f"**MDLM** on sotu: {plain['value']:.2f} under `greedy` (DUEL)."]


def test_without_a_cache_there_is_no_such_column(tmp_path):
    tokens, nats = made(10)
    ours(tmp_path / "results", docs={"sotu": documents(nats(0), tokens)})
    run(tmp_path)
    found = texts(tmp_path)
    assert "| cache" not in found["report.md"] and "Cost of the cache" not in found["report.md"]
    assert "Cache" not in found["methods_sotu.tex"] and "cache_sotu.tex" not in found


ALONE = {
    "there is no result of this network and rule with cache=none": {"rule": "margin:k=1"},
    "the result with cache=none is of another spec: block=8 there, 4 here": {"block": "8"},
    "the result with cache=none is of another spec: grid=row there, target here; max_length=512 there, 1025 here": {
        "spec": {"grid": "row", "max_length": "512"}
    },
}


@pytest.mark.parametrize("reason", ALONE)
def test_a_missing_pair_is_stated(tmp_path, reason):
    tokens, nats = made(12)
    ours(tmp_path / "results", docs={"sotu": documents(nats(0), tokens)}, **ALONE[reason])
    cached(tmp_path, tokens, nats(0.1))
    (cost,) = [row["cache_cost"] for row in run(tmp_path)["rows"] if row["cache"] == "dual"]
    assert (cost["second"], cost["difference"], cost["reason"]) == (None, None, reason)
    assert reason in texts(tmp_path)["report.md"]


def test_other_documents_under_a_cache_are_refused(tmp_path):
    tokens, nats = made(12)
    ours(tmp_path / "results", docs={"sotu": documents(nats(0), tokens)})
    cached(tmp_path, tokens[:10], nats(0)[:10])
    with pytest.raises(DuelError, match=r"documents: 12 \(10 of them in both\) in .*, but 10"):
        run(tmp_path)


def test_accuracies_and_costs_of_runs_name_the_cache(tmp_path):
    tokens, nats = made(10)
    ours(tmp_path / "results", docs={"sotu": documents(nats(0), tokens)})
    file = cached(tmp_path, tokens, nats(0))
    body = json.loads(file.read_text())
    body["results"]["arc"] = {"acc,none": 0.5, "acc_stderr,none": 0.1}
    file.write_text(json.dumps(body))
    run(tmp_path)
    everything = json.loads(texts(tmp_path)["report.json"])
    assert [row["cache"] for table in everything["accuracies"] for row in table["rows"]] == ["dual"]
    assert [row["cache"] for row in everything["cost"]] == ["none", "dual"]
    assert "& dual & 0.5000" in texts(tmp_path)["accuracy_arc.tex"]


# ---------------------------------------------------------------- models, and the AR result among the results


def test_the_only_ar_result_is_found_and_models_are_compared(tmp_path):
    tokens, nats = made()
    ours(tmp_path / "results", docs={"sotu": documents(nats(0.0), tokens)})
    ours(tmp_path / "results", docs={"sotu": documents(nats(0.1), tokens)}, model="OTHER")
    hf(tmp_path / "results", docs={"sotu": documents(nats(-0.1), tokens)})
    found = run(tmp_path)
    assert [(row["model"], row["ar"], row["gap"] is None) for row in found["rows"]] == [
        ("ARM", True, True),
        ("MDLM", False, False),
        ("OTHER", False, False),
    ]
    verdicts = {tuple(pair["names"]): pair["verdict"] for pair in found["pairs"]}
    assert len(verdicts) == 3 and all("is better" in verdict for verdict in verdicts.values())
    assert any(verdict.startswith("ARM") for verdict in verdicts.values())
    assert run(tmp_path, "--pairs", "rules")["pairs"] == []


@pytest.mark.parametrize(("model", "args"), [("ARM-2", {}), ("ARM", {"revision": "step1000"})])
def test_of_several_ar_results_none_is_the_baseline(tmp_path, model, args):
    tokens, nats = made()
    ours(tmp_path / "results", docs={"sotu": documents(nats(0.0), tokens)})
    hf(tmp_path / "results", docs={"sotu": documents(nats(-0.1), tokens)})
    hf(tmp_path / "results", docs={"sotu": documents(nats(-0.1), tokens)}, model=model, args=args)
    assert not any(row["ar"] for row in run(tmp_path)["rows"])
    assert "name one with --ar" in texts(tmp_path)["report.md"]


def test_unknown_tokens_are_told_in_every_table(tmp_path):
    tokens, nats = made()
    for rule in ("greedy:k=1", "margin:k=1"):
        file = ours(tmp_path / "results", docs={"sotu": documents(nats(0.0), tokens)}, rule=rule)
        edit(file, lambda body: body["config"]["duel"]["tasks"]["sotu"].update(unk_tokens=int(0.25 * sum(tokens))))
    found = run(tmp_path)
    assert found["rows"][0]["unknown"] == pytest.approx(0.25, abs=1e-3)
    assert any("of the tokens of MDLM are [UNK]" in note for note in found["notes"])
    written = texts(tmp_path)
    assert "25.0% [UNK]" in written["report.md"] and r"25.0\% {[}UNK]" in written["methods_sotu.tex"]
    leaderboard.main([str(tmp_path / "results"), "--out", str(tmp_path / "site")])
    for name in leaderboard.MAIN:
        assert "25.0% [UNK]" in (tmp_path / "site" / name).read_text(), name
