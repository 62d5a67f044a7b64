"""The expensive parts: windows under rules, samples, bounds. Each result is saved as it comes, and computed once.

Ranks share the windows (all rules of a window together, so that states are shared as in one process) and the samples of
each setting; `store.Journal` gives each rank the results of the others.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from lm_eval_duel import rules
from lm_eval_duel.core.scores import WindowScore
from lm_eval_duel.core.windows import Window
from lm_eval_duel.estimators.duel import DuelEstimator
from lm_eval_duel.estimators.elbo import Elbo
from lm_eval_duel.sweep import store
from lm_eval_duel.sweep.shared import RuleScore, Shared, SharedScore

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

    def under(self, windows: list[Window], follow: Sequence[rules.Rule], what: str) -> dict[str, list[RuleScore]]:
        """Score the windows under each rule, keyed by its text; a state that several rules reach is evaluated once."""
        journal = self._journal(windows)
        scores: dict[str, dict[int, RuleScore]] = {str(rule): {} for rule in follow}
        names = {self._key(rule): str(rule) for rule in follow}

        def enter(line: dict[str, Any]) -> None:
            for key, value in line["rules"].items():
                if key in names:
                    scores[names[key]][line["window"]] = RuleScore(*value)

        for line in journal.lines:
            enter(line)
        alone = [rule for rule in follow if not rule.state_only]
        groups = [[rule] for rule in alone] + [[rule for rule in follow if rule.state_only]]
        for group in groups:
            left = [rule for rule in group if len(scores[str(rule)]) < len(windows)]
            todo = [n for n in range(len(windows)) if any(n not in scores[str(rule)] for rule in left)]
            todo = self._deal(todo, windows)
            if not todo:
                continue
            if left[0].state_only:
                estimator: Shared | DuelEstimator = Shared(self.model.denoiser, left, **self.layout)
            else:
                estimator = DuelEstimator(self.model.denoiser, left[0], **self.layout)
            name = f"{what}, {left[0] if len(left) == 1 else f'{len(left)} rules'}"
            with self._bar(sum(len(windows[n].target) for n in todo) * len(left), name) as bar:
                for n, score in estimator.stream([windows[n] for n in todo]):
                    values = {self._key(rule): value for rule, value in zip(left, _values(score, left), strict=True)}
                    line = {"window": todo[n], "rules": values, "states": getattr(score, "states", 0)}
                    journal.add(line)
                    enter(line)
                    bar.nfe += sum(nfe for _, nfe, _ in line["rules"].values())
                    bar.set_postfix_str(f"NFE {bar.nfe:,}", refresh=False)
                    bar.update(len(windows[todo[n]].target) * len(left))
        for line in journal.merge():
            enter(line)
        return {text: [by_window[n] for n in range(len(windows))] for text, by_window in scores.items()}

    def sharing(self, windows: list[Window]) -> dict[str, int]:
        """The savings of sharing: steps of all state-only rules, and the number of states that were evaluated."""
        lines = [line for line in self._journal(windows).lines if line["states"]]
        steps = sum(nfe for line in lines for _, nfe, _ in line["rules"].values())
        return {"steps": steps, "evaluated": sum(line["states"] for line in lines)}

    def _key(self, rule: rules.Rule) -> str:
        """The rule's text; for a rule of the user's own, also the digest of its code."""
        spec = DuelEstimator(self.model.denoiser, rule, **self.layout).describe()
        return f"{rule} {spec['rule_code']}" if "rule_code" in spec else str(rule)

    def _journal(self, windows: list[Window]) -> store.Journal:
        return self._open("windows", {**self.base, "windows": store.of_windows(windows)})

    def _open(self, kind: str, about: dict[str, Any]) -> store.Journal:
        return store.Journal(self.folder, kind, about, self.ranks)

    def _deal(self, todo: list[int], windows: list[Window]) -> list[int]:
        """This rank's share of the windows `todo`: a step of a rule evaluates the row, up to one step a token."""
        return [todo[n] for n in self.ranks.deal([windows[n].length * len(windows[n].target) for n in todo])]

    def drawn(
        self, settings: Sequence[tuple[DuelEstimator, dict[str, str]]], context: list[int], count: int, length: int
    ) -> list[list[SampleRecord]]:
        """`count` samples of `length` tokens under each spec.

        A sample depends only on the spec, the draw seed and its number.
        """
        about = {"context": context, "length": length, "draw_seed": self.model.options.draw_seed}
        journals = [self._open("samples", {**spec, **about}) for _, spec in settings]
        for (duel, _), journal in zip(settings, journals, strict=True):
            self._draw(duel, journal, context, count, length)
        samples = []
        for journal in journals:
            journal.merge()
            records = {line["key"]: _sample(line) for line in journal.lines}
            samples.append([records[key] for key in range(count)])
        return samples

    def _draw(self, duel: DuelEstimator, journal: store.Journal, context: list[int], count: int, length: int) -> None:
        """Add this rank's share of the samples that are missing."""
        seed, text = self.model.options.draw_seed, self.model.text
        finished = {line["key"] for line in journal.lines}
        todo = [key for key in range(count) if key not in finished]
        todo = [todo[n] for n in self.ranks.deal([1] * len(todo))]
        if not todo:
            return
        with self._bar(len(todo) * length, f"samples of {duel.rule}") as bar:
            stream = duel.stream_samples([context] * len(todo), length, suffix=tuple(text.suffix), seed=seed, keys=todo)
            for n, sample in stream:
                line = {"key": todo[n], "tokens": sample.tokens, "log_prob": sample.log_prob, "nfe": sample.nfe}
                journal.add(line | {"text": text.tokenizer.decode(sample.tokens)})
                bar.nfe += sample.nfe
                bar.set_postfix_str(f"NFE {bar.nfe:,}", refresh=False)
                bar.update(length)

    def bounds(self, elbo: Elbo, windows: list[Window]) -> list[tuple[float, float | None]]:
        """The ELBO of each window in nats, with its Monte Carlo error."""
        journal = self._open("elbo", {**self.base, **elbo.describe(), "windows": store.of_windows(windows)})
        finished = {line["window"] for line in journal.lines}
        todo = self._deal([n for n in range(len(windows)) if n not in finished], windows)
        if todo:
            with self._bar(sum(len(windows[n].target) for n in todo), f"elbo, {elbo.samples} draws") as bar:
                for n, bound in elbo.stream([windows[n] for n in todo]):
                    journal.add({"window": todo[n], "log_prob": bound.log_prob, "stderr": bound.stderr})
                    bar.update(len(windows[todo[n]].target))
        journal.merge()
        bounds = {line["window"]: (line["log_prob"], line["stderr"]) for line in journal.lines}
        return [bounds[n] for n in range(len(windows))]

    def _bar(self, total: int, what: str) -> _Bar:
        """The progress of this rank, shown by the first."""
        return _Bar(total=total, desc=what, unit="tok", disable=self.ranks.rank != 0)


def _values(score: WindowScore, left: Sequence[rules.Rule]) -> list[tuple[float, int, int | None]]:
    """(log-probability, NFE, near ties) of each rule."""
    scores = [score.rules[str(rule)] for rule in left] if isinstance(score, SharedScore) else [score]
    return [(score.log_prob, score.nfe, score.near_ties) for score in scores]


def _sample(line: dict[str, Any]) -> SampleRecord:
    return SampleRecord(tuple(line["tokens"]), line["log_prob"], line["nfe"])


class _Bar(tqdm):
    nfe = 0
