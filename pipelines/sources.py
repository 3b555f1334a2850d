"""Sources of a training job: data at rest that is read into a replay buffer as fast as the learner takes it.

A source is files (`brayx.replay.files`) or a user's function that gives iterators of `brayx.Fragment` and
`brayx.Columns`. Each is read in threads of the job, waits while its buffer is full, and ends with the job. Games that
share the buffer do not wait: then its oldest batch is dropped, from wherever that came, and counted.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from brayx.algorithms.build import check_recorded
from brayx.components import load
from brayx.errors import BrayxError, ConfigError
from brayx.replay.feed import Feed, Part, Taker
from brayx.replay.files import Dataset
from pipelines.ending import side_by_side

if TYPE_CHECKING:
    from brayx.replay.packing import Layout
    from brayx.types import Fragment
    from deployments.job import JobConfig, SourceConfig

logger = logging.getLogger(__name__)


def check_sources(
    job: JobConfig,
    layout: Layout | None = None,
    opened: dict[str, tuple[Dataset, Fragment]] | None = None,
    memory: Collection[str] = (),
) -> dict[str, set[str]]:
    """Looks at the first episode of each source that is files, and at the header of each file, before anything is read:
    whether it is what the model observes, and has what the algorithm learns from. Of a function nothing is looked at:
    its iterator may be one that can be read only once.

    Args:
        job: whose sources.
        layout: what the model that learns observes; None: not known yet.
        opened: datasets that were looked at already, with their first episodes, which are not read again; gets the
            others.
        memory: what the data must have of the memory of the model that learns, ``state/...``.

    Returns:
        The data's fields of each step, by source.

    Raises:
        ConfigError: names the source, what its data has and what would fit; or its buffer drops what is old, which all
            of it would be.
    """
    found = {}
    opened = {} if opened is None else opened
    for name, source in job.sources.items():
        lag = job.buffers[source.buffer].max_policy_lag
        if lag is not None:
            raise ConfigError(
                f"source {name!r} fills {source.buffer!r}, whose max_policy_lag is {lag}: what a source gives has "
                "policy version 0, and would be dropped; leave it out, or give the source a buffer of its own",
                source=name,
            )
        if source.path is not None:
            try:
                if name not in opened:
                    dataset = _dataset(source, job)
                    opened[name] = dataset, dataset.first()
                dataset, first = opened[name]
                fields = found[name] = dataset.check(layout, first)
                for trainer in job.trainers.values():
                    if source.buffer in trainer.buffers:
                        check_recorded(trainer.algorithm, fields)
                        _check_memory(memory, fields)
            except ConfigError as error:
                raise ConfigError(f"source {name!r}: {error.message}", source=name) from error
    return found


def _check_memory(memory: Collection[str], fields: Collection[str]) -> None:
    missing = sorted(set(memory) - set(fields))
    if missing:
        raise ConfigError(
            f"has no {', '.join(missing)}, what the model's memory held before each step, as the agent that plays "
            "records it. Recordings without are cloned by train_local(demonstrations=...)"
        )


class Sources:
    """Feeds a job's sources into their buffers, as a context.

    Args:
        job: whose sources.
        buffers: each by its component name.

    Raises:
        ConfigError: a source's function or files are missing.
    """

    def __init__(self, job: JobConfig, buffers: Mapping[str, Taker]) -> None:
        self._feeds = {
            name: Feed(buffers[source.buffer], _parts(name, source, job), epochs=source.epochs, name=name)
            for name, source in job.sources.items()
        }
        held_out = {name for trainer in job.trainers.values() for name in trainer.eval_buffers}
        self._learned = [feed for name, feed in self._feeds.items() if job.sources[name].buffer not in held_out]
        self._told: set[str] = set()

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
        """Fragments that the buffers took, by source."""
        return {name: feed.fed for name, feed in self._feeds.items()}

    @property
    def errors(self) -> list[BrayxError]:
        """The error of a source."""
        failed = {name: feed.error for name, feed in self._feeds.items() if feed.error is not None}
        for name in failed.keys() - self._told:
            logger.error("source %s stopped: %s", name, failed[name])
            self._told.add(name)
        return list(failed.values())

    @property
    def done(self) -> bool:
        """Whether there are sources for training, and all were read to their end.

        Those of held-out data do not count: once their buffer is full they go on only as fast as it is evaluated, which
        needs a learner that still learns.
        """
        return bool(self._learned) and all(feed.done for feed in self._learned)

    def join(self, timeout_s: float) -> bool:
        """Waits until all sources are read to their end; False if one takes longer."""
        side_by_side([feed.join for feed in self._feeds.values()], timeout_s)
        return all(feed.done for feed in self._feeds.values())


def _parts(name: str, source: SourceConfig, job: JobConfig) -> list[Part]:
    if source.module is None:
        return list(_dataset(source, job).parts(source.num_workers))
    function: Callable[..., Any] = load(source.module, source.func, job.folder)
    config = job.as_dict()
    try:
        given = function(name, config)
    except Exception as error:
        raise ConfigError(f"source {name!r} raised {type(error).__name__}: {error}") from error
    if isinstance(given, list) and all(isinstance(part, Iterable) for part in given):
        return [_again(lambda: function(name, config), given, number) for number in range(len(given))]
    return [_again(lambda: [function(name, config)], [given], 0)]


def _again(build: Callable[[], Any], first: list[Any], number: int) -> Part:
    """Gives the part that is built already, and later those of further calls."""

    def part() -> Any:
        if first[number] is not None:
            taken, first[number] = first[number], None
            return taken
        return build()[number]

    return part


def _dataset(source: SourceConfig, job: JobConfig) -> Dataset:
    assert source.path is not None
    return Dataset(Path(job.folder, source.path), source.format, source.fields, source.demonstration)
