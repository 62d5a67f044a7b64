"""Generation under the spec that is scored: stops, seeds, temperature, and the sample's own log-probability."""

import itertools
import math

import harness_requests
import pytest
import tiny
import torch
from toys import BlockCausal, Toy

from lm_eval_duel import fingerprint, rules
from lm_eval_duel.core.windows import Window
from lm_eval_duel.denoisers.filters import tie_warning, warped
from lm_eval_duel.errors import DuelError, UsageError
from lm_eval_duel.estimators.duel import DuelEstimator
from lm_eval_duel.harness.generation import key_of
from lm_eval_duel.harness.lm import DuelMDM
from lm_eval_duel.harness.requests import make_request
from lm_eval_duel.results import trace
from lm_eval_duel.text.generation import KNOWN, LENGTHS, OF_OTHER_BACK_ENDS, Settings

NETWORKS = [  # with a rule
    (Toy(length=9, seed=1), "klass:mu=0.4:nu=0.3"),
    (Toy(length=9, seed=2, honours_padding=False), "greedy"),
    (BlockCausal(block=2, length=9, seed=3), "threshold:mu=0.5"),
]


@pytest.mark.parametrize(("toy", "rule"), NETWORKS)
def test_a_sample_that_stopped_is_scored_with_what_is_left_as_tail(toy, rule):
    duel = DuelEstimator(toy, rule, 2)
    contexts = [(1,), (0, 2), ()] * 3
    lengths = []

    def stop(index, tokens):
        lengths.append(len(tokens))
        return 2 in tokens

    stopped = duel.sample(contexts, 6, seed=5, stop=stop)
    assert max(lengths) < 6, "nothing is left to stop at the end"
    assert len({len(sample.tokens) for sample in stopped}) > 1

    in_small_batches = DuelEstimator(toy, rule, 2, batch_size=1).sample(contexts, 6, seed=5, stop=stop)
    assert [sample.tokens for sample in in_small_batches] == [sample.tokens for sample in stopped]

    whole = duel.sample(contexts, 6, seed=5)
    for context, sample, without_stop in zip(contexts, stopped, whole, strict=True):
        length = len(sample.tokens)
        assert sample.tokens == without_stop.tokens[:length]
        assert sample.tail == 6 - length
        if sample.tail:
            assert 2 in sample.tokens
            assert 2 not in sample.tokens[:-2], "it is looked for after each block of two"
        ends_on_a_border = (len(context) + length) % 2 == 0
        if ends_on_a_border or toy.attention != "block_causal":
            [score] = duel.log_prob([Window(context, sample.tokens, (), sample.tail)])
            assert sample.reveal_steps == score.reveal_steps
            assert sample.nfe == score.nfe
            assert sample.token_logprobs == pytest.approx(score.token_logprobs, abs=1e-9)


# ---------------------------------------------------------------- temperature, top-k, top-p


def by_hand(logits, temperature, top_k, top_p):
    """The distribution of one position by its description, token after token."""
    p = (logits / temperature).softmax(0).tolist()
    most_probable_first = sorted(range(len(p)), key=lambda v: (-p[v], v))
    best = most_probable_first[: top_k or len(p)]
    mass = sum(p[v] for v in best)
    kept = []
    for v in best:
        if kept and sum(p[u] for u in kept) / mass >= top_p:
            break
        kept.append(v)
    total = sum(p[v] for v in kept)
    return [p[v] / total if v in kept else 0.0 for v in range(len(p))]


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"),
    [(0.5, None, 1.0), (2.0, None, 1.0), (1.0, 2, 1.0), (1.0, None, 0.6), (0.7, 2, 0.8)],
)
def test_tempered_distributions_by_hand(temperature, top_k, top_p):
    toy = Toy(tokens=4, length=3, seed=6)
    duel = DuelEstimator(warped(toy, temperature, top_k, top_p), "greedy", 1)
    for context in itertools.product(range(4), repeat=2):
        logits = toy.features(torch.tensor([[*context, 4]]), None)[0, 2, :4]
        assert next_token(duel, context) == pytest.approx(by_hand(logits, temperature, top_k, top_p), abs=1e-12)


def next_token(duel, context):
    """The probability of each of four tokens after a context."""
    scores = duel.log_prob([Window(context, (token,)) for token in range(4)])
    return [math.exp(score.log_prob) for score in scores]


def test_top_p_keeps_the_fewest_tokens_that_reach_it():
    toy = Toy(tokens=4, length=2)
    toy.features = lambda ids, real: torch.zeros(*ids.shape, 5)  # four tokens of probability 1/4
    for top_p, kept in ((0.25, 1), (0.5, 2), (0.75, 3), (0.76, 4)):
        duel = DuelEstimator(warped(toy, top_p=top_p), "greedy", 1)
        for token, probability in enumerate(next_token(duel, (0,))):
            assert (probability > 0) == (token < kept)


