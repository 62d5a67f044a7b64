"""The benchmarks as tasks, from local copies: every YAML in the harness, rows by hand, and what is refused."""

import dataclasses
import json
import math
import subprocess
import sys

import pytest
import tiny
from harness_requests import IS_0_5, text_log_prob
from harness_runs import free_port, lm_eval, read
from lm_eval import simple_evaluate
from lm_eval.tasks import TaskManager

import benchmarks
from lm_eval_duel import demo, tasks
from lm_eval_duel.cli import data
from lm_eval_duel.cli.main import main
from lm_eval_duel.denoisers import load_tokenizer
from lm_eval_duel.errors import DuelError
from lm_eval_duel.harness.lm import DuelMDM
from lm_eval_duel.tasks import corpora
from lm_eval_duel.tasks.detokenize import DETOKENIZERS

KNOWN = data.benchmarks()
WRAPPED = [name for name, config in KNOWN.items() if config["custom_dataset"].endswith("wrapped")]
GROUPS = {
    "duel_zero_shot": ["ptb", "wikitext103", "lm1b", "lambada", "ag_news", "pubmed", "arxiv"],
    "duel_8b": ["wikitext2", "lambada", "ag_news"],
    "duel_in_domain": ["openwebtext_wrapped", "lm1b_in_domain"],
}
GROUPS["duel_zero_shot_wrapped"] = [f"{name}_wrapped" for name in GROUPS["duel_zero_shot"]]
LENGTH = 64
MDM = "rule=l2r:k=4,block=4,bos=given"
AR = f"pretrained={demo.resolve('demo-ar')},dtype=float32"


@pytest.fixture(scope="module")
def copies(tmp_path_factory):
    return benchmarks.write(tmp_path_factory.mktemp("copies"))


def manager(copies, **metadata):
    said = {"data_dir": copies, "rows": benchmarks.ROWS, "length": LENGTH, **metadata}
    return TaskManager(include_path=tasks.task_folder(), include_defaults=False, metadata=said)


def evaluate(names, copies, model_args=MDM, model="duel-mdm", limit=2, **metadata):
    """A run of the harness; metadata are the model args' and what is given, as on the command line."""
    said = dict(pair.split("=", 1) for pair in model_args.split(",")) | metadata
    return simple_evaluate(
        model=model,
        model_args=model_args,
        tasks=names,
        task_manager=manager(copies, **said),
        device="cpu",
        limit=limit,
        log_samples=True,
        bootstrap_iters=0,
    )


def rows_of(name, copies, **metadata):
    """The rows of a wrapped task's own corpus, as lists of ids."""
    said = {"data_dir": copies, "rows": benchmarks.ROWS, "length": LENGTH, **metadata}
    found = tasks.wrapped(**{**KNOWN[name]["metadata"], **said})["test"]
    return [[int(token) for token in row["ids"].split()] for row in found], found


# ---------------------------------------------------------------- every YAML, through the harness


@pytest.fixture(scope="module")
def runs(copies):
    """Two documents of every task under the masked model, and under its autoregressive twin by `hf`."""
    return evaluate(list(KNOWN), copies), evaluate(list(KNOWN), copies, AR, "hf")


def test_every_data_set_has_both_kinds_of_task():
    paper = ["ptb", "wikitext2", "wikitext103", "lm1b", "lambada", "ag_news", "pubmed", "arxiv", "openwebtext"]
    paper.append("openwebtext_1k")
    assert {f"duel_{name}{kind}" for name in paper for kind in ("", "_wrapped")} == KNOWN.keys() - {
        "duel_lm1b_in_domain"
    }
    assert {config["metadata"]["corpus"] for config in KNOWN.values()} == corpora.CORPORA.keys()


def test_every_task_runs_under_both_models_over_the_same_tokens(runs, subtests):
    for name in KNOWN:
        with subtests.test(name):
            runs_under_both_models(runs, name)


