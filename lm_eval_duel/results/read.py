"""Results files of the harness and of `score --json`, as records: a `Run` a model, a `Task` a task of it."""

from __future__ import annotations

import dataclasses
import datetime
import math
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from lm_eval_duel.core.rates import METRICS, perplexity
from lm_eval_duel.errors import DuelError, unknown
from lm_eval_duel.estimators.blocks import BeamBlocks
from lm_eval_duel.estimators.registry import ESTIMATORS
from lm_eval_duel.results import samples, stats
from lm_eval_duel.results.own_files import load, number, reading
from lm_eval_duel.results.samples import OTHER_NAMES, WRITTEN, Documents

MODEL, SCORE, SCORE_VERSION, NO_CACHE = "duel-mdm", "lm_eval_duel score", 1, "none"
AUTOREGRESSIVE = {  # names of --model in the harness, and the classes of model objects
    *("hf", "hf-auto", "huggingface", "hf-mistral3", "hf-multimodal", "hf-audiolm-qwen", "steered", "HFLM"),
    *("SteeredModel", "vllm", "vllm-vlm", "VLLM", "sglang", "sglang-generate", "SGLangLM", "gguf", "ggml", "GGUFLM"),
    *("mamba_ssm", "MambaLMWrapper", "nemo_lm", "NeMoLM", "megatron_lm", "MegatronLMEval", "trtllm", "TRTLLM"),
    *("ipex", "neuronx", "openvino", "habana", "onnxruntime", "onnxruntime-genai", "winml", "OptimumLM"),
    *("openai-completions", "local-completions", "anthropic-completions", "textsynth", "watsonx_llm"),
}
RESULTS = "a results file of lm_eval"
NOT_IN_SPEC = ("batch_size", "max_batch_size", "device", "dtype")  # model args; the loaded dtype is stored elsewhere
SAME = 1e-6  # relative difference up to which two values are one
Json = Mapping[str, Any]


def _text(value: Any) -> str | None:
    return None if value is None or str(value).lower() in ("none", "") else str(value)


def _count(value: Any) -> int:
    float(count := int(value))  # raises OverflowError
    return count


TASK_COUNTS = ("documents", "windows", "tokens", "longest_document", "unk_tokens")
COUNTS: dict[str, Callable[[Any], Any]] = dict.fromkeys(TASK_COUNTS, _count)  # entries of config.duel.tasks.NAME
VALUE = COUNTS | {"nfe": _count, "log_prob": number, "stderr": number, "window_stderr": number}  # of each of its values
DUEL: dict[str, Callable[[Any], Any]] = {  # entries of config.duel
    **dict.fromkeys(("estimator", "rule", "block", "dtype", "attention", "weights", "bos", "device"), _text),
    **dict.fromkeys(("pretrained", "trace"), _text),
    **dict.fromkeys(("tokens", "forwards", "rows", "nfe", "longest_document", "row_capacity", "cut_contexts"), _count),
    **dict.fromkeys(("answers_from_cache", "ranks", "peak_memory_bytes", "parameters"), _count),
    "seconds": number,
}


@dataclasses.dataclass(eq=False)
class Task:
    """A task's part of a results file. Without logged samples there are no `documents`, and `missing` says so."""

    name: str
    metrics: dict[str, float]  # perplexities, each of the first filter that has it
    scores: dict[str, tuple[float, float | None]]  # other averages over documents, with their standard errors
    identity: dict[str, str]  # effective samples, limit, version, shots, hash
    output_type: str
    entry: dict[str, Any]  # its entry in config.duel.tasks
    documents: Documents | None = None
    missing: str = ""

    @property
    def rolling(self) -> bool:
        return self.output_type == "loglikelihood_rolling"

    @property
    def size(self) -> int | None:
        """Number of scored documents."""
        known = self.identity.get("documents")
        return int(known) if known else (None if self.documents is None else len(self.documents.numbers))

    @property
    def computed(self) -> int:
        """Documents that the run scored itself; the others came from a response cache."""
        count = self.entry.get("documents")
        return (self.size or 0) if count is None else count

    @property
    def partial(self) -> bool:
        """True if the run scored fewer (or other) documents than its values cover."""
        return self.size is not None and self.computed != self.size

    @property
    def unknown(self) -> float:
        """The share of tokens that the tokenizer does not know ([UNK]): 0 for other models of the harness."""
        return self.entry.get("unk_tokens", 0) / (self.entry.get("tokens") or 1)

    @property
    def tokens(self) -> dict[str, float] | None:
        """The number of tokens of each document, if they are known."""
        known = {} if self.documents is None else self.documents.values.get("token_perplexity", {})
        if self.documents is None or len(known) < len(self.documents.numbers):
            return None
        return {key: units for key, (_, units) in known.items()}