# ---------------------------------------------------------------- what a task asks for


def test_settings_of_a_task():
    assert Settings.from_arguments({}) == Settings((), 256, 0.0)
    assert Settings.from_arguments({"until": "\n", "max_new_tokens": 8}) == Settings(("\n",), 8, 0.0)
    assert Settings.from_arguments({"until": ["a", ""], "do_sample": True}) == Settings(("a",), 256, 1.0)
    assert Settings.from_arguments({"temperature": 0.7, "top_p": 0.9}) == Settings((), 256, 0.7, None, 0.9)
    assert Settings.from_arguments({"do_sample": False, "temperature": 0.7, "top_p": 0.9}) == Settings((), 256, 0.0)
    assert Settings.from_arguments({"do_sample": True, "top_k": 5}).description == "sampling, temperature=1, top_k=5"
    assert Settings.from_arguments({"do_sample": "false", "temperature": 1, "num_beams": 1}).description == "argmax"
    assert Settings.from_arguments({"max_gen_toks": 5, "max_new_tokens": 9}).length == 5


def test_the_description_of_settings_says_their_exact_values():
    """Another temperature or top_p is another distribution, so no two share a label, also when the digits are many."""
    for value in (0.05, 0.1, 0.7, 0.75, 1 / 3, 1 - 1e-9):
        label = Settings.from_arguments({"temperature": value, "top_p": value}).description
        _, temperature, top_p = label.split(", ")
        assert float(temperature.removeprefix("temperature=")) == value
        assert float(top_p.removeprefix("top_p=")) == value


VALUES = (
    *(0, 1, 5, -1, 10**30, 0.5, -0.5, 2.7, 1e-45, 1e300, math.nan, math.inf, True, False, None, "", "none", "warm"),
    *("0.7", "5", [], ["a"], [5], [["a"]], [None], {}, {"a": 1}, (), b"a", {"a"}),
)
GOOD = {  # the values of VALUES that a setting takes
    "until": ("", "none", "warm", "0.7", "5", [], ["a"], ()),
    "do_sample": (0, 1, True, False, "none"),
    "temperature": (0, 1, 5, 0.5, 2.7, "none", "0.7", "5"),
    "top_k": (0, 1, 5, "none", "5"),
    "top_p": (1, 0.5, 1e-45, "none", "0.7"),
    "num_beams": (1, True),
    **dict.fromkeys(LENGTHS, (1, 5, "none", "5")),
}


def test_every_value_of_a_setting_is_taken_or_refused_by_its_name(subtests):
    for name in (*KNOWN, *OF_OTHER_BACK_ENDS):
        good = [repr(value) for value in (*GOOD.get(name, ()), None)]
        with subtests.test(name):
            for value in VALUES:
                arguments = {"do_sample": False, name: value}  # a wrong value is a mistake, read or not
                if repr(value) in good or (name in OF_OTHER_BACK_ENDS and value == OF_OTHER_BACK_ENDS[name][0]):
                    settings = Settings.from_arguments(arguments)
                    in_other_order = Settings.from_arguments(dict(reversed(arguments.items())))
                    assert settings == in_other_order
                    assert hash(settings)
                else:
                    with pytest.raises(DuelError, match=rf"\b{name}\b.*(got|not) "):
                        Settings.from_arguments(arguments)


def test_what_does_not_fit_is_found_before_the_first_text(folder):
    lm = model(folder)
    for length in (64, 10**15):
        requests = [*ask("a b", max_gen_toks=8), *ask("c", task="second", max_gen_toks=length)]
        with pytest.raises(DuelError, match=f"task second, document 0: {length} positions to generate"):
            lm.generate_until(requests)
    framed = model(folder, bos="none")
    framed.denoiser.shift = 1  # needs a token before the first
    with pytest.raises(DuelError, match="task second, document 0: Window 0 needs a context"):
        framed.generate_until([*ask("a", max_gen_toks=8), *ask("", task="second", max_gen_toks=4)])
    assert lm.evaluation.sampler.counts.forwards == framed.evaluation.sampler.counts.forwards == 0


def test_one_token_in_every_position_is_left_to_right():
    whole = ["threshold:mu=0.5", "entropy_bound:gamma=0.1"]
    only = warped(Toy(length=9, seed=1), top_k=1)
    for rule in ("greedy", "margin", "log_margin", "entropy", *whole):
        [sample] = DuelEstimator(only, rule, 4).sample([(1,)], 4, do_sample=False)
        assert sample.reveal_steps == ((0, 0, 0, 0) if rule in whole else (0, 1, 2, 3))
        warning = tie_warning(only, rules.parse(rule))
        assert "top_k=1" in warning
        assert "left to right" in warning

    assert tie_warning(only, rules.parse("right_to_left")) is None  # an order of its own
    greedy = rules.parse("greedy")
    assert tie_warning(warped(Toy(), top_p=0.3), greedy)
    assert tie_warning(warped(Toy(), 0.5, 2, 0.4), greedy) is None


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny.checkpoint(tmp_path_factory.mktemp("bert"), "bert", length=32)


