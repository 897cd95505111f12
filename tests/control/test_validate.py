"""A validation that a client requests: an ordinary one for its listeners, and none for the training."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from control.asking import AskAt, Asks, asked
from tiny import Net, batches, quiet
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from hookline import Hook
from hookline.control.client import Refused, ask
from hookline.hooks import EarlyStopping, LRSchedule, ModelCheckpoint
from hookline.loggers import read_log
from hookline.util.errors import Preempted


class Noisy(Net):
    """Draws from every random stream while it trains, and while it validates."""

    def __init__(self) -> None:
        super().__init__()
        torch.nn.init.constant_(self.layer.weight, 0.1)
        torch.nn.init.constant_(self.layer.bias, 0.1)

    def noise(self) -> float:
        return float(torch.rand(())) + random.random() + float(np.random.rand())

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch, batch_idx) * self.noise()

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("val/noise", self.noise())
        return super().validation_step(batch, batch_idx)


class Stream(IterableDataset[Any]):
    """Batches without a length: the loop does not know which one is the last of an epoch."""

    def __iter__(self) -> Iterator[Any]:
        yield from (sample for inputs, targets in batches(7) for sample in zip(inputs, targets, strict=True))


def shuffled(n: int = 21) -> DataLoader[Any]:
    inputs, targets = batches(1, size=n)[0]
    return DataLoader(TensorDataset(inputs, targets), batch_size=3, shuffle=True)


class Validations(Hook):
    """Keeps the step and the weights of every validation."""

    def __init__(self) -> None:
        self.steps: list[int] = []
        self.weights: list[Any] = []

    def on_validation_end(self, step: int, module: Any) -> None:
        self.steps.append(step)
        self.weights.append(module.layer.weight.detach().clone())


def trained(
    *hooks: Hook, train: Any = None, **options: Any
) -> tuple[dict[str, Any], list[int], list[Any], Any]:
    """The weights, the steps of validations, the weights in them and the next random numbers of a run."""
    net, seen = Noisy(), Validations()
    trainer = quiet(hooks=[*hooks, seen], seed=3, **{"max_epochs": 3, **options})
    trainer.fit(net, train if train is not None else shuffled(), shuffled(9))
    return net.state_dict(), seen.steps, seen.weights, (net.noise(), net.noise())


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("data", ["shuffled", "stream"])
def test_the_weights_and_random_streams_are_those_of_a_run_without_it(data: str, accumulate: int) -> None:
    def made() -> Any:
        return shuffled() if data == "shuffled" else DataLoader(Stream(), batch_size=3)

    options = {"accumulate_grad_batches": accumulate}
    plain, steps, seen, drawn = trained(train=made(), **options)

    class AskAtBatches(AskAt):
        """Asks at an early batch, in a window; at the last batch of an epoch; and before the first batch."""

        def on_train_batch_end(self, trainer: Any, epoch: int, batch_idx: int) -> None:  # type: ignore[override]
            if (epoch, batch_idx) in ((0, 1), (1, 6)):
                self._ask(trainer)

        def on_train_start(self, trainer: Any) -> None:
            self._ask(trainer)

        def _ask(self, trainer: Any) -> None:
            self.at = 0
            AskAt.on_train_batch_end(self, trainer, 0, 0)

    asks = AskAtBatches(0, "validate")
    weights, more, also_seen, afterwards = trained(asks, train=made(), **options)
    answers = [asks.answer for _ in range(3)]
    assert all(torch.equal(weights[name], plain[name]) for name in plain)
    assert afterwards == drawn
    assert set(steps) <= set(more) and {each["step"] for each in answers} <= set(more)
    # the validation at the end of an epoch is of the weights that the last, short window has made
    assert all(any(torch.equal(one, each) for each in also_seen) for one in seen)


def test_it_is_an_ordinary_validation_and_its_metrics_are_the_answer() -> None:
    stop, asks = EarlyStopping(monitor="val/loss", patience=100), AskAt(3, "validate")
    quiet(run_dir="run", logger=True, max_epochs=2, hooks=[stop, asks], log_every_n_steps=1).fit(
        Net(), batches(), batches(2)
    )
    answer = asks.answer
    rows = [each for each in read_log("run/log.jsonl") if each.get("over") == "evaluation"]
    assert [each["step"] for each in rows] == [3, 4, 8]
    assert (answer["step"], answer["metrics"]) == (3, rows[0]["metrics"])
    assert answer["said"] == f"val/loss {rows[0]['metrics']['val/loss']:.6g} at step 3"
    assert [each["command"] for each in read_log("run/log.jsonl") if each["type"] == "control"] == [
        "validate"
    ]
    assert stop.best_score == min(each["metrics"]["val/loss"] for each in rows)


def test_a_state_that_was_just_validated_is_not_validated_again() -> None:
    asks, seen, keeps = AskAt(4, "validate"), Validations(), ModelCheckpoint(monitor="val/loss")
    trainer = quiet(run_dir="run", logger=True, max_epochs=2, hooks=[asks, seen, keeps])
    trainer.fit(Net(), batches(), batches(2))
    rows = [each for each in read_log("run/log.jsonl") if each.get("over") == "evaluation"]
    assert seen.steps == [4, 8] and asks.answer["metrics"] == rows[0]["metrics"]


def test_two_clients_get_the_metrics_of_one_validation() -> None:
    first, second, seen = AskAt(2, "validate"), AskAt(2, "validate"), Validations()
    quiet(hooks=[first, second, seen]).fit(Net(), batches(), batches(2))
    assert first.answer["metrics"] == second.answer["metrics"] and seen.steps == [2, 4]


def test_after_a_rollback_the_answer_is_of_the_restored_state() -> None:
    class Undoes(AskAt):
        def on_train_batch_end(self, trainer: Any, step: int, rank: int) -> None:
            if step == 2:
                trainer.save_checkpoint("two")
            elif step == self.at:
                trainer.roll_back("two")
            super().on_train_batch_end(trainer, step, rank)

    asks, seen = Undoes(4, "validate"), Validations()  # both states are validated before the request
    trainer = quiet(run_dir="run", logger=True, hooks=[asks, seen], val_check_interval=2)
    trainer.fit(Net(), batches(), batches(2))
    rows = [each for each in read_log("run/log.jsonl") if each.get("over") == "evaluation"]
    answer = asks.answer
    assert seen.steps == [2, 4, 2, 4]
    assert (answer["step"], answer["metrics"]) == (2, rows[0]["metrics"])


def test_a_run_without_validation_data_refuses_it_and_says_what_to_pass() -> None:
    answers, _ = asked(("validate", {}))
    assert isinstance(answers[0], Refused)
    assert "validate: this run has no validation data: pass val= to fit" in str(answers[0])

    def refused(net: Net, **options: Any) -> str:
        asks = Asks(lambda: ask("other", "validate"))
        quiet(run_dir="other", logger=True, max_epochs=-1, hooks=[asks], **options).fit(
            net, batches(), batches()
        )
        asks.thread.join()
        return str(asks.answers[0])

    assert "limit_val_batches=0 switches validation off" in refused(Net(), limit_val_batches=0)
    silent = Net()
    silent.validation_step = None  # type: ignore[assignment]
    assert "the module has no validation_step" in refused(silent)


def test_a_validation_that_fails_ends_the_run_and_the_client_learns_it() -> None:
    class Fails(Net):
        def validation_step(self, batch: Any, batch_idx: int) -> Any:
            raise RuntimeError("broken")

    asks = Asks(lambda: ask("run", "validate"))
    with pytest.raises(RuntimeError, match="broken"):
        quiet(run_dir="run", logger=True, max_epochs=-1, hooks=[asks]).fit(
            Fails(), batches() * 50_000, batches()
        )
    asks.thread.join()
    assert "The run failed before the validation was over" in str(asks.answers[0])


def test_a_run_that_ends_first_says_so() -> None:
    class AtTheEnd(AskAt):
        def on_train_end(self, trainer: Any) -> None:
            AskAt.on_train_batch_end(self, trainer, self.at, 0)

    late, seen = AtTheEnd(99, "validate"), Validations()
    quiet(hooks=[late, seen]).fit(Net(), batches(), batches(2))
    assert seen.steps == [4]


def test_a_signal_during_it_leaves_a_run_that_resumes_to_the_same_weights() -> None:
    class Kills(Hook):
        def on_validation_batch_start(self, step: int) -> None:
            if step == 3:
                os.kill(os.getpid(), signal.SIGTERM)

    def run(folder: str, *hooks: Hook) -> Net:
        net, schedule = Noisy(), LRSchedule("cosine", total=14)
        trainer = quiet(hooks=[*hooks, schedule], seed=3, max_epochs=2, run_dir=folder, checkpoint=True)
        trainer.fit(net, shuffled(), shuffled(9), resume="auto")
        return net

    with pytest.raises(Preempted):
        run("cut", AskAt(3, "validate"), Kills())
    assert Path("cut/checkpoints").is_dir()
    resumed, whole = run("cut"), run("whole")
    assert all(map(torch.equal, resumed.parameters(), whole.parameters()))


def test_a_number_that_json_does_not_have_is_text() -> None:
    class Logs(Net):
        def validation_step(self, batch: Any, batch_idx: int) -> Any:
            self.log("val/odd", float("nan"))

    asks = AskAt(2, "validate")
    quiet(hooks=[asks]).fit(Logs(), batches(), batches(2))
    assert asks.answer["metrics"] == {"val/odd": "nan"}
