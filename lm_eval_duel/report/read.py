"""The harness's results_*.json as plain dataclasses; nothing is compared or computed here."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from lm_eval_duel.errors import DuelError
from lm_eval_duel.report import samples
from lm_eval_duel.report.samples import METRICS, Document

MODEL = "duel-mdm"
WRITTEN = re.compile(r"\d{4}-\d\d-\d\dT[\d.:-]+$")  # the date at the end of the harness's file names
AUTOREGRESSIVE = {  # --model of the harness, and the classes of model objects
    *("hf", "hf-auto", "huggingface", "hf-mistral3", "hf-multimodal", "hf-audiolm-qwen", "steered", "HFLM"),
    *("SteeredModel", "vllm", "vllm-vlm", "VLLM", "sglang", "sglang-generate", "SGLangLM", "gguf", "ggml", "GGUFLM"),
    *("mamba_ssm", "MambaLMWrapper", "nemo_lm", "NeMoLM", "megatron_lm", "MegatronLMEval", "trtllm", "TRTLLM"),
    *("ipex", "neuronx", "openvino", "habana", "onnxruntime", "onnxruntime-genai", "winml", "OptimumLM"),
    *("openai-completions", "local-completions", "anthropic-completions", "textsynth", "watsonx_llm"),
}
NO_LAW = ("batch_size", "max_batch_size", "device", "dtype")  # model args; the dtype that was loaded stands elsewhere


@dataclasses.dataclass(frozen=True)
class Task:
    """A task's part of a results file. `documents` is None where samples were not logged; then `missing` says so."""

    name: str
    metrics: dict[str, float]
    identity: dict[str, str]  # effective samples, limit, version, shots, hash
    rolling: bool = True
    documents: tuple[Document, ...] | None = None
    missing: str = ""

    @property
    def size(self) -> int | None:
        """Documents that were scored."""
        known = self.identity.get("documents")
        return int(known) if known else (None if self.documents is None else len(self.documents))


