"""The examples: a loop learns, an ELBO over all orders is that of its estimator, quality of samples by hand."""

import importlib.util
import math
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


def test_generation_quality(tmp_path):
    quality = example("generation_quality")
    assert quality.entropy((1, 1, 2, 1)) == pytest.approx(-0.75 * math.log(0.75) - 0.25 * math.log(0.25))
    assert quality.repetition((1, 2, 1, 2, 1, 2)) == pytest.approx(1 / 3)  # 1212 twice
    mean = quality.mean([2.0, 6.0, 1.0], [1, 3, 1])
    assert mean.value == pytest.approx(9 / 5) and mean.interval == pytest.approx((1.0, 2.0))  # a third of it, or none
    assert quality.mean([2.0, 6.0], [1, 3]).interval == pytest.approx((2.0, 2.0))  # the same rate in both

    (tmp_path / "text.jsonl").write_text('{"text": "We the people of the United States, in order to form a union"}\n')
    words = ["demo-bd", "--rules", "greedy:k=2", "--samples", "2", "--length", "8", "--judge", "demo-ar"]
    drawn, text = quality.compare(quality.parse([*words, "--text", str(tmp_path / "text.jsonl")]))
    duel = Duel.from_pretrained("demo-bd", rule="greedy:k=2")
    samples = duel.sample([duel.windows("a")[0].context] * 2, 8, seed=0)
    assert drawn.own.value == pytest.approx(-sum(sample.log_prob for sample in samples) / 16)
    assert drawn.nfe == 5 / 8 and drawn.perplexity.value > text.perplexity.value > 1
    assert (text.name, text.own, text.mauve) == ("2 pieces of the text", None, None)
