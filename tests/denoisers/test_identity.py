"""What every known class of discrete diffusion models is taken for by its config.json alone, or why it is refused."""

import itertools
import json

import dit_reference
import pytest
import tiny
import torch
from decoder_reference import CASES, LLAMA, QWEN3, without
from networks import refused

from lm_eval_duel.denoisers.checkpoint import Checkpoint
from lm_eval_duel.denoisers.dit import checkpoint
from lm_eval_duel.denoisers.hf.diffusion_gemma import CLASS
from lm_eval_duel.denoisers.load_options import LoadOptions
from lm_eval_duel.errors import DuelError
from lm_eval_duel.options import Options
from lm_eval_duel.text.loading import load_scorer

GPT2_SIZE = {"hidden_dim": 768, "n_blocks": 12, "n_heads": 12, "cond_dim": 128, "model_length": 1024}
MDLM = dit_reference.CONFIGS["mdlm"]
BD3LM = dit_reference.CONFIGS["bd3lm"]
SEDD = dit_reference.CONFIGS["sedd"]
GIDD = dit_reference.CONFIGS["gidd"]
SIZES = {key: MDLM[key] for key in ("vocab_size", "model_length", "hidden_dim", "n_blocks", "n_heads")}
DUO = {**GPT2_SIZE, "architectures": ["DUO"], "model_type": "DUO", "causal": False, "var_min": True}
DUO["vocab_size"] = 50258
UDLM = {"model_type": "udlm", "time_conditioning": True, "vocab_size": 30522, **GPT2_SIZE}
TIMED = {**MDLM, "time_conditioning": True}


def of_class(name, base=QWEN3, **entries):
    return {**base, "architectures": [name], "model_type": "own", **entries}


ACCEPTED = {  # a config, and the family that it is
    "MDLM with its code": ({**MDLM, "auto_map": {"AutoModelForMaskedLM": "modeling_mdlm.MDLM"}}, "mdlm"),
    "MDLM without a class": (without(MDLM, "architectures"), "mdlm"),
    "MDLM without a model type": (without(MDLM, "model_type"), "mdlm"),
    "MDLM with its authors' entries": ({**MDLM, "parameterization": "subs", "diffusion": "absorbing_state"}, "mdlm"),
    "MDLM and entries of no effect": ({**MDLM, "return_dict": False, "dropout": 0.1, "noise": 0.5}, "mdlm"),
    "SEDD by its parameterization": ({**TIMED, "parameterization": "sedd"}, "sedd"),
    "SEDD and its noise": ({**SEDD, "noise": {"type": "loglinear", "sigma_max": 20}}, "sedd"),
    "GIDD with uniform noise": ({**GIDD, "p_uniform": 0.1}, "gidd-uniform"),
    "Duo as published": (DUO, "duo"),
    "Duo without a model type": (without(DUO, "model_type"), "duo"),
    "UDLM as published": (UDLM, "udlm"),
    "Duo with its authors' entries": ({**DUO, "parameterization": "mean", "diffusion": "uniform_state"}, "duo"),
    "UDLM with its authors' entries": ({**UDLM, "parameterization": "d3pm", "diffusion": "uniform"}, "udlm"),
    "MDLM and p_uniform=0": ({**MDLM, "p_uniform": 0.0, "noise": {"name": "loglinear"}}, "mdlm"),
    "GIDD with uniform noise as text": ({**GIDD, "p_uniform": "0.1"}, "gidd-uniform"),
    "UDLM by its class": ({**without(UDLM, "model_type"), "architectures": ["UDLM"]}, "udlm"),
}
NOISED = [case for case, (_, family) in ACCEPTED.items() if family in ("gidd-uniform", "duo", "udlm")]
REFUSED = {  # a config, and what the error names
    "Duo that calls itself MDLM": ({**DUO, "model_type": "mdlm"}, "DUO"),
    "Duo by its code": ({**MDLM, "auto_map": {"AutoModelForMaskedLM": "model.DUO"}}, "DUO"),
    "Duo that is causal": ({**DUO, "causal": True}, "causal=true"),
    "MDLM with GIDD's noise": ({**MDLM, "p_uniform": 0.2}, "p_uniform=0.2"),
    "MDLM with noise of no kind": ({**MDLM, "noise": {"eps": 0.1}}, "noise without a type"),
    "BD3-LM without cross_attn": (without(BD3LM, "cross_attn"), "no cross_attn"),
    "UDLM without the time": ({**UDLM, "time_conditioning": False}, "time_conditioning"),
    "UDLM with classes": ({**UDLM, "cfg": True}, "cfg=true"),
    "GIDD of noise without masks": ({**GIDD, "p_uniform": 1.0}, "p_uniform=1"),
    "MDLM's sizes without a name": (SIZES, "neither a class nor a model type"),
    "MDLM's sizes under another name": ({**SIZES, "model_type": "mdlm2"}, "mdlm2"),
    "MDLM of another class": ({**MDLM, "architectures": ["MDLMBPE"]}, "MDLMBPE"),
    "MDLM of E2D2's authors": ({"model_type": "mdlm", "architectures": ["MDLM"], "length": 1024}, "hidden_dim"),
    "MDLM that is given the time": (TIMED, "family=sedd"),
    "SEDD that is not given the time": ({**MDLM, "model_type": "sedd"}, "time_conditioning=false"),
    "SEDD with a graph of no type": ({**SEDD, "graph": {}}, "graph without a type"),
    "SEDD of another scale": ({**SEDD, "model": {**SEDD["model"], "scale_by_sigma": False}}, "scale_by_sigma"),
    "SEDD with the class of a Llama": ({**SEDD, **LLAMA, "architectures": ["LlamaForCausalLM"]}, "estimator=ar"),
    "GIDD of another class": ({**GIDD, "architectures": ["GiddForDiffusionLM"], "model_type": "gidd"}, "gidd"),
    "GIDD with MDLM's class": ({**GIDD, "architectures": ["MDLM"]}, "names MDLM, dit"),
    "an image DiT": ({"model_type": "dit", "hidden_size": 768}, "has no vocab_size"),
    "a Llama, such as DiffuLLaMA": ({**LLAMA, "architectures": ["LlamaForCausalLM"]}, "estimator=ar"),
    "a class of no family, such as NeoBERT": (of_class("NeoBERTLMHead"), "'own'"),
    "a class of no family on a BERT": (of_class("DiffusionBertForMaskedLM", {}, model_type="bert"), "DiffusionBert"),
    "LLaDA and Duo": ({**CASES["llada"].config, "architectures": ["LLaDAModelLM", "DUO"]}, "DUO"),
}


