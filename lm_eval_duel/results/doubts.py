"""Doubts in the values of a run, from what it computed twice, as sentences.

They stand below the table of the run and, in a report, at its values, which would otherwise look sound.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lm_eval_duel.errors import counted

FULL_PRECISION = ("float32", "float64")


def doubts(duel: Mapping[str, Any]) -> list[str]:
    """The sentences on a run. `duel`: `config.duel` of its results file."""
    return [sentence for sentence in (rule_doubt(duel), verify_doubt(duel)) if sentence]


def remarks(duel: Mapping[str, Any]) -> list[str]:
    """The doubts, and that `verify` ended early: then nobody knows whether there is one."""
    sentences = doubts(duel)
    failures = duel.get("verify_failed")
    if failures:
        count = (duel.get("verify") or {}).get("windows", 0)
        sentences.append(f"verify ended early, after {counted(count, 'window')}: {'; '.join(failures)}")
    return sentences


def rule_doubt(duel: Mapping[str, Any]) -> str:
    """A sentence on decisions of a user's rule that came out otherwise; empty if there are none."""
    differing = duel.get("decisions_differing")
    if not differing:
        return ""
    return (
        f"{differing} of {duel.get('decisions_checked')} decisions of the rule {duel.get('rule')} came out otherwise "
        "when it was asked again. Float noise decides near ties, such as a comparison with the mean in a row of masks. "
        "If the rule reads other lanes or the width of the tensor, or is not deterministic, no value is a likelihood. "
        "To find out, let it return a decision_margin, or run with verify=8 or lm-eval-duel audit"
    )


def verify_doubt(duel: Mapping[str, Any]) -> str:
    """A sentence on the windows that `verify` found different; empty if there are none, or the dtype explains them."""
    verified = duel.get("verify") or {}
    differing = verified.get("differing_windows")
    if not differing or duel.get("dtype") not in FULL_PRECISION:
        return ""
    picks = verified.get("changed_picks")
    of_picks = f"; in all, {counted(picks, 'pick')} other than the rule's" if picks else ""
    return (
        f"verify: {differing} of {verified.get('windows')} windows differ by more than float32 noise "
        f"({verified.get('where')}{of_picks}), so no value of this run is to be trusted"
    )
