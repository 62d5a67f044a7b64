"""The common part of transformers' networks and of a checkpoint's own code: from a checkpoint to a denoiser.

    Checkpoint -> what kind of network it is, [MASK], which columns are tokens     Pretrained.__init__
    files      -> the network, by the `read` of its class                          Pretrained.take

Shapes: N rows of a call, Q queries, K keys, V tokens.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
import os
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from transformers.utils import cached_file

from lm_eval_duel import fingerprint
from lm_eval_duel.arguments import TRUTH
from lm_eval_duel.core.denoiser import Denoiser
from lm_eval_duel.denoisers.checkpoint import Checkpoint
from lm_eval_duel.denoisers.hf import weights
from lm_eval_duel.denoisers.hf.families import NAMED, Family
from lm_eval_duel.denoisers.hf.weights import CONFIG_KEY
from lm_eval_duel.denoisers.hub import QUIET, SHOWN, pick_dtype, read_tensors, require_none
from lm_eval_duel.denoisers.load_options import LoadOptions
from lm_eval_duel.denoisers.vocabulary import excluded_columns, find_mask_id, require_fit, row_length
from lm_eval_duel.errors import DuelError

log = logging.getLogger("lm_eval.duel_mdm")

LENGTHS = (  # entries of configs
    "max_position_embeddings",
    "max_sequence_length",
    "model_length",
    "n_positions",
    "max_seq_len",
    "n_ctx",
)
LOGGERS = ("transformers.modeling_utils", "transformers.utils.loading_report")
REPORTS = ("LOAD REPORT", "newly initialized", "were not used when initializing")
UNBOUNDED = 1_000_000  # tokenizers without a length report 1e30


class Pretrained(Denoiser):
    """A network of transformers, or of a checkpoint's own code.

    A subclass is made from what config and tokenizer say, before any weight is read; `fill` gives it its network.
    """

    model: Any
    kind: Any  # the class of its network, or an Auto class
    model_config: Any  # of transformers
    refuses = True  # a failed self-test raises an error; if False, they only detect what numbers depend on

    def __init__(self, checkpoint: Checkpoint, rows: int | None):
        """`rows`: of the embedding, if known. Without a tokenizer, a subclass sets the tokens."""
        options = checkpoint.options
        config = checkpoint.config
        tokenizer = checkpoint.tokenizer
        self.family_entry = checkpoint.family_entry
        set_attributes(self, self.family_entry, config, options)
        self.config = config
        self.options = options
        self.path = options.name
        self.tokenizer_length = getattr(tokenizer, "model_max_length", None)
        self.mask_id = None
        if tokenizer is None:
            return
        if self.attention != "causal":
            self.mask_id = find_mask_id(options, config, tokenizer, self.family_entry.mask_id, rows)
        self.tokens = set(tokenizer.get_vocab().values())
        if rows is not None:
            require_fit(self.tokens, self.mask_id, rows, self.path)

    def set_row_length(self, positions: int | None) -> None:
        """Set the length of rows: the one in the options, at most the `positions` that the network holds."""
        if self.by_blocks and positions is not None and positions < self.block:
            raise DuelError(f"{self.path} takes {positions} positions, so its trained block cannot be {self.block}.")
        self.max_length = row_length(self.path, self.options.max_length, positions)

    def build(self) -> Any:
        """The network without its weights, on torch's default device and in its default dtype."""
        return self.kind(self.model_config)

    def read(self) -> Any:
        """The network with its weights."""
        return load_model(self.kind, self.model_config, self.config, self.options)

    def fill(self) -> Pretrained:
        """Read the weights, and test the network."""
        self.take(self.read().eval())
        return self

    def take(self, model: Any) -> None:
        """Take a network with its weights, in eval mode."""
        self.model = model
        self.device = device_of(model)
        self.quantized = is_quantized(model)
        self.dtype = next(model.parameters()).dtype
        if self.quantized:  # some packages unpack weights only when the whole network is called
            ids = torch.zeros(1, 1, dtype=torch.long, device=self.device)
            with torch.no_grad():
                model(input_ids=ids)

    def additive_mask(self, seen: torch.Tensor) -> torch.Tensor:
        """The mask (N, 1, Q, K) that is added to the scores of attention: 0 where a query sees a key.

        `seen` (N, Q, K) bool.
        """
        lowest = torch.finfo(self.dtype).min  # with -inf, a query that sees nothing would give NaN
        mask = torch.zeros(seen.shape, dtype=self.dtype, device=seen.device)  # (N, Q, K)
        mask = mask.masked_fill(~seen, lowest)
        return mask[:, None]

    def set_columns(self, columns: int) -> None:
        """Set the number of columns of the logits; the columns of the tokenizer's ids, except [MASK], are tokens."""
        self.vocab_size = columns
        self.excluded = excluded_columns(self.tokens, self.mask_id, columns, self.path, self.device)
        self.vocabulary = f"{self.token_count} of {columns}"

    @property
    def coarse(self) -> bool:
        return self.dtype.itemsize < 4

    @property
    def layers(self) -> torch.nn.Module:
        return self.model

    def describe(self) -> dict[str, object]:
        native = is_native(self.model)
        stored = f"{self.path} at commit {self.options.revision}"
        if os.path.isdir(self.path):
            stored = fingerprint.weights_of(self.path, not native)
        described = {
            "denoiser": type(self.model).__name__,
            "weights": stored,
            "dtype": str(self.dtype).removeprefix("torch."),
            "mask_token_id": self.mask_id,
            "vocabulary": self.vocabulary,
            "relative_positions": self.relative_positions,
        }
        if self.quantized:
            described |= weights.quantization_entries(self.model)
        is_usual_masked_lm = self.family == "masked-lm" and not self.shift and self.attention == "bidirectional"
        if not is_usual_masked_lm:
            described |= {"attention": self.attention, "shift": self.shift}
        if self.by_blocks:
            described["last_block"] = self.last_block
        if self.anchor == "target":
            described["context"] = "one block"
        if self.attention == "causal_prefix":
            described["first_token"] = "causal" if self.seeds_blocks else "block"
        if not native:  # also if code and weights come from different repositories
            described["code"] = fingerprint.code_of(type(self.model))
        if self.options.peft:
            described["peft"] = fingerprint.adapter_of(self.options.peft)
        return described


