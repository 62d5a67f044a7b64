"""The laws of the design, on toy denoisers by exact enumeration. Float64 agrees to 1e-9 and in order.

Every rule meets every law; the shapes of bidirectional and block-causal networks take turns. A plain run takes every
second rule for two of the laws, about argmax decoding and tails.
"""

import dataclasses
import itertools
import math

import published
import pytest
import torch
from custom_rules import Misspelt, Stalls
from drawn_reference import p_value
from laws import AROUND, RULES, numbers, slow_but, strings, total
from toys import BlockCausal, Joint, Leaky, Rotary, Small, Toy

from lm_eval_duel import Duel, rules
from lm_eval_duel.core.block_causal import CleanStream
from lm_eval_duel.core.lanes import PLANES, Lanes, Rows
from lm_eval_duel.core.windows import Window
from lm_eval_duel.errors import DuelError, RuleStalled

ONE_AT_A_TIME = [r for r in RULES if ":k=1" in r] + ["threshold:mu=1.0", "entropy_bound:gamma=0.0"]
BLOCKS = [2, None]


def spread(*shapes):
    """(rule, shape): every rule in one of the shapes, which take turns; each round begins with the next one."""
    pairs = []
    for n, rule in enumerate([*RULES, *AROUND]):
        rounds = n // len(shapes)
        pairs.append((rule, shapes[(n + rounds) % len(shapes)]))
    return pairs


def by_turns(pairs, turn):
    """Every second pair in a plain run, from number `turn` on, and all of them in a slow one."""
    return slow_but(pairs, pairs[turn::2])


def block_causal_toy(block=2, last_block="fill", **options):
    toy = BlockCausal(block, **options)
    toy.last_block = last_block
    return toy


ACROSS = published.KLASS.format(mu=0.4, nu=0.4, history=1)  # for bidirectional networks
KLASS = "klass:mu=0.3:nu=0.5:history=2"
TOY = Toy(unused=2)  # columns that are no tokens
FILL = block_causal_toy(length=12, unused=1)
CUT = block_causal_toy(length=12, last_block="cut")

# ---------------------------------------------------------------- law 1: sums to one

INSIDE = {"context": (1,), "suffix": (2, 0)}
SUMS = spread(
    (TOY, 1, "target", 4, {}),
    (TOY, 2, "row", 3, INSIDE),
    (TOY, 3, "target", 4, {}),
    (TOY, 3, "row", 3, INSIDE),
    (TOY, None, "target", 3, INSIDE),
    (TOY, 2, "target", 4, {"context": (0,), "suffix": (1,), "tail": 2}),
    (TOY, 1, "target", 3, {"context": (0,), "suffix": (1,), "tail": 2}),
    (FILL, "auto", "auto", 4, {}),
    (CUT, "auto", "auto", 3, {"context": (1,)}),
    (FILL, "auto", "auto", 3, {"context": (1,)}),
    (CUT, "auto", "auto", 3, {"context": (1, 0), "suffix": (2,)}),
    (FILL, "auto", "auto", 3, {"context": (0,), "tail": 2}),
    (CUT, "auto", "auto", 3, {"context": (0,), "tail": 2}),
)


@pytest.mark.parametrize(("rule", "shape"), [*SUMS, (ACROSS, (TOY, 2, "row", 3, INSIDE))])
def test_sums_to_one(rule, shape):
    toy, block, grid, length, more = shape
    duel = Duel(toy, rule, block, grid)
    assert abs(total(duel, length, **more) - 1) < 1e-9
    assert rules.parse(str(duel.rule)) == duel.rule


@dataclasses.dataclass(frozen=True)
class Peeks(rules.Rule):
    """Negative control: reveals first what the truth makes likely, by reading the row it is scored against."""

    truth: tuple = ()

    def __call__(self, predictions, lanes):
        truth = torch.tensor(self.truth)[lanes.row]  # (R, W)
        log_probs = predictions.log_prob(torch.where(lanes.masked, truth, -1))  # (R, W)
        likeliest = log_probs.masked_fill(~lanes.masked, -math.inf).argmax(1)[:, None]  # (R, 1)
        pick = torch.zeros_like(lanes.masked).scatter_(1, likeliest, True)
        return pick & lanes.masked  # a lane may have nothing left to reveal


def test_control_a_rule_that_peeks_does_not_sum_to_one():
    probabilities = []
    for string in strings(3, 2):
        [score] = Duel(TOY, Peeks((string,)), None).log_prob([Window((), string)])
        probabilities.append(math.exp(score.log_prob))
    assert abs(math.fsum(probabilities) - 1) > 0.01


def test_control_a_rule_that_stalls_raises():
    with pytest.raises(RuleStalled, match=r"Stalls:mu=0\.99.*Window 0, block at target position \d, step \d"):
        Duel(Toy(), Stalls(), 2).log_prob([Window((), (0, 1, 2))])


