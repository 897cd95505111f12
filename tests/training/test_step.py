"""One batch and one update: the weights are those of a loop written by hand, bit for bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny import Net, batches, quiet
from training.stepped import AtBatchStart, Returning, Skipped, as_net, assert_same_weights, by_hand, twins

from hookline import END_EPOCH, SKIP_BATCH, Hook, HookError

# ---- equal to a loop written by hand -----------------------------------------------------------------------------


def test_plain_training_equals_a_loop_written_by_hand() -> None:
    net, twin = twins()
    quiet(max_epochs=3).fit(net, batches())
    by_hand(twin, [[b] for b in batches()] * 3)
    assert_same_weights(net, twin)


def test_bf16_mixed_equals_a_loop_written_by_hand() -> None:
    net, twin = twins()
    quiet(precision="bf16-mixed", device="cpu").fit(net, batches())
    optimizer = twin.configure_optimizers()
    for batch in batches():
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = twin.training_step(batch, 0)
        loss.backward()
        optimizer.step()
    assert_same_weights(net, twin)


# ---- what a training step may return -----------------------------------------------------------------------------


def test_none_leaves_the_batch_out() -> None:
    net, twin = twins(Returning(lambda loss, i: None if i == 1 else loss))
    skipped = Skipped()
    trainer = quiet(hooks=[skipped])
    trainer.fit(net, batches())
    data = batches()
    by_hand(as_net(twin), [[data[0]], [data[2]], [data[3]]])
    assert_same_weights(net, twin)
    assert skipped.reasons == ["no_loss"]
    assert trainer.global_step == 3


# ---- signals inside an accumulation window -----------------------------------------------------------------------


def test_minus_one_ends_the_epoch_too() -> None:
    trainer = quiet(hooks=[AtBatchStart({2: -1})], max_epochs=2)
    trainer.fit(Net(), batches(6))
    assert trainer.global_step == 4
    assert trainer.status == "completed"


def test_ending_the_epoch_beats_skipping_the_batch() -> None:
    trainer = quiet(hooks=[AtBatchStart({1: END_EPOCH}), AtBatchStart({1: SKIP_BATCH})])
    trainer.fit(Net(), batches(6))
    assert trainer.global_step == 1


def test_a_value_that_is_no_signal_is_refused() -> None:
    with pytest.raises(HookError, match="may return None, SKIP_BATCH, END_EPOCH"):
        quiet(hooks=[AtBatchStart({0: "skip"})]).fit(Net(), batches())


# ---- hooks around the update -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "extra",
    [
        {},
        {"gradient_clip_val": 0.1, "accumulate_grad_batches": 3},
        {"accumulate_by": "tokens", "accumulate_grad_batches": 3},
    ],
)
def test_a_hundred_steps_never_read_from_the_device(extra: dict[str, Any]) -> None:
    """On the meta device every host read raises."""

    class Logging(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            self.log("logged", loss, on_step=True, on_epoch=True)
            return {"loss": loss, "other": loss * 2}

    trainer = quiet(device="meta", max_steps=100, max_epochs=-1, val_check_interval=7, **extra)
    trainer.fit(Logging(), batches(10), batches(2))
    assert trainer.global_step == 100
    assert trainer.module.layer.weight.is_meta


@pytest.mark.parametrize(("accumulate", "updates"), [(1, 2), (2, 2), (4, 1)])
def test_a_batch_that_is_none_is_skipped_with_one_warning(
    accumulate: int, updates: int, caplog: pytest.LogCaptureFixture
) -> None:
    class Sees(Hook):
        seen: tuple[Any, ...] = ()

        def on_train_batch_start(self, batch_idx: int) -> None:
            self.seen += (batch_idx,)

    first, second = batches(2)
    hook = Sees()
    trainer = quiet(hooks=hook, accumulate_grad_batches=accumulate)
    trainer.fit(Net(), [first, None, second, None])
    assert (hook.seen, trainer.global_step) == ((0, 2), updates)
    assert caplog.text.count("yielded None as batch 1: such batches are skipped") == 1
