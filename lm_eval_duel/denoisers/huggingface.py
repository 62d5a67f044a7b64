"""Transformers models: any masked LM, and any bidirectional network whose logits at position i predict token i.

What a checkpoint really does is found by small forwards at load, not by its name: whether it is bidirectional,
whether padding stays unseen, whether a row of masks predicts one distribution everywhere (rotary positions only), and
whether the LM head can be split off.

Shapes: R rows, L row length, U cells, D features, V tokens.
"""

from __future__ import annotations

import copy
import logging
import os

import torch
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    PretrainedConfig,
    PreTrainedTokenizerBase,
)

from lm_eval_duel import fingerprint
from lm_eval_duel.denoisers.base import Denoiser
from lm_eval_duel.denoisers.predictions import excluded_columns
from lm_eval_duel.denoisers.hub import load_tokenizer, pick_dtype, row_length, unreadable
from lm_eval_duel.errors import DuelError

log = logging.getLogger("lm_eval.duel_mdm")

LENGTHS = ("max_position_embeddings", "max_sequence_length", "model_length", "n_positions", "max_seq_len", "n_ctx")
BLANK_TOLERANCE = 1e-4  # of the logits' spread, in float32; rotary networks were seen at 1.5e-6
COARSE_TOLERANCE = 0.05  # the same in bfloat16 or float16
COPIED_PARAMETERS = 2_000_000_000
UNBOUNDED = 1_000_000  # tokenizers without a length say 1e30
SHIFTED = "it predicts a token from the position before"
BLOCK_CAUSAL = "it sees earlier blocks only"
NOT_YET = {
    "DreamModel": SHIFTED,
    "DreamForCausalLM": BLOCK_CAUSAL,
    "Fast_dLLM_QwenForCausalLM": f"{SHIFTED} and {BLOCK_CAUSAL}",
    "LLaDA2MoeModelLM": BLOCK_CAUSAL,
    "SDARForCausalLM": BLOCK_CAUSAL,
    "SDARMoeForCausalLM": BLOCK_CAUSAL,
    "StableDiffcoderForCausalLM": BLOCK_CAUSAL,
}
PUBLISHED_BLOCK = {"llada": 32}  # by model_type; of bidirectional networks


def load(
    path: str,
    *,
    device: torch.device,
    dtype: str,
    revision: str,
    trust_remote_code: bool,
    mask_token_id: int | None,
    max_length: int | None,
    tokenizer: str | PreTrainedTokenizerBase | None,
) -> HuggingFace:
    """See `denoisers.load`."""
    hub = {"revision": revision, "trust_remote_code": trust_remote_code}
    weights = pick_dtype(dtype, device)
    try:
        config = AutoConfig.from_pretrained(path, **hub)
    except (OSError, ValueError) as error:
        raise unreadable(path, error) from error
    if isinstance(tokenizer, str) or tokenizer is None:
        tokenizer = load_tokenizer(tokenizer or path, trust_remote_code, "main" if tokenizer else revision)
    mask_id = _mask_id(path, mask_token_id, config, tokenizer)
    model_class = _model_class(path, config)
    try:
        model, report = model_class.from_pretrained(path, config=config, dtype=weights, output_loading_info=True, **hub)
    except Exception as error:  # a truncated file raises the error of whichever library reads it
        raise unreadable(path, error) from error
    for kind in ("missing_keys", "mismatched_keys"):
        if report.get(kind):
            names = ", ".join(str(key) for key in sorted(report[kind])[:10])
            raise DuelError(f"The checkpoint {path} does not fill the network: {kind.replace('_', ' ')} {names}.")
    if report.get("unexpected_keys"):
        log.warning("weights of %s that the network does not use: %s", path, sorted(report["unexpected_keys"])[:10])
    held = _max_length(model, tokenizer)
    if not (max_length or held):
        raise DuelError(f"Neither config nor tokenizer of {path} says how many positions it holds; pass max_length=.")
    row = row_length(path, max_length, held)
    tokens = set(tokenizer.get_vocab().values())
    denoiser = HuggingFace(model.to(device).eval(), mask_id, tokens, held or max_length, path)
    denoiser.max_length = row
    return denoiser


