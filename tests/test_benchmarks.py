"""benchmarks/: its loops compute what this package computes, and its report says what was measured. No times."""

import json

import pytest
import torch
from attends import Attends
from toys import BlockCausal

from benchmarks.__main__ import main
from benchmarks.arms import ARMS, Arm, Bench
from benchmarks.figures import measure
from benchmarks.loops import algorithm2
from benchmarks.options import parse
from benchmarks.random_network import RandomNetwork
from benchmarks.recording import Recording
from lm_eval_duel.core.windows import Window
from lm_eval_duel.denoisers.cached.denoiser import Cached
from lm_eval_duel.errors import DuelError, UsageError
from lm_eval_duel.estimators.duel import DuelEstimator

LENGTH, BLOCK = 14, 4
RULES = ("greedy:k=3", "left_to_right:k=1", "threshold:mu=0.3", "klass:mu=0.2:nu=0.5", "entropy_bound:gamma=1.5")
SMALL = ["--layers", "1", "--hidden_size", "64", "--vocab", "300", "--length", "20", "--windows", "2", "--repeats", "1"]


def drawn(count=2, length=LENGTH, context=0):
    rows = torch.randint(3, (count, length), generator=torch.Generator().manual_seed(5)).tolist()
    return [Window(row[:context], row[context:]) for row in rows]


def agree(denoiser, rule, windows, block=BLOCK):
    duel = DuelEstimator(denoiser, rule, block)
    scored, loop = duel.log_prob(windows), algorithm2(duel, windows)
    assert [tuple(steps) for steps in loop.reveal_steps.tolist()] == [result.reveal_steps for result in scored]
    nats = torch.tensor([result.token_logprobs for result in scored]).double()
    assert torch.allclose(loop.token_logprobs, nats, atol=1e-9)


def test_loops_agree_with_ours():
    block_causal, cut, shifted, anchored = (BlockCausal(length=16, block=BLOCK) for _ in range(4))
    cut.last_block, shifted.shift, anchored.anchor = "cut", 1, "target"
    for rule in RULES:
        agree(Attends(length=LENGTH), rule, drawn())
        agree(block_causal, rule, drawn())
    for cache in ("prefix", "dual"):
        agree(Cached(Attends(length=LENGTH), cache), "greedy:k=2", drawn(context=3))
    for denoiser, context in ((cut, 0), (shifted, 9), (anchored, 5)):
        agree(denoiser, "greedy:k=2", drawn(context=context))
    agree(Attends(length=LENGTH), "greedy:k=2", drawn(), None)  # the whole target is one block


def test_keys_are_kept_for_the_blocks_before_only():
    """A longer row costs the loop with kept keys no more network tokens a step."""
    denoiser = BlockCausal(length=12, block=BLOCK)
    recording = Recording(denoiser)
    with recording.record():
        algorithm2(DuelEstimator(denoiser), drawn(1, 12))
    assert {args[0].shape[1] for name, args, _ in recording.calls if name == "stream"} == {BLOCK}
    assert recording.forwards == 12 + 2


@pytest.mark.parametrize("kind", ["bidirectional", "block-causal", "llada-8b"])
def test_the_recording_makes_the_counted_calls_again(kind):
    network = RandomNetwork(f"random:{kind}", layers=1, width=128, vocab=60, length=LENGTH, block=BLOCK)
    denoiser = network.make(torch.device("cpu"))
    duel, recording, again = DuelEstimator(denoiser, "greedy", BLOCK), Recording(denoiser), Recording(denoiser)
    with recording.record():
        duel.log_prob(drawn())
    assert (recording.forwards, recording.rows) == (duel.counts.forwards, duel.counts.rows)
    assert not {"features", "stream", "head"} & set(vars(denoiser)), "the denoiser is as it was"
    with again.record():
        recording.replay()
    assert [name for name, *_ in again.calls] == [name for name, *_ in recording.calls]
    assert (again.forwards, again.rows, again.tokens) == (recording.forwards, recording.rows, recording.tokens)


@pytest.mark.slow
def test_the_memory_of_an_arm():
    """Measured in a process for each; the loop holds logits of whole rows, ours those of some positions."""
    bench = Bench(parse([*SMALL, "--vocab", "20000", "--model_args", "block=10", "--length", "40"]))
    assert bench.peak_bytes("loop") > max(2 * 40 * 20000 * 4, 1.5 * bench.peak_bytes("ours"))


def test_the_command(capsys, tmp_path):
    file = tmp_path / "bench.json"
    words = ["random:block-causal", "--model_args", "block=4,k=3", "--no_memory", "--json", str(file)]
    main([*SMALL, *words])
    figures = json.loads(file.read_text())
    arms, shown = figures["arms"], capsys.readouterr()
    assert figures["rule"] == "greedy:k=3" and figures["loop"] == "kept keys"
    assert [*arms] == ["loop", "ours", "forwards"]
    assert (arms["loop"]["forwards"], arms["loop"]["rows"]) == (14, 28)  # five blocks of two steps, four clean blocks
    assert all(arms["ours"][name] == arms["forwards"][name] for name in ("forwards", "rows", "token_rows"))
    assert [*figures["ratios"]] == ["loop / ours", "ours / forwards"]
    assert figures["compared"]["changed_picks"] == 0 and figures["compared"]["max_abs_diff_nats"] < 1e-4
    assert "loop / ours" in shown.out and "forwards: repeat 1 of 1" in shown.err
    with pytest.raises(UsageError, match="--json"):  # measured figures are not overwritten
        parse(words)


def test_an_arm_is_one_entry(monkeypatch):
    monkeypatch.setitem(
        ARMS, "twice", lambda bench: Arm(bench.duel.log_prob, bench.plain, line=lambda of: f"{of['rows']}")
    )
    words = [*SMALL, "--no_memory", "--model_args", "block=4,estimator=two_phase,sample=0.4"]
    figures = measure(Bench(parse(words)))
    arms, sample = figures["arms"], figures["arms"]["two_phase"]["sample"]
    assert [*arms] == ["loop", "ours", "two_phase", "forwards", "twice"]
    assert sample["blocks"] == 10 and 0 < sample["sampled"] < 10
    assert arms["ours"]["token_rows"] == 10 * 4 * 20 - 20  # both windows start as equal rows of masks
    assert figures["remarks"] == [
        f"two_phase: {sample['sampled']} of 10 blocks also without the cache",
        f"twice: {arms['ours']['rows']}",
    ]


def test_draws_of_the_bound_against_their_network_calls():
    words = [*SMALL, "--no_memory", "--model_args", "estimator=noised_elbo,mc_samples=8"]
    figures = measure(Bench(parse(words)))
    ours, bare = figures["arms"]["noised_elbo"], figures["arms"]["noised_forwards"]
    assert all(ours[name] == bare[name] for name in ("forwards", "rows", "token_rows"))
    assert ours["rows"] == 2 * 8 and ours["token_rows"] == 2 * 8 * 20
    assert ["draws/s at 300 tokens" in remark for remark in figures["remarks"]] == [True, True]


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["random:bidrectional"], "Did you mean random:bidirectional?"),
        (["demo-mdm", "--length", "500"], "--length"),
        (["--model_args", "rule=gredy"], "Did you mean greedy?"),
        (["--model_args", "temperature=2"], "temperature"),
        (["--hidden_size", "100"], "a multiple of 64"),
        (["--peak_of", "our"], "Did you mean ours?"),
    ],
)
def test_what_is_refused(words, named):
    with pytest.raises(DuelError) as error:
        main(words)
    assert named in str(error.value)
