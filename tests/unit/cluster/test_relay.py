"""The relay of weights between processes of one machine: newest wins, shared and read-only, any side may end."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator

import numpy as np
import pytest

from brayx.cluster import relay as relay_module
from brayx.cluster.relay import Line, Relay, weights_in
from brayx.types import Weights
from tests.waiting import until_awaited as until

pytestmark = pytest.mark.skipif(not relay_module.available(), reason="a relay needs Linux's sockets and shared memory")


class Source:
    """The source that a relay reads; it counts the reads."""

    def __init__(self) -> None:
        self.found: tuple[int, int, Weights] | None = None
        self.reads = 0
        self.go_on = asyncio.Event()
        self.go_on.set()

    async def __call__(self) -> tuple[int, int, Weights] | None:
        self.reads += 1
        newest = self.found
        async with asyncio.timeout(60):
            await self.go_on.wait()
        return newest

    def put(self, version: int, size: int = 3) -> int:
        self.found = version, 10 * version, {"w": np.full(size, version, np.float32)}
        return version


@pytest.fixture
async def source() -> Source:
    return Source()


@pytest.fixture
async def relay(source: Source) -> AsyncIterator[Relay]:
    made = Relay(source)
    yield made
    await made.close()


async def first(line: Line, than: int) -> tuple[int, int, float]:
    newer = await line.newer(than, 10)
    assert newer is not None
    version, step, content = newer
    return version, step, float(weights_in(content)["w"][0])


async def test_a_reader_gets_the_current_version_and_then_newer_ones(relay: Relay, source: Source) -> None:
    relay.changed(source.put(1))
    line = Line(relay.address)
    assert await first(line, 0) == (1, 10, 1.0)
    request = asyncio.create_task(first(line, 1))
    await asyncio.sleep(0.05)
    assert not request.done(), "no newer version exists"
    relay.changed(source.put(2))
    assert await request == (2, 20, 2.0)
    line.close()


async def test_readers_share_one_read_and_slow_ones_miss_versions(relay: Relay, source: Source) -> None:
    lines = [Line(relay.address) for _ in range(3)]
    assert [await line.newer(0, 0.0) for line in lines] == [None] * 3
    relay.changed(source.put(1))
    assert [await first(line, 0) for line in lines] == [(1, 10, 1.0)] * 3
    assert source.reads == 1
    for version in range(2, 50):
        relay.changed(source.put(version))
    assert source.reads == 1, "nothing is packed without a request"
    assert [await first(line, 1) for line in lines] == [(49, 490, 49.0)] * 3
    assert source.reads == 2
    for line in lines:
        line.close()


async def test_a_packed_version_is_delivered_before_a_newer_one(relay: Relay, source: Source) -> None:
    line = Line(relay.address)
    source.go_on.clear()
    request = asyncio.create_task(first(line, 0))
    relay.changed(source.put(1))
    await until(lambda: source.reads == 1, timeout_s=10)
    relay.changed(source.put(2))
    source.go_on.set()
    assert await request == (1, 10, 1.0), "fast publishing must not starve the readers"
    assert await first(line, 1) == (2, 20, 2.0)
    line.close()


@pytest.mark.parametrize("there", [0, 8])
async def test_a_version_older_than_announced_is_read_and_delivered_once(
    relay: Relay, source: Source, there: int
) -> None:
    """A killed store remembers the version of the weights it lost."""
    if there:
        source.put(there)
    line = Line(relay.address)
    request = asyncio.create_task(line.newer(5, 60.0 if there else 0.2))
    relay.changed(9)
    newer = await request
    assert (newer is None) == (not there)
    assert await line.newer(8, 0.1) is None
    assert source.reads <= 2, "reads are bounded"
    relay.changed(source.put(10))
    assert await first(line, 8) == (10, 100, 10.0)
    line.close()


async def test_without_free_descriptors_connections_wait_and_nothing_spins(
    relay: Relay, source: Source, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    relay.changed(source.put(1))
    monkeypatch.setattr(relay_module, "_NO_ROOM_S", 0.2)
    accept = socket.socket.accept
    with monkeypatch.context() as patched:
        patched.setattr(socket.socket, "accept", refusing)
        line = Line(relay.address)
        assert await line.newer(0, 0.5) is None
    assert socket.socket.accept is accept
    assert 1 <= caplog.text.count("no line for weights") <= 5
    assert await first(line, 0) == (1, 10, 1.0)
    line.close()


def refusing(_: socket.socket) -> None:
    raise OSError(errno.EMFILE, "too many open files")


async def test_a_request_that_timed_out_is_still_answered(relay: Relay, source: Source) -> None:
    line = Line(relay.address)
    assert await line.newer(0, 0.01) is None
    assert await line.newer(0, 0.01) is None
    relay.changed(source.put(1))
    assert await first(line, 0) == (1, 10, 1.0)
    assert await line.newer(1, 0.01) is None, "only once"
    line.close()


async def test_every_kind_of_array_arrives_whole_aligned_and_unchangeable(relay: Relay, source: Source) -> None:
    weights = {
        "flag": np.array([True, False, True]),
        "none": np.zeros((0, 4), np.float32),
        "scalar": np.array(2.5, np.float64),
        "turned": np.arange(6, dtype=np.float32).reshape(2, 3).T,
        "half": np.array([1.5], np.float16),
        "count": np.array([7, 8], np.int64),
    }
    source.found = 1, 0, weights
    relay.changed(1)
    line = Line(relay.address)
    newer = await line.newer(0, 10)
    assert newer is not None
    got = weights_in(newer[2])
    assert got.keys() == weights.keys()
    for name, array in weights.items():
        assert got[name].dtype == array.dtype
        np.testing.assert_array_equal(got[name], array)
        assert got[name].flags.aligned
        assert not got[name].flags.writeable
    line.close()


async def test_weights_stay_after_the_relay_and_the_line_are_gone(source: Source) -> None:
    relay = Relay(source)
    relay.changed(source.put(1, 300_000))
    line = Line(relay.address)
    newer = await line.newer(0, 10)
    assert newer is not None
    weights = weights_in(newer[2])
    await relay.close()
    await relay.close()
    with pytest.raises(OSError):
        await line.newer(1, 10)
    line.close()
    del newer
    assert (weights["w"] == 1).all()
    with pytest.raises(OSError, match="refused"):
        Line(relay.address)


async def test_weights_that_cannot_be_sent_end_the_waiting_lines_and_the_next_arrive(
    relay: Relay, source: Source, caplog: pytest.LogCaptureFixture
) -> None:
    line = Line(relay.address)
    source.found = 1, 0, {"w": np.array(["no numbers"])}
    relay.changed(1)
    with caplog.at_level(logging.ERROR), pytest.raises(OSError):
        await line.newer(0, 10)
    assert "version 1 could not be relayed" in caplog.text
    line.close()
    line = Line(relay.address)
    assert await line.newer(0, 0.1) is None
    assert source.reads == 1, "not repeatedly"
    relay.changed(source.put(2))
    assert await first(line, 0) == (2, 20, 2.0)
    line.close()


async def test_an_invalid_request_ends_only_its_line(relay: Relay, source: Source) -> None:
    good, bad = Line(relay.address), Line(relay.address)
    await until(lambda: relay.lines == 2, timeout_s=10)
    bad._socket.send(b"what")
    await until(lambda: relay.lines == 1, timeout_s=10)
    with pytest.raises(OSError):
        await bad.newer(0, 10)
    relay.changed(source.put(1))
    assert await first(good, 0) == (1, 10, 1.0)
    good.close()
    bad.close()
    await until(lambda: relay.lines == 0, timeout_s=10)


async def test_a_process_of_another_user_is_refused(
    relay: Relay, source: Source, monkeypatch: pytest.MonkeyPatch
) -> None:
    user = os.getuid()
    relay.changed(source.put(1))
    with monkeypatch.context() as patched:
        patched.setattr(relay_module.os, "getuid", lambda: user + 1)
        with pytest.raises(PermissionError):
            Line(relay.address)
    line = Line(relay.address)
    monkeypatch.setattr(relay_module.os, "getuid", lambda: user + 1)  # before it is accepted
    with pytest.raises(OSError):
        await line.newer(0, 10)
    line.close()


FOLLOWS = """
import asyncio, sys
from brayx.cluster.relay import Line, weights_in

