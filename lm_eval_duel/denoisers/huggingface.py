"""Transformers models: any masked LM, and any bidirectional network whose logits at position i predict token i.

What a checkpoint really does is found by small forwards at load, not by its name: whether it is bidirectional,
whether padding stays unseen, whether a row of masks predicts one distribution everywhere (rotary positions only), and
whether the LM head can be split off.

Shapes: R rows, L row length, U cells, D features, V tokens.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from typing import Any

import torch
from huggingface_hub import snapshot_download
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoTokenizer,
    PretrainedConfig,
    PreTrainedTokenizerBase,
)
from transformers.utils import cached_file

from lm_eval_duel import fingerprint
from lm_eval_duel.denoisers.base import Denoiser
from lm_eval_duel.errors import DuelError, unknown

log = logging.getLogger("lm_eval.duel_mdm")

DTYPES = {"float64", "float32", "float16", "bfloat16"}
LENGTHS = ("max_position_embeddings", "max_sequence_length", "model_length", "n_positions", "max_seq_len", "n_ctx")
UNBOUNDED = 1_000_000  # tokenizers without a length say 1e30
PUBLISHED_BLOCK = {"llada": 32}  # by model_type; of bidirectional networks


def pick_device(name: str | None) -> torch.device:
    """The device of a name; None: a GPU where there is one. A CPU takes over where there is no GPU at all."""
    if name is None or str(name) == "auto":
        name = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    try:
        device = torch.device(int(name) if str(name).isdigit() else name)
    except (RuntimeError, ValueError):
        raise DuelError(f"No device '{name}'; use cpu, mps, cuda or cuda:0.") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        log.info("no CUDA device here: running on the CPU")  # the harness asks for cuda:0 unless told otherwise
        return torch.device("cpu")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise DuelError(f"No device '{name}': there are {torch.cuda.device_count()} CUDA devices, counted from 0.")
    return device


def pick_dtype(name: str, device: torch.device) -> torch.dtype | str:
    """The dtype of a name; "auto": float32 on a CPU, else the checkpoint's."""
    name = str(name).removeprefix("torch.")
    if name == "auto":
        return torch.float32 if device.type == "cpu" else "auto"
    if name not in DTYPES:
        raise unknown("dtype", name, [*DTYPES, "auto"])
    return getattr(torch, name)


def load(
    path: str,
    *,
    device: torch.device,
    dtype: str,
    revision: str,
    trust_remote_code: bool,
    mask_token_id: int | None,
    max_length: int | None,
    tokenizer: str | None,
) -> HuggingFace:
    """See `denoisers.load`."""
    hub = {"revision": revision, "trust_remote_code": trust_remote_code}
    weights = pick_dtype(dtype, device)
    try:
        config = AutoConfig.from_pretrained(path, **hub)
    except (OSError, ValueError) as error:
        raise DuelError(_unreadable(path, error)) from error
    words = load_tokenizer(tokenizer or path, trust_remote_code, "main" if tokenizer else revision)
    mask_id = _mask_id(path, mask_token_id, config, words)
    model_class = _model_class(config)
    try:
        model, report = model_class.from_pretrained(path, config=config, dtype=weights, output_loading_info=True, **hub)
    except Exception as error:  # a truncated file raises the error of whichever library reads it
        raise DuelError(_unreadable(path, error)) from error
    for kind in ("missing_keys", "mismatched_keys"):
        if report.get(kind):
            names = ", ".join(str(key) for key in sorted(report[kind])[:5])
            raise DuelError(f"The checkpoint {path} does not fill the network: {kind.replace('_', ' ')} {names}.")
    if report.get("unexpected_keys"):
        log.warning("weights of %s that the network does not use: %s", path, sorted(report["unexpected_keys"])[:5])
    held = _max_length(model, words)
    if not (max_length or held):
        raise DuelError(f"Neither config nor tokenizer of {path} says how many positions it holds; pass max_length=.")
    if max_length and held and max_length > held:
        raise DuelError(
            f"max_length={max_length} is too long: {path} holds {held} positions; leave it out or lower it."
        )
    return HuggingFace(model.to(device).eval(), mask_id, len(words), max_length or held, path)


