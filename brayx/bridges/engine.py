"""`EngineAgents`: the agents of one engine's game; all of one contract are a session, and each a row of its ticks.

An engine says what all its agents observe, and waits for the actions of all. So one call sends the rows of every agent
and returns when all are answered. Knows nothing of the engines' wires.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

from brayx.bridges.clients import ClientSessions
from brayx.errors import BadBody, BrayxError, ConfigError, DeadlineExceeded, ProtocolError
from brayx.gamecore.contract import ActionPart, Contract
from brayx.gamecore.contract_bodies import ContractBodies
from brayx.gamecore.contract_rows import RowBodies
from brayx.gamecore.games import MAX_RESUMED, RESUMED, RETRIED, START_S, Backoff, GameResult, GamesRun
from brayx.gamecore.protocol import StepKind, StepRequest
from brayx.gamecore.transports.base import Endpoint
from brayx.gamecore.transports.tcp import TcpSessions
from brayx.strict_json import parse_json

_LOOK_S = 0.5
_CLOSE_S = 2.0


class AgentStep(NamedTuple):
    """What an engine says of one agent: a row of its session's tick. A tuple, since one is made for each row.

    Attributes:
        agent: number of the agent within its game, 0 or more.
        obs: values by observation; those of an episode that was terminated do not matter, but have to be valid.
        reward: since its step before.
        mask: rows of 1 (allowed) and 0 by action; None: all choices are allowed.
        ended: how its episode ended with this step; None: it goes on, and the agent wants actions.
        info: the game's own values.
        group: number of its group; 0: none.
    """

    agent: int
    obs: Mapping[str, Any]
    reward: float = 0.0
    mask: Mapping[str, Any] | None = None
    ended: Literal["terminated", "truncated"] | None = None
    info: Mapping[str, Any] = {}
    group: int = 0


@dataclass(slots=True)
class _Session:
    """A running session: its agents, what it waits for, and how often that was repeated.

    Attributes:
        agents: return and length of each agent's episode so far.
        kind, steps, body: of the request that it waits for, or that was answered last.
    """

    id: str
    bodies: RowBodies
    steps: list[AgentStep]
    kind: StepKind = StepKind.START
    body: bytes = b""
    repeats: int = 0
    agents: dict[int, list[float]] = field(default_factory=dict)


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
    """The agents of one game; for one thread at a time. All agents of one contract are one session.

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
        self._sessions: dict[int, _Session] = {}  # by the contract's identity
        self._waiting: dict[str, _Session] = {}
        self.episodes = 0
        self.broken_off = 0

    def __len__(self) -> int:
        """Number of agents whose episodes go on."""
        return sum(len(session.agents) for session in self._sessions.values())

    def exchange(self, steps: Iterable[tuple[Contract, list[AgentStep]]]) -> dict[int, dict[str, Any]]:
        """Sends a step of each of several agents, and returns the actions of those whose episodes go on.

        The first step of an agent begins an episode, so its reward counts for nothing. An agent's end may be followed
        by the first step of its next episode. A session that the service lost is followed by another, after a pause.

        Args:
            steps: by contract, of which each is one object for all calls.

        Returns:
            actions by agent and name: a whole number from its ``start``, or a list of numbers.

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
                self._submit(session, StepKind.STOP, b"")
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

    def _exchange(self, steps: Sequence[tuple[Contract, list[AgentStep]]]) -> dict[int, dict[str, Any]]:
        for contract, together in steps:
            self._send(contract, together)
        actions: dict[int, dict[str, Any]] = {}
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
                    self._tick(session)
                elif session.kind is StepKind.TICK:
                    actions.update(_actions(session, reply))
        self._patience.reset()
        return actions

    def _send(self, contract: Contract, steps: list[AgentStep]) -> None:
        """Sends the steps of agents with one contract, but not the end of an agent that has no episode here."""
        session = self._sessions.get(id(contract))
        if any(step.ended for step in steps):
            running = set(session.agents) if session is not None else set()
            given, steps = steps, []
            for step in given:
                if not step.ended or step.agent in running:
                    steps.append(step)
                (running.discard if step.ended else running.add)(step.agent)
        if not steps:
            return
        if session is None:
            session = self._sessions[id(contract)] = _Session(uuid.uuid4().hex, RowBodies(contract), steps)
            self._submit(session, StepKind.START, json.dumps({**contract.as_dict(), "rows": True}).encode())
        else:
            session.steps = steps
            self._tick(session)

    def _tick(self, session: _Session) -> None:
        """Sends the session's steps as rows, and counts them."""
        body, agents = _encoded(session), session.agents
        for agent, _, reward, _, ended, *_ in session.steps:
            sums = agents.get(agent)
            if sums is None:
                agents[agent] = [0.0, 0]
                continue
            sums[0] += reward
            sums[1] += 1
            if ended is not None:
                del agents[agent]
                self.episodes += 1
                self._run.on_game(GameResult(sums[0], int(sums[1]), ended))
        self._submit(session, StepKind.TICK, body)

    def _submit(self, session: _Session, kind: StepKind, body: bytes) -> None:
        if self._connection is None:
            self._connection = _connected(self._run)
        session.kind, session.body = kind, body
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
            self._submit(session, session.kind, session.body)
        elif not isinstance(error, RETRIED):
            if session.kind is StepKind.START and isinstance(error, BadBody):
                raise BadBody(f"the training refuses the game's agents: {error.message}", **error.details) from None
            raise error
        elif session.kind is not StepKind.STOP:
            del self._sessions[id(session.bodies.contract)]
            self.broken_off += len(session.agents)
            self._patience.after(error, self._run.should_stop)
            self._send(session.bodies.contract, [step for step in session.steps if step.ended is None])

    def _disconnect(self) -> None:
        self.broken_off += len(self)
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


