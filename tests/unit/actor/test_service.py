"""A service's `step`: one reply, typed errors that are counted, and a start whose caller leaves."""

from __future__ import annotations

import asyncio

import pytest

from brayx.actor.service import Holder, Service
from brayx.errors import ServiceFull
from brayx.gamecore.protocol import StepKind, StepRequest


class Waiting(Service):
    """Keeps each request's reply for the test."""

    def __init__(self) -> None:
        self.replies = []
        self.counted = []
        self.withdrawn = []

    def submit(self, request, reply, *, let_in=False):
        self.replies.append(reply)

    def refused(self, error):
        self.counted.append(error)

    def withdraw(self, session, holder=""):
        self.withdrawn.append(session)


async def begun(service: Waiting, kind: StepKind) -> asyncio.Task[bytes]:
    step = asyncio.create_task(service.step(StepRequest(kind, "game", b"")))
    await asyncio.sleep(0)  # the task has its turn
    return step


async def test_a_reply_is_the_result_and_an_error_is_raised_and_counted() -> None:
    service = Waiting()
    step = await begun(service, StepKind.TICK)
    service.replies.pop()(b"reply")
    assert await step == b"reply"
    step = await begun(service, StepKind.TICK)
    error = ServiceFull("full")
    service.replies.pop()(error)
    with pytest.raises(ServiceFull):
        await step
    assert service.counted == [error]


@pytest.mark.parametrize(("kind", "withdrawn"), [(StepKind.START, ["game"]), (StepKind.TICK, [])])
async def test_only_a_start_is_withdrawn_if_its_caller_leaves(kind: StepKind, withdrawn: list[str]) -> None:
    service = Waiting()
    step = await begun(service, kind)
    step.cancel()
    with pytest.raises(asyncio.CancelledError):
        await step
    assert service.withdrawn == withdrawn
    service.replies.pop()(b"a reply that nobody waits for")


def test_a_holder_keeps_why_it_ended_and_tells_its_connection() -> None:
    reasons: list[str] = []
    holder = Holder("one", reasons.append)
    holder.end("taken")
    assert (holder.ended, reasons) == ("taken", ["taken"])
