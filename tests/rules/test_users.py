"""A rule in a user's file that breaks the contract is refused with the file and the line."""

import pytest
from toys import Toy

from lm_eval_duel import Duel, DuelError, Window, rules

HEAD = """\
import dataclasses
import torch
from lm_eval_duel.rules import Decision, Rule

@dataclasses.dataclass(frozen=True)
"""
LINE = HEAD.count("\n") + 2  # of the method, below its class


def written(folder, code, number):
    """A module with this code, of a name that no other test has."""
    file = folder / f"users_rule_{number}.py"
    file.write_text(code)
    return file


def rule_with(method):
    """The code of a rule with this method."""
    return f"{HEAD}class Mine(Rule):\n    def {method}\n"


BEFORE_A_RUN = {
    "another method": (rule_with("pick(self, predictions, lanes): return lanes.masked"), LINE - 2),
    "too few parameters": (rule_with("__call__(self, predictions): return predictions"), LINE),
    "no dataclass": (
        "from lm_eval_duel.rules import Rule\n\n\nclass Mine(Rule):\n    least: float = 0.5\n\n"
        "    def __call__(self, predictions, lanes): return lanes.masked\n",
        7,
    ),
    "not frozen": (rule_with("__call__(self, predictions, lanes): pass").replace("(frozen=True)", ""), LINE - 2),
    "attributes that contradict each other": (
        rule_with(
            "__call__(self, predictions, lanes): return lanes.masked\n    state_only = True\n    reads_step = True"
        ),
        LINE,
    ),
    "a syntax error": (HEAD + "class Mine(Rule)\n", LINE - 1),
    "an import that is missing": ("import dataclasses\nimport no_module_of_this_name\n", 2),
}


@pytest.mark.parametrize("fault", BEFORE_A_RUN)
def test_a_class_that_is_no_rule_is_refused_when_it_is_named(fault, tmp_path):
    code, line = BEFORE_A_RUN[fault]
    file = written(tmp_path, code, f"before_{list(BEFORE_A_RUN).index(fault)}")
    with pytest.raises(DuelError) as error:
        rules.parse(f"{file}:Mine")
    assert f"{file}, line {line}" in str(error.value)


IN_A_RUN = {
    "nothing returned": "pass",
    "a list": "return [0]",
    "an index": "return predictions.confidence.argmax(1)",
    "floats": "return predictions.confidence",
    "nothing picked": "return torch.zeros_like(lanes.masked)",
    "a revealed position": "return torch.ones_like(lanes.masked)",
    "random picks": "return lanes.masked & (lanes.masked.cumsum(1) == 1 + int(torch.rand(1) < 0.5))",
    "a memory that is no tuple": "return Decision(lanes.masked, memory=predictions.margin)",
    "an exception": "return predictions.confidnce",
}


@pytest.mark.parametrize("fault", IN_A_RUN)
def test_an_answer_that_is_no_pick_is_refused(fault, tmp_path):
    code = rule_with(f"__call__(self, predictions, lanes): {IN_A_RUN[fault]}")
    file = written(tmp_path, code, f"run_{list(IN_A_RUN).index(fault)}")
    windows = [Window((), (0, 1, 0, 1, 2, 1)), Window((1,), (0, 1, 0)), Window((), (2, 1, 0, 1, 1, 2))]
    with pytest.raises(DuelError) as error:
        Duel(Toy(length=6), f"{file}:Mine", 6).log_prob(windows)
    assert f"{file}, line {LINE}" in str(error.value)


def test_a_fixed_rule_that_reads_predictions_is_told_why_it_has_none(tmp_path):
    code = rule_with("__call__(self, predictions, lanes): return predictions.confidence > 0\n    fixed = True")
    file = written(tmp_path, code, "fixed")
    with pytest.raises(DuelError, match="fixed = True"):
        Duel(Toy(length=6), f"{file}:Mine", 6).log_prob([Window((), (0, 1, 0, 1, 2, 1))])


