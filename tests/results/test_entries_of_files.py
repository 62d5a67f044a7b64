"""What the entries of results files become: which files are read, which documents are the same, what a run is."""

import json
import math
from types import SimpleNamespace

import pytest
from results import documents, hf, ours, per_token, put
from results import report as run
from results import rows as rows_of

from lm_eval_duel.cli.report import parse
from lm_eval_duel.errors import DuelError, counted
from lm_eval_duel.results import match, order, read, rows, runs, schema
from lm_eval_duel.results.report import collect
from lm_eval_duel.results.table import Note
from lm_eval_duel.tasks.data import TOKENS

DOCS = {"sotu": documents([-60, -150, -90], [20, 40, 30])}


# ---------------------------------------------------------------- files


def test_results_are_found_by_both_of_the_harness_names_each_once(tmp_path):
    ours(tmp_path / "a", docs=DOCS)
    [file] = (tmp_path / "a").rglob("results_*.json")
    renamed = file.rename(file.with_name("mine_2026-01-01T00-00-00.000000.json"))
    for other in ("mine.json", "report.json", "mine_2026-01-01.json", "samples_x.jsonl"):
        file.with_name(other).write_text("{}")
    assert read.files([tmp_path, renamed, renamed.parent, tmp_path]) == [renamed.resolve()]


@pytest.mark.parametrize("dates", [(1.0, 2.0, 3.0), (3.0, 2.0, 1.0), (2.0, 3.0, 1.0)])
def test_runs_come_oldest_first(tmp_path, dates):
    for date in dates:
        put(ours(tmp_path, docs=DOCS), "date", date)

    assert [run.header.date for run in read.runs([tmp_path])] == [1.0, 2.0, 3.0]


@pytest.mark.parametrize(
    ("names", "labels"),
    [
        (["one/M", "two/M", "N"], ["one/M", "two/M", "N"]),
        (["one/M", "one/M", "N"], ["M (w-0)", "M (w-1)", "N"]),  # folders of one name, too
        (["a/one/M", "b/one/M", "two/M"], ["M (w-0)", "M (w-1)", "M (w-2)"]),
        (["M", "N", "O"], ["M", "N", "O"]),
    ],
)
def test_models_of_one_label_are_distinguished(tmp_path, names, labels):
    for n, name in enumerate(names):
        file = ours(tmp_path, docs=DOCS, model=name, spec={"weights": f"w-{n}"})
        put(file, "config.duel.pretrained", name)

    assert [run.label for run in read.runs([tmp_path])] == labels


@pytest.mark.parametrize(
    ("entry", "value", "is_refused"),
    [
        ("results.sotu.bits_per_byte,none", -0.1, True),
        ("results.sotu.bits_per_byte,none", 0.0, False),
        ("results.sotu.bits_per_byte,none", 0.1, False),
        ("results.sotu.word_perplexity,none", -1.0, True),
        ("results.sotu.word_perplexity,none", 0.0, True),
        ("results.sotu.word_perplexity,none", 0.1, False),
        ("config.spec.elbo_eps", "many", True),
        ("config.spec.mc_samples", "many", True),
        ("config.spec.noise_seed", "many", True),
        ("config.spec.elbo_eps", "none", False),
        ("config.spec.mc_samples", "none", False),
        ("config.spec.noise_seed", "none", False),
    ],
)
def test_values_that_no_run_writes_are_refused(tmp_path, entry, value, is_refused):
    put(ours(tmp_path, docs=DOCS), entry, value)
    if not is_refused:
        read.runs([tmp_path])
        return
    with pytest.raises(DuelError):
        read.runs([tmp_path])


# ---------------------------------------------------------------- documents

DOC = {"ids": [5, 6], "tokenizer": "t", TOKENS: 2}
RECORD = {"doc_id": 3, "doc": DOC, "doc_hash": "d", "target_hash": "x", "prompt_hash": "p"}


