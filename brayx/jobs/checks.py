"""Checks before a training starts: the job's code, and whether its model can be learned.

Starts nothing.
"""

from __future__ import annotations

import dataclasses
import os
import re
import shlex
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from brayx.algorithms.build import check_enough, check_fits
from brayx.errors import ConfigError, ModelError
from brayx.gamecore.auth import Keys
from brayx.guard import program
from brayx.jobs.code import check_code, scripts_of
from brayx.jobs.config import JobConfig, job_of, only
from brayx.jobs.contracts import by_contract, check_limits, parse_contract
from brayx.jobs.gamecores import gamecores_of, given_by
from brayx.jobs.inner_bridge import BRIDGES, options_of
from brayx.jobs.sources import Opened, check_sources, only_imitated
from brayx.jobs.stored_models import check_initial_weights
from brayx.tracking.tensorboard import check_installed
from brayx.types import DEMONSTRATION

if TYPE_CHECKING:
    from brayx.actions import ActionSpec
    from brayx.replay.packing import Layout
    from brayx.trainer.config import TrainerConfig


_SCRIPTS = (".py", ".sh", ".js", ".jar")
_FLAG = re.compile(r"--(?:no-)?([\w-]+)")


def check_job(job: JobConfig) -> tuple[str, Layout]:
    """The name of the job's actor, and the layout of its model's observations and actions; of several behaviours that
    of the first.

    The name is empty if the job's data come from rollouts or sources only.

    Raises:
        ConfigError, ModelError: something is missing or does not fit; the message names it.
    """
    name = actor_of(job)
    check_contract(job)
    for own in by_contract(job):
        check_limits(own, learns=True)
    check_code(job, [name] if name else [], mode="train")
    check_gamecores(job)
    if job.tracking.tensorboard:
        check_installed()
    learners = check_league(job)
    if not learners:
        layouts = [check_learning(own) for own in by_contract(job) or [job]]
        return name, layouts[0]
    check_one_contract(job, "a league has one behaviour")
    for player, learner_job in learners.items():
        try:
            layout = check_learning(learner_job)
        except (ConfigError, ModelError) as error:
            if learner_job.trainers == job.trainers:
                raise
            raise type(error)(f"player {player!r}: {error.message}", **error.details) from None
    return name, layout


def check_before_games(job: JobConfig) -> str:
    """Checks what needs no contract of a job that waits for its first game's; returns the name of its actor.

    Raises:
        ConfigError: something is missing or does not fit; the message names it.
    """
    actor = actor_of(job)
    check_code(job, [actor], mode="train")
    check_gamecores(job)
    recorded = check_sources(job)
    if not job.behaviours and len(job.trainers) == 1:  # otherwise each behaviour has its own options
        _check_algorithm(job, {}, recorded)
    return actor


def check_one_contract(job: JobConfig, why: str) -> None:
    """Refuses a job with several contracts, and says why it can have one only.

    Raises:
        ConfigError: names the behaviours.
    """
    if len(job.contracts) > 1:
        names = ", ".join(parse_contract(contract).behaviour for contract in job.contracts)
        raise ConfigError(
            f"{job.file}: contract has the behaviours {names}, and {why}: name the contract of one of them",
            key="contract",
        )


def check_contract(job: JobConfig) -> None:
    """Refuses a job without the contract that it needs.

    Raises:
        ConfigError: says how to give it one.
    """
    if job.needs_contract:
        raise ConfigError(
            f"{job.file}: contract is null, and only `brayx train` learns it from the first game that connects: name a "
            "file with --set contract=FILE, as `brayx check --contract FILE` reads it",
            key="contract",
        )


def check_weights(job: JobConfig, name: str, uri: str, resume: bool, run: Callable[..., Any]) -> None:
    """Checks the weights that the job's training starts from; arguments and errors as for `check_initial_weights`."""
    for learner_job in (check_league(job) or {"": job}).values():
        check_initial_weights(learner_job, name, uri, resume, run)


def check_league(job: JobConfig) -> dict[str, JobConfig]:
    """Checks that the job's league, if it has one, can be trained.

    Returns:
        The job of each player that learns, by name; of several with the same options only the first. Empty: no league.

    Raises:
        ConfigError: there are several, it plays with another model than the trainer's, its data would not come from
            games, a script cannot be loaded, or a player's trainer options do not fit.
    """
    if not job.leagues:
        return {}
    name = only("league", job.leagues)
    league, trainer = job.leagues[name], job.trainers[only("trainer", job.trainers)]
    if league.model != trainer.model:
        raise ConfigError(f"{job.file}: {name}.model is {league.model!r}, expected the trainer's, {trainer.model!r}")
    if not job.needs_games or not job.actors:
        others = ", ".join([*job.rollouts, *job.sources]) or "no actor"
        raise ConfigError(f"{job.file}: {name} needs all its data from games at an actor's doors; the job has {others}")
    distinct: dict[str, JobConfig] = {}
    for player in league.learners:
        learner_job = job_of(job, name, player)
        if all(learner_job.trainers != other.trainers for other in distinct.values()):
            distinct[player] = learner_job
    scripts_of(league, job.folder)
    return distinct


