"""The league template's game and agent: rules against another way to count, every reply, scripts, the terminal."""

from __future__ import annotations

import json
import os
import pty
import random
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from brayx.actor.actor import Actor
from brayx.actor.agent import Services, State
from brayx.actor.agent_actor import AgentActorFactory
from brayx.components import load, load_module
from brayx.engines import build_engine
from brayx.errors import AgentError
from brayx.jobs.config import JobConfig
from brayx.jobs.options import documented
from brayx.jobs.shipped import TEMPLATES
from brayx.metrics import Recorder
from brayx.types import Forward
from tests.end_to_end.cpp_server import serving
from tests.unit.replay.made import Box
from tests.waiting import until

FOLDER = TEMPLATES / "league"
RED, YELLOW = 1, -1


def module(name: str) -> Any:
    return load_module(name, str(FOLDER))


def played(*columns: int, first: int = RED) -> Any:
    game = module("four_rules").Four(first)
    for column in columns:
        game.move(column)
    return game


def winner_of(board: list[int]) -> int:
    """The rules in another way: the seat with four in a row, or 0."""
    grid = np.array(board).reshape(6, 7)
    rows = [*grid, *grid.T, *(way.diagonal(offset) for way in (grid, grid[:, ::-1]) for offset in range(-5, 7))]
    text = "/".join("".join(".xo"[stone] for stone in row) for row in rows)
    return RED if "xxxx" in text else YELLOW if "oooo" in text else 0


def test_games_end_when_another_way_to_count_says_so() -> None:
    rng, ends = random.Random(0), set()
    for _ in range(500):
        game = played(first=rng.choice((RED, YELLOW)))
        while not game.over:
            assert winner_of(game.board) == 0
            game.move(rng.choice([column for column, legal in enumerate(game.legal) if legal]))
        assert game.winner == winner_of(game.board)
        assert game.winner or 0 not in game.board
        ends.add(game.winner)
    assert ends == {RED, YELLOW, 0}


def test_there_are_69_lines() -> None:
    lines_at = module("four_rules").LINES_AT
    assert len({tuple(line) for lines in lines_at for line in lines}) == 69
    assert sum(map(len, lines_at)) == 4 * 69


@pytest.mark.parametrize("seat", [RED, YELLOW])
def test_the_tactical_player_wins_and_prevents(seat: int) -> None:
    game = played(0, 6, 1, 6, 2, 0, *([] if seat == RED else [6]))  # three of red's in the lowest row
    assert game.turn == seat
    state = State("game-agent-red", input={"board": game.see(seat), "legal": game.legal}, output={})
    module("four_agent").tactical_move(state)
    assert state.output == {"move": 3}


def test_the_tactical_player_wins_rather_than_prevents() -> None:
    game = played(0, 6, 1, 6, 2, 6)
    assert module("four_rules").tactical_column(game.see(RED)) == 3
    assert module("four_rules").tactical_column(game.see(YELLOW)) == 6


def test_the_random_player_plays_each_legal_column() -> None:
    game, chosen = played(3, 3, 3, 3, 3, 3), set()
    for _ in range(300):
        state = State("game-agent-red", input={"board": game.see(RED), "legal": game.legal}, output={})
        module("four_agent").random_move(state)
        chosen.add(state.output["move"])
    assert chosen == {0, 1, 2, 4, 5, 6}


def requests_of(replies: list[bytes], **options: Any) -> tuple[list[tuple[str, int, Any]], Any]:
    """The requests of a game whose ticks get ``replies``; and the game, or the refusal that ended it."""
    game, reply, given = module("four_game").play(RED, **options), None, iter(replies)
    requests = []
    while True:
        try:
            requests.append(game.send(reply))
        except StopIteration as end:
            return requests, end.value
        except SystemExit as refused:
            return requests, refused
        reply = next(given) if requests[-1][0] == "tick" else b""


def moves(*columns: int) -> list[bytes]:
    return [json.dumps({"move": column}).encode() for column in columns]


def test_each_seat_gets_its_turns_and_its_result() -> None:
    requests, game = requests_of(moves(0, 1, 0, 1, 0, 1, 0))
    assert game.winner == RED
    turns = [("tick", seat) for seat in (RED, YELLOW, RED, YELLOW, RED, YELLOW, RED)]
    ends = [("stop", RED), ("stop", YELLOW)]
    assert [request[:2] for request in requests] == [("start", RED), ("start", YELLOW), *turns, *ends]
    (*_, red), (*_, yellow) = requests[-2:]
    assert (red["result"], red["reward"]) == ("win", 1.0)
    assert (yellow["result"], yellow["reward"]) == ("loss", -1.0)
    assert red["board"] == [-stone for stone in yellow["board"]] == game.see(RED)


