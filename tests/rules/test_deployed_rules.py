"""Laws of every rule that samplers use, inside blocks too; rules that may wait; ids of a text's end, refusals."""

import dataclasses

import pytest
import torch
from laws import RULES, total
from published import PC
from toys import Rotary, Toy

from lm_eval_duel import Duel, rules
from lm_eval_duel.core.windows import Window
from lm_eval_duel.errors import DuelError, RuleStalled
from lm_eval_duel.estimators.checks import check_rule
from lm_eval_duel.options import Options
from lm_eval_duel.rules import presets


def test_a_block_of_masks_alone():
    """Where all positions are equal, dInfer's rules reveal all of them, and the others the lowest."""
    toy = Rotary(length=6, tokens=3)
    toy.noise = 0.0
    window = Window((), (0, 1, 2))
    p = toy.features(torch.full((1, 3), toy.mask_id), None)[0, 0, :3].double().softmax(0)
    low = float(p.max()) / 2

    for rule in ("dinfer_threshold:mu=1.0", f"hierarchy:low={low}"):
        [scored] = Duel(toy, rule, 3).log_prob([window])
        assert scored.reveal_steps == (0, 0, 0)
        assert scored.all_mask_starts == 1
        assert scored.log_prob == pytest.approx(float(p.log().sum()), abs=1e-6)

    [scored] = Duel(toy, "threshold:mu=1.0", 3).log_prob([window])
    assert scored.reveal_steps[0] == 0


# ---------------------------------------------------------------- inside a block


def every_rule(table):
    """A text of every rule with several schedules, without what goes around rules."""
    texts = [
        *RULES,
        f"{PC}:decay=0.25:alpha=0.9:steps=2:table={table}",
        "klass:mu=0.4:nu=0.4:history=2",
        "quota:steps=3",
        "dream:alg=entropy:steps=3",
        "custom_rules:Turns",
    ]
    names = {rules.split(text)[0] for text in texts}
    assert names >= {*rules.RULES}
    return texts


def one_of_each(table):
    """A text of every rule, with one schedule."""
    return {rules.split(text)[0]: text for text in every_rule(table)}.values()


TEXTS = pytest.mark.parametrize("texts", [one_of_each, pytest.param(every_rule, marks=pytest.mark.slow)])


def test_a_rule_in_a_file_sums_to_one(table):
    duel = Duel(Toy(), f"{PC}:decay=0.25:alpha=0.9:steps=2:table={table}", 2)

    assert abs(total(duel, 4) - 1) < 1e-9


@TEXTS
def test_sub_blocks_are_blocks_that_see_the_masks_after_them(texts, table, subtests):
    """In a bidirectional network, sub-blocks are smaller blocks: a rule's steps and memory start again in each."""
    toy = Toy(length=9)
    windows = [Window((1,), (2, 0, 1, 1, 2, 0, 0, 1)), Window((), (0, 0, 1, 2, 1))]
    for rule in texts(table):
        with subtests.test(rule):
            by_small_blocks = Duel(toy, rule, 3).log_prob(windows)
            by_sub_blocks = Duel(toy, f"{rule}:sub_block=3", 6).log_prob(windows)
            for score, expected in zip(by_sub_blocks, by_small_blocks, strict=True):
                assert score.token_logprobs == pytest.approx(expected.token_logprobs, abs=1e-12)
                assert score.nfe == expected.nfe


@TEXTS
def test_after_a_blocks_first_position_a_rule_starts_afresh(texts, table, subtests):
    """The first position of a block alone, then the rule as in a block that begins behind it."""
    toy = Toy(length=9)
    window = Window((1,), (2, 0, 1, 1, 2))
    rest = Window((1, 2), (0, 1, 1, 2))
    for rule in texts(table):
        if rules.parse(rule).name in ("dream", "random"):
            continue  # its schedule goes on, see `after_first`; its order is that of the whole block
        with subtests.test(rule):
            [seeded] = Duel(toy, f"{rule}:seed_first=true", 5).log_prob([window])
            [behind] = Duel(toy, rule, 4).log_prob([rest])
            first, *later = seeded.reveal_steps
            assert first == 0
            assert later == [step + 1 for step in behind.reveal_steps]
            assert seeded.token_logprobs[1:] == pytest.approx(behind.token_logprobs, abs=1e-12)


