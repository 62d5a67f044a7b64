"""Same input, same output: which evaluations are repeated, and by how much float noise may change them.

Four places ask whether an answer depends on its own input alone, each of something else:

    self-tests, at load     the logits of a few rows           denoisers/self_tests.py
    row checks, in a run    the statistics of a lane           core/row_checks.py
    checked rules           the picks and memory of a lane     rules/checked.py
    verify and audit        the log-probability of a window    audit/

They share what is here: how inputs are chosen, how differences are measured, and how large they may be. No torch is
imported before a network is there.

Shapes: S rows of values, X values in a row, V tokens.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from lm_eval_duel.core.hashing import hashed

if TYPE_CHECKING:
    import torch

    from lm_eval_duel.core.network import Network

# How far an answer may move when other rows are in the call, in units of its size.
# In float32. Mixtures of experts and 8-bit scales round differently; most networks move by 1e-6 to 1e-5.
FLOAT32 = 1e-3
COARSE = 0.05  # in half precision
ROUTED = 0.5  # with quantized weights, and with experts, of which noise may choose others
# Below this the noise need not be measured. In float32, between one row and many, ordinary networks move by 1e-6 to
# 4e-6, a few by 1e-5.
FLOOR = 2e-5
# How far the log-probability of a window may move in float32, in nats: the larger of the two.
PER_WINDOW = 1e-4
PER_TOKEN = 1e-6

# of a difference that is not float noise
CAUSES = "a capacity of experts, statistics of the batch or a counter"


# ---------------------------------------------------------------- what is evaluated again


def choose_by_hash(number: int, *keys: torch.Tensor | int) -> torch.Tensor:
    """The indices of `number` entries, chosen by a hash of their keys: the same in every run and on every device."""
    return hashed(*keys).argsort()[:number]


def random_rows(network: Network, length: int, rows: int = 2, seed: int = 1) -> torch.Tensor:
    """Rows of random tokens (rows, length), or as long as the network allows; the same for the same seed."""
    import torch

    tokens = (~network.excluded).nonzero()[:, 0].cpu()  # (T,)
    shape = (rows, min(length, network.max_length))
    generator = torch.Generator().manual_seed(seed)
    indices = torch.randint(len(tokens), shape, generator=generator)  # (R, L)
    return tokens[indices].to(network.device)


# ---------------------------------------------------------------- how differences are measured


def difference(one: torch.Tensor, other: torch.Tensor, size: torch.Tensor | float) -> float:
    """The largest difference of two tensors of one shape, in units of `size`, which is broadcast.

    Equal infinities are no difference, nor is NaN in both; a number in place of either differs infinitely.
    """
    if not one.numel():
        return 0.0
    one = one.double()
    other = other.double()
    same = equal_or_nan(one, other)
    change = (one - other).abs().nan_to_num(nan=math.inf, posinf=math.inf)
    change = change.masked_fill(same, 0.0) / size
    return float(change.max())


def equal_or_nan(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """True where two tensors of one shape are equal, or both NaN."""
    return (one == other) | (one.isnan() & other.isnan())


def magnitude(values: torch.Tensor, least: float = 1.0) -> torch.Tensor:
    """The size of each row of `values` (S, X): its largest finite value, or `least` if that is larger, (S, 1)."""
    finite = values.double().nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
    return finite.abs().amax(1, keepdim=True).clamp(min=least)


def spread(logits: torch.Tensor) -> torch.Tensor:
    """The size of logits (..., V): their standard deviation, since a constant added to all of them changes nothing."""
    return logits.double().std().clamp(min=1e-12)


def differ(difference: float, limit: float) -> str:
    """The end of a sentence about values that differ by more than float noise may."""
    return f"differ by {difference:.2g} of their size; float noise is below {limit:.2g}"


# ---------------------------------------------------------------- how large they may be


def tolerance(network: Network, few_rows: bool = False) -> float:
    """The largest difference that is float noise of this network.

    `few_rows`: of a call so small that noise chooses no other experts.
    """
    if network.quantized or (is_routed(network) and not few_rows):
        return ROUTED
    return COARSE if is_coarse(network) else FLOAT32


def nats_tolerance(tokens: int) -> float:
    """The largest difference of two float32 scores of a window of `tokens` that is float noise, in nats."""
    return max(PER_WINDOW, PER_TOKEN * tokens)


def is_coarse(network: Network) -> bool:
    """True if a network's numbers are coarser than float32: by quantization, its dtype, or its products (TF32)."""
    import torch

    return network.quantized or network.coarse or torch.get_float32_matmul_precision() != "highest"


def is_routed(network: Network) -> bool:
    """True if a network has experts and a position uses some of them."""
    import torch

    from lm_eval_duel.core.network import Network

    for value in vars(network).values():
        if isinstance(value, Network) and is_routed(value):  # the network inside a wrapper
            return True
        if isinstance(value, torch.nn.Module):
            for name, _ in value.named_modules():
                if "expert" in name:
                    return True
    return False
