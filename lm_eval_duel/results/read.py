"""Results files of the harness and of `score --json`, as records. Nothing is compared or computed here."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from lm_eval_duel.errors import DuelError, unknown
from lm_eval_duel.estimators.registry import ESTIMATORS
from lm_eval_duel.estimators.subsets.sums import BeamSums
from lm_eval_duel.results import samples, stats
from lm_eval_duel.results.own_files import load, number, whole
from lm_eval_duel.results.samples import WRITTEN, Document
from lm_eval_duel.results.task import Json, Task, check, keys, task

MODEL, SCORE, NO_CACHE = "duel-mdm", "lm_eval_duel score", "none"
AUTOREGRESSIVE = {  # names of --model in the harness, and the classes of model objects
    *("hf", "hf-auto", "huggingface", "hf-mistral3", "hf-multimodal", "hf-audiolm-qwen", "steered", "HFLM"),
    *("SteeredModel", "vllm", "vllm-vlm", "VLLM", "sglang", "sglang-generate", "SGLangLM", "gguf", "ggml", "GGUFLM"),
    *("mamba_ssm", "MambaLMWrapper", "nemo_lm", "NeMoLM", "megatron_lm", "MegatronLMEval", "trtllm", "TRTLLM"),
    *("ipex", "neuronx", "openvino", "habana", "onnxruntime", "onnxruntime-genai", "winml", "OptimumLM"),
    *("openai-completions", "local-completions", "anthropic-completions", "textsynth", "watsonx_llm"),
}
RESULTS = "a results file of lm_eval"
NOT_IN_SPEC = ("batch_size", "max_batch_size", "device", "dtype")  # model args; the loaded dtype is stored elsewhere


def _text(value: Any) -> str | None:
    return None if value is None or str(value).lower() in ("none", "") else str(value)


TASK_COUNTS = ("documents", "windows", "tokens", "longest_document", "unk_tokens")
TASK = dict.fromkeys(TASK_COUNTS, int)  # entries of config.duel.tasks.NAME that are read
VALUE = TASK | {"nfe": int, "log_prob": number, "stderr": number, "window_stderr": number}  # of each of its values
DUEL = {  # of config.duel
    **dict.fromkeys(("estimator", "rule", "block", "dtype", "attention", "weights", "bos", "device"), _text),
    **dict.fromkeys(("pretrained", "trace"), _text),
    **dict.fromkeys(("tokens", "forwards", "rows", "nfe", "longest_document", "row_capacity", "cut_contexts"), int),
    **dict.fromkeys(("answers_from_cache", "ranks", "peak_memory_bytes"), int),
    "seconds": number,
}


@dataclasses.dataclass(frozen=True)
class Run:
    """One results file. Other models of the harness have no `duel` entry; their spec is what they were loaded with."""

    file: Path
    content: Json = dataclasses.field(repr=False, compare=False)
    ours: bool
    model: str  # --model, or the class of a model object
    pretrained: str
    label: str  # how tables name the model
    key: str  # equal for the same model: digest of the weights, else the name that was loaded
    dtype: str
    fingerprint: str | None
    spec: dict[str, str]
    duel: dict[str, Any]
    max_length: int | None
    date: float
    whole_run_seconds: float | None
    tasks: dict[str, Task]  # those with a perplexity
    others: dict[str, Task]  # tasks without one
    groups: tuple[str, ...]  # groups of tasks
    baseline: bool = False  # the autoregressive model of the gaps
    # task -> value -> document -> nats, from a trace
    traced: Mapping[str, Mapping[str, Mapping[int, float]]] = dataclasses.field(
        default_factory=dict, repr=False, compare=False
    )

    @property
    def name(self) -> str:
        """The file as messages name it."""
        return str(self.file)

    @property
    def short_name(self) -> str:
        """The file and its folder, for notes."""
        return "/".join(self.file.parts[-2:])

    @property
    def estimator(self) -> str:
        """The estimator behind the harness's values of this run; other models are autoregressive."""
        return str(self.duel.get("estimator") or self.spec.get("estimator") or "duel") if self.ours else "ar"

    @property
    def autoregressive(self) -> bool:
        """Whether the values are known to be those of an autoregressive model."""
        return self.model in AUTOREGRESSIVE or (
            self.ours and (self.estimator == "ar" or self.duel.get("attention") == "causal")
        )

    @property
    def cached(self) -> bool:
        """Whether answers may have come from a response cache, so that times cover only a part of the run."""
        if not self.ours:
            return bool(self.content["config"].get("use_cache"))
        return bool(self.duel.get("answers_from_cache")) or any(self.partial(name) for name in self.tasks)

    def has(self, name: str, metric: str) -> bool:
        """Whether a task of this run has a metric."""
        return name in self.tasks and metric in self.tasks[name].metrics

    def computed(self, name: str) -> int:
        """Documents of a task that this run scored itself; the others came from a response cache."""
        count = self.duel["tasks"].get(name, {}).get("documents")
        return (self.tasks[name].size or 0) if count is None else count

    def partial(self, name: str) -> bool:
        """Whether this run scored fewer (or other) documents of a task than its values cover."""
        size = self.tasks[name].size
        return size is not None and self.computed(name) != size

    def unknown(self, name: str) -> float:
        """The share of a task's tokens that the tokenizer does not know ([UNK]): 0 for other models of the harness."""
        scored = self.duel["tasks"].get(name, {})
        return scored.get("unk_tokens", 0) / (scored.get("tokens") or 1)

    @property
    def rule(self) -> str | None:
        """The rule of a `duel` run, or of an estimate of its value."""
        if not ESTIMATORS[self.estimator].follows_rule:
            return None
        return _text(self.duel.get("rule") or self.spec.get("rule"))

    @property
    def block(self) -> str | None:
        """The block as text: a number, or `none` (the whole target); None for autoregressive and other models."""
        if self.estimator == "ar":
            return None
        return _text(self.duel.get("block")) or _text(self.spec.get("block")) or "none"

    @property
    def cache(self) -> str | None:
        """The cache of the sampler: `none`, `prefix` or `dual`; None for networks that have no such choice."""
        if self.estimator == "ar":
            return None
        return self.spec.get("cache", NO_CACHE if self.duel.get("attention") == "bidirectional" else None)

    @property
    def has_cache(self) -> bool:
        return self.cache not in (None, NO_CACHE)


