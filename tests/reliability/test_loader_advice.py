"""A fit that mostly waits for its loader says so once, with what to change."""

from __future__ import annotations

import logging
import re
import time
from pathlib import Path
from typing import Any

import pytest
from dialects.looped import net_and_sgd
from ranks.torchrun import torchrun
from tiny import Net, batches, quiet
from torch.utils.data import DataLoader

from hookline import Hook, Line
from hookline.data.loaders import make_loaders
from hookline.reliability import loader_advice
from hookline.reliability.loader_advice import (
    LoaderFacts,
    Waiting,
    advice,
    loader_facts,
    mostly_waits,
    usable_cores,
)

MUCH = Waiting(data=30.0, first=1.0, epochs=3, training=60.0, batches=1000)


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({}, True),
        ({"data": 20.0}, False),  # a third of the time
        ({"training": 9.0, "data": 9.0, "first": 0.0}, False),  # too early
        ({"batches": 5}, False),
        ({"epochs": 1, "first": 29.0}, False),  # the start of the first epoch comes once
        ({"epochs": 1, "first": 2.0}, True),
        ({"epochs": 10, "first": 29.0}, True),
    ],
)
def test_only_a_run_that_waits_for_most_of_its_time_is_warned(
    changed: dict[str, Any], expected: bool
) -> None:
    values = {name: getattr(MUCH, name) for name in ("data", "first", "epochs", "training", "batches")}
    assert mostly_waits(Waiting(**{**values, **changed})) is expected


@pytest.mark.parametrize(
    ("loader", "cores", "on_cuda", "words", "not_words"),
    [
        (
            LoaderFacts("train", 0),
            8,
            False,
            ["main process", "num_workers=7", "8 cores"],
            ["prefetch_batches", "pin_memory"],
        ),
        (LoaderFacts("train", 0), 1, False, ["in the main process", "only 1 core"], ["num_workers"]),
        (LoaderFacts("train", None), 1, False, ["in the main process", "only 1 core"], ["num_workers"]),
        (LoaderFacts("train", 0), 2, False, ["num_workers=2", "2 cores)"], []),
        (LoaderFacts("train", None), 2, False, ["num_workers=2"], []),
        (
            LoaderFacts("train", 1),
            2,
            False,
            ["num_workers=2) instead of 1 (", "2 cores)"],
            ["num_workers=1", "__getitem__"],
        ),
        (LoaderFacts("train", 1), 1, False, ["1 worker is not enough", "__getitem__"], ["num_workers"]),
        (
            LoaderFacts("train", 2, may_run_ahead=True),
            2,
            False,
            ["2 workers are not enough", "__getitem__", "prefetch_batches"],
            ["num_workers"],
        ),
        (LoaderFacts("train", 16), 64, False, ["num_workers=32) instead of 16"], []),
        (LoaderFacts("train", 0), 64, True, ["num_workers=8"], []),
        (LoaderFacts("train", None), 4, False, ["torch.utils.data.DataLoader(dataset, num_workers=3)"], []),
        (
            LoaderFacts("train", 2, may_run_ahead=True),
            8,
            True,
            ["num_workers=7) instead of 2 (", "pin_memory=True", "prefetch_batches=2"],
            [],
        ),
        (
            LoaderFacts("train", 2, pinned=True, ahead=2, may_run_ahead=True),
            8,
            True,
            ["num_workers=7) instead of 2"],
            ["pin_memory", "prefetch_batches"],
        ),
        (
            LoaderFacts("train", 8, persistent=True),
            8,
            False,
            ["less work for each sample"],
            ["num_workers", "pin_memory", "prefetch"],
        ),
    ],
)
def test_the_advice_fits_the_loader(
    loader: LoaderFacts, cores: int, on_cuda: bool, words: list[str], not_words: list[str]
) -> None:
    said = advice(MUCH, [loader], cores, on_cuda)
    assert said.startswith("Training waits for data 50% of its time (30.0 s of 60.0 s, 30.0 ms a batch). ")
    assert all(each in said for each in words) and not any(each in said for each in not_words), said


def test_waits_at_the_start_of_epochs_are_those_for_workers_that_start() -> None:
    waiting = Waiting(30.0, 25.0, 10, 60.0, 1000)
    assert "persistent_workers=True" in advice(waiting, [LoaderFacts("train", 2)], 8, False)
    assert "persistent_workers" not in advice(waiting, [LoaderFacts("train", 2, persistent=True)], 8, False)
    assert "num_workers=7" in advice(waiting, [LoaderFacts("train", 0)], 8, False)


def test_of_several_loaders_the_one_with_the_fewest_workers_is_named() -> None:
    said = advice(MUCH, [LoaderFacts("fast", 4), LoaderFacts("slow", 0)], 8, False)
    assert "'slow'" in said and "'fast'" not in said


