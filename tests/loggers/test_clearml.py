"""ClearML's offline session holds what was logged, as ClearML's own events."""

from __future__ import annotations

import importlib.util
import io
import json
import os
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from loggers.everything import ODD_TAGS, figure, files, tell_everything
from loggers.folder_tracker import Scored, keeps
from tiny import Net, batches, quiet

from hookline import Hook, OptionError, load_weights
from hookline.checkpoint.files import read
from hookline.loggers import ClearML, Queued, base

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("clearml") is None, reason="needs the package clearml"),
    # ClearML still uses old names of pyparsing
    pytest.mark.filterwarnings("ignore:.* deprecated(, | - )use :DeprecationWarning"),
]


@pytest.fixture(autouse=True)
def on_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CLEARML_CACHE_DIR", "CLEARML_API_ACCESS_KEY", "CLEARML_API_SECRET_KEY"):
        monkeypatch.delenv(name, raising=False)


class Written:
    """One offline session, read back: the newest of a run."""

    def __init__(self, folder: Path) -> None:
        archives = (folder / "clearml/offline").glob("*.zip")
        self.archive = zipfile.ZipFile(max(archives, key=lambda path: path.stat().st_mtime_ns))
        self.task = json.loads(self.archive.read("task.json"))
        lines = self.archive.read("metrics.jsonl").splitlines()
        self.events = [event for line in lines for event in json.loads(line)]
        self.params = {
            name: each["value"] for name, each in self.task["hyperparams"].get("Hookline", {}).items()
        }
        self.artifacts = {each["key"]: each for each in self.task["execution"]["artifacts"]}

    def series(self, title: str, series: str) -> list[tuple[int, float]]:
        return [
            (each["iter"], each["value"])
            for each in self.events
            if each["type"] == "training_stats_scalar"
            and (each["metric"], each["variant"]) == (title, series)
        ]

    def media(self, ending: str) -> list[tuple[str, bytes]]:
        """The title and the bytes of each sample, in the order of their paths."""
        names = sorted(
            name for name in self.archive.namelist() if "/metrics/" in name and name.endswith(ending)
        )
        return [(name.split("/metrics/")[1].split("/")[0], self.archive.read(name)) for name in names]

    def artifact(self, key: str) -> bytes:
        (name,) = [each for each in self.archive.namelist() if f"/artifacts/{key}/" in each]
        return self.archive.read(name)


def test_a_run_is_found_in_the_session_with_its_artifacts(tmp_path: Path) -> None:
    from PIL import Image

    class Draws(Hook):
        def on_train_end(self, experiment: Any) -> None:
            experiment.add_figure("curve", figure(), 1)

    artifacts = ("config", "figures", "checkpoints")
    logger = ClearML("proj", name="mine", mode="offline", tags=["a", "b"], artifacts=artifacts)
    trainer = quiet(
        logger=logger, run_dir="mine", max_epochs=2, hooks=[keeps(), Draws()], log_every_n_steps=1
    )
    trainer.fit(Scored(2.0, 1.0), batches(2))
    written = Written(Path("mine"))
    assert (written.task["name"], written.task["project_name"]) == ("mine", "proj")
    assert (written.task["id"], sorted(written.task["tags"])) == (logger.task_id, ["a", "b"])
    assert written.series("lr", "lr") == [(step, 0.1) for step in (1, 2, 3, 4)]
    assert written.series("score", "score") == [(2, 2.0), (4, 1.0)]
    assert (written.params["options/max_epochs"], written.params["module"]) == ("2", "Scored")
    assert list(written.artifacts) == ["config", "e0-step-2", "e1-step-4", "figures"]
    run = json.loads(Path("mine/run.json").read_text())["id"]
    assert json.loads(written.artifact("config"))["id"] == run
    figures = zipfile.ZipFile(io.BytesIO(written.artifact("figures")))
    ((title, shown),) = written.media(".png")
    drawn = Image.open(io.BytesIO(figures.read(figures.namelist()[0]))).convert("RGBA")
    assert title == "curve" and (np.asarray(drawn) == np.asarray(Image.open(io.BytesIO(shown)))).all()
    facts = dict(written.artifacts["e1-step-4"]["display_data"])
    assert (facts["score"], facts["run"], facts["step"]) == ("1.0", run, "4")
    assert json.loads(facts["aliases"]) == ["latest", "step-4", "best"]
    assert 'best = "e1-step-4"' in written.task["configuration"]["checkpoints"]["value"]
    for key in ("e0-step-2", "e1-step-4"):
        zipfile.ZipFile(io.BytesIO(written.artifact(key))).extractall(tmp_path / key)
    # the rotation has removed the first one, which can be read and resumed nevertheless
    assert not Path("mine/checkpoints/e0").exists() and read(tmp_path / "e0-step-2")["counters"]["step"] == 2
    load_weights(Net(), tmp_path / "e1-step-4")
    resumed = quiet(run_dir="other", max_epochs=3)
    resumed.fit(Scored(2.0, 1.0, 0.0), batches(2), resume=tmp_path / "e1-step-4")
    assert resumed.state.step == 6
    assert {path.parts[1] for path in files(Path("mine"))} == {
        "clearml",
        "checkpoints",
        ".artifacts",
        "batches",
    }
    assert [path.name for path in Path("mine/clearml").iterdir()] == ["offline"]