@pytest.mark.parametrize(
    ("change", "rolling", "same"),
    [
        ({"prompt_hash": "q"}, True, True),
        ({"prompt_hash": "q"}, False, False),
        ({"target_hash": "y"}, True, False),
        ({"doc": DOC | {TOKENS: 3}}, True, True),
        ({"doc": DOC | {"tokenizer": "u"}}, True, True),  # the ids are what is scored
        ({"doc": DOC | {"ids": [5, 7]}}, True, False),
        ({"doc_hash": "e"}, True, True),  # which covers our count of tokens, too
        ({"doc_id": 4}, True, True),
    ],
)
def test_what_makes_two_documents_the_same(change, rolling, same):
    digest = read._digest(RECORD, rolling)
    digest_of_changed = read._digest(RECORD | change, rolling)

    assert (digest == digest_of_changed) == same


@pytest.mark.parametrize(
    ("change", "same"),
    [({"doc_hash": "e"}, False), ({"doc_id": 4}, True), ({"doc_hash": None, "doc_id": 4}, False)],
)
def test_a_document_of_another_task_is_known_by_its_hash(change, same):
    record = RECORD | {"doc": {"text": "t", "tokenizer": "t"}}
    digest = read._digest(record, True)
    digest_of_changed = read._digest(record | change, True)
    assert (digest == digest_of_changed) == same

    with_counts = record | {"doc": {"text": "t", "tokenizer": "t", TOKENS: 2}}
    other = with_counts | {"doc": {"text": "t", "tokenizer": "u", TOKENS: 2}}
    assert read._digest(with_counts, True) != read._digest(other, True), "a text names what it was cut by"


@pytest.mark.parametrize("first", [0, 3])
def test_texts_of_score_have_the_units_that_any_of_them_has(first):
    entries = []
    for n, words in enumerate((first, 3 - first, 0)):
        entries.append({"sha256": str(n), "log_prob": -1.0 - n, "tokens": 2, "words": words, "bytes": 5})

    samples = read.samples_of_score(entries)
    assert set(samples.values["word_perplexity"]) == {"0:1", "1:1", "2:1"}

    without_words = read.samples_of_score([entry | {"words": 0} for entry in entries])
    assert "word_perplexity" not in without_words.values

    impossible = read.samples_of_score([entries[0] | {"log_prob": None}])
    assert impossible.values["token_perplexity"] == {"0:1": (-math.inf, 2.0)}


def test_texts_of_score_are_named_by_their_files():
    def named(*names):
        return runs.name_of_files(names)

    assert named() == ""
    assert named("x.txt") == "x.txt"
    assert named("a/x.txt:1", "a/x.txt:2") == "x.txt"
    assert named("b/a/x.txt:1", "b/a/y.txt:12") == "a"
    assert named("x.txt", "y.txt") == "x.txt and 1 more"
    assert named("a/x.txt:1", "b/y.txt:12", "z.txt") == "x.txt and 2 more"


# ---------------------------------------------------------------- runs and tasks


def config(model="duel-mdm", spec=None, duel=None, **more):
    return runs.Config(model=model, spec=spec or {}, duel={"tasks": {}, **(duel or {})}, **more)


@pytest.mark.parametrize(
    ("given", "is_ours", "is_autoregressive"),
    [
        (config(), True, False),
        (config("Duel", {"weights": "w"}), True, False),  # a model object
        (config("Duel", duel={"tasks": {"sotu": {}}}), True, False),
        (config("Duel", duel={"seconds": 3.0}), True, False),
        (config("hf"), False, True),
        (config("dllm"), False, False),
        (config(spec={"estimator": "ar"}), True, True),
        (config(duel={"attention": "causal"}), True, True),
        (config("dllm", duel={"tasks": {}}), False, False),
    ],
)
def test_what_is_ours_and_what_is_autoregressive(given, is_ours, is_autoregressive):
    assert given.ours == is_ours
    assert given.autoregressive == is_autoregressive


