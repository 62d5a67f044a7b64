"""The class of this package's tasks: a cached request is answered only if it belongs to the task's own document."""

from __future__ import annotations

from typing import Any

from lm_eval.api.task import ConfigurableTask

from lm_eval_duel.errors import DuelError


class GuardedTask(ConfigurableTask):
    """A task whose requests come from its own documents, also with `--cache_requests`.

    The harness keeps requests under the name of their task alone. Another file, tokenizer or option would have its
    answers divided by the units of other documents.
    """

    def __init__(self, config: dict[str, Any]):
        without_class = dict(config)
        without_class.pop("class", None)
        super().__init__(config=without_class)

    def build_all_requests(
        self,
        *,
        limit: int | None = None,
        samples: list[int] | None = None,
        rank: int = 0,
        world_size: int = 1,
        cache_requests: bool = False,
        **options: Any,
    ) -> None:
        """Make the requests, or take them from the harness's cache; raises DuelError if those are not this task's."""
        chosen = {"limit": limit, "samples": samples, "rank": rank, "world_size": world_size}
        super().build_all_requests(**chosen, cache_requests=cache_requests, **options)
        if not cache_requests:
            return
        cached: dict[int, list[Any]] = {}
        for request in self.instances:
            cached.setdefault(request.doc_id, []).append(request.doc)
        for number, document in self.doc_iterator(**chosen):
            documents = cached.get(number, [])
            if not documents or any(other != document for other in documents):
                raise DuelError(
                    f"The request cache has no request, or one of another text, for document {number} of task "
                    f"{self.config.task}: it was written for other data or metadata (files, tokenizer, length, ...) "
                    "than this run's. Run once with --cache_requests refresh."
                )
