"""The guards name the samples behind a bad update, and leave them out after going back."""

from __future__ import annotations

import json
import logging
import math
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks.torchrun import torchrun
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from hookline import Hook, Module, Trainer
from hookline.checkpoint.files import read
from hookline.cli import main
from hookline.hooks import NaNGuard, SpikeGuard
from hookline.hooks._samples import merge, name_samples
from hookline.loggers import JSONLines, read_log
from hookline.util.errors import HooklineError, NonFiniteLoss, OptionError

BAD = 11


class Net(Module):
    """Its loss is that of the worst sample."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1)
        self.trained: list[int] = []

    def training_step(self, batch: Any) -> Tensor:
        ids, values = batch
        self.trained += ids.tolist()
        return (
            self.layer(torch.ones(len(values), 1)) * 0 + values.reshape(-1, 1)
        ).mean() + self.layer.weight.sum() * 1e-3

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Products(Net):
    """Its gradients are not finite if a sample is not."""

    def training_step(self, batch: Any) -> Tensor:
        self.trained += batch[0].tolist()
        return (self.layer(torch.ones(len(batch[1]), 1)) * batch[1].reshape(-1, 1)).mean()


def data(value: float, samples: int = 24) -> DataLoader[Any]:
    values = torch.ones(samples) + torch.arange(samples) * 1e-3
    values[BAD] = value
    return DataLoader(TensorDataset(torch.arange(samples), values), batch_size=2, shuffle=True)


def fit(
    tmp_path: Path, train: Any, *hooks: Any, model: type[Net] = Net, **options: Any
) -> tuple[Trainer, Net]:
    torch.manual_seed(0)
    net = model()
    settings = {"max_epochs": 4, "enable_progress_bar": False, "log_every_n_steps": 1, "seed": 3}
    trainer = Trainer(run_dir=tmp_path, hooks=[*hooks], logger=JSONLines(), **(settings | options))
    trainer.fit(net, train)
    return trainer, net


def events(tmp_path: Path, kind: str) -> list[dict[str, Any]]:
    return [each for each in read_log(tmp_path) if each["type"] == kind]


class Save(Hook):
    def __init__(self, every: int = 3) -> None:
        super().__init__("save")
        self.every = every

    def on_train_batch_end(self, trainer: Any, batches_seen: int) -> None:
        if batches_seen % self.every == 0:
            trainer.save_checkpoint()


def test_nan_guard_names_the_samples_behind_the_update(tmp_path: Path) -> None:
    for check in ("loss", "batch"):
        folder = tmp_path / check
        with pytest.raises(NonFiniteLoss, match=r"Its samples: 11\."):
            fit(folder, data(torch.nan), NaNGuard(check=check))
        (event,) = events(folder, "nonfinite")
        assert event["samples"] == {"train": [BAD]}, "the one whose values are not finite"


@pytest.mark.parametrize("kind", ["raises", "skips", "spike"])
def test_the_command_in_a_message_lists_the_update_that_was_not_made(
    tmp_path: Path, caplog: Any, capsys: Any, kind: str
) -> None:
    guard: Any = SpikeGuard("skip", window=8) if kind == "spike" else NaNGuard(break_on_nan=kind == "raises")
    value, more = (500.0, {}) if kind == "spike" else (torch.nan, {"nonfinite": "skip"})
    ids: list[list[int]] = []

    class Keeps(Hook):
        def on_step_skipped(self, trainer: Any) -> None:
            ids.append(sorted(each.id for each in trainer.samples()))

    folder = tmp_path / "a run"
    try:
        with caplog.at_level(logging.WARNING):
            fit(folder, data(value), guard, Keeps(), accumulate_grad_batches=2, max_epochs=2, **more)
    except NonFiniteLoss as error:
        assert kind == "raises" and ", update " in str(error)
        caplog.records.append(logging.LogRecord("", 30, "", 0, str(error), None, None))
    texts = [each.getMessage() for each in caplog.records if "Its samples: " in each.getMessage()]
    assert texts
    found = []
    for text in texts:
        match = re.search(r"All of this update: hookline (samples 'a run' --epoch \d --batch [\d-]+)\.", text)
        assert match, text
        assert main([*shlex.split(match[1]), "--plain"]) == 0
        found.append([int(each) for each in capsys.readouterr().out.split()])
    assert all(BAD in each for each in found)
    if kind == "skips":
        assert len(ids) == 2 and all(set(part) <= set(whole) for part, whole in zip(found, ids, strict=True))
    elif kind == "spike":
        assert ids == found
    else:
        last = json.loads((folder / "run.json").read_text())["step"]
        assert main(["samples", str(folder), "--step", str(last + 1), "--plain"]) == 0
        assert found == [[int(each) for each in capsys.readouterr().out.split()]]


@pytest.mark.parametrize("options", [{"fast_dev_run": 12}, {"checkpoint": False}], ids=["trial", "unsaved"])
def test_a_run_without_a_record_names_no_command_and_makes_no_directory(
    tmp_path: Path, options: dict[str, Any]
) -> None:
    trainer = Trainer(hooks=[NaNGuard()], logger=False, enable_progress_bar=False, seed=3, **options)
    with pytest.raises(NonFiniteLoss, match=r"Its samples: 11\.") as caught:
        trainer.fit(Net(), data(torch.nan))
    assert "hookline samples" not in str(caught.value)
    assert [*tmp_path.iterdir()] == []


def test_a_directory_elsewhere_is_named_in_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    with pytest.raises(NonFiniteLoss) as caught:
        fit(tmp_path / "there", data(torch.nan), NaNGuard())
    assert f"hookline samples {tmp_path / 'there'} --epoch 0 --batch " in str(caught.value)


def test_nan_guard_names_all_samples_if_the_batch_is_finite(tmp_path: Path) -> None:
    class Overflows(Hook):
        def on_before_optimizer_step(self, module: Any, step: int, trainer: Any) -> None:
            if step == 4:
                self.samples = sorted(each.id for each in trainer.samples())
                module.layer.weight.grad.fill_(torch.inf)

    overflows = Overflows()
    with pytest.raises(NonFiniteLoss, match="gradient of parameter"):
        fit(tmp_path, data(1.0), overflows, NaNGuard(), accumulate_grad_batches=2)
    (event,) = events(tmp_path, "nonfinite")
    assert event["samples"] == {"train": overflows.samples} and len(overflows.samples) == 4


@pytest.mark.parametrize("accumulate", [1, 2])
def test_nan_guard_leaves_the_samples_out_after_going_back(tmp_path: Path, accumulate: int) -> None:
    guard = NaNGuard(exclude=True)
    trainer, net = fit(tmp_path, data(torch.nan), guard, Save(), accumulate_grad_batches=accumulate)
    assert trainer.status == "completed" and guard.rollbacks == 1
    assert net.trained.count(BAD) == 1, "only before the run went back"
    assert torch.isfinite(net.layer.weight).all()
    record = json.loads((tmp_path / "run.json").read_text())
    (done,) = record["exclusions"]
    assert (
        BAD in done["samples"]
        and done["loader"] == "train"
        and done["reason"].startswith("NaNGuard: The loss is nan")
    )
    assert record["rollbacks"][0]["reason"].startswith("NaNGuard")


def test_nan_guard_stops_when_it_has_gone_back_often_enough(tmp_path: Path) -> None:
    values = torch.full((24,), torch.nan)
    values[:8] = 1.0
    train = DataLoader(TensorDataset(torch.arange(24), values), batch_size=2)
    guard = NaNGuard(exclude=True, max_rollbacks=2)
    with pytest.raises(NonFiniteLoss, match="The loss is nan"):
        fit(tmp_path / "a", train, guard, Save())
    assert guard.rollbacks == 2


# ---- nothing to go back to -----------------------------------------------------------------------------------------


def is_good(net: Net, times: int = 1) -> bool:
    """Whether the bad sample was trained on once, skipped, and left out of the later epochs."""
    return net.trained.count(BAD) == times and bool(torch.isfinite(net.layer.weight).all())


GUARDS: dict[str, Any] = {
    "nan": lambda: NaNGuard(exclude=True),
    "gradients": lambda: NaNGuard(exclude=True, check="gradients"),
    "spike": lambda: SpikeGuard("rollback", window=8, exclude=True),
}


@pytest.mark.parametrize("accumulate", [1, 4])
@pytest.mark.parametrize("name", GUARDS)
def test_without_a_checkpoint_the_run_skips_the_update_and_leaves_the_samples_out_later(
    tmp_path: Path, caplog: Any, name: str, accumulate: int
) -> None:
    guard = GUARDS[name]()
    trainer, net = fit(tmp_path, data(torch.nan), guard, model=Products, accumulate_grad_batches=accumulate)
    assert trainer.status == "completed" and guard.rollbacks == 0 and is_good(net)
    left_out = 1 if name == "nan" or accumulate == 1 else 2 * accumulate  # else the whole window is suspect
    batches = math.ceil((24 - left_out) / 2)
    assert trainer.global_step == 12 // accumulate - 1 + 3 * math.ceil(batches / accumulate)
    (said,) = [each for each in caplog.messages if "cannot go back at step" in each]
    assert "ModelCheckpoint(every_n_train_steps=...) without a monitor" in said
    assert "With a monitor, ModelCheckpoint saves only when its metric has a new value." in said
    assert re.search(
        rf"without going back\. From the next epoch on, {left_out} samples? will be left out", said
    )


@pytest.mark.parametrize("check", [("loss", "gradients"), ("batch", "loss")])
def test_updates_after_one_that_nonfinite_skips_are_made(tmp_path: Path, check: Any) -> None:
    guard = NaNGuard(exclude=True, check=check)
    trainer, net = fit(tmp_path, data(torch.nan), guard, nonfinite="skip")
    assert (trainer.global_step, guard.excluded) == (11 + 3 * 12, 1)
    assert is_good(net, times="batch" not in check)  # that check comes before the model is called


class Pair(Net):
    """Two optimizers, or two that training_step calls itself."""

    def __init__(self) -> None:
        super().__init__()
        self.other = nn.Linear(1, 1)

    def training_step(self, batch: Any) -> Tensor:
        return super().training_step(batch) + self.other.weight.sum() * 1e-3 * batch[1].sum()

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(each.parameters(), lr=0.1) for each in (self.layer, self.other)]


class ManualPair(Pair):
    automatic_optimization = False

    def training_step(self, batch: Any) -> None:
        loss = super().training_step(batch)
        for optimizer in self.optimizers():
            optimizer.zero_grad()
        self.manual_backward(loss)
        for optimizer in self.optimizers():
            optimizer.step()


@pytest.mark.parametrize("model", [Pair, ManualPair])
def test_the_update_of_every_optimizer_is_skipped_once(tmp_path: Path, model: type[Pair]) -> None:
    guard = NaNGuard(exclude=True, check="loss")
    trainer, net = fit(tmp_path, data(torch.nan), guard, model=model)
    assert trainer.global_step == 11 + 3 * 12 and guard.excluded == 1 and is_good(net)
    assert all(bool(torch.isfinite(each).all()) for each in net.parameters())
    assert [each["batch"] for each in events(tmp_path, "skip")] == [
        events(tmp_path, "nonfinite")[0]["batch"]
    ] * 2


def test_a_second_fit_begins_anew(tmp_path: Path) -> None:
    guard = NaNGuard(exclude=True, max_rollbacks=1)
    for number in range(2):
        trainer, net = fit(tmp_path / str(number), data(torch.nan), guard, max_epochs=2)
        assert trainer.status == "completed" and is_good(net) and guard.excluded == 1
    trainer, _ = fit(tmp_path / "clean", data(1.0), guard, max_epochs=1)
    assert (trainer.global_step, guard.excluded) == (12, 0)


@pytest.mark.parametrize("name", ["nan", "spike"])
def test_a_loss_that_stays_nan_ends_the_run_and_the_good_state_is_saved(tmp_path: Path, name: str) -> None:
    values = torch.full((24,), torch.nan)
    values[:4] = 1.0
    train = DataLoader(TensorDataset(torch.arange(24), values), batch_size=2)
    error, said = {
        "nan": (NonFiniteLoss, "The samples of 5 updates are left out already"),
        "spike": (HooklineError, "gone back 0 times already, and had no checkpoint to go back to 5 times"),
    }[name]
    with pytest.raises(error, match=said):
        fit(tmp_path, train, GUARDS[name]())
    record = json.loads((tmp_path / "run.json").read_text())
    assert record["step"] == 2
    saved = read(tmp_path / "checkpoints" / "last")
    assert torch.isfinite(saved["module"]["layer.weight"]).all() and saved["counters"]["step"] == 2


def test_spike_guard_names_the_samples_it_reports(tmp_path: Path, caplog: Any) -> None:
    with caplog.at_level(logging.WARNING):
        trainer, _ = fit(tmp_path, data(500.0), SpikeGuard(window=8))
    spikes = events(tmp_path, "spike")
    assert spikes and all(BAD in each["samples"]["train"] for each in spikes)
    assert "Its samples: " in caplog.text
    for each in spikes:
        assert sorted(sample.id for sample in trainer.samples(each["step"])) == each["samples"]["train"]


def test_spike_guard_leaves_the_samples_out_after_going_back(tmp_path: Path) -> None:
    guard = SpikeGuard("rollback", window=8, patience=1, exclude=True)
    trainer, net = fit(tmp_path, data(500.0), guard, Save())
    assert trainer.status == "completed" and guard.rollbacks == 1 and not guard.left_out
    after = net.trained[net.trained.index(BAD) + 1 :] if guard.spikes == 1 else []
    assert BAD not in after


def test_exclude_is_refused_where_it_cannot_work(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="exclude=True is for action='rollback'"):
        SpikeGuard(exclude=True)
    with pytest.raises(OptionError, match="leave out the check 'parameters'"):
        NaNGuard(exclude=True, check=["parameters"])

    class Stream(IterableDataset[Any]):
        def __iter__(self) -> Any:
            yield from ((torch.tensor(1), torch.tensor(1.0)),) * 8

    with pytest.raises(OptionError, match="'train' is not read by index"):
        fit(tmp_path, DataLoader(Stream(), batch_size=2), NaNGuard(exclude=True))


def test_samples_of_several_updates_and_loaders_are_named() -> None:
    found = merge([{"web": [3, 1]}, {"web": [1], "code": [9]}])
    assert found == {"web": [1, 3], "code": [9]}
    assert name_samples(found) == " Its samples: 1, 3 of the loader 'web'; 9 of the loader 'code'."
    assert name_samples({}) == ""


def test_spike_guard_leaves_out_only_the_samples_that_are_not_finite(tmp_path: Path) -> None:
    guard = SpikeGuard("rollback", window=8, patience=1, exclude=True)
    trainer, net = fit(tmp_path, data(torch.nan), guard, Save())
    assert trainer.status == "completed" and guard.rollbacks == 1
    (done,) = json.loads((tmp_path / "run.json").read_text())["exclusions"]
    assert done["samples"] == [BAD] and net.trained.count(BAD) == 1


ON_RANKS = """
import json, sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from hooks.test_samples import BAD, NaNGuard, Products, Save, SpikeGuard, data, fit
import torch
nan, loss, spike = NaNGuard(exclude=True), NaNGuard(exclude=True, check="loss"), SpikeGuard("rollback", window=8, patience=1, exclude=True)
for name, guard, saves, accumulate in (
    ("nan", nan, True, 1), ("spike", spike, True, 1),
    ("nan-unsaved", NaNGuard(exclude=True), False, 1), ("loss-unsaved", loss, False, 3), ("spike-unsaved", spike, False, 3),
):
    folder = Path(sys.argv[1]) / name
    hooks = [guard, Save(1)] if saves else [guard]
    trainer, net = fit(folder, data(torch.nan), *hooks, model=Products, accumulate_grad_batches=accumulate)
    ok = trainer.status == "completed" and guard.rollbacks == int(saves) and bool(torch.isfinite(net.layer.weight).all())
    seen = sum(trainer.ranks.gather(net.trained.count(BAD)))
    weights = {each for each in trainer.ranks.gather(net.layer.weight.item())}
    if trainer.strategy.rank == 0:
        done = json.loads((folder / "run.json").read_text())["exclusions"]
        print("excluded", name, ok, [each["samples"] for each in done], seen, len(weights), trainer.global_step)
"""


def test_on_several_ranks_only_the_bad_sample_is_left_out(tmp_path: Path) -> None:
    ended = torchrun(ON_RANKS, tmp_path, str(tmp_path), str(Path(__file__).parents[1]))
    assert ended.code == 0, ended.output
    assert ended.lines("excluded ") == [
        f"loss-unsaved True [[{BAD}]] 1 1 7",
        f"nan True [[{BAD}]] 1 1 24",
        f"nan-unsaved True [[{BAD}]] 1 1 23",
        f"spike True [[{BAD}]] 1 1 24",
        f"spike-unsaved True [[{BAD}]] 1 1 7",
    ]
