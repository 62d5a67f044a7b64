"""The families of masked diffusion models that transformers' own decoder classes can run.

A family is detected by the class names in config.json (`architectures`, `auto_map`), never by `model_type`, which is
wrong in some checkpoints. Each entry of the table names the native class with the same network, how config entries and
tensors are translated (layouts.py), and what the config leaves out.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import field
from typing import Any

import transformers

from lm_eval_duel.arguments import COUNT
from lm_eval_duel.denoisers.hf import layouts
from lm_eval_duel.denoisers.hf.layouts import Config, Tensors


@dataclasses.dataclass(frozen=True)
class Family:
    """A kind of masked diffusion model and the layout of its checkpoints. A config's own entries override these."""

    name: str
    native: str  # the class of transformers: <native>ForCausalLM, <native>Config
    architectures: tuple[str, ...] = ()  # class names in config.json

    # ------------------------------------------------------------ the network

    attention: str = "bidirectional"
    shift: int = 0  # the logits for position i are read at position i - shift
    mask_id: int | None = None
    bos: str = "none"  # the special tokens that texts have
    max_length: int | None = None  # if the network was trained on fewer positions than its config has
    unscaled: bool = False  # rows end where the config begins to scale queries, which the native class does not

    # ------------------------------------------------------------ its blocks

    block: int | None = None  # the trained block of a block-causal network
    block_keys: tuple[str, ...] = ("block_size", "bd_size", "block_length")  # entries of config.json with this block
    published_block: int | None = None  # of its published results
    anchor: str = "row"  # where blocks count from; "target": the context is one block
    block_routes: bool = False  # the trained block chooses the experts of its tokens, so no other block may be given

    # ------------------------------------------------------------ its config.json

    entries: Mapping[str, str] = field(default_factory=dict)  # native names of config entries that have other ones
    values: Mapping[str, Any] = field(default_factory=dict)  # defaults of native entries that a config may lack
    needs: tuple[str, ...] = ()  # entries that config.json must have, besides the native class's
    reads: tuple[str, ...] = ()  # other entries that the functions below read
    # entries with which the native class is this network: a value, several, or a condition; null is always right
    released: Mapping[str, Any] = field(default_factory=dict)
    harmless: Mapping[str, str] = field(default_factory=dict)  # entries that change no number, and the reason
    closed: bool = False  # other entries are refused, unless the user names the family: its class has changed before
    adapt: Callable[[Config], dict[str, Any]] = lambda config: {}  # fields of this entry that a config decides
    translate_config: Callable[[Config], Config] = lambda config: {}  # native entries beyond renaming

    # ------------------------------------------------------------ its tensors

    rename: tuple[tuple[str, str], ...] = ()  # tensor names to native ones: regular expressions, the first match counts
    translate_tensors: Callable[[Tensors, Config], Tensors] = lambda tensors, config: tensors  # beyond renaming
    finish: Callable[[Any, Config], None] = lambda model, config: None  # what the loaded native class still lacks

    def block_in(self, config: Config) -> int | None:
        """The trained block in a config.json."""
        for key in self.block_keys:
            block = COUNT(key, config.get(key), " of config.json")
            if block is not None:
                return block
        return None

    def unreleased(self, config: Config) -> list[str]:
        """The entries of a config.json, as key=value, with which this is not the network of the native class."""
        changed = []
        for key, right in self.released.items():
            value = config.get(key)
            if value is not None and not _is_right(value, right):
                changed.append(f"{key}={value!r}")
        return changed

    def known_entries(self) -> set[str]:
        """The entries of a config.json that the native class or this family reads, or that change no number."""
        native_class = getattr(transformers, f"{self.native}Config")
        native = inspect.signature(native_class).parameters
        family = {*self.entries.values(), *self.values, *self.needs, *self.reads, *self.block_keys}
        return {*native, *family, *self.released, *self.harmless, *READ, *OVERRIDDEN}

    def native_name(self, key: str) -> str:
        """The native name of a tensor."""
        for pattern, replacement in self.rename:
            new, count = re.subn(pattern, replacement, key)
            if count:
                return new
        return key


