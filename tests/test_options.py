"""Model args: values as the harness's parsers make them, and the errors for wrong ones."""

import dataclasses
import re
import subprocess
import sys

import pytest

from lm_eval_duel import rules
from lm_eval_duel.denoisers.load_options import LoadOptions
from lm_eval_duel.errors import DuelError, UsageError
from lm_eval_duel.options import Options


@pytest.mark.parametrize(
    ("arguments", "rule"),
    [
        ({}, "greedy:k=1"),
        ({"rule": "greedy", "k": 2}, "greedy:k=2"),
        ({"rule": "greedy", "k": "2"}, "greedy:k=2"),
        ({"rule": "greedy", "k": 2.0}, "greedy:k=2"),
        ({"rule": "threshold", "mu": 0.9}, "threshold:mu=0.9"),
        ({"rule": "threshold", "mu": 1}, "threshold:mu=1.0"),
        ({"rule": "klass", "mu": 0.9, "nu": 0.01}, "klass:mu=0.9:nu=0.01:history=1:kl=paper"),
        ({"rule": "klass:mu=0.9:nu=0.01"}, "klass:mu=0.9:nu=0.01:history=1:kl=paper"),
        ({"rule": "klass:mu=0.9", "nu": 0.01}, "klass:mu=0.9:nu=0.01:history=1:kl=paper"),
        ({"rule": "random", "seed": 3, "k": 2}, "random:k=2:seed=3"),
        ({"rule": "custom_rules:Stalls", "mu": 0.5}, "custom_rules:Stalls:mu=0.5"),
    ],
)
def test_rule_in_one_word_or_in_several(arguments, rule):
    assert str(Options.parse(arguments).rule) == rule


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("block", 32, 32),
        ("block", "32", 32),
        ("block", 32.0, 32),
        ("block", "none", None),
        ("block", None, None),
        ("block", "auto", "auto"),
        ("grid", "row", "row"),
        ("windows", "harness", "harness"),
        ("batch_size", "4", 4),
        ("batch_size", "auto:4", "auto"),
        ("max_length", 128, 128),
        ("max_length", None, None),
        ("trust_remote_code", True, True),
        ("trust_remote_code", "false", False),
        ("revision", 1234567, "1234567"),
        ("mask_token_id", 0, 0),
        ("dtype", "torch.bfloat16", "bfloat16"),
        ("pretrained", "none", None),
        ("device", "cuda:0", "cuda:0"),
        ("bos", "none", "none"),
        ("bos", None, "none"),  # as the harness's parser of strings has it
        ("bos", "official", "official"),
        ("shift_logits", 1, True),
        ("shift_logits", None, None),
        ("cfg_scale", "0.5", 0.5),
        ("cfg_scale", 0, None),
        ("temperature", "0.7", 0.7),
        ("top_k", 5, 5),
        ("top_p", 0.9, 0.9),
        ("attention", "block_causal", "block_causal"),
        ("backend", "none", None),
        ("sigma", "schedule", "schedule"),
        ("last_block", "cut", "cut"),
        ("peft", "folder", "folder"),
        ("estimator", "mixture", "mixture"),
        ("draw_seed", "7", 7),
        ("trace", "out.jsonl", "out.jsonl"),
    ],
)
def test_values(key, value, expected):
    parsed = getattr(Options.parse({key: value}), key)
    assert parsed == expected and type(parsed) is type(expected)


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("mc_samples", "64", 64),
        ("mc_samples", None, 128),
        ("elbo_form", "ratio", "ratio"),
        ("elbo_form", None, "auto"),
        ("elbo_block", "none", None),
        ("elbo_block", 4.0, 4),
    ],
)
def test_values_of_the_elbo(key, value, expected):
    assert Options.parse({"estimator": "elbo", key: value}).estimator_args[key] == expected
    with pytest.raises(DuelError, match=f"'{key}' is read by estimator=elbo only, and this run has estimator=duel"):
        Options.parse({key: value})


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("n", "2", 2),
        ("n", None, None),
        ("steps", "3", 3),
        ("schedule", None, "even"),
        ("schedule", "dream", "dream"),
        ("tau", "0.85", 0.85),
        ("tau", "none", None),
        ("confidence", None, "untempered"),
        ("strict", "False", False),
    ],
)
def test_values_of_select_after_sampling(key, value, expected):
    steps = {"steps": 2} if value == "dream" else {}
    options = Options.parse({"estimator": "sampled_confidence", "block": 4, key: value, **steps})
    assert options.estimator_args[key] == expected and options.rule == rules.Greedy()


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


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"rule": "gredy"}, "Unknown unmasking rule 'gredy'. Did you mean greedy?"),
        (
            {"blok": 32},
            "Unknown model arg 'blok'. Did you mean block?",
        ),
        ({"bos": "givn"}, "Unknown value of bos 'givn'. Did you mean given?"),
        ({"bos": "none", "add_bos_token": True}, "add_bos_token=True means bos=given, but bos=none is given."),
        (
            {"bos": "official", "windows": "harness"},
            "bos=official places the special tokens of each row itself, so it needs windows=independent.",
        ),
        ({"attention": "blockcausal"}, "Did you mean block_causal?"),
        ({"cfg_scale": -1}, "'cfg_scale' is a number >= 0 (0: no guidance), at most 1e+20; got '-1'."),
        ({"temperature": 0}, "'temperature' is a number above 0, from 1e-20 to 1e+20; got '0'."),
        ({"top_p": 1.5}, "'top_p' is a probability above 0, at most 1; got '1.5'."),
        ({"rul": "greedy"}, "Unknown model arg 'rul'. Did you mean rule?"),
        ({"rule": "greedy", "mu": 0.9}, "Unknown parameter of rule greedy 'mu'. Known: k."),
        ({"rule": "threshold", "mu": 0.9, "k": 2}, "Unknown parameter of rule threshold 'k'. Known: mu, strict."),
        ({"rule": "greedy:k=2", "k": 3}, "'k' is given twice: in rule=greedy:k=2 and as a model arg."),
        ({"rule": "threshold"}, "Rule 'threshold' needs mu"),
        ({"block": 0}, "'block' is a number of positions, at least 1, or auto; got '0'."),
        ({"block": -1.0}, "'block' is a number of positions"),
        ({"block": 2.5}, "'block' is a number of positions"),
        ({"block": True}, "'block' is a number of positions"),
        ({"windows": "independant"}, "Unknown value of windows 'independant'. Did you mean independent?"),
        ({"grid": "rows"}, "Did you mean row?"),
        ({"batch_size": 0}, "'batch_size' is a number of rows, at least 1, or auto; got '0'."),
        ({"batch_size": "autom"}, "'batch_size' is a number of rows, at least 1, or auto; got 'autom'."),
        ({"dtype": "flot32"}, "Unknown value of dtype 'flot32'. Did you mean float32?"),
        ({"rule": "klass", "mu": 0.9, "nuu": 0.01}, "Unknown model arg 'nuu'. Did you mean nu?"),
        ({"rule": "threshold", "muu": 0.9}, "Unknown model arg 'muu'. Did you mean mu?"),
        ({"rule": "greedy:2"}, "'2' in rule 'greedy:2' is not param=value"),
        ({"max_length": "long"}, "'max_length' is a whole number, at least 1; got 'long'."),
        ({"estimator": "elbow"}, "Unknown estimator 'elbow'. Did you mean elbo?"),
        ({"estimator": "elbo", "elbo_form": "counts"}, "Unknown value of elbo_form 'counts'. Did you mean count?"),
        ({"estimator": "elbo", "elbo_eps": 1.0}, "'elbo_eps' is a share from 0 (nothing left out) to below 1"),
        ({"estimator": "elbo", "elbo_form": "count", "elbo_eps": 0.1}, "'elbo_eps' is the least ratio"),
        ({"estimator": "elbo", "mc_samples": 0}, "'mc_samples' is a whole number, at least 1; got '0'."),
        ({"estimator": "sampled_confidence", "n": 0}, "'n' is a whole number, at least 1; got '0'."),
        ({"estimator": "sampled_confidence", "tau": 2}, "'tau' is a probability from 0 to 1; got"),
        ({"estimator": "sampled_confidence", "confidence": "tempred"}, "'tempred'. Did you mean tempered?"),
        ({"estimator": "sampled_confidence", "block": 16}, "so block is at most 12; got 16."),
        ({"estimator": "oracle", "block": 16}, "so block is at most 12; got 16. block=4 takes 15 states a block."),
        ({"estimator": "mixture", "block": "none"}, "so block is at most 12; got none."),
        ({"estimator": "oracle", "lattice_rules": "gredy"}, "Unknown unmasking rule 'gredy'. Did you mean greedy?"),
        (
            {"estimator": "oracle", "lattice_rules": "klass:mu=0.9:nu=0.1"},
            "klass:mu=0.9:nu=0.1:history=1:kl=paper has a memory, or its class does not declare `state_only = True`",
        ),
        (
            {"lattice_rules": "greedy"},
            "'lattice_rules' is read by estimator=elbo_exact or mixture or oracle only, and this",
        ),
        ({"trust_remote_code": "yes"}, "'trust_remote_code' is true or false; got 'yes'."),
    ],
)
def test_errors_name_the_argument_and_the_remedy(arguments, message):
    with pytest.raises(DuelError, match=re.escape(message)):
        Options.parse(arguments)


