"""What stands beside the values of estimators, at the ends of its ranges: sums, labels, costs, schedules, checks.

None of it changes unseen. That it is right is proven elsewhere, case by case.
"""

import dataclasses
import itertools
import math
from functools import partial

import golden
import pytest
import torch
from attends import Attends
from golden import answer
from noised_toys import NoisyToy
from toys import BlockCausal, Causal, CausalPrefix, Toy

from lm_eval_duel.core.scores import Kind, Score, ratio
from lm_eval_duel.core.windows import Window
from lm_eval_duel.denoisers.cached.denoiser import Cached
from lm_eval_duel.denoisers.filters import excluding
from lm_eval_duel.estimators import cost, registry
from lm_eval_duel.estimators.arguments import (
    CommitOnceArguments,
    ConfidenceArguments,
    ElboArguments,
    LatticeArguments,
    NoisedElboArguments,
    OrderArguments,
    TwoPhaseArguments,
    check_block,
)
from lm_eval_duel.estimators.checks import check_windows, resolve_block, resolve_grid
from lm_eval_duel.estimators.duel import Autoregressive, DuelEstimator, Replay
from lm_eval_duel.estimators.elbo import Elbo, replicates
from lm_eval_duel.estimators.lattice import Lattice
from lm_eval_duel.estimators.moves import StepCounts
from lm_eval_duel.estimators.noised_elbo import NoisedElbo, step_shares
from lm_eval_duel.estimators.sampled_confidence import SampledConfidence
from lm_eval_duel.estimators.sampled_order import SampledOrder
from lm_eval_duel.estimators.totals import Total, TwoPhaseBlocks, score_documents
from lm_eval_duel.estimators.trajectories import Departure, follow
from lm_eval_duel.estimators.two_phase import TwoPhase, block_sample_weights, combine
from lm_eval_duel.rules import parse
from lm_eval_duel.rules.scheduled import dream_counts, dream_shares, even_counts

check = partial(golden.check_lines, __file__, within=1e-6)


# ---------------------------------------------------------------- sums

OF_SUMS = ("tokens", "is_greedy", "near_ties", "stderr", "perplexity", "perplexity_stderr")
ONE = Window((), (1, 2, 0))
OTHER = Window((), (1, 2))
EMPTY = Window((), ())


def drawn_blocks(count, sampled, drawn):
    """Made sums over `count` blocks of a window."""
    f = -1.0 - 0.5 * torch.arange(count, dtype=torch.float64) % 3
    g = f + 0.1 * torch.arange(count, dtype=torch.float64) % 0.7
    weight = torch.tensor([2.0] * drawn + [1.0] * (sampled - drawn) + [0.0] * (count - sampled), dtype=torch.float64)
    _, variance = combine(g, f, weight)
    return TwoPhaseBlocks.from_blocks(g, f, weight, float(variance))


def estimate(*sizes):
    blocks = drawn_blocks(*sizes)
    return Score(-7.0, near_ties=1, kind=Kind.ESTIMATE, stderr=blocks.stderr, blocks=blocks)


