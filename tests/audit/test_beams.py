"""A beam whose sets float noise chooses is a tie by the audit's own measure; a larger difference is none."""

import pytest
import torch
from toys import Toy

from lm_eval_duel.audit.checked import CheckedWindow
from lm_eval_duel.audit.recompute import ALONE, recompute
from lm_eval_duel.cli.audit import table
from lm_eval_duel.core.windows import Window
from lm_eval_duel.estimators.subsets import set_sampler as chunk
from lm_eval_duel.estimators.subsets.samplers import SampledOrder


class Noisy(Toy):
    """Its last digits depend on the number of rows in a call, as in float32 on any device."""

    def head(self, features):
        logits = super().head(features)
        noise = torch.rand(logits.shape[1], generator=torch.Generator().manual_seed(len(features)), dtype=logits.dtype)
        return logits + 1e-7 * noise


def test_float_noise_of_a_beam_is_a_tie(monkeypatch):
    window = Window((), (0, 1, 2, 0, 1, 2, 2, 1, 0))

    def scored():
        sampler = SampledOrder(Noisy(length=12), 9, alg="origin", steps=2, beam=16)
        [score] = sampler.log_prob([window])  # at the start all sets of a size have equal weights
        return score, recompute(sampler, window, score)

    score, found = scored()
    assert found.log_prob == pytest.approx(score.log_prob, abs=1e-5), "the lowest of equal sets are kept"
    monkeypatch.setattr(chunk, "TIE", 2.0**-60)
    score, found = scored()
    assert found.route == ALONE and abs(found.log_prob - score.log_prob) > 1e-3, "noise chose other sets"
    each = CheckedWindow("", window, score.log_prob, found)
    assert each.again.ties == 1 and not each.differs and CheckedWindow("", window, score.log_prob + 20, found).differs
    assert "a tie: float noise chooses the sets of the beam" in table([each])
