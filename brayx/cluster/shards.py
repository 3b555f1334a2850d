"""The actors of a buffer, found by its name: starts them on different nodes, and calls all together.

Shard 0 has the buffer's name, shard ``i`` that name and ``/i``. Each restarts empty when its process dies. Knows
nothing of fragments or batches: `brayx.cluster.remote_buffer` pushes, `brayx.cluster.stream` reads.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np
import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from brayx.cluster.buffer import BufferActor
from brayx.cluster.named import ANSWER_S, call_with_retry, end_actor, find_actor, named_actor, result_or
from brayx.errors import BrayxError, ConfigError, DeadlineExceeded, ModelError, ReplayError, first_line
from brayx.replay.config import BufferConfig
from brayx.replay.packing import Layout

_START_S = 120.0
_LOCATE_S = 5.0


class Shard(NamedTuple):
    """One actor of a buffer.

    Attributes:
        actor: handle of the actor.
        node_id: hex id of its node when it was looked up; empty: unknown.
    """

    actor: Any
    node_id: str = ""


class Shards:
    """All actors of one buffer.

    Updates go to every running shard. Queries merge the answers of the shards that reply, and skip restarting ones.

    Attributes:
        name: name of the buffer.
        config: options of the buffer.
    """

    def __init__(self, name: str, config: BufferConfig, shards: Iterable[Shard]) -> None:
        self.name, self.config = name, config
        self._shards = tuple(shards)

    def __iter__(self) -> Any:
        return iter(self._shards)

    def __len__(self) -> int:
        return len(self._shards)

    def __getitem__(self, number: int) -> Shard:
        return self._shards[number]

    @classmethod
    def start(
        cls,
        name: str,
        config: BufferConfig,
        layout: Layout | None = None,
        *,
        hub: str = "",
        weights: str = "",
        learned: bool = True,
        get_if_exists: bool = False,
    ) -> Shards:
        """Starts ``config.num_workers`` actors, spread over the nodes. They take no CPU, and end with their creator.

        Args:
            name: name of the buffer.
            config: options of the buffer.
            layout: layout of fragments; what it leaves open is taken from the first valid fragment. None: everything
                is.
            hub: name of the trial's hub; empty: metrics are not sent.
            weights: name of the weight store; empty: policy versions are not checked.
            learned: batches are learned from, see `BufferActor`.
            get_if_exists: use a running buffer of that name, with its options.

        Raises:
            ReplayError: an actor did not start, or the name is taken.
        """
        here = ray.get_runtime_context().get_node_id()
        alive = {node["NodeID"] for node in ray.nodes() if node["Alive"]} - {here}  # type: ignore[no-untyped-call]
        nodes = [here, *sorted(alive)]
        shards: list[Shard] = []

        def start(number: int) -> Any:
            actor = named_actor(
                BufferActor,
                _name(name, number),
                memory=1,  # a byte: without any resource, Ray ignores the node affinity
                max_concurrency=1000,
                get_if_exists=get_if_exists,
                scheduling_strategy=NodeAffinitySchedulingStrategy(nodes[number % len(nodes)], soft=True),
            ).remote(config, layout, hub, weights, number, learned)
            shards.append(Shard(actor))
            return actor.config.remote()

        try:
            config = ray.get(start(0), timeout=_START_S)  # the first creator's options apply
            ray.get([start(number) for number in range(1, config.num_workers)], timeout=_START_S)
        except (ValueError, ray.exceptions.RayError) as error:
            if not get_if_exists:
                for shard in shards:
                    end_actor(shard.actor)
            raise ReplayError(f"buffer {name!r} did not start: {first_line(error)}", buffer=name) from error
        # Keep these handles: an actor ends with its last original handle, and a looked-up handle does not count.
        return cls(name, config, _located([shard.actor for shard in shards]))

    @classmethod
    def find(cls, name: str, *, timeout_s: float = ANSWER_S, located: bool = False) -> Shards:
        """Finds the actors of a running buffer. These handles do not keep it running; its creator's do.

        Waits for a shard that is restarting.

        Args:
            name: name of the buffer.
            timeout_s: deadline of the whole call.
            located: also get the shards' nodes (`Shard.node_id`), for a few seconds of that time.

        Raises:
            ReplayError: no buffer of that name runs, or it does not answer.
        """
        deadline = time.monotonic() + timeout_s
        first = _found(name, 0)
        try:
            config: BufferConfig = call_with_retry(first.config, timeout_s=timeout_s, what="its first shard")
        except (DeadlineExceeded, ModelError) as error:
            raise ReplayError(f"buffer {name!r} does not answer: {error.message}", buffer=name) from error
        actors = [first, *(_found(name, number) for number in range(1, config.num_workers))]
        left_s = max(0.0, deadline - time.monotonic())
        return cls(name, config, _located(actors, min(_LOCATE_S, left_s)) if located else map(Shard, actors))

    def gone(self) -> bool:
        """Whether the buffer was ended for good: an actor that restarts keeps its name."""
        return find_actor(self.name) is None

    def check(self, options: Mapping[str, Any]) -> None:
        """Raises ConfigError when the buffer runs with another value of one of these options."""
        for key, value in options.items():
            has = getattr(self.config, key)
            if has != value:
                raise ConfigError(f"buffer {self.name!r} is running with {key} {has!r}, not {value!r}", key=key)

    def end(self, *, drain: bool = False, timeout_s: float | None = None) -> None:
        """Ends the stream, see `BufferActor.end`; with ``timeout_s`` it waits until all shards have confirmed."""
        calls = [shard.actor.end.remote(drain=drain) for shard in self._shards]
        if timeout_s is not None:
            self._answers(calls, timeout_s)

    def ended(self, timeout_s: float = ANSWER_S) -> bool:
        """Whether `end` was called and has reached every shard."""
        return all(self._ask("ended", timeout_s))

    def stopped(self, timeout_s: float = ANSWER_S) -> bool:
        """Whether the stream is over in some shard, so that no reader gets another batch from it."""
        return any(self._ask("stopped", timeout_s))

    def fail(self, error: BrayxError, timeout_s: float = ANSWER_S) -> None:
        """Stores the learner's permanent error; the first one is kept."""
        self._answers([shard.actor.fail.remote(error) for shard in self._shards], timeout_s)

    def failure(self, timeout_s: float = ANSWER_S) -> BrayxError | None:
        """The learner's permanent error."""
        return next((error for error in self._ask("failure", timeout_s) if error is not None), None)

    def has_room(self, timeout_s: float = ANSWER_S) -> bool:
        """Whether some shard can store a replay without dropping."""
        return any(self._ask("has_room", timeout_s))

    def stats(self, timeout_s: float = ANSWER_S) -> dict[str, float]:
        """Sums of the shards' counters (`ReplayBuffer.stats`), and ``shards``: the number that answered."""
        answers = self._ask("stats", timeout_s)
        total: Counter[str] = Counter()
        for answer in answers:
            total.update(answer)
        return {**total, "shards": len(answers)}

    def ack(self, number: int, count: int = 1, reader: int | None = None, newest: int | None = None) -> None:
        """Returns credits to a shard, see `BufferActor.ack`; does not wait."""
        self._shards[number].actor.ack.remote(count, reader, newest)

    def expire(self, newest: int) -> None:
        """Sets the policy's version in all shards, for ``max_policy_lag``; does not wait."""
        for shard in self._shards:
            shard.actor.expire.remote(newest)

    def update_priorities(self, index: np.ndarray, priorities: np.ndarray) -> None:
        """Sets priorities ``[n]`` of columns by the ``index`` ``[n]`` of their batch; does not wait."""
        for shard in self._shards:
            shard.actor.update_priorities.remote(index, priorities)

    def kill(self) -> None:
        """Ends the actors for good; their data is lost."""
        for shard in self._shards:
            end_actor(shard.actor)

    def _ask(self, what: str, timeout_s: float) -> list[Any]:
        calls = [getattr(shard.actor, what).remote() for shard in self._shards]
        answers = self._answers(calls, timeout_s)
        if not answers:
            raise DeadlineExceeded(f"no shard of buffer {self.name!r} said {what!r} within {timeout_s:g} s")
        return answers

    def _answers(self, calls: list[Any], timeout_s: float) -> list[Any]:
        done, _ = ray.wait(calls, num_returns=len(calls), timeout=timeout_s)
        answers = []
        for call in done:
            try:
                answers.append(ray.get(call))
            except ray.exceptions.RayActorError:  # the shard is restarting
                continue
        return answers


