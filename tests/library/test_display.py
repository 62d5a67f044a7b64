"""The views of a score, at the ends of every range: colours, signs, quotes, plain values. No network."""

import dataclasses
import html
import json
import math
import re

import pytest

from lm_eval_duel import DuelError, Window
from lm_eval_duel.core.scores import Kind, Score
from lm_eval_duel.estimators.totals import TwoPhaseBlocks
from lm_eval_duel.library import display
from lm_eval_duel.library.display import MOST_NATS, SURE_TO_SURPRISED, Display


@dataclasses.dataclass(frozen=True, repr=False)
class Shown(Display):
    """A score whose entries are given. `bound` as in `TextScore`."""

    shown = ("log_prob", "perplexity")
    internal = ("hidden",)

    text: str = "a"
    log_prob: float = -1.0
    perplexity: float = math.e
    tokens: tuple[str, ...] = ("a",)
    token_logprobs: tuple[float, ...] = (-1.0,)
    reveal_steps: tuple[int, ...] = (0,)
    kind: str = "exact"
    note: str = ""
    bound: bool = False
    windows: tuple[Window, ...] = (Window((1,), (2, 3), (4,)),)
    hidden: str = "hidden"
    spec: dict = dataclasses.field(default_factory=lambda: {"rule": "greedy"})


def spans(score):
    """The colour, if any, and the title of each token."""
    tokens = re.findall(r'<span style="([^"]*)" title="([^"]*)"', score._repr_html_())
    return [(style.partition("background:")[2].removesuffix(";color:#000"), title) for style, title in tokens]


LAST = len(SURE_TO_SURPRISED) - 1
BIN = MOST_NATS / LAST
COLOURS = {  # nats, and the number of the colour: the nearest of eight from 0 to 8 nats, the ends included
    0.0: 0,
    -2.0: 0,  # a probability above 1, by float noise
    0.49 * BIN: 0,
    0.51 * BIN: 1,
    1.49 * BIN: 1,
    1.51 * BIN: 2,
    (LAST - 0.51) * BIN: LAST - 1,
    (LAST - 0.49) * BIN: LAST,
    MOST_NATS: LAST,
    100.0: LAST,
    math.inf: LAST,
}


@pytest.mark.parametrize("nats", COLOURS)
def test_the_colour_of_a_token(nats):
    [(colour, title)] = spans(Shown(token_logprobs=(-nats,)))
    assert colour == SURE_TO_SURPRISED[COLOURS[nats]]
    assert title == f"token 0, log p {-nats:.3f}, step 0 of its block"


def test_every_token_has_its_own_number_colour_and_step():
    tokens = ("<b>", "&", '"', "d")
    score = Shown(tokens=tokens, token_logprobs=(0.0, -8.0, -1.0, -20.0), reveal_steps=(2, -1, 0, 11))
    assert spans(score) == [
        (SURE_TO_SURPRISED[0], "token 0, log p 0.000, step 2 of its block"),
        (SURE_TO_SURPRISED[LAST], "token 1, log p -8.000, given"),
        (SURE_TO_SURPRISED[1], "token 2, log p -1.000, step 0 of its block"),
        (SURE_TO_SURPRISED[LAST], "token 3, log p -20.000, step 11 of its block"),
    ]
    page = score._repr_html_()
    for token in tokens:
        assert f">{html.escape(token)}</span>" in page
    assert html.escape(repr(score)) in page and "-log p: 0 " in page and f" {MOST_NATS:g} nats or more" in page
    legend = re.findall(r'background:(#\w+)">&nbsp;', page)
    assert legend == list(SURE_TO_SURPRISED)
    assert spans(Shown(tokens=("a",), token_logprobs=(), reveal_steps=())) == [("", "token 0")]
    assert spans(Shown(tokens=("a",), token_logprobs=(-1.0,), reveal_steps=()))[0][1] == "token 0, log p -1.000"
    assert "<i>" not in Shown(text="<i>")._repr_html_()


