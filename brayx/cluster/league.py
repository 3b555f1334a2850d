"""A league on Ray: the actor that draws and counts games, and the job's handle of it.

The books are a file on the job's machine, so the actor runs there. If Ray restarts it, it continues from the books.
`brayx.cluster.league_seats` is the replicas' side. Knows nothing of learners or models.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import TypeAdapter

from brayx.cluster.named import ANSWER_S, call_with_retry, is_restarted, named_actor, on_this_node
from brayx.errors import BrayxError, DeadlineExceeded, ModelError
from brayx.league.config import LeagueConfig
from brayx.league.games import Game
from brayx.league.gates import Verdict
from brayx.league.league import League
from brayx.league.ledger import Ledger
from brayx.league.member import Member
from brayx.league.rivals import Rivals
from brayx.league.training import RunningLeague
from brayx.model.snapshots import SnapshotFiles
from brayx.types import Weights

THE_LEAGUE = "the league"
"""The actor's name in messages."""
_MAX_AWAY_S = 300.0
"""Time without an answer from the league after which a training fails."""


@dataclass(frozen=True)
class Learning:
    """Names of the Ray actors that receive the data of a player that learns.

    Attributes:
        buffers: actor of each buffer, by the buffer's name.
        hub: hub of the player's trial.
        life: number of the player's restarts; replicas use the highest.
    """

    buffers: Mapping[str, str]
    hub: str
    life: int = 0


@dataclass(frozen=True)
class Rival(Learning):
    """A player of a league of rivals (`brayx.league.rivals`).

    Attributes:
        behaviour: the behaviour that it is.
        config: its options.
        weights: the folder of its snapshots' weights.
        done: it learns no more.
    """

    behaviour: str = field(kw_only=True)
    config: LeagueConfig = field(kw_only=True)
    weights: str = field(kw_only=True)
    done: bool = False


_RIVALS, _JOINED = TypeAdapter(dict[str, Rival]), "rivals"
"""The players of a league of rivals as JSON, and its name in the books."""


class Drawn(NamedTuple):
    """A new game, and the players that learn now.

    Attributes:
        game: the game.
        learning: the players that learn, by name.
    """

    game: Game
    learning: Mapping[str, Learning]


class LeagueProgress(NamedTuple):
    """How far a league has come.

    Attributes:
        env_steps: of all players that learn; None: not known since the actor's restart.
        champions: the champions by player.
        done: rivals that learn no more.
    """

    env_steps: int | None
    champions: Mapping[str, Member]
    done: Collection[str] = ()


class _LeagueActor(League):
    """`League` as a Ray actor. A call is repeated after a lost answer, so every method may be called twice."""

    def __init__(
        self, config: LeagueConfig, books: str, weights: str, seed: int, learning: Mapping[str, Learning]
    ) -> None:
        super().__init__(config, Ledger(books), seed=seed)
        self._files = SnapshotFiles(Path(weights))
        self._learning: Mapping[str, Any] = dict(learning)
        self._knows_learners = False
        self._env_steps: dict[str, int] = {}

    def progress(self) -> LeagueProgress:
        champions = [champion for player in self.learners if (champion := self.champion_of(player)) is not None]
        env_steps = sum(self._env_steps.values()) if self._env_steps else None
        return LeagueProgress(env_steps, {champion.player: champion for champion in champions})

    def drawn(self, game: str) -> Drawn:
        return Drawn(self.draw(game), self._learning)

    def due_of(self, player: str, env_steps: int, learning: Mapping[str, Learning]) -> str:
        """As `due`; also sets the players that learn, which a restarted actor has forgotten.

        Games drawn before a player's restart took effect do not count, see `void_games`.
        """
        for name, parts in learning.items():
            known = self._learning.get(name)
            restarted = known is not None and parts.life > known.life
            if restarted and self._knows_learners:  # otherwise this actor restarted, not the player
                self.void_games(name)
        self._knows_learners, self._learning = True, dict(learning)
        self._env_steps[player] = env_steps
        for other in set(self.learners) - self._learning.keys():
            self.retire(other, "its learner has ended")
        return self.due(player, env_steps)

    def freeze(self, player: str, version: int, digest: str, env_steps: int) -> Member:
        member = Member(player, version)
        if any((known.member, known.digest) == (member, digest) for known in self.snapshots):
            return member
        return super().freeze(player, version, digest, env_steps)

    def crown(self, candidate: Member) -> Verdict:
        champion = self.champion_of(candidate.player)
        return Verdict(True, "it is champion") if candidate == champion else super().crown(candidate)

    def weights(self, version: int, player: str) -> Weights:
        return self._files.read(version)

    def pid(self) -> int:
        return os.getpid()


