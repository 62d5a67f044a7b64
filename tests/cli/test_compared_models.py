"""`score --compare`: which model args another model has from the first, one arg at a time and whole command lines."""

import pytest

from lm_eval_duel.cli.models import OtherModel, other_model
from lm_eval_duel.console.command_line import FLAGS
from lm_eval_duel.errors import DuelError, UsageError
from lm_eval_duel.estimators import registry
from lm_eval_duel.options import MODEL_ARGUMENTS
from lm_eval_duel.rules import presets

OF_ONE_CHECKPOINT = {  # model args that describe a checkpoint: another one may differ
    "tokenizer": "x",
    "revision": "main",
    "family": "llada",
    "peft": "adapter",
    "backend": "hf",
    "trust_remote_code": True,
    "mask_token_id": 3,
    "exclude_ids": "7",
    "attention": "bidirectional",
    "shift_logits": 1,
    "sigma": 0.5,
    "first_token": "block",
    "last_block": "cut",
}
OF_ANY = {  # that a run chooses, whatever it is of
    "rule": "margin",
    "block": 4,
    "grid": "row",
    "cache": "dual",
    "windows": "harness",
    "max_length": 9,
    "temperature": 0.5,
    "top_k": 3,
    "top_p": 0.5,
    "dtype": "float64",
    "draw_seed": 3,
    "batch_size": 5,
    "device": "cpu",
    "order": "longest",
    "bos": "none",
    "verify": 2,
    "cfg_scale": 0.5,
    "compile": True,
    "max_batch_size": 2,
    "load_in_8bit": True,
    "load_in_4bit": True,
    "device_map": "auto",
}


def accepted(monkeypatch):
    """Take any combination of model args: those of one at a time need others."""
    monkeypatch.setattr("lm_eval_duel.cli.models.Options.parse", lambda args: None)


@pytest.mark.parametrize("key", OF_ONE_CHECKPOINT)
def test_what_describes_a_checkpoint_is_asked_for_again(key, monkeypatch):
    """For another checkpoint; the same one, named or not, has it; what the model sets itself is not asked for."""
    accepted(monkeypatch)
    value = OF_ONE_CHECKPOINT[key]
    first = {"pretrained": "first", key: value, "block": 4}
    with pytest.raises(DuelError, match=f"{key}={value} of --model_args describes .*{key}=none"):
        other_model("demo-bd", first)

    for text in ("rule=margin", "first,rule=margin", "pretrained=first"):
        same_checkpoint = other_model(text, first)
        assert same_checkpoint.args[key] == value
        assert same_checkpoint.args["pretrained"] == "first"

    set_by_itself = other_model(f"demo-bd,{key}=none", first)
    assert set_by_itself.args == {"pretrained": "demo-bd", key: None, "block": 4}
    assert set_by_itself.inherited == ("block",)


@pytest.mark.parametrize("key", OF_ANY)
def test_what_a_run_chooses_is_inherited(key, monkeypatch):
    accepted(monkeypatch)
    first = {"pretrained": "first", key: OF_ANY[key]}

    other = other_model("demo-bd", first)
    assert other.args == {"pretrained": "demo-bd", key: OF_ANY[key]}
    assert other.ignored == ()
    assert other.note == ""

    set_by_itself = other_model(f"demo-bd,{key}=none", first)
    assert set_by_itself.args == {"pretrained": "demo-bd", key: None}
    assert set_by_itself.inherited == ()


def test_every_model_arg_is_of_a_checkpoint_or_of_a_run():
    """A new one has to be decided upon."""
    rest = {"preset", "estimator", "pretrained", "trace"}  # stand for others, name the model, or are of one model
    assert set(MODEL_ARGUMENTS) == rest | set(OF_ONE_CHECKPOINT) | set(OF_ANY)


PRESETS_WITH_A_RULE = [name for name, preset in presets.PRESETS.items() if "rule" in preset.arguments]


@pytest.mark.parametrize("name", PRESETS_WITH_A_RULE)
def test_a_preset_replaces_what_it_stands_for(name, monkeypatch):
    """Rule, parameters, block, grid and cache of the first go, also those that the preset does not name."""
    accepted(monkeypatch)
    first = {"pretrained": "first", "rule": "threshold", "mu": 0.5, "k": 2, "block": 7, "grid": "row", "cache": "dual"}

    other = other_model(f"preset={name}", {**first, "temperature": 0.5})

    assert other.args == {"pretrained": "first", "preset": name, "temperature": 0.5}
    assert other.ignored == ()


@pytest.mark.parametrize("estimator", registry.ESTIMATORS)
def test_arguments_of_the_first_estimator_go_with_it(estimator, monkeypatch):
    """What another estimator has, too, is inherited; the others are ignored, and named."""
    accepted(monkeypatch)
    arguments = registry.find(estimator).arguments

    for name, first_entry in registry.ESTIMATORS.items():
        given = dict.fromkeys(first_entry.arguments, 1)
        other = other_model(f"estimator={estimator}", {"pretrained": "first", "estimator": name, **given})

        shared = [key for key in given if key in arguments]
        inherited = [key for key in other.inherited if key not in ("pretrained", "estimator")]
        assert inherited == shared
        assert set(other.ignored) == set(given) - set(shared), (name, estimator)
        assert (f"estimator={estimator} ignores" in other.note) == bool(other.ignored)


