"""One rollout worker: a Ray actor that steps environments beside an engine and pushes what comes of it.

It collects on leases (`RolloutWorker.collect`), so that whoever owns it knows how it does. Weights come in from the
weight store in a thread of its own and are swapped between two fragments. How close to them it stays is the mode:
``blocking`` collects what one update takes and waits for the weights that come of it; ``non_blocking`` goes on, and
waits only while the buffer has no room. What the buffer does not take at once it holds until there is room for that,
so that nothing is lost for coming at the same time as another worker's, or all at once. Knows nothing of other workers.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from brayx.cluster.hub import HubClient, get_hub
from brayx.cluster.remote_buffer import RemoteBuffer
from brayx.cluster.statistics import Exchange, get_moments
from brayx.cluster.weights import WeightSubscriber, get_weight_store
from brayx.components import load, load_module
from brayx.errors import BadFragment, BrayxError, ConfigError, EnvironmentFailed, ReplayError, first_line
from brayx.model.build import build_model
from brayx.model.config import ModelConfig
from brayx.replay.config import BufferConfig
from brayx.rollout.collector import Collector, record_episodes
from brayx.rollout.component import RolloutComponent
from brayx.rollout.envs import EnvSource, make_envs
from brayx.rollout.policy import Policy
from brayx.types import Columns, Fragment, Weights

log = logging.getLogger(__name__)

_LOOK_S = 0.02
_ANSWER_S = 30.0
_PUSHES = 2
"""Fragments that may wait for a push that is on its way, once one may drop."""
_OFFER_S = 0.5
"""Longest wait for room before a worker looks whether it is to stop."""


@dataclass(frozen=True)
class RolloutSpec:
    """Everything that a worker needs to know; picklable, names and numbers only.

    Attributes:
        name: of the component.
        config: its options.
        model_name, model: the model component that acts.
        buffer_config: options of the buffer, whose ``unroll_length`` is the length of a fragment.
        folder: where modules are looked up first.
        job: the whole job as plain dicts, for the user's functions.
        namespace: Ray namespace of the actors below.
        buffer, weight_store, hub, moments: their names; no hub: nobody counts; no moments: each worker normalises by
            what it has seen itself.
        gamma: discount of what is learned, by which rewards are normalised.
        seed: of the environments and of what is drawn; each worker's is its own.
        update_columns: columns that lead to new weights: what an update of all ranks takes, times the updates between
            two publishes. With ``blocking`` no more are collected with one version.
    """

    name: str
    config: RolloutComponent
    model_name: str
    model: ModelConfig
    buffer_config: BufferConfig
    folder: str
    job: Mapping[str, Any]
    namespace: str
    buffer: str
    weight_store: str
    hub: str = ""
    moments: str = ""
    gamma: float = 0.99
    seed: int = 0
    update_columns: int = 0

    @property
    def env_name(self) -> str:
        """What it plays, for people."""
        return self.config.env or f"{self.config.module}.{self.config.func}"

    @property
    def fragment_steps(self) -> int:
        """Transitions of one fragment of a worker at most."""
        return self.config.num_envs * self.buffer_config.unroll_length


@dataclass(frozen=True)
class Progress:
    """What a worker has done.

    Attributes:
        fragments: collected and pushed, of all its environments each.
        steps: transitions in them.
        overdue: waits that were given up, see ``wait_s``.
        waited_s: spent waiting for weights or room.
        version: of the weights that it acted with last; a sum of progress has the highest.
    """

    fragments: int = 0
    steps: int = 0
    overdue: int = 0
    waited_s: float = 0.0
    version: int = 0

    def __add__(self, other: Progress) -> Progress:
        return Progress(
            self.fragments + other.fragments,
            self.steps + other.steps,
            self.overdue + other.overdue,
            self.waited_s + other.waited_s,
            max(self.version, other.version),
        )


class Newest:
    """The newest weights of a store, followed in a thread.

    Args:
        store: handle of the weight store.
    """

    def __init__(self, store: Any) -> None:
        self._held: tuple[int, Weights] | None = None
        self._came = threading.Condition()
        self._loop = asyncio.new_event_loop()
        self._subscriber = WeightSubscriber(store, self._take)
        self._thread = threading.Thread(target=self._run, name="brayx-rollout-weights", daemon=True)
        self._thread.start()

    def get(self, than: int, timeout_s: float = 0.0) -> tuple[int, Weights] | None:
        """Version and weights of the newest, once above ``than``; None if that takes longer."""
        with self._came:
            self._came.wait_for(lambda: self._held is not None and self._held[0] > than, timeout_s)
            return self._held if self._held is not None and self._held[0] > than else None

    def close(self) -> None:
        """Follows no longer."""
        asyncio.run_coroutine_threadsafe(self._subscriber.stop(), self._loop).add_done_callback(
            lambda _: self._loop.call_soon_threadsafe(self._loop.stop)
        )
        self._thread.join(5.0)

    def _take(self, version: int, weights: Weights) -> None:
        with self._came:
            self._held = (version, weights)
            self._came.notify_all()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        starting = self._loop.create_task(self._subscriber.start())  # kept, or it might be collected
        self._loop.run_forever()
        del starting


def make_collector(
    spec: RolloutSpec, *, num_envs: int | None = None, unroll_length: int | None = None, index: int = 0, past: int = 0
) -> Collector:
    """The environments of one worker and the policy that plays them, with the weights that the model was built with.

    Args:
        spec: of the rollout.
        num_envs, unroll_length: instead of the component's and the buffer's.
        index: of the worker.
        past: how many workers had this index before: their environments' seeds are not played again.

    Raises:
        ConfigError: there is no such environment, it cannot be made, or the model does not fit it.
        ModelError: the model cannot act.
    """
    config = spec.config
    module, example = build_model(spec.folder, spec.model.module, spec.model_name, dict(spec.job))
    if spec.model.engine not in ("onnx", "torch"):
        raise ConfigError(f"a rollout acts with engine onnx or torch, not {spec.model.engine!r}", key="engine")
    policy = Policy(module, example, engine=spec.model.engine, threads=spec.model.threads)
    envs = make_envs(
        env_source(spec.name, config, spec.job, spec.folder),
        config.num_envs if num_envs is None else num_envs,
        vectorization=config.vectorization,
        options=config.env_options,
    )
    return Collector(
        envs,
        policy,
        spec.buffer_config.unroll_length if unroll_length is None else unroll_length,
        # One number of three: neighbours' environments must not be the same ones, one later.
        seed=int(np.random.SeedSequence([spec.seed, index, past]).generate_state(1)[0] >> 1),
        scale_actions=config.scale_actions,
        normalise_obs=config.normalise_obs,
        normalise_reward=config.normalise_reward,
        gamma=spec.gamma,
        reward_clip=config.reward_clip,
        sde_steps=config.sde_steps,
    )


def rounds(spec: RolloutSpec, workers: int) -> int:
    """Fragments that each of ``workers`` blocking workers collects with one version of the weights.

    Raises:
        ConfigError: these do not make up updates, or not in each shard, or the buffer samples: all would wait for
            weights that never come.
    """
    buffer = spec.buffer_config
    if buffer.sampler != "fifo":
        raise ConfigError(
            f"mode is blocking, and the buffer's sampler is {buffer.sampler!r}: when it gives the next batch is up to "
            "min_columns and samples_per_insert, and until then all would wait for new weights: that needs mode "
            "non_blocking, or sampler fifo",
            key="mode",
        )
    if buffer.num_workers > 1 and spec.config.num_envs != buffer.batch_size:
        raise ConfigError(
            f"mode is blocking, and the {buffer.num_workers} shards of the buffer each wait for whole batches, which "
            f"workers of {spec.config.num_envs} environments would leave unfinished in several: that needs one shard, "
            f"or num_envs {buffer.batch_size}, a batch",
            key="mode",
        )
    of_all = workers * spec.config.num_envs
    if spec.update_columns % of_all:
        raise ConfigError(
            f"mode is blocking, where {workers} workers x {spec.config.num_envs} environments give {of_all} columns "
            f"with each version of the weights, but new weights come of {spec.update_columns} (batch_size x ranks x "
            f"weights_publish_interval): that must be a multiple, such as batch_size {of_all}",
            key="mode",
        )
    return spec.update_columns // of_all


def counts_that_fit(spec: RolloutSpec) -> list[int]:
    """How many blocking workers there may be, see `rounds`."""
    each = spec.config.num_envs
    return [count for count in range(1, spec.update_columns // each + 1) if spec.update_columns % (count * each) == 0]


def check_rollout(spec: RolloutSpec) -> tuple[str, dict[str, np.ndarray]]:
    """Makes one environment, acts in it once and closes it, so that what cannot work is told before anything starts.

    Returns:
        The kind of its actions, as `ActionSpec` names it, and a batch of it: columns of one transition.

    Raises:
        ConfigError, ModelError: as `make_collector`; names the environment.
        EnvironmentFailed: it raised.
    """
    with naming(f"rollout {spec.name!r} ({spec.env_name})"):
        if spec.config.mode == "blocking":
            rounds(spec, spec.config.num_workers)
        collector = make_collector(spec, num_envs=_made_at_once(spec), unroll_length=1)
        try:
            return collector.action_spec.kind, dict(collector.collect().arrays)
        finally:
            collector.close()


@contextlib.contextmanager
def naming(who: str) -> Iterator[None]:
    """Adds to an error who it happened to; what an environment raised becomes `EnvironmentFailed`."""
    try:
        yield
    except BrayxError as error:
        raise type(error)(f"{who}: {error.message}", **error.details) from error
    except Exception as error:
        raise EnvironmentFailed(f"{who} raised {type(error).__name__}: {first_line(error)}") from error


def env_source(name: str, config: RolloutComponent, job: Mapping[str, Any], folder: str = "") -> EnvSource:
    """What makes the environments of a rollout component, for `make_envs`.

    Args:
        name: of the component.
        config: its options.
        job: the whole job as plain dicts.
        folder: where its module is looked up first.

    Raises:
        ConfigError: the module or function is not there.
    """
    if config.func is None:
        assert config.env is not None
        if config.module is not None:
            load_module(config.module, folder)
        return config.env
    assert config.module is not None
    make: Callable[..., Any] = load(config.module, config.func, folder)
    return lambda: make(name, dict(job))


def _made_at_once(spec: RolloutSpec) -> int:
    """A user's function may make all environments at once; one of a Gymnasium id is enough to look at."""
    return 1 if spec.config.func is None else spec.config.num_envs


