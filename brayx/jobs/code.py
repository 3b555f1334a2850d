"""Checks that the classes and functions that a job names exist.

Imports the user's modules, which `JobConfig.load` does not. Knows nothing of running them.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Iterator
from typing import Literal

from brayx.actor.agent import Agent
from brayx.actor.contract_agent import ContractAgent
from brayx.actor.players import scripted
from brayx.components import load, load_named
from brayx.errors import ConfigError
from brayx.jobs.config import JobConfig
from brayx.league.config import LeagueConfig
from brayx.recording.frames import check_video


def check_code(job: JobConfig, actors: Collection[str], *, mode: Literal["train", "serve"]) -> None:
    """Loads a job's code in this process, because an error in a replica would be harder to find.

    Args:
        job: the job.
        actors: its actors that will run.
        mode: sources, rollouts and renders are needed for training only; but a render that draws the frames of
            recordings always is.

    Raises:
        ConfigError: something is missing; the message names the file, the key, and the module, class, function or
            package.
    """
    for place, key, module, attribute in _named(job, actors, mode):
        try:
            load(module, attribute, job.folder)
        except ConfigError as error:
            key = key if "attribute" in error.details else "module"
            raise ConfigError(f"{job.file}: {place}.{key}: {error.message}", **error.details) from error
    for own in (job, *map(job.of_behaviour, job.behaviours)):
        _check_network(own)
    for actor in actors:
        _check_reward(job, actor)
    for name, recording in job.recordings.items():
        if recording.frames is not None:
            try:
                check_video()
            except ConfigError as error:
                raise ConfigError(f"{job.file}: {name}.frames: {error.message}", **error.details) from error
    if mode == "train":
        for name, trainer in job.trainers.items():
            _check_hooks(job, name, trainer.hooks)


def _check_network(job: JobConfig) -> None:
    if any(model.module == "brayx.jobs.contract_model" for model in job.models.values()):
        from brayx.jobs.contract_model import check_network  # loads torch

        check_network(job)


def _check_reward(job: JobConfig, actor: str) -> None:
    config = job.actors[actor]
    if config.reward is None:
        return
    place = f"{job.file}: {actor}.reward"
    try:
        reward = load_named(config.reward, job.folder)
    except ConfigError as error:
        raise ConfigError(f"{place}: {error.message}", **error.details) from error
    try:
        inspect.signature(reward).bind(None)
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"{place}: {config.reward} cannot be called with a tick: {error}; expected (tick)", key="reward"
        ) from None
    for name in config.agents:
        if not issubclass(load(job.agents[name].module, job.agents[name].class_name, job.folder), ContractAgent):
            raise ConfigError(f"{place}: {name} is no ContractAgent, so it decides its own rewards", key="reward")


def _check_hooks(job: JobConfig, trainer: str, module: str | None) -> None:
    if module is None:
        return
    from brayx.trainer.hooks import load_hooks  # loads torch

    try:
        load_hooks(module, job.folder)
    except ConfigError as error:
        raise ConfigError(f"{job.file}: {trainer}.hooks: {error.message}", **error.details) from error


def _named(job: JobConfig, actors: Collection[str], mode: str) -> Iterator[tuple[str, str, str, str]]:
    """Component, key, module and attribute of all required code."""
    for actor in actors:
        config = job.actors[actor]
        for name in config.agents:
            yield name, "class", job.agents[name].module, job.agents[name].class_name
        for key, message in (
            ("tick_input_proto", config.tick_input_proto),
            ("tick_output_proto", config.tick_output_proto),
        ):
            if message is not None:
                yield f"{actor}.{key}", "message", message.module, message.message
    for name, model in job.models.items():
        yield name, "module", model.module, "build_model"
    if mode == "train":
        for name, source in job.sources.items():
            if source.module is not None:
                yield name, "func", source.module, source.func
        for name, rollout in job.rollouts.items():
            if rollout.module is not None and rollout.func is not None:
                yield name, "func", rollout.module, rollout.func
    for name, board in job.boards.items():
        yield name, "func", board.module, board.func
        if board.draw:
            yield name, "draw", board.module, board.draw
    for name, render in job.renders.items():
        if mode == "train" or name == job.frames_render:
            yield name, "func", render.module, render.func


def scripts_of(config: LeagueConfig, folder: str) -> dict[str, type[Agent]]:
    """The agents of a league's scripted players, by player.

    Raises:
        ConfigError: a script cannot be loaded.
    """
    scripts = {}
    for name, player in config.players.items():
        if player.script is not None:
            scripts[name] = scripted(load_named(player.script, folder))
    return scripts
