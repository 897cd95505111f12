"""Lightning's diagrams of the order of hooks, as its page draws them: read line by line, and compared with what a run calls."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tiny import batches
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from hookline.distributed import SingleDevice
from hookline.interop.lightning import Callback, LightningDataModule, LightningModule, Trainer

FIT = """\
trainer.fit()
│
├── setup(stage="fit")
│   ├── [LightningDataModule]
│   ├── [Callbacks]
│   ├── [LightningModule]
│   ├── [LightningModule.configure_shared_model()]
│   ├── [LightningModule.configure_model()]
│   ├── Strategy.restore_checkpoint_before_setup
│   │   ├── [LightningModule.on_load_checkpoint()]
│   │   ├── [LightningModule.load_state_dict()]
│   │   ├── [LightningDataModule.load_state_dict()]
│   │   ├── [Callbacks.on_load_checkpoint()]
│   │   └── [Callbacks.load_state_dict()]
│   └── [Strategy]
│
├── on_fit_start()
│   ├── [Callbacks]
│   └── [LightningModule]
│
├── Strategy.restore_checkpoint_after_setup
│   ├── [LightningModule.on_load_checkpoint()]
│   ├── [LightningModule.load_state_dict()]
│   ├── [LightningDataModule.load_state_dict()]
│   ├── [Callbacks.on_load_checkpoint()]
│   └── [Callbacks.load_state_dict()]
│
├── on_sanity_check_start()
│   ├── [Callbacks]
│   ├── [LightningModule]
│   └── [Strategy]
│   ├── on_validation_start()
│   │   ├── [Callbacks]
│   │   ├── [LightningModule]
│   │   └── [Strategy]
│   ├── on_validation_epoch_start()
│   │   ├── [Callbacks]
│   │   ├── [LightningModule]
│   │   └── [Strategy]
│   │   ├── [for each validation batch]
│   │   │   ├── on_validation_batch_start()
│   │   │   │   ├── [Callbacks]
│   │   │   │   ├── [LightningModule]
│   │   │   │   └── [Strategy]
│   │   │   └── on_validation_batch_end()
│   │   │       ├── [Callbacks]
│   │   │       ├── [LightningModule]
│   │   │       └── [Strategy]
│   │   └── [end validation batches]
│   ├── on_validation_epoch_end()
│   │   ├── [Callbacks]
│   │   ├── [LightningModule]
│   │   └── [Strategy]
│   └── on_validation_end()
│       ├── [Callbacks]
│       ├── [LightningModule]
│       └── [Strategy]
├── on_sanity_check_end()
│   ├── [Callbacks]
│   ├── [LightningModule]
│   └── [Strategy]
│
├── on_train_start()
│   ├── [Callbacks]
│   ├── [LightningModule]
│   └── [Strategy]
│
├── [Training Epochs Loop]
│   │
│   ├── on_train_epoch_start()
│   │   ├── [Callbacks]
│   │   └── [LightningModule]
│   │
│   ├── [Training Batches Loop]
│   │   │
│   │   ├── on_train_batch_start()
│   │   │   ├── [Callbacks]
│   │   │   ├── [LightningModule]
│   │   │   └── [Strategy]
│   │   │
│   │   ├── [Forward Pass - training_step()]
│   │   │   └── [Strategy only]
│   │   │
│   │   ├── on_before_zero_grad()
│   │   │   ├── [Callbacks]
│   │   │   └── [LightningModule]
│   │   │
│   │   ├── optimizer_zero_grad()
│   │   │   └── [LightningModule only - optimizer_zero_grad()]
│   │   │
│   │   ├── [Backward Pass - Strategy.backward()]
│   │   │   ├── on_before_backward()
│   │   │   │   ├── [Callbacks]
│   │   │   │   └── [LightningModule]
│   │   │   ├── LightningModule.backward()
│   │   │   └── on_after_backward()
│   │   │       ├── [Callbacks]
│   │   │       └── [LightningModule]
│   │   │
│   │   ├── on_before_optimizer_step()
│   │   │   ├── [Callbacks]
│   │   │   └── [LightningModule]
│   │   │
│   │   ├── [Optimizer Step]
│   │   │   └── [LightningModule only - optimizer_step()]
│   │   │
│   │   └── on_train_batch_end()
│   │       ├── [Callbacks]
│   │       └── [LightningModule]
│   │
│   │   [Optional: Validation during training]
│   │   ├── on_validation_start()
│   │   │   ├── [Callbacks]
│   │   │   ├── [LightningModule]
│   │   │   └── [Strategy]
│   │   ├── on_validation_epoch_start()
│   │   │   ├── [Callbacks]
│   │   │   ├── [LightningModule]
│   │   │   └── [Strategy]
│   │   │   ├── [for each validation batch]
│   │   │   │   ├── on_validation_batch_start()
│   │   │   │   │   ├── [Callbacks]
│   │   │   │   │   ├── [LightningModule]
│   │   │   │   │   └── [Strategy]
│   │   │   │   └── on_validation_batch_end()
│   │   │   │       ├── [Callbacks]
│   │   │   │       ├── [LightningModule]
│   │   │   │       └── [Strategy]
│   │   │   └── [end validation batches]
│   │   ├── on_validation_epoch_end()
│   │   │   ├── [Callbacks]
│   │   │   ├── [LightningModule]
│   │   │   └── [Strategy]
│   │   └── on_validation_end()
│   │       ├── [Callbacks]
│   │       ├── [LightningModule]
│   │       └── [Strategy]
│   │
│   └── on_train_epoch_end() **SPECIAL CASE**
│       ├── [Callbacks - Non-monitoring only]
│       ├── [LightningModule]
│       └── [Callbacks - Monitoring only]
│
├── [End Training Epochs]
│
├── on_train_end()
│   ├── [Callbacks]
│   ├── [LightningModule]
│   └── [Strategy]
│
└── teardown(stage="fit")
    ├── [Strategy]
    ├── on_fit_end()
    │   ├── [Callbacks]
    │   └── [LightningModule]
    ├── [LightningDataModule]
    ├── [Callbacks]
    └── [LightningModule]
