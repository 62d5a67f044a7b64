"""Our DiT against a plain reimplementation in float64, on tiny random checkpoints with the authors' file layout."""

import json
import math
import re

import pytest
import tiny
import torch
from safetensors.torch import load_file, save_file
from textbook import score

from lm_eval_duel import denoisers, rules
from lm_eval_duel.duel import Duel
from lm_eval_duel.errors import DuelError
from lm_eval_duel.windows import Window

WIDTH, LAYERS, HEADS, CONDITION, TOKENS, LENGTH = 16, 2, 2, 8, 12, 16
VOCABULARY = TOKENS + 1

MDLM = {
    "model_type": "mdlm",
    "architectures": ["MDLM"],
    "auto_map": {"AutoConfig": "configuration_mdlm.MDLMConfig", "AutoModelForMaskedLM": "modeling_mdlm.MDLM"},
    "vocab_size": VOCABULARY,
    "model_length": LENGTH,
    "hidden_dim": WIDTH,
    "cond_dim": CONDITION,
    "n_blocks": LAYERS,
    "n_heads": HEADS,
    "dropout": 0.1,
    "time_conditioning": False,
}
BD3LM = {
    **MDLM,
    "model_type": "bd3lm",
    "architectures": ["BD3LM"],
    "adaln": True,
    "attn_backend": "flex",
    "var_min": False,
    "block_size": LENGTH,
}
SEDD = {
    "tokens": TOKENS,
    "graph": {"type": "absorb"},
    "noise": {"type": "loglinear"},
    "model": {
        "hidden_size": WIDTH,
        "cond_dim": CONDITION,
        "length": LENGTH,
        "n_blocks": LAYERS,
        "n_heads": HEADS,
        "scale_by_sigma": True,
        "dropout": 0.1,
    },
}
CONFIGS = {
    "mdlm": MDLM,
    "bidirectional": {**BD3LM, "cross_attn": False, "causal": False},
    "sedd-retrained": {**BD3LM, "cross_attn": False, "causal": False, "time_conditioning": True},
    "sedd": SEDD,
    "ar": {**BD3LM, "cross_attn": False, "causal": True, "adaln": False},
}


