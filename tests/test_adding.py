"""docs/adding.md, followed literally: files are written, lines added and commands run in a copy of the package."""

import ast
import os
import re
import shutil
import subprocess
import sys

import pytest
from pages import ROOT, read, section

PAGE = read("docs/adding.md")
STEP = re.compile(
    r"(?:[Ww]rite\s+`(?P<file>[\w./]+)`[^\n`]*:|Add this entry to `(?P<name>\w+)` in `(?P<home>[\w./]+)`:|:)\n\n"
    r"```(?P<language>\w+)\n(?P<code>.*?)^```",
    re.DOTALL | re.MULTILINE,
)


def follow(text, place):
    """Follow the steps of a recipe in `place`; the number of steps."""
    paths = [place, place / "tests" / "helpers"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths)), "HF_HUB_OFFLINE": "1"}
    environment["PATH"] = os.pathsep.join([os.path.dirname(sys.executable), environment["PATH"]])
    steps = list(STEP.finditer(text))
    for step in steps:
        if step["file"]:
            file = place / step["file"]
            file.parent.mkdir(exist_ok=True)
            file.write_text(step["code"])
        elif step["name"]:
            add(place / step["home"], step["name"], step["code"])
        else:
            assert step["language"] == "bash"
            for line in step["code"].splitlines():
                done = subprocess.run(line, shell=True, cwd=place, env=environment, capture_output=True, text=True)
                assert done.returncode == 0, f"{line}\n{done.stdout}\n{done.stderr}"
    return len(steps)


def add(file, name, code):
    """Put an entry at the end of the tuple that is assigned to `name`."""
    source = file.read_text()
    assigned = next(
        node.value
        for node in ast.parse(source).body
        if isinstance(node, ast.Assign | ast.AnnAssign) and ast.unparse(node).startswith((f"{name} = ", f"{name}: "))
    )
    assert isinstance(assigned, ast.Tuple)
    lines = source.splitlines(keepends=True)
    lines.insert(assigned.end_lineno - 1, f"    {code.strip()},\n")
    file.write_text("".join(lines))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("heading", "steps"),
    [
        ("## A rule", 3),
        ("## A rule with a memory", 2),
        ("## A task", 3),
        ("## A family of checkpoints", 3),
        ("## An estimator", 4),
    ],
)
def test_the_recipe_works(heading, steps, tmp_path):
    for name in ("lm_eval_duel", "task_configs", "tests/helpers"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    assert follow(section(PAGE, heading), tmp_path) == steps
    assert section(PAGE, heading).count("```") == 2 * steps
