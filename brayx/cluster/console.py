"""What a console asks the replicas of an actor: running sessions, the ticks of one, numbers; and both ends of it.

A console finds the replicas in the session directory and asks them over the listeners that they have for each other.
Knows nothing of HTTP APIs or pages.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

import numpy as np

from brayx.actor.live import LiveTable, silent, unknown_session
from brayx.actor.live_ticks import LiveFrame, LiveTick, LiveTicks
from brayx.actor.table import SessionTable
from brayx.cluster.directory import Location
from brayx.cluster.named import answer_with_retry, find_actor
from brayx.cluster.peers import CONSOLE_PREFIX, PeerDied, Peers
from brayx.console.job import served_facts, with_refusals
from brayx.errors import (
    BrayxError,
    ConfigError,
    DeadlineExceeded,
    JobNotRunning,
    Overloaded,
    ProtocolError,
    SessionUnknown,
)
from brayx.gamecore.protocol import StepKind, StepRequest
from brayx.metrics import METRICS, Drained, Kind, Recorder
from brayx.metrics.numbers import LocalNumbers
from brayx.metrics.totals import ARM_GAMES, ARM_RETURNS, FAILED_S
from brayx.model.encoding import pack, unpack
from brayx.model.following import AliasFollower
from brayx.recording.live_frames import LiveFrames
from brayx.threads import LoopThread

_ASK_S = 2.0
"""Deadline of a replica's answer."""
_DIRECTORY_S = 4.0
_RUN_S = 8.0
_TELL_S = 5.0
_FORGET_S = 30.0
"""Time after which a console that has told nothing more has ended."""
_MOVED = ("moved", "lost")
"""Ends of a session that continues at another replica."""
_MAX_KNOWN = 64
_ADDED = ("games", "ticks_this_run", "ticks_per_s", "env_steps_per_s", "sessions_active", "replay_batches")
_ADDED_BY_ARM = (ARM_GAMES, ARM_RETURNS)


T = TypeVar("T")


class ConsoleAnswers:
    """A replica's answers. Belongs to the event loop of its sessions.

    Args:
        table: the replica's sessions.
        status: values of its status page.
        recorder: its recorder.
        follower: its canaries; None: it follows no alias.
        set_share: sets a canary's share here and for the other replicas, see `Membership.set_share`.
        frames: pictures of followed sessions.

    Attributes:
        application: name of the replica's application in Serve; empty until it is known.
    """

    def __init__(
        self,
        table: SessionTable,
        status: Callable[[], Mapping[str, Any]],
        recorder: Recorder,
        follower: AliasFollower | None,
        set_share: Callable[[str, float], Awaitable[None]],
        frames: LiveFrames,
    ) -> None:
        self.application = ""
        self._live, self._status, self._follower = LiveTable(table), status, follower
        self._set_share, self._frames = set_share, frames
        self._url, self._told_at = "", 0.0
        self._numbers = numbers = LocalNumbers({}, "seconds")

        def add(part: Drained) -> None:
            numbers.merge(part)
            numbers.drain()  # now, because rates depend on when samples come

        recorder.listen(add)

    @property
    def url(self) -> str:
        """URL of the console; empty: there is none."""
        return self._url if time.monotonic() - self._told_at < _FORGET_S else ""

    async def answer(self, request: StepRequest) -> bytes:
        """Answers a question: a JSON list of a verb and its arguments.

        Raises:
            BrayxError: the answer of `LiveTable` or `AliasFollower`; or `ProtocolError`: there is no such question.
            Overloaded: the session directory could not keep a share.
        """
        match json.loads(request.body):
            case ["ticks", str(session), int(after)]:
                newest = self._live.newer(session, after)
                return await asyncio.to_thread(lambda: packed(self._frames.shown(session, after, newest)))
            case ["sessions"]:
                return json.dumps(self._live.sessions()).encode()
            case ["console", str(url)]:
                self._url, self._told_at = url, time.monotonic()
            case ["end", str(session)]:
                self._live.end(session)
            case ["set_share", str(model), float(share) | int(share)]:
                if self._follower is None:
                    raise ConfigError("this service follows no alias, so no model has a canary")
                await self._set_share(self._follower.check_share(model, share), share)
            case ["facts"]:
                facts = served_facts(self._status(), self._follower, self._numbers)
                live = {"application": self.application, "silent": silent(self._live.sessions())}
                return json.dumps(facts | live).encode()
            case other:
                raise ProtocolError(f"a console asks {other!r:.100}, which this replica does not know")
        return b""


