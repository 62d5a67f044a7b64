"""DiffusionGemma, through transformers' own class: an autoregressive encoder, and a decoder that removes noise.

    estimator=ar            lm_head(encoder), trained by the autoregressive loss: an exact likelihood in one pass
    estimator=noised_elbo   the decoder on canvases of random tokens, which see the clean tokens before them through
                            the encoder's keys and values (CanvasView)
    estimator=duel          the decoder on canvases in which positions show noise until they are revealed
                            (CommitOnceView)

Shapes: R rows or lanes, L row length, W canvas width, D features, V tokens, U rows of features.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from typing import Any

import torch
import transformers

from lm_eval_duel.core.denoiser import NoiseView, Positions, View, distinct
from lm_eval_duel.core.float_noise import random_rows
from lm_eval_duel.core.lanes import Lanes, Rows
from lm_eval_duel.core.noise import NoiseTraining, Uniform, as_plugin, masked_tokens
from lm_eval_duel.denoisers import self_tests
from lm_eval_duel.denoisers.checkpoint import Checkpoint
from lm_eval_duel.denoisers.hf.families import Family
from lm_eval_duel.denoisers.hf.own_forward import CAUSAL_LM, CausalLM
from lm_eval_duel.denoisers.hf.pretrained import Pretrained, cache_name
from lm_eval_duel.denoisers.vocabulary import require_fit
from lm_eval_duel.errors import DuelError

CLASS = "DiffusionGemmaForBlockDiffusion"
NAME = "diffusion-gemma"
CANVAS = Family(NAME, "", bos="given")
ENCODER = dataclasses.replace(CAUSAL_LM, name=NAME)
STEPS = 48  # of its generation config
SIGNAL_ROWS = 64  # positions whose distributions over all tokens are in memory at once
REFUSED = ("shift_logits", "mask_token_id", "sigma", "first_token", "backend", "peft", "compile")
IMAGE_IDS = ("image_token_id", "boi_token_id", "eoi_token_id")
TRUNCATED = "with self-conditioning it reads the distributions of the step before, and its samplers truncate none"
REFUSED_BY_DECODER = {  # and the reason
    "cache": "each step shows other noise, so every key of a canvas changes",
    "cfg_scale": "guidance masks the context, and this network has no [MASK]",
    "exclude_ids": "its noise is drawn from its whole vocabulary",
    "top_k": TRUNCATED,
    "top_p": TRUNCATED,
    "temperature": "its samplers change it by step, see temperatures= of estimator=duel",
}


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
        as_encoder = dataclasses.replace(checkpoint, family=ENCODER)
        denoiser = Encoder(as_encoder, text.vocab_size)
    else:
        for name, why in REFUSED_BY_DECODER.items():
            options.refuse(NAME, name, why=why)
        denoiser = Canvases(model_config, checkpoint)
    image_ids = {getattr(model_config, name) for name in IMAGE_IDS}
    denoiser.image_ids = frozenset(image_ids - {None})
    positions = text.max_position_embeddings
    if options.attention == "causal":
        positions += 1  # a row's last token is predicted by the encoder, but never its input
    denoiser.set_row_length(positions)
    denoiser.kind = kind
    denoiser.model_config = model_config
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

    def features(
        self,
        ids: torch.Tensor,
        real: torch.Tensor | None,
    ) -> torch.Tensor:
        return self.layers(input_ids=ids).last_hidden_state.to(self.device)  # (R, L, D)

    def head(self, features: torch.Tensor) -> torch.Tensor:
        return capped(self.model, features).to(self.device)

    def describe(self) -> dict[str, object]:
        return {**super().describe(), "part": "encoder"}


class Canvases(Pretrained):
    """The decoder on canvases of noisy tokens: p(x_0 | x_t) given its own earlier output, but not the time."""

    reads_causally = True
    honours_padding = True  # canvases after other clean tokens are other calls, so there is no padding

    def __init__(self, model_config: Any, checkpoint: Checkpoint):
        without_tokenizer = dataclasses.replace(checkpoint, family=CANVAS, tokenizer=None)
        super().__init__(without_tokenizer, None)
        options = checkpoint.options
        tokenizer = checkpoint.tokenizer
        columns = model_config.text_config.vocab_size
        if tokenizer is not None:
            tokens = set(tokenizer.get_vocab().values())
            require_fit(tokens, None, columns, self.path)
        self.vocab_size = columns
        self.tokens = set(range(columns))  # noise is over all columns
        self.block = options.block if isinstance(options.block, int) else model_config.canvas_length
        self.noise_training = NoiseTraining(Uniform(columns), "denoiser", STEPS, "twice", timed=False)

    def open(self, rows: Rows, generating: bool = False) -> View:
        return CommitOnceView(self, rows)

    def open_noised(self, rows: Rows) -> NoiseView:
        return CanvasView(self, rows)

    def take(self, model: Any) -> None:
        super().take(model)
        self.cache_name = cache_name(model.model.decoder)
        self.set_columns(self.vocab_size)
        with torch.no_grad():
            self._require_separate_canvases()

    def head(self, features: torch.Tensor) -> torch.Tensor:
        """Logits (U, V) of features (U, D), or of features with three more columns, (U, D + 3).

        These are a token, a shift and a temperature: the shift is added to the logit of the token, and then all logits
        are divided by the temperature.
        """
        width = self.model_config.text_config.hidden_size
        appended = features[:, width:]
        features = features[:, :width].to(self.dtype)
        logits = capped(self.model, features).to(self.device)
        if not appended.shape[1]:
            return logits
        token, shift, temperature = appended.unbind(1)  # (U,) each
        shift = shift[:, None].to(logits.dtype)  # (U, 1)
        temperature = temperature[:, None].to(logits.dtype)  # (U, 1)
        logits = logits.scatter_add(1, token.long()[:, None], shift)
        return logits / temperature

    def describe(self) -> dict[str, object]:
        return {**super().describe(), "part": "decoder"}

    def encode(self, ids: torch.Tensor, past: Any = None) -> Any:
        """The keys and values of `past` and of clean ids (1, L) after it; `past` is extended in place."""
        encoder = self.model.model.encoder
        kept = {self.cache_name: past}
        return encoder(input_ids=ids, **kept).past_key_values

    def decode(
        self,
        canvases: torch.Tensor,
        past: Any,
        own_output: torch.Tensor | None,
        signal: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """The input of the LM head (R, W, D) of canvases (R, W) after clean tokens of one row, whose keys are `past`.

        `own_output`: the logits (R, W, V) of an earlier pass. `signal`: in their place, the embeddings (R, W, D) that
        they stand for.
        """
        repeated = extended(past)  # the keys of one row, for every canvas after it
        repeated.batch_repeat_interleave(len(canvases))
        decoder = self.model.model.decoder
        with contextlib.ExitStack() as hooks:
            if signal is not None:  # the class would take whole logits, which are V / D times as large

                def replace(module: Any, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
                    return inputs[0], signal.to(inputs[1])

                hooks.callback(decoder.self_conditioning.register_forward_pre_hook(replace).remove)
            kept = {self.cache_name: repeated}
            out = decoder(decoder_input_ids=canvases, self_conditioning_logits=own_output, **kept)
        features: torch.Tensor = out.last_hidden_state.to(self.device)
        return features

    def signal(self, features: torch.Tensor, temperature: torch.Tensor) -> torch.Tensor:
        """The mean embeddings (R, W, D) of the tokens that the head predicts from features (R, W, D) of a pass.

        `temperature`: of each lane, float64 (R,). The logits are made for a few positions at a time; the class would
        make all of them at once.
        """
        embed = self.model.model.decoder.embed_tokens
        table = embed.weight  # (V, D)
        scale = embed.embed_scale.to(table)
        chunks = features.flatten(0, 1).split(SIGNAL_ROWS)  # (c, D) each
        of_positions = temperature.repeat_interleave(features.shape[1])  # (R W,)
        means = []
        for chunk, divisor in zip(chunks, of_positions.split(SIGNAL_ROWS), strict=True):
            logits = self.head(chunk)  # (c, V)
            logits = logits / divisor[:, None].to(logits.dtype)
            # as in the class: probabilities in float32, and the product in the dtype of the table
            share = logits.softmax(1, dtype=torch.float32).to(table)  # (c, V)
            mean = share @ table * scale  # (c, D)
            means.append(mean.to(self.device))
        return torch.cat(means).view_as(features)

    def _require_separate_canvases(self) -> None:
        """Raise DuelError if canvases of one call influence each other, or logits are not finite."""
        width = min(self.block or 1, self_tests.LENGTH)
        rows = random_rows(self, width + 1)  # (2, W + 1)
        past = self.encode(rows[:1, :1])
        canvases = rows[:, 1:]  # (2, W)
        in_company = self.head(self.decode(canvases, past, None)[0])  # (W, V)
        alone = self.head(self.decode(canvases[:1], past, None)[0])  # (W, V)
        self_tests.require_finite(in_company, self.path)
        difference = self_tests.difference_of(in_company, alone)
        if not difference <= self_tests.noise_in_company(self, in_company):
            raise DuelError(f"Canvases in one call of {self.path} influence each other.")


class CanvasView(NoiseView):
    """The decoder opened on a group of rows; the keys of each row's clean tokens are computed once, in its order."""

    denoiser: Canvases

    def __init__(self, denoiser: Canvases, rows: Rows):
        super().__init__(denoiser, rows)
        self._forget()

    def _forget(self, row: int = -1) -> None:
        """Keep no keys; those of `row` come next."""
        self._row = row  # whose keys are kept
        self._end = 0  # how many of its clean tokens they are
        self._past: Any = None

    def cost(self, lanes: Lanes) -> torch.Tensor:
        return lanes.start + lanes.width

    def features(
        self,
        lanes: Lanes,
        noisy: torch.Tensor,
        t: torch.Tensor,
        own_output: torch.Tensor | None = None,
    ) -> torch.Tensor:
        result = None
        canvases = torch.stack([lanes.row, lanes.start], 1).unique(dim=0)  # (n, 2) in order
        for row, start in canvases.tolist():
            of_canvas = (lanes.row == row) & (lanes.start == start)  # (R,)
            at = of_canvas.nonzero()[:, 0]  # (r,)
            width = int(lanes.width[at[0]])
            output_of_canvas = None if own_output is None else own_output[at, :width]
            past = self._clean(row, start)
            part = self.denoiser.decode(noisy[at, :width], past, output_of_canvas)  # (r, W, D)
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
            self._forget(row)
        if end > self._end:
            ids = self.rows.ids[row : row + 1, self._end : end]  # (1, n)
            past = self._past
            self._forget()  # an encode that fails leaves `past` partly extended
            past = self.denoiser.encode(ids, past)
            self._row = row
            self._end = end
            self._past = past
            self.forwards += 1
        return self._past