@pytest.mark.parametrize("seat", ["red", "yellow"])
def test_a_recorded_board_has_the_colours_of_the_game_and_its_end(seat: str) -> None:
    game = played(0, 1, 0, 1, 0, 1, 0)  # red wins in the first column
    sign = RED if seat == "red" else YELLOW
    stop = {"board": game.see(sign), "result": "win" if seat == "red" else "loss"}
    board = module("four_board").recorded(State(f"game-agent-{seat}", kind="stop", input=stop))
    assert [row[0].get("label") for row in board["rows"][2:]] == ["red"] * 4
    assert [row[1].get("label") for row in board["rows"][3:]] == ["yellow"] * 3
    assert sorted(board["line"]) == [(row, 0) for row in range(2, 6)]
    assert (board["text"], board["result"]) == (f"The agent plays {seat}.", stop["result"])


def test_a_draw_is_one_for_both() -> None:
    pairs = [column for left in (0, 2, 4) for column in (left, left + 1) * 3 + (left + 1, left) * 3]
    requests, game = requests_of(moves(*pairs, *[6] * 6))
    assert game.winner == 0
    assert [(body["result"], body["reward"]) for _, _, body in requests[-2:]] == [("draw", 0.0)] * 2


@pytest.mark.parametrize("reply", [b"", b"3", b'{"column": 3}', b'{"move": 7}', b'{"move": "3"}', b'{"move": 3.0}'])
def test_an_illegal_move_ends_both_sessions_and_says_why(reply: bytes) -> None:
    requests, refused = requests_of([reply])
    assert requests[-2:] == [("stop", RED, None), ("stop", YELLOW, None)]
    assert str(refused).startswith(f'red replied {reply!r}, expected {{"move": column}} with a legal column: ')


def test_a_script_has_no_session() -> None:
    requests, game = requests_of(moves(0, 0, 0, 0), against="script", choose=lambda board: 6)
    assert game.winner == RED
    assert requests[0] == ("start", RED, {"against": "script"})
    assert {seat for _, seat, _ in requests} == {RED}


# The agent


class Uniform:
    """A model handle: each legal column is as likely, but the best is column 3."""

    def __init__(self, actions: int = 7) -> None:
        self.actions = actions

    async def forward(self, obs: Any) -> Forward:
        logits = np.where(obs["action_mask"] > 0, 0.0, -3e4)[: self.actions]
        logits[3] += 1e-6
        return Forward({"logits": logits}, 1)


class Skewed:
    """A model handle that likes a board and its mirror differently."""

    def __init__(self) -> None:
        self.weights = np.random.default_rng(0).normal(size=(7, 2 * 42))

    async def forward(self, obs: Any) -> Forward:
        logits = np.where(obs["action_mask"] > 0, self.weights @ obs["board"].ravel(), -3e4)
        return Forward({"logits": logits}, 1)


def tick(*columns: int, **more: Any) -> bytes:
    game = played(*columns)
    return json.dumps({"board": game.see(RED), "legal": game.legal, "reward": 0.0, **more}).encode()


def factory(
    box: Box, recorder: Recorder, mode: str = "train", actions: int = 7, model: Any = None, **options: Any
) -> AgentActorFactory:
    config = {"mode": mode, "seed": 0, "agent": {"options": {"buffer": "moves", **options}}}
    services = Services(models={"model": model or Uniform(actions)}, buffers={"moves": box}, recorder=recorder)
    agents = {"agent": load("four_agent", "FourAgent", str(FOLDER))}
    return AgentActorFactory(agents, config, services, episode_length=None)


async def chosen(**options: Any) -> set[int]:
    """The columns of a hundred first moves."""
    columns = set()
    for number in range(100):
        actor = factory(Box(), Recorder(), **options)()
        await actor.start(f"{number}-agent-red", b'{"against":""}')
        columns.add(json.loads(await actor.tick(tick()))["move"])
    return columns


async def test_it_explores_in_training_and_is_greedy_when_it_serves_unless_told_a_temperature() -> None:
    assert await chosen() == set(range(7))
    assert await chosen(mode="serve") == {3}
    assert await chosen(mode="serve", temperature=1.0) == set(range(7))
    assert await chosen(mode="serve", temperature=1e-8) == {3}


