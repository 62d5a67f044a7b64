"""Functions that the task YAMLs name: data sets, texts and metrics.

The perplexities of a text with log-likelihood ll are exp(-ll / words), exp(-ll / bytes) and exp(-ll / tokens), each
summed over documents before dividing. Tokens are counted by the model's tokenizer; in a wrapped task, they are the
scored positions.
"""

from lm_eval_duel.tasks.data import (
    LENGTH,
    documents,
    own_documents,
    own_rows,
    perplexity,
    sotu,
    sotu_choice,
    sotu_full,
    task_files,
    task_folder,
    token_perplexity,
    token_text,
    wrapped,
)

__all__ = [
    "LENGTH",
    "documents",
    "own_documents",
    "own_rows",
    "perplexity",
    "sotu",
    "sotu_choice",
    "sotu_full",
    "task_files",
    "task_folder",
    "token_perplexity",
    "token_text",
    "wrapped",
]
