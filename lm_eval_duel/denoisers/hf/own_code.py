"""A checkpoint's own code, run only where it is trusted: as the network that is scored, or to compare with it.

    load              `backend=remote`, `trust_remote_code=true`: the denoiser of the checkpoint's code
    load_own_class    the network in the class that its authors name, for an audit

The class is built on the CPU and filled key by key: transformers 5 would leave rotary frequencies that it computes
itself uninitialised. Names that older code imports and transformers no longer has are restored while it is built.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import transformers
from transformers import AutoConfig
from transformers.dynamic_module_utils import get_class_from_dynamic_module
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from lm_eval_duel.demo import resolve
from lm_eval_duel.denoisers import hub, self_tests
from lm_eval_duel.denoisers.checkpoint import Checkpoint
from lm_eval_duel.denoisers.hf import weights
from lm_eval_duel.denoisers.hf.families import Family
from lm_eval_duel.denoisers.hf.own_forward import MaskedLM
from lm_eval_duel.denoisers.hub import default_dtype, pick_dtype
from lm_eval_duel.denoisers.load_options import LoadOptions
from lm_eval_duel.errors import DuelError

OWN_CODE = Family("own code", "", bos="auto")  # of no family that is known
COMPUTED = "rotary_emb.inv_freq"  # the ending of keys that the class computes, whatever the files hold
ROWS = ("embedding_size", "vocab_size", "new_vocab_size")
HEADED = ("AutoModelForCausalLM", "AutoModelForMaskedLM", "AutoModel")  # AutoModel may lack the head
READ = ("dtype", "revision", "trust_remote_code")  # network arguments that concern the authors' class, too


def load(checkpoint: Checkpoint) -> MaskedLM:
    """The denoiser of a checkpoint's own code; raises DuelError if it does not load strictly or fails a self-test."""
    options = checkpoint.options
    config = checkpoint.config
    _class_reference(config, options)  # raises its errors before anything is read
    family = checkpoint.family or OWN_CODE
    rows = [config[key] for key in ROWS if isinstance(config.get(key), int)]  # of the embedding
    checkpoint = dataclasses.replace(checkpoint, family=family)
    denoiser = MaskedLM(checkpoint, max(rows, default=None))
    if denoiser.attention == "causal_prefix" or family.anchor == "target":
        raise DuelError(f"backend=remote does not support the family {family.name}; leave backend out.")

    denoiser.options = weights.fetch_adapter(options)
    model = own_network(config, options)
    model = weights.merge_adapter(model, denoiser.options.peft)
    model = weights.place(model, options)
    denoiser.take(model.eval())
    return denoiser


def own_network(config: dict[str, Any], options: LoadOptions) -> Any:
    """The network of a checkpoint's own code, on the CPU; raises DuelError if it does not load strictly."""
    reference = _class_reference(config, options)
    tensors = {}
    for key, value in hub.read_tensors(options.name).items():
        if not key.endswith(COMPUTED):
            tensors[key] = value
    dtype = pick_dtype(options.dtype, options.device)
    if dtype == "auto":
        dtype = next(value.dtype for value in tensors.values() if value.is_floating_point())

    with repairs(), default_dtype(dtype):
        model_config = AutoConfig.from_pretrained(options.name, trust_remote_code=True)
        _complete(model_config, config)
        model_class = get_class_from_dynamic_module(reference, options.name)
        model = model_class(model_config)
    for key, value in tensors.items():
        if value.is_floating_point():
            tensors[key] = value.to(dtype)
    _fill(model, tensors, model_config)
    self_tests.rotary_frequencies(model, model_config, options.name)
    return model


def _class_reference(config: dict[str, Any], options: LoadOptions) -> str:
    """The model class in `auto_map`; raises DuelError if there is none, or for options that exclude own code."""
    names = config.get("auto_map") or {}
    reference = next((names[key] for key in HEADED if key in names), None)
    if reference is None:
        raise DuelError(f"{options.name} has no code (no auto_map with a model in config.json).")
    options.refuse("own code", "cache", "sigma", "first_token", "load_in_8bit", "load_in_4bit")
    if options.attention == "causal":
        raise DuelError(
            f"backend=remote does not go with attention=causal for {options.name}: leave backend out, and pass "
            "trust_remote_code=true alone."
        )
    if not options.trust_remote_code:
        raise DuelError(f"{options.name} runs its own code: pass trust_remote_code=true if you trust it.")
    return reference