def model(folder, **arguments):
    return DuelMDM(**{"pretrained": folder, "rule": "greedy", "block": 4, "device": "cpu", **arguments})


def ask(*prompts, repeats=1, task="toy", **settings):
    requests = []
    for n, prompt in enumerate(prompts):
        request = make_request("generate_until", {}, (prompt, settings), task, n, repeats)
        requests += [request] * repeats
    return requests


def test_decoding_is_what_is_greedy_promises(folder):
    lm = model(folder)
    for length in (1, 3, 8):
        texts = lm.generate_until(ask("a b", "the of", max_gen_toks=length))
        for prompt, text in zip(("a b", "the of"), texts, strict=True):
            assert len(lm.tok_encode(text)) == length, "choose another seed"
            first = text.split()[0]
            changed = text.replace(first, "q" if first != "q" else "r", 1)
            pairs = [(prompt, f" {text}"), (prompt, f" {changed}")]
            [(_, is_greedy), (_, changed_is_greedy)] = lm.loglikelihood(harness_requests.ask("loglikelihood", *pairs))
            assert is_greedy
            assert not changed_is_greedy


def test_samples_depend_on_task_document_and_repeat_alone(folder):
    settings = {"max_gen_toks": 8, "do_sample": True, "temperature": 9.0}  # the random network is all but certain
    prompts = ("a b", "the of", "c", "a b")
    requests = ask(*prompts, repeats=3, **settings)
    texts = model(folder).generate_until(requests)
    assert len(set(texts[:3])) > 1, "repeats differ"
    assert texts[0] != texts[9], "documents of one prompt differ"
    assert model(folder, batch_size=3).generate_until(requests) == texts
    assert model(folder).generate_until(requests[3:6]) == texts[3:6], "as on another rank"
    assert model(folder, draw_seed=1).generate_until(requests) != texts
    assert model(folder).generate_until(ask(*prompts, repeats=3, task="t", **settings)) != texts
    keys = {key_of(*name) for name in itertools.product(("a", "b"), range(5), range(5), range(5))}
    assert len(keys) == 250


@pytest.mark.parametrize("settings", [{}, {"do_sample": True}, {"do_sample": True, "temperature": 0.5, "top_k": 5}])
def test_a_trace_holds_each_sample_with_its_log_probability(folder, tmp_path, settings):
    lm = model(folder, trace=str(tmp_path / "t.jsonl"))
    texts = lm.generate_until(ask("a b", "the of and c", max_gen_toks=8, until=["e", "f"], **settings))
    records = trace.read(tmp_path / "t.jsonl")
    asked = Settings.from_arguments({"max_gen_toks": 8, "until": ["e", "f"], **settings})
    duel = DuelEstimator(asked.denoiser(lm.denoiser), "greedy", 4)
    for prompt, text, record in zip(("a b", "the of and c"), texts, records, strict=True):
        assert record["text"] == text
        assert record["generated"] == asked.description
        assert not {"e", "f"} & {*text.split()}
        assert len(record["ids"]) + record["tail"] == 8
        window = Window((2, *lm.tok_encode(prompt)), record["ids"], (3,), record["tail"])
        [score] = duel.log_prob([window])
        if not score.near_ties:
            assert list(score.reveal_steps) == record["reveal_steps"]
            assert score.log_prob == pytest.approx(record["log_prob"], abs=1e-4)
    assert lm.get_model_info()["duel"]["generated"] == [asked.description]


def test_a_response_cache_keeps_generations_of_other_laws_apart(folder, tmp_path):
    from lm_eval.api.model import CachingLM

    def texts(repeats=1, settings=None, **arguments):
        cached = CachingLM(model(folder, **arguments), str(tmp_path / f"{arguments['rule']}.db"))
        return cached.generate_until(ask("a b", "c", repeats=repeats, max_gen_toks=8, **(settings or {})))

    requests = ask("a b", "c", max_gen_toks=8)
    elbo = {"estimator": "elbo", "mc_samples": 8, "rule": "greedy"}  # its own spec has no rule
    decoded = texts(**elbo)
    assert texts(**elbo) == decoded
    assert decoded == model(folder).generate_until(requests)

    lm = model(folder, **{**elbo, "rule": "right_to_left"})
    other = CachingLM(lm, str(tmp_path / "greedy.db")).generate_until(requests)
    assert lm.get_model_info()["duel"]["forwards"] > 0  # counted, although `elbo` cannot generate
    assert other == model(folder, rule="right_to_left").generate_until(requests)
    assert other != decoded

    sampled = texts(3, {"temperature": 9.0}, **elbo)
    assert texts(3, {"temperature": 9.0}, **elbo) == sampled
    assert len(set(sampled)) > 2  # repeats stay apart


