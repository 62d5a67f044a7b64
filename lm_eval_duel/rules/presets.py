"""Presets: deployed samplers by name, with the default settings of their authors' code.

A preset is model args and nothing else, so `preset=NAME` and its args written out have the same fingerprint. Samplers
that no unmasking rule describes are refused by name, with the reason.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from lm_eval_duel.errors import DuelError, documentation, require_known


@dataclasses.dataclass(frozen=True)
class Preset:
    """One deployed sampler. `free`: the args that a user may change."""

    name: str
    what: str
    families: tuple[str, ...]  # the checkpoints that it is for
    arguments: Mapping[str, Any]
    source: str  # repository@commit path lines
    free: tuple[str, ...] = ()

    @property
    def written_out(self) -> str:
        """The model args, as a user would type them."""
        return _written_out(self.arguments)

    @property
    def for_any_network(self) -> str:
        """The model args that every network takes."""
        return _written_out({key: value for key, value in self.arguments.items() if key not in ONLY_WITH})

    @property
    def for_demo(self) -> str:
        """The model args that `demo-mdm` takes: it is bidirectional, has no trained block, and its noise is masks."""
        taken = {}
        for key, value in self.arguments.items():
            if key not in ONLY_WITH or key in ("block", "grid", "cache"):
                taken[key] = value
        return _written_out(taken)


def _written_out(arguments: Mapping[str, Any]) -> str:
    parts = []
    for key, value in arguments.items():
        text = "none" if value is None else value
        parts.append(f"{key}={text}")
    return ",".join(parts)


NO_TRAINED_BLOCK = "has no trained block"
ONLY_WITH = {  # args of presets that some networks refuse: which networks take them
    "block": NO_TRAINED_BLOCK,
    "grid": NO_TRAINED_BLOCK,
    "cache": "is bidirectional, and its noise is masks",
    "first_token": "predicts a block's first token from the clean tokens before it",
    "self_conditioning": "reads its own output of the step before",
    "temperatures": "is a DiffusionGemma",
}

LLADA = "ML-GSAI/LLaDA@b7e6c35"
FAST_DLLM = "NVlabs/Fast-dLLM@24cc59e"
FAST_DLLM_FORK = "mgustineli/Fast-dLLM@fb55582"
DINFER = "inclusionAI/dInfer@fce4e32 evaluations/eval_dinfer.py L40-66, python/dinfer/decoding/parallel_strategy.py"
SDAR = "JetAstra/SDAR@c2041a8 generate.py L57-202, L217-234"
MLX_VLM = "Blaizzy/mlx-vlm@v0.7.10 mlx_vlm"
SGLANG = "sgl-project/sglang@v0.5.23 python/sglang/srt/dllm/algorithm"
SAMPLED = {"estimator": "sampled_confidence", "confidence": "tempered", "block": 4}

ENTRIES = (
    Preset(
        "llada",
        "LLaDA's generate: one token a step",
        ("llada",),
        {"rule": "quota", "steps": 128, "block": 128},
        f"{LLADA} generate.py L44-121",
        free=("steps",),
    ),
    Preset(
        "llada-fast-dllm",
        "Fast-dLLM on LLaDA, parallel decoding",
        ("llada",),
        {"rule": "threshold:mu=0.9", "block": 32},
        f"{FAST_DLLM} llada/generate.py L61-101, L235-260, llada/eval_gsm8k.sh L23-26",
    ),
    Preset(
        "llada-fast-dllm-prefix",
        "Fast-dLLM on LLaDA, prefix cache and parallel decoding",
        ("llada",),
        {"rule": "threshold:mu=0.9", "block": 32, "cache": "prefix"},
        f"{FAST_DLLM} llada/generate.py L104-172, L235-260, llada/eval_gsm8k.sh L29-32",
    ),
    Preset(
        "llada-fast-dllm-dual",
        "Fast-dLLM on LLaDA, dual cache and parallel decoding",
        ("llada",),
        {"rule": "threshold:mu=0.9", "block": 32, "cache": "dual"},
        f"{FAST_DLLM} llada/generate.py L176-260, llada/eval_gsm8k.sh L34-37",
    ),
    Preset(
        "llada-klass",
        "KLASS on LLaDA",
        ("llada",),
        {"rule": "klass:mu=0.6:nu=0.015:history=2:kl=authors:across=true", "block": 64},
        "shkim0116/KLASS@ad87ecb src/model/llada_klass.py L43-182, scripts/llada_gsm8k.sh L7-18",
    ),
    Preset(
        "dparallel",
        "dParallel",
        ("llada",),
        {"rule": "entropy_threshold:tau=0.5", "block": 32},
        "czg1225/dParallel@2ca4d14 LLaDA/generate.py L138-178, README.md L109",
    ),
    Preset(
        "d3llm",
        "d3LLM, block by block",
        ("llada",),
        {"rule": "entropy_threshold:tau=0.5", "block": 32},
        "hao-ai-lab/d3LLM@e5bfcac d3llm/d3llm_LLaDA/d3llm_llada_generate_util.py L742-925",
    ),
    Preset(
        "dinfer-threshold",
        "dInfer, threshold decoding",
        ("llada", "llada-moe"),
        {"rule": "dinfer_threshold:mu=0.9", "block": 64, "grid": "row"},
        f"{DINFER} L265-285",
    ),
    Preset(
        "dinfer-hierarchy",
        "dInfer, hierarchical decoding",
        ("llada", "llada-moe"),
        {"rule": "hierarchy:low=0.3:tau=0.9", "block": 64, "grid": "row"},
        f"{DINFER} L418-498",
    ),
    Preset(
        "dream-entropy",
        "Dream's diffusion_generate with alg=entropy: no blocks",
        ("dream",),
        {"rule": "dream:alg=entropy", "steps": 256, "block": None},
        f"{FAST_DLLM} dream/model/generation_utils.py L369-508, dream/eval_gsm8k.sh L12-17",
        free=("steps",),
    ),
    Preset(
        "dream-fast-dllm",
        "Fast-dLLM on Dream, dual cache and parallel decoding",
        ("dream",),
        {"rule": "threshold:mu=0.9:seed_first=true", "block": 32, "cache": "dual"},
        f"{FAST_DLLM} dream/model/generation_utils_block.py L387-571, dream/eval_gsm8k.sh L40-45",
    ),
    Preset(
        "dream-fast-dllm-prefix",
        "Fast-dLLM on Dream, prefix cache and parallel decoding",
        ("dream",),
        {"rule": "threshold:mu=0.9:seed_first=true", "block": 32, "cache": "prefix"},
        f"{FAST_DLLM} dream/model/generation_utils_block.py L387-571, dream/eval_gsm8k.sh L33-38",
    ),
    Preset(
        "dream-fast-dllm-prefix-entropy",
        "Fast-dLLM on Dream, prefix cache without parallel decoding: Dream's schedule of 256 steps for 8 blocks",
        ("dream",),
        {"rule": "dream:alg=entropy:seed_first=true", "steps": 32, "block": 32, "cache": "prefix"},
        f"{FAST_DLLM} dream/model/generation_utils_block.py L387-571, dream/eval_gsm8k.sh L19-24",
        free=("steps",),
    ),
    Preset(
        "sdar-static",
        "SDAR, low_confidence_static: the most probable of the drawn tokens, one a step",
        ("sdar", "sdar-moe"),
        {**SAMPLED, "n": 1},
        SDAR,
        free=("block",),  # the checkpoint's
    ),
    Preset(
        "sdar-dynamic",
        "SDAR, low_confidence_dynamic (its default): all drawn tokens above 0.85, or the most probable one",
        ("sdar", "sdar-moe"),
        {**SAMPLED, "n": 1, "tau": 0.85},
        SDAR,
        free=("block",),
    ),
    Preset(
        "llada2",
        "LLaDA2.0",
        ("llada2",),
        {"rule": "high_or_topk:n=1:tau=0.95", "block": 32},
        "inclusionAI/dFactory@92b6890 models/llada2_moe/modeling_llada2_moe.py L1388-1549, argmax as in "
        "ZHZisZZ/dllm@ca17675 dllm/pipelines/llada2/sampler.py L66-75",
    ),
    Preset(
        "llada2-diffusers",
        "diffusers' LLaDA2Pipeline at its defaults, with editing_threshold=None",
        ("llada2",),
        {"rule": "high_or_topk:n=1:tau=0.7", "block": 32},
        "huggingface/diffusers@v0.42.0 src/diffusers/pipelines/llada2/pipeline_llada2.py L244-262, "
        "src/diffusers/schedulers/scheduling_block_refinement.py L181-350",
    ),
    Preset(
        "fast-dllm-v2",
        "Fast_dLLM_v2 without its block cache",
        ("fast-dllm-v2",),
        {"rule": "threshold:mu=0.95:strict=true:sub_block=8:seed_first=true", "block": 32},
        f"{FAST_DLLM_FORK} v2/generation_functions.py L135-380",
    ),
    Preset(
        "nemotron",
        "Nemotron-Labs-Diffusion's generate: one token a step",
        ("nemotron-labs-diffusion",),
        {"rule": "greedy:k=1", "block": 32, "first_token": "causal"},
        "nvidia/Nemotron-Labs-Diffusion-8B modeling_nemotron_labs_diffusion.py, generate with threshold=None",
    ),
    Preset(
        "nemotron-threshold",
        "Nemotron-Labs-Diffusion as in its scripts",
        ("nemotron-labs-diffusion",),
        {"rule": "threshold:mu=0.9", "block": 32, "first_token": "causal"},
        "nvidia/Nemotron-Labs-Diffusion-8B modeling_nemotron_labs_diffusion.py, generate with threshold=0.9",
    ),
    Preset(
        "mlx-nemotron",
        "mlx-vlm on Nemotron-Labs-Diffusion: its default sampler, native",
        ("nemotron-labs-diffusion",),
        {"rule": "threshold:mu=0.9", "block": 32, "first_token": "causal"},
        f"{MLX_VLM} models/nemotron_labs_diffusion/language.py L1509-1516, config.py L36-42",
    ),
    Preset(
        "sglang-sdar",
        "SGLang on SDAR: LowConfidence, its default",
        ("sdar", "sdar-moe"),
        {"rule": "threshold:mu=0.95:strict=true", "block": 4},
        f"{SGLANG} low_confidence.py, dllm/config.py",
        free=("block",),  # the checkpoint's
    ),
    Preset(
        "sglang-llada2",
        "SGLang on LLaDA2: LowConfidence, its default",
        ("llada2",),
        {"rule": "threshold:mu=0.95:strict=true", "block": 32},
        f"{SGLANG} low_confidence.py, dllm/config.py",
    ),
    Preset(
        "diffusers-diffusion-gemma",
        "diffusers' DiffusionGemmaPipeline with its default scheduler, but for its early stop, which replaces tokens "
        "that were committed (confidence_threshold=None); tokens are drawn after positions: the same at temperature 0",
        ("diffusion-gemma",),
        {"rule": "cumulative_quota:steps=48:tau=0.95", "block": 256, "self_conditioning": "chain"},
        "huggingface/diffusers@v0.42.1 src/diffusers/schedulers/scheduling_block_refinement.py, "
        "src/diffusers/pipelines/diffusion_gemma/pipeline_diffusion_gemma.py",
        free=("block",),
    ),
    Preset(
        "mlx-diffusion-gemma",
        "mlx-vlm on DiffusionGemma: confidence-threshold, its default, without its early stop; it prints the argmax of "
        "the last step, and this is the sampler of what it commits",
        ("diffusion-gemma",),
        {
            "rule": "threshold_until:mu=0.9:steps=48",
            "block": 256,
            "self_conditioning": "chain",
            "temperatures": "0.8:0.4:48",
        },
        f"{MLX_VLM} generate/diffusion.py",
        free=("block",),
    ),
    Preset(
        "stable-diffcoder",
        "Stable-DiffCoder as Ollada serves it: 256 steps for 256 tokens in blocks of 4",
        ("stable-diffcoder",),
        {"rule": "quota", "steps": 4, "block": 4},
        "ollada@0.3.0 catalog/diffcoder-8b.yaml, adapters/diffcoder.py",
        free=("steps",),
    ),
)
PRESETS: dict[str, Preset] = {preset.name: preset for preset in ENTRIES}


def find(name: str) -> Preset:
    """The preset of a name; raises DuelError for any other, with the reason if that sampler is refused."""
    require_covered("preset", name)
    require_known("preset", [name], PRESETS)
    return PRESETS[name]


def require_rule(name: str) -> None:
    """Raise DuelError if `name`, which is no rule's, is that of a preset, or a part of such names."""
    spelled = _spelled(name)
    if spelled in PRESETS:
        preset = PRESETS[spelled]
        raise DuelError(f"'{name}' is a preset, not a rule: write preset={spelled}. It is {preset.written_out}.")
    matches = [preset for preset in PRESETS if len(spelled) > 2 and spelled in preset]
    if matches:
        listed = ", ".join(f"preset={preset}" for preset in matches)
        raise DuelError(f"'{name}' is not a rule. Presets with it in their names: {listed}.")


