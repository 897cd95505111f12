"""`rewound`: run a recorded run again to a step, and pause there."""

from __future__ import annotations

import contextlib
import logging
import shlex
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from hookline.checkpoint.files import read_manifest
from hookline.control.commands import execute
from hookline.distributed.comm import Ranks
from hookline.engine.hook import Hook
from hookline.loggers.base import Logger
from hookline.loggers.jsonl import JSONLines
from hookline.rewind.comparison import (
    Comparison,
    RowCollector,
    compare,
    environment_differences,
    recorded_rows,
)
from hookline.rewind.rebuild import Rebuilt, from_config, from_program, why_left_out
from hookline.rewind.recorded import Beginning, RecordedRun
from hookline.run.run import Run
from hookline.run.save_request import SaveRequest
from hookline.training.paused import NotReached, PausingRules, paused_fit
from hookline.training.resume import Start
from hookline.training.trainer import Trainer
from hookline.util.errors import CheckpointError, HooklineError, OptionError, closest

log = logging.getLogger("hookline")
REPEATED_COMMANDS = ("lr", "enable", "disable", "every")
"""Commands of `hookline control` that are carried out again at their step."""
LATEST = 3
"""The batches within which several ranks agree on a rollback."""


class LoadCount(Hook):
    """Counts the checkpoints that the run has loaded: the one it begins with, and those it goes back to."""

    name = "rewind_load_count"
    tier = "builtin"
    loads = 0

    def on_checkpoint_load(self) -> None:
        """Count it."""
        self.loads += 1


