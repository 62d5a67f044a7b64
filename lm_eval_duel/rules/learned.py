"""Learned rules: a small network scores each masked position, and the positions with the largest scores are revealed.

    score = linear layers of [features of the position, statistics of its distribution]

Such planners are trained to say whether the network's most probable token is right (Learn2PD, Bao et al. 2025, trains
one on confidences). A score is a logit: sigmoid(score) is the planner's probability that it is.

A file holds the layers as a `torch.nn.Sequential` names them (`0.weight`, `0.bias`, `2.weight`, ...), and in its
metadata the `inputs`, in their order, and the `activation` between layers. `save_planner` writes one.

Shapes: R lanes, W block width, U positions that differ, D features, I inputs, H units of a layer.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
import re
from typing import TYPE_CHECKING, Any, ClassVar

from lm_eval_duel.errors import DuelError, unknown
from lm_eval_duel.rules.base import Counted, Decision, Thresholded, best, log_odds, nearest, sure_or_best
from lm_eval_duel.rules.modules import Header, ModuleRule, compute_dtype

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from lm_eval_duel.core.lanes import Lanes
    from lm_eval_duel.core.predictions import Predictions

FEATURES = "features"
STATISTICS = ("confidence", "margin", "log_margin", "entropy")
ACTIVATIONS = {"relu": "ReLU", "gelu": "GELU", "silu": "SiLU", "tanh": "Tanh"}  # in metadata: the class of torch.nn
LARGEST = 100.0  # statistics are cut to +-100: the confidence of a probability of 1 is infinite
WEIGHT = re.compile(r"(.*?)(\d+)\.weight")


@dataclasses.dataclass(frozen=True)
class Planner(ModuleRule):
    """Base of the rules that follow a planner's scores. The margin of a decision is in the planner's own logits."""

    def __post_init__(self) -> None:
        super().__post_init__()
        layers_of(self.header(), self.file)

    @classmethod
    def build(cls, tensors: dict[str, torch.Tensor], metadata: dict[str, str]) -> torch.nn.Module:
        import torch

        modules: list[torch.nn.Module] = []
        for name in _ordered(tensors):
            weight, bias = tensors[f"{name}.weight"], tensors.get(f"{name}.bias")
            if modules:
                modules.append(getattr(torch.nn, ACTIVATIONS[metadata["activation"]])())
            linear = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None)
            linear.weight.data = weight
            if bias is not None:
                linear.bias.data = bias
            modules.append(linear)
        return torch.nn.Sequential(*modules)

    def check_network(self, denoiser: Any) -> None:
        inputs, width = inputs_of(self.header())
        if FEATURES in inputs and not denoiser.splits_head and width != denoiser.vocab_size:
            raise DuelError(
                f"{self.file} reads {width} features of a position, and this network's LM head is not split off, so "
                f"its features are its {denoiser.vocab_size} logits. Train the planner on this network, or on "
                f"statistics alone ({', '.join(STATISTICS)})."
            )

    def score(self, predictions: Predictions, lanes: Lanes) -> torch.Tensor:
        """The planner's score of each masked position, float32 or float64 (R, W)."""
        import torch

        inputs, width = inputs_of(self.header())
        names = [name for name in inputs if name != FEATURES]

        def scores(features: torch.Tensor, *values: torch.Tensor) -> torch.Tensor:
            if FEATURES in inputs and features.shape[1] != width:
                raise DuelError(
                    f"{self.file} reads {width} features of a position, and this network has {features.shape[1]}: it "
                    "was trained on another network."
                )
            dtype = compute_dtype(features)
            columns = {name: value[:, None].clamp(-LARGEST, LARGEST) for name, value in zip(names, values, strict=True)}
            columns[FEATURES] = features
            stacked = torch.cat([columns[name].to(dtype) for name in inputs], 1)  # (U, I)
            logits: torch.Tensor = self.module(features)(stacked)  # (U, 1)
            return logits[:, 0]

        plane = predictions.apply(scores, *(getattr(predictions, name) for name in names))  # (R, W)
        if not plane[lanes.masked].isfinite().all():
            raise DuelError(f"The scores of {self.file} are NaN or infinite on this network's features.")
        return plane


@dataclasses.dataclass(frozen=True)
class Learned(Counted, Planner):
    """The k positions with the largest score."""

    name: ClassVar[str] = "learned"
    label: ClassVar[str] = "Learned"
    state_only: ClassVar[bool] = True

    def __call__(self, predictions: Predictions, lanes: Lanes) -> Decision:
        return Decision(*best(predictions, lanes, self.score(predictions, lanes), self.k, 1.0))


@dataclasses.dataclass(frozen=True)
class LearnedThreshold(Thresholded, Planner):
    """All positions with sigmoid(score) >= mu, or else the one with the largest score."""

    name: ClassVar[str] = "learned_threshold"
    label: ClassVar[str] = "Learned Thresh."
    state_only: ClassVar[bool] = True

    def __call__(self, predictions: Predictions, lanes: Lanes) -> Decision:
        score, least = self.score(predictions, lanes), log_odds(self.mu)
        sure = lanes.masked & (score >= least)  # (R, W)
        distance = nearest(score - least, lanes.masked)  # (R,)
        return Decision(*sure_or_best(predictions, lanes, sure, distance, score, 1.0))


