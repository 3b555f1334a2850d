"""A trial that this process writes itself, with the interface of `brayx.tracking.clerk.Clerk`."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

from brayx.tracking.hub import totals_of
from brayx.tracking.trial import Status, Trial


class InProcessClerk:
    """Runs functions with an open trial in this process, as `brayx.tracking.clerk.Clerk` does in another.

    Attributes:
        may_resume: the trial was interrupted before.
    """

    def __init__(self, trial: Trial) -> None:
        self._trial, self.may_resume = trial, trial.resumed
        self._background: threading.Thread | None = None

    def call(self, function: Callable[..., Any], *args: Any, start_s: float = 0.0) -> Any:
        """Returns ``function(trial, *args)``, which starts at once."""
        return function(self._trial, *args)

    def in_background(self, function: Callable[..., Any], *args: Any) -> None:
        """As `call`, in a thread and without a result; skipped while another such call runs."""
        if self._background is None or not self._background.is_alive():
            target = functools.partial(function, self._trial, *args)
            self._background = threading.Thread(target=target, name="brayx-background", daemon=True)
            self._background.start()

    def opened(self, timeout_s: float = 0.0) -> bool:
        """True: the trial is open from the start."""
        return True

    def trial(self) -> Trial:
        """The trial."""
        return self._trial

    def early_curve(self) -> list[tuple[float, float]]:
        """Empty: nothing waits for MLflow."""
        return []

    def totals(self) -> dict[str, float]:
        """The trial's initial sums, see `brayx.tracking.hub.totals_of`."""
        return totals_of(self._trial) if self.may_resume else {}

    def check(self) -> None:
        """Does nothing: the trial is open."""

    def settle(self) -> None:
        """Does nothing: every call has written what it has to."""

    def close(self, status: Status) -> None:
        """Ends the trial."""
        self._trial.finish(status)

    def end(self) -> None:
        """Does nothing: every call has ended."""
