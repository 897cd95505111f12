"""Spies: hooks, a module, a data module and a strategy that override everything the table lets them hear.

The classes are made from the table's rows, so an event added there is overridden here. What they hear is recorded by
`hookline.Recorder`, as any user could do; `state_dict` and `load_state_dict` are no events and are noted by hand.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from tiny import Net, batches, quiet
from torch.optim import SGD
from torch.optim.lr_scheduler import ReduceLROnPlateau, StepLR

from hookline import DataModule, Hook, Recorder
from hookline.distributed.base import SingleDevice
from hookline.engine.events import EVENT_ROWS, Event
from hookline.engine.recorder import Call

Deed = Callable[[Any], Any]
"""What a spy does besides listening, given the live state; what it returns is the spy's answer."""

RETURN_NONE = object()
"""The answer of a deed that stands in for an action which returns None."""


class Notes:
    """Writes into the record what is no event."""

    scene: Any = None

    def note(self, event: str) -> None:
        s = self.scene.trainer.state
        self.scene.recorder.calls.append(
            Call(self.receiver, getattr(self, "name", ""), event, s.epoch, s.batch_idx, s.step)
        )


def method_of(row: Event) -> str:
    """What a listener calls it: where one name stands for two rows (`setup`, also of the strategy), that name."""
    names = {each.name for each in EVENT_ROWS}
    return next((each for each in row.spellings if each in names), row.name)


def heard_by(receiver: str, *, actions: bool) -> dict[str, Event]:
    """The methods that a receiver can override, and their events."""
    return {method_of(row): row for row in EVENT_ROWS if receiver in row.receivers and row.action is actions}


def listening(receiver: str) -> dict[str, Any]:
    """A method for every plain event: it only does what the scene asks of it."""

    def method(event: str) -> Any:
        def heard(self: Any, state: Any) -> Any:
            return self.scene.deed(self, event, state)

        return heard

    return {name: method(event.name) for name, event in heard_by(receiver, actions=False).items()}


def acting(receiver: str, base: type) -> dict[str, Any]:
    """An override for every action: what the scene puts in its place, else what the base class does."""

    def method(event: str) -> Any:
        def act(self: Any, *args: Any) -> Any:
            answer = self.scene.deed(self, event, self.scene.trainer.state)
            if answer is None:
                return getattr(base, event)(self, *args)
            return answer if answer is not RETURN_NONE else None

        return act

    return {name: method(event.name) for name, event in heard_by(receiver, actions=True).items()}


def standing_around() -> dict[str, Any]:
    """A strategy's override of an action is given the action itself."""
    return {name: lambda self, call: call() for name in heard_by("S", actions=True)}


class WatchedNet(Notes, Net):
    """The module under the spies: the real actions, and the state that a checkpoint takes."""

    receiver = "M"

    def training_step(self, batch: Any, batch_idx: int, *rest: Any) -> Any:
        if self.automatic_optimization:
            return super().training_step(batch, batch_idx)
        optimizer = self.optimizers()
        loss = super().training_step(batch, batch_idx)
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        return loss

    def validation_step(self, batch: Any, batch_idx: int, *rest: Any) -> Any:
        return super().validation_step(batch, batch_idx)

    def test_step(self, batch: Any, batch_idx: int, *rest: Any) -> Any:
        return super().test_step(batch, batch_idx)

    def predict_step(self, batch: Any, batch_idx: int, *rest: Any) -> Any:
        return super().predict_step(batch, batch_idx)

    def configure_hooks(self) -> Any:
        return self.scene.hooks_of_the_module

    def configure_optimizers(self) -> Any:
        return self.scene.optimizers(self)

    def train_dataloader(self) -> Any:
        return self.scene.loader("train")

    def val_dataloader(self) -> Any:
        return self.scene.loader("val")

    def on_validation_model_eval(self) -> None:
        self.eval()

    def on_validation_model_train(self) -> None:
        self.train()

    on_test_model_eval = on_predict_model_eval = on_validation_model_eval
    on_test_model_train = on_predict_model_train = on_validation_model_train

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        self.note("state_dict")
        return super().state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        self.note("load_state_dict")
        return super().load_state_dict(*args, **kwargs)