READ = (  # entries that are read for every family, whether or not the native class declares them
    "mask_token_id",
    "right_shift_logits",
    "quantization_config",
    "head_dim",
    "rope_theta",
    "rope_scaling",
    "rope_parameters",
)
# Entries that are overridden: every layer gets full attention.
OVERRIDDEN = ("use_sliding_window", "sliding_window", "max_window_layers", "layer_types")
_REASONS: dict[str, tuple[str, ...]] = {  # entries that change no number of a network in evaluation mode, by reason
    "names, versions and where files are": (
        "_name_or_path",
        "_commit_hash",
        "architectures",
        "auto_map",
        "model_type",
        "transformers_version",
        "transformers_weights",
        "custom_pipelines",
        "base_model_name_or_path",
        "pretrained_model_path",
        "llm_model_path",
        "tokenizer_class",
    ),
    "the file's dtype, which `dtype=` overrides": ("dtype", "torch_dtype", "precision"),
    "heads of classifiers": (
        "id2label",
        "label2id",
        "num_labels",
        "problem_type",
        "finetuning_task",
        "classifier_dropout",
        "classifier_pooling",
        "summary_type",
        "summary_use_proj",
        "summary_activation",
        "summary_proj_to_labels",
    ),
    "what a call returns, and whether it keeps keys": (
        "return_dict",
        "use_return_dict",
        "output_hidden_states",
        "output_attentions",
        "output_router_logits",
        "use_cache",
        "keys_to_ignore_at_inference",
    ),
    "initial weights": (
        "initializer_range",
        "initializer_factor",
        "init_std",
        "init_fn",
        "init_device",
        "init_cutoff_factor",
    ),
    "dropout, which is off": (
        "dropout",
        "attention_dropout",
        "embedding_dropout",
        "residual_dropout",
        "output_dropout",
        "hidden_dropout",
        "resid_pdrop",
        "embd_pdrop",
        "attn_pdrop",
        "hidden_dropout_prob",
        "attention_probs_dropout_prob",
        "summary_first_dropout",
    ),
    "losses and training": (
        "router_aux_loss_coef",
        "aux_loss_alpha",
        "gradient_checkpointing",
        "fuse_cross_entropy",
        "seq_length",
        "dlm_loss_weight",
        "ar_loss_weight",
        "dp_varying_mask_ratio",
        "mtp_loss_scaling_factor",
        "skip_checkpoint",
    ),
    "special tokens, which the tokenizer names": (
        "bos_token_id",
        "eos_token_id",
        "pad_token_id",
        "sep_token_id",
        "cls_token_id",
        "unk_token_id",
        "mask_token",
        "decoder_start_token_id",
    ),
    "samplers": (
        "task_specific_params",
        "num_diffusion_steps",
        "do_sample",
        "temperature",
        "top_k",
        "top_p",
        "num_beams",
        "max_length",
        "min_length",
        "max_new_tokens",
        "repetition_penalty",
        "generation_config",
    ),
    "how products are computed": (
        "attn_implementation",
        "_attn_implementation",
        "_attn_implementation_autoset",
        "attn_backend",
        "flash_attention",
        "moe_backend",
        "pretraining_tp",
        "chunk_size_feed_forward",
        "ep_size",
        "use_deepep",
        "micro_forward",
        "torchscript",
        "use_bfloat16",
        "debug",
    ),
    "the tensors of the file decide, of which none may be missing or left over": (
        "tie_word_embeddings",
        "weight_tying",
        "num_nextn_predict_layers",
        "num_mtp_layers",
        "tie_encoder_decoder",
    ),
}
HARMLESS: dict[str, str] = {}
for _reason, _entries in _REASONS.items():
    HARMLESS |= dict.fromkeys(_entries, _reason)


def _is_right(value: Any, right: Any) -> bool:
    """True if an entry has the released value, one of several, or meets the condition."""
    if callable(right):
        return bool(right(value))
    if isinstance(right, tuple):
        return value in right
    return value == right


