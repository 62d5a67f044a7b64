"""Generation under the spec that is scored: stops, seeds, temperature, and the sample's own log-probability."""

import itertools
import json
import math
import shutil
import subprocess
import sys
from pathlib import Path

import lm_eval
import pytest
import tiny
import torch
from lm_eval import simple_evaluate
from lm_eval.tasks import TaskManager
from toys import BlockCausal, Toy

from lm_eval_duel import denoisers, rules
from lm_eval_duel.core.windows import Window
from lm_eval_duel.demo import resolve as demo_folder
from lm_eval_duel.denoisers.wrappers.warpers import Warped
from lm_eval_duel.errors import DuelError
from lm_eval_duel.estimators.duel import DuelEstimator
from lm_eval_duel.harness import trace
from lm_eval_duel.harness.generation import key_of
from lm_eval_duel.harness.lm import DuelMDM
from lm_eval_duel.harness.versions import request as make_request
from lm_eval_duel.text.generation import KNOWN, LENGTHS, OTHERS, Settings

NETWORKS = [Toy(length=9, seed=1), Toy(length=9, seed=2, honours_padding=False), BlockCausal(block=2, length=9, seed=3)]


def same(drawn, scored, tolerance=1e-9):
    assert drawn.reveal_steps == scored.reveal_steps and drawn.nfe == scored.nfe
    assert drawn.token_logprobs == pytest.approx(scored.token_logprobs, abs=tolerance)


@pytest.mark.parametrize(
    ("toy", "rule"),
    [(NETWORKS[n], rule) for n, rule in enumerate(["greedy", "margin:k=2", "threshold:mu=0.5"])]
    + [(NETWORKS[n], "klass:mu=0.4:nu=0.3") for n in (0, 2)],
)
def test_a_sample_that_stopped_is_scored_with_what_is_left_as_tail(toy, rule):
    duel = DuelEstimator(toy, rule, 2)
    asked = []

    def stop(index, tokens):
        asked.append((index, tokens))
        return 2 in tokens

    drawn = duel.sample([(1,), (0, 2), ()] * 8, 6, seed=5, stop=stop)
    whole = duel.sample([(1,), (0, 2), ()] * 8, 6, seed=5)
    assert len({len(one.tokens) for one in drawn}) > 1
    for n, (one, all_of_it) in enumerate(zip(drawn, whole, strict=True)):
        context = ((1,), (0, 2), ())[n % 3]
        assert one.tokens == all_of_it.tokens[: len(one.tokens)] and one.tail == 6 - len(one.tokens)
        if one.tail:
            assert 2 in one.tokens and 2 not in one.tokens[:-2]
        if (len(context) + len(one.tokens)) % 2 == 0 or toy.attention != "block_causal":
            same(one, duel.log_prob([Window(context, one.tokens, (), one.tail)])[0])
    assert all(len(tokens) < 6 for _, tokens in asked)  # nothing is left to stop at the end


@pytest.mark.parametrize("toy", NETWORKS)
def test_stopping_neither_row_changes_another(toy):
    duel = DuelEstimator(toy, "greedy", 2)
    contexts = [(t, u) for t, u in itertools.product(range(3), repeat=2)]
    some = duel.sample(contexts, 6, seed=1, stop=lambda index, tokens: index % 2 == 0)
    whole = duel.sample(contexts, 6, seed=1)
    assert [len(one.tokens) for one in some] == [2 if n % 2 == 0 else 6 for n in range(9)]
    for one, other in list(zip(some, whole, strict=True))[1::2]:
        assert one.tokens == other.tokens
        same(one, other)
    small = DuelEstimator(toy, "greedy", 2, batch_size=1).sample(contexts, 6, seed=1, stop=lambda n, tokens: n % 2 == 0)
    assert [one.tokens for one in small] == [one.tokens for one in some]


# ---------------------------------------------------------------- temperature, top-k, top-p


