"""The cached samplers (`cache=prefix|dual`): what they merge, keep and refuse. Their laws: test_view_laws.py."""

import itertools
import math
import statistics

import pytest
import torch
from attends import Attends
from close import same_scores
from laws import slow_but
from toys import BlockCausal, Causal, Toy

from lm_eval_duel import rules
from lm_eval_duel.core.windows import Window
from lm_eval_duel.denoisers.cached import denoiser as view
from lm_eval_duel.denoisers.cached import kept_keys
from lm_eval_duel.denoisers.cached.denoiser import Cached
from lm_eval_duel.denoisers.filters import warped
from lm_eval_duel.denoisers.load_options import LoadOptions
from lm_eval_duel.denoisers.wrappers import Guided
from lm_eval_duel.errors import DuelError
from lm_eval_duel.estimators.arguments import ElboArguments, LatticeArguments
from lm_eval_duel.estimators.duel import DuelEstimator
from lm_eval_duel.estimators.elbo import Elbo
from lm_eval_duel.estimators.lattice import Lattice
from lm_eval_duel.options import Options

CACHES = ["prefix", "dual"]
RAGGED = [
    Window((), (0, 1, 2, 0, 1, 0, 2)),
    Window((2,), (1, 1, 2, 0, 1)),
    Window((1, 2, 0), (2, 1), (1, 0)),
    Window((1, 2), (2, 1, 0, 0, 0, 1), (2,)),
    Window((), (0, 1, 2, 0, 1, 0, 2), (0,)),
]
ALIKE = [  # pairs that differ in one thing alone
    (Window((1,), (0, 1, 2, 0), (0, 2)), Window((1,), (0, 1, 2, 0), (2, 0))),
    (Window((1,), (0, 1, 2, 0), (0,)), Window((1,), (0, 1, 2, 0), (0, 0))),
    (Window((1,), (0, 1, 2, 0), (0,)), Window((2,), (0, 1, 2, 0), (0,))),
    (Window((1,), (0, 1, 2, 0), (2,)), Window((1, 0), (1, 2, 0), (2,))),
    (Window((1,), (0, 1, 2, 0), (2,)), Window((1,), (0, 1, 2), (0, 2))),
    (Window((1,), (0, 1, 2, 0), (2,)), Window((1,), (0, 1, 2, 0), (2,), tail=2)),
    (Window((1,), (0, 1, 2, 0)), Window((1,), (0, 1, 2, 0), tail=2)),
    (Window((1,), (0, 1, 2, 0), (2,)), Window((1,), (0, 2, 2, 0), (2,))),
]


@pytest.mark.parametrize("cache", [None, *CACHES])
def test_windows_that_differ_in_one_thing_alone_keep_their_values(cache):
    toy = Attends(length=10)
    network = toy if cache is None else Cached(toy, cache)
    for pair, rule in zip(ALIKE, itertools.cycle(("greedy:k=1", "left_to_right:k=2"))):
        block = 2 if len(pair[0].target) == len(pair[1].target) else None
        duel = DuelEstimator(network, rule, block)

        first, second = duel.log_prob(list(pair))
        [first_alone] = duel.log_prob([pair[0]])
        [second_alone] = duel.log_prob([pair[1]])

        assert first_alone.log_prob != pytest.approx(second_alone.log_prob, abs=1e-9)
        for in_batch, alone in ((first, first_alone), (second, second_alone)):
            assert in_batch.reveal_steps == alone.reveal_steps, pair
            assert in_batch.token_logprobs == pytest.approx(alone.token_logprobs, abs=1e-9), pair


def same(scores, expected, within=1e-12):
    for score, other in zip(scores, expected, strict=True):
        assert score.reveal_steps == other.reveal_steps
        assert score.nfe == other.nfe
        assert score.token_logprobs == pytest.approx(other.token_logprobs, abs=within)


class Small(Attends):
    """A device whose memory holds `most` positions a call."""

    most = 1_000

    def stream(self, ids, positions, seen, past):
        if ids.numel() > self.most:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return super().stream(ids, positions, seen, past)


