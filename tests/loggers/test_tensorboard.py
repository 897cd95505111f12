"""TensorBoard's own reader finds what was logged."""

from __future__ import annotations

import io
import math
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from loggers.everything import ODD_TAGS, files, tell_everything
from needs import needs
from tiny import Net, batches, quiet

from hookline import Hook, HooklineError, OptionError
from hookline.loggers import Loggers, Queued, TensorBoard, base

needs("tensorboard")


def read(folder: Path) -> Any:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    reader = EventAccumulator(
        str(folder), size_guidance={"scalars": 0, "images": 0, "histograms": 0, "tensors": 0}
    )
    return reader.Reload()


def scalars(reader: Any, tag: str) -> list[tuple[int, float]]:
    return [(each.step, each.value) for each in reader.Scalars(tag)]


def parameters(reader: Any) -> dict[str, Any]:
    from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

    content = reader.SummaryMetadata("_hparams_/session_start_info").plugin_data.content
    given = HParamsPluginData.FromString(content).session_start_info.hparams
    return {name: getattr(value, value.WhichOneof("kind")) for name, value in given.items()}


def test_a_run_is_found_by_the_reader() -> None:
    class Draws(Hook):
        def on_step_end(self, experiment: Any, step: int, module: Any) -> None:
            experiment.add_histogram("weights", module.layer.weight, step)

    trainer = quiet(logger=TensorBoard(), run_dir="mine", log_every_n_steps=1, hooks=[Draws()])
    trainer.fit(Net(lr=0.25), batches(3), batches(1))
    reader = read(Path("mine/tensorboard"))
    assert scalars(reader, "lr") == [(1, 0.25), (2, 0.25), (3, 0.25)]
    assert scalars(reader, "epoch")[0] == (1, 0.0)
    assert scalars(reader, "val/loss") == [(3, pytest.approx(trainer.metrics["val/loss"]))]
    assert [each.step for each in reader.Histograms("weights")] == [1, 2, 3]
    assert parameters(reader)["options/max_epochs"] == 1 and parameters(reader)["module"] == "Net"
    assert {path.parent for path in files(Path())} == {Path("mine/tensorboard")}


def test_means_of_epochs_are_not_in_the_curve_of_the_steps() -> None:
    trainer = quiet(logger=TensorBoard(), run_dir="mine", log_every_n_steps=2, max_epochs=2)
    trainer.fit(Net(), batches(3), batches(1))
    reader = read(Path("mine/tensorboard"))
    assert [step for step, _ in scalars(reader, "train/loss")] == [2, 4, 6]
    assert [step for step, _ in scalars(reader, "train/loss_epoch")] == [3, 6]
    assert scalars(reader, "train/loss_epoch")[-1][1] == pytest.approx(trainer.metrics["train/loss"])
    assert [step for step, _ in scalars(reader, "val/loss")] == [3, 6]