SUMS = {  # windows with their scores
    "none": [],
    "an empty one": [(EMPTY, Score(0.0, is_greedy=True, nfe=0, near_ties=0))],
    "one": [(ONE, Score(-3.0, is_greedy=True, nfe=3, near_ties=0))],
    "two": [(ONE, Score(-3.0, True, nfe=3, near_ties=2)), (OTHER, Score(-1.0, False, nfe=2, near_ties=1))],
    "one of unknown ties": [(ONE, Score(-3.0, True, nfe=3)), (OTHER, Score(-1.0, True, near_ties=1))],
    "an impossible one": [(ONE, Score(-3.0)), (OTHER, Score(-math.inf))],
    "bounds": [
        (ONE, Score(-3.0, kind=Kind.UPPER_BOUND, stderr=0.3)),
        (OTHER, Score(-1.0, kind=Kind.UPPER_BOUND, stderr=0.4)),
    ],
    "one bound three times": [(ONE, Score(-3.0, kind=Kind.UPPER_BOUND, stderr=0.3, note="a"))] * 3,
    "of two notes": [(ONE, Score(-3.0, note="a", stderr=0.3)), (OTHER, Score(-1.0, note="b", stderr=0.4))],
    "a bound among likelihoods": [
        (ONE, Score(-3.0)),
        (OTHER, Score(-1.0, kind=Kind.NO_BOUND, stderr=0.1)),
        (EMPTY, Score(0.0, kind=Kind.UPPER_BOUND, stderr=0.0)),
    ],
    "over seeds": [
        (ONE, Score(-3.0, kind=Kind.UPPER_BOUND, stderr=0.5, seeds=(-2.0, -3.0, -4.0))),
        (OTHER, Score(-1.0, kind=Kind.UPPER_BOUND, stderr=0.5, seeds=(-1.5, -1.0, -0.5))),
    ],
    "with others": [
        (ONE, Score(-3.0, others={"greedy": Score(-4.0, nfe=3, near_ties=1), "oracle": Score(-2.0)})),
        (OTHER, Score(-1.0, others={"greedy": Score(-5.0, nfe=2, near_ties=0), "oracle": Score(-0.5)})),
    ],
    "estimates of (9, 7, 7)": [(ONE, estimate(9, 7, 7))],
    "estimates of (9, 8, 8)": [(ONE, estimate(9, 8, 8))],
    "estimates of (9, 9, 7)": [(ONE, estimate(9, 9, 7))],
    "estimates of (40, 29, 29)": [(ONE, estimate(40, 29, 29))],
    "estimates of (40, 30, 30)": [(ONE, estimate(40, 30, 30))],
    "estimates of (3, 2, 2)": [(ONE, estimate(3, 2, 2))],
    "estimates of (4, 3, 3)": [(ONE, estimate(4, 3, 3))],
    "estimates of (2, 0, 0)": [(ONE, estimate(2, 0, 0))],
    "one estimate twice": [(ONE, estimate(9, 6, 5)), (ONE, estimate(9, 6, 5)), (OTHER, estimate(9, 4, 3))],
}


@pytest.mark.parametrize("pairs", [SUMS["two"], SUMS["bounds"], [*SUMS["two"], *SUMS["bounds"]]])
@pytest.mark.parametrize("count", [1, 3])
def test_empty_windows_say_nothing_about_other_windows(pairs, count):
    """The error over windows is that of the ratio of two sums, `ratio`, which leaves empty texts out, too."""
    with_empty = [*pairs, *[(EMPTY, Score(0.0))] * count]
    windows, scores = zip(*with_empty, strict=True)
    total = Total.from_scores(windows, scores, "value")
    without = Total.from_scores(windows[:-count], scores[:-count], "value")
    nats = [score.log_prob for score in scores]
    sizes = [window.scored_tokens for window in windows]
    _, error = ratio(nats, sizes)

    assert total.windows == len(windows)
    assert total.window_stderr == pytest.approx(without.window_stderr)
    assert total.window_stderr == pytest.approx(error * sum(sizes))


def test_one_window_among_empty_ones_has_no_error_over_windows():
    total = Total.from_scores([ONE, EMPTY, EMPTY], [Score(-3.0), Score(0.0), Score(0.0)], "value")
    assert total.window_stderr is None


def test_sums_and_what_is_said_of_them():
    lines = []
    drawn = registry.find("two_phase").monte_carlo
    for name, pairs in SUMS.items():
        windows = [window for window, _ in pairs]
        scores = [score for _, score in pairs]
        total = Total.from_scores(windows, scores, "value")

        lines.append(f"{name}:")
        for key, part in (total.named or {"nothing": total}).items():
            entries = part.describe() | {"kind": part.value.kind}
            for attribute in OF_SUMS:
                entries[attribute] = getattr(part, attribute)
            lines += [f"    {line}" for line in golden.listed(key, entries)]
            assert part.summed.error is None  # `stderr` alone knows it, of one window as of several
        if pairs:
            lines.append(f"    in the log: {total.summary()}")
            lines.append(f"    if drawn: {total.summary(drawn)}")
    check("sums", lines)


def test_documents_are_complete_with_their_last_window():
    """Each once, with its windows in order; a document without windows first."""
    documents = [[ONE, OTHER], [], [OTHER], [ONE, ONE, EMPTY]]
    asked = []

    def stream(windows):
        asked.extend(windows)
        for n in (3, 1, 4, 0, 5, 2):
            yield n, Score(-float(n))

    finished = []
    for n, scores in score_documents(documents, stream):
        finished.append((n, [score.log_prob for score in scores]))

    assert asked == [ONE, OTHER, OTHER, ONE, ONE, EMPTY]
    assert finished == [(1, []), (0, [0.0, -1.0]), (3, [-3.0, -4.0, -5.0]), (2, [-2.0])]