def check_gamecores(job: JobConfig) -> None:
    """Checks that the gamecores' programs and scripts exist, and that bridges take their options.

    A word of a command is a script if it ends with ``.py``, ``.sh``, ``.js`` or ``.jar`` and is not an option.

    Raises:
        ConfigError: files are missing; the message names each file and the option with its command.
    """
    _raise_if_any(job, list(_missing_of_gamecores(job)))


def check_files(job: JobConfig, opened: Opened) -> None:
    """Checks all files that a job names: those of gamecores, as `check_gamecores` does, keys files and sources' files.

    Args:
        job: the job.
        opened: gets the datasets of the sources, so that `check_learning` need not read them again.

    Raises:
        ConfigError: files are missing or cannot be used; the message names all of them.
    """
    problems = list(_missing_of_gamecores(job))
    for name, actor in job.actors.items():
        if actor.keys_file is not None:
            try:
                Keys.load(actor.keys_file)
            except ConfigError as error:
                problems.append(f"{name}.keys_file: {error.message}")
    for name, source in job.sources.items():
        try:
            check_sources(job.model_copy(update={"sources": {name: source}}), opened=opened)
        except ConfigError as error:
            problems.append(error.message)
    _raise_if_any(job, problems)


def _raise_if_any(job: JobConfig, problems: list[str]) -> None:
    if problems:
        raise ConfigError(f"{job.file}: {'; '.join(problems)}", errors=problems)


def _missing_of_gamecores(job: JobConfig) -> Iterator[str]:
    """One line for each missing program or script of the gamecores' commands, and for a bridge's wrong options."""
    for name, actor in job.actors.items():
        for index, gamecore in enumerate(gamecores_of(job, name)):
            option = f"{name}.gamecores.{index}.command"
            yield from (f"{option}: {problem}" for problem in missing_of(gamecore.command, job.files_folder))
            if (words := shlex.split(gamecore.command))[:3] in BRIDGES:
                given = given_by(job, actor.gamecores[index])
                try:
                    build = options_of(words).command
                    problems = missing_of(build, job.files_folder) if build else ()
                    yield from (f"{given.get('command', option)}: {problem}" for problem in problems)
                except ConfigError as error:
                    flags = _FLAG.findall(error.message.partition("; the nearest")[0])
                    own = next((given[flag] for flag in flags if flag in given), option)
                    yield f"{own}: {error.message}"


def missing_of(command: str, folder: str) -> Iterator[str]:
    """One line for each missing program or script of a command that runs in a folder."""
    name, *words = shlex.split(command) or [""]
    if program(name, folder) is None:
        exists = os.sep in name and Path(folder, name).is_file()
        word = shlex.quote(name)
        yield f"{word} is not executable: chmod +x {word}" if exists else f"there is no program {name!r}"
    scripts = [word for word in words if Path(word).suffix in _SCRIPTS and word[0] != "-" and "{" not in word]
    for script in scripts:
        if not Path(folder, script).exists():
            yield f"there is no file {script!r} in {folder or 'the current folder'}"


def check_learning(job: JobConfig, opened: Opened | None = None) -> Layout:
    """Checks that the model can be learned from the data of the job's rollouts and sources.

    Args:
        job: the job.
        opened: datasets that were opened before, as for `brayx.jobs.sources.check_sources`.

    Returns:
        The layout of the model's observations and actions.

    Raises:
        ConfigError, ModelError: something does not fit; the message names it.
    """
    from brayx.trainer.fits import layout_of

    config = job.trainers[only("trainer", job.trainers)]
    played: Mapping[str, tuple[ActionSpec, set[str]]] = {}
    if job.rollouts:
        from brayx.jobs.environments import check_rollouts

        played = check_rollouts(job)
    opened = {} if opened is None else opened
    _check_algorithm(job, played, check_sources(job, opened=opened))
    layout, memory = layout_of(config, config.model, job.models[config.model].module, job.folder, job.as_dict())
    layout = dataclasses.replace(layout, env=_env_actions(job, played))
    check_sources(job, layout, opened, memory)
    return layout


