"""What a request adds to the results is counted by the evaluation that asks it: computed, or from a cache."""

import json
import math
from pathlib import Path

import pytest
from close import close_nats
from harness_requests import ask, cached
from lm_eval import simple_evaluate
from lm_eval.tasks import TaskManager

from lm_eval_duel import tasks
from lm_eval_duel.estimators.totals import Total
from lm_eval_duel.harness.stats import RunStats
from lm_eval_duel.harness.store import Answers
from lm_eval_duel.results import trace
from lm_eval_duel.results.trace import IMPOSSIBLE

TEXTS = ["a b c", "d e", "a b c", "f g h i j"]
ALPHABET = " ".join("abcdefghijklmnopqrstuvwxyz")
SHIPPED = Path(tasks.task_folder()) / "sotu" / "_perplexity.yaml"


def rolling(*texts):
    return ask("loglikelihood_rolling", *[(text,) for text in texts])


def results_of(model):
    return model.get_model_info()["duel"]


def require_same(account, expected):
    """Assert that two accounts of a task agree, figures up to float noise."""
    assert {**account, "values": None} == {**expected, "values": None}
    assert account["values"].keys() == expected["values"].keys()
    for name, figures in expected["values"].items():
        assert account["values"][name].keys() == figures.keys()
        for key, figure in figures.items():
            close = figure if figure is None else pytest.approx(figure, abs=1e-4)
            assert account["values"][name][key] == close, (name, key)


# ---------------------------------------------------------------- answers of a cache belong to the run that asks


def test_cut_contexts_and_merged_borders_are_those_of_this_run(model, tmp_path):
    asked = ask("loglikelihood", (ALPHABET, " a b"), (ALPHABET, " c"), ("a", "b"), ("a", " b"))
    whole = model()
    values = whole.loglikelihood(asked)
    assert results_of(whole)["cut_contexts"] == {"toy": 2}
    assert results_of(whole)["merged_borders"] == 1

    cached(model(), tmp_path).loglikelihood(asked)
    for first, cut_contexts in ((0, 2), (1, 1)):
        again = cached(model(), tmp_path)
        assert again.loglikelihood(asked[first:]) == values[first:]
        assert again.lm.estimator.counts.windows == 0
        assert results_of(again)["cut_contexts"] == {"toy": cut_contexts}
        assert results_of(again)["merged_borders"] == 1


# ---------------------------------------------------------------- damaged records

DAMAGED = {  # of a record (log_prob, scores of windows)
    "no record": lambda record: 1.5,
    "no window": lambda record: (record[0], [], *record[2:]),
    "another sum": lambda record: (record[0] + 1, *record[1:]),
}


def answers(store):
    """The keys of answers: those of other records begin with a word."""
    keys = [key for (key,) in store.file.execute("SELECT key FROM unnamed")]
    return sorted(key for key in keys if " " not in key)


@pytest.mark.parametrize("damage", DAMAGED)
def test_a_damaged_record_is_dropped_and_scored_again(model, tmp_path, damage, caplog):
    first = cached(model(), tmp_path)
    values = first.loglikelihood_rolling(rolling(*TEXTS))
    whole = results_of(first)["tasks"]["toy"]
    key, *_ = answers(first.dbdict)
    first.dbdict.keep(key, DAMAGED[damage](first.dbdict.find(key, tuple)))

    again = cached(model(), tmp_path)
    assert again.loglikelihood_rolling(rolling(*TEXTS)) == close_nats(values)
    assert again.lm.estimator.counts.windows == 1
    require_same(results_of(again)["tasks"]["toy"], whole)
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
    lm = cached(model(estimator=estimator, **OTHERS[estimator]), tmp_path)
    windows = lm.lm.text.windows(ALPHABET)
    answers = Answers(lm.dbdict, lm.lm.estimator, "loglikelihood_rolling", rolling(ALPHABET), [windows])
    scores = dict(zip(windows, lm.lm.estimator.log_prob(windows), strict=True))
    for window, score in scores.items():
        answers.keep(window, score)
    assert answers.kept([0]) == scores
    for damaged in (5, ("Score", {"kind": "NONE"}), ("Score", {"of": 1}), ("TwoPhaseBlocks", {}), ("x", "y")):
        lm.dbdict.keep(answers.key(windows[0]), damaged)
        assert answers.kept([0]).keys() == {*windows[1:]}


# ---------------------------------------------------------------- evaluations of one model, and a user's own data


def evaluate(folder, data, model, column="text", **options):
    """The shipped YAML of perplexities on a user's own data, which count no tokens."""
    folder.mkdir(exist_ok=True)
    lines = [json.dumps({column: text, "n": n}) for n, text in enumerate(data)]
    (folder / "data.jsonl").write_text("\n".join(lines) + "\n")
    (folder / "own.yaml").write_text(
        f"include: {SHIPPED}\ntask: own\ndoc_to_target: {column}\ndataset_path: json\n"
        f"dataset_kwargs: {{data_files: {{test: {folder / 'data.jsonl'}}}}}\n"
    )
    manager = TaskManager(include_path=str(folder), include_defaults=False)
    return simple_evaluate(model=model, tasks=["own"], task_manager=manager, bootstrap_iters=0, **options)


