"""Runs on the simulated device next to the same runs on the CPU: `python simulated_runs.py FOLDER CASE ...`.

Prints a line of JSON for each run of a case: the largest difference, or the error.
"""

import dataclasses
import json
import sys
import tempfile
import traceback
from pathlib import Path

import simulated_device

simulated_device.register()

import torch  # noqa: E402

from lm_eval_duel.denoisers import hub  # noqa: E402
from lm_eval_duel.estimators.arguments import (  # noqa: E402
    ConfidenceArguments,
    ElboArguments,
    LatticeArguments,
    OrderArguments,
    TwoPhaseArguments,
)

pick_on_cpu = hub.pick_device
hub.pick_device = lambda name: torch.device(name) if str(name) == simulated_device.NAME else pick_on_cpu(name)

import networks  # noqa: E402
import numpy  # noqa: E402
import tiny  # noqa: E402
from harness_requests import ask  # noqa: E402
from laws import numbers  # noqa: E402
from safetensors.torch import save_file  # noqa: E402

from lm_eval_duel import Duel, denoisers, training_metrics  # noqa: E402
from lm_eval_duel.core import batch_size as budget  # noqa: E402
from lm_eval_duel.core.windows import Window  # noqa: E402
from lm_eval_duel.denoisers.cached.denoiser import Cached  # noqa: E402
from lm_eval_duel.estimators.duel import Autoregressive, DuelEstimator  # noqa: E402
from lm_eval_duel.estimators.elbo import Elbo  # noqa: E402
from lm_eval_duel.estimators.lattice import Lattice  # noqa: E402
from lm_eval_duel.estimators.sampled_confidence import SampledConfidence  # noqa: E402
from lm_eval_duel.estimators.sampled_order import SampledOrder  # noqa: E402
from lm_eval_duel.estimators.two_phase import TwoPhase  # noqa: E402
from lm_eval_duel.harness.distributed import Ranks  # noqa: E402
from lm_eval_duel.harness.lm import DuelMDM  # noqa: E402

CPU, SIM = "cpu", simulated_device.NAME
RULES = (
    "margin:k=2",
    "klass:mu=0.3:nu=0.5:history=2",
    "entropy_bound:gamma=1.0",
    "random:k=2",
    "hierarchy:tau=0.4:low=0.2",
    "dream:alg=entropy:steps=4",
    "greedy:sub_block=2",
    "greedy:seed_first=true",
)


def runs(denoiser, windows, more, cached):
    """The results of everything that a network supports, by name; with `more`, of all rules and estimators."""
    settings = {"traced": True, "batch_size": 4}
    contexts = [window.context for window in windows]
    if denoiser.attention == "causal":
        yield "ar", Autoregressive(denoiser, **settings).log_prob(windows)
        yield "sample", DuelEstimator(denoiser, "left_to_right", 1).sample(contexts, 7, seed=3)
        return

    block = 4 if denoiser.attention == "bidirectional" else "auto"
    greedy = DuelEstimator(denoiser, "greedy", block, **settings)
    yield "sample", greedy.sample(contexts, 7, seed=3)
    untailed = [dataclasses.replace(window, tail=0) for window in windows]
    yield "elbo", Elbo(denoiser, ElboArguments(16), **settings).log_prob(untailed)

    estimators = {"greedy": greedy}
    estimators["lattice"] = Lattice(denoiser, block, LatticeArguments(["greedy", "entropy:k=2"]), **settings)
    if denoiser.attention == "bidirectional" and cached:
        seeded = "greedy:seed_first=true" if denoiser.shift else "greedy"
        estimators["dual"] = DuelEstimator(Cached(denoiser, "dual"), seeded, block, **settings)
    if more:
        steps = [score.reveal_steps for score in greedy.log_prob(windows)]
        yield "replay", greedy.replay(windows, steps)
        for rule in RULES:
            estimators[rule] = DuelEstimator(denoiser, rule, block, **settings)
        estimators["trial"] = DuelEstimator(denoiser, "greedy", block)  # how much a call holds is found by trial
        confidence = SampledConfidence(denoiser, block, ConfidenceArguments(n=2, tau=0.5), **settings)
        yield "sampled_confidence sample", confidence.sample(contexts, 7, seed=3)
        estimators["sampled_confidence"] = confidence
        order = OrderArguments("entropy", 3, alg_temp=0.5)
        estimators["sampled_order"] = SampledOrder(denoiser, block, order, batch_size=4)
        estimators["two_phase"] = TwoPhase(denoiser, "greedy", 2, TwoPhaseArguments(0.5), batch_size=4)
    for name, estimator in estimators.items():
        yield name, estimator.log_prob(windows)


def difference(on_cpu, on_device):
    """The largest difference of numbers, but for windows with near ties: float noise may change their order."""
    ours = []
    theirs = []
    for one, other in zip(on_cpu, on_device, strict=True):
        if getattr(one, "near_ties", 0) or getattr(other, "near_ties", 0):
            continue
        ours += numbers([one])
        theirs += numbers([other])
    ours = numpy.array(ours)
    theirs = numpy.array(theirs)
    assert (numpy.isnan(ours) == numpy.isnan(theirs)).all()
    return float(numpy.nanmax(abs(ours - theirs) / abs(ours).clip(min=1.0), initial=0.0))


