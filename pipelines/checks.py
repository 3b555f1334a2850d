"""Checks before a training starts: the job's code, and whether its model can be learned.

Starts nothing.
"""

from __future__ import annotations

import shlex
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from brayx.errors import ConfigError
from deployments.code import check_code
from deployments.job import JobConfig, only
from pipelines.fitting import check_algorithm
from pipelines.gamecores import environment
from pipelines.sources import check_sources

if TYPE_CHECKING:
    from brayx.replay.files import Dataset
    from brayx.replay.packing import Layout
    from brayx.types import Fragment


_SCRIPTS = (".py", ".sh", ".js", ".jar")


def check_job(job: JobConfig) -> tuple[str, Layout]:
    """The name of the job's actor, and the layout of its model's observations and actions.

    The name is empty if the job's data come from rollouts or sources only.

    Raises:
        ConfigError, ModelError: something is missing or does not fit; the message names it.
    """
    name = actor_of(job)
    check_code(job, [name] if name else [], mode="train")
    check_gamecores(job)
    return name, check_learning(job)


def check_gamecores(job: JobConfig) -> None:
    """Checks that the gamecores' programs and scripts exist.

    A word of a command is a script if it ends with ``.py``, ``.sh``, ``.js`` or ``.jar`` and is not an option.

    Raises:
        ConfigError: a file is missing; the message names the component, the command and the file.
    """
    path = environment()["PATH"]
    for name, actor in job.actors.items():
        for index, gamecore in enumerate(actor.gamecores):
            place = f"{job.file}: {name}.gamecores.{index}.command"
            program, *words = shlex.split(gamecore.command) or [""]
            if shutil.which(program if "/" not in program else str(Path(job.folder, program)), path=path) is None:
                raise ConfigError(f"{place}: there is no program {program!r}", command=gamecore.command)
            scripts = [word for word in words if Path(word).suffix in _SCRIPTS and word[0] != "-" and "{" not in word]
            for script in scripts:
                if not Path(job.folder, script).exists():
                    raise ConfigError(f"{place}: there is no file {script!r} in {job.folder}", command=gamecore.command)


def check_learning(job: JobConfig) -> Layout:
    """Checks that the model can be learned from the data of the job's rollouts and sources.

    Returns:
        The layout of the model's observations and actions.

    Raises:
        ConfigError, ModelError: something does not fit; the message names it.
    """
    from brayx.trainer.fits import layout_of

    config = job.trainers[only("trainer", job.trainers)]
    played: Mapping[str, tuple[str, set[str]]] = {}
    if job.rollouts:
        from pipelines.environments import check_rollouts

        played = check_rollouts(job)
    opened: dict[str, tuple[Dataset, Fragment]] = {}
    check_algorithm(job, played, check_sources(job, opened=opened))
    layout, memory = layout_of(config, config.model, job.models[config.model].module, job.folder, job.as_dict())
    check_sources(job, layout, opened, memory)
    return layout


def actor_of(job: JobConfig) -> str:
    """Name of the job's one actor; empty for a job whose data come from rollouts or sources alone."""
    return "" if not job.actors and (job.rollouts or job.sources) else only("actor", job.actors)


def ports_of(job: JobConfig, actor: str) -> dict[str, tuple[str, int]]:
    """Host and number of each port that a job's actor opens, by its option; 0 is any free one."""
    config = job.actors[actor]
    doors = [
        ("port", config.host, config.port),
        ("native_port", config.native_host, config.native_port),
        ("tcp_port", config.native_host, config.tcp_port),
        ("grpc_port", config.native_host, config.grpc_port),
    ]
    return {f"{actor}.{option}": (host, port) for option, host, port in doors if port}
