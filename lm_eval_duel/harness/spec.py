"""The spec of a run, and the other entries of its results."""

from __future__ import annotations

import importlib.metadata
import resource
import sys
from typing import TYPE_CHECKING, Any

import torch

from lm_eval_duel import fingerprint
from lm_eval_duel.harness.cache import RULE_CODE, RULES

if TYPE_CHECKING:
    from lm_eval_duel.core.denoiser import Denoiser
    from lm_eval_duel.estimators.base import Estimator
    from lm_eval_duel.options import Options

PACKAGES = ("lm_eval_duel", "lm_eval", "torch", "transformers", "accelerate")


def generation(spec: dict[str, str], estimator: Estimator, tokenizer: Any, options: Options) -> dict[str, str]:
    """The spec of generated texts: also the rule, even if the estimator has none, the seed, and how ids become text."""
    from lm_eval_duel.text.generation import end_tokens

    if not estimator.decodes:
        spec = {**spec, "estimator": "duel", "block": str(options.block), "grid": options.grid}
        spec |= options.rule.describe()
    return {
        **spec,
        "draw_seed": str(options.draw_seed),
        "ends": str(sorted(end_tokens(tokenizer))),
        "clean_up": str(bool(getattr(tokenizer, "clean_up_tokenization_spaces", False))),
    }


def followed_rules(estimator: Estimator) -> dict[str, str]:
    """The rules whose orders a lattice reads off, with the code of custom ones: in the results, but not in the spec."""
    if (rules := getattr(estimator, "rules", None)) is None:
        return {}
    specs = [rule.describe() for rule in rules]
    codes = [spec["rule_code"] for spec in specs if "rule_code" in spec]
    return {RULES: "+".join(spec["rule"] for spec in specs), **({RULE_CODE: "+".join(codes)} if codes else {})}


def trace_header(estimator: Estimator, spec: dict[str, str], tokenizer: str) -> dict[str, Any]:
    """The first line of a trace."""
    rules = [str(rule) for rule in getattr(estimator, "rules", ())]
    code = {key: value for key, value in followed_rules(estimator).items() if key == RULE_CODE}
    return {"fingerprint": fingerprint.digest(spec), "spec": spec, "tokenizer": tokenizer, "rules": rules, **code}


def peak_memory(device: torch.device) -> int:
    """The peak memory of this process in bytes: summed over its GPUs, or of the CPU."""
    if device.type == "cuda":
        return sum(torch.cuda.max_memory_allocated(gpu) for gpu in range(torch.cuda.device_count()))
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else 1024 * most  # kilobytes, except on macOS


def parameters(denoiser: Denoiser) -> int | None:
    """The number of parameters of a network; None for packed weights, whose tensors hold several in one number."""
    network = getattr(denoiser, "model", None) or getattr(denoiser, "network", None)
    if denoiser.quantized or not isinstance(network, torch.nn.Module):
        return None
    return sum(parameter.numel() for parameter in network.parameters())


def versions() -> dict[str, str]:
    """The installed versions of the packages that a number depends on."""
    installed = {}
    for name in PACKAGES:
        try:
            installed[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            installed[name] = "not installed"
    return installed
