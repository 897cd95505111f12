"""Run a learning-rate range test: raise the rate, observe the loss, suggest a rate, restore everything."""

from __future__ import annotations

import logging
import math
from typing import Annotated, Any

import numpy as np
import torch
from torch import Tensor, nn

from hookline.data.seeding import rng_state, set_rng_state
from hookline.engine.checks import Above, Count, Number, checked_parameters
from hookline.engine.hook import Hook
from hookline.hooks._figures import lr_curve, missing_matplotlib, need_matplotlib, save_figure
from hookline.hooks._snapshot import Snapshot
from hookline.util.errors import HookError, OptionError

log = logging.getLogger("hookline")


class LRFinder(Hook):
    """Finds a learning rate in a short run, which `find` starts.

    >>> finder = LRFinder(max_lr=1.0)
    >>> module.lr = finder.find(trainer, module, train_loader)

    As a hook of a run it turns that run into the test. The run ends with the test, which restores weights,
    buffers, optimizers, schedulers and random streams. Monitors (ModelCheckpoint, EarlyStopping) are disabled
    during the test. `figure()` and `lr_finder.png` show loss over rate.
    """

    tier = "builtin"

    @checked_parameters
    def __init__(
        self,
        min_lr: Annotated[float, Number()] = 1e-7,
        max_lr: Annotated[float, Number()] = 1.0,
        steps: Annotated[int, Count(10)] = 100,
        divergence: Annotated[float, Above(1)] = 4.0,
        plot: bool = True,
        name: str | None = None,
    ) -> None:
        """Configure the test.

        min_lr, max_lr: the first and the last rate of the first parameter group; others keep their ratio to
        it. steps: optimizer updates over which the rate grows, by the same factor each time.
        divergence: the test ends early when the smoothed loss is this many times its best, or has risen this
        many times its decrease. plot: draw `lr_finder.png` in the run's directory if matplotlib is installed.
        """
        super().__init__(name)
        if not 0 < min_lr < max_lr:
            raise OptionError(
                f"LRFinder: min_lr={min_lr!r}, max_lr={max_lr!r}: two numbers above 0, the first below the "
                f"second.",
                option="min_lr",
                value=min_lr,
            )
        self.min_lr, self.max_lr, self.steps, self.divergence, self.plot = (
            min_lr,
            max_lr,
            steps,
            divergence,
            plot,
        )
        self.lrs: list[float] = []
        self.losses: list[float] = []
        """One pair for each update with a finite loss."""
        self.suggestion: float | None = None
        self._is_over = False
        self._snapshot: Snapshot | None = None
        self._streams: dict[str, Any] = {}
        self._window: list[float] = []
        self._ratios: list[list[float]] = []
        self._disabled: list[str] = []
        self._smoothed = self._best = self._start = math.nan

    def find(
        self, trainer: Any, module: nn.Module, train: Any = None, val: Any = None, **arguments: Any
    ) -> float | None:
        """Run the test with a trainer like this one, but without its hooks, and return the suggestion.

        Takes the arguments of `trainer.fit`; nothing is validated. It does not change the given trainer, and
        changes only the device of the module.
        """
        options = {"max_steps": self.steps, "run_dir": trainer.run_dir}
        trainer.fit_aside(self, options, module, train, val=val, **arguments)
        return self.suggestion

    # ---- the test ------------------------------------------------------------------------------------------

    def setup(self, stage: str, trainer: Any) -> None:
        if stage != "fit":
            return
        if trainer.options.min_epochs:
            raise OptionError(
                f"LRFinder ends the run after {self.steps} steps, which "
                f"min_epochs={trainer.options.min_epochs} forbids; use LRFinder().find(trainer, module, "
                "loader)."
            )
        self._streams = rng_state()

    def on_fit_start(self, trainer: Any) -> None:
        """Disable monitors after all hooks are set up, so that they still get their teardown."""
        self._disabled = [
            each.name
            for each in trainer.hooks.entries()
            if each.enabled and getattr(each.hook, "tier", "") == "monitor"
        ]
        for name in self._disabled:
            trainer.disable_hook(name)
        if self._disabled:
            log.info("LRFinder: %s disabled until the range test is over", ", ".join(self._disabled))

    def on_train_start(self, module: nn.Module, optimizers: list[Any], schedulers: list[Any]) -> None:
        self.lrs, self.losses, self.suggestion, self._window = [], [], None, []
        self._is_over = False
        self._smoothed = self._best = self._start = math.nan
        if not optimizers:
            raise HookError("LRFinder has no optimizer whose learning rate it could change.")
        self._snapshot = Snapshot(module, optimizers, schedulers)
        base = _rate(optimizers[0].param_groups[0]) or 1.0
        self._ratios = [[(_rate(group) or base) / base for group in each.param_groups] for each in optimizers]

    def on_before_backward(self, loss: Tensor) -> Tensor | None:
        self._window.append(float(loss.detach()))
        if self._snapshot is None or math.isfinite(self._window[-1]):
            return None
        return torch.nan_to_num(
            loss, 0.0, 0.0, 0.0
        )  # a loss that is not finite ends the test without an error

    def on_before_optimizer_step(self, optimizer: Any, optimizer_idx: int) -> None:
        if self._snapshot is not None:  # here, so that it overrides schedulers
            for group, ratio in zip(optimizer.param_groups, self._ratios[optimizer_idx], strict=True):
                rate = self._next() * ratio
                group["lr"] = group["lr"].new_tensor(rate) if isinstance(group["lr"], Tensor) else rate

    def prepare_lr_change(self, state: Any) -> None:
        """Refuse `hookline control RUN lr` during the range test, which sets the rate of every step."""
        if self._snapshot is not None:
            raise HookError(
                "lr: LRFinder sets the learning rate of every step of its range test, and restores the rates "
                "from before it at the end."
            )

    def on_step_skipped(self, trainer: Any) -> None:
        if trainer.strategy.ranks.alone:  # else the ranks check it together after the next update
            self._end_of_update(trainer, made=False)

    def on_step_end(self, trainer: Any) -> None:
        self._end_of_update(trainer, made=True)

    def _next(self) -> float:
        return float(self.min_lr * (self.max_lr / self.min_lr) ** (len(self.lrs) / (self.steps - 1)))

    def _end_of_update(self, trainer: Any, made: bool) -> None:
        losses, self._window = self._window, []
        if self._snapshot is None:
            return
        totals = trainer.strategy.ranks.gather_numbers(
            [sum(losses), len(losses)]
        )  # one curve, and one suggestion, for all ranks
        count = math.fsum(each for _, each in totals)
        if not count:
            return
        loss = sum(each for each, _ in totals) / count
        if made and math.isfinite(loss):
            self.lrs.append(self._next())
            self.losses.append(loss)
            before = loss if math.isnan(self._smoothed) else self._smoothed
            self._smoothed = before + max(0.2, 1 / len(self.losses)) * (loss - before)
            if (
                len(self.losses) > self.steps // 10
            ):  # the first tenth only levels out the noise of single batches
                self._start = self._smoothed if math.isnan(self._best) else self._start
                self._best = min(self._smoothed, self._start if math.isnan(self._best) else self._best)
        # as far above the best as `divergence` times it, or times what was gained
        room = max(self.divergence * (self._start - self._best), (self.divergence - 1) * abs(self._best))
        blew_up = not math.isfinite(loss) or self._smoothed > self._best + room
        if blew_up or len(self.lrs) >= self.steps:
            trainer.stop("the learning-rate range test is over")
            self._is_over = True
            self._restore()

    def _restore(self) -> None:
        snapshot, self._snapshot = self._snapshot, None
        if snapshot is not None:
            snapshot.restore()

    def teardown(self, trainer: Any, logger: Any, stage: str, step: int, rank: int, status: str) -> None:
        if stage != "fit":
            return
        self._restore()
        for hook in self._disabled:
            if hook in trainer.hooks:
                trainer.enable_hook(hook)
        self._disabled = []
        if self._streams:
            set_rng_state(self._streams)
        self.suggestion = self._suggest()
        if rank or status == "error":
            return
        if not self._is_over:
            log.warning(
                "LRFinder: the fit ended after %d of %d steps, so higher rates were not tried. Pass a "
                "smaller steps= or train more epochs. LRFinder().find(trainer, module, loader) repeats the "
                "loader.",
                len(self.lrs),
                self.steps,
            )
        elif self.suggestion is None:
            log.warning(
                "LRFinder has no suggestion: over %d steps from %g the loss did not fall.",
                len(self.lrs),
                self.min_lr,
            )
        elif np.argmin(_smooth(self.losses)) >= 0.97 * len(self.losses):
            log.warning(
                "LRFinder: the loss still fell at max_lr=%g, so a higher rate may be better. Pass a higher "
                "max_lr=.",
                self.max_lr,
            )
        if self.suggestion is not None:
            log.info("LRFinder suggests a learning rate of %.2g", self.suggestion)
        if not self.plot or len(self.lrs) <= 2:
            return
        if problem := missing_matplotlib("LRFinder(plot=True)"):  # the test does not need the figure
            log.warning("lr_finder.png is left out. %s", problem)
        else:
            save_figure(self.figure(), "lr_finder", trainer.run_dir, logger, step)

    # ---- the result ----------------------------------------------------------------------------------------

    def figure(self) -> Any:
        """Return loss over learning rate as a matplotlib figure."""
        need_matplotlib("LRFinder.figure()")
        return lr_curve(self.lrs, self.losses, _smooth(self.losses), self.suggestion)

    def _suggest(self) -> float | None:
        """Return the rate where the smoothed loss falls fastest, at most a tenth of the rate of the lowest
        loss.
        """
        if len(self.lrs) < 10:
            return None
        smooth = _smooth(self.losses)
        lowest = int(np.argmin(smooth))
        tenth, half = max(3, len(smooth) // 10), len(smooth) // 2
        start = float(np.median(smooth[:tenth]))
        noise = float(np.std(np.asarray(self.losses)[:half] - smooth[:half]))  # differences between batches
        if lowest < tenth or start - smooth[lowest] <= max(noise, 1e-3 * abs(start)):
            return None
        slopes = np.gradient(smooth, np.log(self.lrs))[: lowest + 1]
        return min(self.lrs[int(np.argmin(slopes))], self.lrs[lowest] / 10)


def _rate(group: dict[str, Any]) -> float:
    return float(group.get("initial_lr", group["lr"]))


def _smooth(losses: list[float]) -> Any:
    """Return a centred running mean, so that the curve is not shifted towards higher rates."""
    values = np.asarray(losses, dtype=np.float64)
    reach = max(1, len(values) // 20)
    weights = np.hanning(2 * reach + 3)[1:-1]
    # fewer neighbours at the ends: repeating the first loss would start the curve with one noisy batch
    return np.convolve(values, weights, mode="same") / np.convolve(np.ones_like(values), weights, mode="same")
