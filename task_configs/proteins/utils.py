"""Proteins, one letter a residue: perplexities per residue, and deep mutational scans in ProteinGym's format.

The bits per residue of proteins with log-likelihood ll are -ll / (residues ln 2), summed over all proteins before
dividing.

A file of `proteingym` is an assay: rows of `mutant` ("A24G", "A24G:K30R"), `mutated_sequence`, `DMS_score`, and
`DMS_score_bin` where there is one. Does log p of a variant rank what was measured? The score of a variant is

    joint       log p(its residues at the mutated sites | all others) - the same of the wild type: for one site the
                masked marginal, for several the exact joint under the rule
    marginals   the sum over sites of that of each site alone, the others as in the wild type
    sequence    log p of the whole sequence, for insertions and deletions
"""

from __future__ import annotations

import functools
import logging
import math
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import datasets
import numpy as np
from lm_eval.api.instance import Instance
from scipy.stats import rankdata

from lm_eval_duel.errors import DuelError
from lm_eval_duel.results import bootstrap
from lm_eval_duel.tasks import files, metadata
from lm_eval_duel.tasks.data import bundled
from lm_eval_duel.tasks.guarded import GuardedTask
from lm_eval_duel.text.annotated import Residues

log = logging.getLogger("lm_eval.duel_mdm")

# the 20 amino acids, the rare O and U, and the placeholders B, X and Z; ESM-2 has no J and reads it as <unk>
LETTERS = frozenset("ACDEFGHIKLMNPQRSTVWY" + "OU" + "BXZ")
SUBSTITUTION = re.compile(r"([A-Z])(\d+)([A-Z])")  # wild type, position from 1, mutant
DRAWS = 1000  # of a bootstrap
NOWHERE = (float("nan"),) * 3

Item = tuple[str, float, float, int | None]  # assay, score, DMS_score, DMS_score_bin


# ---------------------------------------------------------------- whole proteins


def proteins(**metadata: Any) -> dict[str, datasets.Dataset]:
    """Seven well-known proteins of UniProtKB, 972 residues."""
    return bundled("proteins.jsonl")


def only_residues(data: datasets.Dataset) -> datasets.Dataset:
    """The proteins of the column 'text' without whitespace, as in a wrapped FASTA file.

    Raises DuelError for a letter that is no residue: a protein tokenizer would score it as one unknown token.
    """
    if "text" not in data.column_names:
        raise DuelError(
            f"These proteins have no column 'text'; they have {', '.join(data.column_names)}. Name the column with the "
            "sequences 'text'."
        )
    documents = []
    for n, document in enumerate(data):
        documents.append({**document, "text": _checked(document["text"], n)})
    return type(data).from_list(documents)


def _checked(text: Any, index: int) -> str:
    if not isinstance(text, str):
        raise DuelError(f"Protein {index} is {text!r}, not text with a letter for each residue.")
    text = "".join(text.split())
    wrong = sorted({*text} - LETTERS)
    if wrong:
        advice = "write residues in upper case" if {*text.upper()} <= LETTERS else "remove or replace them"
        raise DuelError(
            f"Protein {index} has {', '.join(map(repr, wrong))}, which are not letters of residues "
            f"({''.join(sorted(LETTERS))}): {advice}."
        )
    return text


def residue_perplexity(doc: dict[str, Any], results: list[float]) -> dict[str, tuple[float, int]]:
    """(log-likelihood, residues) of a protein, for each metric. A residue is one byte: bits per byte are the same."""
    (log_prob,) = results
    item = log_prob, len(doc["text"])
    return {"bits_per_residue": item, "residue_perplexity": item, "bits_per_byte": item}


# ---------------------------------------------------------------- files of assays -> documents


def assays(**model_args: Any) -> dict[str, datasets.Dataset]:
    """The variants of the files that --metadata names, and how each is scored."""
    settings = metadata.read(model_args)
    scoring = settings.get("scoring", "joint")
    records = []
    for file in files.find(metadata.files_of(settings, "proteingym")):
        records += list(_variants(file, scoring))
    if not records:
        raise DuelError("The files of task proteingym have no row; it needs at least one variant.")
    return {"test": datasets.Dataset.from_list(records)}


