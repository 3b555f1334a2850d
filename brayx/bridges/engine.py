"""`EngineAgents`: the agents of one engine's game, each a session; over a TCP door all on one connection.

An engine says what all its agents observe, and waits for the actions of all. So one call sends every agent's tick and
returns when all are answered. Knows nothing of the engines' wires.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
import uuid
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from brayx.bridges.clients import ClientSessions
from brayx.errors import BadBody, BrayxError, ConfigError, DeadlineExceeded
from brayx.gamecore.contract import Contract
from brayx.gamecore.contract_bodies import ContractBodies
from brayx.gamecore.games import MAX_RESUMED, RESUMED, RETRIED, START_S, Backoff, GameResult, GamesRun
from brayx.gamecore.protocol import StepKind, StepRequest
from brayx.gamecore.transports.base import Endpoint
from brayx.gamecore.transports.tcp import TcpSessions
from brayx.strict_json import parse_json

_LOOK_S = 0.5
_CLOSE_S = 2.0


@dataclass(frozen=True, slots=True)
class AgentStep:
    """What an engine says of one agent.

    Attributes:
        agent: the agent, within its game.
        contract: what it observes and does.
        obs: values by observation; None in an end without a last observation.
        reward: since its step before.
        mask: rows of 1 (allowed) and 0 by action; None: all choices are allowed.
        ended: how its episode ended with this step; None: it goes on, and the agent wants actions.
        info: the game's own values.
    """

    agent: Hashable
    contract: Contract
    obs: Mapping[str, Any] | None
    reward: float = 0.0
    mask: Mapping[str, Any] | None = None
    ended: Literal["terminated", "truncated"] | None = None
    info: Mapping[str, Any] = field(default_factory=dict)


@dataclass(slots=True)
class _Session:
    """A running session: what it waits for, and how often that was repeated."""

    id: str
    bodies: ContractBodies
    kind: StepKind
    step: AgentStep
    body: bytes
    repeats: int = 0
    total_reward: float = 0.0
    length: int = 0


class EngineRun:
    """A run by the threads of several games: keeps their episodes' results, and ends with the last or with a failure.

    Args:
        run: how to play.

    Attributes:
        games_run: the same for `EngineAgents`, which stop when this run is over and report their episodes here.
    """

    def __init__(self, run: GamesRun[GameResult]) -> None:
        self.games_run = replace(run, should_stop=self.is_over, on_game=self._finished)
        self._given = run
        self._results: list[GameResult] = []
        self._failure: BrayxError | None = None
        self._lock = threading.Lock()
        self._ends = threading.Event()

    def is_over(self) -> bool:
        """Whether to stop playing."""
        return self._ends.is_set() or self._given.should_stop()

    def wait(self, timeout_s: float) -> bool:
        """Waits for the end, for at most this long; whether the run is over."""
        return self._ends.wait(timeout_s) or self.is_over()

    def end(self) -> None:
        """Ends the run."""
        self._ends.set()

    def fail(self, error: BrayxError) -> None:
        """Ends the run with an error of the service."""
        self._failure = error
        self._ends.set()

    def results(self) -> list[GameResult]:
        """The results of all episodes, if their number is limited.

        Raises:
            BrayxError: that of `fail`.
        """
        if self._failure is not None:
            raise self._failure
        return self._results

    def _finished(self, result: GameResult) -> None:
        with self._lock:
            if len(self._results) == self._given.games:
                return
            if self._given.games is not None:
                self._results.append(result)
            self._given.on_game(result)
            if len(self._results) == self._given.games:
                self._ends.set()


class EngineAgents:
    """The sessions of one game's agents; for one thread at a time.

    Args:
        run: how to play; its ``on_game`` gets each episode of an agent that ended in the game. Over a TCP door all
            sessions share a connection, unless they are to reconnect, as only a session's own client can.
            ``timeout_s`` does not limit a start, which is held while the training prepares.

    Attributes:
        episodes: number of episodes that ended in the game.
        broken_off: number of episodes that ended otherwise.

    Raises:
        ConfigError: the run has an option that an engine's agents have not.
    """

    def __init__(self, run: GamesRun[GameResult]) -> None:
        if run.max_ticks is not None:
            raise ConfigError(f"max_ticks is {run.max_ticks}: the agents of an engine do not have it")
        self._run = run
        self._patience = Backoff(run.give_up_after_s)
        self._connection: TcpSessions | ClientSessions | None = None
        self._sessions: dict[Hashable, _Session] = {}
        self._waiting: dict[str, _Session] = {}
        self.episodes = 0
        self.broken_off = 0

    def __len__(self) -> int:
        """Number of running sessions."""
        return len(self._sessions)

    def exchange(self, steps: Iterable[AgentStep]) -> dict[Hashable, dict[str, Any]]:
        """Sends a step of each of several agents, and returns the actions of those whose episodes go on.

        An agent without a session gets one; its step's reward then counts for nothing. An agent's end may be followed
        by the first step of its next episode. A session that the service lost is followed by another, after a pause.

        Returns:
            actions by agent and name: a whole number from its ``start``, or a float32 array.

        Raises:
            BadBody: a step does not fit its contract, or the service refuses the contract; names the field.
            BrayxError: what the service answered last, when it is given up, or when another session would get it too.
        """
        steps = list(steps)
        while True:
            try:
                return self._exchange(steps)
            except RETRIED as error:  # the connection's: all of its sessions are over
                self._disconnect()
                if self._run.should_stop():
                    raise
                self._patience.after(error, self._run.should_stop)

    def break_off(self) -> None:
        """Ends all sessions in the middle of their episodes: what followed their last actions is not known."""
        try:
            self._drain()  # a session takes its stop after the reply to its last tick
            for session in self._sessions.values():
                self._submit(session, StepKind.STOP, session.step, b"")
            self._drain()
        except BrayxError:
            pass  # the door ends sessions that are idle
        self._disconnect()

    def _drain(self) -> None:
        """Waits a while for the replies to all requests, and ignores them."""
        deadline = time.monotonic() + _CLOSE_S
        while self._connection and self._waiting and time.monotonic() < deadline:
            for session_id, _ in self._connection.exchange(_LOOK_S):
                self._waiting.pop(session_id, None)

    def _exchange(self, steps: list[AgentStep]) -> dict[Hashable, dict[str, Any]]:
        for step in steps:
            self._send(step)
        actions = {}
        while self._waiting:
            for session_id, reply in self._receive():
                session = self._waiting.pop(session_id, None)
                if session is None:
                    continue
                if isinstance(reply, BrayxError):
                    self._failed(session, reply)
                    continue
                session.repeats = 0
                if session.kind is StepKind.START:
                    self._check_start(session, reply)
                    self._tick(session, session.step, reward=0.0)
                elif session.kind is StepKind.TICK:
                    actions[session.step.agent] = session.bodies.decode_reply(reply)
        self._patience.reset()
        return actions

    def _send(self, step: AgentStep) -> None:
        session = self._sessions.get(step.agent)
        if step.ended is not None:
            if session is not None:
                body = _encoded(session.bodies, step, step.reward)
                del self._sessions[step.agent]
                self._submit(session, StepKind.STOP, step, body)
                self.episodes += 1
                self._run.on_game(GameResult(session.total_reward + step.reward, session.length, step.ended))
        elif session is not None:
            self._tick(session, step, step.reward)
        else:
            body = json.dumps(step.contract.as_dict()).encode()
            session = _Session(uuid.uuid4().hex, ContractBodies(step.contract), StepKind.START, step, body)
            self._sessions[step.agent] = session
            self._submit(session, StepKind.START, step, body)

    def _tick(self, session: _Session, step: AgentStep, reward: float) -> None:
        body = _encoded(session.bodies, step, reward)
        session.total_reward += reward
        session.length += 1
        self._submit(session, StepKind.TICK, step, body)

    def _submit(self, session: _Session, kind: StepKind, step: AgentStep, body: bytes) -> None:
        if self._connection is None:
            self._connection = _connected(self._run)
        session.kind, session.step, session.body = kind, step, body
        self._waiting[session.id] = session
        self._connection.submit(StepRequest(kind, session.id, body))

    def _receive(self) -> list[tuple[str, bytes | BrayxError]]:
        assert self._connection is not None
        is_starting = any(session.kind is StepKind.START for session in self._waiting.values())
        deadline = time.monotonic() + (START_S if is_starting else self._run.timeout_s)
        while True:
            try:
                return self._connection.exchange(_LOOK_S)
            except DeadlineExceeded:
                if self._run.should_stop() or time.monotonic() > deadline:
                    raise

    def _check_start(self, session: _Session, reply: bytes) -> None:
        """Raises `ConfigError` unless the service plays games with contracts."""
        with contextlib.suppress(BadBody, KeyError, TypeError):
            if parse_json(reply)["id"] == session.bodies.contract.id:
                return
        raise ConfigError(
            f"{self._run.url} takes no contracts (it answers {reply[:40]!r}): expected a job like game.yaml",
            url=self._run.url,
        )

    def _failed(self, session: _Session, error: BrayxError) -> None:
        """Handles an error reply: repeats the request, or starts another session with the same step."""
        if isinstance(error, RESUMED) and session.repeats < MAX_RESUMED:
            session.repeats += 1
            self._submit(session, session.kind, session.step, session.body)
        elif not isinstance(error, RETRIED):
            if session.kind is StepKind.START and isinstance(error, BadBody):
                raise BadBody(f"the training refuses the game's agents: {error.message}", **error.details) from None
            raise error
        elif session.kind is not StepKind.STOP:
            del self._sessions[session.step.agent]
            self.broken_off += 1
            self._patience.after(error, self._run.should_stop)
            self._send(session.step)

    def _disconnect(self) -> None:
        self.broken_off += len(self._sessions)
        self._sessions.clear()
        self._waiting.clear()
        if self._connection is not None:
            self._connection.__exit__()
            self._connection = None


def described(contract: Contract) -> str:
    """A contract in a few words: ``chaser: obs [4], camera [84, 84, 3] -> steer 2, dash of 2``."""
    seen = [f"{spec.name} {list(spec.shape) or f'of {spec.size}'}" for spec in contract.observations]
    done = [f"{part.name} {'of ' * (part.kind == 'discrete')}{part.size}" for part in contract.actions]
    return f"{contract.behaviour}: {', '.join(seen)} -> {', '.join(done)}"


def _connected(run: GamesRun[GameResult]) -> TcpSessions | ClientSessions:
    endpoint = Endpoint.parse(run.endpoint)
    if endpoint.door.name == "tcp" and run.reconnect_s is None:
        return TcpSessions(endpoint, run.timeout_s, run.key, run.secret)
    return ClientSessions(run, START_S)


def _encoded(bodies: ContractBodies, step: AgentStep, reward: float) -> bytes:
    """The body of a tick or a stop.

    Raises:
        BadBody: a value does not fit the contract; names the agent and the field.
    """
    flags = {"terminated": step.ended == "terminated", "truncated": step.ended == "truncated"}
    extras = {"info": step.info} if step.info else None
    try:
        return bodies.encode_tick(step.obs, reward, mask=step.mask, extras=extras, **flags)
    except BadBody as error:
        raise BadBody(f"agent {step.agent}: {error.message}", **error.details) from None
