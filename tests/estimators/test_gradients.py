"""`Duel.backward`: the gradient of exact log-probabilities, against autograd through the unrolled sum."""

import contextlib
import gc
import math
import weakref

import pytest
import tiny
import torch
from decoder_reference import CASES, write
from toys import BlockCausal, Rotary, Toy

from lm_eval_duel import Duel, DuelError, Window, load
from lm_eval_duel.denoisers.wrappers.warpers import Warped

WINDOWS = [Window((), (0, 2, 1, 1, 0)), Window((1,), (2, 2, 0, 1)), Window((), (1, 0, 2), (0,))]
WEIGHTS = [0.7, -1.3, 2.0]
PARAMETERS = ("embed", "mix", "out")


def trainable(kind, **options):
    toy = kind(**options)
    for name in PARAMETERS:
        getattr(toy, name).requires_grad_(True)
    return toy


def gradients(toy):
    grads = [getattr(toy, name).grad for name in PARAMETERS]
    for name in PARAMETERS:
        getattr(toy, name).grad = None
    return grads


def unrolled(toy, window, steps, block):
    """log p of a window along an order, as one differentiable sum: plain loops over blocks, steps and positions."""
    total = 0.0
    origin, length = len(window.context), len(window.target)
    for start in range(0, length, block):
        inside = range(start, min(start + block, length))
        for step in range(max(steps[p] for p in inside) + 1):
            row = [*window.context, *window.target, *window.suffix]
            for p in range(start, length):
                if p >= start + block or steps[p] >= step:
                    row[origin + p] = toy.mask_id
            row = row[: origin + start + block] if toy.attention == "block_causal" else row
            row += [toy.mask_id] * (-len(row) % block if toy.attention == "block_causal" else 0)
            logits = toy.head(toy.features(torch.tensor([row]), None)[0])  # (L, V)
            log_p = logits.masked_fill(toy.excluded, -math.inf).log_softmax(-1)
            for p in inside:
                if steps[p] == step:
                    total = total + log_p[origin + p, window.target[p]]
    return total


@pytest.mark.parametrize(
    ("kind", "rule", "block"),
    [
        (Toy, "greedy", 3),
        (Toy, "margin:k=2", None),
        (Toy, "threshold:mu=0.5", 3),
        (Toy, "left_to_right", 2),
        (BlockCausal, "greedy", 2),
    ],
)
@pytest.mark.parametrize("batch_size", [1, 7])
def test_gradients_are_those_of_the_unrolled_sum(kind, rule, block, batch_size):
    toy = trainable(kind, length=8)
    duel = Duel(toy, rule=rule, block=block)
    windows = WINDOWS[:1] if kind is BlockCausal else WINDOWS
    scores = duel.log_prob(windows)
    values = duel.backward(windows, WEIGHTS[: len(windows)], batch_size=batch_size)
    assert values == pytest.approx([score.log_prob for score in scores], abs=1e-12)
    ours = gradients(toy)
    total = sum(
        weight * unrolled(toy, window, score.reveal_steps, block or len(window.target))
        for weight, window, score in zip(WEIGHTS, windows, scores, strict=False)
    )
    total.backward()
    for mine, reference in zip(ours, gradients(toy), strict=True):
        assert reference.abs().max() > 0.01
        assert torch.allclose(mine, reference, rtol=0, atol=1e-9)


@pytest.mark.parametrize("rule", ["greedy", "margin:k=2"])
def test_finite_differences(rule):
    toy = trainable(Toy, length=6)
    duel = Duel(toy, rule=rule, block=3)
    duel.backward(WINDOWS, WEIGHTS)
    generator = torch.Generator().manual_seed(3)
    grads = dict(zip(PARAMETERS, gradients(toy), strict=True))
    for name in PARAMETERS:
        plane = getattr(toy, name)
        direction = torch.randn(plane.shape, generator=generator, dtype=torch.float64)
        values = []
        for step in (1e-6, -1e-6):
            with torch.no_grad():
                plane += step * direction
                values.append(sum(w * s.log_prob for w, s in zip(WEIGHTS, duel.log_prob(WINDOWS), strict=True)))
                plane -= step * direction
        slope = (values[0] - values[1]) / 2e-6
        assert slope == pytest.approx(float((grads[name] * direction).sum()), rel=1e-6, abs=1e-7)


