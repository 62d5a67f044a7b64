"""The benchmarks as tasks, from local copies: every YAML in the harness, rows by hand, and what is refused."""

import math
from pathlib import Path

import data_copies
import harness_runs
import pytest
import tiny
import yaml
from harness_requests import text_log_prob
from laws import slow_but

from lm_eval_duel import demo, tasks
from lm_eval_duel.denoisers import load_tokenizer
from lm_eval_duel.errors import DuelError
from lm_eval_duel.tasks import corpora
from lm_eval_duel.tasks.corpora import DETOKENIZERS

pytestmark = pytest.mark.usefixtures("one_load")


def configs():
    """The YAML of each benchmark task, with its include, by name; functions stay names."""
    by_name = {}
    for file in sorted((Path(tasks.task_folder()) / "benchmarks").glob("[!_]*.yaml")):
        config = read_yaml(file)
        if isinstance(config.get("task"), str):  # a group has a list there
            by_name[config["task"]] = {**read_yaml(file.with_name(config["include"])), **config}
    return by_name


def read_yaml(file):
    class Loader(yaml.SafeLoader):
        pass

    Loader.add_constructor("!function", lambda loader, node: loader.construct_scalar(node))
    return yaml.load(file.read_text(encoding="utf-8"), Loader)


KNOWN = configs()
WRAPPED = [name for name, config in KNOWN.items() if config["custom_dataset"].endswith("wrapped")]
WHOLE = [name for name in KNOWN if name not in WRAPPED]
FEW = [*WRAPPED[:2], *WHOLE[:2]]
LENGTH = 64
MDM = "rule=l2r:k=32,block=32,bos=given"
AR = f"pretrained={demo.resolve('demo-ar')},dtype=float32"


@pytest.fixture(scope="module")
def copies(tmp_path_factory):
    return data_copies.write(tmp_path_factory.mktemp("copies"))


def evaluate(names, copies, model_args=MDM, model="duel-mdm", limit=2, **metadata):
    """A run of the harness; metadata are the model args' and what is given, as on the command line."""
    metadata = {"data_dir": copies, "rows": data_copies.ROWS, "length": LENGTH, **metadata}
    return harness_runs.evaluate(names, model_args, model, metadata, limit=limit, bootstrap_iters=0)


def documents_of(name, copies, **metadata):
    """The rows of a wrapped task's own corpus, as documents."""
    of_copies = {"data_dir": copies, "rows": data_copies.ROWS, "length": LENGTH}
    return tasks.wrapped(**{**KNOWN[name]["metadata"], **of_copies, **metadata})["test"]


def ids_of(document):
    return [int(token) for token in document["ids"].split()]


def rows_of(name, copies, **metadata):
    """The rows as lists of ids."""
    return [ids_of(document) for document in documents_of(name, copies, **metadata)]


# ---------------------------------------------------------------- every YAML, through the harness


@pytest.mark.parametrize("names", slow_but([FEW, list(KNOWN)], [FEW]), ids=["few", "all"])
def test_every_task_runs_under_both_models_over_the_same_tokens(names, copies, subtests):
    """One document under the masked model, and under its autoregressive twin by `hf`."""
    runs = evaluate(names, copies, limit=1), evaluate(names, copies, AR, "hf", limit=1)
    for name in names:
        with subtests.test(name):
            is_wrapped = name in WRAPPED
            scored = []
            for run in runs:
                [sample] = run["samples"][name]
                metrics = run["results"][name]
                document = sample["doc"]
                nats = text_log_prob(sample)
                tokens = document["duel_tokens"]
                assert math.isfinite(nats)
                assert nats < 0 < tokens
                assert metrics["token_perplexity,none"] == pytest.approx(math.exp(-nats / tokens))
                assert ("word_perplexity,none" in metrics) == (not is_wrapped)
                scored.append((tokens, document["ids"] if is_wrapped else document["text"]))
            assert scored[0] == scored[1]
            if is_wrapped:
                assert tokens == LENGTH - 1 == runs[0]["config"]["duel"]["tasks"][name]["tokens"]


def test_the_text_for_other_models_is_that_of_the_row(copies):
    """It encodes to the row's own ids but where a document is joined to the next inside a word: only in PTB here."""
    tokenizer = load_tokenizer({"tokenizer": "demo-ar"})
    for name in WRAPPED:
        differ = []
        for n, document in enumerate(documents_of(name, copies, tokenizer="demo-ar")):
            row = ids_of(document)
            text = tasks.token_text(document)
            assert text.token_ids == tuple(row)
            assert text == tokenizer.decode(row[1:])
            assert text.startswith(tokenizer.decode(row[1:8]))
            assert text.endswith("<|endoftext|>")
            if tokenizer(text, add_special_tokens=False)["input_ids"] != row[1:]:
                differ.append(n)
        assert differ == ([0] if name == "duel_ptb_wrapped" else []), name


