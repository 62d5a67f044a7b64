"""DiffusionGemma, through transformers' own class: an autoregressive encoder, and a decoder that removes noise.

    estimator=ar            lm_head(encoder), trained by the autoregressive loss: an exact likelihood in one pass
    estimator=noised_elbo   the decoder on canvases of random tokens, which see the clean tokens before them through
                            the encoder's keys and values

Shapes: R rows or lanes, L row length, W canvas width, D features, V tokens, U rows of features.
"""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import torch
import transformers

from lm_eval_duel.core.lanes import Lanes, Rows
from lm_eval_duel.core.network import NoiseView
from lm_eval_duel.core.noise import NoiseTraining, Uniform
from lm_eval_duel.denoisers import self_tests
from lm_eval_duel.denoisers.checkpoint import Checkpoint
from lm_eval_duel.denoisers.hf.families import Family
from lm_eval_duel.denoisers.hf.own_forward import CAUSAL_LM, CausalLM
from lm_eval_duel.denoisers.hf.pretrained import Pretrained
from lm_eval_duel.denoisers.vocabulary import require_fit
from lm_eval_duel.errors import DuelError

CLASS = "DiffusionGemmaForBlockDiffusion"
NAME = "diffusion-gemma"
CANVAS = Family(NAME, "", bos="given")
ENCODER = dataclasses.replace(CAUSAL_LM, name=NAME)
STEPS = 48  # of its generation config
REFUSED = ("shift_logits", "mask_token_id", "sigma", "first_token", "backend", "peft", "compile")
IMAGE_IDS = ("image_token_id", "boi_token_id", "eoi_token_id")
OF_DECODER = ("cache", "cfg_scale", "temperature", "top_k", "top_p", "exclude_ids")


def unfilled(checkpoint: Checkpoint) -> Pretrained:
    """The encoder under attention=causal, else the decoder; raises DuelError if transformers is too old."""
    options = checkpoint.options
    options.refuse(NAME, *REFUSED)
    if options.attention not in (None, "causal"):
        raise DuelError(f"{options.name} is a {CLASS}; leave attention={options.attention} out.")
    kind = getattr(transformers, CLASS, None)
    if kind is None:
        version = transformers.__version__
        raise DuelError(f"{options.name} is a {CLASS}; transformers {version} has none. Install 5.13 or later.")
    model_config = checkpoint.native_config()
    if options.dtype == "float64":
        model_config._experts_implementation = "eager"  # grouped products stop at float32
        model_config.text_config._experts_implementation = "eager"
    text = model_config.text_config
    denoiser: Encoder | Canvases
    if options.attention == "causal":
        denoiser = Encoder(dataclasses.replace(checkpoint, family=ENCODER), text.vocab_size)
    else:
        options.refuse(NAME, *OF_DECODER)
        denoiser = Canvases(model_config, checkpoint)
    denoiser.image_ids = frozenset(getattr(model_config, name) for name in IMAGE_IDS) - {None}
    # a row's last token is predicted by the encoder, but never its input
    denoiser.set_row_length(text.max_position_embeddings + (options.attention == "causal"))
    denoiser.kind, denoiser.model_config = kind, model_config
    return denoiser


class Encoder(CausalLM):
    """The encoder as an autoregressive network."""

    splits_head = True
    read = Pretrained.read

    def take(self, model: Any) -> None:
        Pretrained.take(self, model)
        self.set_columns(model.lm_head.out_features)
        self_tests.run(self, self.path)

    @property
    def layers(self) -> torch.nn.Module:
        encoder: torch.nn.Module = self.model.model.encoder
        return encoder

    def features(self, ids: torch.Tensor, real: torch.Tensor | None) -> torch.Tensor:
        return self.layers(input_ids=ids).last_hidden_state.to(self.device)  # (R, L, D)

    def head(self, features: torch.Tensor) -> torch.Tensor:
        return capped(self.model, features).to(self.device)

    def describe(self) -> dict[str, object]:
        return {**super().describe(), "part": "encoder"}


