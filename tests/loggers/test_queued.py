"""A slow, failing or hanging logger costs the training nothing but its records."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from loggers.everything import figure
from tiny import Net, batches, quiet

from hookline import Logger, OptionError
from hookline.loggers import BadValue, JSONLines, Queued
from hookline.loggers import queued as module


class Keeps(Logger):
    """Remembers what it was told and in which thread; blocks at the gate, and fails if told to."""

    def __init__(self) -> None:
        self.told: list[tuple[str, tuple[Any, ...]]] = []
        self.threads: set[str] = set()
        self.gate = threading.Event()
        self.gate.set()
        self.error: BaseException | None = None
        self.reached = threading.Event()

    def _take(self, method: str, *given: Any) -> None:
        self.reached.set()
        self.gate.wait()
        self.told.append((method, given))
        self.threads.add(threading.current_thread().name)
        if self.error is not None:
            raise self.error

    @property
    def client(self) -> Any:
        self._take("client")
        return self.told

    def open(self, run_dir: Callable[[], Path]) -> None:
        self.where = run_dir

    def log_metrics(self, metrics: Mapping[str, float], step: int, epoch: int) -> None:
        self._take("log_metrics", metrics, step, epoch)

    def log_hyperparams(self, params: Mapping[str, Any]) -> None:
        self._take("log_hyperparams", params)

    def add_scalar(self, tag: str, scalar_value: Any, global_step: int | None = None) -> None:
        self._take("add_scalar", tag, scalar_value, global_step)

    def add_histogram(self, tag: str, values: Any, global_step: int | None = None) -> None:
        self._take("add_histogram", tag, values, global_step)

    def add_image(self, tag: str, img_tensor: Any, global_step: int | None = None) -> None:
        self._take("add_image", tag, img_tensor, global_step)

    def close(self) -> None:
        self.told.append(("close", ()))


@pytest.fixture
def slow() -> Iterator[Keeps]:
    logger = Keeps()
    yield logger
    logger.gate.set()  # no thread is left behind


def methods(logger: Keeps) -> list[str]:
    return [method for method, _ in logger.told]


def test_records_arrive_in_order_in_another_thread_and_all_are_there_when_it_is_closed(
    slow: Keeps, tmp_path: Path
) -> None:
    queued = Queued(slow)
    queued.open(lambda: tmp_path)
    for step in range(50):
        queued.log_metrics({"a": step}, step, 0)
    queued.close()
    assert slow.told == [("log_metrics", ({"a": step}, step, 0)) for step in range(50)] + [("close", ())]
    assert slow.threads == {"hookline-Keeps"}
    assert slow.where() == tmp_path


def test_a_run_is_logged_whole_through_the_queue() -> None:
    quiet(logger=Queued(JSONLines()), run_dir="mine", log_every_n_steps=1).fit(Net(), batches(3))
    assert Path("mine/log.jsonl").read_text().count('"train/loss"') == 4


def test_what_is_handed_over_may_change_right_after(slow: Keeps) -> None:
    queued, row, weights, image = Queued(slow), {"a": 1.0}, torch.zeros(3), torch.zeros(1, 2, 2)
    params = {"net": {"width": 8}}
    slow.gate.clear()
    queued.log_metrics(row, 1, 0)
    queued.add_histogram("w", weights, 1)
    queued.add_image("i", image, 1)
    queued.log_hyperparams(params)
    row["a"], params["net"]["width"] = 2.0, 9
    weights.fill_(5), image.fill_(1)
    slow.gate.set()
    queued.close()
    given = [each for _, each in slow.told]
    assert given[0][0] == {"a": 1.0} and given[1][1].tolist() == [0, 0, 0] and not given[2][1].any()
    assert given[3][0] == {"net": {"width": 8}}


def test_a_figure_is_drawn_where_it_was_made_and_arrives_as_an_image(slow: Keeps) -> None:
    queued = Queued(slow)
    queued.add_figure("f", figure(), 2)
    queued.close()
    (method, (tag, image, step)), _ = slow.told
    assert (method, tag, step, image.shape) == ("add_image", "f", 2, (4, 100, 100))
    assert len(np.unique(image)) > 2  # something is drawn on it


def test_a_full_queue_drops_counts_and_warns_once(slow: Keeps, caplog: pytest.LogCaptureFixture) -> None:
    queued = Queued(slow, size=3)
    slow.gate.clear()
    queued.log_metrics({"a": 0}, 0, 0)
    assert slow.reached.wait(60)  # one is being written, so three more fit
    for step in range(1, 11):
        queued.log_metrics({"a": step}, step, 0)
    assert queued.dropped == 7
    assert [record.message for record in caplog.records] == [
        "Keeps is slower than the run: its queue of 3 records is full, records are dropped"
    ]
    slow.gate.set()
    queued.close()
    assert [given[1] for method, given in slow.told if method == "log_metrics"] == [0, 1, 2, 3]
    assert caplog.records[-1].message == "Keeps could not keep up: 7 records were dropped"


def test_large_tensors_cannot_fill_the_memory(slow: Keeps, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hookline.loggers.queued.QUEUE_BYTES", 1000)
    queued = Queued(slow)
    slow.gate.clear()
    queued.add_histogram("w", torch.zeros(10_000), 0)  # a single one always fits
    assert slow.reached.wait(60)
    for step in range(10):
        queued.add_histogram("w", torch.zeros(100), step)
    assert queued.dropped == 8
    slow.gate.set()
    queued.close()


@pytest.mark.parametrize(
    "error",
    [RuntimeError("no network"), SystemExit(1), ValueError("odd")],
    ids=lambda error: type(error).__name__,
)
def test_a_failing_logger_is_reported_once_and_switched_off_and_the_run_continues(
    slow: Keeps, caplog: pytest.LogCaptureFixture, error: BaseException
) -> None:
    slow.error = error
    queued = Queued(slow)
    trainer = quiet(logger=[queued, JSONLines()], run_dir="mine", log_every_n_steps=1)
    trainer.fit(Net(), batches(5))
    assert trainer.state.step == 5 and queued.off
    assert methods(slow) == ["log_hyperparams", "close"]
    assert [record.message for record in caplog.records] == [
        "Keeps failed in log_hyperparams and is switched off for this run"
    ]
    assert repr(error.args[0]).strip("'") in caplog.text
    assert Path("mine/log.jsonl").read_text().count('"train/loss"') == 6


def test_a_hanging_logger_neither_stops_the_training_nor_its_end(
    slow: Keeps, caplog: pytest.LogCaptureFixture
) -> None:
    slow.gate.clear()
    queued = Queued(slow, timeout=0.2)
    trainer = quiet(logger=queued, log_every_n_steps=1)
    trainer.fit(Net(), batches(5))
    assert trainer.state.step == 5
    assert [record.message for record in caplog.records] == [
        "Keeps did not finish within 0.2 s: 7 records are given up"
    ]


def test_the_run_after_one_that_hangs_is_not_held_up_either(
    slow: Keeps, caplog: pytest.LogCaptureFixture
) -> None:
    slow.gate.clear()
    queued = Queued(slow, timeout=0.2)
    for _ in range(2):
        quiet(logger=queued, log_every_n_steps=1).fit(Net(), batches(2))
    assert caplog.records[-1].message == "Keeps still hangs in an earlier run and stays switched off"
    assert queued.client is None
    stuck = queued._thread
    slow.gate.set()
    assert stuck is not None
    stuck.join(60)
    assert not stuck.is_alive()
    quiet(logger=queued, log_every_n_steps=1).fit(Net(), batches(1))
    assert methods(slow)[-3:] == ["log_metrics", "log_metrics", "close"]  # it came back


def test_a_logger_that_failed_gets_another_chance_in_the_next_run(slow: Keeps) -> None:
    queued = Queued(slow)
    slow.error = RuntimeError("once")
    quiet(logger=queued, log_every_n_steps=1).fit(Net(), batches(1))
    slow.error, slow.told = None, []
    quiet(logger=queued, log_every_n_steps=1).fit(Net(), batches(1))
    assert methods(slow) == ["log_hyperparams", "log_metrics", "log_metrics", "close"]


def test_a_wrong_value_is_the_callers_mistake_and_is_raised_there(slow: Keeps) -> None:
    queued = Queued(slow)
    with pytest.raises(BadValue, match=r"'x' takes one number, not a Tensor of shape \(2,\)"):
        queued.add_scalar("x", torch.zeros(2))
    with pytest.raises(BadValue, match="'x' takes a tensor of numbers, not a str"):
        queued.add_histogram("x", "text")
    with pytest.raises(BadValue, match=r"image of shape .* not a Tensor of shape \(2, 4, 4\)"):
        queued.add_image("x", torch.zeros(2, 4, 4))
    with pytest.raises(BadValue, match="'x' takes a matplotlib figure, not a str"):
        queued.add_figure("x", "text")
    queued.add_scalar("x", 1.0)
    queued.close()
    assert methods(slow) == ["add_scalar", "close"] and not queued.off


def test_the_client_can_be_had_through_the_queue(slow: Keeps) -> None:
    queued = Queued(slow, timeout=60)
    queued.add_scalar("a", 1.0)
    assert queued.client is slow.told
    assert slow.threads == {"hookline-Keeps"}
    queued.close()
    slow.error = RuntimeError("no client")
    assert queued.client is None
    queued.close()


class Counts(Keeps):
    """Its position is how many records it has."""

    def position(self) -> Any:
        return len(self.told)

    def resume(self, position: Any, step: int, epoch: int, path: Path | str) -> None:
        self._take("resume", position, step, epoch, path)


def test_a_position_counts_everything_that_was_handed_over_before_it() -> None:
    logger = Counts()
    queued = Queued(logger)
    queued.open(Path)
    queued.resume(7, 2, 1, "checkpoint")
    for step in range(200):
        queued.log_metrics({}, step, 0)
    assert queued.position() == 201 and logger.told[0] == ("resume", (7, 2, 1, "checkpoint"))
    queued.close()


def test_a_slow_logger_costs_its_checkpoints_a_second_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "QUEUE_TIMEOUT", 0.1)
    logger = Counts()
    queued = Queued(logger, timeout=60)
    queued.open(Path)
    logger.gate.clear()
    queued.log_metrics({}, 1, 0)
    assert [queued.position() for _ in range(3)] == [
        None
    ] * 3  # the first is waited for in vain, the others are not
    with queued._changed:
        assert [method for method, _ in queued._records].count("position") == 1
    logger.gate.set()
    queued.close()
    queued.open(Path)
    queued.log_metrics({}, 1, 0)
    assert queued.position() is not None  # a new run, a new chance
    queued.close()


def test_a_logger_without_a_position_is_not_asked(slow: Keeps) -> None:
    queued = Queued(slow)
    queued.open(lambda: pytest.fail("nothing was written"))
    assert queued.position() is None


def test_nothing_is_started_or_made_when_nothing_is_logged(slow: Keeps) -> None:
    queued = Queued(slow)
    queued.open(lambda: pytest.fail("nothing was written"))
    queued.close()
    assert slow.told == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"size": 0}, "size=0 must be"),
        ({"size": True}, "size=True"),
        ({"timeout": 0}, "timeout=0 must be"),
        ({"timeout": "1"}, "timeout='1'"),
        ({"timeout": float("nan")}, "timeout=nan"),
        ({"logger": "wandb"}, "takes one logger"),
        ({"logger": Queued(Logger())}, "takes one logger"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        Queued(**{"logger": Logger(), **options})


def test_the_reports_go_to_the_projects_own_log(slow: Keeps, caplog: pytest.LogCaptureFixture) -> None:
    slow.error = RuntimeError("broken")
    queued = Queued(slow)
    queued.add_scalar("a", 1.0)
    queued.close()
    assert [(record.name, record.levelno) for record in caplog.records] == [("hookline", logging.WARNING)]
