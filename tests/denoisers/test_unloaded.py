"""A network without weights: its size, counted on the meta device, is that of the loaded network."""

import json

import pytest
import torch
from networks import written
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from lm_eval_duel import load
from lm_eval_duel.denoisers import loading as unloaded
from lm_eval_duel.denoisers.cached.denoiser import Cached
from lm_eval_duel.errors import DuelError


@torch.inference_mode()
def test_operations_are_those_of_a_call(tmp_path):
    """Against torch's own counter, for a decoder whose layers run at every position."""
    path, options = written(tmp_path, "llada")
    denoiser, size = load(path, device="cpu", **options), unloaded.read(path, options).size
    assert size.parameters == sum(weight.numel() for weight in denoiser.model.parameters())
    rows, length, positions = 3, 20, 7
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):  # the only kernel it counts here
        features = denoiser.features(torch.zeros(rows, length, dtype=torch.int64), None)
        denoiser.head(features[0, :positions])
    products = rows * (length * size.products + length**2 * size.pair) + positions * size.head
    rotary = counter.get_total_flops() - 2 * products
    assert 0 <= rotary < 1e-3 * counter.get_total_flops()
    assert size.kept == Cached(denoiser, "dual").kept


def test_published_networks_have_their_published_sizes():
    """In units of 10^6: the model cards say 8B, 7B (7.6B with the tables) and 110M beside two tables of 39M.

    The autoregressive network lacks the layers that depend on time.
    """
    sizes = {name: round(unloaded.read(name, {}).size.parameters / 1e6) for name in unloaded.CONFIGS}
    assert list(sizes.values()) == [8016, 7616, 170, 162, 170, 170, 170, 170]


def test_own_code_is_not_run(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "new", "auto_map": {"AutoModel": "code.New"}}))
    with pytest.raises(DuelError, match="has its own code, which a plan does not run"):
        unloaded.read(str(tmp_path), {})
