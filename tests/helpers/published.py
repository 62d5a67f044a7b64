"""The pick functions of published samplers, retyped from their code for one row at a time, as plain references.

Each gets the probabilities `p` (W, V) in float64, which positions are masked (W,), and the rule's parameters, and
returns the positions that the code reveals. lm_eval_duel/rules/presets.py names the sources. If a code leaves
the order of ties to torch.topk, the lowest position comes first here. They use nothing of the package.
"""

import inspect
import math

import torch
from pages import ROOT

PC = f"{ROOT}/examples/rules/pc.py:PC"
KLASS = "klass:mu={mu}:nu={nu}:history={history}:kl=authors:across=true"


def confidences(p, masked):
    return torch.where(masked, p.max(1).values, -math.inf)


def topk(score, k):
    """torch.topk with ties in the order of positions."""
    return sorted(range(len(score)), key=lambda position: (-float(score[position]), position))[:k]


def threshold(p, masked, mu):
    """Fast-dLLM: as many candidates as there are masks; those after the first are dropped below the threshold."""
    confidence = confidences(p, masked)
    chosen = topk(confidence, int(masked.sum()))
    return {chosen[0], *(position for position in chosen[1:] if not confidence[position] < mu)}


def strict_threshold(p, masked, mu):
    """Fast_dLLM_v2: x1_p > threshold, and the argmax."""
    confidence = confidences(p, masked)
    return {int(confidence.argmax()), *(confidence > mu).nonzero()[:, 0].tolist()}


def entropy_threshold(p, masked, tau):
    """dParallel, d3LLM."""
    entropy = torch.where(masked, -(p * (p + 1e-12).log()).sum(1), math.inf)
    chosen = topk(-entropy, int(masked.sum()))
    return {chosen[0], *(position for position in chosen[1:] if not entropy[position] > tau)}


def factor(p, masked, f, variant):
    confidence = confidences(p, masked)
    m = int(masked.sum())
    ordered = sorted(confidence[masked].tolist(), reverse=True)
    if variant == "a":  # Fast-dLLM, dInfer, PC-Sampler
        bounds = [-1, *(1 - f / (n + 1) for n in range(2, m + 1))]
        for top in range(m):
            if ordered[top] < bounds[top]:
                break
        if top in (0, m - 1):
            top += 1
        return set(topk(confidence, top))
    if variant == "b":  # dllm
        bounds = [-1, *(1 - f / (n + 1) for n in range(2, m + 1))]
        return set(topk(confidence, sum(c >= bound for c, bound in zip(ordered, bounds, strict=True))))
    for n in range(1, m + 1):  # d2Cache
        if (n + 1) * (1 - ordered[n - 1]) >= f:
            break
    return set(topk(confidence, max(n - 1, 1)))  # with none chosen it falls back on one


def hierarchy(p, masked, low, tau):
    """dInfer's HierarchyDecoder."""
    confidence = confidences(p, masked)
    chosen = {int(confidence.argmax())}
    run = []
    for position in [*range(len(masked)), None]:
        if position is not None and masked[position]:
            run.append(position)
            continue
        best = max((confidence[other] for other in run), default=None)
        chosen |= {other for other in run if confidence[other] == best and confidence[other] > low}
        run = []
    return chosen | (
        {position for position in masked.nonzero()[:, 0].tolist() if confidence[position] > tau} if tau else set()
    )


def dinfer_threshold(p, masked, mu):
    confidence = confidences(p, masked)
    bound = (confidence.max() - 1e-5).clamp(-1000, mu)
    return set((confidence >= bound).nonzero()[:, 0].tolist())


def high_or_topk(p, masked, n, tau):
    """LLaDA2."""
    confidence = confidences(p, masked)
    high = set((confidence > tau).nonzero()[:, 0].tolist())
    return high if len(high) >= n else set(topk(confidence, min(n, int(masked.sum()))))


