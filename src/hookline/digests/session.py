"""`trainer.digesting`: switches the recorder of digests on for the fits of a trainer."""

from __future__ import annotations

import platform
from typing import TYPE_CHECKING, Any

from hookline.run.option_tables import Digests

if TYPE_CHECKING:
    from hookline.digests.recorder import StepDigests


class Digesting:
    """Attaches the recorder to a fit, if `digest=` asks for it. Without it nothing is attached."""

    def __init__(self, settings: Digests) -> None:
        self._settings = settings
        self._run: Any = None
        self._recorder: StepDigests | None = None

    def __repr__(self) -> str:
        steps = self._settings.steps
        return f"<digests: {f'every {steps} steps' if steps else 'off'}>"

    def during(self, run: Any) -> Digesting:
        """Return itself for a `with` around one run."""
        self._run = run
        return self

    def __enter__(self) -> None:
        run = self._run
        if not self._settings.steps or run.stage != "fit" or run.options.fast_dev_run:
            return
        import torch

        from hookline.digests.file import DigestFile
        from hookline.digests.recorder import StepDigests

        about = {
            "every": self._settings.steps,
            "modules": self._settings.modules,
            "world_size": run.state.world_size,
            "data_rank": run.strategy.ranks.data_rank,
            "strategy": type(run.strategy).__name__,
            "cpu": f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}",
            "threads": torch.get_num_threads(),
        }
        self._recorder = StepDigests(run, self._settings, DigestFile(run.run_dir, run.state.rank, about))
        run.state.timer.recorders.append(self._recorder)
        run.plan.attach(self._recorder)

    def __exit__(self, *error: object) -> None:
        recorder, self._recorder = self._recorder, None
        if recorder is not None:
            recorder.end()
            recorder.file.close()
            self._run.plan.detach(recorder)
        self._run = None
