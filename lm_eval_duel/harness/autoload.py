"""Registration: `lm_eval --model duel-mdm` works once this package is installed.

lm-eval 0.4.13 does not discover plugins, so a `.pth` file of one line in site-packages calls `install()`
when the interpreter starts. It imports nothing: it puts a finder on `sys.meta_path`, which waits for `lm_eval.models`
to be imported, registers the name `duel-mdm` (a string; neither torch nor transformers is imported) and removes itself.
Later releases will read the entry point `lm_eval.models`. A name that is already registered is left alone.
"""

import sys

MODELS = {"duel-mdm": "lm_eval_duel.harness.lm:DuelMDM"}
AWAITED = "lm_eval.models"


def register():
    """Register the models with lm-eval, now."""
    import lm_eval.models  # noqa: F401  first, so that the built-in models are registered too
    from lm_eval.api.registry import model_registry

    for name, target in MODELS.items():
        if name not in model_registry:
            model_registry.register(name, target=target)


def install():
    """Register the models as soon as `lm_eval.models` is imported."""
    if AWAITED in sys.modules:
        register()
    elif not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


class _Finder:
    """Wraps the loader of `lm_eval.models`; finds no module itself."""

    def find_spec(self, name, path=None, target=None):
        if name != AWAITED:
            return None
        sys.meta_path.remove(self)
        from importlib.util import find_spec

        spec = find_spec(name)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader)
        return spec


class _Loader:
    """The real loader of `lm_eval.models`, followed by `register()`."""

    def __init__(self, loader):
        self.loader = loader

    def __getattr__(self, name):
        return getattr(self.loader, name)

    def create_module(self, spec):
        return self.loader.create_module(spec)

    def exec_module(self, module):
        module.__spec__.loader = module.__loader__ = self.loader
        self.loader.exec_module(module)
        try:
            register()
        except Exception as error:  # lm-eval may change: other models must still work
            print(f"lm_eval_duel: could not register {', '.join(MODELS)}: {error!r}", file=sys.stderr)
