"""Seeded faults: how many of N random mutants of the package a suite of tests finds.

    python scripts/mutants.py -n 60 --seed 31 --log mutants.json

The mutants are drawn in proportion to lines by room. Their kinds take turns, so that all occur: a comparison flipped,
a number off by one, a statement dropped, a constant changed, two arguments swapped. Everything runs on a copy of the
tree, one mutant after the other, stops at the first failure, and is logged, so that a second call goes on where the
first ended. The tests of the mutant's own room come first, among them those that name its module; survivors meet the
rest, then the slow tests in the same order. `--contexts` takes a data file of coverage.py with one context a test and
leaves out tests that do not run the mutated line; `--tests` takes the tests of another tree.

To compare the suites of two trees on the same mutants: `--common OTHER` draws only at lines that stand once in both
packages, and `--like LOG`, run in the other tree, makes the mutants of that log wherever their line stands there.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import json
import os
import random
import re
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TypeAlias

HEAVY = ("torch", "transformers", "lm_eval", "pytest")  # imported once; each mutant gets a fork
FLIPPED = {ast.Lt: ast.GtE, ast.GtE: ast.Lt, ast.Gt: ast.LtE, ast.LtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq}
FLIPPED |= {ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In}
STATEMENTS = (ast.AugAssign, ast.Continue, ast.Raise)
KINDS = ("comparison", "off by one", "dropped", "constant", "swapped")
Site: TypeAlias = tuple[Path, str, int]  # file below the package, kind, number of the node
NOT_COPIED = shutil.ignore_patterns(".git", "__pycache__", ".*_cache", "*.egg-info")


def sites(tree: ast.Module) -> Iterator[tuple[str, int]]:
    """(kind, number of the node in `ast.walk`) of everything that can be changed."""
    skipped = {id(node) for block in ast.walk(tree) if _is_skipped(block) for node in ast.walk(block)}
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


def _is_skipped(node: ast.AST) -> bool:
    """Imports for types; f-strings, whose parts have no exact places before Python 3.12."""
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test))


def mutate(source: str, kind: str, number: int) -> tuple[str, str]:
    """Change one node of a module; returns the source and `line: before -> after`."""
    node = list(ast.walk(ast.parse(source)))[number]
    before = ast.unparse(node)
    if isinstance(node, ast.Compare):
        node.ops[0] = FLIPPED[type(node.ops[0])]()
    elif isinstance(node, ast.Constant) and kind == "off by one":
        node.value += 1
    elif isinstance(node, ast.Constant):
        node.value = not node.value if isinstance(node.value, bool) else node.value * 2 + 1
    elif isinstance(node, ast.Call):
        node.args[0], node.args[1] = node.args[1], node.args[0]
    after = "pass" if kind == "dropped" else ast.unparse(node)
    lines = source.encode().splitlines(keepends=True)
    start, end = (sum(map(len, lines[: line - 1])) + column for line, column in
                  ((node.lineno, node.col_offset), (node.end_lineno, node.end_col_offset)))  # fmt: skip
    if isinstance(node, ast.Compare):
        after = f"({after})"
    changed = source.encode()[:start] + after.encode() + source.encode()[end:]
    return changed.decode(), f"{node.lineno}: {' '.join(before.split())} -> {' '.join(after.split())}"


def room(path: Path) -> str:
    """The room of a module, by its path below the package."""
    return path.parts[0] if len(path.parts) > 1 else ""


def unique_sites(package: Path) -> dict[tuple[str, str, str], Site]:
    """The sites of a package by their kind, the text of their line and their own, where no other has the same."""
    alike: dict[tuple[str, str, str], list[Site]] = {}
    for file in sorted(package.rglob("*.py")):
        source = file.read_text(encoding="utf-8")
        tree, lines = ast.parse(source), source.splitlines()
        nodes = list(ast.walk(tree))
        for kind, number in sites(tree):
            text = " ".join(lines[nodes[number].lineno - 1].split())
            key = kind, text, ast.unparse(nodes[number])
            alike.setdefault(key, []).append((file.relative_to(package), kind, number))
    return {key: places[0] for key, places in alike.items() if len(places) == 1}


def draw(package: Path, options: argparse.Namespace) -> list[Site]:
    """`options.n` sites: the rooms by their lines, the kinds in turn; or those of a log of another tree."""
    if options.like:
        keys = [tuple(entry["key"]) for entry in json.loads(options.like.read_text()).values()]
        unique = unique_sites(package)
        return [unique[key] for key in keys if key in unique]
    chosen = random.Random(options.seed)
    sources = {file.relative_to(package): file.read_text(encoding="utf-8") for file in sorted(package.rglob("*.py"))}
    common = set()
    if options.common:
        there = unique_sites(options.common / package.name)
        common = {site for key, site in unique_sites(package).items() if key in there}
    lines: Counter[str] = Counter()
    every: dict[tuple[str, str], list[Site]] = {}
    for file, source in sources.items():
        if not options.rooms or room(file) in options.rooms:
            lines[room(file)] += len(source.splitlines())
            for kind, number in sites(ast.parse(source)):
                if not options.common or (file, kind, number) in common:
                    every.setdefault((room(file), kind), []).append((file, kind, number))
    count = options.n
    shares = {name: count * of_room / lines.total() for name, of_room in lines.items()}
    counts = {name: int(share) for name, share in shares.items()}
    for name in sorted(shares, key=lambda name: counts[name] - shares[name])[: count - sum(counts.values())]:
        counts[name] += 1
    turns = (name for name, of_room in counts.items() for _ in range(of_room))
    drawn = []
    for turn, name in enumerate(turns):
        kinds = [KINDS[(turn + offset) % len(KINDS)] for offset in range(len(KINDS))]
        group = next((every[name, kind] for kind in kinds if every.get((name, kind))), None)
        if group:
            drawn.append(group.pop(chosen.randrange(len(group))))
    return drawn


def stages(root: Path, file: Path) -> Iterator[list[str]]:
    """Test files in the order in which a mutant of `file` meets them."""
    tests = sorted((root / "tests").rglob("test_*.py"))
    own = [path for path in tests if path.parent.name == (room(file) or "tests")]
    words = {file.stem, file.parent.name} if file.stem == "__init__" else {file.stem}
    naming = [path for path in tests if any(word in path.read_text(encoding="utf-8") for word in words)]
    yield [str(path) for path in own if path in naming]
    yield [str(path) for path in own if path not in naming]
    yield [str(path) for path in naming if path not in own]
    yield [str(path) for path in tests if path not in own and path not in naming]


def tests_of_line(contexts: Path, file: Path, line: int, paths: list[str]) -> list[str]:
    """Of these test files, the tests that may run a line: all of them where it is run when a module is imported."""
    from coverage import CoverageData

    data = CoverageData(str(contexts))
    data.read()
    measured = {context.split("[")[0].partition("::")[::2] for context in data.measured_contexts() if context}
    name = next((name for name in data.measured_files() if name.endswith(f"/lm_eval_duel/{file}")), "")
    running = {context.split("[")[0].partition("::")[::2] for context in data.contexts_by_lineno(name).get(line, ())}
    if ("", "") in running:
        return paths
    chosen = []
    for path in paths:
        place, text = path[path.index("/tests/") + 1 :], Path(path).read_text(encoding="utf-8")
        if re.search(r"^\w.*importorskip", text, re.MULTILINE):  # pytest takes no names in a file that it skips
            chosen.append(path)
            continue
        tests = re.findall(r"^def (test_\w+)", text, re.MULTILINE)
        known = {test for measured_file, test in measured if measured_file == place}
        chosen += [f"{path}::{test}" for test in tests if test not in known or (place, test) in running]
    return chosen


def failed(root: Path, arguments: list[str], timeout: float) -> str | None:
    """Run pytest in a fork; what failed first, or None."""
    log = root / "pytest.log"
    child = os.fork()
    if not child:
        os.setsid()
        output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.chdir(root)
        os.environ |= {"PYTHONPATH": str(root), "PYTHONDONTWRITEBYTECODE": "1"}
        sys.dont_write_bytecode = True
        sys.path.insert(0, str(root))
        for name in [name for name in sys.modules if name.split(".")[0] == "lm_eval_duel"]:
            del sys.modules[name]
        os._exit(int(sys.modules["pytest"].main(["-q", "-x", "-n", "0", "-p", "no:cacheprovider", *arguments])))
    ends = time.monotonic() + timeout
    while time.monotonic() < ends:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            code = os.waitstatus_to_exitcode(status)
            lines = log.read_text(errors="replace").splitlines()
            by = next((line.split(" - ")[0] for line in lines if re.match(r"(FAILED|ERROR) \S", line)), f"exit {code}")
            return None if code in (0, 5) else by
        time.sleep(0.1)
    os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return "timeout"


def meet(root: Path, file: Path, line: int, options: argparse.Namespace, after: int) -> tuple[str | None, int]:
    """The first test that fails on a mutant, or None, and how many stages it has met."""
    paths = list(stages(root, file))[: 2 if options.own else None]
    every = [(marker, tests) for marker in ("not slow", "slow") for tests in paths]
    for stage, (marker, tests) in enumerate(every):
        if options.contexts:
            tests = tests_of_line(options.contexts, file, line, tests)
        by = failed(root, ["-m", marker, *tests], options.timeout) if tests and stage >= after else None
        if by:
            return by.replace(f"{root}/", ""), stage + 1
    return None, len(every)


def main() -> None:
    """Log each mutant and the first test that found it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rooms", nargs="*", help="only these rooms (all)")
    parser.add_argument("-n", type=int, default=60, help="mutants (60)")
    parser.add_argument("--seed", type=int, default=31)
    parser.add_argument("--log", type=Path, default=Path("mutants.json"))
    parser.add_argument("--tests", type=Path, default=Path("tests"), help="the folder of tests (tests)")
    parser.add_argument("--contexts", type=Path, help="a data file of coverage.py, one context a test")
    parser.add_argument("--own", action="store_true", help="only the tests of the mutant's room")
    parser.add_argument("--timeout", type=float, default=900, help="seconds after which a mutant counts as found")
    parser.add_argument("--common", type=Path, help="only at lines that stand once in this other tree, too")
    parser.add_argument("--like", type=Path, help="the mutants of this log of another tree")
    parser.add_argument("--list", action="store_true", help="print the mutants and run nothing")
    options = parser.parse_args()
    log = json.loads(options.log.read_text()) if options.log.exists() else {}
    for name in () if options.list else HEAVY:
        importlib.import_module(name)
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder) / "tree"
        shutil.copytree(Path.cwd(), root, ignore=NOT_COPIED, symlinks=True)
        shutil.rmtree(root / "tests")
        shutil.copytree(options.tests, root / "tests", ignore=NOT_COPIED)
        package = root / "lm_eval_duel"
        keys = {site: key for key, site in unique_sites(package).items()}
        for file, kind, number in draw(package, options):
            source = (package / file).read_text(encoding="utf-8")
            changed, what = mutate(source, kind, number)
            name = f"{file}:{what}"
            after = log.get(name, {}).get("stages", 0)
            if options.list or log.get(name, {}).get("by") or after >= (4 if options.own else 8):
                print(name)
                continue
            (package / file).write_text(changed, encoding="utf-8")
            began = time.monotonic()
            by, met = meet(root, file, int(what.split(":")[0]), options, after)
            seconds = round(time.monotonic() - began)
            key = keys.get((file, kind, number), ())
            log[name] = {"kind": kind, "by": by, "stages": met, "seconds": seconds, "key": key}
            (package / file).write_text(source, encoding="utf-8")
            options.log.write_text(json.dumps(log, indent=1))
            print(f"{log[name]['by'] or 'MISSED'}  [{log[name]['seconds']} s]  {name[:150]}", flush=True)
    print(f"{sum(bool(entry['by']) for entry in log.values())} of {len(log)} found")


if __name__ == "__main__":
    main()
