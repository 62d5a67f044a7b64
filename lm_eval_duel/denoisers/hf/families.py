"""The translation of each family's config entries and tensors to transformers' own classes."""

from __future__ import annotations

import dataclasses
import logging
import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import field
from pathlib import Path
from typing import Any

import torch

from lm_eval_duel.arguments import COUNT
from lm_eval_duel.denoisers.load_options import NO_ORDER, LoadOptions, class_names
from lm_eval_duel.errors import DuelError, require_known

Tensors = dict[str, torch.Tensor]
Config = dict[str, Any]

# required entries of a native config: without one, its class would silently use its own default
SIZES = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "max_position_embeddings")
DENSE = (*SIZES, "intermediate_size", "rms_norm_eps", "rope_theta")
SPARSE = (*SIZES, "moe_intermediate_size", "num_experts_per_tok", "rms_norm_eps", "rope_theta", "norm_topk_prob")
GROUPED = ("n_group", "topk_group", "routed_scaling_factor", "first_k_dense_replace", "intermediate_size")
NEEDED = {
    "GPT2": (*SIZES, "layer_norm_epsilon"),
    "Llama": DENSE,
    "Qwen2": DENSE,
    "Qwen3": DENSE,
    "Qwen3Moe": (*SPARSE, "num_experts"),
    "Glm4Moe": (*SPARSE, *GROUPED, "n_routed_experts", "n_shared_experts", "partial_rotary_factor"),
}


def lookup(config: Config, key: str) -> Any:
    """An entry, which transformers 5 may have moved into `rope_parameters`; None if absent."""
    value = config.get(key)
    return (config.get("rope_parameters") or {}).get(key) if value is None else value


LLADA: dict[str, Any] = {
    "entries": {
        "hidden_size": "d_model",
        "intermediate_size": "mlp_hidden_size",
        "num_hidden_layers": "n_layers",
        "num_attention_heads": "n_heads",
        "num_key_value_heads": "n_kv_heads",
        "max_position_embeddings": "max_sequence_length",
        "tie_word_embeddings": "weight_tying",
    },
    "values": {"rms_norm_eps": 1e-5},
    "released": {
        **dict.fromkeys(("include_bias", "include_qkv_bias", "alibi", "scale_logits"), False),
        **{"block_type": "llama", "layer_norm_type": "rms", "activation_type": "silu"},
    },
    "rename": (
        (r"^model\.transformer\.wte\.", "model.embed_tokens."),
        (r"^model\.transformer\.ln_f\.", "model.norm."),
        (r"^model\.transformer\.ff_out\.", "lm_head."),
        (r"^model\.transformer\.blocks\.(\d+)\.([qkv])_proj\.", r"model.layers.\1.self_attn.\2_proj."),
        (r"^model\.transformer\.blocks\.(\d+)\.attn_out\.", r"model.layers.\1.self_attn.o_proj."),
        (r"^model\.transformer\.blocks\.(\d+)\.ff_proj\.", r"model.layers.\1.mlp.gate_proj."),
        (r"^model\.transformer\.blocks\.(\d+)\.up_proj\.", r"model.layers.\1.mlp.up_proj."),
        (r"^model\.transformer\.blocks\.(\d+)\.ff_out\.", r"model.layers.\1.mlp.down_proj."),
        (r"^model\.transformer\.blocks\.(\d+)\.attn_norm\.", r"model.layers.\1.input_layernorm."),
        (r"^model\.transformer\.blocks\.(\d+)\.ff_norm\.", r"model.layers.\1.post_attention_layernorm."),
    ),
}


def llada(config: Config) -> Config:
    """The rows of LLaDA's embedding, some of which are padding."""
    return {"vocab_size": config.get("embedding_size") or config["vocab_size"]}


def mmada(config: Config) -> Config:
    """The rows of LLaDA's embedding, and the rows that MMaDA added for the codes of images."""
    return {"vocab_size": max(config.get(key) or 0 for key in ("vocab_size", "embedding_size", "new_vocab_size"))}


