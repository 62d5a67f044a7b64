"""Results files of the harness, as lm_eval writes them for `duel-mdm` and for `hf`, for tests of the report."""

import hashlib
import itertools
import json
import math

from golden import nudged

from lm_eval_duel import TextScore, Window, fingerprint
from lm_eval_duel.core.scores import Score
from lm_eval_duel.estimators import registry
from lm_eval_duel.estimators.totals import Total
from lm_eval_duel.results.report import main

COUNT = itertools.count()
TOKENS = 1000  # of a task without documents
RULED = ("duel", "two_phase")
LATTICE = ("elbo_exact", "mixture", "oracle")


def _file(folder, body, samples):
    number = next(COUNT)
    stamp = f"2026-01-01T{number // 3600:02}-{number // 60 % 60:02}-{number % 60:02}.000000"
    place = folder / body["model_name"].replace("/", "__")
    place.mkdir(parents=True, exist_ok=True)
    config = body["config"] | {key: nudged(part) for key, part in body["config"].items() if key == "duel"}
    body = body | {"results": nudged(body["results"]), "config": config}
    (place / f"results_{stamp}.json").write_text(json.dumps(body | {"date": float(number)}))
    for task, records in samples.items():
        lines = "".join(json.dumps(nudged(record)) + "\n" for record in records)
        (place / f"samples_{task}_{stamp}.jsonl").write_text(lines)
    return place / f"results_{stamp}.json"


def documents(nats, tokens, texts=None):
    """Documents as (text, nats, tokens); words are half the tokens, bytes four times."""
    texts = texts or [f"text {n}" for n in range(len(nats))]
    return list(zip(texts, map(float, nats), map(int, tokens), strict=True))


def _hash(text):
    return hashlib.sha256(text.encode()).hexdigest()


def _samples(found, counted=True):
    records = []
    for number, (text, nats, tokens) in enumerate(found):
        doc = {"text": text, "duel_tokens": tokens} if counted else {"text": text}
        records.append(
            {
                "doc_id": number,
                "doc": doc,
                "doc_hash": _hash(json.dumps(doc)),
                "prompt_hash": _hash(text),
                "target_hash": _hash(text),
                "token_perplexity": [nats, tokens],
                "word_perplexity": [nats, len(text) // 2],
                "byte_perplexity": [nats, len(text)],
                "bits_per_byte": [nats, len(text)],
            }
        )
    return records


def _metrics(found):
    records = _samples(found)

    def rate(metric):
        return -sum(r[metric][0] for r in records) / sum(r[metric][1] for r in records)

    return {
        "token_perplexity": math.exp(rate("token_perplexity")),
        "word_perplexity": math.exp(rate("word_perplexity")),
        "byte_perplexity": math.exp(rate("byte_perplexity")),
        "bits_per_byte": rate("bits_per_byte") / math.log(2),
    }


def _body(model, config, tasks, limit=None, version=1.0, size=3, shots=0, more=None):
    return {
        "results": {
            task: {"alias": task, **{f"{m},none": v for m, v in metrics.items()}, "sample_len": size}
            for task, metrics in tasks.items()
        },
        "configs": {task: {"task": task, "output_type": "loglikelihood_rolling"} for task in tasks},
        "versions": dict.fromkeys(tasks, version),
        "n-shot": dict.fromkeys(tasks, shots),
        "n-samples": {task: {"original": 99, "effective": size} for task in tasks},
        "config": {"model_args": {"pretrained": model}, "batch_size": 1, "device": "cpu", "limit": limit, **config},
        "lm_eval_version": "0.4.13",
        "model_name": model,
        "total_evaluation_time_seconds": "20.5",
        **(more or {}),
    }


def edit(file, change):
    """Change the body of a results file in place."""
    body = json.loads(file.read_text())
    change(body)
    file.write_text(json.dumps(body))
    return file


def edit_samples(file, change, task="sotu"):
    """Change each record of a results file's samples in place."""
    samples = file.with_name(file.name.replace("results_", f"samples_{task}_")).with_suffix(".jsonl")
    records = [json.loads(line) for line in samples.read_text().splitlines()]
    for record in records:
        change(record)
    samples.write_text("".join(json.dumps(record) + "\n" for record in records))


def hf(
    folder,
    tasks=None,
    model="ARM",
    docs=None,
    max_length=1024,
    dtype="torch.float32",
    log=True,
    name="hf",
    args=None,
    more=None,
    **body,
):
    """A result of `--model hf` (name): `tasks` {task: {metric: value}}, or `docs` {task: documents}."""
    docs = docs or {}
    tasks = tasks or {task: _metrics(found) for task, found in docs.items()}
    size = body.pop("size", max(map(len, docs.values()), default=3))
    config = {"model": name, "model_dtype": dtype, "model_args": {"pretrained": model, **(args or {})}}
    samples = {task: _samples(found) for task, found in docs.items()} if log else {}
    return _file(
        folder, _body(model, config, tasks, size=size, more={"max_length": max_length, **(more or {})}, **body), samples
    )


def _accounts(tasks, docs, values, estimator, nfe, size):
    """What a run tells of each task."""
    told = {}
    for task, metrics in tasks.items():
        tokens = sum(n for _, _, n in docs[task]) if task in docs else TOKENS
        perplexities = {**values.get(task, {}), estimator: metrics["token_perplexity"]}
        told[task] = {
            "documents": size,
            "windows": size,
            "tokens": tokens,
            "values": {
                name: {
                    "log_prob": -tokens * math.log(value),
                    "stderr": 0.01 * tokens if name == "elbo" else None,
                    "nfe": None if name in ("elbo", *LATTICE) else int(tokens * (nfe or 1)),
                }
                for name, value in perplexities.items()
            },
        }
    return told


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
    log=True,
    spec=None,
    duel=None,
    **body,
):
    """A result of `--model duel-mdm`: `tasks` or `docs` as for `hf`.

    `values`: {task: {NAME: perplexity per token}} of the other estimators of a lattice run.
    """
    docs, values = docs or {}, values or {}
    tasks = tasks or {task: _metrics(found) for task, found in docs.items()}
    size = body.pop("size", max(map(len, docs.values()), default=3))
    elbo = {"elbo_form": "count", "elbo_block": "None", "mc_samples": "1", "draw_seed": "0"}
    spec = {
        "denoiser": "dit",
        "weights": f"w-{model}",
        "dtype": "float32",
        "rule": rule if estimator in RULED else "None",
        "block": block,
        "grid": "target",
        "estimator": estimator,
        "windows": "harness",
        "max_length": "1025",
        "special_tokens": "[50256] text [], bos=given",
        "tokenizer": "gpt2-hash",
        "version": "1",
        **(elbo if estimator == "elbo" else {}),
        **(spec or {}),
    }
    told = _accounts(tasks, docs, values, estimator, nfe, size)
    tokens = sum(found["tokens"] for found in told.values())
    config = {
        "model": "duel-mdm",
        "fingerprint": fingerprint.digest(spec),
        "spec": spec,
        "duel": {
            "estimator": estimator,
            "rule": rule if estimator in RULED else None,
            "block": None if block == "none" else int(block),
            "dtype": spec["dtype"],
            "attention": attention,
            "weights": spec["weights"],
            "ranks": 1,
            "device": "cpu",
            "windows": size,
            "tokens": tokens,
            "forwards": 17,
            "rows": 600,
            "nfe": None,
            "seconds": 0.01 * tokens,
            "peak_memory_bytes": 4e8,
            "cut_contexts": 0,
            "bos": spec["special_tokens"].rpartition("bos=")[2],
            "longest_document": max((n for found in docs.values() for _, _, n in found), default=5000),
            "row_capacity": 1024,
            "trace": None,
            "tasks": told,
            **(duel or {}),
        },
    }
    samples = {task: _samples(found) for task, found in docs.items()} if log else {}
    return _file(folder, _body(model, config, tasks, size=size, **body), samples)


