"""Checks of network, rule, block and window before anything is scored. What is not supported raises DuelError.

Shapes: N windows.
"""

from __future__ import annotations

import dataclasses
import logging
import weakref
from collections.abc import Iterator, Sequence
from functools import cached_property

from lm_eval_duel import rules
from lm_eval_duel.arguments import BLOCK, Argument, choice, has_index
from lm_eval_duel.core.denoiser import Denoiser
from lm_eval_duel.core.windows import Window
from lm_eval_duel.errors import DuelError, another_block, documentation, first_position_unseen, random_tokens
from lm_eval_duel.rules.scheduled import Dream

log = logging.getLogger("lm_eval.duel_mdm")

DEFAULT_BLOCK = 32
GRID = Argument(choice("auto", "target", "row"), "auto")
# denoisers of which a warning was logged: of windows without special tokens, and of suffixes that are not seen
_warned_of_special_tokens: weakref.WeakSet[Denoiser] = weakref.WeakSet()
_warned_of_suffixes: weakref.WeakSet[Denoiser] = weakref.WeakSet()


def require_masks(denoiser: Denoiser, name: str) -> None:
    """Raise DuelError for a network whose noise is random tokens, which estimator `name` does not score."""
    if denoiser.noise_training is not None:
        raise random_tokens(f"this network ({denoiser.family})", name, denoiser.reads_causally)


def resolve_block(denoiser: Denoiser, block: int | str | None) -> int | None:
    """The block to use: an int, or None (the whole target); "auto" is the trained or published one, or else 32."""
    number: int | str | None = BLOCK("block", block)
    if denoiser.attention == "causal":
        if number not in ("auto", 1):
            raise _one_order(f"block={block}")
        return 1
    if isinstance(number, str):
        return denoiser.block or denoiser.published_block or DEFAULT_BLOCK
    if denoiser.block is not None and number != denoiser.block:
        raise another_block(denoiser.block, number)
    return number


def resolve_grid(denoiser: Denoiser, grid: str) -> str:
    """The grid to use: "target" or "row"; "auto" is the one that the network needs.

    A causal prefix ends where the target begins, so blocks count from there, as in the authors' code.
    """
    grid = GRID.read("grid", grid)
    if has_canvases(denoiser) and grid == "row":
        raise DuelError("The canvases of this network count from the target's first position; use grid=target or auto.")
    needed = None
    if denoiser.attention == "block_causal":
        needed = denoiser.anchor
    if needed and grid not in ("auto", needed):
        which = "A block-causal network" if needed == "row" else "This network"
        raise DuelError(f"{which} counts its blocks from the {needed}'s first position; use grid={needed} or auto.")
    if denoiser.seeds_blocks and grid == "row":
        raise DuelError(
            "With grid=row a block may begin inside the context, and first_token=causal predicts a block's first token "
            "from the clean row. Use grid=target or auto, or first_token=block."
        )
    if grid == "auto":
        return needed or "target"
    return grid


def has_canvases(denoiser: Denoiser) -> bool:
    """True for a network with canvases: its noise is random tokens, and a block sees nothing after it."""
    return denoiser.noise_training is not None and denoiser.block is not None


def rule_for(denoiser: Denoiser, rule: rules.Rule) -> rules.Rule:
    """The rule for this network: within `seed_first` if it reveals the first token of each block alone."""
    if denoiser.seeds_blocks and not isinstance(rule, rules.SeedFirst):
        return rules.SeedFirst(rule)
    return rule


def _one_order(given: str) -> DuelError:
    return DuelError(f"A causal network has no rule or block: leave both out and pass estimator=ar; got {given}.")


def check_rule(denoiser: Denoiser, rule: rules.Rule) -> None:
    """Raise DuelError for a rule that this network does not support."""
    if denoiser.attention == "causal" and not isinstance(rule, rules.LeftToRight):
        raise _one_order(f"rule={rule}")
    if denoiser.shift and denoiser.cache and not isinstance(rule, rules.SeedFirst):
        raise first_position_unseen(denoiser.cache)
    if in_memory := list(rules.in_memory(rule)):
        raise DuelError(
            f"'{in_memory[0]}' of rule {type(rule).__name__} is a module or tensor in memory, which the fingerprint "
            f"cannot describe. Save it to a file that the rule names, as in {documentation('rules.md')}."
        )
    rule.check_network(denoiser)


def warn_of_blocks(rule: rules.Rule, block: int | None) -> None:
    """Warn of blocks under Dream's schedule, whose sampler has none.

    Within `seed_first` the rule is Fast-dLLM's sampler for Dream, which has blocks, and so has its threshold.
    """
    if not isinstance(rule, Dream) or rule.alg == "confidence_threshold" or block is None:
        return
    log.warning(
        "rule=%s: Dream's diffusion_generate has no blocks, and with block=%d each block takes %d steps of its own, "
        "which is another sampler. For Dream's, pass block=none",
        rule,
        block,
        rule.steps,
    )


