"""Results files of the harness, as lm_eval writes them for `duel-mdm` and for `hf`, for tests of the report."""

import hashlib
import itertools
import json
import math
from collections import Counter

import pytest
from golden import nudged

from lm_eval_duel import TextScore, Window, fingerprint
from lm_eval_duel.cli.report import main
from lm_eval_duel.core.scores import Score
from lm_eval_duel.estimators import registry
from lm_eval_duel.estimators.totals import Total
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


def _units(text, tokens):
    words = len(text) // 2
    size = len(text)
    return {"token_perplexity": tokens, "word_perplexity": words, "byte_perplexity": size, "bits_per_byte": size}


def _sample(number, text, nats, tokens):
    """A line of samples_*.jsonl."""
    doc = {"text": text, "duel_tokens": tokens}
    doc_hash, text_hash = (hashlib.sha256(part.encode()).hexdigest() for part in (json.dumps(doc), text))
    hashes = {"doc_hash": doc_hash, "prompt_hash": text_hash, "target_hash": text_hash}
    values = {metric: [nats, count] for metric, count in _units(text, tokens).items()}
    return {"doc_id": number, "doc": doc, **hashes, **values}


def _metrics(found):
    """The metrics of documents."""
    totals = Counter()
    for text, _, tokens in found:
        totals.update(_units(text, tokens))
    rates = {metric: -sum(nats for _, nats, _ in found) / count for metric, count in totals.items()}
    bits = rates.pop("bits_per_byte") / math.log(2)
    return {**{metric: math.exp(rate) for metric, rate in rates.items()}, "bits_per_byte": bits}


def _sizes(tasks, docs, size):
    """The number of documents of each task."""
    return {task: size or len(docs.get(task, range(3))) for task in tasks}


def _write(folder, model, config, tasks, docs, size=None, log=True, version=1.0, shots=0, **more):
    """Write a results file and, with `log`, the samples of its documents."""
    number, docs = next(COUNT), docs or {}
    tasks = tasks or {task: _metrics(found) for task, found in docs.items()}
    sizes = _sizes(tasks, docs, size)
    body = {
        "results": nudged({task: {f"{m},none": v for m, v in metrics.items()} for task, metrics in tasks.items()}),
        "configs": {task: {"task": task, "output_type": "loglikelihood_rolling"} for task in tasks},
        "versions": dict.fromkeys(tasks, version),
        "n-shot": dict.fromkeys(tasks, shots),
        "n-samples": {task: {"original": 99, "effective": sizes[task]} for task in tasks},
        "config": {"model_args": {"pretrained": model}, **config},
        "lm_eval_version": "0.4.13",
        "model_name": model,
        "total_evaluation_time_seconds": "20.5",
        "date": float(number),
        **more,
    }
    place = folder / model.replace("/", "__")
    place.mkdir(parents=True, exist_ok=True)
    stamp = f"2026-01-01T{number // 3600:02}-{number // 60 % 60:02}-{number % 60:02}.000000"
    for task, found in docs.items() if log else ():
        lines = (json.dumps(nudged(_sample(n, *document))) + "\n" for n, document in enumerate(found))
        (place / f"samples_{task}_{stamp}.jsonl").write_text("".join(lines))
    file = place / f"results_{stamp}.json"
    file.write_text(json.dumps(body))
    return file


def hf(folder, tasks=None, model="ARM", docs=None, max_length=1024, dtype="torch.float32", args=None, **more):
    """A result of `--model hf`: `tasks` {task: {metric: value}}, or `docs` {task: documents}."""
    config = {"model": "hf", "model_dtype": dtype, "model_args": {"pretrained": model, **(args or {})}}
    return _write(folder, model, config, tasks, docs, max_length=max_length, **more)


