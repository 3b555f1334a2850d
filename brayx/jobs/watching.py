"""Watches a training by its newest numbers: shows them, and gives up one that is stuck or loses too much.

Knows nothing of where the numbers come from.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

from brayx import clock as deadlines
from brayx.errors import AgentError, DeadlineExceeded, StartupError
from brayx.jobs.gamecores import says_itself
from brayx.jobs.progress import Progress, error_lines, lost_of
from brayx.metrics.totals import GAMES, TICKS_THIS_RUN
from brayx.restarts import LAST_S

if TYPE_CHECKING:
    from brayx.jobs.trainee import RunningLearner
    from brayx.trainer.loop import TrainingSummary

READY_TIMEOUT_S = 180.0
"""Deadline of the learner's first weights."""
FIRST_STEP_TIMEOUT_S = 20.0
NEXT_STEP_TIMEOUT_S = 180.0
"""Longest time with errors and no env steps. After the first step it is longer, since a replica may be restarting."""
IDLE_S = 600.0
"""Time after which a behaviour that no game plays ends, once another one has all its steps."""
_HINT_S = 60.0
"""Time without an update after which a line explains what the learner waits for."""
STALLED_TIMEOUT_S = 600.0
"""Longest time for an update once its data is there, and for the end of the learner once its stream is over. Ranks that
restart need less."""
_REQUESTS = ("sessions_started", "ticks", "requests_refused")
"""Metrics of requests at the door. Env steps alone do not show requests: they may come from rollouts."""
_LOST_S = 10.0
"""Time for which too large a share must be lost before training stops, since a replica may be restarting."""
_FEW = 8
"""Least number of lost games or fragments that stops a training."""
_WITHOUT_RETURN = 20
_HOW_TO_RETURN = (
    'The body of a stop must say how the game ended: {"obs": ..., "reward": ..., "terminated": true}, or "truncated": '
    'true at a time limit; `done` is not read. An agent of your own must call record("episode_return", ...)'
)
_TROUBLE = ("requests_refused", "fragments_dropped", "replay_dropped")
_STRANGERS = "requests_refused.unauthorized"
"""Requests without a valid key, which anyone may send."""


