"""Networks whose noise is random tokens, as tiny random checkpoints, against their plain networks in float64."""

import math

import dit_reference
import networks
import pytest
import torch
from laws import slow_but
from noised_toys import bound

from lm_eval_duel import Duel
from lm_eval_duel.audit import plain_networks as plain
from lm_eval_duel.core import noise as noises
from lm_eval_duel.core.windows import Window
from lm_eval_duel.denoisers import hub, load
from lm_eval_duel.denoisers.checkpoint import Checkpoint
from lm_eval_duel.denoisers.dit.checkpoint import unfilled
from lm_eval_duel.denoisers.load_options import LoadOptions
from lm_eval_duel.errors import DuelError
from lm_eval_duel.estimators.arguments import NoisedElboArguments
from lm_eval_duel.estimators.noised_elbo import NoisedElbo

EPS = {"duo": 1e-3, "udlm": 1e-3, "gidd-uniform": dit_reference.T_EPS}


class Plain:
    """A checkpoint as the specification wants it: logits of a row at a time, and its noise."""

    def __init__(self, name, w, denoiser, before=(), after=()):
        self.name = name
        self.w = w
        self.before = before
        self.after = after
        self.noise_training = denoiser.noise_training
        self.excluded = denoiser.excluded
        self.mask_id = denoiser.mask_id
        self.vocab_size = dit_reference.VOCABULARY + (3 if name == "gidd-uniform" else 0)
        self.tokens = [v for v in range(self.vocab_size) if not self.excluded[v]]

    def logits(self, z, t, before=None):
        kept = min(max(1 - t, EPS[self.name]), 1 - EPS[self.name])
        level = 1 - kept if self.name == "gidd-uniform" else -math.log(kept)
        ids = [*self.before, *z.tolist(), *self.after]
        start = len(self.before)
        every_logit = dit_reference.plain(self.w, ids, level, plain.block_causal(len(ids), len(ids)))
        logits = every_logit[start : start + len(z)].double()
        return logits.masked_fill(self.excluded, -math.inf)

    def level(self, t):
        t = torch.as_tensor(t, dtype=torch.float64)
        K = len(self.tokens)
        c = 0.0
        if self.name == "gidd-uniform":
            c = 2 * 0.2 / (1 - 0.2) * (t * (1 - t)).sqrt()
        b = t.new_zeros(self.vocab_size)
        replaced = c / (1 + c) if self.name == "gidd-uniform" else t
        b[self.tokens] = replaced / K
        if self.mask_id is not None:
            b[self.mask_id] = t / (1 + c)
        return (1 - t) / (1 + c), b


def tokenizer_of(name):
    return None if name == "gidd-uniform" else dit_reference.words(12)


@pytest.mark.parametrize("name", slow_but(networks.NOISED, ["duo", "gidd-uniform"]))
def test_the_bound_is_that_of_the_plain_network(name, tmp_path):
    """By enumeration of all noisy rows, with a context, and of the context's and the suffix's tokens as they are;
    padding and batches change nothing.
    """
    path, w = dit_reference.write(tmp_path, name)
    denoiser = load(path, device="cpu", tokenizer=tokenizer_of(name))
    assert denoiser.family == name
    assert denoiser.noise_training.prediction == "plugin"
    assert denoiser.noise_training.steps is None
    # all columns but [MASK] and what is after it, whatever the tokenizer
    assert denoiser.noise_training.noise.tokens == (denoiser.mask_id or dit_reference.VOCABULARY)

    window = Window((3,), (5, 9), (2,))
    exact = bound(Plain(name, w, denoiser, window.context, window.suffix), window.target, 2)
    [score] = NoisedElbo(denoiser, NoisedElboArguments(1024, 2)).log_prob([window])
    assert abs(score.log_prob + exact) < 4 * score.stderr < exact

    windows = [Window((3,), (5, 9, 1, 1, 4)), Window((), (5, 9), (2,)), Window((7, 7), (8,))]
    together = NoisedElbo(denoiser, NoisedElboArguments(16)).log_prob(windows)
    one_row_a_call = NoisedElbo(denoiser, NoisedElboArguments(16), batch_size=1)
    for window, in_batch in zip(windows, together, strict=True):
        [alone] = one_row_a_call.log_prob([window])
        assert in_batch.log_prob == pytest.approx(alone.log_prob, rel=1e-4)

    spec = NoisedElbo(denoiser).describe()
    assert spec["steps"] == "inf"
    assert str(EPS[name]).strip("0.") in spec["time"].replace("0.", "")