# ---------------------------------------------------------------- files


def runs(places: Iterable[str | Path]) -> list[Run]:
    """The runs in result files and below folders; each file once, oldest first."""
    every = [run for file in files(places) for run in _of_file(file)]
    return _distinct(sorted(every, key=lambda run: (run.date, run.name)))


def files(places: Iterable[str | Path]) -> list[Path]:
    """The result files among files and below folders, each once; raises DuelError for a place without any.

    The harness writes results_DATE.json, or NAME_DATE.json for --output_path NAME.json.
    """
    every: list[Path] = []
    for name in places:
        place = Path(name)
        if str(name) and place.is_dir():
            inside = [f for f in sorted(place.rglob("*.json")) if f.name[:8] == "results_" or WRITTEN.search(f.stem)]
            if not inside:
                raise DuelError(
                    f"No results_*.json (or *_DATE.json) in {place} or below; lm_eval writes them to --output_path."
                )
            every += inside
        elif place.is_file():
            every.append(place)
        else:
            raise DuelError(
                f"No file or folder {name}; name results_*.json files of lm_eval, or folders that hold them."
            )
    return list(dict.fromkeys(path.resolve() for path in every))


def run(file: Path) -> Run:
    """Read a results file; raises DuelError for any other file, and for entries that lm_eval does not write."""
    return _of_file(file)[0]


def _of_file(file: Path) -> list[Run]:
    """The run of a results file; a file of `score --compare` has one for each model."""
    content = load(file, RESULTS)
    with whole(file, RESULTS):
        if content.get("format") != SCORE:
            return [_run(file, content, None)]
        scored = [content, *content.get("compared", [])]
        names = [file, *(Path(f"{file}#{n}") for n in range(2, len(scored) + 1))]
        return [_run(name, *_as_results(model)) for name, model in zip(names, scored, strict=True)]


def _as_results(content: Json) -> tuple[Json, tuple[Document, ...]]:
    """A file of `score --json` as lm_eval writes results, and its documents."""
    units = {"token_perplexity": "tokens", "word_perplexity": "words"}
    units |= {"byte_perplexity": "bytes", "bits_per_byte": "bytes"}
    documents, totals = [], dict.fromkeys(units, (0.0, 0.0))
    for n, entry in enumerate(content["documents"]):
        nats = -math.inf if entry["log_prob"] is None else float(entry["log_prob"])
        values = {metric: (nats, float(entry[unit])) for metric, unit in units.items() if entry[unit]}
        totals = {m: (known[0] + nats, known[1] + entry[units[m]]) for m, known in totals.items()}
        documents.append((n, str(entry["sha256"]), values))
    results = {
        "results": {"score": {f"{m},none": stats.value(m, *total) for m, total in totals.items() if total[1]}},
        "config": {"model": MODEL, "model_args": {"pretrained": content["pretrained"]}}
        | {key: content[key] for key in ("fingerprint", "spec", "duel")},
        "n-samples": {"score": {"original": len(documents), "effective": len(documents)}},
    }
    return results, samples.numbered(documents)


