"""The spec of a network in memory and under everything around it, and what is said as it is made, held to a file.

golden/in_memory.txt was read by eye when it was made.
"""

import itertools
import logging
import re
from types import SimpleNamespace

import golden
import pytest
import tiny
import torch
from toys import BlockCausal, Toy

from lm_eval_duel import Duel
from lm_eval_duel.denoisers.vocabulary import convention, expected
from lm_eval_duel.errors import DuelError


def function(ids, real):
    return TOY.features(ids, real)


class Described(Toy):
    """A user's denoiser, which has entries of its own."""

    def describe(self):
        return {"denoiser": "mine", "temperature_of_training": 3, "dtype": "no dtype"}


TOY = Toy(tokens=39, length=32)
MADE = {  # a network, or the dtype of a BERT, and arguments
    "a function": (function, {"mask_token_id": 4, "max_length": 8}),
    "a function with a tokenizer": (function, {"mask_token_id": 4, "tokenizer": tiny.tokenizer()}),
    "another mask than the tokenizer's": (function, {"mask_token_id": 5, "tokenizer": tiny.tokenizer()}),
    "a shifted function": (function, {"mask_token_id": 4, "max_length": 8, "shift_logits": True, "bos": "given"}),
    "a denoiser": (TOY, {}),
    "a denoiser with a spec": (Described(), {"weights": "run 7, step 2000"}),
    "a block-causal denoiser": (BlockCausal(block=4), {}),
    "a masked LM": ("float32", {"tokenizer": tiny.tokenizer()}),
    "a masked LM without a tokenizer": ("float32", {"mask_token_id": 4}),
    "bfloat16": ("bfloat16", {"tokenizer": tiny.tokenizer()}),
    "float16": ("float16", {"tokenizer": tiny.tokenizer()}),
    "autocast": ("float32", {"tokenizer": tiny.tokenizer(), "autocast": torch.bfloat16}),
    "guidance": (TOY, {"cfg_scale": 0.5}),
    "a temperature": (TOY, {"temperature": 0.7}),
    "all filters": (TOY, {"temperature": 2, "top_k": 5, "top_p": 0.9, "exclude_ids": [9, 7], "cfg_scale": 1}),
    "a cache": ("float32", {"tokenizer": tiny.tokenizer(), "cache": "dual"}),
    "nothing around it": (TOY, {"cfg_scale": 0, "cache": "none", "exclude_ids": ()}),
    "a block": (TOY, {"rule": "margin:k=2", "block": 4, "grid": "row"}),
    "an estimator": (TOY, {"estimator": "elbo", "mc_samples": 32, "draw_seed": 3}),
}


@pytest.mark.row_checks
def test_specs_of_networks_in_memory(caplog):
    caplog.set_level(logging.INFO)
    lines = []
    for name, (network, arguments) in MADE.items():
        caplog.clear()
        if isinstance(network, str):
            network = tiny.network("bert").to(getattr(torch, network))
        duel = Duel.from_model(network, **arguments)
        shown = re.sub("fingerprint=[0-9a-f]{12}", "fingerprint=...", repr(duel))
        lines += ["", f"{name}:", shown]
        for key, value in duel.spec.items():
            if key not in ("version", "tokenizer"):
                lines.append(f"    {key}: {value}")
        network = duel.denoiser
        lines.append(
            f"    rows of {network.max_length}, published block {network.published_block}, coarse {network.coarse}"
        )
        lines.append(f"    special tokens {network.special_tokens}, separate among {network.separate_tokens} tokens")
        lines += [f"    {record.levelname}: {record.getMessage()}" for record in caplog.records]
    golden.check_lines(__file__, "in_memory", lines)


BOS = ("none", "first", "given", "scored", "official", "auto")


@pytest.mark.parametrize("framed", [False, True])
@pytest.mark.parametrize("bos", BOS)
def test_special_tokens_by_hand(bos, framed):
    """Those that the tokenizer adds; else one BOS, else the end of a text, if the convention wants one."""
    for appends, shift, start, end in itertools.product((False, True), (0, 1), (None, "c"), (None, "d")):
        words = tiny.tokenizer(framed=framed)
        words.bos_token = start
        words.sep_token = None
        words.eos_token = end
        network = SimpleNamespace(bos=bos, appends_sep=appends, shift=shift)

        convention_of_text = bos
        if bos == "auto":
            convention_of_text = "given" if framed else "none"
        prefix = []
        suffix = []
        if convention_of_text not in ("none", "first"):
            if framed:
                prefix = [2]
                suffix = [3] if appends else []
            elif start or end:
                prefix = [7] if start else [8]
            else:
                with pytest.raises(DuelError, match="tokenizer=" if shift else "bos=none"):
                    convention(words, network)
                assert expected(network, words) is None
                continue

        assert convention(words, network) == (convention_of_text, prefix, suffix)
        seen = (tuple(prefix), tuple(suffix)) if convention_of_text == "given" else None
        assert expected(network, words) == seen
    assert expected(SimpleNamespace(bos=bos), None) == (((), ()) if bos == "given" else None)
