"""Tests of the project, for `pytest`; they take a minute or two: the rules, the job, and a short training."""

import asyncio
import subprocess
import sys
from pathlib import Path

import mlflow
import numpy as np
import pytest
import torch

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))  # independent of pytest's folder and settings

from four_agent import FourAgent, encode  # noqa: E402
from four_game import play  # noqa: E402
from four_model import FourNet  # noqa: E402
from four_rules import RED, WIDTH, YELLOW, Four, random_column, wins  # noqa: E402

from brayx import Forward, Services, State  # noqa: E402

(JOB,) = (file for file in HERE.glob("*.yaml") if file.name != "levels.yaml")


def played(*columns, first=RED):
    game = Four(first)
    for column in columns:
        game.move(column)
    return game


@pytest.mark.parametrize(
    "columns",
    [
        (0, 0, 1, 1, 2, 2, 3),  # a row
        (6, 0, 6, 0, 6, 0, 6),  # a column
        (0, 1, 1, 2, 2, 3, 2, 3, 3, 6, 3),  # a diagonal that rises to the right
        (6, 5, 5, 4, 4, 3, 4, 3, 3, 0, 3),  # a diagonal that rises to the left
    ],
)
def test_a_line_wins_in_each_direction(columns):
    game = played(*columns[:-1])
    assert not game.over
    game.move(columns[-1])
    assert game.over
    assert game.winner == RED
    assert played(*columns, first=YELLOW).winner == YELLOW


def test_a_full_board_without_a_line_is_a_draw():
    pairs = [column for left in (0, 2, 4) for column in (left, left + 1) * 3 + (left + 1, left) * 3]
    game = played(*pairs, *[6] * 6)
    assert game.over
    assert game.winner == 0
    assert game.legal == [False] * WIDTH


@pytest.mark.parametrize("column", [-1, 7, 3, 1.0, True, "1", None])
def test_an_illegal_column_is_refused_and_changes_nothing(column):
    game = played(3, 3, 3, 3, 3, 3)
    before = list(game.board)
    with pytest.raises(ValueError, match=r"expected one of \[0, 1, 2, 4, 5, 6\]"):
        game.move(column)
    assert (game.board, game.turn) == (before, RED)


def test_each_seat_sees_its_own_stones_as_ones():
    game = played(3, 4, 0)
    assert game.see(RED)[-WIDTH:] == [1, 0, 0, 1, -1, 0, 0]
    assert game.see(YELLOW)[-WIDTH:] == [-1, 0, 0, -1, 1, 0, 0]
    red, yellow = (encode({"board": game.see(seat), "legal": game.legal})["board"] for seat in (RED, YELLOW))
    np.testing.assert_array_equal(red, yellow[::-1])


def test_mirrored_encoding_swaps_left_and_right():
    game = played(0, 0, 0, 0, 0, 0, 1)
    seen = {"board": game.see(RED), "legal": game.legal}
    plain, mirrored = encode(seen), encode(seen, mirrored=True)
    np.testing.assert_array_equal(mirrored["board"], plain["board"][:, :, ::-1])
    assert mirrored["action_mask"].tolist() == [1, 1, 1, 1, 1, 1, 0]


def test_the_model_sees_where_one_more_stone_makes_four():
    net = FourNet(channels=2, hidden=4)
    for _ in range(100):
        game = Four()
        while not game.over:
            for seat in (RED, YELLOW):
                mine, theirs = torch.as_tensor(encode({"board": game.see(seat), "legal": game.legal})["board"])[:, None]
                seen = net.fours(mine, theirs).flatten().tolist()
                board = game.see(seat)
                assert seen == [not stone and wins(board, cell, 1) for cell, stone in enumerate(board)]
            game.move(random_column(game.board))


def test_a_fragment_has_the_turns_of_its_seat():
    fragments, game = asyncio.run(one_game())
    stones = sum(map(abs, game.board))
    assert sorted(map(len, fragments.values())) == [stones // 2, (stones + 1) // 2]
    for seat, fragment in fragments.items():
        turns = np.arange(len(fragment))
        # Between two of its turns, each seat drops one stone.
        mine, other = fragment.obs["board"][:-1].sum((2, 3)).T
        np.testing.assert_array_equal(mine, turns)
        np.testing.assert_array_equal(other, turns + (seat == YELLOW))
        assert fragment.obs["action_mask"][turns, fragment.action].all(), "each column was legal"
        assert fragment.reward.tolist() == [0.0] * (len(fragment) - 1) + [game.winner * seat]
        assert fragment.terminated


async def one_game():
    """Plays one game with an untrained policy in both seats; returns the fragments by seat, and the game."""

    class Model:
        async def forward(self, obs):
            return Forward({"logits": np.where(obs["action_mask"], 0.0, -3e4)}, 1)

    class Buffer:
        def push(self, fragment):
            fragments[seat] = fragment

    config = {"mode": "train", "seed": 0, "agent": {"options": {"buffer": "moves"}}}
    fragments, agents, episodes = {}, {}, {RED: [], YELLOW: []}
    game, reply = play(RED), None
    with Services(models={"model": Model()}, buffers={"moves": Buffer()}).use():
        while True:
            try:
                kind, seat, body = game.send(reply)
            except StopIteration as end:
                return fragments, end.value
            state = State(f"game-agent-{seat}", kind=kind, input=body, output={})
            if kind == "start":
                agents[seat] = FourAgent("agent", config, state)
                continue
            episodes[seat].append(state)
            if kind == "tick":
                await agents[seat].on_tick(state)
                reply = b'{"move": %d}' % state.output["move"]
            else:
                await agents[seat].on_episode(episodes[seat], True)


def brayx(*arguments):
    command = [sys.executable, "-m", "brayx", *arguments]
    return subprocess.run(command, cwd=HERE, capture_output=True, text=True, timeout=300)


def test_the_job_is_right():
    done = brayx("check", JOB.name)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_it_trains(tmp_path):
    options = ("trainer.num_steps=8000", "actor.port=0", "actor.native_port=0", "actor.tcp_port=0")  # 0: a free port
    few = [word for option in options for word in ("--set", option)]
    done = brayx("train", JOB.name, "--tracking", str(tmp_path), *few)
    assert done.returncode == 0, done.stderr
    mlflow.set_tracking_uri(f"sqlite:///{tmp_path / 'mlflow.db'}")
    runs = mlflow.search_runs(search_all_experiments=True, output_format="list")
    assert any("learner/policy_loss" in run.data.metrics for run in runs), "nothing was learned"