def by_hand(logits, temperature, top_k, top_p):
    """The distribution of one position by its description, token after token."""
    scaled = (logits / temperature).softmax(0).tolist()
    order = sorted(range(len(scaled)), key=lambda v: (-scaled[v], v))[: top_k or len(scaled)]
    mass, kept = sum(scaled[v] for v in order), []
    for v in order:
        if not kept or sum(scaled[u] for u in kept) / mass < top_p:
            kept.append(v)
    total = sum(scaled[v] for v in kept)
    return [scaled[v] / total if v in kept else 0.0 for v in range(len(scaled))]


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"),
    [(0.5, None, 1.0), (2.0, None, 1.0), (1.0, 2, 1.0), (1.0, None, 0.6), (0.7, 2, 0.8)],
)
def test_tempered_distributions_by_hand(temperature, top_k, top_p):
    toy = Toy(tokens=4, length=3, seed=6)
    tempered = Warped(toy, temperature, top_k, top_p)
    for context in itertools.product(range(4), repeat=2):
        logits = toy.features(torch.tensor([[*context, 4]]), None)[0, 2, :4]
        wanted = by_hand(logits, temperature, top_k, top_p)
        found = DuelEstimator(tempered, "greedy", 1).log_prob([Window(context, (v,)) for v in range(4)])
        assert [math.exp(one.log_prob) for one in found] == pytest.approx(wanted, abs=1e-12)


@pytest.mark.parametrize("base", NETWORKS)
def test_a_tempered_network_is_a_law_like_any_other(base):
    tempered = Warped(base, 0.7, 2)
    duel = DuelEstimator(tempered, "greedy", 2)
    strings = [Window((1,), s) for s in itertools.product(range(3), repeat=3)]
    assert math.fsum(math.exp(s.log_prob) for s in duel.log_prob(strings)) == pytest.approx(1, abs=1e-9)
    for one in duel.sample([(1,)] * 20, 4, seed=2):
        same(one, duel.log_prob([Window((1,), one.tokens)])[0])
    plain = DuelEstimator(base, "greedy", 2).sample([(1,), (0, 2)], 4, do_sample=False)
    assert [one.tokens for one in duel.sample([(1,), (0, 2)], 4, do_sample=False)] == [one.tokens for one in plain]
    assert tempered.describe()["warpers"] == "temperature=0.7, top_k=2"


def test_temperatures_that_are_none():
    for name, values in {"temperature": (-1, 1e-45, 1e39, math.nan), "top_k": (-1,), "top_p": (1.5,)}.items():
        for value in values:
            with pytest.raises(DuelError, match=name):
                Settings.from_arguments({name: value, "do_sample": True})


# ---------------------------------------------------------------- what a task asks for


def test_settings_of_a_task():
    assert Settings.from_arguments({}) == Settings((), 256, 0.0)
    assert Settings.from_arguments({"until": "\n", "max_new_tokens": 8}) == Settings(("\n",), 8, 0.0)
    assert Settings.from_arguments({"until": ["a", ""], "do_sample": True}) == Settings(("a",), 256, 1.0)
    assert Settings.from_arguments({"temperature": 0.7, "top_p": 0.9}) == Settings((), 256, 0.7, None, 0.9)
    assert Settings.from_arguments({"do_sample": False, "temperature": 0.7, "top_p": 0.9}) == Settings((), 256, 0.0)
    assert Settings.from_arguments({"do_sample": True, "top_k": 5}).description == "sampling, temperature=1, top_k=5"
    with pytest.raises(DuelError, match=r"Unknown generation setting 'temprature'\. Did you mean temperature\?"):
        Settings.from_arguments({"temprature": 1})
    assert Settings.from_arguments({"do_sample": "false", "temperature": 1, "num_beams": 1}).description == "argmax"
    assert Settings.from_arguments({"max_gen_toks": 5, "max_new_tokens": 9}).length == 5
    with pytest.raises(DuelError, match="'max_gen_toks' is a whole number, at least 1; got '0'"):
        Settings.from_arguments({"max_gen_toks": 0})
    with pytest.raises(DuelError, match="num_beams must be 1 here"):
        Settings.from_arguments({"num_beams": 4})


