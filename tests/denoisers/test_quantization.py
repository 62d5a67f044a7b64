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
from laws import slow_but
from lora_adapters import NATIVE_MODULES, adapter
from own import WIDE_QWEN3, WIDTH
from safetensors.torch import load_file, save_file

from lm_eval_duel import denoisers
from lm_eval_duel.errors import DuelError
from lm_eval_duel.fingerprint import digest

LLADA = {**own.LLADA_SIZE, "d_model": WIDTH, "mlp_hidden_size": 2 * WIDTH}
LINEAR = re.compile(r"(_proj|attn_out|blocks\.\d+\.ff_out)\.weight$")  # tensors that are quantized
NOT_WHOLE = r"do not fill Qwen3ForCausalLM|does not run|Cannot read checkpoint"


@pytest.fixture
def base(tmp_path, monkeypatch):
    """A checkpoint folder of a kind, not quantized, or with what `changed` makes of its tensors."""
    own.widen(monkeypatch)

    def of(kind, changed=lambda tensors: tensors, name="base", **entries):
        folder = tmp_path / name
        folder.mkdir(exist_ok=True)
        if kind == "bert":
            return tiny.checkpoint(folder, kind)
        if kind == "llada":
            return own.write(folder, own.LLADA, "LLaDAModelLM", changed(own.llada()), LLADA, **entries)
        return own.write(folder, "", "", changed(own.decoder(norms=True)), WIDE_QWEN3, **entries)

    return of


def load(path, **options):
    return denoisers.load(path, device="cpu", **options)


@torch.inference_mode()  # as in scoring: bitsandbytes has another kernel for calls with gradients
def logits(denoiser):
    """Logits of arbitrary rows (3, 12, V), of the tokens alone."""
    ids = torch.randint(5, 34, (3, 12), generator=torch.Generator().manual_seed(5))
    return denoiser.head(denoiser.features(ids, None).flatten(0, 1)).double()[:, ~denoiser.excluded]


def apart(denoiser, other):
    """The root mean square difference of two networks' logits, in units of the other's spread."""
    expected = logits(other)
    return float((logits(denoiser) - expected).pow(2).mean().sqrt() / expected.std())


def read(folder):
    """The config.json of a folder."""
    return json.loads(Path(folder, "config.json").read_text())


# ---------------------------------------------------------------- made so at load, by bitsandbytes


def by_hand(bits):
    """The tensors as `bits` of bitsandbytes keep them."""

    def rounded(value):
        if bits == 8:
            scale = value.abs().amax(1, keepdim=True) / 127
            return (value / scale).round() * scale
        from bitsandbytes.functional import dequantize_4bit, quantize_4bit

        return dequantize_4bit(*quantize_4bit(value.contiguous(), quant_type="nf4"))

    def changed(tensors):
        kept = dict(tensors)
        for key in filter(LINEAR.search, tensors):
            kept[key] = rounded(tensors[key])
        return kept

    return changed


@pytest.mark.parametrize(("kind", "bits"), slow_but([("qwen3", 4), ("llada", 8)], [("llada", 8)]))
def test_equals_the_network_of_weights_rounded_by_hand(base, kind, bits):
    pytest.importorskip("bitsandbytes")
    whole = load(base(kind))
    rounded = load(base(kind, by_hand(bits), "rounded"))

    quantized = load(base(kind), **{f"load_in_{bits}bit": True})

    # 8 bits round a product's inputs too; 4 bits are multiplied in bfloat16 on some CPUs
    assert apart(quantized, rounded) < 0.1
    assert apart(rounded, whole) > 0.01
    assert apart(quantized, rounded) < apart(quantized, whole) or bits == 8
    assert quantized.relative_positions == whole.relative_positions
    assert quantized.honours_padding == whole.honours_padding
    head = quantized.model.get_output_embeddings()
    assert type(head) is torch.nn.Linear
    assert type(quantized.layers.layers[0].mlp.up_proj) is not torch.nn.Linear


