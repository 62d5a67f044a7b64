"""Scores during training: the numbers of `Duel.score`, the Trainer's own logging, and work shared by ranks."""

import importlib.util
import inspect
import itertools
import logging
import math
import statistics

import pytest
import tiny
import torch
from pages import ROOT
from simulated_ranks import use_rank

from lm_eval_duel import Duel, DuelCallback, DuelError, planned_tokens, training_metrics
from lm_eval_duel.library import training
from lm_eval_duel.rules.scores import Greedy

pytestmark = pytest.mark.usefixtures("one_load")
VALUE = "duel/greedy,block=3/bits_per_byte"
TEXTS = ["the a b of c", "a of the", "c d e f g h i of", "and the b of a"]


@pytest.fixture
def model():
    return tiny.network("bert").train()


def test_the_numbers_are_those_of_score(model):
    """Bits per byte over all texts; its error is that of a ratio of sums."""
    metrics = training_metrics(model, tiny.tokenizer(), TEXTS, rules=["greedy", "margin:k=2"], block=3)

    assert model.training
    assert len(metrics) == 4
    sizes = [len(text.encode()) for text in TEXTS]
    for rule in ("greedy", "margin:k=2"):
        scores = Duel.from_model(model, tiny.tokenizer(), rule=rule, block=3).score(TEXTS)
        bits = [-score.log_prob / math.log(2) for score in scores]
        rate = sum(bits) / sum(sizes)
        assert metrics[f"duel/{rule},block=3/bits_per_byte"] == pytest.approx(rate, rel=1e-5)

        deviations = []
        for bits_of_text, size in zip(bits, sizes, strict=True):
            deviations.append(bits_of_text - rate * size)
        error = statistics.stdev(deviations) / math.sqrt(len(TEXTS)) / statistics.mean(sizes)
        assert metrics[f"duel/{rule},block=3/bits_per_byte_stderr"] == pytest.approx(error, rel=1e-4)

    of_one_text = training_metrics(model, tiny.tokenizer(), TEXTS[:1], block=3, name="eval")
    assert list(of_one_text) == ["eval/greedy,block=3/bits_per_byte"]


@pytest.mark.parametrize(
    ("more", "label", "same"),
    [
        ({"sample": 1.0}, "greedy,two_phase,block=3", True),
        ({"cache": "dual"}, "greedy,block=3,cache=dual", False),
        pytest.param(
            {"temperature": 0.5, "top_k": 20},
            "greedy,block=3,temperature=0.5,top_k=20",
            False,
            marks=pytest.mark.slow,
        ),
    ],
)
def test_estimates_and_other_networks_carry_their_label(model, more, label, same):
    exact = training_metrics(model, tiny.tokenizer(), TEXTS, block=3)
    other = training_metrics(model, tiny.tokenizer(), TEXTS, block=3, **more)

    name = f"duel/{label}/bits_per_byte"
    assert set(other) <= {name, f"{name}_stderr"}
    assert (other[name] == pytest.approx(exact[VALUE], rel=1e-6)) == same


def test_what_defines_another_number_is_in_its_name(model):
    """And what changes no number, or says what the network is, is not."""
    given = {"exclude_ids": [9, 7], "autocast": torch.bfloat16, "windows": "harness", "grid": "row", "batch_size": 2}
    plain = {"cfg_scale": 0, "windows": "independent", "cache": "none", "mask_token_id": 4}
    named = training.check_arguments(TEXTS, sample=0.5, block="auto", **given)
    assert named == ["two_phase", "autocast=bfloat16", "exclude_ids=7+9", "grid=row", "windows=harness"]
    assert training.check_arguments(TEXTS, **plain) == []


def test_an_error_needs_two_texts_with_bytes(model):
    metrics = training_metrics(model, tiny.tokenizer(), ["", "a of"], block=3)
    assert list(metrics) == [VALUE]


