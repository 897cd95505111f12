"""The `Trainer`: its options, fit, validate, test, predict, and the hooks of a run."""

from __future__ import annotations

import contextlib
import itertools
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Never, TypeVar, Unpack

import torch
from torch import nn

from hookline.data.seeding import Creation, isolated_rng, report_unseeded, seed_temporarily
from hookline.distributed.build import make_strategy, print_errors_once, refuse_second_choice
from hookline.engine.events import EVENTS
from hookline.engine.filters import FilterSettings
from hookline.engine.foreign import DataLike, adopt_steps
from hookline.engine.hook_list import FunctionRegistration, Handle, HookList
from hookline.engine.plan import Plan
from hookline.engine.registry import hook_class
from hookline.loggers.base import Loggers
from hookline.loggers.build import make_loggers
from hookline.loggers.jsonl import JSONLines
from hookline.metrics.metric_log import Metrics
from hookline.run.directory import RunDirectory
from hookline.run.module import Module, PlainSteps, use_optimizer
from hookline.run.options import check_module, read_arguments, refuse_unknown, with_signature
from hookline.run.state import State
from hookline.training.run_view import RunView
from hookline.util.errors import CheckpointError, HooklineError, OptionError
from hookline.util.processes import refuse_unguarded_program

if TYPE_CHECKING:
    from hookline.checkpoint.weights import WeightsReport
    from hookline.data.mixing import Mixture
    from hookline.engine.explain import Explanation
    from hookline.run._arguments import TrainerArguments
    from hookline.run.run import Run
    from hookline.run.save_request import SaveRequest
    from hookline.training.rules import LoopRules

T = TypeVar("T")
log = logging.getLogger("hookline")


