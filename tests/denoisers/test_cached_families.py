"""Every family under a cache, on tiny random checkpoints: against the plain reference that keeps no keys.

The reference replaces hidden states before every layer of the very network by those of the block's start, with hooks.
"""

import math

import pytest
import tiny
from attends import reference
from close import close_nats
from decoder_reference import CASES, write
from dit_reference import opened
from encoder_reference import ENCODERS
from harness_requests import ask
from laws import slow_but
from textbook import score
from transformers import CONFIG_MAPPING

from lm_eval_duel import denoisers, rules
from lm_eval_duel.bench import run as bench
from lm_eval_duel.bench.arms import Bench
from lm_eval_duel.bench.options import parse
from lm_eval_duel.core.windows import Window
from lm_eval_duel.denoisers.cached.denoiser import Cached
from lm_eval_duel.denoisers.wrappers.guidance import Guided
from lm_eval_duel.denoisers.wrappers.warpers import Warped
from lm_eval_duel.errors import DuelError
from lm_eval_duel.estimators.duel import DuelEstimator
from lm_eval_duel.harness.lm import DuelMDM
from lm_eval_duel.harness.requests import make_request

CACHES = ["prefix", "dual"]
RULES = ["greedy", "margin:k=2", "threshold:mu=0.3", "entropy_bound:gamma=1.0", "random:k=2"]
DECODERS = [name for name in CASES if CASES[name].attention == "bidirectional"]
DITS = ["mdlm", "bidirectional", "one-block"]
MASKED = ["bert", "roberta", "modernbert"]
NATIVE = [name for name in ENCODERS if name in CONFIG_MAPPING or name != "eurobert"]  # transformers 4 has no EuroBERT
LAYER_NORMS = [*MASKED, "diffugpt", "mmbert"]
NAMES, FAST = [*DECODERS, *DITS, *MASKED, *NATIVE], ["llada", "dream", "mdlm", "roberta", "modernbert"]
FAMILIES = slow_but(NAMES, FAST)
DRAWN = [  # every family in both dtypes, under one of the caches in turn
    pytest.param(
        *(name, CACHES[(n + turn) % 2], dtype), marks=() if name in FAST and dtype == "float64" else pytest.mark.slow
    )
    for turn, dtype in enumerate(("float64", "float32"))
    for n, name in enumerate(NAMES)
]
COARSE = [
    pytest.param(name, CACHES[n % 2], marks=() if name == "modernbert" else pytest.mark.slow)
    for n, name in enumerate([*DECODERS, *MASKED])
]
WINDOWS = [
    Window((2, 6), (7, 9, 30, 12, 8, 15, 5, 21, 11), (3,)),
    Window((2,), (10, 9), (3,)),
    Window((14, 20, 9), (10, 9, 31, 12), (13,)),
    Window((2, 14, 5, 9, 9), (33, 6, 7), (3,)),
    Window((9,), (10, 9, 31, 12), (13, 2), tail=4),
    Window((), (8, 8, 20, 31, 6)),
]


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """The denoiser of a family without a cache, in float64 if it can be, its layers, and windows that it can score."""
    found = {}

    def load(name, dtype="float64"):
        key = name, dtype
        options = {} if name in DITS else {"dtype": dtype}
        if key not in found:
            folder = tmp_path_factory.mktemp(name)
            if name in CASES:
                path, _ = write(folder, CASES[name])
                denoiser = denoisers.load(path, device="cpu", **{**CASES[name].options, **options})
                base = denoiser.model.base_model
                layers = base.h if name == "diffugpt" else base.layers
            elif name in DITS:
                denoiser, _ = opened(folder, name)
                layers = denoiser.network.blocks
            elif name in ENCODERS:
                denoiser = denoisers.load(ENCODERS[name](folder)[0], device="cpu", **options)
                layers = denoiser.model.model.layers
            else:
                denoiser = denoisers.load(tiny.checkpoint(folder, name), device="cpu", **options)
                base = denoiser.model.base_model
                layers = base.layers if name == "modernbert" else base.encoder.layer
            fitting = [w for w in WINDOWS if len(w.context) >= denoiser.shift and w.length <= denoiser.max_length]
            windows = [known_tokens(window, denoiser) for window in fitting]
            found[key] = denoiser, layers, windows
        return found[key]

    return load


def known_tokens(window, denoiser):
    """The same window, with other tokens for those that this network does not have."""
    known = (~denoiser.excluded).nonzero()[:, 0].tolist()

    def replace(part):
        return tuple(token if token in known else known[token % len(known)] for token in part)

    return Window(replace(window.context), replace(window.target), replace(window.suffix), window.tail)