class RolloutWorker:
    """The Ray actor. One call of `collect` or `leave` at a time; `stop` and `pid` may come meanwhile.

    Args:
        spec: what to do.
        index: of the worker among those of its rollout.
        past: how many workers had this index before.
    """

    def __init__(self, spec: RolloutSpec, index: int, past: int) -> None:
        self._spec = spec
        self._index = index
        self._past = past
        self._stopping = threading.Event()
        self._playing: _Playing | None = None

    def pid(self) -> int:
        """Of this process."""
        return os.getpid()

    def stop(self) -> None:
        """Ends the lease that runs after the fragment it is at, and those that follow at once."""
        self._stopping.set()

    def leave(self) -> None:
        """Hands over what is left, and collects no more; comes after the lease that runs."""
        self._stopping.set()
        if self._playing is not None:
            self._playing.close()
            self._playing = None

    def collect(self, lease_s: float, workers: int) -> Progress:
        """Collects for about ``lease_s``, and says how much.

        Args:
            lease_s: how long; a fragment that was begun is finished.
            workers: how many there are now: blocking ones share out what an update takes.

        Raises:
            BrayxError: an environment failed or could not be made, or an actor of the job is gone; names the worker.
        """
        until = time.monotonic() + lease_s
        with naming(f"worker {self._index} of rollout {self._spec.name!r} ({self._spec.env_name})"):
            done = Progress()
            if self._stopping.is_set():
                return done
            if self._playing is None:
                self._playing = _Playing(self._spec, self._index, self._past, self._stopping)
            while not self._stopping.is_set() and time.monotonic() < until:
                done = done + self._playing.turn(until, workers)
            return done


