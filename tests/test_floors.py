"""A room imports only from lower floors, and heavy libraries stay where they belong."""

import ast
from pathlib import Path

import pytest

import lm_eval_duel

PACKAGE = Path(lm_eval_duel.__file__).parent
FLOORS = {
    "errors": 0,
    "hashing": 0,
    "demo": 0,
    "windows": 1,
    "token_text": 1,
    "wrapped": 1,
    "copies": 1,
    "corpora": 2,
    "rules": 1,
    "fingerprint": 1,
    "detokenize": 1,
    "options": 2,
    "lanes": 2,
    "denoisers": 3,
    "budget": 4,
    "spec": 4,
    "ledger": 4,
    "baselines": 4,
    "reveal": 5,
    "ranks": 5,
    "instances": 1,
    "interrupts": 0,
    "response_cache": 3,
    "verify": 9,
    "cache_keys": 2,
    "unfinished": 8,
    "scoring": 10,
    "estimator": 6,
    "duel": 7,
    "elbo": 7,
    "lattice": 7,
    "orders": 6,
    "trace": 7,
    "text": 5,
    "cost": 7,
    "switch": 8,
    "generation": 8,
    "answers": 11,
    "writing": 12,
    "arms": 8,
    "lm": 13,
    "tasks": 13,
    "_autoload": 13,
    "bench": 14,
    "inspection": 14,
    "demo.train": 14,
    "report": 14,
    "data": 14,
    "show": 14,
    "sweep": 15,
    "__main__": 16,
}
MAY_IMPORT = {
    "lm_eval": {"lm", "cache_keys", "ranks", "response_cache", "text", "tasks", "sweep", "__main__", "_autoload"},
    "transformers": {"denoisers", "demo.train"},
}
LIGHT = (
    "errors",
    "instances",
    "interrupts",
    "windows",
    "token_text",
    "wrapped",
    "fingerprint",
    "detokenize",
    "options",
    "rules",
    "hashing",
    "_autoload",
)  # no torch at import


def modules():
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        if parts != ("__init__",):
            yield "demo.train" if parts == ("demo", "train") else parts[0], path


def imports(path, top_level_only=False):
    tree = ast.parse(path.read_text())
    typing = {
        id(n)
        for b in ast.walk(tree)
        if isinstance(b, ast.If) and "TYPE_CHECKING" in ast.dump(b.test)
        for n in ast.walk(b)
    }
    nodes = tree.body if top_level_only else ast.walk(tree)
    for node in nodes:
        if id(node) in typing:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            if node.module == "lm_eval_duel":
                yield from (f"lm_eval_duel.{alias.name}" for alias in node.names)
            else:
                yield node.module


@pytest.mark.parametrize(("room", "path"), list(modules()), ids=lambda value: str(value)[-30:])
def test_imports_go_down(room, path):
    assert room in FLOORS, f"{room} has no floor: give it one here and in the README's file tree"
    for name in imports(path):
        parts = name.split(".")
        if parts[0] == "lm_eval_duel" and len(parts) > 1 and parts[1] != room:
            assert FLOORS[parts[1]] < FLOORS[room], f"{path.name} (floor {FLOORS[room]}) imports {name}"
        if parts[0] in MAY_IMPORT:
            assert room in MAY_IMPORT[parts[0]], f"{path.name} imports {name}"


@pytest.mark.parametrize(("room", "path"), [m for m in modules() if m[0] in LIGHT], ids=lambda value: str(value)[-30:])
def test_light_rooms_import_torch_inside_calls_only(room, path):
    assert "torch" not in {name.split(".")[0] for name in imports(path, top_level_only=True)}
