"""Counts, verdicts and limits of the commands, each by a literal way. No network is loaded."""

import dataclasses
import math
from types import SimpleNamespace

import pytest

from lm_eval_duel.audit.checked import ALONE, RUNS_RULE, CheckedWindow, Recomputed
from lm_eval_duel.cli import audit, audited_run, generate, inspect, run, score, timing
from lm_eval_duel.cli.audited_run import Audit
from lm_eval_duel.core.float_noise import nats_tolerance
from lm_eval_duel.core.scores import Kind, Score, Value
from lm_eval_duel.core.windows import Window
from lm_eval_duel.errors import UsageError, documentation
from lm_eval_duel.estimators import cost

# ---------------------------------------------------------------- times


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [(0.01234, "0.0123 s"), (59.94, "59.9 s"), (60, "1 min"), (3594, "59.9 min"), (3600, "1 h"), (360_000, "100 h")],
)
def test_durations(seconds, shown):
    assert timing._duration(seconds) == shown


def test_counts_of_times():
    assert [timing._count(value, "≤ ") for value in (None, 0, 1, 12345.6)] == ["", "", "≤ 1", "≤ 12,346"]


@pytest.mark.parametrize(("counts", "shown"), [([1, 1], "1 window was"), ([2, 1], "2 windows were")])
def test_the_most_windows_that_were_timed(monkeypatch, counts, shown):
    monkeypatch.setattr(timing, "_steps", lambda lm: "")
    timed = [timing.TimedEstimator(f"e{n}", "", count, 1.0, 0) for n, count in enumerate(counts)]
    lm = SimpleNamespace(denoiser=SimpleNamespace(device="cpu"))
    assert f"Up to {shown} timed" in timing.table(lm, [[Window((), (5, 6))]], timed, [])


class Timed(SimpleNamespace):
    """An estimator whose windows take a step for each target token, in rows of their length."""

    name = "duel"
    worth = Value(0.0)


def timed_windows(monkeypatch, lengths, first_seconds, budget=16):
    """What is timed of windows of these lengths, the first of which takes so long, and the windows that were."""
    samples = []

    def seconds(estimator, windows):
        samples.append([len(window.target) for window in windows])
        return first_seconds if len(samples) == 1 else 2.0

    monkeypatch.setattr(timing, "_seconds", seconds)
    monkeypatch.setattr(timing, "peak_memory", lambda device: 7)
    monkeypatch.setattr(cost, "count_of", lambda estimator: len)
    monkeypatch.setattr(cost, "layouts", list)

    def sum_over(windows, count):
        rows = [len(window.target) for window in windows]
        counts = {"nfe": sum(rows), "rows": sum(rows), "token_rows": sum(n * n for n in rows)}
        return SimpleNamespace(**counts, longest=max(rows), weight=counts["token_rows"])

    monkeypatch.setattr(cost, "sum_over", sum_over)
    lm = SimpleNamespace(denoiser=SimpleNamespace(device="cpu"))
    estimator = Timed(budget=SimpleNamespace(tokens=budget))
    windows = [Window((), (1,) * length) for length in lengths]
    return timing._timed(lm, estimator, windows), samples


def test_four_windows_are_timed_unless_the_first_takes_ten_seconds(monkeypatch):
    """The first is of median length; the others are the middles of four equal parts of the sorted windows."""
    lengths = [9, 1, 8, 2, 7, 3, 6, 4]  # sorted: 1 2 3 4 6 7 8 9
    token_rows = sum(n * n for n in lengths)
    found, samples = timed_windows(monkeypatch, lengths, 9.99)
    assert samples == [[6], [2, 4, 7, 9]] and found.windows == 4
    assert found.seconds == pytest.approx(2.0 * token_rows / (4 + 16 + 49 + 81))
    assert found.nfe == found.rows == sum(lengths)
    assert found.token_rows == token_rows
    assert found.calls == math.ceil(token_rows / 16)
    assert found.peak_memory == 7

    long, samples = timed_windows(monkeypatch, lengths, 10.0)
    assert samples == [[6]] and long.windows == 1
    assert long.seconds == pytest.approx(10.0 * token_rows / 36)

    one, samples = timed_windows(monkeypatch, [5], 1.0, budget=1000)
    assert samples == [[5]]
    assert one.seconds == pytest.approx(1.0)
    assert one.calls == 5  # as many as steps, at least

    _, samples = timed_windows(monkeypatch, [5, 3], 1.0)
    assert samples == [[5], [3, 5]]


