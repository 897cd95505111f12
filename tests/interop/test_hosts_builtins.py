"""Built-in hooks inside other trainers: each does there what it does at home."""

from __future__ import annotations

import importlib.util
import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from interop.hosted import DATA, LOOPS, LightningNet, lightning_trainer, loader, transformers_trainer
from servers import serving

import hookline
from hookline import Hook, every
from hookline.hooks import (
    ActivationMonitor,
    ConsoleLog,
    DeviceStats,
    EarlyStopping,
    GradientMonitor,
    Heartbeat,
    HParams,
    JSONLog,
    LRMonitor,
    MemoryMonitor,
    MixtureSchedule,
    ModelCheckpoint,
    ModelSummary,
    NaNGuard,
    Profiler,
    ProgressBar,
    SpikeGuard,
    Throughput,
    Timer,
    WeightAveraging,
)
from hookline.loggers import CSV

pytestmark = pytest.mark.filterwarnings("default")


class Played:
    """What a run with all the hooks has left."""

    def __init__(
        self, host: str, folder: Path, printed: str, line: Any, checkpoint: ModelCheckpoint, got: list[bytes]
    ) -> None:
        self.host, self.folder, self.printed, self.line, self.checkpoint, self.got = (
            host,
            folder,
            printed,
            line,
            checkpoint,
            got,
        )
        rows = (folder / "metrics.csv").read_text().splitlines()
        self.columns = set(rows[0].split(","))


