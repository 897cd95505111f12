"""What the documents of other hook systems promise, done in Hookline's own spelling: their examples run, their limits are gone.

`checklist.toml` says which promise each test is for.
"""

from __future__ import annotations

import http.server
import json
import math
import random
import shutil
import socket
import subprocess
import threading
import traceback
import urllib.request
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from spies import Scene
from tiny import Net, batches, quiet
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import ExponentialLR

from hookline import (
    END_EPOCH,
    Hook,
    HookError,
    Logger,
    Recorder,
    StepContext,
    StopTraining,
    Trainer,
    after,
    every,
    when,
)
from hookline.distributed import SingleDevice
from hookline.engine.recorder import Call


class Rows(Logger):
    """Keeps every row that is logged."""

    def __init__(self) -> None:
        self.rows: list[tuple[int, dict[str, float]]] = []

    def log_metrics(self, metrics: Any, step: int, epoch: int) -> None:
        self.rows.append((step, dict(metrics)))


# ---- hooks as methods of the module ------------------------------------------------------------------------------


class OldStyle(Net):
    """Every hook of the page of 2019, in the spelling of that page."""

    def __init__(self) -> None:
        super().__init__()
        self.heard: list[str] = []

    def on_epoch_start(self) -> None:
        self.heard.append("epoch start")

    def on_batch_start(self) -> None:
        self.heard.append("batch start")

    def on_before_zero_grad(self, optimizer: Any) -> None:
        self.heard.append(f"before zero_grad of {type(optimizer).__name__}")

    def on_after_backward(self) -> None:
        self.heard.append("after backward")
        if self.trainer.global_step % 25 == 0:
            for name, value in self.state_dict().items():
                self.experiment.add_histogram(tag=name, values=value, global_step=self.trainer.global_step)

    def on_batch_end(self) -> None:
        self.heard.append("batch end")

    def on_tng_metrics(self, metrics: Any) -> None:
        metrics["twice"] = 2 * metrics.pop("train/loss")

    def on_pre_performance_check(self) -> None:
        self.heard.append("validation start")

    def on_post_performance_check(self) -> None:
        self.heard.append("validation end")

    def on_epoch_end(self) -> None:
        self.heard.append("epoch end")


def test_a_module_with_every_hook_of_2019_runs_and_logs_as_its_page_says() -> None:
    net = OldStyle()
    quiet(logger=True, run_dir="run", log_every_n_steps=10).fit(net, batches(26), batches(1))
    batch = ["batch start", "before zero_grad of SGD", "after backward", "batch end"]
    assert net.heard == ["epoch start", *batch * 26, "validation start", "validation end", "epoch end"]
    records = [json.loads(line) for line in Path("run/log.jsonl").read_text().splitlines()]
    histograms = [(each["step"], each["tag"]) for each in records if each["type"] == "histogram"]
    assert histograms == [(0, "layer.weight"), (0, "layer.bias"), (25, "layer.weight"), (25, "layer.bias")]
    rows = [each["metrics"] for each in records if each["type"] == "metrics"]
    assert [sorted(row) for row in rows] == [["lr", "twice"], ["lr", "twice"], ["val/loss"], ["twice"]]


@pytest.mark.parametrize("takes_the_batch", [False, True])
def test_a_modules_batch_start_may_take_the_batch_or_not_and_end_the_epoch(takes_the_batch: bool) -> None:
    seen: list[Any] = []

    class Plain(Net):
        def on_batch_start(self) -> Any:
            seen.append(None)
            return -1 if len(seen) == 3 else None

    class WithBatch(Net):
        def on_batch_start(self, batch: Any) -> Any:
            seen.append(batch)
            return -1 if len(seen) == 3 else None

    trainer = quiet()
    data = batches(5)
    trainer.fit(WithBatch() if takes_the_batch else Plain(), data, batches(1))
    assert len(seen) == 3
    assert not takes_the_batch or all(got is given for got, given in zip(seen, data, strict=False))
    assert (trainer.state.batches_seen, trainer.status) == (2, "completed")
    assert "val/loss" in trainer.metrics


def test_before_zero_grad_the_weights_are_new_and_the_gradients_still_there_for_each_optimizer() -> None:
    seen: list[tuple[int, bool, bool]] = []

    class TwoOptimizers(Net):
        def configure_optimizers(self) -> Any:
            return [torch.optim.SGD([self.layer.weight], lr=0.1), torch.optim.SGD([self.layer.bias], lr=0.1)]

        def on_before_optimizer_step(self, optimizer: Any) -> None:
            (p,) = optimizer.param_groups[0]["params"]
            p.before, p.gradient = p.detach().clone(), p.grad.clone()

        def on_before_zero_grad(self, optimizer: Any, optimizer_idx: int, step: int) -> None:
            if step:
                (p,) = optimizer.param_groups[0]["params"]
                updated = torch.allclose(p.detach(), p.before - 0.1 * p.gradient) and not torch.equal(
                    p.detach(), p.before
                )
                seen.append((optimizer_idx, updated, torch.equal(p.grad, p.gradient)))

    quiet().fit(TwoOptimizers(), batches(3))
    assert seen == [(0, True, True), (1, True, True)] * 2


