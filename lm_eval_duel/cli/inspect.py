"""`lm-eval-duel inspect`: how a checkpoint is read, with every guess visible before anything is scored."""

from __future__ import annotations

import argparse
import dataclasses
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from lm_eval_duel.cli.scored import shown_log_prob
from lm_eval_duel.console.command_line import FLAGS, PATH, REASONS, STDOUT, Flag, Parser, plain_table, write_json
from lm_eval_duel.console.exits import PROGRAM
from lm_eval_duel.errors import UsageError, usage
from lm_eval_duel.estimators import registry
from lm_eval_duel.options import Options, model_args_of, model_of
from lm_eval_duel.results.table import number
from lm_eval_duel.tasks import files, named

if TYPE_CHECKING:
    from lm_eval.api.task import Task

    from lm_eval_duel.harness.lm import DuelMDM


PREDICTED = ("at its own position", "from the one before")  # by the logit shift
COUNTED_FROM = {"target": "first scored position", "row": "row's first position"}  # blocks, by the grid
SENTENCE = "The state of the union is strong."
PADDING = {  # by attention
    "block_causal": "invisible: it lies in later blocks",
    "causal_prefix": "invisible: it lies in later blocks",
    "causal": "invisible: it comes after the text",
    "bidirectional": "invisible (the attention mask is honoured): rows of any length share a batch",
}
PRINTS = """\
Prints a table: family, mask token, attention, block, special tokens, padding, and the score of one text.
With --tasks or --files, it times a few windows of these texts on this machine, and prints what scoring all of them
takes: rule steps (NFE), network calls (at least), rows, token-rows (positions of the rows that the network evaluates),
time, and the peak memory while the windows were timed; for the run's estimator, duel, two_phase and elbo. Other model
args change these lines, such as sample= and mc_samples=.
"""


def inspect(lm: DuelMDM, name: str) -> list[tuple[str, str]]:
    """Score one short text, and return how the checkpoint of this name is read, as (label, value) pairs."""
    from lm_eval_duel.harness import stats

    denoiser = lm.denoiser
    attention = denoiser.attention
    if denoiser.block:
        attention += f", trained on blocks of {denoiser.block}"
    described = [
        ("checkpoint", name),
        ("family", f"{denoiser.family} ({lm.spec['denoiser']})"),
        ("parameters", _parameters(denoiser.quantized, stats.parameters(denoiser))),
        ("dtype", f"{lm.spec['dtype']} on {denoiser.device}"),
        ("vocabulary", f"{lm.spec['vocabulary']} columns are tokens"),
        ("mask", _mask(lm)),
        ("attention", attention),
        ("block", _block(lm)),
        ("logit shift", f"{denoiser.shift}: a token is predicted {PREDICTED[denoiser.shift]}"),
        ("max length", _length(lm)),
        ("special tokens", _special_tokens(lm)),
        ("padding", _padding(lm)),
    ]
    if denoiser.attention != "causal" and denoiser.mask_id is not None:  # a causal network always sees a token
        ties = "every position ties: the lowest goes first" if denoiser.relative_positions else "positions differ"
        described.append(("all-mask starts", ties))
    described.append(("weights", lm.spec["weights"]))
    if "guidance" in lm.spec:
        described.append(("guidance", lm.spec["guidance"]))
    return [*described, ("one text", _score(lm))]


def _parameters(quantized: bool, count: int | None) -> str:
    if count is not None:
        return f"{count:,}"
    return "not known: the weights are packed" if quantized else "not known"


def _mask(lm: DuelMDM) -> str:
    """The mask token, or why there is none."""
    from lm_eval_duel.denoisers.vocabulary import another_mask

    denoiser = lm.denoiser
    if denoiser.mask_id is not None:
        mask = _token(lm.tokenizer, denoiser.mask_id)
        of_tokenizer = another_mask(denoiser.mask_id, lm.tokenizer)
        if of_tokenizer is None:
            return mask
        return f"{mask}; the tokenizer's own is {_token(lm.tokenizer, of_tokenizer)}, which counts as a token"
    if denoiser.attention == "causal":
        return "none: an autoregressive network"
    return "none: the noise is random tokens"


def _block(lm: DuelMDM) -> str:
    """The block, and the position from which blocks count."""
    block = lm.estimator.block
    if block is None:
        return "none: the whole target"
    return f"{block}, counted from the {COUNTED_FROM[lm.estimator.grid]} (grid={lm.estimator.grid})"


