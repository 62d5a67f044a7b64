"""Rules: text form, close picks, and independence of the length for `random`; errors are in test_options.py."""

import dataclasses
import re
from pathlib import Path

import custom_rules
import pytest
import torch
from random_lanes import decided
from toys import Toy

from lm_eval_duel import Duel, Window, rules
from lm_eval_duel.errors import DuelError

ALL = [
    "left_to_right:k=1",
    "right_to_left:k=3",
    "random:k=2:seed=5",
    "greedy:k=1",
    "margin:k=2",
    "log_margin:k=4",
    "threshold:mu=0.9",
    "klass:mu=0.9:nu=0.01:history=1:kl=paper",
    "klass:mu=0.6:nu=0.015:history=2:kl=authors",
    "entropy_bound:gamma=0.15",
    "entropy:k=1",
    "threshold:mu=0.9:strict=True",
    "klass:mu=0.6:nu=0.015:history=2:kl=authors:across=True",
    "entropy_bound:gamma=0.15:inclusive=True",
    "entropy_threshold:tau=0.4",
    "factor:f=1.0:variant=b",
    "high_or_topk:n=1:tau=0.95",
    "dinfer_threshold:mu=0.9",
    "hierarchy:low=0.4:tau=None",
    "quota:steps=32:eos=conf:eos_id=1:eot_id=2",
    "dream:alg=entropy:steps=64",
]


def test_text_form_is_reversible():
    for text in ALL:
        rule = rules.parse(text)
        assert str(rule) == text
        assert rules.parse(str(rule)) == rule

    needed = {"threshold": ":mu=0.5", "entropy_bound": ":gamma=1"}
    for alias, name in rules.ALIASES.items():
        arguments = needed.get(name, "")
        assert rules.parse(alias + arguments) == rules.parse(name + arguments)


def test_rules_of_one_family_differ_in_one_number():
    assert rules.family("cumulative_quota:steps=8:tau=0.9") == ("cumulative_quota:tau=0.9", 8.0)
    assert rules.family("threshold_until:mu=0.9:steps=8") == ("threshold_until:steps=8", 0.9)
    assert rules.family("module:Rule:k=half:mu=0.5") == ("module:Rule:k=half", 0.5)
    assert rules.family("left_to_right") == ("left_to_right", 1.0)

    different = {rules.family(text) for text in ALL}
    assert len(different) == len(ALL)


@pytest.mark.parametrize("text", ["threshold,mu=0.9", "klass:mu=0.9, nu=0.1", "greedy,k=2:seed_first=true"])
def test_a_comma_before_a_parameter_is_answered_with_the_right_text(text):
    right = re.sub(", *", ":", text)
    for read in (rules.parse, lambda text: Duel.from_pretrained("no such checkpoint", rule=text)):
        with pytest.raises(DuelError, match=f"write {right}"):
            read(text)
    rules.parse(right)


def test_a_path_may_have_commas(tmp_path):
    folder = tmp_path / "lr=0.1,seed=3"
    folder.mkdir()
    file = folder / "rule_in_a_folder.py"
    file.write_text(Path(custom_rules.__file__).read_text())
    assert rules.parse(f"{file}:Stalls:mu=0.2").mu == 0.2


@dataclasses.dataclass(frozen=True)
class Wide(rules.RULES["greedy"]):
    """A rule of one's own that stands on a built-in one, with fields of several types."""

    least: float | None = None
    name_of: str = "x"
    odd: bool = False
    most: "int | None" = None


def test_fields_of_a_rule_of_ones_own():
    rule = rules.parse("test_rules:Wide:k=2:least=0.5:odd=true:most=3")

    assert rule.k == 2
    assert rule.least == 0.5
    assert rule.name_of == "x"
    assert rule.odd is True
    assert rule.most == 3
    assert str(rule) == "test_rules:Wide:k=2:least=0.5:name_of=x:odd=True:most=3"
    assert rules.parse(str(rule)) == rule
    assert rules.parse(str(rules.parse("test_rules:Wide"))) == rules.parse("test_rules:Wide")