class RunAgain:
    """A recorded run that runs again to an update."""

    def __init__(
        self,
        recorded: RecordedRun,
        to: int,
        rebuild: Callable[[list[Logger]], Rebuilt],
        *,
        since: int | None = None,
        probes: Iterable[Any] = (),
        out: str | Path | None = None,
        without: Iterable[str] = (),
        ignore: Iterable[str] = (),
    ) -> None:
        """Check what the record says and the step, make the trainer, and check the ranks.

        rebuild: returns the trainer, with these loggers in place of its own. since: begin at or before this
        step; None: as late as possible. without: names of hooks to leave
        out. ignore: patterns of metrics that are not compared.
        """
        recorded.check_trainer()
        recorded.check_step(to)
        self.recorded = recorded
        self.to = to
        self._since = to - 1 if since is None else min(since, to - 1)
        self.out = _checked_out(out, recorded.path)
        self.probes = list(probes)
        self.collector = RowCollector()
        self._without = list(without)
        self._ignore = tuple(ignore)
        rebuilt = rebuild([self.collector, JSONLines()] if self.out is not None else [self.collector])
        self.trainer = rebuilt.trainer
        self.arguments = rebuilt.arguments
        self.is_from_config = rebuilt.is_from_config
        self.left_out = rebuilt.left_out
        """Hooks that are not called again, and why."""
        self.beginning = Beginning()
        self.environment: list[str] = []
        """What differs from the recorded run and may change bits."""
        self.failure: Exception | None = None
        """The error of the last step, if the run fails there again and `keeps_failure` is True."""
        self._loads = LoadCount()
        self._rollbacks: list[dict[str, Any]] = []
        """The rollbacks of the recorded run before it reached the step for the last time."""
        self._commands: list[dict[str, Any]] = []
        self._unrecorded: set[int] = set()
        """The steps at which this run went back, and the recorded one did not."""
        self._check_ranks()

    def _check_ranks(self) -> None:
        there, here = self.recorded.world_size, self.trainer.strategy.world_size
        if there != here:
            launch = (
                f"torchrun --standalone --nproc-per-node {there} -m hookline" if there > 1 else "hookline"
            )
            again = f"{launch} rewind {shlex.quote(str(self.recorded.path))} --to {self.to} ..."
            raise OptionError(
                f"{self.recorded.path} ran on {there} {'rank' if there == 1 else 'ranks'}, and this job has "
                f"{here}: each rank would get other batches, so the steps would be others. Start as many: "
                f"{again}"
            )

    # ---- the run -------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def paused(self, keeps_failure: bool = False) -> Iterator[Trainer]:
        """Run to the step and yield the trainer, which is paused there; tear the run down at the end.

        keeps_failure: if the last step fails, as it may have in the recorded run, pause there, with `failure`
        set, instead of raising the error.
        """
        trainer, options = self.trainer, self.trainer.options
        trainer.strategy.connect()
        with contextlib.ExitStack() as stack:
            options.run_dir = self._make_folder(trainer.strategy.ranks, stack)
            options.max_time = None  # the limit was for the recorded run
            trainer.shows_model = False
            with _instead(trainer, roll_back=self._roll_back, remove_checkpoint=lambda path: None):
                fit = paused_fit(
                    trainer,
                    self.arguments,
                    self._find_start,
                    PausingRules(self._after_update, self._keeps if keeps_failure else None),
                    self._prepare,
                )
                try:
                    run = stack.enter_context(fit)
                except NotReached as ended:
                    raise HooklineError(
                        f"The run ended at step {trainer.state.step}, before step {self.to}: {ended}."
                    ) from None
                except Exception as error:
                    if not isinstance(error, OptionError):
                        error.add_note(
                            f"while {self.recorded.path} ran again from {self.described_beginning}"
                        )
                    raise
                self.environment = environment_differences(self.recorded.record, run)
                yield trainer

    def _make_folder(self, ranks: Ranks, stack: contextlib.ExitStack) -> Path:
        """Return the directory that this run writes into; a temporary one is removed at the end."""
        if self.out is not None:
            return self.out
        made: list[tempfile.TemporaryDirectory[str]] = []

        def make() -> str:
            made.append(tempfile.TemporaryDirectory(prefix="hookline-rewind-", ignore_cleanup_errors=True))
            return made[0].name

        folder = Path(ranks.decide(make))
        for each in made:
            stack.enter_context(each)
        return folder

    def _find_start(self, ranks: Ranks) -> Start | None:
        self.beginning = self.recorded.find_beginning(self._since + 1, ranks)
        for path, why in self.beginning.unusable.items() if ranks.rank == 0 else ():
            log.warning("%s cannot be used: %s", path, why)
        if self.beginning.start is None:
            self._check_seed()
        self._rollbacks, self._commands = self.recorded.changes_since(self.beginning, self.to)
        return self.beginning.start

    def _check_seed(self) -> None:
        """Refuse to begin a run from its configuration that had no seed: its first weights are not known."""
        if self.recorded.seed is None and self.is_from_config:
            steps = self.recorded.checkpoint_steps
            hint = f" Its first checkpoint is of step {steps[0]}: choose a later step." if steps else ""
            raise OptionError(
                f"There is no checkpoint of {self.recorded.path} before step {self.to}, and it had no seed: "
                f"its first weights and the order of its data cannot be made again.{hint} With "
                "Trainer(seed=...) a run can be repeated from its beginning."
            )

    def _prepare(self, run: Run) -> None:
        """Leave out hooks that act outside of the training, and add the probes."""
        hooks, unknown = run.state.hooks, list(self._without)
        for entry in hooks.entries():
            if entry.name in self._without:
                why = "it was excluded"
            elif not (why := why_left_out(entry.hook)):
                continue
            hooks.remove(entry.name)
            self.left_out[entry.name] = why
        if unknown := [each for each in unknown if each not in self.left_out]:
            known = [entry.name for entry in hooks.entries()]
            raise OptionError(
                f"without={unknown[0]!r}: the run has no hook of this name.{closest(unknown[0], known)} "
                f"Hooks: {', '.join([*known, *self.left_out]) or 'none'}."
            )
        self.trainer.add_hook(self._loads)
        for probe in self.probes:
            self.trainer.auditing.watch(self.trainer.add_hook(probe).entry)

    def _after_update(self, run: Run) -> bool:
        """Repeat what was done to the recorded run after this update; return whether it is the last one."""
        step = run.state.step
        for asked in self._commands:
            if asked.get("step") == step and asked.get("command") in REPEATED_COMMANDS:
                execute(run, asked)
        waiting = self._rollbacks[self._rollbacks_done :]
        if not waiting:
            return step >= self.to
        if step == waiting[0]["step"] and not _is_checkpoint(waiting[0]):
            # the recorded checkpoint is gone, so this run saves one for its own rollback
            list.append(run.saves.requests, SaveRequest(None, "manual"))
        if step > waiting[0]["from_step"] + LATEST:
            raise HooklineError(
                f"The recorded run went back at step {waiting[0]['from_step']} to step {waiting[0]['step']}"
                f"{_because(waiting[0])}, and this one did not. So the steps after it cannot be repeated."
            )
        return False

    @property
    def _rollbacks_done(self) -> int:
        return self._loads.loads - (self.beginning.start is not None)

    def _roll_back(
        self,
        to: str | Path | None = None,
        *,
        before: int | None = None,
        reason: str = "",
        on_missing: str = "raise",
    ) -> None:
        """Go back to the checkpoint that the recorded run went back to, or to one that this run has saved."""
        waiting = self._rollbacks[self._rollbacks_done :]
        if waiting:
            to, before = (
                (waiting[0]["checkpoint"], None) if _is_checkpoint(waiting[0]) else (None, waiting[0]["step"])
            )
        elif (step := self.trainer.state.step) in self._unrecorded:
            raise HooklineError(
                f"The run goes back at step {step} for the second time{_because({'reason': reason})}, and "
                "the recorded one did not go back there. So it would never reach the step."
            )
        else:
            self._unrecorded.add(step)
        Trainer.roll_back(self.trainer, to, before=before, reason=reason, on_missing=on_missing)

    def _keeps(self, run: Run, error: Exception) -> bool:
        """Return whether to pause at an error: in the last step, on one process."""
        if run.state.step != self.to - 1 or not run.strategy.ranks.alone:
            return False
        self.failure = error
        return True

    # ---- the result ----------------------------------------------------------------------------------------

    @property
    def described_beginning(self) -> str:
        """Where the run began again, in words."""
        start = self.beginning.start
        return "its beginning" if start is None else f"{start.path} (step {self.beginning.step})"

    def compared(self) -> Comparison:
        """Return the values so far, beside those of the log. Only rank zero has them."""
        steps = {step for step, _ in self.collector.rows}
        return compare(
            recorded_rows(each for each in self.recorded.rows() if each["step"] in steps),
            self.collector.rows,
            self._ignore,
        )

    @property
    def may_differ(self) -> list[str]:
        """Why bits may differ from those of the recorded run; empty: they must be equal."""
        changing = [each for each in self.probes if getattr(each, "observes", None) is False]
        return [
            *self.environment,
            *(
                ["the run had no seed, and begins without a checkpoint"]
                if self.recorded.seed is None and self.beginning.start is None
                else []
            ),
            *(f"the probe {type(each).__name__} may change the run" for each in changing),
        ]


