"""SharedScore processes: the same numbers as one, balanced, and no rank that waits for ever."""

import json
import re
from types import SimpleNamespace

import pytest
import tiny
from harness_requests import text_log_prob
from harness_runs import ACCELERATE, TORCHRUN, evaluate, launch, write_task
from lm_eval.api.task import Task

from lm_eval_duel.errors import DuelError
from lm_eval_duel.harness import patches, trace
from lm_eval_duel.harness.distributed import Ranks
from lm_eval_duel.harness.lm import DuelMDM
from lm_eval_duel.harness.requests import Batch
from lm_eval_duel.harness.run_stats import RunStats, Share
from lm_eval_duel.harness.totals import TaskTotal
from lm_eval_duel.harness.versions import request as make_request

# ------------------------------------------------------------ requests that fill up a rank


def request(repeats=1, doc=0):
    return make_request("loglikelihood_rolling", {}, ("a b",), "toy", doc, repeats)


def test_requests_that_fill_up_a_rank_are_not_asked():
    one, three = request(doc=0), request(repeats=3, doc=1)
    batch = Batch.from_requests([one, three, three, three, *[three] * 3, *[three] * 3])
    assert batch.requests == [one, three, three, three]
    assert batch.repeats == [0, 0, 1, 2]
    assert batch.spread("abcd") == ["a", "b", "c", "d", *"d" * 6]