def test_windows_without_a_token_are_not_timed_and_count_as_windows():
    documents = [[Window((1,), (2, 3)), Window((), ())], [], [Window((1, 1), (2,), (5,))]]
    found = timing.figures(documents, [], ["note"])
    assert (found["documents"], found["windows"], found["tokens"], found["length"]) == (3, 3, 3, 4)
    assert [len(window.target) for window in timing._scored(documents)] == [2, 1] and found["left_out"] == ["note"]


# ---------------------------------------------------------------- the audit


def checked(n, tokens=3, run=-5.0, again=-5.0, **more):
    window = Window((), (n,) * tokens)
    return CheckedWindow(f"task t, document {n}", window, run, Recomputed(again, **more), n, Score(run))


def test_nothing_checked_is_no_pass():
    nothing = Audit("float32")
    assert nothing.unchecked and nothing.verdict.startswith("NOTHING CHECKED: 0 windows, 0 tokens")
    alone = Audit("float32", checked=[checked(0, route=ALONE)])
    assert alone.unchecked and alone.verdict.startswith("NOTHING CHECKED: 1 window")
    zero = Audit("float32", checked=[checked(0, run=-math.inf, again=-math.inf)])
    assert zero.unchecked and zero.verdict.startswith("NOTHING CHECKED: 1 window")
    one_of_two = Audit("float32", checked=[*zero.checked, checked(1)])
    assert not one_of_two.unchecked and "1 window with the reference" in one_of_two.verdict
    by_its_own_rule = Audit("float32", checked=[checked(0, route=RUNS_RULE)])
    assert "Not compared: how the rule decides (both sides run its own code, in 1 window)." in by_its_own_rule.verdict
    infinite_in_the_run = Audit("float32", checked=[checked(0, run=-math.inf)])
    assert infinite_in_the_run.verdict.startswith("FAIL")


def test_the_verdict_counts_what_was_compared_and_what_was_not():
    found = Audit("float32")
    found.checked = [checked(0), checked(1, 4), checked(2, 2, route=ALONE, why_alone="its rule"), checked(3, 0)]
    found.not_compared = ["the network (--no_own_code)"]
    found.held.hold("draws", [])
    found.held.hold("draws", [])
    found.lines = ["a line"]
    found.notes = ["odd", "odder"]
    assert found.verdict == (
        "PASS: 4 windows, 9 tokens. Compared: 3 windows with the reference, draws, printed numbers with the text. "
        "Not compared: the network (--no_own_code), 1 window (its rule). "
        f"{documentation('audit.md')} lists what both sides share, and what no audit sees. Note: odd; odder."
    )
    assert found.failures == []


def test_everything_that_differs_is_a_failure():
    found = Audit("float32")
    found.checked = [checked(n, again=-6.0) for n in range(5)]
    found.held.hold("draws", ["a contradiction"])
    found.problems = ["a problem"]
    found.network = [SimpleNamespace(differs=True, what="network"), SimpleNamespace(differs=False, what="weights")]
    windows, network, *others = found.failures
    assert windows.startswith("5 of 5 windows differ: ") and windows.count("document") == 3
    assert network == str(found.network[0])
    assert others == ["a contradiction", "a problem"]
    compared = "5 windows with the reference, network, weights, draws"
    assert found.verdict.startswith(f"FAIL: 5 windows, 15 tokens. Compared: {compared}")


@pytest.mark.parametrize("tokens", [1, 10, 1000])
def test_a_window_differs_beyond_the_tolerance(tokens):
    noise = nats_tolerance(tokens)

    def differs(run, again):
        return checked(0, tokens, run, again).differs

    assert not differs(-5.0, -5.0 + 0.99 * noise)
    assert differs(-5.0, -5.0 + 1.01 * noise)
    assert differs(-5.0, math.nan)
    assert differs(-5.0, -math.inf)
    assert not differs(-math.inf, -math.inf)
    assert checked(0, tokens, other_picks=1).differs
    assert not checked(0, tokens, other_picks=0, ties=2).differs


