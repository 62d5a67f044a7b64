"""A small float64 network that attends, whose distributions can be enumerated; and the plain reference of a cache.

The reference: before every layer, the hidden states of frozen positions are replaced by those that they had when the
block began (dual: all but the block's positions; prefix: those before the block). No keys are kept.
"""

import contextlib
import math
from functools import cached_property

import torch
from torch import nn

from lm_eval_duel.core.denoiser import Denoiser
from lm_eval_duel.core.lanes import blocks
from lm_eval_duel.core.network import joined


class Layer(nn.Module):
    """Attention of two heads and a map, both added."""

    def __init__(self, width, generator):
        super().__init__()

        def weight(*shape):
            return nn.Parameter(torch.randn(shape, generator=generator, dtype=torch.float64) / math.sqrt(width))

        self.qkv = weight(width, 3 * width)
        self.out = weight(width, width)
        self.map = weight(width, width)

    def forward(self, x, seen, past):
        of_heads = (3 * x @ self.qkv).unflatten(2, (3, 2, -1))  # (R, L, 3, heads, d)
        q, k, v = of_heads.transpose(1, 3).unbind(2)  # (R, heads, L, d) each
        own = k, v
        k, v = joined(past, k, v)
        mask = None if seen is None else seen[:, None]
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        x = x + mixed.transpose(1, 2).flatten(2) @ self.out
        return x + torch.tanh(x @ self.map), own


class Attends(Denoiser):
    """A bidirectional toy with `stream`: absolute positions, padding honoured."""

    honours_padding = True

    def __init__(self, tokens=3, length=8, seed=0, layers=2, width=8, shift=0):
        self.vocab_size = tokens + 1
        self.mask_id = tokens
        self.max_length = length
        self.tokens = tokens
        self.shift = shift
        self.device = torch.device("cpu")
        generator = torch.Generator().manual_seed(seed)
        self.embed = torch.randn(self.vocab_size, width, generator=generator, dtype=torch.float64)
        self.place = torch.randn(length, width, generator=generator, dtype=torch.float64)
        self.network = nn.ModuleList(Layer(width, generator) for _ in range(layers))
        self.out = 0.2 * torch.randn(width, self.vocab_size, generator=generator, dtype=torch.float64)

    @cached_property
    def excluded(self):
        return torch.arange(self.vocab_size) >= self.tokens

    def stream(self, ids, positions, seen, past):
        x = self.embed[ids] + self.place[positions]
        own = []
        for n, layer in enumerate(self.network):
            x, kept = layer(x, seen, past and past[n])
            own.append(kept)
        return x, own

    def features(self, ids, real):
        seen = None if real is None else real[:, None]
        return self.stream(ids, torch.arange(ids.shape[1])[None], seen, None)[0]

    def head(self, features):
        return features @ self.out


@contextlib.contextmanager
def frozen_states(layers, states, frozen):
    """While inside, what goes into layer n (1, L, D) is `states[n]` at the positions `frozen` (L,); with None:
    noted.
    """

    def hook(n):
        def before(module, args, kwargs):
            x = args[0] if args else kwargs["hidden_states"]
            if frozen is None:
                states.append(x.clone())
                return None
            x = torch.where(frozen[:, None], states[n], x)
            return ((x, *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": x})

        return before

    hooks = [layer.register_forward_pre_hook(hook(n), with_kwargs=True) for n, layer in enumerate(layers)]
    try:
        yield
    finally:
        for registered in hooks:
            registered.remove()


def reference(denoiser, layers, cache, window, block, grid="target"):
    """`logits_of` for textbook.score: the logits (L, V) of a row of this window under a cache."""
    origin = len(window.context)
    spans = []  # of the blocks, without the context
    for start, width in blocks(origin, len(window.target), block, grid):
        spans.append((start, max(start, origin), start + width))
    mask = denoiser.mask_id

    @torch.inference_mode()
    def logits_of(ids):
        start, first, end = next(span for span in spans if (ids[span[1] : span[2]] == mask).any())
        column = torch.arange(len(ids))
        frozen = column < start if cache == "prefix" else (column < start) | (column >= end)
        at_the_start = ids.clone()
        at_the_start[first:end] = mask
        states = []
        with frozen_states(layers, states, None):
            logits = denoiser.head(denoiser.features(at_the_start[None], None)[0])
        if not torch.equal(ids, at_the_start):
            with frozen_states(layers, states, frozen):
                logits = denoiser.head(denoiser.features(ids[None], None)[0])
        if denoiser.shift:
            logits = torch.cat([logits[:1], logits[:-1]])
        return logits

    return logits_of
