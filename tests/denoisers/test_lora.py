"""LoRA adapters: merged as by hand, under native names and a family's own; wrong ones are refused."""

import json
import sys

import pytest
import tiny
import torch
from close import close_nats
from lora_adapters import NATIVE_MODULES, adapter
from own import DREAM, LAYERS, LLADA, LLADA_SIZE, SIZE, decoder, llada, write
from safetensors.torch import load_file, save_file

from lm_eval_duel import Duel as TextDuel
from lm_eval_duel import denoisers
from lm_eval_duel.core.windows import Window
from lm_eval_duel.denoisers.hf.lora import PREFIX
from lm_eval_duel.errors import DuelError
from lm_eval_duel.estimators.duel import DuelEstimator

peft = pytest.importorskip("peft")

QWEN3 = {**SIZE, "architectures": ["A2DQwen3LMHeadModel"], "model_type": "a2d-qwen3"}
LLADA_MODULES = [f"model.transformer.blocks.{n}.{name}" for n in range(LAYERS) for name in ("attn_out", "ff_out")]
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
    if kind == "a2d-qwen3":
        return write(folder, "", "A2DQwen3LMHeadModel", tensors, QWEN3)
    return write(
        folder, *{"llada": (LLADA, "LLaDAModelLM", tensors, LLADA_SIZE), "dream": (DREAM, "DreamModel", tensors)}[kind]
    )


def load(path, **options):
    return denoisers.load(path, device="cpu", **options)


def equal(one, other):
    ids = torch.randint(5, 34, (3, 13), generator=torch.Generator().manual_seed(5))
    found = [denoiser.head(denoiser.features(ids, None).flatten(0, 1)) for denoiser in (one, other)]
    return (found[0] - found[1]).abs().max() <= 1e-4


OWN = {"backend": "remote", "trust_remote_code": True}


@pytest.mark.parametrize(
    "kind, options, modules",
    [
        ("a2d-qwen3", {}, NATIVE_MODULES),
        ("llada", {}, LLADA_MODULES),
        ("llada", OWN, LLADA_MODULES),
        ("dream", OWN, NATIVE_MODULES),
    ],
    ids=["native names", "own names in a native class", "own code", "own code, shifted"],
)
def test_equals_weights_merged_by_hand(tmp_path, kind, options, modules):
    tensors = {"a2d-qwen3": lambda: decoder(norms=True), "llada": llada, "dream": lambda: decoder(bias=True)}[kind]()
    path = base(tmp_path / "base", kind, tensors)
    lora = adapter(tmp_path / "lora", tensors, modules)
    adapted = load(path, peft=lora, **options)
    right = load(base(tmp_path / "merged", kind, by_hand(tensors, lora, lambda module: 6 / 3)), **options)
    assert equal(adapted, right) and not equal(adapted, load(path, **options))
    assert type(adapted.model).__name__ == type(right.model).__name__
    assert not any(".lora_" in name for name in adapted.model.state_dict())


@pytest.mark.parametrize("kind", ["llada", "dream"])
def test_d2f_is_an_adapter_with_another_attention(tmp_path, caplog, kind):
    """q, k, v and out of every layer, under the names of the base's own code; its folder's name tells what it is."""
    tensors = llada() if kind == "llada" else decoder(bias=True)
    before = "model.transformer.blocks.{}." if kind == "llada" else "model.layers.{}.self_attn."
    names = ("q_proj", "k_proj", "v_proj", "attn_out" if kind == "llada" else "o_proj")
    modules = [before.format(n) + name for n in range(LAYERS) for name in names]
    path = base(tmp_path / "base", kind, tensors)
    lora = adapter(tmp_path / f"D2F_{kind}_Lora", tensors, modules)
    adapted = load(path, peft=lora)
    assert f"By its name the adapter {lora} makes {path} a d2f-{kind}. Set family= to decide" in caplog.text
    assert (adapted.family, adapted.attention, adapted.anchor, adapted.block) == (
        f"d2f-{kind}",
        "block_causal",
        "target",
        32,
    )
    merged = base(tmp_path / "merged", kind, by_hand(tensors, lora, lambda module: 6 / 3))
    right = load(merged, family=f"d2f-{kind}")
    window = [Window((6, 7), (9, 30, 12))]
    one, other = (DuelEstimator(denoiser, "greedy").log_prob(window)[0] for denoiser in (adapted, right))
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


@pytest.mark.parametrize("kind", ["a2d-qwen3", "llada"])
def test_ranks_and_scales_of_single_modules(tmp_path, kind):
    """Patterns of names in the adapter's config hold for the names in its file."""
    tensors = decoder(norms=True) if kind == "a2d-qwen3" else llada()
    modules, name = (NATIVE_MODULES, "q_proj") if kind == "a2d-qwen3" else (LLADA_MODULES, "attn_out")
    path = base(tmp_path / "base", kind, tensors)
    patterns = {"rank_pattern": {name: 2}, "alpha_pattern": {f"1\\.(.*\\.)?{name}": 5}}
    lora = adapter(tmp_path / "lora", tensors, modules, ranks={name: 2}, **patterns)

    def scale(module):
        rank = 2 if module.endswith(name) else 3
        return (5 if ".1." in module and module.endswith(name) else 6) / rank

    right = load(base(tmp_path / "merged", kind, by_hand(tensors, lora, scale)))
    assert equal(load(path, peft=lora), right)
    stable = adapter(tmp_path / "stable", tensors, modules, use_rslora=True)
    right = load(base(tmp_path / "merged", kind, by_hand(tensors, stable, lambda module: 6 / 3**0.5)))
    assert equal(load(path, peft=stable), right)