@pytest.mark.parametrize(("rule", "cache"), [("threshold:mu=0.45", "prefix"), ("klass:mu=0.4:nu=0.3", "dual")])
def test_neither_company_nor_batch_size_nor_memory_changes_a_number(rule, cache):
    small = Small(length=10)
    together = DuelEstimator(Cached(small, cache), rule, 3).log_prob(RAGGED)

    small.most = 21
    for batch_size in (1, 2, 64):
        duel = DuelEstimator(Cached(small, cache), rule, 3, batch_size=batch_size)
        if batch_size == 1:
            duel.use_single_rows()
        same(duel.log_prob(RAGGED), together)


@pytest.mark.parametrize("cache", slow_but(CACHES, ["dual"]))
def test_blocks_open_as_others_finish_within_what_may_be_kept(cache, monkeypatch):
    cached = Cached(Attends(length=10), cache)
    expected = DuelEstimator(cached, "greedy", 2, batch_size=100).log_prob(RAGGED)
    longest = max(window.length for window in RAGGED)  # all windows have slots of this length
    fill = kept_keys.Slots.fill
    kept_numbers = []

    def filled(self, *arguments):
        fill(self, *arguments)
        planes = [*itertools.chain(*self.layers)]  # keys and values
        kept_numbers.append(sum(plane.numel() for plane in planes))

    monkeypatch.setattr(kept_keys.Slots, "fill", filled)
    monkeypatch.setattr(view, "CPU_KEPT", cached.kept)
    for rows in (1, 2, 3):
        scored = DuelEstimator(cached, "greedy", 2, batch_size=rows).log_prob(RAGGED)
        assert max(kept_numbers) <= rows * 10 // longest * longest * cached.kept
        same(scored, expected)


# ---------------------------------------------------------------- the lattice, fixed orders: states are shared


@pytest.mark.parametrize("cache", CACHES)
def test_lattice_and_bound_agree_with_the_rules_that_they_follow_and_with_each_order(cache):
    denoiser = Cached(Attends(length=10), cache)
    followed = ["greedy:k=1", "margin:k=2", "threshold:mu=0.45", "left_to_right:k=1"]
    of_lattice = Lattice(denoiser, 3, LatticeArguments(followed)).log_prob(RAGGED)
    for rule in followed:
        name = str(rules.parse(rule))
        of_rule = DuelEstimator(denoiser, rule, 3).log_prob(RAGGED)
        for score, expected in zip(of_lattice, of_rule, strict=True):
            assert score.others[name].log_prob == pytest.approx(expected.log_prob, abs=1e-9)

    window = Window((1,), (0, 2, 1), (2,))
    duel = DuelEstimator(denoiser, "greedy", None)
    of_orders = []
    for order in itertools.permutations(range(3)):
        [along_order] = duel.replay([window], [order])
        of_orders.append(along_order.log_prob)
    mixture = math.log(statistics.fmean(map(math.exp, of_orders)))

    [lattice] = Lattice(denoiser, 3).log_prob([window])
    elbo_exact = lattice.others["elbo_exact"].log_prob
    assert lattice.others["oracle"].log_prob == pytest.approx(max(of_orders), abs=1e-9)
    assert elbo_exact == pytest.approx(statistics.fmean(of_orders), abs=1e-9)
    assert lattice.log_prob == pytest.approx(mixture, abs=1e-9)

    [drawn] = Elbo(denoiser, ElboArguments(512)).log_prob([window])
    assert abs(drawn.log_prob - elbo_exact) < 4 * drawn.stderr


# ---------------------------------------------------------------- what is evaluated, and what is refused


def test_a_block_costs_one_row_and_then_its_own_cells():
    toy = Counting(length=10)
    duel = DuelEstimator(Cached(toy, "dual"), "greedy", 4)
    toy.positions = 0
    duel.log_prob([Window((), (0, 1, 2, 0, 1, 0, 2, 1))])
    assert toy.positions == 2 * (8 + 3 * 4)

    duel = DuelEstimator(Cached(toy, "dual"), "greedy", 2)
    toy.positions = 0
    duel.log_prob([Window((1, 2), target) for target in itertools.product(range(3), repeat=2)])
    assert toy.positions == 4 + 3 * 2  # equal starts once: one row, and the block with each of three tokens revealed


