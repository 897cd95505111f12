"""Export traces and metrics of a run with OpenTelemetry: to a collector, or by the program's providers."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import socket
import uuid
from collections.abc import Mapping
from typing import Any, Literal

from hookline._version import __version__
from hookline.engine.checks import Count, Timeout, check_choice, refused
from hookline.engine.hook import Hook
from hookline.hooks._instruments import RunMetrics
from hookline.hooks._otlp import OTLPSender, SecretHeaders
from hookline.hooks._outbox import Secret
from hookline.hooks._spans import RunSpans, SpanIds
from hookline.util.errors import OptionError, missing_package

SCOPE = "hookline"
"""The name of the tracer and of the meter."""
PACKAGES = ("opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.http")


class OpenTelemetry(Hook):
    """Exports spans of the run, its epochs, validations, checkpoints and hook calls, and of every n-th step;
    and metrics: logged values, counters, durations.

    A thread sends them over OTLP/HTTP, by default to http://localhost:4318. A collector that is down or slow
    does not affect the run: spans are dropped and counted. Headers and addresses are not shown anywhere.
    """

    tier = "builtin"
    observes = True
    order = 1000
    """After all others, so that rows have their final values."""
    on_error = "warn"

    def __init__(
        self,
        every: int = 50,
        endpoint: str | None = None,
        headers: Mapping[str, str] | None = None,
        service_name: str | None = None,
        ranks: Literal["zero", "all"] = "zero",
        traces: bool | None = None,
        metrics: bool | None = None,
        interval: float = 10.0,
        timeout: float = 5.0,
        queue_size: int = 4096,
        provider: Literal["own", "global"] = "own",
    ) -> None:
        """`every`: steps from one sampled step to the next; 0 for no spans of steps and batches.

        `endpoint`: the base address of the collector, or `env:NAME`; by default OTEL_EXPORTER_OTLP_ENDPOINT.
        `headers`: by name, each a text or `env:NAME`; by default OTEL_EXPORTER_OTLP_HEADERS. `service_name`:
        by default OTEL_SERVICE_NAME, or 'hookline'. `ranks`: 'zero', or 'all' ranks, in one trace. `traces`,
        `metrics`: whether to export them; by default unless OTEL_TRACES_EXPORTER or OTEL_METRICS_EXPORTER is
        'none'. `interval`: seconds between two exports. `timeout`: seconds for a request, and at most for the
        last export at the end of a run. `queue_size`: spans that wait. `provider`: 'global' uses the
        TracerProvider and the MeterProvider that the program has set, and their exporters.
        """
        address = None if endpoint is None else Secret(endpoint, "endpoint")
        secrets = SecretHeaders(headers)
        is_given = endpoint is not None or headers is not None or service_name is not None
        endpoint = headers = None  # an error below may be shown with the variables of this function
        for problem in (address.problem if address is not None else "", secrets.problem):
            if problem:
                raise OptionError(f"OpenTelemetry: {problem}")
        Count(0)("OpenTelemetry: every", every)
        Timeout(0.1)("OpenTelemetry: interval", interval)
        Timeout(0.001)("OpenTelemetry: timeout", timeout)
        Count(1)("OpenTelemetry: queue_size", queue_size)
        check_choice("OpenTelemetry: ranks", ranks, ("zero", "all"))
        check_choice("OpenTelemetry: provider", provider, ("own", "global"))
        for name, switch in (("traces", traces), ("metrics", metrics)):
            if switch is not None and not isinstance(switch, bool):
                raise refused(f"OpenTelemetry: {name}", switch, "True, False or None")
        if service_name is not None and not (
            isinstance(service_name, str) and service_name.strip() and service_name.isprintable()
        ):
            raise refused("OpenTelemetry: service_name", service_name, "a text")
        if provider == "global" and is_given:
            raise OptionError(
                "OpenTelemetry: endpoint, headers and service_name have no effect with provider='global', "
                "because the program's providers have their own. Leave them out."
            )
        _check_packages(PACKAGES if provider == "own" else PACKAGES[:1])
        self.every, self.ranks, self.provider, self.service_name = every, ranks, provider, service_name
        self.interval, self.timeout, self.queue_size = float(interval), float(timeout), queue_size
        self.traces = _is_wanted("OTEL_TRACES_EXPORTER") if traces is None else traces
        self.metrics = _is_wanted("OTEL_METRICS_EXPORTER") if metrics is None else metrics
        self._address, self._headers = address, secrets
        self._telemetry: Telemetry | None = None
        self._former: dict[str, str] = {}
        """The trace and span id of the run, or of the run that this one continues."""

    def state_dict(self) -> dict[str, Any]:
        return dict(self._former)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self._telemetry is not None:
            self._telemetry.link(state)
        else:
            self._former = {name: str(state[name]) for name in ("trace_id", "span_id") if name in state}

    def setup(self, state: Any) -> None:
        self._close()  # of a run that ended without teardown
        self._telemetry = Telemetry(self, state)
        self._former = self._telemetry.start(self._address, self._headers)

    def on_train_metrics(self) -> None:
        """Do nothing. Listening makes the run write rows, also without loggers."""

    def teardown(self) -> None:
        if self._telemetry is not None and not self._telemetry.closes_later:
            self._close()

    def _close(self) -> None:
        telemetry, self._telemetry = self._telemetry, None
        if telemetry is not None:
            telemetry.close()


class Telemetry:
    """The spans, the metrics and the sender of one run."""

    def __init__(self, hook: OpenTelemetry, state: Any) -> None:
        self._hook, self._state = hook, state
        self._sender: OTLPSender | None = None
        self._spans: RunSpans | None = None
        self._metrics: RunMetrics | None = None

    def start(self, address: Secret | None, headers: SecretHeaders) -> dict[str, str]:
        """Begin to export. Return the trace and span id of the run's span, of rank zero."""
        hook, s = self._hook, self._state
        ranks = _ranks_of(s) if hook.ranks == "all" else None
        run_id = _run_id(s)
        shared: dict[str, str] = {}
        failure: Exception | None = None
        if s.rank == 0 or ranks is None:
            try:
                shared = self._begin(address, headers, run_id, _parent_of_environment())
            except Exception as error:  # the other ranks wait for what this one shares
                failure = error
        if ranks is not None:
            shared = ranks.from_zero({**shared, "run": run_id} if failure is None else {})
            if s.rank != 0 and shared:
                self._begin(address, headers, shared["run"], _remote(shared))
        if failure is not None:
            raise failure
        return {name: shared[name] for name in ("trace_id", "span_id") if name in shared}

    def _begin(
        self, address: Secret | None, headers: SecretHeaders, run_id: str, parent: Any
    ) -> dict[str, str]:
        hook, s = self._hook, self._state
        common = {
            "hookline.run.id": run_id,
            "hookline.rank": s.rank,
            "hookline.world_size": s.world_size,
            "hookline.stage": s.stage,
        }
        tracer, meter = self._providers(address, headers, common)
        durations: Any = lambda name, seconds, about: None  # noqa: E731
        if meter is not None:
            self._metrics = RunMetrics(meter, s, common)
            durations = self._metrics.add_duration
            if s.rank == 0:  # rows have values of all ranks
                s.logger.add(self._metrics)
        if tracer is None and meter is None:
            return {}
        if tracer is None:  # the durations of spans are metrics
            from opentelemetry.trace import NoOpTracer

            tracer = NoOpTracer()
        entry = next(each for each in s.hooks.entries() if each.given is hook)
        self._spans = RunSpans(tracer, s, entry, common, durations, hook.every)
        self._spans.start(parent, on_teardown=hook._close)
        context = self._spans.root.get_span_context()
        if not hook.traces:
            return {}
        return {
            "trace_id": f"{context.trace_id:032x}",
            "span_id": f"{context.span_id:016x}",
            "flags": f"{int(context.trace_flags):02x}",
        }

    def _providers(
        self, address: Secret | None, headers: SecretHeaders, common: dict[str, Any]
    ) -> tuple[Any, Any]:
        """Return a tracer and a meter, each None if it is switched off."""
        hook = self._hook
        if hook.provider == "global":
            from opentelemetry import metrics, trace

            tracer: Any = trace.get_tracer(SCOPE, __version__) if hook.traces else None
            if type(getattr(tracer, "id_generator", None)).__name__ == "RandomIdGenerator":
                tracer.id_generator = SpanIds()
            return tracer, metrics.get_meter(SCOPE, __version__) if hook.metrics else None
        if not hook.traces and not hook.metrics:
            return None, None
        from opentelemetry.sdk.metrics import AlwaysOffExemplarFilter, MeterProvider
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import SimpleSpanProcessor

        self._sender = OTLPSender(address, headers, hook.timeout, hook.queue_size, hook.interval)
        reader = self._sender.start(hook.traces, hook.metrics)
        resource = _resource(hook.service_name, common)
        tracer, meter = None, None
        # keep no reference to a provider: it would read its resource again in each forked worker of a loader
        if hook.traces:
            ids: Any = SpanIds()
            tracing = TracerProvider(resource=resource, shutdown_on_exit=False, id_generator=ids)
            tracing.add_span_processor(SimpleSpanProcessor(self._sender))  # type: ignore[arg-type]
            tracer = tracing.get_tracer(SCOPE, __version__)
        if reader is not None:
            measuring = MeterProvider([reader], resource, AlwaysOffExemplarFilter(), shutdown_on_exit=False)
            meter = measuring.get_meter(SCOPE, __version__)
        return tracer, meter

    def link(self, former: Mapping[str, Any]) -> None:
        """Link the run's span to the span of the run that it continues."""
        if self._spans is not None and (context := _context(former)) is not None:
            self._spans.root.add_link(context, {"hookline.link": "resumed from"})

    @property
    def closes_later(self) -> bool:
        """Whether the teardown of all participants is under way: the end of the event closes."""
        return self._spans is not None and self._spans.is_tearing_down

    def close(self) -> None:
        """End the spans, leave the loggers, send what is left and end the thread."""
        if self._spans is not None:
            self._spans.close()
        if self._metrics is not None:
            self._state.logger.remove(self._metrics)
        if self._sender is not None:
            self._sender.close()
        if self._metrics is not None:
            self._metrics.leave()


