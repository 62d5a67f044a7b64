"""Rules whose decisions a `torch.nn.Module` computes.

A rule is its text. So the weights are in a file that the text names, and its content is part of the fingerprint.

Shapes: U positions that differ, D features.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from lm_eval_duel.arguments import required, string
from lm_eval_duel.errors import DuelError
from lm_eval_duel.rules.base import Rule

if TYPE_CHECKING:
    import torch

    Build = Callable[[dict[str, torch.Tensor], dict[str, str]], torch.nn.Module]


PATH = string("a file whose path has no ':'", lambda path: ":" not in path)


@dataclasses.dataclass(frozen=True)
class ModuleRule(Rule):
    """The base class of rules with a module: `build` makes it from the tensors in `file`, `module` returns it.

    `file`: a safetensors file. A subclass declares what its `__call__` reads, like any rule.

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
        return _metadata(self.file, signature(self.file))

    def module(self, like: torch.Tensor) -> torch.nn.Module:
        """The module in evaluation mode without gradients, on the device of `like`, for input of `compute_dtype`."""
        return _module(type(self).build, self.file, signature(self.file), str(like.device), compute_dtype(like))


def compute_dtype(like: torch.Tensor) -> torch.dtype:
    """The dtype in which the module runs: float64 if `like` is float64, otherwise float32."""
    import torch

    return torch.float64 if like.dtype == torch.float64 else torch.float32


def signature(path: str) -> tuple[int, int] | None:
    """A value that changes when a file is written again; None if it cannot be read."""
    try:
        entry = os.stat(path)
    except (OSError, ValueError):
        return None
    return entry.st_mtime_ns, entry.st_size


@functools.lru_cache(maxsize=8)
def _metadata(path: str, signature: tuple[int, int] | None) -> dict[str, str]:
    with _opened(path, "np") as file:
        return file.metadata() or {}


@functools.lru_cache(maxsize=4)
def _module(
    build: Build, path: str, signature: tuple[int, int] | None, device: str, dtype: torch.dtype
) -> torch.nn.Module:
    with _opened(path, "pt") as file:
        metadata, tensors = file.metadata() or {}, {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    broken = [name for name, tensor in tensors.items() if not tensor.isfinite().all()]
    if broken:
        raise DuelError(f"The weights in {path} are broken: {', '.join(broken)} have NaN or infinite values.")
    return build(tensors, metadata).to(device, dtype).requires_grad_(False).eval()


@contextlib.contextmanager
def _opened(path: str, framework: str) -> Iterator[Any]:
    """A safetensors file, opened; raises DuelError for any other file."""
    from safetensors import SafetensorError, safe_open

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


def in_memory(rule: Rule) -> Iterator[str]:
    """The parameters of a rule that hold a module or a tensor, which the text of a rule cannot hold."""
    for field in dataclasses.fields(rule):
        value = getattr(rule, field.name)
        if any(base.__module__.partition(".")[0] == "torch" for base in type(value).__mro__):
            yield field.name
        elif isinstance(value, Rule):
            yield from in_memory(value)