def test_the_gradients_that_a_module_logs_after_backward_are_gradients() -> None:
    logged: list[Tensor] = []

    class Keeps(Logger):
        def add_histogram(self, tag: str, values: Any, global_step: int | None = None) -> None:
            logged.append(values.clone())

    class Draws(Net):
        def on_after_backward(self) -> None:
            self.experiment.add_histogram(
                tag="weight", values=self.layer.weight.grad, global_step=self.global_step
            )

    net = Draws()
    twin = Net()
    twin.load_state_dict(net.state_dict())
    quiet(logger=Keeps()).fit(net, batches(1))
    twin.training_step(batches(1)[0], 0).backward()
    assert torch.equal(logged[0], twin.layer.weight.grad)  # type: ignore[arg-type]


def test_a_module_is_in_eval_mode_when_it_hears_that_validation_starts() -> None:
    modes: list[bool] = []

    class Looks(Net):
        def on_pre_performance_check(self) -> None:
            modes.append(self.training)

        def on_post_performance_check(self) -> None:
            modes.append(self.training)

    quiet(num_sanity_val_steps=1).fit(Looks(), batches(1), batches(1))
    assert modes == [False] * 4


def test_logging_a_row_starts_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **kwargs: Any) -> None:
        raise AssertionError(f"started {args}")

    monkeypatch.setattr(subprocess, "Popen", refuse)
    monkeypatch.setattr("os.system", refuse)
    trainer = quiet(logger=True, run_dir="run", log_every_n_steps=1)
    trainer.fit(Net(), batches(3), batches(1))
    assert len(Path("run/log.jsonl").read_text().splitlines()) >= 3


# ---- callbacks, module and strategy ------------------------------------------------------------------------------


class Greeting(Net):
    def on_train_start(self) -> None:
        print("the module starts")

    def train_dataloader(self) -> Any:
        return batches(2)


class GreetingCallback(Hook):
    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        print(f"a callback starts, with {type(trainer).__name__} and {type(pl_module).__name__}")


def test_a_callback_and_the_module_hear_one_event_the_callback_first(
    capsys: pytest.CaptureFixture[str],
) -> None:
    trainer = Trainer(callbacks=[GreetingCallback()], logger=False, max_epochs=1)
    trainer.fit(Greeting())
    assert capsys.readouterr().out.splitlines() == [
        "a callback starts, with Trainer and Greeting",
        "the module starts",
    ]


EVERYONE, HOOKS_AND_MODULE = "plain monitor module strategy", "plain monitor module"
EVALUATION = ("start", "epoch_start", "batch_start", "batch_end", "epoch_end", "end")


def diagram(text: str) -> list[str]:
    return [line.strip() for line in text.strip().splitlines()]


def evaluation(kind: str, who: str = EVERYONE) -> list[str]:
    return [f"on_{kind}_{moment}: {who}" for moment in EVALUATION]


def sequence(calls: list[Call], only: list[str]) -> list[str]:
    """Consecutive calls of one event in one line, for the events that stand in `only`."""
    words = {"D": "data", "M": "module", "S": "strategy"}
    wanted = {line.split(":")[0] for line in only}
    heard = groupby((call for call in calls if call.event in wanted), lambda call: call.event)
    return [
        f"{event}: {' '.join(words.get(call.receiver, call.name) for call in group)}"
        for event, group in heard
    ]


BATCH = diagram(f"""
    on_train_batch_start: {EVERYONE}
    training_step: strategy module
    on_before_zero_grad: {HOOKS_AND_MODULE}
    optimizer_zero_grad: module
    on_before_backward: {HOOKS_AND_MODULE}
    backward: strategy module
    on_after_backward: {HOOKS_AND_MODULE}
    on_before_optimizer_step: {HOOKS_AND_MODULE}
    optimizer_step: strategy module
    on_train_batch_end: {HOOKS_AND_MODULE}
""")

FIT = [
    "setup: data plain monitor module",
    "configure_model: module",
    "strategy_setup: strategy",
    f"on_fit_start: {HOOKS_AND_MODULE}",
    f"on_sanity_check_start: {EVERYONE}",
    *evaluation("validation"),
    f"on_sanity_check_end: {EVERYONE}",
    f"on_train_start: {EVERYONE}",
    f"on_train_epoch_start: {HOOKS_AND_MODULE}",
    *BATCH,
    *evaluation("validation"),
    *BATCH,
    *evaluation("validation"),
    "on_train_epoch_end: plain module monitor",
    f"on_train_end: {EVERYONE}",
    "strategy_teardown: strategy",
    f"on_fit_end: {HOOKS_AND_MODULE}",
    "teardown: data plain monitor module",
]


def test_fit_is_the_documented_diagram_with_validation_after_each_batch() -> None:
    assert sequence(Scene(val_check_interval=1).run(), FIT) == FIT


def test_test_is_the_documented_diagram_and_set_up_reaches_data_and_module_too() -> None:
    expected = [
        "setup: data plain monitor module",
        *evaluation("test"),
        "teardown: data plain monitor module",
    ]
    assert sequence(Scene(batches_of={"test": [1]}).run("test"), expected) == expected


def test_predict_is_the_documented_diagram() -> None:
    expected = [
        "setup: data plain monitor module",
        *evaluation("predict", HOOKS_AND_MODULE),
        "teardown: data plain monitor module",
    ]
    expected[1] += " strategy"
    expected[-2] += " strategy"
    assert sequence(Scene(batches_of={"predict": [1]}).run("predict"), expected) == expected


RESTORE = [
    "module_load_checkpoint: module",
    "load_state_dict: module data",
    "on_load_checkpoint: plain monitor",
    "load_state_dict: plain monitor",
]


