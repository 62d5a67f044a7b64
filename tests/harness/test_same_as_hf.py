"""`estimator=ar` beside the harness's own `--model hf`, on one checkpoint under several tokenizers and settings."""

import json
import shutil
from pathlib import Path

import pytest
from harness_requests import ask
from lm_eval.models.huggingface import HFLM

from lm_eval_duel.demo import FOLDER, resolve
from lm_eval_duel.harness.lm import DuelMDM

BOS = "<|endoftext|>"
PASSAGE = json.loads((FOLDER / "text" / "sotu.jsonl").open(encoding="utf-8").readline())["text"]
SETTINGS = {  # whether the tokenizer puts a BOS before a text, whether it names one, hf's arguments, ours
    "plain": (False, True, {}, {"bos": "none"}),
    "no BOS": (False, False, {}, {"bos": "none"}),
    "adds one": (True, True, {}, {}),
    "told to": (True, True, {"add_bos_token": True}, {"add_bos_token": True}),
    "told not to": (True, True, {"add_bos_token": False}, {"add_bos_token": False}),
}
PAIRS = [
    ("", BOS + "We the people"),
    ("", " people of"),
    ("We the", " people"),
    (" ", "people"),
    ("We the peop", "le of"),
    ("", BOS + "We"),
    ("", "We"),
    (BOS, "We the"),
    (BOS + "We the", " people"),
    ("We the people ", " of America"),
    ("We the people", "\nof America"),
    ("The union is\n", " strong"),
    ("inter", "national"),
    (PASSAGE[:200], PASSAGE[200:260]),
]
TEXTS = ["We the people of the United States", "", BOS + "We the people", "We", " We", PASSAGE, 2 * PASSAGE]
SHORT = ("adds one",)  # settings of the plain run
NO_CONTEXT = (" ", "people")
SPANNED = ("We the peop", "le of")  # the first token of the continuation begins in the context


@pytest.fixture
def both(tmp_path):
    """A function of the name of a setting: a pair of models, with our windows for whole texts those of the harness."""

    def make(name):
        adds, named, stock, own = SETTINGS[name]
        path = Path(shutil.copytree(resolve("demo-ar"), tmp_path / "demo-ar"))
        if adds:
            edit(path / "tokenizer.json", post_processor=starting_with_bos())
        if not named:
            edit(path / "tokenizer_config.json", bos_token=None)
        hf = HFLM(pretrained=str(path), dtype="float32", device="cpu", batch_size=1, **stock)
        ours = DuelMDM(pretrained=str(path), estimator="ar", device="cpu", windows="harness", **own)
        return hf, ours

    return make


def edit(file, **changes):
    """Change the entries of a JSON file; None removes one."""
    content = {**json.loads(file.read_text()), **changes}
    left = {key: value for key, value in content.items() if value is not None}
    file.write_text(json.dumps(left))


def starting_with_bos():
    start = {"SpecialToken": {"id": BOS, "type_id": 0}}
    text = {"Sequence": {"id": "A", "type_id": 0}}
    second = {"Sequence": {"id": "B", "type_id": 1}}
    special = {BOS: {"id": BOS, "ids": [1], "tokens": [BOS]}}
    return {
        "type": "TemplateProcessing",
        "single": [start, text],
        "pair": [start, text, second],
        "special_tokens": special,
    }


def settings():
    return [pytest.param(name, marks=[] if name in SHORT else pytest.mark.slow) for name in SETTINGS]


def answers(lm, kind, *arguments):
    return getattr(lm, kind)(ask(kind, *arguments), disable_tqdm=True)


@pytest.mark.parametrize("name", settings())
def test_continuations(both, name):
    """Not compared: a context without tokens, which `hf` refuses, and a token that spans the border.

    There `hf` leaves the first characters of the continuation out, and we encode the continuation alone.
    """
    hf, ours = both(name)
    adds = ours.text.prefix != []
    for pair in PAIRS:
        if pair == SPANNED or (pair == NO_CONTEXT and not adds):
            continue
        [(log_prob, is_greedy)] = answers(ours, "loglikelihood", pair)
        [(expected, expected_greedy)] = answers(hf, "loglikelihood", pair)
        assert log_prob == pytest.approx(expected, abs=1e-3), pair
        assert is_greedy == expected_greedy, pair
    if not adds:  # here the BOS is the context, as it is of an empty one
        [(log_prob, _)] = answers(ours, "loglikelihood", NO_CONTEXT)
        [(expected, _)] = answers(hf, "loglikelihood", ("", " people"))
        assert log_prob == pytest.approx(expected, abs=1e-3)


@pytest.mark.parametrize("name", settings())
def test_whole_texts(both, name):
    """If the tokenizer adds a BOS, `hf` scores it after the BOS of its window; we do not."""
    hf, ours = both(name)
    for text in TEXTS:
        [log_prob] = answers(ours, "loglikelihood_rolling", (text,))
        stock = hf
        if ours.text.prefix and not text.startswith(BOS):
            stock = HFLM(pretrained=hf.model, tokenizer=hf.tokenizer, add_bos_token=False, batch_size=1)
        [expected] = answers(stock, "loglikelihood_rolling", (text,))
        assert log_prob == pytest.approx(expected, abs=1e-3), text


@pytest.mark.parametrize("name", ["plain", "no BOS", "adds one"])
def test_numbers_that_differ_by_default_are_named(both, name, caplog, monkeypatch):
    """Under the default `bos`, of a continuation and of a text: a line names `--model hf` if it has another number."""
    adds, named, stock, _ = SETTINGS[name]
    monkeypatch.setitem(SETTINGS, name, (adds, named, stock, {}))
    hf, ours = both(name)
    for kind, arguments in (("loglikelihood", ("We the", " people")), ("loglikelihood_rolling", ("We the people",))):
        caplog.clear()
        with caplog.at_level("INFO"):
            [value] = answers(ours, kind, arguments)
        [expected] = answers(hf, kind, arguments)
        if kind == "loglikelihood":
            value, _ = value
            expected, _ = expected
        differs = abs(value - expected) > 1e-3
        assert ("--model hf" in caplog.text) == differs, (kind, value, expected)


def test_a_bos_that_the_user_has_chosen_is_not_questioned(both, caplog, monkeypatch):
    for own, is_named in (({}, True), ({"bos": "given"}, False)):
        monkeypatch.setitem(SETTINGS, "plain", (False, True, {}, own))
        with monkeypatch.context() as patch:
            patch.setattr(shutil, "copytree", lambda source, target: source)  # it is read only
            _, ours = both("plain")
        caplog.clear()
        with caplog.at_level("INFO"):
            answers(ours, "loglikelihood", ("We the", " people"))
        assert ("--model hf" in caplog.text) == is_named
