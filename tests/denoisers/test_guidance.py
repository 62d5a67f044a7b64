"""Classifier-free guidance: the spec of the logits written out, on toys by enumeration, and through `load`."""

import itertools
import math

import pytest
import tiny
import torch
from textbook import score
from toys import BlockCausal, Causal, Rotary, Toy

from lm_eval_duel import denoisers, rules
from lm_eval_duel.core.windows import Window
from lm_eval_duel.denoisers.hf.masked_lm import MaskedLM
from lm_eval_duel.denoisers.wrappers.guidance import Guided
from lm_eval_duel.errors import DuelError
from lm_eval_duel.estimators.duel import DuelEstimator

RULES = [
    "greedy",
    "greedy:k=2",
    "margin",
    "random:seed=3",
    "threshold:mu=0.6",
    "klass:mu=0.4:nu=0.3",
    "entropy_bound:gamma=1",
]
WINDOWS = [
    Window((2, 1, 0), (0, 2, 1, 1, 0)),
    Window((1,), (1, 2, 0), (2, 0)),
    Window((), (0, 1, 1, 2, 0, 2)),
    Window((0, 2), (2,), (1,)),
]


def guided(logits_of, mask_id, scale, window):
    """unconditional + (1 + scale) (conditional - unconditional); nothing is given in the unconditional row."""
    begin, end = len(window.context), window.length - len(window.suffix)

    def both(ids):
        bare = ids.clone()
        bare[:begin] = bare[end:] = mask_id
        conditional, unconditional = logits_of(ids), logits_of(bare)
        return unconditional + (1 + scale) * (conditional - unconditional)

    return both


def equals(scored, expected, tolerance=1e-9):
    _, steps, nats, greedy, nfe = expected
    assert (scored.reveal_steps, scored.is_greedy, scored.nfe) == (steps, greedy, nfe)
    assert scored.token_logprobs == pytest.approx(nats, abs=tolerance)


@pytest.mark.parametrize("rule", RULES)
def test_equals_the_textbook_loop_over_guided_logits(rule):
    toy = Toy()
    for block, grid, scale in ((2, "target", -0.5), (2, "row", 0.5), (3, "row", 2.0), (None, "target", 0.5)):
        duel = DuelEstimator(Guided(toy, scale), rule, block, grid=grid)
        for window, scored in zip(WINDOWS, duel.log_prob(WINDOWS), strict=True):
            logits_of = guided(lambda ids: toy.features(ids[None], None)[0], toy.mask_id, scale, window)
            equals(scored, score(logits_of, toy.mask_id, toy.excluded, rules.parse(rule), block, window, grid))


@pytest.mark.parametrize("rule", RULES)
def test_sums_to_one(rule):
    for block, grid, tail, scale in ((2, "target", 2, -0.5), (2, "row", 0, 2.0), (None, "target", 0, 0.5)):
        windows = [Window((1,), string, (2,), tail) for string in itertools.product(range(3), repeat=4)]
        scored = DuelEstimator(Guided(Toy(), scale), rule, block, grid=grid).log_prob(windows)
        assert abs(math.fsum(math.exp(s.log_prob) for s in scored) - 1) < 1e-9


@pytest.mark.parametrize("rule", RULES)
def test_a_sample_has_the_likelihood_that_it_was_drawn_with(rule):
    contexts = [(), (1,), (0, 2), (2, 2, 1)]
    for grid in ("target", "row"):
        duel = DuelEstimator(Guided(Toy(), 1.5), rule, 2, grid=grid)
        for context, drawn in zip(contexts, duel.sample(contexts, 4, suffix=(1,), seed=2), strict=True):
            scored = duel.log_prob([Window(context, drawn.tokens, (1,))])[0]
            assert scored.reveal_steps == drawn.reveal_steps and scored.token_logprobs == pytest.approx(
                drawn.token_logprobs, abs=1e-9
            )
        for context, best in zip(contexts, duel.sample(contexts, 4, do_sample=False), strict=True):
            assert duel.log_prob([Window(context, best.tokens)])[0].is_greedy


def test_a_row_alone_equals_the_row_in_a_batch():
    for honours_padding in (True, False):
        guide = Guided(Toy(honours_padding=honours_padding), 0.7)
        together = DuelEstimator(guide, "greedy", 2).log_prob(WINDOWS)
        for batch_size in (1, 2):
            for window, scored in zip(WINDOWS, together, strict=True):
                alone = DuelEstimator(guide, "greedy", 2, batch_size=batch_size).log_prob([window])[0]
                assert alone.reveal_steps == scored.reveal_steps and alone.token_logprobs == pytest.approx(
                    scored.token_logprobs, abs=1e-9
                )


