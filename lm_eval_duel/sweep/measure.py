"""The expensive parts: windows under rules, samples, their judges, bounds. Each result is saved, and computed once.

Ranks share the windows (all rules of a window together, so that states are shared as in one process), the samples and
the judges' work; `store.Journal` gives each rank the results of the others.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from lm_eval_duel import rules
from lm_eval_duel.core.windows import Window
from lm_eval_duel.estimators.duel import DuelEstimator
from lm_eval_duel.estimators.elbo import Elbo
from lm_eval_duel.fingerprint import digest
from lm_eval_duel.sweep.judges import Judged, Scorer, Texts, decode, mauve
from lm_eval_duel.sweep.shared import RuleScore, Shared, SharedScore
from lm_eval_duel.sweep.store import Journal, Line, of_windows

if TYPE_CHECKING:
    from lm_eval_duel.harness.lm import DuelMDM


@dataclasses.dataclass(frozen=True)
class SampleRecord:
    """A sample, and its log-probability under the spec that drew it."""

    tokens: tuple[int, ...]
    log_prob: float
    nfe: int


class Measuring:
    """Runs the network of `model` and keeps the results in `folder`. `base`: the spec without a rule."""

    def __init__(self, folder: Path, model: DuelMDM, base: dict[str, str]):
        self.folder, self.model, self.base, self.ranks = folder, model, base, model.ranks
        options, estimator = model.options, model.estimator
        self.rows = {"batch_size": options.rows, "max_batch_size": options.max_batch_size}
        self.layout = {"block": estimator.block, "grid": estimator.grid, **self.rows}

    def duel(self, rule: rules.Rule) -> DuelEstimator:
        return DuelEstimator(self.model.denoiser, rule, **self.layout)

    def key(self, rule: rules.Rule) -> str:
        """The rule's text; for a rule of the user's own, also the digest of its code."""
        spec = self.duel(rule).describe()
        return f"{rule} {spec['rule_code']}" if "rule_code" in spec else str(rule)

    def under(self, windows: list[Window], follow: Sequence[rules.Rule], what: str) -> dict[str, list[RuleScore]]:
        """Score the windows under each rule, keyed by its text; a state that several rules reach is evaluated once."""
        journal = self._windows(windows)
        keys = {str(rule): self.key(rule) for rule in follow}
        known = {(key, line["window"]) for line in journal.lines for key in line["rules"]}

        def score(left: list[rules.Rule], mine: list[int]) -> Iterator[Line]:
            estimator = Shared(self.model.denoiser, left, **self.layout) if left[0].state_only else self.duel(left[0])
            for n, scored in estimator.stream([windows[n] for n in mine]):
                found = scored.rules if isinstance(scored, SharedScore) else {str(left[0]): scored}
                values = {keys[text]: (one.log_prob, one.nfe, one.near_ties) for text, one in found.items()}
                yield {"window": mine[n], "rules": values, "states": getattr(scored, "states", 0)}

        alone = [[rule] for rule in follow if not rule.state_only]
        for group in [*alone, [rule for rule in follow if rule.state_only]]:
            left = [r for r in group if any((keys[str(r)], n) not in known for n in range(len(windows)))]
            todo = [n for n in range(len(windows)) if any((keys[str(r)], n) not in known for r in left)]
            name = f"{what}, {left[0] if len(left) == 1 else f'{len(left)} rules'}" if left else ""
            self._each(journal, todo, _steps(windows, todo), name, partial(score, left))
        scores = {(key, line["window"]): value for line in journal.all() for key, value in line["rules"].items()}
        return {text: [RuleScore(*scores[key, n]) for n in range(len(windows))] for text, key in keys.items()}

    def sharing(self, windows: list[Window]) -> dict[str, int]:
        """The savings of sharing: steps of all state-only rules, and the number of states that were evaluated."""
        lines = [line for line in self._windows(windows).lines if line["states"]]
        return {"steps": sum(map(_nfe, lines)), "evaluated": sum(line["states"] for line in lines)}

    def drawn(
        self, follow: Sequence[rules.Rule], context: list[int], count: int, length: int
    ) -> dict[str, list[SampleRecord]]:
        """`count` samples of `length` tokens under each rule, keyed by its text.

        A sample depends only on the spec, the draw seed and its number.
        """
        seed, text = self.model.options.draw_seed, self.model.text
        journal = self._journal("samples", {**self.base, "context": context, "length": length, "draw_seed": seed})
        finished = {(line["rule"], line["number"]) for line in journal.lines}

        def draw(rule: rules.Rule, mine: list[int]) -> Iterator[Line]:
            contexts = [context] * len(mine)
            stream = self.duel(rule).stream_samples(contexts, length, suffix=tuple(text.suffix), seed=seed, keys=mine)
            for n, sample in stream:
                line = {"rule": self.key(rule), "number": mine[n], "tokens": sample.tokens, "nfe": sample.nfe}
                yield line | {"log_prob": sample.log_prob, "text": text.tokenizer.decode(sample.tokens)}

        for rule in follow:
            todo = [n for n in range(count) if (self.key(rule), n) not in finished]
            self._each(journal, todo, [1] * len(todo), f"samples of {rule}", partial(draw, rule))
        samples = {
            (line["rule"], line["number"]): SampleRecord(tuple(line["tokens"]), line["log_prob"], line["nfe"])
            for line in journal.all()
        }
        return {str(rule): [samples[self.key(rule), n] for n in range(count)] for rule in follow}

    def judged(self, scorer: Scorer, groups: Sequence[Texts]) -> list[list[Judged]]:
        """Each text of each group under the scorer."""
        journal = self._journal("judged", {"scorer": scorer.fingerprint, "text": self.model.text.fingerprint})
        finished = {line["ids"] for line in journal.lines}

        def judge(texts: Mapping[str, Sequence[int]], mine: list[str]) -> Iterator[Line]:
            for name, judged in zip(mine, scorer([texts[name] for name in mine]), strict=True):
                yield {"ids": name, "judged": judged}

        for group in groups:
            texts = {_digest(ids): ids for ids in group}
            todo = [name for name in texts if name not in finished]
            self._each(journal, todo, [1] * len(todo), f"texts under {scorer.name}", partial(judge, texts))
            finished.update(todo)
        found = {line["ids"]: Judged(*line["judged"]) for line in journal.all()}
        return [[found[_digest(ids)] for ids in group] for group in groups]

    def mauve(self, groups: Sequence[Texts], references: Texts, model: str, length: int) -> list[float]:
        """MAUVE of each group of texts against the references."""
        journal = self._journal("mauve", {"references": _digest(references), "model": model, "length": length})
        finished = {line["ids"] for line in journal.lines}
        every = {_digest(group): group for group in groups}

        def compute(mine: list[str]) -> Iterator[Line]:
            for name in mine:
                texts = [[decode(self.model.text, ids) for ids in group] for group in (every[name], references)]
                yield {"ids": name, "mauve": mauve(*texts, model, length, self.model.device)}

        todo = [name for name in every if name not in finished]
        self._each(journal, todo, [1] * len(todo), "MAUVE", compute)
        found = {line["ids"]: line["mauve"] for line in journal.all()}
        return [found[_digest(group)] for group in groups]

    def bounds(self, elbo: Elbo, windows: list[Window]) -> list[tuple[float, float | None]]:
        """The ELBO of each window in nats, with its Monte Carlo error."""
        journal = self._journal("elbo", {**self.base, **elbo.describe(), "windows": of_windows(windows)})
        finished = {line["window"] for line in journal.lines}
        todo = [n for n in range(len(windows)) if n not in finished]

        def score(mine: list[int]) -> Iterator[Line]:
            for n, bound in elbo.stream([windows[n] for n in mine]):
                yield {"window": mine[n], "log_prob": bound.log_prob, "stderr": bound.stderr}

        self._each(journal, todo, _steps(windows, todo), f"elbo, {elbo.samples} draws", score)
        bounds = {line["window"]: (line["log_prob"], line["stderr"]) for line in journal.all()}
        return [bounds[n] for n in range(len(windows))]

    # ------------------------------------------------------------ journals

    def _windows(self, windows: list[Window]) -> Journal:
        return self._journal("windows", {**self.base, "windows": of_windows(windows)})

    def _journal(self, kind: str, about: Mapping[str, Any]) -> Journal:
        return Journal(self.folder, kind, about, self.ranks)

    def _each(
        self, journal: Journal, todo: list[Any], costs: list[int], what: str, compute: Callable[..., Iterable[Line]]
    ) -> None:
        """Compute and save this rank's share of what is to do. The first rank shows its progress."""
        mine = [todo[n] for n in self.ranks.deal(costs)]
        if not mine:
            return
        nfe = 0
        with tqdm(total=len(mine), desc=what, disable=self.ranks.rank != 0) as bar:
            for line in compute(mine):
                journal.add(line)
                nfe += _nfe(line)
                bar.set_postfix_str(f"NFE {nfe:,}" if nfe else "", refresh=False)
                bar.update()


def _steps(windows: list[Window], todo: list[int]) -> list[int]:
    """The costs of windows: a step of a rule evaluates the row, up to one step a token."""
    return [windows[n].length * len(windows[n].target) for n in todo]


def _digest(ids: object) -> str:
    return digest({"ids": ids})


def _nfe(line: Line) -> int:
    return line.get("nfe", 0) + sum(nfe for _, nfe, _ in line.get("rules", {}).values())
