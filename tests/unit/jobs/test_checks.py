"""Checks before anything starts: an error is one line that names its key; files that are missing are all named."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path

import pytest

from brayx.errors import ConfigError, ModelError
from brayx.jobs.checks import check_before_games, check_job
from brayx.jobs.config import JobConfig
from brayx.jobs.shipped import TEMPLATES
from tests.unit.conftest import Run
from tests.unit.gamecore.echo_server import EchoApp, serving

OPEN = "python 'game.py"
JOB = """
project: p
trial: t
agent: {kind: agent, module: brayx.actor.agent, class: Agent}
buffer: {kind: buffer}
recorded: {kind: source, path: none.npz, buffer: buffer}
others: {kind: source, path: nor_these.npz, buffer: buffer}
actor:
  kind: actor
  agents: [agent]
  keys_file: no_keys.txt
  gamecores:
    - command: pythn no_game.py {url}
    - command: python nor_this.py {url}
"""


@pytest.mark.parametrize("words", [("check", "cartpole.yaml"), ("train", "cartpole.yaml"), ("demo",)])
def test_a_gamecores_quote_that_is_not_closed_is_one_line(command: Run, words: tuple[str, ...]) -> None:
    done = command(*words, "--set", f"actor.gamecores.0.command={OPEN}")
    *_, last = done.stderr.splitlines()
    assert (done.returncode, done.stdout, done.stderr.count("brayx: ")) == (2, "", 1)
    assert last.endswith(f'actor.gamecores.0.command: is "{OPEN}", expected a command line: No closing quotation')


def test_an_evaluations_quote_that_is_not_closed_is_one_line(command: Run) -> None:
    with serving(EchoApp(lambda body: body)) as address:
        done = command("evaluate", "--gamecore", OPEN, "--url", f"http://{address}")
    assert done.returncode == 2
    assert done.stderr == f'brayx: gamecore "{OPEN}" is not a valid command line: No closing quotation\n'


def test_check_names_every_file_that_is_missing_also_of_a_job_without_a_trainer(command: Run, tmp_path: Path) -> None:
    job = tmp_path / "job.yaml"
    job.write_text(JOB)
    done = command("check", str(job))
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"brayx: {job}: actor.gamecores.0.command: there is no program 'pythn'; ")
    for missing in (
        "actor.gamecores.0.command: there is no file 'no_game.py'",
        "actor.gamecores.1.command: there is no file 'nor_this.py'",
        "actor.keys_file: ",
        "source 'recorded': ",
        "source 'others': ",
        f"{tmp_path / 'no_keys.txt'}",
        f"{tmp_path / 'none.npz'}",
    ):
        assert missing in line


HEADS = "trainer.algorithm={name: ppo, reward_heads: [{}]}"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ((), "player 'second': model 'model' gave value [N], expected value [N, K]"),
        ((HEADS,), "model 'model' gave value [N], expected value [N, K]"),
    ],
)
def test_the_model_must_have_what_each_player_of_a_league_learns_from(options: tuple[str, ...], said: str) -> None:
    second = "{role: main, trainer: {algorithm: {reward_heads: [{weight: -1}]}}}"
    players = f"league.players={{first: {{role: main}}, second: {second}}}"
    job = JobConfig.load(TEMPLATES / "league" / "four.yaml", [players, *options])
    with pytest.raises(ModelError) as refused:
        check_job(job)
    assert refused.value.message == said


SOURCE = "expert={{kind: source, path: {}, demonstration: true, buffer: {}}}"
NULL = ("agent.options={model: model, buffer: null}",)
OTHER = ("demonstrations.kind=buffer", "trainer.buffers=[buffer, demonstrations]")
"""Gives the demonstrations their own buffer."""


@pytest.mark.parametrize(
    ("algorithm", "file", "buffer", "more", "said"),
    [
        ("bc", "expert.json", "buffer", (), "'bc' would imitate its own play, since agent fills 'buffer'"),
        ("bc", "expert.json", "buffer", NULL, ""),
        ("bc", "expert.json", "buffer", (*NULL, "trainer.num_steps=20000"), "give 20 gradients of algorithm 'bc'"),
        ("bc", "expert.json", "buffer", (*NULL, "trainer.num_steps=1"), ""),  # registers an interrupted one's version
        ("mixed", "expert.json", "buffer", (), "'mixed' would imitate its own play"),
        ("mixed", "expert.json", "demonstrations", OTHER, ""),
        ("bc", "other.json", "buffer", NULL, "source 'expert': other.json: there is no such file"),
    ],
)
def test_demonstrations_are_checked_before_the_game_that_says_how_to_read_them(
    tmp_path: Path, algorithm: str, file: str, buffer: str, more: Sequence[str], said: str
) -> None:
    (tmp_path / "expert.json").write_text("[]")
    learns = (f"trainer.algorithm={{name: {algorithm}}}", "buffer={kind: buffer}", SOURCE.format(file, buffer))
    job = JobConfig.load(TEMPLATES / "godot.yaml", [*learns, *more])
    with contextlib.chdir(tmp_path), pytest.raises(ConfigError, match=said) if said else contextlib.nullcontext():
        check_before_games(job)
