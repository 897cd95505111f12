"""The choice of the training step of a run: its class, and the parts of its backward pass and update."""

from __future__ import annotations

from torch import Tensor

from hookline.run.run import Run
from hookline.training.accumulation import AccumulatedStep, CheckedCountedStep, CheckedStep, CountedStep
from hookline.training.backward import Backward, Factor
from hookline.training.manual import ManualStep
from hookline.training.step import TrainStep
from hookline.training.update import (
    Action,
    Update,
    UpdateCheck,
    clipping,
    early_norm,
    fresh_closure,
    norm_capture,
    routing,
    unscaling,
)


def choose_step(run: Run) -> TrainStep:
    """Return the training step that this run needs. Call it before the first batch of every epoch."""
    kind = _choose_class(run)
    if kind is TrainStep:
        run.window.correction = 1.0
    if run.traits.compiled is not None:
        run.traits.compiled.compose()
    return kind(run, _make_backward(run, divides=issubclass(kind, AccumulatedStep)), _make_update(run))


def set_accumulation(run: Run, batches: int) -> None:
    """Change how many batches make one update, from the next window on."""
    run.traits.accumulate = batches
    if batches == 1:  # a window of one batch needs no size and keeps no losses
        run.window.size, run.state.current.window_losses = 1, None
    if run.step is not None and not run.window.batches:
        run.step = choose_step(run)


def restart_accumulation(run: Run) -> None:
    """Begin with the number of batches per update that the options say, and without an open window."""
    run.traits.accumulate = run.options.accumulate_grad_batches
    run.window.begin(run.options.accumulate_by)
    run.state.current.window_losses = None


def _choose_class(run: Run) -> type[TrainStep]:
    if not run.strategy.ranks.alone:
        from hookline.training.ranks.step import CheckedRankStep, RankManualStep, RankStep

        return (
            RankManualStep
            if run.traits.is_manual
            else CheckedRankStep
            if run.traits.skips_nonfinite
            else RankStep
        )
    if run.traits.is_manual:
        return ManualStep
    if run.data.totals is not None:
        return CheckedCountedStep if run.traits.skips_nonfinite else CountedStep
    if run.traits.skips_nonfinite:
        return CheckedStep
    is_plain = run.traits.accumulate == 1 and not run.window.batches and run.data.router is None
    kind: type[TrainStep] = TrainStep if is_plain else AccumulatedStep
    for choose in run.traits.step_choices:
        kind = choose(run, kind)
    return kind


def _make_backward(run: Run, divides: bool) -> Backward:
    s, window, router, weights = run.state, run.window, run.data.router, run.data.loss_weights
    factors: list[Factor] = []
    if divides and run.traits.rules.averages_short_windows:
        factors.append(lambda loss: loss if window.size == 1 else loss / window.size)
    elif divides:
        factors.append(lambda loss: loss / run.traits.accumulate)
    if run.data.totals is not None:
        rank_batch = run.data.totals.rank_batch
        factors.append(lambda loss: loss if rank_batch.factor == 1.0 else loss * rank_batch.factor)
    if weights is not None:
        factors.append(lambda loss: loss * weights.get(s.dataloader_name, 1.0))
    if router is None:
        return Backward(run, _scaled(run, factors))

    def set_aside(loss: Tensor) -> Tensor:
        router.set_aside_gradients(s.dataloader_name)
        return loss

    factors.append(set_aside)
    return Backward(
        run,
        _scaled(run, factors),
        (lambda: router.restore_gradients(s.dataloader_name, window.fed, window.weight),),
    )


def _scaled(run: Run, factors: list[Factor]) -> tuple[Factor, ...]:
    return (*factors, run.traits.scaler.scale) if run.traits.scaler is not None else tuple(factors)


def _make_update(run: Run) -> Update:
    s, router = run.state, run.data.router
    checks: list[UpdateCheck] = []
    adjustments: list[Action] = []
    if router is not None:
        checks.append(routing(run))
    if run.traits.scaler is not None:
        checks.append(unscaling(run))
    if run.traits.measures_norm:
        checks.append(norm_capture(run))
    elif run.traits.clips and "grad_norm" in run.plan.wanted_at.get("on_before_optimizer_step", ()):
        measure, drop = early_norm(run)
        checks.append(measure)
        adjustments.append(drop)
    if run.traits.clips:
        adjustments.append(clipping(run))
    if run.traits.recomputes:
        adjustments.append(fresh_closure(run))
    return Update(
        run,
        checks=tuple(checks),
        adjustments=tuple(adjustments),
        recorders=() if router is None else (lambda: router.count_update(s.optimizer_idx),),
        closing=() if run.traits.scaler is None else (run.traits.scaler.update,),
        signal_filters=run.boundary.signal_filters,
    )
