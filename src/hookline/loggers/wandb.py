"""Log to Weights & Biases, online or offline."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hookline.engine.checks import check_choice, refused
from hookline.loggers.base import ClientLogger, flat_pixels, histogram_row
from hookline.loggers.jsonl import jsonable
from hookline.util.text import encodable, map_texts

STEP_METRIC = "trainer/global_step"
UNNAMED = "unnamed"  # W&B drops records without a name
WANDB_MODES = ("online", "offline", "disabled")
WANDB_RESUME = ("allow", "must", "never", "auto")


class WandB(ClientLogger):
    """Logs to a W&B run, whose files are in `wandb` of the run's directory.

    `mode`: 'online', 'offline' (nothing leaves the machine until `wandb sync`), 'disabled', or None for
    `WANDB_MODE`. `project`, `name`, `entity`, `tags`, `notes`, `id` and `resume` are those of
    `wandb.init`; so is everything in `settings`. `client` is the W&B run. If your program has called
    `wandb.init` itself, that run is used and left open.

    Charts are drawn over `trainer/global_step`: W&B's own step cannot go back, so it would drop late records.
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
        queued: bool = True,
    ) -> None:
        super().__init__(queued)
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
            self._client.finish()

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