class Patience:
    """Distinguishes a job that cannot learn from a slow one: it has errors and no env steps.

    Args:
        clock: seconds, for tests.
        by_hand: a person starts the games. Mending one may take any time, so only failures of gamecores count.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic, *, by_hand: bool = False) -> None:
        self._clock = clock
        self._counted = () if by_hand else _TROUBLE
        self._since = clock()
        self._steps: float | None = None
        self._trouble_then = 0.0
        self._limit_s = FIRST_STEP_TIMEOUT_S

    def is_over(self, numbers: Mapping[str, float], failures: int, *, losing: bool = False) -> bool:
        """Whether to give up.

        Args:
            numbers: the hub's newest numbers.
            failures: number of gamecores that have failed so far.
            losing: too large a share is lost, so `Losses` is about to end the training and to say why.
        """
        steps = numbers.get("env_steps", 0.0)
        strangers = numbers.get(_STRANGERS, 0.0) if self._counted else 0.0
        trouble = failures + _sum_of(self._counted, numbers) - strangers
        if steps != self._steps:
            if self._steps is not None:
                self._limit_s = NEXT_STEP_TIMEOUT_S
            self._steps, self._trouble_then, self._since = steps, trouble, self._clock()
        limit_s = NEXT_STEP_TIMEOUT_S if losing else self._limit_s
        return trouble > self._trouble_then and self._clock() - self._since > limit_s

    def verdict(self, numbers: Mapping[str, float], last: str) -> str:
        """The error message: the counts of errors, and the newest error."""
        came = ", ".join(f"{name} {value:.0f}" for name, value in numbers.items() if name.split(".")[0] in _TROUBLE)
        waited = f"no env step has arrived for {self._clock() - self._since:.0f} s"
        return f"{waited}, only errors ({came or 'gamecores ended'}); the last: {last or 'see the log'}"


class Silence:
    """Detects a door to which no game connects: a wrong URL, or a game that waits for something.

    In a job that starts no gamecores, games connect by themselves, at any time: then it only gives advice.

    Args:
        gamecores: number of gamecores that the job starts.
        clock: seconds, for tests.
        urls: URLs of the doors; empty: the job has none, or other data, too.
    """

    def __init__(self, gamecores: int, clock: Callable[[], float] = time.monotonic, urls: Sequence[str] = ()) -> None:
        self._gamecores, self._urls = gamecores, urls
        self._clock = clock
        self._since = clock()
        self._silent, self._hinted = gamecores > 0 or bool(urls), False
        self._requests_before: float | None = None

    def is_over(self, numbers: Mapping[str, float]) -> bool:
        """Whether to give up, by the newest numbers: no request has come for `NEXT_STEP_TIMEOUT_S` from the start.

        A resumed trial continues its counts, so the first numbers may include requests of an earlier run. Ticks of this
        run and active sessions always show that requests came.
        """
        requests = _sum_of(_REQUESTS, numbers)
        if self._requests_before is None:
            self._requests_before = requests
        came = numbers.get(TICKS_THIS_RUN) or numbers.get("sessions_active") or requests != self._requests_before
        self._silent = self._silent and not came
        return self._silent and self._gamecores > 0 and self._clock() - self._since > NEXT_STEP_TIMEOUT_S

    def hint(self, numbers: Mapping[str, float]) -> str:
        """Advice, once, after `FIRST_STEP_TIMEOUT_S`; empty otherwise. A game may take long to load."""
        if self.is_over(numbers) or not self._silent or self._hinted:
            return ""
        self._hinted = self._clock() - self._since > FIRST_STEP_TIMEOUT_S
        return self.verdict() if self._hinted else ""

    def verdict(self) -> str:
        """The error message, or the advice."""
        why = (
            "does the game connect to the URL of its command, and by the protocol of that URL?"
            if self._gamecores
            else f"this job starts no games, so yours must connect to one of {', '.join(self._urls)};"
        )
        waited = f"no request has come to the door for {self._clock() - self._since:.0f} s"
        return f"{waited}: {why} `brayx doctor URL` tries the door"


class Idle:
    """Finds behaviours that no game plays any more: misspelt ones, or those of a game that is gone.

    Args:
        clock: seconds, for tests.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._last: dict[str, tuple[float, float]] = {}

    def names(self, played: Mapping[str, float]) -> list[str]:
        """Those whose count of what was played has not changed for `IDLE_S`, or since they first came."""
        now = self._clock()
        for name, count in played.items():
            if name not in self._last or self._last[name][0] != count:
                self._last[name] = count, now
        return [name for name in played if now - self._last[name][1] > IDLE_S]


