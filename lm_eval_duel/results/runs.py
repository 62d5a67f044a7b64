"""The content of a results file of lm_eval as records: a `Run` is a file, a `Task` a task of it.

Every record is complete when it is made (by `read`). What follows from its entries is a property.
"""

from __future__ import annotations

import dataclasses
import datetime
import functools
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from lm_eval_duel.estimators.registry import ESTIMATORS
from lm_eval_duel.results.doubts import doubts, remarks
from lm_eval_duel.results.table import Note

MODEL = "duel-mdm"  # --model of this package
SCHEMA = 2  # of config.duel in a results file; raised when an entry changes its name or its meaning
STOCK = ("hf", "hf-auto", "huggingface")  # models of the harness that take add_bos_token
SCORES_A_BOS = "if its tokenizer adds a BOS, --model hf has scored it, too; add_bos_token=False leaves it out"
NO_CACHE = "none"
ROLLING = "loglikelihood_rolling"  # the output type of tasks of whole documents
AUTOREGRESSIVE = {  # names of --model in the harness, and the classes of model objects
    *("hf", "hf-auto", "huggingface", "hf-mistral3", "hf-multimodal", "hf-audiolm-qwen", "steered", "HFLM"),
    *("SteeredModel", "vllm", "vllm-vlm", "VLLM", "sglang", "sglang-generate", "SGLangLM", "gguf", "ggml", "GGUFLM"),
    *("mamba_ssm", "MambaLMWrapper", "nemo_lm", "NeMoLM", "megatron_lm", "MegatronLMEval", "trtllm", "TRTLLM"),
    *("ipex", "neuronx", "openvino", "habana", "onnxruntime", "onnxruntime-genai", "winml", "OptimumLM"),
    *("openai-completions", "local-completions", "anthropic-completions", "textsynth", "watsonx_llm"),
}
NOT_IN_SPEC = ("batch_size", "max_batch_size", "device", "dtype")  # model args; the loaded dtype is stored elsewhere
Values = dict[str, tuple[float, float]]  # document -> (nats, units)
Json = Mapping[str, Any]


def sums(values: Values) -> tuple[float, float]:
    """The nats and the units of all documents together."""
    nats, units = zip(*values.values(), strict=True)
    return sum(nats), sum(units)


@dataclasses.dataclass
class Documents:
    """The documents of a task by key, which is equal for equal texts. A plain number of nats counts as one unit."""

    numbers: dict[str, int]  # sorted by key
    values: dict[str, Values]  # of each metric
    texts: dict[int, str] = dataclasses.field(default_factory=dict)  # the digests of texts that are scored whole

    @property
    def tokens(self) -> dict[str, float] | None:
        """The number of tokens of each document, if that of every one is known."""
        values = self.values.get("token_perplexity", {})
        if len(values) < len(self.numbers):
            return None
        return {key: units for key, (_, units) in values.items()}


@dataclasses.dataclass(frozen=True)
class Config:
    """`config` of a results file, as lm_eval and this package write it. Absent entries are empty."""

    model: str  # --model, or the class of a model object
    model_args: dict[str, str] = dataclasses.field(default_factory=dict)
    spec: dict[str, str] = dataclasses.field(default_factory=dict)  # of our models: what defines the numbers
    duel: dict[str, Any] = dataclasses.field(default_factory=lambda: {"tasks": {}})
    fingerprint: str | None = None
    model_dtype: str = ""
    model_sha: str = ""
    use_cache: str = ""

    @property
    def ours(self) -> bool:
        """True for results of this package. A model object is recorded by its class, and has a spec."""
        return self.model == MODEL or bool(self.spec or self.duel["tasks"] or len(self.duel) > 1)

    @property
    def dtype(self) -> str:
        name = self.duel.get("dtype") or text_or_none(self.spec.get("dtype")) or self.model_dtype or "unknown"
        return name.removeprefix("torch.")

    # ------------------------------------------------------------ the method

    @property
    def estimator(self) -> str:
        """The estimator behind the harness's values; other models count as `ar`."""
        if not self.ours:
            return "ar"
        return str(self.duel.get("estimator") or self.spec.get("estimator") or "duel")

    @property
    def rule(self) -> str | None:
        """The rule of a `duel` run, or of an estimate of its value."""
        if not ESTIMATORS[self.estimator].follows_rule:
            return None
        return self.duel.get("rule") or text_or_none(self.spec.get("rule"))

    @property
    def block(self) -> str | None:
        """A number, or `none` (the whole target); None for autoregressive and other models."""
        if self.estimator == "ar":
            return None
        return self.duel.get("block") or text_or_none(self.spec.get("block")) or "none"

    @property
    def cache(self) -> str | None:
        """The sampler's cache: `none`, `prefix` or `dual`; None for networks that have no such choice."""
        if self.estimator == "ar":
            return None
        has_choice = self.duel.get("attention") == "bidirectional"
        return self.spec.get("cache", NO_CACHE if has_choice else None)

    @property
    def autoregressive(self) -> bool:
        """True if the values are known to come from an autoregressive model."""
        causal = self.estimator == "ar" or self.duel.get("attention") == "causal"
        return self.model in AUTOREGRESSIVE or (self.ours and causal)


