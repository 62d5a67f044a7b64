"""A config.json that is wrong, or read as another family's: refused in words, before a network takes memory."""

import dataclasses
import json
import logging
import re
import subprocess
import sys
from pathlib import Path

import decoder_reference
import dit_reference
import own
import pytest
import tiny
import torch
from safetensors.torch import load_file, save_file

from lm_eval_duel import denoisers
from lm_eval_duel.cli.main import main
from lm_eval_duel.denoisers import weights
from lm_eval_duel.denoisers.hf import families, native, strict_load
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


# ---------------------------------------------------------------- memory

LIMITED = """
import json, resource, sys
from lm_eval_duel import denoisers
from lm_eval_duel.errors import DuelError

cases = json.load(sys.stdin)
for path, options in cases:  # whatever is imported when first a network of its kind is read
    good = options.pop("good")
    denoisers.load(good, device="cpu", **{key: value for key, value in options.items() if key != "family"})
page, room = resource.getpagesize(), 1 << 30
used = int(open("/proc/self/statm").read().split()[0]) * page
resource.setrlimit(resource.RLIMIT_AS, (used + room, used + room))
for path, options in cases:
    try:
        denoisers.load(path, device="cpu", **options)
        print("loaded")
    except DuelError as error:
        print(" ".join(str(error).split()))
    except BaseException as error:
        print(type(error), " ".join(str(error).split()))
"""


def changed(folder, path, **entries):
    """A copy of a checkpoint folder, its config changed."""
    folder.mkdir()
    for file in Path(path).iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **entries}))
    return str(folder)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="limits the address space")
def test_a_wrong_config_takes_no_memory(tmp_path):
    """Each of these was 8 GB or more, or a network of its library's default size."""
    for name in ("dit", "bert", "gpt2", "own"):
        (tmp_path / name).mkdir()
    dit, _ = dit_reference.write(tmp_path / "dit", "mdlm")
    bert, gpt2 = tiny.checkpoint(tmp_path / "bert", "bert"), tiny.checkpoint(tmp_path / "gpt2", "gpt2", mask=False)
    code = own.write(tmp_path / "own", own.DREAM, "DreamModel", own.decoder(bias=True))
    many, none = "=10000000, but its files hold", "do not belong together"
    cases = [
        (dit, {"hidden_dim": 1_000_000}, {}, "do not fill the network: .* of another shape"),
        (dit, {"n_blocks": 10_000_000}, {}, "n_blocks" + many),
        (dit, {"vocab_size": 10**10}, {}, "do not fill the network: .* of another shape"),
        (dit, {"hidden_dim": 10**30}, {}, "describes no valid network"),
        (bert, {"hidden_size": 1_000_000}, {}, none),
        (bert, {"vocab_size": 10**9}, {}, none),
        (bert, {"num_hidden_layers": 10_000_000}, {}, "num_hidden_layers" + many),
        (gpt2, {"n_embd": 1_000_000}, {"attention": "causal"}, none),
        (code, {"num_hidden_layers": 10_000_000}, {"backend": "remote", "trust_remote_code": True}, many),
    ]
    for name, entries, words in [
        ("llada", {"n_layers": 10_000_000}, "num_hidden_layers" + many),
        ("llada", {"mlp_hidden_size": 10**9}, "3 of another shape|4 of another shape|6 of another shape"),
        ("llada", {"embedding_size": 10**9}, r"2 of another shape: model\.transformer\.ff_out\.weight is \(48, 16\)"),
        ("a2d-qwen2", {"hidden_size": 1_000_000}, "of another shape"),
        ("rnd1", {"num_experts": 10_000_000}, "num_experts" + many),
        ("rnd1", {"moe_intermediate_size": 10**8}, "of another shape"),
        ("sdar", {"block_size": 1_000_000}, "holds 64 positions, so its trained block cannot be 1000000"),
    ]:
        path, options = backbone(tmp_path / f"{name} {len(cases)}", name)
        cases.append((path, entries, options, words))
    llada, _ = backbone(tmp_path / "a llada", "llada")
    cases.append(
        (llada, {}, {"family": "dream"}, "has no hidden_size, num_hidden_layers, .* of the family llada: leave")
    )
    asked = []
    for number, (path, entries, options, _) in enumerate(cases):
        asked.append((changed(tmp_path / f"case {number}", path, **entries), {**options, "good": path}))
    done = subprocess.run(
        [sys.executable, "-c", LIMITED], input=json.dumps(asked), capture_output=True, text=True, check=False
    )
    said = done.stdout.splitlines()
    assert len(said) == len(cases), done.stderr[-2000:]
    for (_, entries, _, words), line in zip(cases, said, strict=True):
        assert re.search(words, line), (entries, line)


def test_what_a_file_is_made_of_is_known_without_reading_it(tmp_path):
    tensors = {"a": torch.ones(3, 5), "b": torch.ones((), dtype=torch.float16)}
    for name, save in (("model.safetensors", save_file), ("pytorch_model.bin", torch.save)):
        folder = tmp_path / f"a {name}"
        folder.mkdir()
        save(tensors, folder / name)
        found = weights.shapes(str(folder))
        assert all(value.is_meta for value in found.values())
        assert {key: (value.shape, value.dtype) for key, value in found.items()} == {
            key: (value.shape, value.dtype) for key, value in tensors.items()
        }
    assert weights.shapes(str(tmp_path)) == {}


# ---------------------------------------------------------------- entries that are needed