def weights(adaptive, prefix):
    """Random tensors under the authors' names."""
    generator = torch.Generator().manual_seed(3)
    shapes = {"vocab_embed.embedding": (VOCABULARY, WIDTH)}
    if adaptive:
        shapes |= {"sigma_map.mlp.0.weight": (CONDITION, 256), "sigma_map.mlp.0.bias": (CONDITION,)}
        shapes |= {"sigma_map.mlp.2.weight": (CONDITION, CONDITION), "sigma_map.mlp.2.bias": (CONDITION,)}
    for n in range(LAYERS):
        layer = {
            "norm1.weight": (WIDTH,),
            "attn_qkv.weight": (3 * WIDTH, WIDTH),
            "attn_out.weight": (WIDTH, WIDTH),
            "norm2.weight": (WIDTH,),
            "mlp.0.weight": (4 * WIDTH, WIDTH),
            "mlp.0.bias": (4 * WIDTH,),
            "mlp.2.weight": (WIDTH, 4 * WIDTH),
            "mlp.2.bias": (WIDTH,),
        }
        if adaptive:
            layer |= {"adaLN_modulation.weight": (6 * WIDTH, CONDITION), "adaLN_modulation.bias": (6 * WIDTH,)}
        shapes |= {f"blocks.{n}.{name}": shape for name, shape in layer.items()}
    shapes |= {
        "output_layer.norm_final.weight": (WIDTH,),
        "output_layer.linear.weight": (VOCABULARY, WIDTH),
        "output_layer.linear.bias": (VOCABULARY,),
    }
    if adaptive:
        shapes |= {
            "output_layer.adaLN_modulation.weight": (2 * WIDTH, CONDITION),
            "output_layer.adaLN_modulation.bias": (2 * WIDTH,),
        }
    made = {prefix + name: torch.randn(shape, generator=generator) * 0.5 for name, shape in shapes.items()}
    made[f"{prefix}rotary_emb.inv_freq"] = torch.ones(WIDTH // HEADS // 2)  # computed anew, whatever the file says
    return made


def write(folder, kind):
    config = CONFIGS[kind]
    (folder / "config.json").write_text(json.dumps(config))
    tensors = weights(kind != "ar", "" if kind == "sedd" else "backbone.")
    if kind == "bidirectional":
        tensors |= {"sampling_eps_min": torch.tensor(1e-3), "sampling_eps_max": torch.tensor(0.999)}
    if kind == "sedd":
        torch.save(tensors, folder / "pytorch_model.bin")
    else:
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return str(folder), {name.removeprefix("backbone."): value.double() for name, value in tensors.items()}


def plain(w, ids, sigma, causal):
    """Logits (L, V), position by position and head by head, from the description alone."""

    def norm(x, weight):
        mean = sum(x) / len(x)
        return (x - mean) / math.sqrt(sum((x - mean) ** 2) / len(x) + 1e-5) * weight

    def gelu(x):
        return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))

    def silu(x):
        return x / (1 + torch.exp(-x))

    def turn(x, position):
        half = len(x) // 2
        out = x.clone()
        for i in range(half):
            angle = position * 10_000.0 ** (-2 * i / len(x))
            out[i] = x[i] * math.cos(angle) - x[i + half] * math.sin(angle)
            out[i + half] = x[i + half] * math.cos(angle) + x[i] * math.sin(angle)
        return out

    c = None
    if "sigma_map.mlp.0.weight" in w:
        angles = torch.tensor([sigma * math.exp(-math.log(10_000) * i / 128) for i in range(128)], dtype=torch.float64)
        wave = torch.cat([angles.cos(), angles.sin()])
        c = silu(w["sigma_map.mlp.0.weight"] @ wave + w["sigma_map.mlp.0.bias"])
        c = silu(w["sigma_map.mlp.2.weight"] @ c + w["sigma_map.mlp.2.bias"])
    x = [w["vocab_embed.embedding"][token] for token in ids]
    head = WIDTH // HEADS
    for n in range(LAYERS):
        p = f"blocks.{n}."
        parts = [0.0, 0.0, 1.0, 0.0, 0.0, 1.0]
        if c is not None:
            parts = (w[p + "adaLN_modulation.weight"] @ c + w[p + "adaLN_modulation.bias"]).split(WIDTH)
        qkv = [w[p + "attn_qkv.weight"] @ (norm(v, w[p + "norm1.weight"]) * (1 + parts[1]) + parts[0]) for v in x]
        mixed = []
        for i in range(len(x)):
            out = []
            for h in range(HEADS):
                q = turn(qkv[i][h * head : (h + 1) * head], i)
                seen = range(i + 1) if causal else range(len(x))
                at = [WIDTH + h * head, 2 * WIDTH + h * head]
                logits = torch.stack([q @ turn(qkv[j][at[0] : at[0] + head], j) for j in seen]) / math.sqrt(head)
                out.append(sum(a * qkv[j][at[1] : at[1] + head] for a, j in zip(logits.softmax(0), seen, strict=True)))
            mixed.append(w[p + "attn_out.weight"] @ torch.cat(out))
        x = [v + parts[2] * m for v, m in zip(x, mixed, strict=True)]
        for i, v in enumerate(x):
            y = norm(v, w[p + "norm2.weight"]) * (1 + parts[4]) + parts[3]
            y = w[p + "mlp.2.weight"] @ gelu(w[p + "mlp.0.weight"] @ y + w[p + "mlp.0.bias"]) + w[p + "mlp.2.bias"]
            x[i] = v + parts[5] * y
    shift, scale = 0.0, 0.0
    if c is not None:
        shift, scale = (w["output_layer.adaLN_modulation.weight"] @ c + w["output_layer.adaLN_modulation.bias"]).split(
            WIDTH
        )
    x = [norm(v, w["output_layer.norm_final.weight"]) * (1 + scale) + shift for v in x]
    return torch.stack([w["output_layer.linear.weight"] @ v + w["output_layer.linear.bias"] for v in x])


def sigma_of(kind, ids):
    if not kind.startswith("sedd"):
        return 0.0
    share = sum(token == TOKENS for token in ids) / len(ids)
    return -math.log(1 - min(max(share, 0.1), 0.9))


@pytest.mark.parametrize("kind", CONFIGS)
def test_the_network_equals_the_plain_one(kind, tmp_path):
    path, w = write(tmp_path, kind)
    denoiser = denoisers.load(path, device="cpu")
    for ids in ([3, TOKENS, 5, TOKENS, 0, 1, TOKENS], [1] * 12, [TOKENS] * 5):
        features = denoiser.features(torch.tensor([ids]), None)
        ours = denoiser.head(features[0])
        assert (ours - plain(w, ids, sigma_of(kind, ids), kind == "ar")).abs().max() < 1e-5
    padded = torch.tensor([[3, TOKENS, 5, 7, 7, 7], [3, TOKENS, 5, 1, 2, 4]])
    real = torch.tensor([[True] * 3 + [False] * 3, [True] * 6])
    alone = denoiser.features(padded[:1, :3], None)
    assert (denoiser.features(padded, real)[:1, :3] - alone).abs().max() < 1e-5


