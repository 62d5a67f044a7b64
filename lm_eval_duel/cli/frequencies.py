"""`lm-eval-duel tools frequencies`: how often each token occurs in a text, as a table for the rule `pc`."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from lm_eval_duel.arguments import MISSING
from lm_eval_duel.command_line import FILE, FLAGS, Parser
from lm_eval_duel.errors import DuelError, usage
from lm_eval_duel.rules.pc import COUNTS, TOTAL

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
        raise DuelError("The text has no tokens, so there are no frequencies; name other --tasks.")
    return {TOTAL: counts.total(), COUNTS: {str(token): count for token, count in sorted(counts.items())}}


def main(arguments: Sequence[str]) -> None:
    """Write a table of token frequencies: `lm-eval-duel tools frequencies`."""
    options = Parser(
        "tools frequencies",
        "Count how often each token occurs in a text, for the rule pc.",
        PRINTS,
        "--tokenizer demo-mdm --tasks sotu --out frequencies.json",
        *("tasks", "include_path", "metadata"),
        tokenizer=dataclasses.replace(FLAGS["tokenizer"], default=MISSING),
        out=dataclasses.replace(FLAGS["out"], kind=FILE, help="the file to write", shows="FILE"),
    ).parse_args(arguments)
    from lm_eval_duel.tasks import named

    with usage():
        for name in options.tasks:
            named.check(name, options.include_path)
    from lm_eval_duel import denoisers

    tokenizer = denoisers.load_tokenizer({"tokenizer": options.tokenizer})
    metadata = {"tokenizer": options.tokenizer, **options.metadata}
    requests = named.requests(options.tasks, metadata, options.include_path)
    table = count_tokens((str(request.args[-1]) for request in requests), tokenizer)
    Path(options.out).write_text(json.dumps(table) + "\n", encoding="utf-8")
    print(f"{table[TOTAL]:,} tokens, {len(table[COUNTS]):,} different ones, written to {options.out}")