def _accounts(tasks, docs, values, estimator, nfe, sizes):
    """The entries of config.duel.tasks."""
    accounts = {}
    for task, metrics in tasks.items():
        tokens = sum(n for _, _, n in docs[task]) if task in docs else TOKENS
        counts = {"documents": sizes[task], "windows": sizes[task], "tokens": tokens}
        perplexities = {**values.get(task, {}), estimator: metrics["token_perplexity"]}
        accounts[task] = counts | {
            "values": {
                name: {
                    "log_prob": -tokens * math.log(value),
                    "stderr": 0.01 * tokens if name == "elbo" else None,
                    "nfe": None if name in ("elbo", *LATTICE) else int(tokens * (nfe or 1)),
                }
                for name, value in perplexities.items()
            }
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
    docs, rule = docs or {}, rule if estimator in RULED else None
    tasks = tasks or {task: _metrics(found) for task, found in docs.items()}
    accounts = _accounts(tasks, docs, values or {}, estimator, nfe, _sizes(tasks, docs, size))
    tokens = sum(account["tokens"] for account in accounts.values())
    longest = max((n for found in docs.values() for _, _, n in found), default=5000)
    elbo = {"elbo_form": "count", "elbo_block": "None", "mc_samples": "1", "draw_seed": "0"}
    spec = {
        **{"denoiser": "dit", "weights": f"w-{model}", "dtype": "float32", "grid": "target", "version": "1"},
        **{"estimator": estimator, "rule": str(rule), "block": block, "tokenizer": "gpt2-hash"},
        **{"windows": "harness", "max_length": "1025", "special_tokens": "[50256] text [], bos=given"},
        **(elbo if estimator == "elbo" else {}),
        **(spec or {}),
    }
    duel = {
        "schema": SCHEMA,
        **{"estimator": estimator, "rule": rule, "block": None if block == "none" else int(block)},
        **{"dtype": spec["dtype"], "attention": attention, "weights": spec["weights"]},
        **{"bos": spec["special_tokens"].rpartition("bos=")[2], "cut_contexts": 0, "trace": None},
        **{"ranks": 1, "device": "cpu", "seconds": 0.01 * tokens, "peak_memory_bytes": 4e8},
        **{"tokens": tokens, "forwards": 17, "rows": 600, "nfe": None},
        **{"longest_document": longest, "row_capacity": 1024, "tasks": accounts},
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
    samples.write_text("".join(json.dumps(record) + "\n" for record in records))


def text_score(text, nats, tokens, estimator="duel", stderr=None, blocks=None, **spec):
    """A score as `Duel.score` returns it, of a text in one window. `stderr`: of draws; `blocks`: of an estimate."""
    window = Window((), tuple(text.encode()))
    worth = registry.worth(estimator, spec)
    score = Score(nats, stderr=stderr, blocks=blocks, kind=worth.kind, note=worth.note)
    sums = Total.from_score(window, score, estimator)
    spec = {"estimator": estimator, **spec}
    kind = worth.label
    bound = worth.is_bound
    rest = ((-1.0,) * tokens, (0,) * tokens, None, None, (), ())
    values = math.exp(-nats / tokens), -nats / math.log(2) / len(text)
    tokens_of = ("x",) * tokens
    return TextScore(text, nats, sums.stderr, bound, kind, *values, tokens_of, *rest, sums, spec, tokens, scored=text)


def trace(path, result, records):
    """A trace of a result: `records` as in lm_eval_duel/trace.py."""
    config = json.loads(result.read_text())["config"]
    header = {"duel_trace": 1, "fingerprint": config["fingerprint"], "spec": config["spec"]}
    path.write_text("".join(json.dumps(line) + "\n" for line in [header, *records]))
    return path


def per_token(names, values):
    """Tasks without documents: {task: {metric: value}}."""
    return {name: {"token_perplexity": value} for name, value in zip(names, values, strict=True)}


def report(tmp_path, *arguments):
    """The JSON of a report on `results`, and on the baseline in `ar` if there is one."""
    out = tmp_path / "out"
    ar = tmp_path / "ar"
    given = ["--ar", str(ar)] if ar.exists() else []
    main([str(tmp_path / "results"), *given, "--out", str(out), *map(str, arguments)])
    return json.loads((out / "report.json").read_text(), parse_constant=pytest.fail)


def rows(found, task, estimator="duel"):
    """The rows of a task under an estimator, by model."""
    return {row["model"]: row for row in found["tasks"][task]["rows"] if row["estimator"] == estimator}