def compare(folder, case):
    """The results of a case: `network`, or `network+` for every rule, or `network:key=value` for a network argument."""
    name, _, argument = case.partition(":")
    key, _, value = argument.partition("=")
    path, options = networks.written(Path(tempfile.mkdtemp(dir=folder)), name.rstrip("+"))
    if key:
        options[key] = value if key == "exclude_ids" else float(value)
    on_cpu = denoisers.load(path, device=CPU, dtype="float32", **options)
    on_device = denoisers.load(path, device=SIM, dtype="float32", **options)
    windows = list(networks.fitting(on_cpu))[:3]
    assert windows

    more = name.endswith("+")
    cached = not key
    pairs = zip(runs(on_cpu, windows, more, cached), runs(on_device, windows, more, cached), strict=True)
    for (run, ours), (_, theirs) in pairs:
        yield {"run": run, "difference": difference(ours, theirs)}


# ---------------------------------------------------------------- other cases


def mixing(folder):
    """Which mixes of devices raise, as on CUDA, and which do not."""
    on_cpu = torch.ones(3, 3)
    on_device = torch.ones(3, 3, device=SIM)
    at = torch.tensor([0, 1])
    refused = []
    mixes = {
        "add": lambda: on_device + on_cpu,
        "cat": lambda: torch.cat([on_device, on_cpu]),
        "index": lambda: on_cpu[at.to(SIM)],
        "where": lambda: torch.where(on_device > 0, on_cpu, on_device),
        "write": lambda: on_cpu.add_(on_device.sum()),
        "scalar": lambda: on_device * torch.tensor(2.0),
        "indices": lambda: on_device[at],
    }
    for name, mix in mixes.items():
        try:
            mix()
        except RuntimeError:
            refused.append(name)
    assert refused == ["add", "cat", "index", "where", "write"], refused
    yield {"run": "mixing", "difference": 0.0}


def waits(folder):
    """The host waits for the device a few times for each network call: the network, the rule, the loop, the start."""
    path, _ = networks.written(Path(tempfile.mkdtemp(dir=folder)), "mdlm")
    windows = []
    for n in range(8):
        target = [5 + (7 * i + n) % 6 for i in range(12)]
        windows.append(Window((2,), target))
    for rule in ("greedy", "left_to_right"):
        duel = DuelEstimator(denoisers.load(path, device=SIM), rule, 12, batch_size=8)
        duel.row_checks.number_due = lambda *_: 0  # rows that are evaluated again would be half of so short a run
        simulated_device.synchronisations.clear()
        duel.log_prob(windows)
        total = sum(simulated_device.synchronisations.values())
        assert 0 < total <= 25 * duel.counts.forwards, (rule, total)
        yield {"run": f"waits {rule}", "difference": 0.0}


def harness(folder):
    """The model as the harness calls it, what ranks exchange, and a network in memory while it is trained."""
    path = tiny.checkpoint(Path(folder), "bert", length=16)
    looks = Path(folder) / "looks.safetensors"
    torch.manual_seed(0)
    save_file({"weight": torch.randn(1, 16, 16)}, looks)
    windows = [Window((2,), (7, 9, 30, 12, 8), (3,)), Window((14, 20, 9), (10, 9, 31, 12), (13,))]
    ids = {"mask_token_id": 4, "max_length": 16, "block": 3}

    def requests(device):
        model = DuelMDM(pretrained=path, device=device, dtype="float32", max_length=16, block=4, batch_size=4)
        pairs = (("a b", " c d"), ("a b", " e"))
        prompt = ("a b", {"until": ["z"], "max_gen_toks": 5})
        return [
            *model.loglikelihood_rolling(ask("loglikelihood_rolling", ("a b c d e f g h i j k l m n o p",))),
            *model.loglikelihood(ask("loglikelihood", *pairs)),
            *map(ord, model.generate_until(ask("generate_until", prompt))[0]),
        ]

    def memory(device):
        model = tiny.network("bert").train().to(device)
        tokenizer = tiny.tokenizer()

        def function(ids, real):
            mask = None if real is None else real.long()
            return model(input_ids=ids, attention_mask=mask).logits

        for duel in (
            Duel.from_model(model, **ids, rule=f"custom_rules:Looks:file={looks}"),
            Duel.from_model(model, **ids, cache="dual"),
            Duel.from_model(function, **ids, module=model),
        ):
            yield from [score.log_prob for score in duel.log_prob(windows)]
        yield from training_metrics(model, tokenizer, ["the a b of c", "a of the"], block=3, sample=0.5).values()
        duel = Duel.from_model(model, tokenizer, block=3)
        steps = [score.reveal_steps for score in duel.log_prob(windows)]
        log_probs = duel.differentiable(windows, steps).sum(1)
        (log_probs[0] - 0.5 * log_probs[1]).backward()
        yield from log_probs.tolist()
        yield from [p.grad.norm().item() for p in model.bert.encoder.parameters()]  # others are tied on the CPU only

    for case in (requests, memory):
        yield {"run": case.__name__, "difference": difference(case(CPU), case(SIM))}

    def all_gather(parts, mine, group):
        assert mine.device.type == CPU and all(part.device.type == CPU for part in parts)  # gloo
        for part in parts:
            part.copy_(mine)

    torch.distributed.all_gather = all_gather
    gathered = Ranks(SIM, 0, 2).all_gather(torch.arange(3.0, device=SIM))
    assert gathered.device.type == SIM
    yield {"run": "two ranks", "difference": difference(gathered.tolist(), [0.0, 1.0, 2.0] * 2)}


def main():
    folder, *cases = sys.argv[1:]
    budget.GPU_TOKENS = 16, 64
    others = {"mixing": mixing, "waits": waits, "harness": harness}
    for case in cases:
        try:
            for result in others[case](folder) if case in others else compare(folder, case):
                print(json.dumps({"case": case} | result), flush=True)
        except Exception:
            print(json.dumps({"case": case, "run": "", "error": traceback.format_exc(limit=-12)}), flush=True)


if __name__ == "__main__":
    main()
