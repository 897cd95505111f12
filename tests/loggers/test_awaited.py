"""A logger of one's own: as if it were called directly while it is quick, and no hindrance once it is slow or hangs."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny import Net, batches, quiet

from hookline import Hook, JSONLines, Logger
from hookline.loggers import BadValue, Queued, make_loggers
from hookline.loggers import queued as module


class Rows(Logger):
    """Keeps the steps of its rows, each after a pause; hangs in the method it is told to hang in."""

    def __init__(self, hangs_in: str = "") -> None:
        self.hangs_in = hangs_in
        self.gate = threading.Event()
        self.steps: list[int] = []
        self.events: list[str] = []

    def _came(self, method: str) -> None:
        if method == self.hangs_in:
            self.gate.wait()
        self.events.append(method)

    def open(self, run_dir: Callable[[], Path]) -> None:
        self._came("open")

    def log_metrics(self, metrics: Mapping[str, float], step: int, epoch: int) -> None:
        self._came("log_metrics")
        self.steps.append(step)

    def close(self) -> None:
        self._came("close")


@pytest.fixture
def hung() -> Iterator[Callable[[str], Rows]]:
    made: list[Rows] = []

    def make(method: str) -> Rows:
        made.append(Rows(hangs_in=method))
        return made[-1]

    yield make
    for each in made:
        each.gate.set()  # no thread is left behind


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that no logger passes for slow because the machine is busy."""
    monkeypatch.setattr(module, "QUEUE_TIMEOUT", 60.0)


