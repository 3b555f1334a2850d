"""The page's language: English, or Chinese if the viewer's browser prefers it.

`CHINESE` has the Chinese of every English text on the page, so a new text is one line there. Knows nothing of pages.
"""

from __future__ import annotations

import copy
from typing import Any

from nicegui import ui

from brayx.console.page.chinese import CHINESE, chinese_line


def tr(english: str, **values: Any) -> str:
    """A text of the page in the viewer's language.

    Args:
        english: the English text; must be a literal that `CHINESE` has. Words in braces stand for the values.
        **values: the values by their words.
    """
    text = CHINESE.get(english, english) if is_chinese() else english
    return text.format(**values) if values else text


def in_words(line: str) -> str:
    """A line of the API about losses in the viewer's language."""
    return chinese_line(line) if is_chinese() else line


def is_chinese() -> bool:
    """Whether the viewer's browser prefers Chinese."""
    return prefers_chinese(ui.context.client.request.headers.get("accept-language", ""))


def prefers_chinese(header: str) -> bool:
    """Whether Chinese comes before English in a header ``Accept-Language``."""
    weights = {"zh": 0.0, "en": 0.0}
    for choice in header.split(","):
        language, _, weight = choice.partition(";q=")
        name = language.strip().partition("-")[0].lower()
        try:
            value = float(weight or 1.0)
        except ValueError:
            continue
        if name in weights:
            weights[name] = max(weights[name], value)
    return weights["zh"] > weights["en"]


def set_language() -> None:
    """Declares the page's language to the browser, and uses it for the texts of its controls."""
    client = ui.context.client
    client.page = copy.copy(client.page)  # it is shared by all viewers
    client.page.language = "zh-CN" if is_chinese() else "en-US"
