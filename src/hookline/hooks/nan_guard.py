"""Find the first value that is not finite: in the batch, an activation, the loss, a gradient or a weight."""

from __future__ import annotations

import logging
import math
import sys
from collections.abc import Iterable, Sequence
from typing import Annotated, Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from hookline.data.batch import describe_batch
from hookline.distributed.sharded_norms import local_part
from hookline.engine.checks import Count, Several, checked_parameters
from hookline.engine.hook import Hook
from hookline.hooks._samples import (
    check_can_exclude,
    exclude,
    find_bad_samples,
    find_samples,
    for_log,
    go_back,
    name_command,
    name_samples,
)
from hookline.hooks._statistics import between_graphs, norms, tensors_in, with_gradients
from hookline.run.buffers import KeptBuffers
from hookline.util.errors import SKIP_BATCH, SKIP_STEP, NonFiniteLoss, OptionError, Signal
from hookline.util.text import list_some

log = logging.getLogger("hookline")
WHO = "NaNGuard"
BRACKETS = "{}[{!r}]"
"""How a tensor in a batch or an output is named: `batch['labels']`."""
BEFORE_UPDATE = ("loss", "gradients")
"""The checks that stop a bad value before it reaches the weights, so at least one of them is always made."""
CHECKS = ("batch", "activations", *BEFORE_UPDATE, "parameters")


