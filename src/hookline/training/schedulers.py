"""When learning-rate schedulers advance: by step, by epoch, or on a metric."""

from __future__ import annotations

from hookline.run.run import Run


def advance_due(run: Run, updated: bool, batches_left: int | None) -> None:
    """Advance schedulers after a batch: per-step ones after an update, per-epoch ones at the last batch."""
    if updated:
        run.progress.schedulers_advanced_at = run.state.step
        _advance(run, "step", run.traits.rules.scheduler_count(run), metric=False)
    if batches_left == 1:
        advance_epoch(run)


def advance_plateau(run: Run) -> None:
    """Advance per-step schedulers that monitor a metric, after the validation that follows their update."""
    if run.progress.plateau_due and not run.progress.validation_pending:
        run.progress.plateau_due = False
        _advance(run, "step", run.traits.rules.scheduler_count(run), metric=True)


def advance_epoch(run: Run) -> None:
    """Advance per-epoch schedulers; a second call in the same epoch does nothing."""
    if run.schedules and not run.progress.epoch_advanced:
        run.progress.epoch_advanced = True
        _advance(run, "epoch", run.state.epoch + 1, metric=False)


def advance_on_metric(run: Run) -> None:
    """Advance schedulers that monitor a metric, once the epoch's metrics are known."""
    if run.schedules:
        _advance(run, "epoch", run.state.epochs_seen, metric=True)


def _advance(run: Run, interval: str, count: int, metric: bool) -> None:
    s = run.state
    if run.traits.is_manual:
        return  # a manual training step advances them itself
    router = run.data.router
    for schedule in run.schedules:
        if schedule.interval != interval or metric is not schedule.needs_metric:
            run.progress.plateau_due |= interval == schedule.interval == "step" and not metric
            continue
        if interval == "step" and router is not None:  # only if the scheduler's optimizer was updated
            if (
                schedule.optimizer_idx not in router.updated
                or router.updates[schedule.optimizer_idx] % schedule.frequency
            ):
                continue
        elif count % schedule.frequency:
            continue
        if schedule.monitor is not None:
            if interval == "epoch" and run.traits.rules.waits_for_validation(run, schedule.monitor):
                continue
            if schedule.monitor not in s.metrics:
                run.traits.rules.report_missing_metric(run, schedule)
                continue
            s.optimization.metric = s.metrics[schedule.monitor]
        s.optimization.scheduler = schedule.scheduler
        run.plan.lr_scheduler_step(s)
        s.optimization.metric = None
