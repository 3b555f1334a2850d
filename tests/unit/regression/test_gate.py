"""`brayx.regression.gate`: it counts ticks, not sessions, and never guesses."""

from __future__ import annotations

import numpy as np
import pytest

from brayx.regression.gate import RecordingsGate
from brayx.regression.replay import ReplaySummary
from tests.unit.regression.compared import comparison


def test_a_gate_counts_ticks_not_sessions_and_never_guesses() -> None:
    long, short = comparison([True] * 9, [0.1] * 9), comparison([False], [1.1])
    total = ReplaySummary.of([long, short])
    assert (total.ticks, total.agreement, total.first) == (10, 0.9, None)
    assert total.kl == pytest.approx(0.2)
    assert ReplaySummary.of([short]).first == 10
    assert RecordingsGate(min_agreement=0.9, max_kl=0.21).judge(total).passed
    assert "0.9000 of 10" in RecordingsGate(min_agreement=0.91).judge(total).reason
    assert not RecordingsGate(max_kl=0.19).judge(total).passed
    unknown = ReplaySummary.of([comparison([True], [np.nan])])
    assert (unknown.kl, unknown.kl_max, unknown.value) == (None, None, None)
    assert "not known" in RecordingsGate(max_kl=1e9).judge(unknown).reason
    assert not RecordingsGate(max_kl=1e9).judge(unknown).passed
    assert not RecordingsGate(min_agreement=0.0).judge(ReplaySummary.of([])).passed
