"""Take page.png, the picture of the page of a report, from the bundled results: python scripts/draw_page.py

Needs Chromium and Pillow, and the tests' helpers on the path.
"""

import base64
import subprocess
import sys
import tempfile
from pathlib import Path

from PIL import Image

ROOT = Path(__file__).resolve().parents[1]
WIDTH, HEIGHT, SHOWN, COLOURS = 1400, 2560, 940, 256


def main() -> None:
    sys.path.insert(0, str(ROOT / "tests" / "helpers"))
    import browser

    results = ROOT / "lm_eval_duel" / "demo" / "results"
    with tempfile.TemporaryDirectory() as folder:
        site = Path(folder) / "site"
        arguments = [
            "report",
            results,
            "--page",
            "--traces",
            results / "traces",
            "--title",
            "The bundled models on sotu",
        ]
        subprocess.run([sys.executable, "-m", "lm_eval_duel", *arguments, "--out", site], check=True, cwd=ROOT)
        window = browser.Browser(Path(folder) / "profile", WIDTH, HEIGHT)
        window.call("Emulation.setDeviceMetricsOverride", width=WIDTH, height=HEIGHT, deviceScaleFactor=1, mobile=False)
        window.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": "light"}])
        window.open(site / "index.html")
        move = 'const slider = document.getElementById("step"); slider.value = 62;'
        window.run(f'(() => {{ {move} slider.dispatchEvent(new Event("input")) }})()')
        (Path(folder) / "shot.png").write_bytes(base64.b64decode(window.call("Page.captureScreenshot")["data"]))
        window.close()
        image = Image.open(Path(folder) / "shot.png").convert("RGB")
        image = image.resize((SHOWN, SHOWN * HEIGHT // WIDTH), Image.Resampling.LANCZOS)
        image = image.quantize(COLOURS, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE)
        image.save(ROOT / "docs" / "images" / "page.png", optimize=True)


if __name__ == "__main__":
    main()
