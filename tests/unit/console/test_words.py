"""The page's texts in Chinese, and which language a browser asks for."""

# ruff: noqa: RUF001  # Chinese punctuation

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from brayx.console import verdict
from brayx.console.page import frame, guides, league, recording, recordings, trials
from brayx.console.page.chinese import CHINESE, chinese_line
from brayx.console.page.words import prefers_chinese
from brayx.jobs import progress
from brayx.metrics import charts

PAGE = Path(frame.__file__).parent


def texts(file: Path) -> Iterator[str]:
    """The literal texts that a module of the page translates."""
    for node in ast.walk(ast.parse(file.read_text())):
        match node:
            case ast.Call(func=ast.Name(id="tr"), args=[ast.Constant(value=text)]):
                yield str(text)


def test_every_text_has_a_chinese_one_with_the_same_values() -> None:
    used = {text for file in PAGE.glob("*.py") for text in texts(file)}
    assert len(used) > 40, "they are found"
    used |= {
        *recordings._ENDS.values(),
        *filter(None, recording._RESULTS.values()),
        *recordings._WHY.values(),
        *trials._KEYS.values(),
        *league._ROLES.values(),
        *league._WORDS,
    }
    assert {*used, *verdict.REASONS, *verdict.ADVICE, *frame.PAGES, *charts.GROUPS.values()} - CHINESE.keys() == set()
    for english, chinese in CHINESE.items():
        assert re.findall(r"[一-鿿]", chinese), english
        assert sorted(re.findall(r"\{(\w+)\}", english)) == sorted(re.findall(r"\{(\w+)\}", chinese)), english


def test_no_chinese_text_is_left_over() -> None:
    """Each is a literal of the page, or of what it shows."""
    literals = {
        node.value
        for file in (*PAGE.parent.rglob("*.py"), Path(charts.__file__))
        if file.name != "chinese.py"
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Constant)
    }
    states = {"finished", "failed", "interrupted"}  # of trials
    counters = {"counted", "broken off", "contradictory", "refused"}  # of a league's games
    assert CHINESE.keys() - literals - states - counters == set()


def test_lines_about_losses_are_chinese_around_their_errors() -> None:
    counts = {f"{metric}.stale": 1_200.0 for metric in progress._WHAT}
    shares = {"games_in_window": 83.0, "games_failed_in_window": 17.0}
    numbers = counts | shares | {"fragments_in_window": 20.0, "fragments_lost_in_window": 1.0}
    lines = progress.error_lines(numbers, {name: f"KeyError: {number}" for number, name in enumerate(counts)})
    assert len(lines) == len(counts) + 1
    for line in lines:
        count, _, error = chinese_line(line).partition("；最近一次：")
        assert not re.search("[a-z]", re.sub("stale|tick", "", count)), count
        assert error == line.partition("; the newest: ")[2]
        assert error.startswith("KeyError") != line.startswith("lost")
    assert chinese_line("lost: 17 of the last 100 games (17%)") == "损失：最近 100 局中的 17 局（17%）"


@pytest.mark.parametrize(
    ("header", "chinese"),
    [
        ("zh-CN,zh;q=0.9,en;q=0.8", True),
        ("zh", True),
        ("en-US,en;q=0.9,zh-CN;q=0.8", False),
        ("de, zh-TW;q=0.7, en;q=0.3", True),
        ("fr-FR", False),
        ("", False),
        ("zh;q=much,en", False),
    ],
)
def test_the_browser_chooses_the_language(header: str, chinese: bool) -> None:
    assert prefers_chinese(header) == chinese


def test_every_page_has_a_guide_with_that_heading() -> None:
    for _, _, guide in frame.PAGES.values():
        name, _, anchor = guide.partition("#")
        file = guides.find(name)
        assert file is not None, name
        headings = re.findall(r"^#+ (.*)$", file.read_text(), re.MULTILINE)
        assert not anchor or anchor in {re.sub(r"[^\w -]", "", line.lower()).replace(" ", "-") for line in headings}
    named = [guides.named_in(text) for text in (*verdict.ADVICE, *CHINESE.values()) if "docs/" in text]
    assert len(named) > 3
    assert all(named)
    assert [guides.find(path) for path in ("none.md", "../README.md", "x" * 300, "\0")] == [None] * 4