def test_a_rule_may_be_named_by_its_file(tmp_path):
    code = Path(custom_rules.__file__).read_text()
    file = tmp_path / "rule_in_a_file.py"
    named_as_a_module = tmp_path / "random.py"
    for copy in (file, named_as_a_module):
        copy.write_text(code)
    window = Window((), (0, 1, 0, 1))

    rule = rules.parse(f"{file}:Stalls:mu=0.2")
    assert rules.parse(str(rule)) == rule

    [by_file] = Duel(Toy(length=6), rule, 2).log_prob([window])
    [imported] = Duel(Toy(length=6), custom_rules.Stalls(0.2), 2).log_prob([window])
    assert by_file.log_prob == pytest.approx(imported.log_prob, abs=1e-9)

    for text, message in (
        (f"{tmp_path}/no.py", "No file"),
        (f"{tmp_path}/no.py:Stalls", "No file"),
        (f"{named_as_a_module}:Stalls", "another name"),
    ):
        with pytest.raises(DuelError, match=message):
            rules.parse(text)
    for without_a_class in (f"{file}", f"{file}:mu=0.2"):
        with pytest.raises(DuelError, match=re.escape(f"{file}:") + ".*Stalls"):
            rules.parse(without_a_class)


def test_a_module_without_the_name_of_its_rule_is_told_from_a_misspelt_rule(tmp_path, monkeypatch):
    known = Path(custom_rules.__file__)
    (tmp_path / "rules_of_mine.py").write_text(known.read_text())
    monkeypatch.chdir(tmp_path)
    for module in ("rules_of_mine", known.stem):  # in this folder, and on the path
        with pytest.raises(DuelError, match=f"{module}:.*Stalls"):
            rules.parse(module)
    with pytest.raises(DuelError, match="Did you mean greedy"):
        rules.parse("gredy")
    with pytest.raises(DuelError, match="Unknown"):
        rules.parse("statistics")  # a module, but Python's own


# ---------------------------------------------------------------- picks


def picked(rule, probabilities, masked=None):
    """The picks of one lane with these distributions, one row a position."""
    logits = torch.tensor(probabilities, dtype=torch.float64).log()[None]  # (1, W, V)
    masked = torch.tensor([masked or [True] * len(probabilities)])  # (1, W)
    pick = decided(rule, logits, masked).pick[0]
    return pick.nonzero()[:, 0].tolist()


FOUR = [[0.5, 0.3, 0.2], [0.5, 0.4, 0.1], [0.9, 0.05, 0.05], [0.5, 0.3, 0.2]]


@pytest.mark.parametrize("lift", [0, 8, 16, 20, 26])
@pytest.mark.parametrize("rule", ["greedy", "log_margin", "entropy_bound:gamma=0"])
def test_float32_picks_like_float64_however_sure_the_network_is(rule, lift):
    """Top tokens `lift` logits above the rest: probabilities near 1 round together, the statistics must not."""
    logits = torch.randn(3000, 6, 9, generator=torch.Generator().manual_seed(lift))
    logits[..., 0] += lift
    masked = torch.ones(3000, 6, dtype=torch.bool)
    coarse = decided(rule, logits.to(torch.float32), masked)
    fine = decided(rule, logits.to(torch.float64), masked)
    moved = (coarse.pick != fine.pick).any(1)  # (R,)
    counted = torch.minimum(coarse.decision_margin, fine.decision_margin) <= 1e-4
    assert not (moved & ~counted).any()  # a pick that moved and was not counted as close
    assert counted.float().mean() < 0.05


def test_random_is_independent_of_the_length():

    def order(length):
        """The positions in the order in which a larger k adds them."""
        positions = []
        for k in range(1, length + 1):
            [added] = {*picked(f"random:k={k}:seed=3", flat[:length])} - {*positions}
            positions.append(added)
        return positions

    flat = [[0.5, 0.5]] * 8
    assert [position for position in order(8) if position < 4] == order(4)
    assert picked("random:k=8:seed=3", flat) == list(range(8))

    of_seeds = {tuple(picked(f"random:k=4:seed={seed}", flat)) for seed in range(20)}
    assert len(of_seeds) > 5


def test_revealed_positions_are_never_read():
    """NaN stands outside the masked positions, and no rule stumbles over it."""
    for text in ALL:
        positions = picked(text, FOUR, [True, False, False, True])
        assert positions in ([0], [3], [0, 3])


def test_a_floor_above_the_threshold_is_refused():
    """It would change nothing; the default floor may be above a small mu."""
    with pytest.raises(DuelError, match=r"'floor'.*mu=0.3"):
        rules.parse("threshold_bound:mu=0.3:floor=0.5")
    assert rules.parse("threshold_bound:mu=0.3").floor == 0.45


def test_a_schedule_whose_steps_may_reveal_nothing_has_at_most_4096_of_them():
    assert rules.parse("cumulative_quota:steps=4096:tau=0.9").steps == 4096
    with pytest.raises(DuelError, match=r"'steps'.*4096"):
        rules.parse("cumulative_quota:steps=4097:tau=0.9")