@pytest.mark.parametrize("case", ACCEPTED)
def test_a_config_is_accepted_for_what_it_says(case, tmp_path):
    config, family = ACCEPTED[case]
    (tmp_path / "config.json").write_text(json.dumps(config))
    mask = {} if family in ("duo", "udlm") else {"mask_token_id": 12}
    assert checkpoint.unfilled(Checkpoint.open(str(tmp_path), "cpu", **mask)).family == family


def test_numbers_that_are_text_are_numbers(tmp_path):
    config = {**GIDD, "p_uniform": "0.1", "t_eps": "0.25"}
    options = LoadOptions(str(tmp_path), torch.device("cpu"), mask_token_id=12)

    denoiser = checkpoint.unfilled(Checkpoint(options, config))

    assert denoiser.uniform == 0.1
    assert denoiser.t_eps == 0.25


@pytest.mark.parametrize("case", REFUSED)
def test_a_config_is_refused_if_it_says_something_else(case, tmp_path):
    config, words = REFUSED[case]
    tiny.tokenizer().save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(config))
    refused(str(tmp_path), words)


WRONG = [
    (MDLM, "uniform"),
    (SEDD, "uniform"),
    (CASES["dream"].config, "uniform"),
    (DUO, "absorbing_state"),
    ({**GIDD, "p_uniform": 0.1}, "absorbing"),
]


@pytest.mark.parametrize("key", ["diffusion", "graph", "noise", "parameterization", "noise_type", "forward_process"])
def test_an_entry_that_names_other_noise_or_another_output_is_refused(key, tmp_path):
    tiny.tokenizer().save_pretrained(tmp_path)
    for (config, value), field in itertools.product(WRONG, ("type", "name", None)):
        has_a_section = key in ("graph", "noise") and field == "type"
        if config is SEDD and not has_a_section:
            continue
        entry = {field: value} if field else value
        (tmp_path / "config.json").write_text(json.dumps({**config, key: entry}))
        refused(str(tmp_path), f"{key}={value}")


ESTIMATORS = [  # configs, estimators that do not score them, and the ones that the error names
    ([ACCEPTED[case][0] for case in NOISED], ["ar", "elbo", "mixture", "two_phase"], "noised_elbo"),
    ([of_class(CLASS), {"model_type": "diffusion_gemma"}], ["elbo", "mixture"], r"noised_elbo.*estimator=ar"),
    ([MDLM], ["noised_elbo"], "estimator=elbo"),
]


@pytest.mark.parametrize(("configs", "estimators", "named"), ESTIMATORS)
def test_noise_decides_which_estimators_there_are(configs, estimators, named, tmp_path):
    """Before any weight is read: the folder has none."""
    for config, estimator in itertools.product(configs, estimators):
        (tmp_path / "config.json").write_text(json.dumps(config))
        with pytest.raises(DuelError, match=named):
            load_scorer(Options.parse({"pretrained": str(tmp_path), "estimator": estimator}))