# ---------------------------------------------------------------- labels

SPECS = (
    *({}, {"elbo_eps": "0.0"}, {"elbo_eps": "none"}, {"elbo_eps": "0.001"}, {"noise_seed": 3, "rule": "greedy"}),
    *({"steps": "inf"}, {"steps": 12, "prediction": "plugin", "self_conditioning": "chain"}, {"noise_seeds": 8}),
    *({"sample": "0.05", "cheap_cache": "dual"}, {"n": 2, "tau": 0.9, "strict": "true", "confidence": "tempered"}),
    {"alg": "entropy", "alg_temp": "0.2", "steps": "3"},
)
GIVEN = ("rule", "k", "block", "grid", "last_block", "draw_seed", "self_conditioning", "steps", "mc_samples", "device")


def test_labels_of_estimators():
    lines = []
    for name, entry in registry.ESTIMATORS.items():
        lines.append(f"{name}: {entry.title}, {'+'.join(entry.arguments)}")
        before = ""
        for spec in SPECS:
            template = registry.value_template(name, spec)
            labels = "; ".join(entry.qualifiers(spec))
            description = f"{template.kind.name} {template.note!r}, {template.label!r}, labels {labels}"
            lines.append(f"    {spec}: {description if description != before else 'the same'}")
            before = description
        if entry.monte_carlo is not None:
            for count in (entry.monte_carlo.least - 1, entry.monte_carlo.least, "none"):
                lines.append(f"    {count}: {entry.monte_carlo.unknown({entry.monte_carlo.argument: count})}")
    check("labels", lines)


def test_arguments_that_change_nothing_are_named():
    toy = Toy(length=12)
    noisy = NoisyToy(length=12)
    lines = []
    for estimator in (
        DuelEstimator(toy, "greedy", block=4),
        DuelEstimator(toy, "greedy", block=None),
        DuelEstimator(BlockCausal(length=12), "greedy", "auto"),
        DuelEstimator(noisy, "greedy", 3, CommitOnceArguments(noise_seed=1)),
        Autoregressive(Causal(length=12)),
        Elbo(toy),
        Elbo(toy, ElboArguments(elbo_block=4)),
        NoisedElbo(noisy),
        TwoPhase(Attends(), "greedy", block=2, cache="prefix", draw_seed=3),
        TwoPhase(Attends(), "threshold:mu=0.5", 2, TwoPhaseArguments(1)),
        Lattice(toy, 4, estimator="oracle", rule=parse("greedy:k=2")),
        Lattice(toy, 4, LatticeArguments(["margin", "greedy:k=2"]), estimator="elbo_exact", rule=parse("greedy:k=2")),
        Lattice(toy, 4, LatticeArguments(["margin"]), rule=parse("greedy:k=2")),
        SampledConfidence(toy, 4, ConfidenceArguments(tau=0.5, strict=False)),
        SampledConfidence(toy, 4, ConfidenceArguments(steps=2, schedule="dream", confidence="tempered")),
        SampledOrder(toy, 4, OrderArguments("topk_margin", 3, 0.25)),
    ):
        lines.append(f"{estimator.describe()}: {estimator.ignored_args(GIVEN)}")
    check("ignored", lines)


# ---------------------------------------------------------------- what is logged, and the order of results


def test_what_is_logged(caplog):
    """Warnings at the ends of their ranges; those that come once come once."""
    special = Toy()
    special.special_tokens = ((2,), (1, 0))
    only_first = Toy()
    only_first.special_tokens = ((), ())
    steps = {
        "15 draws": lambda: Elbo(Toy(), ElboArguments(15)),
        "16 draws": lambda: Elbo(Toy(), ElboArguments(16)),
        "15 draws of noise": lambda: NoisedElbo(NoisyToy(), NoisedElboArguments(15)),
        "nothing ignored": lambda: DuelEstimator(Toy(), "greedy", block=4).name_ignored_args(["rule", "block"]),
        "one ignored": lambda: Elbo(Toy()).name_ignored_args(["rule"]),
        "several ignored": lambda: DuelEstimator(Toy(), "greedy", block=None).name_ignored_args(GIVEN),
        "no context": lambda: check_windows(special, 3, "target", [EMPTY, Window((2,), (1,)), ONE]),
        "no context, again": lambda: check_windows(special, 3, "target", [ONE]),
        "no context, others": lambda: check_windows(only_first, 3, "target", [ONE]),
        "a context": lambda: check_windows(Toy(), 3, "target", [ONE]),
    }
    lines = []
    for name, step in steps.items():
        caplog.clear()
        step()
        lines.append(f"{name}:")
        lines += [f"    {record.levelname} {record.getMessage()}" for record in caplog.records]
    check("log", lines)