@pytest.mark.parametrize(
    ("spec", "attention", "cache"),
    [
        ({}, "bidirectional", "none"),
        ({}, "block_causal", None),
        ({"cache": "dual"}, "bidirectional", "dual"),
        ({"cache": "dual", "estimator": "ar"}, "bidirectional", None),
    ],
)
def test_the_cache_of_a_run(spec, attention, cache):
    assert config(spec=spec, duel={"attention": attention}).cache == cache


@pytest.mark.parametrize(
    ("given", "is_in_spec"),
    [("revision", True), ("peft", True), ("batch_size", False), ("max_batch_size", False), ("device", False)],
)
def test_what_another_model_was_loaded_with_is_its_spec(tmp_path, given, is_in_spec):
    file = hf(tmp_path, docs=DOCS, args={given: "x"})
    put(file, "config.model_sha", "abc")
    expected = {"pretrained": "ARM", "dtype": "float32", "model_sha": "abc"}
    if is_in_spec:
        expected[given] = "x"

    [run_of_hf] = read.runs([tmp_path])

    assert run_of_hf.spec == expected


def task(**entry):
    metrics = {"token_perplexity": 20.0}
    return runs.Task("t", "loglikelihood_rolling", {"documents": "4"}, entry, metrics, {}, None, Note())


@pytest.mark.parametrize(
    ("entry", "longest_of_run", "longest"),
    [
        ({"longest_document": 30}, 70, 30),
        ({}, 70, 70),
        ({"longest_document": 30, "documents": 3}, 70, None),  # of a part of the documents
        ({"longest_document": 30, "documents": 4}, None, 30),
    ],
)
def test_the_longest_document_of_a_run_that_scored_all(entry, longest_of_run, longest):
    run_of_task = runs.Run(
        file=None,
        content={},
        config=config(duel={"longest_document": longest_of_run}),
        header=runs.Header(),
        every_task={"t": task(**entry)},
        groups=[],
        label="M",
    )

    assert run_of_task.longest("t") == longest


def test_the_tokens_of_documents_are_known_if_those_of_each_are():
    values = {"token_perplexity": {"a": (-1.0, 2.0), "b": (-2.0, 7.0)}}

    assert runs.Documents({"a": 0, "b": 1}, values).tokens == {"a": 2.0, "b": 7.0}
    assert runs.Documents({"a": 0, "b": 1, "c": 2}, values).tokens is None


def test_shares_and_limits():
    assert task(unk_tokens=3, tokens=12).unknown == 0.25
    assert task(tokens=12).unknown == 0.0

    assert runs.is_limited(3, 4)
    for documents_scored, available in ((4, 4), (5, 4), (None, 4), (3, None)):
        assert not runs.is_limited(documents_scored, available)

    assert runs.documents_scored(1000, 2000) == "1,000 of 2,000"
    assert runs.documents_scored(None, 3) == ""


def test_arguments_and_versions_as_text():
    assert schema._arguments("pretrained=a/b,rule=greedy,x") == {"pretrained": "a/b", "rule": "greedy"}
    assert schema._arguments({"cache": None, "k": 2, "trust": "None"}) == {"cache": "none", "k": "2", "trust": "none"}
    assert schema._versions({"torch": None, "numpy": "2.0"}) == {"torch": "unknown", "numpy": "2.0"}
    with pytest.raises(OverflowError):
        schema.count(10**400)
    assert schema._value({"log_prob": None, "reason": "x"})["log_prob"] == -math.inf
    assert schema._value({"log_prob": None})["log_prob"] is None


# ---------------------------------------------------------------- which runs may be compared


@pytest.mark.parametrize("bos", ["given", "none", "official"])
def test_scored_positions(bos):
    run = SimpleNamespace(config=config(), spec={"special_tokens": f"[0] text [], bos={bos}"})
    assert match.positions(run, rolling=True) == ("bos=official" if bos == "official" else "the text")


