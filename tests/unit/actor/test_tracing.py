"""Ticks of sampled traces become spans, at every door; other ticks do not. The spans go to the SDK's own exporter."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import closing
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread
from urllib.request import urlopen

import numpy as np
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from prometheus_client.openmetrics.parser import text_string_to_metric_families

import brayx
from brayx.actor.agent import Agent, Services, State
from brayx.actor.agent_actor import AgentActorFactory
from brayx.actor.config import ActorConfig
from brayx.actor.host import LocalHost
from brayx.actor.serving import Runtime, tracing_of
from brayx.actor.tick_times import _LOT
from brayx.actor.tracing import TickTracing
from brayx.errors import AgentError, ConfigError
from brayx.gamecore.client import Client
from brayx.gamecore.protocol import StepKind, StepRequest
from brayx.gamecore.transports import connect
from brayx.metrics import Recorder
from brayx.types import Forward

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
SAMPLED = f"00-{TRACE}-{PARENT}-01"
UNSAMPLED = f"00-{TRACE}-{PARENT}-00"


class Model:
    """Doubles its observation; its batches have three rows."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder

    async def forward(self, obs: np.ndarray, *, deadline_s: float | None = None) -> Forward:
        self._recorder.add("forward_batch_size", 3.0)
        self._recorder.add("forward_seconds", 1e-4)
        return Forward(2 * obs, 7)


class Doubles(Agent):
    async def on_tick(self, state: State) -> None:
        if state.input == "raise":
            raise ValueError("as asked")
        outputs, _ = await brayx.forward("model", np.float32(state.input["obs"]))
        state.output = {"action": float(outputs)}


class Traced:
    """A host whose actor's spans are in memory."""

    def __init__(self) -> None:
        self.exporter = InMemorySpanExporter()
        provider = TracerProvider(shutdown_on_exit=False)
        provider.add_span_processor(SimpleSpanProcessor(self.exporter))
        recorder = Recorder()
        tracing = TickTracing(provider, recorder)
        services = Services({"model": Model(recorder)}, {}, recorder)
        factory = AgentActorFactory({"agent": Doubles}, {}, services, recorders=[tracing])
        config = ActorConfig(agents=["agent"], port=0, native_port=0, tcp_port=0, grpc_port=0)
        self.host = LocalHost(config, Runtime(factory, recorder))
        self.host.export(recorder)

    def spans(self) -> dict[str, ReadableSpan]:
        """The spans so far, by name; they are all of one tick."""
        spans = {span.name: span for span in self.exporter.get_finished_spans()}
        assert len(spans) == len(self.exporter.get_finished_spans())
        self.exporter.clear()
        return spans


@pytest.fixture(scope="module")
def host() -> Iterator[Traced]:
    traced = Traced()
    traced.host.open()
    yield traced
    traced.host.close()


@pytest.fixture
def traced(host: Traced) -> Traced:
    host.exporter.clear()
    return host


def parents(spans: dict[str, ReadableSpan]) -> dict[str, str]:
    """The name of each span's parent; ``client``: the span that the client named."""
    names = {span.context.span_id: name for name, span in spans.items()} | {int(PARENT, 16): "client"}
    return {name: names[span.parent.span_id] for name, span in spans.items()}


@pytest.mark.parametrize("door", ["http", "ws", "tcp", "grpc"])
def test_a_tick_of_a_sampled_trace_is_a_tree_of_spans_at_every_door(traced: Traced, door: str) -> None:
    with Client(traced.host.urls[door]) as client:
        session = client.start(json.dumps({"traceparent": SAMPLED})) and client.session
        assert json.loads(client.tick('{"obs": 1.5}')) == {"action": 3.0}
        spans = traced.spans()
        assert parents(spans) == {
            "tick": "client", "door": "tick", "decode": "tick", "agents": "tick", "model": "agents", "batch": "model",
            "encode": "tick",
        }  # fmt: skip
        assert {f"{span.context.trace_id:032x}" for span in spans.values()} == {TRACE}
        assert dict(spans["tick"].attributes or {}) == {"brayx.session": session, "brayx.tick": 0}
        assert dict(spans["model"].attributes or {}) == {"brayx.model": "model", "brayx.policy_version": 7}
        assert dict(spans["batch"].attributes or {}) == {"brayx.batch_size": 3.0}
        for span in spans.values():
            parent = spans.get(parents(spans)[span.name], span)
            assert parent.start_time <= span.start_time <= span.end_time <= parent.end_time
        client.stop()


