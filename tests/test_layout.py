"""Test modules stand alone: what they share is in helpers/, and every other folder mirrors a room of the package."""

import ast
import re
from pathlib import Path

import lm_eval_duel

TESTS = Path(__file__).resolve().parent
MODULES = {path.stem: path for path in TESTS.rglob("test_*.py")}


def imported(source):
    """The names of the modules that a source file imports."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module


def test_no_test_module_imports_another():
    for path in TESTS.rglob("*.py"):
        source = path.read_text(encoding="utf-8")
        shared = {name.split(".")[0] for name in imported(source)}
        shared |= set(re.findall(r"^\s*(?:import|from) (test_\w+)", source, re.MULTILINE))  # code in a string
        shared |= set(re.findall(r"\b(test_\w+):[A-Z]", source))  # a class that is named as module:Class
        assert not (shared & MODULES.keys()) - {path.stem}, f"{path.relative_to(TESTS)}: move it to tests/helpers/"


def test_every_folder_mirrors_a_room():
    rooms = {path.name for path in Path(lm_eval_duel.__file__).parent.iterdir() if path.is_dir()}
    folders = {path.name for path in TESTS.iterdir() if path.is_dir() and path.name != "__pycache__"}
    assert folders - {"helpers"} <= rooms
    assert len(MODULES) == len(list(TESTS.rglob("test_*.py"))), "two test modules have one name"
    assert not list((TESTS / "helpers").glob("test_*.py"))