def test_every_kind_of_record_is_taken(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    from PIL import Image

    mine = tmp_path / "mine"
    mine.mkdir()
    tell_everything(Queued(ClearML(mode="offline"), timeout=100), mine)
    assert "switched off" not in caplog.text
    written = Written(mine)
    assert written.series("train", "loss") == [(1, 1.5), (2, 0.5)]
    for name in ("bad", "up", "down"):
        assert written.series(name, name) == [] and written.series(name, "nonfinite") == [(1, 1.0)]
    assert written.series("array", "array") == [(3, 0.25)] and written.series("late", "late") == [(1, 7.0)]
    at_five = [
        each["value"]
        for each in written.events
        if each["type"] == "training_stats_scalar" and each["iter"] == 5
    ]
    assert at_five == list(range(len(ODD_TAGS)))
    assert (5, float(ODD_TAGS.index("../../up"))) in written.series("_", "_/up")
    assert (written.params["lr"], written.params["net/width"]) == ("0.5", "8")
    plots = [each for each in written.events if each["type"] == "plot"]
    assert len(plots) == 6 and sum(json.loads(plots[0]["plot_str"])["data"][0]["y"]) == 10
    assert written.series("weights", "nonfinite") == [(3, 1.0), (3, 1.0)]
    assert written.media(".txt") == [("note", b"hello <b>\n\\ud800"), ("note", b"no step")]
    images = written.media(".png")
    assert [title for title, _ in images] == ["_", "figure", *["image"] * 4]
    assert np.asarray(Image.open(io.BytesIO(images[3][1]))).shape == (2, 2)
    assert all(path.is_relative_to(mine / "clearml/offline") for path in files(tmp_path))


def test_each_run_of_a_logger_is_a_task_of_its_own_and_the_settings_of_the_process_stay() -> None:
    before = dict(os.environ)
    logger = ClearML(mode="offline")
    for folder in ("a", "b"):
        quiet(logger=logger, run_dir=folder, log_every_n_steps=1).fit(Net(), batches(1))
    names = [Written(Path(folder)).task for folder in ("a", "b")]
    assert names[0]["id"] != names[1]["id"] and [each["name"] for each in names] == ["a", "b"]
    assert dict(os.environ) == before


def test_a_client_that_cannot_start_does_not_stop_the_training(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CLEARML_CACHE_DIR", "/proc/nowhere")
    trainer = quiet(logger=ClearML(mode="offline"), log_every_n_steps=1)
    trainer.fit(Net(), batches(3))
    assert trainer.state.step == 3
    reported = [record.message for record in caplog.records if record.name == "hookline"]
    assert reported == ["ClearML failed in log_hyperparams and is switched off for this run"]


def test_without_the_package_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(
        OptionError, match=r'ClearML needs the package .clearml.: pip install "hookline\[clearml\]"'
    ):
        ClearML()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mode": "ofline"}, "mode='ofline', allowed: .* Did you mean 'offline'"),
        ({"tags": "one"}, "tags='one' must be a list"),
        ({"mode": "offline", "task_id": "x"}, "task_id='x' must be left out in offline mode. Pass it when"),
        ({"artifacts": ["configuration"]}, "artifacts='configuration', allowed"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        ClearML(**options)
