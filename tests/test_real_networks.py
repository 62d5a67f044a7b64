"""AntiBERTy, a network that others trained: examples/antibodies/antiberty.py on its weights, against plain loops."""

import csv
import importlib.util
import subprocess
from pathlib import Path

import pytest
import torch
from harness_runs import evaluate

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
    """The ends of six chains: the last framework region and what is before it."""
    with (ROOT / "examples" / "antibodies" / "antibodies.csv").open() as lines:
        rows = list(csv.DictReader(lines))
    assert {letter for row in rows for letter in row["heavy"] + row["light"]} == set(example.RESIDUES)
    return [row[chain][-10:] for row in rows[:3] for chain in ("heavy", "light")]


def by_plain_loop(log_probs, sequence, order):
    """log p of the ids of a sequence that are revealed one at a time; `order` picks among (position, log-probs)."""
    row, total = [2, *[MASK] * len(sequence), 3], 0.0
    while masked := [i for i, token in enumerate(row) if token == MASK]:
        logs = log_probs(row)
        i = order(masked, logs)
        total += float(logs[i, sequence[i - 1]])
        row[i] = sequence[i - 1]
    return total


def margin(masked, logs):
    top = logs.exp().topk(2).values
    return max(masked, key=lambda i: float(top[i, 0] - top[i, 1]))


PICKS = {
    "left_to_right": lambda masked, logs: masked[0],
    "greedy": lambda masked, logs: max(masked, key=lambda i: float(logs[i].max())),
    "margin": margin,
}


def test_every_measure_equals_a_plain_loop(example, folder, log_probs, chains, capsys):
    measured = example.measure(example.network(folder), chains)
    for sequence, values in zip(chains, measured, strict=True):
        ids = example.ids(sequence)
        for rule, pick in PICKS.items():
            assert values[rule] == pytest.approx(by_plain_loop(log_probs, ids, pick), abs=1e-3), rule
        row, pseudo = [2, *ids, 3], 0.0
        for i in range(1, len(row) - 1):
            pseudo += float(log_probs([*row[:i], MASK, *row[i + 1 :]])[i, row[i]])
        assert values["pseudo"] == pytest.approx(pseudo, abs=1e-3)
        assert 0 < values["error"] < 10
    example.report(chains, measured)
    assert "Spearman" in capsys.readouterr().out


def test_rules_sum_to_one_over_all_strings_and_the_pseudo_likelihood_does_not(example, folder):
    sums = example.sums_over_strings(example.network(folder))
    assert abs(sums.pop("pseudo") - 1) > 0.1
    assert set(sums) == set(example.RULES)
    for rule, total in sums.items():
        assert total == pytest.approx(1, abs=1e-5), rule


def test_the_task_of_variants_end_to_end(folder, chains, log_probs, example, tmp_path):
    """Two sites at once by the task, against the plain loop."""
    wild, sites = chains[0], (2, 6)
    rows = [("mutant", "mutated_sequence", "DMS_score")]
    for pair in ("WW", "AD", "SG"):
        residues = list(wild)
        for site, residue in zip(sites, pair, strict=True):
            residues[site] = residue
        mutant = ":".join(f"{wild[site]}{site + 1}{residues[site]}" for site in sites)
        rows.append((mutant, "".join(residues), len(rows)))
    with (tmp_path / "assay.csv").open("w", newline="") as lines:
        csv.writer(lines).writerows(rows)
    model_args = f"pretrained={folder},rule=greedy,block=none"
    found = evaluate("proteingym", model_args, metadata={"files": str(tmp_path / "assay.csv")}, bootstrap_iters=0)
    for sample, (_, sequence, _) in zip(found["samples"]["proteingym"], rows[1:], strict=True):
        expected = joint(log_probs, example.ids(sequence), sites) - joint(log_probs, example.ids(wild), sites)
        assert sample["spearman"][1] == pytest.approx(expected, abs=0.05)  # the task leaves special tokens in


def joint(log_probs, sequence, sites):
    """log p of the ids at `sites` given all others, the most certain first."""
    row, total = [2, *sequence, 3], 0.0
    for site in sites:
        row[site + 1] = MASK
    while masked := [i for i, token in enumerate(row) if token == MASK]:
        logs = log_probs(row)
        i = PICKS["greedy"](masked, logs)
        total += float(logs[i, sequence[i - 1]])
        row[i] = sequence[i - 1]
    return total


def test_another_wheel_is_refused(example, tmp_path, monkeypatch):
    def download(command, check):
        Path(command[command.index("--dest") + 1], "antiberty-0.1.3-py3-none-any.whl").write_bytes(b"another file")

    monkeypatch.setattr(subprocess, "run", download)
    with pytest.raises(ValueError, match="sha256"):
        example.checkpoint(tmp_path)
    assert not (tmp_path / "tokenizer_config.json").exists()