@pytest.mark.parametrize("after_setup", [False, True])
def test_a_strategy_says_whether_a_checkpoint_is_restored_before_or_after_its_set_up(
    after_setup: bool,
) -> None:
    first = Scene()
    first.run()
    first.trainer.save_checkpoint("saved")
    scene = Scene(max_epochs=2)
    scene.strategy.restore_after_setup = after_setup
    strategy = ["strategy_setup: strategy"]
    around = [*strategy, *RESTORE] if after_setup else [*RESTORE, *strategy]
    expected = [
        "setup: data plain monitor module",
        "configure_model: module",
        *around,
        f"on_fit_start: {HOOKS_AND_MODULE}",
    ]
    assert sequence(scene.run(resume="saved"), expected) == expected


def test_any_callback_can_end_the_epoch() -> None:
    class Enough(Hook):
        def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> Any:
            return END_EPOCH if batch_idx == 1 else None

    trainer = quiet(callbacks=[Enough()], max_epochs=3)
    trainer.fit(Net(), batches(4))
    assert (trainer.state.batches_seen, trainer.state.epochs_seen) == (3, 3)


# ---- hook objects with the trainer as an argument ----------------------------------------------------------------


class Complete(Hook):
    """Every method of the documented interface of trainer hooks, with its documented parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.got: dict[str, list[Any]] = {}

    def keep(self, event: str, *facts: Any) -> None:
        self.got.setdefault(event, []).append(facts if len(facts) != 1 else facts[0])

    def on_train_start(self, trainer: Any) -> None:
        self.keep("train start", type(trainer).__name__)

    def on_train_end(self, trainer: Any) -> None:
        self.keep("train end", trainer.status)

    def on_epoch_start(self, trainer: Any, epoch: int) -> None:
        self.keep("epoch start", epoch)

    def on_epoch_end(self, trainer: Any, epoch: int) -> None:
        self.keep("epoch end", epoch)

    def on_train_batch_start(
        self, trainer: Any, batch: Any, batch_idx: int, dataloader_idx: int, dataloader_name: str
    ) -> None:
        self.keep("batch start", len(batch), batch_idx, dataloader_idx, dataloader_name)

    def on_train_batch_end(
        self,
        trainer: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int,
        dataloader_name: str,
        metrics: Any,
    ) -> None:
        self.keep(
            "batch end",
            batch_idx,
            dataloader_name,
            f"{metrics['loss']:.4f}" != "",
            metrics.get("loss", 0) > 0,
        )

    def on_validation_start(self, trainer: Any, epoch: int) -> None:
        self.keep("validation start", epoch)

    def on_validation_end(self, trainer: Any, epoch: int, metrics: Any) -> None:
        self.keep("validation end", epoch, metrics["val/accuracy"], type(metrics["val/loss"]))

    def on_validation_batch_start(
        self, trainer: Any, batch: Any, batch_idx: int, dataloader_idx: int, dataloader_name: str
    ) -> None:
        self.keep("validation batch start", batch_idx, dataloader_idx, dataloader_name)

    def on_validation_batch_end(
        self,
        trainer: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int,
        dataloader_name: str,
        metrics: Any,
    ) -> None:
        self.keep("validation batch end", batch_idx, metrics["accuracy"])

    def on_before_backward(self, trainer: Any, loss: Any) -> None:
        self.keep("before backward", loss.requires_grad)

    def on_after_backward(self, trainer: Any) -> None:
        self.keep("after backward", all(p.grad is not None for _, p in trainer.model.named_parameters()))

    def on_before_optimizer_step(self, trainer: Any, optimizer_idx: int) -> None:
        self.keep("before step", optimizer_idx, trainer.global_step)

    def on_after_optimizer_step(self, trainer: Any, optimizer_idx: int) -> None:
        self.keep("after step", optimizer_idx, trainer.global_step)

    def on_gradient_clip(self, trainer: Any, grad_norm: float) -> None:
        self.keep("clip", grad_norm > 1e-3)

    def on_checkpoint_save(self, trainer: Any, checkpoint_path: Path) -> None:
        self.keep("save", str(checkpoint_path))

    def on_checkpoint_load(self, trainer: Any, checkpoint_path: Path) -> None:
        self.keep("load", str(checkpoint_path), trainer.global_step)

    def on_exception(self, trainer: Any, exception: BaseException) -> None:
        self.keep("exception", repr(exception))


class Measured(Net):
    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        return {"loss": super().validation_step(batch, batch_idx), "accuracy": 0.5}


def test_every_documented_signature_of_a_trainer_hook_is_called_as_documented() -> None:
    hook = Complete()
    trainer = quiet(hooks=[hook], gradient_clip_val=1e-3)
    trainer.on("train_end")(lambda trainer: trainer.save_checkpoint("saved"))
    trainer.fit(Measured(), batches(2), batches(1))
    assert hook.got == {
        "train start": ["Trainer"],
        "epoch start": [0],
        "batch start": [(2, 0, 0, "train"), (2, 1, 0, "train")],
        "before backward": [True, True],
        "after backward": [True, True],
        "before step": [(0, 0), (0, 1)],
        "clip": [True, True],
        "after step": [(0, 1), (0, 2)],
        "batch end": [(0, "train", True, True), (1, "train", True, True)],
        "validation start": [0],
        "validation batch start": [(0, 0, "val")],
        "validation batch end": [(0, 0.5)],
        "validation end": [(0, 0.5, float)],
        "epoch end": [0],
        "train end": ["completed"],
        "save": ["saved"],
    }


def test_a_hook_with_the_documented_signatures_hears_of_a_load_and_of_a_failure() -> None:
    first = quiet()
    first.fit(Measured(), batches(2))
    first.save_checkpoint("saved")
    hook = Complete()
    trainer = quiet(hooks=[hook], max_epochs=2)
    trainer.on("step_end", when=lambda step: step == 3)(lambda: 1 / 0 and None)
    with pytest.raises(ZeroDivisionError):
        trainer.fit(Measured(), batches(2), resume="saved")
    assert hook.got["load"] == [("saved", 2)]
    assert hook.got["exception"] == ["ZeroDivisionError('division by zero')"]
    assert "train end" not in hook.got


class Careful(Hook):
    """Halves the learning rate when too many losses were high; the two spellings of the loader's facts are one."""

    def __init__(self, threshold: float = 10.0, patience: int = 2) -> None:
        super().__init__()
        self.threshold, self.patience, self.high = threshold, patience, 0

    def on_train_batch_end(
        self, trainer: Any, batch: Any, loader_idx: int, loader_name: str, metrics: Any
    ) -> None:
        if metrics.get("loss", 0) > self.threshold:
            self.high += 1
            if self.high > self.patience:
                for optimizer in trainer.optimizers:
                    for group in optimizer.param_groups:
                        group["lr"] *= 0.5