def _run(file: Path, content: Json, documents: tuple[Document, ...] | None) -> Run:
    """A results file. `documents`: those that the file itself holds."""
    config = content["config"]
    model, arguments = str(config["model"]), _arguments(config.get("model_args"))
    spec = {key: _string(value) for key, value in (config.get("spec") or {}).items()}
    duel = _duel(config.get("duel") or {})
    ours = model == MODEL or bool(spec or config.get("duel"))  # a model object is recorded by its class
    dtype = _text(duel.get("dtype")) or _text(spec.get("dtype")) or _text(config.get("model_dtype")) or "unknown"
    dtype = dtype.removeprefix("torch.")
    pretrained = str(duel.get("pretrained") or arguments.get("pretrained") or content.get("model_name") or model)
    if not ours:
        spec = {key: value for key, value in arguments.items() if key not in NOT_IN_SPEC} | {"dtype": dtype}
        spec |= {"model_sha": str(config["model_sha"])} if config.get("model_sha") else {}
    for key in ("elbo_eps", "mc_samples"):
        number(spec[key] if spec.get(key, "none") != "none" else None)
    length = spec.get("max_length") if ours else content.get("max_length")
    groups = {name for name, parts in (content.get("group_subtasks") or {}).items() if parts}
    groups |= set(content.get("groups") or {})
    tasks = {name: task(file, content, name, key, documents) for name, key in keys(content, groups).items()}
    result = Run(
        file=file,
        content=content,
        ours=ours,
        model=model,
        pretrained=pretrained,
        label=pretrained.rstrip("/").split("/")[-1] or pretrained,
        key=str((duel.get("weights") or spec.get("weights")) if ours else pretrained),
        dtype=dtype,
        fingerprint=_text(config.get("fingerprint")),
        spec=spec,
        duel=duel,
        max_length=int(length) if str(length).isdecimal() else None,
        date=number(content.get("date")) or 0.0,
        whole_run_seconds=number(content.get("total_evaluation_time_seconds")),
        tasks={name: task for name, task in tasks.items() if task.metrics},
        others={name: task for name, task in sorted(tasks.items()) if not task.metrics},
        groups=tuple(sorted(groups & content["results"].keys())),
    )
    if result.estimator not in ESTIMATORS:
        raise DuelError(f"{file}: {unknown('estimator', result.estimator, ESTIMATORS)}")
    for name, scored in result.tasks.items():
        check(file, scored, {} if result.partial(name) else duel["tasks"].get(name, {}), result.estimator)
    return result


def _arguments(model_args: Any) -> dict[str, str]:
    """The model args; lm_eval's Python API stores them as text."""
    if isinstance(model_args, str):
        return dict(part.split("=", 1) for part in model_args.split(",") if "=" in part)
    return {key: _string(value) for key, value in (model_args or {}).items()}


def _duel(duel: Json) -> dict[str, Any]:
    """The entries of config.duel that are read. A log-likelihood of null with a reason is minus infinity."""
    entries = _typed(duel, DUEL) | {"tasks": {}}
    for name, scored in (duel.get("tasks") or {}).items():
        values = {}
        for key, value in scored["values"].items():
            impossible = value.get("log_prob") is None and value.get("reason") is not None
            values[key] = {"log_prob": -math.inf if impossible else None} | _typed(value, VALUE)
            if beam := value.get("beam"):
                values[key]["beam"] = BeamSums.read(beam)
        entries["tasks"][name] = _typed(scored, TASK) | {"values": values}
    return entries


def _typed(entries: Json, kinds: Mapping[str, Callable[[Any], Any]]) -> dict[str, Any]:
    return {key: kind(entries[key]) for key, kind in kinds.items() if entries.get(key) is not None}


def _string(value: Any) -> str:
    return "none" if value in (None, "None") else str(value)


def _distinct(runs: list[Run]) -> list[Run]:
    """Runs with labels that are unique per model: if two models share one, what distinguishes them is added."""
    keys: dict[str, dict[str, str]] = {}
    for run in runs:
        keys.setdefault(run.label, {}).setdefault(run.key, run.pretrained)
    labels = {}
    for label, models in keys.items():
        apart = {key: "/".join(Path(name).parts[-2:]) for key, name in models.items()}
        if len(set(apart.values())) < len(models):
            apart = {key: f"{label} ({key[:8]})" for key in models}
        labels |= {(label, key): label if len(models) == 1 else apart[key] for key in models}
    return [dataclasses.replace(run, label=labels[run.label, run.key]) for run in runs]
