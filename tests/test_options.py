"""Model args: values as the harness's parsers make them, and the errors for wrong ones."""

import dataclasses
import re

import pytest

from lm_eval_duel import rules
from lm_eval_duel.denoisers.load_options import LoadOptions
from lm_eval_duel.errors import DuelError, UsageError
from lm_eval_duel.options import Options


def test_rule_in_one_word_or_in_several():
    klass = "klass:mu=0.9:nu=0.01:history=1:kl=paper"
    for arguments, rule in (
        ({}, "greedy:k=1"),
        ({"rule": "greedy", "k": "2"}, "greedy:k=2"),
        ({"rule": "greedy", "k": 2.0}, "greedy:k=2"),
        ({"rule": "threshold", "mu": 1}, "threshold:mu=1.0"),
        ({"rule": "klass", "mu": 0.9, "nu": 0.01}, klass),
        ({"rule": "klass:mu=0.9:nu=0.01"}, klass),
        ({"rule": "klass:mu=0.9", "nu": 0.01}, klass),
        ({"rule": "random", "seed": 3, "k": 2}, "random:k=2:seed=3"),
        ({"rule": "custom_rules:Stalls", "mu": 0.5}, "custom_rules:Stalls:mu=0.5"),
    ):
        assert str(Options.parse(arguments).rule) == rule


VALUES = (  # a model arg, what the harness's parsers make of it, what it is
    ("block", "32", 32),
    ("block", 32.0, 32),
    ("block", "none", None),
    ("block", "auto", "auto"),
    ("grid", "row", "row"),
    ("windows", "harness", "harness"),
    ("batch_size", "auto:4", "auto"),
    ("max_length", None, None),
    ("trust_remote_code", "false", False),
    ("revision", 1234567, "1234567"),
    ("mask_token_id", 0, 0),
    ("dtype", "torch.bfloat16", "bfloat16"),
    ("pretrained", "none", None),
    ("device", "cuda:0", "cuda:0"),
    ("bos", None, "none"),  # as the harness's parser of strings has it
    ("bos", "official", "official"),
    ("shift_logits", 1, True),
    ("cfg_scale", "0.5", 0.5),
    ("cfg_scale", 0, None),
    ("top_k", 5, 5),
    ("attention", "block_causal", "block_causal"),
    ("sigma", "schedule", "schedule"),
    ("last_block", "cut", "cut"),
    ("peft", "folder", "folder"),
    ("draw_seed", "7", 7),
)
OF_ESTIMATORS = (
    ("elbo", "mc_samples", "64", 64),
    ("elbo", "mc_samples", None, 128),
    ("elbo", "elbo_form", None, "auto"),
    ("elbo", "elbo_block", "none", None),
    ("sampled_confidence", "n", None, None),
    ("sampled_confidence", "schedule", None, "even"),
    ("sampled_confidence", "schedule", "dream", "dream"),
    ("sampled_confidence", "tau", "0.85", 0.85),
    ("sampled_confidence", "tau", "none", None),
    ("sampled_confidence", "confidence", None, "untempered"),
    ("sampled_confidence", "strict", "False", False),
)


def test_values():
    found = [(key, value, getattr(Options.parse({key: value}), key)) for key, value, _ in VALUES]
    assert found == list(VALUES) and [type(f[2]) for f in found] == [type(expected) for *_, expected in VALUES]


def test_values_of_estimators():
    for estimator, key, value, expected in OF_ESTIMATORS:
        steps = {"steps": 2} if value == "dream" else {}
        options = Options.parse({"estimator": estimator, "block": 4, key: value, **steps})
        assert options.estimator_args[key] == expected and options.rule == rules.Greedy(), (key, value)
    with pytest.raises(DuelError, match=r"'mc_samples' .*estimator=elbo"):
        Options.parse({"mc_samples": 64})


def test_a_name_of_a_rule_and_of_an_estimator(monkeypatch):
    """It is the estimator's if the estimator reads it, and the rule's otherwise."""
    monkeypatch.setattr(rules, "PARAMETERS", rules.PARAMETERS | {"n", "tau"})
    assert Options.parse({"estimator": "sampled_confidence", "block": 4, "n": 2}).estimator_args["n"] == 2
    with pytest.raises(DuelError, match="Unknown parameter of rule greedy 'n'"):
        Options.parse({"n": 2})


def test_rules_of_the_lattice():
    asked = {"estimator": "oracle", "block": 4, "lattice_rules": "greedy+margin:k=2+threshold:mu=0.9"}
    assert [str(rule) for rule in Options.parse(asked).estimator_args["lattice_rules"]] == [
        "greedy:k=1",
        "margin:k=2",
        "threshold:mu=0.9",
    ]
    assert Options.parse({"estimator": "oracle", "lattice_rules": "none"}).estimator_args["lattice_rules"] == ()
    assert Options.parse({"estimator": "oracle"}).estimator_args["lattice_rules"] is None


def test_an_autoregressive_network_is_causal_for_every_block():
    options = Options.parse({"estimator": "ar", "block": 4})
    assert (options.network["attention"], options.network["block"]) == ("causal", None)
    assert Options.parse({"block": 4}).network["attention"] is None


def test_the_harness_word_for_bos():
    assert Options.parse({"add_bos_token": True}).bos == "given"
    assert Options.parse({"add_bos_token": "false"}).bos == "none"
    assert Options.parse({"add_bos_token": True, "bos": "given"}).bos == "given"