def test_the_table_of_windows():
    shown = audit.table([checked(0, other_picks=0, ties=2), checked(1, again=-5.5)])
    _, first, second, difference = shown.splitlines()
    assert first.split()[-7:] == ["3", "-5.000000", "-5.000000", "0.0e+00", "0", "2", "reference"]
    assert second.split()[-8:] == ["3", "-5.000000", "-5.500000", "5.0e-01", "-", "-", "reference", "DIFFERS"]
    assert difference.startswith("task t, document 1: -5.000000 nats, not -5.500000")


def windows_of(**more):
    """Four windows of 3, 4, 5 and 6 tokens, with the log-probabilities -4, -8, -12 and -16."""
    windows = []
    for n in range(4):
        log_prob = -4.0 * (n + 1)
        window = checked(n, 3 + n, log_prob, log_prob)
        windows.append(dataclasses.replace(window, score=Score(log_prob, **more)))
    return windows


def totals(windows, **changed):
    """The problems with the totals of windows, which are right but for those that are changed."""
    count = len(windows)
    nats = [each.score.log_prob for each in windows]
    rate = sum(nats) / sum(each.tokens for each in windows)
    squares = [(each.score.log_prob - rate * each.tokens) ** 2 for each in windows]
    window_stderr = math.sqrt(count / (count - 1) * sum(squares))
    value = {"log_prob": sum(nats), "stderr": None, "window_stderr": window_stderr} | changed
    return list(audited_run.totals_problems(SimpleNamespace(name="duel"), windows, {"duel": value}))


def test_totals_are_recomputed():
    windows = windows_of()
    noise = nats_tolerance(3 + 4 + 5 + 6)
    assert totals(windows) == []
    assert totals(windows, log_prob=-40.0 + 0.9 * noise) == []
    for name, value in (("log_prob", -40.0 + 1.1 * noise), ("log_prob", None), ("window_stderr", 1.0)):
        [problem] = totals(windows, **{name: value})
        assert problem.startswith(f"a {name} of")

    # Draws of different windows are independent; equal windows share theirs.
    drawn = windows_of(stderr=0.3)
    error = math.sqrt(4 * 0.3**2)
    assert totals(drawn, stderr=error) == []
    assert len(totals(drawn, stderr=error * 1.002)) == len(totals(drawn, stderr=error / 2)) == 1
    with_copy = [*drawn[:3], dataclasses.replace(drawn[0], request=3)]
    assert totals(with_copy, stderr=math.hypot(2 * 0.3, 0.3, 0.3)) == []


def test_the_error_over_noise_seeds_is_that_of_the_sums_of_each_seed():
    windows = []
    for n, window in enumerate(windows_of()):
        score = Score(window.log_prob, seeds=(-1.0, -2.0 - n))
        windows.append(dataclasses.replace(window, score=score))
    first = -1.0 * 4
    second = -2.0 * 4 - (0 + 1 + 2 + 3)
    error = abs(first - second) / 2  # of the mean of two: their standard deviation over the root of 2
    assert totals(windows, stderr=error) == []
    assert len(totals(windows, stderr=error * 1.01)) == 1


def test_the_company_of_audited_texts():
    """Other documents of the task, and the same texts without their last word; nothing of a text of one word."""
    requests = [SimpleNamespace(args=args, request_type="loglikelihood") for args in (("c", " a b  c "), ("", "x"))]
    others = [SimpleNamespace(args=("d", "e"))]
    found = audited_run.company(requests, others)
    assert [request.args for request in found] == [("d", "e"), ("c", " a b  ")]
    assert [request.doc_id for request in found] == [0, 1] and {request.task_name for request in found} != {"t"}


# ---------------------------------------------------------------- score and generate


def line(nats, tokens, words, size, **value):
    return score.Line("d", "k", Value(nats, **value), tokens, words, size, 0)


def test_figures_of_a_document():
    found = line(-6.0, 3, 2, 8).figures()
    assert found["token_perplexity"] == pytest.approx(math.exp(2.0))
    assert found["word_perplexity"] == pytest.approx(math.exp(3.0))
    assert found["bits_per_byte"] == pytest.approx(6.0 / math.log(2) / 8)
    one = line(-6.0, 1, 1, 1).figures()
    assert one["token_perplexity"] == one["word_perplexity"] == pytest.approx(math.exp(6.0))
    assert one["bits_per_byte"] == pytest.approx(6.0 / math.log(2))
    assert [line(0.0, 0, 0, 0).figures()[name] for name in score.RATES] == [None, None, None]