@pytest.mark.parametrize("options", [{}, OWN], ids=["native", "own code"])
def test_the_adapter_is_part_of_the_law(tmp_path, options):
    tensors = llada()
    path = base(tmp_path / "base", "llada", tensors)
    first = load(path, peft=adapter(tmp_path / "first", tensors, LLADA_MODULES), **options).describe()
    again = load(path, peft=adapter(tmp_path / "again", tensors, LLADA_MODULES), **options).describe()
    other = load(path, peft=adapter(tmp_path / "other", tensors, LLADA_MODULES[:1]), **options).describe()
    assert "peft" not in load(path, **options).describe()
    assert first == again and first["peft"] != other["peft"]
    assert {**first, "peft": None} == {**other, "peft": None}


# ---------------------------------------------------------------- wrong adapters


@pytest.fixture
def qwen3(tmp_path):
    return base(tmp_path / "base", "a2d-qwen3", decoder(norms=True))


def test_adapters_of_another_network(tmp_path, qwen3):
    lora = adapter(tmp_path / "lora", llada(), LLADA_MODULES)
    with pytest.raises(DuelError, match=r"lora.*blocks\.0\.attn_out"):
        load(qwen3, peft=lora)
    wide = {"model.layers.0.self_attn.q_proj.weight": torch.zeros(16, 20)}
    lora = adapter(tmp_path / "wide", wide, ["model.layers.0.self_attn.q_proj"])
    with pytest.raises(DuelError, match=r"Cannot read adapter .*wide.*size mismatch for .*q_proj\.lora_A"):
        load(qwen3, peft=lora)
    lora = adapter(tmp_path / "ranks", decoder(norms=True), NATIVE_MODULES, r=17)
    with pytest.raises(DuelError, match=r"Cannot read adapter .*ranks.*size mismatch for .*lora_A"):
        load(qwen3, peft=lora)


def test_tensors_that_have_no_place_or_are_not_there(tmp_path, qwen3):
    lora = adapter(tmp_path / "lora", decoder(norms=True), NATIVE_MODULES)
    file = tmp_path / "lora" / "adapter_model.safetensors"
    factors = load_file(file)
    extra = f"{PREFIX}model.norm.bias"
    save_file({**factors, extra: torch.ones(16)}, file, metadata={"format": "pt"})
    with pytest.raises(DuelError, match=f"1 unknown: {extra}"):
        load(qwen3, peft=lora)
    weight = f"{PREFIX}model.norm.weight"  # peft would put it in the place of the network's own
    save_file({**factors, weight: torch.ones(16)}, file, metadata={"format": "pt"})
    with pytest.raises(DuelError, match=rf"does not fit this network: 1 unknown: {weight}\."):
        load(qwen3, peft=lora)
    gone = f"{PREFIX}{NATIVE_MODULES[0]}.lora_B.weight"
    save_file({key: factors[key] for key in factors if key != gone} | {extra: torch.ones(16)}, file)
    with pytest.raises(DuelError, match=rf"1 missing: {gone}; 1 unknown: {extra}\."):
        load(qwen3, peft=lora)
    save_file({extra: torch.ones(16)}, file, metadata={"format": "pt"})
    with pytest.raises(DuelError, match=r"adapter .*lora"):
        load(qwen3, peft=lora)


def test_adapters_that_are_no_lora(tmp_path, qwen3):
    lora = adapter(tmp_path / "lora", decoder(norms=True), NATIVE_MODULES)
    config = {"peft_type": "IA3", "target_modules": ["q_proj"], "feedforward_modules": []}
    (tmp_path / "lora" / "adapter_config.json").write_text(json.dumps(config))
    with pytest.raises(DuelError, match=r"The adapter .*lora is a .*IA3; only LoRA can be merged"):
        load(qwen3, peft=lora)


def test_folders_without_an_adapter(tmp_path, qwen3):
    for wrong in (qwen3, str(tmp_path / "nowhere")):
        with pytest.raises(DuelError, match=f"Cannot read adapter '{wrong}': "):
            load(qwen3, peft=wrong)
    lora = adapter(tmp_path / "lora", decoder(norms=True), NATIVE_MODULES)
    (tmp_path / "lora" / "adapter_model.safetensors").unlink()
    with pytest.raises(DuelError, match="Cannot read adapter"):
        load(qwen3, peft=lora)


def test_without_the_package(tmp_path, qwen3, monkeypatch):
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(DuelError, match=r"Cannot read adapter .*lora.* pip install peft"):
        load(qwen3, peft=str(tmp_path / "lora"))


# ---------------------------------------------------------------- adapters in memory


@pytest.mark.parametrize("kind", ["PromptTuningConfig", "PrefixTuningConfig"])
def test_adapters_outside_of_the_layers_are_refused(kind):
    config = getattr(peft, kind)(num_virtual_tokens=2, task_type="CAUSAL_LM")
    model = peft.get_peft_model(tiny.network("gpt2"), config)
    with pytest.raises(DuelError, match=r"A P.*_TUNING adapter works outside of the network's layers"):
        TextDuel.from_model(model, mask_token_id=4, attention="bidirectional")


def test_a_digest_knows_the_scale_of_an_adapter():
    model = peft.get_peft_model(tiny.network("bert"), peft.LoraConfig(target_modules=["query"]))
    duel = TextDuel.from_model(model, mask_token_id=4, weights="digest")
    first = duel.fingerprint
    assert duel.fingerprint == first
    model.base_model.model.bert.encoder.layer[0].attention.self.query.scaling["default"] *= 2
    assert duel.fingerprint != first