def _variants(file: Path, scoring: str) -> Iterator[dict[str, Any]]:
    """The documents of an assay. If one variant is not a set of substitutions, all are scored as whole sequences."""
    rows = list(files.rows([str(file)]))
    substitutions = [_substitutions(row.get("mutant")) for _, row in rows]
    if scoring != "sequence" and not all(substitutions):
        log.info("%s has variants that are not substitutions: all are scored as whole sequences", file)
        scoring = "sequence"
    wild_type = None
    for (name, row), changes in zip(rows, substitutions, strict=True):
        sequence = files.column(name, row, "mutated_sequence")
        if not isinstance(sequence, str) or not sequence or {*sequence} - LETTERS:
            raise DuelError(f"{name}: mutated_sequence is {sequence!r}, not upper-case letters of residues.")
        measured = files.column(name, row, "DMS_score")
        fit = row.get("DMS_score_bin")
        document = {
            "assay": file.stem,
            "mutant": str(row.get("mutant")),
            "DMS_score": _number(name, measured),
            "DMS_score_bin": None if fit == "" else fit,  # a .csv file has empty cells
            "scoring": scoring,
            "sequence": sequence,
        }
        if scoring != "sequence":
            original = _undone(name, sequence, changes)
            wild_type = wild_type or original
            if original != wild_type:
                raise DuelError(f"{name}: without {row['mutant']} the sequence is not that of the rows before.")
            document["wild_type"] = wild_type
            document["sites"] = sorted(changes)
        yield document


def _number(name: str, measured: Any) -> float:
    """A measurement; in a .csv file it is text. Raises DuelError for anything but a finite number."""
    try:
        value = math.nan if isinstance(measured, bool) else float(measured)
    except (TypeError, ValueError):
        value = math.nan
    if not math.isfinite(value):
        raise DuelError(f"{name}: DMS_score is {measured!r}, not a number.")
    return value


def _substitutions(mutant: Any) -> dict[int, tuple[str, str]]:
    """(wild type, mutant) of each site, counted from 0; empty if `mutant` is not a set of substitutions."""
    changes = {}
    for part in str(mutant).split(":"):
        change = SUBSTITUTION.fullmatch(part)
        if change is None:
            return {}
        changes[int(change[2]) - 1] = change[1], change[3]
    return changes


def _undone(name: str, sequence: str, changes: dict[int, tuple[str, str]]) -> str:
    """The sequence before the substitutions."""
    residues = list(sequence)
    for site, (before, after) in changes.items():
        if not 0 <= site < len(residues) or residues[site] != after:
            raise DuelError(f"{name}: mutated_sequence has no {after} at position {site + 1}, as `mutant` says.")
        residues[site] = before
    return "".join(residues)


# ---------------------------------------------------------------- documents -> requests -> scores


def parts(doc: dict[str, Any]) -> list[tuple[int, str, Residues]]:
    """(sign, context, residues) of each log-likelihood in the score of a variant."""
    if doc["scoring"] == "sequence":
        return [(1, "", Residues(doc["sequence"]))]
    groups = [doc["sites"]]
    if doc["scoring"] == "marginals":
        groups = [[site] for site in doc["sites"]]
    signed = []
    for sites in groups:
        signed.append(_part(doc, sites, 1))
        signed.append(_part(doc, sites, -1))
    return signed


def _part(doc: dict[str, Any], sites: list[int], sign: int) -> tuple[int, str, Residues]:
    """The residues at `sites` of the variant (sign 1) or of the wild type (-1), all others as in the wild type."""
    row = list(doc["wild_type"])
    start = sites[0]
    end = sites[-1] + 1
    if sign == 1:
        for site in sites:
            row[site] = doc["sequence"][site]
    known = [site - start for site in range(start, end) if site not in sites]
    text = "".join(row)
    return sign, text[:start], Residues(text[start:end], text[end:], known)


