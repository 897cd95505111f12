"""Every kind of tensor comes back as it was, from a file that other tools can read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from hookline import CheckpointError
from hookline.checkpoint.files import read, read_manifest, write

TYPES = [
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint64,
    torch.uint32,
    torch.uint16,
    torch.uint8,
    torch.bool,
    torch.complex64,
    torch.complex128,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2fnuz,
    torch.float8_e8m0fnu,
]


def bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def there_and_back(path: Path, **tensors: Tensor) -> dict[str, Tensor]:
    write({"module": tensors}, path)
    restored: dict[str, Tensor] = read(path)["module"]
    for name, tensor in tensors.items():
        back = restored[name]
        assert (back.dtype, back.shape) == (tensor.dtype, tensor.shape), name
        assert torch.equal(bits(back), bits(tensor)), name
    return restored


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_every_type_of_number_comes_back_bit_for_bit(tmp_path: Path, dtype: torch.dtype) -> None:
    raw = torch.arange(6 * dtype.itemsize, dtype=torch.uint8)
    numbers = (raw % 2 if dtype == torch.bool else raw).view(dtype).view(2, 3)
    there_and_back(tmp_path / "c", some=numbers, none=numbers[:0], one=numbers[0, 0], part=numbers[:, 1:])


def test_views_of_every_kind_come_back_as_what_they_show(tmp_path: Path) -> None:
    base = torch.arange(24.0).view(2, 3, 4)
    image = torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last)
    turned = torch.randn(3, dtype=torch.complex64).conj()
    there_and_back(
        tmp_path / "c",
        base=base,
        transposed=base.transpose(0, 2),
        stepped=base[:, ::2],
        expanded=torch.ones(1, 3).expand(4, 3),
        diagonal=base[0, :, :3].diagonal(),
        image=image,
        odd=torch.arange(7, dtype=torch.uint8)[1:6],
        nothing=torch.empty(0, 5),
        weights=nn.Parameter(torch.ones(2)),
    )
    restored = there_and_back(tmp_path / "d", image=image, turned=turned.resolve_conj())
    assert restored["image"].stride() == image.stride()
    write({"module": {"turned": turned}}, tmp_path / "e")
    assert torch.equal(read(tmp_path / "e")["module"]["turned"], turned)


def test_numbers_that_are_not_finite_and_the_sign_of_zero_survive(tmp_path: Path) -> None:
    there_and_back(tmp_path / "c", odd=torch.tensor([float("nan"), float("inf"), -float("inf"), -0.0]))


def test_the_weights_are_under_their_own_names_for_any_other_tool(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    write({"module": model.state_dict(), "hooks": {"mine": torch.zeros(2)}}, tmp_path / "c")
    foreign = load_file(tmp_path / "c" / "model.safetensors")
    assert set(foreign) == set(model.state_dict())
    model.load_state_dict(foreign)
    assert set(load_file(tmp_path / "c" / "state.safetensors")) == {"hooks.mine"}


def test_tied_weights_are_stored_once_and_the_manifest_says_so(tmp_path: Path) -> None:
    first, second = nn.Linear(3, 3), nn.Linear(3, 3)
    second.weight = first.weight
    write({"module": nn.ModuleDict({"first": first, "second": second}).state_dict()}, tmp_path / "c")
    assert read_manifest(tmp_path / "c")["shared"] == {"second.weight": "first.weight"}
    assert "second.weight" not in load_file(tmp_path / "c" / "model.safetensors")
    restored = read(tmp_path / "c")["module"]
    assert restored["second.weight"] is restored["first.weight"]


def test_a_state_dict_keeps_the_versions_of_its_layers(tmp_path: Path) -> None:
    state: Any = nn.BatchNorm1d(2).state_dict()
    write({"module": state}, tmp_path / "c")
    restored: Any = read(tmp_path / "c")["module"]
    assert type(restored) is type(state)
    assert restored._metadata == state._metadata


@pytest.mark.parametrize(
    "name", ["__metadata__", "ünïcode ☃", "\ud800", "a\nb\0c", "", "$", "a/b", "'", "x" * 5000], ids=ascii
)
def test_names_may_be_anything(tmp_path: Path, name: str) -> None:
    value = {name: torch.ones(1), f"{name}'": torch.zeros(1)}
    write({"module": value, "hooks": value}, tmp_path / "c")
    restored = read(tmp_path / "c")
    for part in ("module", "hooks"):
        assert {key: float(each) for key, each in restored[part].items()} == {name: 1.0, f"{name}'": 0.0}


def test_the_state_of_lbfgs_and_of_schedulers_continues(tmp_path: Path) -> None:
    def made() -> tuple[nn.Parameter, torch.optim.LBFGS, Any]:
        weight = nn.Parameter(torch.tensor([3.0, -2.0]))
        optimizer = torch.optim.LBFGS([weight], lr=0.1, history_size=3)
        return weight, optimizer, torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 2, 4])

    def train(weight: nn.Parameter, optimizer: torch.optim.LBFGS, scheduler: Any) -> None:
        for _ in range(2):
            optimizer.step(lambda: _backward(weight, optimizer))
            scheduler.step()

    straight = made()
    train(*straight)
    write({"w": straight[0], "o": straight[1].state_dict(), "s": straight[2].state_dict()}, tmp_path / "c")
    train(*straight)
    restored, resumed = read(tmp_path / "c"), made()
    resumed[0].data.copy_(restored["w"])
    resumed[1].load_state_dict(restored["o"])
    resumed[2].load_state_dict(restored["s"])
    train(*resumed)
    assert torch.equal(resumed[0], straight[0])
    assert resumed[2].state_dict() == straight[2].state_dict()


def _backward(weight: nn.Parameter, optimizer: torch.optim.Optimizer) -> Any:
    optimizer.zero_grad()
    loss = ((weight - 1) ** 4).sum()
    loss.backward()  # type: ignore[no-untyped-call]
    return loss


def test_what_is_read_does_not_hang_on_the_file(tmp_path: Path) -> None:
    write({"module": {"w": torch.ones(2000)}}, tmp_path / "c")
    restored = read(tmp_path / "c")
    file = tmp_path / "c" / "model.safetensors"
    with file.open("r+b") as opened:
        opened.write(b"\0" * file.stat().st_size)
    assert float(restored["module"]["w"].sum()) == 2000.0
    maps = Path("/proc/self/maps")
    assert not maps.exists() or str(file) not in maps.read_text()


class Wrapper(Tensor):
    @staticmethod
    def __new__(cls) -> Any:
        return Tensor._make_wrapper_subclass(cls, (2,))  # type: ignore[attr-defined]

    __torch_dispatch__ = classmethod(lambda cls, func, types, args=(), kwargs=None: NotImplemented)  # type: ignore[assignment]


@pytest.mark.parametrize(
    "value",
    [
        torch.eye(2).to_sparse(),
        torch.zeros(2, device="meta"),
        nn.UninitializedParameter(),
        Wrapper(),
        np.ma.masked_array([1, 2], mask=[True, False]),
        torch.Size([2]),
        {torch.zeros(1): 1},
        {torch.zeros(1)},
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_would_come_back_as_something_else_is_refused_with_the_hook_and_the_key(
    tmp_path: Path, value: Any
) -> None:
    with pytest.raises(CheckpointError, match=r"hooks\.early_stopping\.best"):
        write({"hooks": {"early_stopping": {"best": value}}}, tmp_path / "c")
    assert not list(tmp_path.iterdir())


def test_state_that_holds_itself_is_refused_by_name(tmp_path: Path) -> None:
    loop: list[Any] = []
    loop.append(loop)
    with pytest.raises(CheckpointError, match=r"hooks\.mine.* holds itself"):
        write({"hooks": {"mine": loop}}, tmp_path / "c")


@pytest.mark.parametrize(
    "value", [10**5000, -(2**64), 2**63, -(2**63), 2**53 + 1], ids=lambda value: hex(value)[:20]
)
def test_whole_numbers_of_any_size(tmp_path: Path, value: int) -> None:
    write({"n": {value: [value]}}, tmp_path / "c")
    assert read(tmp_path / "c")["n"] == {value: [value]}
