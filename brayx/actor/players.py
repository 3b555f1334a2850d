"""Players of a league from the view of one session: who plays its seat, and where its result goes.

Knows nothing of how a league draws players.
"""

from __future__ import annotations

import contextlib
import inspect
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from brayx.actor.agent import Agent, Services, State
from brayx.errors import LeagueError

OPPONENT = "opponent"
"""Key in a start's JSON body that requests an opponent."""


@dataclass(frozen=True)
class SeatedPlayer:
    """The player of one session, from its start to its end.

    Attributes:
        label: the player, and for a snapshot its version: ``main`` or ``main:7``.
        services: the models, buffers and recorder of its agents.
        script: agent that plays instead of the job's; None: the job's agents play.
        report: takes the result of the session's seat: ``win``, ``draw``, ``loss`` or a score; None: no league.
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

    async def seat(self, session: str) -> SeatedPlayer:
        """The player of a session that starts.

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
            None: the start asks for nobody, and the value is the game's own.

        Raises:
            BrayxError: there is no such player, or its weights cannot be loaded.
        """


async def seated(opponents: RequestedOpponents, start: State, request: Any) -> SeatedPlayer | None:
    """The player that a start asks for; None: it asks for nobody.

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
    found = await opponents.seat(start.session, request)
    if found is None:  # outside the body, every request is for us
        raise LeagueError("a start cannot request an opponent: no league is served here")
    return found


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
