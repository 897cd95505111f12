"""Loaders that are read without torch's iterator, or in memory: batches, draws and states are those of torch's own DataLoader."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.data import (
    ConcatDataset,
    DataLoader,
    Dataset,
    RandomSampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
    dataloader,
    default_collate,
    random_split,
)
from torch.utils.data._utils import collate

from hookline import seed_everything
from hookline.data import fetch, readers
from hookline.data.fetch import PROFILE_NAME, direct_batches, reads_directly, rows_of
from hookline.data.loaders import Loader, make_loaders
from hookline.data.seeding import isolated_rng, rng_state, set_rng_state
from hookline.data.sharding import RankSharding
from hookline.distributed.comm import Ranks

LENGTH = 11


def plain(value: Any) -> Any:
    """A value with all that can be seen of it: classes, dtypes, shapes, strides, storage and every bit."""
    if isinstance(value, Tensor):
        bits = value.detach().contiguous().flatten().view(torch.uint8).tolist() if value.numel() else []
        return (
            type(value),
            value.dtype,
            value.shape,
            value.stride(),
            value.storage_offset(),
            value.untyped_storage().nbytes(),
            value.requires_grad,
            value._is_view(),
            bits,
        )
    if isinstance(value, dict):
        return type(value), {name: plain(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return type(value), [plain(each) for each in value]
    return value.tolist() if isinstance(value, np.ndarray) else value


# ---- datasets ----------------------------------------------------------------------------------------------------


def tensors(*shape: int, dtype: torch.dtype = torch.float32, length: int = LENGTH) -> Tensor:
    generator = torch.Generator().manual_seed(length)
    return (torch.randn(length, *shape, generator=generator) * 9).to(dtype)


def two(length: int = LENGTH) -> TensorDataset:
    return TensorDataset(tensors(3, length=length), torch.arange(length))


class Draws(Dataset[Any]):
    """Samples that take a number from each random stream."""

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> Any:
        return {"index": index, "x": torch.rand(2), "y": random.gauss(0, 1), "z": np.random.randn()}


class Doubled(TensorDataset):
    def __getitem__(self, index: int) -> Any:
        return tuple(2 * each for each in super().__getitem__(index))


def with_getitems() -> Any:
    dataset: Any = two()
    dataset.__getitems__ = lambda indices: [(torch.tensor(-each),) for each in indices]
    return dataset


IN_MEMORY: dict[str, Callable[[], Any]] = {
    "two tensors": two,
    "the same tensor twice": lambda: TensorDataset(*[tensors(2)] * 2),
    "images": lambda: TensorDataset(tensors(1, 4, 4), tensors(3, 1, 1), tensors(2, 1, 3, 1)),
    **{
        f"{dtype}": lambda dtype=dtype: TensorDataset(tensors(2, dtype=dtype))
        for dtype in sorted(fetch.DTYPES, key=str)
    },
    "nan": lambda: TensorDataset(tensors(2) / 0 * 0),
    "subset": lambda: Subset(two(30), list(range(25, 3, -2))),
    "subset of numpy indices": lambda: Subset(two(30), np.arange(25, 3, -2)),  # type: ignore[arg-type]
    "subset of a range": lambda: Subset(two(30), range(3, 25, 2)),
    "subset of a subset": lambda: Subset(Subset(two(30), list(range(20))), list(range(11))),
    "split": lambda: random_split(two(22), [0.5, 0.5], torch.Generator().manual_seed(1))[1],
    "concatenated": lambda: ConcatDataset([two(4), two(3), Subset(two(9), [8, 1, 1, 3])]),
    "subset of concatenated": lambda: Subset(ConcatDataset([two(9), two(9)]), list(range(17, 6, -1))),
}
BY_TORCH: dict[str, Callable[[], Any]] = {
    "draws": Draws,
    "subclass": lambda: Doubled(tensors(2)),
    "list": lambda: [(float(index), str(index)) for index in range(LENGTH)],
    "gradients": lambda: TensorDataset(tensors(2).requires_grad_()),
    "strided": lambda: TensorDataset(tensors(2, 3, 4).permute(0, 2, 3, 1)),
    "one column of many": lambda: TensorDataset(tensors(3)[:, 1:2]),
    "parameter": lambda: TensorDataset(torch.nn.Parameter(tensors(2), requires_grad=False)),
    "conjugate": lambda: TensorDataset(tensors(2, dtype=torch.complex64).conj()),
    "subset of tensor indices": lambda: Subset(two(30), torch.arange(3, 14)),  # type: ignore[arg-type]
    "negative indices": lambda: Subset(two(30), [-1, -2, *range(9)]),
    "mixed types": lambda: ConcatDataset(
        [two(6), TensorDataset(tensors(3, length=5).double(), torch.arange(5))]
    ),
    "no columns": lambda: TensorDataset(tensors(0), tensors(2, 0)),
    "own __getitems__": with_getitems,
}
DATASETS = IN_MEMORY | BY_TORCH
SAMPLERS: dict[str, Callable[[], dict[str, Any]]] = {
    "in order": dict,
    "shuffled": lambda: {"shuffle": True},
    "shuffled by a generator": lambda: {"shuffle": True, "generator": torch.Generator().manual_seed(4)},
    "with replacement": lambda: {"sampler": RandomSampler(range(LENGTH), True, 40)},
    "weighted": lambda: {"sampler": WeightedRandomSampler([1.0, 2.0] * 5, 9)},
    "some": lambda: {"sampler": SubsetRandomSampler([5, 1, 7, 10])},
    "numpy indices": lambda: {"sampler": list(np.arange(LENGTH))},
    "negative": lambda: {"sampler": [-1, 3, -11]},
}
cases = st.tuples(
    st.sampled_from(sorted(DATASETS)),
    st.sampled_from(sorted(SAMPLERS)),
    st.integers(1, 5),
    st.booleans(),
    st.sampled_from([(0, 1), (0, 2), (1, 2), (2, 3)]),
    st.integers(0, 4),
)


def loader_of(dataset: str, sampler: str, size: int, drop_last: bool, share: tuple[int, int]) -> Loader:
    source: Any = DataLoader(DATASETS[dataset](), size, drop_last=drop_last, **SAMPLERS[sampler]())
    ranks = Ranks(share[0], 0, share[1], group=object() if share[1] > 1 else None)
    (made,) = make_loaders(source, 1.0, "train", RankSharding(ranks))
    made._is_agreed, made.seed = True, 8  # there are no other ranks to ask
    return made


def read(loader: Loader, epoch: int = 0, position: int = 0) -> list[Any]:
    """The batches of a pass, each with the loader's state and those of the main streams after it."""
    found = []
    for number, batch in enumerate(loader.open(epoch, position), position + 1):
        main = rng_state()
        found.append(
            (
                plain(batch),
                plain(loader.state_dict(epoch, number)),
                main["python"],
                plain(main["numpy"]),
                main["torch"].tolist(),
            )
        )
    return found