@pytest.mark.parametrize("counts", [(0, 0), (2, 0), (0, 3), (2, 2)])
def test_contexts_that_were_not_cut_alike_make_a_difference(tmp_path, counts):
    for count in counts:
        answers = {"configs": {"sotu": {"output_type": "loglikelihood"}}}
        ours(tmp_path, docs=DOCS, duel={"cut_contexts": {"sotu": count, "other": 3}}, **answers)

    differences = match.differences(*read.runs([tmp_path]), "sotu")

    fields = [difference.field for difference in differences]
    first, second = counts
    assert fields == ([] if first == second else ["contexts"])
    notes_of_task = collect(parse([str(tmp_path), "--as_published", "--out", "unused"])).tasks["sotu"].notes
    expected = {f"MDLM: {counted(count, 'context')} cut at 1025" for count in counts if count}
    assert {note for note in notes_of_task if "cut at" in note} == expected


@pytest.mark.parametrize("sizes", [((20, 40, 30), (20, 40, 30)), ((20, 40, 30), (40, 20, 30))])
def test_tokens_are_the_same_if_those_of_each_document_are(tmp_path, sizes):
    for n, tokens in enumerate(sizes):
        ours(tmp_path, docs={"sotu": documents([-60, -150, -90], tokens)}, spec={"tokenizer": f"t{n}"})

    first, second = sizes
    assert match.same_tokens(*read.runs([tmp_path]), "sotu") == (first == second)


@pytest.mark.parametrize("capacities", [(40, 100), (100, 40), (39, 100), (100, 39), (39, 39)])
@pytest.mark.parametrize("logged", [(True, True), (True, False), (False, True)])
def test_windows_are_the_same_if_every_document_is_one_in_both(tmp_path, capacities, logged):
    """Whichever of the two knows the longest document, which has 40 tokens."""
    for capacity, log in zip(capacities, logged, strict=True):
        more = {} if log else {"longest_document": 12}
        ours(tmp_path, docs=DOCS, log=log, duel={"row_capacity": capacity, **more})

    differences = match.differences(*read.runs([tmp_path]), "sotu")

    fields = [difference.field for difference in differences]
    all_are_whole = min(capacities) == 40
    all_are_cut_alike = capacities == (39, 39)
    assert fields == ([] if all_are_whole or all_are_cut_alike else ["windows"])


# ---------------------------------------------------------------- rows


def test_a_value_per_unit_has_the_error_of_that(tmp_path):
    file = ours(tmp_path, docs=DOCS, estimator="elbo", spec={"mc_samples": "16"})
    put(file, "config.duel.tasks.sotu.values.elbo", {"log_prob": -300.0, "stderr": 3.0, "window_stderr": 7.0})
    [run_of_elbo] = read.runs([tmp_path])

    for metric, units in (("token_perplexity", 90), ("byte_perplexity", 18), ("bits_per_byte", 18)):
        [row], notes = rows.from_run(run_of_elbo, "sotu", metric, baseline=False)
        assert row.per_unit.nats == pytest.approx(-300 / units)
        assert row.per_unit.error == pytest.approx(3 / units)
        assert row.stderr_bound == row.stderr, "that of the draws, if it is known"
        assert notes == []


@pytest.mark.parametrize("count", [2, 3, 4])
def test_a_value_of_other_documents_than_its_task_is_left_out(tmp_path, count):
    file = ours(tmp_path, docs=DOCS, estimator="oracle", values={"sotu": {"mixture": 30.0}})
    put(file, "config.duel.tasks.sotu.values.mixture.documents", count)
    [run_of_lattice] = read.runs([tmp_path])

    rows_of_run, notes = rows.from_run(run_of_lattice, "sotu", "token_perplexity", baseline=False)

    estimators = [row.estimator for row in rows_of_run]
    if count == 3:
        assert "mixture" in estimators
        assert not notes
    else:
        assert "mixture" not in estimators
        assert notes


def test_a_document_without_a_unit_counts_with_its_nats(tmp_path):
    """A text of one character has no word here, and a likelihood; one that is empty has neither and is left out."""
    texts = ["four", "x", ""]
    ours(tmp_path, docs={"sotu": documents([-9.0, -2.0, 0.0], [4, 1, 0], texts)})
    [run] = read.runs([tmp_path])

    [row], _ = rows.from_run(run, "sotu", "word_perplexity", baseline=False)

    assert sorted(row.documents.values()) == [(pytest.approx(-9.0), 2.0), (pytest.approx(-2.0), 0.0)]
    nats, words = runs.sums(row.documents)
    assert row.value == pytest.approx(math.exp(-nats / words))


