"""Options of the ``league`` component, of its players, and of ``self_play``. Knows nothing of how they are used."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from brayx.components import is_named

Role = Literal["main", "exploiter", "league_exploiter", "past", "script"]
Weighting = Literal["squared", "linear", "variance"]

LEARNERS = ("main", "exploiter", "league_exploiter")
"""Roles of players that learn."""

MAIN = "main"
"""Name of the player that learns by self-play."""

POOLS = ("latest", "uniform", "pfsp", "champion", "past")
"""What `PlayerConfig.against` can name besides players."""

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_-]*")
_ONLY_LEARNERS = (
    "against", "weighting", "snapshot_every", "snapshot_at", "restart", "share", "trainer",
)  # fmt: skip


class PlayerConfig(BaseModel):
    """One player of a league."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    role: Role
    """``main`` learns against the league. ``exploiter`` learns against one player, ``league_exploiter`` against all
    frozen ones. ``past`` is a registered version of the model, ``script`` a function; these two do not learn."""
    of: str | None = None
    """Player whose weaknesses an ``exploiter`` looks for."""
    script: str | None = None
    """Import path of a ``script``, ``module.function``, searched in the YAML file's folder first."""
    version: Annotated[int, Field(ge=1)] | None = None
    """Registered version of the model that a ``past`` player plays with."""
    against: dict[str, Annotated[float, Field(ge=0)]] = {}
    """Shares of its opponents: ``latest`` (itself, as it is now), ``uniform`` or ``pfsp`` (all that do not learn:
    snapshots, ``past`` and ``script``), ``champion``, ``past`` (its own snapshots and those of its exploiters; for an
    exploiter those of the player that it exploits), or a player's name. Empty: by role, 0.5 ``pfsp``, 0.35 ``latest``
    and 0.15 ``past`` for ``main``; only the exploited player for ``exploiter``; only ``pfsp`` for
    ``league_exploiter``."""
    weighting: Weighting | None = None
    """How ``pfsp`` and ``past`` weigh an opponent that is beaten with probability p: ``squared`` (1 - p)^2, ``linear``
    1 - p, ``variance`` p(1 - p); null: ``variance`` for an ``exploiter``, else ``squared``."""
    snapshot_every: Annotated[int, Field(ge=1)] | None = 200_000
    """Env steps after which a snapshot is frozen; null: only by ``snapshot_at``."""
    snapshot_at: Annotated[float, Field(gt=0, lt=1)] | None = None
    """Mean win rate over its opponents at which a snapshot is frozen before that, but not before a quarter of
    ``snapshot_every`` (null: 50,000 env steps); null: never."""
    restart: Literal["never", "snapshot"] = "never"
    """When an exploiter restarts from its first weights. ``snapshot``: after each of its snapshots."""
    share: Annotated[float, Field(gt=0)] = 1.0
    """Share of the games that it learns from, in proportion to the shares of the other learners."""
    trainer: dict[str, Any] = {}
    """Options of the job's trainer that differ for this player."""

    @property
    def learns(self) -> bool:
        """Whether the player is a learner."""
        return self.role in LEARNERS

    @property
    def restarts(self) -> bool:
        """Whether it restarts from its first weights after a snapshot."""
        return self.restart == "snapshot"

    @property
    def shares(self) -> Mapping[str, float]:
        """`against`, or the default of the role.

        The defaults are those of Vinyals et al. 2019, "Grandmaster level in StarCraft II using multi-agent
        reinforcement learning", supplementary material.
        """
        if self.against:
            return self.against
        if self.role == "main":
            return {"pfsp": 0.5, "latest": 0.35, "past": 0.15}
        if self.role == "exploiter" and self.of is not None:
            return {self.of: 1.0}
        return {"pfsp": 1.0} if self.learns else {}

    @property
    def weights(self) -> Weighting:
        """`weighting`, or the default of the role."""
        return self.weighting or ("variance" if self.role == "exploiter" else "squared")

    @model_validator(mode="after")
    def _fits_its_role(self) -> Self:
        needed = {"exploiter": "of", "script": "script", "past": "version"}
        for role, option in needed.items():
            value = getattr(self, option)
            if self.role == role and value is None:
                raise ValueError(f"{option} is missing, and role {role} needs it")
            if self.role != role and value is not None:
                raise ValueError(f"{option} is {value!r}, and only role {role} has one, not {self.role}")
        if self.script is not None and not is_named(self.script):
            raise ValueError(f"script is {self.script!r}, expected module.function")
        if not self.learns:
            defaults = type(self).model_fields
            options = [name for name in _ONLY_LEARNERS if getattr(self, name) != defaults[name].default]
            if options:
                raise ValueError(f"{options[0]} is for players that learn, and role {self.role} does not")
        if self.against and not sum(self.against.values()):
            raise ValueError("all shares of against are 0, so there is no opponent")
        if self.restart != "never" and self.role == "main":
            raise ValueError("restart is snapshot, and only an exploiter restarts, not role main")
        return self


