"""`trainer.tracing`: traces a whole run, or from `start()` to `stop()` in the middle of one."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from hookline.engine.plan import Plan
from hookline.util.errors import HooklineError

if TYPE_CHECKING:
    from hookline.tracing.tracer import Tracer

TRACE_NAME = "trace.json"


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
        """Files written since the last fit began; a trace that starts again is appended to its file."""

    def __repr__(self) -> str:
        return f"<tracing: {'on' if self.is_on else 'off'}>"

    @property
    def is_on(self) -> bool:
        """Whether a trace is being written."""
        return self._tracer is not None and not self._tracer.failed

    def start(self, path: str | Path | None = None) -> Path:
        """Trace from the next event on, and return the file. Ranks above zero add their number to the name.

        path: by default trace.json in the run's directory.
        """
        if self._run is None:
            raise HooklineError(
                "trainer.tracing.start() works only during a run, from a hook. To trace a whole run, use "
                "Trainer(trace=True)."
            )
        if self.is_on:
            raise HooklineError("A trace is being written already; trainer.tracing.stop() ends it.")
        self.stop()  # close a trace that failed
        return self._begin(path, in_the_middle=True)

    def stop(self) -> None:
        """Write the remaining records and remove the tracer from the plan. Does nothing if tracing is off."""
        tracer, self._tracer = self._tracer, None
        if tracer is not None:
            tracer.close()

    def during(self, run: Any) -> Tracing:
        """Return itself for a `with` around one run."""
        self._run = run
        if run.stage == "fit":  # a test after the fit is appended to the fit's file
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
        path = file_of_rank(Path(given) if given is not None else self._run.run_dir() / TRACE_NAME, s.rank)
        about = {
            "stage": s.stage,
            "rank": s.rank,
            "local_rank": s.local_rank,
            "world_size": s.world_size,
            "resumed": self._run.resume.path is not None,
        }
        append = path in self._written or self._run.resume.path is not None
        self._tracer = Tracer(self._plan, TraceFile(path, about, append), s.stage)
        self._written.add(path)
        self._plan.attach(self._tracer)
        if in_the_middle:
            self._tracer.write_plan(partial=True)
        return path


def file_of_rank(path: Path, rank: int) -> Path:
    """Return the trace file of a rank: `trace.json` for rank zero, `trace.rank3.json` for rank 3."""
    return path if rank == 0 else path.with_suffix(f".rank{rank}{path.suffix}")
