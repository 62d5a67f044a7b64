"""Networks of random-token noise in the harness: requests of every kind, ranks and resumed runs give the plain numbers.

`duel` with a `noise_seed`, and `duel_seeds`, on a tiny Duo and a tiny DiffusionGemma.
"""

import dataclasses

import dit_reference
import gemma_reference
import pytest
from harness_requests import ask, cached, text_log_prob
from harness_runs import TORCHRUN, evaluate, launch, read, write_task
from lm_eval.api.model import CachingLM

from lm_eval_duel import Duel
from lm_eval_duel.core.windows import Window
from lm_eval_duel.errors import DuelError
from lm_eval_duel.harness.lm import DuelMDM
from lm_eval_duel.harness.stats import RunStats
from lm_eval_duel.results import trace
from lm_eval_duel.text.annotated import Gap

TEXTS = [("a b b a a b a",), ("b a",), ("a",), ("",), ("b b b a a a b b a b",), ("b a",), ("a b a a b",)]
LONG = [("a b b a b a a b a b b b a a a b b a b",), ("b a a",), ("b a b b a a b b b a b b a b a a b a a b",)]
GAPS = [("a b", Gap(" b a", " b")), ("", Gap("b a b", " a a")), ("b", " a b a")]
PROMPTS = [("a b", {"max_gen_toks": 4}), ("", {"max_gen_toks": 6}), ("b", {"max_gen_toks": 4, "do_sample": True})]
ONE = {"noise_seed": 3}
SEEDS = {"estimator": "duel_seeds", "noise_seed": 3, "noise_seeds": 4}
RULES = {"duo": {"rule": "threshold:mu=0.4", "block": 4}, "gemma": {"rule": "greedy"}}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    duo, _ = dit_reference.write(tmp_path_factory.mktemp("duo"), "duo")
    dit_reference.words(12).save_pretrained(duo)
    return {"duo": duo, "gemma": gemma_reference.write(tmp_path_factory.mktemp("gemma"))}


@pytest.fixture(params=["duo", pytest.param("gemma", marks=pytest.mark.slow)])
def model(request, folders):
    """A function of other model args: the harness's model of one network."""
    fixed = {"pretrained": folders[request.param], "device": "cpu", **RULES[request.param]}
    return lambda **other: DuelMDM(**fixed, **other)


def plain(lm, windows):
    """Their scores outside the harness, a window a call."""
    rule, block = lm.options.rule, lm.estimator.block
    arguments = dataclasses.asdict(lm.options.estimator_args)
    duel = Duel(lm.denoiser, rule, block, batch_size=1, estimator=lm.estimator.name, **arguments)
    scores = []
    for window in windows:
        scores += duel.log_prob([window])
    return scores


def windows_of(lm, texts):
    """The windows of all texts."""
    windows = []
    for (text,) in texts:
        windows += lm.text.windows(text)
    return windows


def near(nats):
    """Float noise: these networks turn a last bit of a matrix product into 1e-4 nats of a window."""
    return pytest.approx(nats, rel=0, abs=5e-4)


def rolling(lm, texts=TEXTS):
    return [float(value) for value in lm.loglikelihood_rolling(ask("loglikelihood_rolling", *texts))]


def value_of(lm):
    """The entry of the results file for the estimator's own value."""
    return lm.get_model_info()["duel"]["tasks"]["toy"]["values"][lm.estimator.name]


@pytest.mark.parametrize("spec", [ONE, SEEDS], ids=["one seed", "seeds"])
def test_texts_and_gaps_have_the_plain_numbers(model, spec):
    lm = model(**spec)

    for (text,), value in zip(TEXTS, rolling(lm), strict=True):
        assert value == near(sum(score.log_prob for score in plain(lm, lm.text.windows(text))))

    if lm.denoiser.family == "diffusion-gemma":  # a canvas never sees what follows it
        with pytest.raises(DuelError, match="suffix"):
            lm.loglikelihood(ask("loglikelihood", *GAPS))
        return
    answers = lm.loglikelihood(ask("loglikelihood", *GAPS))
    gaps = plain(lm, [lm.text.pair(*gap) for gap in GAPS])
    for (value, is_greedy), score in zip(answers, gaps, strict=True):
        assert value == near(score.log_prob)
        assert is_greedy == score.is_greedy
    [unseen] = plain(lm, [lm.text.pair("a b", " b a")])
    assert abs(gaps[0].log_prob - unseen.log_prob) > 1e-3, "the suffix is seen"


def test_a_trace_has_the_order_whose_replay_gives_the_numbers(model, tmp_path):
    lm = model(**ONE, trace=str(tmp_path / "t.jsonl"))

    values = rolling(lm)

    lines = trace.read(tmp_path / "t.jsonl")
    assert sum(line["log_prob"] for line in lines) == near(sum(values))
    windows = [window for window in windows_of(lm, TEXTS) if window.target]
    replayed = lm.estimator.replay(windows, [line["reveal_steps"] for line in lines])
    for line, score in zip(lines, replayed, strict=True):
        assert line["token_logprobs"] == pytest.approx(score.token_logprobs, abs=1e-4)


