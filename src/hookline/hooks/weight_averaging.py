"""Average the weights during training, and evaluate with the average."""

from __future__ import annotations

import functools
import weakref
from typing import Annotated, Any, Literal

import torch
from torch import Tensor
from torch.optim.swa_utils import get_ema_multi_avg_fn, get_swa_multi_avg_fn

from hookline.engine.checks import Number, checked_parameters
from hookline.engine.filters import FilterSettings
from hookline.engine.hook import Hook
from hookline.util.errors import OptionError


class WeightAveraging(Hook):
    """Averages the weights while they are trained: exponentially ('ema') or evenly over all updates ('swa').

    Validation, test and prediction use the average, and restore the trained weights bit for bit. A checkpoint
    holds the trained weights as the module's, the average as this hook's state, and which of them evaluations
    use: `load_weights`, `load_from_checkpoint` and `hookline checkpoint export` load those.
    """

    tier = "builtin"
    may_listen = ("on_step_end",)

    @checked_parameters
    def __init__(
        self,
        kind: Literal["ema", "swa"] = "ema",
        decay: Annotated[float, Number(0.0, 1.0)] = 0.999,
        start: int | str | None = None,
        every: int | str = 1,
        buffers: Literal["keep", "average"] = "keep",
        use_for_evaluation: bool = True,
        swap_at_end: bool = False,
        name: str | None = None,
    ) -> None:
        """Choose the kind of average and the steps.

        kind: 'ema' or 'swa'. decay: the weight of the old average at each update, for 'ema'.
        start: when to begin, such as '1000 steps' or '3 epochs'; None: at step 0. every: interval, such as 10
        or '10 steps'. buffers: 'keep' evaluates with the newest buffers (running statistics), 'average'
        averages them too. use_for_evaluation: evaluate with the average. swap_at_end: leave the average in
        the module when the run is over.
        """
        super().__init__(name)
        self.kind, self.decay, self.buffers = kind, decay, buffers
        self.use_for_evaluation, self.swap_at_end = use_for_evaluation, swap_at_end
        self._mix: Any = get_ema_multi_avg_fn(decay) if kind == "ema" else get_swa_multi_avg_fn()  # type: ignore[no-untyped-call]
        self.__dict__["on_step_end"] = FilterSettings(every=every, after=start or None)(
            functools.partial(self._update)
        )
        self.averages: dict[str, Tensor] = {}
        self.updates = 0
        self._stash: dict[str, Tensor] = {}
        """The trained weights, while the module has the average."""
        self._module: Any = lambda: None
        """The averaged module."""
        self._is_loaded = False
        """Whether the average was loaded from a checkpoint, for the module that is evaluated next."""

    def setup(self, stage: str, module: Any, hooks: Any) -> None:
        others = [
            each
            for each in hooks
            if isinstance(each, WeightAveraging) and each is not self and each.use_for_evaluation
        ]
        if self.use_for_evaluation and others:
            raise OptionError(
                "Two WeightAveragings would both put their average into the module to evaluate it: keep "
                "one, and give the others use_for_evaluation=False."
            )
        if stage == "fit":
            self.averages, self.updates, self._stash, self._is_loaded = {}, 0, {}, False
            self._module = weakref.ref(module)

    @torch.no_grad()
    def _update(self, module: Any) -> None:
        live = self._tensors(module)
        if self.updates == 0:
            self.averages = {}
        self._begin_averages(live)
        if self.updates:
            for key in live:
                if self.averages[key].device != live[key].device:  # restored from a checkpoint
                    self.averages[key] = self.averages[key].to(live[key].device)
            for kind in {
                type(each) for each in self.averages.values()
            }:  # where weights are sharded, buffers are not
                keys = [key for key in live if type(self.averages[key]) is kind]
                theirs = [live[key].detach().to(self.averages[key].dtype) for key in keys]
                self._mix([self.averages[key] for key in keys], theirs, self.updates)
        self.updates += 1

    def _begin_averages(self, live: dict[str, Tensor]) -> None:
        """Begin the averages that there are not yet: all of them, or those that a checkpoint left out."""
        for key, value in live.items():
            if key not in self.averages:
                # half precision cannot represent the small steps of an average
                is_half = value.dtype in (torch.float16, torch.bfloat16)
                self.averages[key] = value.detach().to(torch.float32 if is_half else value.dtype).clone()

    def on_checkpoint_load(self, module: Any) -> None:
        if self.updates:
            self._begin_averages(self._tensors(module))

    def _tensors(self, module: Any) -> dict[str, Tensor]:
        """Return the averaged tensors by name."""
        found = {name: each for name, each in module.named_parameters() if each.is_floating_point()}
        if self.buffers == "average":
            found.update((name, each) for name, each in module.named_buffers() if each.is_floating_point())
        return found

    # ---- swapping ------------------------------------------------------------------------------------------

    @torch.no_grad()
    def _swap_in(self, module: Any) -> None:
        if self._is_loaded:
            self._module, self._is_loaded = weakref.ref(module), False
        if self.use_for_evaluation and self.updates and not self._stash and self._module() is module:
            live = {key: value for key, value in self._tensors(module).items() if key in self.averages}
            self._stash = {key: value.detach().clone() for key, value in live.items()}
            for key, value in live.items():
                value.copy_(self.averages[key])

    @torch.no_grad()
    def _swap_out(self) -> None:
        module, stash = self._module(), self._stash
        self._stash = {}
        if module is not None and stash:
            live = self._tensors(module)
            for key, value in stash.items():
                live[key].copy_(value)

    def on_validation_start(self, module: Any) -> None:
        self._swap_in(module)

    on_test_start = on_predict_start = on_validation_start

    def on_validation_end(self) -> None:
        self._swap_out()

    on_test_end = on_predict_end = on_validation_abandoned = on_exception = on_validation_end

    @torch.no_grad()
    def on_fit_end(self, module: Any) -> None:
        if self.swap_at_end and self.updates:
            for key, value in self._tensors(module).items():
                value.copy_(self.averages[key])
            self._module, self._is_loaded = lambda: None, False  # it has the average already

    def weights_replaced(self, module: Any) -> None:
        """Evaluate this module with its own weights: they were loaded from a checkpoint and may be an older
        average.
        """
        if self._module() is module:
            self._module, self._is_loaded = lambda: None, False

    def teardown(self) -> None:
        self._swap_out()
        self._is_loaded = False

    def on_save_checkpoint(self, checkpoint: dict[str, Any], hooks: Any) -> None:
        name = next(each.name for each in hooks.entries() if each.given is self)
        if own := checkpoint.get("hooks", {}).get(name):
            weights = checkpoint["module"]
            # the average of a weight that the checkpoint leaves out is that weight
            averages = {
                key: value
                for key, value in own["averages"].items()
                if isinstance(weights.get(key, value), Tensor)
            }
            checkpoint["hooks"][name] = {**own, "averages": averages}
        if not self.use_for_evaluation:
            checkpoint.setdefault("scored_weights", {"hook": None})
        elif self.updates:
            checkpoint["scored_weights"] = {"hook": name, "state": "averages"}

    def state_dict(self) -> dict[str, Any]:
        return {"updates": self.updates, "averages": dict(self.averages)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.updates, self.averages, self._is_loaded = state["updates"], dict(state["averages"]), True
