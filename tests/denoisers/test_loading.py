"""What a checkpoint is taken for; every tensor of a file has its place, and a network without one is refused."""

import json
import math
import re
from pathlib import Path
from types import SimpleNamespace

import dit_reference
import pytest
import tiny
import torch
from decoder_reference import CASES, LLAMA
from laws import slow_but
from networks import load, refused, written
from safetensors.torch import load_file, save_file

from lm_eval_duel import denoisers
from lm_eval_duel.denoisers import load_tokenizer, self_tests
from lm_eval_duel.denoisers import refused as refusals
from lm_eval_duel.denoisers.checkpoint import family_by_tensors
from lm_eval_duel.denoisers.load_options import LoadOptions
from lm_eval_duel.denoisers.vocabulary import find_mask_id
from lm_eval_duel.errors import DuelError
from lm_eval_duel.results import traced
from lm_eval_duel.tasks import metadata

# ---------------------------------------------------------------- what a checkpoint is taken for

DETECTED = [  # a case, changes of its config, a folder, options, what is found, and what is logged
    ("fast-dllm-v2", {}, None, {"block": None}, {"block": 32}, None),  # not config.bd_size
    ("sdar", {"block_size": None}, None, {}, {"block": 4}, None),
    ("sdar", {"block_size": None}, None, {"block": 8}, {"block": 8}, "trained on blocks of 4; using block=8"),
    ("sdar", {}, None, {"attention": "bidirectional"}, {"block": None}, "using attention=bidirectional"),
    ("d2f-llada", {}, None, {"block": 8}, {"block": 8}, "trained on blocks of 16; using block=8"),
    ("a2d-qwen3-bd3lm", {}, None, {"block": None}, {"family": "a2d-qwen3-bd3lm", "block": 32}, "By its name"),
    ("a2d-qwen3-bd3lm", {}, None, {"block": None, "attention": "bidirectional"}, {"family": "a2d-qwen3"}, None),
    ("diffullama", {}, "diffullama", {"family": None}, {"family": "diffullama", "shift": 1}, "By its name"),
    (
        "diffullama",
        {},
        "diffullama",
        {"family": None, "attention": "bidirectional", "shift_logits": False},
        {"family": "decoder", "shift": 0},
        None,
    ),
    ("nemotron-diffusion-research", {"dlm_type": "llada"}, None, {}, {"shift": 0}, None),
    ("nemotron-labs-diffusion", {"max_position_embeddings": 4096}, None, {}, {"max_length": 256 - 4}, None),
    ("dream", {"right_shift_logits": False}, None, {}, {"shift": 0}, None),
    ("bert", {"right_shift_logits": True}, None, {}, {"shift": 0}, None),  # an entry of decoders
    ("mdlm", {"mask_token_id": 7}, None, {"mask_token_id": 0}, {"mask_id": 0}, None),
    ("bd3lm", dict.fromkeys(("block_size", "causal", "adaln"), None), None, {}, {"family": "mdlm"}, None),
]


@pytest.mark.parametrize("case", [pytest.param(case, id=f"{case[0]} {case[1]} {case[3]}") for case in DETECTED])
def test_what_a_checkpoint_is_taken_for(case, tmp_path, caplog):
    name, entries, folder, options, expected, warning = case
    path, default = written(tmp_path, name, entries, folder)

    denoiser = load(path, default, **options)

    for attribute, value in expected.items():
        assert getattr(denoiser, attribute) == value, attribute
    if warning:
        assert warning in caplog.text
    else:
        assert not re.search("By its name|using (block|attention)", caplog.text)


def test_llada2_that_edits_is_refused_unless_asked_for(tmp_path):
    path, options = written(tmp_path, "llada2")
    code = Path(path, "modeling_llada2_moe.py")
    code.write_text("raise RuntimeError('never run')\n")
    assert load(path, options).family == "llada2"
    code.write_text("raise RuntimeError('never run')\ndef generate(self, editing_threshold=0.9): ...\n")
    refused(path, "family=llada2", **options)
    assert load(path, options, family="llada2").block == 4


