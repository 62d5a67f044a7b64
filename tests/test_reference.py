"""The specification by itself: its scores in 60 digits, its two algorithms against each other, its bound."""

import ast
import decimal
import itertools
import math
import re
from decimal import Decimal
from pathlib import Path
from statistics import fmean

import pytest
import torch
from drawn_reference import p_value
from laws import strings
from pages import ROOT, section
from toys import Joint, Rotary, Toy

from lm_eval_duel import reference
from lm_eval_duel.reference import cut, log_likelihood, log_softmax, over_orders, sample, sum_over_strings

FILE = Path(reference.__file__)
RULES = {
    "left_to_right": reference.left_to_right(),
    "greedy": reference.greedy(),
    "greedy, k=2": reference.greedy(2),
    "margin": reference.margin(),
    "entropy, k=2": reference.entropy(2),
    "threshold": reference.threshold(0.45),
    "klass": reference.klass(0.4, 0.3),
}
ROW = [1, 0, 2, 0, 1, 2]  # context | four tokens | suffix
TARGET = range(1, 5)
BLOCKS = {"2": cut(TARGET, 2, 1), "2 of the row": cut(TARGET, 2), "whole": cut(TARGET, None)}


def network(toy):
    """A toy as the reference calls it."""
    return lambda z: toy.features(z[None], None)[0].masked_fill(toy.excluded, -math.inf)


def test_it_imports_nothing_of_the_package():
    imports = [node for node in ast.walk(ast.parse(FILE.read_text())) if isinstance(node, ast.ImportFrom)]
    assert imports
    for node in imports:
        assert not node.module.startswith(("lm_eval", "."))


def test_blocks_count_from_the_target_or_from_the_row():
    assert list(BLOCKS.values()) == [[[1, 2], [3, 4]], [[1], [2, 3], [4]], [[1, 2, 3, 4]]]


@pytest.mark.parametrize(("rule", "blocks"), list(zip(RULES, itertools.cycle(BLOCKS))))
def test_it_is_a_distribution(rule, blocks):
    toy = Toy()
    total = sum_over_strings(range(3), ROW, BLOCKS[blocks], network(toy), RULES[rule], toy.mask_id)
    assert total == pytest.approx(1, abs=1e-12)


def test_samples_follow_it():
    """Pearson's statistic of 500 samples; a right sampler fails for one seed in 10^4."""
    toy = Toy(length=3)
    generator = torch.Generator().manual_seed(0)
    arguments = (cut(range(3), 2), network(toy), RULES["threshold"], toy.mask_id)

    drawn = [sample([0, 0, 0], *arguments, generator) for _ in range(500)]

    probabilities = {}
    for text in strings(3, 3):
        probabilities[text] = math.exp(log_likelihood(list(text), *arguments).ll)
    assert p_value(drawn, probabilities) > 1e-4


def in_order(order):
    """The rule that reveals one position at a time in this order."""

    def follow(log_P, M):
        return [next(ell for ell in order if ell in M)]

    return follow


@pytest.mark.parametrize("size", [2, pytest.param(None, marks=pytest.mark.slow)])
def test_the_elbo_is_the_mean_over_orders(size):
    """So are the mean, the mixture and the best of all orders what `over_orders` says block by block."""
    toy = Toy()
    blocks = cut(TARGET, size, 1)
    values = []
    for orders in itertools.product(*map(itertools.permutations, blocks)):
        F = in_order([*itertools.chain(*orders)])
        values.append(log_likelihood(ROW, blocks, network(toy), F, toy.mask_id).ll)

    generator = torch.Generator().manual_seed(0)
    draws = [reference.random_draw(blocks, generator) for _ in range(1000)]
    drawn = reference.elbo(ROW, blocks, network(toy), toy.mask_id, draws)
    mean, stderr = reference.mean_and_error(drawn, 1000)
    assert 0 < stderr < 0.35
    assert abs(mean - fmean(values)) < 4 * stderr

    for function in (fmean, reference.log_mean_exp, max):
        value = over_orders(ROW, blocks, network(toy), toy.mask_id, function)
        assert value == pytest.approx(function(values), abs=1e-9)


def test_the_mean_and_error_of_replicates():
    assert reference.mean_and_error([1.0, 5.0, 3.0, 7.0], 2) == (4.0, 2.0)


def test_a_two_phase_estimate_is_unbiased_over_its_samples():
    """Over all samples of three blocks, with their probabilities; and its squared errors are its variance."""
    g = [-3.0, -5.0, -2.0]  # of each block in the first phase
    f = [-2.5, -5.2, -2.9]  # in the second
    share = 0.3
    mean = 0.0
    mean_square = 0.0
    mean_variance = 0.0
    for size in range(4):
        for sample_of_blocks in itertools.combinations(range(3), size):
            chance = share**size * (1 - share) ** (3 - size)
            estimate, error = reference.two_phase(g, {b: f[b] for b in sample_of_blocks}, share)
            mean += chance * estimate
            mean_square += chance * estimate**2
            mean_variance += chance * error**2
    assert mean == pytest.approx(sum(f))
    assert mean_square - mean**2 == pytest.approx(mean_variance)


