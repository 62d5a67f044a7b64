"""GRPO of a masked diffusion model with exact log-probabilities: rollouts, rewards, clipping, KL to a reference.

python examples/grpo/train.py

The bundled block-causal network (3.4 million parameters, blocks of 4) learns to write tokens that begin with a capital
letter. The reward is the share of such tokens in a completion of 16, so its optimum is 1. Two minutes on a CPU core.
"""

import argparse
import dataclasses
import sys
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from lm_eval_duel import Duel, Score, Window, load, load_tokenizer

PROMPTS = ("We the people of the", "My fellow", "The state of the", "In the last year")


@dataclasses.dataclass(frozen=True)
class Settings:
    group: int = 8  # completions of a prompt
    length: int = 16  # tokens of a completion
    epochs: int = 2  # updates by the same rollouts
    clip: float = 0.2
    beta: float = 0.02  # of the KL penalty
    lr: float = 3e-4


class Step(NamedTuple):
    """The rollouts of one step, before the update."""

    number: int
    reward: float  # mean over completions
    kl: float  # to the reference, nats per completion


def rewards_of(completions: Sequence[Sequence[int]], good: Tensor) -> Tensor:
    """The share of good tokens in each completion; `good` (V,) bool."""
    return good[torch.tensor(completions)].double().mean(1)  # (N,)


def token_logprobs(scores: Sequence[Score]) -> Tensor:
    """The token log-probabilities of samples or replayed orders, (N, T)."""
    return torch.tensor([score.token_logprobs for score in scores], dtype=torch.float64)


def loss_of(new: Tensor, old: Tensor, reference: Tensor, advantages: Tensor, settings: Settings) -> Tensor:
    """The clipped objective and the KL penalty of GRPO, from token log-probs (N, T) and advantages (N,)."""
    ratio = (new - old).exp()
    clipped = ratio.clamp(1 - settings.clip, 1 + settings.clip)
    gain = torch.minimum(ratio * advantages[:, None], clipped * advantages[:, None])
    kl = (reference - new).exp() - (reference - new) - 1  # an estimate that is never negative
    return (settings.beta * kl - gain).mean()


def train(steps: int, settings: Settings) -> Iterator[Step]:
    """Train, and yield what the rollouts of each step gained."""
    torch.manual_seed(0)
    tokenizer = load_tokenizer({"pretrained": "demo-bd"})
    network = load("demo-bd")
    network.layers.requires_grad_(True)
    policy = Duel(network, rule="greedy")
    reference = Duel(load("demo-bd"), rule="greedy")
    optimizer = torch.optim.Adam(network.layers.parameters(), settings.lr)

    pieces = tokenizer.convert_ids_to_tokens(range(network.vocab_size))
    good = torch.tensor([bool(piece) and piece.lstrip("Ġ▁ ")[:1].isupper() for piece in pieces])  # (V,)
    prompts = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in PROMPTS]
    contexts = [prompt for prompt in prompts for _ in range(settings.group)]
    for number in range(steps):
        # rollouts: each comes with its order and with the exact log-probability of each token
        samples = policy.sample(contexts, settings.length, seed=number)
        windows = [Window(context, sample.tokens) for context, sample in zip(contexts, samples, strict=True)]
        orders = [sample.reveal_steps for sample in samples]
        old = token_logprobs(samples)  # (N, T)
        fixed = token_logprobs(reference.replay(windows, orders))  # (N, T)

        rewards = rewards_of([sample.tokens for sample in samples], good).view(len(prompts), -1)  # (P, G)
        centred = rewards - rewards.mean(1, keepdim=True)
        advantages = (centred / (rewards.std(1, keepdim=True) + 1e-4)).flatten()  # (N,)

        for _ in range(settings.epochs):
            new = policy.differentiable(windows, orders, batch_size=16)  # (N, T), with a graph
            loss = loss_of(new, old, fixed, advantages, settings)
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(network.layers.parameters(), 1.0)
            optimizer.step()
        kl = (old - fixed).sum(1).mean()
        yield Step(number, float(rewards.mean()), float(kl))


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="GRPO of demo-bd: it learns to write capital letters.")
    parser.add_argument("--steps", type=int, default=20, help="steps of rollouts and updates (20)")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    for step in train(parse(sys.argv[1:]).steps, Settings()):
        kl = f"KL to the reference {step.kl:6.2f} nats per completion"
        print(f"step {step.number:>3}  reward {step.reward:.3f}  {kl}", flush=True)
