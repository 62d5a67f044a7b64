"""`lm-eval-duel list`: rules of one's own, parts of names, presets, and the samplers that are none."""

import pytest

from lm_eval_duel.arguments import declared
from lm_eval_duel.cli import main as program
from lm_eval_duel.console import exits
from lm_eval_duel.rules import RULES, presets


def refused(*words):
    """The message of a command that is refused."""
    with pytest.raises(exits.Exit) as ended:
        program.main(list(words))
    assert ended.value.code == exits.WRONG, ended.value
    return str(ended.value)


def test_a_rule_is_listed_with_its_parameters(capsys):
    program.main(["list", "rules", "klass"])

    names = []
    for line in capsys.readouterr().out.splitlines():
        if line and not line.startswith(" "):
            names.append(line.split()[0])
    assert names == ["klass", *declared(RULES["klass"])]


def test_presets_are_listed_with_their_model_args(capsys):
    program.main(["list", "presets"])
    printed = " ".join(capsys.readouterr().out.split())
    for preset in presets.ENTRIES:
        assert preset.name in printed
        assert preset.written_out in printed

    program.main(["list", "presets", "llada2", "llada"])
    printed = " ".join(capsys.readouterr().out.split())
    assert "From ML-GSAI/LLaDA@b7e6c35 generate.py L44-121 (steps may be changed)" in printed
    assert "dparallel" not in printed

    assert "Did you mean llada2" in refused("list", "presets", "lladq2")


@pytest.mark.parametrize(
    ("what", "word", "names"),
    [
        ("presets", "dream", [name for name in presets.PRESETS if "dream" in name]),
        ("presets", "llada-moe", ["dinfer-threshold", "dinfer-hierarchy"]),  # the checkpoints that they are for
        ("args", "batch", ["max_batch_size", "batch_size"]),
        ("rules", "conf_thr", ["threshold"]),
    ],
)
def test_a_part_of_a_name_lists_all_names_that_hold_it(what, word, names, capsys):
    program.main(["list", what, word])
    rows = [line for line in capsys.readouterr().out.splitlines() if line and line[0] != " " and "[" in line]
    listed = {line.split()[0] for line in rows}
    assert listed >= {*names}
    if what != "rules":  # those have the lines of their parameters, too
        assert listed == {*names}


def test_a_sampler_that_is_no_preset_is_refused_with_its_reason(capsys):
    for name, (_, reason) in presets.REFUSED.items():
        assert reason in refused("list", "presets", name)
    program.main(["list", "presets"])
    printed = " ".join(capsys.readouterr().out.split())
    for name in presets.REFUSED:
        assert f" {name}," in printed or f" {name}." in printed


def test_a_preset_is_listed_with_a_command_for_a_bundled_network(capsys):
    for preset in presets.ENTRIES:
        program.main(["list", "presets", preset.name])
        *_, command = capsys.readouterr().out.splitlines()
        assert command.strip().startswith(f"lm-eval-duel run demo-mdm --model_args {preset.for_demo} ")


def test_each_of_several_presets_is_named_above_its_command(capsys):
    program.main(["list", "presets", "fast-dllm"])
    _, _, commands = capsys.readouterr().out.partition("bundled network:\n")
    lines = commands.splitlines()
    names = lines[::2]
    assert names == [name for name in presets.PRESETS if "fast-dllm" in name]
    for name, command in zip(names, lines[1::2], strict=True):
        assert f" {presets.find(name).for_demo} " in command


def test_a_rule_of_ones_own_is_listed_as_a_built_in_one(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    code = (
        "import dataclasses\n"
        "from lm_eval_duel.rules import Rule\n"
        "@dataclasses.dataclass(frozen=True)\n"
        "class Listed(Rule):\n"
        '    """The `top` surest\n    ones.\n\n    More."""\n'
        "    share: float\n"
        "    top: int = 3\n"
        "    def __call__(self, predictions, lanes): ...\n"
        "@dataclasses.dataclass(frozen=True)\n"
        "class Bare(Rule):\n"
        "    def __call__(self, predictions, lanes): ...\n"
    )
    (tmp_path / "listed_rules.py").write_text(code)

    for name in ("listed_rules.py:Listed", "~/listed_rules.py:Listed", "listed_rules:Listed:share=0.5"):
        program.main(["list", "rules", name])
        row, meaning, _, share, _, top, _ = capsys.readouterr().out.splitlines()
        assert row.endswith("[share, top=3]")
        assert meaning.strip() == "The `top` surest ones."  # as written
        assert share.startswith("share ")
        assert top.startswith("top ")
        assert top.endswith("[3]")

    program.main(["list", "rules", "listed_rules.py:Bare"])
    assert len(capsys.readouterr().out.splitlines()) == 2
    assert "listed_rules:Listed" in refused("list", "rules", "listed_rules.Listed")
    assert "listed_rules:Listed" in refused("inspect", "demo-mdm", "--model_args", "rule=listed_rules.Listed")


def test_a_file_stands_for_all_rules_in_it(tmp_path, capsys):
    rule = "@dataclasses.dataclass(frozen=True)\nclass {}({}):\n    def __call__(self, predictions, lanes): ...\n"
    code = (
        "import dataclasses\nfrom lm_eval_duel.rules import Decision, Rule\nclass Base(Rule):\n    state_only = True\n"
    )
    code += rule.format("First", "Base") + rule.format("Second", "Rule")
    file = tmp_path / "rules_of_a_file.py"
    file.write_text(code)
    program.main(["list", "rules", str(file)])
    rows = [line for line in capsys.readouterr().out.splitlines() if line and line[0] != " "]
    assert rows == [f"{file}:First", f"{file}:Second"]
    program.main(["list", "rules", str(file), "klass"])
    printed = capsys.readouterr().out
    assert "klass " in printed and f"{file}:Second" in printed

    empty = tmp_path / "rules_of_an_empty_file.py"
    empty.write_text("")
    assert str(empty) in refused("list", "rules", str(empty))
    assert "nowhere.py" in refused("list", "rules", str(tmp_path / "nowhere.py"))


@pytest.mark.parametrize("name", ["Gumbel", "gumbel", "Margni"])
def test_an_unknown_rule_is_told_how_a_rule_of_ones_own_is_named(name):
    assert "file.py:Name" in refused("inspect", "demo-mdm", "--model_args", f"rule={name}")
