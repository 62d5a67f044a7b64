"""What model args are read as, and what goes first: presets, aliases, parameters of rules; which values are taken.

None of it changes unseen. Of errors the numbers count, not the words.
"""

import functools
import math

import golden
from golden import answer

from lm_eval_duel import arguments, errors, fingerprint, rules
from lm_eval_duel.estimators import registry
from lm_eval_duel.options import Options
from lm_eval_duel.rules import presets

check = functools.partial(golden.check_lines, __file__)


GIVEN = (
    *({}, {"rule": "margin", "k": 3}, {"rule": "greedy:k=2:seed_first=true", "sub_block": 4}, {"sub_block": "none"}),
    *({"seed_first": "false"}, {"batch_size": 1}, {"batch_size": 2}, {"batch_size": "auto:3"}, {"max_batch_size": 1}),
    *({"estimator": "ar"}, {"estimator": "ar", "attention": "causal"}, {"estimator": "two_phase"}, {"cache": "dual"}),
    *({"estimator": "two_phase", "cache": "prefix", "sample": 1}, {"estimator": "elbo", "elbo_eps": 0.25}),
    *({"estimator": "noised_elbo", "steps": "inf"}, {"estimator": "noised_elbo", "steps": 1, "mc_samples": 15}),
    *(
        {"estimator": "duel_seeds", "noise_seed": 2},
        {"noise_seed": 0, "temperatures": "0.8:0.4:48"},
        {"temperature": 1},
    ),
    *({"estimator": "sampled_confidence", "block": 12}, {"estimator": "sampled_confidence", "block": 13}),
    *({"estimator": "sampled_confidence", "block": 4, "steps": 2}, {"estimator": "sampled_order", "block": 4}),
    *(
        {"estimator": "sampled_order", "block": 4, "alg": "entropy", "alg_temp": 0.2},
        {"estimator": "mixture", "block": 4},
    ),
    *({"estimator": "oracle", "block": 4, "lattice_rules": "none"}, {"add_bos_token": True}, {"add_bos_token": False}),
    *({"bos": "none", "add_bos_token": True}, {"bos": "none", "add_bos_token": False}, {"parallelize": True}),
    *({"rule": "quota:steps=4:eos_id=0"}, {"rule": "quota:steps=4:eos=conf:eos_id=0"}),
    *({"draw_seed": -1}, {"block": 1}, {"block": "none"}, {"verify": 0}, {"verify": 3}, {"order": "longest"}),
    *({"preset": "llada", "steps": 7}, {"preset": "llada", "steps": 128}, {"preset": "llada", "rule": "quota:steps=5"}),
    *(
        {"preset": "llada2", "block": 32},
        {"preset": "llada2", "temperature": 0.5},
        {"preset": "sdar-dynamic", "block": 8},
    ),
    *({"preset": "sdar-dynamic", "n": 1}, {"preset": "llada", "estimator": "oracle", "block": 8}),
    *({"rule": "threshold", "mu": 0}, {"rule": "threshold", "mu": 1}, {"rule": "threshold", "mu": 1.01}, {"top_k": 0}),
    *({"top_p": 1}, {"top_p": 0}, {"cfg_scale": 0}, {"cfg_scale": 1.5}, {"exclude_ids": "3+5"}, {"max_length": 1}),
    *({"windows": "harness", "bos": bos} for bos in ("auto", "given", "scored", "official", "first", "none")),
    *({"preset": name} for name in presets.PRESETS),
)


def test_what_is_read():
    """All that is not at its default; the parts that the network and the estimator get are their own."""
    lines = []
    for given in GIVEN:
        options = answer(Options.parse, given)
        if isinstance(options, str):
            lines.append(f"{given}: {options}")
            continue
        lines.append(f"{given}: {options.rule}, {options.rows} rows, {registry.find(options.estimator).display}")
        lines += golden.listed("options", options)[1:]
        defaults = Options().network
        not_at_default = {name: value for name, value in options.network.items() if value != defaults[name]}
        lines.append(f"    network: {not_at_default}")
    check("options", lines)


KINDS = {
    "whole(2, most=5)": arguments.whole(2, "a number", 5),
    "COUNT": arguments.COUNT,
    "INTEGER": arguments.INTEGER,
    "NUMBER": arguments.NUMBER,
    "PROBABILITY": arguments.PROBABILITY,
    "SHARE": arguments.SHARE,
    "POSITIVE": arguments.POSITIVE,
    "NOT_NEGATIVE": arguments.NOT_NEGATIVE,
    "BLOCK": arguments.BLOCK,
    "TRUTH": arguments.TRUTH,
    "TEXT": arguments.TEXT,
    "RAW": arguments.RAW,
}
VALUES = (
    -1,
    -0.5,
    0,
    1,
    1.5,
    2,
    5,
    6,
    0.0,
    1.0,
    1 + 1e-9,
    math.inf,
    math.nan,
    True,
    "1",
    "1e3",
    "2.5",
    "none",
    "auto",
    "autos",
)


