"""Plays many sessions at a service at once, and measures the latency of each phase, errors and the point of saturation.

Each session sends the same body at a fixed rate. A tick's latency counts from the moment when it was due, so a service
that stalls is charged for every tick that it delayed. Knows nothing of what the bodies mean.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, defaultdict
from collections.abc import Awaitable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from brayx.errors import BrayxError
from brayx.gamecore.client import AsyncClient

PHASES = ("start", "tick", "stop")
_QUANTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99, "max": 1.0}
_BAD_SHARE = 0.01
"""Share of late or failed ticks from which a second counts as bad."""
_BAD_SECONDS = 3
"""Bad seconds in a row that saturation takes; one or two come from elsewhere, such as a busy neighbour."""
_PAUSE_S = 1.0
"""Pause of a session after an error, so that a service that refuses is not flooded."""


@dataclass(frozen=True, kw_only=True)
class LoadPlan:
    """What is played.

    Attributes:
        url: URL of a door.
        sessions: number of sessions at the end of the ramp.
        ramp_s: seconds over which they are started, evenly.
        seconds: seconds that all of them play after the ramp.
        rate: ticks a second of each session.
        start, tick: bodies.
        limit_s: a tick that takes longer counts as too late, for the point of saturation.
        credentials: ``key`` and ``secret`` of the client; empty: none.
    """

    url: str
    sessions: int
    ramp_s: float
    seconds: float
    rate: float
    start: bytes = b""
    tick: bytes = b"{}"
    limit_s: float = 0.1
    credentials: dict[str, Any] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """The plan as JSON values, without credentials; bodies by their sizes."""
        sizes = {"start_bytes": len(self.start), "tick_bytes": len(self.tick)}
        named = ("url", "sessions", "ramp_s", "seconds", "rate", "limit_s")
        return {name: getattr(self, name) for name in named} | sizes


@dataclass
class LoadResult:
    """What was measured.

    Attributes:
        latency_s: of each answered request, by phase.
        errors: number of errors by phase and code.
        seconds: by second since the begin: sessions open, ticks answered, and ticks late or failed.
    """

    latency_s: dict[str, list[float]] = field(default_factory=lambda: {phase: [] for phase in PHASES})
    errors: dict[str, Counter[str]] = field(default_factory=lambda: {phase: Counter() for phase in PHASES})
    seconds: defaultdict[int, list[int]] = field(default_factory=lambda: defaultdict(lambda: [0, 0, 0]))

    @property
    def saturated_at(self) -> int | None:
        """Open sessions at the first `_BAD_SECONDS` in a row in which one tick in a hundred was late or failed; None:
        there were none. Later there may be fewer, since a service that is too busy loses sessions."""
        by_second = [self.seconds[second] for second in sorted(self.seconds)]
        bad = [failed > _BAD_SHARE * (ticks + failed) for _, ticks, failed in by_second]
        starts = range(len(bad) - _BAD_SECONDS + 1)
        return next((by_second[start][0] for start in starts if all(bad[start : start + _BAD_SECONDS])), None)

    def as_dict(self) -> dict[str, Any]:
        """The measurements as JSON values; times in milliseconds."""
        phases = {}
        for phase, taken in self.latency_s.items():
            values = (np.quantile(taken, tuple(_QUANTILES.values())) * 1e3).tolist() if taken else []
            named = {name: round(value, 3) for name, value in zip(_QUANTILES, values, strict=False)}
            phases[phase] = {"answered": len(taken), "ms": named, "errors": dict(self.errors[phase])}
        keys = ("sessions", "answered", "late_or_failed")
        by_second = [dict(zip(keys, self.seconds[second], strict=True)) for second in sorted(self.seconds)]
        return {"phases": phases, "saturated_at": self.saturated_at, "by_second": by_second}


class _Load:
    def __init__(self, plan: LoadPlan) -> None:
        self._plan = plan
        self._open = 0
        self._begin = time.perf_counter()
        self._end = self._begin + plan.ramp_s + plan.seconds
        self.result = LoadResult()

    async def play(self, index: int) -> None:
        """Plays the session with this index until the end; tries at least once."""
        plan = self._plan
        await asyncio.sleep(index * plan.ramp_s / plan.sessions)
        while True:
            client = AsyncClient(plan.url, **plan.credentials)
            try:
                if await self._timed("start", client.start(plan.start), time.perf_counter()):
                    self._open += 1
                    try:
                        await self._ticks(client)
                    finally:
                        self._open -= 1
            finally:
                await client.close()
            await asyncio.sleep(min(_PAUSE_S, max(0.0, self._end - time.perf_counter())))
            if time.perf_counter() >= self._end:
                return

    async def _ticks(self, client: AsyncClient) -> None:
        due = time.perf_counter()
        while await self._timed("tick", client.tick(self._plan.tick), due):
            due += 1 / self._plan.rate
            if max(due, time.perf_counter()) >= self._end:  # a service that is too busy would take minutes longer
                break
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
        if client.session is not None:
            await self._timed("stop", client.stop(), time.perf_counter())

    async def _timed(self, phase: str, request: Awaitable[bytes], due: float) -> bool:
        """Waits for a request, and records it; False: an error."""
        code = ""
        try:
            await request
        except BrayxError as error:
            code = error.code
            self.result.errors[phase][code] += 1
        now = time.perf_counter()
        if not code:
            self.result.latency_s[phase].append(now - due)
        if phase == "tick":
            second = self.result.seconds[int(now - self._begin)]
            second[0] = max(second[0], self._open)
            second[2 if code or now - due > self._plan.limit_s else 1] += 1
        return not code


async def play_load(plan: LoadPlan) -> LoadResult:
    """Plays, and returns what was measured."""
    load = _Load(plan)
    async with asyncio.TaskGroup() as group:
        for index in range(plan.sessions):
            group.create_task(load.play(index))
    return load.result
