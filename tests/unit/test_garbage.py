"""Imports without garbage collections."""

from __future__ import annotations

import gc

from brayx.garbage import importing


def test_nothing_is_collected_during_an_import_nor_what_it_made() -> None:
    before = gc.get_freeze_count()
    with importing("brayx.missing"):
        assert not gc.isenabled()
    assert gc.isenabled()
    assert gc.get_freeze_count() > before


def test_a_second_import_changes_nothing() -> None:
    before = gc.get_freeze_count()
    with importing("brayx.garbage"):
        assert gc.isenabled()
    assert gc.get_freeze_count() == before