@dataclasses.dataclass(frozen=True)
class Header:
    """The entries of a results file beside `config` and its tasks."""

    date: float = 0.0  # seconds since 1970
    total_evaluation_time_seconds: float | None = None
    model_name: str = ""
    max_length: str = ""
    lm_eval_version: str = ""
    transformers_version: str = ""


@dataclasses.dataclass(frozen=True)
class Task:
    """A task's part of a results file. Without logged samples there are no `documents`, and `missing` says why."""

    name: str
    output_type: str
    identity: dict[str, str]  # what its documents are, as far as the file says
    entry: dict[str, Any]  # its entry in config.duel.tasks
    metrics: dict[str, float]  # perplexities, each of the first filter that has it
    scores: dict[str, tuple[float, float | None]]  # other averages, with their standard errors
    documents: Documents | None
    missing: Note
    available: int | None = None  # documents without --limit

    @property
    def rolling(self) -> bool:
        return self.output_type == ROLLING

    @property
    def tokens(self) -> dict[str, float] | None:
        """The number of tokens of each document, if they are known."""
        return None if self.documents is None else self.documents.tokens

    @property
    def size(self) -> int | None:
        """The number of scored documents."""
        written = self.identity.get("documents")
        if written:
            return int(written)
        return None if self.documents is None else len(self.documents.numbers)

    @property
    def computed(self) -> int:
        """The documents that the run scored itself: the others came from a response cache."""
        return self.entry.get("documents", self.size or 0)

    @property
    def partial(self) -> bool:
        """True if the run scored fewer (or other) documents than its values cover."""
        return self.size is not None and self.computed != self.size

    @property
    def unknown(self) -> float:
        """The share of tokens that the tokenizer does not know ([UNK]): 0 for other models of the harness."""
        return self.entry.get("unk_tokens", 0) / (self.entry.get("tokens") or 1)


