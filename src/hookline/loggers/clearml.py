"""Log to ClearML, online or offline."""

from __future__ import annotations

import contextlib
import json
import math
import os
import sys
import tempfile
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from hookline.engine.checks import check_choice, refused
from hookline.loggers.artifacts import DEFAULT_ARTIFACTS, ArtifactLogger
from hookline.loggers.base import finite_values, flat_params, histogram
from hookline.loggers.jsonl import image_png
from hookline.loggers.run_artifacts import safe_name
from hookline.util.errors import HooklineError
from hookline.util.text import encodable

CLEARML_MODES = ("online", "offline")
SECTION = "Hookline"
"""The section of the hyper-parameters."""


class ClearML(ArtifactLogger):
    """Logs to a ClearML task, which is `client`.

    If your program has called `Task.init` itself, that task is used and left open. Otherwise the task is
    created without `Task.init`, so ClearML does not patch this process: it does not replace `os.fork`, signal
    handlers and the exception hook, does not seed random generators, and does not collect output, code and
    models by itself. ClearML's offline mode is one of the whole process, also after the run. Its charts have
    no NaN and infinity: such a value of `loss` is a 1 in `loss/nonfinite`.

    `project`, `name` and `tags`: those of the task. `mode`: 'online', which needs ClearML's credentials
    (`clearml.conf` or `CLEARML_API_ACCESS_KEY`), or 'offline': the session is a zip file in `clearml/offline`
    of the run's directory, written when the run ends; `Task.import_offline_session(FILE)` sends it.
    `task_id`: the id of a task to continue, online.

    `artifacts`: what becomes an artifact, of 'config', 'figures', 'best_checkpoint', 'last_checkpoint' and
    'checkpoints' (all of them). A checkpoint is a zip file under the name of its directory, which
    `task.artifacts[NAME].get_local_copy()` unpacks. The configuration object `checkpoints` names the newest
    ones: `best`, `latest` and `last`.
    """

    package = "clearml"
    extra = "clearml"

    def __init__(
        self,
        project: str = "hookline",
        name: str | None = None,
        mode: str = "online",
        task_id: str | None = None,
        tags: Sequence[str] = (),
        artifacts: Sequence[str] = DEFAULT_ARTIFACTS,
        queued: bool = True,
    ) -> None:
        super().__init__(artifacts, queued)
        check_choice("mode", mode, CLEARML_MODES)
        if isinstance(tags, str) or not all(isinstance(each, str) for each in tags):
            raise refused("tags", tags, "a list of words")
        if task_id is not None and mode == "offline":
            raise refused(
                "task_id",
                task_id,
                "left out in offline mode",
                " Pass it when you send the session: Task.import_offline_session(FILE, previous_task_id).",
            )
        self.project, self.name, self.mode, self.tags = project, name, mode, list(tags)
        self.task_id = task_id
        """The id of the task, after its start."""
        self._given_id = task_id
        self._ours = True
        self._newest: dict[str, str] = {}
        """The newest checkpoint of each alias."""
        self._media: Path | None = None
        self._serial = 0

    def _connect(self, run_dir: Path) -> Any:
        with _without_patches():
            from clearml import Task

        task: Any = Task.current_task()
        self._ours = task is None
        if task is None:
            task = self._start(Task, run_dir)
            if self.tags:
                task.add_tags([encodable(each) for each in self.tags])
        self.task_id, self._newest, self._media = task.id, {}, None
        return task

    def _start(self, kind: Any, run_dir: Path) -> Any:
        task: Any
        name = encodable(self.name or run_dir.resolve().name)
        if self.mode == "offline":
            with _environment("CLEARML_OFFLINE_MODE", "TRAINS_OFFLINE_MODE", "CLEARML_CACHE_DIR"):
                kind.set_offline(True)
                os.environ.setdefault("CLEARML_CACHE_DIR", str(run_dir.resolve() / "clearml"))
                task = kind._create(self.project, name)  # Task.create refuses to work offline
                task.get_offline_mode_folder()  # which the task remembers
            return task
        if kind.is_offline():
            kind.set_offline(False)
        if self._given_id is not None:
            task = kind.get_task(task_id=self._given_id)
        else:
            task = kind.create(
                self.project, name, "training", add_task_init_call=False, detect_repository=False
            )
        task.mark_started(force=True)
        return task

    def _disconnect(self) -> None:
        task = self._client
        task.flush(wait_for_uploads=True)
        if self._ours:
            with _without_print():
                task.close()
            if self.mode == "online":
                task.mark_completed()

    def _write(self, metrics: Mapping[str, Any], step: int) -> None:
        report = self.client.get_logger()
        for name, value in metrics.items():
            is_finite = math.isfinite(value)
            title = _title(name if is_finite else f"{name}/nonfinite")
            report.report_scalar(*title, float(value) if is_finite else 1.0, step)

    def log_hyperparams(self, params: Mapping[str, Any]) -> None:
        self.client.update_parameters(
            {f"{SECTION}/{name}": value for name, value in flat_params(params).items()}
        )

    def add_histogram(self, tag: str, values: Any, global_step: int | None = None) -> None:
        (shown, others), step = finite_values(tag, values), self._step(global_step)
        counts, edges = histogram(shown, 64)
        if counts.size:
            labels = [f"{each:.6g}" for each in edges[: counts.size]]
            self.client.get_logger().report_histogram(*_title(tag), counts, step, xlabels=labels)
        if others:
            self._write({f"{tag}/nonfinite": others}, step)

    def add_text(self, tag: str, text_string: str, global_step: int | None = None) -> None:
        self._add_media(tag, encodable(str(text_string)).encode(), "txt", global_step)

    def add_image(self, tag: str, img_tensor: Any, global_step: int | None = None) -> None:
        self._add_media(tag, image_png(tag, img_tensor), "png", global_step)

    def _add_media(self, tag: str, data: bytes, ending: str, global_step: int | None) -> None:
        """Log a file as a debug sample. ClearML uploads it in a thread and removes it."""
        report, step = self.client.get_logger(), self._step(global_step)
        self._media = self._media or self._new_folder()
        self._serial += 1
        path = self._media / f"{self._serial}.{ending}"
        path.write_bytes(data)
        add = report.report_image if ending == "png" else report.report_media
        add(*_title(tag), step, local_path=str(path), delete_after_upload=True)

    def _new_folder(self) -> Path:
        """Return a new folder, which is removed when the run ends."""
        here = self._folder() / "clearml" / ".held"
        here.mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(dir=here))
        self._held.append(folder)
        return folder

    def _upload(self, path: Path, name: str, kind: str, metadata: dict[str, Any], aliases: list[str]) -> bool:
        """Log an artifact, and wait for its upload. ClearML has no aliases: they become metadata."""
        file, shown = path, safe_name(name)
        if kind == "checkpoint":
            step = str(metadata.get("step"))
            shown = safe_name(path.name if step in path.name else f"{path.name}-step-{step}")
            metadata = {**metadata, "aliases": aliases}
        task = self.client
        if path.is_dir():  # ClearML would make the zip file in /tmp
            file = self._new_folder() / f"{shown}.zip"
            _zip(path, file)
        texts = {key: each if isinstance(each, str) else json.dumps(each) for key, each in metadata.items()}
        if not task.upload_artifact(shown, str(file), metadata=texts, wait_on_upload=True):
            raise HooklineError(f"ClearML has refused the artifact {shown}.")
        if path.is_dir():
            file.unlink(missing_ok=True)
        if kind == "checkpoint":
            self._newest |= {alias: shown for alias in aliases if not alias.startswith("step-")}
            task.set_configuration_object("checkpoints", config_dict=self._newest)
        return True