def test_the_order_in_which_windows_are_finished():
    """In the order given the first come early, a few calls at once; else the longest are first. Equal ones together."""
    toy = Toy(length=12)
    windows = [EMPTY]
    for n, length in enumerate((3, 9, 1, 5, 2, 8, 4, 7)):
        windows.append(Window((n % 3,), (n % 2,) * length))
    windows.append(windows[1])
    duel = partial(DuelEstimator, toy, "greedy", 3, batch_size=2)
    elbo = partial(Elbo, toy, ElboArguments(8), batch_size=6)

    lines = []
    for make, padded, in_order in (
        (duel, True, True),
        (duel, True, False),
        (duel, False, True),
        (elbo, True, True),
        (elbo, True, False),
    ):
        toy.honours_padding = padded
        estimator = make()
        buckets = estimator._buckets(windows)
        order = [n for n, _ in estimator.stream(windows, in_order=in_order)]
        calls = f"{estimator.counts.forwards} calls of {estimator.counts.rows} rows"
        lines.append(f"{estimator.name}, {padded=}, {in_order=}: {order}, {calls}, buckets {buckets}")
    check("order", lines)


# ---------------------------------------------------------------- costs

RULES = ("greedy:k=1", "margin:k=3", "threshold:mu=0.9", "quota:steps=3", "left_to_right:k=2:seed_first=true")
RULES += ("greedy:k=2:sub_block=3", "klass:mu=0.9:nu=0.1:kl=authors:across=true")
LAYOUTS = (cost.Layout(2, 1, 3), cost.Layout(2, 8, 10), cost.Layout(5, 9, 16))


def test_costs():
    """Every field, for the ways to score; and of documents, equal ones once."""
    lines = []
    for kind, block, grid in ((Toy, 4, "target"), (Toy, 4, "row"), (Toy, None, "target"), (BlockCausal, 4, "row")):
        denoiser = kind(length=20) if kind is Toy else kind(block, length=20)
        for rule, layout in itertools.product(RULES, LAYOUTS):
            setting = cost.Setting(denoiser, parse(rule), block, grid)
            exact = [*setting.exact(layout)]
            lines.append(f"{kind.__name__} {block} {grid} {rule} {[*layout]}: {exact} {setting.is_exact}")
        for layout in LAYOUTS:
            setting = cost.Setting(denoiser, parse("greedy:k=2"), block, grid)
            lines.append(f"    elbo {[*setting.elbo(layout, 3)]}, lattice {[*setting.lattice(layout)]}")
            if kind is Toy:
                prefix = [*setting.cached(layout, "prefix")]
                dual = [*setting.cached(layout, "dual")]
                lines.append(f"    prefix {prefix}, dual {dual}")
                lines.append(f"    two phases {[*setting.two_phase(layout, 0.3)]}")
    noised = cost.Setting(NoisyToy(length=20), parse("greedy"), None, "target")
    lines += [f"noised {[*noised.noised(layout, 3, 2)]}" for layout in LAYOUTS]
    texts = [ONE, OTHER, ONE, EMPTY, Window((1,), (1, 2))]
    setting = cost.Setting(Toy(length=20), parse("greedy"), 2, "target")
    lines.append(f"layouts {dict(cost.layouts(texts))}")
    lines.append(f"together {cost.sum_over(cost.layouts(texts), lambda layout: setting.two_phase(layout, 0.07))}")
    check("costs", lines)


# ---------------------------------------------------------------- schedules, draws and levels


