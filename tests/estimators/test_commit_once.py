"""Commit-once sampling under noise of random tokens: the exact likelihood given the noise."""

import dataclasses
import itertools
import math
from collections import Counter

import dit_reference
import networks
import pytest
import torch
from laws import slow_but
from noised_toys import Conditioned, NoisyToy

from lm_eval_duel import Duel, denoisers
from lm_eval_duel.audit.checked import REFERENCE, RUNS_RULE, CheckedWindow
from lm_eval_duel.audit.contradictions import contradictions
from lm_eval_duel.audit.recompute import recompute
from lm_eval_duel.core import noise as noises
from lm_eval_duel.core.denoiser import View
from lm_eval_duel.core.windows import Window
from lm_eval_duel.denoisers.cached.denoiser import Cached
from lm_eval_duel.denoisers.filters import warped
from lm_eval_duel.denoisers.wrappers import Guided
from lm_eval_duel.errors import DuelError
from lm_eval_duel.estimators.duel import DuelEstimator
from lm_eval_duel.estimators.totals import Total
from lm_eval_duel.harness.store import decode, decode_request, encode, encode_request

TOYS = {
    "uniform": NoisyToy,
    "hybrid": lambda **size: NoisyToy(share=0.3, **size),
    "conditioned": Conditioned,
    "conditioned hybrid": lambda **size: Conditioned(share=0.3, **size),
}
RULES = ("greedy", "threshold:mu=0.5", "left_to_right", "random", "quota:steps=2", "klass:mu=0.6:nu=0.1")


def every_text(length, tokens=3):
    return itertools.product(range(tokens), repeat=length)


def total(scores):
    return math.fsum(math.exp(score.log_prob) for score in scores)


