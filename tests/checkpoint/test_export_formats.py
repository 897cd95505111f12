"""Formats of an export: chosen by name or ending, put in place when complete, read one tensor at a time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from hookline import CheckpointError, OptionError
from hookline.checkpoint.export_formats import (
    FORMATS,
    check_target,
    choose_format,
    put_in_place,
    write_weights,
)
from hookline.checkpoint.sharded import ShardedTensor


@pytest.mark.parametrize(
    ("out", "format", "chosen"),
    [
        ("a.pt", None, "torch"),
        ("a.safetensors", None, "safetensors"),
        ("a.onnx", None, "onnx"),
        ("a.pt2", None, "torch-export"),
        ("a.pt", "torch", "torch"),
        ("folder", "dcp", "dcp"),
        ("folder-0.5b", "hf-sharded", "hf-sharded"),
    ],
)
def test_the_name_or_the_ending_chooses_the_format(out: str, format: str | None, chosen: str) -> None:
    assert choose_format(Path(out), format).name == chosen


@pytest.mark.parametrize(
    ("out", "format", "said"),
    [
        ("a.bin", None, r"a.bin must end with .pt, .safetensors, .onnx, .pt2.*folder, name its format: hf-sharded or dcp"),
        ("a.safetensor", None, "Did you mean '.safetensors'"),
        ("a.pt", "safetensors", "must end with .safetensors, because the format .*: a.safetensors"),
        ("a", "onnx", r"must end with .onnx.*: a.onnx"),
        ("a.safetensors", "hf-sharded", "ends like a file of the format safetensors, but hf-sharded is a folder: a"),
        ("a", "hf_sharded", r"format='hf_sharded', allowed: torch, .*Did you mean 'hf-sharded'"),
        ("s3://bucket/x.pt", None, "not to a URL"),
    ],
)  # fmt: skip
def test_a_name_and_an_ending_that_contradict_are_refused(out: str, format: str | None, said: str) -> None:
    with pytest.raises(OptionError, match=said):
        choose_format(Path(out), format)


def names() -> list[str]:
    return sorted(str(each) for each in Path().rglob("*"))


@pytest.mark.parametrize("format", ["torch", "safetensors", "hf-sharded", "dcp"])
def test_an_export_that_fails_leaves_what_was_there_and_nothing_else(format: str) -> None:
    chosen = FORMATS[format]
    out = Path(f"out{chosen.ending}")
    with put_in_place(out, is_file=bool(chosen.ending)) as path:
        write_weights({"a": torch.ones(3)}, path, chosen)
    before = {name: Path(name).read_bytes() for name in names() if Path(name).is_file()}
    assert before
    with pytest.raises(ZeroDivisionError), put_in_place(out, is_file=bool(chosen.ending)) as path:
        write_weights({"b": torch.ones(3)}, path, chosen)
        raise ZeroDivisionError
    assert {name: Path(name).read_bytes() for name in names() if Path(name).is_file()} == before
    check_target(out, chosen, force=True)
    with put_in_place(out, is_file=bool(chosen.ending)) as path:
        write_weights({"b": torch.ones(3)}, path, chosen)
    after = {name: Path(name).read_bytes() for name in names() if Path(name).is_file()}
    assert after.keys() == before.keys() and after != before


def test_a_folder_with_other_files_is_not_replaced_even_by_force() -> None:
    Path("out").mkdir()
    (Path("out") / "model.safetensors").touch()
    for format in ("hf-sharded", "dcp"):
        with pytest.raises(OptionError, match="out exists; --force replaces it"):
            check_target(Path("out"), FORMATS[format], force=False)
    check_target(Path("out"), FORMATS["hf-sharded"], force=True)
    with pytest.raises(OptionError, match="does not write: model.safetensors. It is not replaced"):
        check_target(Path("out"), FORMATS["dcp"], force=True)
    (Path("out") / "config.json").touch()
    with pytest.raises(OptionError, match="does not write: config.json. It is not replaced"):
        check_target(Path("out"), FORMATS["hf-sharded"], force=True)
    with pytest.raises(OptionError, match="exists and is a directory"):
        check_target(Path("out"), FORMATS["torch"], force=True)
    with pytest.raises(OptionError, match="is not a directory"):
        check_target(Path("out/config.json"), FORMATS["dcp"], force=True)


def test_files_of_a_program_are_moved_before_the_program() -> None:
    with put_in_place(Path("net.onnx"), is_file=True) as path:
        path.write_text("program")
        path.with_name("net.onnx.data").write_text("weights")
    assert names() == ["net.onnx", "net.onnx.data"]
    Path("net.onnx").unlink()
    with pytest.raises(OptionError, match="net.onnx.data exists; --force replaces it"):
        check_target(Path("net.onnx"), FORMATS["onnx"], force=False)


@pytest.mark.parametrize("format", ["safetensors", "hf-sharded", "dcp"])
def test_sharded_tensors_are_read_one_at_a_time(format: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import weakref

    alive: weakref.WeakSet[torch.Tensor] = weakref.WeakSet()
    most = []

    def read(self: ShardedTensor) -> torch.Tensor:
        made = torch.full(tuple(self.shape), float(len(most)))
        alive.add(made)
        most.append(len(alive))
        return made

    monkeypatch.setattr(ShardedTensor, "whole", read)
    weights: dict[str, Any] = {
        f"w{n}": ShardedTensor(f"w{n}", torch.Size([4]), torch.float32, lambda: iter(())) for n in range(6)
    }
    with put_in_place(Path("out" + FORMATS[format].ending), is_file=bool(FORMATS[format].ending)) as path:
        write_weights(weights, path, FORMATS[format], "40B")
    assert len(most) == 6 and max(most) <= 2


def test_what_safetensors_cannot_store_is_named() -> None:
    for value, kind in ((torch.ones(1, dtype=torch.complex64), "torch.complex64"), ({}, "dict")):
        for format in ("safetensors", "hf-sharded"):
            with pytest.raises(CheckpointError, match=rf"cannot store x \({kind}\). Export to a .pt file"):
                write_weights({"x": value}, Path("x"), FORMATS[format])
