"""`brayx bridge` joins games to a service that requires keys behind TLS, and says in one line why it cannot."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from brayx.gamecore.auth import Keys
from brayx.ports import free_port
from tests.godot_game import Document, GodotStandIn
from tests.unit.bridges.contract_service import ContractService, serving_contracts
from tests.unit.bridges.tls_proxy import certificate, tls_proxy
from tests.unity_game import Caller, UnityGame
from tests.waiting import until

SECRET = "correct horse battery staple"
CALLS = 30


class Bridge:
    """A ``brayx bridge`` in a process of its own."""

    def __init__(
        self, folder: Path, kind: str, url: str, *more: str, secret: str = SECRET, trusts: Path | None = None
    ) -> None:
        keys = folder / "keys.txt"
        keys.write_text(f"studio: {secret}\n")
        keys.chmod(0o600)
        words = [sys.executable, "-m", "brayx", "bridge", kind, "--url", url, "--listen", "0", "--quiet"]
        words += ["--key", "studio", "--keys-file", str(keys), "--reconnect", "60", *more]
        self._err = folder / "stderr.txt"
        with self._err.open("wb") as err:
            environment = {**os.environ, "SSL_CERT_FILE": str(trusts or os.devnull)}
            self.process = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=err, env=environment)

    @property
    def err(self) -> str:
        return self._err.read_text()

    @property
    def port(self) -> int:
        """Where it listens."""
        until(lambda: "listens at" in self.err or self.process.poll() is not None, "it listens")
        (port,) = re.findall(r"listens at 127\.0\.0\.1:(\d+)", self.err)
        return int(port)


def play_unity(port: int) -> int:
    game = UnityGame(4, limit=8)
    with Caller(port) as caller:
        game.play(caller, calls=CALLS)
    return game.steps


def play_godot(port: int) -> int:
    calls = 0

    def spoil(message: Document) -> Document | None:
        nonlocal calls
        calls += 1
        return None if calls == CALLS else message

    game = GodotStandIn(port, agents=4, limit=8, spoil=spoil)
    game.run()
    return 4 * game.steps


PLAYS: dict[str, Callable[[int], int]] = {"unity": play_unity, "godot": play_godot}


@pytest.fixture
def service() -> Iterator[ContractService]:
    with serving_contracts(Keys.parse(f"studio: {SECRET}", "the test")) as made:
        yield made


@contextlib.contextmanager
def ending(bridge: Bridge) -> Iterator[Bridge]:
    """Ends a bridge that has not ended by itself."""
    try:
        yield bridge
    finally:
        bridge.process.send_signal(signal.SIGINT)
        bridge.process.wait(120)


@pytest.mark.parametrize("kind", PLAYS)
def test_a_game_joins_over_tls_with_a_key_and_loses_no_tick_of_a_connection_that_is_cut(
    kind: str, service: ContractService, tmp_path: Path
) -> None:
    pem = certificate(tmp_path)
    with (
        tls_proxy(service.urls["ws"].removeprefix("ws://"), pem, cuts=[60, 10, 5]) as (proxy, address),
        ending(Bridge(tmp_path, kind, f"wss://{address}", trusts=pem)) as bridge,
    ):
        steps = PLAYS[kind](bridge.port)
        until(lambda: all(session.ended for session in service.sessions), "the game has left")
    assert proxy.connections == 4, "also the bridge's, before the game's"
    assert sum(len(session.ticks) for session in service.sessions) == steps
    assert sum(session.last is None for session in service.sessions) == 4, "the last episodes, as the game left"


@pytest.mark.parametrize("kind", PLAYS)
@pytest.mark.parametrize(
    ("trusts", "secret", "why"),
    [
        (False, SECRET, "certificate verify failed.* name the certificate's file in the environment variable SSL_CERT"),
        (True, SECRET[::-1], "'key' is unknown, or .*: sign with a line of the service's keys file"),
    ],
)
def test_a_service_that_it_does_not_trust_or_that_refuses_its_key_ends_it_in_one_line_before_a_build_starts(
    kind: str, trusts: bool, secret: str, why: str, service: ContractService, tmp_path: Path
) -> None:
    pem, build = certificate(tmp_path), tmp_path / "started"
    with (
        tls_proxy(service.urls["ws"].removeprefix("ws://"), pem) as (_, address),
        ending(
            Bridge(
                tmp_path, kind, f"wss://{address}", "--command", f"touch {build}",
                secret=secret, trusts=pem if trusts else None,
            )
        ) as bridge,
    ):  # fmt: skip
        assert bridge.process.wait(30) == 1
    assert re.search(rf"^brayx: .*{why}", bridge.err)
    assert len(bridge.err.splitlines()) == 1, "why it ends"
    assert not build.exists()
    assert not service.sessions


@pytest.mark.parametrize("kind", PLAYS)
def test_a_service_that_comes_up_later_is_waited_for(kind: str, tmp_path: Path) -> None:
    port = free_port()
    with ending(Bridge(tmp_path, kind, f"tcp://127.0.0.1:{port}")) as bridge:
        until(lambda: "waiting for" in bridge.err or bridge.process.poll() is not None, "it waits")
        with serving_contracts(Keys.parse(f"studio: {SECRET}", "the test"), tcp_port=port) as service:
            steps = PLAYS[kind](bridge.port)
            until(lambda: all(session.ended for session in service.sessions), "the game has left")
    assert sum(len(session.ticks) for session in service.sessions) == steps
    place = f"tcp://127.0.0.1:{port}"
    assert re.search(
        rf": waiting for {place}: .*; giving up after 60 s\n(.*\n)*.*: plays at {place}\n.*listens at", bridge.err
    )


def test_a_service_that_does_not_come_up_is_given_up(tmp_path: Path) -> None:
    with ending(Bridge(tmp_path, "godot", f"tcp://127.0.0.1:{free_port()}", "--give-up-after-s", "0")) as bridge:
        assert bridge.process.wait(30) == 1
    gives_up, why = bridge.err.splitlines()
    assert re.search(r": given up after 0.0 s \(failed tries: 1\); --give-up-after-s changes when$", gives_up)
    assert why.startswith("brayx: ")
