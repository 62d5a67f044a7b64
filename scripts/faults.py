"""Planted faults: each is made in a copy of the tree, and the tests that should find it are run.

    python scripts/faults.py            all faults of faults.txt, and those of audit_faults.py
    python scripts/faults.py elbo.py    those with this text in their entry

The tests must pass without faults, and one of them must fail with each. The exit code is 1 if a fault is missed, or
cannot be planted because its text is gone or stands in its file several times. An entry of faults.txt:

    core/windows.py                 the file, below lm_eval_duel
    - *context[cut:]                what stands there, one or more lines
    + *context[: -cut]              what replaces it
    ? harness/test_lm.py::test_x    a test that finds it, below tests, one or more
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import functools
import importlib
import re
import shutil
import sys
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from mutants import HEAVY, NOT_COPIED, failed

TABLES = [Path(__file__).with_name(name) for name in ("faults.txt", "audit_faults.txt")]
TIMEOUT = 300  # seconds
ALL = ("-m", "")  # slow tests, too


class Fault(NamedTuple):
    """An entry of a table. `audit`: the words after @ in audit_faults.txt."""

    what: str
    file: str
    old: str
    new: str
    tests: list[str]
    audit: list[str]


def table(files: Iterable[Path] = TABLES) -> Iterator[Fault]:
    """The planted faults. An entry ends with an empty line, or after its tests: a merge may join two of them."""
    text = "\n\n".join(file.read_text(encoding="utf-8") for file in files)
    text = re.sub(r"^(\?.*\n)(?=[^?\n])", r"\1\n", text, flags=re.MULTILINE)
    for entry in text.split("\n\n"):
        parts: dict[str, list[str]] = {mark: [] for mark in "#-+?@"}
        names = []
        for line in entry.strip().splitlines():
            mark = line[0]
            if mark in parts:
                parts[mark].append(line[2:])
            else:
                names.append(line)
        if names:
            yield Fault(
                what=" ".join(parts["#"]),
                file=names[0],
                old="\n".join(parts["-"]),
                new="\n".join(parts["+"]),
                tests=[f"tests/{test}" for test in parts["?"]],
                audit=" ".join(parts["@"]).split(),
            )


def sources(package: Path) -> dict[Path, str]:
    """The text of each file."""
    return {file: file.read_text(encoding="utf-8") for file in package.rglob("*.py")}


def place(files: dict[Path, str], package: Path, fault: Fault) -> Path:
    """The file of a fault, or the only other one in which its text stands once; raises ValueError if there is none."""
    counts = {file: source.count(fault.old) for file, source in files.items()}
    if counts.get(package / fault.file) == 1:
        return package / fault.file
    others = [file for file, count in counts.items() if count == 1]
    if len(others) != 1:
        raise ValueError(f"{fault.old!r} stands {counts.get(package / fault.file, 0)} times in {fault.file}")
    return others[0]


@functools.cache
def tree(source: str) -> str:
    """The syntax tree of a file, as text; raises SyntaxError."""
    return ast.dump(ast.parse(source))


def planted(source: str, fault: Fault) -> str:
    """The source with the fault; raises ValueError if that is no code, or the same code."""
    changed = source.replace(fault.old, fault.new)
    try:
        same = tree(changed) == tree(source)
    except SyntaxError as error:
        raise ValueError(f"it is no code: {error}") from error
    if same:
        raise ValueError("it changes nothing")
    return changed


@contextlib.contextmanager
def plant(root: Path, fault: Fault) -> Iterator[None]:
    """Plant a fault in the copy of the tree at `root`; raises ValueError if it cannot be planted."""
    files = sources(package := root / "lm_eval_duel")
    file = place(files, package, fault)
    file.write_text(planted(files[file], fault), encoding="utf-8")
    yield
    file.write_text(files[file], encoding="utf-8")


def verdict(root: Path, fault: Fault) -> tuple[bool, str]:
    """Whether the tests find a fault, and which one does, or why there is no answer."""
    try:
        with plant(root, fault):
            by = failed(root, [*ALL, *fault.tests], TIMEOUT)
    except ValueError as error:
        return False, f"NOT PLANTED: {error}"
    if by is None:
        return False, f"MISSED by {' '.join(fault.tests)}"
    return by.startswith("FAILED"), by.replace(f"{root}/", "")


def main() -> None:
    """Print a line for each fault."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", help="only the faults whose entry holds one of these texts")
    words = parser.parse_args().words
    chosen = [fault for fault in table() if not words or any(word in str(fault) for word in words)]
    if not chosen:  # without tests to run, pytest would run all
        parser.error(f"no entry of the tables holds {' or '.join(words)}.")
    for name in HEAVY:
        importlib.import_module(name)
    found = 0
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder) / "tree"
        shutil.copytree(Path.cwd(), root, ignore=NOT_COPIED, symlinks=True)
        tests = sorted({test for fault in chosen for test in fault.tests})
        if by := failed(root, [*ALL, *tests], len(chosen) * TIMEOUT):
            sys.exit(f"without any fault: {by}")
        for fault in chosen:
            is_found, what = verdict(root, fault)
            found += is_found
            change = " ".join(f"{fault.old} -> {fault.new}".split())
            print(f"{fault.file}: {change[:120]}\n    {what}", flush=True)
    print(f"{found} of {len(chosen)} found")
    sys.exit(found < len(chosen))


if __name__ == "__main__":
    main()
