"""Draws figures with text in any script. Knows nothing of what is drawn.

Matplotlib's default font has no Chinese, Japanese or Korean characters, and matplotlib warns of each missing one.
"""

from __future__ import annotations

import contextlib
import functools
import re
import warnings
from collections.abc import Iterable, Iterator
from typing import Any

import matplotlib.figure
from matplotlib import font_manager
from matplotlib.text import Text

_CJK = re.compile(
    r"CJK|Han Sans|Han Serif|WenQuanYi|YaHei|SimHei|SimSun|PingFang|Heiti|Hiragino|Meiryo|Yu Gothic|Malgun|Nanum"
    r"|Droid Sans Fallback|Arial Unicode"
)
"""Matches names of common fonts with Chinese, Japanese or Korean characters."""


def families(installed: Iterable[str]) -> list[str]:
    """Font families to draw with: matplotlib's default, then installed fonts with characters that it lacks."""
    return ["sans-serif", *sorted({name for name in installed if _CJK.search(name)})]


@functools.cache
def _families() -> list[str]:
    return families(font.name for font in font_manager.fontManager.ttflist)


class Figure(matplotlib.figure.Figure):
    """A matplotlib figure that draws text with a font for its script. Without one it draws boxes, but does not warn."""

    def draw(self, renderer: Any) -> None:
        """See matplotlib."""
        with self._any_script():
            super().draw(renderer)

    def get_tightbbox(self, *args: Any, **options: Any) -> Any:
        """See matplotlib."""
        with self._any_script():
            return super().get_tightbbox(*args, **options)

    @contextlib.contextmanager
    def _any_script(self) -> Iterator[None]:
        for text in self.findobj(Text):
            text.set_fontfamily(_families())
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Glyph .* missing from font")
            yield
