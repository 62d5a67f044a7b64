"""Counts, verdicts and limits of the commands, each by a literal way. No network is loaded."""

import dataclasses
import math
from types import SimpleNamespace

import numpy as np
import pytest

from lm_eval_duel.audit.checked import ALONE, RUNS_RULE, CheckedWindow, Recomputed
from lm_eval_duel.cli import audit, audited_run, generate, inspect, run, scored, timing
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
    assert timing._count(None, "≤ ") == ""
    assert timing._count(0, "≤ ") == ""
    assert timing._count(1, "≤ ") == "≤ 1"
    assert timing._count(12345.6, "≤ ") == "≤ 12,346"


@pytest.mark.parametrize(("counts", "shown"), [([1, 1], "1 window was"), ([2, 1], "2 windows were")])
def test_the_most_windows_that_were_timed(monkeypatch, counts, shown):
    monkeypatch.setattr(timing, "_steps", lambda lm: "")
    first, second = counts
    timed = [timing.TimedEstimator("first", "", first, 1.0, 0), timing.TimedEstimator("second", "", second, 1.0, 0)]
    lm = SimpleNamespace(denoiser=SimpleNamespace(device="cpu"))

    table = timing.table(lm, [[Window((), (5, 6))]], timed, [])

    assert f"Up to {shown} timed" in table


class Timed(SimpleNamespace):
    """An estimator whose windows take a step for each target token, in rows of their length."""

    name = "duel"
    value_template = Value(0.0)


def lengths_of(windows):
    return [len(window.target) for window in windows]


def timed_windows(monkeypatch, lengths, first_seconds, budget=16):
    """What is timed of windows of these lengths, the first of which takes so long, and the windows that were."""
    samples = []

    def seconds(estimator, windows):
        samples.append(lengths_of(windows))
        return first_seconds if len(samples) == 1 else 2.0

    monkeypatch.setattr(timing, "_seconds", seconds)
    monkeypatch.setattr(timing, "peak_memory", lambda device: 7)
    monkeypatch.setattr(cost, "count_of", lambda estimator: len)
    monkeypatch.setattr(cost, "layouts", list)

    def sum_over(windows, count):
        steps = lengths_of(windows)
        token_rows = sum(n * n for n in steps)
        return SimpleNamespace(
            nfe=sum(steps),
            rows=sum(steps),
            token_rows=token_rows,
            longest=max(steps),
            weight=token_rows,
        )

    monkeypatch.setattr(cost, "sum_over", sum_over)
    lm = SimpleNamespace(denoiser=SimpleNamespace(device="cpu"))
    estimator = Timed(budget=SimpleNamespace(tokens=budget))
    windows = [Window((), (1,) * length) for length in lengths]
    return timing._timed(lm, estimator, windows), samples


def test_four_windows_are_timed_unless_the_first_takes_ten_seconds(monkeypatch):
    """The first is of median length; the others are the middles of four equal parts of the sorted windows."""
    lengths = [9, 1, 8, 2, 7, 3, 6, 4]  # sorted: 1 2 3 4 6 7 8 9
    token_rows = sum(n * n for n in lengths)
    short, samples = timed_windows(monkeypatch, lengths, 9.99)
    assert samples == [[6], [2, 4, 7, 9]]
    assert short.windows == 4
    assert short.seconds == pytest.approx(2.0 * token_rows / (4 + 16 + 49 + 81))
    assert short.nfe == sum(lengths)
    assert short.rows == sum(lengths)
    assert short.token_rows == token_rows
    assert short.calls == math.ceil(token_rows / 16)
    assert short.peak_memory == 7

    long, samples = timed_windows(monkeypatch, lengths, 10.0)
    assert samples == [[6]]
    assert long.windows == 1
    assert long.seconds == pytest.approx(10.0 * token_rows / 36)

    one, samples = timed_windows(monkeypatch, [5], 1.0, budget=1000)
    assert samples == [[5]]
    assert one.seconds == pytest.approx(1.0)
    assert one.calls == 5  # as many as steps, at least

    _, samples = timed_windows(monkeypatch, [5, 3], 1.0)
    assert samples == [[5], [3, 5]]


def test_windows_without_a_token_are_not_timed_and_count_as_windows():
    documents = [[Window((1,), (2, 3)), Window((), ())], [], [Window((1, 1), (2,), (5,))]]

    figures = timing.figures(documents, [], ["note"])

    assert figures["documents"] == 3
    assert figures["windows"] == 3
    assert figures["tokens"] == 3
    assert figures["length"] == 4
    assert figures["left_out"] == ["note"]
    assert lengths_of(timing._scored(documents)) == [2, 1]


