"""Which opponent a start requests: by level, rating, player or version.

Reads the newest league's versions from the registry, their ratings from its books, and the levels from their file.
Knows nothing of sessions or hosts.
"""

from __future__ import annotations

import contextlib
import difflib
import hashlib
import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from brayx.errors import BadBody, ConfigError, LeagueError, VersionUnknown, nearest_version
from brayx.league.files import PLAYER_TAG, POINTS_TAG, books_file
from brayx.league.finding import newest_league, parent_of
from brayx.league.ledger import Ledger
from brayx.league.levels import Levels, Strength, read_levels
from brayx.league.member import Member, Rated
from brayx.tracking import aliases, registry

Limit = Literal["", "weakest", "strongest"]
KEYS = {
    "rating": "a finite number",
    "player": "a player's name",
    "version": "a number of 1 or more",
    "level": "a level's name",
}
"""Keys of a request, and what their values must be."""


class OpponentRequest(NamedTuple):
    """A start's request: one of `KEYS`, and its checked value."""

    key: str
    value: Any


class ChosenOpponent(NamedTuple):
    """The opponent of a session.

    Attributes:
        version: its version in the registry; None: a script.
        player: its player; None: the version is no snapshot.
        points: its rating; None: it has none.
        limit: as `OpponentMix.limit`.
        level: its name if it is a level; else empty.
        temperature, delay: as in `brayx.league.levels.Strength`.
    """

    version: int | None
    player: str | None
    points: float | None
    limit: Limit = ""
    level: str = ""
    temperature: float = 1.0
    delay: int = 0

    @staticmethod
    def of(strength: Strength, level: str = "") -> ChosenOpponent:
        """A calibrated opponent."""
        version, player, points = strength.version, strength.player, strength.points
        return ChosenOpponent(
            version, player, points, level=level, temperature=strength.temperature, delay=strength.delay
        )

    @property
    def label(self) -> str:
        """``main:7``, ``tactical`` (a script) or ``7`` (no snapshot), then level, temperature and delay."""
        label = str(self.version) if self.player is None else Member(self.player, self.version or 0).label
        details = [f"level {self.level}"] if self.level else []
        details += [f"temperature {self.temperature:g}"] if self.temperature != 1.0 else []
        details += [f"delay {self.delay}"] if self.delay else []
        return ", ".join([label, *details])

    @property
    def reply(self) -> dict[str, Any]:
        """The start's reply."""
        points = None if self.points is None else round(self.points, 1)
        opponent: dict[str, Any] = {"player": self.player, "version": self.version, "points": points}
        optional = {"level": self.level, "limit": self.limit}
        return {"opponent": opponent | {name: value for name, value in optional.items() if value}}


def parse_request(value: Any) -> OpponentRequest:
    """Parses the value of ``opponent`` in a start's body.

    Raises:
        BadBody: it is not an object with exactly one of ``rating`` (a finite number), ``player`` (a name), ``version``
            (a number of 1 or more) and ``level`` (a name).
    """
    expected = 'expected one of {"rating": NUMBER}, {"player": NAME}, {"version": NUMBER} and {"level": NAME}'
    if not isinstance(value, dict) or len(value) != 1:
        raise BadBody(f"opponent is {_short(value)}; {expected}", field="opponent")
    ((key, request),) = value.items()
    if key not in KEYS:
        near = difflib.get_close_matches(key, KEYS, n=1, cutoff=0.5)
        advice = f"nearest is {near[0]!r}, " if near else ""
        raise BadBody(f"opponent has {_short(key)}; {advice}{expected}", field="opponent")
    number = isinstance(request, int | float) and not isinstance(request, bool)
    if key == "rating" and number:
        with contextlib.suppress(OverflowError):  # an integer may exceed the range of floats
            if math.isfinite(request):
                return OpponentRequest(key, float(request))
    elif (key in ("player", "level") and isinstance(request, str)) or (
        key == "version" and type(request) is int and request > 0
    ):
        return OpponentRequest(key, request)
    raise BadBody(f"opponent.{key} is {_short(request)}, expected {KEYS[key]}", field=f"opponent.{key}")


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:80] + "..."