def test_a_hook_lowers_the_rate_on_high_losses_and_the_next_updates_use_it() -> None:
    used: list[float] = []
    trainer = quiet(hooks=[Careful(threshold=0.0)])
    trainer.on("step_end")(lambda lr: used.append(lr))
    trainer.fit(Net(lr=0.1), batches(5))
    assert used == [0.1, 0.1, 0.1, 0.05, 0.025]


def test_a_hook_is_tested_without_a_run_by_calling_its_methods() -> None:
    model = nn.Linear(4, 2)
    trainer = Mock(model=model, optimizers=[torch.optim.Adam(model.parameters(), lr=1e-3)])
    hook = Careful(threshold=5.0, patience=10)
    for _ in range(11):
        hook.on_train_batch_end(trainer, None, 0, "test", {"loss": 15.0})
    assert hook.high == 11
    assert trainer.optimizers[0].param_groups[0]["lr"] == 5e-4


def test_a_stateful_hook_finds_a_plateau_and_stops_the_run() -> None:
    class Plateau(Hook):
        def __init__(self) -> None:
            super().__init__()
            self.of_batches: list[float] = []
            self.of_epochs: list[float] = []

        def on_train_batch_end(self, metrics: Any) -> None:
            self.of_batches.append(metrics.get("loss", 0))

        def on_epoch_end(self, trainer: Any, epoch: int) -> None:
            self.of_epochs.append(sum(self.of_batches) / len(self.of_batches))
            self.of_batches = []
            recent = self.of_epochs[-5:]
            if len(self.of_epochs) > 5 and max(recent) - min(recent) < 1e-3:
                trainer.stop("the loss is flat")

    hook = Plateau()
    trainer = quiet(hooks=[hook], max_epochs=50)
    trainer.fit(Net(lr=0.0), batches(2))
    assert (trainer.status, trainer.state.stop_reason) == ("stopped", "the loss is flat")
    assert len(hook.of_epochs) == 6
    assert all(type(each) is float for each in hook.of_epochs)


def test_a_hook_may_switch_itself_on_after_some_epochs() -> None:
    class Later(Hook):
        def __init__(self, enable_after_epoch: int) -> None:
            super().__init__()
            self.enable_after_epoch = enable_after_epoch
            self.enabled = False
            self.heard: list[int] = []

        def on_epoch_start(self, epoch: int) -> None:
            self.enabled = epoch >= self.enable_after_epoch

        def on_train_batch_end(self, epoch: int) -> None:
            if self.enabled:
                self.heard.append(epoch)

    class Declared(Hook):
        def __init__(self) -> None:
            super().__init__()
            self.heard: list[int] = []

        @after("2 epochs")
        def on_train_batch_end(self, epoch: int) -> None:
            self.heard.append(epoch)

    later, declared = Later(2), Declared()
    quiet(hooks=[later, declared], max_epochs=4).fit(Net(), batches(2))
    assert later.heard == declared.heard == [2, 2, 3, 3]


@pytest.fixture
def webhook() -> Iterator[tuple[str, list[str]]]:
    """A web server on this machine, and the texts that were posted to it."""
    posted: list[str] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            posted.append(json.loads(self.rfile.read(int(self.headers["Content-Length"])))["text"])
            self.send_response(200)
            self.end_headers()

        def log_message(self, *args: Any) -> None: ...

    with http.server.HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/hook", posted
        server.shutdown()
        thread.join()


class Notifies(Hook):
    """Posts to a service; a network that fails is reported and does no harm."""

    on_error = "warn"

    def __init__(self, url: str, notify_on: tuple[str, ...] = ("training_end", "best_model")) -> None:
        super().__init__()
        self.url, self.notify_on, self.best = url, notify_on, math.inf

    def on_validation_end(self, trainer: Any, epoch: int, metrics: Any) -> None:
        if metrics.get("val/loss", math.inf) < self.best:
            self.best = metrics["val/loss"]
            if "best_model" in self.notify_on:
                self.send(f"epoch {epoch} is the best so far: {self.best:.4f}")

    def on_training_end(self, trainer: Any) -> None:
        if "training_end" in self.notify_on:
            self.send(f"the training is over, best {self.best:.4f}")

    def send(self, text: str) -> None:
        body = json.dumps({"text": text}).encode()
        direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        direct.open(urllib.request.Request(self.url, body), timeout=10).close()


