"""The counts of a plan are those of a real run: rule steps, and the rows and positions that network calls evaluate."""

from functools import partial

import pytest
import torch
from attends import Attends
from decoder_reference import CASES, write
from toys import BlockCausal

from benchmarks.recording import Recording
from lm_eval_duel import load
from lm_eval_duel.core import block_causal
from lm_eval_duel.core.windows import Window
from lm_eval_duel.denoisers.cached.denoiser import Cached
from lm_eval_duel.estimators import cost
from lm_eval_duel.estimators.arguments import ElboArguments, LatticeArguments
from lm_eval_duel.estimators.duel import Autoregressive, DuelEstimator
from lm_eval_duel.estimators.elbo import Elbo
from lm_eval_duel.estimators.lattice import Lattice
from lm_eval_duel.rules import parse

RULES = (
    *("greedy:k=1", "margin:k=3", "left_to_right:k=2", "entropy:k=2:seed_first=True"),
    *("greedy:k=3:sub_block=4", "quota:steps=3:sub_block=5:seed_first=True"),
    "greedy:k=2:sub_block=3:seed_first=True",
)


@pytest.fixture(scope="module")
def networks():
    sizes = {"tokens": 59, "length": 24}
    return {"bidirectional": Attends(**sizes), "block_causal": BlockCausal(block=8, **sizes)}


def windows(length=22):
    """Two layouts, and one window twice: it is scored once. Contexts differ, so that no two rows are ever equal."""
    first, second, third = torch.randint(59, (3, length), generator=torch.Generator().manual_seed(1)).tolist()
    window = Window(first[:2], first[2:])
    same_layout = Window(second[:2], second[2:])
    other_layout = Window(third[:5], third[5 : length - 5])
    return [window, same_layout, other_layout, window]


def counted(denoiser, estimator, texts):
    """(rows, positions, NFE) of a real run."""
    recording = Recording(denoiser)
    with recording.record():
        estimator.log_prob(texts)
    assert recording.forwards == estimator.counts.forwards
    assert recording.rows == estimator.counts.rows
    return recording.rows, recording.tokens, estimator.counts.nfe


def planned(count, texts):
    total = cost.sum_over(cost.layouts(texts), count)
    return total.rows, total.token_rows, total.nfe


@pytest.mark.parametrize("cache", [None, "prefix", "dual"])
def test_bidirectional(networks, cache):
    plain = networks["bidirectional"]
    denoiser = Cached(plain, cache) if cache else plain
    for rule in RULES[[None, "prefix", "dual"].index(cache) :: 3] + RULES[-1:]:
        duel = DuelEstimator(denoiser, rule, 8)
        duel.use_single_rows()  # rows of different lanes could be equal, and then one call evaluates them once
        setting = cost.Setting(plain, parse(rule), 8, "target")
        count = partial(setting.cached, cache=cache) if cache else setting.exact
        texts = windows(18 if cache == "dual" else 22)  # a dual cache evaluates a short block at the full width
        assert planned(count, texts) == counted(denoiser, duel, texts), rule


@pytest.mark.parametrize(("rule", "length"), [(RULES[0], 24), (RULES[-1], 22)])
def test_block_causal(networks, rule, length):
    denoiser = networks["block_causal"]
    duel = DuelEstimator(denoiser, rule, "auto")
    setting = cost.Setting(denoiser, parse(rule), 8, "row")
    # one window a run: lanes of several windows may be packed with empty places
    for window in windows(length):
        rows = counted(denoiser, DuelEstimator(denoiser, rule, "auto"), [window])
        assert planned(setting.exact, [window]) == rows
    rows, tokens, nfe = counted(denoiser, duel, windows(length))
    least_rows, least_tokens, steps = planned(setting.exact, windows(length))
    assert nfe == steps
    assert rows >= least_rows
    assert least_tokens <= tokens <= 1.2 * least_tokens


@pytest.mark.parametrize("name", ["d2f-llada", "nemotron-labs-diffusion"])
def test_blocks_that_count_from_the_target(name, tmp_path, monkeypatch):
    """Long contexts take several calls, or one if the context is a block."""
    for module in (block_causal, cost):
        monkeypatch.setattr(module, "CLEAN", 8)
        monkeypatch.setattr(module, "STRETCH", 8)
    case = CASES[name]
    denoiser = load(write(tmp_path, case)[0], device="cpu", **case.options)
    for rule, context, target in (("greedy:k=1", 5, 11), ("left_to_right:k=2", 18, 8)):
        duel = DuelEstimator(denoiser, rule, "auto")
        window = Window(range(6, 6 + context), range(6, 6 + target))
        setting = cost.Setting(denoiser, duel.rule, denoiser.block, duel.grid)
        assert planned(setting.exact, [window]) == counted(denoiser, duel, [window])