def runs_under_both_models(runs, name):
    counted = []
    for run in runs:
        samples = sorted(run["samples"][name], key=lambda sample: sample["doc_id"])
        nats = [text_log_prob(sample) for sample in samples]
        tokens = [sample["doc"]["duel_tokens"] for sample in samples]
        assert len(samples) == 2 and all(math.isfinite(value) and value < 0 for value in nats) and min(tokens) > 0
        metrics = run["results"][name]
        assert metrics["token_perplexity,none"] == pytest.approx(math.exp(-math.fsum(nats) / sum(tokens)))
        assert ("word_perplexity,none" in metrics) == (name not in WRAPPED)
        counted.append((tokens, [sample["doc"] for sample in samples]))
    (tokens, docs), (same_tokens, same_docs) = counted
    assert tokens == same_tokens
    if name in WRAPPED:
        assert tokens[0] == LENGTH - 1 and [doc["ids"] for doc in docs] == [doc["ids"] for doc in same_docs]
        assert runs[0]["config"]["duel"]["tasks"][name]["tokens"] == sum(tokens)
    else:
        assert [doc["text"] for doc in docs] == [doc["text"] for doc in same_docs]


def test_groups_hold_their_tasks(copies):
    for name, members in GROUPS.items():
        found = manager(copies).load([name])
        assert [task.config.task for task in found["tasks"].values()] == [f"duel_{member}" for member in members]
        assert list(found["groups"]) == [name]


@pytest.mark.slow
def test_the_harness_validates_every_name():
    names = ",".join([*KNOWN, *GROUPS])
    done = lm_eval("validate", "--tasks", names, "--include_path", tasks.task_folder())
    assert "All tasks found and valid" in done.stdout


def test_the_text_for_other_models_is_that_of_the_row(copies):
    """It encodes to the row's own ids but where a document is joined to the next inside a word: only in PTB here."""
    tokenizer = load_tokenizer({"tokenizer": "demo-ar"})
    for name in WRAPPED:
        rows, found = rows_of(name, copies, tokenizer="demo-ar")
        again = [tokenizer(tasks.token_text(doc), add_special_tokens=False)["input_ids"] for doc in found]
        differ = [n for n, (row, ids) in enumerate(zip(rows, again, strict=True)) if row[1:] != ids]
        assert differ == ([0] if name == "duel_ptb_wrapped" else []), name
        for row, doc in zip(rows, found, strict=True):
            text = tasks.token_text(doc)
            assert text == tokenizer.decode(row[1:]) and text.token_ids == tuple(row)
            assert text.startswith(tokenizer.decode(row[1:8])) and text.endswith("<|endoftext|>")


def test_ids_are_scored_exactly_by_the_chain_rule_too(copies):
    """`hf` scores the text; `duel-mdm` with estimator=ar the ids. They agree where the text encodes to the ids."""
    theirs = evaluate(["duel_ptb_wrapped"], copies, AR, "hf", limit=None)
    ours = evaluate(["duel_ptb_wrapped"], copies, f"{AR},estimator=ar,bos=given", limit=None)
    values = [
        [text_log_prob(s) for s in sorted(run["samples"]["duel_ptb_wrapped"], key=lambda s: s["doc_id"])]
        for run in (ours, theirs)
    ]
    agree = [abs(a - b) < 2e-3 for a, b in zip(*values, strict=True)]
    assert agree == [False, True, True, True]


# ---------------------------------------------------------------- rows by hand


