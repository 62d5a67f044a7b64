"""Results files of the harness, as lm_eval writes them for `duel-mdm` and for `hf`, for tests of the report."""

import hashlib
import itertools
import json
import math
from collections import Counter

import pytest
from golden import nudged

from lm_eval_duel import TextScore, Window, fingerprint
from lm_eval_duel.cli.report import main, parse
from lm_eval_duel.core.scores import Score
from lm_eval_duel.estimators import registry
from lm_eval_duel.estimators.totals import Total
from lm_eval_duel.results.report import collect
from lm_eval_duel.results.runs import SCHEMA

COUNT = itertools.count()
TOKENS = 1000  # of a task without documents
RULED = ("duel", "two_phase")
LATTICE = ("elbo_exact", "mixture", "oracle")
GONE = "(gone)"


def documents(nats, tokens, texts=None):
    """Documents as (text, nats, tokens); words are half of a text's bytes."""
    texts = texts or [f"text {n}" for n in range(len(nats))]
    return list(zip(texts, map(float, nats), map(int, tokens), strict=True))


def three_documents(*tasks, shift=0.0):
    """Each task with the same three documents, whose log-probabilities are lower by `shift`."""
    nats = [-60 - shift, -150 - shift, -90 - shift]
    return {task: documents(nats, (20, 40, 30)) for task in tasks}


def board(folder, *words):
    """The content of a report with a page on the results in a folder."""
    return collect(parse([str(folder), "--page", "--out", "unused", "--as_published", *words]))


def _units(text, tokens):
    """How many there are in a text of the units of each metric."""
    size = len(text)
    return {
        "token_perplexity": tokens,
        "word_perplexity": size // 2,
        "byte_perplexity": size,
        "bits_per_byte": size,
    }


def _hash(text):
    return hashlib.sha256(text.encode()).hexdigest()


def _sample(number, text, nats, tokens):
    """A line of samples_*.jsonl."""
    doc = {"text": text, "duel_tokens": tokens}
    sample = {
        "doc_id": number,
        "doc": doc,
        "doc_hash": _hash(json.dumps(doc)),
        "prompt_hash": _hash(text),
        "target_hash": _hash(text),
    }
    for metric, count in _units(text, tokens).items():
        sample[metric] = [nats, count]
    return sample


def _metrics(documents):
    """The metrics of documents."""
    total_nats = 0.0
    counts = Counter()
    for text, nats, tokens in documents:
        total_nats += nats
        counts.update(_units(text, tokens))
    metrics = {}
    for metric, count in counts.items():
        rate = -total_nats / count
        metrics[metric] = rate / math.log(2) if metric == "bits_per_byte" else math.exp(rate)
    return metrics


def _of_tasks(docs):
    """The metrics of each task."""
    return {task: _metrics(documents) for task, documents in docs.items()}


def _sizes(tasks, docs, size):
    """The number of documents of each task: three of one without documents."""
    return {task: size or len(docs.get(task, range(3))) for task in tasks}


def _write(folder, model, config, tasks, docs, size=None, log=True, version=1.0, shots=0, **more):
    """Write a results file and, with `log`, the samples of its documents."""
    number = next(COUNT)
    docs = docs or {}
    tasks = tasks or _of_tasks(docs)
    results = {}
    configs = {}
    samples = {}
    for task, count in _sizes(tasks, docs, size).items():
        results[task] = {f"{metric},none": value for metric, value in tasks[task].items()}
        configs[task] = {"task": task, "output_type": "loglikelihood_rolling"}
        samples[task] = {"original": 99, "effective": count}
    body = {
        "results": nudged(results),
        "configs": configs,
        "versions": dict.fromkeys(tasks, version),
        "n-shot": dict.fromkeys(tasks, shots),
        "n-samples": samples,
        "config": {"model_args": {"pretrained": model}, **config},
        "lm_eval_version": "0.4.13",
        "model_name": model,
        "total_evaluation_time_seconds": "20.5",
        "date": float(number),
        **more,
    }
    folder = folder / model.replace("/", "__")
    folder.mkdir(parents=True, exist_ok=True)
    stamp = f"2026-01-01T{number // 3600:02}-{number // 60 % 60:02}-{number % 60:02}.000000"
    if log:
        for task, documents in docs.items():
            records = [nudged(_sample(n, *document)) for n, document in enumerate(documents)]
            _write_lines(folder / f"samples_{task}_{stamp}.jsonl", records)
    file = folder / f"results_{stamp}.json"
    file.write_text(json.dumps(body))
    return file


def _write_lines(file, records):
    file.write_text("".join(json.dumps(record) + "\n" for record in records))


def hf(folder, tasks=None, model="ARM", docs=None, max_length=1024, dtype="torch.float32", args=None, **more):
    """A result of `--model hf`: `tasks` {task: {metric: value}}, or `docs` {task: documents}."""
    config = {"model": "hf", "model_dtype": dtype, "model_args": {"pretrained": model, **(args or {})}}
    return _write(folder, model, config, tasks, docs, max_length=max_length, **more)


def _accounts(tasks, docs, values, estimator, nfe, sizes):
    """The entries of config.duel.tasks."""
    accounts = {}
    for task, metrics in tasks.items():
        tokens = sum(tokens for _, _, tokens in docs[task]) if task in docs else TOKENS
        perplexities = {**values.get(task, {}), estimator: metrics["token_perplexity"]}
        values_of_task = {}
        for name, perplexity in perplexities.items():
            values_of_task[name] = {
                "log_prob": -tokens * math.log(perplexity),
                "stderr": 0.01 * tokens if name == "elbo" else None,
                "nfe": None if name in ("elbo", *LATTICE) else int(tokens * (nfe or 1)),
            }
        accounts[task] = {
            "documents": sizes[task],
            "windows": sizes[task],
            "tokens": tokens,
            "values": values_of_task,
        }
    return accounts


