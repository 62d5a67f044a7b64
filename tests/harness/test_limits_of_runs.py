"""Counts, divisors and limits of the harness side, each by a second, literal way. No network is loaded."""

import logging
import math
import resource
import sqlite3
import sys
from types import SimpleNamespace

import pytest
import torch
from scipy.special import stdtrit

from lm_eval_duel.core.scores import Counts, Kind, Score
from lm_eval_duel.core.windows import Window
from lm_eval_duel.errors import DuelError
from lm_eval_duel.estimators.totals import Total
from lm_eval_duel.harness import generation, patches, progress, stats
from lm_eval_duel.harness.distributed import Ranks
from lm_eval_duel.harness.progress import Progress, RunningEstimate, estimate
from lm_eval_duel.harness.requests import Batch, make_request, random_order
from lm_eval_duel.harness.scoring import Evaluation
from lm_eval_duel.harness.stats import RunStats, Share, TaskStats
from lm_eval_duel.harness.store import ResponseCache

COUNTS = {"windows": 4, "tokens": 40, "nfe": 20}


def total(nats, tokens, near_ties=0, name="duel", **more):
    """The total of one window, or of a request without any."""
    if not tokens:
        return Total()
    return Total.from_score(Window((), (1,) * tokens), Score(nats, near_ties=near_ties, **more), name)


# ---------------------------------------------------------------- statistics of a run


REQUESTS = [  # (document, total, unknown tokens): two requests of one document, an empty one, near ties
    (0, total(-30.0, 10, 2), 1),
    (0, total(-12.0, 3), 2),
    (1, total(0.0, 0), 0),
    (3, total(-8.0, 4), 0),
    (2, total(-7.0, 4, 1), 3),
]


def test_a_task_on_three_ranks_is_what_one_has():
    whole = RunStats(counts=dict(COUNTS))
    for request in REQUESTS:
        whole.add_request("t", *request)
    merged = RunStats(ranks=0)
    for rank in range(3):
        part = RunStats(counts=dict.fromkeys(COUNTS, 0))
        for request in REQUESTS[rank::3]:
            part.add_request("t", *request)
        merged.merge(part)
    expected = {
        "documents": 4,
        "near_tie_documents": [0, 2],
        "requests": 5,
        "windows": 4,
        "tokens": 21,
        "longest_document": 10,
        "unk_tokens": 6,
        "unk_documents": {"0": 3, "2": 3},
    }
    for run in (whole, merged):
        entry = run.tasks["t"].describe()
        value = entry.pop("values")["duel"]
        assert entry == expected
        assert value["log_prob"] == -57.0
        assert value["windows"] == 4
        assert run.counts["empty_requests"] == 1
    assert merged.ranks == 3


def test_what_ranks_have_in_common_is_summed_or_the_largest():
    one = RunStats(seconds=2.0, peak_memory=7, shares=[Share(6, 30, 2.0)], counts={"nfe": 5, "rows": 3})
    other = RunStats(seconds=3.0, peak_memory=5, shares=[Share(2, 10, 3.0)], counts={"nfe": None, "rows": 4})
    one.phases = {"cached": {"rows": 4, "seconds": 1.0}}
    other.phases = {"cached": {"rows": 5, "seconds": 0.5}, "uncached": {"rows": 1, "seconds": 0.25}}
    one.generated.add("b")
    other.generated.add("a")
    for first, second in ((one, other), (other, one)):
        merged = RunStats(ranks=0)
        merged.merge(first)
        merged.merge(second)
        assert merged.ranks == 2
        assert merged.seconds == 3.0  # ranks run at the same time
        assert merged.peak_memory == 7
        assert merged.counts == {"nfe": None, "rows": 7}
        assert merged.phases == {"cached": {"rows": 9, "seconds": 1.5}, "uncached": {"rows": 1, "seconds": 0.25}}
        assert merged.generated == {"a", "b"}


