"""What a checkpoint can hold comes back as it was; what it cannot hold is refused by name. No pickle anywhere."""

from __future__ import annotations

import collections
import enum
import json
import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import shown
from torch import Tensor, nn

from hookline import CheckpointError
from hookline.checkpoint.format import TensorStore, pack, unpack


def there_and_back(value: Any) -> Any:
    """Through real JSON text, as on disk."""
    tensors = TensorStore()
    text = json.dumps(pack(value, tensors, "root"), allow_nan=False)
    return unpack(json.loads(text), tensors)


def same(a: Any, b: Any) -> bool:
    """Equal in value and in kind, NaN equal to itself."""
    if type(a) is not type(b):
        return False
    if isinstance(a, Tensor):
        return (
            a.dtype == b.dtype
            and a.shape == b.shape
            and torch.equal(torch.nan_to_num(a), torch.nan_to_num(b))
        )
    if isinstance(a, np.ndarray | np.generic):
        return (
            a.dtype == b.dtype
            and a.shape == b.shape
            and bool(np.array_equal(a, b, equal_nan=a.dtype.kind in "fc"))
        )
    if isinstance(a, float):
        return (math.isnan(a) and math.isnan(b)) or (a == b and math.copysign(1, a) == math.copysign(1, b))
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


plain = st.none() | st.booleans() | st.integers() | st.floats() | st.text()
hashable = st.integers() | st.text() | st.booleans() | st.tuples(st.integers(), st.text())
dtypes = st.sampled_from(["f2", "f4", "f8", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "?"])
arrays = st.builds(
    lambda kind, shape: np.arange(math.prod(shape)).reshape(shape).astype(kind),
    dtypes,
    st.sampled_from([(), (3,), (2, 0), (2, 3)]),
)
numpy_scalars = st.builds(lambda kind, value: np.dtype(kind).type(value), dtypes, st.integers(0, 100))
tensors = st.builds(
    lambda kind, shape: torch.arange(math.prod(shape)).reshape(shape).to(kind),
    st.sampled_from(
        [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.uint8, torch.bool]
    ),
    st.sampled_from([(), (3,), (2, 0), (2, 3)]),
)
values = st.recursive(
    plain | arrays | numpy_scalars | tensors | st.sets(hashable),
    lambda inner: (
        st.lists(inner)
        | st.tuples(inner, inner)
        | st.dictionaries(st.text(), inner)
        | st.dictionaries(hashable, inner)
    ),
    max_leaves=12,
)


@settings(deadline=None, max_examples=200, database=None)
@given(values)
def test_nested_values_come_back_as_they_were(value: Any) -> None:
    assert same(value, there_and_back(value))


@pytest.mark.parametrize(
    "value",
    [
        math.nan,
        math.inf,
        -math.inf,
        -0.0,
        5e-324,
        2**100,
        "",
        '\ud800 \u2028 "',
        {"$": "tensor", "key": "x"},
        {"$": 1},
        {1: "a", "1": "b"},
        {0: {0: {"state": torch.tensor(1.0)}}},
        {(1, 2): 3},
        {None: 1, True: 2},
        (),
        (1, (2, [3])),
        set(),
        pytest.param({1, "a", (2,)}, id="a set"),
        [[]],
        {},
        np.float64(math.nan),
        np.uint32(2**32 - 1),
        np.array(2**63, dtype="u8"),
        np.bool_(False),
        np.array([1 + 2j], dtype="c8"),
    ],
    ids=repr,
)
def test_awkward_values_too(value: Any) -> None:
    assert same(value, there_and_back(value))


def test_a_parameter_comes_back_as_its_values() -> None:
    parameter = nn.Parameter(torch.ones(2))
    restored = there_and_back(parameter)
    assert torch.equal(restored, parameter.detach()) and not restored.requires_grad


def test_tied_tensors_are_stored_once_and_come_back_tied() -> None:
    weight = torch.randn(3, 3)
    stored = TensorStore()
    packed = pack(
        {"a": weight, "b": [weight], "view": weight.view(3, 3), "other": weight.clone()}, stored, "root"
    )
    assert len(stored) == 2
    restored = unpack(packed, stored)
    assert restored["a"] is restored["b"][0] is restored["view"]
    assert restored["other"] is not restored["a"]


def test_a_transposed_view_is_not_mistaken_for_the_tensor_it_looks_into() -> None:
    weight = torch.arange(4.0).reshape(2, 2)
    assert same({"w": weight, "t": weight.T.contiguous()}, there_and_back({"w": weight, "t": weight.T}))


def test_names_that_run_into_each_other_stay_apart() -> None:
    value = {"a.b": torch.tensor(1.0), "a": {"b": torch.tensor(2.0)}, "a[0]": torch.tensor(3.0)}
    assert same(value, there_and_back(value))


def test_the_state_of_real_optimizers_comes_back() -> None:
    layer = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(layer.parameters(), lr=0.1)
    layer(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    state = optimizer.state_dict()
    restored = there_and_back(state)
    assert same(state, restored)
    torch.optim.AdamW(layer.parameters()).load_state_dict(restored)


def test_dictionaries_of_other_classes_come_back_as_plain_ones() -> None:
    assert there_and_back(collections.OrderedDict(a=1)) == {"a": 1}
    assert there_and_back(collections.defaultdict(int, {3: 4})) == {3: 4}


class Color(enum.IntEnum):
    RED = 1


class Mode(enum.StrEnum):
    MIN = "min"


Point = collections.namedtuple("Point", "x y")

CANNOT: list[Any] = [
    object(),
    len,
    lambda: 0,
    b"bytes",
    1j,
    frozenset({1}),
    torch.device("cpu"),
    torch.float32,
    Color.RED,
    Mode.MIN,
    Point(1, 2),
    np.array([object()]),
    np.array(["text"]),
    np.array(["2024-01-01"], dtype="M8[D]"),
    np.zeros(2, dtype=[("a", "f4")]),
    np.longdouble(1),
    torch.eye(2).to_sparse(),
    torch.zeros(2, device="meta"),
]


@pytest.mark.parametrize("value", CANNOT, ids=shown)
def test_what_cannot_be_stored_is_refused_with_its_place(value: Any) -> None:
    with pytest.raises(CheckpointError, match=r"hooks\.mine\.deep\[1\]"):
        pack({"mine": {"deep": [0, value]}}, TensorStore(), "hooks")


def test_a_place_with_a_key_that_is_no_text_is_named_as_python_writes_it() -> None:
    with pytest.raises(
        CheckpointError, match=r"root\[3\]\.x is a builtins\.object, which a checkpoint cannot hold"
    ):
        pack({3: {"x": object()}}, TensorStore(), "root")
    with pytest.raises(CheckpointError, match=r"a key of root"):
        pack({object(): 1}, TensorStore(), "root")


def test_a_foreign_byte_order_comes_back_or_is_refused_by_name() -> None:
    try:
        restored = there_and_back(np.array([1.0, 2.0], dtype=">f4"))
    except CheckpointError as error:
        assert "root" in str(error)
    else:
        assert restored.tolist() == [1.0, 2.0]


def test_a_kind_from_the_future_is_refused() -> None:
    with pytest.raises(CheckpointError, match="unknown kind of value 'hologram'"):
        unpack({"$": "hologram"}, {})
