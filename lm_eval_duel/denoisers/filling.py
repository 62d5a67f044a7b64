"""Whether the tensors of a checkpoint fill a network exactly; where they do not, everything that is wrong, at once.

Names are those of the files, so that a user finds them there.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch

from lm_eval_duel.errors import DuelError

SHOWN = 10  # names of each kind of fault
LOGGERS = ("transformers.modeling_utils", "transformers.utils.loading_report")
REPORTS = ("LOAD REPORT", "newly initialized", "were not used when initializing")

Shape = tuple[int, ...]


class Faults(NamedTuple):
    """What is wrong with tensors: names, and for another shape those of file and network."""

    missing: Collection[str] = ()
    unknown: Collection[str] = ()
    shapes: Mapping[str, tuple[Shape | None, Shape]] = {}  # None: the file's is not known


def compare(wanted: Mapping[str, Shape], found: Mapping[str, Shape]) -> Faults:
    """The faults of tensors `found` in files, against those that a network wants."""
    return Faults(
        [key for key in wanted if key not in found],
        [key for key in found if key not in wanted],
        {key: (found[key], wanted[key]) for key in wanted if key in found and tuple(found[key]) != tuple(wanted[key])},
    )


def reported(report: Mapping[str, Any], model: torch.nn.Module, files: Mapping[str, Shape]) -> Faults:
    """The faults in a loading report of transformers, which has names, or in other versions names with shapes.

    `files`: shapes in the files as far as they are known, by name.
    """
    own = model.state_dict()
    shapes = {}
    for key in report["mismatched_keys"]:
        key, *said = (key,) if isinstance(key, str) else key
        wanted = tuple(own[key].shape) if key in own else None
        shapes[key] = tuple(said) if said else (files.get(key), wanted)
    return Faults(report["missing_keys"], report["unexpected_keys"], shapes)


def require(what: str, faults: Faults, name: Callable[[str], str] = str) -> None:
    """Raise DuelError, which begins with `what`, for any fault; `name`: a tensor's name in its file."""
    shapes = {name(key): both for key, both in faults.shapes.items()}
    misshapen = [
        f"{key} is {tuple(found)}, not {tuple(wanted)}" if found is not None else f"{key} is not {tuple(wanted)}"
        for key, (found, wanted) in sorted(shapes.items())
    ]
    kinds = {
        "missing": sorted({name(key) for key in faults.missing}),
        "not known": sorted({name(key) for key in faults.unknown}),
        "of another shape": misshapen,
    }
    said = [f"{len(lines)} {kind}: {_listed(lines)}" for kind, lines in kinds.items() if lines]
    if said:
        raise DuelError(f"{what}: {'; '.join(said)}.")


def _listed(lines: list[str]) -> str:
    return ", ".join(lines[:SHOWN]) + (", ..." if len(lines) > SHOWN else "")


def require_counts(path: str, counts: Mapping[str, int | None], tensors: Collection[str]) -> None:
    """Raise DuelError where config.json has more layers or experts than its files have tensors.

    To be called before a network is built, even without memory for its weights: its modules take memory too.
    """
    for key, count in counts.items():
        if isinstance(count, int) and count > len(tensors):
            raise DuelError(
                f"The config.json of {path} says {key}={count}, but its files hold {len(tensors)} tensors: they do not "
                "belong together."
            )


def require_room(path: str, network: torch.nn.Module, bits: int) -> None:
    """Raise DuelError where files of so many bits cannot hold a network, here built without memory, of coarse weights.

    Names and shapes of coarse weights depend on how they are packed, but none has less than a bit.
    """
    if (wanted := parameters(network)) > bits:
        raise DuelError(
            f"The config.json of {path} describes a network of {wanted:,} parameters, but its files hold {bits:,} "
            "bits: they do not belong together."
        )


def parameters(network: torch.nn.Module) -> int:
    """How many parameters a network has."""
    return sum(parameter.numel() for parameter in network.parameters())


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Without transformers' own reports of tensors that do not fit: it advises training, and what follows is an error.

    What it says about weights that it cannot convert is kept.
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