def inclusive_entropy_bound(p, masked, gamma):
    """JetEngine."""
    positions = masked.nonzero()[:, 0]
    entropy = -(p[positions].clamp_min(1e-12) * p[positions].clamp_min(1e-12).log()).sum(1)
    order = entropy.argsort(stable=True)
    count = max(1, int(torch.searchsorted(entropy[order].cumsum(0), torch.tensor(gamma, dtype=torch.float64))))
    return set(positions[order[:count]].tolist())


def in_descending_order(p, masked, enough):
    """mlx-vlm: of the positions sorted by confidence those that are `enough(rank, confidence)`, and the first."""
    confidence = confidences(p, masked)
    ordered = topk(confidence, int(masked.sum()))
    kept = {position for r, position in enumerate(ordered) if enough(r, float(confidence[position]))}
    return kept | {ordered[0]}


def threshold_fixed(p, masked, mu, n):
    return in_descending_order(p, masked, lambda r, c: r < n and c >= mu)


def threshold_ref(p, masked, mu, f):
    """A prefix: mlx-vlm multiplies up whether each rank passes."""
    passed = []

    def enough(r, c):
        passed.append(c >= mu and (r == 0 or c >= 1 - f / (r + 2)))
        return all(passed)

    return in_descending_order(p, masked, enough)


def threshold_bound(p, masked, mu, floor, f):
    return in_descending_order(p, masked, lambda r, c: c >= mu or (c >= floor and (r == 0 or c >= 1 - f / (r + 2))))


def cumulative_error(p, masked, mu):
    product = [1.0]

    def enough(r, c):
        product[0] *= max(c, 1e-12)
        return product[0] >= max(mu, 1e-12)

    return in_descending_order(p, masked, enough)


def falling_threshold(p, masked, mu, low, steps, step):
    """mlx-vlm's LLaDA2 at its step number `step`, from 0."""
    confidence = confidences(p, masked)
    progress = step / max(1, steps - 1)
    high = (confidence > mu - (mu - low) * progress).nonzero()[:, 0].tolist()
    return set(high) or {int(confidence.argmax())}


