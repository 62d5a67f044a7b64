"""The textbook loop over the bundled checkpoint, against which a run's numbers are compared."""

import torch
from textbook import score
from transformers import AutoModelForMaskedLM, AutoTokenizer

from lm_eval_duel import Duel, demo, rules
from lm_eval_duel.core.windows import Window
from lm_eval_duel.denoisers import load


def textbook(documents, rule, block):
    """(nats, steps) of each text by the textbook loop: one at a time, full logits from the plain model, no batch."""
    folder = demo.resolve("demo-mdm")
    model = AutoModelForMaskedLM.from_pretrained(folder, dtype=torch.float32).eval()
    words = AutoTokenizer.from_pretrained(folder)
    excluded = torch.arange(model.config.vocab_size) == words.mask_token_id
    found = []
    with torch.inference_mode():
        for text in documents:
            window = Window((), words(text, add_special_tokens=False)["input_ids"])
            found.append(
                score(
                    lambda ids: model(input_ids=ids[None]).logits[0],
                    words.mask_token_id,
                    excluded,
                    rules.parse(rule),
                    block,
                    window,
                    tie_when_all_mask=True,  # rotary positions, nothing in view: DESIGN's blank start
                )
            )
    return found


def agrees(documents, nats, rule, block):
    """Compare a run's nats per document with the textbook loop, documents with close picks apart; how many agree."""
    words = AutoTokenizer.from_pretrained(demo.resolve("demo-mdm"))
    windows = [Window((), words(text, add_special_tokens=False)["input_ids"]) for text in documents]
    scored = Duel(load("demo-mdm", device="cpu"), rule, block).log_prob(windows)
    compared = 0
    for ours, s, (by_hand, steps, _, _, nfe) in zip(nats, scored, textbook(documents, rule, block), strict=True):
        if s.near_ties:
            continue
        compared += 1
        noise = max(1e-4, 1e-6 * len(steps))
        assert s.reveal_steps == steps and s.nfe == nfe
        assert abs(ours - by_hand) < noise and abs(s.log_prob - by_hand) < noise
    return compared
