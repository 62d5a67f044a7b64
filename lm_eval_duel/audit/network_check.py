"""The network of a run compared with other programs for it, and its weights with the files.

    own code       the forward of the authors' code, or of a class of transformers, in the run's dtype
    plain          the forward written out in `plain_networks.py`, in float64, on the tensors of the files
    weights        the numbers that the network holds, beside those of the files

Our network is called as in a run: through a view, with rows of different lengths in one call if it may see padding. The
other programs get whole rows, one at a time. Both share which row a block sees, where a shifted prediction is read, and
what docs/audit.md lists.

Shapes: L row length, C masked positions, V tokens.
"""

from __future__ import annotations

import abc
import contextlib
import copy
import hashlib
import inspect
import logging
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch

from lm_eval_duel.audit import plain_networks as plain
from lm_eval_duel.audit.networks import OneRow
from lm_eval_duel.audit.weight_files import Files, Unknown, WithoutPrefix, first, read_config, weights_in
from lm_eval_duel.core.denoiser import Denoiser
from lm_eval_duel.core.float_noise import nats_tolerance, random_rows
from lm_eval_duel.core.lanes import Lanes, Rows, blocks
from lm_eval_duel.core.windows import Window
from lm_eval_duel.demo import BUNDLED, resolve
from lm_eval_duel.denoisers import hub
from lm_eval_duel.denoisers.dit.denoiser import DiTDenoiser
from lm_eval_duel.denoisers.hf.decoder import Decoder
from lm_eval_duel.denoisers.hf.own_code import load_own_class
from lm_eval_duel.denoisers.wrappers import Wrapper
from lm_eval_duel.errors import first_line
from lm_eval_duel.options import Options

log = logging.getLogger("lm_eval.duel_mdm")

LENGTH = 128  # positions of the longest row
# How far single log-probabilities, and their sum over the tokens of a row, may be apart, in nats. On a CPU, in float32,
# from a forward in float64: log-probabilities of random tokens by up to 3.7e-5, and sums by 9.4e-5 with a standard
# deviation of 3e-5 (three checkpoints, 25 draws of rows, kernels with AVX-512 and AVX2). So a sum may be twice
# `nats_tolerance` apart, which is made for two calls of one network. In float64, decoders still differ by up to 1.5e-6:
# transformers keeps its rotary tables in float32. On another device, or in half precision, at least:
OTHER_DEVICE = 1e-3  # other kernels, which may multiply in another order
HALF = 0.5  # bfloat16 without experts moves log-probabilities by at most 0.24 on a CPU, and sums by 0.12
DECODERS = ("ForCausalLM", "LMHeadModel")  # classes of transformers that are causal unless a mask says otherwise
CHANGED = ("peft", "load_in_8bit", "load_in_4bit")  # model args with which the network is not that of the files
TIMES = (0.1, 0.5, 0.9)  # at which rows of random tokens are compared
HELD = 0.5  # of the numbers in the files, at least: others are joined, split or turned into new tensors


class Compared(NamedTuple):
    """The comparison of a network with another program for it."""

    name: str  # of that program
    rows: int
    positions: int
    difference: float  # the largest of all log-probabilities, nats
    in_a_row: float  # the largest of a row's sum: the log-probabilities of its own tokens, nats
    tolerance: float  # of one log-probability
    row_tolerance: float

    @property
    def what(self) -> str:
        """The comparison, as text."""
        return f"the network with {self.name}"

    @property
    def differs(self) -> bool:
        """True if float noise does not explain the difference."""
        return not (self.difference <= self.tolerance and self.in_a_row <= self.row_tolerance)

    def __str__(self) -> str:
        verdict = "DIFFERS from" if self.differs else "equals"
        return (
            f"network {verdict} {self.name} at {self.positions} positions of {self.rows} rows: largest "
            f"difference of a log-probability {self.difference:.2g} nats (tolerance {self.tolerance:g}), and of the "
            f"sum of a row {self.in_a_row:.2g} (tolerance {self.row_tolerance:g})"
        )


