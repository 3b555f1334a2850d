"""A service on three machines, of which one is cut off, one is switched off, and the head's processes are killed.

The sessions of other machines notice nothing, or wait.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from time import monotonic
from typing import Self

import pytest

from brayx.errors import OutOfSequence, SessionLost, SessionResumed
from tests.chaos.ledger import Wish, replace
from tests.nodes.machines import Machine, machines, on_machines, ray_address, ray_on, redis_on
from tests.nodes.players import Player, percentile
from tests.waiting import until, until_awaited

pytestmark = on_machines

HTTP, GRPC, NATIVE, TCP = 8000, 9000, 8100, 8101
SESSIONS = 96
THINK_S = 0.8
BEFORE_S = 15.0
CUT_S = 20.0
START_S = 60.0


class Service(contextlib.ExitStack):
    """The service of `tests.chaos.ledger` with one replica on each machine; a context.

    Args:
        hosts: the machines; Ray's head is on the first.
        folder: for its files.
        redis: as for `ray_on`.

    Attributes:
        doors: URL of each machine's door.
    """

    def __init__(self, hosts: list[Machine], folder: Path, redis: str) -> None:
        super().__init__()
        self.redis = redis
        self.machines = hosts
        self.doors = [f"http://{machine.address}:{NATIVE}" for machine in hosts]
        self._folder = folder
        self._wish = Wish(replicas=len(hosts))

    def __enter__(self) -> Self:
        super().__enter__()
        replace(self._folder / "wish.json", asdict(self._wish))
        for machine in self.machines:
            self.start_node(machine)
        head = self.machines[0]
        words = ["python", "-m", "tests.chaos.ledger", str(self._folder), *map(str, (HTTP, GRPC, NATIVE, TCP))]
        self.enter_context(head.start(*words, "--address", ray_address(head)))
        until(self._is_done, "a replica ran on each machine", START_S)
        return self

    def start_node(self, machine: Machine) -> None:
        """Starts a machine's node of Ray."""
        head = self.machines[0]
        self.enter_context(ray_on(machine, redis=self.redis) if machine is head else ray_on(machine, head))

    def pids(self, machine: Machine) -> set[int]:
        """The replicas of a machine."""
        return {process.pid for process in machine.processes("ray::ServeReplica:")}

    def _is_done(self) -> bool:
        done = self._folder / "done.json"
        return done.exists() and json.loads(done.read_text()) == asdict(self._wish)


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    folder = tmp_path_factory.mktemp("nodes")
    with (
        machines(folder, "one", "two", "three", "store") as (*hosts, store),
        redis_on(store) as redis,
        Service(hosts, folder, redis) as made,
    ):
        yield made


class Play:
    """Players at each machine's door and at each two doors in turn; every fourth gives no snapshots.

    Attributes:
        players: all of them.
        began: when all were playing, by `monotonic`.
    """

    def __init__(self, service: Service) -> None:
        doors = service.doors
        places = itertools.cycle([*((door,) for door in doors), *itertools.permutations(doors, 2)])
        self._service = service
        self.players = [
            Player(place, doors, THINK_S, number, plain=number % 4 == 3)
            for number, place in zip(range(SESSIONS), places, strict=False)
        ]
        self.began = 0.0

    async def run(self, during: Callable[[], Awaitable[None]]) -> None:
        """Lets everybody play while something happens; then each ends its session. All replies must be right."""
        over = asyncio.Event()
        tasks = [asyncio.create_task(player.play(over)) for player in self.players]
        try:
            await until_awaited(lambda: all(len(player.played) > 5 for player in self.players), "everybody plays")
            self.began = monotonic()
            await asyncio.sleep(BEFORE_S)
            await during()
        finally:
            over.set()
            await asyncio.gather(*tasks)
        self.check()

    def check(self) -> None:
        """No reply was wrong."""
        assert not [wrong for player in self.players for wrong in player.wrong]

    def split(self, machine: Machine) -> tuple[list[Player], list[Player]]:
        """The players whose session is on this machine, and those that neither it nor their doors concern."""
        there, door = self._service.pids(machine), self._service.doors[self._service.machines.index(machine)]
        on_it = [player for player in self.players if player.pid in there]
        return on_it, [player for player in self.players if player.pid not in there and door not in player.doors]

    async def all_go_on(self) -> None:
        """Waits until each player has had two more ticks answered."""
        marks = [len(player.played) + 2 for player in self.players]

        def all_have() -> bool:
            self.check()
            return all(len(player.played) >= mark for player, mark in zip(self.players, marks, strict=True))

        await until_awaited(all_have, "everybody plays on")


