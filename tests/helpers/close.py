"""How closely tests compare what float32 computed."""

import pytest


def close_nats(nats, length=None):
    """To compare with nats of a window whose target has `length` tokens: of the window, or of each of its tokens.

    float32 gives no more: another instruction set, thread count or library of matrix products changes the last bits.
    Windows with near ties may differ in order as well, and so by anything: leave them out.
    """
    within = max(1e-4, 1e-6 * (len(nats) if length is None else length))
    return pytest.approx(nats, rel=0, abs=within)
