"""`brayx.replay.config`: options that would have no effect, or stop learning for good, are refused."""

from __future__ import annotations

import pytest

from brayx.replay.config import BufferConfig


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sampler": "fifo", "samples_per_insert": 2.0}, "samples_per_insert .*fifo"),
        ({"sampler": "fifo", "remover": "reservoir"}, "remover .*fifo"),
        ({"min_columns": 10_000}, "nothing would ever be sampled"),
    ],
)
def test_unusable_options_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        BufferConfig(**{"sampler": "uniform", **changes})
