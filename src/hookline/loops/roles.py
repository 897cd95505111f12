"""What a run asks of the parts that are made with it: their modules import `Run`, so `Run` knows them by
these protocols.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor

from hookline.errors import Signal

if TYPE_CHECKING:
    from hookline.checkpoint.saves import Saved


class ClearsGradients(Protocol):
    """The update of a step."""

    def clear_gradients(self) -> None:
        """Clear the gradients of the finished step."""
        ...


class Step(Protocol):
    """What a training batch goes through: `TrainStep`, or a class that replaces its methods."""

    @property
    def backward(self) -> Any:
        """Differentiates a loss, with the events around it."""
        ...

    @property
    def update(self) -> ClearsGradients:
        """Calls every optimizer."""
        ...

    def __call__(self, batches_left: int | None) -> Signal | None:
        """Train on `state.batch`."""
        ...

    def close_window(self) -> None:
        """Update on what an accumulation window has when it ends early."""
        ...

    def settle_failed_batch(self) -> None:
        """Before a save after a failure: count a batch whose update was made."""
        ...


class GradientAgreement(Protocol):
    """What ranks agree on for each accumulation window: `Together`."""

    is_clear: bool
    all_or_none: bool

    def begin_batch(self, last: bool) -> None:
        """Begin a batch; last: of its window."""
        ...

    def skip_batch(self, last: bool) -> None:
        """Leave a batch out."""
        ...

    def clear_gradients(self) -> None:
        """Clear the gradients of the finished step."""
        ...

    def agree_on(self, loss: Tensor | None, last: bool) -> Tensor | None:
        """Return the loss that this rank differentiates."""
        ...

    def settle(self) -> float:
        """Return what the gradients are multiplied by."""
        ...

    def everywhere(self, flag: bool) -> bool:
        """Return whether a flag is set on every rank."""
        ...


class FailureMonitor(Protocol):
    """Reports the other ranks' failures, and this one's to them: `Peers`."""

    failure: Any
    nested: Any

    def tell(self, error: BaseException) -> None:
        """Report this rank's failure."""
        ...

    def post(self, text: str, failed: bool = True) -> None:
        """Report a text to the other ranks."""
        ...

    def ask_for(self, number: int, asks: int) -> None:
        """Ask the other ranks for a validation."""
        ...

    def assemble(self, where: str) -> None:
        """Wait for all ranks."""
        ...

    def raise_failure(self) -> None:
        """Raise if another rank has failed."""
        ...


class ControlSocket(Protocol):
    """Listens to what is asked of a fit from outside: `Control`."""

    def open(self) -> None:
        """Begin to listen."""
        ...

    def defer(self, number: str, done: dict[str, Any]) -> None:
        """Answer a request later."""
        ...

    def report_saved(self, saved: Saved) -> None:
        """Answer the requests for a checkpoint."""
        ...


class Graphs(Protocol):
    """The graphs of a compiled training step: `CompiledStep`."""

    def compose(self) -> None:
        """Choose what each graph holds, for the listeners that are there."""
        ...

    def text(self) -> str:
        """Return the graphs in words."""
        ...

    def close(self) -> None:
        """Put torch's options back."""
        ...


class FirstBatch(Protocol):
    """Looks at the first batch after a save or a resume: `FirstBatches`."""

    waiting: Any

    def fetched(self) -> None:
        """A batch was fetched."""
        ...


class BackgroundWriter(Protocol):
    """Writes checkpoints in the background: `BackgroundSaver`."""

    def start(self, contents: Any, path: Any, about: Any, on_done: Any, staging: Any = None) -> None:
        """Copy the contents and write them in a thread."""
        ...

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until nothing is being written."""
        ...

    def close(self) -> None:
        """Wait for what is being written, and free the memory."""
        ...
