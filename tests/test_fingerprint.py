"""Whatever changes a number changes the fingerprint, and nothing else does: model args, tokenizers, files, digits."""

import importlib
import json
import re
import shutil

import dit_reference
import own
import pytest
import tiny
import torch
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, normalizers
from toys import Toy
from transformers import AutoTokenizer

from lm_eval_duel import arguments, denoisers, fingerprint, rules
from lm_eval_duel.denoisers import self_tests
from lm_eval_duel.estimators import registry
from lm_eval_duel.estimators.duel import DuelEstimator
from lm_eval_duel.harness.lm import DuelMDM
from lm_eval_duel.options import MODEL_ARGUMENTS
from lm_eval_duel.rules import RULES

pytestmark = pytest.mark.usefixtures("one_load", "networks_are_not_tested")


@pytest.fixture(scope="module")
def networks_are_not_tested():
    """What the self-tests at load find is not said by the user."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(self_tests, "run", lambda *_: None)
        yield


# ---------------------------------------------------------------- model args

BLOCKS = {"attention": "block_causal", "block": 4}
TWO_PHASE = {"estimator": "two_phase", "block": 4}
DRAWN = {"estimator": "sampled_confidence", "block": 4}
ORDER = {"estimator": "sampled_order", "block": 4}
OWN = {"trust_remote_code": True}


# How values are compared where the declaration does not say it, by name, or by owner and name: values of which each is
# another spec (or, of an argument that defines no number, the same), other model args, and the checkpoint.
TRIES = {
    "pretrained": (("bert", "other"),),
    "tokenizer": (("bert", "lower"),),
    "preset": (("dream-entropy", "dream-fast-dllm"), OWN, "own"),
    "rule": (("greedy", "greedy:k=2", "margin"),),
    "block": ((2, 4, "none"),),
    "grid": (("target", "row"),),
    "estimator": (("duel", "elbo", "mixture", "sampled_confidence", "sampled_order", "two_phase"), {"block": 2}),
    "draw_seed": ((0, 1), {"estimator": "elbo"}),
    "dtype": (("float32", "float64"),),
    "max_length": ((16, 17),),
    "mask_token_id": ((4, 39),),
    "bos": (("given", "none"),),
    "family": (("a2d-qwen3", "sdar"), BLOCKS, "qwen3"),
    "attention": (("bidirectional", "block_causal"), {"block": 4}, "qwen3"),
    "shift_logits": ((False, True), {"bos": "given"}, "qwen3"),
    "last_block": ((), BLOCKS, "qwen3"),
    "exclude_ids": ((None, 5, "5+6"),),
    "peft": ((None, "lora", "bigger"), {}, "qwen3"),
    "load_in_8bit": ((), {}, "qwen3"),
    "load_in_4bit": ((), {}, "qwen3"),
    "backend": ((None, "remote"), OWN, "own"),
    "trace": ((None, "trace.jsonl"),),
    "device": ((None, "cpu"),),
    "device_map": ((None, "cpu"),),
    "batch_size": (("auto", 2, 3),),
    "elbo elbo_block": (("none", 4),),
    "elbo elbo_form": (("count", "ratio"),),
    "elbo elbo_eps": ((), {"elbo_form": "ratio"}),
    "sampled_confidence schedule": ((), {"steps": 2}),
    "sampled_confidence strict": ((), {"tau": 0.5}),
    "sampled_confidence confidence": ((), {"temperature": 0.7}),
    "sampled_order alg": (("origin", "random"),),
    "sampled_order alg_temp": ((0.5, 0.50000001), {"alg": "entropy"}),
    "noised_elbo prediction": (("denoiser", "plugin"),),
    "duel noise_seed": ((0, 1), {}, "duo"),
    "duel_seeds noise_seed": ((0, 1), {}, "duo"),
    "duel_seeds noise_seeds": ((2, 3), {}, "duo"),
    "klass across": ((), {"kl": "authors"}),
    "quota eos_id": ((5, 6), {"eos": "conf"}),
    "quota eot_id": ((5, 6), {"eos": "conf", "eos_id": 7}),
    "dream alg": (("entropy", "topk_margin", "maskgit_plus"),),
    "dream tau": ((0.5, 0.50000001), {"alg": "confidence_threshold"}),
    **{f"{name} lattice_rules": (("none", "greedy", "greedy+margin"),) for name in registry.LATTICE},
}
ELSEWHERE = {
    "sigma": "of SEDD, below",
    "first_token": "of a causal prefix: denoisers/test_causal_prefix.py",
    "revision": "of the hub, below",
    "noised_elbo self_conditioning": "of DiffusionGemma: denoisers/test_diffusion_gemma.py",
    "duel prediction": "of DiffusionGemma",
    "duel self_conditioning": "of DiffusionGemma",
    "duel temperatures": "of DiffusionGemma",
    "duel_seeds prediction": "of DiffusionGemma",
    "duel_seeds self_conditioning": "of DiffusionGemma",
    "duel_seeds temperatures": "of DiffusionGemma",
    "quota eos": "with ids of a tokenizer, in test_presets.py",
}
OWNERS = {  # the arguments of each owner, and the model args that name it
    "": (MODEL_ARGUMENTS, {}),
    **{name: (entry.arguments, {"estimator": name, "block": 4}) for name, entry in registry.ESTIMATORS.items()},
    **{name: (arguments.declared(rule), {"rule": name}) for name, rule in RULES.items()},
    "any rule": (rules.WRAPPER_ARGUMENTS, {}),
}


def two_values(argument):
    """Values of an argument, by its declaration: its choices, or two that are close together."""
    for values in (argument.kind.choices, (0.5, 0.50000001), (2, 3), (False, True)):
        try:
            if len(values) > 1:
                return [argument.kind.convert(value) for value in values]
        except ValueError:
            continue
    raise AssertionError("add values of this argument to TRIES")


def tried(owner):
    """(checkpoint, name, argument, values, other model args) of each argument of an owner."""
    declarations, named = OWNERS[owner]
    needed = {key: other.example for key, other in declarations.items() if other.default is arguments.MISSING}
    for name, argument in declarations.items():
        label = f"{owner} {name}".strip()
        if name in ELSEWHERE or label in ELSEWHERE:
            continue
        values = ()
        beside = {}
        checkpoint = "duo" if owner == "noised_elbo" else "bert"
        case = TRIES.get(label) or (TRIES.get(name) if not owner else None) or ()
        if len(case) > 0:  # the other model args and the checkpoint may be left out
            values = case[0]
        if len(case) > 1:
            beside = case[1]
        if len(case) > 2:
            checkpoint = case[2]
        if not values:
            values = two_values(argument)
            if argument.default is None:
                values.append(None)
        others = {**named, **beside}
        if owner in RULES:
            others = {**named, **needed, **beside}
        yield checkpoint, name, argument, values, others


CHANGES = [  # checkpoint, an arg, two values that are two specs, and what goes with both
    ("bert", "cache", "prefix", "dual", TWO_PHASE),
    ("bert", "draw_seed", 0, 1, TWO_PHASE),
    ("bert", "add_bos_token", True, False, {}),
    ("qwen3", "block", 4, 8, {"attention": "block_causal"}),
    ("qwen3", "peft", "lora.bin", "bigger.bin", {}),
]
KEEPS = [  # two values of an arg that are one spec
    ("bert", "cache", None, "none", {}),
    ("bert", "cache", None, "dual", TWO_PHASE),  # the default of its first phase
    ("bert", "sample", None, 0.05, TWO_PHASE),
    ("bert", "exclude_ids", "6+5", [5, 6], {}),
    ("bert", "sub_block", None, "none", {}),
    ("bert", "n", None, 1, DRAWN),
    ("bert", "steps", None, 512, ORDER),
    ("bert", "parallelize", False, None, {}),
    ("bert", "revision", "main", "other", {}),  # a folder has one
    ("bert", "temperature", 1.0, None, {"top_k": 5}),
    ("bert", "temperature", 2, 2.0, {}),
    ("bert", "strict", True, False, DRAWN),  # without tau
    ("bert", "rule", "greedy", "margin", DRAWN),
    ("bert", "mu", 1, 1.0, {"rule": "threshold"}),
    ("bert", "rule", "greedy:k=2", "confidence:k=2.0", {}),
    ("bert", "draw_seed", 0, 1, {}),  # a rule draws nothing
    ("own", "backend", None, "native", OWN),
]


def lora(folder, scale=1.0, binary=False):
    folder.mkdir()
    config = {"peft_type": "LORA", "r": 1, "lora_alpha": 1, "target_modules": ["q_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    module = "base_model.model.model.layers.0.self_attn.q_proj.lora"
    tensors = {f"{module}_A.weight": torch.ones(1, own.WIDTH), f"{module}_B.weight": torch.ones(own.WIDTH, 1) * scale}
    save = torch.save if binary else save_file
    save(tensors, folder / ("adapter_model.bin" if binary else "adapter_model.safetensors"))


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    base = tmp_path_factory.mktemp("checkpoints")
    tiny.checkpoint(base / "bert", "bert")
    shutil.copytree(base / "bert", base / "other")
    tensors = load_file(base / "other" / "model.safetensors")
    tensors["cls.predictions.bias"] += 1
    save_file(tensors, base / "other" / "model.safetensors", metadata={"format": "pt"})
    (base / "lower").mkdir()
    lower = tiny.tokenizer()
    lower.backend_tokenizer.normalizer = normalizers.Lowercase()
    lower.save_pretrained(base / "lower")
    (base / "duo").mkdir()
    dit_reference.write(base / "duo", "duo")
    dit_reference.words(dit_reference.VOCABULARY).save_pretrained(base / "duo")
    (base / "own").mkdir()
    own.write(base / "own", own.DREAM, "DreamModel", own.decoder(bias=True))
    (base / "qwen3").mkdir()
    with pytest.MonkeyPatch.context() as patch:
        own.widen(patch)
        own.write(base / "qwen3", "", "", own.decoder(norms=True), own.WIDE_QWEN3)
    for binary, ending in ((False, ""), (True, ".bin")):
        lora(base / f"lora{ending}", binary=binary)
        lora(base / f"bigger{ending}", 2.0, binary=binary)
    return base


def printed(folders, checkpoint, **model_args):
    """The fingerprint under these model args; names of folders are those here."""
    for key in ("pretrained", "tokenizer", "peft"):
        if model_args.get(key):
            model_args[key] = str(folders / model_args[key])
    return DuelMDM(**{"pretrained": str(folders / checkpoint), "device": "cpu", **model_args}).fingerprint


@pytest.mark.parametrize("owner", OWNERS)
def test_arguments_change_the_fingerprint_if_and_only_if_they_define_a_number(
    folders, owner, tmp_path, monkeypatch, subtests
):
    monkeypatch.chdir(tmp_path)  # where a trace is written
    monkeypatch.setattr(torch.nn.Module, "compile", lambda *arguments, **keywords: None)  # slow, and no number's affair
    for checkpoint, name, argument, values, more in tried(owner):
        with subtests.test(name):
            if name == "peft":
                pytest.importorskip("peft")
            if name in ("load_in_8bit", "load_in_4bit"):
                pytest.importorskip("bitsandbytes")
            fingerprints = {printed(folders, checkpoint, **{**more, name: value}) for value in values}
            assert len(fingerprints) == (len(values) if argument.identity else 1)


def test_model_args_that_change_a_number_and_that_do_not(folders, subtests):
    for changes, table in ((True, CHANGES), (False, KEEPS)):
        for checkpoint, arg, value, other, more in table:
            with subtests.test(f"{arg}: {[value, other]}"):
                with_value = printed(folders, checkpoint, **{**more, arg: value})
                with_other = printed(folders, checkpoint, **{**more, arg: other})
                assert (with_value != with_other) == changes


def test_the_noise_levels_of_sedd_are_two_laws(tmp_path):
    path, _ = dit_reference.write(tmp_path, "sedd")
    clamped = denoisers.load(path, device="cpu", sigma="clamped").describe()
    schedule = denoisers.load(path, device="cpu", sigma="schedule").describe()
    assert fingerprint.digest(clamped) != fingerprint.digest(schedule)


# ---------------------------------------------------------------- tokenizers


def fast(folder, config=(), words=None, **state):
    """A tokenizer as a folder holds it: entries of tokenizer_config.json, and of tokenizer.json."""
    tiny.tokenizer().save_pretrained(folder)
    for name, changes in (("tokenizer_config.json", dict(config)), ("tokenizer.json", state)):
        entries = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps({**entries, **changes}))
    return AutoTokenizer.from_pretrained(folder)


LETTERS = {"type": "Split", "pattern": {"String": ""}, "behavior": "Isolated", "invert": False}
LOWER = {"type": "Lowercase"}
TRUNCATED = {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0}
PADDED = {"strategy": {"Fixed": 9}, "direction": "Right", "pad_to_multiple_of": None}
PADDED |= {"pad_id": 0, "pad_type_id": 0, "pad_token": "[PAD]"}


@pytest.mark.parametrize(
    ("changes", "same"),
    [
        ({"config": {"split_special_tokens": True}}, False),
        ({"normalizer": LOWER}, False),
        ({"pre_tokenizer": LETTERS}, False),
        ({"post_processor": None}, False),
        ({"truncation": TRUNCATED}, True),
        ({"padding": PADDED}, True),
        ({"config": {"model_max_length": 7, "padding_side": "left", "truncation_side": "left"}}, True),
        ({"config": {"chat_template": "{{ messages }}"}}, True),
    ],
)
def test_settings_of_a_tokenizer(tmp_path, changes, same):
    texts = ["a b[SEP]c", "A the of and"]
    (tmp_path / "plain").mkdir()
    (tmp_path / "changed").mkdir()
    plain = fast(tmp_path / "plain")
    changed = fast(tmp_path / "changed", **changes)
    digest_of_plain = fingerprint.of_tokenizer(plain)
    digest_of_changed = fingerprint.of_tokenizer(changed)

    assert (plain(texts)["input_ids"] == changed(texts)["input_ids"]) is same
    assert (digest_of_plain == digest_of_changed) is same
    assert fingerprint.of_tokenizer(plain) == digest_of_plain, "a call changes nothing"
    assert fingerprint.of_tokenizer(changed) == digest_of_changed, "a call changes nothing"


def test_flags_of_added_tokens():
    digests = set()
    for flag in (None, "lstrip", "rstrip", "single_word", "normalized", "special"):
        flags = {"normalized": False}
        if flag is not None:
            flags[flag] = True
        words = tiny.tokenizer()
        words.add_tokens(AddedToken("new", **flags))
        digests.add(fingerprint.of_tokenizer(words))
    assert len(digests) == 6


# ---------------------------------------------------------------- files and commits


def test_every_file_that_a_loader_reads_is_hashed(tmp_path):
    def changed(name, content, folder=tmp_path):
        before = fingerprint.weights_of(folder)
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(content)
        return fingerprint.weights_of(folder) != before

    assert changed("config.json", b'{"transformers_weights": "sub/any.name"}')
    for name in ("model.safetensors", "pytorch_model.bin", "pytorch_model-00001-of-00002.bin", "epoch.ckpt"):
        assert changed(name, b"1"), name
        assert changed(name, b"2"), name
    assert changed("sub/any.name", b"1")
    assert changed("sub/any.name", b"2")

    assert changed("pytorch_model.bin.index.json", b'{"weight_map": {"a": "part-1", "b": "deep/part-2"}}')
    assert changed("part-1", b"1")
    assert changed("deep/part-2", b"1")
    assert changed("deep/part-2", b"2")

    assert not changed("README.md", b"1")
    assert not changed("optimizer.bin", b"1")


COMMITS = ("a" * 40, "b" * 40)


@pytest.mark.parametrize("kind", ["bert", "gpt2"])
def test_a_hub_checkpoint_is_its_commit(kind, tmp_path, monkeypatch):
    for place in ("huggingface_hub.constants", "huggingface_hub.file_download", "transformers.utils.hub"):
        for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "TRANSFORMERS_CACHE"):
            if hasattr(importlib.import_module(place), name):
                monkeypatch.setattr(f"{place}.{name}", str(tmp_path))
    repo = tmp_path / "models--org--net"
    options = {"attention": "causal"} if kind == "gpt2" else {}
    specs = {}
    (repo / "refs").mkdir(parents=True)
    for commit in COMMITS:
        (repo / "refs" / "main").write_text(commit)
        tiny.checkpoint(repo / "snapshots" / commit, kind)
        specs[commit] = denoisers.load("org/net", device="cpu", **options).describe()
        assert specs[commit]["weights"] == f"org/net at commit {commit}"

    first, _ = COMMITS
    old = denoisers.load("org/net", device="cpu", revision=first, **options)
    assert old.describe() == specs[first]


def test_code_that_the_networks_code_imports_is_hashed(folders, tmp_path):
    def described(name, line):
        """The spec of a copy whose configuration has one more line."""
        shutil.copytree(folders / "own", tmp_path / name)
        code = tmp_path / name / "configuration_own.py"
        code.write_text(code.read_text() + line)
        options = {"backend": "remote", "trust_remote_code": True, "device": "cpu"}
        return denoisers.load(str(tmp_path / name), **options).describe()

    spec = described("one", "")
    assert described("again", "") == spec
    assert described("other", "\nHELP = 1\n")["code"] != spec["code"]


def test_the_bases_of_a_rule_of_ones_own_are_its_code(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    base = "from lm_eval_duel import rules\nclass Base(rules.Rule):\n    def __call__(self, predictions, lanes):\n"
    base += "        return lanes.masked"
    codes = {}
    for name in ("first", "second"):
        (tmp_path / f"base_{name}.py").write_text(f"{base}  # {name}")
        (tmp_path / f"rule_{name}.py").write_text(f"from base_{name} import Base\nclass Mine(Base):\n    pass\n")
        rule = rules.parse(f"rule_{name}:Mine")
        codes[name] = fingerprint.code_of(type(rule))
        assert DuelEstimator(Toy(), rule, "auto").describe()["rule_code"] == codes[name]
        (tmp_path / f"base_{name}.py").write_text(f"{base}  # {name} again")
        assert fingerprint.code_of(type(rule)) != codes[name]
    assert codes["first"] != codes["second"]


def test_texts_under_a_bound_are_those_of_the_rules_code(folders):
    """The rule beside an ELBO generates, so it is part of what texts are kept under."""
    arguments = {"pretrained": str(folders / "bert"), "device": "cpu", "estimator": "elbo", "mc_samples": 8}
    plain = DuelMDM(**arguments, rule="custom_rules:Stalls:mu=0.1").generation_spec
    assert re.fullmatch("[0-9a-f]{12}", plain["rule_code"])
    assert plain["grid"] == "target"
    row = DuelMDM(**arguments, rule="custom_rules:Stalls:mu=0.1", grid="row").generation_spec
    assert fingerprint.digest(plain) != fingerprint.digest(row)
