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
LLADA_MODULES = [f"model.transformer.blocks.{n}.{name}" for n in range(LAYERS) for name in ("attn_out", "ff_out")]
OWN = {"backend": "remote", "trust_remote_code": True}
LLADA_MODULES.append("model.transformer.ff_out")  # the head


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
    folder.mkdir(exist_ok=True)
    native = {"a2d-qwen3": QWEN3, "llama": {**SIZE, "architectures": ["LlamaForCausalLM"], "model_type": "llama"}}
    if kind in native:
        return write(folder, "", "", tensors, native[kind])
    code, name, config = {"llada": (LLADA, "LLaDAModelLM", LLADA_SIZE), "dream": (DREAM, "DreamModel", None)}[kind]
    return write(folder, code, name, tensors, config)


def load(path, **options):
    return denoisers.load(path, device="cpu", **options)


def equal(one, other):
    ids = torch.randint(5, 34, (3, 13), generator=torch.Generator().manual_seed(5))
    found = [denoiser.head(denoiser.features(ids, None).flatten(0, 1)) for denoiser in (one, other)]
    return (found[0] - found[1]).abs().max() <= 1e-4


def patterned(name):
    """Entries of a config that give modules of this name other ranks and scales, and the scale of each module."""
    entries = {"rank_pattern": {name: 2}, "alpha_pattern": {f"1\\.(.*\\.)?{name}": 5}}
    scale = lambda m: (5 if ".1." in m and m.endswith(name) else 6) / (2 if m.endswith(name) else 3)  # noqa: E731
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
    right = load(base(tmp_path / "merged", kind, by_hand(tensors, lora, scale)), **options)
    assert equal(adapted, right) and not equal(adapted, plain)
    assert type(adapted.model).__name__ == type(right.model).__name__
    assert not any(".lora_" in key for key in adapted.model.state_dict())
    specs = [denoiser.describe() for denoiser in (plain, adapted)]
    assert "peft" not in specs[0] and {**specs[1], "peft": None} == {**specs[0], "peft": None}
    if kind == "llada":
        simple = adapter(tmp_path / "simple", tensors, modules)
        assert load(path, peft=simple).describe()["peft"] != specs[1]["peft"]


def test_d2f_is_an_adapter_with_another_attention(tmp_path, caplog, kind="dream"):
    """q, k, v and out of every layer; its folder's name tells what it is."""
    tensors = decoder(bias=True)
    names = ("q_proj", "k_proj", "v_proj", "o_proj")
    modules = [f"model.layers.{n}.self_attn.{name}" for n in range(LAYERS) for name in names]
    path = base(tmp_path / "base", kind, tensors)
    lora = adapter(tmp_path / f"D2F_{kind}_Lora", tensors, modules)
    adapted = load(path, peft=lora)
    assert f"is taken as d2f-{kind}" in caplog.text
    found = (adapted.family, adapted.attention, adapted.anchor, adapted.block)
    assert found == (f"d2f-{kind}", "block_causal", "target", 32)
    merged = base(tmp_path / "merged", kind, by_hand(tensors, lora, lambda module: 6 / 3))
    right = load(merged, family=f"d2f-{kind}")
    window = [Window((6, 7), (9, 30, 12))]
    one, other = (DuelEstimator(denoiser, "greedy", "auto").log_prob(window)[0] for denoiser in (adapted, right))
    assert one.token_logprobs == close_nats(other.token_logprobs)
    assert load(path, peft=lora, attention="bidirectional").family == kind  # the user decides


@pytest.mark.parametrize("options", [{}, OWN], ids=["native", "own code"])
def test_a_tied_head_is_changed_alone(tmp_path, options):
    tensors = decoder(bias=True, tied=True)
    full = {**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"]}
    paths = [tmp_path / "base", tmp_path / "merged"]
    lora = adapter(tmp_path / "lora", full, ["lm_head"])
    for path, weights in zip(paths, (tensors, by_hand(full, lora, lambda module: 6 / 3)), strict=True):
        path.mkdir()
        write(path, DREAM, "DreamModel", weights, tie_word_embeddings=weights is tensors)
    assert equal(load(str(paths[0]), peft=lora, **options), load(str(paths[1]), **options))


# ---------------------------------------------------------------- wrong adapters


@pytest.fixture
def qwen3(tmp_path):
    return base(tmp_path / "base", "a2d-qwen3", decoder(norms=True))


def test_adapters_that_do_not_fit(tmp_path, qwen3, monkeypatch):
    wide = {"model.layers.0.self_attn.q_proj.weight": torch.zeros(16, 20)}
    good = decoder(norms=True)
    lora = adapter(tmp_path / "lora", good, NATIVE_MODULES)
    file = tmp_path / "lora" / "adapter_model.safetensors"
    for name, path in {
        "another": adapter(tmp_path / "another", llada(), LLADA_MODULES),
        "wide": adapter(tmp_path / "wide", wide, ["model.layers.0.self_attn.q_proj"]),
        "no lora": adapter(tmp_path / "no lora", good, NATIVE_MODULES, peft_type="IA3"),
        "nowhere": str(tmp_path / "nowhere"),
    }.items():
        with pytest.raises(DuelError, match=rf"adapter .*{name}|only LoRA"):
            load(qwen3, peft=path)
    factors = load_file(file)
    gone = f"{PREFIX}{NATIVE_MODULES[0]}.lora_B.weight"
    weight = f"{PREFIX}model.norm.weight"  # peft would put it in the place of the network's own
    extra = {f"{PREFIX}model.norm.bias": torch.ones(16)}
    for words, tensors in (
        ("1 unknown: .*norm.weight", {**factors, weight: torch.ones(16)}),
        (f"1 missing: {gone}; 1 unknown: .*norm.bias", {k: v for k, v in factors.items() if k != gone} | extra),
    ):
        save_file(tensors, file, metadata={"format": "pt"})
        with pytest.raises(DuelError, match=words):
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