@TEXTS
def test_in_a_block_that_begins_inside_the_context_nothing_is_seeded(texts, table, subtests):
    """Its first position is known, so the rule goes on as in a block that begins behind it: order, steps and values."""
    toy = Toy(length=9)
    window = Window((1, 0), (2, 0, 1, 1, 2, 0))
    for rule in texts(table):
        if rules.parse(rule).name in ("dream", "random"):
            continue  # its schedule goes on, see `after_first`
        with subtests.test(rule):
            [seeded] = Duel(toy, f"{rule}:seed_first=true", 8, grid="row").log_prob([window])
            [plain] = Duel(toy, rule, 8, grid="row").log_prob([window])
            assert seeded.reveal_steps == plain.reveal_steps
            assert seeded.nfe == plain.nfe
            assert seeded.token_logprobs == pytest.approx(plain.token_logprobs, abs=1e-12)


# ---------------------------------------------------------------- rules that may wait


@dataclasses.dataclass(frozen=True)
class EverySecond(rules.Rule):
    """Reveals the first masked position at odd steps."""

    may_pick_none = True
    reads_step = True

    def __call__(self, predictions, lanes):
        return lanes.masked & (lanes.masked.cumsum(1) == 1) & (lanes.step % 2 == 1)[:, None]


@dataclasses.dataclass(frozen=True)
class Patient(rules.Rule):
    """Counts in its memory, to `until`, and then reveals all; or never counts."""

    until: int = 2
    counts: bool = True
    may_pick_none = True

    def __call__(self, predictions, lanes):
        now = lanes.memory[0] if lanes.memory else torch.zeros_like(lanes.masked, dtype=torch.int64)
        return rules.Decision(lanes.masked & (now >= self.until), None, (now + self.counts,))


def test_a_rule_that_may_wait():
    windows = [Window((1,), (2, 0, 1)), Window((), (0, 2))]
    left_to_right = Duel(Toy(), "left_to_right", None).log_prob(windows)
    expected = [score.log_prob for score in left_to_right]
    waits = Duel(Toy(), EverySecond(), None)

    scores = waits.log_prob(windows)
    steps = [score.reveal_steps for score in scores]
    assert steps == [(1, 3, 5), (1, 3)]
    assert [score.nfe for score in scores] == [6, 4]
    assert [score.log_prob for score in scores] == pytest.approx(expected, abs=1e-12)

    replayed = waits.replay(windows, steps)
    assert [score.log_prob for score in replayed] == pytest.approx(expected, abs=1e-12)

    by_patience = Duel(Toy(), Patient(), 2).log_prob(windows)
    assert by_patience[0].reveal_steps == (2, 2, 2)


@pytest.mark.parametrize("rule", [Patient(counts=False), type("Hasty", (Patient,), {"may_pick_none": False})()])
def test_a_rule_that_waits_without_end_stalls(rule):
    with pytest.raises(RuleStalled, match="picked nothing"):
        Duel(Toy(), rule, 2).log_prob([Window((), (0, 1))])


# ---------------------------------------------------------------- ids, tables, refusals


class Words:
    """A tokenizer of some special tokens."""

    def __init__(self, eos, **ids):
        self.eos_token_id = eos
        self.ids = ids

    def get_vocab(self):
        return self.ids


def test_the_ends_of_a_text_come_from_the_tokenizer_or_are_given():
    rule = rules.parse("quota:steps=4:eos=conf")
    eot = {"<|eot_id|>": 5}
    assert str(rule.with_tokenizer(Words(3, **eot))) == "quota:steps=4:eos=conf:eos_id=3:eot_id=5"
    assert str(rule.with_tokenizer(Words(3))) == "quota:steps=4:eos=conf:eos_id=3"
    assert str(rule.with_tokenizer(Words(5, **eot))) == "quota:steps=4:eos=conf:eos_id=5", "one token ends both"
    given = rules.parse("quota:steps=4:eos=conf:eos_id=1:eot_id=0:sub_block=2:seed_first=true")
    assert given.with_tokenizer(Words(3, **eot)) == given
    assert rules.parse("quota:steps=4").with_tokenizer(Words(3)) == rules.parse("quota:steps=4")
    with pytest.raises(DuelError, match="The tokenizer names no EOS"):
        rule.with_tokenizer(Words(None))
    with pytest.raises(DuelError, match="needs the id of EOS: pass eos_id"):
        check_rule(Toy(), rule)
    with pytest.raises(DuelError, match="eos_id=99 of rule quota is not an id"):
        check_rule(Toy(), rules.parse("quota:steps=4:eos=conf:eos_id=99"))


def test_samplers_that_are_no_distribution_are_refused_with_the_reason():
    for name, (_, reason) in presets.REFUSED.items():
        for arguments in ({"rule": name}, {"preset": name}, {"rule": name.upper().replace("-", "_")}):
            with pytest.raises(DuelError) as error:
                Options.parse(arguments)
            assert reason in str(error.value)
