"""Quantized networks: numbers of those that bitsandbytes makes or a file holds, strict loading, and what is refused."""

import importlib.util
import json
import re
import sys
from pathlib import Path

import own
import pytest
import tiny
import torch
import transformers
from lora_adapters import NATIVE_MODULES, adapter
from safetensors.torch import load_file, save_file
from textbook import score

from lm_eval_duel import denoisers, rules
from lm_eval_duel.core.windows import Window
from lm_eval_duel.errors import DuelError
from lm_eval_duel.estimators.duel import DuelEstimator
from lm_eval_duel.fingerprint import digest

WIDTH, INNER = 64, 128  # what the 4-bit kernels of a CPU take
QWEN3 = {
    **own.SIZE,
    "architectures": ["A2DQwen3LMHeadModel"],
    "model_type": "a2d-qwen3",
    "hidden_size": WIDTH,
    "intermediate_size": INNER,
    "head_dim": 16,
}
LLADA = {**own.LLADA_SIZE, "d_model": WIDTH, "mlp_hidden_size": INNER}
WINDOWS = [Window((6,), (7, 9, 30, 12, 8, 15, 21, 11)), Window((22, 6, 17, 17, 2), (33, 6, 7, 18))]
BITS = [8, 4]
LINEAR = re.compile(r"(_proj|attn_out|blocks\.\d+\.ff_out)\.weight$")  # tensors that are quantized
NOT_WHOLE = r"do not fill Qwen3ForCausalLM|does not run|Cannot read checkpoint"


@pytest.fixture
def base(tmp_path, monkeypatch):
    """A checkpoint folder of a kind, not quantized, or with what `changed` makes of its tensors."""
    monkeypatch.setattr(own, "WIDTH", WIDTH)
    monkeypatch.setattr(own, "INNER", INNER)

    def of(kind, changed=lambda tensors: tensors, name="base", **entries):
        folder = tmp_path / name
        folder.mkdir(exist_ok=True)
        if kind in ("bert", "gpt2"):
            return tiny.checkpoint(folder, kind)
        if kind == "llada":
            return own.write(folder, own.LLADA, "LLaDAModelLM", changed(own.llada()), LLADA, **entries)
        if kind == "sdar":
            classes = {"architectures": ["SDARForCausalLM"], "model_type": "sdar", "block_size": 4}
            return own.write(folder, "", "", changed(own.decoder(norms=True)), {**QWEN3, **classes}, **entries)
        return own.write(folder, "", "", changed(own.decoder(norms=True)), QWEN3, **entries)

    return of


def load(path, **options):
    causal = {"attention": "causal"} if read(path)["model_type"] == "gpt2" else {}
    return denoisers.load(path, device="cpu", **options, **causal)


