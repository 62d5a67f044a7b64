"""A config.json that is wrong, or read as another family's: refused in words, before a network takes memory."""

import dataclasses
import json
import logging
import re
from pathlib import Path

import decoder_reference
import own
import pytest
import tiny
import torch
from safetensors.torch import load_file, save_file

from lm_eval_duel import denoisers
from lm_eval_duel.cli.main import main
from lm_eval_duel.denoisers.hf import strict_load
from lm_eval_duel.errors import DuelError


def backbone(folder, name, **entries):
    """A checkpoint of a case, its config changed; an entry that is None is not there."""
    case = decoder_reference.CASES[name]
    config = {
        key: value for key, value in {**case.config, **entries}.items() if value is not None or key not in entries
    }
    folder.mkdir(exist_ok=True)
    path, _ = decoder_reference.write(folder, dataclasses.replace(case, config=config))
    return path, {key: value for key, value in case.options.items() if key != "tokenizer"}


def refused(path, words, **options):
    with pytest.raises(DuelError) as error:
        denoisers.load(path, device="cpu", **options)
    assert re.search(words, str(error.value)), error.value


# ---------------------------------------------------------------- entries that are needed

LACKING = [
    ("dream", "num_attention_heads"),  # unseen in the shape of any tensor, as all that follow
    ("a2d-llama", "rope_parameters"),
    ("a2d-qwen2", "max_position_embeddings"),
    ("sdar-moe", "norm_topk_prob"),
    ("rnd1", "num_experts_per_tok"),
    ("llada", "n_heads"),
    ("llada2", "routed_scaling_factor"),
    ("llada2", "rope_theta"),
    ("plain bidirectional", "rms_norm_eps"),
]


def test_no_entry_is_left_to_the_defaults_of_a_library(tmp_path, subtests):
    for name, key in LACKING:
        with subtests.test(f"{name}: {key}"):
            path, options = backbone(tmp_path / f"{name} {key}", name, **{key: None})
            refused(path, f"has no {key.replace('rope_parameters', 'rope_theta')}", **options)


def test_all_that_is_lacking_is_said(tmp_path):
    path, _ = backbone(tmp_path, "dream")
    refused(path, r"has no d_model, n_layers, n_heads, max_sequence_length, mlp_hidden_size, .* llada ", family="llada")


@pytest.mark.parametrize("name", ["llada", "llada2", "sdar"])
def test_rotary_entries_may_be_where_transformers_5_puts_them(name, tmp_path):
    """LLaDA2's were taken for 10,000 there."""
    path, options = backbone(tmp_path / "a", name)
    case = decoder_reference.CASES[name]
    moved = {"rope_type": "default", "rope_theta": case.config["rope_theta"]}
    other, _ = backbone(tmp_path / "b", name, rope_theta=None, rope_parameters=moved)
    ids = torch.tensor([[6, 7, 9, 30, 12, 8]])
    seen, position = torch.ones(1, 6, 6, dtype=torch.bool), torch.arange(6)[None]
    found = [denoisers.load(p, device="cpu", **options).stream(ids, position, seen, None)[0] for p in (path, other)]
    assert torch.equal(*found)


@pytest.mark.parametrize(
    ("name", "entries", "key"),
    [
        ("dream", {"hidden_size": "16"}, "hidden_size|unsupported operand"),
        ("dream", {"num_hidden_layers": 2.0}, "num_hidden_layers|float"),
        ("dream", {"right_shift_logits": "fasle"}, "'right_shift_logits'"),
        ("dream", {"mask_token_id": 40}, "mask_token_id=40"),
        ("llada", {"n_heads": "4"}, "num_attention_heads|unsupported operand"),
        ("sdar", {"block_size": -4}, "'block_size'"),
        ("sdar", {"block_size": 3.5}, "'block_size'"),
        ("sdar", {"block_size": True}, "'block_size'"),
        ("illada", {"layer_norm_eps": 1e-5}, r"not the released network .* \(layer_norm_eps=1e-05\)"),
    ],
)
def test_wrong_entries(name, entries, key, tmp_path):
    """transformers checks most types; a wrong one is an error, and says of which checkpoint."""
    path, options = backbone(tmp_path, name, **entries)
    refused(path, key, **options)


