"""What a network refuses, by name: entries of its config, arguments, rules and windows that do not apply to it."""

import itertools
import json
import re

import pytest
import tiny
import torch
from decoder_reference import YARN
from networks import OWN, load, refused, written

from lm_eval_duel import Duel, denoisers
from lm_eval_duel.cli.main import main
from lm_eval_duel.core.windows import Window
from lm_eval_duel.denoisers.hub import pick_device
from lm_eval_duel.errors import DuelError

# ---------------------------------------------------------------- entries of config.json

ENTRIES = [  # a case, an entry that is absent or wrong, and what the error names
    ("dream", {"num_attention_heads": None}, "has no num_attention_heads"),  # unseen in the shape of any tensor
    ("a2d-llama", {"rope_parameters": None}, "has no rope_theta"),
    ("llada", {"n_heads": None}, "has no n_heads"),
    ("llada2", {"routed_scaling_factor": None}, "has no routed_scaling_factor"),
    ("nemotron-diffusion-research", {"dlm_type": None}, "has no dlm_type"),
    ("mdlm", {"hidden_dim": None, "n_heads": None}, "has no hidden_dim, n_heads"),
    ("dream", {"num_hidden_layers": 2.0}, "num_hidden_layers|float"),
    ("dream", {"right_shift_logits": "fasle"}, "'right_shift_logits'"),
    ("dream", {"mask_token_id": 40}, "mask_token_id=40"),
    ("sdar", {"block_size": -4}, "'block_size'"),
    ("gidd", {"num_hidden_layers": 99}, "Missing key"),
    ("sedd", {"graph": {"type": "uniform"}}, "graph=uniform"),
    ("llada", {"alibi": True}, "alibi=True"),
    ("llada", {"layer_norm_type": "low_precision"}, "layer_norm_type"),
    ("llada", {"activation_type": "gelu"}, "activation_type"),
    ("illada", {"layer_norm_eps": 1e-5}, "layer_norm_eps"),
    ("llada2", {"use_qkv_bias": True}, "use_qkv_bias"),
    ("diffugpt", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx"),
    ("nemotron-diffusion-research", {"disable_qk_norm": True}, "disable_qk_norm"),
    ("nemotron-diffusion-research", {"dlm_type": "sedd"}, "'dlm_type'"),
    ("nemotron-labs-diffusion", {"rope_parameters": {**YARN, "rope_type": "default"}}, "YaRN"),
    ("nemotron-labs-diffusion", {"rope_parameters": {**YARN, "factor": None}}, "YaRN"),
]


def test_no_entry_is_left_to_defaults_and_none_may_be_wrong(tmp_path, subtests):
    for n, (name, entries, words) in enumerate(ENTRIES):
        with subtests.test(f"{name}: {entries}"):
            folder = tmp_path / str(n)
            folder.mkdir()
            path, options = written(folder, name, entries)
            refused(path, words, **options)

    named_uniform = tmp_path / "gidd-base-p_unif-0.2"
    named_uniform.mkdir()
    path, _ = written(named_uniform, "gidd")
    refused(path, "uniform noise")

    path, _ = written(tmp_path, "dream")
    refused(path, "d_model, n_layers, n_heads, max_sequence_length, mlp_hidden_size", family="llada")  # all at once


def test_an_unknown_network_is_refused_once_with_every_way_to_score_it(tmp_path):
    """Before anyone is asked to trust code, and before the tokenizer is read: the folder has none."""
    code = {"auto_map": {"AutoModelForCausalLM": "modeling.NewLM"}}
    configs = [
        ({"model_type": "mdml9", "architectures": ["NewLM"], "hidden_size": 4}, r"NewLM \(model_type 'mdml9'\)"),
        ({"architectures": ["NewLM"]}, "NewLM, and it has no model_type"),
        ({"model_type": "mdml9"}, "no named class"),
    ]
    trust = {
        None: "trust the code.*backend=remote,trust_remote_code=true.*",
        "causal": "trust the code.*trust_remote_code=true.*",
    }
    for (config, name), attention in itertools.product(configs, trust):
        (tmp_path / "config.json").write_text(json.dumps(config))
        ways = rf"^By its config\.json .*{name}.*family=.*Duel\.from_model.*docs/checkpoints\.md"
        refused(str(tmp_path), ways, attention=attention)

        (tmp_path / "config.json").write_text(json.dumps({**config, **code}))
        ways = rf"^By its config\.json .*{name}.*family=.*{trust[attention]}Duel\.from_model.*docs/checkpoints\.md"
        refused(str(tmp_path), ways, attention=attention)


def test_an_unknown_class_over_a_known_model_type_is_called_unknown_and_every_way_named_works(tmp_path):
    """Its model type alone does not make it autoregressive."""
    bidirectional = {"attention": "bidirectional", "mask_token_id": 4}
    path, causal = written(tmp_path, "llama", {"architectures": ["MyDiffusionLM"]})
    for options in ({}, bidirectional, causal):
        refused(path, r"^((?!, autoregressive).)*MyDiffusionLM((?!, autoregressive).)*$", **options)
        refused(path, r"family=.*\[\"LlamaForCausalLM\"\].*estimator=ar.*attention=bidirectional", **options)
    assert denoisers.load(path, device="cpu", family="a2d-llama", mask_token_id=4).attention == "bidirectional"

    path, _ = written(tmp_path, "llama", {"architectures": ["LlamaForCausalLM"]})
    for options in (bidirectional, causal):
        assert denoisers.load(path, device="cpu", **options).attention == options["attention"]

    # `attention` is for the decoders that are run here, so it is not offered where it leads to this error again.
    refused(path, r"or attention=bidirectional with mask_token_id")
    path, _ = written(tmp_path, "gpt2")
    refused(path, r"^((?!or attention=bidirectional).)*estimator=ar((?!or attention=bidirectional).)*$")


# ---------------------------------------------------------------- arguments that do not apply

ARGUMENTS = [  # a family, arguments, and what the error names: the last argument unless said
    ("mdlm", {"family": "mdml"}, None),
    ("mdlm", {"attention": "block_causal"}, None),
    ("mdlm", {"dtype": "bfloat16"}, None),
    ("mdlm", {"max_length": 17}, None),
    ("mdlm", {"mask_token_id": 13}, None),
    ("mdlm", {"sigma": "clamped"}, "no choice of 'sigma'"),
    ("mdlm", {"backend": "native"}, "no choice of 'backend'"),
    ("mdlm", {"shift_logits": True}, "no choice of 'shift_logits'"),
    ("mdlm", {"peft": "folder"}, "no choice of 'peft'"),
    ("mdlm", {"device_map": "auto"}, "no choice of 'device_map'"),
    ("mdlm", {"load_in_8bit": True}, "no choice of 'load_in_8bit'"),
    ("mdlm", {"load_in_4bit": True}, "no choice of 'load_in_4bit'"),
    ("mdlm", {"first_token": "block"}, "no choice of 'first_token'"),
    ("sedd", {"sigma": "shedule"}, "Did you mean schedule"),
    ("bd3lm", {"block": 8}, None),
    ("bd3lm", {"cfg_scale": 1.5}, "cfg_scale masks the whole context"),
    ("dream", {"family": "open-dlm"}, "Did you mean open-dllm"),
    ("dream", {"attention": "causal"}, "autoregressive"),
    ("llada-moe", {"mask_token_id": 40}, None),
    ("rnd1", {"mask_token_id": 0}, "pad_token_id"),
    ("open-dllm", {"family": None}, "estimator=ar"),
    ("plain block_causal", {"block": None}, None),
    ("diffugpt", {"attention": "causal"}, "autoregressive"),
    ("d2f-llada", OWN, "backend"),
    ("nemotron-labs-diffusion", {"cache": "dual"}, None),
    ("nemotron-labs-diffusion", OWN, "backend"),
    ("nemotron-labs-diffusion", {"attention": "causal", "first_token": "block"}, None),
    ("nemotron-labs-diffusion", {"first_token": "blok"}, "Did you mean block"),
    ("bert", {"attention": "block_causal"}, None),
    ("bert", {"attention": "causal"}, "causal"),
    ("bert", {"shift_logits": True}, "no choice of 'shift_logits'"),
    ("bert", {"backend": "native"}, "no choice of 'backend'"),
    ("bert", {"sigma": "clamped"}, "no choice of 'sigma'"),
    ("bert", {"peft": "adapter"}, "no choice of 'peft'"),
    ("bert", OWN, "has no code"),
    ("esm", {"cache": "dual"}, None),
    ("gpt2", {"attention": None}, "estimator=ar.*family="),
    ("gpt2", {"attention": "bidirectional", "mask_token_id": 4}, "estimator=ar.*family="),
    ("gpt2", {"sigma": "clamped"}, "no choice of 'sigma'"),
    ("gpt2", {"shift_logits": True}, "no choice of 'shift_logits'"),
    ("gpt2", {"mask_token_id": 4}, "no choice of 'mask_token_id'"),
    ("gpt2", {"first_token": "block"}, "no choice of 'first_token'"),
    ("own dream", {"sigma": "schedule"}, "no choice of 'sigma'"),
    ("own dream", {"load_in_8bit": True}, "no choice of 'load_in_8bit'"),
    ("own dream", {"load_in_4bit": True}, "no choice of 'load_in_4bit'"),
    ("own dream", {"attention": "causal"}, None),
    ("own dream", {"trust_remote_code": False}, "trust_remote_code"),
]


def test_arguments_that_do_not_apply_are_refused_by_name(tmp_path_factory, subtests):
    paths = {}
    for name, arguments, words in ARGUMENTS:
        if name not in paths:
            paths[name] = written(tmp_path_factory.mktemp("arguments"), name)
        path, options = paths[name]
        with subtests.test(f"{name}: {arguments}"):
            refused(path, words or list(arguments)[-1], **{**options, **arguments})
    path, _ = paths["mdlm"]
    denoisers.load(path, device="cpu", family="mdlm", attention="bidirectional", dtype="float32", shift_logits=False)


def test_names_and_devices(capsys, tmp_path):
    for misspelt, bundled in (("demo-md", "demo-mdm"), ("demo_bd", "demo-bd")):
        with pytest.raises(SystemExit, match=rf"Did you mean the bundled {bundled}\?"):
            main(["inspect", misspelt])
    refused("gpt", "^((?!Did you mean).)*$")
    for path in (str(tmp_path / "nothing"), "./nothing", "no/such/name"):
        refused(path, rf"^{re.escape(path)} is not a local folder(?!.*Repo id)")
    path, _ = written(tmp_path, "bert")
    tiny.tokenizer(mask=False).save_pretrained(tmp_path)
    refused(path, "mask_token_id")
    assert denoisers.load(path, device="cpu", mask_token_id=4).mask_id == 4


def test_a_folder_that_is_no_checkpoint_is_told_by_its_files(tmp_path):
    """And so is a path of a file, or below a folder that is there."""
    refused(str(tmp_path), "no config.json.*save_pretrained")
    written_by_training = tmp_path / "run" / "checkpoint-500"
    written_by_training.mkdir(parents=True)
    path, _ = written(written_by_training, "bert")
    refused(str(tmp_path / "run"), re.escape(str(path)))
    refused(f"{path}/config.json", rf"folder, {re.escape(str(path))}\.")
    refused(f"{tmp_path}/run/nothing", "is not a local folder")
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "some/network"}))
    refused(str(adapter), "some/network, as pretrained and this folder as peft")


