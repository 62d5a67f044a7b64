"""The network compared with the checkpoint's own class: log-probabilities at masked positions of a few random rows.

Ours go the way of a run: a view, rows of different lengths in one call if the network may see padding. Theirs are whole
rows, one at a time, by the forward of the authors' code (or of a class of transformers). What both share is which row a
block sees, and where a shifted prediction is read.

Shapes: L row length, C masked positions, V tokens.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from lm_eval_duel.audit.networks import OneRow
from lm_eval_duel.core.denoiser import Denoiser
from lm_eval_duel.core.lanes import Lanes, Rows, blocks
from lm_eval_duel.core.windows import Window
from lm_eval_duel.demo import BUNDLED
from lm_eval_duel.denoisers.hf.own_code import load_own_class
from lm_eval_duel.denoisers.self_tests import random_rows
from lm_eval_duel.denoisers.wrappers import Wrapper
from lm_eval_duel.errors import first_line
from lm_eval_duel.options import Options

log = logging.getLogger("lm_eval.duel_mdm")

LENGTH = 128  # positions of the longest row
TOLERANCE = {8: 1e-6, 4: 1e-3, 2: 0.5}  # nats, by the size of a number of the network in bytes
DECODERS = ("ForCausalLM", "LMHeadModel")  # classes of transformers that are causal unless a mask says otherwise


class Compared(NamedTuple):
    """The comparison of a network with another class of it."""

    name: str  # of that class
    rows: int
    positions: int
    difference: float  # the largest of all log-probabilities, nats
    tolerance: float

    @property
    def differs(self) -> bool:
        """True if float noise does not explain the difference."""
        return not self.difference <= self.tolerance

    def __str__(self) -> str:
        return (
            f"network: {'DIFFERS from' if self.differs else 'equals'} {self.name} at {self.positions} masked positions "
            f"of {self.rows} rows: largest difference of a log-probability {self.difference:.2g} nats (tolerance "
            f"{self.tolerance:g})"
        )


def compare(options: Options, denoiser: Denoiser, device: str | None) -> Compared | str:
    """The comparison of a network; the reason if there is nothing to compare with, or that does not run."""
    while isinstance(denoiser, Wrapper):
        denoiser = denoiser.plain
    if type(getattr(denoiser, "model", None)).__module__.startswith("transformers_modules"):
        return "the run itself has the network of the checkpoint's own code"
    try:
        with theirs():
            model = load_own_class(options.pretrained or BUNDLED, device, options.network)
        with torch.inference_mode():
            return difference(denoiser, model)
    except NotRun as error:
        return str(error)


class NotRun(Exception):
    """The code of others raised an error, of which this is the text."""


@contextlib.contextmanager
def theirs() -> Iterator[None]:
    """Raise NotRun for whatever the code of others raises in here."""
    try:
        yield
    except Exception as error:
        log.debug("the checkpoint's own class", exc_info=True)
        raise NotRun(first_line(error).rstrip(".")) from error


def difference(denoiser: Denoiser, model: Any) -> Compared:
    """The largest difference at the masked positions of some rows with context, suffix and padding."""
    windows = rows_of(denoiser)
    together = [windows] if denoiser.honours_padding else [[window] for window in windows]
    largest, count, kept = 0.0, 0, ~denoiser.excluded
    grid = denoiser.anchor if denoiser.attention == "block_causal" else "target"
    block = 1 if denoiser.attention == "causal" else denoiser.block
    for part in together:
        rows = Rows.from_windows(part, denoiser.device)
        spans = [
            (row, *span)
            for row, window in enumerate(part)
            for span in blocks(len(window.context), len(window.target), block, grid)
        ]
        lanes = Lanes.fresh(rows, *torch.tensor(spans, device=denoiser.device).unbind(1))
        chosen = torch.rand(lanes.masked.shape, generator=torch.Generator().manual_seed(0)) < 0.5  # (R, W)
        chosen = lanes.masked & chosen.to(denoiser.device)
        masked = torch.where(chosen.any(1, keepdim=True), chosen, lanes.masked)
        lanes = lanes.show(rows.targets(lanes), masked)
        ours = denoiser.open(rows)(lanes).dense().split(masked.sum(1).tolist())  # (C, V) of each lane
        for lane, values in enumerate(ours):
            row = OwnRow(model, denoiser, part[int(lanes.row[lane])], block, grid)
            columns = lanes.columns[lane][masked[lane]]  # (C,)
            theirs = row(row.state(columns.tolist(), int(lanes.start[lane] + lanes.width[lane])))[columns]
            deviation = values[:, kept].double() - theirs[:, kept].log_softmax(1)
            largest, count = max(largest, float(deviation.abs().nan_to_num(nan=torch.inf).max())), count + len(columns)
    size = next(model.parameters()).dtype.itemsize
    return Compared(type(model).__name__, len(windows), count, largest, TOLERANCE[size])


def rows_of(denoiser: Denoiser) -> list[Window]:
    """Rows of random tokens: a long one, a shorter one, and one with a suffix if such is seen."""
    length = min(LENGTH, denoiser.max_length)
    long, short, framed = random_rows(denoiser, length, rows=3).tolist()
    quarter, half = max(1, length // 4), max(2, length // 2)
    windows = [Window(long[:quarter], long[quarter:]), Window(short[:1], short[1:half])]
    if denoiser.attention == "bidirectional" and length > 8:
        windows.append(Window(framed[:quarter], framed[quarter:half], framed[half : half + quarter]))
    return windows


class OwnRow(OneRow):
    """One window under the forward of another class of the network."""

    def __init__(self, model: Any, denoiser: Denoiser, window: Window, block: int | None, grid: str):
        super().__init__(denoiser, window, block, grid)
        self.model, self.relative_positions = model, False

    def state(self, masked: list[int], end: int) -> torch.Tensor:
        """The row (L,) with these columns masked, and all target positions from `end` on."""
        hidden = {*masked, *range(end, self.end)}
        return torch.tensor([self.m if column in hidden else token for column, token in enumerate(self.x)])

    def features(self, denoiser: Denoiser, shown: torch.Tensor, begin: int) -> torch.Tensor:
        """The logits (L, V) of the row."""
        column = torch.arange(len(shown), device=shown.device)
        seen = self.seen(denoiser, column, begin)
        more: dict[str, torch.Tensor] = {}
        if seen is not None:
            dtype = next(self.model.parameters()).dtype
            none = torch.zeros(seen.shape, dtype=dtype, device=shown.device)
            more["attention_mask"] = none.masked_fill(~seen, torch.finfo(dtype).min)[None, None]
            more["position_ids"] = column[None]
        with theirs():
            out = self.model(input_ids=shown[None], **more)
        return (out if isinstance(out, torch.Tensor) else out[0] if isinstance(out, tuple) else out.logits)[0]

    def head(self, denoiser: Denoiser, features: torch.Tensor) -> torch.Tensor:
        return features[:, : self.denoiser.vocab_size]

    def seen(self, denoiser: Denoiser, column: torch.Tensor, begin: int) -> torch.Tensor | None:
        """The columns that each column attends to, (L, L) bool; None if the class knows by itself."""
        if denoiser.by_blocks:
            return self.attended(denoiser, column, begin)
        native = type(self.model).__module__.startswith("transformers.")
        if denoiser.attention == "bidirectional" and native and type(self.model).__name__.endswith(DECODERS):
            return torch.ones(len(column), len(column), dtype=torch.bool, device=column.device)
        return None
