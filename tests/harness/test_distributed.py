"""Several processes: the same numbers as one, balanced, and no rank that waits for ever."""

import itertools
import re
from types import SimpleNamespace

import pytest
from harness_requests import text_log_prob
from harness_runs import ACCELERATE, TORCHRUN, evaluate, launch, read, write_task
from lm_eval.api.task import ConfigurableTask, Task

from lm_eval_duel.errors import DuelError
from lm_eval_duel.harness import patches
from lm_eval_duel.harness.distributed import Ranks
from lm_eval_duel.harness.lm import DuelMDM
from lm_eval_duel.harness.requests import Batch, make_request
from lm_eval_duel.results import trace

# ------------------------------------------------------------ dealing


@pytest.mark.parametrize("ranks", [1, 3, 8])
@pytest.mark.parametrize("costs", [[], [0, 0, 5], [9, 1, 1, 1, 1, 1, 1, 1], list(range(100))])
def test_every_item_goes_to_one_rank_and_the_work_is_balanced(ranks, costs):
    shares = [Ranks("cpu", rank, ranks).deal(costs) for rank in range(ranks)]

    assert sorted(itertools.chain(*shares)) == list(range(len(costs)))
    work = []
    before_last = []
    for share in shares:
        assert share == sorted(share)
        costs_of_share = [costs[n] for n in share]
        work.append(sum(costs_of_share))
        before_last.append(sum(costs_of_share) - min(costs_of_share, default=0))  # the cheapest item is dealt last
    assert max(before_last) <= min(work), "a rank got its last item when it had the least work"


# ------------------------------------------------------------ requests that fill up a rank


def request(repeats=1, doc=0):
    return make_request("loglikelihood_rolling", {}, ("a b",), "toy", doc, repeats)


def test_requests_that_fill_up_a_rank_are_not_asked():
    one = request(doc=0)
    three = request(repeats=3, doc=1)
    batch = Batch.from_requests([one, three, three, three, *[three] * 3, *[three] * 3])
    assert batch.requests == [one, three, three, three]
    assert batch.repeats == [0, 0, 1, 2]
    assert batch.spread("abcd") == ["a", "b", "c", "d", *"d" * 6]


def test_they_cost_nothing_and_are_in_no_trace(folder, tmp_path):
    settings = {"do_sample": True, "temperature": 1.0, "max_gen_toks": 4}
    drawn = make_request("generate_until", {}, ("a", settings), "t", 0, 1)
    last = request(doc=1)
    costs = []
    for extra in (0, 3):
        lm = DuelMDM(pretrained=folder, block=4, device="cpu", trace=str(tmp_path / f"{extra}.jsonl"))
        _, *copies = lm.loglikelihood_rolling([request(), *[last] * (1 + extra)])
        assert copies == [copies[0]] * (1 + extra)
        texts = lm.generate_until([drawn] * (1 + extra))
        assert texts == [texts[0]] * (1 + extra)
        assert len(trace.read(tmp_path / f"{extra}.jsonl")) == 3
        costs.append(lm.get_model_info()["duel"])

    without, with_copies = costs
    for name in ("rows", "forwards", "windows", "tokens", "empty_requests", "tasks"):
        assert with_copies[name] == without[name]


@pytest.mark.parametrize("kind", [Task, ConfigurableTask])
def test_answers_to_copies_are_not_counted_as_repeats(kind, monkeypatch):
    """With `repeats`, the harness fills up a rank with `repeats` copies of its last request a missing document."""
    monkeypatch.setattr(kind, "apply_filters", lambda task: [list(request.resps) for request in task.instances])
    patches.apply()
    one = request(repeats=3, doc=0)
    two = request(repeats=3, doc=1)
    asked = [*[one] * 3, *[two] * 3, *[two] * 3]
    answers = Batch.from_requests(asked).spread("abcdef")
    for asking, answer in zip(asked, answers, strict=True):
        asking.resps.append(answer)
    assert kind.apply_filters(SimpleNamespace(instances=[one, two])) == [["a", "b", "c"], ["d", "e", "f"]]