def test_networks_without_a_law_are_refused(tmp_path):
    tiny.tokenizer().save_pretrained(tmp_path)
    for entry in refusals.ENTRIES:
        for name in entry.classes:
            for named in ({"architectures": [name]}, {"auto_map": {"AutoModel": f"code.{name}"}}):
                (tmp_path / "config.json").write_text(json.dumps({**LLAMA, **named}))
                refused(str(tmp_path), name)


def test_networks_with_the_config_of_another_one_are_refused_by_name_unless_they_are_scored_as_causal(tmp_path):
    tiny.tokenizer().save_pretrained(tmp_path)
    for name in ("SDLM-3B-D4", "I-DLM-8B", "openPangu-R-7B-Diffusion", "SDLLM-Duo-1.7B-Base"):
        folder = tmp_path / name
        tiny.tokenizer().save_pretrained(folder)
        (folder / "config.json").write_text(json.dumps({**LLAMA, "architectures": ["LlamaForCausalLM"]}))
        refused(str(folder), "What works: ")
        refused(str(folder), "^(?!.*What works).*", attention="causal")  # there are no weights


def test_the_mask_of_diffugpt_is_that_of_its_size():
    for rows, mask in ((50257, 10541), (50258, 50257)):
        config = {**CASES["diffugpt"].config, "vocab_size": rows}
        assert family_by_tensors(config, ["denoise_model.wpe.weight"]).mask_id == mask
        assert family_by_tensors(config, ["transformer.wpe.weight"]) is None


def test_the_mask_is_that_of_the_options_else_the_config_else_the_tokenizer_else_the_family():
    def found(option, entry, of_tokenizer, of_family):
        options = LoadOptions("x", torch.device("cpu"), mask_token_id=option)
        tokenizer = SimpleNamespace(mask_token_id=of_tokenizer, get_vocab=dict)
        return find_mask_id(options, {"mask_token_id": entry}, tokenizer, of_family, 12)

    assert found(5, 7, 3, 9) == 5
    assert found(None, 7, 3, 9) == 7
    assert found(None, None, 3, 9) == 3
    assert found(None, None, None, 9) == 9
    with pytest.raises(DuelError, match="mask_token_id"):
        found(None, None, None, None)


@pytest.mark.parametrize("rows", [34, 40])
def test_a_tokenizer_with_a_mask_of_its_own(rows, tmp_path):
    """As in LM1B, by BERT's vocabulary: the last column is a token, or padding of the table."""
    path, _ = dit_reference.write(tmp_path, "mdlm", vocab_size=rows)

    without_a_mask = denoisers.load(path, device="cpu", tokenizer=tiny.tokenizer(mask=False))
    assert without_a_mask.mask_id == rows - 1
    assert without_a_mask.excluded[34 : rows - 1].all()
    assert not without_a_mask.excluded[4]

    tiny.tokenizer().save_pretrained(tmp_path)
    denoiser = denoisers.load(path, device="cpu")
    assert denoiser.mask_id == 4
    assert denoiser.excluded.nonzero()[:, 0].tolist() == [4, *range(34, rows)]


def test_rotary_entries_may_be_where_transformers_5_puts_them(tmp_path, name="llada2"):
    base = CASES[name].config["rope_theta"]
    moved = {"rope_type": "default", "rope_theta": base}
    path, options = written(tmp_path, name, {"rope_theta": None, "rope_parameters": moved})

    model = load(path, options).model  # whose self-test compares its frequencies with its config
    assert model.config.rope_parameters["rope_theta"] == base

    frequencies = next(buffer for key, buffer in model.named_buffers() if key.endswith("rotary_emb.inv_freq"))
    frequencies[-1] *= 1.0001
    with pytest.raises(DuelError, match="rotary frequencies"):
        self_tests.rotary_frequencies(model, model.config, path)


# ---------------------------------------------------------------- tensors: any family, any breakage