class Weights(NamedTuple):
    """The numbers of the files that the network holds, bit by bit."""

    held: int
    all: int
    what: str = "the weights with the files"

    @property
    def differs(self) -> bool:
        """True if the network holds other numbers than the files."""
        return self.held < HELD * self.all

    def __str__(self) -> str:
        verdict = "DIFFER from" if self.differs else "equal"
        return (
            f"weights {verdict} those of the files: the network holds {self.held:,} of their {self.all:,} numbers, bit "
            "by bit"
        )


Finding: TypeAlias = Compared | Weights
Forward: TypeAlias = Callable[[Sequence[int], torch.Tensor | None, float], torch.Tensor]  # ids, seen, noise level


def compare(options: Options, denoiser: Denoiser, device: str | None) -> tuple[list[Finding], list[str]]:
    """The comparisons of a network, and the reasons that others are missing."""
    while isinstance(denoiser, Wrapper):
        denoiser = denoiser.plain
    denoiser = copy.copy(denoiser)
    denoiser.filters = ()  # other programs for the network have no temperature and no top_k
    checks: dict[str, Callable[[Options, Denoiser, str | None], Finding]] = {
        "own code": _own_code,
        "written out": _plain,
        "weights": _weights,
    }
    findings: list[Finding] = []
    reasons = []
    for name, check in checks.items():
        try:
            with torch.inference_mode():
                findings.append(check(options, denoiser, device))
        except (NotRun, Unknown) as error:
            reasons.append(f"{name}: {error}")
    return findings, reasons


def _own_code(options: Options, denoiser: Denoiser, device: str | None) -> Compared:
    """The comparison with the checkpoint's own class."""
    model_class = type(getattr(denoiser, "model", None))
    if model_class.__module__.startswith("transformers_modules"):
        raise NotRun("the run itself has the network of the checkpoint's own code")
    with foreign_code():
        model = load_own_class(options.pretrained or BUNDLED, device, options.network)
    deviations = compared_rows(denoiser, lambda *row: OwnRow(model, *row))
    is_half = next(model.parameters()).dtype.itemsize < 4
    return deviations.compared(type(model).__name__, denoiser, is_half)


def _plain(options: Options, denoiser: Denoiser, device: str | None) -> Compared:
    """The comparison with the network written out, in float64, on the tensors of the files."""
    folder = _folder(options)
    files = Files(folder)
    config = read_config(folder)
    if isinstance(denoiser, DiTDenoiser):
        w = WithoutPrefix(files, "backbone.")
        entries = {**config, **config.get("model", {})}  # SEDD has its sizes in a section
        heads = first(entries, "n_heads", "num_attention_heads")

        def forward(ids: Sequence[int], seen: torch.Tensor | None, level: float) -> torch.Tensor:
            return plain.dit(w, ids, heads, level, seen)

        name = "the DiT written out in float64"
    elif isinstance(denoiser, Decoder):
        net = plain.decoder_of(config, files, denoiser.block)

        def forward(ids: Sequence[int], seen: torch.Tensor | None, level: float) -> torch.Tensor:
            return plain.logits(net, files, ids, seen)

        name = "the decoder written out in float64"
    else:
        raise Unknown(f"there is no other program for {type(denoiser).__name__} here")

    if denoiser.noise_training is not None:
        deviations = noised_rows(denoiser, forward)
    else:
        deviations = compared_rows(denoiser, lambda *row: PlainRow(forward, *row))
    # A tensor that was never read may belong to a network that is not the one written out.
    for key in weights_in(files):
        if key not in files.used:
            raise Unknown(f"the network written out reads no {key}, which the files hold")
    return deviations.compared(name, denoiser)


def _weights(options: Options, denoiser: Denoiser, device: str | None) -> Weights:
    """The numbers of the files among those of the network, by digests of whole tensors."""
    files = Files(_folder(options))
    module = getattr(denoiser, "model", None) or getattr(denoiser, "network", None)
    if not isinstance(module, torch.nn.Module):
        raise NotRun("the network has no module")
    held: set[bytes] = set()
    for tensor in module.state_dict().values():
        held.update(_digests(tensor))

    count = 0
    count_held = 0
    for key in weights_in(files):
        tensor = files[key]
        if not tensor.is_floating_point():
            continue
        count += tensor.numel()
        whole = next(_digests(tensor))
        if whole in held:
            count_held += tensor.numel()
    return Weights(count_held, count)


