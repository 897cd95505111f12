"""Activations of modules chosen by name: statistics in the log, or the tensors themselves."""

from __future__ import annotations

import contextlib
import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Annotated, Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from hookline.engine.checks import Above, Count, Several, checked_parameters, members
from hookline.engine.hook import Hook
from hookline.hooks._patterns import as_patterns, choose
from hookline.hooks._statistics import between_graphs, plain
from hookline.util.errors import HookError

log = logging.getLogger("hookline")
STATISTICS: dict[str, Callable[[Tensor], Tensor]] = {
    "mean": lambda values: values.mean(),
    "std": lambda values: values.std(correction=0),
    "absmax": lambda values: values.abs().amax(),
    "zeros": lambda values: (values == 0).to(values.dtype).mean(),
    "norm": torch.linalg.vector_norm,
}
"""`zeros` is the share of values that are exactly 0: dead units after a ReLU."""


class ActivationMonitor(Hook):
    """Looks at what modules put out in every n-th training step. Its hooks sit on the modules only during
    that forward pass, so the steps between cost nothing. Logs `activations/<module>/<statistic>` with one
    device read per report.

    Outside a run: `with ActivationMonitor("*.mlp").watch(model) as seen: model(x)` fills `seen` with tensors
    by name.
    """

    tier = "builtin"

    @checked_parameters
    def __init__(
        self,
        modules: str | Iterable[str] = "*",
        every: Annotated[int, Count(1)] = 100,
        statistics: Annotated[str | Iterable[str], Several(STATISTICS)] = ("mean", "std", "absmax", "zeros"),
        capture: bool = False,
        max_mb: Annotated[float, Above(0)] = 256.0,
        keep: Annotated[int, Count(1)] = 1,
        name: str | None = None,
    ) -> None:
        """What to look at, and how often.

        modules: names of modules, parts of them, or patterns such as 'blocks.*.mlp'.
        every: optimizer steps between looks; of an accumulation window it sees the first batch.
        statistics: any of 'mean', 'std', 'absmax', 'zeros', 'norm'; may be empty.
        capture: also copy the activations to the CPU, into `captured`.
        max_mb: at most so many megabytes in one capture; what does not fit is left out and named in a
        warning. keep: how many captures are kept; the oldest is dropped.
        """
        super().__init__(name)
        self.modules = as_patterns(
            "ActivationMonitor: modules", list(members("ActivationMonitor: modules", modules, "names"))
        )
        self.statistics = tuple(statistics)
        self.every, self.capture, self.max_mb = every, capture, max_mb
        self.captured: deque[tuple[int, dict[str, Tensor]]] = deque(maxlen=keep)
        """Pairs of a step and its activations by name, on the CPU, the newest last."""
        self.latest: dict[str, float] = {}
        """The newest statistics, as they are logged."""
        self._watching: contextlib.ExitStack = contextlib.ExitStack()
        self._looked_at = -1
        self._numbers: dict[str, Tensor] = {}
        self._seen: dict[str, Tensor] = {}

    # ---- in a run ------------------------------------------------------------------------------------------

    def on_train_start(self, trainer: Any, module: nn.Module) -> None:
        options = getattr(trainer.options, "compile", False)
        if isinstance(options, dict) and options.get("fullgraph"):
            raise HookError(
                "ActivationMonitor cannot look into a model compiled with fullgraph=True: its hooks on the "
                "modules break the graph. Leave fullgraph out, or the monitor."
            )
        self._choose(module)
        self._looked_at = -1

    def on_train_batch_start(self, module: nn.Module, step: int) -> None:
        if (step + 1) % self.every or step == self._looked_at:
            return
        self._looked_at = step
        self._watching.close()
        self._numbers, self._seen = {}, {}
        self._watching.enter_context(self._attached(module, self._look))

    def on_before_backward(self) -> None:
        self._watching.close()  # the forward pass is over

    def on_validation_start(self) -> None:
        self._watching.close()  # a step without a loss had no backward

    def on_train_epoch_end(self) -> None:
        self._watching.close()

    def on_step_end(self, trainer: Any, step: int) -> None:
        if step != self._looked_at + 1:
            return
        self._watching.close()
        if self._numbers:
            numbers = torch.stack(
                [each.to(next(iter(self._numbers.values())).device) for each in self._numbers.values()]
            )
            self.latest = dict(zip(self._numbers, numbers.tolist(), strict=True))
            self._numbers = {}
            for name, value in self.latest.items():
                trainer.log(name, value)
        if self.capture:
            self.captured.append((step, self._seen))
            self._seen = {}

    def teardown(self) -> None:
        self._watching.close()
        self._numbers, self._seen = {}, {}

    def _look(self, name: str, value: Tensor) -> None:
        values = plain(value)
        if self.statistics and value.is_floating_point() and value.numel() and not value.is_meta:
            values = values.float() if values.dtype in (torch.float16, torch.bfloat16) else values
            for each in self.statistics:
                self._numbers[f"activations/{name}/{each}"] = STATISTICS[each](values).float()
        if self.capture:
            self._keep(self._seen, name, value)

    # ---- by itself -----------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def watch(self, model: nn.Module) -> Iterator[dict[str, Tensor]]:
        """Within the block, calls of the model fill a dictionary with its activations by name, copied to the
        CPU.

        A module that is called again overwrites what it put out before. The hooks are gone after the block,
        whatever happens.
        """
        seen: dict[str, Tensor] = {}
        with self._attached(model, lambda name, value: self._keep(seen, name, value)):
            yield seen

    @contextlib.contextmanager
    def _attached(self, model: nn.Module, look: Callable[[str, Tensor], None]) -> Iterator[None]:
        handles: list[RemovableHandle] = []
        try:
            for name in self._choose(model):
                handles.append(model.get_submodule(name).register_forward_hook(_listener(name, look)))
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _choose(self, model: nn.Module) -> list[str]:
        return choose(
            "ActivationMonitor: modules", self.modules, [name for name, _ in model.named_modules() if name]
        )

    def _keep(self, seen: dict[str, Tensor], name: str, value: Tensor) -> None:
        room = self.max_mb * 1e6 - sum(each.nbytes for key, each in seen.items() if key != name)
        if value.nbytes <= room:
            seen[name] = value.detach().to("cpu", copy=True)
        else:
            log.warning(
                "ActivationMonitor left out %s (%.1f MB): max_mb=%g", name, value.nbytes / 1e6, self.max_mb
            )


def _listener(name: str, look: Callable[[str, Tensor], None]) -> Callable[..., None]:
    def listen(module: nn.Module, inputs: Any, output: Any) -> None:
        with torch.no_grad():
            for part, value in _parts(name, output):
                look(part, value)

    return between_graphs(listen)


def _parts(name: str, output: Any) -> Iterator[tuple[str, Tensor]]:
    """The tensors that a module put out, under names such as `attention`, or `attention.0` if there are
    several.
    """
    if isinstance(output, Tensor):
        yield name, output
        return
    pairs = (
        output.items()
        if isinstance(output, dict)
        else enumerate(output)
        if isinstance(output, list | tuple)
        else ()
    )
    for key, each in pairs:
        yield from _parts(f"{name}.{key}", each)
