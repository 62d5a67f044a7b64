"""What differs between the releases of lm-eval: 0.4.13, and 0.5 as of its development release 0.5.0.dev1.

                                0.4.13                               0.5
    a whole text's arguments    (text,)                              ("", text)
    its answer                  log p                                (log p, False)
    fields of a request         metadata=(task, document, repeats)   task_name=, doc_id=, repeats=
    a task of a group           TASK, in one group only              GROUP::TASK in results files, once for each group

The shape of a request tells which answer is expected, so no version number is read. Inside this package a whole text
is (text,) and its answer is a number: response caches, orders and traces are the same under both releases.

Requests name the task alone in both. `report.task.keys` reads the names of groups, and `requests.Batch` scores a task
of two groups once. What 0.5.0.dev1 lost is put back by patches.py.

Two more differences are handled in tasks/, which may not import this module: metrics.log_likelihood reads both answers,
and infilling.py takes its base classes by output type (0.4.13 has one class for all).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lm_eval.api.instance import Instance

WHOLE_TEXT = "loglikelihood_rolling"


def arguments(request: Instance) -> tuple[Any, ...]:
    """The arguments of a request; of a whole text, the text alone."""
    return request.args[-1:] if request.request_type == WHOLE_TEXT else request.args


def answer(request: Instance, log_prob: float) -> float | tuple[float, bool]:
    """The answer to a request for a whole text, as the harness that made the request expects it."""
    return log_prob if len(request.args) == 1 else (log_prob, False)


def request(
    kind: str, doc: dict[str, Any], arguments: tuple[Any, ...], task: str, number: int, repeats: int = 1
) -> Instance:
    """A request of the installed release, for document `number` of a task."""
    from lm_eval.api.instance import Instance

    metadata = (task, number, repeats)  # 0.5 reads it too, but requires the names of task and document
    return Instance(kind, doc, arguments, idx=0, task_name=task, doc_id=number, metadata=metadata)
