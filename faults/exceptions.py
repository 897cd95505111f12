"""An error at every event, from every position: each listener receives it once and is torn down once; the
first error wins.
"""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import torch
from processes import Child
from torch import Tensor, nn
from torch.optim.lr_scheduler import ConstantLR
from training import Settings
from trials import Kind, Outcome, last_lines

from hookline import SKIP_STEP, DataModule, Hook, Module, Trainer
from hookline.engine.events import EVENT_ROWS, Event

POSITIONS = ("first", "middle", "last", "module", "datamodule")
ERRORS = (ValueError, KeyboardInterrupt, StopIteration, SystemExit)
AFTER_THE_END = ("teardown", "strategy_teardown")
"""What fails in these fails after the run's end was reported, so on_exception is not emitted any more."""


def places() -> list[tuple[Event, str]]:
    """Return every event with each object that can fail in it."""
    found = []
    for event in EVENT_ROWS:
        found += [(event, each) for each in POSITIONS[:3] if "H" in event.receivers]
        found += [(event, "module")] * ("M" in event.receivers)
        found += [(event, "datamodule")] * ("D" in event.receivers)
    return found


class Exceptions(Kind):
    """Trials of this kind."""

    def trials(self, share: float) -> list[int]:
        """Return every place, or every n-th."""
        return list(range(0, len(places()), max(1, round(1 / share))))

    def run_trial(self, number: int, folder: Path) -> Outcome:
        """Let one run fail at one event in one place."""
        event, position = places()[number]
        child = Child(
            folder,
            Settings(),
            body=lambda: fail(event, position, ERRORS[(number + self.seed) % len(ERRORS)], folder),
        )
        code = child.wait()
        answer = folder / "answer.json"
        if not answer.exists():
            return Outcome(
                number, wrong=f"{event.name}, {position}: exit code {code}; said: {last_lines(child.said)}"
            )
        wrong = json.loads(answer.read_text())
        wrong = wrong and f"{event.name}, {position}: {wrong}"
        return Outcome(number, resumed=1, exact=int(not wrong), wrong=wrong, note=position)


# ---- who takes part ----------------------------------------------------------------------------------------


class Counts:
    """How often setup, on_exception and teardown were called on an object."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = {"setup": 0, "on_exception": 0, "teardown": 0}

    def setup(self) -> None:
        """Count the set-up."""
        self.calls["setup"] += 1

    def on_exception(self) -> None:
        """Count the failure."""
        self.calls["on_exception"] += 1

    def teardown(self) -> None:
        """Count the teardown."""
        self.calls["teardown"] += 1


class Counting(Counts, Hook):
    """A hook that counts; the last one is a monitor, which runs after the module where that is the rule."""


class Net(Counts, Module):
    """Does everything that has an event."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 1)

    def training_step(self, batch: Tensor) -> Tensor:
        """Return a loss."""
        loss: Tensor = self.layer(batch).square().mean()
        return loss

    validation_step = test_step = predict_step = training_step

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int = 0) -> Any:
        """Return the batch as it is."""
        return batch

    def configure_optimizers(self) -> Any:
        """Return an optimizer with a schedule, so that the schedule is stepped."""
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        return [optimizer], [ConstantLR(optimizer)]


class Loaders:
    """A few batches for everyone."""

    def train_dataloader(self) -> Any:
        """Return the same batches for every stage."""
        return [torch.ones(2, 3)] * 4

    val_dataloader = test_dataloader = predict_dataloader = train_dataloader


class Data(Counts, Loaders, DataModule):
    """Is asked for the batches where there is one."""


class Alone(Loaders, Net):
    """A module without a data module is asked itself."""


