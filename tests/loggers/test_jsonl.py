"""log.jsonl: every record whole and valid, whatever is in it and however the run before it ended."""

from __future__ import annotations

import datetime
import enum
import json
import math
import struct
import zlib
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from loggers.everything import figure
from tiny import Net, batches, quiet

from hookline import Hook, JSONLines
from hookline.loggers import BadValue
from hookline.loggers.jsonl import image_png, jsonable


def strict(line: str) -> Any:
    """JSON as everybody else reads it: no NaN, no Infinity."""

    def refuse(name: str) -> Any:
        raise ValueError(f"{name} is no JSON")

    return json.loads(line, parse_constant=refuse)


def records(path: Path) -> list[dict[str, Any]]:
    text = path.read_text()
    assert text.endswith("\n")
    return [strict(line) for line in text.splitlines()]


def rows(path: Path) -> list[dict[str, Any]]:
    return [each for each in records(path) if each["type"] == "metrics"]


class Color(enum.Enum):
    RED = 1


class Odd:
    def __repr__(self) -> str:
        return 'a "quoted"\nthing'


VALUES: list[Any] = [
    torch.device("cpu"),
    torch.float16,
    math.nan,
    math.inf,
    -math.inf,
    Path("a/b"),
    torch.tensor(1.5),
    torch.tensor([1, 2]),
    torch.tensor(math.nan),
    torch.ones(2, requires_grad=True),
    torch.zeros(2, device="meta"),
    torch.zeros(2, dtype=torch.bfloat16),
    torch.eye(2).to_sparse(),
    np.float32(0.5),
    np.int64(3),
    np.bool_(True),
    np.array([[1.0, math.nan]]),
    np.array(["a"]),
    {1, 2},
    frozenset({"a"}),
    (1, 2),
    {1: "int key", None: "none key", (1, 2): "tuple key"},
    b"bytes",
    1 + 2j,
    Color.RED,
    Odd(),
    len,
    Odd,
    datetime.datetime(2024, 1, 1),
    Decimal("1.5"),
    'line\nbreak\u2028 \ud800 "quote"',
    10**400,
    True,
    None,
    range(3),
    iter([1]),
]


@pytest.mark.parametrize("value", VALUES, ids=lambda value: f"{type(value).__name__}")
def test_every_record_is_one_valid_line_whatever_the_value(value: Any, tmp_path: Path) -> None:
    logger = JSONLines(tmp_path / "log.jsonl")
    logger.write("first", value=value, nested={"deep": [value]})
    logger.log_hyperparams({"value": value})
    logger.write("last")
    logger.close()
    assert [each["type"] for each in records(tmp_path / "log.jsonl")] == ["first", "hyperparams", "last"]


anything = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text()
    | st.binary()
    | st.complex_numbers()
    | st.dates(),
    lambda inner: (
        st.lists(inner) | st.dictionaries(st.text() | st.integers(), inner) | st.tuples(inner, inner)
    ),
    max_leaves=15,
)


@settings(deadline=None, max_examples=100, database=None)
@given(anything)
def test_any_nested_value_becomes_strict_json(value: Any) -> None:
    line = json.dumps(jsonable(value), allow_nan=False)
    strict(line)
    assert "\n" not in line


def test_numbers_stay_numbers_and_the_rest_can_be_read() -> None:
    assert jsonable(
        {"a": np.float32(0.5), "b": torch.tensor([1, 2]), "c": np.int64(3), "d": torch.tensor(2.0)}
    ) == {"a": 0.5, "b": [1, 2], "c": 3, "d": 2.0}
    assert jsonable([math.nan, math.inf, -math.inf]) == ["nan", "inf", "-inf"]
    assert jsonable({"device": torch.device("cpu"), "path": Path("a/b")}) == {"device": "cpu", "path": "a/b"}


# ---- in a run ----------------------------------------------------------------------------------------------------


def test_a_run_writes_its_records_into_its_directory() -> None:
    trainer = quiet(logger=True, run_dir="mine", log_every_n_steps=1)
    trainer.fit(Net(), batches(2), batches(1))
    written = rows(Path("mine/log.jsonl"))
    assert [(each["step"], each["epoch"], sorted(each["metrics"])) for each in written] == [
        (1, 0, ["lr", "train/loss"]),
        (2, 0, ["lr", "train/loss"]),
        (2, 0, ["val/loss"]),
        (2, 0, ["train/loss"]),
    ]
    assert written[-1]["metrics"]["train/loss"] == pytest.approx(trainer.metrics["train/loss"])


def test_runs_of_one_second_do_not_share_a_file() -> None:
    for _ in range(3):
        quiet(logger=True).fit(Net(), batches(1))
    assert len(list(Path("runs").glob("*/log.jsonl"))) == 3


