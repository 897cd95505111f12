"""Traces and metrics of real runs, sent over OTLP to a collector on loopback."""

from __future__ import annotations

import copy
import gzip
import json
import logging
import os
import pickle
import random
import signal
import subprocess
import sys
import textwrap
import threading
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import preloaded
import pytest
import servers
import torch
from hooks.collector import METRICS, TRACES, Span, bodies, check_spans, path_to, points_of, spans_of
from ranks.torchrun import torchrun
from servers import Server, nobody_at, serving
from test_budgets import python_calls
from tiny import Net, batches, quiet
from torch.utils.data import DataLoader, TensorDataset

import hookline
from hookline import Hook, OptionError, Recorder, Trainer, declare_event
from hookline.config import load_config
from hookline.engine.events import EVENTS, EVENTS_OF_THE_TABLE
from hookline.hooks import LRMonitor, OpenTelemetry

SECRET = "s3cr3t-t0ken"
SOURCE = str(Path(hookline.__file__).parent)
PATIENT, IMPATIENT = 60.0, 0.5
"""Seconds for a collector that answers, and for one that would be waited for."""


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tests neither find a proxy nor a collector of the machine's own."""
    for name in servers.PROXIES:
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.lower(), raising=False)
    for name in [each for each in os.environ if each.startswith(("OTEL_", "TRACEPARENT", "TRACESTATE"))]:
        monkeypatch.delenv(name)


@pytest.fixture
def collector() -> Iterator[Server]:
    with serving() as server:
        yield server


def exporter(server: Server, every: int = 1, **options: Any) -> OpenTelemetry:
    return OpenTelemetry(every, server.url(""), **{"timeout": PATIENT, **options})


class Saves(Hook):
    """Saves at the end of every epoch."""

    def on_train_epoch_end(self, trainer: Any) -> None:
        trainer.save_checkpoint()


def names(spans: list[Span]) -> Counter[str]:
    return Counter(each.name for each in spans)


def ours() -> list[str]:
    return [each.name for each in threading.enumerate() if each.name.startswith("hookline-otlp")]


# ---- spans ----------------------------------------------------------------------------------------------------------


def test_the_spans_of_every_stage_are_those_of_the_table(collector: Server, tmp_path: Path) -> None:
    """Each pair of events is a span in some stage, and no span has a name that the table does not have."""
    hook = exporter(collector, service_name="train-net")
    trainer = quiet(hooks=[Saves(), hook], max_epochs=2, num_sanity_val_steps=1, run_dir=tmp_path)
    net = Net()
    trainer.fit(net, batches(2), batches(2))
    spans = spans_of(collector)
    root = check_spans(spans)
    assert (root.name, root.parent, root.failed) == ("run fit", "", False)
    assert {each.scope for each in spans} == {("hookline", hookline.__version__)}
    assert root.resource["service.name"] == "train-net" and root.resource["host.name"]
    assert root.resource["hookline.version"] == hookline.__version__
    for each in spans:
        assert each.about["hookline.run.id"] == trainer.run_id == each.resource["hookline.run.id"]
        assert (each.about["hookline.rank"], each.about["hookline.world_size"]) == (0, 1)
        assert each.about["hookline.stage"] == "fit"
    assert {"hookline.status": "completed", "hookline.step": 4}.items() <= root.about.items()

    paths = {tuple(path_to(each, spans)) for each in spans}
    epoch = ("run fit", "fit", "train", "train_epoch")
    assert {
        (*epoch, "step", "train_batch", "training_step"),
        (*epoch, "step", "train_batch", "backward"),
        (*epoch, "step", "train_batch", "optimizer_step"),
        (*epoch, "step", "batch_fetch"),
        (*epoch, "validation", "validation_epoch", "validation_batch", "validation_step"),
        (*epoch, "saves.on_train_epoch_end"),
        ("run fit", "fit", "sanity_check", "validation", "validation_epoch"),
        ("run fit", "save_checkpoint"),
        ("run fit", "configure_optimizers"),
    } <= paths
    counts = names(spans)
    assert (counts["train_epoch"], counts["save_checkpoint"], counts["validation"]) == (2, 2, 3)
    saved = [each.about for each in spans if each.name == "save_checkpoint"]
    assert [each["hookline.path"] for each in saved] == [
        str(tmp_path / "checkpoints" / f"step-{step}") for step in (2, 4)
    ]
    assert [each.about["hookline.epoch"] for each in spans if each.name == "train_epoch"] == [0, 1]

    trainer.validate(net, batches(1))
    trainer.test(net, batches(1))
    trainer.predict(net, batches(1))
    again = quiet(hooks=[exporter(collector)], max_epochs=3, run_dir=tmp_path)
    again.fit(Net(), batches(2), resume="auto")
    seen = names(spans_of(collector))
    declared = {pair.name for pair in EVENTS.pairs() if pair.begin.name in EVENTS_OF_THE_TABLE}
    assert declared <= set(seen)
    actions = {event.name for event in EVENTS if event.action}
    stages = {f"run {stage}" for stage in ("fit", "validate", "test", "predict")}
    calls = {name for name in seen if "." in name and name.partition(".")[2] in EVENTS}
    assert set(seen) - declared - actions - stages - calls == {"step"}
    assert len({each.trace for each in spans_of(collector)}) == 5