class GateConfig(BaseModel):
    """When a snapshot becomes champion."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    min_games: Annotated[int, Field(ge=1)] = 100
    """Games that a candidate must have played against the champion. After these it plays on until the interval decides,
    at most four times as many games. A past player that beats it, and not the champion as well, holds it back; after
    this many games against that player, for good."""
    confidence: Annotated[float, Field(gt=0, lt=1)] = 0.95
    """Confidence of the interval of its win rate, whose lower bound must be above a half."""
    share: Annotated[float, Field(ge=0, lt=1)] = 0.1
    """Share of the games that the gate takes while there is a candidate: the newest snapshot of a ``main`` player,
    until it has won or failed. Half of them are against the champion, half against the frozen players that may beat the
    candidate. No player learns from these games."""
    check: str | None = None
    """Import path of a function, ``module.function``, searched in the YAML file's folder first, that scores a
    candidate: less is better. It gets the torch module with the candidate's weights, and the whole job as plain dicts.
    It runs once for each candidate, in a separate process. null: only games decide."""
    at_most: float | None = None
    """With ``check``: the maximum score of a champion."""

    @model_validator(mode="after")
    def _a_check_has_its_limit(self) -> Self:
        if self.check is not None and not is_named(self.check):
            raise ValueError(f"check is {self.check!r}, expected module.function")
        if (self.check is None) != (self.at_most is None):
            raise ValueError(f"check is {self.check!r} and at_most {self.at_most}, expected both or none")
        return self


class LeagueConfig(BaseModel):
    """The league: who plays whom in games of several seats, and how players are rated."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    kind: Literal["league"] = "league"
    model: str
    """Name of the model component that every player plays with."""
    seats: Annotated[int, Field(ge=2, le=1024)] = 2
    """Sessions of a game."""
    teams: dict[str, Annotated[list[str], Field(min_length=1)]] = {}
    """Seats by team, each the AGENT of a session id GAME-agent-AGENT; a team is played by one player. Empty: each seat
    plays for itself."""
    players: dict[str, PlayerConfig]
    """Players by name; at least one of role ``main``, ``exploiter`` or ``league_exploiter``."""
    pool_size: Annotated[int, Field(ge=1, le=10_000)] = 100
    """Maximum snapshots to play against. Beyond that the weakest is dropped, but never the champion, the strongest, or
    a player's newest."""
    resident: Annotated[int, Field(ge=1)] = 8
    """Maximum sets of opponents' weights in memory, besides the live weights; others are fetched when they play."""
    gate: GateConfig = GateConfig()
    """When a snapshot becomes champion."""
    levels: str = "levels.yaml"
    """File of difficulty levels, relative to the YAML's folder: `brayx league calibrate` writes it, services read
    it, if it is there."""

    @property
    def max_versions(self) -> int:
        """``max_versions`` of the model that acts with the opponents: `resident`, and the live weights."""
        return self.resident + 1

    @property
    def learners(self) -> list[str]:
        """Names of the players that learn, in the order of `players`."""
        return [name for name, player in self.players.items() if player.learns]

    @property
    def seat_names(self) -> list[str]:
        """Names of the seats, team by team; empty without teams."""
        return [seat for team in self.teams.values() for seat in team]

    @field_validator("players")
    @classmethod
    def _play_each_other(cls, players: dict[str, PlayerConfig]) -> dict[str, PlayerConfig]:
        for name, player in players.items():
            if not _NAME.fullmatch(name) or name in POOLS:
                raise ValueError(f"a player is named {name!r}, expected letters, digits, - and _, and none of {POOLS}")
            if player.of is not None and (player.of == name or player.of not in players):
                others = ", ".join(other for other in players if other != name) or "none"
                raise ValueError(f"of is {player.of!r} for player {name!r}, expected another player: {others}")
            unknown = [other for other in player.against if other not in POOLS and other not in players]
            if unknown:
                expected = ", ".join([*POOLS, *players])
                raise ValueError(f"against names {unknown[0]!r} for player {name!r}, expected some of {expected}")
        if not any(player.learns for player in players.values()):
            raise ValueError(f"no player learns: one needs role {', '.join(LEARNERS[:-1])} or {LEARNERS[-1]}")
        return players

    @model_validator(mode="after")
    def _teams_have_all_seats(self) -> Self:
        seats = self.seat_names
        if not self.teams:
            return self
        if len(self.teams) < 2:
            raise ValueError("teams has one team, expected two or more")
        twice = next((seat for seat in seats if seats.count(seat) > 1), None)
        if twice is not None:
            raise ValueError(f"teams names seat {twice!r} more than once")
        if len(seats) != self.seats:
            raise ValueError(f"seats is {self.seats}, and teams name {len(seats)}")
        return self


