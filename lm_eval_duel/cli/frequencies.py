"""`lm-eval-duel tools frequencies`: how often each token occurs in a text, as a table for the rule `pc`."""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from lm_eval_duel.command_line import Parser, file_to_write
from lm_eval_duel.errors import DuelError, usage
from lm_eval_duel.rules.pc import COUNTS, TOTAL
from lm_eval_duel.tasks import own_text

PRINTS = """\
Prints how many tokens were counted.
Writes a JSON file with the number of tokens and the count of each id, which the rule pc reads (table=FILE).
"""


def count_tokens(texts: Iterable[str], tokenizer: Any) -> dict[str, Any]:
    """The table of some texts, as the rule `pc` reads it. Raises DuelError if they have no tokens."""
    counts: Counter[int] = Counter()
    for text in texts:
        counts.update(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])
    if not counts:
        raise DuelError("The text has no tokens, so there are no frequencies; name another --file or --task.")
    return {TOTAL: counts.total(), COUNTS: {str(token): count for token, count in sorted(counts.items())}}


def texts_of_task(name: str) -> Iterator[str]:
    """The texts that a task of the harness scores: the last argument of each request."""
    from lm_eval_duel.tasks import named

    task = named.load(name, {})
    if task.OUTPUT_TYPE == "generate_until":
        raise DuelError(f"The task {name} generates text, so there is none to count; name another --task, or a --file.")
    task.build_all_requests()
    for request in task.instances:
        yield str(request.args[-1])


@usage()
def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The parsed command line; raises UsageError for wrong arguments."""
    parser = Parser(
        "tools frequencies",
        "Count how often each token occurs in a text, for the rule pc.",
        PRINTS,
        "--tokenizer demo-mdm --task sotu --out frequencies.json",
    )
    parser.add_argument("--tokenizer", required=True, metavar="NAME", help="a folder, a hub name or a bundled name")
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--file", metavar="FILE", help="a text file, or .jsonl, .json or .parquet with a column text")
    source.add_argument("--task", metavar="TASK", help="a task of the harness or of this package")
    parser.add_argument("--out", required=True, metavar="FILE", help="the JSON file to write")
    options = parser.parse_args(list(arguments))
    file_to_write("--out", options.out)
    if options.file not in (None, own_text.STDIN):
        own_text.find([options.file])
    return options


def main(arguments: Sequence[str]) -> None:
    """Write a table of token frequencies: `lm-eval-duel tools frequencies`."""
    options = parse(arguments)
    from lm_eval_duel import denoisers

    tokenizer = denoisers.load_tokenizer({"tokenizer": options.tokenizer})
    texts = texts_of_task(options.task) if options.task else (text for _, text in own_text.texts([options.file]))
    table = count_tokens(texts, tokenizer)
    Path(options.out).write_text(json.dumps(table) + "\n", encoding="utf-8")
    print(f"{table[TOTAL]:,} tokens, {len(table[COUNTS]):,} different ones, written to {options.out}")
