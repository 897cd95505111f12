"""Log peaks of memory; describe an out-of-memory error: the module, the step and what holds the memory."""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any

import torch
from torch import Tensor, nn

from hookline.data.batch import describe_batch
from hookline.distributed.sharded_norms import local_part
from hookline.engine.checks import Count, checked_parameters
from hookline.engine.hook import Hook
from hookline.engine.slots import failure_source
from hookline.hooks._failed_module import FailedPlace, find_failed_place, live_tensors
from hookline.hooks._memory import GB, allocator_counters, peak_process_memory, take_peaks
from hookline.hooks._statistics import tensors_in
from hookline.util.memory import out_of_memory
from hookline.util.text import list_some, mask_text

MB = 1e6
PHASE_EVENTS = ("on_train_batch_start", "on_before_backward", "on_after_backward")
FOLDER = "memory"
ITSELF = "the module itself"
VERSION = 1
log = logging.getLogger("hookline")


class MemoryMonitor(Hook):
    """Logs `memory/peak_allocated_gb` and `memory/peak_reserved_gb` of the last n steps, or on the CPU
    `memory/peak_process_gb` of the whole process. With several ranks it is the largest value of all ranks.

    If memory runs out, it writes `memory/out-of-memory-step-N-rank-R.json` into the run's directory, and adds
    to the error which module and batch it was and what helps. Before that it costs nothing: the module is
    found from the traceback, the autograd graph and the gradients.
    """

    tier = "builtin"
    observes = True
    on_error = "warn"

    @checked_parameters
    def __init__(
        self,
        every: Annotated[int, Count(1)] = 50,
        phases: bool = False,
        top: Annotated[int, Count(1)] = 20,
        name: str | None = None,
    ) -> None:
        """Choose the reports.

        every: optimizer steps between reports; the peaks start again at each.
        phases: also log `memory/forward_peak_gb`, `backward_peak_gb` and `update_peak_gb` of the reported
        step. Only an accelerator has them.
        top: how many modules and tensors the file lists, the largest first.
        """
        super().__init__(name)
        self.every, self.phases, self.top = every, phases, top
        self.snapshot: Path | None = None
        """The file that describes the out-of-memory error; None if there was none."""
        self._peaks = (0, 0)
        self._of_phases: dict[str, int] = {}
        if not phases:  # a hook does not listen to an event whose method is None
            for event in PHASE_EVENTS:
                setattr(self, event, None)

    # ---- peaks ---------------------------------------------------------------------------------------------

    def on_train_start(self, device: Any, rank: int) -> None:
        self._peaks, self._of_phases = (0, 0), {}
        if take_peaks(device) is None and self.phases and rank == 0:
            log.warning(
                "MemoryMonitor: phases=True has no effect, because the allocator of %s has no peaks.", device
            )

    def on_train_batch_start(self, step: int, device: Any) -> None:
        if (step + 1) % self.every == 0:
            self._take(device)  # of earlier steps, or of the update of this one's last batch

    def on_before_backward(self, step: int, device: Any) -> None:
        if (step + 1) % self.every == 0:
            self._take(device, "forward")

    def on_after_backward(self, step: int, device: Any) -> None:
        if (step + 1) % self.every == 0:
            self._take(device, "backward")

    def on_step_end(self, trainer: Any, step: int, device: Any) -> None:
        if step % self.every:
            return
        if self._take(device, "update" if self.phases else ""):
            allocated, reserved = self._peaks
            peaks = {"peak_allocated_gb": allocated, "peak_reserved_gb": reserved}
            peaks |= {f"{phase}_peak_gb": size for phase, size in self._of_phases.items()}
        else:
            size = peak_process_memory()
            peaks = {} if size is None else {"peak_process_gb": size}
        self._peaks, self._of_phases = (0, 0), {}
        trainer.log_dict({f"memory/{key}": size / GB for key, size in peaks.items()}, reduce="max")

    def _take(self, device: Any, phase: str = "") -> bool:
        """Add the peaks since the last call to those of the interval; return whether there are any."""
        peaks = take_peaks(device)
        if peaks is None:
            return False
        self._peaks = (max(self._peaks[0], peaks[0]), max(self._peaks[1], peaks[1]))
        if phase:
            self._of_phases[phase] = max(self._of_phases.get(phase, 0), peaks[0])
        return True

    # ---- out of memory -------------------------------------------------------------------------------------

    def on_exception(
        self, exception: BaseException, trainer: Any, module: nn.Module, optimizers: Any, state: Any
    ) -> None:
        error = out_of_memory(exception)
        if error is None:
            return
        place = FailedPlace("", [], "")
        with _no_matter_what("the place of the failure"):
            place = find_failed_place(error, module, optimizers)
        with _no_matter_what("the description of the failure"):
            exception.add_note(_note(place, error, module, trainer, state))
        with _no_matter_what("the snapshot"):
            self.snapshot = self._write(place, error, trainer, module, optimizers, state)
            exception.add_note(f"What holds the memory: {self.snapshot}")

    def _write(
        self,
        place: FailedPlace,
        error: BaseException,
        trainer: Any,
        module: nn.Module,
        optimizers: Any,
        state: Any,
    ) -> Path:
        folder = Path(trainer.run_dir) / FOLDER
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"out-of-memory-step-{state.step}-rank-{state.rank}.json"
        device = torch.device(state.device)
        source, names = failure_source(error), [name or ITSELF for name in place.modules]
        sections: dict[str, Callable[[], Any]] = {
            "batch": lambda: describe_batch(state.batch),
            "allocator": lambda: allocator_counters(device),
            "free_and_total_bytes": lambda: (
                None if device.type in ("cpu", "meta") else list(torch.accelerator.get_memory_info(device))
            ),
            "peak_process_bytes": peak_process_memory,
            "modules": lambda: _by_module(module, optimizers)[: self.top],
            "tensors": lambda: _largest_tensors(module, optimizers, device)[: self.top],
            "memory_summary": lambda: _of_backend(device, "memory_summary"),
        }
        data: dict[str, Any] = {
            "version": VERSION,
            "error": type(error).__name__,
            "message": mask_text(str(error)),
            "stage": state.stage,
            "step": state.step,
            "epoch": state.epoch,
            "batch_idx": state.batch_idx,
            "rank": state.rank,
            "device": str(device),
            "phase": place.phase,
            "module": names[0] if len(names) == 1 else None,
            "possible_modules": names,
            "where": place.where,
            "hook": None if source is None else source.name,
        }
        for name, read in sections.items():
            try:
                data[name] = read()
            except Exception as problem:  # short of memory, or a broken device: keep the other sections
                data[name] = {"problem": f"{type(problem).__name__}: {problem}"}
        path.write_text(json.dumps(data, indent=1, default=str), encoding="utf-8")
        with _no_matter_what("the allocator's snapshot"):
            if (blocks := _of_backend(device, "_snapshot")) is not None:
                with path.with_name(f"{path.stem}-allocator.json").open("w", encoding="utf-8") as file:
                    json.dump(blocks, file, default=str)  # torch's format, but not as a pickle
        return path


