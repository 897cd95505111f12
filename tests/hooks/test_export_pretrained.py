"""When a run exports its model, from which checkpoint, and what it refuses before the first step.

The models here save themselves by a method of the same shape as that of transformers; the real ones are in
tests/interop/transformers.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny import Net, batches, quiet
from torch import nn

from hookline import Hook, HookError, OptionError, Trainer
from hookline.hooks import ExportPretrained, ModelCheckpoint


class Saves(nn.Linear):
    """A layer that can be exported."""

    def save_pretrained(self, save_directory: str, state_dict: Any = None) -> None:
        save_file({name: each.contiguous() for name, each in state_dict.items()}, f"{save_directory}/m.st")


class Exportable(Net):
    def __init__(self) -> None:
        super().__init__()
        self.layer = Saves(4, 2)
        self.other = nn.Linear(1, 1)
        self.tokenizer = Words()


class Words:
    """A tokenizer."""

    def save_pretrained(self, save_directory: str) -> None:
        Path(save_directory, "words.txt").write_text("a b")


def trainer(folder: Path, *hooks: Any, **options: Any) -> Trainer:
    return quiet(run_dir=folder, hooks=list(hooks), **{"checkpoint": True, "max_epochs": 3, **options})


def record(folder: Path, name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "pretrained" / name / "hookline.json").read_text())
    return found


class Rises(Exportable):
    """Its validation loss is best in the second epoch."""

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        return torch.tensor([2.0, 1.0, 3.0][self.current_epoch])


def test_the_best_and_the_last_are_exported_with_the_tokenizer(tmp_path: Path) -> None:
    net, kept = Rises(), ModelCheckpoint(monitor="val/loss", save_top_k=2)
    trainer(tmp_path, kept, ExportPretrained("tokenizer")).fit(net, batches(2), batches(1))
    best, last = record(tmp_path, "best"), record(tmp_path, "last")
    assert (best["step"], last["step"]) == (4, 6)
    folder = tmp_path / "pretrained" / "best"
    assert (folder / best["checkpoint"]).resolve() == Path(kept.best_model_path).resolve()
    saved = load_file(tmp_path / "pretrained" / "last" / "m.st")
    assert sorted(saved) == ["bias", "weight"]
    assert torch.equal(saved["weight"], net.layer.weight)
    assert not torch.equal(load_file(folder / "m.st")["weight"], net.layer.weight)
    assert (folder / "words.txt").read_text() == "a b"


def test_an_export_of_an_asynchronous_save_is_of_its_checkpoint(tmp_path: Path) -> None:
    seen: list[int] = []

    class Late(Hook):
        order = 999

        def on_checkpoint_save(self, reason: str) -> None:
            if reason == "best":
                seen.append(record(tmp_path, "best")["step"])

    options = {"checkpoint": {"write": "async"}}
    hooks = (ModelCheckpoint(monitor="val/loss", mode="max"), ExportPretrained(), Late())
    trainer(tmp_path, *hooks, **options).fit(Rises(), batches(2), batches(1))
    assert seen == [2, 6]  # 2.0, then 3.0: the mode is 'max'


def test_without_a_monitor_only_the_last_is_exported(tmp_path: Path) -> None:
    trainer(tmp_path, ExportPretrained()).fit(Exportable(), batches(2))
    assert [each.name for each in (tmp_path / "pretrained").iterdir()] == ["last"]


def test_a_run_that_ended_before_its_export_makes_it_when_it_is_started_again(tmp_path: Path) -> None:
    import shutil

    def fit() -> None:
        kept = ModelCheckpoint(monitor="val/loss")
        trainer(tmp_path, kept, ExportPretrained()).fit(Rises(), batches(2), batches(1), resume="auto")

    fit()
    before = [record(tmp_path, name) for name in ("best", "last")]
    shutil.rmtree(tmp_path / "pretrained")
    fit()
    assert [record(tmp_path, name) for name in ("best", "last")] == before


def test_an_export_that_fails_does_not_end_the_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Breaks(Saves):
        def save_pretrained(self, save_directory: str, state_dict: Any = None) -> None:
            raise OSError("No space left on device")

    net = Exportable()
    net.layer = Breaks(4, 2)
    with caplog.at_level(logging.WARNING, "hookline"):
        run = trainer(tmp_path, ExportPretrained())
        run.fit(net, batches(1))
    assert run.status == "completed"
    assert "last could not be written from the checkpoint" in caplog.text
    assert "No space left on device" in caplog.text


def test_what_cannot_be_exported_is_refused_before_the_first_step(tmp_path: Path) -> None:
    class Two(Exportable):
        def __init__(self) -> None:
            super().__init__()
            self.teacher = Saves(4, 2)

    class Inner(Saves):
        def __init__(self) -> None:
            super().__init__(4, 2)
            self.inside = Saves(1, 1)

    class Plainly(nn.Linear):
        def save_pretrained(self, folder: str) -> None: ...

    nested, plainly = Exportable(), Exportable()
    nested.layer, plainly.layer = Inner(), Plainly(4, 2)  # type: ignore[assignment]
    cases: list[tuple[Any, ExportPretrained, str]] = [
        (Net(), ExportPretrained(), "neither Net nor a submodule of it has the method save_pretrained"),
        (Two(), ExportPretrained(), r"several submodules of Two .*: layer, teacher\. Name .*: model='layer'"),
        (Two(), ExportPretrained(model="teecher"), "Did you mean 'teacher'"),
        (Two(), ExportPretrained(model="other"), "model='other' must be an object with the method"),
        (plainly, ExportPretrained(), "Plainly.save_pretrained has no argument state_dict"),
        (Exportable(), ExportPretrained("tokeniser"), "no attribute 'tokeniser'.*Did you mean 'tokenizer'"),
        (Exportable(), ExportPretrained(monitor="val/f1"), "add ModelCheckpoint\\(monitor='val/f1'\\)"),
        (Exportable(), ExportPretrained(at="best"), "ModelCheckpoint with a monitor, and there is none"),
    ]
    for net, hook, said in cases:
        with pytest.raises(OptionError, match=said):
            trainer(tmp_path, hook).fit(net, batches(1))
    trainer(tmp_path / "named", ExportPretrained(model="teacher"), max_steps=1).fit(Two(), batches(1))
    trainer(tmp_path / "nested", ExportPretrained(), max_steps=1).fit(nested, batches(1))


def test_the_monitor_must_be_clear(tmp_path: Path) -> None:
    two = [ModelCheckpoint(monitor="val/loss"), ModelCheckpoint(monitor="train/loss", dirpath="t")]
    with pytest.raises(OptionError, match=r"keep the best by val/loss, train/loss.*monitor='val/loss'"):
        trainer(tmp_path, *two, ExportPretrained()).fit(Exportable(), batches(1), batches(1))
    with pytest.raises(OptionError, match="no ModelCheckpoint monitors 'val/los'.*Did you mean 'val/loss'"):
        trainer(tmp_path, two[0], ExportPretrained(monitor="val/los")).fit(
            Exportable(), batches(1), batches(1)
        )


def test_two_exports_need_different_folders_and_a_run_without_checkpoints_is_refused(tmp_path: Path) -> None:
    with pytest.raises(HookError, match="would replace each other's exports"):
        trainer(tmp_path, ExportPretrained(), ExportPretrained()).fit(Exportable(), batches(1))
    with pytest.raises(OptionError, match="checkpoint=False writes none"):
        trainer(tmp_path, ExportPretrained(), checkpoint=False).fit(Exportable(), batches(1))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"processing_class": Words}, "processing_class must be an object with the method .*, not Words"),
        ({"processing_class": 3}, "not int"),
        ({"at": ("best", "lst")}, "'lst'"),
        ({"dirpath": "../out"}, "inside the run's directory"),
        ({"dirpath": "/out"}, "inside the run's directory"),
        ({"model": " "}, "model=' ' must be a name"),
    ],
)
def test_a_wrong_argument_is_refused_when_the_hook_is_made(arguments: Any, said: str) -> None:
    with pytest.raises(OptionError, match=said):
        ExportPretrained(**arguments)