def _actions(session: _Session, reply: bytes) -> dict[int, dict[str, Any]]:
    """The actions of a session's agents, from the reply to its tick."""
    columns = {name: column.tolist() for name, column in session.bodies.decode_reply(reply).items()}
    acting = [step.agent for step in session.steps if step.ended is None]
    if any(len(column) != len(acting) for column in columns.values()):
        raise ProtocolError(f"the reply has not the actions of {len(acting)} agents", agents=len(acting))
    rows = zip(*columns.values(), strict=True)
    return {agent: dict(zip(columns, row, strict=True)) for agent, row in zip(acting, rows, strict=True)}


def _encoded(session: _Session) -> bytes:
    """The body of a tick: a row for each step.

    Raises:
        BadBody: a value does not fit the contract; names the agent and the field.
    """
    bodies = session.bodies
    contract = bodies.contract
    names = {spec.name for spec in contract.observations}
    agents, seen, rewards, masks, ends, infos, groups = zip(*session.steps, strict=True)
    choices = None
    if any(mask is not None for mask in masks):
        parts = [part for part in contract.discrete if part.mask]
        choices = {part.name: b"".join([_choices(mask, part) for mask in masks]) for part in parts}
    ended: dict[str, Any] = {}
    if any(ends):
        ended = {name: [end == name for end in ends] for name in ("terminated", "truncated")}
    try:
        if any(obs.keys() != names for obs in seen):
            _check(session)
        return bodies.encode_rows(
            agents,
            {name: [obs[name] for obs in seen] for name in names},
            list(rewards),
            mask=choices,
            groups=groups if any(groups) else None,
            extras={"info": [*map(dict, infos)]} if any(infos) else None,
            **ended,
        )
    except BadBody:
        _check(session)
        raise


def _choices(mask: Mapping[str, Any] | None, part: ActionPart) -> bytes:
    choices = None if mask is None else mask.get(part.name)
    return b"\1" * part.size if choices is None else bytes(choices)


def _check(session: _Session) -> None:
    """Raises the error of the first step that does not fit the contract, if there is one."""
    bodies = ContractBodies(session.bodies.contract)
    for step in session.steps:
        try:
            bodies.encode_tick(step.obs, step.reward, mask=step.mask, extras={"info": dict(step.info)})
        except BadBody as error:
            raise BadBody(f"agent {step.agent}: {error.message}", **error.details) from None
