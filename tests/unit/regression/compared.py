"""Results of comparisons for the tests of reports and gates."""

from __future__ import annotations

import numpy as np

from brayx.recording.comparison import Comparison


def comparison(equal, kl, value=(), exact=False, session="s") -> Comparison:
    count = len(equal)
    return Comparison(
        session, session, np.arange(count) + 10, np.asarray(equal, bool), np.asarray(kl, np.float32),
        np.asarray(value or [np.nan] * count, np.float32), exact,
    )  # fmt: skip
