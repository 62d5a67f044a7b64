"""The harness's results_*.json as plain dataclasses. Nothing is compared or computed here."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from lm_eval_duel.errors import DuelError, unknown
from lm_eval_duel.estimators.registry import ESTIMATORS
from lm_eval_duel.results import consistency, fields, own_texts
from lm_eval_duel.results.fields import Fields
from lm_eval_duel.results.records import NO_CACHE
from lm_eval_duel.results.samples import WRITTEN
from lm_eval_duel.results.task import Task, keys, nans, perplexities, task

MODEL = "duel-mdm"
AUTOREGRESSIVE = {  # names of --model in the harness, and the classes of model objects
    *("hf", "hf-auto", "huggingface", "hf-mistral3", "hf-multimodal", "hf-audiolm-qwen", "steered", "HFLM"),
    *("SteeredModel", "vllm", "vllm-vlm", "VLLM", "sglang", "sglang-generate", "SGLangLM", "gguf", "ggml", "GGUFLM"),
    *("mamba_ssm", "MambaLMWrapper", "nemo_lm", "NeMoLM", "megatron_lm", "MegatronLMEval", "trtllm", "TRTLLM"),
    *("ipex", "neuronx", "openvino", "habana", "onnxruntime", "onnxruntime-genai", "winml", "OptimumLM"),
    *("openai-completions", "local-completions", "anthropic-completions", "textsynth", "watsonx_llm"),
}
RESULTS = "a results file of lm_eval"
TEXTS = (
    "estimator",
    "rule",
    "block",
    "dtype",
    "attention",
    "weights",
    "bos",
    "device",
    "pretrained",
    "trace",
)  # entries of config.duel
COUNTS = (
    *("tokens", "forwards", "rows", "nfe", "longest_document", "row_capacity", "cut_contexts", "answers_from_cache"),
    *("ranks", "peak_memory_bytes"),
)
TASK_COUNTS = ("documents", "windows", "tokens", "longest_document", "unk_tokens")  # entries of config.duel.tasks.NAME
NOT_IN_SPEC = ("batch_size", "max_batch_size", "device", "dtype")  # model args; the loaded dtype is stored elsewhere


@dataclasses.dataclass(frozen=True)
class Run:
    """One results file. Other models of the harness have no `duel` entry; their spec is what they were loaded with."""

    file: Path
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
    use_cache: bool  # a response cache
    tasks: dict[str, Task]  # those with a perplexity
    others: dict[str, Task]  # tasks without one
    groups: tuple[str, ...]  # groups of tasks
    nans: tuple[str, ...] = ()  # values that are not numbers and are left out
    content: Fields | None = dataclasses.field(default=None, repr=False, compare=False)

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
            return self.use_cache
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
    def block(self) -> str:
        """The block as text: a number, or `none` (the whole target)."""
        return (_text(self.duel.get("block")) or _text(self.spec.get("block")) or "none") if self.ours else "none"

    @property
    def cache(self) -> str | None:
        """The cache of the sampler: `none`, `prefix` or `dual`; None for networks that have no such choice."""
        bidirectional = self.ours and self.duel.get("attention") == "bidirectional"
        return self.spec.get("cache", NO_CACHE if bidirectional else None) if self.ours else None


def _text(value: Any) -> str | None:
    return None if value is None or str(value).lower() in ("none", "") else str(value)


def runs(places: Iterable[str | Path]) -> list[Run]:
    """The runs in result files and below folders; each file once, oldest first."""
    every = [run for file in files(places) for run in _of_file(file)]
    return _distinct(sorted(every, key=lambda run: (run.date, run.name)))


def files(places: Iterable[str | Path]) -> list[Path]:
    """The result files among files and below folders, each once; raises DuelError for a place without any."""
    all_files: dict[Path, None] = {}
    for name in places:
        place = Path(name)
        if str(name) and place.is_dir():
            inside = [path for path in sorted(place.rglob("*.json")) if _is_results_name(path)]
            if not inside:
                raise DuelError(
                    f"No results_*.json (or *_DATE.json) in {place} or below; lm_eval writes them to --output_path."
                )
            all_files |= dict.fromkeys(path.resolve() for path in inside)
        elif place.is_file():
            all_files[place.resolve()] = None
        else:
            raise DuelError(
                f"No file or folder {name}; name results_*.json files of lm_eval, or folders that hold them."
            )
    return list(all_files)


def _is_results_name(file: Path) -> bool:
    """Whether the harness names results like this: results_DATE.json, or NAME_DATE.json for --output_path NAME.json."""
    return file.name.startswith("results_") or WRITTEN.search(file.stem) is not None


def run(file: Path) -> Run:
    """Read a results file; raises DuelError for any other file, and for entries that lm_eval does not write."""
    return _of_file(file)[0]


def _of_file(file: Path) -> list[Run]:
    """The run of a results file; a file of `score --compare` has one for each model."""
    loaded = fields.load(file, RESULTS)
    if not own_texts.is_score(loaded):
        return [_run(file, loaded)]
    others = Fields(loaded, str(file)).list("compared")
    return [_run(file, loaded), *(_run(Path(f"{file}#{n}"), other) for n, other in enumerate(others, 2))]


def _run(file: Path, loaded: Any) -> Run:
    documents = None
    try:
        if own_texts.is_score(loaded):
            loaded, documents = own_texts.as_results(Fields(loaded, str(file)))
        content = Fields(loaded, str(file))
        config, results = (Fields(content[key], str(file), key) for key in ("config", "results"))
        model = config.text("model") if config["model"] else None
    except KeyError as error:
        raise DuelError(
            f"{file} is not {RESULTS} (KeyError: {error}); name the results_*.json that --output_path wrote."
        ) from None
    if model is None:
        raise config.wrong("model", None, "the name of a model")
    arguments = _arguments(config)
    spec, duel = _spec(config), _duel(config.object("duel"))
    ours = model == MODEL or bool(spec or config.get("duel"))  # a model object is recorded by its class
    dtype = _text(duel.get("dtype")) or _text(spec.get("dtype")) or _text(config.text("model_dtype")) or "unknown"
    dtype = dtype.removeprefix("torch.")
    pretrained = str(duel.get("pretrained") or arguments.get("pretrained") or content.text("model_name") or model)
    if not ours:
        spec = {key: value for key, value in arguments.items() if key not in NOT_IN_SPEC} | {"dtype": dtype}
        spec |= {"model_sha": config.text("model_sha")} if config.get("model_sha") else {}
    length = spec.get("max_length") if ours else content.get("max_length")
    groups = {name for name, parts in content.object("group_subtasks").items() if parts} | set(content.object("groups"))
    tasks = {name: task(file, content, name, key, documents) for name, key in keys(content, groups).items()}
    result = Run(
        file=file,
        content=content,
        ours=ours,
        model=model,
        pretrained=pretrained,
        label=_last(pretrained),
        key=str((duel.get("weights") or spec.get("weights")) if ours else pretrained),
        dtype=dtype,
        fingerprint=config.text("fingerprint"),
        spec=spec,
        duel=duel,
        max_length=int(length) if str(length).isdecimal() else None,
        date=content.finite("date") or 0.0,
        whole_run_seconds=content.finite("total_evaluation_time_seconds", 0),
        use_cache=bool(config.get("use_cache")),
        tasks={name: task for name, task in tasks.items() if task.metrics},
        others={name: task for name, task in sorted(tasks.items()) if not task.metrics},
        groups=tuple(sorted(groups & results.keys())),
        nans=tuple(line for name, task in tasks.items() for line in nans(results.object(task.key), name)),
    )
    if result.estimator not in ESTIMATORS:
        raise DuelError(f"{file}: {unknown('estimator', result.estimator, ESTIMATORS)}")
    for name, scored in result.tasks.items():
        total = {} if result.partial(name) else duel["tasks"].get(name, {})
        for metrics in perplexities(results.object(scored.key)).values():
            consistency.check(str(file), name, metrics, total, result.estimator)
    return result


def _arguments(config: Fields) -> dict[str, str]:
    """The model args; lm_eval's Python API stores them as text."""
    model_args = config.get("model_args")
    if isinstance(model_args, str):
        return dict(part.split("=", 1) for part in model_args.split(",") if "=" in part)
    return {
        key: "none" if value in (None, "None") else str(value) for key, value in config.object("model_args").items()
    }


