"""`AgentActor`, the actor that answers with agents, and how it reads and writes bodies.

It turns bodies into states and states into episodes. It knows nothing of how many sessions there are, of doors, or of
time limits.
"""

from __future__ import annotations

import asyncio
import json
import pickle
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from google.protobuf.message import DecodeError, EncodeError, Message

from brayx.actor.actor import Actor, is_cancelled
from brayx.actor.agent import Agent, Services, State
from brayx.actor.failures import LOAD, SessionFailures, note, was_cut_off
from brayx.actor.games import Games, Seat
from brayx.actor.logs import SessionLog, SessionRecorder
from brayx.actor.models import Arms, Carried, SessionModels
from brayx.actor.players import OPPONENT, Opponents, OtherArms, Players, SeatedPlayer, asked_in_header
from brayx.errors import (
    AgentError,
    BadBody,
    BrayxError,
)
from brayx.faults import AGENTS_LOGGER
from brayx.gamecore.protocol import game_of
from brayx.logs import limited
from brayx.metrics import OVERLOADED

logger = limited(__name__)
_agents_logger = limited(AGENTS_LOGGER)

_LAST_WORD_S = 1.0


@dataclass(frozen=True)
class Codec:
    """Converts bodies to ``state.input`` and ``state.output`` to replies.

    Attributes:
        kind: ``json``, ``proto`` or None for raw bytes.
        tick_input, tick_output: message classes for ``proto``.
    """

    kind: Literal["json", "proto"] | None = "json"
    tick_input: Callable[[], Message] | None = None
    tick_output: Callable[[], Message] | None = None

    def decode(self, body: bytes) -> Any:
        """Parses a body; an empty JSON body is None.

        Raises:
            BadBody: it does not parse.
        """
        if self.kind == "json":
            if not body:
                return None
            try:
                return json.loads(body)
            except (ValueError, RecursionError) as error:
                raise BadBody(f"body is not JSON: {error}; it starts with {body[:40]!r}") from None
        if self.kind == "proto" and self.tick_input is not None:
            message = self.tick_input()
            try:
                message.ParseFromString(body)
            except DecodeError as error:
                raise BadBody(f"body is not a {message.DESCRIPTOR.full_name} message: {error}") from None
            return message
        return body

    def empty(self) -> Any:
        """Initial ``state.output``."""
        if self.kind == "json":
            return {}
        if self.kind == "proto" and self.tick_output is not None:
            return self.tick_output()
        return b""

    def encode(self, output: Any) -> bytes:
        """The reply for an output.

        Raises:
            AgentError: the agents left something that cannot be encoded.
        """
        if isinstance(output, bytes):
            return output
        try:
            if self.kind == "json":
                return _dumps(output).encode()
            if isinstance(output, Message):
                return output.SerializeToString()
        except (TypeError, ValueError, RecursionError, EncodeError) as error:
            raise AgentError(f"state.output cannot be sent as {self.kind}") from error
        raise AgentError(f"state.output is {type(output).__name__}, expected bytes with serialize: {self.kind}")


_dumps = json.JSONEncoder(separators=(",", ":"), allow_nan=False).encode


@dataclass(frozen=True)
class AgentActorFactory:
    """Makes an `AgentActor` for each session.

    Attributes:
        agents: agent classes by component name, in the order in which they are created.
        config: the whole job as plain dicts; each agent gets it.
        services: the models, buffers and recorder that the agents reach.
        codec: format of tick bodies.
        episode_length: transitions an episode is cut at; None: no cut.
        recorders: get each session from its start to its end.
        games: shares states between the sessions of one game. None: each session has its own.
        arms: chooses each session's model versions, if models are served by an alias.
        players: gives each session its player, in the training of a league.
        opponents: gives a session the player that its start asks for, where a league is served.
    """

    agents: Mapping[str, type[Agent]]
    config: Mapping[str, Any]
    services: Services
    codec: Codec = Codec()
    episode_length: int | None = 128
    recorders: Sequence[SessionRecorder] = ()
    games: Games | None = None
    arms: Arms | None = None
    players: Players | None = None
    opponents: Opponents | None = None

    def __call__(self) -> AgentActor:
        return AgentActor(self)


