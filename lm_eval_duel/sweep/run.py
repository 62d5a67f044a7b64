"""One sweep: a network and a task's text, loaded once; text under all rules, samples of all settings, their judges.

Ranks of one launch do each of these together and wait for each other before the next. Windows and samples are dealt out
(`measure`), and of the judges' work whole settings: their samples stay one batch, and MAUVE is of all of them.
"""

from __future__ import annotations

import argparse
import logging
import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lm_eval_duel import fingerprint, signals
from lm_eval_duel.core.windows import Window
from lm_eval_duel.demo import BUNDLED
from lm_eval_duel.errors import DuelError
from lm_eval_duel.estimators.base import Value
from lm_eval_duel.estimators.duel import DuelEstimator
from lm_eval_duel.estimators.elbo import Elbo
from lm_eval_duel.harness.lm import DuelMDM
from lm_eval_duel.harness.totals import Total
from lm_eval_duel.rates import perplexity, ratio
from lm_eval_duel.sweep import corpus, judges, metrics, store
from lm_eval_duel.sweep.arguments import Setting, cap, capped
from lm_eval_duel.sweep.measure import Measuring, SampleRecord
from lm_eval_duel.sweep.shared import RuleScore

log = logging.getLogger("lm_eval.duel_mdm")  # lm-eval prints its own loggers only

VERSION = 2  # raised when a release changes the entries of a setting


