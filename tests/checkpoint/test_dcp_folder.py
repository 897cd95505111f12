"""Folders of torch.distributed.checkpoint: what torch wrote is read without unpickling, and torch reads what is written."""

from __future__ import annotations

import os
import pickle
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import preloaded
import pytest
import torch
from torch import Tensor, nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex

from hookline import CheckpointError, import_checkpoint, load_weights
from hookline.checkpoint.dcp_folder import is_dcp_folder, open_dcp_folder, write_dcp_folder

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")


def same(one: Any, other: Any) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 2), nn.BatchNorm1d(2), nn.Linear(2, 1).to(torch.bfloat16))


def save(contents: Any, path: str = "saved") -> Path:
    dcp.save(contents, checkpoint_id=path, no_dist=True)
    return Path(path)


def test_weights_that_torch_saved_are_read_and_the_optimizer_stays_where_it_is() -> None:
    net = network()
    optimizer = torch.optim.AdamW(net[0].parameters())
    net[0](torch.ones(1, 4)).sum().backward()
    optimizer.step()
    found = import_checkpoint(
        save({"model": net.state_dict(), "optim": optimizer.state_dict(), "step": 3, "name": "x"})
    )
    assert same(found.weights, net.state_dict())
    assert load_weights(other := network(), found).complete and same(other.state_dict(), net.state_dict())
    assert import_checkpoint("saved", weights="model").weights.keys() == found.weights.keys()
    with pytest.raises(
        CheckpointError, match=r"has no 'modle'. Did you mean 'model'\?.*It has: model, optim"
    ):
        import_checkpoint("saved", weights="modle")


def test_a_state_dict_that_was_saved_as_it_is_can_be_read_with_its_extra_state() -> None:
    extra = {"words": ["a", "b"], "scale": torch.ones(2)}
    found = import_checkpoint(save({**network().state_dict(), "_extra_state": extra})).weights
    assert found["_extra_state"]["words"] == ["a", "b"] and torch.equal(
        found["_extra_state"]["scale"], torch.ones(2)
    )


def test_torch_reads_what_is_written_and_so_is_extra_state() -> None:
    net = network()
    Path("ours").mkdir()
    write_dcp_folder({**net.state_dict(), "_extra_state": {"words": ["a"]}}, Path("ours"))
    state = {**network().state_dict(), "_extra_state": {"words": []}}
    dcp.load(state, storage_reader=dcp.FileSystemReader("ours"), no_dist=True)
    assert state.pop("_extra_state") == {"words": ["a"]} and same(state, net.state_dict())
    assert same({**import_checkpoint("ours").weights, "_extra_state": torch.ones(1)}, {**net.state_dict(), "_extra_state": torch.ones(1)})  # fmt: skip


def test_weights_are_loaded_from_a_folder_only_by_an_explicit_import() -> None:
    save(network().state_dict())
    with pytest.raises(CheckpointError, match=r"import_checkpoint\('saved'\)"):
        load_weights(network(), "saved")


# ---- two ranks ---------------------------------------------------------------------------------------------------

