"""ESM-2 and DPLM beside what test_encoders.py shows of them: what is found at load, and proteins as text."""

import math

import pytest
from encoder_reference import PROTEIN_CASES, PROTEIN_MASK, RESIDUES, esm, protein_ids
from harness_requests import ask, text_log_prob
from harness_runs import evaluate
from laws import slow_but

from lm_eval_duel import Duel, denoisers
from lm_eval_duel.core.windows import Window
from lm_eval_duel.errors import DuelError
from lm_eval_duel.harness.lm import DuelMDM


@pytest.fixture(scope="module", params=slow_but(PROTEIN_CASES, ["esm-2"]))
def protein(request, tmp_path_factory):
    """The denoiser of a case, and its folder."""
    path, _ = esm(tmp_path_factory.mktemp(request.param), **PROTEIN_CASES[request.param])
    return denoisers.load(path, device="cpu"), path


def test_what_is_found_at_load(protein):
    denoiser, path = protein
    assert denoiser.excluded.nonzero()[:, 0].tolist() == [PROTEIN_MASK]
    assert denoiser.max_length == 64  # of 66 positions, ESM counts two that no residue has
    assert type(denoiser.model).__name__ == "EsmForMaskedLM" and not denoiser.model.training
    with pytest.raises(
        DuelError, match=r"scales its input by the share of masked positions .*token_dropout.* Leave cache"
    ):
        denoisers.load(path, device="cpu", cache="dual")


def test_a_residue_is_a_token(protein):
    denoiser, path = protein
    lm = DuelMDM(pretrained=path, device="cpu", rule="l2r", block=8)
    assert [lm.tok_encode(letter) for letter in RESIDUES] == [[n] for n in range(4, 24)]
    assert lm.tok_encode("MKTAYIAKQR") == list(protein_ids("MKTAYIAKQR")) == lm.tok_encode("M K T A Y\nIAKQR")
    [value] = lm.loglikelihood_rolling(ask("loglikelihood_rolling", ("MKTAYIAKQR",)), disable_tqdm=True)
    expected = Duel(denoiser, "l2r", 8).log_prob([Window((0,), protein_ids("MKTAYIAKQR"), (2,))])[0]
    assert value == pytest.approx(expected.log_prob, abs=1e-4)
    scores = lm.loglikelihood(ask("loglikelihood", ("MKTA", "YIAK")), disable_tqdm=True)
    expected = Duel(denoiser, "l2r", 8).log_prob([Window((0, *protein_ids("MKTA")), protein_ids("YIAK"), (2,))])[0]
    assert scores[0][0] == pytest.approx(expected.log_prob, abs=1e-4)


def test_the_task_reports_bits_per_residue(protein):
    _, path = protein
    model_args = f"pretrained={path},rule=left_to_right:k=8,block=16,max_length=64"
    found = evaluate("proteins", model_args, limit=2, bootstrap_iters=0)
    samples = found["samples"]["proteins"]
    nats = sum(text_log_prob(sample) for sample in samples)
    bits = found["results"]["proteins"]["bits_per_residue,none"]
    assert bits == pytest.approx(-nats / math.log(2) / (76 + 105))
    assert found["results"]["proteins"]["residue_perplexity,none"] == pytest.approx(2**bits)
    assert found["results"]["proteins"]["bits_per_byte,none"] == pytest.approx(bits)
