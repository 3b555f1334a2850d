"""Sides: who plays which team, for how long, and whose result counts."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from brayx.errors import BadBody, BadResult
from brayx.league.config import MAIN, SelfPlayConfig
from brayx.league.games import Game
from brayx.league.league import League
from brayx.league.ledger import Ledger
from brayx.league.member import Member
from brayx.league.sides import MAX_SWAPS, MAX_TEAMS, Sides

LIVE, PAST = Member(MAIN), Member(MAIN, 3)


class Draws:
    """Draws the opponents that it is given, one after the other; of the gate's games both sides; or whole games."""

    def __init__(self, *opponents: Member | Game | tuple[Member, Member]) -> None:
        self.opponents = list(opponents)
        self.ids: list[str] = []

    def __call__(self, game: str, players: Sequence[str], opponents: Sequence[str]) -> Game:
        self.ids.append(game)
        opponent = self.opponents.pop(0)
        if isinstance(opponent, Game):
            return opponent
        if isinstance(opponent, Member):
            return Game(game, MAIN, [LIVE, opponent])
        return Game(game, "", list(opponent))


def sides(**options: int) -> Sides:
    made = Sides(SelfPlayConfig.model_validate({"swap_every": 100, "team_every": 1000, **options}))
    for team in (0, 1):
        made.name_team("", team)
    return made


def seat(sides: Sides, draws: Draws, session: str, team: int, game: str = "") -> tuple[Member, bool]:
    sides.name_team(session, team)
    return sides.assign(game, session, draws), sides.learns(session, [MAIN])


def test_one_team_learns_and_the_others_are_played_by_the_opponent() -> None:
    made, draws = sides(), Draws(PAST)
    assert seat(made, draws, "a", 0) == (LIVE, True)
    assert seat(made, draws, "b", 1) == (PAST, False)
    assert seat(made, draws, "c", 2) == (PAST, False)
    assert not made.learns("a", []), "a learner that has all its steps"


def test_against_itself_as_it_is_all_teams_learn() -> None:
    made, draws = sides(), Draws(LIVE)
    assert [seat(made, draws, f"{team}", team) for team in (0, 1)] == [(LIVE, True)] * 2


def test_the_gate_s_games_are_not_learned_from() -> None:
    made, draws = sides(), Draws((PAST, Member(MAIN, 1)))
    assert [seat(made, draws, f"{team}", team) for team in (0, 1)] == [(PAST, False), (Member(MAIN, 1), False)]
    made.result("0", "win")
    game = made.ended("0", "stop")
    assert game is not None
    assert (game.learner, game.members, game.results) == ("", [PAST, Member(MAIN, 1)], {0: "win", 1: "loss"})


def test_the_learner_is_the_first_member_of_a_stretch_at_whichever_seat_it_was_drawn() -> None:
    config = SelfPlayConfig.model_validate({"against": {"uniform": 1}, "gate": {"share": 0.0}})
    league = League(config.league("model"), Ledger(":memory:"))
    league.freeze(MAIN, 3, "digest", 10)
    ids = [f"{number}" for number in range(20)]
    assert {league.draw(game).members[0] for game in ids} == {LIVE, PAST}
    assert all(league.meet(game, [MAIN], [MAIN]).members == [LIVE, PAST] for game in ids)


def test_another_opponent_is_drawn_after_so_many_steps_and_another_team_learns_after_so_many_env_steps() -> None:
    made, draws = sides(), Draws(PAST, Member(MAIN, 4), Member(MAIN, 5))
    seat(made, draws, "a", 0)
    made.steps = 99
    assert seat(made, draws, "b", 1) == (PAST, False)
    made.steps = 100
    assert seat(made, draws, "c", 1) == (Member(MAIN, 4), False)
    made.env_steps = 1000
    assert seat(made, draws, "d", 1) == (LIVE, True)
    assert seat(made, draws, "e", 0) == (Member(MAIN, 5), False)
    assert len(set(draws.ids)) == 3, "each is another draw"


def test_a_stretch_waits_for_as_many_episodes_as_the_learning_team_has_agents() -> None:
    made, draws = sides(), Draws(PAST, Member(MAIN, 4))
    for session, team in (("a", 0), ("b", 1)):
        made.name_team(session, team)
    first = made.stretch(draws)
    made.count_episodes("a", 3, 0)
    made.count_episodes("b", 5, 0)
    made.steps = 100
    made.count_episodes("a", 3, 2)
    assert made.stretch(draws) is first
    made.count_episodes("a", 3, 1)
    assert made.stretch(draws).opponents == {MAIN: Member(MAIN, 4)}
    assert not made.warning
    made.ended("a", "stop")
    assert not made.ended("b", "stop")


def test_a_stretch_in_which_no_episode_fits_ends_with_a_warning() -> None:
    made, draws = sides(), Draws(*[PAST, Member(MAIN, 4)] * 2)
    made.name_team("a", 0)
    first = made.stretch(draws)
    made.count_episodes("a", 8, 1)
    made.steps = MAX_SWAPS * 100 - 1
    assert made.stretch(draws) is first
    made.steps += 1
    second = made.stretch(draws)
    assert (second.member(1), made.warning) == (Member(MAIN, 4), ""), "one has fitted"
    made.steps *= 2
    assert made.stretch(draws) is not second
    assert made.warning == (
        "in 2,000 steps of all agents no episode of team 0, which has 8 agents, began and ended, so no result counts: "
        "raise self_play.swap_every, which is 100"
    )
    made.warning = None  # it was said
    made.steps *= 2
    made.stretch(draws)
    assert made.warning is None