def test_tokens_are_read_on_light_and_dark_pages():
    """Text is black on a colour of its own, or has the colour of the page."""
    for logprobs in ((-1.0,), ()):
        style = re.search(r'<span style="([^"]*)" title', Shown(token_logprobs=logprobs)._repr_html_())[1]
        assert ("color:#000" in style) == ("background:" in style) == bool(logprobs)
        assert "box-shadow" in style


def test_spaces_line_breaks_and_bytes_of_a_character_are_seen():
    page = Shown(tokens=(" a", "\n", "", "é", "\t"), token_logprobs=(-1.0,) * 5, reveal_steps=(0,) * 5)._repr_html_()
    shown = re.findall(r'title="[^"]*">([^<]*)</span>', page)
    assert shown == [" a", "↵\n", "·", "é", "⇥\t"]
    assert "pre-wrap" in page


def test_a_bound_is_named_at_its_tokens():
    assert "bound -1.000" in spans(Shown(bound=True))[0][1]


def test_a_long_text_says_how_much_of_it_is_shown():
    most = display.TOKENS_SHOWN
    for count in (most, most + 1):
        score = Shown(tokens=("a",) * count, token_logprobs=(-1.0,) * count, reveal_steps=(0,) * count)
        assert len(spans(score)) == most
        assert (f"{most:,} of {count:,} tokens" in score._repr_html_()) == (count > most)


@pytest.mark.parametrize(("length", "cut"), [(0, False), (39, False), (40, False), (41, True), (400, True)])
def test_a_line_begins_with_forty_characters(length, cut):
    text = "'" * length
    assert display.shown_text(text) == repr(text[:40] + "..." if cut else text)


@pytest.mark.parametrize(
    ("name", "bound", "error", "shown"),
    [
        ("log_prob", False, None, "log_prob=-1.2346"),
        ("log_prob", True, None, "log_prob≥-1.2346"),
        ("perplexity", True, None, "perplexity≤-1.2346"),
        ("bits_per_byte", True, 0.5, "bits_per_byte≤-1.2346 ± 0.5000"),
        ("log_prob", False, 0.0, "log_prob=-1.2346 ± 0.0000"),
    ],
)
def test_a_value_has_its_sign_and_its_error(name, bound, error, shown):
    assert display.shown_value(name, -1.23456, error, bound) == shown


def test_the_line_and_the_plain_values():
    score = Shown(bound=True, tokens=("a", "b"), token_logprobs=(-1.0, -2.0), text="a b")
    assert repr(score) == "Shown('a b', log_prob≥-1.0000, perplexity≤2.7183, 2 tokens, exact)"
    values = score.to_dict()
    assert set(values) == {field.name for field in dataclasses.fields(Shown)} - {"hidden"}
    assert json.loads(json.dumps(values)) == values
    window = values["windows"][0]
    assert (window["context"], window["target"], window["suffix"]) == ([1], [2, 3], [4])
    assert score.token_scores() == [("a", -1.0), ("b", -2.0)]
    with pytest.raises(DuelError):
        dataclasses.replace(score, token_logprobs=()).token_scores()


def test_the_plain_values_of_a_window():
    """JSON of everything that its score holds: its kind in a word, its blocks, and its other values."""
    other = Score(-3.0, kind=Kind.NOT_A_LIKELIHOOD)
    score = Score(
        -2.5, reveal_steps=(1, 0), kind=Kind.ESTIMATE, blocks=TwoPhaseBlocks(count=4), others={"oracle": other}
    )
    values = json.loads(json.dumps(score.to_dict()))
    assert values["log_prob"] == score.log_prob
    assert values["reveal_steps"] == [1, 0]
    assert values["kind"] == "estimate"
    assert values["blocks"]["count"] == 4
    assert values["others"] == {"oracle": other.to_dict()}
    assert values.keys() == {field.name for field in dataclasses.fields(Score)}
