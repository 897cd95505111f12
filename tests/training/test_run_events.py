"""The events of a run, its epochs and its checkpoints: their order, their facts, and failures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import Net, batches, quiet
from training.witnessed import HEARD, Data, Module, Witness, place

from hookline import Hook


@pytest.fixture(autouse=True)
def nothing_heard_yet() -> None:
    HEARD.clear()


def test_everyone_is_set_up_and_torn_down_in_the_order_of_the_contract() -> None:
    quiet(hooks=[Witness("a"), Witness("b")], strategy=place()).fit(Module(), Data())
    assert HEARD == [
        "D prepare_data",
        "D setup",
        "a setup",
        "b setup",
        "M setup",
        "M configure_model",
        "S setup",
        "M configure_optimizers",
        "D train_dataloader",
        "a on_train_end",
        "b on_train_end",
        "S teardown",
        "a on_fit_end",
        "b on_fit_end",
        "M on_fit_end",
        "D teardown",
        "a teardown",
        "b teardown",
        "M teardown",
    ]


def test_a_failure_is_told_to_hooks_module_data_and_strategy_then_everyone_is_torn_down() -> None:
    with pytest.raises(ZeroDivisionError, match="a failed"):
        quiet(hooks=[Witness("a", "on_train_batch_end"), Witness("b")], strategy=place()).fit(
            Module(), Data()
        )
    start = HEARD.index("a on_train_batch_end")
    assert HEARD[start + 1 :] == [
        "a on_exception",
        "b on_exception",
        "M on_exception",
        "D on_exception",
        "S on_exception",
        "S teardown",
        "D teardown",
        "a teardown",
        "b teardown",
        "M teardown",
    ]


def test_failures_in_on_exception_and_teardown_do_not_keep_the_others_from_hearing() -> None:
    class FailsAgain(Witness):
        def on_exception(self, exception: BaseException) -> None:
            super().on_exception(exception)
            raise RuntimeError(f"{self.name} failed again")

        def teardown(self, stage: str) -> None:
            super().teardown(stage)
            raise RuntimeError(f"{self.name} failed at last")

    module, data, strategy = Module(), Data(), place()
    module.fails_in, data.fails_in, strategy.fails_in = "on_exception", "teardown", "teardown"
    with pytest.raises(ZeroDivisionError, match="b failed") as caught:
        quiet(hooks=[FailsAgain("a"), FailsAgain("b", "on_train_batch_end")], strategy=strategy).fit(
            module, data
        )
    start = HEARD.index("b on_train_batch_end")
    assert HEARD[start + 1 :] == [
        "a on_exception",
        "b on_exception",
        "M on_exception",
        "D on_exception",
        "S on_exception",
        "S teardown",
        "D teardown",
        "a teardown",
        "b teardown",
        "M teardown",
    ]
    notes = "\n".join(caught.value.__notes__)
    for text in (
        "a failed again",
        "b failed again",
        "M failed",
        "S failed",
        "D failed",
        "a failed at last",
        "b failed at last",
    ):
        assert text in notes


class SaveAt(Hook):
    """Asks for a checkpoint when `step` gets to a number."""

    def __init__(self, step: int, path: Path) -> None:
        self.step, self.path = step, path

    def on_step_end(self, trainer: Any, step: int) -> None:
        if step == self.step:
            trainer.save_checkpoint(self.path)


def test_on_checkpoint_save_gets_the_exact_path_the_step_and_the_reason(tmp_path: Path) -> None:
    seen: list[tuple[Path, int, str]] = []

    class Listen(Hook):
        def on_step_end(self, trainer: Any, step: int) -> None:
            if step == 2:
                trainer.save_checkpoint(reason="interval")
                trainer.save_checkpoint(tmp_path / "best one", reason="best")

        def on_checkpoint_save(self, path: Path, step: int, reason: str) -> None:
            assert (path / "model.safetensors").is_file()
            seen.append((path, step, reason))

    trainer = quiet(hooks=[Listen()], run_dir=tmp_path / "run", checkpoint=True)
    trainer.fit(Net(), batches())
    folder = tmp_path / "run" / "checkpoints"
    assert seen == [
        (folder / "step-2", 2, "interval"),
        (tmp_path / "best one", 2, "best"),
        (folder / "last", 4, "last"),
    ]


def test_a_checkpoint_may_be_edited_while_it_is_put_together(tmp_path: Path) -> None:
    class Edit(Hook):
        def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            checkpoint["mine"] = {"words": ["a", "b"], "tensor": torch.arange(3)}

        def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            self.mine = checkpoint["mine"]

    class EditToo(Net):
        def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            checkpoint["module"] = {name: value + 1 for name, value in checkpoint["module"].items()}

    edit = Edit()
    trainer = quiet(hooks=[edit, SaveAt(1, tmp_path / "c")])
    trainer.fit(EditToo(lr=0.0), batches())
    net = Net(lr=0.0)
    quiet(hooks=[edit]).fit(net, batches(), resume=tmp_path / "c")
    assert edit.mine["words"] == ["a", "b"]
    assert edit.mine["tensor"].tolist() == [0, 1, 2]
    assert torch.equal(net.layer.weight, trainer.module.layer.weight + 1)


def test_on_load_checkpoint_may_change_what_is_restored(tmp_path: Path) -> None:
    class Renamed(Net):
        def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            checkpoint["module"]["layer.weight"] = torch.full((2, 4), 7.0)

    trainer = quiet()
    trainer.fit(Net(), batches())
    trainer.save_checkpoint(tmp_path / "c")
    net = Renamed()
    quiet().fit(net, batches(), resume=tmp_path / "c")
    assert torch.equal(net.layer.weight, torch.full((2, 4), 7.0))