def test_a_hook_notifies_a_service_about_the_best_model_and_the_end(webhook: tuple[str, list[str]]) -> None:
    url, posted = webhook
    hook = Notifies(url)
    quiet(hooks=[hook]).fit(Net(), batches(2), batches(2))
    assert posted == [
        f"epoch 0 is the best so far: {hook.best:.4f}",
        f"the training is over, best {hook.best:.4f}",
    ]


def test_a_service_that_cannot_be_reached_does_not_stop_the_training(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))  # a port that is taken, but not listened to
        hook = Notifies(f"http://127.0.0.1:{nobody.getsockname()[1]}/hook", notify_on=("training_end",))
        trainer = quiet(hooks=[hook])
        trainer.fit(Net(), batches(2), batches(2))
    assert (trainer.status, trainer.global_step) == ("completed", 2)
    assert "hook 'notifies' failed in on_train_end" in caplog.text


class Debugs(Hook):
    def __init__(self) -> None:
        super().__init__()
        self.shapes: list[tuple[int, ...]] = []
        self.found: list[str] = []

    def on_train_batch_start(
        self, trainer: Any, batch: Any, batch_idx: int, dataloader_idx: int, dataloader_name: str
    ) -> None:
        self.shapes += [tuple(item.shape) for item in batch if torch.is_tensor(item)]

    def on_after_backward(self, trainer: Any) -> None:
        for name, p in trainer.model.named_parameters():
            if p.grad is not None and p.grad.isnan().any():
                self.found.append(f"gradient of {name}")

    def on_train_batch_end(
        self,
        trainer: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int,
        dataloader_name: str,
        metrics: Any,
    ) -> None:
        if torch.isnan(torch.tensor(metrics.get("loss", 0))):
            self.found.append(f"loss of batch {batch_idx}")


def test_a_debugging_hook_sees_shapes_and_finds_which_gradients_and_losses_are_nan() -> None:
    data = batches(3)
    data[1][1][:, 0] = math.nan
    hook = Debugs()
    quiet(hooks=[hook], nonfinite="skip").fit(Net(), data)
    assert hook.shapes == [(3, 4), (3, 2)] * 3
    assert hook.found == ["gradient of layer.weight", "gradient of layer.bias", "loss of batch 1"]


def test_a_hook_takes_its_settings_as_a_dictionary_and_runs_every_n_steps() -> None:
    class Configurable(Hook):
        def __init__(self, config: dict[str, Any] | None = None) -> None:
            super().__init__()
            config = config or {}
            self.enabled, self.frequency = config.get("enabled", True), config.get("frequency", 100)
            self.ran: list[int] = []

        def on_train_batch_end(self, step: int) -> None:
            if self.enabled and step % self.frequency == 0:
                self.ran.append(step)

    class Filtered(Configurable):
        @when(lambda step: step % 2 == 0)
        def on_train_batch_end(self, step: int) -> None:
            self.ran.append(step)

    own, filtered, off = (
        Configurable({"frequency": 2}),
        Filtered(),
        Configurable({"enabled": False, "frequency": 1}),
    )
    quiet(hooks=[own, filtered, off]).fit(Net(), batches(5))
    assert own.ran == filtered.ran == [2, 4]
    assert off.ran == []


def test_an_expensive_hook_runs_on_a_sample_of_the_batches() -> None:
    draw = random.Random(0)
    sampled: list[int] = []
    trainer = quiet()
    trainer.on("train_batch_end", when=lambda: draw.random() < 0.1)(
        lambda batch_idx: sampled.append(batch_idx)
    )
    trainer.fit(Net(), batches(100))
    again = random.Random(0)
    assert sampled == [index for index in range(100) if again.random() < 0.1]
    assert 1 < len(sampled) < 30


def test_a_hook_that_handles_its_own_errors_asks_the_config_for_details(
    capsys: pytest.CaptureFixture[str],
) -> None:
    class Robust(Hook):
        def on_train_batch_end(self, trainer: Any, metrics: Any) -> None:
            try:
                metrics["no such metric"]
            except KeyError as error:
                print("not fatal:", type(error).__name__)
                if trainer.config.debug:
                    traceback.print_exc()

    for debug in (False, True):
        trainer = quiet(hooks=[Robust()], config=SimpleNamespace(debug=debug))
        trainer.fit(Net(), batches(1))
        output = capsys.readouterr()
        assert (output.out, trainer.status) == ("not fatal: MissingMetric\n", "completed")
        assert ("Traceback" in output.err) is debug


# ---- hooks that get one object per step --------------------------------------------------------------------------


class GradientNorms(Hook):
    """Takes the norm of every gradient before clipping, and logs them at the end of the step."""

    def __init__(self) -> None:
        super().__init__()
        self.norms: dict[str, float] = {}

    def on_train_begin(self, config: Any, model: Any, optimizers: Any) -> None:
        self.started_with = (config, model, len(optimizers))

    def on_before_optimizer_step(self, model: Any) -> None:
        self.norms = {name: p.grad.norm().item() for name, p in model.named_parameters()}

    def on_step_end(self, ctx: StepContext, trainer: Any) -> None:
        trainer.log_dict({f"grad_norm/{name}": value for name, value in self.norms.items()})
        self.norms.clear()


