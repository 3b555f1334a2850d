"""An engine that tests can block, and an event loop's clock that they move."""

from __future__ import annotations

import asyncio
import threading

from tests.clocks import Clock


class Engine:
    """Doubles rows; records batches and where they ran; blocks while `gate` is closed."""

    def __init__(self) -> None:
        self.batches: list[list[int]] = []
        self.threads: list[str] = []
        self.gate = threading.Event()
        self.gate.set()
        self.entered = threading.Event()

    def __call__(self, rows):
        self.batches.append(list(rows))
        self.threads.append(threading.current_thread().name)
        self.entered.set()
        assert self.gate.wait(60)
        if "bad" in rows:
            raise RuntimeError("engine broke")
        return [row * 2 for row in rows]

    async def wait_entered(self):
        assert await asyncio.to_thread(self.entered.wait, 5)
        self.entered.clear()


class LoopClock(Clock):
    """The event loop's clock, which stands still until a test moves it."""

    async def move(self, seconds):
        """Advances the clock by so many seconds and runs everything due until then."""
        await let_loop_run()
        self.now += seconds
        await let_loop_run()


async def let_loop_run():
    """Lets the event loop run whatever is ready."""
    for _ in range(10):
        await asyncio.sleep(0)


async def block_engine(engine, batcher, row=0):
    """Blocks the engine in a call with one row; returns the caller's task."""
    engine.gate.clear()
    engine.entered.clear()
    caller = asyncio.create_task(batcher.submit(row))
    await engine.wait_entered()
    return caller