async def test_a_served_agent_plays_a_mirrored_board_as_the_mirror_of_its_move() -> None:
    for columns in ((0,), (0, 1), (5, 5, 2)):
        moves = []
        for moved in (columns, tuple(6 - column for column in columns)):
            actor = factory(Box(), Recorder(), mode="serve", model=Skewed())()
            await actor.start("game-agent-red", b'{"against":""}')
            moves.append(json.loads(await actor.tick(tick(*moved)))["move"])
        assert moves[0] == 6 - moves[1]


@pytest.mark.parametrize("against", ["", "tactical"])
async def test_finished_games_are_measured_and_those_with_one_session_are_not_learned_from(against: str) -> None:
    box, recorder = Box(), Recorder()
    actor = factory(box, recorder)()
    await actor.start("game-agent-red", json.dumps({"against": against}).encode())
    await actor.tick(tick())
    await actor.stop(tick(0, 1, 0, 1, 0, 1, 0, reward=1.0, result="win"))
    await actor.on_end("stop")
    assert len(box.fragments) == (0 if against else 1)
    assert recorder.summary()["episode_return"] == 1.0


async def test_a_game_that_was_broken_off_is_truncated() -> None:
    box = Box()
    actor = factory(box, Recorder())()
    await actor.start("game-agent-red", b"")
    for columns in ((), (0, 1), (0, 1, 0, 1)):
        await actor.tick(tick(*columns))
    await actor.stop(b"")
    await actor.on_end("stop")
    (fragment,) = box.fragments
    assert (len(fragment), fragment.terminated, fragment.truncated) == (2, False, True)


async def test_a_model_with_other_actions_than_the_game_is_refused_at_the_first_tick() -> None:
    actor = factory(Box(), Recorder(), actions=5)()
    await actor.start("game-agent-red", b"")
    with pytest.raises(AgentError) as refused:
        await actor.tick(tick())
    assert str(refused.value.__cause__) == "the model has 5 actions, the game 7"


def test_the_model_gives_illegal_columns_no_probability() -> None:
    net, (example,) = module("four_model").build_model("model", {"network": {"channels": 8, "hidden": 16}})
    engine = build_engine("onnx", net, (example,))
    game = played(3, 3, 3, 3, 3, 3)
    obs = module("four_agent").encode({"board": game.see(RED), "legal": game.legal})
    leaves = [leaf[None] for leaf in engine.spec.flatten_inputs((obs,))]
    (logits,) = engine.spec.unflatten_outputs(engine.run(engine.bind(engine.initial), leaves))["logits"]
    assert logits.shape == (7,)
    assert [column for column, logit in enumerate(logits) if logit < -1e4] == [3]


def test_the_job_documents_every_option_as_its_code_does() -> None:
    """Mended by ``brayx check FILE > COPY && mv COPY FILE``."""
    file = FOLDER / "four.yaml"
    assert file.read_text() == documented(JobConfig.load(file))


# The process


class Seats(Actor):
    """Plays the lowest legal column; keeps each session's bodies."""

    def __init__(self, bodies: dict[str, list[Any]]) -> None:
        self.bodies = bodies

    async def start(self, session: str, body: bytes) -> bytes:
        self.own = self.bodies[session] = [json.loads(body)]
        return b"Game Started"

    async def tick(self, body: bytes) -> bytes:
        self.own.append(json.loads(body))
        return json.dumps({"move": self.own[-1]["legal"].index(True)}).encode()

    async def stop(self, body: bytes) -> bytes:
        self.own.append(json.loads(body) if body else None)
        return b"Game Stopped"


@pytest.fixture
def service() -> Iterator[tuple[str, dict[str, list[Any]]]]:
    bodies: dict[str, list[Any]] = {}
    with serving(lambda: Seats(bodies)) as (server, _):
        yield server.url, bodies


Service = tuple[str, dict[str, list[Any]]]


def command(url: str, *arguments: object) -> list[str]:
    return [sys.executable, str(FOLDER / "four_game.py"), url, *map(str, arguments)]


