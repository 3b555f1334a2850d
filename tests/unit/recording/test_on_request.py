"""Sessions that ask for their recording, over every door of a real host."""

from __future__ import annotations

import http.client
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from websockets.sync.client import connect

from brayx.actor.agent import Agent, Services, State
from brayx.actor.agent_actor import AgentActorFactory
from brayx.actor.codec import Codec
from brayx.actor.config import ActorConfig
from brayx.actor.host import LocalHost
from brayx.actor.serving import Runtime
from brayx.errors import ProtocolError
from brayx.gamecore.client import Client
from brayx.gamecore.protocol import StepKind, StepRequest
from brayx.gamecore.tcp import RequestReader, encode_request
from brayx.metrics import Recorder
from brayx.recording import open as open_recordings
from brayx.recording.config import RecordingConfig
from brayx.recording.recorder import SessionRecorder

DOORS = ("http", "ws", "tcp", "grpc")


class Echo(Agent):
    async def on_tick(self, state: State) -> None:
        state.output = state.input


@contextmanager
def host(folder: Path, **options: bool) -> Iterator[LocalHost]:
    metrics = Recorder()
    recorder = SessionRecorder(RecordingConfig(folder=str(folder), every=0, errors=False, **options), metrics)  # type: ignore[arg-type]
    factory = AgentActorFactory({"echo": Echo}, {}, Services(), Codec(None), recorders=[recorder])
    config = ActorConfig(agents=["echo"], port=0, native_port=None, tcp_port=0, grpc_port=0)
    local_host = LocalHost(config, Runtime(factory, metrics))
    local_host.open()
    try:
        yield local_host
    finally:
        local_host.close()
        recorder.close(60.0)


def test_a_session_is_recorded_over_each_door_if_its_start_asks(tmp_path: Path) -> None:
    with host(tmp_path, on_request=True) as served:
        for door in DOORS:
            for record in (True, False):
                for reconnect_s in (None, 1.0):
                    with Client(served.urls[door], reconnect_s=reconnect_s) as client:
                        client.start(b"", f"{door}-{record}-{reconnect_s}", record=record)
                        assert client.tick(b"a") == b"a"
                        client.stop()
        url = served.urls["ws"] + "/session?session={}"
        for query, headers in (("in-url&record=1", {}), ("in-header", {"record": "1"}), ("no&record=0", {})):
            with connect(url.format(query), additional_headers=headers, proxy=None) as socket:
                socket.send(b"a")
                assert socket.recv() == b"a"
    reasons = {episode.session: episode.why for episode in open_recordings(str(tmp_path))}
    requested = {f"{door}-True-{reconnect_s}" for door in DOORS for reconnect_s in (None, 1.0)}
    assert reasons == dict.fromkeys(requested | {"in-url", "in-header"}, "requested")


@pytest.mark.parametrize("door", DOORS)
def test_a_start_that_asks_is_refused_where_that_is_off(tmp_path: Path, door: str) -> None:
    with host(tmp_path) as served, Client(served.urls[door]) as client:
        with pytest.raises(ProtocolError, match="does not record sessions on request"):
            client.start(b"", "s", record=True)
        client.start(b"", "s")
        client.stop()
    assert not list(tmp_path.iterdir())


def test_a_header_that_says_neither_yes_nor_no_is_refused(tmp_path: Path) -> None:
    with host(tmp_path, on_request=True) as served:
        connection = http.client.HTTPConnection(urlsplit(served.urls["http"]).netloc, timeout=30)
        connection.request("POST", "/step", b"", {"session": "s", "step_kind": "start", "record": "maybe"})
        response = connection.getresponse()
        assert (response.status, b"header 'record' is 'maybe', expected 1 or 0" in response.read()) == (400, True)
        connection.close()


def test_a_tcp_frame_asks_in_its_step_kind() -> None:
    request = StepRequest(StepKind.START, "s", b"", seq=0, record=True)
    frame = encode_request(request, 1)
    assert b"start+record#0" in frame
    ((_, _, read),) = RequestReader().feed(frame)
    assert isinstance(read, StepRequest)
    assert (read.kind, read.seq, read.record) == (StepKind.START, 0, True)
    tick = StepRequest(StepKind.TICK, "s", b"", record=True)
    ((_, _, refused),) = RequestReader().feed(encode_request(tick, 1))
    assert isinstance(refused, ProtocolError)
    assert "only a start asks for a recording" in str(refused)
