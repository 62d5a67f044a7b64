"""How closely tests compare what float32 computed."""

import pytest
import torch


def close_nats(nats, length=None):
    """To compare with nats of a window whose target has `length` tokens: of the window, or of each of its tokens.

    float32 gives no more: another instruction set, thread count or library of matrix products changes the last bits.
    Windows with near ties may differ in order as well, and so by anything: leave them out.
    """
    within = max(1e-4, 1e-6 * (len(nats) if length is None else length))
    return pytest.approx(nats, rel=0, abs=within)


def exact(nats, length=None):
    """The same for float64."""
    return pytest.approx(nats, rel=0, abs=1e-9)


def check(scored, expected, close=close_nats):
    """Assert that a window has the order and the nats of `textbook.score`."""
    _, steps, nats, greedy, nfe = expected
    assert (scored.reveal_steps, scored.is_greedy, scored.nfe) == (steps, greedy, nfe)
    assert scored.token_logprobs == close(nats)


def same_scores(ones, others):
    """Assert that windows have the same orders and close nats, but for those with a near tie, which are few."""
    pairs = list(zip(ones, others, strict=True))
    clear = [pair for pair in pairs if not any(one.near_ties for one in pair)]
    assert 2 * len(clear) > len(pairs), "choose other windows"
    for one, other in clear:
        assert (one.reveal_steps, one.is_greedy, one.nfe) == (other.reveal_steps, other.is_greedy, other.nfe)
        assert one.token_logprobs == close_nats(other.token_logprobs)


def require_equal(found, wanted, within):
    """Gradients of the same parameters, relative to the length of all of them together."""
    assert [grad is None for grad in found] == [grad is None for grad in wanted]
    ours, plain = (torch.cat([grad.flatten() for grad in grads if grad is not None]) for grads in (found, wanted))
    assert plain.norm() > 0.01
    assert (ours - plain).norm() <= within * plain.norm()
