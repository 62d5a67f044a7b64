"""Proteins as tasks; proteingym on a tiny random ESM-2 against a loop by hand, metrics against their definitions."""

import csv
import functools
import importlib.util
import math

import datasets
import numpy as np
import pytest
import torch
from encoder_reference import PROTEIN_MASK, VOCABULARY, esm
from harness_runs import evaluate
from scipy import stats

from lm_eval_duel import reference
from lm_eval_duel.errors import DuelError
from lm_eval_duel.tasks import task_folder
from lm_eval_duel.text.annotated import Residues

pytestmark = pytest.mark.usefixtures("one_load")
SPEC = importlib.util.spec_from_file_location("proteins", f"{task_folder()}/proteins/utils.py")
SPEC.loader.exec_module(utils := importlib.util.module_from_spec(SPEC))

WILD = "MKTAYIAKQRQISF"
VARIANTS = ["K2A", "K2W", "T3G", "R10L", "K2A:T3G", "T3W:R10L", "K2V:Y5D:F14M", "Y5C:I6D:A7E"]


@pytest.fixture(scope="module")
def network(tmp_path_factory):
    """The folder of a network, and its logits of ids in float64."""
    path, logits = esm(tmp_path_factory.mktemp("esm"))
    return path, functools.cache(logits)


def mutated(mutant):
    residues = list(WILD)
    for part in mutant.split(":"):
        assert residues[int(part[1:-1]) - 1] == part[0]
        residues[int(part[1:-1]) - 1] = part[-1]
    return "".join(residues)


def log_prob(logits, sequence, sites):
    """log p of the residues at `sites` given all others, the most certain first."""
    ids = [VOCABULARY.index(residue) for residue in sequence]
    row = [0, *ids, 2]  # between <cls> and <eos>
    block = [site + 1 for site in sites]

    def network(z):
        return logits(tuple(z.tolist())).index_fill(1, torch.tensor(PROTEIN_MASK), -math.inf)

    return reference.log_likelihood(row, [block], network, reference.greedy(1), PROTEIN_MASK).ll


def by_hand(logits, scoring, mutant):
    sites = [int(part[1:-1]) - 1 for part in mutant.split(":")]
    if scoring == "joint":
        return log_prob(logits, mutated(mutant), sites) - log_prob(logits, WILD, sites)
    total = 0.0
    for part, site in zip(mutant.split(":"), sites, strict=True):
        total += log_prob(logits, mutated(part), [site]) - log_prob(logits, WILD, [site])
    return total


