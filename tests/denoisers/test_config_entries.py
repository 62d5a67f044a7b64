"""Every entry of a config.json is read, changes no number, or is refused or named."""

import logging
from pathlib import Path
from types import SimpleNamespace

import decoder_reference
import dit_reference
import pytest
import torch
from close import check
from decoder_reference import CASES, VARIANTS
from laws import slow_but
from networks import DITS, NOISED, fitting, load, refused, textbook, written

from lm_eval_duel import Duel
from lm_eval_duel.denoisers.dit import checkpoint
from lm_eval_duel.denoisers.hf.families import HARMLESS, NAMED, OVERRIDDEN
from lm_eval_duel.errors import DuelError
from lm_eval_duel.harness.lm import DuelMDM

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
LLADA2 = [  # entries with which GLM-4-MoE is another network than the class
    {"routing_strategy": "block"},
    {"routing_strategy": "token", "expert_capacity": 6, "block_size": 4},
    {"rope_scaling": YARN},
    {"rope_scaling": {"type": "linear", "factor": 2.0}},
    {"rope_parameters": {**YARN, "rope_theta": 600_000}},
    {"score_function": "softmax"},
]


@pytest.mark.parametrize("entries", LLADA2, ids=str)
def test_a_llada2_of_another_network_is_refused(entries, tmp_path):
    """By the config alone, whatever the user says its family is, and without advice into the same hole."""
    entry = next(iter(entries))
    path, options = written(tmp_path, "llada2", entries)

    refused(path, entry, **options)
    refused(path, entry, **options, family="llada2")
    Path(path, "modeling_llada2_moe.py").write_text("def generate(self, editing_threshold=0.9): ...\n")
    refused(path, rf"^(?!.*pass family=llada2).*{entry}", **options)


@pytest.mark.parametrize("entry", ["delete_token_id", "split_token_id"])
def test_a_llada2_that_inserts_tokens_is_scored_without_if_the_user_names_the_family(entry, tmp_path):
    path, options = written(tmp_path, "llada2", {entry: 5})
    refused(path, "family=llada2", **options)
    assert load(path, options, family="llada2").unread_entries == ()


def test_routing_by_block_needs_the_block_and_the_experts_of_the_checkpoint(tmp_path):
    path, options = written(tmp_path, "llada2", {"expert_capacity": 6})  # blocks of 32, the family's
    refused(path, "trained on blocks of 32", **{**options, "block": 4})
    for capacity in (2, 13):  # of 12 experts, 3 a token
        folder = tmp_path / str(capacity)
        folder.mkdir()
        path, options = written(folder, "llada2", {"expert_capacity": capacity, "block_size": 4})
        refused(path, f"has {capacity}", **options)


@pytest.mark.parametrize("name", slow_but(["llada", "d2f-llada"], ["llada"]))
def test_llada_scales_its_embedding(name, tmp_path):
    """By the square root of its width (16), as in the authors' code; the head keeps its weights."""
    path, options = written(tmp_path, name, {"input_emb_norm": True})
    case = CASES[name]
    network = load(path, options, dtype="float64")
    w = {key: value.double() for key, value in decoder_reference.weights(case).items()}
    w["model.transformer.wte.weight"] = 4 * w["model.transformer.wte.weight"]

    def logits(ids, window):
        return decoder_reference.logits(case, w, ids, len(window.context))

    written_out = SimpleNamespace(denoiser=network, logits=logits)
    duel = Duel(network, "greedy", case.block or 4)
    for window in list(fitting(network))[:2]:
        [scored] = duel.log_prob([window])
        check(scored, textbook(written_out, "greedy", window))


# ---------------------------------------------------------------- entries that nothing here reads


def test_an_entry_that_nothing_reads_is_named_once_and_in_the_results(tmp_path, caplog):
    path, options = written(tmp_path, "sdar", {"new_gate": True, "new_norm": "l2", "initializer_range": 0.3, "z": None})
    with caplog.at_level(logging.WARNING):
        model = DuelMDM(pretrained=path, device="cpu", **options)

    messages = [record.getMessage() for record in caplog.records]
    [warning] = [message for message in messages if "new_gate" in message]
    assert "new_gate=True, new_norm=l2" in warning
    assert "initializer_range" not in warning
    assert model.get_model_info()["duel"]["unread_config"] == ["new_gate", "new_norm"]
    assert not any("new_gate" in str(value) for value in model.spec.values())


