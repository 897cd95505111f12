"""Samples that are left out by a list or a file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from ranks.sample_cases import Weighed, Witness
from torch.utils.data import DataLoader, TensorDataset

from hookline import Line, Trainer
from hookline.hooks import ExcludeSamples
from hookline.util.errors import OptionError


def trained(tmp_path: Path, hook: Any, train: Any) -> Witness:
    witness = Witness(0, skips=False)
    options = {"max_epochs": 2, "logger": False, "enable_progress_bar": False}
    Trainer(run_dir=tmp_path, hooks=[witness, hook], **options).fit(Weighed(), train)
    return witness


def loader(samples: int = 9) -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.arange(float(samples)).reshape(-1, 1)), batch_size=2, shuffle=True)


def seen(witness: Witness) -> dict[str, set[int]]:
    found: dict[str, set[int]] = {}
    for window in witness.steps.values():
        for name, _, sample in window:
            found.setdefault(name, set()).add(sample)
    return found


def test_the_samples_of_a_list_and_of_a_file_are_left_out(tmp_path: Path) -> None:
    file = tmp_path / "bad.txt"
    file.write_text("# two bad ones\n3\n\ntrain 7  # scanned upside down\n")
    witness = trained(tmp_path / "run", ExcludeSamples([0], file=file), loader())
    assert seen(witness) == {"train": {1, 2, 4, 5, 6, 8}}


def test_of_several_loaders_the_file_names_one(tmp_path: Path) -> None:
    file = tmp_path / "bad.txt"
    file.write_text("web 1\n2\n")
    found = seen(
        trained(
            tmp_path / "run", ExcludeSamples(file=file, loader="code"), {"web": loader(), "code": loader()}
        )
    )
    assert 1 not in found["web"] and 2 in found["web"] and 1 in found["code"] and 2 not in found["code"]


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (
            "3\nthree\n",
            r"line 2: 'three'\. A line has the index of a sample, or the name of a loader and an index",
        ),
        ("a b 3\n", "line 1: 'a b 3'"),
        ("-1\n", "line 1: '-1'"),
        ("# nothing\n", r"no sample to leave out; pass samples=\[...\] or file="),
    ],
)
def test_a_file_that_is_not_a_list_is_refused_with_its_line(tmp_path: Path, lines: str, message: str) -> None:
    file = tmp_path / "bad.txt"
    file.write_text(lines)
    with pytest.raises(OptionError, match=message):
        ExcludeSamples(file=file)
    with pytest.raises(OptionError, match=r"none\.txt cannot be read"):
        ExcludeSamples(file=tmp_path / "none.txt")
    with pytest.raises(OptionError, match="samples: -3 is not the index of a sample"):
        ExcludeSamples([-3])


def test_another_loop_reads_its_own_data(tmp_path: Path) -> None:
    line = Line(Weighed(), hooks=[ExcludeSamples([1])])
    with pytest.raises(OptionError, match=r"works in a fit of hookline\.Trainer"), line:
        pass