def test_the_score_of_a_policy_has_mean_zero():
    """sum_x p(x) grad log p(x) = grad sum_x p(x) = 0: what policy gradients rest on."""
    toy = trainable(Toy, tokens=3, length=3)
    duel = Duel(toy, rule="greedy", block=None)
    windows = [Window((), (a, b, c)) for a in range(3) for b in range(3) for c in range(3)]
    duel.backward(windows, [math.exp(score.log_prob) for score in duel.log_prob(windows)], batch_size=64)
    for grad in gradients(toy):
        assert grad.abs().max() < 1e-12


def test_gradients_along_a_recorded_order_and_inside_no_grad():
    toy = trainable(Toy, length=8)
    duel = Duel(toy, rule="greedy", block=3)
    order = (2, 0, 1, 0, 1)
    with torch.no_grad():
        [value] = duel.backward(WINDOWS[:1], [1.0], reveal_steps=[order])
    assert not any(plane.grad is None for plane in (toy.embed, toy.mix, toy.out))
    ours = gradients(toy)
    reference = unrolled(toy, WINDOWS[0], order, 3)
    assert value == pytest.approx(reference.item(), abs=1e-12)
    reference.backward()
    for mine, theirs in zip(ours, gradients(toy), strict=True):
        assert torch.allclose(mine, theirs, rtol=0, atol=1e-9)


def test_an_all_mask_start_and_a_temperature():
    toy = Rotary(length=6)
    for name in PARAMETERS:
        getattr(toy, name).requires_grad_(True)
    duel = Duel(Warped(toy, temperature=0.7), rule="greedy", block=None)
    windows = [Window((), (0, 2, 1))]
    [value] = duel.backward(windows, [1.0])
    assert value == pytest.approx(duel.log_prob(windows)[0].log_prob, abs=1e-12)
    assert toy.embed.grad.abs().max() > 0.01


def test_memory_is_that_of_one_step():
    """No graph of an earlier call is alive when the next one begins."""
    toy = trainable(Toy, length=8)
    alive, refs = [], []
    features = toy.features

    def counted(ids, real):
        gc.collect()
        alive.append(sum(1 for ref in refs if ref() is not None))
        out = features(ids, real)
        refs.append(weakref.ref(out))
        return out

    toy.features = counted
    Duel(toy, rule="greedy", block=None).backward(WINDOWS[:1], [1.0], reveal_steps=[(0, 1, 2, 3, 4)])
    assert len(alive) == 5 and set(alive) == {0}


@pytest.mark.slow
def test_a_checkpoint_gives_gradients_to_all_of_its_parameters():
    denoiser = load("demo-bd", device="cpu")
    windows = [Window((300,), (517, 261, 777, 300))]
    duel = Duel(denoiser, rule="greedy")
    [value] = duel.backward(windows, [1.0])
    assert value == pytest.approx(duel.log_prob(windows)[0].log_prob, abs=1e-4)
    without = [name for name, parameter in denoiser.network.named_parameters() if parameter.grad is None]
    assert not without


@pytest.mark.parametrize("around", [lambda: torch.autocast("cpu", torch.bfloat16), torch.inference_mode])
def test_an_autocast_or_inference_mode_around_the_call_changes_nothing(around):
    denoiser = load("demo-mdm")
    duel, window = Duel(denoiser, "greedy", 8), Window((), tuple(range(100, 112)))
    parameter = next(denoiser.layers.parameters())
    parameter.requires_grad_(True)
    found = []
    for context in (contextlib.nullcontext, around):
        parameter.grad = None
        with context():
            [log_prob] = duel.backward([window], [1.0])
            [scored] = duel.log_prob([window])
        found.append((parameter.grad.clone(), log_prob, scored.log_prob))
    (plain, *values), (inside, *again) = found
    assert (plain - inside).norm() <= 1e-5 * plain.norm()
    assert again == pytest.approx(values, abs=1e-4)


