"""DiffusionGemma: its encoder as an autoregressive model, and the bound of its decoder, against its own class."""

import itertools
import json
import math
import shutil
from pathlib import Path

import pytest
import torch
import transformers
from laws import slow_but
from networks import refused
from noised_toys import bound

from lm_eval_duel import Duel, denoisers
from lm_eval_duel.audit.checked import REFERENCE
from lm_eval_duel.audit.recompute import recompute
from lm_eval_duel.core.windows import Window
from lm_eval_duel.denoisers.checkpoint import Checkpoint
from lm_eval_duel.denoisers.hf import diffusion_gemma
from lm_eval_duel.denoisers.load_options import LoadOptions
from lm_eval_duel.errors import DuelError
from lm_eval_duel.estimators.arguments import NoisedElboArguments
from lm_eval_duel.estimators.duel import Autoregressive
from lm_eval_duel.estimators.noised_elbo import NoisedElbo
from lm_eval_duel.options import Options
from lm_eval_duel.text.loading import load_scorer

CONTEXT, TEXT = (0, 2, 1), (2, 1)


def test_it_says_which_transformers_it_needs(tmp_path, monkeypatch):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "diffusion_gemma"}))
    monkeypatch.setattr(diffusion_gemma.transformers, diffusion_gemma.CLASS, None, raising=False)
    with pytest.raises(DuelError, match=r"5\.13"):
        diffusion_gemma.unfilled(Checkpoint(LoadOptions(str(tmp_path), torch.device("cpu")), {}))


if "diffusion_gemma" not in transformers.CONFIG_MAPPING:
    pytest.skip("DiffusionGemma needs transformers 5.13 or later", allow_module_level=True)

import gemma_reference  # noqa: E402

# the name of the argument for kept keys is that of the installed transformers
pytestmark = pytest.mark.filterwarnings("error:.*past_key_values:FutureWarning")


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return gemma_reference.write(tmp_path_factory.mktemp("gemma"))


@pytest.fixture(scope="module")
def decoder(path):
    return denoisers.load(path, device="cpu", dtype="float64")


def test_the_encoder_is_a_likelihood(path):
    encoder = denoisers.load(path, device="cpu", dtype="float64", attention="causal")
    estimator = Autoregressive(encoder)

    scores = estimator.log_prob([Window((0,), text) for text in all_texts(3)])
    assert total(scores) == pytest.approx(1, abs=1e-9)

    beyond_the_sliding_window = (0, 2, 1, 2, 1, 0, 2, 0, 1)
    first, *rest = beyond_the_sliding_window
    [score] = estimator.log_prob([Window((first,), rest)])
    expected = gemma_reference.encoder_log_probs(beyond_the_sliding_window).tolist()
    assert score.token_logprobs == pytest.approx(expected, abs=1e-5)


def all_texts(length):
    return list(itertools.product(range(gemma_reference.TOKENS), repeat=length))


def total(scores):
    """The sum of their probabilities."""
    return math.fsum(math.exp(score.log_prob) for score in scores)


@pytest.fixture(scope="module")
def exact(decoder):
    """The bound by enumeration of all canvases, or of all paths, through its own class."""
    plain = gemma_reference.Plain(decoder, CONTEXT)
    return {kind: bound(plain, TEXT, 2, kind) for kind in ("none", "twice", "chain")}


@pytest.mark.parametrize("conditioning", slow_but(["none", "twice", "chain"], ["twice", "chain"]))
def test_the_bound_is_that_of_its_own_class(decoder, exact, conditioning):
    """The three self-conditionings are three processes."""
    estimator = NoisedElbo(decoder, NoisedElboArguments(1024, 2, self_conditioning=conditioning))

    [score] = estimator.log_prob([Window(CONTEXT, TEXT)])

    assert abs(score.log_prob + exact[conditioning]) < 4 * score.stderr < exact[conditioning]
    for other, value in exact.items():
        assert other == conditioning or abs(value - exact[conditioning]) > 0.01


