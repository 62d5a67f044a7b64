"""The training loss of demo-duo, against the bound that the package computes from the same network."""

import importlib
import math
import statistics
import sys

import dit_reference
import torch
from pages import ROOT

from lm_eval_duel.core.windows import Window
from lm_eval_duel.denoisers import load
from lm_eval_duel.estimators.arguments import NoisedElboArguments
from lm_eval_duel.estimators.noised_elbo import NoisedElbo


def test_the_loss_of_duo_estimates_the_bound(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path, str(ROOT / "scripts")])
    train_demo = importlib.import_module("train_demo")
    path, _ = dit_reference.write(tmp_path, "duo")
    denoiser = load(path, device="cpu", tokenizer=dit_reference.words(12))
    denoiser.network.output_layer.linear.weight.data *= 0.3  # as written it is sure of wrong tokens: a wide error
    end, target = 3, (5, 9, 1, 1, 4, 8)
    [score] = NoisedElbo(denoiser, NoisedElboArguments(4096)).log_prob([Window((end,), target)])
    rows, generator = torch.tensor([target] * 128), torch.Generator().manual_seed(0)
    with torch.inference_mode():
        draws = [train_demo.duo_loss(denoiser.network, rows, end, generator).item() for _ in range(32)]
    error = math.hypot(statistics.stdev(draws) / math.sqrt(len(draws)), score.stderr / len(target))
    # by 400,000 draws each the two were 3.801 and 3.801, with errors of 0.006
    assert abs(statistics.mean(draws) + score.log_prob / len(target)) < 4 * error < 0.4