@contextlib.contextmanager
def _no_matter_what(what: str) -> Iterator[None]:
    """Log an error instead of raising it, because it must not replace the error of the run."""
    try:
        yield
    except Exception as problem:
        log.warning("MemoryMonitor: %s is missing: %s: %s", what, type(problem).__name__, problem)


# ---- the note of the error ---------------------------------------------------------------------------------


def _note(place: FailedPlace, error: BaseException, module: nn.Module, trainer: Any, state: Any) -> str:
    """Return where the memory ran out, the batch, and what helps."""
    known = dict(module.named_modules())
    names = [f"{name or ITSELF} ({type(known.get(name, module)).__name__})" for name in place.modules]
    source = failure_source(error)
    within = f" of {list_some(names, 3).replace(', ', ' or ')}" if names else ""
    who = (
        f"in {source.name}, {source.event}"
        if source is not None
        else f"in the {place.phase or state.stage}{within}"
    )
    hints = _hints(place.phase, trainer, state)
    return (
        f"Out of memory {who}, {state.position}, rank {state.rank} on {state.device}; batch: "
        f"{describe_batch(state.batch)}. What helps: {'; '.join(hints)}."
    )


def _hints(phase: str, trainer: Any, state: Any) -> list[str]:
    """Return what takes less memory, without the options that the run has already."""
    options = getattr(trainer, "options", None)
    hints = ["an optimizer with smaller states"] if phase == "update" else []
    if phase != "update":
        hints.append("a smaller batch, with accumulate_grad_batches for the same effective size")
    if phase in ("forward", "backward") and not getattr(options, "activation_checkpointing", False):
        hints.append("activation_checkpointing=True")
    if "16" not in str(getattr(options, "precision", "")):
        hints.append("precision='bf16-mixed', or 'bf16-true' for weights and optimizer states too")
    hints.append("strategy='fsdp' on several GPUs")
    counters = allocator_counters(state.device)
    reserved = counters.get("reserved_bytes.all.current", 0)
    unused = reserved - counters.get("allocated_bytes.all.current", 0)
    if unused > 0.2 * reserved:  # fragments
        hints.append(
            f"PYTORCH_ALLOC_CONF=expandable_segments:True, because {unused / GB:.1f} GB are reserved but free"
        )
    return hints


