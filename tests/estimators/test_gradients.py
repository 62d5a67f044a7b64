"""`Duel.differentiable`: gradients of exact log-probabilities, against autograd over loops."""

import contextlib
import copy
import itertools
import math
import weakref

import pytest
import tiny
import torch
from close import require_equal
from decoder_reference import CASES, write
from toys import BlockCausal, Causal, Toy

from lm_eval_duel import Duel, DuelError, Window, load, reference
from lm_eval_duel.denoisers.filters import warped
from lm_eval_duel.denoisers.wrappers import Guided
from lm_eval_duel.estimators.gradients import trainable as trainable_tensors

WINDOWS = [Window((), (0, 2, 1, 1, 0)), Window((1,), (2, 2, 0, 1)), Window((), (1, 0, 2), (0,))]
WEIGHTS = [0.7, -1.3, 2.0]
PARAMETERS = ("embed", "mix", "out")


def trainable(kind, **options):
    toy = kind(**options)
    for name in PARAMETERS:
        getattr(toy, name).requires_grad_(True)
    return toy


def backward(duel, windows, weights, orders=None, **more):
    """The gradient of the weighted sum of windows' log-probs, which it returns, along their own orders by default."""
    if orders is None:
        orders = [score.reveal_steps for score in duel.log_prob(windows)]
    log_probs = duel.differentiable(windows, orders, **more)
    (log_probs * torch.tensor(weights, dtype=torch.float64)[:, None]).sum().backward()
    return log_probs.sum(1).tolist()


def gradients(toy):
    grads = [getattr(toy, name).grad for name in PARAMETERS]
    for name in PARAMETERS:
        getattr(toy, name).grad = None
    return grads


# ---------------------------------------------------------------- the textbook: one row, one step at a time


def logits_of(denoiser, window):
    """The network on a row z of this window, with a graph: z (L,) -> (L, V)."""
    if denoiser.filters:
        [warp] = denoiser.filters
        plain = copy.copy(denoiser)
        plain.filters = ()
        return lambda z: logits_of(plain, window)(z) / warp.temperature
    if isinstance(denoiser, Guided):
        plain = logits_of(denoiser.plain, window)
        end = len(window.context) + len(window.target)

        def guided(z):
            bare = torch.full_like(z, denoiser.mask_id)
            bare[len(window.context) : end] = z[len(window.context) : end]
            without = plain(bare)
            return without + (1 + denoiser.scale) * (plain(z) - without)

        return guided
    block = denoiser.block or 1

    def whole_row(z):
        if denoiser.attention == "bidirectional" or isinstance(denoiser, Causal):
            return denoiser.head(denoiser.features(z[None], None)[0])
        z = torch.nn.functional.pad(z, (0, -len(z) % block), value=denoiser.mask_id or 0)
        position = torch.arange(len(z))
        seen = position[:, None] // block >= position // block  # (L, L)
        return denoiser.head(denoiser.stream(z[None], position[None], seen[None], None)[0][0])

    return lambda z: whole_row(z).roll(denoiser.shift, 0)


def textbook(network, mask_id, excluded, window, steps, block, grid="target"):
    """log p of each target token along an order, with a graph, (T,)."""
    x = [*window.context, *window.target, *window.suffix]
    origin = len(window.context)
    blocks = reference.cut(range(origin, origin + len(steps)), block, origin if grid == "target" else 0)
    z = torch.tensor(reference.masked(x, blocks, mask_id))
    values = {}
    for positions in blocks:
        for step in sorted({steps[ell - origin] for ell in positions}):
            log_P = reference.log_softmax(network(z.clone()).masked_fill(excluded, -math.inf))
            for ell in positions:
                if steps[ell - origin] == step:
                    values[ell] = log_P[ell, x[ell]]
                    z[ell] = x[ell]
    return torch.stack([values[ell] for ell in sorted(values)])


# ---------------------------------------------------------------- networks


def lora(folder):
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(tiny.network("bert"), peft.LoraConfig(r=2, target_modules=["query", "value"]))
    torch.manual_seed(3)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.3)
    return Duel.from_model(model, tiny.tokenizer(), block=3).denoiser


