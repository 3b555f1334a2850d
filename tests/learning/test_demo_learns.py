"""The demo, from nothing to a champion that solves CartPole: three seeds out of three, and one on Ray."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.end_to_end.jobs import FREE_PORTS, brayx, said_on_failure, setting

PASSING_RETURN = 475.0
TIMEOUT_S = 1200.0

_ROWS: list[str] = []


@pytest.fixture(scope="module", autouse=True)
def table(request: pytest.FixtureRequest) -> Iterator[None]:
    """Prints what the seeds reached, once all are through."""
    yield
    with request.config.pluginmanager.getplugin("capturemanager").global_and_fixture_disabled():
        print("\n\n| seed | greedy return | env steps | seconds in all, meant to be under 60 |\n|---|---|---|---|")
        print("\n".join(_ROWS))


@pytest.mark.learning
@pytest.mark.parametrize(
    ("seed", "words"), [(0, ()), (1, ()), (2, ()), (0, ("--cluster",))], ids=["0", "1", "2", "0-ray"]
)
def test_the_demo_reaches_475(tmp_path: Path, seed: int, words: tuple[str, ...]) -> None:
    options = setting(f"seed={seed}", *FREE_PORTS)
    with brayx(tmp_path, "demo", *words, *options) as command, said_on_failure(command):
        code = command.ended(TIMEOUT_S)
        said = command.out
        evaluated = re.search(r"greedy, through the HTTP door: ([\d.]+)", said)
        steps = re.search(r"([\d,]+) env steps", said)
        seconds = re.search(r"(\d+) s in all", said)
        assert evaluated, said
        assert steps, said
        assert seconds, said
        _ROWS.append(f"| {' '.join([str(seed), *words])} | {evaluated[1]} | {steps[1]} | {seconds[1]} |")
        assert code == 0
        assert float(evaluated[1]) >= PASSING_RETURN
        assert (tmp_path / "curve.png").stat().st_size > 0
        shown = [line.split("  # ")[0] for line in said.splitlines()]
        show, *on_ray, serve, on_serve = shown[shown.index("next:") + 1 :]
        assert re.fullmatch(r"  \S*mlflow ui --backend-store-uri \S*mlflow\.db --workers 1", show)
        assert len(on_ray) == (not words)
        assert all(re.fullmatch(r"  \S*brayx demo --cluster", line) for line in on_ray)
        uri = re.escape(f"sqlite:///{tmp_path / 'mlflow.db'}")
        assert re.fullmatch(rf"  \S*brayx serve \S*cartpole\.yaml --tracking {uri}", serve)
        assert re.fullmatch(rf"  \S*serve run deployments\.actor:app config=\S*cartpole\.yaml tracking={uri}", on_serve)
        command.gone()
