"""Learned rules: a small network, a planner, scores each masked position, and the largest scores are revealed.

    score = linear layers of [features of the position, statistics of its distribution]

A planner is trained to say whether the network's most probable token is right (as in Learn2PD, Bao et al. 2025). The
likelihood under it is exact, too, because it sees only what a rule sees. Train one for `demo-mdm`, then score with it:

    python examples/rules/learned.py --out planner.safetensors
    lm-eval-duel run demo-mdm --tasks sotu --limit 2 \
        --model_args rule=examples/rules/learned.py:Learned:file=planner.safetensors:k=4,block=32

Shapes: N rows, L length, R lanes, W block width, C masked positions, U positions that differ, D features, V tokens.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import json
import lzma
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from lm_eval_duel import Duel
from lm_eval_duel.arguments import path, required
from lm_eval_duel.core.lanes import Lanes
from lm_eval_duel.core.predictions import Predictions
from lm_eval_duel.demo import FOLDER
from lm_eval_duel.errors import DuelError, unknown
from lm_eval_duel.rules import Decision, Rule
from lm_eval_duel.rules.base import best, file_version, log_odds, nearest, sure_or_best

FEATURES = "features"  # the input of the LM head
STATISTICS = ("confidence", "margin", "log_margin", "entropy")
PATH = path("a file whose path has no ':'", lambda name: ":" not in name)
Build: TypeAlias = Callable[[dict[str, torch.Tensor], dict[str, str]], torch.nn.Module]
LARGEST = 100.0  # statistics are cut to +-100: the confidence of a probability of 1 is infinite


@dataclasses.dataclass(frozen=True)
class ModuleRule(Rule):
    """The base class of rules with a module: `build` makes it from the tensors in `file`, `module` returns it.

    A rule is its text. So the weights are in a safetensors file that the text names, and its content is part of the
    fingerprint. A subclass declares what its `__call__` reads, like any rule.

    Raises:
        DuelError: If the file cannot be read, or its path holds a ':', which separates the parameters of a rule.
    """

    file: str = required(PATH, "a safetensors file, whose content is in the fingerprint", "planner.safetensors")

    def __post_init__(self) -> None:
        super().__post_init__()
        self.metadata()

    @classmethod
    def build(cls, tensors: dict[str, torch.Tensor], metadata: dict[str, str]) -> torch.nn.Module:
        """Make the module from the tensors and the metadata of the file, in any dtype and on the CPU."""
        raise NotImplementedError(f"{cls.__name__} does not define `build`.")

    @property
    def files(self) -> tuple[str, ...]:
        return (self.file,)

    def metadata(self) -> dict[str, str]:
        """The metadata of the file."""
        return _metadata(self.file, file_version(self.file))

    def module(self, like: torch.Tensor) -> torch.nn.Module:
        """The module in evaluation mode without gradients, on the device of `like`, for input of `compute_dtype`."""
        return _module(type(self).build, self.file, file_version(self.file), str(like.device), compute_dtype(like))


def compute_dtype(like: torch.Tensor) -> torch.dtype:
    """The dtype in which the module runs: float64 if `like` is float64, otherwise float32."""
    return torch.float64 if like.dtype == torch.float64 else torch.float32


@functools.lru_cache(maxsize=8)
def _metadata(path: str, version: tuple[int, int] | None) -> dict[str, str]:
    with _opened(path, "np") as file:
        return file.metadata() or {}


@functools.lru_cache(maxsize=4)
def _module(
    build: Build, path: str, version: tuple[int, int] | None, device: str, dtype: torch.dtype
) -> torch.nn.Module:
    with _opened(path, "pt") as file:
        metadata = file.metadata() or {}
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - it is not a dict
    broken = [name for name, tensor in tensors.items() if not tensor.isfinite().all()]
    if broken:
        raise DuelError(f"The weights in {path} are broken: {', '.join(broken)} have NaN or infinite values.")
    return build(tensors, metadata).to(device, dtype).requires_grad_(False).eval()


@contextlib.contextmanager
def _opened(path: str, framework: str) -> Iterator[Any]:
    """A safetensors file, opened; raises DuelError for any other file."""
    try:
        opened = safe_open(path, framework=framework)
    except (OSError, ValueError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or str(error).splitlines()[0]
        raise DuelError(
            f"The file '{path}' that the rule names cannot be read as safetensors ({reason}). "
            "docs/rules.md says how to write one."
        ) from None
    with opened as file:
        yield file


@dataclasses.dataclass(frozen=True)
class Planner(ModuleRule):
    """Base of the rules that follow a planner's scores; near ties are counted in the planner's own scores.

    `file`: what `save_planner` wrote. `ModuleRule` puts its content into the fingerprint.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in self.inputs:
            if name not in (FEATURES, *STATISTICS):
                raise unknown(f"input of the planner {self.file}", name, [FEATURES, *STATISTICS])

    @property
    def inputs(self) -> list[str]:
        """The inputs that the planner reads, in their order."""
        return self.metadata().get("inputs", "").split(",")

    @classmethod
    def build(cls, tensors: dict[str, torch.Tensor], metadata: dict[str, str]) -> torch.nn.Module:
        weights = [key for key in tensors if key.endswith("weight")]  # as in "2.weight"
        modules = []
        for key in sorted(weights, key=lambda key: int(key.split(".")[0])):
            height, width = tensors[key].shape
            if modules:
                modules.append(getattr(torch.nn, metadata["activation"])())
            modules.append(torch.nn.Linear(width, height))
        planner = torch.nn.Sequential(*modules)
        planner.load_state_dict(tensors)
        return planner

    def score(self, predictions: Predictions, lanes: Lanes) -> torch.Tensor:
        """The planner's score of each masked position, float32 or float64 (R, W)."""
        statistics = [name for name in self.inputs if name != FEATURES]

        def scores(features: torch.Tensor, *values: torch.Tensor) -> torch.Tensor:  # (U, D) and (U,) each -> (U,)
            columns = {FEATURES: features}
            for name, value in zip(statistics, values, strict=True):
                columns[name] = value[:, None].clamp(-LARGEST, LARGEST)
            dtype = compute_dtype(features)
            stacked = torch.cat([columns[name].to(dtype) for name in self.inputs], 1)  # (U, inputs)
            planner = self.module(features)
            if stacked.shape[1] != planner[0].in_features:
                raise DuelError(
                    f"{self.file} reads {planner[0].in_features} numbers of a position, and this network gives "
                    f"{stacked.shape[1]}: it was trained on another one."
                )
            return planner(stacked)[:, 0]

        plane = predictions.apply(scores, *(getattr(predictions, name) for name in statistics))  # (R, W)
        if not plane[lanes.masked].isfinite().all():
            raise DuelError(f"The scores of {self.file} are NaN or infinite on this network's features.")
        return plane


