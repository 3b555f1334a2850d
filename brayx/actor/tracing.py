"""Spans of ticks for OpenTelemetry, as parts of the trace that a client names by a W3C ``traceparent``.

Off unless ``actor.tracing``, and needs the extra ``tracing``. Only ticks of traces that the client samples are sent: a
tick of any other session costs nothing here. Spans wait in the SDK's queue, which drops what exceeds its bound. Knows
nothing of doors.
"""

from __future__ import annotations

import os
import threading
import time

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import SpanKind, Status, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

import brayx.clock as clock
from brayx.actor.agent import State
from brayx.actor.logs import SessionLog
from brayx.metrics import Recorder
from brayx.types import Forward

_CLOSE_S = 5.0
_W3C = TraceContextTextMapPropagator()


class TickTracing:
    """Opens a log for each session that makes spans of its ticks.

    Args:
        provider: gets the spans.
        recorder: has the newest batch of the process's models, and gets the ids of ticks' traces.
    """

    on_request = False

    def __init__(self, provider: TracerProvider, recorder: Recorder) -> None:
        self._provider = provider
        self._tracer = provider.get_tracer("brayx")
        self._recorder = recorder

    @classmethod
    def exporting(cls, service: str, recorder: Recorder) -> TickTracing:
        """Sends the spans to a collector by OTLP over HTTP; the environment's ``OTEL_…`` variables say where.

        Args:
            service: ``service.name`` of the spans, unless ``OTEL_SERVICE_NAME`` is set.
            recorder: as for the constructor.

        Raises:
            ImportError: the exporter is not installed.
        """
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

        resource = Resource.create({"service.name": os.environ.get("OTEL_SERVICE_NAME") or service})
        provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
        return cls(provider, recorder)

    def open(self, session: str, start: bytes, player: str, why: str, reply: bytes, alias: str) -> SessionLog:
        """See `SessionLogOpener.open`."""
        return _TickSpans(self._tracer, self._recorder, session)

    def close(self) -> None:
        """Sends the last spans; gives up what takes longer than `_CLOSE_S`. May be called again."""
        # A daemon thread, since the SDK waits for half a minute if the collector does not answer.
        closing = threading.Thread(target=self._provider.shutdown, name="brayx-tracing-end", daemon=True)
        closing.start()
        closing.join(_CLOSE_S)


class _TickSpans(SessionLog):
    """Makes the spans of one session's ticks, while the client's trace is sampled."""

    is_taking = False

    def __init__(self, tracer: trace.Tracer, recorder: Recorder, session: str) -> None:
        self._tracer = tracer
        self._recorder = recorder
        self._session = session
        self._parent = Context()
        self._trace_id = ""
        self._phases: list[tuple[str, float]] = []
        self._forwards: list[tuple[str, int, float, float, tuple[float | None, float | None]]] = []

    def trace(self, traceparent: str) -> None:
        """See `SessionLog.trace`. One that is malformed names no trace."""
        self._parent = _W3C.extract({"traceparent": traceparent}, Context())
        parent = trace.get_current_span(self._parent).get_span_context()
        self.is_taking = parent.trace_flags.sampled
        self._trace_id = trace.format_trace_id(parent.trace_id)

    def phase(self, name: str) -> None:
        """See `SessionLog.phase`."""
        self._phases.append((name, clock.now()))

    def forward(self, model: str, forward: Forward, seconds: float) -> None:
        """See `SessionLog.forward`."""
        now, last = clock.now(), self._recorder.last
        batch = last("forward_batch_size"), last("forward_seconds")
        self._forwards.append((model, forward.policy_version, now - seconds, now, batch))

    def failed(self, state: State, body: bytes, began: float, arrived: float, why: str) -> None:
        """See `SessionLog.failed`."""
        if self.is_taking:
            self._end(state.tick, began, arrived, why)

    def tick(self, state: State, body: bytes, reply: bytes, began: float, arrived: float) -> None:
        """See `SessionLog.tick`."""
        self._end(state.tick, began, arrived, "")

    def _end(self, number: int, began: float, arrived: float, why: str) -> None:
        now = clock.now()
        offset_s = time.time() - now
        phases, self._phases = self._phases, []
        forwards, self._forwards = self._forwards, []

        def span(name: str, start: float, end: float, parent: Context, **attributes: str | float) -> Context:
            kind = SpanKind.SERVER if parent is self._parent else SpanKind.INTERNAL
            named = {f"brayx.{key}": value for key, value in attributes.items()}
            made = self._tracer.start_span(name, parent, kind, named, start_time=_nanoseconds(start + offset_s))
            if why and parent is self._parent:
                made.set_status(Status(StatusCode.ERROR, why))
            made.end(_nanoseconds(end + offset_s))
            return trace.set_span_in_context(made, parent)

        tick = span("tick", arrived, now, self._parent, session=self._session, tick=number)
        if not why:
            self._recorder.trace("tick_seconds", now - arrived, self._trace_id)
        span("door", arrived, began, tick)
        start, agents = began, tick
        for name, end in phases:
            context = span(name, start, end, tick)
            agents = context if name == "agents" else agents
            start = end
        if len(phases) == 2:
            span("encode", start, now, tick)
        for model, version, called, answered, (rows, seconds) in forwards:
            forward = span("model", called, answered, agents, model=model, policy_version=version)
            if rows is not None and seconds is not None:
                span("batch", max(called, answered - seconds), answered, forward, batch_size=rows)


def _nanoseconds(seconds: float) -> int:
    return int(seconds * 1e9)