TENSORS = {  # one that is broken, by its name in the file
    "mdlm": "backbone.blocks.1.mlp.0.bias",
    "bert": "bert.encoder.layer.1.attention.self.query.weight",
    "gpt2": "transformer.h.1.mlp.c_fc.weight",
    "llada": "model.transformer.ff_out.weight",
    "smdm": "transformer.h.1.mlp.swiglu.w2.weight",
    "llada2": "model.layers.2.attention.query_key_value.weight",
    "rnd1": "model.layers.1.mlp.experts.2.up_proj.weight",
    "own dream": "model.layers.1.self_attn.q_proj.bias",
}
MISSING = {  # by its name in the network, where the file has another
    "llada": "lm_head.weight",
    "smdm": "model.layers.1.mlp.up_proj.weight",
    "llada2": "model.layers.2.self_attn.k_proj.weight",
}


@pytest.mark.parametrize("name", slow_but(TENSORS, TENSORS.keys() - {"gpt2", "rnd1"}))
def test_every_tensor_fills_its_place(name, tmp_path):
    path, options = written(tmp_path, name)
    tensors = {}
    for file in Path(path).glob("*.safetensors"):
        tensors |= load_file(file)
        file.unlink()
    for index in Path(path).glob("*.index.json"):
        index.unlink()
    key = TENSORS[name]
    in_the_network = re.escape(key.removeprefix("backbone."))

    without = dict(tensors)
    del without[key]
    broken = [
        (re.escape(MISSING.get(name, "")) or in_the_network, without),
        (in_the_network, {**tensors, key: tensors[key][:3].clone()}),
        (r"model\.layers\.9\.x\.weight", {**without, "model.layers.9.x.weight": torch.ones(2)}),
    ]
    if name != "mdlm":  # which is not run at load
        norm = next(key for key in tensors if re.search(r"norm|ln_|LayerNorm", key))
        broken.append(("NaN or infinite logits", {**tensors, norm: tensors[norm] * math.nan}))

    file = Path(path, "model.safetensors")
    for words, content in broken:
        save_file(content, file, metadata={"format": "pt"})
        refused(path, words, **options)
    file.write_bytes(file.read_bytes()[:500])
    refused(path, "Cannot read", **options)


def test_two_tensors_of_one_place(tmp_path):
    for name, message, twin in (
        ("smdm", "hold both", "model.embed_tokens.weight"),
        ("mdlm", "with and without backbone", "vocab_embed.embedding"),
    ):
        path, options = written(tmp_path, name)
        file = Path(path, "model.safetensors")
        save_file({**load_file(file), twin: torch.ones(40, 16)}, file)
        refused(path, message, **options)


def test_a_dit_in_half_precision_is_coarse(tmp_path):
    path, _ = dit_reference.write(tmp_path, "mdlm")
    denoiser = denoisers.load(path, device="cpu")
    assert not denoiser.coarse
    assert denoiser.describe()["dtype"] == "float32"

    denoiser.take(denoiser.network.to(torch.bfloat16))
    assert denoiser.coarse
    assert denoiser.describe()["dtype"] == "bfloat16"


def test_a_mask_that_is_not_the_tokenizers_is_named(caplog):
    def warnings():
        return [record for record in caplog.records if record.levelname == "WARNING"]

    denoisers.load(device="cpu", mask_token_id=2)
    assert not warnings()

    denoisers.load(device="cpu", mask_token_id=300)
    [warning] = warnings()
    message = warning.getMessage()
    assert "mask_token_id=300 ('ro')" in message
    assert "2 ('<|mask|>')" in message


ANOTHER = "<a folder or hub name>"


@pytest.mark.parametrize("name", ["empty", "./none", "org/none"])
def test_another_tokenizer_is_named_as_the_command_takes_it(name, tmp_path, monkeypatch):
    """By the model arg, the metadata of a task, or the flag of `report`."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    for read, setting in (
        (load_tokenizer, "tokenizer="),
        (metadata.load_tokenizer, "--metadata tokenizer="),
        (lambda given: traced._load(given["tokenizer"]), "--tokenizer "),
    ):
        with pytest.raises(DuelError) as raised:
            read({"tokenizer": name})
        assert str(raised.value).endswith((f" pass {setting}{ANOTHER}.", f" one: {setting}{ANOTHER}."))
        assert str(raised.value).count(ANOTHER) == 1
