"""Writing into a folder that this command owns: what it wrote before is replaced, everything else is left alone."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path, PurePosixPath

from lm_eval_duel.errors import DuelError
from lm_eval_duel.report import fields

SUFFIXES = (".html", ".md", ".csv", ".json", ".yaml")


def earlier(folder: Path, listing: str, program: str) -> set[str]:
    """The files that an earlier run wrote, from its `listing`; raises DuelError if another program wrote that file."""
    file = folder / listing
    if not file.exists():
        return set()
    try:
        content = fields.parse(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        content = None
    if not isinstance(content, dict) or content.get("format") != program or not isinstance(content.get("files"), list):
        raise DuelError(
            f'{file} was not written by this command (it has no "format": "{program}"), so --out {folder} was left '
            "unchanged. Name another folder, or move this file."
        )
    names = [PurePosixPath(str(name)) for name in content["files"]]
    inside = [name for name in names if not name.is_absolute() and ".." not in name.parts and name.suffix in SUFFIXES]
    return {str(name) for name in inside}


def write(folder: Path, listing: str, program: str, contents: Mapping[str, str]) -> None:
    """Write files, `listing` first, since it names the others, and remove those of an earlier run.

    Raises DuelError, and leaves the folder unchanged, if a file there does not belong to an earlier run.
    """
    before = earlier(folder, listing, program)
    if foreign := [name for name in contents if name not in before and (folder / name).exists()]:
        raise DuelError(
            f"--out {folder} holds {', '.join(foreign)}, which no leaderboard there lists as its own: nothing was "
            "written. Name another folder, or move these files."
        )
    for name in sorted(contents, key=lambda name: name != listing):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(contents[name], encoding="utf-8", newline="\n")
    for name in before - contents.keys():
        (folder / name).unlink(missing_ok=True)