def test_a_text_without_tokens_has_no_nats_in_a_trace():
    row = SimpleNamespace(
        documents={"a:1": (-9.0, 3.0), "empty:1": (0.0, 0.0)},
        task="t",
        run=SimpleNamespace(
            traced={("t", "mixture"): {0: -5.0}},
            tasks={"t": SimpleNamespace(documents=SimpleNamespace(numbers={"a:1": 0, "empty:1": 1}))},
        ),
    )

    nats_and_tokens, note = rows._traced(row, "mixture", -5.0)

    assert nats_and_tokens == {"a:1": (-5.0, 3.0), "empty:1": (0.0, 0.0)}
    assert note == Note()


# ---------------------------------------------------------------- the order of a table


def test_rows_come_by_estimator_block_rule_cache_and_seed(tmp_path):
    """Whatever the order of their files; the models as their first results come, the baseline before all."""
    made = [
        ("Z", {"estimator": "elbo", "spec": {"mc_samples": "16", "elbo_block": "None"}}, "elbo none"),
        ("Z", {"estimator": "elbo", "spec": {"mc_samples": "16", "elbo_block": "8"}}, "elbo 8"),
        ("Z", {"estimator": "elbo", "spec": {"mc_samples": "16", "elbo_block": "4"}}, "elbo 4"),
        ("Z", {"block": "4"}, "duel 4 none"),
        ("Z", {"block": "4", "spec": {"cache": "prefix"}}, "duel 4 prefix"),
        ("Z", {"block": "4", "spec": {"cache": "dual"}}, "duel 4 dual"),
        ("Z", {"block": "4", "spec": {"cache": "later"}}, "duel 4 later"),
        ("Z", {"block": "16", "spec": {"noise_seed": "2"}}, "duel 16 none 2"),
        ("Z", {"block": "16", "spec": {"noise_seed": "10"}}, "duel 16 none 10"),
        ("Z", {"block": "none"}, "duel none none"),
        ("A", {}, "duel 4 none"),
    ]
    for model, more, _ in [*made[-2::-1], made[-1]]:
        ours(tmp_path, docs=DOCS, model=model, **more)
    hf(tmp_path, docs=DOCS, model="AR")

    every_row = []
    for one_run in read.runs([tmp_path]):
        rows_of_run, _ = rows.from_run(one_run, "sotu", "token_perplexity", baseline=not one_run.config.ours)
        every_row += rows_of_run
    names = []
    for row in order.in_order(every_row).rows:
        cache = "" if row.estimator == "elbo" else row.cache
        parts = [row.estimator, row.block, cache, row.noise_seed]
        names.append((row.model, " ".join(part for part in parts if part)))

    assert names == [("AR", "ar"), *((model, name) for model, _, name in made)]


def test_the_newest_of_two_baselines_is_the_one_of_the_gaps(tmp_path):
    """And of two results of one value the newest is shown, whichever file was written first."""
    for dates in ((5.0, 7.0), (7.0, 5.0)):
        folder = tmp_path / str(dates[0])
        for date in dates:
            put(hf(folder / "results", {"t": {"token_perplexity": 10.0 + date}}), "date", date)
            put(ours(folder / "results", {"t": {"token_perplexity": 20.0 + date}}), "date", date)

        task = run(folder, "--as_published")["tasks"]["t"]

        baseline, duel = task["rows"]
        assert baseline["model"] == "ARM"
        assert baseline["value"] == pytest.approx(17.0)
        assert baseline["gap"] is None
        assert duel["model"] == "MDLM"
        assert duel["value"] == pytest.approx(27.0)
        assert duel["gap"] == pytest.approx(10.0)
        assert len([note for note in task["notes"] if "ANOTHER value" in note]) == 2


