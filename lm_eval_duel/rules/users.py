"""A user's rule: found in its module or file, and held to the contract of a rule before a network is loaded."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import inspect
import os
import sys
import traceback
from collections.abc import Iterable
from types import ModuleType
from typing import Any, TypeGuard

from lm_eval_duel.errors import DuelError, documentation, nearest, unknown
from lm_eval_duel.rules.base import Rule

CONTRACT = (
    "A rule is a subclass of lm_eval_duel.rules.Rule with @dataclasses.dataclass(frozen=True) and a method "
    "__call__(self, predictions, lanes), which returns a Decision or a boolean tensor (R, W) of the positions to reveal"
)

OWN_NAMES = "Rules of your own are named module:Name or path/to/file.py:Name"


def find(name: str) -> type[Rule]:
    """The class of `module:Name` or `path/to/file.py:Name`; raises DuelError if it is not a rule."""
    module_name, class_name = name.split(":")
    is_file = module_name.endswith(".py")
    is_module = "/" not in module_name and all(module_name.split("."))
    if not class_name or not (is_file or is_module):
        lacks_ending = bool(class_name) and os.path.isfile(f"{module_name}.py")
        hint = f": write {module_name}.py:{class_name}" if lacks_ending else ""
        raise DuelError(f"'{name}' is not a rule{hint}. {OWN_NAMES}.")
    if is_file:
        folder, module_name = _folder_and_module(module_name)
    else:
        folder = os.getcwd()  # a console script has its own folder in sys.path instead
    module = _imported(name, folder, module_name)
    rule = getattr(module, class_name, None)
    if rule is None:
        raise unknown("rule", class_name, _rules_of(module), f"in '{module_name}'")
    if not _is_rule(rule):
        what = "class" if isinstance(rule, type) else type(rule).__name__
        raise DuelError(f"'{name}' is a {what}, not a rule. {_contract()}")
    require_contract(rule)
    return rule


def require_contract(rule: type[Rule]) -> None:
    """Raise DuelError, with its file and line, for a class that cannot be called as a rule, or contradicts itself."""
    if rule.__call__ is Rule.__call__:
        raise DuelError(f"The rule {rule.__qualname__} ({place(rule)}) has no method __call__. {_contract()}")
    try:
        inspect.signature(rule.__call__).bind("self", "predictions", "lanes")
    except TypeError as error:
        raise DuelError(
            f"The method __call__ of the rule {rule.__qualname__} ({place(rule)}) cannot be called with predictions "
            f"and lanes ({error}). {_contract()}"
        ) from None
    is_dataclass = "__dataclass_params__" in vars(rule)
    fields = [key for key, kind in inspect.get_annotations(rule).items() if "ClassVar" not in str(kind)]
    if fields and not is_dataclass:
        raise DuelError(
            f"The rule {rule.__qualname__} ({place(rule)}) is not a dataclass, so {', '.join(fields)} would be no "
            "parameter of it: write @dataclasses.dataclass(frozen=True) above the class."
        )
    _require_spelling(rule)
    if rule.state_only is True and rule.reads_step is True:
        raise DuelError(
            f"The rule {rule.__qualname__} ({place(rule)}) has state_only = True and reads_step = True, which "
            "contradict each other: state_only says that picks depend on the revealed tokens alone. Leave one out."
        )


def _require_spelling(rule: type[Rule]) -> None:
    """Raise DuelError for a class attribute whose name is near that of a property of rules, such as `state_onyl`.

    All these properties are False by default, so a misspelt one would do nothing.
    """
    properties = [name for name, value in vars(Rule).items() if isinstance(value, bool)]
    parameters = [field.name for field in dataclasses.fields(rule)]
    for name, value in vars(rule).items():
        is_known = name in parameters or hasattr(Rule, name)
        if is_known or not isinstance(value, bool):
            continue
        near = nearest(name, properties)
        if near:
            raise DuelError(
                f"The rule {rule.__qualname__} ({place(rule)}) sets '{name}', which no rule has. Did you mean "
                f"{near[0]}? Give an attribute of your own another name."
            )


def require_types(rule: type[Rule], names: Iterable[str]) -> None:
    """Raise DuelError if one of `names` is a class attribute that lacks the type that makes it a parameter."""
    for name in names:
        value = vars(rule).get(name)
        if isinstance(value, (bool, int, float, str)):
            raise DuelError(
                f"'{name}' of the rule {rule.__qualname__} ({place(rule)}) has no type, so it is no parameter: write "
                f"{name}: {type(value).__name__} = {value!r}."
            )


def place(rule: type[Rule]) -> str:
    """The file and line of a rule's `__call__`, or of its class if it has none."""
    code = getattr(rule.__call__, "__code__", None)
    if code is not None and rule.__call__ is not Rule.__call__:
        return f"{code.co_filename}, line {code.co_firstlineno}"
    try:
        return f"{inspect.getsourcefile(rule)}, line {inspect.getsourcelines(rule)[1]}"
    except (OSError, TypeError):  # made in a notebook or by type()
        return f"module {rule.__module__}"