def _check_packages(packages: tuple[str, ...]) -> None:
    for package in packages:
        try:
            found = importlib.util.find_spec(package)
        except ModuleNotFoundError:  # of a parent
            found = None
        if found is None:
            raise OptionError(missing_package("OpenTelemetry", package, "opentelemetry"))


def _is_wanted(variable: str) -> bool:
    return os.environ.get(variable, "").strip().lower() != "none"


def _resource(service_name: str | None, common: Mapping[str, Any]) -> Any:
    """Return the attributes of this process; the standard variables add to them."""
    from opentelemetry.sdk.resources import Resource

    known = Resource.create().attributes
    has_name = not str(known.get("service.name", "unknown_service")).startswith("unknown_service")
    name = {"service.name": service_name or "hookline"} if service_name or not has_name else {}
    own = {
        "service.instance.id": f"{common['hookline.run.id']}-{common['hookline.rank']}",
        "host.name": socket.gethostname(),
        "process.pid": os.getpid(),
        "hookline.version": __version__,
        **{key: common[key] for key in ("hookline.run.id", "hookline.rank", "hookline.world_size")},
    }
    return Resource.create({**{key: own[key] for key in own if key not in known}, **name})


def _run_id(s: Any) -> str:
    return getattr(s.trainer, "run_id", "") or uuid.uuid4().hex