def _spelled(name: str) -> str:
    """A name as those of presets are spelled."""
    return name.lower().replace("_", "-")


def conflict(preset: Preset, key: str, value: Any) -> DuelError:
    """The error for an arg that is given together with a preset, with another value."""
    change = ""
    if preset.free:
        change = f"{' or '.join(preset.free)} may be changed. "
    return DuelError(
        f"preset={preset.name} is {preset.written_out}; {key}={value} is given, too, which makes it another sampler. "
        f"{change}Leave {key} out, or leave preset out and write the args you want."
    )


def require_fit(preset: Preset | None, family: str | None, trained_block: bool | None = None) -> None:
    """Raise DuelError if the preset is not for checkpoints of this family; None is a family not known yet."""
    if preset is None or family is None or family in preset.families:
        return
    raise another_network(preset, f"this one is of the family {family}", trained_block)


def another_network(preset: Preset, reason: str, trained_block: bool | None = None) -> DuelError:
    """The error for a preset on a network that it is not for, with the args of it that apply to that network.

    `trained_block`: whether the network has one; None: not known yet.
    """
    taken = {}
    advice = ""
    for key, value in preset.arguments.items():
        condition = ONLY_WITH.get(key)
        if condition == NO_TRAINED_BLOCK and trained_block:
            continue
        if condition is None or (condition == NO_TRAINED_BLOCK and trained_block is False):
            taken[key] = value
        else:
            advice += f" Add {_written_out({key: value})} only if it {condition}."
    return DuelError(
        f"preset={preset.name} is the sampler of {' and '.join(preset.families)} checkpoints, and {reason}. To use the "
        f"same rule with it, write it out: {_written_out(taken)}.{advice} On a bundled network: lm-eval-duel run "
        f"demo-mdm --model_args {preset.for_demo} --tasks sotu"
    )


