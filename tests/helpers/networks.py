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
import pytest
import tiny
import torch
from decoder_reference import CASES, GIVEN_WORDS
from safetensors.torch import save_file
from textbook import score
from transformers import CONFIG_MAPPING

from lm_eval_duel import denoisers, rules
from lm_eval_duel.audit import plain_networks as plain
from lm_eval_duel.core.windows import Window
from lm_eval_duel.errors import DuelError

NOISED = ["duo", "udlm", "gidd-uniform"]
DITS = [kind for kind in dit_reference.CONFIGS if kind not in ("ar", *NOISED)]
MASKED_LMS = list(tiny.MASKED_LMS)
TEXTS = ["eurobert"] if "eurobert" in CONFIG_MAPPING else []  # not under transformers 4
PROTEINS = list(encoder_reference.PROTEIN_CASES)
LETTERS = ["letters", "causal letters"]  # of no known class, with code of their own
CAUSAL = ["ar", *tiny.CAUSAL_LMS, "causal letters"]
NAMES = [*CASES, *DITS, *MASKED_LMS, *TEXTS, *PROTEINS, *own.KINDS, *CAUSAL, "letters"]
WINDOWS = [
    Window((6,), (7, 9, 30, 12, 8, 15, 21, 11)),
    Window((14, 20, 9), (10, 9, 31, 12), (13,)),
    Window((22, 6), (33, 6, 7), (18,)),
    Window((), (8, 8, 20, 31, 6)),
    Window((9,), (10, 9, 31, 12), (13, 2), tail=4),
    Window((6, 7, 9, 30, 12, 8, 15, 21, 11), (14, 20, 9, 10)),
]


UNKNOWN = 1  # [UNK], in no window: stands for what a causal network is not shown
OWN = {"backend": "remote", "trust_remote_code": True}


def made(folder, name, entries=None, into=None):
    """A checkpoint of a family, its config changed (None: not there): its path, what a user says to load it, and the
    logits (L, V) of its plain network, for `ids, window, denoiser`.
    """
    entries = entries or {}
    options = {}
    if name in CASES:
        case = CASES[name]
        config = changed(case.config, entries)
        path, w = decoder_reference.write(folder, dataclasses.replace(case, config=config, folder=into or case.folder))

        @functools.cache
        def case_logits(ids, origin, attention, seeded):
            if attention == "causal":
                return plain.logits(case.net, w, ids, plain.block_causal(len(ids), 1))
            return decoder_reference.logits(case, w, ids, origin, seeded)

        def plainly(ids, window, denoiser):
            return case_logits(ids, len(window.context), denoiser.attention, denoiser.seeds_blocks)

        return path, dict(case.options), plainly
    if name in dit_reference.CONFIGS:
        path, w = dit_reference.write(folder, name)

        def logits(ids, window, denoiser):
            count = len(window.target) + window.tail if denoiser.bos == "official" else len(ids)
            level = dit_reference.noise_level(name, ids, count, getattr(denoiser, "sigma", "") == "schedule")
            block = 1 if name == "ar" else denoiser.block
            return dit_reference.plain(w, ids, level, plain.block_causal(len(ids), block or len(ids)))

    else:
        if name in own.KINDS:
            path, options, plainly = own.made(folder, name)
        elif name in LETTERS:
            path, options, plainly = letters(folder, name == "causal letters")
        elif name in TEXTS:
            path, plainly = encoder_reference.eurobert(folder)
        elif name in (*PROTEINS, "esm"):
            path, plainly = encoder_reference.esm(folder, **encoder_reference.PROTEIN_CASES.get(name, {}))
        else:
            path = tiny.checkpoint(folder, name)
            plainly = tiny_logits(name)
            options = {"attention": "causal"} if name in tiny.CAUSAL_LMS else {}
            options |= GIVEN_WORDS if name == "qwen2" else {}

        def logits(ids, window, denoiser):
            return plainly(ids)

    file = Path(path) / "config.json"
    config = changed(json.loads(file.read_text()), entries)
    file.write_text(json.dumps(config))
    return path, options, logits


def changed(config, entries):
    """A config with other entries; None: without that one."""
    return {key: value for key, value in {**config, **entries}.items() if value is not None}


def tiny_logits(name):
    """The logits of one row by a network of transformers."""
    model = tiny.network(name)
    if name == "bigbird":
        model.bert.set_attention_type("original_full")
    if name == "gemma2":
        model.set_attn_implementation("eager")  # the default leaves out the softcap under transformers 4
    if name in tiny.MASKED_LMS:
        model.double()
    return lambda ids: model(input_ids=torch.tensor([ids])).logits[0].double()