def _is_checkpoint(rollback: Mapping[str, Any]) -> bool:
    """Return whether the checkpoint of a rollback is still there."""
    try:
        return bool(read_manifest(str(rollback["checkpoint"]))["step"] == rollback["step"])
    except (CheckpointError, OSError, KeyError):
        return False


def _because(rollback: Mapping[str, Any]) -> str:
    return f" ({rollback['reason']})" if rollback.get("reason") else ""


def _checked_out(out: str | Path | None, recorded: Path) -> Path | None:
    """Return the directory to write to; refuse one inside the recorded run, and one with files."""
    if out is None:
        return None
    folder = Path(out).expanduser()
    if folder.resolve().is_relative_to(recorded.resolve()):
        raise OptionError(
            f"out={str(out)!r} is inside of the recorded run, which stays as it is.", option="out"
        )
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise OptionError(f"out={str(out)!r} exists and is not an empty directory.", option="out")
    return folder.absolute()


@contextlib.contextmanager
def _instead(trainer: Trainer, **methods: Any) -> Iterator[None]:
    """Replace methods of one trainer inside the `with`."""
    vars(trainer).update(methods)
    try:
        yield
    finally:
        for name in methods:
            vars(trainer).pop(name, None)


@contextlib.contextmanager
def rewound(
    run: str | Path,
    to: int,
    *,
    since: int | None = None,
    module: Any = None,
    train: Any = None,
    val: Any = None,
    datamodule: Any = None,
    loss: Any = None,
    step: Any = None,
    optimizer: Any = None,
    mixture: Any = None,
    hooks: Iterable[Any] = (),
    probes: Iterable[Any] = (),
    out: str | Path | None = None,
    without: Iterable[str] = (),
    ignore: Iterable[str] = (),
    config: str | Path | None = None,
    allow: Iterable[str] = (),
    **options: Any,
) -> Iterator[Trainer]:
    """Run a recorded run again to an update, and yield its trainer, paused after that update.

    A run that was started from a configuration needs nothing but `run` and `to`. For a run of a program, pass
    what the program passed to `fit`, and its hooks. Options of the trainer are those of the record.

    run: the run's directory, or its name in `runs/`. to: the number of updates that are made. since:
    begin at this step or an earlier one; None: at the latest checkpoint before `to`. module, train, val,
    datamodule, loss, step, optimizer, mixture: as for `fit`. hooks: all hooks of the run; those that only
    observe are left out. probes: further hooks, which may only observe. out: a new directory for what the
    run writes; None: a temporary one. without: names of hooks to leave out. ignore: patterns of metrics that
    are not compared with the log. config, allow: as for `hookline rewind`. options: options of the trainer,
    in place of the recorded ones.

    >>> with hookline.rewound("runs/a", to=120, module=Net(), train=loader) as trainer:
    ...     print(trainer.state.batch, trainer.model, trainer.optimizers)
    """
    again = make_run_again(
        run,
        to,
        {
            "module": module,
            "train": train,
            "val": val,
            "datamodule": datamodule,
            "loss": loss,
            "step": step,
            "optimizer": optimizer,
            "mixture": mixture,
        },
        hooks,
        options,
        config=config,
        allow=allow,
        since=since,
        probes=probes,
        out=out,
        without=without,
        ignore=ignore,
    )
    with again.paused() as trainer:
        report_differences(again)
        yield trainer


