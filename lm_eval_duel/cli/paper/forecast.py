"""What jobs will take: windows, network rows and hours, counted as `plan` counts, before any weight is read."""

from __future__ import annotations

import dataclasses
import functools
import json
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from lm_eval_duel.cli import plan
from lm_eval_duel.cli.paper.recipes import Job
from lm_eval_duel.errors import DuelError

METHODS = {"duel": "exact", "ar": "chain rule", "oracle": "lattice"}
SIZES = {  # documents and scored tokens where a data set cannot be read here: rough, within about a quarter
    "duel_openwebtext_wrapped": (110_000, 1023),
    "duel_openwebtext_1k_wrapped": (1_100, 1023),
    "duel_lm1b_in_domain": (72_000, 127),
    "duel_ptb_wrapped": (90, 1023),
    "duel_wikitext103_wrapped": (240, 1023),
    "duel_lm1b_wrapped": (8_700, 1023),
    "duel_lambada_wrapped": (450, 1023),
    "duel_ag_news_wrapped": (384, 1023),  # the authors' result files have so many rows
    "duel_pubmed_wrapped": (26_000, 1023),
    "duel_arxiv_wrapped": (45_000, 1023),
    "wikitext": (62, 4_680),
    "duel_lambada": (5_153, 88),
    "duel_ag_news": (7_600, 53),
}
STOCK = {"wikitext": "duel_wikitext2"}  # lm-eval's own task, and ours with the same pages


@dataclasses.dataclass(frozen=True)
class Forecast:
    """What a job takes. `rough`: its data set is not on this machine, so its size is approximate."""

    windows: int
    tokens: int
    calls: int  # of the network, at least
    rows: int
    hours: float
    rough: bool
    most: bool  # an upper bound: the steps of the rule depend on the text


def forecast(job: Job, tflops: float | None, utilization: float) -> Forecast:
    """The forecast of a job; raises DuelError if its network's config.json cannot be read."""
    documents, tokens, rough = _size(job)
    arguments = {key: value for key, value in job.config["model_args"].items() if key != "add_bos_token"}
    if job.config["model"] == "hf":
        arguments["estimator"] = "ar"
    with tempfile.TemporaryDirectory() as folder:
        if job.missing_weights and job.shape:
            (Path(folder) / "config.json").write_text(job.shape, encoding="utf-8")
            arguments["pretrained"] = folder
        words = ["--model_args", json.dumps(arguments), "--tokens", str(tokens), "--documents", str(documents)]
        words += ["--utilization", str(utilization)] + ([] if tflops is None else ["--tflops", str(tflops)])
        figures = plan.plan(*plan.parse(words))
    estimator = arguments.get("estimator", "duel")
    method = METHODS.get(estimator, f"elbo {arguments.get('mc_samples', plan.DRAWS)}")
    cost = figures["methods"][method]
    return Forecast(
        figures["windows"],
        figures["tokens"],
        cost["calls_at_least"],
        cost["rows"],
        cost["hours"],
        rough,
        figures["upper_bound"] and method == "exact",
    )


def _size(job: Job) -> tuple[int, int, bool]:
    """(documents, scored tokens, whether they are rough) of a job."""
    arguments = job.config["model_args"]
    named = {key: arguments[key] for key in ("pretrained", "tokenizer", "bos") if key in arguments}
    try:
        documents, tokens = _counted(job.task, json.dumps({**named, **job.config["metadata"]}, sort_keys=True))
        rough = False
    except DuelError:
        if job.task not in SIZES:
            raise
        documents, length = SIZES[job.task]
        tokens, rough = documents * length, True
    if job.limit is not None and job.limit < documents:
        documents, tokens = job.limit, round(tokens * job.limit / documents)
    return documents, tokens, rough


@functools.cache
def _counted(task: str, settings: str) -> tuple[int, int]:
    """The documents and scored tokens of a data set."""
    from lm_eval_duel import tasks
    from lm_eval_duel.cli.data import benchmarks
    from lm_eval_duel.tasks.columns import TOKENS

    config = benchmarks().get(STOCK.get(task, task))
    if config is None:
        raise DuelError(f"The size of {task} is not known.")
    load = getattr(tasks, config["custom_dataset"].rsplit(".", 1)[-1])
    rows = load(**{**config["metadata"], **json.loads(settings)})["test"]
    return len(rows), sum(rows[TOKENS])


def describe(forecasts: Iterable[Forecast]) -> dict[str, Any]:
    """The sum of forecasts."""
    every = list(forecasts)
    return {
        "windows": sum(forecast.windows for forecast in every),
        "rows": sum(forecast.rows for forecast in every),
        "hours": sum(forecast.hours for forecast in every),
        "rough": any(forecast.rough for forecast in every),
    }
