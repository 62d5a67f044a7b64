"""The tables of published facts, whole: each change of one is a change of a file that is read in review.

The files in golden/ were made from the tables whose sources docs/checkpoints.md names, and read by eye.
`network_arguments.txt` has what each argument makes of values at the ends of its range.
"""

import dataclasses
from functools import partial

import golden
import torch

from lm_eval_duel.arguments import MAX_FACTOR
from lm_eval_duel.denoisers import checkpoint, hub, recognition, refused
from lm_eval_duel.denoisers.dit import checkpoint as dit_checkpoint
from lm_eval_duel.denoisers.dit import denoiser as dit
from lm_eval_duel.denoisers.hf import diffusion_gemma, families, layouts, pretrained
from lm_eval_duel.denoisers.load_options import ALIASES, NETWORK_ARGUMENTS, tokenizer_source
from lm_eval_duel.errors import DuelError

check = partial(golden.check_lines, __file__)


def shown(value):
    """A value as text, in the same words on every machine: a function by its name, a mapping with an entry a line."""
    if callable(value):
        return "a condition" if value.__name__ == "<lambda>" else value.__name__
    if isinstance(value, dict):
        entries = [f"\n        {key!r}: {shown(entry)}" for key, entry in value.items()]
        return "".join(entries)
    return repr(value)


def lines_of(constants):
    """Constants by name, a line each."""
    return [f"{name}: {shown(value)}" for name, value in constants.items()]


def fields_of(entry, default):
    """The fields of a dataclass that differ from those of another one, a line each."""
    for field in dataclasses.fields(entry):
        value = getattr(entry, field.name)
        if value == getattr(default, field.name):
            continue
        if field.name == "harmless":  # entries with a reason each
            value = sorted(value)
        yield f"    {field.name}: {shown(value)}"


def test_families():
    plain = families.Family("", "")
    lines = []
    for family in families.FAMILIES:
        lines += ["", f"{family.name}:", *fields_of(family, plain)]
    constants = {
        "read for every family": families.READ,
        "overridden": families.OVERRIDDEN,
        "plain decoders": families.PLAIN,
        "needed": layouts.NEEDED,
        "DiffuGPT's masks": layouts.DIFFUGPT_MASKS,
        "harmless": sorted(families.HARMLESS),
        "lengths": pretrained.LENGTHS,
        "DiffusionGemma's steps": diffusion_gemma.STEPS,
        "DiffusionGemma refuses": [*diffusion_gemma.REFUSED, *sorted(diffusion_gemma.REFUSED_BY_DECODER)],
    }
    for line in lines_of(constants):
        lines += ["", line]
    check("families", lines)


def test_our_own_dit():
    constants = {
        "DIT_NAMES": sorted(recognition.DIT_NAMES),
        "UNIFORM": recognition.UNIFORM,
        "GIDD": recognition.GIDD,
        "DIT_LAYOUT": recognition.DIT_LAYOUT,
        "DIT_SECTIONS": recognition.DIT_SECTIONS,
        "DIT_TOKENIZER": checkpoint.DIT_TOKENIZER,
        "GEMMA": recognition.GEMMA,
        "MOVED": checkpoint.MOVED,
        "MASKING": recognition.MASKING,
        "REPLACING": recognition.REPLACING,
        "MIXED": recognition.MIXED,
        "read: GIDD_SIZES": dit_checkpoint.GIDD_SIZES,
        "read: GIDD_MASK": dit_checkpoint.GIDD_MASK,
        "read: READ": dit_checkpoint.READ,
        "read: HARMLESS": dit_checkpoint.HARMLESS,
        "read: READ_BY_GIDD": dit_checkpoint.READ_BY_GIDD,
        "read: READ_OF_SECTIONS": dit_checkpoint.READ_OF_SECTIONS,
        "read: OTHER_SECTIONS": dit_checkpoint.OTHER_SECTIONS,
        "read: REFUSED": dit_checkpoint.REFUSED,
        "run: PUBLISHED_BLOCK": dit.PUBLISHED_BLOCK,
        "run: CLAMP": dit.CLAMP,
        "run: ATTENTION": dit.ATTENTION,
        "run: NOISED": dit.NOISED,
        "run: FAMILIES": dit.FAMILIES,
        "run: IGNORED": dit.IGNORED,
        "run: NOISE_EPS": dit.NOISE_EPS,
    }
    check("dit", lines_of(constants))


def test_refused_checkpoints():
    lines = []
    for entry in refused.ENTRIES:
        lines.append(f"{entry.checkpoint}: {shown(entry.classes)} {entry.named!r}")
        message = str(entry.error("a/checkpoint", "Class"))
        assert message.startswith("a/checkpoint is a Class: ")
        assert entry.why in message
        assert ("What works: " in message) == (entry.instead != refused.NOTHING)
    check("refused", lines)


VALUES = (None, "none", "None", "", "auto", "x", True, "false", -1, 0, "0", 1, 1.0, 1.5, 2, "1e3", 2**63 - 1, 2**63)
VALUES += (0.5, 1e-20, 0.99e-20, MAX_FACTOR, 1.01 * MAX_FACTOR)
VALUES += ("5+7", [7, 5, 7], (3,), "nan", "inf", "fp16", "torch.bfloat16")


def answer(function, *arguments):
    """What a function returns, or that it refuses its arguments."""
    try:
        return shown(function(*arguments))
    except DuelError:
        return "refused"


def test_network_arguments_at_the_ends_of_their_ranges():
    lines = []
    for name, argument in NETWORK_ARGUMENTS.items():
        lines += ["", f"{name}: {argument.kind.words} (default {argument.shown}, identity {argument.identity})"]
        for value in (*VALUES, *argument.kind.choices):
            result = answer(argument.read, name, value)
            if result == "refused":
                if name in ("block", "max_length", "temperature", "cfg_scale", "top_p"):
                    lines.append(f"    {value!r} is refused")
            elif result != repr(str(value)):
                lines.append(f"    {value!r} -> {result}")
    for name, (meant, value_of) in ALIASES.items():
        lines += ["", f"{name}, as {meant}:"]
        lines += [f"    {value!r} -> {answer(value_of, name, value)}" for value in (True, "false")]
    check("network_arguments", lines)


def test_a_tokenizer_comes_from_the_first_name_that_is_given():
    """The revision is that of the network, not of another tokenizer."""
    arguments = {"tokenizer": "TOKENIZER", "pretrained": "PRETRAINED", "model": "MODEL", "revision": "abc"}
    assert tokenizer_source(arguments) == ("TOKENIZER", "main")

    del arguments["tokenizer"]
    assert tokenizer_source(arguments) == ("PRETRAINED", "abc")

    del arguments["pretrained"]
    assert tokenizer_source(arguments) == ("MODEL", "abc")

    assert tokenizer_source({}) == ("demo-mdm", "main")


def test_devices(monkeypatch):
    """By name and by number, with no GPU and with two."""
    lines = []
    for count in (0, 2):
        monkeypatch.setattr(torch.cuda, "is_available", lambda count=count: count > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda count=count: count)
        for name in (None, "auto", "cpu", "cpu:0", "cuda", "cuda:0", "cuda:1", "cuda:2", "0", 1, "2", "mps"):
            lines.append(f"{count} GPUs, {name!r}: {answer(hub.pick_device, name)}")
    check("devices", lines)