def _title(tag: str) -> tuple[str, str]:
    """Return the title of a chart and the series in it: 'train' and 'loss' for 'train/loss'.

    They become folders of files, which '..' must not leave.
    """
    parts = [each for each in encodable(tag).replace("\0", "\\0").split("/") if each.strip()]
    first, *others = ["_" if each in (".", "..") else each for each in parts] or ["unnamed"]
    return first, "/".join(others) or first


@contextlib.contextmanager
def _without_patches() -> Iterator[None]:
    """Import ClearML and restore the functions that it replaces in other packages."""
    if "clearml" in sys.modules:  # the program has imported it as it wants it
        yield
        return
    before = [(target, dict(vars(target))) for target in _patched_by_clearml()]
    try:
        yield
    finally:
        for target, known in before:
            for name, value in dict(vars(target)).items():
                if name not in known:
                    delattr(target, name)
                elif known[name] is not value:
                    setattr(target, name, known[name])


def _patched_by_clearml() -> list[Any]:
    """Return the classes and modules in which `import clearml` replaces functions, to log arguments of the
    program.
    """
    import argparse

    import jsonargparse._typehints

    found: list[Any] = [argparse.ArgumentParser, jsonargparse.ArgumentParser, jsonargparse._typehints]
    with contextlib.suppress(ImportError):
        import click.core

        found += [click.core.Command, click.core.Context]
    with contextlib.suppress(ImportError):
        import fire.core  # type: ignore[import-not-found,import-untyped,unused-ignore]

        found.append(fire.core)
    return found


@contextlib.contextmanager
def _environment(*names: str) -> Iterator[None]:
    """Restore variables that ClearML sets or reads."""
    before = {name: os.environ.get(name) for name in names}
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@contextlib.contextmanager
def _without_print() -> Iterator[None]:
    """Keep ClearML from printing where its session is: its own module gets another `print`."""
    import clearml.task

    module: dict[str, Any] = clearml.task.__dict__
    module["print"] = lambda *given, **named: None
    try:
        yield
    finally:
        module.pop("print", None)


def _zip(folder: Path, target: Path) -> None:
    """Store the files of a folder without compression: weights do not get smaller."""
    with zipfile.ZipFile(target, "w", zipfile.ZIP_STORED) as archive:
        for file in sorted(folder.rglob("*")):
            if file.is_file():
                archive.write(file, str(file.relative_to(folder)))