def test_gradient_norms_are_logged_under_the_step_they_belong_to() -> None:
    rows, hook, net, config = Rows(), GradientNorms(), Net(lr=0.0), {"job": 1}
    quiet(hooks=[hook], logger=rows, log_every_n_steps=1, gradient_clip_val=1e-3, config=config).fit(
        net, batches(2)
    )
    assert hook.started_with == (config, net, 1)
    logged = {step: row for step, row in rows.rows if "grad_norm/layer.bias" in row}
    for step, batch in enumerate(batches(2), 1):
        net.zero_grad()
        net.training_step(batch, 0).backward()
        for name, p in net.named_parameters():
            assert logged[step][f"grad_norm/{name}"] == pytest.approx(p.grad.norm().item())  # type: ignore[union-attr]


def test_gradients_and_optimizer_state_can_be_read_from_the_context_at_the_end_of_a_step() -> None:
    class Momentum(Net):
        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)

    seen: list[bool] = []

    class Looks(Hook):
        def on_step_end(self, ctx: StepContext) -> None:
            norm = torch.stack([p.grad.norm() for p in ctx.model.parameters()]).norm().item()
            buffer = ctx.optimizer.state[ctx.model.layer.weight]["momentum_buffer"]
            seen.append(norm == pytest.approx(ctx.grad_norm) and buffer.shape == ctx.model.layer.weight.shape)

    quiet(hooks=[Looks()]).fit(Momentum(), batches(3))
    assert seen == [True] * 3


def test_a_step_ends_after_update_scheduler_and_metrics_and_before_validation_and_saving() -> None:
    heard: list[str] = []

    class Scheduled(Net):
        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
            return {
                "optimizer": optimizer,
                "lr_scheduler": {"scheduler": ExponentialLR(optimizer, 0.5), "interval": "step"},
            }

        def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any) -> None:  # type: ignore[override]
            heard.append("update")
            optimizer.step()

        def lr_scheduler_step(self, scheduler: Any) -> None:  # type: ignore[override]
            heard.append("scheduler")
            scheduler.step()

    class Writes(Logger):
        def log_metrics(self, metrics: Any, step: int, epoch: int) -> None:
            heard.append(f"row {step}")

    class Listens(Hook):
        def on_step_end(self, ctx: StepContext, trainer: Any) -> None:
            heard.append(f"step {ctx.step} ends")
            trainer.save_checkpoint("saved")

        def on_eval_end(self, metrics: Any, step: int) -> None:
            heard.append(f"evaluated at {step}")

        def on_checkpoint_save(self, step: int, path: Path) -> None:
            heard.append(f"saved {path} at {step}")

    trainer = quiet(hooks=[Listens()], logger=Writes(), log_every_n_steps=1, val_check_interval=1)
    trainer.fit(Scheduled(), batches(1), batches(1))
    assert heard[:7] == [
        "update",
        "scheduler",
        "row 1",
        "step 1 ends",
        "evaluated at 1",
        "row 1",
        "saved saved at 1",
    ]


def test_hooks_draw_from_evaluations_send_heartbeats_and_upload_checkpoints() -> None:
    class Keeps(Logger):
        tags: list[tuple[str, int | None]] = []

        def add_histogram(self, tag: str, values: Any, global_step: int | None = None) -> None:
            self.tags.append((tag, global_step))

    class Service(Hook):
        beats: list[int] = []

        @every("2 steps")
        def on_step_end(self, ctx: StepContext) -> None:
            self.beats.append(ctx.step)

        def on_eval_end(self, experiment: Any, model: Any, step: int) -> None:
            experiment.add_histogram("weights", model.layer.weight, step)

        def on_epoch_end(self, trainer: Any) -> None:
            trainer.save_checkpoint("local")

        def on_checkpoint_save(self, path: Path, step: int) -> None:
            shutil.copytree(path, f"bucket/step-{step}")

    logger, hook = Keeps(), Service()
    logger.tags, hook.beats = [], []
    quiet(hooks=[hook], logger=logger).fit(Net(), batches(5), batches(1))
    assert hook.beats == [2, 4]
    assert logger.tags == [("weights", 5)]
    quiet(max_epochs=2).fit(Net(), batches(5), resume="bucket/step-5")  # what was uploaded is whole


# ---- named hooks with a state ------------------------------------------------------------------------------------


class Averages(Hook):
    def __init__(self) -> None:
        super().__init__("my_custom_hook")
        self.losses: list[float] = []

    def on_batch_end(self, batch_idx: int, loss: float, state: Any) -> None:
        self.losses.append(loss)
        assert sum(self.losses) / len(self.losses) == pytest.approx(state["avg_loss"])
        assert (state["current_batch_idx"], state["latest_loss"]) == (batch_idx, loss)


def test_a_named_hook_averages_the_losses_and_is_managed_by_its_name() -> None:
    hook = Averages()
    trainer = quiet()
    trainer.add_hook(hook)
    trainer.fit(Net(), batches(3))
    assert len(hook.losses) == 3
    trainer.disable_hook("my_custom_hook")
    assert trainer.hooks.list_hooks() == []
    trainer.enable_hook("my_custom_hook")
    assert trainer.hooks.list_hooks() == ["my_custom_hook"]
    assert trainer.remove_hook("my_custom_hook") is hook


