"""Folders in the layout of Hugging Face: split by size, and read with every file checked."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny import Net, batches, quiet
from torch import Tensor, nn

from hookline import CheckpointError, OptionError, import_checkpoint, load_weights
from hookline.checkpoint.hf_folder import INDEX, is_hf_folder, parse_size, read_hf_folder, write_hf_folder


def weights() -> dict[str, Tensor]:
    return {"a": torch.arange(4.0), "b": torch.ones(3, 2), "c": torch.arange(2), "large": torch.zeros(50)}


def folder(shard_size: int = 40) -> Path:
    path = Path("folder")
    path.mkdir()
    write_hf_folder(weights(), path, shard_size)
    return path


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_shards_have_at_most_the_size_and_the_index_names_them() -> None:
    path = folder()
    names = sorted(each.name for each in path.iterdir())
    assert names == [*(f"model-0000{n}-of-00003.safetensors" for n in (1, 2, 3)), INDEX]
    index = json.loads((path / INDEX).read_text())
    assert index["metadata"] == {"total_parameters": 62, "total_size": 256}
    assert set(load_file(path / "model-00001-of-00003.safetensors")) == {"a", "b"}
    assert index["weight_map"]["large"] == "model-00003-of-00003.safetensors"  # larger than a shard may be
    assert same(read_hf_folder(path), weights())


def test_one_shard_is_a_plain_file_without_an_index() -> None:
    path = folder(10**6)
    assert [each.name for each in path.iterdir()] == ["model.safetensors"]
    assert same(load_file(path / "model.safetensors"), weights()) and same(read_hf_folder(path), weights())


def test_a_folder_is_a_source_of_weights_and_can_be_imported() -> None:
    net = nn.Linear(3, 2)
    Path("net").mkdir()
    write_hf_folder(net.state_dict(), Path("net"), 10)
    for source in ("net", import_checkpoint("net")):
        assert load_weights(other := nn.Linear(3, 2), source).complete
        assert torch.equal(other.weight, net.weight)
    with pytest.raises(CheckpointError, match="has only weights: leave out weights='ema'"):
        import_checkpoint("net", weights="ema")


@pytest.mark.parametrize(
    ("given", "size"), [("5GB", 5 * 10**9), ("500 mb", 5 * 10**8), ("1.5KiB", 1536), ("7B", 7), (12, 12)]
)
def test_sizes_are_read_with_their_units(given: Any, size: int) -> None:
    assert parse_size(given) == size


@pytest.mark.parametrize("given", ["", "5", "five GB", "-1GB", "0MB", 0, True, None, "5XB"])
def test_what_is_not_a_size_is_refused(given: Any) -> None:
    with pytest.raises(OptionError, match="is not a size: pass a number of bytes with a unit, such as 5GB"):
        parse_size(given)


# ---- damaged and hostile folders ---------------------------------------------------------------------------------


def change_index(path: Path, change: Callable[[Any], Any]) -> None:
    index = json.loads((path / INDEX).read_text())
    (path / INDEX).write_text(json.dumps(change(index) or index))


def point_to(file: str) -> Callable[[Path], None]:
    return lambda path: change_index(path, lambda index: index["weight_map"].update(a=file))


def outside(path: Path) -> None:
    save_file({"a": torch.ones(1)}, path.parent / "secret.safetensors")


def link(path: Path) -> None:
    outside(path)
    (path / "model-00001-of-00003.safetensors").unlink()
    os.symlink(Path("secret.safetensors").absolute(), path / "model-00001-of-00003.safetensors")


def truncate(path: Path) -> None:
    file = path / "model-00002-of-00003.safetensors"
    file.write_bytes(file.read_bytes()[:-3])


def huge_header(path: Path) -> None:
    (path / "model-00002-of-00003.safetensors").write_bytes((2**62).to_bytes(8, "little") + b"{}")


def swap(path: Path) -> None:
    change_index(
        path, lambda index: index["weight_map"].update(a=index["weight_map"]["c"], c=index["weight_map"]["a"])
    )


DAMAGE: dict[str, tuple[Callable[[Path], Any], str]] = {
    "a path above": (point_to("../secret.safetensors"), r"'../secret.safetensors', which is not the plain name"),
    "an absolute path": (point_to("/etc/passwd"), "'/etc/passwd', which is not the plain name of a file"),
    "the folder": (point_to(".."), "is not the plain name"),
    "a pipe": (lambda path: (point_to("p")(path), os.mkfifo(path / "p")), "damaged: p is not a regular file"),
    "a link out": (link, r"is a link to .*secret.safetensors, outside of the checkpoint"),
    "a missing shard": (lambda path: (path / "model-00002-of-00003.safetensors").unlink(), "model-00002-of-00003.safetensors is missing"),
    "a truncated shard": (truncate, "model-00002-of-00003.safetensors cannot be read as safetensors"),
    "a huge header": (huge_header, "cannot be read as safetensors: .*[Hh]eader"),
    "weights in other files": (swap, "does not have 'a', which model.safetensors.index.json says"),
    "a weight too many": (lambda path: change_index(path, lambda index: index["weight_map"].pop("a") and None), "has 'a', which is nowhere according to"),
    "a weight that is nowhere": (lambda path: change_index(path, lambda index: index["weight_map"].update(x=index["weight_map"]["a"])), "does not have 'x'"),
    "no table": (lambda path: (path / INDEX).write_text("[]"), "has no `weight_map`, a table from weights to files"),
    "numbers for files": (lambda path: change_index(path, lambda index: {"weight_map": {"a": 1}}), "has no `weight_map`"),
    "not JSON": (lambda path: (path / INDEX).write_text("{"), "cannot be used"),
    "a name twice": (lambda path: (path / INDEX).write_text('{"weight_map": {"a": "x", "a": "y"}}'), "'a' appears twice"),
    "deep nesting": (lambda path: (path / INDEX).write_text("[" * 10**5), "nested too deeply"),
}  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_or_hostile_folder_is_refused_with_the_reason(damage: str) -> None:
    path = folder()
    outside(path)
    act, said = DAMAGE[damage]
    act(path)
    assert is_hf_folder(path)
    with pytest.raises(CheckpointError, match=said):
        load_weights(nn.Linear(1, 1), path)


def test_the_cache_of_the_hub_links_to_its_blobs_and_can_be_read() -> None:
    made = folder()
    snapshot = Path("models--x/snapshots/abc")
    snapshot.mkdir(parents=True)
    Path("models--x/blobs").mkdir()
    for each in made.iterdir():
        each.rename(Path("models--x/blobs") / each.name)
        os.symlink(f"../../blobs/{each.name}", snapshot / each.name)
    assert same(read_hf_folder(snapshot), weights())


def test_several_files_without_an_index_must_be_all_shards_of_one_model() -> None:
    path = folder()
    (path / INDEX).unlink()
    assert same(read_hf_folder(path), weights())
    save_file({"a": torch.zeros(4)}, path / "model-00002-of-00003.safetensors")
    with pytest.raises(CheckpointError, match="shards of a have 8 of its 4 elements"):
        read_hf_folder(path)  # the same weight in two files
    (path / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(CheckpointError, match="has no file of shard 2 of 3"):
        read_hf_folder(path)
    (path / "model.safetensors").write_bytes(b"")
    with pytest.raises(
        CheckpointError, match="several .safetensors files.*and no model.safetensors.index.json"
    ):
        read_hf_folder(path)


def test_offsets_that_torch_did_not_write_are_refused() -> None:
    Path("folder").mkdir()
    file = Path("folder/shard-00001-model-00001-of-00001.safetensors")
    for offsets, said in (
        ('{"a": {"saved_offsets": [-1]}}', "invalid offset of 'a'"),
        ('{"a": {"saved_offsets": [0, 0]}}', r"the offset \[0, 0\] for a, of shape \[4\]"),
        ('{"a": {"saved_offsets": [2]}}', "have 4 of its 6 elements"),
        ('{"a": {"saved_offsets": [1000000000000]}}', "have 4 of its 1000000000004 elements"),
        ("[]", "offsets that cannot be read"),
    ):
        save_file({"a": torch.ones(4)}, file, metadata={"DCP_SHARDING_INFO": offsets})
        with pytest.raises(CheckpointError, match=said):
            read_hf_folder(Path("folder"))


def test_a_checkpoint_of_ours_is_not_such_a_folder() -> None:
    Path("made").mkdir()
    for name in ("model.safetensors", "state.json"):
        (Path("made") / name).touch()
    assert not is_hf_folder(Path("made")) and not is_hf_folder(Path("gone"))


def test_an_export_in_the_directory_of_a_run_does_not_hide_its_checkpoints() -> None:
    trainer = quiet(run_dir="run", max_steps=1)
    trainer.fit(Net(), batches(1))
    trainer.save_checkpoint("run/checkpoints/made")
    save_file({"x": torch.ones(1)}, "run/model.safetensors")
    report = load_weights(Net(), "run")
    assert report.source == "run/checkpoints/made" and report.complete