async def follow():
    line, version = Line(sys.argv[1]), 0
    while True:
        version, _, content = await line.newer(version, 60)
        print(version, float(weights_in(content)["w"].sum()), flush=True)

asyncio.run(follow())
"""


async def test_another_process_reads_them_and_its_kill_affects_no_other(relay: Relay, source: Source) -> None:
    relay.changed(source.put(1, 1_000_000))
    line = Line(relay.address)
    command = sys.executable, "-c", FOLLOWS, relay.address
    other = await asyncio.create_subprocess_exec(*command, stdout=subprocess.PIPE)
    assert other.stdout is not None
    assert await other.stdout.readline() == b"1 1000000.0\n"
    assert await first(line, 0) == (1, 10, 1.0)
    other.send_signal(signal.SIGKILL)
    await other.wait()
    relay.changed(source.put(2))
    assert await first(line, 1) == (2, 20, 2.0)
    await until(lambda: relay.lines == 1, timeout_s=10)
    line.close()


async def test_a_thousand_versions_leak_no_descriptor(relay: Relay, source: Source) -> None:
    line = Line(relay.address)
    relay.changed(source.put(1))
    assert (await first(line, 0))[0] == 1
    before = len(os.listdir("/proc/self/fd"))
    for version in range(2, 1002):
        relay.changed(source.put(version))
        assert (await first(line, version - 1))[0] == version
    assert len(os.listdir("/proc/self/fd")) <= before
    line.close()
