"""EuroBERT and mmBERT on tiny random checkpoints with the real file layout, against plain networks in float64."""

import functools
import itertools
import math

import pytest
import torch
from close import close_nats
from encoder_reference import ENCODERS
from laws import slow_but
from textbook import score
from transformers import CONFIG_MAPPING

from lm_eval_duel import Duel, denoisers, rules
from lm_eval_duel.core.windows import Window
from lm_eval_duel.errors import DuelError

MASK = 4
WINDOWS = [
    Window((2, 6), (7, 9, 30, 12, 8, 15, 5, 21, 11), (3,)),
    Window((2,), (10, 9), (3,)),
    Window((), (8, 8, 20, 31, 6)),
    Window((2, 14, 5, 9, 9), (33, 6, 7), (3,)),
]


@pytest.fixture(scope="module", params=ENCODERS)
def encoder(request, tmp_path_factory):
    """The denoiser of a family, and the plain network's logits of ids."""
    if request.param == "eurobert" and "eurobert" not in CONFIG_MAPPING:
        pytest.skip("transformers 4 does not have EuroBERT")
    path, logits = ENCODERS[request.param](tmp_path_factory.mktemp(request.param))
    return denoisers.load(path, device="cpu"), functools.cache(logits)


def test_what_is_found_at_load(encoder):
    denoiser, _ = encoder
    assert (denoiser.family, denoiser.attention, denoiser.mask_id) == ("masked-lm", "bidirectional", MASK)
    assert denoiser.relative_positions and denoiser.honours_padding and not denoiser.needs_visible
    assert denoiser.special_tokens == ((2,), (3,))
    assert type(denoiser.model).__module__.startswith("transformers.models.")  # not the code that a config may name


def test_the_network_equals_the_plain_one(encoder):
    denoiser, right = encoder
    long = [2, *[6, MASK, 9, 9, MASK, 30, 12] * 3, 3]  # longer than a local window
    for row in ([2, 6, MASK, 9, 9, MASK, 30, 12, 3], long, [MASK] * 5):
        ours = denoiser.head(denoiser.features(torch.tensor([row]), None)[0])
        assert (ours - right(tuple(row))).abs().max() < 1e-4


@pytest.mark.parametrize("rule", slow_but(["greedy", "margin:k=2", "threshold:mu=0.3"], ["greedy"]))
def test_lanes_equal_the_textbook_loop(encoder, rule):
    denoiser, right = encoder
    for window, scored in zip(WINDOWS, Duel(denoiser, rule, 4).log_prob(WINDOWS), strict=True):
        _, steps, nats, greedy, nfe = score(
            lambda row: right(tuple(row.tolist())),
            MASK,
            denoiser.excluded,
            rules.parse(rule),
            4,
            window,
            tie_when_all_mask=True,
        )
        assert scored.near_ties == 0, "choose another seed: the order is at the mercy of float noise here"
        assert (scored.reveal_steps, scored.is_greedy, scored.nfe) == (steps, greedy, nfe)
        assert scored.token_logprobs == close_nats(nats)


def test_all_pairs_of_tokens_sum_to_one(encoder):
    denoiser, _ = encoder
    tokens = (~denoiser.excluded).nonzero()[:, 0].tolist()
    pairs = [Window((2, 6), pair, (3,)) for pair in itertools.product(tokens, repeat=2)]
    scored = Duel(denoiser, "greedy", 4).log_prob(pairs)
    assert math.fsum(math.exp(s.log_prob) for s in scored) == pytest.approx(1, abs=1e-4)


def test_left_to_right_is_the_chain_rule(encoder):
    denoiser, right = encoder

    def logs(*row):
        return right(row).masked_fill(denoiser.excluded, -math.inf).log_softmax(-1)

    first, second = logs(2, 6, MASK, MASK, 3), logs(2, 6, 9, MASK, 3)
    [scored] = Duel(denoiser, "l2r", 4).log_prob([Window((2, 6), (9, 30), (3,))])
    assert scored.token_logprobs == close_nats([float(first[2, 9]), float(second[3, 30])])


def test_a_window_alone_equals_the_window_in_a_batch(encoder):
    denoiser, _ = encoder
    for window, scored in zip(WINDOWS, Duel(denoiser, "greedy", 4).log_prob(WINDOWS), strict=True):
        alone = Duel(denoiser, "greedy", 4, batch_size=1).log_prob([window])[0]
        assert alone.reveal_steps == scored.reveal_steps
        assert alone.token_logprobs == close_nats(scored.token_logprobs)


def test_eurobert_needs_a_transformers_that_has_it(tmp_path, monkeypatch):
    path, _ = ENCODERS["eurobert"](tmp_path)
    monkeypatch.setattr("lm_eval_duel.denoisers.hf.masked_lm.CONFIG_MAPPING", {})
    with pytest.raises(DuelError, match=r"runs code of its own: pass trust_remote_code=true if you trust it"):
        denoisers.load(path, device="cpu")
