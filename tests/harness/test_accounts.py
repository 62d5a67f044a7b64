"""What a request adds to the results is counted by the evaluation that asks it: computed, or from a cache."""

import json
import math
from pathlib import Path

import pytest
import tiny
from close import close_nats
from lm_eval import simple_evaluate
from lm_eval.api.model import CachingLM
from lm_eval.tasks import TaskManager

from lm_eval_duel import rules, tasks
from lm_eval_duel.errors import DuelError
from lm_eval_duel.harness import trace
from lm_eval_duel.harness.lm import DuelMDM
from lm_eval_duel.harness.trace import IMPOSSIBLE
from lm_eval_duel.harness.versions import request as make_request
from lm_eval_duel.tasks import metrics

TEXTS = ["a b c", "d e", "a b c", "f g h i j"]
ALPHABET = " ".join("abcdefghijklmnopqrstuvwxyz")
SHIPPED = Path(tasks.task_folder()) / "sotu" / "_perplexity.yaml"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny.checkpoint(tmp_path_factory.mktemp("bert"), "bert", length=16)


@pytest.fixture
def model(folder):
    return lambda **other: DuelMDM(**{"pretrained": folder, "rule": "greedy", "block": 4, "device": "cpu", **other})


def cached(model, folder, rank=0):
    return CachingLM(model, str(folder / f"c_rank{rank}.db"))


def rolling(*texts, task="toy", kind="loglikelihood_rolling", doc=None):
    arguments = [text if isinstance(text, tuple) else (text,) for text in texts]
    return [make_request(kind, doc or {}, args, task, n, 1) for n, args in enumerate(arguments)]


def told(model):
    return model.get_model_info()["duel"]


def same(one, other):
    """Whether two accounts of a task agree, figures up to float noise."""
    one, other = dict(one), dict(other)
    mine, theirs = one.pop("values"), other.pop("values")
    close = {
        name: {key: number if number is None else pytest.approx(number, abs=1e-4) for key, number in value.items()}
        for name, value in theirs.items()
    }
    return one == other and mine == close


# ---------------------------------------------------------------- answers of a cache belong to the run that asks


@pytest.mark.parametrize("before", [1, 3])
def test_documents_of_equal_text_are_counted_each(model, tmp_path, before):
    whole = model()
    whole.loglikelihood_rolling(rolling(*TEXTS))
    cached(model(), tmp_path).loglikelihood_rolling(rolling(*TEXTS[:before]))
    again = cached(model(), tmp_path)
    again.loglikelihood_rolling(rolling(*TEXTS))
    assert same(told(again)["tasks"]["toy"], told(whole)["tasks"]["toy"])
    fewer = cached(model(), tmp_path)
    fewer.loglikelihood_rolling(rolling(*TEXTS[:2]))
    task = told(fewer)["tasks"]["toy"]
    assert (task["documents"], task["requests"], task["tokens"]) == (2, 2, 5)


def test_no_task_of_another_run_is_listed(model, tmp_path):
    cached(model(), tmp_path).loglikelihood_rolling(rolling(*TEXTS, task="first"))
    again = cached(model(), tmp_path)
    again.loglikelihood_rolling(rolling(*reversed(TEXTS), task="second"))
    assert list(told(again)["tasks"]) == ["second"] and again.lm.estimator.counts.windows == 0
    assert told(again)["tasks"]["second"]["documents"] == told(again)["answers_from_cache"] == 4


def test_cut_contexts_and_merged_borders_are_those_of_this_run(model, tmp_path):
    asked = rolling((ALPHABET, " a b"), (ALPHABET, " c"), ("a", "b"), ("a", " b"), kind="loglikelihood")
    whole = model()
    values = whole.loglikelihood(asked)
    assert told(whole)["cut_contexts"] == 2 and told(whole)["merged_borders"] == 1
    cached(model(), tmp_path).loglikelihood(asked)
    for asking in (asked, asked[1:]):
        again = cached(model(), tmp_path)
        assert again.loglikelihood(asking) == values[len(asked) - len(asking) :]
        assert again.lm.estimator.counts.windows == 0
        assert told(again)["cut_contexts"] == 1 + (asking is asked) and told(again)["merged_borders"] == 1


