"""Trackio's own storage holds what was logged."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from loggers.everything import ODD_TAGS, figure, files, tell_everything
from loggers.folder_tracker import Scored, keeps
from needs import needs
from tiny import Net, batches, quiet

from hookline import Hook, OptionError, load_weights
from hookline.checkpoint.files import read
from hookline.loggers import Loggers, Queued, Trackio, base

needs("trackio")


@pytest.fixture(autouse=True)
def on_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TRACKIO_DIR", "TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL"):
        monkeypatch.delenv(name, raising=False)


def logs(project: str = "hookline", folder: Path | None = None) -> list[dict[str, Any]]:
    """What Trackio has stored for the only run of a project, where it was moved to last."""
    from trackio.sqlite_storage import SQLiteStorage

    assert folder is None or folder.resolve() in SQLiteStorage.get_project_db_path(project).parents
    (run,) = SQLiteStorage.get_runs(project)
    return SQLiteStorage.get_logs(project, run)


def series(rows: list[dict[str, Any]], name: str) -> list[tuple[int, Any]]:
    return [(row["step"], row[name]) for row in rows if name in row]


def test_a_run_is_found_in_the_storage() -> None:
    from trackio.sqlite_storage import SQLiteStorage

    trainer = quiet(logger=Trackio("proj", name="mine"), run_dir="mine", log_every_n_steps=1)
    trainer.fit(Net(lr=0.25), batches(3), batches(1))
    rows = logs("proj", Path("mine/trackio"))
    assert SQLiteStorage.get_runs("proj") == ["mine"]
    assert series(rows, "lr") == [(1, 0.25), (2, 0.25), (3, 0.25)]
    assert series(rows, "val/loss") == [(3, pytest.approx(trainer.metrics["val/loss"]))]
    assert SQLiteStorage.get_run_config("proj", "mine")["options/max_epochs"] == 1
    assert files(Path()) and all(path.is_relative_to("mine/trackio") for path in files(Path()))


def test_every_kind_of_record_is_taken(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tell_everything(Queued(Trackio(), timeout=100), tmp_path)
    assert "switched off" not in caplog.text
    rows = logs(folder=tmp_path / "trackio")
    assert series(rows, "train/loss") == [(1, 1.5), (2, 0.5)]
    assert str(rows[0]["bad"]).lower() == "nan"
    assert (
        series(rows, "tensor") == [(3, 2.5)]
        and series(rows, "array") == [(3, 0.25)]
        and series(rows, "late") == [(1, 7.0)]
    )
    names = {"\ud800": "\\ud800", "step": "metric/step", "time": "metric/time", "__own": "metric/__own"}
    for number, tag in enumerate(ODD_TAGS):
        assert (5, number) in series(rows, names.get(tag, tag))
    assert sum(series(rows, "weights")[0][1]["values"]) == 10
    assert series(rows, "weights/nonfinite") == [(3, 1), (3, 1)]
    assert [value["_value"] for _, value in series(rows, "note")] == ["hello <b>\n\\ud800", "no step"]
    assert [value["_type"] for _, value in series(rows, "image")] == ["trackio.image"] * 4
    assert len(list(tmp_path.rglob("*.png"))) == 6
    assert all(path.is_relative_to(tmp_path / "trackio") for path in files(tmp_path))


def test_checkpoints_are_versions_of_one_artifact_that_can_be_downloaded_and_loaded(tmp_path: Path) -> None:
    import trackio
    from trackio.sqlite_storage import SQLiteStorage

    class Draws(Hook):
        def on_train_end(self, experiment: Any) -> None:
            experiment.add_figure("curve", figure(), 1)

    def fit(epochs: int, resume: Any = None) -> None:
        logger = Trackio(name="mine", artifacts=("config", "figures", "checkpoints"))
        trainer = quiet(logger=logger, run_dir="mine", max_epochs=epochs, hooks=[keeps(), Draws()])
        trainer.fit(Scored(2.0, 1.0, 3.0, 0.5), batches(2), resume=resume)

    fit(2)
    fit(4, resume="auto")
    run = json.loads(Path("mine/run.json").read_text())["id"]
    kept = {
        each["name"]: [sorted(version["aliases"]) for version in reversed(each["versions"])]
        for each in SQLiteStorage.list_artifacts("hookline")
    }
    assert kept == {
        f"config-{run}": [[], ["latest"]],
        f"checkpoint-{run}": [["step-2"], ["step-4"], ["best", "latest", "step-8"]],
        f"figures-{run}": [["latest"]],  # the same figure again
    }
    own = trackio.init("hookline", embed=False, auto_log_cpu=False, auto_log_gpu=False)
    try:
        best = own.use_artifact(f"checkpoint-{run}:step-4", type="model")
        assert (best.metadata["score"], best.metadata["epoch"], best.metadata["run"]) == (1.0, 1, run)
        folder = best.download(tmp_path / "best")
        config = Path(own.use_artifact(f"config-{run}:v0").download(tmp_path / "config"))
        assert json.loads((config / "run.json").read_text())["id"] == run
    finally:
        trackio.finish()
        trackio.context_vars.current_run.set(None)
    assert not Path("mine/checkpoints/e1").exists() and read(Path(folder))["counters"]["step"] == 4
    load_weights(Net(), folder)
    assert {path.parts[0] for path in files(Path())} == {"mine", "best"}


def test_every_run_has_a_place_of_its_own_though_trackio_knows_only_one(tmp_path: Path) -> None:
    for folder in ("a", "b"):
        quiet(logger=Trackio(), run_dir=folder, log_every_n_steps=1).fit(Net(), batches(1))
        assert len(series(logs(folder=Path(folder)), "lr")) == 1


def test_two_places_at_once_are_refused_instead_of_mixed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first, second = Loggers([Trackio()]), Loggers([Trackio()])
    first.open(lambda: tmp_path / "a")
    second.open(lambda: tmp_path / "b")
    first.add_scalar("x", 1.0, 1)
    second.add_scalar("x", 1.0, 1)
    assert "Trackio failed in add_scalar" in caplog.text and "has one directory at a time" in caplog.text
    first.close(), second.close()
    assert series(logs(folder=tmp_path / "a"), "x") == [(1, 1.0)]
    assert not (tmp_path / "b").exists()


def test_a_place_named_by_the_environment_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "all"))
    quiet(logger=Trackio(), run_dir="mine", log_every_n_steps=1).fit(Net(), batches(1))
    assert series(logs(folder=tmp_path / "all"), "lr") == [(1, 0.1)]


def test_a_run_that_the_program_began_itself_is_not_ended(tmp_path: Path) -> None:
    import trackio

    logger = Trackio("ours", queued=False)
    quiet(logger=logger, run_dir="mine", log_every_n_steps=1).fit(
        Net(), batches(1)
    )  # moves Trackio away from home first
    own = trackio.init("theirs", embed=False, auto_log_cpu=False, auto_log_gpu=False)
    quiet(logger=logger, run_dir="mine", log_every_n_steps=1).fit(Net(), batches(1))
    assert trackio.context_vars.current_run.get() is own
    trackio.log({"x": 1.0}, step=1)
    trackio.finish()
    trackio.context_vars.current_run.set(None)
    assert series(logs("theirs"), "x") == [(1, 1.0)]


def test_parameters_that_come_late_are_kept_too(tmp_path: Path) -> None:
    logger = Trackio()
    logger.open(lambda: tmp_path)
    logger.add_scalar("x", 1.0, 4)
    logger.log_hyperparams({"lr": 0.5})
    logger.close()
    assert series(logs(folder=tmp_path), "hyperparams")[0][1]["_value"] == "- lr: 0.5"


def test_without_the_package_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(
        OptionError, match=r'Trackio needs the package .trackio.: pip install "hookline\[trackio\]"'
    ):
        Trackio()


@pytest.mark.parametrize("options", [{"project": ""}, {"resume": "alow"}])
def test_wrong_options_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(OptionError, match=f"{next(iter(options))}="):
        Trackio(**options)
