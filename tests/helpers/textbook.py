"""Windows by `lm_eval_duel.reference`, and the rules that it leaves out because the paper does, in the same form."""

import itertools
import math

import published
import torch

from lm_eval_duel import reference, rules
from lm_eval_duel.core.hashing import hashed
from lm_eval_duel.reference import best, confidence, entropy_nats

PAPER = {
    "left_to_right": lambda rule: reference.left_to_right(rule.k),
    "greedy": lambda rule: reference.greedy(rule.k),
    "margin": lambda rule: reference.margin(rule.k),
    "entropy": lambda rule: reference.entropy(rule.k),
    "threshold": lambda rule: reference.threshold(rule.mu),
    "klass": lambda rule: reference.klass(rule.mu, rule.nu),
}


def of_paper(rule):
    """True for a rule as the paper has it."""
    if rule.name == "klass":
        return rule.history == 1 and rule.kl == "paper"
    return rule.name in PAPER and not getattr(rule, "strict", False)


def odds(p):
    """A probability as log-odds; numbers that are none count as 0 or 1."""
    return torch.tensor(min(max(p, 0.0), 1.0), dtype=torch.float64).logit()


def kl(p, q):
    """KL(p, q) of log-probabilities (V,)."""
    return float((p.exp() * (p - q)).nan_to_num(nan=0.0).sum())


def deployed(rule, origin):
    """A rule that the paper does not have, for one window whose target begins at `origin`."""
    before = []  # (M, log_P) of the steps of this block

    def chosen(M, sure):
        return [ell for ell, is_sure in zip(M, sure, strict=True) if is_sure]

    def calm(ell):
        """Whether a position's distributions have stayed nearly the same over the rule's history (KLASS)."""
        pairs = list(itertools.pairwise(log_P for _, log_P in before))[-rule.history :]
        if len(pairs) < rule.history:
            return False
        for p, q in pairs:
            divergence = kl(p[ell], q[ell]) if rule.kl == "paper" else kl(q[ell], p[ell])
            if not divergence <= rule.nu:
                return False
        return True

    def pick(log_P, M):
        name = rule.name
        score = confidence(log_P[M])
        surprise = entropy_nats(log_P[M])
        single = best(1, M, score)
        if name == "right_to_left":
            return M[-rule.k :]
        if name == "random":
            drawn = [(int(hashed(torch.tensor(ell - origin), rule.seed)), ell) for ell in M]
            return [ell for _, ell in sorted(drawn)[: rule.k]]
        if name == "log_margin":
            return best(rule.k, M, -log_P[M].topk(2).values.diff()[:, 0])
        if name == "entropy_bound" and not rule.inclusive:
            spent = [0.0, *itertools.accumulate(surprise.sort().values.tolist())]
            return [ell for n, ell in enumerate(best(len(M), M, -surprise)) if spent[n] <= rule.gamma]
        if name in published.PICKS or name == "threshold":
            masked = torch.zeros(len(log_P), dtype=torch.bool).index_fill(0, torch.tensor(M), True)
            return sorted(published.pick(rule, log_P.exp(), masked))
        if name == "quota":
            m = len(before[0][0])
            return best(m // rule.steps + (len(before) <= m % rule.steps), M, score)
        if name == "cumulative_quota":
            m = len(before[0][0])
            due = min(m, -(-len(before) * m // rule.steps))
            needed = max(0, due - (m - len(M)))
            return sorted({*best(needed, M, score), *chosen(M, score > odds(rule.tau))})
        if name == "falling_threshold":
            fallen = min((len(before) - 1) / max(1, rule.steps - 1), 1)
            return chosen(M, score > odds(rule.mu - (rule.mu - rule.low) * fallen)) or single
        if name == "threshold_until":
            return M if len(before) >= rule.steps else chosen(M, score >= odds(rule.mu)) or single
        if name == "klass":
            stable = torch.tensor([calm(ell) for ell in M])
            return chosen(M, (score >= odds(rule.mu)) & stable) or single
        raise NotImplementedError(name)

    def F(log_P, M):
        if before and not {*M} <= {*before[-1][0]}:
            before.clear()
        before.append((M, log_P))
        return pick(log_P, M)

    return F


def seeded(F, first):
    """`F` after the first step of a block: that one reveals the lowest position, if it is among `first`."""
    return lambda log_P, M: M[:1] if M[0] in first else F(log_P, M)


def rule_of(rule, window, blocks, starts):
    """A package rule, read for its name and parameters, as a rule of the reference. `starts`: of the whole blocks."""
    inside = rule.rule if isinstance(rule, rules.SeedFirst) else rule
    F = PAPER[inside.name](inside) if of_paper(inside) else deployed(inside, len(window.context))
    return F if inside is rule else seeded(F, {block[0] for block in blocks} & starts)


def score(logits_of, mask_id, excluded, rule, block, window, grid="target", tie_when_all_mask=False, sees=None):
    """(log_prob, steps, nats, is_greedy, nfe) of one window; `logits_of(ids (L,)) -> (L, V)`.

    `sees`: None, the network is shown the whole row; "fill" or "cut", it is block-causal and shown the row up to the
    end of the current block, which is filled up with masks or ends with the window.
    """
    origin = len(window.context)
    target = range(origin, origin + len(window.target))
    zero = origin if grid == "target" or block is None else 0
    x = [*window.context, *window.target, *[mask_id] * window.tail, *window.suffix]
    blocks = reference.cut(target, block, zero)
    greedy = True

    def network(z):
        if sees is not None:
            current = next(ell for ell in target if z[ell] == mask_id)
            end = zero + ((current - zero) // block + 1) * block
            z = z[:end]
            if sees == "fill":
                z = torch.nn.functional.pad(z, (0, end - len(z)), value=mask_id)
        logits = logits_of(z).double().masked_fill(excluded.cpu(), -math.inf)
        if tie_when_all_mask and (z == mask_id).all():
            return logits[:1].expand_as(logits)
        return logits

    starts = {ell for ell in target if block is None or (ell - zero) % block == 0}
    F = rule_of(rule, window, blocks, starts)

    def noted(log_P, M):
        nonlocal greedy
        I = F(log_P, M)  # noqa: E741 - the paper's name
        greedy = greedy and all(log_P[ell].argmax() == x[ell] for ell in I)
        return I

    path = reference.log_likelihood(x, blocks, network, noted, mask_id)
    step_of = step_of_each(path.sigma, blocks)
    steps = tuple(step_of[ell] for ell in target)
    nats = tuple(path.log_p[ell] for ell in target)
    return path.ll, steps, nats, greedy, len(path.sigma)


def step_of_each(sigma, blocks):
    """The step at which each position is revealed, counted from 0 in every block; a step may reveal nothing."""
    left = [len(block) for block in blocks]
    steps = {}
    n = t = 0  # the block in progress, and the step in it
    for I in sigma:  # noqa: E741 - the paper's name
        for ell in I:
            steps[ell] = t
        left[n] -= len(I)
        t += 1
        if not left[n]:
            n += 1
            t = 0
    return steps
