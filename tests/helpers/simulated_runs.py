"""Runs on the simulated device next to the same runs on the CPU: `python simulated_runs.py FOLDER CASE ...`.

Prints a line of JSON for each run of a case: the largest difference, or the error.
"""

import dataclasses
import json
import math
import sys
import tempfile
import traceback
from pathlib import Path

import simulated_device

simulated_device.register()

import torch  # noqa: E402

from lm_eval_duel.denoisers import hub  # noqa: E402

pick_on_cpu = hub.pick_device
hub.pick_device = lambda name: torch.device(name) if str(name) == simulated_device.NAME else pick_on_cpu(name)

import networks  # noqa: E402
import tiny  # noqa: E402
from harness_requests import ask  # noqa: E402
from toys import BlockCausal, Causal, Toy  # noqa: E402

from lm_eval_duel import Duel, denoisers, training_metrics  # noqa: E402
from lm_eval_duel.core import budget  # noqa: E402
from lm_eval_duel.core.windows import Window  # noqa: E402
from lm_eval_duel.denoisers.cached.denoiser import Cached  # noqa: E402
from lm_eval_duel.errors import DuelError  # noqa: E402
from lm_eval_duel.estimators.duel import Autoregressive, DuelEstimator  # noqa: E402
from lm_eval_duel.estimators.elbo import Elbo  # noqa: E402
from lm_eval_duel.estimators.subsets.lattice import Lattice  # noqa: E402
from lm_eval_duel.estimators.subsets.sampled_confidence import SampledConfidence  # noqa: E402
from lm_eval_duel.estimators.subsets.sampled_order import SampledOrder  # noqa: E402
from lm_eval_duel.estimators.two_phase import TwoPhase  # noqa: E402
from lm_eval_duel.harness import trace  # noqa: E402
from lm_eval_duel.harness.distributed import Ranks  # noqa: E402
from lm_eval_duel.harness.lm import DuelMDM  # noqa: E402
from lm_eval_duel.rules.learned import save_planner  # noqa: E402

CPU, SIM = "cpu", simulated_device.NAME
RULES = (
    "margin:k=2",
    "threshold:mu=0.4",
    "klass:mu=0.3:nu=0.5:history=2",
    "entropy_bound:gamma=1.0",
    "random:k=2",
    "factor:f=1.0",
    "high_or_topk:n=2:tau=0.4",
    "hierarchy:tau=0.4:low=0.2",
    "quota:steps=2",
    "dream:alg=entropy:steps=4",
    "greedy:sub_block=2",
    "greedy:seed_first=true",
)


# ---------------------------------------------------------------- networks


class MovedToy(Toy):
    """A toy whose tensors are on a device."""

    def __init__(self, device=CPU, **options):
        super().__init__(**options)
        self.device = torch.device(device)
        self.embed, self.mix, self.out = (plane.to(device) for plane in (self.embed, self.mix, self.out))

    @property
    def excluded(self):
        return torch.arange(self.vocab_size, device=self.device) >= self.tokens


class MovedBlocks(MovedToy, BlockCausal):
    """The block-causal one."""

    def stream(self, ids, positions, seen, past):
        if self.device.type == CPU:
            return super().stream(ids, positions, seen, past)
        ones = MovedBlocks(tokens=self.tokens, length=self.max_length, block=self.block)
        past = past and [tuple(plane.cpu() for plane in layer) for layer in past]
        features, own = ones.stream(ids.cpu(), positions.cpu(), seen.cpu(), past)
        return features.to(self.device), [tuple(plane.to(self.device) for plane in layer) for layer in own]


class MovedCausal(MovedToy, Causal):
    """The causal one."""

    def __init__(self, device=CPU, **options):
        super().__init__(device, **options)
        self.mask_id = None
        self.mix = self.mix * torch.ones(len(self.mix), len(self.mix)).tril(-1)[..., None, None].to(device)


TOYS = {"toy": MovedToy, "toy-blocks": MovedBlocks, "toy-causal": MovedCausal}


def opener(folder, name):
    """A function from a device to the denoiser of this name there."""
    if name in TOYS:
        return lambda device: TOYS[name](device, tokens=12, length=16)
    path, options = networks.written(Path(tempfile.mkdtemp(dir=folder)), name)
    return lambda device, **more: denoisers.load(path, device=device, dtype="float32", **options, **more)


# ---------------------------------------------------------------- what is compared


def plainly(results):
    return [dataclasses.asdict(result) for result in results]


def drawn(duel, windows):
    """Samples and the argmax decoding, stopped early once."""
    contexts = [window.context for window in windows]
    stopped = duel.sample(contexts, 7, seed=3, stop=lambda number, tokens: number == 1 and len(tokens) > 3)
    return plainly(stopped + duel.sample(contexts, 7, do_sample=False))


def replayed(duel, windows):
    return plainly(duel.replay(windows, [score.reveal_steps for score in duel.log_prob(windows)]))


