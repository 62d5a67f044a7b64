"""AntiBERTy, a network that others trained: examples/antibodies/antiberty.py on its weights, against the reference."""

import csv
import importlib.util
import subprocess
from pathlib import Path

import pytest
import torch

from lm_eval_duel import reference

ROOT = Path(__file__).resolve().parent.parent
MASK, SPECIAL = 4, [0, 1, 2, 3, 4]

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def example():
    spec = importlib.util.spec_from_file_location("antiberty", ROOT / "examples" / "antibodies" / "antiberty.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def folder(example, tmp_path_factory):
    try:
        return example.checkpoint(tmp_path_factory.mktemp("antiberty"))
    except subprocess.CalledProcessError as error:
        pytest.skip(f"{example.PACKAGE} cannot be downloaded from a package index: {error}")


@pytest.fixture(scope="module")
def log_probs(folder):
    """log p of each token at each position of a row, by transformers alone: (L,) -> (L, V)."""
    from transformers import BertForMaskedLM

    model = BertForMaskedLM.from_pretrained(folder).eval()

    @torch.no_grad()
    def of(row):
        logits = model(torch.tensor([row])).logits[0].double()  # (L, V)
        logits[:, SPECIAL] = -torch.inf
        return logits.log_softmax(-1)

    return of


@pytest.fixture(scope="module")
def chains(example):
    """The ends of four chains."""
    with (ROOT / "examples" / "antibodies" / "antibodies.csv").open() as lines:
        rows = list(csv.DictReader(lines))
    assert {letter for row in rows for letter in row["heavy"] + row["light"]} == set(example.RESIDUES)
    return [row[chain][-6:] for row in rows[:2] for chain in ("heavy", "light")]


RULES = {"left_to_right": reference.left_to_right(), "greedy": reference.greedy(), "margin": reference.margin()}


def by_reference(log_probs, ids, rule):
    """log p of the ids of a sequence that are revealed one at a time."""
    row, network = [2, *ids, 3], lambda z: log_probs(z.tolist())
    return reference.log_likelihood(row, [[*range(1, len(row) - 1)]], network, rule, MASK).ll


def test_every_measure_equals_a_plain_loop(example, folder, log_probs, chains, capsys):
    measured = example.measure(example.network(folder), chains, draws=16)
    for sequence, values in zip(chains, measured, strict=True):
        ids = example.ids(sequence)
        for name, rule in RULES.items():
            assert values[name] == pytest.approx(by_reference(log_probs, ids, rule), abs=1e-3), name
        row, pseudo = [2, *ids, 3], 0.0
        for i in range(1, len(row) - 1):
            pseudo += float(log_probs([*row[:i], MASK, *row[i + 1 :]])[i, row[i]])
        assert values["pseudo"] == pytest.approx(pseudo, abs=1e-3)
        assert 0 < values["error"] < 10
    example.report(chains, measured)
    assert "Spearman" in capsys.readouterr().out


def test_rules_sum_to_one_over_all_strings_and_the_pseudo_likelihood_does_not(example, folder):
    sums = example.sums_over_strings(example.network(folder), length=2)
    assert abs(sums.pop("pseudo") - 1) > 0.1
    assert set(sums) == set(example.RULES)
    for rule, total in sums.items():
        assert total == pytest.approx(1, abs=1e-5), rule
