"""Tensors that are spread over a mesh: what is stored of them, what cannot be, and how others are laid out like them."""

from __future__ import annotations

import gc
import hashlib
import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed as dist
from torch import nn

from hookline import import_checkpoint, load_weights
from hookline.checkpoint.export import export_weights
from hookline.checkpoint.files import read, read_manifest, verify, write
from hookline.checkpoint.manifest import render_manifest, signature
from hookline.checkpoint.reader import read_for_rank
from hookline.checkpoint.remote import read_url_for_rank
from hookline.checkpoint.sharded import (
    ShardedTensor,
    is_dtensor,
    materialize,
    materialize_optimizer,
    sharded_tensors,
)
from hookline.checkpoint.weights import find_weights
from hookline.distributed.comm import Ranks
from hookline.util.errors import CheckpointError


@pytest.fixture(scope="module")
def mesh() -> Iterator[Any]:
    """A mesh of this process alone: real DTensors, and nobody to wait for."""
    from torch.distributed.device_mesh import init_device_mesh

    store = dist.HashStore()  # pyright: ignore[reportPrivateImportUsage]
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def spread(value: Any, mesh: Any, placement: Any = None) -> Any:
    from torch.distributed.tensor import Shard, distribute_tensor

    return distribute_tensor(value, mesh, [placement or Shard(0)])


def test_a_spread_tensor_comes_back_whole_and_tied_ones_are_stored_once(mesh: Any, tmp_path: Path) -> None:
    weight = spread(torch.arange(6.0).reshape(3, 2), mesh)
    contents = {
        "module": {"a": weight, "b": weight, "plain": torch.ones(1)},
        "hooks": {"h": {"a": weight * 2}},
    }
    manifest = write(contents, tmp_path / "one")
    assert manifest["shared"] == {"b": "a"}
    found = read(tmp_path / "one")
    for name in ("a", "b"):
        assert type(found["module"][name]) is torch.Tensor
        assert torch.equal(found["module"][name], weight.full_tensor())
    assert torch.equal(found["hooks"]["h"]["a"], weight.full_tensor() * 2)
    assert (
        tmp_path / "one" / "rank-0.safetensors"
    ).stat().st_size < 2 * 24 + 600  # two tensors of six numbers and a header


def test_tied_weights_are_one_tensor_again_and_an_average_takes_the_place_of_both(
    mesh: Any, tmp_path: Path
) -> None:
    weight = spread(torch.arange(6.0).reshape(3, 2), mesh)
    write(
        {"module": {"a": weight, "b": weight}, "hooks": {"average": {"averages": {"a": weight * 2}}}},
        tmp_path / "one",
    )
    module = read(tmp_path / "one")["module"]
    assert module["a"].data_ptr() == module["b"].data_ptr()
    exported = export_weights(tmp_path / "one", tmp_path / "net.pt", hook="average").weights
    for name in ("a", "b"):
        assert torch.equal(exported[name], weight.full_tensor() * 2)


def test_an_average_that_is_not_read_yet_is_converted_and_tied_like_the_weights(
    mesh: Any, tmp_path: Path
) -> None:
    weight = spread(torch.arange(6.0).reshape(3, 2), mesh).to(torch.bfloat16)
    average = {"averages": {"a": spread(torch.arange(6.0).reshape(3, 2) * 2, mesh)}}
    write({"module": {"a": weight, "b": weight}, "hooks": {"average": average}}, tmp_path / "one")
    found = find_weights(tmp_path / "one", "averaged", as_shards=True).weights
    for name in ("a", "b"):
        assert isinstance(found[name], ShardedTensor) and found[name].dtype == torch.bfloat16
        assert torch.equal(found[name].whole(), weight.full_tensor() * 2)
    export_weights(tmp_path / "one", tmp_path / "hf", weights="averaged", format="hf-sharded")
    assert set(import_checkpoint(tmp_path / "hf").weights) == {"a"}