# ---------------------------------------------------------------- the audit


def checked(n, tokens=3, run=-5.0, again=-5.0, **more):
    window = Window((), (n,) * tokens)
    return CheckedWindow(f"task t, document {n}", window, run, Recomputed(again, **more), n, Score(run))


def test_nothing_checked_is_no_pass():
    nothing = Audit("float32")
    assert nothing.unchecked
    assert nothing.verdict.startswith("NOTHING CHECKED: 0 windows, 0 tokens")

    alone = Audit("float32", checked=[checked(0, route=ALONE)])
    assert alone.unchecked
    assert alone.verdict.startswith("NOTHING CHECKED: 1 window")

    zero = Audit("float32", checked=[checked(0, run=-math.inf, again=-math.inf)])
    assert zero.unchecked
    assert zero.verdict.startswith("NOTHING CHECKED: 1 window")

    one_of_two = Audit("float32", checked=[*zero.checked, checked(1)])
    assert not one_of_two.unchecked
    assert "1 window with the reference" in one_of_two.verdict

    by_its_own_rule = Audit("float32", checked=[checked(0, route=RUNS_RULE)])
    assert "Not compared: how the rule decides (both sides run its own code, in 1 window)." in by_its_own_rule.verdict

    infinite_in_the_run = Audit("float32", checked=[checked(0, run=-math.inf)])
    assert infinite_in_the_run.verdict.startswith("FAIL")


def test_the_verdict_counts_what_was_compared_and_what_was_not():
    findings = Audit("float32")
    findings.checked = [checked(0), checked(1, 4), checked(2, 2, route=ALONE, why_alone="its rule"), checked(3, 0)]
    findings.not_compared = ["the network (--no_own_code)"]
    findings.comparisons.add("draws", [])
    findings.comparisons.add("draws", [])
    findings.printed_numbers = True
    findings.warnings = ["odd", "odder"]

    assert findings.verdict == (
        "PASS: 4 windows, 9 tokens; 2 warnings above. Compared: 3 windows with the reference, draws, "
        "printed numbers with the text. Not compared: the network (--no_own_code), 1 window (its rule). "
        f"{documentation('audit.md')} lists what both sides share, and what no audit sees."
    )
    assert findings.failures == []


def test_an_interrupted_audit_names_what_differs_and_what_is_missing():
    findings = Audit("float32", checked=[checked(0)])
    assert findings.interrupted(["a", "b"]).endswith("Not compared: the windows and numbers of a, b.")
    assert findings.interrupted([]).endswith("Not compared: values and totals with each other.")
    findings.problems = ["a problem", "another"]
    assert findings.interrupted([]).endswith(" What differs: a problem; another.")


def test_everything_that_differs_is_a_failure():
    other_network = SimpleNamespace(differs=True, what="network")
    same_weights = SimpleNamespace(differs=False, what="weights")
    findings = Audit("float32")
    findings.checked = [checked(n, again=-6.0) for n in range(5)]
    findings.comparisons.add("draws", ["a contradiction"])
    findings.problems = ["a problem"]
    findings.network = [other_network, same_weights]

    windows, network, *others = findings.failures

    assert windows.startswith("5 of 5 windows differ: ")
    assert windows.count("document") == windows.count("(-5.0000 nats, not -6.0000)") == 3
    assert network == str(other_network)
    assert others == ["a contradiction", "a problem"]
    compared = "5 windows with the reference, network, weights, draws"
    assert findings.verdict.startswith(f"FAIL: 5 windows, 15 tokens; 4 differences below. Compared: {compared}")


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
    assert difference.startswith("task t, document 1: -5.0000 nats, not -5.5000")


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
    nats = np.array([window.score.log_prob for window in windows])
    tokens = np.array([window.tokens for window in windows])
    residuals = nats - nats.sum() / tokens.sum() * tokens
    window_stderr = math.sqrt(count / (count - 1) * (residuals**2).sum())
    value = {"log_prob": float(nats.sum()), "stderr": None, "window_stderr": window_stderr} | changed
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
    assert len(totals(drawn, stderr=error * 1.002)) == 1
    assert len(totals(drawn, stderr=error / 2)) == 1
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
    requests = [
        SimpleNamespace(args=("c", " a b  c "), request_type="loglikelihood"),
        SimpleNamespace(args=("", "x"), request_type="loglikelihood"),
    ]
    others = [SimpleNamespace(args=("d", "e"))]

    other, shortened = audited_run.company(requests, others)

    assert other.args == ("d", "e")
    assert other.doc_id == 0
    assert shortened.args == ("c", " a b  ")
    assert shortened.doc_id == 1
    for request in (other, shortened):
        assert request.task_name != "t", "they are not audited"


