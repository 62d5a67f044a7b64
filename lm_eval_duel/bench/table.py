"""The figures of `bench` as text."""

from __future__ import annotations

from typing import Any

from lm_eval_duel.bench.options import ARMS, CACHED, TWO_PHASE
from lm_eval_duel.tables import plain_table

IDLE_LOAD = 1.0  # a higher load average before the start means that other programs are running


def table(figures: dict[str, Any]) -> str:
    """The figures as text."""
    rows = []
    for arm in ARMS:
        seconds, peak = figures[f"{arm}_s"], figures.get(f"peak_bytes_{arm}")
        if seconds is None:
            continue
        forwards, network_rows = figures["calls"][arm]
        rows.append(
            (
                arm,
                f"{seconds:.3f}",
                f"{figures['tokens'] / seconds:,.0f}",
                "" if forwards is None else f"{forwards:,}",
                f"{network_rows:,}",
                f"{figures['token_rows'][arm]:,}",
                "" if arm in ("forwards", TWO_PHASE) else f"{figures['nfe']:,}",
                "" if peak is None else f"{peak / 2**20:,.0f}",
                f"{figures['textbook_over'][arm]:.2f}",
                figures.get(f"{arm}_scaled") or "",
            )
        )
    header = ("arm", "seconds", "tokens/s", "forwards", "rows", "token-rows", "NFE", "peak MiB", "textbook / arm", "")
    return "\n".join([_title(figures), "", plain_table(header, rows), "", *_comparison(figures)])


def _title(figures: dict[str, Any]) -> str:
    settings, millions = figures["settings"], figures["parameters"] / 1e6
    cache = f", cache={settings['cache']}" if settings["cache"] else ""
    return (
        f"{settings['pretrained']}, {millions:,.1f} M parameters, {settings['dtype']} on {figures['device']}: "
        f"{settings['windows']} x {settings['length']} positions, block {figures['block']}, {figures['rule']}{cache}; "
        f"median of {settings['repeats']}"
    )


def _comparison(figures: dict[str, Any]) -> list[str]:
    difference, near_ties, compared = figures["max_abs_diff_nats"], figures["near_ties"], figures["compared"]
    waits = figures["host_syncs"]
    lines = [
        f"overhead of ours over its network calls alone: {figures['overhead']:+.1%}",
        f"waits of the host for the device: {waits['per_call']:.1f} per network call of ours",
    ]
    if figures["load_before"] > IDLE_LOAD:
        lines.insert(0, f"the load average before the start was {figures['load_before']:.1f}: times are unreliable")
    for name in ("textbook_kv", CACHED, "uncached"):
        if figures[f"ratio_{name}"] is not None:
            lines.append(f"{name} / ours: {figures[f'ratio_{name}']:.2f}")
    if (share := figures["two_phase_over_ours"]) is not None:
        sample, cost = figures["two_phase_sample"], figures["token_rows"]
        lines.append(
            f"two_phase: {share:.1%} of the time of ours, {cost[TWO_PHASE] / cost['ours']:.1%} of its token-rows; "
            f"{sample['sampled']} of {sample['blocks']} blocks also without the cache"
        )
    nats = (
        "every window has changed picks"
        if difference is None
        else f"largest difference {difference:.1e} nats in windows without changed picks"
    )
    ties = f"{near_ties} near ties in {figures['windows_with_near_ties']} windows"
    lines.append(
        f"ours against {compared['with']} in full on {compared['windows']} x {compared['positions']} positions: "
        f"{nats}; {'near ties not known' if near_ties is None else ties}; "
        f"{figures['changed_picks']} changed picks in {figures['windows_with_changed_picks']} windows"
    )
    if figures["flops_per_s"] is not None:
        rate, peak = figures["flops_per_s"] / 1e12, figures["matrix_flops_per_s"] / 1e12
        lines.append(
            f"ours: {rate:.1f} TFLOP/s, {rate / peak:.0%} of the {peak:.0f} TFLOP/s of a bfloat16 matrix product here"
        )
    return lines