class Trainer(RunView):
    """Train a module, with every moment of training open to hooks.

    >>> trainer = Trainer(max_epochs=3, hooks=[EarlyStopping("val/loss")])
    >>> trainer.fit(module, train_loader, val_loader)
    """

    rules: LoopRules | None = None
    """The decisions of the loop, if a trainer of another package takes some differently."""

    @with_signature
    def __init__(self, **arguments: Unpack[TrainerArguments]) -> None:
        """Take the options that `hookline.run.options` declares; docs/options.md lists them."""
        print_errors_once()  # before a wrong option raises on all ranks
        self.options, parts = read_arguments(arguments)
        self.config = parts.config
        self.strategy = make_strategy(parts.strategy, parts.device, parts.precision)
        refuse_second_choice(self.strategy, self.options.activation_checkpointing)
        is_quiet = self.options.fast_dev_run or self.strategy.rank != 0  # only rank zero logs
        self.loggers: Loggers = make_loggers(False if is_quiet else parts.logger, JSONLines)
        self.audit = parts.auditing
        self.plan = Plan(EVENTS, accounting=self.audit.costs)
        self.hooks = HookList(self.plan, EVENTS, self.strategy.rank)
        for hook in itertools.chain(parts.hooks, parts.callbacks):
            self.hooks.add(hook)
        if self.options.enable_progress_bar:
            self._add_progress_bar(is_requested=arguments.get("enable_progress_bar", False))
        self.state = self._make_state()
        self.resolved_config: dict[str, Any] | None = None
        """The configuration, with the command line, that this trainer was made from; for the run record."""
        self._run: Run | None = None
        self._last: Run | None = None
        self._fitted: Run | None = None
        self._directory = RunDirectory(self.options)
        self.shows_model = True
        """Whether the last line of a fit shows where its model is. A program that shows it sets False."""
        self._created: Creation | None = Creation()
        """Finds modules that are created without a seed; None once one was reported."""

    def _add_progress_bar(self, is_requested: bool) -> None:
        """Add a progress bar unless a hook is one; refuse a hook and `enable_progress_bar=True` together."""
        own = hook_class("progress_bar")()
        given = [
            entry.name
            for entry in self.hooks.entries()
            if getattr(entry.hook, "only_one", "") == own.only_one
        ]
        if given and is_requested:
            raise OptionError(
                f"enable_progress_bar=True and the hook {given[0]!r} would make two progress bars: leave "
                "one of them out.",
                option="enable_progress_bar",
                value=True,
            )
        if not given:
            self.hooks.add(own)

    # ---- the stages ----------------------------------------------------------------------------------------

    def fit(
        self,
        module: nn.Module,
        train: Any = None,
        val: Any = None,
        *,
        datamodule: DataLike | None = None,
        loss: Callable[..., Any] | None = None,
        step: Callable[..., Any] | None = None,
        optimizer: Any = None,
        mixture: Mixture | Mapping[str, Any] | None = None,
        resume: str | Path | None = None,
        **unknown: Never,
    ) -> Metrics:
        """Train. A plain nn.Module also needs `optimizer`, and `loss` or `step`; a `Module` without
        `configure_optimizers` needs `optimizer`.

        module: the model. train, val: one loader, a list, or a dictionary of names. datamodule: makes the
        loaders, instead of `train` and `val`. loss: a function of outputs and targets. step: a function of
        model and batch that returns the loss. optimizer: one, several, a function of the parameters, or with
        a scheduler `{'optimizer': ..., 'lr_scheduler': ...}`. mixture: how several training loaders are
        mixed; by default each in turn, until all their batches were drawn once. resume: None begins a new
        run; a path resumes from this checkpoint, 'auto' from the newest complete one of the run, 'best' from
        the best one. Both begin a new run without a checkpoint, and raise if there are only unusable ones.
        """
        from hookline.training import lifecycle

        refuse_unknown(Trainer.fit, unknown)
        run = self._start("fit", module, datamodule, {"train": train, "val": val}, loss, step, optimizer)
        lifecycle.wait_for_ranks(run, resume=resume)
        run.data.mixture = mixture
        self._directory.renew()
        with lifecycle.locked(run):
            lifecycle.choose_start(run, resume, self._directory)
            with (
                lifecycle.determinism(self.options.deterministic),
                lifecycle.Signals(run),
                lifecycle.controlled(run),
            ):
                self._finish(run, lifecycle.fit)
        run.state.ending.raise_requested()
        return self.metrics

    def validate(
        self,
        module: nn.Module | None = None,
        loaders: Any = None,
        *,
        datamodule: DataLike | None = None,
        loss: Callable[..., Any] | None = None,
        step: Callable[..., Any] | None = None,
        checkpoint: str | Path | None = None,
        **unknown: Never,
    ) -> Metrics:
        """Validate. Called by a hook at the end of a batch, step or epoch, it validates the current run.

        module, loaders, datamodule, loss, step: as in `fit`; without a module, those of the last run.
        checkpoint: load weights and the state of hooks from this checkpoint: a path, 'best' or 'auto' (the
        newest). If this trainer has trained before, the state of its monitors is restored afterwards.
        """
        from hookline.training import lifecycle

        refuse_unknown(Trainer.validate, unknown)
        if self._run is not None:
            if module is not None or loaders is not None or datamodule is not None or checkpoint is not None:
                raise OptionError(
                    "validate() inside a run validates the module and loaders of that run; call it without "
                    "arguments."
                )
            return self._validate_in_run(self._run)
        run = self._start("validate", module, datamodule, {"val": loaders}, loss, step, None)
        self._use_weights(run, checkpoint)
        return self._finish(run, _on_loaders("val", lifecycle.evaluate, lifecycle.VALIDATION)) or Metrics()

    def test(
        self,
        module: nn.Module | None = None,
        loaders: Any = None,
        *,
        datamodule: DataLike | None = None,
        loss: Callable[..., Any] | None = None,
        step: Callable[..., Any] | None = None,
        checkpoint: str | Path | None = None,
        **unknown: Never,
    ) -> Metrics:
        """Evaluate on the test data. module, loaders, datamodule, loss, step, checkpoint: as `validate`."""
        from hookline.training import lifecycle

        refuse_unknown(Trainer.test, unknown)
        run = self._start("test", module, datamodule, {"test": loaders}, loss, step, None)
        self._use_weights(run, checkpoint)
        return self._finish(run, _on_loaders("test", lifecycle.evaluate, lifecycle.TEST)) or Metrics()

    def predict(
        self,
        module: nn.Module | None = None,
        loaders: Any = None,
        *,
        datamodule: DataLike | None = None,
        return_predictions: bool | None = None,
        checkpoint: str | Path | None = None,
        **unknown: Never,
    ) -> list[Any]:
        """Return what `predict_step` returns: a list, or one per loader.

        module, loaders, datamodule, checkpoint: as in `validate`. return_predictions: None: unless a hook
        writes them (`PredictionWriter`). False keeps none in memory.
        """
        from hookline.training.predict import predict

        refuse_unknown(Trainer.predict, unknown)
        run = self._start("predict", module, datamodule, {"predict": loaders}, None, None, None)
        self._use_weights(run, checkpoint)
        return self._finish(run, _on_loaders("predict", predict, return_predictions)) or []

    def _start(
        self,
        stage: str,
        module: nn.Module | None,
        datamodule: Any,
        loaders: dict[str, Any],
        loss: Callable[..., Any] | None,
        step: Callable[..., Any] | None,
        optimizer: Any,
        *,
        connects: bool = True,
    ) -> Run:
        """Check the arguments of a stage and make its run. connects: whether the ranks connect now."""
        from hookline.training import lifecycle

        refuse_unguarded_program(f"{stage}()")
        if self._run is not None:
            raise HooklineError(
                f"{stage}() was called inside a run ({self._run.stage}); only validate() can be."
            )
        if connects:
            self.strategy.connect()
        if module is None and self._last is not None:
            module, datamodule = self._last.module, datamodule or self._last.datamodule
        module = check_module(stage, module)
        if isinstance(module, Module):
            module._refuse_second_run(self.strategy, stage)
        datamodule = lifecycle.take_datamodule(loaders, datamodule)
        steps = self._choose_steps(module, loss, step, optimizer)
        state = self._make_state(
            module=module,
            wrapped_model=module,
            stage=stage,
            status="training" if stage == "fit" else "running",
            rank=self.strategy.rank,
            local_rank=self.strategy.local_rank,
            world_size=self.strategy.world_size,
        )
        if stage != "fit" and self._fitted is not None and self._fitted.module is module:
            # the results of a trained module are logged under the step that it was trained to
            state.counts.load_state_dict(self._fitted.state.counts.state_dict(), resumed=False)
        run = lifecycle.Run(
            self.options,
            self.plan,
            state,
            self.strategy,
            module,
            steps,
            datamodule,
            self._directory,
            lifecycle.RunData(loaders),
        )
        lifecycle.check_manual_options(run)
        rules = run.traits.rules = self.rules or lifecycle.LoopRules()
        run.watch.stops = rules.stops_at_nonfinite
        return run

    def _make_state(self, **facts: Any) -> State:
        return State(
            trainer=self,
            hooks=self.hooks,
            logger=self.loggers,
            config=self.config,
            device=self.strategy.device,
            **facts,
        )

    def _use_weights(self, run: Run, checkpoint: str | Path | None) -> None:
        """Read the checkpoint to evaluate. The state of hooks belongs to it: a hook may hold averaged
        weights, which are evaluated instead of the module's own.
        """
        from hookline.training import lifecycle

        lifecycle.wait_for_ranks(run, checkpoint=checkpoint)
        if checkpoint is None:
            return
        # after a fit, 'best' and 'auto' mean checkpoints of that fit, or of the newest one that has kept any
        kept = lifecycle.kept_best(self.hooks.entries() if self._fitted is not None else ())
        own = lifecycle.run_to_evaluate(run, checkpoint, kept) if self._fitted is not None else None
        found = lifecycle.find_checkpoint(
            checkpoint,
            self._directory,
            own,
            run.strategy.ranks,
            option="checkpoint",
            kept=kept,
            module=run.module,
        )
        if found is None:
            raise CheckpointError(
                f"checkpoint={checkpoint!r}: no checkpoint was found below {own or self._directory.searched}."
            )
        run.resume.take(found.contents, found.path)  # restored once the module has all its layers
        if self._fitted is not None:
            lifecycle.keep_monitor_state(run)
            lifecycle.keep_counts(run, self._fitted.state.counts)

    def _choose_steps(self, module: nn.Module, loss: Any, step: Any, optimizer: Any) -> Any:
        """Return the object whose steps the run calls: the module, its adapter, or one for a plain module."""
        steps = module if isinstance(module, Module) else adopt_steps(module)
        if steps is None:
            return self._plain_steps(module, loss, step, optimizer)
        if loss is not None or step is not None:
            raise OptionError(
                f"loss= and step= are for plain nn.Modules; the steps of {type(module).__name__} are its own."
            )
        if optimizer is not None:
            use_optimizer(module, optimizer)
        return steps

    def _plain_steps(self, module: nn.Module, loss: Any, step: Any, optimizer: Any) -> PlainSteps:
        if loss is None and step is None and self._last is not None and self._last.module is module:
            return self._last.steps.again(optimizer)  # type: ignore[attr-defined,no-any-return]
        return PlainSteps(module, loss, step, optimizer)

    def _finish(self, run: Run, body: Callable[[Run], T]) -> T:
        """Make `run` the current run and run its lifecycle around `body`."""
        from hookline.training import lifecycle

        restore = None
        if self.options.seed is not None:
            is_new_fit = run.stage == "fit" and run.resume.path is None and self.strategy.rank == 0
            if self._created and is_new_fit and report_unseeded(self._created, run.module, self.options.seed):
                self._created = None
            restore = seed_temporarily(self.options.seed)
        last, self._run, self._last = self._last, run, run
        self.state = run.state
        if run.stage == "fit":
            self._fitted = run
        try:
            hangs = self.options.hangs
            watchdog = lifecycle.Watchdog(run, hangs.after, abort=hangs.action == "abort")
            with lifecycle.monitoring_ranks(run), watchdog, lifecycle.Recorded(run):
                return lifecycle.run_lifecycle(run, body)
        finally:
            self._run = None
            if run.state.status == "error" and not run.state.batches_seen:  # refused: its steps never ran
                self._last = last
            if restore is not None and run.stage != "fit":  # an evaluation leaves the streams as they were
                restore()

    def _validate_in_run(self, run: Run) -> Metrics:
        from hookline.training import lifecycle

        s = run.state
        if not s.nested_validate:
            events = ", ".join(each.name for each in EVENTS if each.nested_validate)
            raise HooklineError(
                "validate() can be called from a hook at the end of a batch, step or training epoch "
                f"({events}), not here: elsewhere it would change a computation that is under way."
            )
        if lifecycle.limit_of(run, "val") == 0:
            return Metrics()
        if not lifecycle.load(run, "val"):
            _refuse_without_loader("validate")
        s.nested_validate = False
        if run.failure_monitor is not None:
            run.failure_monitor.nested.begin()
        spent = self.hooks.seconds_spent()
        try:
            with isolated_rng():
                return lifecycle.evaluate(run, lifecycle.VALIDATION)
        finally:
            self.hooks.stopwatch.counted_twice += self.hooks.seconds_spent() - spent
            s.nested_validate = True

    # ---- hooks ---------------------------------------------------------------------------------------------

    def on(
        self,
        *events: str,
        every: int | str | None = None,
        once: bool = False,
        after: int | str | None = None,
        before: int | str | None = None,
        when: Callable[..., Any] | None = None,
        name: str = "",
        **unknown: Never,
    ) -> FunctionRegistration:
        """Register a function: `@trainer.on("train_batch_end", every=100)`, or `trainer.on("step_end")(f)`.

        events: one or more, with or without `on_`. every, once, after, before, when: as the filters
        `hookline.every` and so on. name: the name of the hook; by default that of the function.
        """
        refuse_unknown(Trainer.on, unknown)
        return FunctionRegistration(
            self.hooks, list(events), FilterSettings(every, once, after, before, when), name
        )

    def add_console_logging(self, log_every_n_batches: int = 10) -> Handle:
        """Add the hook `console_log`: print the loss. log_every_n_batches: batches between two lines."""
        return self.add_hook(
            hook_class("console_log")(log_every_n_batches=log_every_n_batches), "console_log"
        )

    def add_json_logging(self, log_every_n_batches: int = 100) -> Handle:
        """Add the hook `json_log`, which writes records. log_every_n_batches: batches between two records."""
        return self.add_hook(hook_class("json_log")(log_every_n_batches=log_every_n_batches), "json_log")

    def add_checkpointing(self, save_every_n_epochs: int = 1, **options: Any) -> Handle:
        """Save every so many epochs and keep all checkpoints; the hook is called `checkpoint`.

        save_every_n_epochs: epochs between two checkpoints. options: those of ModelCheckpoint.
        """
        keep = {} if "monitor" in options else {"save_top_k": -1}
        return self.add_hook(
            hook_class("model_checkpoint")(**{"every_n_epochs": save_every_n_epochs, **keep, **options}),
            "checkpoint",
        )

    def add_dataloader(self, loader: Any, name: str, weight: float | None = None) -> int:
        """Add a loader from the mixture's next window on. loader, name, weight: as in `loaders.add`."""
        return int(self.loaders.add(name, loader, weight))

    def explain(
        self,
        module: nn.Module | None = None,
        train: Any = None,
        val: Any = None,
        *,
        datamodule: DataLike | None = None,
        loss: Callable[..., Any] | None = None,
        step: Callable[..., Any] | None = None,
        optimizer: Any = None,
        stage: str = "fit",
        mixture: Mixture | Mapping[str, Any] | None = None,
    ) -> Explanation:
        """Return the lifecycle of a run with its listeners, before it runs; `print` it, or use its `data()`.

        module, train, val, datamodule, loss, step, optimizer, mixture: as for `fit`; with loaders it also
        shows which one the batches come from and how each is read. stage: 'fit', 'validate', 'test' or
        'predict'.
        """
        from hookline.engine.explain import explain_plan
        from hookline.training import lifecycle

        if module is None or self._run is not None:
            running = self._run is not None and self._run.data.is_mixture
            graphs = "" if self._run is None else lifecycle.explain_graphs(self._run)
            read = {} if self._run is None else self._run.data.readings()
            return explain_plan(self.plan, stage, str(self.loaders) if running else "", graphs, read)
        with self.strategy.silent():  # a single rank may call explain()
            given = {"train": train, "val": val}
            run = self._start(stage, module, datamodule, given, loss, step, optimizer, connects=False)
            run.data.mixture = mixture
            participants = lifecycle.RunParticipants(run)
            try:
                participants.attach()
                for kind in given if stage == "fit" else ():
                    if run.data.given[kind] is not None:
                        lifecycle.load(run, kind)
                return explain_plan(
                    self.plan,
                    stage,
                    str(run.data.train) if run.data.is_mixture else "",
                    lifecycle.explain_graphs(run),
                    run.data.readings(),
                )
            finally:
                participants.leave()

    # ---- in a run ------------------------------------------------------------------------------------------

    def save_checkpoint(
        self,
        path: str | Path | None = None,
        reason: str = "manual",
        monitor: dict[str, Any] | None = None,
        weights: str | None = None,
    ) -> None:
        """Request a checkpoint: the run writes it at its next save point, or outside a run at once.

        path: a directory or an fsspec URL; None: `checkpoints/step-N` in the run's directory. reason:
        'manual', 'best', 'last', 'interval', 'signal' or 'exception'. monitor: the metric it is kept for, as
        {"name": ..., "mode": ..., "score": ...}. weights: 'all', or 'trainable' to leave out the frozen ones;
        None: as `checkpoint={"weights": ...}` says.
        """
        from hookline.training import lifecycle

        self._save(lifecycle.make_save_request(path, reason, monitor, weights))

    def _save(self, request: SaveRequest) -> None:
        """Take a request for a checkpoint into the run, or outside a run write it at once."""
        from hookline.training import lifecycle

        if self._run is not None:
            if self._run.stage != "fit":
                raise HooklineError(
                    f"A checkpoint can be requested in fit or between runs, not in {self._run.stage}."
                )
            lifecycle.leaves_out_base(self._run, request)  # raises here if it could not be written later
            self._run.saves.requests.append(request)
        elif (last := self._fitted or self._last) is not None:
            from hookline.training.saving import warn_of_loaded_weights

            warn_of_loaded_weights(last, self._last)
            participants = lifecycle.RunParticipants(last)
            participants.bind()
            # the hooks of the module were removed at the end of the run
            module_hooks = [each for entry in last.participants.module_hooks for each in entry.listeners]
            self.plan.add(module_hooks)
            try:
                with (
                    lifecycle.locked(last)
                    if _is_inside(request.path, self._directory)
                    else contextlib.nullcontext()
                ):
                    lifecycle.save(last, request)
            finally:
                self.plan.remove(module_hooks)
                participants.leave()
        else:
            raise HooklineError("There is nothing to save: no run has begun.")

    def load_best(self, module: nn.Module | None = None, *, path: str | Path | None = None) -> WeightsReport:
        """Load the best weights that a monitor kept into a module, in place; return their checkpoint.

        module: by default that of the newest run. path: another checkpoint, such as one monitor's
        `best_model_path`. The loaded weights are those that were scored, averaged or not.
        """
        from hookline.training import lifecycle

        if self._run is not None and self._run.state.status == "training":
            raise HooklineError(
                "load_best() replaces the weights that are being trained: call it after fit, or pass "
                "ModelCheckpoint(monitor=..., restore_best=True)."
            )
        module = self._last.module if module is None and self._last is not None else module
        module = check_module("load_best", module)
        folders = [self._directory.intended()] if self._directory.has_name else self._directory.own_runs()
        return lifecycle.load_best(module, folders, self.hooks, path)

    def remove_checkpoint(self, path: str | Path) -> None:
        """Delete a checkpoint. A kill leaves nothing that looks complete. Only rank zero deletes.

        path: a directory or an fsspec URL.
        """
        if self.strategy.rank == 0:
            from hookline.checkpoint.files import remove

            remove(path)

    @property
    def device(self) -> torch.device:
        """The device of the module."""
        return self.strategy.device

    @property
    def run_dir(self) -> Path:
        """The directory that this run writes to."""
        return self._directory.path()


def _is_inside(path: Path | str | None, directory: RunDirectory) -> bool:
    """Return whether a checkpoint is to be written into the run's directory."""
    return path is None or (
        isinstance(path, Path) and path.absolute().is_relative_to(directory.intended().absolute())
    )


def _on_loaders(kind: str, body: Callable[[Run, Any], T], argument: Any) -> Callable[[Run], T | None]:
    """Return a body that loads the data of a kind first; None if `limit_..._batches=0` switches it off."""
    from hookline.training import lifecycle

    def run_on_loaders(run: Run) -> T | None:
        limit = lifecycle.limit_of(run, kind)
        if limit == 0:
            log.warning("Nothing to %s: limit_%s_batches=%s switches it off.", run.stage, kind, limit)
            return None
        loaders = lifecycle.load(run, kind)
        if not loaders and run.traits.rules.refuses_empty_data:
            _refuse_without_loader(run.stage)
        return body(run, argument) if loaders else None

    return run_on_loaders


def _refuse_without_loader(stage: str) -> Never:
    raise OptionError(f"{stage}() needs a loader: pass one, or return it from the module or a DataModule.")
