"""Train a masked diffusion model of bytes from scratch and follow its exact likelihood. Two minutes on two CPU cores.

python examples/training/train.py [FIGURE.png]

Prints, as the network learns, bits per byte of held-out texts under two rules and the ELBO, each with the paired
difference from the score before. The texts are the same, so the error of the difference is far smaller. The ELBO bounds
the log-likelihood from below, so its bits per byte are an upper bound, printed with ≤ and its Monte Carlo error. This
is the likelihood under random order. A rule is another distribution, so its bits per byte may be above the bound.
"""

import argparse
import json
import lzma
import math
import sys
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch.nn import functional as F
from transformers import ModernBertConfig, ModernBertForMaskedLM, PreTrainedTokenizerFast

from lm_eval_duel import Duel, TextScore, compare
from lm_eval_duel.demo import FOLDER

ROW = 48  # bytes
WAYS = {  # what is scored: arguments of `Duel.from_model`
    "greedy": {"rule": "greedy", "block": 16},
    "left to right": {"rule": "left_to_right", "block": 16},
    "ELBO": {"estimator": "elbo", "mc_samples": 32},
}


class Point(NamedTuple):
    """The score of the held-out texts at one step, in bits per byte.

    `bound`: the value is an upper bound. `error`: its Monte Carlo standard error; None: nothing is drawn.
    `change`: from the step scored before, with its 95 % interval over texts; None at the first.
    """

    step: int
    way: str
    value: float
    bound: bool
    error: float | None
    change: tuple[float, float, float] | None = None


def bytes_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer with a token for each byte, and [MASK]."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({byte: n for n, byte in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, mask_token="[MASK]", pad_token="[PAD]")


def read(tokenizer: Any) -> tuple[torch.Tensor, list[str]]:
    """The bytes of the addresses until 2017, and texts of later ones for scoring."""
    with lzma.open(FOLDER / "text" / "sotu_full.jsonl.xz", "rt", encoding="utf-8") as lines:
        addresses = [json.loads(line) for line in lines]
    early = " ".join(address["text"] for address in addresses if address["year"] <= 2017)
    ids = torch.tensor(tokenizer(early, verbose=False)["input_ids"])
    texts = [address["text"][start : start + ROW] for address in addresses[-4:] for start in range(1000, 9000, 1000)]
    return ids, texts


def network(tokenizer: Any) -> ModernBertForMaskedLM:
    """A small network with random weights."""
    special = ("pad", "bos", "eos", "cls", "sep")
    return ModernBertForMaskedLM(
        ModernBertConfig(
            vocab_size=len(tokenizer),
            hidden_size=128,
            intermediate_size=256,
            num_hidden_layers=3,
            num_attention_heads=4,
            max_position_embeddings=ROW,
            global_attn_every_n_layers=1,
            **{f"{name}_token_id": tokenizer.pad_token_id for name in special},
        )
    )


def loss_of(model: torch.nn.Module, ids: torch.Tensor, mask_id: int) -> torch.Tensor:
    """The negative ELBO per token: each token is masked with probability t, and its cross entropy divided by t."""
    t = (torch.arange(len(ids)) + torch.rand(1)).div(len(ids)).clamp(min=0.05)[:, None]  # (B, 1), stratified
    masked = torch.rand(ids.shape) < t  # (B, L)
    logits = model(input_ids=ids.masked_fill(masked, mask_id)).logits  # (B, L, V)
    nll = F.cross_entropy(logits.transpose(1, 2), ids, reduction="none")  # (B, L)
    return (nll * masked / t).mean()


def train(steps: int = 600, every: int = 100) -> Iterator[Point]:
    """Train, and score the held-out texts every `every` steps."""
    torch.manual_seed(0)
    tokenizer = bytes_tokenizer()
    ids, texts = read(tokenizer)
    model = network(tokenizer)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.98))
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=steps + 1, pct_start=0.1)
    before: dict[str, list[TextScore]] = {}
    for step in range(steps + 1):
        if step % every == 0:
            for way, arguments in WAYS.items():
                duel = Duel.from_model(model, tokenizer, self_tests=step > 0, **arguments)
                scores = duel.score(texts)
                nats_per_bit = math.log(2)
                size = sum(len(text.encode()) for text in texts)
                value = -sum(score.log_prob for score in scores) / nats_per_bit / size
                error = None
                if scores[0].stderr is not None:
                    # the draws of different texts are independent
                    error = math.hypot(*(score.stderr for score in scores)) / nats_per_bit / size
                if way in before:
                    paired = compare(scores, before[way], unit="byte")  # nats
                    change = tuple(nats / nats_per_bit for nats in (paired.difference, *paired.interval))
                yield Point(step, way, value, scores[0].bound, error, change if way in before else None)
                before[way] = scores
        starts = torch.randint(len(ids) - ROW, (64, 1))
        loss = loss_of(model.train(), ids[starts + torch.arange(ROW)], tokenizer.mask_token_id)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()


def draw(points: list[Point], file: str) -> None:
    """Draw the curves; error bars are of the change since the score before."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(6, 4), layout="constrained")
    for way in WAYS:
        curve = [point for point in points if point.way == way]
        changes = [point.change or (0.0, 0.0, 0.0) for point in curve]
        errors = [[change - low for change, low, _ in changes], [high - change for change, _, high in changes]]
        steps = [point.step for point in curve]
        values = [point.value for point in curve]
        label = f"{way} (upper bound)" if curve[0].bound else way
        axes.errorbar(steps, values, errors, marker="o", capsize=3, label=label)
    axes.set(xlabel="step", ylabel="bits per byte of held-out texts")
    axes.legend()
    figure.savefig(file, dpi=150)


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="Train a small masked diffusion model and follow its likelihood.")
    parser.add_argument("figure", nargs="?", default="training.png", help="the figure to write (training.png)")
    parser.add_argument("--steps", type=int, default=600, help="steps of training (600)")
    parser.add_argument("--every", type=int, default=100, help="steps between two scores (100)")
    return parser.parse_args(arguments)


def line_of(point: Point) -> str:
    """The line of a point. An upper bound has its sign, and what is drawn its error."""
    sign = "≤ " if point.bound else "  "
    line = f"step {point.step:>4}  {point.way:<13}  {sign}{point.value:.3f}"
    if point.error is not None:
        line += f" ± {point.error:.3f}"
    line += " bits per byte"
    if point.change is not None:
        line += "  change {:+.3f} (95 % interval {:+.3f} to {:+.3f})".format(*point.change)
    return line


def main(options: argparse.Namespace) -> None:
    """Print the scores as the network learns, and draw them."""
    points = []
    for point in train(options.steps, options.every):
        points.append(point)
        print(line_of(point), flush=True)
    print("≤ bounds random order; a rule is another distribution, and may be above it")
    draw(points, options.figure)


if __name__ == "__main__":
    main(parse(sys.argv[1:]))