def test_what_has_no_gradient():
    toy = Toy(length=8)
    duel = Duel(toy, rule="greedy", block=3)
    with pytest.raises(DuelError, match=r"logits have no gradient: its parameters are frozen or quantized"):
        duel.backward(WINDOWS[:1], [1.0])
    with pytest.raises(DuelError, match="a weight for each window; got 1 windows and 2 weights"):
        duel.backward(WINDOWS[:1], [1.0, 2.0])
    with pytest.raises(DuelError, match=r"weights of backward are finite numbers; got \[nan\]"):
        duel.backward(WINDOWS[:1], [math.nan])
    with pytest.raises(DuelError, match="the order of each window; got 1, 0 orders"):
        duel.backward(WINDOWS[:1], [1.0], reveal_steps=[])
    with pytest.raises(DuelError, match="has 5 target tokens but 2 steps"):
        duel.backward(WINDOWS[:1], [1.0], reveal_steps=[(0, 1)])
    with pytest.raises(DuelError, match="at least 1; got 0"):
        duel.backward(WINDOWS[:1], [1.0], batch_size=0)
    with pytest.raises(DuelError, match="Window 0 has a token of probability 0"):
        Duel(Warped(trainable(Toy, length=8), top_k=1), rule="left_to_right", block=3).backward(WINDOWS[:1], [1.0])
    cached = Duel.from_model(tiny.network("bert"), tiny.tokenizer(), cache="dual", block=3)
    with pytest.raises(DuelError, match="cache=dual keeps keys and values without their gradients"):
        cached.backward([Window((6,), (7, 8))], [1.0])


def whole_row(denoiser, row):
    """The features of a row in one call, with nothing kept from another one, (1, L, D)."""
    ids, position = torch.tensor([row]), torch.arange(len(row))
    if denoiser.attention == "bidirectional":
        return denoiser.features(ids, None)
    seen = position[:, None] // denoiser.block >= position // denoiser.block  # (L, L)
    return denoiser.stream(ids, position[None], seen[None], None)[0]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["dream", "sdar", "fast-dllm-v2"])
def test_decoders_whose_logits_are_shifted_or_whose_blocks_are_causal(tmp_path, name):
    """Against autograd through the unrolled sum, each state in one call. Rows have several blocks."""
    case = CASES[name]
    path, _ = write(tmp_path, case)
    denoiser = load(path, device="cpu", dtype="float64", **case.options)
    block = denoiser.block or 3
    duel = Duel(denoiser, rule="greedy", block=block, grid="row")
    tokens = torch.randint(6, 30, (15,), generator=torch.Generator().manual_seed(2)).tolist()
    windows, weights = [Window(tokens[:2], tokens[2:]), Window(tokens[:5], tokens[9:])], [1.0, -0.5]
    orders = [scored.reveal_steps for scored in duel.log_prob(windows)]
    duel.backward(windows, weights, batch_size=2)
    parameters = list(denoiser.model.parameters())
    ours = [parameter.grad for parameter in parameters]
    denoiser.model.zero_grad()
    for window, weight, steps in zip(windows, weights, orders, strict=True):
        origin, ids = len(window.context), [*window.context, *window.target]
        for start in range(0, len(ids), block):
            inside = [p for p in range(start, min(start + block, len(ids))) if p >= origin]
            for step in range(1 + max((steps[p - origin] for p in inside), default=-1)):
                masked = {p for p in inside if steps[p - origin] >= step}
                later = range(start + block, len(ids) if denoiser.block is None else 0)
                row = [denoiser.mask_id if p in masked or p in later else token for p, token in enumerate(ids)]
                if denoiser.block:
                    row = (row + [denoiser.mask_id] * block)[: start + block]
                logits = denoiser.head(whole_row(denoiser, row)[0]).masked_fill(denoiser.excluded, -math.inf)  # (L, V)
                log_p = logits.log_softmax(-1)
                picked = [p for p in inside if steps[p - origin] == step]
                (weight * sum(log_p[p - denoiser.shift, ids[p]] for p in picked)).backward()
    for mine, parameter in zip(ours, parameters, strict=True):
        if parameter.grad is not None:
            assert (mine - parameter.grad).abs().max() <= 1e-5 * parameter.grad.abs().max()
    assert sum(grad is not None for grad in ours) == sum(parameter.grad is not None for parameter in parameters) > 10
