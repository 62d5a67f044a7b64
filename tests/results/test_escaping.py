"""Names in Markdown, by an independent CommonMark parser, and in LaTeX: text, whatever they hold."""

import random
import re

import pytest

from lm_eval_duel.console.tables import markdown_table, one_line
from lm_eval_duel.results.table import LATEX, MARKDOWN

plain, code, escape, rule_name = MARKDOWN.escape, MARKDOWN.code, LATEX.escape, LATEX.rule
NAMES = (
    "1. first",
    "# head #",
    "![image](x)",
    "[a]: x",
    "<!-- hidden -->",
    "<x@y.z>",
    "&amp; &#65; &",
    "a\\",
    "b  \nend",
)
ALPHABET = "ab1 .)(#*_`~|[]<>!&;:\\/-+=$\n"


def names(count=250):
    generator = random.Random(0)
    drawn = ("".join(generator.choices(ALPHABET, k=generator.randint(1, 12))) for _ in range(count))
    return [*NAMES, *(name for name in drawn if one_line(name).strip())]


def shown(text, kind):
    """The text that a parser shows for the only block of `kind`, which must hold no markup."""
    parser = pytest.importorskip("markdown_it").MarkdownIt("commonmark").enable(["table", "strikethrough"])
    tokens = parser.parse(text)
    inline = [token for token in tokens if token.type == "inline"]
    kinds = {token.type.removesuffix("_open") for token in tokens if token.type.endswith("_open")}
    assert kinds == kind, (text, kinds)
    children = inline[-1].children
    assert {child.type for child in children} <= {"text", "text_special"}, (text, children)
    return "".join(child.content for child in children)


@pytest.mark.parametrize(
    ("form", "kinds"),
    [
        ("## {}", {"heading"}),
        ("- {}", {"bullet_list", "list_item", "paragraph"}),
        ("some words: {}", {"paragraph"}),
    ],
)
def test_a_name_in_markdown_is_text(form, kinds):
    for name in names():
        words = one_line(name).strip()
        found = shown(form.format(plain(words)), kinds)
        assert found.removeprefix("some words: ") == words, name


def test_a_name_in_a_table_is_text():
    words = [" ".join(one_line(name).split()) for name in names()]
    lines = markdown_table(["h", "k"], [[plain(name), code("greedy:k=1")] for name in words]).splitlines()
    for name, line in zip(words, lines[2:], strict=True):
        cells = re.split(r"(?<!\\)\|", line)
        assert len(cells) == 4, name
        found = shown(f"some words {cells[1].strip()}".replace("\\|", "|"), {"paragraph"})
        assert found.removeprefix("some words ") == name


def test_latex_reads_no_argument_from_the_name_that_starts_a_row():
    """After the two backslashes that end a row, LaTeX takes [ and * for arguments."""
    for name in ("[2pt]", "*", "* [2pt]"):
        assert not re.match(r"\s*[\[*]", escape(name))
    assert escape("a[b]*c") == "a{[}b]{*}c"
