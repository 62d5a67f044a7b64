"""Errors of the log-probabilities that RL methods for diffusion language models use, and of their gradients.

python examples/surrogates/compare.py [--texts N] [--draws N]

Texts are drawn by the sampler. A surrogate is a list of states of a block (sets of masked positions) with a weight for
each masked position; its value is the weighted sum of log p. The exact log-probability under a rule is such a sum over
the states of the text's order. Blocks before a state's block are clean and the prompt is visible, which is kinder to
surrogates than their authors' code.

Shapes: W positions of a block, S states, P parameters.
"""

import argparse
import itertools
import math
import statistics
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from lm_eval_duel import Duel, Window, load
from lm_eval_duel.estimators.gradients import log_probs_of

CONTEXT = 8  # tokens before each text
LENGTH = 8  # tokens of a text
States = tuple[Tensor, Tensor]  # masked (S, W) bool, weights (S, W)
Surrogate = Callable[[int, torch.Generator], States]  # of a block of W positions


def d1(width: int, generator: torch.Generator) -> States:
    """d1: one forward, all masked."""
    return torch.ones(1, width, dtype=torch.bool), torch.ones(1, width)


def coupled(width: int, generator: torch.Generator) -> States:
    """Coupled-GRPO: half of all masked, and of a complementary pair with weights 1 / t and 1 / (1 - t)."""
    t = 0.2 + 0.6 * torch.rand((), generator=generator)
    mask = torch.rand(width, generator=generator) < t  # (W,)
    every = torch.ones(width)
    return torch.stack([every.bool(), mask, ~mask]), torch.stack([every, every / t, every / (1 - t)]) / 2


def elbo(draws: int) -> Surrogate:
    """The Monte Carlo ELBO: n positions masked, n uniform on 1..W, weight W / n."""

    def states(width: int, generator: torch.Generator) -> States:
        count = torch.randint(1, width + 1, (draws, 1), generator=generator)  # (S, 1)
        rank = torch.rand(draws, width, generator=generator).argsort(1).argsort(1)  # (S, W)
        return rank < count, (width / count / draws).expand(draws, width)

    return states


def all_orders(width: int, generator: torch.Generator) -> States:
    """The ELBO without its Monte Carlo error: the mean over all orders of log p along them."""
    masked = torch.tensor(list(itertools.product([False, True], repeat=width)))[1:]  # (S, W)
    count = masked.sum(1).tolist()
    weight = torch.tensor([1 / (n * math.comb(width, n)) for n in count])  # (S,)
    return masked, weight[:, None].expand_as(masked)


SURROGATES: dict[str, tuple[Surrogate, bool]] = {  # whether it is random
    "one forward (d1)": (d1, False),
    "coupled masks (coupled-GRPO)": (coupled, True),
    "ELBO, 1 draw": (elbo(1), True),
    "ELBO, 4 draws (ESPO)": (elbo(4), True),
    "ELBO, 16 draws": (elbo(16), True),
    "ELBO, all orders": (all_orders, False),
}


def log_prob(duel: Duel, window: Window, surrogate: Surrogate, generator: torch.Generator) -> Tensor:
    """A surrogate of log p of a window, with its graph, ()."""
    group = duel.estimator.open([window], [0])
    fresh = group.fresh(duel.estimator.block_spans(group))
    total = torch.zeros((), dtype=torch.float64)
    for block in range(len(fresh)):
        masked, weights = surrogate(int(fresh.width[block]), generator)  # (S, W) each
        lanes = fresh.select(torch.full((len(masked),), block))
        lanes = lanes.show(group.rows.targets(lanes), masked).select(masked.any(1))
        view = duel.denoiser.open(group.rows)
        total = total + (log_probs_of(duel.denoiser, view, lanes, group.rows) * weights[masked]).sum()
    return total


class Row(NamedTuple):
    """A surrogate against the exact log-probability, over texts; nats a text."""

    name: str
    bias: float
    bias_stderr: float
    spread: float  # the standard deviation over draws, of one text
    rank: float  # Spearman's correlation over texts, of one draw each
    cosine: float | None  # the mean over texts, of one draw's gradient and the exact one


