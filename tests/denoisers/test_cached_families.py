"""Every family under a cache, against the plain reference that keeps no keys.

The reference replaces hidden states before every layer of the very network by those of the block's start, with hooks.
"""

import pytest
import torch
from attends import reference
from close import check, close_nats, exact, same_scores
from decoder_reference import CASES
from networks import DITS, NAMES, TEXTS, textbook

from lm_eval_duel import Duel
from lm_eval_duel.core.windows import Window
from lm_eval_duel.denoisers.cached.denoiser import Cached
from lm_eval_duel.denoisers.wrappers import Guided, Warped
from lm_eval_duel.errors import DuelError
from lm_eval_duel.estimators.duel import DuelEstimator

CACHES = ["prefix", "dual"]
CACHED = [name for name in NAMES if name in CASES and CASES[name].attention == "bidirectional"]
CACHED += ["mdlm", "bidirectional", "one-block", "bert", "roberta", "modernbert", *TEXTS]
LAYER_NORMS = ["bert", "roberta", "modernbert", "diffugpt"]  # those in float32 remain within a decoder


def in_float64(name):
    return {} if name in DITS else {"dtype": "float64"}


def seeded(denoiser, rule):
    return f"{rule}:seed_first=true" if denoiser.shift else rule


QUICK = dict(zip(["llada", "dream", "mdlm", "modernbert"], CACHES * 3, strict=False))
OTHERS = [(name, CACHES[QUICK.get(name, CACHES[n % 2]) == CACHES[0]]) for n, name in enumerate(CACHED)]
EACH = [*QUICK.items(), *(pytest.param(*each, marks=pytest.mark.slow) for each in OTHERS)]


@pytest.mark.row_checks
@pytest.mark.parametrize(("name", "cache"), EACH)
def test_a_cache_equals_the_plain_reference(family, name, cache):
    network = family(name, **in_float64(name))
    denoiser, windows, near_ties = network.denoiser, network.windows, 0
    model = denoiser.network if name in DITS else denoiser.model
    layers = next(part for part in model.modules() if isinstance(part, torch.nn.ModuleList))
    close = exact if name in LAYER_NORMS else close_nats
    cached = Cached(denoiser, cache)
    for rule in (seeded(denoiser, rule) for rule in ("greedy", "entropy_bound:gamma=1.0")):
        for window, scored in zip(windows, Duel(cached, rule, 4).log_prob(windows), strict=True):
            if scored.near_ties:  # the order is at the mercy of float noise
                near_ties += 1
                continue
            logits_of = reference(denoiser, layers, cache, window, 4)
            check(scored, textbook(network, rule, window, logits_of), close)
    assert near_ties <= 2, "choose other windows"
    duel, alone = (DuelEstimator(cached, seeded(denoiser, "greedy"), 3) for _ in range(2))
    alone.use_single_rows()
    contexts = [windows[0].context, windows[1].context, windows[0].context]
    drawn = duel.sample(contexts, 7, seed=5)
    rows = [Window(context, sample.tokens) for context, sample in zip(contexts, drawn, strict=True)]
    for other in (duel, alone):
        same_scores(drawn, other.log_prob(rows))


def test_a_cache_in_bfloat16_follows_its_own_samples(family):
    network = family("modernbert", dtype="bfloat16")
    duel = DuelEstimator(Cached(network.denoiser, "dual"), "greedy", 3, batch_size=1)
    duel.use_single_rows()
    [drawn] = duel.sample([network.windows[0].context], 7, seed=5)
    [scored] = duel.log_prob([Window(network.windows[0].context, drawn.tokens)])
    assert scored.reveal_steps == drawn.reveal_steps
    assert scored.token_logprobs == pytest.approx(drawn.token_logprobs, abs=1e-9)


def test_guidance_and_temperature_go_around_a_cache(family):
    network = family("llada", dtype="float64")
    cached, windows = Cached(network.denoiser, "dual"), network.windows[:3]
    wrapped = Warped(Guided(cached, 0.5), 1.3, top_k=5)
    duel = Duel(wrapped, "greedy", 3)
    drawn = duel.sample([w.context for w in windows], 7, seed=5)
    same_scores(drawn, duel.log_prob([Window(w.context, d.tokens) for w, d in zip(windows, drawn, strict=True)]))
    assert wrapped.describe()["cache"] == "dual"
    nothing = Duel(Warped(Guided(cached, 0.0), 1.0), "greedy", 3)
    same_scores(nothing.log_prob(windows), Duel(cached, "greedy", 3).log_prob(windows))


def test_networks_that_no_cache_can_be_put_in_say_so(family, monkeypatch):
    eager = family("modernbert").denoiser
    monkeypatch.setattr(eager.model.config, "_attn_implementation", "eager")
    for denoiser in (eager, *(family(name).denoiser for name in ("sedd", "gidd", "esm-2", "sdar"))):
        with pytest.raises(DuelError, match="cache=dual"):
            Cached(denoiser, "dual")
