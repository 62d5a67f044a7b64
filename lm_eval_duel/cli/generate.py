"""`lm-eval-duel generate`: samples as JSON lines, each with its own log-probability."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import itertools
import json
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from lm_eval_duel.arguments import COUNT, NOT_NEGATIVE, SHARE, TEXT, whole
from lm_eval_duel.console.command_line import FILE, PATH, STDOUT, Flag, Parser, finite
from lm_eval_duel.demo import BUNDLED
from lm_eval_duel.errors import UsageError, usage
from lm_eval_duel.options import model_of
from lm_eval_duel.tasks import files

if TYPE_CHECKING:
    from lm_eval_duel import Duel

WARPERS = ("temperature", "top_k", "top_p")  # both flags, which change the draws, and model args of the network
PRINTS = """\
Writes one line of JSON for each text, in the order of the prompts, as soon as it and those before it are finished:
prompt and sample (numbers from 0), text, log_prob (nats, of all tokens given prompt and suffix) and its kind, tokens
with their log-probabilities and reveal steps, rule, block, seed.
A sample depends on the seed, its prompt's number and its own number, not on how many others there are.
"""


def main(arguments: Sequence[str]) -> None:
    """Write samples: `lm-eval-duel generate`."""
    options = parse(arguments)
    duel = load(options.model)
    temperature = 1.0 if options.temperature is None else options.temperature  # 1: the network's own distributions

    numbers = list(itertools.product(range(len(options.prompts)), range(options.num)))  # (prompt, sample)
    prompts = []
    keys = []
    for prompt, sample in numbers:
        prompts.append(options.prompts[prompt])
        keys.append(prompt << 32 | sample)  # so that more samples or prompts change none of the others
    samples = duel.generate_stream(
        prompts,
        suffixes=[options.suffix] * len(numbers),
        max_new_tokens=options.max_new_tokens,
        do_sample=temperature > 0,
        temperature=temperature,
        top_k=options.top_k,
        top_p=options.top_p,
        until=options.until,
        seed=options.seed,
        keys=keys,
    )
    made_by = method(duel, options, temperature)
    with opened(options.out) as file:
        for n, generated in in_order(samples):
            record = dataclasses.asdict(generated)
            del record["window"]["known"]
            del record["spec"]
            record["fingerprint"] = generated.fingerprint  # of the distribution that was drawn from
            context = record.pop("prompt")  # the text; "prompt" is its number
            prompt, sample = numbers[n]
            origin = {"prompt": prompt, "sample": sample, "context": context, "suffix": options.suffix}
            content = finite(origin | record | made_by)
            print(json.dumps(content, ensure_ascii=False), file=file, flush=True)


@usage()
def load(model: Mapping[str, Any]) -> Duel:
    """The distribution of model args; raises UsageError for a checkpoint that cannot be read or does not take them."""
    from lm_eval_duel import Duel

    arguments = dict(model)
    name = arguments.pop("pretrained", None) or BUNDLED
    batch_size = arguments.pop("batch_size")
    return Duel.from_pretrained(name, batch_size=None if batch_size == "auto" else int(batch_size), **arguments)


def method(duel: Duel, options: argparse.Namespace, temperature: float) -> dict[str, Any]:
    """The entries of each line that say how the text was drawn."""
    model = options.model
    return {
        "pretrained": model.get("pretrained") or BUNDLED,
        "estimator": duel.estimator.name,
        "rule": None if duel.rule is None else str(duel.rule),
        "block": duel.block,
        "grid": duel.grid,
        "cache": duel.denoiser.cache,
        "seed": options.seed,
        # those of the network if it has any, else those of the draws: `parse` refuses both together
        "temperature": model.get("temperature", temperature),
        "top_k": model.get("top_k", options.top_k),
        "top_p": model.get("top_p", options.top_p),
    }


def in_order(numbered: Iterable[tuple[int, Any]]) -> Iterator[tuple[int, Any]]:
    """(number, item) by rising numbers, each as soon as all before it have come.

    Those that have come when an error ends the iteration are passed on before it is raised.
    """
    waiting: dict[int, Any] = {}
    following = 0
    try:
        for number, item in numbered:
            waiting[number] = item
            while following in waiting:
                yield following, waiting.pop(following)
                following += 1
    except (Exception, KeyboardInterrupt):
        for number in sorted(waiting):
            yield number, waiting[number]
        raise


@contextlib.contextmanager
def opened(path: str) -> Iterator[IO[str]]:
    """The file to write to; `-` is standard output."""
    if path == STDOUT:
        yield sys.stdout
    else:
        with open(path, "w", encoding="utf-8") as file:
            yield file


@usage()
def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The parsed command line, with `model` (model args) and `prompts` (texts); raises UsageError."""
    options = Parser(
        "generate",
        "Draw texts under the rule that is scored (Algorithm 1), each with its exact log-probability.",
        PRINTS,
        "demo-mdm --model_args rule=greedy,block=32 --prompt 'We the' --num 4 --max_new_tokens 64",
        *("NAME", "model_args", "device", "batch_size"),
        prompt=Flag(TEXT, None, "texts to continue", many=True, unset="the empty text", shows="TEXT"),
        prompts=Flag(PATH, None, "files of prompts: tables, or plain text with one a line", many=True, shows="FILE"),
        field=Flag(TEXT, "prompt", "the column of a table that holds the prompt"),
        suffix=Flag(TEXT, "", "visible text after the generated one (infilling)"),
        num=Flag(COUNT, 1, "samples of each prompt", shows="N"),
        max_new_tokens=Flag(COUNT, 64, "positions to generate", shows="N"),
        temperature=Flag(NOT_NEGATIVE, None, "of the draws; 0 takes the most probable token at every pick", unset="1"),
        top_k=Flag(COUNT, None, "keep this many of the most probable tokens", unset="all"),
        top_p=Flag(SHARE, None, "keep the fewest tokens with this probability", unset="all"),
        until=Flag(TEXT, None, "stop strings", many=True, shows="TEXT"),
        seed=Flag(whole(0), 0, "seed of all draws", shows="N"),
        out=Flag(FILE, STDOUT, "the file to write", unset="standard output", shows="FILE"),
    ).parse_args(arguments)
    if options.prompt and options.prompts:
        raise UsageError("generate: name prompts by --prompt or by --prompts; leave one out.")
    if options.prompts:
        texts = files.texts(options.prompts, options.field, lines=True)
        options.prompts = [text.text for text in texts]
    options.prompts = options.prompts or options.prompt or [""]
    options.model = model_of(options)
    for key in WARPERS:
        if key in options.model and getattr(options, key) is not None:
            twice = f"--{key} {getattr(options, key):g} and {key}={options.model[key]} of --model_args"
            raise UsageError(f"generate: {twice} would both apply, one after the other; leave one out.")
    if options.out != STDOUT and Path(options.out).is_file():
        raise UsageError(f"generate: {options.out} exists; remove it, or name another file with --out.")
    return options
