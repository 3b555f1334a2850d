"""Calls to actors, with scripted ones: repeated while no actor answers, within a deadline, with typed errors."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest
from ray.exceptions import ActorDiedError, ObjectLostError, RayTaskError

from brayx.cluster.named import answer_with_retry
from brayx.errors import BrayxError, DeadlineExceeded, ModelError, VersionUnknown


def after(*errors: Exception) -> Callable[[], Awaitable[str]]:
    """A call that fails with each of these errors once, and then has an answer."""
    left = list(errors)

    async def call() -> str:
        if left:
            raise left.pop(0)
        return "answer"

    return call


async def test_a_call_is_repeated_while_its_actor_is_unavailable() -> None:
    assert await answer_with_retry(after(*[ActorDiedError()] * 5), 5.0, "the pool", finds_actor=True) == "answer"


async def test_without_an_answer_in_time_it_fails() -> None:
    with pytest.raises(DeadlineExceeded, match=r"^the pool did not answer in 0\.05 s$"):
        await answer_with_retry(after(*[ActorDiedError()] * 1000), 0.05, "the pool", finds_actor=True)
    with pytest.raises(DeadlineExceeded, match="the pool did not answer"):
        await answer_with_retry(asyncio.Event().wait, 0.05, "the pool")


async def test_an_actor_that_ended_for_good_is_not_called_again() -> None:
    with pytest.raises(ModelError, match=r"^the weight store has ended"):
        await answer_with_retry(after(*[ActorDiedError()] * 1000), 5.0, "the weight store")


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (RayTaskError("weights", "", VersionUnknown("nearest is 1")), VersionUnknown),  # type: ignore[no-untyped-call]
        (RayTaskError("weights", "", KeyError("a defect")), ModelError),  # type: ignore[no-untyped-call]
        (ObjectLostError("1" * 56, "", ""), ModelError),  # type: ignore[no-untyped-call]
    ],
    ids=["its own", "a defect", "lost"],
)
async def test_any_other_error_is_typed_and_raised_at_once(error: Exception, expected: type[BrayxError]) -> None:
    with pytest.raises(expected):
        await answer_with_retry(after(error), 5.0, "the pool")
