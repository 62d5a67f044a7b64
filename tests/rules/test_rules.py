"""Rules: text form, checks, errors, ties, close picks; and independence of the length for `random`."""

import dataclasses
import re
from pathlib import Path
from types import SimpleNamespace

import custom_rules
import pytest
import torch
from toys import Toy

from lm_eval_duel import Duel, Window, rules
from lm_eval_duel.core.predictions import Predictions
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
        assert str(rule) == text and rules.parse(str(rule)) == rule
    for alias, name in rules.ALIASES.items():
        arguments = {"threshold": ":mu=0.5", "entropy_bound": ":gamma=1"}.get(name, "")
        assert rules.parse(alias + arguments) == rules.parse(name + arguments)


WRONG = (  # a rule, and what the error names
    ("gredy", "'gredy'. Did you mean greedy?"),
    ("greedy:q=2", "'q'. Known: k."),
    ("greedy:mu=0.5", "'mu'"),
    ("threshold", "mu"),
    ("klass:mu=0.5", "nu"),
    ("eb", "gamma"),
    ("threshold:mu=1.5", "'mu'"),
    ("greedy:k=0", "'k'"),
    ("klass:mu=0.9:nu=0.01:kl=papr", "Did you mean paper?"),
    ("entropy_bound:gamma=-1", "'gamma'"),
    ("greedy:2", "'2'"),
    ("klass:mu=0.9:nuu=0.01", "'nuu'. Did you mean nu?"),
    ("greedy:k=1:k=2", "k twice"),
    ("no_such_module:Rule", "'no_such_module'"),
    ("no.such.module:Rule", "'no.such.module'"),
    (":Rule", "':Rule'"),
    ("textbook:score", "lm_eval_duel.rules.Rule"),
    ("factor:f=0", "'f'"),
    ("dream:alg=confidence_threshold:steps=4", "needs tau"),
    ("dream:alg=entropy:steps=4:tau=0.9", "alg=confidence_threshold only"),
    ("quota:steps=4:eos_id=4", "eos=conf only"),
    ("custom_rules:Stals", "Did you mean Stalls?"),
)


def test_errors_name_the_parameter(subtests):
    for text, named in WRONG:
        with subtests.test(text), pytest.raises(DuelError, match=re.escape(named)):
            rules.parse(text)


@dataclasses.dataclass(frozen=True)
class Wide(rules.RULES["greedy"]):
    """A rule of one's own that stands on a built-in one, with fields of several types."""

    least: float | None = None
    name_of: str = "x"
    odd: bool = False
    most: "int | None" = None


def test_fields_of_a_rule_of_ones_own():
    rule = rules.parse("test_rules:Wide:k=2:least=0.5:odd=true:most=3")
    assert (rule.k, rule.least, rule.name_of, rule.odd, rule.most) == (2, 0.5, "x", True, 3)
    assert str(rule) == "test_rules:Wide:k=2:least=0.5:name_of=x:odd=True:most=3"
    assert rules.parse(str(rule)) == rule
    assert rules.parse(str(rules.parse("test_rules:Wide"))) == rules.parse("test_rules:Wide")


def test_a_rule_may_be_named_by_its_file(tmp_path):
    file, known = tmp_path / "rule_in_a_file.py", Path(custom_rules.__file__)
    for copy in (file, tmp_path / "random.py"):
        copy.write_text(known.read_text())
    rule = rules.parse(f"{file}:Stalls:mu=0.2")
    assert rules.parse(str(rule)) == rule
    [named], [own] = (
        Duel(Toy(length=6), text, 2).log_prob([Window((), (0, 1, 0, 1))]) for text in (rule, custom_rules.Stalls(0.2))
    )
    assert named.log_prob == pytest.approx(own.log_prob, abs=1e-9)
    for text, message in ((f"{tmp_path}/no.py:Stalls", "No file"), (f"{tmp_path}/random.py:Stalls", "another name")):
        with pytest.raises(DuelError, match=message):
            rules.parse(text)