def _digests(tensor: torch.Tensor) -> Iterator[bytes]:
    """The digests of a tensor in float32, and of the parts of one that joins those of all experts."""
    if not tensor.is_floating_point():
        return
    parts = [tensor]
    if tensor.dim() == 3:  # of all experts; gate and up of each may be joined as well
        for expert in tensor:
            parts += [expert, *expert.chunk(2)]
    for part in parts:
        numbers = part.detach().float().cpu().contiguous().numpy()
        yield hashlib.sha256(numbers.tobytes()).digest()


def _folder(options: Options) -> str:
    """The local folder of a checkpoint whose network is that of its files."""
    for argument in CHANGED:
        if options.network.get(argument):
            raise NotRun(f"{argument} changes the network")
    name = resolve(options.pretrained or BUNDLED)
    revision = options.network.get("revision") or "main"
    with foreign_code():
        return hub.local_folder(name, revision)


class NotRun(Exception):
    """Raised for a comparison that cannot be made; the text says why."""


@contextlib.contextmanager
def foreign_code() -> Iterator[None]:
    """Raise NotRun for whatever the code of others raises in here."""
    try:
        yield
    except Exception as error:
        log.debug("the checkpoint's own class", exc_info=True)
        raise NotRun(first_line(error).rstrip(".")) from error


class Deviations:
    """Differences of the log-probabilities of two programs, in nats."""

    def __init__(self) -> None:
        self.largest = 0.0
        self.of_tokens: dict[int, list[float]] = {}  # of each row: the deviations of its own tokens

    def add(
        self,
        row: int,
        ours: torch.Tensor,
        theirs: torch.Tensor,
        tokens: torch.Tensor,
    ) -> None:
        """Add the log-probabilities (C, V) at positions of a row that hold `tokens` (C,)."""
        ours = ours.double()
        theirs = theirs.double().to(ours.device)
        both_impossible = (ours == -math.inf) & (theirs == -math.inf)
        deviation = (ours - theirs).masked_fill(both_impossible, 0.0)  # (C, V)
        deviation = deviation.nan_to_num(nan=math.inf)  # a NaN must not hide: the maximum would skip it
        self.largest = max(self.largest, float(deviation.abs().max()))

        at = tokens.to(ours.device)[:, None]  # (C, 1)
        of_tokens = deviation.gather(1, at)[:, 0]  # (C,)
        self.of_tokens.setdefault(row, []).extend(of_tokens.tolist())

    def compared(self, name: str, denoiser: Denoiser, is_half: bool = False) -> Compared:
        """The comparison with the program `name`."""
        sums = []
        positions = []
        for of_row in self.of_tokens.values():
            sums.append(abs(math.fsum(of_row)))
            positions.append(len(of_row))

        least = 0.0
        if is_half:
            least = HALF
        elif denoiser.device.type != "cpu":
            least = OTHER_DEVICE
        return Compared(
            name,
            rows=len(sums),
            positions=sum(positions),
            difference=self.largest,
            in_a_row=max(sums),
            tolerance=max(least, nats_tolerance(1)),
            row_tolerance=max(least, 2 * nats_tolerance(min(positions))),
        )


def compared_rows(
    denoiser: Denoiser, open_row: Callable[[Denoiser, Window, int | None, str], OtherProgram]
) -> Deviations:
    """The deviations at the masked positions of some rows with context, suffix and padding."""
    deviations = Deviations()
    windows = rows_of(denoiser)
    # Rows of different lengths share a call where the network may see padding.
    calls = [windows] if denoiser.honours_padding else [[window] for window in windows]
    grid = denoiser.anchor if denoiser.attention == "block_causal" else "target"
    block = 1 if denoiser.attention == "causal" else denoiser.block
    for call in calls:
        rows = Rows.from_windows(call, denoiser.device)
        lanes = half_revealed(rows, call, block, grid)
        predictions = denoiser.open(rows)(lanes)
        counts = lanes.masked.sum(1).tolist()
        ours = predictions.dense().split(counts)  # (C, V) of each lane

        for lane, values in enumerate(ours):
            window = call[int(lanes.row[lane])]
            other = open_row(denoiser, window, block, grid)
            columns = lanes.columns[lane][lanes.masked[lane]]  # (C,)
            end = int(lanes.start[lane] + lanes.width[lane])
            state = other.state(columns.tolist(), end)
            logits = other(state)[columns]  # (C, V)
            excluded = denoiser.excluded.to(logits.device)
            theirs = logits.masked_fill(excluded, -math.inf).log_softmax(1)
            tokens = torch.tensor(other.x)[columns.cpu()]  # (C,)
            deviations.add(windows.index(window), values, theirs, tokens)
    return deviations


