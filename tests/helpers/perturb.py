"""Another machine's float32: matrix products and attention whose last bits are not this machine's.

    LM_EVAL_DUEL_PERTURB=1 pytest tests/{core,estimators,library,cli/test_score.py,test_laws.py,test_golden.py}

multiplies what `linear` and `scaled_dot_product_attention` return in float32 by 1 + 2e-7 x (a sign for each element).
The signs are fixed for a shape and unrelated between shapes, as rounding is in a library that chooses its kernel by the
size of a batch. What `math` and numpy compute in float64 is nudged as well (`golden`). Other processes
that a test starts keep their own rounding: they compare two machines.
"""

import functools
import sys

import golden
import torch

from lm_eval_duel.denoisers.cached import kept_keys as steering

NUDGE = 2e-7  # about two units in the last place
ATTENTION, LINEAR = steering.ATTENTION, torch.nn.functional.linear


@functools.lru_cache(maxsize=512)
def factors(shape):
    """What to multiply an output of `shape` by, on the CPU; torch's generator stays as it is."""
    seed = functools.reduce(lambda seed, size: (seed * 1_000_003 + size) % (1 << 62), shape, len(shape))
    signs = torch.randint(2, shape, generator=torch.Generator().manual_seed(seed), device="cpu")
    return 1 + NUDGE * (2 * signs - 1).float()


def nudged(call):
    """`call`, with the last bits of its float32 output changed."""

    @functools.wraps(call)
    def wrapper(*args, **kwargs):
        out = call(*args, **kwargs)
        if out.dtype != torch.float32 or out.device.type != "cpu":
            return out
        with torch.inference_mode(False):  # kept factors must serve calls that record a graph
            kept = factors(tuple(out.shape))
        return out * kept

    return wrapper


def install():
    """Patch torch."""
    torch.nn.functional.linear = nudged(LINEAR)
    torch.nn.functional.scaled_dot_product_attention = nudged(ATTENTION)
    golden.nudge_functions(by=4 * sys.float_info.epsilon)