def test_control_a_rule_that_raises_is_named_with_its_line():
    with pytest.raises(DuelError, match=r"custom_rules:Misspelt .*'confidnce'.*custom_rules\.py, line \d+") as error:
        Duel(Toy(), Misspelt(), 2).log_prob([Window((), (0, 1, 2))])
    assert isinstance(error.value.__cause__, AttributeError)


@dataclasses.dataclass(frozen=True)
class Repeats(rules.Rule):
    """Negative control: picks everything at every step."""

    def __call__(self, predictions, lanes):
        return torch.ones_like(lanes.masked)


def test_control_a_rule_that_picks_revealed_positions_raises():
    with pytest.raises(RuleStalled, match="not masked"):
        Duel(Toy(), Repeats(), 4, "row").log_prob([Window((0, 1), (0, 1, 2))])


@dataclasses.dataclass(frozen=True)
class PicksOf(rules.Rule):
    """Negative control: what it picks is no boolean tensor on the device of the lanes."""

    dtype: str = "float32"
    device: str = "cpu"

    def __call__(self, predictions, lanes):
        return torch.ones(lanes.masked.shape, dtype=getattr(torch, self.dtype), device=self.device)


@pytest.mark.parametrize(("rule", "is_elsewhere"), [(PicksOf(), False), (PicksOf("bool", "meta"), True)])
def test_control_a_pick_of_another_form_is_named_and_the_device_only_if_it_is_another(rule, is_elsewhere):
    with pytest.raises(DuelError, match="its pick must be") as error:
        Duel(Toy(), rule, 4).log_prob([Window((), (0, 1, 2))])
    assert ("device=lanes.masked.device" in str(error.value)) == is_elsewhere


def test_control_mass_on_the_mask_does_not_sum_to_one():
    assert total(Duel(Leaky(), "greedy", 2), 4) < 0.99


# ---------------------------------------------------------------- laws 2 and 3: sampling


DRAWN = spread(
    (TOY, 2, "target", {}),
    (TOY, 2, "row", {}),
    (TOY, None, "target", {}),
    (TOY, None, "row", {}),
    (TOY, 2, "target", {"suffix": (1,)}),
    (TOY, 2, "target", {"tail": 2}),
    (TOY, 2, "target", {"tail": 1, "suffix": (0,)}),
    (TOY, None, "target", {"suffix": (1,)}),
    (FILL, "auto", "auto", {}),
    (CUT, "auto", "auto", {}),
    (FILL, "auto", "auto", {"tail": 2}),
)


@pytest.mark.parametrize(("rule", "shape"), [*DRAWN, (ACROSS, (TOY, 2, "target", {}))])
def test_sample_then_log_prob_is_the_same_path(rule, shape):
    toy, block, grid, more = shape
    contexts = [(), (1,), (0, 2)] * 3
    if more and toy is FILL:  # with a tail, a target ends where a block does
        contexts = [(), (0, 2)] * 4
    duel = Duel(toy, rule, block, grid)

    suffixes = [more.get("suffix", ())] * len(contexts)
    samples = duel.sample(contexts, 4, seed=3, suffixes=suffixes, tail=more.get("tail", 0))
    windows = [Window(context, sample.tokens, **more) for context, sample in zip(contexts, samples, strict=True)]
    scores = duel.log_prob(windows)

    for sample, score in zip(samples, scores, strict=True):
        assert sample.reveal_steps == score.reveal_steps
        assert sample.nfe == score.nfe
        assert sample.is_greedy == score.is_greedy
        assert sample.token_logprobs == pytest.approx(score.token_logprobs, abs=1e-9)
        assert sample.log_prob == pytest.approx(score.log_prob, abs=1e-9)


FOLLOWED = ["greedy:k=1", "threshold:mu=0.45", "klass:mu=0.4:nu=0.3", "entropy_bound:gamma=0.7"]


@pytest.mark.parametrize("rule", slow_but(FOLLOWED, [FOLLOWED[0], FOLLOWED[2]]))
def test_samples_follow_the_law(rule):
    """Pearson's statistic of 2,000 samples; a right sampler fails for one seed in 10^4."""
    flat = Toy(length=3, scale=0.4)  # no text is so likely that every draw gives it
    duel = Duel(flat, rule, 2)
    samples = duel.sample([()] * 2000, 3, seed=1)

    texts = strings(3, 3)
    scores = duel.log_prob([Window((), text) for text in texts])
    expected = {text: math.exp(score.log_prob) for text, score in zip(texts, scores, strict=True)}
    assert p_value([sample.tokens for sample in samples], expected) > 1e-4


