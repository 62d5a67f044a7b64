"""A family's config and tensors under the names of transformers' own class, and tensor names back."""

from __future__ import annotations

import itertools
import re

from lm_eval_duel.denoisers import config_entries
from lm_eval_duel.denoisers.hf.families import FAMILIES, Family, class_names
from lm_eval_duel.denoisers.hf.family_layouts import NEEDED, Config, Tensors
from lm_eval_duel.errors import DuelError

FOREIGN = ("architectures", "auto_map", "model_type", "transformers_version", "dtype", "torch_dtype")
UNQUANTIZED = ("llm_int8_skip_modules", "modules_to_not_convert", "ignore")  # lists of modules that stay unquantised
GROUP = re.compile(r"\([^()]*\)")


def native_config(family: Family, config: Config, name: str) -> Config:
    """The entries of the native config: those of config.json, with the family's translations.

    No entry is left to the defaults of the native class: raises DuelError if the config.json of `name` lacks one, and
    ValueError if one has another type.
    """
    _require_entries(family, config, name)
    config_entries.check(config, family.block_keys)
    entries = {**{key: value for key, value in config.items() if key not in FOREIGN}, **family.translate_config(config)}
    for key, default in (("hidden_act", "silu"), ("tie_word_embeddings", False)):
        if entries.get(key) is None:  # the default of all these classes; a missing head is an error later
            entries[key] = default
    if entries.get("num_key_value_heads") is None:
        entries["num_key_value_heads"] = entries["num_attention_heads"]
    if entries.get("head_dim") is None:
        entries["head_dim"] = entries["hidden_size"] // entries["num_attention_heads"]
    if scheme := entries.get("quantization_config"):
        lists = {key: scheme[key] for key in UNQUANTIZED if isinstance(scheme.get(key), list)}
        native = {key: [native_name(family, f"{name}.").removesuffix(".") for name in lists[key]] for key in lists}
        entries["quantization_config"] = {**scheme, **native}
    return entries


def _require_entries(family: Family, config: Config, name: str) -> None:
    """Raise DuelError if config.json lacks entries that the family needs, for example under a wrong `family=`."""
    missing = [key for key in family.needs or NEEDED[family.native] if config_entries.lookup(config, key) is None]
    if not missing:
        return
    advice = "Use another family=, or add the values it was trained with to config.json."
    for architecture in class_names(config):
        if others := [other.name for other in FAMILIES if architecture in other.architectures and other is not family]:
            advice = f"By its class {architecture} it is of the family {others[0]}: leave family={family.name} out."
            break
    raise DuelError(
        f"The config.json of {name} has no {', '.join(missing)}, which the family {family.name} ({family.native} of "
        f"transformers) needs. {advice}"
    )


def native_tensors(family: Family, tensors: Tensors, config: Config) -> tuple[Tensors, dict[str, str]]:
    """The tensors by native name, and the name of each in the file; raises DuelError if two get the same name."""
    renamed: Tensors = {}
    origin: dict[str, str] = {}
    for key, value in tensors.items():
        for part, content in family.translate_tensors({key: value}, config).items():
            native = native_name(family, part)
            if native in renamed:
                raise DuelError(
                    f"The weights hold both {origin[native]} and {key}, which are the same tensor of the family "
                    f"{family.name}."
                )
            renamed[native], origin[native] = content, key
    return renamed, origin


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
    """The inverse of a rule of `rename`."""
    groups = GROUP.findall(pattern)
    back = re.sub(r"\\\\(\d)", lambda number: groups[int(number[1]) - 1], re.escape(replacement))
    numbers = itertools.count(1)
    forth = GROUP.sub(lambda group: f"\\{next(numbers)}", pattern)
    start, end = "^" * pattern.startswith("^"), "$" * pattern.endswith("$")
    return f"{start}{back}{end}", forth.strip("^$").replace(r"\.", ".")