def test_own_code_is_read_by_type_too(tmp_path):
    code = own.write(tmp_path, own.SDAR, "SDARForCausalLM", own.decoder(norms=True), block_size=3.5)
    refused(code, "'block_size' .*; got '3.5'", backend="remote", trust_remote_code=True)


# ---------------------------------------------------------------- names


def test_two_tensors_of_one_place(tmp_path):
    path, options = backbone(tmp_path, "llada")
    file = next(Path(path).glob("model-00001*"))
    tensors = load_file(file)
    other = next(key for key in tensors if "wte" in key)
    save_file({**tensors, "model.embed_tokens.weight": tensors[other].clone()}, file)
    index = Path(path) / "model.safetensors.index.json"
    places = json.loads(index.read_text())
    places["weight_map"]["model.embed_tokens.weight"] = file.name
    index.write_text(json.dumps(places))
    refused(path, r"hold both model\.\S+ and model\.\S+, which are the same tensor of the family llada\.", **options)


# ---------------------------------------------------------------- words


def test_an_unknown_kind_of_model(tmp_path):
    tiny.tokenizer().save_pretrained(tmp_path)
    advice = (
        r"\. If its network belongs to a known family, say which: family=llada\|.*backend=remote,trust_remote_code=true"
    )
    for config, cause in (
        (
            {"model_type": "mdml9", "architectures": ["NewLM"], "hidden_size": 4},
            "transformers does not know model_type 'mdml9'",
        ),
        ({"architectures": ["NewLM"]}, "its config has no model_type"),
    ):
        (tmp_path / "config.json").write_text(json.dumps(config))
        for options in ({}, {"attention": "causal"}):
            refused(str(tmp_path), cause + advice, **options)
            with pytest.raises(DuelError) as error:
                denoisers.load(str(tmp_path), device="cpu", **options)
            assert "out of date" not in str(error.value) and "upgrade" not in str(error.value)


def test_a_misspelt_bundled_name(capsys):
    for arguments in (["inspect", "demo-md"], ["inspect", "demo_bd"]):
        with pytest.raises(SystemExit, match=rf"Did you mean the bundled {arguments[1].replace('_', '-')}m?d?m?\?"):
            main(arguments)
    refused("gpt", "^((?!Did you mean).)*$")


@pytest.mark.parametrize("kind", ["bert", "gpt2"])
def test_all_that_is_wrong_is_said_at_once_and_by_us(kind, tmp_path, caplog):
    path = tiny.checkpoint(tmp_path, kind, mask=kind == "bert")
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    one, two = [key for key in tensors if tensors[key].dim() == 2 and "1." in key][:2]
    name = {"bert": "BertForMaskedLM", "gpt2": "GPT2LMHeadModel"}[kind]
    wrong = {key: tensors[key] for key in tensors if key != one} | {"extra": torch.ones(2), two: torch.ones(3, 4)}
    save_file(wrong, file, metadata={"format": "pt"})
    logging.getLogger("transformers").addHandler(caplog.handler)
    try:
        refused(
            path,
            rf"do not fill {name}: 1 missing: {one}; 1 unknown: extra; 1 of another shape: {two}",
            attention="causal" if kind == "gpt2" else None,
        )
    finally:
        logging.getLogger("transformers").removeHandler(caplog.handler)
    assert not re.search("newly initialized|LOAD REPORT|TRAIN", caplog.text), caplog.text


def test_ten_names_of_each_kind_are_shown():
    wanted = {f"w{n:02}": (n,) for n in range(12)}
    with pytest.raises(DuelError, match=r"^They: 12 missing: w00, w01, .*, w09, \.\.\.; 1 unknown: x\.$"):
        strict_load.require_equal("They", wanted, {"x": (2,)})
    strict_load.require_equal("They", wanted, wanted)