def test_pieces_that_do_not_make_whole_tensors_are_damage(mesh: Any, tmp_path: Path) -> None:
    path = tmp_path / "one"
    write({"module": {"a": spread(torch.ones(3, 2), mesh), "b": spread(torch.ones(4), mesh)}}, path)
    part = json.loads((path / "rank-0.json").read_text())
    del part["shards"]["module.b"]
    (path / "rank-0.json").write_text(json.dumps(part))
    manifest = read_manifest(path)  # as if it had been written so
    data = (path / "rank-0.json").read_bytes()
    manifest["files"]["rank-0.json"] = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    (path / "manifest.json").write_text(render_manifest({**manifest, "sha256": signature(manifest)}))
    for look in (verify, read, lambda path: load_weights(nn.Linear(1, 1), path)):
        with pytest.raises(
            CheckpointError, match="sharded tensors have 10 elements, but their shards have 6"
        ):
            look(path)


def test_names_that_look_alike_are_kept_apart(mesh: Any, tmp_path: Path) -> None:
    one, other = spread(torch.zeros(2), mesh), spread(torch.ones(2), mesh)
    write({"module": {}, "hooks": {"h": {"a.b": one, "a": {"b": other}}}}, tmp_path / "one")
    found = read(tmp_path / "one")["hooks"]["h"]
    assert found["a.b"].tolist() == [0.0, 0.0]
    assert found["a"]["b"].tolist() == [1.0, 1.0]


def test_a_sum_that_was_not_added_up_and_rare_types_are_refused_by_their_place(
    mesh: Any, tmp_path: Path
) -> None:
    from torch.distributed.tensor import DTensor, Partial

    partial = DTensor.from_local(torch.ones(2), mesh, [Partial()])
    with pytest.raises(CheckpointError, match=r"hooks\.mine has a partial placement"):
        write({"module": {}, "hooks": {"mine": partial}}, tmp_path / "one")
    with pytest.raises(
        CheckpointError, match=r"module\.w is sharded over ranks and has dtype torch.complex64"
    ):
        write({"module": {"w": spread(torch.ones(2, dtype=torch.complex64), mesh)}}, tmp_path / "one")
    assert os.listdir(tmp_path) == []


def test_whole_tensors_are_spread_like_the_modules_by_name_and_shape(mesh: Any) -> None:
    module = nn.Linear(2, 3)
    module.weight = nn.Parameter(spread(module.weight.detach(), mesh))
    like = sharded_tensors(module)
    assert list(like) == ["weight"]
    whole = torch.arange(6.0).reshape(3, 2)
    found = materialize(
        {
            "weight": whole,
            "deep": {"weight": whole + 1},
            "bias": torch.ones(3),
            "shape": {"weight": torch.ones(4)},
        },
        like,
    )
    assert is_dtensor(found["weight"]) and torch.equal(found["weight"].full_tensor(), whole)
    assert torch.equal(found["deep"]["weight"].full_tensor(), whole + 1)
    assert not is_dtensor(found["bias"]) and not is_dtensor(found["shape"]["weight"])


def test_what_a_hook_had_spread_under_a_name_of_its_own_is_spread_again(mesh: Any, tmp_path: Path) -> None:
    module = nn.Linear(2, 3)
    module.weight = nn.Parameter(spread(module.weight.detach(), mesh))
    write({"module": {}, "hooks": {"h": {"velocity": [module.weight.detach() * 2]}}}, tmp_path / "one")
    contents, _ = read_for_rank(tmp_path / "one", Ranks())
    found = materialize(contents["hooks"]["h"], sharded_tensors(module))["velocity"][0]
    assert is_dtensor(found) and torch.equal(found.full_tensor(), module.weight.full_tensor() * 2)  # type: ignore[operator]


def test_state_of_an_optimizer_is_spread_like_its_parameter(mesh: Any) -> None:
    parameter = nn.Parameter(spread(torch.zeros(3, 2), mesh))
    optimizer = torch.optim.AdamW([parameter])
    moments = torch.arange(6.0).reshape(3, 2)
    state = {
        "state": {0: {"step": torch.tensor(3.0), "exp_avg": moments, "exp_avg_sq": moments + 1}},
        "param_groups": optimizer.state_dict()["param_groups"],
    }
    materialize_optimizer(state, optimizer)
    optimizer.load_state_dict(state)
    held = optimizer.state[parameter]
    assert torch.equal(held["exp_avg"].full_tensor(), moments) and is_dtensor(held["exp_avg_sq"])
    assert not is_dtensor(held["step"])