def test_the_entries_of_a_run():
    run = RunStats(counts=dict(COUNTS), seconds=8.0, peak_memory=100, shares=[Share(6, 30, 8.0), Share(3, 10, 4.0)])
    run.tasks = {"a": TaskStats(longest=5), "b": TaskStats(longest=9), "c": TaskStats(longest=2)}
    run.generated = {"b", "a"}

    entries = run.describe()

    assert entries["mean_nfe"] == 5.0
    assert entries["tokens_per_second"] == 5.0
    assert entries["longest_document"] == 9
    assert entries["generated"] == ["a", "b"]
    assert list(entries["tasks"]) == ["a", "b", "c"]
    assert entries["balance"] == {
        "rows": {"ranks": [6, 3], "max_over_mean": pytest.approx(6 / 4.5)},
        "tokens": {"ranks": [30, 10], "max_over_mean": pytest.approx(1.5)},
        "seconds": {"ranks": [8.0, 4.0], "max_over_mean": pytest.approx(8 / 6)},
    }
    assert entries["verify"] is None
    assert "verify_failed" not in entries
    assert "phases" not in entries
    for changed in ({"windows": 0}, {"nfe": None}):
        assert RunStats(counts=COUNTS | changed).describe()["mean_nfe"] is None
    assert RunStats(counts=dict(COUNTS)).describe()["tokens_per_second"] is None
    assert stats.balance([Share(0, 0, 0.0)])["rows"] == {"ranks": [0], "max_over_mean": None}


@pytest.mark.parametrize(("count", "more"), [(1, ""), (20, ""), (21, " and 1 more"), (45, " and 25 more")])
def test_twenty_documents_with_near_ties_are_listed(count, more):
    run = RunStats()
    for document in reversed(range(count)):
        run.add_request("t", document, Total(near_ties=1))

    documents = "1 document" if count == 1 else f"{count} documents"
    names = ", ".join(f"t {document}" for document in range(min(count, 20)))
    assert f"in {documents}: {names}{more}" in run.near_ties
    assert ("more" in run.near_ties) is bool(more)


def test_lines_of_the_log():
    """Balance for several ranks alone; values that are no plain likelihood; what differed when it was repeated."""
    one = RunStats(shares=[Share(6, 30, 2.0)], counts={"rows_differing": 0, "rows_checked": 9})
    one.add_request("t", 0, total(-30.0, 10))
    assert one.log_lines() == []
    assert one.warnings() == []

    others = {
        "oracle": Score(-20.0, kind=Kind.NOT_A_LIKELIHOOD),
        "elbo_exact": Score(-40.0, kind=Kind.UPPER_BOUND),
    }
    own = total(-25.0, 10, name="mixture", others=others)
    run = RunStats(ranks=2, shares=[Share(1600, 30, 2.0), Share(800, 10, 4.4)])
    run.add_request("t", 0, own, unknown=3)
    run.counts |= {"rows_differing": 2, "rows_checked": 9}
    [balance] = run.log_lines()
    for part in ("2 ranks", "rows 1,600 800 (max/mean 1.33)", "tokens 30 10 (max/mean 1.50)", "(max/mean 1.38)"):
        assert part in balance, part
    rows, unknown = run.warnings()
    assert rows.startswith("2 of 9 rows")
    assert "3 of 10 tokens (30.0%)" in unknown

    # the run's own value is told, another value of it only if it is drawn
    assert run.errors() == []
    value = total(-25.0, 10, name="oracle", kind=Kind.ESTIMATE)
    estimated = RunStats()
    estimated.add_request("t", 0, value)
    assert len(estimated.errors()) == 1

    # the sum over the options of questions, on whichever rank, is the value of no text
    for option in (0, 1):
        other_rank = RunStats()
        other_rank.add_request("t", 1, value, option=option)
        estimated.merge(other_rank)
        assert bool(estimated.errors()) == (option == 0)


# Four tokens, equally often, over a vocabulary of 8: each is a quarter of all others, nearly.
QUARTERS = (5, 6, 7, 1) * 250


def of_perplexity(perplexity, target=QUARTERS, kind=Kind.LIKELIHOOD, known=()):
    """A window, and its total if it has this perplexity."""
    window = Window((9,), target, known=known)
    nats = -window.scored_tokens * math.log(perplexity)
    return window, Total.from_score(window, Score(nats, kind=kind), "duel")


