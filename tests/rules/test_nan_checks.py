"""Statistics are NaN where a position is not masked. A user's rule that a NaN decides is refused, with its line."""

import dataclasses

import pytest
import torch
from laws import AROUND, RULES
from test_users import LINE, rule_with, written
from toys import Toy

from lm_eval_duel import Duel, DuelError, Window, rules
from lm_eval_duel.errors import RuleStalled
from lm_eval_duel.rules import checked
from lm_eval_duel.rules.nan_checks import DecidedByNaN, NoNaN
from lm_eval_duel.rules.wrappers import Around

NAN = float("nan")
MASKED = torch.tensor([[True, False, True], [True, True, True]])
confidence = torch.tensor([[0.1, NAN, 0.5], [0.3, 0.2, 0.1]])

DECIDED_BY_NAN = {
    "a mean of the lane": lambda: confidence >= confidence.mean(1, keepdim=True),
    "the first position": lambda: confidence[:, 1:2] < confidence,
    "a maximum of the lane": lambda: confidence == confidence.amax(1, keepdim=True),
    "a median": lambda: confidence <= confidence.median(1, keepdim=True).values,
    "a share of a sum": lambda: confidence.softmax(1) > 0.3,
    "a number for each lane": lambda: confidence.amax(1) > 0.3,
    "a column": lambda: confidence.amax(1, keepdim=True) > 0.3,
    "in a loop over lanes": lambda: confidence[0] >= confidence[0].mean(),
    "as a Python number": lambda: confidence[0] >= confidence[0].mean().item(),
    "argmax": lambda: confidence.argmax(1),
    "argmin of all": lambda: confidence.argmin(),
    "argmax of one lane": lambda: confidence[0].argmax(),
    "max": lambda: confidence.max(1),
    "min of one lane": lambda: confidence[0].min(0),
    "topk": lambda: confidence.topk(2),
    "sort": lambda: confidence.sort(1, descending=True),
    "argsort": lambda: confidence.argsort(descending=True, stable=True),
    "sorted in a loop over lanes": lambda: confidence[0].sort(descending=True),
}
DECIDED_BY_NUMBERS = {
    "a threshold": lambda: MASKED & (confidence >= 0.3),
    "nanmean": lambda: confidence >= confidence.nanmean(1, keepdim=True),
    "a loop over lanes": lambda: confidence[0] >= confidence[0].nanmean(),
    "lanes, one by one": lambda: confidence[0] >= confidence[1],
    "isnan": lambda: (confidence != confidence, confidence.isnan(), confidence.nan_to_num(-1.0) > 0),
    "filled before": lambda: confidence.masked_fill(~MASKED, -1.0).topk(2),
    "all of them": lambda: confidence.topk(3),
    "the smallest": lambda: confidence.topk(2, largest=False),
    "sorted, NaN last": lambda: (confidence.sort(1), (-confidence).argsort(dim=1, stable=True)),
    "over lanes": lambda: (confidence.argmax(0), confidence.max(dim=0), confidence.topk(1, dim=0)),
    "sorted over lanes": lambda: confidence.sort(dim=0, descending=True),
    "of another shape": lambda: confidence[:, :, None].expand(2, 3, 4) > 0.2,
    "whole numbers": lambda: MASKED.long().argmax(1),
}


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("operation", DECIDED_BY_NAN)
def test_an_operation_that_a_nan_decides(operation, inference):
    with torch.inference_mode(inference), pytest.raises(DecidedByNaN), NoNaN(MASKED):
        DECIDED_BY_NAN[operation]()


@pytest.mark.parametrize("over", ["sort", "argsort", "topk", "max"])
def test_more_lanes_than_positions(over):
    """An operation over lanes has numbers of lanes, which are no positions."""
    planes = confidence.repeat(3, 1)  # six lanes of three positions
    options = {"topk": (5, 0), "max": (0,)}.get(over, (0, True))
    with NoNaN(MASKED.repeat(3, 1)):
        getattr(planes, over)(*options)


@pytest.mark.parametrize("operation", DECIDED_BY_NUMBERS)
def test_an_operation_that_numbers_decide(operation):
    with NoNaN(MASKED):
        DECIDED_BY_NUMBERS[operation]()


WINDOWS = [Window((), (0, 1, 0, 1, 2, 1)), Window((1,), (0, 1, 0)), Window((), (2, 1, 0, 1, 1, 2))]
FIRST = "lanes.masked & (lanes.masked.cumsum(1) == 1)"


def scored(method, folder, name):
    file = written(folder, rule_with(f"__call__(self, predictions, lanes): {method}"), f"nan_{name}")
    return file, lambda: Duel(Toy(length=6), f"{file}:Mine", 6).log_prob(WINDOWS)


def test_a_rule_that_takes_a_mean_over_all_positions_is_refused(tmp_path):
    above = "predictions.margin > predictions.margin.{}(1, keepdim=True)"
    file, score = scored(f"return {FIRST} | lanes.masked & ({above.format('mean')})", tmp_path, "mean")
    with pytest.raises(DuelError) as error:
        score()
    assert f"{file}, line {LINE}" in str(error.value) and "'>'" in str(error.value)
    _, score = scored(f"return {FIRST} | lanes.masked & ({above.format('nanmean')})", tmp_path, "nanmean")
    assert len(score()) == len(WINDOWS)


def test_a_margin_that_is_nan_is_refused(tmp_path):
    file, score = scored(f"return Decision({FIRST}, predictions.margin.amin(1))", tmp_path, "margin")
    with pytest.raises(DuelError, match="decision_margin") as error:
        score()
    assert str(file) in str(error.value)


@dataclasses.dataclass(frozen=True)
class Watched(Around):
    def __call__(self, predictions, lanes):
        with NoNaN(lanes.masked):
            return self.rule(predictions, lanes)

    def after_first(self):
        return Watched(self.rule.after_first())


def watched(rule, counts, network):
    if isinstance(rule, Around):
        return dataclasses.replace(rule, rule=watched(rule.rule, counts, network))
    return Watched(rule)


@pytest.mark.parametrize("text", [*RULES, *AROUND])
def test_no_nan_decides_a_rule_of_the_package(text, monkeypatch):
    expected = Duel(Toy(length=6), text, 6).log_prob(WINDOWS)
    monkeypatch.setattr(rules, "with_checks", watched)
    assert Duel(Toy(length=6), text, 6).log_prob(WINDOWS) == expected


WAITS = {
    "reads_step": "return lanes.masked & (lanes.step[:, None] > {})",
    "memory": """
        [count] = lanes.memory or [torch.zeros_like(lanes.tokens)]
        return Decision(lanes.masked & (count > {}), memory=(count + 1,))
""",
}


@pytest.mark.parametrize("kind", WAITS)
def test_a_rule_that_waits_for_ever(kind, tmp_path, monkeypatch):
    monkeypatch.setattr(checked, "MOST_STEPS", 20)
    properties = f"    may_pick_none = True\n    reads_step = {kind == 'reads_step'}\n"
    for last in (19, 20):
        code = rule_with(f"__call__(self, predictions, lanes): {WAITS[kind].format(last)}")
        code = code.replace("(Rule):\n", f"(Rule):\n{properties}")
        duel = Duel(Toy(length=6), f"{written(tmp_path, code, f'waits_{kind}_{last}')}:Mine", 6)
        if last < 20:
            assert duel.log_prob(WINDOWS)
            continue
        with pytest.raises(RuleStalled, match="20 steps"):
            duel.log_prob(WINDOWS)