class Sweep:
    """The network and the text of a sweep. Raises DuelError for wrong options, if possible before weights are read."""

    def __init__(self, options: argparse.Namespace):
        self.options, self.folder = options, Path(options.out)
        corpus.show_log()
        metadata = {**options.model_args, **options.metadata}
        self.corpus = corpus.load(options.tasks, metadata, options.limit, options.include_path)
        self.model = model = DuelMDM(**options.model_args, batch_size=options.batch_size, device=options.device)
        self.ranks = model.ranks
        if model.denoiser.attention == "causal":
            raise DuelError("An autoregressive model has one order: there is nothing to sweep.")
        self.measuring = Measuring(self.folder, model, self.spec_without_rule())
        self.windows = self.corpus.windows(model.text)
        self.settings, self.notes = capped(options.settings, model.estimator.block)
        for setting in self.settings:
            self.duel(setting)  # raises for a rule that this network cannot follow
        self.scorer = judges.Scorer(options.scorer, model.text, str(model.device)) if options.scorer else None
        if self.scorer and self.ranks.rank == 0:
            log.info("generative perplexity under %s, %s", options.scorer, self.scorer.scored_text)
        self.context = model.text.prompt("", options.length) if options.samples else []
        if options.samples and (count := len(self._pieces())) < options.samples:
            self.notes.append(
                f"The task's own text is {count} pieces of {options.length} tokens, for {options.samples} samples: "
                "fewer pieces have more distinct n-grams (and MAUVE has fewer references)."
            )

    def duel(self, setting: Setting) -> DuelEstimator:
        return DuelEstimator(self.model.denoiser, setting.rule, **self.measuring.layout)

    def spec(self, setting: Setting) -> dict[str, str]:
        """The spec of this rule, as in `lm_eval`."""
        return {**self.model.spec, **{key: str(value) for key, value in self.duel(setting).describe().items()}}

    def spec_without_rule(self) -> dict[str, str]:
        return {key: value for key, value in self.model.spec.items() if key != "rule"}

    # ------------------------------------------------------------ the whole

    def run(self) -> dict[str, Any]:
        """Run everything; returns the content of the report."""
        began = time.perf_counter()
        options = self.options
        kept = [store.finished(self.folder, self.inputs(setting)) for setting in self.settings]
        kept = self.ranks.all_gather_object(kept)[0]  # the files change as soon as a rank is ahead
        left = [setting for setting, done in zip(self.settings, kept, strict=True) if done is None]
        scored = self.measuring.under(self.windows, [setting.rule for setting in left], f"text of {options.tasks}")
        drawn = self._drawn(left)
        new, reference = self._described(left, scored, drawn)
        rows = [
            done | self._named(setting) if done else new[str(setting.rule)]
            for setting, done in zip(self.settings, kept, strict=True)
        ]
        tokens, units = sum(len(window.target) for window in self.windows), self.corpus.units
        report = {
            "version": VERSION,
            "configuration": self.configuration,
            "model": self.model.options.pretrained or BUNDLED,
            "task": {"name": options.tasks, "limit": options.limit, "documents": len(self.corpus.texts)}
            | {"windows": len(self.windows), "tokens": tokens, **units},
            "block": self.model.estimator.block,
            "samples": {"count": options.samples, "length": options.length} if options.samples else None,
            "scorer": options.scorer,
            "spec": self.spec_without_rule(),
            "settings": rows,
            "reference": reference,
            "kl": self._kl(drawn),
            "elbo": self._elbo(),
            "shared": self.measuring.sharing(self.windows),
            "notes": self.notes + self._judges_notes([*(row["samples"] for row in rows), reference]),
        }
        return report | {"seconds": time.perf_counter() - began}

    def inputs(self, setting: Setting) -> dict[str, object]:
        """Everything that a finished setting depends on."""
        options = self.options
        inputs = {"version": VERSION, "spec": fingerprint.digest(self.spec(setting))}
        inputs |= {"text": store.of_windows(self.windows)}
        inputs |= {"task": options.tasks, "limit": options.limit, "units": self.corpus.units}
        if options.samples:
            inputs |= {"samples": options.samples, "length": options.length, "draw_seed": self.model.options.draw_seed}
            inputs |= {
                "scorer": self.scorer and self.scorer.fingerprint,
                "mauve": options.mauve and options.mauve_model,
            }
        return inputs

    @property
    def configuration(self) -> str:
        """A digest of everything that the report depends on."""
        options = self.options
        settings = {str(n): self.inputs(setting) for n, setting in enumerate(self.settings)}
        return fingerprint.digest(
            {**settings, "kl": sorted(options.pairs), "all": options.kl == "all", "elbo": options.elbo}
        )

    def _described(
        self, left: list[Setting], scored: dict[str, list[RuleScore]], drawn: dict[str, list[SampleRecord]]
    ) -> tuple[dict[str, dict[str, Any]], dict[str, Any] | None]:
        """The results of the settings that are `left`, by rule, and the statistics of the task's own text."""
        jobs: list[Setting | None] = [*left, None]
        mine: dict[int, Any] = {}
        for n in self.ranks.deal([1] * len(jobs)):
            signals.check()
            setting = jobs[n]
            if setting is None:
                mine[n] = self._reference()
            else:
                mine[n] = self._setting(setting, scored[str(setting.rule)], drawn.get(str(setting.rule)))
        results = {n: result for share in self.ranks.all_gather_object(mine) for n, result in share.items()}
        return {str(setting.rule): results[n] for n, setting in enumerate(left)}, results[len(left)]

    def _setting(self, setting: Setting, scored: list[RuleScore], drawn: list[SampleRecord] | None) -> dict[str, Any]:
        """The results of one setting, saved at once."""
        inputs = self.inputs(setting)
        content = self._named(setting) | {"rule": str(setting.rule)}
        content |= {"fingerprint": inputs["spec"], "inputs": inputs, "spec": self.spec(setting)}
        content["text"] = self._text(scored)
        content["samples"] = None if drawn is None else self._samples(drawn)
        store.write(store.setting_file(self.folder, inputs), store.dumps(content, indent=1) + "\n")
        return content

    def _named(self, setting: Setting) -> dict[str, Any]:
        """The names of a setting in tables and figures."""
        return {"name": setting.name, "family": setting.family, "k": setting.k}

    # ------------------------------------------------------------ parts of it

    def _text(self, scored: list[RuleScore]) -> dict[str, Any]:
        """The likelihood of the task's text. `stderr` is that of `nll_per_token`, over windows."""
        tokens = [len(window.target) for window in self.windows]
        nll = [-score.log_prob for score in scored]
        per_token, error = ratio(nll, tokens)
        near_ties = [score.near_ties for score in scored]
        nfe, size = sum(score.nfe for score in scored), self.corpus.units.get("bytes")
        return {
            "log_prob": -sum(nll),
            "nll_per_token": per_token,
            "stderr": error,
            "perplexity": perplexity(per_token),
            "bits_per_byte": sum(nll) / size / math.log(2) if size else None,
            "nfe": nfe,
            "nfe_per_window": nfe / len(scored),
            "nfe_per_token": nfe / sum(tokens),
            "near_ties": None if None in near_ties else sum(near_ties),
        }

    def _drawn(self, left: list[Setting]) -> dict[str, list[SampleRecord]]:
        """The samples of the settings that are `left` or that KL compares, by rule."""
        options = self.options
        if not options.samples:
            return {}
        compared = {str(setting.rule) for setting in [*left, *self._compared()]}
        chosen = [setting for setting in self.settings if str(setting.rule) in compared]
        samples = self.measuring.drawn(
            [(self.duel(setting), self.spec(setting)) for setting in chosen],
            self.context,
            options.samples,
            options.length,
        )
        return {str(setting.rule): records for setting, records in zip(chosen, samples, strict=True)}

    def _samples(self, drawn: list[SampleRecord]) -> dict[str, Any]:
        """Statistics of a setting's samples."""
        length = self.options.length
        own, error = metrics.mean_error([-sample.log_prob / length for sample in drawn])
        return {
            "own_nll_per_token": own,
            "own_stderr": error,
            "nfe_per_token": sum(sample.nfe for sample in drawn) / length / len(drawn),
            **self._looks([sample.tokens for sample in drawn]),
            "mauve": self._mauve([sample.tokens for sample in drawn]) if self.options.mauve else None,
        }

    def _looks(self, texts: Sequence[Sequence[int]]) -> dict[str, Any]:
        entropy, repetition = metrics.entropy(texts), metrics.repetition(texts)
        looks: dict[str, Any] = {"count": len(texts), "tokens": sum(map(len, texts)), "entropy": entropy[0]}
        looks |= {f"distinct_{n}": metrics.distinct(texts, n) for n in metrics.NGRAMS}
        looks |= {"repetition": repetition[0], "entropy_stderr": entropy[1], "repetition_stderr": repetition[1]}
        if self.scorer is None:
            return looks
        log_probs, tokens, cut = self.scorer(texts)
        per_token, error = ratio([-value for value in log_probs], tokens)
        judged = {"nll_per_token": per_token, "stderr": error, "tokens": sum(tokens), "same_ids": self.scorer.same}
        judged |= {"cut": cut} if cut else {}
        return looks | {"generative": {"perplexity": perplexity(per_token), **judged}}

    def _judges_notes(self, looks: Sequence[dict[str, Any] | None]) -> list[str]:
        cut = sum(part["generative"].get("cut", 0) for part in looks if part and "generative" in part)
        return [self.scorer.note(cut)] if self.scorer and cut else []

    def _pieces(self) -> list[tuple[int, ...]]:
        """The task's text in pieces as long as a sample, at most as many as there are samples.

        All measures depend on length: shorter pieces have lower entropy, fewer pieces have more distinct n-grams.
        """
        length, stream = self.options.length, [token for window in self.windows for token in window.target]
        whole = range(0, len(stream) - length + 1, length)
        return [tuple(stream[start : start + length]) for start in whole][: self.options.samples]

    def _reference(self) -> dict[str, Any] | None:
        """The same statistics of the task's own text."""
        pieces = self._pieces() if self.options.samples else []
        return self._looks(pieces) if pieces else None

    def _mauve(self, drawn: Sequence[Sequence[int]]) -> float:
        texts = [[judges.decode(self.model.text, ids) for ids in group] for group in (drawn, self._pieces())]
        return judges.mauve(*texts, self.options.mauve_model, self.options.length, self.model.device)

    def _compared(self) -> list[Setting]:
        """The settings between which KL is computed."""
        every = self.options.kl == "all"
        block = self.model.estimator.block
        names = {cap(setting, block).name for setting in self.options.settings if setting.name in self.options.pairs}
        chosen = [setting for setting in self.settings if every or setting.name in names]
        return chosen if self.options.samples and len(chosen) > 1 else []

    def _kl(self, samples: dict[str, list[SampleRecord]]) -> list[dict[str, Any]]:
        """KL between settings, from samples of one scored under the other."""
        chosen = self._compared()
        divergences, suffix = [], tuple(self.model.text.suffix)
        for a in chosen:
            drawn = samples[str(a.rule)]
            own = [sample.log_prob for sample in drawn]
            windows = [Window(tuple(self.context), sample.tokens, suffix) for sample in drawn]
            others = [b for b in chosen if b is not a]
            scored = self.measuring.under(windows, [b.rule for b in others], f"samples of {a.name}")
            for b in chosen:
                theirs = own if b is a else [score.log_prob for score in scored[str(b.rule)]]
                kl, error = metrics.kl(own, theirs, self.options.length)
                divergences.append({"of": a.name, "under": b.name, "kl_per_token": kl, "stderr": error})
        return divergences

    def _elbo(self) -> dict[str, Any] | None:
        if not self.options.elbo:
            return None
        model, rows = self.model.options, self.measuring.rows
        elbo = Elbo(self.model.denoiser, grid=model.grid, samples=self.options.elbo, seed=model.draw_seed, **rows)
        bounds = self.measuring.bounds(elbo, self.windows)
        total = Total()
        for window, (bound, error) in zip(self.windows, bounds, strict=True):
            total.merge(Total.from_value(window, Value(bound, error)))
        tokens = sum(len(window.target) for window in self.windows)
        nll, stderr = -total.log_prob / tokens, total.stderr
        return {
            "nll_per_token": nll,
            "perplexity": perplexity(nll),
            "stderr": None if stderr is None else stderr / tokens,
            "draws": self.options.elbo,
            "block": elbo.block,
        }
