"""Views of a scored text: one line, coloured tokens in a notebook, plain values, and pairs for other tools."""

from __future__ import annotations

import html
from typing import ClassVar

from lm_eval_duel.core.scores import Plain
from lm_eval_duel.errors import DuelError, counted

SURE_TO_SURPRISED = ("#ffffff", "#ffffd7", "#ffff87", "#ffd787", "#ffaf5f", "#ff8700", "#ff5f00", "#ff0000")
MOST_NATS = 8.0  # -log p of a token in the last colour, or more
START = 40  # characters of a text in its line
TOKENS_SHOWN = 2000  # of a text in a notebook, which keeps the page below a megabyte
OUTLINE = "border-radius:2px;box-shadow:inset 0 0 0 1px rgba(128,128,128,.4)"  # seen on light and dark pages


class Display(Plain):
    """The views of a dataclass with `tokens`, `token_logprobs` and `reveal_steps`, an entry for each token."""

    shown: ClassVar[tuple[str, ...]] = ()  # the fields of the line, after the text

    tokens: tuple[str, ...]
    token_logprobs: tuple[float, ...]
    reveal_steps: tuple[int, ...]
    text: str
    kind: str
    note: str

    @property
    def no_error(self) -> str:
        """The reason that the error of a drawn value is not known; empty if it is, or if nothing is drawn."""
        return ""

    @property
    def errors(self) -> dict[str, float]:
        """The standard errors of drawn values, by name."""
        return {}

    def __repr__(self) -> str:
        bound = getattr(self, "bound", False)
        parts = [shown_text(self.text)]
        for name in self.shown:
            error = self.errors.get(name)
            parts.append(shown_value(name, getattr(self, name), error, bound))
        parts.append(counted(len(self.tokens), "token"))
        parts.append(f"{self.kind} {self.note}".rstrip())
        if self.no_error:
            parts.append(self.no_error)
        return f"{type(self).__name__}({', '.join(parts)})"

    def _repr_html_(self) -> str:
        """The tokens for a notebook, coloured by log-probability; a tooltip has each token's number and step.

        An outline shows where each token begins and ends, spaces included.
        """
        term = "its term of the bound" if getattr(self, "bound", False) else "log p"
        spans = []
        for n, token in enumerate(self.tokens[:TOKENS_SHOWN]):
            style = OUTLINE  # without a colour the page's own text colour stays, which is light on a dark page
            about = [f"token {n}"]
            if self.token_logprobs:
                nats = -self.token_logprobs[n]
                last = len(SURE_TO_SURPRISED) - 1
                index = round(last * min(1.0, max(0.0, nats) / MOST_NATS))
                style += f";background:{SURE_TO_SURPRISED[index]};color:#000"
                about.append(f"{term} {-nats:.3f}")
            if self.reveal_steps:
                step = self.reveal_steps[n]
                about.append("given" if step < 0 else f"step {step} of its block")
            tooltip = ", ".join(about)
            spans.append(f'<span style="{style}" title="{tooltip}">{html.escape(visible_token(token))}</span>')
        text = "".join(spans)
        swatch = f'<span style="{OUTLINE};background:{{}}">&nbsp;&nbsp;</span>'
        legend = "".join(map(swatch.format, SURE_TO_SURPRISED))
        caption = f"{html.escape(repr(self))}<br>-log p: 0 {legend} {MOST_NATS:g} nats or more"
        if len(self.tokens) > TOKENS_SHOWN:
            caption += f"<br>The first {TOKENS_SHOWN:,} of {len(self.tokens):,} tokens are shown."
        return f'<div style="white-space:pre-wrap">{text}</div><div><small>{caption}</small></div>'

    def token_scores(self) -> list[tuple[str, float]]:
        """(token, log-probability in nats) of each token, in order; of a bound, its term for the token.

        Raises:
            DuelError: If the value is a sum over orders, so that single tokens have none.
        """
        if len(self.token_logprobs) != len(self.tokens):
            raise DuelError("This value is a sum over orders of unmasking: its tokens have no log-probabilities.")
        return list(zip(self.tokens, self.token_logprobs, strict=True))


def visible_token(token: str) -> str:
    """A token with a sign for each line break and tab; a dot if it is a byte inside a character, which has no text."""
    if not token:
        return "·"
    return token.replace("\n", "↵\n").replace("\t", "⇥\t")


def shown_text(text: str) -> str:
    """The beginning of a text, in quotes."""
    return repr(str(text) if len(text) <= START else f"{text[:START]}...")


def shown_value(name: str, value: float, error: float | None = None, bound: bool = False) -> str:
    """A value with its name, as in perplexity≤55.1500 ± 0.5500. If it is a bound, that of log_prob is a lower one."""
    sign = "="
    if bound:
        sign = "≥" if name == "log_prob" else "≤"
    text = f"{name}{sign}{value:.4f}"
    if error is not None:
        text += f" ± {error:.4f}"
    return text
