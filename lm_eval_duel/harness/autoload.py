"""Registration: `lm_eval --model duel-mdm` works once this package is installed.

lm-eval 0.4.13 does not discover plugins, so a `.pth` file of one line in site-packages calls `install()` when the
interpreter starts. It imports nothing: it puts a finder on `sys.meta_path`, which waits for modules of lm-eval:

    lm_eval.api.registry             the error for an unknown model suggests ours if the name is close
    lm_eval._cli.utils               the error for a model name without `pretrained=` says what to write
    lm_eval.config.evaluate_config   the error for an unknown task names our folder of tasks if the task is ours, the
                                     nearest of the user's tasks, and those of their files that cannot be read; the
                                     tasks of our models are loaded before the model (preparation.py)
    lm_eval.utils                    the table of results is followed by one with the kind and the error of each value
    lm_eval.models                   the name `duel-mdm` is registered (a string; neither torch nor transformers is
                                     imported)

After the last of them it removes itself.

Later releases read the entry point `lm_eval.models`, in `load_plugins`; where it exists, nothing is registered here. A
name that is already registered is left alone.
"""

from __future__ import annotations

import functools
import sys

from lm_eval_duel.harness import MODELS

TYPE_CHECKING = False  # `typing` is not imported: every interpreter that starts imports this file
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from importlib.abc import Loader
    from importlib.machinery import ModuleSpec
    from pathlib import Path
    from types import ModuleType
    from typing import Any

REGISTERED = "lm_eval.models"  # once it is imported, the built-in models are registered


def register() -> None:
    """Register the models with lm-eval, now."""
    import lm_eval.models  # noqa: F401  first, so that the built-in models are registered too
    from lm_eval.api.registry import model_registry

    for name, target in MODELS.items():
        if name not in model_registry:
            model_registry.register(name, target=target)


def install() -> None:
    """Register the models as soon as `lm_eval.models` is imported, unless lm-eval does."""
    if REGISTERED in sys.modules:
        register_without_loader()
    elif not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


def register_without_loader() -> None:
    """Register the models if this release of lm-eval does not read entry points."""
    from lm_eval.api import registry

    if not hasattr(registry, "load_plugins"):
        register()


# ---------------------------------------------------------------- errors of lm-eval that can say more


def explain_models() -> None:
    """Let lm-eval's error for an unknown model name ours, if it is nearly one."""
    from lm_eval.api import registry

    original = registry.get_model

    @functools.wraps(original)
    def get_model(model_name: str) -> Any:
        try:
            return original(model_name)
        except ValueError as error:
            from difflib import get_close_matches

            near = get_close_matches(str(model_name).lower(), MODELS, n=1, cutoff=0.7)
            if not near:
                raise
            raise ValueError(f"{error}. Did you mean '{near[0]}'?") from error

    registry.get_model = get_model


def explain_pairs() -> None:
    """Let lm-eval's error for a model name where it expects key=value say what to write."""
    from lm_eval._cli import utils

    original = utils.key_val_to_dict

    @functools.wraps(original)
    def key_val_to_dict(args: str) -> dict[str, Any]:
        try:
            pairs: dict[str, Any] = original(args)
        except ValueError as error:
            from lm_eval_duel.demo import NAMES

            first, _, _ = args.partition(",")
            is_model = first in NAMES or ("/" in first and "=" not in first)
            if not is_model:  # --gen_kwargs and --metadata are read here, too
                raise
            remedy = f"Write pretrained={first}, or use lm-eval-duel run, which takes the name alone."
            raise ValueError(f"{error}. {remedy}") from error
        return pairs

    utils.key_val_to_dict = key_val_to_dict


def prepare_tasks() -> None:
    """Load the tasks of our models before the model.

    lm-eval's error for an unknown task says where ours are, if it is one of them, which of the user's is nearest, and
    what could not be read. With our models it is an error of this package, which has no traceback.
    """
    from lm_eval.config.evaluate_config import EvaluatorConfig
    from yaml import YAMLError

    original = EvaluatorConfig.process_tasks

    @functools.wraps(original)
    def process_tasks(self: Any, *arguments: Any, **options: Any) -> Any:
        is_ours = self.model in MODELS
        try:
            if is_ours and self.tasks:
                from lm_eval_duel.tasks.named import split

                self.tasks = split(self.tasks)  # lm-eval takes what follows a last comma for a task without a name
                _require_mentioned(self.tasks, _folders(self.include_path))
            manager = original(self, *arguments, **options)
        except ValueError as error:
            _, is_about_tasks, names = str(error).partition("Tasks not found: ")
            if not is_about_tasks:
                raise
            from lm_eval_duel.tasks.named import advice

            sentences = advice(names.split(", "), _folders(self.include_path))
            if is_ours:
                raise _refusal(f"{error}.{sentences}") from None
            if not sentences:
                raise
            raise ValueError(f"{error}.{sentences}") from error
        except (OSError, YAMLError) as error:  # of a task file that --tasks names, or of one that it includes
            if not is_ours:
                raise
            from lm_eval_duel.errors import DuelError, about_file
            from lm_eval_duel.tasks import named

            try:
                for name in self.tasks:
                    named.check(name)
            except DuelError as named_error:
                raise _refusal(str(named_error)) from None
            reason = about_file(error) if isinstance(error, OSError) else f"{' '.join(str(error).split())}."
            raise _refusal(f"A task file cannot be read: {reason}") from None
        if is_ours:
            from lm_eval_duel.harness.preparation import prepare

            prepare(self, manager)
        return manager

    EvaluatorConfig.process_tasks = process_tasks


