"""`brayx evaluate --rate`: real games by a real door, which reports the versions that play, and a real registry."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from brayx.actor.actor import Actor
from brayx.actor.doors.asgi import DoorApp
from brayx.actor.table import SessionTable
from brayx.tracking import Trial, find, register
from brayx.tracking.checkpoints import Checkpoint
from tests.unit.conftest import Run
from tests.unit.gamecore.echo_server import serving


class Left(Actor):
    """Pushes to the left, and changes to another version when a game ends, if the service is set to."""

    table: Serving

    async def start(self, session: str, body: bytes) -> bytes:
        return b"Game Started"

    async def tick(self, body: bytes) -> bytes:
        return b'{"action":0}'

    async def stop(self, body: bytes) -> bytes:
        if self.table.then is not None:
            self.table.registered = self.table.then
        return b"Game Stopped"


class Serving(SessionTable):
    """A replica without Ray."""

    def __init__(self, registered: Any) -> None:
        super().__init__(type("Agent", (Left,), {"table": self}))
        self.registered = registered
        self.then: Any = None
        self.others: dict[int, Any] = {}
        """What other replicas report, by the number of the status request, from 0."""
        self.asked = itertools.count()

    def status(self) -> dict[str, Any]:
        registered = self.others.get(next(self.asked), self.registered)
        extra = {} if registered is None else {"registered": registered}
        return {"service": "brayx", **super().status(), **extra}


@pytest.fixture
def pool(tracking_db: str, tmp_path: Path) -> str:
    """URI of a registry with two versions of ``cart`` and what a training has tagged them with."""
    trial = Trial.open("cart", "t", tracking_db)
    (tmp_path / "checkpoint").mkdir()
    (tmp_path / "checkpoint" / "weights.npz").write_bytes(b"weights")
    for step in (1, 2):
        checkpoint: Checkpoint = trial.save_checkpoint(tmp_path / "checkpoint", step)
        register(trial, checkpoint, "cart", tags={"return": "5.0", "rating": "5.0"})
    return tracking_db


@pytest.fixture
def service() -> Iterator[tuple[Serving, str]]:
    table = Serving({"model": ["models:/cart/2"]})
    with serving(DoorApp(table)) as address:
        yield table, f"http://{address}"


@pytest.fixture
def evaluate(command: Run, pool: str) -> Run:
    """``brayx evaluate`` of three games of CartPole; its arguments are the URL and further words."""
    return lambda url, *words: command(
        "evaluate", "CartPole-v1", "--url", url, "--games", "3", *words, "--tracking", pool
    )


@pytest.mark.parametrize("door", ["http", "ws"])
def test_the_version_that_played_has_the_mean_of_its_games(evaluate: Run, service: Any, pool: str, door: str) -> None:
    _, url = service
    done = evaluate(url.replace("http", door), "--rate", "--door", door)
    assert done.returncode == 0, done.stderr
    returns = [float(line.rpartition(" ")[2]) for line in done.stderr.splitlines() if line.startswith("game ")]
    assert len(returns) == 3
    tags = find("models:/cart/2", pool).tags
    assert float(tags["rating"]) == pytest.approx(sum(returns) / 3, abs=1e-4)
    assert float(tags["rating_error"]) == pytest.approx(statistics.stdev(returns) / 3**0.5, rel=1e-3)
    assert (tags["rating_games"], tags["rating_env"], tags["return"]) == ("3", "CartPole-v1", "5.0")
    assert done.stdout.splitlines()[-1] == f"cart version 2 has the rating {tags['rating']} now"
    other = find("models:/cart/1", pool).tags
    assert other["rating"] == "5.0"
    assert "rating_games" not in other, "a training's mean return"


def test_nothing_is_rated_unless_that_is_asked_for(evaluate: Run, service: Any, pool: str) -> None:
    done = evaluate(service[1])
    assert done.returncode == 0, done.stderr
    assert find("models:/cart/2", pool).tags["rating"] == "5.0"


@pytest.mark.parametrize(
    ("registered", "said"),
    [
        ({"model": ["models:/cart/1", "models:/cart/2"]}, "get model: models:/cart/1, models:/cart/2"),
        ({"model": ["models:/cart/1"], "other": []}, "get model: models:/cart/1; other: none"),
        ({"model": []}, "get model: none"),
        ({}, "get none"),
        ({"model": ["models:/cart/9"]}, "model 'cart' has no version 9, nearest is 2; there are 1, 2"),
        (None, "no status page that names registered versions"),
    ],
)
def test_what_is_not_one_registered_version_is_refused_before_any_game(
    evaluate: Run, service: Any, pool: str, registered: Any, said: str
) -> None:
    table, url = service
    table.registered = registered
    done = evaluate(url, "--rate")
    assert done.returncode == 2
    assert said in done.stderr
    assert "game 1" not in done.stderr


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        (  # neither the first status request nor the last
            {"others": {2: {"model": ["models:/cart/1"]}}},
            "during the games sessions got models:/cart/1, models:/cart/2: none is rated",
        ),
        (
            {"registered": {"model": ["models:/cart/1"]}, "then": {"model": ["models:/cart/2"]}},
            "the first games were of cart version 1, the last of 2: neither is rated",
        ),
    ],
    ids=["a replica that is behind", "a new version"],
)
def test_games_of_two_versions_rate_neither(
    evaluate: Run, service: Any, pool: str, changed: dict[str, Any], said: str
) -> None:
    table, url = service
    vars(table).update(changed)
    done = evaluate(url, "--rate")
    assert done.returncode == 2
    assert said in done.stderr
    assert "over 3 games" in done.stdout
    assert {find(f"models:/cart/{version}", pool).tags["rating"] for version in (1, 2)} == {"5.0"}