class ReplicaSessions:
    """The sessions of all replicas of an actor. Its methods block, and may be called from any thread.

    Args:
        directory: name of the actor's session directory.
    """

    def __init__(self, directory: str) -> None:
        self._directory = directory
        self._secret = ""
        self._peers = Peers(lambda: self._secret, prefix=CONSOLE_PREFIX)
        self._owners: OrderedDict[str, Location] = OrderedDict()
        self._loop = LoopThread("brayx-console-replicas")
        self._telling: Future[None] | None = None

    def sessions(self) -> list[dict[str, Any]]:
        """The rows of `LiveTable.sessions` of all replicas; those of a replica that does not answer are missing."""
        answers, _ = self._run(self._of_all("sessions"))
        return [row for answer in answers.values() for row in json.loads(answer)]

    def ticks(self, session: str, after: int) -> LiveTicks:
        """The newest ticks of a session; arguments and errors as for `LiveTable.newer`.

        Raises:
            SessionLost: the session has ended, or was lost with its replica.
            JobNotRunning: there are no replicas.
            Overloaded: its replica could not be reached.
        """
        return self._run(self._newer(session, after))

    def end(self, session: str) -> None:
        """Ends a session; errors as for `ticks`."""
        self._run(self._of_owner(session, "end", session))

    def set_share(self, model: str, share: float) -> None:
        """Sets a canary's share of new sessions at all replicas, also those that start later, until the service ends.

        Raises:
            ConfigError: as `AliasFollower.check_share`.
            JobNotRunning: there are no replicas.
            Overloaded: none of them answers.
        """
        self._run(self._set_share(model, share))

    def facts(self) -> dict[str, Any]:
        """The replicas' values of `brayx.console.overview.JobDocument`, combined, and their ``application``."""
        try:
            answers, errors = self._run(self._of_all("facts"))
        except BrayxError as error:
            return {"errors": [error.message]}
        return with_refusals(merged([json.loads(answer) for answer in answers.values()]), errors)

    def tell(self, url: str) -> None:
        """Tells all replicas, also those that start later, where the console is, until `close`."""
        self._telling = self._loop.start(self._tell(url))

    def close(self) -> None:
        """Closes all connections, and ends the thread."""
        if self._telling is not None:
            self._telling.cancel()
        with contextlib.suppress(DeadlineExceeded):
            self._loop.run(self._peers.close(), _ASK_S)
        self._loop.close()

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        return self._loop.run(work, _RUN_S, f"an application with the sessions {self._directory!r}")

    async def _tell(self, url: str) -> None:
        while True:
            with contextlib.suppress(BrayxError):  # no replica is ready, or one is of another version
                await self._of_all("console", url)
            await asyncio.sleep(_TELL_S)

    async def _newer(self, session: str, after: int) -> LiveTicks:
        waits = LiveTicks([], b"", after, "", None)  # the session is between two replicas
        try:
            newest = unpacked(await self._of_owner(session, "ticks", session, after))
        except Overloaded as error:
            if error.details.get("layer") != "directory":
                raise
            return waits
        if newest.end:
            self._owners.pop(session, None)
        return waits if newest.end in _MOVED else newest

    async def _set_share(self, model: str, share: float) -> None:
        answers, errors = await self._of_all("set_share", model, share)
        if not answers:
            raise Overloaded(errors[0])

    async def _of_owner(self, session: str, *question: Any) -> bytes:
        """The answer of the session's owner, or of its last known owner."""
        for again in (True, False):
            known = self._owners.get(session)
            owner = await self._locate(session) if known is None else known
            try:
                return await self._ask(owner.address, *question)
            except PeerDied:
                await self._ask_directory("bury", owner.owner)
            except SessionUnknown:
                if known is None or not again:
                    raise
            self._owners.pop(session, None)
        raise unknown_session(session)

    async def _locate(self, session: str) -> Location:
        owner: Location | None = await self._ask_directory("locate", session)
        if owner is None:
            raise unknown_session(session)
        self._owners[session] = owner
        while len(self._owners) > _MAX_KNOWN:
            self._owners.popitem(last=False)
        return owner

    async def _of_all(self, *question: Any) -> tuple[dict[str, bytes], list[str]]:
        """The replicas' answers by address, and a line for each one that has none.

        Raises:
            ConfigError: a replica refuses the question.
            JobNotRunning: there are no replicas.
        """
        addresses: list[str] = await self._ask_directory("addresses")
        if not addresses:
            raise JobNotRunning(f"no replica of {self._directory!r} is running")
        calls = (self._ask(address, *question) for address in addresses)
        answers, errors = {}, []
        for address, answer in zip(addresses, await asyncio.gather(*calls, return_exceptions=True), strict=True):
            if isinstance(answer, bytes):
                answers[address] = answer
            elif isinstance(answer, ConfigError):
                raise answer
            elif isinstance(answer, PeerDied):
                errors.append(f"the replica at {address} has died")
            elif isinstance(answer, BrayxError):
                errors.append(f"the replica at {address} does not answer: {answer.message}")
            else:
                raise answer
        return answers, errors

    async def _ask(self, address: str, *question: Any) -> bytes:
        """A replica's answer.

        Raises:
            PeerDied: it is dead.
            BrayxError: it refuses the question, or does not answer.
        """
        if not self._secret:
            self._secret = await self._ask_directory("secret", "")  # the empty offer is none
        request = StepRequest(StepKind.CALL, "", json.dumps(question).encode())
        try:
            answer = await self._peers.forward(address, request, _ASK_S)
        except Overloaded:
            self._secret = ""  # the directory may have another one
            raise
        if isinstance(answer, BrayxError):
            raise answer
        return answer

    async def _ask_directory(self, method: str, *args: Any) -> Any:
        async def call() -> Any:
            directory = await asyncio.to_thread(find_actor, self._directory)
            if directory is None:
                raise JobNotRunning(f"no replica of {self._directory!r} has started yet")
            return await getattr(directory, method).remote(*args)

        return await answer_with_retry(call, _DIRECTORY_S, "the session directory", finds_actor=True)