@dataclasses.dataclass(eq=False)
class Run:
    """One results file. The spec of another model of the harness is what it was loaded with; its `duel` is empty."""

    file: Path
    content: Json = dataclasses.field(repr=False)
    ours: bool
    pretrained: str
    spec: dict[str, str]
    duel: dict[str, Any]
    tasks: dict[str, Task]  # those with a perplexity
    others: dict[str, Task] = dataclasses.field(default_factory=dict)  # tasks without one
    groups: tuple[str, ...] = ()  # groups of tasks
    baseline: bool = False  # the autoregressive model of the gaps
    traced: dict[tuple[str, str], dict[int, float]] = dataclasses.field(default_factory=dict, repr=False)
    """(task, value) -> document -> nats, from a trace."""

    def __post_init__(self) -> None:
        spec, duel, config = self.spec, self.duel, self.content["config"]
        self.name, self.model = str(self.file), str(config["model"])  # for messages; --model, or the class of an object
        self.label = self.pretrained.rstrip("/").split("/")[-1] or self.pretrained  # how tables name the model
        # equal for the same model: digest of the weights, else the name that was loaded
        self.key = str((duel.get("weights") or spec.get("weights")) if self.ours else self.pretrained)
        self.fingerprint = _text(config.get("fingerprint"))
        dtype = duel.get("dtype") or _text(spec.get("dtype")) or _text(config.get("model_dtype")) or "unknown"
        self.dtype = dtype.removeprefix("torch.")
        length = str(spec.get("max_length") if self.ours else self.content.get("max_length"))
        self.max_length = int(length) if length.isdecimal() else None
        self.date = number(self.content.get("date")) or 0.0
        when = datetime.datetime.fromtimestamp(self.date, datetime.timezone.utc)
        self.when = when.isoformat(timespec="seconds") if self.date else ""  # ISO 8601
        known = {name: self.content.get(f"{name}_version") for name in ("lm_eval", "transformers")}
        known = {name: version for name, version in known.items() if version}
        ours = (config.get("duel") or {}).get("versions") or {}
        self.versions = {name: str(version or "unknown") for name, version in {**known, **ours}.items()}
        self.whole_run_seconds = number(self.content.get("total_evaluation_time_seconds"))
        # the estimator behind the harness's values; other models are autoregressive
        self.estimator = str(duel.get("estimator") or spec.get("estimator") or "duel") if self.ours else "ar"
        if self.estimator not in ESTIMATORS:
            raise DuelError(f"{self.file}: {unknown('estimator', self.estimator, ESTIMATORS)}")
        causal = self.estimator == "ar"
        # True if the values are known to come from an autoregressive model
        self.autoregressive = self.model in AUTOREGRESSIVE or (
            self.ours and (causal or duel.get("attention") == "causal")
        )
        # of a `duel` run, or of an estimate of its value
        follows = ESTIMATORS[self.estimator].follows_rule
        self.rule = duel.get("rule") or _text(spec.get("rule")) if follows else None
        # a number, or `none` (the whole target); None for autoregressive and other models
        self.block = None if causal else duel.get("block") or _text(spec.get("block")) or "none"
        # of the sampler: `none`, `prefix` or `dual`; None for networks that have no such choice
        no_cache = NO_CACHE if duel.get("attention") == "bidirectional" else None
        self.cache = None if causal else spec.get("cache", no_cache)
        self.has_cache = self.cache not in (None, NO_CACHE)

    @property
    def short_name(self) -> str:
        """The file and its folder, for notes."""
        return "/".join(self.file.parts[-2:])

    @property
    def title(self) -> str:
        """The estimator, or that it was a lattice run, and whether it is the baseline."""
        entry = ESTIMATORS[self.estimator]
        name = "Lattice" if entry.lattice else entry.title
        return f"{name} ({'baseline' if entry.name == 'ar' else 'AR baseline'})" if self.baseline else name

    @property
    def every_task(self) -> dict[str, Task]:
        """The tasks with a perplexity and those without."""
        return {**self.tasks, **self.others}

    def scores(self, name: str) -> dict[str, tuple[float, float | None]]:
        """The averages of a task other than perplexities, with their standard errors."""
        return self.every_task[name].scores if name in self.every_task else {}

    @property
    def cached(self) -> bool:
        """True if answers may have come from a response cache, so that times cover only a part of the run."""
        if not self.ours:
            return bool(self.content["config"].get("use_cache"))
        return bool(self.duel.get("answers_from_cache")) or any(task.partial for task in self.tasks.values())

    def left_out(self) -> list[str]:
        """Notes on the parts of the file that tables leave out."""
        if not self.ours and not self.autoregressive:
            return [
                f"{self.name} is a result of --model {self.model}, not known to be autoregressive, and is left out."
            ]
        notes = [f"{name} in {self.name} is a group of tasks and is left out." for name in self.groups]
        empty = [name for name, task in self.others.items() if not task.scores]
        notes += [f"{name} in {self.name} holds no perplexity and no accuracy, and is left out." for name in empty]
        return notes if self.every_task else [*notes, f"{self.name} holds no perplexity and is left out."]