class WatchedState(Notes):
    """The state of a hook or a data module."""

    def state_dict(self) -> dict[str, Any]:
        self.note("state_dict")
        return {"kept": 1}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert state == {"kept": 1}
        self.note("load_state_dict")


class WatchedData(WatchedState, DataModule):
    """The data module under the spy."""

    receiver = "D"

    def train_dataloader(self) -> Any:
        return self.scene.loader("train")

    def val_dataloader(self) -> Any:
        return self.scene.loader("val")

    def test_dataloader(self) -> Any:
        return self.scene.loader("test")

    def predict_dataloader(self) -> Any:
        return self.scene.loader("predict")


SpyHook = type("SpyHook", (WatchedState, Hook), {"receiver": "H", **listening("H")})
SpyModule = type("SpyModule", (WatchedNet,), {**listening("M"), **acting("M", WatchedNet)})
SpyData = type("SpyData", (WatchedData,), {**listening("D"), **acting("D", WatchedData)})
SpyStrategy = type(
    "SpyStrategy", (Notes, SingleDevice), {"receiver": "S", **listening("S"), **standing_around()}
)


def stepped_by_epoch(module: Any) -> Any:
    optimizer = SGD(module.parameters(), lr=0.1)
    return {"optimizer": optimizer, "lr_scheduler": StepLR(optimizer, 1)}


def stepped_by_step(module: Any) -> Any:
    optimizer = SGD(module.parameters(), lr=0.1)
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": StepLR(optimizer, 1), "interval": "step"}}


def stepped_on_metric(module: Any) -> Any:
    optimizer = SGD(module.parameters(), lr=0.1)
    return {
        "optimizer": optimizer,
        "lr_scheduler": {"scheduler": ReduceLROnPlateau(optimizer), "monitor": "val/loss"},
    }


class Scene:
    """A trainer with spies everywhere, and one record of what they hear. `does` maps `'WHO EVENT'` to a deed."""

    def __init__(
        self,
        hooks: Iterable[str] = ("plain", "monitor"),
        does: dict[str, Deed] | None = None,
        *,
        from_module: Iterable[str] = (),
        batches_of: dict[str, list[int]] | None = None,
        datamodule: bool = True,
        automatic: bool = True,
        optimizers: Callable[[Any], Any] = stepped_by_epoch,
        **options: Any,
    ) -> None:
        self.does = does or {}
        self.batches_of = {"train": [2], "val": [1], "test": [2], "predict": [2], **(batches_of or {})}
        self.optimizers = optimizers
        self.module, self.strategy = SpyModule(), SpyStrategy(torch.device("cpu"))
        self.data = SpyData() if datamodule else None
        self.module.automatic_optimization = automatic
        self.hooks_of_the_module = [self._hook(name) for name in from_module]
        own = [self._hook(name) for name in hooks]
        options = {"num_sanity_val_steps": 1, "log_every_n_steps": 1, **options}
        self.trainer = quiet(
            hooks=own, strategy=self.strategy, **options
        )  # without `checkpoints/last`: the recordings of other trainers have no such save
        self.recorder = Recorder(self.trainer)
        for spy in (self.module, self.strategy, self.data):
            if spy is not None:
                spy.scene = self

    def _hook(self, name: str) -> Any:
        hook = SpyHook(name)
        hook.scene = self
        hook.tier = "user" if name.startswith(("plain", "from")) else "monitor"
        return hook

    def loader(self, kind: str) -> Any:
        """What a `*_dataloader` returns: one loader, or several."""
        loaders = [torch.utils.data.DataLoader(batches(n), batch_size=None) for n in self.batches_of[kind]]
        return loaders if len(loaders) > 1 else loaders[0]

    def deed(self, spy: Any, event: str, state: Any) -> Any:
        who = {"M": "module", "D": "datamodule", "S": "strategy"}.get(spy.receiver) or spy.name
        deed = self.does.get(f"{who} {event}")
        return deed(state) if deed is not None else None

    def run(self, verb: str = "fit", *loaders: Any, **arguments: Any) -> list[Call]:
        """Do the verb, which may fail as the scene wants it to, and return everything that was called."""
        given = {"datamodule": self.data} if self.data is not None else {}
        with self.recorder:
            getattr(self.trainer, verb)(self.module, *loaders, **given, **arguments)
        return self.recorder.calls