# ---------------------------------------------------------------- score and generate


def line(nats, tokens, words, size, **value):
    return scored.Line("d", f"text of {nats} nats", Value(nats, **value), tokens, words, size, 0)


def test_figures_of_a_document():
    figures = line(-6.0, 3, 2, 8).figures()
    assert figures["token_perplexity"] == pytest.approx(math.exp(2.0))
    assert figures["word_perplexity"] == pytest.approx(math.exp(3.0))
    assert figures["bits_per_byte"] == pytest.approx(6.0 / math.log(2) / 8)

    of_one_unit = line(-6.0, 1, 1, 1).figures()
    assert of_one_unit["token_perplexity"] == pytest.approx(math.exp(6.0))
    assert of_one_unit["word_perplexity"] == pytest.approx(math.exp(6.0))
    assert of_one_unit["bits_per_byte"] == pytest.approx(6.0 / math.log(2))

    of_nothing = line(0.0, 0, 0, 0).figures()
    assert of_nothing["token_perplexity"] is None
    assert of_nothing["word_perplexity"] is None
    assert of_nothing["bits_per_byte"] is None


def test_the_error_over_documents_is_that_of_a_ratio():
    lines = [line(-6.0, 3, 2, 8), line(-10.0, 4, 3, 9), line(-3.0, 2, 1, 5)]
    total = scored._total(lines, 0.25)
    assert total.value.nats == -19.0
    assert total.value.error == 0.25
    assert total.tokens == 9
    assert total.words == 6
    assert total.bytes == 22

    model = scored.ScoredModel({}, "duel", lines, total, len(lines))
    rate = 19.0 / 22
    squares = (6.0 - rate * 8) ** 2 + (10.0 - rate * 9) ** 2 + (3.0 - rate * 5) ** 2
    assert model.documents_stderr == pytest.approx(math.sqrt(3 / 2 * squares) / 22 / math.log(2))
    assert dataclasses.replace(model, lines=lines[:1]).documents_stderr is None


def test_a_bound_of_the_perplexity_from_above_is_one_of_the_log_probability_from_below():
    bound = Value(-2.5, 0.5, Kind.UPPER_BOUND)
    assert scored.shown_log_prob(bound, True) == "≥ -2.50 ± 0.50"
    assert scored.shown_log_prob(Value(-2.5), True) == "-2.50 ± ?"


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
        expected = []
        for prompt in range(3):
            expected += [(prompt << 32) + sample for sample in range(count)]
        assert prompts == ["a"] * count + ["b"] * count + ["c"] * count
        assert keys == expected
        assert len(set(keys)) == 3 * count
    assert options["max_new_tokens"] == 64
    assert options["seed"] == 0
    assert options["temperature"] == 1.0
    assert options["do_sample"] is True
    assert options["top_k"] is None
    assert options["top_p"] is None

    generate.main(["--prompt", "a", "--temperature", "0"])
    _, _, options = asked[1]
    assert options["do_sample"] is False

    with pytest.raises(UsageError, match="num"):
        generate.main(["--prompt", "a", "--num", "0"])


# ---------------------------------------------------------------- what is named


def test_a_length_says_what_is_left_for_text_and_what_a_causal_network_reads():
    def length(capacity, attention):
        denoiser = SimpleNamespace(max_length=12, attention=attention)
        return inspect._length(SimpleNamespace(denoiser=denoiser, text=SimpleNamespace(capacity=capacity)))

    assert length(12, "bidirectional") == "12 positions"
    assert length(11, "bidirectional") == "12 positions: special tokens and 11 of text"
    assert length(12, "causal").startswith("12 positions;")
    assert "all but the last" in length(12, "causal")


def test_an_id_beyond_the_tokenizer_has_no_name():
    tokenizer = SimpleNamespace(convert_ids_to_tokens={3: "x", 9: None}.get)
    assert inspect._token(tokenizer, 3) == "3 'x'"
    assert "None" not in inspect._token(tokenizer, 9)
    assert "9" in inspect._token(tokenizer, 9)


def test_every_folder_of_tasks_is_named_and_the_way_to_ones_own():
    missing = "Tasks not found: my_task. Did you mean my_tasks?"
    message = run._tasks_not_found(missing, ["a", "b c"])
    assert message.startswith(missing)
    assert "--include_path a;" in message
    assert message.endswith("--include_path b c")
    assert "FOLDER" not in message
    assert "--include_path FOLDER" in run._tasks_not_found(missing, ["a"])