"""

TEST = """\
trainer.test()
│
├── setup(stage="test")
│   └── [Callbacks only]
├── on_test_start()
│   ├── [Callbacks]
│   ├── [LightningModule]
│   └── [Strategy]
│
├── [Test Epochs Loop]
│   │
│   ├── on_test_epoch_start()
│   │   ├── [Callbacks]
│   │   ├── [LightningModule]
│   │   └── [Strategy]
│   │
│   ├── [Test Batches Loop]
│   │   │
│   │   ├── on_test_batch_start()
│   │   │   ├── [Callbacks]
│   │   │   ├── [LightningModule]
│   │   │   └── [Strategy]
│   │   │
│   │   └── on_test_batch_end()
│   │       ├── [Callbacks]
│   │       ├── [LightningModule]
│   │       └── [Strategy]
│   │
│   └── on_test_epoch_end()
│       ├── [Callbacks]
│       ├── [LightningModule]
│       └── [Strategy]
│
├── on_test_end()
│   ├── [Callbacks]
│   ├── [LightningModule]
│   └── [Strategy]
└── teardown(stage="test")
    └── [Callbacks only]
"""

PREDICT = """\
trainer.predict()
│
├── setup(stage="predict")
│   └── [Callbacks only]
├── on_predict_start()
│   ├── [Callbacks]
│   ├── [LightningModule]
│   └── [Strategy]
│
├── [Prediction Epochs Loop]
│   │
│   ├── on_predict_epoch_start()
│   │   ├── [Callbacks]
│   │   └── [LightningModule]
│   │
│   ├── [Prediction Batches Loop]
│   │   │
│   │   ├── on_predict_batch_start()
│   │   │   ├── [Callbacks]
│   │   │   └── [LightningModule]
│   │   │
│   │   └── on_predict_batch_end()
│   │       ├── [Callbacks]
│   │       └── [LightningModule]
│   │
│   └── on_predict_epoch_end()
│       ├── [Callbacks]
│       └── [LightningModule]
│
├── on_predict_end()
│   ├── [Callbacks]
│   ├── [LightningModule]
│   └── [Strategy]
└── teardown(stage="predict")
    └── [Callbacks only]
