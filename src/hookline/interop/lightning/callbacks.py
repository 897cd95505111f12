"""Lightning's callbacks by name: `from hookline.interop.lightning.callbacks import EarlyStopping`.

They are those of the installed package, because its callbacks run here unchanged. Without the package they
are Hookline's hooks that do the same.
"""

from __future__ import annotations

import functools
from typing import Any, Literal

from hookline.engine.registry import hook_class
from hookline.hooks import progress_bar
from hookline.hooks.device_stats import DeviceStats
from hookline.hooks.lr_monitor import LRMonitor
from hookline.interop.lightning import modules
from hookline.interop.lightning.package import installed, missing
from hookline.util.errors import closest

SAME = {"EarlyStopping": "early_stopping", "ModelCheckpoint": "model_checkpoint", "Timer": "timer"}
"""Callbacks, and the hooks of Hookline that take the same arguments."""
MONITORS = ("EarlyStopping", "ModelCheckpoint")
"""Those with a `mode`, whose default is 'min' as in Lightning, whatever the metric is called."""
INSTEAD = {
    "BackboneFinetuning": "hookline.hooks.FreezeSchedule",
    "BaseFinetuning": "hookline.hooks.FreezeSchedule",
    "BasePredictionWriter": "hookline.hooks.PredictionWriter, or a Callback with on_predict_batch_end",
    "BatchSizeFinder": "hookline.hooks.BatchSizeFinder",
    "EMAWeightAveraging": "hookline.hooks.WeightAveraging",
    "GradientAccumulationScheduler": "hookline.hooks.AccumulationSchedule",
    "LambdaCallback": "Callback",
    "LearningRateFinder": "hookline.interop.lightning.Tuner",
    "ModelPruning": "a Callback with torch.nn.utils.prune",
    "ModelSummary": "hookline.hooks.ModelSummary",
    "OnExceptionCheckpoint": "ModelCheckpoint(save_on_exception=True)",
    "RichModelSummary": "hookline.hooks.ModelSummary",
    "SpikeDetection": "hookline.hooks.SpikeGuard",
    "StochasticWeightAveraging": "hookline.hooks.WeightAveraging",
    "ThroughputMonitor": "hookline.hooks.Throughput",
    "WeightAveraging": "hookline.hooks.WeightAveraging",
}
"""Callbacks that need the package, and what to use without it."""
SPIKE = "SpikeDetection"
"""The callback that Lightning does not list among the others."""


class OwnLearningRateMonitor(LRMonitor):
    """Logs the learning rate, with Lightning's arguments."""

    def __init__(
        self,
        logging_interval: Literal["step", "epoch"] | None = None,
        log_momentum: bool = False,
        log_weight_decay: bool = False,
    ) -> None:
        """Log every step by default, as Lightning does."""
        super().__init__(log_momentum, log_weight_decay, logging_interval or "step")


class OwnProgressBar(progress_bar.ProgressBar):
    """Hookline's progress bar, with Lightning's arguments, which are about how its own bar looks."""

    def __init__(self, refresh_rate: int = 1, *looks: Any, **named: Any) -> None:
        """Ignore the arguments."""
        super().__init__()


class OwnDeviceStatsMonitor(DeviceStats):
    """Logs what the device does, with Lightning's arguments."""

    def __init__(self, cpu_stats: bool | None = None) -> None:
        """Log a CPU's statistics if they are requested."""
        super().__init__(cpu=bool(cpu_stats))


OWN = {
    "Callback": modules.Callback,
    "DeviceStatsMonitor": OwnDeviceStatsMonitor,
    "LearningRateMonitor": OwnLearningRateMonitor,
    "ProgressBar": OwnProgressBar,
    "RichProgressBar": OwnProgressBar,
    "TQDMProgressBar": OwnProgressBar,
}
"""Callbacks, and the classes here that stand for them without the package."""


@functools.cache
def _by_lightnings_rule(name: str) -> Any:
    """Return Hookline's hook with Lightning's default for `mode`. It compares every bit of a score."""
    hook = hook_class(SAME[name])

    @functools.wraps(hook.__init__)
    def init(self: Any, *given: Any, **named: Any) -> None:
        hook.__init__(self, *given, **{"mode": "min", **named})
        self.watch.rounding = 0.0

    return type(name, (hook,), {"__init__": init, "__module__": __name__, "__doc__": hook.__doc__})


def __getattr__(name: str) -> Any:
    """Return the callback of the installed package, otherwise Hookline's that does the same."""
    if name == "__all__":  # of `from ... import *`
        return installed("callbacks", name) or [*SAME, *OWN]
    if name.startswith("_"):
        raise AttributeError(name)
    theirs = installed("callbacks.spike" if name == SPIKE else "callbacks", name)
    if theirs is not None:
        return theirs
    if name in SAME:
        return _by_lightnings_rule(name) if name in MONITORS else hook_class(SAME[name])
    if name in OWN:
        return OWN[name]
    if name in INSTEAD:
        raise missing(name, INSTEAD[name])
    known = [*SAME, *OWN, *INSTEAD]
    raise AttributeError(
        f"There is no callback {name!r}.{closest(name, known)} There are: {', '.join(known)}."
    )


def __dir__() -> list[str]:
    """Return the names of all callbacks: Python compares a name that it cannot import with them."""
    return sorted({*globals(), *SAME, *OWN, *INSTEAD})