def rule_of(denoiser, rule):
    return rules.parse(f"{rule}:seed_first=true" if denoiser.shift else rule)


def close(nats, name, dtype="float64"):
    """Norms in float32 remain within a decoder in float64."""
    exact = dtype == "float64" and name in LAYER_NORMS
    return pytest.approx(nats, rel=0, abs=1e-9) if exact else close_nats(nats)


@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("name", FAMILIES)
def test_equals_the_plain_reference(plain, name, cache):
    denoiser, layers, windows = plain(name)
    cached = Cached(denoiser, cache)
    for rule in RULES:
        rule, near_ties = rule_of(denoiser, rule), 0
        for window, scored in zip(windows, DuelEstimator(cached, rule, 4).log_prob(windows), strict=True):
            logits_of = reference(denoiser, layers, cache, window, 4)
            _, steps, nats, greedy, nfe = score(
                logits_of,
                denoiser.mask_id,
                denoiser.excluded,
                rule,
                4,
                window,
                tie_when_all_mask=denoiser.relative_positions,
            )
            if scored.near_ties:  # the order is at the mercy of float noise
                near_ties += 1
                continue
            assert (scored.reveal_steps, scored.is_greedy, scored.nfe) == (steps, greedy, nfe)
            assert scored.token_logprobs == close(nats, name)
        assert near_ties <= 1, "choose other windows"


@pytest.mark.parametrize(("name", "cache", "dtype"), DRAWN)
def test_samples_are_scored_as_they_were_drawn_and_alone_as_in_a_batch(plain, name, cache, dtype):
    denoiser, _, windows = plain(name, dtype)
    duel = DuelEstimator(Cached(denoiser, cache), rule_of(denoiser, "greedy"), 3)
    contexts = [windows[0].context, windows[1].context, windows[0].context]
    drawn = duel.sample(contexts, 7, seed=5)
    rows = [Window(context, sample.tokens) for context, sample in zip(contexts, drawn, strict=True)]
    alone = DuelEstimator(Cached(denoiser, cache), duel.rule, 3)
    alone.use_single_rows()
    for sample, *scored in zip(drawn, duel.log_prob(rows), alone.log_prob(rows), strict=True):
        for one in scored:
            if not one.near_ties or (dtype == "float64" and name in LAYER_NORMS):
                assert one.reveal_steps == sample.reveal_steps
                assert one.token_logprobs == close(sample.token_logprobs, name, dtype)


# ---------------------------------------------------------------- what is not covered, and what goes with a cache


def test_networks_whose_attention_cannot_be_steered_say_so(plain, tmp_path):
    eager, _, _ = plain("modernbert")
    before = eager.model.config._attn_implementation
    eager.model.config._attn_implementation = "eager"
    try:
        with pytest.raises(DuelError, match=r"scaled_dot_product_attention, once in every layer\. Use cache=none"):
            Cached(eager, "dual")
    finally:
        eager.model.config._attn_implementation = before
    sedd, _ = opened(tmp_path, "sedd")
    with pytest.raises(DuelError, match="a sedd network gets another noise level at each step"):
        Cached(sedd, "dual")


@pytest.mark.parametrize(("name", "cache"), COARSE)
def test_bfloat16_follows_its_own_samples(plain, name, cache):
    """A DiT runs in float32 only."""
    denoiser, _, windows = plain(name, dtype="bfloat16")
    duel = DuelEstimator(Cached(denoiser, cache), rule_of(denoiser, "greedy"), 3, batch_size=1)
    duel.use_single_rows()
    drawn = duel.sample([windows[0].context], 7, seed=5)[0]
    scored = duel.log_prob([Window(windows[0].context, drawn.tokens)])[0]
    assert scored.reveal_steps == drawn.reveal_steps and scored.token_logprobs == pytest.approx(
        drawn.token_logprobs, abs=1e-9
    )


@pytest.mark.slow
@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("name", ["llada", "dream", *MASKED])
def test_bfloat16_sums_to_one_over_the_last_token(plain, name, cache):
    """Given the others: the last position that is revealed is predicted by a distribution."""
    denoiser, _, _ = plain(name, dtype="bfloat16")
    tokens = (~denoiser.excluded).nonzero()[:, 0].tolist()
    rule = rule_of(denoiser, "left_to_right")
    context = tuple(tokens[3 : 3 + max(1, denoiser.shift)])
    windows = [Window(context, (*tokens[5:9], token)) for token in tokens]
    scored = DuelEstimator(Cached(denoiser, cache), rule, 5, batch_size=1).log_prob(windows)
    total = sum(math.exp(window.token_logprobs[-1]) for window in scored)
    assert total == pytest.approx(1.0, abs=1e-3)