def _check_algorithm(
    job: JobConfig, played: Mapping[str, tuple[ActionSpec, set[str]]], recorded: Mapping[str, set[str]]
) -> None:
    """Refuses a trainer whose algorithm cannot learn from its buffers.

    Args:
        job: a job with one trainer.
        played: result of `brayx.jobs.environments.check_rollouts`.
        recorded: result of `brayx.jobs.sources.check_sources`.

    Raises:
        ConfigError: the algorithm cannot use the data, or a rollout normalises observations or rewards while other data
            stay raw. Names the file, the component, and what fits.
    """
    ((trainer_name, trainer),) = job.trainers.items()
    algorithm = trainer.algorithm
    _check_normalised(job, trainer)
    feeding = {name: source for name, source in job.sources.items() if source.buffer in trainer.buffers}
    gives: set[str] | None = None
    if not job.actors and all(name in recorded for name in feeding):
        gives = set().union(*(keys for _, keys in played.values()), *(recorded[name] for name in feeding))
        if feeding and algorithm.imitates == "everything":
            gives.add(DEMONSTRATION)
    try:
        for acts, _ in played.values():
            check_fits(algorithm, kind=acts.kind, gives=gives)
        check_fits(algorithm, gives=gives)
        for name in trainer.buffers:
            buffer = job.buffers[name]
            fed = any(source.buffer == name for source in feeding.values())
            imitated = algorithm.imitates == "demonstrations" and fed
            if fed and algorithm.imitates != "nothing" and job.has_contract:
                _check_not_played_into(job, name, algorithm.name)
            played_into = bool(job.actors) or any(rollout.buffer == name for rollout in job.rollouts.values())
            # Imitated steps may be read any number of times.
            sampler = None if imitated or not (played_into or buffer.sampler != "fifo") else buffer.sampler
            check_fits(algorithm, unroll_length=buffer.unroll_length, sampler=sampler)
            steps = buffer.batch_size * buffer.unroll_length * trainer.num_workers
            check_enough(
                algorithm,
                num_steps=trainer.num_steps,
                batches=trainer.num_steps / steps,
                batch_steps=steps,
                change=f"more num_steps, or a smaller batch_size or unroll_length of {name}",
            )
    except ConfigError as error:
        raise ConfigError(f"{job.file}: {trainer_name}.algorithm: {error.message}", **error.details) from error


def _check_not_played_into(job: JobConfig, buffer: str, algorithm: str) -> None:
    """Refuses a buffer that gets both what the algorithm imitates and what the policy itself plays."""
    for name, agent in job.agents.items():
        if agent.options.get("buffer", "buffer") == buffer:
            raise ConfigError(
                f"{algorithm!r} would imitate its own play, since {name} fills {buffer!r} like the source: give the "
                "source its own buffer, which trainer.buffers names, too; to imitate alone, set "
                f"{name}.options.buffer to null"
            )


def _check_normalised(job: JobConfig, trainer: TrainerConfig) -> None:
    """Refuses raw observations and rewards if a rollout normalises or clips its own."""
    read = (*trainer.buffers, *trainer.eval_buffers)
    raw = [name for name, source in job.sources.items() if source.buffer in read]
    raw += [name for name, rollout in job.rollouts.items() if not rollout.normalise_obs]
    rewarded = [
        name
        for name, source in job.sources.items()
        if source.buffer in trainer.buffers and not only_imitated(trainer.algorithm, source)
    ]
    for name, rollout in job.rollouts.items():
        changed = {"normalise_obs": raw, "normalise_reward": rewarded, "reward_clip": rewarded}
        for option, others in changed.items():
            if getattr(rollout, option) and others:
                what = "observations" if option == "normalise_obs" else "rewards"
                raise ConfigError(
                    f"{job.file}: {name}.{option}: the model would learn from {what} changed so, and from those of "
                    f"{others[0]!r} as they are: expected {option} off, or none of {', '.join(others)}",
                    key=option,
                )


def _env_actions(job: JobConfig, played: Mapping[str, tuple[ActionSpec, set[str]]]) -> ActionSpec | None:
    """Actions of the environments in which the model acts; None if there are none, or the job has no sources."""
    specs = {name: spec for name, (spec, _) in played.items()} if job.sources else {}
    first = next(iter(specs), "")
    for name, spec in specs.items():
        if not spec.is_same(specs[first]):
            raise ConfigError(
                f"{job.file}: rollout {first} acts in {specs[first]}, {name} in {spec}; "
                "expected the same in all rollouts of a job with sources",
                key=name,
            )
    return specs.get(first)


def actor_of(job: JobConfig) -> str:
    """Name of the job's one actor; empty for a job whose data come from rollouts or sources alone."""
    return "" if not (job.actors or job.needs_games) else only("actor", job.actors)