@pytest.mark.parametrize(("rule", "shape"), by_turns(spread((TOY, 2), (TOY, None), (FILL, "auto"), (CUT, "auto")), 0))
def test_is_greedy_iff_decode_would_write_it(rule, shape):
    toy, block = shape
    duel = Duel(toy, rule, block)
    [decoded] = duel.sample([(1,)], 4, do_sample=False)
    assert decoded.is_greedy
    texts = strings(3, 4)
    scores = duel.log_prob([Window((1,), text) for text in texts])
    for text, score in zip(texts, scores, strict=True):
        assert score.is_greedy == (text == decoded.tokens), text


def test_samples_depend_on_neither_company_nor_memory():
    contexts = [(0,), (1,), (2, 1)]

    def tokens(duel, contexts=contexts, **keys):
        return [sample.tokens for sample in duel.sample(contexts, 4, seed=5, **keys)]

    together = tokens(Duel(Toy(), "greedy", 2))
    assert tokens(Duel(Small(most=2), "greedy", 2)) == together
    one_a_call = Duel(Toy(), "greedy", 2, batch_size=1)
    for key, context in enumerate(contexts):
        assert tokens(one_a_call, [context], keys=[key]) == [together[key]]
    with pytest.raises(torch.OutOfMemoryError):
        tokens(Duel(Small(most=0), "greedy", 2))


# ---------------------------------------------------------------- law 4: special cases by hand


def distributions(toy, row):
    logits = toy.features(torch.tensor([row]), None)[0].masked_fill(toy.excluded, -math.inf)
    return logits.log_softmax(-1)


def test_left_to_right_is_the_chain_rule():
    toy = Toy()
    string = (2, 0, 1, 1)
    by_hand = 0.0
    for i, token in enumerate(string):
        row = [*string[:i], *[toy.mask_id] * (4 - i)]
        by_hand += float(distributions(toy, row)[i, token])
    for block in (1, 2, 4, None):
        [score] = Duel(toy, "l2r", block).log_prob([Window((), string)])
        assert score.log_prob == pytest.approx(by_hand, abs=1e-9), block


# ---------------------------------------------------------------- law 8; a batch is the textbook loop: test_fuzz.py


@pytest.mark.parametrize(
    ("place", "name", "rule", "block", "batch_size"),
    [
        (Lanes, "reveal", KLASS, 2, 1),
        pytest.param(Lanes, "reveal", KLASS, None, 16, marks=pytest.mark.slow),
        pytest.param(Lanes, "concat", KLASS, 2, 1, marks=pytest.mark.slow),
        (CleanStream, "_grow", "threshold:mu=0.97", "auto", None),
        (CleanStream, "_extend", "left_to_right:k=3", "auto", None),
        (CleanStream, "past", KLASS, "auto", None),
        (BlockCausal, "stream", "left_to_right:k=3", "auto", None),
    ],
)
def test_no_step_is_lost_or_counted_twice_when_memory_runs_out_elsewhere(
    place, name, rule, block, batch_size, monkeypatch
):
    """A rule's memory is not lost either, when lanes that wait come back."""
    windows = [Window((), text) for text in strings(3, 4)[::9]]
    windows += [Window((1,), text) for text in strings(3, 6)[::40]]
    toy = Toy() if place is Lanes else BlockCausal(4, length=16)
    expected = numbers(Duel(toy, rule, block, batch_size=batch_size).log_prob(windows))
    whole = getattr(place, name)
    calls = itertools.count()

    def short_of_memory(self, *arguments, **more):
        if next(calls) % 4 == 3 and (place is not Lanes or len(self) > 1):
            raise torch.OutOfMemoryError("CUDA out of memory")
        return whole(self, *arguments, **more)

    monkeypatch.setattr(place, name, short_of_memory)
    again = Duel(toy, rule, block, batch_size=batch_size).log_prob(windows)
    assert numbers(again) == pytest.approx(expected, abs=1e-12, nan_ok=True)


@pytest.mark.parametrize("first_is_fresh", [False, True])
def test_lanes_that_are_joined_are_themselves_again(first_is_fresh):
    """With all that a rule and the network remember, also where one lane is wider; fresh lanes remember zeros."""
    rows = Rows.from_windows([Window((1,), (0, 2, 1, 0, 1, 2))], torch.device("cpu"))

    def block(start, width, memory):
        count = torch.zeros(2, dtype=torch.int64)
        lanes = Lanes.fresh(rows, count, count + start, count + width)
        plane = torch.arange(1.0, 2 * width + 1).view(2, width)
        planes = (plane, torch.stack([plane + 10, plane + 20], 2)) if memory else ()
        return dataclasses.replace(lanes, memory=planes, carried=planes[:1])

    narrow = block(1, 2, memory=not first_is_fresh)
    wide = block(3, 4, memory=True)
    joined = narrow.concat(wide)

    for lanes, part in ((narrow, joined.select(slice(0, 2))), (wide, joined.select(slice(2, 4)))):
        width = lanes.masked.shape[1]
        for name in PLANES:
            plane = getattr(part, name)
            assert torch.equal(plane if plane.dim() == 1 else plane[:, :width], getattr(lanes, name)), name
        assert not part.masked[:, width:].any()
        remembered = lanes.memory + lanes.carried
        for n, plane in enumerate(part.memory + part.carried):
            expected = remembered[n] if remembered else torch.zeros_like(plane[:, :width])
            assert torch.equal(plane[:, :width], expected)
            assert not plane[:, width:].any()