def test_the_error_over_documents_is_that_of_a_ratio():
    lines = [line(-6.0, 3, 2, 8), line(-10.0, 4, 3, 9), line(-3.0, 2, 1, 5)]
    total = score._total(lines, 0.25)
    assert (total.value.nats, total.value.error) == (-19.0, 0.25)
    assert (total.tokens, total.words, total.bytes) == (9, 6, 22)

    model = score.ScoredModel({}, "duel", lines, total)
    rate = 19.0 / 22
    squares = (6.0 - rate * 8) ** 2 + (10.0 - rate * 9) ** 2 + (3.0 - rate * 5) ** 2
    assert model.documents_stderr == pytest.approx(math.sqrt(3 / 2 * squares) / 22 / math.log(2))
    assert dataclasses.replace(model, lines=lines[:1]).documents_stderr is None


def test_a_bound_of_the_perplexity_from_above_is_one_of_the_log_probability_from_below():
    bound = Value(-2.5, 0.5, Kind.UPPER_BOUND)
    assert score._log_prob(bound, True) == "≥ -2.50 ± 0.50"
    assert score._log_prob(Value(-2.5), True) == "-2.50 ± ?"


def test_prompts_and_samples_have_keys_of_their_own(monkeypatch):
    """A sample depends on the seed, its prompt's number and its own number, not on how many others there are."""
    asked = {}

    class Duel:
        fingerprint, rule, block, grid = "f", None, 4, "target"
        estimator = SimpleNamespace(name="duel")
        denoiser = SimpleNamespace(cache=None)

        def generate_stream(self, prompts, keys, **options):
            asked[len(prompts)] = (prompts, keys, options)
            return iter(())

    import lm_eval_duel

    monkeypatch.setattr(lm_eval_duel, "Duel", SimpleNamespace(from_pretrained=lambda name, **options: Duel()))
    for count in (1, 2, 300):
        generate.main(["--prompt", "a", "b", "c", "--num", str(count)])
    for count in (1, 2, 300):
        prompts, keys, options = asked[3 * count]
        assert prompts == ["a"] * count + ["b"] * count + ["c"] * count
        expected = [(prompt << 32) + sample for prompt in range(3) for sample in range(count)]
        assert keys == expected and len({*keys}) == 3 * count
    assert (options["max_new_tokens"], options["seed"], options["temperature"]) == (64, 0, 1.0)
    assert options["do_sample"] is True and options["top_k"] is options["top_p"] is None
    generate.main(["--prompt", "a", "--temperature", "0"])
    assert asked[1][2]["do_sample"] is False
    with pytest.raises(UsageError, match="num"):
        generate.main(["--prompt", "a", "--num", "0"])


# ---------------------------------------------------------------- what is named


def test_a_length_says_what_is_left_for_text_and_what_a_causal_network_reads():
    def length(capacity, attention):
        denoiser = SimpleNamespace(max_length=12, attention=attention)
        return inspect._length(SimpleNamespace(denoiser=denoiser, text=SimpleNamespace(capacity=capacity)))

    assert length(12, "bidirectional") == "12 positions"
    assert length(11, "bidirectional") == "12 positions: special tokens and 11 of text"
    assert length(12, "causal").startswith("12 positions;") and "all but the last" in length(12, "causal")


def test_an_id_beyond_the_tokenizer_has_no_name():
    tokenizer = SimpleNamespace(convert_ids_to_tokens={3: "x", 9: None}.get)
    assert inspect._token(tokenizer, 3) == "3 'x'"
    assert "None" not in inspect._token(tokenizer, 9) and "9" in inspect._token(tokenizer, 9)


def test_the_nearest_of_our_tasks_is_suggested_and_every_folder_of_tasks_is_named():
    """Not the nearest to the words of what follows: the task files that cannot be read."""
    message = run._tasks_not_found("Tasks not found: sotuu, nothing_like_it. Not read: f.yaml, duel_ptb.", ["a", "b c"])
    assert "Did you mean sotu?" in message and ".." not in message
    assert "--include_path a;" in message and message.endswith("--include_path b c")
