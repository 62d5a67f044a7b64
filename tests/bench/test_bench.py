"""The arms of `bench` compute the same numbers, and its report says what was measured. No times are asserted."""

import json
import os
import subprocess
import sys

import pytest
import torch

from lm_eval_duel.bench.arms import LOOPS, Bench, Recording, Settings
from lm_eval_duel.bench.options import parse
from lm_eval_duel.bench.run import measure
from lm_eval_duel.bench.syncs import KINDS
from lm_eval_duel.bench.table import table
from lm_eval_duel.bench.textbook import BlockPredictions, KeptKeys, WholeRow, algorithm2, check
from lm_eval_duel.cli.main import main
from lm_eval_duel.core.predictions import Predictions
from lm_eval_duel.core.windows import Window
from lm_eval_duel.denoisers.random_network import SPREAD, make
from lm_eval_duel.errors import DuelError
from lm_eval_duel.estimators.duel import DuelEstimator

CPU = torch.device("cpu")
ONE_THREAD = {**os.environ, "OMP_NUM_THREADS": "1"}
LENGTH, BLOCK, VOCAB = 22, 8, 60
TINY = {"layers": 2, "width": 64, "vocab": VOCAB, "length": 32}
RULES = (
    "greedy:k=1",
    "greedy:k=3",
    "margin:k=1",
    "log_margin:k=2",
    "entropy:k=1",
    "left_to_right:k=1",
    "random:k=2",
    "threshold:mu=0.3",
    "klass:mu=0.2:nu=0.5",
    "entropy_bound:gamma=1.5",
)
KEYS = {
    "textbook_s",
    "textbook_kv_s",
    "ours_s",
    "forwards_s",
    "ratio_textbook",
    "ratio_textbook_kv",
    "overhead",
    "peak_bytes_textbook",
    "peak_bytes_textbook_kv",
    "peak_bytes_ours",
    "max_abs_diff_nats",
    "near_ties",
    "changed_picks",
    "flops_per_s",
    "textbook_scaled",
    "compared",
    "settings",
    "versions",
}


