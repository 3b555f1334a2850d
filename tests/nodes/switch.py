"""A network switch in user space: each frame arrives later, some never, and none over a link that is cut.

`tests.nodes.machines` runs it as a process, because ``tc netem``, which does this in the kernel, is missing from many.
Knows nothing of what is on the links.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import random
import select
import struct
import sys
import time
from collections import deque

DELAY_S = 0.001
LOSS = 0.001
MAC = b"\x02\x00\x00\x00\x00"
"""First five bytes of the addresses on the links; the sixth is the link's number."""
_TUNSETIFF = 0x400454CA
_IFF_TAP_NO_PI = 0x1002
_FRAMES = 64
"""Most frames that are read from a link before the others get their turn."""


def tap(name: str) -> int:
    """Makes a TAP interface, which exists until this process ends; its end of the link."""
    file = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(file, _TUNSETIFF, struct.pack("16sH", name.encode(), _IFF_TAP_NO_PI))
    return file


class Switch:
    """Passes frames between links.

    Args:
        links: this end of each.

    Attributes:
        cut: numbers of the links that are cut.
    """

    def __init__(self, links: list[int]) -> None:
        self._links = links
        self._on_the_way: deque[tuple[float, int, bytes]] = deque()
        self.cut: set[int] = set()

    def run(self, commands: int) -> None:
        """Switches until ``commands`` ends; each of its lines is ``cut N`` or ``mend N``."""
        while True:
            due = self._on_the_way[0][0] - time.monotonic() if self._on_the_way else None
            ready, _, _ = select.select([commands, *self._links], [], [], due and max(0.0, due))
            for number, link in enumerate(self._links):
                if link in ready:
                    self._take(number, link)
            self._deliver()
            if commands in ready:
                words = os.read(commands, 4096).decode().split()
                if not words:
                    return
                for word, number in zip(words[::2], map(int, words[1::2]), strict=True):
                    (self.cut.add if word == "cut" else self.cut.discard)(number)

    def _take(self, number: int, link: int) -> None:
        arrives = time.monotonic() + DELAY_S
        with contextlib.suppress(OSError):  # no more frames, or the machine is gone
            for _ in range(_FRAMES):
                frame = os.read(link, 65536)
                if number not in self.cut and random.random() >= LOSS:
                    self._on_the_way.append((arrives, number, frame))

    def _deliver(self) -> None:
        now = time.monotonic()
        while self._on_the_way and self._on_the_way[0][0] <= now:
            _, source, frame = self._on_the_way.popleft()
            is_to_one = frame[:5] == MAC
            for number, link in enumerate(self._links):
                if number != source and number not in self.cut and (not is_to_one or number == frame[5]):
                    with contextlib.suppress(OSError):  # its queue is full, or the interface is down
                        os.write(link, frame)


def main() -> None:
    """Makes the interfaces that the arguments name, says so, and switches until its standard input ends."""
    switch = Switch([tap(name) for name in sys.argv[1:]])
    print("ready", flush=True)
    switch.run(sys.stdin.fileno())


if __name__ == "__main__":
    main()