TWO_RANKS = """
import sys, warnings, torch
from torch import distributed as dist
from torch.distributed import checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
warnings.simplefilter("ignore")
rank, folder = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
mesh = init_device_mesh("cpu", (2,))
state = {
    "rows": distribute_tensor(torch.arange(15.0).reshape(5, 3), mesh, [Shard(0)]),
    "columns": distribute_tensor(torch.arange(8).reshape(2, 4), mesh, [Shard(1)]),
    "whole": torch.ones(2),
}
dcp.save(state, checkpoint_id=f"{folder}/plain")
dcp.save(state, storage_writer=dcp.HuggingFaceStorageWriter(f"{folder}/tensors", save_distributed=True))
dist.destroy_process_group()
"""


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Saved by two processes, each its shards, with both storages of torch."""
    folder = tmp_path_factory.mktemp("ranks")
    ranks = [preloaded.Popen([sys.executable, "-c", TWO_RANKS, str(rank), str(folder)]) for rank in (0, 1)]
    assert [rank.wait(300) for rank in ranks] == [0, 0]
    return folder


def test_the_shards_of_two_ranks_are_joined(two_ranks: Path) -> None:
    wanted = {
        "rows": torch.arange(15.0).reshape(5, 3),
        "columns": torch.arange(8).reshape(2, 4),
        "whole": torch.ones(2),
    }
    assert len(open_dcp_folder(two_ranks / "plain").entries["rows"].items) == 2
    assert len(list((two_ranks / "tensors").iterdir())) == 2
    for storage in ("plain", "tensors"):
        assert same(dict(sorted(import_checkpoint(two_ranks / storage).weights.items())), dict(sorted(wanted.items())))  # fmt: skip


# ---- damaged and hostile folders ---------------------------------------------------------------------------------


class Runs:
    """Unpickling it writes a file."""

    def __reduce__(self) -> Any:
        return Path.write_text, (Path("written"), "by the pickle")


def change(act: Callable[[Metadata], Any]) -> Callable[[Path], None]:
    def rewrite(path: Path) -> None:
        metadata = pickle.loads((path / ".metadata").read_bytes())
        act(metadata)
        (path / ".metadata").write_bytes(pickle.dumps(metadata))

    return rewrite


def change_item(**facts: Any) -> Callable[[Path], None]:
    def act(metadata: Metadata) -> None:
        vars(metadata.storage_data[MetadataIndex("bias", [0])]).update(facts)

    return change(act)


def claim(*size: int) -> Callable[[Path], None]:
    def act(metadata: Metadata) -> None:
        stored: Any = metadata.state_dict_metadata["bias"]
        stored.size = torch.Size(size)
        stored.chunks[0].sizes = torch.Size(size)

    return change(act)


def overlap(metadata: Metadata) -> None:
    stored: Any = metadata.state_dict_metadata["bias"]
    stored.size = torch.Size([4])
    stored.chunks = stored.chunks * 2


def put_pickle(path: Path) -> None:
    """Replace the bytes of a tensor by a pickle that runs code, with the right length in the metadata."""
    torch.save(Runs(), "evil.pt")
    (path / "evil.distcp").write_bytes(Path("evil.pt").read_bytes())
    change_item(relative_path="evil.distcp", offset=0, length=Path("evil.pt").stat().st_size)(path)


def link(path: Path) -> None:
    torch.save(torch.ones(2), "secret.pt")
    os.symlink(Path("secret.pt").absolute(), path / "secret.distcp")
    change_item(relative_path="secret.distcp", offset=0, length=Path("secret.pt").stat().st_size)(path)


def other_tensor(path: Path) -> None:
    torch.save(torch.ones(7), path / "x.distcp")
    change_item(relative_path="x.distcp", offset=0, length=(path / "x.distcp").stat().st_size)(path)


DAMAGE: dict[str, tuple[Callable[[Path], Any], str]] = {
    "a pickle that runs code": (lambda path: (path / ".metadata").write_bytes(pickle.dumps(Runs())), r"no code from it was run: it requests pathlib\.\S+, which .* do not trust"),
    "code beside the metadata": (change(lambda metadata: setattr(metadata, "planner_data", Runs())), "no code from it was run: it requests pathlib"),
    "code in a tensor": (put_pickle, "bias in saved/evil.distcp was not read, and no code from it was run"),
    "a path above": (change_item(relative_path="../x.distcp"), r"'../x.distcp', which is not the plain name"),
    "an absolute path": (change_item(relative_path="/etc/passwd"), "'/etc/passwd', which is not the plain name"),
    "a link out": (link, r"secret.distcp is a link to .*secret.pt, outside of the checkpoint"),
    "a missing file": (lambda path: (path / "__0_0.distcp").unlink(), "__0_0.distcp is missing"),
    "a truncated file": (lambda path: os.truncate(path / "__0_0.distcp", 100), "__0_0.distcp has 100 bytes, and weight ends at"),
    "truncated metadata": (lambda path: os.truncate(path / ".metadata", 300), "no code from it was run: .*exhausted"),
    "metadata of nothing": (lambda path: os.truncate(path / ".metadata", 0), "no code from it was run"),
    "another object": (lambda path: (path / ".metadata").write_bytes(pickle.dumps([1])), "something else where torch writes a Metadata"),
    "a negative offset": (change_item(offset=-1), "an invalid offset or length"),
    "compression": (change_item(transform_descriptors=["zstd"]), "compressed or encrypted by an extension"),
    "a huge tensor": (claim(2**40), "only .* bytes are stored"),
    "a negative size": (claim(-1), "not a torch.Size of whole numbers"),
    "too many dimensions": (claim(*[1] * 65), "not a torch.Size of whole numbers"),
    "overlapping shards": (change(overlap), "overlap, or reach outside"),
    "another tensor": (other_tensor, r"bias in x.distcp is not a tensor of torch.float32 with shape \[2\]"),
    "a tensor that is not stored": (change(lambda metadata: metadata.storage_data.pop(MetadataIndex("bias", [0]))), "no code from it was run"),
}  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_or_hostile_folder_is_refused_and_nothing_in_it_is_run(damage: str) -> None:
    path = save(nn.Linear(3, 2).state_dict())
    act, said = DAMAGE[damage]
    act(path)
    with pytest.raises(CheckpointError, match=said):
        import_checkpoint(path)
    assert not Path("written").exists()


def test_the_hostile_folders_would_run_code_in_an_ordinary_reader() -> None:
    path = save(nn.Linear(3, 2).state_dict())
    DAMAGE["a pickle that runs code"][0](path)
    state: dict[str, Tensor] = nn.Linear(3, 2).state_dict()
    with pytest.raises(BaseException):  # any: what counts is what it did before
        dcp.load(state, checkpoint_id=path, no_dist=True)
    assert Path("written").read_text() == "by the pickle"


def test_other_folders_are_not_taken_for_one() -> None:
    Path("empty").mkdir()
    assert not is_dcp_folder(Path("empty")) and not is_dcp_folder(Path("gone"))
    with pytest.raises(CheckpointError, match="empty is a directory"):
        import_checkpoint("empty")
