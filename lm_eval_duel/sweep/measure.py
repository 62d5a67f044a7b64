"""What costs time: windows under rules, samples, bounds. Each is kept as it comes, and is not computed again."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from lm_eval_duel import rules
from lm_eval_duel.engine.results import WindowScore
from lm_eval_duel.engine.windows import Window
from lm_eval_duel.estimators.duel import Duel
from lm_eval_duel.estimators.elbo import Elbo
from lm_eval_duel.sweep import store
from lm_eval_duel.sweep.shared import RuleScore, Shared, SharedScore

if TYPE_CHECKING:
    from lm_eval_duel.harness.lm import DuelMDM


@dataclasses.dataclass(frozen=True)
class SampleRecord:
    """A text that was drawn, and its log-probability under the spec that drew it."""

    tokens: tuple[int, ...]
    log_prob: float
    nfe: int


class Measuring:
    """The network of `model`, and the folder where its numbers are kept. `base`: the spec without a rule."""

    def __init__(self, folder: Path, model: DuelMDM, base: dict[str, str]):
        self.folder, self.model, self.base = folder, model, base
        options, estimator = model.options, model.estimator
        self.rows = {"batch_size": options.rows, "max_batch_size": options.max_batch_size}
        self.place = {"block": estimator.block, "grid": estimator.grid, **self.rows}

    def under(self, windows: list[Window], follow: Sequence[rules.Rule], what: str) -> dict[str, list[RuleScore]]:
        """The windows under each rule, by its text; a state that several rules meet is evaluated once."""
        journal = self._journal(windows)
        found: dict[str, dict[int, RuleScore]] = {str(rule): {} for rule in follow}
        kept_as = {self._key(rule): str(rule) for rule in follow}

        def enter(line: dict[str, Any]) -> None:
            for key, value in line["rules"].items():
                if key in kept_as:
                    found[kept_as[key]][line["window"]] = RuleScore(*value)

        for line in journal.lines:
            enter(line)
        alone = [rule for rule in follow if not rule.state_only]
        groups = [[rule] for rule in alone] + [[rule for rule in follow if rule.state_only]]
        for group in groups:
            left = [rule for rule in group if len(found[str(rule)]) < len(windows)]
            todo = [n for n in range(len(windows)) if any(n not in found[str(rule)] for rule in left)]
            if not todo:
                continue  # all of it is there
            if left[0].state_only:
                one: Shared | Duel = Shared(self.model.denoiser, left, **self.place)
            else:
                one = Duel(self.model.denoiser, left[0], **self.place)
            name = f"{what}, {left[0] if len(left) == 1 else f'{len(left)} rules'}"
            with _bar(sum(len(windows[n].target) for n in todo) * len(left), name) as bar:
                for n, scored in one.stream([windows[n] for n in todo]):
                    values = {self._key(rule): value for rule, value in zip(left, _values(scored, left), strict=True)}
                    line = {"window": todo[n], "rules": values, "states": getattr(scored, "states", 0)}
                    journal.add(line)
                    enter(line)
                    bar.nfe += sum(nfe for _, nfe, _ in line["rules"].values())
                    bar.set_postfix_str(f"NFE {bar.nfe:,}", refresh=False)
                    bar.update(len(windows[todo[n]].target) * len(left))
        return {text: [each[n] for n in range(len(windows))] for text, each in found.items()}

    def sharing(self, windows: list[Window]) -> dict[str, int]:
        """What sharing saved: steps of all rules that look at the state alone, and states that were evaluated."""
        lines = [line for line in self._journal(windows).lines if line["states"]]
        steps = sum(nfe for line in lines for _, nfe, _ in line["rules"].values())
        return {"steps": steps, "evaluated": sum(line["states"] for line in lines)}

    def _key(self, rule: rules.Rule) -> str:
        """A rule's text, and of a rule of the user's own its code's digest."""
        said = Duel(self.model.denoiser, rule, **self.place).describe()
        return f"{rule} {said['rule_code']}" if "rule_code" in said else str(rule)

    def _journal(self, windows: list[Window]) -> store.Journal:
        return store.Journal(self.folder, "windows", {**self.base, "windows": store.of_windows(windows)})

    def drawn(
        self, duel: Duel, spec: dict[str, str], context: list[int], count: int, length: int
    ) -> list[SampleRecord]:
        """`count` samples of `length` tokens; a sample depends on the spec, the draw seed and its number alone."""
        seed, text = self.model.options.draw_seed, self.model.text
        about = {**spec, "context": context, "length": length, "draw_seed": seed}
        journal = store.Journal(self.folder, "samples", about)
        found = {line["key"]: _sample(line) for line in journal.lines}
        todo = [key for key in range(count) if key not in found]
        if todo:
            with _bar(len(todo) * length, f"samples of {duel.rule}") as bar:
                samples = duel.stream_samples(
                    [context] * len(todo), length, suffix=tuple(text.suffix), seed=seed, keys=todo
                )
                for n, one in samples:
                    line = {"key": todo[n], "tokens": one.tokens, "log_prob": one.log_prob, "nfe": one.nfe}
                    journal.add(line | {"text": text.tokenizer.decode(one.tokens)})
                    found[todo[n]] = _sample(line)
                    bar.nfe += one.nfe
                    bar.set_postfix_str(f"NFE {bar.nfe:,}", refresh=False)
                    bar.update(length)
        return [found[key] for key in range(count)]

    def bounds(self, elbo: Elbo, windows: list[Window]) -> list[tuple[float, float | None]]:
        """The ELBO of each window in nats, and its Monte Carlo error."""
        about = {**self.base, **elbo.describe(), "windows": store.of_windows(windows)}
        journal = store.Journal(self.folder, "elbo", about)
        found = {line["window"]: (line["log_prob"], line["stderr"]) for line in journal.lines}
        todo = [n for n in range(len(windows)) if n not in found]
        if todo:
            with _bar(sum(len(windows[n].target) for n in todo), f"elbo, {elbo.samples} draws") as bar:
                for n, bound in elbo.stream([windows[n] for n in todo]):
                    found[todo[n]] = (bound.log_prob, bound.stderr)
                    journal.add({"window": todo[n], "log_prob": bound.log_prob, "stderr": bound.stderr})
                    bar.update(len(windows[todo[n]].target))
        return [found[n] for n in range(len(windows))]


def _values(scored: WindowScore, left: Sequence[rules.Rule]) -> list[tuple[float, int, int | None]]:
    """(nats, NFE, close picks) of each rule."""
    found = [scored.rules[str(rule)] for rule in left] if isinstance(scored, SharedScore) else [scored]
    return [(one.log_prob, one.nfe, one.near_ties) for one in found]


def _sample(line: dict[str, Any]) -> SampleRecord:
    return SampleRecord(tuple(line["tokens"]), line["log_prob"], line["nfe"])


class _Bar(tqdm):
    nfe = 0


def _bar(total: int, what: str) -> _Bar:
    return _Bar(total=total, desc=what, unit="tok")
