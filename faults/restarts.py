"""A run that has ended, in every way it can, and is started again: it has the very state that fit had left in
memory.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import os
import random
import signal
import threading
import time
from pathlib import Path
from typing import Any

import torch
from processes import Child
from torch.utils.data import DataLoader
from training import RESULT, RUN, Net, Noisy, Settings, feed
from trials import Kind, Outcome, draw, last_lines

from hookline import Hook, Trainer, load_weights
from hookline.control.client import ask
from hookline.hooks import ModelCheckpoint, WeightAveraging

ENDINGS = ("completed", "max_steps", "hook", "control", "max_time", "SIGTERM", "SIGINT")
CODES = {"SIGTERM": 143, "SIGINT": 130}
SAMPLES, EPOCHS, TIME = 35, 3, 1.0


@dataclasses.dataclass(frozen=True)
class Plan:
    """What a trial does, drawn from its number."""

    ending: str
    at: int
    """The step after which the run is to end; `max_time` and `control` end it when they do."""
    every: int
    """Steps between checkpoints: odd ones, so that the end falls between two."""
    keeps: str
    """'steps', 'epochs', 'best' or 'last': what the run's ModelCheckpoint keeps."""
    averages: bool

    def hooks(self) -> list[Hook]:
        """Return the hooks that keep checkpoints, and the one that ends the run."""
        keep = {
            "steps": lambda: ModelCheckpoint(every_n_train_steps=self.every),
            "epochs": lambda: ModelCheckpoint(every_n_epochs=2, save_on_train_epoch_end=True),
            "best": lambda: ModelCheckpoint("val/loss"),
            "last": lambda: ModelCheckpoint(every_n_train_steps=self.every, save_last=True),
        }[self.keeps]()
        return [keep, *([WeightAveraging(decay=0.9, swap_at_end=True)] if self.averages else [])]

    def limits(self) -> dict[str, Any]:
        """Return the limits of the trainer."""
        if self.ending == "max_steps":
            return {"max_epochs": -1, "max_steps": self.at}
        if self.ending in ("max_time", "control"):
            return {"max_epochs": -1, "max_time": TIME if self.ending == "max_time" else 60.0}
        return {"max_epochs": EPOCHS}


class Ends(Hook):
    """Ends the run as planned, and looks at what it has been resumed with."""

    def __init__(self, plan: Plan, again: bool) -> None:
        self.plan, self.again = plan, again
        self.batches = 0
        self.loaded: dict[str, str] | None = None
        self.trained: dict[str, str] | None = None
        self.answer: dict[str, Any] | None = None
        self.thread: threading.Thread | None = None

    def on_checkpoint_load(self, trainer: Trainer) -> None:
        """Record the restored state."""
        self.loaded = digest(trainer)

    def on_train_batch_end(self, trainer: Trainer, step: int) -> None:
        """Count what is trained, and end it after a step."""
        self.batches += 1
        if self.again or step < self.plan.at or self.thread is not None:
            return
        if self.plan.ending == "hook":
            trainer.stop("as planned")
        elif self.plan.ending == "max_time":
            time.sleep(TIME)
        elif self.plan.ending in CODES:
            self.thread = threading.current_thread()  # once
            os.kill(os.getpid(), getattr(signal, self.plan.ending))
        elif self.plan.ending == "control":
            self.thread = threading.Thread(target=self._ask, args=(trainer.run_dir,))
            self.thread.start()

    def on_train_end(self, trainer: Trainer) -> None:
        """Record the weights before other weights are swapped into the module."""
        self.trained = digest(trainer)

    def _ask(self, run_dir: Path) -> None:
        self.answer = ask(run_dir, "stop")


def digest(trainer: Trainer) -> dict[str, str]:
    """Return one sha256 for each part that must be the same, so that a difference has a name."""
    state, found = trainer.state, {}
    parts = {
        "module": trainer.module.state_dict(),
        "optimizer": [each.state_dict() for each in state.optimizers],
        "schedule": [each.state_dict() for each in state.schedulers],
        "counters": [state.step, state.epochs_seen, state.batches_seen, state.samples_seen],
    }
    for name, value in parts.items():
        into = hashlib.sha256()
        feed(into, value)
        found[name] = into.hexdigest()
    return found


