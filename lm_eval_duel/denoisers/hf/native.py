"""A family's config and tensors under the names of transformers' own class."""

from __future__ import annotations

import re

from lm_eval_duel.denoisers.hf.families import Family
from lm_eval_duel.denoisers.hf.family_layouts import NEEDED, Config, Tensors, lookup
from lm_eval_duel.errors import DuelError

FOREIGN = ("architectures", "auto_map", "model_type", "transformers_version", "dtype", "torch_dtype")
UNQUANTIZED = ("llm_int8_skip_modules", "modules_to_not_convert", "ignore")  # lists of modules that stay unquantized


def native_config(family: Family, config: Config, name: str) -> Config:
    """The entries of the native config: config.json, with the family's translations.

    Raises DuelError for an entry that would be left to a default, or makes the native class another network.
    """
    changed = [
        f"{key}={config[key]!r}" for key, value in family.released.items() if config.get(key) not in (None, value)
    ]
    if changed:
        raise DuelError(
            f"{name} is not the released network of the family {family.name} ({', '.join(changed)}). To run its own "
            "code: backend=remote,trust_remote_code=true."
        )
    entries = {key: value for key, value in config.items() if key not in FOREIGN}
    entries |= {native: config[own] for native, own in family.entries.items() if config.get(own) is not None}
    for key, value in (*family.values.items(), ("hidden_act", "silu"), ("tie_word_embeddings", False)):
        if entries.get(key) is None:
            entries[key] = value
    wanted = (*NEEDED[family.native], *family.needs)
    names = {key: family.entries.get(key) for key in wanted}
    if missing := [
        own or key for key, own in names.items() if (config.get(own) if own else lookup(entries, key)) is None
    ]:
        raise DuelError(
            f"The config.json of {name} has no {', '.join(missing)}, which the family {family.name} "
            f"({family.native} of transformers) needs. Use another family=, or add the values of its training."
        )
    entries |= family.translate_config(config)
    heads = entries["num_attention_heads"]
    entries["num_key_value_heads"] = entries.get("num_key_value_heads") or heads
    entries["head_dim"] = entries.get("head_dim") or entries["hidden_size"] // heads
    if scheme := entries.get("quantization_config"):
        lists = {key: scheme[key] for key in UNQUANTIZED if isinstance(scheme.get(key), list)}
        native = {key: [native_name(family, f"{name}.").removesuffix(".") for name in lists[key]] for key in lists}
        entries["quantization_config"] = {**scheme, **native}
    return entries


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
    for pattern, replacement in family.rename:
        new, count = re.subn(pattern, replacement, key)
        if count:
            return new
    return key