FAMILIES: tuple[Family, ...] = (
    Family(
        "llada",
        "Llama",
        ("LLaDAModelLM",),
        published_block=32,
        mask_id=126336,
        **layouts.LLADA,
        translate_config=layouts.llada,
    ),
    Family(
        "mmada",
        "Llama",
        ("MMadaModelLM",),
        published_block=128,
        mask_id=126336,
        **layouts.LLADA,
        translate_config=layouts.mmada,
    ),
    Family(
        "smdm",
        "Llama",
        ("TransEncoder",),
        block_keys=(),  # lit_gpt's block_size is the row length
        mask_id=32000,
        bos="given",
        entries=layouts.SMDM_ENTRIES,
        values={"rope_theta": 10_000.0},
        rename=layouts.SMDM_KEYS,
        translate_config=lambda config: {"vocab_size": config["vocab_size"] + 1},  # a row for [MASK]
        translate_tensors=layouts.smdm_tensors,
        released=layouts.SMDM_RELEASED,
        harmless=layouts.SMDM_HARMLESS,
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
        released=layouts.LLADA_MOE_RELEASED,
        harmless=layouts.LLADA_MOE_HARMLESS,
        translate_config=layouts.llada_moe,
    ),
    Family(
        "rnd1",
        "Qwen3Moe",
        ("RND1LM", "RND1"),
        mask_id=151669,
        released={"is_causal": False},
        harmless=layouts.QWEN3_MOE_HARMLESS,
    ),
    Family(
        "coda",
        "Qwen3",
        ("CoDALanguageModel",),
        shift=1,
        mask_id=151669,
        bos="given",
        released={"rope_scaling": ()},  # its own code has no scaled positions
        harmless=layouts.CODA_HARMLESS,
    ),
    Family("a2d-qwen3", "Qwen3", ("A2DQwen3LMHeadModel",), max_length=1024),
    Family("a2d-qwen2", "Qwen2", ("A2DQwen2LMHeadModel",), max_length=1024),
    Family("a2d-llama", "Llama", ("A2DLlamaLMHeadModel",), max_length=1024),
    Family("a2d-qwen3-bd3lm", "Qwen3", attention="block_causal", block=32, max_length=1024),
    Family("a2d-qwen2-bd3lm", "Qwen2", attention="block_causal", block=32, max_length=1024),
    Family("a2d-llama-bd3lm", "Llama", attention="block_causal", block=32, max_length=1024),
    Family("open-dllm", "Qwen2", shift=1, bos="given"),
    Family("sdar", "Qwen3", ("SDARForCausalLM",), attention="block_causal", block=4, mask_id=151669),
    Family(
        "sdar-moe",
        "Qwen3Moe",
        ("SDARMoeForCausalLM",),
        attention="block_causal",
        block=4,
        mask_id=151669,
        harmless=layouts.QWEN3_MOE_HARMLESS,
    ),
    Family(
        "fast-dllm-v2",
        "Qwen2",
        ("Fast_dLLM_QwenForCausalLM",),
        attention="block_causal",
        block=32,
        block_keys=(),
        harmless={"bd_size": "its forward uses blocks of 32"},
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
        released=layouts.LLADA2_RELEASED,
        harmless=layouts.LLADA2_HARMLESS,
        reads=("expert_capacity", "routing_strategy"),
        closed=True,
        rename=layouts.LLADA2_KEYS,
        adapt=layouts.llada2_fields,
        translate_config=layouts.llada2,
        translate_tensors=layouts.llada2_tensors,
    ),
    Family("stable-diffcoder", "Llama", ("StableDiffcoderForCausalLM",), attention="block_causal", block=4, mask_id=5),
    Family("dream-reasoner", "Qwen2", ("DreamForCausalLM",), attention="block_causal", block=32, mask_id=151669),
    Family(
        "nemotron-labs-diffusion",
        "Llama",
        ("NemotronLabsDiffusionModel", "NemotronLabsDiffusionEncoderModel", "MinistralDiffEncoderModel"),
        attention="causal_prefix",
        block=32,
        mask_id=100,
        unscaled=True,
        bos="given",
        needs=("head_dim",),
        harmless=layouts.NEMOTRON_HARMLESS,
        rename=layouts.NEMOTRON_KEYS,
        translate_config=layouts.nemotron,
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
        harmless=layouts.NEMOTRON_HARMLESS,
        rename=layouts.NEMOTRON_KEYS,
        adapt=layouts.nemotron_research_fields,
    ),
    Family(
        "diffugpt",
        "GPT2",
        shift=1,
        max_length=512,
        bos="given",
        **layouts.DIFFUGPT,
        adapt=layouts.diffugpt_fields,
    ),
    Family("diffullama", "Llama", shift=1, mask_id=811, max_length=2048, bos="given"),
)


def _d2f(plain: Family) -> Family:
    """The family of D2F: a LoRA of LLaDA or Dream, which makes the network block-causal."""
    return dataclasses.replace(
        plain,
        name=f"d2f-{plain.name}",
        architectures=(),
        attention="block_causal",
        block=16,
        block_keys=(),
        anchor="target",
        published_block=32,
    )


FAMILIES += tuple(_d2f(family) for family in FAMILIES if family.name in ("llada", "dream"))
NAMED = {family.name: family for family in FAMILIES}

BY_CLASS: dict[str, Family] = {}
for _family in FAMILIES:
    BY_CLASS |= dict.fromkeys(_family.architectures, _family)

# Autoregressive classes of transformers that also run diffusion models, and their native names
PLAIN = {f"{native}ForCausalLM": native for native in ("Llama", "Qwen2", "Qwen3", "Qwen3Moe", "Glm4Moe")}