def test_blank_starts_are_exact_ties_in_any_batch():
    toy = Rotary(length=12, tokens=4)
    windows = [Window((), (3, 1, 2, 0)), Window((), (1, 1)), Window((2,), (0, 1, 3)), Window((), (0, 2, 2, 1, 3, 0))]
    together = Duel(toy, "greedy", 3).log_prob(windows)
    assert [score.all_mask_starts for score in together] == [1, 1, 0, 1]
    for window, score in zip(windows, together, strict=True):
        [alone] = Duel(toy, "greedy", 3, batch_size=1).log_prob([window])
        assert alone.reveal_steps == score.reveal_steps
        assert alone.token_logprobs == pytest.approx(score.token_logprobs, abs=1e-7)  # the planted noise
    assert together[0].reveal_steps[0] == 0  # the lowest position first
    assert together[0].near_ties == 0


# ---------------------------------------------------------------- laws 11 to 14


@pytest.mark.parametrize("rule", ONE_AT_A_TIME)
def test_exact_conditionals_give_the_joint_in_any_order(rule):
    joint = Joint()
    windows = [Window((), tuple(string)) for string in joint.strings.tolist()]
    log_joint = joint.joint.log().tolist()
    for block in BLOCKS:
        scores = Duel(joint, rule, block).log_prob(windows)
        assert [score.log_prob for score in scores] == pytest.approx(log_joint, abs=1e-9), block


def test_an_inconsistent_denoiser_depends_on_the_order():
    duel = Duel(Toy(), "l2r", None)
    window = Window((), (2, 0, 1))
    orders = list(itertools.permutations(range(3)))
    scores = duel.replay([window] * len(orders), orders)
    values = [score.log_prob for score in scores]
    assert max(values) - min(values) > 1e-3


def test_replay_of_a_recorded_order_is_the_score():
    windows = [Window((1,), (2, 0, 1, 1, 2)), Window((), (0, 0, 1))]
    for rule in RULES[::3]:  # a replay reads orders, whatever made them
        duel = Duel(Toy(), rule, 3)
        scores = duel.log_prob(windows)
        replayed = duel.replay(windows, [score.reveal_steps for score in scores])
        for again, score in zip(replayed, scores, strict=True):
            assert again.token_logprobs == pytest.approx(score.token_logprobs, abs=1e-12)
    with pytest.raises(ValueError, match="without gaps"):
        duel.replay(windows[1:], [(0, 2, 0)])


@pytest.mark.parametrize("rule", RULES)
def test_the_truth_under_masked_positions_is_never_seen(rule):
    duel = Duel(Toy(), rule, 3)
    string = (2, 0, 1, 1, 0)
    [before] = duel.log_prob([Window((1,), string)])
    moments = []  # a block and a step, at which the truth is another one wherever it is still masked
    windows = []
    for block in (range(3), range(3, 5)):
        steps = max(before.reveal_steps[i] for i in block) + 1
        for step in range(steps):
            changed = list(string)
            for i in block:
                if before.reveal_steps[i] >= step:
                    changed[i] = (changed[i] + 1) % 3
            moments.append((block, step))
            windows.append(Window((1,), tuple(changed)))

    for (block, step), after in zip(moments, duel.log_prob(windows), strict=True):
        for i in block:
            if before.reveal_steps[i] <= step:
                assert after.reveal_steps[i] == before.reveal_steps[i]
            else:
                assert after.reveal_steps[i] > step


@pytest.mark.parametrize(("rule", "tail"), by_turns(spread(1, 2), 1))
def test_a_tail_is_the_probability_of_the_beginning(rule, tail):
    """p(beginning) is the sum of p over all texts that begin so."""
    duel = Duel(TOY, rule, 2)
    texts = strings(3, 2 + tail)
    sums: dict[tuple, float] = {}
    for text, score in zip(texts, duel.log_prob([Window((1,), text) for text in texts]), strict=True):
        beginning = text[:2]
        sums[beginning] = sums.get(beginning, 0.0) + math.exp(score.log_prob)

    scores = duel.log_prob([Window((1,), beginning, (), tail) for beginning in sums])
    assert [math.exp(score.log_prob) for score in scores] == pytest.approx(list(sums.values()), abs=1e-9)