def rivals(**options: int) -> tuple[Sides, Draws]:
    """The striker's games of team 0 and the keeper's of team 1, which were behaviours alone before."""
    config = SelfPlayConfig.model_validate({"swap_every": 100, "team_every": 1000, **options})
    together = Sides(config)
    for team, player in enumerate(("striker", "keeper")):
        alone = Sides(config.model_copy(update={"swap_every": 50}))
        alone.name_team(f"{player} before", team)
        together.take_in(player, alone)
    striker, keeper = Member("striker"), Member("keeper")
    games = [Game("", "striker", [striker, Member("keeper", 3)]), Game("", "keeper", [keeper, Member("striker", 4)])]
    return together, Draws(*games)


def test_teams_of_different_behaviours_take_turns_and_past_versions_of_the_other_one_play() -> None:
    made, draws = rivals()
    assert (made.teams, made.running_teams) == ({0, 1}, {0, 1})
    for session, team, player in (("s", 0, "striker"), ("k", 1, "keeper")):
        made.name_team(session, team, player)
    assert made.assign("", "s", draws) == Member("striker")
    assert made.assign("", "k", draws) == Member("keeper", 3)
    assert (made.learns("s", ["striker", "keeper"]), made.learns("k", ["striker", "keeper"])) == (True, False)
    made.result("k", "win")  # of the opponent
    made.result("s", "win")
    game = made.ended("s", "stop")
    assert game is not None
    assert [[game.members[seat] for seat in team] for team in game.teams] == [
        [Member("striker")],
        [Member("keeper", 3)],
    ]
    assert (game.learner, game.results) == ("striker", {0: "win", 1: "loss"})
    made.env_steps = 1000
    stretch = made.stretch(draws)
    assert (stretch.member(1, "keeper"), stretch.member(0, "striker")) == (Member("keeper"), Member("striker", 4))
    assert (stretch.learned_from(1, "keeper"), stretch.learned_from(0, "striker")) == (True, False)
    assert stretch.learned_from(0, "defender"), "one that has come since plays as it is"


def test_a_team_whose_learner_has_all_its_steps_gives_its_turn_to_the_other() -> None:
    made, draws = rivals()
    assert made.stretch(draws).learning == 0
    made.done.add("striker")
    assert made.stretch(draws).learning == 1
    made.done.add("keeper")
    assert made.stretch(draws).learning == 1, "when all are done, nothing changes"


def test_a_team_whose_games_have_gone_does_not_learn() -> None:
    made, draws = sides(), Draws(PAST, PAST, PAST, PAST)
    made.env_steps = 2000
    for session, team in (("a", 0), ("b", 1), ("stray", 2)):
        made.name_team(session, team)
    assert made.stretch(draws).learning == 2
    made.ended("stray", "lost")
    made.steps = 100
    assert made.stretch(draws).learning == 2, "its next game may be about to start"
    made.ended("b", "stop")
    made.steps = 200
    assert made.stretch(draws).learning == 0
    made.name_team("c", 1)
    made.env_steps = 3000
    assert made.stretch(draws).learning == 1


def test_sessions_of_a_named_game_have_the_sides_of_its_first() -> None:
    made, draws = sides(), Draws(PAST, Member(MAIN, 4))
    assert seat(made, draws, "g-agent-0", 0, "g") == (LIVE, True)
    made.steps = 100
    assert seat(made, draws, "h-agent-1", 1, "h") == (Member(MAIN, 4), False)
    assert seat(made, draws, "g-agent-1", 1, "g") == (PAST, False)
    made.result("g-agent-1", "win")  # of the opponent: the other side's counts
    made.result("g-agent-0", "win")
    made.result("g-agent-0", "loss")  # a second one changes nothing
    assert made.ended("g-agent-1", "stop") is None
    assert made.ended("g-agent-1", "stop") is None
    game = made.ended("g-agent-0", "stop")
    assert game is not None
    assert (game.learner, game.members, game.results) == (MAIN, [LIVE, PAST], {0: "win", 1: "loss"})
    assert game.missing == ""


@pytest.mark.parametrize(("value", "word"), [(0.25, "win"), (-3, "loss"), (0, "draw"), ("draw", "draw")])
def test_the_sign_of_a_number_is_the_result(value: float | str, word: str) -> None:
    made = sides()
    seat(made, Draws(PAST), "a", 0)
    made.result("a", value)
    game = made.ended("a", "stop")
    assert game is not None
    assert game.results[0] == word


def test_a_game_without_a_result_of_the_learning_team_does_not_count() -> None:
    made, draws = sides(), Draws(PAST)
    seat(made, draws, "a", 0)
    seat(made, draws, "b", 1)
    made.result("b", "win")
    assert (made.ended("a", "lost"), made.ended("b", "stop"), made.ended("c", "stop")) == (None, None, None)
    with pytest.raises(BadResult, match="'a', which is unknown or over"):
        made.result("a", "win")


def test_teams_are_bounded() -> None:
    made = sides()
    for team in range(MAX_TEAMS):
        made.name_team("s", team)
    with pytest.raises(
        BadBody, match=f"team is 2000000000, and the behaviour has {MAX_TEAMS} teams, the most it can have"
    ):
        made.name_team("s", 2_000_000_000)
