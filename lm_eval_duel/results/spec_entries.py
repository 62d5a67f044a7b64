"""Entries of specs: which of them belong to a model, which differ between runs, and how names hold these."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Mapping, Sequence

from lm_eval_duel.estimators import registry
from lm_eval_duel.results.table import percent

# those that vary within one model
NON_IDENTITY_KEYS = {"estimator", "rule", "draw_seed", *registry.arguments()}
# those that every row names if it has them
LABEL_KEYS = {"cache"}.union(*(entry.label_args for entry in registry.ENTRIES))
# those that belong to the estimator, as NON_IDENTITY_KEYS do; the last two say what commit-once noise is
ESTIMATOR_KEYS = {"block", "grid", "rule_code", "cheap_cache", "masked_share", "ties"}
SAMPLING = ("dtype", "warpers")  # entries that change the law of any checkpoint
DROPS = {"lower case": "drops upper case", "accents": "drops accents"}  # by the words of `normalises`
SPECIAL_TOKENS = "special_tokens"  # an entry such as "[2] text [], bos=given"


def bos_of(spec: Mapping[str, str]) -> str:
    """The model arg `bos` of a spec."""
    _, _, bos = spec.get(SPECIAL_TOKENS, "").rpartition("bos=")
    return bos.split(",")[0] or "given"


def scored_positions(spec: Mapping[str, str]) -> str:
    """The scored positions of a row: `the text` only, unless a benchmark's convention says otherwise."""
    bos = bos_of(spec)
    return "the text" if bos in ("given", "none") else f"bos={bos}"


def lost_distinctions(spec: Mapping[str, str], unknown: float) -> dict[str, str]:
    """The distinctions that the tokenizer of a spec does not make, in words, such as "drops accents".

    The keys are equal for two tokenizers that lose the same. `unknown`: the share of [UNK] among the tokens.
    """
    lost = {}
    for distinction in spec.get("normalises", "").split(", "):
        if distinction:
            lost[distinction] = DROPS[distinction]
    if unknown:
        lost[f"[UNK] of tokenizer {spec.get('tokenizer')}"] = f"has {percent(unknown)} [UNK]"
    return lost


def differing_keys(specs: Sequence[Mapping[str, str]], named: Collection[str]) -> list[str]:
    """The entries in which specs differ, without those that names hold anyway."""
    differing = []
    every_key = dict.fromkeys(itertools.chain.from_iterable(specs))
    for key in every_key:
        values = {spec.get(key) for spec in specs}
        if len(values) > 1 and key not in named:
            differing.append(key)
    return differing


def entries_for_names(specs: Sequence[Mapping[str, str]], keys: Iterable[str]) -> list[list[str]]:
    """For each spec, its entries of these keys as names hold them."""
    of_specs: list[list[str]] = [[] for _ in specs]
    for key in keys:
        for of_spec, text in zip(of_specs, _texts_of_key(specs, key), strict=True):
            of_spec.append(text)
    return of_specs


def _texts_of_key(specs: Sequence[Mapping[str, str]], key: str) -> list[str]:
    """One entry of each spec. Special tokens are shortened to the model arg `bos` if it tells the specs apart."""
    whole = [_as_text(spec, key) for spec in specs]
    if key != SPECIAL_TOKENS:
        return whole
    shorter = []  # `bos` decides on the special tokens of a network and its tokenizer
    for text in whole:
        _, has_bos, bos = text.partition(", bos=")
        shorter.append(f"bos={bos}" if has_bos else text)
    return shorter if len(set(shorter)) == len(set(whole)) else whole


def _as_text(spec: Mapping[str, str], key: str) -> str:
    """An entry of a spec in a name. The warpers are model args, such as `temperature=0.7`."""
    if key == "warpers":
        return spec.get(key, "no warpers")
    return f"{key}={spec.get(key, 'not set')}"
