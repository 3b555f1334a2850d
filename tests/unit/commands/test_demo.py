"""The demo: its checks before Ray starts, its final games, and the commands that it suggests."""

from __future__ import annotations

import argparse
import contextlib
import re
import shlex
from types import SimpleNamespace

import pytest

from brayx.cluster.serving import ServeArgs
from brayx.commands import demo as demo_module
from brayx.errors import ConfigError
from brayx.gamecore.games import seeds
from brayx.jobs.config import JobConfig
from brayx.jobs.evaluate import Evaluation
from brayx.jobs.gamecores import filled
from brayx.jobs.shipped import TEMPLATES
from brayx.tracking import tracking_uri

JOB = """
project: p
trial: t
agent: {kind: agent, module: my_agent, class: Mine}
model: {kind: model, module: my_agent}
actor: {kind: actor, agents: [agent]}
buffer: {kind: buffer}
trainer: {kind: trainer, model: model, buffers: [buffer]}
"""


def test_missing_code_is_named_before_ray_starts(tmp_path, tracking_db, monkeypatch):
    def start(*_):
        raise AssertionError("Ray was started")

    monkeypatch.setattr("brayx.cluster.job.cluster_for", start)
    (tmp_path / "job.yaml").write_text(JOB)
    (tmp_path / "my_agent.py").write_text("class Other:\n    pass\n")
    arguments = argparse.Namespace(
        config=str(tmp_path / "job.yaml"),
        overrides=[],
        tracking=tracking_db,
        ingress="serve",
        cluster="",
        trial=None,
        new=False,
    )
    with pytest.raises(ConfigError, match="Mine"):
        demo_module.run(arguments)


@pytest.fixture
def played(tmp_path, monkeypatch):
    """Runs a demo with trainings that succeed at once, and returns the arguments of its final games."""
    asked = {}

    def evaluate(*_, **options):
        asked.update(options)
        return Evaluation([500.0])

    result = SimpleNamespace(finished=True, version=1, pool_name="cartpole", curve=[(1, 500.0)], summary=str)
    served = contextlib.nullcontext("http://127.0.0.1:1")
    monkeypatch.setattr(demo_module, "_in_process", lambda *_: (result, lambda _: served))
    monkeypatch.setattr("brayx.jobs.evaluate.evaluate", evaluate)
    monkeypatch.setattr("brayx.jobs.rating.rate", lambda *_: None)
    monkeypatch.chdir(tmp_path)

    def run(tracking=None, overrides=()):
        arguments = argparse.Namespace(
            config=str(TEMPLATES / "cartpole.yaml"),
            overrides=overrides,
            tracking=tracking,
            ingress="serve",
            cluster=None,
            trial=None,
            new=False,
            games=20,
        )
        assert demo_module.run(arguments) == 0
        return asked

    return run


def test_the_demo_says_what_its_seconds_include(played, tracking_db, capsys):
    played(tracking_db)
    assert re.search(r"^  \d+ s in all, from the start to the last game$", capsys.readouterr().out, re.M)


def test_no_final_game_has_a_seed_of_the_training(played, tracking_db):
    """`evaluate` gives its processes the seed, and 10 000 more each."""
    seed = played(tracking_db)["seed"]
    gamecores = JobConfig.load(TEMPLATES / "cartpole.yaml").actors["actor"].gamecores
    (gamecore,) = gamecores
    words = filled(gamecore.command, {"tcp": "tcp://x"}, door=gamecore.door, index=0)
    training, at_once = (int(words[words.index(name) + 1]) for name in ("--seed", "--at-once"))
    assert at_once == 8
    training_games = {next(seeds(training, place)) for place in range(at_once)}
    assert not {next(seeds(seed + 10_000 * index)) for index in range(4)} & training_games


def test_the_final_games_carry_the_jobs_keys(played, tracking_db):
    assert played(tracking_db)["keys_file"] is None
    assert played(tracking_db, ["actor.keys_file=/etc/keys.txt"])["keys_file"] == "/etc/keys.txt"


def test_the_last_lines_say_how_to_run_the_same_on_ray(played, tracking_db, capsys):
    played(tracking_db)
    lines = [line.strip() for line in capsys.readouterr().out.splitlines()]
    assert any(line.endswith("brayx demo --cluster  # the same on Ray") for line in lines[lines.index("next:") :])


def serves(capsys):
    """Words of the last line, from ``serve run`` on."""
    words = shlex.split(capsys.readouterr().out.splitlines()[-1], comments=True)
    assert words[0].endswith("serve")
    assert words[1] == "run"
    return words[2:]


def test_the_shipped_file_is_what_to_serve_only_where_it_serves_the_champion(played, tracking_db, tmp_path, capsys):
    """``tracking_db`` is the default of this folder: ``mlflow.db``."""
    (tmp_path / "serve_config.yaml").touch()
    played()
    assert serves(capsys) == ["serve_config.yaml"]
    (tmp_path / "else where").mkdir()
    for tracking, file in ((str(tmp_path / "else where"), True), (None, False)):
        if not file:
            (tmp_path / "serve_config.yaml").unlink()
        played(tracking)
        application, *words = serves(capsys)
        assert application == "deployments.actor:app"
        args = ServeArgs(**dict(word.split("=", 1) for word in words))
        assert JobConfig.load(args.config).project == "cartpole"
        assert args.tracking == tracking_uri(tracking)
