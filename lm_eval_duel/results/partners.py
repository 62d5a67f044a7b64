"""Which row another is compared with: the ELBO of a DUEL row, and the row without a cache of one with."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from lm_eval_duel.results.read import NO_CACHE
from lm_eval_duel.results.records import Row
from lm_eval_duel.results.rows import NON_IDENTITY_KEYS

# entries of a spec that belong to the estimator, as NON_IDENTITY_KEYS
OF_ESTIMATOR = {"block", "grid", "rule_code", "cheap_cache"}
CONVENTIONS = {"special_tokens", "windows", "max_length", "sigma"}  # entries in which published figures may differ


def elbo(duel: Row, rows: Sequence[Row], as_published: bool = False) -> tuple[int | None, str]:
    """The number of the row that holds the ELBO of a DUEL row, or None and the reason.

    The ELBO is of the same model under the same spec, except for the estimator's own entries. It covers the whole
    target for bidirectional networks and the trained blocks for block-causal ones, where the mean over all orders
    (elbo_exact) may replace a Monte Carlo ELBO. Bounds are preferred, then more draws. `as_published`: without an ELBO
    of the same spec, accept one with other windows or scored positions, and return the differences.
    """
    causal = duel.run.duel.get("attention") in ("block_causal", "causal_prefix")
    wanted, kinds = (duel.run.block, ("elbo", "elbo_exact")) if causal else ("none", ("elbo",))
    ignored = NON_IDENTITY_KEYS | OF_ESTIMATOR
    nearest, apart = _nearest(duel, rows, lambda row: row.estimator in kinds and row.block == wanted, ignored)
    if not nearest:
        return None, f"no ELBO (estimator=elbo, elbo_block={wanted})"
    differences = "; ".join(apart.values())
    if apart and not (as_published and set(apart) <= CONVENTIONS):
        return None, f"no ELBO of the same spec: {differences}"

    def worth(n: int) -> tuple:
        draws = rows[n].run.spec.get("mc_samples", "")
        return not rows[n].eps, rows[n].estimator == "elbo", float(draws) if draws not in ("", "none") else 1.0

    return max(nearest, key=worth), f"as published, of another convention: {differences}" if apart else ""


def elbo_in_words(elbo: Row) -> str:
    """Describe an ELBO and its standard error."""
    spec, stderr = elbo.run.spec, elbo.stderr
    if elbo.estimator == "elbo_exact":
        text = f"the mean over all orders in blocks of {elbo.block} (elbo_exact; there is no Monte Carlo ELBO)"
    else:
        form = f", elbo_form={spec['elbo_form']}" if "elbo_form" in spec else ""
        eps = f", elbo_eps={elbo.eps:g} (above 0: NO bound)" if elbo.eps else ""
        error = f", standard error {stderr:.2g}" if stderr is not None else ", no standard error"
        text = f"Monte Carlo, mc_samples={spec.get('mc_samples', '?')}{form}, elbo_block={elbo.block}{eps}{error}"
    return f"ELBO of {elbo.model}{f' ({elbo.variant})' if elbo.variant else ''}: {text}"


def uncached(row: Row, rows: Sequence[Row]) -> tuple[int | None, str]:
    """The number of the row of the same network, estimator, rule and spec without a cache, or None and the reason."""
    kept = {"estimator"} if row.estimator == "elbo" else NON_IDENTITY_KEYS  # the draws of an ELBO are part of its value
    alike = (row.estimator, row.rule)
    nearest, apart = _nearest(
        row, rows, lambda other: other.cache == NO_CACHE and (other.estimator, other.rule) == alike, kept | {"cache"}
    )
    if not nearest:
        return None, "there is no result of this network and rule with cache=none"
    if apart:
        return None, f"the result with cache=none is of another spec: {'; '.join(apart.values())}"
    return nearest[0], ""


def _nearest(
    row: Row, rows: Sequence[Row], fits: Callable[[Row], bool], ignored: Collection[str]
) -> tuple[list[int], dict[str, str]]:
    """The numbers of the fitting rows of a row's model whose specs are nearest to its own, and how they differ."""
    here = row.run.spec
    apart: dict[int, dict[str, str]] = {}
    for n, other in enumerate(rows):
        if other.run.key == row.run.key and fits(other):
            there = other.run.spec
            apart[n] = {
                key: f"{key}={there.get(key, 'not set')} there, {here.get(key, 'not set')} here"
                for key in sorted({*here, *there} - set(ignored))
                if here.get(key, "not set") != there.get(key, "not set")
            }
    least = min(apart.values(), key=len, default={})
    return [n for n, differences in apart.items() if differences == least], least
