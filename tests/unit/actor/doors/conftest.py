"""The native doors of a module's tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.unit.actor.doors.native_doors import Native, native


@pytest.fixture(scope="module")
def service() -> Iterator[Native]:
    with native() as made:
        yield made
