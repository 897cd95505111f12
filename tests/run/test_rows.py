"""Rows of metrics: what goes out, under which step, as edited by hooks, and also if the run fails."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import Net, batches, quiet

from hookline import Hook, Line, Logger


class Rows(Logger):
    """Keeps every row that was logged."""

    def __init__(self) -> None:
        self.rows: list[tuple[int, int, dict[str, float]]] = []

    def log_metrics(self, metrics: Mapping[str, float], step: int, epoch: int) -> None:
        self.rows.append((step, epoch, dict(metrics)))

    def column(self, name: str) -> list[float]:
        return [row[name] for _, _, row in self.rows if name in row]


def test_the_loss_and_the_rate_go_out_every_n_steps_under_their_step() -> None:
    rows = Rows()
    quiet(logger=rows, log_every_n_steps=2).fit(Net(), batches(5))
    steps = [(step, set(row)) for step, _, row in rows.rows]
    assert steps == [(2, {"train/loss", "lr"}), (4, {"train/loss", "lr"}), (5, {"train/loss"})]


def test_a_row_of_a_window_has_the_mean_over_the_window() -> None:
    rows = Rows()
    net = Net(lr=0.0)
    quiet(logger=rows, log_every_n_steps=1, accumulate_grad_batches=2).fit(net, batches(2))
    losses = [net.training_step(b, 0).item() for b in batches(2)]
    assert rows.rows[0][2]["train/loss"] == pytest.approx(sum(losses) / 2)


def test_validation_goes_out_as_a_row_of_its_own_at_the_step_it_was_done() -> None:
    rows = Rows()
    quiet(logger=rows, val_check_interval=2).fit(Net(), batches(4), batches(1))
    assert [step for step, _, row in rows.rows if "val/loss" in row] == [2, 4]


def test_the_sanity_check_is_not_logged() -> None:
    rows = Rows()
    quiet(logger=rows, num_sanity_val_steps=1, max_steps=1, check_val_every_n_epoch=5).fit(
        Net(), batches(4), batches(1)
    )
    assert rows.column("val/loss") == []


def test_what_a_step_logs_goes_out_with_its_step() -> None:
    class Logging(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.log("mine", batch_idx)
            return super().training_step(batch, batch_idx)

    rows = Rows()
    quiet(logger=rows, log_every_n_steps=1).fit(Logging(), batches(3))
    assert [(step, row["mine"]) for step, _, row in rows.rows if "mine" in row] == [
        (1, 0.0),
        (2, 1.0),
        (3, 2.0),
    ]


def test_what_a_hook_logs_at_the_end_of_a_step_has_that_very_step_number() -> None:
    rows = Rows()
    trainer = quiet(logger=rows, log_every_n_steps=1)
    trainer.on("step_end")(lambda trainer, step: trainer.log("mine", step))
    trainer.fit(Net(), batches(3))
    assert [(step, row["mine"]) for step, _, row in rows.rows if "mine" in row] == [
        (1, 1.0),
        (2, 2.0),
        (3, 3.0),
    ]


def test_what_a_hook_logs_at_the_epochs_end_goes_out_with_the_epoch() -> None:
    rows = Rows()
    trainer = quiet(logger=rows, max_epochs=2)
    trainer.on("train_epoch_end")(lambda trainer, epoch: trainer.log("mine", 10 + epoch))
    metrics = trainer.fit(Net(), batches(3))
    assert [(epoch, row["mine"]) for _, epoch, row in rows.rows if "mine" in row] == [(0, 10.0), (1, 11.0)]
    assert metrics["mine"] == 11.0


def test_metrics_may_be_edited_in_place_before_they_are_logged() -> None:
    def edit(metrics: Any) -> None:
        metrics["double"] = 2 * metrics["train/loss"]
        del metrics["train/loss"]

    rows = Rows()
    trainer = quiet(logger=rows, log_every_n_steps=1)
    trainer.on("train_metrics")(edit)
    trainer.fit(Net(), batches(2))
    assert rows.column("train/loss") == []
    assert len(rows.column("double")) == 3


def test_metrics_that_are_returned_are_logged_instead() -> None:
    class Replace(Net):
        def on_tng_metrics(self, metrics: Any) -> dict[str, float]:
            return {"only": 1.0}

    rows = Rows()
    quiet(logger=rows, log_every_n_steps=1).fit(Replace(), batches(2))
    assert all(row == {"only": 1.0} for _, _, row in rows.rows)
    assert len(rows.rows) == 3


def test_metrics_are_heard_even_if_nothing_is_logged_anywhere() -> None:
    seen: list[float] = []
    trainer = quiet(log_every_n_steps=2)
    trainer.on("train_metrics", when=lambda step: step == 2)(
        lambda metrics: seen.append(metrics.get("lr", -1.0))
    )
    trainer.fit(Net(), batches(3))
    assert seen == [0.1]


def test_a_logged_value_never_holds_the_graph() -> None:
    class Logging(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            self.log("mine", loss, on_step=True, on_epoch=True)
            return loss

    trainer = quiet()
    trainer.fit(Logging(), batches(3))
    for value in trainer.metrics.raw().values():
        assert not (isinstance(value, torch.Tensor) and value.requires_grad)
    assert {"mine", "mine_epoch"} <= set(trainer.metrics)


class Fails(Hook):
    """Logs something and fails, both at one event."""

    def __init__(self, event: str, at: int = 1) -> None:
        self.at, self.calls = at, 0
        self.__dict__[event] = self._fail

    def _fail(self, trainer: Any) -> None:
        self.calls += 1
        if self.calls == self.at:
            trainer.log("logged/before", 5.0)
            raise RuntimeError("a hook fails")


class Counting(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.log("acc", torch.tensor(float(batch_idx)))
        return loss


@pytest.mark.parametrize("event", ["on_validation_epoch_end", "on_validation_end"])
def test_a_validation_whose_end_fails_is_in_the_log(event: str) -> None:
    rows = Rows()
    with pytest.raises(RuntimeError, match="a hook fails") as caught:
        quiet(logger=rows, hooks=[Fails(event)]).fit(Net(), batches(2), batches(2))
    assert len(rows.column("val/loss")) == 1 and rows.column("logged/before") == [5.0]
    assert not [each for each in caught.value.__notes__ if "could not be logged" in each]


def test_a_sanity_check_that_fails_is_not_in_the_log() -> None:
    rows = Rows()
    with pytest.raises(RuntimeError, match="a hook fails"):
        quiet(logger=rows, num_sanity_val_steps=1, hooks=[Fails("on_validation_end")]).fit(
            Net(), batches(2), batches(2)
        )
    assert rows.rows == []


@pytest.mark.parametrize("event", ["on_test_epoch_end", "on_test_end"])
def test_a_test_whose_end_fails_is_in_the_log(event: str) -> None:
    rows = Rows()
    with pytest.raises(RuntimeError, match="a hook fails"):
        quiet(logger=rows, hooks=[Fails(event)]).test(Net(), batches(2))
    assert len(rows.column("test/loss")) == 1


def test_an_epoch_whose_end_fails_is_in_the_log() -> None:
    rows = Rows()
    with pytest.raises(RuntimeError, match="a hook fails"):
        quiet(logger=rows, hooks=[Fails("on_train_epoch_end")]).fit(Net(), batches(2), batches(2))
    assert len(rows.column("train/loss")) == 1 and rows.column("logged/before") == [5.0]


def test_a_row_is_in_the_log_as_it_was_measured_if_editing_it_fails() -> None:
    class Spoils(Hook):
        def on_train_metrics(self, metrics: Any) -> None:
            metrics["acc"] = 100.0
            raise RuntimeError("a hook fails")

    class SpoilsSilently(Hook):
        def on_train_metrics(self, metrics: Any) -> None:
            metrics["acc"] = torch.ones(2)

    for hook in (Spoils(), SpoilsSilently()):
        rows = Rows()
        with pytest.raises((RuntimeError, ValueError)):
            quiet(logger=rows, log_every_n_steps=2, hooks=[hook]).fit(Counting(), batches(4))
        assert rows.column("acc") == [1.0] and len(rows.column("train/loss")) == 1


@pytest.mark.parametrize("event", ["on_step_end", "on_train_batch_end"])
def test_what_was_logged_since_the_last_row_is_in_the_log_of_a_run_that_fails(event: str) -> None:
    rows = Rows()
    with pytest.raises(RuntimeError, match="a hook fails"):
        quiet(logger=rows, log_every_n_steps=2, hooks=[Fails(event, at=3)]).fit(Counting(), batches(4))
    assert rows.column("acc") == [1.0, 2.0] and rows.column("logged/before") == [5.0]
    assert rows.rows[-1][0] == 3


def test_a_logger_that_fails_as_well_does_not_hide_the_first_error() -> None:
    class Broken(Logger):
        def log_metrics(self, metrics: Mapping[str, float], step: int, epoch: int) -> None:
            raise OSError("the disk is full")

    with pytest.raises((RuntimeError, OSError)) as caught:
        quiet(logger=Broken(), hooks=[Fails("on_validation_end")]).fit(Net(), batches(2), batches(2))
    assert "a hook fails" in str(caught.value)


def test_a_validation_of_a_loop_written_by_hand_is_in_the_log_too(tmp_path: Path) -> None:
    rows = Rows()
    net = torch.nn.Linear(4, 2)
    with (
        pytest.raises(RuntimeError, match="a hook fails"),
        Line(net, hooks=[Fails("on_validation_end")], logger=rows) as line,
    ):
        for batch in line.epoch(batches(1)):
            for _ in line.validation(batches(2)):
                line.log("val/loss", torch.nn.functional.mse_loss(net(batch[0]), batch[1]))
    assert len(rows.column("val/loss")) == 1


def test_a_value_of_a_step_is_not_a_value_of_the_epoch_also_if_its_step_was_not_due() -> None:
    class Kept(Rows):
        tells_rows_apart = True

        def log_metrics(
            self, metrics: Mapping[str, float], step: int, epoch: int, over: str = "step"
        ) -> None:
            self.rows.append((step, epoch, {f"{over} {name}": each for name, each in metrics.items()}))

    class Logs(Hook):
        def on_train_epoch_end(self, trainer: Any) -> None:
            trainer.log("done", 9.0)

    rows = Kept()
    quiet(logger=rows, log_every_n_steps=2, max_epochs=2, hooks=[Logs()]).fit(Counting(), batches(3))
    assert [(step, epoch, row["step acc"]) for step, epoch, row in rows.rows if "step acc" in row] == [
        (2, 0, 1.0),
        (3, 0, 2.0),
        (4, 1, 0.0),
        (6, 1, 2.0),
    ]
    assert rows.column("epoch acc") == [] and rows.column("epoch done") == [9.0, 9.0]