@pytest.mark.parametrize(
    ("perplexity", "warns", "options"),
    [
        (3.9, False, {}),
        (4.1, True, {}),
        (7.9, True, {}),  # not yet that of a network that knows nothing
        (math.inf, False, {}),  # it has a reason of its own
        (4.1, True, {"kind": Kind.UPPER_BOUND}),
        (4.1, False, {"target": QUARTERS[:-1]}),  # too few tokens
        (4.1, False, {"known": (0,)}),  # 999 of them are scored
        (4.1, False, {"target": (*QUARTERS, *(2,) * 200)}),  # 1,200 tokens of which the last need context
        (4.1, True, {"target": (*QUARTERS, *(2,) * 200), "known": tuple(range(1000, 1200))}),
    ],
)
def test_a_task_that_a_unigram_of_its_texts_predicts_better(perplexity, warns, options):
    window, of_window = of_perplexity(perplexity, **options)
    run = RunStats()
    run.add_request("t", 0, of_window, windows=[window])

    lines = run.unigram_warnings(8)
    assert len(lines) == warns
    for line in lines:
        is_bound = "kind" in options
        assert f"of t is {'at most ' * is_bound}{perplexity:.2f}, and a unigram of its texts has 4.0" in line

    run.add_request("t", 0, of_window, option=1, windows=[window])  # a wrong answer is no text
    assert run.unigram_warnings(8) == []


def test_the_warning_of_an_estimate_has_its_error():
    window, _ = of_perplexity(4.1)
    estimate = Score(-window.scored_tokens * math.log(4.1), kind=Kind.ESTIMATE, stderr=50.0)
    run = RunStats()
    run.add_request("t", 0, Total.from_score(window, estimate, "two_phase"), windows=[window])
    [line] = run.unigram_warnings(8)
    assert f"4.10 ± {4.1 * 50 / window.scored_tokens:.2f}" in line


def test_the_unigram_of_all_ranks():
    window, of_window = of_perplexity(4.1, target=QUARTERS[:500])
    merged = RunStats(ranks=0)
    for rank in range(2):
        part = RunStats(counts=dict(COUNTS))
        part.add_request("t", rank, of_window, windows=[window])
        assert part.unigram_warnings(8) == []
        merged.merge(part)
    assert len(merged.unigram_warnings(8)) == 1


def test_peak_memory_is_in_bytes():
    kilobytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    unit = 1 if sys.platform == "darwin" else 1024
    assert stats.peak_memory(torch.device("cpu")) == pytest.approx(unit * kilobytes, rel=0.01)


# ---------------------------------------------------------------- progress and estimates


FINISHED = {0: None, 1: False, 4: False, 5: True, 9: True, 10: False}  # of ten documents


@pytest.mark.parametrize(("finished", "has_interval"), FINISHED.items())
def test_an_interval_takes_five_documents_and_ends_with_the_last(finished, has_interval):
    sizes = [3, 9, 4, 7, 5, 8, 2, 6, 11, 4][:finished]
    log_probs = [-2.0 * size - (n % 3) for n, size in enumerate(sizes)]

    estimated = estimate(log_probs, sizes, 10)

    if has_interval is None:
        assert estimated is None
        return
    value, low, high = estimated
    rate = -sum(log_probs) / sum(sizes)
    assert value == pytest.approx(math.exp(rate))
    if not has_interval:
        assert low is None
        assert high is None
        return
    squares = 0.0
    for log_prob, size in zip(log_probs, sizes, strict=True):
        squares += (log_prob + rate * size) ** 2
    variance = (1 - finished / 10) * finished / (finished - 1) * squares / sum(sizes) ** 2
    reach = stdtrit(finished - 1, 0.975) * math.sqrt(variance)
    assert low == pytest.approx(math.exp(rate - reach))
    assert high == pytest.approx(math.exp(rate + reach))


def test_the_text_of_a_bar():
    """Of several tasks each has its name; a task before its first document has no text; all of one have no count."""
    documents = [(0, "a", 10), (1, "b", 4), (2, "a", 5), (3, "b", 2), (4, "c", 3)]
    log_probs = {0: -20.0, 1: -8.0, 3: -4.0}
    assert str(RunningEstimate(documents, log_probs, {})) == "ppl a 7.389 over 1 of 2 documents, ppl b 7.389"
    assert str(RunningEstimate(documents, log_probs, {}, is_of_rank=True)).endswith("ppl b 7.389 of this rank")
    assert not str(RunningEstimate(documents, {}, {}, is_of_rank=True))
    one = [(0, "a", 10), (2, "a", 5)]
    task = SimpleNamespace(total=SimpleNamespace(perplexity_stderr=0.0456))
    assert str(RunningEstimate(one, log_probs, {"a": task})) == "ppl 7.389 ± 0.046 over 1 of 2 documents"