def check_every_order(denoiser: Denoiser, name: str) -> None:
    """Raise DuelError for a network that cannot evaluate every state of a block, which estimator `name` needs."""
    if denoiser.attention == "causal":
        raise DuelError("An autoregressive network has one order: use estimator=ar.")
    states = f"estimator={name} evaluates states in which a block's first token is masked and later ones are revealed."
    if denoiser.seeds_blocks:
        raise DuelError(
            f"{states} This network's sampler reveals it first, alone. For the sampler that predicts it like the "
            "others (vLLM's), pass first_token=block."
        )
    if denoiser.shift and denoiser.cache:
        raise DuelError(
            f"{states} Under cache={denoiser.cache} it is predicted at the block's start alone. Leave cache out."
        )


def check_two_phase(denoiser: Denoiser, rule: rules.Rule, cache: str) -> None:
    """Raise DuelError, with what to use instead, for a network or rule whose blocks cannot be scored in two phases."""
    if denoiser.cache is not None:
        raise DuelError(
            f"estimator=two_phase gives the value without a cache, and this network is under cache={denoiser.cache}. "
            f"Pass the network without it; TwoPhase(..., cache={denoiser.cache!r}) names that of the first phase."
        )
    if denoiser.attention != "bidirectional":
        instead = "ar" if denoiser.attention == "causal" else "duel"
        raise DuelError(
            "estimator=two_phase needs a cache that changes the values: it scores every block under one, which is "
            f"cheap, and a sample of blocks without. A {denoiser.attention} network sees nothing after a block, so "
            "what is kept of earlier blocks is exact, and there is no cheaper value to correct. Use "
            f"estimator={instead}, which is exact, with fewer texts (--limit) if it takes too long; or a bidirectional "
            "network, such as demo-mdm."
        )
    if rule.spans_blocks:
        raise DuelError(
            "estimator=two_phase scores single blocks, which across=true of rule klass makes one chain. Leave across "
            "out, or use estimator=duel."
        )
    if denoiser.shift and not isinstance(rule, rules.SeedFirst):
        raise DuelError(
            f"estimator=two_phase scores every block under cache={cache}, where this network predicts a block's first "
            "token at the block's start alone. Pass seed_first=true, which is another rule, or use estimator=duel."
        )


def check_windows(
    denoiser: Denoiser, block: int | None, grid: str, windows: Sequence[Window], generating: bool = False
) -> None:
    """Raise DuelError, naming the window, for one that cannot be scored (or generated)."""
    if isinstance(windows, Window):
        raise DuelError("Pass a list of windows; got one Window. Write [window].")
    if isinstance(windows, str):
        raise DuelError("Pass a list of windows, which hold token ids; got a text. Texts go to Duel.score([text]).")
    if not has_index(windows):
        raise DuelError(f"Pass a list of windows; got an object of the class {type(windows).__name__}.")
    unscorable = set(denoiser.excluded.nonzero()[:, 0].tolist()) - {denoiser.mask_id}
    for n, window in enumerate(windows):
        if not isinstance(window, Window):
            raise DuelError(f"Window {n} is not a Window(context=(), target=ids), but a {type(window).__name__}.", n)
        target = () if generating else window.target
        case = WindowCase(denoiser, block, grid, window, target, unscorable)
        for problem in _problems(case):
            raise DuelError(f"Window {n} {problem}", n)
    _warn_without_special_tokens(denoiser, windows)
    _warn_of_unseen_suffixes(denoiser, grid, windows)


def _warn_without_special_tokens(denoiser: Denoiser, windows: Sequence[Window]) -> None:
    """Warn, once per denoiser, of a window without the special tokens that the network expects before a text."""
    if denoiser.special_tokens is None or denoiser in _warned_of_special_tokens:
        return
    without_context = [n for n, window in enumerate(windows) if window.target and not window.context]
    if not without_context:
        return
    _warned_of_special_tokens.add(denoiser)
    before, after = denoiser.special_tokens
    log.warning(
        "Window %d has no context, but this network expects special tokens before a text. Without them, values differ "
        "from the harness's. Score Window(context=%s, target=ids%s), or load the network with bos='none'. (Warned once "
        "per denoiser.)",
        without_context[0],
        before or "(bos,)",
        f", suffix={after}" if after else "",
    )


def _warn_of_unseen_suffixes(denoiser: Denoiser, grid: str, windows: Sequence[Window]) -> None:
    """Warn, once per denoiser, of targets in blocks before the last one, which do not see a window's suffix."""
    block = denoiser.block
    if block is None or denoiser.attention == "bidirectional" or denoiser in _warned_of_suffixes:
        return
    closing: tuple[int, ...] = ()  # the special tokens after a text, which are no suffix to be read
    if denoiser.special_tokens:
        _, closing = denoiser.special_tokens
    with_suffix = 0
    unseen = 0
    for window in windows:
        if not window.target or window.suffix in ((), closing):
            continue
        first = len(window.context) if grid == "row" else 0
        last = first + len(window.target) - 1
        with_suffix += 1
        unseen += first // block != last // block
    if not unseen:
        return
    _warned_of_suffixes.add(denoiser)
    log.warning(
        "In %d of %d windows with a suffix (or a special token at the end) the target spans several blocks of %d, and "
        "only the last of them sees the suffix, as this network is block-causal. Use a bidirectional network to score "
        "all tokens given the suffix. "
        "(Warned once per denoiser.)",
        unseen,
        with_suffix,
        block,
    )