# ---------------------------------------------------------------- picks


def case(probabilities, masked=None):
    """Predictions and lanes of one lane with these distributions, one row a position."""
    logits = torch.tensor(probabilities, dtype=torch.float64).log()[None]  # (1, W, V)
    masked = torch.ones(logits.shape[:2], dtype=torch.bool) if masked is None else torch.tensor([masked])
    positions = int(masked.sum())
    predictions = Predictions(
        masked,
        torch.zeros(1, dtype=torch.bool),
        logits[masked],
        torch.arange(positions),
        lambda x: x,
        torch.zeros(logits.shape[2], dtype=torch.bool),
    )
    zero = torch.zeros(1, dtype=torch.int64)
    width = torch.tensor([masked.shape[1]])
    columns = torch.arange(masked.shape[1])[None]
    lanes = SimpleNamespace(masked=masked, step=zero, memory=(), origin=zero, start=zero, width=width, columns=columns)
    return predictions, lanes


def case_of(logits):
    """Predictions and lanes of fully masked lanes with these logits (R, W, V)."""
    lanes, width, vocabulary = logits.shape
    masked = torch.ones(lanes, width, dtype=torch.bool)
    predictions = Predictions(
        masked,
        torch.zeros(lanes, dtype=torch.bool),
        logits.flatten(0, 1),
        torch.arange(lanes * width),
        lambda x: x.clone(),
        torch.zeros(vocabulary, dtype=torch.bool),
    )
    return predictions, SimpleNamespace(masked=masked, step=torch.zeros(lanes, dtype=torch.int64), memory=())


def picked(rule, *arguments):
    return rules.parse(rule)(*case(*arguments)).pick[0].nonzero()[:, 0].tolist()


FOUR = [[0.5, 0.3, 0.2], [0.5, 0.4, 0.1], [0.9, 0.05, 0.05], [0.5, 0.3, 0.2]]


@pytest.mark.parametrize("lift", [0, 8, 16, 20, 26])
@pytest.mark.parametrize("rule", ["greedy", "log_margin", "entropy_bound:gamma=0"])
def test_float32_picks_like_float64_however_sure_the_network_is(rule, lift):
    """Top tokens `lift` logits above the rest: probabilities near 1 round together, the statistics must not."""
    logits = torch.randn(3000, 6, 9, generator=torch.Generator().manual_seed(lift))
    logits[..., 0] += lift
    picks, leads = [], []
    for dtype in (torch.float32, torch.float64):
        decision = rules.parse(rule)(*case_of(logits.to(dtype)))
        picks.append(decision.pick)
        leads.append(decision.decision_margin)
    moved = (picks[0] != picks[1]).any(1)  # (R,)
    counted = torch.minimum(*leads) <= 1e-4
    assert not (moved & ~counted).any()  # a pick that moved and was not counted as close
    assert counted.float().mean() < 0.05


def test_random_is_independent_of_the_length():
    flat = [[0.5, 0.5]] * 8
    long = [picked(f"random:k={k}:seed=3", flat) for k in range(1, 9)]
    first_four = [next(i for i in set(b) - set(a)) for a, b in zip([[], *long], long, strict=False)]
    short = [picked(f"random:k={k}:seed=3", flat[:4]) for k in range(1, 5)]
    order_short = [next(i for i in set(b) - set(a)) for a, b in zip([[], *short], short, strict=False)]
    assert [i for i in first_four if i < 4] == order_short
    assert picked("random:k=8:seed=3", flat) == list(range(8))
    assert len({tuple(picked(f"random:k=4:seed={s}", flat)) for s in range(20)}) > 5


def test_revealed_cells_are_never_read():
    """NaN stands outside the masked positions, and no rule stumbles over it."""
    for text in ALL:
        pick = rules.parse(text)(*case(FOUR, [True, False, False, True])).pick[0]
        assert not pick[1] and not pick[2] and pick.any()