def compare(name: str, block: int, texts: int, draws: int) -> Iterator[tuple[str, Row]]:
    """(truth, row) of each surrogate on texts that `name` itself writes."""
    network = load(name)
    network.layers.requires_grad_(True)
    generator = torch.Generator().manual_seed(0)
    contexts = [torch.randint(10, 1000, (CONTEXT,), generator=generator).tolist() for _ in range(texts)]
    rule = Duel(network, rule="greedy", block=block)
    drawn = Duel(network, block=block, estimator="sampled_confidence", n=1)
    for truth, duel in (("greedy rule", rule), ("LLaDA's sampler, temperature 1", drawn)):
        samples = duel.sample(contexts, LENGTH, seed=1)
        windows = [Window(context, sample.tokens) for context, sample in zip(contexts, samples, strict=True)]
        exact = [score.log_prob for score in duel.log_prob(windows)]
        if duel is rule:
            by_order = [rule.differentiable([w], [s.reveal_steps])[0] for w, s in zip(windows, samples, strict=True)]
            gradients = [gradient(network, each.sum()) for each in by_order]
        else:
            along = rule.replay(windows, [sample.reveal_steps for sample in samples])
            yield truth, summary("along the order, no selection", exact, [[score.log_prob] for score in along], None)
        for title, (surrogate, random) in SURROGATES.items():
            estimates = []
            cosines = []
            for n, window in enumerate(windows):
                first = log_prob(rule, window, surrogate, generator)
                if duel is rule:
                    cosines.append(float(torch.cosine_similarity(gradient(network, first), gradients[n], dim=0)))
                with torch.no_grad():
                    more = [float(log_prob(rule, window, surrogate, generator)) for _ in range((draws - 1) * random)]
                estimates.append([float(first.detach()), *more])
            yield truth, summary(title, exact, estimates, cosines)


def gradient(network: object, value: Tensor) -> Tensor:
    """The gradient of a value with respect to all parameters, (P,)."""
    parts = torch.autograd.grad(value, list(network.layers.parameters()), allow_unused=True, materialize_grads=True)
    return torch.cat([part.flatten() for part in parts])


def summary(name: str, exact: list[float], estimates: list[list[float]], cosines: list[float] | None) -> Row:
    """One row: values `estimates` of each text against the exact ones."""
    errors = [statistics.mean(values) - truth for values, truth in zip(estimates, exact, strict=True)]
    spread = math.sqrt(statistics.mean(statistics.variance(values) if values[1:] else 0.0 for values in estimates))
    return Row(
        name,
        statistics.mean(errors),
        statistics.stdev(errors) / math.sqrt(len(errors)),
        spread,
        statistics.correlation(ranks(exact), ranks([values[0] for values in estimates])),
        statistics.mean(cosines) if cosines else None,
    )


def ranks(values: list[float]) -> list[float]:
    """The rank of each value in ascending order."""
    return [float(place) for place in torch.tensor(values).argsort().argsort()]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Errors of surrogates of log-probabilities, and of their gradients.")
    parser.add_argument("--texts", type=int, default=24, help="texts of each network (24)")
    parser.add_argument("--draws", type=int, default=8, help="draws of each surrogate (8)")
    options = parser.parse_args()
    print("| network | sampler | surrogate | bias, nats | sd | rank correlation | cosine of gradients |")
    print("|---|---|---|---|---|---|---|")
    for name, block in (("demo-mdm", 8), ("demo-bd", 4)):
        for truth, row in compare(name, block, options.texts, options.draws):
            cosine = "" if row.cosine is None else f"{row.cosine:.2f}"
            bias = f"{row.bias:+.2f} ± {row.bias_stderr:.2f}"
            print(
                f"| {name} | {truth} | {row.name} | {bias} | {row.spread:.2f} | {row.rank:.2f} | {cosine} |", flush=True
            )