@pytest.mark.parametrize("name", networks.NOISED)
def test_a_temperature_is_that_of_the_head(name, tmp_path):
    """Of the bound: a head with weights and bias divided by it is the same network."""
    path, _ = dit_reference.write(tmp_path, name)
    tokenizer = tokenizer_of(name)
    window = Window((3,), (5, 9, 1), (2,))
    filtered = load(path, device="cpu", tokenizer=tokenizer, temperature=0.7)
    divided = load(path, device="cpu", tokenizer=tokenizer)
    for parameter in divided.network.output_layer.linear.parameters():
        parameter.data /= 0.7

    [score] = NoisedElbo(filtered, NoisedElboArguments(32)).log_prob([window])
    [expected] = NoisedElbo(divided, NoisedElboArguments(32)).log_prob([window])

    assert score.log_prob == pytest.approx(expected.log_prob, abs=1e-4)
    with pytest.raises(DuelError, match="exclude_ids"):
        load(path, device="cpu", tokenizer=tokenizer, exclude_ids=(1,))


def published_rate(clean, z, r, alpha):
    """The integrand of Duo's and UDLM's bound as published, for alpha = 1 - t, from r (V,)."""
    K = len(r)
    bar = K * alpha * torch.eye(K, dtype=torch.float64)[clean] + 1 - alpha
    model = K * alpha * r + 1 - alpha
    logs = (bar / bar[z] * (model[z] * bar / (model * bar[z])).log()).sum()
    return float(-1 / (K * alpha) * (K / bar[z] - K / model[z] - logs))


def test_the_limit_is_the_published_integrand_of_duo_and_udlm():
    noise = noises.Uniform(5)
    r = torch.tensor([0.5, 0.1, 0.2, 0.15, 0.05], dtype=torch.float64)
    for alpha in (0.9, 0.3, 0.01):
        t = torch.tensor([[1 - alpha]], dtype=torch.float64)
        rest = torch.tensor([[alpha]], dtype=torch.float64)
        level = noise.level(t, rest)
        ratio = (level.a / level.u)[0]
        for clean, z in ((0, 0), (0, 3), (4, 2)):
            tokens = torch.tensor([clean])
            noisy = torch.tensor([z])
            of_positions = noises.statistics(r.log()[None].clone(), tokens, noisy, torch.zeros(1), ratio)
            stats = noises.Statistics(*(value[None] for value in of_positions))
            observed = noises.Observed(torch.tensor([[clean == z]]), torch.tensor([[False]]))
            rate = float(noises.limit_rate(level, noise.rates(t, rest), stats, observed))
            assert rate == pytest.approx(published_rate(clean, z, r, alpha), rel=1e-9)


def test_a_distilled_duo_warns(tmp_path, caplog):
    folder = tmp_path / "duo-distilled"
    folder.mkdir()
    path, _ = dit_reference.write(folder, "duo")

    load(path, device="cpu", tokenizer=dit_reference.words(12))

    assert "distilled" in caplog.text


def test_a_downloaded_network_has_its_name_on_the_hub(tmp_path, monkeypatch, caplog):
    path, _ = dit_reference.write(tmp_path, "duo")
    monkeypatch.setattr(hub, "local_folder", lambda *_: path)
    options = LoadOptions("someone/duo-distilled", torch.device("cpu"), dit_reference.words(12))
    checkpoint = Checkpoint(options, hub.read_config(path, "main")).with_tokenizer().local()
    assert checkpoint.name == path
    assert checkpoint.published_name == "duo-distilled"

    unfilled(checkpoint)
    assert "distilled" in caplog.text


def test_a_text_has_a_bound_that_says_whose(tmp_path):
    path, _ = dit_reference.write(tmp_path, "udlm")
    dit_reference.words(12).save_pretrained(path)
    duel = Duel.from_pretrained(path, estimator="noised_elbo", mc_samples=16, steps=48, device="cpu")
    with pytest.raises(DuelError, match="Leave rule out"):
        Duel.from_pretrained(path, rule="greedy", estimator="noised_elbo", device="cpu")
    with pytest.raises(DuelError, match="Leave rule out"):
        Duel(duel.denoiser, "greedy", estimator="noised_elbo")

    [score] = duel.score(["a b c d"])
    assert score.bound
    assert score.stderr > 0
    assert "ancestral sampling in 48 steps" in score.note