def test_a_row_of_masks_is_an_exact_tie():
    """What the network's float noise says of its positions does not count, in either algorithm."""
    toy = Rotary(length=6, tokens=4)
    toy.noise = -1e-9  # the other sign chooses the first position
    noisy = network(toy)
    F = reference.greedy()
    x = [3, 1, 2, 0]
    blocks = [range(4)]
    tied = log_likelihood(x, blocks, noisy, F, toy.mask_id, relative_positions=True)
    literal = log_likelihood(x, blocks, noisy, F, toy.mask_id)
    assert tied.sigma[0] == [0]
    assert literal.sigma[0] != [0]
    assert abs(tied.ll - literal.ll) > 1e-3, (tied, literal)

    def first_of_all(log_P, M):
        return [M[0]] if len(M) == 4 else F(log_P, M)

    by_hand = log_likelihood(x, blocks, noisy, first_of_all, toy.mask_id)
    assert by_hand.ll == pytest.approx(tied.ll, abs=1e-7)

    shown = []  # the log-probabilities that the rule sees at each step of a sample

    def noting(log_P, M):
        shown.append(log_P)
        return F(log_P, M)

    sample(x, blocks, noisy, noting, toy.mask_id, torch.Generator(), relative_positions=True)
    assert (shown[0] == shown[0][0]).all()
    assert not (shown[1] == shown[1][0]).all()


def test_exact_conditionals_give_the_joint():
    joint = Joint()
    for string, p in zip(joint.strings[::7].tolist(), joint.joint[::7].tolist(), strict=True):
        for F in (reference.greedy(), reference.margin(), reference.left_to_right()):
            path = log_likelihood(string, [range(4)], network(joint), F, joint.mask_id)
            assert path.ll == pytest.approx(math.log(p), abs=1e-9)


# ---------------------------------------------------------------- nothing saturates

LOGITS = [
    [45.0, 0.0, 3.0, 1.0],
    [0.0, 52.5, 2.0, 2.0],
    [-20.0, -21.0, 20.0, 21.5],
    [1.0, 2.0, 30.0, -4.0],
    [0.0, 0.0, 0.0, 0.0],
    [1.5, 1.5, -1.0, 0.0],
    [300.0, -300.0, 0.0, 299.0],
    [0.1, -math.inf, 0.3, -math.inf],
]


@pytest.mark.parametrize("logits", LOGITS)
def test_scores_in_sixty_digits(logits):
    """Log-odds of P1, log-odds of P1 - P2, and the entropy in nats."""
    log_P = log_softmax(torch.tensor([logits], dtype=torch.float64))

    with decimal.localcontext(decimal.Context(prec=400)):
        weights = [Decimal(x).exp() for x in logits]
        P = [weight / sum(weights) for weight in weights]
        P1, P2 = sorted(P, reverse=True)[:2]
        margin = P1 - P2
        confidence = (P1 / (1 - P1)).ln()
        margin_log_odds = (margin / (1 - margin)).ln() if margin else Decimal("-Infinity")
        entropy = -sum(p * p.ln() for p in P if p)

    assert float(reference.confidence(log_P)) == pytest.approx(float(confidence), rel=1e-12)
    assert float(reference.margin_log_odds(log_P)) == pytest.approx(float(margin_log_odds), rel=1e-12)
    assert float(reference.entropy_nats(log_P)) == pytest.approx(float(entropy), rel=1e-12)


def test_equals_go_from_left_to_right():
    log_P = log_softmax(torch.zeros(6, 4, dtype=torch.float64))
    M = [1, 2, 4]
    for make in (reference.greedy, reference.margin, reference.entropy):
        assert make(2)(log_P, M) == [1, 2]
    assert reference.threshold(0.0)(log_P, M) == M
    assert reference.threshold(0.25 + 1e-9)(log_P, M) == [1]
    assert reference.threshold(1.0)(log_P, M) == [1]


def test_a_value_at_the_bound_counts():
    """P1 = mu, and KL = nu."""
    log_P = log_softmax(torch.tensor([[0.0, 0.0, -math.inf]] * 4, dtype=torch.float64))
    M = [0, 1, 3]
    assert reference.threshold(0.5)(log_P, M) == M
    klass = reference.klass(0.5, 0.0)
    assert klass(log_P, M) == [0], "at a block's first step no position is stable"
    assert klass(log_P, M[1:]) == M[1:]


def test_klass_takes_positions_that_are_sure_and_stable():
    """One that is sure but has moved, and one that has not moved but is unsure, wait."""
    before = log_softmax(torch.tensor([[0.0, 0.0], [0.0, 9.0], [0.0, 0.1], [0.0, 9.0]], dtype=torch.float64))
    after = log_softmax(torch.tensor([[0.0, 8.0], [0.0, 9.0], [0.0, -0.1], [0.0, 9.0]], dtype=torch.float64))
    klass = reference.klass(0.9, 0.01)
    assert klass(before, [0, 1, 2, 3]) == [1]  # the first step: the surest alone, of equals the lowest
    assert klass(after, [0, 2, 3]) == [3]


def test_the_order_near_one_is_that_of_the_log_odds():
    """Here every P1, and every P1 - P2, is 1.0 in float64, and every entropy below its last digit."""
    log_P = log_softmax(torch.tensor([[50.0, 0, 0], [60.0, 0, 0], [55.0, 0, 0]], dtype=torch.float64))
    assert (log_P.exp().amax(1) == 1).all()
    for make in (reference.greedy, reference.margin, reference.entropy):
        assert make(2)(log_P, [0, 1, 2]) == [1, 2]


# ---------------------------------------------------------------- docs/audit.md, tests/README.md


def test_the_page_names_files_that_are_there():
    named = set(re.findall(r"`(tests/[\w/]+\.py)`", (ROOT / "tests" / "README.md").read_text()))
    assert len(named) > 10
    for file in named:
        assert (ROOT / file).is_file()


def test_the_way_through_it_is_short():
    page = ROOT / "docs" / "audit.md"
    route = section(page.read_text(), "## Read it")
    files = re.findall(r"^\| \[.*?\]\((\.\./[\w/]+\.py)\)", route, re.MULTILINE)
    assert len(files) == route.count("\n| [") == 8
    assert sum(len((page.parent / file).read_text().splitlines()) for file in files) < 1900