VALUES = (
    *(0, 1, 5, -1, 10**30, 0.5, -0.5, 2.7, 1e-45, 1e300, math.nan, math.inf, True, False, None, "", "none", "warm"),
    *("0.7", "5", [], ["a"], [5], [["a"]], [None], {}, {"a": 1}, (), b"a", {"a"}),
)
GOOD = {  # the values of VALUES that a setting takes
    "until": ("", "none", "warm", "0.7", "5", [], ["a"], ()),
    "do_sample": (0, 1, True, False, "", "none"),
    "temperature": (0, 1, 5, 0.5, 2.7, "", "none", "0.7", "5"),
    "top_k": (0, 1, 5, "", "none", "5"),
    "top_p": (1, 0.5, 1e-45, "", "none", "0.7"),
    "num_beams": (1, True),
    **dict.fromkeys(LENGTHS, (1, 5, "", "none", "5")),
}


@pytest.mark.parametrize("sampled", [{}, {"do_sample": True}, {"do_sample": False}])
def test_every_value_of_a_setting_is_taken_or_refused_by_its_name(sampled, subtests):
    """Whether it is read or not: a wrong value is a mistake under decoding too."""
    for name in (*KNOWN, *OTHERS):
        good = [repr(value) for value in (*GOOD.get(name, ()), None)]
        with subtests.test(name):
            for value in VALUES:
                asked = {**sampled, name: value}
                if repr(value) in good or (name in OTHERS and value == OTHERS[name][0]):
                    settings = Settings.from_arguments(asked)
                    assert settings == Settings.from_arguments(dict(reversed(asked.items()))) and hash(settings)
                else:
                    with pytest.raises(DuelError, match=rf"\b{name}\b.*(got|not) "):
                        Settings.from_arguments(asked)


def test_settings_that_are_no_names_with_values():
    for wrong in (None, [], "temperature=1", 5):
        with pytest.raises(DuelError, match="generation_kwargs are names with values, such as max_gen_toks: 64; got "):
            Settings.from_arguments(wrong)
    for wrong in (5, None, ("top_k",)):
        with pytest.raises(DuelError, match="Unknown generation setting"):
            Settings.from_arguments({wrong: 1})


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"until": 5}, "'until'"),
        ({"max_length": 9}, "max_length"),
        ({"seeds": 5}, "Unknown generation setting 'seeds'"),
    ],
)
def test_what_is_wrong_with_a_setting_names_its_task(folder, asked, message):
    lm = model(folder)
    requests = [*ask("a b", max_gen_toks=8), *ask("c", task="second", **{"max_gen_toks": 8, **asked})]
    with pytest.raises(DuelError) as caught:
        lm.generate_until(requests, disable_tqdm=True)
    assert str(caught.value).startswith(f"Request of task second, document 0: {message}")
    assert lm.run.sampler.counts.forwards == 0  # nothing was generated


def test_what_does_not_fit_is_found_before_the_first_text(folder):
    lm = model(folder)
    for length in (64, 10**15):
        requests = [*ask("a b", max_gen_toks=8), *ask("c", task="second", max_gen_toks=length)]
        with pytest.raises(DuelError, match=f"task second, document 0: {length} positions to generate"):
            lm.generate_until(requests, disable_tqdm=True)
    framed = model(folder, bos="none")
    framed.denoiser.shift = 1  # needs a token before the first
    with pytest.raises(DuelError, match="task second, document 0: Window 0 needs a context"):
        framed.generate_until([*ask("a", max_gen_toks=8), *ask("", task="second", max_gen_toks=4)], disable_tqdm=True)
    assert lm.run.sampler.counts.forwards == framed.run.sampler.counts.forwards == 0