def _refusal(message: str) -> Exception:
    """An error of this package, which ends lm_eval's command with one line."""
    from lm_eval_duel.errors import UsageError
    from lm_eval_duel.harness.patches import in_lm_evals_command

    in_lm_evals_command()
    return UsageError(message)


def _require_mentioned(names: Sequence[str], folders: Sequence[str | Path]) -> None:
    """Raise lm-eval's error for a name that is no task's, before it parses all of its task files."""
    from lm_eval_duel.tasks.named import not_mentioned, tasks_in

    missing = not_mentioned(tasks_in(folders), names)
    if missing:
        raise ValueError(f"Tasks not found: {', '.join(missing)}")


def _folders(include_path: str | Path | Sequence[str | Path] | None) -> list[str | Path]:
    """The folders of --include_path, which may be none, one or several."""
    import pathlib

    if not include_path:
        return []
    if isinstance(include_path, str | pathlib.Path):
        return [include_path]
    return [*include_path]


# ---------------------------------------------------------------- the table of results


def add_our_table() -> None:
    """Let lm-eval's table of the results of our models be followed by ours: it has no place for kinds and errors.

    The command takes this function before it makes a model, so it cannot be changed with the others (patches.py).
    """
    from lm_eval import utils

    original = utils.make_table

    @functools.wraps(original)
    def make_table(result_dict: dict[str, Any], column: str = "results", *arguments: Any, **options: Any) -> str:
        table: str = original(result_dict, column, *arguments, **options)
        is_last = column == "groups" or "groups" not in result_dict
        if not is_last or "duel" not in result_dict.get("config", {}):
            return table
        ours = _kinds_and_errors(result_dict)
        return f"{table}\n{ours}" if ours else table

    utils.make_table = make_table


def _kinds_and_errors(results: dict[str, Any]) -> str:
    """Our own table of a run; empty if something goes wrong, which is logged."""
    import logging

    from lm_eval_duel.console.command_line import with_nulls
    from lm_eval_duel.errors import DuelError
    from lm_eval_duel.results.run_summary import summary

    try:
        return summary(with_nulls(results))
    except DuelError as error:  # the results are saved already
        logging.getLogger("lm_eval.duel_mdm").warning("No table of kinds and errors: %s", error)
        return ""


# ---------------------------------------------------------------- waiting for modules

AWAITED = {
    "lm_eval.api.registry": explain_models,
    "lm_eval._cli.utils": explain_pairs,
    "lm_eval.config.evaluate_config": prepare_tasks,
    "lm_eval.utils": add_our_table,
    REGISTERED: register_without_loader,
}


class _Finder:
    """Wraps the loaders of awaited modules; finds no module itself."""

    def __init__(self) -> None:
        self.awaited = dict(AWAITED)

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name not in self.awaited:
            return None
        follow = self.awaited.pop(name)  # first: `find_spec` below asks this finder, too
        if not self.awaited:
            sys.meta_path.remove(self)
        from importlib.util import find_spec

        spec = find_spec(name)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader, follow)  # type: ignore[assignment]  # in all but its class
        return spec


class _Loader:
    """The real loader of a module, followed by a call."""

    def __init__(self, loader: Loader, follow: Callable[[], None]):
        self.loader = loader
        self.follow = follow

    def __getattr__(self, name: str) -> Any:
        # for `inspect`, `importlib.resources` and others that ask a loader for more
        return getattr(self.loader, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self.loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        # The module shows its real loader, as if this one had never been there.
        assert module.__spec__ is not None  # it has just been found
        module.__spec__.loader = self.loader
        module.__loader__ = self.loader
        self.loader.exec_module(module)
        try:
            self.follow()
        except Exception as error:  # whatever a later lm-eval changes, its other models must still work
            print(f"lm_eval_duel: {self.follow.__name__} failed: {error!r}", file=sys.stderr)