CODE = """
import torch
from transformers import PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import MaskedLMOutput

class LetterConfig(PretrainedConfig):
    model_type = "letters"

class LetterModel(PreTrainedModel):
    config_class = LetterConfig
    def __init__(self, config):
        super().__init__(config)
        self.embed = torch.nn.Embedding(40, 8)
        self.head = torch.nn.Linear(8, 40)
        self.post_init()
    def get_input_embeddings(self):
        return self.embed
    def forward(self, input_ids, attention_mask=None, **kwargs):
        x = self.embed(input_ids)
        return MaskedLMOutput(logits=self.head(MIX))
"""


def letters(folder, causal):
    """A checkpoint whose code makes a network of no known class, bidirectional or causal; what is said, and logits."""
    bidirectional = "x * torch.arange(x.shape[1])[:, None].cos() + x.mean(1, keepdim=True)"
    (folder / "letters.py").write_text(CODE.replace("MIX", "x.cumsum(1)" if causal else bidirectional))
    kind = "AutoModelForCausalLM" if causal else "AutoModel"
    auto_map = {"AutoConfig": "letters.LetterConfig", kind: "letters.LetterModel"}
    config = {"model_type": "letters", "vocab_size": 40, "max_position_embeddings": 32, "auto_map": auto_map}
    (folder / "config.json").write_text(json.dumps({**config, "architectures": ["LetterModel"]}))
    torch.manual_seed(0)
    table = torch.randn(40, 8)
    head = torch.randn(40, 8)
    tensors = {"embed.weight": table, "head.weight": head, "head.bias": torch.zeros(40)}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    tiny.tokenizer(mask=not causal).save_pretrained(folder)

    def logits(ids):
        x = table[list(ids)].double()
        mixed = x.cumsum(0) if causal else x * torch.arange(len(x))[:, None].cos() + x.mean(0)
        return mixed @ head.double().T

    return str(folder), {"trust_remote_code": True, **({"attention": "causal"} if causal else {})}, logits


def written(folder, name, entries=None, into=None):
    """The path of a checkpoint of a family, and what a user says to load it."""
    return made(folder, name, entries, into)[:2]


def load(path, options, **more):
    return denoisers.load(path, device="cpu", **{**options, **more})


def refused(path, words, **options):
    with pytest.raises(DuelError) as error:
        denoisers.load(path, device="cpu", **options)
    assert re.search(words, str(error.value)), error.value


def fitting(denoiser):
    """The windows that a network can score, with other tokens for those that it does not have."""
    tokens = (~denoiser.excluded).nonzero()[:, 0].tolist()

    def replaced(part):
        return tuple(token if token in tokens else tokens[token % len(tokens)] for token in part)

    needed = max(denoiser.shift, denoiser.seeds_blocks, denoiser.needs_visible)
    for window in WINDOWS:
        fits = len(window.context) >= needed and window.length <= denoiser.max_length
        if fits and (_ends_with_its_blocks(denoiser, window) or not (window.suffix or window.tail)):
            yield Window(replaced(window.context), replaced(window.target), replaced(window.suffix), window.tail)


def _ends_with_its_blocks(denoiser, window):
    """Whether a network sees what follows the target: a network with blocks only up to the end of the last one."""
    if denoiser.attention == "causal":
        return False
    if not denoiser.block:
        return True
    begin = len(window.context)
    zero = 0 if denoiser.anchor == "row" and denoiser.attention != "causal_prefix" else begin
    blocks = math.ceil((begin + len(window.target) - zero) / denoiser.block)
    return window.length <= zero + blocks * denoiser.block


def textbook(network, rule, window, logits_of=None):
    """One window by the textbook loop over the plain network, or over `logits_of`."""
    denoiser = network.denoiser
    rule = rules.parse(rule)
    causal = denoiser.attention == "causal"

    def shifted(ids):
        return network.logits(tuple(ids.tolist()), window).roll(denoiser.shift, 0)

    with torch.no_grad():
        return score(
            logits_of or shifted,
            UNKNOWN if causal else denoiser.mask_id,
            denoiser.excluded,
            rules.SeedFirst(rule) if denoiser.seeds_blocks else rule,
            1 if causal else denoiser.block or 4,
            window,
            denoiser.anchor if denoiser.attention == "block_causal" else "target",
            tie_when_all_mask=denoiser.relative_positions,
            sees=denoiser.last_block if denoiser.block else None,
        )
