"""Memory and time of the gradient of log p(x), as the target grows: `duel.differentiable` and plain autograd.

python benchmarks/gradients.py [tokens ...]

Memory is the most that autograd keeps for the backward pass at any time. The network is bidirectional and reveals one
token at a step: T network calls. By plain autograd, every call's graph lives until the backward pass.
"""

import sys
import time
from collections.abc import Callable

import torch
from torch.autograd.graph import saved_tensors_hooks

from lm_eval_duel import Duel, Window, load


class Kept:
    """A tensor that autograd keeps. `live` and `peak` count the bytes of all of them."""

    live = peak = 0

    def __init__(self, tensor: torch.Tensor):
        self.tensor = tensor
        Kept.live += tensor.nbytes
        Kept.peak = max(Kept.peak, Kept.live)

    def __del__(self) -> None:
        Kept.live -= self.tensor.nbytes


def plain(duel: Duel, window: Window, order: tuple[int, ...]) -> torch.Tensor:
    """log p along the order, as one sum with one graph."""
    network = duel.denoiser
    ids = torch.tensor([window.target])  # (1, T)
    total = 0.0
    steps = torch.tensor([order])  # (1, T)
    for step in range(max(order) + 1):
        features = network.features(ids.masked_fill(steps >= step, network.mask_id), None)[steps == step]  # (P, D)
        logits = network.head(features).masked_fill(network.excluded, -torch.inf)  # (P, V)
        total = total + logits.log_softmax(1).gather(1, ids[steps == step][:, None]).sum()
    return total


def replayed(duel: Duel, window: Window, order: tuple[int, ...]) -> torch.Tensor:
    return duel.differentiable([window], [order]).sum()


def measure(way: Callable[..., torch.Tensor], duel: Duel, tokens: int) -> tuple[float, float]:
    """(MiB, seconds) of one gradient."""
    window = Window((), tuple(100 + n % 300 for n in range(tokens)))
    order = tuple(range(tokens))
    Kept.live = Kept.peak = 0
    start = time.process_time()
    with saved_tensors_hooks(Kept, lambda kept: kept.tensor):
        way(duel, window, order).backward()
    return Kept.peak / 2**20, time.process_time() - start


if __name__ == "__main__":
    denoiser = load("demo-mdm", device="cpu")
    denoiser.layers.requires_grad_(True)
    duel = Duel(denoiser, rule="left_to_right", block=None)
    print("| tokens | plain autograd, MiB | `differentiable`, MiB | plain autograd, s | `differentiable`, s |")
    print("|---|---|---|---|---|")
    for tokens in map(int, sys.argv[1:] or [16, 32, 64, 128]):
        memory, seconds = zip(*(measure(way, duel, tokens) for way in (plain, replayed)), strict=True)
        figures = " | ".join([*(f"{value:.1f}" for value in memory), *(f"{value:.2f}" for value in seconds)])
        print(f"| {tokens} | {figures} |", flush=True)
