"""Buffers and weights over two raylets of this machine, with one killed: prints the observations as JSON.

test_nodes.py runs it in a separate process, since the tests' process already has a Ray.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import threading
import time
from collections import Counter
from typing import Any

import numpy as np
import ray
from ray.cluster_utils import Cluster
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from brayx.cluster import NAMESPACE
from brayx.cluster.hub import create_hub
from brayx.cluster.remote_buffer import RemoteBuffer
from brayx.cluster.stream import read_buffer
from brayx.cluster.weight_store import create_weight_store
from brayx.cluster.weights import WeightPublisher, WeightSubscriber
from brayx.types import Columns
from tests.unit.replay.made import columns
from tests.waiting import until

WAIT_S = 60.0
OPTIONS = {"size": 3, "batch_size": 2, "unroll_length": 4, "num_workers": 2}
STORE_BYTES = 100 * 1024 * 1024


@ray.remote(num_cpus=0)
class Pusher:
    """Pushes from another node than the driver's."""

    def __init__(self, name: str) -> None:
        self._buffer = RemoteBuffer.attach(name)

    def push(self, made: Columns, *, drop: bool) -> None:
        self._buffer.push(made, drop=drop)
        assert self._buffer.flush(WAIT_S)


@ray.remote(num_cpus=0)
class Follower:
    """Follows a weight store from its node."""

    async def follow(self, store: Any) -> None:
        self._seen: list[tuple[int, float]] = []
        self._subscriber = WeightSubscriber(store, self._take, quiet_s=1.0)
        await self._subscriber.start()

    def _take(self, version: int, weights: dict[str, np.ndarray]) -> None:
        self._seen.append((version, float(weights["w"][-1])))

    async def seen(self) -> tuple[list[tuple[int, float]], bool]:
        """The received versions and weights, and whether a relay sent them."""
        return self._seen, self._subscriber.relayed


class Reader:
    """Reads a buffer in a thread, and keeps the number that each batch was made with."""

    def __init__(self, name: str) -> None:
        self._stream = read_buffer(name)
        self.got: list[int] = []
        self.error = ""
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        try:
            for batch in self._stream:
                self.got.append(int(batch["reward"][0, 0]))
                self._stream.took()
        except Exception as error:
            self.error = repr(error)


def large(number: int) -> Columns:
    """Columns of a batch so large that Ray keeps it on the node where it was made."""
    made = dict(columns(2, number).arrays)
    made["obs"] = np.full((2, 5, 100_000), number, np.float32)
    return Columns(made)


def held(buffer: RemoteBuffer) -> list[int]:
    """Transitions that each shard has taken."""
    return [int(ray.get(shard.actor.stats.remote(), timeout=WAIT_S)["pushed"]) for shard in buffer.shards]


def node_of(shard: Any) -> str:
    """Where a shard is now; empty while it is nowhere."""
    with contextlib.suppress(ray.exceptions.RayActorError):
        asked = shard.actor.__ray_call__.remote(lambda _: ray.get_runtime_context().get_node_id())
        return str(ray.get(asked, timeout=WAIT_S))
    return ""


def relays(store: Any) -> list[Any]:
    """The relays that a store has on other nodes."""
    return list(ray.get(store.__ray_call__.remote(lambda self: list(self._relays.values())), timeout=WAIT_S))


def runs(pid: int) -> bool:
    """Whether the process exists."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def follow(nodes: list[str]) -> dict[str, Any]:
    """Weights on their way to two nodes, of which the store is on one; the other's relay is killed between two."""
    store = create_weight_store("weights")
    places = [NodeAffinitySchedulingStrategy(node, soft=False) for node in nodes for _ in range(2)]
    everybody = [Follower.options(scheduling_strategy=place).remote() for place in places]
    ray.get([follower.follow.remote(store) for follower in everybody], timeout=WAIT_S)

    def all_relayed() -> bool:
        return all(relayed for _, relayed in ray.get([follower.seen.remote() for follower in everybody]))

    def all_have(version: int) -> bool:
        seen = ray.get([follower.seen.remote() for follower in everybody])
        return all(came and came[-1] == (version, float(version)) for came, _ in seen)

    until(all_relayed, "a relay for each node", WAIT_S)
    publisher = WeightPublisher(store)
    for version in (1, 2, 3):
        publisher.publish({"w": np.full(300_000, version, np.float32)}, version)
        until(lambda version=version: all_have(version), "the weights everywhere", WAIT_S)
    [relay] = relays(store)
    pid = ray.get(relay.pid.remote(), timeout=WAIT_S)
    os.kill(pid, signal.SIGKILL)
    publisher.publish({"w": np.full(300_000, 4, np.float32)}, 4)
    until(lambda: all_have(4), "the weights in spite of the kill", WAIT_S)
    until(all_relayed, "another relay", WAIT_S)
    publisher.publish({"w": np.full(300_000, 5, np.float32)}, 5)
    until(lambda: all_have(5), "the weights by another relay", WAIT_S)
    [another] = relays(store)
    other = ray.get(another.pid.remote(), timeout=WAIT_S)
    os.kill(other, signal.SIGSTOP)
    publisher.publish({"w": np.full(300_000, 6, np.float32)}, 6)
    until(lambda: all_have(6), "the weights in spite of a relay that says nothing", WAIT_S)
    came = [[version for version, _ in came] for came, _ in ray.get([follower.seen.remote() for follower in everybody])]
    os.kill(other, signal.SIGCONT)
    ray.kill(store)
    until(lambda: not runs(other), "the relay's end with its store", WAIT_S)
    for follower in everybody:
        ray.kill(follower)
    return {"weights": came, "another": other != pid}