def ours(
    folder,
    tasks=None,
    model="MDLM",
    estimator="duel",
    rule="greedy:k=1",
    block="4",
    attention="bidirectional",
    docs=None,
    values=None,
    nfe=None,
    spec=None,
    duel=None,
    size=None,
    **more,
):
    """A result of `--model duel-mdm`: `tasks` or `docs` as for `hf`. `spec` and `duel`: more of its config.

    `values`: {task: {NAME: perplexity per token}} of the other estimators of a lattice run.
    """
    docs = docs or {}
    rule = rule if estimator in RULED else None
    tasks = tasks or _of_tasks(docs)
    accounts = _accounts(tasks, docs, values or {}, estimator, nfe, _sizes(tasks, docs, size))
    tokens = sum(account["tokens"] for account in accounts.values())
    every_document = itertools.chain(*docs.values())
    longest = max((tokens for _, _, tokens in every_document), default=5000)
    elbo = {"elbo_form": "count", "elbo_block": "None", "mc_samples": "1", "draw_seed": "0"}
    spec = {
        "denoiser": "dit",
        "weights": f"w-{model}",
        "dtype": "float32",
        "grid": "target",
        "version": "1",
        "estimator": estimator,
        "rule": str(rule),
        "block": block,
        "tokenizer": "gpt2-hash",
        "windows": "harness",
        "max_length": "1025",
        "special_tokens": "[50256] text [], bos=given",
        **(elbo if estimator == "elbo" else {}),
        **(spec or {}),
    }
    duel = {
        "schema": SCHEMA,
        "estimator": estimator,
        "rule": rule,
        "block": None if block == "none" else int(block),
        "dtype": spec["dtype"],
        "attention": attention,
        "weights": spec["weights"],
        "bos": spec["special_tokens"].rpartition("bos=")[2],
        "cut_contexts": {},
        "trace": None,
        "ranks": 1,
        "device": "cpu",
        "seconds": 0.01 * tokens,
        "peak_memory_bytes": 4e8,
        "tokens": tokens,
        "forwards": 17,
        "rows": 600,
        "nfe": None,
        "longest_document": longest,
        "row_capacity": 1024,
        "tasks": accounts,
        **(duel or {}),
    }
    config = {"model": "duel-mdm", "fingerprint": fingerprint.digest(spec), "spec": spec, "duel": nudged(duel)}
    return _write(folder, model, config, tasks, docs, size, **more)


def edit(file, change):
    """Change the body of a results file in place."""
    body = json.loads(file.read_text())
    change(body)
    file.write_text(json.dumps(body))
    return file


def put(file, place, value):
    """Change, or for `GONE` remove, an entry of a results file. `place`: "config.spec.version", or a path of keys."""
    *path, last = place.split(".") if isinstance(place, str) else place

    def change(body):
        for key in path:
            body = body[key]
        body[last] = value
        if value == GONE:
            del body[last]

    return edit(file, change)


def edit_samples(file, change, task="sotu"):
    """Change each record of a results file's samples in place."""
    samples = file.with_name(file.name.replace("results_", f"samples_{task}_")).with_suffix(".jsonl")
    records = [json.loads(line) for line in samples.read_text().splitlines()]
    for record in records:
        change(record)
    _write_lines(samples, records)


def text_score(text, nats, tokens, estimator="duel", stderr=None, blocks=None, **spec):
    """A score as `Duel.score` returns it, of a text in one window. `stderr`: of draws; `blocks`: of an estimate."""
    window = Window(tuple(text.encode()), (0,) * tokens)
    value_template = registry.value_template(estimator, spec)
    score = Score(nats, stderr=stderr, blocks=blocks, kind=value_template.kind, note=value_template.note)
    sums = Total.from_score(window, score, estimator)
    spec = {"estimator": estimator, **spec}
    return TextScore(
        text,
        log_prob=nats,
        stderr=sums.stderr,
        bound=value_template.is_bound,
        kind=value_template.word,
        note=value_template.note,
        perplexity=math.exp(-nats / tokens) if tokens else math.nan,
        bits_per_byte=-nats / math.log(2) / len(text) if text else math.nan,
        tokens=("x",) * tokens,
        token_logprobs=(-1.0,) * tokens,
        reveal_steps=(0,) * tokens,
        nfe=None,
        near_ties=None,
        windows=(),
        window_scores=(),
        sums=sums,
        spec=spec,
        scored=text,
    )


def trace(path, result, records):
    """A trace of a result: `records` as in lm_eval_duel/trace.py."""
    config = json.loads(result.read_text())["config"]
    header = {"duel_trace": 1, "fingerprint": config["fingerprint"], "spec": config["spec"]}
    _write_lines(path, [header, *records])
    return path


def per_token(names, values):
    """Tasks without documents: {task: {metric: value}}."""
    return {name: {"token_perplexity": value} for name, value in zip(names, values, strict=True)}


def report(tmp_path, *arguments):
    """The JSON of a report on `results`, and on the baseline in `ar` if there is one."""
    out = tmp_path / "out"
    ar = tmp_path / "ar"
    baseline = ["--ar", str(ar)] if ar.exists() else []
    main([str(tmp_path / "results"), *baseline, "--out", str(out), *map(str, arguments)])
    return json.loads((out / "report.json").read_text(), parse_constant=pytest.fail)


def rows(report, task, estimator="duel"):
    """The rows of a task under an estimator, by model."""
    by_model = {}
    for row in report["tasks"][task]["rows"]:
        if row["estimator"] == estimator:
            by_model[row["model"]] = row
    return by_model