@pytest.fixture(autouse=True)
def one_thread():
    """Tiny networks are done sooner than threads agree."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def network(kind, **options):
    return make(f"random:{kind}", CPU, "float64", **{**TINY, "block": BLOCK, **options})


def drawn(count=3, length=LENGTH, context=0, seed=5):
    rows = torch.randint(VOCAB - 1, (count, length), generator=torch.Generator().manual_seed(seed)).tolist()
    return [Window(row[:context], row[context:]) for row in rows]


def agree(denoiser, rule, windows, block="auto"):
    duel = DuelEstimator(denoiser, rule, block)
    scored = duel.log_prob(windows)
    for kind in LOOPS.values() if denoiser.attention == "block_causal" else [WholeRow]:
        loop = algorithm2(kind, denoiser, duel.rule, duel.block, duel.grid, windows)
        assert [tuple(steps) for steps in loop.reveal_steps.tolist()] == [result.reveal_steps for result in scored]
        assert torch.allclose(
            loop.token_logprobs, torch.tensor([result.token_logprobs for result in scored]).double(), atol=1e-9
        )
        assert loop.nfe == sum(result.nfe for result in scored)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("kind", ["bidirectional", "block-causal"])
def test_textbook_loops_agree_with_ours(kind, rule):
    agree(network(kind), rule, drawn(), BLOCK)


@pytest.mark.parametrize("context", [1, 5, 8, 13])
@pytest.mark.parametrize("kind", ["bidirectional", "block-causal"])
def test_they_agree_after_a_context(kind, context):
    agree(network(kind), "greedy:k=1", drawn(context=context), BLOCK)


def test_they_agree_on_the_other_kinds_of_network():
    cut = network("block-causal")
    cut.last_block = "cut"
    agree(cut, "greedy:k=1", drawn())
    shifted = network("block-causal")
    shifted.shift = 1
    agree(shifted, "greedy:k=1", drawn(context=1))
    agree(shifted, "greedy:k=2", drawn(context=9))
    agree(network("bidirectional"), "greedy:k=2", drawn(), None)  # the whole target is one block


def test_statistics_of_whole_blocks_are_those_of_predictions():
    logits = torch.randn(6, VOCAB, generator=torch.Generator().manual_seed(0)) * 4
    logits[1, 7], logits[2, 7] = 40, 25  # P1 rounds to 1
    masked = torch.tensor([[True, True, True], [True, True, True]])
    nothing, positions = torch.zeros(VOCAB, dtype=torch.bool), torch.arange(6)
    ours = Predictions(masked, torch.zeros(2, dtype=torch.bool), logits, positions, lambda x: x.clone(), nothing)
    whole = BlockPredictions(logits.log_softmax(1).view(2, 3, VOCAB), masked, torch.zeros(2, dtype=torch.bool))
    for name in ("confidence", "log_margin", "margin", "argmax", "entropy"):
        assert torch.allclose(getattr(whole, name), getattr(ours, name), rtol=1e-4, atol=1e-4), name
    assert torch.allclose(whole.dense(), ours.dense(), atol=1e-4)


@pytest.mark.parametrize("kind", ["bidirectional", "block-causal"])
def test_the_recording_makes_the_counted_calls_again(kind):
    denoiser = network(kind)
    duel, recording = DuelEstimator(denoiser, "greedy", BLOCK), Recording(denoiser)
    with recording.record():
        first = duel.log_prob(drawn())
    assert (recording.forwards, recording.rows) == (duel.counts.forwards, duel.counts.rows)
    assert not {"features", "stream", "head"} & set(vars(denoiser)), "the denoiser is as it was"

    again = Recording(denoiser)
    with again.record():
        recording.replay()

    def same(a, b):
        if isinstance(a, torch.Tensor):
            return torch.equal(a, b)
        if isinstance(a, (tuple, list)):
            return len(a) == len(b) and all(map(same, a, b))
        return (isinstance(a, dict) and a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)) or a == b

    assert [name for name, *_ in again.calls] == [name for name, *_ in recording.calls]
    assert all(same(mine, theirs) for (_, *mine), (_, *theirs) in zip(recording.calls, again.calls, strict=True))
    assert duel.log_prob(drawn()) == first


@pytest.mark.parametrize("kind", ["bidirectional", "block-causal"])
@torch.inference_mode()
def test_random_networks_are_no_coin_toss(kind):
    denoiser = make(f"random:{kind}", CPU, layers=2, width=64, vocab=500, length=64, block=16)
    ids = torch.randint(499, (1, 64), generator=torch.Generator().manual_seed(2))
    ids[:, 32:] = denoiser.mask_id
    ids[:, 33::2] = 7

    def logits(ids):
        seen = torch.ones(1, 64, 64, dtype=torch.bool)
        features = (
            denoiser.features(ids, None)
            if kind == "bidirectional"
            else denoiser.stream(ids, torch.arange(64)[None], seen, None)[0]
        )
        return denoiser.head(features[0])[32::2]  # (masked, V)

    before = logits(ids)
    assert SPREAD / 2 < float(before.std(1).mean()) < SPREAD * 2
    assert float((before[1:] - before[:-1]).std(1).mean()) > 0.5, "where a position stands matters"
    ids[:, 33] = 8
    assert float((logits(ids) - before).std(1).mean()) > 0.1, "a single token that is seen matters"
    same = make(f"random:{kind}", CPU, layers=2, width=64, vocab=500, length=64, block=16)
    assert all(torch.equal(a, b) for a, b in zip(denoiser.network.parameters(), same.network.parameters(), strict=True))


COMMAND = ["bench", "--layers", "1", "--width", "64", "--vocab", "300", "--length", "20", "--windows", "2"]


@pytest.mark.slow
def test_the_command(tmp_path):
    """In a process of its own, which starts one more for each arm's memory."""
    file = tmp_path / "bench.json"
    words = ["--pretrained", "random:bidirectional", "--block", "8", "--repeats", "1", "--json", str(file)]
    done = subprocess.run(
        [sys.executable, "-m", "lm_eval_duel", *COMMAND, *words],
        capture_output=True,
        text=True,
        check=False,
        env=ONE_THREAD,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    figures = json.loads(file.read_text())
    assert set(figures) >= KEYS
    assert figures["textbook_kv_s"] is figures["ratio_textbook_kv"] is figures["textbook_scaled"] is None
    assert figures["peak_bytes_textbook"] > 0 and figures["peak_bytes_ours"] >= 0
    assert figures["nfe"] == figures["tokens"] == 40
    syncs = figures["host_syncs"]
    assert syncs["total"] == sum(syncs[kind] for kind in KINDS) > 0 and syncs["inside_network"] == 0
    assert syncs["per_call"] == syncs["total"] / figures["calls"]["ours"][0] < 30
    assert figures["changed_picks"] == 0 and figures["max_abs_diff_nats"] < 1e-4
    for word in ("textbook", "ours", "forwards", "overhead", "near ties", "changed picks"):
        assert word in done.stdout


@pytest.mark.parametrize("arm", ["textbook", "ours"])
def test_the_memory_of_one_arm(arm, capsys):
    """What the process that is started for it prints."""
    main([*COMMAND, "--pretrained", "random:bidirectional", "--block", "8", "--peak-of", arm])
    assert int(capsys.readouterr().out) >= 0


def test_a_block_causal_network_has_four_arms(capsys, tmp_path):
    file = tmp_path / "bench.json"
    words = ["--pretrained", "random:block-causal", "--block", "4", "--k", "3", "--no-memory", "--json", str(file)]
    main([*COMMAND, *words])
    figures = json.loads(file.read_text())
    assert set(figures) >= KEYS and figures["textbook_kv_s"] > 0 and figures["rule"] == "greedy:k=3"
    assert figures["calls"]["textbook"] == [10, 20]  # five blocks of two steps, two windows
    assert figures["calls"]["textbook_kv"] == [14, 28]  # and four clean blocks
    assert figures["calls"]["ours"] == figures["calls"]["forwards"]
    assert len(figures["seconds"]["ours"]) == 3
    assert "textbook_kv / ours" in capsys.readouterr().out


def test_a_two_phase_estimate_is_an_arm_of_its_own():
    words = [*COMMAND[1:], "--block", "4", "--no-memory", "--repeats", "1", "--estimator", "two_phase"]
    bench = Bench(parse([*words, "--sample", "0.4"]))
    figures = measure(bench)
    sample, cost = figures["two_phase_sample"], figures["token_rows"]
    assert sample["blocks"] == 10 and 0 < sample["sampled"] < 10
    assert cost["two_phase"] == 10 * (20 + 3 * 4) + sample["sampled"] * 4 * 20  # blocks of 4, rows of 20
    assert cost["ours"] == 10 * 4 * 20 - 20  # both windows start as equal rows of masks
    assert f"{sample['sampled']} of 10 blocks also without the cache" in table(figures)
    with pytest.raises(DuelError, match="leave --cache out"):
        parse([*words, "--cache", "dual"])
    with pytest.raises(DuelError, match=r"share above 0, at most 1, of --estimator two_phase; got 1\.5"):
        parse([*words, "--sample", "1.5"])


def test_a_scaled_textbook_says_so():
    words = [*COMMAND[1:], "--block", "8", "--no-memory", "--repeats", "1", "--textbook-steps", "4"]
    figures = measure(Bench(parse([*words, "--compare-windows", "1"])))
    assert figures["textbook_scaled"] == "scaled from 4 of 20 steps" and "scaled from 4 of 20" in table(figures)
    assert figures["calls"]["textbook"] == (20, 40)
    assert figures["compared"] == {"with": "textbook", "windows": 1, "positions": 20}

    figures = measure(Bench(parse([*words, "--pretrained", "random:block-causal"])))
    assert figures["compared"] == {"with": "textbook_kv", "windows": 2, "positions": 20}
    assert figures["changed_picks"] == 0


def test_a_window_is_cut_where_the_textbook_would_take_too_long():
    bench = Bench(Settings(layers=1, width=64, vocab=300, length=48, block="8", windows=2))
    assert [len(window.target) for window in bench.cut(1e9)] == [48]
    assert [len(window.target) for window in bench.cut(1e-9)] == [8]


def test_llada_8b_shrunk_in_bfloat16():
    words = ["--pretrained", "random:llada-8b", "--layers", "2", "--width", "64", "--dtype", "bfloat16"]
    words += ["--length", "12", "--block", "4", "--windows", "1", "--repeats", "1", "--no-memory"]
    bench = Bench(parse(words))
    assert bench.denoiser.dtype == torch.bfloat16 and bench.denoiser.mask_id == 126336
    assert bench.denoiser.relative_positions
    figures = measure(bench)
    assert figures["nfe"] == 12 and "random:llada-8b" in table(figures)
    assert figures["changed_picks"] > 0 or figures["max_abs_diff_nats"] < 1


def test_bundled_networks():
    for name, block in (("demo-mdm", 8), ("demo-bd", 4)):
        words = ["--pretrained", name, "--length", "24", "--windows", "1", "--repeats", "1", "--no-memory"]
        figures = measure(Bench(parse([*words, "--block", str(block)])))
        assert figures["changed_picks"] == 0 and figures["max_abs_diff_nats"] < 1e-4, name


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--pretrained", "random:bidrectional"], "Did you mean random:bidirectional?"),
        (["--pretrained", "demo-ar"], "score it with estimator=ar"),
        (["--pretrained", "demo-mdm", "--length", "500"], "demo-mdm holds 128 positions: pass --length"),
        (["--dtype", "float31"], "Did you mean float32?"),
        (["--rule", "gredy"], "Did you mean greedy?"),
        (["--rule", "greedy:k=2", "--k", "3"], "gives k twice"),
        (["--width", "100", "--vocab", "50"], "a multiple of 64"),
        (["--windows", "0"], "--windows must be at least 1; got 0."),
        (["--block", "some"], "--block must be a number of positions, auto or none; got 'some'."),
        (["--peak-of", "our"], "Did you mean ours?"),
    ],
)
def test_errors_in_words(words, message, capsys):
    with pytest.raises(SystemExit) as error:
        main(["bench", "--layers", "1", "--width", "64", "--vocab", "50", "--length", "8", *words])
    assert message in str(error.value)


