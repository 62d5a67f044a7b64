"""The expensive parts: windows under rules, samples, their judges, bounds. Each result is saved, and computed once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from lm_eval_duel.core.windows import Window
from lm_eval_duel.estimators.base import Value
from lm_eval_duel.estimators.duel import DuelEstimator
from lm_eval_duel.estimators.elbo import Elbo
from lm_eval_duel.rules import Rule
from lm_eval_duel.sweep import judges
from lm_eval_duel.sweep.arguments import distinct
from lm_eval_duel.sweep.judges import Judged, Scorer, Texts
from lm_eval_duel.sweep.shared import RuleScore, Shared, SharedScore
from lm_eval_duel.sweep.store import Journal, Results, ids_digest, windows_digest

if TYPE_CHECKING:
    from lm_eval_duel.harness.lm import DuelMDM


class Sample(NamedTuple):
    """A sample, and its log-probability under the spec that drew it. `text` is for whoever reads the file."""

    tokens: tuple[int, ...]
    log_prob: float
    nfe: int
    text: str


class Measuring:
    """Runs the network of `model` and keeps the results in `folder`. `spec`: that of the model without a rule.

    Ranks share windows (all rules of a window together, so that states are shared as in one process), samples and the
    judges' work.
    """

    def __init__(self, folder: Path, model: DuelMDM):
        self.folder, self.model = folder, model
        self.spec = {key: value for key, value in model.spec.items() if key != "rule"}
        self.rows = {"batch_size": model.options.rows, "max_batch_size": model.options.max_batch_size}
        self.layout = {"block": model.estimator.block, "grid": model.estimator.grid, **self.rows}

    def duel(self, rule: Rule) -> DuelEstimator:
        return DuelEstimator(self.model.denoiser, rule, **self.layout)

    def key(self, rule: Rule) -> str:
        """The rule's text, with the digests of the files that it reads and of code of the user's own."""
        own = self.duel(rule).describe()
        return " ".join([str(rule), *(own[entry] for entry in ("rule_files", "rule_code") if entry in own)])

    def under(self, windows: Sequence[Window], follow: Sequence[Rule], what: str) -> list[list[RuleScore]]:
        """The scores of the windows under each rule; a state that several rules reach is evaluated once."""
        journal, keys = self.windows(windows), {str(rule): self.key(rule) for rule in follow}

        def scored(left: list[Rule], mine: list[int]) -> Iterator[Results]:
            shared = left[0].state_only
            estimator = Shared(self.model.denoiser, left, **self.layout) if shared else self.duel(left[0])
            for i, window in estimator.stream([windows[n] for n in mine]):
                of_rules = window.rules if isinstance(window, SharedScore) else {str(left[0]): window}
                yield {
                    (keys[rule], mine[i]): [score.log_prob, score.nfe, score.near_ties, getattr(score, "states", None)]
                    for rule, score in of_rules.items()
                }

        alone = [[rule] for rule in follow if not rule.state_only]
        for group in [*alone, [rule for rule in follow if rule.state_only]]:
            missing = [(r, n) for n in range(len(windows)) for r in group if (keys[str(r)], n) not in journal.results]
            left, todo = distinct(rule for rule, _ in missing), sorted({n for _, n in missing})
            name = f"{what}, {left[0] if len(left) == 1 else f'{len(left)} rules'}" if left else ""
            journal.complete(todo, partial(scored, left), name, _steps(windows, todo))
        return [[RuleScore(*journal.results[key, n]) for n in range(len(windows))] for key in keys.values()]

    def sharing(self, windows: Sequence[Window]) -> dict[str, int]:
        """The savings of sharing: steps of all state-only rules, and the number of states that were evaluated."""
        scores = [RuleScore(*score) for score in self.windows(windows).results.values()]
        shared = [score for score in scores if score.states is not None]
        return {"steps": sum(score.nfe for score in shared), "evaluated": sum(score.states for score in shared)}

    def drawn(self, follow: Sequence[Rule], context: list[int], count: int, length: int) -> list[list[Sample]]:
        """`count` samples of `length` tokens under each rule.

        A sample depends only on the spec, the draw seed and its number.
        """
        seed, text, rules = self.model.options.draw_seed, self.model.text, {self.key(rule): rule for rule in follow}
        journal = self._journal("samples", {**self.spec, "context": context, "length": length, "draw_seed": seed})

        def draw(mine: list[tuple[str, int]]) -> Iterator[Results]:
            for key, items in groupby(mine, key=lambda item: item[0]):
                numbers = [n for _, n in items]
                contexts, suffix = [context] * len(numbers), tuple(text.suffix)
                stream = self.duel(rules[key]).stream_samples(contexts, length, suffix=suffix, seed=seed, keys=numbers)
                for i, sample in stream:
                    yield {
                        (key, numbers[i]): [
                            sample.tokens,
                            sample.log_prob,
                            sample.nfe,
                            text.tokenizer.decode(sample.tokens),
                        ]
                    }

        todo = [(key, n) for key in rules for n in range(count) if (key, n) not in journal.results]
        results = journal.complete(todo, draw, "samples")
        return [[Sample(tuple(ids), *more) for ids, *more in (results[key, n] for n in range(count))] for key in rules]

    def judged(self, scorer: Scorer, groups: Sequence[Texts]) -> list[list[Judged]]:
        """Each text of each group under the scorer."""
        journal = self._journal("judged", {"scorer": scorer.fingerprint, "text": self.model.text.fingerprint})
        texts = {ids_digest(ids): ids for group in groups for ids in group}

        def judge(mine: list[str]) -> Iterator[Results]:
            for n, judged in scorer.stream([texts[name] for name in mine]):
                yield {mine[n]: judged}

        todo = [name for name in texts if name not in journal.results]
        results = journal.complete(todo, judge, f"texts under {scorer.name}")
        return [[Judged(*results[ids_digest(ids)]) for ids in group] for group in groups]

    def mauve(self, groups: Sequence[Texts], references: Texts, model: str, length: int) -> list[float]:
        """MAUVE of each group of texts against the references."""
        journal = self._journal("mauve", {"references": ids_digest(references), "model": model, "length": length})
        texts_of = {ids_digest(group): group for group in groups}

        def compute(mine: list[str]) -> Iterator[Results]:
            for name in mine:
                texts = [
                    [judges.decode(self.model.text, ids) for ids in group] for group in (texts_of[name], references)
                ]
                yield {name: judges.mauve(*texts, model, length, self.model.device)}

        results = journal.complete([name for name in texts_of if name not in journal.results], compute, "MAUVE")
        return [results[ids_digest(group)] for group in groups]

    def bounds(self, elbo: Elbo, windows: Sequence[Window]) -> list[Value]:
        """The ELBO of each window in nats, with its Monte Carlo error."""
        journal = self._journal("elbo", {**self.spec, **elbo.describe(), "windows": windows_digest(windows)})

        def score(mine: list[int]) -> Iterator[Results]:
            for i, bound in elbo.stream([windows[n] for n in mine]):
                yield {mine[i]: [bound.log_prob, bound.stderr]}

        todo = [n for n in range(len(windows)) if n not in journal.results]
        results = journal.complete(todo, score, f"elbo, {elbo.samples} draws", _steps(windows, todo))
        return [Value(*results[n]) for n in range(len(windows))]

    def windows(self, windows: Sequence[Window]) -> Journal:
        return self._journal("windows", {**self.spec, "windows": windows_digest(windows)})

    def _journal(self, kind: str, about: Mapping[str, Any]) -> Journal:
        return Journal(self.folder, kind, about, self.model.ranks)


def _steps(windows: Sequence[Window], todo: Sequence[int]) -> list[int]:
    """The costs of windows: a step of a rule evaluates the row, up to one step a token."""
    return [windows[n].length * len(windows[n].target) for n in todo]
