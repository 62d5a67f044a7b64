"""Presets: each stands for the settings of its source, and fits only the checkpoints that it is for."""

import re

import own
import pytest

from lm_eval_duel import Duel as Library
from lm_eval_duel import load, rules
from lm_eval_duel.errors import DuelError, UsageError
from lm_eval_duel.estimators.base import Estimator
from lm_eval_duel.harness.lm import DuelMDM
from lm_eval_duel.options import Options
from lm_eval_duel.rules import presets

pytestmark = pytest.mark.usefixtures("one_load")

SETTINGS = {  # rule, block, cache and grid as the sources have them
    "llada": ("quota:steps=128", 128, None, "auto"),
    "llada-fast-dllm": ("threshold:mu=0.9", 32, None, "auto"),
    "llada-fast-dllm-prefix": ("threshold:mu=0.9", 32, "prefix", "auto"),
    "llada-fast-dllm-dual": ("threshold:mu=0.9", 32, "dual", "auto"),
    "llada-klass": ("klass:mu=0.6:nu=0.015:history=2:kl=authors:across=True", 64, None, "auto"),
    "dparallel": ("entropy_threshold:tau=0.5", 32, None, "auto"),
    "d3llm": ("entropy_threshold:tau=0.5", 32, None, "auto"),
    "dinfer-threshold": ("dinfer_threshold:mu=0.9", 64, None, "row"),
    "dinfer-hierarchy": ("hierarchy:low=0.3:tau=0.9", 64, None, "row"),
    "dream-entropy": ("dream:alg=entropy:steps=256", None, None, "auto"),
    "dream-fast-dllm": ("threshold:mu=0.9:seed_first=True", 32, "dual", "auto"),
    "dream-fast-dllm-prefix": ("threshold:mu=0.9:seed_first=True", 32, "prefix", "auto"),
    "dream-fast-dllm-prefix-entropy": ("dream:alg=entropy:steps=32:seed_first=True", 32, "prefix", "auto"),
    "llada2": ("high_or_topk:n=1:tau=0.95", 32, None, "auto"),
    "llada2-diffusers": ("high_or_topk:n=1:tau=0.7", 32, None, "auto"),
    "fast-dllm-v2": ("threshold:mu=0.95:strict=True:sub_block=8:seed_first=True", 32, None, "auto"),
    "nemotron": ("greedy:k=1", 32, None, "auto"),
    "nemotron-threshold": ("threshold:mu=0.9", 32, None, "auto"),
    "mlx-nemotron": ("threshold:mu=0.9", 32, None, "auto"),
    "sglang-sdar": ("threshold:mu=0.95:strict=True", 4, None, "auto"),
    "sglang-llada2": ("threshold:mu=0.95:strict=True", 32, None, "auto"),
    "diffusers-diffusion-gemma": ("cumulative_quota:steps=48:tau=0.95", 256, None, "auto"),
    "mlx-diffusion-gemma": ("threshold_until:mu=0.9:steps=48", 256, None, "auto"),
    "stable-diffcoder": ("quota:steps=4", 4, None, "auto"),
}
SAMPLED = {"sdar-static": {"n": 1}, "sdar-dynamic": {"n": 1, "tau": 0.85}}  # estimator=sampled_confidence


def test_a_preset_is_its_args_written_out():
    assert set(presets.PRESETS) == {*SETTINGS, *SAMPLED}
    for name, (rule, block, cache, grid) in SETTINGS.items():
        options = Options.parse({"preset": name})
        assert str(options.rule) == rule
        assert options.block == block
        assert options.cache == cache
        assert options.grid == grid

        written_out = Options.parse(_pairs(presets.find(name).written_out))
        assert {**vars(written_out), "preset": name} == vars(options)
        assert Options.parse({"preset": name, "rule": str(options.rule)}) == options  # the same, said twice
        assert re.search(r"@|threshold=", presets.find(name).source)
    for name, settings in SAMPLED.items():
        arguments = {"estimator": "sampled_confidence", "confidence": "tempered", "block": 4, **settings}
        assert presets.find(name).arguments == arguments
        assert Options.parse({"preset": name}).estimator == "sampled_confidence"


TAKEN = {  # what the networks of other families that are bundled take of the args that only some take
    "demo-mdm": ("block", "grid", "cache"),
    "demo-bd": (),
    "demo-duo": ("block", "grid"),
}


def _pairs(written_out):
    return dict(part.split("=", 1) for part in written_out.split(","))