def make_run_again(
    run: str | Path,
    to: int,
    arguments: Mapping[str, Any] | None = None,
    hooks: Iterable[Any] = (),
    options: Mapping[str, Any] | None = None,
    *,
    config: str | Path | None = None,
    allow: Iterable[str] = (),
    without: Iterable[str] = (),
    **settings: Any,
) -> RunAgain:
    """Return a recorded run that can run again; without a module, from its configuration.

    arguments: those of `fit`. options: of the trainer. settings: `probes`, `out` and `ignore` of `RunAgain`.
    """
    recorded = RecordedRun(run)
    given = dict(arguments or {})
    if given.get("module") is None and (config is not None or recorded.config is not None):
        unused = [name for name, value in {**given, "hooks": hooks or None}.items() if value is not None]
        if unused or options:
            raise OptionError(
                f"{recorded.path} was started from a configuration, which makes its parts: leave out "
                f"{', '.join([*unused, *(options or {})])}, or pass module= too."
            )
        return RunAgain(
            recorded,
            to,
            lambda loggers: from_config(recorded, loggers, config, allow, without),
            without=without,
            **settings,
        )
    return RunAgain(
        recorded,
        to,
        lambda loggers: from_program(recorded, loggers, given, hooks, options or {}),
        without=without,
        **settings,
    )


def report_differences(again: RunAgain) -> None:
    """Log the differences from the recorded run: as an error, unless bits may differ here."""
    found = again.compared()
    if again.trainer.strategy.rank or not found.differences:
        return
    first, more = found.differences[0], len(found.differences) - 1
    why = again.may_differ
    (log.warning if why else log.error)(
        "The run differs from its log at %s%s%s.",
        first,
        f", and in {more} further values" if more else "",
        f". Bits may differ here: {'; '.join(why)}" if why else "",
    )