LACKING = [
    ("dream", "hidden_size"),
    ("dream", "num_attention_heads"),  # unseen in the shape of any tensor, as all that follow
    ("dream", "rms_norm_eps"),
    ("a2d-llama", "rope_parameters"),
    ("a2d-qwen2", "max_position_embeddings"),
    ("sdar", "rope_theta"),
    ("sdar-moe", "norm_topk_prob"),
    ("rnd1", "num_experts_per_tok"),
    ("llada", "rope_theta"),
    ("llada", "n_heads"),
    ("llada-moe", "num_experts_per_tok"),
    ("llada2", "routed_scaling_factor"),
    ("llada2", "n_group"),
    ("llada2", "rope_theta"),
    ("plain bidirectional", "rms_norm_eps"),
]


@pytest.mark.parametrize(("name", "key"), LACKING)
def test_no_entry_is_left_to_the_defaults_of_a_library(name, key, tmp_path):
    path, options = backbone(tmp_path, name, **{key: None})
    wanted = key.replace("rope_parameters", "rope_theta")
    refused(
        path, rf"The config\.json of .* has no {wanted}, which the family [\w-]+ \(\w+ of transformers\)", **options
    )


def test_all_that_is_lacking_is_said_and_the_family_it_is_of(tmp_path):
    path, _ = backbone(tmp_path, "dream")
    refused(
        path,
        r"has no d_model, mlp_hidden_size, n_layers, n_heads, max_sequence_length, which the family llada .* needs\. "
        r"By its class DreamModel it is of the family dream: leave family=llada out\.",
        family="llada",
    )
    path, _ = backbone(tmp_path / "b", "open-dllm", hidden_size=None)
    refused(
        path,
        r"has no hidden_size, .* needs\. Use another family=, or add the values it was trained with to config\.json",
        family="open-dllm",
    )


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
    ("name", "entries", "words"),
    [
        ("dream", {"hidden_size": "16"}, "'hidden_size' must be an integer, at least 1; got '16'"),
        ("dream", {"num_hidden_layers": 2.0}, "'num_hidden_layers' must be an integer, at least 1; got 2.0"),
        ("dream", {"vocab_size": True}, "'vocab_size' must be an integer, at least 1; got True"),
        ("dream", {"max_position_embeddings": -1}, "'max_position_embeddings' must be an integer, at least 1; got -1"),
        ("dream", {"rms_norm_eps": "1e-6"}, "'rms_norm_eps' must be a number above 0; got '1e-6'"),
        ("dream", {"rms_norm_eps": 0}, "'rms_norm_eps' must be a number above 0; got 0"),
        ("dream", {"rope_theta": True}, "'rope_theta' must be a number above 0; got True"),
        ("a2d-qwen2", {"rope_parameters": {"rope_theta": "1e6"}}, "'rope_theta' must be a number above 0; got '1e6'"),
        ("dream", {"tie_word_embeddings": "false"}, "'tie_word_embeddings' must be true or false; got 'false'"),
        ("dream", {"right_shift_logits": "false"}, "'right_shift_logits' must be true or false; got 'false'"),
        ("dream", {"mask_token_id": True}, "mask_token_id=True is not an id of"),
        ("llada", {"weight_tying": "false"}, "'weight_tying' must be true or false; got 'false'"),
        ("llada", {"n_heads": "4"}, "'n_heads' must be an integer, at least 1; got '4'"),
        ("rnd1", {"norm_topk_prob": "false"}, "'norm_topk_prob' must be true or false; got 'false'"),
        ("llada2", {"num_shared_experts": -1}, "'num_shared_experts' must be an integer, at least 0; got -1"),
        ("sdar", {"block_size": 0}, "'block_size' must be an integer, at least 1; got 0"),
        ("sdar", {"block_size": -4}, "'block_size' must be an integer, at least 1; got -4"),
        ("sdar", {"block_size": 3.5}, "'block_size' must be an integer, at least 1; got 3.5"),
        ("sdar", {"block_size": True}, "'block_size' must be an integer, at least 1; got True"),
        ("sdar", {"quantization_config": "int8"}, "'quantization_config' must be an object; got 'int8'"),
        ("illada", {"layer_norm_eps": 1e-5}, "This iLLaDA has LayerNorm"),
    ],
)
def test_entries_of_a_wrong_type(name, entries, words, tmp_path):
    path, options = backbone(tmp_path, name, **entries)
    refused(path, re.escape(words), **options)


def test_own_code_is_read_by_type_too(tmp_path):
    code = own.write(tmp_path, own.SDAR, "SDARForCausalLM", own.decoder(norms=True), block_size=3.5)
    refused(code, "'block_size' must be an integer, at least 1; got 3.5", backend="remote", trust_remote_code=True)


# ---------------------------------------------------------------- names


@pytest.mark.parametrize("name", families.NAMED)
def test_every_tensor_has_one_name_in_the_files(name):
    family, case = families.NAMED[name], decoder_reference.CASES[name]
    tensors = decoder_reference.weights(case)
    named, origin = native.native_tensors(family, tensors, case.config)
    assert all(native.file_name(family, key) == origin[key] for key in named)
    assert set(origin.values()) == set(tensors)


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
            rf"do not fill {name}: 1 missing: {one}; 1 unknown: extra; 1 of another shape: {two} is \(3, 4\), not ",
            attention="causal" if kind == "gpt2" else None,
        )
    finally:
        logging.getLogger("transformers").removeHandler(caplog.handler)
    assert not re.search("newly initialized|LOAD REPORT|TRAIN", caplog.text), caplog.text


def test_ten_names_of_each_kind_are_shown():
    wanted = {f"w{n:02}": (n,) for n in range(12)}
    with pytest.raises(DuelError, match=r"^They: 12 missing: w00, w01, .*, w09, \.\.\.; 1 unknown: x\.$"):
        strict_load.require_no_faults("They", strict_load.compare(wanted, {"x": (2,)}))
    strict_load.require_no_faults("They", strict_load.compare(wanted, wanted))
