"""Documents and their log-likelihoods, from the harness's samples_*.jsonl and from `score --json`."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import functools
import hashlib
import json
import math
import os
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from lm_eval_duel.console.command_line import NAN, REASONS
from lm_eval_duel.core.scores import METRICS, perplexity
from lm_eval_duel.errors import DuelError, unknown
from lm_eval_duel.estimators.blocks import BeamBlocks
from lm_eval_duel.estimators.registry import ESTIMATORS
from lm_eval_duel.harness import trace
from lm_eval_duel.results import stats
from lm_eval_duel.results.own_files import reading
from lm_eval_duel.tasks.columns import TOKENS

OTHER_NAMES = ("bits_per_residue", "residue_perplexity")  # of bits_per_byte and byte_perplexity, for proteins
UNITS = {"token_perplexity": "tokens", "word_perplexity": "words", "byte_perplexity": "bytes", "bits_per_byte": "bytes"}
WRITTEN = re.compile(r"\d{4}-\d\d-\d\dT[\d.:-]+$")  # the date at the end of the harness's file names
Values = dict[str, tuple[float, float]]  # document -> (nats, units)


@dataclasses.dataclass
class Documents:
    """The documents of a task by key, which is equal for equal texts. A plain number of nats counts as one unit."""

    numbers: dict[str, int]  # sorted by key
    values: dict[str, Values]  # of each metric

    @property
    def tokens(self) -> dict[str, float] | None:
        """The number of tokens of each document, if that of every one is known."""
        known = self.values.get("token_perplexity", {})
        return None if len(known) < len(self.numbers) else {key: units for key, (_, units) in known.items()}


def of_harness(results: Path, task: str, rolling: bool) -> tuple[Documents | None, str]:
    """The samples of a task next to a results file, or None and the reason."""
    date = WRITTEN.search(results.stem)  # --output_path may be a folder, or a file whose name precedes the date
    file = results.parent / f"samples_{task}_{date[0] if date else results.stem.removeprefix('results_')}.jsonl"
    if not os.path.isfile(file):  # False, too, if the task's name is not a valid file name
        return None, f"no samples of {task} next to it (run lm_eval with --log_samples)"
    with reading(file, "samples of lm_eval"):
        records = [json.loads(line) for line in file.read_text(encoding="utf-8").split("\n") if line.strip()]
        return _documents(records, rolling), ""


def of_score(entries: Sequence[Mapping[str, Any]]) -> Documents:
    """The documents of a file of `score --json`. A log_prob of null is minus infinity."""
    counted = {metric: unit for metric, unit in UNITS.items() if any(entry[unit] for entry in entries)}
    records = []
    for n, entry in enumerate(entries):
        nats = -math.inf if entry["log_prob"] is None else entry["log_prob"]
        values = {metric: (nats, entry[unit]) for metric, unit in counted.items()}  # an empty text has none
        records.append({"doc_id": n, "doc_hash": str(entry["sha256"]), **values})
    return _documents(records, rolling=True)


def _documents(records: Sequence[Mapping[str, Any]], rolling: bool) -> Documents:
    """The documents of samples, sorted by key; equal texts are counted in order."""
    first = {int(record["doc_id"]): record for record in reversed(records)}  # one a filter, with equal values
    seen, keyed = Counter[str](), {}
    for n, record in sorted(first.items()):
        digest = _digest(record, rolling)
        seen[digest] += 1
        keyed[f"{digest}:{seen[digest]}"] = n, record
    result = Documents({}, {})
    for key, (n, record) in sorted(keyed.items()):
        result.numbers[key] = n
        for metric in METRICS:
            if (value := record.get(metric)) is not None:
                nats, units = map(float, value if isinstance(value, list | tuple) else (value, 1.0))
                if math.isnan(nats) or not 0 <= units < math.inf:
                    raise ValueError(f"{metric} of document {n} is {value}")
                result.values.setdefault(metric, {})[key] = nats, units
    return result


def _digest(record: Mapping[str, Any], rolling: bool) -> str:
    """Identifies a document by the harness's hashes of the document, of the scored text and of the prompt before it.

    Our token count is not part of it, since it differs between tokenizers. Neither is the name of the tokenizer that
    wrote a row of ids: the ids are.
    """
    doc, name = record.get("doc"), record.get("doc_hash") or record["doc_id"]
    if isinstance(doc, dict) and TOKENS in doc:
        ignored = {TOKENS} | ({"tokenizer"} if "ids" in doc else set())
        rest = {key: value for key, value in doc.items() if key not in ignored}
        name = hashlib.sha256(json.dumps(rest, sort_keys=True, default=str).encode()).hexdigest()
    parts = name, record.get("target_hash"), None if rolling else record.get("prompt_hash")
    return " ".join(str(part) for part in parts if part)


# ---------------------------------------------------------------- read
# Results files of the harness and of `score --json`, as records: a `Run` a model, a `Task` a task of it.


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
AGAIN = "Run the task again, or leave the file out."
SAME = 1e-6  # relative difference up to which two values are one
Json = Mapping[str, Any]


def number(value: Any) -> float | None:
    """A number, which lm_eval may have written as text, or None for null; raises ValueError for NaN."""
    if value is not None and math.isnan(value := float(value)):
        raise ValueError("a number is NaN")
    return value


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


class Task:
    """A task's part of a results file. Without logged samples there are no `documents`, and `missing` says so."""

    def __init__(self, run: Run, name: str, documents: Documents | None):
        content, entries = run.content, run.content["results"][name]
        identity = {
            "documents": content.get("n-samples", {}).get(name, {}).get("effective"),
            "limit": content["config"].get("limit"),
            "version": content.get("versions", {}).get(name),
            "shots": content.get("n-shot", {}).get(name),
            "hash": content.get("task_hashes", {}).get(name),
        }
        output_type = content.get("configs", {}).get(name, {}).get("output_type")
        self.name, self.output_type = name, str(output_type or "loglikelihood_rolling")
        self.rolling = self.output_type == "loglikelihood_rolling"
        self.identity = {key: str(value) for key, value in identity.items() if value is not None}
        self.entry = run.duel["tasks"].get(name, {})  # its entry in config.duel.tasks
        self.metrics: dict[str, float] = {}  # perplexities, each of the first filter that has it
        self.scores: dict[str, tuple[float, float | None]] = {}  # other averages, with their standard errors
        for entry, value in entries.items():
            metric, comma, filtered = entry.partition(",")
            if metric in METRICS:
                why = content.get("nulls", {}).get(f"results.{name}.{entry}")
                if value is None and why == NAN:
                    continue  # the texts have no such unit
                if value is None and why == REASONS[math.inf]:
                    value = math.inf
                if value is None or math.isnan(value := float(value)):
                    raise ValueError(f"{entry} of {name} is {'null' if value is None else 'NaN'}")
                self.metrics.setdefault(metric, value)
            elif comma and not metric.endswith("_stderr") and metric not in OTHER_NAMES and type(value) in (int, float):
                error = entries.get(f"{metric}_stderr,{filtered}")  # or "N/A", or NaN
                error = None if error == "N/A" or error != error else number(error)
                if not math.isnan(value):
                    self.scores[metric if filtered == "none" else f"{metric} ({filtered})"] = float(value), error
        self.documents, self.missing = documents, ""
        if self.metrics and documents is None:
            self.documents, self.missing = of_harness(run.file, name, self.rolling)
        # the number of tokens of each document, if they are known
        self.tokens = None if self.documents is None else self.documents.tokens
        # scored documents, and those that the run scored itself: the others came from a response cache
        known, logged = self.identity.get("documents"), self.documents
        self.size = int(known) if known else None if logged is None else len(logged.numbers)
        self.computed = self.entry.get("documents", self.size or 0)
        # True if the run scored fewer (or other) documents than its values cover
        self.partial = self.size is not None and self.computed != self.size
        # the share of tokens that the tokenizer does not know ([UNK]): 0 for other models of the harness
        self.unknown = self.entry.get("unk_tokens", 0) / (self.entry.get("tokens") or 1)
        # tokens of the longest document, from the samples, else from the results of a run that scored every document
        self.longest = None
        if self.tokens is not None:
            self.longest = int(max(self.tokens.values(), default=0))
        elif run.ours and self.computed >= (self.size or 0):
            self.longest = self.entry.get("longest_document", run.duel.get("longest_document"))


