"""The harness's results_*.json as plain dataclasses; nothing is compared or computed here."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from lm_eval_duel.errors import DuelError, unknown
from lm_eval_duel.estimators.registry import ESTIMATORS, canonical
from lm_eval_duel.report import fields
from lm_eval_duel.report.fields import Fields
from lm_eval_duel.report.samples import WRITTEN
from lm_eval_duel.report.task import Task, nans, task

MODEL = "duel-mdm"
AUTOREGRESSIVE = {  # --model of the harness, and the classes of model objects
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
)  # of duel
COUNTS = (
    *("tokens", "forwards", "rows", "nfe", "longest_document", "row_capacity", "cut_contexts", "answers_from_cache"),
    *("ranks", "peak_memory_bytes"),
)
OF_TASK = ("documents", "windows", "tokens", "longest_document")  # counts of duel.tasks.NAME
NO_LAW = ("batch_size", "max_batch_size", "device", "dtype")  # model args; the dtype that was loaded stands elsewhere


@dataclasses.dataclass(frozen=True)
class Run:
    """One results file. A stock model of the harness has no `duel`; its spec is what it was loaded with."""

    file: Path
    ours: bool
    model: str  # --model, or the class of a model object
    pretrained: str
    label: str  # how tables name the model
    key: str  # equal for the same model: weights, else what was loaded
    dtype: str
    fingerprint: str | None
    spec: dict[str, str]
    duel: dict[str, Any]
    max_length: int | None
    date: float
    whole_run_seconds: float | None
    cache: bool  # --use_cache
    tasks: dict[str, Task]  # those with a perplexity
    others: dict[str, Task]  # tasks without one
    groups: tuple[str, ...]  # averages over tasks
    nans: tuple[str, ...] = ()  # values that are no numbers, and are left out

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
        """What the harness's own values of this run are; a stock model is autoregressive."""
        return canonical(str(self.duel.get("estimator") or self.spec.get("estimator") or "duel")) if self.ours else "ar"

    @property
    def autoregressive(self) -> bool:
        """Whether the values are those of an autoregressive model, as far as that is known."""
        return self.model in AUTOREGRESSIVE or (
            self.ours and (self.estimator == "ar" or self.duel.get("attention") == "causal")
        )

    @property
    def cached(self) -> bool:
        """Whether answers may have come from a response cache, so that times are of a part of the run."""
        if not self.ours:
            return self.cache
        found = bool(self.duel.get("answers_from_cache"))
        return found or any(self.partial(name) for name in self.tasks)

    def computed(self, name: str) -> int:
        """Documents of a task whose figures this run has; the others came from a response cache that had none."""
        found = self.duel["tasks"].get(name, {}).get("documents")
        return (self.tasks[name].size or 0) if found is None else found

    def partial(self, name: str) -> bool:
        """Whether this run's figures of a task are of fewer (or other) documents than its values."""
        size = self.tasks[name].size
        return size is not None and self.computed(name) != size

    @property
    def rule(self) -> str | None:
        """The rule of a `duel` run."""
        if self.estimator != "duel":
            return None
        return _said(self.duel.get("rule") or self.spec.get("rule"))

    @property
    def block(self) -> str:
        """The block as text: a number, or `none` (the whole target)."""
        return (_said(self.duel.get("block")) or _said(self.spec.get("block")) or "none") if self.ours else "none"


def _said(value: Any) -> str | None:
    return None if value is None or str(value).lower() in ("none", "") else str(value)


def runs(places: Iterable[str | Path]) -> list[Run]:
    """The runs of result files, and of all below folders; each file once, oldest first."""
    return _distinct(sorted(map(run, files(places)), key=lambda found: (found.date, found.name)))


def files(places: Iterable[str | Path]) -> list[Path]:
    """The result files of files and folders, each once; raises DuelError for a place that has none."""
    all_files: dict[Path, None] = {}
    for name in places:
        place = Path(name)
        if str(name) and place.is_dir():
            found = [path for path in sorted(place.rglob("*.json")) if _written(path)]
            if not found:
                raise DuelError(
                    f"No results_*.json (or *_DATE.json) in {place} or below; lm_eval writes them to --output_path."
                )
            all_files |= dict.fromkeys(path.resolve() for path in found)
        elif place.is_file():
            all_files[place.resolve()] = None
        else:
            raise DuelError(
                f"No file or folder {name}; name results_*.json files of lm_eval, or folders that hold them."
            )
    return list(all_files)


def _written(file: Path) -> bool:
    """Whether the harness names results so: results_DATE.json, or NAME_DATE.json for --output_path NAME.json."""
    return file.name.startswith("results_") or WRITTEN.search(file.stem) is not None