def test_schedules():
    lines = []
    for m, steps in itertools.product((1, 2, 3, 4, 7, 12), (1, 2, 3, 5, 12, 20)):
        lines.append(f"{m} in {steps}: even {even_counts(m, steps)}, dream {dream_counts(m, steps)}")
    for counts in (
        StepCounts(),
        StepCounts(3),
        StepCounts(2, or_more=True),
        StepCounts(steps=3),
        StepCounts(steps=3, schedule="dream"),
    ):
        for m in (1, 4, 7):
            left = [counts.next_step(m, masked) for masked in range(1, m + 1)]
            lines.append(f"{counts} of {m}: {counts.all_steps(m)}, by what is left {left}")
    for steps in (1, 2, 5):
        lines += golden.listed(f"shares of {steps} steps", dream_shares(steps).tolist())
        lines += golden.listed(f"draws of {steps} steps", step_shares(steps).tolist())
    lines.append(f"replicates: {[replicates(count) for count in range(1, 41)]}")
    for share in (0.01, 0.5, 1.0):
        lines += golden.listed(f"sample {share}", block_sample_weights([3, 9], [7, 4], share, 1).flatten().tolist())
    levels = torch.tensor([0.0, 0.1, 0.25, 0.5, 0.6, 0.75, 0.999], dtype=torch.float64)[:, None]
    for noise in (NoisyToy().noise_training.noise, NoisyToy(share=0.25).noise_training.noise):
        for name, planes in (
            ("times", noise.time_from_uniform(levels)),
            ("level", noise.level(levels, 1 - levels)),
            ("rates", noise.rates(levels[1:], 1 - levels[1:])),
        ):
            for n, plane in enumerate(planes):
                lines += golden.listed(f"{noise.name}, {name} {n}", plane.flatten().tolist())
    check("schedules", lines)


# ---------------------------------------------------------------- checks


def kinds():
    """A network of each kind that checks tell apart, with ids 0 to 3, of which 3 is [MASK], and rows of 8 positions."""
    yield "bidirectional", Toy()
    yield "shifted", Attends(shift=1)
    yield "cached", Cached(Attends(), "dual")
    yield "causal", Causal()
    yield "in blocks of 3", BlockCausal(3)
    yield "causal prefix, blocks of 2", CausalPrefix(block=2)
    yield "random tokens", NoisyToy(length=8)
    yield "without id 1", excluding(Toy(), [1])
    padded = Toy(unused=2)
    padded.image_ids = frozenset({2})
    yield "with images and padding", padded
    visible = Toy()
    visible.needs_visible = True
    yield "that divides by visible tokens", visible


PARTS = {
    "8 positions": Window((0,), (1,) * 7),
    "9 positions": Window((0,), (1,) * 8),
    "no context": Window((), (0, 1, 0)),
    "no target": Window((0,), ()),
    "nothing": Window((), ()),
    "suffix up to the border": Window((0,), (1, 0), (2,) * 2),
    "suffix over the border": Window((0,), (1, 0), (2,) * 4),
    "3 positions, suffix of 1": Window((0,), (1, 0, 0), (2,)),
    "3 positions, suffix of 2": Window((0,), (1, 0, 0), (2,) * 2),
    "3 positions, suffix of 3": Window((0,), (1, 0, 0), (2,) * 3),
    "tail at the border": Window((0, 0, 0), (1, 0, 0), (), 1),
    "tail off the border": Window((0, 0, 0), (1, 0), (), 1),
    "known": Window((0,), (1, 0, 0), known=(1,)),
    "the last id": Window((0,), (2,)),
    "mask": Window((0,), (0, 3)),
    "mask in the context": Window((3,), (0,)),
    "id 4": Window((0,), (4,)),
    "id 6": Window((0,), (6,)),
    "id -1": Window((-1,), (0,)),
}


def test_which_windows_are_refused():
    """With the numbers that the error names."""
    lines = []
    for (kind, denoiser), (name, window) in itertools.product(kinds(), PARTS.items()):
        block = denoiser.block or (1 if denoiser.attention == "causal" else 3)
        grid = resolve_grid(denoiser, "auto")
        scored = answer(check_windows, denoiser, block, grid, [EMPTY, window], False)
        generated = answer(check_windows, denoiser, block, grid, [EMPTY, window], True)
        lines.append(f"{kind}, {name}: {scored}; generated {'the same' if scored == generated else generated}")
    known = [EMPTY, EMPTY, PARTS["known"]]
    for estimator in (Elbo(Toy()), Autoregressive(Causal()), NoisedElbo(NoisyToy(length=8))):
        lines.append(f"estimator={estimator.name}, known: {answer(estimator.check, known)}")
    check("refused", lines)