# ---------------------------------------------------------------- rows by hand


def by_hand(tokenizer, name, texts, insert_eos=False, keep=True):
    """Detokenize, tokenize, concatenate, cut, frame."""
    stream = []
    clean = DETOKENIZERS.get(corpora.find(name).detokenize, str)
    end = tokenizer.eos_token_id
    for text in texts:
        stream += tokenizer(clean(text), add_special_tokens=False)["input_ids"]
        if insert_eos:
            stream.append(end)
    rows = []
    size = LENGTH - 2
    for start in range(0, len(stream), size):
        ids = stream[start : start + size]
        if keep or len(ids) == size:
            rows.append([end, *ids, end])
    return rows


def test_rows_are_those_made_by_hand(copies, subtests):
    tokenizer = load_tokenizer({})
    for name in WRAPPED:
        with subtests.test(name):
            corpus = KNOWN[name]["metadata"]["corpus"]
            column = corpora.find(corpus).columns[0]
            texts = [record[column] for record in data_copies.records(corpus)]
            joined = bool(KNOWN[name]["metadata"].get("insert_eos"))
            assert joined == (name in ("duel_openwebtext_wrapped", "duel_lm1b_in_domain"))
            assert rows_of(name, copies) == by_hand(tokenizer, corpus, texts, insert_eos=joined)
            if name == "duel_ptb_wrapped":
                assert rows_of(name, copies, insert_eos="true") == by_hand(tokenizer, corpus, texts, insert_eos=True)
                dropped = by_hand(tokenizer, corpus, texts, keep=False)
                for remainder in ("drop", "official"):
                    assert rows_of(name, copies, remainder=remainder) == dropped


# ---------------------------------------------------------------- which positions are scored


SCORED = [("official", 63), ("first", 61), ("none", 62), ("scored", 64)]


@pytest.mark.parametrize(("bos", "scored"), slow_but(SCORED, [SCORED[0], SCORED[2]]))
def test_the_conventions_count_what_is_scored(copies, bos, scored):
    run = evaluate(["duel_ptb_wrapped"], copies, f"rule=l2r:k=32,block=32,bos={bos}")
    assert run["config"]["duel"]["tokens"] == 2 * scored
    first, second = run["samples"]["duel_ptb_wrapped"]
    assert first["doc"]["duel_tokens"] == scored
    assert second["doc"]["duel_tokens"] == scored

    tokenizer = load_tokenizer({})
    for document in documents_of("duel_lm1b_wrapped", copies, bos=bos):  # other models get a text of as many tokens
        ids = tokenizer(tasks.token_text(document), add_special_tokens=False)["input_ids"]
        assert len(ids) == document["duel_tokens"]


@pytest.mark.parametrize("bos", ["given", "first", "scored"])
def test_a_token_perplexity_divides_by_the_scored_tokens(bos):
    """Of whole texts, too: the task's own count of tokens is for other models."""
    run = harness_runs.evaluate(["sotu"], f"rule=l2r:k=32,block=32,bos={bos}", limit=2, bootstrap_iters=0)
    of_task = run["config"]["duel"]["tasks"]["sotu"]
    counted = sum(sample["doc"]["duel_tokens"] for sample in run["samples"]["sotu"])
    assert (of_task["tokens"] > counted) is (bos == "scored")
    assert (of_task["tokens"] < counted) is (bos == "first")
    expected = math.exp(-of_task["values"]["duel"]["log_prob"] / of_task["tokens"])
    assert run["results"]["sotu"]["token_perplexity,none"] == pytest.approx(expected)


def test_ids_of_another_tokenizer_are_refused(copies, tmp_path):
    tiny.tokenizer().save_pretrained(tmp_path)
    with pytest.raises(DuelError, match=rf"the ids come from the tokenizer {tmp_path} .* this model's is \S*demo-mdm "):
        evaluate(["duel_ptb_wrapped"], copies, tokenizer=str(tmp_path))


# ---------------------------------------------------------------- what is refused


