"""The choice of the training step of a run: its class, and the parts of its backward pass and update."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from hookline.run.commands import handles_command
from hookline.run.record import leaves_directory, take_directory
from hookline.run.run import Run
from hookline.training.accumulation import AccumulatedStep, CheckedCountedStep, CheckedStep, CountedStep
from hookline.training.backward import Backward, Factor
from hookline.training.manual import ManualStep
from hookline.training.step import TrainStep
from hookline.training.update import NEEDS_ONE_BATCH, Action, Update, UpdateCheck, UpdateParts
from hookline.util.errors import OptionError


def choose_step(run: Run) -> TrainStep:
    """Return the training step that this run needs. Call it before the first batch of every epoch."""
    kind = _choose_class(run)
    if kind is TrainStep:
        run.window.correction = 1.0
    if run.traits.compiled is not None:
        run.traits.compiled.compose()
    step = kind(run, _make_backward(run, divides=issubclass(kind, AccumulatedStep)), _make_update(run))
    if leaves_directory(run):
        step.schedulers += (_taking_directory(run, step),)
    return step


def _taking_directory(run: Run, step: TrainStep) -> Callable[[bool, int | None], None]:
    """Make a call that takes the directory of an earlier run after the first update, before its metrics."""

    def take(is_updated: bool, batches_left: int | None) -> None:
        if is_updated:
            step.schedulers = tuple(each for each in step.schedulers if each is not take)
            take_directory(run)

    return take


def set_accumulation(run: Run, batches: int) -> None:
    """Change how many batches make one update, from the next window on."""
    run.traits.accumulate = batches
    if run.step is not None and run.strategy.ranks.alone:  # the step of a rank has no other class
        # between two batches, because listeners of this event may still read the loss of the window
        run.participants.commands.send("choose step")


@handles_command("choose step")
def choose_again(run: Run, sender: int) -> None:
    """Choose the step again, unless a window is open: that one ends with the step that it began with."""
    if run.step is None or run.window.batches:
        return
    if run.traits.accumulate == 1:  # a window of one batch needs no size and keeps no losses
        run.window.size = 1
        run.state.current.forget_window()
    run.step = choose_step(run)


def check_accumulation(run: Run, batches: int) -> None:
    """Refuse a number of batches per update that this run cannot have."""
    if batches == 1:
        return
    if run.traits.is_manual:
        raise OptionError("Manual optimization accumulates by itself: leave accumulate_grad_batches at 1.")
    if run.traits.recomputes and not run.traits.rules.accumulates_with_closures:
        raise OptionError(NEEDS_ONE_BATCH)
    if run.data.router is not None:
        run.data.router.check_accumulation(batches)
    compiled = run.options.compile
    if run.traits.compiled is not None and isinstance(compiled, dict) and compiled.get("fullgraph"):
        raise OptionError(
            "compile: fullgraph=True makes one graph of forward and backward, and gradient accumulation "
            "divides the loss between them: leave accumulate_grad_batches at 1, or leave out fullgraph."
        )


def check_manual_options(run: Run) -> None:
    """Refuse options of automatic optimization in a run whose training step does the work of them."""
    if not run.traits.is_manual:
        return
    check_accumulation(run, run.options.accumulate_grad_batches)
    if run.options.accumulate_by != "batches":
        raise OptionError(
            f"Manual optimization weights its losses itself: leave accumulate_by at 'batches', not "
            f"{run.options.accumulate_by!r}, and multiply each loss in training_step."
        )
    if run.options.gradient_clip_val is not None:
        raise OptionError(
            "Manual optimization clips by itself: leave gradient_clip_val at None and call "
            "self.clip_gradients(optimizer, value) in training_step."
        )


def restart_accumulation(run: Run) -> None:
    """Begin with the number of batches per update that the options say, and without an open window."""
    run.traits.accumulate = run.options.accumulate_grad_batches
    run.window.begin(run.options.accumulate_by)
    run.state.current.forget_window()


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
    scale = () if run.traits.scaler is None else (run.traits.scaler.scale,)
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
        return Backward(run, (*factors, *scale))

    def set_aside(loss: Tensor) -> Tensor:
        router.set_aside_gradients(s.dataloader_name)
        return loss

    factors.append(set_aside)
    return Backward(
        run,
        (*factors, *scale),
        (lambda: router.restore_gradients(s.dataloader_name, window.fed, window.weight),),
    )


def _make_update(run: Run) -> Update:
    s, router, parts = run.state, run.data.router, UpdateParts(run)
    checks: list[UpdateCheck] = []
    adjustments: list[Action] = []
    if router is not None:
        checks.append(parts.route)
    if run.traits.scaler is not None:
        checks.append(parts.unscale)
    if run.traits.measures_norm:
        checks.append(parts.measure_norm)
    elif run.traits.clips and "grad_norm" in run.plan.wanted_at.get("on_before_optimizer_step", ()):
        checks.append(parts.measure_norm_early)
        adjustments.append(parts.drop_early_norm)
    if run.traits.clips:
        adjustments.append(parts.clip)
    if run.traits.recomputes:
        adjustments.append(parts.renew_closure)
    return Update(
        run,
        checks=tuple(checks),
        adjustments=tuple(adjustments),
        recorders=() if router is None else (lambda: router.count_update(s.optimizer_idx),),
        closing=() if run.traits.scaler is None else (run.traits.scaler.update,),
        signal_filters=run.boundary.signal_filters,
    )
