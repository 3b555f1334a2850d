"""The pictures of a league: ratings over env steps, win rates of pairs, and draws of each player.

Reads the league's books, which the training writes meanwhile, so MLflow's process can draw. Loads no torch.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from brayx.league.files import DIGEST_TAG, POINTS_TAG
from brayx.league.ledger import Ledger, RatingPoint
from brayx.league.member import Member
from brayx.league.payoff import Payoff
from brayx.league.ratings import Ratings
from brayx.league.snapshots import Snapshot
from brayx.tracking import Trial, tag
from brayx.tracking.registry import versions

if TYPE_CHECKING:
    from matplotlib.figure import Figure

RATINGS_FILE, PAYOFF_FILE, DRAWN_FILE = "league-ratings.png", "league-payoff.png", "league-drawn.png"

_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
"""Colours that colour-blind people can tell apart (Okabe and Ito 2008, "Color universal design")."""
_MOVED = 2.0
"""Points by which a rating or an end of its interval moves before its curve gets another point."""
_FEW = 12
"""Maximum members of a payoff picture that shows its numbers."""


def keep_curves(trial: Trial, books: str, env_steps: Mapping[str, int]) -> None:
    """Adds a point to the curve of each player whose rating has moved. Runs in the process that has the trial.

    Args:
        books: the file of the league's books.
        env_steps: env steps of each player that learns.

    Raises:
        LeagueError: the books cannot be read or written.
    """
    with contextlib.closing(Ledger(books)) as ledger:
        _extend_curves(ledger, env_steps)


def keep_ratings(trial: Trial, books: str, env_steps: Mapping[str, int], pool: str, rival: str) -> None:
    """As `keep_curves`; also tags the pool's versions with their ratings where these have changed.

    Args:
        books, env_steps: as for `keep_curves`.
        pool: name of the registered model.
        rival: see `RunningLeague.rival`.

    Raises:
        BrayxError: the books or the registry failed.
    """
    with contextlib.closing(Ledger(books)) as ledger:
        ratings, snapshots = _extend_curves(ledger, env_steps), _kept(ledger)
    _tag_versions(trial, ratings, snapshots, pool, rival)


def _extend_curves(ledger: Ledger, env_steps: Mapping[str, int]) -> Ratings:
    """Does what `keep_curves` does; returns the ratings."""
    ratings, curves = Ratings(ledger.ratings()), ledger.curves()
    for player, steps in env_steps.items():
        curve = curves.get(Member(player), [])
        point = point_of(ratings, Member(player), steps)
        if changed(curve, point):
            ledger.write_curve(Member(player), [*curve, point])
    return ratings


def _tag_versions(trial: Trial, ratings: Ratings, snapshots: Sequence[Snapshot], pool: str, rival: str) -> None:
    registered = {entry.version: entry.tags for entry in versions(pool, trial.uri)}
    for snapshot in snapshots:
        if rival in ("", snapshot.member.player):
            before, tags = registered.get(snapshot.member.version, {}), tags_of(snapshot, ratings)
            changed = {name: text for name, text in tags.items() if before.get(name, "") != text}
            tag(pool, snapshot.member.version, changed, trial.uri)


def draw_league(
    trial: Trial, books: str, env_steps: Mapping[str, int], pool: str, rival: str, members: Sequence[str]
) -> None:
    """As `keep_ratings`; also draws the pictures into the trial's artifacts.

    Args:
        books, env_steps, pool, rival: as for `keep_ratings`.
        members: labels of all members that can be drawn, the strongest first.

    Raises:
        BrayxError: the books, the registry or the artifacts failed.
    """
    with contextlib.closing(Ledger(books)) as ledger:
        ratings, payoff = _extend_curves(ledger, env_steps), Payoff(pairs=ledger.pairs())
        drawn, curves, snapshots = ledger.drawn(), ledger.curves(), _kept(ledger)
    _tag_versions(trial, ratings, snapshots, pool, rival)
    shown = [Member.parse(label) for label in members]
    trial.log_figure(draw_ratings(curves, snapshots, ratings, shown), RATINGS_FILE)
    trial.log_figure(draw_payoff(payoff, shown), PAYOFF_FILE)
    trial.log_figure(draw_drawn(drawn, shown), DRAWN_FILE)


def _kept(ledger: Ledger) -> list[Snapshot]:
    return [snapshot for snapshot in ledger.snapshots() if not snapshot.dropped]


def point_of(ratings: Ratings, member: Member, env_steps: int) -> RatingPoint:
    """The point of a member as it is rated now."""
    return RatingPoint(env_steps, ratings.points(member), *ratings.interval(member))


def changed(curve: Sequence[RatingPoint], point: RatingPoint) -> bool:
    """Whether a point belongs on a curve: it has later steps than the curve's last one, and another rating."""
    if not curve:
        return True
    last = curve[-1]
    moved = max(abs(now - before) for now, before in zip(point[1:], last[1:], strict=True))
    return point.env_steps > last.env_steps and moved >= _MOVED


