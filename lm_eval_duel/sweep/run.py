"""One sweep: a network and a task's text, loaded once; text under all rules, samples of all settings, their judges.

Ranks of one launch share each of these (`measure`), and wait for each other before the next.
"""

from __future__ import annotations

import argparse
import math
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lm_eval_duel import rules
from lm_eval_duel.core.windows import Window
from lm_eval_duel.demo import BUNDLED
from lm_eval_duel.errors import DuelError
from lm_eval_duel.estimators.elbo import Elbo
from lm_eval_duel.fingerprint import digest
from lm_eval_duel.harness.lm import DuelMDM
from lm_eval_duel.harness.loglikelihood import document_windows
from lm_eval_duel.harness.requests import WHOLE_TEXT, answer_for, arguments_of
from lm_eval_duel.harness.totals import Total
from lm_eval_duel.rates import perplexity, ratio
from lm_eval_duel.rules.tables import family, without_defaults
from lm_eval_duel.sweep.arguments import cap, distinct, k_of, name_of
from lm_eval_duel.sweep.judges import Judged, Scorer
from lm_eval_duel.sweep.measure import Measuring, Sample
from lm_eval_duel.sweep.metrics import look, mean_error
from lm_eval_duel.sweep.shared import RuleScore
from lm_eval_duel.tasks import named
from lm_eval_duel.tasks.metrics import sizes

if TYPE_CHECKING:
    from lm_eval.api.task import Task

UNITS = {"bits_per_byte": "bytes", "byte_perplexity": "bytes", "word_perplexity": "words"}
Json = dict[str, Any]