@pytest.mark.parametrize("dates", [(5.0, 7.0), (7.0, 5.0)])
def test_of_the_baselines_of_several_tasks_the_newest_with_a_task_is_its_own(tmp_path, dates):
    """One has two tasks and the other has one of them: both are baselines if the first is older."""
    date_of_both, date_of_one = dates
    value_of_both = 10.0 + date_of_both
    value_of_one = 10.0 + date_of_one
    put(hf(tmp_path / "results", per_token(["t", "u"], [value_of_both, value_of_both])), "date", date_of_both)
    put(hf(tmp_path / "results", per_token(["t"], [value_of_one])), "date", date_of_one)
    ours(tmp_path / "results", per_token(["t", "u"], [30.0, 30.0]))

    content = run(tmp_path, "--as_published")

    assert content["tasks"].keys() == {"t", "u"}
    [row_of_t] = rows_of(content, "t").values()
    [row_of_u] = rows_of(content, "u").values()
    assert row_of_t["model"] == row_of_u["model"] == "MDLM"
    assert row_of_t["gap"] == pytest.approx(30.0 - 17.0)
    assert row_of_u["gap"] == pytest.approx(30.0 - value_of_both)


def test_a_file_of_score_has_all_the_models_that_it_compares(tmp_path):
    from lm_eval_duel.results.read import SCORE, SCORE_VERSION

    def model(name):
        entry = {"document": "x.txt:1", "sha256": "a", "tokens": 2, "words": 1, "bytes": 5, "log_prob": -3.0}
        spec = {"weights": name, "version": "1", "estimator": "duel"}
        duel = {"schema": runs.SCHEMA, "tasks": {}}
        return {"documents": [entry], "fingerprint": name, "spec": spec, "duel": duel, "pretrained": name}

    content = {"format": SCORE, "version": SCORE_VERSION, **model("a"), "compared": [model("b"), model("c")]}
    (tmp_path / "s.json").write_text(json.dumps(content))

    labels_and_files = [(run.label, run.file.name) for run in read.from_file(tmp_path / "s.json")]

    assert labels_and_files == [("a", "s.json"), ("b", "s.json#2"), ("c", "s.json#3")]


@pytest.mark.parametrize(
    ("first", "second", "is_offered"),
    [("hf", "ours", True), ("ours", "hf", True), ("ours", "ours", False), ("hf", "hf", False)],
)
def test_scoring_a_model_of_the_harness_here_is_offered_beside_one_of_ours(tmp_path, first, second, is_offered):
    """Windows and tokens are then the same; two results of the harness, or two of ours, need something else."""
    for n, make in enumerate((first, second)):
        if make == "hf":
            hf(tmp_path, docs=DOCS, model=f"org/{n}", max_length=8)
        else:
            ours(tmp_path, docs=DOCS, duel={"row_capacity": 9 + n})

    offered = match._twin(*read.runs([tmp_path]))

    assert bool(offered) == is_offered
    assert ("estimator=ar" in offered) == is_offered


def test_a_group_apart_says_how_it_differs_from_the_first_table(tmp_path):
    """The third differs from the second in its documents, too, but that is not the table that it is beside."""
    ours(tmp_path, docs=DOCS)
    ours(tmp_path, docs={"sotu": documents([-60, -150], [20, 40])})
    ours(tmp_path, docs=DOCS, duel={"row_capacity": 9})

    groups = match.groups("sotu", "token_perplexity", read.runs([tmp_path]))

    fields = [reason.partition(":")[0] for _, reason in groups]
    assert fields == ["", "documents", "windows"]


@pytest.mark.parametrize("is_exact", [True, False])
def test_a_noise_seed_is_of_values_given_that_noise(is_exact):
    """An estimate or a bound over noise has draws of its own."""
    run_of_seed = SimpleNamespace(spec={"noise_seed": "3"})
    row = SimpleNamespace(run=run_of_seed, score=SimpleNamespace(is_exact=is_exact))

    assert rows.Row.noise_seed.fget(row) == ("3" if is_exact else None)