def test_a_config_without_a_class_is_not_taken_for_an_autoregressive_one(tmp_path):
    path, _ = written(tmp_path, "a2d-qwen3", {"architectures": None, "model_type": "qwen3"})
    refused(path, r"family=.*Qwen3ForCausalLM.*estimator=ar.*attention=bidirectional.*from_model")


def test_a_checkpoint_without_a_mask_token_lists_what_may_be_it(tmp_path):
    path, _ = written(tmp_path, "bert")
    tokenizer = tiny.tokenizer(mask=False)
    tokenizer.add_tokens(["<|mdm_mask|>", "masks"])
    tokenizer.save_pretrained(tmp_path)
    number = tokenizer.convert_tokens_to_ids("<|mdm_mask|>")
    refused(path, rf"mask_token_id=<id>.*<\|mdm_mask\|> \(id {number}\)(?!.*masks)")


def test_devices_that_there_are_not():
    wrong = ["mps", "xpu", "nowhere"]
    if not torch.cuda.is_available():
        wrong.append("cuda")
        assert pick_device("cuda:0") == pick_device(None)
        assert pick_device("0") == pick_device(None)
    assert pick_device("cpu:0").type == "cpu"  # the name that accelerate gives
    for name in wrong:
        with pytest.raises(DuelError, match=f"'{name}'"):
            pick_device(name)


