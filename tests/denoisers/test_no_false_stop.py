"""No ordinary network stops a run: every family in float32, alone and under each cache that it takes, many rows a call.

Slow tests cover every family; the plain ones a mixture of experts and a demonstration network.
"""

import pytest
import torch
from networks import NAMES, opened

from lm_eval_duel import load
from lm_eval_duel.core import row_checks
from lm_eval_duel.core.row_checks import FIRST, NOISE
from lm_eval_duel.core.windows import Window
from lm_eval_duel.denoisers.cached.denoiser import Cached
from lm_eval_duel.errors import DuelError
from lm_eval_duel.estimators.duel import DuelEstimator

pytestmark = pytest.mark.row_checks

FAST = ("llada-moe", "demo-bd")
ALL = [*NAMES, "demo-mdm", "demo-bd"]


def windows(denoiser, count=24):
    """Ragged windows of the network's own tokens."""
    tokens = (~denoiser.excluded).nonzero()[:, 0]
    generator = torch.Generator().manual_seed(1)
    for n in range(count):
        length = min(denoiser.max_length - 2, 10 + n % 3 * 6)
        ids = tokens[torch.randint(len(tokens), (length,), generator=generator)].tolist()
        yield Window(ids[:2], ids[2:])


def networks(denoiser):
    """A network, and it under each cache that it takes."""
    yield denoiser
    for cache in ("prefix", "dual"):
        try:
            yield Cached(denoiser, cache)
        except DuelError:
            return


@pytest.mark.parametrize("name", [pytest.param(name, marks=() if name in FAST else pytest.mark.slow) for name in ALL])
def test_rows_alone_are_rows_in_a_batch(name, tmp_path, monkeypatch, subtests):
    found, difference = [], row_checks.difference
    monkeypatch.setattr(row_checks, "difference", lambda *planes: found.append(difference(*planes)) or found[-1])
    denoiser = load(name, device="cpu") if name.startswith("demo") else opened(name, tmp_path)[0]
    for network in networks(denoiser):
        with subtests.test(cache=network.cache):
            rule = "greedy:k=2:seed_first=true" if network.shift and network.cache else "greedy:k=2"
            duel = DuelEstimator(network, "left_to_right" if network.attention == "causal" else rule)
            duel.log_prob(list(windows(network)))
            assert duel.counts.rows_checked >= FIRST and duel.counts.rows_differing == 0
            assert max(found) < NOISE / 10