def test_hooks_with_the_state_hear_of_train_epoch_and_batch_in_order() -> None:
    heard: list[str] = []

    class Listens(Hook):
        def on_train_begin(self, state: Any) -> None:
            heard.append(f"train begins, {state['status']}")

        def on_epoch_begin(self, epoch: int, state: Any) -> None:
            heard.append(f"epoch {epoch} begins")

        def on_batch_end(self, batch: Any, loss: float, state: Any) -> None:
            heard.append(f"batch of {len(batch[0])}, {type(loss).__name__}")

        def on_epoch_end(self, epoch: int, state: Any) -> None:
            heard.append(f"epoch {epoch} ends")

        def on_train_end(self, state: Any) -> None:
            heard.append(f"train ends, {state['status']}")

    quiet(hooks=[Listens()], max_epochs=2).fit(Net(), batches(1))
    batch = "batch of 3, float"
    assert heard == [
        "train begins, training",
        "epoch 0 begins",
        batch,
        "epoch 0 ends",
        "epoch 1 begins",
        batch,
        "epoch 1 ends",
        "train ends, completed",
    ]


# ---- what was impossible elsewhere -------------------------------------------------------------------------------


def test_a_hook_can_add_an_update_of_its_own() -> None:
    class Twice(Hook):
        def on_after_optimizer_step(self, optimizer: Any) -> None:
            optimizer.step()

    net, twin = Net(), Net(lr=0.2)
    twin.load_state_dict(net.state_dict())
    quiet(hooks=[Twice()]).fit(net, batches(1))
    quiet().fit(twin, batches(1))
    torch.testing.assert_close(net.layer.weight, twin.layer.weight)


def test_a_hook_changes_the_loss_function_in_the_middle_of_a_run() -> None:
    class WithCriterion(Net):
        criterion = staticmethod(F.mse_loss)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return self.criterion(self.layer(batch[0]), batch[1])

    losses: list[float] = []
    trainer = quiet()
    trainer.on("train_batch_start", when=lambda step: step == 2)(
        lambda module: setattr(module, "criterion", F.l1_loss)
    )
    trainer.on("train_batch_end")(lambda loss: losses.append(loss))
    net = WithCriterion(lr=0.0)
    trainer.fit(net, batches(4))
    predictions = [(net.layer(x), y) for x, y in batches(4)]
    functions = [F.mse_loss, F.mse_loss, F.l1_loss, F.l1_loss]
    assert losses == pytest.approx([f(*pair).item() for f, pair in zip(functions, predictions, strict=True)])


def test_a_hook_replaces_the_loss_of_a_plain_model_that_was_passed_with_its_loss() -> None:
    """The loss function itself was given to fit, so the hook computes another one where the loss may be replaced."""

    def other(state: Any, module: Any, step: int) -> Any:
        return F.l1_loss(module(state.batch[0]), state.batch[1]) if step >= 1 else None

    losses: list[float] = []
    net = nn.Linear(4, 2)
    trainer = quiet()
    trainer.on("before_backward")(other)
    trainer.on("train_batch_end")(lambda loss: losses.append(loss))
    trainer.fit(net, batches(2), loss=F.mse_loss, optimizer=torch.optim.SGD(net.parameters(), lr=0.0))
    (x0, y0), (x1, y1) = batches(2)
    assert losses == pytest.approx([F.mse_loss(net(x0), y0).item(), F.l1_loss(net(x1), y1).item()])


def test_a_weighted_extra_loss_of_a_hook_is_trained_on() -> None:
    class WeightDecay(Hook):
        weight = 0.5

        def on_before_backward(self, loss: Tensor, module: Any) -> Tensor:
            return loss + self.weight * module.layer.weight.square().sum() / 2

    net, twin = Net(), Net()
    twin.load_state_dict(net.state_dict())
    quiet(hooks=[WeightDecay()]).fit(net, batches(1))
    before = twin.layer.weight.detach().clone()
    quiet().fit(twin, batches(1))
    torch.testing.assert_close(net.layer.weight, twin.layer.weight - 0.1 * 0.5 * before)


def test_a_learning_rate_that_a_hook_changed_is_where_the_scheduler_continues() -> None:
    class Scheduled(Net):
        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=1.0)
            return {
                "optimizer": optimizer,
                "lr_scheduler": {"scheduler": ExponentialLR(optimizer, 0.5), "interval": "step"},
            }

    class Tenth(Hook):
        def on_train_batch_start(self, trainer: Any, batch_idx: int) -> None:
            if batch_idx == 1:
                trainer.optimizers[0].param_groups[0]["lr"] *= 0.1

    used: list[float] = []
    trainer = quiet(hooks=[Tenth()])
    trainer.on("step_end")(lambda lr: used.append(lr))
    trainer.fit(Scheduled(), batches(4))
    assert used == pytest.approx([1.0, 0.05, 0.025, 0.0125])


def test_a_learning_rate_schedule_can_be_a_hook() -> None:
    class Warmup(Hook):
        def on_train_batch_start(self, optimizers: list[Any], step: int) -> None:
            for group in optimizers[0].param_groups:
                group["lr"] = 0.1 * min(1.0, (step + 1) / 4)

    used: list[float] = []
    trainer = quiet(hooks=[Warmup()], max_epochs=2)
    trainer.on("step_end")(lambda lr: used.append(lr))
    trainer.fit(Net(), batches(3))
    assert used == pytest.approx([0.025, 0.05, 0.075, 0.1, 0.1, 0.1])