def by_hand(name, texts, length=LENGTH, insert_eos=False, batch=None, keep=True):
    """Detokenize, tokenize, concatenate, cut, frame; with `batch`, so many texts at a time, remainders dropped."""
    tokenizer = load_tokenizer({})
    clean = DETOKENIZERS.get(corpora.find(name).detokenize, str)
    end, size, rows = tokenizer.eos_token_id, length - 2, []
    for start in range(0, len(texts), batch or len(texts)):
        stream = []
        for text in texts[start : start + (batch or len(texts))]:
            stream += tokenizer(clean(text), add_special_tokens=False)["input_ids"] + [end] * insert_eos
        cut = [stream[n : n + size] for n in range(0, len(stream), size)]
        rows += [[end, *ids, end] for ids in cut if keep or len(ids) == size]
    return rows


def test_rows_are_those_made_by_hand(copies, subtests):
    for name in WRAPPED:
        with subtests.test(name):
            rows_as_made_by_hand(copies, name)


def rows_as_made_by_hand(copies, name):
    corpus = KNOWN[name]["metadata"]["corpus"]
    column = corpora.find(corpus).columns[0]
    texts = [record[column] for record in benchmarks.RECORDS[corpus]()]
    joined = bool(KNOWN[name]["metadata"].get("insert_eos"))
    assert joined == (name in ("duel_openwebtext_wrapped", "duel_lm1b_in_domain"))
    assert rows_of(name, copies)[0] == by_hand(corpus, texts, insert_eos=joined)
    assert rows_of(name, copies, insert_eos="true")[0] == by_hand(corpus, texts, insert_eos=True)
    assert rows_of(name, copies, insert_eos="False")[0] == by_hand(corpus, texts)
    dropped = by_hand(corpus, texts, insert_eos=joined, keep=False)
    assert rows_of(name, copies, remainder="drop")[0] == rows_of(name, copies, remainder="official")[0] == dropped


def test_the_official_remainder_of_more_than_a_thousand_rows(tmp_path):
    texts = [f"{sentence} {n}" for n in range(209) for sentence in benchmarks.SENTENCES][:2500]
    benchmarks.as_lines(tmp_path / "ag_news.jsonl", [{"text": text} for text in texts])
    for length in (64, 128):
        said = {"rows": "2500", "length": str(length)}
        official = rows_of("duel_ag_news_wrapped", tmp_path, remainder="official", **said)[0]
        whole = rows_of("duel_ag_news_wrapped", tmp_path, **said)[0]
        assert official == by_hand("ag_news", texts, length, batch=1000, keep=False)
        assert whole == by_hand("ag_news", texts, length)
        kept, all_of_it = (sum(len(row) - 2 for row in rows) for rows in (official, whole))
        assert 0 < all_of_it - kept < 3 * (length - 2)  # less than a row a batch
        first = len(by_hand("ag_news", texts[:1000], length, keep=False))  # the two agree in the first batch only
        assert official[:first] == whole[:first]
        assert official[first] != whole[first]


def test_a_tokenizer_of_bert_has_cls_at_both_ends(copies, tmp_path):
    folder = tiny.checkpoint(tmp_path, "bert")
    rows, found = rows_of("duel_lm1b_in_domain", copies, pretrained=folder, length=16)
    assert all(row[0] == row[-1] == 2 and len(row) == 16 for row in rows[:-1])
    assert sum(row[1:-1].count(2) for row in rows) == benchmarks.ROWS  # and one after each text
    assert not any(3 in row for row in rows)  # no [SEP]
    plain, _ = rows_of("duel_lm1b_in_domain", copies, pretrained=folder, length=16, framed="no" == "yes")
    assert [t for row in plain for t in row] == [t for row in rows for t in row[1:-1]]
    model_args = f"pretrained={folder},rule=l2r,block=4,bos=given"
    run = evaluate(["duel_lm1b_in_domain"], copies, model_args, length=16, limit=3)
    assert run["config"]["duel"]["tokens"] == 45 == sum(found["duel_tokens"][:3])


