"""The recorder of digests: observes single steps of a fit, and is absent in all others.

In a digested step it is a tracer of the plan: it reads before all listeners of an event, or after them, so
that what a hook changes lies between two digests. It keeps sums on the device, reads them once when the step
is over, and writes one line.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from hookline.digests import host_facts
from hookline.digests.file import DigestFile
from hookline.digests.tensors import MOST_SAMPLES, WIDTH, Entry, Sums, text_digest
from hookline.engine.binding import Caller
from hookline.engine.events import Event
from hookline.engine.listener import Listener
from hookline.run.option_tables import Digests
from hookline.run.run import Run

MOST_PARTS = 12
"""Parts of a batch that are written one by one."""
Read = Callable[[Any], None]


class StepDigests:
    """Digests of the steps of one fit."""

    def __init__(self, run: Run, settings: Digests, file: DigestFile) -> None:
        self.run, self.file = run, file
        self.every, self.details = settings.steps, settings.modules
        self.is_open = False
        """Whether this step is digested."""
        self._before: dict[str, Read] = {
            "on_before_batch_transfer": self._fetched,
            "training_step": self._start_forward,
            "on_before_backward": self._loss,
            "on_after_backward": self._gradients,
            "optimizer_step": self._start_update,
            "on_after_optimizer_step": self._updated,
            "on_step_skipped": self._skipped,
        }
        self._after: dict[str, Read] = {
            "on_train_batch_start": self._ready,
            "training_step": self._end_forward,
            "on_before_backward": self._replaced_loss,
            "optimizer_step": self._end_update,
        }
        self._record = StepRecord(Sums())
        self._names: dict[int, str] = {}
        self._hooks: list[Any] = []
        """The handles of forward hooks, during the forward pass."""
        self._is_updating = False

    @property
    def due(self) -> float:
        """The step after which the recorder begins or ends next."""
        step: int = self.run.state.counts.step
        if self.is_open or step == 0:
            return step
        return (step // self.every + 1) * self.every - 1

    # ---- begin and end of a step -------------------------------------------------------------------------

    def begin(self) -> None:
        """Begin a digest, before the first batch of an accumulation window is fetched."""
        s = self.run.state
        self.is_open, self._is_updating = True, False
        self._record = StepRecord(Sums())
        self._record.head = {
            "step": s.counts.step + 1,
            "batch": s.counts.batches_seen,
            "epoch": s.counts.epoch,
        }
        self._record.random["start"] = host_facts.random_streams(s.device)
        self.run.plan.recompose(self._wrapped)

    def end(self) -> None:
        """End the digest of this step and write it."""
        if not self.is_open:
            return
        record = self._record
        self.abandon()
        if record.is_complete:
            self.file.write(self.run, record.data(self.details))

    def abandon(self) -> None:
        """Drop the digest of a step that is not complete."""
        self.is_open = False
        self._remove_hooks()
        self._record = StepRecord(Sums())
        self.run.plan.recompose(self._wrapped)

    @property
    def _wrapped(self) -> set[str]:
        return {*self._before, *self._after}

    # ---- the tracer --------------------------------------------------------------------------------------

    def call(self, listener: Listener, call: Caller) -> Caller:
        """Return the call of a listener as it is."""
        return call

    def slot(self, event: Event, slot: Caller) -> Caller:
        """Return the slot of an event with the reads before and after its listeners."""
        before, after = self._before.get(event.name), self._after.get(event.name)
        if event.name == "on_checkpoint_load":
            before = self._restored
        elif not self.is_open or (before is None and after is None):
            return slot

        def digested(s: Any) -> Any:
            if before is not None:
                before(s)
            value = slot(s)
            if after is not None:
                after(s)
            return value

        return digested

    # ---- what is read, in the order of a step --------------------------------------------------------------

    def _restored(self, s: Any) -> None:
        """Begin another attempt: the run was resumed, or has gone back to a checkpoint."""
        if self.is_open:
            self.abandon()
        self.file.restart(self.run, s.counts.step)

    def _fetched(self, s: Any) -> None:
        """Read the batch as the loader returned it."""
        if s.log.mode != "train":
            return  # a batch of a validation inside the window
        self._record.batches.append(BatchRecord())
        self._record.batches[-1].sample_ids = s.sample_ids
        self._read_batch(s, "fetched")

    def _ready(self, s: Any) -> None:
        """Read what the forward pass begins with, after all hooks that may change it."""
        if not self._record.batches:
            self._record.batches.append(BatchRecord())
        self._read_batch(s, "batch")
        if len(self._record.batches) > 1:
            return
        module: nn.Module = s.module
        record, sums = self._record, self._record.sums
        self._names = {id(each): name for name, each in module.named_parameters()}
        record.random["forward"] = host_facts.random_streams(s.device)
        with torch.no_grad():
            record.sets["weights"] = sums.add_all(module.named_parameters())
            record.sets["buffers"] = sums.add_all(module.named_buffers())
            record.sets["state"] = self._optimizer_state(s)
        record.settings["modes"] = host_facts.modes(module)
        record.settings["flags"] = host_facts.process_flags()

    def _optimizer_state(self, s: Any) -> list[Entry]:
        found = []
        for name, value in host_facts.optimizer_state(s.optimizers, self._names):
            if isinstance(value, Tensor):
                found.append(self._record.sums.add(name, value))
            else:
                found.append(Entry(name, host_facts.plain_text(value), ()))
        scale = getattr(self.run.traits.scaler, "_scale", None)
        if isinstance(scale, Tensor):
            found.append(self._record.sums.add("the gradient scale", scale))
        return found

    def _read_batch(self, s: Any, field: str) -> None:
        sums, current = self._record.sums, self._record.batches[-1]
        entries: list[Entry] = []
        tensors: list[Tensor] = []
        with torch.no_grad():
            for name, leaf in host_facts.batch_leaves(s.batch):
                if (tensor := host_facts.as_tensor(leaf)) is None:
                    entries.append(Entry(name, host_facts.plain_text(leaf), ()))
                elif isinstance(leaf, Tensor):
                    entries.append(sums.add(name, tensor))
                    tensors.append(leaf)
                else:  # the bytes of an array
                    entries.append(
                        dataclasses.replace(sums.add(name, tensor), kind=f"{leaf.dtype} {leaf.shape}")
                    )
            if field == "fetched":
                current.samples = [sums.add_samples(each) for each in tensors if _has_samples(each, tensors)]
        setattr(current, field, entries)

    def _start_forward(self, s: Any) -> None:
        """Hook the modules, if their outputs are requested. A compiled model cannot be hooked in one step."""
        if not self.details or self._is_updating or self.run.options.compile:
            return
        seen: dict[str, int] = {}

        def digest_output(name: str, outputs: Any) -> None:
            seen[name] = seen.get(name, 0) + 1
            label = name if seen[name] == 1 else f"{name} (call {seen[name]})"
            with torch.no_grad():
                found = [
                    self._record.sums.add(place, leaf)
                    for place, leaf in host_facts.batch_leaves(outputs, "output")
                    if isinstance(leaf, Tensor)
                ]
            self._record.batches[-1].modules.append((label, found))

        for name, module in s.module.named_modules():
            if name:
                self._hooks.append(
                    module.register_forward_hook(
                        lambda module, inputs, outputs, name=name: digest_output(name, outputs)
                    )
                )

    def _end_forward(self, s: Any) -> None:
        self._remove_hooks()
        if not self._is_updating:
            self._record.random["loss"] = host_facts.random_streams(s.device)

    def _remove_hooks(self) -> None:
        while self._hooks:
            self._hooks.pop().remove()

    def _loss(self, s: Any) -> None:
        """Read the loss of the user, before a hook may replace it."""
        if not self._is_updating and isinstance(loss := s.current.live_loss, Tensor) and self._record.batches:
            self._record.batches[-1].loss = self._add_loss(loss)
        elif not self._is_updating and self._record.batches:
            self._record.batches[-1].loss = None

    def _replaced_loss(self, s: Any) -> None:
        if not self._is_updating and isinstance(loss := s.current.live_loss, Tensor) and self._record.batches:
            self._record.batches[-1].used_loss = self._add_loss(loss)

    def _add_loss(self, loss: Tensor) -> int | None:
        return self._record.sums.add_number(loss) if loss.numel() == 1 and not loss.is_complex() else None

    def _gradients(self, s: Any) -> None:
        """Read the gradients of the window, as the backward pass of its last batch has left them."""
        if not self._is_updating and getattr(self.run.step, "is_last", True):
            with torch.no_grad():
                self._record.sets["gradients"] = self._record.sums.add_all(_gradients_of(s.module))

    def _start_update(self, s: Any) -> None:
        """Read what the optimizer uses: clipped gradients, learning rates and hyper-parameters."""
        self._is_updating = True
        number, optimizer = s.optimizer_idx, s.optimizer
        named = host_facts.parameters_of(optimizer, self._names)
        with torch.no_grad():
            self._put("used", self._record.sums.add_all((name, each.grad) for name, each in named))
            self._put("rates", self._record.sums.add_all(host_facts.device_settings(number, optimizer)))
        self._record.settings.setdefault("settings", {}).update(
            host_facts.optimizer_settings(number, optimizer)
        )

    def _end_update(self, s: Any) -> None:
        self._is_updating = False

    def _updated(self, s: Any) -> None:
        """Read the weights after the optimizer, before the hooks of this event."""
        self._is_updating = False
        named = host_facts.parameters_of(s.optimizer, self._names)
        with torch.no_grad():
            self._put("updated", self._record.sums.add_all(named))
        self._record.random["update"] = host_facts.random_streams(s.device)

    def _put(self, field: str, entries: Iterable[Entry]) -> None:
        """Add the tensors of one optimizer; a later update of the same batch replaces an earlier one."""
        known = {each.name: each for each in self._record.sets.get(field, ())}
        known.update({each.name: each for each in entries})
        self._record.sets[field] = list(known.values())

    def _skipped(self, s: Any) -> None:
        self._is_updating = False
        self._record.head["skipped"] = s.reason


def loss_text(bits: int) -> str:
    """Return the bits of a loss as text; JSON has neither NaN nor all digits."""
    return f"{bits % 2**64:016x}"


def _gradients_of(module: nn.Module) -> Iterable[tuple[str, Tensor | None]]:
    return [(name, each.grad) for name, each in module.named_parameters() if each.requires_grad]


def _has_samples(tensor: Tensor, tensors: list[Tensor]) -> bool:
    """Return whether the rows of a tensor are the samples of the batch, few enough to digest each."""
    return (
        type(tensor) is Tensor
        and tensor.layout is torch.strided
        and not tensor.is_nested
        and tensor.dim() > 0
        and len(tensor) == next(len(each) for each in tensors if each.dim() > 0 and not each.is_nested)
        and 1 < len(tensor) <= MOST_SAMPLES
        and tensor.numel() * max(1, tensor.element_size() // 4) * (2 if tensor.is_complex() else 1)
        <= WIDTH * len(tensor)
    )


class BatchRecord:
    """One batch of a step; with gradient accumulation a step has several."""

    def __init__(self) -> None:
        self.fetched: list[Entry] = []
        """As the loader returned it."""
        self.batch: list[Entry] = []
        """On its device, after the hooks of on_train_batch_start."""
        self.sample_ids: list[Any] | None = None
        """The indices of its samples, if they are known."""
        self.samples: list[tuple[int, ...]] = []
        """The sums of every sample, for each tensor."""
        self.modules: list[tuple[str, list[Entry]]] = []
        """The outputs of modules in the order of their calls."""
        self.loss: int | None = None
        self.used_loss: int | None = None
        """The loss that was differentiated, which a hook may have replaced."""


class StepRecord:
    """Everything that was read of one step, before the sums are known."""

    def __init__(self, sums: Sums) -> None:
        self.sums = sums
        self.head: dict[str, Any] = {}
        self.batches: list[BatchRecord] = []
        self.sets: dict[str, list[Entry]] = {}
        self.settings: dict[str, dict[str, str]] = {}
        self.random: dict[str, dict[str, str]] = {}

    @property
    def is_complete(self) -> bool:
        """Whether the step has ended: the weights were updated, or the update was skipped."""
        return bool(self.batches) and ("updated" in self.sets or "skipped" in self.head)

    def data(self, details: bool) -> dict[str, Any]:
        """Read the sums and return the record as plain values. details: also every tensor by itself."""
        sums = self.sums.read()
        single = {
            name: {each.name: each.digest(sums) for each in entries} for name, entries in self.sets.items()
        }
        made: dict[str, Any] = {**self.head, "random": _changed_streams(self.random)}
        made["batches"] = [self._batch(each, sums) for each in self.batches]
        made |= {name: text_digest(sorted(each.items())) for name, each in single.items() if each}
        made["values"] = self.settings
        if details:
            made["single"] = {name: each for name, each in single.items() if each}
        return made

    def _batch(self, batch: BatchRecord, sums: list[int]) -> dict[str, Any]:
        made: dict[str, Any] = {}
        for field in ("fetched", "batch"):
            leaves = {each.name: each.digest(sums) for each in getattr(batch, field)}
            digest = text_digest(sorted(leaves.items()))
            if field == "batch" and digest == made["fetched"]:
                continue  # the usual case: neither the transfer nor a hook has changed it
            made[field] = digest
            if len(leaves) <= MOST_PARTS:
                made[f"{field} parts"] = leaves
        if batch.sample_ids is not None:
            made["sample_ids"] = text_digest(*batch.sample_ids)
        if batch.samples:
            rows = zip(*batch.samples, strict=True)
            made["samples"] = [text_digest(*[sums[place] for place in row])[:8] for row in rows]
        if batch.loss is not None:
            made["loss"] = loss_text(sums[batch.loss])
        if (
            batch.used_loss is not None
            and batch.loss is not None
            and sums[batch.used_loss] != sums[batch.loss]
        ):
            made["used loss"] = loss_text(sums[batch.used_loss])
        if batch.modules:
            made["modules"] = [
                [name, text_digest(*[each.digest(sums) for each in entries])]
                for name, entries in batch.modules
            ]
        return made


def _changed_streams(random: dict[str, dict[str, str]]) -> dict[str, dict[str, str]]:
    """Return the random streams at each moment, without those that are as at the moment before."""
    made: dict[str, dict[str, str]] = {}
    known: dict[str, str] = {}
    for moment, streams in random.items():
        made[moment] = {name: each for name, each in streams.items() if known.get(name) != each}
        known.update(streams)
    return made