# ---------------------------------------------------------------- files


def inputs_of(header: Header) -> tuple[list[str], int]:
    """The inputs that a planner reads, in their order, and how many features are among them (0 without features)."""
    inputs = [name.strip() for name in header.metadata["inputs"].split(",")]
    width = header.shapes[f"{_ordered(header.shapes)[0]}.weight"][1]  # I
    return inputs, width - sum(name != FEATURES for name in inputs)


def layers_of(header: Header, path: str) -> list[str]:
    """The names of a planner's layers, in their order; raises DuelError for a file of another layout."""
    shapes, metadata = header
    names = _ordered(shapes)
    if not names or set(shapes) - {f"{name}.{part}" for name in names for part in ("weight", "bias")}:
        raise _wrong(path, f"linear layers with numbered names (0.weight, 0.bias, 2.weight, ...), not {_some(shapes)}")
    if "inputs" not in metadata:
        raise _wrong(path, "the names of its inputs in its metadata, e.g. inputs=features,entropy")
    inputs = [name.strip() for name in metadata["inputs"].split(",")]
    for name in inputs:
        if name not in (FEATURES, *STATISTICS):
            raise unknown(f"input of the planner {path}", name, [FEATURES, *STATISTICS])
    if len({*inputs}) < len(inputs):
        raise _wrong(path, f"each input once, not inputs={metadata['inputs']}")
    if len(names) > 1 and metadata.get("activation") not in ACTIVATIONS:
        raise _wrong(path, f"activation={'|'.join(ACTIVATIONS)} in its metadata, not {metadata.get('activation')}")
    sizes = [shapes[f"{name}.weight"] for name in names]
    statistics = sum(name != FEATURES for name in inputs)
    fits = sizes[0][-1] > statistics if FEATURES in inputs else sizes[0][-1] == statistics
    chained = all(before[0] == after[-1] for before, after in itertools.pairwise(sizes))
    biases = all(shapes.get(f"{name}.bias", size[:1]) == size[:1] for name, size in zip(names, sizes, strict=True))
    if not (all(len(size) == 2 for size in sizes) and fits and chained and biases and sizes[-1][0] == 1):
        raise _wrong(
            path,
            f"linear layers from its inputs ({metadata['inputs']}) to one score, with weights of (output, input) and "
            f"biases of (output,); it has {_some(shapes)}",
        )
    return names


def _ordered(names: Any) -> list[str]:
    """The names of layers, by their number."""
    matches = [match for name in names if (match := WEIGHT.fullmatch(name))]
    return [match[1] + match[2] for match in sorted(matches, key=lambda match: (int(match[2]), match[1]))]


def _some(shapes: dict[str, tuple[int, ...]]) -> str:
    """The first tensors of a file, with their shapes."""
    return ", ".join(f"{name} {list(shape)}" for name, shape in list(shapes.items())[:6]) or "no tensor"


def _wrong(path: str, what: str) -> DuelError:
    return DuelError(f"The planner {path} must hold {what}. save_planner of lm_eval_duel.rules.learned writes one.")


def save_planner(planner: torch.nn.Module, path: str | os.PathLike[str], inputs: Sequence[str]) -> None:
    """Write a planner, for `learned:file=...`.

    `planner`: a `torch.nn.Linear`, or a `torch.nn.Sequential` of linear layers with one activation between them (ReLU,
    GELU, SiLU or Tanh, with torch's defaults), from `inputs` (I,) to one score. `inputs`: of "features", "confidence",
    "margin", "log_margin" and "entropy", in the planner's order; "features" stands for all D of them.

    Raises:
        DuelError: the planner is of another form.
    """
    import torch
    from safetensors.torch import save_file

    if isinstance(planner, torch.nn.Linear):
        planner = torch.nn.Sequential(planner)
    known = {getattr(torch.nn, name): key for key, name in ACTIVATIONS.items()}
    layers = list(planner) if isinstance(planner, torch.nn.Sequential) else [planner]
    linear, between = layers[::2], layers[1::2]
    kinds = {known.get(type(layer), "") for layer in between}
    defaults = all(getattr(layer, "approximate", "none") == "none" for layer in between)
    if not all(type(layer) is torch.nn.Linear for layer in linear) or kinds - {*ACTIVATIONS} or len(kinds) > 1:
        got = ", ".join(type(layer).__name__ for layer in layers)
        raise DuelError(
            "A planner is torch.nn.Linear layers with one activation (ReLU, GELU, SiLU or Tanh) between them, in a "
            f"torch.nn.Sequential; got {got}. "
            "For another network write a ModuleRule (docs/rules.md)."
        )
    if not defaults:
        raise DuelError("A planner's GELU is the exact one; approximate='tanh' is not supported.")
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in planner.state_dict().items()}
    metadata = {"inputs": ",".join(inputs)} | ({"activation": kinds.pop()} if kinds else {})
    layers_of(Header({name: tuple(tensor.shape) for name, tensor in tensors.items()}, metadata), str(path))
    save_file(tensors, path, metadata)