def half_revealed(rows: Rows, windows: Sequence[Window], block: int | None, grid: str) -> Lanes:
    """Lanes of all blocks of the windows of `rows`, with about half of the positions of each block masked."""
    device = rows.ids.device
    spans = []
    for row, window in enumerate(windows):
        for span in blocks(len(window.context), len(window.target), block, grid):
            spans.append((row, *span))
    lanes = Lanes.fresh(rows, *torch.tensor(spans, device=device).unbind(1))

    generator = torch.Generator().manual_seed(0)
    coin = torch.rand(lanes.masked.shape, generator=generator) < 0.5  # (R, W)
    half = lanes.masked & coin.to(device)
    masked = torch.where(half.any(1, keepdim=True), half, lanes.masked)  # all of a block where none would be
    return lanes.show(rows.targets(lanes), masked)


def noised_rows(denoiser: Denoiser, forward: Forward) -> Deviations:
    """The deviations of a network that sees random tokens, at all positions of some rows, each at its own time."""
    deviations = Deviations()
    rows = random_rows(denoiser, min(LENGTH, denoiser.max_length), rows=len(TIMES))  # (R, L)
    times = torch.tensor(TIMES, dtype=torch.float64, device=denoiser.device)  # (R,)
    features = denoiser.features(rows, None, **denoiser.noise_inputs(times))  # (R, L, D)
    ours = denoiser.head(features.flatten(0, 1)).unflatten(0, rows.shape).double()  # (R, L, V)
    columns = ours.shape[2]
    for n, (row, t, logits) in enumerate(zip(rows, TIMES, ours, strict=True)):
        level = noise_level(denoiser, t)
        theirs = forward(row.tolist(), None, level)[:, :columns].to(logits.device)  # (L, V)
        both = torch.stack([logits, theirs])  # (2, L, V)
        both = both.masked_fill(denoiser.excluded, -math.inf).log_softmax(2)
        deviations.add(n, both[0], both[1], row)
    return deviations


def noise_level(denoiser: Denoiser, t: float) -> float:
    """The noise level that a network of a family is given at time t, or where a share t is masked."""
    if denoiser.family in ("duo", "udlm"):  # -log(alpha), within the levels of training
        return -math.log(min(max(1 - t, 1e-3), 1 - 1e-3))
    if denoiser.family.startswith("gidd"):
        margin = float(denoiser.t_eps)  # type: ignore[attr-defined]  # an entry of config.json
        return min(max(t, margin), 1 - margin)
    if denoiser.family == "sedd":
        if getattr(denoiser, "sigma", "") == "schedule":
            return -math.log(1 - (1 - 1e-3) * t)
        return -math.log(1 - min(max(t, 0.1), 0.9))  # the clamp of the authors' evaluation
    return 0.0