class AgentActor(Actor):
    """Answers each tick by letting every agent act on one shared `State`, and cuts the states into episodes."""

    def __init__(self, factory: AgentActorFactory) -> None:
        self._factory = factory
        self._models = SessionModels(factory.services, {}, {})
        self._services = factory.services
        self._of_agent: list[Services] = []
        self._carried: Carried | None = None
        self._counted = 0
        self._codec = factory.codec
        self._cut = factory.episode_length + 1 if factory.episode_length else None
        self._agents: Sequence[Agent] = ()
        self._session = ""
        self._start = b""
        self._tick = 0
        self._episode: list[State] = []
        self._handed_over: asyncio.Task[None] | None = None
        self._logs: list[SessionLog] = []
        self._seat: Seat | None = None
        self._player: SeatedPlayer | None = None
        self._asked: dict[str, Any] | None = None
        self._late: deque[Any] | None = None
        self._failures = SessionFailures(self._services.recorder)

    def ask(self, opponent: str) -> None:
        if self._factory.opponents is None:
            super().ask(opponent)
        self._asked = asked_in_header(opponent)

    async def start(self, session: str, body: bytes) -> bytes:
        state = State(session, kind="start", input=self._codec.decode(body), output=self._codec.empty())
        self._session, self._start = session, body
        # Sessions of one game share an arm: otherwise each arm's returns would depend on the other arm.
        drawn = (game_of(session) or session) if self._factory.games is not None else session
        if self._factory.players is not None:
            self._player = await self._factory.players.seat(session)
        elif self._factory.opponents is not None:
            asked, in_body = self._asked, isinstance(state.input, dict) and OPPONENT in state.input
            if asked is not None or in_body:
                self._player = await self._factory.opponents.seat(session, asked or state.input[OPPONENT])
        try:
            arms = self._factory.arms
            if self._player is not None:
                if arms is not None and self._player.model:
                    arms = OtherArms(arms, self._player.model)
                self._services = replace(self._player.services, report=self._player.report)
                if self._player.delay:
                    self._late = deque(maxlen=self._player.delay + 1)
                self._failures = SessionFailures(self._services.recorder)
            if self._factory.recorders:
                player = "" if self._player is None else self._player.label
                opened = [each.open(session, body, player) for each in self._factory.recorders]
                self._logs = [log for log in opened if log is not None]
                self._services = replace(self._services, keep=self._keep)
            self._models = await SessionModels.open(self._services, arms, drawn, self._carried)
            self._services = self._models.shared
            self._make_agents(state)
        except BaseException:
            self._leave_league("error")  # a failed start has no end
            raise
        if self._carried is None:
            self._models.count("arm_sessions", 1.0)
        games = self._factory.games
        if games is not None:  # last: a failed start has no end at which to leave
            self._seat = games.join(session, tick=self._tick, agents=len(self._agents))
        if self._player is None or self._player.reply is None:
            return b"Game Started"
        return _dumps(self._player.reply).encode()

    async def snapshot(self) -> bytes | None:
        """The agents' own snapshots, after the episode so far has been handed over, so that none of it is lost.

        None in the training of a league, where a session's seat is in this process.
        """
        if self._factory.players is not None or any(type(agent).snapshot is Agent.snapshot for agent in self._agents):
            return None
        with self._services.use():
            if len(self._episode) > 1:
                await self._hand_over(done=False)
                await self._settle()
            agents = []
            for agent in self._agents:
                with self._failures.counted(agent.name, "snapshot"):
                    agents.append(agent.snapshot())
            if any(data is None for data in agents):
                return None
            self._count_ticks()
        # Between Ray's own processes only: no door ever reads it.
        return pickle.dumps((self._start, self._asked, self._tick, agents, self._models.carried()))

    async def restore(self, session: str, snapshot: bytes) -> None:
        start, self._asked, self._tick, agents, self._carried = pickle.loads(snapshot)
        self._counted = self._tick
        await self.start(session, start)
        self._mark("resumed")
        if self._services.outcome.lost:
            self._failures.fail(self._services.outcome.lost)
        try:
            with self._services.use():
                for agent, data in zip(self._agents, agents, strict=True):
                    with self._failures.counted(agent.name, "restore"):
                        agent.restore(data)
        except BaseException as error:
            if isinstance(error, Exception):
                self._failures.count_game()  # it has no end
            self._leave_game()
            self._leave_league("error")
            raise

    async def tick(self, body: bytes) -> bytes:
        codec, logs = self._codec, self._logs
        began = time.perf_counter() if logs else 0.0
        seen = codec.decode(body)
        if self._late is not None:
            self._late.append(seen)
            seen = self._late[0]
        if self._seat is None:
            state = State(self._session, tick=self._tick, input=seen, output=codec.empty())
        else:
            state = self._seat.state(tick=self._tick, input=seen, output=codec.empty())
        with self._services.use():
            try:
                await self._act(state, self._of_agent)
                try:
                    reply = codec.encode(state.output)
                except AgentError as error:
                    self._failures.add(self._agents[-1].name, "on_tick", error)
                    raise
            except BaseException:
                for log in logs:
                    log.event("error")
                    log.tick(state, body, b"", began)
                raise
            self._tick += 1
            self._episode.append(state)
            for log in logs:
                log.tick(state, body, reply, began)
            if self._cut is not None and len(self._episode) >= self._cut:
                await self._hand_over(done=False)
        return reply

    def fallback(self, tick: int, body: bytes) -> bytes | None:
        """The agents' own choice, if each has one: `Agent.on_deadline`."""
        if any(type(agent).on_deadline is Agent.on_deadline for agent in self._agents):
            return None
        chosen = State(self._session, tick=tick, input=self._codec.decode(body), output=self._codec.empty())
        with self._services.use():
            for agent in self._agents:
                with self._failures.counted(agent.name, "on_deadline"):
                    agent.on_deadline(chosen)
        with self._failures.counted(self._agents[-1].name, "on_deadline"):
            return self._codec.encode(chosen.output)

    async def missed(self) -> None:
        """Cuts the episode before the tick: no fragment may hold an action that was not the agent's."""
        self._mark("fallback", last=True)
        self._episode.pop()
        await self._break_off()

    async def skipped(self, ticks: int) -> None:
        """Cuts the episode where the ticks would have been: the states of a fragment follow each other."""
        self._mark(f"skipped {ticks}")
        self._tick += ticks
        await self._break_off()

    async def _break_off(self) -> None:
        episode, self._episode = self._episode, []
        if len(episode) > 1:
            await self._settle()
            with self._services.use():
                self._handed_over = asyncio.create_task(self._on_episode(episode, False))

    async def stop(self, body: bytes) -> bytes:
        if body:
            state = State(self._session, tick=self._tick, kind="stop", input=self._codec.decode(body))
            if self._player is not None and isinstance(state.input, dict) and "result" in state.input:
                self._player.report(state.input["result"])
                self._leave_league("stop")  # before the reply: whoever gets it can rely on the result being kept
            self._episode.append(state)
        self._leave_game()  # now, so that the game's other sessions do not wait until the session's id is free
        return b"Game Stopped"

    def on_moved(self) -> None:
        self._leave_game(moved=True)
        self._leave_league("moved")
        self._end_logs("moved")

    async def on_end(self, reason: str) -> None:
        self._leave_game()
        self._count_ticks()
        if reason == "error":
            self._models.count("arm_errors", 1.0)
            self._failures.ended_by_error()
        try:
            with self._services.use():
                try:
                    if self._episode:
                        self._episode[-1].end = reason
                        await self._hand_over(done=True)
                    await self._settle()
                except asyncio.CancelledError:
                    self._give_up()
                    async with asyncio.timeout(_LAST_WORD_S):
                        await self._end_agents(reason)
                    raise
                await self._end_agents(reason)
        finally:
            if reason == "error" or (self._failures and self._services.outcome.result is None):
                self._failures.count_game()
            self._leave_league(reason)
            self._end_logs(reason)
            self._agents, self._episode = (), []

    async def call(self, body: bytes) -> bytes:
        state = State("", input=self._codec.decode(body), output=self._codec.empty())
        if not self._agents:
            self._make_agents(State("", kind="start"))
        with self._services.use():
            await self._act(state, self._models.for_agents(len(self._agents)))
        return self._codec.encode(state.output)

    def _keep(self, why: str) -> None:
        for log in self._logs:
            log.keep(why)

    def _end_logs(self, reason: str) -> None:
        logs, self._logs = self._logs, []
        for log in logs:
            log.end(reason, self._services.outcome.result)

    def _mark(self, what: str, *, last: bool = False) -> None:
        for log in self._logs:
            log.event(what, last=last)

    def _leave_game(self, *, moved: bool = False) -> None:
        if self._seat is not None:
            self._seat.leave(moved=moved)

    def _leave_league(self, reason: str) -> None:
        if self._player is not None:
            self._player.leave(reason)

    def _make_agents(self, state: State) -> None:
        config = self._factory.config
        made = []
        classes = self._factory.agents
        if self._player is not None:
            if self._player.script is not None:
                classes = {self._player.label: self._player.script}
            if self._player.explores:
                config = {**config, "mode": "train"}
        self._of_agent = self._models.for_agents(len(classes), self._carried)
        for (name, agent_class), own in zip(classes.items(), self._of_agent, strict=True):
            try:
                with own.use():
                    made.append(agent_class(name, config, state))
            except Exception as error:
                self._failures.add(name, "constructor", error)
                self._failures.count_game()  # it has no end
                if isinstance(error, BrayxError):
                    raise
                raise AgentError(f"agent {name!r} raised in the constructor", agent=name) from error
        self._agents = made

    async def _act(self, state: State, services: Sequence[Services]) -> None:
        """Runs all agents, each with its own services; the first one that raises cancels the others."""
        if len(self._agents) == 1:
            await self._on_tick(self._agents[0], state, services[0])
            return
        try:
            async with asyncio.TaskGroup() as group:
                for agent, own in zip(self._agents, services, strict=True):
                    group.create_task(self._on_tick(agent, state, own))
        except* BrayxError as errors:
            first = _first(errors)
            raise first from first.__cause__

    async def _on_tick(self, agent: Agent, state: State, services: Services) -> None:
        try:
            if services is self._services:  # which are in use
                await agent.on_tick(state)
                return
            with services.use():
                await agent.on_tick(state)
        except asyncio.CancelledError as error:
            self._failures.cut_off("on_tick", note(agent.name, "on_tick", error))
            raise
        except Exception as error:
            self._failures.add(agent.name, "on_tick", error)
            if isinstance(error, BrayxError):
                raise
            raise AgentError(
                f"agent {agent.name!r} raised in on_tick at tick {state.tick}", agent=agent.name
            ) from error

    def _count_ticks(self) -> None:
        """Adds the ticks since the last call to the arms' counts: counting every tick costs measurable time."""
        if self._models.arms and self._tick > self._counted:
            self._models.count("arm_ticks", float(self._tick - self._counted))
        self._counted = self._tick

    async def _hand_over(self, *, done: bool) -> None:
        """Gives the episode to the agents, concurrently with later ticks; the next episode begins with its last state.

        One hand-over runs at a time: the next waits, so that an agent slower than its game slows that game alone
        instead of piling up episodes. If the wait is cancelled the episode stays where it is, for `on_end`.
        """
        await self._settle()
        self._count_ticks()
        episode = self._episode
        self._episode = [] if done else episode[-1:]
        self._handed_over = asyncio.create_task(self._on_episode(episode, done))

    async def _settle(self) -> None:
        """Waits until the current hand-over ends, in any way; cancelling the caller does not cancel it."""
        if self._handed_over is None:
            return
        try:
            await asyncio.wait({self._handed_over})
        except asyncio.CancelledError:
            self._failures.cut_off("on_episode", f"{was_cut_off('on_episode')}, and a tick waited for it")
            raise

    def _give_up(self) -> None:
        """Counts as lost what is not handed over yet, because the session's end ran out of time."""
        was_running = self._handed_over is not None and self._handed_over.cancel()
        if was_running or self._episode:
            self._lose_episode("on_episode")
        if self._episode:
            logger.error("session %s: no time to hand over its last episode, it is lost", self._session)
            why = f"{was_cut_off('on_episode')}, and the last episode waited for it"
            self._services.recorder.add("fragments_dropped", float(len(self._agents)), label="deadline", note=why)

    async def _on_episode(self, episode: list[State], done: bool) -> None:
        agents = self._agents
        for at, agent in enumerate(agents):
            try:
                await agent.on_episode(episode, done)
            except asyncio.CancelledError as error:
                logger.error("session %s: %s.on_episode was cancelled, the episode is lost", self._session, agent.name)
                self._lose_episode("on_episode")
                lost = len(agents) - at if is_cancelled() else 1  # the agents after it do not get the episode
                why = note(agent.name, "on_episode", error)
                self._services.recorder.add("fragments_dropped", float(lost), label="cancelled", note=why)
                if is_cancelled():
                    raise
            except Exception as error:
                _agents_logger.exception(
                    "session %s: %s.on_episode raised, its episode is lost", self._session, agent.name
                )
                loaded = isinstance(error, LOAD)
                label, why = (OVERLOADED, note(agent.name, "on_episode", error)) if loaded else ("agent_error", "")
                self._services.recorder.add("fragments_dropped", 1.0, label=label, note=why)
                self._failures.add(agent.name, "on_episode", error)
                self._lose_episode(OVERLOADED if loaded else "on_episode")

    def _lose_episode(self, label: str) -> None:
        """Records that an episode was lost, and why: a return recorded later would lack its rewards."""
        self._failures.fail(label)
        self._services.outcome.lost = label

    async def _end_agents(self, reason: str) -> None:
        for agent in self._agents:
            try:
                await agent.on_session_end(reason)
            except asyncio.CancelledError as error:
                logger.error("session %s: %s.on_session_end was cancelled", self._session, agent.name)
                if reason != "drained":  # then the service ends, and waits for no hook
                    self._failures.add(agent.name, "on_session_end", error)
                if is_cancelled():
                    raise
            except Exception as error:
                _agents_logger.exception("session %s: %s.on_session_end raised", self._session, agent.name)
                self._failures.add(agent.name, "on_session_end", error)


def _first(group: BaseExceptionGroup[BrayxError]) -> BrayxError:
    for error in group.exceptions:
        if isinstance(error, BaseExceptionGroup):
            return _first(error)
        return error
    raise AssertionError("an exception group is never empty")