@pytest.mark.parametrize("kind", [kind for kind in CONFIGS if kind != "ar"])
@pytest.mark.parametrize("rule", ["greedy", "margin:k=2", "threshold:mu=0.4", "klass:mu=0.3:nu=0.5"])
def test_lanes_equal_the_textbook_loop(kind, rule, tmp_path):
    path, w = write(tmp_path, kind)
    denoiser = denoisers.load(path, device="cpu")
    windows = [Window((3,), (4, 5, 6, 7, 8, 1, 0)), Window((), (2, 2, 9)), Window((1, 1), (11, 10), (0,))]
    duel = Duel(denoiser, rule)
    assert duel.block == 4
    for window, scored in zip(windows, duel.log_prob(windows), strict=True):
        _, steps, nats, greedy, _ = score(
            lambda ids: plain(w, ids.tolist(), sigma_of(kind, ids.tolist()), False),
            TOKENS,
            denoiser.excluded,
            rules.parse(rule),
            4,
            window,
            tie_when_blank=True,
        )
        assert scored.close_picks == 0
        assert scored.steps == steps and scored.is_greedy == greedy
        assert scored.nats == pytest.approx(nats, abs=1e-4)


def test_the_ar_baseline_reads_from_left_to_right(tmp_path):
    path, w = write(tmp_path, "ar")
    duel = Duel(denoisers.load(path, device="cpu"), "left_to_right")
    row = [12 - 1, 4, 5, 6, 0]
    logs = plain(w, row, 0.0, True)[:, :TOKENS].log_softmax(-1)
    scored = duel.log_prob([Window(row[:1], row[1:])])[0]
    assert scored.nats == pytest.approx([float(logs[i, row[i + 1]]) for i in range(4)], abs=1e-5)
    with pytest.raises(DuelError, match="Window 0 needs a given first token"):
        duel.log_prob([Window((), row)])
    for k in (1, 2):  # blocks of one, whatever k
        again = Duel(duel.denoiser, f"left_to_right:k={k}")
        assert again.block == 1
        assert again.log_prob([Window(row[:1], row[1:])])[0].nats == scored.nats


def test_the_tokenizer_and_the_mask_are_checked(tmp_path):
    path, _ = write(tmp_path, "mdlm")
    with pytest.raises(DuelError, match=r"\[MASK\] is the last id of .*, 12; leave mask_token_id out"):
        denoisers.load(path, device="cpu", mask_token_id=5)
    with pytest.raises(DuelError, match=r"The tokenizer has ids up to 33 but .* predicts 13"):
        denoisers.load(path, device="cpu", tokenizer=tiny.tokenizer())
    (tmp_path / "config.json").write_text(json.dumps({k: v for k, v in MDLM.items() if k != "hidden_dim"}))
    with pytest.raises(DuelError, match=r"config\.json of .* has no 'hidden_dim'"):
        denoisers.load(path, device="cpu")


def test_a_pickle_with_more_than_tensors_is_refused(tmp_path):
    path, _ = write(tmp_path, "sedd")
    for content, message in (({"state_dict": {}}, "holds more than tensors"), (Duel, "Cannot read .*UnpicklingError")):
        torch.save(content, tmp_path / "pytorch_model.bin")
        with pytest.raises(DuelError, match=message):
            denoisers.load(path, device="cpu")


def test_wrong_checkpoints(tmp_path):
    path, _ = write(tmp_path, "mdlm")
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)

    def broken(message, change):
        save_file(change(dict(tensors)), file, metadata={"format": "pt"})
        with pytest.raises(DuelError, match=message):
            denoisers.load(path, device="cpu")

    gone = "backbone.blocks.1.mlp.0.bias"
    broken(r"1 missing: blocks\.1\.mlp\.0\.bias\.", lambda t: {k: v for k, v in t.items() if k != gone})
    broken("1 not known: blocks.9.norm1.weight", lambda t: {**t, "backbone.blocks.9.norm1.weight": torch.ones(2)})
    broken(r"1 of another shape: blocks\.1\.mlp\.0\.bias", lambda t: {**t, gone: torch.ones(3)})
    file.write_bytes(file.read_bytes()[:500])
    with pytest.raises(DuelError, match=re.escape(f"Cannot read {file}")):
        denoisers.load(path, device="cpu")
    file.unlink()
    with pytest.raises(DuelError, match="No weights in"):
        denoisers.load(path, device="cpu")
    (tmp_path / "config.json").write_text(json.dumps({**BD3LM, "cross_attn": True, "block_size": 4}))
    with pytest.raises(DuelError, match=r"Block-causal networks \(this one has blocks of 4\) are not supported yet"):
        denoisers.load(path, device="cpu")
    (tmp_path / "config.json").write_text(json.dumps({**SEDD, "graph": {"type": "uniform"}}))
    with pytest.raises(DuelError, match="uniform graph: without a mask state"):
        denoisers.load(path, device="cpu")