# ---- what holds the memory ---------------------------------------------------------------------------------


def _held(module: nn.Module, optimizers: Iterable[Any]) -> Iterator[tuple[str, str, Tensor]]:
    """Yield what each parameter holds: its name, the kind ('parameters', 'gradients', ...) and the tensor."""
    states = [each.state for each in optimizers]
    for name, parameter in module.named_parameters():
        yield name, "parameters", parameter
        if parameter.grad is not None:
            yield name, "gradients", parameter.grad
        for state in states:
            for key, value in tensors_in("", dict(state.get(parameter) or {})):
                yield f"{name} {key.lstrip('.')}", "optimizer", value
    for name, buffer in module.named_buffers():
        yield name, "buffers", buffer


def _by_module(module: nn.Module, optimizers: Iterable[Any]) -> list[dict[str, Any]]:
    """Return the megabytes on this rank that each module holds itself, the largest first."""
    known = dict(module.named_modules())
    sums: dict[str, dict[str, float]] = {}
    for name, kind, tensor in _held(module, optimizers):
        held = sums.setdefault(name.partition(" ")[0].rpartition(".")[0], {})
        held[kind] = held.get(kind, 0.0) + local_part(tensor.detach()).nbytes / MB
    rows = [
        {"module": name, "class": type(known[name]).__name__, "mb": sum(held.values()), **held}
        for name, held in sums.items()
    ]
    return sorted(rows, key=lambda row: -float(row["mb"]))


def _largest_tensors(
    module: nn.Module, optimizers: Iterable[Any], device: torch.device
) -> list[dict[str, Any]]:
    """Return the live tensors on the device, the largest first, each memory once."""
    names = {}
    for name, kind, tensor in _held(module, optimizers):
        names[_memory_of(tensor)] = f"{name} ({kind})"
    rows: dict[Any, dict[str, Any]] = {}
    for tensor in live_tensors():
        where = _memory_of(tensor)
        if where is None or where in rows or tensor.device.type != device.type:
            continue
        rows[where] = {
            "mb": where[1] / MB,
            "name": names.get(where, ""),
            "shape": list(tensor.shape),
            "dtype": str(tensor.dtype).removeprefix("torch."),
            "device": str(tensor.device),
            "in_graph": tensor.grad_fn is not None,
        }
    return sorted(rows.values(), key=lambda row: -float(row["mb"]))


def _memory_of(tensor: Tensor) -> tuple[int, int] | None:
    """Return the address and the size of a tensor's memory; None if it has none of its own."""
    try:
        storage = local_part(tensor.detach()).untyped_storage()
        return storage.data_ptr(), storage.nbytes()
    except (RuntimeError, NotImplementedError, TypeError):  # sparse, fake, or of a subclass without memory
        return None


def _of_backend(device: torch.device, function: str) -> Any:
    """Return `torch.cuda.memory.FUNCTION(device)`, or that of another backend; None if it has none."""
    backend: Any = None if device.type == "cpu" else getattr(torch, device.type, None)
    read = getattr(getattr(backend, "memory", None), function, None)
    return None if read is None else read(device)