def test_a_pair_of_events_that_is_declared_later_is_a_span(collector: Server) -> None:
    """No list of names has to be changed for a new event."""

    class Phases(Hook):
        def on_train_epoch_start(self, trainer: Any) -> None:
            trainer.emit("on_warm_up_start")

        def on_step_end(self, trainer: Any, step: int) -> None:
            if step == 2:
                trainer.emit("on_warm_up_end")

    for name in ("on_warm_up_start", "on_warm_up_end"):
        declare_event(name)
    try:
        quiet(hooks=[Phases(), exporter(collector, every=0)]).fit(Net(), batches(4))
    finally:
        for name in ("on_warm_up_start", "on_warm_up_end"):
            EVENTS.forget(name)
    spans = spans_of(collector)
    check_spans(spans)
    (phase,) = (each for each in spans if each.name == "warm_up")
    (epoch,) = (each for each in spans if each.name == "train_epoch")
    assert path_to(phase, spans) == ["run fit", "warm_up"]
    assert epoch.start < phase.start < phase.end < epoch.end


def test_sampled_steps_are_the_first_and_the_multiples_of_every(collector: Server) -> None:
    quiet(hooks=[exporter(collector, every=5)], max_epochs=2).fit(Net(), batches(8))
    spans = spans_of(collector)
    check_spans(spans)
    steps = [each for each in spans if each.name == "step"]
    assert [each.about["hookline.step"] for each in steps] == [1, 5, 10, 15]
    assert [each.about["hookline.epoch"] for each in steps] == [0, 0, 1, 1]
    assert names(spans)["train_batch"] == 4


def test_a_step_of_several_batches_has_them_all_and_no_steps_no_batches(collector: Server) -> None:
    quiet(hooks=[exporter(collector)], accumulate_grad_batches=3).fit(Net(), batches(7))
    spans = spans_of(collector)
    check_spans(spans)
    inside = Counter(each.parent for each in spans if each.name == "train_batch")
    steps = [each.id for each in spans if each.name == "step"]
    assert [inside[each] for each in steps] == [3, 1]  # the timer samples the window between them
    collector.got.clear()
    quiet(hooks=[exporter(collector, every=0)]).fit(Net(), batches(3), batches(1))
    assert {"step", "train_batch", "batch_fetch", "validation_batch"}.isdisjoint(names(spans_of(collector)))