def test_network_args_are_those_of_denoisers_load():
    asked = {field.name for field in dataclasses.fields(LoadOptions)}
    assert set(Options.parse({}).network) == asked - {"name", "device", "tokenizer"}


WRONG = (  # model args, and what the error names: the argument, its value, the nearest name
    ({"rule": "gredy"}, "'gredy'. Did you mean greedy?"),
    ({"blok": 32}, "'blok'. Did you mean block?"),
    ({"bos": "givn"}, "'givn'. Did you mean given?"),
    ({"bos": "none", "add_bos_token": True}, "add_bos_token=True"),
    ({"bos": "official", "windows": "harness"}, "windows=independent"),
    ({"cfg_scale": -1}, "'cfg_scale'"),
    ({"temperature": 0}, "'temperature'"),
    ({"top_p": 1.5}, "'top_p'"),
    ({"rule": "greedy", "mu": 0.9}, "'mu'. Known: k."),
    ({"rule": "threshold", "mu": 0.9, "k": 2}, "'k'. Known: mu, strict."),
    ({"rule": "greedy:k=2", "k": 3}, "'k' is given twice"),
    ({"rule": "threshold"}, "mu"),
    ({"block": 0}, "'block'"),
    ({"block": 2.5}, "'block'"),
    ({"block": True}, "'block'"),
    ({"windows": "independant"}, "Did you mean independent?"),
    ({"batch_size": 0}, "'batch_size'"),
    ({"batch_size": "autom"}, "'batch_size'"),
    ({"dtype": "flot32"}, "Did you mean float32?"),
    ({"rule": "klass", "mu": 0.9, "nuu": 0.01}, "Did you mean nu?"),
    ({"rule": "greedy:2"}, "'2'"),
    ({"max_length": "long"}, "'max_length'"),
    ({"estimator": "elbow"}, "Did you mean elbo?"),
    ({"estimator": "elbo", "elbo_form": "counts"}, "Did you mean count?"),
    ({"estimator": "elbo", "elbo_eps": 1.0}, "'elbo_eps'"),
    ({"estimator": "elbo", "elbo_form": "count", "elbo_eps": 0.1}, "'elbo_eps'"),
    ({"estimator": "elbo", "mc_samples": 0}, "'mc_samples'"),
    ({"estimator": "sampled_confidence", "n": 0}, "'n'"),
    ({"estimator": "sampled_confidence", "tau": 2}, "'tau'"),
    ({"estimator": "sampled_confidence", "block": 16}, "at most 12 positions (4,095 sets); the block in force is 16."),
    ({"estimator": "oracle", "block": 16}, "at most 12 positions (4,095 sets); the block in force is 16."),
    ({"estimator": "mixture", "block": "none"}, "at most 12 positions (4,095 sets)"),
    ({"estimator": "oracle", "lattice_rules": "gredy"}, "Did you mean greedy?"),
    ({"estimator": "oracle", "lattice_rules": "klass:mu=0.9:nu=0.1"}, "klass:mu=0.9:nu=0.1"),
    ({"lattice_rules": "greedy"}, "'lattice_rules'"),
    ({"trust_remote_code": "yes"}, "'trust_remote_code'"),
    ({"rule": "greedy", "k": 2**63}, "'k'"),  # no tensor holds it
    ({"rule": f"klass:mu=0.5:nu=1:history={2**64 + 1}"}, "'history'"),
    ({"rule": "klass:mu=0.9", "nu": "0.1:history=2"}, "'nu'"),
    *(({"rule": name}, "module:Name") for name in (".mine:Rule", "..:Rule", "mine..deep:Rule", "mine.:Rule")),
    *(({"estimator": "elbo", key: 10**400}, f"'{key}'") for key in ("cfg_scale", "top_p", "elbo_eps", "top_k", "k")),
)


def test_errors_name_the_argument(subtests):
    for arguments, named in WRONG:
        with subtests.test(str(arguments)[:80]), pytest.raises(DuelError, match=re.escape(named)):
            Options.parse(arguments)


def test_every_digit_of_a_whole_number_counts():
    for seed in (2**53 + 1, str(2**53 + 1), -(2**60) - 1):
        assert Options.parse({"rule": "random", "seed": seed}).rule.seed == int(seed)
    for seed in (2**53 + 1, str(2**53 + 1)):
        assert Options.parse({"draw_seed": seed}).draw_seed == int(seed)


def test_rows_of_a_call():
    assert Options.parse({"batch_size": 8}).rows == 8
    assert Options.parse({"batch_size": 1}).rows is None  # what the harness says when the user said nothing
    assert Options.parse({"batch_size": "auto", "max_batch_size": 4}).max_batch_size == 4


def test_every_rule_parameter_can_stand_beside_the_rule():
    assert rules.PARAMETERS.isdisjoint(Options.__dataclass_fields__)


def test_a_cache_and_a_history_that_outlives_blocks():
    arguments = {"rule": "klass:mu=0.9:nu=0.1:kl=authors:across=true", "cache": "dual"}
    with pytest.raises(UsageError, match="cache=dual"):
        Options.parse(arguments)
    assert Options.parse({**arguments, "estimator": "elbo"}).cache == "dual"  # which does not read the rule