def test_a_task_of_two_groups_is_scored_once():
    """lm-eval 0.5 builds its requests twice; a text of another document or task is scored for itself."""
    one, same, other = request(repeats=2), request(repeats=2), request(repeats=2, doc=1)
    batch = Batch.from_requests([one, one, same, same, other, other, other])
    assert batch.requests == [one, one, other, other] and batch.repeats == [0, 1, 0, 1]
    assert batch.spread("abcd") == ["a", "b", "a", "b", "c", "d", "d"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny.checkpoint(tmp_path_factory.mktemp("bert"), "bert", length=16)


def test_they_cost_nothing_and_are_in_no_trace(folder, tmp_path):
    last = request(doc=1)
    drawn = make_request(
        "generate_until", {}, ("a", {"do_sample": True, "temperature": 1.0, "max_gen_toks": 4}), "t", 0, 1
    )
    costs = []
    for extra in (0, 3):
        lm = DuelMDM(pretrained=folder, block=4, device="cpu", trace=str(tmp_path / f"{extra}.jsonl"))
        values = lm.loglikelihood_rolling([request(), last, *[last] * extra])
        assert len(values) == 2 + extra and len(set(values[1:])) == 1
        texts = lm.generate_until([drawn, *[drawn] * extra])
        assert len(texts) == 1 + extra and len(set(texts)) == 1
        costs.append({**lm.get_model_info()["duel"], "seconds": 0, "trace": ""})
    for cost in costs:
        for name in ("tokens_per_second", "peak_memory_bytes", "balance"):
            cost.pop(name)
    assert costs[0] == costs[1]
    assert len(trace.read(tmp_path / "0.jsonl")) == len(trace.read(tmp_path / "3.jsonl")) == 3


# ------------------------------------------------------------ balance, and ranks that do not answer


def test_the_log_shows_the_balance():
    stats = RunStats(ranks=0)
    for rows, tokens, seconds in ((100, 1000, 4.0), (50, 500, 2.0), (0, 0, 0.0)):
        stats.merge(RunStats(shares=[Share(rows, tokens, seconds)]))
    assert stats.balance == (
        "balance of 3 ranks: rows 100 50 0 (max/mean 2.00), tokens 1,000 500 0 (max/mean 2.00), "
        "seconds 4 2 0 (max/mean 2.00)"
    )


def test_documents_with_near_ties_are_listed():
    stats = RunStats()
    assert stats.near_ties == ""
    for task, near_ties in (("a", {7, 2}), ("b", set()), ("c", set(range(30)))):
        stats.merge(RunStats(tasks={task: TaskTotal(documents=set(range(99)), near_ties=near_ties)}))
    assert stats.near_ties.startswith(
        "32 documents have near ties, whose order float noise could change: a 2, a 7, c 0, c 1, "
    )
    assert stats.near_ties.endswith("c 17 and 12 more (config.duel.tasks)")


def test_a_rank_that_has_ended_is_named_as_the_cause():
    message = r"Rank 1 of 2 waited .* look for that rank's error, which is the cause.*Connection closed"
    with pytest.raises(DuelError, match=message):  # noqa: SIM117
        with Ranks("cpu", 1, 2).waiting():
            raise RuntimeError("Connection closed by peer\nand a stack")


def test_a_process_that_finds_no_others_says_so(monkeypatch):
    import accelerate

    def alone(**options):
        raise RuntimeError("The client socket has timed out\nand a stack")

    monkeypatch.setattr(accelerate, "Accelerator", alone)
    for name, value in {"WORLD_SIZE": "4", "RANK": "3", "MASTER_ADDR": "node0", "MASTER_PORT": "29500"}.items():
        monkeypatch.setenv(name, value)
    message = (
        r"\(RANK=3\) could not join the other 3 at node0:29500: are all machines up.*The client socket has timed out\)"
    )
    with pytest.raises(DuelError, match=message):
        Ranks.join("cpu")


@pytest.mark.parametrize(
    ("more", "refused"),
    [({}, False), ({"limit": 2}, False), ({"limit": 1}, True), ({"samples": [3]}, True), ({"samples": [0, 1]}, False)],
)
def test_every_rank_refuses_a_task_with_too_few_documents(more, refused, monkeypatch):
    built = []
    monkeypatch.setattr(Task, "build_all_requests", lambda self, **options: built.append(options))
    patches.apply()
    task = SimpleNamespace(config=SimpleNamespace(task="toy"), eval_docs=[{}] * 5)
    for rank in (0, 1):
        if refused:
            with pytest.raises(DuelError, match=r"Task toy has 1 document here and this run has 2 processes"):
                Task.build_all_requests(task, rank=rank, world_size=2, **more)
        else:
            Task.build_all_requests(task, rank=rank, world_size=2, **more)
    assert len(built) == (0 if refused else 2)


# ------------------------------------------------------------ the real launchers


@pytest.mark.slow
@pytest.mark.parametrize("launcher", [TORCHRUN, ACCELERATE], ids=["torchrun", "accelerate"])
def test_one_document_on_two_ranks_ends_both(launcher):
    arguments = ("lm_eval", "--model", "duel-mdm", "--tasks", "task_configs/sotu/sotu.yaml", "--limit", "1")
    (status,), said = launch(launcher, 2, *arguments, "--device", "cpu")
    assert status != 0
    message = "Task sotu has 1 document here and this run has 2 processes: each needs at least one. Start at most 1"
    assert said.count(f"lm_eval: {message}") == 2  # on both ranks


@pytest.mark.slow
def test_a_rank_that_fails_ends_the_other_machine(tmp_path):
    """Its launcher knows nothing of it; its own process does."""
    file = write_task(tmp_path, "broken", ("My fellow Americans", "a <|mask|> of it"))
    arguments = ("lm_eval", "--model", "duel-mdm", "--tasks", file, "--device", "cpu")
    status, said = launch(TORCHRUN, 2, *arguments, machines=2)
    assert 0 not in status, said[-3000:]
    assert "lm_eval: Request of task broken, document 1: the text holds the mask token" in said
    assert "lm_eval: Rank 0 of 2 waited for the other ranks, and one of them has ended" in said


@pytest.mark.slow
def test_two_ranks_have_the_sums_of_a_beam_that_one_has(tmp_path):
    """Also where each of them has one of two equal documents, whose errors are one error."""
    file = write_task(tmp_path, "few", ("My fellow Americans, good evening.", "The state of the union.") * 2)
    model = "estimator=sampled_confidence,block=8,beam=16,dtype=float64"
    one = evaluate("few", f"{model},max_batch_size=1", folders=[str(tmp_path)])["config"]["duel"]
    arguments = ("lm_eval", "--model", "duel-mdm", "--tasks", file, "--device", "cpu", "--model_args", model)
    (status,), said = launch(TORCHRUN, 2, *arguments, "--output_path", str(tmp_path / "two"))
    assert status == 0, said[-3000:]
    (path,) = (tmp_path / "two").glob("**/results_*.json")
    ours, theirs = (
        run["tasks"]["few"]["values"]["sampled_confidence"]
        for run in (one, json.loads(path.read_text())["config"]["duel"])
    )
    assert theirs["beam"] == pytest.approx(ours["beam"], abs=1e-9) and ours["beam"]["estimate_stderr"] > 0
    assert theirs["log_prob"] == pytest.approx(ours["log_prob"], abs=1e-9)
    assert theirs["stderr"] == pytest.approx(ours["stderr"], abs=1e-9)


@pytest.mark.slow
def test_three_ranks_print_what_one_prints_and_each_goes_on_from_two(tmp_path):
    """In float64, where every document must agree; and answers of two ranks, on two machines, are found by three."""
    arguments = ("lm_eval", "--model", "duel-mdm", "--tasks", "task_configs/sotu/sotu.yaml", "--device", "cpu")
    arguments += ("--log_samples", "--limit", "7")
    alone = f"rule=greedy,block=32,dtype=float64,max_batch_size=1,trace={tmp_path / 'one'}.jsonl"
    whole, found = evaluate("sotu", alone, limit=7), {}
    values = {int(line["doc_id"]): text_log_prob(line) for line in whole["samples"]["sotu"]}
    for name, launcher, count, machines, cache in (
        ("two", TORCHRUN, 2, 2, "c"),
        ("three", ACCELERATE, 3, 1, None),
        ("again", ACCELERATE, 3, 1, "c"),
    ):
        model = f"rule=greedy,block=32,dtype=float64,max_batch_size={count},trace={tmp_path / name}.jsonl"
        more = ("--use_cache", str(tmp_path / cache)) if cache else ()
        options = (*arguments, "--model_args", model, "--output_path", str(tmp_path / name), *more)
        status, said = launch(launcher, count, *options, machines=machines)
        assert status == [0] * machines, said[-3000:]
        (path,) = (tmp_path / name).glob("**/results_*.json")
        (samples,) = (tmp_path / name).glob("**/samples_*.jsonl")
        lines = map(json.loads, samples.read_text().splitlines())
        found[name] = json.loads(path.read_text()), {int(line["doc_id"]): text_log_prob(line) for line in lines}
        assert re.search(rf"balance of {count} ranks: rows [\d, ]+\(max/mean \d", said)
    windows = trace.read(tmp_path / "one.jsonl")
    for name, (results, documents) in found.items():
        assert {doc: float(value) for doc, value in documents.items()} == pytest.approx(
            {doc: float(value) for doc, value in values.items()}, abs=1e-9
        ), name
        token = "token_perplexity,none"
        assert results["results"]["sotu"][token] == pytest.approx(whole["results"]["sotu"][token], rel=1e-12)
        cost, one = results["config"]["duel"], whole["config"]["duel"]
        if name == "again":
            assert cost["rows"] == cost["windows"] == 0
            continue
        for figure in ("windows", "tokens", "nfe", "near_ties", "all_mask_starts"):
            assert cost[figure] == one[figure], (name, figure)
        assert sum(cost["balance"]["rows"]["ranks"]) == cost["rows"]
        assert abs(cost["rows"] - one["rows"]) <= one["all_mask_starts"]  # rows of masks alone, equal in one call
        lines = trace.read(tmp_path / f"{name}.jsonl")
        steps = [[(line["doc"], line["reveal_steps"]) for line in part] for part in (lines, windows)]
        assert steps[0] == steps[1]
