"""`lm-eval-duel inspect`: what a checkpoint is taken for, every guess visible before anything is scored with it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from lm_eval_duel.command_line import PROGRAM, Parser
from lm_eval_duel.errors import UsageError
from lm_eval_duel.harness.key_values import key_values
from lm_eval_duel.options import Options

if TYPE_CHECKING:
    from lm_eval_duel.harness.lm import DuelMDM


TEXT = "The state of the union is strong."


def inspect(name: str, arguments: dict[str, Any]) -> list[tuple[str, str]]:
    """What `name` is taken for under model args, as (word, value); loads it and scores one short text."""
    from lm_eval_duel.harness.lm import DuelMDM

    lm = DuelMDM(pretrained=name, **arguments)
    denoiser, tokenizer = lm.denoiser, lm.tokenizer
    network = getattr(denoiser, "model", None) or getattr(denoiser, "network", None)
    mask = "none: an autoregressive network" if denoiser.mask_id is None else _token(tokenizer, denoiser.mask_id)
    block = f", trained on blocks of {denoiser.block}" if denoiser.block else ""
    padding = {
        "block_causal": "unseen: it lies in later blocks",
        "causal": "unseen: it comes later",
        "bidirectional": "unseen (an attention mask is honoured): rows of any length go together",
    }[denoiser.attention]
    if not denoiser.honours_padding:
        padding = "seen: only rows of equal length go together"
    prefix, suffix = (" ".join(_token(tokenizer, token) for token in ids) for ids in (lm.text.prefix, lm.text.suffix))
    described = [
        ("checkpoint", name),
        ("family", f"{denoiser.family} ({lm.spec['denoiser']})"),
        ("parameters", f"{sum(parameter.numel() for parameter in network.parameters()):,}"),
        ("dtype", f"{lm.spec['dtype']} on {denoiser.device}"),
        ("vocabulary", f"{lm.spec['vocabulary']} columns are tokens"),
        ("mask", mask),
        ("attention", f"{denoiser.attention}{block}"),
        ("block", f"{lm.estimator.block} (grid {lm.estimator.grid})"),
        ("logit shift", f"{denoiser.shift}" + (": a token is predicted from the one before" if denoiser.shift else "")),
        ("max length", f"{denoiser.max_length}"),
        ("framing", " ".join(part for part in (f"bos={lm.text.bos}:", prefix, "text", suffix) if part)),
        ("padding", padding),
    ]
    if denoiser.attention != "causal":  # which always sees a token
        ties = "every cell ties: the lowest goes first" if denoiser.relative_positions else "cells differ"
        described.append(("blank rows", ties))
    described.append(("weights", lm.spec["weights"]))
    if "guidance" in lm.spec:
        described.append(("guidance", lm.spec["guidance"]))
    return [*described, ("one text", _score(lm))]


def _score(lm: DuelMDM) -> str:
    from lm_eval_duel.engine.windows import framed

    ids = lm.tok_encode(TEXT)[: lm.max_length - len(lm.text.prefix) - len(lm.text.suffix)]
    began = time.perf_counter()
    scored = lm.estimator.log_prob([framed(lm.text.prefix, ids, lm.text.suffix, "given")])[0]
    seconds = time.perf_counter() - began
    how = lm.spec.get("rule", lm.estimator.name) + ("" if scored.nfe is None else f", {scored.nfe} steps")
    return f"{scored.log_prob:.3f} nats for {len(ids)} tokens, {how}, {seconds:.2f} s"


def _token(tokenizer: Any, token: int) -> str:
    return f"{token} {tokenizer.convert_ids_to_tokens(token)!r}"


def main(arguments: Sequence[str]) -> None:
    """Print what a checkpoint is taken for, as a table: `lm-eval-duel inspect`."""
    parser = Parser(
        "inspect",
        "What a checkpoint is taken for, before anything is evaluated with it.",
        "Prints a table: family, mask token, attention, block, special tokens, padding, and the score of one text.",
        "demo-mdm --model_args block=8,rule=margin",
    )
    parser.add_argument("name", help="a folder, a hub name or a bundled name")
    parser.add_argument("--model_args", default="", help="as for lm_eval, to override a guess: block=8,bos=none,...")
    asked = parser.parse_args(arguments)
    said = key_values("--model_args", asked.model_args)
    if "pretrained" in said or Options.parse({**said, "pretrained": asked.name}).pretrained is None:
        raise UsageError(f"inspect: name the checkpoint once, first: {PROGRAM} inspect demo-mdm --model_args block=8.")
    from lm_eval.utils import setup_logging

    setup_logging()
    lines = inspect(asked.name, said)
    wide = max(len(word) for word, _ in lines)
    print("\n".join(f"{word:{wide}}  {value}" for word, value in lines))