def set_attributes(
    denoiser: Denoiser,
    family: Family,
    config: dict[str, Any],
    options: LoadOptions,
) -> None:
    """Set the attributes of a network, from its options, else its config, else its family."""
    attention = options.attention or family.attention
    # Under attention=causal a network is scored by estimator=ar, as the network that it was trained from.
    # Classes outside the table may be trained with any attention.
    if family.name in NAMED and attention not in ("causal", family.attention):
        log.warning(
            "%s networks are trained with attention=%s; using attention=%s, which is another network",
            family.name,
            family.attention,
            attention,
        )

    denoiser.family = family.name
    denoiser.attention = attention
    denoiser.last_block = options.last_block
    denoiser.seeds_blocks = attention == "causal_prefix" and options.first_token != "block"
    denoiser.published_block = family.published_block if attention == "bidirectional" else None
    denoiser.anchor = family.anchor if attention == "block_causal" else "row"
    denoiser.shift = 1 if attention == "causal" else _shift(family, config, options)

    # With shifted logits the first token of a text is predicted from the position before it, so there must be one.
    usual_bos = "given" if denoiser.shift else family.bos
    denoiser.bos = options.bos or usual_bos
    if denoiser.by_blocks:
        denoiser.block = trained_block(family, config, options)
        options.require_block(denoiser.block)


