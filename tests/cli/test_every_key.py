"""`score`: every entry of its JSON and its CSV a second time, for models in an order that is none of the tables'."""

import csv
import json
import math
from types import SimpleNamespace

import numpy as np
import pytest
from results import documents, ours

from lm_eval_duel.cli import score, scored
from lm_eval_duel.console.command_line import STDOUT
from lm_eval_duel.core.scores import Kind, Value
from lm_eval_duel.errors import DuelError
from lm_eval_duel.results import stats

COUNT = 14  # documents
GENERATOR = np.random.default_rng(5)
TOKENS = GENERATOR.integers(2, 9, COUNT).tolist()
TEXTS = []
# Of each document. The first model is the second best, and its name is neither the first nor the last.
NATS = {"middle": [], "worse": [], "a_better": [], "unclear": []}
for n, tokens in enumerate(TOKENS):
    first_word = chr(ord("a") + n)
    TEXTS.append(" ".join([first_word, *["\u00e9t"] * (tokens - 1)]))
    NATS["middle"].append(-2.0 * tokens - 0.3 * (n % 3))
    NATS["worse"].append(-2.6 * tokens - 0.1 * (n % 4))
    NATS["a_better"].append(-1.5 * tokens - 0.2 * (n % 2))
    NATS["unclear"].append(-2.0 * tokens - 0.3 * ((n + n // 3) % 3) - 0.02 * (n % 2))
ERROR = 0.01 * sum(TOKENS)  # of the sum of a bound, over its draws: that of `ours`
ORDERS = [("unclear", "a_better", "worse"), ("worse", "unclear", "a_better")]


def model(folder, name, value=None, tokens=TOKENS):
    """The scores of `NATS` under a model, as `score` makes them. `value`: more of the values of its documents."""
    value = value or {}
    estimator = "elbo" if value else "duel"
    file = ours(folder, model=name, estimator=estimator, docs={"score": documents(NATS[name], tokens, TEXTS)})
    config = json.loads(file.read_text())["config"]
    info = {
        "fingerprint": config["fingerprint"],
        "spec": config["spec"],
        "duel": {**config["duel"], "pretrained": name},
    }
    lines = []
    for n, (text, nats, count) in enumerate(zip(TEXTS, NATS[name], tokens, strict=True)):
        words = len(text.split())
        size = len(text.encode())
        unknown = n % 2
        lines.append(scored.Line(f"t.txt:{n}", stats.key_of(text), Value(nats, **value), count, words, size, unknown))
    error = ERROR if value else None
    return scored.ScoredModel(info, estimator, lines, scored._total(lines, error), len(lines))


def written(folder, models):
    """The JSON and the lines of CSV of models."""
    json_file = folder / "out.json"
    csv_file = folder / "out.csv"
    options = SimpleNamespace(json=str(json_file), csv=str(csv_file), documents=False, compare=models[1:])
    score.write(options, models)
    content = json.loads(json_file.read_text())
    table = list(csv.DictReader(csv_file.open()))
    return content, table


def total_nats(name):
    """The sum over the documents of a model."""
    return sum(NATS[name])


def check_entry(entry, line):
    """Each entry of a line of scores, from the nats and the counts of that line."""
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


def check_scores(entry, scored):
    """The entries of a model, from its scores."""
    for document, line in zip(entry["documents"], scored.lines, strict=True):
        check_entry(document, line)
    total = dict(entry["total"])
    assert total.pop("bits_per_byte_documents_stderr") == pytest.approx(scored.documents_stderr)
    check_entry(total, scored.total)

    assert entry["kind"] == "exact"
    assert entry["estimator"] == "duel"
    assert entry["fingerprint"] == scored.info["fingerprint"]
    assert entry["spec"] == scored.info["spec"]


def check_difference(pair, name):
    """The difference of "middle" and another model, from the sums of their nats."""
    tokens = sum(TOKENS)
    per_token = (total_nats(name) - total_nats("middle")) / tokens  # first minus second, of nats
    perplexity = math.exp(-total_nats(name) / tokens)
    perplexity_of_middle = math.exp(-total_nats("middle") / tokens)
    low, high = pair["interval"]

    assert pair["names"] == ["middle", name]
    assert pair["documents"] == COUNT
    assert pair["difference"] == pytest.approx(per_token)
    assert pair["perplexities"] == pytest.approx([perplexity_of_middle, perplexity])
    assert pair["stderrs"] == [None, None]
    assert pair["kinds"] == ["exact"] * 2
    assert "token" in pair["unit"]
    assert low < per_token < high

    better = {"worse": "middle", "a_better": "a_better", "unclear": None}[name]
    if better:
        assert pair["verdict"] == f"{better} is better"
    else:
        assert low < 0 < high
        assert "is better" not in pair["verdict"]


@pytest.mark.parametrize("order", ORDERS, ids="-".join)
def test_every_model_has_its_own_entries(order, tmp_path, capsys):
    """Its documents, its total and its difference to the first, whichever is better and however they are called."""
    names = ["middle", *order]
    models = [model(tmp_path, name) for name in names]

    content, table = written(tmp_path, models)

    first_table, *_ = capsys.readouterr().out.split("\n\n")
    assert [row.split()[0] for row in first_table.splitlines()[1:]] == names  # as the command names them
    entries = [content, *content["compared"]]
    assert [entry["pretrained"] for entry in entries] == names
    assert [line["model"] for line in table] == np.repeat(names, COUNT).tolist()
    for entry, each in zip(entries, models, strict=True):
        check_scores(entry, each)
    for entry, name in zip(content["compared"], order, strict=True):
        check_difference(entry["difference"], name)


def test_models_that_count_other_tokens_are_compared_per_byte(tmp_path):
    """If one of three has another tokenizer, also the pair of those with the same one is per byte."""
    same = model(tmp_path, "a_better")
    other = model(tmp_path, "worse", tokens=[2 * count for count in TOKENS])
    other.info["spec"] = {**other.info["spec"], "tokenizer": "another"}
    size = len("".join(TEXTS).encode())

    content, _ = written(tmp_path, [model(tmp_path, "middle"), other, same])

    for name, entry in zip(("worse", "a_better"), content["compared"], strict=True):
        pair = entry["difference"]
        assert "byte" in pair["unit"]
        assert pair["difference_unit"] == "bits per byte"
        assert pair["difference"] == pytest.approx((total_nats(name) - total_nats("middle")) / size / math.log(2))
        perplexity = math.exp(-total_nats(name) / size)
        perplexity_of_middle = math.exp(-total_nats("middle") / size)
        assert pair["perplexities"] == pytest.approx([perplexity_of_middle, perplexity])


def test_a_bound_is_a_bound_in_every_view(tmp_path, capsys):
    bound = {"error": ERROR / math.sqrt(COUNT), "kind": Kind.UPPER_BOUND}

    content, table = written(tmp_path, [model(tmp_path, "middle"), model(tmp_path, "worse", bound)])

    [other] = content["compared"]
    assert other["kind"] == Kind.UPPER_BOUND.value
    assert other["total"]["log_prob_stderr"] == pytest.approx(ERROR)
    lines_of_other = table[COUNT:]
    assert lines_of_other
    for line in lines_of_other:
        assert line["kind"] == other["kind"]

    pair = other["difference"]
    error_of_first, error_of_second = pair["stderrs"]
    assert pair["kinds"] == [content["kind"], other["kind"]]
    assert error_of_first is None
    assert error_of_second == pytest.approx(pair["perplexities"][1] * ERROR / sum(TOKENS))
    assert "is better" not in pair["verdict"]  # the second is only a bound

    [printed] = [line for line in capsys.readouterr().out.splitlines() if "≤" in line]
    assert printed.startswith("worse")


def raise_error(scored):
    raise DuelError("nothing")


@pytest.mark.parametrize("asked", [None, STDOUT, "file"])
@pytest.mark.parametrize("shows_documents", [False, True])
@pytest.mark.parametrize("fails", [False, True])
def test_what_is_printed_and_what_is_written(asked, shows_documents, fails, tmp_path, capsys, monkeypatch):
    """JSON to standard output stands alone; a comparison that fails costs no score; no table is printed twice."""
    names = ["middle", "worse", "a_better"]
    models = [model(tmp_path, name) for name in names]
    file = tmp_path / "out.json"
    json_to = str(file) if asked == "file" else asked
    options = SimpleNamespace(json=json_to, csv=None, documents=shows_documents, compare=["x", "y"])

    if fails:
        monkeypatch.setattr(score, "compared", raise_error)
        with pytest.raises(DuelError):
            score.write(options, models)
    else:
        score.write(options, models)
    printed = capsys.readouterr().out

    if asked is not None:
        content = json.loads(printed if asked == STDOUT else file.read_text())
        entries = [content, *content["compared"]]
        assert [entry["pretrained"] for entry in entries] == names
        for entry in content["compared"]:
            assert ("difference" in entry) != fails
    if asked != STDOUT:
        # `main` has printed the tables of single documents if --documents asks for them
        assert printed.count("\ntotal ") == (3 if fails and not shows_documents else 0)
        assert ("first \u2212 second" in printed) == (not fails)
        assert printed.startswith("\n") == (shows_documents and not fails)
