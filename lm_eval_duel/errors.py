"""The errors that users see, with the nearest name for a misspelt one."""

from __future__ import annotations

import contextlib
import difflib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

LISTED = 4  # near names in an error
NEAR = 0.7  # likeness of two names that may be one, mistyped
OTHER_NAMES = {  # in the code of LLaDA, Dream, BD3-LM and transformers, with our name for each
    "block_length": "block",
    "block_size": "block",
    "cfg": "cfg_scale",
    "mask_id": "mask_token_id",
    "mc_num": "mc_samples",
    "model_name_or_path": "pretrained",
    "torch_dtype": "dtype",
}
LONGEST_LIST = 40  # names; of a longer list only the near ones are printed, if there are any


class DuelError(ValueError):
    """The base class of this package's errors. The message says why a request failed, and what to do instead.

    `window`: the index of the window that caused it, or None.
    """

    def __init__(self, message: str, window: int | None = None):
        super().__init__(message)
        self.window = window


class UsageError(DuelError):
    """A request that cannot be begun: an argument, a path, a checkpoint or a data set is wrong. Exit code 2."""


class LaneError(DuelError):
    """An error in a step of the reveal loop; `lane` is the lane's number in its batch."""

    def __init__(self, message: str, window: int | None = None, lane: int = 0):
        super().__init__(message, window)
        self.lane = lane


class RuleStalled(LaneError):
    """A rule picked nothing, or picked a position that is not masked."""


class NotFinite(LaneError):
    """The network returned NaN or infinite logits."""


class InconsistentOutput(LaneError):
    """The same input had two outputs, so values that were computed before may be wrong, too."""


def first_line(error: Exception) -> str:
    """The first line of an error's message, after the name of its class if it is none of this package."""
    name = "" if isinstance(error, DuelError) else f"{type(error).__name__}: "
    return name + (str(error).strip().splitlines() or [""])[0]


@contextlib.contextmanager
def naming(name: str | Callable[[int], str]) -> Iterator[None]:
    """Put a name before a DuelError; a function names the window that it concerns, if it concerns one."""
    try:
        yield
    except DuelError as error:
        if isinstance(name, str):
            kind = UsageError if isinstance(error, UsageError) else DuelError  # the exit code stays
            raise kind(f"{name}: {error}") from None
        if error.window is not None:
            error.args = (f"{name(error.window)}: {error}",)
        raise


@contextlib.contextmanager
def usage() -> Iterator[None]:
    """Turn every DuelError or OSError into a UsageError, in code that runs before anything is computed.

    Also a decorator.
    """
    try:
        yield
    except UsageError:
        raise
    except DuelError as error:
        raise UsageError(str(error)) from None
    except BrokenPipeError:  # nobody reads what is printed any more
        raise
    except OSError as error:
        raise UsageError(about_file(error)) from None


def about_file(error: OSError) -> str:
    """An OSError in one line."""
    reason = error.strerror or str(error).strip().partition("\n")[0] or type(error).__name__
    return f"{error.filename}: {reason}." if error.filename else f"{reason}."


@contextlib.contextmanager
def unchained() -> Iterator[None]:
    """Raise a DuelError without the error that caused it; the message repeats the cause.

    For functions that lm_eval calls: it prints tracebacks in full, and the message must be the last line.
    """
    try:
        yield
    except DuelError as error:
        raise error from None


def counted(number: int, noun: str) -> str:
    """A number with its noun, such as `1 window` or `1,200 windows`."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def told_apart(first: float, second: float) -> tuple[str, str]:
    """Two different numbers with at least four decimals, and so many that two digits of their difference are seen."""
    decimals = 4
    while abs(first - second) * 10**decimals < 10 and decimals < 12:
        decimals += 1
    return f"{first:.{decimals}f}", f"{second:.{decimals}f}"


def too_few_documents(what: str, documents: int, processes: int) -> DuelError:
    """The error for a run in which a process would have no document."""
    return DuelError(
        f"{what} has {counted(documents, 'document')} here and this run has {processes} processes: each "
        f"needs at least one. Start at most {documents} (--num_processes {documents} of accelerate launch, "
        f"--nproc-per-node {documents} of torchrun), or raise --limit."
    )


def another_block(trained: int, block: object) -> DuelError:
    """The error for a block other than the one that a block-causal network was trained on."""
    return DuelError(
        f"This network is block-causal, trained on blocks of {trained}: a position sees its own block and those "
        f"before it, so block={block} would be another network. Use block={trained} or block=auto."
    )


def first_position_unseen(cache: str) -> DuelError:
    """The error for a shifted network that would have to predict a block's first position in a later step under a
    cache.
    """
    return DuelError(
        "This network predicts a token from the position before it, so a block's first token is read from the last "
        f"position before the block, which cache={cache} evaluates at the block's start alone. Pass seed_first=true "
        "(the first position is revealed alone at the block's first step, as in Fast-dLLM's sampler for Dream), or "
        "leave cache out."
    )


def nearest(name: object, known: Iterable[str]) -> list[str]:
    """The known names that `name` may stand for, mistyped or cut off, the nearest first; at most `LISTED`."""
    typed = str(name).lower()
    names = {entry.lower(): entry for entry in sorted(known, reverse=True)}
    if OTHER_NAMES.get(typed) in names:
        return [names[OTHER_NAMES[typed]]]
    begins = [entry for entry in sorted(names) if len(typed) > 2 and entry.startswith(typed)]
    return [names[entry] for entry in (difflib.get_close_matches(typed, names, LISTED, NEAR) or begins[:LISTED])]


def unknown(what: str, name: object, known: Iterable[str], where: str = "") -> DuelError:
    """The error for an unknown name, with the nearest known one, and the whole list if it is short.

    `where` follows the name, as in "Unknown parameter 'kk' of the rule greedy".
    """
    known = sorted(known)
    near = nearest(name, known)
    hint = f" Did you mean {near[0]}?" if near else ""
    place = f" {where}" if where else ""
    if len(known) > LONGEST_LIST and near:
        others = f" Others like it: {', '.join(near[1:])}." if near[1:] else ""
        return DuelError(f"Unknown {what} '{name}'{place}.{hint}{others}")
    listed = f" Known: {', '.join(known)}." if known else " There are none."
    return DuelError(f"Unknown {what} '{name}'{place}.{hint}{listed}")


def require_known(what: str, names: Iterable[object], known: Iterable[str], where: str = "") -> None:
    """Raise the error for the first of `names` that is not known."""
    known = [*known]
    for name in names:
        if name not in known:
            raise unknown(what, name, known, where)


def random_tokens(name: str, estimator: str, causal: bool = False) -> UsageError:
    """The error of `estimator` for a network whose noise is random tokens; `causal`: it is an AR model, too."""
    return UsageError(
        f"The noise of {name} is random tokens, so what a masked position shows changes from step to step, and "
        f"estimator={estimator} needs predictions that the revealed tokens alone decide. Use estimator=noised_elbo, a "
        f"bound of ancestral sampling, or estimator=duel, exact for commit-once sampling"
        f"{', or estimator=ar, exact' if causal else ''}."
    )


def documentation(page: str = "") -> str:
    """The path of the documentation, or of a page: in the installed package, or next to the package in a checkout."""
    package = Path(__file__).resolve().parent
    for folder in (package / "docs", package.parent / "docs"):
        if folder.is_dir():
            return str(folder / page)
    return f"docs/{page}"