def raw_config(path: str, revision: str) -> dict[str, Any]:
    """config.json as it stands; no code of the checkpoint is run for it."""
    try:
        return PretrainedConfig.get_config_dict(path, revision=revision)[0]
    except (OSError, ValueError) as error:
        raise DuelError(_unreadable(path, error)) from error


def local_folder(path: str, revision: str, files: Sequence[str]) -> str:
    """The folder that holds a checkpoint's config and weights, fetched from the hub where it is a hub name."""
    if os.path.isdir(path):
        return path
    try:
        return snapshot_download(path, revision=revision, allow_patterns=["config.json", *files])
    except (OSError, ValueError) as error:
        raise DuelError(_unreadable(path, error)) from error


def has_tokenizer(path: str, revision: str) -> bool:
    """Whether a tokenizer lies beside the weights."""
    return any(
        cached_file(path, name, revision=revision, _raise_exceptions_for_missing_entries=False) is not None
        for name in ("tokenizer.json", "tokenizer_config.json", "vocab.txt")
    )


def load_tokenizer(path: str, trust_remote_code: bool, revision: str) -> PreTrainedTokenizerBase:
    """The tokenizer of a folder or hub name; raises DuelError when there is none."""
    try:
        return AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code, revision=revision)
    except (OSError, ValueError) as error:
        raise DuelError(_unreadable(path, error)) from error


def _unreadable(path: str, error: Exception) -> str:
    hint = ""
    if "trust_remote_code" in str(error):
        hint = " It runs code of its own: pass trust_remote_code=true if you trust it."
    elif not os.path.isdir(path):
        hint = " It is no local folder; a hub name needs a connection or a filled cache."
    return f"Cannot read checkpoint '{path}': {type(error).__name__}: {str(error).splitlines()[0]}{hint}"


def _mask_id(path: str, given: int | None, config: object, words: PreTrainedTokenizerBase) -> int:
    rows = getattr(config, "vocab_size", None) or getattr(config, "embedding_size", None)
    for value in (given, getattr(config, "mask_token_id", None), words.mask_token_id):
        if value is not None:
            if rows is not None and not 0 <= value < rows:
                raise DuelError(f"mask_token_id={value} is not an id of {path}; its ids are 0 to {rows - 1}.")
            return int(value)
    raise DuelError(f"Neither config nor tokenizer of {path} names a mask token; pass mask_token_id=<id>.")


def _model_class(config: PretrainedConfig) -> type:
    """The Auto class that gives logits for this config."""
    remote = getattr(config, "auto_map", None) or {}
    named = (getattr(config, "architectures", None) or [""])[0]
    if "AutoModelForMaskedLM" in remote or named.endswith("ForMaskedLM"):
        return AutoModelForMaskedLM
    if "AutoModelForCausalLM" in remote or named.endswith(("ForCausalLM", "LMHeadModel")):
        return AutoModelForCausalLM
    if "AutoModel" in remote:
        return AutoModel
    return AutoModelForMaskedLM


def _max_length(model: torch.nn.Module, words: PreTrainedTokenizerBase) -> int | None:
    """Positions that the network can hold: the smallest of what config, position table and tokenizer say."""
    found = [getattr(model.config, name) for name in LENGTHS if getattr(model.config, name, None)]
    for name, module in model.named_modules():
        if name.endswith("position_embeddings") and getattr(module, "padding_idx", None) is not None:
            found.append(module.num_embeddings - module.padding_idx - 1)  # RoBERTa counts from after the padding id
    found += [words.model_max_length] if words.model_max_length < UNBOUNDED else []
    return min(found, default=None)


