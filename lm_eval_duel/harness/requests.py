"""Requests of the harness: the distinct ones, and their names for users."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from lm_eval.api.instance import Instance

FILE = "file of this document"  # an entry of documents that are the user's own files


class Batch(NamedTuple):
    """The distinct requests of one call. The harness repeats some of them, so that all ranks have equally many."""

    requests: list[Instance]
    repeats: list[int]  # of each distinct request: how often it came before
    sources: list[int]  # of each request of the call: the index of the distinct one

    @classmethod
    def from_requests(cls, requests: Sequence[Instance]) -> Batch:
        """Find the distinct requests. A task repeats a request `repeats` times, as one object; more are padding."""
        batch = cls([], [], [])
        copies: dict[Any, list[int]] = {}  # by identity: the indices of its repeats
        came: Counter[int] = Counter()
        for request in requests:
            indices = copies.setdefault(_identity(request), [])
            repeat = min(came[id(request)], (request.repeats or 1) - 1)
            came[id(request)] += 1
            if repeat == len(indices):
                batch.repeats.append(repeat)
                indices.append(len(batch.requests))
                batch.requests.append(request)
            batch.sources.append(indices[repeat])
        return batch

    def spread(self, answers: Sequence[Any]) -> list[Any]:
        """An answer for each request of the call."""
        return [answers[index] for index in self.sources]


def _identity(request: Instance) -> Any:
    """A value that is equal for requests with the same answer in the same task."""
    if request.task_name is None or request.doc_id is None:
        return id(request)
    return request.task_name, request.doc_id, request.idx, repr(request.args)


def document_of(request: Instance) -> Any:
    """The name of a request's document: its file, if it is one, else its number."""
    return request.doc.get(FILE, request.doc_id) if isinstance(request.doc, dict) else request.doc_id


def name(request: Instance) -> str:
    """The name of a request for users."""
    if (document := document_of(request)) != request.doc_id:
        return str(document)
    return f"Request of task {request.task_name}, document {request.doc_id}"


def make_request(
    kind: str, doc: dict[str, Any], arguments: tuple[Any, ...], task: str, number: int, repeats: int = 1
) -> Instance:
    """A request for document `number` of a task."""
    from lm_eval.api.instance import Instance

    return Instance(kind, doc, arguments, idx=0, metadata=(task, number, repeats))


def random_order(requests: Sequence[Instance], seed: int) -> list[int]:
    """The indices of requests in an order that depends on `seed` and on each request alone."""
    texts = [f"{seed} {request.task_name} {request.args}" for request in requests]
    keys = [hashlib.sha256(text.encode()).digest() for text in texts]
    return sorted(range(len(requests)), key=lambda n: (keys[n], n))