def test_patience_counts_checks_so_a_run_without_epochs_can_stop() -> None:
    class Impatient(Hook):
        """Stops after so many validations without a better value."""

        tier = "monitor"

        def __init__(self, patience: int) -> None:
            super().__init__()
            self.patience, self.best, self.checks = patience, math.inf, 0

        def on_validation_end(self, metrics: Any) -> None:
            better = metrics["val/loss"] < self.best
            self.best, self.checks = min(self.best, metrics["val/loss"]), 0 if better else self.checks + 1
            if self.checks == self.patience:
                raise StopTraining(f"no better for {self.patience} checks")

    class Endless:
        def __iter__(self) -> Iterator[Any]:
            while True:
                yield from batches(1)

    ends: list[str] = []
    trainer = quiet(hooks=[Impatient(3)], max_epochs=-1, val_check_interval=2)
    trainer.on("train_end")(lambda status: ends.append(status))
    trainer.on("train_end")(lambda trainer: trainer.save_checkpoint("last", "last"))
    trainer.fit(Net(lr=0.0), Endless(), batches(1))
    assert (trainer.global_step, ends, Path("last").is_dir()) == (8, ["stopped"], True)
    assert trainer.state.stop_reason == "no better for 3 checks"


def test_a_hook_that_demands_a_metric_ends_the_run_even_if_others_may_fail(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Strict(Hook):
        def on_validation_end(self, metrics: Any) -> None:
            metrics["val/accuracy"]

    class Forgiving(Strict):
        on_error = "warn"

    quiet(hooks=[Forgiving()]).fit(Net(), batches(1), batches(1))
    assert "hook 'forgiving' failed in on_validation_end" in caplog.text
    with pytest.raises(KeyError, match="no metric 'val/accuracy'"):
        quiet(hooks=[Forgiving(), Strict()]).fit(Net(), batches(1), batches(1))


def test_validation_and_a_request_to_stop_are_honoured_after_a_skipped_step() -> None:
    data = batches(4)
    data[1][1].fill_(math.nan)
    heard: list[str] = []

    class Listens(Hook):
        def on_step_skipped(self, reason: str, trainer: Any) -> None:
            heard.append(f"skipped, {reason}")
            trainer.save_checkpoint("saved")
            trainer.stop("one is enough")

        def on_train_batch_end(self, batch_idx: int) -> None:
            heard.append(f"batch {batch_idx} ends")

        def on_validation_end(self) -> None:
            heard.append("validated")

        def on_checkpoint_save(self) -> None:
            heard.append("saved")

        def on_train_end(self, status: str) -> None:
            heard.append(status)

    trainer = quiet(hooks=[Listens()], nonfinite="skip", val_check_interval=1)
    trainer.fit(Net(), data, batches(1))
    assert heard == [
        "batch 0 ends",
        "validated",
        "skipped, nonfinite",
        "batch 1 ends",
        "validated",
        "saved",
        "stopped",
    ]


# ---- one loop for every kind of step -----------------------------------------------------------------------------


class ByHand(Net):
    automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(loss := super().training_step(batch, batch_idx))
        optimizer.step()
        return loss


class Recomputing(Net):
    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters(), max_iter=1)


def small(n: int) -> list[tuple[Tensor, Tensor]]:
    """Batches whose gradients half precision can hold, scaled as they are at first."""
    return [(x, y * 0.01) for x, y in batches(n)]


def fit_plain(trainer: Trainer) -> None:
    net = nn.Linear(4, 2)
    trainer.fit(net, small(2), loss=F.mse_loss, optimizer=torch.optim.SGD(net.parameters(), lr=0.1))


KINDS: dict[str, tuple[Any, dict[str, Any]]] = {
    "a module": (Net, {}),
    "manual optimization": (ByHand, {}),
    "an optimizer with a closure": (Recomputing, {}),
    "bf16": (Net, {"precision": "bf16-mixed", "device": "cpu"}),
    "fp16 with a scaler": (Net, {"precision": "16-mixed", "device": "cpu"}),
    "a strategy of one's own": (Net, {"strategy": SingleDevice(torch.device("cpu"))}),
    "a plain nn.Module": (fit_plain, {}),
}


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_step_fires_the_same_events(kind: str) -> None:
    class Hears(Hook):
        def on_train_batch_start(self) -> None: ...
        def on_before_zero_grad(self) -> None: ...
        def on_before_backward(self) -> None: ...
        def on_after_backward(self) -> None: ...
        def on_before_optimizer_step(self) -> None: ...
        def on_after_optimizer_step(self) -> None: ...
        def on_train_batch_end(self) -> None: ...
        def on_train_metrics(self) -> None: ...
        def on_step_end(self) -> None: ...

    made, options = KINDS[kind]
    trainer = quiet(hooks=[Hears()], log_every_n_steps=1, **options)
    with Recorder(trainer) as recorder:
        made(trainer) if made is fit_plain else trainer.fit(made(), small(2))
    heard = [(call.event, call.step) for call in recorder.calls if call.receiver == "H"]
    assert heard == [
        (
            event,
            step
            + (event in {"on_after_optimizer_step", "on_train_batch_end", "on_train_metrics", "on_step_end"}),
        )
        for step in range(2)
        for event in (
            "on_train_batch_start",
            "on_before_zero_grad",
            "on_before_backward",
            "on_after_backward",
            "on_before_optimizer_step",
            "on_after_optimizer_step",
            "on_train_batch_end",
            "on_train_metrics",
            "on_step_end",
        )
    ] + [("on_train_metrics", 2)]


def test_a_hook_with_the_wrong_signature_never_waits_until_the_run_to_be_found() -> None:
    class Documented(Hook):
        def on_epoch_end(self, trainer: Any, epoch: int, result: Any) -> None: ...

    trainer = quiet()
    with pytest.raises(HookError, match=r"on_train_epoch_end has no argument 'result'"):
        trainer.add_hook(Documented())
    assert len(trainer.hooks) == 0
