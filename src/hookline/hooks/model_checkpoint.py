"""Keep the best checkpoints by a metric, the newest ones, or both."""

from __future__ import annotations

import datetime
import functools
import itertools
import logging
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from hookline.engine.checks import Count, Duration, OnDisk, checked_parameters, longest_name
from hookline.engine.filters import FilterSettings
from hookline.engine.hook import Hook
from hookline.hooks._monitor import NO_METRIC, WHO, FileName, Mode, Monitored, no_validation_in, raw_values
from hookline.util.errors import HookError, OptionError
from hookline.util.urls import MANIFEST, check_url, is_url, shown, split_query, url_below

log = logging.getLogger("hookline")


@dataclass(slots=True)
class MetricState:
    """The state of the monitored metric in a run."""

    seen: Any = None
    """The value at the last check. Another object is a new value."""
    validated_at: tuple[int, Any] = (-1, None)
    """The step of the newest validation, and the value that it found."""
    is_waiting: bool = False
    """Whether a decision waits for the next value."""
    has_validated: bool = False
    has_measured: bool = False
    """Whether a validation that is not the sanity check has ended."""
    looked_at: tuple[int, int] = (-1, -1)
    """Step and completed epochs at the last check."""
    saved_at: list[int] | None = None
    """Epoch, batches and step at the last request without a monitor; None: not known."""


@dataclass(slots=True)
class LoadedState:
    """What remains to be done after a state was loaded."""

    unwritten: dict[str, float] = field(default_factory=dict)
    """Requested at the state that the run resumes from, and perhaps not written."""
    abandoned: list[str] = field(default_factory=list)
    """Kept before a rollback and not at the state that the run went back to."""
    is_training: bool = False
    """Whether a state that is loaded now is that of a rollback."""
    earlier: frozenset[str] = frozenset()
    """Checkpoints of an earlier run in the folder of a new one, which replaces those of the same name."""


