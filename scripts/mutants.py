"""Seeded faults: how many of N random mutants of some folders a pytest command finds.

    python scripts/mutants.py -n 30 --seed 7 lm_eval_duel/results -- python -m pytest -q -x -n 0 tests/results

Kinds: a comparison flipped, a number off by one, a statement dropped, a constant changed, two arguments swapped. The
kinds take turns, so that all occur. Everything runs on a copy of the tree, one mutant after the other.
"""

from __future__ import annotations

import argparse
import ast
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

FLIPPED = {ast.Lt: ast.GtE, ast.GtE: ast.Lt, ast.Gt: ast.LtE, ast.LtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq}
FLIPPED |= {ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In}
STATEMENTS = (ast.AugAssign, ast.Continue, ast.Raise)
KINDS = ("comparison", "off by one", "dropped", "constant", "swapped")
NOT_COPIED = shutil.ignore_patterns(".git", "__pycache__", ".*_cache", "*.egg-info")


def sites(tree: ast.Module) -> Iterator[tuple[str, int]]:
    """(kind, number of the node in `ast.walk`) of everything that can be changed."""
    skipped = {id(node) for block in ast.walk(tree) if _is_for_types(block) for node in ast.walk(block)}
    for number, node in enumerate(ast.walk(tree)):
        if id(node) in skipped:
            continue
        if isinstance(node, ast.Compare) and type(node.ops[0]) in FLIPPED:
            yield "comparison", number
        elif isinstance(node, ast.Constant) and type(node.value) is int:
            yield "off by one", number
        elif isinstance(node, ast.Constant) and isinstance(node.value, bool | float):
            yield "constant", number
        elif isinstance(node, STATEMENTS) or (isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)):
            yield "dropped", number
        elif isinstance(node, ast.Call) and len(node.args) > 1 and not isinstance(node.args[0], ast.Starred):
            yield "swapped", number


def _is_for_types(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)


def mutate(tree: ast.Module, kind: str, number: int) -> str:
    """Change one node of the tree; returns `line: before -> after`."""
    node = list(ast.walk(tree))[number]
    before = ast.unparse(node)
    if isinstance(node, ast.Compare):
        node.ops[0] = FLIPPED[type(node.ops[0])]()
    elif isinstance(node, ast.Constant) and kind == "off by one":
        node.value += 1
    elif isinstance(node, ast.Constant):
        node.value = not node.value if isinstance(node.value, bool) else node.value * 2 + 1
    elif isinstance(node, ast.Call):
        node.args[0], node.args[1] = node.args[1], node.args[0]
    else:
        for parent in ast.walk(tree):
            for field, value in ast.iter_fields(parent):
                if isinstance(value, list) and node in value:
                    getattr(parent, field)[value.index(node)] = ast.copy_location(ast.Pass(), node)
        return f"{node.lineno}: {before} dropped"
    return f"{node.lineno}: {before} -> {ast.unparse(node)}"


def draw(root: Path, folders: list[str], count: int, seed: int) -> list[tuple[Path, str, int]]:
    """`count` sites (file, kind, number), the kinds in turn."""
    chosen = random.Random(seed)
    files = [file for folder in folders for file in sorted((root / folder).rglob("*.py") if (root / folder).is_dir()
                                                           else [root / folder])]  # fmt: skip
    every = [(file, *site) for file in files for site in sites(ast.parse(file.read_text(encoding="utf-8")))]
    chosen.shuffle(every)
    by_kind = {kind: [site for site in every if site[1] == kind] for kind in KINDS}
    turns = [sites_of_kind.pop() for _ in range(count) for sites_of_kind in by_kind.values() if sites_of_kind]
    return turns[:count]


def main() -> None:
    """Print a table of mutants, and how many were found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="+")
    parser.add_argument("-n", type=int, default=30, help="mutants (30)")
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--timeout", type=float, default=900, help="seconds after which a mutant counts as found")
    own, command = sys.argv[1:], []
    if "--" in own:
        own, command = own[: own.index("--")], own[own.index("--") + 1 :]
    options = parser.parse_args(own)
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder) / "tree"
        shutil.copytree(Path.cwd(), root, ignore=NOT_COPIED, symlinks=True)
        environment = {**os.environ, "PYTHONPATH": str(root), "PYTHONDONTWRITEBYTECODE": "1"}
        found = 0
        for number, (file, kind, place) in enumerate(draw(root, options.folders, options.n, options.seed), 1):
            source = file.read_text(encoding="utf-8")
            tree = ast.parse(source)
            what = mutate(tree, kind, place)
            file.write_text(ast.unparse(ast.fix_missing_locations(tree)) + "\n", encoding="utf-8")
            began = time.perf_counter()
            try:
                end = subprocess.run(
                    command, cwd=root, env=environment, capture_output=True, text=True, timeout=options.timeout
                )
                failed, lines = end.returncode != 0, end.stdout.splitlines()
            except subprocess.TimeoutExpired:
                failed, lines = True, ["FAILED (timeout)"]
            file.write_text(source, encoding="utf-8")
            found += failed
            by = next((line.split(" - ")[0] for line in lines if line.startswith(("FAILED", "ERROR"))), "")
            name = f"{file.relative_to(root)}:{' '.join(what.split())}"
            seconds = time.perf_counter() - began
            print(f"{number:3} {'found' if failed else 'MISSED':6} {kind:10} {name[:150]}  [{seconds:.0f} s] {by}")
            sys.stdout.flush()
        print(f"{found} of {number} found")


if __name__ == "__main__":
    main()
