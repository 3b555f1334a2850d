"""The table of doors."""

from __future__ import annotations

import pytest

from brayx.actor.config import ActorConfig
from brayx.errors import ConfigError
from brayx.gamecore.doors import BY_SCHEME, DOORS, Door, http_urls
from brayx.gamecore.transports import connect, connect_async
from brayx.gamecore.transports.base import Endpoint


@pytest.mark.parametrize("door", DOORS.values(), ids=DOORS)
async def test_a_row_names_what_exists(door: Door) -> None:
    assert door.option in ActorConfig.model_fields
    for scheme in door.schemes:
        blocking, concurrent = connect(f"{scheme}://127.0.0.1"), connect_async(f"{scheme}://127.0.0.1")
        assert (type(blocking).__name__, type(concurrent).__name__) == (door.transport, f"Async{door.transport}")
        blocking.close()
        await concurrent.close()


def test_a_scheme_belongs_to_one_door() -> None:
    assert len(BY_SCHEME) == sum(len(door.schemes) for door in DOORS.values())
    for scheme, door in BY_SCHEME.items():
        endpoint = Endpoint.parse(f"{scheme}://game.example")
        assert (endpoint.door, endpoint.port) == (door, door.schemes[scheme])


def test_paths_and_compression_are_refused_by_doors_without_them() -> None:
    for name, door in DOORS.items():
        for url, compress, allowed in (
            (f"{name}://h/application", False, door.has_paths),
            (f"{name}://h", True, door.compresses),
        ):
            if allowed:
                Endpoint.parse(url, compress=compress)
            else:
                with pytest.raises(ConfigError):
                    Endpoint.parse(url, compress=compress)


def test_doors_at_an_http_port_share_its_address() -> None:
    assert http_urls("h:1/app") == {"http": "http://h:1/app", "ws": "ws://h:1/app"}