class Run:
    """One results file. The spec of another model of the harness is what it was loaded with; its `duel` is empty.

    `documents`: of its tasks, instead of samples next to the file.
    """

    def __init__(self, file: Path, content: Json, documents: Documents | None = None):
        self.file, self.content, config = file, content, content["config"]
        self.name, self.model = str(file), str(config["model"])  # for messages; --model, or the class of an object
        self.short_name = "/".join(file.parts[-2:])  # for notes
        arguments = config.get("model_args") or {}
        if isinstance(arguments, str):  # of lm_eval's Python API
            arguments = dict(part.split("=", 1) for part in arguments.split(",") if "=" in part)
        arguments, spec = _strings(arguments), _strings(config.get("spec") or {})
        self.duel = duel = _duel(config.get("duel") or {})
        # a model object is recorded by its class
        self.ours = self.model == MODEL or bool(spec or config.get("duel"))
        dtype = duel.get("dtype") or _text(spec.get("dtype")) or _text(config.get("model_dtype")) or "unknown"
        self.dtype = dtype.removeprefix("torch.")
        if not self.ours:
            spec = {key: value for key, value in arguments.items() if key not in NOT_IN_SPEC} | {"dtype": self.dtype}
            spec |= {"model_sha": str(config["model_sha"])} if config.get("model_sha") else {}
        self.spec = spec
        named = duel.get("pretrained") or arguments.get("pretrained") or content.get("model_name")
        self.pretrained = str(named or self.model)
        self.label = self.pretrained.rstrip("/").split("/")[-1] or self.pretrained  # how tables name the model
        # equal for the same model: digest of the weights, else the name that was loaded
        self.key = str((duel.get("weights") or spec.get("weights")) if self.ours else self.pretrained)
        self.fingerprint = _text(config.get("fingerprint"))
        self._add_method()
        length = str(spec.get("max_length") if self.ours else content.get("max_length"))
        self.max_length = int(length) if length.isdecimal() else None
        # how it cuts documents, and target positions per window; other models have the harness's rolling windows
        self.windows = spec.get("windows", "independent") if self.ours else "harness"
        self.capacity = duel.get("row_capacity") if self.ours else self.max_length
        self.date = number(content.get("date")) or 0.0
        when = datetime.datetime.fromtimestamp(self.date, datetime.timezone.utc)
        self.when = when.isoformat(timespec="seconds") if self.date else ""  # ISO 8601
        known = {name: content.get(f"{name}_version") for name in ("lm_eval", "transformers")}
        known = {name: version for name, version in known.items() if version}
        known |= (config.get("duel") or {}).get("versions") or {}
        self.versions = {name: str(version or "unknown") for name, version in known.items()}
        self.whole_run_seconds = number(content.get("total_evaluation_time_seconds"))
        self.baseline = False  # True for the autoregressive model of the gaps
        self.trace: Path | None = None
        # (task, value) -> document -> nats, from the trace
        self.traced: dict[tuple[str, str], Counter[int]] = defaultdict(Counter)
        groups = {name for name, parts in (content.get("group_subtasks") or {}).items() if parts}
        groups |= set(content.get("groups") or {})
        tasks = [Task(self, name, documents) for name in content["results"] if name not in groups]
        self.groups = sorted(groups & content["results"].keys())
        # those without a perplexity at the end, by name
        self.every_task = {task.name: task for task in sorted(tasks, key=lambda t: "" if t.metrics else t.name)}
        self.tasks = {name: task for name, task in self.every_task.items() if task.metrics}
        # True if answers may have come from a response cache, so that times cover only a part of the run
        partial = any(task.partial for task in self.tasks.values())
        self.cached = bool(duel.get("answers_from_cache") or partial if self.ours else config.get("use_cache"))
        _check(self)

    def _add_method(self) -> None:
        """Enter the estimator behind the harness's values, its rule, block and cache; other models count as AR."""
        spec, duel = self.spec, self.duel
        self.estimator = str(duel.get("estimator") or spec.get("estimator") or "duel") if self.ours else "ar"
        if self.estimator not in ESTIMATORS:
            raise DuelError(f"{self.file}: {unknown('estimator', self.estimator, ESTIMATORS)}")
        entry, attention = ESTIMATORS[self.estimator], duel.get("attention")
        causal = entry.name == "ar"
        # True if the values are known to come from an autoregressive model
        self.autoregressive = self.model in AUTOREGRESSIVE or (self.ours and (causal or attention == "causal"))
        # of a `duel` run, or of an estimate of its value
        self.rule = duel.get("rule") or _text(spec.get("rule")) if entry.follows_rule else None
        # a number, or `none` (the whole target); None for autoregressive and other models
        self.block = None if causal else duel.get("block") or _text(spec.get("block")) or "none"
        # of the sampler: `none`, `prefix` or `dual`; None for networks that have no such choice
        no_cache = NO_CACHE if attention == "bidirectional" else None
        self.cache = None if causal else spec.get("cache", no_cache)
        self.has_cache = self.cache not in (None, NO_CACHE)

    @property
    def title(self) -> str:
        """The estimator, or that it was a lattice run, and whether it is the baseline."""
        entry = ESTIMATORS[self.estimator]
        name = "Lattice" if entry.lattice else entry.title
        return f"{name} ({'baseline' if entry.name == 'ar' else 'AR baseline'})" if self.baseline else name

    def scores(self, name: str) -> dict[str, tuple[float, float | None]]:
        """The averages of a task other than perplexities, with their standard errors."""
        return self.every_task[name].scores if name in self.every_task else {}

    def left_out(self) -> list[str]:
        """Notes on the parts of the file that tables leave out."""
        if not self.ours and not self.autoregressive:
            return [
                f"{self.name} is a result of --model {self.model}, not known to be autoregressive, and is left out."
            ]
        notes = [f"{name} in {self.name} is a group of tasks and is left out." for name in self.groups]
        empty = [name for name, task in self.every_task.items() if not (task.metrics or task.scores)]
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
    with reading(file, RESULTS):
        content = json.loads(file.read_text(encoding="utf-8"))
        if content.get("format") != SCORE:
            return [Run(file, content)]
        if content["version"] != SCORE_VERSION:
            raise ValueError(f"its version is {content['version']}, and this release reads {SCORE_VERSION}")
        models = [content, *content.get("compared", [])]
        return [read_of_score(Path(f"{file}#{n}" if n > 1 else file), model) for n, model in enumerate(models, 1)]