def _mask_id(path: str, given: int | None, config: PretrainedConfig, tokenizer: PreTrainedTokenizerBase) -> int:
    rows = getattr(config, "vocab_size", None) or getattr(config, "embedding_size", None)
    for value in (given, getattr(config, "mask_token_id", None), tokenizer.mask_token_id):
        if value is not None:
            if rows is not None and not 0 <= value < rows:
                raise DuelError(f"mask_token_id={value} is not an id of {path}; its ids are 0 to {rows - 1}.")
            return int(value)
    raise DuelError(f"Neither config nor tokenizer of {path} names a mask token; pass mask_token_id=<id>.")


def _model_class(path: str, config: PretrainedConfig) -> type:
    """The Auto class that gives logits for this config; raises DuelError for a family that would be scored wrongly."""
    for name in getattr(config, "architectures", None) or []:
        if name in NOT_YET:
            raise DuelError(f"{path} is a {name}: {NOT_YET[name]}, which is not supported yet.")
    remote = getattr(config, "auto_map", None) or {}
    named = (getattr(config, "architectures", None) or [""])[0]
    if "AutoModelForMaskedLM" in remote or named.endswith("ForMaskedLM"):
        return AutoModelForMaskedLM
    if "AutoModelForCausalLM" in remote or named.endswith(("ForCausalLM", "LMHeadModel")):
        return AutoModelForCausalLM
    if "AutoModel" in remote:
        return AutoModel
    return AutoModelForMaskedLM


def _max_length(model: torch.nn.Module, tokenizer: PreTrainedTokenizerBase) -> int | None:
    """Positions that the network can hold: the smallest of what config, position table and tokenizer say."""
    found = [getattr(model.config, name) for name in LENGTHS if getattr(model.config, name, None)]
    for name, module in model.named_modules():
        if name.endswith("position_embeddings") and getattr(module, "padding_idx", None) is not None:
            found.append(module.num_embeddings - module.padding_idx - 1)  # RoBERTa counts from after the padding id
    found += [tokenizer.model_max_length] if tokenizer.model_max_length < UNBOUNDED else []
    return min(found, default=None)