def test_a_family_whose_class_has_changed_takes_no_new_entry_unless_it_is_named(tmp_path):
    path, options = written(tmp_path, "llada2", {"new_gate": True})
    refused(path, "new_gate=True.*family=llada2", **options)
    assert load(path, options, family="llada2").unread_entries == ("new_gate",)


OURS = {name: {"new_gate": True} for name in (*DITS, *NOISED, "ar", "dplm")}
OURS["mdlm"] = {"cond_type": "film"}


@pytest.mark.parametrize("name", OURS)
def test_the_other_networks_of_ours_name_what_they_do_not_read(name, tmp_path):
    path, options = written(tmp_path, name, OURS[name])
    assert load(path, options).unread_entries == tuple(OURS[name])


def test_entries_inside_the_sections_of_sedd(tmp_path):
    model = {**dit_reference.SEDD["model"], "new_gate": True, "dropout": 0.1}
    path, options = written(tmp_path, "sedd", {"model": model, "training": {"ema": 0.9999}})
    assert load(path, options).unread_entries == ("model.new_gate",)


# ---------------------------------------------------------------- each entry of each family


IDLE = {  # entries that another entry of the same config leaves without a meaning
    **dict.fromkeys(("bidirectional", "sedd-retrained"), ("block_size",)),  # cross_attn is false
    "one-block": ("cross_attn", "block_size"),  # a block is the row
    "ar": ("cross_attn", "block_size", "cond_dim"),  # it is causal, without a time condition
}
OTHER = {"max_position_embeddings": 32}  # some networks are trained on fewer than the entry says


def other(value):
    """Another value of the same kind."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return value * 2 + 1
    if isinstance(value, str):
        return "gelu" if value == "silu" else "other"
    if isinstance(value, dict):
        return {key: other(entry) for key, entry in value.items()}
    return {"rope_type": "linear", "factor": 3.0} if value is None else [*value, 0]


def taken(denoiser):
    """What a run takes from a network: what is found at load, and values."""
    names = ("family", "attention", "shift", "block", "mask_id", "max_length", "vocab_size", "bos")
    seen = [getattr(denoiser, name) for name in names]
    if denoiser.noise_training is not None:
        level = denoiser.noise_inputs(torch.tensor([0.02], dtype=torch.float64))
        features = denoiser.features(torch.arange(6, 12)[None], None, **level)
        return [*seen, denoiser.head(features[0]).double().tolist()]
    block = "auto" if denoiser.block or denoiser.attention == "causal" else 4
    windows = list(fitting(denoiser))[:1]
    scores = Duel(denoiser, "left_to_right", block).log_prob(windows)
    return [*seen, *(score.log_prob for score in scores)]


def entries_of(name):
    """The entries of a network's config, and those that its family says something of; and the harmless ones."""
    if name not in CASES:
        return dit_reference.CONFIGS[name], {**HARMLESS, **checkpoint.HARMLESS}
    config = CASES[name].config
    family = NAMED.get(VARIANTS.get(name, name))
    if family is None:
        return config, {**HARMLESS, **dict.fromkeys(OVERRIDDEN)}
    released = {key: value for key, value in family.released.items() if not callable(value)}
    harmless = {**HARMLESS, **family.harmless, **dict.fromkeys(OVERRIDDEN)}
    return {**dict.fromkeys(family.harmless, 1), **released, **config}, harmless


@pytest.mark.slow
@pytest.mark.parametrize("name", [*CASES, *DITS, *NOISED, "ar"])
def test_an_entry_of_another_value_is_another_number_or_refused_or_named_or_harmless(name, tmp_path):
    entries, harmless = entries_of(name)
    more = {"dtype": "float64"} if name in CASES else {}
    path, options = written(tmp_path, name)
    before = taken(load(path, options, **more))
    silent = []
    for n, key in enumerate(entries):
        if key in harmless or key in IDLE.get(name, ()):
            continue
        folder = tmp_path / str(n)
        folder.mkdir()
        value = entries[key]
        if isinstance(value, tuple):  # of several
            value = value[0]
        path, options = written(folder, name, {key: OTHER.get(key, other(value))})
        try:
            denoiser = load(path, options, **more)
            if taken(denoiser) == before and key not in denoiser.unread_entries:
                silent.append(key)
        except DuelError:
            pass
    assert not silent
