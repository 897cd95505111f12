"""What would go wrong without a word: lost, doubled or broken state, and training that trains nothing."""

from __future__ import annotations

import contextlib
import gc
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import Net, batches, quiet
from torch.utils.data import DataLoader, Dataset, TensorDataset

from hookline import Hook, NonFiniteLoss, OptionError
from hookline.checkpoint.files import read, write
from hookline.data.loaders import make_loaders


def poisoned() -> list[Any]:
    data = batches(6)
    data[2][1].fill_(float("nan"))
    return data


class SaveOnFailure(Hook):
    def on_exception(self, trainer: Any) -> None:
        trainer.save_checkpoint(Path("failed"), reason="exception")


class FailAtStep(Hook):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, step: int) -> None:
        if step == self.step:
            raise ZeroDivisionError


def test_a_run_that_became_nan_is_not_saved_by_a_hook_that_saves_on_failure() -> None:
    with pytest.raises(NonFiniteLoss):
        quiet(hooks=[SaveOnFailure()]).fit(Net(), poisoned())
    assert not Path("failed").exists()


def test_a_run_saved_when_it_failed_continues_with_the_next_batch() -> None:
    def run(*hooks: Hook, resume: str | None = None) -> tuple[Net, Any]:
        torch.manual_seed(0)
        net, trainer = Net(), quiet(max_epochs=3, hooks=hooks)
        trainer.fit(net, batches(6), resume=resume)
        return net, trainer

    with pytest.raises(ZeroDivisionError):
        run(SaveOnFailure(), FailAtStep(3))
    resumed, trainer = run(resume="failed")
    assert (trainer.global_step, trainer.state.batches_seen) == (18, 18)
    assert torch.equal(resumed.layer.weight, run()[0].layer.weight)


