"""The Python library: lazy names, text in and out with the numbers of the harness, and no need for lm_eval."""

import json
import math
import re
import subprocess
import sys
from functools import partial

import pytest
import tiny
import torch
from close import close_nats
from laws import slow_but
from toys import Toy

from lm_eval_duel import Duel, DuelError, TextEstimate, Window, compare, load
from lm_eval_duel.core.scores import Score
from lm_eval_duel.demo import FOLDER
from lm_eval_duel.estimators import registry
from lm_eval_duel.estimators.elbo import Elbo
from lm_eval_duel.estimators.totals import TwoPhaseBlocks
from lm_eval_duel.estimators.two_phase import TwoPhase
from lm_eval_duel.harness.generation import key_of
from lm_eval_duel.harness.lm import DuelMDM
from lm_eval_duel.harness.requests import make_request
from lm_eval_duel.library.results import EncodedText

TEXTS = [json.loads(line)["text"] for line in (FOLDER / "text" / "sotu.jsonl").read_text().splitlines()]
pytestmark = pytest.mark.usefixtures("one_load")
SHORT = ["The state of the union is strong.", "We the people of the United States"]


@pytest.fixture(scope="module")
def duel():
    return Duel.from_pretrained("demo-bd", device="cpu")


@pytest.fixture(scope="module")
def lm():
    return DuelMDM(pretrained="demo-bd", device="cpu")


def requests(kind, *arguments):
    return [make_request(kind, {}, args, "toy", n, 1) for n, args in enumerate(arguments)]


def rolling(lm, texts):
    rolling_requests = requests("loglikelihood_rolling", *[(text,) for text in texts])
    return lm.loglikelihood_rolling(rolling_requests, disable_tqdm=True)


# ---------------------------------------------------------------- text in


def test_score_gives_the_numbers_of_the_harness():
    texts = [*TEXTS[:2], "Na\u00efve caf\u00e9"]
    duel = Duel.from_pretrained("demo-bd", rule="greedy", device="cpu")
    lm = DuelMDM(pretrained="demo-bd", rule="greedy", device="cpu")

    scores = duel.score(texts)

    assert duel.spec == lm.spec
    assert duel.fingerprint == lm.fingerprint
    for text, score, log_prob in zip(texts, scores, rolling(lm, texts), strict=True):
        tokens = len(lm.tok_encode(text))
        assert "".join(score.tokens) == text
        assert len(score.tokens) == tokens
        assert len(score.reveal_steps) == tokens
        assert score.nfe == tokens
        assert score.log_prob == pytest.approx(log_prob, rel=1e-6)
        assert math.fsum(score.token_logprobs) == pytest.approx(score.log_prob, rel=1e-9)
        assert score.perplexity == pytest.approx(math.exp(-score.log_prob / tokens))
        assert score.bits_per_byte == pytest.approx(-score.log_prob / math.log(2) / len(text.encode()))


@pytest.mark.parametrize("arguments", [{"windows": "harness"}, {"bos": "official"}])
def test_long_texts_are_cut_as_in_the_harness(arguments):
    text = TEXTS[0]
    duel = Duel.from_pretrained("demo-bd", max_length=48, device="cpu", **arguments)
    lm = DuelMDM(pretrained="demo-bd", max_length=48, device="cpu", **arguments)

    [score] = duel.score([text])

    [log_prob] = rolling(lm, [text])
    assert len(score.windows) > 1
    assert score.log_prob == pytest.approx(log_prob, rel=1e-6)
    assert score.perplexity == pytest.approx(math.exp(-score.log_prob / len(lm.tok_encode(text))))


def test_texts_come_as_they_are_finished(duel, caplog):
    scores = duel.score([*SHORT, "", SHORT[0]])
    assert "no perplexity (their bytes count in bits per byte): number 2\n" in caplog.text
    assert dict(duel.score_stream([*SHORT, "", SHORT[0]])) == dict(enumerate(scores))
    assert scores[0] == scores[3]
    assert duel.score([]) == []

    empty = scores[2]
    assert empty.log_prob == 0
    assert empty.tokens == ()
    assert math.isnan(empty.perplexity)
    assert math.isnan(empty.bits_per_byte)