def test_two_forwards_a_step():
    duel = DuelEstimator(Guided(Toy(), 0.7), "greedy", None)
    assert duel.log_prob([Window((1,), (0, 2, 1))])[0].nfe == 3
    assert (duel.counts.forwards, duel.counts.rows) == (6, 6)


# ---------------------------------------------------------------- all_mask starts


class Noisy(Rotary):
    """Equal features have logits that differ in their last bits, by where they stand in the call."""

    def head(self, features):
        return features - 1e-9 * torch.arange(len(features))[:, None] * torch.arange(self.vocab_size)


@pytest.mark.parametrize("network", [Rotary, Noisy])
def test_blank_starts_tie_and_are_counted(network):
    duel = DuelEstimator(Guided(network(), 0.8), "greedy", None)
    windows = [Window((), (1, 0, 2, 1)), Window((), (2, 2)), Window((0,), (1, 0, 2))]
    plain = DuelEstimator(network(), "greedy", None).log_prob(windows)
    scored = duel.log_prob(windows)
    assert [s.all_mask_starts for s in scored] == [1, 1, 0] and duel.counts.all_mask_starts == 2
    assert [s.reveal_steps[0] for s in scored[:2]] == [0, 0]
    for one, other in zip(scored[:2], plain[:2], strict=True):  # nothing is given: nothing guides
        assert one.reveal_steps == other.reveal_steps and one.token_logprobs == pytest.approx(
            other.token_logprobs, abs=1e-6
        )
    assert scored[2].token_logprobs != pytest.approx(plain[2].token_logprobs, abs=1e-3)


@pytest.mark.parametrize("rule", RULES)
def test_blank_starts_equal_the_textbook_loop(rule):
    rotary = Rotary()
    for window, scored in zip(WINDOWS, DuelEstimator(Guided(rotary, 0.8), rule, 3).log_prob(WINDOWS), strict=True):
        logits_of = guided(lambda ids: rotary.features(ids[None], None)[0], rotary.mask_id, 0.8, window)
        right = score(logits_of, rotary.mask_id, rotary.excluded, rules.parse(rule), 3, window, tie_when_all_mask=True)
        equals(scored, right, 1e-6)


# ---------------------------------------------------------------- what can be guided, and what it is called


class Shifted(Toy):
    shift = 1


def test_networks_that_cannot_do_without_context():
    for plain, kind in ((BlockCausal(), "block_causal"), (Causal(), "causal"), (Shifted(), "shifted logits")):
        with pytest.raises(DuelError, match=f"cfg_scale .*{kind}"):
            Guided(plain, 0.5)


class Published(Toy):
    family, published_block, bos, splits_head, relative_positions = "published", 2, "given", False, True


def test_a_guided_network_is_what_the_plain_one_is():
    for plain in (Published(), Toy(), Toy(honours_padding=False)):
        guide = Guided(plain, 0.5)
        for name in ("family", "published_block", "bos", "splits_head", "relative_positions", "honours_padding"):
            assert getattr(guide, name) == getattr(plain, name)
        assert (guide.mask_id, guide.vocab_size, guide.max_length) == (
            plain.mask_id,
            plain.vocab_size,
            plain.max_length,
        )
    assert DuelEstimator(Guided(Published(), 0.5), "greedy").block == 2


def test_the_scale_is_part_of_the_law():
    assert Guided(Toy(), 0.5).describe() == {"denoiser": "Toy", "guidance": "classifier-free, cfg_scale=0.5"}
    assert Guided(Toy(), 2).describe()["guidance"] == "classifier-free, cfg_scale=2"


def test_through_load(tmp_path):
    path, model = tiny.checkpoint(tmp_path, "bert"), tiny.network("bert").double()
    for nothing in (None, 0, 0.0):
        assert isinstance(denoisers.load(path, device="cpu", cfg_scale=nothing), MaskedLM)
    guide = denoisers.load(path, device="cpu", cfg_scale=0.5, dtype="float64")
    assert guide.describe()["guidance"] == "classifier-free, cfg_scale=0.5"
    assert guide.honours_padding and guide.splits_head
    windows = [Window((2, 6), (7, 9, 30, 12, 8), (3,)), Window((2,), (10, 9), (3,)), Window((), (8, 8, 20))]
    for window, scored in zip(windows, DuelEstimator(guide, "greedy", 4).log_prob(windows), strict=True):
        with torch.no_grad():
            logits_of = guided(lambda ids: model(input_ids=ids[None]).logits[0], 4, 0.5, window)
            right = score(logits_of, 4, guide.excluded, rules.parse("greedy"), 4, window)
        assert scored.near_ties == 0, "choose another seed: the order is at the mercy of float noise here"
        equals(scored, right)