def _complete(model_config: Any, config: dict[str, Any]) -> None:
    """Add entries that older code expects and transformers 5 no longer sets; keep no keys."""
    expected = {"pad_token_id": None, "rope_theta": config.get("rope_theta")}
    for name, value in expected.items():
        if getattr(model_config, name, None) is None:
            setattr(model_config, name, value)
    model_config.use_cache = False
    if getattr(model_config, "rope_scaling", None) is not False:
        return
    model_config.rope_scaling = None
    if hasattr(model_config, "rope_parameters"):  # transformers 5, where None would lose theta
        model_config.rope_parameters = {
            "rope_type": "default",
            "rope_theta": model_config.rope_theta,
        }


def _fill(model: Any, tensors: dict[str, torch.Tensor], model_config: Any) -> None:
    """Load every tensor; torch raises an error that names all tensors missing, unknown or of another shape."""
    head = None
    if hasattr(model, "get_output_embeddings"):
        head = model.get_output_embeddings()
    tied = {}  # names of the head's weight that the files leave out, as it is the embedding's
    if head is not None and getattr(model_config, "tie_word_embeddings", False):
        for key, parameter in model.named_parameters(remove_duplicate=False):
            if parameter is head.weight and key not in tensors:
                tied[key] = parameter

    computed = {}
    for key, value in model.state_dict().items():
        if key.endswith(COMPUTED):
            computed[key] = value
    model.load_state_dict({**computed, **tensors, **tied}, assign=True)
    if tied:  # `assign` replaced the embedding's weight
        head.weight = model.get_input_embeddings().weight


@contextlib.contextmanager
def repairs() -> Iterator[None]:
    """Names that older code imports and transformers no longer has, restored while a class is built."""

    class Placeholder:
        """Replaces a type that is used in annotations only."""

    removed = (
        (transformers.utils, "LossKwargs", Placeholder),
        (transformers.utils.import_utils, "is_torch_fx_available", lambda: False),
    )
    added = []
    for module, name, value in removed:
        if not hasattr(module, name):
            setattr(module, name, value)
            added.append((module, name))
    lacks_default = "default" not in ROPE_INIT_FUNCTIONS
    if lacks_default:
        ROPE_INIT_FUNCTIONS["default"] = plain_rope
    try:
        yield
    finally:
        for module, name in added:
            delattr(module, name)
        if lacks_default:
            ROPE_INIT_FUNCTIONS.pop("default", None)


def plain_rope(model_config: Any, device: Any = None, **ignored: Any) -> tuple[torch.Tensor, float]:
    """Unscaled rotary frequencies theta^(-2i/d), (d / 2,), and an attention factor of 1."""
    parameters = getattr(model_config, "rope_parameters", None) or {}
    theta = parameters.get("rope_theta") or model_config.rope_theta
    head = getattr(model_config, "head_dim", None)
    if not head:
        head = model_config.hidden_size // model_config.num_attention_heads
    rotated_share = getattr(model_config, "partial_rotary_factor", None) or 1.0
    width = int(head * rotated_share)
    index = torch.arange(0, width, 2, device=device, dtype=torch.float32)  # (d / 2,)
    return 1.0 / theta ** (index / width), 1.0


def load_own_class(name: str, device: str | None, network: Mapping[str, Any]) -> torch.nn.Module:
    """The network of a checkpoint, from its own code, if that is trusted, or from a class of transformers."""
    for argument in ("peft", "load_in_8bit", "load_in_4bit", "device_map"):
        if network.get(argument):
            raise DuelError(f"{argument} changes the network or where it is.")
    arguments = {key: network[key] for key in READ if key in network}
    options = LoadOptions(resolve(name), hub.pick_device(device), **arguments)
    options = hub.pin_revision(options)
    config = hub.read_config(options.name, options.revision)
    auto_map = config.get("auto_map") or {}
    if any(key in auto_map for key in HEADED):
        if not options.trust_remote_code:
            raise DuelError("its own code is run only where it is trusted; pass trust_remote_code=true.")
        folder = hub.local_folder(options.name, options.revision)
        in_folder = LoadOptions(folder, options.device, **arguments)
        model = own_network(config, in_folder)
        return model.to(options.device).eval()

    architectures = config.get("architectures") or [""]
    kind = getattr(transformers, architectures[0], None)
    if kind is None:
        raise DuelError("it has no code, and transformers has no class for it.")
    model, report = kind.from_pretrained(
        options.name,
        dtype=hub.pick_dtype(options.dtype, options.device),
        revision=options.revision,
        output_loading_info=True,
    )
    missing = sorted(report["missing_keys"])
    if missing:
        raise DuelError(f"{kind.__name__} of transformers finds no {missing[0]} in its files.")
    return model.to(options.device).eval()
