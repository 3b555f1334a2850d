"""Sources of a training job: data at rest, read into a replay buffer as fast as the learner takes it.

A source is files (`brayx.replay.files`), recordings (`brayx.recording.source`), or a user's function that returns
iterators of `brayx.Fragment` and `brayx.Columns`. The job reads it in threads. A source waits while its buffer is full,
and ends with the job. Games that share the buffer do not wait: if it is full, its oldest batch is dropped and counted,
whatever its origin.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from brayx.algorithms.build import check_recorded
from brayx.components import load
from brayx.errors import BrayxError, ConfigError
from brayx.jobs.contracts import parse_contract
from brayx.recording.source import dataset
from brayx.replay.feed import Feed, Part, Taker
from brayx.shutdown import side_by_side

if TYPE_CHECKING:
    from brayx.actions import ActionSpec
    from brayx.algorithms.config import AlgorithmConfig
    from brayx.jobs.config import JobConfig
    from brayx.jobs.kinds import SourceConfig
    from brayx.replay.files import Dataset
    from brayx.replay.packing import Layout
    from brayx.types import Fragment

logger = logging.getLogger(__name__)

Opened = dict[str, tuple["Dataset", "Fragment"]]
"""Datasets that were opened, with their first episodes, by source."""


def check_sources(
    job: JobConfig,
    layout: Layout | None = None,
    opened: Opened | None = None,
    memory: Collection[str] = (),
) -> dict[str, set[str]]:
    """Checks that files fit the model and the algorithm, by their headers and the first episode of each source.

    Sources that are functions are not checked, because their iterators may be readable only once.

    Args:
        job: the job.
        layout: the observations of the learning model; None: not known yet.
        opened: datasets that were opened before, with their first episodes, to read each only once; new ones are added.
        memory: recurrent state that the data must have, ``state/...``.

    Returns:
        The data's fields of each step, by source.

    Raises:
        ConfigError: the data do not fit, or the source's buffer drops old data, which would drop all of it. Names the
            source, its fields and what would fit.
    """
    fields_of = {}
    opened = {} if opened is None else opened
    for name, source in job.sources.items():
        lag = job.buffers[source.buffer].max_policy_lag
        if lag is not None:
            raise ConfigError(
                f"source {name!r} fills {source.buffer!r}, whose max_policy_lag is {lag}: a source's data has "
                "policy version 0 and would be dropped; leave it out, or give the source its own buffer",
                source=name,
            )
        if source.path is not None:
            try:
                if name not in opened:
                    dataset = _dataset(source, job)
                    if dataset.needs_contract and job.needs_contract:  # the first game says it
                        continue
                    opened[name] = dataset, dataset.first()
                dataset, first = opened[name]
                if layout is not None:
                    dataset = dataset.for_env(layout.env)
                    first = dataset.finished(first)
                fields = fields_of[name] = dataset.check(layout, first)
                for trainer in job.trainers.values():
                    if source.buffer in trainer.buffers:
                        check_recorded(trainer.algorithm, fields)
                        _check_memory(memory, fields)
                        if "reward" not in fields and not only_imitated(trainer.algorithm, source):
                            raise ConfigError(
                                f"has no reward, which {trainer.algorithm.name!r} learns from: the option `fields` "
                                "names it, as in {reward: input/KEY}"
                            )
            except ConfigError as error:
                raise ConfigError(f"source {name!r}: {error.message}", source=name) from error
    return fields_of


def only_imitated(algorithm: AlgorithmConfig, source: SourceConfig) -> bool:
    """Whether the source's rewards are not learned from; a source's own function may mark steps as demonstrations."""
    marked = source.demonstration or source.path is None
    imitated = algorithm.imitates == "everything" or (algorithm.imitates == "demonstrations" and marked)
    return imitated and not algorithm.learns_demonstrated_rewards


def _check_memory(memory: Collection[str], fields: Collection[str]) -> None:
    missing = sorted(set(memory) - set(fields))
    if missing:
        raise ConfigError(
            f"has no {', '.join(missing)}, the model's memory before each step, which a playing agent records. "
            "Recordings without it can be cloned with train_local(demonstrations=...)"
        )


class Sources:
    """Feeds a job's sources into their buffers; a context manager.

    Args:
        job: the job.
        buffers: buffers by component name.
        env: actions of the environments in which the model acts; None: there are none.

    Raises:
        ConfigError: a source's function or files are missing.
    """

    def __init__(self, job: JobConfig, buffers: Mapping[str, Taker], env: ActionSpec | None = None) -> None:
        self._feeds = {
            name: Feed(buffers[source.buffer], _parts(name, source, job, env), epochs=source.epochs, name=name)
            for name, source in job.sources.items()
        }
        held_out = {name for trainer in job.trainers.values() for name in trainer.eval_buffers}
        self._learned = [feed for name, feed in self._feeds.items() if job.sources[name].buffer not in held_out]
        self._reported: set[str] = set()

    def __enter__(self) -> Sources:
        for feed in self._feeds.values():
            feed.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self, timeout_s: float = 2.0) -> None:
        """Ends all feeds, see `Feed.stop`."""
        side_by_side([feed.stop for feed in self._feeds.values()], timeout_s)

    @property
    def fed(self) -> dict[str, int]:
        """Number of fragments that the buffers have stored, by source."""
        return {name: feed.fed for name, feed in self._feeds.items()}

    @property
    def errors(self) -> list[BrayxError]:
        """Errors of the sources."""
        failed = {name: feed.error for name, feed in self._feeds.items() if feed.error is not None}
        for name in failed.keys() - self._reported:
            logger.error("source %s stopped: %s", name, failed[name])
            self._reported.add(name)
        return list(failed.values())

    @property
    def done(self) -> bool:
        """Whether the job has sources for training, and all were read to their end.

        Sources of held-out data do not count: once their buffer is full, they advance only while the learner evaluates.
        """
        return bool(self._learned) and all(feed.done for feed in self._learned)

    def join(self, timeout_s: float) -> bool:
        """Waits until all sources are read to their end; False after ``timeout_s``."""
        side_by_side([feed.join for feed in self._feeds.values()], timeout_s)
        return all(feed.done for feed in self._feeds.values())


def _parts(name: str, source: SourceConfig, job: JobConfig, env: ActionSpec | None) -> list[Part]:
    if source.module is None:
        return list(_dataset(source, job).for_env(env).parts(source.num_workers))
    function: Callable[..., Any] = load(source.module, source.func, job.folder)
    config = job.as_dict()
    try:
        given = function(name, config)
    except Exception as error:
        raise ConfigError(f"source {name!r} raised {type(error).__name__}: {error}") from error
    if isinstance(given, list) and all(isinstance(part, Iterable) for part in given):
        return [_again(lambda: function(name, config), given, number, env) for number in range(len(given))]
    return [_again(lambda: [function(name, config)], [given], 0, env)]


def _again(build: Callable[[], Any], first: list[Any], number: int, env: ActionSpec | None) -> Part:
    """Returns the part that is already built, and builds new ones for further calls."""
    from brayx.replay.files import Dataset

    def part() -> Any:
        taken, first[number] = first[number], None
        taken = build()[number] if taken is None else taken
        return taken.for_env(env) if isinstance(taken, Dataset) else taken

    return part


def _dataset(source: SourceConfig, job: JobConfig) -> Dataset:
    assert source.path is not None
    path = source.path if "://" in source.path else Path(job.files_folder, source.path)
    contract = None if job.contract is None else parse_contract(job.contract)
    return dataset(path, source.format, source.fields, source.demonstration, source.only, source.actions, contract)
