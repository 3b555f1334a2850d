"""A million damaged frames against every door, and hostile clients.

`tests/unit/actor/doors/test_fuzz.py` is a short version.
"""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections.abc import Iterator

import pytest

from tests.chaos.conversations import conversation_tests
from tests.chaos.hostile import Where, closed, connected, deaf, stalled
from tests.chaos.target import NOISE_OF_UVICORN, Door, Target, faults, further, guarded, settled
from tests.chaos.traffic import Tally, storm
from tests.waiting import until_awaited as until

pytestmark = pytest.mark.chaos

SHARE = float(os.environ.get("BRAYX_FUZZ_SHARE", "1"))
"""Of a million frames."""
FRAMES: dict[Door, int] = {
    "tcp": 700_000, "http": 130_000, "ws": 90_000, "grpc": 15_000, "asgi http": 40_000, "asgi ws": 30_000,
}  # fmt: skip
NATIVE: tuple[Door, ...] = ("tcp", "http", "ws", "grpc")
ASGI: tuple[Door, ...] = ("asgi http", "asgi ws")
WARM_UP = 0.2
"""Share of the frames after which memory is measured first: the sessions that a table remembers, the parsers' and the
allocator's pools are full by then."""
GROWTH_BYTES = 24 * 2**20
"""More than pools waver by on an idle service; a leak of 30 bytes a frame is more than that."""
UNANSWERED_S = 60.0
"""For a WebSocket ping, its answer and the end of the connection: twenty seconds each at most."""


@pytest.mark.parametrize(("doors", "noise"), [(NATIVE, []), (ASGI, NOISE_OF_UVICORN)], ids=["native", "asgi"])
async def test_a_million_damaged_frames(doors: tuple[Door, ...], noise: list[str]) -> None:
    seed = int(os.environ.get("BRAYX_FUZZ_SEED", str(random.getrandbits(32))))
    tally = Tally()
    # gRPC's thread hands over each event by the GIL: beside the storm a tick takes seconds to arrive on a busy machine.
    with Target(idle_timeout_s=30.0) as target:
        began = time.monotonic()
        fresh = target.report()
        async with guarded(target, doors) as ticks:
            await storm(target, {door: int(FRAMES[door] * SHARE * WARM_UP) for door in doors}, seed, tally)
        warm = await settled(target, fresh.tasks)
        async with guarded(target, doors) as ticks:
            await storm(target, {door: int(FRAMES[door] * SHARE * (1 - WARM_UP)) for door in doors}, seed + 1, tally)
        after = await settled(target, fresh.tasks)
        summary = (
            f"seed {seed}: {sum(tally.sent.values())} frames in {time.monotonic() - began:.0f} s {dict(tally.sent)}, "
            f"{sum(tally.answered.values())} replies {dict(tally.answered)}, right replies beside them {dict(ticks)}, "
            f"memory {fresh.rss / 2**20:.1f}, {warm.rss / 2**20:.1f}, {after.rss / 2**20:.1f} MiB"
        )
        print(summary)
        assert not tally.wrong, f"{summary}\n" + "\n".join(tally.wrong)[:4000]
        assert not faults(after, *noise), f"{summary}\n" + "\n".join(faults(after, *noise))[:4000]
        assert after.rss - warm.rss < GROWTH_BYTES, summary
        for door in doors:
            assert ticks[door] > 100 * SHARE, f"{door} hardly answered a well-behaved client: {summary}"
            assert tally.answered[door] > tally.sent[door] / 20, f"hardly anything sent to {door} was read: {summary}"


@pytest.fixture(scope="module")
def target() -> Iterator[Target]:
    with Target() as made:
        yield made
        tasks = made.report().tasks
        report = asyncio.run(settled(made, tasks))
        assert not faults(report, *NOISE_OF_UVICORN)


test_any_conversation_over_tcp, test_any_conversation_over_http, test_any_conversation_over_websocket = (
    conversation_tests(examples=max(20, int(1500 * SHARE)))
)


@pytest.mark.parametrize("door", ["http", "ws", "tcp", "asgi http", "asgi ws", "grpc"])
async def test_a_thousand_connections_harm_no_other_client(target: Target, door: Door) -> None:
    async with guarded(target, (door,)) as ticks:
        crowd = [await connected(target, door, started=False) for _ in range(1000)]
        await further(ticks, door)
        for connection in crowd:
            connection.close()


@pytest.mark.parametrize("door", ["http", "ws", "tcp", "asgi http", "asgi ws"])
async def test_a_client_that_never_reads_is_not_read_from_and_harms_no_other(door: Door) -> None:
    with Target(stall_s=1.0, idle_s=5.0, idle_timeout_s=5.0) as target:
        fresh = target.report()
        async with guarded(target, (door,)) as ticks:
            crowd = await deaf(target, door, 20, 3.0)
            if door != "asgi http":
                # uvicorn by itself reads eight requests of a client that sends ahead for each that it answers, until
                # the kernel takes no more answers; HAProxy passes on one at a time.
                assert target.report().rss - fresh.rss < 60 * 2**20, (
                    "the service keeps more than three megabytes for each client"
                )
            await further(ticks, door)
            if door in ("http", "ws", "tcp"):  # uvicorn by itself waits for ever, the ingress before it does not
                counted = "tcp" if door == "tcp" else "http"
                await until(
                    lambda: target.report().connections[counted] <= 1, "the end of the connections", UNANSWERED_S
                )
            await further(ticks, door)
            for connection in crowd:
                connection.close()
        await settled(target, fresh.tasks)


@pytest.mark.parametrize("door", ["ws", "asgi ws"])
async def test_a_websocket_that_stalls_in_a_message_is_closed_and_harms_no_other(door: Door) -> None:
    with Target(stall_s=1.0, idle_timeout_s=2.0) as target:
        async with guarded(target, (door,)) as ticks:
            assert not await closed(await stalled(target, door, "request", 50), UNANSWERED_S)
        assert ticks[door]


@pytest.mark.parametrize("door", ["asgi http", "grpc"])
@pytest.mark.parametrize("where", ["opening", "request"])
async def test_a_client_that_stalls_at_a_library_server_harms_no_other(door: Door, where: Where) -> None:
    with Target() as target:
        async with guarded(target, (door,)) as ticks:
            crowd = await stalled(target, door, where, 500)
            await further(ticks, door)
            for connection in crowd:
                connection.close()
        await settled(target, target.report().tasks)