@dataclasses.dataclass(frozen=True, eq=False)
class Run:
    """One results file.

    `label`: how tables name the model. `trace`: the file of its orders; `traced`: the nats of each document that it
    holds, by (task, value); `trace_advice`: how a trace that is missing is given to the command that shows the run.
    """

    file: Path
    content: Json
    config: Config
    header: Header
    every_task: dict[str, Task]  # by name; those without a perplexity at the end
    groups: list[str]
    label: str
    trace: Path | None = None
    trace_advice: str = "run with trace=FILE, or name it with --traces"
    traced: Mapping[tuple[str, str], Mapping[int, float]] = dataclasses.field(default_factory=dict)

    @property
    def name(self) -> str:
        """Its name in messages."""
        return str(self.file)

    @property
    def is_of_score(self) -> bool:
        """True if `score --json` wrote it."""
        return "scored" in self.content

    @property
    def written(self) -> Path:
        """The file on disk: one of `score --compare` has several runs, called FILE, FILE#2 and so on."""
        return Path(re.sub(r"#\d+$", "", self.name)) if self.is_of_score else self.file

    @property
    def short_name(self) -> str:
        """Its name in notes."""
        return "/".join(self.file.parts[-2:])

    def label_of(self, task: str) -> str:
        """The name of a task in tables: texts that `score` scored have that of their file."""
        return str(self.content.get("scored") or task)

    def has_document(self, task: str | None, number: int | None) -> bool:
        """True if a document is among those of a task. Without samples, they are taken to be the first ones."""
        of_task = self.every_task.get(str(task))
        if of_task is None or number is None:
            return False
        if of_task.documents is not None:
            return number in of_task.documents.numbers.values()
        return of_task.size is None or number < of_task.size

    def text_of(self, task: str | None, number: int | None) -> str | None:
        """The digest of the text of a document, as a trace has it; None if it is not known."""
        documents = None
        if task in self.every_task:
            documents = self.every_task[task].documents
        return None if documents is None else documents.texts.get(number)

    @functools.cached_property
    def tasks(self) -> dict[str, Task]:
        """The tasks with a perplexity."""
        return {name: task for name, task in self.every_task.items() if task.metrics}

    @functools.cached_property
    def spec(self) -> dict[str, str]:
        """The entries that define the numbers; of another model of the harness, what it was loaded with."""
        if self.config.ours:
            return self.config.spec
        loaded = {}
        for key, value in self.config.model_args.items():
            if key not in NOT_IN_SPEC:
                loaded[key] = value
        loaded["dtype"] = self.config.dtype
        if self.config.model_sha:
            loaded["model_sha"] = self.config.model_sha
        return loaded

    @property
    def pretrained(self) -> str:
        """The model as it was named when it was loaded."""
        return pretrained_of(self.config, self.header)

    @property
    def key(self) -> str:
        """Equal for the same model: the digest of the weights, else the name that was loaded."""
        if not self.config.ours:
            return self.pretrained
        return str(self.config.duel.get("weights") or self.spec.get("weights"))

    @property
    def max_length(self) -> int | None:
        """Positions of a row; None if the file does not say."""
        length = str(self.spec.get("max_length")) if self.config.ours else self.header.max_length
        return int(length) if length.isdecimal() else None

    @property
    def windows(self) -> str:
        """The way it cuts documents; other models have the harness's rolling windows."""
        return self.spec.get("windows", "independent") if self.config.ours else "harness"

    @property
    def capacity(self) -> int | None:
        """Target positions in a window."""
        return self.config.duel.get("row_capacity") if self.config.ours else self.max_length

    def longest(self, name: str) -> int | None:
        """Tokens of the longest document of a task, from its samples.

        Without samples, from the results of a run that scored every document.
        """
        task = self.tasks[name]
        if task.tokens is not None:
            return int(max(task.tokens.values(), default=0))
        if self.config.ours and task.computed >= (task.size or 0):
            return task.entry.get("longest_document", self.config.duel.get("longest_document"))
        return None

    @property
    def when(self) -> str:
        """The date of the run as ISO 8601; empty if it is not known."""
        if not self.header.date:
            return ""
        time = datetime.datetime.fromtimestamp(self.header.date, datetime.timezone.utc)
        return time.isoformat(timespec="seconds")

    @property
    def versions(self) -> dict[str, str]:
        """The versions of packages that the numbers depend on."""
        versions = {}
        if self.header.lm_eval_version:
            versions["lm_eval"] = self.header.lm_eval_version
        if self.header.transformers_version:
            versions["transformers"] = self.header.transformers_version
        return versions | self.config.duel.get("versions", {})

    @property
    def cached(self) -> bool:
        """True if answers may have come from a response cache, so that times cover only a part of the run."""
        if not self.config.ours:
            return bool(self.config.use_cache)
        if self.config.duel.get("answers_from_cache"):
            return True
        return any(task.partial for task in self.tasks.values())

    @property
    def has_cache(self) -> bool:
        return self.config.cache not in (None, NO_CACHE)

    def scores(self, name: str) -> dict[str, tuple[float, float | None]]:
        """The averages of a task other than perplexities, with their standard errors."""
        return self.every_task[name].scores if name in self.every_task else {}

    @property
    def doubts(self) -> list[str]:
        """Remarks on each of its values: that it is in doubt, or that a check ended early."""
        return remarks(self.config.duel)

    @property
    def in_doubt(self) -> bool:
        """True if what it computed twice gives a reason to doubt its values."""
        return bool(doubts(self.config.duel))

    @property
    def has_results(self) -> bool:
        """True if it holds anything that tables show."""
        return any(task.metrics or task.scores for task in self.every_task.values())

    @property
    def scores_bos(self) -> bool | None:
        """True if a result of `--model hf` has scored a BOS at the start of whole texts; None if it may have.

        hf puts a BOS before each text, and scores the one that the tokenizer adds after it.
        """
        if self.config.ours or self.config.model not in STOCK:
            return False
        if "add_bos_token" not in self.config.model_args:
            return None
        return self.config.model_args["add_bos_token"].lower() in ("true", "1")

    def about_scored_bos(self, name: str) -> str:
        """A remark on the perplexities of a task that may count a BOS; empty if they do not."""
        return SCORES_A_BOS if self.every_task[name].rolling and self.scores_bos is None else ""

    def cut_contexts(self, name: str) -> int:
        """The number of contexts or prompts of a task that were cut to fit into a row."""
        return self.config.duel.get("cut_contexts", {}).get(name, 0)

    def left_out(self) -> list[str]:
        """Notes on the parts of the file that tables leave out."""
        file = self.short_name
        if not self.config.ours and not self.config.autoregressive:
            model = f"a result of --model {self.config.model}"
            return [f"{file} is {model}, not known to be autoregressive, and is left out."]
        notes = [f"{name} in {file} is a group of tasks and is left out." for name in self.groups]
        for name, task in self.every_task.items():
            if not (task.metrics or task.scores):
                notes.append(f"{name} in {file} holds no perplexity and no accuracy, and is left out.")
        if not self.every_task:
            notes.append(f"{file} holds no perplexity and is left out.")
        return notes


