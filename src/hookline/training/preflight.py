"""Checks before the first step: hooks and schedulers that wait for what cannot come are refused, and
optimizers that differ over ranks.
"""

from __future__ import annotations

import logging
import re
import sys

from hookline.run.optimizers import bare
from hookline.run.parameter_groups import check_settings, group_rows, named_parameters, render_groups
from hookline.run.run import Run
from hookline.training.settings import DERIVED
from hookline.util.errors import OptionError, closest

log = logging.getLogger("hookline")

OF_VALIDATION = re.compile(r"val(?:idation)?[/_]")
"""The prefix of metrics that validations log."""

_COLLECTIONS = (tuple, list, set, frozenset)


def check_before_training(run: Run) -> None:
    """Refuse what cannot work: a validation or metric that cannot come, optimizers that differ over ranks."""
    report_groups(run)
    warn_of_used_schedulers(run)
    if not run.strategy.ranks.alone:
        from hookline.training.ranks.preflight import check_equal_optimizers

        check_equal_optimizers(run)
    if run.traits.rules.has_validation(run):
        run.traits.rules.validation_interval(run)  # raises if it is never reached
        return
    for who, hook in (
        (type(entry.hook).__name__, entry.hook) for entry in run.state.hooks.entries() if entry.enabled
    ):
        if getattr(hook, "needs_validation", False):
            raise OptionError(
                f"{who} acts after validations, and {_why_none(run)}. Pass a validation loader to fit, or "
                "choose another moment with its options, such as every= or check_on_train_epoch_end=."
            )
        for name in getattr(hook, "needs_metrics", ()):
            _check_metric(run, who, name, "strict=False")
    for schedule in run.schedules:
        if schedule.monitor is not None and schedule.strict and not run.traits.is_manual:
            _check_metric(
                run, f"lr_scheduler {type(schedule.scheduler).__name__}", schedule.monitor, "'strict': False"
            )


def warn_of_used_schedulers(run: Run) -> None:
    """Warn of schedulers that an earlier fit has advanced: this run begins with the rates of its end."""
    for schedule in run.schedules if run.resume.path is None else ():
        used = getattr(schedule.scheduler, "last_epoch", 0)
        if isinstance(used, int) and used > 0 and not run.state.rank:
            log.warning(
                "lr_scheduler %s has advanced %d times before this run and continues there: the first "
                "learning rate is %.3g. To begin the schedule again, make a new optimizer and scheduler for "
                "each fit.",
                type(schedule.scheduler).__name__,
                used,
                run.state.optimizers[schedule.optimizer_idx].param_groups[0]["lr"],
            )


def report_groups(run: Run) -> None:
    """Show which parameters are in which group of an optimizer, if its groups have names.

    Refuse a setting of a group that the optimizer would silently ignore.
    """
    for optimizer in map(bare, run.state.optimizers):
        kind, groups = type(optimizer).__name__, optimizer.param_groups
        if not all(group.get("param_names") and group.get("name") for group in groups):
            continue
        rows = group_rows(groups, DERIVED)
        if type(optimizer).__module__.startswith("torch.optim"):
            known = optimizer.defaults
            for row in rows:  # code of the user may read keys of its own, such as lr_scale: only typos count
                typos = [key for key in row.settings if key not in known and closest(key, known)]
                check_settings(typos, kind, known, f"The group {row.name!r}")
        if run.state.rank:
            continue
        trained = {id(each) for group in groups for each in group["params"]}
        left_out = {
            each.names[0]: each.parameter
            for each in named_parameters(run.module)
            if id(each.parameter) not in trained and not each.parameter.requires_grad
        }
        text = f"Parameter groups of {kind}:\n{render_groups(rows, left_out)}"
        if run.options.enable_progress_bar:
            print(text, file=sys.stderr, flush=True)
        else:
            log.info("%s", text)


def _check_metric(run: Run, who: str, name: str, otherwise: str) -> None:
    if OF_VALIDATION.match(name) and name not in run.state.metrics and not _is_declared(run, name):
        raise OptionError(
            f"{who} needs the metric {name!r}, which validations log, and {_why_none(run)}. Pass a "
            "validation loader to fit, or name a metric of training, such as 'train/loss'. If code of your "
            f"own logs {name!r} while it trains, set `logs_metrics = ({name!r},)` on its hook or module, or "
            f"pass {otherwise}."
        )


def _is_declared(run: Run, name: str) -> bool:
    """Return whether the module, data module or a hook declares that it logs the metric while training."""
    declared = [
        getattr(owner, "logs_metrics", ())
        for owner in (run.module, run.steps, run.datamodule, *run.state.hooks)
    ]
    return any(name == each or (isinstance(each, _COLLECTIONS) and name in each) for each in declared)


def _why_none(run: Run) -> str:
    if run.options.limit_val_batches == 0:
        return f"limit_val_batches={run.options.limit_val_batches} switches validation off"
    return "this run has no validation data"
