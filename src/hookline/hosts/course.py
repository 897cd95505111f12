"""The course of a run that somebody else drives: one method for each thing that can happen, and the events that come of it."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed, nn

from hookline.accumulator import Accumulator
from hookline.checkpoint.saves import COUNTERS
from hookline.data.batch import batch_size
from hookline.data.batch import count_tokens as elements_of_ids
from hookline.errors import HooklineError, OptionError, Signal
from hookline.events import EVENTS
from hookline.hosts.agreeing import AT_VALIDATION, BETWEEN, HostedAgreement
from hookline.hosts.host import Host, HostedHooks
from hookline.hosts.keeping import put_back
from hookline.hosts.passes import Pass
from hookline.hosts.places import joins, listed, own_module, own_optimizers
from hookline.hosts.recording import Recording
from hookline.hosts.updates import Updates
from hookline.loggers import JSONLines, Logger, Loggers, make_loggers
from hookline.loops.evaluate import VALIDATION, Names
from hookline.loops.guests import LateGuests, note_later, see_off, tear_down
from hookline.loops.parts import Participants, Resume
from hookline.loops.reducing import Rows
from hookline.loops.rows import rescued_row
from hookline.metrics import MetricLog
from hookline.options import make_options
from hookline.plan import Plan, nobody
from hookline.ranks import Ranks
from hookline.rundir import RunDirectory
from hookline.state import State
from hookline.strategies.distributed import control_group, known_place


class Course(Recording):
    """The plan, the state and the hooks of one run; hooks see it as `trainer`."""

    def __init__(
        self, host: Host, *, hooks: Iterable[Any] = (), logger: bool | Logger | Iterable[Logger] = False,
        run_dir: str | Path | None = None, config: Any = None, accounting: bool = True, log_every_n_steps: int = 50,
        max_epochs: int = -1, max_steps: int = -1, count_tokens: Callable[[Any], int] | None = None,
        on_save_error: str = "raise", announces_steps: bool = True, host_logs: bool = False, holds_rows: bool = False,
    ) -> None:  # fmt: skip
        """announces_steps: whether optimizers are heard by themselves before they step, or the host says when.

        host_logs: whether rows go to where the host logs its own metrics itself. holds_rows: whether they wait until it does.
        """
        self.options = make_options({"log_every_n_steps": log_every_n_steps, "max_epochs": max_epochs, "max_steps": max_steps,
                                     "run_dir": run_dir, "count_tokens": count_tokens, "num_sanity_val_steps": 0,
                                     "on_save_error": on_save_error})  # fmt: skip
        self.host = host
        place = known_place()
        self.loggers = make_loggers(logger, JSONLines)
        self.plan = Plan(EVENTS, accounting=accounting)
        self.state = State(trainer=self, logger=self.loggers, config=config)
        self.state.hooks = self.hooks = HostedHooks(self.plan, host, place.rank, self._offered())
        self.take_place(place.rank, place.local_rank, place.world_size)
        self.updates = Updates(self.plan, self.state, on_step=announces_steps)
        self.holds_rows = holds_rows
        self.host_logs = host_logs
        self.ranks = Ranks()
        self.agreement: HostedAgreement | None = None
        self._rows: Rows | None = None
        self.is_running = False
        self.current_pass: Pass | None = None
        self.save_requests = []
        self._directory = RunDirectory(self.options)
        self._guests = LateGuests(self)
        self.participants = Participants()
        self.resume = Resume()
        self._count_tokens = count_tokens or elements_of_ids
        self._batch_is_open = self.epoch_is_open = False
        self.epoch_is_whole = False
        """Whether the loader has come to its end in this epoch."""
        self._next_batch = 0
        self._window: list[Any] = []
        self._window_number = 0
        self._kept: dict[str, Any] | None = None
        for hook in hooks:
            self.hooks.add(hook)

    def attach(self, module: nn.Module, optimizers: Any = (), schedulers: Any = ()) -> None:
        """Say whose training it is."""
        s = self.state
        if not isinstance(module, nn.Module):
            raise OptionError(f"hooks need the model that is trained, a torch.nn.Module, not {type(module).__name__}.")
        s.module, s.wrapped_model = own_module(module), module
        s.optimizers = own_optimizers(optimizers)
        s.schedulers = listed(schedulers)
        if self.updates.is_watching:  # in the middle of a run: others take their place
            self.updates.leave()
            self.updates.watch(s.optimizers)
        first = next(itertools.chain(module.parameters(), module.buffers()), None)
        s.device = first.device if first is not None else torch.device("cpu")

    def take_place(self, rank: int, local_rank: int, world_size: int) -> None:
        """Say which of the ranks this is. There is one record of a run, however many ranks it has."""
        s = self.state
        s.rank, s.local_rank, s.world_size = rank, local_rank, world_size
        self.hooks.move_to(rank)
        if rank != 0:
            self.loggers = s.logger = Loggers()

    # ---- from set-up to teardown ------------------------------------------------------------------------------------

    def begin(self, stage: str = "fit") -> None:
        """Open the loggers, and set up every hook."""
        s = self.state
        if self.is_running:
            raise HooklineError("These hooks are in a run already.")
        if s.module is None:
            raise OptionError("Line needs the model that is trained: Line(model, optimizer, hooks=[...]).")
        self.is_running = True
        s.stage, s.status = stage, "training" if stage == "fit" else "running"
        s.window_losses = s.norm_tensor = s.used_lr = None
        s.should_stop, s.stop_reason, s.exception = False, "", None
        self.plan.up.clear()
        if s.world_size > 1 and distributed.is_initialized():
            self.ranks = Ranks(s.rank, s.local_rank, s.world_size, control_group())
            self._rows, self.agreement = Rows(self.ranks, s.log), HostedAgreement(self, self.ranks)
            self.updates.agree = self.agreement.on_update
        self._directory.renew()
        if not self.ranks.alone:
            self._directory.continue_in(Path(self.ranks.decide(self._directory.chosen)))
        self.loggers.open(self._directory.path)
        self._guests.begin()
        self.updates.step_before = -1
        self.plan.setup(s)
        if self._kept is not None:
            kept, self._kept = self._kept, None
            put_back(self, kept)

    def start_afresh(self) -> None:
        """The run that comes is a new one: its counters begin at zero."""
        for name in COUNTERS:
            setattr(self.state, name, 0)
        self.state.resumed = False
        self.resume.take({})
        self.state.log = MetricLog()

    def start_fit(self) -> None:
        """Everything is in place: the optimizers are listened to."""
        self.updates.watch(self.state.optimizers)
        self.plan.on_fit_start(self.state)

    def start_training(self) -> None:
        """The training begins."""
        self.plan.on_train_start(self.state)
        self.settle()

    def end_training(self) -> None:
        """The training has ended as meant."""
        s = self.state
        self.end_epoch()
        s.status = "stopped" if s.should_stop else "completed"
        self.plan.on_train_end(s)
        self.write_pending()
        self.settle()
        self.updates.leave()

    def end_fit(self) -> None:
        """The last event of a run that ended as meant."""
        self.plan.on_fit_end(self.state)
        self.settle()

    def drop(self) -> None:
        """What is open will never end, and what was asked for is not done."""
        if self.current_pass is not None:
            self.current_pass.leave()
            self.current_pass = None
        self._batch_is_open = self.epoch_is_open = False
        self.updates.windows += 1
        self.save_requests.clear()

    def fail(self, error: BaseException) -> None:
        """Something has failed: everyone hears of it. What fails then is noted on the error."""
        s = self.state
        self.drop()
        s.exception = error
        s.status = "interrupted" if isinstance(error, KeyboardInterrupt) else "error"
        self.agreement, self.updates.agree = None, None  # the other ranks may not know of it
        failures = self.plan.on_exception(s) or []
        try:
            self.save_due(Ranks())
        except BaseException as failure:
            failures.append(failure)
        note_later(error, failures)

    def tear_down(self) -> list[BaseException]:
        """Whatever happened, everyone whose set-up began is torn down, once. Their failures."""
        s = self.state
        self.drop()
        self.updates.leave()
        failures = tear_down(self)
        self.hooks.stopwatch.stop()
        self.hooks.guests = None
        self.loggers.close()
        s.returned = s.exception = None
        self.is_running = False
        return failures

    # ---- epochs and batches -----------------------------------------------------------------------------------------

    def start_epoch(self, batches: int | None = None, first: int = 0) -> None:
        """An epoch begins, or goes on after a resume with its batch number `first`: then its means go on too."""
        s = self.state
        self.end_epoch()
        self.must_run()
        self.num_training_batches = batches
        s.epoch, s.batch_idx, self._next_batch = s.epochs_seen, first, first
        if not first:
            s.log.begin("train")
        self.epoch_is_open, self.epoch_is_whole = True, False
        if self.agreement is not None:
            self.agreement.note_steering()
        self.plan.on_train_epoch_start(s)
        s.log.mode = "train"

    def start_batch(self, batch: Any) -> Signal | None:
        """A batch is ready. SKIP_BATCH or END_EPOCH if a hook wants that."""
        s = self.state
        if not self.is_running:
            self.must_run()
        if self._batch_is_open:
            self.end_batch()
        if self.current_pass is not None:  # left by a `break`
            self.end_validation()
        if s.cache:
            s.cache.clear()
        if s.log.batch_values:
            s.log.batch_values.clear()
        s.batch, s.batch_idx = batch, self._next_batch
        self._next_batch += 1
        s.log.mode, s.log.weight = "train", batch_size(batch)
        s.last_loss = s.returned = None
        self.updates.step_before, self.updates.recomputing = s.step, False
        signal: Signal | None = self.plan.on_train_batch_start(s)
        if self.agreement is not None:
            signal = self.agreement.on_batch(signal)
        self._batch_is_open = signal is None
        return signal

    def before_backward(self, loss: Tensor) -> Tensor:
        """The loss is about to be differentiated. Differentiate what comes back: a hook may replace it."""
        s = self.state
        if not self.is_running:
            self.must_run()
        s.live_loss = loss
        self.plan.on_before_backward(s)
        loss, s.live_loss = s.live_loss, None
        if self.updates.recomputing:
            return loss
        noted = loss.item() if loss.is_cpu else loss.detach()
        if self.updates.windows != self._window_number:
            self._window, self._window_number = [], self.updates.windows
        self._window.append(noted)
        s.window_losses = self._window if len(self._window) > 1 else None
        s.last_loss = noted
        s.log.train_loss.add(noted, s.log.weight)
        return loss

    def forget_loss(self) -> None:
        """What was told as the loss turns out to be another number than the one that is trained on."""
        s = self.state
        s.last_loss = s.window_losses = None
        s.log.train_loss, self._window = Accumulator(), []

    def after_backward(self) -> None:
        """Gradients have been added."""
        self.plan.on_after_backward(self.state)

    def end_batch(self, outputs: Any = None) -> None:
        """The batch is done; if an update was made in it, that is complete too."""
        s, plan = self.state, self.plan
        if not self._batch_is_open:
            return
        self._batch_is_open = False
        if self.updates.announced:
            self.updates.account_for_missing()
        s.returned = s.last_loss if outputs is None else outputs
        s.batches_seen += 1
        s.samples_seen += int(s.log.weight)
        if "tokens_seen" in plan.wanted:
            s.tokens_seen += self._count_tokens(s.batch)
        plan.on_train_batch_end(s)
        is_update = s.step != self.updates.step_before
        if is_update:
            self._end_step()
        if self.agreement is not None and not joins(s.wrapped_model):
            self.agreement.meet()
        if is_update and (self.save_requests or self.agreement is not None):
            self.save_due()
        s.returned = None
        self.updates.step_before = -1
        if self.participants.leaving:
            see_off(self)

    def _end_step(self) -> None:
        s, plan, log = self.state, self.plan, self.state.log
        if s.step % self.options.log_every_n_steps == 0 and (
            self.loggers or self.holds_rows or plan.on_train_metrics is not nobody
        ):
            row, log.pending = log.pending, {}
            if not self.holds_rows:  # else the host logs the loss and the rate itself
                if (loss := s.mean_of_window()) is not None:
                    row.setdefault("train/loss", loss)
                if s.used_lr is not None:
                    row.setdefault("lr", s.used_lr)
            self.write_row(row)
        if plan.on_step_end is not nobody:
            waiting, log.pending = log.pending, {}
            plan.on_step_end(s)
            self.write_pending()  # what a hook logged here belongs to this very step
            log.pending = {**waiting, **log.pending}

    def end_epoch(self, metrics: Mapping[str, Any] | None = None) -> None:
        """The epoch is over, and what the loop has left open in it by `break`, which could not be told from an error before."""
        s = self.state
        self.end_batch()
        self.end_validation()
        if not self.epoch_is_open:
            return
        self.epoch_is_open = False
        s.log.mode = "now"
        if self.agreement is not None:
            self.agreement.settle(BETWEEN)
        results = self.finish_pass("train")
        self.take_new(metrics or {})
        if self.epoch_is_whole or not s.should_stop or self._next_batch == self.num_training_batches:
            s.epochs_seen += 1  # else it was cut short
        with rescued_row(s, results, "epoch"):
            self.plan.on_train_epoch_end(s)
        pending, s.log.pending = s.log.pending, {}
        if self.holds_rows:
            results.pop("train/loss", None)
        self.write_row({**results, **pending}, "epoch")
        self.settle()

    # ---- validation -------------------------------------------------------------------------------------------------

    def start_validation(self, names: Names = VALIDATION) -> Pass:
        """A validation begins, or a test."""
        if self.state.step != self.updates.step_before:  # else the batch goes on after it, and its update is still to come
            self.end_batch()
        self.end_validation()
        self.must_run()
        if self.agreement is not None:
            self.agreement.settle(AT_VALIDATION)
        self.current_pass = Pass(self.plan, self.state, self.finish_pass, names)
        self.current_pass.start()
        return self.current_pass

    def finish_pass(self, mode: str, more: Mapping[str, Accumulator] | None = None) -> dict[str, Any]:
        """The means of a pass over data, and over all ranks if they meet."""
        if self._rows is None:
            return self.state.log.finish(mode, more=more)
        return self._rows.finish(mode, more or {}, self.state.log.pending)

    def end_validation(self) -> None:
        """It is over, if one was going on; its results go out."""
        current, self.current_pass = self.current_pass, None
        if current is None:
            return
        results = current.end()
        if not self.state.sanity_checking:
            told = current.told if self.host_logs else {}
            self.write_row({key: value for key, value in results.raw().items() if key not in told}, "evaluation")
            self.settle(AT_VALIDATION)

    def must_run(self) -> None:
        """Refuse what has no meaning outside of a run."""
        if not self.is_running:
            raise HooklineError("The line is not in a run: put the loop into `with line:`.")
