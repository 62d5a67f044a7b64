"""Random numbers as a pure function of their keys: the same on every device, batch size and rank.

The mixer is SplitMix64 (Steele, Lea and Flood 2014), in wrapping 64-bit integers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def _signed(value: int) -> int:
    """A 64-bit pattern as a signed integer of torch."""
    return (value + 2**63) % 2**64 - 2**63


def _shift_right(x: torch.Tensor, bits: int) -> torch.Tensor:
    return (x >> bits) & ((1 << (64 - bits)) - 1)  # torch fills with the sign bit


def _mix(x: torch.Tensor) -> torch.Tensor:
    x = x + _signed(0x9E3779B97F4A7C15)
    x = (x ^ _shift_right(x, 30)) * _signed(0xBF58476D1CE4E5B9)
    x = (x ^ _shift_right(x, 27)) * _signed(0x94D049BB133111EB)
    return x ^ _shift_right(x, 31)


def hashed(*keys: torch.Tensor | int) -> torch.Tensor:
    """A 63-bit hash of integer keys, int64 >= 0. At least one key is a tensor; they are broadcast."""
    import torch

    tensors = [key for key in keys if isinstance(key, torch.Tensor)]
    state = torch.zeros((), dtype=torch.int64, device=tensors[0].device)
    for key in keys:
        key = key.to(torch.int64) if isinstance(key, torch.Tensor) else _signed(key)
        state = _mix(state ^ _mix(key + torch.zeros_like(state)))
    return _shift_right(state, 1)


def uniform(*keys: torch.Tensor | int) -> torch.Tensor:
    """A uniform float64 in [0, 1) from integer keys, as in `hashed`."""
    import torch

    bits = _shift_right(hashed(*keys), 10)  # 53 of the 63, as many as a float64 holds exactly
    return bits.to(torch.float64) * 2.0**-53
