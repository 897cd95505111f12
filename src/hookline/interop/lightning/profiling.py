"""Lightning's profilers around the calls of a run: `Trainer(profiler="simple")` or an object."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from hookline.engine.binding import Caller
from hookline.engine.events import Event
from hookline.engine.listener import Listener
from hookline.interop.lightning.package import find, refusal

PROFILERS = {
    "simple": "SimpleProfiler",
    "advanced": "AdvancedProfiler",
    "pytorch": "PyTorchProfiler",
    "xla": "XLAProfiler",
}
"""Lightning's names for its profilers."""
KINDS = {"H": "Callback", "M": "LightningModule", "D": "LightningDataModule", "S": "Strategy"}
"""The receivers of an event under the names by which Lightning's profilers report them."""
STEPS = ("training_step", "validation_step", "test_step", "predict_step")


def make_profiler(given: Any) -> Any:
    """Return the profiler that `Trainer(profiler=...)` requests; None for none."""
    if not isinstance(given, str):
        return given
    if given.lower() not in PROFILERS:
        raise refusal(
            "When passing string value for the `profiler` parameter of `Trainer`, it can only be one of "
            f"{list(PROFILERS)}, not {given!r}.",
            "profiler",
            given,
        )
    made = find("profilers", PROFILERS[given.lower()])
    if made is None:
        raise refusal(
            f"profiler={given!r} needs the package lightning; add the hook hookline.hooks.Profiler.",
            "profiler",
            given,
        )
    return made()


class ProfiledCalls:
    """A tracer of the plan that puts a profiler around each call of a listener and around each step."""

    def __init__(self, profiler: Any, strategy: str) -> None:
        self.profiler, self.strategy = profiler, strategy

    def call(self, listener: Listener, call: Caller) -> Caller:
        """Return the call of one listener inside the profiler."""
        kind, original = KINDS.get(listener.receiver, ""), getattr(listener.owner, "original", listener.owner)
        who = getattr(original, "state_key", type(original).__name__)
        return self._inside(f"[{kind}]{who}.{listener.event.name}", call)

    def slot(self, event: Event, slot: Caller) -> Caller:
        """Return the slot of an event, inside the profiler if it is a step of the strategy."""
        return self._inside(f"[Strategy]{self.strategy}.{event.name}", slot) if event.name in STEPS else slot

    def _inside(self, action: str, call: Caller) -> Caller:
        @functools.wraps(call)
        def profiled(s: Any) -> Any:
            with self.profiler.profile(action):
                return call(s)

        return profiled


@contextmanager
def profiling(profiler: Any, trainer: Any, run: Any) -> Iterator[None]:
    """Set a profiler up for a run, let it observe the calls, and write its report if the run ends well."""
    if profiler is None:
        yield
        return
    profiler._lightning_module = weakref.proxy(run.module)
    rank = trainer.local_rank if trainer.world_size > 1 else None
    fn = trainer.of_lightning("trainer.states", "TrainerFn")(run.stage)
    profiler.setup(stage=fn, local_rank=rank, log_dir=trainer.log_dir)
    tracer = ProfiledCalls(profiler, trainer.strategy.__class__.__name__)
    run.plan.attach(tracer)
    try:
        yield
    finally:
        run.plan.detach(tracer)
    profiler.describe()