@pytest.fixture
def impatient(patient: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a test of what is slow is not."""
    monkeypatch.setattr(module, "QUEUE_TIMEOUT", 0.1)


@pytest.mark.parametrize(
    "values",
    [torch.zeros(1000), [torch.zeros(500), np.zeros(250, dtype=np.float64)], torch.ones(1000).to_sparse()],
    ids=["tensor", "several", "sparse"],
)
def test_tensors_that_wait_are_bounded_by_their_bytes(
    values: Any, hung: Callable[[str], Rows], impatient: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "QUEUE_BYTES", 13_000)
    rows = hung("log_metrics")
    logger = Queued(rows, timeout=0.1, waits=True)
    logger.log_metrics({}, 1, 0)
    for step in range(10):
        logger.add_histogram("w", values, step)  # 4001 bytes each, with the tag
    assert logger.dropped == 7
    rows.gate.set()
    logger.timeout = 20
    logger.close()


# ---- quick: nobody can tell ----------------------------------------------------------------------------------------


def test_a_quick_logger_has_each_row_before_the_next_event() -> None:
    rows, seen = Rows(), []

    class Looks(Hook):
        def on_step_end(self, step: int) -> None:
            seen.append((step, list(rows.steps)))

    quiet(logger=rows, hooks=[Looks()], log_every_n_steps=1).fit(Net(), batches(3))
    assert seen == [(1, [1]), (2, [1, 2]), (3, [1, 2, 3])]
    assert rows.events == ["open", *["log_metrics"] * 4, "close"]


def test_one_thread_opens_writes_and_closes() -> None:
    threads: list[threading.Thread] = []

    class Looks(Rows):
        def _came(self, method: str) -> None:
            threads.append(threading.current_thread())

    quiet(logger=Looks()).fit(Net(), batches(1))
    assert len(threads) == 3 and len(set(threads)) == 1
    assert threads[0] is not threading.main_thread() and not threads[0].is_alive()


class Told(Logger):
    """Keeps what its rows are over, and what happened."""

    tells_rows_apart = True

    def __init__(self, queued: bool | None) -> None:
        self.queued = queued
        self.over: list[str] = []
        self.happened: list[tuple[str, Any]] = []

    def log_metrics(self, metrics: Mapping[str, float], step: int, epoch: int, over: str = "") -> None:
        self.over.append(over)

    def log_event(self, kind: str, data: Mapping[str, Any]) -> None:
        self.happened.append((kind, data))


@pytest.mark.parametrize("queued", [None, True, False])
def test_a_logger_of_ones_own_hears_what_a_row_is_over_and_what_happens(queued: bool | None) -> None:
    told = Told(queued)
    quiet(logger=told, log_every_n_steps=1).fit(Net(), batches(2), batches(1))
    assert told.over == ["step", "step", "evaluation", "epoch"]
    kind, data = told.happened[-1]
    assert (kind, data["step"], data["status"]) == ("end", 2, "completed")


def test_a_logger_that_cannot_tell_rows_apart_is_not_asked_to() -> None:
    rows = Rows()
    quiet(logger=Queued(rows), log_every_n_steps=1).fit(Net(), batches(2))
    assert rows.steps == [1, 2, 2]


def test_values_come_as_they_were_logged_and_stay_that_way() -> None:
    given: list[Any] = []

    class Keeps(Logger):
        def add_histogram(self, tag: str, values: Any, global_step: int | None = None) -> None:
            given.append(values)

        def add_scalar(self, tag: str, scalar_value: Any, global_step: int | None = None) -> None:
            given.append(scalar_value)

        def add_image(self, tag: str, img_tensor: Any, global_step: int | None = None) -> None:
            given.append(img_tensor)

        def add_figure(self, tag: str, figure: Any, global_step: int | None = None) -> None:
            given.append(figure)

        def log_hyperparams(self, params: Mapping[str, Any]) -> None:
            given.append(params)

    weight, image, figure = torch.nn.Parameter(torch.ones(2)), np.zeros((1, 2, 2)), object()
    params = {"path": Path("x"), "net": {"sizes": [1, 2]}}
    logger = Queued(Keeps(), waits=True)
    logger.add_histogram("w", weight)
    logger.add_image("i", image)
    logger.add_figure("f", figure)
    logger.add_scalar("s", torch.tensor(3))
    logger.log_hyperparams(params)
    weight.data.zero_(), image.fill(1), params["net"]["sizes"].append(3)  # type: ignore[index]
    logger.close()
    assert torch.equal(given[0], torch.ones(2)) and not given[0].requires_grad
    assert isinstance(given[1], np.ndarray) and not given[1].any()
    assert given[2] is figure and given[3].item() == 3
    assert given[4] == {"path": Path("x"), "net": {"sizes": [1, 2]}}


def test_a_wrong_value_is_raised_where_it_was_logged_and_switches_no_logger_off() -> None:
    class Picky(Rows):
        def add_text(self, tag: str, text_string: str, global_step: int | None = None) -> None:
            raise BadValue("no text here")

    class Tells(Hook):
        def on_train_batch_end(self, logger: Any) -> None:
            with pytest.raises(BadValue, match="no text here"):
                logger.add_text("a", "b")

    rows = Picky()
    quiet(logger=rows, hooks=[Tells()], log_every_n_steps=1).fit(Net(), batches(2))
    assert rows.steps == [1, 2, 2]


def test_a_logger_may_log_to_its_own_group() -> None:
    class Echoes(Rows):
        def log_metrics(self, metrics: Mapping[str, float], step: int, epoch: int) -> None:
            trainer.logger.add_text("echo", str(step))

        def add_text(self, tag: str, text_string: str, global_step: int | None = None) -> None:
            self.events.append(text_string)

    rows = Echoes()
    trainer = quiet(logger=rows, log_every_n_steps=1)
    trainer.fit(Net(), batches(2))
    assert rows.events == ["open", "1", "2", "2", "close"]


def test_who_is_waited_for_who_is_queued_and_who_is_called_directly() -> None:
    class Direct(Logger):
        queued = False

    class Behind(Logger):
        queued = True

    plain, direct, behind, lines = Logger(), Direct(), Behind(), JSONLines()
    group = make_loggers([plain, direct, behind, lines], JSONLines)
    assert [type(each) for each in group._called] == [Queued, Direct, Queued, JSONLines]
    assert [getattr(each, "waits", None) for each in group._called] == [True, None, False, None]
    assert group.members[0] is plain  # whoever looks for it finds it


# ---- slow, hanging, failing ----------------------------------------------------------------------------------------


@pytest.mark.usefixtures("impatient")
def test_a_slow_logger_is_no_longer_waited_for_and_still_gets_every_row(
    caplog: pytest.LogCaptureFixture,
) -> None:
    rows, behind = Rows(hangs_in="log_metrics"), []

    class Looks(Hook):
        def on_step_end(self, step: int) -> None:
            behind.append(step - len(rows.steps))

        def on_train_end(self) -> None:
            rows.gate.set()

    quiet(logger=rows, hooks=[Looks()], log_every_n_steps=1).fit(Net(), batches(20))
    assert rows.steps == [*range(1, 21), 20]
    assert behind[-1] == 20
    assert [record.message for record in caplog.records] == [
        "Rows is slow (the last call was log_metrics); the run continues without waiting for it"
    ]


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize(("method", "lost"), [("open", 5), ("log_metrics", 4), ("close", 0)])
def test_a_logger_that_hangs_holds_up_neither_the_training_nor_its_end(
    hung: Callable[[str], Rows], caplog: pytest.LogCaptureFixture, method: str, lost: int
) -> None:
    bad, good = hung(method), Rows()
    through = Queued(bad, timeout=0.2, waits=True)
    trainer = quiet(logger=[through, good], log_every_n_steps=1)
    trainer.fit(Net(), batches(3))
    assert trainer.state.step == 3 and trainer.status == "completed"
    assert good.steps == [1, 2, 3, 3] and bad.steps == ([1, 2, 3, 3] if method == "close" else [])
    assert caplog.records[-1].message == f"Rows did not finish within 0.2 s: {lost} records are given up"


@pytest.mark.usefixtures("impatient")
def test_what_does_not_fit_into_the_queue_is_counted(
    hung: Callable[[str], Rows], caplog: pytest.LogCaptureFixture
) -> None:
    quiet(logger=Queued(hung("log_metrics"), size=2, timeout=0.2, waits=True), log_every_n_steps=1).fit(
        Net(), batches(6)
    )
    assert [record.message for record in caplog.records][1:] == [
        "Rows is slower than the run: its queue of 2 records is full, records are dropped",
        "Rows did not finish within 0.2 s: 3 records are given up",
        "Rows could not keep up: 4 records were dropped",
    ]


@pytest.mark.usefixtures("impatient")
def test_the_next_run_waits_for_it_again_or_leaves_it_off_while_it_hangs(hung: Callable[[str], Rows]) -> None:
    bad = hung("log_metrics")
    through = Queued(bad, timeout=0.2, waits=True)
    for _ in range(2):
        quiet(logger=through, log_every_n_steps=1).fit(Net(), batches(1))
    assert bad.events == ["open"] and through.off
    stuck = through._thread
    bad.gate.set()
    assert stuck is not None
    stuck.join(60)
    quiet(logger=through, log_every_n_steps=1).fit(Net(), batches(1))
    assert bad.events[-4:] == ["open", "log_metrics", "log_metrics", "close"]


@pytest.mark.parametrize(
    "error",
    [OSError("disk full"), SystemExit(1), KeyboardInterrupt()],
    ids=lambda error: type(error).__name__,
)
def test_a_logger_that_fails_is_named_once_and_the_run_continues(
    error: BaseException, caplog: pytest.LogCaptureFixture
) -> None:
    class Fails(Rows):
        def log_metrics(self, metrics: Mapping[str, float], step: int, epoch: int) -> None:
            raise error

    bad = Fails()
    trainer = quiet(logger=bad, log_every_n_steps=1)
    trainer.fit(Net(), batches(3))
    assert trainer.state.step == 3 and bad.events == ["open", "close"]
    assert [record.message for record in caplog.records] == [
        "Fails failed in log_metrics and is switched off for this run"
    ]
    assert type(error).__name__ in caplog.text