class Absence(Silence):
    """Says once a minute that no game has come to a job whose games a person starts: that wait has no deadline.

    Of games that have played and left, `Departures` says so.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(0, clock)
        self._said = self._since
        self._requests: tuple[float, ...] = ()

    def is_over(self, numbers: Mapping[str, float]) -> bool:
        return False

    def hint(self, numbers: Mapping[str, float]) -> str:
        """A line about each minute without a request; empty otherwise."""
        now, requests = self._clock(), (_sum_of(_REQUESTS, numbers), numbers.get(TICKS_THIS_RUN, 0.0))
        if requests != self._requests:
            self._requests, self._since, self._said = requests, now, now
        if now - self._said < _HINT_S or numbers.get(TICKS_THIS_RUN):
            return ""
        self._said = now
        return self.verdict()

    def verdict(self) -> str:
        return f"no request has come to the door for {self._clock() - self._since:.0f} s: start or mend your game"


class Departures:
    """Says once for each silence that games which a person or another machine starts no longer play.

    Args:
        how: how one starts again; empty: the job starts its games itself.
        clock: seconds, for tests.
    """

    def __init__(self, how: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._how, self._clock = how, clock
        self._ticks, self._since, self._hinted = 0.0, clock(), False

    def hint(self, numbers: Mapping[str, float]) -> str:
        """Advice, `FIRST_STEP_TIMEOUT_S` after the last session has ended; empty otherwise. An open one may be slow."""
        now, ticks = self._clock(), numbers.get(TICKS_THIS_RUN, 0.0)
        if ticks != self._ticks or numbers.get("sessions_active"):
            self._ticks, self._since, self._hinted = ticks, now, False
        if not (ticks and self._how) or self._hinted or now - self._since < FIRST_STEP_TIMEOUT_S:
            return ""
        self._hinted = True
        return f"no game has played for {now - self._since:.0f} s: {self._how}; Ctrl-C ends the training"


class Losses:
    """Detects errors that take too large a share of the games or fragments.

    Args:
        max_share: ``trainer.max_lost_share``; None: any share is allowed.
        clock: seconds, for tests.
    """

    def __init__(self, max_share: float | None, clock: Callable[[], float] = time.monotonic) -> None:
        self._max_share = 1.0 if max_share is None else max_share
        self._clock = clock
        self._since: float | None = None
        self._hinted = False

    def too_many(self, numbers: Mapping[str, float]) -> bool:
        """Whether more than one, and too large a share, is lost."""
        return any(lost > max(1.0, self._max_share * total) for _, lost, total in lost_of(numbers))

    def hint(self, numbers: Mapping[str, float]) -> str:
        """When the training will end, once too large a share is lost; empty otherwise."""
        if self._hinted or not self.too_many(numbers):
            return ""
        self._hinted = True
        return f"the training ends if this goes on until {_FEW} are lost, and for at least {_LOST_S:g} s"

    def is_over(self, numbers: Mapping[str, float]) -> bool:
        """Whether to give up, by the hub's newest numbers."""
        worst = max((lost / total for _, lost, total in lost_of(numbers) if total >= _FEW), default=0.0)
        if worst <= self._max_share:
            self._since = None
        elif self._since is None:
            self._since = self._clock()
        return self._since is not None and self._clock() - self._since >= _LOST_S

    def verdict(self, errors: Sequence[str]) -> str:
        """The error message; ``errors`` are from `brayx.jobs.progress.error_lines`."""
        why = "; ".join(errors) or "see the log"
        share = f"errors take more than trainer.max_lost_share {self._max_share:g} allows"
        return f"{share}: {why}; mend that, and run the same command again: the training continues"


def _sum_of(metrics: Sequence[str], numbers: Mapping[str, float]) -> float:
    """The sum of some metrics over all their labels."""
    return sum(value for name, value in numbers.items() if name.partition(".")[0] in metrics)


class Returns:
    """Detects games that stop without a return: the model learns from them, but its return is unknown.

    Args:
        least: number of such games that `hint` waits for.
    """

    def __init__(self, least: int = _WITHOUT_RETURN) -> None:
        self._least = least
        self._before: tuple[float, float] | None = None
        self._hinted = False

    def hint(self, numbers: Mapping[str, float], notes: Mapping[str, str]) -> str:
        """Advice after ``least`` such games in this run, if at least a quarter of games are such; once.

        A smaller share is normal, because an interrupted game has no return.
        """
        counts = numbers.get("games_without_return", 0.0), numbers.get(GAMES, 0.0)
        if self._before is None:
            self._before = counts
        without, games = (count - before for count, before in zip(counts, self._before, strict=True))
        if self._hinted or without < self._least or 3 * without < games:
            return ""
        self._hinted = True
        return (
            f"{without:.0f} games stopped without a return; the newest: {notes.get('games_without_return', '-')}. "
            f"{_HOW_TO_RETURN}"
        )