@dataclasses.dataclass(frozen=True)
class Run:
    """One results file. A stock model of the harness has no `duel`; its law is what it was loaded with."""

    file: Path
    ours: bool
    model: str  # --model, or the class of a model object
    pretrained: str
    label: str  # how tables name the model
    key: str  # equal for the same model: weights, else what was loaded
    dtype: str
    fingerprint: str | None
    law: dict[str, str]
    duel: dict[str, Any]
    max_length: int | None
    date: float
    whole_run_seconds: float | None
    cache: bool  # --use_cache
    tasks: dict[str, Task]  # those with a perplexity
    others: tuple[str, ...]  # tasks without one
    groups: tuple[str, ...]  # averages over tasks

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
        return str(self.duel.get("estimator") or self.law.get("estimator") or "duel") if self.ours else "exact"

    @property
    def autoregressive(self) -> bool:
        """Whether the values are those of an autoregressive model, as far as that is known."""
        return self.model in AUTOREGRESSIVE or (
            self.ours and (self.estimator == "exact" or self.duel.get("attention") == "causal")
        )

    @property
    def cached(self) -> bool:
        """Whether answers may have come from a response cache, so that times are of a part of the run."""
        if not self.ours:
            return self.cache
        found = bool(self.duel.get("answers_from_cache"))
        return found or any(self.computed(name) < (task.size or 0) for name, task in self.tasks.items())

    def computed(self, name: str) -> int:
        """Documents of a task whose figures this run has; the others came from a response cache that had none."""
        return self.duel.get("tasks", {}).get(name, {}).get("documents", self.tasks[name].size or 0)

    @property
    def rule(self) -> str | None:
        """The rule of a `duel` run."""
        if self.estimator != "duel":
            return None
        return _said(self.duel.get("rule") or self.law.get("rule"))

    @property
    def block(self) -> str:
        """The block as text: a number, or `none` (the whole target)."""
        return (_said(self.duel.get("block")) or _said(self.law.get("block")) or "none") if self.ours else "none"


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
    """One results file."""
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
        config, results = found["config"], found["results"]
        model, arguments = config["model"], config.get("model_args") or {}
    except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError, AttributeError) as error:
        raise DuelError(
            f"{file} is not a results file of lm_eval ({type(error).__name__}: {error}); name the results_*.json "
            "that --output_path wrote."
        ) from None
    if not isinstance(arguments, dict):  # the Python API keeps the text
        arguments = dict(part.split("=", 1) for part in str(arguments).split(",") if "=" in part)
    law, duel = config.get("law") or {}, config.get("duel") or {}
    ours = model == MODEL or bool(law or duel)  # a model object leaves the name of its class
    dtype = _said(duel.get("dtype")) or _said(law.get("dtype")) or _said(config.get("model_dtype")) or "unknown"
    dtype = dtype.removeprefix("torch.")
    pretrained = str(duel.get("pretrained") or arguments.get("pretrained") or found.get("model_name") or model)
    if not ours:
        law = {key: value for key, value in arguments.items() if key not in NO_LAW} | {"dtype": dtype}
        law |= {"model_sha": config["model_sha"]} if config.get("model_sha") else {}
    length = law.get("max_length") if ours else found.get("max_length")
    seconds = found.get("total_evaluation_time_seconds")
    groups = {name for name, parts in (found.get("group_subtasks") or {}).items() if parts} | set(
        found.get("groups") or ()
    )
    tasks = {name: values for name, values in results.items() if name not in groups}
    return Run(
        file=file,
        ours=ours,
        model=str(model),
        pretrained=pretrained,
        label=_last(pretrained),
        key=str((duel.get("weights") or law.get("weights")) if ours else pretrained),
        dtype=dtype,
        fingerprint=config.get("fingerprint"),
        law={key: "none" if value in (None, "None") else str(value) for key, value in law.items()},
        duel=duel,
        max_length=int(length) if str(length).isdigit() else None,
        date=float(found.get("date") or 0),
        whole_run_seconds=None if seconds is None else float(seconds),
        cache=bool(config.get("use_cache")),
        tasks={name: _task(file, found, name, values) for name, values in tasks.items() if _scores(values)},
        others=tuple(sorted(name for name, values in tasks.items() if not _scores(values))),
        groups=tuple(sorted(groups & results.keys())),
    )


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


def _scores(values: Any) -> bool:
    return isinstance(values, dict) and any(key.split(",")[0] in METRICS for key in values)


def _task(file: Path, found: dict[str, Any], name: str, values: dict[str, Any]) -> Task:
    metrics: dict[str, float] = {}
    for key, value in values.items():
        metric = key.split(",")[0]
        if metric in METRICS and isinstance(value, int | float):
            metrics.setdefault(metric, float(value))
    config, counted = found.get("config", {}), found.get("n-samples", {}).get(name, {})
    identity = {
        "documents": counted.get("effective"),
        "limit": config.get("limit"),
        "version": found.get("versions", {}).get(name),
        "shots": found.get("n-shot", {}).get(name),
        "hash": found.get("task_hashes", {}).get(name),
    }
    said = {key: str(value) for key, value in identity.items() if value is not None}
    rolling = found.get("configs", {}).get(name, {}).get("output_type", "loglikelihood_rolling")
    when = WRITTEN.search(file.stem)  # --output_path may be a folder, or a file whose name stands before the date
    logged = file.with_name(f"samples_{name}_{when[0] if when else file.stem.removeprefix('results_')}.jsonl")
    task = Task(name, metrics, said, rolling == "loglikelihood_rolling")
    if not logged.is_file():
        return dataclasses.replace(task, missing=f"no samples of {name} beside it (run lm_eval with --log_samples)")
    return dataclasses.replace(task, documents=samples.documents(logged, task.rolling))
