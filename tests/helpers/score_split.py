"""Numbers of checkpoints, computed by one process or, under torchrun, by groups that hold a network together.

python score_split.py JOBS.json OUT       JOBS: {name: [checkpoint, model args of the network]}; writes OUT_<rank>.json

In a job whose name ends in "misrouted", the routers of all processes but the first choose other experts.
In a job whose name ends in "again", the network is loaded a second time, in float32.
"""

import contextlib
import json
import os
import sys

import torch
from transformers.models.qwen3_moe import modeling_qwen3_moe

from lm_eval_duel import denoisers, fingerprint
from lm_eval_duel.engine.windows import Window
from lm_eval_duel.estimators.duel import Duel
from lm_eval_duel.estimators.elbo import Elbo

WINDOWS = [
    Window((6,), (7, 9, 30, 12, 8, 15, 21, 11)),
    Window((14, 20, 9), (10, 9, 31, 12), (13,)),
    Window((22, 6, 17, 17, 2), (33, 6, 7, 18)),
    Window((6,), (7, 9, 30, 12)),
]


def numbers(denoiser):
    """Log-probabilities and orders of texts, of samples, and of a bound."""
    rule = "left_to_right" if denoiser.attention == "causal" else "margin"
    block = {"block_causal": denoiser.block, "causal": 1}.get(denoiser.attention, 4)
    duel = Duel(denoiser, rule, block)
    windows = [window for window in WINDOWS if not (window.suffix and denoiser.attention == "causal")]
    scores = [(score.log_prob, list(score.reveal_steps)) for score in duel.log_prob(windows)]
    drawn = duel.sample([(6,), (14, 20)], 8, seed=1)
    samples = [(sample.log_prob, [*sample.tokens, *sample.reveal_steps]) for sample in drawn]
    bounds = []
    if denoiser.attention != "causal":
        bounds = [(score.log_prob, []) for score in Elbo(denoiser, samples=8).log_prob(WINDOWS)]
    return {"numbers": scores + samples + bounds, "spec": fingerprint.digest(denoiser.describe())}


@contextlib.contextmanager
def misrouted():
    """Each token goes to the experts after those that its router chooses."""
    router = modeling_qwen3_moe.Qwen3MoeTopKRouter
    forward = router.forward

    def elsewhere(self, hidden_states):
        *scores, chosen = forward(self, hidden_states)
        return (*scores, (chosen + 1) % self.num_experts)

    router.forward = elsewhere
    try:
        yield
    finally:
        router.forward = forward


def main(jobs, out):
    found, rank = {}, os.environ.get("RANK", "0")
    with open(jobs, encoding="utf-8") as file:
        entries = json.load(file)
    for name, (checkpoint, arguments) in entries.items():
        try:
            with misrouted() if name.endswith("misrouted") and rank != "0" else contextlib.nullcontext():
                denoiser = denoisers.load(checkpoint, device="cpu", **arguments)
        except SystemExit:  # a process that held its part until the leader released it
            continue
        found[name] = numbers(denoiser)
        if name.endswith("again"):
            second = denoisers.load(checkpoint, device="cpu", **{**arguments, "dtype": "float32"})
            found[name]["again"] = numbers(second)["numbers"]
            assert numbers(denoiser)["numbers"] == found[name]["numbers"]
        found[name]["parameters"] = sum(part.numel() for part in denoiser.model.parameters())
        found[name]["own"] = sum(getattr(part, "_local_tensor", part).numel() for part in denoiser.model.parameters())
        if {"tp_plan", "ep_size"} & arguments.keys():
            denoiser.end()
    if found:
        with open(f"{out}_{rank}.json", "w", encoding="utf-8") as file:
            json.dump(found, file)


if __name__ == "__main__":
    torch.manual_seed(0)
    main(*sys.argv[1:])