class _Playing:
    """The parts of a worker at work."""

    def __init__(self, spec: RolloutSpec, index: int, past: int, stopping: threading.Event) -> None:
        self._spec = spec
        self._stopping = stopping
        self._newest = Newest(get_weight_store(spec.weight_store, spec.namespace))
        self._books = HubClient(get_hub(spec.hub, spec.namespace) if spec.hub else None)
        self._buffer = RemoteBuffer.attach(
            spec.buffer,
            namespace=spec.namespace,
            max_pending=_PUSHES,
            on_dropped=lambda reason, steps: self._books.add("fragments_dropped", steps, label=reason),
        )
        self._collector = make_collector(spec, index=index, past=past)
        self._moments = Exchange(get_moments(spec.moments, spec.namespace), self._collector) if spec.moments else None
        self._version = 0
        self._made = 0  # fragments with this version, but for those that were refused
        self._left: list[Fragment | Columns] = []  # collected, and waits for room
        self._waiting_since = time.monotonic()

    def turn(self, until: float, workers: int) -> Progress:
        """One fragment, or a wait that ends at ``until`` at the latest; arguments as `RolloutWorker.collect`."""
        began = time.monotonic()
        config = self._spec.config
        overdue = began - self._waiting_since > config.wait_s
        if self._left:
            return self._hand_over(began, until, overdue)
        enough = config.mode == "blocking" and self._made >= rounds(self._spec, workers)
        newer = self._newest.get(self._version)
        if newer is None and (self._version == 0 or (enough and not overdue)):
            newer = self._newest.get(self._version, max(0.0, min(until - began, _LOOK_S)))
            if newer is None:
                return Progress(waited_s=time.monotonic() - began)
        if newer is not None:
            if self._version == 0 and self._moments is not None:
                self._moments.catch_up()  # a learner brings its checkpoint's back before it publishes anything
            self._version = newer[0]
            self._collector.load(newer[1], self._version)
            self._made = 0
        elif enough:
            self._made = 0
        if config.mode == "non_blocking" and not overdue and not self._buffer.has_room(_ANSWER_S):
            self._stopping.wait(min(_LOOK_S, max(0.0, until - time.monotonic())))
            return Progress(waited_s=time.monotonic() - began)
        waited_s = time.monotonic() - self._waiting_since
        columns = self._collector.collect()
        self._made += 1
        self._waiting_since = time.monotonic()
        self._push(columns, overdue, waited_s, until)
        return Progress(1, len(columns), int(overdue), 0.0, self._version)

    def close(self) -> None:
        """Hands over what is left; what has no room now is counted as dropped."""
        self._newest.close()
        self._offer(0.0)
        if self._left:
            self._books.add("fragments_dropped", sum(map(len, self._left)), label="closed")
        self._buffer.close(1.0)
        if self._moments is not None:
            self._moments.turn()
        self._books.close(1.0)
        self._collector.close()

    def _hand_over(self, began: float, until: float, overdue: bool) -> Progress:
        """A turn that waits for room for what was collected; with ``overdue`` it is made by dropping."""
        if overdue:
            self._buffer.push(*self._left)
            self._left, self._waiting_since = [], began
            self._books.add("rollout_waits_overdue", 1)
        else:
            self._offer(max(0.0, min(_OFFER_S, until - began)))
        return Progress(overdue=int(overdue), waited_s=time.monotonic() - began, version=self._version)

    def _offer(self, timeout_s: float) -> None:
        """Hands over what waits as far as there is room, which it waits for ``timeout_s`` at most."""
        left, self._left = self._left, []
        if not left:
            return
        try:
            self._left = self._buffer.offer(*left, timeout_s=timeout_s)
        except BadFragment:  # the buffer counts the transitions and keeps the message
            self._made -= 1  # another one makes up for it: without, the update that all wait for would not be full
        except ReplayError as error:  # counted, too; a worker outlives a buffer that is lost, and its job says so
            log.warning("%s", error.message)

    def _push(self, columns: Columns, overdue: bool, waited_s: float, until: float) -> None:
        if overdue:  # nobody makes room: whoever comes to learn again is to find the newest
            self._buffer.push(columns)
        else:
            self._left = [columns]
            self._offer(max(0.0, min(_OFFER_S, until - time.monotonic())))
        if self._moments is not None:
            self._moments.turn()
        record_episodes(self._books, self._collector.episodes())
        self._books.add("rollout_wait_seconds", waited_s)
        self._books.add("acting_version", self._version, label=self._spec.model_name)
        if overdue:
            self._books.add("rollout_waits_overdue", 1)
