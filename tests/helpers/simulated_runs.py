"""Runs on the simulated device next to the same runs on the CPU: `python simulated_runs.py FOLDER CASE ...`.

Prints a line of JSON for each case: the largest difference in nats, or the error; and the synchronisations.
"""

import dataclasses
import json
import math
import sys
import time
import traceback
from pathlib import Path

import simulated_device

simulated_device.register()

import torch  # noqa: E402

from lm_eval_duel.denoisers import hub  # noqa: E402

pick_on_cpu = hub.pick_device
hub.pick_device = lambda name: torch.device(name) if str(name) == simulated_device.NAME else pick_on_cpu(name)

from toys import BlockCausal, Causal, Toy  # noqa: E402

from lm_eval_duel import denoisers  # noqa: E402
from lm_eval_duel.denoisers.cached.denoiser import Cached  # noqa: E402
from lm_eval_duel.engine import budget  # noqa: E402
from lm_eval_duel.engine.windows import Window  # noqa: E402
from lm_eval_duel.estimators.duel import Autoregressive, Duel  # noqa: E402
from lm_eval_duel.estimators.elbo import Elbo  # noqa: E402
from lm_eval_duel.estimators.lattice import Lattice  # noqa: E402
from lm_eval_duel.estimators.sampled_confidence import SampledConfidence  # noqa: E402
from lm_eval_duel.estimators.two_phase import TwoPhase  # noqa: E402

