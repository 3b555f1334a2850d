"""Ledger: the books of a league, one SQLite file. Knows nothing of how games are counted.

A game is written under its id, in one transaction with all that it changes, so it is counted once or not at all.

The journal is a write-ahead log with ``synchronous=NORMAL``. A committed transaction is in the kernel's page cache, so
kill -9 of the process loses nothing. A power failure may lose the last transactions, but never a part of one.
"""

from __future__ import annotations

import hashlib
import sqlite3
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from brayx.errors import LeagueError
from brayx.league.member import INCUMBENT, Member
from brayx.league.payoff import Pair
from brayx.league.ratings import Rating
from brayx.league.snapshots import Snapshot
from brayx.urls import read_only_url

MAX_POINTS = 500
"""Maximum points of a curve."""
_FORMAT = 1
_COUNTERS = ("counted", "broken_off", "contradictory", "refused")
_WAIT_S = 20.0

# A game's id is 16 bytes of its hash: a million games take 30 MB, and two of them get the same with probability 1e-27.
_TABLES = """
CREATE TABLE games (id BLOB PRIMARY KEY) WITHOUT ROWID;
CREATE TABLE pairs (
    a TEXT, b TEXT, wins INTEGER, draws INTEGER, losses INTEGER, recent_score REAL, recent_games REAL,
    PRIMARY KEY (a, b)
) WITHOUT ROWID;
CREATE TABLE members (
    member TEXT PRIMARY KEY, mu REAL, sigma REAL, elo REAL, games INTEGER, drawn INTEGER
) WITHOUT ROWID;
CREATE TABLE snapshots (
    member TEXT PRIMARY KEY, digest TEXT UNIQUE, parent TEXT, env_steps INTEGER, time_s REAL, dropped INTEGER
);
CREATE TABLE counters (name TEXT PRIMARY KEY, value INTEGER) WITHOUT ROWID;
CREATE TABLE facts (name TEXT PRIMARY KEY, value TEXT) WITHOUT ROWID;
"""

# Older books have no such table, so it is not part of the format.
_CURVES = "CREATE TABLE IF NOT EXISTS curves (member TEXT, env_steps INTEGER, points REAL, low REAL, high REAL)"


class RatingPoint(NamedTuple):
    """A point of a curve.

    Attributes:
        env_steps: env steps of the player.
        points: its rating then, see `brayx.league.ratings.Rating.points`.
        low, high: ends of the 95 % interval.
    """

    env_steps: int
    points: float
    low: float
    high: float


