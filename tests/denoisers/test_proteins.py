"""ESM-2 and DPLM on tiny random checkpoints with the real file layout, against a plain network in float64."""

import functools
import itertools
import math

import pytest
import torch
from close import close_nats
from encoder_reference import PROTEIN_MASK, RESIDUES, VOCABULARY, esm, esm_logits
from harness_requests import ask, text_log_prob
from harness_runs import evaluate
from laws import slow_but
from textbook import score

from lm_eval_duel import Duel, denoisers, rules
from lm_eval_duel.core.windows import Window
from lm_eval_duel.errors import DuelError
from lm_eval_duel.harness.lm import DuelMDM

MASK = PROTEIN_MASK
CASES = {
    "esm-2": {},
    "dplm": {
        "architectures": ["EsmForDPLM"],
        "dplm_type": "dplm_esm",
        "hidden_dropout_prob": 0.1,
        "_name_or_path": "facebook/esm2_t30_150M_UR50D",
    },
}


def ids(sequence):
    return tuple(VOCABULARY.index(letter) for letter in sequence)


WINDOWS = [
    Window((0,), ids("MKTAYIAKQR"), (2,)),
    Window((0,), ids("MW"), (2,)),
    Window((0, *ids("MALW")), ids("MRLLPLL"), (2,)),
    Window((), ids("GIVEQ"), (2,)),
]


@pytest.fixture(scope="module", params=slow_but(CASES, ["esm-2"]))
def protein(request, tmp_path_factory):
    """The denoiser of a case, the plain network's logits of ids, and the folder."""
    path, w = esm(tmp_path_factory.mktemp(request.param), **CASES[request.param])
    logits = functools.cache(lambda row: esm_logits(w, row))
    return denoisers.load(path, device="cpu"), logits, path


def test_what_is_found_at_load(protein):
    denoiser, _, path = protein
    assert (denoiser.family, denoiser.attention, denoiser.shift, denoiser.mask_id) == (
        "masked-lm",
        "bidirectional",
        0,
        MASK,
    )
    assert denoiser.excluded.nonzero()[:, 0].tolist() == [MASK]
    assert denoiser.max_length == 64  # of 66 positions, ESM counts two that no residue has
    assert denoiser.needs_visible and not denoiser.relative_positions
    assert denoiser.special_tokens == ((0,), (2,))
    assert type(denoiser.model).__name__ == "EsmForMaskedLM" and not denoiser.model.training
    with pytest.raises(
        DuelError, match=r"scales its input by the share of masked positions .*token_dropout.* Leave cache"
    ):
        denoisers.load(path, device="cpu", cache="dual")


def test_the_network_equals_the_plain_one(protein):
    """With few, half and nearly all positions masked: the input's scale differs by a factor of 6."""
    denoiser, right, _ = protein
    rows = [[0, 20, 15, 11, 5, 19, 12, 2], [0, 20, MASK, 11, MASK, 19, MASK, 2], [0, *[MASK] * 6, 2], [0, MASK, 9, 2]]
    for row in rows:
        ours = denoiser.head(denoiser.features(torch.tensor([row]), None)[0])
        assert (ours - right(tuple(row))).abs().max() < 1e-4


@pytest.mark.parametrize("rule", ["greedy", "threshold:mu=0.3"])
def test_lanes_equal_the_textbook_loop(protein, rule):
    denoiser, right, _ = protein
    for window, scored in zip(WINDOWS, Duel(denoiser, rule, 4).log_prob(WINDOWS), strict=True):
        _, steps, nats, greedy, nfe = score(
            lambda row: right(tuple(row.tolist())), MASK, denoiser.excluded, rules.parse(rule), 4, window
        )
        assert scored.near_ties == 0, "choose another seed: the order is at the mercy of float noise here"
        assert (scored.reveal_steps, scored.is_greedy, scored.nfe) == (steps, greedy, nfe)
        assert scored.token_logprobs == close_nats(nats)


