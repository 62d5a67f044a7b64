"""Checks that the tensors of a checkpoint fill a network exactly; errors list everything that is wrong at once.

Names in errors are those of the files.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch

from lm_eval_duel.errors import DuelError

log = logging.getLogger("lm_eval.duel_mdm")

SHOWN = 10  # names shown for each kind of fault
LOGGERS = ("transformers.modeling_utils", "transformers.utils.loading_report")
REPORTS = ("LOAD REPORT", "newly initialized", "were not used when initializing")

Shape = tuple[int, ...]


class Faults(NamedTuple):
    """The names of tensors that do not fit; for those of another shape, the shapes in file and network."""

    missing: Collection[str] = ()
    unknown: Collection[str] = ()
    shapes: Mapping[str, tuple[Shape | None, Shape]] = {}  # None: the shape in the file is unknown


def compare(expected: Mapping[str, Shape], actual: Mapping[str, Shape]) -> Faults:
    """The faults of the `actual` tensors in files, compared with those that a network expects."""
    return Faults(
        [key for key in expected if key not in actual],
        [key for key in actual if key not in expected],
        {
            key: (actual[key], expected[key])
            for key in expected
            if key in actual and tuple(actual[key]) != tuple(expected[key])
        },
    )


def reported(report: Mapping[str, Any], model: torch.nn.Module, files: Mapping[str, Shape]) -> Faults:
    """The faults in a loading report of transformers, which has names, or in other versions names with shapes.

    `files`: shapes in the files, as far as they are known.
    """
    state = model.state_dict()
    shapes = {}
    for key in report["mismatched_keys"]:
        key, *both = (key,) if isinstance(key, str) else key
        expected = tuple(state[key].shape) if key in state else None
        shapes[key] = tuple(both) if both else (files.get(key), expected)
    return Faults(report["missing_keys"], report["unexpected_keys"], shapes)


def require_no_faults(what: str, faults: Faults, name: Callable[[str], str] = str) -> None:
    """Raise DuelError, starting with `what`, for any fault; `name`: a tensor's name in its file."""
    shapes = {name(key): both for key, both in faults.shapes.items()}
    misshapen = [
        f"{key} is {tuple(actual)}, not {tuple(expected)}" if actual is not None else f"{key} is not {tuple(expected)}"
        for key, (actual, expected) in sorted(shapes.items())
    ]
    kinds = {
        "missing": sorted({name(key) for key in faults.missing}),
        "unknown": sorted({name(key) for key in faults.unknown}),
        "of another shape": misshapen,
    }
    parts = [f"{len(lines)} {kind}: {_listed(lines)}" for kind, lines in kinds.items() if lines]
    if parts:
        raise DuelError(f"{what}: {'; '.join(parts)}.")


def _listed(lines: list[str]) -> str:
    return ", ".join(lines[:SHOWN]) + (", ..." if len(lines) > SHOWN else "")


def require_counts(path: str, counts: Mapping[str, int | None], tensors: Collection[str]) -> None:
    """Raise DuelError if config.json has more layers or experts than the files have tensors.

    Call this before a network is built, even on the meta device: modules take memory too.
    """
    for key, count in counts.items():
        if isinstance(count, int) and count > len(tensors):
            raise DuelError(
                f"The config.json of {path} has {key}={count}, but its files hold {len(tensors)} tensors: they do not "
                "belong together."
            )


def build_on_meta(build: Callable[[], torch.nn.Module]) -> torch.nn.Module | None:
    """A network on the meta device; None if it cannot be built, which raises an error when it is loaded."""
    try:
        with torch.device("meta"):
            return build()
    except Exception:  # inconsistent sizes may raise anything
        return None


def require_plausible_size(
    path: str, network: torch.nn.Module | None, tensors: Collection[torch.Tensor], packed: bool = False
) -> None:
    """Raise DuelError for a network on the meta device that is too large for the tensors of its files.

    For networks whose names and shapes may differ from those in the files. `packed`: quantised weights, of which none
    takes less than a bit. Otherwise the network may have up to twice the numbers in the files: a tied head may be
    counted twice, and some tensors are computed.
    """
    parameters = sum(parameter.numel() for parameter in network.parameters()) if network is not None else 0
    if parameters > sum(8 * value.nbytes if packed else 2 * value.numel() for value in tensors):
        raise DuelError(
            f"The config.json of {path} describes a network of {parameters:,} parameters, but its files hold "
            f"{sum(value.numel() for value in tensors):,} numbers: they do not belong together."
        )


def require_filled(
    path: str, report: Mapping[str, Any], model: torch.nn.Module, files: Mapping[str, torch.Tensor]
) -> None:
    """Raise DuelError that names all tensors missing or of another shape in a loading report of transformers.

    Unused tensors alone are a warning. `files`: the tensors of the files, as far as they are known.
    """
    shapes = {key: tuple(value.shape) for key, value in files.items()}
    faults, prefix = reported(report, model, shapes), f"{model.base_model_prefix}."

    def name(key: str) -> str:
        return key.removeprefix(prefix) if key not in shapes and key.removeprefix(prefix) in shapes else key

    if faults.missing or faults.shapes:
        require_no_faults(f"The weights of {path} do not fill {type(model).__name__}", faults, name)
    if faults.unknown:
        log.warning("Weights of %s that the network does not use: %s", path, sorted(faults.unknown)[:SHOWN])


@contextlib.contextmanager
def quiet_transformers() -> Iterator[None]:
    """Silence transformers' reports of tensors that do not fit: they recommend training, and an error follows.

    Reports about weights that it cannot convert are kept.
    """

    def passes(record: logging.LogRecord) -> bool:
        text = record.getMessage()
        return "CONVERSION" in text or not any(words in text for words in REPORTS)

    loggers: Iterable[logging.Logger] = [logging.getLogger(name) for name in LOGGERS]
    for logger in loggers:
        logger.addFilter(passes)
    try:
        yield
    finally:
        for logger in loggers:
            logger.removeFilter(passes)
