"""Requests of the harness: of which evaluation they are, which are asked, which only fill up a rank, and how the user
knows them."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from lm_eval.api.task import Task

from lm_eval_duel.errors import DuelError

if TYPE_CHECKING:
    from lm_eval.api.instance import Instance


class Asked(NamedTuple):
    """The requests that are answered: those that the harness repeats so that ranks have equally many are left out."""

    requests: list[Instance]
    repeats: list[int]  # of each, how often it came before
    places: list[int]  # of each request of the harness, which of these answers it

    def spread(self, answers: Sequence[Any]) -> list[Any]:
        """An answer for each request of the harness."""
        return [answers[place] for place in self.places]


def asked(requests: Sequence[Instance]) -> Asked:
    """A request is the same object as often as its task repeats it; where it comes more often, it fills up a rank."""
    found = Asked([], [], [])
    same: dict[int, list[int]] = {}
    for request in requests:
        before = same.setdefault(id(request), [])
        if len(before) < (request.repeats or 1):
            found.repeats.append(len(before))
            before.append(len(found.requests))
            found.requests.append(request)
        found.places.append(before[-1])
    return found


def evaluation() -> int:
    """The evaluation under way: another number as soon as the harness has built the requests of a task anew.

    It does so before it asks for any answer, and says nothing else by which a model could tell one evaluation from the
    next.
    """
    return _built


_built = 0
_build = Task.build_all_requests


@functools.wraps(_build)
def _counted(self: Task, **options: Any) -> None:
    global _built
    _built += 1
    _build(self, **options)


Task.build_all_requests = _counted


@contextlib.contextmanager
def naming(request: Instance) -> Iterator[None]:
    """Put the request's name, as the user knows it, before an error."""
    try:
        yield
    except DuelError as error:
        raise DuelError(f"{name(request)}: {error}") from None


def name(request: Instance) -> str:
    """A request as the user knows it."""
    return f"Request of task {request.task_name}, document {request.doc_id}"
