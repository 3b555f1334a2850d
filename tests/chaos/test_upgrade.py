"""A rolling update to another copy of brayx under 300 numbered sessions: none is lost, and none sees an error."""

from __future__ import annotations

import asyncio
import shutil
import time
import uuid
from collections.abc import Awaitable, Callable
from dataclasses import asdict
from pathlib import Path

import psutil
import pytest

from brayx.gamecore.client import AsyncClient
from tests.chaos.ledger import ROOT, Entry, Wish, at_free_ports, chained, pid_of, replace
from tests.end_to_end.jobs import Command, said_on_failure

pytestmark = pytest.mark.chaos

SESSIONS = 300
THINK_S = 0.5
START_S = 120.0
RECONNECT_S = 60.0


class Game:
    """One session, played from its start to its stop by a client that reconnects.

    Attributes:
        door: where it plays.
        longest_s: its longest wait for a tick's answer.
        pids: the replicas that it was played on, in their order.
    """

    def __init__(self, door: str, url: str) -> None:
        self.door = door
        self.longest_s = 0.0
        self.pids: list[int] = []
        self._client = AsyncClient(url, reconnect_s=RECONNECT_S)

    async def play(self, over: asyncio.Event) -> None:
        """Plays until it is over. Each reply must follow from all ticks before, each applied once."""
        session = digest = uuid.uuid4().hex
        await self._client.start(session=session)
        ticks = 0
        while not over.is_set():
            ticks += 1
            body = f"{session} {ticks}".encode()
            digest = chained(digest, body)
            began = time.monotonic()
            entry = Entry.decode(await self._client.tick(body))
            self.longest_s = max(self.longest_s, time.monotonic() - began)
            assert (entry.session, entry.ticks, entry.digest) == (session, ticks, digest)
            if pid_of(entry.run) not in self.pids:
                self.pids.append(pid_of(entry.run))
            await asyncio.sleep(THINK_S)
        await self._client.stop()
        await self._client.close()


async def update(command: Command, folder: Path, wish: Wish) -> None:
    """Has the service run what is wished for."""
    replace(folder / "wish.json", asdict(wish))
    done = folder / "done.json"
    await asyncio.to_thread(
        command.until,
        lambda: done.exists() and f'"generation": {wish.generation}' in done.read_text(),
        str(wish),
        START_S,
    )


async def play_during(games: list[Game], during: Callable[[], Awaitable[None]]) -> None:
    """Plays all games while something happens, until each has been played on since."""
    over = asyncio.Event()
    tasks = [asyncio.create_task(game.play(over)) for game in games]
    try:
        await during()
    finally:
        over.set()
        await asyncio.wait(tasks)
    for task in tasks:
        task.result()


async def test_a_rolling_update_loses_no_numbered_session(tmp_path: Path) -> None:
    words, environment, doors = at_free_ports(tmp_path)
    code = tmp_path / "next"
    shutil.copytree(ROOT / "brayx", code / "brayx")
    games = [Game(name, doors[name]) for name in list(doors) * (SESSIONS // len(doors))]
    replace(tmp_path / "wish.json", asdict(Wish(replicas=3)))
    with Command(words, tmp_path, environment) as command, said_on_failure(command):
        await asyncio.to_thread(command.until, (tmp_path / "done.json").exists, "three replicas ran")

        def replicas() -> set[int]:
            return command.pids("ray::ServeReplica:")

        async def during() -> None:
            await asyncio.to_thread(command.until, lambda: all(game.pids for game in games), "all play", START_S)
            await asyncio.sleep(5.0)
            print(f"longest wait before the update: {max(game.longest_s for game in games):.2f} s")
            before = replicas()
            await update(command, tmp_path, Wish(3, 1, str(code)))
            await asyncio.to_thread(
                command.until, lambda: not before & {game.pids[-1] for game in games}, "all have moved", START_S
            )
            assert not before & replicas()

        await play_during(games, during)
        for pid in replicas():
            assert psutil.Process(pid).environ()["PYTHONPATH"].startswith(str(code)), "a replica has the former code"
    for door in doors:
        waits = sorted(game.longest_s for game in games if game.door == door)
        print(f"{door}: longest wait for an answer {waits[-1]:.2f} s, median session's {waits[len(waits) // 2]:.2f} s")