def test_networks_and_windows_that_the_textbook_does_not_know():
    denoiser = network("bidirectional")
    with pytest.raises(DuelError, match="of one length and layout, without tail and suffix"):
        check(denoiser, [Window((), (1, 2), (), 2)])
    with pytest.raises(DuelError, match="one length"):
        check(denoiser, [Window((), (1, 2)), Window((), (1, 2, 3))])

    class Told(type(denoiser)):
        def open(self, rows, generating=False):
            return super().open(rows, generating)

    denoiser.__class__ = Told
    with pytest.raises(DuelError, match="does not support Told, which does more than one plain network call per step"):
        check(denoiser, drawn())
    denoiser.attention = "causal"
    with pytest.raises(DuelError, match="an autoregressive network scores a window in one pass"):
        check(denoiser, drawn())


def test_keys_are_kept_for_the_blocks_before_only():
    """A longer row costs the loop with kept keys no more network tokens a step."""
    denoiser = network("block-causal")
    recording = Recording(denoiser)
    with recording.record():
        algorithm2(KeptKeys, denoiser, DuelEstimator(denoiser).rule, BLOCK, "row", drawn(1, 24))
    assert {args[0].shape[1] for name, args, _ in recording.calls if name == "stream"} == {BLOCK}
    assert recording.forwards == 24 + 2


def test_batch_size_is_spelled_as_lm_evals():
    assert parse(["--batch_size", "3"]).batch_size == 3
    assert "--batch_size" in parse(["--batch_size", "3"]).words()
    assert parse(["--batch-size", "3"]).batch_size == 3