@pytest.mark.parametrize(
    ("message", "named"),
    [
        ("'block' is trained on 4", ["block=7"]),
        ("block=7 and grid=row do not go together", ["block=7", "grid=row"]),
        ("unblocked; the grids", []),
        ("k=2 of the rule", ["k=2"]),
    ],
)
def test_an_error_names_the_inherited_args_that_it_is_about(message, named):
    args = {"block": 7, "grid": "row", "k": 2, "cache": "dual"}
    other = OtherModel("demo-bd,cache=dual", args, ("block", "grid", "k"))
    begins = f"--compare demo-bd,cache=dual: {message}"

    with pytest.raises(UsageError) as raised, other.naming_conflicts():
        raise UsageError(message)

    error = str(raised.value)
    if named:
        keys = " and ".join(argument.partition("=")[0] for argument in named)
        assert error.startswith(begins)
        assert f"has {', '.join(named)} from --model_args" in error
        assert error.endswith(f"set {keys} here, too.")
    else:
        assert error == begins

    with pytest.raises(UsageError, match=f"^{message}$"), OtherModel("", {}).naming_conflicts():
        raise UsageError(message)


# ---------------------------------------------------------------- whole command lines


def other(model, text):
    """The args of --compare `text` but for `pretrained`, and those of the first model that it ignores."""
    first = {"pretrained": "first", **FLAGS["model_args"].read("--model_args", model)}
    second = other_model(text, first)
    args = dict(second.args)
    del args["pretrained"]
    return args, set(second.ignored)


@pytest.mark.parametrize(
    ("model", "text", "expected", "ignored"),
    [
        # what a model does not set is as in --model_args
        ("rule=greedy,block=2,cache=dual", "temperature=0.5", "rule=greedy,block=2,cache=dual,temperature=0.5", ""),
        ("estimator=elbo,mc_samples=4,block=2", "rule=margin", "estimator=elbo,mc_samples=4,rule=margin", "block"),
        ("rule=threshold,mu=0.8", "mu=0.7", "rule=threshold,mu=0.7", ""),
        # a rule comes with its parameters
        ("rule=threshold,mu=0.8,block=4", "rule=margin", "rule=margin,block=4", ""),
        # what does not apply to its estimator is ignored
        ("estimator=elbo,mc_samples=4,block=2", "estimator=duel", "estimator=duel,block=2", "mc_samples"),
        ("rule=margin,k=2,block=4,cache=dual", "estimator=ar", "estimator=ar", "rule k block cache"),
        ("rule=margin,block=4,cache=dual", "demo-bd,block=4", "rule=margin,block=4,cache=dual", ""),
        # a preset stands for its model args
        ("preset=llada", "rule=greedy", "rule=greedy,block=128", ""),
        ("preset=llada,steps=64", "estimator=elbo", "estimator=elbo", "rule steps block"),
        ("rule=margin,k=2,block=4", "estimator=sampled_order", "estimator=sampled_order,block=4", "rule k"),
        ("rule=margin,k=2,block=4", "estimator=mixture", "estimator=mixture,rule=margin,k=2,block=4", ""),
        ("preset=sdar-static", "estimator=duel,rule=greedy", "estimator=duel,rule=greedy,block=4", "confidence"),
        ("rule=threshold,mu=0.8,block=4,cache=dual", "preset=llada", "preset=llada", ""),
        ("preset=llada-fast-dllm", "preset=llada", "preset=llada", ""),
        ("rule=greedy,block=4,grid=row", "preset=llada", "preset=llada", ""),
        ("estimator=elbo,mc_samples=4", "preset=sdar-static", "preset=sdar-static", "mc_samples"),
    ],
)
def test_what_a_model_does_not_set_is_as_in_the_first(model, text, expected, ignored):
    args, ignored_args = other(model, text)

    assert args == FLAGS["model_args"].read("expected", expected)
    assert ignored_args == set(ignored.split())


def test_what_describes_one_checkpoint_is_not_taken_for_another():
    with pytest.raises(DuelError, match=r"mask_token_id=3 of --model_args .*mask_token_id=none"):
        other("mask_token_id=3,rule=greedy", "demo-bd")

    args, _ = other("mask_token_id=3", "demo-bd,mask_token_id=none")
    assert args["mask_token_id"] is None
    args, _ = other("mask_token_id=3", "rule=margin")  # the same checkpoint
    assert args["mask_token_id"] == 3


@pytest.mark.parametrize(("text", "arg"), [("klass", "rule=klass"), ("llada-fast-dllm", "preset=llada-fast-dllm")])
def test_a_rule_or_a_preset_in_place_of_a_model_is_told_how_it_is_given(text, arg):
    with pytest.raises(DuelError, match=arg):
        other_model(text, {"pretrained": "demo-mdm"})
