"""The README: two screens, the commands that CI runs, and names that exist."""

import re

from pages import blocks, names, read, rows, section

from lm_eval_duel import rules
from lm_eval_duel.estimators.registry import ESTIMATORS

README = read("README.md")
MOST_LINES = 150


def test_it_is_short():
    assert len(README.splitlines()) <= MOST_LINES


def test_ci_runs_the_two_commands_of_the_readme():
    script = read(".ci/run")
    theirs = re.findall(r"# README: begin.*?\n(.*?)\n# README: end", script, re.DOTALL)
    ours = "".join(blocks(README, "bash")).splitlines()
    assert len(theirs) == 2 and set(theirs) <= set(ours)


def test_ci_and_the_dev_extra_pin_the_same_tools():
    dev = re.search(r"^dev = \[(.*)\]", read("pyproject.toml"), re.MULTILINE)[1]
    pinned = re.findall(r"\w+==[\d.]+", dev)
    assert len(pinned) == 3 and set(pinned) <= set(re.findall(r"\w+==[\d.]+", read(".ci/run")))


def test_its_tables_name_rules_and_estimators():
    first = [names(row[0]) for row in rows(section(README, "## Why it is exact"))]
    named = set().union(*first)
    assert named <= {*rules.RULES, *ESTIMATORS} and {"greedy", "left_to_right", "duel", "elbo", "ar"} <= named