@pytest.mark.parametrize("spec", [ONE, SEEDS], ids=["one seed", "seeds"])
def test_generated_texts_are_scored_under_the_noise_that_drew_them(model, spec, tmp_path):
    """Also beside `duel_seeds`, whose texts are those of its first seed; the response cache keeps them."""
    lm = model(**spec, trace=str(tmp_path / "t.jsonl"))

    texts = cached(lm, tmp_path).generate_until(ask("generate_until", *PROMPTS))

    duel = model(**ONE).estimator
    lines = trace.read(tmp_path / "t.jsonl")
    for line, text, (prompt, settings) in zip(lines, texts, PROMPTS, strict=True):
        context = lm.text.prompt(prompt, settings["max_gen_toks"]).context
        [score] = duel.log_prob([Window(context, tuple(line["ids"]), (), line["tail"])])
        assert line["text"] == text
        assert line["log_prob"] == near(score.log_prob)
        assert line["reveal_steps"] == list(score.reveal_steps)
        assert score.is_greedy or settings.get("do_sample")

    again = cached(model(**spec), tmp_path)
    assert again.generate_until(ask("generate_until", *PROMPTS)) == texts
    assert again.lm.evaluation.stats.counts["answers_from_cache"] == len(PROMPTS)
    assert model(**spec).generation_spec["noise_seed"] == "3"


def test_a_cache_is_of_one_noise(model, tmp_path):
    rolling(cached(model(**ONE), tmp_path))
    for other in ({"noise_seed": 4}, SEEDS):
        with pytest.raises(DuelError, match="noise_seed"):
            CachingLM(model(**other), str(tmp_path / "c_rank0.db"))


@pytest.mark.parametrize("spec", [ONE, SEEDS], ids=["one seed", "seeds"])
def test_an_interrupted_run_goes_on_with_the_same_numbers(model, spec, tmp_path):
    """The values, their errors and those of the other values, and no window is scored twice."""
    whole = model(**spec, max_batch_size=1)
    values = rolling(whole, LONG)
    broken = cached(model(**spec, max_batch_size=1), tmp_path)
    stream = broken.lm.estimator.stream

    class Stop(Exception):
        pass

    def stopped(windows, **options):
        for count, finished in enumerate(stream(windows, **options)):
            if count == 2:
                raise Stop
            yield finished

    with pytest.MonkeyPatch.context() as patch, pytest.raises(Stop):
        patch.setattr(broken.lm.estimator, "stream", stopped)
        rolling(broken, LONG)

    again = cached(model(**spec), tmp_path)
    assert rolling(again, LONG) == near(values)
    assert again.lm.estimator.counts.windows == len(windows_of(whole, LONG)) - 2

    resumed = value_of(again.lm)
    uninterrupted = value_of(whole)
    assert resumed.pop("seeds", []) == near(uninterrupted.pop("seeds", []))
    assert resumed.keys() == uninterrupted.keys()
    for name, value in uninterrupted.items():
        expected = pytest.approx(value, rel=1e-4) if isinstance(value, float) else value
        assert resumed[name] == expected, name


@pytest.mark.parametrize("spec", [ONE, SEEDS], ids=["one seed", "seeds"])
def test_two_ranks_add_up_to_one(model, spec):
    """Totals of seeds are added seed by seed, so errors are those of one process."""
    whole = model(**spec)
    values = rolling(whole)

    total = RunStats(ranks=0)
    for rank in range(2):
        lm = model(**spec)
        requests = ask("loglikelihood_rolling", *TEXTS)[rank::2]
        assert lm.loglikelihood_rolling(requests) == near(values[rank::2])
        total.merge(lm.evaluation.summary())

    stderr = whole.evaluation.summary().tasks["toy"].total.stderr
    expected = None if spec is ONE else near(stderr)  # one seed has no error
    assert total.tasks["toy"].total.stderr == expected


# ---------------------------------------------------------------- the bundled network, as a command


@pytest.mark.slow
@pytest.mark.parametrize("spec", ["noise_seed=3", "estimator=duel_seeds,noise_seeds=3"])
def test_ranks_print_what_one_prints_and_three_go_on_from_two(spec, tmp_path):
    texts = ("We the people", "My fellow Americans", "Peace", "The union is strong tonight", "God bless you all")
    file = write_task(tmp_path, "few", texts)
    model = f"pretrained=demo-duo,rule=greedy,block=4,{spec}"
    whole = evaluate("few", model, folders=[str(tmp_path)])
    values = {int(line["doc_id"]): text_log_prob(line) for line in whole["samples"]["few"]}
    arguments = ("lm_eval", "--model", "duel-mdm", "--tasks", file, "--device", "cpu", "--log_samples")
    arguments += ("--model_args", model, "--use_cache", str(tmp_path / "c"))
    for count, limit, windows in ((2, 2, 2), (3, 5, 3)):
        out = tmp_path / str(count)
        options = ("--limit", str(limit), "--output_path", str(out))
        status, said = launch(TORCHRUN, count, *arguments, *options)
        assert status == [0], said[-3000:]
        results, samples = read(out, "few")
        assert len(samples) == limit
        for line in samples:
            assert text_log_prob(line) == near(values[int(line["doc_id"])])
        assert results["config"]["duel"]["windows"] == windows, "three were not in the cache"

    of_ranks = results["config"]["duel"]["tasks"]["few"]["values"]
    of_one = whole["config"]["duel"]["tasks"]["few"]["values"]
    for name, value in of_one.items():
        assert of_ranks[name].keys() == value.keys()
        assert of_ranks[name]["log_prob"] == near(value["log_prob"])
        stderr = value.get("stderr")
        assert of_ranks[name].get("stderr") == (None if stderr is None else pytest.approx(stderr, rel=1e-4))
