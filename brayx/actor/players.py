"""Players of a league from the view of one session: who plays its seat, with which models, and where its result goes.

Knows nothing of how a league draws players, or of games.
"""

from __future__ import annotations

import contextlib
import inspect
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

from brayx.actor.agent import Agent, Services, State
from brayx.errors import LeagueError
from brayx.metrics import Recorder

OPPONENT = "opponent"
"""Key in a start's JSON body that requests an opponent."""
_FAULTS = ("agent_errors", "fragments_dropped", "games_failed")
"""Metrics that are also recorded for sessions that do not train a model."""


@dataclass(frozen=True)
class SeatedPlayer:
    """The player of one session, from its start to its end.

    Attributes:
        label: the player, and for a snapshot its version: ``main`` or ``main:7``.
        services: the models, buffers and recorder of its agents.
        script: agent that plays instead of the job's; None: the job's agents play.
        report: takes the result of the session's seat: ``win``, ``draw``, ``loss`` or a score; None: no league.
        sees: gets the input of each tick and of the stop, before its agents; None: nothing does.
        leave: call once the session has ended, with the reason; later calls do nothing.
        model: name of the model that plays at the player's own version, whatever its aliases say; empty: none.
        reply: JSON value that answers the session's start; None: the usual answer.
        explores: whether its agents read ``train`` as the job's ``mode``, and so explore as in the rated games.
        delay: number of ticks by which its agents see the input late; until then they see the first input.
        release: call once its agents have ended, as nothing acts with its models from then on; later calls do nothing.
        request: what makes `RequestedOpponents.seat` give the session the same player again, in any process; pickles.
            None: a session that moves repeats the request of its start.
    """

    label: str
    services: Services
    script: type[Agent] | None
    report: Callable[[Any], None] | None
    leave: Callable[[str], None]
    model: str = ""
    reply: Mapping[str, Any] | None = None
    explores: bool = False
    delay: int = 0
    release: Callable[[], None] = lambda: None
    request: Any = None
    sees: Callable[[Any], None] | None = None


class Delay:
    """The reaction delay of one session's player, by ``ticks`` ticks: see `SeatedPlayer.delay`."""

    def __init__(self, ticks: int) -> None:
        self._inputs: deque[Any] = deque(maxlen=ticks + 1)

    def seen(self, input: Any) -> Any:
        """Takes a tick's input; returns the input that the agents see."""
        self._inputs.append(input)
        return self._inputs[0]


def no_league(services: Services) -> SeatedPlayer:
    """The player of a session outside of any league: the job's agents, with ``services``."""
    return SeatedPlayer("", services, None, None, lambda reason: None)


class Players(Protocol):
    """Gives each session of a game its player."""

    async def seat(self, session: str, start: Any = None) -> SeatedPlayer:
        """The player of a session that starts.

        Args:
            session: the session's id.
            start: the decoded body of its start.

        Raises:
            BrayxError: there is no seat for it in its game, or the league does not answer.
        """


class RequestedOpponents(Protocol):
    """Gives a session the player that its start asks for."""

    async def seat(self, session: str, request: Any) -> SeatedPlayer | None:
        """The player of a session that starts.

        Args:
            session: the session's id.
            request: the value of `OPPONENT` in the start's body, or the `SeatedPlayer.request` of a session that moves.

        Returns:
            None: the start names no opponent; the field belongs to the game.

        Raises:
            BrayxError: there is no such player, or its weights cannot be loaded.
        """


async def seated(opponents: RequestedOpponents, start: State, request: Any) -> SeatedPlayer | None:
    """The player that a start requests; None: it requests no opponent.

    Args:
        opponents: the players of the league that is served.
        start: state of the start; its body may ask, too.
        request: what the start asks for outside of its body, which takes precedence; or `SeatedPlayer.request`. None:
            nothing.

    Raises:
        BrayxError: there is no such player, or its weights cannot be loaded; or there are no opponents.
    """
    if request is None:
        if not isinstance(start.input, dict) or OPPONENT not in start.input:
            return None
        return await opponents.seat(start.session, start.input[OPPONENT])
    player = await opponents.seat(start.session, request)
    if player is None:  # outside the body, every request is for us
        raise LeagueError("a start cannot request an opponent: no league is served here")
    return player


