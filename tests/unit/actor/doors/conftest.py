"""The native doors of a module's tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import brayx.clock as clock
from tests.unit.actor.doors.native_doors import Native, Seconds, native


@pytest.fixture(scope="module")
def service() -> Iterator[Native]:
    with native() as made:
        yield made


@pytest.fixture
def seconds(monkeypatch: pytest.MonkeyPatch) -> Seconds:
    made = Seconds()
    monkeypatch.setattr(clock, "monotonic", made)
    return made