def run(file: Path) -> Run:
    """One results file; raises DuelError for what is none, or for an entry that is not what lm_eval writes."""
    try:
        found = Fields(fields.load(file, RESULTS), str(file))
        config, results = (Fields(found[key], str(file), key) for key in ("config", "results"))
        model = config.text("model") if config["model"] else None
    except KeyError as error:
        raise DuelError(
            f"{file} is not {RESULTS} (KeyError: {error}); name the results_*.json that --output_path wrote."
        ) from None
    if model is None:
        raise config.wrong("model", None, "the name of a model")
    arguments = _arguments(config)
    spec, duel = _law(config), _duel(config.object("duel"))
    ours = model == MODEL or bool(spec or config.get("duel"))  # a model object leaves the name of its class
    dtype = _said(duel.get("dtype")) or _said(spec.get("dtype")) or _said(config.text("model_dtype")) or "unknown"
    dtype = dtype.removeprefix("torch.")
    pretrained = str(duel.get("pretrained") or arguments.get("pretrained") or found.text("model_name") or model)
    if not ours:
        spec = {key: value for key, value in arguments.items() if key not in NO_LAW} | {"dtype": dtype}
        spec |= {"model_sha": config.text("model_sha")} if config.get("model_sha") else {}
    length = spec.get("max_length") if ours else found.get("max_length")
    groups = {name for name, parts in found.object("group_subtasks").items() if parts} | set(found.object("groups"))
    tasks = {name: task(file, found, results.object(name), name) for name in results if name not in groups}
    result = Run(
        file=file,
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
        date=found.finite("date") or 0.0,
        whole_run_seconds=found.finite("total_evaluation_time_seconds", 0),
        cache=bool(config.get("use_cache")),
        tasks={name: task for name, task in tasks.items() if task.metrics},
        others={name: task for name, task in sorted(tasks.items()) if not task.metrics},
        groups=tuple(sorted(groups & results.keys())),
        nans=tuple(line for name in tasks for line in nans(results.object(name), name)),
    )
    if result.estimator not in ESTIMATORS:
        raise DuelError(f"{file}: {unknown('estimator', result.estimator, ESTIMATORS)}")
    return result


def _arguments(config: Fields) -> dict[str, str]:
    """The model args; the Python API keeps the text."""
    said = config.get("model_args")
    if isinstance(said, str):
        return dict(part.split("=", 1) for part in said.split(",") if "=" in part)
    return {
        key: "none" if value in (None, "None") else str(value) for key, value in config.object("model_args").items()
    }


def _law(config: Fields) -> dict[str, str]:
    """The spec in words; its numbers are numbers."""
    spec = config.object("spec")
    said = {key: "none" if value in (None, "None") else str(value) for key, value in spec.items()}
    for key in ("elbo_eps", "mc_samples"):
        if said.get(key, "none") != "none":
            spec.finite(key, 0)
    return said


def _duel(duel: Fields) -> dict[str, Any]:
    """What our model says about a run, as far as the report reads it."""
    found: dict[str, Any] = {key: duel.text(key) for key in TEXTS if key in duel}
    found |= {key: duel.count(key) for key in COUNTS if key in duel}
    found["seconds"] = duel.finite("seconds", 0)
    found["tasks"] = {}
    for name in (tasks := duel.object("tasks")):
        task = tasks.object(name)
        values = task.object("values")
        found["tasks"][name] = {key: task.count(key) for key in OF_TASK if task.get(key) is not None}
        found["tasks"][name]["values"] = {canonical(key): _value(values.object(key)) for key in values}
    return found


def _value(value: Fields) -> dict[str, Any]:
    """One figure of a task: nats with their errors, and what they are of."""
    found: dict[str, Any] = {"log_prob": value.number("log_prob"), "nfe": value.count("nfe")}
    found |= {key: value.finite(key, 0) for key in ("stderr", "window_stderr")}
    return found | {key: value.count(key) for key in OF_TASK if value.get(key) is not None}


def _last(pretrained: str) -> str:
    return pretrained.rstrip("/").split("/")[-1] or pretrained


def _distinct(found: list[Run]) -> list[Run]:
    """The same runs; where two models would have one label, with what sets them apart beside it."""
    keys: dict[str, dict[str, str]] = {}
    for one in found:
        keys.setdefault(one.label, {}).setdefault(one.key, one.pretrained)
    labels = {}
    for label, models in keys.items():
        apart = {key: "/".join(Path(name).parts[-2:]) for key, name in models.items()}
        if len(set(apart.values())) < len(models):
            apart = {key: f"{label} ({key[:8]})" for key in models}
        labels |= {(label, key): label if len(models) == 1 else apart[key] for key in models}
    return [dataclasses.replace(one, label=labels[one.label, one.key]) for one in found]
