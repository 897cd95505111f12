"""A hook that traces a run into memory."""

from __future__ import annotations

from typing import Any

from hookline import Hook
from hookline.hooks._spans import RunSpans, SpanIds


class Traces(Hook):
    """Traces a run into memory, without the thread of the real hook."""

    def __init__(self, every: int = 1) -> None:
        self.every = every
        self.durations: list[str] = []
        self.spans: list[Any] = []

    def setup(self, state: Any) -> None:
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import SimpleSpanProcessor
        from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

        ids: Any = SpanIds()
        provider = TracerProvider(shutdown_on_exit=False, id_generator=ids)
        self.exported = InMemorySpanExporter()
        provider.add_span_processor(SimpleSpanProcessor(self.exported))
        entry = state.hooks.entry("traces")
        self.run = RunSpans(
            provider.get_tracer("test"),
            state,
            entry,
            {},
            lambda *given: self.durations.append(given[0]),
            self.every,
        )
        self.run.start(None, on_teardown=self.close)

    def close(self) -> None:
        self.run.close()
        self.spans = list(self.exported.get_finished_spans())

    def named(self, name: str) -> list[Any]:
        return [each for each in self.spans if each.name == name]

    def parent_of(self, span: Any) -> str:
        (found,) = (each.name for each in self.spans if each.context.span_id == span.parent.span_id)
        return str(found)