# ---------------------------------------------------------------- rules and windows that do not apply

FIRST = "nemotron-labs-diffusion"
USES = [  # a family, what is done with it, and what the error names
    ("bd3lm", {"block": 8}, None, "block=8"),
    ("bd3lm", {}, Window((), (1,) * 17), "17 positions"),
    ("bd3lm", {}, Window((), (1,) * 4, (2,)), "suffix"),
    ("sdar", {"grid": "target"}, None, "grid|row's first position"),
    ("d2f-llada", {}, Window((6, 7, 9), (30, 12, 8), (5, 5, 5)), "suffix"),
    (FIRST, {"grid": "row"}, None, "grid=target"),
    (FIRST, {}, Window((), (5, 6)), "context"),
    ("dream", {"block": 4}, Window((), (5, 6)), "context"),
    ("bert", {"block": 4}, Window((), (5,) * 33), "33 positions"),
    ("bert", {"block": 4}, Window((4,), (5,)), "mask token"),
    ("bert", {"block": 4}, Window((), (40,)), "id 40"),
    ("gpt2", {"rule": "greedy"}, None, "estimator=ar"),
    ("gpt2", {"block": 4}, None, "block=4"),
    ("gpt2", {}, Window((), (5, 6)), "context"),
]


def test_rules_and_windows_that_do_not_apply(tmp_path_factory, subtests):
    networks = {}
    for name, arguments, window, words in USES:
        if name not in networks:
            path, options = written(tmp_path_factory.mktemp("uses"), name)
            networks[name] = load(path, options)
        arguments = {"rule": "left_to_right" if name == "gpt2" else "greedy", **arguments}
        with subtests.test(f"{name}: {arguments} {window}"), pytest.raises(DuelError, match=words):
            Duel(networks[name], **arguments).log_prob([window] if window else [])
