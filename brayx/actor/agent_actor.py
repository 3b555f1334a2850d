"""`AgentActor`, the actor that answers with agents.

It turns bodies into states, lets the agents act on them, and encodes their replies. It knows nothing of how many
sessions there are, of doors, or of time limits.
"""

from __future__ import annotations

import asyncio
import contextlib
import pickle
import random
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import brayx.clock as clock
from brayx.actor.actor import Actor
from brayx.actor.agent import Agent, Services, State
from brayx.actor.agents import SessionAgents
from brayx.actor.codec import Codec, dumps_json
from brayx.actor.config import ActorConfig, AgentConfig, MessageConfig
from brayx.actor.contract_agent import with_reward
from brayx.actor.contracts import ContractCodec, behaviour_of, missing_arrays, unknown_behaviour
from brayx.actor.episodes import Episodes
from brayx.actor.failures import SessionFailures
from brayx.actor.games import Games, Seat
from brayx.actor.limits import ActionLimits
from brayx.actor.logs import REQUESTED, SessionLog, SessionLogOpener, SessionLogs
from brayx.actor.models import Arms, Carried, SessionModels
from brayx.actor.players import (
    Delay,
    Players,
    RequestedOpponents,
    SeatedPlayer,
    no_league,
    request_in_header,
    seated,
)
from brayx.components import load, load_named
from brayx.errors import AgentError, BadBody, LeagueError
from brayx.gamecore.contract import Contract
from brayx.gamecore.protocol import StepKind, StepRequest, game_of
from brayx.strict_json import parse_json