def test_all_pairs_of_tokens_sum_to_one(protein):
    denoiser, _, _ = protein
    tokens = [token for token in range(33) if token != MASK]
    pairs = [Window((0, 20), pair, (2,)) for pair in itertools.product(tokens, repeat=2)]
    scored = Duel(denoiser, "greedy", 4).log_prob(pairs)
    assert math.fsum(math.exp(s.log_prob) for s in scored) == pytest.approx(1, abs=1e-4)


def test_left_to_right_is_the_chain_rule_and_k_the_marginals(protein):
    denoiser, right, _ = protein

    def logs(*row):
        return right(row).masked_fill(denoiser.excluded, -math.inf).log_softmax(-1)

    first, second = logs(0, 20, MASK, MASK, 2), logs(0, 20, 9, MASK, 2)
    one, two = (Duel(denoiser, f"l2r:k={k}", 4).log_prob([Window((0, 20), (9, 15), (2,))])[0] for k in (1, 2))
    assert one.token_logprobs == close_nats([float(first[2, 9]), float(second[3, 15])])
    assert two.token_logprobs == close_nats([float(first[2, 9]), float(first[3, 15])])


def test_a_window_alone_equals_the_window_in_a_batch(protein):
    """Short rows next to long ones: padding must not count as masked positions."""
    denoiser, _, _ = protein
    together = Duel(denoiser, "greedy", 4).log_prob(WINDOWS)
    for window, scored in zip(WINDOWS, together, strict=True):
        alone = Duel(denoiser, "greedy", 4, batch_size=1).log_prob([window])[0]
        assert alone.reveal_steps == scored.reveal_steps
        assert alone.token_logprobs == close_nats(scored.token_logprobs)


def test_dplm_is_the_same_network_trained_in_another_way(tmp_path):
    path, w = esm(tmp_path, **CASES["dplm"])
    denoiser = denoisers.load(path, device="cpu")
    row = (0, 20, MASK, 11, MASK, 19, MASK, 2)
    ours = denoiser.head(denoiser.features(torch.tensor([row]), None)[0])
    assert (ours - esm_logits(w, row)).abs().max() < 1e-4


# ---------------------------------------------------------------- proteins as text


def test_a_residue_is_a_token(protein):
    denoiser, _, path = protein
    lm = DuelMDM(pretrained=path, device="cpu", rule="l2r", block=8)
    assert [lm.tok_encode(letter) for letter in RESIDUES] == [[n] for n in range(4, 24)]
    assert lm.tok_encode("MKTAYIAKQR") == list(ids("MKTAYIAKQR")) == lm.tok_encode("M K T A Y\nIAKQR")
    [value] = lm.loglikelihood_rolling(ask("loglikelihood_rolling", ("MKTAYIAKQR",)), disable_tqdm=True)
    expected = Duel(denoiser, "l2r", 8).log_prob([Window((0,), ids("MKTAYIAKQR"), (2,))])[0]
    assert value == pytest.approx(expected.log_prob, abs=1e-4)
    scores = lm.loglikelihood(ask("loglikelihood", ("MKTA", "YIAK")), disable_tqdm=True)
    expected = Duel(denoiser, "l2r", 8).log_prob([Window((0, *ids("MKTA")), ids("YIAK"), (2,))])[0]
    assert scores[0][0] == pytest.approx(expected.log_prob, abs=1e-4)


def test_the_task_reports_bits_per_residue(protein):
    _, _, path = protein
    model_args = f"pretrained={path},rule=left_to_right:k=8,block=16,max_length=64"
    found = evaluate("proteins", model_args, limit=2, bootstrap_iters=0)
    samples = found["samples"]["proteins"]
    nats = sum(text_log_prob(sample) for sample in samples)
    bits = found["results"]["proteins"]["bits_per_residue,none"]
    assert bits == pytest.approx(-nats / math.log(2) / (76 + 105))
    assert found["results"]["proteins"]["residue_perplexity,none"] == pytest.approx(2**bits)
    assert found["results"]["proteins"]["bits_per_byte,none"] == pytest.approx(bits)
