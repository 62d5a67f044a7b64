"""Every family of networks as a tiny random checkpoint in its own file layout, and its plain network in float64."""

import dataclasses
import functools
import json
import math
import re
from pathlib import Path

import decoder_reference
import dit_reference
import encoder_reference
import own
import plain
import pytest
import tiny
import torch
from decoder_reference import CASES
from textbook import score
from transformers import CONFIG_MAPPING

from lm_eval_duel import denoisers, rules
from lm_eval_duel.core.windows import Window
from lm_eval_duel.errors import DuelError

NOISED = ["duo", "udlm", "gidd-uniform"]
DITS = [kind for kind in dit_reference.CONFIGS if kind not in ("ar", *NOISED)]
MASKED_LMS = ["bert", "roberta", "distilbert", "modernbert"]
TEXTS = ["eurobert"] if "eurobert" in CONFIG_MAPPING else []  # not under transformers 4
PROTEINS = list(encoder_reference.PROTEIN_CASES)
NAMES = [*CASES, *DITS, *MASKED_LMS, *TEXTS, *PROTEINS]
WINDOWS = [
    Window((6,), (7, 9, 30, 12, 8, 15, 21, 11)),
    Window((14, 20, 9), (10, 9, 31, 12), (13,)),
    Window((22, 6), (33, 6, 7), (18,)),
    Window((), (8, 8, 20, 31, 6)),
    Window((9,), (10, 9, 31, 12), (13, 2), tail=4),
]


OWN = {"backend": "remote", "trust_remote_code": True}


def written(folder, name, entries=None, into=None):
    """A checkpoint of a family, its config changed (None: not there), and what one must say to load it."""
    entries = entries or {}
    if name in CASES:
        case = CASES[name]
        config = {key: value for key, value in {**case.config, **entries}.items() if value is not None}
        changed = dataclasses.replace(case, config=config, folder=into or case.folder)
        return decoder_reference.write(folder, changed)[0], dict(case.options)
    if name in dit_reference.CONFIGS:
        path, options = dit_reference.write(folder, name)[0], {}
    elif name == "own code":
        path, options = own.write(folder, own.DREAM, "DreamModel", own.decoder(bias=True)), OWN
    elif name == "esm":
        path, options = encoder_reference.esm(folder)[0], {}
    else:
        path, options = tiny.checkpoint(folder, name), {"attention": "causal"} if name == "gpt2" else {}
    file = Path(path) / "config.json"
    config = {key: value for key, value in {**json.loads(file.read_text()), **entries}.items() if value is not None}
    file.write_text(json.dumps(config))
    return path, options


def load(path, options, **more):
    return denoisers.load(path, device="cpu", **{**options, **more})


def refused(path, words, **options):
    with pytest.raises(DuelError) as error:
        denoisers.load(path, device="cpu", **options)
    assert re.search(words, str(error.value)), error.value


def opened(name, folder, **options):
    """The denoiser of a family, the logits of `ids, window` by its plain network, and the layers of the network."""
    if name in CASES:
        case = CASES[name]
        path, w = decoder_reference.write(folder, case)
        denoiser = denoisers.load(path, device="cpu", **{**case.options, **options})
        plainly = functools.cache(lambda ids, origin: decoder_reference.logits(case, w, ids, origin))
        layers = denoiser.model.base_model.h if case.net is None else denoiser.model.base_model.layers
        return denoiser, lambda ids, window: plainly(ids, len(window.context)), layers
    if name in DITS:
        denoiser, w = dit_reference.opened(folder, name, **options)

        def logits(ids, window):
            count = len(window.target) + window.tail if denoiser.bos == "official" else len(ids)
            level = dit_reference.noise_level(name, ids, count, getattr(denoiser, "sigma", "") == "schedule")
            seen = plain.block_causal(len(ids), denoiser.block or len(ids))
            return dit_reference.plain(w, ids, level, seen)

        return denoiser, logits, denoiser.network.blocks
    if name in MASKED_LMS:
        denoiser = denoisers.load(tiny.checkpoint(folder, name), device="cpu", **options)
        plainly = tiny.network(name).double()
        base = denoiser.model.base_model
        layers = (
            base.layers if name == "modernbert" else getattr(base, "encoder", getattr(base, "transformer", None)).layer
        )
        return denoiser, lambda ids, window: plainly(input_ids=torch.tensor([ids])).logits[0], layers
    if name in TEXTS:
        path, plainly = encoder_reference.eurobert(folder)
    else:
        path, plainly = encoder_reference.esm(folder, **encoder_reference.PROTEIN_CASES[name])
    denoiser = denoisers.load(path, device="cpu", **options)
    base = denoiser.model.base_model
    return denoiser, lambda ids, window: plainly(ids), base.layers if name in TEXTS else base.encoder.layer


def fitting(denoiser):
    """The windows that a network can score, with other tokens for those that it does not have."""
    known = (~denoiser.excluded).nonzero()[:, 0].tolist()
    replaced = lambda part: tuple(t if t in known else known[t % len(known)] for t in part)  # noqa: E731
    for window in WINDOWS:
        begin, block = len(window.context), denoiser.block
        if denoiser.attention == "causal" and (window.suffix or window.tail):
            continue
        zero = 0 if denoiser.anchor == "row" and denoiser.attention != "causal_prefix" else begin
        end = zero + math.ceil((begin + len(window.target) - zero) / block) * block if block else window.length
        if begin >= max(denoiser.shift, denoiser.seeds_blocks, denoiser.needs_visible) and window.length <= min(
            end if window.suffix or window.tail else window.length, denoiser.max_length
        ):
            yield Window(replaced(window.context), replaced(window.target), replaced(window.suffix), window.tail)


def textbook(network, rule, window, logits_of=None):
    """One window by the textbook loop over the plain network of `opened`, or over `logits_of`."""
    denoiser, rule = network.denoiser, rules.parse(rule)
    shifted = lambda ids: network.logits(tuple(ids.tolist()), window).roll(denoiser.shift, 0)  # noqa: E731
    with torch.no_grad():
        return score(
            logits_of or shifted,
            denoiser.mask_id,
            denoiser.excluded,
            rules.SeedFirst(rule) if denoiser.seeds_blocks else rule,
            denoiser.block or 4,
            window,
            denoiser.anchor if denoiser.attention == "block_causal" else "target",
            tie_when_all_mask=denoiser.relative_positions,
            sees=denoiser.last_block if denoiser.block else None,
        )