def distinguish(runs: Sequence[Run]) -> None:
    """Give different models of one label longer ones: with the folder, or else with the digest of the weights."""
    for label in dict.fromkeys(run.label for run in runs):
        alike = [run for run in runs if run.label == label]
        first = {run.key: run for run in reversed(alike)}
        longer = {key: "/".join(Path(run.pretrained).parts[-2:]) for key, run in first.items()}
        unique = len(set(longer.values())) == len(longer)
        for run in alike if len(longer) > 1 else ():
            run.label = longer[run.key] if unique else f"{label} ({run.key[:8]})"


# ---------------------------------------------------------------- traces


class Traces:
    """The trace files that the command line or results name, each read once."""

    def __init__(self, named: Iterable[str | Path]):
        self.named = [Path(place).resolve() for place in named]
        self.read = functools.cache(trace.read)  # the windows of a file

    def attach(self, runs: Iterable[Run]) -> list[str]:
        """Give runs the values of each document that their traces hold; return notes on traces that are gone.

        The trace of a run is a named one with its spec, else the one that it wrote, also next to its results.
        """
        notes = []
        for run in runs:
            written = run.duel.get("trace")
            places = [Path(written), run.file.parent / Path(written).name] if written else []
            run.trace = next((path for path in [*self.named, *places] if _fingerprint(path) == run.fingerprint), None)
            if written and run.trace is None:
                notes.append(f"The trace of {run.name} is no longer at {written}; name it with --traces.")
            for window in self.read(run.trace) if run.trace else ():
                for name, nats in (window.get("values") or {}).items():
                    run.traced[str(window["task"]), str(name)][int(window["doc"])] += float(nats)
        return notes