def runs(denoiser, windows, more):
    """The estimators of everything that a network supports, by name, and what else is done with them."""
    settings, untailed = {"batch_size": 4}, [dataclasses.replace(window, tail=0) for window in windows]
    if denoiser.attention == "causal":
        yield "ar", plainly(Autoregressive(denoiser, traced=True, **settings).log_prob(windows))
        yield "sample", drawn(DuelEstimator(denoiser, "left_to_right", 1, **settings), windows)
        return
    block = 4 if denoiser.attention == "bidirectional" else "auto"
    greedy = DuelEstimator(denoiser, "greedy", block, traced=True, **settings)
    estimators = {"greedy": greedy}
    estimators["lattice"] = Lattice(denoiser, block, follow=["greedy", "entropy:k=2"], traced=True, **settings)
    yield "sample", drawn(greedy, windows)
    yield "elbo", plainly(Elbo(denoiser, samples=16, traced=True, **settings).log_prob(untailed))
    for rule in RULES if more else ():
        estimators[rule] = DuelEstimator(denoiser, rule, block, traced=True, **settings)
    toy = type(denoiser) in TOYS.values()
    if more or toy:  # the rest needs no other calls of a network
        yield "replay", replayed(greedy, windows)
        estimators["trial"] = DuelEstimator(denoiser, "greedy", block)  # how much a call holds is found by trial
        confidence = SampledConfidence(denoiser, block, n=2, tau=0.5, traced=True, **settings)
        estimators["sampled_confidence"] = confidence
        for alg, alg_temp in (("origin", None), ("entropy", 0.5)):
            order = SampledOrder(denoiser, block, alg=alg, steps=3, alg_temp=alg_temp, **settings)
            estimators[f"sampled_order {alg}"] = order
        for form in ("count", "ratio"):
            yield f"elbo {form}", plainly(Elbo(denoiser, samples=9, form=form, **settings).log_prob(untailed))
        yield "sampled_confidence sample", drawn(confidence, windows)
    seeded = ":seed_first=true" if denoiser.shift else ""
    if denoiser.attention == "bidirectional" and not toy:
        try:
            cached = Cached(denoiser, "dual")
        except DuelError:
            cached = None
        if cached:
            estimators["dual"] = DuelEstimator(cached, f"greedy{seeded}", block, traced=True, **settings)
            yield "dual sample", drawn(estimators["dual"], windows[:2])
            if not seeded:
                estimators["dual lattice"] = Lattice(cached, 4, follow=["greedy"], **settings)
            if more:
                estimators["two_phase"] = TwoPhase(denoiser, f"greedy{seeded}", 2, **settings, sample=0.5)
    for name, estimator in estimators.items():
        yield name, plainly(estimator.log_prob(windows))


def difference(here, there, path=""):
    """The largest difference of numbers; raises for anything else that differs."""
    if isinstance(here, dict):
        if here.get("near_ties") or there.get("near_ties"):  # float noise may change the order
            return 0.0
        assert here.keys() == there.keys(), path
        return max([difference(here[key], there[key], f"{path}.{key}") for key in here], default=0.0)
    if isinstance(here, list | tuple):
        pairs = zip(here, there, strict=True)
        return max([difference(a, b, f"{path}[{n}]") for n, (a, b) in enumerate(pairs)], default=0.0)
    if isinstance(here, float):
        assert math.isnan(here) == math.isnan(there), (path, here, there)
        return 0.0 if math.isnan(here) or here == there else abs(here - there) / max(1.0, abs(here))
    assert here == there, (path, here, there)
    return 0.0


def compare(folder, case):
    """The results of a case: `network`, or `network+` for every rule, or `network:key=value` for a network argument."""
    name, _, argument = case.rstrip("+").partition(":")
    key, _, value = argument.partition("=")
    options = (
        {key: (int(value),) if key == "exclude_ids" else float(value) if "." in value else int(value)} if key else {}
    )
    open_at = opener(folder, name)
    on_cpu, on_sim = open_at(CPU, **options), open_at(SIM, **options)
    windows = list(networks.fitting(on_cpu))
    assert windows
    more = case.endswith("+")
    for (what, here), (_, there) in zip(runs(on_cpu, windows, more), runs(on_sim, windows, more), strict=True):
        yield {"run": what, "difference": difference(here, there)}


# ---------------------------------------------------------------- other cases


def mixing(folder):
    """Which mixes of devices raise, as on CUDA, and which do not."""
    here, there = torch.ones(3, 3), torch.ones(3, 3, device=SIM)
    at = torch.tensor([0, 1])
    mixes = {
        "add": lambda: there + here,
        "reversed": lambda: here + there,
        "cat": lambda: torch.cat([there, here]),
        "index": lambda: here[at.to(SIM)],
        "where": lambda: torch.where(there > 0, here, there),
        "matmul": lambda: there @ here,
        "write": lambda: here.add_(there.sum()),
        "scalar": lambda: there * torch.tensor(2.0),
        "indices": lambda: there[at],
    }
    refused = []
    for name, mix in mixes.items():
        try:
            mix()
        except RuntimeError:
            refused.append(name)
    yield {"refused": refused, "allowed": [name for name in mixes if name not in refused]}