def test_a_loss_that_is_not_a_number_is_still_a_valid_row() -> None:
    class Nan(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.log("bad", math.nan)
            return super().training_step(batch, batch_idx)

    quiet(logger=True, run_dir="mine", log_every_n_steps=1).fit(Nan(), batches(1))
    assert rows(Path("mine/log.jsonl"))[0]["metrics"]["bad"] == "nan"


def test_a_record_is_on_disk_as_soon_as_it_is_written() -> None:
    counts: list[int] = []

    class Looks(Hook):
        def on_step_end(self) -> None:
            counts.append(len(rows(Path("mine/log.jsonl"))))

    quiet(logger=True, run_dir="mine", log_every_n_steps=1, hooks=[Looks()]).fit(Net(), batches(3))
    assert counts == [1, 2, 3]


def test_a_failing_run_leaves_whole_records() -> None:
    class Fails(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if batch_idx == 2:
                raise RuntimeError("broken")
            return super().training_step(batch, batch_idx)

    with pytest.raises(RuntimeError, match="broken"):
        quiet(logger=True, run_dir="mine", log_every_n_steps=1).fit(Fails(), batches(3))
    assert [each["step"] for each in rows(Path("mine/log.jsonl"))] == [1, 2]


def test_half_a_line_of_a_killed_run_does_not_touch_the_next_record() -> None:
    path = Path("mine/log.jsonl")
    path.parent.mkdir()
    path.write_text('{"type": "metrics", "step": 1}\n{"type": "metr')
    quiet(logger=True, run_dir="mine", log_every_n_steps=1).fit(Net(), batches(1))
    first, torn, *new = path.read_text().splitlines()
    assert (strict(first)["step"], torn) == (1, '{"type": "metr')
    assert [each["step"] for each in map(strict, new) if each["type"] == "metrics"] == [1, 1]


def test_a_file_that_ended_well_gets_no_empty_line() -> None:
    path = Path("log.jsonl")
    path.write_text('{"type": "a"}\n')
    logger = JSONLines(path)
    logger.write("b")
    logger.close()
    assert [each["type"] for each in records(path)] == ["a", "b"]


# ---- more than numbers -------------------------------------------------------------------------------------------


def open_logger(folder: Path) -> JSONLines:
    logger = JSONLines()
    logger.open(lambda: folder)
    return logger


def test_scalars_text_and_histograms_are_records(tmp_path: Path) -> None:
    logger = open_logger(tmp_path)
    logger.add_scalar("a", torch.tensor(2.0), 5)
    logger.add_text("t", "hello", 6)
    logger.add_histogram("h", torch.tensor([0.0, 1.0, 1.0, math.nan, math.inf]), 7)
    logger.add_histogram("empty", torch.zeros(0), 8)
    logger.close()
    scalar, text, histogram, empty = records(tmp_path / "log.jsonl")
    assert (scalar["step"], scalar["metrics"]) == (5, {"a": 2.0})
    assert (text["tag"], text["text"]) == ("t", "hello")
    assert (sum(histogram["counts"]), histogram["nonfinite"]) == (3, 2)
    assert len(histogram["edges"]) == len(histogram["counts"]) + 1
    assert empty["counts"] == []


def read_png(data: bytes) -> tuple[int, int, bytes]:
    """Width, height and raw rows, with every checksum checked."""
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    at, chunks = 8, {}
    while at < len(data):
        (size,) = struct.unpack(">I", data[at : at + 4])
        kind, body = data[at + 4 : at + 8], data[at + 8 : at + 8 + size]
        assert struct.unpack(">I", data[at + 8 + size : at + 12 + size])[0] == zlib.crc32(kind + body)
        chunks[kind] = body
        at += 12 + size
    width, height = struct.unpack(">II", chunks[b"IHDR"][:8])
    return width, height, zlib.decompress(chunks[b"IDAT"])


@pytest.mark.parametrize(
    ("image", "pixels"),
    [
        (torch.tensor([[0.0, 1.0], [2.0, -1.0]]), b"\0\x00\xff\0\xff\x00"),
        (torch.tensor([[[0, 7]]], dtype=torch.uint8), b"\0\x00\x07"),
        (torch.ones(3, 1, 2), b"\0" + b"\xff" * 6),
        (np.zeros((4, 1, 1)), b"\0" + b"\x00" * 4),
        (torch.tensor([[True, False]]), b"\0\xff\x00"),
        (torch.tensor([[300, -5]]), b"\0\xff\x00"),
    ],
)
def test_images_are_true_png_files(image: Any, pixels: bytes) -> None:
    width, height, raw = read_png(image_png("x", image))
    assert raw == pixels
    assert (height, width) == tuple(torch.as_tensor(image).shape[-2:])


def test_what_is_no_image_is_refused_with_its_shape() -> None:
    with pytest.raises(BadValue, match=r"'x' takes an image of shape .* not a Tensor of shape \(2, 4, 4\)"):
        image_png("x", torch.zeros(2, 4, 4))


MISTAKES: dict[str, Any] = {
    "two numbers": lambda logger, step: logger.add_scalar("x", torch.ones(2), step),
    "text": lambda logger, step: logger.add_scalar("x", "high", step),
    "no numbers": lambda logger, step: logger.add_histogram("x", ["a"], step),
    "no pixels": lambda logger, step: logger.add_image("x", torch.zeros(2, 2, device="meta"), step),
    "no figure": lambda logger, step: logger.add_figure("x", torch.zeros(2, 2), step),
    "a figure that cannot be drawn": lambda logger, step: logger.add_figure("x", torn(), step),
}


def torn() -> Any:
    drawn = figure()
    drawn.suptitle(r"$\no_such_symbol{$")
    return drawn


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_wrong_value_is_the_callers_mistake_and_the_log_continues(mistake: str) -> None:
    class Errs(Hook):
        def on_step_end(self, logger: Any, step: int) -> None:
            if step == 2:
                with pytest.raises(BadValue, match="'x'"):
                    MISTAKES[mistake](logger, step)

    quiet(logger=True, run_dir="run", log_every_n_steps=1, hooks=[Errs()]).fit(Net(), batches(4))
    assert [each["step"] for each in rows(Path("run/log.jsonl"))] == [1, 2, 3, 4, 4]
    assert not Path("run/media").exists()


@pytest.mark.parametrize(
    ("values", "counted", "bins"),
    [
        (np.arange(60.0)[::-1], 60, 30),
        (torch.tensor([1.0, 1.0 + 2**-23]), 2, 30),
        (np.array([-3e38, 3e38], dtype=np.float32), 2, 30),
        (np.array([1.0, np.nextafter(1.0, 2.0)]), 2, 1),
        (np.array([-1.7e308, 1.7e308]), 2, 1),
        (torch.tensor([math.nan, 2.0]), 1, 30),
        (torch.zeros(0), 0, 0),
    ],
    ids=["reversed", "nearly equal", "far apart", "as near as can be", "as far as can be", "nan", "nothing"],
)
def test_any_numbers_make_a_histogram(values: Any, counted: int, bins: int, tmp_path: Path) -> None:
    logger = open_logger(tmp_path)
    logger.add_histogram("w", values, 1)
    logger.close()
    (record,) = records(tmp_path / "log.jsonl")
    assert (sum(record["counts"]), len(record["counts"])) == (counted, bins)
    assert len(record["edges"]) == (bins + 1 if bins else 0) and record["nonfinite"] == len(values) - counted


def test_images_and_figures_become_files_inside_the_run_directory(tmp_path: Path) -> None:
    logger = open_logger(tmp_path)
    logger.add_image("val/sample 1", torch.zeros(1, 2, 2), 3)
    logger.add_figure("confusion", figure(), 4)
    logger.close()
    image, drawing = records(tmp_path / "log.jsonl")
    read_png((tmp_path / image["path"]).read_bytes())
    assert read_png((tmp_path / drawing["path"]).read_bytes())[:2] == (100, 100)
    assert (image["step"], image["tag"], drawing["tag"]) == (3, "val/sample 1", "confusion")


@pytest.mark.parametrize(
    "tag", ["../../escape", "/absolute", "..", "a/../../b", "nul\0byte", "", "~", "ünï", "x" * 400]
)
def test_no_tag_can_leave_the_run_directory(tag: str, tmp_path: Path) -> None:
    folder = tmp_path / "outer" / "run"
    logger = open_logger(folder)
    logger.add_image(tag, torch.zeros(1, 1, 1), 0)
    logger.close()
    (record,) = records(folder / "log.jsonl")
    written = (folder / record["path"]).resolve()
    assert written.is_file() and written.is_relative_to(folder.resolve())
    everything = {each for each in tmp_path.rglob("*") if each.is_file()}
    assert everything == {written, folder / "log.jsonl"}
    assert record["tag"] == tag


def test_two_tags_never_share_a_file(tmp_path: Path) -> None:
    logger = open_logger(tmp_path)
    for tag in ("val/image", "val_image", "val image"):
        logger.add_image(tag, torch.zeros(1, 1, 1), 0)
    logger.close()
    assert len({each["path"] for each in records(tmp_path / "log.jsonl")}) == 3


def test_a_closed_logger_can_be_opened_for_the_next_run(tmp_path: Path) -> None:
    logger = JSONLines()
    for name in ("one", "two"):
        logger.open(lambda name=name: tmp_path / name)
        logger.write(name)
        logger.close()
    assert [records(tmp_path / name / "log.jsonl")[0]["type"] for name in ("one", "two")] == ["one", "two"]