def run(url: str, *arguments: object, typed: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(command(url, *arguments), input=typed, capture_output=True, text=True, timeout=240)


@pytest.mark.parametrize(("seed", "at_once", "first"), [(0, 1, "red"), (1, 1, "yellow"), (0, 5, "red")])
def test_agents_play_each_other(service: Service, seed: int, at_once: int, first: str) -> None:
    url, bodies = service
    done = run(url, "--games", 7, "--seed", seed, "--at-once", at_once)
    assert done.returncode == 0, done.stderr
    games: dict[str, dict[str, list[Any]]] = {}
    for session, seat_bodies in bodies.items():
        game, seat = session.split("-agent-")
        games.setdefault(game, {})[seat] = seat_bodies
    assert len(games) == 7
    begun = []
    for seats in games.values():
        assert set(seats) == {"red", "yellow"}
        assert {seats["red"][-1]["result"], seats["yellow"][-1]["result"]} == {"win", "loss"}
        begun.append("red" if not any(seats["red"][1]["board"]) else "yellow")
    assert begun == [first, *(["yellow", "red"] if first == "red" else ["red", "yellow"]) * 3]
    won = {seat: sum(seats[seat][-1]["result"] == "win" for seats in games.values()) for seat in ("red", "yellow")}
    *lines, last = done.stdout.splitlines()
    assert len(lines) == 7
    assert all(sum(f": {seat} wins" in line for line in lines) == count for seat, count in won.items())
    assert last == f"red won {won['red']}, yellow won {won['yellow']}, draws 0"


@pytest.mark.parametrize("at_once", [1, 3])
def test_a_script_plays_yellow(service: Service, at_once: int) -> None:
    url, bodies = service
    done = run(url, "--games", 4, "--against", "tactical", "--at-once", at_once)
    assert done.returncode == 0, done.stderr
    assert len(bodies) == 4
    assert all(session.endswith("-agent-red") for session in bodies)
    assert all(seat_bodies[0] == {"against": "tactical"} for seat_bodies in bodies.values())
    assert done.stdout.splitlines()[-1].startswith("red won ")


def test_a_human_plays_yellow_and_quits(service: Service) -> None:
    url, bodies = service
    done = run(url, "--human", "--opponent", "rating=900", typed="7\n9\nx\n7\n7\n1\nq\n")
    # Red fills the first column and wins the first game; yellow begins the second, and quits at its second turn.
    assert done.returncode == 0, done.stderr
    assert "game 1: red wins" in done.stdout
    assert "'9' is not a column with room" in done.stdout
    assert "\033" not in done.stdout, "no colours outside of a terminal"
    first, second = bodies.values()
    assert first[0] == {"against": "human", "opponent": {"rating": 900}}
    assert first[-1]["result"] == "win"
    assert second[-1] is None, "a game that is given up has no result"


def test_in_a_terminal_the_board_has_colours(service: Service) -> None:
    url, _ = service
    ours, theirs = pty.openpty()
    process = subprocess.Popen(command(url, "--human", "--games", 1), stdin=theirs, stdout=theirs, stderr=theirs)
    os.close(theirs)
    seen = b""
    typed = iter([b"4\n", b"q\n"])
    try:
        while True:
            try:
                seen += os.read(ours, 4096)
            except OSError:  # the process has closed its end
                break
            if seen.endswith(b"q quits): "):
                os.write(ours, next(typed))
    finally:
        os.close(ours)
        assert process.wait(30) == 0
    shown = seen.decode()
    assert "\033[31m●" in shown, "the agent's"
    assert "\033[33m●" in shown, "the human's"


@pytest.mark.parametrize("at_once", [1, 3])
def test_a_broken_service_is_named(at_once: int) -> None:
    done = run("tcp://127.0.0.1:1", "--games", 1, "--at-once", at_once)
    assert done.returncode == 1
    assert done.stderr.startswith("cannot connect to tcp://127.0.0.1:1")


@pytest.mark.parametrize("at_once", [1, 3])
def test_a_game_that_breaks_off_is_followed_by_another(at_once: int) -> None:
    class Breaking(Seats):
        """Raises in the third tick of the first session of each of two games."""

        async def start(self, session: str, body: bytes) -> bytes:
            reply = await super().start(session, body)
            self.breaks = len(self.bodies) in (1, 3)
            return reply

        async def tick(self, body: bytes) -> bytes:
            if self.breaks and len(self.own) == 3:
                raise RuntimeError("broken")
            return await super().tick(body)

    bodies: dict[str, list[Any]] = {}
    with serving(lambda: Breaking(bodies)) as (server, _):
        process = subprocess.Popen(command(server.url, "--at-once", at_once), stderr=subprocess.PIPE, text=True)
        try:
            until(
                lambda: (
                    sum(1 for seat_bodies in list(bodies.values()) if seat_bodies[-1] and "result" in seat_bodies[-1])
                    >= 6
                )
            )
        finally:
            process.terminate()
            process.communicate(timeout=240)
    assert any(seat_bodies[-1] is None for seat_bodies in bodies.values()), (
        "the other seat's session was stopped without a result"
    )


def test_many_games_need_tcp() -> None:
    done = run("http://127.0.0.1:1", "--at-once", 2)
    assert done.returncode == 2
    assert "--at-once needs a tcp:// URL" in done.stderr