@torch.inference_mode()  # as in scoring: bitsandbytes has another kernel for calls with gradients
def logits(denoiser):
    """Logits of arbitrary rows (3, 12, V), of the tokens alone."""
    ids = torch.randint(5, 34, (3, 12), generator=torch.Generator().manual_seed(5))
    if denoiser.attention == "block_causal":
        place = torch.arange(12)
        seen = (place[:, None] // denoiser.block >= place // denoiser.block).expand(3, -1, -1)
        features = denoiser.stream(ids, place.expand(3, -1), seen, None)[0]
    else:
        features = denoiser.features(ids, None)
    return denoiser.head(features.flatten(0, 1)).double()[:, ~denoiser.excluded]


def apart(one, other):
    """The root mean square difference of two networks' logits, in units of their spread."""
    a, b = logits(one), logits(other)
    return float((a - b).pow(2).mean().sqrt() / b.std())


def read(folder):
    """The config.json of a folder."""
    return json.loads(Path(folder, "config.json").read_text())


# ---------------------------------------------------------------- made so at load, by bitsandbytes


def by_hand(bits):
    """The tensors as `bits` of bitsandbytes keep them."""

    def of(value):
        if bits == 8:
            scale = value.abs().amax(1, keepdim=True) / 127
            return (value / scale).round() * scale
        from bitsandbytes.functional import dequantize_4bit, quantize_4bit

        return dequantize_4bit(*quantize_4bit(value.contiguous(), quant_type="nf4"))

    return lambda tensors: {key: of(value) if LINEAR.search(key) else value for key, value in tensors.items()}


@pytest.mark.parametrize(
    ("kind", "bits"),
    [("qwen3", 4), ("llada", 8), *(pytest.param("sdar", bits, marks=pytest.mark.slow) for bits in BITS)],
)
def test_equals_the_network_of_weights_rounded_by_hand(base, kind, bits):
    pytest.importorskip("bitsandbytes")
    whole, rounded = load(base(kind)), load(base(kind, by_hand(bits), "rounded"))
    found = load(base(kind), **{f"load_in_{bits}bit": True})
    # 8 bits round a product's inputs too; 4 bits are multiplied in bfloat16 on some CPUs
    assert apart(found, rounded) < 0.1 and apart(rounded, whole) > 0.01
    assert apart(found, rounded) < apart(found, whole) or bits == 8
    assert found.relative_positions == whole.relative_positions and found.honours_padding == whole.honours_padding
    head = found.model.get_output_embeddings()
    assert type(head) is torch.nn.Linear and type(found.layers.layers[0].mlp.up_proj) is not torch.nn.Linear


def test_lanes_equal_the_textbook_loop_over_the_quantized_network(base):
    """4 bits: with 8, the rows of a call are not independent of each other."""
    pytest.importorskip("bitsandbytes")
    denoiser = load(base("qwen3"), load_in_4bit=True, dtype="bfloat16")

    @torch.inference_mode()
    def plain(ids):
        mask = torch.zeros(1, 1, len(ids), len(ids), dtype=denoiser.dtype)
        return denoiser.model(input_ids=ids[None], attention_mask=mask, use_cache=False).logits[0]

    for window, scored in zip(WINDOWS, DuelEstimator(denoiser, "greedy", 4).log_prob(WINDOWS), strict=True):
        right = score(plain, denoiser.mask_id, denoiser.excluded, rules.parse("greedy"), 4, window)
        assert scored.near_ties == 0 and scored.reveal_steps == right[1]
        assert scored.token_logprobs == pytest.approx(right[2], abs=0.05)


def test_the_quantization_is_part_of_the_law(base, caplog):
    pytest.importorskip("bitsandbytes")
    path = base("qwen3")
    specs = []
    for said, warned in (({}, False), ({"load_in_4bit": True}, False), ({"load_in_8bit": True}, True)):
        specs.append(load(path, **said).describe())
        assert ("change a little with the batch" in caplog.text) == warned
    whole = sum(value.numel() for key, value in own.decoder(norms=True).items() if not LINEAR.search(key))
    assert len({digest(spec) for spec in specs}) == 3
    assert [json.loads(spec.pop("quantization", "null")) for spec in specs] == [
        None,
        {"bnb_4bit_quant_type": "nf4", "load_in_4bit": True, "quant_method": "bitsandbytes", "whole_parameters": whole},
        {"load_in_8bit": True, "quant_method": "bitsandbytes", "whole_parameters": whole},
    ]
    assert specs[0] == specs[1] == specs[2]
    half = load(path, load_in_4bit=True, dtype="bfloat16")
    assert '"bnb_4bit_compute_dtype": "bfloat16"' in half.describe()["quantization"]


# ---------------------------------------------------------------- files that are quantized


@pytest.fixture
def packed(base, tmp_path):
    """A folder of a kind whose tensors and config are as transformers saves its quantized network."""
    pytest.importorskip("bitsandbytes")
    names = {"embed_tokens": "wte", "norm": "ln_f"}
    layers = {
        "self_attn.o_proj": "attn_out",
        "self_attn.": "",
        "mlp.gate_proj": "ff_proj",
        "mlp.up_proj": "up_proj",
        "mlp.down_proj": "ff_out",
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ff_norm",
        "model.layers.": "model.transformer.blocks.",
    }

    def own_name(key):
        for native, name in layers.items() if ".layers." in key else ():
            key = key.replace(native, name)
        for native, name in names.items():
            key = key.replace(f"model.{native}.", f"model.transformer.{name}.")
        return key.replace("lm_head.", "model.transformer.ff_out.")

    def of(kind, bits, change=lambda tensors: tensors):
        made = load(base(kind), **{f"load_in_{bits}bit": True})
        made.model.save_pretrained(tmp_path / "saved")
        folder = tmp_path / "packed"
        path = base(kind, name="packed")
        tensors = load_file(tmp_path / "saved" / "model.safetensors")
        tensors = {own_name(key): value for key, value in tensors.items()} if kind == "llada" else tensors
        save_file(change(tensors), folder / "model.safetensors", metadata={"format": "pt"})
        said = read(tmp_path / "saved")["quantization_config"]
        if kind == "llada":
            said["llm_int8_skip_modules"] = ["model.transformer.ff_out"]
        (folder / "config.json").write_text(json.dumps({**read(folder), "quantization_config": said}))
        return path, made

    return of


@pytest.mark.parametrize(("kind", "bits"), [("qwen3", 8), ("sdar", 4), ("llada", 4), ("bert", 8), ("gpt2", 8)])
def test_a_file_of_a_quantized_network_is_that_network(base, packed, kind, bits):
    path, made = packed(kind, bits)
    found = load(path)
    assert torch.equal(logits(found), logits(made)) and apart(made, load(base(kind, name="whole"))) > 0.001
    assert json.loads(found.describe()["quantization"]).items() >= {f"load_in_{bits}bit": True}.items()


@pytest.mark.parametrize("bits", BITS)
def test_every_tensor_of_a_quantized_file_has_its_place(packed, bits):
    layer = "model.layers.0.mlp.up_proj."
    key, scales = f"{layer}weight", {8: f"{layer}SCB", 4: f"{layer}weight.absmax"}[bits]
    whole = own.decoder(norms=True)[key]
    broken = [
        (r"unknown: model\.layers\.0\.mlp\.up_proj\.extra", lambda t: {**t, f"{layer}extra": torch.ones(2)}),
        (NOT_WHOLE, lambda t: {k: v for k, v in t.items() if k != key}),
        (NOT_WHOLE, lambda t: {k: v for k, v in t.items() if k != scales}),
    ]
    if bits == 4 or not transformers.__version__.startswith("4."):  # which quantizes it as the others are
        broken.append((NOT_WHOLE, lambda t: {k: v for k, v in t.items() if not k.startswith(layer)} | {key: whole}))
    for words, change in broken:
        path, _ = packed("qwen3", bits, change)
        with pytest.raises(DuelError, match=words):
            load(path)


def test_a_file_has_quantized_what_the_network_has_not(packed):
    head = {"lm_head.weight": torch.ones(own.ROWS, WIDTH, dtype=torch.int8), "lm_head.SCB": torch.ones(own.ROWS)}
    path, _ = packed("qwen3", 8, lambda tensors: {**tensors, **head})
    with pytest.raises(DuelError, match=NOT_WHOLE):
        load(path)
    scale = "bert.encoder.layer.0.output.LayerNorm.weight_scale_inv"
    path, _ = packed("bert", 8, lambda tensors: {**tensors, scale: torch.ones(3)})
    with pytest.raises(DuelError, match=rf"so it would misread their weights: {re.escape(scale)}"):
        load(path)


@pytest.mark.skipif(transformers.__version__.startswith("4."), reason="does not save torchao's weights alike")
def test_files_of_torchao(base, tmp_path):
    torchao = pytest.importorskip("torchao")
    path, whole = base("qwen3"), load(base("qwen3"))
    weights = torchao.quantization.Int8WeightOnlyConfig()
    config = transformers.Qwen3Config(
        **{key: QWEN3[key] for key in QWEN3 if key not in ("architectures", "model_type")}
    )
    made = transformers.Qwen3ForCausalLM.from_pretrained(
        path, config=config, dtype=torch.float32, quantization_config=transformers.TorchAoConfig(weights)
    )
    made.save_pretrained(tmp_path / "saved")
    raw = {**read(path), "quantization_config": read(tmp_path / "saved")["quantization_config"]}
    Path(path, "config.json").write_text(json.dumps(raw))
    (tmp_path / "saved" / "model.safetensors").replace(tmp_path / "base" / "model.safetensors")
    found = load(path)
    assert 0.001 < apart(found, whole) < 0.3 and '"quant_method": "torchao"' in found.describe()["quantization"]
    ids = torch.tensor([[6, 7, 9, 30]])
    right = made(input_ids=ids, attention_mask=torch.zeros(1, 1, 4, 4)).logits[0]
    assert (found.head(found.features(ids, None)[0]) - right).abs().max() < 1e-4


@pytest.mark.skipif(transformers.__version__.startswith("4."), reason="other tensors of this package")
@pytest.mark.parametrize("kind", ["qwen3", "llada"])
def test_files_of_compressed_tensors(base, kind):
    """Which unpacks its weights when the whole network is called first."""
    package = pytest.importorskip("compressed_tensors.compressors")
    said = {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "ignore": ["model.transformer.ff_out" if kind == "llada" else "lm_head"],
        "config_groups": {"all": {"targets": ["Linear"], "weights": {"num_bits": 8, "strategy": "channel"}}},
    }

    def packed(tensors):
        found = {}
        for key, value in tensors.items():
            if LINEAR.search(key):
                scale = value.abs().amax(1, keepdim=True) / 127
                found[f"{key}_packed"] = package.pack_to_int32((value / scale).round().to(torch.int8), 8)
                found |= {f"{key}_scale": scale, f"{key}_shape": torch.tensor(value.shape)}
            else:
                found[key] = value
        return found

    found, rounded = (
        load(base(kind, packed, "packed", quantization_config=said)),
        load(base(kind, by_hand(8), "rounded")),
    )
    assert apart(found, rounded) < 1e-5 < apart(found, load(base(kind)))
    assert '"quant_method": "compressed-tensors"' in found.describe()["quantization"]


@pytest.mark.skipif(transformers.__version__.startswith("4."), reason="takes GPUs for 8-bit floats")
def test_files_of_8_bit_floats(base, kind="llada"):
    """A GPU multiplies them as they are; for a CPU transformers makes floats of them: a network like any other."""

    def small(tensors):
        found = {}
        for key, value in tensors.items():
            if LINEAR.search(key):
                tiles = value.unflatten(0, (-1, 16)).unflatten(2, (-1, 16))  # (O, 16, I, 16)
                scale = tiles.abs().amax((1, 3), keepdim=True) / 448
                found[key] = (tiles / scale).flatten(2).flatten(0, 1).to(torch.float8_e4m3fn)
                found[f"{key}_scale_inv"] = scale[:, 0, :, 0].contiguous()
            else:
                found[key] = value
        return found

    def large(tensors):
        found = small(tensors)
        for key in [key for key in found if LINEAR.search(key)]:
            scale = found.pop(f"{key}_scale_inv").repeat_interleave(16, 0).repeat_interleave(16, 1)
            found[key] = found[key].float() * scale
        return found

    said = {"quant_method": "fp8", "weight_block_size": [16, 16], "activation_scheme": "dynamic"}
    found, right = load(base(kind, small, "small", quantization_config=said)), load(base(kind, large, "large"))
    assert apart(found, right) < 0.02 < apart(found, load(base(kind)))
    assert not found.quantized and "quantization" not in found.describe()


# ---------------------------------------------------------------- what is refused


def test_packages_that_are_missing(base, monkeypatch):
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    for bits in BITS:
        with pytest.raises(DuelError, match="bitsandbytes"):
            load(base("qwen3"), **{f"load_in_{bits}bit": True})


@pytest.mark.skipif(importlib.util.find_spec("optimum") is not None, reason="the package is there")
@pytest.mark.parametrize("kind", ["qwen3", "bert"])
def test_packages_that_a_file_needs(base, kind):
    path = base(kind)
    raw = read(path)
    for method, needed in (("gptq", "optimum"), ("mystery", "mystery")):
        said = {"quant_method": method, "bits": 4}
        Path(path, "config.json").write_text(json.dumps({**raw, "quantization_config": said}))
        with pytest.raises(DuelError, match=needed):
            load(path)


def test_what_does_not_go_together(base, tmp_path):
    lora = adapter(tmp_path / "lora", own.decoder(norms=True), NATIVE_MODULES)
    quantized = {"quantization_config": {"quant_method": "bitsandbytes", "load_in_8bit": True}}
    for entries, options, named in (
        ({}, {"load_in_8bit": True, "load_in_4bit": True}, "load_in_8bit and load_in_4bit"),
        ({}, {"load_in_4bit": True, "dtype": "float64"}, "dtype=float64"),
        ({}, {"load_in_8bit": True, "peft": lora}, "peft .*load_in_8bit"),
        (quantized, {"load_in_4bit": True}, "leave load_in_4bit out"),
        (quantized, {"peft": lora}, "peft .*bitsandbytes"),
    ):
        with pytest.raises(DuelError, match=named):
            load(base("qwen3", **entries), **options)
