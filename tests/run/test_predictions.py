"""Predictions on disk: what goes in comes out, in order; what cannot be written or read is named."""

from __future__ import annotations

import json
from collections import OrderedDict, namedtuple
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hookline import HooklineError, OptionError, read_predictions
from hookline.run.predictions import PredictionShards, count_samples

Point = namedtuple("Point", "x y")


@dataclass
class Box:
    low: Any
    high: Any


def written(folder: Path, *outputs: Any, per: str = "batch", **options: Any) -> Path:
    """A folder with these outputs of one rank."""
    given: dict[str, Any] = {"rank": 0, "ranks": [0], "shard_bytes": 1e9, "shard_batches": 2, **options}
    shards = PredictionShards(folder, per=per, **given)
    for batch, each in enumerate(outputs):
        shards.add("predict", batch, None, each)
    shards.finish("complete")
    return folder


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return type(other) is torch.Tensor and one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, np.ndarray):
        return one.dtype == other.dtype and np.array_equal(one, other)
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(each, other[key]) for key, each in one.items())
    if isinstance(one, list | tuple):
        return type(one) is type(other) and len(one) == len(other) and all(map(same, one, other))
    return type(one) is type(other) and (one == other or (one != one and other != other))


KEYS = st.text(max_size=3) | st.sampled_from(["$tensor", "$", "__metadata__", "a.b", "\ud800", "../x"])
VALUES: Any = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=4)
    | st.sampled_from(
        [
            torch.arange(6).reshape(2, 3).T,
            torch.zeros(0, 2, dtype=torch.bfloat16),
            torch.tensor(1.5),
            np.arange(3, dtype=np.int16),
        ]
    ),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(KEYS | st.integers() | st.none(), inner, max_size=3)
    ),
    max_leaves=8,
)


@settings(max_examples=60, deadline=None)
@given(outputs=st.lists(VALUES, max_size=4))
def test_nested_values_come_back_as_they_were(
    outputs: list[Any], tmp_path_factory: pytest.TempPathFactory
) -> None:
    found = read_predictions(written(tmp_path_factory.mktemp("p"), *outputs))
    assert same(list(found), outputs)
    assert found.complete and (not outputs or same(found[-1], outputs[-1]) and same(found[:2], outputs[:2]))


def test_dataclasses_named_tuples_and_other_mappings_come_back_as_dictionaries(tmp_path: Path) -> None:
    made = {"box": Box(1, torch.ones(2)), "point": Point(1, None), "map": OrderedDict(a=np.float32(0.5))}
    (found,) = read_predictions(written(tmp_path, made))
    assert same(
        found, {"box": {"low": 1, "high": torch.ones(2)}, "point": {"x": 1, "y": None}, "map": {"a": 0.5}}
    )


def test_it_writes_copies_because_a_step_may_use_its_memory_again(tmp_path: Path) -> None:
    shards = PredictionShards(tmp_path, 0, [0], "batch", 1e9, 9)
    buffer = torch.zeros(1000, 2)
    for batch in range(3):
        buffer.fill_(batch)
        shards.add("predict", batch, None, buffer[:2])
    assert shards._bytes < 1000  # a part of the buffer, not all of it
    shards.finish("complete")
    assert [each.tolist() for each in read_predictions(tmp_path)] == [[[n, n]] * 2 for n in (0.0, 1.0, 2.0)]


def test_a_shard_is_written_when_it_has_enough_bytes_or_batches(tmp_path: Path) -> None:
    written(tmp_path, *[torch.zeros(100)] * 5, shard_batches=99, shard_bytes=900)
    assert len(list(tmp_path.glob("*.safetensors"))) == 3
    assert [len(each.read_text().splitlines()) for each in sorted(tmp_path.glob("*.jsonl"))] == [2, 2, 1]


@pytest.mark.parametrize(
    ("outputs", "text"),
    [
        ({"a": [torch.ones(1), {1, 2}]}, r"outputs\['a'\]\[1\] is a set and cannot be written"),
        (object(), "outputs is a object and cannot be written"),
        ({"x": {(1, 2): 3}}, r"outputs\['x'\] is a dict and has the key \(1, 2\)"),
        (torch.ones(2).to_sparse(), r"outputs is a Tensor of shape \(2,\) and \(sparse_coo float32 on cpu\)"),
        (
            [torch.ones(1, dtype=torch.complex128)],
            r"outputs\[0\] is a Tensor of shape \(1,\) and .*complex128",
        ),
        (torch.empty(2, device="meta"), "float32 on meta"),
        (np.array([object()]), r"outputs is a ndarray of shape \(1,\) and has dtype object"),
        (np.ones(1, ">f4"), "and has dtype >f4, which cannot be written"),
        (b"bytes", "outputs is a bytes"),
    ],
)
def test_what_cannot_be_written_is_named_with_its_path_and_type(
    outputs: Any, text: str, tmp_path: Path
) -> None:
    with pytest.raises(HooklineError, match=text):
        written(tmp_path, outputs)


def test_a_value_that_holds_itself_is_refused(tmp_path: Path) -> None:
    own: list[Any] = []
    own.append(own)
    with pytest.raises(HooklineError, match="nested more than 100 levels deep"):
        written(tmp_path, own)


