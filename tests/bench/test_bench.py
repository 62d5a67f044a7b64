"""The arms of `bench` compute the same numbers, and its report says what was measured. No times are asserted."""

import json

import pytest
import torch

from lm_eval_duel.bench.arms import Bench, Recording
from lm_eval_duel.bench.loops import algorithm2
from lm_eval_duel.bench.options import parse
from lm_eval_duel.bench.run import measure
from lm_eval_duel.cli.main import main
from lm_eval_duel.core.windows import Window
from lm_eval_duel.denoisers.cached.denoiser import Cached
from lm_eval_duel.denoisers.random_network import make
from lm_eval_duel.errors import DuelError, UsageError
from lm_eval_duel.estimators.duel import DuelEstimator

CPU = torch.device("cpu")
LENGTH, BLOCK, VOCAB = 22, 8, 60
RULES = (
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
SMALL = ["--layers", "1", "--hidden_size", "64", "--vocab", "300", "--length", "20", "--windows", "2", "--repeats", "1"]
KINDS = ("bidirectional", "block-causal")


@pytest.fixture(autouse=True)
def one_thread():
    """Tiny networks are done sooner than threads agree."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def network(kind, dtype="float64", **options):
    return make(f"random:{kind}", CPU, dtype, **{"layers": 2, "width": 64, "vocab": VOCAB, "length": 32} | options)


def drawn(count=3, length=LENGTH, context=0):
    rows = torch.randint(VOCAB - 1, (count, length), generator=torch.Generator().manual_seed(5)).tolist()
    return [Window(row[:context], row[context:]) for row in rows]


def agree(denoiser, rule, windows, block=BLOCK):
    duel = DuelEstimator(denoiser, rule, block)
    scored, loop = duel.log_prob(windows), algorithm2(duel, windows)
    assert [tuple(steps) for steps in loop.reveal_steps.tolist()] == [result.reveal_steps for result in scored]
    nats = torch.tensor([result.token_logprobs for result in scored]).double()
    assert torch.allclose(loop.token_logprobs, nats, atol=1e-9)


def measured(*words):
    return measure(Bench(parse([*SMALL, "--no-memory", *words])))


@pytest.mark.parametrize("kind", [*KINDS, "dual", "prefix"])
def test_loops_agree_with_ours(kind):
    denoiser = network(kind, block=BLOCK) if kind in KINDS else Cached(network("bidirectional"), kind)
    for rule in RULES[KINDS.index(kind) :: 2] if kind in KINDS else RULES[3::4]:
        agree(denoiser, rule, drawn(1))
    agree(denoiser, "greedy:k=2", drawn(2, context=13))


def test_loops_agree_on_other_kinds_of_network():
    cut, shifted, from_target = (network("block-causal", block=BLOCK) for _ in range(3))
    cut.last_block, shifted.shift, from_target.anchor = "cut", 1, "target"
    agree(cut, "greedy:k=2", drawn(2))
    agree(shifted, "greedy:k=2", drawn(2, context=9))
    agree(from_target, "greedy:k=2", drawn(2, context=5))
    agree(network("bidirectional"), "greedy:k=2", drawn(2), None)  # the whole target is one block


def test_keys_are_kept_for_the_blocks_before_only():
    """A longer row costs the loop with kept keys no more network tokens a step."""
    denoiser = network("block-causal", block=BLOCK)
    recording = Recording(denoiser)
    with recording.record():
        algorithm2(DuelEstimator(denoiser), drawn(1, 24))
    assert {args[0].shape[1] for name, args, _ in recording.calls if name == "stream"} == {BLOCK}
    assert recording.forwards == 24 + 2


@pytest.mark.parametrize("kind", KINDS)
def test_the_recording_makes_the_counted_calls_again(kind):
    denoiser = network(kind, block=BLOCK)
    duel, recording, again = DuelEstimator(denoiser, "greedy", BLOCK), Recording(denoiser), Recording(denoiser)
    with recording.record():
        first = duel.log_prob(drawn())
    assert (recording.forwards, recording.rows) == (duel.counts.forwards, duel.counts.rows)
    assert not {"features", "stream", "head"} & set(vars(denoiser)), "the denoiser is as it was"
    with again.record():
        recording.replay()
    assert [name for name, *_ in again.calls] == [name for name, *_ in recording.calls]
    assert all(
        torch.equal(mine[0], theirs[0])
        for (_, mine, _), (_, theirs, _) in zip(recording.calls, again.calls, strict=True)
    )
    assert duel.log_prob(drawn()) == first


@pytest.mark.slow
def test_the_memory_of_an_arm():
    """Measured in a process for each; the loop holds logits of whole rows, ours those of some positions."""
    bench = Bench(parse([*SMALL, "--vocab", "20000", "--model_args", "block=10", "--length", "40"]))
    assert bench.peak_bytes("loop") > max(2 * 40 * 20000 * 4, 1.5 * bench.peak_bytes("ours"))


def test_the_command(capsys, tmp_path):
    file = tmp_path / "bench.json"
    words = ["random:block-causal", "--model_args", "block=4,k=3", "--no-memory", "--json", str(file)]
    main(["bench", *SMALL, *words])
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


def test_a_two_phase_estimate_is_an_arm_of_its_own():
    arms = measured("--model_args", "block=4,estimator=two_phase,sample=0.4")["arms"]
    sample = arms["two_phase"]["sample"]
    assert sample["blocks"] == 10 and 0 < sample["sampled"] < 10
    assert arms["ours"]["token_rows"] == 10 * 4 * 20 - 20  # both windows start as equal rows of masks
    for wrong in ("cache=dual", "sample=1.5", "temperature=2"):
        with pytest.raises(DuelError, match=wrong.partition("=")[0]):
            parse(["--model_args", f"estimator=two_phase,{wrong}"])


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["random:bidrectional"], "Did you mean random:bidirectional?"),
        (["demo-ar"], "score it with estimator=ar"),
        (["demo-mdm", "--length", "500"], "--length"),
        (["--model_args", "rule=gredy"], "Did you mean greedy?"),
        (["--hidden_size", "100", "--vocab", "50"], "a multiple of 64"),
        (["--peak-of", "our"], "Did you mean ours?"),
    ],
)
def test_what_is_refused(words, named):
    with pytest.raises(SystemExit) as error:
        main(["bench", *SMALL, *words])
    assert named in str(error.value)
