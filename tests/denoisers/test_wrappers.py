"""Guidance, filters and excluded ids: what is merged, counted, refused and loaded. Laws: test_view_laws.py."""

import dataclasses
import math

import pytest
import tiny
import torch
from close import check, exact
from textbook import score
from toys import BlockCausal, Causal, Rotary, Toy

from lm_eval_duel import Duel, denoisers, rules
from lm_eval_duel.core.lanes import Lanes, Rows
from lm_eval_duel.core.windows import Window
from lm_eval_duel.denoisers.filters import excluding
from lm_eval_duel.denoisers.hf.own_forward import MaskedLM
from lm_eval_duel.denoisers.wrappers import Guided
from lm_eval_duel.errors import DuelError
from lm_eval_duel.harness.lm import DuelMDM


def guided(logits_of, mask_id, scale, window):
    """unconditional + (1 + scale) (conditional - unconditional); nothing is given in the unconditional row."""
    begin = len(window.context)
    end = window.length - len(window.suffix)

    def both(ids):
        bare = ids.clone()
        bare[:begin] = mask_id
        bare[end:] = mask_id
        conditional = logits_of(ids)
        unconditional = logits_of(bare)
        return unconditional + (1 + scale) * (conditional - unconditional)

    return both


# ---------------------------------------------------------------- guidance


class Noisy(Rotary):
    """Equal features have logits that differ in their last bits, by where they stand in the call."""

    def head(self, features):
        return features - 1e-9 * torch.arange(len(features))[:, None] * torch.arange(self.vocab_size)


def test_guided_rows_that_differ_in_where_the_suffix_begins_are_not_merged():
    """The row without context hides the suffix, but not what has been revealed."""
    duel = Duel(Guided(Toy(), 0.7), "right_to_left", None)
    windows = [Window((1,), (0, 2, 1), (0, 1)), Window((1,), (0, 2, 1, 0), (1,)), Window((1,), (0, 2, 1, 0, 1))]
    for window, in_batch in zip(windows, duel.log_prob(windows), strict=True):
        [alone] = duel.log_prob([window])
        assert in_batch.log_prob == pytest.approx(alone.log_prob, abs=1e-9)

    duel = Duel(Guided(Toy(), 0.7), "greedy", None)
    [score] = duel.log_prob([Window((1,), (0, 2, 1))])
    assert score.nfe == 3
    assert duel.counts.forwards == 6  # two a step
    assert duel.counts.rows == 6


def test_guided_all_mask_starts_tie_and_are_counted(network=Noisy):
    duel = Duel(Guided(network(), 0.8), "greedy", None)
    windows = [Window((), (1, 0, 2, 1)), Window((), (2, 2)), Window((0,), (1, 0, 2))]
    unguided = Duel(network(), "greedy", None).log_prob(windows)

    scores = duel.log_prob(windows)

    assert [scored.all_mask_starts for scored in scores] == [1, 1, 0]
    assert duel.counts.all_mask_starts == 2
    for scored, plain in zip(scores[:2], unguided[:2], strict=True):  # without context guidance changes nothing
        assert scored.reveal_steps == plain.reveal_steps
        assert scored.reveal_steps[0] == 0
        assert scored.token_logprobs == pytest.approx(plain.token_logprobs, abs=1e-6)
    assert scores[2].token_logprobs != pytest.approx(unguided[2].token_logprobs, abs=1e-3)


def test_networks_that_cannot_be_guided_are_refused():
    shifted = Toy()
    shifted.shift = 1
    for plain in (BlockCausal(), Causal(), shifted):
        with pytest.raises(DuelError, match="cfg_scale"):
            Guided(plain, 0.5)


