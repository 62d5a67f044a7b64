"""One sweep: a network and a task's text, loaded once; then every setting, each kept as soon as it is finished."""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lm_eval_duel import fingerprint
from lm_eval_duel.demo import BUNDLED
from lm_eval_duel.engine.windows import Window
from lm_eval_duel.errors import DuelError
from lm_eval_duel.estimators.base import Value
from lm_eval_duel.estimators.duel import Duel
from lm_eval_duel.estimators.elbo import Elbo
from lm_eval_duel.harness.key_values import key_values
from lm_eval_duel.harness.lm import DuelMDM
from lm_eval_duel.harness.run_stats import Total
from lm_eval_duel.sweep import corpus, judges, metrics, store
from lm_eval_duel.sweep.arguments import Setting, cap, capped
from lm_eval_duel.sweep.measure import Measuring, SampleRecord
from lm_eval_duel.sweep.shared import RuleScore

VERSION = 1  # raised when a release changes a figure of a setting


class Sweep:
    """What was asked, loaded: raises DuelError before the network is read where that is possible."""

    def __init__(self, asked: argparse.Namespace):
        self.asked, self.folder = asked, Path(asked.out)
        arguments = key_values("--model_args", asked.model_args)
        said = {**arguments, "batch_size": asked.batch_size, "device": asked.device}
        corpus.show_log()
        metadata = {**arguments, **key_values("--metadata", asked.metadata)}
        self.corpus = corpus.load(asked.tasks, metadata, asked.limit)
        self.model = model = DuelMDM(**said)
        if model.world_size > 1:
            raise DuelError("A sweep runs in one process; start it without accelerate or torchrun.")
        if model.denoiser.attention == "causal":
            raise DuelError("An autoregressive model has one order: there is nothing to sweep.")
        self.measuring = Measuring(self.folder, model, self.law_without_rule())
        self.windows = self.corpus.windows(model.text)
        self.settings, self.notes = capped(asked.settings, model.estimator.block)
        for setting in self.settings:
            self.duel(setting)  # refuses what is no spec of this network
        self.scorer = judges.Scorer(asked.scorer, model.text, str(model.device)) if asked.scorer else None
        self.context = model.text.prompt("", asked.length) if asked.samples else []
        if asked.samples and (count := len(self._pieces())) < asked.samples:
            self.notes.append(
                f"The task's own text is {count} pieces of {asked.length} tokens beside {asked.samples} samples: fewer "
                "have more distinct n-grams (and MAUVE fewer references)."
            )

    def duel(self, setting: Setting) -> Duel:
        return Duel(self.model.denoiser, setting.rule, **self.measuring.place)

    def spec(self, setting: Setting) -> dict[str, str]:
        """As `lm_eval` has it for this rule."""
        return {**self.model.spec, **{key: str(value) for key, value in self.duel(setting).describe().items()}}

    def law_without_rule(self) -> dict[str, str]:
        return {key: value for key, value in self.model.spec.items() if key != "rule"}

    # ------------------------------------------------------------ the whole

    def run(self) -> dict[str, Any]:
        """Everything that the report shows, as one dict."""
        began = time.perf_counter()
        asked = self.asked
        kept = [store.finished(self.folder, self.questions(setting)) for setting in self.settings]
        left = [setting.rule for setting, found in zip(self.settings, kept, strict=True) if found is None]
        scored = self.measuring.under(self.windows, left, f"text of {asked.tasks}")
        rows = [
            found | self._named(setting) if found else self._setting(setting, scored[str(setting.rule)])
            for setting, found in zip(self.settings, kept, strict=True)
        ]
        tokens, units = sum(len(window.target) for window in self.windows), self.corpus.units
        report = {
            "version": VERSION,
            "configuration": self.configuration,
            "model": self.model.options.pretrained or BUNDLED,
            "task": {"name": asked.tasks, "limit": asked.limit, "documents": len(self.corpus.texts)}
            | {"windows": len(self.windows), "tokens": tokens, **units},
            "block": self.model.estimator.block,
            "samples": {"count": asked.samples, "length": asked.length} if asked.samples else None,
            "scorer": asked.scorer,
            "spec": self.law_without_rule(),
            "settings": rows,
            "reference": self._reference(),
            "kl": self._kl(),
            "elbo": self._elbo(),
            "shared": self.measuring.sharing(self.windows),
            "notes": self.notes + (self.scorer.notes if self.scorer else []),
        }
        return report | {"seconds": time.perf_counter() - began}

    def questions(self, setting: Setting) -> dict[str, object]:
        """All that a finished setting depends on."""
        asked = self.asked
        found = {"version": VERSION, "spec": fingerprint.digest(self.spec(setting))}
        found |= {"text": store.of_windows(self.windows)}
        found |= {"task": asked.tasks, "limit": asked.limit, "units": self.corpus.units}
        if asked.samples:
            found |= {"samples": asked.samples, "length": asked.length, "draw_seed": self.model.options.draw_seed}
            found |= {"scorer": self.scorer and self.scorer.fingerprint, "mauve": asked.mauve and asked.mauve_model}
        return found

    @property
    def configuration(self) -> str:
        """The digest of all that the report depends on."""
        asked = self.asked
        found = {str(n): self.questions(setting) for n, setting in enumerate(self.settings)}
        return fingerprint.digest({**found, "kl": sorted(asked.pairs), "all": asked.kl == "all", "elbo": asked.elbo})

    def _setting(self, setting: Setting, scored: list[RuleScore]) -> dict[str, Any]:
        """One setting's figures, kept at once."""
        questions = self.questions(setting)
        found = self._named(setting) | {"rule": str(setting.rule)}
        found |= {"fingerprint": questions["spec"], "asked": questions, "spec": self.spec(setting)}
        found["text"] = self._text(scored)
        found["samples"] = self._samples(setting) if self.asked.samples else None
        store.write(store.setting_file(self.folder, questions), store.dumps(found, indent=1) + "\n")
        return found

    def _named(self, setting: Setting) -> dict[str, Any]:
        """How tables and lines call it."""
        return {"name": setting.name, "family": setting.family, "k": setting.k}

    # ------------------------------------------------------------ parts of it

    def _text(self, scored: list[RuleScore]) -> dict[str, Any]:
        """The likelihood of the task's text."""
        tokens = [len(window.target) for window in self.windows]
        nats = [-found.log_prob for found in scored]
        each, error = metrics.rate(nats, tokens)
        close = [found.near_ties for found in scored]
        size = self.corpus.units.get("bytes")
        return {
            "nats": sum(nats),
            "nats_per_token": each,
            "stderr": error,
            "perplexity": metrics.perplexity(each),
            "bits_per_byte": sum(nats) / size / math.log(2) if size else None,
            "nfe": sum(found.nfe for found in scored),
            "nfe_per_window": sum(found.nfe for found in scored) / len(scored),
            "nfe_per_token": sum(found.nfe for found in scored) / sum(tokens),
            "near_ties": None if None in close else sum(close),
        }

    def drawn(self, setting: Setting) -> list[SampleRecord]:
        asked = self.asked
        return self.measuring.drawn(self.duel(setting), self.spec(setting), self.context, asked.samples, asked.length)

    def _samples(self, setting: Setting) -> dict[str, Any]:
        """What this setting's samples are like."""
        drawn = self.drawn(setting)
        length = self.asked.length
        own, error = metrics.mean_error([-sample.log_prob / length for sample in drawn])
        return {
            "own_nats_per_token": own,
            "own_stderr": error,
            "nfe_per_token": sum(sample.nfe for sample in drawn) / length / len(drawn),
            **self._looks([sample.tokens for sample in drawn]),
            "mauve": self._mauve([sample.tokens for sample in drawn]) if self.asked.mauve else None,
        }

    def _looks(self, texts: Sequence[Sequence[int]]) -> dict[str, Any]:
        found = {"count": len(texts), "tokens": sum(map(len, texts)), "entropy": metrics.entropy(texts)}
        found |= {f"distinct_{n}": metrics.distinct(texts, n) for n in metrics.NGRAMS}
        found["repetition"] = metrics.repetition(texts)
        found |= {"entropy_stderr": metrics.entropy_error(texts), "repetition_stderr": metrics.repetition_error(texts)}
        if self.scorer is None:
            return found
        nats, tokens = self.scorer(texts)
        each, error = metrics.rate([-value for value in nats], tokens)
        judged = {"nats_per_token": each, "stderr": error, "tokens": sum(tokens), "same_ids": self.scorer.same}
        return found | {"generative": {"perplexity": metrics.perplexity(each), **judged}}

    def _pieces(self) -> list[tuple[int, ...]]:
        """The task's text, one window after the other, in pieces as long as a sample; as many as samples, at most.

        All measures depend on length: a shorter piece has a lower entropy, fewer have more distinct n-grams.
        """
        length, stream = self.asked.length, [token for window in self.windows for token in window.target]
        whole = range(0, len(stream) - length + 1, length)
        return [tuple(stream[start : start + length]) for start in whole][: self.asked.samples]

    def _reference(self) -> dict[str, Any] | None:
        """What the task's own text is like, by the same measures."""
        pieces = self._pieces() if self.asked.samples else []
        return self._looks(pieces) if pieces else None

    def _mauve(self, drawn: Sequence[Sequence[int]]) -> float:
        told = [[judges.decode(self.model.text, ids) for ids in each] for each in (drawn, self._pieces())]
        return judges.mauve(*told, self.asked.mauve_model, self.asked.length, self.model.device)

    def _kl(self) -> list[dict[str, Any]]:
        """KL between settings, from samples of one scored under the other."""
        every = self.asked.kl == "all"  # those that stand for a k above the block too
        names = {
            cap(one, self.model.estimator.block).name for one in self.asked.settings if one.name in self.asked.pairs
        }
        chosen = [setting for setting in self.settings if every or setting.name in names]
        if not self.asked.samples or len(chosen) < 2:
            return []
        found, suffix = [], tuple(self.model.text.suffix)
        for a in chosen:
            drawn = self.drawn(a)
            own = [sample.log_prob for sample in drawn]
            windows = [Window(tuple(self.context), sample.tokens, suffix) for sample in drawn]
            others = [b for b in chosen if b is not a]
            scored = self.measuring.under(windows, [b.rule for b in others], f"samples of {a.name}")
            for b in chosen:
                theirs = own if b is a else [one.log_prob for one in scored[str(b.rule)]]
                each, error = metrics.kl(own, theirs, self.asked.length)
                found.append({"of": a.name, "under": b.name, "nats_per_token": each, "stderr": error})
        return found

    def _elbo(self) -> dict[str, Any] | None:
        if not self.asked.elbo:
            return None
        said, rows = self.model.options, self.measuring.rows
        elbo = Elbo(self.model.denoiser, grid=said.grid, samples=self.asked.elbo, seed=said.draw_seed, **rows)
        bounds = self.measuring.bounds(elbo, self.windows)
        total = Total()
        for window, (bound, error) in zip(self.windows, bounds, strict=True):
            total.merge(Total.of(window, Value(bound, error)))
        tokens = sum(len(window.target) for window in self.windows)
        nats, stderr = -total.nats / tokens, total.stderr
        return {
            "nats_per_token": nats,
            "perplexity": metrics.perplexity(nats),
            "stderr": None if stderr is None else stderr / tokens,
            "draws": self.asked.elbo,
            "block": elbo.block,
        }
