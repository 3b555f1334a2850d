"""What commands read of a league's books, also while a training writes them: standings, ratings, all of it as JSON.

`brayx.league.finding` finds the league. Knows nothing of how games are played.
"""

from __future__ import annotations

import contextlib
import csv
import io
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from brayx.jobs.config import JobConfig
from brayx.league.finding import books_of
from brayx.league.fit import Fitted, fit
from brayx.league.ledger import Ledger
from brayx.league.member import Member
from brayx.league.payoff import Pair, Payoff
from brayx.league.ratings import Ratings
from brayx.league.snapshots import Snapshot
from brayx.tables import aligned
from brayx.text_files import write_whole
from brayx.tracking import Trial, tracking_uri

EXPORT_FORMAT = 1
"""Number of the format of `document`; another one means that keys changed their meaning."""

_NEWEST = 5


class MemberRow(NamedTuple):
    """A member of a league with its rating.

    Attributes:
        member: the member.
        points, low, high: its skill on Elo's scale, and the 95 % interval.
        mu, sigma, elo, games: as `brayx.league.ratings.Rating`.
        drawn: seats that it got in games that have ended.
        champion: whether it is the champion.
        snapshot: when and how it was frozen; None: it learns, or is a script.
        fitted: its points by all games between versions; None: it is no version, or has no such games.
    """

    member: Member
    points: float
    low: float
    high: float
    mu: float
    sigma: float
    elo: float
    games: int
    drawn: int
    champion: bool
    snapshot: Snapshot | None
    fitted: Fitted | None

    def as_dict(self) -> dict[str, Any]:
        """The row as JSON values, the columns of `ratings_csv`."""
        frozen, fitted = self.snapshot, self.fitted
        return {
            "member": self.member.label,
            "player": self.member.player,
            "version": self.member.version or None,
            "points": self.points,
            "low": self.low,
            "high": self.high,
            "mu": self.mu,
            "sigma": self.sigma,
            "fitted": None if fitted is None else fitted.points,
            "fitted_low": None if fitted is None else fitted.low,
            "fitted_high": None if fitted is None else fitted.high,
            "elo": self.elo,
            "games": self.games,
            "drawn": self.drawn,
            "champion": self.champion,
            "env_steps": None if frozen is None else frozen.env_steps,
            "time_s": None if frozen is None else frozen.time_s,
        }


@dataclass(frozen=True)
class Books:
    """The books of a league at one moment.

    Attributes:
        ratings: ratings of all members, also of those that have left the pool.
        drawn: seats that each member got in games that have ended.
        pairs: results of every two members of the pool.
        snapshots: all snapshots, the oldest first.
        champion: the champion, if there is one.
        counters: games by outcome, and ``refused`` results.
    """

    ratings: Ratings
    drawn: Mapping[Member, int]
    pairs: Mapping[tuple[Member, Member], Pair]
    snapshots: Sequence[Snapshot]
    champion: Member | None
    counters: Mapping[str, int]

    @staticmethod
    def read(trial: Trial) -> Books:
        """Reads the books of a league's trial; a running training is not disturbed.

        Raises:
            LeagueError: they are not here, or cannot be read.
        """
        with contextlib.closing(Ledger(books_of(trial), read_only=True)) as ledger:
            return Books(
                Ratings(ledger.ratings()),
                ledger.drawn(),
                ledger.pairs(),
                ledger.snapshots(),
                ledger.champion(),
                ledger.counters(),
            )

    def snapshot(self, member: Member) -> Snapshot | None:
        """The snapshot of a member, if it is one."""
        return next((snapshot for snapshot in self.snapshots if snapshot.member == member), None)

    def standings(self) -> list[MemberRow]:
        """All that can be drawn and have been rated, the strongest first."""
        rows, fitted = [], self.fitted()
        for member, rating in self.ratings.state().items():
            frozen = self.snapshot(member)
            if frozen is not None and frozen.dropped:
                continue
            low, high = self.ratings.interval(member)
            drawn, crowned = self.drawn.get(member, 0), member == self.champion
            rows.append(
                MemberRow(member, rating.points, low, high, *rating, drawn, crowned, frozen, fitted.get(member))
            )
        return sorted(rows, key=lambda row: (-row.points, row.member))

    def fitted(self) -> dict[Member, Fitted]:
        """Points of the versions by all games between two of them, on the scale of their ratings.

        A version's rating moves by games against members that learn, whose ratings are late. So it depends on when the
        version was drawn; these points do not.
        """
        pairs = {(a, b): pair for (a, b), pair in self.pairs.items() if a.version and b.version}
        members = sorted({member for pair in pairs for member in pair})
        number = {member: i for i, member in enumerate(members)}
        results = {(number[a], number[b]): (pair.wins, pair.draws, pair.losses) for (a, b), pair in pairs.items()}
        anchors = {i: self.ratings[member].points for member, i in number.items()}
        return dict(zip(members, fit(len(members), results, anchors), strict=True)) if members else {}


def place_of(where: str, tracking: str | None) -> tuple[str, str]:
    """The project and the tracking URI that the words of a command mean.

    Args:
        where: a project's name, or a job's YAML; empty: any project.
        tracking: MLflow's URI, or the path of its sqlite file; None: the job's, or the default.

    Raises:
        ConfigError: the job cannot be read.
    """
    if Path(where).suffix not in (".yaml", ".yml"):
        return where, tracking_uri(tracking)
    job = JobConfig.load(where)
    return job.project, tracking_uri(tracking or job.tracking.uri)