def by_torch(call: Callable[..., Any], *arguments: Any) -> Any:
    """Call it with torch's own iterator under every loader."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(readers, "reads_directly", lambda loader: False)
        return call(*arguments)


def seeded(call: Callable[..., Any], *arguments: Any) -> Any:
    with isolated_rng():
        seed_everything(2)
        return call(*arguments)


@settings(max_examples=40, deadline=None)
@given(cases)
def test_two_epochs_and_a_resumed_one_equal_those_of_torch(case: Any) -> None:
    *how, cut = case

    def epochs() -> tuple[list[Any], list[Any], Any]:
        loader = loader_of(*how)
        first = read(loader)
        states, second = [], []
        for number, batch in enumerate(loader.open(1, 0), 1):
            second.append(plain(batch))
            states.append((copy.deepcopy(loader.state_dict(1, number)), rng_state()))
        return first, second, states

    def resumed(state: Any, position: int) -> list[Any]:
        loader = loader_of(*how)
        loader.load_state_dict(state)
        return [each[0] for each in read(loader, 1, position)]

    mine, torchs = seeded(epochs), seeded(by_torch, epochs)
    assert mine[:2] == torchs[:2]
    assert plain([state for state, _ in mine[2]]) == plain([state for state, _ in torchs[2]])
    if cut and cut < len(mine[2]):
        for _, second, states in (mine, torchs):
            state, streams = states[cut - 1]
            with isolated_rng():
                set_rng_state(streams)
                assert resumed(copy.deepcopy(state), cut) == second[cut:]


@pytest.mark.parametrize("name", IN_MEMORY)
def test_rows_in_memory_are_read_at_once(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    loader: Any = DataLoader(IN_MEMORY[name](), 3, shuffle=True, generator=torch.Generator().manual_seed(1))
    expected, state = [plain(each) for each in loader], loader.generator.get_state()
    loader.generator.manual_seed(1)
    monkeypatch.setattr(TensorDataset, "__getitem__", None)  # no sample is read by itself
    monkeypatch.setattr(fetch, "_is_original", lambda kind: True)
    assert [plain(each) for each in direct_batches(loader)] == expected
    assert torch.equal(loader.generator.get_state(), state)


@pytest.mark.parametrize("name", BY_TORCH)
def test_all_other_rows_are_read_by_torchs_fetcher(name: str) -> None:
    loader: Any = DataLoader(BY_TORCH[name](), 3)
    expected, found = (
        seeded(lambda: [plain(each) for each in loader]),
        seeded(lambda: [plain(each) for each in direct_batches(loader)]),
    )
    assert reads_directly(loader) and found == expected
    rows = rows_of(loader)
    assert (
        rows is None
        or fetch.InMemoryFetch(rows, lambda index: "torch's").fetch(list(range(LENGTH))) == "torch's"
    )


def own_collate(samples: Any) -> Any:
    return default_collate(samples)


@pytest.mark.parametrize(
    "options",
    [{"num_workers": 1}, {"batch_size": None}, {"pin_memory": True}, {"timeout": 1, "num_workers": 1}],
    ids=str,
)
def test_loaders_that_do_more_keep_torchs_iterator(options: dict[str, Any]) -> None:
    assert not reads_directly(DataLoader(two(), **options))
    assert reads_directly(DataLoader(two(), 2))


def test_subclasses_and_replaced_methods_keep_torchs_iterator(monkeypatch: pytest.MonkeyPatch) -> None:
    class Other(DataLoader[Any]):
        pass

    patched = DataLoader(two(), 2)
    patched._get_iterator = lambda: iter([])  # type: ignore[method-assign, assignment, return-value]
    assert not reads_directly(Other(two())) and not reads_directly(patched)
    monkeypatch.setattr(dataloader._SingleProcessDataLoaderIter, "_next_data", lambda self: 5)
    assert not reads_directly(DataLoader(two(), 2))


def test_a_function_that_collates_keeps_torchs_fetcher(monkeypatch: pytest.MonkeyPatch) -> None:
    assert rows_of(DataLoader(two(), 2, collate_fn=own_collate)) is None
    assert rows_of(DataLoader(two(), 2)) is not None
    monkeypatch.setitem(collate.default_collate_fn_map, tuple, own_collate)
    assert rows_of(DataLoader(two(), 2)) is None
    monkeypatch.delitem(collate.default_collate_fn_map, tuple)
    monkeypatch.setitem(collate.default_collate_fn_map, Tensor, own_collate)
    assert rows_of(DataLoader(two(), 2)) is None


def test_a_dataset_class_with_replaced_methods_keeps_torchs_fetcher(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TensorDataset, "__getitem__", lambda self, index: (torch.tensor(index),))
    loader: Any = DataLoader(Subset(two(), [3, 1]), 2)
    assert rows_of(loader) is None
    assert [plain(each) for each in direct_batches(loader)] == [plain(each) for each in loader]


def change_tensors(dataset: Any) -> None:
    dataset.dataset.tensors = (torch.arange(30.0).reshape(15, 2),)


def need_gradients(dataset: Any) -> None:
    dataset.dataset.tensors[0].requires_grad_()


def change_indices(dataset: Any) -> None:
    dataset.indices[:] = [0] * len(dataset.indices)


def change_dataset(dataset: Any) -> None:
    dataset.dataset = Doubled(tensors(2))


def change_values(dataset: Any) -> None:
    dataset.dataset.tensors[0].zero_()


@pytest.mark.parametrize(
    "change", [change_tensors, need_gradients, change_indices, change_dataset, change_values]
)
def test_a_dataset_that_is_changed_during_a_pass_is_read_as_it_is(change: Callable[[Any], None]) -> None:
    def found(batches: Callable[[Any], Iterator[Any]]) -> list[Any]:
        loader: Any = DataLoader(Subset(two(), list(range(9))), 3)
        passed = []
        for number, batch in enumerate(batches(loader)):
            passed.append(plain(batch))
            if number == 0:
                change(loader.dataset)
        return passed

    assert found(direct_batches) == found(iter)


@pytest.mark.parametrize(
    "indices",
    [[[5, 99]], [[5, -12]], [[]], [[True, False]], [[1.0]], [(1, 2)], [torch.tensor([1, 2])], [3], [["a"]]],
    ids=str,
)
@pytest.mark.parametrize("dataset", ["two tensors", "subset", "concatenated"])
def test_odd_indices_give_the_same_batch_or_the_same_error(dataset: str, indices: list[Any]) -> None:
    def outcome(batches: Callable[[Any], Iterator[Any]]) -> Any:
        try:
            return [plain(each) for each in batches(DataLoader(IN_MEMORY[dataset](), batch_sampler=indices))]
        except Exception as error:
            return type(error), str(error), error.__context__ is None

    assert outcome(direct_batches) == outcome(iter)


def test_a_dataset_that_raises_stop_iteration_ends_the_pass_as_in_torch() -> None:
    class Ends(Draws):
        def __getitem__(self, index: int) -> Any:
            if index == 4:
                raise StopIteration
            return index

    loader: Any = DataLoader(Ends(), 2)
    assert (
        [each.tolist() for each in direct_batches(loader)]
        == [each.tolist() for each in loader]
        == [[0, 1], [2, 3]]
    )


def test_a_default_device_does_not_matter_for_rows_in_memory() -> None:
    rows = rows_of(DataLoader(two(), 2))
    with torch.device("meta"):
        found = rows.read([2, 1]) if rows is not None else None
    assert found is not None and found[1].tolist() == [2, 1]


def test_a_profile_shows_fetches_by_torchs_name() -> None:
    loader: Any = DataLoader(two(), 4)
    batches = direct_batches(loader)
    next(batches)
    with torch.autograd.profiler.profile(use_kineto=False) as profile:
        next(batches)
    assert [each.count for each in profile.key_averages() if each.key == PROFILE_NAME] == [1]