class HuggingFace(Denoiser):
    """A transformers model with bidirectional attention and unshifted logits."""

    def __init__(self, model: torch.nn.Module, mask_id: int, vocabulary: int, max_length: int, path: str):
        self.model, self.path, self.max_length, self.mask_id = model, path, max_length, mask_id
        self.device = next(model.parameters()).device
        self.dtype = next(model.parameters()).dtype
        self.published_block = PUBLISHED_BLOCK.get(str(model.config.model_type).lower())
        self._output = model.get_output_embeddings()
        with torch.inference_mode():
            logits = self._logits(self._probe(mask_id, 1, 2))
            self.vocab_size = logits.shape[-1]
            if vocabulary > self.vocab_size:
                raise DuelError(
                    f"The tokenizer has {vocabulary} tokens but {path} predicts {self.vocab_size}: "
                    "they do not belong together; pass tokenizer=<the right one>."
                )
            self._excluded = torch.arange(self.vocab_size, device=self.device) >= vocabulary
            self._excluded[mask_id] = True
            if not self._splits():
                self._output = None
            self._require_bidirectional()
            self.honours_padding = self._keeps_padding_unseen()
            self.relative_positions = self._ties_when_blank()

    @property
    def excluded(self) -> torch.Tensor:
        return self._excluded

    @torch.inference_mode()
    def features(self, ids: torch.Tensor, real: torch.Tensor | None) -> torch.Tensor:
        mask = None if real is None else real.long()  # (R, L)
        if self._output is None:
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
        return features if self._output is None else self._output(features)  # (U, V)

    def describe(self) -> dict[str, object]:
        commit = getattr(self.model.config, "_commit_hash", None)
        return {
            "denoiser": type(self.model).__name__,
            "weights": fingerprint.weights_of(self.path) if os.path.isdir(self.path) else f"commit {commit}",
            "dtype": str(self.dtype).removeprefix("torch."),
            "mask_token_id": self.mask_id,
            "vocabulary": f"{int((~self._excluded).sum())} of {self.vocab_size}",
        }

    def _logits(self, ids: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        return self.model(input_ids=ids, attention_mask=mask).logits  # (R, L, V)

    # ------------------------------------------------------------ what this network does

    def _probe(self, seed: int, rows: int = 2, length: int = 8) -> torch.Tensor:
        """Rows of arbitrary ids (rows, length)."""
        length = min(length, self.max_length)
        vocabulary = self.model.get_input_embeddings().num_embeddings
        generator = torch.Generator().manual_seed(seed)
        return torch.randint(vocabulary, (rows, length), generator=generator).to(self.device)

    def _differ(self, a: torch.Tensor, b: torch.Tensor) -> float:
        """The largest difference of logits, in units of their spread."""
        return float((a.double() - b.double()).abs().max() / a.double().std().clamp(min=1e-12))

    @property
    def _noise(self) -> float:
        """Rounding of this dtype in logits, in units of their spread, with room to spare."""
        return 1e5 * torch.finfo(self.dtype).eps if self.dtype.itemsize >= 4 else 0.1

    def _splits(self) -> bool:
        """Whether the output embedding alone makes the logits of its input."""
        if self._output is None:
            return False
        ids = self._probe(1)
        try:
            split = self.head(self.features(ids, None))
        except (RuntimeError, IndexError, TypeError, ValueError):
            return False
        whole = self._logits(ids)
        return split.shape == whole.shape and self._differ(whole, split) <= self._noise

    def _require_bidirectional(self) -> None:
        ids = self._probe(2)
        changed = ids.clone()
        changed[:, -1] = (ids[:, -1] + 1) % self.model.get_input_embeddings().num_embeddings
        if self._differ(self._logits(ids)[:, :-1], self._logits(changed)[:, :-1]) == 0:
            raise DuelError(
                f"{self.path} is causal: its predictions ignore what comes later, so it is no masked diffusion model. "
                "Score it with lm_eval --model hf."
            )

    def _keeps_padding_unseen(self) -> bool:
        """Whether logits with masked padding equal those without, far closer than with padding seen."""
        ids = self._probe(3)
        half = ids.shape[1] // 2
        mask = torch.ones_like(ids)
        mask[:, half:] = 0
        alone = self._logits(ids[:, :half])
        masked = self._logits(ids, mask)[:, :half]
        seen = self._logits(ids)[:, :half]
        return self._differ(alone, masked) <= min(self._noise, 0.1 * self._differ(alone, seen))

    def _ties_when_blank(self) -> bool:
        """Whether a row of masks has one distribution at every cell."""
        row = torch.full((1, min(32, self.max_length)), self.mask_id, device=self.device)
        logits = self._logits(row)[0].masked_fill(self._excluded, 0)  # (L, V)
        return self._differ(logits, logits[:1].expand_as(logits)) <= self._noise
