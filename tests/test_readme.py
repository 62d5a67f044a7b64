"""The README: two screens, and the commands that CI runs."""

import dataclasses
import re

from pages import blocks, names, read, rows, section

from lm_eval_duel import rules
from lm_eval_duel.cli.main import COMMANDS

README = read("README.md")
MOST_LINES = 220


def test_it_is_short():
    assert len(README.splitlines()) <= MOST_LINES


def test_ci_runs_the_two_commands_of_the_readme():
    script = read(".ci/run")
    theirs = re.search(r"# README: begin.*?\n(.*?)# README: end", script, re.DOTALL).group(1).strip().splitlines()
    assert theirs == [blocks(README, "bash")[0].strip(), blocks(README, "bash")[2].strip()]


def test_ci_and_the_dev_extra_pin_the_same_tools():
    pinned = set(re.findall(r"pip install -q ((?:ruff|mypy)==[\d.]+)", read(".ci/run")))
    dev = re.search(r"^dev = \[(.*)\]", read("pyproject.toml"), re.MULTILINE)[1]
    assert pinned == set(re.findall(r"(?:ruff|mypy)==[\d.]+", dev)) and len(pinned) == 2


def test_every_rule_and_every_command_has_a_row():
    table = rows(section(README, "## Unmasking rules"))
    assert set(rules.RULES) == set().union(*(names(row[0]) for row in table)) - {"module"}
    for row in table[: len(table) - 3]:  # the last three rows are of many rules
        for name in names(row[0]):
            parameters = {field.name for field in dataclasses.fields(rules.RULES[name])}
            assert parameters - {"history", "kl"} == names(row[1]), name
    commands = {name for row in rows(section(README, "## Commands")) for name in re.findall("`(.*?)`", row[0])}
    assert commands == {command.split()[0] for command in COMMANDS}