@pytest.mark.parametrize("settings", [{}, {"do_sample": True, "temperature": 0.5}], ids=["decoded", "sampled"])
def test_generated_texts_of_a_cache_say_how(model, tmp_path, settings):
    asked = rolling((ALPHABET, {"until": [], "max_gen_toks": 4, **settings}), kind="generate_until")
    first = cached(model(), tmp_path)
    texts = first.generate_until(asked)
    again = cached(model(), tmp_path)
    assert again.generate_until(asked) == texts and again.lm.estimator.counts.forwards == 0
    for name in ("generated", "cut_contexts"):
        assert told(again)[name] == told(first)[name]
    assert len(told(first)["generated"]) == told(first)["cut_contexts"] == told(again)["answers_from_cache"] == 1


def test_an_answer_of_a_cache_is_checked_like_any_other(model, tmp_path):
    """A task that divides by the tokens of another tokenizer is refused, whoever computed the answer."""
    cached(model(), tmp_path).loglikelihood_rolling(rolling("a b c"))
    wrong = rolling("a b c", doc={"text": "a b c", "duel_tokens": 4})
    with pytest.raises(DuelError, match="counted 4 tokens but this model's tokenizer has 3"):
        cached(model(), tmp_path).loglikelihood_rolling(wrong)


def test_only_requests_through_a_cache_use_it(model, tmp_path):
    lm = model()
    cached(lm, tmp_path).loglikelihood_rolling(rolling("a b c"))
    for count in (1, 2):
        lm.loglikelihood_rolling(rolling(*["a b c", "x y"][:count]))
    assert "answers_from_cache" not in told(lm) and lm.estimator.counts.windows == 4
    again = cached(model(), tmp_path)
    again.loglikelihood_rolling(rolling("a b c", "x y"))
    assert told(again)["answers_from_cache"] == 1


# ---------------------------------------------------------------- lattices


def test_a_lattice_that_follows_other_rules_is_refused(model, tmp_path):
    mixture = {"estimator": "mixture", "lattice_rules": "greedy"}
    first = cached(model(**mixture), tmp_path)
    first.loglikelihood_rolling(rolling(*TEXTS[:2]))
    with pytest.raises(DuelError, match=r"lattice_rules: this run greedy:k=1\+margin:k=1, the other greedy:k=1"):
        cached(model(**{**mixture, "lattice_rules": "greedy+margin"}), tmp_path)
    again = cached(model(**mixture), tmp_path)
    again.loglikelihood_rolling(rolling(*TEXTS))
    whole = model(**mixture)
    whole.loglikelihood_rolling(rolling(*TEXTS))
    assert same(told(again)["tasks"]["toy"], told(whole)["tasks"]["toy"])


OWN = """
import dataclasses
from lm_eval_duel import rules
@dataclasses.dataclass(frozen=True)
class Own(rules.Greedy):
    k: int = {k}
"""


def test_own_rules_are_compared_by_their_code(model, tmp_path, monkeypatch):
    (tmp_path / "own_state_rule.py").write_text(OWN.format(k=1))
    monkeypatch.syspath_prepend(tmp_path)
    spec = {"estimator": "oracle", "lattice_rules": "own_state_rule:Own"}
    first = model(**spec, trace=str(tmp_path / "t.jsonl"))
    cached(first, tmp_path).loglikelihood_rolling(rolling("a b c"))
    generating = first.generation_spec, model(estimator="oracle", rule="own_state_rule:Own").generation_spec
    assert "rule_code" not in generating[0] and "rule_code" in generating[1]  # the rule that texts are written by
    with (tmp_path / "own_state_rule.py").open("a") as file:
        file.write("# changed\n")
    with pytest.raises(DuelError, match="lattice_rule_code: this run "):
        cached(model(**spec), tmp_path)
    with pytest.raises(DuelError, match=r"t.jsonl was written under another spec \(lattice_rule_code"):
        model(**spec, trace=str(tmp_path / "t.jsonl"))
    assert rules.parse("own_state_rule:Own").state_only


# ---------------------------------------------------------------- damaged records

DAMAGED = [
    1.5,
    (-1.0, [], True, False),  # no window
    (-1.0, [{"duel": (-2.0, None, 3)}], True, False),  # another sum
    (-1.0, [{}], True, False),
    (-1.0, 5, True, False),
    (),
]


def answers(store):
    """The keys of answers: those of other records begin with a word."""
    return sorted(key for (key,) in store.file.execute("SELECT key FROM unnamed") if " " not in key)


