"""The fingerprint: a short digest of the spec, which describes everything that defines a log-probability.

Two runs with the same fingerprint must agree up to float noise. Batch size, device and rank count are not part of it.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import hashlib
import json
import os
import re
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

from lm_eval_duel.errors import DuelError

SPEC_VERSION = 3  # raised when a release changes a number for the same arguments
SPEC_FILES = re.compile(r"config\.json|.*\.safetensors|pytorch_model.*\.bin|.*\.ckpt|.*\.index\.json")
ADAPTER_FILES = re.compile(r"adapter_config\.json|adapter_model\.(safetensors|bin)")
LIBRARIES = ("lm_eval_duel", "torch", "transformers", "tokenizers")  # the results name their versions
NO_IDS = (  # settings of a tokenizer that do not change the ids of a text
    *("backend", "chat_control_tokens", "chat_template", "clean_up_tokenization_spaces", "files_loaded", "is_local"),
    *("local_files_only", "model_input_names", "model_max_length", "name_or_path", "pad_token", "padding_side"),
    *("processor_class", "response_template", "tokenizer_class", "truncation_side", "verbose", "auto_map"),
)


class Described(Protocol):
    """A part of a spec: a denoiser, an estimator, or a `TextEncoder`."""

    def describe(self) -> dict[str, object]:
        """The entries of this part that define a number."""


def spec_of(*parts: Described) -> dict[str, str]:
    """The spec: everything that defines a number, by name. Its `digest` is the fingerprint."""
    spec: dict[str, str] = {}
    for part in parts:
        for described in (part, *getattr(part, "filters", ())):  # a denoiser's temperature and the like
            spec |= {key: str(value) for key, value in described.describe().items()}
    return {**spec, "version": str(SPEC_VERSION)}


def digest(spec: Mapping[str, object]) -> str:
    """Twelve hexadecimal digits of the spec, independent of the order of its entries."""
    text = json.dumps({key: str(value) for key, value in spec.items()}, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def number(value: float) -> str:
    """A number as text, in the fewest digits that distinguish it from every other."""
    short = f"{float(value):g}"
    return short if float(short) == float(value) else repr(float(value))


def hash_files(paths: Iterable[str | os.PathLike[str]]) -> str:
    """Twelve hexadecimal digits of the names and contents of files; their folders do not count."""
    total = hashlib.sha256()
    for path in sorted(paths, key=lambda path: (os.path.basename(path), path)):
        total.update(os.path.basename(path).encode() + b"\0")
        with open(path, "rb") as file:
            while chunk := file.read(1 << 22):
                total.update(chunk)
    return total.hexdigest()[:12]


def hash_contents(paths: Iterable[str]) -> str:
    """Twelve hexadecimal digits of the contents of files, whatever their names are."""
    digests = (hashlib.sha256(Path(path).read_bytes()).digest() for path in paths)
    return hashlib.sha256(b"".join(digests)).hexdigest()[:12]


# ---------------------------------------------------------------- weights


def weights_of(folder: str | os.PathLike[str], code: bool = False) -> str:
    """The hash of the weights and config in a local folder, that is, of every file that a loader reads.

    `code`: the checkpoint's own code is run, so it counts as well.
    """
    names = {name for name in os.listdir(folder) if SPEC_FILES.fullmatch(name) or (code and name.endswith(".py"))}
    for name in sorted(names):
        if name == "config.json" or name.endswith(".index.json"):
            names |= set(_named(folder, name))
    return hash_files(os.path.join(folder, name) for name in names)


def adapter_of(folder: str | os.PathLike[str]) -> str:
    """The hash of a PEFT adapter in a local folder."""
    return hash_files(os.path.join(folder, name) for name in os.listdir(folder) if ADAPTER_FILES.fullmatch(name))


def _named(folder: str | os.PathLike[str], name: str) -> Iterator[str]:
    """The weight files that a config or an index names; they may have any name."""
    try:
        with open(os.path.join(folder, name), encoding="utf-8") as file:
            entries = json.load(file)
        files = [*entries.get("weight_map", {}).values(), entries.get("transformers_weights")]
    except (ValueError, AttributeError):
        return  # the loader reports a broken file
    for weights in files:
        if isinstance(weights, str) and os.path.isfile(os.path.join(folder, weights)):
            yield os.path.normpath(weights)


# ---------------------------------------------------------------- code


def code_of(kind: type) -> str:
    """The hash of a class's code without libraries: its file, the files of its bases, and the neighbouring files that
    these import.

    Raises DuelError for a class that is not defined in a file.
    """
    if not (files := _code_files(kind)):
        raise DuelError(
            f"The code of {kind.__qualname__} is not in a file, so no fingerprint can include it; put it into a module."
        )
    return hash_files(files)


def _code_files(kind: type) -> set[str]:
    files: set[str] = set()
    for base in kind.__mro__:
        top = base.__module__.partition(".")[0]
        if top not in LIBRARIES and top not in sys.stdlib_module_names:
            _add_imported(getattr(sys.modules.get(base.__module__), "__file__", None), files)
    return files


def _add_imported(file: str | None, files: set[str]) -> None:
    """Add a Python file and the modules it imports, unless they belong to Python or an installed package."""
    if file is None or not os.path.isfile(file) or (file := os.path.abspath(file)) in files:
        return
    files.add(file)
    with open(file, encoding="utf-8", errors="replace") as source:
        imports = _imports_of(source.read())
    for level, module in imports:
        if level:
            folder = os.path.join(os.path.dirname(file), *[os.pardir] * (level - 1))
            _add_imported(os.path.join(folder, *module.split(".")) + ".py", files)
        else:
            _add_imported(_own_file(module), files)


@functools.lru_cache(maxsize=64)  # by the text itself, so that a file that changes is read anew
def _imports_of(source: str) -> tuple[tuple[int, str], ...]:
    """(level, module) of each module that a Python text may import; level 0 is an absolute import."""
    try:
        tree = ast.parse(source)
    except SyntaxError:  # not what runs: it could not have been imported
        return ()
    imports: list[tuple[int, str]] = []
    for node in ast.walk(tree):
        if not isinstance(node, ast.Import | ast.ImportFrom):
            continue
        names = [alias.name for alias in node.names]
        if isinstance(node, ast.Import):
            imports += [(0, name) for name in names]
        elif node.level:
            imports += [(node.level, name) for name in ([node.module] if node.module else names)]
        else:  # the names may be modules of a package
            imports += [(0, name) for name in (str(node.module), *(f"{node.module}.{name}" for name in names))]
    return tuple(imports)


def _own_file(module: str) -> str | None:
    """The file of an imported module, unless it belongs to Python or an installed package."""
    file = getattr(sys.modules.get(module), "__file__", None)
    top = module.partition(".")[0]
    if file is None or top in LIBRARIES or top in sys.stdlib_module_names:
        return None
    return None if {"site-packages", "dist-packages"} & set(file.split(os.sep)) else file


# ---------------------------------------------------------------- tokenizers


def of_tokenizer(tokenizer: Any) -> str:
    """The hash of everything that defines a tokenizer's ids: its tables, files, code and settings.

    Truncation and padding of a tokenizer.json do not count: a tokenizer's first call resets them.
    """
    entries: dict[str, Any] = {"split_special_tokens": bool(getattr(tokenizer, "split_special_tokens", False))}
    backend = getattr(tokenizer, "backend_tokenizer", None)
    code_files = _code_files(type(tokenizer))
    if backend is not None:
        state = json.loads(backend.to_str())
        entries["backend"] = {key: value for key, value in state.items() if key not in ("truncation", "padding")}
    if code_files:
        entries["code"] = hash_files(code_files)
    if code_files or backend is None:
        entries |= _in_python(tokenizer)
    text = json.dumps(entries, sort_keys=True, default=lambda value: f"{type(value).__name__} {_flags(value)}")
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def _in_python(tokenizer: Any) -> dict[str, Any]:
    """The definition of a tokenizer written in Python: class, vocabulary, files, added tokens, settings."""
    plain = {key: value for key, value in vars(tokenizer).items() if isinstance(value, bool | int | float | str)}
    settings = {**getattr(tokenizer, "init_kwargs", {}), **plain}
    return {
        "class": type(tokenizer).__qualname__,
        "vocabulary": sorted(tokenizer.get_vocab().items()),
        "added": {str(token): _flags(added) for token, added in getattr(tokenizer, "added_tokens_decoder", {}).items()},
        "files": _vocabulary_files(tokenizer),
        "settings": {
            key: value
            for key, value in settings.items()
            if key not in NO_IDS and not key.startswith("_") and not key.endswith(("_file", "_path"))
        },
    }


def _flags(added: Any) -> str:
    """An added token with its flags. Empty for any other object: its text may contain a memory address."""
    return repr(added) if type(added).__name__ == "AddedToken" else ""


def _vocabulary_files(tokenizer: Any) -> list[str]:
    """The hashes of the files that a tokenizer was read from, and of those that it writes."""
    names = getattr(tokenizer, "vocab_files_names", {})
    arguments = getattr(tokenizer, "init_kwargs", {})
    folder = str(getattr(tokenizer, "name_or_path", ""))
    read = []
    for key, name in names.items():
        places = [getattr(tokenizer, key, None), arguments.get(key)] + (
            [os.path.join(folder, str(name))] if folder else []
        )
        read += [place for place in places if isinstance(place, str) and os.path.isfile(place)][:1]
    with tempfile.TemporaryDirectory() as scratch:
        with contextlib.suppress(Exception):  # not every class can; the files it was read from are hashed in any case
            tokenizer.save_vocabulary(scratch)
        written = hash_files(os.path.join(scratch, name) for name in os.listdir(scratch))
    return [hash_files(read), written]


def differences(ours: Mapping[str, object], theirs: Mapping[str, object]) -> list[str]:
    """One line for each entry in which two specs differ."""
    lines = []
    for key in sorted({*ours, *theirs}):
        mine = str(ours.get(key, "not set"))
        other = str(theirs.get(key, "not set"))
        if mine != other:
            lines.append(f"{key}: this run {mine}, the other {other}")
    return lines