def test_wrong_metadata(copies, subtests):
    for metadata, named in (
        ({"remainder": "oficial"}, "remainder .*Did you mean official"),
        ({"bos": "gvien"}, "bos .*Did you mean given"),
        ({"length": 2}, "length=2"),
        ({"length": "many"}, "'length'"),
        ({"length": 100_000, "remainder": "drop"}, "ptb .*100000"),
        ({"insert_eos": "perhaps"}, "'insert_eos'"),
        ({"framed": 3}, "'framed'"),
        ({"rows": 0}, "'rows'"),
        ({"rows": 13}, r"ptb\.jsonl has 12 rows, but ptb has 13.* --metadata rows=12"),
        ({"rows": None}, r"ptb\.jsonl has 12 rows, but ptb has 3370"),
        ({"insert_oes": True}, "'insert_oes'.*Did you mean insert_eos"),
        ({"tokenizer": "/no/such"}, "--metadata tokenizer="),
    ):
        with subtests.test(str(metadata)), pytest.raises(DuelError, match=named):
            rows_of("duel_ptb_wrapped", copies, **metadata)


def test_copies_that_cannot_be_used(tmp_path):
    def refused(named, rows=None):
        with pytest.raises(DuelError, match=named):
            corpora.texts("ptb", str(tmp_path), rows)

    refused(r"No copy of ptb in .*: expected ptb\.parquet")
    (tmp_path / "ptb").mkdir()
    refused("No copy of ptb in")  # an empty folder holds nothing
    data_copies.as_lines(tmp_path / "ptb" / "a.jsonl", [{"text": "a"}])
    refused("row 0 has no text in sentence", 1)
    data_copies.as_lines(tmp_path / "ptb.jsonl", [{"sentence": "a"}, {"sentence": None}])
    refused("row 1 has no text in sentence", 2)
    (tmp_path / "ptb.jsonl").write_text('{"sentence": "a"}\n{"sente')
    refused(r"ptb\.jsonl:2 is not JSON")


def test_the_end_of_a_large_set_is_taken_from_its_end(tmp_path):
    """`openwebtext_1k` is the last thousand texts, as the evaluations of the papers took them."""
    rows = corpora.CORPORA["openwebtext_1k"].rows
    records = [{"text": str(n)} for n in range(rows + 3)]
    data_copies.as_lines(tmp_path / "openwebtext.jsonl", records)
    assert corpora.texts("openwebtext_1k", str(tmp_path)) == [str(n) for n in range(3, rows + 3)]


def test_wikitext_documents_are_those_of_the_harness(copies):
    """The text that is scored, and the words and bytes it is divided by, are those of the stock task `wikitext`."""
    from lm_eval.tasks.wikitext import preprocess_wikitext as stock

    raw = corpora.texts("wikitext2_pages", str(copies), 12)
    docs = tasks.documents("wikitext2_pages", data_dir=str(copies), rows=12)["test"]
    assert docs["text"] != raw
    for page, doc in zip(raw, docs, strict=True):
        assert doc["text"] == stock.wikitext_detokenizer({"page": page})
        ours = tasks.perplexity(doc, [-7.0])
        for name, value in stock.process_results({"page": page}, [-7.0]).items():
            assert ours[name] == value, name


def test_another_text_and_missing_shards_are_refused(tmp_path):
    """A whole copy is the whole set: a file by its digest, shards by their numbers, texts by their bytes."""
    own = tmp_path / "lambada_openai" / "data" / "lambada_test.jsonl"
    own.parent.mkdir(parents=True)
    data_copies.as_lines(own, [{"text": "x"}] * 5153)
    with pytest.raises(DuelError, match="is not the pinned file of lambada"):
        corpora.texts("lambada", str(tmp_path))
    data_copies.as_lines(tmp_path / "ag_news.jsonl", [{"text": "x"}] * 7600)
    with pytest.raises(DuelError, match="has 7600 bytes of text, but ag_news has 1788274: the texts differ"):
        corpora.texts("ag_news", str(tmp_path))
    shards = tmp_path / "openwebtext"
    shards.mkdir()
    for number in (0, 1):
        data_copies.as_lines(shards / f"train-0000{number}-of-00080.jsonl", [{"text": "x"}])
    with pytest.raises(DuelError, match="lacks shard 79 of the 80 of openwebtext_1k"):
        corpora.texts("openwebtext_1k", str(tmp_path))
    data_copies.as_lines(shards / "train-00079-of-00080.jsonl", [{"text": str(n)} for n in range(1172)])
    assert corpora.texts("openwebtext_1k", str(tmp_path)) == [str(n) for n in range(172, 1172)]