class Counting(Attends):
    """Counts the positions that it evaluates."""

    positions = 0

    def stream(self, ids, positions, seen, past):
        self.positions += ids.numel()
        return super().stream(ids, positions, seen, past)


def test_a_shifted_network_without_seed_first_is_refused():
    shifted = Cached(Attends(shift=1), "dual")
    seeded = DuelEstimator(shifted, "greedy:seed_first=true", None)

    with pytest.raises(DuelError, match="seed_first=true"):
        DuelEstimator(shifted, "greedy", 2)
    with pytest.raises(DuelError, match="estimator=mixture"):
        Lattice(shifted, 2)
    with pytest.raises(DuelError, match="estimator=elbo"):
        Elbo(shifted, ElboArguments(elbo_block=2))
    with pytest.raises(DuelError, match="seed_first=true"):
        seeded.replay([Window((1,), (0, 1, 2))], [(2, 0, 1)])


# ---------------------------------------------------------------- what has no cache


def test_networks_that_have_no_cache_are_refused_with_the_reason():
    for network, cache, reason in (
        (BlockCausal(), "dual", "block_causal"),
        (Causal(), "prefix", "causal"),
        (Toy(), "dual", "Toy"),
    ):
        with pytest.raises(DuelError, match=reason):
            Cached(network, cache)

    for arguments, reason in (
        ({"cache": "dual", "backend": "remote"}, "backend=remote"),
        ({"cache": "prefix", "compile": True}, "compile=true"),
        ({"cache": "both"}, "'both'"),
    ):
        with pytest.raises(DuelError, match=reason):
            LoadOptions("demo-mdm", torch.device("cpu"), **arguments)

    assert LoadOptions("demo-mdm", torch.device("cpu"), cache="none").cache is None
    assert Options.parse({"cache": "none"}).cache is None
    assert Options.parse({"cache": "dual"}).cache == "dual"


# ---------------------------------------------------------------- networks of transformers


def test_a_cache_in_bfloat16_follows_its_own_samples(family):
    network = family("modernbert", dtype="bfloat16")
    duel = DuelEstimator(Cached(network.denoiser, "dual"), "greedy", 3, batch_size=1)
    duel.use_single_rows()
    context = network.windows[0].context

    [drawn] = duel.sample([context], 7, seed=5)

    same([drawn], duel.log_prob([Window(context, drawn.tokens)]), 1e-9)


def test_guidance_and_temperature_go_around_a_cache(family):
    network = family("llada", dtype="float64")
    cached = Cached(network.denoiser, "dual")
    windows = network.windows[:3]
    wrapped = warped(Guided(cached, 0.5), 1.3, top_k=5)
    duel = DuelEstimator(wrapped, "greedy", 3)
    contexts = [window.context for window in windows]

    drawn = duel.sample(contexts, 7, seed=5)
    as_drawn = [Window(context, sample.tokens) for context, sample in zip(contexts, drawn, strict=True)]
    same_scores(drawn, duel.log_prob(as_drawn))
    assert wrapped.describe()["cache"] == "dual"

    unguided = DuelEstimator(warped(Guided(cached, 0.0), 1.0), "greedy", 3)
    same_scores(unguided.log_prob(windows), DuelEstimator(cached, "greedy", 3).log_prob(windows))


def test_networks_that_no_cache_can_be_put_in_say_so(family, monkeypatch):
    eager = family("modernbert").denoiser
    monkeypatch.setattr(eager.model.config, "_attn_implementation", "eager")
    others = [family(name).denoiser for name in ("sedd", "gidd", "esm-2", "sdar")]
    for denoiser in (eager, *others):
        with pytest.raises(DuelError, match="cache=dual"):
            Cached(denoiser, "dual")