CPU, SIM = "cpu", simulated_device.NAME
BATCH = 4  # rows
RULES = (
    "greedy",
    "margin:k=2",
    "log_margin",
    "entropy:k=2",
    "threshold:mu=0.4",
    "klass:mu=0.3:nu=0.5:history=2",
    "entropy_bound:gamma=1.0",
    "random:k=2",
    "left_to_right",
    "right_to_left:k=2",
    "entropy_threshold:tau=1.0",
    "factor:f=1.0",
    "high_or_topk:mu=0.4:k=1",
    "dinfer_threshold:mu=0.4",
    "hierarchy:tau=0.4:low=0.2",
    "quota:steps=2",
    "dream:alg=entropy:steps=4",
    "greedy:sub_block=2",
    "greedy:seed_first=true",
)
WINDOWS = (
    Window((2, 6), (7, 9, 3, 5, 8, 11), (3,)),
    Window((2,), (10, 9), (3,)),
    Window((2, 6), (7, 9, 3, 4, 8, 11), (3,)),
    Window((9,), (10, 9, 3, 5), (3, 2), tail=4),
    Window((4, 1, 5), (8, 8, 2, 6, 10)),
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
        held = [plane.cpu() for plane in (self.embed, self.mix, self.out)]
        ones = MovedBlocks(tokens=self.tokens, length=self.max_length, block=self.block)
        ones.embed, ones.mix, ones.out = held
        past = past and [tuple(plane.cpu() for plane in layer) for layer in past]
        features, own = ones.stream(ids.cpu(), positions.cpu(), seen.cpu(), past)
        return features.to(self.device), [tuple(plane.to(self.device) for plane in layer) for layer in own]


class MovedCausal(MovedToy, Causal):
    """The causal one."""

    def __init__(self, device=CPU, **options):
        super().__init__(**options)
        MovedToy.__init__(self, device, **options)
        self.mask_id = None
        self.mix = self.mix * torch.ones(len(self.mix), len(self.mix)).tril(-1)[..., None, None].to(device)


TOYS = {"toy": MovedToy, "toy-blocks": MovedBlocks, "toy-causal": MovedCausal}


def opener(folder, name):
    """A function from a device to the denoiser of this name there."""
    if name in TOYS:
        return lambda device: TOYS[name](device, tokens=12, length=16)
    import decoder_reference
    import dit_reference
    import encoder_reference
    import tiny

    folder = Path(folder) / name
    folder.mkdir(exist_ok=True)
    options = {}
    if name in dit_reference.CONFIGS:
        path, _ = dit_reference.write(folder, name)
    elif name in decoder_reference.CASES:
        path, _ = decoder_reference.write(folder, decoder_reference.CASES[name])
        options = decoder_reference.CASES[name].options
    elif name in encoder_reference.ENCODERS:
        path, _ = encoder_reference.ENCODERS[name](folder)
    elif name in ("esm",):
        path, _ = encoder_reference.esm(folder)
    elif name.startswith("demo"):
        path = name
    else:
        path = tiny.checkpoint(folder, name)
        options = {"attention": "causal"} if name == "gpt2" else {}
    return lambda device, **more: denoisers.load(path, device=device, dtype="float32", **options, **more)


def windows_for(denoiser):
    """The windows that this network can score, of tokens that it has."""
    known = set((~denoiser.excluded).nonzero()[:, 0].tolist())
    least = max(denoiser.shift, int(denoiser.needs_visible))

    def fits(window):
        if window.tail and denoiser.attention != "bidirectional":
            return False
        if window.suffix and denoiser.attention != "bidirectional":
            return False
        return len(window.context) >= least and known.issuperset(window.context + window.target + window.suffix)

    return [window for window in WINDOWS if fits(window)]


# ---------------------------------------------------------------- what is compared


def scores(estimator, windows):
    return [dataclasses.asdict(score) for score in estimator.log_prob(windows)]


def runs(denoiser, windows, more):
    """(name, function) of everything that a network supports."""
    settings = {"batch_size": BATCH}
    block = 4 if denoiser.attention == "bidirectional" else "auto"
    if denoiser.attention == "causal":
        yield "ar", lambda: scores(Autoregressive(denoiser, traced=True, **settings), windows)
        yield "sample", lambda: drawn(Duel(denoiser, "left_to_right", 1, **settings), windows)
        return
    texts = RULES if more else RULES[:1]
    seeded = ":seed_first=true" if denoiser.shift and denoiser.attention == "bidirectional" else ""
    for rule in texts:
        yield rule, lambda rule=rule: scores(Duel(denoiser, rule, block, traced=True, **settings), windows)
    greedy = Duel(denoiser, "greedy", block, **settings)
    yield "sample", lambda: drawn(greedy, windows)
    yield "replay", lambda: [
        dataclasses.asdict(score)
        for score in greedy.replay(windows, [score.reveal_steps for score in greedy.log_prob(windows)])
    ]
    yield "elbo", lambda: scores(Elbo(denoiser, samples=16, traced=True, **settings), untailed(windows))
    for form in ("count", "ratio"):
        yield f"elbo {form}", lambda form=form: scores(Elbo(denoiser, samples=9, form=form, **settings), untailed(windows))
    yield "lattice", lambda: scores(
        Lattice(denoiser, block, follow=["greedy", "entropy:k=2"], traced=True, **settings), windows
    )
    if not denoiser.excluded_ids:
        sampler = SampledConfidence(denoiser, block, n=2, tau=0.5, traced=True, **settings)
        yield "sampled_confidence", lambda: scores(sampler, windows)
        yield "sampled_confidence sample", lambda: drawn(sampler, windows)
    if denoiser.attention != "bidirectional" or type(denoiser) is MovedToy or "sedd" in denoiser.family:
        return  # no cache
    for cache in ("prefix", "dual"):
        cached = Cached(denoiser, cache)
        duel = Duel(cached, f"greedy{seeded}", block, traced=True, **settings)
        yield cache, lambda duel=duel: scores(duel, windows)
        yield f"{cache} sample", lambda duel=duel: drawn(duel, windows)
        if not seeded:
            lattice = Lattice(cached, 4, follow=["greedy"], **settings)
            yield f"{cache} lattice", lambda lattice=lattice: scores(lattice, windows)
    for amount in ({"sample": 0.5}, {"precision": 0.2}):
        estimator = TwoPhase(denoiser, f"greedy{seeded}", 2, **settings, **amount)
        yield f"two_phase {amount}", lambda estimator=estimator: scores(estimator, windows)


def untailed(windows):
    return [dataclasses.replace(window, tail=0) for window in windows]


def drawn(duel, windows):
    """Samples and the argmax decoding, stopped early once."""
    contexts = [window.context for window in windows]
    settings = {"stop": lambda number, tokens: number == 1 and len(tokens) > 3}
    samples = duel.sample(contexts, 7, seed=3, **settings) + duel.sample(contexts, 7, do_sample=False)
    return [dataclasses.asdict(sample) for sample in samples]


def difference(here, there, path=""):
    """The largest difference of numbers; raises for anything else that differs."""
    if isinstance(here, dict):
        assert here.keys() == there.keys(), path
        return max([difference(here[key], there[key], f"{path}.{key}") for key in here], default=0.0)
    if isinstance(here, list | tuple):
        assert len(here) == len(there), (path, here, there)
        pairs = zip(here, there, strict=True)
        return max([difference(a, b, f"{path}[{n}]") for n, (a, b) in enumerate(pairs)], default=0.0)
    if isinstance(here, float):
        assert math.isnan(here) == math.isnan(there), (path, here, there)
        if math.isnan(here) or here == there:
            return 0.0
        return abs(here - there) / max(1.0, abs(here))
    assert here == there, (path, here, there)
    return 0.0


def compare(folder, case):
    """The results of a case: `network`, or `network+` for every rule, or `network:key=value` for a network argument."""
    name, _, argument = case.rstrip("+").partition(":")
    options = dict([argument.split("=")]) if argument else {}
    open_at = opener(folder, name)
    on_cpu, on_sim = open_at(CPU, **options), open_at(SIM, **options)
    windows = windows_for(on_cpu)
    assert windows
    more = case.endswith("+")
    for (what, here), (_, there) in zip(runs(on_cpu, windows, more), runs(on_sim, windows, more), strict=True):
        result = {"case": case, "run": what}
        try:
            expected = here()
        except Exception:
            result["skipped"] = traceback.format_exc(limit=-2)
            print(json.dumps(result), flush=True)
            continue
        simulated_device.synchronisations.clear()
        try:
            result["difference"] = difference(expected, there())
        except Exception:
            result["error"] = traceback.format_exc(limit=-12)
        result["synchronisations"] = dict(simulated_device.synchronisations)
        print(json.dumps(result), flush=True)


def main():
    folder, *cases = sys.argv[1:]
    budget.GPU_TOKENS = 16, 64
    for case in cases:
        began = time.time()
        try:
            compare(folder, case)
        except Exception:
            print(json.dumps({"case": case, "run": "", "error": traceback.format_exc(limit=-12)}), flush=True)
        print(case, f"{time.time() - began:.1f} s", file=sys.stderr)


if __name__ == "__main__":
    main()