class HuggingFace(Denoiser):
    """A transformers model with bidirectional attention and unshifted logits."""

    def __init__(self, model: torch.nn.Module, mask_id: int, tokens: set[int], max_length: int, path: str):
        self.model, self.path, self.max_length, self.mask_id = model, path, max_length, mask_id
        self.device = next(model.parameters()).device
        self.dtype = next(model.parameters()).dtype
        self.published_block = PUBLISHED_BLOCK.get(str(model.config.model_type).lower())
        self._output = model.get_output_embeddings()
        with torch.inference_mode():
            probe = self._probe()
            try:
                logits = self._logits(probe)
            except (TypeError, AttributeError, RuntimeError, ValueError) as error:
                raise unreadable(path, error) from error
            self.vocab_size = logits.shape[-1]
            self._excluded = excluded_columns(tokens, mask_id, self.vocab_size, path, self.device)
            self.splits_head = self._splits(probe, logits)
            self._require_bidirectional(probe, logits)
            self.honours_padding = self._keeps_padding_unseen(probe, logits)
            self.relative_positions = self._ties_when_blank()

    @property
    def excluded(self) -> torch.Tensor:
        return self._excluded

    @torch.inference_mode()
    def features(self, ids: torch.Tensor, real: torch.Tensor | None) -> torch.Tensor:
        mask = None if real is None else real.long()  # (R, L)
        if not self.splits_head:
            return self._logits(ids, mask)  # (R, L, V)
        caught = []

        def catch(module: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
            caught.append(inputs[0])
            return (inputs[0][:, :0], *inputs[1:])  # the head runs later, at hidden cells only

        hook = self._output.register_forward_pre_hook(catch)
        try:
            self._logits(ids, mask)
        finally:
            hook.remove()
        return caught[-1]  # (R, L, D)

    @torch.inference_mode()
    def head(self, features: torch.Tensor) -> torch.Tensor:
        return self._output(features) if self.splits_head else features  # (U, V)

    def describe(self) -> dict[str, object]:
        commit = getattr(self.model.config, "_commit_hash", None)
        runs_code = type(self.model).__module__.startswith("transformers_modules")
        local = os.path.isdir(self.path)
        return {
            "denoiser": type(self.model).__name__,
            "weights": fingerprint.weights_of(self.path, runs_code) if local else f"{self.path} at commit {commit}",
            "dtype": str(self.dtype).removeprefix("torch."),
            "mask_token_id": self.mask_id,
            "vocabulary": f"{int((~self._excluded).sum())} of {self.vocab_size}",
            "relative_positions": self.relative_positions,
        }

    def _logits(self, ids: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        return _logits_of(self.model, ids, mask)  # (R, L, V)

    # ------------------------------------------------------------ what this network does

    def _probe(self, length: int = 8) -> torch.Tensor:
        """Two rows of arbitrary ids (2, length)."""
        vocabulary = self.model.get_input_embeddings().num_embeddings
        generator = torch.Generator().manual_seed(1)
        return torch.randint(vocabulary, (2, min(length, self.max_length)), generator=generator).to(self.device)

    def _splits(self, ids: torch.Tensor, logits: torch.Tensor) -> bool:
        """Whether the output embedding alone makes the logits of its input, to the bit."""
        if self._output is None:
            return False
        self.splits_head = True
        try:
            return torch.equal(self.head(self.features(ids, None)), logits)
        except (RuntimeError, IndexError, TypeError, ValueError, AttributeError, AssertionError):
            return False  # it does more with the head's input or output than we can stand in for

    def _require_bidirectional(self, ids: torch.Tensor, logits: torch.Tensor) -> None:
        changed = ids.clone()
        changed[:, -1] = (ids[:, -1] + 1) % self.model.get_input_embeddings().num_embeddings
        if ids.shape[1] > 1 and torch.equal(self._logits(changed)[:, :-1], logits[:, :-1]):
            raise DuelError(
                f"{self.path} is causal: its predictions ignore what comes later, so it is no masked diffusion model. "
                "Score it with lm_eval --model hf."
            )

    def _keeps_padding_unseen(self, ids: torch.Tensor, logits: torch.Tensor) -> bool:
        """Whether logits with masked padding equal those without, far closer than with padding seen."""
        half = ids.shape[1] // 2
        if half == 0:
            return False
        mask = torch.ones_like(ids)
        mask[:, half:] = 0
        alone = self._logits(ids[:, :half])
        try:
            masked = self._logits(ids, mask)[:, :half]
        except TypeError:  # it takes no attention mask
            return False
        return _differ(alone, masked) < 0.1 * _differ(alone, logits[:, :half])

    def _ties_when_blank(self) -> bool:
        """Whether a row of masks has one distribution at every cell.

        In float32 where a copy of the network is affordable: a coarser dtype could hide weak position signals.
        """
        row = torch.full((1, min(32, self.max_length)), self.mask_id, device=self.device)
        model, tolerance = self.model, BLANK_TOLERANCE
        if self.dtype.itemsize < 4:
            small = sum(parameter.numel() for parameter in model.parameters()) <= COPIED_PARAMETERS
            model, tolerance = (copy.deepcopy(model).float(), tolerance) if small else (model, COARSE_TOLERANCE)
        logits = _logits_of(model, row)[0].masked_fill(self._excluded, 0)  # (L, V)
        return _differ(logits, logits[:1].expand_as(logits)) <= tolerance


def _logits_of(model: torch.nn.Module, ids: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
    """Logits (R, L, V) of any of the ways in which networks return them."""
    out = model(input_ids=ids) if mask is None else model(input_ids=ids, attention_mask=mask)
    return out if isinstance(out, torch.Tensor) else out[0] if isinstance(out, tuple) else out.logits


def _differ(a: torch.Tensor, b: torch.Tensor) -> float:
    """The largest difference of logits, in units of their spread."""
    return float((a.double() - b.double()).abs().max() / a.double().std().clamp(min=1e-12))