def _special_tokens(lm: DuelMDM) -> str:
    """The row of a text: the special tokens around it."""
    before = [_token(lm.tokenizer, token) for token in lm.text.prefix]
    after = [_token(lm.tokenizer, token) for token in lm.text.suffix]
    row = " ".join([*before, "text", *after]) if before or after else "none"
    return f"{row} (bos={lm.text.bos})"


def _padding(lm: DuelMDM) -> str:
    """The effect of padding in a batch."""
    if not lm.denoiser.honours_padding:
        return "visible (the attention mask is ignored): only rows of equal length share a batch"
    return PADDING[lm.denoiser.attention]


def _length(lm: DuelMDM) -> str:
    """The positions of a row, and how many of them are left for text."""
    positions = lm.denoiser.max_length
    length = f"{positions} positions"
    if lm.text.capacity < positions:
        length += f": special tokens and {lm.text.capacity} of text"
    if lm.denoiser.attention == "causal":
        length += "; the network reads all but the last, which it predicts"
    return length


def _score(lm: DuelMDM) -> str:
    from lm_eval_duel.estimators.totals import Total

    windows = lm.text.windows(SENTENCE)
    began = time.perf_counter()
    scores = lm.estimator.log_prob(windows)
    seconds = time.perf_counter() - began
    total = Total.from_scores(windows, scores, lm.estimator.name)
    steps = "" if total.nfe is None else f", {total.nfe} steps"
    method = lm.spec.get("rule", lm.estimator.name)
    drawn = registry.find(lm.estimator.name).is_drawn
    nats = shown_log_prob(total.value, drawn, ".3f")
    about = f"{nats} nats for the {total.tokens} tokens of {SENTENCE!r}"
    scored = f"{about}, {method}{steps}, {total.value.short_label}, {number(seconds)} s"
    reason = REASONS.get(total.value.nats)
    return f"{scored} ({reason})" if reason else scored


def _token(tokenizer: Any, token: int) -> str:
    name = tokenizer.convert_ids_to_tokens(token)
    return f"{token}, which is no token of the tokenizer" if name is None else f"{token} {name!r}"


@usage()
def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The parsed command line, with `model` (the arguments of the model); raises UsageError for wrong arguments."""
    options = Parser(
        "inspect",
        "Show how a checkpoint is read, before anything is evaluated with it, and how long scoring your texts takes.",
        PRINTS,
        "demo-mdm --model_args block=8,rule=margin --tasks sotu",
        *("NAME", "model_args", "device", "batch_size", "include_path", "metadata", "limit", "json", "field", "lines"),
        tasks=dataclasses.replace(FLAGS["tasks"], default=None),
        files=Flag(PATH, None, "files of text, or folders of them, as for `score`", many=True, shows="FILE"),
    ).parse_args(arguments)
    options.model = model_of(options)
    if not options.model.get("pretrained"):
        raise UsageError(f"inspect: name the checkpoint: {PROGRAM} inspect demo-mdm --model_args block=8.")
    for name in options.tasks or ():
        named.check(name)
    files.check_outputs(options.files or (), {"--json": options.json})
    options.metadata = named.metadata_of_texts(options, options.files) | options.metadata
    return options


@usage()
def _load_tasks(options: argparse.Namespace) -> list[Task]:
    """The tasks of --tasks; before weights are read, UsageError for what is wrong with them or the checkpoint."""
    if not options.tasks:
        return []
    from lm_eval_duel.harness import patches
    from lm_eval_duel.text.loading import require_loadable

    patches.without_our_advice()
    require_loadable(Options.parse(options.model))
    metadata = {**model_args_of(options), **options.metadata}
    return named.load(options.tasks, metadata, options.include_path, options.limit)


def main(arguments: Sequence[str]) -> None:
    """Print how a checkpoint is read, and what scoring texts takes: `lm-eval-duel inspect`."""
    options = parse(arguments)
    from lm_eval.utils import setup_logging

    from lm_eval_duel.cli import timing
    from lm_eval_duel.harness.lm import DuelMDM

    setup_logging()
    tasks = _load_tasks(options)
    lm = DuelMDM(**options.model)
    described = inspect(lm, options.model["pretrained"])
    content: dict[str, Any] = {"checkpoint": dict(described)}
    parts = [plain_table([], described)]
    if options.tasks or options.files:
        documents = timing.read_documents(lm, options, tasks)
        timed, notes = timing.measure(lm, documents)
        content |= timing.figures(documents, timed, notes)
        parts.append(timing.table(lm, documents, timed, notes))
    if options.json != STDOUT:
        print("\n\n".join(parts))
    if options.json:
        write_json(options.json, content)