class NaNGuard(Hook):
    """Stops at the first NaN or infinity, before it reaches the weights, and names its origin.

    The forward pass of such a batch may have made buffers non-finite, such as the averages of batch norm.
    They get back their values of the update before it, of which the hook keeps a copy on the device.

    Every check reads the device once. At a terminal it starts the debugger, elsewhere it raises
    `NonFiniteLoss`. With `break_on_nan=False` it only warns, and the trainer's `nonfinite` decides: 'skip'
    continues, 'stop' ends the run one step later. It names the samples behind the update. With `exclude=True`
    it skips the update (with the check 'batch', the batch), goes back to the last checkpoint and leaves these
    samples out. If there is no checkpoint yet, the run continues: weights and buffers are good, and the
    samples are left out from the next epoch on. It checks training only: a NaN in the data of a validation
    shows in the metrics of that validation.
    """

    tier = "builtin"
    may_listen = ("on_train_start", "on_step_skipped")

    @checked_parameters
    def __init__(
        self,
        break_on_nan: bool = True,
        log_shapes: bool = False,
        check: Annotated[str | Iterable[str], Several(CHECKS)] = BEFORE_UPDATE,
        every: Annotated[int, Count(1)] = 1,
        exclude: bool = False,
        max_rollbacks: Annotated[int, Count(1)] = 5,
        name: str | None = None,
    ) -> None:
        """Choose the checks.

        break_on_nan: stop, in the debugger if stdin is a terminal; False: warn only.
        log_shapes: log the shapes of the first batch, and again whenever they change.
        check: any of 'batch', 'activations' (outputs of every module, of checked batches only), 'loss',
        'gradients' (complete and unscaled), 'parameters' (after the update). Loss and gradients are checked
        too, unless one of the two is named: then the other one is not.
        every: check every n batches (updates, for gradients and parameters).
        exclude: instead of stopping, leave out the samples of the update and go back to the last checkpoint.
        max_rollbacks: leave out the samples of so many updates in a run, and stop at the next one.
        """
        super().__init__(name)
        self.check = frozenset(check)
        if self.check.isdisjoint(BEFORE_UPDATE):
            self.check |= {*BEFORE_UPDATE}
        self.break_on_nan, self.log_shapes, self.every = break_on_nan, log_shapes, every
        self.exclude, self.max_rollbacks = exclude, max_rollbacks
        if exclude and "parameters" in self.check:
            raise OptionError(
                f"{WHO}: exclude=True goes back before a bad value reaches the weights; leave out the check "
                "'parameters', which looks at them after the update.",
                option="check",
                value=check,
            )
        if exclude:
            self.__dict__["on_train_start"] = self._check_loaders
            self.__dict__["on_step_skipped"] = self._end_skipped
            if "batch" in self.check:  # ranks wait for each other before a batch that a hook may skip
                self.__dict__["on_train_batch_start"] = self._start_or_skip
        self._due = True
        self._buffers: KeptBuffers | None = None
        self._shapes = ""
        self._handles: list[RemovableHandle] = []
        self._outputs: list[tuple[str, Tensor]] = []
        self._begin()

    def _begin(self) -> None:
        self.found = self.rollbacks = self.excluded = 0
        """How many checks found a value that is not finite, how often the run went back, and of how many
        updates the samples were left out.
        """
        self._skips = False
        """Whether to skip the next update."""
        self._skipped: tuple[int, int] | None = None
        """The epoch and the last batch of the newest update that was skipped: it calls every optimizer."""
        self._has_asked = False
        """Whether a rollback was requested that is not carried out yet, perhaps because it cannot be."""
        self._buffers = None

    def setup(self, stage: str) -> None:
        if stage == "fit":  # a second fit is a new run; a resumed one gets its state right after this
            self._begin()

    def _check_loaders(self, trainer: Any) -> None:
        check_can_exclude(WHO, trainer)

    def on_train_batch_start(self, module: nn.Module, batch: Any, batches_seen: int, state: Any) -> None:
        self._start_or_skip(module, batch, batches_seen, state)

    def _start_or_skip(self, module: nn.Module, batch: Any, batches_seen: int, state: Any) -> Signal | None:
        """Check the batch before the model is called; with `exclude`, return whether to skip it."""
        if self._buffers is None:
            self._buffers = KeptBuffers(module)
        if self.log_shapes and (shapes := describe_batch(batch)) != self._shapes:
            self._shapes = shapes
            log.info("batch %d: %s", batches_seen, shapes)
        self._due = batches_seen % self.every == 0
        self._release()
        is_checked = self._due and "batch" in self.check
        if is_checked and (bad := not_finite(tensors_in("batch", batch, BRACKETS))):
            what = f"The batch has values that are not finite: {list_some(bad)}."
            if self._report(what, state, is_of_batch=True):
                return SKIP_BATCH
        if self._due and "activations" in self.check:
            self._watch(module)
        return None

    def on_before_backward(self, loss: Tensor, state: Any) -> None:
        if not self._due:
            return
        outputs, self._outputs = self._outputs, []
        self._release()
        if outputs and (bad := not_finite(outputs)):
            self._report(
                f"The output of module {bad[0]!r} is the first that is not finite; {len(bad)} in all.", state
            )
        elif "loss" in self.check and not math.isfinite(value := float(loss.detach())):
            origin = ", though the outputs of all modules are finite" if outputs else ""
            self._report(f"The loss is {value}{origin}.", state)

    def on_before_optimizer_step(
        self, module: nn.Module, optimizer: Optimizer, step: int, state: Any
    ) -> Signal | None:
        is_skipped = self._skips or self._skipped == (state.epoch, state.batch_idx)
        if "gradients" in self.check and step % self.every == 0 and not is_skipped:
            grads: Any = [(name, each.grad) for name, each in with_gradients(module, optimizer)]
            if bad := not_finite(grads):  # the backward pass goes from the last parameter to the first
                self._report(
                    f"The gradient of parameter {bad[-1]!r} is not finite, the first on the way back from "
                    f"the loss; {len(bad)} of {len(grads)} are: {list_some(reversed(bad))}.",
                    state,
                    # gradients are averaged: the rank with the bad loss has named its samples before
                    is_of_others="loss" in self.check and state.world_size > 1,
                )
        return SKIP_STEP if is_skipped or self._skips else None

    def _end_skipped(self, state: Any) -> None:
        """After an update was skipped, here or by nonfinite='skip': skip it for its other optimizers, too."""
        if self._skips:
            self._skips, self._skipped = False, (state.epoch, state.batch_idx)

    def on_after_optimizer_step(self, module: nn.Module, step: int, state: Any) -> None:
        if self._buffers is not None:
            self._buffers.keep()
        if "parameters" not in self.check or (step - 1) % self.every:
            return
        if bad := not_finite(list(module.named_parameters())):
            self._report(
                f"The update left parameters that are not finite: {list_some(bad)}.", state, is_made=True
            )

    def on_validation_start(self) -> None:
        self._release()  # a step without a loss had no backward

    on_train_epoch_end = on_validation_start

    def teardown(self) -> None:
        self._release()
        self._buffers = None

    def _report(
        self,
        what: str,
        state: Any,
        is_of_others: bool = False,
        is_made: bool = False,
        is_of_batch: bool = False,
    ) -> bool:
        """Stop, warn or go back; return whether the run goes back.

        is_of_others: whether it came from the batches of other ranks. is_made: whether the update was made.
        is_of_batch: whether `what` names the tensors of the batch.
        """
        self.found += 1
        where = f"epoch {state.epoch}, batch {state.batch_idx}, update {state.step + (not is_made)}"
        clues = [f"{what} ({where}; batch: {describe_batch(state.batch)})"]
        if not is_of_batch and (bad := not_finite(tensors_in("batch", state.batch, BRACKETS))):
            clues.append(f"The batch itself is not finite: {list_some(bad)}.")
        # only this rank's shards: other ranks may have found nothing, so a collective would hang
        if bad := not_finite([(name, local_part(each)) for name, each in state.module.named_parameters()]):
            clues.append(f"Parameters are not finite: {list_some(bad)}.")
        if not is_made and self._buffers is not None and (spoiled := self._buffers.put_back()):
            clues.append(f"Buffers that its forward pass made non-finite are put back: {list_some(spoiled)}.")
        is_older = bool(bad) and not is_made  # then no sample of this update is the cause
        if not is_of_batch and "activations" not in self.check and len(clues) == 1:
            clues.append("NaNGuard(check='activations') names the module that made it.")
        reason = f"{WHO}: {what.rstrip('.')}"
        samples = {} if is_of_others or is_older else find_bad_samples(state) or find_samples(state.trainer)
        message = " ".join(clues) + name_samples(samples)
        state.logger.log_event(
            "nonfinite",
            {"step": state.step, "epoch": state.epoch, "batch": state.batch_idx, "message": what}
            | for_log(samples),
        )
        before = self.excluded - self._skips  # a second bad batch of one update does not count
        if self.exclude and (samples or is_of_others) and before < self.max_rollbacks:
            left_out = ", leaves these samples out" if samples else ""
            skipped = "batch" if is_of_batch else "update"
            log.warning(
                "%s The run skips the %s%s and goes back to the last checkpoint.", message, skipped, left_out
            )
            exclude(state.trainer, samples, reason)
            go_back(state.trainer, reason)
            self.excluded = before + 1
            self._skips, self._has_asked = self._skips or not is_of_batch, True
            return True
        message += name_command(state.trainer, samples)
        if self.exclude and self.excluded:
            message += f" The samples of {self.excluded} updates are left out already (max_rollbacks)."
        if not self.break_on_nan:
            log.warning(message)
        elif sys.stdin is not None and sys.stdin.isatty():
            log.error(message)
            breakpoint()  # `state` has the batch, the module and the loss; `c` continues
        else:
            raise NonFiniteLoss(message)
        return False

    # ---- activations: hooks on the modules, only while a batch is checked ----------------------------------

    def _watch(self, module: nn.Module) -> None:
        self._outputs = []
        for name, layer in module.named_modules():
            self._handles.append(layer.register_forward_hook(self._collector(name or type(module).__name__)))

    def _collector(self, name: str) -> Any:
        def collect(module: nn.Module, inputs: Any, output: Any) -> None:
            for part, value in tensors_in(name, output, BRACKETS):
                if value.is_floating_point() and value.numel() and not value.is_meta:
                    self._outputs.append((part, norms([value.detach()], math.inf)[0]))

        return between_graphs(collect)

    def _release(self) -> None:
        while self._handles:
            self._handles.pop().remove()
        self._outputs = []

    def on_checkpoint_load(self) -> None:
        self.rollbacks += self._has_asked
        self._skips, self._skipped, self._has_asked = False, None, False
        self._buffers = None

    def state_dict(self) -> dict[str, Any]:
        return {"found": self.found, "rollbacks": self.rollbacks, "excluded": self.excluded}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a state. Counts of this process are kept: they are newer."""
        self.found = max(self.found, state["found"])
        self.rollbacks = max(self.rollbacks, state.get("rollbacks", 0))
        self.excluded = max(self.excluded, state.get("excluded", self.rollbacks))


def not_finite(named: Sequence[tuple[str, Tensor]]) -> list[str]:
    """Return the names of tensors with a NaN or an infinity, with one read from the device."""
    floats = [
        (name, each)
        for name, each in named
        if each.numel() and not each.is_meta and (each.is_floating_point() or each.is_complex())
    ]
    if not floats:
        return []
    largest = norms([each for _, each in floats], math.inf).tolist()
    return [name for (name, _), value in zip(floats, largest, strict=True) if not math.isfinite(value)]