class Pace:
    """Distinguishes a learner that hangs from one that waits for games: enough data has come, and no update follows.

    Args:
        batch_steps: transitions that an update needs.
        clock: seconds, for tests.
    """

    def __init__(self, batch_steps: int, clock: Callable[[], float] = time.monotonic) -> None:
        # Twice, as one batch may be on its way to being full when the other is given.
        self._enough = 2 * batch_steps
        self._clock = clock
        self._moved: tuple[float | None, ...] = ()
        self._steps_then = 0.0
        self._since: float | None = None
        self._first_step: float | None = None
        self._has_warned = False

    def is_over(self, numbers: Mapping[str, float]) -> bool:
        """Whether to give up, by the hub's newest numbers."""
        steps = numbers.get("env_steps", 0.0)
        moved = (numbers.get("updates"), numbers.get("policy_version"))
        if moved != self._moved:
            self._moved, self._steps_then, self._since, self._has_warned = moved, steps, None, False
        elif self._since is None and steps - self._steps_then >= self._enough:
            self._since = self._clock()
        return self._since is not None and self._clock() - self._since > STALLED_TIMEOUT_S

    def hint(self, numbers: Mapping[str, float]) -> str:
        """A line about a long wait for the first update, or for an overdue one; empty if there is nothing new. Call it
        after `is_over`."""
        now, steps, updates = self._clock(), numbers.get("env_steps", 0.0), numbers.get("updates", 0.0)
        if self._first_step is None and steps:
            self._first_step = now
        if self._has_warned:
            return ""
        if self._since is not None and now - self._since > _HINT_S:
            self._has_warned = True
            return (
                f"no update for {now - self._since:.0f} s, though {steps - self._steps_then:.0f} env steps have come "
                f"since update {updates:.0f}; after {STALLED_TIMEOUT_S:g} s of this the job gives up"
            )
        if self._since is None and not updates and self._first_step is not None and now - self._first_step > _HINT_S:
            self._has_warned = True
            return f"no update yet: {steps:.0f} env steps have come, and the first takes {self._enough // 2} or more"
        return ""

    def verdict(self, numbers: Mapping[str, float]) -> str:
        """The error message."""
        since = self._clock() - (self._since or 0.0)
        return (
            f"the learner hangs: {numbers.get('env_steps', 0.0) - self._steps_then:.0f} env steps have come since its "
            f"update {numbers.get('updates', 0.0):.0f}, enough for the next one {since:.0f} s ago"
        )


class Watched(Protocol):
    """What plays: the job's gamecores, or a rollout, on any host."""

    @property
    def failures(self) -> int:
        """How often one has failed so far."""

    @property
    def messages(self) -> Sequence[str]:
        """The newest lines about failures."""

    @property
    def running(self) -> int:
        """How many are alive."""


class WatchedGamecores(Watched, Protocol):
    """The job's gamecores; as a text, what each was started with."""

    @property
    def num(self) -> int:
        """How many the job starts; 0: games connect by themselves, at any time."""

    def check(self) -> None:
        """Raises a `StartupError` if one has ended more often than it may start again."""


