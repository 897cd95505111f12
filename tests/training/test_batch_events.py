"""The events of a training batch and their facts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import Net, batches, quiet
from torch import Tensor, nn
from torch.nn import functional as F
from training.stepped import AtBatchStart, Returning, twins

from hookline import SKIP_BATCH, Hook, LossError


def test_a_batch_without_loss_still_has_its_end_event_with_no_loss() -> None:
    losses: list[float | None] = []

    class Listen(Hook):
        def on_train_batch_end(self, loss: float | None) -> None:
            losses.append(loss)

    quiet(hooks=[Listen()]).fit(Returning(lambda loss, i: {"loss": None} if i == 1 else loss), batches(3))
    assert [loss is None for loss in losses] == [False, True, False]


def test_a_skipped_batch_has_no_further_events_and_is_not_seen() -> None:
    heard: list[str] = []

    class Listen(AtBatchStart):
        def on_after_backward(self) -> None:
            heard.append("backward")

        def on_step_skipped(self, reason: str) -> None:
            heard.append(reason)

        def on_train_batch_end(self, batch_idx: int) -> None:
            heard.append(f"end {batch_idx}")

    trainer = quiet(hooks=[Listen({0: SKIP_BATCH})])
    trainer.fit(Net(), batches(2))
    assert heard == ["backward", "end 1"]
    assert (trainer.state.batches_seen, trainer.state.samples_seen) == (1, 3)


def test_gradients_can_be_read_at_every_moment_the_contract_names() -> None:
    seen: dict[str, float | None] = {}

    def norm(module: Any) -> float | None:
        grads = [p.grad for p in module.parameters() if p.grad is not None]
        return float(nn.utils.get_total_norm(grads)) if grads else None

    class Look(Hook):
        def on_before_zero_grad(self, module: Any) -> None:
            seen["before zero_grad"] = norm(module)

        def on_after_backward(self, module: Any) -> None:
            seen["after backward"] = norm(module)

        def on_before_optimizer_step(self, module: Any) -> None:
            seen["before clip"] = norm(module)

        def on_gradient_clip(self, module: Any, grad_norm: float) -> None:
            seen["clipped"] = norm(module)
            seen["fact at clip"] = grad_norm

        def on_after_optimizer_step(self, module: Any) -> None:
            seen["after step"] = norm(module)

        def on_step_end(self, module: Any, grad_norm: float) -> None:
            seen["step end"] = norm(module)
            seen["fact at step end"] = grad_norm

    quiet(gradient_clip_val=0.01, hooks=[Look()]).fit(Net(), batches(1))
    whole = seen["after backward"]
    assert whole is not None and whole > 0.02
    assert seen["before zero_grad"] is None
    assert seen["before clip"] == whole
    assert seen["fact at clip"] == seen["fact at step end"] == pytest.approx(whole)
    assert seen["clipped"] == seen["after step"] == seen["step end"] == pytest.approx(0.01, rel=1e-3)


def test_step_context_tells_of_one_update() -> None:
    seen: list[Any] = []

    class Look(Hook):
        def on_step_end(self, ctx: Any) -> None:
            seen.append(
                (ctx.step, ctx.loss, ctx.lr, ctx.tokens_seen, ctx.model, ctx.optimizer, ctx.grad_norm)
            )

    net, twin = twins()
    trainer = quiet(accumulate_grad_batches=2, hooks=[Look()])
    trainer.fit(net, batches(2))
    losses = [twin.training_step(b, 0).item() for b in batches(2)]
    [(step, loss, lr, tokens, model, optimizer, grad_norm)] = seen
    assert (step, lr, tokens) == (1, 0.1, 24)
    assert loss == pytest.approx(sum(losses) / 2)
    assert model is net
    assert optimizer is trainer.optimizers[0]
    assert grad_norm > 0


def test_batch_metrics_hold_this_batches_values_under_plain_keys() -> None:
    seen: list[dict[str, float]] = []

    class Logging(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.log("logged", 7.0 + batch_idx)
            return {"loss": super().training_step(batch, batch_idx), "acc": torch.tensor(0.5 * batch_idx)}

    class Look(Hook):
        def on_train_batch_end(self, metrics: Any, loss: float) -> None:
            seen.append(dict(metrics))
            assert metrics["loss"] == loss

    quiet(hooks=[Look()]).fit(Logging(), batches(2))
    assert [(each["acc"], each["logged"]) for each in seen] == [(0.0, 7.0), (0.5, 8.0)]


def test_batch_metrics_do_not_repeat_a_value_under_its_epoch_name() -> None:
    class Look(Hook):
        def on_train_batch_end(self, metrics: Any) -> None:
            self.keys = set(metrics)

    look = Look()
    quiet(hooks=[look]).fit(Returning(lambda loss, i: {"loss": loss, "acc": 0.5}), batches(1))
    assert look.keys == {"loss", "acc"}


def test_what_hooks_are_handed_never_holds_the_graph() -> None:
    kept: list[Any] = []

    class Leaky(Hook):
        """Keeps everything it gets, as careless hooks do."""

        def on_train_batch_end(self, outputs: Any, loss: float, metrics: Any) -> None:
            kept.extend(
                [outputs["loss"], outputs["nested"][0], loss, *metrics.values(), *metrics.raw().values()]
            )

    class Nested(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            out = self.layer(batch[0])
            loss = F.mse_loss(out, batch[1])
            self.log("logged", loss)
            return {"loss": loss, "nested": [out]}

    net = Nested()
    trainer = quiet(hooks=[Leaky()])
    metrics = trainer.fit(net, batches(2))
    assert len(kept) == 2 * 7
    for value in (*kept, *metrics.raw().values()):
        assert not isinstance(value, Tensor) or value.grad_fn is None
    assert all(type(value) is float for value in metrics.values())
    assert "graph" not in vars(net)


def test_tokens_and_samples_are_counted() -> None:
    class Ask(Hook):
        def on_train_end(self, tokens_seen: int, samples_seen: int, batches_seen: int) -> None:
            self.seen = (tokens_seen, samples_seen, batches_seen)

    ask = Ask()
    quiet(hooks=[ask], max_epochs=2).fit(Net(), batches(4, size=3))
    assert ask.seen == (2 * 4 * 12, 2 * 4 * 3, 8)


def test_what_was_logged_before_on_step_end_failed_is_written_when_the_run_ends() -> None:
    class Logs(Net):
        def training_step(self, batch, batch_idx):
            self.log("seen", 3.0)
            return super().training_step(batch, batch_idx)

    class Fails(Hook):
        def on_step_end(self, trainer):
            trainer.log("own", 4.0)
            raise RuntimeError("on purpose")

    with pytest.raises(RuntimeError, match="on purpose"):
        quiet(logger=True, run_dir="run", hooks=[Fails()]).fit(Logs(), batches(2))
    rows = [json.loads(line) for line in Path("run/log.jsonl").read_text().splitlines()]
    logged = {key: value for row in rows for key, value in row.get("metrics", row).items()}
    assert logged["seen"] == 3.0 and logged["own"] == 4.0


def test_what_was_worked_out_for_a_batch_is_not_kept_into_the_next() -> None:
    at_start, at_end = [], []
    trainer = quiet()
    trainer.on("train_batch_start")(lambda state: at_start.append([*state.cache]))
    trainer.on("train_batch_end")(lambda state, outputs: at_end.append([*state.cache]))
    trainer.fit(Net(), batches(2))
    assert at_start == [[], []]
    assert at_end == [["outputs"], ["outputs"]]


def test_a_forgotten_return_is_named_before_the_epoch_is_over(caplog: pytest.LogCaptureFixture) -> None:
    class Forgets(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            super().training_step(batch, batch_idx)

    warned: list[int] = []
    trainer = quiet()
    trainer.on("train_batch_end")(
        lambda batch_idx: warned.append(batch_idx) if "gave no loss" in caplog.text else None
    )
    with pytest.raises(LossError, match="training_step returned no loss for any of 20 batches"):
        trainer.fit(Forgets(), batches(20))
    assert trainer.status == "error"
    assert warned == [*range(9, 20)]
    assert caplog.text.count("The first 10 steps gave no loss") == 1

    class Sometimes(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return None if batch_idx else super().training_step(batch, batch_idx)

    stopping = quiet()
    stopping.on("train_batch_end")(lambda trainer: trainer.stop())
    stopping.fit(Forgets(), batches(2))  # a hook has ended it before a batch could have a loss
    assert stopping.status == "stopped"

    caplog.clear()
    quiet().fit(Sometimes(), batches(20))
    assert "gave no loss" not in caplog.text