def train(folder: Path, settings: Settings, plan: Plan, again: bool = False) -> None:
    """Train to the planned end, or start again what has ended, and write down what fit leaves in memory."""
    torch.set_num_threads(1)
    torch.manual_seed(os.getpid())
    net, ends = Net(), Ends(plan, again)
    if not again:
        torch.manual_seed(3)
        net = Net()
    trainer = Trainer(
        run_dir=folder / RUN,
        seed=7,
        device="cpu",
        enable_progress_bar=False,
        log_every_n_steps=4,
        num_sanity_val_steps=0,
        precision=settings.precision,
        accumulate_grad_batches=settings.accumulate,
        val_check_interval=settings.validate_every,
        save=settings.save,
        hooks=[*plan.hooks(), ends],
        **plan.limits(),
    )
    data = DataLoader(Noisy(SAMPLES), batch_size=3, shuffle=True, num_workers=settings.workers)
    try:
        trainer.fit(net, data, DataLoader(Noisy(6, noise=0.0), batch_size=3), resume="auto")
    finally:
        if ends.thread is not None and ends.thread is not threading.current_thread():
            ends.thread.join()
        into = hashlib.sha256()
        if has_saved(folder):
            load_weights(other := Net(), folder / RUN, weights="raw")
            feed(into, other.state_dict())
        result = {
            "status": trainer.status,
            "step": trainer.global_step,
            "left": digest(trainer),
            "loaded": ends.loaded,
            "trained": ends.trained,
            "batches": ends.batches,
            "answer": ends.answer,
            "weights": into.hexdigest(),
        }
        (folder / f".{RESULT}").write_text(json.dumps(result))
        os.rename(folder / f".{RESULT}", folder / RESULT)


def has_saved(folder: Path) -> bool:
    """Return whether a run has a checkpoint: one that ends before its first has nothing to resume."""
    return any((folder / RUN / "checkpoints").glob("*/manifest.json"))


class Restarts(Kind):
    """Trials of this kind."""

    def trials(self, share: float) -> list[int]:
        """Return every ending at least once."""
        return list(range(max(len(ENDINGS), round(140 * share))))

    def run_trial(self, number: int, folder: Path) -> Outcome:
        """Run to one ending, then start the same program again."""
        rng = random.Random(f"restarts {self.seed} {number}")
        settings = draw(rng)
        updates = EPOCHS * math.ceil(math.ceil(SAMPLES / 3) / settings.accumulate)
        plan = Plan(
            ENDINGS[number % len(ENDINGS)],
            rng.randint(1, updates - 1),
            rng.choice((1, 3, 5, 7)),
            rng.choice(("steps", "steps", "epochs", "best", "last")),
            rng.random() < 0.3,
        )
        outcome = Outcome(number, note=plan.ending)
        first = Child(folder, settings, body=lambda: train(folder, settings, plan))
        code, left = first.wait(), first.result
        if code != CODES.get(plan.ending, 0) or left is None:
            outcome.wrong = f"exit code {code} ({plan}, {settings}); said: {last_lines(first.said)}"
            return outcome
        if not has_saved(folder):
            outcome.resumed = outcome.exact = 1
            outcome.note += ", nothing saved"
            return outcome
        second = Child(folder, settings, body=lambda: train(folder, settings, plan, again=True))
        code, found = second.wait(), second.result
        if code != 0 or found is None:
            outcome.wrong = (
                f"started again, exit code {code} ({plan}, {settings}); said: {last_lines(second.said)}"
            )
            return outcome
        outcome.resumed = 1
        outcome.wrong = _judge(plan, left, found)
        outcome.exact, outcome.silent = int(not outcome.wrong), int(bool(outcome.wrong))
        return outcome


def _judge(plan: Plan, left: dict[str, Any], found: dict[str, Any]) -> str:
    """Return every broken promise as text; an empty string if there is none."""
    is_over = plan.ending not in CODES
    # a run that a signal ended continues with the trained weights, before averages are swapped in
    expected, restored = (left["left"], found["left"]) if is_over else (left["trained"], found["loaded"])
    differing = [name for name, value in expected.items() if restored[name] != value]
    wrong = []
    if differing:
        wrong.append(f"not as fit had left it: {', '.join(differing)}")
    if is_over and (found["batches"], found["status"], found["step"]) != (0, left["status"], left["step"]):
        wrong.append(
            f"started again it was {found['status']} at step {found['step']} after {found['batches']} batches"
        )
    if is_over and found["weights"] != left["trained"]["module"]:
        wrong.append("load_weights has given other weights")
    answer = left["answer"]
    if plan.ending == "control" and (
        answer is None or not answer.get("saved") or answer["saved_step"] != left["step"]
    ):
        wrong.append(f"control stop at step {left['step']} was answered with {answer}")
    return f"{'; '.join(wrong)} ({plan})" if wrong else ""
