"""The page of the league: standings, payoff, rating curves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from nicegui import ui

from brayx.console.league import LeagueDocument, LevelDocument, StandingDocument
from brayx.console.page.caller import Connect
from brayx.console.page.charts import HeatMap, Lines
from brayx.console.page.frame import MUTED, RESPONSE_S, Panel, empty, frame, heading, number
from brayx.console.page.listing import Listing, TableCell, counted
from brayx.console.page.words import tr

_MAX_MEMBERS = 24
"""Maximum members in the heat map, which has the strongest."""

_ROLES = {
    "main": "{name} learns to beat the whole league.",
    "exploiter": "{name} learns to beat {of}, and so finds its weaknesses.",
    "league_exploiter": "{name} learns to beat all earlier versions.",
    "past": "{name} is a version of an earlier training; it does not learn.",
    "script": "{name} is a program; it does not learn.",
}
"""What players do, by their role."""
_WORDS = (
    "A name with a number is a registered version: the player as it was then. ★ marks the league's champion.",
    "400 points more win ten games of eleven. Elo is a simpler rating, for comparison.",
)


def add(connect: Connect) -> None:
    """Adds the page."""

    @ui.page("/league", response_timeout=RESPONSE_S)
    async def league() -> None:
        with frame("League", connect) as caller:
            await Panel(lambda: caller.get(LeagueDocument | None, "/api/league"), _league, every_s=5.0).first()


def member_columns() -> dict[str, Callable[[StandingDocument], Any]]:
    """What a table shows of a member, by heading."""
    return {
        "Member": lambda row: f"{name_of(row)} ★" if row.champion else name_of(row),
        "Points": lambda row: round(row.points),
        "95 % interval": lambda row: TableCell(tr("{low} to {high}", **points_of(row)), row.low),
        "Games": lambda row: counted(row.games),
    }


def name_of(row: StandingDocument) -> str:
    """A member's name, which says if it does not learn."""
    return tr("{name} (script)", name=row.member) if row.script else row.member


def points_of(row: StandingDocument | LevelDocument) -> dict[str, str]:
    """Points and the ends of their interval, for a text with these words."""
    return {"points": f"{row.points:.0f}", "low": f"{row.low:.0f}", "high": f"{row.high:.0f}"}


def _league(first: LeagueDocument | None) -> Callable[[LeagueDocument | None], None]:
    none = empty(tr("There is no league in this store. `brayx new NAME --template league` makes a job with one."))
    body = ui.column().classes("w-full items-stretch gap-4")
    with body:
        title = ui.label().classes("text-xl font-bold")
        about = ui.label().classes(MUTED)
        heading(tr("Standings"))
        standings = Listing[StandingDocument](
            "member",
            member_columns() | {"Elo": lambda row: round(row.elo), "Env steps": lambda row: counted(row.env_steps)},
            lead="Points",
        )
        words = ui.label().classes(f"whitespace-pre-wrap {MUTED}").mark("words")
        heading(tr("Who beats whom"))
        what = tr("The payoff: share of games that the row won against the column; a draw is half a win.")
        whose = tr("A player that learns counts with all its games, also its first ones.")
        ui.label(f"{what} {whose}").classes(MUTED)
        payoff = HeatMap()
        heading(tr("Ratings"))
        no_curves = empty(tr("No player's rating has changed yet."))
        ratings = Lines(tr("env steps"))

    def update(league: LeagueDocument | None) -> None:
        none.set_visibility(league is None)
        body.set_visibility(league is not None)
        if league is None:
            return
        title.set_text(f"{league.project} / {league.trial}")
        champion = league.champion or tr("none yet")
        counters = {name: count for name, count in league.counters.items() if count or name == "counted"}
        counted = ", ".join(f"{number(count)} {tr(name.replace('_', ' '))}" for name, count in counters.items())
        in_use = "champion: {champion}; games: {games}"
        if league.served not in (None, league.champion):
            in_use = "in service: {served}; champion of the league: {champion}; games: {games}"
        about.set_text(tr(in_use, served=league.served, champion=champion, games=counted))
        standings.show(league.standings)
        roles = [tr(_ROLES[player.role], name=name, of=player.of) for name, player in league.players.items()]
        words.set_text("\n".join([*roles, *map(tr, _WORDS)]))
        members = [row.member for row in league.standings][:_MAX_MEMBERS]
        place = {member: index for index, member in enumerate(members)}
        cells = []
        for pair in league.payoff:
            if pair.a in place and pair.b in place and pair.win_rate is not None:
                cells.append((place[pair.b], place[pair.a], pair.win_rate))
                cells.append((place[pair.a], place[pair.b], 1.0 - pair.win_rate))
        payoff.show(members, cells)
        ratings.show(league.curves, bands=league.intervals)
        no_curves.set_visibility(not ratings.visible)

    return update
