"""Log to MLflow by its tracking client: to a local database in the run's directory, or to a server."""

from __future__ import annotations

import os
import re
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hookline.loggers.artifacts import DEFAULT_ARTIFACTS, ArtifactLogger
from hookline.loggers.base import file_name, finite_values, flat_params, histogram
from hookline.loggers.jsonl import image_png
from hookline.loggers.run_artifacts import safe_name
from hookline.util.text import encodable

LONGEST_NAME, LONGEST_VALUE, LARGEST_BATCH = 250, 6000, 100


class MLflow(ArtifactLogger):
    """Logs to a run of an MLflow experiment.

    `client` is an `MlflowClient`, to be used with `logger.run_id`; MLflow's own "active run" is neither used
    nor changed. MLflow allows few characters in names: the others become `_`. Text, images, figures and
    histograms are artifacts, each in its own file.

    `experiment`: its name. `run_name`: the name of the run. `tags`: tags of the run by name. `tracking_uri`:
    a server or a store; without it `MLFLOW_TRACKING_URI`, or else a database in `mlflow` of the run's
    directory (`mlflow ui --backend-store-uri sqlite:///RUN/mlflow/mlflow.db`). `run_id`: a run to continue.

    `artifacts`: what else becomes an artifact, of 'config' (`config/run.json`), 'best_checkpoint',
    'last_checkpoint' and 'checkpoints' (all of them). A checkpoint has the same path as in the run's
    directory. The tags `checkpoint.best`, `checkpoint.latest` and `checkpoint.last` name the newest ones.
    """

    package = "mlflow"
    extra = "mlflow"
    collects_figures = False

    def __init__(
        self,
        experiment: str = "hookline",
        run_name: str | None = None,
        tracking_uri: str | None = None,
        run_id: str | None = None,
        tags: Mapping[str, str] | None = None,
        artifacts: Sequence[str] = DEFAULT_ARTIFACTS,
        queued: bool = True,
    ) -> None:
        super().__init__(artifacts, queued)
        self.experiment, self.run_name, self.tracking_uri = experiment, run_name, tracking_uri
        self.tags = dict(tags or {})
        self.run_id = run_id
        """The id of the run, after its start."""
        self._given_id = run_id
        self._place: Path | None = None
        self._names: dict[str, str] = {}

    def _connect(self, run_dir: Path) -> Any:
        from mlflow import MlflowClient

        uri, artifacts = self.tracking_uri or os.environ.get("MLFLOW_TRACKING_URI"), None
        if not uri:
            here = run_dir.resolve() / "mlflow"
            here.mkdir(exist_ok=True)
            uri, artifacts = f"sqlite:///{here / 'mlflow.db'}", (here / "artifacts").as_uri()
        client = MlflowClient(tracking_uri=uri)
        if self._place not in (None, run_dir):  # another directory, another run
            self.run_id = self._given_id
        self._place = run_dir
        if self.run_id is None:
            found = client.get_experiment_by_name(self.experiment)
            experiment = (
                found.experiment_id if found else client.create_experiment(self.experiment, artifacts)
            )
            self.run_id = client.create_run(experiment, run_name=self.run_name, tags=self.tags).info.run_id
        else:
            client.update_run(self.run_id, status="RUNNING")
        return client

    def _disconnect(self) -> None:
        self._client.set_terminated(self.run_id, "FINISHED")

    def _write(self, metrics: Mapping[str, float], step: int) -> None:
        from mlflow.entities import Metric

        now = time.time_ns() // 1_000_000
        rows = [Metric(self._name(name), float(value), now, step) for name, value in metrics.items()]
        client = self.client
        for start in range(0, len(rows), LARGEST_BATCH):
            client.log_batch(self.run_id, metrics=rows[start : start + LARGEST_BATCH])

    def _name(self, tag: str) -> str:
        """Return a name that MLflow allows, unique for each tag."""
        name = self._names.get(tag)
        if name is None:
            parts = [part for part in re.sub(r"[^A-Za-z0-9_\-. :/]", "_", tag).split("/") if part.strip(". ")]
            name = "/".join(parts)[:LONGEST_NAME] or "_"
            if name in self._names.values():
                name = file_name(tag, 0, "").removesuffix("-0.")
            self._names[tag] = name
        return name

    def log_hyperparams(self, params: Mapping[str, Any]) -> None:
        """Log the parameters, and changed ones as tags, because MLflow cannot change a parameter."""
        from mlflow.entities import Param, RunTag

        client = self.client
        known = client.get_run(self.run_id).data.params
        given = {self._name(name): str(value)[:LONGEST_VALUE] for name, value in flat_params(params).items()}
        new = [Param(name, value) for name, value in given.items() if name not in known]
        changed = [
            RunTag(f"now.{name}"[:LONGEST_NAME], value)
            for name, value in given.items()
            if known.get(name, value) != value
        ]
        for start in range(0, len(new), LARGEST_BATCH):
            client.log_batch(self.run_id, params=new[start : start + LARGEST_BATCH])
        for start in range(0, len(changed), LARGEST_BATCH):
            client.log_batch(self.run_id, tags=changed[start : start + LARGEST_BATCH])

    def log_event(self, kind: str, data: Mapping[str, Any]) -> None:
        """Log how the run ended as a tag, because MLflow's own status has no word for a pruned run."""
        if kind == "end":
            self.client.set_tag(self.run_id, "hookline.status", data["status"])

    def add_histogram(self, tag: str, values: Any, global_step: int | None = None) -> None:
        shown, others = finite_values(tag, values)
        counts, edges = histogram(shown, 30)
        step = self._step(global_step)
        record = {
            "tag": encodable(tag),
            "step": step,
            "counts": counts.tolist(),
            "edges": edges.tolist(),
            "nonfinite": others,
        }
        self.client.log_dict(self.run_id, record, f"histograms/{file_name(tag, step, 'json')}")

    def add_text(self, tag: str, text_string: str, global_step: int | None = None) -> None:
        name = file_name(tag, self._step(global_step), "txt")
        self.client.log_text(self.run_id, encodable(str(text_string)), f"text/{name}")

    def add_image(self, tag: str, img_tensor: Any, global_step: int | None = None) -> None:
        data, name = image_png(tag, img_tensor), file_name(tag, self._step(global_step), "png")
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / name
            path.write_bytes(data)
            self.client.log_artifact(self.run_id, str(path), "images")

    def _upload(self, path: Path, name: str, kind: str, metadata: dict[str, Any], aliases: list[str]) -> bool:
        """Log an artifact. MLflow's artifacts have no aliases and metadata: they become tags and a file."""
        client = self.client
        where = re.sub(r"[^\w.=@+/-]+", "_", metadata.get("path", "checkpoint"), flags=re.ASCII)
        where = where if kind == "checkpoint" else safe_name(name)
        if path.is_dir():
            client.log_artifacts(self.run_id, str(path), where)
        else:
            client.log_artifact(self.run_id, str(path), where)
        if kind == "checkpoint":
            client.log_dict(self.run_id, {**metadata, "aliases": aliases}, f"{where}.json")
            for alias in aliases:
                if not alias.startswith("step-"):
                    client.set_tag(self.run_id, self._name(f"checkpoint.{alias}"), where)
        return True
