"""Model args: values as the harness's parsers make them, and the errors for wrong ones."""

import itertools
import math
import re

import pytest

from lm_eval_duel import arguments, rules
from lm_eval_duel.errors import DuelError, UsageError, nearest
from lm_eval_duel.estimators import registry
from lm_eval_duel.options import MODEL_ARGUMENTS, Options


def test_rule_in_one_word_or_in_several():
    klass = "klass:mu=0.9:nu=0.01:history=1:kl=paper"
    for given, rule in (
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
        assert str(Options.parse(given).rule) == rule


VALUES = (  # a model arg, what the harness's parsers make of it, what it is
    ("block", "32", 32),
    ("block", 32.0, 32),
    ("block", "none", None),
    ("block", "auto", "auto"),
    ("batch_size", "auto:4", "auto"),
    ("max_length", None, None),
    ("trust_remote_code", "false", False),
    ("revision", 1234567, "1234567"),
    ("mask_token_id", 0, 0),
    ("dtype", "torch.bfloat16", "bfloat16"),
    ("pretrained", "none", None),
    ("bos", None, "none"),  # as the harness's parser of strings has it
    ("shift_logits", 1, True),
    ("cfg_scale", "0.5", 0.5),
    ("cfg_scale", 0, None),
    ("draw_seed", "7", 7),
)
OF_ESTIMATORS = (
    ("elbo", "mc_samples", "64", 64),
    ("elbo", "mc_samples", None, 128),
    ("elbo", "elbo_form", None, "auto"),
    ("elbo", "elbo_block", "none", None),
    ("sampled_confidence", "n", None, 1),
    ("sampled_confidence", "schedule", None, "even"),
    ("sampled_confidence", "schedule", "dream", "dream"),
    ("sampled_confidence", "tau", "0.85", 0.85),
    ("sampled_confidence", "tau", "none", None),
    ("sampled_confidence", "confidence", None, "untempered"),
    ("sampled_confidence", "strict", "False", False),
)


def test_values():
    for key, value, expected in VALUES:
        read = getattr(Options.parse({key: value}), key)
        assert read == expected
        assert type(read) is type(expected)


def test_values_of_estimators():
    for estimator, key, value, expected in OF_ESTIMATORS:
        steps = {"steps": 2} if value == "dream" else {}
        options = Options.parse({"estimator": estimator, "block": 4, key: value, **steps})
        assert getattr(options.estimator_args, key) == expected, (key, value)
        assert options.rule == rules.Greedy()
    with pytest.raises(DuelError, match=r"'mc_samples' .*estimator=elbo"):
        Options.parse({"mc_samples": 64})


def test_rules_of_the_lattice():
    given = {"estimator": "oracle", "block": 4, "lattice_rules": "greedy+margin:k=2+threshold:mu=0.9"}
    greedy, margin, threshold = Options.parse(given).estimator_args.lattice_rules
    assert str(greedy) == "greedy:k=1"
    assert str(margin) == "margin:k=2"
    assert str(threshold) == "threshold:mu=0.9"
    assert Options.parse({"estimator": "oracle", "lattice_rules": "none"}).estimator_args.lattice_rules == ()
    assert Options.parse({"estimator": "oracle"}).estimator_args.lattice_rules is None


WRONG_RULES = (
    ("greedy:q=2", "'q' of the rule greedy. Known: k."),
    ("klass:mu=0.5", "nu"),
    ("eb", "gamma"),
    ("threshold:mu=1.5", "'mu'"),
    ("greedy:k=0", "'k'"),
    ("klass:mu=0.9:nu=0.01:kl=papr", "Did you mean paper?"),
    ("entropy_bound:gamma=-1", "'gamma'"),
    ("greedy:2", "'2'"),
    ("greedy:k=1:k=2", "'k' is given twice"),
    ("no_such_module:Rule", "'no_such_module'"),
    ("no.such.module:Rule", "'no.such.module'"),
    (":Rule", "':Rule'"),
    ("textbook:score", "lm_eval_duel.rules.Rule"),
    ("factor:f=0", "'f'"),
    ("dream:alg=confidence_threshold:steps=4", "needs tau"),
    ("dream:alg=entropy:steps=4:tau=0.9", "alg=confidence_threshold only"),
    ("dream:alg=origin:steps=4", "alg=origin"),
    ("quota:steps=4:eos_id=4", "eos=conf only"),
    ("custom_rules:Stals", "Did you mean Stalls?"),
    ("klass:mu=0.4:nu=0.3:across=true", "add kl=authors"),
    ("klass:mu=0.4:nu=0.3:kl=authors:across=true:sub_block=2", "over blocks"),
    ("klass:mu=0.4:nu=0.3:kl=authors:across=true:seed_first=1", "over blocks"),
    (".mine:Rule", "module:Name"),
    ("..:Rule", "module:Name"),
    ("mine..deep:Rule", "module:Name"),
    ("mine.:Rule", "module:Name"),
)
WRONG = (  # model args, and what the error names: the argument, its value, the nearest name
    ({"rule": "gredy"}, "'gredy'. Did you mean greedy?"),
    ({"blok": 32}, "'blok'. Did you mean block?"),
    ({"block_size": 32}, "'block_size'. Did you mean block?"),  # not batch_size, which is as near
    *(
        (args, f"commas, without spaces: {separated}")
        for args, separated in (
            ({"rule": "greedy block=2"}, "rule=greedy,block=2"),
            ({"pretrained": "demo-bd rule=margin  mu=1"}, "pretrained=demo-bd,rule=margin,mu=1"),
            ({"demo-bd rule": "margin"}, "demo-bd,rule=margin"),
            ({" rule": "margin"}, "rule=margin"),
            ({"estimator": "elbo mc_samples=4"}, "estimator=elbo,mc_samples=4"),
        )
    ),
    ({"bos": "givn"}, "'givn'. Did you mean given?"),
    ({"bos": "none", "add_bos_token": True}, "add_bos_token=True"),
    ({"bos": "official", "windows": "harness"}, "windows=independent"),
    ({"cfg_scale": -1}, "'cfg_scale'"),
    ({"temperature": 0}, "'temperature'"),
    ({"top_p": 1.5}, "'top_p'"),
    ({"rule": "greedy", "mu": 0.9}, "'mu' of the rule greedy. Known: k."),
    ({"rule": "threshold", "mu": 0.9, "k": 2}, "'k' of the rule threshold. Known: mu, strict."),
    ({"rule": "greedy:k=2", "k": 3}, "'k' is given twice"),
    ({"rule": "threshold"}, "mu"),
    ({"block": 0}, "'block'"),
    ({"block": ""}, "'block'"),
    ({"rule": ""}, "'rule'"),
    ({"trace": ""}, "'trace'"),
    ({"cache": ""}, "'cache'"),
    ({"mc_samples": ""}, "'mc_samples'"),
    ({"pretrained": ""}, "'pretrained'"),
    ({"rule": "greedy:k="}, "'k'"),
    ({"preset": "lladda"}, "'lladda'. Did you mean llada"),
    ({"preset": "llada", "block": 32}, "block=32"),
    ({"preset": "llada", "rule": "greedy"}, "rule=greedy"),
    ({"preset": "llada-fast-dllm-dual", "mu": 0.8}, "mu=0.8"),
    ({"preset": "llada-fast-dllm-dual", "cache": "prefix"}, "cache=prefix"),
    ({"preset": "llada2", "sub_block": 8}, "sub_block=8"),
    ({"preset": "wino"}, "preset=wino"),
    ({"preset": "sdar-dynamic", "tau": 0.9}, "tau=0.9"),
    ({"preset": "sdar-dynamic", "rule": "greedy"}, "rule=greedy"),
    ({"estimator": "mixture", "lattice_rules": "klass:mu=0.4:nu=0.3"}, "has a memory"),
    ({"windows": "independant"}, "Did you mean independent?"),
    ({"batch_size": 0}, "'batch_size'"),
    ({"dtype": "flot32"}, "Did you mean float32?"),
    ({"rule": "klass", "mu": 0.9, "nuu": 0.01}, "Did you mean nu?"),
    ({"estimator": "elbow"}, "Did you mean elbo?"),
    ({"rule": "elbo"}, "write estimator=elbo."),
    ({"rule": "AR"}, "write estimator=ar."),
    ({"rule": "elbo:mc_samples=4"}, "write estimator=elbo."),
    ({"rule": "elbo,mc_samples=4"}, "write estimator=elbo."),
    ({"rule": "greedy,block=4"}, "write greedy, and block=4 as an argument of its own."),
    ({"rule": "klass:mu=0.9, nu=0.1, block=4"}, "write klass:mu=0.9:nu=0.1, and block=4 as"),
    ({"estimator": "elbo,mc_samples=4"}, "write estimator=elbo, and mc_samples=4 as"),
    ({"estimator": "greedy,k=2"}, "write rule=greedy:k=2."),
    ({"preset": "elbo"}, "write estimator=elbo."),
    ({"estimator": "greedy"}, "write rule=greedy."),
    ({"estimator": "l2r"}, "write rule=l2r."),
    ({"estimator": "threshold:mu=0.9"}, "write rule=threshold:mu=0.9."),
    ({"estimator": "mine.py:Rule"}, "write rule=mine.py:Rule."),
    ({"estimator": "llada2"}, "write preset=llada2."),
    ({"estimator": "elbo", "elbo_form": "counts"}, "Did you mean count?"),
    ({"estimator": "elbo", "elbo_eps": 1.0}, "'elbo_eps'"),
    ({"estimator": "elbo", "elbo_form": "count", "elbo_eps": 0.1}, "'elbo_eps'"),
    ({"estimator": "elbo", "mc_samples": 0}, "'mc_samples'"),
    ({"estimator": "sampled_confidence", "n": 0}, "'n'"),
    ({"estimator": "sampled_confidence", "tau": 2}, "'tau'"),
    ({"estimator": "sampled_confidence", "block": 16}, "at most 12 positions (4,095 rows); the block in force is 16."),
    ({"estimator": "mixture", "block": "none"}, "at most 12 positions"),
    ({"estimator": "oracle", "lattice_rules": "gredy"}, "Did you mean greedy?"),
    ({"lattice_rules": "greedy"}, "'lattice_rules'"),
    ({"sample": 0.5}, "'sample' is read by estimator=two_phase only"),
    ({"estimator": "two_phase", "sample": 0}, "'sample' is a share of blocks above 0"),
    ({"estimator": "two_phase", "top_k": 3}, "top_k"),
    ({"estimator": "two_phase", "compile": True}, "compile"),
    ({"estimator": "two_phase", "backend": "remote", "trust_remote_code": True}, "backend=remote"),
    ({"estimator": "two_phase", "cache": "none"}, "'cache'"),
    ({"rule": f"klass:mu=0.5:nu=1:history={2**64 + 1}"}, "'history'"),
    ({"rule": "klass:mu=0.9", "nu": "0.1:history=2"}, "'nu'"),
    *(({"rule": rule}, named) for rule, named in WRONG_RULES),
)


def test_only_what_is_near_is_suggested():
    tasks = ["haerae", "sotu", "sotu_choice", "wikitext"]
    for name, known, near in (
        ("nowhere", tasks, []),
        ("sotu_choise", tasks, ["sotu_choice"]),
        ("greedi", ["greedy", "seed"], ["greedy"]),
        ("WIKI", tasks, ["wikitext"]),
    ):
        assert nearest(name, known) == near, name


def test_errors_name_the_argument(subtests):
    for given, named in WRONG:
        with subtests.test(str(given)[:80]), pytest.raises(DuelError, match=re.escape(named)):
            Options.parse(given)


def owners():
    """The arguments of each owner, with the model args that name it."""
    yield MODEL_ARGUMENTS, {}
    yield rules.WRAPPER_ARGUMENTS, {}
    for name, entry in registry.ESTIMATORS.items():
        yield entry.arguments, {"estimator": name, "block": 4}
    for name, rule in rules.RULES.items():
        declared = arguments.declared(rule)
        required = {name: each.example for name, each in declared.items() if each.default is arguments.MISSING}
        yield declared, {"rule": name, **required}


ANY = ("", "x", "1_0", "٣", "a=b", "a:b", "\ud83d", b"x", -1, 0, 1.5, 2**63, 10**400, math.nan, math.inf)
ANY += (True, None, [], ["x"], {"x": 1})


def test_any_argument_takes_a_value_or_is_named():
    """Before anything is loaded: no value of any argument is another error."""
    for declared, others in owners():
        for name, value in itertools.product(declared, ANY):
            given = {**others, name: value}
            try:
                options = Options.parse(given)
            except DuelError as error:
                assert name in str(error) or "rule" in str(error), (name, value)
            else:
                assert Options.parse(given) == options
                assert rules.parse(str(options.rule)) == options.rule


def test_every_digit_of_a_whole_number_counts():
    for seed in (2**53 + 1, str(2**53 + 1), -(2**60) - 1):
        assert Options.parse({"rule": "random", "seed": seed}).rule.seed == int(seed)
    for seed in (2**53 + 1, str(2**53 + 1)):
        assert Options.parse({"draw_seed": seed}).draw_seed == int(seed)


def test_rows_of_a_call():
    assert Options.parse({"batch_size": 8}).rows == 8
    assert Options.parse({"batch_size": 1}).rows is None  # what the harness says when the user said nothing
    assert Options.parse({"batch_size": "auto", "max_batch_size": 4}).max_batch_size == 4


def test_a_cache_and_a_history_that_outlives_blocks():
    given = {"rule": "klass:mu=0.9:nu=0.1:kl=authors:across=true", "cache": "dual"}
    with pytest.raises(UsageError, match="cache=dual"):
        Options.parse(given)
    assert Options.parse({**given, "estimator": "elbo"}).cache == "dual"  # which does not read the rule


def test_a_rule_beside_a_preset_is_the_presets_but_for_its_free_parameters():
    for given in ({"rule": "quota:steps=64"}, {"rule": "quota", "steps": 64}):
        assert Options.parse({"preset": "llada", **given}).rule.steps == 64
    assert str(Options.parse({"preset": "dinfer-hierarchy", "rule": "hierarchy:low=0.3:tau=0.9"}).rule)
    for preset, other in (("dinfer-hierarchy", "hierarchy:low=0.3:tau=0.8"), ("llada-fast-dllm", "threshold:mu=0.8")):
        with pytest.raises(UsageError, match=preset):
            Options.parse({"preset": preset, "rule": other})


def test_the_chain_rule_needs_a_causal_network_unless_another_is_named():
    for given, expected in (({}, "causal"), ({"attention": "block_causal"}, "block_causal")):
        assert Options.parse({"estimator": "ar", **given}).network["attention"] == expected


def test_a_rule_does_not_apply_to_random_tokens():
    """Nor does a preset, nor a rule's parameter alone; `steps` is the estimator's own."""
    for given in ({"rule": "greedy"}, {"k": 2}, {"preset": "llada", "steps": 4}):
        with pytest.raises(UsageError, match=f"noised_elbo.*Leave {next(iter(given))} out"):
            Options.parse({**given, "estimator": "noised_elbo"})
    assert Options.parse({"estimator": "noised_elbo", "steps": 4}).estimator_args.steps == 4
    Options.parse({"rule": "greedy", "estimator": "elbo"})  # random unmasking: the rule is not read
