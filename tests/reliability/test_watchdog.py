"""A run that no longer moves says where it stands, and can be told to end then."""

from __future__ import annotations

import contextlib
import functools
import gc
import logging
import os
import queue
import signal
import subprocess
import sys
import textwrap
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import preloaded
import pytest
import torch
from test_budgets import per_step
from tiny import Net, batches
from tiny import quiet as quiet_trainer
from torch.utils.data import DataLoader, Dataset
from training.turned import TICK, Clock

import hookline.training.trainer
from hookline import Hook, when
from hookline.loggers import Logger
from hookline.reliability import watchdog
from hookline.reliability.watchdog import EXIT_HUNG, HangError, Watchdog
from hookline.run.run import Run
from hookline.training import lifecycle
from hookline.training.lifecycle import run_lifecycle

TIMEOUT = 0.2
LIMIT = 60.0
Watched = Callable[..., None]
quiet = functools.partial(quiet_trainer, hang_after=None)  # no watchdog but the one that a test asks for


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(watchdog, "time", clock.installed())
    return clock


@pytest.fixture
def watch(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> Watched:
    """Every run from now on has a watchdog with these settings."""

    def with_settings(timeout: float | None = TIMEOUT, **settings: Any) -> None:
        def watched(run: Run, body: Any) -> Any:
            with Watchdog(run, timeout, **settings):
                return run_lifecycle(run, body)

        monkeypatch.setattr(lifecycle, "run_lifecycle", watched)

    return with_settings


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    yield
    assert not [each.name for each in threading.enumerate() if each.name.startswith("hookline-watchdog")]
    assert all(
        signal.getsignal(number) is signal.SIG_DFL for number in range(signal.SIGRTMIN, signal.SIGRTMAX)
    )
    assert not watchdog._active


class Reports(list[str]):
    """The watchdog's warnings so far."""

    def __init__(self, caplog: pytest.LogCaptureFixture, clock: Clock) -> None:
        self.caplog, self.clock = caplog, clock

    def read(self) -> list[str]:
        found = [each.getMessage() for each in self.caplog.records if each.levelno == logging.WARNING]
        return [each for each in found if "has not moved" in each]

    def wait(self, count: int = 1, timeout: float = TIMEOUT) -> None:
        """Hang until it was said so often, for as long as that takes by the watchdog's clock and no longer."""
        until, before = time.monotonic() + LIMIT, len(self.read())
        with self.clock.running(timeout * 2 ** (count - 1 - before) + 2 * TICK):
            while len(self.read()) < count and time.monotonic() < until:
                time.sleep(0.01)


@pytest.fixture
def reports(caplog: pytest.LogCaptureFixture, clock: Clock) -> Reports:
    return Reports(caplog, clock)


# ---- what is said ------------------------------------------------------------------------------------------------


def test_a_hook_that_hangs_is_named_with_its_event_its_time_and_its_stack(
    watch: Watched, reports: Reports
) -> None:
    class Stuck(Hook):
        def on_train_batch_end(self, batch_idx: int) -> None:
            if batch_idx == 2:
                self.wait_for_ever()

        def wait_for_ever(self) -> None:
            reports.wait()

    watch()
    quiet(hooks=[Stuck()]).fit(Net(), batches())
    (text,) = reports.read()
    first, _, stack = text.partition("\n")
    assert "hook 'stuck' in on_train_batch_end" in first
    assert f"{Path(__file__).name}:" in first and "epoch 0, batch 2, step 3" in first
    assert float(first.partition("at least ")[2].partition(" s")[0]) >= TIMEOUT
    assert "reports.wait()" in stack and "wait_for_ever" in stack and "in run_lifecycle" in stack
    assert "pytest" not in stack  # what was there before the run is no part of it


def test_without_accounting_a_hook_is_named_all_the_same(watch: Watched, reports: Reports) -> None:
    class Stuck(Hook):
        def on_train_batch_end(self) -> None:
            reports.wait()

    watch()
    quiet(hooks=[Stuck()], accounting=False).fit(Net(), batches(1))
    assert "hook 'stuck' in on_train_batch_end" in reports.read()[0]


def test_a_method_of_the_module_is_named(watch: Watched, reports: Reports) -> None:
    class Slow(Net):
        def on_train_epoch_start(self) -> None:
            reports.wait()

    watch()
    quiet().fit(Slow(), batches(1))
    assert "on_train_epoch_start of Slow" in reports.read()[0]


def test_a_hook_that_joins_in_the_middle_is_named_in_its_setup(watch: Watched, reports: Reports) -> None:
    class Late(Hook):
        def setup(self) -> None:
            reports.wait()

    class Adds(Hook):
        def on_train_batch_end(self, trainer: Any) -> None:
            trainer.add_hook(Late())

    watch()
    quiet(hooks=[Adds()]).fit(Net(), batches(1))
    assert "hook 'late' in setup" in reports.read()[0]


def test_a_hook_is_named_again_once_what_it_called_has_ended_or_failed(
    watch: Watched, reports: Reports
) -> None:
    class Fails(Net):
        def validation_step(self, batch: Any, batch_idx: int) -> Any:
            raise ZeroDivisionError

    class Stuck(Hook):
        def on_train_epoch_end(self, trainer: Any) -> None:
            with contextlib.suppress(ZeroDivisionError):
                trainer.validate()
            reports.wait()

    watch()
    quiet(hooks=[Stuck()], num_sanity_val_steps=0, check_val_every_n_epoch=2).fit(
        Fails(), batches(1), batches(1)
    )
    assert "hook 'stuck' in on_train_epoch_end" in reports.read()[0]


def test_after_a_loader_has_failed_the_run_is_not_said_to_wait_for_it(
    watch: Watched, reports: Reports
) -> None:
    def broken() -> Iterator[Any]:
        yield batches(1)[0]
        raise ZeroDivisionError

    class Stuck(Hook):
        def teardown(self, state: Any) -> None:
            assert state.running[1] is None  # nothing else is left of what ran
            reports.wait()

    watch()
    with pytest.raises(ZeroDivisionError):
        quiet(hooks=[Stuck()]).fit(Net(), broken())
    assert "hook 'stuck' in teardown" in reports.read()[0]


def test_saving_is_named(watch: Watched, reports: Reports, tmp_path: Path) -> None:
    class Slow(Net):
        def state_dict(self, *args: Any, **kwargs: Any) -> Any:
            reports.wait()
            return super().state_dict(*args, **kwargs)

    class Saves(Hook):
        def on_train_end(self, trainer: Any) -> None:
            trainer.save_checkpoint(tmp_path / "saved")

    watch()
    quiet(hooks=[Saves()]).fit(Slow(), batches(1))
    assert "saving a checkpoint" in reports.read()[0]


def test_another_thread_that_logs_hides_no_hang(watch: Watched, clock: Clock, reports: Reports) -> None:
    class Keeps(Logger):
        def log_metrics(self, metrics: Any, step: int, epoch: int) -> None:
            pass

    class Stuck(Hook):
        def on_train_start(self, logger: Any) -> None:
            over = threading.Event()

            def report_often() -> None:
                while not over.is_set():
                    logger.log_metrics({"temperature": 40.0}, 0, 0)

            other = threading.Thread(target=report_often)
            other.start()
            reports.wait()
            over.set()
            other.join()

    watch()
    quiet(hooks=[Stuck()], logger=Keeps()).fit(Net(), batches(1))
    assert "hook 'stuck' in on_train_start" in reports.read()[0]


def test_a_hang_is_reported_again_at_doubling_times(watch: Watched, reports: Reports) -> None:
    class Stuck(Hook):
        def on_fit_start(self) -> None:
            reports.wait(3, 0.1)

    watch(0.1)
    quiet(hooks=[Stuck()]).fit(Net(), batches())
    seconds = [float(each.partition("at least ")[2].partition(" s")[0]) for each in reports.read()]
    assert len(seconds) == 3
    assert seconds[0] >= 0.1 and seconds[1] >= 0.2 and seconds[2] >= 0.4


def test_two_hangs_are_two_reports_even_in_the_same_hook(watch: Watched, reports: Reports) -> None:
    class Stuck(Hook):
        def on_train_batch_end(self, batch_idx: int) -> None:
            reports.wait(batch_idx + 1)

    watch()
    quiet(hooks=[Stuck()]).fit(Net(), batches(2))
    one, two = reports.read()
    assert "batch 0" in one and "batch 1" in two


class Called:
    """An object as a hook."""

    def __init__(self, wait: Callable[[], None]) -> None:
        self.wait = wait

    def __call__(self, batch_idx: int) -> None:
        self.wait()


@pytest.mark.parametrize("kind", ["function", "partial", "callable", "built in"])
def test_any_kind_of_function_is_named(kind: str, watch: Watched, clock: Clock, reports: Reports) -> None:
    def function(batch_idx: int) -> None:
        reports.wait()

    def with_more(more: int, batch_idx: int) -> None:
        reports.wait()

    full: queue.SimpleQueue[None] = queue.SimpleQueue()

    def named() -> bool:
        return any("hook 'mine' in on_train_batch_start" in each for each in reports.read())

    def fill() -> None:
        until = time.monotonic() + LIMIT
        with clock.running():
            while not named() and time.monotonic() < until:
                time.sleep(0.01)
        full.put(None), full.put(None)  # once for each event

    filling = threading.Thread(target=fill)
    hooks = {
        "function": function,
        "partial": functools.partial(with_more, 1),
        "callable": Called(reports.wait),
        "built in": functools.partial(full.get, timeout=LIMIT),
    }
    watch()
    trainer = quiet()
    if kind == "built in":
        trainer.on("train_start", name="first")(filling.start)
    trainer.on("train_batch_start", "train_batch_end", name="mine", once=True)(hooks[kind])
    trainer.fit(Net(), batches(1))
    assert named()


def test_of_one_function_at_two_events_the_right_event_is_named(watch: Watched, reports: Reports) -> None:
    calls: list[int] = []

    def function(batch_idx: int) -> None:
        calls.append(batch_idx)
        if len(calls) == 2:
            reports.wait()

    watch()
    trainer = quiet()
    trainer.on("train_batch_start", "train_batch_end", name="mine")(function)
    trainer.fit(Net(), batches(1))
    assert "hook 'mine' in on_train_batch_end" in reports.read()[0]


def test_a_predicate_that_hangs_is_named_as_that_of_its_hook(watch: Watched, reports: Reports) -> None:
    class Careful(Hook):
        @when(lambda batch_idx: reports.wait())
        def on_train_batch_end(self) -> None:
            pass

    watch()
    quiet(hooks=[Careful()]).fit(Net(), batches(1))
    assert "the `when` of hook 'careful' in on_train_batch_end" in reports.read()[0]


@pytest.mark.parametrize(
    "event", ["setup", "teardown", "on_exception", "on_validation_epoch_end", "on_save_checkpoint"]
)
def test_hooks_are_named_at_every_kind_of_event(
    event: str, watch: Watched, reports: Reports, tmp_path: Path
) -> None:
    stuck = type("Stuck", (Hook,), {event: lambda self: reports.wait()})()

    class Fails(Hook):
        def on_train_end(self, trainer: Any) -> None:
            trainer.save_checkpoint(tmp_path / "saved")
            if event == "on_exception":
                raise ZeroDivisionError

    watch()
    try:
        quiet(hooks=[stuck, Fails()]).fit(Net(), batches(1), batches(1))
    except ZeroDivisionError:
        assert event == "on_exception"
    assert f"hook 'stuck' in {event}" in reports.read()[0]


class Awaited:
    """Batches, the second of which is long in coming."""

    def __init__(self, wait: Callable[[], None]) -> None:
        self.wait = wait

    def __iter__(self) -> Iterator[Any]:
        for index, batch in enumerate(batches(2)):
            if index == 1:
                self.wait()
            yield batch


def test_waiting_for_data_is_said_to_be_that(watch: Watched, reports: Reports) -> None:
    watch()
    quiet().fit(Net(), Awaited(reports.wait))
    assert "waiting for the next batch of loader 'train'" in reports.read()[0]


def test_waiting_for_data_in_a_validation_names_its_loader(watch: Watched, reports: Reports) -> None:
    watch()
    quiet().fit(Net(), batches(1), {"small": batches(1), "large": Awaited(reports.wait)})
    assert "waiting for the next batch of loader 'large'" in reports.read()[0]


def test_waiting_for_data_in_a_prediction(watch: Watched, reports: Reports) -> None:
    watch()
    quiet().predict(Net(), Awaited(reports.wait))
    assert "waiting for the next batch of loader 'predict'" in reports.read()[0]


def test_a_loader_that_takes_long_to_open_is_named(watch: Watched, reports: Reports) -> None:
    class Slow:
        def __iter__(self) -> Iterator[Any]:
            reports.wait()
            return iter(batches(1))

    watch()
    quiet().fit(Net(), Slow())
    assert "opening loader 'train'" in reports.read()[0]


def test_a_step_of_the_module_is_named(watch: Watched, reports: Reports) -> None:
    class Slow(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            reports.wait()
            return super().training_step(batch, batch_idx)

    watch()
    quiet().fit(Slow(), batches(1))
    assert "training_step of Slow" in reports.read()[0]


def test_backward_is_named(watch: Watched, reports: Reports) -> None:
    class Slow(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            loss.register_hook(lambda gradient: reports.wait())
            return loss

    watch()
    quiet().fit(Slow(), batches(1))
    assert "backward of Slow" in reports.read()[0]


class SlowLogger(Logger):
    def __init__(self, wait: Callable[[], None]) -> None:
        self.wait = wait

    def log_metrics(self, metrics: Any, step: int, epoch: int) -> None:
        self.wait()

    def add_text(self, tag: str, text_string: str, global_step: int | None = None) -> None:
        self.wait()


def test_a_logger_is_named_and_the_report_is_kept_with_the_run(
    watch: Watched, reports: Reports, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hookline.loggers.base.SLOW_CALL", LIMIT)
    watch()
    trainer = quiet(logger=SlowLogger(reports.wait), log_every_n_steps=1)
    trainer.fit(Net(), batches(1))
    text = reports.read()[0]
    assert "logger SlowLogger in log_metrics" in text
    assert text in (trainer.run_dir / "hangs.log").read_text()


def test_a_logger_that_a_hook_uses_is_named_with_the_hook(watch: Watched, reports: Reports) -> None:
    class Notes(Hook):
        def on_train_start(self, logger: Any) -> None:
            logger.add_text("note", "begin")

    watch()
    quiet(logger=SlowLogger(reports.wait), hooks=[Notes()]).fit(Net(), batches(1))
    assert "logger SlowLogger in add_text, called by hook 'notes' in on_train_start" in reports.read()[0]


def test_a_run_inside_a_hook_is_reported_once_by_its_own_watchdog(watch: Watched, reports: Reports) -> None:
    class Stuck(Hook):
        def on_train_start(self) -> None:
            reports.wait(3)

    class Inner(Hook):
        def on_fit_start(self) -> None:
            quiet(hooks=[Stuck()]).fit(Net(), batches(1))

    watch()
    quiet(hooks=[Inner()]).fit(Net(), batches(1))
    found = reports.read()
    assert all("hook 'stuck' in on_train_start" in each for each in found)
    assert (
        len(found) == 3
    )  # after one, two and four times the timeout; the outer run's would be as many again


# ---- what is not said --------------------------------------------------------------------------------------------


def pause(clock: Clock) -> None:
    """Take a while, and let the watchdog look."""
    clock.now += TIMEOUT / 4
    time.sleep(0.02)


def test_a_hook_that_is_slow_but_comes_back_is_not_reported(
    watch: Watched, clock: Clock, reports: Reports
) -> None:
    class Slow(Hook):
        def on_train_batch_end(self) -> None:
            pause(clock)

    watch()
    quiet(hooks=[Slow()]).fit(Net(), batches(30))
    assert not reports.read()


def test_a_loader_that_is_slow_but_delivers_is_not_reported(
    watch: Watched, clock: Clock, reports: Reports
) -> None:
    class Slow:
        def __iter__(self) -> Iterator[Any]:
            for batch in batches(30):
                pause(clock)
                yield batch

    watch()
    quiet().fit(Net(), Slow())
    assert not reports.read()


def test_many_short_calls_in_one_batch_are_not_taken_for_one(
    watch: Watched, clock: Clock, reports: Reports
) -> None:
    class Manual(Net):
        automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> None:
            optimizer: Any = self.optimizers()
            for _ in range(30):  # no counter of the run moves meanwhile
                optimizer.step()

    class Slow(Hook):
        def on_before_optimizer_step(self) -> None:
            pause(clock)

    watch()
    quiet(hooks=[Slow()]).fit(Manual(), batches(1))
    assert not reports.read()


def test_a_hook_that_validates_for_long_is_not_reported_while_batches_go_by(
    watch: Watched, clock: Clock, reports: Reports
) -> None:
    class Slow(Net):
        def validation_step(self, batch: Any, batch_idx: int) -> Any:
            pause(clock)
            return super().validation_step(batch, batch_idx)

    class Validates(Hook):
        def on_train_epoch_end(self, trainer: Any) -> None:
            trainer.validate()

    watch()
    quiet(hooks=[Validates()]).fit(Slow(), batches(1), batches(30))
    assert not reports.read()


def test_without_a_timeout_there_is_no_thread(watch: Watched) -> None:
    seen: list[str] = []

    class Looks(Hook):
        def on_train_start(self) -> None:
            seen.extend(each.name for each in threading.enumerate())

    watch(None)
    quiet(hooks=[Looks()]).fit(Net(), batches(1))
    assert "hookline-watchdog" not in seen
    watch()
    quiet(hooks=[Looks()]).fit(Net(), batches(1))
    assert "hookline-watchdog" in seen


def test_a_step_costs_not_one_call_more(watch: Watched) -> None:
    def train(data: Any) -> None:
        quiet().fit(Net(), data)

    without = per_step(train)
    watch(0.01)
    assert per_step(train) == without


def test_looking_keeps_nothing_of_the_hook_alive(watch: Watched, reports: Reports) -> None:
    class Big:
        pass

    class Holds(Hook):
        big: Any = None
        outlived = False

        def on_train_batch_start(self) -> None:
            big = Big()
            self.big = weakref.ref(big)
            reports.wait()

        def on_train_batch_end(self) -> None:
            end = time.monotonic() + 10
            while self.big() is not None and time.monotonic() < end:  # whoever looks may not be done yet
                time.sleep(0.01)
            self.outlived = self.big() is not None

    watch()
    hook = Holds()
    gc.disable()
    try:
        quiet(hooks=[hook]).fit(Net(), batches(1))
    finally:
        gc.enable()
    assert reports.read() and not hook.outlived


class Numbers(Dataset[Any]):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Any:
        return torch.full((4,), float(index)), torch.zeros(2)


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_workers_of_a_loader_are_not_disturbed(watch: Watched, reports: Reports) -> None:
    watch(LIMIT, abort=True)
    trainer = quiet()
    trainer.fit(Net(), DataLoader(Numbers(), batch_size=2, num_workers=2))
    assert trainer.global_step == 4 and not reports.read()


def test_a_child_that_a_hook_forks_may_leave_the_run(watch: Watched) -> None:
    class Forks(Hook):
        def on_train_start(self) -> None:
            self.child = os.fork()
            if self.child == 0:
                raise SystemExit(7)

    watch(0.01)
    hook, parent = Forks(), os.getpid()
    try:
        quiet(hooks=[hook]).fit(Net(), batches(1))
    except SystemExit:
        if os.getpid() != parent:
            os._exit(7)
    assert os.waitstatus_to_exitcode(os.waitpid(hook.child, 0)[1]) == 7


# ---- abort -------------------------------------------------------------------------------------------------------


def spin() -> None:
    until = time.monotonic() + LIMIT
    while time.monotonic() < until:
        pass


def wait_for_a_lock() -> None:
    lock = threading.Lock()
    lock.acquire()
    lock.acquire(timeout=LIMIT)


def read_a_pipe() -> None:
    reading, writing = os.pipe()
    timer = threading.Timer(LIMIT, os.close, [writing])
    timer.start()
    try:
        os.read(reading, 1)
    finally:
        timer.cancel()
        timer.join()


class Ending(Hook):
    """Hangs once, until the watchdog has reported it once, and notes how the run ends."""

    def __init__(self, hang: Callable[[], None], clock: Clock) -> None:
        self.hang, self.clock = hang, clock
        self.heard: list[Any] = []

    def on_train_batch_end(self, batch_idx: int) -> None:
        if batch_idx == 1:
            with self.clock.running(TIMEOUT + 2 * TICK):
                self.hang()

    def on_exception(self, exception: BaseException) -> None:
        self.heard.append(exception)

    def teardown(self) -> None:
        self.heard.append("teardown")


HANGS = [spin, wait_for_a_lock, read_a_pipe, functools.partial(time.sleep, LIMIT)]


@pytest.mark.parametrize("hang", HANGS, ids=["loop", "lock", "pipe", "sleep"])
def test_abort_ends_the_run_with_an_error_that_names_the_hook(
    hang: Callable[[], None], watch: Watched, clock: Clock, reports: Reports
) -> None:
    watch(abort=True)
    hook, began = Ending(hang, clock), time.monotonic()
    trainer = quiet(hooks=[hook])
    with pytest.raises(
        HangError, match="hook 'ending' in on_train_batch_end .* did not return within 0.2 s"
    ) as caught:
        trainer.fit(Net(), batches())
    assert time.monotonic() - began < LIMIT  # it was interrupted, not waited for
    assert hook.heard == [caught.value, "teardown"] and trainer.status == "error"
    assert len(reports.read()) == 1


def test_abort_is_not_passed_over_by_the_hooks_error_policy(watch: Watched, clock: Clock) -> None:
    watch(abort=True)
    hook = Ending(spin, clock)
    hook.on_error = "warn"
    with pytest.raises(HangError):
        quiet(hooks=[hook]).fit(Net(), batches())


def test_abort_works_in_a_thread_that_is_not_the_main_one(watch: Watched, clock: Clock) -> None:
    watch(abort=True)
    hook, raised = Ending(spin, clock), []

    def fit() -> None:
        try:
            quiet(hooks=[hook]).fit(Net(), batches())
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=fit)
    thread.start()
    thread.join()
    assert isinstance(raised[0], HangError) and type(raised[0]).__name__ == "HangError"
    assert "hook 'ending' in on_train_batch_end" in str(raised[0])
    assert hook.heard == [raised[0], "teardown"]


def test_abort_also_ends_a_wait_for_data(watch: Watched, clock: Clock) -> None:
    def wait() -> None:
        with clock.running():
            time.sleep(LIMIT)

    watch(abort=True)
    with pytest.raises(HangError, match="waiting for the next batch of loader 'train' did not return"):
        quiet().fit(Net(), Awaited(wait))


def test_a_run_that_catches_the_error_stops_at_the_next_batch(watch: Watched, clock: Clock) -> None:
    def catches() -> None:
        try:
            spin()
        except Exception:
            time.sleep(0)

    class Slow(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            time.sleep(0.02)
            return super().training_step(batch, batch_idx)

    watch(abort=True)
    hook = Ending(catches, clock)
    trainer = quiet(hooks=[hook])
    trainer.fit(Slow(), batches(500))
    assert trainer.status == "stopped" and "hook 'ending'" in trainer.state.stop_reason
    assert trainer.global_step < 500


def test_a_teardown_that_hangs_is_aborted_and_the_others_get_theirs(watch: Watched, clock: Clock) -> None:
    class Stuck(Hook):
        def teardown(self) -> None:
            with clock.running():
                time.sleep(LIMIT)

    watch(abort=True)
    hook = Ending(lambda: None, clock)
    with pytest.raises(HangError, match="hook 'stuck' in teardown"):
        quiet(hooks=[Stuck(), hook]).fit(Net(), batches())
    assert hook.heard == ["teardown"]


# ---- in a process of its own -------------------------------------------------------------------------------------

SOURCE = str(Path(hookline.__file__).parent.parent)
SCRIPT = """
import logging, os, signal, subprocess, sys, threading, time
from hookline import Hook
from hookline.reliability import watchdog
from hookline.training import lifecycle
from hookline.training.lifecycle import run_lifecycle
from training import turned
from tiny import Net, batches
from tiny import quiet as quiet_trainer

clock = turned.install()

def quiet(**options):
    return quiet_trainer(hang_after=None, **options)

def watch(timeout, **settings):
    def watched(run, body):
        with watchdog.Watchdog(run, timeout, **settings):
            return run_lifecycle(run, body)
    lifecycle.run_lifecycle = watched
"""


def run_script(code: str) -> subprocess.CompletedProcess[str]:
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([SOURCE, str(Path(__file__).parent.parent)]),
    }
    return preloaded.run(
        [sys.executable, "-c", SCRIPT + textwrap.dedent(code)],
        capture_output=True,
        text=True,
        env=environment,
        timeout=300,
        check=False,
    )


def test_what_cannot_be_interrupted_ends_the_process_with_all_stacks() -> None:
    done = run_script("""
        class Deaf(Hook):
            def on_train_start(self):
                with clock.running():
                    while True:
                        try:
                            time.sleep(30)
                        except Exception:
                            print("caught", flush=True)

        watch(0.2, abort=True, grace=3)
        quiet(hooks=[Deaf()]).fit(Net(), batches())
    """)
    assert done.returncode == EXIT_HUNG
    assert "hook 'deaf' in on_train_start" in done.stderr and f"exit code {EXIT_HUNG}" in done.stderr
    assert (
        "most recent call first" in done.stderr
        and "in on_train_start" in done.stderr.partition("most recent call first")[2]
    )
    assert done.stdout.split() == ["caught", "caught"]  # it was asked twice


def test_a_log_that_hangs_too_does_not_keep_the_watchdog_from_aborting() -> None:
    done = run_script("""
        class Blocked(logging.StreamHandler):
            def emit(self, record):
                time.sleep(30)

        logging.getLogger("hookline").addHandler(Blocked())

        class Warns(Hook):
            def on_train_start(self):
                with clock.running():
                    logging.getLogger("hookline").warning("anything")

        watch(0.2, abort=True)
        try:
            quiet(hooks=[Warns()]).fit(Net(), batches())
        except watchdog.HangError as error:
            print(error, flush=True)
            os._exit(0)
    """)
    assert "hook 'warns' in on_train_start" in done.stdout, done.stderr


def test_time_in_which_the_whole_process_was_suspended_does_not_count() -> None:
    done = run_script("""
        class Suspended(Hook):
            def on_train_start(self):
                with clock.running(0.15):  # it is looked at
                    while clock.now < clock.end:
                        time.sleep(0.01)
                subprocess.Popen(["sh", "-c", f"sleep 0.5; kill -CONT {os.getpid()}"])
                os.kill(os.getpid(), signal.SIGSTOP)
                clock.now += 100  # as the real one, which goes on meanwhile
                with clock.running(0.15):
                    while clock.now < clock.end:
                        time.sleep(0.01)

        watch(0.4, abort=True)
        quiet(hooks=[Suspended()]).fit(Net(), batches())
        print("done")
    """)
    assert done.stdout.split() == ["done"] and "not moved" not in done.stderr, done.stderr
