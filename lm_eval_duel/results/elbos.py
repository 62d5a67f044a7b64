"""Which ELBO the gap of a DUEL row uses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from lm_eval_duel.results.records import Row
from lm_eval_duel.results.rows import VARIES

OF_ESTIMATOR = {"block", "grid", "rule_code", "cheap_cache"}  # entries of a spec that belong to it, as rows.VARIES
CONVENTIONS = {"special_tokens", "windows", "max_length", "sigma"}  # entries in which published figures may differ


def of(duel: Row, shown: Sequence[Row], as_published: bool = False) -> tuple[int | None, str]:
    """The number of the row that holds the ELBO of a DUEL row, or None and the reason.

    The ELBO is of the same model under the same spec, except for the estimator's own entries. It covers the whole
    target for bidirectional networks and the trained blocks for block-causal ones, where the mean over all orders
    (elbo_exact) may replace a Monte Carlo ELBO. Bounds are preferred, then more draws. `as_published`: without an ELBO
    of the same spec, accept one with other windows or scored positions, and return the differences.
    """
    causal = duel.run.duel.get("attention") in ("block_causal", "causal_prefix")
    wanted, kinds = (duel.run.block, ("elbo", "elbo_exact")) if causal else ("none", ("elbo",))
    fitting = {
        n: _other_spec(row.run.spec, duel.run.spec)
        for n, row in enumerate(shown)
        if row.run.key == duel.run.key and row.estimator in kinds and row.block == wanted
    }
    if not fitting:
        return None, f"no ELBO (estimator=elbo, elbo_block={wanted})"
    same = [n for n, apart in fitting.items() if not apart]
    other = min(fitting.values(), key=len)
    if not same and not (as_published and set(other) <= CONVENTIONS):
        return None, f"no ELBO of the same spec: {'; '.join(other.values())}"

    def worth(n: int) -> tuple:
        draws = shown[n].run.spec.get("mc_samples", "")
        return not shown[n].eps, shown[n].estimator == "elbo", float(draws) if draws not in ("", "none") else 1.0

    if same:
        return max(same, key=worth), ""
    nearest = [n for n, apart in fitting.items() if apart == other]
    return max(nearest, key=worth), f"as published, of another convention: {'; '.join(other.values())}"


def _other_spec(elbo: Mapping[str, str], duel: Mapping[str, str]) -> dict[str, str]:
    """The differences of two specs, the estimators' entries aside: key -> sentence."""
    keys = sorted({*elbo, *duel} - VARIES - OF_ESTIMATOR)
    pairs = [(key, elbo.get(key, "not set"), duel.get(key, "not set")) for key in keys]
    return {key: f"{key}={there} there, {here} here" for key, there, here in pairs if here != there}


def in_words(elbo: Row) -> str:
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
