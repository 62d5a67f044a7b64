"""Law 22, identity of specs: what defines a number is in the fingerprint, the cache and the trace; files by content.

test_fingerprint.py has the table of all model args. Here every entry of a spec is changed alone, and files are changed
without changing their size or their time.
"""

import importlib
import os
import sys

import pytest
import tiny
import torch
from harness_requests import ask, cached
from lm_eval.api.model import CachingLM
from safetensors.torch import load_file, save_file

from lm_eval_duel import denoisers, fingerprint, rules
from lm_eval_duel.errors import DuelError
from lm_eval_duel.harness.lm import DuelMDM
from lm_eval_duel.rules import wrappers
from lm_eval_duel.text.annotated import Gap, Residues

pytestmark = pytest.mark.usefixtures("one_load")
SPECS = {
    "a rule": {"rule": "klass", "mu": 0.5, "nu": 0.1, "block": 4},
    "a bound": {"estimator": "elbo", "mc_samples": 8, "elbo_form": "ratio"},
    "all orders": {"estimator": "mixture", "block": 4, "lattice_rules": "greedy"},
}


def model(folder, **more):
    return DuelMDM(pretrained=folder, device="cpu", **more)


@pytest.mark.parametrize("name", SPECS)
def test_each_entry_of_a_spec_is_part_of_the_fingerprint_the_cache_and_the_trace(name, folder, tmp_path, monkeypatch):
    """A file that was written under a spec that differs in one entry is refused, whichever entry that is."""
    lm = model(folder, trace=str(tmp_path / "written.jsonl"), **SPECS[name])
    CachingLM(lm, str(tmp_path / "cache.db"))
    spec = dict(lm.spec)
    assert {"weights", "tokenizer", "estimator", "version"} <= spec.keys()
    whole = DuelMDM.spec
    for key in [*spec, "an entry of a later release"]:
        other = {**spec, key: f"{spec.get(key)}?"}
        assert fingerprint.digest(other) != fingerprint.digest(spec), key
        with monkeypatch.context() as patch:
            patch.setattr(DuelMDM, "spec", property(lambda _, other=other: other))
            with pytest.raises(DuelError):
                CachingLM(lm, str(tmp_path / "cache.db"))
            with pytest.raises(DuelError):
                model(folder, trace=str(tmp_path / "written.jsonl"), **SPECS[name])
    assert DuelMDM.spec is whole
    CachingLM(model(folder, trace=str(tmp_path / "written.jsonl"), **SPECS[name]), str(tmp_path / "cache.db"))


def test_a_drawn_text_is_kept_under_its_seed_and_a_decoded_one_is_not(folder, tmp_path):
    """With a cache a run writes the texts that it writes without one, whatever the earlier run drew."""

    def texts(seed, temperature, cache):
        lm = model(folder, draw_seed=seed, rule="greedy", block=4)
        lm = cached(lm, tmp_path) if cache else lm
        settings = {"max_gen_toks": 6, "do_sample": temperature > 0, "temperature": temperature}
        return lm.generate_until(ask("generate_until", ("a b", settings), ("c", settings)))

    drawn = {seed: texts(seed, 1.0, cache=False) for seed in (0, 1, 2)}
    assert drawn[1] != drawn[0] or drawn[2] != drawn[0]
    for seed in (0, 1, 2, 0):
        assert texts(seed, 1.0, cache=True) == drawn[seed]

    decoded = texts(0, 0.0, cache=False)
    for seed in (0, 1):
        assert texts(seed, 0.0, cache=True) == decoded


