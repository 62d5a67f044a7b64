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

log = logging.getLogger("lm_eval.duel_mdm")

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


def empty(build: Callable[[], torch.nn.Module]) -> torch.nn.Module | None:
    """A network without memory for its weights; None where it cannot be built, which is an error when it is loaded."""
    try:
        with torch.device("meta"):
            return build()
    except Exception:  # sizes that do not go together raise anything
        return None


def require_room(
    path: str, network: torch.nn.Module | None, tensors: Collection[torch.Tensor], coarse: bool = False
) -> None:
    """Raise DuelError for a network, built without memory, that is too large for the tensors of its files.

    For networks whose names and shapes are not those of the files. `coarse`: how quantised weights are packed differs,
    but none has less than a bit. Else up to twice the numbers in the files may be wanted: a tied head may be counted
    twice, and some tensors are computed.
    """
    wanted = sum(parameter.numel() for parameter in network.parameters()) if network is not None else 0
    if wanted > sum(8 * value.nbytes if coarse else 2 * value.numel() for value in tensors):
        raise DuelError(
            f"The config.json of {path} describes a network of {wanted:,} parameters, but its files hold "
            f"{sum(value.numel() for value in tensors):,} numbers: they do not belong together."
        )


def require_filled(
    path: str, report: Mapping[str, Any], model: torch.nn.Module, files: Mapping[str, torch.Tensor]
) -> None:
    """Raise DuelError, naming all, where a loading report of transformers has tensors missing or of another shape.

    Tensors left over alone are a warning. `files`: the tensors of the files, as far as they are known.
    """
    shapes = {key: tuple(value.shape) for key, value in files.items()}
    faults, prefix = reported(report, model, shapes), f"{model.base_model_prefix}."

    def name(key: str) -> str:
        return key.removeprefix(prefix) if key not in shapes and key.removeprefix(prefix) in shapes else key

    if faults.missing or faults.shapes:
        require(f"The weights of {path} do not fill {type(model).__name__}", faults, name)
    if faults.unknown:
        log.warning("weights of %s that the network does not use: %s", path, sorted(faults.unknown)[:SHOWN])


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
