"""What is logged while progress is shown: each place's first, with its traceback."""

from __future__ import annotations

import logging
import sys

from pipelines.logs import once_per_place

logger = logging.getLogger("some.agent")


def fail(number: int) -> None:
    if number % 2:
        raise ValueError(f"game {number}")
    raise KeyError(f"game {number}")


def test_the_first_of_each_place_is_written_whole_and_no_other(capsys) -> None:
    with once_per_place():
        for number in range(6):
            try:
                fail(number)
            except Exception:
                logger.exception("session %d failed", number)
            logger.warning("warned of %d", number)
            logger.info("not shown")
    logger.warning("after it")
    told = capsys.readouterr().err
    assert told.count("Traceback") == 2
    assert [line for line in told.splitlines() if line.startswith(("session", "warned"))] == [
        "session 0 failed",
        "warned of 0",
        "session 1 failed",
    ]
    assert 'in fail\n    raise ValueError(f"game {number}")' in told
    assert "not shown" not in told


def test_it_goes_to_whatever_standard_error_is_at_the_time(capsys, monkeypatch) -> None:
    class Display:
        said = ""

        def write(self, text: str) -> None:
            self.said += text

        def flush(self) -> None:
            pass

    with once_per_place():
        display = Display()
        monkeypatch.setattr(sys, "stderr", display)
        logger.warning("drawn over")
    assert display.said == "drawn over\n"
