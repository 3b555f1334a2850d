"""The port of a job's console: held from construction until `close`."""

from __future__ import annotations

import pytest

from brayx.console.port import ConsolePort
from brayx.errors import StartupError


def port(number: int = 0) -> ConsolePort:
    return ConsolePort("127.0.0.1", number, "no_such_module", [], lambda *words: None)


def test_a_port_is_held_until_it_is_closed_and_may_be_closed_twice() -> None:
    console = port()
    number = int(console.url.rpartition(":")[2])
    assert console.url == f"http://127.0.0.1:{number}"
    with pytest.raises(StartupError):
        port(number)
    for _ in range(2):
        console.close()
    assert console._socket.fileno() == -1
    assert not console._thread.is_alive()
