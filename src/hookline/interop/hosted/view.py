"""The object that hooks see as `trainer` in a loop that is not Hookline's."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from hookline.checkpoint.files import remove
from hookline.distributed.comm import Ranks
from hookline.engine.cost import Costs
from hookline.engine.explain import Explanation, explain_plan
from hookline.interop.hosted.host import Host, HostedHooks
from hookline.run.directory import RunDirectory
from hookline.run.optimizers import Schedule
from hookline.run.options import Options
from hookline.run.save_request import SaveRequest
from hookline.run.state_parts import fact
from hookline.run.timings import Timings
from hookline.run.view import View
from hookline.util.errors import OptionError, closest


class HostView(View):
    """The part of a trainer that every host has: facts of the run, logging, requests to stop and to save, the
    hooks.
    """

    host: Host
    hooks: HostedHooks  # pyright: ignore[reportIncompatibleVariableOverride]
    options: Options
    ranks: Ranks
    outer: Any = None
    """The host's own trainer, if there is one; a hook that uses it depends on that host."""
    num_training_batches: int | None = None
    """Batches per training epoch; None if unknown."""
    plans_validations = False
    save_requests: list[SaveRequest]
    _directory: RunDirectory

    def __getattr__(self, name: str) -> Any:
        """Raise an error that lists the attributes there are."""
        if name.startswith("_"):
            raise AttributeError(name)
        known = sorted(self._offered())
        hint = closest(name, known) or f" There are: {', '.join(known)}."
        raise AttributeError(f"{self.host.name} has no attribute {name!r} (in hooks trainer.{name}).{hint}")

    @classmethod
    def _offered(cls) -> frozenset[str]:
        """Return the public attributes, of the class and of instances."""
        annotated = [name for each in cls.__mro__ for name in vars(each).get("__annotations__", {})]
        return frozenset(name for name in (*dir(cls), *annotated) if not name.startswith("_"))

    # ---- the run -------------------------------------------------------------------------------------------

    stop_reason: str = fact("state.stop_reason", "Return why a stop was requested, or an empty string.")

    @property
    def schedules(self) -> list[Schedule]:
        """Return the learning-rate schedulers; the host advances them."""
        owners = {id(each): index for index, each in enumerate(self.state.optimizers)}
        return [
            Schedule(each, owners.get(id(getattr(each, "optimizer", None)), 0), monitor="")
            for each in self.state.schedulers
        ]

    device: Any = fact("state.device", "Return the device of the module.")

    @property
    def estimated_stepping_batches(self) -> int:
        """Return the number of optimizer updates that the run will make."""
        total = self.options.max_steps
        if total < 0:
            total = getattr(self.outer, "estimated_stepping_batches", -1)  # Lightning computes it
        if not 0 <= total < math.inf:
            raise OptionError(
                f"{self.host.name} does not say how many updates the run will make: pass max_steps=."
            )
        return int(total)

    @property
    def remaining_steps(self) -> int:
        """Return the number of optimizer updates that the run will still make."""
        return self.estimated_stepping_batches - self.state.step

    def num_batches(self, kind: str = "train") -> dict[str, int | None]:
        """Return the batches per pass by the loader's name; empty if unknown.

        kind: 'train'; other kinds are unknown.
        """
        return {"train": self.num_training_batches} if kind == "train" else {}

    # ---- what is written -----------------------------------------------------------------------------------

    @property
    def run_dir(self) -> Path:
        """Return the directory in which hooks and loggers write."""
        return self._directory.path()

    def remove_checkpoint(self, path: str | Path) -> None:
        """Delete a checkpoint that was written here. path: its directory or fsspec URL."""
        remove(path)

    # ---- hooks ---------------------------------------------------------------------------------------------

    def cost(self) -> Costs:
        """Return calls and time per hook and event so far, the most expensive first; `print` it.

        A loop with `line.epoch(loader)` also shows where its time went: training, waiting for data and so on.
        """
        costs, timer = self.hooks.cost(), self.state.timer
        costs.times = f"Time: {self.timings}" if timer is not None and timer.epochs else ""
        return costs

    @property
    def timings(self) -> Timings | None:
        """Where the time of this or the last run went; None before it, and inside another trainer."""
        return self.state.timings

    def explain(self) -> Explanation:
        """Return the lifecycle with its listeners; `print` it."""
        return explain_plan(self.plan, title=self.host.name)
