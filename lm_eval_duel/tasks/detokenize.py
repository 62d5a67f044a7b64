"""Detokenizers turn a row of a benchmark into plain text.

PTB, WikiText, LM1B and LAMBADA are published with spaces around punctuation and with placeholders for numbers. The
models were trained on plain text, so the official evaluation of MDLM, BD3-LM and SEDD, which the DUEL paper follows,
undoes that by fixed lists of replacements, and published perplexities are of the result. The lists are unchanged, with
the replacements that never match or do harm: better ones would be another benchmark. WikiText's is part of lm_eval.
"""

from __future__ import annotations

import re
from collections.abc import Callable

Rule = tuple[str | re.Pattern[str], str]  # (pattern, replacement)


def _one_space_inside(opening: str, closing: str) -> Rule:
    """Remove a space at both ends inside a pair; of nested pairs, inside the inner one."""
    marks = "".join(re.escape(mark) for mark in dict.fromkeys(opening + closing))
    pair = re.compile(rf"{re.escape(opening)} ([^{marks}]+) {re.escape(closing)}")
    return pair, rf"{opening}\1{closing}"


PTB: tuple[Rule, ...] = (
    (" 's", "'s"),
    ("s ' ", "s' "),
    (" n't", "n't"),
    (" \n ", "\n"),
    (r"\/", "/"),
    *[(" N ", " 1 ")] * 10,  # neighbours share a space, so one pass leaves every other N of a run; two are enough
    ("$ 1", "$1"),
    ("# 1", "#1"),
    ("<unk>", "?"),
)

LM1B: tuple[Rule, ...] = (
    ("http : / / ", "http://"),
    ("https : / / ", "https://"),
    (re.compile(r" '(\w+)"), r"'\1"),
    (re.compile(r" (\w+) \. "), r" \1. "),
    (re.compile(r" (\w+) \.$"), r" \1."),
    (" ? ", "? "),
    (re.compile(r" \?$"), "?"),
    (" ! ", "! "),
    (re.compile(r" !$"), "!"),
    (" , ", ", "),
    (" : ", ": "),
    (" ; ", "; "),
    (" / ", "/"),
    _one_space_inside('"', '"'),
    _one_space_inside("'", "'"),
    _one_space_inside("(", ")"),
    _one_space_inside("[", "]"),
    ("$ ", "$"),
    ("£ ", "£"),
)


def _apply(rules: tuple[Rule, ...], text: str) -> str:
    """Apply each rule once to the whole text, in order."""
    for pattern, replacement in rules:
        text = re.sub(re.escape(pattern) if isinstance(pattern, str) else pattern, replacement, text)
    return text


def wikitext(text: str) -> str:
    """A line of WikiText-2 or -103 (raw), by lm_eval's own rules, which it applies to a page."""
    from lm_eval.tasks.wikitext.preprocess_wikitext import wikitext_detokenizer

    return wikitext_detokenizer({"page": text})


def ptb(text: str) -> str:
    """A sentence of Penn Treebank. Every number is N there and becomes 1, every rare word <unk> and becomes ?."""
    return _apply(PTB, text)


def lm1b(text: str) -> str:
    """A sentence of the One Billion Word benchmark."""
    return _apply(LM1B, text)


def lambada(text: str) -> str:
    """A passage of OpenAI's LAMBADA: straight double quotes, and a line break before each passage."""
    return "\n" + re.sub("[\N{LEFT DOUBLE QUOTATION MARK}\N{RIGHT DOUBLE QUOTATION MARK}]", '"', text).strip()


def scientific(text: str) -> str:
    """An article of PubMed or arXiv (scientific_papers)."""
    return lm1b(wikitext(text))


DETOKENIZERS: dict[str, Callable[[str], str]] = {
    function.__name__: function for function in (wikitext, ptb, lm1b, lambada, scientific)
}