@pytest.mark.parametrize("network", [pytest.param("demo-mdm", marks=pytest.mark.slow), "demo-bd", "demo-duo"])
def test_the_advice_for_another_family_is_not_refused(network):
    """The args that it names without a condition, and those whose condition the network meets."""
    plain = load(network, device="cpu")
    for preset in presets.ENTRIES:
        if network == "demo-duo" and "estimator" in preset.arguments:
            continue  # this sampler is defined for masks alone, and refused as such
        if network == "demo-bd" and preset.name == "llada-klass":
            continue  # its rule compares blocks, which the rule's own error says to leave out
        with pytest.raises(DuelError, match=f"preset={preset.name} is the sampler of") as error:
            Library.from_pretrained(network, preset=preset.name, device="cpu")
        _, _, advice = str(error.value).partition("write it out: ")
        written_out, _, conditions = advice.partition(". ")
        arguments = _pairs(written_out)
        for key in preset.arguments.keys() & presets.ONLY_WITH:
            is_conditional = f"Add {key}=" in conditions
            if presets.ONLY_WITH[key] != presets.NO_TRAINED_BLOCK:
                assert is_conditional
                assert key not in arguments
            elif network == "demo-bd":  # has a trained block
                assert key not in arguments
            else:  # has none, which is not known of every network before it is made
                assert (key in arguments) != is_conditional
                assert not (is_conditional and network == "demo-mdm")
            if key in TAKEN[network]:
                arguments[key] = preset.arguments[key]
        if network == "demo-mdm":
            assert f"lm-eval-duel run demo-mdm --model_args {preset.for_demo} --tasks" in str(error.value)
            assert Options.parse(_pairs(preset.for_demo)) == Options.parse(arguments)
        options = Options.parse(arguments)
        if not arguments.get("cache"):
            Estimator.from_options(plain, options)
        else:
            Library.from_pretrained(network, device="cpu", **arguments)


def test_a_preset_in_the_harness_and_in_the_library_and_checkpoints_that_it_does_not_fit(tmp_path):
    """Its args written out have the same fingerprint; the family is that of the config, before weights are read."""
    folder = tmp_path / "dream"
    folder.mkdir()
    path = own.write(folder, own.DREAM, "DreamModel", own.decoder(bias=True))
    loaded = {"pretrained": path, "device": "cpu"}

    in_the_harness = DuelMDM(**loaded, preset="dream-fast-dllm")
    written_out = DuelMDM(**loaded, rule="threshold:mu=0.9:seed_first=true", block=32, cache="dual")
    in_the_library = Library.from_pretrained(path, preset="dream-fast-dllm", device="cpu")
    assert in_the_harness.fingerprint == written_out.fingerprint
    assert in_the_library.fingerprint == written_out.fingerprint
    assert rules.inner(in_the_library.rule) == rules.parse("threshold:mu=0.9")
    assert in_the_library.block == 32

    with pytest.raises(DuelError, match="rule=greedy:k=2 is given, too"):
        Library.from_pretrained(path, preset="dream-fast-dllm", rule="greedy:k=2", device="cpu")

    for weights in folder.glob("*.safetensors"):
        weights.unlink()
    for preset in ("llada", "nemotron"):
        message = f"preset={preset} is the sampler of .* family dream"
        with pytest.raises(DuelError, match=message):
            DuelMDM(**loaded, preset=preset)
        with pytest.raises(DuelError, match=message):
            Library.from_pretrained(path, preset=preset)


@pytest.mark.parametrize(
    ("name", "key", "value"),
    [("sdar-dynamic", "mu", 0.5), ("dream-entropy", "mu", 0.5), ("llada", "k", 2)],
)
def test_a_parameter_beside_a_preset_names_the_preset_and_what_may_be_changed(name, key, value):
    """Also of a preset whose sampler is no rule: `mu` is not taken for one of the default rule."""
    preset = presets.find(name)
    with pytest.raises(UsageError, match=f"preset={name} is .*{key}={value}") as error:
        Options.parse({"preset": name, key: value})
    assert preset.written_out in str(error.value)
    for free in preset.free:
        assert free in str(error.value)
        assert Options.parse({"preset": name, free: 8}).preset == name


def test_a_preset_on_another_network_is_written_out_as_it_was_given():
    """With the user's own value of an arg that the preset lets change, in each way in which it can be given."""
    ways = (
        {"preset": "llada", "steps": 64},
        {"preset": "llada", "rule": "quota:steps=64"},
        {"preset": "dream-fast-dllm-prefix-entropy", "steps": 64},  # its rule is one around another
        {"preset": "sglang-sdar", "block": 64},
    )
    for arguments in ways:
        with pytest.raises(DuelError, match=f"preset={arguments['preset']} is the sampler of") as error:
            Library.from_pretrained("demo-mdm", device="cpu", **arguments)
        changed = presets.find(arguments["preset"]).free[0]
        values = re.findall(rf"\b{changed}=(\w+)", str(error.value))
        assert len(values) > 1  # for this network, and for a bundled one
        assert {*values} == {"64"}


@pytest.mark.parametrize(
    ("rule", "suggested"),
    [
        ("llada-fast-dllm", ["llada-fast-dllm"]),
        ("LLaDA", ["llada"]),
        ("fast_dllm_v2", ["fast-dllm-v2"]),
        ("llada:steps=64", ["llada"]),
        ("fast-dllm", [name for name in presets.PRESETS if "fast-dllm" in name]),
    ],
)
def test_a_preset_that_is_given_as_a_rule_is_told_how_presets_are_given(rule, suggested):
    with pytest.raises(UsageError) as error:
        Options.parse({"rule": rule})
    assert re.findall(r"preset=([\w.-]*\w)", str(error.value)) == suggested


def test_a_rule_that_is_given_as_a_preset_is_told_how_rules_are_given():
    for rule in ("greedy", "confidence"):
        with pytest.raises(UsageError, match=f"rule={rule}"):
            Options.parse({"preset": rule})
