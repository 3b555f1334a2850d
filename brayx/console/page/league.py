"""The page of the league: standings, payoff, rating curves."""

from __future__ import annotations

from collections.abc import Callable

from nicegui import ui

from brayx.console.league import League
from brayx.console.page.caller import Connect
from brayx.console.page.charts import heat_map, lines, put_heat_map, put_lines
from brayx.console.page.frame import MUTED, Panel, empty, frame, heading, number, put_rows, table

_MAX_MEMBERS = 24
"""Maximum members in the heat map, which has the strongest."""


def add(connect: Connect) -> None:
    """Adds the page."""

    @ui.page("/league")
    def league() -> None:
        with frame("League", connect) as caller:
            Panel(lambda: caller.get(League | None, "/api/league"), _league, every_s=5.0)


def _league(first: League | None) -> Callable[[League | None], None]:
    none = empty("There is no league in this store. `brayx new NAME --template league` makes a job with one.")
    body = ui.column().classes("w-full items-stretch gap-4")
    with body:
        title = ui.label().classes("text-xl font-bold")
        about = ui.label().classes(MUTED)
        heading("Standings")
        rows = table(
            {
                "member": "Member", "points": "Points", "interval": "95 % interval", "elo": "Elo", "games": "Games",
                "steps": "Env steps",
            },
            "member",
        )  # fmt: skip
        heading("Payoff")
        ui.label("Share of games that the row won against the column; a draw is half a win.").classes(MUTED)
        heat = heat_map([], [])
        heading("Ratings")
        no_curves = empty("No player's rating has changed yet.")
        ratings = lines({}, "env steps")

    def update(found: League | None) -> None:
        none.set_visibility(found is None)
        body.set_visibility(found is not None)
        if found is None:
            return
        title.set_text(f"{found.project} / {found.trial}")
        champion = "no champion yet" if found.champion is None else f"champion {found.champion}"
        counted = ", ".join(f"{number(count)} {name.replace('_', ' ')}" for name, count in found.counters.items())
        about.set_text(f"{champion}; games: {counted}")
        shown = [
            {
                "member": f"{each.member} ★" if each.champion else each.member,
                "points": round(each.points),
                "interval": f"{each.low:.0f} to {each.high:.0f}",
                "elo": round(each.elo),
                "games": each.games,
                "steps": number(each.env_steps),
            }
            for each in found.standings
        ]
        put_rows(rows, shown)
        members = [each.member for each in found.standings][:_MAX_MEMBERS]
        at = {member: index for index, member in enumerate(members)}
        cells = []
        for pair in found.payoff:
            if pair.a in at and pair.b in at and pair.win_rate is not None:
                cells.append((at[pair.b], at[pair.a], pair.win_rate))
                cells.append((at[pair.a], at[pair.b], 1.0 - pair.win_rate))
        put_heat_map(heat, members, cells)
        no_curves.set_visibility(not found.curves)
        ratings.set_visibility(bool(found.curves))
        put_lines(ratings, dict(found.curves), "env steps")

    return update