def _shift(family: Family, config: dict[str, Any], options: LoadOptions) -> int:
    """1 if the logits for a position are read at the one before it, from the options, else the config, the family."""
    if options.shift_logits is not None:
        return int(options.shift_logits)
    if family.native:  # of a decoder; in another network's config an entry of this name means nothing here
        shifted = TRUTH("right_shift_logits", config.get("right_shift_logits"))
        if shifted is not None:
            return int(shifted)
    return family.shift


def trained_block(family: Family, config: dict[str, Any], options: LoadOptions) -> int:
    """The trained block, from the config, else from the options, else from the family."""
    in_config = family.block_in(config)
    if in_config is not None:
        return in_config
    if isinstance(options.block, int) and not family.block_routes:
        if family.block is not None and options.block not in (family.block, family.published_block):
            log.warning(
                "%s networks are trained on blocks of %d; using block=%d",
                family.name,
                family.block,
                options.block,
            )
        return options.block
    if family.block is None:
        raise DuelError(f"{options.name} is block-causal and its config has no block; pass block=<the trained one>.")
    return family.published_block or family.block


def trained_positions(family: Family, positions: int | None, config: dict[str, Any]) -> int | None:
    """The positions that a network of a family was trained on, at most the `positions` of its config.

    If queries are scaled from some position on (`Family.unscaled`), a last block that is filled up ends before it.
    """
    if family.unscaled:
        rotary = config.get("rope_parameters") or config["rope_scaling"]
        original = rotary["original_max_position_embeddings"]
        positions = min(positions, int(original) - (family.block_in(config) or family.block or 0))
    bounds = filter(None, (positions, family.max_length))
    return min(bounds, default=None)


def held_positions(model: torch.nn.Module, model_max_length: int | None) -> int | None:
    """Positions that a network can hold: the minimum over config, position table and the tokenizer's own bound."""
    positions = configured_positions(model.config, model_max_length)
    table = _table_after_padding(model)
    if table is None:
        return positions
    of_table = len(table.weight) - first_position(model)
    return of_table if positions is None else min(positions, of_table)


def configured_positions(config: Any, model_max_length: int | None) -> int | None:
    """Positions that a network can hold, by its config and the tokenizer's own bound."""
    lengths = []
    for name in LENGTHS:
        length = getattr(config, name, None)
        if length:
            lengths.append(length)
    if getattr(config, "model_type", None) == "esm":  # its count starts after the padding id, even if rotary
        first = (config.pad_token_id or 0) + 1
        lengths.append(config.max_position_embeddings - first)
    if model_max_length and model_max_length < UNBOUNDED:
        lengths.append(model_max_length)
    return min(lengths, default=None)


def first_position(model: torch.nn.Module) -> int:
    """The position id of a row's first token. RoBERTa counts from after the padding id."""
    table = _table_after_padding(model)
    return 0 if table is None else table.padding_idx + 1


def _table_after_padding(model: torch.nn.Module) -> Any:
    """The position embedding of a network whose positions start after the padding id; None for other networks."""
    for name, module in model.named_modules():
        is_table = name.endswith("position_embeddings")
        if is_table and getattr(module, "padding_idx", None) is not None:
            return module
    return None


def cache_name(network: torch.nn.Module) -> str:
    """The name of the argument for kept keys and values of a network of transformers: `cache` from 5.24 on."""
    parameters = inspect.signature(type(network).forward).parameters
    return "cache" if "cache" in parameters else "past_key_values"


def is_native(model: torch.nn.Module) -> bool:
    """True if the class of a network belongs to transformers, not to a checkpoint's own code."""
    return type(model).__module__.startswith("transformers.")


# ---------------------------------------------------------------- weights