class SelfPlayConfig(BaseModel):
    """Self-play of each behaviour whose contracts name several teams: one team learns at a time, against past versions
    of its model."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    kind: Literal["self_play"] = "self_play"
    snapshot_every: Annotated[int, Field(ge=1)] = 20_000
    """Env steps after which the weights are frozen, to play as an opponent."""
    swap_every: Annotated[int, Field(ge=1)] = 4_000
    """Steps of all teams after which another opponent is drawn. With sessions of several agents it waits until as
    many episodes have begun and ended as the learning team has agents, at most 20 times as long: raise it if none
    does."""
    team_every: Annotated[int, Field(ge=1)] = 100_000
    """Env steps after which another team learns."""
    against: dict[Literal["latest", "uniform", "pfsp", "champion"], Annotated[float, Field(ge=0)]] = {
        "latest": 0.5,
        "uniform": 0.5,
    }
    """Shares of the opponents: ``latest`` (the same weights, so that all teams learn), ``uniform`` or ``pfsp`` (past
    versions, all equally often or hard ones more often), ``champion``."""
    pool_size: Annotated[int, Field(ge=1, le=10_000)] = 10
    """Maximum past versions to play against, as of a league."""
    resident: Annotated[int, Field(ge=1)] = 4
    """Maximum sets of opponents' weights in memory; others are read from files when they play."""
    gate: GateConfig = GateConfig(min_games=50, share=0.2)
    """When a past version becomes champion."""
    levels: str = "levels.yaml"
    """File of difficulty levels, as of a league; behaviours need a file each."""

    def league(self, model: str, player: str = MAIN) -> LeagueConfig:
        """The league of one player that self-play is.

        Args:
            model: name of the model component.
            player: name of the player.
        """
        shares = {str(pool): share for pool, share in self.against.items()}
        main = PlayerConfig(role="main", against=shares, snapshot_every=self.snapshot_every)
        options = {name: getattr(self, name) for name in ("pool_size", "resident", "gate", "levels")}
        return LeagueConfig(model=model, players={player: main}, **options)

    @field_validator("against")
    @classmethod
    def _plays_somebody(cls, against: dict[str, float]) -> dict[str, float]:
        if not sum(against.values()):
            raise ValueError("all shares are 0, so there is no opponent")
        return against