def test_the_quantization_is_part_of_the_law(base, caplog):
    pytest.importorskip("bitsandbytes")
    path = base("qwen3")
    warning = "change a little with the batch"
    plain = load(path).describe()
    in_4_bits = load(path, load_in_4bit=True).describe()
    assert warning not in caplog.text
    in_8_bits = load(path, load_in_8bit=True).describe()
    assert warning in caplog.text
    assert len({digest(plain), digest(in_4_bits), digest(in_8_bits)}) == 3

    tensors = own.decoder(norms=True)
    whole = sum(tensor.numel() for key, tensor in tensors.items() if not LINEAR.search(key))
    entry = {"quant_method": "bitsandbytes", "whole_parameters": whole}
    assert json.loads(in_4_bits.pop("quantization")) == {**entry, "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
    assert json.loads(in_8_bits.pop("quantization")) == {**entry, "load_in_8bit": True}
    assert in_4_bits == plain  # which has no such entry
    assert in_8_bits == plain

    half = load(path, load_in_4bit=True, dtype="bfloat16")
    assert '"bnb_4bit_compute_dtype": "bfloat16"' in half.describe()["quantization"]


# ---------------------------------------------------------------- files that are quantized


@pytest.fixture
def packed(base, tmp_path):
    """A file as transformers saves its quantized network, and a function that writes it again with other tensors."""
    pytest.importorskip("bitsandbytes")

    def pack(kind, bits):
        made = load(base(kind), **{f"load_in_{bits}bit": True})
        path = base(kind, name="packed")
        made.model.save_pretrained(tmp_path / "saved")
        config = read(path)
        config["quantization_config"] = read(tmp_path / "saved")["quantization_config"]
        Path(path, "config.json").write_text(json.dumps(config))
        tensors = load_file(tmp_path / "saved" / "model.safetensors")
        return made, path, tensors, lambda changed: save_file(changed, f"{path}/model.safetensors", {"format": "pt"})

    return pack


@pytest.mark.parametrize(("kind", "bits"), [("qwen3", 4), ("bert", 8)])
def test_a_file_of_a_quantized_network_is_that_network_and_every_tensor_has_its_place(base, packed, kind, bits):
    made, path, tensors, save = packed(kind, bits)
    save(tensors)
    denoiser = load(path)
    assert torch.equal(logits(denoiser), logits(made))
    assert apart(made, load(base(kind, name="whole"))) > 0.001
    assert json.loads(denoiser.describe()["quantization"])[f"load_in_{bits}bit"] is True

    if kind == "bert":
        scale = "bert.encoder.layer.0.output.LayerNorm.weight_scale_inv"
        broken = [(rf"so it would misread their weights: {re.escape(scale)}", (), {scale: torch.ones(3)})]
    else:
        layer = "model.layers.0.mlp.up_proj."
        whole = {f"{layer}weight": own.decoder(norms=True)[f"{layer}weight"]}
        head = {"lm_head.weight": torch.ones(tiny.ROWS, WIDTH, dtype=torch.int8), "lm_head.SCB": torch.ones(tiny.ROWS)}
        broken = [
            (r"unknown: model\.layers\.0\.mlp\.up_proj\.extra", (), {f"{layer}extra": torch.ones(2)}),
            (NOT_WHOLE, [f"{layer}weight"], {}),
            (NOT_WHOLE, [f"{layer}weight.absmax"], {}),
            (NOT_WHOLE, [key for key in tensors if key.startswith(layer)], whole),
            (NOT_WHOLE, (), head),
        ]
    for message, missing, added in broken:
        others = {key: value for key, value in tensors.items() if key not in missing}
        save({**others, **added})
        with pytest.raises(DuelError, match=message):
            load(path)


@pytest.mark.skipif(transformers.__version__.startswith("4."), reason="takes GPUs for 8-bit floats")
def test_files_of_8_bit_floats(base, kind="llada"):
    """A GPU multiplies them as they are; for a CPU transformers makes floats of them: a network like any other."""

    def small(tensors):
        made = dict(tensors)
        for key in filter(LINEAR.search, tensors):
            tiles = tensors[key].unflatten(0, (-1, 16)).unflatten(2, (-1, 16))  # (O, 16, I, 16)
            scale = tiles.abs().amax((1, 3), keepdim=True) / 448
            made[key] = (tiles / scale).flatten(2).flatten(0, 1).to(torch.float8_e4m3fn)
            made[f"{key}_scale_inv"] = scale[:, 0, :, 0].contiguous()
        return made

    def large(tensors):
        made = small(tensors)
        for key in filter(LINEAR.search, tensors):
            scale = made.pop(f"{key}_scale_inv").repeat_interleave(16, 0).repeat_interleave(16, 1)
            made[key] = made[key].float() * scale
        return made

    entry = {"quant_method": "fp8", "weight_block_size": [16, 16], "activation_scheme": "dynamic"}
    denoiser = load(base(kind, small, "small", quantization_config=entry))

    rounded = load(base(kind, large, "large"))
    whole = load(base(kind))
    assert apart(denoiser, rounded) < 0.02
    assert apart(denoiser, whole) > 0.02
    assert not denoiser.quantized
    assert "quantization" not in denoiser.describe()


# ---------------------------------------------------------------- what is refused


def test_what_does_not_go_together(base, tmp_path, monkeypatch):
    lora = adapter(tmp_path / "lora", own.decoder(norms=True), NATIVE_MODULES)
    quantized = {"quant_method": "bitsandbytes", "load_in_8bit": True}
    cases = [
        (None, {"load_in_8bit": True, "load_in_4bit": True}, "load_in_8bit and load_in_4bit"),
        (None, {"load_in_4bit": True, "dtype": "float64"}, "dtype=float64"),
        (None, {"load_in_8bit": True, "peft": lora}, "peft .*load_in_8bit"),
        (quantized, {"load_in_4bit": True}, "leave load_in_4bit out"),
        (quantized, {"peft": lora}, "peft .*bitsandbytes"),
        ({"quant_method": "mystery", "bits": 4}, {}, "mystery"),
    ]
    if importlib.util.find_spec("optimum") is None:
        cases.append(({"quant_method": "gptq", "bits": 4}, {}, "optimum"))
    for quantization, options, message in cases:
        entries = {"quantization_config": quantization} if quantization else {}
        path = base("qwen3", **entries)
        with pytest.raises(DuelError, match=message):
            load(path, **options)

    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    with pytest.raises(DuelError, match="bitsandbytes"):
        load(base("qwen3"), load_in_4bit=True)
