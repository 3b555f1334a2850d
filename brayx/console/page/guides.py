"""The guides in `docs/`, from the wheel or the checkout, so that they can be read offline. Knows nothing of pages."""

from __future__ import annotations

import re
from pathlib import Path

_PACKAGE = Path(__file__).resolve().parents[2]
_CANDIDATES = (_PACKAGE / "docs", _PACKAGE.parent / "docs")
FOLDER = next((folder for folder in _CANDIDATES if folder.is_dir()), _CANDIDATES[0])
"""The folder of the guides."""
_CHINESE = "zh"
_LINK = re.compile(r"(?<!!)\[([^\]]*)\]\(([^)\s]+)\)")
_NAMED = re.compile(r"docs/((?:zh/)?[\w-]+\.md)")


def find(path: str) -> Path | None:
    """The guide or picture with this path below `FOLDER`; None: there is none."""
    try:
        file = (FOLDER / path).resolve()
        return file if file.is_relative_to(FOLDER) and file.is_file() else None
    except (OSError, ValueError):  # the path is too long, or has a null character
        return None


def address(guide: str, chinese: bool) -> str:
    """Address of a guide's page, such as ``guide-serve.md#keys``, or of its Chinese translation if there is one."""
    translated = f"{_CHINESE}/{guide}"
    return f"/help/{translated if chinese and find(translated.partition('#')[0]) else guide}"


def named_in(text: str) -> str:
    """Address of the guide that a text names, such as ``docs/guide-train.md``; empty: it names none."""
    named = _NAMED.search(text)
    return f"/help/{named[1]}" if named and find(named[1]) else ""


def markdown(file: Path) -> str:
    """A guide's text, without links to files that are not in `FOLDER`."""

    def kept(link: re.Match[str]) -> str:
        text, target = link.groups()
        place = target.partition("#")[0]
        is_kept = target.startswith(("http", "#")) or find(str((file.parent / place).resolve()))
        return link[0] if is_kept else text

    return _LINK.sub(kept, file.read_text())
