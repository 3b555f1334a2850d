"""The Chinese pages keep step with the English ones: each names its source and the digest of what it translates.

A page says so in its first line: `<!-- of docs/NAME.md, sha256 0123456789ab -->`, or, if it translates only the
beginning, `<!-- of docs/NAME.md before "## Heading", sha256 0123456789ab -->`. Snippets are run from the source alone;
tests/unit/test_docs.py checks the links of both.
"""

from __future__ import annotations

import hashlib
import os
import re
from pathlib import Path

import pytest

from tests.unit.test_docs import ROOT, TRANSLATIONS, Snippet, snippets_of

SOURCE = re.compile(r'<!-- of (?P<name>\S+?)(?: before "(?P<end>## .+)")?, sha256 (?P<digest>\w+) -->')

pages = pytest.mark.parametrize("page", TRANSLATIONS, ids=lambda page: str(page.relative_to(ROOT)))


def translated(page: Path) -> tuple[Path, str, str]:
    """The source of a page, the text of it that the page translates, and the digest that the page has of that text."""
    match = SOURCE.fullmatch(page.read_text().partition("\n")[0])
    assert match, f"{page}: the first line is <!-- of docs/NAME.md, sha256 DIGEST -->"
    source = ROOT / match["name"]
    text = source.read_text()
    if match["end"]:
        text, found, _ = text.partition(f"\n{match['end']}\n")
        assert found, f"{page}: {match['name']} has no heading {match['end']!r}"
    return source, text, match["digest"]


@pages
def test_a_page_is_of_its_source_as_it_is_now(page: Path) -> None:
    source, text, digest = translated(page)
    current = hashlib.sha256(text.encode()).hexdigest()[:12]
    page_name, source_name = page.relative_to(ROOT), source.relative_to(ROOT)
    assert digest == current, (
        f"{source_name} has changed since {page_name} was translated. Translate the change, if it is one of meaning "
        f"(git log -p -- {source_name}), then write sha256 {current} into the first line of {page_name}."
    )


@pages
def test_a_page_and_its_source_link_to_each_other(page: Path) -> None:
    source, _, _ = translated(page)
    for file, other in ((page, source), (source, page)):
        first_lines = "\n".join(file.read_text().splitlines()[:6])
        link = os.path.relpath(other, file.parent)
        assert f"]({link})" in first_lines, f"{file.relative_to(ROOT)}: none of the first lines links to {link}"


@pages
def test_a_page_has_the_snippets_of_its_source(page: Path) -> None:
    """Only comments in shell and YAML may be translated."""
    source, text, _ = translated(page)
    lines = text.count("\n") + 1
    expected = [code(snippet) for snippet in snippets_of(source) if snippet.line <= lines]
    # After those of the source a page may have its own, about mirrors of packages.
    assert [code(snippet) for snippet in snippets_of(page)][: len(expected)] == expected


def code(snippet: Snippet) -> tuple[str, str]:
    """Language and text of a snippet, without the comments of shell and YAML."""
    text = snippet.text
    if snippet.language in ("sh", "yaml"):
        text = re.sub(r"(^|[ \t]+)# .*$", "", text, flags=re.M)
    return snippet.language, text