def test_what_has_no_effect_is_said():
    for asked, notes in (
        ({}, []),
        ({"do_sample": False, "temperature": 1, "top_p": 1.0, "top_k": 0}, []),  # what stock tasks say
        ({"do_sample": True, "temperature": 0.7, "top_k": 5, "max_new_tokens": 256, "max_gen_toks": 256}, []),
        ({"temperature": 0, "do_sample": False}, []),
        (
            {"do_sample": False, "temperature": 0.7, "top_p": 0.9},
            ["temperature=0.7 and top_p=0.9"],
        ),
        ({"top_k": 5}, ["top_k=5"]),
        ({"do_sample": True, "temperature": 0}, ["temperature=0"]),
        (
            {"max_gen_toks": 256, "max_new_tokens": 64, "max_tokens": 64},
            ["max_gen_toks=256 is used and max_new_tokens=64, max_tokens=64"],
        ),
    ):
        found = Settings.from_arguments(asked).notes
        assert len(found) == len(notes) and all(map(str.startswith, found, notes)), asked


def test_what_has_no_effect_is_said_once_with_its_tasks(folder, caplog):
    asked = {"do_sample": False, "temperature": 0.7, "max_gen_toks": 4}
    requests = [*ask("a b", "c", **asked), *ask("a b", "c", task="second", **asked), *ask("d", max_gen_toks=4)]
    model(folder).generate_until(requests, disable_tqdm=True)
    (said,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert said.startswith("generation settings of toy and second: temperature=0.7 has no effect, since do_sample is")


def test_a_law_with_one_token_in_every_cell_is_left_to_right_and_said(folder, caplog):
    whole = ["threshold:mu=0.5", "entropy_bound:gamma=0.1"]
    only = Warped(Toy(length=9, seed=1), top_k=1)
    for rule in ("greedy", "margin", "log_margin", "entropy", *whole):
        (one,) = DuelEstimator(only, rule, 4).sample([(1,)], 4, do_sample=False)
        assert one.reveal_steps == ((0, 0, 0, 0) if rule in whole else (0, 1, 2, 3))
        assert only.ties(DuelEstimator(only, rule, 4).rule).startswith("top_k=1 leaves one token in every position")
    assert only.ties(rules.parse("right_to_left")) is None  # an order of its own
    greedy = rules.parse("greedy")
    assert Warped(Toy(), 0.5, 2, 0.4).ties(greedy) is None
    assert Warped(Toy(), top_p=0.3).ties(greedy).startswith("top_p=0.3 leaves one token")  # of three

    for rule, said in (("greedy", True), ("left_to_right", False)):
        caplog.clear()
        lm = model(folder, rule=rule)
        lm.generate_until(ask("a b", "c", do_sample=True, top_k=1, max_gen_toks=4), disable_tqdm=True)
        warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
        assert len(warnings) == said
    assert "with probability 1, so all positions tie" in str(Warped(Toy(), top_k=1).ties(greedy))


def test_prompts_that_are_cut_are_said(folder, caplog):
    model(folder).generate_until(ask(" ".join("abcdefghijklmnopqrstuvwxyz"), max_gen_toks=20), disable_tqdm=True)
    assert "1 prompts were truncated from the left to make room for max_gen_toks positions" in caplog.text


def test_numbers_of_settings_are_said_in_full():
    assert Settings.from_arguments({"temperature": 0.12345678, "top_p": 0.1234567}).description == (
        "sampling, temperature=0.12345678, top_p=0.1234567"
    )


@pytest.mark.parametrize("temperature", [1e-20, 1e20])
def test_the_coldest_and_the_hottest_temperature_are_laws(temperature):
    toy = Toy(tokens=3, length=5, seed=2)
    toy.out = toy.out.float()
    toy.embed, toy.mix = toy.embed.float(), toy.mix.float()
    duel = DuelEstimator(Warped(toy, temperature), "greedy", 2)
    strings = [Window((1,), string) for string in itertools.product(range(3), repeat=2)]
    assert math.fsum(math.exp(one.log_prob) for one in duel.log_prob(strings)) == pytest.approx(1, abs=1e-4)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny.checkpoint(tmp_path_factory.mktemp("bert"), "bert", length=32)


def model(folder, **arguments):
    return DuelMDM(**{"pretrained": folder, "rule": "greedy", "block": 4, "device": "cpu", **arguments})


def ask(*prompts, repeats=1, task="toy", **settings):
    found = [
        make_request("generate_until", {}, (prompt, settings), task, n, repeats) for n, prompt in enumerate(prompts)
    ]
    return [request for request in found for _ in range(repeats)]


def test_decoding_is_what_is_greedy_promises(folder):
    lm = model(folder)
    for length in (1, 3, 8):
        texts = lm.generate_until(ask("a b", "the of", max_gen_toks=length), disable_tqdm=True)
        for prompt, text in zip(("a b", "the of"), texts, strict=True):
            (_, greedy), (_, other) = lm.loglikelihood(
                [
                    make_request("loglikelihood", {}, (prompt, " " + continuation), "toy", 0, 1)
                    for continuation in (text, text.replace(text.split()[0], "q" if text.split()[0] != "q" else "r", 1))
                ],
                disable_tqdm=True,
            )
            assert len(lm.tok_encode(text)) == length, "choose another seed"
            assert greedy and not other


def test_samples_depend_on_task_document_and_repeat_alone(folder):
    settings = {"max_gen_toks": 8, "do_sample": True, "temperature": 9.0}  # the random network is all but certain
    prompts = ("a b", "the of", "c", "a b")
    base = model(folder).generate_until(ask(*prompts, repeats=3, **settings), disable_tqdm=True)
    assert base == model(folder, batch_size=3).generate_until(ask(*prompts, repeats=3, **settings), disable_tqdm=True)
    assert len(set(base[:3])) > 1 and base[0] != base[9]  # repeats, and documents of one prompt
    second = ask(*prompts, repeats=3, **settings)[3:6]
    assert model(folder).generate_until(second, disable_tqdm=True) == base[3:6]  # as on another rank
    assert base != model(folder, draw_seed=1).generate_until(ask(*prompts, repeats=3, **settings), disable_tqdm=True)
    assert base != model(folder).generate_until(ask(*prompts, repeats=3, task="t", **settings), disable_tqdm=True)
    assert len({key_of(t, d, i, r) for t in ("a", "b") for d in range(5) for i in range(5) for r in range(5)}) == 250


@pytest.mark.parametrize("settings", [{}, {"do_sample": True}, {"do_sample": True, "temperature": 0.5, "top_k": 5}])
def test_a_trace_holds_each_sample_with_its_log_probability(folder, tmp_path, settings):
    lm = model(folder, trace=str(tmp_path / "t.jsonl"))
    texts = lm.generate_until(
        ask("a b", "the of and c", max_gen_toks=8, until=["e", "f"], **settings), disable_tqdm=True
    )
    records = trace.read(tmp_path / "t.jsonl")
    asked = Settings.from_arguments({"max_gen_toks": 8, "until": ["e", "f"], **settings})
    duel = DuelEstimator(asked.denoiser(lm.denoiser), "greedy", 4)
    for prompt, text, record in zip(("a b", "the of and c"), texts, records, strict=True):
        assert (record["text"], record["generated"]) == (text, asked.description) and len(record["ids"]) + record[
            "tail"
        ] == 8
        window = Window((2, *lm.tok_encode(prompt)), record["ids"], (3,), record["tail"])
        scored = duel.log_prob([window])[0]
        assert scored.near_ties or list(scored.reveal_steps) == record["reveal_steps"]
        assert scored.near_ties or scored.log_prob == pytest.approx(record["log_prob"], abs=1e-4)
        assert not {"e", "f"} & set(text.split())
    assert lm.get_model_info()["duel"]["generated"] == [asked.description]
    long = " ".join("abcdefghijklmnopqrstuvwxyz")
    lm.generate_until(ask("c", long, max_gen_toks=20, repeats=3, task="again", **settings), disable_tqdm=True)
    again = [r for r in trace.read(tmp_path / "t.jsonl") if r["task"] == "again"]
    assert [(r["doc"], r["repeat"]) for r in again] == list(itertools.product(range(2), range(3)))
    assert lm.text.cut_contexts == 3


def test_prompts_too_long_are_cut_from_the_left_and_counted(folder):
    lm = model(folder)
    long = " ".join("abcdefghijklmnopqrstuvwxyz")
    texts = lm.generate_until(ask(long, max_gen_toks=20), disable_tqdm=True)
    assert texts == model(folder).generate_until(ask("q r s t u v w x y z", max_gen_toks=20), disable_tqdm=True)
    assert lm.text.cut_contexts == 1
    with pytest.raises(DuelError, match="64 positions to generate do not fit"):
        lm.generate_until(ask("a", max_gen_toks=64), disable_tqdm=True)


def test_a_response_cache_keeps_generations_of_other_laws_apart(folder, tmp_path):
    from lm_eval.api.model import CachingLM

    def texts(repeats=1, settings=None, **arguments):
        cached = CachingLM(model(folder, **arguments), str(tmp_path / f"{arguments['rule']}.db"))
        return cached.generate_until(ask("a b", "c", repeats=repeats, max_gen_toks=8, **(settings or {})))

    elbo = {"estimator": "elbo", "mc_samples": 8, "rule": "greedy"}  # its own spec has no rule
    decoded = texts(**elbo)
    assert texts(**elbo) == decoded == model(folder).generate_until(ask("a b", "c", max_gen_toks=8))
    lm = model(folder, **{**elbo, "rule": "right_to_left"})
    other = CachingLM(lm, str(tmp_path / "greedy.db")).generate_until(ask("a b", "c", max_gen_toks=8))
    assert other == model(folder, rule="right_to_left").generate_until(ask("a b", "c", max_gen_toks=8)) != decoded
    sampled = [texts(3, {"temperature": 9.0}, **elbo) for _ in range(2)]
    assert sampled[0] == sampled[1] and len(set(sampled[0])) > 2  # repeats stay apart


def test_what_is_selected_after_sampling_is_generated_as_it_is_scored(folder, tmp_path):
    """Texts without a trace need no log-probability; with one it is that of the text, over all orders."""
    settings = {"max_gen_toks": 6, "temperature": 9.0, "until": ["e"]}
    drawn = {"estimator": "sampled_confidence", "n": 2}
    lm, traced = model(folder, **drawn), model(folder, **drawn, trace=str(tmp_path / "t.jsonl"), batch_size=1)
    texts = lm.generate_until(ask("a b", "the of", repeats=2, **settings), disable_tqdm=True)
    assert texts == traced.generate_until(ask("a b", "the of", repeats=2, **settings), disable_tqdm=True)
    assert len(set(texts)) > 2 and lm.estimator.counts.rows < traced.estimator.counts.rows
    sampler = traced.estimator.with_denoiser(Settings.from_arguments(settings).denoiser(lm.denoiser))
    for record in trace.read(tmp_path / "t.jsonl"):
        prompt = (2, *lm.tok_encode(("a b", "the of")[record["doc"]]))
        [score] = sampler.log_prob([Window(prompt, record["ids"], (3,), record["tail"])])
        assert score.log_prob == pytest.approx(record["log_prob"], abs=1e-4)
        assert len(record["reveal_steps"]) == len(record["ids"]) and not record["token_logprobs"]
    assert lm.get_model_info()["duel"]["generated"] == ["sampling, temperature=9"]
    with pytest.raises(DuelError, match=r"task toy, document 0: confidence=untempered is .* use confidence=tempered"):
        lm.generate_until(ask("a b", do_sample=True, top_k=5), disable_tqdm=True)


def test_generation_under_a_bound_names_its_rule_and_counts(folder):
    lm = model(folder, estimator="elbo", mc_samples=8)
    lm.generate_until(ask("a b", max_gen_toks=8), disable_tqdm=True)
    info = lm.get_model_info()["duel"]
    assert info["generated"] == ["argmax, rule=greedy:k=1, block=4"] and info["tokens"] == 8


def test_the_end_of_text_ends_a_generation(folder):
    lm = model(folder)
    (text,) = lm.generate_until(ask("a b", max_gen_toks=8), disable_tqdm=True)
    first = lm.tok_encode(text)[1]
    lm.tokenizer.eos_token = tiny.WORDS[first]
    (cut,) = lm.generate_until(ask("a b", max_gen_toks=8), disable_tqdm=True)
    assert cut == tiny.WORDS[lm.tok_encode(text)[0]]


def test_a_temperature_among_the_model_args_is_scored_too(folder):
    plain, cool = model(folder), model(folder, temperature=3.0, top_k=9)
    assert cool.spec["warpers"] == "temperature=3, top_k=9" and cool.fingerprint != plain.fingerprint
    window = Window((2, 5), (6, 7, 8), (3,))
    wanted = DuelEstimator(Warped(plain.denoiser, 3.0, 9), "greedy", 4).log_prob([window])[0]
    assert cool.estimator.log_prob([window])[0].log_prob == pytest.approx(wanted.log_prob, abs=1e-4)
    assert wanted.log_prob != pytest.approx(plain.estimator.log_prob([window])[0].log_prob, abs=1e-2)


def test_a_chat_template_writes_its_bos_once(folder):
    lm = model(folder)
    lm.tokenizer.chat_template = "{{ '[CLS] ' }}{% for m in messages %}{{ m['content'] + ' ' }}{% endfor %}"
    prompt = lm.apply_chat_template([{"role": "user", "content": "a b"}])
    assert prompt == "[CLS] a b " and lm.chat_template(True) == lm.tokenizer.chat_template
    assert lm.text.prompt(prompt, 4) == lm.text.prompt("a b", 4)
    requests = [make_request("loglikelihood", {}, (text, "c d"), "toy", 0, 1) for text in (prompt, "a b ")]
    first, second = lm.loglikelihood(requests, disable_tqdm=True)
    assert first[0] == pytest.approx(second[0], abs=1e-4)
    assert lm.chat_template(False) == ""


# ---------------------------------------------------------------- the bundled checkpoints


@pytest.mark.parametrize("count", [8, pytest.param(100, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("name", "block", "rule"), [("demo-mdm", 32, "threshold:mu=0.6"), ("demo-bd", "auto", "greedy")]
)
def test_samples_are_scored_as_they_were_drawn(name, block, rule, count):
    """Law 2 through the public API: the same steps and nats within float noise, but where a pick was close."""
    denoiser = denoisers.load(name, device="cpu")
    duel = DuelEstimator(denoiser, rule, block)
    contexts = [(1,), (1, 300, 517)] * (count // 2)
    drawn = duel.sample(contexts, 24, seed=11)
    windows = [Window(context, one.tokens) for context, one in zip(contexts, drawn, strict=True)]
    close = [n for n, one in enumerate(drawn) if one.near_ties]
    for n, (one, scored) in enumerate(zip(drawn, duel.log_prob(windows), strict=True)):
        if n not in close:
            assert one.reveal_steps == scored.reveal_steps
            assert one.log_prob == pytest.approx(scored.log_prob, abs=1e-4)
    assert len(close) < count / 10 and len({one.tokens for one in drawn}) == count


@pytest.fixture(scope="module")
def demo():
    return DuelMDM(rule="greedy", block=32, device="cpu")


def test_is_greedy_is_true_exactly_for_what_is_decoded(demo):
    """Law 3 through the harness's model: the decoded ids, and each changed in one place."""
    prompts = ["The state of the", "We must", "My fellow Americans,"]
    for prompt in prompts:
        context = demo.text.encode(prompt)
        best = demo.run.sampler.sample([context], 6, do_sample=False)[0].tokens
        (text,) = demo.generate_until(ask(prompt, max_gen_toks=6, until=[]), disable_tqdm=True)
        assert text == demo.tokenizer.decode(best)
        others = [(*best[:n], best[n] + 1, *best[n + 1 :]) for n in range(6)]
        found = demo._loglikelihood_tokens([(None, context, list(ids)) for ids in (best, *others)])
        assert [greedy for _, greedy in found] == [True] + [False] * 6


TASK = """
task: toy_generation
dataset_path: json
dataset_kwargs:
  data_files:
    test: {folder}/toy.jsonl
output_type: generate_until
test_split: test
doc_to_text: "{{{{question}}}}"
doc_to_target: "{{{{answer}}}}"
generation_kwargs:
  until: ["."]
  max_gen_toks: 16
metric_list:
  - metric: exact_match
    aggregation: mean
    higher_is_better: true
metadata:
  version: 1.0
"""
STOCK = """
include: {stock}
task: stock_generation
dataset_path: json
dataset_name: null
dataset_kwargs:
  data_files:
    train: {folder}/sums.jsonl
    test: {folder}/sums.jsonl
tag: null
num_fewshot: 1
"""


@pytest.mark.slow
def test_generation_tasks_run_through_the_command_line(tmp_path):
    """A task of our own and the stock gsm8k on a fixture, two settings; what is printed is in the samples."""
    questions = [{"question": "The state of the union is", "answer": "strong"}, {"question": "We", "answer": "must"}]
    sums = [{"question": f"What is {n} and {n}?", "answer": f"It is {2 * n}.\n#### {2 * n}"} for n in (1, 2, 3)]
    for name, rows in (("toy", questions), ("sums", sums)):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "toy.yaml").write_text(TASK.format(folder=tmp_path))
    stock = Path(lm_eval.__file__).parent / "tasks" / "gsm8k" / "gsm8k.yaml"
    (tmp_path / "stock.yaml").write_text(STOCK.format(folder=tmp_path, stock=stock))
    command = [sys.executable, "-m", "lm_eval_duel", "run", "--include_path", str(tmp_path), "--device", "cpu"]
    command += ["--tasks", "toy_generation,stock_generation", "--model_args", f"block=8,trace={tmp_path}/t.jsonl"]
    command += ["--gen_kwargs", "max_gen_toks=16", "--output_path", str(tmp_path / "out"), "--log_samples"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "|toy_generation" in done.stdout and "|stock_generation" in done.stdout
    records = trace.read(tmp_path / "t.jsonl")
    assert [(r["task"], r["doc"]) for r in records] == [("stock_generation", n) for n in range(3)] + [
        ("toy_generation", n) for n in range(2)
    ]
    for task in ("toy_generation", "stock_generation"):
        (samples,) = (tmp_path / "out").rglob(f"samples_{task}_*.jsonl")
        for line in samples.read_text().splitlines():
            sample = json.loads(line)
            (record,) = (r for r in records if (r["task"], r["doc"]) == (task, int(sample["doc_id"])))
            assert sample["resps"][0][0] == record["text"] and record["generated"] == "argmax"


def test_chat_templates_system_instructions_and_turns(tmp_path):
    """--apply_chat_template, --system_instruction, --fewshot_as_multiturn: the prompt is what the template writes."""
    shutil.copytree(demo_folder("demo-mdm"), tmp_path / "chat")
    template = "{% for m in messages %}[{{ m['role'] }}] {{ m['content'] }}\n{% endfor %}[assistant] "
    (tmp_path / "chat" / "chat_template.jinja").write_text(template)
    (tmp_path / "sums.jsonl").write_text(
        "".join(json.dumps({"question": f"{n}+{n}?", "answer": f"It is {2 * n}."}) + "\n" for n in (1, 2, 3))
    )
    stock = Path(lm_eval.__file__).parent / "tasks" / "gsm8k" / "gsm8k.yaml"
    (tmp_path / "stock.yaml").write_text(STOCK.format(folder=tmp_path, stock=stock))
    run = simple_evaluate(
        model="duel-mdm",
        model_args=f"pretrained={tmp_path}/chat,block=8",
        device="cpu",
        tasks=["stock_generation"],
        task_manager=TaskManager(include_path=str(tmp_path), include_defaults=False),
        gen_kwargs="max_gen_toks=8",
        apply_chat_template=True,
        fewshot_as_multiturn=True,
        system_instruction="Add.",
        limit=2,
        bootstrap_iters=0,
    )
    assert run["config"]["duel"]["generated"] == ["argmax"]
    for sample in run["samples"]["stock_generation"]:
        lines = sample["arguments"][0][0].splitlines()
        roles = [line.split("]")[0] for line in lines if line.startswith("[")]
        assert roles == ["[system", "[user", "[assistant", "[user", "[assistant"] and lines[0] == "[system] Add."
        assert isinstance(sample["resps"][0][0], str)
