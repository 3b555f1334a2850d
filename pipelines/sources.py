"""Sources of a training job: data at rest that is read into a replay buffer as fast as the learner takes it.

A source is a user's function that gives an iterator of `brayx.Fragment`. Each runs in a thread of the job; it waits
while its buffer is full, and ends with the job. Games that share the buffer do not wait: then its oldest batch is
dropped, from wherever that came, and counted. Knows nothing of what it reads.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from brayx.components import load
from brayx.errors import BrayxError, ConfigError, ReplayError
from brayx.types import Fragment

if TYPE_CHECKING:
    from deployments.job import JobConfig, SourceConfig

logger = logging.getLogger(__name__)

_CALL_TIMEOUT_S = 10.0
_LOOK_AGAIN_S = 0.05


class Sources:
    """Feeds a job's sources into their buffers, as a context.

    Args:
        job: whose sources.
        buffers: Ray actor of each buffer by component name.
        sizes: batches that each buffer keeps.

    Raises:
        ConfigError: a source's function is missing, or gives something that cannot be iterated.
    """

    def __init__(self, job: JobConfig, buffers: Mapping[str, Any], sizes: Mapping[str, int]) -> None:
        self._stopping = threading.Event()
        self.errors: list[BrayxError] = []
        self.fed: dict[str, int] = dict.fromkeys(job.sources, 0)
        self._threads = [
            threading.Thread(
                target=self._run,
                args=(name, _open(name, source, job), source, buffers[source.buffer], sizes[source.buffer]),
                name=f"brayx-source-{name}",
                daemon=True,
            )
            for name, source in job.sources.items()
        ]

    def __enter__(self) -> Sources:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        for thread in self._threads:
            thread.join(timeout=2.0)

    @property
    def done(self) -> bool:
        """There are sources, and all were read to their end."""
        return bool(self._threads) and not any(thread.is_alive() for thread in self._threads)

    def join(self, timeout_s: float) -> bool:
        """Waits until all sources are read to their end; False if that takes longer."""
        for thread in self._threads:
            thread.join(timeout=timeout_s)
        return not any(thread.is_alive() for thread in self._threads)

    def _run(self, name: str, reader: _Reader, source: SourceConfig, buffer: Any, size: int) -> None:
        import ray

        try:
            for _ in range(source.epochs):
                for fragment in reader():
                    if not isinstance(fragment, Fragment):
                        raise ConfigError(f"source {name!r} gave a {type(fragment).__name__}, expected brayx.Fragment")
                    while not self._has_room(buffer, size):
                        if self._stopping.wait(_LOOK_AGAIN_S):
                            return
                    refused = ray.get(buffer.push.remote([fragment]), timeout=_CALL_TIMEOUT_S)
                    self.fed[name] += 1 - refused
                    if self._stopping.is_set():
                        return
        except BrayxError as error:
            self._failed(name, error)
        except ray.exceptions.RayError as error:
            said = (str(error).strip().splitlines() or [""])[0]
            lost = f"source {name!r} lost the buffer {source.buffer!r}: {type(error).__name__}: {said}"
            self._failed(name, ReplayError(lost, source=name, buffer=source.buffer))
        except Exception as error:
            self._failed(name, ConfigError(f"source {name!r} raised {type(error).__name__}: {error}"))

    def _has_room(self, buffer: Any, size: int) -> bool:
        import ray

        return bool(ray.get(buffer.stats.remote(), timeout=_CALL_TIMEOUT_S)["batches"] < size)

    def _failed(self, name: str, error: BrayxError) -> None:
        if not self._stopping.is_set():
            logger.error("source %s stopped: %s", name, error)
            self.errors.append(error)


class _Reader:
    """Calls the user's function anew for each epoch."""

    def __init__(self, name: str, function: Any, config: Mapping[str, Any]) -> None:
        self._name, self._function, self._config = name, function, config

    def __call__(self) -> Iterable[Any]:
        data = self._function(self._name, self._config)
        if not isinstance(data, Iterable):
            raise ConfigError(f"source {self._name!r}: its function gave a {type(data).__name__}, expected an iterator")
        return data


def _open(name: str, source: SourceConfig, job: JobConfig) -> _Reader:
    return _Reader(name, load(source.module, source.func, job.folder), job.as_dict())
