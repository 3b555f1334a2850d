"""The page and the status at ``/``, and scripts of other origins, at both HTTP doors."""

from __future__ import annotations

import http.client
import json
import shlex
from collections.abc import Iterator
from contextlib import closing
from html import unescape
from typing import Any

import pytest
from pydantic import ValidationError

from brayx.actor.config import ActorConfig
from brayx.actor.doors.answers import page
from brayx.actor.doors.asgi import DoorApp
from brayx.gamecore.browser import Cors
from tests.unit.actor.doors.native_doors import native
from tests.unit.actor.doors.test_asgi import TableService
from tests.unit.gamecore.echo_server import serving

BROWSER = "text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8"
FACTS = {"service": "brayx", "application": "<b>arena", "sessions": 3, "doors": {"tcp": "tcp://127.0.0.1:8101"}}


class StatusService(TableService):
    """A service with a fixed status; scripts of every origin may call it."""

    cors = Cors(["*"])

    def status(self) -> dict[str, Any]:
        return FACTS


@pytest.fixture(params=["native", "asgi"])
def door(request: pytest.FixtureRequest) -> Iterator[tuple[str, TableService]]:
    """The address and the service of a door."""
    if request.param == "asgi":
        service = StatusService()
        with serving(DoorApp(service)) as address:
            yield address, service
    else:
        with native(table=StatusService) as made:
            yield made.url.removeprefix("http://"), made.table


@pytest.fixture
def address(door: tuple[str, TableService]) -> str:
    return door[0]


def call(address: str, method: str, path: str, **headers: str) -> tuple[int, dict[str, str], str]:
    with closing(http.client.HTTPConnection(address, timeout=10)) as connection:
        connection.request(method, path, headers=headers)
        response = connection.getresponse()
        return response.status, {name.lower(): value for name, value in response.getheaders()}, response.read().decode()


def test_a_program_gets_json_and_a_browser_a_page(address: str) -> None:
    for accept in ({}, {"accept": "*/*"}, {"accept": "application/json"}):
        status, headers, body = call(address, "GET", "/", **accept)
        assert (status, headers["content-type"], json.loads(body)) == (200, "application/json", FACTS)
    status, headers, body = call(address, "GET", "/", accept=BROWSER)
    assert (status, headers["content-type"]) == (200, "text/html; charset=utf-8")
    assert body == page(FACTS)


def test_a_browsers_request_for_an_icon_does_not_count_as_a_refusal(door: tuple[str, TableService]) -> None:
    address, service = door
    for path, refused in (("/favicon.ico", 0), ("/other.ico", 1)):
        assert call(address, "GET", path)[0] == 404
        assert service.recorder.summary().get("requests_refused.bad_request", 0) == refused, path


def test_a_star_allows_every_origin(address: str) -> None:
    for method, path in (("OPTIONS", "/step"), ("OPTIONS", "/"), ("GET", "/")):
        status, headers, _ = call(address, method, path, origin="http://localhost:3000")
        assert (status, headers["access-control-allow-origin"]) == (200, "*"), (method, path)
        assert "vary" not in headers
    status, headers, _ = call(address, "OPTIONS", "/other", origin="http://localhost:3000")
    assert (status, headers["access-control-allow-origin"]) == (404, "*")
    assert "access-control-allow-origin" not in call(address, "GET", "/")[1]


def test_the_page_says_what_is_served_and_how_to_call_it() -> None:
    html = page(
        {**FACTS, "mode": "serve", "draining": False, "policy_versions": {"model": 7}, "registered": {"model": []}}
    )
    for text in ("&lt;b&gt;arena", "<td>serve</td>", "<td>no</td>", "model: 7", "model: none", "tcp://127.0.0.1:8101"):
        assert text in html
    assert "<b>" not in html
    assert "step_kind: tick" in html
    assert "{{" not in html
    assert '"reward": 0}' in html


def test_the_page_has_the_bodies_of_its_own_job_and_leads_to_the_console() -> None:
    example = {"start": '{"name": "it\'s"}', "tick": '{"x": [1, 2]}'}
    html = page({**FACTS, "example": example, "console": "http://127.0.0.1:8110"})
    assert '<a href="http://127.0.0.1:8110">' in html
    lines = unescape(html).replace("\\\n", "").splitlines()
    calls = [shlex.split(line.removeprefix("<pre>").removesuffix("</pre>")) for line in lines if "curl -X" in line]
    bodies = [call[call.index("-d") + 1] if "-d" in call else None for call in calls]
    assert bodies == [example["start"], example["tick"], None]
    assert "obs" not in html


@pytest.mark.parametrize("origin", ["play.example.com", "https://play.example.com/", "https://*.example.com", ""])
def test_a_bad_origin_is_refused(origin: str) -> None:
    with pytest.raises(ValidationError, match="scheme, host and port"):
        ActorConfig(agents=["a"], cors_origins=[origin])
    assert ActorConfig(agents=["a"], cors_origins=["*", "http://localhost:3000"]).cors_origins
