"""How closely tests compare what float32 computed."""

import pytest
import torch


def close_nats(nats, length=None):
    """To compare with nats of a window whose target has `length` tokens: of the window, or of each of its tokens.

    float32 gives no more: another instruction set, thread count or library of matrix products changes the last bits.
    Windows with near ties may differ in order as well, and so by anything: leave them out.
    """
    if length is None:
        length = len(nats)
    return pytest.approx(nats, rel=0, abs=max(1e-4, 1e-6 * length))


def exact(nats, length=None):
    """The same for float64."""
    return pytest.approx(nats, rel=0, abs=1e-9)


def check(scored, expected, close=close_nats):
    """Assert that a window has the order and the nats of `textbook.score`."""
    _, steps, nats, is_greedy, nfe = expected
    assert scored.reveal_steps == steps
    assert scored.is_greedy == is_greedy
    assert scored.nfe == nfe
    assert scored.token_logprobs == close(nats)


def same_scores(scores, expected):
    """Assert that windows have the same orders and close nats, but for those with a near tie, which are few."""
    near_ties = 0
    for score, other in zip(scores, expected, strict=True):
        if score.near_ties or other.near_ties:
            near_ties += 1
            continue
        assert score.reveal_steps == other.reveal_steps
        assert score.is_greedy == other.is_greedy
        assert score.nfe == other.nfe
        assert score.token_logprobs == close_nats(other.token_logprobs)
    assert 2 * near_ties < len(scores), "choose other windows"


def require_equal(gradients, expected, within):
    """Gradients of the same parameters, relative to the length of all of them together."""
    assert [gradient is None for gradient in gradients] == [gradient is None for gradient in expected]
    ours = flat(gradients)
    plain = flat(expected)
    assert plain.norm() > 0.01
    assert (ours - plain).norm() <= within * plain.norm()


def flat(gradients):
    """Gradients in one row, but for parameters that have none."""
    return torch.cat([gradient.flatten() for gradient in gradients if gradient is not None])