@pytest.mark.parametrize("cache", CACHES)
def test_guidance_and_temperature_go_around_a_cache(plain, cache):
    denoiser, _, windows = plain("llada")
    for wrapped in (
        Warped(Cached(denoiser, cache), 0.7, top_k=5),
        Guided(Cached(denoiser, cache), 1.5),
        Warped(Guided(Cached(denoiser, cache), 0.5), 1.3),
    ):
        duel = DuelEstimator(wrapped, "greedy", 3)
        drawn = duel.sample([w.context for w in windows[:3]], 7, seed=5)
        rows = [Window(w.context, d.tokens) for w, d in zip(windows, drawn, strict=False)]
        for sample, scored in zip(drawn, duel.log_prob(rows), strict=True):
            assert scored.reveal_steps == sample.reveal_steps
            assert scored.token_logprobs == pytest.approx(sample.token_logprobs, abs=1e-4)
        assert wrapped.describe()["cache"] == cache


def test_temperature_one_and_no_guidance_are_the_cached_network(plain):
    denoiser, _, windows = plain("llada")
    windows = windows[:4]
    cached = DuelEstimator(Cached(denoiser, "dual"), "greedy", 3).log_prob(windows)
    for wrapped in (Warped(Cached(denoiser, "dual"), 1.0), Guided(Cached(denoiser, "dual"), 0.0)):
        for one, other in zip(DuelEstimator(wrapped, "greedy", 3).log_prob(windows), cached, strict=True):
            assert one.reveal_steps == other.reveal_steps and one.token_logprobs == pytest.approx(
                other.token_logprobs, abs=1e-4
            )


# ---------------------------------------------------------------- the harness's model


def test_the_model_of_the_harness(tmp_path):
    folder = tiny.checkpoint(tmp_path, "modernbert")
    options = {"pretrained": folder, "rule": "greedy", "block": 4, "device": "cpu"}
    plain, cached = DuelMDM(**options), DuelMDM(**options, cache="dual", verify=2)
    assert "cache" not in plain.spec and cached.spec["cache"] == "dual"
    assert plain.fingerprint != cached.fingerprint == DuelMDM(**options, cache="dual").fingerprint
    request = ask("loglikelihood", ("a b c", " d e f g h i"), ("b", " the of and a b c d"))
    answers = cached.loglikelihood(request, disable_tqdm=True)
    window = Window((2, *cached.tok_encode("a b c")), cached.tok_encode(" d e f g h i"), (3,))
    by_hand = DuelEstimator(Cached(plain.denoiser, "dual"), "greedy", 4).log_prob([window])[0]
    assert answers[0] == (pytest.approx(by_hand.log_prob, abs=1e-4), by_hand.is_greedy)
    assert [each.difference < 1e-3 for each in cached.run.stats.checked] == [True, True]
    assert answers[0][0] != pytest.approx(plain.loglikelihood(request, disable_tqdm=True)[0][0], abs=1e-3)
    generated = [make_request("generate_until", {}, ("a b", {"max_gen_toks": 8}), "toy", 0, 1)]
    text = cached.generate_until(generated, disable_tqdm=True)[0]
    decoded = DuelEstimator(cached.denoiser, "greedy", 4).sample(
        [(2, *cached.tok_encode("a b"))], 8, suffix=(3,), do_sample=False
    )[0]
    assert text == cached.tokenizer.decode(decoded.tokens, skip_special_tokens=False)


@pytest.mark.parametrize("cache", CACHES)
def test_bench_compares_ours_with_the_deployed_loop(cache):
    options = {"length": 24, "windows": 2, "vocab": 40, "layers": 2, "hidden_size": 64, "repeats": 1, "device": "cpu"}
    words = [f"--{name}={value}" for name, value in options.items()]
    figures = bench.measure(Bench(parse([*words, "--no_memory", "--model_args", f"block=8,cache={cache}"])))
    assert figures["loop"].startswith("cached") and figures["compared"]["changed_picks"] == 0
    assert figures["compared"]["max_abs_diff_nats"] < 1e-3
    later = {"dual": 7 * 8 * 3, "prefix": 7 * (24 + 16 + 8)}[cache]
    assert figures["arms"]["loop"]["token_rows"] == 2 * (3 * 24 + later)
    assert figures["arms"]["uncached"]["token_rows"] <= 2 * 24 * 24 and figures["ratios"]["uncached / ours"] > 0
    assert f"cache={cache}" in bench.table(figures)
