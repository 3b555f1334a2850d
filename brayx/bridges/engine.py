"""`EngineAgents`: the agents of one engine's game; all of one contract are a session, and each a row of its ticks.

An engine says what all its agents observe, and waits for the actions of all. So one call sends the rows of every agent
and returns when all are answered. Knows nothing of the engines' wires.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import uuid
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Literal, NamedTuple

import numpy as np

from brayx.bridges.clients import ClientSessions, reach
from brayx.errors import BadBody, BrayxError, ConfigError, ProtocolError
from brayx.gamecore.contract import ActionPart, Contract
from brayx.gamecore.contract_bodies import ContractBodies
from brayx.gamecore.contract_rows import Decoded, RowBodies
from brayx.gamecore.games import RETRIED, Backoff, GameResult, GamesRun, send_async
from brayx.gamecore.games import say as print_line
from brayx.gamecore.protocol import StepKind, StepRequest
from brayx.strict_json import parse_json

_CLOSE_S = 2.0

Ask = Callable[[StepRequest], Awaitable[bytes]]
"""Sends a request of a session and returns its reply; raises the typed error instead. The way to a service: that of a
client (`brayx.bridges.clients`), or the sessions of this process themselves."""


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
    """A running session.

    Attributes:
        agents: return and length of each agent's episode so far.
    """

    id: str
    bodies: RowBodies
    agents: dict[int, list[float]] = field(default_factory=dict)


class EngineRun:
    """A run of several games on one event loop: where they play, where the bridge says what a person has to know, and
    their episodes' results. It ends with the last episode, or with a failure.

    Args:
        run: how to play.
        ask: sends a request to the service and returns the reply, or raises a typed error.
        say: prints a line.
        builds: how builds are started, as for `brayx.guard.GamecoreGuard.start`.
        is_inner: the service is in this process, and gets `Decoded` bodies.

    Raises:
        ConfigError: the run has ``max_ticks``, which an engine's agents do not have.
    """

    def __init__(
        self,
        run: GamesRun[GameResult],
        ask: Ask,
        *,
        say: Callable[[str], None] = print_line,
        builds: Mapping[str, Any] = {},
        is_inner: bool = False,
    ) -> None:
        if run.max_ticks is not None:
            raise ConfigError(f"max_ticks is {run.max_ticks}: the agents of an engine do not have it")
        self.run, self.ask, self.say, self.builds, self.is_inner = run, ask, say, builds, is_inner
        self._results: list[GameResult] = []
        self._failure: BrayxError | None = None
        self._ends = asyncio.Event()

    def is_over(self) -> bool:
        """Whether to stop playing."""
        return self._ends.is_set() or self.run.should_stop()

    async def wait(self, timeout_s: float) -> bool:
        """Waits for the end, for at most this long; whether the run is over."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._ends.wait(), timeout_s)
        return self.is_over()

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

    def finished(self, result: GameResult) -> None:
        """Takes an episode that ended in its game."""
        if len(self._results) == self.run.games:
            return
        if self.run.games is not None:
            self._results.append(result)
        self.run.on_game(result)
        if len(self._results) == self.run.games:
            self._ends.set()


def run_games(play: Callable[..., Awaitable[None]], url: str, **options: Any) -> list[GameResult]:
    """Plays games at a service elsewhere, as its client; returns the results of their agents' episodes.

    Reaches the service before any game, so that a wrong URL, key or certificate is said before a person presses Play.

    Args:
        play: plays the games of an engine, given an `EngineRun`.
        url: URL of the service.
        **options: as for `GamesRun`; the others are those of ``play``.

    Raises:
        ConfigError: an option has no meaning here; or as ``play``.
        BrayxError: the service's last error.
    """
    of_run = {item.name for item in fields(GamesRun)}
    run: GamesRun[GameResult] = GamesRun(url=url, **{name: options[name] for name in options if name in of_run})

    async def played() -> list[GameResult]:
        async with ClientSessions(run) as sessions:
            engine_run = EngineRun(run, sessions.ask)
            engine_run.say(f"plays at {run.endpoint}")
            await play(engine_run, **{name: options[name] for name in options if name not in of_run})
            return engine_run.results()

    return asyncio.run(played()) if reach(run) else []