class Ledger:
    """The books of one league. Used by one thread at a time.

    One process counts games; another may write curves meanwhile, since SQLite's writers wait for each other.

    Args:
        path: the file, made if there is none; ``:memory:`` keeps nothing.
        read_only: only reads, while another process may write; methods that write fail.

    Raises:
        LeagueError: from here and every method: the file cannot be read or written, or is of another format.
    """

    def __init__(self, path: str | Path, *, read_only: bool = False) -> None:
        self._path = str(path)
        try:
            database = read_only_url(path) if read_only else path
            self._db = sqlite3.connect(
                database, timeout=_WAIT_S, isolation_level=None, check_same_thread=False, uri=read_only
            )  # fmt: skip
            if read_only:
                self._db.execute("BEGIN")  # a transaction reads one consistent state
                self._check_format()
                return
            self._db.execute("PRAGMA journal_mode=WAL")
            self._db.execute("PRAGMA synchronous=NORMAL")
        except sqlite3.Error as error:
            raise self._failed(error) from None
        with self._transaction():
            (version,) = self._db.execute("PRAGMA user_version").fetchone()
            if version == 0:
                for statement in _TABLES.split(";"):
                    self._db.execute(statement)
                self._db.execute(f"PRAGMA user_version={_FORMAT}")
            self._check_format()
            self._db.execute(_CURVES)

    def close(self) -> None:
        """Closes the file."""
        self._db.close()

    # Reading

    def has(self, game: str) -> bool:
        """Whether a game is in the books, counted or not."""
        return bool(self._rows("SELECT 1 FROM games WHERE id = ?", _key(game)))

    def pairs(self) -> dict[tuple[Member, Member], Pair]:
        """All pairs, as `Payoff` takes them."""
        rows = self._rows("SELECT a, b, wins, draws, losses, recent_score, recent_games FROM pairs")
        return {(Member.parse(a), Member.parse(b)): Pair(*results) for a, b, *results in rows}

    def ratings(self) -> dict[Member, Rating]:
        """All ratings, as `Ratings` takes them."""
        rows = self._rows("SELECT member, mu, sigma, elo, games FROM members")
        return {Member.parse(member): Rating(*rating) for member, *rating in rows}

    def drawn(self) -> dict[Member, int]:
        """Seats that each member got in games that have ended."""
        return {Member.parse(member): drawn for member, drawn in self._rows("SELECT member, drawn FROM members")}

    def snapshots(self) -> list[Snapshot]:
        """All snapshots, the oldest first, including those that left the pool."""
        rows = self._rows(
            "SELECT member, digest, parent, env_steps, time_s, dropped FROM snapshots ORDER BY rowid"
        )  # fmt: skip
        return [
            Snapshot(
                Member.parse(member), digest, Member.parse(parent) if parent else None, steps, time_s, bool(dropped)
            )
            for member, digest, parent, steps, time_s, dropped in rows
        ]

    def counters(self) -> dict[str, int]:
        """Games ``counted``, ``broken_off`` and ``contradictory``, and results ``refused``, see `count_game`."""
        return dict.fromkeys(_COUNTERS, 0) | dict(self._rows("SELECT name, value FROM counters"))

    def curves(self) -> dict[Member, list[RatingPoint]]:
        """Ratings over env steps by member, each in the order in which they were written."""
        if not self._rows("SELECT 1 FROM sqlite_master WHERE name = 'curves'"):
            return {}
        curves: dict[Member, list[RatingPoint]] = {}
        for member, *point in self._rows("SELECT member, env_steps, points, low, high FROM curves ORDER BY rowid"):
            curves.setdefault(Member.parse(member), []).append(RatingPoint(*point))
        return curves

    def champion(self, player: str = "") -> Member | None:
        """The champion, if there is one; of a player, if each has its own."""
        label = self.fact(f"champion {player}".rstrip())
        return Member.parse(label) if label else None

    def fact(self, name: str) -> str:
        """What `write_fact` wrote; empty: nothing."""
        rows = self._rows("SELECT value FROM facts WHERE name = ?", name)
        return str(rows[0][0]) if rows else ""

    def incumbents(self) -> list[Member]:
        """Champions from outside the league: the present one, and those that were beaten in its games."""
        members = {*self.ratings(), self.champion()}
        return sorted(member for member in members if member is not None and member.player == INCUMBENT)

    # Writing

    def count_game(
        self,
        game: str,
        pairs: Mapping[tuple[Member, Member], Pair],
        ratings: Mapping[Member, Rating],
        drawn: Mapping[Member, int],
        counters: Mapping[str, int],
    ) -> None:
        """Writes a game that has ended.

        Args:
            game: its id, which must not be in the books.
            pairs: pairs as they are now, those that it changed.
            ratings: ratings as they are now, of its members.
            drawn: seats of each of its members, to be added.
            counters: counts by name, to be added.
        """
        with self._transaction():
            self._db.execute("INSERT INTO games VALUES (?)", (_key(game),))
            self._write_pairs(pairs)
            self._write_members(ratings, drawn)
            self._db.executemany(
                "INSERT INTO counters VALUES (?, ?) ON CONFLICT DO UPDATE SET value = value + excluded.value",
                counters.items(),
            )

    def freeze(
        self,
        snapshot: Snapshot,
        ratings: Mapping[Member, Rating],
        *,
        dropped: Iterable[Member] = (),
        forgotten: Iterable[Member] = (),
    ) -> None:
        """Writes a snapshot and the changes that follow from it.

        Args:
            snapshot: its member and digest must not be in the books.
            ratings: ratings as they are now: the snapshot's, and those of forgotten members.
            dropped: snapshots that leave the pool.
            forgotten: members without results from now on.
        """
        member, digest, parent, *numbers = snapshot
        with self._transaction():
            self._db.execute(
                "INSERT INTO snapshots VALUES (?, ?, ?, ?, ?, ?)",
                (member.label, digest, parent.label if parent else "", *numbers),
            )
            self._write_members(ratings, dict.fromkeys(ratings, 0))
            labels = [snapshot_member.label for snapshot_member in dropped]
            self._db.executemany("UPDATE snapshots SET dropped = 1 WHERE member = ?", [(label,) for label in labels])
            for label in labels + [forgotten_member.label for forgotten_member in forgotten]:
                self._db.execute("DELETE FROM pairs WHERE a = ? OR b = ?", (label, label))

    def crown(self, champion: Member, player: str = "") -> None:
        """Writes the champion, or that of a player."""
        self.write_fact(f"champion {player}".rstrip(), champion.label)

    def write_fact(self, name: str, value: str) -> None:
        """Writes a text under a name."""
        with self._transaction():
            self._db.execute("INSERT OR REPLACE INTO facts VALUES (?, ?)", (name, value))

    def write_curve(self, member: Member, curve: Sequence[RatingPoint]) -> None:
        """Replaces the curve of a member; one of more than `MAX_POINTS` is thinned out."""
        rows = [(member.label, *point) for point in thinned(curve, MAX_POINTS)]
        with self._transaction():
            self._db.execute("DELETE FROM curves WHERE member = ?", (member.label,))
            self._db.executemany("INSERT INTO curves VALUES (?, ?, ?, ?, ?)", rows)

    def _write_pairs(self, pairs: Mapping[tuple[Member, Member], Pair]) -> None:
        rows = [(a.label, b.label, *pair) for (a, b), pair in pairs.items()]
        self._db.executemany("INSERT OR REPLACE INTO pairs VALUES (?, ?, ?, ?, ?, ?, ?)", rows)

    def _write_members(self, ratings: Mapping[Member, Rating], drawn: Mapping[Member, int]) -> None:
        rows = [(member.label, *rating, drawn[member]) for member, rating in ratings.items()]
        self._db.executemany(
            "INSERT INTO members VALUES (?, ?, ?, ?, ?, ?) ON CONFLICT DO UPDATE SET mu = excluded.mu, "
            "sigma = excluded.sigma, elo = excluded.elo, games = excluded.games, drawn = drawn + excluded.drawn",
            rows,
        )

    def _check_format(self) -> None:
        (version,) = self._db.execute("PRAGMA user_version").fetchone()
        if version != _FORMAT:
            raise LeagueError(
                f"books {self._path}: format is {version}, expected {_FORMAT}: another version of brayx wrote them",
                path=self._path,
            )

    def _rows(self, query: str, *values: object) -> list[tuple[Any, ...]]:
        try:
            return self._db.execute(query, values).fetchall()
        except sqlite3.Error as error:
            raise self._failed(error) from None

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        try:
            self._db.execute("BEGIN IMMEDIATE")
            with self._db:  # commits, or rolls back after an exception
                yield
        except sqlite3.Error as error:
            raise self._failed(error) from None

    def _failed(self, error: sqlite3.Error) -> LeagueError:
        return LeagueError(f"books {self._path}: {error}", path=self._path)


def _key(game: str) -> bytes:
    return hashlib.blake2b(game.encode(), digest_size=16).digest()


def thinned(curve: Sequence[RatingPoint], most: int) -> list[RatingPoint]:
    """Thins a curve: keeps every second point from the newest on, repeatedly, until at most ``most`` are left. The
    first one stays.

    Args:
        most: 2 or more.
    """
    points = list(curve)
    while len(points) > most:
        points = [points[0], *points[:0:-2][::-1]]
    return points
