"""Draw gap.png, the picture of the README, from the bundled report: python scripts/draw_gap.py"""

import json
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

ROOT = Path(__file__).resolve().parents[1]
REPORT = ROOT / "lm_eval_duel" / "demo" / "report" / "report.json"
MODELS = {  # the name, and the block of the ELBO that stands for it in the report
    "demo-bd": ("demo-bd (block diffusion)", "4"),
    "demo-mdm": ("demo-mdm (masked diffusion)", "none"),
}
BLUE, ORANGE, GREEN, GREY = "#0072b2", "#d55e00", "#009e73", "#444444"


def main() -> None:
    rows = json.loads(REPORT.read_text(encoding="utf-8"))["tasks"]["sotu"]["rows"]

    def row(model: str, estimator: str | None = None, rule: str | None = None, block: str | None = None) -> dict:
        (found,) = [
            row
            for row in rows
            if row["model"] == model
            and (estimator is None or row["estimator"] == estimator)
            and (rule is None or row["rule"] == rule)
            and (block is None or row["block"] == block)
        ]
        return found

    twin = row("demo-ar")["value"]
    figure, axes = plt.subplots(figsize=(9, 2.4), dpi=150)
    axes.axvline(twin, color=GREY, linestyle=":", zorder=1, label=f"autoregressive twin, {twin:.2f}")
    for place, (model, (_, elbo_block)) in enumerate(MODELS.items()):
        elbo = row(model, "elbo", block=elbo_block)
        duel = row(model, "duel", "greedy:k=1", "4")["value"]
        mixture = row(model, "mixture", block="4")["value"]
        axes.plot([twin, elbo["value"]], [place, place], color="#dddddd", linewidth=9, solid_capstyle="butt", zorder=2)
        marks = (
            (elbo["value"], f"≤ {elbo['value']:.2f} ± {elbo['stderr']:.2f}", BLUE, "<", 0.3),
            (duel, f"{duel:.2f}", ORANGE, "o", -0.22),
            (mixture, f"{mixture:.2f}", GREEN, "s", 0.3),
        )
        for number, text, color, marker, shift in marks:
            axes.plot(number, place, marker, color=color, markersize=9, zorder=3)
            axes.text(number, place + shift, text, ha="center", va="center", color=color)
    for label, color, marker in (
        ("ELBO (upper bound)", BLUE, "<"),
        ("DUEL, greedy (exact)", ORANGE, "o"),
        ("mixture of orders (exact)", GREEN, "s"),
    ):
        axes.plot([], [], marker, color=color, label=label)
    axes.set_yticks(range(len(MODELS)), [name for name, _ in MODELS.values()])
    axes.set_ylim(len(MODELS) - 0.5, -0.5)
    axes.set_xlim(31, 58)
    axes.set_xlabel("perplexity per token on sotu (lower is better)")
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(left=False)
    axes.legend(loc="lower right", bbox_to_anchor=(1.01, 1.0), ncols=4, frameon=False, fontsize=9, columnspacing=1.2)
    figure.savefig(ROOT / "docs" / "images" / "gap.png", bbox_inches="tight")


if __name__ == "__main__":
    main()