# ---------------------------------------------------------------- files


def runs(places: Iterable[str | Path]) -> list[Run]:
    """The runs in result files and below folders; each file once, oldest first, with labels that distinguish models."""
    every = sorted((run for file in files(places) for run in of_file(file)), key=lambda run: (run.date, run.name))
    distinguish(every)
    return every


def files(places: Iterable[str | Path]) -> list[Path]:
    """The result files among files and below folders, each once; raises DuelError for a place without any.

    The harness writes results_DATE.json, or NAME_DATE.json for --output_path NAME.json.
    """
    every: list[Path] = []
    for place in map(Path, places):
        inside = [f for f in sorted(place.rglob("*.json")) if f.name[:8] == "results_" or WRITTEN.search(f.stem)]
        if not place.is_file() and not inside:
            below = f"No results_*.json (or *_DATE.json) in {place} or below"
            what = below if place.is_dir() else f"No file or folder {place}"
            raise DuelError(f"{what}; name results_*.json files of lm_eval, or folders that hold them.")
        every += [place] if place.is_file() else inside
    return list(dict.fromkeys(path.resolve() for path in every))


def of_file(file: Path) -> list[Run]:
    """The run of a results file; a file of `score --compare` has one for each model.

    Raises DuelError for any other file, for entries that lm_eval does not write, and for values that are NaN or
    contradict each other.
    """
    content = load(file, RESULTS)
    with reading(file, RESULTS):
        if content.get("format") != SCORE:
            return [_of_harness(file, content)]
        if content["version"] != SCORE_VERSION:
            raise ValueError(f"its version is {content['version']}, and this release reads {SCORE_VERSION}")
        models = [content, *content.get("compared", [])]
        return [of_score(Path(f"{file}#{n}" if n > 1 else file), model) for n, model in enumerate(models, 1)]


def distinguish(runs: Iterable[Run]) -> None:
    """Give different models of one label longer ones: with the folder, or else with the digest of the weights."""
    models: dict[str, dict[str, list[Run]]] = {}
    for run in runs:
        models.setdefault(run.label, {}).setdefault(run.key, []).append(run)
    for label, of_label in models.items():
        longer = {key: "/".join(Path(of_key[0].pretrained).parts[-2:]) for key, of_key in of_label.items()}
        unique = len(set(longer.values())) == len(of_label)
        for key, of_key in of_label.items() if len(of_label) > 1 else ():
            for run in of_key:
                run.label = longer[key] if unique else f"{label} ({key[:8]})"


def of_score(file: Path, content: Json) -> Run:
    """A model of a file of `score --json`. Its task is called `score`."""
    duel, documents = _duel(content["duel"]), samples.of_score(content["documents"])
    totals = {metric: map(sum, zip(*known.values(), strict=True)) for metric, known in documents.values.items()}
    metrics = {metric: float(stats.value(metric, *totals[metric])) for metric in METRICS if metric in totals}
    identity, entry = {"documents": str(len(documents.numbers))}, duel["tasks"].get("score", {})
    task = Task("score", metrics, {}, identity, "loglikelihood_rolling", entry, documents)
    config = {"model": MODEL, "fingerprint": content["fingerprint"], "duel": content["duel"]}
    spec, pretrained = _strings(content["spec"]), str(content["pretrained"])
    return _checked(Run(file, {"config": config}, True, pretrained, spec, duel, {"score": task}))


def _of_harness(file: Path, content: Json) -> Run:
    config = content["config"]
    model, arguments = str(config["model"]), config.get("model_args") or {}
    if isinstance(arguments, str):  # of lm_eval's Python API
        arguments = dict(part.split("=", 1) for part in arguments.split(",") if "=" in part)
    arguments, spec, duel = _strings(arguments), _strings(config.get("spec") or {}), _duel(config.get("duel") or {})
    ours = model == MODEL or bool(spec or config.get("duel"))  # a model object is recorded by its class
    if not ours:
        dtype = (_text(config.get("model_dtype")) or "unknown").removeprefix("torch.")
        spec = {key: value for key, value in arguments.items() if key not in NOT_IN_SPEC} | {"dtype": dtype}
        spec |= {"model_sha": str(config["model_sha"])} if config.get("model_sha") else {}
    groups = {name for name, parts in (content.get("group_subtasks") or {}).items() if parts}
    groups |= set(content.get("groups") or {})
    tasks = [_task(file, content, duel, name) for name in content["results"] if name not in groups]
    pretrained = str(duel.get("pretrained") or arguments.get("pretrained") or content.get("model_name") or model)
    with_perplexity = {task.name: task for task in tasks if task.metrics}
    others = {task.name: task for task in sorted(tasks, key=lambda task: task.name) if not task.metrics}
    known = tuple(sorted(groups & content["results"].keys()))
    return _checked(Run(file, content, ours, pretrained, spec, duel, with_perplexity, others, known))