def text_score(text, nats, tokens, estimator="duel", stderr=None, blocks=None, **spec):
    """A score as `Duel.score` returns it, of a text in one window. `stderr`: of draws; `blocks`: of an estimate."""
    window = Window((), tuple(text.encode()))
    sums = Total.from_score(window, Score(nats, stderr=stderr, blocks=blocks), estimator)
    spec = {"estimator": estimator, **spec}
    kind = registry.kind_of(estimator, spec, sums.beam)
    bound, rest = kind == registry.Kind.UPPER_BOUND.value, ((-1.0,) * tokens, (0,) * tokens, None, None, (), ())
    values = math.exp(-nats / tokens), -nats / math.log(2) / len(text)
    return TextScore(text, nats, sums.stderr, bound, kind, *values, ("x",) * tokens, *rest, sums, spec)


def trace(path, result, records):
    """A trace of a result: `records` as in lm_eval_duel/trace.py."""
    config = json.loads(result.read_text())["config"]
    header = {"duel_trace": 1, "fingerprint": config["fingerprint"], "spec": config["spec"]}
    path.write_text("".join(json.dumps(line) + "\n" for line in [header, *records]))
    return path


def per_token(names, values):
    """Tasks without documents: {task: {metric: value}}."""
    return {name: {"token_perplexity": value} for name, value in zip(names, values, strict=True)}


def report(tmp_path, *arguments, ar=True):
    """The JSON of a report on `results`; `ar`: with the baseline in the folder of that name."""
    out = tmp_path / "out"
    given = ["--ar", str(tmp_path / "ar")] if ar else []
    main([str(tmp_path / "results"), *given, "--out", str(out), *map(str, arguments)])
    return json.loads((out / "report.json").read_text())


def rows(found, task, estimator="duel"):
    """The rows of a task under an estimator, by model."""
    return {row["model"]: row for row in found["tasks"][task]["rows"] if row["estimator"] == estimator}
