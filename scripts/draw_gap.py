"""Draw gap.png, the picture of the README, from the bundled report: python scripts/draw_gap.py"""

import json
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

ROOT = Path(__file__).resolve().parents[1]
REPORT = ROOT / "lm_eval_duel" / "demo" / "report" / "report.json"
MODELS = {"demo-bd": "demo-bd (block diffusion)", "demo-mdm": "demo-mdm (masked diffusion)"}
GREY = "#444444"
MARKS = {  # an estimator in the legend: its colour, its marker, and the place of its number
    "ELBO, all orders (upper bound)": ("#0072b2", "<", 0.3),
    "greedy (exact)": ("#d55e00", "o", -0.22),
    "random order (exact)": ("#009e73", "s", 0.3),
}


def main() -> None:
    rows = json.loads(REPORT.read_text(encoding="utf-8"))["tasks"]["sotu"]["rows"]

    def row(**wanted: str) -> dict:
        [found] = [row for row in rows if wanted.items() <= row.items()]
        return found

    twin = row(model="demo-ar")["value"]
    figure, axes = plt.subplots(figsize=(9, 2.4), dpi=150)
    axes.axvline(twin, color=GREY, linestyle=":", zorder=1, label=f"autoregressive twin, {twin:.2f}")
    for place, model in enumerate(MODELS):
        elbo = row(model=model, estimator="elbo_exact", block="4")
        duel = row(model=model, estimator="duel", rule="greedy:k=1", block="4")
        mixture = row(model=model, estimator="mixture", block="4")
        axes.plot([twin, elbo["value"]], [place, place], color="#dddddd", linewidth=9, solid_capstyle="butt", zorder=2)
        for of, (color, marker, shift) in zip((elbo, duel, mixture), MARKS.values(), strict=True):
            text = f"{'≤ ' if of['bound'] else ''}{of['value']:.2f}"
            axes.plot(of["value"], place, marker, color=color, markersize=9, zorder=3)
            axes.text(of["value"], place + shift, text, ha="center", va="center", color=color)
    for label, (color, marker, _) in MARKS.items():
        axes.plot([], [], marker, color=color, label=label)
    axes.set_yticks(range(len(MODELS)), list(MODELS.values()))
    axes.set_ylim(len(MODELS) - 0.5, -0.5)
    axes.set_xlim(31, 58)
    axes.set_xlabel("perplexity per token on sotu, in blocks of 4 (lower is better)")
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(left=False)
    axes.legend(loc="lower right", bbox_to_anchor=(1.01, 1.0), ncols=4, frameon=False, fontsize=9, columnspacing=1.2)
    figure.savefig(ROOT / "docs" / "images" / "gap.png", bbox_inches="tight")


if __name__ == "__main__":
    main()