SMDM_ENTRIES = {  # of lit_gpt
    "hidden_size": "n_embd",
    "num_hidden_layers": "n_layer",
    "num_attention_heads": "n_head",
    "num_key_value_heads": "n_query_groups",
    "rms_norm_eps": "norm_eps",
    "max_position_embeddings": "block_size",
}
SMDM_KEYS = (
    (r"^transformer\.wte\.", "model.embed_tokens."),
    (r"^transformer\.ln_f\.", "model.norm."),
    (r"^transformer\.h\.(\d+)\.attn\.([qkv])_proj\.", r"model.layers.\1.self_attn.\2_proj."),
    (r"^transformer\.h\.(\d+)\.attn\.proj\.", r"model.layers.\1.self_attn.o_proj."),
    (r"^transformer\.h\.(\d+)\.norm_1\.", r"model.layers.\1.input_layernorm."),
    (r"^transformer\.h\.(\d+)\.norm_2\.", r"model.layers.\1.post_attention_layernorm."),
    (r"^transformer\.h\.(\d+)\.mlp\.swiglu\.w1\.", r"model.layers.\1.mlp.gate_proj."),
    (r"^transformer\.h\.(\d+)\.mlp\.swiglu\.w2\.", r"model.layers.\1.mlp.up_proj."),
    (r"^transformer\.h\.(\d+)\.mlp\.swiglu\.w3\.", r"model.layers.\1.mlp.down_proj."),
)