def rows_of(denoiser: Denoiser) -> list[Window]:
    """Rows of random tokens: a long one, a shorter one, and one with a suffix if such is seen."""
    length = min(LENGTH, denoiser.max_length)
    long, short, framed = random_rows(denoiser, length, rows=3).tolist()
    quarter = max(1, length // 4)
    half = max(2, length // 2)
    windows = [
        Window(long[:quarter], long[quarter:]),
        Window(short[:1], short[1:half]),
    ]
    if denoiser.attention == "bidirectional" and length > 8:
        suffix = framed[half : half + quarter]
        windows.append(Window(framed[:quarter], framed[quarter:half], suffix))
    return windows


class OtherProgram(OneRow, abc.ABC):
    """One window under another program for the network. Subclasses implement `forward`."""

    def __init__(
        self,
        denoiser: Denoiser,
        window: Window,
        block: int | None,
        grid: str,
    ):
        super().__init__(denoiser, window, block, grid)
        self.relative_positions = False

    @abc.abstractmethod
    def forward(self, shown: torch.Tensor, seen: torch.Tensor | None) -> torch.Tensor:
        """The logits (L, V) of the row `shown` (L,); `seen` (L, L): the columns that each attends to, None: all."""

    def state(self, masked: list[int], end: int) -> torch.Tensor:
        """The row (L,) with these columns masked, and all target positions from `end` on."""
        row = list(self.x)
        for column in (*masked, *range(end, self.end)):
            row[column] = self.m
        return torch.tensor(row)

    def features(self, denoiser: Denoiser, shown: torch.Tensor, begin: int) -> torch.Tensor:
        """The logits (L, V) of the row."""
        column = torch.arange(len(shown), device=shown.device)
        return self.forward(shown, self.seen(denoiser, column, begin))

    def head(self, denoiser: Denoiser, features: torch.Tensor) -> torch.Tensor:
        return features[:, : self.denoiser.vocab_size]

    def seen(self, denoiser: Denoiser, column: torch.Tensor, begin: int) -> torch.Tensor | None:
        """The columns that each column attends to, (L, L) bool; None if the program knows by itself."""
        if not denoiser.by_blocks:
            return None
        return self.attended(denoiser, column, begin)


class OwnRow(OtherProgram):
    """One window under the forward of another class of the network."""

    def __init__(
        self,
        model: Any,
        *window: Any,
    ):
        super().__init__(*window)
        self.model = model

    def forward(self, shown: torch.Tensor, seen: torch.Tensor | None) -> torch.Tensor:
        arguments: dict[str, Any] = {"input_ids": shown[None]}
        takes = inspect.signature(getattr(self.model, "forward", self.model)).parameters
        if "timesteps" in takes:  # the DiT of MDLM and BD3-LM, which ignores the values
            arguments["timesteps"] = torch.zeros(1, device=shown.device)
            if "sample_mode" in takes and seen is not None:  # block-causal; it makes its own mask
                arguments["sample_mode"] = True
        elif seen is not None:
            dtype = next(self.model.parameters()).dtype
            mask = torch.zeros(seen.shape, dtype=dtype, device=shown.device)  # (L, L)
            mask = mask.masked_fill(~seen, torch.finfo(dtype).min)
            arguments["attention_mask"] = mask[None, None]
            arguments["position_ids"] = torch.arange(len(shown), device=shown.device)[None]

        with foreign_code():
            out = self.model(**arguments)
        if not isinstance(out, torch.Tensor | tuple):
            out = out.logits
        logits: torch.Tensor = out[0] if isinstance(out, tuple) else out  # (1, L, V)
        return logits[0]

    def seen(self, denoiser: Denoiser, column: torch.Tensor, begin: int) -> torch.Tensor | None:
        model_class = type(self.model)
        native = model_class.__module__.startswith("transformers.")
        is_causal = native and model_class.__name__.endswith(DECODERS)  # unless a mask says otherwise
        if denoiser.attention == "bidirectional" and is_causal:
            return torch.ones(len(column), len(column), dtype=torch.bool, device=column.device)
        return super().seen(denoiser, column, begin)


class PlainRow(OtherProgram):
    """One window under a network written out in float64: `written(ids, seen, noise level)`, on the CPU."""

    def __init__(
        self,
        written: Forward,
        *window: Any,
    ):
        super().__init__(*window)
        self.written = written

    def forward(self, shown: torch.Tensor, seen: torch.Tensor | None) -> torch.Tensor:
        counted = len(shown)
        if self.denoiser.bos == "official":  # context and suffix do not count
            counted -= self.origin + self.suffix
        masked = int((shown == self.m).sum())
        level = noise_level(self.denoiser, masked / counted)
        ids = shown.tolist()
        if seen is not None:
            seen = seen.cpu()
        elif self.denoiser.attention == "causal":
            seen = plain.block_causal(len(ids), 1)
        return self.written(ids, seen, level).to(shown.device)
