"""Log to Weights & Biases, online or offline."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hookline.engine.checks import check_choice, refused
from hookline.loggers.artifacts import DEFAULT_ARTIFACTS, ArtifactLogger
from hookline.loggers.base import flat_pixels, histogram_row
from hookline.loggers.jsonl import jsonable
from hookline.loggers.run_artifacts import safe_name
from hookline.util.text import encodable, map_texts

STEP_METRIC = "trainer/global_step"
UNNAMED = "unnamed"  # W&B drops records without a name
WANDB_MODES = ("online", "offline", "disabled")
WANDB_RESUME = ("allow", "must", "never", "auto")


class WandB(ArtifactLogger):
    """Logs to a W&B run, which is `client`; its files are in `wandb` of the run's directory.

    If your program has called `wandb.init` itself, that run is used and left open. Charts are drawn over
    `trainer/global_step`: W&B's own step cannot go back, so it would drop late records.

    `project`, `name`, `entity`, `tags`, `notes`, `id` and `resume`: those of `wandb.init`. `settings`:
    further arguments of `wandb.init`. `mode`: 'online', 'offline' (nothing leaves the machine until `wandb
    sync`), 'disabled', or None for `WANDB_MODE`.

    `artifacts`: what becomes an artifact, of 'config', 'figures', 'best_checkpoint', 'last_checkpoint' and
    'checkpoints' (all of them). Their names are `config-ID`, `figures-ID` and `checkpoint-ID`, with the id of
    Hookline's run. Offline, their files are kept in `wandb/artifacts` for `wandb sync`.
    """

    package = "wandb"
    extra = "wandb"

    def __init__(
        self,
        project: str = "hookline",
        name: str | None = None,
        mode: str | None = None,
        id: str | None = None,
        resume: str | bool | None = None,
        tags: Sequence[str] = (),
        entity: str | None = None,
        notes: str | None = None,
        settings: Mapping[str, Any] | None = None,
        artifacts: Sequence[str] = DEFAULT_ARTIFACTS,
        queued: bool = True,
    ) -> None:
        super().__init__(artifacts, queued)
        if mode is not None:
            check_choice("mode", mode, WANDB_MODES)
        if resume is not None and not isinstance(resume, bool):
            check_choice("resume", resume, WANDB_RESUME)
        if isinstance(tags, str) or not all(isinstance(each, str) for each in tags):
            raise refused("tags", tags, "a list of words")
        self._init = {
            "project": project,
            "name": name,
            "mode": mode,
            "id": id,
            "resume": resume,
            "tags": list(tags),
            "entity": entity,
            "notes": notes,
        }
        self._settings = dict(settings or {})
        self._ours = True
        self._sending: list[Any] = []
        """Artifacts that W&B may not have sent yet."""

    def _connect(self, run_dir: Path) -> Any:
        import wandb

        self._ours = wandb.run is None
        # without a timeout, a run without a key would wait at a prompt forever
        settings = wandb.Settings(**{"login_timeout": 30.0, **self._settings})
        run = wandb.run or wandb.init(dir=str(run_dir.resolve()), settings=settings, **self._init)  # type: ignore[arg-type]
        run.define_metric(STEP_METRIC, hidden=True)
        run.define_metric("*", step_metric=STEP_METRIC, step_sync=True)
        return run

    def _disconnect(self) -> None:
        if self._ours:
            self._sending = []
            self._client.finish()
        else:
            self._wait_for_uploads()

    def _wait_for_uploads(self) -> None:
        """Wait until W&B has sent all artifacts, and release their files."""
        while self._sending:
            self._sending.pop(0).wait()
        self._release()

    def _upload(self, path: Path, name: str, kind: str, metadata: dict[str, Any], aliases: list[str]) -> bool:
        """Log an artifact. W&B reads its files later, so they are held instead of copied by W&B."""
        import wandb

        run = self.client
        if run.disabled:
            return True
        if kind == "checkpoint":
            self._wait_for_uploads()  # so that the files of at most one are held for W&B
        held = self._hold(path, self._folder() / "wandb" / "artifacts")
        artifact = wandb.Artifact(
            self._collection(name, kind, run.id),
            "model" if kind == "checkpoint" else safe_name(kind),
            metadata=map_texts(metadata, encodable),
        )
        for file in sorted(held.rglob("*")) if held.is_dir() else [held]:  # `add_dir` prints
            if file.is_file():
                inside = str(file.relative_to(held)) if held.is_dir() else file.name
                artifact.add_file(str(file), inside, skip_cache=True, policy="immutable")
        logged = run.log_artifact(artifact, aliases=[safe_name(each) for each in aliases])
        if run.offline:
            self._held = []  # `wandb sync` reads the files
            return True
        self._sending.append(logged)
        return False

    def _write(self, metrics: Mapping[str, Any], step: int) -> None:
        self.client.log(
            {**{encodable(name) or UNNAMED: value for name, value in metrics.items()}, STEP_METRIC: step}
        )

    def log_hyperparams(self, params: Mapping[str, Any]) -> None:
        self.client.config.update(map_texts(jsonable(params), encodable), allow_val_change=True)

    def log_event(self, kind: str, data: Mapping[str, Any]) -> None:
        """Log how the run ended in the summary, because W&B's own state has no word for a pruned run."""
        if kind == "end":
            self.client.summary["hookline.status"] = data["status"]

    def add_histogram(self, tag: str, values: Any, global_step: int | None = None) -> None:
        import wandb

        self._write(histogram_row(tag, values, wandb.Histogram), self._step(global_step))

    def add_text(self, tag: str, text_string: str, global_step: int | None = None) -> None:
        import wandb

        shown = f"<pre>{html.escape(encodable(str(text_string)))}</pre>"
        self._write({tag: wandb.Html(shown, inject=False)}, self._step(global_step))

    def add_image(self, tag: str, img_tensor: Any, global_step: int | None = None) -> None:
        import wandb

        self._write({tag: wandb.Image(flat_pixels(tag, img_tensor))}, self._step(global_step))