def test_what_each_kind_of_argument_takes():
    lines = []
    for name, kind in KINDS.items():
        lines.append(f"{name}: {kind.words}")
        for value in VALUES:
            initial_of_type = type(value).__name__[0]
            lines.append(f"    {value}{initial_of_type}: {answer(kind, 'x', value)!r}")
    check("kinds", lines)


def test_files_are_known_by_their_names_and_contents(tmp_path):
    """Not by their folders, nor by the order in which they are given."""
    digests = {}
    for folder, name, content in (("a", "x.bin", "1"), ("b", "x.bin", "1"), ("a", "y.bin", "1"), ("a", "z.bin", "2")):
        file = tmp_path / folder / name
        file.parent.mkdir(exist_ok=True)
        file.write_text(content)
        digests[folder, name] = fingerprint.hash_files([file])
    assert digests["a", "x.bin"] == digests["b", "x.bin"]
    assert len({*digests.values()}) == 3
    for digest in digests.values():
        assert len(digest) == 12

    x = tmp_path / "a" / "x.bin"
    y = tmp_path / "a" / "y.bin"
    z = tmp_path / "a" / "z.bin"
    assert fingerprint.hash_files([x, y, z]) == fingerprint.hash_files([z, y, x])
    assert fingerprint.hash_contents([x]) == fingerprint.hash_contents([y])


def test_which_checkpoints_a_preset_fits():
    families = set()
    for preset in presets.ENTRIES:
        families.update(preset.families)

    lines = []
    for preset in presets.ENTRIES:
        fits = [family for family in sorted(families) if answer(presets.require_fit, preset, family) is None]
        assert answer(presets.require_fit, preset, None) is None
        lines.append(f"{preset.name}: {' '.join(fits)}; free {' '.join(preset.free)}; {preset.for_any_network}")
    for name, (reason, _) in presets.REFUSED.items():
        lines.append(f"{name}: {reason}")
    check("presets", lines)


class Described:
    """A part of a spec: a denoiser or an estimator, with its filters."""

    def __init__(self, entries, *filters):
        self.entries = entries
        self.filters = filters

    def describe(self):
        return self.entries


SHORTEST = {  # the fewest digits that tell a number from every other
    0: "0",
    0.1: "0.1",
    1 / 3: "0.3333333333333333",
    1e-7: "1e-07",
    123456.0: "123456",
    0.1 + 0.2: repr(0.1 + 0.2),
    1234567.0: "1234567.0",
    math.inf: "inf",
    1e22: "1e+22",
}
NAMES = (
    ["block"],
    ["bloc", "block", "blocks", "blok", "bl", "black", "bloke", "blocked"],
    [str(n) for n in range(40)],
    [str(n) for n in range(41)],
    [],
)


def test_numbers_and_specs_as_text():
    """The fewest digits that tell a number from every other, one digest for a spec in any order."""
    for value, text in SHORTEST.items():
        assert fingerprint.number(value) == text

    denoiser = Described({"a": 1}, Described({"top_k": 3}))
    estimator = Described({"b": None})
    assert fingerprint.spec_of(denoiser, estimator) == {"a": "1", "top_k": "3", "b": "None", "version": "3"}

    spec = {"rule": "greedy:k=1", "block": 32, "eps": None}
    assert fingerprint.digest(spec) == fingerprint.digest(dict(reversed(spec.items())))
    lines = [f"digest {fingerprint.digest(spec)}"]
    lines += fingerprint.differences(spec, {"rule": "greedy:k=2", "block": "32", "grid": "row"})

    for names in NAMES:
        for typed in ("blk", "bloc", "7", "zzz"):
            nearest = errors.nearest(typed, names)
            unknown = errors.unknown("name", typed, names)
            lines.append(f"{typed} of {len(names)}: {nearest}; {unknown}")
    lines += [errors.counted(n, "window") for n in (0, 1, 2, 1200)]
    lines.append(str(errors.too_few_documents("task", 1, 2)))

    for name, arg in arguments.declared(Options).items():
        if name != "estimator_args":
            lines.append(f"{name}={arg.shown}")
    for name, arg in registry.arguments().items():
        lines.append(f"{name}={arg.shown}")
    for rule, rule_class in rules.RULES.items():
        for name, arg in arguments.declared(rule_class).items():
            lines.append(f"{rule}:{name}={arg.shown}")
    check("numbers", lines)
