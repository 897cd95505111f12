"""The first batch after a save is written down when it is fetched; a resume that gets another one says so."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from data.resumed import Samples
from tiny import Net, batches, quiet
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from hookline import Hook, Mixture
from hookline.loggers import read_log
from hookline.training import first_batches

DIFFERENT = "did not deliver the expected batch"


class Saves(Hook):
    """Asks for checkpoints after some batches, and at the ends of epochs if told to."""

    def __init__(self, *after: int, at_ends: bool = False, stop: int = 0) -> None:
        self.after, self.at_ends, self.stop = after, at_ends, stop
        self.batches = 0

    def on_train_batch_end(self, trainer: Any, batches_seen: int) -> None:
        self.batches += 1
        if batches_seen in self.after:
            trainer.save_checkpoint(trainer.run_dir / f"c{batches_seen}")
        if batches_seen == self.stop:
            trainer.stop("cut")

    def on_train_epoch_end(self, trainer: Any, epoch: int) -> None:
        if self.at_ends:
            trainer.save_checkpoint(trainer.run_dir / f"end{epoch}")


def fit(loader: Any, *hooks: Hook, resume: str | None = None, mixture: Any = None, **options: Any) -> Any:
    trainer = quiet(**{"run_dir": "run", "hooks": hooks, **options})
    trainer.fit(Net(), loader, resume=resume and f"run/{resume}", mixture=mixture)
    return trainer


def records(rank: int = 0) -> list[dict[str, Any]]:
    return [
        json.loads(line) for line in Path(f"run/batches/rank-{rank}.jsonl").read_text().splitlines() if line
    ]


class Unseeded(IterableDataset[Any]):
    """Comes in another order each time it is read."""

    def __init__(self, n: int = 24) -> None:
        self.n = n

    def __iter__(self) -> Iterator[Any]:
        order = list(range(self.n))
        random.Random(random.SystemRandom().random()).shuffle(order)
        return (Samples(self.n)[index] for index in order)


class Lags:
    """Says where it was before the batch that it yielded last."""

    def __init__(self) -> None:
        self.at = 0

    def __iter__(self) -> Iterator[Any]:
        while self.at < 8:
            yield batches(8)[self.at]
            self.at += 1
        self.at = 0

    def __len__(self) -> int:
        return 8

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]


# ---- written down ------------------------------------------------------------------------------------------------


def test_it_is_written_when_the_batch_is_fetched_before_anything_else_is_done_with_it() -> None:
    class Looks(Hook):
        def on_before_batch_transfer(self, batch: Any, batch_idx: int) -> None:
            if batch_idx == 2:
                assert [each["batch"] for each in records()] == [2], "a kill in this step must not lose it"
            batch[0].zero_()  # what is done to it afterwards does not count

    fit(batches(6), Saves(2, 5), Looks())
    assert [(each["loader"], each["epoch"], each["batch"]) for each in records()] == [
        ("train", 0, 2),
        ("train", 0, 5),
    ]


def test_only_the_first_batch_after_a_save_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[Any] = []
    real = first_batches.fingerprint
    monkeypatch.setattr(first_batches, "fingerprint", lambda batch: looked.append(batch) or real(batch))
    fit(batches(20), Saves(3, 4, 9))
    assert len(looked) == 3


def test_several_saves_at_one_place_are_one_record() -> None:
    class Twice(Hook):
        def on_train_batch_end(self, trainer: Any, batch_idx: int) -> None:
            if batch_idx == 1:
                for name in "ab":
                    trainer.save_checkpoint(trainer.run_dir / name)

    fit(batches(4), Twice())
    assert len(records()) == 1


def test_a_run_without_a_directory_gets_none_for_it(tmp_path: Path) -> None:
    trainer = quiet(hooks=[Hook()])
    trainer.on("train_batch_end")(
        lambda trainer, batch_idx: batch_idx == 1 and trainer.save_checkpoint(tmp_path / "c")
    )
    trainer.fit(Net(), batches(4))
    assert [each.name for each in tmp_path.iterdir()] == ["c"]


def test_a_record_that_cannot_be_written_does_not_end_the_run(caplog: pytest.LogCaptureFixture) -> None:
    Path("run").mkdir()
    Path("run/batches").write_text("in the way")
    assert fit(batches(4), Saves(2)).status == "completed"
    assert "The fingerprint of the first batch after a save cannot be written" in caplog.text


# ---- compared ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["c3", "c4", "end0", "c6"])
def test_the_expected_batch_is_no_news(name: str, caplog: pytest.LogCaptureFixture) -> None:
    def loader() -> Any:
        return DataLoader(Samples(noise="torch"), 3, shuffle=True)

    fit(loader(), Saves(3, 4, 6, at_ends=True), max_epochs=2)
    assert [each["batches_seen"] for each in records()] == [3, 4, 4, 6]
    fit(loader(), resume=name, max_epochs=2)
    assert caplog.text == ""


@pytest.mark.parametrize("name", ["c2", "end0"])
def test_another_batch_than_before_is_a_warning_and_a_record_in_the_log(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    fit(DataLoader(Unseeded(), 3), Saves(2, at_ends=True), max_epochs=2, logger=True)
    fit(DataLoader(Unseeded(), 3), resume=name, max_epochs=2, logger=True)
    batch, epoch = (2, 0) if name == "c2" else (0, 1)
    said = (
        f"The train loader (DataLoader of Unseeded) did not deliver the expected batch: batch {batch} of epoch {epoch} is not the "
        "one that followed this checkpoint before."
    )
    assert caplog.text.count(DIFFERENT) == 1 and said in caplog.text
    assert "Seed its shuffle" in caplog.text and "If you changed the data on purpose" in caplog.text
    (record,) = [each for each in read_log("run") if each["type"] == "warning"]
    assert said in record["message"] and (record["batch"], record["epoch"], record["loader"]) == (
        batch,
        epoch,
        "train",
    )


def test_a_state_that_lags_is_found_out(caplog: pytest.LogCaptureFixture) -> None:
    fit(Lags(), Saves(3))
    rest = Saves()
    fit(Lags(), rest, resume="c3")
    assert rest.batches == 6, "it has trained a batch twice"
    assert DIFFERENT in caplog.text and "The state must count the batches that were yielded" in caplog.text


def test_other_numbers_with_the_same_labels_are_said_to_be_augmentation_perhaps(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Augmented(Samples):
        def __getitem__(self, index: int) -> Any:
            x, y = super().__getitem__(index)
            return x + random.SystemRandom().random(), y, index

    fit(DataLoader(Augmented(), 3), Saves(2))
    fit(DataLoader(Augmented(), 3), resume="c2")
    assert (
        "Either random augmentation differs, or these are other samples with the same labels" in caplog.text
    )


@pytest.mark.parametrize(
    "other",
    [
        lambda: DataLoader(Samples(), 4),
        lambda: DataLoader(Samples(18), 3),
        lambda: DataLoader(Unseeded(12), 3),
    ],
    ids=["batch size", "length", "kind"],
)
def test_a_loader_that_was_changed_on_purpose_is_not_expected_to_deliver_the_same(
    other: Any, caplog: pytest.LogCaptureFixture
) -> None:
    fit(DataLoader(Samples(), 3), Saves(2))
    fit(other(), resume="c2")
    assert "when the checkpoint was saved" in caplog.text and DIFFERENT not in caplog.text


def test_a_batch_that_was_never_fetched_is_written_down_by_the_resumed_run(
    caplog: pytest.LogCaptureFixture,
) -> None:
    fit(DataLoader(Unseeded(), 3), Saves(2, stop=2))
    assert not Path("run/batches").exists()
    fit(DataLoader(Unseeded(), 3), resume="c2")
    assert [each["batch"] for each in records()] == [2] and DIFFERENT not in caplog.text
    fit(DataLoader(Unseeded(), 3), resume="c2")
    assert DIFFERENT in caplog.text


def test_each_loader_of_a_mixture_is_compared(caplog: pytest.LogCaptureFixture) -> None:
    def loaders(code: Any) -> Any:
        return {
            "web": DataLoader(Samples(), 3),
            "code": DataLoader(code, 3),
            "rare": DataLoader(Samples(), 3),
        }

    mixture = Mixture(
        "alternating",
        pattern=["web", "web", "code", "web", "rare", "web"],
        epoch_length=12,
        when_exhausted="cycle",
    )
    fit(loaders(Unseeded()), Saves(1, 2), mixture=mixture)
    assert {(each["loader"], each["batch"]) for each in records()} == {
        (name, at) for name in ("web", "code", "rare") for at in (1, 2)
    }
    caplog.clear()
    fit(loaders(Unseeded()), mixture=mixture, resume="c2")
    assert (
        "The code loader (DataLoader of Unseeded) did not deliver" in caplog.text
        and caplog.text.count(DIFFERENT) == 1
    )


def test_a_save_before_a_loader_of_the_mixture_was_compared_is_written_down_as_well(
    caplog: pytest.LogCaptureFixture,
) -> None:
    loaders = {"web": batches(12), "rare": batches(4)}
    mixture = Mixture("alternating", pattern=["web", "web", "web", "rare"], epoch_length=12)
    fit(loaders, Saves(1), mixture=mixture)
    fit(loaders, Saves(2), mixture=mixture, resume="c1")
    assert {(each["loader"], each["batch"]) for each in records()} == {
        ("web", 1),
        ("rare", 1),
        ("web", 2),
        ("rare", 2),
    }
    fit(loaders, mixture=mixture, resume="c2")
    assert caplog.text == ""


def test_a_checkpoint_elsewhere_is_found_to_belong_to_its_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def fit_anywhere(resume: Any = None) -> None:
        trainer = quiet(logger=True)  # a directory of its own for every run
        trainer.on("train_batch_end")(
            lambda trainer, batches_seen: batches_seen == 2 and trainer.save_checkpoint(tmp_path / "c")
        )
        trainer.fit(Net(), DataLoader(Unseeded(), 3), resume=resume)

    fit_anywhere()
    fit_anywhere(tmp_path / "c")
    assert DIFFERENT in caplog.text


def test_a_new_run_in_the_same_directory_is_not_compared_with_the_old_one(
    caplog: pytest.LogCaptureFixture,
) -> None:
    fit(DataLoader(Unseeded(), 3), Saves(2))
    fit(DataLoader(Unseeded(), 3), Saves(2, stop=2))
    fit(DataLoader(Unseeded(), 3), resume="c2")
    assert DIFFERENT not in caplog.text


@pytest.mark.parametrize("torn", ["{", "[1]", '{"run": 1}', "\x00", '{"a": ' * 2000])
def test_a_damaged_record_is_passed_over(torn: str, caplog: pytest.LogCaptureFixture) -> None:
    fit(DataLoader(Unseeded(), 3), Saves(2))
    path = Path("run/batches/rank-0.jsonl")
    path.write_text(path.read_text() + torn)
    fit(DataLoader(Unseeded(), 3), Saves(5), resume="c2")
    assert DIFFERENT in caplog.text
    assert json.loads(path.read_text().splitlines()[-1])["batch"] == 5, "and the next one is whole"


def test_a_batch_of_ones_own_kind_that_cannot_be_read_ends_nothing() -> None:
    class Odd(dict[str, Tensor]):
        def items(self) -> Any:
            raise ValueError("not now")

    class OddNet(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return self.layer(batch["x"]).pow(2).mean()

    trainer = quiet(run_dir="run", hooks=[Saves(1)])
    trainer.fit(OddNet(), [Odd(x=torch.ones(2, 4)) for _ in range(3)])
    assert trainer.status == "completed"
