"""`lm-eval-duel inspect`: how a checkpoint is read, with every guess visible before anything is scored."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from lm_eval_duel.console.command_line import PROGRAM, Parser, plain_table
from lm_eval_duel.errors import UsageError
from lm_eval_duel.estimators.registry import kind_of
from lm_eval_duel.options import model_of

if TYPE_CHECKING:
    from lm_eval_duel.harness.lm import DuelMDM


TEXT = "The state of the union is strong."


def inspect(model: dict[str, Any]) -> list[tuple[str, str]]:
    """Load the checkpoint of model args, score one short text, and return how it is read, as (label, value) pairs."""
    from lm_eval_duel.harness.lm import DuelMDM

    lm = DuelMDM(**model)
    denoiser, tokenizer = lm.denoiser, lm.tokenizer
    network = getattr(denoiser, "model", None) or getattr(denoiser, "network", None)
    unmasked = "an autoregressive network" if denoiser.attention == "causal" else "the noise is random tokens"
    mask = f"none: {unmasked}" if denoiser.mask_id is None else _token(tokenizer, denoiser.mask_id)
    block = f", trained on blocks of {denoiser.block}" if denoiser.block else ""
    padding = {
        "block_causal": "invisible: it lies in later blocks",
        "causal_prefix": "invisible: it lies in later blocks",
        "causal": "invisible: it comes after the text",
        "bidirectional": "invisible (the attention mask is honoured): rows of any length share a batch",
    }[denoiser.attention]
    if not denoiser.honours_padding:
        padding = "visible (the attention mask is ignored): only rows of equal length share a batch"
    prefix, suffix = (" ".join(_token(tokenizer, token) for token in ids) for ids in (lm.text.prefix, lm.text.suffix))
    described = [
        ("checkpoint", model["pretrained"]),
        ("family", f"{denoiser.family} ({lm.spec['denoiser']})"),
        ("parameters", f"{sum(parameter.numel() for parameter in network.parameters()):,}"),
        ("dtype", f"{lm.spec['dtype']} on {denoiser.device}"),
        ("vocabulary", f"{lm.spec['vocabulary']} columns are tokens"),
        ("mask", mask),
        ("attention", f"{denoiser.attention}{block}"),
        ("block", f"{lm.estimator.block or 'none: the whole target'} (grid {lm.estimator.grid})"),
        ("logit shift", f"{denoiser.shift}" + (": a token is predicted from the one before" if denoiser.shift else "")),
        ("max length", f"{denoiser.max_length}"),
        ("special tokens", " ".join(part for part in (f"bos={lm.text.bos}:", prefix, "text", suffix) if part)),
        ("padding", padding),
    ]
    if denoiser.attention != "causal" and denoiser.mask_id is not None:  # a causal network always sees a token
        ties = "every position ties: the lowest goes first" if denoiser.relative_positions else "positions differ"
        described.append(("all-mask starts", ties))
    described.append(("weights", lm.spec["weights"]))
    if "guidance" in lm.spec:
        described.append(("guidance", lm.spec["guidance"]))
    return [*described, ("one text", _score(lm))]


def _score(lm: DuelMDM) -> str:
    from lm_eval_duel.estimators.totals import Total

    windows = lm.text.windows(TEXT)
    began = time.perf_counter()
    scores = lm.estimator.log_prob(windows)
    seconds = time.perf_counter() - began
    total = Total.from_scores(windows, scores, lm.estimator.name)
    steps = "" if total.nfe is None else f", {total.nfe} steps"
    kind = kind_of(lm.estimator.name, lm.spec, total.beam)
    error = "" if total.stderr is None else f" ± {total.stderr:.3f}"
    nats_of = f"{total.log_prob:.3f}{error} nats for the {total.tokens} tokens of {TEXT!r}"
    return f"{nats_of}, {lm.spec.get('rule', lm.estimator.name)}{steps}, {kind}, {seconds:.2f} s"


def _token(tokenizer: Any, token: int) -> str:
    return f"{token} {tokenizer.convert_ids_to_tokens(token)!r}"


def main(arguments: Sequence[str]) -> None:
    """Print how a checkpoint is read, as a table: `lm-eval-duel inspect`."""
    parser = Parser(
        "inspect",
        "Show how a checkpoint is read, before anything is evaluated with it.",
        "Prints a table: family, mask token, attention, block, special tokens, padding, and the score of one text.",
        "demo-mdm --model_args block=8,rule=margin",
        *("NAME", "model_args", "device", "batch_size"),
    )
    model = model_of(parser.parse_args(arguments))
    if not model.get("pretrained"):
        raise UsageError(f"inspect: name the checkpoint: {PROGRAM} inspect demo-mdm --model_args block=8.")
    from lm_eval.utils import setup_logging

    setup_logging()
    print(plain_table([], inspect(model)))
