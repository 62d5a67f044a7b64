"""PC-Sampler: content tokens early, frequent ones late, and positions near the block's start first (Huang et al. 2025).

    score = exp(-decay * position in the block) * min(-P1 log(f + 1e-9), alpha)

with f the frequency of the most probable token in a corpus, 1 / N for tokens that do not occur among its N.

Shapes: R lanes, W block width, T entries of a table.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
from typing import TYPE_CHECKING, Any, ClassVar

from lm_eval_duel.arguments import POSITIVE, number, required
from lm_eval_duel.errors import DuelError
from lm_eval_duel.rules.base import Decision, best
from lm_eval_duel.rules.modules import PATH, signature
from lm_eval_duel.rules.scheduled import STEPS, Scheduled

if TYPE_CHECKING:
    import torch

    from lm_eval_duel.core.lanes import Lanes
    from lm_eval_duel.core.predictions import Predictions

EPS = 1e-9  # inside the authors' logarithm
TOTAL, COUNTS = "num_token", "p_baseline_dict"  # keys of a table, as in the authors' files


@dataclasses.dataclass(frozen=True)
class PC(Scheduled):
    """The positions with the largest exp(-decay x position in the block) x min(-P1 log f, alpha), as many as `quota`.

    f is the corpus frequency of the most probable token (PC-Sampler).

    `table`: a JSON file with the number of tokens of a corpus, and how often each id occurs in it. The command
    `lm-eval-duel tools frequencies` writes one; the authors' files have the same layout.
    """

    name: ClassVar[str] = "pc"
    label: ClassVar[str] = "PC-Sampler"
    reads_step: ClassVar[bool] = True
    decay: float = required(number("a number, at least 0", lambda x: 0 <= x < math.inf), "decay over a block", 0.25)
    alpha: float = required(POSITIVE, "the largest surprise that counts", 10.0)
    steps: int = required(STEPS, "steps of a block", 32)
    table: str = required(PATH, "a JSON file of token frequencies, whose content is in the fingerprint", "table.json")

    def __post_init__(self) -> None:
        super().__post_init__()
        read_table(self.table)

    @property
    def files(self) -> tuple[str, ...]:
        return (self.table,)

    def check_network(self, denoiser: Any) -> None:
        last = max(read_table(self.table)[1], default=0)
        if last >= denoiser.vocab_size:
            raise DuelError(
                f"The table {self.table} of rule pc counts id {last}, and this network has the ids 0 to "
                f"{denoiser.vocab_size - 1}: it was counted with another tokenizer."
            )

    def __call__(self, predictions: Predictions, lanes: Lanes) -> Decision:
        import torch

        count, memory = self.quota(lanes)
        p1 = predictions.confidence.double().sigmoid()  # (R, W)
        known = _surprises(self.table, signature(self.table), str(p1.device))  # (T,)
        argmax = predictions.argmax.clamp(0, len(known) - 1)  # (R, W) -1 where nothing is masked
        surprise = known[argmax]  # (R, W)
        place = torch.arange(argmax.shape[1], device=argmax.device)  # (W,)
        decayed = (-self.decay * place.double()).exp()  # (W,)
        score = decayed * (p1 * surprise).clamp(max=self.alpha)  # (R, W)
        slope = decayed * surprise.abs() * 2 * p1 * (1 - p1)  # (R, W)
        return Decision(*best(predictions, lanes, score, count, slope.clamp(min=1e-12)), memory)


def read_table(path: str) -> tuple[int, dict[int, int]]:
    """The number of tokens that were counted, and the count of each id; raises DuelError for any other file."""
    return _read(path, signature(path))


@functools.lru_cache(maxsize=4)
def _read(path: str, signature: tuple[int, int] | None) -> tuple[int, dict[int, int]]:
    try:
        with open(path, encoding="utf-8") as file:
            entries = json.load(file)
        total, counts = entries[TOTAL], {int(token): count for token, count in entries[COUNTS].items()}
        good = total > 0 and all(token >= 0 and 0 < count <= total for token, count in counts.items())
    except OSError as error:
        raise DuelError(
            f"The table '{path}' of rule pc cannot be read ({error.strerror}); write one with: lm-eval-duel tools "
            "frequencies --tokenizer <name> --tasks <task or text file> --out table.json."
        ) from None
    except (ValueError, KeyError, TypeError, AttributeError):
        good = False
    if not good:
        raise DuelError(
            f'The table {path} of rule pc is a JSON object {{"{TOTAL}": N, "{COUNTS}": {{"id": count, ...}}}} with '
            "counts from 1 to N."
        )
    return total, counts


@functools.lru_cache(maxsize=4)
def _surprises(path: str, signature: tuple[int, int] | None, device: str) -> torch.Tensor:
    """-log(f + 1e-9) of each id up to the table's last one, and then of all ids above it, float64 (T,)."""
    import torch

    total, counts = _read(path, signature)
    plane = torch.full((max(counts, default=-1) + 2,), 1 / total, dtype=torch.float64)  # (T,)
    if counts:
        plane[torch.tensor(list(counts))] = torch.tensor(list(counts.values()), dtype=torch.float64) / total
    return -(plane + EPS).log().to(device)
