"""The planted faults of scripts/faults.py: each can still be planted. Run the script to see that each is found."""

import importlib
import sys

import pytest
from pages import ROOT

PACKAGE = ROOT / "lm_eval_duel"


@pytest.mark.slow
def test_every_fault_can_be_planted(monkeypatch, subtests):
    monkeypatch.setattr(sys, "path", [*sys.path, str(ROOT / "scripts")])
    faults = importlib.import_module("faults")
    files = faults.sources(PACKAGE)
    for fault in faults.table():
        with subtests.test(fault.file, old=fault.old):
            faults.planted(files[faults.place(files, PACKAGE, fault)], fault)
            for test in fault.tests:
                file, _, name = test.partition("::")
                assert f"def {name.split('[')[0]}" in (ROOT / file).read_text(encoding="utf-8"), test


def test_entries_that_a_merge_has_joined_are_two(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "path", [*sys.path, str(ROOT / "scripts")])
    faults = importlib.import_module("faults")
    first = "one.py\n- a\n+ b\n? test_one.py\n? test_two.py\n"
    second = "# what it is\ntwo.py\n- c\n+ d\n? test_two.py\n"
    file = tmp_path / "faults.txt"
    tables = []
    for between in ("", "\n"):
        file.write_text(first + between + second)
        tables.append(list(faults.table([file])))
    assert tables[0] == tables[1]
    assert [fault.file for fault in tables[0]] == ["one.py", "two.py"]