"""


# ---- reading a diagram -------------------------------------------------------------------------------------------

WHO = {
    "[LightningDataModule]": ["data"],
    "[LightningModule]": ["module"],
    "[Strategy]": ["strategy"],
    "[Strategy only]": ["strategy"],
    "[Callbacks]": ["plain", "monitor"],
    "[Callbacks only]": ["plain", "monitor"],
    "[Callbacks - Non-monitoring only]": ["plain"],
    "[Callbacks - Monitoring only]": ["monitor"],
}
ONE_OF_TWO = "configure_shared_model"  # another spelling of configure_model
RESTORED = "restore_checkpoint"  # only in a run that resumes: tests/test_seeds.py


def calls(diagram: str) -> list[str]:
    """`event: who` for each line that says who is called; a line belongs to the nearest event that it is indented under."""
    return list(_calls(diagram))


def _calls(diagram: str) -> Iterator[str]:
    above: list[tuple[int, str]] = []
    for line in diagram.splitlines():
        text = line.lstrip("│├└─ ").removesuffix(" **SPECIAL CASE**")
        column = len(line) - len(line.lstrip("│├└─ "))
        above = [each for each in above if each[0] < column]
        if any(RESTORED in event for _, event in above) or not text or ONE_OF_TWO in text:
            continue
        if text in WHO:
            yield from (f"{above[-1][1]}: {who}" for who in WHO[text])
        elif named := re.match(r"\[?LightningModule(?: only -)?[. ](\w+)\(", text):
            yield f"{named[1]}: module"
        elif named := re.match(r"(?:\[.* - )?([\w.]+)", text):
            above.append((column, named[1]))


# ---- and a run that calls everyone -------------------------------------------------------------------------------

HEARD: list[str] = []


def notes(who: str, events: set[str]) -> dict[str, Any]:
    """A method for each event that only notes that it was called."""

    def method(event: str) -> Any:
        return lambda self, *args: HEARD.append(f"{event}: {who}")

    return {event: method(event) for event in events}


class Model(LightningModule):
    """Notes its actions, and does them."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return F.mse_loss(self.layer(batch[0]), batch[1])

    validation_step = test_step = predict_step = training_step

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def configure_model(self) -> None:
        HEARD.append("configure_model: module")

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        HEARD.append("optimizer_zero_grad: module")
        optimizer.zero_grad()

    def backward(self, loss: Any) -> None:
        HEARD.append("backward: module")
        loss.backward()

    def optimizer_step(
        self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None
    ) -> None:
        HEARD.append("optimizer_step: module")
        optimizer.step(optimizer_closure)


class Data(LightningDataModule):
    """One batch of everything."""

    def train_dataloader(self) -> Any:
        return DataLoader(batches(1), batch_size=None)

    val_dataloader = test_dataloader = predict_dataloader = train_dataloader


class Around(SingleDevice):
    """Notes the forward pass, which goes through it."""

    def training_step(self, call: Any) -> Any:
        HEARD.append("training_step: strategy")
        return call()


def run(verb: str, diagram: str) -> list[str]:
    """What a run calls, of everything that the diagram has anywhere."""
    drawn = {call.partition(": ")[0] for call in calls(diagram)}
    hooks = drawn - {"training_step", "configure_model", "optimizer_zero_grad", "backward", "optimizer_step"}
    by_who = {
        who: {call.partition(": ")[0] for call in calls(diagram) if call.endswith(who)} & hooks
        for who in ("plain", "monitor", "module", "strategy", "data")
    }
    plain, monitor = (
        type(who, (Callback,), {**notes(who, by_who[who]), "tier": tier})()
        for who, tier in (("plain", "user"), ("monitor", "monitor"))
    )
    module = type("M", (Model,), notes("module", by_who["module"]))()
    data = type("D", (Data,), notes("data", by_who["data"]))()
    strategy = type("S", (Around,), notes("strategy", by_who["strategy"]))(torch.device("cpu"))
    HEARD.clear()
    trainer = Trainer(
        callbacks=[plain, monitor],
        strategy=strategy,
        logger=False,
        enable_progress_bar=False,
        max_epochs=1,
        num_sanity_val_steps=1,
        val_check_interval=1,
    )
    getattr(trainer, verb)(module, datamodule=data)
    return [call for call in HEARD if call.partition(": ")[0] in drawn]


@pytest.mark.parametrize(("verb", "diagram"), [("fit", FIT), ("test", TEST), ("predict", PREDICT)])
def test_a_run_is_its_diagram(verb: str, diagram: str) -> None:
    assert run(verb, diagram) == calls(diagram)


def test_the_diagrams_are_read_as_they_are_drawn() -> None:
    read = calls(FIT)
    assert len(read) == 110
    assert read[:6] == [
        "setup: data",
        "setup: plain",
        "setup: monitor",
        "setup: module",
        "configure_model: module",
        "setup: strategy",
    ]
    assert read[-6:] == [
        "on_fit_end: monitor",
        "on_fit_end: module",
        "teardown: data",
        "teardown: plain",
        "teardown: monitor",
        "teardown: module",
    ]