def test_canvases_and_windows_do_not_influence_each_other(decoder):
    """Each canvas sees the clean tokens before it, through keys that are extended canvas by canvas; the last is short.

    Two windows whose draws are the same: those of a canvas are a function of the window and the canvas's number.
    """
    windows = [
        Window((0,), (2, 1, 0, 2, 1)),
        Window((0, 1), (2, 1)),
        Window((0,), (2, 1, 0, 2, 1)),
        Window((2, 1), (2, 1)),  # of the length and the start of another
    ]
    together = NoisedElbo(decoder, NoisedElboArguments(16, 4)).log_prob(windows)
    one_row_a_call = NoisedElbo(decoder, NoisedElboArguments(16, 4), batch_size=1)
    for window, in_batch in zip(windows, together, strict=True):
        [alone] = one_row_a_call.log_prob([window])
        assert in_batch.log_prob == pytest.approx(alone.log_prob, abs=1e-9)

    first = bound(gemma_reference.Plain(decoder, (0,)), (2, 1), 2)
    last = bound(gemma_reference.Plain(decoder, (0, 2, 1)), (0,), 2)
    exact = first + last
    estimator = NoisedElbo(decoder, NoisedElboArguments(512, 2, self_conditioning="none"))
    [score] = estimator.log_prob([Window((0,), (2, 1, 0))])
    assert abs(score.log_prob + exact) < 4 * score.stderr


HOW = [{}, {"self_conditioning": "none"}, {"prediction": "leave_one_out"}, {"temperatures": "0.8:0.4:4"}]


@pytest.mark.parametrize("how", slow_but(HOW, (HOW[0],)))
def test_given_the_noise_it_has_a_likelihood(decoder, how):
    """A canvas and a short one, each with its own output of the step before.

    Window by window as the class's own forward has it.
    """
    windows = [Window(CONTEXT, text) for text in all_texts(3)]
    for seed, rule in enumerate(("greedy", "left_to_right")):
        duel = Duel(decoder, rule, noise_seed=seed, **how)

        scores = duel.log_prob(windows)
        assert total(scores) == pytest.approx(1, abs=1e-6)

        for n in (0, 13, 26):
            again = recompute(duel.estimator, windows[n], scores[n])
            assert again.route == REFERENCE
            assert not again.problems
            assert not again.other_picks
            assert again.log_prob == pytest.approx(scores[n].log_prob, abs=1e-5)

        [drawn] = duel.sample([CONTEXT], 4, seed=seed)
        [scored] = duel.log_prob([Window(CONTEXT, drawn.tokens)])
        assert drawn.log_prob == pytest.approx(scored.log_prob, abs=1e-9)


@pytest.mark.parametrize("how", slow_but(HOW, (HOW[3],)))
def test_an_audit_over_seeds_predicts_in_the_same_way(decoder, how):
    duel = Duel(decoder, "greedy", estimator="duel_seeds", noise_seeds=2, **how)
    window = Window(CONTEXT, (2, 0, 0, 1, 2))
    [score] = duel.log_prob([window])

    again = recompute(duel.estimator, window, score)

    assert again.route == REFERENCE, again
    assert not again.problems
    assert not again.other_picks


def test_each_way_of_predicting_is_another_sampler(decoder):
    window = Window(CONTEXT, (2, 1, 0, 1))
    duels = [Duel(decoder, "greedy", **how) for how in HOW]

    fingerprints = {duel.fingerprint for duel in duels}
    assert len(fingerprints) == len(HOW)
    values = [duel.log_prob([window])[0].log_prob for duel in duels]
    for one, other in itertools.combinations(values, 2):
        assert abs(one - other) > 1e-3


def test_equal_clean_tokens_are_one_call(decoder):
    duel = Duel(decoder, "greedy")

    duel.log_prob([Window(CONTEXT, text) for text in all_texts(2)])

    assert duel.counts.forwards == 3  # the context, and a call for each step of all canvases