@pytest.mark.parametrize("context", [(), pytest.param((1,), marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", slow_but(TOYS, ("conditioned hybrid",)))
def test_given_the_noise_it_is_a_distribution(name, context, subtests):
    """And it is that of its sampler, of a row alone and of a recorded order; another seed gives another one."""
    toy = TOYS[name](length=4)
    texts = [Window(context, text) for text in every_text(3)]
    for seed, rule in enumerate(RULES):
        with subtests.test(rule):
            duel = Duel(toy, rule, 2, noise_seed=seed)
            scores = duel.log_prob(texts)
            assert total(scores) == pytest.approx(1, abs=1e-12)

            replayed = duel.replay(texts, [score.reveal_steps for score in scores])
            for score, along_its_order in zip(scores, replayed, strict=True):
                assert along_its_order.log_prob == pytest.approx(score.log_prob, abs=1e-12)

            [alone] = Duel(toy, rule, 2, noise_seed=seed, batch_size=1).log_prob(texts[5:6])
            assert alone.log_prob == pytest.approx(scores[5].log_prob, abs=1e-12)

            for sample in duel.sample([context] * 4, 3, seed=1):
                [score] = duel.log_prob([Window(context, sample.tokens)])
                assert sample.log_prob == pytest.approx(score.log_prob, abs=1e-9)
                assert sample.reveal_steps == score.reveal_steps

            [best] = duel.sample([context], 3, do_sample=False)
            [score] = duel.log_prob([Window(context, best.tokens)])
            assert score.is_greedy

            change = 0.0  # of one text, under three other seeds
            for other_seed in range(seed + 50, seed + 53):
                [other] = Duel(toy, rule, 2, noise_seed=other_seed).log_prob(texts[3:4])
                change = max(change, abs(other.log_prob - scores[3].log_prob))
            assert change > 1e-3


@pytest.mark.parametrize("window", [((1,), (2,), 0), ((), (0, 1), 0), ((2,), (), 2)])
def test_contexts_suffixes_and_tails(window):
    context, suffix, tail = window
    toy = NoisyToy(length=6)
    duel = Duel(toy, "greedy", 2, noise_seed=3)
    scores = duel.log_prob([Window(context, text, suffix, tail) for text in every_text(2)])
    assert total(scores) == pytest.approx(1, abs=1e-12)


def test_noise_that_depends_on_the_text_gives_no_distribution(monkeypatch):
    """The negative control: keyed by the window's key, which hashes the target."""
    toy = NoisyToy()
    duel = Duel(NoisyToy(), "greedy", 3)
    texts = [Window((), text) for text in every_text(3)]
    keys = torch.tensor([window.key for window in texts])
    place = View.noise_keys

    def keyed(view, lanes, columns):
        row = [texts.index(Window((), tuple(ids))) for ids in view.rows.ids[lanes.row].tolist()]
        return place(view, lanes, columns)._replace(seed=keys[row][:, None])

    monkeypatch.setattr(View, "noise_keys", keyed)
    assert abs(total(duel.log_prob(texts)) - 1) > 0.02
    assert toy.noise_training.noise.name == "uniform"


@pytest.mark.parametrize("noise", [noises.Uniform(5), noises.Hybrid(5, 0.2)])
def test_masked_positions_show_the_marginal_of_the_noise(noise):
    count = 40_000
    share = torch.tensor([0.6], dtype=torch.float64)
    at = torch.tensor([[0]])
    place = noises.NoiseKeys(at, at, at, torch.arange(count)[None])
    mask_id = 5 if noise.name != "uniform" else None

    shown = noises.masked_tokens(noise, torch.arange(5), mask_id, share, place)[0]

    frequencies = shown.bincount(minlength=6).double() / count
    _, u, m = noise.level(share[:, None], 1 - share[:, None])
    marginal = torch.tensor([*[float(u)] * 5, float(m)], dtype=torch.float64)
    marginal = marginal / marginal.sum()
    assert torch.allclose(frequencies, marginal, atol=0.012)


def test_a_row_of_one_token_is_an_exact_tie():
    """GIDD shows [MASK] everywhere at t = 1; under uniform noise a row may be of one token by chance."""

    class Rotary(NoisyToy):
        relative_positions = True

        def features(self, ids, real, t=None):
            logits = super().features(ids, real, t)  # (R, L, V)
            one_token = (ids == ids[:, :1]).all(1)[:, None, None]
            noise = 1e-9 * torch.arange(ids.shape[1], 0, -1)[:, None] * torch.arange(self.vocab_size)
            return torch.where(one_token, logits[:, :1] + noise, logits)

    [score] = Duel(Rotary(share=0.3), "greedy:k=1", 3).log_prob([Window((), (0, 1, 2))])
    assert score.all_mask_starts >= 1
    assert score.reveal_steps[0] == 0

    [score] = Duel(Rotary(length=1, tokens=2), "greedy", 1).log_prob([Window((), (0,))])
    assert score.all_mask_starts == 1


# ---------------------------------------------------------------- checkpoints


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """Duo, UDLM and GIDD, tiny and random: the folder and the denoiser of each."""
    loaded = {}
    for name in networks.NOISED:
        path, _ = dit_reference.write(tmp_path_factory.mktemp(name), name)
        tokenizer = None
        if name != "gidd-uniform":
            tokenizer = dit_reference.words(12)
            tokenizer.save_pretrained(path)
        loaded[name] = (path, denoisers.load(path, device="cpu", tokenizer=tokenizer))
    return loaded


NOISED = list(itertools.product(networks.NOISED, ["greedy", "quota:steps=3"]))


@pytest.mark.row_checks
@pytest.mark.parametrize(("name", "rule"), slow_but(NOISED, [NOISED[0], NOISED[3], NOISED[4]]))
def test_checkpoints_equal_the_specification(checkpoints, name, rule):
    """Window by window through `reference.log_likelihood_given_noise`, whose noise is made once more."""
    _, denoiser = checkpoints[name]
    duel = Duel(denoiser, rule, 4, noise_seed=9)
    windows = [Window((3,), (5, 9, 1, 1, 4, 7), (2,)), Window((), (5, 9, 2)), Window((7, 7), (8, 1, 1, 0), (), 4)]

    scores = duel.log_prob(windows)

    assert duel.counts.rows_checked >= 8
    assert duel.counts.rows_differing == 0
    for window, score in zip(windows, scores, strict=True):
        recomputed = recompute(duel.estimator, window, score)
        assert recomputed.route == (REFERENCE if rule == "greedy" else RUNS_RULE)
        assert not recomputed.problems
        assert not recomputed.other_picks
        assert recomputed.log_prob == pytest.approx(score.log_prob, abs=1e-4)


@pytest.mark.parametrize("arguments", [{"temperature": 0.5}, {"top_k": 3}, {"temperature": 1.5, "top_p": 0.8}])
def test_filters_leave_a_distribution_that_the_specification_has_too(checkpoints, arguments):
    """As model args: the probabilities of all texts sum to 1, and the audit's own filters give the same values."""
    path, _ = checkpoints["duo"]
    denoiser = denoisers.load(path, device="cpu", **arguments)
    duel = Duel(denoiser, "greedy", 3, noise_seed=9)

    windows = [Window((), text) for text in every_text(2, denoiser.vocab_size)]
    assert total(duel.log_prob(windows)) == pytest.approx(1, abs=1e-4)

    [sample] = duel.sample([(3,)], 5, seed=1)
    window = Window((3,), sample.tokens)
    [score] = duel.log_prob([window])
    recomputed = recompute(duel.estimator, window, score)
    assert not recomputed.problems
    assert score.log_prob == pytest.approx(sample.log_prob, abs=1e-4)
    assert score.log_prob == pytest.approx(recomputed.log_prob, abs=1e-4)


def test_an_audit_compares_it_with_no_order_of_masks(checkpoints):
    _, denoiser = checkpoints["duo"]
    duel = Duel(denoiser, "greedy", 4)
    window = Window((3,), (5, 9, 1, 1))
    [score] = duel.log_prob([window])
    recomputed = recompute(duel.estimator, window, score)
    checked = CheckedWindow("here", window, score.log_prob, recomputed, score=score)

    assert not contradictions(duel.estimator, [checked]).problems


def test_the_spec_says_whose_noise_it_is(checkpoints):
    path, denoiser = checkpoints["duo"]
    duel = Duel(denoiser, "greedy", 4, noise_seed=0)
    assert duel.spec["noise_seed"] == "0"
    assert duel.fingerprint != Duel(denoiser, "greedy", 4, noise_seed=1).fingerprint
    assert duel.fingerprint == Duel(denoiser, "greedy", 4).fingerprint

    duel = Duel.from_pretrained(path, rule="greedy", block=4, noise_seed=1, device="cpu")
    [score] = duel.score(["a b c d"])
    assert not score.bound
    assert score.stderr is None
    assert "given the noise of seed 1" in score.note
    [text] = duel.generate(["a b"], max_new_tokens=8, do_sample=True, temperature=0.7, seed=2)
    assert math.isfinite(text.log_prob)


def test_gradients_are_those_of_the_noised_rows(checkpoints):
    _, denoiser = checkpoints["duo"]
    weight = denoiser.network.output_layer.linear.weight
    weight.requires_grad_(True)
    try:
        duel = Duel(denoiser, "greedy", 4)
        window = Window((3,), (5, 9, 1, 1, 4))
        [score] = duel.log_prob([window])
        [log_probs] = duel.differentiable([window], [score.reveal_steps])
        assert log_probs.tolist() == pytest.approx(score.token_logprobs, abs=1e-5)
        log_probs.sum().backward()
        assert weight.grad.abs().sum() > 0
    finally:
        weight.requires_grad_(False)
        weight.grad = None
    with pytest.raises(DuelError, match="self_conditioning"):
        Duel(Conditioned(), "greedy", 3).differentiable([Window((), (0, 1, 2))], [(0, 1, 2)])


@pytest.mark.parametrize(
    ("make", "word"),
    [
        (lambda toy: Duel(toy, estimator="elbo"), "estimator=duel"),
        (lambda toy: Duel(toy, estimator="mixture", block=2), "estimator=duel"),
        (lambda toy: Duel(toy, estimator="sampled_order", block=2), "estimator=duel"),
        (lambda toy: Duel(toy, "greedy", prediction="leave_one_out"), "prediction"),
        (lambda toy: Duel(toy, "greedy", temperatures="0.8:0.4:4"), "temperatures"),
        (lambda toy: Duel(toy, "greedy", self_conditioning="chain"), "self_conditioning"),
        (lambda toy: Duel(toy, "greedy", noise_seed=-1), "noise_seed"),
    ],
)
def test_what_needs_masks_is_refused(make, word):
    with pytest.raises(DuelError, match=word):
        make(NoisyToy())


def test_wrappers(monkeypatch):
    toy = NoisyToy(share=0.3)
    windows = [Window((), (0, 1, 2))]
    [warm] = Duel(toy, "greedy", 3).log_prob(windows)
    [cold] = Duel(warped(toy, 0.5), "greedy", 3).log_prob(windows)
    assert warm.log_prob != pytest.approx(cold.log_prob)
    with pytest.raises(DuelError, match="cfg_scale"):
        Duel(Guided(toy, 1.0), "greedy", 3)
    cached = warped(toy, 0.5)
    cached.cache = "dual"
    with pytest.raises(DuelError, match="cache"):
        Duel(cached, "greedy", 3)
    with pytest.raises(DuelError):
        Cached(toy, "dual")


def test_arguments_of_noise_are_refused_where_masks_are_shown():
    with pytest.raises(DuelError, match="noise_seed"):
        Duel.from_pretrained("demo-mdm", noise_seed=1)


# ---------------------------------------------------------------- several seeds


@pytest.mark.parametrize("name", slow_but(["uniform", "conditioned hybrid"], ["conditioned hybrid"]))
def test_over_seeds_the_mean_and_the_log_mean_are_bounds(name):
    """Of log p(x) = log E p(x | seed), by 2,000 seeds; equal to separate runs."""
    toy = TOYS[name](length=4)
    windows = [Window((), (0, 1, 2)), Window((), (2, 2, 1)), Window((1,), (0, 2))]
    duel = Duel(toy, "greedy", 2, estimator="duel_seeds", noise_seed=5, noise_seeds=3)
    scores = duel.log_prob(windows)
    for n, seed in enumerate((5, 6, 7)):
        alone = Duel(toy, "greedy", 2, noise_seed=seed).log_prob(windows)
        for score, of_seed in zip(scores, alone, strict=True):
            assert score.seeds[n] == pytest.approx(of_seed.log_prob, abs=1e-12)

    of_many_seeds = Duel(toy, "greedy", 2, estimator="duel_seeds", noise_seeds=2000).log_prob(windows)
    of_few_seeds = Duel(toy, "greedy", 2, estimator="duel_seeds", noise_seeds=100).log_prob(windows)
    for many, few in zip(of_many_seeds, of_few_seeds, strict=True):
        log_p = many.others["log_mean_exp"].log_prob
        assert many.log_prob < log_p
        assert abs(few.log_prob - many.log_prob) < 4 * few.stderr
        estimate = few.others["log_mean_exp"]
        if estimate.stderr is not None:
            assert abs(estimate.log_prob - log_p) < 5 * estimate.stderr
        assert not few.value.is_exact
        assert few.value.is_bound


SPANNING = "klass:mu=0.4:nu=0.3:kl=authors:across=true"  # its history outlives a block


PATHS = [  # a network, a rule, and by what an audit computes the value
    ("uniform", "greedy", REFERENCE),
    ("uniform", "quota:steps=3", RUNS_RULE),
    ("uniform", SPANNING, RUNS_RULE),
    ("hybrid", "greedy", REFERENCE),
    ("hybrid", "quota:steps=3", RUNS_RULE),
    ("hybrid", SPANNING, RUNS_RULE),
]


@pytest.mark.parametrize(("name", "rule", "route"), slow_but(PATHS, [PATHS[1], PATHS[3], PATHS[5]]))
def test_an_audit_follows_the_path_of_each_seed(name, rule, route):
    """Also in blocks of more than six positions."""
    duel = Duel(TOYS[name](length=12), rule, 8, estimator="duel_seeds", noise_seed=5, noise_seeds=3)
    window = Window((1,), (0, 1, 2, 2, 1, 0, 0, 1, 2))
    [score] = duel.log_prob([window])

    recomputed = recompute(duel.estimator, window, score)
    assert recomputed.route == route
    assert not recomputed.problems
    assert not recomputed.other_picks
    assert recomputed.log_prob == pytest.approx(score.log_prob, abs=1e-9)


def test_an_audit_names_a_value_of_one_seed_that_is_wrong():
    duel = Duel(NoisyToy(length=4), "greedy", 3, estimator="duel_seeds", noise_seed=5, noise_seeds=3)
    window = Window((1,), (0, 1, 2))
    [score] = duel.log_prob([window])

    def problem_of(**changes):
        wrong = dataclasses.replace(score, **changes)
        [problem] = recompute(duel.estimator, window, wrong).problems
        return problem

    assert "noise_seed 7" in problem_of(seeds=(*score.seeds[:2], score.seeds[2] + 0.01))
    assert "stderr" in problem_of(stderr=2 * score.stderr)
    mean_as_log_mean = dataclasses.replace(score.others["log_mean_exp"], log_prob=score.log_prob)
    assert "log_mean_exp" in problem_of(others={"log_mean_exp": mean_as_log_mean})


class Fresh(DuelEstimator):
    """Each row has a seed of its own."""

    def open(self, windows, window_indices, generating=False):
        group = super().open(windows, window_indices, generating)
        rows = dataclasses.replace(group.rows, noise_seed=torch.tensor(window_indices))
        return dataclasses.replace(group, rows=rows)


def test_the_sampler_with_fresh_noise_has_these_probabilities():
    """The frequencies of samples, each under its own seed, against the mean of p over seeds."""
    toy = NoisyToy(length=2)
    count = 800
    texts = [Window((), text) for text in every_text(2)]
    duel = Duel(toy, "greedy", 2, estimator="duel_seeds", noise_seeds=count)

    p = [math.exp(score.others["log_mean_exp"].log_prob) for score in duel.log_prob(texts)]
    samples = Fresh(toy, "greedy", 2).sample([()] * count, 2)

    assert math.fsum(p) == pytest.approx(1, abs=1e-9)
    drawn = Counter(sample.tokens for sample in samples)
    for text, chance in zip(texts, p, strict=True):
        frequency = drawn[text.target] / count
        assert abs(frequency - chance) < 4.5 * math.sqrt(chance * (1 - chance) / count)


def test_totals_are_made_for_each_seed():
    """Windows share the seeds: copies of one window have one error, times their number."""
    toy = NoisyToy(length=4)
    windows = [Window((), (0, 1, 2)), Window((), (2, 2, 1))]
    duel = Duel(toy, "greedy", 2, estimator="duel_seeds", noise_seeds=12)
    first, second = duel.log_prob(windows)

    total = Total.from_scores(windows, [first, second], "duel_seeds")
    sums = torch.tensor(first.seeds, dtype=torch.float64) + torch.tensor(second.seeds, dtype=torch.float64)
    assert total.stderr == pytest.approx(float(sums.std()) / math.sqrt(12))

    double = Total.from_scores([windows[0], windows[0]], [first, first], "duel_seeds")
    assert double.stderr == pytest.approx(2 * first.stderr)

    log_mean = total.named["log_mean_exp"]
    expected = first.others["log_mean_exp"].log_prob + second.others["log_mean_exp"].log_prob
    assert log_mean.log_prob == pytest.approx(expected)
    assert len(log_mean.value.seeds) == 12
    assert log_mean.stderr is None or log_mean.stderr > 0


def test_the_error_of_a_log_mean_takes_ten_effective_seeds():
    duel = Duel(NoisyToy(length=4), "greedy", 2, estimator="duel_seeds", noise_seeds=8)
    [score] = duel.log_prob([Window((), (0, 1, 2))])
    assert score.stderr > 0
    assert score.others["log_mean_exp"].stderr is None
    spread = torch.tensor([[0.0]] * 30 + [[50.0]], dtype=torch.float64)
    assert duel.estimator._log_mean(spread).stderr is None
    assert duel.estimator._log_mean(torch.linspace(0, 1, 31, dtype=torch.float64)[:, None]).stderr > 0


def test_the_error_of_a_log_mean_is_known_if_it_is_in_every_block():
    duel = Duel(NoisyToy(length=4), "greedy", 2, estimator="duel_seeds", noise_seeds=12)
    sure = torch.zeros(31, 1).double()
    spread = torch.tensor([[0.0]] * 30 + [[50.0]]).double()
    for blocks in ([sure, spread], [spread, sure]):
        assert duel.estimator._log_mean(torch.cat(blocks, 1)).stderr is None


def test_a_temperature_stays_where_it_has_arrived():
    """A block that takes more steps than the temperatures have is finished at the last one."""
    temperature = noises.CommitOnce(temperatures=(0.8, 0.4, 4)).temperature(torch.arange(7))
    assert temperature.tolist() == pytest.approx([0.8, 0.7, 0.6, 0.5, 0.4, 0.4, 0.4])


def test_records_keep_every_seed():
    for seeds in (3, 12):
        duel = Duel(NoisyToy(length=4), "greedy", 2, estimator="duel_seeds", noise_seeds=seeds)
        [score] = duel.log_prob([Window((), (0, 1, 2))])
        log_mean = score.others["log_mean_exp"].value.describe()
        [from_request] = decode_request(encode_request([score]), 1)
        for decoded in (from_request, decode(encode(score))):
            assert decoded.value == score.value
            assert decoded.others["log_mean_exp"].value.describe() == log_mean