def smdm_tensors(tensors: Tensors, config: Config) -> Tensors:
    """Split attn.attn (in each group its q heads, its k, its v) into projections; give the head a row for [MASK]."""
    heads = config["n_head"]
    groups = config.get("n_query_groups") or heads
    split = {}
    for key, value in tensors.items():
        if key == "lm_head.weight" and value.shape[:1] == (config["vocab_size"],):
            value = torch.cat([value, value.new_zeros(1, *value.shape[1:])])  # its column is never a token
        if ".attn.attn." not in key:
            split[key] = value
            continue
        grouped = value.unflatten(0, (groups, heads // groups + 2, -1))  # (groups, own, H, D)
        parts = tuple(part.flatten(0, 2) for part in grouped.split((heads // groups, 1, 1), 1))
        split |= {key.replace(".attn.attn.", f".attn.{x}_proj."): part for x, part in zip("qkv", parts, strict=True)}
    return split


# ---------------------------------------------------------------- NVIDIA

NEMOTRON_KEYS = ((r"^encoder\.", "model."), (r"^diffusion_head\.", "lm_head."))
YARN = ("factor", "original_max_position_embeddings", "beta_fast", "beta_slow", "mscale", "mscale_all_dim")


def nemotron(config: Config) -> Config:
    """Nemotron-Labs-Diffusion's entries for Llama, whose rotary positions are YaRN's with the checkpoint's own factor.

    Its queries are scaled by 1 + b ln(1 + floor(position / original_max_position_embeddings)), which is 1 up to that
    length; rows are no longer. A factor below 1 is meant as it stands. Raises DuelError for a config without them.
    """
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if (rope.get("rope_type") or rope.get("type")) != "yarn" or not all(rope.get(key) for key in YARN[:2]):
        raise DuelError(
            "This Nemotron-Labs-Diffusion is not the released network: its rope_parameters should be YaRN's (rope_type "
            f"yarn, factor, original_max_position_embeddings); got {rope!r}."
        )
    theta = lookup(config, "rope_theta")
    scaled = {"rope_type": "yarn", **{key: rope[key] for key in YARN if rope.get(key) is not None}}
    return {"rope_theta": theta, "rope_scaling": None, "rope_parameters": {**scaled, "rope_theta": theta}}


def nemotron_research_fields(config: Config) -> dict[str, Any]:
    """True if logits are shifted: in Dream's way (dlm_type "dream"), or not, as LLaDA's."""
    kind = config.get("dlm_type")
    if kind not in (None, "llada", "dream"):
        raise DuelError(f"The config.json is wrong: 'dlm_type' must be llada or dream; got {kind!r}.")
    return {"shift": 1, "bos": "given"} if kind == "dream" else {}


# ---------------------------------------------------------------- adapted from autoregressive networks

DIFFUGPT_TRUNK = "denoise_model."  # the beginning of its tensors' names, which no GPT-2 has
DIFFUGPT: dict[str, Any] = {
    "entries": {
        "hidden_size": "n_embd",
        "num_hidden_layers": "n_layer",
        "num_attention_heads": "n_head",
        "max_position_embeddings": "n_positions",
    },
    "values": {"activation_function": "gelu_new", "tie_word_embeddings": True},  # the head is not stored
    "released": {  # transformers' fast attention ignores them
        "scale_attn_weights": True,
        "scale_attn_by_inverse_layer_idx": False,
        "reorder_and_upcast_attn": False,
        "add_cross_attention": False,
    },
    "rename": ((r"^embed_tokens\.", "transformer.wte."), (r"^denoise_model\.", "transformer.")),
}
DIFFUGPT_MASKS = {50257: 10541, 50258: 50257}  # by vocab_size: diffugpt-s made a token of GPT-2 its [MASK]


def diffugpt_fields(config: Config) -> dict[str, Any]:
    """[MASK] of the two published sizes."""
    return {"mask_id": DIFFUGPT_MASKS.get(config.get("vocab_size"))}


# ---------------------------------------------------------------- mixtures of experts


def llada_moe(config: Config) -> Config:
    """LLaDA-MoE's entries for Qwen3-MoE."""
    return {
        "intermediate_size": config.get("dense_intermediate_size") or config["expert_intermediate_size"],
        "head_dim": config["hidden_size"] // config["num_attention_heads"],
        "norm_topk_prob": False,  # the authors' code ignores this entry and never normalises
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


def llada2(config: Config) -> Config:
    """LLaDA2's entries for GLM-4-MoE."""
    part, theta = (lookup(config, key) for key in ("partial_rotary_factor", "rope_theta"))
    return {
        "use_qk_norm": True,
        "attention_bias": False,
        "norm_topk_prob": config["num_experts_per_tok"] > 1,
        "partial_rotary_factor": part or 0.5,
        "rope_scaling": None,
        "rope_parameters": {"rope_type": "default", "rope_theta": theta, "partial_rotary_factor": part or 0.5},
    }


LLADA2_RELEASED = {
    **dict.fromkeys(("use_bias", "use_qkv_bias", "norm_head"), False),
    "use_qk_norm": True,
    "quantization_config": None,  # its query_key_value could not be split
}
LLADA2_KEYS = (
    (r"^model\.word_embeddings\.", "model.embed_tokens."),
    (r"\.attention\.dense\.", ".self_attn.o_proj."),
    (r"\.attention\.query_layernorm\.", ".self_attn.q_norm."),
    (r"\.attention\.key_layernorm\.", ".self_attn.k_norm."),
    (r"\.attention\.([qkv])_proj\.", r".self_attn.\1_proj."),
    (r"\.mlp\.gate\.expert_bias$", ".mlp.gate.e_score_correction_bias"),
)


def llada2_tensors(tensors: Tensors, config: Config) -> Tensors:
    """Split query_key_value (heads of q, then of k, then of v) into projections; shift expert biases above 0.

    Only the order of biased scores matters, and transformers 4 gives experts outside the chosen groups a score of 0.
    """
    heads, kept = config["num_attention_heads"], config.get("num_key_value_heads") or config["num_attention_heads"]
    head = config.get("head_dim") or config["hidden_size"] // heads
    split = {}
    for key, value in tensors.items():
        if key.endswith(".expert_bias"):
            value = value.float() - value.float().min().clamp(max=0)
        if ".query_key_value." not in key:
            split[key] = value
            continue
        ends = heads * head, (heads + kept) * head
        parts = value[: ends[0]], value[ends[0] : ends[1]], value[ends[1] :]  # shapes are checked later
        split |= {key.replace("query_key_value", f"{x}_proj"): part for x, part in zip("qkv", parts, strict=True)}
    return split


# ---------------------------------------------------------------- families
# The families of masked diffusion models that transformers' own decoder classes can run.
#
# A family is detected by the class names in config.json (`architectures`, `auto_map`), never by `model_type`, which is
# wrong in some checkpoints. Each entry of the table names the native class with the same network, how tensors and
# config
# entries are translated, and what the config leaves out.


log = logging.getLogger("lm_eval.duel_mdm")


@dataclasses.dataclass(frozen=True)
class Family:
    """A kind of masked diffusion model and the layout of its checkpoints. Entries of a config override these values."""

    name: str
    native: str  # the class of transformers: <native>ForCausalLM, <native>Config
    architectures: tuple[str, ...] = ()  # class names in config.json
    attention: str = "bidirectional"
    shift: int = 0
    block: int | None = None  # the trained block of a block-causal network
    block_keys: tuple[str, ...] = ("block_size", "bd_size", "block_length")  # entries of config.json with this block
    anchor: str = "row"  # where blocks count from; "target": the context is one block
    published_block: int | None = None
    mask_id: int | None = None
    max_length: int | None = None  # if the network was trained on fewer positions than its config has
    unscaled: bool = False  # rows end where the config would scale queries by position, which the native class does not
    bos: str = "none"
    entries: Mapping[str, str] = field(default_factory=dict)  # native names of config entries that have other ones
    values: Mapping[str, Any] = field(default_factory=dict)  # of native entries that a config may lack
    needs: tuple[str, ...] = ()  # entries that config.json must have, besides the native class's
    released: Mapping[str, Any] = field(default_factory=dict)  # without these the native class is another network
    rename: tuple[tuple[str, str], ...] = ()  # tensor names to native ones: regular expressions, the first match counts
    adapt: Callable[[Config], dict[str, Any]] = lambda config: {}  # fields of this entry that a config decides
    translate_config: Callable[[Config], Config] = lambda config: {}  # native entries beyond renaming
    translate_tensors: Callable[[Tensors, Config], Tensors] = lambda tensors, config: tensors  # beyond renaming

    def block_in(self, config: Config) -> int | None:
        """The trained block in a config.json."""
        blocks = (COUNT(key, config.get(key), " of config.json") for key in self.block_keys)
        return next((block for block in blocks if block), None)


FAMILIES: tuple[Family, ...] = (
    Family(
        "llada",
        "Llama",
        ("LLaDAModelLM",),
        published_block=32,
        mask_id=126336,
        **LLADA,
        translate_config=llada,
    ),
    Family(
        "mmada",
        "Llama",
        ("MMadaModelLM",),
        published_block=128,
        mask_id=126336,
        **LLADA,
        translate_config=mmada,
    ),
    Family(
        "smdm",
        "Llama",
        ("TransEncoder",),
        block_keys=(),  # lit_gpt's block_size is the row length
        mask_id=32000,
        bos="given",
        entries=SMDM_ENTRIES,
        values={"rope_theta": 10_000.0},
        rename=SMDM_KEYS,
        translate_config=lambda config: {"vocab_size": config["vocab_size"] + 1},  # a row for [MASK]
        translate_tensors=smdm_tensors,
    ),
    Family("illada", "Llama", ("ILLaDAForCausalLM",), mask_id=5, released={"layer_norm_eps": None}),
    Family("dream", "Qwen2", ("DreamModel",), shift=1, mask_id=151666, max_length=2048, bos="given"),
    Family(
        "llada-moe",
        "Qwen3Moe",
        ("LLaDAMoEModelLM", "LLaDAMoEModel"),
        published_block=32,
        mask_id=156895,
        entries={"moe_intermediate_size": "expert_intermediate_size"},
        values={"rms_norm_eps": 1e-5, "norm_topk_prob": False},
        translate_config=llada_moe,
    ),
    Family("rnd1", "Qwen3Moe", ("RND1LM", "RND1"), mask_id=151669),
    Family("a2d-qwen3", "Qwen3", ("A2DQwen3LMHeadModel",), max_length=1024),
    Family("a2d-qwen2", "Qwen2", ("A2DQwen2LMHeadModel",), max_length=1024),
    Family("a2d-llama", "Llama", ("A2DLlamaLMHeadModel",), max_length=1024),
    Family("a2d-qwen3-bd3lm", "Qwen3", attention="block_causal", block=32, max_length=1024),
    Family("a2d-qwen2-bd3lm", "Qwen2", attention="block_causal", block=32, max_length=1024),
    Family("a2d-llama-bd3lm", "Llama", attention="block_causal", block=32, max_length=1024),
    Family("open-dllm", "Qwen2", shift=1, bos="given"),
    Family("sdar", "Qwen3", ("SDARForCausalLM",), attention="block_causal", block=4, mask_id=151669),
    Family("sdar-moe", "Qwen3Moe", ("SDARMoeForCausalLM",), attention="block_causal", block=4, mask_id=151669),
    Family(
        "fast-dllm-v2",
        "Qwen2",
        ("Fast_dLLM_QwenForCausalLM",),
        attention="block_causal",
        block=32,
        block_keys=(),  # its forward uses 32 and ignores config.bd_size
        shift=1,
        mask_id=151665,
        bos="given",
    ),
    Family(
        "llada2",
        "Glm4Moe",
        ("LLaDA2MoeModelLM",),
        attention="block_causal",
        block=32,
        mask_id=156895,
        entries={"n_routed_experts": "num_experts", "n_shared_experts": "num_shared_experts"},
        values={"partial_rotary_factor": 0.5, "norm_topk_prob": True},
        released=LLADA2_RELEASED,
        rename=LLADA2_KEYS,
        translate_config=llada2,
        translate_tensors=llada2_tensors,
    ),
    Family("stable-diffcoder", "Llama", ("StableDiffcoderForCausalLM",), attention="block_causal", block=4, mask_id=5),
    Family("dream-reasoner", "Qwen2", ("DreamForCausalLM",), attention="block_causal", block=32, mask_id=151669),
    Family(
        "nemotron-labs-diffusion",
        "Llama",
        ("NemotronLabsDiffusionModel",),
        attention="causal_prefix",
        block=32,
        mask_id=100,
        unscaled=True,
        bos="given",
        needs=("head_dim",),
        rename=NEMOTRON_KEYS,
        translate_config=nemotron,
    ),
    Family(
        "nemotron-diffusion-research",
        "Qwen3",
        ("DiffEncoderModel",),
        attention="block_causal",
        block=32,
        mask_id=151662,
        needs=("dlm_type",),
        released={"disable_qk_norm": False},
        rename=NEMOTRON_KEYS,
        adapt=nemotron_research_fields,
    ),
    Family(
        "diffugpt",
        "GPT2",
        shift=1,
        max_length=512,
        bos="given",
        **DIFFUGPT,
        adapt=diffugpt_fields,
    ),
    Family("diffullama", "Llama", shift=1, mask_id=811, max_length=2048, bos="given"),
)

# D2F: a LoRA of LLaDA or Dream, which decodes blocks that see those before them
FAMILIES += tuple(
    dataclasses.replace(
        family,
        name=f"d2f-{family.name}",
        architectures=(),
        attention="block_causal",
        block=16,
        block_keys=(),
        anchor="target",
        published_block=32,
    )
    for family in FAMILIES
    if family.name in ("llada", "dream")
)
NAMED = {family.name: family for family in FAMILIES}
PLAIN = {f"{native}ForCausalLM": native for native in ("Llama", "Qwen2", "Qwen3", "Qwen3Moe", "Glm4Moe")}

EDITS = re.compile(r"editing_threshold|edit_threshold")  # in the code of a network that edits revealed tokens


def find(config: Config, options: LoadOptions, folder: str | None) -> Family | None:
    """The family in the options, else by the class names in config.json; None if there is none.

    `folder`: holds the checkpoint's code, which is only read. Raises DuelError for a network that looks autoregressive
    if nothing says it was trained as a diffusion model, and for one that edits revealed tokens.
    """
    if options.family is not None:
        require_known("family", [options.family], NAMED)
        return _adapted(NAMED[options.family], config)
    detected = options.attention is None
    for name in class_names(config):
        if family := next((family for family in FAMILIES if name in family.architectures), None):
            if family.name == "llada2":
                _require_no_edits(options.name, folder)
            if detected:  # of some families the config is that of another one
                family = _by_name(options.peft or "", "d2f", f"d2f-{family.name}") or family
                family = _by_name(options.name, "bd3lm", f"{family.name}-bd3lm") or family
            return _adapted(family, config)
        if name in PLAIN and options.attention != "causal":
            if detected and (family := _by_name(options.name, "diffullama", "diffullama")):
                return family
            if detected:
                raise DuelError(
                    f"By its config {options.name} is a {name}, autoregressive: add estimator=ar. If it is a masked "
                    f"diffusion model, pass family={'|'.join(NAMED)}, or attention=bidirectional with "
                    "mask_token_id=<id>."
                )
            return Family("decoder", PLAIN[name])
    return None


def _by_name(path: str, word: str, family: str) -> Family | None:
    """The family that the name of a checkpoint or an adapter says, if it holds `word`; else None."""
    if family not in NAMED or word not in os.path.basename(path.rstrip("/")).lower():
        return None
    log.warning("By its name %s is taken as %s; its config does not say. Set family= to decide", path, family)
    return NAMED[family]


def _require_no_edits(path: str, folder: str | None) -> None:
    """Raise DuelError if the code in a folder edits revealed tokens."""
    code = Path(folder).glob("*.py") if folder else ()
    if any(EDITS.search(file.read_text("utf-8", "replace")) for file in code):
        raise DuelError(
            f"{path} edits revealed tokens when it generates (LLaDA2.1 and later), {NO_ORDER}. To score it without "
            "these edits, pass family=llada2."
        )


def by_tensors(config: Config, names: Iterable[str]) -> Family | None:
    """The family whose files have tensors of these names, although their config is another network's, or None."""
    if config.get("model_type") == "gpt2" and any(name.startswith(DIFFUGPT_TRUNK) for name in names):
        return _adapted(NAMED["diffugpt"], config)
    return None


def _adapted(family: Family, config: Config) -> Family:
    """The family with the fields that a config decides."""
    return dataclasses.replace(family, **family.adapt(config))