@pytest.mark.parametrize("seed", [2**53 + 1, str(2**53 + 1), -(2**60) - 1])
def test_every_digit_of_a_whole_number_counts(seed):
    assert Options.parse({"rule": "random", "seed": seed}).rule.seed == int(seed)
    assert Options.parse({"draw_seed": str(seed).lstrip("-")}).draw_seed == abs(int(seed))
    assert Options.parse({"draw_seed": abs(int(seed))}).draw_seed == abs(int(seed))


@pytest.mark.parametrize("key", ["cfg_scale", "temperature", "top_p", "elbo_eps", "top_k", "mu", "k"])
def test_a_number_too_large_is_refused_in_words(key):
    rule = {"mu": {"rule": "threshold"}}.get(key, {})
    with pytest.raises(DuelError, match=f"'{key}'"):
        Options.parse({"estimator": "elbo", **rule, key: 10**400})


@pytest.mark.parametrize(
    "arguments", [{"rule": "greedy", "k": 2**63}, {"rule": f"klass:mu=0.5:nu=1:history={2**64 + 1}"}]
)
def test_a_count_that_no_tensor_holds_is_refused(arguments):
    with pytest.raises(DuelError, match=r"is a number of (positions|steps), at least 1"):
        Options.parse(arguments)


@pytest.mark.parametrize("name", [".mine:Rule", "..:Rule", "mine..deep:Rule", "mine.:Rule"])
def test_a_relative_module_is_no_rule(name):
    with pytest.raises(DuelError, match="is not a rule: write module:Name"):
        Options.parse({"rule": name})