def load_model(
    auto_class: Any,
    model_config: Any,
    config: dict[str, Any],
    options: LoadOptions,
    **model_kwargs: Any,
) -> Any:
    """The network of a checkpoint in a class of transformers, on its device. Unused tensors are a warning only.

    Raises:
        DuelError: A tensor is missing or has another shape, or a file is broken.
    """
    adapter = cached_file(options.name, "adapter_config.json", revision=options.revision, **QUIET)
    if adapter is not None:  # transformers would load it as well
        raise DuelError(
            f"{options.name} holds an adapter (adapter_config.json) next to its weights. Use a copy without the "
            "adapter's files, and pass peft=<their folder> to add it."
        )
    quantized = needs_quantization(config, options)
    model_kwargs |= special_kwargs(config, options)
    reports = contextlib.nullcontext() if quantized else quiet_transformers()
    try:
        with reports:
            model, report = auto_class.from_pretrained(
                options.name,
                config=model_config,
                dtype=pick_dtype(options.dtype, options.device),
                revision=options.revision,
                ignore_mismatched_sizes=not quantized,  # reported, and raised below; packed weights need False
                output_loading_info=True,
                **model_kwargs,
            )
    except Exception:
        if os.path.isdir(options.name):
            read_tensors(options.name)  # raises an error that names the broken file
        raise

    missing = report["missing_keys"]
    unknown = report["unexpected_keys"]
    wrong = misshapen(report)
    if missing or wrong:
        what = f"The weights of {options.name} do not fill {type(model).__name__}"
        require_none(what, missing, unknown, wrong)
    if is_quantized(model):
        weights.require_quantized_tensors_used(model, unknown, options.name)
    if unknown:
        log.warning("Weights of %s that the network does not use: %s", options.name, sorted(unknown)[:SHOWN])
    if "device_map" in model_kwargs:  # it is where it should be
        return model
    return model.to(options.device)


def needs_quantization(config: dict[str, Any], options: LoadOptions) -> bool:
    """True if a network's weights are quantized in its files, or are to be when they are loaded."""
    return config.get(CONFIG_KEY) is not None or options.load_in_8bit or options.load_in_4bit


def special_kwargs(config: dict[str, Any], options: LoadOptions) -> dict[str, Any]:
    """The arguments of `from_pretrained` for quantized networks and for several devices; empty for other networks."""
    model_kwargs: dict[str, Any] = {}
    if needs_quantization(config, options):
        model_kwargs |= weights.quantization_kwargs(config, options)
    if options.device_map is not None:
        model_kwargs |= weights.placement_kwargs(options)
    return model_kwargs


def misshapen(report: Mapping[str, Any]) -> list[str]:
    """The tensors of another shape in a loading report of transformers; some versions leave their shapes out."""
    lines = []
    for entry in report["mismatched_keys"]:
        if isinstance(entry, str):
            lines.append(entry)
        else:
            name, actual, expected = entry[:3]
            lines.append(f"{name} is {tuple(actual)}, not {tuple(expected)}")
    return lines


@contextlib.contextmanager
def quiet_transformers() -> Iterator[None]:
    """Silence transformers' reports of tensors that do not fit, but not of those that it cannot convert."""

    def passes(record: logging.LogRecord) -> bool:
        text = record.getMessage()
        return "CONVERSION" in text or not any(words in text for words in REPORTS)

    loggers = [logging.getLogger(name) for name in LOGGERS]
    for logger in loggers:
        logger.addFilter(passes)
    try:
        yield
    finally:
        for logger in loggers:
            logger.removeFilter(passes)


def device_of(model: Any) -> torch.device:
    """The device of a network's ids: the one that computes its input embedding, even if the weights are offloaded."""
    table = model.get_input_embeddings()
    weight = getattr(table, "weight", table)  # some networks return the parameter itself
    if not weight.is_meta:
        return weight.device
    hook = table._hf_hook  # accelerate's, which moves the weights there for each call
    if hasattr(hook, "hooks"):  # several in a row
        hook = hook.hooks[0]
    return torch.device(hook.execution_device)


def is_quantized(model: Any) -> bool:
    """True if a network of transformers has quantized layers."""
    return getattr(model, "hf_quantizer", None) is not None