def merged(facts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The facts of several replicas as one: sums add up, percentiles are the largest, other numbers the mean.

    Args:
        facts: what each replica answers.
    """
    first = facts[0] if facts else {}
    registered: dict[str, set[str]] = {}
    by_name: dict[str, list[float]] = {}
    notes: dict[str, str] = {}
    for replica in facts:
        notes |= replica.get("notes", {})  # replicas of an older version have none
        for model, versions in replica.get("registered", {}).items():
            registered.setdefault(model, set()).update(versions)
        for name, value in replica["numbers"].items():
            by_name.setdefault(name, []).append(value)
    return {
        **{name: sum(replica.get(name, 0) for replica in facts) for name in ("sessions", "silent")},
        "application": first.get("application", ""),
        "doors": first.get("doors", {}),
        "canaries": first.get("canaries", {}),
        "registered": {model: sorted(versions) for model, versions in registered.items()},
        "numbers": {name: _together(name, values) for name, values in by_name.items()},
        "notes": notes,
    }


def _together(name: str, values: list[float]) -> float:
    first = name.partition(".")[0]
    metric = METRICS.get(first)
    if name in _ADDED or first in _ADDED_BY_ARM or (metric is not None and metric.kind is Kind.SUM):
        return sum(values)
    if metric is not None and metric.kind in (Kind.MAX, Kind.PERCENTILE):
        return max(values)
    if name == FAILED_S:
        return min(values)
    return sum(values) / len(values)


def packed(newest: LiveTicks) -> bytes:
    """Ticks as bytes: arrays in safetensors, the rest in its metadata."""
    arrays, rows = dict[str, np.ndarray](), []
    for place, tick in enumerate(newest.ticks):
        rows.append((tick.number, tick.at_s, tick.seconds, tick.event))
        parts = {f"arrays/{name}": array for name, array in tick.arrays.items() if array.dtype.itemsize <= 8}
        parts |= {"input": np.frombuffer(tick.input, np.uint8), "output": np.frombuffer(tick.output, np.uint8)}
        arrays |= {f"{place}/{name}": array for name, array in parts.items()}
    arrays["start"] = np.frombuffer(newest.start, np.uint8)
    frame = None
    if newest.frame is not None:
        frame = (newest.frame.number, newest.frame.failure)
        arrays["frame"] = np.frombuffer(newest.frame.png, np.uint8)
    return pack(arrays, {"ticks": json.dumps([rows, newest.after, newest.end, newest.result, frame])})


def unpacked(body: bytes) -> LiveTicks:
    """The inverse of `packed`.

    Raises:
        BadBody: it is not in that format.
    """
    arrays, metadata = unpack(body)
    rows, after, end, result, *frames = json.loads(metadata["ticks"])
    frame = next(iter(frames), None)  # an older version has none, and no start
    if frame is not None:
        number, failure = frame
        frame = LiveFrame(number, arrays.pop("frame").tobytes(), failure)
    start = arrays.pop("start", np.empty(0, np.uint8)).tobytes()
    by_tick: list[dict[str, np.ndarray]] = [{} for _ in rows]
    for path, array in arrays.items():
        place, _, name = path.partition("/")
        by_tick[int(place)][name] = array
    ticks = []
    for (number, at_s, seconds, event), parts in zip(rows, by_tick, strict=True):
        game, reply = parts.pop("input").tobytes(), parts.pop("output").tobytes()
        named = {name.removeprefix("arrays/"): array for name, array in parts.items()}
        ticks.append(LiveTick(number, at_s, seconds, game, reply, named, event))
    return LiveTicks(ticks, start, after, end, result, frame)