def test_what_stands_beside_a_rule_is_one_parameter():
    with pytest.raises(
        DuelError, match=r"'nu' of rule 'klass' is a divergence in nats, at least 0; got '0\.1:history=2'"
    ):
        Options.parse({"rule": "klass:mu=0.9", "nu": "0.1:history=2"})


def test_rows_of_a_call():
    assert Options.parse({"batch_size": 8}).rows == 8
    assert Options.parse({"batch_size": 1}).rows is None  # what the harness says when the user said nothing
    assert Options.parse({"batch_size": "auto", "max_batch_size": 4}).max_batch_size == 4


def test_options_are_checked_before_torch_is_imported():
    code = (
        "import sys; from lm_eval_duel.options import Options; Options.parse({'rule': 'greedy', 'k': 2, 'block': 32});"
        "assert 'torch' not in sys.modules and 'transformers' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_every_rule_parameter_can_stand_beside_the_rule():
    assert rules.PARAMETERS.isdisjoint(Options.__dataclass_fields__)


def test_a_cache_and_a_history_that_outlives_blocks():
    arguments = {"rule": "klass:mu=0.9:nu=0.1:kl=authors:across=true", "cache": "dual"}
    with pytest.raises(UsageError, match=r"predictions that cache=dual does not compute.* Leave one of them out"):
        Options.parse(arguments)
    assert Options.parse({**arguments, "estimator": "elbo"}).cache == "dual"  # which does not read the rule
