"""Weights written for other tools: plain files, replaced only on request, whole or not at all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tiny import Net, batches, quiet
from torch import Tensor, nn

from hookline import CheckpointError, OptionError
from hookline.checkpoint.weights import export_weights
from hookline.hooks.weight_averaging import WeightAveraging


class Tied(Net):
    def __init__(self) -> None:
        super().__init__()
        self.twin = nn.Linear(4, 2)
        self.twin.weight = self.layer.weight


def trained(net: Any, *hooks: Any, path: str | Path = "run/checkpoints/made", steps: int = 2) -> Any:
    trainer = quiet(run_dir="run", hooks=hooks, max_steps=steps)
    trainer.fit(net, batches(steps))
    trainer.save_checkpoint(path)
    return net


def weights(module: nn.Module) -> dict[str, Tensor]:
    return {name: each.clone() for name, each in module.state_dict().items()}


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("out", ["weights.safetensors", "weights.pt"])
def test_exported_weights_are_plain(out: str) -> None:
    net = trained(Tied())
    done = export_weights("run", Path(out))
    assert done.where == "run/checkpoints/made" and set(done.weights) == set(net.state_dict())
    read = load_file(out) if out.endswith("safetensors") else torch.load(out, weights_only=True)
    again = Tied()
    again.load_state_dict(read)  # tied weights are there under both names
    assert same(weights(again), weights(net))
    assert sorted(each.name for each in Path().iterdir()) == ["run", out]


def test_a_file_that_exists_is_replaced_only_if_told_to() -> None:
    trained(Net())
    Path("weights.pt").write_text("precious")
    with pytest.raises(OptionError, match="weights.pt exists; --force"):
        export_weights("run", Path("weights.pt"))
    assert Path("weights.pt").read_text() == "precious"
    export_weights("run", Path("weights.pt"), force=True)
    assert set(torch.load("weights.pt", weights_only=True)) == {"layer.weight", "layer.bias"}


def test_an_export_that_fails_leaves_the_old_file_and_nothing_aside() -> None:
    trained(Extra())
    Path("weights.safetensors").write_text("precious")
    with pytest.raises(CheckpointError, match=r"cannot store _extra_state \(dict\). Export to a .pt file"):
        export_weights("run", Path("weights.safetensors"), force=True)
    assert Path("weights.safetensors").read_text() == "precious"
    assert sorted(each.name for each in Path().iterdir()) == ["run", "weights.safetensors"]
    export_weights("run", Path("weights.pt"))
    assert torch.load("weights.pt", weights_only=True)["_extra_state"] == {"words": ["a", "b"]}
    with pytest.raises(
        CheckpointError, match="nowhere/weights.pt could not be written: No such file or directory"
    ):
        export_weights("run", Path("nowhere/weights.pt"))


class Extra(Net):
    def get_extra_state(self) -> Any:
        return {"words": ["a", "b"]}

    def set_extra_state(self, state: Any) -> None:
        assert state == {"words": ["a", "b"]}


def test_averaged_weights_take_the_place_of_those_they_average() -> None:
    class Normed(Tied):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(2)

    hook = WeightAveraging(decay=0.5)
    net = trained(Normed(), hook)
    written = export_weights("run", Path("average.safetensors"), hook="weight_averaging").weights
    read = load_file("average.safetensors")
    assert (
        set(read) == set(net.state_dict()) == set(written)
    )  # buffers are not averaged, and come from the module
    assert torch.equal(read["layer.weight"], hook.averages["layer.weight"])
    assert torch.equal(read["twin.weight"], hook.averages["layer.weight"])  # tied
    assert not torch.equal(read["layer.weight"], net.layer.weight)


def test_a_hook_that_is_not_there_or_keeps_no_weights_is_refused() -> None:
    trained(Net(), WeightAveraging(start="100 steps"))
    with pytest.raises(
        OptionError,
        match="does not contain the state of a hook 'weight_avg'. Did you mean 'weight_averaging'",
    ):
        export_weights("run", Path("weights.pt"), hook="weight_avg")
    with pytest.raises(OptionError, match="weight_averaging in .* does not store weights.*not started"):
        export_weights("run", Path("weights.pt"), hook="weight_averaging")
    assert not Path("weights.pt").exists()


def test_another_kind_of_file_is_refused_with_those_there_are() -> None:
    with pytest.raises(OptionError, match=r"weights.bin must end with .safetensors or .pt"):
        export_weights("run", Path("weights.bin"))
