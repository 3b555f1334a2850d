"""`brayx train godot.yaml` in an empty folder: builds of a Godot project are started, learned, and started again when
they crash."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

from tests.end_to_end.jobs import FREE_PORTS, ROOT, Command, brayx, said_on_failure, setting, without_ray
from tests.godot_game import expert_demos
from tests.guide_job import guide_job

GAME = f"{sys.executable} {ROOT / 'tests' / 'godot_game.py'} --agents=8 --limit=60"
SMALL = ("buffer.batch_size=8", "trainer.num_steps=10000", "console_port=null")


def test_a_godot_project_is_learned_with_one_command_although_it_crashes(tmp_path: Path) -> None:
    build = tmp_path / "game.x86_64"
    build.write_text(f'#!/bin/sh\nexec {GAME} --quit-after=300 "$@"')
    build.chmod(0o755)
    options = setting(*FREE_PORTS, *SMALL, "game.command=./game.x86_64", "game.num=2")
    environment = without_ray(tmp_path)
    command = Command(["brayx", "train", "godot.yaml", *options], tmp_path, environment)
    with command as train, said_on_failure(train):
        assert train.ended() == 0
    lines = (  # after "waiting for a game", unless a build was faster
        "observations: obs: 4 float32\n",
        "actions: steer: 2 numbers from -1 to 1; dash: one of 2 choices from 0\n",
        "it is learning: its first update came with ",
    )
    assert re.search(".*".join(map(re.escape, lines)), train.err, re.DOTALL)
    mean = re.search(r"champion: godot version 1, mean return ([\d.]+)", train.out)
    assert mean is not None
    assert float(mean[1]) > 1.2, "chance is 0.8, and the best 1.9"

    options += setting("trial=second", "game.num=1", "game.restarts=1")
    with brayx(tmp_path, "train", "godot.yaml", *options, environment=environment) as train, said_on_failure(train):
        assert train.ended() == 2
    assert "build 0 ended with status 3 after " in train.err, "it is started once more"
    last = train.err.splitlines()[-1]
    assert "build 0 ended 2 times within 60 s, the last time with status 3 after " in last
    imported = tmp_path / "imported.txt"
    assert not imported.exists(), imported.read_text()


def test_the_guides_clone_plays_until_its_demonstrations_end(tmp_path: Path) -> None:
    demonstrations = expert_demos()
    (tmp_path / "expert.json").write_text(json.dumps(demonstrations))
    options = setting(*FREE_PORTS, "console_port=null", f"game.command={GAME}")
    words = ["train", guide_job(tmp_path, "godot"), *options]
    with brayx(tmp_path, *words, environment=without_ray(tmp_path)) as train, said_on_failure(train):
        assert train.ended() == 0
    assert "no more transitions to learn from" in train.out
    steps = 1000 * sum(len(actions) for _, actions in demonstrations)
    games = re.search(rf"^  {steps:,} env steps, ([\d,]+) games$", train.out, re.MULTILINE)
    assert games is not None
    assert games[1] != "0"
