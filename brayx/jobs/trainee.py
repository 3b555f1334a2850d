"""What a host gives a training to learn with: the trial's clerk, the learner, and all that learns as one.

Interfaces only; the implementations are in `brayx.local` and `brayx.cluster`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from brayx.metrics import Recorder
    from brayx.replay.feed import Taker
    from brayx.tracking.trial import Status, Trial
    from brayx.trainer.loop import Summary


class TrialClerk(Protocol):
    """Runs functions where a trial is: ``function(trial, *args)``. `brayx.tracking.clerk.Clerk` is one."""

    def call(self, function: Callable[..., Any], *args: Any, start_s: float = ...) -> Any:
        """Returns the function's result; drops a function that does not start within ``start_s`` seconds."""

    def in_background(self, function: Callable[..., Any], *args: Any) -> Any:
        """Does not wait; drops the call if another is running."""

    def opened(self, timeout_s: float = ...) -> bool:
        """Whether the trial is open; waits up to ``timeout_s``."""

    def trial(self) -> Trial:
        """The trial; waits until it is open."""

    def check(self) -> None:
        """Raises the error that kept the trial from opening, if there is one."""

    def close(self, status: Status) -> object:
        """Writes the rest, and ends the trial."""

    def end(self) -> None:
        """Gives up what is not written yet."""


class Learner(Protocol):
    """A learner in the background, or several as one."""

    @property
    def running(self) -> bool:
        """Whether it is still learning."""

    def start(self) -> object:
        """Starts it."""

    def wait(self, timeout_s: float) -> bool:
        """Waits for its end; False: not within ``timeout_s``."""

    def state(self) -> str:
        """The learner's state, in a few words."""

    def stop(self) -> None:
        """Ends its stream, so that it saves a last checkpoint and ends. Does not wait."""

    def result(self, timeout_s: float | None = None) -> Summary | None:
        """The learner's summary; None if it has not ended within ``timeout_s``. Raises its error."""


class Learning(Protocol):
    """All that learns in a job: one model, or the players of a league."""

    @property
    def learner(self) -> Learner:
        """All learners as one."""

    @property
    def numbers(self) -> Recorder:
        """Records the job's metrics."""

    @property
    def buffers(self) -> Mapping[str, Taker]:
        """Buffers that sources feed, by name."""

    @property
    def batch_steps(self) -> int:
        """Transitions of the largest batch that an update may need."""

    def look(self) -> None:
        """Does what is due; called repeatedly. Raises `DeadlineExceeded` if it has to be called again."""

    def register(self, say: Callable[[str], None]) -> tuple[int | None, str]:
        """Registers what was learned; returns the version, None if there is none, and a message for the user."""

    def standings(self) -> str:
        """The table of a league; empty without one."""

    def end_trials(self, finished: bool) -> None:
        """Ends the trials of its parts, if they have trials of their own."""
