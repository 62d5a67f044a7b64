"""A network without weights: its size, counted on the meta device, is that of the loaded network."""

import json

import pytest
import torch
from networks import written
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from lm_eval_duel import load
from lm_eval_duel.demo import resolve
from lm_eval_duel.denoisers import load_tokenizer, unloaded
from lm_eval_duel.denoisers.cached.denoiser import Cached
from lm_eval_duel.denoisers.published import CONFIGS
from lm_eval_duel.denoisers.random_network import make
from lm_eval_duel.errors import DuelError

KINDS = ("max_length", "attention", "block", "published_block", "shift", "vocab_size", "bos", "appends_sep", "family")
KINDS += ("anchor", "seeds_blocks")


def same_kind(planned, denoiser):
    for name in KINDS:
        assert getattr(planned, name) == getattr(denoiser, name), name
    network = getattr(denoiser, "model", None) or denoiser.network
    assert planned.size.parameters == sum(weight.numel() for weight in network.parameters())


@pytest.mark.parametrize("name", ["demo-mdm", "demo-bd", "demo-ar"])
def test_bundled(name):
    network = {"attention": "causal"} if name == "demo-ar" else {}
    same_kind(unloaded.read(name, network), load(name, device="cpu", **network))


@pytest.mark.parametrize("name", ["bert", "modernbert", "gidd", "sedd"])
def test_masked_lms_and_dits(tmp_path, name):
    path, _ = written(tmp_path, name)
    planned, denoiser = unloaded.read(path, {"max_length": 16}), load(path, device="cpu", max_length=16)
    same_kind(planned, denoiser)
    assert name != "bert" or planned.size.kept == Cached(denoiser, "dual").kept


@pytest.mark.parametrize(
    ("name", "others"),
    [
        ("d2f-dream", {}),
        ("nemotron-labs-diffusion", {"first_token": "block"}),
        ("nemotron-labs-diffusion", {"attention": "causal"}),
        ("nemotron-diffusion-research", {}),
        pytest.param("diffugpt", {"family": "diffugpt"}, marks=pytest.mark.slow),
    ],
)
def test_decoders(tmp_path, name, others):
    folder, options = written(tmp_path, name)
    network = {**options, **others}
    tokenizer = network.pop("tokenizer", None)
    denoiser = load(folder, device="cpu", tokenizer=tokenizer, **network)
    planned = unloaded.read(folder, network, tokenizer or load_tokenizer({"pretrained": folder}))
    same_kind(planned, denoiser)
    assert planned.mask_id == denoiser.mask_id


@torch.inference_mode()
def test_operations_are_those_of_a_call():
    """Against torch's own counter, for a decoder whose layers run at every position."""
    denoiser = make("random:llada-8b", torch.device("cpu"), layers=2, width=64, vocab=200, length=32)
    config = {**CONFIGS["GSAI-ML/LLaDA-8B-Base"], "d_model": 64, "mlp_hidden_size": 192, "n_layers": 2, "n_heads": 1}
    config |= {"n_kv_heads": 1, "vocab_size": 200, "embedding_size": 200, "mask_token_id": 72}
    CONFIGS["tiny"] = config
    try:
        size = unloaded.read("tiny", {}).size
    finally:
        del CONFIGS["tiny"]
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
    sizes = {name: round(unloaded.read(name, {}).size.parameters / 1e6) for name in CONFIGS}
    assert list(sizes.values()) == [8016, 7616, 170, 162, 170, 170, 170, 170]


def test_a_position_uses_its_experts_only():
    config = {
        "architectures": ["RND1LM"],
        "hidden_size": 32,
        "head_dim": 16,
        "intermediate_size": 64,
        "max_position_embeddings": 64,
        "moe_intermediate_size": 24,
        "norm_topk_prob": True,
        "num_attention_heads": 4,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "num_hidden_layers": 3,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e4,
        "vocab_size": 50,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "mask_token_id": 49,
    }
    CONFIGS["sparse"] = config
    try:
        size = unloaded.read("sparse", {}).size
    finally:
        del CONFIGS["sparse"]
    attention, router, experts = 32 * 64 * 2 + 32 * 32 * 2, 32 * 8, 2 * 3 * 32 * 24
    assert size.products == 3 * (attention + router + experts)
    assert (size.head, size.pair, size.kept) == (50 * 32, 2 * 3 * 64, 2 * 3 * 32)


def test_own_code_is_not_run(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "new", "auto_map": {"AutoModel": "code.New"}}))
    with pytest.raises(DuelError, match="has code of its own, which a plan does not run"):
        unloaded.read(str(tmp_path), {})
    assert "demo" in resolve("demo-mdm")