def flush_metrics(buffers: Iterable[Shards], timeout_s: float = ANSWER_S) -> None:
    """Makes every shard of these buffers send its metrics to the hub; call it before the hub is closed.

    All shards do so concurrently, so that one that hangs does not take the others' time.
    """
    calls = [shard.actor.flush_metrics.remote(timeout_s) for shards in buffers for shard in shards]
    ray.wait(calls, num_returns=len(calls), timeout=timeout_s)


def _located(actors: list[Any], timeout_s: float = _LOCATE_S) -> list[Shard]:
    """Gets the actors' nodes; one that does not answer in time counts as far away."""
    calls = [actor.__ray_call__.remote(lambda _: ray.get_runtime_context().get_node_id()) for actor in actors]
    done, _ = ray.wait(calls, num_returns=len(calls), timeout=timeout_s)
    nodes = {call: result_or("", call) for call in done}  # empty while the shard restarts
    return [Shard(actor, nodes.get(call, "")) for actor, call in zip(actors, calls, strict=True)]


def _found(buffer: str, number: int) -> Any:
    actor = find_actor(_name(buffer, number))
    if actor is None:
        raise ReplayError(f"no buffer named {buffer!r} is running", buffer=buffer)
    return actor


def _name(buffer: str, number: int) -> str:
    return f"{buffer}/{number}" if number else buffer
