"""W&B's offline file holds what was logged, as W&B's own messages."""

from __future__ import annotations

import json
import math
import shutil
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from loggers.everything import ODD_TAGS, figure, files, tell_everything
from loggers.folder_tracker import Scored, keeps
from needs import needs
from tiny import Net, batches, quiet

from hookline import Hook, OptionError, load_weights
from hookline.checkpoint.files import read
from hookline.loggers import Queued, WandB, base

needs("wandb")

STEP = "trainer/global_step"
HEADER, BLOCK = 7, 32768


@pytest.fixture(autouse=True)
def away_from_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """W&B keeps its own cache and settings outside of a run; here they go with the test."""
    for name in ("WANDB_CACHE_DIR", "WANDB_CONFIG_DIR", "WANDB_DATA_DIR"):
        monkeypatch.setenv(name, str(tmp_path / "home"))
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.delenv("WANDB_MODE", raising=False)


def offline(**options: Any) -> WandB:
    settings = {"console": "off", "x_disable_stats": True, "x_disable_meta": True}
    return WandB(**{"mode": "offline", "settings": settings, **options})


def messages(path: Path) -> Iterator[bytes]:
    """The file is a LevelDB log: after its own header, blocks of frames; a message may go over several frames."""
    data, position, message = path.read_bytes(), HEADER, b""
    assert data.startswith(b":W&B")
    while position + HEADER <= len(data):
        left = BLOCK - position % BLOCK
        if left < HEADER:
            position += left
            continue
        _, length, kind = struct.unpack("<IHB", data[position : position + HEADER])
        message += data[position + HEADER : position + HEADER + length]
        position += HEADER + length
        if kind in (1, 4):  # whole, or the last part
            yield message
            message = b""


def together(items: Any) -> dict[str, Any]:
    """A mapping is stored as one item per value, each with the keys that lead to it."""
    whole: dict[str, Any] = {}
    for each in items:
        inner, (*keys, last) = whole, each.nested_key or [each.key]
        for key in keys:
            inner = inner.setdefault(key, {})
        inner[last] = json.loads(each.value_json)
    return whole


def finished(path: Path) -> list[bytes]:
    """W&B's own process may write the last of it a moment after its `finish()` has returned."""
    from wandb.proto import wandb_internal_pb2

    until = time.monotonic() + 60
    while time.monotonic() < until:
        found = list(messages(path))
        if found and wandb_internal_pb2.Record.FromString(found[-1]).HasField("exit"):
            return found
        time.sleep(0.01)
    raise AssertionError("the run has no end")


class Written:
    """One offline run, read back: the newest in a folder."""

    def __init__(self, folder: Path) -> None:
        from wandb.proto import wandb_internal_pb2

        self.file = max(folder.rglob("*.wandb"), key=lambda path: path.stat().st_mtime_ns)
        self.artifacts: list[Any] = []
        self.rows: list[dict[str, Any]] = []
        self.config: dict[str, Any] = {}
        self.summary: dict[str, Any] = {}
        self.exit_code: int | None = None
        for message in finished(self.file):
            record = wandb_internal_pb2.Record.FromString(message)
            kind = record.WhichOneof("record_type")
            if kind == "run":
                self.run = record.run
                self._configure(record.run.config)
            elif kind == "config":
                self._configure(record.config)
            elif kind == "exit":
                self.exit_code = record.exit.exit_code
            elif kind == "summary":
                self.summary.update(together(record.summary.update))
            elif kind == "artifact":
                self.artifacts.append(record.artifact)
            elif kind == "history":
                self.rows.append(together(record.history.item))

    def _configure(self, config: Any) -> None:
        self.config.update(together(config.update))

    def series(self, name: str) -> list[tuple[int, Any]]:
        return [(row[STEP], row[name]) for row in self.rows if name in row]


def test_a_run_is_found_in_the_offline_file() -> None:
    trainer = quiet(
        logger=offline(project="proj", name="mine", tags=["a", "b"], id="abc123", notes="note"),
        run_dir="mine",
        log_every_n_steps=1,
    )
    trainer.fit(Net(lr=0.25), batches(3), batches(1))
    written = Written(Path("mine/wandb"))
    assert (written.run.project, written.run.display_name, written.run.run_id, list(written.run.tags)) == (
        "proj",
        "mine",
        "abc123",
        ["a", "b"],
    )
    assert written.series("lr") == [(1, 0.25), (2, 0.25), (3, 0.25)]
    assert written.series("val/loss") == [(3, pytest.approx(trainer.metrics["val/loss"]))]
    assert written.config["options"]["max_epochs"] == 1 and written.config["module"] == "Net"
    assert written.exit_code == 0 and written.summary["hookline.status"] == "completed"
    assert all(path.is_relative_to("mine/wandb") for path in files(Path()) if not path.is_relative_to("home"))


