"""The READMEs and the pages of docs/, for tests that hold them to the code."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
READMES = ["README.md", "examples/paper/README.md", "tests/README.md"]
READMES += [f"task_configs/{folder}/README.md" for folder in ("benchmarks", "proteins")]
PAGES = [*(ROOT / name for name in READMES), *sorted((ROOT / "docs").glob("*.md"))]


def read(name):
    """The text of a page, such as README.md or docs/rules.md."""
    return (ROOT / name).read_text(encoding="utf-8")


def blocks(text, language):
    """The code blocks of one language, in order; those after a comment `<!-- not run: why -->` left out."""
    found = re.findall(rf"(<!-- not run: .+? -->\n+)?^```{language}\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    return [code for skipped, code in found if not skipped]


def section(text, heading):
    """The text below a heading such as "## Bad input", up to the next heading of its level or above."""
    level = len(heading.split(" ")[0])
    parts = re.split(rf"^{re.escape(heading)}\n", text, flags=re.MULTILINE)
    assert len(parts) == 2, f"{heading!r} stands {len(parts) - 1} times"
    return re.split(rf"^#{{1,{level}}} ", parts[1], flags=re.MULTILINE)[0]


def rows(text):
    """The cells of all table rows in a text, heads and rules left out."""
    tables = re.findall(r"((?:^ *\|.*\|\n?)+)", text, re.MULTILINE)
    return [
        [cell.strip() for cell in line.strip().strip("|").split(" | ")]
        for table in tables
        for line in table.strip().splitlines()[2:]
    ]


def names(text):
    """The words of letters, digits and underscores in `backticks`; of `name=value`, the name."""
    return {name.split("=")[0].split(":")[0] for name in re.findall(r"`([\w=.:]+)`", text)}


def anchors(text):
    """The anchors of a page's headings, as GitHub makes them."""
    found = set()
    for heading in re.findall(r"^#+ (.*)$", re.sub(r"```.*?```", "", text, flags=re.DOTALL), re.MULTILINE):
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower()
        found.add(re.sub(r"[^\w\- ]", "", plain).replace(" ", "-"))
    return found
