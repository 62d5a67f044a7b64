"""EuroBERT, mmBERT, ESM-2 and DPLM, tiny and random in the real file layout, against plain networks in float64."""

import functools
import itertools
import math
import types

import pytest
import torch
from close import close_nats
from encoder_reference import ENCODERS, PROTEIN_CASES, PROTEIN_MASK, esm, esm_logits, protein_ids
from textbook import score
from transformers import CONFIG_MAPPING

from lm_eval_duel import Duel, denoisers, rules
from lm_eval_duel.core.windows import Window
from lm_eval_duel.errors import DuelError

WINDOWS = [
    Window((2, 6), (7, 9, 30, 12, 8, 15, 5, 21, 11), (3,)),
    Window((2,), (10, 9), (3,)),
    Window((), (8, 8, 20, 31, 6)),
    Window((2, 14, 5, 9, 9), (33, 6, 7), (3,)),
]
PROTEINS = [
    Window((0,), protein_ids("MKTAYIAKQR"), (2,)),
    Window((0,), protein_ids("MW"), (2,)),
    Window((0, *protein_ids("MALW")), protein_ids("MRLLPLL"), (2,)),
    Window((), protein_ids("GIVEQ"), (2,)),
]


@pytest.fixture(scope="module", params=[*ENCODERS, *PROTEIN_CASES])
def encoder(request, tmp_path_factory):
    """A denoiser, the plain network's logits of ids, and what to score with it: [CLS], [SEP] and [MASK] among it."""
    name, folder = request.param, tmp_path_factory.mktemp(request.param)
    if name in PROTEIN_CASES:
        path, w = esm(folder, **PROTEIN_CASES[name])
        logits, windows, first, last, mask = functools.partial(esm_logits, w), PROTEINS, 0, 2, PROTEIN_MASK
    else:
        if name == "eurobert" and "eurobert" not in CONFIG_MAPPING:
            pytest.skip("transformers 4 does not have EuroBERT")
        path, logits = ENCODERS[name](folder)
        windows, first, last, mask = WINDOWS, 2, 3, 4
    return types.SimpleNamespace(
        denoiser=denoisers.load(path, device="cpu"),
        logits=functools.cache(logits),
        windows=windows,
        first=first,
        last=last,
        mask=mask,
        text=name not in PROTEIN_CASES,
    )


def test_what_is_found_at_load(encoder):
    denoiser = encoder.denoiser
    assert (denoiser.family, denoiser.attention, denoiser.shift) == ("masked-lm", "bidirectional", 0)
    assert denoiser.mask_id == encoder.mask and denoiser.special_tokens == ((encoder.first,), (encoder.last,))
    assert (denoiser.relative_positions, denoiser.needs_visible) == (encoder.text, not encoder.text)
    assert denoiser.honours_padding or not encoder.text  # ESM reacts to it under transformers 4
    assert type(denoiser.model).__module__.startswith("transformers.models.")  # not the code that a config may name


def test_the_network_equals_the_plain_one(encoder):
    """With few, half and nearly all positions masked: the scale of ESM's input differs by a factor of 6."""
    first, last, mask = encoder.first, encoder.last, encoder.mask
    long = [first, *[6, mask, 9, 9, mask, 30, 12] * 3, last]  # longer than a local window
    rows = [[first, 6, 15, 11, 5, 19, 12, last], [first, 6, mask, 9, 9, mask, 30, 12, last], long]
    rows += [[first, mask, 9, last], [mask] * 5 if encoder.text else [first, *[mask] * 6, last]]
    for row in rows:
        ours = encoder.denoiser.head(encoder.denoiser.features(torch.tensor([row]), None)[0])
        assert (ours - encoder.logits(tuple(row))).abs().max() < 1e-4


def test_lanes_equal_the_textbook_loop(encoder):
    for rule in ("greedy", "margin:k=2", "threshold:mu=0.3"):
        found = Duel(encoder.denoiser, rule, 4).log_prob(encoder.windows)
        for window, scored in zip(encoder.windows, found, strict=True):
            _, steps, nats, greedy, nfe = score(
                lambda row: encoder.logits(tuple(row.tolist())),
                encoder.mask,
                encoder.denoiser.excluded,
                rules.parse(rule),
                4,
                window,
                tie_when_all_mask=encoder.text,
            )
            assert scored.near_ties == 0, "choose another seed: the order is at the mercy of float noise here"
            assert (scored.reveal_steps, scored.is_greedy, scored.nfe) == (steps, greedy, nfe), rule
            assert scored.token_logprobs == close_nats(nats), rule


def test_all_pairs_of_tokens_sum_to_one(encoder):
    tokens = (~encoder.denoiser.excluded).nonzero()[:, 0].tolist()
    pairs = [Window((encoder.first, 6), pair, (encoder.last,)) for pair in itertools.product(tokens, repeat=2)]
    scored = Duel(encoder.denoiser, "greedy", 4).log_prob(pairs)
    assert math.fsum(math.exp(s.log_prob) for s in scored) == pytest.approx(1, abs=1e-4)


def test_left_to_right_is_the_chain_rule_and_k_the_marginals(encoder):
    first, last, mask = encoder.first, encoder.last, encoder.mask

    def logs(*row):
        return encoder.logits(row).masked_fill(encoder.denoiser.excluded, -math.inf).log_softmax(-1)

    blank, then = logs(first, 6, mask, mask, last), logs(first, 6, 9, mask, last)
    window = [Window((first, 6), (9, 30), (last,))]
    one, two = (Duel(encoder.denoiser, f"l2r:k={k}", 4).log_prob(window)[0] for k in (1, 2))
    assert one.token_logprobs == close_nats([float(blank[2, 9]), float(then[3, 30])])
    assert two.token_logprobs == close_nats([float(blank[2, 9]), float(blank[3, 30])])


def test_a_window_alone_equals_the_window_in_a_batch(encoder):
    """Short rows beside long ones: padding must not count as masked positions."""
    together = Duel(encoder.denoiser, "greedy", 4).log_prob(encoder.windows)
    for window, scored in zip(encoder.windows, together, strict=True):
        [alone] = Duel(encoder.denoiser, "greedy", 4, batch_size=1).log_prob([window])
        assert alone.reveal_steps == scored.reveal_steps
        assert alone.token_logprobs == close_nats(scored.token_logprobs)


def test_eurobert_needs_a_transformers_that_has_it(tmp_path, monkeypatch):
    path, _ = ENCODERS["eurobert"](tmp_path)
    monkeypatch.setattr("lm_eval_duel.denoisers.hf.masked_lm.CONFIG_MAPPING", {})
    with pytest.raises(DuelError, match=r"runs code of its own: pass trust_remote_code=true if you trust it"):
        denoisers.load(path, device="cpu")
