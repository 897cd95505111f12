"""Lightning's two pages on hooks, of 2019 and of today: their code blocks run with another import line, and do what is said of them."""

from __future__ import annotations

import copy
import json
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
from test_budgets import per_step, with_hooks
from tiny import Net, batches
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from hookline import Hook, HookError, OptionError
from hookline.data.seeding import isolated_rng
from hookline.engine.events import EVENTS
from hookline.interop.demo import BoringModel
from hookline.interop.lightning import MAPPING, Callback, LightningDataModule, LightningModule, Trainer

LINES = """\
import random
import torch
from hookline.interop.lightning import EarlyStopping, ModelCheckpoint, Timer, progress, seed_everything
import hookline.interop.lightning as pl
assert seed_everything(5, workers=True) == 5
drawn = (torch.rand(1).item(), random.random())
pl.seed_everything(5, verbose=False)
assert (torch.rand(1).item(), random.random()) == drawn
assert pl.callbacks.EarlyStopping is EarlyStopping is pl.EarlyStopping
assert progress.__name__ == "hookline.interop.lightning.progress"  # a submodule, not that of a callback
assert not hasattr(pl, "nothing") and not hasattr(pl, "Nothing")
for hook in (EarlyStopping("val_acc"), ModelCheckpoint(monitor="val_loss")):  # as exact as Lightning's
    assert hook.watch.is_better(0.92444441, 0.92444443)
"""
"""What a program imports after its import line was changed."""

EXAMPLE = """\
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.demos import BoringModel
class MyModel(BoringModel):
    def on_train_start(self):
        print("Model: Training is starting!")
class MyCallback(Callback):
    def on_train_start(self, trainer, pl_module):
        print("Callback: Training is starting!")
model = MyModel()
callback = MyCallback()
trainer = Trainer(callbacks=[callback], logger=False, max_epochs=1)
trainer.fit(model)
"""

OF_2019 = {
    "on_epoch_start": """\
def on_epoch_start(self):
    # do something when the epoch starts
""",
    "on_epoch_end": """\
def on_epoch_end(self):
    # do something when the epoch ends 
""",  # noqa: W291
    "on_batch_start": """\
def on_batch_start(self):
    # do something when the batch starts
""",
    "on_pre_performance_check": """\
def on_pre_performance_check(self):
    # do something before validation starts 
""",  # noqa: W291
    "on_post_performance_check": """\
def on_post_performance_check(self):
    # do something before validation end
""",
    "on_tng_metrics": """\
def on_tng_metrics(self, metrics):
    # do something before validation end
""",
    "on_before_zero_grad": """\
def on_before_zero_grad(self, optimizer):
    # do something with the optimizer or inspect it. 
""",  # noqa: W291
    "on_after_backward": """\
def on_after_backward(self):
    # example to inspect gradient information in tensorboard
    if self.trainer.global_step % 25 == 0:  # don't make the tf file huge
        params = self.state_dict()
        for k, v in params.items():
            grads = v
            name = k
            self.experiment.add_histogram(tag=name, values=grads, global_step=self.trainer.global_step)
""",
}
"""The blocks of the page of 2019. All but the last have only a comment for a body; a line that notes the call is added to each."""