def test_blocks_and_grids_of_networks():
    lines = []
    for kind, denoiser in kinds():
        blocks = [answer(resolve_block, denoiser, block) for block in ("auto", None, 1, 2, 3, 0)]
        grids = [answer(resolve_grid, denoiser, grid) for grid in ("auto", "target", "row")]
        lines.append(f"{kind}: {blocks} {grids}")
    published = Toy()
    published.published_block = 5
    lines.append(f"published: {resolve_block(published, 'auto')} {resolve_block(published, 4)}")
    for block, only in itertools.product((1, 12, 13, None), (False, True)):
        oracle = answer(check_block, "oracle", block, only)
        sampled_order = answer(check_block, "sampled_order", block, only)
        lines.append(f"every order in {block}: {[oracle, sampled_order]}")
    check("blocks", lines)


# ---------------------------------------------------------------- recorded orders


def test_departures_from_a_rule():
    """Along the other orders of a text: where the rule would have picked others, and by how much."""
    duel = DuelEstimator(Toy(), "greedy", 3)
    window = Window((1,), (2, 0, 1, 1))
    orders = [(*order, 0) for order in itertools.permutations(range(3))]
    orders += [(0, 0, 1, 0), (4, 4, 9, 11)]

    lines = []
    followed = follow(duel, [window] * len(orders), orders, None)
    for order, path in zip(orders, followed, strict=True):
        lines += golden.listed(f"order {order}", dataclasses.asdict(path) | {"differences": ()})
        for departure in path.differences:
            lines += golden.listed("    departs", departure)
    [sampled] = follow(duel, [window], orders[:1], {"n": 1, "confidence": "tempered"})
    lines += golden.listed("sampled", dataclasses.asdict(sampled))
    check("departures", lines)

    refusal = answer(follow, duel, [window], [(0, 1, 2, 2)], None)
    assert isinstance(refusal, str), "a block begins before the last one ends"
    assert not isinstance(answer(follow, duel, [window], [(0, 1, 2, 3)], None), str)


@pytest.mark.parametrize(("margin", "near_tie"), [(None, False), (0.0, True), (9.9e-5, True), (1.1e-4, False)])
def test_a_departure_by_less_than_float_noise_is_a_near_tie(margin, near_tie):
    assert Departure(0, 0, margin).near_tie is near_tie


@pytest.mark.parametrize(
    ("steps", "numbers"),
    [([(0, 1, 2)], "0 4 3"), ([(0, 1, 2, 0)] * 2, "1 2"), ([(0, 2, 1, 1)], "0"), ([(0, 0, 2, 0)], "0")],
)
def test_orders_that_do_not_fit_are_refused(steps, numbers):
    duel = DuelEstimator(Toy(), "greedy", 3)
    refusal = answer(duel.replay, [Window((1,), (2, 0, 1, 1))], steps)
    assert isinstance(refusal, str)
    assert refusal.startswith(f"error with {numbers}")
    assert Replay(((0, 1),)).may_pick_none


def test_a_suffix_that_only_the_last_block_sees_is_named(caplog):
    long = Window((0,), (1, 0, 0), (2,))  # blocks of 3 count from the row's start: the target is in the first two
    short = Window((0,), (1,), (2,))
    network = BlockCausal(block=3)
    estimator = DuelEstimator(network, parse("greedy"), 3)
    estimator.log_prob([short, Window((0,), (1, 0, 0, 1))])
    assert not caplog.records
    estimator.log_prob([short, long])
    estimator.log_prob([long])
    [record] = caplog.records
    assert record.args == (1, 2, 3)  # one window of the two with a suffix, blocks of 3


@pytest.mark.parametrize(
    ("rule", "block", "is_named"),
    [
        ("dream:alg=entropy:steps=2", 2, True),
        ("dream:alg=entropy:steps=2", None, False),
        ("dream:alg=entropy:steps=2:seed_first=true", 2, False),  # Fast-dLLM's sampler for Dream has blocks
        ("dream:alg=confidence_threshold:steps=2:tau=0.5", 2, False),
        ("greedy", 2, False),
    ],
)
def test_blocks_of_a_sampler_without_blocks_are_named(rule, block, is_named, caplog):
    DuelEstimator(Toy(), rule, block)
    named = [record.args[0] for record in caplog.records]
    assert list(map(str, named)) == [rule] * is_named