class Ask(Hook):
    """Brings about what does not happen by itself: a save, a skipped step."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_step_end(self, trainer: Any, step: int) -> None:
        """Request a checkpoint."""
        if step == 1:
            trainer.save_checkpoint(self.path)

    def on_before_optimizer_step(self, batch_idx: int) -> Any:
        """Skip one update."""
        return SKIP_STEP if batch_idx == 2 else None


class Preempt(Hook):
    """A signal in the middle of a validation."""

    def on_validation_batch_start(self) -> None:
        """Send a signal, as a scheduler would."""
        os.kill(os.getpid(), signal.SIGTERM)


# ---- one failure -------------------------------------------------------------------------------------------


def fail(event: Event, position: str, error: type[BaseException], folder: Path) -> None:
    """Run into the error in a child, and record every broken promise."""
    planned = error(f"{event.name} in {position}")
    before = RuntimeError("what failed first")
    alone = position == "module" and event.name.endswith("_dataloader")
    people: dict[str, Any] = {
        name: failing(kind, event, planned if name == position else None)
        for name, kind in (
            ("first", Counting),
            ("middle", Counting),
            ("last", Counting),
            ("module", Alone if alone else Net),
            ("datamodule", Data),
        )
        if name != "datamodule" or not alone
    }
    people["last"].tier = "monitor"
    where = folder / "run" / "saved"
    if event.name == "on_checkpoint_failed":
        where = folder / "output.txt" / "saved"  # nothing can be saved below a file
    module, hooks = people["module"], [people["first"], people["middle"], Ask(where), people["last"]]
    if event.name == "on_exception":
        hooks.append(
            failing(Hook, next(each for each in EVENT_ROWS if each.name == "on_train_epoch_start"), before)
        )
    if event.name == "on_validation_abandoned":
        hooks.append(Preempt())
    raised = run(event, module, people.get("datamodule"), hooks, folder)
    wrong = []
    first = before if event.name == "on_exception" else planned
    if raised is not first:
        wrong.append(f"{raised!r} was raised, not {first!r}")
    reports = 0 if event.name in AFTER_THE_END else 1
    for name, participant in people.items():
        if participant.calls["on_exception"] != reports:
            wrong.append(f"{name} got on_exception {participant.calls['on_exception']} times, not {reports}")
        begun, ended = participant.calls["setup"], participant.calls["teardown"]
        if ended != min(1, begun):
            wrong.append(f"{name} was set up {begun} times and torn down {ended} times")
    (folder / "answer.json").write_text(json.dumps("; ".join(wrong)))


def failing(kind: type[Any], event: Event, error: BaseException | None) -> Any:
    """Return an instance whose method for this event does its work and then raises; or an instance that does
    not fail.
    """
    if error is None:
        return kind()
    name = (
        event.spellings[0]
        if event.name in ("module_load_checkpoint", "strategy_setup", "strategy_teardown")
        else event.name
    )
    usual = getattr(kind, name) if name in Counts.__dict__ and issubclass(kind, Counts) else None

    def raises(self: Any) -> None:
        if usual is not None:
            usual(self)
        raise error

    return type(f"Failing{kind.__name__}", (kind,), {name: raises, "__doc__": "Fails at the chosen event."})()


def run(event: Event, module: Any, data: Any, hooks: list[Any], folder: Path) -> BaseException | None:
    """Run the stage that the event belongs to; return the error that it raised."""
    options: Any = {
        "logger": False,
        "enable_progress_bar": False,
        "device": "cpu",
        "max_epochs": 1,
        "gradient_clip_val": 1.0,
        "on_save_error": "warn",
    }
    resume = None
    if "load" in event.name and "loader" not in event.name:
        resume = folder / "earlier" / "saved"
        earlier = Trainer(run_dir=folder / "earlier", **options)
        earlier.fit(Net(), datamodule=Data())
        earlier.save_checkpoint(resume)
        options["max_epochs"] = 2
    trainer = Trainer(run_dir=folder / "run", hooks=hooks, **options)
    verb = "fit" if "fit" in event.stages else event.stages[0]
    try:
        if verb == "fit":
            trainer.fit(module, datamodule=data, resume=resume)
        else:
            getattr(trainer, verb)(module, datamodule=data)
    except BaseException as raised:
        return raised
    return None
