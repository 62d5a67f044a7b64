"""The network calls of a run, counted, and kept to be made again without the code around them."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch

from lm_eval_duel.core.denoiser import Denoiser


class Recording:
    """The network calls of a run, which can be replayed without the code around them."""

    NAMES = ("features", "features_at", "stream", "stream_at", "head")

    def __init__(self, denoiser: Denoiser, keep: bool = True):
        self.denoiser = denoiser
        self.keep = keep  # False: the calls are counted, and cannot be replayed
        self.names = {*getattr(denoiser, "calls", self.NAMES)}
        self.calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []
        self.forwards = self.rows = self.tokens = 0
        self._inside = False

    @property
    def counts(self) -> dict[str, Any]:
        """The number of calls, and the rows and token-rows in them."""
        return {"forwards": self.forwards, "rows": self.rows, "token_rows": self.tokens}

    @contextlib.contextmanager
    def record(self) -> Iterator[None]:
        """Record the calls made inside this context."""
        before = {name: method for name, method in vars(self.denoiser).items() if name in self.names}
        for name in self.names:
            setattr(self.denoiser, name, self._recorder(name, getattr(self.denoiser, name)))
        try:
            yield
        finally:
            for name, method in before.items():
                setattr(self.denoiser, name, method)
            for name in self.names - before.keys():
                delattr(self.denoiser, name)  # back to the class's method

    def _recorder(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(method)

        def recorder(*args: Any, **kwargs: Any) -> Any:
            if not self._inside:
                if self.keep:
                    bound = signature.bind(*args, **kwargs)
                    # past is large and read-only; its values do not affect the time
                    for key, value in bound.arguments.items():
                        if key != "past":
                            bound.arguments[key] = _copy(value)
                    self.calls.append((name, bound.args, bound.kwargs))
                if name != "head":
                    ids = args[name.endswith("_at")]  # (R, L)
                    self.forwards += 1
                    self.rows += len(ids)
                    self.tokens += ids.numel()
            outer = self._inside
            self._inside = True
            try:
                return method(*args, **kwargs)
            finally:
                self._inside = outer

        return recorder

    @torch.inference_mode()
    def replay(self) -> None:
        """Repeat the calls in order."""
        for name, args, kwargs in self.calls:
            getattr(self.denoiser, name)(*args, **kwargs)


def _copy(value: Any) -> Any:
    """Copy a tensor, or the tensors in a tuple; return anything else unchanged."""
    if isinstance(value, torch.Tensor):
        return value.clone()
    return tuple(map(_copy, value)) if type(value) is tuple else value
