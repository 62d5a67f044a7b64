"""benchmarks/: its loops compute what this package computes, and its report says what was measured. No times."""

import json
import subprocess
import sys

import pytest
import torch
from attends import Attends
from pages import ROOT
from toys import BlockCausal

from benchmarks.__main__ import THREE, main, three
from benchmarks.arms import ARMS, Arm, Bench
from benchmarks.figures import measure
from benchmarks.loops import algorithm2
from benchmarks.options import parse
from lm_eval_duel.core.windows import Window
from lm_eval_duel.denoisers.cached.denoiser import Cached
from lm_eval_duel.errors import UsageError
from lm_eval_duel.estimators.duel import DuelEstimator

LENGTH = 14
BLOCK = 4
RULES = ("greedy:k=3", "left_to_right:k=1", "threshold:mu=0.3", "klass:mu=0.2:nu=0.5", "entropy_bound:gamma=1.5")
SMALL = ["--layers", "1", "--hidden_size", "64", "--vocab", "300", "--length", "20", "--windows", "2", "--repeats", "1"]


def drawn(count=2, length=LENGTH, context=0):
    rows = torch.randint(3, (count, length), generator=torch.Generator().manual_seed(5)).tolist()
    return [Window(row[:context], row[context:]) for row in rows]


def agree(denoiser, rule, windows, block=BLOCK):
    duel = DuelEstimator(denoiser, rule, block)

    scores = duel.log_prob(windows)
    loop = algorithm2(duel, windows)

    for n, score in enumerate(scores):
        assert loop.reveal_steps[n].tolist() == list(score.reveal_steps)
        assert torch.allclose(loop.token_logprobs[n], torch.tensor(score.token_logprobs).double(), atol=1e-9)


def test_loops_agree_with_ours():
    block_causal = BlockCausal(length=16, block=BLOCK)
    cut = BlockCausal(length=16, block=BLOCK)
    cut.last_block = "cut"
    shifted = BlockCausal(length=16, block=BLOCK)
    shifted.shift = 1
    anchored = BlockCausal(length=16, block=BLOCK)
    anchored.anchor = "target"

    for rule in RULES:
        agree(Attends(length=LENGTH), rule, drawn())
        agree(block_causal, rule, drawn())
    for cache in ("prefix", "dual"):
        agree(Cached(Attends(length=LENGTH), cache), "greedy:k=2", drawn(context=3))
    for denoiser, context in ((cut, 0), (shifted, 9), (anchored, 5)):
        agree(denoiser, "greedy:k=2", drawn(context=context))
    agree(Attends(length=LENGTH), "greedy:k=2", drawn(), None)  # the whole target is one block


def test_the_command(capsys, tmp_path):
    file = tmp_path / "bench.json"
    words = ["random:block-causal", "--model_args", "block=4,k=3", "--no_memory", "--json", str(file)]
    main([*SMALL, *words])

    figures = json.loads(file.read_text())
    assert figures["rule"] == "greedy:k=3"
    assert figures["loop"] == "kept keys"
    assert [*figures["ratios"]] == ["loop / ours", "ours / forwards"]
    assert figures["compared"]["changed_picks"] == 0
    assert figures["compared"]["max_abs_diff_nats"] < 1e-4

    arms = figures["arms"]
    assert [*arms] == ["loop", "ours", "forwards"]
    assert arms["loop"]["forwards"] == 14  # five blocks of two steps, four clean blocks
    assert arms["loop"]["rows"] == 28
    for name in ("forwards", "rows", "token_rows"):
        assert arms["ours"][name] == arms["forwards"][name]

    shown = capsys.readouterr()
    assert "loop / ours" in shown.out
    assert "forwards: repeat 1 of 1" in shown.err
    with pytest.raises(UsageError, match="--json"):  # measured figures are not overwritten
        parse(words)


@pytest.mark.slow
def test_without_arguments_three_loops_are_compared():
    tiny = "--layers 1 --hidden_size 64 --vocab 300 --windows 1 --repeats 1 --no_memory"
    lines = three(tiny).splitlines()
    for title in THREE:
        [line] = [line for line in lines if title in line]
        speed, memory, *difference = line.removeprefix(title).split()
        assert float(speed) > 0
        assert float(memory) > 0
        for nats in difference:  # none where a pick differs
            assert float(nats) < 1e-3


@pytest.mark.slow
@pytest.mark.parametrize(("part", "named"), [("waits", "network_calls"), ("memory", "windows"), ("gradient", "tokens")])
def test_the_parts_for_a_device_run_on_a_cpu(part, named):
    command = [sys.executable, str(ROOT / "benchmarks" / "device.py"), "cpu", part, "1", "64", "300", "64"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout)[named] > 0


def test_an_arm_is_one_entry(monkeypatch):
    def twice(bench):
        return Arm(bench.duel.log_prob, bench.plain, line=lambda figures: f"{figures['rows']}")

    monkeypatch.setitem(ARMS, "twice", twice)
    words = [*SMALL, "--no_memory", "--model_args", "block=4,estimator=two_phase,sample=0.4"]

    figures = measure(Bench(parse(words)))

    arms = figures["arms"]
    assert [*arms] == ["loop", "ours", "two_phase", "forwards", "twice"]
    sample = arms["two_phase"]["sample"]
    assert sample["blocks"] == 10
    assert 0 < sample["sampled"] < 10
    assert arms["ours"]["token_rows"] == 10 * 4 * 20 - 20  # both windows start as equal rows of masks
    assert figures["remarks"] == [
        f"two_phase: {sample['sampled']} of 10 blocks also without the cache",
        f"twice: {arms['ours']['rows']}",
    ]