def test_the_cost_is_known_before(model, caplog):
    caplog.set_level(logging.INFO)
    duel = Duel.from_model(model, tiny.tokenizer(), block=3)

    def metrics(texts, **more):
        return training_metrics(model, tiny.tokenizer(), texts, block=3, **more)

    evaluated = []
    for text in TEXTS[:3]:
        [window] = duel.windows(text)
        rows = duel.counts.rows
        duel.score([text])
        evaluated.append((duel.counts.rows - rows) * window.length)
        assert planned_tokens(duel, [text]) == evaluated[-1]

    budget = sum(evaluated[:2]) + 1
    assert metrics(TEXTS, token_budget=budget) == metrics(TEXTS[:2])
    metrics(TEXTS, token_budget=budget)
    warnings = [record for record in caplog.records if record.levelno == logging.WARNING and 2 in record.args]
    assert len(warnings) == 1  # a loop scores the same texts each time
    assert f"2 of 4 texts fit token_budget={budget} ({sum(evaluated[:2])} network tokens)" in caplog.text
    refusal = f"The first text takes {evaluated[0]} network tokens, more than token_budget=5"
    with pytest.raises(DuelError, match=refusal):
        metrics(TEXTS, token_budget=5)

    twice = [TEXTS[0], TEXTS[1], TEXTS[0], TEXTS[2]]  # equal windows are scored once
    assert metrics(twice, token_budget=planned_tokens(duel, twice)) == metrics(twice)

    under_cache = Duel.from_model(model, tiny.tokenizer(), block=3, cache="dual")
    assert planned_tokens(under_cache, TEXTS) < planned_tokens(duel, TEXTS)
    assert planned_tokens(duel, TEXTS[:1], sample=0.5) > planned_tokens(under_cache, TEXTS[:1])


# ---------------------------------------------------------------- ranks


def test_ranks_share_the_texts_and_their_errors(model, monkeypatch):
    whole = training_metrics(model, tiny.tokenizer(), TEXTS, block=3)
    shares = {}

    def as_rank(rank, texts):
        use_rank(monkeypatch, rank, 2, shares)
        return training_metrics(model, tiny.tokenizer(), texts, block=3)

    as_rank(0, TEXTS)
    assert [scored[0] for scored in shares[0][0][0]] == [0, 2]
    assert as_rank(1, TEXTS) == pytest.approx(whole, rel=1e-5)
    shares.clear()
    with pytest.raises(DuelError, match="mask token"):
        as_rank(0, ["a [MASK]", "b"])
    with pytest.raises(DuelError, match=r"Rank 0 could not score its texts: DuelError: Text 0: .* mask token"):
        as_rank(1, ["a [MASK]", "b"])


# ---------------------------------------------------------------- the Trainer


def trainer(model, folder, **arguments):
    from transformers import Trainer, TrainingArguments  # with peft and bitsandbytes: not while tests are collected

    rows = [{"input_ids": [2, 5 + n, 6, 7, 3], "labels": [-100, 6, 7, 8, -100]} for n in range(8)]
    settings = {"max_steps": 4, "per_device_train_batch_size": 2, "use_cpu": True, "save_strategy": "no"}
    options = TrainingArguments(str(folder), **settings, report_to="none", disable_tqdm=True, **arguments)
    return Trainer(model, options, train_dataset=rows, eval_dataset=rows, processing_class=tiny.tokenizer())


@pytest.mark.slow
def test_the_trainer_logs_the_numbers(model, tmp_path):
    from transformers import TrainerCallback

    reported = []

    class Reporter(TrainerCallback):
        """What wandb and others are: a callback that gets the logs."""

        def on_log(self, args, state, control, logs=None, **more):
            reported.append((state.global_step, dict(logs)))

    training_run = trainer(model, tmp_path, eval_strategy="steps", eval_steps=4, logging_steps=1)
    training_run.add_callback(Reporter())
    before = training_metrics(model, tiny.tokenizer(), TEXTS, block=3)
    training_run.add_callback(DuelCallback(training_run, TEXTS, every=2, block=3))
    training_run.train()

    scored = {step: logs for step, logs in reported if VALUE in logs}
    assert [step for step, logs in reported if VALUE in logs] == [2, 4], "once where a step is due and evaluated"
    assert [step for step, logs in reported if "loss" in logs] == [1, 2, 3, 4], "no loss is left out"
    history = [log for log in training_run.state.log_history if VALUE in log]
    assert history == [{**logs, "step": step} for step, logs in scored.items()]

    after = training_metrics(model, tiny.tokenizer(), TEXTS, block=3)
    assert scored[4][VALUE] == pytest.approx(after[VALUE], rel=1e-5)
    assert scored[2][VALUE] != pytest.approx(before[VALUE])


