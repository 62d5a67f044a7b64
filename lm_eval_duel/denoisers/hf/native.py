"""A family's config and tensors under the names of transformers' own class, and back."""

from __future__ import annotations

import itertools
import re

from lm_eval_duel.denoisers import config_entries as entries
from lm_eval_duel.denoisers.hf.families import FAMILIES, NEEDED, Family, Raw, Tensors, classes_of
from lm_eval_duel.errors import DuelError

NAMES_OF_OTHERS = ("architectures", "auto_map", "model_type", "transformers_version", "dtype", "torch_dtype")
UNQUANTIZED = ("llm_int8_skip_modules", "modules_to_not_convert", "ignore")  # modules that a quantisation leaves out
GROUP = re.compile(r"\([^()]*\)")


def native_config(family: Family, raw: Raw, name: str) -> Raw:
    """The entries of the native config: the raw ones, with those that the family calls otherwise.

    None is left to the defaults of the native class: raises DuelError where config.json of `name` lacks one, and
    ValueError where one is of another type.
    """
    _require_entries(family, raw, name)
    entries.check(raw, family.block_keys)
    found = {**{key: value for key, value in raw.items() if key not in NAMES_OF_OTHERS}, **family.config(raw)}
    for key, usual in (("hidden_act", "silu"), ("tie_word_embeddings", False)):
        if found.get(key) is None:  # of all these classes; without a head in the files the second is an error
            found[key] = usual
    if found.get("num_key_value_heads") is None:
        found["num_key_value_heads"] = found["num_attention_heads"]
    if found.get("head_dim") is None:
        found["head_dim"] = found["hidden_size"] // found["num_attention_heads"]
    if said := found.get("quantization_config"):
        lists = {key: said[key] for key in UNQUANTIZED if isinstance(said.get(key), list)}
        native = {key: [native_name(family, f"{name}.").removesuffix(".") for name in lists[key]] for key in lists}
        found["quantization_config"] = {**said, **native}
    return found


def _require_entries(family: Family, raw: Raw, name: str) -> None:
    """Raise DuelError where config.json lacks entries that the family needs, as under a wrong `family=`."""
    lacking = [key for key in family.needs or NEEDED[family.native] if entries.said(raw, key) is None]
    if not lacking:
        return
    advice = "Take another family=, or add to config.json what the network was trained with."
    for given in classes_of(raw):
        if named := [other.name for other in FAMILIES if given in other.architectures and other is not family]:
            advice = f"By its class {given} it is of the family {named[0]}: leave family={family.name} out."
            break
    raise DuelError(
        f"The config.json of {name} has no {', '.join(lacking)}, which the family {family.name} ({family.native} of "
        f"transformers) needs. {advice}"
    )


def native_tensors(family: Family, tensors: Tensors, raw: Raw) -> tuple[Tensors, dict[str, str]]:
    """The tensors under the native names, and the file's name of each; raises DuelError where two have one place."""
    found: Tensors = {}
    origin: dict[str, str] = {}
    for key, value in tensors.items():
        for part, content in family.tensors({key: value}, raw).items():
            native = native_name(family, part)
            if native in found:
                raise DuelError(
                    f"The weights hold both {origin[native]} and {key}, which are one tensor of the family "
                    f"{family.name}."
                )
            found[native], origin[native] = content, key
    return found, origin


def native_name(family: Family, key: str) -> str:
    """The native name of a tensor."""
    return _renamed(key, family.rename)


def file_name(family: Family, native: str) -> str:
    """The name that a native tensor has in the files of a family."""
    return _renamed(_renamed(native, tuple(_backwards(*rule) for rule in family.rename)), family.fused)


def _renamed(key: str, rules: tuple[tuple[str, str], ...]) -> str:
    for pattern, replacement in rules:
        new, count = re.subn(pattern, replacement, key)
        if count:
            return new
    return key


def _backwards(pattern: str, replacement: str) -> tuple[str, str]:
    """A rule of `rename` the other way round: what its groups match goes where it came from."""
    groups = GROUP.findall(pattern)
    back = re.sub(r"\\\\(\d)", lambda number: groups[int(number[1]) - 1], re.escape(replacement))
    numbers = itertools.count(1)
    forth = GROUP.sub(lambda group: f"\\{next(numbers)}", pattern)
    start, end = "^" * pattern.startswith("^"), "$" * pattern.endswith("$")
    return f"{start}{back}{end}", forth.strip("^$").replace(r"\.", ".")