def require_colon(name: str) -> None:
    """Raise DuelError if an unknown `name` is a module without its rule, or has another sign in place of the colon."""
    if _is_module(name):
        raise no_class(name)
    if "/" in name and os.path.isfile(f"{name}.py"):
        raise no_class(f"{name}.py")
    module, _, class_name = name.replace("/", ".").rpartition(".")
    if not module or not class_name.isidentifier():
        return
    file = name[: -len(class_name) - 1]
    if "/" not in name or file.endswith(".py"):
        example = f"{file}:{class_name}"
    elif os.path.isdir(file):
        example = f"{name}.py:Name"
    else:
        example = f"{file}.py:{class_name}"
    raise DuelError(f"'{name}' is not a rule of this package. {OWN_NAMES}, such as {example}.")


def names_in(file: str) -> list[str]:
    """The rules of a user's file, each as `path/to/file.py:Name`; raises DuelError if there is none."""
    known = _rules_of(_imported(file, *_folder_and_module(file)))
    if not known:
        raise DuelError(f"There is no rule in '{file}'. {_contract()}")
    return [f"{file}:{name}" for name in known]


def no_class(name_of_module: str) -> DuelError:
    """The error for a rule's file or module without the rule's name. It lists the rules in it, if it imports."""
    what = "module"
    folder = os.getcwd()
    module_name = name_of_module
    if name_of_module.endswith(".py"):
        what = "file"
        folder, module_name = _folder_and_module(name_of_module)
    try:
        known = _rules_of(_imported(name_of_module, folder, module_name))
    except Exception:  # the error of the file itself is shown once a rule in it is named
        known = []
    name = "Name"
    listed = ""
    if known:
        name = known[0]
        listed = f" Rules in it: {', '.join(known)}."
    return DuelError(f"'{name_of_module}' is a {what}, not a rule: write {name_of_module}:{name}.{listed}")


def _contract() -> str:
    return f"{CONTRACT} ({documentation('adding.md')})."


def _is_module(name: str) -> bool:
    """True for a user's module, in this folder or on the path: not one of Python itself, and no dotted name."""
    if not name.isidentifier() or name in sys.stdlib_module_names:
        return False
    return os.path.isfile(f"{name}.py") or importlib.util.find_spec(name) is not None


def _folder_and_module(file: str) -> tuple[str, str]:
    """The folder of a Python file and the name of its module; raises DuelError if that name has another meaning."""
    path = os.path.abspath(os.path.expanduser(file))
    folder, module = os.path.split(path.removesuffix(".py"))
    if not os.path.isfile(path):
        raise DuelError(f"No file '{file}' for the rule; write path/to/file.py:Name.")
    if module in sys.modules or module in sys.stdlib_module_names:
        other = importlib.util.find_spec(module)
        if other is not None and os.path.abspath(other.origin or "") != path:
            raise DuelError(f"'{module}' is also the module {other.origin}; give the rule's file {file} another name.")
    return folder, module


def _imported(name: str, folder: str, module_name: str) -> ModuleType:
    """The module of rule `name`, which may be in `folder`; raises DuelError with the line at which its import fails."""
    sys.path.insert(0, folder)
    try:
        return importlib.import_module(module_name)
    except DuelError:
        raise
    except Exception as error:
        # if neither the rule's module nor a package around it is missing, the module imports another one that is
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        if missing and f"{module_name}.".startswith(f"{missing}."):
            raise DuelError(
                f"No module '{module_name}' for rule '{name}'; put it in this folder or on PYTHONPATH."
            ) from None
        raise _not_imported(name, error) from error
    finally:
        sys.path.remove(folder)


def _not_imported(name: str, error: Exception) -> DuelError:
    """The error for a rule whose module raises `error` when it is imported."""
    if isinstance(error, SyntaxError):
        where = f"{error.filename}, line {error.lineno}"
        reason = error.msg
    else:
        where = _line_outside_of_python(error)
        reason = str(error)
    hint = ""
    if isinstance(error, TypeError) and "non-frozen dataclass" in reason:  # Python's words
        hint = " Write @dataclasses.dataclass(frozen=True)."
    return DuelError(f"Rule '{name}' cannot be imported: {type(error).__name__}: {reason} ({where}).{hint}")


def _line_outside_of_python(error: Exception) -> str:
    """The last file and line of the user's code that an import went through."""
    frames = traceback.extract_tb(error.__traceback__)
    standard = (os.path.dirname(os.__file__), "<frozen")
    of_users = [frame for frame in frames if not frame.filename.startswith((*standard, __file__))]
    last = (of_users or frames)[-1]
    return f"{last.filename}, line {last.lineno}"


def _rules_of(module: ModuleType) -> list[str]:
    """The names of the rules that a module defines; a class without `__call__` is the base of others."""
    names = []
    for name, value in vars(module).items():
        if _is_rule(value) and value.__module__ == module.__name__ and value.__call__ is not Rule.__call__:
            names.append(name)
    return names


def _is_rule(value: Any) -> TypeGuard[type[Rule]]:
    return isinstance(value, type) and issubclass(value, Rule)