def _fingerprint(path: Path) -> str:
    """The fingerprint of a trace; empty if there is none, or if the path is not a valid file name (ValueError)."""
    with contextlib.suppress(DuelError, OSError, ValueError):
        return trace.spec(path).get("fingerprint", "")
    return ""


# ---------------------------------------------------------------- entries


def read_of_score(file: Path, content: Json) -> Run:
    """A model of a file of `score --json`, as lm_eval would have written it. Its task is called `score`."""
    documents = of_score(content["documents"])
    totals = {metric: map(sum, zip(*known.values(), strict=True)) for metric, known in documents.values.items()}
    duel = {**content["duel"], "pretrained": content["pretrained"]}
    harness = {
        "format": SCORE,
        "config": {"model": MODEL, "fingerprint": content["fingerprint"], "spec": content["spec"], "duel": duel},
        "results": {"score": {metric: stats.value(metric, *total) for metric, total in totals.items()}},
        "n-samples": {"score": {"effective": len(documents.numbers)}},
    }
    return Run(file, harness, documents)


def _check(run: Run) -> None:
    """Raise an error if log_prob, tokens and perplexity of a task do not agree, or are no probability's."""
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
                    f"tokens make it {implied:.10g}. {AGAIN}"
                )
        values = {**task.metrics, **{f"log_prob of {key}": -nats for key, nats in log_probs.items()}}
        for what, known in values.items():
            if known < 0 or (not known and what in METRICS and what != "bits_per_byte"):
                raise DuelError(f"{run.name}: {what} of {name} is impossible: a probability is at most 1. {AGAIN}")


def _strings(entries: Json) -> dict[str, str]:
    return {key: "none" if value in (None, "None") else str(value) for key, value in entries.items()}


def _duel(duel: Json) -> dict[str, Any]:
    """The entries of config.duel that are read. A log-likelihood of null with a reason is minus infinity."""
    entries = _typed(duel, DUEL) | {"tasks": {}}
    for name, scored in (duel.get("tasks") or {}).items():
        values = {}
        for key, value in scored["values"].items():
            values[key] = {"log_prob": None if value.get("reason") is None else -math.inf} | _typed(value, VALUE)
            if beam := value.get("beam"):
                values[key]["beam"] = BeamBlocks.read(beam)
        entries["tasks"][name] = _typed(scored, COUNTS) | {"values": values}
    return entries


def _typed(entries: Json, kinds: Mapping[str, Callable[[Any], Any]]) -> dict[str, Any]:
    return {key: kind(entries[key]) for key, kind in kinds.items() if entries.get(key) is not None}
