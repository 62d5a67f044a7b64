"""The sweep: every metric by hand, shared states against one rule at a time, and that nothing is computed twice."""

import functools
import json
import math
import re
import signal
import sys
import types
from collections import Counter

import lm_eval.tasks
import pytest
import tiny
import torch
from lm_eval.tasks import TaskManager
from toys import BlockCausal, Toy

import benchmarks
from lm_eval_duel import denoisers, rules
from lm_eval_duel.cli.main import main
from lm_eval_duel.core.reveal import Reveal
from lm_eval_duel.core.windows import Window
from lm_eval_duel.errors import DuelError
from lm_eval_duel.estimators.duel import Autoregressive, DuelEstimator
from lm_eval_duel.estimators.subsets.lattice import Lattice
from lm_eval_duel.harness.lm import DuelMDM
from lm_eval_duel.rates import perplexity, ratio
from lm_eval_duel.results import figures
from lm_eval_duel.results.table import plain
from lm_eval_duel.sweep import arguments as asked
from lm_eval_duel.sweep import judges, metrics, store, tables
from lm_eval_duel.sweep import main as sweep
from lm_eval_duel.sweep.measure import Measuring
from lm_eval_duel.sweep.shared import Shared
from lm_eval_duel.tasks import named

RULES = [
    "greedy:k=1",
    "greedy:k=2",
    "greedy:k=4",
    "margin:k=1",
    "margin:k=3",
    "left_to_right:k=1",
    "left_to_right:k=2",
    "threshold:mu=0.5",
    "threshold:mu=0.7",
    "random:k=1:seed=0",
    "entropy_bound:gamma=0.5",
]