@pytest.mark.parametrize("traceparent", ["", UNSAMPLED, "no traceparent", f"00-{'0' * 32}-{PARENT}-01"])
def test_other_ticks_make_no_spans(traced: Traced, traceparent: str) -> None:
    with Client(traced.host.urls["http"]) as client:
        client.start(json.dumps({"traceparent": traceparent}))
        client.tick('{"obs": 1.5}')
        client.stop()
    assert not traced.spans()


@pytest.mark.parametrize("door", ["http", "ws"])
def test_a_header_names_the_trace_and_each_request_over_http_may_name_another(traced: Traced, door: str) -> None:
    with closing(connect(traced.host.urls[door])) as transport:

        def step(kind: StepKind, traceparent: str, body: bytes = b'{"obs": 1}') -> None:
            transport.step(StepRequest(kind, "headers", body, traceparent=traceparent), 30.0)

        step(StepKind.START, SAMPLED, b"")
        step(StepKind.TICK, "")
        assert parents(traced.spans())["tick"] == "client"
        if door == "http":
            step(StepKind.TICK, UNSAMPLED)
            assert not traced.spans()
            step(StepKind.TICK, SAMPLED.replace(PARENT, "1234567890abcdef"))
            parent = traced.spans()["tick"].parent
            assert parent is not None
            assert f"{parent.span_id:016x}" == "1234567890abcdef"
        step(StepKind.STOP, "", b"")


def test_metrics_name_the_trace_of_a_tick_beside_the_bucket_of_its_time(traced: Traced) -> None:
    trace = "0af7651916cd43dd8448eb211c80319c"
    with Client(traced.host.urls["http"]) as client:
        client.start(json.dumps({"traceparent": SAMPLED.replace(TRACE, trace)}))
        for _ in range(_LOT):  # times are recorded in lots
            client.tick('{"obs": 1.5}')
        client.stop()
    spans = [span for span in traced.exporter.get_finished_spans() if span.name == "tick"]
    seconds = [(span.end_time - span.start_time) / 1e9 for span in spans if span.end_time and span.start_time]
    with urlopen(f"{traced.host.urls['http']}/metrics", timeout=30) as reply:
        families = list(text_string_to_metric_families(reply.read().decode()))
    exemplars = {
        sample.exemplar.labels["trace_id"]: sample for f in families for sample in f.samples if sample.exemplar
    }
    bucket = exemplars[trace]
    assert bucket.name == "ray_brayx_tick_seconds_bucket"
    assert min(abs(bucket.exemplar.value - its) for its in seconds) < 1e-5


def test_the_span_of_a_tick_that_failed_says_why(traced: Traced) -> None:
    with Client(traced.host.urls["tcp"]) as client:
        client.start(json.dumps({"traceparent": SAMPLED}))
        with pytest.raises(AgentError):
            client.tick('"raise"')
    spans = traced.spans()
    assert not spans["tick"].status.is_ok
    assert "ValueError" in (spans["tick"].status.description or "")
    assert spans.keys() == {"tick", "door", "decode"}


def test_tracing_is_off_by_default_and_says_what_it_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    config = ActorConfig(agents=["agent"])
    assert tracing_of(config, "pong", Recorder()) == []
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    with pytest.raises(ConfigError, match=r"pip install 'brayx\[tracing\]'"):
        tracing_of(config.model_copy(update={"tracing": True}), "pong", Recorder())


def test_it_sends_to_the_collector_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    received = ExportTraceServiceRequest()

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            received.MergeFromString(self.rfile.read(int(self.headers["content-length"])))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            """Says nothing."""

    with HTTPServer(("127.0.0.1", 0), Collector) as collector:
        thread = Thread(target=collector.serve_forever)
        thread.start()
        try:
            monkeypatch.delenv("OTEL_SERVICE_NAME", raising=False)
            monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{collector.server_port}")
            (tracing,) = tracing_of(ActorConfig(agents=["agent"], tracing=True), "pong", Recorder())
            log = tracing.open("session", b"", "", "", b"", "")
            log.trace(SAMPLED)
            log.tick(State("session", tick=3), b"", b"", began=1.0, arrived=1.0)
            tracing.close()
        finally:
            collector.shutdown()
            thread.join()
    (resource,) = received.resource_spans
    attributes = {attribute.key: attribute.value.string_value for attribute in resource.resource.attributes}
    assert attributes["service.name"] == "pong"
    assert sorted(span.name for span in resource.scope_spans[0].spans) == ["door", "tick"]
    assert {span.trace_id.hex() for span in resource.scope_spans[0].spans} == {TRACE}
