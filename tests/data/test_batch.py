"""Batches of any shape: moved whole, counted right."""

from __future__ import annotations

import collections
import dataclasses
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from tiny import Net, quiet
from torch import Tensor
from torch.nn.utils.rnn import pack_sequence

from hookline.data.batch import batch_size, count_tokens, first_array, move

META = torch.device("meta")


class Pair(NamedTuple):
    x: Tensor
    y: Tensor


@dataclasses.dataclass
class Sample:
    x: Tensor
    label: str = "a"


class Movable:
    """Like a HuggingFace BatchEncoding: no dictionary, but it knows how to move."""

    def __init__(self) -> None:
        self.moved_to: Any = None

    def to(self, device: torch.device) -> Movable:
        self.moved_to = device
        return self


def test_every_tensor_in_a_nested_batch_moves_and_kinds_stay() -> None:
    batch = {
        "a": torch.zeros(2),
        "b": [torch.zeros(2), (torch.zeros(2), "text", 3, None)],
        "p": Pair(torch.zeros(1), torch.zeros(1)),
    }
    moved = move(batch, META)
    assert moved["a"].device == moved["b"][0].device == moved["b"][1][0].device == moved["p"].y.device == META
    assert type(moved["b"][1]) is tuple and moved["b"][1][1:] == ("text", 3, None)
    assert type(moved["p"]) is Pair
    assert batch["a"].device.type == "cpu"  # the loader's own batch is untouched


def test_dataclasses_and_things_with_to_are_moved() -> None:
    sample = move(Sample(torch.zeros(2), "b"), META)
    assert sample.x.device == META and sample.label == "b"
    assert move(Movable(), META).moved_to == META


@pytest.mark.parametrize(
    "kind",
    [
        collections.OrderedDict(x=torch.zeros(2)),
        collections.defaultdict(list, x=torch.zeros(2)),
        collections.Counter(),
    ],
    ids=lambda kind: type(kind).__name__,
)
def test_dictionaries_of_other_classes_move_and_stay_what_they_are(kind: Any) -> None:
    moved = move(kind, META)
    assert type(moved) is type(kind) and list(moved) == list(kind)
    assert all(value.device == META for value in moved.values())


def test_a_packed_sequence_moves_by_its_own_rules() -> None:
    packed = pack_sequence([torch.zeros(3), torch.zeros(2)])
    moved = move(packed, META)
    assert moved.data.device == META
    assert moved.batch_sizes.device.type == "cpu"  # torch insists on that


def test_a_batch_without_tensors_stays_as_it_is() -> None:
    for batch in ("text", 5, None, ["a", "b"], {"a": 1}):
        assert move(batch, META) == batch


@pytest.mark.parametrize(
    ("batch", "size"),
    [
        (torch.zeros(5, 3), 5),
        ((torch.zeros(4, 2), torch.zeros(4)), 4),
        ([torch.zeros(3)], 3),
        ({"x": torch.zeros(6)}, 6),
        ({"id": "text", "x": torch.zeros(2)}, 2),
        (Pair(torch.zeros(7), torch.zeros(7)), 7),
        (((torch.zeros(8),),), 8),
        (torch.tensor(1.0), 1),
        ((torch.tensor(1.0), torch.zeros(3)), 1),
        ("text", 1),
        (None, 1),
        ([], 1),
        ({}, 1),
        (["a", "b"], 1),
    ],
)
def test_the_batch_size_is_the_length_of_the_first_tensor(batch: Any, size: int) -> None:
    assert batch_size(batch) == size


def test_a_dataclass_batch_has_a_size_like_any_other() -> None:
    assert batch_size(Sample(torch.zeros(6, 2))) == 6
    assert count_tokens(Sample(torch.zeros(6, 2))) == 12


def test_a_numpy_batch_has_the_size_of_its_first_axis() -> None:
    assert batch_size((np.zeros((5, 2)), np.zeros(5))) == 5


def test_counting_does_not_use_up_a_batch() -> None:
    batch = {"stream": iter([1, 2, 3]), "x": torch.zeros(4)}
    assert batch_size(batch) == 4
    assert list(batch["stream"]) == [1, 2, 3]


def test_tokens_are_the_elements_of_input_ids_or_of_the_first_tensor() -> None:
    assert count_tokens({"mask": torch.zeros(1), "input_ids": torch.zeros(4, 8)}) == 32
    assert count_tokens((torch.zeros(4, 8), torch.zeros(4))) == 32
    assert count_tokens({"input_ids": "text", "x": torch.zeros(3)}) == 3
    assert count_tokens("text") == 0


def test_the_first_tensor_is_found_in_depth() -> None:
    wanted = torch.zeros(1)
    assert first_array(["text", {"a": [None, wanted, torch.ones(1)]}]) is wanted
    assert first_array({"a": b"bytes"}) is None


def test_samples_seen_follow_the_batches() -> None:
    class Sizes(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return self.layer(batch.x).sum()

    trainer = quiet()
    trainer.fit(Sizes(), [Sample(torch.zeros(3, 4)), Sample(torch.zeros(5, 4))])
    assert trainer.state.samples_seen == 8