class Canvases(Pretrained):
    """The decoder on canvases of noisy tokens: p(x_0 | x_t) given its own earlier output, but not the time."""

    reads_causally = True
    honours_padding = True  # canvases of other rows are other calls

    def __init__(self, model_config: Any, checkpoint: Checkpoint):
        super().__init__(dataclasses.replace(checkpoint, family=CANVAS, tokenizer=None), None)
        options, tokenizer = checkpoint.options, checkpoint.tokenizer
        columns = model_config.text_config.vocab_size
        if tokenizer is not None:
            require_fit(set(tokenizer.get_vocab().values()), None, columns, self.path)
        self.vocab_size, self.tokens = columns, set(range(columns))  # noise is over all columns
        self.block = options.block if isinstance(options.block, int) else model_config.canvas_length
        self.noise_training = NoiseTraining(Uniform(columns), "denoiser", STEPS, "twice", timed=False)

    def open(self, rows: Rows, generating: bool = False) -> NoiseView:
        return CanvasView(self, rows)

    def take(self, model: Any) -> None:
        super().take(model)
        self.set_columns(self.vocab_size)
        with torch.no_grad():
            self._require_separate_canvases()

    def head(self, features: torch.Tensor) -> torch.Tensor:
        return capped(self.model, features).to(self.device)

    def describe(self) -> dict[str, object]:
        return {**super().describe(), "part": "decoder"}

    def encode(self, ids: torch.Tensor, past: Any = None) -> Any:
        """The keys and values of `past` and of clean ids (1, L) after it; `past` is extended in place."""
        return self.model.model.encoder(input_ids=ids, past_key_values=past).past_key_values

    def decode(self, canvases: torch.Tensor, past: Any, before: torch.Tensor | None) -> torch.Tensor:
        """The input of the LM head (R, W, D) of canvases (R, W) after clean tokens of one row, whose keys are `past`.

        `before`: the logits (R, W, V) of the pass before.
        """
        repeated = copy.copy(past)
        repeated.layers = [copy.copy(layer) for layer in past.layers]
        repeated.batch_repeat_interleave(len(canvases))
        out = self.model.model.decoder(
            decoder_input_ids=canvases, past_key_values=repeated, self_conditioning_logits=before
        )
        features: torch.Tensor = out.last_hidden_state.to(self.device)
        return features

    def _require_separate_canvases(self) -> None:
        """Raise DuelError if canvases of one call influence each other, or logits are not finite."""
        rows = self_tests.random_rows(self, min(self.block or 1, self_tests.LENGTH) + 1)  # (2, W + 1)
        past = self.encode(rows[:1, :1])
        logits = [self.head(self.decode(part, past, None)[0]) for part in (rows[:, 1:], rows[:1, 1:])]  # (W, V) each
        self_tests.require_finite(logits[0], self.path)
        tolerance = self_tests.BATCH_TOLERANCE if self.dtype.itemsize >= 4 else self_tests.LOW_PRECISION_TOLERANCE
        if (logits[0] - logits[1]).abs().max() > tolerance * logits[0].std():
            raise DuelError(f"Canvases in one call of {self.path} influence each other.")


class CanvasView(NoiseView):
    """The decoder opened on a group of rows; the keys of each row's clean tokens are computed once, in its order."""

    denoiser: Canvases

    def __init__(self, denoiser: Canvases, rows: Rows):
        super().__init__(denoiser, rows)
        self._row, self._end, self._past = -1, 0, None  # the row and the number of its clean tokens that are kept

    def cost(self, lanes: Lanes) -> torch.Tensor:
        return lanes.start + lanes.width

    def features(
        self, lanes: Lanes, noisy: torch.Tensor, t: torch.Tensor, before: torch.Tensor | None = None
    ) -> torch.Tensor:
        result = None
        for row, start in torch.stack([lanes.row, lanes.start], 1).unique(dim=0).tolist():  # canvases, in order
            at = ((lanes.row == row) & (lanes.start == start)).nonzero()[:, 0]  # (r,)
            width = int(lanes.width[at[0]])
            own = None if before is None else before[at, :width]
            part = self.denoiser.decode(noisy[at, :width], self._clean(row, start), own)  # (r, W, D)
            self.forwards += 1
            self.evaluated += len(at)
            if result is None:
                result = part.new_zeros(*noisy.shape, part.shape[2])  # (R, W, D)
            result[at, :width] = part
        assert result is not None
        return result

    def _clean(self, row: int, end: int) -> Any:
        """The keys and values of the first `end` tokens of a row."""
        if row != self._row or end < self._end:
            self._row, self._end, self._past = row, 0, None
        if end > self._end:
            begin, past = self._end, self._past
            self._row, self._end, self._past = -1, 0, None  # an encode that fails leaves `past` partly extended
            past = self.denoiser.encode(self.rows.ids[row : row + 1, begin:end], past)
            self._row, self._end, self._past = row, end, past
            self.forwards += 1
        return self._past


def capped(model: Any, features: torch.Tensor) -> torch.Tensor:
    """Logits (U, V) of features (U, D): the head and its soft cap, in float32 or better."""
    logits = model.lm_head(features)
    logits = logits if logits.dtype.itemsize >= 4 else logits.float()
    cap = model.final_logit_softcapping
    capped_logits: torch.Tensor = (logits / cap).tanh() * cap
    return capped_logits
