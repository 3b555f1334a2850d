"""Damaged frames and hostile clients, for seconds; `tests/chaos/test_fuzz.py` does the same at length."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from tests.chaos.conversations import conversation_tests
from tests.chaos.hostile import Where, closed, connected, dawdling, stalled
from tests.chaos.target import DOORS, NOISE_OF_UVICORN, Door, Target, faults, further, guarded, settled
from tests.chaos.traffic import Tally, storm
from tests.waiting import until_awaited as until

STALL_S = 0.4
IMPATIENT = {"stall_s": STALL_S, "idle_s": 10.0, "idle_timeout_s": 10.0}
FRAMES: dict[Door, int] = {"tcp": 3000, "http": 1500, "ws": 1000, "asgi http": 500, "asgi ws": 500, "grpc": 200}


@pytest.fixture(scope="module")
def target() -> Iterator[Target]:
    """The service; no session, connection or task of a test may be left at the end."""
    with Target() as made:
        tasks = made.report().tasks
        yield made
        report = asyncio.run(settled(made, tasks))
        assert not faults(report, *NOISE_OF_UVICORN)


async def test_damaged_frames_harm_no_other_client(target: Target) -> None:
    tally = Tally()
    async with guarded(target) as ticks:
        left = FRAMES
        for seed in range(1, 11):
            await storm(target, left, seed, tally)
            # A connection that waits a tenth of a second for replies gets few of them on an overloaded machine.
            left = {door: frames for door, frames in FRAMES.items() if tally.answered[door] <= frames / 50}
            if tally.wrong or not left:
                break
    assert not tally.wrong, tally.wrong[0]
    assert not left, f"hardly anything sent to {', '.join(left)} was read"
    for door in DOORS:
        assert tally.sent[door] >= FRAMES[door]
        assert ticks[door] > 0


test_any_conversation_over_tcp, test_any_conversation_over_http, test_any_conversation_over_websocket = (
    conversation_tests(examples=25)
)


@pytest.fixture(scope="module")
def impatient() -> Iterator[Target]:
    with Target(**IMPATIENT) as made:
        yield made


@pytest.mark.parametrize(
    ("door", "where"),
    [("http", "opening"), ("http", "request"), ("ws", "opening"), ("tcp", "opening"), ("tcp", "request")],
)
async def test_a_client_that_stalls_in_mid_frame_is_closed_and_harms_no_other(
    impatient: Target, door: Door, where: Where
) -> None:
    async with guarded(impatient, (door,)) as ticks:
        assert not await closed(await stalled(impatient, door, where, 50), 150 * STALL_S)
    assert ticks[door]


@pytest.mark.parametrize("where", ["opening", "request"])
async def test_a_client_that_stalls_over_grpc_harms_no_other(impatient: Target, where: Where) -> None:
    async with guarded(impatient, ("grpc",)) as ticks:
        crowd = await stalled(impatient, "grpc", where, 50)
        await further(ticks, "grpc")
        for connection in crowd:
            connection.close()


@pytest.mark.parametrize("door", ["http", "ws", "tcp"])
async def test_a_client_that_sends_single_bytes_is_closed_and_harms_no_other(impatient: Target, door: Door) -> None:
    async with guarded(impatient, (door,)) as ticks:
        lasted = await asyncio.gather(*(dawdling(impatient, door, STALL_S / 20) for _ in range(10)))
        assert min(lasted) >= STALL_S
    assert ticks[door]


@pytest.fixture(scope="module")
def narrow() -> Iterator[Target]:
    with Target(max_connections=50, idle_timeout_s=30.0) as made:
        yield made


@pytest.mark.parametrize("door", ["http", "ws", "tcp"])
async def test_a_thousand_connections_do_not_exceed_the_limit(narrow: Target, door: Door) -> None:
    counted = "tcp" if door == "tcp" else "http"
    await until(lambda: not narrow.report().connections[counted], "the door being empty")
    async with guarded(narrow, (door,), turns=10**6) as ticks:
        await further(ticks, door)
        crowd = []
        refused = 0
        for _ in range(1000):
            try:
                crowd.append(await connected(narrow, door, started=False))
            except ConnectionError:
                refused += 1
        connections = narrow.report().connections
        assert connections[counted] <= 50, connections
        assert connections["ws"] <= 50, connections
        await further(ticks, door)
        if door == "ws":
            assert refused >= 950
        for connection in crowd:
            connection.close()
