"""CommandQueue: asked for in any thread, carried out on the main one when the batch is over."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
from tiny import Net, batches, quiet

import hookline.control.server
import hookline.training.lifecycle  # noqa: F401 - their handlers are registered before the registry is copied
from hookline import Hook, HooklineError
from hookline.run import commands
from hookline.run.commands import CommandQueue, handles_command


@pytest.fixture
def done(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """What commands of the kind `note` have done: the thread, the batches seen by then, and their word."""
    did: list[Any] = []
    monkeypatch.setattr(commands, "_HANDLERS", dict(commands._HANDLERS))

    @handles_command("note")
    def note(run: Any, sender: int, word: str) -> None:
        did.append((threading.current_thread() is threading.main_thread(), run.state.batches_seen, word))

    @handles_command("end")
    def end(run: Any, sender: int) -> None:
        run.state.request_stop(f"a command of rank {sender}")

    yield did


class Sends(Hook):
    """Sends from another thread while a batch is trained."""

    def __init__(self, *words: str, kind: str = "note") -> None:
        self.words, self.kind = words, kind

    def on_after_backward(self, trainer: Any, batch_idx: int) -> None:
        def send() -> None:
            for word in self.words:
                trainer._run.participants.commands.send(self.kind, **({"word": word} if word else {}))

        if batch_idx == 1:
            thread = threading.Thread(target=send)
            thread.start()
            thread.join()


def test_they_are_carried_out_in_their_order_on_the_main_thread_when_the_batch_is_over(
    done: list[Any],
) -> None:
    quiet(hooks=[Sends("one", "two")]).fit(Net(), batches(4))
    assert done == [(True, 2, "one"), (True, 2, "two")]


def test_one_that_stops_the_run_stops_it_at_that_very_batch(done: list[Any]) -> None:
    trainer = quiet(hooks=[Sends("", kind="end")])
    trainer.fit(Net(), batches(4))
    assert (trainer.global_step, trainer.state.stop_reason) == (2, "a command of rank 0")


def test_one_that_is_sent_when_an_epoch_ends_does_not_wait_for_the_next_batch(done: list[Any]) -> None:
    trainer = quiet()
    trainer.on("train_epoch_end")(lambda: trainer._run.participants.commands.send("note", word="late"))  # type: ignore[union-attr]
    trainer.fit(Net(), batches(3))
    assert done == [(True, 3, "late")]


def test_an_unknown_kind_is_an_error_where_it_is_sent(done: list[Any]) -> None:
    with pytest.raises(
        HooklineError, match="'note_' is not a kind of command: it has no handler. Did you mean 'note'?"
    ):
        CommandQueue().send("note_", word="x")


def test_facts_that_cannot_travel_are_an_error_where_they_are_sent(done: list[Any]) -> None:
    with pytest.raises(
        HooklineError, match="sent to the other ranks as JSON; those of 'note' are not plain data"
    ):
        CommandQueue().send("note", word=object())


def test_a_kind_belongs_to_one_function(done: list[Any]) -> None:
    with pytest.raises(HooklineError, match=r"'note' already have the handler .*\.note"):
        handles_command("note")(lambda run, sender: None)
