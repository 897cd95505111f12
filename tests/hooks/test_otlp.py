"""The sender of spans and metrics: what it does with a collector that comes back, is busy, hangs or drips."""

from __future__ import annotations

import random
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import servers
from hooks.collector import TRACES, bodies, spans_of
from servers import Server, nobody_at, serving

from hookline.hooks._otlp import LARGEST_BATCH, OTLPSender, SecretHeaders
from hookline.hooks._outbox import Secret


@pytest.fixture(autouse=True)
def no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in servers.PROXIES:
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.lower(), raising=False)


def sender(url: str, timeout: float = 60.0, size: int = 4096, interval: float = 600.0) -> OTLPSender:
    return OTLPSender(Secret(url), SecretHeaders({"x-key": "k"}), timeout, size, interval)


def some(count: int) -> Iterator[Any]:
    """Spans that have ended."""
    from opentelemetry.sdk.trace import ReadableSpan, TracerProvider

    tracer = TracerProvider(shutdown_on_exit=False).get_tracer("test")
    for number in range(count):
        span = tracer.start_span(f"span {number}")
        span.end()
        assert isinstance(span, ReadableSpan)
        yield span


def until(condition: Any) -> None:
    """Wait for a condition."""
    for _ in range(6000):
        if condition():
            return
        time.sleep(0.01)
    raise AssertionError("it did not happen")


def names(server: Server) -> list[str]:
    return [each.name for each in spans_of(server)]


def test_what_is_queued_is_sent_in_batches_and_in_order() -> None:
    with serving() as server:
        sending = sender(server.url(""))
        assert sending.start(traces=True, metrics=False) is None
        sending.export(some(LARGEST_BATCH + 3))  # so many wake it up
        until(lambda: server.got)
        sending.close()
        assert names(server) == [f"span {number}" for number in range(LARGEST_BATCH + 3)]
        assert len(bodies(server, TRACES)) == 2 and all(each["x-key"] == "k" for each in server.sent)
        sending.export(some(1))
        sending.close()  # a second time
        assert (sending.spans, sending.dropped, sending.lost) == (LARGEST_BATCH + 4, 1, 0)


def test_spans_wait_for_a_collector_that_comes_back(caplog: pytest.LogCaptureFixture) -> None:
    with serving(status=503) as server:
        sending = sender(server.url(""), interval=0.1)
        sending.start(traces=True, metrics=False)
        sending.export(some(3))
        until(lambda: len(server.got) >= 2)  # the same spans again
        server.got.clear()
        server.status = 200
        until(lambda: server.got)
        sending.close()
        assert sending.lost == 0 and names(server)[-3:] == ["span 0", "span 1", "span 2"]
    (message,) = (each.getMessage() for each in caplog.records)
    assert "(answered 503); the run continues" in message


def test_a_busy_collector_is_asked_again_at_the_end() -> None:
    with serving(status=429) as server:
        sending = sender(server.url(""), timeout=60)
        sending.start(traces=True, metrics=False)
        sending.export(some(1))
        closing = threading.Thread(target=sending.close)
        closing.start()
        until(lambda: server.got)
        server.got.clear()
        server.status = 200
        closing.join(60)
        assert names(server)[-1:] == ["span 0"] and sending.lost == 0


def drips(listening: socket.socket, done: threading.Event) -> None:
    """Answer with one byte of a header after the other, each within the timeout of a read."""
    connection, _ = listening.accept()
    with connection:
        connection.sendall(b"HTTP/1.1 200 OK\r\nX-")
        while not done.wait(0.02):
            try:
                connection.sendall(b"a")
            except OSError:
                return


def test_the_end_does_not_wait_for_a_collector_that_drips(caplog: pytest.LogCaptureFixture) -> None:
    """No read of the connection times out. The sender closes it, and its thread ends."""
    done = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as listening:
        dripping = threading.Thread(target=drips, args=(listening, done), daemon=True)
        dripping.start()
        sending = sender(f"http://127.0.0.1:{listening.getsockname()[1]}", timeout=0.3)
        sending.start(traces=True, metrics=False)
        thread = sending._thread
        assert thread is not None
        sending.export(some(LARGEST_BATCH))
        sending.close()
        assert not thread.is_alive()
        done.set()
        dripping.join(60)
    messages = [each.getMessage() for each in caplog.records]
    assert f"{LARGEST_BATCH} of {LARGEST_BATCH} spans did not reach the collector" in messages[-1]


def test_the_end_tries_a_collector_that_is_down_once(caplog: pytest.LogCaptureFixture) -> None:
    sending = sender(nobody_at(""), timeout=600, size=2000)
    sending.start(traces=True, metrics=True)
    sending.export(some(3 * LARGEST_BATCH))
    sending.close()  # the timeout would be noticed
    assert sending.lost == 3 * LARGEST_BATCH and sending.dropped == 0
    first, last = (each.getMessage() for each in caplog.records)
    assert "the collector did not take the traces (ConnectionError)" in first
    assert "1536 of 1536 spans" in last


def test_sending_draws_no_random_numbers_of_the_program() -> None:
    random.seed(1)
    before = random.getstate()
    with serving() as server:
        sending = sender(server.url(""))
        sending.start(traces=True, metrics=True)
        spans = [*some(1)]
        before = random.getstate()
        sending.export(spans)
        sending.close()
        assert server.got
    assert random.getstate() == before