def checkpointing(folder):
    """Gradient checkpointing, with the hook that PEFT recommends: the embeddings' output is a leaf."""
    model = tiny.network("bert").train()
    model.config.hidden_dropout_prob = model.config.attention_probs_dropout_prob = 0.0
    model.gradient_checkpointing_enable()
    model.enable_input_require_grads()
    return Duel.from_model(model, tiny.tokenizer(), block=3).denoiser


def bert(folder, **options):
    return load(tiny.checkpoint(folder, "bert"), device="cpu", **options)


def causal(folder, **options):
    path = tiny.checkpoint(folder, "gpt2", mask=False)
    return Duel.from_pretrained(path, estimator="ar", device="cpu", **options).denoiser


def decoder(name):
    def make(folder, **options):
        return load(write(folder, CASES[name])[0], device="cpu", **CASES[name].options, **options)

    return make


NETWORKS = {
    "bert, tied weights": bert,
    "temperature": lambda folder, **options: bert(folder, temperature=0.7, **options),
    "guidance": lambda folder, **options: bert(folder, cfg_scale=0.8, **options),
    "gpt2, causal": causal,
    "sdar, block-causal": decoder("sdar"),
    "fast-dllm-v2, block-causal and shifted": decoder("fast-dllm-v2"),
}
IN_MEMORY = {"LoRA": lora, "gradient checkpointing": checkpointing}
CASES_OF_NETWORKS = [
    *itertools.product([*NETWORKS, *IN_MEMORY], ["float64"]),
    ("bert, tied weights", "float32"),
    ("fast-dllm-v2, block-causal and shifted", "float32"),
]


def opened(folder, name, dtype):
    """The denoiser of that name."""
    if name in NETWORKS:
        return NETWORKS[name](folder, dtype=dtype)
    denoiser = IN_MEMORY[name](folder)
    denoiser.module.to(getattr(torch, dtype))
    return denoiser


def precision(name, dtype):
    """How closely gradients of a network agree, relative to their norm."""
    if dtype == "float32":
        return 1e-5
    if name.startswith(("sdar", "fast")):
        return 1e-7  # the norms of transformers' decoders are float32 in any dtype
    return 1e-9


@pytest.mark.slow
@pytest.mark.parametrize(("name", "dtype"), CASES_OF_NETWORKS)
def test_gradients_are_those_of_autograd_over_the_textbook(tmp_path, name, dtype):
    """Of a loss that weighs tokens and is not linear in them, through `differentiable`."""
    denoiser = opened(tmp_path, name, dtype)
    if denoiser.attention == "causal":
        block = 1
        duel = Duel(denoiser, estimator="ar")
    else:
        block = denoiser.block or 3
        duel = Duel(denoiser, rule="greedy", block=block, grid="row")
    tokens = torch.randint(6, 30, (15,), generator=torch.Generator().manual_seed(2)).tolist()
    windows = [Window(tokens[:2], tokens[2:]), Window(tokens[:5], tokens[9:])]
    orders = [score.reveal_steps for score in duel.log_prob(windows)]
    parameters = list(trainable_tensors(denoiser).values())
    assert len(parameters) >= 8
    if name == "LoRA":
        assert len(parameters) == 8
    advantage = torch.linspace(-1, 2, 13, dtype=torch.float64)

    def loss(log_probs):
        return sum((advantage[: len(row)] * row + 0.1 * row**2).sum() for row in log_probs)

    log_probs = duel.differentiable(windows, orders, batch_size=2)
    grads = torch.autograd.grad(loss([log_probs[0], log_probs[1, :6]]), parameters, allow_unused=True)

    rows = []
    with contextlib.nullcontext() if name in NETWORKS else denoiser.evaluating():
        mask_id = denoiser.mask_id or 0
        excluded = denoiser.excluded.clone()
        for window, order in zip(windows, orders, strict=True):
            network = logits_of(denoiser, window)
            rows.append(textbook(network, mask_id, excluded, window, order, block, "row"))
        expected = torch.autograd.grad(loss(rows), parameters, allow_unused=True)
    assert log_probs.shape == (2, 13)
    assert not log_probs[1, 6:].any()
    require_equal(grads, expected, precision(name, dtype))