def test_without_framing_a_tokenizer_needs_no_bos(copies, tmp_path):
    words = tiny.tokenizer()
    words.cls_token = None
    words.save_pretrained(tmp_path)
    rows, _ = rows_of("duel_ptb_wrapped", copies, tokenizer=str(tmp_path), length=16, framed="false")
    assert {len(row) for row in rows[:-1]} == {16}
    with pytest.raises(DuelError, match=r"no BOS, EOS or \[CLS\] for the ends of rows; use --metadata framed=false"):
        rows_of("duel_ptb_wrapped", copies, tokenizer=str(tmp_path), length=16)


# ---------------------------------------------------------------- which positions are scored


@pytest.mark.parametrize(("bos", "scored"), [("official", 63), ("scored", 64), ("none", 62), ("first", 61)])
def test_the_conventions_count_what_is_scored(copies, bos, scored):
    run = evaluate(["duel_ptb_wrapped"], copies, f"rule=l2r:k=4,block=4,bos={bos}")
    assert run["config"]["duel"]["tokens"] == 2 * scored
    assert [sample["doc"]["duel_tokens"] for sample in run["samples"]["duel_ptb_wrapped"]] == [scored] * 2
    tokenizer = load_tokenizer({})
    _, found = rows_of("duel_lm1b_wrapped", copies, bos=bos)
    for doc in found:  # other models are given a text of as many tokens
        assert len(tokenizer(tasks.token_text(doc), add_special_tokens=False)["input_ids"]) == doc["duel_tokens"]


def test_the_metadata_may_say_it_in_place_of_the_model_args(copies):
    run = evaluate(["duel_ptb_wrapped"], copies, "rule=l2r:k=4,block=4", bos="none")  # what demo-mdm is taken for
    assert run["config"]["duel"]["bos"] == "none" and run["config"]["duel"]["tokens"] == 2 * 62
    with pytest.raises(
        DuelError,
        match=r"counted with bos=given, but this model has bos=none. Use one for both: --metadata bos=none",
    ):
        evaluate(["duel_ptb_wrapped"], copies, "rule=l2r:k=4,block=4")


def test_ids_of_another_tokenizer_are_refused(copies, tmp_path):
    tiny.tokenizer().save_pretrained(tmp_path)
    with pytest.raises(DuelError, match=rf"those of the tokenizer {tmp_path} .* this model's is \S*demo-mdm "):
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


def test_metadata_come_as_strings_too(copies):
    plain = rows_of("duel_ptb_wrapped", copies, length=32, framed=False, insert_eos=True, remainder="drop")[0]
    said = {"rows": "12", "length": "32", "framed": "False", "insert_eos": "true", "remainder": "DROP", "bos": ""}
    assert rows_of("duel_ptb_wrapped", copies, **said)[0] == plain
    found = manager(copies, rows="12").load(["duel_ptb"])["tasks"]["duel_ptb"]
    assert len(list(found.test_docs())) == benchmarks.ROWS


def test_what_a_copy_may_be(tmp_path):
    texts = [record["text"] for record in benchmarks.openwebtext(20)]
    benchmarks.as_parquet(tmp_path / "openwebtext_1k.parquet", [{"text": text} for text in texts])
    assert corpora.texts("openwebtext_1k", str(tmp_path), 20) == texts
    lines = [row["text"] for row in benchmarks.wikitext()]
    benchmarks.as_lines(tmp_path / "wikitext103_pages.jsonl", [{"text": line} for line in lines])
    pages = corpora.texts("wikitext103_pages", str(tmp_path), 12)
    assert "".join(pages) == "".join(lines) and [page.split()[:3] for page in pages] == [
        ["=", "Harbour", "="],
        ["=", "Governor", "="],
    ]


def test_the_last_rows_of_a_larger_file(tmp_path, monkeypatch):
    texts = [f"{n}" for n in range(30)]
    benchmarks.as_lines(tmp_path / "openwebtext_1k.jsonl", [{"text": text} for text in texts])
    smaller = dataclasses.replace(corpora.CORPORA["openwebtext_1k"], rows=10)
    monkeypatch.setitem(corpora.CORPORA, "openwebtext_1k", smaller)
    assert corpora.texts("openwebtext_1k", str(tmp_path)) == texts[-10:]