def test_a_step_that_failed_does_not_count_in_its_window_after_a_resume() -> None:
    class OutOfMemory(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if batch_idx == 1 and not self.trainer.state.resumed:
                raise ZeroDivisionError
            return super().training_step(batch, batch_idx)

    with pytest.raises(ZeroDivisionError):
        quiet(accumulate_grad_batches=3, hooks=[SaveOnFailure()]).fit(OutOfMemory(), batches(6))
    trainer = quiet(accumulate_grad_batches=3)
    trainer.fit(OutOfMemory(), batches(6), resume="failed")
    assert trainer.global_step == 2


def shuffled(seed: int | None) -> Any:
    inputs = torch.arange(24.0).reshape(24, 1).repeat(1, 4)
    generator = torch.Generator().manual_seed(seed) if seed is not None else None
    return DataLoader(TensorDataset(inputs, inputs[:, :2]), 4, shuffle=True, generator=generator)


def order_of(trainer: Any) -> list[float]:
    seen: list[float] = []
    trainer.on("train_batch_end")(lambda batch: seen.extend(batch[0][:, 0].tolist()))
    return seen


@pytest.mark.parametrize("seed", [None, 7])
@pytest.mark.parametrize("save_at", [6, 9])
def test_a_shuffled_loader_continues_in_the_same_order(seed: int | None, save_at: int) -> None:
    whole = quiet(max_epochs=3, seed=1)
    expected = order_of(whole)

    @whole.on("step_end")
    def save(step: int) -> None:
        if step == save_at:
            whole.save_checkpoint(Path("half"))

    whole.fit(Net(lr=1e-4), shuffled(seed))
    resumed = quiet(max_epochs=3, seed=99)
    order = order_of(resumed)
    resumed.fit(Net(lr=1e-4), shuffled(seed), resume="half")
    assert order == expected[save_at * 4 :]


def test_drawing_at_the_start_does_not_shift_a_run_resumed_between_epochs() -> None:
    whole = quiet(max_epochs=2, seed=1)
    expected = order_of(whole)
    whole.on("train_epoch_end", once=True)(lambda: whole.save_checkpoint(Path("half")))
    whole.fit(Net(lr=1e-4), shuffled(None))
    resumed = quiet(max_epochs=2, seed=99)
    order = order_of(resumed)

    @resumed.on("train_start")
    def draw() -> None:
        torch.randn(3)

    resumed.fit(Net(lr=1e-4), shuffled(None), resume="half")
    assert order == expected[24:]


def test_saving_many_tensors_is_not_quadratic(tmp_path: Path) -> None:
    comparisons = 0
    real = torch.Tensor.data_ptr

    def counted(self: Any) -> int:
        nonlocal comparisons
        comparisons += 1
        return real(self)

    torch.Tensor.data_ptr = counted  # type: ignore[method-assign]
    try:
        write({"module": {str(n): torch.zeros(1) for n in range(300)}}, tmp_path / "many")
    finally:
        torch.Tensor.data_ptr = real  # type: ignore[method-assign]
    assert comparisons <= 3 * 300
    assert len(read(tmp_path / "many")["module"]) == 300


def test_a_scheduler_with_milestones_is_saved_and_restored() -> None:
    class Milestones(Net):
        def configure_optimizers(self) -> Any:
            optimizer = super().configure_optimizers()
            return {
                "optimizer": optimizer,
                "lr_scheduler": torch.optim.lr_scheduler.MultiStepLR(optimizer, [1, 2]),
            }

    first = quiet(max_epochs=1)
    first.on("train_epoch_end")(lambda: first.save_checkpoint(Path("one")))
    first.fit(Milestones(), batches(2))
    second = quiet(max_epochs=3)
    second.fit(Milestones(), batches(2), resume="one")
    assert second.optimizers[0].param_groups[0]["lr"] == pytest.approx(0.001)


def test_an_open_window_in_half_precision_is_resumed() -> None:
    class NoneLast(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return super().training_step(batch, batch_idx) if batch_idx == 0 else None

    options: dict[str, Any] = {"precision": "16-mixed", "device": "cpu", "accumulate_grad_batches": 2}
    first = quiet(**options)
    first.on("train_batch_end", once=True)(lambda: first.save_checkpoint(Path("open")))
    first.fit(NoneLast(), batches(2))
    second = quiet(**options)
    second.fit(NoneLast(), batches(2), resume="open")
    assert second.state.batches_seen == 2


class Manual(Net):
    automatic_optimization = False
    clip: float | None = None
    returns = True

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        optimizer = self.optimizers()
        loss = super().training_step(batch, batch_idx)
        optimizer.zero_grad()
        self.manual_backward(loss, retain_graph=True)
        if self.clip is not None:
            self.clip_gradients(optimizer, self.clip)
        optimizer.step()
        return {"loss": loss, "extra": loss * 0 + 2} if self.returns else None


def test_clipping_by_hand_clips_true_gradients_in_half_precision_too() -> None:
    def change(**options: Any) -> torch.Tensor:
        torch.manual_seed(0)
        net = Manual()
        net.clip = 0.5
        before = net.layer.weight.detach().clone()
        trainer = quiet(device="cpu", **options)
        if trainer.strategy.precision.scaler is not None:
            trainer.strategy.precision.scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
        trainer.fit(net, batches(1))
        return net.layer.weight.detach() - before

    torch.testing.assert_close(change(), change(precision="16-mixed"), rtol=0.05, atol=1e-3)


def test_a_manual_step_that_returns_nothing_is_watched_and_its_numbers_are_logged_if_it_returns_them() -> (
    None
):
    silent = Manual()
    silent.returns = False
    with pytest.raises(NonFiniteLoss):
        quiet().fit(silent, poisoned())
    assert quiet().fit(Manual(), batches(3))["train/extra"] == 2.0


def test_a_removed_hook_is_torn_down_only_when_it_is_not_called_any_more() -> None:
    calls: list[str] = []

    class File(Hook):
        name = "file"
        open = True

        def on_step_end(self) -> None:
            assert self.open
            calls.append("write")

        def teardown(self) -> None:
            self.open = False
            calls.append("close")

    class Remover(Hook):
        def on_step_end(self, trainer: Any, step: int) -> None:
            if step == 2:
                trainer.remove_hook("file")

    quiet(hooks=[Remover(), File()]).fit(Net(), batches(4))
    assert calls == ["write", "write", "close"]


def test_a_failed_run_lets_go_of_its_tensors() -> None:
    kept: list[Any] = []

    class Fails(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            activation = self.layer(batch[0])
            kept.append(weakref.ref(activation))
            raise ZeroDivisionError

    trainer = quiet()
    with contextlib.suppress(ZeroDivisionError):
        trainer.fit(Fails(), batches(1))
    gc.collect()
    assert kept[0]() is None


def test_a_finished_run_keeps_no_graph() -> None:
    trainer = quiet()
    trainer.fit(Net(), batches(2))
    assert trainer.state.returned is None


def test_training_in_eval_mode_is_pointed_out(caplog: pytest.LogCaptureFixture) -> None:
    net = Net().eval()
    quiet().fit(net, batches(1))
    assert "Net is in eval mode" in caplog.text
    caplog.clear()
    quiet().fit(net.train(), batches(1))
    assert caplog.text == ""


def test_a_dataset_is_not_taken_for_a_loader() -> None:
    with pytest.raises(OptionError, match=r"is a dataset \(TensorDataset\).*DataLoader"):
        quiet().fit(Net(), TensorDataset(torch.zeros(4, 4), torch.zeros(4, 2)))
    with pytest.raises(
        OptionError, match=r"a tuple \(Tensor \(4, 4\), Tensor \(4,\)\).*TensorDataset\(inputs"
    ):
        quiet().fit(Net(), (torch.zeros(4, 4), torch.zeros(4)))
    two = (torch.zeros(4, 4), torch.zeros(4, 4))
    assert [loader.length for loader in make_loaders(two, 1.0, "train")] == [2]  # batches of a tuple


class EndsEarly(Dataset[Any]):
    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> Any:
        if index == 5:
            raise StopIteration
        return torch.zeros(4), torch.zeros(2)


def test_a_dataset_that_raises_stop_iteration_does_not_shorten_the_epoch_in_silence() -> None:
    with pytest.raises(OptionError, match="ended after 2 of 6 batches"):
        quiet().fit(Net(), DataLoader(EndsEarly(), 2))


def test_validating_on_nothing_is_an_error() -> None:
    with pytest.raises(OptionError, match="val loader 'val' yielded no batch"):
        quiet(max_epochs=2).fit(Net(), batches(2), (batch for batch in batches(2)))


@pytest.mark.parametrize("verb", ["validate", "test", "predict"])
def test_a_stop_is_honoured_at_the_next_batch_of_any_verb(verb: str) -> None:
    trainer, seen = quiet(), []
    event = {"validate": "validation_batch_end", "test": "test_batch_end", "predict": "predict_batch_end"}[
        verb
    ]

    @trainer.on(event)
    def stop(batch_idx: int, dataloader_idx: int) -> None:
        seen.append((dataloader_idx, batch_idx))
        trainer.stop("enough")

    getattr(trainer, verb)(Net(), {"a": batches(3), "b": batches(3)})
    assert seen == [(0, 0)]
    assert trainer.status == "stopped"


def test_a_stop_when_an_epoch_begins_trains_no_batch_of_it() -> None:
    trainer = quiet(max_epochs=3)
    trainer.on("train_epoch_start", when=lambda epoch: epoch == 1)(lambda: trainer.stop("enough"))
    trainer.fit(Net(), batches(2))
    assert (trainer.global_step, trainer.status) == (2, "stopped")


def test_a_checkpoint_asked_for_at_the_very_end_is_written() -> None:
    trainer = quiet()
    trainer.on("fit_end")(lambda: trainer.save_checkpoint(Path("end")))
    trainer.fit(Net(), batches(2))
    assert read(Path("end"))["counters"]["step"] == 2


def test_the_sanity_check_does_not_use_up_a_schedule() -> None:
    trainer, heard = quiet(num_sanity_val_steps=1, max_epochs=2), []
    trainer.on("validation_end", once=True)(lambda sanity_checking: heard.append(sanity_checking))
    trainer.fit(Net(), batches(2), batches(1))
    assert heard == [False]


def test_what_is_logged_at_the_start_of_a_validation_batch_is_averaged() -> None:
    trainer = quiet()
    trainer.on("validation_batch_start")(lambda batch_idx: trainer.log("index", batch_idx))
    assert trainer.validate(Net(), batches(4))["index"] == 1.5


def test_processes_that_start_together_get_directories_of_their_own() -> None:
    assert len({quiet().run_dir for _ in range(5)}) == 5
