"""A room imports only rooms on lower floors, no two files import each other, and heavy libraries stay in their rooms.

A room is a folder of the package. `base` is the room of the modules at the top of the package that belong to no other.
"""

import ast
import functools
import subprocess
import sys
from pathlib import Path

import pytest

import lm_eval_duel

PACKAGE = Path(lm_eval_duel.__file__).parent
FLOORS = (  # from the lowest
    {"base", "demo"},
    {"core"},
    {"rules", "console"},
    {"denoisers"},
    {"estimators"},
    {"options"},
    {"text"},
    {"tasks", "audit"},
    {"library", "results"},
    {"harness"},
    {"cli"},
)
FLOOR = {room: floor for floor, rooms in enumerate(FLOORS) for room in rooms}
ENTRIES = {"__main__"}  # how the package is started: it may import any room
MAY_IMPORT = {
    "lm_eval": {"harness", "tasks", "cli"},
    "transformers": {"denoisers", "demo"},
}


def room_of(parts):
    """The room of a module, given its path below the package."""
    if len(parts) > 1 or parts[0] in FLOOR or parts[0] in ENTRIES:
        return parts[0]
    return parts[0] if (PACKAGE / parts[0]).is_dir() else "base"


def module_name(path):
    return ".".join(("lm_eval_duel", *path.relative_to(PACKAGE).with_suffix("").parts)).removesuffix(".__init__")


TASKS = PACKAGE / "task_configs"  # in an installed package: files of tasks, with code as lm-eval's own have it
FILES = {module_name(path): path for path in sorted(PACKAGE.rglob("*.py")) if TASKS not in path.parents}
INSTALLED = [name for name in FILES if "." in name]


@functools.cache
def nodes(path):
    """The nodes of a file's syntax tree."""
    return list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))


def imports(path, typed=False):
    """The modules that a file imports at run time, here or in its functions; `typed`: and for type checking."""
    for_types = set()
    for node in nodes(path):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            for_types.update(ast.walk(node))

    for node in nodes(path):
        if node in for_types and not typed:
            continue
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                yield name if name in FILES else node.module


def room(name):
    return room_of(name.split(".")[1:])


@pytest.fixture(scope="module")
def imported_by():
    return {name: list(imports(path)) for name, path in FILES.items()}


def test_imports_go_down(imported_by):
    rooms = {room(name) for name in INSTALLED}
    assert not rooms - FLOOR.keys() - ENTRIES, "give the room a floor here and in docs/adding.md"

    wrong = []
    for name in INSTALLED:
        home = room(name)
        for imported in imported_by[name]:
            library, *inside = imported.split(".")
            if library in MAY_IMPORT and home not in MAY_IMPORT[library]:
                wrong.append((name, imported))
            if library != "lm_eval_duel" or not inside or home in ENTRIES or room(imported) == home:
                continue
            if FLOOR.get(room(imported), -1) >= FLOOR[home]:
                wrong.append((name, imported))
    assert not wrong


def test_no_circle_of_files():
    """Not even for type checking."""
    done = set()
    open_path = []

    def visit(name):
        assert name not in open_path, f"circle: {' -> '.join([*open_path[open_path.index(name) :], name])}"
        if name in done:
            return
        open_path.append(name)
        for imported in sorted({*imports(FILES[name], typed=True)}):
            if imported in FILES and imported != name:
                visit(imported)
        done.add(open_path.pop())

    for name in FILES:
        visit(name)


def test_naming_the_model_imports_neither_torch_nor_transformers():
    code = (
        "import sys, lm_eval_duel\n"
        "assert not {'torch', 'transformers', 'lm_eval'} & set(sys.modules)\n"
        "from lm_eval_duel.options import Options\n"
        "Options.parse({'pretrained': 'demo-mdm', 'rule': 'greedy', 'estimator': 'oracle', 'block': 4})\n"
        "assert not {'torch', 'transformers', 'lm_eval'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_class_name_is_one_thing_and_docstrings_are_statements():
    """In the whole package; a docstring begins with a noun phrase or a verb."""
    homes = {}  # the module of each class
    questions = ("Which", "What", "How", "Whether", "Why", "Where")
    for name, path in FILES.items():
        for node in nodes(path):
            if isinstance(node, ast.ClassDef):
                assert homes.setdefault(node.name, name) == name, node.name
            if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.Module):
                words = (ast.get_docstring(node) or "").split()
                assert not words or words[0] not in questions, (name, words)
