"""metrics.csv: a whole table at any moment."""

from __future__ import annotations

import csv
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from loggers.everything import ODD_TAGS, files, tell_everything
from tiny import Net, batches, quiet

from hookline import Hook, OptionError
from hookline.loggers import CSV


def table(path: Path) -> list[dict[str, str]]:
    with path.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file, strict=True))
    assert all(None not in row and None not in row.values() for row in rows)  # every row has every column
    return rows


def test_a_run_writes_a_table_and_its_parameters() -> None:
    trainer = quiet(logger=CSV(), run_dir="mine", log_every_n_steps=1)
    trainer.fit(Net(), batches(2), batches(1))
    rows = table(Path("mine/metrics.csv"))
    assert [(row["step"], row["epoch"], bool(row["train/loss"]), bool(row["val/loss"])) for row in rows] == [
        ("1", "0", True, False),
        ("2", "0", True, False),
        ("2", "0", False, True),
        ("2", "0", True, False),
    ]
    assert list(rows[0]) == ["step", "epoch", "train/loss", "lr", "val/loss"]
    assert float(rows[-1]["train/loss"]) == trainer.metrics["train/loss"]
    parameters = {row["name"]: row["value"] for row in table(Path("mine/hparams.csv"))}
    assert parameters["options/max_epochs"] == "1" and parameters["module"] == "Net"
    assert files(Path()) == {Path("mine/metrics.csv"), Path("mine/hparams.csv")}


def test_every_kind_of_record_is_taken_and_numbers_come_back_exactly(tmp_path: Path) -> None:
    tell_everything(CSV(), tmp_path)
    rows = table(tmp_path / "metrics.csv")
    assert (rows[0]["train/loss"], rows[0]["bad"], rows[0]["up"], rows[0]["down"]) == (
        "1.5",
        "nan",
        "inf",
        "-inf",
    )
    assert [(row["step"], row["array"]) for row in rows if row["array"]] == [("", "0.25")]
    names = {
        "step": "metric/step",
        "epoch": "metric/epoch",
        "line\nbreak": "line\\nbreak",
        "nul\0": "nul\\0",
        "\ud800": "\\ud800",
    }
    for number, tag in enumerate(ODD_TAGS):
        assert [
            float(row[names.get(tag, tag)]) for row in rows if row["step"] == "5" and row[names.get(tag, tag)]
        ] == [number]
    assert {row["name"]: row["value"] for row in table(tmp_path / "hparams.csv")}["net/width"] == "8"


def test_the_table_is_complete_whenever_it_is_read() -> None:
    seen: list[tuple[int, int]] = []

    class Looks(Hook):
        def on_step_end(self, trainer: Any, step: int) -> None:
            trainer.log(f"new{step}", step)
            rows = table(Path("mine/metrics.csv")) if step > 1 else []
            seen.append((len(rows), len(rows[0]) if rows else 0))

    quiet(logger=CSV(), run_dir="mine", log_every_n_steps=1, hooks=[Looks()]).fit(Net(), batches(4))
    rows = table(Path("mine/metrics.csv"))
    assert [row["new2"] for row in rows].count("2.0") == 1
    assert [name for name in rows[0] if name.startswith("new")] == ["new1", "new2", "new3", "new4"]
    assert [count for count, _ in seen] == sorted(count for count, _ in seen) and seen[-1][0] >= 3


def test_a_table_that_cannot_be_replaced_is_still_the_old_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    logger = CSV()
    logger.open(lambda: tmp_path)
    logger.log_metrics({"a": 1.0}, 1, 0)
    before = (tmp_path / "metrics.csv").read_bytes()

    def full(*given: Any) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OSError, match="disk full"):
        logger.log_metrics({"b": 1.0}, 2, 0)
    assert (tmp_path / "metrics.csv").read_bytes() == before


def test_a_resumed_run_continues_the_table(tmp_path: Path) -> None:
    for step, names in enumerate((["a"], ["a"], ["b"], ["a", "c"])):
        logger = CSV()
        logger.open(lambda: tmp_path)
        logger.log_metrics({name: float(step) for name in names}, step, 0)
        logger.close()
    rows = table(tmp_path / "metrics.csv")
    assert list(rows[0]) == ["step", "epoch", "a", "b", "c"]
    assert [(row["a"], row["b"], row["c"]) for row in rows] == [
        ("0.0", "", ""),
        ("1.0", "", ""),
        ("", "2.0", ""),
        ("3.0", "", "3.0"),
    ]


@pytest.mark.parametrize(
    "left",
    ["step,epoch,a\r\n1,0,0.25\r\n2,0,0.2", "step,epoch,a\r\n1,0,0.25\r\n2", "step,epoch,a\r\n1,0,0.25\r\n"],
)
def test_half_a_row_of_a_killed_run_is_left_out(left: str, tmp_path: Path) -> None:
    (tmp_path / "metrics.csv").write_bytes(left.encode())
    logger = CSV()
    logger.open(lambda: tmp_path)
    logger.log_metrics({"a": 0.5}, 3, 0)
    assert [(row["step"], row["a"]) for row in table(tmp_path / "metrics.csv")] == [
        ("1", "0.25"),
        ("3", "0.5"),
    ]
    logger.close()


@pytest.mark.parametrize("left", ["", "step,ep"])
def test_a_file_without_a_whole_header_is_begun_anew(left: str, tmp_path: Path) -> None:
    (tmp_path / "metrics.csv").write_text(left)
    logger = CSV()
    logger.open(lambda: tmp_path)
    logger.log_metrics({"a": 0.5}, 3, 0)
    assert table(tmp_path / "metrics.csv") == [{"step": "3", "epoch": "0", "a": "0.5"}]
    logger.close()


@settings(deadline=None, max_examples=50, database=None)
@given(
    st.lists(
        st.dictionaries(st.text(max_size=5), st.floats(), min_size=1, max_size=4), min_size=1, max_size=6
    )
)
def test_any_metrics_in_any_order_come_back(
    tmp_path_factory: pytest.TempPathFactory, rows: list[dict[str, float]]
) -> None:
    folder = tmp_path_factory.mktemp("table")
    logger = CSV()
    logger.open(lambda: folder)
    for step, row in enumerate(rows):
        logger.log_metrics(row, step, 0)
    logger.close()
    read = table(folder / "metrics.csv")
    assert [sorted(repr(value) for value in row.values()) for row in rows] == [
        sorted(value for name, value in row.items() if name not in ("step", "epoch") and value)
        for row in read
    ]


@pytest.mark.parametrize("name", ["../metrics.csv", "/etc/metrics.csv", "a/../../b.csv", ""])
def test_the_table_stays_in_the_run_directory(name: str) -> None:
    with pytest.raises(OptionError, match="inside the run's directory"):
        CSV(name)


def test_a_disk_that_is_full_does_not_stop_the_training(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*given: Any) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(os, "fsync", full)
    trainer = quiet(logger=CSV(), log_every_n_steps=1)
    trainer.fit(Net(), batches(3))
    assert trainer.state.step == 3
    assert [record.message for record in caplog.records] == [
        "CSV failed in log_hyperparams and is switched off for this run"
    ]
