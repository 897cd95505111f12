"""What hooks see as `trainer` where the trainer is not Hookline's."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from hookline.checkpoint.files import remove
from hookline.distributed.comm import Ranks
from hookline.engine.cost import Cost
from hookline.engine.explain import Explanation, explain_plan
from hookline.engine.plan import Plan
from hookline.interop.hosted.host import Host, HostedHooks
from hookline.run.directory import RunDirectory
from hookline.run.optimizers import Schedule
from hookline.run.options import Options
from hookline.run.save_request import SaveRequest, make_save_request
from hookline.run.view import View
from hookline.util.errors import HooklineError, OptionError, closest


class HostView(View):
    """The part of a trainer that every host has: facts of the run, logging, requests to stop and to save, the
    hooks.
    """

    host: Host
    plan: Plan
    hooks: HostedHooks  # pyright: ignore[reportIncompatibleVariableOverride]
    options: Options
    ranks: Ranks
    outer: Any = None
    """The host's own trainer, if there is one: what a hook finds there is between the two of them."""
    num_training_batches: int | None = None
    """Batches per training epoch; None if nobody can tell."""
    save_requests: list[SaveRequest]
    restored: dict[str, Any]
    """What hooks that come late still need of what the run goes on from."""
    _directory: RunDirectory

    def __getattr__(self, name: str) -> Any:
        """Only reached for what is not there."""
        if name.startswith("_"):
            raise AttributeError(name)
        known = sorted(self._offered())
        raise AttributeError(
            f"{self.host.name} has no trainer.{name} for hooks.{closest(name, known)} "
            f"There are: {', '.join(known)}."
        )

    @classmethod
    def _offered(cls) -> frozenset[str]:
        """What hooks find here, set on instances or not."""
        annotated = [name for each in cls.__mro__ for name in vars(each).get("__annotations__", {})]
        return frozenset(name for name in (*dir(cls), *annotated) if not name.startswith("_"))

    # ---- the run -------------------------------------------------------------------------------------------

    @property
    def stop_reason(self) -> str:
        """Why, if a stop was asked for."""
        return self.state.stop_reason

    @property
    def schedules(self) -> list[Schedule]:
        """The learning-rate schedulers; when they advance is the host's business."""
        owners = {id(each): index for index, each in enumerate(self.state.optimizers)}
        return [
            Schedule(each, owners.get(id(getattr(each, "optimizer", None)), 0), monitor="")
            for each in self.state.schedulers
        ]

    @property
    def device(self) -> Any:
        """Where the module is."""
        return self.state.device

    @property
    def estimated_stepping_batches(self) -> int:
        """Optimizer updates that the run will make, for schedules that need to know."""
        total = self.options.max_steps
        if total < 0:
            total = getattr(self.outer, "estimated_stepping_batches", -1)  # Lightning counts them itself
        if not 0 <= total < math.inf:
            raise OptionError(
                f"{self.host.name} does not say how many updates the run will make: pass max_steps=."
            )
        return int(total)

    def num_batches(self, kind: str = "train") -> dict[str, int | None]:
        """Batches per pass by the loader's name; empty if nobody can tell."""
        return {"train": self.num_training_batches} if kind == "train" else {}

    # ---- what is written -----------------------------------------------------------------------------------

    @property
    def run_dir(self) -> Path:
        """Where hooks and loggers write."""
        return self._directory.path()

    def save_checkpoint(
        self, path: str | Path | None = None, reason: str = "manual", monitor: dict[str, Any] | None = None
    ) -> None:
        """Ask for a checkpoint of Hookline's own kind: module, optimizers, schedulers, hooks and counters.

        It is written when everyone has heard of the step, validation or epoch that is going on.
        """
        request = make_save_request(path, reason, monitor)
        if self.state.module is None:
            raise HooklineError("There is nothing to save: no run has begun.")
        self.save_requests.append(request)

    def remove_checkpoint(self, path: str | Path) -> None:
        """Delete a checkpoint that was written here."""
        remove(path)

    # ---- hooks ---------------------------------------------------------------------------------------------

    def cost(self) -> list[Cost]:
        """Calls and time per hook and event so far, the dearest first."""
        return self.hooks.cost()

    def explain(self) -> Explanation:
        """The lifecycle with its listeners; `print` it."""
        return explain_plan(self.plan, "fit", "")
