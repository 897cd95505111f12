"""`hookline samples`: the samples behind a step, from the record alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks.sample_cases import Weighed, Witness
from torch.utils.data import DataLoader, TensorDataset

from hookline import Hook, Trainer
from hookline.cli import main
from hookline.hooks import ExcludeSamples
from hookline.run.record import _encode_record


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Witness]:
    """A run of two loaders, each with its own dataset."""
    folder = tmp_path_factory.mktemp("run")
    witness = Witness(0, skips=False)
    data = {
        name: DataLoader(
            TensorDataset(torch.arange(float(count)).reshape(-1, 1)), batch_size=25, shuffle=True
        )
        for name, count in (("web", 100), ("code", 50))
    }
    Trainer(
        max_epochs=2, seed=1, run_dir=folder, hooks=[witness], enable_progress_bar=False, logger=False
    ).fit(Weighed(), data)
    return folder, witness


def test_the_samples_are_printed_as_a_table_as_data_and_as_a_list(recorded: Any, capsys: Any) -> None:
    folder, witness = recorded
    assert main(["samples", str(folder), "--step", "3"]) == 0
    table = capsys.readouterr().out
    assert table.startswith("step 3: 25 samples, epoch 0, batch 2\nloader  rank  batch  samples\n")
    numbers = sorted(
        int(each) for line in table.splitlines()[2:] for each in line[20:].replace(",", " ").split()
    )
    assert numbers == [sample for _, _, sample in witness.steps[3]]

    assert main(["samples", str(folder), "--step", "2-4", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert [each["step"] for each in data["steps"]] == [2, 3, 4] and data["exclusions"] == []
    for each in data["steps"]:
        found = sorted((one["loader"], one["rank"], one["id"]) for one in each["samples"])
        assert found == witness.steps[each["step"]]

    assert main(["samples", str(folder), "--step", "1-6", "--plain"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 150 and "web 99" in lines and "code 49" in lines
    (folder / "bad.txt").write_text("\n".join(lines))
    assert {name: len(each) for name, each in ExcludeSamples(file=folder / "bad.txt").samples.items()} == {
        "code": 50,
        "web": 100,
    }


@pytest.mark.parametrize(
    ("step", "message"),
    [
        ("0", "--step 0: pass a step of the run, from 1 to 12, or several as in 100-120"),
        ("13", "from 1 to 12"),
        ("5-3", "from 1 to 12"),
        ("last", "--step last: pass a step of the run"),
    ],
)
def test_a_wrong_step_is_a_wrong_command(recorded: Any, capsys: Any, step: str, message: str) -> None:
    assert main(["samples", str(recorded[0]), "--step", step]) == 2
    assert message in capsys.readouterr().err


def test_a_run_without_an_order_says_so(recorded: Any, tmp_path: Path, capsys: Any) -> None:
    assert main(["samples", str(tmp_path), "--step", "1"]) == 2
    assert "is not the directory of a run: it has no readable run.json" in capsys.readouterr().err
    record = json.loads((recorded[0] / "run.json").read_text())
    order = record.pop("order")
    for given, message in (
        (None, "run.json does not have the order of the training data"),
        ({**order, "version": 99}, "in version 99; this version of Hookline reads 1"),
        ({"version": 1}, "The order in the record is damaged: KeyError: 'stretches'"),
        ({**order, "layouts": []}, "The order is not recorded for batch 0 of epoch 0"),
    ):
        (tmp_path / "run.json").write_text(json.dumps({**record, "order": given}))
        assert main(["samples", str(tmp_path), "--step", "1"]) == 1
        assert message in capsys.readouterr().err


def test_a_damaged_or_left_out_order_says_why(recorded: Any, tmp_path: Path, capsys: Any) -> None:
    folder, _ = recorded
    record = json.loads((folder / "run.json").read_text())
    damages: list[tuple[Any, str]] = [
        ({**record["order"], "layouts": [{"epoch": 0}]}, "in run.json is damaged: KeyError"),
        ([1], "is damaged: it is a list"),
        (
            {"why": "it is too large: run.json has at most 1 MB"},
            "data: it is too large: run.json has at most",
        ),
    ]
    for order, message in damages:
        (tmp_path / "run.json").write_text(json.dumps({**record, "order": order}))
        assert main(["samples", str(tmp_path), "--step", "1"]) == 1
        assert message in capsys.readouterr().err


def test_a_resumed_run_that_is_killed_at_once_keeps_the_order(tmp_path: Path, capsys: Any) -> None:
    def fit(*hooks: Any, **more: Any) -> None:
        trainer = Trainer(
            max_epochs=2, run_dir=tmp_path, hooks=hooks, logger=False, enable_progress_bar=False, **more
        )
        data = DataLoader(TensorDataset(torch.arange(8.0).reshape(-1, 1)), batch_size=2, shuffle=True)
        trainer.fit(Weighed(), data, resume="auto")

    class Looks(Hook):
        def on_train_start(self) -> None:
            assert main(["samples", str(tmp_path), "--step", "3"]) == 0

    fit(max_steps=3)
    fit(Looks())
    assert "step 3: 2 samples, epoch 0, batch 2" in capsys.readouterr().out


def test_an_order_that_is_too_large_leaves_a_reason() -> None:
    order = {"values": "x" * 2**20}
    assert "too large" in json.loads(_encode_record({"order": order, "id": "a"}))["order"]["why"]
