"""The READMEs and the pages of docs/, for tests that hold them to the code."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
READMES = [
    "README.md",
    "examples/paper/README.md",
    "tests/README.md",
    "task_configs/benchmarks/README.md",
    "task_configs/proteins/README.md",
]
PAGES = [*(ROOT / name for name in READMES), *sorted((ROOT / "docs").glob("*.md"))]


def read(name):
    """The text of a page, such as README.md or docs/rules.md."""
    return (ROOT / name).read_text(encoding="utf-8")


def blocks(text, language):
    """The code blocks of one language, in order; those after a comment `<!-- not run: why -->` left out."""
    pairs = re.findall(rf"(<!-- not run: .+? -->\n+)?^```{language}\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    return [code for comment, code in pairs if not comment]


def section(text, heading):
    """The text below a heading such as "## Bad input", up to the next heading of its level or above."""
    level = len(heading.split(" ")[0])
    parts = re.split(rf"^{re.escape(heading)}\n", text, flags=re.MULTILINE)
    assert len(parts) == 2, f"{heading!r} stands {len(parts) - 1} times"
    return re.split(rf"^#{{1,{level}}} ", parts[1], flags=re.MULTILINE)[0]


def rows(text):
    """The cells of all table rows in a text, heads and rules left out."""
    found = []
    for table in re.findall(r"((?:^ *\|.*\|\n?)+)", text, re.MULTILINE):
        for line in table.strip().splitlines()[2:]:
            cells = line.strip().strip("|").split(" | ")
            found.append([cell.strip() for cell in cells])
    return found


def names(text):
    """The words of letters, digits and underscores in `backticks`; of `name=value`, the name."""
    words = re.findall(r"`([\w=.:]+)`", text)
    return {re.split("[=:]", word)[0] for word in words}


def anchors(text):
    """The anchors of a page's headings, as GitHub makes them."""
    without_code = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    found = set()
    for heading in re.findall(r"^#+ (.*)$", without_code, re.MULTILINE):
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower()
        found.add(re.sub(r"[^\w\- ]", "", plain).replace(" ", "-"))
    return found
