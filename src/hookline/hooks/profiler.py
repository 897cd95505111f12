"""Profile a few steps: write a trace and a table of the most expensive operators."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from torch.profiler import ProfilerActivity, profile, schedule

from hookline.engine.checks import Count, Several, checked_parameters
from hookline.engine.hook import Hook

log = logging.getLogger("hookline")
ACTIVITIES = {
    each.name.lower(): each for each in (ProfilerActivity.CPU, ProfilerActivity.CUDA, ProfilerActivity.XPU)
}
SortKey = Literal[
    "cpu_time_total",
    "self_cpu_time_total",
    "device_time_total",
    "self_device_time_total",
    "cpu_memory_usage",
    "count",
]


class Profiler(Hook):
    """Runs `torch.profiler` over a few optimizer steps. Each cycle writes `trace-step-N.json` (for Perfetto
    or chrome://tracing) and `operators-step-N.txt` into `profile/` of the run's directory.

    After its last cycle it costs nothing. A run that fails keeps what was recorded so far.
    """

    tier = "builtin"
    observes = True
    on_error = "disable"
    ranks = "zero"

    @checked_parameters
    def __init__(
        self,
        wait: Annotated[int, Count(0)] = 5,
        warmup: Annotated[int, Count(0)] = 2,
        active: Annotated[int, Count(1)] = 3,
        repeat: Annotated[int, Count(1)] = 1,
        activities: Annotated[Iterable[str], Several(ACTIVITIES)] | None = None,
        record_shapes: bool = False,
        profile_memory: bool = False,
        with_stack: bool = False,
        top: Annotated[int, Count(1)] = 25,
        sort_by: SortKey | None = None,
        name: str | None = None,
    ) -> None:
        """Choose the steps and the details.

        wait, warmup, active: optimizer steps of a cycle in which it is off, on without recording (so that
        the first recorded step does not include the start of the profiler), and recording.
        repeat: number of cycles.
        activities: any of 'cpu', 'cuda', 'xpu'; by default all that are available.
        record_shapes, profile_memory, with_stack: more detail, which costs time.
        top, sort_by: rows of the table and the column to sort by; by default time on the device, else on the
        CPU.
        """
        super().__init__(name)
        self.activities = None if activities is None else tuple(activities)
        self.wait, self.warmup, self.active, self.repeat, self.top, self.sort_by = (
            wait,
            warmup,
            active,
            repeat,
            top,
            sort_by,
        )
        self.record_shapes, self.profile_memory, self.with_stack = record_shapes, profile_memory, with_stack
        self.traces: list[Path] = []
        """The traces that were written."""
        self._profile: Any = None
        self._left = 0

    def on_train_start(self, trainer: Any, logger: Any, state: Any) -> None:
        autograd: Any = torch.autograd
        if autograd._profiler_enabled():
            raise RuntimeError(
                "Profiler: another profiler is running already, and torch can run only one at a time."
            )
        wanted = None if self.activities is None else [ACTIVITIES[each] for each in self.activities]
        self._left = (self.wait + self.warmup + self.active) * self.repeat
        folder = Path(trainer.run_dir) / "profile"
        self._profile = profile(
            activities=wanted,
            record_shapes=self.record_shapes,
            profile_memory=self.profile_memory,
            with_stack=self.with_stack,
            schedule=self._schedule(),
            on_trace_ready=lambda finished: self._write(finished, folder, logger, state.step),
            acc_events=True,
        )
        self._profile.start()

    def _schedule(self) -> Any:
        with warnings.catch_warnings():  # torch warns about warmup=0
            warnings.filterwarnings("ignore", "Profiler won't be using warmup", UserWarning)
            return schedule(wait=self.wait, warmup=self.warmup, active=self.active, repeat=self.repeat)

    def on_step_end(self) -> None:
        if self._profile is not None:
            self._profile.step()
            self._left -= 1
            if self._left == 0:
                self._stop()

    def teardown(self) -> None:
        self._stop()  # also after a failure: two profilers cannot run at once

    def _stop(self) -> None:
        running, self._profile = self._profile, None
        if running is not None:
            running.stop()

    def _write(self, finished: Any, folder: Path, logger: Any, step: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        trace = folder / f"trace-step-{step}.json"
        finished.export_chrome_trace(str(trace))
        averages = finished.key_averages(group_by_input_shape=self.record_shapes)
        table = averages.table(
            sort_by=self.sort_by or _default_order(averages), row_limit=self.top, max_name_column_width=60
        )
        (folder / f"operators-step-{step}.txt").write_text(table, encoding="utf-8")
        logger.add_text("profile/operators", table, step)
        self.traces.append(trace)
        log.info("profile of the steps up to %d: %s", step, trace)


def _default_order(averages: Any) -> str:
    on_device = any(getattr(each, "self_device_time_total", 0) > 0 for each in averages)
    return (
        "self_device_time_total" if on_device and torch.accelerator.is_available() else "self_cpu_time_total"
    )
