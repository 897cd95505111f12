"""Log to Comet, online or offline."""

from __future__ import annotations

import contextlib
import io
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from hookline.engine.checks import check_choice, refused
from hookline.loggers.artifacts import DEFAULT_ARTIFACTS, ArtifactLogger
from hookline.loggers.base import finite_values, flat_params
from hookline.loggers.jsonl import image_png
from hookline.loggers.run_artifacts import safe_name
from hookline.util.text import encodable

COMET_MODES = ("online", "offline")
QUIET_IMPORT = {
    "COMET_DISABLE_AUTO_LOGGING": "1",
    "COMET_ERROR_TRACKING_ENABLE": "0",
    "COMET_LOGGING_CONSOLE": "ERROR",
}
"""Settings during the import: no patches of other packages, no error reports to Comet, no messages."""
NOTHING_ELSE = {
    "log_code": False,
    "log_graph": False,
    "auto_param_logging": False,
    "auto_metric_logging": False,
    "auto_output_logging": False,
    "parse_args": False,
    "log_env_details": False,
    "log_git_metadata": False,
    "log_git_patch": False,
    "display_summary_level": 0,
}
"""Arguments of an experiment in which only Hookline logs."""


class Comet(ArtifactLogger):
    """Logs to a Comet experiment, which is `client`.

    If your program has started an experiment itself, it is used and left open. Otherwise Comet logs nothing
    by itself: it does not patch other packages, and does not collect output, code, git and system metrics,
    unless `settings` says so, such as `{"log_env_details": True}`.

    `project`, `workspace`, `name` and `tags`: those of the experiment. `settings`: further arguments of
    `comet_ml.Experiment`. `mode`: 'online', which needs an API key (`COMET_API_KEY`), or 'offline': the
    experiment is a zip file in `comet` of the run's directory, written when the run ends; `comet upload FILE`
    sends it. `key`: the key of an experiment to continue.

    `artifacts`: what becomes an asset, of 'config' (`config/run.json`), 'best_checkpoint', 'last_checkpoint'
    and 'checkpoints' (all of them). A checkpoint is a model of the experiment, under the name of its
    directory. Figures are images, which are assets too.
    """

    package = "comet_ml"
    extra = "comet"
    collects_figures = False

    def __init__(
        self,
        project: str = "hookline",
        name: str | None = None,
        mode: str = "online",
        key: str | None = None,
        workspace: str | None = None,
        tags: Sequence[str] = (),
        settings: Mapping[str, Any] | None = None,
        artifacts: Sequence[str] = DEFAULT_ARTIFACTS,
        queued: bool = True,
    ) -> None:
        super().__init__(artifacts, queued)
        check_choice("mode", mode, COMET_MODES)
        if isinstance(tags, str) or not all(isinstance(each, str) for each in tags):
            raise refused("tags", tags, "a list of words")
        self.project, self.name, self.mode, self.workspace = project, name, mode, workspace
        self.tags, self._settings = list(tags), dict(settings or {})
        self.key = key
        """The key of the experiment, after its start."""
        self._given_key = key
        self._ours = True

    def _connect(self, run_dir: Path) -> Any:
        with _without_patches():
            import comet_ml

        experiment = comet_ml.get_running_experiment()
        self._ours = experiment is None or not experiment.alive  # it also returns one that has ended
        if experiment is None or self._ours:
            experiment = self._start(comet_ml, run_dir.resolve() / "comet")
            if self.name is not None:
                experiment.set_name(encodable(self.name))
            if self.tags:
                experiment.add_tags([encodable(each) for each in self.tags])
        self.key = experiment.get_key()
        return experiment

    def _start(self, comet_ml: Any, folder: Path) -> Any:
        """Start an experiment. Online, it continues in `folder` if Comet cannot be reached."""
        given = {
            "project_name": self.project,
            "workspace": self.workspace,
            "offline_directory": str(folder),
            **({} if self._given_key is None else {"experiment_key": self._given_key}),
            **NOTHING_ELSE,
            **self._settings,
        }
        if self.mode == "online":
            kind = comet_ml.Experiment if self._given_key is None else comet_ml.ExistingExperiment
            return kind(auto_log_co2=False, **given)
        folder.mkdir(exist_ok=True)
        kind = comet_ml.OfflineExperiment if self._given_key is None else comet_ml.ExistingOfflineExperiment
        return _in_folder(kind, folder)(**given)

    def _disconnect(self) -> None:
        if self._ours:
            self._client.end()
        else:
            self._client.flush()

    def _write(self, metrics: Mapping[str, Any], step: int) -> None:
        client = self.client
        for name, value in metrics.items():
            client.log_metric(_key(name), float(value), step=step)

    def log_hyperparams(self, params: Mapping[str, Any]) -> None:
        self.client.log_parameters(flat_params(params), nested_support=False)

    def add_histogram(self, tag: str, values: Any, global_step: int | None = None) -> None:
        (shown, others), step = finite_values(tag, values), self._step(global_step)
        if shown.size:
            self.client.log_histogram_3d(shown, name=_key(tag), step=step)
        if others:
            self._write({f"{tag}/nonfinite": others}, step)

    def add_text(self, tag: str, text_string: str, global_step: int | None = None) -> None:
        self.client.log_text(
            encodable(str(text_string)), step=self._step(global_step), metadata={"tag": encodable(tag)}
        )

    def add_image(self, tag: str, img_tensor: Any, global_step: int | None = None) -> None:
        self._add_png(tag, image_png(tag, img_tensor), global_step)

    def add_drawn_figure(self, tag: str, png: bytes, global_step: int | None = None) -> None:
        self._add_png(tag, png, global_step)

    def _add_png(self, tag: str, png: bytes, global_step: int | None) -> None:
        self.client.log_image(
            io.BytesIO(png), name=_key(tag), step=self._step(global_step), image_format="png"
        )

    def _upload(self, path: Path, name: str, kind: str, metadata: dict[str, Any], aliases: list[str]) -> bool:
        """Log an asset, or a checkpoint as a model. Comet reads the files later, so they are held."""
        client = self.client
        held = self._hold(path, self._folder() / "comet" / ".artifacts")
        if kind != "checkpoint":
            files = sorted(each for each in held.rglob("*") if each.is_file()) if held.is_dir() else [held]
            for file in files:
                inside = file.relative_to(held) if held.is_dir() else file.name
                client.log_asset(str(file), f"{safe_name(name)}/{inside}", metadata=metadata)
            return False
        step = str(metadata.get("step"))
        model = safe_name(path.name if step in path.name else f"{path.name}-step-{step}")
        client.log_model(
            model, str(held), metadata={**metadata, "aliases": aliases}, prepend_folder_name=False
        )
        for alias in aliases:
            if not alias.startswith("step-"):
                client.log_other(f"checkpoint.{alias}", model)
        return False


def _key(tag: str) -> str:
    return encodable(tag).replace("\0", "\\0") or "unnamed"


@contextlib.contextmanager
def _without_patches() -> Iterator[None]:
    """Import Comet without its patches of other packages, its exception hook and its error reports."""
    if "comet_ml" in sys.modules:  # the program has imported it as it wants it
        yield
        return
    hook, missing = sys.excepthook, [name for name in QUIET_IMPORT if name not in os.environ]
    os.environ.update({name: QUIET_IMPORT[name] for name in missing})
    try:
        yield
    finally:
        sys.excepthook = hook
        for name in missing:
            os.environ.pop(name, None)


def _in_folder(kind: Any, folder: Path) -> Any:
    """Return a class of experiments whose temporary files are in the run's directory, not in /tmp."""

    class InRunDirectory(kind):  # type: ignore[misc]
        @property
        def tmpdir(self) -> str:
            return self.__dict__["tmpdir"]  # type: ignore[no-any-return]

        @tmpdir.setter
        def tmpdir(self, made: str) -> None:
            with contextlib.suppress(OSError):
                os.rmdir(made)
            self.__dict__["tmpdir"] = tempfile.mkdtemp(prefix=".unfinished-", dir=folder)

    return InRunDirectory
