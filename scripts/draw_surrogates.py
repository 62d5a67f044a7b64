"""Draw docs/images/surrogates.png from the first table of docs/training.md: python scripts/draw_surrogates.py"""

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

DOCS = Path(__file__).resolve().parents[1] / "docs"
BLUE, ORANGE = "#0072b2", "#d55e00"


def main() -> None:
    table = (DOCS / "training.md").read_text(encoding="utf-8").split("**Texts of `rule=greedy`**")[1].split("![")[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines() if "±" in line]
    figure, axes = plt.subplots(figsize=(9, 2.8), dpi=130)
    for shift, column, color, name in ((-0.12, 1, BLUE, "demo-mdm"), (0.12, 5, ORANGE, "demo-bd")):
        bias, error = zip(*(map(float, row[column].split("±")) for row in rows), strict=True)
        spread, places = [float(row[column + 1]) for row in rows], [n + shift for n in range(len(rows))]
        axes.errorbar(bias, places, xerr=spread, fmt="none", ecolor=color, alpha=0.3, linewidth=5)
        axes.errorbar(bias, places, xerr=error, fmt="o", color=color, label=name, capsize=3)
    axes.axvline(0, color="#444444", linestyle=":")
    axes.set_yticks(range(len(rows)), [row[0] for row in rows])
    axes.invert_yaxis()
    axes.set_xlabel("nats above the exact log p(text); thin: standard error of the mean, wide: sd of a draw")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="lower left")
    figure.savefig(DOCS / "images" / "surrogates.png", bbox_inches="tight")


if __name__ == "__main__":
    main()
