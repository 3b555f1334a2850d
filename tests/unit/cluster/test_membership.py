"""A replica's calls to the session directory, with a scripted directory: restarts, recovery, errors, a deadline."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import ActorDiedError, ActorUnavailableError, RayTaskError

from brayx.cluster import membership
from brayx.cluster.directory import Directory, DirectoryRecovering
from brayx.cluster.membership import Membership
from brayx.errors import Overloaded, SessionExists
from tests.waiting import until_awaited


def member_of(*answers: Any) -> Membership:
    """A member whose directory gives these answers, one per call; the last one is repeated."""
    left = list(answers)

    async def locate(session: str) -> Any:
        answer = left.pop(0) if len(left) > 1 else left[0]
        if isinstance(answer, BaseException):
            raise answer
        return answer

    return Membership(SimpleNamespace(locate=SimpleNamespace(remote=locate)))


def carried(error: Exception) -> Exception:
    """The error as Ray carries it from the directory's process."""
    return RayTaskError("locate", "", error)  # type: ignore[no-untyped-call, no-any-return]


async def test_a_call_is_repeated_while_the_directory_restarts_and_recovers() -> None:
    away, recovering = ActorUnavailableError("away", b"1" * 16), carried(DirectoryRecovering("not all owners yet"))
    assert await member_of(away, recovering, recovering, "b").ask("locate", "s") == "b"


async def test_the_directorys_own_error_is_raised_unchanged() -> None:
    with pytest.raises(SessionExists, match="it runs"):
        await member_of(carried(SessionExists("it runs"))).ask("locate", "s")
    with pytest.raises(RayTaskError):
        await member_of(carried(KeyError("a defect"))).ask("locate", "s")


@pytest.mark.parametrize("error", [ActorDiedError(), ActorUnavailableError("away", b"1" * 16)], ids=["died", "away"])
async def test_without_an_answer_the_caller_may_try_again(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    monkeypatch.setattr(membership, "_ANSWER_S", 0.05)
    with pytest.raises(Overloaded, match=r"locate within 0\.05 s; try again"):
        await member_of(error).ask("locate", "s")


async def test_a_share_that_was_set_here_is_offered_to_a_directory_that_restarts_before_the_next_renewal() -> None:
    directory, taken, table = Directory(), list[Mapping[str, float]](), SimpleNamespace(sessions=["s"])
    table.lose = lambda lost: None

    class Restarting:
        def __getattr__(self, name: str) -> Any:
            async def call(*args: Any) -> Any:
                return getattr(directory, name)(*args)

            return SimpleNamespace(remote=call)

    member = Membership(Restarting(), taken.append)
    await member.join(table)  # type: ignore[arg-type]
    await member.set_share("model/0.1", 0.5)
    assert taken == [{}, {"model/0.1": 0.5}]
    directory = Directory()

    async def listen() -> str:
        return "http://a"

    member.lease.wanted.set()
    renewing = asyncio.create_task(member.renew(table, listen))  # type: ignore[arg-type]
    await until_awaited(lambda: len(taken) == 3, "a renewal")
    renewing.cancel()
    assert taken[2] == {"model/0.1": 0.5}
    other = directory.renew("b", "http://b", [])
    assert other is not None
    assert other.shares == {"model/0.1": 0.5}
