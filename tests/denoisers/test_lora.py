"""LoRA adapters: merged as by hand, under native names and a family's own; wrong ones are refused."""

import sys
from importlib.util import find_spec

import pytest
import tiny
import torch
from close import close_nats
from laws import slow_but
from lora_adapters import NATIVE_MODULES, adapter
from own import DREAM, LAYERS, LLADA, LLADA_SIZE, QWEN3, SIZE, decoder, llada, write
from safetensors.torch import load_file, save_file

from lm_eval_duel import Duel as TextDuel
from lm_eval_duel import denoisers
from lm_eval_duel.core.windows import Window
from lm_eval_duel.denoisers.hf.weights import ADAPTER_PREFIX as PREFIX
from lm_eval_duel.errors import DuelError
from lm_eval_duel.estimators.duel import DuelEstimator

pytestmark = pytest.mark.skipif(find_spec("peft") is None, reason="peft is not installed")
OWN = {"backend": "remote", "trust_remote_code": True}
LLADA_MODULES = ["model.transformer.ff_out"]  # the head
for n in range(LAYERS):
    LLADA_MODULES += [f"model.transformer.blocks.{n}.attn_out", f"model.transformer.blocks.{n}.ff_out"]


def by_hand(tensors, path, scale):
    """The weights with scale(module) B A added."""
    factors = load_file(f"{path}/adapter_model.safetensors")
    merged = dict(tensors)
    for key, a in factors.items():
        if ".lora_A." in key:
            module = key.removeprefix(PREFIX).split(".lora_")[0]
            b = factors[key.replace(".lora_A.", ".lora_B.")]
            merged[f"{module}.weight"] = tensors[f"{module}.weight"] + scale(module) * (b @ a)
    assert any(not torch.equal(merged[key], tensors[key]) for key in tensors)
    return merged


def base(folder, kind, tensors):
    """A checkpoint of these tensors: native, or with code of its own."""
    folder.mkdir(exist_ok=True)
    if kind == "a2d-qwen3":
        return write(folder, "", "", tensors, QWEN3)
    if kind == "llama":
        return write(folder, "", "", tensors, {**SIZE, "architectures": ["LlamaForCausalLM"], "model_type": "llama"})
    if kind == "llada":
        return write(folder, LLADA, "LLaDAModelLM", tensors, LLADA_SIZE)
    return write(folder, DREAM, "DreamModel", tensors)


def load(path, **options):
    return denoisers.load(path, device="cpu", **options)


def logits(denoiser):
    ids = torch.randint(5, 34, (3, 13), generator=torch.Generator().manual_seed(5))
    return denoiser.head(denoiser.features(ids, None).flatten(0, 1))


def equal(one, other):
    return (logits(one) - logits(other)).abs().max() <= 1e-4


def patterned(name):
    """Entries of a config that give modules of this name other ranks and scales, and the scale of each module."""
    entries = {"rank_pattern": {name: 2}, "alpha_pattern": {f"1\\.(.*\\.)?{name}": 5}}

    def scale(module):
        if not module.endswith(name):
            return 6 / 3
        return 5 / 2 if ".1." in module else 6 / 2

    return entries, {name: 2}, scale


KINDS = {  # tensors, options, modules, and what the adapter's config says
    "a2d-qwen3": (lambda: decoder(norms=True), {}, NATIVE_MODULES, ({"use_rslora": True}, {}, lambda m: 6 / 3**0.5)),
    "llama": (decoder, {"attention": "causal"}, NATIVE_MODULES, patterned("q_proj")),  # a causal LM
    "llada": (llada, {}, LLADA_MODULES, patterned("attn_out")),  # own names in a native class
    "dream": (lambda: decoder(bias=True), OWN, NATIVE_MODULES, patterned("q_proj")),  # own code
}


@pytest.mark.parametrize("kind", slow_but(KINDS, ["a2d-qwen3", "llada"]))
def test_equals_weights_merged_by_hand(tmp_path, kind):
    """Patterns of names in the adapter's config hold for the names in its file; the adapter is part of the spec."""
    make, options, modules, (entries, ranks, scale) = KINDS[kind]
    tensors = make()
    path = base(tmp_path / "base", kind, tensors)
    plain = load(path, **options)
    lora = adapter(tmp_path / "lora", tensors, modules, ranks=ranks, **entries)
    adapted = load(path, peft=lora, **options)
    merged = load(base(tmp_path / "merged", kind, by_hand(tensors, lora, scale)), **options)

    assert equal(adapted, merged)
    assert not equal(adapted, plain)
    assert type(adapted.model).__name__ == type(merged.model).__name__
    assert not any(".lora_" in key for key in adapted.model.state_dict())

    spec = adapted.describe()
    digest = spec.pop("peft")
    assert spec == plain.describe()
    if kind == "llada":
        simple = adapter(tmp_path / "simple", tensors, modules)
        assert load(path, peft=simple).describe()["peft"] != digest


