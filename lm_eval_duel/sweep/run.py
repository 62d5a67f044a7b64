"""One sweep: a network and a task's text, loaded once; text under all rules, samples of all settings, their judges.

Ranks of one launch share each of these (`measure`), and wait for each other before the next.
"""

from __future__ import annotations

import argparse
import logging
import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lm_eval_duel import fingerprint
from lm_eval_duel.core.windows import Window
from lm_eval_duel.demo import BUNDLED
from lm_eval_duel.errors import DuelError
from lm_eval_duel.estimators.base import Value
from lm_eval_duel.estimators.elbo import Elbo
from lm_eval_duel.harness.lm import DuelMDM
from lm_eval_duel.harness.totals import Total
from lm_eval_duel.rates import perplexity, ratio
from lm_eval_duel.sweep import corpus, judges, metrics, store
from lm_eval_duel.sweep.arguments import Setting, cap, capped
from lm_eval_duel.sweep.measure import Measuring, SampleRecord
from lm_eval_duel.sweep.shared import RuleScore

log = logging.getLogger("lm_eval.duel_mdm")  # lm-eval prints its own loggers only

VERSION = 3  # raised when a release changes the entries of a setting
Json = dict[str, Any]


class Sweep:
    """The network and the text of a sweep. Raises DuelError for wrong options, if possible before weights are read."""

    def __init__(self, options: argparse.Namespace):
        self.options = options
        corpus.show_log()
        metadata = {**options.model_args, **options.metadata}
        self.corpus = corpus.load(options.tasks, metadata, options.limit, options.include_path)
        self.model = model = DuelMDM(**options.model_args, batch_size=options.batch_size, device=options.device)
        self.ranks = model.ranks
        if model.denoiser.attention == "causal":
            raise DuelError("An autoregressive model has one order: there is nothing to sweep.")
        self.spec = {key: value for key, value in model.spec.items() if key != "rule"}
        self.measuring = Measuring(Path(options.out), model, self.spec)
        self.windows = self.corpus.windows(model.text)
        self.tokens = [len(window.target) for window in self.windows]
        self.settings, self.notes = capped(options.settings, model.estimator.block)
        for setting in self.settings:
            self.measuring.duel(setting.rule)  # raises for a rule that this network cannot follow
        self.scorer = judges.Scorer(options.scorer, model.text, str(model.device)) if options.scorer else None
        self.context = model.text.prompt("", options.length) if options.samples else []
        self.pieces = self._pieces() if options.samples else []
        if len(self.pieces) < options.samples:
            self.notes.append(
                f"The task's own text is {len(self.pieces)} pieces of {options.length} tokens, for {options.samples} "
                "samples: fewer pieces have more distinct n-grams (and MAUVE has fewer references)."
            )

    def _pieces(self) -> list[tuple[int, ...]]:
        """The task's text in pieces as long as a sample, at most as many as there are samples.

        All measures depend on length: shorter pieces have lower entropy, fewer pieces have more distinct n-grams.
        """
        length, stream = self.options.length, [token for window in self.windows for token in window.target]
        whole = range(0, len(stream) - length + 1, length)
        return [tuple(stream[start : start + length]) for start in whole][: self.options.samples]

    def run(self) -> Json:
        """Run everything; returns the content of the report."""
        began, options, follow = time.perf_counter(), self.options, [setting.rule for setting in self.settings]
        scored = self.measuring.under(self.windows, follow, f"text of {options.tasks}")
        drawn = self.measuring.drawn(follow, self.context, options.samples, options.length) if options.samples else {}
        texts = [[sample.tokens for sample in samples] for samples in drawn.values()]
        groups = [*texts, self.pieces] if self.pieces else texts
        looks = self._looks(groups)
        near: Sequence[float | None] = [None] * len(texts)
        if options.mauve:
            near = self.measuring.mauve(texts, self.pieces, options.mauve_model, options.length)
        rows = [self._setting(setting, scored[str(setting.rule)]) for setting in self.settings]
        for row, samples, look, value in zip(rows, drawn.values(), looks, near, strict=False):
            row["samples"] = self._own(samples) | look | {"mauve": value}
        report = {
            "version": VERSION,
            "configuration": self.configuration(rows),
            "model": self.model.options.pretrained or BUNDLED,
            "task": {"name": options.tasks, "limit": options.limit, "documents": len(self.corpus.texts)}
            | {"windows": len(self.windows), "tokens": sum(self.tokens), **self.corpus.units},
            "block": self.model.estimator.block,
            "samples": {"count": options.samples, "length": options.length} if options.samples else None,
            "scorer": options.scorer,
            "spec": self.spec,
            "settings": rows,
            "reference": looks[-1] if self.pieces else None,
            "kl": self._kl(drawn),
            "elbo": self._elbo(),
            "shared": self.measuring.sharing(self.windows),
            "notes": self.notes,
        }
        return report | {"seconds": time.perf_counter() - began}

    def configuration(self, rows: Sequence[Json]) -> str:
        """A digest of everything that the report depends on."""
        options = self.options
        about = {"version": VERSION, "specs": [row["fingerprint"] for row in rows], "names": options.pairs}
        about |= {"text": store.of_windows(self.windows), "task": options.tasks, "units": self.corpus.units}
        about |= {"samples": options.samples, "length": options.length, "context": self.context}
        about |= {"draw_seed": self.model.options.draw_seed, "scorer": self.scorer and self.scorer.fingerprint}
        about |= {"mauve": options.mauve and options.mauve_model, "kl": options.kl == "all", "elbo": options.elbo}
        return fingerprint.digest(about | {"limit": options.limit})

    # ------------------------------------------------------------ parts of it

    def _setting(self, setting: Setting, scored: list[RuleScore]) -> Json:
        """One setting without its samples. `spec`: that of this rule, as in `lm_eval`."""
        spec = {key: str(value) for key, value in self.measuring.duel(setting.rule).describe().items()}
        spec = {**self.model.spec, **spec}
        names = {"name": setting.name, "family": setting.family, "k": setting.k, "rule": str(setting.rule)}
        more = {"fingerprint": fingerprint.digest(spec), "spec": spec}
        return names | more | {"text": self._text(scored), "samples": None}

    def _text(self, scored: list[RuleScore]) -> Json:
        """The likelihood of the task's text. `stderr` is that of `nll_per_token`, over windows."""
        nll = [-score.log_prob for score in scored]
        per_token, error = ratio(nll, self.tokens)
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
            "nfe_per_token": nfe / sum(self.tokens),
            "near_ties": None if None in near_ties else sum(near_ties),
        }

    def _own(self, drawn: list[SampleRecord]) -> Json:
        """What samples cost, and their likelihood under what drew them."""
        length = self.options.length
        own, error = metrics.mean_error([-sample.log_prob / length for sample in drawn])
        nfe = sum(sample.nfe for sample in drawn) / length / len(drawn)
        return {"own_nll_per_token": own, "own_stderr": error, "nfe_per_token": nfe}

    def _looks(self, groups: Sequence[judges.Texts]) -> list[Json]:
        """Statistics of groups of samples, or of the task's own text. Texts without tokens are left out of judging."""
        looks = []
        for texts in groups:
            entropy, repetition = metrics.entropy(texts), metrics.repetition(texts)
            look: Json = {"count": len(texts), "tokens": sum(map(len, texts)), "entropy": entropy[0]}
            look |= {f"distinct_{n}": metrics.distinct(texts, n) for n in metrics.NGRAMS}
            look |= {"repetition": repetition[0], "entropy_stderr": entropy[1], "repetition_stderr": repetition[1]}
            looks.append(look)
        if self.scorer is None:
            return looks
        if self.ranks.rank == 0:
            log.info("generative perplexity under %s, %s", self.scorer.name, self.scorer.scored_text)
        every = self.measuring.judged(self.scorer, groups)
        for look, judged in zip(looks, every, strict=True):
            kept = [one for one in judged if one.tokens]
            if not kept:
                raise DuelError(f"The samples have no token in the tokenizer of {self.scorer.name}.")
            per_token, error = ratio([-one.log_prob for one in kept], [one.tokens for one in kept])
            about = {"nll_per_token": per_token, "stderr": error, "tokens": sum(one.tokens for one in kept)}
            look["generative"] = {"perplexity": perplexity(per_token), **about, "same_ids": self.scorer.same}
            if cut := sum(one.pieces > 1 for one in judged):
                look["generative"]["cut"] = cut
        if cut := sum(look["generative"].get("cut", 0) for look in looks):
            self.notes.append(self.scorer.note(cut))
        return looks

    def _kl(self, samples: dict[str, list[SampleRecord]]) -> list[Json]:
        """KL between settings, from samples of one scored under the other."""
        block = self.model.estimator.block
        named = {cap(setting, block).name for setting in self.options.settings if setting.name in self.options.pairs}
        chosen = [setting for setting in self.settings if self.options.kl == "all" or setting.name in named]
        divergences, suffix = [], tuple(self.model.text.suffix)
        for a in chosen if samples and len(chosen) > 1 else []:
            drawn = samples[str(a.rule)]
            own = [sample.log_prob for sample in drawn]
            windows = [Window(tuple(self.context), sample.tokens, suffix) for sample in drawn]
            scored = self.measuring.under(windows, [b.rule for b in chosen if b is not a], f"samples of {a.name}")
            for b in chosen:
                theirs = own if b is a else [score.log_prob for score in scored[str(b.rule)]]
                kl, error = metrics.kl(own, theirs, self.options.length)
                divergences.append({"of": a.name, "under": b.name, "kl_per_token": kl, "stderr": error})
        return divergences

    def _elbo(self) -> Json | None:
        if not self.options.elbo:
            return None
        model, rows = self.model.options, self.measuring.rows
        elbo = Elbo(self.model.denoiser, grid=model.grid, samples=self.options.elbo, seed=model.draw_seed, **rows)
        bounds = self.measuring.bounds(elbo, self.windows)
        total = Total()
        for window, (bound, error) in zip(self.windows, bounds, strict=True):
            total.merge(Total.from_value(window, Value(bound, error)))
        tokens, stderr = sum(self.tokens), total.stderr
        nll = -total.log_prob / tokens
        error = None if stderr is None else stderr / tokens
        about = {"stderr": error, "draws": self.options.elbo, "block": elbo.block}
        return {"nll_per_token": nll, "perplexity": perplexity(nll), **about}