def _spec(config: Fields) -> dict[str, str]:
    """The spec as strings; entries that are read as numbers are checked."""
    spec = config.object("spec")
    texts = {key: "none" if value in (None, "None") else str(value) for key, value in spec.items()}
    for key in ("elbo_eps", "mc_samples"):
        if texts.get(key, "none") != "none":
            spec.finite(key, 0)
    return texts


def _duel(duel: Fields) -> dict[str, Any]:
    """The entries of config.duel that the report reads."""
    entries: dict[str, Any] = {key: duel.text(key) for key in TEXTS if key in duel}
    entries |= {key: duel.count(key) for key in COUNTS if key in duel}
    entries["seconds"] = duel.finite("seconds", 0)
    entries["tasks"] = {}
    for name in (tasks := duel.object("tasks")):
        task = tasks.object(name)
        values = task.object("values")
        entries["tasks"][name] = {key: task.count(key) for key in TASK_COUNTS if task.get(key) is not None}
        entries["tasks"][name]["values"] = {key: _value(values.object(key)) for key in values}
    return entries


def _value(value: Fields) -> dict[str, Any]:
    """One value of a task: its log-likelihood in nats, errors and counts. Null with a reason is minus infinity."""
    entries: dict[str, Any] = {"log_prob": value.number("log_prob"), "nfe": value.count("nfe")}
    if entries["log_prob"] is None and value.text("reason") is not None:
        entries["log_prob"] = -math.inf
    entries |= {key: value.finite(key, 0) for key in ("stderr", "window_stderr")}
    return entries | {key: value.count(key) for key in TASK_COUNTS if value.get(key) is not None}


def _last(pretrained: str) -> str:
    return pretrained.rstrip("/").split("/")[-1] or pretrained


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
