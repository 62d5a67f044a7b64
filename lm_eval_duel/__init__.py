"""Exact likelihood of masked diffusion language models: a Python library, and a model of lm-evaluation-harness.

    from lm_eval_duel import Duel, Window, load

Public names are imported when they are first used (PEP 562). The registration hook imports this package at every
interpreter start, so this file imports nothing, not even `typing`.
"""

TYPE_CHECKING = False  # as typing.TYPE_CHECKING: type checkers read it as True
if TYPE_CHECKING:
    from lm_eval_duel.core.denoiser import Denoiser as Denoiser
    from lm_eval_duel.core.scores import Sample as Sample
    from lm_eval_duel.core.scores import Score as Score
    from lm_eval_duel.core.windows import Window as Window
    from lm_eval_duel.denoisers import load as load
    from lm_eval_duel.denoisers import load_tokenizer as load_tokenizer
    from lm_eval_duel.errors import DuelError as DuelError
    from lm_eval_duel.errors import RuleStalled as RuleStalled
    from lm_eval_duel.errors import UsageError as UsageError
    from lm_eval_duel.estimators.duel import Autoregressive as Autoregressive
    from lm_eval_duel.estimators.elbo import Elbo as Elbo
    from lm_eval_duel.estimators.lattice import Lattice as Lattice
    from lm_eval_duel.estimators.noised_elbo import NoisedElbo as NoisedElbo
    from lm_eval_duel.estimators.sampled_confidence import SampledConfidence as SampledConfidence
    from lm_eval_duel.estimators.sampled_order import SampledOrder as SampledOrder
    from lm_eval_duel.estimators.two_phase import TwoPhase as TwoPhase
    from lm_eval_duel.library.duel import Duel as Duel
    from lm_eval_duel.library.results import GeneratedText as GeneratedText
    from lm_eval_duel.library.results import TextEstimate as TextEstimate
    from lm_eval_duel.library.results import TextScore as TextScore
    from lm_eval_duel.library.training import DuelCallback as DuelCallback
    from lm_eval_duel.library.training import planned_tokens as planned_tokens
    from lm_eval_duel.library.training import training_metrics as training_metrics
    from lm_eval_duel.results.text_scores import compare as compare
    from lm_eval_duel.results.text_scores import pool as pool
    from lm_eval_duel.rules import Decision as Decision
    from lm_eval_duel.rules import Rule as Rule

    __version__: str

_MODULES = {  # public names by the module that defines them
    "core.denoiser": "Denoiser",
    "core.scores": "Sample Score",
    "core.windows": "Window",
    "denoisers": "load load_tokenizer",
    "errors": "DuelError RuleStalled UsageError",
    "estimators.duel": "Autoregressive",
    "estimators.elbo": "Elbo",
    "estimators.noised_elbo": "NoisedElbo",
    "estimators.lattice": "Lattice",
    "estimators.sampled_confidence": "SampledConfidence",
    "estimators.sampled_order": "SampledOrder",
    "estimators.two_phase": "TwoPhase",
    "library.duel": "Duel",
    "library.results": "GeneratedText TextEstimate TextScore",
    "library.training": "DuelCallback planned_tokens training_metrics",
    "results.text_scores": "compare pool",
    "rules": "Decision Rule",
}
_HOMES = {name: f"lm_eval_duel.{module}" for module, names in _MODULES.items() for name in names.split()}

__all__ = sorted(_HOMES)


def __getattr__(name: str) -> object:
    """Import a public name on first use."""
    if name == "__version__":
        from importlib.metadata import version

        value: object = version("lm_eval_duel")
    elif name in _HOMES:
        from importlib import import_module

        try:
            value = getattr(import_module(_HOMES[name]), name)
        except AttributeError as error:  # `from lm_eval_duel import ...` would hide it
            raise ImportError(f"Cannot import {name} from {_HOMES[name]}: {error}") from error
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, "__version__"})