def test_what_the_callback_refuses(model, tmp_path):
    run = trainer(model, tmp_path)
    for wrong, named in (
        ({"every": None}, "every="),
        ({"every": None, "rules": ["gredy"]}, "'gredy'.*greedy"),
        ({"every": 0}, "'every' .*got .0"),
        ({"rules": ["gredy"]}, "'gredy'.*greedy"),
        ({"bolck": 4}, "'bolck'.*block"),
        ({"rules": "greedy"}, "'greedy'"),
        ({"rules": []}, "rules.* none"),
        ({"rules": "greedy, threshold,mu=0.9"}, r"rules=\['greedy', 'threshold:mu=0.9'\]"),
        ({"rules": ["threshold,mu=0.9"]}, "threshold:mu=0.9"),
        ({"rules": [3]}, "^rule must be"),
        ({"sample": 2.0}, "'sample' .*got .2"),
        ({"sample": 0.5, "cache": "dual"}, "sample=0.5 .*cache=dual"),
        ({"cache": "duel"}, "'duel'.*dual"),
        ({"block": 0}, "'block' .* got '0'"),
        ({"texts": "of the"}, r"texts=\['of the'\]"),
        ({"texts": []}, "texts.* none"),
        ({"texts": ["", ""]}, "empty texts only"),
        ({"token_budget": math.nan}, "token_budget.*nan"),
        ({"autocast": "bfloat16"}, "torch.bfloat16, or None; got 'bfloat16'"),
        ({"token_budget": 0}, "token_budget.*0"),
        ({"estimator": "elbo"}, "'estimator'.*from_model"),
        ({"estimator": "ar"}, "DuelCallback scores .*estimator=ar"),
    ):
        with pytest.raises(DuelError, match=named):
            DuelCallback(run, **{"texts": TEXTS, "every": 2, **wrong})
    with pytest.raises(AttributeError, match="scores"):
        DuelCallback(run, TEXTS, every=2).scores  # noqa: B018
    for wrong, named in (
        ({"evry": 2}, "'evry' of DuelCallback.*every"),
        ({"texts": ["of", None]}, "number 1 .*NoneType"),
        ({"texts": iter(TEXTS)}, "texts.*iterator"),
    ):
        with pytest.raises(DuelError, match=named):
            DuelCallback(run, **{"texts": TEXTS, "every": 2, **wrong})
    with pytest.raises(DuelError, match=r"texts.* none"):
        DuelCallback(run)
    run.processing_class = None
    with pytest.raises(DuelError, match="tokenizer="):
        DuelCallback(run, TEXTS, every=2)


@pytest.mark.parametrize("given", [(), (TEXTS,), (None, TEXTS), ("model", TEXTS), (object, TEXTS), (TEXTS, "model")])
def test_a_callback_without_a_trainer_names_the_call_for_other_loops(given, model):
    arguments = [model if each == "model" else each for each in given]
    with pytest.raises(DuelError, match=r"add_callback\(DuelCallback\(trainer.*Lightning.*training_metrics\("):
        DuelCallback(*arguments, every=2)


def test_a_trainer_and_texts_are_required():
    parameters = inspect.signature(DuelCallback).parameters.values()
    required = [parameter.name for parameter in parameters if parameter.default is parameter.empty]
    assert required == ["trainer", "texts", "arguments"]  # the last takes what is passed on


def test_tokens_are_planned_of_a_duel(model):
    with pytest.raises(DuelError, match="takes a Duel"):
        planned_tokens(model, TEXTS)


def test_a_network_without_its_tokenizer(model):
    with pytest.raises(DuelError, match=r"tokenizer.* None"):
        training_metrics(model, None, TEXTS, block=3)
    with pytest.raises(DuelError, match=r"tokenizer.* second argument; got a list"):
        training_metrics(model, TEXTS)
    with pytest.raises(DuelError, match="network first"):
        training_metrics(tiny.tokenizer(), model, TEXTS, block=3)


def test_a_rule_may_be_an_instance_and_a_number_a_text(model):
    by_name = training_metrics(model, tiny.tokenizer(), TEXTS, rules=["greedy:k=2"], block=3)
    by_instance = training_metrics(model, tiny.tokenizer(), TEXTS, rules=[Greedy(2)], block=3, token_budget="1e6")
    assert by_instance == pytest.approx(by_name)


def test_a_causal_network_is_to_be_saved(model):
    """No other call is suggested: `from_model` refuses it, too."""
    with pytest.raises(DuelError, match=r"save .*checkpoint with estimator=ar") as refused:
        training_metrics(model, tiny.tokenizer(), TEXTS, estimator="ar")
    assert "from_model" not in str(refused.value)


@pytest.mark.slow
def test_the_example_of_the_docs_learns(tmp_path):
    spec = importlib.util.spec_from_file_location("training_example", ROOT / "examples" / "training" / "train.py")
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)

    points = list(example.train(steps=40, every=20))

    assert [(point.step, point.way) for point in points] == [*itertools.product((0, 20, 40), example.WAYS)]
    for first, second in zip(points, points[3:], strict=False):
        change, low, high = second.change
        assert change == pytest.approx(second.value - first.value, abs=1e-6)
        assert low <= change <= high
        assert second.step == 40 or high < -1
    example.draw(points, str(tmp_path / "training.png"))
    assert (tmp_path / "training.png").stat().st_size > 1000
