"""Log to TensorBoard by torch's SummaryWriter."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hookline.engine.checks import Count
from hookline.loggers.base import ClientLogger, check_folder, finite_values, flat_params, pixels, remove_files
from hookline.util.text import encodable


class TensorBoard(ClientLogger):
    """Writes event files, to see with `tensorboard --logdir runs`. `client` is a
    `torch.utils.tensorboard.SummaryWriter`. The mean of an epoch of a metric that also has values of steps is
    a curve of its own, such as `train/loss_epoch`.

    folder: the directory of the event files, inside the run's. flush_secs: how often the newest records
    become visible, in seconds.
    """

    package = "tensorboard"
    extra = "tensorboard"
    tells_rows_apart = True

    def __init__(self, folder: str = "tensorboard", flush_secs: int = 30, queued: bool = True) -> None:
        super().__init__(queued)
        Count(1)("flush_secs", flush_secs)
        self.folder = check_folder("folder", folder)
        self.flush_secs = flush_secs
        # known before the first row of a step, which may come after the first epoch or after a resume
        self._of_steps = {"train/loss"}

    def _connect(self, run_dir: Path) -> Any:
        from torch.utils.tensorboard import SummaryWriter

        self._found = set((run_dir / self.folder).glob("events.*"))
        return SummaryWriter(str(run_dir / self.folder), flush_secs=self.flush_secs)

    def _disconnect(self) -> None:
        self._client.close()

    def discard(self) -> None:
        if self._client is not None and self._run_dir is not None:
            self._client.close()
            self._client, run_dir = None, self._run_dir()
            remove_files(set((run_dir / self.folder).glob("events.*")) - self._found, run_dir)

    def log_metrics(self, metrics: Mapping[str, float], step: int, epoch: int, over: str = "step") -> None:
        if over == "step":
            self._of_steps.update(metrics)
        elif over == "epoch":
            metrics = {f"{name}_epoch" if name in self._of_steps else name: metrics[name] for name in metrics}
        super().log_metrics(metrics, step, epoch)

    def _write(self, metrics: Mapping[str, float], step: int) -> None:
        for name, value in metrics.items():
            self.client.add_scalar(encodable(name), float(value), step)

    def resume(self, position: Any, step: int, epoch: int, path: Path | str) -> None:
        """Write TensorBoard's mark of a restart, which hides older records from the next step on.

        The writer's option `purge_step` writes the same mark, but only at the start, before hyper-parameters.
        """
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog  # type: ignore[import-untyped]

        self.client.file_writer.add_event(
            Event(step=step + 1, session_log=SessionLog(status=SessionLog.START))
        )

    def begin_afresh(self) -> None:
        if self.client is not None and self._found:
            self.resume(None, 0, 0, "")

    def log_hyperparams(self, params: Mapping[str, Any]) -> None:
        """Log into the same run. The writer's `add_hparams` would make another run."""
        from torch.utils.tensorboard.summary import hparams

        for summary in hparams(flat_params(params), {}):  # type: ignore[no-untyped-call]
            self.client.file_writer.add_summary(summary)

    def add_histogram(self, tag: str, values: Any, global_step: int | None = None) -> None:
        (shown, others), step = finite_values(tag, values), self._step(global_step)
        if shown.size:
            self.client.add_histogram(encodable(tag), shown, step)
        if others:
            self.client.add_scalar(encodable(f"{tag}/nonfinite"), others, step)

    def add_text(self, tag: str, text_string: str, global_step: int | None = None) -> None:
        self.client.add_text(encodable(tag), encodable(str(text_string)), self._step(global_step))

    def add_image(self, tag: str, img_tensor: Any, global_step: int | None = None) -> None:
        self.client.add_image(
            encodable(tag), pixels(tag, img_tensor), self._step(global_step), dataformats="HWC"
        )