def test_wrong_texts_are_named(duel):
    with pytest.raises(DuelError, match=r"^Text 1: the text holds the mask token"):
        duel.score(["fine", duel.tokenizer.decode([duel.denoiser.mask_id])])
    with pytest.raises(DuelError, match=r"^Text 0: the text holds a lone surrogate"):
        duel.score(["\ud83d"])
    with pytest.raises(DuelError, match=r"takes a list of texts; got one text. Write duel.score\(\[text\]\)"):
        duel.score("We the people")
    with pytest.raises(DuelError, match="number 1 is of the class list"):
        duel.score(["fine", [1, 2]])


def test_a_text_is_not_taken_letter_by_letter(duel):
    """Where a list of texts or of windows is wanted; nothing is computed."""
    for method, arguments in {
        "score": ("We",),
        "generate": ("We",),
        "sample": ("We", 4),
        "stream_samples": ("We", 4),
        "log_prob": ("We",),
        "stream": ("We",),
        "replay": ("We", [(0,), (0,)]),
        "follow": ("We", [(0,), (0,)]),
        "differentiable": ("We", [(0,), (0,)]),
    }.items():
        with pytest.raises(DuelError, match=r"a list of .* got (one|a) text"):
            list(getattr(duel, method)(*arguments))


def test_a_sample_that_does_not_fit_says_its_length_and_what_fits(duel):
    most = duel.denoiser.max_length
    with pytest.raises(DuelError, match=rf"{most + 1} positions .*at most {most}\."):
        duel.sample([()], most + 1)


# ---------------------------------------------------------------- text out


@pytest.mark.parametrize(
    "settings",
    [{"do_sample": True, "temperature": 0.7, "top_k": 50}, {"until": [".", " the"]}],
    ids=str,
)
def test_generate_writes_what_the_harness_writes(duel, lm, settings):
    asked = requests("generate_until", *[(text, {"max_gen_toks": 16, **settings}) for text in SHORT])
    keys = [key_of("toy", n, 0, 0) for n in range(len(SHORT))]

    texts = duel.generate(SHORT, max_new_tokens=16, keys=keys, **settings)

    assert [text.text for text in texts] == lm.generate_until(asked, disable_tqdm=True)
    scores = duel.log_prob([text.window for text in texts])
    for text, score in zip(texts, scores, strict=True):
        assert text.prompt in SHORT
        assert (text.fingerprint == duel.fingerprint) == ("temperature" not in settings)
        assert "".join(text.tokens).startswith(text.text)
        assert math.fsum(text.token_logprobs) == pytest.approx(text.log_prob)
        assert len(text.tokens) == len(text.token_logprobs) == len(text.reveal_steps) == len(text.window.target)
        if "temperature" not in settings and not score.near_ties:
            assert text.log_prob == pytest.approx(score.log_prob, abs=1e-4)
            assert text.reveal_steps == score.reveal_steps


