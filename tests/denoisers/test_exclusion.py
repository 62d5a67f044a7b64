"""Excluded ids: out of the vocabulary before anything is normalised, on toys by enumeration, and through `load`."""

import itertools
import math

import pytest
import tiny
import torch
from attends import Attends
from textbook import score
from toys import BlockCausal, Toy

from lm_eval_duel import Duel, denoisers, rules
from lm_eval_duel.core.windows import Window
from lm_eval_duel.denoisers.cached.denoiser import Cached
from lm_eval_duel.denoisers.wrappers.exclusion import Excluding
from lm_eval_duel.denoisers.wrappers.guidance import Guided
from lm_eval_duel.denoisers.wrappers.warpers import Warped
from lm_eval_duel.errors import DuelError
from lm_eval_duel.harness.lm import DuelMDM

TOYS = {
    "bidirectional": lambda: Excluding(Toy(tokens=4), [1]),
    "block-causal": lambda: Excluding(BlockCausal(tokens=4), [1]),
    "cached": lambda: Excluding(Cached(Attends(tokens=4), "dual"), [1]),
    "guided": lambda: Excluding(Guided(Toy(tokens=4), 0.5), [1]),
    "top two": lambda: Warped(Excluding(Toy(tokens=4), [1]), 0.7, 2),
}


@pytest.mark.parametrize(
    ("kind", "rule"), list(zip(TOYS, ["greedy:k=1", "entropy_threshold:tau=0.9"] * 2 + ["greedy:k=1"], strict=True))
)
def test_texts_without_the_excluded_ids_sum_to_one(kind, rule):
    duel = Duel(TOYS[kind](), rule, 2)
    windows = [Window((1,), target) for target in itertools.product((0, 2, 3), repeat=3)]
    assert math.fsum(math.exp(s.log_prob) for s in duel.log_prob(windows)) == pytest.approx(1, abs=1e-9)
    drawn = duel.sample([(1,)] * 20, 3, seed=0)
    assert all(1 not in sample.tokens for sample in drawn)
    again = duel.log_prob([Window((1,), sample.tokens) for sample in drawn])
    assert [s.log_prob for s in again] == pytest.approx([s.log_prob for s in drawn], abs=1e-9)


@pytest.mark.parametrize("rule", ["greedy:k=1", "margin:k=2", "klass:mu=0.4:nu=0.3", "quota:steps=2"])
def test_equals_the_textbook_loop_without_these_columns(rule):
    toy, windows = Toy(tokens=4), [Window((1, 3), (0, 2, 3, 3)), Window((), (2, 0, 0), (1,))]
    excluded = toy.excluded | (torch.arange(toy.vocab_size) == 1)
    for window, scored in zip(windows, Duel(Excluding(toy, [1]), rule, 3).log_prob(windows), strict=True):
        _, steps, nats, greedy, nfe = score(
            lambda ids: toy.features(ids[None], None)[0], toy.mask_id, excluded, rules.parse(rule), 3, window
        )
        assert (scored.reveal_steps, scored.is_greedy, scored.nfe) == (steps, greedy, nfe)
        assert scored.token_logprobs == pytest.approx(nats, abs=1e-9)


def test_wrong_ids():
    toy = Toy()
    for ids, message in (
        ([99999999], "exclude_ids has id 99999999; the network's ids are 0 to 3"),
        ([toy.mask_id], "which is [MASK]"),
        ([0, 1, 2], "exclude_ids leaves no token"),
    ):
        with pytest.raises(DuelError) as error:
            Excluding(toy, ids)
        assert message in str(error.value)
    with pytest.raises(DuelError, match=r"Window 0 holds id 1, which exclude_ids leaves out: its probability is 0\."):
        Duel(Excluding(toy, [1]), "greedy", 2).log_prob([Window((), (0, 1))])


def test_through_load_and_the_model_args(tmp_path):
    path = tiny.checkpoint(tmp_path / "bert", "bert")
    plain, without = (denoisers.load(path, device="cpu", exclude_ids=ids) for ids in ((), "6+5"))
    assert without.excluded_ids == (5, 6) and without.describe()["exclude_ids"] == "5+6"
    assert "exclude_ids" not in plain.describe()
    assert without.excluded.nonzero()[:, 0].tolist() == sorted({5, 6, *plain.excluded.nonzero()[:, 0].tolist()})
    window = [Window((), (7, 8, 9))]
    less, more = (Duel(denoiser, "greedy", 2).log_prob(window)[0].log_prob for denoiser in (plain, without))
    assert less < more
    assert DuelMDM(pretrained=path, exclude_ids=5, device="cpu").spec["exclude_ids"] == "5"