def test_every_kind_of_record_is_taken(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    mine = tmp_path / "mine"
    mine.mkdir()
    tell_everything(Queued(offline(), timeout=100), mine)
    assert "switched off" not in caplog.text
    written = Written(mine)
    assert written.series("train/loss") == [(1, 1.5), (2, 0.5)]
    assert math.isnan(written.rows[0]["bad"]) and written.rows[0]["up"] == math.inf
    assert written.series("tensor") == [(3, 2.5)] and written.series("array") == [(3, 0.25)]
    assert written.series("late") == [(1, 7.0)]  # W&B alone would have dropped a step that goes back
    names = {"": "unnamed", "\ud800": "\\ud800"}
    for number, tag in enumerate(ODD_TAGS):
        assert (5, number) in written.series(names.get(tag, tag)), tag
    histograms = [value for _, value in written.series("weights")]
    assert histograms[0]["_type"] == "histogram" and sum(histograms[0]["values"]) == 10
    assert written.series("weights/nonfinite") == [(3, 1), (3, 1)]
    images = [(value["width"], value["height"]) for _, value in written.series("image")]
    assert images == [(5, 4), (2, 2), (2, 2), (3, 3)]
    assert [value["_type"] for _, value in written.series("figure")] == ["image-file"]
    (page, _) = [value["path"] for _, value in written.series("note")]
    assert (written.file.parent / "files" / page).read_text() == "<pre>hello &lt;b&gt;\n\\ud800</pre>"
    assert written.config["lr"] == 0.5 and written.config["net"]["width"] == 8
    assert all(
        path.is_relative_to(mine / "wandb")
        for path in files(tmp_path)
        if not path.is_relative_to(tmp_path / "home")
    )


def test_checkpoints_are_versions_of_one_artifact_that_can_be_loaded_and_resumed(tmp_path: Path) -> None:
    def fit(epochs: int, resume: Any = None) -> list[Any]:
        tracker = offline(artifacts=("config", "figures", "checkpoints"))
        trainer = quiet(logger=tracker, run_dir="mine", max_epochs=epochs, hooks=[keeps(), Draws()])
        trainer.fit(Scored(2.0, 1.0, 3.0, 0.5), batches(2), resume=resume)
        return Written(Path("mine/wandb")).artifacts

    class Draws(Hook):
        def on_train_end(self, experiment: Any) -> None:
            experiment.add_figure("curve", figure(), 1)

    first = fit(2)
    run = json.loads(Path("mine/run.json").read_text())["id"]
    assert [(each.name, each.type, sorted(each.aliases)) for each in first] == [
        (f"config-{run}", "config", ["latest"]),
        (f"checkpoint-{run}", "model", ["best", "latest", "step-2"]),
        (f"checkpoint-{run}", "model", ["best", "latest", "step-4"]),
        (f"figures-{run}", "figures", ["latest"]),
    ]
    facts = json.loads(first[1].metadata)
    assert (facts["score"], facts["epoch"], facts["path"]) == (2.0, 0, "checkpoints/e0")
    # what `wandb sync` sends is here, though the rotation has removed the checkpoint
    copy = tmp_path / "downloaded"
    copy.mkdir()
    for entry in first[1].manifest.contents:
        shutil.copy(entry.local_path, copy / entry.path)
        assert Path(entry.local_path).is_relative_to(Path("mine/wandb/artifacts").resolve())
    assert not Path("mine/checkpoints/e0").exists() and read(copy)["counters"]["step"] == 2
    load_weights(Net(), copy)
    assert (entry_of(first[0]).read_bytes() and entry_of(first[3]).read_bytes()).startswith(b"\x89PNG")
    second = fit(4, resume="auto")
    assert [(each.name, sorted(each.aliases)) for each in second[:2]] == [
        (f"config-{run}", ["latest"]),
        (f"checkpoint-{run}", ["best", "latest", "step-8"]),
    ]
    assert not Path("mine/.uploads").exists()
    trainer = quiet(run_dir="other", max_epochs=2)
    trainer.fit(Scored(2.0, 1.0), batches(2), resume=copy)
    assert trainer.state.step == 4


def entry_of(artifact: Any) -> Path:
    (entry,) = artifact.manifest.contents
    return Path(entry.local_path)


def test_an_image_keeps_its_pixels(tmp_path: Path) -> None:
    from PIL import Image

    image = np.arange(24, dtype=np.uint8).reshape(3, 2, 4) * 10
    logger = offline()
    logger.open(lambda: tmp_path)
    logger.add_image("x", image, 1)
    logger.close()
    (stored,) = tmp_path.rglob("*.png")
    assert (np.asarray(Image.open(stored)) == image.transpose(1, 2, 0)).all()


def test_a_run_that_the_program_began_itself_is_used_and_left_open(tmp_path: Path) -> None:
    import wandb

    own = wandb.init(
        mode="offline",
        dir=str(tmp_path),
        project="own",
        settings=wandb.Settings(console="off", x_disable_stats=True),
    )
    try:
        seen: list[Any] = []

        class Looks(Net):
            def on_train_start(self) -> None:
                seen.append(self.logger.client)

        quiet(logger=offline(), log_every_n_steps=1).fit(Looks(), batches(1))
        assert seen == [own] and wandb.run is own
    finally:
        own.finish()
    assert Written(tmp_path).series("lr") == [(1, 0.1)]


def test_each_run_of_a_logger_is_a_run_of_its_own() -> None:
    logger = offline()
    for folder in ("a", "b"):
        quiet(logger=logger, run_dir=folder, log_every_n_steps=1).fit(Net(), batches(1))
    ids = [Written(Path(folder)).run.run_id for folder in ("a", "b")]
    assert len(set(ids)) == 2


def test_a_client_that_cannot_start_does_not_stop_the_training(caplog: pytest.LogCaptureFixture) -> None:
    trainer = quiet(logger=offline(settings={"no_such_setting": 1}), log_every_n_steps=1)
    trainer.fit(Net(), batches(3))
    assert trainer.state.step == 3
    reported = [record.message for record in caplog.records if record.name == "hookline"]
    assert reported == ["WandB failed in log_hyperparams and is switched off for this run"]


def test_without_the_package_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(
        OptionError, match=r'WandB needs the package .wandb.: pip install "hookline\[wandb\]"'
    ):
        WandB()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mode": "ofline"}, "mode='ofline', allowed: .* Did you mean 'offline'"),
        ({"resume": "alow"}, "Did you mean 'allow'"),
        ({"tags": "one"}, "tags='one' must be a list"),
        ({"tags": [1]}, "tags="),
        ({"artifacts": ["configuration"]}, "artifacts='configuration', allowed"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        WandB(**options)
