"""Log statistics of the activations of modules, or capture the tensors."""

from __future__ import annotations

import contextlib
import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Annotated, Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from hookline.engine.checks import Above, Count, Several, as_tuple, checked_parameters
from hookline.engine.hook import Hook
from hookline.hooks._settings import as_patterns, matching_names
from hookline.hooks._statistics import between_graphs, local_values, tensors_in
from hookline.util.errors import HookError

log = logging.getLogger("hookline")
STATISTICS: dict[str, Callable[[Tensor], Tensor]] = {
    "mean": lambda values: values.mean(),
    "std": lambda values: values.std(correction=0),
    "absmax": lambda values: values.abs().amax(),
    "zeros": lambda values: (values == 0).to(values.dtype).mean(),
    "norm": torch.linalg.vector_norm,
}
"""Statistics by name. `zeros` is the fraction of values that are exactly 0: dead units after a ReLU."""


class ActivationMonitor(Hook):
    """Logs statistics of the outputs of modules every n steps as `activations/<module>/<statistic>`.

    Its forward hooks are on the modules only during that forward pass, so the steps between cost nothing. A
    report reads the device once.

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
        """Choose the modules, the statistics and the interval.

        modules: names of modules, parts of them, or patterns such as 'blocks.*.mlp'.
        every: optimizer steps between reports, each of the first batch of an accumulation window.
        statistics: any of 'mean', 'std', 'absmax', 'zeros', 'norm'; may be empty.
        capture: also copy the activations to the CPU, into `captured`.
        max_mb: megabytes of one capture; a warning names the activations that exceed it. keep: number of
        captures to keep.
        """
        super().__init__(name)
        self.modules = as_patterns(
            "ActivationMonitor: modules", list(as_tuple("ActivationMonitor: modules", modules, "names"))
        )
        self.statistics = tuple(statistics)
        self.every, self.capture, self.max_mb = every, capture, max_mb
        self.captured: deque[tuple[int, dict[str, Tensor]]] = deque(maxlen=keep)
        """Pairs of a step and its activations by name, on the CPU, the newest last."""
        self.latest: dict[str, float] = {}
        """The newest statistics by the names of their metrics."""
        self._watching: contextlib.ExitStack = contextlib.ExitStack()
        self._looked_at = -1
        self._numbers: dict[str, Tensor] = {}
        self._seen: dict[str, Tensor] = {}

    # ---- in a run ------------------------------------------------------------------------------------------

    def on_train_start(self, trainer: Any, module: nn.Module) -> None:
        options = getattr(trainer.options, "compile", False)
        if isinstance(options, dict) and options.get("fullgraph"):
            raise HookError(
                "ActivationMonitor cannot observe a model compiled with fullgraph=True: its hooks on the "
                "modules break the graph. Leave out fullgraph or the monitor."
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

    on_validation_start = on_train_epoch_end = on_before_backward  # after a step without a loss

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
        values = local_values(value)
        if self.statistics and value.is_floating_point() and value.numel() and not value.is_meta:
            values = values.float() if values.dtype in (torch.float16, torch.bfloat16) else values
            for statistic in self.statistics:
                self._numbers[f"activations/{name}/{statistic}"] = STATISTICS[statistic](values).float()
        if self.capture:
            self._keep(self._seen, name, value)

    # ---- outside a run -------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def watch(self, model: nn.Module) -> Iterator[dict[str, Tensor]]:
        """Fill a dictionary with the activations of the model by name, copied to the CPU, within a block.

        A second call of a module overwrites its activations. The block removes its hooks, also after an
        error.
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
        return matching_names(
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
            for part, value in tensors_in(name, output):  # `attention`, or `attention.0` of several
                look(part, value)

    return between_graphs(listen)
