"""examples/grpo and examples/surrogates: the loop learns, and the ELBO over all orders is that of its estimator."""

import importlib.util
import statistics

import pytest
import torch
from pages import ROOT
from toys import BlockCausal, Toy

from lm_eval_duel import Duel, Window


def example(path):
    spec = importlib.util.spec_from_file_location(path.replace("/", "_"), ROOT / "examples" / f"{path}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
def test_grpo_learns():
    grpo = example("grpo/train")
    curve = grpo.train(10, grpo.Settings(length=8))
    assert statistics.mean(curve[-3:]) > statistics.mean(curve[:3]) + 0.05


@pytest.mark.parametrize(("kind", "block"), [(Toy, 4), (BlockCausal, 2)])
def test_surrogates(kind, block):
    compare = example("surrogates/compare")
    duel, window = Duel(kind(length=8), "greedy", block=block), Window((), (0, 2, 1, 1))
    generator = torch.Generator().manual_seed(0)

    def value(surrogate):
        return float(compare.log_prob(duel, window, surrogate, generator))

    [bound] = Duel(duel.denoiser, block=block, estimator="elbo_exact").log_prob([window])
    assert value(compare.all_orders) == pytest.approx(bound.log_prob, abs=1e-6)  # weights are float32
    draws = [value(compare.elbo(50)) for _ in range(20)]
    assert abs(statistics.mean(draws) - bound.log_prob) < 5 * statistics.stdev(draws) / 20**0.5