@pytest.fixture(scope="module", params=LOOPS)
def played(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """One run with everything in it."""
    folder, home = tmp_path_factory.mktemp("run"), tmp_path_factory.mktemp("home")
    checkpoint = ModelCheckpoint(monitor="val/loss", save_top_k=1, save_last=True)
    hooks: list[Any] = [
        GradientMonitor(log_frequency=1),
        EarlyStopping("val/loss", patience=9),
        checkpoint,
        LRMonitor(),
        JSONLog(1),
        ConsoleLog(1),
        NaNGuard(),
        SpikeGuard(),
        SpikeGuard("skip", name="skips_spikes"),
        Heartbeat(every=0.001),
        Throughput(every=1),
        Timer(),
        DeviceStats(every=1),
        MemoryMonitor(every=1),
        ModelSummary(),
        ActivationMonitor(every=1),
        WeightAveraging(decay=0.5),
        HParams({"width": 2}),
        Profiler(wait=0, warmup=1, active=1),
        ProgressBar(),
    ]
    capture: Any = request.config.pluginmanager.getplugin("capturemanager")
    capture.read_global_capture()
    with serving() as server, pytest.MonkeyPatch.context() as patch:
        patch.chdir(home)
        if importlib.util.find_spec("httpx") is not None:
            from hookline.hooks import Webhook

            hooks.append(Webhook(server.url(), notify_on=("training_start", "training_end", "best_model")))
        line = LOOPS[request.param](
            hooks,
            line={
                "run_dir": folder,
                "logger": CSV(),
                **({} if request.param in ("transformers",) else {"log_every_n_steps": 1}),
            },
            **({"logging_steps": 1} if request.param == "transformers" else {}),
        )
        printed = "".join(capture.read_global_capture())
        return Played(request.param, folder, printed, line, checkpoint, server.bodies)


def test_monitors_log_into_the_rows(played: Played) -> None:
    assert {"grad_norm", "lr-SGD", "train/loss"} <= played.columns
    assert any(each.startswith("throughput/") for each in played.columns)
    assert any(each.startswith("cpu/") for each in played.columns)
    assert "memory/peak_process_gb" in played.columns


def test_model_checkpoint_keeps_the_best_and_the_last(played: Played) -> None:
    best = Path(played.checkpoint.best_model_path)
    assert best.is_dir() and best.is_relative_to(played.folder)
    assert played.checkpoint.best_model_score == pytest.approx(played.line.metrics["val/loss"])
    module = (
        type(played.line.module)()
        if played.host in ("lightning", "transformers")
        else torch.nn.Sequential(torch.nn.Linear(4, 2))
    )
    hookline.load_weights(module, best)


def test_json_log_has_the_whole_story(played: Played) -> None:
    records = [
        json.loads(each)
        for file in (played.folder / "logs").glob("*.jsonl")
        for each in file.read_text().splitlines()
    ]
    kinds = [each.get("event") or each.get("type") for each in records]
    assert len(kinds) > 10 and any("train" in str(each) for each in kinds)


def test_heartbeat_and_profile_are_in_the_run_s_directory(played: Played) -> None:
    beat = json.loads((played.folder / "heartbeat.json").read_text())
    assert beat["step"] == 10 and beat["status"] == "completed"
    assert list((played.folder / "profile").iterdir())


def test_console_log_and_timer_speak(played: Played) -> None:
    assert "epoch" in played.printed.lower() and "loss" in played.printed.lower()
    assert "trainable" in played.printed  # the model summary


def test_weight_averaging_has_averaged(played: Played) -> None:
    assert any(row.hook == "weight_averaging" for row in played.line.cost())


def test_webhook_sends_its_messages(played: Played) -> None:
    if importlib.util.find_spec("httpx") is None:
        pytest.skip("httpx is not installed here")
    texts = [json.loads(each)["text"] for each in played.got]
    assert len(texts) >= 3


def test_costs_are_accounted_for(played: Played) -> None:
    rows = {(row.hook, row.event): row.calls for row in played.line.cost()}
    assert rows["nan_guard", "on_before_backward"] == 10


def test_the_run_has_ended_well(played: Played) -> None:
    assert (played.line.status, played.line.global_step, played.line.state.epochs_seen) == (
        "completed",
        10,
        2,
    )


# ---- what hooks do to a host --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("host", LOOPS)
def test_early_stopping_ends_the_run_of_the_host(host: str) -> None:
    line = LOOPS[host]([EarlyStopping("val/loss", patience=1)], epochs=6, lr=0.0)
    assert line.status == "stopped" and "EarlyStopping" in line.stop_reason
    assert line.state.epochs_seen == 2


@pytest.mark.parametrize("host", LOOPS)
def test_a_hook_stops_the_host_in_the_middle_of_an_epoch(host: str) -> None:
    class Stops(Hook):
        def on_step_end(self, step: int, trainer: Any) -> None:
            if step == 3:
                trainer.stop("that will do")

    line = LOOPS[host]([Stops()])
    assert (line.global_step, line.status, line.stop_reason) == (3, "stopped", "that will do")


@pytest.mark.parametrize("host", LOOPS)
def test_a_hook_leaves_an_update_out_that_the_host_makes(host: str) -> None:
    class Skips(Hook):
        def __init__(self) -> None:
            super().__init__()
            self.reasons: list[str] = []

        def on_before_optimizer_step(self, module: torch.nn.Module) -> Any:
            self.before = [each.detach().clone() for each in module.parameters()]
            return hookline.SKIP_STEP

        def on_step_skipped(self, reason: str, module: torch.nn.Module) -> None:
            self.reasons.append(reason)
            assert all(torch.equal(a, b) for a, b in zip(self.before, module.parameters(), strict=True))
            assert all(each.grad is not None for each in module.parameters())

    hook = Skips()
    line = LOOPS[host]([hook], epochs=1)
    assert hook.reasons == ["hook"] * 5 and line.global_step == 0


@pytest.mark.parametrize("host", LOOPS)
def test_a_failing_hook_fails_the_host_and_everyone_hears_of_it(host: str) -> None:
    class Fails(Hook):
        def on_train_batch_end(self, batch_idx: int) -> None:
            if batch_idx == 2:
                raise ZeroDivisionError("on purpose")

    class Hears(Hook):
        def __init__(self) -> None:
            super().__init__()
            self.seen: list[str] = []

        def on_exception(self, exception: BaseException) -> None:
            self.seen.append(str(exception))

        def on_train_end(self) -> None:
            self.seen.append("end")

        def teardown(self, status: str) -> None:
            self.seen.append(status)

    hears = Hears()
    with pytest.raises(ZeroDivisionError, match="on purpose") as error:
        LOOPS[host]([Fails(), hears])
    assert hears.seen == ["on purpose", "error"]
    assert any("hook 'fails'" in each for each in error.value.__notes__)


@pytest.mark.parametrize("host", LOOPS)
def test_a_hook_that_needs_what_no_host_has_is_refused_when_it_is_added(host: str) -> None:
    with pytest.raises(
        hookline.HookError,
        match=r"needs trainer.loaders in MixtureSchedule\.\w+, which .* does not offer to hooks",
    ):
        LOOPS[host]([MixtureSchedule({"0 steps": {"a": 1.0}})])


# ---- resuming -----------------------------------------------------------------------------------------------------------


class Counts(Hook):
    """Counts, on a schedule, and keeps it."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[int] = []
        self.resumed: bool | None = None

    def on_train_start(self, resumed: bool) -> None:
        self.resumed = resumed

    @every("3 steps")
    def on_step_end(self, step: int) -> None:
        self.steps.append(step)

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self.steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.steps = list(state["steps"])


def test_hooks_continue_from_lightning_s_own_checkpoint(tmp_path: Path) -> None:
    first, second = Counts(), Counts()
    trainer = lightning_trainer([hookline.hosts.lightning([first])], max_epochs=1)
    trainer.fit(LightningNet(), loader(DATA))
    trainer.save_checkpoint(tmp_path / "one.ckpt")
    trainer = lightning_trainer([hookline.hosts.lightning([second])], max_epochs=2)
    trainer.fit(LightningNet(), loader(DATA), ckpt_path=tmp_path / "one.ckpt", weights_only=False)
    assert (first.steps, second.steps) == ([3], [3, 6, 9])
    assert (first.resumed, second.resumed) == (False, True)


@pytest.mark.parametrize("by_transformers", [False, True])
def test_hooks_continue_from_transformers_own_checkpoint(tmp_path: Path, by_transformers: bool) -> None:
    saved: list[Any] = []

    class Hears(Hook):
        def on_checkpoint_save(self, path: Any, step: int, reason: str) -> None:
            saved.append((Path(path).name, step, reason, Path(path).is_dir()))

    first, second = Counts(), Counts()
    callback = hookline.hosts.transformers([first, Hears()])
    transformers_trainer([callback], tmp_path, num_train_epochs=1, save_strategy="epoch").train()
    assert saved == [("checkpoint-5", 5, "interval", True)]
    callback = hookline.hosts.transformers([second])
    again = transformers_trainer(
        [callback], tmp_path, num_train_epochs=2, restore_callback_states_from_checkpoint=by_transformers
    )
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-5"))
    assert (first.steps, second.steps) == ([3], [3, 6, 9])
    assert (first.resumed, second.resumed) == (False, True)
    assert callback.line.global_step == 10


# ---- peculiar to one host -----------------------------------------------------------------------------------------------


def test_transformers_says_that_exceptions_need_a_with(caplog: pytest.LogCaptureFixture) -> None:
    class Hears(Hook):
        def on_exception(self) -> None: ...

    with caplog.at_level(logging.WARNING, "hookline"):
        transformers_trainer([hookline.hosts.transformers([Hears()])], "out", num_train_epochs=1).train()
    assert any("listen to on_exception: hears" in each.getMessage() for each in caplog.records)


def test_in_transformers_the_norm_is_the_one_before_clipping() -> None:
    class Looks(Hook):
        def __init__(self) -> None:
            super().__init__()
            self.norms: list[float] = []

        def on_step_end(self, ctx: Any) -> None:
            self.norms.append(ctx.grad_norm)

    free, clipped = Looks(), Looks()
    LOOPS["transformers"]([free], epochs=1, lr=0.0)
    LOOPS["transformers"]([clipped], epochs=1, lr=0.0, max_grad_norm=1e-3)
    assert clipped.norms == pytest.approx(free.norms) and len(free.norms) == 5 and min(free.norms) > 0.01


def test_in_transformers_a_hook_can_replace_the_loss() -> None:
    class Mutes(Hook):
        def on_before_backward(self, loss: torch.Tensor) -> torch.Tensor:
            return loss * 0

    class Looks(Hook):
        def on_step_end(self, grad_norm: float) -> None:
            self.norm = grad_norm

    looks = Looks()
    LOOPS["transformers"]([Mutes(), looks], epochs=1)
    assert looks.norm == 0.0


def test_in_transformers_a_loss_that_callbacks_cannot_see_is_said_at_the_first_batch() -> None:
    from interop.hosted import TransformersNet

    class Mute(TransformersNet):
        def forward(self, x: Any, labels: Any = None) -> Any:
            return {"logits": self.layer(x)}

    class Asks(Hook):
        def on_step_end(self, loss: float) -> None: ...

    def compute(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> Any:
        return torch.nn.functional.mse_loss(outputs["logits"], labels)

    def train(hook: Hook) -> None:
        trainer = transformers_trainer(
            [hookline.hosts.transformers([hook])], "out", num_train_epochs=1, eval_strategy="no"
        )
        trainer.model = trainer.model_wrapped = Mute()
        trainer.optimizer = torch.optim.SGD(trainer.model.parameters(), lr=0.1)
        trainer.compute_loss_func = compute
        trainer.train()

    with pytest.raises(hookline.HookError, match=r"requests the loss, but Mute returned none in its outputs"):
        train(Asks())
    counts = Counts()
    train(counts)  # who does not ask for it is served all the same
    assert counts.steps == [3]


def test_in_lightning_manual_optimization_of_two_optimizers_is_heard() -> None:
    class Both(LightningNet):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False
            self.other = torch.nn.Linear(4, 2)

        def training_step(self, batch: Any, batch_idx: int) -> None:
            for optimizer, layer in zip(self.optimizers(), (self.layer, self.other), strict=True):
                optimizer.zero_grad()
                self.manual_backward(torch.nn.functional.mse_loss(layer(batch[0]), batch[1]))
                optimizer.step()

        def configure_optimizers(self) -> Any:
            return [torch.optim.SGD(each.parameters(), lr=0.1) for each in (self.layer, self.other)]

    class Hears(Hook):
        def __init__(self) -> None:
            super().__init__()
            self.seen: list[Any] = []

        def on_after_optimizer_step(self, step: int, optimizer_idx: int) -> None:
            self.seen.append((step, optimizer_idx))

        def on_step_end(self, step: int) -> None:
            self.seen.append(step)

    hook = Hears()
    lightning_trainer([hookline.hosts.lightning([hook])], max_epochs=1, limit_train_batches=2).fit(
        Both(), loader(DATA)
    )
    assert hook.seen == [(1, 0), (1, 1), 1, (2, 0), (2, 1), 2]


def test_in_lightning_a_hook_can_end_the_epoch_but_not_replace_the_loss() -> None:
    class Ends(Hook):
        def on_train_batch_start(self, batch_idx: int) -> Any:
            return hookline.END_EPOCH if batch_idx == 2 else None

    class Doubles(Hook):
        def on_before_backward(self, loss: torch.Tensor) -> torch.Tensor:
            return loss * 2

    line = LOOPS["lightning"]([Ends()])
    assert (line.global_step, line.state.epochs_seen, line.status) == (4, 2, "completed")
    with pytest.raises(hookline.HookError, match="Lightning's Trainer does not allow it to be replaced"):
        LOOPS["lightning"]([Doubles()])


@pytest.mark.parametrize("host", ["lightning", "transformers"])
def test_a_batch_that_cannot_be_left_out_is_an_error_that_says_so(host: str) -> None:
    class Skips(Hook):
        def on_train_batch_start(self) -> Any:
            return hookline.SKIP_BATCH

    with pytest.raises(hookline.HookError, match="cannot skip a batch"):
        LOOPS[host]([Skips()])


@pytest.mark.parametrize("host", ["lightning", "transformers"])
def test_the_same_hooks_can_hear_another_run(host: str) -> None:
    class Steps(Hook):
        def __init__(self) -> None:
            super().__init__()
            self.seen: list[int] = []

        def on_train_end(self, step: int, batches_seen: int) -> None:
            self.seen += [step, batches_seen]

    hook = Steps()
    callback = getattr(hookline.hosts, host)([hook])
    for _ in range(2):
        if host == "lightning":
            lightning_trainer([callback], max_epochs=1).fit(LightningNet(), loader(DATA))
        else:
            trainer = transformers_trainer([callback], "out", num_train_epochs=1)
            trainer.train()
            trainer.evaluate()  # outside of a run: no hook is called
    assert hook.seen == [5, 5, 5, 5]


def test_lightning_s_test_and_predict_are_heard() -> None:
    class Hears(Hook):
        def __init__(self) -> None:
            super().__init__()
            self.seen: list[str] = []

        def setup(self, stage: str) -> None:
            self.seen.append(stage)

        def on_test_end(self, metrics: Any) -> None:
            self.seen.append(f"tested {metrics['test_loss']}")

        def on_predict_epoch_end(self, outputs: Any) -> None:
            self.seen.append(f"{len(outputs)} predictions")

        def teardown(self) -> None:
            self.seen.append("down")

    class Net(LightningNet):
        def test_step(self, batch: Any, batch_idx: int) -> None:
            self.log("test_loss", 2.5)

        def predict_step(self, batch: Any, batch_idx: int) -> Any:
            return self.layer(batch[0])

    hook = Hears()
    trainer = lightning_trainer([hookline.hosts.lightning([hook])])
    trainer.test(Net(), loader(DATA), verbose=False)
    trainer.predict(Net(), loader(DATA))
    assert hook.seen == ["test", "tested 2.5", "down", "predict", "5 predictions", "down"]


def test_lightning_s_loggers_get_what_hooks_log(tmp_path: Path) -> None:
    from lightning.pytorch.loggers import CSVLogger

    trainer = lightning_trainer(
        [hookline.hosts.lightning([GradientMonitor(log_frequency=1)])],
        max_epochs=1,
        logger=CSVLogger(tmp_path),
        log_every_n_steps=1,
    )
    trainer.fit(LightningNet(), loader(DATA))
    assert "grad_norm" in next(tmp_path.rglob("metrics.csv")).read_text()


def test_accelerate_s_trackers_get_what_hooks_log(tmp_path: Path) -> None:
    from accelerate import Accelerator
    from accelerate.tracking import GeneralTracker

    class Keeps(GeneralTracker):
        name, requires_logging_directory = "keeps", False
        rows: list[Any] = []

        @property
        def tracker(self) -> None:
            return None

        def store_init_configuration(self, values: Any) -> None: ...

        def log(self, values: Any, step: Any = None, **options: Any) -> None:
            self.rows.append((step, values))

    accelerator = Accelerator(cpu=True, log_with=Keeps())
    accelerator.init_trackers("run")
    net = torch.nn.Linear(4, 2)
    net, sgd = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
    line = hookline.hosts.accelerate(
        accelerator, net, sgd, hooks=[GradientMonitor(log_frequency=1)], log_every_n_steps=1
    )
    with line:
        for x, y in line.epoch(DATA):
            line.backward(torch.nn.functional.mse_loss(net(x), y))
            line.clip_gradients(1.0)
            sgd.step()
            sgd.zero_grad()
    assert any("grad_norm" in values for _, values in Keeps.rows)
    assert line.device == accelerator.device and line.outer is accelerator


def test_a_copy_of_a_model_that_transformers_trains_is_not_listened_to() -> None:
    import copy

    class Copies(Hook):
        def __init__(self) -> None:
            super().__init__()
            self.batches = 0

        def on_train_batch_start(self) -> None:
            self.batches += 1

        def on_step_end(self, module: torch.nn.Module, state: Any) -> None:
            copy.deepcopy(module)(**state.batch)

    hook = Copies()
    LOOPS["transformers"]([hook], epochs=1)
    assert hook.batches == 5