@pytest.mark.parametrize("record", DAMAGED, ids=str)
def test_a_damaged_record_is_dropped_and_scored_again(model, tmp_path, record, caplog):
    first = cached(model(), tmp_path)
    values = first.loglikelihood_rolling(rolling(*TEXTS))
    whole = told(first)["tasks"]["toy"]
    first.dbdict.keep(answers(first.dbdict)[0], record)
    again = cached(model(), tmp_path)
    assert again.loglikelihood_rolling(rolling(*TEXTS)) == close_nats(values)
    assert again.lm.estimator.counts.windows == 1 and same(told(again)["tasks"]["toy"], whole)
    assert "it is dropped and scored again" in caplog.text
    last = cached(model(), tmp_path)
    last.loglikelihood_rolling(rolling(*TEXTS))
    assert last.lm.estimator.counts.windows == 0  # it was written anew


OTHERS = {
    "elbo": {"mc_samples": 8},
    "mixture": {"lattice_rules": "greedy+margin"},
    "sampled_confidence": {"tau": 0.6},
    "two_phase": {"sample": 0.5},
}


@pytest.mark.parametrize("estimator", OTHERS)
def test_windows_of_every_estimator_are_read_again(model, tmp_path, estimator):
    from lm_eval_duel.harness.resume import Unfinished

    lm = cached(model(estimator=estimator, **OTHERS[estimator]), tmp_path)
    unfinished = Unfinished(lm.dbdict, lm.lm.estimator)
    windows = lm.lm.text.windows(ALPHABET)
    scores = lm.lm.estimator.log_prob(windows)
    for window, score in zip(windows, scores, strict=True):
        unfinished.keep(window, score)
    assert unfinished.resume(windows) == dict(enumerate(scores))
    lm.dbdict.keep(unfinished.key(windows[0]), 5)
    assert list(unfinished.resume(windows)) == list(range(1, len(windows)))


def test_a_header_that_is_no_law_is_named(model, tmp_path):
    first = cached(model(), tmp_path)
    first.loglikelihood_rolling(rolling("a"))
    first.dbdict.keep("lm_eval_duel spec", 5.0)
    with pytest.raises(DuelError, match="holds answers of another model"):
        cached(model(), tmp_path)


@pytest.mark.parametrize("place", ["folder", "file/c"])
def test_a_cache_that_cannot_be_made_is_named(model, tmp_path, place):
    (tmp_path / "folder_rank0.db").mkdir()
    (tmp_path / "file").write_text("")
    with pytest.raises(DuelError, match=r"The --use_cache file .*_rank0.db cannot be made: .*Name a path in a folder"):
        CachingLM(model(), str(tmp_path / f"{place}_rank0.db"))


# ---------------------------------------------------------------- evaluations of one model, and a user's own data


def evaluate(folder, data, model, column="text", **options):
    """The shipped YAML of perplexities on a user's own data, which count no tokens."""
    folder.mkdir(exist_ok=True)
    (folder / "data.jsonl").write_text(
        "".join(json.dumps({column: text, "n": n}) + "\n" for n, text in enumerate(data))
    )
    (folder / "own.yaml").write_text(
        f"include: {SHIPPED}\ntask: own\ndoc_to_target: {column}\ndataset_path: json\n"
        f"dataset_kwargs: {{data_files: {{test: {folder / 'data.jsonl'}}}}}\n"
    )
    manager = TaskManager(include_path=str(folder), include_defaults=False)
    return simple_evaluate(model=model, tasks=["own"], task_manager=manager, bootstrap_iters=0, **options)


def test_evaluations_of_one_model_do_not_add_up(model, tmp_path):
    lm = model(estimator="elbo", mc_samples=8)
    first = evaluate(tmp_path / "one", [*TEXTS, ALPHABET], lm)["config"]["duel"]
    lm.generate_until(rolling(("a", {"max_gen_toks": 4, "until": []}), kind="generate_until"))  # of the same one
    assert told(lm)["generated"] and told(lm)["forwards"] > first["forwards"]
    second = evaluate(tmp_path / "two", TEXTS[:2], lm)["config"]["duel"]
    alone = evaluate(tmp_path / "two", TEXTS[:2], model(estimator="elbo", mc_samples=8))["config"]["duel"]
    assert second["tasks"]["own"]["documents"] == 2 and first["tasks"]["own"]["documents"] == 5
    for name in ("windows", "tokens", "forwards", "rows", "empty_requests", "generated", "cut_contexts"):
        assert second[name] == alone[name], name
    assert same(second["tasks"]["own"], alone["tasks"]["own"])


