"""A collector of OpenTelemetry on loopback: it takes OTLP over HTTP and decodes what it got."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from servers import Server

TRACES, METRICS = "/v1/traces", "/v1/metrics"


@dataclass(frozen=True)
class Span:
    """A span as it was sent."""

    name: str
    trace: str
    id: str
    parent: str
    start: int
    end: int
    about: dict[str, Any]
    events: list[tuple[str, dict[str, Any]]]
    links: list[tuple[str, str]]
    failed: bool
    why: str
    resource: dict[str, Any]
    scope: tuple[str, str]


@dataclass(frozen=True)
class Point:
    """A value of a metric, or the count of a histogram's values and their sum."""

    name: str
    unit: str
    kind: str
    value: float
    count: int
    about: dict[str, Any]


def plain(attributes: Any) -> dict[str, Any]:
    """Attributes by their names."""
    return {each.key: getattr(each.value, each.value.WhichOneof("value")) for each in attributes}


def bodies(server: Server, path: str) -> list[bytes]:
    return [body for _, where, body in list(server.got) if where.endswith(path)]


def spans_of(server: Server) -> list[Span]:
    """All spans, in the order in which they were sent."""
    return [
        Span(
            each.name,
            each.trace_id.hex(),
            each.span_id.hex(),
            each.parent_span_id.hex(),
            each.start_time_unix_nano,
            each.end_time_unix_nano,
            plain(each.attributes),
            [(event.name, plain(event.attributes)) for event in each.events],
            [(link.trace_id.hex(), link.span_id.hex()) for link in each.links],
            each.status.code == each.status.STATUS_CODE_ERROR,
            each.status.message,
            plain(group.resource.attributes),
            (scope.scope.name, scope.scope.version),
        )
        for body in bodies(server, TRACES)
        for group in ExportTraceServiceRequest.FromString(body).resource_spans
        for scope in group.scope_spans
        for each in scope.spans
    ]


def points_of(server: Server) -> list[Point]:
    """All values of the newest export of metrics."""
    found: list[Point] = []
    for group in ExportMetricsServiceRequest.FromString(bodies(server, METRICS)[-1]).resource_metrics:
        for each in (metric for scope in group.scope_metrics for metric in scope.metrics):
            kind = each.WhichOneof("data")
            for point in getattr(each, kind).data_points:
                if kind == "histogram":
                    value, count = point.sum, point.count
                else:
                    value, count = getattr(point, point.WhichOneof("value")), 1
                found.append(Point(each.name, each.unit, kind, value, count, plain(point.attributes)))
    return found


def check_spans(spans: list[Span]) -> Span:
    """Check that the spans are one tree whose children lie within their parents; return its root."""
    by_id = {each.id: each for each in spans}
    assert len(by_id) == len(spans), "two spans have the same id"
    assert len({each.trace for each in spans}) == 1
    (root,) = (each for each in spans if each.parent not in by_id)
    for each in spans:
        assert each.start <= each.end, each.name
        if each is not root:
            parent = by_id[each.parent]
            assert parent.start <= each.start and each.end <= parent.end, (each.name, parent.name)
    return root


def path_to(span: Span, spans: list[Span]) -> list[str]:
    """The names from the root to a span."""
    by_id = {each.id: each for each in spans}
    names = [span.name]
    while span.parent in by_id:
        span = by_id[span.parent]
        names.insert(0, span.name)
    return names
