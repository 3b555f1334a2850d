"""Plays games between seated players, through the job's own doors and gamecores on this machine.

Opens the doors on free ports, starts the job's gamecores, and ends both once enough games have counted. Knows nothing
of learning, and does not choose who plays whom.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Protocol, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from brayx import clock
from brayx.actor.actor import Actor
from brayx.actor.agent import Services
from brayx.actor.agent_actor import AgentActorFactory
from brayx.actor.config import ActorConfig
from brayx.actor.host import LocalHost
from brayx.actor.players import SeatedPlayer
from brayx.actor.serving import Runtime
from brayx.engines.base import layout_of
from brayx.engines.torch import module_weights
from brayx.errors import ConfigError, StartupError
from brayx.jobs.checks import check_gamecores
from brayx.jobs.code import check_code
from brayx.jobs.config import JobConfig
from brayx.jobs.contracts import by_contract, check_served_limits
from brayx.jobs.gamecores import Gamecores, gamecores_of
from brayx.jobs.handles import offer
from brayx.jobs.progress import LINE_EVERY_S, tracebacks
from brayx.jobs.weights import acting_from, pooled
from brayx.league.match import MatchScore
from brayx.league.named import Opponent, check_fits
from brayx.metrics import Recorder
from brayx.model.acting import ActingModel
from brayx.model.build import acting_model
from brayx.model.local import LocalModel
from brayx.model.snapshots import SnapshotModel
from brayx.replay.buffer import NullBuffer

_LOOK_S = 0.1
_CLOSE_S = 2.0
_HOPELESS = 20
"""Number of games that did not count after which a match is given up, if none has counted."""


class MatchSeating(Protocol):
    """Who plays in which game, and how the games end."""

    def assign(self, session: str) -> int:
        """The number of a new session's player."""

    def result(self, session: str, value: object) -> None:
        """Sets the result of a session's seat."""

    def ended(self, session: str, reason: str) -> None:
        """Ends a session."""

    def score(self) -> MatchScore:
        """The score so far."""


def check_playable(job: JobConfig, actor: str) -> None:
    """Checks that games of a job can be played here.

    Raises:
        ConfigError: the job has no gamecores, its code cannot be loaded, or its limits do not fit its contract.
    """
    check_code(job, [actor], mode="serve")
    check_served_limits(by_contract(job))
    if not job.actors[actor].gamecores:
        raise ConfigError(f"{job.file}: {actor}.gamecores is empty: list the games to start")
    check_gamecores(job)


def play(
    job: JobConfig,
    actor: str,
    uri: str,
    model: str,
    sides: Sequence[Opponent],
    games: MatchSeating,
    *,
    title: str,
    total: int,
    timeout_s: float,
) -> tuple[MatchScore, bool]:
    """Plays games until all are played, no game has ended for ``timeout_s``, or Ctrl-C.

    Args:
        job: a job that passes `check_playable`.
        actor: name of the actor component.
        uri: tracking URI, for the job's other models.
        model: name of the model component that players with weights use.
        sides: the players.
        games: decides who plays which session, by index into ``sides``.
        title: title of the progress on standard error.
        total: number of games.
        timeout_s: deadline for the next game to end; if some have ended by then, they are the result.

    Returns:
        The score, and whether Ctrl-C ended the games. Games that run at Ctrl-C do not count as broken off.

    Raises:
        BadWeights: a player's weights do not fit the job's model.
        StartupError: no gamecore connects, or no game ends.
    """
    with (
        _Display(title, total, rated=len(sides) == 2) as display,
        tracebacks(display.say),
        doors(job, actor, uri, model, sides, games) as urls,
    ):
        return _play(job, actor, urls, games, timeout_s, display)


@contextlib.contextmanager
def doors(
    job: JobConfig,
    actor: str,
    uri: str,
    model: str,
    sides: Sequence[Opponent],
    games: MatchSeating,
    actors: Callable[[AgentActorFactory], Callable[[], Actor]] = lambda factory: factory,
) -> Iterator[Mapping[str, str]]:
    """Opens the job's doors for games between the players; yields their URLs.

    Args:
        job, actor, uri, model, sides, games: as for `play`.
        actors: makes the maker of the sessions' actors from the usual one.
    """
    config, as_dict, recorder = on_free_ports(job.actors[actor]), job.in_mode("serve").as_dict(), Recorder()
    loaded = {
        name: acting_from(pooled(job, name, uri), job, name, as_dict, recorder) for name in job.models if name != model
    }
    models: dict[str, LocalModel] = {name: acting.model for name, acting in loaded.items()}
    versions = _versions(sides)
    acting = _acting(job, model, as_dict, sides, versions, recorder)
    built = [*loaded.values(), *([] if acting is None else [acting])]
    services = []
    for version, side in zip(versions, sides, strict=True):
        pinned = {} if acting is None or not version else {model: _Pinned(acting.model, version, side.temperature)}
        services.append(Services({**models, **pinned}, {}, recorder))
    players = _Seated(games, sides, services)
    factory = AgentActorFactory.of(
        config, job.agents, job.folder, as_dict, Services(models, {}, recorder), players=players
    )
    close: list[Callable[[], Awaitable[None]]] = [model.close for model in built]
    host = LocalHost(config, Runtime(actors(factory), recorder, lambda: {"mode": "serve"}, close), name=actor)
    host.open()
    try:
        with offer(models, dict.fromkeys(job.buffers, NullBuffer()), host.loop):
            for acting_model in built:
                acting_model.build(lambda line: None)  # a failure is logged
            yield host.urls
    finally:
        host.close(_CLOSE_S)