def test_evaluations_of_one_model_do_not_add_up(model, tmp_path):
    lm = model(estimator="elbo", mc_samples=8)
    first = evaluate(tmp_path / "one", [*TEXTS, ALPHABET], lm)["config"]["duel"]
    lm.generate_until(ask("generate_until", ("a", {"max_gen_toks": 4, "until": []})))  # of the same one
    assert results_of(lm)["generated"]
    assert results_of(lm)["forwards"] > first["forwards"]

    second = evaluate(tmp_path / "two", TEXTS[:2], lm)["config"]["duel"]
    alone = evaluate(tmp_path / "two", TEXTS[:2], model(estimator="elbo", mc_samples=8))["config"]["duel"]
    assert first["tasks"]["own"]["documents"] == 5
    assert second["tasks"]["own"]["documents"] == 2
    for name in ("windows", "tokens", "forwards", "rows", "empty_requests", "generated", "cut_contexts"):
        assert second[name] == alone[name], name
    require_same(second["tasks"]["own"], alone["tasks"]["own"])


@pytest.mark.parametrize("column", ["text", "content"])
def test_a_users_own_data_need_no_token_counts(model, tmp_path, column):
    words = sum(len(text.split()) for text in TEXTS)
    for _ in ("computed", "from the cache"):
        results = evaluate(tmp_path, TEXTS, model(), column, use_cache=str(tmp_path / "c"))
        table = results["results"]["own"]
        task = results["config"]["duel"]["tasks"]["own"]
        nats = task["values"]["duel"]["log_prob"]
        assert task["tokens"] == words
        for metric in ("token_perplexity", "word_perplexity"):
            assert table[f"{metric},none"] == pytest.approx(math.exp(-nats / words))


# ---------------------------------------------------------------- numbers that JSON does not have


def test_the_error_over_windows_by_hand(model):
    """That of a ratio of two sums, nats and tokens, times the tokens."""
    lm = model()
    tokens = [3, 2, 3, 5]
    nats = lm.loglikelihood_rolling(rolling(*TEXTS))
    rate = sum(nats) / sum(tokens)
    squares = 0.0
    for value, count in zip(nats, tokens, strict=True):
        squares += (value - rate * count) ** 2
    figures = results_of(lm)["tasks"]["toy"]["values"]["duel"]
    assert figures["window_stderr"] == pytest.approx(math.sqrt(4 / 3 * squares))


@pytest.mark.parametrize("spec", [{}, {"estimator": "mixture", "lattice_rules": "greedy"}], ids=["duel", "mixture"])
def test_minus_infinity_is_null_with_a_reason(model, tmp_path, spec):
    lm = model(top_k=1, trace=str(tmp_path / "t.jsonl"), verify=4, **spec)
    values = lm.loglikelihood_rolling(rolling(*TEXTS))
    assert values[0] == -math.inf
    results = results_of(lm)
    json.dumps(results, allow_nan=False)
    for value in results["tasks"]["toy"]["values"].values():
        assert value["log_prob"] is None
        assert value["stderr"] is None
        assert value["window_stderr"] is None
        assert value["reason"] == IMPOSSIBLE
    assert results["verify"]["largest_difference"] == 0

    lines = []
    for line in (tmp_path / "t.jsonl").read_text().splitlines():
        lines.append(json.loads(line, parse_constant=pytest.fail))
    assert lines[1]["log_prob"] is None
    assert lines[1]["reason"] == IMPOSSIBLE
    for record, value in zip(trace.read(tmp_path / "t.jsonl"), values, strict=True):
        assert record["log_prob"] == value
        assert next(iter(record["values"].values())) == value
        order = record if not spec else record["rules"]["greedy:k=1"]
        assert math.fsum(order["token_logprobs"]) == -math.inf
        assert None not in order["confidence"]


def test_documents_with_near_ties_are_listed():
    stats = RunStats()
    assert stats.near_ties == ""
    for task, near_ties in (("a", {7, 2}), ("b", set()), ("c", set(range(30)))):
        for document in range(40):
            stats.add_request(task, document, Total(near_ties=int(document in near_ties)))
    assert "32 documents" in stats.near_ties
    assert "a 2, a 7, c 0, c 1, " in stats.near_ties
    assert "c 17 and 12 more" in stats.near_ties
    assert "c 18" not in stats.near_ties

    few = RunStats()
    few.add_request("a", 1, Total(near_ties=3))
    assert "1 document" in few.near_ties
    assert "more" not in few.near_ties


@pytest.mark.parametrize(("estimator", "labelled"), [("duel", False), ("mixture", False), ("oracle", True)])
def test_what_is_no_likelihood_is_labelled_beside_the_results(model, estimator, labelled):
    scored = model(estimator=estimator, block=2)
    scored.loglikelihood_rolling(rolling(*TEXTS))
    assert bool(results_of(scored)["errors"]) == labelled
