"""A beam whose sets float noise chooses is a tie of the audit's own measure; a fault that is larger is a difference."""

import dataclasses

import pytest
import torch
from toys import Toy

from lm_eval_duel.audit.checked import CheckedWindow
from lm_eval_duel.audit.recompute import ALONE, recompute
from lm_eval_duel.core.windows import Window
from lm_eval_duel.estimators.subsets.sampled_order import SampledOrder


class Noisy(Toy):
    """Its last digits depend on the number of rows in a call, as in float32 on any device."""

    def head(self, features):
        logits = super().head(features)
        noise = torch.rand(logits.shape[1], generator=torch.Generator().manual_seed(len(features)), dtype=logits.dtype)
        return logits + 1e-7 * noise


@pytest.mark.parametrize("fault", [0.0, 20.0])
def test_float_noise_of_a_beam_is_a_tie(fault):
    window = Window((), (0, 1, 2, 0, 1, 2, 2, 1, 0, 2))
    sampler = SampledOrder(Noisy(length=12), 10, alg="origin", steps=16, beam=16)
    [score] = sampler.log_prob([window])
    found = recompute(sampler, window, score)
    assert found.route == ALONE and found.log_prob != pytest.approx(score.log_prob, abs=1e-4), "noise chose other sets"
    wrong = dataclasses.replace(score, log_prob=score.log_prob + fault)
    each = CheckedWindow("", window, wrong.log_prob, recompute(sampler, window, wrong))
    assert each.again.ties == 1 and each.again.noise < 20 and each.differs == (fault > 0)