@pytest.mark.parametrize(
    ("kind", "rule", "block", "order"),
    [
        (Toy, "greedy", 3, (0, 1, 2)),
        (Toy, "margin:k=2", None, (2, 1, 0)),
        (Toy, "threshold:mu=0.5", 3, (1, 2, 0)),
        (BlockCausal, "greedy", 2, (0,)),
        (Causal, "left_to_right", 1, (0,)),
    ],
)
def test_toys(kind, rule, block, order):
    """Weights go to their windows, whichever is the longest."""
    toy = trainable(kind, length=8)
    duel = Duel(toy, rule=rule, block=block)
    batch_size = 1 if rule == "greedy" else 7
    windows = [WINDOWS[n] for n in order]
    weights = [WEIGHTS[n] for n in order]
    scores = duel.log_prob(windows)
    orders = [score.reveal_steps for score in scores]

    rows = []
    loss = 0.0
    for window, weight, steps in zip(windows, weights, orders, strict=True):
        row = textbook(logits_of(toy, window), toy.mask_id or 0, toy.excluded, window, steps, block)
        rows.append(row)
        loss = loss + weight * row.sum()
    loss.backward()
    expected = gradients(toy)

    values = backward(duel, windows, weights, batch_size=batch_size)
    assert values == pytest.approx([score.log_prob for score in scores], abs=1e-12)
    require_equal(gradients(toy), expected, 1e-9)

    log_probs = duel.differentiable(windows, orders, batch_size)
    for row, padded in zip(rows, log_probs, strict=True):
        assert padded[: len(row)].tolist() == pytest.approx(row.tolist(), abs=1e-12)
        assert not padded[len(row) :].any()
    (log_probs * torch.tensor(weights, dtype=torch.float64)[:, None]).sum().backward()
    require_equal(gradients(toy), expected, 1e-9)


def test_the_graph_obeys_autograd():
    toy = trainable(Toy, length=8)
    duel = Duel(toy, rule="greedy", block=3)
    orders = [(0, 1, 2, 0, 1)]
    with torch.no_grad():
        assert not duel.differentiable(WINDOWS[:1], orders).requires_grad
    log_probs = duel.differentiable(WINDOWS[:1], orders)
    [twice] = torch.autograd.grad(log_probs.sum(), toy.out, create_graph=True)
    assert not twice.requires_grad, "differentiable once"
    assert duel.differentiable([], []).shape == (0, 0)
    known = Window((), (0, 2, 1), known=(1,))
    assert duel.differentiable([known], [(0, -1, 1)])[0, 1] == 0

    log_probs = duel.differentiable(WINDOWS[:1], orders)
    with torch.no_grad():
        toy.mix += 1.0
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        log_probs.sum().backward()


def test_memory_is_that_of_one_step():
    """No graph of an earlier call is alive when the next one begins."""
    toy = trainable(Toy, length=8)
    alive = []
    refs = []
    features = toy.features

    def counted(ids, real):
        alive.append(sum(ref() is not None for ref in refs))
        out = features(ids, real)
        refs.append(weakref.ref(out))
        return out

    toy.features = counted
    duel = Duel(toy, rule="greedy", block=None)
    order = [(0, 1, 2, 3, 4)]
    backward(duel, WINDOWS[:1], [1.0], order)
    log_probs = duel.differentiable(WINDOWS[:1], order)
    log_probs.sum().backward()
    assert len(alive) >= 11
    assert set(alive) == {0}


def test_rows_of_the_backward_pass_are_counted():
    """The same as in the pass before, in fewer calls."""
    duel = Duel(trainable(Toy, length=8), rule="greedy", block=3)
    orders = [score.reveal_steps for score in duel.log_prob(WINDOWS[:2])]
    rows = duel.counts.rows
    log_probs = duel.differentiable(WINDOWS[:2], orders, batch_size=4)
    forward = duel.counts.rows - rows
    forwards = duel.counts.forwards
    log_probs.sum().backward()
    assert duel.counts.rows == rows + 2 * forward
    assert forwards < duel.counts.forwards < forwards + forward


