"""Rules that hold a network, with examples/rules/learned.py: their features, the laws under them, their files."""

import itertools
import math
import shutil
import sys

import pytest
import torch
from attends import Attends
from laws import check_scored_as_drawn, slow_but, strings, total
from pages import ROOT
from safetensors.torch import load_file, save_file
from toys import BlockCausal, Toy

from lm_eval_duel import Duel, rules
from lm_eval_duel.core.windows import Window
from lm_eval_duel.denoisers.cached.denoiser import Cached
from lm_eval_duel.denoisers.wrappers import Guided
from lm_eval_duel.errors import DuelError
from lm_eval_duel.estimators.duel import DuelEstimator
from lm_eval_duel.estimators.subsets.lattice import Lattice
from lm_eval_duel.estimators.two_phase import TwoPhase

LEARNED = f"{ROOT}/examples/rules/learned.py:Learned"
save_planner = sys.modules[rules.find(LEARNED).__module__].save_planner

WIDTHS = {"toy": 4, "attends": 8}  # features: of a toy its logits, [MASK] included
INPUTS = ("entropy", "features", "confidence")  # features not first, so that the order counts


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Planners with random weights for both kinds of toys, and the weights of custom_rules:Looks."""
    path = tmp_path_factory.mktemp("planners")
    for name, width in WIDTHS.items():
        torch.manual_seed(1)
        planner = torch.nn.Sequential(torch.nn.Linear(width + 2, 5), torch.nn.GELU(), torch.nn.Linear(5, 1)).double()
        for parameter in planner.parameters():
            parameter.data.mul_(3)
        save_planner(planner, path / f"{name}.safetensors", INPUTS)
        save_file({"weight": torch.randn(1, width, width).double()}, path / f"{name}_looks.safetensors")
    return path


def texts(folder, name="toy"):
    """Rules that follow these planners."""
    file = folder / f"{name}.safetensors"
    return [
        f"{LEARNED}:file={file}:k=2",
        f"{LEARNED}Threshold:file={file}:mu=0.4:sub_block=2:seed_first=True",
        f"custom_rules:Looks:file={folder}/{name}_looks.safetensors:k=1",
    ]


RULES = slow_but(range(3), {1, 2})


# ---------------------------------------------------------------- laws


@pytest.mark.parametrize("number", RULES)
def test_sums_to_one_and_samples_are_scored_as_they_were_drawn(number, folder):
    text = texts(folder)[number]
    duel = DuelEstimator(Toy(), text, None)
    assert rules.parse(str(duel.rule)) == duel.rule
    assert abs(total(duel, 4) - 1) < 1e-9
    check_scored_as_drawn(duel)
    duel = DuelEstimator(Toy(), text, 2, grid="row")
    assert abs(total(duel, 3, context=(1,), suffix=(2,)) - 1) < 1e-9
    [written] = duel.sample([(1,)], 4, do_sample=False)
    scored = duel.log_prob([Window((1,), s) for s in strings(3, 4)])
    assert [score.is_greedy for score in scored] == [s == written.tokens for s in strings(3, 4)]
    assert abs(total(DuelEstimator(BlockCausal(), text), 4) - 1) < 1e-9


@torch.no_grad()
def by_hand(toy, file, k, target):
    """The order and the log-probabilities of a window without context, from the planner's formula, position by
    position.
    """
    tensors = load_file(file)
    ids, steps, nats = torch.full((1, len(target)), toy.mask_id), {}, {}
    for step in itertools.count():
        masked = [p for p in range(len(target)) if p not in steps]
        if not masked:
            return [steps[p] for p in range(len(target))], [nats[p] for p in range(len(target))]
        features, scores, probs = toy.features(ids, None)[0], {}, {}
        for p in masked:
            logits = toy.head(features[p][None])[0][: toy.tokens]
            probs[p] = logits.softmax(0)
            entropy = -sum(float(q) * math.log(q) for q in probs[p])
            first, *others = logits.sort(descending=True).values
            confidence = float(first - torch.stack(others).logsumexp(0))
            x = torch.tensor([entropy, *features[p].tolist(), confidence], dtype=torch.float64)
            x = tensors["0.weight"] @ x + tensors["0.bias"]
            x = 0.5 * x * (1 + torch.erf(x / math.sqrt(2)))
            scores[p] = float(tensors["2.weight"] @ x + tensors["2.bias"])
        for p in sorted(masked, key=lambda p: (-scores[p], p))[:k]:
            steps[p], nats[p] = step, math.log(probs[p][target[p]])
            ids[0, p] = target[p]


@pytest.mark.parametrize("make", [Toy, Attends])
def test_orders_are_those_of_the_formula(make, folder):
    toy, file = make(), folder / f"{make.__name__.lower()}.safetensors"
    orders = set()
    for k in (1, 2):
        for target, score in zip(
            strings(3, 5)[::40],
            DuelEstimator(toy, f"{LEARNED}:file={file}:k={k}", None).log_prob(
                [Window((), s) for s in strings(3, 5)[::40]]
            ),
            strict=True,
        ):
            steps, nats = by_hand(toy, file, k, target)
            assert score.reveal_steps == tuple(steps) and score.near_ties == 0
            assert score.token_logprobs == pytest.approx(nats, abs=1e-9)
            orders.add(score.reveal_steps)
    assert len(orders) > 3  # the planner's order is no fixed one


# ---------------------------------------------------------------- caches, the lattice, estimates


@pytest.mark.parametrize("number", RULES)
def test_under_caches_and_in_two_phases(number, folder):
    text, toy = texts(folder, "attends")[number], Attends(length=10)
    windows = [Window((), (0, 1, 2, 0, 1, 0, 2)), Window((2,), (1, 1, 2, 0, 1)), Window((1, 2, 0), (2, 1), (1, 0))]
    exact = DuelEstimator(toy, text, 3).log_prob(windows)
    for cache in ("prefix", "dual"):
        assert abs(total(DuelEstimator(Cached(toy, cache), text, 2), 4, context=(1,)) - 1) < 1e-9
        every = TwoPhase(toy, text, 3, cache=cache, sample=1.0).log_prob(windows)
        assert [s.log_prob for s in every] == pytest.approx([s.log_prob for s in exact], abs=1e-9)


def test_on_a_lattice(folder):
    state_only, toy = [text for text in texts(folder) if "seed_first" not in text], Toy()
    windows = [Window((), (0, 1, 2, 0, 1, 0, 2)), Window((2,), (1, 1, 2, 0, 1)), Window((), (0, 1, 2, 0, 1, 0, 2))]
    many = Lattice(toy, 3, follow=state_only).log_prob(windows)
    for text in state_only:
        for lattice, alone in zip(many, DuelEstimator(toy, text, 3).log_prob(windows), strict=True):
            assert lattice.others[str(rules.parse(text))].log_prob == pytest.approx(alone.log_prob, abs=1e-9)


def test_near_ties_are_counted_in_the_planners_logits(tmp_path):
    planner = torch.nn.Sequential(torch.nn.Linear(1, 1))
    planner[0].weight.data.fill_(1e-7)
    save_planner(planner, tmp_path / "flat.safetensors", ["entropy"])
    window = Window((1,), (0, 1, 2))
    for rule in (
        f"{LEARNED}:file={tmp_path}/flat.safetensors",
        f"{LEARNED}Threshold:file={tmp_path}/flat.safetensors:mu=1",
    ):
        [score] = DuelEstimator(Toy(), rule, None).log_prob([window])
        assert score.near_ties == 2  # the last position has no choice


# ---------------------------------------------------------------- the text, the file, the fingerprint


def test_the_weights_are_part_of_the_fingerprint(folder, tmp_path):
    file, windows = tmp_path / "toy.safetensors", [Window((n,), (0, 1, 2, 0, 1)) for n in range(3)]
    shutil.copy(folder / "toy.safetensors", file)
    text = f"{LEARNED}:file={file}"
    rule = rules.parse(text)
    before, orders = (
        rule.describe(),
        [s.reveal_steps for s in DuelEstimator(Toy(), text, None).log_prob(windows)],
    )
    assert rule == rules.parse(str(rule)) and before["rule_files"]
    planner = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.GELU(), torch.nn.Linear(5, 1))
    save_planner(planner, file, INPUTS)
    assert rules.parse(text).describe() != before
    assert [
        s.reveal_steps for s in DuelEstimator(Toy(), text, None).log_prob(windows)
    ] != orders  # the new file is read


def test_files_that_cannot_be_read(tmp_path):
    (tmp_path / "cut.safetensors").write_bytes(b"\x10\0\0\0\0\0\0\0{")
    for text, named in ((f"{LEARNED}:file={tmp_path}/cut.safetensors", "cut"), (LEARNED, "file")):
        with pytest.raises(DuelError, match=named):
            rules.parse(text)
    save_file({"weight": torch.full((1, 4, 4), math.nan)}, tmp_path / "nan.safetensors")
    with pytest.raises(DuelError, match="weight have NaN"):
        DuelEstimator(Toy(), f"custom_rules:Looks:file={tmp_path}/nan.safetensors").log_prob([Window((), (0, 1))])


def test_planners_that_do_not_fit_the_network(folder):
    wide, fitting = (f"{LEARNED}:file={folder}/{name}.safetensors" for name in ("attends", "toy"))
    for network, rule, named in ((Toy(), wide, "10 numbers .* 6"), (Guided(Toy(), 0.5), fitting, "cfg_scale")):
        with pytest.raises(DuelError, match=named):
            DuelEstimator(network, rule).log_prob([Window((1,), (0, 1))])


@pytest.mark.slow
def test_the_example_trains_a_planner(tmp_path):
    example, file = sys.modules[rules.find(LEARNED).__module__], tmp_path / "planner.safetensors"
    example.save_planner(example.train(steps=2), file, ("features", "entropy"))
    duel = Duel.from_pretrained("demo-mdm", rule=f"{LEARNED}:file={file}:k=4", block=8, device="cpu")
    [score] = duel.log_prob([Window((), tuple(range(300, 312)))])
    assert score.nfe == 3 and math.isfinite(score.log_prob)