def test_keys_are_kept_once_when_memory_runs_out(decoder):
    """The layers have extended the keys of the clean tokens before the last norm runs."""
    window = Window((0,), (2, 1, 0, 2, 1))
    [expected] = NoisedElbo(decoder, NoisedElboArguments(16, 4)).log_prob([window])
    for failing in range(3):  # one encode for each canvas
        encodes = itertools.count()

        def run_out(*_, failing=failing, encodes=encodes):
            if next(encodes) == failing:
                raise torch.OutOfMemoryError("CUDA out of memory")

        hook = decoder.model.model.encoder.language_model.norm.register_forward_pre_hook(run_out)
        try:
            [score] = NoisedElbo(decoder, NoisedElboArguments(16, 4)).log_prob([window])
        finally:
            hook.remove()
        assert next(encodes) > failing + 1, "memory ran out, and the encode was repeated"
        assert score.token_logprobs == pytest.approx(expected.token_logprobs, abs=1e-9)


def test_what_is_said_and_what_is_refused(path, decoder):
    assert NoisedElbo(decoder).describe() == {
        "estimator": "noised_elbo",
        "noise": "uniform",
        "steps": 48,
        "prediction": "denoiser",
        "self_conditioning": "twice",
        "canvas": 2,
        "last_canvas": "short",
        "mc_samples": 128,
        "draw_seed": 0,
    }

    with pytest.raises(DuelError, match="no limit"):
        NoisedElbo(decoder, NoisedElboArguments(steps=math.inf))
    with pytest.raises(DuelError, match="context"):
        NoisedElbo(decoder).log_prob([Window((), (1,))])
    with pytest.raises(DuelError, match="suffix"):
        NoisedElbo(decoder).log_prob([Window((0,), (1,), (2,))])
    for window in (Window((), (1,)), Window((0,), (1,), (2,)), Window((0,), (1, 0), known=(0,))):
        with pytest.raises(DuelError):
            Duel(decoder, "greedy").log_prob([window])

    with pytest.raises(DuelError, match="grid"):
        Duel(decoder, "greedy", grid="row")
    with pytest.raises(DuelError, match="self_conditioning"):
        Duel(decoder, "greedy").differentiable([Window((0,), (1,))], [(0,)])
    with pytest.raises(DuelError, match=r"noised_elbo.*estimator=ar"):
        Duel(decoder, estimator="elbo")
    for name, value in (("cache", "dual"), ("cfg_scale", 0.5), ("exclude_ids", "1"), ("top_k", 2), ("top_p", 0.5)):
        refused(path, f"'{name}': ", **{name: value})  # and a reason
    refused(path, "peft", peft="folder")

    for estimator in ("ar", "noised_elbo"):
        options = Options.parse({"pretrained": path, "estimator": estimator})
        assert load_scorer(options).estimator.name == estimator


def test_canvases_that_are_no_numbers_or_influence_each_other_are_refused(path, monkeypatch):
    decode = diffusion_gemma.Canvases.decode

    def no_numbers(*arguments):
        return decode(*arguments) * math.nan

    def by_the_size_of_the_call(*arguments):
        out = decode(*arguments)
        return out * len(out)

    for fault, message in ((no_numbers, "NaN"), (by_the_size_of_the_call, "influence each other")):
        monkeypatch.setattr(diffusion_gemma.Canvases, "decode", fault)
        refused(path, message)


@pytest.mark.parametrize("attention", ["causal", None])
def test_tokens_of_images_are_refused(path, attention, tmp_path):
    config = json.loads(Path(path, "config.json").read_text())
    shutil.copytree(path, tmp_path, dirs_exist_ok=True)
    (tmp_path / "config.json").write_text(json.dumps({**config, "boi_token_id": 1}))
    denoiser = denoisers.load(str(tmp_path), device="cpu", attention=attention)
    estimator = NoisedElbo(denoiser, NoisedElboArguments(8)) if attention is None else Autoregressive(denoiser)
    for window in (Window((0,), (2, 1)), Window((1, 0), (2,))):
        with pytest.raises(DuelError, match=r"Window 0 holds id 1, .*image"):
            estimator.log_prob([window])
    assert len(estimator.log_prob([Window((0,), (2, 2))])) == 1
