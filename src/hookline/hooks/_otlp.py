"""Send spans and metrics to an OpenTelemetry collector from a thread. A failure does not affect the run.

The exporters are OpenTelemetry's own, for OTLP over HTTP. The thread is not: it bounds the end of a run.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import re
import socket
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from hookline.hooks._outbox import Secret, silence

WHO = "OpenTelemetry"
LARGEST_BATCH = 512
"""Spans of one request; so many wake the thread up."""
GRACE = 1.0
"""Seconds for the thread to end after its connections were closed."""
BUSY = (429, 502, 503, 504)
"""Answers after which the same data may be sent again."""
PAUSE = 0.25
"""Seconds before a busy collector is asked again at the end of a run."""
LOUD = (
    "opentelemetry.exporter.otlp.common.http",
    "opentelemetry.exporter.otlp.proto.http.metric_exporter",
    "opentelemetry.exporter.otlp.proto.http.trace_exporter",
    "opentelemetry.sdk.metrics._internal.export",
    "opentelemetry.sdk.metrics._internal.instrument",
    "opentelemetry.sdk.metrics._internal.measurement_consumer",
    "urllib3.connection",
    "urllib3.connectionpool",
    "urllib3.util.retry",
)
"""Loggers that log each failed export, and may log the address."""
_HEADER = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
log = logging.getLogger("hookline")


class SecretHeaders:
    """Headers that repr, dump, copy and pickle do not show; a call returns them."""

    __slots__ = ("_read", "problem")

    def __init__(self, given: Any) -> None:
        """Read texts, or `env:NAME`, by header. Keep a problem in `problem`, as `Secret` does."""
        self.problem, found = "", dict[str, str]()
        if given is not None and not isinstance(given, Mapping):
            self.problem = "headers (not shown, they are secrets) must be a mapping of names to texts."
        for name, value in given.items() if isinstance(given, Mapping) else ():
            if not isinstance(name, str) or not _HEADER.fullmatch(name):
                self.problem = "headers: a name must be that of an HTTP header, such as 'authorization'."
                continue
            if isinstance(value, str) and value.startswith("env:"):
                variable = value.removeprefix("env:")
                value = os.environ.get(variable)
                if value is None:
                    self.problem = f"headers[{name!r}]: the environment variable {variable} is not set."
                    continue
            if not isinstance(value, str) or not (value.isascii() and value.isprintable()):
                self.problem = f"headers[{name!r}] (not shown, it is a secret) must be printable ASCII text."
                continue
            found[name] = value
        self._read: Callable[[], dict[str, str]] = lambda: found

    def __call__(self) -> dict[str, str]:
        return self._read()

    def __repr__(self) -> str:
        return "<secret>"


class Connections:
    """The connections of the exporters: what became of their last request, and how to end a request."""

    def __init__(self) -> None:
        self.problem = self.last_problem = ""
        """Why the last request failed, without its address; empty if it did not. And why the last one did."""
        self.may_try_again = False
        """Whether the same data may be sent again later."""
        self.is_reachable = True
        """Whether the last request was answered."""
        self.is_over = False
        self._open: weakref.WeakSet[Any] = weakref.WeakSet()

    def failed(self, problem: str, may_try_again: bool = False, is_reachable: bool = True) -> None:
        """Record a request that failed."""
        self.last_problem = problem
        self.problem, self.may_try_again, self.is_reachable = problem, may_try_again, is_reachable

    def add(self, connection: Any) -> None:
        """Record a new connection."""
        self._open.add(connection)

    def end(self) -> None:
        """Close the connections, so that a request that hangs raises, and refuse new requests."""
        self.is_over = True
        for connection in list(self._open):
            with contextlib.suppress(OSError, AttributeError):
                connection.sock.shutdown(socket.SHUT_RDWR)

    def post(self, send: Callable[[], Any]) -> Any:
        """Send a request and record the outcome.

        Raise an error after which the exporter does not try again, because it would wait in between: the
        thread keeps the spans and tries again with the next export.
        """
        import requests

        if self.is_over:
            raise requests.RequestException("the run is over")
        try:
            try:
                answer = send()
            except requests.Timeout:
                raise
            except requests.ConnectionError:  # of a connection that the collector had closed meanwhile
                if self.is_over:
                    raise
                answer = send()
        except Exception as error:
            is_late = self.is_over or isinstance(error, requests.Timeout)
            problem = "no answer in time" if is_late else type(error).__name__
            self.failed(problem, may_try_again=True, is_reachable=False)
            raise requests.RequestException(problem) from None
        if self.is_over:  # an answer that was cut off may look complete
            self.failed("no answer in time", may_try_again=True, is_reachable=False)
            raise requests.RequestException(self.problem)
        if answer.ok and answer.status_code < 300:
            self.problem, self.is_reachable = "", True
            return answer
        is_redirect = 300 <= answer.status_code < 400  # which the exporter takes for a success
        self.failed(
            f"answered {answer.status_code}" + ", and redirects are not followed" * is_redirect,
            may_try_again=answer.status_code in BUSY,
        )
        raise requests.RequestException(self.problem)

    def session(self) -> Any:
        """Return a session of `requests` for an exporter."""
        import requests
        from requests.adapters import HTTPAdapter
        from urllib3.connectionpool import HTTPConnectionPool, HTTPSConnectionPool

        connections = self

        class Session(requests.Session):
            def request(self, *args: Any, **options: Any) -> Any:
                return connections.post(lambda: super(Session, self).request(*args, **options))

        def observed(pool: Any) -> Any:
            class Connection(pool.ConnectionCls):  # type: ignore[misc,name-defined,unused-ignore]
                def connect(self) -> None:
                    super().connect()
                    connections.add(self)

            return type(pool.__name__, (pool,), {"ConnectionCls": Connection})

        class Adapter(HTTPAdapter):
            def init_poolmanager(self, *args: Any, **options: Any) -> None:
                super().init_poolmanager(*args, **options)
                self.poolmanager.pool_classes_by_scheme = {
                    "http": observed(HTTPConnectionPool),
                    "https": observed(HTTPSConnectionPool),
                }

        session = Session()
        for scheme in ("http://", "https://"):
            session.mount(scheme, Adapter())
        return session


class OTLPSender:
    """Sends spans from a bounded queue, and the metrics of a reader, in a thread of its own.

    It is the exporter of a `SimpleSpanProcessor`: `export` only queues. A full queue drops spans. A failure
    is reported once, and what was lost at the end.
    """

    def __init__(
        self, endpoint: Secret | None, headers: SecretHeaders, timeout: float, size: int, interval: float
    ) -> None:
        """Take the base address; None: that of the standard variables. interval: seconds between exports."""
        self._endpoint, self._headers = endpoint, headers
        self._timeout, self._size, self._interval = timeout, size, interval
        self._queue: deque[Any] = deque()
        self._sending = 0
        """Spans of the request that is under way."""
        self._changed = threading.Condition()
        self._is_closing = self._is_done = False
        self._connections = Connections()
        self._exporters: dict[str, Any] = {}
        self._reader: Any = None
        self._thread: threading.Thread | None = None
        self.spans = self.dropped = self.lost = 0
        """Spans so far; those for which the queue had no room; those that the collector did not take."""
        self.exports = self.lost_exports = 0
        """Exports of metrics, and those that failed."""
        self._has_warned = False

    # ---- in the training's thread --------------------------------------------------------------------------

    def start(self, traces: bool, metrics: bool) -> Any:
        """Make the exporters and start the thread. Return a reader for a meter provider, or None."""
        from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.metrics.export import InMemoryMetricReader

        if traces:
            self._exporters["traces"] = OTLPSpanExporter(**self._arguments("v1/traces"))
        if metrics:
            made = self._exporters["metrics"] = OTLPMetricExporter(**self._arguments("v1/metrics"))
            self._reader = InMemoryMetricReader(made._preferred_temporality, made._preferred_aggregation)
        for exporter in self._exporters.values():
            client: Any = getattr(exporter, "_client", None)
            if hasattr(client, "_compute_backoff"):  # it draws from `random` for a wait that is never made
                client._compute_backoff = lambda retry: 0.0
        self._thread = threading.Thread(target=self._work, name="hookline-otlp", daemon=True)
        self._thread.start()
        return self._reader

    def _arguments(self, path: str) -> dict[str, Any]:
        base = None if self._endpoint is None else f"{self._endpoint().rstrip('/')}/{path}"
        return {
            "endpoint": base,
            "headers": self._headers(),
            "timeout": self._timeout,
            "session": self._connections.session(),
        }

    def export(self, spans: Iterable[Any]) -> None:
        """Queue spans that have ended. Never waits."""
        with self._changed:
            for span in spans:
                self.spans += 1
                if len(self._queue) >= self._size or self._is_closing:
                    self.dropped += 1
                    continue
                self._queue.append(span)
                if len(self._queue) == LARGEST_BATCH:
                    self._changed.notify_all()

    def force_flush(self, timeout_millis: int = 0) -> bool:
        """Return True: the thread sends what is queued."""
        return True

    def shutdown(self) -> None:
        """Do nothing: `close` ends the thread."""

    def close(self) -> None:
        """Send what is left, for at most the timeout, end the thread, and report what was lost."""
        thread, self._thread = self._thread, None
        if thread is None:
            return
        with self._changed:
            self._is_closing = True
            self._changed.notify_all()
            in_time = self._changed.wait_for(lambda: self._is_done, self._timeout)
            if not in_time:
                self._connections.end()
                self._changed.notify_all()
        thread.join(GRACE)
        self._report(thread.is_alive())
        self._exporters, self._reader = {}, None  # they hold the headers

    def _report(self, is_alive: bool) -> None:
        with self._changed:
            lost = self.lost + self.dropped + (len(self._queue) + self._sending if is_alive else 0)
        if not lost and not self.lost_exports:
            return
        parts = [f"{lost} of {self.spans} spans"] if lost else []
        if self.dropped:
            parts[-1] += f" ({self.dropped} for lack of room in the queue)"
        if self.lost_exports:
            parts.append(f"{self.lost_exports} of {self.exports} exports of metrics")
        why = self._connections.last_problem or "it is slower than the run"
        log.warning("%s: %s did not reach the collector (%s)", WHO, " and ".join(parts), why)

    # ---- in its own thread ---------------------------------------------------------------------------------

    def _work(self) -> None:
        silence(LOUD)
        _suppress_instrumentation()
        exporters = list(self._exporters.values())
        due = time.monotonic() + self._interval
        is_last = False
        while not is_last:
            with self._changed:
                self._changed.wait_for(
                    lambda: self._is_closing or len(self._queue) >= self._threshold(),
                    max(0.0, due - time.monotonic()),
                )
                is_last = self._is_closing
            if is_last:
                self._connections.is_reachable = True  # it may have come back: try once
            is_due = is_last or time.monotonic() >= due
            self._send_spans(is_due, is_last)
            if is_due:
                self._send_metrics(is_last)
                due = time.monotonic() + self._interval
        for exporter in exporters:
            exporter.shutdown()  # closes the connections
        with self._changed:
            self._is_done = True
            self._changed.notify_all()

    def _threshold(self) -> float:
        """Return the number of queued spans that are sent at once; while sending fails, they wait."""
        return math.inf if self._connections.problem else LARGEST_BATCH

    def _send_spans(self, everything: bool, is_last: bool) -> None:
        while True:
            with self._changed:
                if not self._queue or (not everything and len(self._queue) < LARGEST_BATCH):
                    return
                batch = [self._queue.popleft() for _ in range(min(LARGEST_BATCH, len(self._queue)))]
                self._sending = len(batch)
            is_sent = self._export("traces", batch, is_last)
            with self._changed:
                self._sending = 0
                if is_sent:
                    continue
                if not is_last and self._connections.may_try_again:
                    self._queue.extendleft(reversed(batch))
                    return
                self.lost += len(batch)
                if not self._connections.is_reachable:
                    self.lost += len(self._queue)
                    self._queue.clear()

    def _send_metrics(self, is_last: bool) -> None:
        if self._reader is not None and (found := self._reader.get_metrics_data()) is not None:
            is_gone = is_last and not self._connections.is_reachable
            self.exports += 1
            self.lost_exports += is_gone or not self._export("metrics", found, is_last)

    def _export(self, signal: str, data: Any, is_last: bool) -> bool:
        """Send data; return whether the collector took it. At the end of a run, ask a busy one again."""
        done = self._try_export(signal, data)
        while not done and is_last and self._connections.may_try_again and self._connections.is_reachable:
            with self._changed:
                if self._changed.wait_for(lambda: self._connections.is_over, PAUSE):
                    break
            done = self._try_export(signal, data)
        if not done and not self._has_warned:
            self._has_warned = True  # once, because the collector may be down for days
            log.warning(
                "%s: the collector did not take the %s (%s); the run continues and counts what is lost",
                WHO,
                signal,
                self._connections.problem,
            )
        return done

    def _try_export(self, signal: str, data: Any) -> bool:
        self._connections.problem = "it cannot be encoded"  # replaced by the outcome of the request
        try:
            return bool(self._exporters[signal].export(data).name == "SUCCESS")
        except Exception as error:
            self._connections.failed(type(error).__name__)  # the text may hold the address
            return False


def _suppress_instrumentation() -> None:
    """Let packages that instrument `requests` leave out the requests of this thread."""
    from opentelemetry import context

    key = getattr(context, "_SUPPRESS_INSTRUMENTATION_KEY", None)
    if key is not None:
        context.attach(context.set_value(key, True))
