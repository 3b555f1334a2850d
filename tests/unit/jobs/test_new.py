"""`brayx new`: the folder is a complete project; the templates' comments equal the code's docstrings."""

from __future__ import annotations

import itertools
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from brayx.actor.agent import Services
from brayx.actor.agent_actor import AgentActorFactory
from brayx.commands import cli
from brayx.components import load
from brayx.errors import AgentError, ConfigError
from brayx.jobs.code import check_code
from brayx.jobs.config import JobConfig
from brayx.jobs.new import KINDS, new_project
from brayx.jobs.options import documented
from brayx.jobs.shipped import TEMPLATES
from brayx.metrics import Recorder
from brayx.types import Forward

CATCH = TEMPLATES / "catch"
JOBS = sorted(TEMPLATES.glob("*/*.yaml"))


@pytest.mark.parametrize("file", JOBS, ids=lambda file: file.stem)
def test_the_template_documents_every_option_as_its_code_does(file: Path) -> None:
    """Mended by ``brayx check FILE > COPY && mv COPY FILE``."""
    assert file.read_text() == documented(JobConfig.load(file))


@pytest.mark.parametrize(
    ("name", "template"), [*((f"my_{template}_game", template) for template in KINDS), ("接球", "rl")]
)
def test_a_project_is_whole_and_has_its_own_name(tmp_path: Path, name: str, template: str) -> None:
    made = new_project(name, template, tmp_path)
    folder = tmp_path / name
    assert sorted(made) == sorted(file for file in folder.rglob("*") if file.is_file())
    job = JobConfig.load(folder / f"{name}.yaml")
    assert job.project == name
    check_code(job, job.actors, mode="train")
    for file in made:
        assert "catch_" not in file.read_text(), file
        assert "four_" not in file.read_text(), file
        assert len(file.read_text().splitlines()) <= 11 or file.name != "README.md"


@pytest.mark.parametrize("name", ["a", "a_game_with_a_long_name"])
def test_it_says_to_train_in_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(["new", name]) == 0
    *_, said = capsys.readouterr().out.splitlines()
    assert said == f"next: cd {name} && brayx train {name}.yaml"
    shown = [line for line in (tmp_path / name / "README.md").read_text().splitlines() if line.startswith("    ")]
    assert shown[0].split("#")[0].strip() == said.rpartition("&& ")[2], "the README and the command say the same"
    assert len(shown) == 3
    assert len({line.index("  # ") for line in shown}) == 1, "the comments are in one column"


def test_the_help_describes_each_template_once(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["new", "--help"])
    said = " ".join(capsys.readouterr().out.split())
    described = "; ".join(f"{template}: {what}" for template, what in KINDS.items())
    assert described in said
    assert described.count(":") == len(KINDS)
    assert described.count(";") == len(KINDS) - 1


async def test_a_model_with_other_actions_than_the_game_is_refused_at_the_first_tick() -> None:
    class Policy:
        async def forward(self, *args: Any) -> Forward:
            return Forward({"logits": np.zeros(5, np.float32)}, 1)

    config = {"mode": "train", "seed": 0, "agent": {"options": {}}}
    agents = {"agent": load("catch_agent", "CatchAgent", str(CATCH))}
    actor = AgentActorFactory(agents, config, Services(models={"model": Policy()}, recorder=Recorder()))()
    await actor.start("s", b"")
    with pytest.raises(AgentError) as refused:
        await actor.tick(b'{"row": 0, "column": 0, "paddle": 2, "reward": 0.0}')
    assert str(refused.value.__cause__) == "the model has 5 actions, the game 3"


@pytest.mark.slow  # runs a separate pytest
def test_its_own_quick_tests_pass_without_a_warning(tmp_path: Path) -> None:
    folder = new_project("quick", "rl", tmp_path)[0].parent
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", "not trains", "."]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Warning" not in done.stdout + done.stderr


@pytest.mark.parametrize(
    ("name", "template", "message"),
    [
        ("Pong", "rl", "name is 'Pong', expected at most 50 small letters"),
        ("../evil", "rl", "expected at most 50 small letters"),
        ("ﬁsh", "rl", "expected at most 50 small letters"),
        ("球" * 51, "rl", "expected at most 50 small letters"),
        ("test", "rl", "pytest would take test_game.py for tests"),
        *((name, template, "takes for") for name in ("on", "no", "null", "true") for template in ("rl", "js")),
        ("pong", "dqn", "template is 'dqn', expected one of rl, imitation, mixed"),
    ],
)
def test_an_invalid_project_is_refused_and_not_made(tmp_path: Path, name: str, template: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        new_project(name, template, tmp_path)
    assert not list(tmp_path.iterdir())


def test_an_existing_folder_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "pong").mkdir()
    with pytest.raises(ConfigError, match="already exists"):
        new_project("pong", "rl", tmp_path)
    assert not list((tmp_path / "pong").iterdir())


class TestDocumented:
    def test_it_is_the_job_itself(self) -> None:
        job = JobConfig.load(TEMPLATES / "cartpole.yaml")
        assert yaml.safe_load(documented(job)) == job.as_dict()

    def test_every_option_is_explained(self) -> None:
        """A line is an option of ours with a comment behind or above it; free values need none."""
        lines = documented(JobConfig.load(TEMPLATES / "cartpole.yaml")).splitlines()
        lines = lines[: lines.index("network:")]
        bare = [
            line
            for above, line in itertools.pairwise(lines)
            if line.strip() and "#" not in line and not above.lstrip().startswith("#")
        ]
        assert {line.split()[0] for line in bare} <= {"kind:", "name:"}
