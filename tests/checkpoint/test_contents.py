"""The types in a checkpoint are checked before a run is changed, because a checksum does not prove them."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import Net, batches, quiet

from hookline import CheckpointError, Hook
from hookline.checkpoint.contents import (
    RUN_PARTS,
    check_contents,
    check_like,
    check_parts,
    put_gradients,
    window_gradients,
)
from hookline.checkpoint.files import read


def test_state_is_compared_with_what_the_object_has_now() -> None:
    now = {
        "count": 3,
        "best": None,
        "names": ["a"],
        "on": True,
        "mode": "min",
        "sums": {},
        "weight": torch.ones(2),
        "betas": (0.9, 0.99),
    }
    check_like({**now, "best": 0.5, "sums": {"x": 1}, "new": object(), "names": []}, now, "it")
    for key, value in {
        "count": "3",
        "best": "x",
        "names": "a",
        "on": 1,
        "mode": 5,
        "sums": [],
        "weight": "w",
        "betas": ("a", 0.9),
    }.items():
        with pytest.raises(CheckpointError, match=rf"it\.{key}"):
            check_like({**now, key: value}, now, "it")
    check_like({"foreach": True, "lr": None}, {"foreach": None, "lr": 0.1}, "it", loose=True)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What a run has saved inside an accumulation window."""

    class Saves(Hook):
        def on_train_batch_end(self, trainer: Any, batch_idx: int) -> None:
            if batch_idx == 2:
                trainer.save_checkpoint(folder / "kept")

    folder = tmp_path_factory.mktemp("run")
    quiet(hooks=[Saves()], accumulate_grad_batches=2, run_dir=folder).fit(Net(), batches(4))
    return read(folder / "kept")


def changed(contents: dict[str, Any], place: str, value: Any) -> dict[str, Any]:
    """The contents with another value at a place such as `counters.step`; `...` takes it out."""
    made = copy.deepcopy(contents)
    *above, last = place.split(".")
    inside: Any = made
    for key in above:
        inside = inside[key]
    if value is ...:
        del inside[last]
    else:
        inside[last] = value
    return made


def test_what_a_run_saves_is_taken(whole: dict[str, Any]) -> None:
    assert whole["window"]["batches"] == 1, "the window is open"
    check_contents(whole, "kept")


def test_contents_of_a_loop_written_by_hand_have_other_parts() -> None:
    check_contents({"module": {}}, "kept")


@pytest.mark.parametrize("name", RUN_PARTS)
def test_every_part_must_be_there_and_of_its_type(whole: dict[str, Any], name: str) -> None:
    with pytest.raises(CheckpointError, match=rf"checkpoint runs/kept cannot be read.*no '{name}'"):
        check_parts({key: value for key, value in whole.items() if key != name}, RUN_PARTS, Path("runs/kept"))
    if name != "datamodule":  # what a data module keeps is its own business
        with pytest.raises(CheckpointError, match=f"{name} in its state.json is not {RUN_PARTS[name][1]}"):
            check_parts({**whole, name: object()}, [name], "kept")


@pytest.mark.parametrize(
    ("place", "value"),
    [
        ("counters.step", -1),
        ("counters.step", 1.5),
        ("counters.step", True),
        ("counters.step", ...),
        ("position.batches", "3"),
        ("window.count", "many"),
        ("window.losses", 3),
        ("log.means", []),
        ("metrics.x", "high"),
        ("kinds", [3]),
        ("optimizers", [{"state": {}}]),
        ("rng.torch", [1, 2, 3]),
        ("filters", {"mine": 3}),
        ("loader", {"position": "first"}),
    ],
)
def test_a_wrong_type_anywhere_inside_is_found(whole: dict[str, Any], place: str, value: Any) -> None:
    name = place.partition(".")[0]
    with pytest.raises(CheckpointError, match=f"{name} in its state.json is not"):
        check_contents(changed(whole, place, value), "kept")


def test_gradients_of_an_open_window_are_put_back_by_name() -> None:
    net, other = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    net.weight.grad = torch.ones(2, 2)
    gradients = window_gradients(net, net)
    assert set(gradients) == {"weight"}
    put_gradients(other, other, gradients)
    assert torch.equal(other.weight.grad, torch.ones(2, 2)) and other.bias.grad is None  # type: ignore[arg-type]