@pytest.mark.parametrize("column", ["text", "content"])
def test_a_users_own_data_need_no_token_counts(model, tmp_path, column):
    lm = model()
    results = evaluate(tmp_path, TEXTS, lm, column, use_cache=str(tmp_path / "c"))
    for found in (results, evaluate(tmp_path, TEXTS, model(), column, use_cache=str(tmp_path / "c"))):  # and again
        table, task = found["results"]["own"], found["config"]["duel"]["tasks"]["own"]
        nats, words = task["values"]["duel"]["log_prob"], sum(len(text.split()) for text in TEXTS)
        assert task["tokens"] == words
        for metric in ("token_perplexity", "word_perplexity"):
            assert table[f"{metric},none"] == pytest.approx(math.exp(-nats / words))


def test_units_that_no_one_counted(caplog):
    metrics._warn_uncounted.cache_clear()
    found = tasks.perplexity({"text": "a b", "words": ["of", "theirs"]}, [-1.0])
    assert found == {"word_perplexity": (-1.0, 2), "byte_perplexity": (-1.0, 3), "bits_per_byte": (-1.0, 3)}
    assert "there is no token_perplexity" in caplog.text
    with pytest.raises(DuelError, match="no column 'text', in which words and bytes are counted; it has content, n"):
        tasks.perplexity({"content": "a b", "n": 3}, [-1.0])


# ---------------------------------------------------------------- numbers that JSON does not have


@pytest.mark.parametrize("spec", [{}, {"estimator": "mixture", "lattice_rules": "greedy"}], ids=["duel", "mixture"])
def test_minus_infinity_is_null_with_a_reason(model, tmp_path, spec):
    lm = model(top_k=1, trace=str(tmp_path / "t.jsonl"), verify=4, **spec)
    values = lm.loglikelihood_rolling(rolling(*TEXTS))
    assert values[0] == -math.inf
    found = told(lm)
    json.dumps(found, allow_nan=False)
    for value in found["tasks"]["toy"]["values"].values():
        assert (value["log_prob"], value["stderr"], value["window_stderr"]) == (None, None, None)
        assert value["reason"] == IMPOSSIBLE
    assert found["verify"]["largest_difference"] == 0
    lines = (tmp_path / "t.jsonl").read_text().splitlines()
    assert all(isinstance(json.loads(line, parse_constant=pytest.fail), dict) for line in lines)
    assert json.loads(lines[1])["log_prob"] is None and json.loads(lines[1])["reason"] == IMPOSSIBLE
    for record, value in zip(trace.read(tmp_path / "t.jsonl"), values, strict=True):
        assert record["log_prob"] == value == next(iter(record["values"].values()))
        order = record if not spec else record["rules"]["greedy:k=1"]
        assert math.fsum(order["token_logprobs"]) == -math.inf and None not in order["confidence"]


# ---------------------------------------------------------------- traces in impossible places


def test_a_trace_makes_one_folder_at_most(model, tmp_path):
    far = tmp_path / "no" / "such"
    with pytest.raises(DuelError, match=rf"The trace {far}/t.jsonl cannot be written: .*{far}"):
        DuelMDM(pretrained="/no/such/folder", trace=str(far / "t.jsonl"))  # before the checkpoint is read
    assert not (tmp_path / "no").exists()
    model(trace=str(tmp_path / "new" / "t.jsonl"))
    assert trace.spec(tmp_path / "new" / "t.jsonl")


def test_a_trace_is_a_file_of_its_own(tmp_path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "binary").write_bytes(b"\x89PNG\r\n\x1a\n\xff\xfe" * 9)
    for name, message in (
        ("folder", r"The trace .*folder cannot be written: .*Name a file"),
        ("binary", r"binary is not a trace: its first line has no spec"),
        ("binary/t.jsonl", r"The trace .*binary/t.jsonl cannot be written: "),
    ):
        with pytest.raises(DuelError, match=message):
            DuelMDM(pretrained="/no/such/folder", trace=str(tmp_path / name))
    with pytest.raises(DuelError, match=r"The trace /proc/no/t.jsonl cannot be written"):
        trace.Writer("/proc/no/t.jsonl")
    assert (tmp_path / "binary").read_bytes()[:4] == b"\x89PNG"


@pytest.mark.parametrize("line", [b"5\n", b'{"task": "\xff"}\n', b"{\n"])
def test_a_damaged_line_of_a_trace_is_named(tmp_path, line):
    path = tmp_path / "t.jsonl"
    trace.Writer(path).begin({"fingerprint": "abc"})
    with path.open("ab") as file:
        file.write(line)
    with pytest.raises(DuelError, match="line 2 is not a window of a trace"):
        trace.read(path)
