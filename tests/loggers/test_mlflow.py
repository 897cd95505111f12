"""MLflow's own client finds what was logged."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
from loggers.everything import ODD_TAGS, files, tell_everything
from loggers.folder_tracker import Scored, keeps
from needs import needs
from tiny import Net, batches, quiet

from hookline import OptionError, load_weights
from hookline.checkpoint.catalog import find_checkpoints
from hookline.checkpoint.files import read
from hookline.loggers import MLflow, Queued, base
from hookline.report.runs import list_runs

needs("mlflow", "sqlalchemy", "alembic")

# MLflow's database model still asks SQLAlchemy 2.1 for a way of loading that goes away
pytestmark = pytest.mark.filterwarnings(
    "ignore:The ``noload`` loader strategy is deprecated:sqlalchemy.exc.SADeprecationWarning"
)


@pytest.fixture(autouse=True)
def local(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")


@pytest.fixture(scope="module")
def database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A database with MLflow's tables, which take seconds to make."""
    from mlflow import MlflowClient

    path = tmp_path_factory.mktemp("mlflow") / "mlflow.db"
    MlflowClient(tracking_uri=f"sqlite:///{path}").search_experiments()
    return path


def prepare(database: Path, *run_dirs: Path | str) -> None:
    for run_dir in run_dirs:
        (Path(run_dir) / "mlflow").mkdir(parents=True)
        shutil.copy(database, Path(run_dir) / "mlflow" / "mlflow.db")


def reader(run_dir: Path) -> Any:
    from mlflow import MlflowClient

    return MlflowClient(tracking_uri=f"sqlite:///{(run_dir / 'mlflow/mlflow.db').resolve()}")


def history(client: Any, run_id: str | None, name: str) -> list[tuple[int, float]]:
    return [(each.step, each.value) for each in client.get_metric_history(run_id, name)]


def test_a_run_is_found_by_the_client() -> None:
    logger = MLflow("exp", run_name="mine", tags={"team": "x"})
    trainer = quiet(logger=logger, run_dir="mine", log_every_n_steps=1)
    trainer.fit(Net(lr=0.25), batches(3), batches(1))
    client = reader(Path("mine"))
    experiment = client.get_experiment_by_name("exp")
    (run,) = client.search_runs([experiment.experiment_id])
    assert (run.info.run_id, run.info.run_name, run.info.status) == (logger.run_id, "mine", "FINISHED")
    assert history(client, logger.run_id, "lr") == [(1, 0.25), (2, 0.25), (3, 0.25)]
    assert run.data.metrics["val/loss"] == pytest.approx(trainer.metrics["val/loss"])
    assert run.data.params["options/max_epochs"] == "1" and run.data.tags["team"] == "x"
    assert run.data.tags["hookline.status"] == "completed"
    assert all(path.is_relative_to("mine/mlflow") for path in files(Path()))


def test_every_kind_of_record_is_taken(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, database: Path
) -> None:
    prepare(database, tmp_path)
    logger = MLflow()
    tell_everything(Queued(logger, timeout=100), tmp_path)
    assert "switched off" not in caplog.text
    client, run_id = reader(tmp_path), logger.run_id
    assert history(client, run_id, "train/loss") == [(1, 1.5), (2, 0.5)]
    assert math.isnan(history(client, run_id, "bad")[0][1])
    assert history(client, run_id, "array") == [(3, 0.25)] and history(client, run_id, "late") == [(1, 7.0)]
    run = client.get_run(run_id)
    numbers = sorted(
        value for name in run.data.metrics for step, value in history(client, run_id, name) if step == 5
    )
    assert numbers == list(range(len(ODD_TAGS)))  # each under a name of its own
    assert history(client, run_id, "acc_1")[0] == (5, float(ODD_TAGS.index("acc@1")))
    assert (run.data.params["lr"], run.data.params["net/width"]) == ("0.5", "8")
    listed = {
        kind: [each.path for each in client.list_artifacts(run_id, kind)]
        for kind in ("text", "images", "histograms")
    }
    assert len(listed["text"]) == 2 and len(listed["images"]) == 3 and len(listed["histograms"]) == 1
    for path in files(tmp_path):
        assert path.is_relative_to(tmp_path / "mlflow")
    texts = sorted((tmp_path / "mlflow/artifacts").rglob("*.txt"))
    assert [text.read_text() for text in texts] == ["hello <b>\n\\ud800", "no step"]
    (histogram,) = (tmp_path / "mlflow/artifacts").rglob("weights*.json")
    assert json.loads(histogram.read_text())["tag"] == "weights"
    assert all(
        path.read_bytes().startswith(b"\x89PNG") for path in (tmp_path / "mlflow/artifacts").rglob("*.png")
    )