class Assays(GuardedTask):
    """`proteingym`."""

    def construct_requests(self, doc: dict[str, Any], ctx: str, **kwargs: Any) -> list[Instance]:
        for key in ("apply_chat_template", "chat_template"):
            kwargs.pop(key, None)
        requests = []
        for n, (_, context, residues) in enumerate(parts(doc)):
            request = Instance("loglikelihood", doc=doc, arguments=(context, residues), idx=n, **kwargs)
            requests.append(request)
        return requests


def variant(doc: dict[str, Any], results: list[Any]) -> dict[str, Item]:
    """The score of a variant, and what was measured."""
    score = 0.0
    for (sign, _, _), (log_prob, _) in zip(parts(doc), results, strict=True):
        score += sign * float(log_prob)
    fit = doc["DMS_score_bin"]
    item = doc["assay"], score, doc["DMS_score"], None if fit is None else int(fit)
    metrics = {"spearman": item, "spearman_low": item, "spearman_high": item}
    if fit is not None:
        metrics |= {"auc": item, "auc_low": item, "auc_high": item}
    return metrics


# ---------------------------------------------------------------- scores -> metrics


def rank_correlation(scores: np.ndarray, measured: np.ndarray) -> float:
    """Spearman's; NaN if one side is constant."""
    with np.errstate(invalid="ignore"):
        return float(np.corrcoef(rankdata(scores), rankdata(measured))[0, 1])


def area_under_curve(scores: np.ndarray, fit: np.ndarray) -> float:
    """The probability that a variant with DMS_score_bin 1 scores above one with 0; NaN if there is only one kind."""
    fit = fit.astype(bool)
    above = int(fit.sum())
    below = int((~fit).sum())
    if not above or not below:
        return float("nan")
    rank_sum = rankdata(scores)[fit].sum()
    wins = rank_sum - above * (above + 1) / 2  # Mann and Whitney's U
    return float(wins / (above * below))


def with_interval(count: int, statistic: Callable[[np.ndarray], float]) -> tuple[float, float, float]:
    """statistic(all indices) with its 95 % bootstrap interval; draws in which it is not defined are left out."""
    generator = np.random.default_rng(0)
    drawn = np.array([statistic(generator.integers(count, size=count)) for _ in range(DRAWS)])
    drawn = drawn[np.isfinite(drawn)]
    value = statistic(np.arange(count))
    if not len(drawn):
        return value, float("nan"), float("nan")
    low, high = bootstrap.percentile_interval(drawn, count)
    return value, low, high


@functools.lru_cache(maxsize=4)
def by_assay(name: str, items: tuple[Item, ...]) -> dict[str, tuple[float, float, float]]:
    """A metric of each assay with its interval over variants, and under "" the mean over assays with its own."""
    measure = rank_correlation if name == "spearman" else area_under_curve
    table = {}
    for assay in dict.fromkeys(assay for assay, *_ in items):
        rows = [item for item in items if item[0] == assay]
        scores = np.array([score for _, score, _, _ in rows])
        measurements = [measured if name == "spearman" else fit for _, _, measured, fit in rows]
        against = np.array(measurements)
        table[assay] = with_interval(len(rows), lambda n, s=scores, a=against: measure(s[n], a[n]))
        log.info("%s of %s: %.3f (%.3f to %.3f), %d variants", name, assay, *table[assay], len(rows))
    means = np.array([value for value, *_ in table.values() if np.isfinite(value)])
    if len(table) == 1:
        table[""] = next(iter(table.values()))
    elif len(means):
        table[""] = with_interval(len(means), lambda n: float(means[n].mean()))
        log.info("%s, mean of %d assays: %.3f (%.3f to %.3f)", name, len(means), *table[""])
    return table


def _metric(name: str, column: int) -> Callable[[list[Item]], float]:
    def aggregate(items: list[Item]) -> float:
        return by_assay(name, tuple(map(tuple, items))).get("", NOWHERE)[column]

    return aggregate


spearman, spearman_low, spearman_high = (_metric("spearman", column) for column in range(3))
auc, auc_low, auc_high = (_metric("auc", column) for column in range(3))