def _task(file: Path, content: Json, duel: Json, name: str) -> Task:
    values, config = content["results"][name], content.get("configs", {}).get(name, {})
    identity = {
        "documents": content.get("n-samples", {}).get(name, {}).get("effective"),
        "limit": content["config"].get("limit"),
        "version": content.get("versions", {}).get(name),
        "shots": content.get("n-shot", {}).get(name),
        "hash": content.get("task_hashes", {}).get(name),
    }
    output_type = str(config.get("output_type") or "loglikelihood_rolling")
    known = {key: str(value) for key, value in identity.items() if value is not None}
    task = Task(name, {}, {}, known, output_type, duel["tasks"].get(name, {}))
    for entry, value in values.items():
        metric, comma, filtered = entry.partition(",")
        if metric in METRICS:
            if value is None or math.isnan(value := float(value)):
                raise ValueError(f"{entry} of {name} is {'null' if value is None else 'NaN'}")
            task.metrics.setdefault(metric, value)
        elif comma and not metric.endswith("_stderr") and metric not in OTHER_NAMES and type(value) in (int, float):
            error = values.get(f"{metric}_stderr,{filtered}")  # or "N/A", or NaN
            error = None if error == "N/A" or error != error else number(error)
            if not math.isnan(value):
                task.scores[metric if filtered == "none" else f"{metric} ({filtered})"] = float(value), error
    if task.metrics:
        task.documents, task.missing = samples.of_harness(file, name, task.rolling)
    return task


def _checked(run: Run) -> Run:
    """A run; raises an error if log_prob, tokens and perplexity of a task do not agree, or are no probability's."""
    for key in ("elbo_eps", "mc_samples"):
        number(run.spec[key] if run.spec.get(key, "none") != "none" else None)
    if run.ours and "version" not in run.spec:
        raise ValueError("its spec has no version")
    for name, task in run.tasks.items():
        entry = {} if task.partial else task.entry
        log_probs = {key: v["log_prob"] for key, v in entry.get("values", {}).items() if v["log_prob"] is not None}
        log_prob, known = log_probs.get(run.estimator), task.metrics.get("token_perplexity")
        if entry.get("tokens") and log_prob is not None and known is not None:
            implied = perplexity(-log_prob / entry["tokens"])
            if not math.isclose(known, implied, rel_tol=SAME):
                raise DuelError(
                    f"{run.name} contradicts itself: token_perplexity of {name} is {known:.10g}, but its log_prob and "
                    f"tokens make it {implied:.10g}. Run the task again, or leave the file out."
                )
        values = {**task.metrics, **{f"log_prob of {key}": -nats for key, nats in log_probs.items()}}
        for what, known in values.items():
            if known < 0 or (not known and what in METRICS and what != "bits_per_byte"):
                raise DuelError(
                    f"{run.name}: {what} of {name} is impossible: a probability is at most 1. Run the task again, "
                    "or leave the file out."
                )
    return run


def _strings(entries: Json) -> dict[str, str]:
    return {key: "none" if value in (None, "None") else str(value) for key, value in entries.items()}


def _duel(duel: Json) -> dict[str, Any]:
    """The entries of config.duel that are read. A log-likelihood of null with a reason is minus infinity."""
    entries = _typed(duel, DUEL) | {"tasks": {}}
    for name, scored in (duel.get("tasks") or {}).items():
        values = {}
        for key, value in scored["values"].items():
            impossible = value.get("log_prob") is None and value.get("reason") is not None
            values[key] = {"log_prob": -math.inf if impossible else None} | _typed(value, VALUE)
            if beam := value.get("beam"):
                values[key]["beam"] = BeamBlocks.read(beam)
        entries["tasks"][name] = _typed(scored, COUNTS) | {"values": values}
    return entries


def _typed(entries: Json, kinds: Mapping[str, Callable[[Any], Any]]) -> dict[str, Any]:
    return {key: kind(entries[key]) for key, kind in kinds.items() if entries.get(key) is not None}