@dataclass(frozen=True)
class ServedPool:
    """The registered versions of a model, with the newest league's ratings and the levels.

    Attributes:
        versions: player of each registered version; None: the version is no snapshot.
        snapshots: snapshots in the newest league's pool, the oldest first.
        points: rating of each rated snapshot and script.
        champion: version of the alias ``champion``; None: it is not set.
        levels: content of the levels file; None: there is no such file.
        scripts: names of the scripted players.
    """

    versions: Mapping[int, str | None]
    snapshots: list[Member]
    points: Mapping[Member, float]
    champion: int | None
    levels: Levels | None = None
    scripts: Collection[str] = ()

    def choose(self, request: OpponentRequest, game: str) -> ChosenOpponent:
        """The opponent of a game.

        Raises:
            VersionUnknown: the registry has no such version; names the nearest.
            LeagueError: there are no snapshots, none of this player (names the nearest), none with a rating, no levels,
                or no such level (names the nearest).
        """
        if request.key == "version":
            return self._version(request.value)
        if request.key == "level":
            if self.levels is None:
                raise LeagueError(
                    "there are no levels: `brayx league calibrate` measures those of a league, and opponents of "
                    'self-play are asked for by {"rating": NUMBER}'
                )
            return ChosenOpponent.of(self.levels.level(request.value), request.value)
        if request.key == "player" and request.value in self.scripts:
            return ChosenOpponent(None, request.value, self.points.get(Member(request.value)))
        if not self.snapshots:
            raise LeagueError("the league has no snapshots yet, so it has no opponents: train it first")
        if request.key == "player":
            return self._player(request.value)
        rated = self._rated()
        if not rated:
            raise LeagueError(
                "no snapshot has a rating: the league's books are not here, and no version has the tag "
                f"{POINTS_TAG!r}; ask for a player or a version"
            )
        mix = mix_of([Rated(member, chosen.points or 0.0) for member, chosen in rated.items()], request.value)
        return rated[draw(mix, game).member]._replace(limit=mix.limit)

    def _rated(self) -> dict[Member, ChosenOpponent]:
        """Candidates for a rating, by unique keys: all measured strengths, or without levels the rated snapshots."""
        if self.levels is not None:
            opponents = [ChosenOpponent.of(strength, name) for name, strength in self.levels.levels.items()]
            opponents += [ChosenOpponent.of(strength) for strength in self.levels.others]
            return {Member(f"{given.player}/{i}", given.version or 0): given for i, given in enumerate(opponents)}
        return {
            member: ChosenOpponent(member.version, member.player, self.points[member])
            for member in self.snapshots
            if member in self.points
        }

    def _version(self, version: int) -> ChosenOpponent:
        if not self.versions:
            raise VersionUnknown(f"no version {version}: the model has none", version=version, known=[])
        if version not in self.versions:
            hint, details = nearest_version(version, self.versions)
            raise VersionUnknown(f"the model has no version {version}, {hint}", version=version, **details)
        player = self.versions[version]
        points = None if player is None else self.points.get(Member(player, version))
        return ChosenOpponent(version, player, points)

    def _player(self, player: str) -> ChosenOpponent:
        snapshots = [member for member in self.snapshots if member.player == player]
        if not snapshots:
            players = sorted({*self.scripts, *(member.player for member in self.snapshots)})
            near = difflib.get_close_matches(player, players, n=1, cutoff=0.0)
            raise LeagueError(
                f"player {_short(player)} has no snapshot, nearest is {near[0]!r}; there are: {', '.join(players)}",
                player=player[:80],
                nearest=near[0],
                known=list(players),
            )
        champion = Member(player, self.champion or 0)
        member = champion if champion in snapshots else snapshots[-1]
        return ChosenOpponent(member.version, player, self.points.get(member))