def request_in_header(text: str) -> dict[str, Any]:
    """Parses ``rating=1200`` to the value of `OPPONENT` in a start's body: ``{"rating": 1200}``.

    Does not check values; text that should be a number stays text.
    """
    key, _, value = text.partition("=")
    kind = {"rating": float, "version": int}.get(key.strip(), str)
    with contextlib.suppress(ValueError):
        return {key.strip(): kind(value.strip())}
    return {key.strip(): value.strip()}


def scripted(function: Callable[[State], Any]) -> type[Agent]:
    """An agent that plays by a function.

    Args:
        function: reads ``state.input`` and writes ``state.output``, as `Agent.on_tick`; may be a coroutine function.
    """

    class Scripted(Agent):
        async def on_tick(self, state: State) -> None:
            done = function(state)
            if inspect.isawaitable(done):
                await done

    return Scripted


@dataclass(frozen=True)
class LearningPlayer:
    """Model, buffers and recorder of a player that learns.

    Attributes:
        model: its acting model, at its newest weights.
        buffers: its replay buffers by name.
        numbers: its recorder.
        caught_up: see `Services.caught_up`.
    """

    model: Any
    buffers: Mapping[str, Any]
    numbers: Recorder
    caught_up: Callable[[], Awaitable[None]] | None = None


class Seating:
    """Makes the `SeatedPlayer` of a session whose player is known.

    Attributes:
        model: as given.

    Args:
        model: name of the model component that all play with.
        snapshot: returns the model that acts with the weights of a snapshot, by its version.
        others: the job's other models by name, which every player shares.
        scripts: agents of the scripted players, by the player's name.
        numbers: the league's recorder.
        nothing: buffers by name that drop everything, for sessions that do not train a model.
    """

    def __init__(
        self,
        model: str,
        snapshot: Callable[[int], Any],
        others: Mapping[str, Any],
        scripts: Mapping[str, type[Agent]],
        numbers: Recorder,
        nothing: Mapping[str, Any],
    ) -> None:
        self.model = model
        self._snapshot = snapshot
        self._others = dict(others)
        self._scripts = dict(scripts)
        self._faults = _Faults(numbers)
        self._nothing = dict(nothing)
        self._learns: dict[str, Services] = {}
        self._only_acts: dict[str, Services] = {}

    def learn(self, name: str, player: LearningPlayer) -> None:
        """Sets the parts of a player that learns, for sessions that start from now on."""
        services = self._services(player.model, player.buffers, player.numbers)
        self._learns[name] = replace(services, caught_up=player.caught_up)
        self._only_acts[name] = self._services(player.model, self._nothing, self._faults)

    def act(self, name: str, model: Any) -> None:
        """As `learn`, for a player whose sessions do not train a model."""
        self._learns[name] = self._only_acts[name] = self._services(model, self._nothing, self._faults)

    def seated(
        self,
        player: str,
        version: int,
        *,
        learns: bool,
        report: Callable[[Any], None],
        leave: Callable[[str], None],
        release: Callable[[], None] = lambda: None,
    ) -> SeatedPlayer:
        """The player of a session.

        Args:
            player: its name.
            version: that of a snapshot; 0: the live player, or a script.
            learns: its trajectory is learned from.
            report, leave, release: as in `SeatedPlayer`.
        """
        label = f"{player}:{version}" if version else player
        script = self._scripts.get(player)
        if script is not None:
            services = Services({}, self._nothing, self._faults)
        elif version:
            services = self._services(self._snapshot(version), self._nothing, self._faults)
        else:
            services = (self._learns if learns else self._only_acts)[player]
        return SeatedPlayer(label, services, script, report, leave, release=release)

    def _services(self, model: Any, buffers: Mapping[str, Any], recorder: Recorder) -> Services:
        return Services({**self._others, self.model: model}, buffers, recorder)


class _Faults(Recorder):
    """The recorder of sessions that do not train a model: records `_FAULTS` only."""

    def __init__(self, to: Recorder) -> None:
        super().__init__()
        self._to = to

    def add(self, name: str, value: float, **options: Any) -> None:
        if name in _FAULTS:
            self._to.add(name, value, **options)