def on_free_ports(config: ActorConfig) -> ActorConfig:
    """An actor's options, changed so that all its doors are on free ports of loopback."""
    hosts = dict.fromkeys(("host", "native_host"), "127.0.0.1")
    return config.model_copy(update={"port": 0, **dict.fromkeys(config.own_ports, 0), **hosts})


def _versions(sides: Sequence[Opponent]) -> list[int]:
    """Version of each player's weights, from 1; players that share weights share a version. 0: a script."""
    numbers: dict[int, int] = {}
    return [0 if side.weights is None else numbers.setdefault(id(side.weights), len(numbers) + 1) for side in sides]


def _acting(
    job: JobConfig,
    model: str,
    as_dict: Mapping[str, Any],
    sides: Sequence[Opponent],
    versions: Sequence[int],
    recorder: Recorder,
) -> ActingModel | None:
    """The model, with every player's weights loaded as its version; None: all players are scripts."""
    loads = {version: side.weights for version, side in zip(versions, sides, strict=True) if side.weights is not None}
    if not loads:
        return None
    config = job.models[model]
    module, example = acting_model(job.folder, config.module, model, as_dict)
    layout = layout_of(module_weights(module))
    for side in sides:
        check_fits(side, layout)
    config = config.model_copy(update={"max_versions": max(config.max_versions, len(loads) + 1)})
    (version, weights), *further = loads.items()
    acting = ActingModel(config, module, example, recorder, version=version, weights=weights)
    for version, weights in further:
        acting.model.load(version, weights)
    return acting


class _Pinned(SnapshotModel):
    """The model at a player's version; ignores the version that its agent requests."""

    def pinned(self, version: int | None = None) -> _Pinned:
        return self


class _Seated:
    """Gives each session its player: `brayx.actor.players.Players`."""

    def __init__(self, games: MatchSeating, sides: Sequence[Opponent], services: list[Services]) -> None:
        self._games, self._sides, self._services = games, sides, services

    async def seat(self, session: str, start: Any = None) -> SeatedPlayer:
        """See `brayx.actor.players.Players.seat`."""
        side = self._games.assign(session)
        player = self._sides[side]
        report, leave = (functools.partial(call, session) for call in (self._games.result, self._games.ended))
        return SeatedPlayer(
            player.label,
            self._services[side],
            player.script,
            report,
            leave,
            explores=player.explores,
            delay=player.delay,
        )


def _play(
    job: JobConfig, actor: str, urls: Mapping[str, str], games: MatchSeating, timeout_s: float, display: _Display
) -> tuple[MatchScore, bool]:
    """Runs the gamecores; see `play`."""
    score = games.score()
    with Gamecores(gamecores_of(job, actor), urls, job.files_folder, say=display.say) as cores:
        try:
            since, counted = clock.now(), 0
            while not score.done:
                time.sleep(_LOOK_S)
                cores.check()
                score = games.score()
                display.update(score)
                if score.all.games > counted:
                    since, counted = clock.now(), score.all.games
                late = clock.now() - since > timeout_s
                if not counted:
                    _check_hope(score, cores, urls, timeout_s if late else None)
                elif late:
                    display.say(f"no game has ended for {timeout_s:g} s: the match is given up")
                    break
        except KeyboardInterrupt:
            return games.score(), True
    return score, False


def _check_hope(score: MatchScore, cores: Gamecores, urls: Mapping[str, str], waited_s: float | None) -> None:
    """Raises a `StartupError` if the deadline is over, or so many games failed that none will count.

    Args:
        score: a score without a counted game.
        cores: the gamecores.
        urls: URL of each door by name.
        waited_s: the deadline, if it is over; else None.
    """
    last = f": {cores.messages[-1]}" if cores.messages else ""
    within = "" if waited_s is None else f" within {waited_s:g} s"
    if not score.begun and (waited_s is not None or cores.failures):
        raise StartupError(f"no session came{within}; {cores}, and the doors are {', '.join(urls.values())}{last}")
    lost = score.broken_off + score.contradictory
    if waited_s is not None or lost >= _HOPELESS:
        why = f"; {lost} did not count, the last because {score.reason}" if lost else ""
        raise StartupError(f"no game has counted{within}, of {score.begun} that began{why}{last}")


class _Display:
    """The progress of games on standard error: a bar on a terminal, else a line every few seconds."""

    def __init__(self, title: str, games: int, *, rated: bool) -> None:
        self._console = Console(file=sys.stderr)
        self._title, self._games, self._rated = title, games, rated
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[rate]}"),
        )
        self._bar = Progress(
            *columns, TimeElapsedColumn(), console=self._console, disable=not self._console.is_terminal
        )
        self._task = self._bar.add_task(title, total=games, rate="")
        self._last_s = time.monotonic()

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def say(self, text: str) -> None:
        """Prints a line above the bar."""
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def update(self, score: MatchScore) -> None:
        """Shows the score."""
        tally = score.all
        rate = "" if tally.win_rate is None or not self._rated else f"win rate {tally.win_rate:.3f}"
        self._bar.update(self._task, completed=tally.games, rate=rate)
        if not self._console.is_terminal and time.monotonic() - self._last_s >= LINE_EVERY_S:
            self._last_s = time.monotonic()
            self.say(f"{self._title}: {tally.games} of {self._games} games  {rate}".rstrip())