@pytest.mark.parametrize("kind", ["bidirectional", "block_causal"])
def test_elbo(networks, kind):
    """Four draws of a window hide different positions, and none hides nothing."""
    denoiser = networks[kind]
    elbo = Elbo(denoiser, ElboArguments(4))
    setting = cost.Setting(denoiser, parse("greedy"), elbo.block, elbo.grid)
    texts = windows(24)[:1]
    rows, tokens, _ = counted(denoiser, elbo, texts)
    most_rows, most_tokens, _ = planned(partial(setting.elbo, samples=4), texts)
    if kind == "bidirectional":
        assert rows == most_rows == 4
        assert tokens == most_tokens == 4 * 24
    else:  # blocks of 8 are few positions: equal draws are merged
        assert most_tokens == 16 + 4 * 3 * 8
        assert most_tokens - tokens in range(0, 4 * 3 * 8, 8)


@pytest.mark.parametrize("kind", ["bidirectional", "block_causal"])
def test_lattice(networks, kind):
    """2^m - 1 states of a block of m, and the clean blocks of 8 once."""
    denoiser = networks[kind]
    block = 4 if kind == "bidirectional" else 8
    lattice = Lattice(denoiser, block, LatticeArguments(["greedy"]), estimator="oracle")
    setting = cost.Setting(denoiser, parse("greedy"), block, lattice.grid)
    texts = windows(24)[:1]
    rows, tokens, _ = counted(denoiser, lattice, texts)
    planned_rows, planned_tokens, _ = planned(setting.lattice, texts)
    if kind == "bidirectional":
        blocks = setting.blocks(cost.Layout(2, 22, 24))
        states = sum(2 ** block.masked[0] - 1 for block in blocks)
        assert rows == planned_rows == states
        assert tokens == planned_tokens == 24 * states
    else:  # lanes are packed with empty places
        assert planned_tokens == 8 * (63 + 255 + 255) + 16 <= tokens <= 1.01 * planned_tokens


def test_causal():
    denoiser = load("demo-ar", device="cpu", attention="causal", tokenizer="demo-mdm")
    texts = [Window((300,), range(400, 417)), Window((300,), range(500, 505))]
    estimator = Autoregressive(denoiser)
    estimator.use_single_rows()
    setting = cost.Setting(denoiser, estimator.rule, 1, "target")
    assert planned(setting.exact, texts) == (2, 17 + 5, 22)
    assert counted(denoiser, estimator, texts) == (2, 17 + 5, 22)


def test_rules_that_read_the_text_take_at_most_as_many_steps(networks):
    rule = "threshold:mu=0.3"
    denoiser = networks["bidirectional"]
    setting = cost.Setting(denoiser, parse(rule), 8, "target")
    assert not setting.is_exact
    most = planned(setting.exact, windows())
    for count, bound in zip(counted(denoiser, DuelEstimator(denoiser, rule, 8), windows()), most, strict=True):
        assert count <= bound

    everything = cost.Setting(denoiser, parse("threshold:mu=1"), 8, "target")
    assert planned(everything.exact, windows()) == most


@pytest.mark.parametrize("rule", ["quota:steps=3", "greedy:k=2:sub_block=3"])
def test_schedules_and_sub_blocks_that_begin_inside_the_context(networks, rule):
    denoiser = networks["bidirectional"]
    duel = DuelEstimator(denoiser, rule, 8, grid="row")
    setting = cost.Setting(denoiser, parse(rule), 8, "row")
    duel.use_single_rows()
    assert setting.is_exact
    assert planned(setting.exact, windows()) == counted(denoiser, duel, windows())


def test_two_phase_is_all_of_dual_and_a_share_of_exact(networks):
    setting = cost.Setting(networks["bidirectional"], parse("greedy"), 8, "target")
    layouts = cost.layouts(windows())
    exact = cost.sum_over(layouts, setting.exact)
    dual = cost.sum_over(layouts, partial(setting.cached, cache="dual"))
    both = cost.sum_over(layouts, partial(setting.two_phase, share=0.25))
    assert both.token_rows == dual.token_rows + -(-exact.token_rows // 4)


def test_nothing_costs_nothing():
    assert cost.total([]) == cost.Cost()