def test_an_instance_is_held_to_the_same_contract(tmp_path):
    file = written(tmp_path, rule_with("pick(self, predictions, lanes): return lanes.masked"), "instance")
    code = compile(file.read_text(), str(file), "exec")
    names = {"__name__": "users_rule_instance"}
    exec(code, names)
    with pytest.raises(DuelError, match="Mine"):
        Duel(Toy(), names["Mine"](), 2).log_prob([Window((), (0, 1))])
    with pytest.raises(DuelError, match=r"Mine\("):
        Duel(Toy(), names["Mine"], 2)


def test_a_rule_of_ones_own_without_its_colon_is_told_how_it_is_named(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    written(tmp_path, rule_with("__call__(self, predictions, lanes): return lanes.masked"), "named")
    for text, remedy in {
        "users_rule_named.Mine": "users_rule_named:Mine",
        "users_rule_named.py.Mine": "users_rule_named.py:Mine",
        "folder/users_rule_named/Mine": "folder/users_rule_named.py:Mine",
        "./users_rule_named:Mine": "./users_rule_named.py:Mine",
        f"{tmp_path}/users_rule_named:Mine": f"{tmp_path}/users_rule_named.py:Mine",
        "./users_rule_named": "./users_rule_named.py:Mine",
        f"{tmp_path}/missing": f"{tmp_path}/missing.py:Name",
        "users_rule_named::Mine": "users_rule_named:Mine",
    }.items():
        with pytest.raises(DuelError) as error:
            rules.parse(text)
        assert f" {remedy}." in str(error.value)
    with pytest.raises(DuelError) as error:
        rules.parse("./missing")
    assert "./missing.py:Name" in str(error.value)


def test_a_file_below_the_home_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("USERPROFILE", str(tmp_path))
    written(tmp_path, rule_with("__call__(self, predictions, lanes): return lanes.masked"), "at_home")
    assert str(rules.parse("~/users_rule_at_home.py:Mine")) == "users_rule_at_home:Mine"


@pytest.mark.parametrize(
    ("attribute", "property"),
    [
        ("state_onyl = True", "state_only"),
        ("may_pick_non = True", "may_pick_none"),
        ("read_step = False", "reads_step"),
        ("state_only = True", ""),
        ("greedy = True", ""),  # of the rule itself
        ("names = ('a', 'b')", ""),  # no truth value, as the properties are
        ("state_onyl: bool = True", ""),  # a parameter, which the text of the rule shows
    ],
)
def test_a_misspelt_property_of_a_rule_is_named(attribute, property, tmp_path):
    code = rule_with("__call__(self, predictions, lanes): return lanes.masked").replace(
        "(Rule):\n", f"(Rule):\n    {attribute}\n"
    )
    words = "_".join(filter(str.isidentifier, attribute.replace(":", "").split()))
    file = written(tmp_path, code, f"with_{words}")
    if not property:
        assert rules.parse(f"{file}:Mine") is not None
        return
    with pytest.raises(DuelError) as error:
        rules.parse(f"{file}:Mine")
    assert f"Did you mean {property}?" in str(error.value)
    assert f"{file}, line {LINE + 1}" in str(error.value)


def test_the_rule_that_follows_a_first_position_is_the_users(tmp_path):
    """A class made from `dream` takes the steps that are left after `seed_first`, as `dream` does."""
    code = HEAD.replace("import Decision, Rule", "import Rule\nfrom lm_eval_duel.rules.scheduled import Dream")
    file = written(tmp_path, f"{code}class Mine(Dream):\n    pass\n", "after_first")
    window = Window((), (0, 1, 0, 2, 1, 1))
    orders = []
    for name in ("dream", f"{file}:Mine"):
        [score] = Duel(Toy(length=6), f"{name}:alg=entropy:steps=3:seed_first=true", 6).log_prob([window])
        orders.append(score.reveal_steps)
    assert orders[0] == orders[1]
    assert max(orders[0]) == 2


def test_a_parameter_without_a_type_is_named(tmp_path):
    code = rule_with("__call__(self, predictions, lanes): return lanes.masked").replace(
        "(Rule):\n", "(Rule):\n    least = 0.5\n"
    )
    file = written(tmp_path, code, "without_a_type")
    with pytest.raises(DuelError, match="least: float") as error:
        rules.parse(f"{file}:Mine:least=0.9")
    assert str(file) in str(error.value)
    with pytest.raises(DuelError, match="There are none"):
        rules.parse(f"{file}:Mine:most=0.9")