def read_pool(name: str, uri: str, scripts: Collection[str] = (), *, project: str = "", trial: str = "") -> ServedPool:
    """Reads the versions of a registered model, and its newest league; no levels. Blocking.

    Args:
        name: the model's name in the registry.
        uri: tracking URI.
        scripts: names of the scripted players.
        project, trial: as for `brayx.league.finding.newest_league`.

    Raises:
        TrackingError: the registry cannot be read.
        LeagueError: the league's books exist but cannot be read.
        ConfigError: there is no league of this trial.
    """
    entries = registry.versions(name, uri)
    leagues = {entry.version: parent_of(uri, entry.run_id) for entry in entries if PLAYER_TAG in entry.tags}
    tagged = [entry for entry in entries if leagues.get(entry.version) is not None]
    versions = {entry.version: entry.tags.get(PLAYER_TAG) for entry in entries}
    champion = aliases(name, uri).get("champion")
    if not tagged and not trial:
        return ServedPool(versions, [], {}, champion, scripts=scripts)
    league = newest_league(uri, project, trial, model=name)
    tagged = [entry for entry in tagged if leagues[entry.version] == league.run_id]
    members = {Member(entry.tags[PLAYER_TAG], entry.version): entry.tags for entry in tagged}
    points = {member: value for member, tags in members.items() if (value := _number(tags.get(POINTS_TAG))) is not None}
    snapshots = list(members)
    books = books_file(league)
    if books.exists():
        with contextlib.closing(Ledger(books, read_only=True)) as ledger:
            rated = {**members, **{Member(script): {} for script in scripts}}
            points |= {member: rating.points for member, rating in ledger.ratings().items() if member in rated}
            # After a kill, the registry may have versions that did not reach the pool.
            frozen = {snapshot.member for snapshot in ledger.snapshots() if not snapshot.dropped}
            snapshots = [member for member in members if member in frozen]
    return ServedPool(versions, snapshots, points, champion, scripts=scripts)


class OpponentMix(NamedTuple):
    """The two opponents that stand for a rating.

    Attributes:
        lower, upper: neighbours in rating; the same one if it has exactly the rating, or if there is a limit.
        share: share of the games that ``upper`` plays, from 0 to 1.
        limit: the rating is below the ``weakest`` member or above the ``strongest``, which plays; empty: it is neither.
    """

    lower: Rated
    upper: Rated
    share: float
    limit: Limit


def mix_of(pool: Iterable[Rated], rating: float) -> OpponentMix:
    """The mix whose expected points are ``rating``: ``(1 - share) * lower + share * upper``.

    Of members with equal points, the one of the newest version is taken.

    Args:
        pool: members to choose from; at least one.
        rating: finite points.
    """
    ranked = sorted(pool, key=lambda rated: (rated.points, rated.member.version, rated.member.player))
    newest = {rated.points: rated for rated in ranked}  # of equal points the last one
    points = sorted(newest)
    weakest, strongest = newest[points[0]], newest[points[-1]]
    if rating < weakest.points:
        return OpponentMix(weakest, weakest, 0.0, "weakest")
    if rating > strongest.points:
        return OpponentMix(strongest, strongest, 0.0, "strongest")
    lower = newest[max(point for point in points if point <= rating)]
    upper = newest[min(point for point in points if point >= rating)]
    gap = upper.points - lower.points
    return OpponentMix(lower, upper, (rating - lower.points) / gap if gap else 0.0, "")


def draw(mix: OpponentMix, game: str) -> Rated:
    """The opponent of a game, drawn by the game's id."""
    digest = hashlib.blake2b(game.encode(), digest_size=8, person=b"strength").digest()
    return mix.upper if int.from_bytes(digest, "big") < mix.share * 2**64 else mix.lower


def levels_of(file: Path, name: str) -> Levels | None:
    """Reads the levels of a model; None: there is no such file.

    Args:
        file: the levels file.
        name: the model's name in the registry.

    Raises:
        ConfigError: the file cannot be read, or is of another model.
    """
    levels = read_levels(file)
    if levels is not None and levels.model != name:
        raise ConfigError(f"{file} has levels of model {levels.model!r}, and the league's snapshots are in {name!r}")
    return levels


def _number(text: str | None) -> float | None:
    """A tag's value as a finite number; None: it is not one."""
    try:
        value = float(text or "nan")
    except ValueError:
        return None
    return value if math.isfinite(value) else None
