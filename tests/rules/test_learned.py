"""Rules that hold a network, with examples/rules/learned.py: their features, the laws under them, their files."""

import math
import shutil
import sys

import pytest
import textbook
import torch
from attends import Attends
from laws import slow_but, strings, total
from pages import ROOT
from safetensors.torch import load_file, save_file
from toys import BlockCausal, Toy

from lm_eval_duel import Duel, reference, rules
from lm_eval_duel.core.windows import Window
from lm_eval_duel.denoisers.cached.denoiser import Cached
from lm_eval_duel.denoisers.wrappers import Guided
from lm_eval_duel.errors import DuelError
from lm_eval_duel.estimators.duel import DuelEstimator

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


# ---------------------------------------------------------------- laws


@pytest.mark.parametrize("number", slow_but(range(3), {1, 2}))
def test_sums_to_one_on_every_network_and_is_scored_as_drawn(number, folder):
    text = texts(folder)[number]
    cached = texts(folder, "attends")[number]
    duels = [DuelEstimator(Toy(), text, None), DuelEstimator(BlockCausal(), text, "auto")]
    duels += [DuelEstimator(Cached(Attends(), cache), cached, 2) for cache in ("prefix", "dual")]
    for duel in duels:
        assert abs(total(duel, 4) - 1) < 1e-9
        assert rules.parse(str(duel.rule)) == duel.rule

        [drawn] = duel.sample([(1,)], 4, seed=number)
        [scored] = duel.log_prob([Window((1,), drawn.tokens)])
        assert drawn.reveal_steps == scored.reveal_steps
        assert drawn.token_logprobs == pytest.approx(scored.token_logprobs, abs=1e-9)


def planned(toy, file, k):
    """A network and the rule of a planner's formula, as the reference calls them."""
    w = load_file(file)

    def network(z):
        network.features = toy.features(z[None], None)[0]
        return toy.head(network.features).masked_fill(toy.excluded, -math.inf)

    def F(log_P, M):
        entropy = reference.entropy_nats(log_P[M])
        confidence = reference.confidence(log_P[M])
        inputs = torch.cat([entropy[:, None], network.features[M], confidence[:, None]], 1)
        hidden = torch.nn.functional.gelu(inputs @ w["0.weight"].T + w["0.bias"])
        score = hidden @ w["2.weight"].T + w["2.bias"]
        return reference.best(k, M, score[:, 0])

    return network, F, toy.mask_id


@torch.no_grad()
@pytest.mark.parametrize("make", [Toy, Attends])
def test_orders_are_those_of_the_formula(make, folder):
    toy = make()
    file = folder / f"{make.__name__.lower()}.safetensors"
    targets = strings(3, 5)[::40]
    windows = [Window((), target) for target in targets]
    orders = set()
    for k in (1, 2):
        duel = DuelEstimator(toy, f"{LEARNED}:file={file}:k={k}", None)
        for target, score in zip(targets, duel.log_prob(windows), strict=True):
            path = reference.log_likelihood(target, [range(5)], *planned(toy, file, k))
            steps = textbook.step_of_each(path.sigma, [range(5)])
            assert score.reveal_steps == tuple(steps[position] for position in range(5))
            assert score.token_logprobs == pytest.approx([path.log_p[position] for position in range(5)], abs=1e-9)
            assert score.near_ties == 0
            orders.add(score.reveal_steps)
    assert len(orders) > 3  # the planner's order is no fixed one


def test_near_ties_are_counted_in_the_planners_logits(tmp_path):
    planner = torch.nn.Sequential(torch.nn.Linear(1, 1))
    planner[0].weight.data.fill_(1e-7)
    file = tmp_path / "flat.safetensors"
    save_planner(planner, file, ["entropy"])
    window = Window((1,), (0, 1, 2))

    for rule in (f"{LEARNED}:file={file}", f"{LEARNED}Threshold:file={file}:mu=1"):
        [score] = DuelEstimator(Toy(), rule, None).log_prob([window])
        assert score.near_ties == 2  # the last position has no choice


# ---------------------------------------------------------------- the text, the file, the fingerprint


def test_the_weights_are_part_of_the_fingerprint(folder, tmp_path):
    file = tmp_path / "toy.safetensors"
    text = f"{LEARNED}:file={file}"
    windows = [Window((n,), (0, 1, 2, 0, 1)) for n in range(3)]

    def orders():
        scores = DuelEstimator(Toy(), text, None).log_prob(windows)
        return [score.reveal_steps for score in scores]

    shutil.copy(folder / "toy.safetensors", file)
    rule = rules.parse(text)
    description = rule.describe()
    first_orders = orders()
    assert rule == rules.parse(str(rule))
    assert description["rule_files"]

    planner = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.GELU(), torch.nn.Linear(5, 1))
    save_planner(planner, file, INPUTS)
    assert rules.parse(text).describe() != description
    assert orders() != first_orders, "the new file is read"


def test_files_that_cannot_be_read(tmp_path):
    (tmp_path / "cut.safetensors").write_bytes(b"\x10\0\0\0\0\0\0\0{")
    with pytest.raises(DuelError, match="cut"):
        rules.parse(f"{LEARNED}:file={tmp_path}/cut.safetensors")
    with pytest.raises(DuelError, match="file"):
        rules.parse(LEARNED)

    save_file({"weight": torch.full((1, 4, 4), math.nan)}, tmp_path / "nan.safetensors")
    with pytest.raises(DuelError, match="weight have NaN"):
        DuelEstimator(Toy(), f"custom_rules:Looks:file={tmp_path}/nan.safetensors", "auto").log_prob(
            [Window((), (0, 1))]
        )


def test_planners_that_do_not_fit_the_network(folder):
    wide = f"{LEARNED}:file={folder}/attends.safetensors"
    fitting = f"{LEARNED}:file={folder}/toy.safetensors"
    for network, rule, named in ((Toy(), wide, "10 numbers .* 6"), (Guided(Toy(), 0.5), fitting, "cfg_scale")):
        with pytest.raises(DuelError, match=named):
            DuelEstimator(network, rule, "auto").log_prob([Window((1,), (0, 1))])


@pytest.mark.slow
def test_the_example_trains_a_planner(tmp_path):
    example = sys.modules[rules.find(LEARNED).__module__]
    file = tmp_path / "planner.safetensors"

    example.save_planner(example.train(steps=2), file, ("features", "entropy"))

    duel = Duel.from_pretrained("demo-mdm", rule=f"{LEARNED}:file={file}:k=4", block=8, device="cpu")
    [score] = duel.log_prob([Window((), tuple(range(300, 312)))])
    assert score.nfe == 3
    assert math.isfinite(score.log_prob)
