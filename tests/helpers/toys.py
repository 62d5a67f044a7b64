"""Toy denoisers in float64 whose distributions can be enumerated."""

import itertools
import math
from functools import cached_property

import torch

from lm_eval_duel.core.denoiser import Denoiser


class Toy(Denoiser):
    """A random smooth function of the whole row: position, tokens and masks all matter; padding is honoured."""

    codes = None  # (K, V): the only logits there are, so that positions tie; a position's features say which

    def __init__(self, tokens=3, length=8, seed=0, honours_padding=True, scale=2.0, unused=0):
        self.vocab_size = tokens + 1 + unused
        self.mask_id = tokens
        self.max_length = length
        self.tokens = tokens
        self.honours_padding = honours_padding
        generator = torch.Generator().manual_seed(seed)
        self.embed = torch.randn(length, self.vocab_size, 6, generator=generator, dtype=torch.float64)
        self.mix = torch.randn(length, length, 6, 6, generator=generator, dtype=torch.float64)
        self.out = torch.randn(length, 6, self.vocab_size, generator=generator, dtype=torch.float64) * scale

    @cached_property
    def excluded(self):
        return torch.arange(self.vocab_size) >= self.tokens

    def features(self, ids, real):
        length = ids.shape[1]
        x = self.embed[torch.arange(length), ids]  # (R, L, 6)
        if real is not None and self.honours_padding:
            x = x * real[..., None]
        # x_ie = tanh(sum over j, d of x_jd mix_ijde): a product of matrices, which is faster than einsum here
        mix = self.mix[:length, :length].permute(1, 2, 0, 3).reshape(6 * length, 6 * length)
        x = torch.tanh(x.flatten(1) @ mix).unflatten(1, (length, 6))  # (R, L, 6)
        return (x[:, :, None] @ self.out[:length])[:, :, 0]  # (R, L, V)

    def head(self, features):
        return features if self.codes is None else self.codes[features[:, : len(self.codes)].argmax(1)]


class Leaky(Toy):
    """A denoiser that leaves probability on [MASK]: past Predictions its distributions do not sum to 1."""

    @property
    def excluded(self):
        return torch.zeros(self.vocab_size, dtype=torch.bool)


class Rotary(Toy):
    """Relative positions only, in float32: all positions of a row of masks tie but for planted noise."""

    relative_positions = True
    noise = 1e-9

    def features(self, ids, real):
        shown = (ids != self.mask_id) if real is None else (ids != self.mask_id) & real
        length = ids.shape[1]
        offset = torch.arange(length)[None, :] - torch.arange(length)[:, None]  # (L, L) j - i
        kernel = torch.cos(offset.double() * 0.7 + 0.3)  # (L, L)
        x = (self.embed[0, ids] * shown[..., None]).transpose(1, 2)  # (R, 6, L)
        x = torch.tanh((x @ kernel.T).transpose(1, 2) + 0.5)  # (R, L, 6)
        noise = self.noise * torch.cos(37.0 * torch.arange(len(ids) * length)).reshape(len(ids), length, 1)
        return x @ self.out[0] + noise * torch.arange(self.vocab_size)  # (R, L, V)


class Joint(Denoiser):
    """The exact conditionals of one positive joint distribution over V^L strings: the four members that are needed."""

    def __init__(self, tokens=3, length=4, seed=0):
        self.vocab_size = tokens + 1
        self.mask_id = tokens
        self.max_length = length
        generator = torch.Generator().manual_seed(seed)
        self.strings = torch.tensor(list(itertools.product(range(tokens), repeat=length)))
        self.joint = torch.randn(len(self.strings), generator=generator, dtype=torch.float64).softmax(0)

    def features(self, ids, real):
        logits = torch.full((*ids.shape, self.vocab_size), -math.inf, dtype=torch.float64)
        for r, row in enumerate(ids):
            agrees = ((self.strings == row) | (row == self.mask_id)).all(1)
            for i in range(len(row)):
                for v in range(self.vocab_size - 1):
                    logits[r, i, v] = self.joint[agrees & (self.strings[:, i] == v)].sum().log()
        return logits


class Causal(Toy):
    """A causal toy: the logits at a position depend on the tokens before it only."""

    attention = "causal"

    def __init__(self, **options):
        super().__init__(**options)
        self.mask_id = None
        self.mix = self.mix * torch.ones(len(self.mix), len(self.mix)).tril(-1)[..., None, None]


class Small(Toy):
    """A device whose memory holds `most` rows."""

    def __init__(self, most, **options):
        super().__init__(**options)
        self.most = most

    def features(self, ids, real):
        if len(ids) > self.most:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return super().features(ids, real)


class BlockCausal(Toy):
    """A block-causal toy: a position sees the blocks before its own and its own. Its keys are ids, its values
    positions.
    """

    attention = "block_causal"

    def __init__(self, block=2, **options):
        super().__init__(**options)
        self.block = block

    def stream(self, ids, positions, seen, past):
        new_keys = ids[:, None, :, None]  # (N, 1, Q, 1), as layers keep them: heads and widths of one
        new_values = positions[:, None, :, None]
        keys, values = new_keys, new_values
        if past:
            [(past_keys, past_values)] = past
            keys = torch.cat([past_keys, new_keys], 2)
            values = torch.cat([past_values, new_values], 2)
        tokens = keys[:, 0, :, 0]  # (N, K)
        places = values[:, 0, :, 0]  # (N, K)

        x = self.embed[places % len(self.embed), tokens]  # (N, K, 6)
        query = positions % len(self.mix)  # (N, Q)
        mix = self.mix[query[:, :, None], (places % len(self.mix))[:, None, :]]  # (N, Q, K, 6, 6)
        x = torch.tanh(torch.einsum("nkd,nqkde,nqk->nqe", x, mix, seen.to(x.dtype)))  # (N, Q, 6)
        logits = torch.einsum("nqd,nqdv->nqv", x, self.out[positions % len(self.out)])  # (N, Q, V)
        return logits, [(new_keys, new_values)]

    def features(self, ids, real):
        """A whole row at once, for the textbook loop."""
        position = torch.arange(ids.shape[1])
        seen = position[:, None] // self.block >= position // self.block
        return self.stream(ids, position[None].expand_as(ids), seen.expand(len(ids), -1, -1), None)[0]


class CausalPrefix(BlockCausal):
    """A toy whose clean positions see those before them, and whose block sees itself and all clean positions before
    it.
    """

    attention = "causal_prefix"

    def __init__(self, first_token="causal", **options):
        super().__init__(**options)
        self.seeds_blocks = first_token == "causal"

    def logits(self, row, begin):
        """Logits (L, V) of one row of ids whose block in progress begins at column `begin`, for the textbook loop."""
        position = torch.arange(len(row))
        seen = (position[:, None] >= position) | (position[:, None] >= begin)
        logits = self.stream(torch.tensor([row]), position[None], seen[None], None)[0][0]  # (L, V)
        if self.seeds_blocks:
            logits[begin] = logits[begin - 1]
        return logits


class RotaryBlocks(BlockCausal):
    """A block-causal toy in which a row of masks has one distribution everywhere, but for planted noise."""

    relative_positions = True
    noise = 1e-9

    def __init__(self, **options):
        super().__init__(**options)
        self.embed[:, self.mask_id] = 0

    def stream(self, ids, positions, seen, past):
        logits, kept = super().stream(ids, positions, seen, past)  # (N, Q, V)
        noise = self.noise * torch.cos(37.0 * torch.arange(ids.numel())).reshape(*ids.shape, 1)
        return logits + self.out[0, 0] + noise * torch.arange(self.vocab_size), kept
