"""PC-Sampler as a rule: content tokens early, frequent ones late, and positions near the block's start first.

    score = exp(-decay * position in the block) * min(-P1 log(f + 1e-9), alpha)

f is the frequency of the most probable token in a corpus, 1 / N if it does not occur among the N tokens (Huang et al.
2025). Each step reveals the positions with the largest scores, as many as the rule `quota`. Count a corpus, then score:

    python examples/rules/pc.py --tokenizer demo-mdm --tasks sotu --out frequencies.json
    lm-eval-duel run demo-mdm --tasks sotu --limit 2 \
        --model_args rule=examples/rules/pc.py:PC:decay=0.25:alpha=10:steps=32:table=frequencies.json,block=32

Shapes: R lanes, W block width, T entries of a table.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from lm_eval_duel.core.lanes import Lanes
from lm_eval_duel.core.predictions import Predictions
from lm_eval_duel.denoisers import load_tokenizer
from lm_eval_duel.errors import DuelError
from lm_eval_duel.rules import Decision
from lm_eval_duel.rules.base import best, file_version
from lm_eval_duel.rules.scheduled import Scheduled
from lm_eval_duel.tasks import named

# Keys of a table, as in the authors' files
TOTAL = "num_token"
COUNTS = "p_baseline_dict"


@dataclasses.dataclass(frozen=True)
class PC(Scheduled):
    """The positions with the largest exp(-decay x position in the block) x min(-P1 log f, alpha), as many as `quota`.

    `table`: a JSON file with the number of tokens of a corpus and the count of each id. Its content is in the
    fingerprint, because `files` names it.
    """

    reads_step = True
    decay: float
    alpha: float
    steps: int
    table: str

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.decay < 0 or self.alpha <= 0 or self.steps < 1:
            raise DuelError(f"PC needs decay >= 0, alpha > 0 and steps >= 1; got {self}.")
        read_table(self.table, file_version(self.table))

    @property
    def files(self) -> tuple[str, ...]:
        return (self.table,)

    def check_network(self, denoiser: Any) -> None:
        _, counts = read_table(self.table, file_version(self.table))
        last = max(counts, default=0)
        if last >= denoiser.vocab_size:
            raise DuelError(
                f"{self.table} counts id {last}, and the network has {denoiser.vocab_size}: count it again."
            )

    def __call__(self, predictions: Predictions, lanes: Lanes) -> Decision:
        count, memory = self.quota(lanes)
        p1 = predictions.confidence.double().sigmoid()  # (R, W)
        by_token = surprises(self.table, file_version(self.table), str(p1.device))  # (T,)
        surprise = by_token[predictions.argmax.clamp(0, len(by_token) - 1)]  # (R, W)
        position = torch.arange(p1.shape[1], device=p1.device)  # (W,)
        decayed = (-self.decay * position.double()).exp()  # (W,)
        score = decayed * (p1 * surprise).clamp(max=self.alpha)  # (R, W)
        slope = decayed * surprise.abs() * 2 * p1 * (1 - p1)  # (R, W) of the score in the logits, for near ties
        return Decision(*best(predictions, lanes, score, count, slope.clamp(min=1e-12)), memory)


@functools.lru_cache(maxsize=4)
def read_table(path: str, version: tuple[int, int] | None) -> tuple[int, dict[int, int]]:
    """The number of tokens that were counted, and the count of each id; `version` changes with the file."""
    try:
        entries = json.loads(Path(path).read_text(encoding="utf-8"))
        counts = {int(token): count for token, count in entries[COUNTS].items()}
        return entries[TOTAL], counts
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise DuelError(f"The table '{path}' cannot be read ({error!r}); see {Path(__file__).name} --help.") from None


@functools.lru_cache(maxsize=4)
def surprises(path: str, version: tuple[int, int] | None, device: str) -> torch.Tensor:
    """-log(f + 1e-9) of each id up to the table's last one, and then of all ids above it, float64 (T,)."""
    total, counts = read_table(path, version)
    plane = torch.full((max(counts, default=-1) + 2,), 1 / total, dtype=torch.float64)  # (T,)
    for token, count in counts.items():
        plane[token] = count / total
    return -(plane + 1e-9).log().to(device)


def main(arguments: Sequence[str] | None = None) -> None:
    """Count how often each token occurs in the texts of tasks, or in files of text."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--tokenizer", required=True, help="a folder, a hub name, or a bundled model")
    parser.add_argument(
        "--tasks", required=True, nargs="+", help="names of tasks, or files of text (.txt, .jsonl, ...)"
    )
    parser.add_argument("--out", required=True, help="the file to write")
    options = parser.parse_args(arguments)
    tokenizer = load_tokenizer({"tokenizer": options.tokenizer})
    counts = Counter()
    for task in named.load(options.tasks, {"tokenizer": options.tokenizer}):
        for request in task.instances:
            text = str(request.args[-1])
            counts.update(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])
    table = {TOTAL: counts.total(), COUNTS: {str(token): count for token, count in sorted(counts.items())}}
    Path(options.out).write_text(json.dumps(table) + "\n", encoding="utf-8")
    print(f"{counts.total():,} tokens, {len(counts):,} different ones, written to {options.out}")


if __name__ == "__main__":
    main()
