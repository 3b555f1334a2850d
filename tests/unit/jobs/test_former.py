"""`brayx.jobs.former`: former options at their defaults are accepted, others are refused with what to write."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from brayx.errors import ConfigError
from brayx.jobs.config import KINDS, JobConfig
from brayx.jobs.document import JobFile
from brayx.jobs.former import FORMER, Former, options_without_former
from brayx.jobs.shipped import TEMPLATES

TEMPLATE = {"rollout": "ppo_env.yaml", "league": "league/four.yaml"}
ALL = [(kind, path, former) for kind, formers in FORMER.items() for path, former in formers.items()]


def job_with(kind: str, path: str, value: Any, module: str | None = None) -> tuple[str, str, dict[str, Any]]:
    """A job with a former option: its text, the place of the option, and the job without it."""
    algorithm = ["mixed"] if ".reinforcement." in path else ["impala"] if path.startswith("algorithm.") else []
    values = JobFile.parse((TEMPLATES / TEMPLATE.get(kind, "cartpole.yaml")).read_text(), "job").values
    name = next(name for name, part in values.items() if isinstance(part, dict) and part.get("kind") == kind)
    if algorithm:
        values[name]["algorithm"] = {"name": algorithm[0]}
    *parents, last = path.replace("*", "main").split(".")
    options = values[name]
    for key in parents:
        options = options.setdefault(key, {"name": "impala"} if key == "reinforcement" else {})
    without = json.loads(json.dumps(values))
    options[last] = value
    if module is not None:
        options["module"] = module
    return json.dumps(values), ".".join([name, *parents, last]), without


@pytest.mark.parametrize(("kind", "path", "former"), ALL, ids=lambda case: case if isinstance(case, str) else "")
def test_a_former_option_is_accepted_at_its_default_and_refused_otherwise(
    kind: str, path: str, former: Former, tmp_path: Path
) -> None:
    file = TEMPLATES / TEMPLATE.get(kind, "cartpole.yaml")
    text, place, without = job_with(kind, path, former.default)
    assert JobConfig.parse(text, file, "job").as_dict() == JobConfig.parse(json.dumps(without), file, "job").as_dict()
    text, place, _ = job_with(kind, path, "another")
    with pytest.raises(ConfigError) as refused:
        JobConfig.parse(text, file, "job")
    (error,) = refused.value.details["errors"]
    assert f'{place}: is "another"' in error
    assert former.instead in error


@pytest.mark.parametrize(("kind", "path", "former"), ALL, ids=lambda case: case if isinstance(case, str) else "")
def test_a_recorded_job_is_only_refused_for_how_it_acts_or_learns(kind: str, path: str, former: Former) -> None:
    text, place, without = job_with(kind, path, "another")
    if former.learning:
        with pytest.raises(ConfigError, match=f'{place}: is "another"'):
            JobConfig.of(json.loads(text), str(TEMPLATES))
        return
    folder = str((TEMPLATES / TEMPLATE.get(kind, "cartpole.yaml")).parent)
    assert JobConfig.of(json.loads(text), folder) == JobConfig.of(without, folder)


def test_a_trainer_keeps_an_option_of_its_own_algorithm() -> None:
    options = {"num_envs": 8, "scale_actions": True, "clip_c": 1.0}
    assert options_without_former(options, "impala") == ({"num_envs": 8}, [])
    assert options_without_former(options, "mine") == ({"num_envs": 8, "clip_c": 1.0}, [])
    inner = {"reinforcement": {"name": "impala", "clip_c": 1.0, "gamma": 0.9}}
    assert options_without_former(inner, "mixed") == ({"reinforcement": {"name": "impala", "gamma": 0.9}}, [])
    assert inner["reinforcement"]["clip_c"] == 1.0
    _, (error,) = options_without_former({"scale_actions": False}, "ppo")
    assert error.startswith("scale_actions is false, but this version has no such option")


@pytest.mark.parametrize(("kind", "path"), [(kind, path) for kind, path, _ in ALL])
def test_no_option_of_today_is_a_former_one(kind: str, path: str) -> None:
    if "." not in path:
        assert path not in KINDS[kind].model_fields


def test_an_algorithm_of_ones_own_may_have_an_option_of_that_name(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "from brayx.algorithms.impala import ImpalaConfig\n\n\n"
        "class Mine(ImpalaConfig):\n    name: str = 'mine'\n    clip_c: float = 0.5\n"
    )
    text, *_ = job_with("trainer", "algorithm.clip_c", 0.7, module="mine")
    for name in ("gym_agent", "gym_model", "gym_render"):
        (tmp_path / f"{name}.py").write_text((TEMPLATES / f"{name}.py").read_text())
    job = JobConfig.parse(text, tmp_path / "job.yaml", "job")
    assert job.trainers["trainer"].algorithm.model_dump()["clip_c"] == 0.7