def test_guidance_through_load(family):
    path = family("bert").denoiser.path
    model = tiny.network("bert").double()
    for nothing in (None, 0, 0.0):
        assert isinstance(denoisers.load(path, device="cpu", cfg_scale=nothing), MaskedLM)

    denoiser = denoisers.load(path, device="cpu", cfg_scale=0.5, dtype="float64")
    assert denoiser.describe()["guidance"] == "classifier-free, cfg_scale=0.5"
    assert denoiser.splits_head

    windows = [Window((2, 6), (7, 9, 30, 12, 8), (3,)), Window((2,), (10, 9), (3,)), Window((), (8, 8, 20))]
    for window, scored in zip(windows, Duel(denoiser, "greedy", 4).log_prob(windows), strict=True):
        with torch.no_grad():
            logits_of = guided(lambda ids: model(input_ids=ids[None]).logits[0], 4, 0.5, window)
            expected = score(logits_of, 4, denoiser.excluded, rules.parse("greedy"), 4, window)
        check(scored, expected, exact)


# ---------------------------------------------------------------- filters


@dataclasses.dataclass(frozen=True)
class Cooling:
    """A temperature that falls from step to step."""

    reads_step = True
    truncates = False

    def __call__(self, logits, step):
        return logits * (1 + step[:, None])

    def describe(self):
        return {"warpers": "cooling"}


def cooled(toy):
    toy.filters = (Cooling(),)
    return toy


def test_a_filter_may_read_the_step():
    """By hand, under an order that is known; a block starts at step 0 again."""
    toy = Toy(length=8)
    window = Window((1,), (0, 2, 1, 1, 0), (2,))

    def plain(ids):
        return toy.features(ids[None], None)[0]

    for network, logits_of in (
        (toy, plain),
        (Guided(toy, 0.7), guided(plain, toy.mask_id, 0.7, window)),
    ):
        [scored] = Duel(cooled(network), "left_to_right", 3).log_prob([window])

        ids = torch.tensor([1, *[toy.mask_id] * 5, 2])
        for n, token in enumerate(window.target):
            logits = logits_of(ids)[1 + n].masked_fill(toy.excluded, -math.inf)
            step = n % 3
            expected = (logits.double() * (1 + step)).log_softmax(0)[token]
            assert scored.token_logprobs[n] == pytest.approx(float(expected), abs=1e-9)
            ids[1 + n] = token
        toy.filters = ()


def test_equal_rows_at_different_steps_are_not_merged():
    toy = cooled(Toy(length=4))
    rows = Rows.from_windows([Window((1,), (0, 1, 2))] * 2, toy.device)
    zero = torch.zeros(2, dtype=torch.long)
    lanes = Lanes.fresh(rows, torch.arange(2), zero + 1, zero + 3)
    lanes = dataclasses.replace(lanes, step=torch.tensor([0, 2]))
    tokens = rows.targets(lanes)
    together = toy.open(rows)(lanes).log_prob(tokens)
    for n in range(2):
        alone = toy.open(rows)(lanes.select(torch.tensor([n]))).log_prob(tokens[n : n + 1])
        assert torch.allclose(together[n : n + 1], alone)
    assert not torch.allclose(together[0], together[1])


# ---------------------------------------------------------------- excluded ids


def test_wrong_ids_are_refused(family):
    toy = Toy()
    for ids in ([99999999], [-1], [toy.mask_id], [0, 1, 2]):
        with pytest.raises(DuelError, match="exclude_ids"):
            excluding(toy, ids)
    with pytest.raises(DuelError, match="Window 0 holds id 1, which exclude_ids"):
        Duel(excluding(toy, [1]), "greedy", 2).log_prob([Window((), (0, 1))])


def test_exclusion_through_load_and_the_model_args(family):
    plain = family("bert").denoiser

    without = DuelMDM(pretrained=plain.path, exclude_ids="6+5", device="cpu")

    assert without.spec["exclude_ids"] == "5+6"
    assert "exclude_ids" not in plain.describe()
    assert (without.denoiser.excluded ^ plain.excluded).nonzero()[:, 0].tolist() == [5, 6]
