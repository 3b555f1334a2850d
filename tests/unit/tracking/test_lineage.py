"""`brayx.tracking.lineage`: origins are one readable line, and are read from it."""

from __future__ import annotations

import pytest

from brayx.tracking.lineage import Origin, lineage_text, origins_in


@pytest.mark.parametrize(
    "origins", [(), (Origin("walker", 0, 0),), (Origin("models:/old", 3, 200), Origin("older one", 1, 0))]
)
def test_a_line_gives_the_origins_that_it_was_made_of(origins: tuple[Origin, ...]) -> None:
    assert origins_in(lineage_text(origins)) == origins


def test_any_other_text_has_no_origins() -> None:
    assert origins_in("walker version three") == ()