def test_texts_that_another_estimator_generates_have_a_fingerprint_of_their_own(folder, caplog):
    """The run's own is of a bound that has no rule, and equal for texts of two rules."""
    named = []
    runs = set()
    for rule in ("greedy", "right_to_left"):
        lm = model(folder, estimator="elbo", mc_samples=16, rule=rule)
        caplog.clear()
        lm.generate_until(ask("a b", max_gen_toks=8))
        [message] = [message for message in caplog.messages if f"rule={lm.evaluation.sampler.rule}" in message]
        assert fingerprint.digest(lm.generation_spec) in message
        named.append(message)
        runs.add(lm.fingerprint)
    assert len(runs) == 1 and len(set(named)) == 2

    lm = model(folder)
    caplog.clear()
    lm.generate_until(ask("a b", max_gen_toks=8))
    assert not any("generated by" in message for message in caplog.messages)


def test_what_is_selected_after_sampling_is_generated_as_it_is_scored(folder, tmp_path):
    """Texts without a trace need no log-probability; with one it is that of the text, over all orders."""
    settings = {"max_gen_toks": 6, "temperature": 9.0, "until": ["e"]}
    drawn = {"estimator": "sampled_confidence", "n": 2}
    lm = model(folder, **drawn)
    traced = model(folder, **drawn, trace=str(tmp_path / "t.jsonl"), batch_size=1)
    texts = lm.generate_until(ask("a b", "the of", repeats=2, **settings))
    assert texts == traced.generate_until(ask("a b", "the of", repeats=2, **settings))
    assert len(set(texts)) > 2
    assert lm.estimator.counts.rows < traced.estimator.counts.rows

    sampler = traced.estimator.with_denoiser(Settings.from_arguments(settings).denoiser(lm.denoiser))
    for record in trace.read(tmp_path / "t.jsonl"):
        prompt = (2, *lm.tok_encode(("a b", "the of")[record["doc"]]))
        [score] = sampler.log_prob([Window(prompt, record["ids"], (3,), record["tail"])])
        assert score.log_prob == pytest.approx(record["log_prob"], abs=1e-4)
        assert len(record["reveal_steps"]) == len(record["ids"])
        assert not record["token_logprobs"]
    assert lm.get_model_info()["duel"]["generated"] == ["sampling, temperature=9"]
    with pytest.raises(DuelError, match=r"task toy, document 0: confidence=untempered is .* use confidence=tempered"):
        lm.generate_until(ask("a b", do_sample=True, top_k=5))


def test_the_end_of_text_ends_a_generation(folder):
    lm = model(folder)
    [text] = lm.generate_until(ask("a b", max_gen_toks=8))
    first, second, *_ = lm.tok_encode(text)

    lm.tokenizer.eos_token = tiny.WORDS[second]
    [cut] = lm.generate_until(ask("a b", max_gen_toks=8))

    assert cut == tiny.WORDS[first]


def test_a_chat_template_writes_its_bos_once(folder):
    lm = model(folder)
    lm.tokenizer.chat_template = "{{ '[CLS] ' }}{% for m in messages %}{{ m['content'] + ' ' }}{% endfor %}"
    prompt = lm.apply_chat_template([{"role": "user", "content": "a b"}])
    assert prompt == "[CLS] a b "
    assert lm.chat_template(True) == lm.tokenizer.chat_template
    assert lm.text.prompt(prompt, 4) == lm.text.prompt("a b", 4)
    first, second = lm.loglikelihood(harness_requests.ask("loglikelihood", (prompt, "c d"), ("a b ", "c d")))
    assert first[0] == pytest.approx(second[0], abs=1e-4)
    assert lm.chat_template(False) == ""


def test_the_chat_template_of_a_name_writes_the_prompts(folder):
    lm = model(folder)
    message = [{"role": "user", "content": "a b"}]
    with pytest.raises(UsageError, match="--apply_chat_template"):
        lm.chat_template(True)
    with pytest.raises(UsageError, match="--apply_chat_template"):
        lm.apply_chat_template(message)

    lm.tokenizer.chat_template = {"default": "c", "short": "d"}
    assert lm.chat_template("short") == "d"
    assert lm.apply_chat_template(message) == "d"
    with pytest.raises(UsageError, match="shot"):
        lm.chat_template("shot")

    lm.tokenizer.chat_template = "c"
    with pytest.raises(UsageError, match="short"):
        lm.chat_template("short")