def test_an_output_is_split_into_its_samples(tmp_path: Path) -> None:
    boxes = [{"boxes": torch.ones(n, 4)} for n in range(3)]
    made = {"logits": torch.arange(6.0).reshape(3, 2), "text": ["a", "b", "c"], "more": (None, boxes)}
    found = list(read_predictions(written(tmp_path, made, made, per="sample")))
    assert len(found) == 6 and same(found[:3], found[3:])
    assert same(
        found[1],
        {"logits": torch.tensor([2.0, 3.0]), "text": "b", "more": (None, {"boxes": torch.ones(1, 4)})},
    )


@pytest.mark.parametrize(
    ("outputs", "text"),
    [
        ({"y": torch.ones(2), "loss": torch.tensor(1.0)}, r"outputs\['loss'\] is a Tensor without an entry"),
        (
            {"y": torch.ones(2), "z": (torch.ones(3),)},
            r"different numbers of samples: outputs\['y'\] has 2, ",
        ),
        ("text", "outputs is a str without an entry for each sample.*per='batch'"),
        (None, "outputs is None"),
    ],
)
def test_an_output_without_an_entry_for_each_sample_is_refused(
    outputs: Any, text: str, tmp_path: Path
) -> None:
    with pytest.raises(HooklineError, match=text):
        written(tmp_path, outputs, per="sample")
    assert count_samples((None, {"a": [1, 2]})) == 2


def two_ranks(folder: Path, *parts: list[tuple[list[int], list[str]]]) -> Path:
    """Batches of (indices, texts) for each rank."""
    for rank, batches in enumerate(parts):
        shards = PredictionShards(folder, rank, [0, 1], "sample", 1e9, 1)
        for batch, (indices, texts) in enumerate(batches):
            shards.add("predict", batch, indices or None, texts)
        shards.finish("complete")
    return folder


def test_the_order_is_that_of_the_dataset_and_each_sample_comes_once(tmp_path: Path) -> None:
    found = read_predictions(
        two_ranks(tmp_path, [([0, 4], ["a", "e"]), ([2], ["c"])], [([3, 1], ["d", "b"]), ([0], ["again"])])
    )
    assert list(found) == ["a", "b", "c", "d", "e"]
    assert found.indices is not None and found.indices.tolist() == [0, 1, 2, 3, 4]


def test_without_indices_the_batches_come_in_turn(tmp_path: Path) -> None:
    found = read_predictions(
        two_ranks(tmp_path, [([], ["a", "b"]), ([], ["e"])], [([], ["c", "d"]), ([], ["f", "g"])])
    )
    assert "".join(found) == "abcdefg" and found.indices is None


def test_a_damaged_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="has no predictions"):
        read_predictions(tmp_path / "missing")

    def damaged(name: str, text: str, change: Any) -> None:
        folder = tmp_path / name
        folder.mkdir()
        change(written(folder, torch.ones(2), "text"))
        with pytest.raises(HooklineError, match=text):
            list(read_predictions(folder, partial=True))

    def manifest(folder: Path, **changes: Any) -> None:
        path = folder / "rank-0.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))

    def line(folder: Path, text: str) -> None:
        path = folder / "rank-0-00000.jsonl"
        manifest(folder, files={})
        path.write_text(text)

    damaged(
        "short", "has 4 bytes and was written with", lambda f: (f / "rank-0-00000.jsonl").write_text("torn")
    )
    damaged("gone", "safetensors is missing", lambda f: (f / "rank-0-00000.safetensors").unlink())
    damaged("newer", "newer version of Hookline", lambda f: manifest(f, version=2))
    damaged("other", "not a manifest", lambda f: manifest(f, per="x"))
    damaged("rank", "not a manifest", lambda f: manifest(f, rank=1e300))
    damaged("ranks", "not a manifest", lambda f: manifest(f, ranks=["0"]))
    damaged("status", "not a manifest", lambda f: manifest(f, status=None))
    damaged("huge", "not a shard", lambda f: (f / f"rank-{10**20}-0.jsonl").write_text(""))
    damaged("line", "damaged at byte 0", lambda f: line(f, "{}\n"))
    damaged(
        "tensor",
        "batch 0 of 'predict' cannot be read: File does not contain tensor",
        lambda f: line(
            f, '{"loader":"predict","batch":0,"count":null,"indices":null,"outputs":{"$tensor":"7"}}\n'
        ),
    )
    damaged(
        "kind",
        "'\\$pickle' is not a kind of value",
        lambda f: line(
            f, '{"loader":"predict","batch":0,"count":null,"indices":null,"outputs":{"$pickle":"7"}}\n'
        ),
    )
    damaged(
        "row",
        "cannot be read",
        lambda f: line(f, '{"loader":"predict","batch":0,"count":9,"indices":null,"outputs":["a"]}\n'),
    )


def test_a_folder_is_complete_when_all_ranks_have_finished(tmp_path: Path) -> None:
    PredictionShards(tmp_path, 0, [0, 1], "batch", 1e9, 9).finish("complete")
    with pytest.raises(HooklineError, match=r"not complete: rank 1 has not finished.*partial=True"):
        read_predictions(tmp_path)
    PredictionShards(tmp_path, 1, [0, 1], "batch", 1e9, 9).finish("stopped", "enough")
    found = read_predictions(tmp_path, partial=True)
    assert not found.complete and "rank 1 stopped (enough)" in repr(found) and len(found) == 0