_LAST_WORD_S = 1.0
_SAMPLED = 8
"""Time one tick in eight for the session's arms: recording every tick costs measurable throughput."""


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
        behaviours: the factories of a job whose games have several behaviours, by name; may grow. Empty: it has one,
            and this is its factory.
        admit: awaited with the start of a session that moves here, whose behaviour this process may not know yet.
    """

    agents: Mapping[str, type[Agent]]
    config: Mapping[str, Any]
    services: Services
    codec: Codec = field(default_factory=Codec)
    episode_length: int | None = 128
    recorders: Sequence[SessionLogOpener] = ()
    games: Games | None = None
    arms: Arms | None = None
    players: Players | None = None
    opponents: RequestedOpponents | None = None
    behaviours: Mapping[str, AgentActorFactory] = field(default_factory=dict)
    admit: Callable[[StepRequest], Awaitable[None]] | None = None

    @classmethod
    def of(
        cls,
        config: ActorConfig,
        agents: Mapping[str, AgentConfig],
        folder: str,
        job: Mapping[str, Any],
        services: Services,
        **parts: Any,
    ) -> AgentActorFactory:
        """The factory of an actor component, on every host. Imports the user's modules.

        Args:
            config: the actor's options.
            agents: options of the job's agents by name; the actor's own are among them.
            folder: where modules are looked up first.
            job: the job as plain dicts.
            services: see the attribute.
            **parts: values for the attributes from `recorders` on, but `games`.

        Raises:
            ConfigError: a module or class does not exist, or ``missing``, ``forbidden`` or ``forced`` does not fit the
                contract.
        """

        def message(options: MessageConfig | None) -> Any:
            return None if options is None else load(options.module, options.message, folder)

        if config.serialize == "contract":
            contract = Contract.parse(job["contract"])
            learns = job["mode"] != "serve"
            missing = missing_arrays(contract, config.missing) if config.missing and not learns else {}
            ActionLimits.of_job(contract, config.limits, learns=learns)
            codec: Codec = ContractCodec(contract=contract, missing=missing, limits=config.limits, learns=learns)
        else:
            codec = Codec(config.serialize, message(config.tick_input_proto), message(config.tick_output_proto))
        classes = {name: load(agents[name].module, agents[name].class_name, folder) for name in config.agents}
        if config.reward is not None:
            reward = load_named(config.reward, folder)
            classes = {name: with_reward(agent, reward) for name, agent in classes.items()}
        return cls(
            agents=classes,
            config=job,
            services=services,
            codec=codec,
            episode_length=config.episode_length,
            games=Games() if config.share == "game" else None,
            **parts,
        )

    def __call__(self) -> AgentActor:
        return AgentActor(self)

    def playing(self, start: bytes) -> AgentActorFactory:
        """The factory of the behaviour that a start names.

        Raises:
            BadBody: there are several, and it names none of them.
        """
        if len(self.behaviours) < 2:
            return self  # its codec says what does not fit
        codecs = {name: factory.codec for name, factory in self.behaviours.items()}
        contracts = {name: codec.contract for name, codec in codecs.items() if isinstance(codec, ContractCodec)}
        behaviour = behaviour_of(parse_json(start) if start else None, contracts)
        if behaviour not in self.behaviours:
            raise unknown_behaviour(behaviour, self.behaviours)
        return self.behaviours[behaviour]


class AgentActor(Actor):
    """Answers each tick by letting every agent act on one shared `State`, and cuts the states into episodes."""

    def __init__(self, factory: AgentActorFactory) -> None:
        self._factory = factory
        self._codec = factory.codec
        self._services = factory.services
        self._failures = SessionFailures(self._services.recorder)
        self._player = no_league(self._services)
        self._delay: Delay | None = None
        self._models = SessionModels(self._services, {}, {})
        self._agents = SessionAgents({}, {}, State(""), self._models, self._failures)
        self._episodes = Episodes("", (), self._services, self._failures, None)
        self._logs = SessionLogs()
        self._seat: Seat | None = None
        self._session = ""
        self._start = self._stop = b""
        self._request: Any = None
        self._recorded_for = ""
        self._traceparent = ""
        self._carried: Carried | None = None
        self._tick = 0
        self._counted = 0
        self._offset = random.randrange(_SAMPLED)  # so that short sessions have their share of samples

    def ask(self, opponent: str) -> None:
        if self._factory.opponents is None:
            super().ask(opponent)
        self._request = request_in_header(opponent)

    def record(self) -> None:
        if not any(recorder.on_request for recorder in self._factory.recorders):
            super().record()
        self._recorded_for = REQUESTED

    def trace(self, traceparent: str) -> None:
        self._traceparent = traceparent
        self._logs.trace(traceparent)
        self._watch_forwards()

    async def start(self, session: str, body: bytes) -> bytes:
        self._factory = factory = self._factory.playing(body)
        codec, start = factory.codec.opened(body)
        state = State(session, kind="start", input=start, output=codec.empty())
        self._session, self._start, self._codec = session, body, codec
        self._player = player = await self._seated(state)
        self._request = player.request or self._request  # in case the session moves
        self._delay = Delay(player.delay) if player.delay else None
        try:
            # A delayed tick may have rows of other agents.
            if player.delay and isinstance(codec, ContractCodec) and codec.rows:
                raise LeagueError(f"player {player.label!r} reacts late, so it needs a session for each agent")
            self._failures = SessionFailures(player.services.recorder)
            report = None if player.report is None else self._report
            services = replace(player.services, report=report, keep=self._keep)
            self._models = await SessionModels.open(
                services, factory.arms, self._drawn_by(session), self._carried, fixed=player.model
            )
            self._services = self._models.shared
            self._agents = self._make_agents(state)
            reply = codec.started(state.output) if player.reply is None else dumps_json(player.reply).encode()
            alias = next((arm.alias for arm in self._models.arms.values()), "")
            self._logs = SessionLogs(factory.recorders, session, body, player.label, self._recorded_for, reply, alias)
            self._logs.trace(self._traceparent or _traceparent_in(start))
            self._watch_forwards()
        except BaseException:
            player.leave("error")  # a failed start has no end
            player.release()
            raise
        self._episodes = Episodes(session, tuple(self._agents), self._services, self._failures, factory.episode_length)
        if self._carried is None:
            self._models.count("arm_sessions", 1.0)
        if factory.games is not None:  # last: a failed start has no end at which to leave
            self._seat = factory.games.join(session, tick=self._tick, agents=len(self._agents))
        return reply

    async def snapshot(self) -> bytes | None:
        """The agents' own snapshots, after the episode so far has been handed over, so that none of it is lost.

        None in a game of a league in training, whose result this process counts.
        """
        is_counted = self._factory.players is not None and self._player.report is not None
        if is_counted or any(type(agent).snapshot is Agent.snapshot for agent in self._agents):
            return None
        with self._services.use():
            if len(self._episodes.states) > 1:
                await self._episodes.hand_over(done=False)
                await self._episodes.settle()
            snapshots = []
            for agent in self._agents:
                with self._failures.counted(agent.name, "snapshot"):
                    snapshots.append(agent.snapshot())
            if any(data is None for data in snapshots):
                return None
            self._count_ticks()
        # Between Ray's own processes only: no door ever reads it.
        session = self._start, self._request, self._delay, self._logs.why, self._tick
        return pickle.dumps((*session, snapshots, self._models.carried()))

    async def restore(self, session: str, snapshot: bytes) -> None:
        start, self._request, delay, self._recorded_for, self._tick, snapshots, self._carried = pickle.loads(snapshot)
        self._counted = self._tick
        if self._factory.admit is not None:
            await self._factory.admit(StepRequest(StepKind.START, session, start))
        await self.start(session, start)
        self._delay = delay
        self._logs.event("resumed")
        if self._services.outcome.lost:
            self._failures.fail(self._services.outcome.lost)
        try:
            with self._services.use():
                for agent, data in zip(self._agents, snapshots, strict=True):
                    with self._failures.counted(agent.name, "restore"):
                        agent.restore(data)
        except BaseException as error:
            if isinstance(error, Exception):
                self._failures.count_game()  # it has no end
            self._leave_game()
            self._player.leave("error")
            self._player.release()
            raise

    async def tick(self, body: bytes) -> bytes:
        logs = self._logs
        began = clock.now() if logs.taking else 0.0
        try:
            state = self._state_of(body)
        except BadBody as error:
            logs.failed(State(self._session, tick=self._tick), bytes(body), began, self.arrived, error.message)
            raise
        if logs.taking:
            logs.phase("decode")
        if self._player.sees is not None:
            self._player.sees(state.input)
        with self._agents.services.use():
            try:
                await self._agents.act(state)
                if logs.taking:
                    logs.phase("agents")
                reply = self._encoded(state, body)
            except BaseException as error:
                logs.failed(state, bytes(body), began, self.arrived, self._failures.why(error))
                raise
            if self._models.arms and (self._tick + self._offset) % _SAMPLED == 0:
                self._models.count("arm_seconds", clock.now() - self.arrived)
            self._tick += 1
            is_full = self._episodes.add(state)
            if taking := logs.taking:
                sent, replied = bytes(body), bytes(reply)  # encodes the bodies of a bridge in this process
                for log in taking:
                    log.tick(state, sent, replied, began, self.arrived)
        if is_full:
            self._count_ticks()
            with self._services.use():
                await self._episodes.hand_over(done=False)
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
        with self._failures.counted(self._agents.last, "on_deadline"):
            return self._codec.encode(chosen.output)

    def forwarded(self) -> None:
        self._logs.event("forwarded")

    async def missed(self) -> None:
        """Cuts the episode before the tick: no fragment may hold an action that was not the agent's."""
        self._logs.event("fallback", last=True)
        self._episodes.states.pop()
        with self._services.use():
            await self._episodes.break_off()

    async def skipped(self, ticks: int) -> None:
        """Cuts the episode where the ticks would have been: the states of a fragment follow each other."""
        self._logs.event(f"skipped {ticks}")
        self._tick += ticks
        with self._services.use():
            await self._episodes.break_off()

    async def stop(self, body: bytes) -> bytes:
        self._stop = body
        if body:
            try:
                stop = self._codec.decode_stop(body)
            except BadBody as error:
                self._logs.event(f"stop refused: {error.message}", last=True)
                raise
            state = State(self._session, tick=self._tick, kind="stop", input=stop)
            if self._player.sees is not None:
                self._player.sees(state.input)
            results = [] if self._player.report is None else self._codec.results(state.input)
            for result in results:
                self._report(result)
                self._player.leave("stop")  # before the reply: its receiver can rely on the stored result
            self._episodes.states.append(state)
            self._logs.stop(body, _outcome(state.input))
        self._leave_game()  # now, so that the game's other sessions do not wait until the session's id is free
        return b"Game Stopped"

    def on_moved(self) -> None:
        self._leave_game(moved=True)
        self._leave_league("moved")

    async def on_end(self, reason: str) -> None:
        episodes = self._episodes
        try:
            self._leave_game()
            self._count_ticks()
            if reason == "error":
                self._models.count("arm_errors", 1.0)
                self._failures.ended_by_error()
            with self._services.use():
                try:
                    if episodes.states:
                        episodes.states[-1].end = reason
                        await episodes.hand_over(done=True)
                    await episodes.settle()
                except asyncio.CancelledError:
                    episodes.give_up()
                    async with asyncio.timeout(_LAST_WORD_S):
                        await self._agents.end(reason)
                    raise
                await self._agents.end(reason)
        finally:
            if reason == "error" or (self._failures and self._services.outcome.result is None):
                self._failures.count_game()
            elif reason == "stop" and self._services.outcome.result is None and self._player.script is None:
                self._failures.count_without_return(self._stop)
            self._agents.release()
            episodes.states = []
            self._leave_league(reason)

    async def call(self, body: bytes) -> bytes:
        state = State("", input=self._codec.decode(body), output=self._codec.empty())
        if not len(self._agents):
            self._agents = self._make_agents(State("", kind="start"))
        with self._services.use():
            await self._agents.act(state, self._models.for_agents(len(self._agents)))
        return self._codec.encode(state.output)

    def facts(self) -> dict[str, Any]:
        """``player``: its player in a league, else empty; ``arms``: labels of its versions of models that are served by
        an alias; ``result``: the newest return that its agents recorded, or None."""
        return {
            "player": self._player.label,
            "arms": [arm.label for arm in self._models.arms.values()],
            "result": self._services.outcome.result,
        }

    def attach(self, log: SessionLog) -> bytes:
        self._logs.attach(log)
        self._watch_forwards()
        return self._start

    def detach(self, log: SessionLog) -> None:
        self._logs.detach(log)
        self._watch_forwards()

    def _keep(self, why: str) -> None:
        self._recorded_for = self._recorded_for or why  # an agent's constructor comes before the logs
        self._logs.keep(why)
        self._watch_forwards()

    def _watch_forwards(self) -> None:
        self._agents.watch(self._logs.forward if self._logs.taking else None)

    def _report(self, result: Any) -> None:
        assert self._player.report is not None
        self._player.report(result)
        self._logs.reported(result)

    async def _seated(self, start: State) -> SeatedPlayer:
        factory = self._factory
        if factory.players is not None:
            return await factory.players.seat(start.session, start.input)
        if factory.opponents is not None:
            player = await seated(factory.opponents, start, self._request)
            if player is not None:
                return player
        return no_league(factory.services)

    def _drawn_by(self, session: str) -> str:
        """The key that draws the arm. Sessions of one game share it: otherwise each arm's returns depend on the
        other's."""
        return (game_of(session) or session) if self._factory.games is not None else session

    def _state_of(self, body: bytes) -> State:
        codec = self._codec
        seen = codec.decode(body)
        if self._delay is not None:
            seen = self._delay.seen(seen)
        if self._seat is None:
            return State(self._session, tick=self._tick, input=seen, output=codec.empty())
        return self._seat.state(tick=self._tick, input=seen, output=codec.empty())

    def _encoded(self, state: State, body: bytes) -> bytes:
        try:
            return self._codec.reply(state.output, body)
        except AgentError as error:
            self._failures.add(self._agents.last, "on_tick", error)
            raise

    def _leave_game(self, *, moved: bool = False) -> None:
        if self._seat is not None:
            self._seat.leave(moved=moved)

    def _leave_league(self, reason: str) -> None:
        """Gives the player back and ends the logs, every one even if another raises."""
        with contextlib.ExitStack() as last:  # from the last to the first
            last.callback(self._logs.end, reason, self._services.outcome.result)
            last.callback(self._player.release)
            last.callback(self._player.leave, reason)

    def _make_agents(self, state: State) -> SessionAgents:
        player, classes, config = self._player, self._factory.agents, self._factory.config
        if player.script is not None:
            classes = {player.label: player.script}
        if player.explores:
            config = {**config, "mode": "train"}
        return SessionAgents(classes, config, state, self._models, self._failures, self._carried)

    def _count_ticks(self) -> None:
        """Adds the ticks since the last call to the arms' counts: counting every tick costs measurable time."""
        if self._models.arms and self._tick > self._counted:
            self._models.count("arm_ticks", float(self._tick - self._counted))
        self._counted = self._tick


def _traceparent_in(start: Any) -> str:
    """The ``traceparent`` in a start's parsed body; empty: there is none."""
    value = start.get("traceparent") if isinstance(start, dict) else None
    return value if isinstance(value, str) else ""


def _outcome(stop: Any) -> str:
    """``terminated`` or ``truncated``, as a stop's parsed body says; empty: it says neither."""
    value = stop.get if isinstance(stop, dict) else partial(getattr, stop)
    return next((name for name in ("terminated", "truncated") if value(name, False) is True), "")