def test_copies_that_cannot_be_used(tmp_path):
    with pytest.raises(DuelError, match=r"No copy of ptb in .*: expected ptb\.parquet, .* or ptb_text_only/penn_tree"):
        corpora.texts("ptb", str(tmp_path))
    (tmp_path / "ptb").mkdir()
    with pytest.raises(DuelError, match="No copy of ptb in"):  # an empty folder holds nothing
        corpora.texts("ptb", str(tmp_path))
    benchmarks.as_lines(tmp_path / "ptb" / "a.jsonl", [{"text": "a"}])
    with pytest.raises(DuelError, match=r"row 0 has no text in sentence; its columns are text\. Use the split"):
        corpora.texts("ptb", str(tmp_path), 1)
    benchmarks.as_lines(tmp_path / "ptb.jsonl", [{"sentence": "a"}, {"sentence": None}])
    with pytest.raises(DuelError, match=r"row 1 has no text in sentence"):
        corpora.texts("ptb", str(tmp_path), 2)
    benchmarks.as_parquet(tmp_path / "ptb.parquet", [{"sentence": "a" * n} for n in range(999)])
    content = (tmp_path / "ptb.parquet").read_bytes()
    (tmp_path / "ptb.parquet").write_bytes(content[: len(content) // 2])
    with pytest.raises(DuelError, match=r"ptb\.parquet cannot be read \(Arrow\w+: .*is it whole"):
        corpora.texts("ptb", str(tmp_path))
    (tmp_path / "ptb.parquet").unlink()
    (tmp_path / "ptb.jsonl").write_text('{"sentence": "a"}\n{"sente')
    with pytest.raises(DuelError, match=r"ptb\.jsonl cannot be read \(JSONDecodeError"):
        corpora.texts("ptb", str(tmp_path))


def test_without_a_hub_the_message_says_what_to_do(monkeypatch, tmp_path):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(DuelError, match=r"Cannot load ptb \(ptb-text-only/ptb_text_only, .* Use a local copy"):
        tasks.documents("ptb")
    with pytest.raises(DuelError, match=r"Unknown data set 'ptp'\. Did you mean ptb\?"):
        tasks.documents("ptp")


def test_what_the_hub_gives_is_the_pinned_file(copies, monkeypatch):
    asked = []

    def download(repo, file, **where):
        asked.append((repo, file, where))
        return f"{copies}/lambada_openai/{file}"

    monkeypatch.setattr("huggingface_hub.hf_hub_download", download)
    with pytest.raises(
        DuelError, match=r"is not the pinned file of lambada \(another SHA-256\): delete it and load it"
    ):
        tasks.wrapped("lambada")
    monkeypatch.setitem(corpora.CORPORA, "lambada", dataclasses.replace(corpora.find("lambada"), sha256=None))
    assert len(tasks.documents("lambada", rows=12)["test"]) == 12
    with pytest.raises(DuelError, match="has 12 rows, but lambada has 5153: a part of a data set"):
        tasks.documents("lambada")
    pin = {"repo_type": "dataset", "revision": "900124bf3b8235c6daf21033af9948b3f07346c4"}
    assert asked == [("EleutherAI/lambada_openai", "data/lambada_test.jsonl", pin)] * 3


# ---------------------------------------------------------------- data check


def test_data_check_shows_every_task(copies, capsys):
    main(["tools", "data", "check", "--metadata", f"data_dir={copies},rows=12,length=64"])
    out = capsys.readouterr().out
    assert out.startswith("tokens of demo-mdm; name yours with --metadata tokenizer=...\n") and "NOT LOADED" not in out
    shown = {part.split(":")[0]: part.splitlines() for part in out.replace("\nduel_", "\n\nduel_").split("\n\n")[1:]}
    assert shown.keys() == KNOWN.keys() and all(len(lines) == 4 for lines in shown.values())
    rows, found = rows_of("duel_ptb_wrapped", copies)
    assert shown["duel_ptb_wrapped"] == [
        f"duel_ptb_wrapped: 12 rows, {sum(found['duel_tokens'])} tokens scored in {len(rows)} rows of up to 64",
        "    licence  LDC User Agreement for Non-Members",
        f"    from     {copies}/ptb.jsonl",
        f"    first    {tasks.token_text(found[0])[:100]!r}",
    ]
    assert shown["duel_wikitext103"][0].endswith(" in 2 documents")  # articles of 12 lines


def test_data_check_goes_on_and_says_what_failed(copies, tmp_path, capsys):
    benchmarks.as_lines(tmp_path / "ptb.jsonl", benchmarks.ptb())
    tiny.tokenizer().save_pretrained(tmp_path / "words")
    said = ["--metadata", f"data_dir={tmp_path},rows=12,tokenizer={tmp_path / 'words'}"]
    (tmp_path / "pubmed.json").write_text("{}\n[1]")
    with pytest.raises(SystemExit, match="2 of 3 tasks cannot be loaded: duel_arxiv, duel_pubmed_wrapped"):
        main(["tools", "data", "check", "duel_arxiv", "duel_pubmed_wrapped", "duel_ptb", *said])
    out = capsys.readouterr().out
    assert "duel_arxiv: NOT LOADED\n    No copy of arxiv in" in out
    words = sum(len(row["sentence"].split()) for row in benchmarks.ptb())
    assert f"tokens of {tmp_path / 'words'}" in out and f"duel_ptb: 12 rows, {words} tokens scored in 12 doc" in out
    with pytest.raises(SystemExit, match=r"Unknown benchmark task 'duel_ptp'\. Did you mean duel_ptb\?"):
        main(["tools", "data", "check", "duel_ptp"])


def test_data_check_says_one_cause_once(monkeypatch, capsys):
    monkeypatch.setattr(
        "huggingface_hub.hf_hub_download", lambda *_, **__: (_ for _ in ()).throw(OSError("no way out"))
    )
    with pytest.raises(SystemExit, match=rf"^lm-eval-duel: {len(KNOWN)} of {len(KNOWN)} tasks cannot be loaded"):
        main(["tools", "data", "check"])
    out = capsys.readouterr().out
    assert out.count("no way out") == out.count("NOT LOADED") == 1
    assert f"{', '.join(sorted(KNOWN))}: NOT LOADED\n    Cannot load " in out and "Use a local copy with --m" in out


# ---------------------------------------------------------------- ranks


@pytest.mark.slow
def test_rows_survive_the_ranks(copies, tmp_path):
    """Rows of ids on two CPU ranks, one more on the first than on the second, through the command line."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", free_port()]
    metadata = {"data_dir": copies, "rows": "12", "length": "64", "insert_eos": "false"}
    arguments = ["-m", "lm_eval_duel", "run", "--model_args", MDM, "--tasks", "duel_ptb_wrapped", "--limit", "3"]
    said = ["--device", "cpu", "--output_path", str(tmp_path), "--log_samples"]
    done = subprocess.run(
        [*command, *arguments, "--metadata", json.dumps(metadata), *said],
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    results, samples = read(tmp_path, "duel_ptb_wrapped")
    alone = evaluate(["duel_ptb_wrapped"], copies, limit=3)
    assert results["config"]["duel"]["ranks"] == 2
    ours = {s["doc_id"]: (s["doc"]["ids"], text_log_prob(s)) for s in samples}
    theirs = {s["doc_id"]: (s["doc"]["ids"], text_log_prob(s)) for s in alone["samples"]["duel_ptb_wrapped"]}
    assert {n: ids for n, (ids, _) in ours.items()} == {n: ids for n, (ids, _) in theirs.items()}
    assert {n: v for n, (_, v) in ours.items()} == pytest.approx({n: v for n, (_, v) in theirs.items()}, abs=1e-4)
    metric = "token_perplexity,none"
    printed = results["results"]["duel_ptb_wrapped"][metric]
    assert printed == pytest.approx(alone["results"]["duel_ptb_wrapped"][metric], rel=1e-6)


def test_wikitext_documents_are_those_of_the_harness(copies):
    """The text that is scored, and the words and bytes it is divided by, are those of the stock task `wikitext`."""
    from lm_eval.tasks.wikitext import preprocess_wikitext as stock

    raw = corpora.texts("wikitext2_pages", str(copies), 12)
    docs = tasks.documents("wikitext2_pages", data_dir=str(copies), rows=12)["test"]
    for page, doc in zip(raw, docs, strict=True):
        assert doc["text"] == stock.wikitext_detokenizer({"page": page})
        theirs = stock.process_results({"page": page}, [(-7.0, False) if IS_0_5 else -7.0])
        mine = tasks.perplexity(doc, [-7.0])
        assert {name: mine[name] for name in theirs} == theirs
    assert any(doc["text"] != page for page, doc in zip(raw, docs, strict=True))


def test_another_text_and_missing_shards_are_refused(tmp_path):
    """A whole copy is the whole set: a file by its digest, shards by their numbers, texts by their bytes."""
    own = tmp_path / "lambada_openai" / "data" / "lambada_test.jsonl"
    own.parent.mkdir(parents=True)
    benchmarks.as_lines(own, [{"text": "x"}] * 5153)
    with pytest.raises(DuelError, match="is not the pinned file of lambada"):
        corpora.texts("lambada", str(tmp_path))
    benchmarks.as_lines(tmp_path / "ag_news.jsonl", [{"text": "x"}] * 7600)
    with pytest.raises(DuelError, match="has 7600 bytes of text, but ag_news has 1788274: the texts differ"):
        corpora.texts("ag_news", str(tmp_path))
    shards = tmp_path / "openwebtext"
    shards.mkdir()
    for number in (0, 1):
        benchmarks.as_lines(shards / f"train-0000{number}-of-00080.jsonl", [{"text": "x"}] * 60_000)
    for name in ("openwebtext", "openwebtext_1k"):
        with pytest.raises(DuelError, match=f"lacks shard 79 of the 80 of {name}"):
            corpora.texts(name, str(tmp_path))
    benchmarks.as_lines(shards / "train-00079-of-00080.jsonl", [{"text": str(n)} for n in range(100_172)])
    assert corpora.texts("openwebtext", str(tmp_path))[0] == "172"
    assert corpora.texts("openwebtext_1k", str(tmp_path))[0] == "99172"


def test_rows_of_a_request_cache_made_otherwise_are_refused(copies):
    """--cache_requests keys on neither metadata nor model args: what it holds says how it was made."""
    from lm_eval_duel.harness.versions import request as make_request
    from lm_eval_duel.tasks import tokenized_text

    short, long = (
        tasks.wrapped("ptb", data_dir=str(copies), rows=12, length=length, bos="none", pretrained="demo-mdm")["test"][0]
        for length in (32, 64)
    )
    lm = DuelMDM(pretrained="demo-mdm", rule="l2r", block=4, bos="none", device="cpu")
    request = make_request("loglikelihood_rolling", short, (tasks.token_text(short),), "ptb", 0, 1)
    assert lm.loglikelihood_rolling([request], disable_tqdm=True)[0] < 0
    tokenized_text.MADE.discard(short["duel_made"])  # another process, in which only the long ones are made
    with pytest.raises(DuelError, match="comes from a request cache and was made with other metadata"):
        lm.loglikelihood_rolling([request], disable_tqdm=True)
    assert long["duel_made"] in tokenized_text.MADE