def test_d2f_is_an_adapter_with_another_attention(tmp_path, caplog, kind="dream"):
    """q, k, v and out of every layer; its folder's name tells what it is."""
    tensors = decoder(bias=True)
    modules = []
    for n in range(LAYERS):
        modules += [f"model.layers.{n}.self_attn.{name}_proj" for name in "qkvo"]
    path = base(tmp_path / "base", kind, tensors)
    lora = adapter(tmp_path / f"D2F_{kind}_Lora", tensors, modules)

    adapted = load(path, peft=lora)
    assert f"is taken as d2f-{kind}" in caplog.text
    assert adapted.family == f"d2f-{kind}"
    assert adapted.attention == "block_causal"
    assert adapted.anchor == "target"
    assert adapted.block == 32

    merged = base(tmp_path / "merged", kind, by_hand(tensors, lora, lambda module: 6 / 3))
    right = load(merged, family=f"d2f-{kind}")
    window = [Window((6, 7), (9, 30, 12))]
    one, other = (DuelEstimator(denoiser, "greedy", "auto").log_prob(window)[0] for denoiser in (adapted, right))
    assert one.token_logprobs == close_nats(other.token_logprobs)
    assert load(path, peft=lora, attention="bidirectional").family == kind  # the user decides


@pytest.mark.parametrize("options", [{}, OWN], ids=["native", "own code"])
def test_a_tied_head_is_changed_alone(tmp_path, options):
    tied = decoder(bias=True, tied=True)
    untied = {**tied, "lm_head.weight": tied["model.embed_tokens.weight"]}
    lora = adapter(tmp_path / "lora", untied, ["lm_head"])
    base_folder = tmp_path / "base"
    base_folder.mkdir()
    merged_folder = tmp_path / "merged"
    merged_folder.mkdir()
    write(base_folder, DREAM, "DreamModel", tied, tie_word_embeddings=True)
    merged = by_hand(untied, lora, lambda module: 6 / 3)
    write(merged_folder, DREAM, "DreamModel", merged, tie_word_embeddings=False)

    adapted = load(str(base_folder), peft=lora, **options)

    assert equal(adapted, load(str(merged_folder), **options))


# ---------------------------------------------------------------- wrong adapters


@pytest.fixture
def qwen3(tmp_path):
    return base(tmp_path / "base", "a2d-qwen3", decoder(norms=True))


def test_adapters_that_do_not_fit(tmp_path, qwen3, monkeypatch):
    good = decoder(norms=True)
    wide = {"model.layers.0.self_attn.q_proj.weight": torch.zeros(16, 20)}
    adapters = {
        "another": adapter(tmp_path / "another", llada(), LLADA_MODULES),
        "wide": adapter(tmp_path / "wide", wide, ["model.layers.0.self_attn.q_proj"]),
        "no lora": adapter(tmp_path / "no lora", good, NATIVE_MODULES, peft_type="IA3"),
        "nowhere": str(tmp_path / "nowhere"),
    }
    for name, path in adapters.items():
        with pytest.raises(DuelError, match=rf"adapter .*{name}|only LoRA"):
            load(qwen3, peft=path)

    lora = adapter(tmp_path / "lora", good, NATIVE_MODULES)
    file = tmp_path / "lora" / "adapter_model.safetensors"
    factors = load_file(file)
    missing = f"{PREFIX}{NATIVE_MODULES[0]}.lora_B.weight"
    # peft would put the weight of a norm in the place of the network's own
    with_a_norm = {**factors, f"{PREFIX}model.norm.weight": torch.ones(16)}
    with_another_tensor = {**factors, f"{PREFIX}model.norm.bias": torch.ones(16)}
    del with_another_tensor[missing]
    for message, tensors in (
        ("1 unknown: .*norm.weight", with_a_norm),
        (f"1 missing: {missing}; 1 unknown: .*norm.bias", with_another_tensor),
    ):
        save_file(tensors, file, metadata={"format": "pt"})
        with pytest.raises(DuelError, match=message):
            load(qwen3, peft=lora)

    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(DuelError, match="pip install peft"):
        load(qwen3, peft=lora)


# ---------------------------------------------------------------- adapters in memory


def test_adapters_outside_of_the_layers_are_refused():
    peft = pytest.importorskip("peft")
    config = peft.PromptTuningConfig(num_virtual_tokens=2, task_type="CAUSAL_LM")
    model = peft.get_peft_model(tiny.network("gpt2"), config)
    with pytest.raises(DuelError, match="PROMPT_TUNING"):
        TextDuel.from_model(model, mask_token_id=4, attention="bidirectional")


def test_a_digest_knows_the_scale_of_an_adapter():
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(tiny.network("bert"), peft.LoraConfig(target_modules=["query"]))
    duel = TextDuel.from_model(model, mask_token_id=4, weights="digest")
    first = duel.fingerprint
    assert duel.fingerprint == first
    model.base_model.model.bert.encoder.layer[0].attention.self.query.scaling["default"] *= 2
    assert duel.fingerprint != first
