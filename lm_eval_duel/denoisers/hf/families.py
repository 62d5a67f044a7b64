"""The families of masked diffusion models that transformers' own decoder classes can run.

A family is detected by the class names in config.json (`architectures`, `auto_map`), never by `model_type`, which is
wrong in some checkpoints. Each entry of the table names the native class with the same network, how config entries and
tensors are translated (layouts.py), and what the config leaves out.
"""

from __future__ import annotations

import dataclasses
import inspect
import logging
import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import field
from pathlib import Path
from typing import Any

import transformers

from lm_eval_duel.arguments import COUNT
from lm_eval_duel.denoisers.hf import layouts
from lm_eval_duel.denoisers.hf.layouts import Config, Tensors
from lm_eval_duel.denoisers.identity import class_names, unread_entries
from lm_eval_duel.denoisers.load_options import LoadOptions
from lm_eval_duel.denoisers.refused import NO_ORDER
from lm_eval_duel.errors import DuelError, require_known

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
    reads: tuple[str, ...] = ()  # other entries that the functions below read
    # entries with which the native class is this network: a value, several, or a condition; null is always right
    released: Mapping[str, Any] = field(default_factory=dict)
    harmless: Mapping[str, str] = field(default_factory=dict)  # entries that change no number, and the reason
    closed: bool = False  # other entries are refused, unless the user names the family: its class has changed before
    embedding_scale: Callable[[Config], float] = lambda config: 1.0  # of the network's input
    expert_capacity: Callable[[Config], int | None] = lambda config: None  # experts of a block, if it shares them
    rename: tuple[tuple[str, str], ...] = ()  # tensor names to native ones: regular expressions, the first match counts
    adapt: Callable[[Config], dict[str, Any]] = lambda config: {}  # fields of this entry that a config decides
    translate_config: Callable[[Config], Config] = lambda config: {}  # native entries beyond renaming
    translate_tensors: Callable[[Tensors, Config], Tensors] = lambda tensors, config: tensors  # beyond renaming

    def block_in(self, config: Config) -> int | None:
        """The trained block in a config.json."""
        blocks = (COUNT(key, config.get(key), " of config.json") for key in self.block_keys)
        return next((block for block in blocks if block), None)

    def unreleased(self, config: Config) -> list[str]:
        """The entries of a config.json, as key=value, with which this is not the network of the native class."""
        return [
            f"{key}={config[key]!r}"
            for key, right in self.released.items()
            if config.get(key) is not None and not _is_right(config[key], right)
        ]

    def unread(self, config: Config) -> tuple[str, ...]:
        """The entries of a config.json that neither the native class nor this family reads."""
        native = inspect.signature(getattr(transformers, f"{self.native}Config")).parameters
        own = (*self.entries.values(), *self.values, *self.needs, *self.reads, *self.block_keys)
        return unread_entries(config, {*native, *own, *self.released, *self.harmless, *READ, *OVERRIDDEN})

    def native_name(self, key: str) -> str:
        """The native name of a tensor."""
        for pattern, replacement in self.rename:
            new, count = re.subn(pattern, replacement, key)
            if count:
                return new
        return key


READ = (  # for every family, whether or not the native class declares them
    *("mask_token_id", "right_shift_logits", "quantization_config", "head_dim"),
    *("rope_theta", "rope_scaling", "rope_parameters"),
)
OVERRIDDEN = ("use_sliding_window", "sliding_window", "max_window_layers", "layer_types")  # every layer sees all it may


def _is_right(value: Any, right: Any) -> bool:
    """True if an entry has the released value, one of several, or meets the condition."""
    if callable(right):
        return bool(right(value))
    return value in right if isinstance(right, tuple) else value == right


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
        expert_capacity=layouts.llada2_capacity,
        rename=layouts.LLADA2_KEYS,
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
                _require_no_edits(family, config, options.name, folder)
            if detected:  # of some families the config is that of another one
                family = _by_name(options.peft or "", "d2f", f"d2f-{family.name}") or family
                family = _by_name(options.name, "bd3lm", f"{family.name}-bd3lm") or family
            return _adapted(family, config)
        if name in PLAIN and options.attention != "causal":
            if detected and (family := _by_name(options.name, "diffullama", "diffullama")):
                return family
            if detected:
                raise autoregressive(options.name, name)
            return Family("decoder", PLAIN[name])
    return None


def autoregressive(name: str, classes: str) -> DuelError:
    """The error for a checkpoint that looks autoregressive."""
    return DuelError(
        f"By its config.json {name} is a {classes}, autoregressive: add estimator=ar. If it was trained as a masked "
        "diffusion model, pass family=<its family> (docs/checkpoints.md), or attention=bidirectional with "
        "mask_token_id=<id>."
    )


def _by_name(path: str, word: str, family: str) -> Family | None:
    """The family that the name of a checkpoint or an adapter says, if it holds `word`; else None."""
    if family not in NAMED or word not in os.path.basename(path.rstrip("/")).lower():
        return None
    log.warning("By its name %s is taken as %s; its config does not say. Set family= to decide", path, family)
    return NAMED[family]


def _require_no_edits(family: Family, config: Config, path: str, folder: str | None) -> None:
    """Raise DuelError if the code in a folder, or the config, says that revealed tokens are edited."""
    family.expert_capacity(config)  # a strategy that is not known is refused with or without edits
    code = Path(folder).glob("*.py") if folder else ()
    edits = any(EDITS.search(file.read_text("utf-8", "replace")) for file in code)
    inserts = any(config.get(key) is not None for key in layouts.INSERTING)
    if not (edits or inserts):
        return
    remedy = "To score it without these edits, pass family=llada2."
    if changed := family.unreleased(config):
        remedy = f"Without these edits it is not supported either: its network is another one ({', '.join(changed)})."
    raise DuelError(f"{path} edits revealed tokens when it generates (LLaDA2.1 and later), {NO_ORDER}. {remedy}")


def by_tensors(config: Config, names: Iterable[str]) -> Family | None:
    """The family whose files have tensors of these names, although their config is another network's, or None."""
    if config.get("model_type") == "gpt2" and any(name.startswith(layouts.DIFFUGPT_TRUNK) for name in names):
        return _adapted(NAMED["diffugpt"], config)
    return None


def _adapted(family: Family, config: Config) -> Family:
    """The family with the fields that a config decides."""
    return dataclasses.replace(family, **family.adapt(config))