def _ranks_of(s: Any) -> Any:
    """Return how the ranks of a trainer, or of another loop, communicate; None for one process."""
    trainer = s.trainer
    ranks = trainer.strategy.ranks if hasattr(trainer, "strategy") else trainer.ranks
    return None if ranks.alone else ranks


def _parent_of_environment() -> Any:
    """Return the context of the variable TRACEPARENT; None without it, or if a span is open here."""
    from opentelemetry import trace
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    if trace.get_current_span().get_span_context().is_valid or "TRACEPARENT" not in os.environ:
        return None
    carrier = {name.lower(): os.environ.get(name, "") for name in ("TRACEPARENT", "TRACESTATE")}
    return TraceContextTextMapPropagator().extract(carrier)


def _context(ids: Mapping[str, Any]) -> Any:
    """Return the context of a span from its ids; None if they are missing or wrong, as after an edit."""
    from opentelemetry.trace import SpanContext, TraceFlags

    with contextlib.suppress(KeyError, TypeError, ValueError):
        flags = TraceFlags(int(str(ids.get("flags", "01")), 16))
        made = SpanContext(int(str(ids["trace_id"]), 16), int(str(ids["span_id"]), 16), True, flags)
        return made if made.is_valid else None
    return None


def _remote(shared: Mapping[str, str]) -> Any:
    """Return the context in which the spans of another rank than zero are: that of rank zero's run."""
    from opentelemetry import trace

    found = _context(shared)
    return None if found is None else trace.set_span_in_context(trace.NonRecordingSpan(found))