# ------------------------------------------------------------ balance, and ranks that do not answer


def test_a_rank_that_has_ended_is_named_as_the_cause():
    message = r"Rank 1 of 2 waited .* look for that rank's error, which is the cause.*Connection closed"
    with pytest.raises(DuelError, match=message):  # noqa: SIM117
        with Ranks("cpu", 1, 2).waiting():
            raise RuntimeError("Connection closed by peer\nand a stack")


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
def test_a_rank_that_fails_ends_the_other_machine(tmp_path):
    """Its launcher knows nothing of it; its own process does."""
    file = write_task(tmp_path, "broken", ("My fellow Americans", "a <|mask|> of it"))
    arguments = ("lm_eval", "--model", "duel-mdm", "--tasks", file, "--device", "cpu")
    status, said = launch(TORCHRUN, 2, *arguments, machines=2)
    assert 0 not in status, said[-3000:]
    assert "lm_eval: Document 1 of task broken: the text holds the mask token" in said
    assert "lm_eval: Rank 0 of 2 waited for the other ranks, and one of them has ended" in said


@pytest.mark.slow
def test_ranks_print_what_one_prints_and_three_go_on_from_two(tmp_path):
    """In float64, where every document must agree: two ranks on two machines, then three, which find their answers."""
    texts = ("We the people", "My fellow Americans", "Peace", "The union is strong tonight", "God bless you all")
    file = write_task(tmp_path, "few", texts)
    model = "rule=greedy,block=4,dtype=float64"
    whole = evaluate("few", f"{model},trace={tmp_path}/one.jsonl", folders=[str(tmp_path)])
    steps = {line["doc"]: line["reveal_steps"] for line in trace.read(tmp_path / "one.jsonl")}
    values = {int(line["doc_id"]): text_log_prob(line) for line in whole["samples"]["few"]}
    ours = ("lm_eval_duel", "run")
    lm_evals = ("lm_eval", "--model", "duel-mdm")
    shared = ("--tasks", file, "--device", "cpu", "--log_samples", "--use_cache", str(tmp_path / "c"))
    launches = ((TORCHRUN, ours, 2, 2, 2, 2), (ACCELERATE, lm_evals, 3, 1, 5, 3))
    for launcher, command, count, machines, limit, windows in launches:
        arguments = (*command, *shared)
        out = tmp_path / str(count)
        options = ("--limit", str(limit), "--model_args", f"{model},trace={out}.jsonl", "--output_path", str(out))
        status, said = launch(launcher, count, *arguments, *options, machines=machines)
        assert status == [0] * machines, said[-3000:]
        assert re.search(rf"balance of {count} ranks: rows [\d, ]+\(max/mean \d", said)
        results, samples = read(out, "few")
        assert len(samples) == limit
        for line in samples:
            assert text_log_prob(line) == pytest.approx(values[int(line["doc_id"])], abs=1e-9)
        cost = results["config"]["duel"]
        assert cost["ranks"] == count
        assert cost["windows"] == windows, "three were not in the cache"
        assert sum(cost["balance"]["rows"]["ranks"]) == cost["rows"]
        for line in trace.read(f"{out}.jsonl"):
            assert line["reveal_steps"] == steps[line["doc"]]
    metric = "word_perplexity,none"
    assert results["results"]["few"][metric] == pytest.approx(whole["results"]["few"][metric], rel=1e-12)

    of_ranks = results["config"]["duel"]["tasks"]["few"]
    value_of_ranks = of_ranks.pop("values")["duel"]
    of_one = whole["config"]["duel"]["tasks"]["few"]
    value_of_one = of_one.pop("values")["duel"]
    assert of_ranks == of_one
    assert value_of_ranks["log_prob"] == pytest.approx(value_of_one["log_prob"], abs=1e-9)