def test_a_cached_answer_is_that_of_its_own_request(folder, tmp_path):
    """Requests that differ in one part alone are kept in one file; each has the answer of a run without it."""
    drawn = {"max_gen_toks": 6, "do_sample": True, "temperature": 9.0}
    generated = [
        *ask("generate_until", ("a b", drawn), ("a b", drawn)),  # two documents of one prompt
        *ask("generate_until", ("a b", drawn), task="another task"),
        *ask("generate_until", ("a b", {**drawn, "max_gen_toks": 5}), ("a b", {**drawn, "temperature": 8.0})),
        *ask("generate_until", ("a b", {**drawn, "do_sample": False, "temperature": 0.0})),
    ]
    scored = ask(
        "loglikelihood",
        ("a", Gap("b the of")),
        ("a", Gap("b the of", "c")),  # what follows a gap
        ("a", Gap("b the of", "and")),
        ("a", Residues("bac", "c", ())),
        ("a", Residues("bac", "c", (0,))),
        ("a", Residues("bac", "c", (0, 1))),
        ("c", Gap("b the of")),
        ("a", Gap("b the and")),
    )

    def answers(lm):
        """The six texts, and the log-probabilities of the eight others."""
        texts = lm.generate_until(generated)
        return texts, [log_prob for log_prob, _ in lm.loglikelihood(scored)]

    arguments = {"rule": "greedy", "block": 4}
    texts, log_probs = answers(model(folder, **arguments))
    assert len(set(texts)) > 3, "the parts change the texts that are drawn"
    different = {round(log_prob, 3) for log_prob in log_probs}
    assert len(different) == 8

    for _ in range(2):
        lm = model(folder, **arguments)
        texts_from_cache, log_probs_from_cache = answers(cached(lm, tmp_path))
        assert texts_from_cache == texts
        assert log_probs_from_cache == pytest.approx(log_probs, abs=1e-4)
    assert lm.get_model_info()["duel"]["forwards"] == 0, "the second time all of them stand in the file"


# ---------------------------------------------------------------- files by content


def rewrite(path, content):
    """Other bytes of the same size, at the same time."""
    before = os.stat(path)
    assert len(content) == before.st_size, "the sizes must be equal"
    with open(path, "wb") as file:
        file.write(content)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def test_weights_of_equal_size_and_time_are_other_weights(tmp_path):
    path = tiny.checkpoint(tmp_path, "bert")
    before = denoisers.load(path, device="cpu").describe()
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    tensors["cls.predictions.bias"] = tensors["cls.predictions.bias"] + 1
    save_file(tensors, tmp_path / "changed", metadata={"format": "pt"})
    content = (tmp_path / "changed").read_bytes()
    (tmp_path / "changed").unlink()
    rewrite(file, content)
    after = denoisers.load(path, device="cpu").describe()
    assert [key for key in before if before[key] != after[key]] == ["weights"]


RULE = """
import dataclasses
from lm_eval_duel import rules

@dataclasses.dataclass(frozen=True)
class Nearly(rules.Rule):
    state_only = True

    def __call__(self, predictions, lanes):
        score = predictions.confidence * +1
        return lanes.masked & (rules.rank(-score.masked_fill(~lanes.masked, -99)) < 1)
"""
AROUND = [{}, {"seed_first": True}, {"sub_block": 2}, {"sub_block": 2, "seed_first": True}]


@pytest.mark.parametrize("around", AROUND, ids=str)
def test_code_and_files_of_a_rule_count_whatever_is_around_it(around, folder, tmp_path, monkeypatch):
    """A rule of a user inside another rule, its code changed without changing size and time."""
    monkeypatch.chdir(tmp_path)
    name = f"nearly_{len(around)}_{'_'.join(around) or 'alone'}"
    file = tmp_path / f"{name}.py"
    file.write_text(RULE)

    def fingerprints(sign):
        """Those of what is scored and of what is generated, by a rule with +1 or -1 in its code."""
        rewrite(file, RULE.replace("+1", sign).encode())
        sys.modules.pop(name, None)
        importlib.invalidate_caches()
        sys.path_importer_cache.clear()
        lm = model(folder, rule=f"{name}:Nearly", block=4, **around)
        return lm.fingerprint, fingerprint.digest(lm.generation_spec)

    scored, generated = fingerprints("+1")
    other_scored, other_generated = fingerprints("-1")
    assert scored != other_scored
    assert generated != other_generated
    assert fingerprints("+1") == (scored, generated)


@pytest.mark.parametrize("around", [wrappers.SeedFirst, lambda rule: wrappers.SubBlock(rule, 2)])
def test_the_weights_of_a_rule_count_whatever_is_around_it(around, tmp_path):
    file = tmp_path / "rule.safetensors"
    digests = []
    for value in (1.0, 2.0):
        save_file({"weight": torch.full((1, 6, 6), value)}, file)
        os.utime(file, ns=(1, 1))
        rule = rules.parse(f"custom_rules:Looks:file={file}")
        digests.append(fingerprint.digest(rule.describe()))
        digests.append(fingerprint.digest(around(rule).describe()))
    assert len(set(digests)) == 4
