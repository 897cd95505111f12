"""Log norms, percentiles and histograms of gradients, and warn of vanishing and exploding ones."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Sequence
from typing import Annotated, Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hookline.distributed.sharded_norms import gather_rows, shards_of
from hookline.engine.checks import Count, as_tuple, checked_parameters, refused
from hookline.engine.hook import Hook
from hookline.hooks._figures import heat_map, need_matplotlib, save_figure
from hookline.hooks._settings import as_patterns, is_match, matching_names
from hookline.hooks._statistics import norms, percentiles, samples_of, with_gradients
from hookline.util.errors import HookError, OptionError
from hookline.util.text import list_some

# ---- measurements of one update, and their history ---------------------------------------------------------


class Measured:
    """Statistics of one optimizer's gradients, on the device. `rows` has the layers and the indices of their
    parameters.
    """

    def __init__(self, rows: dict[str, list[int]], parameters: Sequence[Tensor]) -> None:
        self.rows, self.parameters = rows, parameters
        self.grads = [each.grad for each in parameters if each.grad is not None]
        self.norms = norms(self.grads)
        self.percentiles = self.norms.new_empty(0)
        self.samples: list[Tensor] = []
        self.sizes = self.changes = self.norms.new_empty(0)
        self._before: list[Tensor] = []

    def sample(self, limit: int, wanted: Sequence[float], keep: bool) -> None:
        """Sample values of each layer for percentiles and, with `keep`, for histograms."""
        share = limit // shards_of(self.grads)
        layers = [[self.grads[index] for index in indices] for indices in self.rows.values()]
        parts = [part for layer in layers for part in samples_of(layer, share)]
        whole = iter(gather_rows(parts, [each for layer in layers for each in layer]))
        taken = [torch.cat([next(whole) for _ in layer]) for layer in layers]
        if wanted and taken:
            self.percentiles = percentiles([each.abs() for each in taken], wanted)
        self.samples = taken if keep else []

    def remember_weights(self) -> None:
        """Copy the weights before the update."""
        self._before = [each.detach().clone() for each in self.parameters]

    def compare_weights(self) -> None:
        """Compute the norms of the update and of the weights after it."""
        if self._before:
            self.sizes = norms(self._before)
            now = [each.detach() for each in self.parameters]
            self.changes = norms(torch._foreach_sub(now, self._before))  # pyright: ignore[reportPrivateImportUsage]
            self._before = []

    def tensors(self) -> list[Tensor]:
        """Return all tensors to read."""
        return [self.norms, self.sizes, self.changes, self.percentiles.flatten(), *self.samples]


class Reading:
    """The statistics of one update, over all optimizers."""

    def __init__(self, parts: Iterable[Measured]) -> None:
        """Read everything from the device at once."""
        parts = list(parts)
        tensors = [each for part in parts for each in part.tensors()]
        numbers = torch.cat([each.to(tensors[0].device) for each in tensors]).cpu()
        pieces = iter(torch.split_with_sizes(numbers, [each.numel() for each in tensors]))
        self.norms: dict[str, float] = {}
        self.ratios: dict[str, float] = {}
        self.percentiles: dict[str, list[float]] = {}
        self.samples: dict[str, Tensor] = {}
        everything: list[float] = []
        for part in parts:
            found, sizes, changes = (next(pieces).tolist() for _ in range(3))
            table = next(pieces)
            everything += found
            for row, indices in part.rows.items():
                self.norms[row] = _joint_norm(found, indices)
                if changes:
                    size = _joint_norm(sizes, indices)
                    self.ratios[row] = _joint_norm(changes, indices) / size if size else math.nan
            if table.numel():
                self.percentiles.update(zip(part.rows, table.view(len(part.rows), -1).tolist(), strict=True))
            self.samples.update(
                zip(part.rows if part.samples else (), [next(pieces) for _ in part.samples], strict=True)
            )
        self.total = _joint_norm(everything, range(len(everything)))


def _joint_norm(parts: Sequence[float], indices: Iterable[int]) -> float:
    """Return the norm over several tensors from the norm of each."""
    return math.hypot(*(parts[place] for place in indices))


class History:
    """Norms by layer and report. When full, it drops every second report and records every second one from
    then on.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.clear()

    def clear(self) -> None:
        """Start a new run."""
        self.steps: list[int] = []
        self.norms: dict[str, list[float]] = {}
        """By layer, a norm at each of `steps`: NaN without a gradient, infinite if not finite."""
        self._stride, self._count = 1, 0

    def add(self, step: int, found: dict[str, float]) -> None:
        """Record a report."""
        self._count += 1
        if (self._count - 1) % self._stride:
            return
        for row in found:
            self.norms.setdefault(row, [math.nan] * len(self.steps))
        self.steps.append(step)
        for row, values in self.norms.items():
            value = found.get(row, math.nan)
            values.append(math.inf if row in found and math.isnan(value) else value)
        if len(self.steps) > self.limit:
            self.steps = self.steps[::2]
            self.norms = {row: values[::2] for row, values in self.norms.items()}
            self._stride *= 2

    def state_dict(self) -> dict[str, Any]:
        """Return the history with its norms as one matrix."""
        table = torch.tensor(list(self.norms.values()), dtype=torch.float64)
        return {
            "steps": list(self.steps),
            "rows": list(self.norms),
            "norms": table,
            "stride": self._stride,
            "count": self._count,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a saved history."""
        self.steps = list(state["steps"])
        self.norms = dict(zip(state["rows"], state["norms"].tolist(), strict=True))
        self._stride, self._count = state["stride"], state["count"]


log = logging.getLogger("hookline")


class GradientMonitor(Hook):
    """Reports gradients every `log_frequency` optimizer steps: of the whole accumulation window, unscaled and
    not yet clipped. A report reads the device once; the steps between cost one comparison.

    Logs `grad_norm` (over everything) and `grad_norm/<layer>`; `gradients/p90/<layer>` (percentiles of
    magnitudes) and `update_ratio/<layer>` (norm of the change over norm of the weights) if requested. A
    warning names layers whose gradients vanish or explode.
    """

    tier = "builtin"
    observes = True

    @checked_parameters
    def __init__(
        self,
        log_frequency: Annotated[int, Count(1)] = 100,
        log_histogram: bool = False,
        log_norm: bool = True,
        param_filter: str | Sequence[str] | None = None,
        percentiles: Sequence[float] | None = None,
        update_ratio: bool = False,
        vanishing: float = 1e-7,
        exploding: float = 1e3,
        heatmap: bool = False,
        group: Literal["layer", "parameter"] = "layer",
        samples: Annotated[int, Count(16)] = 2048,
        history: Annotated[int, Count(2)] = 512,
        name: str | None = None,
    ) -> None:
        """Choose the statistics and the interval.

        log_frequency: optimizer steps between reports.
        log_histogram, log_norm: what to log.
        param_filter: only parameters with one of these texts in their name, or that match a pattern such as
        `*.mlp.*`. percentiles: from 0 to 100, such as [10, 50, 90].
        update_ratio: also log how much each layer changes; copies the weights in reported steps.
        vanishing, exploding: norms below and above which a layer is named in a warning.
        heatmap: draw `gradient_flow.png` (layers over steps) in the run's directory when the run ends, also
        by an error. group: 'layer' (a module's own parameters together) or 'parameter'.
        samples: values per layer for percentiles and histograms; smaller layers are used whole.
        history: reports in the figure; longer runs keep every second, fourth, ... report.
        """
        super().__init__(name)
        if not all(_is_limit(each) for each in (vanishing, exploding)) or not 0 <= vanishing < exploding:
            raise OptionError(
                f"GradientMonitor: vanishing={vanishing!r}, exploding={exploding!r}: "
                "two numbers from 0, the first below the second.",
                option="vanishing",
                value=vanishing,
            )
        percentiles = () if percentiles is None else percentiles
        self.percentiles = as_tuple("GradientMonitor: percentiles", percentiles, "numbers from 0 to 100")
        if not all(_is_limit(each) and 0 <= each <= 100 for each in self.percentiles):
            raise refused("GradientMonitor: percentiles", percentiles, "numbers from 0 to 100")
        self.param_filter = (
            None if param_filter is None else as_patterns("GradientMonitor: param_filter", param_filter)
        )
        self.log_frequency, self.log_histogram, self.log_norm = log_frequency, log_histogram, log_norm
        self.update_ratio, self.vanishing, self.exploding = update_ratio, vanishing, exploding
        self.heatmap, self.group, self.samples = heatmap, group, samples
        self.history = History(history)
        self.latest: Reading | None = None
        """The newest report."""
        self._done = 0
        self._parts: dict[int, Measured] = {}
        self._flagged: set[str] = set()

    def setup(self, stage: str, step: int) -> None:
        self._done = step  # for a hook that is added during a run
        if self.heatmap and stage == "fit":
            need_matplotlib("GradientMonitor(heatmap=True)")

    def on_train_start(self, module: nn.Module, step: int, resumed: bool) -> None:
        self._done = step
        if not resumed:
            self.history.clear()
            self._flagged.clear()
        if self.param_filter is not None:
            matching_names(
                "GradientMonitor: param_filter",
                self.param_filter,
                [name for name, _ in module.named_parameters()],
            )

    def on_checkpoint_load(self, step: int) -> None:
        self._done = step
        self._parts.clear()

    # ---- measuring: at the event where gradients are complete and unscaled ---------------------------------

    def on_before_optimizer_step(self, module: nn.Module, optimizer: Optimizer, optimizer_idx: int) -> None:
        if (
            self._done + 1
        ) % self.log_frequency:  # not `step`: the second optimizer of an update finds it advanced
            return
        named = with_gradients(module, optimizer)
        if not named or named[0][1].is_meta:
            return
        rows: dict[str, list[int]] = {}
        for index, (name, _) in enumerate(named):
            if self.param_filter is None or any(is_match(name, each) for each in self.param_filter):
                rows.setdefault(
                    name if self.group == "parameter" else name.rpartition(".")[0] or name, []
                ).append(index)
        part = self._parts[optimizer_idx] = Measured(rows, [each for _, each in named])
        if self.percentiles or self.log_histogram:
            part.sample(self.samples, self.percentiles, keep=self.log_histogram)
        if self.update_ratio:
            part.remember_weights()

    def on_after_optimizer_step(self, optimizer_idx: int) -> None:
        if self._parts and optimizer_idx in self._parts:
            self._parts[optimizer_idx].compare_weights()

    def on_step_skipped(self, state: Any) -> None:
        self._parts.pop(state.optimizer_idx, None)  # the update was skipped

    # ---- reporting: at the event whose metrics are logged under this step ----------------------------------

    def on_step_end(self, trainer: Any, logger: Any, step: int) -> None:
        self._done = step
        if not self._parts:
            return
        found = self.latest = Reading(self._parts.values())
        self._parts.clear()
        self.history.add(step, found.norms)
        small = [row for row, norm in found.norms.items() if norm < self.vanishing]
        large = [row for row, norm in found.norms.items() if not norm <= self.exploding]  # NaN too
        if self.log_norm:
            trainer.log("grad_norm", found.total)
            for row, norm in found.norms.items():
                trainer.log(f"grad_norm/{row}", norm)
            trainer.log("gradients/vanishing", len(small))
            trainer.log("gradients/exploding", len(large))
        for row, ratio in found.ratios.items():
            trainer.log(f"update_ratio/{row}", ratio)
        for row, values in found.percentiles.items():
            for percentile, value in zip(self.percentiles, values, strict=True):
                trainer.log(f"gradients/p{percentile:g}/{row}", value)
        for row, taken in found.samples.items():
            logger.add_histogram(f"gradients/{row}", taken, step)
        self._warn(step, "vanishing", f"norm below {self.vanishing:g}", small)
        self._warn(step, "exploding", f"norm above {self.exploding:g} or not finite", large)
        self._flagged = {*small, *large}

    def _warn(self, step: int, what: str, why: str, rows: list[str]) -> None:
        if new := [row for row in rows if row not in self._flagged]:
            log.warning("step %d: %s gradients (%s) in %s", step, what, why, list_some(new))

    # ---- the figure ----------------------------------------------------------------------------------------

    def teardown(self, trainer: Any, logger: Any, stage: str, step: int, rank: int) -> None:
        self._parts.clear()
        if not (self.heatmap and stage == "fit" and rank == 0 and self.history.steps):
            return
        if not self.history.norms:
            log.warning("GradientMonitor draws no gradient_flow.png: %s", self._nothing())
            return
        try:
            save_figure(self.figure(), "gradient_flow", trainer.run_dir, logger, step)
        except Exception:  # a figure must not fail the run
            log.warning("GradientMonitor could not draw gradient_flow.png", exc_info=True)

    def figure(self) -> Any:
        """Return the heat map of the reports so far as a matplotlib figure: layers over steps."""
        if not self.history.norms:
            raise HookError(f"GradientMonitor has nothing to draw: {self._nothing()}")
        need_matplotlib("GradientMonitor.figure()")
        rows = self.history.norms
        return heat_map(list(rows), self.history.steps, list(rows.values()), self.vanishing, self.exploding)

    def _nothing(self) -> str:
        if not self.history.steps:
            return "it has measured nothing yet."
        only = f" that fits param_filter={list(self.param_filter)}" if self.param_filter is not None else ""
        return (
            f"no parameter{only} had a gradient. Are they frozen (requires_grad=False), or in no optimizer?"
        )

    def state_dict(self) -> dict[str, Any]:
        return {"history": self.history.state_dict(), "flagged": sorted(self._flagged)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.history.load_state_dict(state["history"])
        self._flagged = set(state["flagged"])


def _is_limit(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and not math.isnan(value)
