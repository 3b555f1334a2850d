"""`brayx serve` as its own process, where Ray cannot be imported: doors, champion, drain, nothing left behind."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable
from pathlib import Path

from brayx.gamecore.client import Client
from tests.end_to_end.jobs import TEMPLATES, Command, brayx, is_free, said_on_failure, setting, without_ray
from tests.end_to_end.test_serve_run import champion, play, status

DOORS = ("actor.port=0", "actor.native_port=0", "actor.tcp_port=0", "actor.grpc_port=0", "actor.drain_timeout_s=60")


def serving(folder: Path, uri: str) -> Command:
    words = [str(TEMPLATES / "cartpole.yaml"), "--tracking", uri, *setting(*DOORS, "model.engine=torch")]
    return brayx(folder, "serve", *words, environment=without_ray(folder))


def doors_of(command: Command) -> dict[str, str]:
    """URL by door, once the command has printed them."""
    command.until(command.says("model acts with"), "it served")
    return dict(re.findall(r"^  (\w+) +(\w+://\S+)$", command.err, re.M))


def ended(command: Command, url: str, end: Callable[[], None]) -> int:
    """Ends the service during a game, which is finished; returns the action of its last tick."""
    with Client(url) as client:
        client.start()
        end()
        command.until(command.says("ending: sessions have 60 s to finish"), "it drained")
        action = json.loads(client.tick(b'{"obs": [0.0, 0.0, 0.1, 0.5], "reward": 0.0}'))["action"]
        client.stop()
    assert command.ended() == 0
    command.gone()
    assert "cut off" not in command.err
    return int(action)


def test_the_champion_is_served_until_a_signal_and_a_running_game_may_finish(tmp_path: Path, tracking_db: str) -> None:
    champion(tracking_db, tmp_path)
    with serving(tmp_path, tracking_db) as command, said_on_failure(command):
        urls = doors_of(command)
        assert set(urls) == {"http", "ws", "tcp", "grpc"}
        assert status(urls["http"])["registered"] == {"model": ["models:/cartpole/1"]}
        assert play(urls["http"]) == [0, 0, 1], "it pushes where the pole leans"
        assert ended(command, urls["tcp"], command.process.terminate) == 1
        assert "untrained" not in command.err
        assert is_free(int(urls["http"].rpartition(":")[2]))
    assert not (tmp_path / "imported.txt").exists(), (tmp_path / "imported.txt").read_text()


def test_before_any_champion_it_serves_untrained_and_says_what_to_run(tmp_path: Path, tracking_db: str) -> None:
    with serving(tmp_path, tracking_db) as command, said_on_failure(command):
        urls = doors_of(command)
        assert status(urls["http"])["policy_versions"] == {"model": 0}
        (line,) = [line for line in command.err.splitlines() if "untrained" in line]
        assert re.search(r"brayx (train|demo)|make demo", line), line
        assert "model acts with weights as built" in command.err
        with contextlib.closing(Client(urls["tcp"])) as client:
            client.start()
            command.control_c()
            command.until(command.says("Ctrl-C ends them now"), "it drains")
            command.control_c()
            assert command.ended() == 0
        assert command.err.endswith("\nended; 1 session was cut off\n")