def transfer_counts(m, steps):
    """get_num_transfer_tokens of LLaDA: how many each step reveals."""
    counts = [m // steps] * steps
    for step in range(m % steps):
        counts[step] += 1
    return counts


def quota(p, masked, m, steps, step):
    return set(topk(confidences(p, masked), transfer_counts(m, steps)[step]))


def quota_without_ends(p, masked, m, steps, step, ends):
    """LLaDA with confidence_eos_eot_inf: the argmax comes before, its probability after the columns are -inf."""
    tokens = p.argmax(1)
    logits = p.log()
    logits[:, ends] = -math.inf
    score = logits.softmax(1).gather(1, tokens[:, None])[:, 0]
    return set(topk(torch.where(masked, score, -math.inf), transfer_counts(m, steps)[step]))


def pc(p, masked, m, steps, step, decay, alpha, total, counts):
    """PC-Sampler."""
    frequency = torch.full((p.shape[1],), 1 / total, dtype=torch.float64)
    for token, count in counts.items():
        frequency[token] = count / total
    top, tokens = p.max(1)
    score = (-top * (frequency[tokens] + 1e-9).log()).clamp(max=alpha)
    score = (-decay * torch.arange(len(p), dtype=torch.float64)).exp() * score
    return set(topk(torch.where(masked, score, -math.inf), transfer_counts(m, steps)[step]))


def dream_counts(m, steps):
    """How many each step of diffusion_generate reveals, zeros included."""
    levels = torch.linspace(1, 1e-3, steps + 1)
    counts = []
    for i in range(steps):
        left = torch.tensor(m - sum(counts)) / 1  # a mean over the batch: float32
        counts.append(int(left * (1 - levels[i + 1] / levels[i])) if i < steps - 1 else int(left))
    return counts


def dream(p, masked, alg, count):
    if alg == "entropy":
        score = (p * (p + 1e-10).log()).sum(1)
    elif alg == "topk_margin":
        first, second = p.sort(1, descending=True).values[:, :2].unbind(1)
        score = first - second
    else:
        score = p.max(1).values
    return set(topk(torch.where(masked, score, -math.inf), count))


def dream_threshold_orders(p_of, m, steps, tau):
    """Fast-dLLM's alg=confidence_threshold as a loop; `p_of(masked)` (m, V). Yields the positions of each step."""
    masked = torch.ones(m, dtype=torch.bool)
    per_step = m // steps
    left = 0
    i = 0
    while i < steps:
        confidence = confidences(p_of(masked), masked)
        candidates = topk(confidence, per_step + left)
        left = 0
        chosen = set(candidates)
        for position in candidates[1:]:
            if confidence[position] < tau:
                if i >= steps - 1:
                    per_step = 0
                    steps += 1
                left += 1
                chosen.discard(position)
        yield chosen
        masked[list(chosen)] = False
        i += 1


def klass_orders(p_of, length, block, mu, nu, history):
    """KLASS as published, over all blocks of a row; `p_of(masked)` (length, V). Yields the positions of each step."""
    masked = torch.ones(length, dtype=torch.bool)
    divergences = torch.zeros(length, history, dtype=torch.float64)
    before = None
    for begin in range(0, length, block):
        inside = torch.zeros_like(masked)
        inside[begin : begin + block] = True
        for step in range(block):
            here = masked & inside
            if not here.any():
                break
            p = p_of(masked)
            before = torch.zeros_like(p) if before is None else before
            divergence = (p * ((p + 1e-12).log() - (before + 1e-12).log())).sum(1)
            divergences = torch.roll(divergences, shifts=-1, dims=-1)
            divergences[:, -1] = divergence
            before = p
            stable = (divergences < nu).all(1) & (step >= history - 1)
            ready = (stable & (p.max(1).values > mu) & here).nonzero()[:, 0].tolist()
            chosen = set(ready) or set(topk(confidences(p, here), 1))
            yield chosen
            masked[list(chosen)] = False


STATE_ONLY = [  # rules that read nothing but the state
    "threshold:mu=0.613",
    "threshold:mu=0.613:strict=True",
    "threshold:mu=1.0:strict=True",
    "entropy_threshold:tau=0.437",
    "entropy_threshold:tau=0.0",
    "factor:f=3.713:variant=a",
    "factor:f=0.713:variant=b",
    "factor:f=1.713:variant=b",
    "factor:f=1.713:variant=c",
    "hierarchy:low=0.413:tau=0.813",
    "hierarchy:low=0.613:tau=None",
    "dinfer_threshold:mu=0.713",
    "dinfer_threshold:mu=1.0",
    "high_or_topk:n=1:tau=0.713",
    "high_or_topk:n=3:tau=0.613",
    "entropy_bound:gamma=0.713:inclusive=True",
    "threshold_fixed:mu=0.613:n=3",
    "threshold_fixed:mu=0.0:n=2",
    "threshold_ref:mu=0.413:f=1.113",
    "threshold_ref:mu=0.0:f=0.613",
    "threshold_bound:mu=0.913:floor=0.413:f=2.013",
    "threshold_bound:mu=0.713:floor=0.213:f=1.013",
    "cumulative_error:mu=0.413",
    "cumulative_error:mu=0.0",
]
PICKS = {"entropy_bound": inclusive_entropy_bound}
OF_RULES = (
    entropy_threshold,
    factor,
    hierarchy,
    dinfer_threshold,
    high_or_topk,
    threshold_fixed,
    threshold_ref,
    threshold_bound,
    cumulative_error,
)
PICKS |= {function.__name__: function for function in OF_RULES}


def pick(rule, p, masked):
    """The positions that the authors' code of such a rule reveals."""
    function = (strict_threshold if rule.strict else threshold) if rule.name == "threshold" else PICKS[rule.name]
    return function(p, masked, *(getattr(rule, name) for name in [*inspect.signature(function).parameters][2:]))