REMASKS = (
    "it masks revealed tokens again, so a text has no single order of unmasking, and its probability is a sum over "
    "paths that no evaluation of this text can enumerate"
)
EDITS = "it replaces revealed tokens, so the text at the end is not the one whose tokens were revealed"
BATCH = (
    "above batch size 1 the value of a text depends on the texts in the same batch, so it has no probability of its "
    "own; the cached samplers that are covered are cache=prefix and cache=dual"
)
LEAVES_MASKS = (
    "its loop can end with [MASK] in the text, so the probabilities of texts do not sum to 1. The rule threshold "
    "always reveals the most confident position"
)
HISTORY = "its state spans blocks and is more than the revealed tokens, which is not implemented"
OPEN_BLOCKS = (
    "it keeps several blocks open and may reveal nothing in the later ones, so which blocks a step shows depends on "
    "more than the block's revealed tokens"
)
MERGES = (
    "it shows the network mixtures of [MASK] and predicted embeddings at revealed positions and may replace them "
    "later, so the text at the end is not the one whose tokens were revealed"
)
UNPUBLISHED = (
    "its filter reads the network's probabilities at revealed positions of the block too, which no rule sees, and its "
    f"weights are not in its repository. Your own filter can be a rule, as in {documentation('rules.md')}"
)