def test_load_weights_fills_a_module_that_is_spread(mesh: Any, tmp_path: Path) -> None:
    source, module = nn.Linear(2, 3), nn.Linear(2, 3)
    module.weight = nn.Parameter(spread(module.weight.detach(), mesh))
    assert load_weights(module, source.state_dict()).complete
    assert is_dtensor(module.weight)
    assert torch.equal(module.weight.full_tensor(), source.weight)  # type: ignore[operator]
    write({"module": module.state_dict()}, tmp_path / "one")
    assert torch.equal(read(tmp_path / "one")["module"]["weight"], source.weight)
    assert isinstance(
        find_weights(tmp_path / "one", as_shards=True).weights["weight"], ShardedTensor
    )  # only what is needed is read
    with torch.no_grad():
        module.weight.zero_()
    assert load_weights(module, tmp_path / "one").complete
    assert torch.equal(module.weight.full_tensor(), source.weight)  # type: ignore[operator]


def test_from_a_url_only_what_is_needed_is_read_and_what_was_fetched_goes(
    mesh: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weight = spread(torch.arange(6.0).reshape(3, 2), mesh)
    write({"module": {"a": weight}, "world_size": 2}, tmp_path / "one")
    (tmp_path / "fetched").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "fetched"))
    contents = read_url_for_rank((tmp_path / "one").as_uri(), Ranks(1, 1, 2))
    assert torch.equal(contents["module"]["a"].read((1, 0), (1, 2)), torch.tensor([[2.0, 3.0]]))
    assert os.listdir(tmp_path / "fetched")
    del contents
    gc.collect()
    assert not os.listdir(tmp_path / "fetched")


@pytest.mark.parametrize(
    "changed",
    [
        [],
        {},
        {"own": {}},
        {"own": [], "shards": {}, "shared": {}},
        {"own": {"module": {"$": "tensor", "key": "nowhere"}}, "shards": {}, "shared": {}},
        {"own": {}, "shards": {"module.a": [[0, 0], [3, 2]]}, "shared": {"module.a": "module.a"}},
        {"own": {}, "shards": {"module.a": 5}, "shared": {}},
        {"own": {}, "shards": {"module.a": [[-1, 0], [3, 2]]}, "shared": {}},
        {"own": {}, "shards": {"module.a": [[0, 0], [6, 1]]}, "shared": {}},
        {"own": {}, "shards": {"module.a": [[0], [6]]}, "shared": {}},
        {"own": {}, "shards": {"module.a": [[0, 0], [2**62, 2**62]]}, "shared": {}},
        {"own": {}, "shards": {"elsewhere": [[0, 0], [3, 2]]}, "shared": {}},
        {"own": {}, "shards": {"module.a": [["a", "b"], [3, 2]]}, "shared": {}},
    ],
    ids=lambda changed: str(changed)[:70],
)
def test_what_a_rank_says_of_its_pieces_is_not_believed_whatever_it_is(
    mesh: Any, tmp_path: Path, changed: Any
) -> None:
    weight = spread(torch.arange(6.0).reshape(3, 2), mesh)
    write({"module": {"a": weight}, "world_size": 1}, tmp_path / "one")
    text = json.dumps(changed).encode()
    (tmp_path / "one" / "rank-0.json").write_bytes(text)
    manifest = json.loads((tmp_path / "one" / "manifest.json").read_text())
    manifest["files"]["rank-0.json"] = {"bytes": len(text), "sha256": hashlib.sha256(text).hexdigest()}
    manifest["sha256"] = signature(manifest)
    (tmp_path / "one" / "manifest.json").write_text(render_manifest(manifest))
    for look in (read, verify, lambda path: find_weights(path, as_shards=True).weights["a"].whole()):
        try:
            found = look(tmp_path / "one")
        except CheckpointError as error:
            assert "one" in str(error) or "elements are in no file" in str(error)
        else:  # what the pieces say of themselves fits, so the numbers are those that were written
            assert look is verify or torch.equal(
                found["module"]["a"] if isinstance(found, dict) else found, weight.full_tensor()
            )


def test_an_ordinary_run_never_loads_torchs_tensors_of_many_ranks(tmp_path: Path) -> None:
    import subprocess
    import sys

    script = (
        "import sys, torch; from hookline.checkpoint.files import read, write\n"
        "write({'module': {'w': torch.nn.Parameter(torch.ones(2))}}, 'one'); read('one')\n"
        "assert 'torch.distributed.tensor._api' not in sys.modules"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
