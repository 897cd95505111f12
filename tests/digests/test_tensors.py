"""Digests of tensors: every bit counts, for every type and layout, and the device is read once."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hookline.digests.tensors import WIDTH, Sums, as_number, dense_parts, factors, text_digest, weighted_sum

TYPES = [
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.float16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.complex64,
    torch.complex128,
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.uint16,
    torch.uint64,
]


def digest(tensor: Tensor) -> str:
    sums = Sums()
    entry = sums.add("x", tensor)
    return entry.digest(sums.read())


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_every_single_bit_changes_the_digest(dtype: torch.dtype) -> None:
    tensor = (torch.arange(35).reshape(5, 7) % 2).to(dtype)
    known = {digest(tensor)}
    size = tensor.element_size()
    for place in range(0, 35 * size, max(1, size // 2)):
        for bit in range(8):
            changed = tensor.clone()
            if dtype is torch.bool and bit:
                continue
            changed.view(torch.uint8).view(-1)[place] ^= 1 << bit
            known.add(digest(changed))
    flips = len(range(0, 35 * size, max(1, size // 2))) * (1 if dtype is torch.bool else 8)
    assert len(known) == flips + 1


def test_order_shape_type_and_the_sign_of_zero_count() -> None:
    tensor = torch.arange(12.0)
    others = [
        tensor.flip(0),
        tensor[[1, 0, *range(2, 12)]],
        tensor.reshape(3, 4),
        tensor.double(),
        tensor.reshape(3, 4).t(),
    ]
    assert len({digest(each) for each in (tensor, *others)}) == 6
    zeros = torch.zeros(64)
    minus = zeros.clone()
    minus[[3, 5]] = -0.0  # two sign bits do not cancel
    assert digest(minus) != digest(zeros)
    assert digest(-torch.ones(64)) != digest(torch.ones(64))


def test_the_layout_in_memory_does_not_count() -> None:
    tensor = torch.randn(4, 6)
    assert digest(tensor.t()) == digest(tensor.t().contiguous())
    assert digest(tensor[:, ::2]) == digest(tensor[:, ::2].clone())
    assert digest(torch.randn(2, 2, dtype=torch.complex64).conj()) != ""
    assert digest(torch.empty(0)) != digest(torch.empty(0, 3)) and digest(torch.tensor(2.0)) != ""
    odd = torch.zeros(5, dtype=torch.uint8)[1:]  # not aligned
    assert digest(odd) == digest(odd.clone())


def test_a_tensor_of_several_rows_is_digested_as_a_whole() -> None:
    tensor = torch.arange(2 * WIDTH + 77, dtype=torch.float32)
    known = digest(tensor)
    for place in (0, WIDTH - 1, WIDTH, 2 * WIDTH + 76):
        changed = tensor.clone()
        changed[place] += 0.5
        assert digest(changed) != known
    swapped = tensor.clone()
    swapped[[5, WIDTH + 5]] = swapped[[WIDTH + 5, 5]]  # the same place in another row
    assert digest(swapped) != known


def test_sparse_lazy_quantized_and_sharded_tensors() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch: sparse CSR is in beta
        dense = torch.eye(3)
        layouts = [dense, dense.to_sparse(), dense.to_sparse_csr(), dense.to_sparse_csc()]
        assert len({digest(each) for each in layouts}) == 4
        assert digest(dense.to_sparse()) == digest(dense.to_sparse())
        assert digest((2 * dense).to_sparse()) != digest(dense.to_sparse())
        quantized = torch.quantize_per_tensor(dense, 0.1, 0, torch.qint8)
    assert len(list(dense_parts(quantized))) == 1
    lazy = nn.LazyLinear(3)
    assert list(dense_parts(lazy.weight)) == []
    assert digest(lazy.weight) == digest(nn.LazyLinear(3).weight)

    class Parts(Tensor):
        """A tensor of another package, made of two."""

        def __tensor_flatten__(self) -> Any:
            return ["one", "two"], None

    made = torch.zeros(1).as_subclass(Parts)
    made.one, made.two = torch.ones(2), torch.ones(3)  # type: ignore[attr-defined]
    assert len(list(dense_parts(made))) == 2


def test_the_sums_are_the_same_by_either_way_of_adding() -> None:
    """A device has no product of integer vectors; there the products are added."""
    tensor = torch.randn(1000).view(torch.int32)
    assert int(weighted_sum(tensor)) == int((tensor * factors(torch.device("cpu"))[:1000]).sum())


def test_all_sums_of_a_device_are_read_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    reads = []
    usual = Tensor.tolist
    monkeypatch.setattr(Tensor, "tolist", lambda self: reads.append(1) or usual(self))
    sums = Sums()
    entries = sums.add_all([("a", torch.ones(3)), ("none", None), ("b", torch.ones(4))])
    samples = sums.add_samples(torch.eye(3))
    number = sums.add_number(torch.tensor(0.25))
    found = sums.read()
    assert len(reads) == 1
    assert len({each.digest(found) for each in entries}) == 3
    assert len({found[place] for place in samples}) == 3
    assert as_number(f"{found[number] % 2**64:016x}") == 0.25


def test_a_tensor_without_values_has_a_digest_of_its_shape() -> None:
    assert digest(torch.empty(3, device="meta")) != digest(torch.empty(4, device="meta"))


def test_the_factors_are_odd_and_use_no_random_stream() -> None:
    before = torch.get_rng_state()
    found = factors(torch.device("cpu"))
    assert bool((found % 2 == 1).all()) and len(found.unique()) == WIDTH
    assert torch.equal(before, torch.get_rng_state())
    assert int(found[0]) == -2152535657050944081  # written digests depend on it


def test_plain_values_have_the_same_digest_in_every_process() -> None:
    assert text_digest("a", 1, [0.5]) == text_digest("a", 1, [0.5]) == "65395f8e5020"


def test_a_number_of_a_device_without_64_bits_is_read_as_it_is() -> None:
    sums = Sums()
    sums._single.add(0)
    sums._keep(torch.tensor(-0.1, dtype=torch.float32).view(torch.int32).to(torch.int64))
    assert as_number(f"{sums.read()[0] % 2**64:016x}") == float(torch.tensor(-0.1))


def test_nested_tensors_have_the_same_digest_in_every_process_and_others_do_not_end_the_run() -> None:
    def nested(layout: Any, *lengths: int) -> Tensor:
        parts = torch.arange(6.0).split(list(lengths))
        return torch.nested.nested_tensor(list(parts), layout=layout)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for layout in (torch.jagged, torch.strided):
            # the symbol of a ragged size has another number each time
            assert digest(nested(layout, 2, 4)) == digest(nested(layout, 2, 4))
            assert digest(nested(layout, 2, 4)) != digest(nested(layout, 3, 3))
        ragged = nested(torch.jagged, 2, 4)
        known = digest(ragged)
        ragged._get_max_seqlen()  # type: ignore[operator]
        assert digest(ragged) == known
        masked = torch.masked.masked_tensor(torch.ones(2), torch.tensor([True, False]))
        assert digest(masked) == digest(masked) != digest(torch.ones(2))