class EngineAgents:
    """The agents of one game. All agents of one contract are one session.

    Args:
        run: the run that the game belongs to; gets each episode of an agent that ended in the game.

    Attributes:
        episodes: number of episodes that ended in the game.
        broken_off: number of episodes that ended otherwise.
    """

    def __init__(self, run: EngineRun) -> None:
        self._run = run
        self._patience = Backoff(run.run.give_up_after_s, run.say)
        self._sessions: dict[int, _Session] = {}  # by the contract's identity
        self.episodes = 0
        self.broken_off = 0

    def __len__(self) -> int:
        """Number of agents whose episodes go on."""
        return sum(len(session.agents) for session in self._sessions.values())

    async def exchange(self, steps: Iterable[tuple[Contract, list[AgentStep]]]) -> dict[int, dict[str, Any]]:
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
        turns = [self._turn(contract, together) for contract, together in steps]
        actions: dict[int, dict[str, Any]] = {}
        if len(turns) == 1:  # without a task
            actions = await turns[0]
        else:
            for result in await asyncio.gather(*turns, return_exceptions=True):
                if isinstance(result, BaseException):
                    raise result
                actions |= result
        self._patience.reset()
        return actions

    async def break_off(self) -> None:
        """Ends all sessions in the middle of their episodes: what followed their last actions is not known."""
        self.broken_off += len(self)
        sessions, self._sessions = self._sessions, {}
        stops = (self._run.ask(StepRequest(StepKind.STOP, session.id, b"")) for session in sessions.values())
        with contextlib.suppress(TimeoutError):  # the door ends sessions that are idle
            async with asyncio.timeout(_CLOSE_S):
                await asyncio.gather(*stops, return_exceptions=True)

    async def _turn(self, contract: Contract, steps: list[AgentStep]) -> dict[int, dict[str, Any]]:
        """The actions of agents with one contract."""
        while True:
            session = self._sessions.get(id(contract))
            steps = _of_episodes(steps, () if session is None else session.agents)
            if not steps:
                return {}
            try:
                if session is None:
                    session = await self._started(contract)
                body = _body(session.bodies, steps)
                request = StepRequest(StepKind.TICK, session.id, body if self._run.is_inner else bytes(body))
                self._count(session, steps)
                return _actions(session.bodies, steps, await send_async(self._run.ask, request))
            except RETRIED as error:
                if session is not None:
                    del self._sessions[id(contract)]
                    self.broken_off += len(session.agents)
                await self._patience.pause_after(error, self._run.is_over)
                if self._run.is_over():
                    raise
                steps = [step for step in steps if step.ended is None]

    async def _started(self, contract: Contract) -> _Session:
        """A new session.

        Raises:
            BadBody: the service refuses the contract.
            ConfigError: the service does not play games with contracts.
        """
        session = _Session(uuid.uuid4().hex, RowBodies(contract))
        body = json.dumps({**contract.as_dict(), "rows": True}).encode()
        try:
            reply = await send_async(self._run.ask, StepRequest(StepKind.START, session.id, body))
        except BadBody as error:
            raise BadBody(f"the training refuses the game's agents: {error.message}", **error.details) from None
        self._sessions[id(contract)] = session
        with contextlib.suppress(BadBody, KeyError, TypeError):
            if parse_json(reply)["id"] == contract.id:
                return session
        url = self._run.run.url
        message = f"{url} takes no contracts (it answers {reply[:40]!r}): expected a job like game.yaml"
        raise ConfigError(message, url=url)

    def _count(self, session: _Session, steps: Sequence[AgentStep]) -> None:
        """Adds the steps to their agents' episodes."""
        agents = session.agents
        for agent, _, reward, _, ended, *_ in steps:
            sums = agents.get(agent)
            if sums is None:
                agents[agent] = [0.0, 0]
                continue
            sums[0] += reward
            sums[1] += 1
            if ended is not None:
                del agents[agent]
                self.episodes += 1
                self._run.finished(GameResult(sums[0], int(sums[1]), ended))


def _of_episodes(steps: list[AgentStep], agents: Iterable[int]) -> list[AgentStep]:
    """The steps without the ends of agents that have no episode; ``agents`` have one before."""
    if not any(step.ended for step in steps):
        return steps
    running, kept = set(agents), []
    for step in steps:
        if not step.ended or step.agent in running:
            kept.append(step)
        (running.discard if step.ended else running.add)(step.agent)
    return kept


def described(contract: Contract) -> str:
    """A contract in a few words: ``chaser: obs [4], camera [84, 84, 3] -> steer 2, dash of 2``."""
    seen = [f"{spec.name} {list(spec.shape) or f'of {spec.size}'}" for spec in contract.observations]
    done = [f"{part.name} {'of ' * (part.kind == 'discrete')}{part.size}" for part in contract.actions]
    return f"{contract.behaviour}: {', '.join(seen)} -> {', '.join(done)}"


def _actions(bodies: RowBodies, steps: Sequence[AgentStep], reply: bytes) -> dict[int, dict[str, Any]]:
    """The actions of a session's agents, from the reply to its tick."""
    columns = {name: column.tolist() for name, column in bodies.decode_reply(reply).items()}
    acting = [step.agent for step in steps if step.ended is None]
    if any(len(column) != len(acting) for column in columns.values()):
        raise ProtocolError(f"the reply has not the actions of {len(acting)} agents", agents=len(acting))
    rows = zip(*columns.values(), strict=True)
    return {agent: dict(zip(columns, row, strict=True)) for agent, row in zip(acting, rows, strict=True)}


def _body(bodies: RowBodies, steps: Sequence[AgentStep]) -> Decoded:
    """The body of a tick: a row for each step.

    Raises:
        BadBody: a value does not fit the contract; names the agent and the field.
    """
    contract = bodies.contract
    agents, seen, rewards, masks, ends, infos, groups = zip(*steps, strict=True)
    choices = None
    if masks.count(None) < len(masks):
        parts = [part for part in contract.discrete if part.mask]
        choices = {part.name: b"".join([_choices(mask, part) for mask in masks]) for part in parts}
    ended: dict[str, Any] = {}
    if any(ends):
        ended = {name: np.array([end == name for end in ends]) for name in ("terminated", "truncated")}
    names = seen[0].keys()
    try:
        if any(obs.keys() != names for obs in seen):
            _check(contract, steps)
        return bodies.decoded_rows(
            agents,
            {name: [obs[name] for obs in seen] for name in names},
            list(rewards),
            mask=choices,
            groups=groups if any(groups) else None,
            extras={"info": [*map(dict, infos)]} if any(infos) else None,
            **ended,
        )
    except BadBody:
        _check(contract, steps)
        raise


def _choices(mask: Mapping[str, Any] | None, part: ActionPart) -> bytes:
    choices = None if mask is None else mask.get(part.name)
    return b"\1" * part.size if choices is None else bytes(choices)


def _check(contract: Contract, steps: Sequence[AgentStep]) -> None:
    """Raises the error of the first step that does not fit the contract, if there is one."""
    bodies = ContractBodies(contract)
    for step in steps:
        try:
            bodies.encode_tick(step.obs, step.reward, mask=step.mask, extras={"info": dict(step.info)})
        except BadBody as error:
            raise BadBody(f"agent {step.agent}: {error.message}", **error.details) from None