def test_generate_fills_what_the_prompts_leave_of_a_short_row():
    duel = Duel.from_pretrained("demo-bd", rule="greedy:k=8", device="cpu", max_length=24)
    room = 24 - 1  # the special token before a text
    for prompts, longest in ((["We"], 2), ([[5, 6, 7], [5]], 3), ([[5] * 20], room - room // 2)):
        for generated in duel.generate(prompts):
            assert len(generated.tokens) == room - longest
    infilling = Duel.from_pretrained("demo-mdm", rule="greedy:k=8", device="cpu", max_length=24)
    [generated] = infilling.generate([[5]], suffixes=[[6, 7]])
    assert generated.window.length == 24
    assert generated.window.context[-1] == 5  # nothing is cut
    assert generated.window.suffix[:2] == (6, 7)
    with pytest.raises(DuelError, match="max_new_tokens"):
        duel.generate(["We"], max_new_tokens=room + 1)


def test_generate_fills_256_positions_of_a_longer_row():
    long = Duel.from_model(tiny.network("bert", 400), tiny.tokenizer(length=400), rule="left_to_right:k=32", block=32)
    [generated] = long.generate(["a b c"])
    assert len(generated.window.target) + generated.window.tail == 256


def test_generate_suggests_the_nearest_setting(duel):
    with pytest.raises(DuelError, match=r"'temprature' of Duel\.generate\. Did you mean temperature"):
        duel.generate(["We"], temprature=1)


# ---------------------------------------------------------------- other estimators


ESTIMATES = [  # a network, its model args, and whether the value is a bound and is drawn
    ("demo-ar", {"estimator": "ar"}, False, False),
    ("demo-bd", {"estimator": "elbo", "mc_samples": 16}, True, True),
    ("demo-mdm", {"estimator": "elbo", "mc_samples": 16, "elbo_form": "ratio", "elbo_eps": 0.01}, False, True),
    ("demo-bd", {"estimator": "mixture"}, False, False),
    ("demo-bd", {"estimator": "sampled_confidence", "n": 2}, False, False),
    ("demo-mdm", {"estimator": "two_phase", "block": 1, "sample": 1.0, "draw_seed": 3}, False, True),
]


@pytest.mark.parametrize(
    ("name", "arguments", "bound", "drawn"),
    slow_but(ESTIMATES, [ESTIMATES[0], ESTIMATES[1], ESTIMATES[4]]),
    ids=str,
)
def test_every_estimator_scores_texts(name, arguments, bound, drawn):
    """The value, its error and its spec are those of the harness; what an estimator lacks is one clear error."""
    text = "We the people of the United States"
    duel = Duel.from_pretrained(name, device="cpu", **arguments)
    lm = DuelMDM(pretrained=name, device="cpu", **arguments)

    [score] = duel.score([text])

    [answer] = rolling(lm, [text])
    assert score.log_prob == pytest.approx(answer, rel=1e-6)
    assert (score.stderr or 0) == pytest.approx(answer.stderr or 0, rel=1e-6)
    assert duel.spec == lm.spec
    assert score.bound == bound
    assert (score.stderr is not None) == drawn
    template = registry.value_template(duel.estimator.name, duel.spec)
    assert (score.kind, score.note) == (template.word, template.note)

    orders = [window.reveal_steps for window in score.window_scores]
    calls = {
        "generate": lambda: duel.generate([text], max_new_tokens=4),
        "sample": lambda: duel.sample([(5,)], 4),
        "replay": lambda: duel.replay(score.windows, orders),
        "follow": lambda: duel.follow(score.windows, orders),
        "estimate": lambda: duel.estimate([text], sample=1.0),
    }
    offered = {"ar": {"generate", "sample", "replay", "follow"}, "sampled_confidence": {"generate", "sample"}}
    for method, call in calls.items():
        if method in offered.get(duel.estimator.name, ()):
            assert len(call()) == 1
        else:
            with pytest.raises(DuelError, match=rf"^Duel\.{method} .*estimator={duel.estimator.name}\.$"):
                call()


def test_a_score_shows_itself():
    """One line, in a notebook a span for each token, plain values that JSON takes, and pairs."""
    duel = Duel.from_pretrained("demo-mdm", rule="greedy", block=8, device="cpu")
    text = "We the <b>people</b> & others"
    [score] = duel.score([text])
    [generated] = duel.generate(["We the"], max_new_tokens=8)
    for result in (score, generated, *score.window_scores):
        assert "\n" not in repr(result)
        assert len(repr(result)) < 240
    [tempered] = duel.generate(["We the"], max_new_tokens=2, do_sample=True, temperature=0.7, top_p=0.9)
    assert "temperature=0.7, top_p=0.9" in repr(tempered)
    assert "temperature" not in repr(generated)

    page = score._repr_html_()
    assert page.count(' title="token ') == len(score.tokens)
    assert "<b>" not in page
    assert "&lt;" in page
    assert generated._repr_html_()

    values = json.loads(json.dumps(score.to_dict()))
    assert values["log_prob"] == pytest.approx(score.log_prob)
    assert values["reveal_steps"] == list(score.reveal_steps)
    assert values["windows"][0]["target"] == list(score.windows[0].target)
    assert values["spec"] == score.spec
    assert values["fingerprint"] == duel.fingerprint

    tokens, nats = zip(*score.token_scores(), strict=True)
    assert "".join(tokens) == text
    assert math.fsum(nats) == pytest.approx(score.log_prob, rel=1e-6)

    [mixture] = Duel.from_pretrained("demo-mdm", estimator="mixture", block=2, device="cpu").score(["We"])
    with pytest.raises(DuelError):
        mixture.token_scores()


def test_estimators_take_ids_and_networks_in_memory():
    windows = [Window((), (300, 517, 261, 300))]
    denoiser = load("demo-mdm", device="cpu")
    for estimator, arguments in (("elbo", {"mc_samples": 32, "draw_seed": 2}), ("mixture", {}), ("two_phase", {})):
        duel = Duel(denoiser, block=4, estimator=estimator, **arguments)
        assert duel.log_prob(windows) == duel.estimator.log_prob(windows)
        assert f"estimator={estimator}" in repr(duel)
        assert ("rule=" in repr(duel)) == (estimator == "two_phase")

    for wrong in ({"estimator": "elbo", "mc_samples": -3}, {"mc_samples": 3}):
        with pytest.raises(DuelError, match="'mc_samples'"):
            Duel(denoiser, **wrong)


# ---------------------------------------------------------------- what it is


def test_arguments_are_those_of_the_harness(duel):
    rule = Duel.from_pretrained("demo-bd", rule="klass", mu=0.9, nu=0.01, device="cpu").rule
    assert str(rule) == "klass:mu=0.9:nu=0.01:history=1:kl=paper"
    assert Duel.from_pretrained("demo-bd", rule=rule, device="cpu").rule is rule
    with pytest.raises(DuelError, match=r"Unknown model arg 'blok'. Did you mean block?"):
        Duel.from_pretrained("demo-mdm", blok=3)
    with pytest.raises(DuelError, match="'trace' is a model arg of the harness's model"):
        Duel.from_pretrained("demo-mdm", trace="x.jsonl")
    with pytest.raises(DuelError, match=r"Unknown value of windows 'harnes'. Did you mean harness?"):
        Duel(duel.denoiser, windows="harnes")
    loaded = Duel.from_pretrained("demo-bd", tokenizer=duel.tokenizer, device="cpu")
    assert loaded.tokenizer is duel.tokenizer
    assert loaded.spec == duel.spec


@pytest.mark.parametrize("ids", [list, torch.tensor, lambda ids: torch.tensor(ids, dtype=torch.int32).numpy()])
def test_ids_may_be_lists_tuples_or_tensors(ids):
    duel = Duel(Toy(length=6), "greedy", 2)
    window = Window(ids([1]), ids([0, 2, 1, 0]), ids([2]))
    assert window == Window((1,), (0, 2, 1, 0), (2,))
    [score] = duel.log_prob([window])
    assert duel.sample([ids([1])], 4, suffixes=[ids([2])], seed=3) == duel.sample([(1,)], 4, suffixes=[(2,)], seed=3)
    [replayed] = duel.replay([window], [ids(list(score.reveal_steps))])
    assert replayed.log_prob == pytest.approx(score.log_prob, abs=1e-9)
    assert replayed.kind == "oracle" and "only if a rule made that order" in replayed.note


def test_texts_between_others(duel):
    """Infilling: the harness's windows, equal from texts and from ids; samples have their own log-prob again."""
    before = "The state of"
    inside = " the union is"
    after = " strong."
    ids_before, ids_inside, ids_after = duel.tokenizer([before, inside, after], add_special_tokens=False)["input_ids"]
    first, last = duel.denoiser.special_tokens
    window = Window((*first, *ids_before), ids_inside, (*ids_after, *last))

    without_suffix, filled = duel.score([inside, inside], contexts=[before, before], suffixes=["", after])
    assert filled.windows == (window,)
    assert filled.text == inside
    assert len(filled.tokens) == len(ids_inside)
    assert filled.log_prob != pytest.approx(without_suffix.log_prob, abs=1e-3)
    [score] = duel.log_prob([window])
    assert filled.log_prob == pytest.approx(score.log_prob, abs=1e-4)
    [by_ids] = duel.score([inside], contexts=[torch.tensor(ids_before)], suffixes=[ids_after])
    assert by_ids.windows == filled.windows

    assert compare([filled], [filled]).documents == 1
    with pytest.raises(DuelError, match="text 0, its context"):
        compare([without_suffix], [filled])

    prompts = [before, ids_before]
    text, from_ids = duel.generate(prompts, suffixes=[after, ids_after], max_new_tokens=3, do_sample=True, keys=[5, 5])
    assert text.window == from_ids.window
    assert text.window.suffix == window.suffix
    [score] = duel.log_prob([text.window])
    assert score.log_prob == pytest.approx(text.log_prob, abs=1e-4)
    for drawn in duel.sample([before, window.context], 3, suffixes=[after, window.suffix], keys=[5, 5]):
        assert drawn.tokens == text.window.target

    for call in (partial(duel.score, [inside]), partial(duel.generate, [inside]), partial(duel.sample, [inside], 3)):
        with pytest.raises(DuelError, match="suffixes"):
            call(suffixes=after)
        with pytest.raises(DuelError, match=r"suffixes.*got 2"):
            call(suffixes=[after, after])


def test_a_seed_without_a_draw_is_named_in_a_warning(duel, caplog):
    for settings in ({"seed": 1, "do_sample": True}, {"seed": 1, "temperature": 0.5}, {}):
        duel.generate(["We the"], max_new_tokens=2, **settings)
        assert "seed" not in caplog.text
    duel.generate(["We the"], max_new_tokens=2, seed=1)
    assert "seed=1" in caplog.text


def test_a_seed_is_a_whole_number(duel):
    for seed in (None, "3", 0.5):
        with pytest.raises(DuelError, match="seed"):
            duel.generate(["We the"], max_new_tokens=2, do_sample=True, seed=seed)
        with pytest.raises(DuelError, match="seed"):
            duel.sample(["We the"], 2, seed=seed)
    for seed in (None, 0.5, -1):
        with pytest.raises(DuelError, match="'seed'"):
            duel.estimate(["We the"], seed=seed)
        with pytest.raises(DuelError, match="'draw_seed'"):
            Elbo(duel.denoiser, draw_seed=seed)


def test_sample_names_the_settings_that_it_takes(duel):
    for settings, named in (({"temperature": 0.5}, "keys.*temperature=0.5.*generate"), ({"seeds": 3}, "mean seed")):
        with pytest.raises(DuelError, match=rf"Duel\.sample.*{named}"):
            duel.sample(["We the"], 2, **settings)


@pytest.mark.parametrize("place", range(3))
def test_the_mask_token_is_refused_wherever_it_stands(duel, place):
    """Before the text, in it, and after it; the error names it."""
    parts = ["The state", " of the", " union"]
    parts[place] += duel.tokenizer.mask_token
    before, inside, after = parts
    named = re.escape(duel.tokenizer.mask_token)
    with pytest.raises(DuelError, match=named):
        duel.score([inside], contexts=[before], suffixes=[after])
    if place != 1:
        with pytest.raises(DuelError, match=named):
            duel.generate([before], suffixes=[after], max_new_tokens=3)


def test_ids_are_whole_numbers_and_windows_come_in_a_list():
    for wrong in ([1.5], ["a"], "ab", 3, [None], [math.nan], torch.tensor([[1, 2]])):
        with pytest.raises(DuelError, match="Token ids"):
            Window([1], wrong)
    duel = Duel(Toy(length=6), "greedy", 2)
    for wrong in (Window((), (0, 1)), [Window((), (0, 1)), ((), (0, 1))]):
        with pytest.raises(DuelError, match="Window"):
            duel.log_prob(wrong)


@pytest.mark.slow
def test_it_needs_no_lm_eval():
    code = (
        "import sys\n"
        "sys.modules['lm_eval'] = None\n"
        "from lm_eval_duel import Duel, Elbo, Lattice, Window, load\n"
        "for windows in ('independent', 'harness'):\n"
        "    duel = Duel.from_pretrained('demo-bd', device='cpu', windows=windows)\n"
        "    [score] = duel.score(['The state of the union is strong.'])\n"
        "    print(score.log_prob)\n"
        "[generated] = duel.generate(['We the'], max_new_tokens=8, do_sample=True)\n"
        "assert len(next(duel.stream([generated.window]))) == 2\n"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert [float(value) for value in out.split()] == [close_nats(-34.14040593, 11)] * 2


def test_equal_texts_have_one_sampling_error():
    """The blocks of equal texts are sampled together, so twice the texts have twice the error, not sqrt(2) times."""
    estimator = TwoPhase(load("demo-mdm", device="cpu"), "greedy", 2)

    def estimate(text, token, log_prob, variance):
        blocks = TwoPhaseBlocks(20, sampled=10, drawn=10, variance=variance)
        encoded = EncodedText([Window((), (token,))], text)
        return TextEstimate.from_scores(text, encoded, [Score(log_prob, blocks=blocks)], estimator, {})

    first = estimate("a", 0, -50.0, 9.0)
    second = estimate("b", 1, -60.0, 16.0)
    for texts, error in (((first,), 3), ((first, second), 5), ((first, second) * 2, 10), ((first, first), 6)):
        assert TextEstimate.total(texts).stderr == pytest.approx(error)


def test_scores_are_compared_with_estimates_of_them():
    duel = Duel.from_pretrained("demo-mdm", rule="left_to_right", block=4, device="cpu")
    texts = ["We the people", "of the States"]
    scores = duel.score(texts)
    estimates = duel.estimate(texts, sample=1.0)
    for result in (scores[0], estimates[0]):
        shown = {*re.findall(r"(\w+)=", repr(result))}
        assert not {"windows", "window_scores", "sums", "spec"} & shown, "repr is short"

    comparison = compare(scores, estimates)
    assert comparison.difference == pytest.approx(0, abs=1e-5)
    assert comparison.stderrs == (None, 0.0)
    with pytest.raises(DuelError, match="several"):
        compare(scores[:1], [TextEstimate.total(estimates)])


@pytest.mark.parametrize("bos", ["first", "scored", "official"])
def test_a_row_that_is_scored_from_its_first_position_has_no_context(bos):
    duel = Duel.from_pretrained("demo-mdm", rule="greedy", block=8, bos=bos, device="cpu")
    calls = {
        "score": lambda: duel.score(["the union"], contexts=["We"]),
        "generate": lambda: duel.generate(["We"], max_new_tokens=2),
        "sample": lambda: duel.sample(["We"], 2),
    }
    for method, call in calls.items():
        with pytest.raises(DuelError, match=rf"bos={bos} .*Duel\.{method} .*bos='given'"):
            call()
    assert duel.score(["the union"])[0].tokens


def test_a_text_whose_only_token_is_context_is_named(caplog):
    duel = Duel.from_pretrained("demo-mdm", rule="greedy", block=8, bos="first", device="cpu")
    with caplog.at_level("WARNING"):
        [_, alone] = duel.score(["the union", "a"])
    assert alone.log_prob == 0 and math.isnan(alone.perplexity)
    assert "Texts without a scored token" in caplog.text and ": number 1\n" in caplog.text


def test_an_estimate_has_plain_values():
    duel = Duel.from_pretrained("demo-mdm", rule="greedy", block=2, device="cpu")
    [estimate] = duel.estimate(["the state of the union"], sample=1.0)
    assert duel.counts.rows > 0
    values = estimate.to_dict()
    assert values["perplexity"] == pytest.approx(estimate.perplexity)
    assert values["kind"] == estimate.kind
    assert json.loads(json.dumps(values)).keys() == values.keys()


class Column:
    """A column of a table, as in pandas: it yields its values, but is indexed by labels."""

    def __init__(self, values):
        self.values = dict(enumerate(values))

    def __len__(self):
        return len(self.values)

    def __iter__(self):
        return reversed(self.values.values())

    def __getitem__(self, label):
        return self.values[label]


@pytest.mark.parametrize("form", [Column, iter])
def test_texts_come_in_the_order_of_their_column_or_generator(duel, form):
    given = form(SHORT)
    in_order = SHORT if form is iter else SHORT[::-1]
    expected = duel.score(in_order, contexts=in_order)

    scores = duel.score(given, contexts=form(SHORT))

    assert [score.text for score in scores] == in_order
    for score, same in zip(scores, expected, strict=True):
        assert score.context == same.context
        close_nats(score.log_prob, same.log_prob)
    assert [sample.prompt for sample in duel.generate(form(SHORT), max_new_tokens=4)] == in_order
    assert len(duel.sample(form(SHORT), 4)) == len(SHORT)
    assert compare(form(scores), form(scores)).documents == len(SHORT)
    mdm = Duel.from_pretrained("demo-mdm", device="cpu")
    assert [estimate.text for estimate in mdm.estimate(form(SHORT))] == in_order


class Frame:
    """A table, as in pandas: a loop over it yields the names of its columns."""

    columns = ("text",)

    def __iter__(self):
        return iter(self.columns)


@pytest.mark.parametrize(
    ("given", "reason"),
    [({"text": SHORT}, "one of its columns"), (Frame(), "one of its columns"), ({*SHORT}, "no order")],
)
def test_a_table_and_a_set_are_refused_where_texts_are_expected(duel, given, reason):
    for use in (duel.score, duel.generate, lambda contexts: duel.score(SHORT, contexts=contexts)):
        with pytest.raises(DuelError, match=reason):
            use(given)


@pytest.mark.parametrize("missing", [None, math.nan])
def test_a_missing_text_is_named(duel, missing):
    for use in (duel.score, duel.generate, lambda contexts: duel.score(SHORT[:2], contexts=contexts)):
        with pytest.raises(DuelError, match="number 1 is missing"):
            use(["We", missing])


def test_a_text_says_that_its_context_was_cut(caplog):
    duel = Duel.from_pretrained("demo-ar", estimator="ar", max_length=12, device="cpu")
    long = "We the people of the United States in order to form a more perfect union establish justice"

    cut, whole = duel.score([" the union"] * 2, contexts=[long, "We"])
    [generated] = duel.generate([long], max_new_tokens=4)

    assert cut.cut and "max_length=12" in cut.note and "suffix of 1 text was cut" in caplog.text
    assert not whole.cut and not whole.note
    assert "cut" in generated.note and "1 of 1 prompts cut" in caplog.text


def test_a_network_that_takes_shorter_rows_is_told_max_length():
    positions = torch.nn.Embedding(8, 4)
    weights = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))

    def function(ids, real):
        return positions(torch.arange(ids.shape[1])) @ weights + torch.nn.functional.one_hot(ids, 6).float().mean(
            1, True
        )

    with pytest.raises(DuelError, match=r"9 positions.*max_length"):
        Duel.from_model(function, module=positions, mask_token_id=5, max_length=9)


def test_one_checkpoint_is_named():
    with pytest.raises(DuelError, match="Two checkpoints"):
        Duel.from_pretrained("demo-mdm", pretrained="demo-bd")
    with pytest.raises(DuelError, match="got None"):
        Duel.from_pretrained(None)


def test_what_is_no_estimate_has_no_total(duel):
    with pytest.raises(DuelError, match=r"Duel\.estimate.*TextScore"):
        TextEstimate.total(duel.score(SHORT))
    with pytest.raises(DuelError, match="at least one"):
        TextEstimate.total([])


def test_a_network_that_is_no_denoiser_and_a_name_for_a_tokenizer_are_refused():
    network = torch.nn.Linear(2, 2)
    with pytest.raises(DuelError, match="from_model"):
        Duel(network)
    with pytest.raises(DuelError, match="load_tokenizer"):
        Duel.from_model(network, "demo-mdm")


def test_what_holds_no_texts_is_refused(duel):
    for method in (duel.score, duel.generate):
        with pytest.raises(DuelError, match="class int"):
            method(5)
