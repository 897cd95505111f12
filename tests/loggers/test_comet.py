"""Comet's offline archive holds what was logged, as Comet's own messages."""

from __future__ import annotations

import importlib.util
import io
import json
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
from hookline.loggers import Comet, Queued, base
from hookline.loggers.comet import NOTHING_ELSE, _without_patches

pytestmark = pytest.mark.skipif(  # importing it here would patch this process
    importlib.util.find_spec("comet_ml") is None, reason="needs the package comet_ml"
)


@pytest.fixture(autouse=True)
def on_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Comet reads settings from files and the environment."""
    monkeypatch.setenv("COMET_CONFIG", str(tmp_path / "comet.config"))
    for name in ("COMET_API_KEY", "COMET_EXPERIMENT_KEY", "COMET_OFFLINE_DIRECTORY"):
        monkeypatch.delenv(name, raising=False)


class Written:
    """One offline experiment, read back."""

    def __init__(self, folder: Path) -> None:
        self.file = max((folder / "comet").glob("*.zip"), key=lambda path: path.stat().st_mtime_ns)
        self.archive = zipfile.ZipFile(self.file)
        self.about = json.loads(self.archive.read("experiment.json"))
        lines = [json.loads(line) for line in self.archive.read("messages.json").splitlines()]
        self.messages = [(line["type"], line["payload"]) for line in lines]
        self.others = {each["key"]: each["value"] for each in self._of("log_other")}
        self.params = {
            each["param"]["paramName"]: each["param"]["paramValue"] for each in self._of("parameter_msg")
        }
        self.uploads = self._of("file_upload")

    def _of(self, kind: str) -> list[dict[str, Any]]:
        return [payload for type_, payload in self.messages if type_ == kind]

    def series(self, name: str) -> list[tuple[int, Any]]:
        metrics = [each["metric"] for each in self._of("metric_msg")]
        return [(each["step"], each["metricValue"]) for each in metrics if each["metricName"] == name]

    def assets(self, kind: str) -> list[tuple[str, bytes, dict[str, Any]]]:
        """Name, bytes and metadata of the uploads of a kind, in the order of the log."""
        return [
            (
                each["additional_params"].get("fileName") or each["additional_params"].get("figName"),
                self.archive.read(each["file_path"]),
                each,
            )
            for each in self.uploads
            if each["upload_type"] == kind
        ]


def test_a_run_is_found_in_the_archive_with_its_artifacts(tmp_path: Path) -> None:
    class Draws(Hook):
        def on_train_end(self, experiment: Any) -> None:
            experiment.add_figure("curve", figure(), 1)

    logger = Comet("proj", name="mine", mode="offline", tags=["a", "b"], artifacts=("config", "checkpoints"))
    trainer = quiet(
        logger=logger, run_dir="mine", max_epochs=2, hooks=[keeps(), Draws()], log_every_n_steps=1
    )
    trainer.fit(Scored(2.0, 1.0), batches(2))
    written = Written(Path("mine"))
    assert (written.about["project_name"], written.about["offline_id"]) == ("proj", logger.key)
    assert sorted(written.about["tags"]) == ["a", "b"] and written.others["Name"] == "mine"
    assert written.series("lr") == [(step, 0.1) for step in (1, 2, 3, 4)]
    assert written.series("score") == [(2, 2.0), (4, 1.0)]
    assert written.params["options/max_epochs"] == 2 and written.params["module"] == "Scored"
    ((_, drawn, _),) = written.assets("visualization")
    assert drawn.startswith(b"\x89PNG")
    ((name, config, _),) = written.assets("asset")
    run = json.loads(Path("mine/run.json").read_text())["id"]
    assert name == "config/run.json" and json.loads(config)["id"] == run
    models: dict[str, Path] = {}
    for name, data, upload in written.assets("model-element"):
        model = upload["additional_params"]["groupingName"]
        models[model] = tmp_path / model
        models[model].mkdir(exist_ok=True)
        (models[model] / name).write_bytes(data)
        facts = upload["metadata"]
    assert list(models) == ["e0-step-2", "e1-step-4"]
    assert written.others["checkpoint.best"] == written.others["checkpoint.latest"] == "e1-step-4"
    assert (facts["score"], facts["run"], facts["aliases"]) == (1.0, run, ["latest", "step-4", "best"])
    # the rotation has removed the first one, which can be read and resumed nevertheless
    assert not Path("mine/checkpoints/e0").exists() and read(models["e0-step-2"])["counters"]["step"] == 2
    load_weights(Net(), models["e1-step-4"])
    resumed = quiet(run_dir="other", max_epochs=3)
    resumed.fit(Scored(2.0, 1.0, 0.0), batches(2), resume=models["e1-step-4"])
    assert resumed.state.step == 6
    assert {path.parts[1] for path in files(Path("mine"))} == {
        "comet",
        "checkpoints",
        ".artifacts",
        "batches",
    }
    assert [path.name for path in Path("mine/comet").iterdir()] == [written.file.name]


def test_every_kind_of_record_is_taken(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    from PIL import Image

    mine = tmp_path / "mine"
    mine.mkdir()
    tell_everything(Queued(Comet(mode="offline"), timeout=100), mine)
    assert "switched off" not in caplog.text
    written = Written(mine)
    assert written.series("train/loss") == [(1, 1.5), (2, 0.5)]
    assert written.series("bad") == [(1, "NaN")] and written.series("up") == [(1, "Infinity")]
    assert written.series("array") == [(3, 0.25)] and written.series("late") == [(1, 7.0)]
    names = {"": "unnamed", "\ud800": "\\ud800", "nul\0": "nul\\0"}
    for number, tag in enumerate(ODD_TAGS[:-1]):
        assert (5, number) in written.series(names.get(tag, tag))
    (cut,) = {name for name in map(str, _metric_names(written)) if name.startswith("xxx")}
    assert len(cut) < 400 and (5, len(ODD_TAGS) - 1) in written.series(cut)  # Comet cuts long names
    assert (written.params["lr"], written.params["net/width"]) == (0.5, 8)
    assert len(written.assets("histogram3d")) == 6 and len(written.series("weights/nonfinite")) == 2
    texts = [(data.decode(), upload["metadata"]) for _, data, upload in written.assets("text-sample")]
    assert texts == [("hello <b>\n\\ud800", {"tag": "note"}), ("no step", {"tag": "note"})]
    images = written.assets("visualization")
    assert [name for name, *_ in images] == ["image"] * 4 + ["figure", "../figure"]
    pixels = np.asarray(Image.open(io.BytesIO(images[1][1])))
    assert pixels.shape == (2, 2) and not pixels.any()
    assert files(mine) == {written.file}


def _metric_names(written: Written) -> list[str]:
    return [payload["metric"]["metricName"] for kind, payload in written.messages if kind == "metric_msg"]


def test_an_experiment_is_continued_by_its_key_and_another_one_begins_without() -> None:
    logger = Comet(mode="offline")
    for _ in range(2):
        quiet(logger=logger, run_dir="mine", log_every_n_steps=1).fit(Net(), batches(1))
    first, second = {path.stem for path in Path("mine/comet").glob("*.zip")}
    assert first != second
    quiet(logger=Comet(mode="offline", key=first), run_dir="other", log_every_n_steps=1).fit(
        Net(), batches(1)
    )
    written = Written(Path("other"))
    assert (written.about["offline_id"], written.about["resume_strategy"]) == (first, "get")
    assert written.series("lr") == [(1, 0.1)]


def test_an_experiment_of_the_program_is_used_and_left_open(tmp_path: Path) -> None:
    with _without_patches():
        import comet_ml

    folder = str(tmp_path / "own" / "comet")
    Path(folder).parent.mkdir()
    own = comet_ml.OfflineExperiment(offline_directory=folder, **NOTHING_ELSE)
    try:
        seen: list[Any] = []

        class Looks(Net):
            def on_train_start(self) -> None:
                seen.append(self.logger.client)

        quiet(logger=Comet(), run_dir="mine", log_every_n_steps=1).fit(Looks(), batches(1))
        assert seen == [own] and comet_ml.get_running_experiment() is own
    finally:
        own.end()
    assert not list(Path("mine").rglob("*.zip")) and Written(tmp_path / "own").series("lr") == [(1, 0.1)]


def test_without_a_key_the_training_continues(caplog: pytest.LogCaptureFixture) -> None:
    trainer = quiet(logger=Comet(), log_every_n_steps=1)
    trainer.fit(Net(), batches(3))
    assert trainer.state.step == 3 and "requires an API key" in caplog.text
    reported = [record.message for record in caplog.records if record.name == "hookline"]
    assert reported == ["Comet failed in log_hyperparams and is switched off for this run"]


def test_without_the_package_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(
        OptionError, match=r'Comet needs the package .comet_ml.: pip install "hookline\[comet\]"'
    ):
        Comet()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mode": "ofline"}, "mode='ofline', allowed: .* Did you mean 'offline'"),
        ({"tags": "one"}, "tags='one' must be a list"),
        ({"tags": [1]}, "tags="),
        ({"artifacts": ["configuration"]}, "artifacts='configuration', allowed"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        Comet(**options)