@dataclasses.dataclass(frozen=True)
class WindowCase:
    """A window, the network that is to score it, and what the checks read of both."""

    denoiser: Denoiser
    block: int | None
    grid: str
    window: Window
    target: tuple[int, ...]  # ids to score; none if they are to be generated
    unscorable: set[int]  # ids other than [MASK] that the network gives no probability

    @cached_property
    def ids(self) -> set[int]:
        """The ids that occur in the row."""
        return {*self.window.context, *self.window.suffix, *self.target}

    @property
    def end(self) -> int:
        """The column after the target."""
        return len(self.window.context) + len(self.window.target)

    @property
    def positions(self) -> int:
        """The number of positions from the one where blocks begin to count to the end of the target."""
        return self.end if self.grid == "row" else len(self.window.target)

    @property
    def border(self) -> int:
        """The column after the last block of a network with a trained block."""
        return self.end + -self.positions % (self.denoiser.block or 1)


def _problems(case: WindowCase) -> Iterator[str]:
    """The problems of a window, the most basic first. Each message completes "Window n ..."."""
    yield from _of_layout(case)
    yield from _of_ids(case)
    yield from _of_attention(case)
    yield from _of_tokens(case)


def _of_layout(case: WindowCase) -> Iterator[str]:
    """Problems of the numbers of positions."""
    denoiser = case.denoiser
    window = case.window
    if window.length > denoiser.max_length:
        around = len(window.context) + len(window.suffix)
        yield (
            f"has {window.length} positions ({around} of them context and suffix), and a row of this network holds at "
            f"most {denoiser.max_length}. Shorten one of its parts."
        )
    if denoiser.needs_visible and window.target and not window.context + window.suffix:
        yield (
            "shows no token at its first step, and this network divides by the number of visible ones. Keep the "
            "tokenizer's special tokens (leave bos=none out), or pass a context."
        )
    if window.target and len(window.context) < max(denoiser.shift, denoiser.seeds_blocks):
        yield (
            "needs a context: this network predicts each token from the one before it. Use bos=given for texts; for "
            "ids, put a token into the window's context."
        )


def _of_ids(case: WindowCase) -> Iterator[str]:
    """Ids that no row may hold."""
    last = case.denoiser.vocab_size - 1
    outside = [token for token in case.ids if not 0 <= token <= last]
    if outside:
        yield f"holds id {outside[0]}; the network's ids are 0 to {last}."
    images = sorted(case.ids & case.denoiser.image_ids)
    if images:
        yield f"holds id {images[0]}, which stands for an image. Images are not scored: leave their tokens out."
    if case.denoiser.mask_id in case.ids:
        yield f"holds the mask token (id {case.denoiser.mask_id}), which can be neither context nor target."


def _of_attention(case: WindowCase) -> Iterator[str]:
    """Parts of the window that this kind of network does not see, or not from the first step on."""
    denoiser = case.denoiser
    window = case.window
    if window.suffix and window.target and denoiser.attention == "causal":
        yield "has a suffix, which a causal network never sees. Leave it out, or score it with a bidirectional one."
    by_blocks = denoiser.block and denoiser.attention != "bidirectional"
    if window.suffix and window.target and by_blocks and window.length > case.border:
        yield (
            f"has a suffix after position {case.border}, where its last target block ends, and this network sees "
            "nothing after that. Leave out the ids after it."
        )
    if has_canvases(denoiser):
        if window.target and not window.context:
            yield "needs a context: its first canvas has no clean token to read. Keep BOS."
        if window.target and window.suffix:
            yield "has a suffix, which a canvas never sees. Leave it out."
        if window.known:
            yield "has known target positions, which the canvases before them do not see. Leave them out."
    if window.known and (denoiser.attention != "bidirectional" or denoiser.cache):
        yield "has known target positions, which only a bidirectional network without cache= sees from the first step."
    if window.known and denoiser.hides_given:
        yield "has known target positions, and cfg_scale masks what is given: leave one of them out."
    if window.tail and (case.block is None or case.positions % case.block):
        yield (
            f"has a tail, so its target must end on a block border: {case.positions} positions with block {case.block} "
            "do not. Off a border the value is not a probability."
        )


def _of_tokens(case: WindowCase) -> Iterator[str]:
    """Targets that the network gives no probability."""
    impossible = case.unscorable.intersection(case.target)
    excluded = sorted(impossible.intersection(case.denoiser.excluded_ids))
    if excluded:
        yield f"holds id {excluded[0]}, which exclude_ids leaves out: its probability is 0."
    padding = sorted(impossible)
    if padding:
        yield f"holds id {padding[0]}, which is padding and not a token of the vocabulary."
