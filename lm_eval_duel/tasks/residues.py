"""Proteins: one letter a residue, and perplexities per residue.

The bits per residue of proteins with log-likelihood ll are -ll / (residues ln 2), summed over all proteins before
dividing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lm_eval_duel.errors import DuelError
from lm_eval_duel.tasks.bundled import bundled
from lm_eval_duel.tasks.metrics import Answer, log_likelihood

if TYPE_CHECKING:
    import datasets

# the 20 amino acids, the rare O and U, and the placeholders B, X and Z; ESM-2 has no J and reads it as <unk>
LETTERS = frozenset("ACDEFGHIKLMNPQRSTVWY" + "OU" + "BXZ")


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
    return type(data).from_list([{**doc, "text": _checked(doc["text"], n)} for n, doc in enumerate(data)])


def _checked(text: Any, index: int) -> str:
    if not isinstance(text, str):
        raise DuelError(f"Protein {index} is {text!r}, not text with a letter for each residue.")
    text = "".join(text.split())
    if wrong := sorted(set(text) - LETTERS):
        advice = "write residues in upper case" if set(text.upper()) <= LETTERS else "remove or replace them"
        raise DuelError(
            f"Protein {index} has {', '.join(map(repr, wrong))}, which are not letters of residues "
            f"({''.join(sorted(LETTERS))}): {advice}."
        )
    return text


def residue_perplexity(doc: dict[str, Any], results: list[Answer]) -> dict[str, tuple[float, int]]:
    """(log-likelihood, residues) of a protein, for each metric. A residue is one byte: bits per byte are the same."""
    value = log_likelihood(results), len(doc["text"])
    return dict.fromkeys(("bits_per_residue", "residue_perplexity", "bits_per_byte"), value)