def test_what_is_known_of_a_loader() -> None:
    workers = DataLoader([1, 2], num_workers=2, persistent_workers=True)
    made = make_loaders({"one": workers, "two": DataLoader([1, 2]), "three": (x for x in [1])}, 1.0, "train")
    assert [loader_facts(each).workers for each in made] == [2, 0, None]
    assert [loader_facts(each).persistent for each in made] == [True, False, False]
    assert usable_cores() >= 1


class Sleeps:
    """A dataset whose samples take their time."""

    def __len__(self) -> int:
        return 60

    def __getitem__(self, index: int) -> Any:
        time.sleep(0.01)
        return tuple(each[0] for each in batches(1)[0])


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [each.getMessage() for each in caplog.records if "Training waits for data" in each.getMessage()]


def test_a_run_with_a_slow_loader_says_so_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(loader_advice, "ENOUGH_SECONDS", 0.1)
    with caplog.at_level(logging.WARNING, "hookline"):
        quiet(max_epochs=2).fit(Net(), DataLoader(Sleeps(), batch_size=2))
    said = warnings_of(caplog)
    assert (
        len(said) == 1
        and "'train' makes its batches in the main process: DataLoader(..., num_workers=" in said[0]
    )


def test_a_hand_written_loop_with_a_slow_loader_says_so_once_and_hooks_know_the_wait(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(loader_advice, "ENOUGH_SECONDS", 0.1)
    waits: list[float] = []

    class Waits(Hook):
        def on_train_batch_start(self, fetch_seconds: float) -> None:
            waits.append(fetch_seconds)

    net, sgd = net_and_sgd()
    with Line(net, sgd, hooks=[Waits()]) as line:
        for _ in line.epochs(2):
            for x, y in line.epoch(DataLoader(Sleeps(), batch_size=2)):
                line.backward((net(x) - y).square().mean())
                sgd.step()
    assert len(waits) == 60 and min(waits) >= 0.02
    said = warnings_of(caplog)
    assert len(said) == 1 and "DataLoader(..., num_workers=" in said[0]


def test_a_fast_dev_run_says_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(loader_advice, "ENOUGH_SECONDS", 0.0)
    monkeypatch.setattr(loader_advice, "ENOUGH_BATCHES", 1)
    quiet(fast_dev_run=3).fit(Net(), DataLoader(Sleeps(), batch_size=2))
    assert warnings_of(caplog) == []


def test_a_run_that_does_not_wait_says_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(loader_advice, "ENOUGH_SECONDS", 0.0)

    class Slow(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            time.sleep(0.01)
            return super().training_step(batch, batch_idx)

    quiet().fit(Slow(), batches(30))
    assert warnings_of(caplog) == []


ON_RANKS = """
import os, sys, time
from tiny import Net, batches, quiet
from torch.utils.data import DataLoader
from hookline.reliability import loader_advice
from hookline.training import fit

RANK = int(os.environ["RANK"])
loader_advice.ENOUGH_SECONDS = 0.1


class Sleeps:
    def __len__(self):
        return 96

    def __getitem__(self, index):
        time.sleep(0.1 * RANK)  # far longer than a step, also on a busy machine
        return tuple(each[0] for each in batches(1)[0])


def run():
    trainer = quiet(enable_progress_bar=True)
    trainer.fit(Net(), DataLoader(Sleeps(), batch_size=2))
    sys.stdout.write(f"RESULT {trainer.timings.longest_wait_rank}\\n")
    sys.stdout.flush()


def fails(run):
    raise RuntimeError("the disk is full")


run()
if RANK == 1:
    fit.finish_saving = fails
run()
"""


def test_of_several_ranks_the_one_that_waits_for_its_loader_is_named_and_a_failed_one_not_waited_for(
    tmp_path: Path,
) -> None:
    outcome = torchrun(ON_RANKS, tmp_path, deadline=120)
    assert outcome.lines("RESULT") == ["1", "1"], outcome.output  # the first fit, on both ranks
    said = re.findall(
        r"^\[rank (\d)\] (\w+ ?\d?) waits for data \d+% of its time", outcome.output, re.MULTILINE
    )
    assert said[0] == ("1", "Rank 1") and {rank for rank, _ in said} == {"1"}, outcome.output
    line = r"^Time: .* <?\d+% waiting for data \(rank 1: \d+%\)"  # rank 0 may have waited for less than 1 %
    assert re.search(line, outcome.output, re.MULTILINE), outcome.output
    assert outcome.code != 0 and "Rank 1 has failed: RuntimeError: the disk is full" in outcome.output
