"""The switch: estimator=duel | elbo | elbo_exact | mixture | oracle | exact.

All of them take the same windows; only which lanes are evaluated, and how nats combine, differ (estimator.py).
"""

from __future__ import annotations

from lm_eval_duel.denoisers.base import Denoiser
from lm_eval_duel.estimators.base import Estimator
from lm_eval_duel.estimators.duel import Autoregressive, Duel
from lm_eval_duel.estimators.elbo import Elbo
from lm_eval_duel.estimators.lattice import Lattice
from lm_eval_duel.options import Options


def make(denoiser: Denoiser, options: Options) -> Estimator:
    """The estimator that the model args ask for; raises DuelError where this network has none of this kind."""
    shared = {
        "batch_size": options.rows,
        "max_batch_size": options.max_batch_size,
        "grid": options.grid,
        "traced": options.trace is not None,
    }
    if options.estimator == "duel":
        return Duel(denoiser, options.rule, options.block, **shared)
    if options.estimator == "exact":
        return Autoregressive(denoiser, **shared)
    if options.estimator == "elbo":
        return Elbo(
            denoiser,
            options.elbo_block,
            samples=options.mc_samples,
            form=options.elbo_form,
            eps=options.elbo_eps,
            seed=options.draw_seed,
            **shared,
        )
    follow = options.lattice_rules
    if follow is None:
        follow = (options.rule,) if options.rule.state_only else ()
    return Lattice(denoiser, options.block, value=options.estimator, follow=follow, **shared)
