"""The laws of the design, on toy denoisers by exact enumeration. Float64 agrees to 1e-9 and in order.

Every rule meets every law; the shapes of bidirectional and block-causal networks take turns.
"""

import dataclasses
import itertools
import math

import published
import pytest
import torch
from custom_rules import Misspelt, Stalls
from drawn_reference import p_value
from laws import AROUND, RULES, numbers, strings, total
from toys import BlockCausal, Joint, Leaky, Rotary, Small, Toy

from lm_eval_duel import Duel, rules
from lm_eval_duel.core.block_causal import BlockCausalView
from lm_eval_duel.core.lanes import Lanes
from lm_eval_duel.core.windows import Window
from lm_eval_duel.errors import DuelError, RuleStalled

ONE_AT_A_TIME = [r for r in RULES if ":k=1" in r] + ["threshold:mu=1.0", "entropy_bound:gamma=0.0"]
BLOCKS = [2, None]


def spread(*shapes):
    """(rule, shape): every rule in one of the shapes, which take turns; each round begins with the next one."""
    return [(rule, shapes[(n + n // len(shapes)) % len(shapes)]) for n, rule in enumerate([*RULES, *AROUND])]


def block_causal_toy(block=2, last_block="fill", **options):
    toy = BlockCausal(block, **options)
    toy.last_block = last_block
    return toy


ACROSS = published.KLASS.format(mu=0.4, nu=0.4, history=1)  # for bidirectional networks
KLASS = "klass:mu=0.3:nu=0.5:history=2"
TOY, FILL = Toy(unused=2), block_causal_toy(length=12, unused=1)  # columns that are no tokens
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
    assert abs(total(duel, length, **more) - 1) < 1e-9 and rules.parse(str(duel.rule)) == duel.rule


@dataclasses.dataclass(frozen=True)
class Peeks(rules.Rule):
    """Negative control: reveals first what the truth makes likely, by reading the row it is scored against."""

    truth: tuple = ()

    def __call__(self, predictions, lanes):
        row = torch.tensor(self.truth)[lanes.row]  # (R, W)
        gain = predictions.log_prob(torch.where(lanes.masked, row, -1))
        return (
            torch.zeros_like(lanes.masked).scatter_(
                1, torch.where(lanes.masked, gain, -math.inf).argmax(1)[:, None], True
            )
            & lanes.masked
        )


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


def test_control_mass_on_the_mask_does_not_sum_to_one():
    assert total(Duel(Leaky(), "greedy", 2), 4) < 0.99


# ---------------------------------------------------------------- laws 2 and 3: sampling


DRAWN = spread(
    *((TOY, block, grid, {}) for block in (2, None) for grid in ("target", "row")),
    *((TOY, 2, "target", more) for more in ({"suffix": (1,)}, {"tail": 2}, {"tail": 1, "suffix": (0,)})),
    (TOY, None, "target", {"suffix": (1,)}),
    (FILL, "auto", "auto", {}),
    (CUT, "auto", "auto", {}),
    (FILL, "auto", "auto", {"tail": 2}),
)


@pytest.mark.parametrize(("rule", "shape"), [*DRAWN, (ACROSS, (TOY, 2, "target", {}))])
def test_sample_then_log_prob_is_the_same_path(rule, shape):
    toy, block, grid, more = shape
    contexts = [(), (0, 2)] * 4 if more and toy is FILL else [(), (1,), (0, 2)] * 3
    duel = Duel(toy, rule, block, grid)
    suffixes = [more.get("suffix", ())] * len(contexts)
    drawn = duel.sample(contexts, 4, seed=3, suffixes=suffixes, tail=more.get("tail", 0))
    scored = duel.log_prob([Window(c, d.tokens, **more) for c, d in zip(contexts, drawn, strict=True)])
    for d, s in zip(drawn, scored, strict=True):
        assert (d.reveal_steps, d.nfe, d.is_greedy) == (s.reveal_steps, s.nfe, s.is_greedy)
        assert d.token_logprobs == pytest.approx(s.token_logprobs, abs=1e-9)
        assert d.log_prob == pytest.approx(s.log_prob, abs=1e-9)


@pytest.mark.parametrize("rule", ["greedy:k=1", "threshold:mu=0.45", "klass:mu=0.4:nu=0.3", "entropy_bound:gamma=0.7"])
def test_samples_follow_the_law(rule):
    """Pearson's statistic of 2,000 samples; a right sampler fails for one seed in 10^4."""
    duel, texts = Duel(Toy(length=3, scale=0.4), rule, 2), strings(3, 3)  # flat, so that draws may depend on each other
    drawn = duel.sample([()] * 2000, 3, seed=1)
    scored = duel.log_prob([Window((), text) for text in texts])
    expected = {text: math.exp(score.log_prob) for text, score in zip(texts, scored, strict=True)}
    assert p_value([sample.tokens for sample in drawn], expected) > 1e-4


@pytest.mark.parametrize(("rule", "shape"), spread((TOY, 2), (TOY, None), (FILL, "auto"), (CUT, "auto")))
def test_is_greedy_iff_decode_would_write_it(rule, shape):
    toy, block = shape
    duel = Duel(toy, rule, block)
    [decoded] = duel.sample([(1,)], 4, do_sample=False)
    assert decoded.is_greedy
    scored = duel.log_prob([Window((1,), s) for s in strings(3, 4)])
    assert [s.is_greedy for s in scored] == [s == decoded.tokens for s in strings(3, 4)]


def test_samples_depend_on_neither_company_nor_memory():
    contexts, settings = [(0,), (1,), (2, 1)], {"length": 4, "seed": 5}
    together = [drawn.tokens for drawn in Duel(Toy(), "greedy", 2).sample(contexts, **settings)]
    assert [drawn.tokens for drawn in Duel(Small(most=2), "greedy", 2).sample(contexts, **settings)] == together
    duel = Duel(Toy(), "greedy", 2, batch_size=1)
    assert [duel.sample([c], **settings, keys=[i])[0].tokens for i, c in enumerate(contexts)] == together
    with pytest.raises(torch.OutOfMemoryError):
        Duel(Small(most=0), "greedy", 2).sample(contexts, **settings)


# ---------------------------------------------------------------- law 4: special cases by hand


def distributions(toy, row):
    logits = toy.features(torch.tensor([row]), None)[0].masked_fill(toy.excluded, -math.inf)
    return logits.log_softmax(-1)


def test_left_to_right_is_the_chain_rule():
    toy, string = Toy(), (2, 0, 1, 1)
    by_hand = sum(float(distributions(toy, [*string[:i], *[toy.mask_id] * (4 - i)])[i, string[i]]) for i in range(4))
    for block in (1, 2, 4, None):
        assert Duel(toy, "l2r", block).log_prob([Window((), string)])[0].log_prob == pytest.approx(by_hand, abs=1e-9)


# ---------------------------------------------------------------- law 8; a batch is the textbook loop: test_fuzz.py


@pytest.mark.parametrize(
    ("place", "name", "rule", "block", "batch_size"),
    [
        (Lanes, "reveal", KLASS, 2, 1),
        pytest.param(Lanes, "reveal", KLASS, None, 16, marks=pytest.mark.slow),
        pytest.param(Lanes, "concat", KLASS, 2, 1, marks=pytest.mark.slow),
        (BlockCausalView, "_grow", "threshold:mu=0.97", "auto", None),
        (BlockCausalView, "_extend", "left_to_right:k=3", "auto", None),
        (BlockCausalView, "_past", KLASS, "auto", None),
        (BlockCausal, "stream", "left_to_right:k=3", "auto", None),
    ],
)
def test_no_step_is_lost_or_counted_twice_when_memory_runs_out_elsewhere(
    place, name, rule, block, batch_size, monkeypatch
):
    """A rule's memory is not lost either, when lanes that wait come back."""
    windows = [Window((), s) for s in strings(3, 4)[::9]] + [Window((1,), s) for s in strings(3, 6)[::40]]
    toy = Toy() if place is Lanes else BlockCausal(4, length=16)
    expected = numbers(Duel(toy, rule, block, batch_size=batch_size).log_prob(windows))
    whole, calls = getattr(place, name), itertools.count()

    def short_of_memory(self, *arguments, **more):
        if next(calls) % 4 == 3 and (place is not Lanes or len(self) > 1):
            raise torch.OutOfMemoryError("CUDA out of memory")
        return whole(self, *arguments, **more)

    monkeypatch.setattr(place, name, short_of_memory)
    again = Duel(toy, rule, block, batch_size=batch_size).log_prob(windows)
    assert numbers(again) == pytest.approx(expected, abs=1e-12, nan_ok=True)


def test_blank_starts_are_exact_ties_in_any_batch():
    toy = Rotary(length=12, tokens=4)
    windows = [Window((), (3, 1, 2, 0)), Window((), (1, 1)), Window((2,), (0, 1, 3)), Window((), (0, 2, 2, 1, 3, 0))]
    alone = [Duel(toy, "greedy", 3, batch_size=1).log_prob([w])[0] for w in windows]
    together = Duel(toy, "greedy", 3).log_prob(windows)
    assert [s.all_mask_starts for s in together] == [1, 1, 0, 1]
    for a, b in zip(alone, together, strict=True):
        assert a.reveal_steps == b.reveal_steps
        assert a.token_logprobs == pytest.approx(b.token_logprobs, abs=1e-7)  # the planted noise
    assert together[0].reveal_steps[0] == 0  # the lowest position first
    assert together[0].near_ties == 0


# ---------------------------------------------------------------- laws 11 to 14


@pytest.mark.parametrize("rule", ONE_AT_A_TIME)
def test_exact_conditionals_give_the_joint_in_any_order(rule):
    joint = Joint()
    for block in BLOCKS:
        scored = Duel(joint, rule, block).log_prob([Window((), tuple(s)) for s in joint.strings.tolist()])
        assert [s.log_prob for s in scored] == pytest.approx(joint.joint.log().tolist(), abs=1e-9), block


def test_an_inconsistent_denoiser_depends_on_the_order():
    duel = Duel(Toy(), "l2r", None)
    window = Window((), (2, 0, 1))
    values = [duel.replay([window], [order])[0].log_prob for order in itertools.permutations(range(3))]
    assert max(values) - min(values) > 1e-3


def test_replay_of_a_recorded_order_is_the_score():
    windows = [Window((1,), (2, 0, 1, 1, 2)), Window((), (0, 0, 1))]
    for rule in RULES:
        duel = Duel(Toy(), rule, 3)
        scored = duel.log_prob(windows)
        again = duel.replay(windows, [s.reveal_steps for s in scored])
        assert [s.token_logprobs for s in again] == [pytest.approx(s.token_logprobs, abs=1e-12) for s in scored]
    with pytest.raises(ValueError, match="without gaps"):
        duel.replay(windows[1:], [(0, 2, 0)])


@pytest.mark.parametrize("rule", RULES)
def test_the_truth_under_masked_positions_is_never_seen(rule):
    duel = Duel(Toy(), rule, 3)
    string = (2, 0, 1, 1, 0)
    before = duel.log_prob([Window((1,), string)])[0]
    for block_start in (0, 3):
        positions = range(block_start, min(block_start + 3, 5))
        for step in range(max(before.reveal_steps[i] for i in positions) + 1):
            late = [i for i in positions if before.reveal_steps[i] >= step]
            changed = list(string)
            for i in late:
                changed[i] = (changed[i] + 1) % 3
            after = duel.log_prob([Window((1,), tuple(changed))])[0]
            for i in positions:
                if before.reveal_steps[i] <= step:
                    assert after.reveal_steps[i] == before.reveal_steps[i]
                else:
                    assert after.reveal_steps[i] > step


@pytest.mark.parametrize(("rule", "tail"), spread(1, 2))
def test_a_tail_is_the_probability_of_the_beginning(rule, tail):
    duel = Duel(TOY, rule, 2)
    longer: dict[tuple, float] = {}
    whole = strings(3, 2 + tail)
    for string, s in zip(whole, duel.log_prob([Window((1,), s) for s in whole]), strict=True):
        longer[string[:2]] = longer.get(string[:2], 0.0) + math.exp(s.log_prob)
    scored = duel.log_prob([Window((1,), start, (), tail) for start in longer])
    assert [math.exp(s.log_prob) for s in scored] == pytest.approx(list(longer.values()), abs=1e-9)
