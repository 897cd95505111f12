"""A run that is asked for something while it trains, from another thread, as a shell would."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tiny import Net, batches, quiet

from hookline import Hook, Trainer
from hookline.control import server
from hookline.control.client import ask
from hookline.control.commands import check_request
from hookline.util.errors import HooklineError


@dataclass(frozen=True)
class Steps:
    """Lets the run make so many steps."""

    count: int


class Asks(Hook):
    """Does these things one after the other, keeps what came of each, and lets the run end after the last."""

    def __init__(self, *things: Callable[[], Any] | Steps) -> None:
        self.things = things
        self.answers: list[Any] = []

    def on_train_start(self, trainer: Trainer) -> None:
        self.trainer = trainer
        self.thread = threading.Thread(target=self._do_all)
        self.thread.start()

    def _do_all(self) -> None:
        for each in self.things:
            try:
                self.answers.append(self._let_pass(each.count) if isinstance(each, Steps) else each())
            except HooklineError as error:
                self.answers.append(error)

    def _let_pass(self, count: int) -> None:
        end, last = time.monotonic() + 60, self.trainer.global_step + count
        while self.trainer.global_step < last and time.monotonic() < end:
            time.sleep(0.005)

    def on_train_batch_end(self, state: Any) -> None:
        if not self.thread.is_alive():
            state.request_stop("all was asked")


def asked(
    *requests: tuple[str, dict[str, Any]] | Callable[[], Any] | Steps,
    hooks: list[Any] | None = None,
    **options: Any,
) -> tuple[list[Any], Trainer]:
    """Train until all of it was asked; the answers, and the trainer."""
    options = {"run_dir": "run", "logger": True, "max_epochs": -1, **options}
    where = options["run_dir"]
    things = [
        each
        if callable(each) or isinstance(each, Steps)
        else (lambda each=each: ask(where, each[0], **each[1]))
        for each in requests
    ]
    asks = Asks(*things)
    trainer = quiet(hooks=[*(hooks or []), asks], **options)
    trainer.fit(Net(), batches())
    asks.thread.join()  # a request to stop is answered when the run has ended
    return asks.answers, trainer


class Counts(Hook):
    """Remembers at which steps it was called."""

    def __init__(self) -> None:
        self.steps: list[int] = []

    def on_step_end(self, step: int) -> None:
        self.steps.append(step)


class AskAt(Hook):
    """Sends a request at an exact step, through the server's own functions; the loop carries it out after that batch."""

    def __init__(self, at: int, command: str, **given: Any) -> None:
        self.at, self.request = at, {"command": command, **given}
        self._queue: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()

    def on_train_batch_end(self, trainer: Any, step: int, rank: int) -> None:
        if step < self.at or rank:
            return
        self.at, number = 10**9, f"test-{id(self)}"
        server._answers[number] = self._queue
        asked = check_request(trainer._run, self.request)
        trainer._run.participants.commands.send("control", number=number, asked=asked)

    @property
    def answer(self) -> dict[str, Any]:
        """The answer; an error if there is none."""
        return self._queue.get_nowait()