class Small(LightningModule):
    """A linear regression."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)
        self.heard: list[Any] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return F.mse_loss(self.layer(batch[0]), batch[1])

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        return F.mse_loss(self.layer(batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def with_blocks(*names: str, notes: bool = True) -> Small:
    """A module with these blocks in its class, as the page has them."""
    body = "".join(OF_2019[name] + (f"    self.heard.append({name!r})\n" if notes else "") for name in names)
    space: dict[str, Any] = {"Small": Small}
    exec("class Documented(Small):\n" + textwrap.indent(body, "    "), space)
    return space["Documented"]()  # type: ignore[no-any-return]


def quiet(**options: Any) -> Trainer:
    return Trainer(
        **{
            "logger": False,
            "enable_progress_bar": False,
            "max_epochs": 1,
            "num_sanity_val_steps": 0,
            **options,
        }
    )


# ---- the page of today -------------------------------------------------------------------------------------------


def test_the_pages_example_runs_with_its_imports_changed(capsys: pytest.CaptureFixture[str]) -> None:
    here = EXAMPLE.replace("lightning.pytorch.callbacks", "hookline.interop.lightning")
    here = here.replace("lightning.pytorch.demos", "hookline.interop.demo").replace(
        "lightning.pytorch", "hookline.interop.lightning"
    )
    assert [line for line in here.splitlines() if line not in EXAMPLE.splitlines()] == here.splitlines()[:3]
    exec(here, {})
    assert capsys.readouterr().out.splitlines() == [
        "Callback: Training is starting!",
        "Model: Training is starting!",
    ]


def test_a_callbacks_arguments_come_in_lightnings_order_whatever_they_are_called() -> None:
    class Any_(Callback):
        got: tuple[Any, ...] = ()

        def on_train_batch_end(self, t: Any, m: Any, o: Any, b: Any, i: int) -> None:
            self.got = (t, m, sorted(o), b, i)

        def on_validation_batch_end(self, *everything: Any) -> None:
            self.validated = everything

    data, callback, module = batches(2), Any_(), Small()
    trainer = quiet(callbacks=[callback])
    trainer.fit(module, data, batches(1))
    assert callback.got == (trainer, module, ["loss"], data[1], 1)
    assert callback.validated[:2] == (trainer, module) and callback.validated[4:] == (0,)


def test_a_callback_may_also_ask_for_facts_of_hookline() -> None:
    class Norms(Callback):
        norms: tuple[float, ...] = ()

        def on_train_batch_end(
            self, trainer: Any, pl_module: Any, outputs: Any, grad_norm: float = 0.0, *, step: int
        ) -> None:
            self.norms += (step,)

    callback = Norms()
    quiet(callbacks=[callback]).fit(Small(), batches(2))
    assert callback.norms == (1, 2)


def test_hooks_of_hookline_and_callbacks_stand_side_by_side() -> None:
    heard: list[str] = []

    class Ours(Hook):
        def on_train_start(self) -> None:
            heard.append("ours")

    class Theirs(Callback):
        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            heard.append("theirs")

    quiet(callbacks=[Theirs()], hooks=[Ours()]).fit(Small(), batches(1))
    assert sorted(heard) == ["ours", "theirs"]


def test_a_misspelt_hook_is_an_error_with_the_right_name() -> None:
    class Wrong(Callback):
        def on_train_batch_ends(self, trainer: Any, pl_module: Any) -> None: ...

    with pytest.raises(HookError, match="Did you mean 'on_train_batch_end'"):
        quiet(callbacks=[Wrong()])


def test_a_callback_costs_no_call_more_than_a_hook() -> None:
    class Theirs(Callback):
        def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None: ...

    class Ours(Hook):
        def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None: ...

    assert per_step(with_hooks(Theirs())) == per_step(with_hooks(Ours()))


# ---- the page of 2019 --------------------------------------------------------------------------------------------


def test_every_hook_of_2019_is_called_where_its_page_says() -> None:
    module = with_blocks(*OF_2019)
    quiet(logger=True, run_dir="run", log_every_n_steps=100).fit(module, batches(2), batches(1))
    batch = ["on_batch_start", "on_before_zero_grad", "on_after_backward"]
    check = ["on_pre_performance_check", "on_post_performance_check"]
    assert module.heard == ["on_epoch_start", *batch * 2, *check, "on_epoch_end", "on_tng_metrics"]


def test_the_block_on_gradients_runs_as_it_is_and_logs_every_25_steps() -> None:
    module = with_blocks("on_after_backward", notes=False)
    quiet(logger=True, run_dir="run").fit(module, batches(26))
    records = [json.loads(line) for line in Path("run/log.jsonl").read_text().splitlines()]
    logged = [(each["step"], each["tag"]) for each in records if each["type"] == "histogram"]
    assert logged == [(0, "layer.weight"), (0, "layer.bias"), (25, "layer.weight"), (25, "layer.bias")]


def test_on_batch_start_ends_the_epoch_with_minus_one_and_the_validation_still_runs() -> None:
    class Early(Small):
        def on_batch_start(self, data: Any) -> Any:
            self.heard.append(data)
            return -1 if len(self.heard) == 2 else None

        def on_post_performance_check(self) -> None:
            self.heard.append("validated")

    module, data = Early(), batches(5)
    trainer = quiet()
    trainer.fit(module, data, batches(1))
    assert module.heard[:2] == [data[0], data[1]] and module.heard[2:] == ["validated"]
    assert trainer.global_step == 1


def test_on_tng_metrics_changes_what_is_logged() -> None:
    class Edits(Small):
        def on_tng_metrics(self, m: Any) -> None:
            m["twice"] = 2 * m.pop("train/loss")

    quiet(logger=True, run_dir="run", log_every_n_steps=1).fit(Edits(), batches(1))
    records = [json.loads(line) for line in Path("run/log.jsonl").read_text().splitlines()]
    assert {name for each in records if each["type"] == "metrics" for name in each["metrics"]} == {
        "twice",
        "lr",
    }


# ---- modules, data modules, options ------------------------------------------------------------------------------


def test_log_takes_lightnings_arguments() -> None:
    class Logs(Small):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            self.log(
                "both", float(batch_idx), True, on_step=True, on_epoch=True, sync_dist=True, batch_size=1
            )
            self.log(
                "largest", batch_idx, on_step=False, on_epoch=True, reduce_fx=torch.max, rank_zero_only=True
            )
            self.log("hidden", 1.0, logger=False)
            return loss

        def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
            self.log_dict({"v": float(dataloader_idx)}, add_dataloader_idx=True)

    trainer = quiet(logger=True, run_dir="run", log_every_n_steps=1)
    trainer.fit(Logs(), batches(3), [DataLoader(batches(1), batch_size=None) for _ in range(2)])
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    assert (metrics["both"], metrics["both_epoch"], metrics["both_step"], metrics["largest"]) == (
        1.0,
        1.0,
        2.0,
        2.0,
    )
    assert (metrics["v/dataloader_idx_0"], metrics["v/dataloader_idx_1"], metrics["hidden"]) == (
        0.0,
        1.0,
        1.0,
    )
    assert trainer.progress_bar_metrics == {"both_step": 2.0, "both_epoch": 1.0}
    assert not [name for name in metrics if name.startswith("train/")]
    assert "hidden" not in Path("run/log.jsonl").read_text()


def test_an_unknown_reduction_is_refused_with_the_known_ones() -> None:
    class Logs(Small):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.log("x", 1.0, reduce_fx=torch.median)
            return super().training_step(batch, batch_idx)

    with pytest.raises(OptionError, match="allowed are min, max, mean and sum"):
        quiet().fit(Logs(), batches(1))


def test_a_data_module_gives_loaders_and_knows_its_trainer() -> None:
    class Data(LightningDataModule):
        heard: tuple[Any, ...] = ()

        def prepare_data(self) -> None:
            self.heard += ("prepare",)

        def setup(self, s: str) -> None:
            self.heard += (s, self.trainer.max_epochs)

        def train_dataloader(self) -> Any:
            return batches(2)

        def val_dataloader(self) -> Any:
            return batches(1)

    data, trainer = Data(), quiet()
    trainer.fit(Small(), data)
    assert data.heard == ("prepare", "fit", 1)
    assert (trainer.global_step, trainer.num_val_batches, trainer.datamodule) == (2, [1], data)


def test_several_training_loaders_are_drawn_from_at_once_the_shorter_ones_again() -> None:
    def long_and_short() -> Any:
        return {
            "long": DataLoader(batches(3), batch_size=None),
            "short": DataLoader(batches(2), batch_size=None),
        }  # type: ignore[arg-type]

    class Two(Small):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.heard.append({name: float(each[0].sum()) for name, each in batch.items()})
            return super().training_step(batch["long"], batch_idx)

    class Brings(Two):
        def train_dataloader(self) -> Any:
            return long_and_short()

    first, second, third = (float(each[0].sum()) for each in batches(3))
    drawn = [
        {"long": first, "short": first},
        {"long": second, "short": second},
        {"long": third, "short": first},
    ]
    passed, brought, trainer = Two(), Brings(), quiet()
    quiet().fit(passed, long_and_short())
    trainer.fit(brought)
    assert passed.heard == brought.heard == drawn and trainer.num_training_batches == 3


class LogsLoss(BoringModel):
    """Logs the loss of a validation, which Lightning does not do by itself."""

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        outputs = super().validation_step(batch, batch_idx)
        self.log("x", outputs["x"])
        return outputs


def test_the_other_verbs_return_what_lightnings_do(capsys: pytest.CaptureFixture[str]) -> None:
    model, trainer = BoringModel(), quiet(limit_test_batches=2, limit_predict_batches=3)
    (tested,) = trainer.test(model)
    assert tested == {} and capsys.readouterr().out == ""
    (validated,) = trainer.validate(LogsLoss(), verbose=False)
    assert list(validated) == ["x"] and capsys.readouterr().out == ""
    trainer.validate(LogsLoss())
    assert "Validate metric" in (printed := capsys.readouterr().out) and "DataLoader 0" in printed
    assert [each.shape for each in trainer.predict(model)] == [(1, 2)] * 3


def test_the_boring_model_learns() -> None:
    model, trainer = LogsLoss(), quiet(max_epochs=3)
    before = trainer.validate(model, verbose=False)[0]["x"]
    trainer.fit(model)
    assert trainer.validate(model, verbose=False)[0]["x"] < before


def test_a_second_trainer_in_the_same_directory_starts_a_new_run_unless_ckpt_path_is_given() -> None:
    for expected in (4, 4):
        trainer = quiet(run_dir="run", enable_checkpointing=True)
        trainer.fit(Net(), batches(4))
        assert trainer.global_step == expected and not trainer.state.resumed
    trainer = quiet(run_dir="run", enable_checkpointing=True, max_epochs=2)
    trainer.fit(Net(), batches(4), ckpt_path="last")
    assert trainer.global_step == 8 and trainer.state.resumed


def test_a_run_continues_from_ckpt_path() -> None:
    first = quiet(enable_checkpointing=True, run_dir="run")
    first.fit(Small(), batches(2))
    second = quiet(max_epochs=2, run_dir="run", enable_checkpointing=True)
    second.fit(Small(), batches(2), ckpt_path="last")
    assert second.global_step == 4 and second.ckpt_path is not None
    assert second.checkpoint_callback in second.callbacks


def test_options_without_meaning_here_are_taken_at_rest_and_refused_otherwise() -> None:
    trainer = quiet(
        accelerator="cpu", devices=1, num_nodes=1, enable_model_summary=False, profiler=None, min_epochs=None
    )
    assert trainer.device.type == "cpu"
    with pytest.raises(OptionError, match="start several processes with torchrun"):
        quiet(devices=4)
    with pytest.raises(OptionError, match=r"profiler='simple'.*hookline.hooks.Profiler"):
        quiet(profiler="simple")
    with pytest.raises(
        OptionError, match="invalid accelerator name: `accelerator='tpu'`. Hookline runs on auto"
    ):
        quiet(accelerator="tpu")


def test_facts_have_lightnings_names_during_a_run() -> None:
    seen: dict[str, tuple[Any, ...]] = {}

    class Looks(Callback):
        def on_train_batch_end(
            self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
        ) -> None:
            seen["train"] = (
                trainer.training,
                trainer.validating,
                trainer.is_last_batch,
                trainer.accumulate_grad_batches,
            )

        def on_validation_batch_end(self, trainer: Any, pl_module: Any, *rest: Any) -> None:
            seen["val"] = (trainer.training, trainer.validating, trainer.evaluating, trainer.sanity_checking)

        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            seen["start"] = (
                trainer.is_global_zero,
                trainer.world_size,
                trainer.lightning_module is pl_module,
                trainer.fast_dev_run,
            )

    quiet(callbacks=[Looks()]).fit(Small(), batches(2), batches(1))
    assert seen == {
        "start": (True, 1, True, False),
        "train": (True, False, True, 1),
        "val": (False, True, True, False),
    }


def test_what_a_callback_puts_among_the_metrics_is_a_metric_of_the_run() -> None:
    class Puts(Callback):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, *rest: Any) -> None:
            trainer.callback_metrics["put"] = torch.tensor(2.0)

    trainer = quiet(callbacks=[Puts()])
    trainer.fit(Small(), batches(1))
    assert trainer.metrics["put"] == 2.0 and trainer.callback_metrics["put"] == 2.0
    assert "put" not in trainer.logged_metrics


# ---- the table ---------------------------------------------------------------------------------------------------

RECORDED = json.loads((Path(__file__).parents[1] / "recorded" / "lightning-2.6.6.json").read_text())
NOT_EVENTS = {"state_dict", "load_state_dict", "on_validation_model_zero_grad"}


def test_the_table_names_events_that_exist_and_everything_that_lightning_was_heard_to_call() -> None:
    assert [event for event in MAPPING if event not in EVENTS] == []
    heard = {call.split()[1] for calls in RECORDED.values() for call in calls}
    strategies = {
        call.split()[1] for calls in RECORDED.values() for call in calls if call.startswith("strategy")
    }
    assert heard - strategies - set(MAPPING.values()) - NOT_EVENTS == set()


@pytest.mark.parametrize("as_block", [False, True])
def test_a_toggled_optimizer_trains_its_parameters_only_and_all_get_their_gradients_back(
    as_block: bool,
) -> None:
    seen: list[list[bool]] = []

    class Two(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False
            self.left, self.right = nn.Linear(4, 2), nn.Linear(2, 2)
            self.right.bias.requires_grad_(False)

        def note(self) -> None:
            seen.append([each.requires_grad for each in self.parameters()])

        def training_step(self, batch: Any) -> None:
            left, right = self.optimizers()
            if as_block:
                with self.toggled_optimizer(left):
                    self.note()
                with self.toggled_optimizer(right):
                    self.note()
            else:
                self.toggle_optimizer(left)
                self.note()
                self.toggle_optimizer(right)  # the other one was not given back
                self.note()
                self.manual_backward(F.mse_loss(self.right(self.left(batch[0])), batch[1]))
                assert self.left.weight.grad is None and self.right.weight.grad is not None
                self.untoggle_optimizer(right)
            self.note()

        def configure_optimizers(self) -> Any:
            return [torch.optim.SGD(each.parameters(), lr=0.1) for each in (self.left, self.right)], []

    Trainer(max_epochs=1, logger=False, enable_progress_bar=False).fit(Two(), batches(1))
    assert seen == [[True, True, False, False], [False, False, True, False], [True, True, True, False]]


def test_a_callback_logs_by_itself() -> None:
    class Logs(Callback):
        def on_train_batch_end(
            self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
        ) -> None:
            self.log("index", float(batch_idx), on_step=False, on_epoch=True)

        def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
            self.log_dict({"end": 2.0}, prog_bar=True)

    callback = Logs()
    trainer = quiet(hooks=[callback])
    trainer.fit(Net(), batches(3))
    assert (trainer.metrics["index"], trainer.metrics["end"]) == (1.0, 2.0)
    with pytest.raises(
        HookError, match=r"Logs.log\('late', ...\) works only while a trainer runs the callback"
    ):
        callback.log("late", 1.0)
    assert (
        copy.deepcopy(callback).__dict__["_trainer_ref"].value is None
    )  # a copy does not take the run along


def test_an_option_that_log_has_not_is_an_error_that_lists_those_it_has() -> None:
    class Wrong(Callback):
        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            self.log("x", 1.0, on_stepp=True)

    with pytest.raises(OptionError, match=r"log\('x', on_stepp=...\).*Did you mean 'on_step'"):
        quiet(hooks=[Wrong()]).fit(Net(), batches(1))


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        ({}, ["epoch=0-step=64"]),
        ({"enable_checkpointing": False}, []),
        ({"checkpoint": False}, ["epoch=0-step=64"]),
        ({"save": "async"}, ["epoch=0-step=64", "last"]),
        ({"enable_checkpointing": False, "checkpoint": True}, ["last"]),
    ],
    ids=str,
)
def test_a_run_keeps_its_model_unless_checkpointing_is_switched_off(
    options: dict[str, Any], kept: list[str]
) -> None:
    Trainer(run_dir="run", max_epochs=1, logger=False, enable_progress_bar=False, **options).fit(
        BoringModel()
    )
    assert sorted(each.name for each in Path("run").glob("checkpoints/*")) == kept


def test_callbacks_and_seed_everything_are_imported_from_the_same_place() -> None:
    with isolated_rng():
        exec(LINES, {})