def test_requests_and_windows_that_are_finished():
    bar = Progress("loglikelihood", [5, 7, 1], [1, 2], Counts(), hidden=True)
    assert str(bar) == "1 of 3 loglikelihood requests"
    bar.add_window(3, 2)
    bar.add_window(4, None)
    assert str(bar) == "1 of 3 loglikelihood requests and 2 windows of unfinished ones"
    assert bar.tokens == 7
    assert bar.computed_tokens == 7
    assert bar.computed_steps == 2

    bar.finish_request(2)
    bar.add_saved(1)
    assert str(bar) == "2 of 3 loglikelihood requests and 1 window of unfinished ones"
    assert bar.tokens == 8
    assert bar.computed_tokens == 7

    bar.finish_request(1)
    assert str(bar) == "3 of 3 loglikelihood requests"

    assert str(Progress("x", [5], [], Counts(), hidden=True)) == "1 of 1 x request"
    texts = Progress("loglikelihood_rolling", [5, 7], [1], Counts(), hidden=True)
    assert str(texts) == "1 of 2 documents"


def test_bars_are_hidden_on_all_ranks_but_the_first():
    for show_progress in (True, False):
        for rank in (0, 1, 2):
            evaluation = SimpleNamespace(show_progress=show_progress, ranks=SimpleNamespace(rank=rank))
            is_shown = show_progress and rank == 0
            assert Evaluation.hides_bars.fget(evaluation) is not is_shown