def write(file, rows):
    with file.open("w", newline="") as lines:
        writer = csv.DictWriter(lines, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return str(file)


def substitutions(scores=range(8)):
    rows = []
    for mutant, score in zip(VARIANTS, scores, strict=True):
        rows.append({"mutant": mutant, "mutated_sequence": mutated(mutant), "DMS_score": score})
    return rows


def run(path, files, scoring="joint"):
    """The metrics of proteingym, and the score of each mutant."""
    run = evaluate(
        "proteingym",
        f"pretrained={path},rule=greedy,block=none",
        metadata={"files": files, "scoring": scoring},
        bootstrap_iters=0,
    )
    scores = {}
    for sample in run["samples"]["proteingym"]:
        _, score, _, _ = sample["spearman"]
        scores[sample["doc"]["mutant"]] = score
    return run["results"]["proteingym"], scores


@pytest.mark.parametrize("scoring", [pytest.param("joint", marks=pytest.mark.slow), "marginals"])
def test_scores_are_those_of_a_loop_by_hand_and_rank_a_known_order(network, tmp_path, scoring):
    path, logits = network
    expected = {mutant: by_hand(logits, scoring, mutant) for mutant in VARIANTS}
    rows = substitutions(expected.values())
    median = np.median(list(expected.values()))
    turned = []  # an assay in which everything is the other way round
    for row in rows:
        row["DMS_score_bin"] = int(row["DMS_score"] > median)
        turned.append({**row, "DMS_score": -row["DMS_score"], "DMS_score_bin": 1 - row["DMS_score_bin"]})
    files = [write(tmp_path / "right.csv", rows)]

    if scoring == "joint":
        results, scores = run(path, files, scoring)
        assert scores == pytest.approx(expected, abs=1e-4)
        assert results["spearman,none"] == pytest.approx(1)
        assert results["auc,none"] == pytest.approx(1)

    results, scores = run(path, [*files, write(tmp_path / "turned.csv", turned)], scoring)
    assert scores == pytest.approx(expected, abs=1e-4)
    assert results["spearman,none"] == pytest.approx(0, abs=1e-12)
    assert results["spearman_low,none"] == pytest.approx(-1)
    assert results["spearman_high,none"] == pytest.approx(1)
    assert results["auc,none"] == pytest.approx(0.5)


def test_insertions_and_deletions_are_scored_as_whole_sequences(network, tmp_path):
    path, logits = network
    rows = []
    for n, sequence in enumerate((WILD, WILD[:4] + WILD[5:], WILD[:4] + "GG" + WILD[4:])):
        rows.append({"mutant": sequence, "mutated_sequence": sequence, "DMS_score": n})

    results, scores = run(path, write(tmp_path / "indels.csv", rows))

    assert "auc,none" not in results
    assert len(scores) == 3
    for sequence, score in scores.items():
        assert score == pytest.approx(log_prob(logits, sequence, range(len(sequence))), abs=1e-4)


def test_spearman_and_auc_are_those_of_their_definitions():
    generator = np.random.default_rng(0)
    scores = generator.integers(0, 6, 40).astype(float)
    measured = generator.normal(size=40)
    fit = measured > 0

    wins = []
    for above in scores[fit]:
        for below in scores[~fit]:
            wins.append(float(above > below) + 0.5 * float(above == below))
    assert utils.area_under_curve(scores, fit) == pytest.approx(np.mean(wins))

    ranks_of_scores = [
        sum(scores < score) + (sum(scores == score) + 1) / 2 for score in scores
    ]  # of equal ones the mean
    ranks_measured = [sum(measured < value) + 1 for value in measured]
    expected = np.corrcoef(ranks_of_scores, ranks_measured)[0, 1]
    assert utils.rank_correlation(scores, measured) == pytest.approx(expected)

    assert math.isnan(utils.rank_correlation(np.ones(4), measured[:4]))
    assert math.isnan(utils.area_under_curve(scores, np.ones(40)))
    value, low, high = utils.with_interval(40, lambda n: utils.rank_correlation(measured[n], measured[n] + scores[n]))
    assert low < value < high


def test_the_interval_over_few_assays_is_as_wide_as_that_of_students_t():
    values = np.random.default_rng(0).normal(size=12)
    value, low, high = utils.with_interval(12, lambda n: float(values[n].mean()))
    half = stats.t.ppf(0.975, 11) * values.std(ddof=1) / 12**0.5
    assert low == pytest.approx(value - half, abs=0.1 * half)
    assert high == pytest.approx(value + half, abs=0.1 * half)


@pytest.mark.parametrize(
    ("row", "names"),
    [
        ({"mutant": "K2A", "mutated_sequence": WILD, "DMS_score": 1.0}, "position 2"),
        ({"mutant": "K99A", "mutated_sequence": WILD, "DMS_score": 1.0}, "position 99"),
        ({"mutant": "W2A", "mutated_sequence": mutated("K2A"), "DMS_score": 1.0}, "rows before"),
        ({"mutant": "K2A", "mutated_sequence": "mka", "DMS_score": 1.0}, "mutated_sequence"),
        ({"mutant": "K2A", "mutated_sequence": mutated("K2A"), "DMS_score": "high"}, "DMS_score"),
    ],
)
def test_wrong_rows_are_named(tmp_path, row, names):
    file = write(tmp_path / "assay.csv", [*substitutions()[2:3], row])
    with pytest.raises(DuelError, match=names):
        utils.assays(files=file)


def test_other_models_are_refused():
    with pytest.raises(DuelError, match="bidirectional"):
        "MK" + Residues("T", "AY")
    assert Residues("TAY", "K", (1,)).digest != Residues("TAY", "K").digest


def test_proteins_are_whole_and_counted_in_residues():
    data = utils.only_residues(utils.proteins()["test"])
    lengths = {record["accession"]: len(record["text"]) for record in data}
    assert lengths == {  # as UniProtKB has them
        "P0CG48": 76,  # the first of nine equal ubiquitins
        "P99999": 105,
        "P01308": 110,
        "P69905": 142,
        "P00698": 147,
        "P02144": 154,
        "P42212": 238,
    }
    assert utils.residue_perplexity(data[0], [-152.0])["bits_per_residue"] == (-152.0, 76)


def test_what_is_no_residue_is_refused_before_anything_is_scored():
    def checked(*texts):
        return utils.only_residues(datasets.Dataset.from_list([{"text": text} for text in texts]))

    assert checked("MKT\nAYI\n", "M")["text"] == ["MKTAYI", "M"]
    with pytest.raises(DuelError, match=r"Protein 1 has 'a', 'k', which are not .*: write residues in upper case"):
        checked("MKT", "Mka")
    with pytest.raises(DuelError, match=r"Protein 0 has '\*', 'J', which are not letters of residues \(ABC.*: remove"):
        checked("MJ*")
    with pytest.raises(DuelError, match=r"Protein 1 is None, not text with a letter for each residue"):
        checked("MKT", None)
    with pytest.raises(DuelError, match=r"have no column 'text'; they have seq\. Name the column with the sequences"):
        utils.only_residues(datasets.Dataset.from_list([{"seq": "MKT"}]))
