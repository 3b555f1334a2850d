"""Buffers over two raylets of this machine, one of which is killed: prints what was seen of them, as JSON.

Run by test_nodes.py in a process of its own, since that of the tests has a Ray already.
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

from brayx.hub import create_hub
from brayx.replay.remote import RemoteBuffer
from brayx.replay.source import read_buffer
from brayx.types import Columns
from tests.unit.replay.made import columns
from tests.waiting import until

NAMESPACE = "nodes"
WAIT_S = 60.0
OPTIONS = {"size": 3, "batch_size": 2, "unroll_length": 4, "num_workers": 2}
STORE_BYTES = 100 * 1024 * 1024


@ray.remote(num_cpus=0)
class Pusher:
    """Somebody on another node than the driver."""

    def __init__(self, name: str) -> None:
        self._buffer = RemoteBuffer.attach(name, namespace=NAMESPACE)

    def push(self, made: Columns, *, drop: bool) -> None:
        self._buffer.push(made, drop=drop)
        assert self._buffer.flush(WAIT_S)


class Reader:
    """Reads a buffer in a thread, and keeps the number that each batch was made with."""

    def __init__(self, name: str) -> None:
        self._stream = read_buffer(name, NAMESPACE)
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
    """Columns whose batch is no small object, which Ray keeps on the node where it was made."""
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


def observe(cluster: Cluster, doomed: Any) -> dict[str, Any]:
    """The course of it."""
    home = ray.get_runtime_context().get_node_id()
    there = NodeAffinitySchedulingStrategy(doomed.node_id, soft=False)
    hub = create_hub("hub", NAMESPACE, None)
    buffer = RemoteBuffer("buffer", namespace=NAMESPACE, hub="hub", **OPTIONS)
    unread = RemoteBuffer("unread", namespace=NAMESPACE, **{**OPTIONS, "size": 1})
    wide = RemoteBuffer("wide", namespace=NAMESPACE, **{**OPTIONS, "max_in_flight": 2})
    seen: dict[str, Any] = {"at_home": [shard.node_id == home for shard in buffer.shards]}

    far = Pusher.options(scheduling_strategy=there).remote("buffer")
    buffer.push(columns(2, 1), drop=False)
    ray.get([far.push.remote(columns(2, number), drop=number == 3) for number in (2, 3, 4)], timeout=WAIT_S)
    seen["nearest"] = held(buffer)
    ray.get([far.push.remote(columns(2, number), drop=number == 6) for number in (5, 6)], timeout=WAIT_S)
    seen["full"] = held(buffer)

    # Of this stream the second batch of the other node has left its shard, and has not come here yet.
    wide_far = Pusher.options(scheduling_strategy=there).remote("wide")
    ray.get([wide_far.push.remote(large(number), drop=False) for number in (1, 2)], timeout=WAIT_S)
    stream = read_buffer("wide", NAMESPACE, timeout_s=WAIT_S)
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
    """Starts the nodes, looks, and ends them."""
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