def test_a_failure_marks_its_spans_and_the_run(collector: Server) -> None:
    class Fails(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if batch_idx == 2:
                raise ValueError("cannot reach https://name:pa55word@host/x?sig=abcdef")
            return super().training_step(batch, batch_idx)

    class Warns(Hook):
        on_error = "warn"

        def on_train_epoch_start(self) -> None:
            raise KeyError("ignored")

    with pytest.raises(ValueError, match="cannot reach"):
        quiet(hooks=[Warns(), exporter(collector)]).fit(Fails(), batches(4))
    spans = spans_of(collector)
    root = check_spans(spans)
    failed = {each.name for each in spans if each.failed}
    inner = {"step", "train_batch", "training_step"}
    assert failed == inner | {"run fit", "fit", "train", "train_epoch", "warns.on_train_epoch_start"}
    assert [each.name for each in spans if each.failed and "exception" in dict(each.events)] == [
        "warns.on_train_epoch_start",
        "training_step",
        "train_epoch",
        "run fit",
    ]
    (recorded,) = (about for name, about in root.events if name == "exception")
    assert recorded["exception.type"] == root.about["error.type"] == "ValueError"
    assert "training_step" in recorded["exception.stacktrace"] and root.about["hookline.status"] == "error"
    assert "pa55word" not in str(spans) and "abcdef" not in str(spans)
    hook = next(each for each in spans if each.name == "warns.on_train_epoch_start")
    assert hook.why == "KeyError: 'ignored'" and hook.about["hookline.hook"] == "warns"


def test_a_failed_step_that_is_sampled_shows_where_it_failed(collector: Server) -> None:
    class Fails(Hook):
        def on_after_backward(self) -> None:
            raise RuntimeError("broken")

    with pytest.raises(RuntimeError, match="broken"):
        quiet(hooks=[Fails(), exporter(collector)]).fit(Net(), batches(3))
    spans = spans_of(collector)
    check_spans(spans)
    (call,) = (each for each in spans if each.name == "fails.on_after_backward")
    assert path_to(call, spans)[-4:] == ["step", "train_batch", "backward", "fails.on_after_backward"]
    assert call.failed and call.why == "RuntimeError: broken"


def test_a_run_is_part_of_the_trace_of_the_environment(
    collector: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    trace, parent = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
    monkeypatch.setenv("TRACEPARENT", f"00-{trace}-{parent}-01")
    quiet(hooks=[exporter(collector)]).fit(Net(), batches(1))
    root = check_spans(spans_of(collector))
    assert (root.trace, root.parent) == (trace, parent)
    monkeypatch.setenv("TRACEPARENT", "nonsense")
    collector.got.clear()
    quiet(hooks=[exporter(collector)]).fit(Net(), batches(1))
    root = check_spans(spans_of(collector))
    assert root.trace != trace and root.parent == ""


def test_a_resumed_run_has_the_same_id_and_a_link_to_the_former_trace(
    collector: Server, tmp_path: Path
) -> None:
    quiet(hooks=[Saves(), exporter(collector)], run_dir=tmp_path).fit(Net(), batches(4))
    first = check_spans(spans_of(collector))
    collector.got.clear()
    again = quiet(hooks=[exporter(collector, every=50)], run_dir=tmp_path, max_epochs=2)
    again.fit(Net(), batches(4), resume="auto")
    spans = spans_of(collector)
    second = check_spans(spans)
    assert second.about["hookline.run.id"] == first.about["hookline.run.id"]
    assert second.trace != first.trace and second.links == [(first.trace, first.id)]
    assert second.about["hookline.resumed"] is True and first.about["hookline.resumed"] is False
    assert [each.about["hookline.step"] for each in spans if each.name == "step"] == [5]
    assert names(spans)["load_checkpoint"] == 1


def test_switching_the_hook_off_or_removing_it_ends_its_spans(collector: Server) -> None:
    class Switches(Hook):
        def on_step_end(self, trainer: Any, step: int, state: Any) -> None:
            if step == 3:
                trainer.disable_hook("open_telemetry")
            if step == 5:
                trainer.enable_hook("open_telemetry")
            if step == 7:
                trainer.remove_hook("open_telemetry")

    trainer = quiet(hooks=[Switches(), exporter(collector)], max_steps=9, max_epochs=-1)
    trainer.fit(Net(), batches(1))
    spans = spans_of(collector)
    check_spans(spans)
    assert [each.about["hookline.step"] for each in spans if each.name == "train_epoch"] == [0, 1, 2, 5, 6]
    assert trainer.global_step == 9 and trainer.plan.tracers == () and not trainer.loggers.members
    assert ours() == []


# ---- metrics --------------------------------------------------------------------------------------------------------


def test_metrics_are_what_the_run_logs_and_counts(collector: Server, tmp_path: Path) -> None:
    class Logs(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.log("accuracy at 5 %/ä", 0.25 * batch_idx)
            return super().training_step(batch, batch_idx)

    trainer = quiet(
        hooks=[Saves(), LRMonitor(), exporter(collector)], log_every_n_steps=2, max_epochs=2, run_dir=tmp_path
    )
    trainer.fit(Logs(), batches(4, size=3), batches(2))
    points = points_of(collector)
    found = {(each.name, each.about.get("hookline.over")): each for each in points}
    for name, over in (("train.loss", "epoch"), ("val.loss", "evaluation"), ("lr", "step")):
        metric = name.replace(".", "/")
        value = 0.1 if name == "lr" else trainer.metrics[metric]
        point = found[f"hookline.metric.{name}", over]
        assert (point.kind, point.value, point.about["hookline.metric"]) == ("gauge", value, metric)
    assert found["hookline.metric.accuracy_at_5__._", "step"].about["hookline.metric"] == "accuracy at 5 %/ä"
    sums = {each.name: each.value for each in points if each.kind == "sum" and len(each.about) == 4}
    assert sums == {
        "hookline.steps": 8,
        "hookline.batches": 8,
        "hookline.samples": 24,
    }  # no hook counts tokens
    assert found["hookline.epoch", None].value == 1
    spent = {each.about["hookline.part"]: each.value for each in points if each.name == "hookline.time"}
    assert set(spent) == {"data", "validation", "saving"} and all(value > 0 for value in spent.values())
    hooks = {each.about["hookline.hook"] for each in points if each.name == "hookline.hook.time"}
    assert {"saves", "lr_monitor"} <= hooks
    durations = {each.name: each.count for each in points if each.kind == "histogram"}
    counts = names(spans_of(collector))
    for name in ("step", "batch_fetch", "validation", "save_checkpoint", "train_epoch", "training_step"):
        assert durations[f"hookline.{name}.duration"] == counts[name] > 0, name
    calls = [each for each in points if each.name == "hookline.hook.duration"]
    assert {(each.about["hookline.hook"], each.about["hookline.event"]) for each in calls} >= {
        ("saves", "on_train_epoch_end"),
        ("lr_monitor", "on_train_start"),
    }
    assert all(each.unit == "s" for each in points if each.kind == "histogram")
    for each in points:  # a step as an attribute would make a series of every step
        assert {"hookline.step", "hookline.batch"}.isdisjoint(each.about)
        assert each.about["hookline.run.id"] == trainer.run_id


def test_skipped_steps_are_counted_and_tokens_if_a_hook_counts_them(collector: Server) -> None:
    class Skips(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return None if batch_idx % 2 else super().training_step(batch, batch_idx)

    class Tokens(Hook):
        def on_train_start(self, tokens_seen: int) -> None:
            pass

    data = [(torch.ones(2, 4), torch.zeros(2, 2))] * 4
    quiet(hooks=[Tokens(), exporter(collector)], count_tokens=lambda batch: 7).fit(Skips(), data)
    found = {each.name: each for each in points_of(collector)}
    assert found["hookline.skipped_steps"].value == 2
    assert found["hookline.skipped_steps"].about["hookline.reason"] == "no_loss"
    assert found["hookline.tokens"].value == 28 and found["hookline.steps"].value == 2


@pytest.mark.parametrize("switch", ["parameters", "variables"])
def test_traces_and_metrics_can_be_switched_off(
    collector: Server, switch: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url(""))
    for signals, path in ((("metrics",), METRICS), (("traces",), TRACES), ((), None)):
        options: dict[str, Any] = {}
        for name in ("traces", "metrics"):
            if switch == "parameters":
                options[name] = name in signals
            else:
                monkeypatch.setenv(f"OTEL_{name.upper()}_EXPORTER", "otlp" if name in signals else "none")
        collector.got.clear()
        quiet(hooks=[OpenTelemetry(1, timeout=PATIENT, **options)]).fit(Net(), batches(2))
        assert {where for _, where, _ in collector.got} == ({path} if path else set())
        if path == METRICS:  # the durations of spans are there without spans
            assert "hookline.step.duration" in {each.name for each in points_of(collector)}


# ---- no effect on the run -------------------------------------------------------------------------------------------


def test_a_hundred_steps_with_spans_never_read_from_the_device(collector: Server) -> None:
    """On the meta device every host read raises. Metrics read the rows that the run logs, as a logger does."""

    def train(**options: Any) -> Trainer:
        hook = exporter(collector, **options)
        trainer = quiet(device="meta", max_steps=100, max_epochs=-1, log_every_n_steps=1000, hooks=[hook])
        trainer.fit(Net(), batches(25), batches(2))
        return trainer

    assert train(metrics=False).global_step == 100
    spans = spans_of(collector)
    assert names(spans)["step"] > 90 and names(spans)["validation"] == 4
    collector.got.clear()
    with pytest.raises(NotImplementedError, match="meta"):
        train()
    assert names(spans_of(collector))["step"] == 24  # all of the epoch at whose end is the first row


def test_random_numbers_and_weights_are_those_of_a_run_without_the_hook(collector: Server) -> None:
    class Draws(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            drawn = random.random() + float(np.random.rand()) + torch.rand(())
            return super().training_step(batch, batch_idx) * drawn

    def train(*hooks: Any) -> tuple[Any, ...]:
        trainer = quiet(seed=3, hooks=hooks, max_epochs=2)
        torch.manual_seed(0)
        net = Draws()
        trainer.fit(net, batches(6), batches(1))
        return net.layer.weight.tolist(), random.getstate(), np.random.get_state()[1].tolist()

    hook = exporter(collector, interval=0.1)
    assert train(hook) == train()
    first, second = (train(exporter(collector)) for _ in range(2))
    assert first == second
    traces = {each.trace for each in spans_of(collector)}
    assert len(traces) == 3  # the ids do not repeat with the seed


def kinds() -> dict[str, Callable[[], Any]]:
    return {
        "good": serving,
        "503": lambda: serving(status=503),
        "500": lambda: serving(status=500),
        "404": lambda: serving(status=404),
        "redirects": lambda: serving(status=307, headers={"Location": "http://127.0.0.1:9/v1/traces"}),
        "hangs": lambda: serving(hangs=True),
    }


def test_a_collector_that_fails_costs_the_training_no_call(caplog: pytest.LogCaptureFixture) -> None:
    """Whatever the collector does, the training's thread runs the same calls outside of the sender's end."""
    caplog.set_level(logging.DEBUG)

    def counts(frame: FrameType) -> bool:
        file = frame.f_code.co_filename
        return file.startswith((SOURCE, "<hookline")) and not file.endswith("_otlp.py")

    def train(endpoint: str, timeout: float = PATIENT) -> int:
        hook = OpenTelemetry(5, endpoint, timeout=timeout, interval=0.1)
        trainer = quiet(hooks=[hook], max_epochs=3)
        calls = python_calls(lambda: trainer.fit(Net(), batches(8), batches(1)), counts)
        assert trainer.status == "completed" and trainer.global_step == 24
        assert ours() == []
        return calls

    train(nobody_at(""))  # what is done only once
    found: dict[str, int] = {}
    messages: dict[str, list[str]] = {}
    for name, serve in (*kinds().items(), ("down", None)):
        caplog.clear()
        if serve is None:
            found[name] = train(nobody_at(""))
        else:
            with serve() as server:
                found[name] = train(server.url(""), IMPATIENT if name in ("503", "hangs") else PATIENT)
                assert server.got or name == "hangs"
        messages[name] = [each.getMessage() for each in caplog.records if each.levelno >= logging.WARNING]
        assert {each.name for each in caplog.records} <= {"hookline"}, name
        assert all(each.exc_info is None for each in caplog.records)
    assert len(set(found.values())) == 1, found
    assert messages.pop("good") == []
    why = {
        "503": "answered 503",
        "500": "answered 500",
        "404": "answered 404",
        "redirects": "answered 307, and redirects are not followed",
        "hangs": "no answer in time",
        "down": "ConnectionError",
    }
    for name, (first, last) in messages.items():
        assert first.startswith("OpenTelemetry: the collector did not take the ")
        is_late = name == "503" and "(no answer in time)" in first  # on a busy machine
        assert f"({why[name]})" in first or is_late, first
        assert last.startswith("OpenTelemetry: ") and "did not reach the collector" in last, last
        total = int(last.partition(" of ")[2].partition(" ")[0])
        assert total > 40 and last.partition(": ")[2].startswith(f"{total} of {total} spans")


def test_spans_for_which_the_queue_has_no_room_are_dropped_and_counted(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with serving() as server:
        hook = exporter(server, queue_size=5, interval=600.0, metrics=False)
        quiet(hooks=[hook]).fit(Net(), batches(10))
        assert len(spans_of(server)) == 5
    (message,) = (each.getMessage() for each in caplog.records)
    assert "for lack of room in the queue) did not reach the collector" in message


def test_an_exporter_that_raises_does_not_end_the_run(
    collector: Server, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.trace import Tracer

    def broken(*given: Any, **named: Any) -> Any:
        raise MemoryError(SECRET)

    monkeypatch.setattr(OTLPSpanExporter, "export", broken)
    trainer = quiet(hooks=[exporter(collector)])
    trainer.fit(Net(), batches(4))
    assert trainer.status == "completed" and ours() == []
    first, last = (each.getMessage() for each in caplog.records)
    assert "did not take the traces (MemoryError)" in first and "spans did not reach" in last
    caplog.clear()
    started = Tracer.start_span

    def breaks(self: Any, name: str, *given: Any, **named: Any) -> Any:
        return broken() if name == "validation" else started(self, name, *given, **named)

    monkeypatch.setattr(Tracer, "start_span", breaks)
    trainer.fit(Net(), batches(4), batches(1))
    assert trainer.status == "completed" and trainer.plan.tracers == ()
    assert caplog.records[0].getMessage() == ("OpenTelemetry: tracing stops (MemoryError); the run continues")
    assert SECRET not in caplog.text


def test_threads_end_with_each_run_and_workers_of_a_loader_are_not_affected(
    collector: Server, caplog: pytest.LogCaptureFixture
) -> None:
    inputs, targets = torch.randn(8, 4), torch.randn(8, 2)
    loader = DataLoader(
        TensorDataset(inputs, targets),
        2,
        num_workers=1,
        multiprocessing_context="fork",
        persistent_workers=True,
    )
    trainer = quiet(hooks=[exporter(collector, interval=0.1)], max_epochs=2)
    for run in (1, 2):
        trainer.fit(Net(), loader)
        assert ours() == [] and len({each.trace for each in spans_of(collector)}) == run
    roots = [each for each in spans_of(collector) if not each.parent]
    assert len(roots) == 2 and {each.resource["process.pid"] for each in roots} == {os.getpid()}
    assert caplog.records == []


def test_a_killed_run_leaves_valid_spans(collector: Server, tmp_path: Path) -> None:
    script = """
        import torch
        from tiny import Net, batches, quiet
        from hookline.hooks import OpenTelemetry

        hook = OpenTelemetry(1, {url!r}, interval=0.1, timeout=60)
        quiet(hooks=[hook], max_epochs=-1, max_steps=10**9).fit(Net(), batches(4))
    """
    file = tmp_path / "script.py"
    file.write_text(textwrap.dedent(script.format(url=collector.url(""))))
    tests = str(Path(servers.__file__).parent)
    path = os.pathsep.join([tests, *filter(None, [os.environ.get("PYTHONPATH")])])
    with preloaded.Popen(
        [sys.executable, str(file)], env={**os.environ, "PYTHONPATH": path}, stderr=subprocess.DEVNULL
    ) as process:
        for _ in range(6000):
            if len(bodies(collector, TRACES)) >= 3:
                break
            threading.Event().wait(0.01)
        os.kill(process.pid, signal.SIGKILL)
        process.wait(60)
    spans = spans_of(collector)
    assert names(spans)["step"] > 0 and "run fit" not in names(spans)
    assert len({each.trace for each in spans}) == 1
    assert len({each.id for each in spans}) == len(spans)
    assert all(each.parent and 0 < each.start <= each.end for each in spans)
    complete = {each.id: each for each in spans}
    for each in spans:
        if each.parent in complete:
            assert complete[each.parent].start <= each.start and each.end <= complete[each.parent].end


# ---- several ranks --------------------------------------------------------------------------------------------------


RANKS = """
import sys
from tiny import Net, batches, quiet
from hookline.hooks import OpenTelemetry

for ranks in ("all", "zero"):
    hook = OpenTelemetry(2, sys.argv[1], ranks=ranks, timeout=60)
    trainer = quiet(hooks=[hook], strategy="ddp", device="cpu", run_dir="run", seed=1, log_every_n_steps=1)
    trainer.on("train_epoch_end")(lambda trainer: trainer.save_checkpoint())
    trainer.fit(Net(), batches(8), batches(2))
    print("DONE", ranks, trainer.state.rank, trainer.run_id, flush=True)
"""


def test_two_ranks_are_one_trace(collector: Server, tmp_path: Path) -> None:
    outcome = torchrun(RANKS, tmp_path, collector.url(""))
    assert outcome.code == 0, outcome.output
    done = [line.split() for line in outcome.lines("DONE")]
    ids = {ranks: {run for name, _, run in done if name == ranks} for ranks in ("all", "zero")}
    assert len(done) == 4 and all(len(each) == 1 for each in ids.values())
    spans = spans_of(collector)
    both = [each for each in spans if each.about["hookline.run.id"] in ids["all"]]
    assert {each.about["hookline.rank"] for each in both} == {0, 1}
    assert len({each.trace for each in both}) == 1 and len({each.id for each in both}) == len(both)
    zero, one = sorted(
        (each for each in both if each.name == "run fit"), key=lambda each: each.about["hookline.rank"]
    )
    assert zero.parent == "" and one.parent == zero.id
    for rank in (0, 1):
        own = [each for each in both if each.about["hookline.rank"] == rank]
        check_spans(own)
        assert {"step", "train_epoch", "validation", "save_checkpoint"} <= set(names(own))
        assert {each.resource["hookline.rank"] for each in own} == {rank}
        assert {each.about["hookline.world_size"] for each in own} == {2}
    single = [each for each in spans if each.about["hookline.run.id"] in ids["zero"]]
    assert {each.about["hookline.rank"] for each in single} == {0}
    check_spans(single)


# ---- the program's own providers, and other loops -------------------------------------------------------------------


@pytest.fixture
def in_memory(monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Any, Any]:
    """Providers of the program, set for one test: a tracer of its own, its spans, and its metrics."""
    from opentelemetry import metrics, trace
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.metrics.export import InMemoryMetricReader
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    spans, reader = InMemorySpanExporter(), InMemoryMetricReader()
    tracing = TracerProvider(shutdown_on_exit=False)
    tracing.add_span_processor(SimpleSpanProcessor(spans))
    measuring = MeterProvider([reader], shutdown_on_exit=False)
    monkeypatch.setattr(trace, "_TRACER_PROVIDER", tracing)
    monkeypatch.setattr(metrics._internal, "_METER_PROVIDER", measuring)
    return tracing.get_tracer("program"), spans, reader


def test_the_programs_own_providers_are_used(
    in_memory: tuple[Any, Any, Any], caplog: pytest.LogCaptureFixture
) -> None:
    tracer, exported, reader = in_memory

    class Traces(Net):
        def validation_step(self, batch: Any, batch_idx: int) -> Any:
            with tracer.start_as_current_span("mine"):
                return super().validation_step(batch, batch_idx)

    trainer = quiet(hooks=[OpenTelemetry(1, provider="global")], log_every_n_steps=1)
    for run in (1, 2):
        random.seed(0)
        with tracer.start_as_current_span("job") as job:
            before = random.getstate()
            trainer.fit(Traces(), batches(3), batches(1))
            after = random.getstate()
        spans = {each.name: each for each in exported.get_finished_spans()}
        assert spans["run fit"].parent.span_id == job.get_span_context().span_id
        assert spans["mine"].parent.span_id == spans["validation_epoch"].context.span_id
        assert (before == after) is False  # by the span of the program's own code alone:
        random.seed(0)
        random.getrandbits(128), random.getrandbits(64), random.getrandbits(64)
        assert random.getstate() == after
        found = reader.get_metrics_data()
        values = {
            metric.name: [point.value for point in metric.data.data_points]
            for group in found.resource_metrics
            for scope in group.scope_metrics
            for metric in scope.metrics
            if hasattr(metric.data.data_points[0], "value")
        }
        assert "hookline.steps" not in values  # the run is over
        losses = values["hookline.metric.val.loss"]
        assert (len(losses), losses[-1]) == (run, trainer.metrics["val/loss"])
    assert caplog.records == [] and ours() == []


def test_without_providers_or_with_the_sdk_switched_off_a_run_trains(
    collector: Server, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("OTEL_SDK_DISABLED", "true")
    for hook in (OpenTelemetry(1, provider="global"), exporter(collector)):
        trainer = quiet(hooks=[hook], max_epochs=2)
        trainer.fit(Net(), batches(3), batches(1))
        assert trainer.status == "completed" and ours() == []
    assert bodies(collector, TRACES) == [] and caplog.records == []


def test_another_loop_has_spans_of_its_steps(collector: Server) -> None:
    net = Net()
    sgd = torch.optim.SGD(net.parameters(), lr=0.1)
    with hookline.Line(net, sgd, hooks=[exporter(collector, every=2)]) as line:
        for batch in line.epoch(batches(5)):
            line.backward(net.training_step(batch, 0))
            sgd.step()
            sgd.zero_grad()
    spans = spans_of(collector)
    check_spans(spans)
    steps = [each for each in spans if each.name == "step"]
    assert [each.about["hookline.step"] for each in steps] == [1, 2, 4]
    assert {"train", "train_epoch", "train_batch", "backward"} <= set(names(spans))


# ---- settings and secrets -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"endpoint": f"ftp://{SECRET}"}, "endpoint (not shown, it is a secret) must be an address"),
        (
            {"endpoint": "env:NOT_SET_ANYWHERE"},
            "endpoint: the environment variable NOT_SET_ANYWHERE is not set",
        ),
        ({"headers": SECRET}, "headers (not shown, they are secrets) must be a mapping"),
        ({"headers": {"x key": SECRET}}, "a name must be that of an HTTP header"),
        (
            {"headers": {"x-key": f"{SECRET}\n"}},
            "headers['x-key'] (not shown, it is a secret) must be printable",
        ),
        ({"headers": {"x-key": "env:NOT_SET_ANYWHERE"}}, "variable NOT_SET_ANYWHERE is not set"),
        ({"every": -1}, "every=-1 must be a whole number from 0"),
        ({"ranks": "one"}, "ranks='one'"),
        ({"provider": "golbal"}, "'global'"),
        ({"provider": "global", "endpoint": "http://localhost:1"}, "no effect with provider='global'"),
        ({"traces": 1}, "traces=1 must be True, False or None"),
    ],
)
def test_wrong_settings_are_refused_without_showing_secrets(options: dict[str, Any], said: str) -> None:
    with pytest.raises(OptionError) as caught:
        OpenTelemetry(**options)
    assert said in str(caught.value)
    inner = caught.value.__traceback__.tb_next if caught.value.__traceback__ else None
    shown = traceback.TracebackException(OptionError, caught.value, inner, capture_locals=True).format()
    assert SECRET not in "".join(shown)


def test_a_missing_package_is_named_when_the_hook_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http", None)
    with pytest.raises(OptionError, match=r'pip install "hookline\[opentelemetry\]"'):
        OpenTelemetry()
    OpenTelemetry(provider="global")  # needs no exporter


def test_the_standard_variables_choose_address_headers_and_service(
    collector: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url("/base/"))
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", f"x-key={SECRET},x-other=2")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_COMPRESSION", "gzip")
    monkeypatch.setenv("OTEL_SERVICE_NAME", "from-the-environment")
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "team=vision,host.name=mine")
    monkeypatch.setenv("MY_OTHER", "3")
    quiet(hooks=[OpenTelemetry(0, headers={"X-Other": "env:MY_OTHER"}, timeout=PATIENT)]).fit(
        Net(), batches(1)
    )
    assert {path for _, path, _ in collector.got} == {"/base/v1/traces", "/base/v1/metrics"}
    for sent in collector.sent:
        assert (sent["x-key"], sent["x-other"], sent["content-encoding"]) == (SECRET, "3", "gzip")
    collector.got[:] = [(how, path, gzip.decompress(body)) for how, path, body in collector.got]
    resource = check_spans(spans_of(collector)).resource
    assert (resource["service.name"], resource["team"]) == ("from-the-environment", "vision")
    assert resource["host.name"] == "mine"


@pytest.mark.parametrize("name", ["good", "404", "redirects", "hangs", "down"])
def test_headers_and_address_are_nowhere_to_be_seen(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    """Everything that a run writes, shows, keeps or sends in a body is searched, with loggers at their loudest."""
    caplog.set_level(logging.DEBUG)
    for logger in ("urllib3", "urllib3.connectionpool", "requests", "opentelemetry", "hookline"):
        caplog.set_level(logging.DEBUG, logger=logger)
    if name == "down":
        seen = everything(nobody_at(f"/{SECRET}"), tmp_path, PATIENT)
    else:
        with kinds()[name]() as server:
            seen = everything(server.url(f"/{SECRET}"), tmp_path, 2.0 if name == "hangs" else PATIENT)
            assert server.got and all(each["x-team"] == SECRET for each in server.sent)
            seen += [repr(body) for _, _, body in server.got]
    captured = capfd.readouterr()
    seen += [captured.out, captured.err]
    seen += [f"{each.getMessage()} {each.args} {each.exc_text} {vars(each)}" for each in caplog.records]
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    seen += [path.read_bytes().decode(errors="replace") for path in files]
    assert {"run.json", "manifest.json"} <= {path.name for path in files}
    assert not [text for text in seen if SECRET in text]


CONFIG = """
module = "tiny.Net"

[trainer]
max_epochs = 2
enable_progress_bar = false
run_dir = "{run_dir}"

[hooks.open_telemetry]
class_path = "open_telemetry"
every = 1
endpoint = "{url}"
timeout = {timeout}
headers = {{ x-team = "{secret}" }}
"""


def everything(url: str, folder: Path, timeout: float) -> list[str]:
    """All that can be looked at during and after a run that saves a checkpoint and fails."""
    shown: list[str] = []
    trainer = configured(url, folder, timeout)
    trainer.on("train_epoch_end")(lambda trainer: trainer.save_checkpoint())
    trainer.on("train_epoch_start")(lambda epoch: 1 / (1 - epoch))
    with Recorder(trainer) as recorder:
        try:
            trainer.fit(Net(), batches(2), batches(1))
        except ZeroDivisionError as error:
            inner = error.__traceback__.tb_next if error.__traceback__ else None
            shown += traceback.TracebackException(type(error), error, inner, capture_locals=True).format()
    assert shown
    hook: Any = trainer.hooks["open_telemetry"]
    shown += [repr(hook), str(hook), repr(vars(hook)), repr(hook.state_dict()), str(trainer.explain())]
    shown += [repr(trainer.hooks), repr(trainer.state), repr(dict(trainer.state)), repr(recorder.__dict__)]
    shown.append(json.dumps(vars(hook), default=lambda each: getattr(each, "__dict__", None) or repr(each)))
    for action in (pickle.dumps, copy.deepcopy):
        try:
            shown.append(repr(action(hook)))
        except Exception as error:
            shown.append(str(error))
    return shown


def configured(url: str, folder: Path, timeout: float) -> Trainer:
    """A trainer from a configuration that holds the header itself, which `env:NAME` would avoid."""
    file = folder.parent / f"{folder.name}.toml"
    file.write_text(CONFIG.format(run_dir=folder, url=url, secret=SECRET, timeout=timeout))
    made = load_config(file, allow=["tiny"]).build().make_trainer(Trainer)
    assert isinstance(made, Trainer)
    return made
