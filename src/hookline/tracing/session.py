"""`trainer.tracing`: a trace that begins with a run, or is started and stopped in the middle of one."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from hookline.engine.plan import Plan
from hookline.util.errors import HooklineError

if TYPE_CHECKING:
    from hookline.tracing.tracer import Tracer

NAME = "trace.json"


class Tracing:
    """Switches the trace of a trainer's runs on and off.

    >>> trainer.tracing.start()      # in a hook: from the next event on, into trace.json of the run's
    directory
    >>> trainer.tracing.stop()
    """

    def __init__(self, plan: Plan, wanted: bool | str | Path = False) -> None:
        self._plan = plan
        self._wanted = wanted
        self._run: Any = None
        self._tracer: Tracer | None = None
        self._written: set[Path] = set()
        """Files since the last fit began: started again, a trace goes on in the same file."""

    def __repr__(self) -> str:
        return f"<tracing: {'on' if self.is_on else 'off'}>"

    @property
    def is_on(self) -> bool:
        """Whether a trace is being written."""
        return self._tracer is not None and not self._tracer.failed

    def start(self, path: str | Path | None = None) -> Path:
        """From the next event on. `path`: by default trace.json in the run's directory; ranks beyond zero add
        their number.
        """
        if self._run is None:
            raise HooklineError(
                "A trace is started in a run, from a hook; for a whole run there is Trainer(trace=True)."
            )
        if self.is_on:
            raise HooklineError("A trace is being written already; trainer.tracing.stop() ends it.")
        self.stop()  # one that could not be written any further
        return self._begin(path, in_the_middle=True)

    def stop(self) -> None:
        """Write what is left and take the trace out of the plan; without one it does nothing."""
        tracer, self._tracer = self._tracer, None
        if tracer is not None:
            tracer.close()

    def during(self, run: Any) -> Tracing:
        """For `with`: the length of one run."""
        self._run = run
        if run.stage == "fit":  # what follows it, a test say, goes on in its file
            self._written = set()
        return self

    def __enter__(self) -> None:
        if self._wanted:
            self._begin(None if self._wanted is True else self._wanted, in_the_middle=False)

    def __exit__(self, *error: object) -> None:
        self.stop()
        self._run = None

    def _begin(self, given: str | Path | None, in_the_middle: bool) -> Path:
        from hookline.tracing.tracer import Tracer
        from hookline.tracing.writer import TraceFile

        s = self._run.state
        path = file_of_rank(Path(given) if given is not None else self._run.run_dir() / NAME, s.rank)
        about = {
            "stage": s.stage,
            "rank": s.rank,
            "local_rank": s.local_rank,
            "world_size": s.world_size,
            "resumed": self._run.resume.path is not None,
        }
        goes_on = path in self._written or self._run.resume.path is not None
        self._tracer = Tracer(self._plan, TraceFile(path, about, goes_on), s.stage)
        self._written.add(path)
        self._plan.attach(self._tracer)
        if in_the_middle:
            self._tracer.note_plan(partial=True)
        return path


def file_of_rank(path: Path, rank: int) -> Path:
    """`trace.json` for rank zero, `trace.rank3.json` for the fourth process: side by side."""
    return path if rank == 0 else path.with_suffix(f".rank{rank}{path.suffix}")