def test_checkpoints_are_artifacts_that_can_be_downloaded_loaded_and_resumed(
    tmp_path: Path, database: Path
) -> None:
    prepare(database, "mine")
    logger = MLflow(artifacts=("config", "best_checkpoint", "last_checkpoint"))
    trainer = quiet(logger=logger, run_dir="mine", max_epochs=3, hooks=[keeps()], checkpoint={"last": True})
    trainer.fit(Scored(2.0, 1.0, 3.0), batches(2))
    client = reader(Path("mine"))
    assert sorted(each.path for each in client.list_artifacts(logger.run_id)) == ["checkpoints", "config"]
    assert sorted(each.path for each in client.list_artifacts(logger.run_id, "checkpoints")) == [
        "checkpoints/e0",
        "checkpoints/e0.json",
        "checkpoints/e1",
        "checkpoints/e1.json",
        "checkpoints/last",
        "checkpoints/last.json",
    ]
    tags = client.get_run(logger.run_id).data.tags
    assert (tags["checkpoint.best"], tags["checkpoint.latest"]) == ("checkpoints/e1", "checkpoints/last")
    assert tags["checkpoint.last"] == "checkpoints/last"
    best = Path(client.download_artifacts(logger.run_id, tags["checkpoint.best"], str(tmp_path)))
    assert read(best)["counters"]["step"] == 4
    load_weights(Net(), best)
    facts = json.loads(Path(client.download_artifacts(logger.run_id, "checkpoints/e1.json")).read_text())
    assert (facts["score"], facts["step"], facts["aliases"]) == (1.0, 4, ["latest", "step-4", "best"])
    config = json.loads(Path(client.download_artifacts(logger.run_id, "config/run.json")).read_text())
    assert config["id"] == facts["run"]
    # the copies in the run's directory are not taken for its checkpoints
    assert [each.path.name for each in find_checkpoints(Path("mine"))[0]] == ["last", "e1"]
    assert [each.path for each in list_runs(Path()).runs] == [Path("mine")]
    resumed = quiet(run_dir="other", max_epochs=4)
    resumed.fit(Scored(2.0, 1.0, 3.0, 4.0), batches(2), resume=best)
    assert resumed.state.step == 8


def test_the_same_directory_continues_with_the_same_run_and_another_begins_its_own(
    tmp_path: Path, database: Path
) -> None:
    prepare(database, tmp_path / "a", tmp_path / "b")
    logger, ids = MLflow(), []
    for folder, lr in (("a", 0.1), ("a", 0.2), ("b", 0.1)):
        (tmp_path / folder).mkdir(exist_ok=True)
        logger.open(lambda folder=folder: tmp_path / folder)
        logger.log_hyperparams({"lr": lr})
        logger.log_metrics({"loss": lr}, 1, 0)
        logger.close()
        ids.append(logger.run_id)
    assert ids[0] == ids[1] != ids[2]
    run = reader(tmp_path / "a").get_run(ids[0])
    assert (
        run.data.params["lr"] == "0.1" and run.data.tags["now.lr"] == "0.2"
    )  # MLflow never changes a parameter
    assert len(history(reader(tmp_path / "a"), ids[0], "loss")) == 2


def test_a_store_can_be_chosen_and_a_run_continued(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, database: Path
) -> None:
    shutil.copy(database, tmp_path / "all.db")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/all.db")
    first = MLflow(queued=False)
    quiet(logger=first, log_every_n_steps=1).fit(Net(), batches(1))
    second = MLflow(tracking_uri=f"sqlite:///{tmp_path}/all.db", run_id=first.run_id, queued=False)
    quiet(logger=second, log_every_n_steps=1).fit(Net(), batches(1))
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=f"sqlite:///{tmp_path}/all.db")
    assert len(history(client, first.run_id, "lr")) == 2
    assert len(client.search_runs([client.get_experiment_by_name("hookline").experiment_id])) == 1


def test_the_client_can_be_used_with_the_run_id(database: Path) -> None:
    prepare(database, "mine")

    class Tags(Net):
        def on_train_start(self) -> None:
            self.logger.client.set_tag(logger.run_id, "mine", "yes")

    logger = MLflow()
    quiet(logger=logger, run_dir="mine").fit(Tags(), batches(1))
    assert reader(Path("mine")).get_run(logger.run_id).data.tags["mine"] == "yes"


def test_a_store_that_cannot_be_reached_does_not_stop_the_training(caplog: pytest.LogCaptureFixture) -> None:
    logger = MLflow(tracking_uri="nosuch://server")
    trainer = quiet(logger=logger, log_every_n_steps=1)
    trainer.fit(Net(), batches(3))
    assert trainer.state.step == 3
    reported = [record.message for record in caplog.records if record.name == "hookline"]
    assert reported == ["MLflow failed in log_hyperparams and is switched off for this run"]


def test_without_the_package_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(
        OptionError, match=r'MLflow needs the package .mlflow.: pip install "hookline\[mlflow\]"'
    ):
        MLflow()