class ModelCheckpoint(Hook):
    """Requests checkpoints and removes old ones.

    With `monitor` it saves what is among the `save_top_k` best so far, of equal scores the first. Without
    `monitor` it keeps the newest ones. The newest is never removed, an older one when the new one is durable.
    """

    tier = "monitor"
    may_listen = ("on_step_end", "on_exception")
    rewinds = False

    @checked_parameters
    def __init__(
        self,
        monitor: str | None = None,
        mode: Mode = "auto",
        save_top_k: Annotated[int, Count(-1)] = 1,
        save_last: bool = False,
        filename: str | None = None,
        auto_insert_metric_name: bool = True,
        every_n_train_steps: Annotated[int, Count(0)] | None = None,
        every_n_epochs: Annotated[int, Count(0)] | None = None,
        train_time_interval: Annotated[str | float | datetime.timedelta, Duration()] | None = None,
        save_on_train_epoch_end: bool | None = None,
        save_on_exception: bool = False,
        dirpath: Annotated[str | Path, OnDisk()] | None = None,
        strict: bool = True,
        restore_best: bool = False,
        weights: Literal["all", "trainable"] | None = None,
        name: str | None = None,
    ) -> None:
        """Choose what to keep, when to check, and the names.

        monitor: the metric; None: keep the newest. mode: 'min' or 'max', which is better; 'auto': 'max' if
        the name of the metric says that higher is better (accuracy, f1, auc, ...), else 'min'.
        save_top_k: how many to keep; -1: all, 0: none. save_last: also keep the state of the newest check,
        and of the run's end, as 'last'.
        filename: a template with {epoch}, {step} and metrics, such as 'epoch_{epoch}_loss_{val/loss:.2f}'.
        auto_insert_metric_name: put 'name=' before each value in it.
        every_n_train_steps, every_n_epochs, train_time_interval ('10 minutes'): when to check; one of them,
        else every epoch. save_on_train_epoch_end: True: check at epoch ends; False: after validations; None:
        after validations if there are any, but at epoch ends for a metric of training ('train/loss').
        save_on_exception: also save when the run fails. dirpath: a folder inside the run's directory, by
        default 'checkpoints', or an fsspec URL such as 's3://bucket/folder'. strict: a missing metric is an
        error, else a warning. restore_best: at the end of the fit, load the best weights into the module;
        `checkpoints/last` stays the last state. weights: 'trainable' leaves out frozen weights, which the
        model has when it is built again; 'all'; None: as `Trainer(checkpoint={"weights": ...})` says.
        """
        super().__init__(name)
        self.watch = Monitored(WHO, NO_METRIC if monitor is None else monitor, mode, strict=strict)
        self.monitor, self.mode = monitor, self.watch.mode
        if restore_best:
            _check_keeps_best(monitor, save_top_k)
        self.save_top_k, self.save_last, self.save_on_exception = save_top_k, save_last, save_on_exception
        self.save_on_train_epoch_end, self.restore_best = save_on_train_epoch_end, restore_best
        self.weights, self.needs_base = weights, weights == "trainable"
        self.filename = FileName("{epoch}-{step}" if filename is None else filename, auto_insert_metric_name)
        self.url = check_url(str(dirpath).rstrip("/"), f"{WHO}: dirpath") if is_url(dirpath) else ""
        self.dirpath = Path("checkpoints" if dirpath is None or self.url else dirpath)
        if ".." in self.dirpath.parts:
            raise OptionError(
                f"{WHO}: dirpath={str(self.dirpath)!r} must stay inside the run's directory: '..' is "
                "refused.",
                option="dirpath",
                value=str(self.dirpath),
            )
        self.every_n_epochs = self._triggers(every_n_train_steps, every_n_epochs, train_time_interval)
        self.needs_metrics = tuple(filter(None, [monitor, *self.filename.metrics])) if strict else ()
        checks_validations = save_on_train_epoch_end is False and self.every_n_epochs > 0
        self.needs_validation = strict and checks_validations and not save_last
        self._loaded = LoadedState()
        self._begin()

    def _triggers(self, steps: int | None, epochs: int | None, seconds: Any) -> int:
        """Listen only to the events that the interval needs, so that other steps cost nothing."""
        given = [
            key
            for key, value in (
                ("every_n_train_steps", steps),
                ("every_n_epochs", epochs),
                ("train_time_interval", seconds),
            )
            if value
        ]
        if len(given) > 1:
            raise OptionError(
                f"{WHO}: {' and '.join(given)} cannot be combined; add a second ModelCheckpoint for the "
                f"other."
            )
        if steps or seconds is not None:
            every = (
                f"{steps} steps" if seconds is None else f"{f'{seconds:.6f}'.rstrip('0').rstrip('.')} seconds"
            )
            interval = f"every_n_train_steps={steps}" if steps else f"train_time_interval={seconds!r}"
            after_steps = functools.partial(self._after_steps, interval=interval)
            self._listen("on_step_end", FilterSettings(every=every)(after_steps))
        if self.save_on_exception:
            self._listen("on_exception", self._after_failure)
        return epochs if epochs is not None else 0 if given else 1

    def _listen(self, event: str, function: Any) -> None:
        """Set a listener on the instance. Refuse a subclass's own method, which would never be called."""
        if getattr(type(self), event) is not getattr(Hook, event):
            raise OptionError(
                f"{type(self).__name__}.{event} would never be called: {WHO} listens to {event} itself with "
                "these arguments. Write it into a hook of its own."
            )
        self.__dict__[event] = function

    def _begin(self) -> None:
        self.best_model_path, self.last_model_path = "", ""
        self.best_model_score: float | None = None
        self.current_score: float | None = None
        self.best_k_models: dict[str, float] = {}
        """Kept checkpoints, the oldest first: path and score, or path and step without a monitor."""
        self._requested: dict[str, float] = {}
        """Requested checkpoints that are not written yet."""
        self._requested_last = ""
        """The same for 'last'. Empty once its contents are collected, because a newer state needs a new
        request.
        """
        self._metric = MetricState()
        self._loaded = LoadedState(is_training=self._loaded.is_training, earlier=self._loaded.earlier)

    def setup(self, stage: str, hooks: Any, state: Any) -> None:
        self.watch.begin(stage, state.rank)
        if stage != "fit":
            return
        self._begin()
        if self.restore_best and not hasattr(state.trainer, "load_best"):
            raise OptionError(
                f"{WHO}: restore_best=True works in a fit of hookline.Trainer; in another trainer or loop "
                "call hookline.load_weights(module, checkpoint.best_model_path) after it."
            )
        if self.needs_base and not hasattr(state.trainer, "load_best"):
            raise OptionError(
                f"{WHO}: weights='trainable' works in a fit of hookline.Trainer; in another trainer or loop "
                "leave it out, which saves all weights.",
                option="weights",
                value=self.weights,
            )
        options = state.trainer.options
        if not self.url:
            self.filename.check_length(longest_name(Path(options.run_dir or options.default_root_dir)))
        if self.dirpath.is_absolute():
            self._folder(state)  # refuses a folder outside of the run's directory before training
        for other in hooks:
            if (
                isinstance(other, ModelCheckpoint)
                and other is not self
                and (other.url, other.dirpath) == (self.url, self.dirpath)
                and (
                    other.filename.template == self.filename.template or (self.save_last and other.save_last)
                )
            ):
                raise HookError(
                    "Two ModelCheckpoints would write under the same names and remove each other's "
                    "checkpoints: give one another dirpath, such as dirpath='by_time'."
                )

    # ---- when to check -------------------------------------------------------------------------------------

    def on_validation_end(self, state: Any, metrics: Any) -> None:
        if state.stage != "fit":
            return
        self._metric.has_validated = True
        if state.sanity_checking:
            if self.monitor is not None:
                self.watch.look_ahead(metrics)
            self.filename.look_ahead(metrics)
            return
        self._metric.has_measured = True
        if self.monitor is not None:
            self._metric.validated_at = (
                state.step,
                metrics.get(self.monitor),
            )  # read now, so that it stays this very object
        if self._is_of_training(state):
            return
        if self._metric.is_waiting or (not self.save_on_train_epoch_end and self._epoch_is_due(state)):
            self._check(state, metrics)

    def on_train_epoch_end(self, state: Any, metrics: Any) -> None:
        alone = self._is_of_training(state) or no_validation_in(state, self._metric.has_validated)
        if self._metric.is_waiting:
            due = alone or self._is_fresh(metrics)
        elif (
            self.save_on_train_epoch_end is None
            and not self._metric.has_validated
            and state.epochs_seen == state.epoch
        ):
            due = self._is_fresh(metrics)  # the epoch is cut short: there will be no validation to wait for
        else:
            due = bool(self.save_on_train_epoch_end) or (alone and self.save_on_train_epoch_end is None)
        if due and (self._metric.is_waiting or self._epoch_is_due(state)):
            if self._metric.has_validated or not self.watch.may_follow(state, metrics):
                certain = self._metric.has_measured or state.trainer.plans_validations
                self._check(state, metrics, certain)
            elif self.save_last:  # the first validation decides about the best
                self._request_last(state)

    def teardown(self) -> None:
        self._loaded.is_training = False

    def on_train_end(self, state: Any) -> None:
        if self.current_score is None and self.watch.may_follow(state, state.metrics):
            self.watch.warn_of_no_check()
        if self.save_last and self._metric.looked_at != (state.step, state.epochs_seen):
            self._request_last(state)

    def on_fit_end(self, state: Any) -> None:
        """Load the best weights after the last state is saved, also when a finished run is started again."""
        if not self.restore_best or state.status in (
            "preempted",
            "interrupted",
        ):  # it resumes in another process
            return
        if self.best_model_path:
            state.trainer.load_best(state.module, path=self.best_model_path)
        else:
            log.warning(
                "%s: restore_best=True, but no checkpoint was kept for a score of %s (mode=%r): the module "
                "has its last weights.",
                WHO,
                self.monitor,
                self.mode,
            )

    def _after_steps(self, state: Any, interval: str) -> None:
        step, value = self._metric.validated_at
        old = (
            self.monitor is not None
            and step != state.step
            and raw_values(state.metrics).get(self.monitor) is value
        )
        if self._is_fresh(state.metrics) and not old:
            has_none = state.trainer.plans_validations and not state.trainer.num_batches("val")
            self._check(state, state.metrics, certain=self._metric.has_measured or has_none)
        else:
            if self.save_last:
                self._request_last(state)
            elif self._metric.is_waiting:  # for a whole interval: a validation at this step comes after this
                self.watch.warn_of_waiting(interval, state.log.is_of_training(self.monitor))
            self._metric.is_waiting = True  # the score is of older weights: decide at the next score

    def _after_failure(self, state: Any) -> None:
        self._requested.clear()
        self._requested_last = ""
        if state.stage == "fit" and state.step:
            path = self._path_of(state, f"exception-step={state.step}")
            state.trainer.save_checkpoint(path, "exception", weights=self.weights)

    def _is_of_training(self, state: Any) -> bool:
        return (
            self.monitor is not None
            and self.save_on_train_epoch_end is not False
            and state.log.is_of_training(self.monitor)
        )

    def _is_fresh(self, metrics: Any) -> bool:
        """Return whether the metric was logged since the last check. An old value is of older weights."""
        return self.monitor is None or (
            self.monitor in metrics and raw_values(metrics)[self.monitor] is not self._metric.seen
        )

    def _epoch_is_due(self, state: Any) -> bool:
        return self.every_n_epochs > 0 and (state.epoch + 1) % self.every_n_epochs == 0

    # ---- requests ------------------------------------------------------------------------------------------

    def _check(self, state: Any, metrics: Any, certain: bool = True) -> None:
        self._metric.is_waiting = False
        self._metric.looked_at = (state.step, state.epochs_seen)
        if self.monitor is None:
            at = [state.epoch, state.batches_seen, state.step]  # a loop without an optimizer stays at step 0
            is_kept = float(state.step) in self._with_requested().values()
            if self.save_top_k and not (is_kept and self._metric.saved_at in (None, at)):
                self._metric.saved_at = at
                self._request(state, metrics, float(state.step), "interval", certain)
        elif self._is_fresh(metrics) or self.monitor not in metrics:
            score = self.current_score = self.watch.find(metrics)
            self._metric.seen = raw_values(metrics).get(self.monitor)
            if score is not None:
                self.watch.warn_of_nonfinite(score)
                if self._is_wanted(score):
                    self._request(state, metrics, score, "best", certain)
                elif not self.best_model_path:
                    # it was forgotten, and the new score is not better than those of the kept ones
                    self._record_best(self.best_k_models)
        if self.save_last:
            self._request_last(state)

    def _is_wanted(self, score: float) -> bool:
        """Return whether a score is among the best k so far. NaN never is."""
        known = self._with_requested()
        if not math.isfinite(score) or self.save_top_k == 0:
            return False
        if self.save_top_k == -1 or len(known) < self.save_top_k:
            return True
        return self.watch.is_better(score, known[self._ranked(known)[-1]])

    def _request(self, state: Any, metrics: Any, score: float, reason: str, certain: bool) -> None:
        known = self._with_requested()
        stem = self.filename.fill(
            state.epoch, state.step, metrics, lambda name: not certain or state.log.is_of_training(name)
        )
        path = self._path_of(state, stem)
        if self.save_top_k != 1 or str(path) not in known:  # with one to keep, a fixed name is written over
            versions = itertools.count(1)
            while str(path) in known or (
                isinstance(path, Path) and path.exists() and str(path) not in self._loaded.earlier
            ):
                path = self._path_of(state, f"{stem}-v{next(versions)}")
        self._save(state, path, score, reason)

    def _save(self, state: Any, path: Path | str, score: float, reason: str) -> None:
        self._requested[str(path)] = score
        self._loaded.earlier -= {str(path)}
        monitor = None if self.monitor is None else {"name": self.monitor, "mode": self.mode, "score": score}
        state.trainer.save_checkpoint(path, reason, monitor, weights=self.weights)

    def _request_last(self, state: Any) -> None:
        self._metric.looked_at = (state.step, state.epochs_seen)
        if self._requested_last:
            return  # not written yet, so it will have this state
        self._requested_last = str(self._path_of(state, "last"))
        state.trainer.save_checkpoint(self._requested_last, "last", weights=self.weights)

    def _path_of(self, state: Any, name: str) -> Path | str:
        return url_below(self.url, name) if self.url else self._folder(state) / name

    def _folder(self, state: Any) -> Path:
        run_dir = Path(state.trainer.run_dir)
        folder = run_dir / self.dirpath  # an absolute path replaces run_dir
        if not folder.resolve().is_relative_to(run_dir.resolve()):
            raise OptionError(
                f"{WHO}: dirpath={str(self.dirpath)!r} is outside the run's directory {run_dir}; "
                "pass a path relative to it, and choose the directory itself by Trainer(run_dir=...).",
                option="dirpath",
                value=str(self.dirpath),
            )
        return folder

    # ---- results -------------------------------------------------------------------------------------------

    def on_save_checkpoint(self, path: Any) -> None:
        if str(path) == self._requested_last:
            self.last_model_path, self._requested_last = self._requested_last, ""

    def on_checkpoint_failed(self, path: Any) -> None:
        if self._requested.pop(str(path), None) is not None:
            self._metric.saved_at = []
        if str(path) == self.last_model_path:
            self.last_model_path = ""

    def on_checkpoint_save(self, state: Any, path: Any, step: int) -> None:
        if self.save_last and step == state.step and str(path) == str(self._path_of(state, "last")):
            # the trainer writes the last state to the same path, so no further request is needed
            self.last_model_path, self._metric.looked_at = str(path), (state.step, state.epochs_seen)
        self._remove_abandoned(state, str(path))
        if str(path) not in self._requested:
            return
        score = self._requested.pop(str(path))
        self.best_k_models.pop(str(path), None)
        self.best_k_models[str(path)] = score
        for old in self._surplus(self.best_k_models):
            del self.best_k_models[old]
            self._remove(state, old)
        self._record_best(self.best_k_models)

    def _remove(self, state: Any, old: str) -> None:
        here = self._path_of(state, _name_of(old))
        # remove nothing from an earlier run's folder; the working directory may have changed since then
        if state.rank == 0 and (old == str(here) or str(here).endswith(f"/{old}")):
            state.trainer.remove_checkpoint(here)

    def _remove_abandoned(self, state: Any, saved: str) -> None:
        """Remove the checkpoints of steps that a rollback has undone, once the restored state is durable."""
        for old in self._loaded.abandoned if self.save_top_k != -1 else ():
            if old != saved:
                self._remove(state, old)
        self._loaded.abandoned = []

    def _record_best(self, kept: dict[str, float]) -> None:
        ranked = self._ranked(kept)
        if ranked:
            self.best_model_path = ranked[0]
            self.best_model_score = kept[ranked[0]] if self.monitor is not None else None

    def _ranked(self, kept: dict[str, float]) -> list[str]:
        """Return the paths, the best first; of equal scores the oldest, without a monitor the newest."""
        if self.monitor is None:
            return list(reversed(kept))
        return self.watch.best_first(kept)

    def _surplus(self, kept: dict[str, float]) -> list[str]:
        newest = next(reversed(kept), "")
        return (
            []
            if self.save_top_k == -1
            else [each for each in self._ranked(kept)[self.save_top_k :] if each != newest]
        )

    def _with_requested(self) -> dict[str, float]:
        """Return the checkpoints that remain when all requests are written."""
        kept = {
            path: score for path, score in self.best_k_models.items() if path not in self._requested
        } | self._requested
        for old in self._surplus(kept):
            del kept[old]
        return kept

    # ---- its own state, which includes the checkpoint that holds it ----------------------------------------

    def state_dict(self) -> dict[str, Any]:
        kept = self._with_requested()
        is_known = bool(self.best_model_path or self._requested)
        best = next(iter(self._ranked(kept)), self.best_model_path) if is_known else ""
        return {
            **self.watch.saved_with(),
            **({} if self._metric.saved_at is None else {"saved_at": self._metric.saved_at}),
            "save_top_k": self.save_top_k,
            "best_k_models": _without_secrets(kept),
            "best_model_path": shown(best),
            "current_score": self.current_score,
            "best_model_score": kept.get(best) if self.monitor is not None else None,
            "last_model_path": shown(self._requested_last or self.last_model_path),
            "waiting": self._metric.is_waiting,
            "validated": self._metric.has_validated,
            "owed": _without_secrets(
                {path: score for path, score in self._requested.items() if path in kept}
            ),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self._loaded.is_training:  # a rollback
            kept = [*self.best_k_models]
            self._begin()
            self._loaded.abandoned = [
                path for path in kept if shown(path) not in state.get("best_k_models", {})
            ]
        self.best_k_models, self._loaded.unwritten = (
            _scores(state.get(key, {})) for key in ("best_k_models", "owed")
        )
        self.best_model_path, self.best_model_score = state["best_model_path"], state["best_model_score"]
        self.last_model_path, self.current_score = state["last_model_path"], state["current_score"]
        self._metric.is_waiting, self._metric.has_validated = state["waiting"], state["validated"]
        self._metric.saved_at = state.get("saved_at")
        if difference := self.watch.difference(state):
            self._forget_best(difference, state)

    def _forget_best(self, difference: str, state: dict[str, Any]) -> None:
        """Rank the kept checkpoints anew. Not all were kept: the best of this mode is not among them."""
        was, self.best_model_path, self.best_model_score = self.best_model_path, "", None
        self._loaded.unwritten = {}
        so = "The best is found anew, from the next check on"
        if state.get("monitor", self.monitor or "") != (self.monitor or ""):
            self.best_k_models, self.current_score, self._metric.is_waiting = {}, None, False
            so += "; the checkpoints that were kept stay where they are"
        elif state.get("save_top_k", self.save_top_k) == -1:
            self._record_best(self.best_k_models)
            so = f"All checkpoints were kept: the best is now {self.best_model_path or 'none'}"
        if was:
            self.watch.warn("%s: its best, %s, is not used. %s.", difference, was, so)

    def on_checkpoint_load(self, state: Any, path: Any) -> None:
        """Rebase saved paths: the run's directory may have been moved, and a checkpoint has no secrets."""

        def now(path: str) -> str:
            if self.url:
                here = url_below(self.url, _name_of(path))
                return here if shown(here) == path else path
            moved = folder / Path(path).name
            return str(moved) if path and moved.is_dir() else path

        folder = Path() if self.url else self._folder(state)
        self.best_model_path, self.last_model_path = now(self.best_model_path), now(self.last_model_path)
        kept = {now(path): score for path, score in self.best_k_models.items()}
        self.best_k_models = {path: score for path, score in kept.items() if self.url or Path(path).is_dir()}
        goes_back = self._loaded.is_training
        unwritten = {
            now(each) if self.url else str(folder / Path(each).name): score
            for each, score in self._loaded.unwritten.items()
        }
        # a rollback has abandoned those that were written after the checkpoint, though of the same state
        known = (
            {str(path)}
            if goes_back
            else {each if self.url else str(folder / Path(each).name) for each in self.best_k_models}
        )
        self._loaded.unwritten = {each: score for each, score in unwritten.items() if each not in known}
        if self._loaded.abandoned and not self.url and not Path(self.best_model_path).is_dir():
            self.best_model_path, self.best_model_score = "", None  # a better one had replaced it
            self._record_best(self.best_k_models)
        raw = raw_values(state.metrics)
        if self.monitor in raw and raw[self.monitor] == self.current_score:
            self._metric.seen = raw[self.monitor]
        if goes_back:
            self._save_unwritten(state)

    def on_train_start(self, state: Any) -> None:
        self._loaded.is_training, self._loaded.earlier = True, frozenset()
        is_new = not state.resumed and hasattr(state.trainer, "load_best")  # a hosted run may load one later
        if is_new and not self.url and state.trainer.options.run_dir is not None:
            saved = (each.parent for each in self._folder(state).glob(f"*/{MANIFEST}"))
            self._loaded.earlier = frozenset(str(each) for each in saved if not each.is_symlink())
        self._save_unwritten(state)

    def _save_unwritten(self, state: Any) -> None:
        """Request what was not written before the loaded checkpoint, of the same state: this is that
        state.
        """
        for path, score in self._loaded.unwritten.items():
            self._save(state, path, score, "interval" if self.monitor is None else "best")
        self._loaded.unwritten = {}


def _name_of(path: str) -> str:
    """Return the last part of a path or URL, without a query."""
    return split_query(path)[0].rpartition("/")[2]


def _without_secrets(kept: dict[str, float]) -> dict[str, float]:
    return {shown(path): score for path, score in kept.items()}


def _scores(kept: Any) -> dict[str, float]:
    """Return the paths and scores in a saved state, or raise if it has other values."""
    for path, score in kept.items():
        if not isinstance(path, str) or isinstance(score, bool) or not isinstance(score, int | float):
            raise OptionError(f"{WHO}: {path!r}: {score!r} in its saved state is not a path and a score.")
    return {path: float(score) for path, score in kept.items()}


def _check_keeps_best(monitor: str | None, save_top_k: int) -> None:
    """Refuse restore_best=True if no checkpoint is the best."""
    if monitor is None or save_top_k == 0:
        why = "save_top_k=0 keeps none" if monitor is not None else "without monitor none is the best"
        raise OptionError(
            f"{WHO}: restore_best=True needs a best checkpoint, and {why}.", option="restore_best", value=True
        )