class Sweep:
    """The network and the text of a sweep. Raises DuelError for wrong options, if possible before weights are read."""

    def __init__(self, options: argparse.Namespace):
        from lm_eval.utils import setup_logging

        setup_logging()
        task = named.load(options.tasks, {**options.model_args, **options.metadata}, options.include_path)
        if task.OUTPUT_TYPE != WHOLE_TEXT:
            raise DuelError(
                f"'{options.tasks}' is a {task.OUTPUT_TYPE} task; a sweep scores whole texts ({WHOLE_TEXT})."
            )
        task.build_all_requests(limit=options.limit)
        self.options, self.units, self.notes = options, _units(task), list[str]()
        self.model = model = DuelMDM(**options.model_args, batch_size=options.batch_size, device=options.device)
        self.ranks = model.ranks
        if model.denoiser.attention == "causal":
            raise DuelError("An autoregressive model has one order: there is nothing to sweep.")
        self.measuring = Measuring(Path(options.out), model)
        self.documents = document_windows(model.text, task.instances)
        self.windows = [window for windows in self.documents for window in windows]
        self.tokens = [len(window.target) for window in self.windows]
        if not sum(self.tokens):
            raise DuelError(f"Task {options.tasks} has no token to score.")
        block = model.estimator.block
        self.rules, self.kl = (distinct(cap(rule, block) for rule in of) for of in (options.settings, options.kl))
        if [*map(str, self.rules)] != [*map(str, options.settings)]:
            self.notes.append(
                f"A k above the block of {block} reveals the whole block in one step: it is listed as k={block}."
            )
        for rule in self.rules:
            self.measuring.duel(rule)  # raises for a rule that this network cannot follow
        self.scorer = Scorer(options.scorer, model.text, str(model.device)) if options.scorer else None
        self.context = model.text.prompt("", options.length) if options.samples else []
        self.pieces = self._pieces()
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
        began, options, model, measuring = time.perf_counter(), self.options, self.model, self.measuring
        scored = measuring.under(self.windows, self.rules, f"text of {options.tasks}")
        samples: list[list[Sample]] = []
        if options.samples:
            samples = measuring.drawn(self.rules, self.context, options.samples, options.length)
        texts = [[sample.tokens for sample in drawn] for drawn in samples]
        groups = [*texts, self.pieces] if self.pieces else texts
        looks = [look(group) for group in groups]
        if self.scorer is not None:
            self._judge(self.scorer, measuring.judged(self.scorer, groups), looks)
        mauves: Sequence[float | None] = [None] * len(texts)
        if options.mauve:
            mauves = measuring.mauve(texts, self.pieces, options.mauve_model, options.length)
        settings = [self._setting(rule, scores) for rule, scores in zip(self.rules, scored, strict=True)]
        for setting, drawn, statistics, mauve in zip(settings, samples, looks, mauves, strict=False):
            setting["samples"] = self._own(drawn) | statistics | {"mauve": mauve}
        return {
            "version": 4,
            "model": model.options.pretrained or BUNDLED,
            "task": {"name": options.tasks, "limit": options.limit, "documents": len(self.documents)}
            | {"windows": len(self.windows), "tokens": sum(self.tokens), **self.units},
            "block": model.estimator.block,
            "samples": {"count": options.samples, "length": options.length} if options.samples else None,
            "scorer": options.scorer,
            "spec": measuring.spec,
            "settings": settings,
            "reference": looks[-1] if self.pieces else None,
            "kl": self._kl(samples),
            "elbo": self._elbo(),
            "shared": measuring.sharing(self.windows),
            "notes": self.notes,
            "seconds": time.perf_counter() - began,
        }

    # ------------------------------------------------------------ parts of it

    def _setting(self, rule: rules.Rule, scored: Sequence[RuleScore]) -> Json:
        """One setting without its samples. `spec`: that of this rule, as in `lm_eval`.

        `stderr` of the text is that of `nll_per_token`, over windows.
        """
        own = {key: str(value) for key, value in self.measuring.duel(rule).describe().items()}
        spec = {**self.model.spec, **own}
        nll, near_ties = [-score.log_prob for score in scored], [score.near_ties for score in scored]
        per_token, error = ratio(nll, self.tokens)
        nfe, size = sum(score.nfe for score in scored), self.units.get("bytes")
        return {
            "name": name_of(rule),
            "family": family(without_defaults(str(rule)))[0],
            "k": k_of(rule),
            "rule": str(rule),
            "fingerprint": digest(spec),
            "spec": spec,
            "text": {
                "log_prob": -sum(nll),
                "nll_per_token": per_token,
                "stderr": error,
                "perplexity": perplexity(per_token),
                "bits_per_byte": sum(nll) / size / math.log(2) if size else None,
                "nfe": nfe,
                "nfe_per_window": nfe / len(scored),
                "nfe_per_token": nfe / sum(self.tokens),
                "near_ties": None if None in near_ties else sum(near_ties),
            },
            "samples": None,
        }

    def _own(self, drawn: Sequence[Sample]) -> Json:
        """What samples cost, and their likelihood under what drew them."""
        length = self.options.length
        own, error = mean_error([-sample.log_prob / length for sample in drawn])
        nfe = sum(sample.nfe for sample in drawn) / length / len(drawn)
        return {"own_nll_per_token": own, "own_stderr": error, "nfe_per_token": nfe}

    def _judge(self, scorer: Scorer, judged: Sequence[Sequence[Judged]], looks: Sequence[Json]) -> None:
        """Enter the generative perplexity of each group of texts. Texts without tokens are left out."""
        for group, entries in zip(judged, looks, strict=True):
            kept = [text for text in group if text.tokens]
            if not kept:
                raise DuelError(f"The samples have no token in the tokenizer of {scorer.name}.")
            per_token, error = ratio([-text.log_prob for text in kept], [text.tokens for text in kept])
            about = {"nll_per_token": per_token, "stderr": error, "tokens": sum(text.tokens for text in kept)}
            entries["generative"] = {"perplexity": perplexity(per_token), **about, "same_ids": scorer.same}
        if cut := sum(text.pieces > 1 for group in judged for text in group):
            self.notes.append(f"{cut} texts are longer than a row of {scorer.name}, which scores them in pieces.")

    def _kl(self, samples: Sequence[Sequence[Sample]]) -> list[Json]:
        """KL between settings per token, from samples of one scored under the other."""
        divergences, suffix, length = [], tuple(self.model.text.suffix), self.options.length
        of = {str(rule): drawn for rule, drawn in zip(self.rules, samples, strict=False)}
        for a in self.kl if samples and len(self.kl) > 1 else []:
            own = [sample.log_prob for sample in of[str(a)]]
            windows = [Window(tuple(self.context), sample.tokens, suffix) for sample in of[str(a)]]
            others = [b for b in self.kl if b is not a]
            scored = self.measuring.under(windows, others, f"samples of {name_of(a)}")
            theirs = {str(b): [score.log_prob for score in scores] for b, scores in zip(others, scored, strict=True)}
            for b in self.kl:
                ratios = [(p - q) / length for p, q in zip(own, theirs.get(str(b), own), strict=True)]
                kl, error = mean_error(ratios)
                divergences.append({"of": name_of(a), "under": name_of(b), "kl_per_token": kl, "stderr": error})
        return divergences

    def _elbo(self) -> Json | None:
        if not self.options.elbo:
            return None
        model, draws = self.model.options, self.options.elbo
        elbo = Elbo(self.model.denoiser, grid=model.grid, samples=draws, seed=model.draw_seed, **self.measuring.rows)
        total, tokens = Total(), sum(self.tokens)
        for window, bound in zip(self.windows, self.measuring.bounds(elbo, self.windows), strict=True):
            total.merge(Total.from_value(window, bound))
        nll, error = -total.log_prob / tokens, None if total.stderr is None else total.stderr / tokens
        return {
            "nll_per_token": nll,
            "perplexity": perplexity(nll),
            "stderr": error,
            "draws": draws,
            "block": elbo.block,
        }


def _units(task: Task) -> dict[str, int]:
    """The bytes and words that the metrics of a task's documents divide by."""
    units = Counter[str]()
    for request in task.instances:
        results = task.process_results(request.doc, [answer_for(request, 0.0)])
        if results is None:  # lm-eval 0.5, which counts them in its own metrics
            units.update(dict(zip(("words", "bytes"), sizes(*arguments_of(request)), strict=True)))
        else:
            units.update({UNITS[metric]: value[1] for metric, value in results.items() if metric in UNITS})
    return dict(units)