@dataclasses.dataclass(frozen=True)
class Learned(Planner):
    """The k positions with the largest score."""

    state_only = True
    k: int = 1

    def __call__(self, predictions: Predictions, lanes: Lanes) -> Decision:
        return Decision(*best(predictions, lanes, self.score(predictions, lanes), self.k, 1.0))


@dataclasses.dataclass(frozen=True)
class LearnedThreshold(Planner):
    """All positions with sigmoid(score) >= mu, or else the one with the largest score."""

    state_only = True
    adaptive = True  # the number of steps depends on the text
    mu: float = 0.9

    def __call__(self, predictions: Predictions, lanes: Lanes) -> Decision:
        score = self.score(predictions, lanes)  # (R, W)
        least = log_odds(self.mu)
        distance = nearest(score - least, lanes.masked)  # (R,)
        return Decision(*sure_or_best(predictions, lanes, lanes.masked & (score >= least), distance, score, 1.0))


def save_planner(planner: torch.nn.Sequential, path: str, inputs: Sequence[str]) -> None:
    """Write linear layers with one activation of torch.nn between them, from `inputs` (I,) to one score.

    `inputs`: of "features", "confidence", "margin", "log_margin" and "entropy", in the planner's order; "features"
    stands for all D of them.
    """
    kinds = [type(layer) for layer in planner]
    if {*kinds[::2]} != {torch.nn.Linear} or len({*kinds[1::2]}) > 1:
        raise DuelError(f"A planner is linear layers with one activation between them, not {planner}: write a `build`.")
    metadata = {"inputs": ",".join(inputs)}
    if len(kinds) > 1:
        metadata["activation"] = kinds[1].__name__
    tensors = {key: value.contiguous() for key, value in planner.state_dict().items()}
    save_file(tensors, path, metadata)


def train(steps: int = 200) -> torch.nn.Sequential:
    """A planner for `demo-mdm`, which reads features and entropy, trained on bundled text in a few seconds."""
    duel = Duel.from_pretrained("demo-mdm", device="cpu")
    with lzma.open(FOLDER / "text" / "sotu_full.jsonl.xz", "rt", encoding="utf-8") as file:
        ids = torch.tensor(duel.tokenizer(json.loads(file.readline())["text"][:60000])["input_ids"])
    rows = ids[: len(ids) // 64 * 64].view(-1, 64)  # (N, L)
    masked = torch.rand(rows.shape) < torch.rand(len(rows), 1)  # (N, L) from few masks to many
    with torch.no_grad():
        shown = rows.masked_fill(masked, duel.denoiser.mask_id)  # (N, L)
        features = duel.denoiser.features(shown, None)[masked].float()  # (C, D)
        logits = duel.denoiser.head(features).float()  # (C, V)
    log_p = logits.masked_fill(duel.denoiser.excluded, -math.inf).log_softmax(1)  # (C, V)
    entropy = torch.special.entr(log_p.exp()).sum(1, keepdim=True)  # (C, 1)
    inputs = torch.cat([features, entropy], 1)  # (C, D + 1)
    right = (log_p.argmax(1) == rows[masked]).float()  # (C,)
    planner = torch.nn.Sequential(torch.nn.Linear(inputs.shape[1], 64), torch.nn.GELU(), torch.nn.Linear(64, 1))
    optimizer = torch.optim.AdamW(planner.parameters(), lr=1e-3)
    for _ in range(steps):
        batch = torch.randint(len(inputs), (256,))
        loss = torch.nn.functional.binary_cross_entropy_with_logits(planner(inputs[batch])[:, 0], right[batch])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(f"loss of the last batch: {loss.item():.3f} nats a position")
    return planner


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Train a planner for demo-mdm.")
    parser.add_argument("--out", default="planner.safetensors", help="the file to write")
    out = parser.parse_args().out  # before the training
    torch.manual_seed(0)
    save_planner(train(), out, ("features", "entropy"))