def check_apart(apart: list[Player], since: float) -> None:
    """No session of another machine was interrupted."""
    assert len(apart) > SESSIONS / 6
    assert not [error for player in apart for at, error, _ in player.interruptions if at >= since]


def check_interruptions(apart: list[Player], on_it: list[Player], since: float) -> None:
    """Only sessions of the machine were interrupted, once: resumed from a snapshot, or lost if they give none."""
    check_apart(apart, since)
    assert len(on_it) > SESSIONS / 6
    for player in on_it:
        errors = [error for at, error, _ in player.interruptions if at >= since]
        assert len(errors) <= 1, errors
        for error in errors:
            if player.plain:
                assert isinstance(error, SessionLost)
                assert error.details["reason"] == "owner_died"
            else:
                # Out of sequence: the report itself did not arrive.
                assert isinstance(error, SessionResumed | OutOfSequence)


def say_latency(what: str, players: list[Player], began: float, happened: float, over: float) -> None:
    """Prints what it cost; see docs/scaling.md."""
    for name, share in (("p50", 0.5), ("p99", 0.99)):
        before, after = (
            1e3 * percentile(players, share, since, end) for since, end in ((began, happened), (happened, over))
        )
        print(f"{what}: {name} of {len(players)} sessions apart {before:.1f} ms before, {after:.1f} ms meanwhile")


async def test_a_machine_that_is_cut_off_for_a_while_costs_other_sessions_nothing(service: Service) -> None:
    play, lost = Play(service), service.machines[2]

    async def during() -> None:
        on_it, apart = play.split(lost)
        lost.cut()
        cut = monotonic()
        await asyncio.sleep(CUT_S)
        lost.mend()
        say_latency("cut off", apart, play.began, cut, monotonic())
        check_interruptions(apart, on_it, cut)
        await play.all_go_on()
        check_interruptions(apart, on_it, cut)

    await play.run(during)


async def test_a_machine_that_is_switched_off_takes_only_its_own_sessions_and_comes_back(service: Service) -> None:
    play, lost = Play(service), service.machines[1]

    async def during() -> None:
        on_it, apart = play.split(lost)
        await asyncio.to_thread(lost.power_off)
        killed = monotonic()
        await asyncio.sleep(CUT_S)
        say_latency("switched off", apart, play.began, killed, monotonic())
        await play.all_go_on()
        check_interruptions(apart, on_it, killed)
        lost.mend()
        await asyncio.to_thread(service.start_node, lost)
        await asyncio.to_thread(until, lambda: service.pids(lost), "Serve starts the replica again", START_S)
        print(f"switched off: a replica is there again {monotonic() - killed:.0f} s later")
        await play.all_go_on()
        check_interruptions(apart, on_it, killed)

    await play.run(during)


async def test_the_heads_processes_are_killed_and_the_other_machines_sessions_wait_for_it(service: Service) -> None:
    """The snapshots are in the session directory, which is on the head: the head's own sessions are lost."""
    if not service.redis:
        pytest.skip("redis-server is not installed")
    play, head = Play(service), service.machines[0]

    async def during() -> None:
        on_it, apart = play.split(head)
        killed = monotonic()
        await asyncio.to_thread(head.kill)
        await asyncio.to_thread(service.start_node, head)
        print(f"head killed: another is there {monotonic() - killed:.0f} s later")
        await play.all_go_on()
        longest = max(tick.took_s for player in apart for tick in player.played if tick.at >= killed - 1)
        print(f"head killed: the longest tick of {len(apart)} sessions apart took {longest:.1f} s")
        check_apart(apart, killed)
        for player in on_it:
            errors = [error for at, error, _ in player.interruptions if at >= killed]
            assert [error.details.get("reason") for error in errors] == ["owner_died"], errors
        await asyncio.to_thread(until, lambda: service.pids(head), "Serve starts the replica again", START_S)

    await play.run(during)
