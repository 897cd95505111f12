"""Logged values: exact means, names, rows, and nothing read before it is due."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from metrics.reads import CountReads
from tiny import Net, batches, quiet
from torch import Tensor

from hookline import Hook, HooklineError, Logger, Metrics
from hookline.metrics.metric_log import MissingMetric


class Rows(Logger):
    """Keeps every row that goes out."""

    def __init__(self) -> None:
        self.rows: list[tuple[int, int, dict[str, float]]] = []

    def log_metrics(self, metrics: Any, step: int, epoch: int) -> None:
        self.rows.append((step, epoch, dict(metrics)))

    def of(self, name: str) -> list[tuple[int, float]]:
        return [(step, values[name]) for step, _, values in self.rows if name in values]


class Logs(Net):
    """Logs whatever `say` is told to, in every training step."""

    def __init__(self, name: str = "x", **options: Any) -> None:
        super().__init__()
        self.name, self.options = name, options

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.log(self.name, float(batch_idx), **self.options)
        return super().training_step(batch, batch_idx)


def uneven(sizes: list[int]) -> list[tuple[Tensor, Tensor]]:
    return [(torch.full((size, 4), float(size)), torch.zeros(size, 2)) for size in sizes]


# ---- the mapping -------------------------------------------------------------------------------------------------


def test_metrics_read_as_floats_whatever_they_are_made_of() -> None:
    metrics = Metrics({"tensor": torch.tensor(1.5), "one": torch.tensor([2]), "int": 3, "float": 4.5})
    assert dict(metrics) == {"tensor": 1.5, "one": 2.0, "int": 3.0, "float": 4.5}
    assert all(type(value) is float for value in metrics.values())


def test_all_tensors_of_a_mapping_are_read_in_one_go() -> None:
    metrics = Metrics({f"m{index}": torch.tensor(float(index)) for index in range(20)})
    with CountReads() as counter:
        assert metrics["m7"] == 7.0
        assert sum(metrics.values()) == 190.0
    assert len(counter.reads) == 1


def test_making_copying_and_asking_for_names_reads_nothing() -> None:
    with CountReads() as counter:
        metrics = Metrics({"a": torch.tensor(1.0)})
        assert "a" in metrics and list(metrics) == ["a"] and len(metrics.copy()) == 1
    assert counter.reads == []


def test_in_a_notebook_they_are_a_table() -> None:
    shown = Metrics({"val/loss": torch.tensor(0.123456789), "<b>": 2})._repr_html_()
    assert "val/loss" in shown and "0.123457" in shown
    assert "&lt;b&gt;" in shown and "<b>" not in shown
    assert Metrics()._repr_html_() == "no metrics"


def test_a_missing_metric_names_the_closest_and_the_known_ones() -> None:
    with pytest.raises(
        MissingMetric, match="no metric 'val/los'.*Did you mean 'val/loss'.*train/loss"
    ) as caught:
        Metrics({"val/loss": 1.0, "train/loss": 2.0})["val/los"]
    assert isinstance(caught.value, KeyError)


def test_a_number_as_the_key_says_that_the_results_are_one_mapping() -> None:
    results: Any = Metrics({"test/acc": torch.tensor(0.5)})
    with pytest.raises(MissingMetric, match=r"one mapping by name: \['test/acc'\], not \[0\]"):
        results[0]
    assert json.dumps(dict(results)) == '{"test/acc": 0.5}'


def test_a_copy_has_a_life_of_its_own() -> None:
    metrics = Metrics({"a": 1.0})
    copy = metrics.copy()
    copy["a"] = 2.0
    del copy["a"]
    assert dict(metrics) == {"a": 1.0}


# ---- names and rows ----------------------------------------------------------------------------------------------


def test_a_training_step_logs_per_step_under_the_plain_name() -> None:
    rows = Rows()
    quiet(logger=rows, log_every_n_steps=1).fit(Logs(), batches(3))
    assert rows.of("x") == [(1, 0.0), (2, 1.0), (3, 2.0)]
    assert rows.of("x_step") == rows.of("x_epoch") == []


def test_on_epoch_gives_the_mean_and_no_steps() -> None:
    rows = Rows()
    trainer = quiet(logger=rows, log_every_n_steps=1)
    trainer.fit(Logs(on_step=False, on_epoch=True), batches(3))
    assert rows.of("x") == [(3, 1.0)]
    assert trainer.metrics["x"] == 1.0


def test_both_get_step_and_epoch_names_and_the_plain_name_can_be_asked_for() -> None:
    rows = Rows()
    trainer = quiet(logger=rows, log_every_n_steps=1)
    trainer.fit(Logs(on_step=True, on_epoch=True), batches(3))
    assert rows.of("x_step") == [(1, 0.0), (2, 1.0), (3, 2.0)]
    assert rows.of("x_epoch") == [(3, 1.0)]
    assert rows.of("x") == []
    assert trainer.metrics["x"] == 1.0


@pytest.mark.parametrize(
    ("reduce", "expected"), [("mean", 1.5), ("sum", 6.0), ("min", 0.0), ("max", 3.0), ("last", 3.0)]
)
def test_reduce_says_how_an_epoch_is_made_one_number(reduce: str, expected: float) -> None:
    trainer = quiet()
    trainer.fit(Logs(on_step=False, on_epoch=True, reduce=reduce), batches(4))
    assert trainer.metrics["x"] == expected


def test_an_unknown_reduction_is_refused_with_the_closest() -> None:
    with pytest.raises(HooklineError, match="'x'.*reduce='avg'.*mean, sum, min, max, last"):
        quiet().fit(Logs(reduce="avg"), batches(1))
    with pytest.raises(HooklineError, match="Did you mean 'mean'"):
        quiet().fit(Logs(reduce="meen"), batches(1))


def test_an_unknown_reduction_is_refused_between_batches_too() -> None:
    trainer = quiet()
    trainer.on("train_epoch_end")(lambda trainer: trainer.log("x", 1.0, reduce="avg"))
    with pytest.raises(HooklineError, match="'x'.*reduce='avg'"):
        trainer.fit(Net(), batches(1))


def test_epoch_means_are_weighted_by_batch_size() -> None:
    class SizeNet(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            size = len(batch[0])
            self.log("size", size, on_step=False, on_epoch=True)
            self.log("even", size, on_step=False, on_epoch=True, batch_size=1)
            return self.layer(batch[0]).sum() * 0 + float(size)

        def validation_step(self, batch: Any, batch_idx: int) -> Any:
            return {"loss": torch.tensor(float(len(batch[0]))), "acc": float(len(batch[0]))}

    trainer = quiet()
    trainer.fit(SizeNet(), uneven([1, 2, 5]), uneven([1, 3]))
    assert trainer.metrics["size"] == pytest.approx((1 + 4 + 25) / 8)
    assert trainer.metrics["train/loss"] == pytest.approx((1 + 4 + 25) / 8)
    assert trainer.metrics["even"] == pytest.approx(8 / 3)
    assert trainer.metrics["val/loss"] == trainer.metrics["val/acc"] == pytest.approx(10 / 4)


def test_a_value_logged_at_batch_start_is_weighted_by_that_batch() -> None:
    class Early(Hook):
        def on_train_batch_start(self, trainer: Any, batch: Any) -> None:
            trainer.log("size", float(len(batch[0])), on_step=False, on_epoch=True)

    trainer = quiet(hooks=[Early()])
    trainer.fit(Net(0.0), uneven([1, 2, 5]))
    assert trainer.metrics["size"] == pytest.approx((1 + 4 + 25) / 8)


def test_every_epoch_starts_its_means_anew() -> None:
    seen = []

    class ByEpoch(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.log("e", float(self.current_epoch), on_step=False, on_epoch=True)
            return super().training_step(batch, batch_idx)

        def on_train_epoch_end(self, metrics: Any) -> None:
            seen.append(metrics["e"])

    quiet(max_epochs=3).fit(ByEpoch(), batches(2))
    assert seen == [0.0, 1.0, 2.0]


def test_rows_go_out_every_n_steps_and_at_the_epoch_end() -> None:
    rows = Rows()
    quiet(logger=rows, log_every_n_steps=2).fit(Logs(), batches(5))
    assert rows.of("x") == [
        (2, 1.0),
        (4, 3.0),
        (5, 4.0),
    ]  # nothing that was logged is lost at the end of an epoch
    assert [step for step, _ in rows.of("train/loss")] == [2, 4, 5]
    assert [step for step, _ in rows.of("lr")] == [2, 4]


def test_a_row_of_many_tensors_costs_one_read() -> None:
    class Many(Hook):
        def on_train_batch_end(self, trainer: Any, outputs: Any) -> None:
            trainer.log_dict(
                {f"m{index}": outputs * index for index in range(10)}, on_step=True, on_epoch=True
            )

    rows = Rows()
    # .item() is how the loss is checked to be finite, one step late; it has nothing to do with rows
    with CountReads() as counter:
        quiet(logger=rows, log_every_n_steps=2, hooks=[Many()]).fit(Net(), batches(6))
    assert len(rows.rows) == 4
    assert len([each for each in counter.reads if each != "item"]) == 4


@pytest.mark.parametrize("others", [0, 9])
def test_no_digit_is_lost_however_many_tensors_are_read_together(others: int) -> None:
    tokens, share = torch.tensor(2**24 + 1), torch.tensor(0.1, dtype=torch.float64)
    metrics = Metrics(
        {"tokens": tokens, "share": share, **{f"m{index}": torch.tensor(1.0) for index in range(others)}}
    )
    assert (metrics["tokens"], metrics["share"]) == (2**24 + 1, 0.1)
    assert all(type(value) is float for value in metrics.read().values())


def test_logged_tensors_stay_unread_until_a_row_is_due() -> None:
    class OnMeta(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            self.log("x", loss, on_step=True, on_epoch=True, prog_bar=True)
            return {"loss": loss, "y": loss * 2}

    # any host read of a meta tensor raises
    trainer = quiet(device="meta", max_epochs=2)
    trainer.fit(OnMeta(), batches(5))
    assert trainer.global_step == 10


def test_on_the_cpu_a_scalar_is_taken_as_the_number_it_is() -> None:
    class Logs(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            self.log("loss", loss, on_step=True, on_epoch=True)
            self.log("whole", torch.tensor([batch_idx]))
            self.log("flag", torch.tensor(True))
            self.log("elsewhere", torch.zeros((), device="meta"))
            return loss

    trainer = quiet()
    trainer.fit(Logs(), batches(3))
    kept = trainer.metrics.raw()
    assert all(type(kept[name]) is float for name in ("loss", "whole", "flag"))
    assert (kept["loss"], kept["whole"], kept["flag"]) == (pytest.approx(kept["train/loss"]), 2.0, 1.0)
    assert kept["elsewhere"].is_meta  # never read: there is nothing to read


def test_a_cpu_scalar_of_a_run_on_a_device_is_not_read_before_its_row() -> None:
    class Logs(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            arriving = torch.zeros(())  # as one that `.to("cpu", non_blocking=True)` has only begun to copy
            self.log("x", arriving)
            arriving.fill_(5.0)
            return super().training_step(batch, batch_idx)

    trainer = quiet(device="meta")
    trainer.fit(Logs(), batches(1))
    assert float(trainer.metrics.raw()["x"]) == 5.0


def test_logging_several_numbers_as_one_is_refused_on_the_cpu_too() -> None:
    class Logs(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.log("x", torch.zeros(2))

    with pytest.raises(
        HooklineError, match=r"log\('x', ...\) takes one number, not a tensor of shape \(2,\)"
    ):
        quiet().fit(Logs(), batches(1))


def test_logging_keeps_no_graph_alive() -> None:
    class Keep(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            self.log("x", loss, on_step=True, on_epoch=True, prog_bar=True)
            return loss

    trainer = quiet()
    trainer.fit(Keep(), batches(2))
    assert not any(
        value.requires_grad for value in trainer.metrics.raw().values() if isinstance(value, Tensor)
    )


# ---- from hooks, and at other moments ----------------------------------------------------------------------------


def test_hooks_log_like_the_module() -> None:
    class Reports(Hook):
        def on_train_batch_end(self, trainer: Any, batch_idx: int) -> None:
            trainer.log("hook/idx", float(batch_idx), on_step=True, on_epoch=True)
            trainer.log_dict({"hook/a": 1.0, "hook/b": 2.0}, on_step=False, on_epoch=True, reduce="sum")

    rows = Rows()
    quiet(logger=rows, log_every_n_steps=1, hooks=[Reports()]).fit(Net(), batches(3))
    assert rows.of("hook/idx_step") == [(1, 0.0), (2, 1.0), (3, 2.0)]
    assert rows.of("hook/idx_epoch") == [(3, 1.0)]
    assert rows.of("hook/a") == [(3, 3.0)]
    assert rows.of("hook/b") == [(3, 6.0)]


def test_what_is_logged_in_on_step_end_lands_under_that_step() -> None:
    class Late(Hook):
        def on_step_end(self, trainer: Any, step: int) -> None:
            trainer.log("late", float(step * 10))

    rows = Rows()
    quiet(logger=rows, log_every_n_steps=2, hooks=[Late()]).fit(Net(), batches(4))
    assert rows.of("late") == [(1, 10.0), (2, 20.0), (3, 30.0), (4, 40.0)]


def test_on_step_end_does_not_swallow_what_the_step_logged_before_its_row_was_due() -> None:
    class Late(Hook):
        def on_step_end(self, trainer: Any) -> None:
            trainer.log("late", 1.0)

    class FirstOnly(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if batch_idx == 0:
                self.log("first", 5.0)
            return super().training_step(batch, batch_idx)

    rows = Rows()
    quiet(logger=rows, log_every_n_steps=3, hooks=[Late()]).fit(FirstOnly(), batches(3))
    assert rows.of("first") == [(3, 5.0)]


def test_on_epoch_is_honoured_in_on_step_end_too() -> None:
    class Late(Hook):
        def on_step_end(self, trainer: Any, step: int) -> None:
            trainer.log("late", float(step), on_step=False, on_epoch=True)

    trainer = quiet(hooks=[Late()])
    trainer.fit(Net(), batches(3))
    assert trainer.metrics["late"] == 2.0


def test_what_is_logged_at_the_epoch_end_goes_into_the_epoch_row() -> None:
    class AtEnd(Hook):
        def on_train_epoch_end(self, trainer: Any, epoch: int) -> None:
            trainer.log("at_end", float(epoch))

    rows = Rows()
    trainer = quiet(logger=rows, max_epochs=2, hooks=[AtEnd()])
    trainer.fit(Net(), batches(2))
    assert rows.of("at_end") == [(2, 0.0), (4, 1.0)]
    assert [epoch for _, epoch, values in rows.rows if "at_end" in values] == [0, 1]
    assert trainer.metrics["at_end"] == 1.0


def test_what_is_logged_at_the_validation_end_goes_into_the_validation_row() -> None:
    class ValNet(Net):
        def on_validation_epoch_end(self) -> None:
            self.log("val/extra", 7.0)

    rows = Rows()
    trainer = quiet(logger=rows)
    trainer.fit(ValNet(), batches(2), batches(2))
    row = next(values for _, _, values in rows.rows if "val/loss" in values)
    assert row["val/extra"] == 7.0 == trainer.metrics["val/extra"]


def test_validation_steps_log_their_mean_and_leave_the_training_step_alone() -> None:
    class ValNet(Logs):
        def validation_step(self, batch: Any, batch_idx: int) -> Any:
            self.log("acc", float(batch_idx))
            return super().validation_step(batch, batch_idx)

    rows = Rows()
    trainer = quiet(logger=rows, log_every_n_steps=1, val_check_interval=1)
    trainer.fit(ValNet(), batches(2), batches(3))
    assert rows.of("acc") == [(1, 1.0), (2, 1.0)]
    assert rows.of("x") == [(1, 0.0), (2, 1.0)]


def test_the_sanity_check_leaves_no_metrics() -> None:
    seen = []

    class ValNet(Net):
        def on_train_start(self, metrics: Any = None) -> None:
            seen.append(dict(self.trainer.metrics))

    rows = Rows()
    quiet(logger=rows, num_sanity_val_steps=2, limit_val_batches=2).fit(ValNet(), batches(1), batches(2))
    assert seen == [{}]
    assert rows.of("val/loss")[0][0] == 1


def test_numbers_beside_the_loss_become_epoch_metrics() -> None:
    class DictNet(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return {"loss": super().training_step(batch, batch_idx), "acc": batch_idx, "text": "no metric"}

    trainer = quiet()
    trainer.fit(DictNet(), batches(3))
    assert trainer.metrics["train/acc"] == 1.0
    assert "train/text" not in trainer.metrics


def test_prog_bar_marks_values_for_the_bar() -> None:
    trainer = quiet()
    trainer.fit(Logs(prog_bar=True), batches(2))
    assert {name: float(value) for name, value in trainer.state.log.bar.items()} == {"x": 1.0}


# ---- what cannot be logged ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", ["text", None, [1.0, 2.0], {"a": 1}, torch.zeros(3), torch.zeros(2, 2)])
def test_what_is_no_number_is_refused_where_it_is_logged(value: Any) -> None:
    class Wrong(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            with pytest.raises(HooklineError, match="log\\('bad'"):
                self.log("bad", value)
            return super().training_step(batch, batch_idx)

    quiet().fit(Wrong(), batches(1))


def test_logging_outside_a_run_is_an_error_that_says_so() -> None:
    with pytest.raises(HooklineError, match="Net is not in a run"):
        Net().log("x", 1.0)


# ---- objects that compute themselves -----------------------------------------------------------------------------


class Largest:
    """What torchmetrics looks like from outside."""

    def __init__(self) -> None:
        self.seen: list[float] = []
        self.resets = 0

    def update(self, value: float) -> None:
        self.seen.append(value)

    def compute(self) -> Tensor:
        return torch.tensor(max(self.seen))

    def reset(self) -> None:
        self.seen, self.resets = [], self.resets + 1


class WithLargest(Net):
    def __init__(self) -> None:
        super().__init__()
        self.train_largest, self.val_largest = Largest(), Largest()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.train_largest.update(float(batch_idx + 10 * self.current_epoch))
        self.log("train/largest", self.train_largest)
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        self.val_largest.update(float(batch_idx))
        self.log("val/largest", self.val_largest)
        return super().validation_step(batch, batch_idx)


def test_prog_bar_shows_a_metric_object_from_the_end_of_its_pass_on() -> None:
    class Shown(WithLargest):
        def log(self, name: str, value: Any, **options: Any) -> None:
            super().log(name, value, prog_bar=name == "val/largest", **options)

    trainer = quiet()
    trainer.fit(Shown(), batches(2), batches(3))
    assert {name: float(value) for name, value in trainer.state.log.bar.items()} == {"val/largest": 2.0}


def test_a_metric_object_is_computed_and_reset_once_per_epoch() -> None:
    rows = Rows()
    module = WithLargest()
    quiet(logger=rows, max_epochs=2).fit(module, batches(4), batches(2))
    assert rows.of("train/largest") == [(4, 3.0), (8, 13.0)]
    assert rows.of("val/largest") == [(4, 1.0), (8, 1.0)]
    assert (module.train_largest.resets, module.val_largest.resets) == (2, 2)


def test_a_validation_in_the_middle_leaves_the_training_metric_object_alone() -> None:
    rows = Rows()
    module = WithLargest()
    quiet(logger=rows, val_check_interval=2).fit(module, batches(4), batches(2))
    assert rows.of("train/largest") == [(4, 3.0)]
    assert module.train_largest.resets == 1


def test_a_metric_object_logged_at_the_validation_end_counts_at_once() -> None:
    class AtEnd(Net):
        largest = Largest()

        def validation_step(self, batch: Any, batch_idx: int) -> Any:
            self.largest.update(float(batch_idx))

        def on_validation_epoch_end(self) -> None:
            self.log("val/largest", self.largest)

    seen = []
    trainer = quiet()
    trainer.on("validation_end")(lambda metrics: seen.append(metrics.get("val/largest")))
    trainer.fit(AtEnd(), batches(1), batches(3))
    assert seen == [2.0]


# ---- on_train_metrics --------------------------------------------------------------------------------------------


def test_a_row_can_be_edited_in_place() -> None:
    class Edits(Net):
        def on_tng_metrics(self, metrics: Any) -> None:
            metrics["added"] = metrics["train/loss"] * 0 + 1
            metrics.pop("lr", None)

    rows = Rows()
    quiet(logger=rows, log_every_n_steps=1).fit(Edits(), batches(2))
    assert rows.of("added") == [(1, 1.0), (2, 1.0), (2, 1.0)]
    assert rows.of("lr") == []


def test_a_returned_dictionary_is_what_is_logged_and_replacements_chain() -> None:
    class First(Hook):
        def on_train_metrics(self, metrics: Any) -> dict[str, Any]:
            return {"only": torch.tensor(1.0)}

    class Second(Hook):
        def on_train_metrics(self, metrics: Any) -> dict[str, Any]:
            return {**metrics, "twice": metrics["only"] * 2}

    rows = Rows()
    quiet(logger=rows, log_every_n_steps=1, hooks=[First(), Second()]).fit(Net(), batches(1))
    assert rows.rows[0] == (1, 0, {"only": 1.0, "twice": 2.0})


def test_edits_change_what_goes_out_not_what_was_measured() -> None:
    class Zero(Hook):
        def on_train_metrics(self, metrics: Any) -> None:
            metrics["train/loss"] = 0.0

    rows = Rows()
    trainer = quiet(logger=rows, log_every_n_steps=1, hooks=[Zero()])
    trainer.fit(Net(), batches(2))
    assert {value for _, value in rows.of("train/loss")} == {0.0}
    assert trainer.metrics["train/loss"] > 0


def test_rows_are_heard_even_without_a_logger() -> None:
    heard: list[list[str]] = []
    trainer = quiet(log_every_n_steps=1)
    trainer.on("train_metrics")(lambda metrics: heard.append(sorted(metrics)))
    trainer.fit(Logs(), batches(1))
    assert heard == [["lr", "train/loss", "x"], ["train/loss"]]


@pytest.mark.parametrize(
    ("value", "said"),
    [("text", "'text'"), (torch.ones(3), r"Tensor \(3,\)"), (None, "None"), ([1, 2], "list")],
    ids=["text", "vector", "nothing", "list"],
)
def test_a_metric_that_is_no_number_is_named_with_the_hook_that_put_it_there(value: Any, said: str) -> None:
    class Puts(Hook):
        def on_train_metrics(self, metrics: Any) -> None:
            metrics["x"] = value

    with pytest.raises(HooklineError, match=rf"The metric 'x' is {said}.*must be a number") as caught:
        quiet(hooks=[Puts()], logger=Logger(), log_every_n_steps=1).fit(Net(), batches(1))
    assert "raised by hook 'puts' in on_train_metrics" in caught.value.__notes__[0]


def test_of_several_hooks_that_edit_metrics_all_are_named() -> None:
    trainer = quiet(logger=Logger(), log_every_n_steps=1)
    trainer.on("train_metrics", name="first")(lambda metrics: metrics.update(y=1))
    trainer.on("train_metrics", name="second")(lambda metrics: metrics.update(x="text"))
    with pytest.raises(HooklineError, match="The metric 'x'") as caught:
        trainer.fit(Net(), batches(1))
    assert "by one of hook 'first', hook 'second'" in caught.value.__notes__[0]


def test_a_replaced_loss_is_what_loss_and_train_loss_show() -> None:
    seen: list[float] = []
    trainer = quiet(hooks=[])
    trainer.on("before_backward")(lambda loss: loss * 0 + 3.0)
    trainer.on("train_batch_end")(
        lambda loss, metrics, outputs: seen.extend([loss, metrics["loss"], float(outputs)])
    )
    metrics = trainer.fit(Net(), batches(1))
    assert seen[:2] == [3.0, 3.0] and metrics["train/loss"] == 3.0 and seen[2] != 3.0