class _RivalsActor(_LeagueActor, Rivals):
    """`Rivals` as a Ray actor. Players join by `due_of`; a restarted actor finds them in the books."""

    def __init__(self, books: str, seed: int, learning: Mapping[str, Rival], restarted: bool | None = None) -> None:
        if is_restarted() if restarted is None else restarted:
            with contextlib.closing(Ledger(books)) as ledger:
                learning = {**learning, **_RIVALS.validate_json(ledger.fact(_JOINED) or "{}")}
        configs: Any = {name: rival.config for name, rival in learning.items()}
        super().__init__(configs, books, "", seed, learning)

    def players(self) -> dict[str, str]:
        return {rival.behaviour: name for name, rival in self._learning.items()}

    def progress(self) -> LeagueProgress:
        return super().progress()._replace(done=[name for name, rival in self._learning.items() if rival.done])

    def due_of(self, player: str, env_steps: int, learning: Mapping[str, Rival]) -> str:  # type: ignore[override]
        for name in learning.keys() - self._configs.keys():
            self.join(name, learning[name].config)
        if learning != self._learning:
            self._ledger.write_fact(_JOINED, _RIVALS.dump_json(dict(learning)).decode())
        return super().due_of(player, env_steps, learning)

    def weights(self, version: int, player: str) -> Weights:
        return SnapshotFiles(Path(self._learning[player].weights)).read(version)


def create_rivals(name: str, books: Path, seed: int, learning: Mapping[str, Rival]) -> Any:
    """As `create_league`, for rivals; their weights are in folders of their own."""
    actor = named_actor(_RivalsActor, name, scheduling_strategy=on_this_node())
    return actor.remote(str(books.absolute()), seed, dict(learning))


def create_league(
    name: str, config: LeagueConfig, folder: Path, books: Path, seed: int, learning: Mapping[str, Learning]
) -> Any:
    """Starts the league's actor on this node, and returns Ray's handle; it ends with its job.

    Args:
        name: name of the actor.
        config: the league's options.
        folder: the folder of the snapshots' weights, see `SnapshotFiles`.
        books: the file of the books.
        seed: as for `League`.
        learning: the players that learn.
    """
    actor = named_actor(_LeagueActor, name, scheduling_strategy=on_this_node())
    return actor.remote(config, str(books.absolute()), str(folder.absolute()), seed, dict(learning))


class RemoteLeague(RunningLeague):
    """The job's handle of the league.

    Each call has a deadline, which leaves time for a restart of the actor.

    Args:
        actor: the actor.
        learning: the players that learn.
        say: gets a line when the league no longer answers.
        timeout_s: deadline of a call.

    Raises:
        DeadlineExceeded: by every method: no answer in time; try again later.
        ModelError: by every method: the actor has ended for good, or did not answer for five minutes.
    """

    def __init__(
        self, actor: Any, learning: Mapping[str, Learning], say: Callable[[str], None], *, timeout_s: float = ANSWER_S
    ) -> None:
        self._actor = actor
        self._learning: dict[str, Any] = dict(learning)
        self._say = say
        self._timeout_s = timeout_s
        self._away_since: float | None = None

    def learn(self, player: str, parts: Learning) -> None:
        """Sets the actors that get a restarted player's data; replicas learn them with their next game."""
        life = self._learning[player].life + 1
        self._learning[player] = dataclasses.replace(parts, life=life)

    def retire(self, player: str, reason: str) -> None:
        """See `League.retire`. The next `due` tells the league, so that a slow league delays nothing here."""
        self._learning.pop(player, None)

    def due(self, player: str, env_steps: int) -> str:
        """See `League.due`."""
        if player not in self._learning:
            return ""
        reason: str = self.call("due_of", player, env_steps, self._learning)
        return reason

    def call(self, method: str, *args: Any) -> Any:
        began = time.monotonic()
        try:
            answer = call_with_retry(getattr(self._actor, method), *args, timeout_s=self._timeout_s, what=THE_LEAGUE)
        except DeadlineExceeded as error:
            if self._away_since is None:
                self._away_since = began
                self._say(f"{error.message}: the training goes on, and asks again")
            away_s = time.monotonic() - self._away_since
            if away_s > _MAX_AWAY_S:
                raise ModelError(f"{THE_LEAGUE} has not answered for {away_s:.0f} s") from error
            raise
        except BrayxError:  # an answer, too
            self._away_since = None
            raise
        self._away_since = None
        return answer


class RemoteRival(RemoteLeague):
    """The handle of one player's training of a league of rivals.

    Args:
        actor, say: as for `RemoteLeague`.
        player: the player.
        learning: the players, which all handles share; may grow.
    """

    def __init__(self, actor: Any, player: str, learning: dict[str, Rival], say: Callable[[str], None]) -> None:
        super().__init__(actor, learning, say)
        self.rival, self._learning = player, learning
