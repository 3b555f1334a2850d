"""The real browser of the console's tests."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, expect, sync_playwright

from tests.waiting import until

SHOWN_MS = 120_000
LAYOUT_S = 2.0


def overflow(page: Page) -> int:
    """Pixels by which a page is wider than its window, once it has had time for its layout."""

    def pixels() -> int:
        return int(page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth"))

    with contextlib.suppress(AssertionError):
        until(lambda: pixels() == 0, "it fits", LAYOUT_S)
    return pixels()


def drawn_series(page: Page, number: int) -> Any:
    """The series that a chart of the page draws."""
    charts = page.locator(".nicegui-echart")
    expect(charts.nth(number).locator("canvas").first).to_be_visible()
    return charts.nth(number).evaluate("(element) => getElement(Number(element.id.slice(1))).chart.getOption().series")


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """A Chromium; its expectations wait for two minutes."""
    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if chromium is None:
        pytest.skip("there is no chromium here: apt-get install chromium")
    expect.set_options(timeout=SHOWN_MS)
    with sync_playwright() as playwright:
        # A job in this process has a TMPDIR of its own, maybe in that of a Ray: too long for Chromium's socket.
        environment = {**os.environ, "TMPDIR": "/tmp"}
        browser = playwright.chromium.launch(
            executable_path=chromium, args=["--no-sandbox", "--disable-gpu"], env=environment
        )
        yield browser
        browser.close()