def test_the_estimate_of_a_bar_is_new_after_a_second_and_at_the_end(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    texts = iter("abcdefgh")
    running = type("RunningEstimate", (), {"__str__": lambda self: next(texts)})()
    bar = Progress("x", [1] * 5, range(5), Counts(), running=running)
    shown = []
    for seconds in (0.0, 1.0, 0.1, 0.0, 0.0):  # since the last request
        now[0] += seconds
        bar.finish_request(0)
        shown.append(bar.bar.postfix)
    assert shown == ["a", "a", "b", "b", "c"]
    bar.bar.close()


# ---------------------------------------------------------------- requests


@pytest.mark.parametrize("repeats", [1, 2, 3])
def test_a_copy_beyond_the_repeats_has_the_answer_of_the_last(repeats):
    request = make_request("x", {}, ("a",), "t", 0, repeats)
    other = make_request("x", {}, ("b",), "t", 1)
    batch = Batch.from_requests([request, other, *[request] * 3, other])
    assert batch.repeats == [0, 0, *range(1, repeats)]
    answers = [0, *range(2, repeats + 1)]  # the places of the request's own; `other` has place 1
    expected = [0, 1, *[answers[min(copy, repeats - 1)] for copy in (1, 2, 3)], 1]
    assert batch.sources == expected
    assert batch.spread([f"{n}" for n in range(len(batch.requests))]) == list(map(str, expected))


def test_a_random_order_depends_on_the_seed_and_on_each_request_alone():
    requests = [make_request("x", {}, (letter,), "t", n) for n, letter in enumerate("abcdefghij")]
    other_task = [make_request("x", {}, request.args, "u", n) for n, request in enumerate(requests)]
    first = random_order(requests, 0)
    second = random_order(requests, 1)

    assert first != second
    assert second != sorted(second)
    assert random_order(other_task, 0) != first
    for seed, order in ((0, first), (1, second)):
        assert sorted(order) == list(range(10))
        order_of_even = random_order(requests[::2], seed)
        assert [2 * n for n in order_of_even] == [n for n in order if n % 2 == 0]


def test_keys_of_samples_differ_and_have_63_bits():
    parts = [("t", 0, 0, 0), ("u", 0, 0, 0), ("t", 1, 0, 0), ("t", 0, 1, 0), ("t", 0, 0, 1), (None, None, 0, 0)]

    keys = [generation.key_of(*part) for part in parts]

    assert min(keys) >= 0
    assert 2**55 <= max(keys) < 2**63
    assert len({*keys}) == len(keys)
    upper_halves = {key >> 32 for key in keys}
    assert len(upper_halves) == len(keys)


def test_work_is_dealt_to_the_rank_with_the_least_of_it():
    """The most expensive first; of equal ranks the lowest takes it, and of equal items the first is dealt."""
    costs = [1, 5, 5, 2, 4, 3]
    work = [0.0, 0.0, 0.0]
    dealt = [[], [], []]
    for n in sorted(range(6), key=lambda n: (-costs[n], n)):
        rank = work.index(min(work))
        work[rank] += costs[n]
        dealt[rank].append(n)

    for rank in range(3):
        assert Ranks(None, rank, 3).deal(costs) == sorted(dealt[rank])


# ---------------------------------------------------------------- changes to lm-eval


SIZES = [  # documents of a task, --limit, --samples, and how many are scored
    (5, None, None, 5),
    (5, 2, None, 2),
    (1, 4, None, 1),
    (9, None, [1, 2], 2),
    (9, 1, [1, 2, 3], 3),
]


@pytest.mark.parametrize(("documents", "limit", "samples", "count"), SIZES)
def test_a_task_needs_a_document_for_each_rank(documents, limit, samples, count):
    task = SimpleNamespace(eval_docs=range(documents), config=SimpleNamespace(task="t"), _instances=[])
    built = []

    def original(task, **options):
        built.append(options["world_size"])

    def build(ranks):
        patches._build_all_requests(original, task, limit=limit, samples=samples, world_size=ranks)

    build(1)
    build(count)
    with pytest.raises(DuelError, match=f"{count}.*{count + 1}"):
        build(count + 1)
    assert built == [1, count]


def test_large_numbers_of_a_table_and_means_over_nothing():
    results = {"results": {"t": {"a": 999_999_999_999.0, "b": 1e12, "c": -1e12, "d": 5, "e": math.inf}}}
    patches._save_results(lambda tracker, results: None, None, results)
    shown = [f"{value:.4f}" for value in results["results"]["t"].values()]
    assert shown == ["999999999999.0000", "1.0000e+12", "-1.0000e+12", "5.0000", "inf"]

    def mean(items):
        log_probs, sizes = zip(*items, strict=True)
        return sum(log_probs) / sum(sizes)

    assert patches._weighted_mean(mean, [(-6.0, 2), (0.0, 0)]) == -3.0
    assert math.isnan(patches._weighted_mean(mean, [(-6.0, 0), (0.0, 0)]))


# ---------------------------------------------------------------- numbers in messages


def test_answers_that_a_full_disk_has_not_taken_are_counted(caplog):
    class Full:
        def __enter__(self):
            raise sqlite3.OperationalError("full")

        def __exit__(self, *error):
            return False

    cache = ResponseCache.__new__(ResponseCache)
    cache.path = "c.db"
    cache.waiting = {}
    cache.file = Full()
    for n in range(3):
        cache.keep(f"key {n}", n)
    assert caplog.text.count("cannot be written") == 1
    cache.flush()
    assert "3 answers are not in c.db" in caplog.text
    cache.file = sqlite3.connect(":memory:")
    cache.file.execute('CREATE TABLE "unnamed" (key TEXT PRIMARY KEY, value BLOB)')
    caplog.set_level(logging.INFO)
    cache.keep("key 3", 3)
    assert "the 4 answers that waited" in caplog.text
    assert not cache.waiting
    assert cache.file.execute('SELECT count(*) FROM "unnamed"').fetchone() == (4,)


def test_a_process_that_cannot_join_names_how_many_others_it_misses(monkeypatch):
    import accelerate

    def fails(**options):
        raise RuntimeError("no route\nmore")

    monkeypatch.setattr(accelerate, "Accelerator", fails)
    for name, value in {"WORLD_SIZE": "4", "RANK": "2", "MASTER_ADDR": "host", "MASTER_PORT": "29"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(DuelError, match=r"RANK=2.* other 3 at host:29.*no route") as error:
        Ranks.join("cpu")
    assert "more" not in str(error.value).partition("no route")[2]