def show(trial: Trial, books: Books, now_s: float | None = None) -> str:
    """The league as text: its table, its counters and its newest snapshots.

    Args:
        trial: the league's trial.
        books: what its books hold.
        now_s: seconds since 1970, for ages; None: now.
    """
    now_s = time.time() if now_s is None else now_s
    champion = "no champion yet" if books.champion is None else f"champion {books.champion.label}"
    table = [("player", "points", "95 % interval", "fitted", "Elo", "games", "drawn", "env steps", "age", "")]
    for row in books.standings():
        frozen = row.snapshot
        steps, age = ("-", "-") if frozen is None else (f"{frozen.env_steps:,}", age_text(now_s - frozen.time_s))
        interval = f"{row.low:.0f} to {row.high:.0f}"
        fitted = "-" if row.fitted is None else f"{row.fitted.points:.0f}"
        mark = "champion" if row.champion else ""
        table.append(
            (
                row.member.label, f"{row.points:.0f}", interval, fitted, f"{row.elo:.0f}", f"{row.games:,}",
                f"{row.drawn:,}", steps, age, mark,
            )
        )  # fmt: skip
    newest = [("snapshot", "parent", "env steps", "age", "digest", "")]
    for snapshot in reversed(books.snapshots[-_NEWEST:]):
        parent = "-" if snapshot.parent is None else snapshot.parent.label
        state = "left the pool" if snapshot.dropped else ""
        age = age_text(now_s - snapshot.time_s)
        newest.append((snapshot.member.label, parent, f"{snapshot.env_steps:,}", age, snapshot.digest[:12], state))
    counted = {name: f"{value:,}" for name, value in books.counters.items()}
    return "\n".join(
        [
            f"league {trial.name!r} of project {trial.project!r}: {champion}",
            "",
            *aligned(table),
            "",
            f"games: {counted['counted']} counted, {counted['broken_off']} broken off, {counted['contradictory']} "
            f"contradictory; results refused: {counted['refused']}",
            "",
            *(aligned(newest) if len(newest) > 1 else ["no snapshots yet"]),
        ]
    )


def ratings_csv(books: Books) -> str:
    """The table as CSV with a heading; columns as the keys of `MemberRow.as_dict`."""
    rows = [row.as_dict() for row in books.standings()]
    text = io.StringIO()
    columns = list(rows[0]) if rows else ["member"]
    writer = csv.DictWriter(text, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def document(trial: Trial, books: Books) -> dict[str, Any]:
    """All of the books as JSON values.

    Returns:
        ``format``: `EXPORT_FORMAT`. ``project``, ``trial``, ``run_id``: the league's trial. ``time_s``: when the books
        were read, in seconds since 1970. ``champion``: a member, or null; members are ``NAME`` or ``NAME:VERSION``.
        ``counters``: games ``counted``, ``broken_off`` and ``contradictory``, and results ``refused``.
        ``ratings``: a list, the strongest first, of objects as `MemberRow.as_dict`: ``member``, its ``player`` and
        ``version`` (null: it learns, or is a script), ``points`` with the 95 % interval ``low`` to ``high``, ``mu``,
        ``sigma``, the points ``fitted`` (`Books.fitted`) with ``fitted_low`` to ``fitted_high``, or null, ``elo``,
        ``games``, ``drawn``, ``champion``, and of snapshots ``env_steps`` and ``time_s``.
        ``payoff``: a list of pairs: members ``a`` and ``b``, the ``wins``, ``draws`` and ``losses`` of ``a``, its
        ``win_rate``, a draw as half a win, and ``recent_win_rate``, with recent games weighted more.
        ``snapshots``: a list, the oldest first: ``member``, ``digest`` of its weights, ``parent`` (a member, or null),
        ``env_steps``, ``time_s``, and whether it was ``dropped`` from the pool.
    """
    payoff = Payoff(pairs=books.pairs)
    return {
        "format": EXPORT_FORMAT,
        "project": trial.project,
        "trial": trial.name,
        "run_id": trial.run_id,
        "time_s": time.time(),
        "champion": None if books.champion is None else books.champion.label,
        "counters": dict(books.counters),
        "ratings": [row.as_dict() for row in books.standings()],
        "payoff": [
            {
                "a": a.label,
                "b": b.label,
                "wins": pair.wins,
                "draws": pair.draws,
                "losses": pair.losses,
                "win_rate": payoff.win_rate(a, b),
                "recent_win_rate": payoff.recent(a, b),
            }
            for (a, b), pair in sorted(books.pairs.items())
        ],
        "snapshots": [
            {
                **snapshot._asdict(),
                "member": snapshot.member.label,
                "parent": None if snapshot.parent is None else snapshot.parent.label,
            }
            for snapshot in books.snapshots
        ],
    }


def export_books(trial: Trial, books: Books, file: Path) -> None:
    """Writes `document` to a file, whole or not at all.

    Raises:
        ConfigError: the file cannot be written.
    """
    write_whole(file, json.dumps(document(trial, books), indent=1) + "\n")


def age_text(seconds: float) -> str:
    """A time span in its largest unit: ``40 s``, ``12 min``, ``3 h``, ``2 days``."""
    for unit, length in (("days", 86_400.0), ("h", 3600.0), ("min", 60.0)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{max(seconds, 0.0):.0f} s"
