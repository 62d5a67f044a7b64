"""The README's commands are those that CI runs, and its Python runs."""

import re
import shlex
from pathlib import Path

import pytest

from lm_eval_duel import rules
from lm_eval_duel.options import Options, names

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


def blocks(language):
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


def test_ci_runs_the_two_commands_of_the_readme():
    script = (ROOT / ".ci" / "run").read_text()
    theirs = re.search(r"# README: begin.*?\n(.*?)# README: end", script, re.DOTALL).group(1).strip().splitlines()
    assert theirs == [blocks("bash")[0].strip(), blocks("bash")[2].strip()]


def test_the_python_of_the_readme_runs(monkeypatch):
    space = {"__name__": "readme"}
    for number, code in enumerate(blocks("python")):
        exec(compile(code, f"README block {number}", "exec"), space)
    scored, greedy = space["scored"], space["greedy"]
    assert len(scored[0].token_logprobs) == 3 and len(greedy[0].tokens) == 8
    assert space["replayed"][0].log_prob == pytest.approx(space["drawn"][0].log_prob, abs=1e-3)


def test_every_rule_and_every_model_arg_is_in_its_table():
    named = set(re.findall(r"`([a-z_0-9]+)`", README))
    assert set(rules.RULES) | set(rules.ALIASES) <= named
    assert {name.split("=")[0] for name in re.findall(r"`([a-z_=0-9]+)`", README)} >= rules.PARAMETERS
    documented = set(names()) - {"batch_size", "device"}  # options of the harness itself
    assert documented <= named


def test_the_file_tree_of_the_readme_is_the_real_one():
    table = README.split("## The shape of the program")[1].split("## Licence")[0]
    named = set(re.findall(r"`([\w./]+(?:\.py|\.pth|/))`", table))
    homes = [
        ROOT,
        ROOT / "lm_eval_duel",
        ROOT / "lm_eval_duel" / "denoisers",
        ROOT / "lm_eval_duel" / "demo",
        ROOT / "lm_eval_duel" / "report",
        ROOT / "lm_eval_duel" / "sweep",
        ROOT / "tests",
    ]
    for name in named:
        assert any((home / name).exists() for home in homes), f"{name} is in the README but not in the tree"
    last = {name.rstrip("/").split("/")[-1] for name in named}
    for path in (ROOT / "lm_eval_duel").iterdir():
        if path.name not in ("__init__.py", "__pycache__"):
            assert path.name in last, f"{path.name} is not in the README's file tree"


def test_commands_of_the_readme_parse():
    for block in blocks("bash"):
        for line in block.strip().splitlines():
            words = shlex.split(line)
            if "--model_args" in words and "duel-mdm" in words:
                pairs = dict(pair.split("=", 1) for pair in words[words.index("--model_args") + 1].split(","))
                Options.parse(pairs)