@pytest.mark.parametrize(
    "wrap",
    [lambda logger: logger, Queued, lambda logger: Loggers([logger])],
    ids=["plain", "queued", "group"],
)
def test_every_kind_of_record_is_taken(wrap: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tell_everything(wrap(TensorBoard(queued=False)), tmp_path / "mine")
    assert "switched off" not in caplog.text
    reader = read(tmp_path / "mine/tensorboard")
    assert scalars(reader, "train/loss") == [(1, 1.5), (2, 0.5)]
    assert math.isnan(reader.Scalars("bad")[0].value)
    assert [reader.Scalars(tag)[0].value for tag in ("up", "down")] == [math.inf, -math.inf]
    assert scalars(reader, "tensor") == [(3, 2.5)]
    assert scalars(reader, "array") == [(3, 0.25)]  # without a step: the newest one
    assert scalars(reader, "late") == [(1, 7.0)]
    for number, tag in enumerate(ODD_TAGS):
        name = "\\ud800" if tag == "\ud800" else tag
        assert {(5, number), (6, number)} <= set(scalars(reader, name))
    first = reader.Histograms("weights")[0].histogram_value
    assert (first.num, first.min, first.max, first.sum) == (10, 0, 9, 45)
    assert scalars(reader, "weights/nonfinite") == [(3, 1), (3, 1)]
    notes = [each.tensor_proto.string_val[0].decode() for each in reader.Tensors("note/text_summary")]
    assert notes == ["hello <b>\n\\ud800", "no step"]
    assert [(each.width, each.height) for each in reader.Images("image")] == [(5, 4), (2, 2), (2, 2), (3, 3)]
    assert len(reader.Images("figure")) == len(reader.Images("../figure")) == 1
    kept = parameters(reader)
    assert (kept["lr"], kept["net/width"], kept["net/deep"], kept["none"]) == (0.5, 8, 1, "None")
    assert {path.parent for path in files(tmp_path)} == {tmp_path / "mine/tensorboard"}


def test_an_image_keeps_its_pixels(tmp_path: Path) -> None:
    from PIL import Image

    image = np.arange(24, dtype=np.uint8).reshape(3, 2, 4) * 10
    logger = TensorBoard(folder="a/b")
    logger.open(lambda: tmp_path)
    logger.add_image("x", image, 1)
    logger.close()
    stored = read(tmp_path / "a/b").Images("x")[0].encoded_image_string
    assert (np.asarray(Image.open(io.BytesIO(stored))) == image.transpose(1, 2, 0)).all()


def test_the_writer_itself_can_be_used_during_a_run() -> None:
    class Draws(Net):
        def on_train_start(self) -> None:
            self.logger.client.add_scalars("both", {"a": 1.0, "b": 2.0}, 1)

    logger = TensorBoard()
    quiet(logger=logger, run_dir="mine").fit(Draws(), batches(1))
    assert scalars(read(Path("mine/tensorboard/both_a")), "both") == [(1, 1.0)]
    with pytest.raises(HooklineError, match="TensorBoard has a client only during a run"):
        _ = logger.client


def test_a_second_run_in_the_same_directory_is_seen_after_the_first() -> None:
    trainer = quiet(logger=TensorBoard(), run_dir="mine", log_every_n_steps=1)
    trainer.fit(Net(), batches(2), batches(1))
    trainer.validate(Net(), batches(1))
    assert len(files(Path("mine/tensorboard"))) == 2
    assert "val/loss" in read(Path("mine/tensorboard")).Tags()["scalars"]


def test_a_run_that_continues_hides_what_came_after_its_checkpoint() -> None:
    class Cuts(Hook):
        def on_step_end(self, trainer: Any, step: int) -> None:
            if step == 2:
                trainer.save_checkpoint()
            if step == 4:
                raise RuntimeError("cut")

    options: dict[str, Any] = {"run_dir": "mine", "log_every_n_steps": 1}
    with pytest.raises(RuntimeError, match="cut"):
        quiet(logger=TensorBoard(), hooks=[Cuts()], **options).fit(Net(lr=0.5), batches(6))
    assert scalars(read(Path("mine/tensorboard")), "lr") == [(1, 0.5), (2, 0.5), (3, 0.5), (4, 0.5)]
    time.sleep(1)  # TensorBoard tells which file is the later one by the second in its name
    quiet(logger=TensorBoard(), max_steps=3, **options).fit(
        Net(), batches(6), resume="mine/checkpoints/step-2"
    )
    assert scalars(read(Path("mine/tensorboard")), "lr") == [(1, 0.5), (2, 0.5), (3, 0.5)]


def test_the_trainer_puts_it_behind_a_queue_unless_told_otherwise() -> None:
    assert isinstance(quiet(logger=TensorBoard()).loggers.members[0], Queued)
    assert isinstance(quiet(logger=TensorBoard(queued=False)).loggers.members[0], TensorBoard)


def test_without_the_package_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(
        OptionError,
        match=r'TensorBoard needs the package .tensorboard.: pip install "hookline\[tensorboard\]"',
    ):
        TensorBoard()


@pytest.mark.parametrize(
    "options",
    [{"folder": "../up"}, {"folder": "/abs"}, {"flush_secs": 0}, {"flush_secs": "1"}, {"queued": 1}],
)
def test_wrong_options_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(OptionError, match=f"{next(iter(options))}="):
        TensorBoard(**options)


def test_a_run_that_begins_anew_in_the_same_folder_shows_its_own_points_only() -> None:
    for pause, epochs in ((0, 3), (1, 1)):
        time.sleep(pause)  # TensorBoard tells which file is the later one by the second in its name
        quiet(logger=TensorBoard(), run_dir="mine", log_every_n_steps=1, max_epochs=epochs).fit(
            Net(), batches(4)
        )
    points = read(Path("mine/tensorboard")).Scalars("train/loss")
    assert sorted({each.step for each in points}) == [1, 2, 3, 4]