@pytest.fixture(autouse=True)
def one_thread():
    """Tiny networks are done sooner than threads agree."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def test_metrics_by_hand():
    look = metrics.look([(1, 1, 2, 1), (3, 3, 3, 3)])
    assert look["entropy"] == pytest.approx((-0.75 * math.log(0.75) - 0.25 * math.log(0.25) + 0) / 2)
    assert (look["count"], look["tokens"], look["distinct_1"]) == (2, 8, 3 / 8)
    assert (look["distinct_2"], look["distinct_4"]) == (4 / 6, 1)  # 11 12 21 33
    look = metrics.look([(1, 2, 1, 2, 1, 2), (1, 2, 3, 4, 5, 6)])
    assert look["repetition"] == pytest.approx((1 / 3 + 0) / 2)  # 1212 twice
    assert look["repetition_stderr"] == pytest.approx(1 / 6)
    short = metrics.look([(1, 2)])
    assert short["repetition"] is short["repetition_stderr"] is short["distinct_3"] is short["entropy_stderr"] is None
    assert (
        metrics.mean_error([1.0, 3.0]) == (2.0, pytest.approx(1.0)) and metrics.mean_error([1.0, math.inf])[1] is None
    )
    assert ratio([2.0, 6.0], [1, 3]) == (2.0, 0.0)  # the same rate in both
    assert ratio([2.0, 4.0], [1, 1]) == (3.0, pytest.approx(1.0))  # as of a mean of two
    assert perplexity(math.log(7)) == pytest.approx(7) and perplexity(1e9) == math.inf


# ---------------------------------------------------------------- shared states


def windows(sizes, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [Window(*(torch.randint(3, (n,), generator=generator).tolist() for n in size)) for size in sizes]


@pytest.mark.parametrize(
    ("toy", "block"),
    [
        (Toy(length=12, seed=1), 4),
        (Toy(length=12, seed=1), None),
        (Toy(length=12, seed=2, honours_padding=False), 5),
        (BlockCausal(block=4, length=12, seed=3), 4),
    ],
)
def test_many_rules_at_once_are_each_rule_by_itself(toy, block):
    texts = windows([(0, 12), (1, 11), (3, 9), (2, 5), (2, 0), (0, 12), (1, 1)])
    texts.append(texts[0])
    shared = Shared(toy, [rules.parse(rule) for rule in RULES], block)
    found, steps, states = shared.log_prob(texts), 0, 0
    for rule in RULES:
        for many, alone in zip(found, DuelEstimator(toy, rule, block).log_prob(texts), strict=True):
            followed = many.rules[rule]
            assert followed.log_prob == pytest.approx(alone.log_prob, abs=1e-9)
            assert (followed.nfe, followed.near_ties) == (alone.nfe, alone.near_ties)
            steps += alone.nfe
    states = sum(score.states for many in found for score in many.rules.values())
    assert states < 0.7 * steps
    if toy.attention == "bidirectional":  # a row of a block-causal network holds a state of several blocks
        assert shared.counts.rows <= states
    if block:
        lattice = Lattice(toy, block, follow=RULES)
        for many, every in zip(found, lattice.log_prob(texts), strict=True):
            for rule in RULES:
                assert many.rules[rule].log_prob == pytest.approx(every.rules[rule].log_prob, abs=1e-9)
        assert states <= sum(2**width - 1 for text in texts for _, width in shared.blocks(text))


def test_rules_with_a_memory_are_refused():
    with pytest.raises(DuelError, match="has a memory"):
        Shared(Toy(), [rules.parse("klass:mu=0.5:nu=0.1")], 4)


# ---------------------------------------------------------------- the command on tiny networks


@pytest.fixture(scope="module")
def places(tmp_path_factory):
    folder = tmp_path_factory.mktemp("networks")
    return {
        "mdm": tiny.checkpoint(folder / "mdm", "distilbert"),
        "same": tiny.checkpoint(folder / "same", "gpt2"),
        "other": tiny.checkpoint(folder / "other", "gpt2", mask=False),
    }


@pytest.fixture(autouse=True)
def own_tasks_only(monkeypatch):
    """To index all tasks of the harness takes it seconds each time, and so do figures."""
    monkeypatch.setattr(figures, "available", lambda: False)
    monkeypatch.setattr(lm_eval.tasks, "TaskManager", functools.partial(TaskManager, include_defaults=False))


def arguments(places, out, *more, samples="3", scorer="same"):
    words = ["--model_args", f"pretrained={places['mdm']},block=4", "--tasks", "sotu", "--limit", "2"]
    words += ["--rules", "greedy,left_to_right", "--k", "1,2", "--mu", "0.2", "--device", "cpu", "--out", str(out)]
    words += ["--samples", samples, "--length", "10"] if samples else []
    return [*words, *(["--scorer", places[scorer]] if samples and scorer else []), *more]


def report_of(out):
    return json.loads((out / "sweep.json").read_text())


def lines_of(out):
    """(file, line) of each finished line."""
    return [(file.name, line) for file in out.glob("parts/*.jsonl") for line in file.read_text().split("\n")[:-1]]


def test_the_figures_are_those_of_the_parts_by_hand(places, tmp_path, monkeypatch, capsys):
    """Of rules that share states, and of one with a memory, which is scored by itself."""
    monkeypatch.setattr(figures, "available", lambda: True)
    names = ["greedy:k=1", "left_to_right:k=1", "klass:mu=0.3:nu=0.5", "threshold:mu=0.2"]
    rules_ = ["--rules", "greedy,left_to_right,klass:mu=0.3:nu=0.5", "--k", "1"]
    main(["sweep", *arguments(places, tmp_path, "--elbo", "16", *rules_)])
    printed, report = capsys.readouterr().out, report_of(tmp_path)
    assert printed.startswith((tmp_path / "sweep.md").read_text().rstrip())
    assert report["files"] == ["sweep.json", "sweep.md", "sweep.png"]
    assert (tmp_path / "sweep.png").stat().st_size > 10_000
    assert [setting["name"] for setting in report["settings"]] == names
    assert all(f"`{name}`" in printed for name in names)

    task = named.load("sotu", {"pretrained": places["mdm"]})
    documents = [doc["text"] for doc in task.test_docs()][:2]
    assert report["task"]["bytes"] == sum(len(text.encode()) for text in documents)
    scorer = denoisers.load(places["same"], attention="causal", device="cpu")
    for setting in report["settings"]:
        model = DuelMDM(pretrained=places["mdm"], block=4, rule=setting["rule"], device="cpu")
        assert setting["fingerprint"] == model.fingerprint  # comparable with a run of the harness
        texts = [window for text in documents for window in model.text.windows(text)]
        scored, text = model.estimator.log_prob(texts), setting["text"]
        nats, tokens = -sum(one.log_prob for one in scored), sum(len(window.target) for window in texts)
        assert text["perplexity"] == pytest.approx(math.exp(nats / tokens))
        assert text["bits_per_byte"] == pytest.approx(nats / math.log(2) / report["task"]["bytes"])
        assert text["nfe"] == sum(one.nfe for one in scored)
        assert (text["nfe_per_token"], text["nfe_per_window"]) == (text["nfe"] / tokens, text["nfe"] / len(texts))

        found = setting["samples"]
        drawn = model.estimator.sample([(2,)] * 3, 10, suffix=(3,), seed=0)  # [CLS] ... [SEP]
        assert found["own_nll_per_token"] == pytest.approx(-sum(one.log_prob for one in drawn) / 30)
        ids = [one.tokens for one in drawn]
        histograms = [Counter(one).values() for one in ids]
        assert found["entropy"] == pytest.approx(sum(-n / 10 * math.log(n / 10) for one in histograms for n in one) / 3)
        each = -sum(one.log_prob for one in Autoregressive(scorer).log_prob([Window((2,), one) for one in ids])) / 30
        assert found["generative"]["perplexity"] == pytest.approx(math.exp(each), rel=1e-5)
        assert found["generative"]["same_ids"] and found["generative"]["tokens"] == 30

    a, b = (DuelEstimator(model.denoiser, rule, 4) for rule in ("greedy", "left_to_right"))
    drawn = a.sample([(2,)] * 3, 10, suffix=(3,), seed=0)
    other = b.log_prob([Window((2,), one.tokens, (3,)) for one in drawn])
    kl = {(one["of"], one["under"]): one["kl_per_token"] for one in report["kl"]}
    assert len(kl) == 4 and kl["greedy:k=1", "greedy:k=1"] == 0
    expected = sum(x.log_prob - y.log_prob for x, y in zip(drawn, other, strict=True)) / 30
    assert kl["greedy:k=1", "left_to_right:k=1"] == pytest.approx(expected, abs=1e-6)

    assert report["elbo"]["draws"] == 16 and report["elbo"]["stderr"] > 0
    assert report["shared"]["evaluated"] < report["shared"]["steps"]
    shared = [setting["text"]["nfe"] for setting in report["settings"] if "klass" not in setting["name"]]
    assert report["shared"]["steps"] == sum(shared)


def test_rows_of_a_wrapped_task_keep_their_ids(tmp_path):
    benchmarks.write(tmp_path / "data")
    words = ["--model_args", "pretrained=demo-mdm,block=4,bos=given", "--tasks", "duel_ptb_wrapped", "--limit", "2"]
    words += ["--rules", "left_to_right", "--k", "4", "--device", "cpu", "--out", str(tmp_path)]
    sweep([*words, "--metadata", f"data_dir={tmp_path / 'data'},rows={benchmarks.ROWS},length=32"])
    report = report_of(tmp_path)
    assert report["task"]["tokens"] == 62 and report["task"]["windows"] == 2  # of each row the first id is given
    assert report["settings"][0]["text"]["bits_per_byte"] is None  # rows have no bytes of their own


@pytest.fixture
def count_calls(monkeypatch):
    calls = []
    once = Reveal.__iter__

    def counted(self):
        calls.append(self.view.denoiser.attention)
        return once(self)

    monkeypatch.setattr(Reveal, "__iter__", counted)
    return calls


def test_what_is_finished_is_not_run_again(places, tmp_path, count_calls, capsys):
    sweep(arguments(places, tmp_path))
    first, before = report_of(tmp_path), len(count_calls)
    assert before
    count_calls.clear()
    sweep(arguments(places, tmp_path))
    assert count_calls == []
    assert report_of(tmp_path)["settings"] == first["settings"] and report_of(tmp_path)["kl"] == first["kl"]

    count_calls.clear()  # other questions: other files; what is the same in them is there
    sweep([*arguments(places, tmp_path, samples="4"), "--kl", "none"])
    assert count_calls.count("bidirectional") == 5  # one more sample of each setting
    assert len(count_calls) <= 11, "and the new samples under the scorer, and a piece of the text"
    count_calls.clear()
    sweep([*arguments(places, tmp_path, samples=""), "--rules", "greedy,margin"])
    assert count_calls == ["bidirectional"]  # two more rules, together
    assert "margin:k=1" in (tmp_path / "sweep.md").read_text()
    count_calls.clear()
    sweep([*arguments(places, tmp_path, samples=""), "--model_args", f"pretrained={places['mdm']},block=2"])
    assert len(count_calls) == 1  # another spec


def test_a_signal_keeps_what_is_done(places, tmp_path, monkeypatch, capsys):
    after = 6
    write, written = store.journal.Journal.write, []

    def interrupted(self, lines):
        write(self, lines)
        written.append(lines)
        if len(written) == after:
            signal.raise_signal(signal.SIGTERM)

    words = arguments(places, tmp_path, "--rules", "greedy", "--k", "1", "--mu", "", samples="6")
    with monkeypatch.context() as patch:
        patch.setattr(store.journal.Journal, "write", interrupted)
        with pytest.raises(SystemExit) as stopped:
            sweep(words)
    assert stopped.value.code == 143 and "run the same command to continue" in capsys.readouterr().err
    kept = lines_of(tmp_path)
    assert after <= len(kept) == len(written) < 20, "those of the network call under way, too"
    last = max((tmp_path / "parts").glob("*.jsonl"), key=lambda file: file.stat().st_mtime_ns)
    with last.open("a") as file:
        file.write('["cut off in the mid')
    sweep(words)
    keys = [(name, json.dumps(json.loads(line)[0])) for name, line in lines_of(tmp_path)]
    assert len(keys) == len(set(keys)) > len(kept), "none was computed twice"


def test_samples_are_tokenized_anew_for_another_tokenizer(places):
    model = DuelMDM(pretrained=places["mdm"], device="cpu")
    same, other = (judges.Scorer(places[name], model.text, "cpu") for name in ("same", "other"))
    assert same.same and not other.same
    ids = (5, 6, 31, 5)  # words: decoded with spaces between
    ((_, (nats, count, pieces)),) = other.stream([ids])
    ((_, alone),) = same.stream([ids])
    assert (count, pieces) == (4, 1) and nats == pytest.approx(alone.log_prob, abs=1e-5)
    longer = ids * same.text.capacity
    found = dict(same.stream([ids, longer, ()]))
    assert [(found[n].tokens, found[n].pieces > 1) for n in range(3)] == [(4, False), (len(longer), True), (0, False)]


def test_a_file_that_a_rule_reads_is_part_of_its_results(places, tmp_path):
    model, file = DuelMDM(pretrained=places["mdm"], device="cpu"), tmp_path / "table.json"
    windows, values = [Window((), (5, 6, 31, 5, 7, 8, 9, 20, 11, 30, 12, 6))], set()
    for seed in (0, 1):
        counts = torch.randint(1, 5000, (30,), generator=torch.Generator().manual_seed(seed)).tolist()
        file.write_text(json.dumps({"num_token": 10**6, "p_baseline_dict": {str(n): c for n, c in enumerate(counts)}}))
        rule, measuring = rules.parse(f"pc:decay=0.01:alpha=10:steps=12:table={file}"), Measuring(tmp_path, model)
        [[score]] = measuring.under(windows, [rule], "text")
        assert score.log_prob == pytest.approx(measuring.duel(rule).log_prob(windows)[0].log_prob, abs=1e-4)
        values.add(round(score.log_prob, 3))
    assert len(values) == 2


# ---------------------------------------------------------------- extras


def test_mauve_gets_the_texts_and_stands_in_the_table(places, tmp_path, monkeypatch, capsys):
    calls = []

    def compute_mauve(**given):
        calls.append(given)
        return types.SimpleNamespace(mauve=0.25)

    module = types.ModuleType("mauve")
    module.compute_mauve, module.__spec__ = compute_mauve, types.SimpleNamespace()
    monkeypatch.setitem(sys.modules, "mauve", module)
    sweep([*arguments(places, tmp_path, samples="6"), "--mauve", "--rules", "greedy", "--k", "1", "--mu", ""])
    (given,) = calls
    assert len(given["q_text"]) == len(given["p_text"]) == 6 and given["featurize_model_name"] == "gpt2-large"
    assert given["max_text_length"] == 10 and given["device_id"] == -1
    assert report_of(tmp_path)["settings"][0]["samples"]["mauve"] == 0.25
    assert "MAUVE" in (tmp_path / "sweep.md").read_text()


# ---------------------------------------------------------------- what is asked


def test_settings_are_rules_by_k_and_thresholds():
    found = asked.settings(["greedy", "random:seed=3", "entropy_bound:gamma=0.1", "l2r"], "12", ["0.5", ".9", "0.5"])
    names = ["greedy:k=1", "greedy:k=2", "random:k=1:seed=3", "random:k=2:seed=3", "entropy_bound:gamma=0.1"]
    names += ["left_to_right:k=1", "left_to_right:k=2", "threshold:mu=0.5", "threshold:mu=0.9"]
    assert [asked.name_of(setting) for setting in found] == names
    assert [asked.k_of(setting) for setting in found] == [1, 2, 1, 2, None, 1, 2, None, None]
    for kl, chosen in (
        (["k=1"], [name for name in names if "k=1" in name]),
        (["threshold:mu=0.9", "greedy:k=2"], ["greedy:k=2", "threshold:mu=0.9"]),
        (["all"], names),
        ([], []),
    ):
        assert [asked.name_of(setting) for setting in asked.between(kl, found)] == chosen
    assert [str(asked.cap(setting, 4)) for setting in asked.settings(["greedy"], "18", [])] == [names[0], "greedy:k=4"]


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--rules", "gredy"], "Unknown unmasking rule 'gredy'. Did you mean greedy?"),
        (["--k", "1,two"], "'--k'"),
        (["--mu", "1.5"], "'mu'"),
        (["--rules", "threshold"], "Pass thresholds with --mu"),
        (["--rules", "", "--mu", ""], "Nothing to compare"),
        (["--samples", "0"], "--scorer and --mauve need samples"),
        (["--kl", "greedy:k=7"], "Unknown setting of --kl 'greedy:k=7'"),
        (["--tasks", "sotu,sotu_full"], "A sweep takes one task"),
        (["--model_args", "rule=greedy"], "'rule' in --model_args is set by the sweep"),
    ],
)
def test_errors_come_before_anything_is_loaded(places, tmp_path, monkeypatch, more, message):
    def fail(*given, **named):
        raise AssertionError("it was loaded")

    monkeypatch.setattr(named, "load", fail)
    with pytest.raises(SystemExit) as stopped:
        main(["sweep", *arguments(places, tmp_path), *more])
    assert message in str(stopped.value)
    assert not list(tmp_path.iterdir())


def test_rankings_group_ties_and_leave_what_is_within_the_judges_error_open():
    def rank(*settings):
        found = []
        for family, k, duel, generative, error in settings:
            judged = {"generative": {"perplexity": generative, "stderr": error}}
            found.append({"family": family, "k": k, "text": {"perplexity": duel}, "samples": judged})
        return tables.rankings(found)

    first, second = rank(
        *(("a", 1, 20.0, 30.0, None), ("b", 1, 20.000001, 25.0, None), ("c", 1, 19.0, 40.0, None)),
        *(("a", 2, 5.0, 6.0, None), ("b", 2, 7.0, 8.0, None), ("t", None, 1.0, 1.0, None), ("u", 3, 1.0, 1.0, None)),
    )
    assert first["duel"] == [["c"], ["a", "b"]] and first["generative"] == [["b"], ["a"], ["c"]]
    assert (first["same_order"], second["same_order"]) == (False, True)
    assert "c < a = b" in plain(tables.ranked([first, second]))
    (one,) = rank(("a", 1, 20.0, 31.0, 0.1), ("b", 1, 21.0, 30.0, 0.1))
    assert one["same_order"] is None and one["not_distinguishable"] == [["b", "a"]]
    assert re.search("b ~ a +not distinguishable", plain(tables.ranked([one])))
    (one,) = rank(("a", 1, 20.0, 31.0, 0.001), ("b", 1, 21.0, 30.0, 0.001))
    assert one["same_order"] is False and one["not_distinguishable"] == []