class CommitOnceView(View):
    """The decoder opened on a group of rows, for commit-once samplers.

    A position shows noise until its token is revealed. With self-conditioning a canvas reads its own output of the step
    before, which the lane carries as features of all of its positions (R, W, D). Canvases after equal clean tokens, of
    other windows or seeds, are one call; those tokens are encoded once, and kept while they have a lane.
    """

    denoiser: Canvases

    def __init__(self, denoiser: Canvases, rows: Rows):
        super().__init__(denoiser, rows)
        self.sampler = denoiser.commit_once
        self._prefixes: dict[tuple[int, ...], Any] = {}  # keys and values, by the clean tokens
        self._clean: dict[tuple[int, int], tuple[int, ...]] = {}  # the clean tokens before a column of a row

    @property
    def carries(self) -> int:  # type: ignore[override]
        if not self.sampler.self_conditioning:
            return 0
        return int(self.denoiser.model_config.text_config.hidden_size)

    def cost(self, lanes: Lanes) -> torch.Tensor:
        return lanes.start + lanes.width

    def positions(self, lanes: Lanes) -> Positions:
        columns = lanes.columns  # (R, W)
        place = torch.arange(columns.shape[1], device=columns.device)  # (W,)
        inside = place < lanes.width[:, None]  # (R, W)
        shows_noise = inside & (lanes.tokens < 0)  # (R, W)
        share = shows_noise.sum(1).double() / lanes.width  # (R,)
        noise = self.denoiser.noise_training.noise  # type: ignore[union-attr]
        keys = self.noise_keys(lanes, columns)
        noisy = masked_tokens(noise, self._tokens, None, share, keys)  # (R, W)
        canvases = torch.where(shows_noise, noisy, lanes.tokens.clamp(min=0))  # (R, W)
        every = self._decoded(lanes, canvases, self._signal(lanes))  # (R, W, D)
        carried = (every,) if self.sampler.self_conditioning else ()

        lane, position = lanes.masked_at  # (C,) each
        features = every[lane, position]  # (C, D)
        temperature = self.sampler.temperature(lanes.step)[lane]  # (C,)
        shift = torch.zeros_like(temperature)  # (C,) of the logit of the position's own noise token
        if self.sampler.leave_one_out:
            t = share[:, None]  # (R, 1)
            level = noise.level(t, 1 - t)
            no_mask = torch.zeros_like(t, dtype=torch.bool)
            shift = as_plugin(level, no_mask)[lane, 0]
        if self.sampler.leave_one_out or self.sampler.temperatures is not None:
            # Rules and scores call the head with features alone, so what it needs besides them is appended.
            shown = canvases[lane, position].double()  # (C,)
            appended = torch.stack([shown, shift, temperature], 1)  # (C, 3)
            features = torch.cat([features.double(), appended], 1)  # (C, D + 3)
        each = torch.arange(len(features), device=features.device)  # (C,)
        no_ties = torch.zeros_like(lanes.row, dtype=torch.bool)  # (R,) the clean tokens differ from the canvas
        return Positions(features, each, no_ties, carried)

    def _signal(self, lanes: Lanes) -> torch.Tensor | None:
        """The embeddings of the step before, (R, W, D), zeros for a lane at its first step; None if all lanes are."""
        later = lanes.step > 0  # (R,)
        if not lanes.carried or not later.any():
            return None
        before = lanes.carried[0]  # (R, W, D)
        temperature = self.sampler.temperature(lanes.step[later] - 1)  # (r,) of the step before
        signal = torch.zeros_like(before)
        signal[later] = self.denoiser.signal(before[later], temperature)
        return signal

    def _decoded(
        self,
        lanes: Lanes,
        canvases: torch.Tensor,
        signal: torch.Tensor | None,
    ) -> torch.Tensor:
        """The input of the LM head at all positions of canvases (R, W), (R, W, D)."""
        together: dict[tuple[tuple[int, ...], int], list[int]] = {}
        canvas_of_lane = torch.stack([lanes.row, lanes.start, lanes.width], 1)  # (R, 3)
        for lane, (row, start, width) in enumerate(canvas_of_lane.tolist()):
            clean = self._before(row, start)
            together.setdefault((clean, width), []).append(lane)
        used = {clean for clean, _ in together}
        for clean in self._prefixes.keys() - used:
            del self._prefixes[clean]

        result = None
        for (clean, width), at in together.items():
            shown = canvases[at, :width]  # (r, W)
            past = self._past(clean)
            if signal is None:  # first steps, which are equal for lanes with one noise
                first, number = distinct(shown)
                part = self.denoiser.decode(shown[first], past, None)
                self.evaluated += len(first)
                part = part[number]  # (r, W, D)
            else:  # later states are hardly ever equal
                part = self.denoiser.decode(shown, past, None, signal[at, :width])  # (r, W, D)
                self.evaluated += len(part)
            self.forwards += 1
            if result is None:
                result = part.new_zeros(*canvases.shape, part.shape[2])  # (R, W, D)
            result[at, :width] = part
        assert result is not None
        return result

    def _before(self, row: int, start: int) -> tuple[int, ...]:
        """The clean tokens before a canvas, which are final when it begins."""
        if (row, start) not in self._clean:
            self._clean[row, start] = tuple(self.rows.ids[row, :start].tolist())
        return self._clean[row, start]

    def _past(self, clean: tuple[int, ...]) -> Any:
        """The keys and values of clean tokens: those of the longest beginning that is kept, extended."""
        if clean not in self._prefixes:
            beginnings = [kept for kept in self._prefixes if clean[: len(kept)] == kept]
            longest = max(beginnings, key=len, default=())
            past = extended(self._prefixes[longest]) if longest else None
            rest = clean[len(longest) :]
            ids = torch.tensor([rest], device=self.rows.ids.device)  # (1, n)
            self._prefixes[clean] = self.denoiser.encode(ids, past)
            self.forwards += 1
        return self._prefixes[clean]


def extended(past: Any) -> Any:
    """A copy of a cache that can be extended or repeated: its tensors are shared, and not changed in place."""
    twin = copy.copy(past)
    twin.layers = [copy.copy(layer) for layer in past.layers]
    return twin


def capped(model: Any, features: torch.Tensor) -> torch.Tensor:
    """Logits (U, V) of features (U, D): the head and its soft cap, in float32 or better."""
    logits = model.lm_head(features)
    if logits.dtype.itemsize < 4:
        logits = logits.float()
    cap = model.final_logit_softcapping
    capped_logits: torch.Tensor = (logits / cap).tanh() * cap
    return capped_logits