REFUSED = {  # name: (what it is, why)
    "remdm": ("ReMDM", REMASKS),
    "p2": ("P2 (path planning)", REMASKS),
    "wino": ("WINO", REMASKS),
    "hierarchy-remask": ("dInfer's hierarchy with remasking", REMASKS),
    "t2t": ("the token-to-token editing of LLaDA2.1", EDITS),
    "llada2.1": ("the sampler of LLaDA2.1", EDITS + "; without these edits it is preset=llada2 with family=llada2"),
    "llada2.2": ("the sampler of LLaDA2.2", EDITS + ", and its length changes"),
    "d2cache": ("d2Cache", BATCH),
    "fast-dllm-v2-block-cache": ("Fast_dLLM_v2 with use_block_cache", BATCH),
    "fast-dllm-unforced": ("Fast-dLLM's threshold without a forced pick (commit fb55582)", LEAVES_MASKS),
    "llada2-many-steps": ("LLaDA2 with more steps than positions in a block", LEAVES_MASKS),
    "credit": ("dInfer's credit decoding", HISTORY),
    "slow-fast": ("Slow-Fast sampling", HISTORY),
    "d3llm-multi-block": ("d3LLM's multi-block decoding", HISTORY + "; preset=d3llm is its decoding block by block"),
    "learn2pd": ("Learn2PD", UNPUBLISHED),
    "multi-bd": ("Diffulex's multi-block decoding", OPEN_BLOCKS),
    "dmax": ("DMax", MERGES),
    "joint-threshold": ("SGLang's JointThreshold", EDITS),
    "joint-threshold-indel": ("SGLang's JointThresholdInDel", EDITS + ", and its length changes"),
}


def require_covered(what: str, name: str) -> None:
    """Raise DuelError, with the reason, if `name` is a sampler that is refused."""
    key = _spelled(name)
    if key in REFUSED:
        sampler, reason = REFUSED[key]
        raise DuelError(f"{what}={name} is {sampler}, which cannot be scored: {reason}.")