def is_limited(size: int | None, available: int | None) -> bool:
    """True if --limit left out some of the available documents."""
    return size is not None and available is not None and size < available


def average_name(metric: str, filtered: str) -> str:
    """The name of an average: its metric, and the harness's filter of answers unless that is `none`."""
    return metric if filtered == "none" else f"{metric} ({filtered})"


def parts_of_average(name: str) -> tuple[str, str]:
    """The metric and the filter of an average, from its name."""
    metric, _, filtered = name.removesuffix(")").partition(" (")
    return metric, filtered or "none"


def documents_scored(size: int | None, available: int | None) -> str:
    """The number of scored documents, `36`, or `12 of 36` if --limit left some out; empty if it is not known."""
    if is_limited(size, available):
        return f"{size:,} of {available:,}"
    return "" if size is None else f"{size:,}"


def size_in_words(size: int | None, available: int | None) -> str:
    """The same with its noun, as `36 documents` or `12 of 36 documents`."""
    scored = documents_scored(size, available)
    noun = "document" if scored == "1" else "documents"
    return f"{scored} {noun}" if scored else ""


def file_of(document: str) -> Path:
    """The file that holds one of the user's texts, which is named by it and perhaps by its line."""
    return Path(re.sub(r":\d+$", "", document))


def name_of_files(documents: Iterable[str]) -> str:
    """The name of the file that holds the user's texts; of several, that of their folder.

    If they have none in common, it is the name of the first one and the number of the others.
    """
    files = list(dict.fromkeys(map(file_of, documents)))
    names = list(dict.fromkeys(file.name for file in files))
    if len(names) < 2:
        return "".join(names)
    folder, *other_folders = dict.fromkeys(file.parent for file in files)
    if folder.name and not other_folders:
        return folder.name
    return f"{names[0]} and {len(names) - 1} more"


def pretrained_of(config: Config, header: Header) -> str:
    """The name that a model was loaded by."""
    return config.duel.get("pretrained") or config.model_args.get("pretrained") or header.model_name or config.model


def model_label(pretrained: str) -> str:
    """The name of a model in tables: the last part of the folder or of the name that it was loaded by."""
    return pretrained.rstrip("/").split("/")[-1] or pretrained


def text_or_none(value: Any) -> str | None:
    """A text; None for null, for `None` and for an empty one."""
    return None if value is None or str(value).lower() in ("none", "") else str(value)


def common_folder(runs: Sequence[Run]) -> str:
    """The folder that all results files are in or below, relative if it is below the current one."""
    folder = os.path.commonpath([run.file.parent.absolute() for run in runs])
    relative = os.path.relpath(folder)
    return folder if relative.startswith(os.pardir) else relative