def tags_of(snapshot: Snapshot, ratings: Ratings) -> dict[str, str]:
    """The tags of a snapshot's registered version. ``brayx.parent`` is a member; ``parent`` would be another model."""
    return {
        POINTS_TAG: f"{ratings.points(snapshot.member):.0f}",
        "brayx.points.sigma": f"{ratings[snapshot.member].sigma:.2f}",
        "player": snapshot.member.player,
        "brayx.parent": snapshot.parent.label if snapshot.parent else "",
        DIGEST_TAG: snapshot.digest,
        "env_steps": str(snapshot.env_steps),
    }


def draw_ratings(
    curves: Mapping[Member, Sequence[RatingPoint]],
    snapshots: Sequence[Snapshot],
    ratings: Ratings,
    members: Sequence[Member],
) -> Figure:
    """Draws a line with its 95 % band for each player that learns, a dot for each snapshot as it is rated now, and a
    dashed line for each other member.

    Args:
        curves: by player.
        snapshots: those of the pool.
        ratings: ratings now.
        members: all members.
    """
    from brayx.figures import Figure

    figure = Figure(figsize=(8, 4.5), dpi=100, layout="constrained")
    axes = figure.add_subplot()
    players = sorted({member.player for member in curves} | {snapshot.member.player for snapshot in snapshots})
    colours = {player: _COLOURS[place % len(_COLOURS)] for place, player in enumerate(players)}
    for player in players:
        curve = curves.get(Member(player), [])
        steps = [point.env_steps for point in curve]
        axes.plot(steps, [point.points for point in curve], color=colours[player], linewidth=2, label=player)
        low, high = [point.low for point in curve], [point.high for point in curve]
        axes.fill_between(steps, low, high, color=colours[player], alpha=0.15, linewidth=0)
        frozen = [snapshot for snapshot in snapshots if snapshot.member.player == player]
        axes.plot(
            [snapshot.env_steps for snapshot in frozen],
            [ratings.points(snapshot.member) for snapshot in frozen],
            linestyle="",
            marker="o",
            markersize=4,
            color=colours[player],
            markeredgecolor="white",
            markeredgewidth=0.5,
        )
    learned = {*curves, *(snapshot.member for snapshot in snapshots)}
    styles = ("--", ":", "-.")
    for place, member in enumerate(member for member in members if member not in learned):
        style = styles[place % len(styles)]
        axes.axhline(ratings.points(member), color="#666666", linestyle=style, linewidth=1.2, label=member.label)
    axes.set_xlabel("env steps of the player")
    axes.set_ylabel("rating, points")
    axes.set_title("Ratings: lines and 95 % bands while learning, dots: snapshots now", fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25)
    figure.legend(loc="outside right upper", frameon=False, fontsize=8)
    return figure


def draw_payoff(payoff: Payoff, members: Sequence[Member]) -> Figure:
    """Draws the win rates of rows against columns; grey where two have not played.

    Args:
        payoff: results.
        members: rows and columns, the first at the top and on the left.
    """
    from brayx.figures import Figure

    count = len(members)
    games = np.array([[payoff.games(a, b) for b in members] for a in members]).reshape(count, count)
    rates = np.where(games > 0, payoff.table(members), np.nan)
    side = min(4.5 + 0.1 * count, 10.0)
    figure = Figure(figsize=(side + 1, side), dpi=100, layout="constrained")
    axes = figure.add_subplot()
    axes.set_facecolor("#b0b0b0")  # white is a win rate of a half
    image = axes.imshow(rates, vmin=0.0, vmax=1.0, cmap="PuOr")
    labels = [member.label for member in members]
    size = 8 if count <= 30 else max(3.0, 300.0 / count)
    axes.set_xticks(range(count), labels, rotation=90, fontsize=size)
    axes.set_yticks(range(count), labels, fontsize=size)
    if count <= _FEW:
        for row, column in np.argwhere(games > 0):
            rate = rates[row, column]
            colour = "white" if abs(rate - 0.5) > 0.35 else "black"
            axes.text(column, row, f"{rate:.0%}", ha="center", va="center", fontsize=8, color=colour)
    axes.set_title("Win rate of the row against the column", fontsize=10)
    figure.colorbar(image, shrink=0.8)
    return figure


def draw_drawn(drawn: Mapping[Member, int], members: Sequence[Member]) -> Figure:
    """Draws a bar for each member: the seats that it got.

    Args:
        drawn: seats by member.
        members: bars, the first at the top.
    """
    from brayx.figures import Figure

    count = len(members)
    figure = Figure(figsize=(6, 1.2 + 0.16 * max(count, 6)), dpi=100, layout="constrained")
    axes = figure.add_subplot()
    axes.barh(range(count), [drawn.get(member, 0) for member in members], color=_COLOURS[0])
    axes.set_yticks(range(count), [member.label for member in members], fontsize=8)
    axes.set_ylim(count - 0.5, -0.5)
    axes.set_xlabel("seats in games that have ended")
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="x", alpha=0.25)
    return figure
