"""`score`: every entry of its JSON and its CSV a second time, for models in an order that is none of the tables'."""

import csv
import json
import math
from types import SimpleNamespace

import numpy as np
import pytest
from results import documents, ours

from lm_eval_duel.cli import score
from lm_eval_duel.console.command_line import STDOUT
from lm_eval_duel.core.scores import Kind, Value
from lm_eval_duel.errors import DuelError
from lm_eval_duel.results import stats

COUNT = 14  # documents
GENERATOR = np.random.default_rng(5)
TOKENS = GENERATOR.integers(2, 9, COUNT).tolist()
TEXTS = [" ".join([chr(ord("a") + n), *["\u00e9t"] * (count - 1)]) for n, count in enumerate(TOKENS)]
NATS = {  # of each document: the first model is the second best, and its name is neither the first nor the last
    "middle": [-2.0 * tokens - 0.3 * (n % 3) for n, tokens in enumerate(TOKENS)],
    "worse": [-2.6 * tokens - 0.1 * (n % 4) for n, tokens in enumerate(TOKENS)],
    "a_better": [-1.5 * tokens - 0.2 * (n % 2) for n, tokens in enumerate(TOKENS)],
    "unclear": [-2.0 * tokens - 0.3 * ((n + n // 3) % 3) - 0.02 * (n % 2) for n, tokens in enumerate(TOKENS)],
}
ERROR = 0.01 * sum(TOKENS)  # of the sum of a bound, over its draws: that of `ours`
ORDERS = [("unclear", "a_better", "worse"), ("worse", "unclear", "a_better")]


def model(folder, name, value=None, tokens=TOKENS):
    """The scores of `NATS` under a model, as `score` makes them. `value`: more of the values of its documents."""
    value = value or {}
    estimator = "elbo" if value else "duel"
    file = ours(folder, model=name, estimator=estimator, docs={"score": documents(NATS[name], tokens, TEXTS)})
    config = json.loads(file.read_text())["config"]
    info = {key: config[key] for key in ("fingerprint", "spec")}
    info["duel"] = {**config["duel"], "pretrained": name}
    lines = []
    for n, (text, nats, count) in enumerate(zip(TEXTS, NATS[name], tokens, strict=True)):
        units = len(text.split()), len(text.encode())
        key = stats.key_of(text)
        lines.append(score.Line(f"t.txt:{n}", key, Value(nats, **value), count, *units, n % 2))
    error = ERROR if value else None
    return score.ScoredModel(info, estimator, lines, score._total(lines, error))


def written(folder, models, **more):
    """The JSON and the lines of CSV of models."""
    options = {"json": str(folder / "out.json"), "csv": str(folder / "out.csv"), "documents": False}
    options = SimpleNamespace(**{**options, "compare": models[1:], **more})
    score.write(options, models)
    content = json.loads((folder / "out.json").read_text())
    return content, list(csv.DictReader((folder / "out.csv").open()))


def follows(entry, line):
    """Hold the entries of a line to what they are made of."""
    nats = line.value.nats
    expected = {
        "document": line.name,
        "sha256": line.key,
        "tokens": line.tokens,
        "unk_tokens": line.unknown,
        "words": line.words,
        "bytes": line.bytes,
        "log_prob": nats,
        "log_prob_stderr": line.value.error,
        "token_perplexity": math.exp(-nats / line.tokens),
        "word_perplexity": math.exp(-nats / line.words),
        "bits_per_byte": -nats / line.bytes / math.log(2),
    }
    assert entry.keys() == expected.keys()
    for key, value in expected.items():
        assert entry[key] == (pytest.approx(value) if isinstance(value, float) else value), key


@pytest.mark.parametrize("order", ORDERS, ids="-".join)
def test_every_model_has_its_own_entries(order, tmp_path):
    """Its documents, its total and its difference to the first, whichever is better and however they are called."""
    models = [model(tmp_path, name) for name in ("middle", *order)]
    content, table = written(tmp_path, models)
    entries = [content, *content["compared"]]
    assert [entry["pretrained"] for entry in entries] == ["middle", *order]
    assert [line["model"] for line in table] == [name for name in ("middle", *order) for _ in range(COUNT)]
    for entry, scored in zip(entries, models, strict=True):
        for found, line in zip(entry["documents"], scored.lines, strict=True):
            follows(found, line)
        total = dict(entry["total"])
        assert total.pop("bits_per_byte_documents_stderr") == pytest.approx(scored.documents_stderr)
        follows(total, scored.total)
        assert entry["kind"] == "a likelihood" and entry["estimator"] == "duel"
        assert entry["fingerprint"] == scored.info["fingerprint"] and entry["spec"] == scored.info["spec"]

    perplexity = {name: math.exp(-sum(NATS[name]) / sum(TOKENS)) for name in NATS}
    for name, entry in zip(order, content["compared"], strict=True):
        pair = entry["difference"]
        per_token = (sum(NATS[name]) - sum(NATS["middle"])) / sum(TOKENS)  # first minus second, of nats
        assert pair["names"] == ["middle", name] and pair["documents"] == COUNT
        assert pair["difference"] == pytest.approx(per_token)
        assert pair["perplexities"] == pytest.approx([perplexity["middle"], perplexity[name]])
        assert pair["stderrs"] == [None, None] and pair["kinds"] == ["a likelihood"] * 2
        assert "token" in pair["unit"]
        low, high = pair["interval"]
        assert low < per_token < high
        better = {"worse": "middle", "a_better": "a_better", "unclear": None}[name]
        if better:
            assert pair["verdict"] == f"{better} is better"
        else:
            assert low < 0 < high and "is better" not in pair["verdict"]


def test_models_that_count_other_tokens_are_compared_per_byte(tmp_path):
    """If one of three has another tokenizer, also the pair of those with the same one is per byte."""
    same = model(tmp_path, "a_better")
    other = model(tmp_path, "worse", tokens=[2 * count for count in TOKENS])
    other.info["spec"] = {**other.info["spec"], "tokenizer": "another"}
    content, _ = written(tmp_path, [model(tmp_path, "middle"), other, same])
    size = sum(len(text.encode()) for text in TEXTS)
    for name, entry in zip(("worse", "a_better"), content["compared"], strict=True):
        pair = entry["difference"]
        assert "byte" in pair["unit"]
        assert pair["difference"] == pytest.approx((sum(NATS[name]) - sum(NATS["middle"])) / size)
        rates = [math.exp(-sum(NATS[each]) / size) for each in ("middle", name)]
        assert pair["perplexities"] == pytest.approx(rates)


def test_a_bound_is_a_bound_in_every_view(tmp_path, capsys):
    bound = {"error": ERROR / math.sqrt(COUNT), "kind": Kind.UPPER_BOUND}
    content, table = written(tmp_path, [model(tmp_path, "middle"), model(tmp_path, "worse", bound)])
    [other] = content["compared"]
    assert other["kind"] == Kind.UPPER_BOUND.value and {line["kind"] for line in table[COUNT:]} == {other["kind"]}
    pair = other["difference"]
    assert pair["kinds"] == [content["kind"], other["kind"]]
    assert pair["stderrs"][0] is None
    assert pair["stderrs"][1] == pytest.approx(pair["perplexities"][1] * ERROR / sum(TOKENS))
    assert other["total"]["log_prob_stderr"] == pytest.approx(ERROR)
    assert "is better" not in pair["verdict"]  # the second is only a bound
    [line] = [line for line in capsys.readouterr().out.splitlines() if "≤" in line]
    assert line.startswith("worse")


@pytest.mark.parametrize("asked", [None, STDOUT, "file"])
@pytest.mark.parametrize("shows_documents", [False, True])
@pytest.mark.parametrize("fails", [False, True])
def test_what_is_printed_and_what_is_written(asked, shows_documents, fails, tmp_path, capsys, monkeypatch):
    """JSON to standard output stands alone; a comparison that fails costs no score; no table is printed twice."""
    models = [model(tmp_path, name) for name in ("middle", "worse", "a_better")]
    file = tmp_path / "out.json"
    options = SimpleNamespace(
        json=str(file) if asked == "file" else asked, csv=None, documents=shows_documents, compare=["x", "y"]
    )
    if fails:
        monkeypatch.setattr(score, "compared", lambda scored: (_ for _ in ()).throw(DuelError("nothing")))
        with pytest.raises(DuelError):
            score.write(options, models)
    else:
        score.write(options, models)
    printed = capsys.readouterr().out
    content = None
    if asked == STDOUT:
        content = json.loads(printed)
    elif asked == "file":
        content = json.loads(file.read_text())
    if content is not None:
        assert [entry["pretrained"] for entry in (content, *content["compared"])] == ["middle", "worse", "a_better"]
        assert all(("difference" in entry) != fails for entry in content["compared"])
    if asked != STDOUT:
        # `main` has printed the tables of single documents if --documents asks for them
        assert printed.count("\ntotal ") == (3 if fails and not shows_documents else 0)
        assert ("first \u2212 second" in printed) == (not fails)
        assert printed.startswith("\n") == (shows_documents and not fails)
