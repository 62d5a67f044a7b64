"""Finished work on disk: results by key, as lines of JSON that the ranks of a launch share."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tqdm import tqdm

from lm_eval_duel import journal
from lm_eval_duel.core.windows import Window
from lm_eval_duel.fingerprint import digest
from lm_eval_duel.harness.distributed import Ranks

Results = Mapping[Any, Any]  # key (a number, a text, or a tuple of these) -> result


class Journal:
    """The results of one kind of work in `folder`. All ranks open it together, and share what they add.

    `about` is everything that defines the numbers; a different `about` has different files. Each rank writes to a file
    of its own. All files are read when the journal is opened, by any number of ranks on any number of machines.
    """

    def __init__(self, folder: Path, kind: str, about: Mapping[str, object], ranks: Ranks):
        self.ranks, stem = ranks, f"{kind}_{digest({**about, 'lines': '[key, result]'})}"
        self.path = folder / "parts" / f"{stem}.rank{ranks.rank}.jsonl"
        files = sorted(self.path.parent.glob(f"{stem}.*"))  # on this machine
        self.results: dict[Any, Any] = {}
        self._share([line for file in files for line in file.read_text(encoding="utf-8").split("\n")[:-1]])

    def complete(
        self,
        todo: Sequence[Any],
        compute: Callable[[list[Any]], Iterable[Results]],
        what: str,
        costs: Sequence[float] | None = None,
    ) -> Results:
        """All results. What is to do is computed, each rank its share, and saved as it comes from `compute`.

        `costs`: of each thing to do, to share them equally. The first rank shows its progress with `what`.
        """
        mine = [todo[n] for n in self.ranks.deal(costs or [1] * len(todo))]
        added: list[str] = []
        if mine:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            file = journal.Journal(self.path)
            with tqdm(total=len(mine), desc=what, disable=self.ranks.rank != 0) as bar:
                for results in compute(mine):
                    lines = [json.dumps(item) for item in results.items()]
                    file.write(lines)
                    added += lines
                    bar.update()
        self._share(added)
        return self.results

    def _share(self, lines: Sequence[str]) -> None:
        for of_rank in self.ranks.all_gather_object(lines):
            for key, result in map(json.loads, of_rank):
                self.results[tuple(key) if isinstance(key, list) else key] = result


def windows_digest(windows: Sequence[Window]) -> str:
    """A digest of windows."""
    return digest({str(n): (w.context, w.target, w.suffix, w.tail) for n, w in enumerate(windows)})


def ids_digest(ids: object) -> str:
    """A digest of the ids of a text, or of several."""
    return digest({"ids": ids})
