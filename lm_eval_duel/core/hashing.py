"""Random numbers as a pure function of their keys: the same on every device, batch size and rank.

The mixer is SplitMix64 (Steele, Lea and Flood 2014), in wrapping 64-bit integers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


WORD = 2**64


def _signed(value: int) -> int:
    """A 64-bit pattern as a signed integer of torch."""
    return (value + 2**63) % WORD - 2**63


INCREMENT = 0x9E3779B97F4A7C15
FACTORS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
SIGNED_INCREMENT = _signed(INCREMENT)
SIGNED_FACTORS = (_signed(FACTORS[0]), _signed(FACTORS[1]))


def _shift_right(x: torch.Tensor, bits: int) -> torch.Tensor:
    return (x >> bits) & ((1 << (64 - bits)) - 1)  # torch fills with the sign bit


def _mix(x: torch.Tensor) -> torch.Tensor:
    x = x + SIGNED_INCREMENT
    x = (x ^ _shift_right(x, 30)) * SIGNED_FACTORS[0]
    x = (x ^ _shift_right(x, 27)) * SIGNED_FACTORS[1]
    return x ^ _shift_right(x, 31)


def _mix_number(x: int) -> int:
    """`_mix` of one number: a 64-bit pattern, >= 0."""
    x = (x + INCREMENT) % WORD
    x = (x ^ (x >> 30)) * FACTORS[0] % WORD
    x = (x ^ (x >> 27)) * FACTORS[1] % WORD
    return x ^ (x >> 31)


def hashed(*keys: torch.Tensor | int) -> torch.Tensor:
    """A 63-bit hash of integer keys, int64 >= 0. At least one key is a tensor; they are broadcast."""
    import torch

    state: torch.Tensor | int = 0
    for key in keys:
        # numbers are mixed as numbers: on tensors of a few elements, calls of torch are what costs time
        if isinstance(key, torch.Tensor):
            mixed = _mix(key.to(torch.int64))
            before = state if isinstance(state, torch.Tensor) else _signed(state)
            state = _mix(mixed ^ before)
        elif isinstance(state, torch.Tensor):
            state = _mix(state ^ _signed(_mix_number(key % WORD)))
        else:
            state = _mix_number(state ^ _mix_number(key % WORD))
    assert isinstance(state, torch.Tensor), "numbers alone say nothing about the device"
    return _shift_right(state, 1)


def uniform(*keys: torch.Tensor | int) -> torch.Tensor:
    """A uniform float64 in [0, 1) from integer keys, as in `hashed`."""
    import torch

    bits = _shift_right(hashed(*keys), 10)  # 53 of the 63, as many as a float64 holds exactly
    return bits.to(torch.float64) * 2.0**-53