class Watch:
    """One training under watch.

    Args:
        progress: shows the numbers.
        learner: describes what it is waiting for.
        games: the job's gamecores.
        rollouts: what else plays.
        batch_steps: transitions that an update needs.
        max_lost_share: as for `Losses`.
        urls: URLs of the doors; empty: the job has none, or other data, too.
        by_hand: a person starts all games.
        resumed: the trial has updates of an earlier run.
    """

    def __init__(
        self,
        progress: Progress,
        learner: RunningLearner,
        games: WatchedGamecores,
        rollouts: Sequence[Watched],
        batch_steps: int,
        max_lost_share: float | None,
        urls: Sequence[str] = (),
        *,
        by_hand: bool = False,
        resumed: bool = False,
    ) -> None:
        self._progress = progress
        self._learner = learner
        self._games = games
        self._rollouts = rollouts
        self._patience = Patience(deadlines.now, by_hand=by_hand)
        self._silence = Absence(deadlines.now) if by_hand else Silence(games.num, deadlines.now, urls)
        how = f"start it again, at {' or '.join(urls)}" if urls and not games.num else "press Play" * by_hand
        self._departures = Departures(how, deadlines.now)
        self._pace, self._losses = Pace(batch_steps, deadlines.now), Losses(max_lost_share, deadlines.now)
        self._returns = Returns()
        self._updates_before = None if resumed else 0.0
        self._learns = False
        self._began, self._published = deadlines.now(), False

    def look(self, numbers: Mapping[str, float], notes: Mapping[str, str]) -> None:
        """Shows the newest numbers, and ends a training that cannot go on.

        Args:
            numbers, notes: from `brayx.tracking.hub.Hub.snapshot` and `brayx.tracking.hub.Hub.notes`.

        Raises:
            AgentError: errors take too large a share of the games or fragments.
            StartupError: no data arrives, only errors; no game connects; or the learner publishes no weights.
            DeadlineExceeded: enough data arrives, but the learner makes no update.
        """
        games, say = self._games, self._progress.say
        errors = error_lines(numbers, notes)
        messages = [message for players in (games, *self._rollouts) for message in players.messages]
        last = messages[-1] if messages else ""
        newest = f"the newest message of one: {last}" if last else "none has written a message"
        if hint := self._silence.hint(numbers):
            say(f"{hint}; {games}; {newest}" if games.num else hint)
        for hint in filter(None, (self._departures.hint(numbers), self._returns.hint(numbers, notes))):
            say(hint)
        updates = numbers.get("updates", 0.0)
        if self._updates_before is None:
            self._updates_before = updates
        if not self._learns and updates > self._updates_before:
            self._learns = True
            say(f"it is learning: its first update came with {numbers.get('env_steps', 0.0):,.0f} env steps")
        workers = sum(rollout.running for rollout in self._rollouts)
        note = "" if says_itself(last) else last
        self._progress.update(numbers, gamecores=games.running, workers=workers, note=note, errors=errors)
        # A hub that was restarted lacks the version until the next weights.
        self._published = self._published or "policy_version" in numbers
        if not self._published and deadlines.now() - self._began > READY_TIMEOUT_S:
            raise StartupError(f"no weights came within {READY_TIMEOUT_S:g} s; the learner {self._learner.state()}")
        if self._silence.is_over(numbers):
            raise StartupError(f"{self._silence.verdict()}; {games}; {newest}")
        failures = games.failures + sum(rollout.failures for rollout in self._rollouts)
        if self._patience.is_over(numbers, failures, losing=self._losses.too_many(numbers)):
            raise StartupError(self._patience.verdict(numbers, "; ".join(errors) or last))
        if hint := self._losses.hint(numbers):
            waits = f"; a game that keeps ending waits up to {LAST_S:g} s for its next start"
            say(hint + waits * bool(games.num))
        if self._losses.is_over(numbers):
            raise AgentError(self._losses.verdict(errors))
        if self._pace.is_over(numbers):
            raise DeadlineExceeded(self._pace.verdict(numbers))
        if hint := self._pace.hint(numbers):
            say(f"{hint}; the learner {self._learner.state()}")


def last_of(learner: RunningLearner) -> TrainingSummary:
    """Waits for a learner whose stream is over to save its last checkpoint and end.

    Raises:
        BrayxError: its error.
        DeadlineExceeded: it hangs.
    """
    summary = learner.result(STALLED_TIMEOUT_S)
    if summary is None:
        late = f"the learner has not ended within {STALLED_TIMEOUT_S:g} s after the last batch"
        raise DeadlineExceeded(f"{late}; it {learner.state()}")
    return summary