def test_an_autocast_around_the_call_changes_nothing():
    denoiser = load("demo-bd", device="cpu")
    duel = Duel(denoiser, "greedy")
    window = Window((300,), tuple(range(100, 107)))
    parameter = next(denoiser.layers.parameters())
    parameter.requires_grad_(True)

    def values():
        """The gradient, and the log-probability by both ways."""
        parameter.grad = None
        [log_prob] = backward(duel, [window], [1.0])
        [score] = duel.log_prob([window])
        return parameter.grad, log_prob, score.log_prob

    gradient, log_prob, scored = values()
    with torch.autocast("cpu", torch.bfloat16):
        gradient_inside, log_prob_inside, scored_inside = values()

    assert (gradient - gradient_inside).norm() <= 1e-5 * gradient.norm()
    assert log_prob_inside == pytest.approx(log_prob, abs=1e-4)
    assert scored_inside == pytest.approx(scored, abs=1e-4)


# ---------------------------------------------------------------- networks as people write them


class Own(torch.nn.Module):
    """A network f(ids, real) in float64, in train mode, with dropout and noise that only train mode has."""

    def __init__(self, checkpointing=None):
        super().__init__()
        torch.manual_seed(0)
        self.embed = torch.nn.Embedding(6, 8)
        self.head = torch.nn.Linear(8, 6)
        self.mix = torch.nn.Linear(8, 8)
        self.dropout = torch.nn.Dropout(0.5)
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
def test_gradients_are_those_of_plain_autograd_over_the_reference(prepare, checkpointing, around):
    """Hooks see the sum once; checkpointing recomputes in evaluation mode; wrappers are seen through."""

    def clipped_gradients(network):
        torch.nn.utils.clip_grad_norm_(network.parameters(), 2.0)
        return [parameter.grad for parameter in network.parameters()]

    network = Own(checkpointing)
    if prepare is not None:
        prepare(network)
    model = network if around is None else around(network)
    duel = Duel.from_model(model, rule="greedy", block=3, mask_token_id=5, max_length=8, self_tests=False)
    orders = [score.reveal_steps for score in duel.log_prob(WINDOWS)]
    backward(duel, WINDOWS, WEIGHTS, orders, batch_size=2)
    assert all(part.training for part in network.modules())

    plain = Own()
    if prepare is not None:
        prepare(plain)
    plain.eval()
    loss = 0.0
    for window, weight, steps in zip(WINDOWS, WEIGHTS, orders, strict=True):
        row = textbook(lambda z: plain(z[None], None)[0], 5, torch.arange(6) == 5, window, steps, 3)
        loss = loss + weight * row.sum()
    loss.backward()

    require_equal(clipped_gradients(network), clipped_gradients(plain), 1e-9)


def test_a_tensor_that_would_get_no_gradient_is_refused():
    """A closure's bias that is no parameter of a module; a parameter of a module that the denoiser does not hold."""
    network = Own().eval()
    bias = torch.zeros(6, dtype=torch.float64, requires_grad=True)
    for function, module in (
        (lambda ids, real: network(ids, real) + bias, network),
        (lambda ids, real: network(ids, real), network.head),
    ):
        duel = Duel.from_model(function, module=module, rule="greedy", block=3, mask_token_id=5, max_length=8)
        with pytest.raises(DuelError, match="requires a gradient"):
            backward(duel, WINDOWS, WEIGHTS)


# ---------------------------------------------------------------- refusals


def test_what_has_no_gradient():
    duel = Duel(Toy(length=8), rule="greedy", block=3)
    certain = warped(trainable(Toy, length=8), top_k=1)
    for more, named in (
        ({}, "No parameter"),
        ({"orders": []}, "0 orders"),
        ({"orders": [(0, 1)]}, "5 target tokens but 2 steps"),
        ({"batch_size": 0}, "batch_size"),
    ):
        with pytest.raises(DuelError, match=named):
            backward(duel, WINDOWS[:1], [1.0], **more)
    impossible = Duel(certain, rule="left_to_right", block=3)
    with pytest.raises(DuelError, match="Window 0 has a token of probability 0"):
        backward(impossible, WINDOWS[:1], [1.0])
    reentrant = Duel.from_model(Own(True), rule="greedy", block=3, mask_token_id=5, max_length=8, self_tests=False)
    with pytest.raises(RuntimeError, match="use_reentrant"):
        backward(reentrant, WINDOWS, WEIGHTS)
    cached = Duel.from_model(tiny.network("bert"), tiny.tokenizer(), cache="dual", block=3)
    with pytest.raises(DuelError, match="cache=dual"):
        backward(cached, [Window((6,), (7, 8))], [1.0])