def waits(folder):
    """How often the host waits for the device in one run."""
    for name, rule in (("mdlm", "greedy"), ("mdlm", "left_to_right"), ("sedd", "klass:mu=0.3:nu=0.5")):
        duel = DuelEstimator(opener(folder, name)(SIM), rule, 12, batch_size=8)
        simulated_device.synchronisations.clear()
        duel.log_prob([Window((2,), tuple(5 + (7 * i + n) % 6 for i in range(12))) for n in range(8)])
        total = sum(simulated_device.synchronisations.values())
        yield {"run": f"{name} {rule}", "total": total, "calls": duel.counts.forwards}


def harness(folder):
    """The model as the harness calls it, with a trace; what ranks exchange; texts in and texts out."""
    path = tiny.checkpoint(Path(folder), "bert", length=16)
    texts = [("a b c d e f g h i j k l m n o p",), ("the of and",)]
    pairs, prompt = (("a b", " c d"), ("a b", " e")), ("a b", {"until": ["z"], "max_gen_toks": 5})
    found = {"requests": {}, "trace": {}, "library": {}}
    for device in (CPU, SIM):
        file = Path(folder) / f"{device}.jsonl"
        options = {"device": device, "dtype": "float32", "max_length": 16, "block": 4, "batch_size": 4}
        model = DuelMDM(pretrained=path, trace=str(file), **options)
        found["requests"][device] = [
            *model.loglikelihood_rolling(ask("loglikelihood_rolling", *texts), disable_tqdm=True),
            *model.loglikelihood(ask("loglikelihood", *pairs), disable_tqdm=True),
            *model.generate_until(ask("generate_until", prompt), disable_tqdm=True),
        ]
        found["trace"][device] = trace.read(file)
        duel = Duel.from_pretrained(path, **options)
        found["library"][device] = [score.log_prob for score in duel.score(["a b c d", "the of"])]
        found["library"][device] += [t.text for t in duel.generate(["a b"], max_new_tokens=5, do_sample=True, seed=1)]
    for run, values in found.items():
        yield {"run": run, "difference": difference(values[CPU], values[SIM])}

    def all_gather(parts, mine, group):
        assert mine.device.type == CPU and all(part.device.type == CPU for part in parts)  # gloo
        for part in parts:
            part.copy_(mine)

    torch.distributed.all_gather = all_gather
    gathered = Ranks(SIM, 0, 2).all_gather(torch.arange(3.0, device=SIM))
    assert gathered.device.type == SIM
    yield {"run": "two ranks", "difference": difference(gathered.tolist(), [0.0, 1.0, 2.0] * 2)}


def memory(folder):
    """A network in memory: scored under a learned rule too, while it is trained, with gradients."""
    tokenizer, planner = tiny.tokenizer(), Path(folder) / "planner.safetensors"
    torch.manual_seed(0)
    save_planner(torch.nn.Linear(17, 1), planner, ("features", "entropy"))
    windows = [Window((2,), (7, 9, 30, 12, 8), (3,)), Window((14, 20, 9), (10, 9, 31, 12), (13,))]
    models = {device: tiny.network("bert").train().to(device) for device in (CPU, SIM)}

    def function(model):
        return lambda ids, real: model(input_ids=ids, attention_mask=None if real is None else real.long()).logits

    def backward(model):
        sums = Duel.from_model(model, tokenizer, block=3).backward(windows, [1.0, -0.5])
        return sums + [p.grad.norm().item() for p in model.bert.encoder.parameters()]  # others are tied on the CPU only

    def scores(*arguments, **options):
        return plainly(Duel.from_model(*arguments, **options).log_prob(windows))

    ids = {"mask_token_id": 4, "max_length": 16, "block": 3}
    cases = {
        "score": lambda model: scores(model, tokenizer, block=3),
        "learned": lambda model: scores(model, **ids, rule=f"learned:file={planner}"),
        "cache": lambda model: scores(model, **ids, cache="dual"),
        "function": lambda model: scores(function(model), module=model, **ids),
        "metrics": lambda model: training_metrics(model, tokenizer, ["the a b of c", "a of the"], block=3, sample=0.5),
        "backward": backward,
    }
    for run, case in cases.items():
        yield {"run": run, "difference": difference(case(models[CPU]), case(models[SIM]))}


def main():
    folder, *cases = sys.argv[1:]
    budget.GPU_TOKENS = 16, 64
    others = {"mixing": mixing, "waits": waits, "harness": harness, "memory": memory}
    for case in cases:
        try:
            for result in others[case](folder) if case in others else compare(folder, case):
                print(json.dumps({"case": case} | result), flush=True)
        except Exception:
            print(json.dumps({"case": case, "run": "", "error": traceback.format_exc(limit=-12)}), flush=True)


if __name__ == "__main__":
    main()
