"""Gradients through networks as people write them, against plain autograd over the reference."""

import math

import pytest
import torch
from close import require_equal

from lm_eval_duel import Duel, DuelError, Window, reference

WINDOWS = [Window((), (0, 2, 1, 1, 0)), Window((1,), (2, 2, 0, 1)), Window((), (1, 0, 2), (0,))]
WEIGHTS = [0.7, -1.3, 2.0]


class Own(torch.nn.Module):
    """A network f(ids, real) in float64, in train mode, with dropout and noise that only train mode has."""

    def __init__(self, checkpointing=None):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = torch.nn.Embedding(6, 8), torch.nn.Linear(8, 6)
        self.mix, self.dropout = torch.nn.Linear(8, 8), torch.nn.Dropout(0.5)
        self.checkpointing = checkpointing
        self.double().train()

    def layer(self, x):
        x = x + x.sum(1, keepdim=True) / 3 + (torch.randn_like(x) if self.training else 0)
        return torch.tanh(self.dropout(self.mix(x)))

    def forward(self, ids, real):
        x = self.embed(ids)
        x = x + torch.arange(ids.shape[1])[:, None] / 7
        if self.checkpointing is None:
            return self.head(self.layer(x))
        return self.head(torch.utils.checkpoint.checkpoint(self.layer, x, use_reentrant=self.checkpointing))


def by_the_reference(network, windows, weights):
    """The weighted sum of log-probs along the order of `reference.log_likelihood`, with a graph, by plain autograd."""
    network.eval()

    def logits_of(z):
        return network(z[None], None)[0].masked_fill(torch.arange(6) == 5, -math.inf)

    total = 0.0
    for window, weight in zip(windows, weights, strict=True):
        x, origin = [*window.context, *window.target, *window.suffix], len(window.context)
        blocks = reference.cut(range(origin, origin + len(window.target)), 3, origin)
        z = torch.tensor(reference.masked(x, blocks, 5))
        with torch.no_grad():
            order = reference.log_likelihood(x, blocks, logits_of, reference.greedy(), 5).sigma
        for step in order:
            log_P = reference.log_softmax(logits_of(z.clone()))
            total = total + weight * sum(log_P[ell, x[ell]] for ell in step)
            z[step] = torch.tensor([x[ell] for ell in step])
    return total


def tenth(network):
    network.mix.weight.register_hook(lambda gradient: gradient / 10)


def clamped(network):
    network.head.bias.register_hook(lambda gradient: gradient.clamp(-0.3, 0.3))


def frozen(network):
    network.embed.requires_grad_(False)


def at_accumulation(network):
    def thrice(weight):
        weight.grad.mul_(3)

    network.head.weight.register_post_accumulate_grad_hook(thrice)


@pytest.mark.parametrize("way", ["backward", "differentiable"])
@pytest.mark.parametrize(
    ("prepare", "checkpointing", "around"),
    [
        (tenth, None, None),
        (clamped, None, None),
        (at_accumulation, None, None),
        (frozen, False, None),
        (None, False, torch.nn.DataParallel),
        (None, None, torch.compile),
    ],
)
def test_gradients_are_those_of_plain_autograd_over_the_reference(way, prepare, checkpointing, around):
    """Hooks see the sum once; checkpointing recomputes in evaluation mode; wrappers are seen through."""
    grads = []
    for ours in (True, False):
        network = Own(checkpointing if ours else None)
        if prepare is not None:
            prepare(network)
        if ours:
            model = network if around is None else around(network)
            duel = Duel.from_model(model, rule="greedy", block=3, mask_token_id=5, max_length=8, self_tests=False)
            orders = [scored.reveal_steps for scored in duel.log_prob(WINDOWS)]
            if way == "backward":
                duel.backward(WINDOWS, WEIGHTS, orders)
            else:
                weights = torch.tensor(WEIGHTS, dtype=torch.float64)[:, None]
                (duel.differentiable(WINDOWS, orders, batch_size=2) * weights).sum().backward()
            assert all(part.training for part in network.modules())
        else:
            by_the_reference(network, WINDOWS, WEIGHTS).backward()
        torch.nn.utils.clip_grad_norm_(network.parameters(), 2.0)
        grads.append([parameter.grad for parameter in network.parameters()])
    require_equal(*grads, 1e-9)


def test_a_tensor_that_would_get_no_gradient_is_refused():
    """A closure's bias that is no parameter of a module; a parameter of a module that the denoiser does not hold."""
    network, bias = Own().eval(), torch.zeros(6, dtype=torch.float64, requires_grad=True)
    for function, module in (
        (lambda ids, real: network(ids, real) + bias, network),
        (lambda ids, real: network(ids, real), network.head),
    ):
        duel = Duel.from_model(function, module=module, rule="greedy", block=3, mask_token_id=5, max_length=8)
        with pytest.raises(DuelError, match="requires a gradient"):
            duel.backward(WINDOWS, WEIGHTS)


def test_reentrant_checkpointing_is_refused_by_torch():
    duel = Duel.from_model(Own(True), rule="greedy", block=3, mask_token_id=5, max_length=8, self_tests=False)
    with pytest.raises(RuntimeError, match="use_reentrant"):
        duel.backward(WINDOWS, WEIGHTS)