def observe(cluster: Cluster, doomed: Any) -> dict[str, Any]:
    """Runs the scenario and returns what was seen."""
    home = ray.get_runtime_context().get_node_id()
    there = NodeAffinitySchedulingStrategy(doomed.node_id, soft=False)
    weights = follow([home, doomed.node_id])
    hub = create_hub("hub", None)
    buffer = RemoteBuffer("buffer", hub="hub", **OPTIONS)
    unread = RemoteBuffer("unread", **{**OPTIONS, "size": 1})
    wide = RemoteBuffer("wide", **{**OPTIONS, "max_in_flight": 2})
    seen: dict[str, Any] = {**weights, "at_home": [shard.node_id == home for shard in buffer.shards]}

    far = Pusher.options(scheduling_strategy=there).remote("buffer")
    buffer.push(columns(2, 1), drop=False)
    ray.get([far.push.remote(columns(2, number), drop=number == 3) for number in (2, 3, 4)], timeout=WAIT_S)
    seen["nearest"] = held(buffer)
    ray.get([far.push.remote(columns(2, number), drop=number == 6) for number in (5, 6)], timeout=WAIT_S)
    seen["full"] = held(buffer)

    # This stream's second batch of the other node has left its shard, and has not arrived yet.
    wide_far = Pusher.options(scheduling_strategy=there).remote("wide")
    ray.get([wide_far.push.remote(large(number), drop=False) for number in (1, 2)], timeout=WAIT_S)
    stream = read_buffer("wide", timeout_s=WAIT_S)
    seen["wide"] = [int(next(stream)["reward"][0, 0])]
    stream.took()
    until(lambda: ray.get(wide.shards[1].actor.stats.remote())["in_flight"] == 1, "the second is under way", WAIT_S)

    reader = Reader("buffer")
    until(lambda: len(reader.got) == 6, "all that was pushed", WAIT_S)
    seen["read"] = sorted(reader.got)
    unread.push(columns(2, 1), drop=False)

    os.kill(doomed.all_processes["raylet"][0].process.pid, signal.SIGKILL)
    killed_at = time.monotonic()
    until(lambda: node_of(unread.shards[1]) in ("", home), "the shard's end", WAIT_S)
    waits = threading.Thread(target=unread.push, args=(columns(2, 2),), kwargs={"drop": False, "timeout_s": WAIT_S})
    waits.start()
    wide.push(large(3), drop=False)
    seen["wide"].append(int(next(stream)["reward"][0, 0]))
    stream.close()
    numbers = iter(range(100, 10_000))
    pushed = []
    while (place := node_of(buffer.shards[1])) != home or len(pushed) < 20:
        pushed.append(next(numbers))
        buffer.push(columns(2, pushed[-1]))
        assert time.monotonic() - killed_at < WAIT_S, f"the shard is {place or 'nowhere'}: {reader.error}"
        time.sleep(0.05)
    assert buffer.flush(WAIT_S)
    lost = buffer.dropped["buffer_lost"] // 8
    until(lambda: reader.error or len(reader.got) + lost >= 6 + len(pushed), "what was pushed", WAIT_S)
    seen["pushed"], seen["lost"] = len(pushed), lost
    seen["read_of_pushed"] = len(set(reader.got) & set(pushed))
    seen["twice"] = [number for number, times in Counter(reader.got).items() if times > 1]
    seen["error"] = reader.error
    waits.join(WAIT_S)
    seen["waited"] = (waits.is_alive(), sorted(held(unread)))
    until(lambda: ray.get(hub.snapshot.remote()).get("replay_restarts") == 1, "the restart being counted", WAIT_S)
    seen["shards"] = buffer.stats()["shards"]
    buffer.push(columns(2, 99), drop=False)
    until(lambda: 99 in reader.got, "a batch in the end", WAIT_S)
    return seen


def main() -> None:
    """Starts the nodes, runs the scenario, and ends them."""
    cluster = Cluster(
        initialize_head=True,
        head_node_args={"num_cpus": 2, "include_dashboard": False, "object_store_memory": STORE_BYTES},
    )
    try:
        doomed = cluster.add_node(num_cpus=2, object_store_memory=STORE_BYTES)
        options = {"log_to_driver": False, "logging_level": logging.ERROR}
        ray.init(address=cluster.address, namespace=NAMESPACE, **options)
        seen = observe(cluster, doomed)
    finally:
        ray.shutdown()
        cluster.shutdown()
    print(json.dumps(seen))


if __name__ == "__main__":
    main()
