"""What the host knows about a step: streams, settings, modes, flags and the leaves of a batch."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from hookline.digests import host_facts

CPU = torch.device("cpu")


def test_each_random_stream_has_its_own_digest_and_none_is_drawn_from() -> None:
    before = host_facts.random_streams(CPU)
    assert host_facts.random_streams(CPU) == before
    for stream, draw in (
        ("python", random.random),
        ("numpy", np.random.rand),
        ("torch", lambda: torch.rand(1)),
    ):
        known = host_facts.random_streams(CPU)
        draw()
        now = host_facts.random_streams(CPU)
        assert [name for name in now if now[name] != known[name]] == [stream]


def test_settings_and_state_of_optimizers_have_names() -> None:
    net = nn.Linear(2, 1)
    adam = torch.optim.Adam(
        [{"params": [net.weight]}, {"params": [net.bias], "lr": torch.tensor(0.5)}], lr=0.1
    )
    net(torch.ones(1, 2)).sum().backward()
    adam.step()
    settings = host_facts.optimizer_settings(0, adam)
    assert settings["optimizer 0, group 0: lr"] == "0.1" and settings["optimizer 0, group 1: lr"] == "0.5"
    assert settings["optimizer 0, group 0: parameters"] == "1"
    assert list(host_facts.device_settings(0, adam)) == []  # of the host: nothing is left for the device
    names = {id(each): name for name, each in net.named_parameters()}
    state = dict(host_facts.optimizer_state([adam], names))
    assert list(state)[:2] == ["optimizer 0, weight: step", "optimizer 0, weight: exp_avg"]
    assert [name for name, _ in host_facts.parameters_of(adam, names)] == ["weight", "bias"]


def test_modes_name_what_is_in_eval_mode_or_frozen() -> None:
    net = nn.Sequential(nn.Linear(2, 2), nn.Dropout())
    assert host_facts.modes(net) == {"in eval mode": "", "frozen": ""}
    net[1].eval()
    net[0].bias.requires_grad_(False)
    assert host_facts.modes(net) == {"in eval mode": "1", "frozen": "0.bias"}


def test_flags_that_decide_about_bits_are_listed() -> None:
    before = host_facts.process_flags()
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(threads + 1)
        now = host_facts.process_flags()
    finally:
        torch.set_num_threads(threads)
    assert [name for name in now if now[name] != before[name]] == ["torch.get_num_threads"]
    assert "torch.get_float32_matmul_precision" in now and "torch.get_default_dtype" in now


@dataclass
class Item:
    image: Any
    label: int


class Own:
    def __init__(self) -> None:
        self.inputs, self.name, self.helper = torch.ones(2), "x", object()


def test_the_leaves_of_a_batch_have_their_places() -> None:
    batch = {"a": [torch.ones(1), 3], "b": Item(np.zeros(2), 1), "c": Own()}
    found = dict(host_facts.batch_leaves(batch))
    assert [name for name in found if isinstance(found[name], torch.Tensor)] == [
        "batch['a'][0]",
        "batch['c'].inputs",
    ]
    assert found["batch['b'].label"] == 1 and found["batch['c'].name"] == "x" and found["batch"] == "dict"
    assert "batch['c'].helper" not in found
    endless: list[Any] = []
    endless.append(endless)
    assert len(list(host_facts.batch_leaves(endless))) < 100


def test_arrays_are_digested_by_their_bytes() -> None:
    array = np.arange(3.0)
    assert torch.equal(host_facts.as_tensor(array), host_facts.as_tensor(array.copy()))  # type: ignore[arg-type]
    assert not torch.equal(host_facts.as_tensor(array), host_facts.as_tensor(array + 1))  # type: ignore[arg-type]
    assert host_facts.as_tensor(np.array([object()])) is None and host_facts.as_tensor("text") is None


def test_nested_optimizer_state_counts_by_its_bits_and_places_in_memory_do_not_count() -> None:
    weight = nn.Parameter(torch.ones(2))
    sgd = torch.optim.SGD([weight, other := nn.Parameter(torch.ones(1))], lr=0.1)
    sgd.param_groups[0]["rule"] = lambda rate: rate
    sgd.state[weight] = {"factors": [torch.ones(2000)], "rule": object()}
    state = dict(host_facts.optimizer_state([sgd], {}))
    assert isinstance(state["optimizer 0, ? 0: factors[0]"], torch.Tensor)
    assert state["optimizer 0, ? 0: rule"] == "object"
    assert " at 0x" not in host_facts.optimizer_settings(0, sgd)["optimizer 0, group 0: rule"]
    # parameters that the module does not have are kept apart
    assert dict(host_facts.parameters_of(sgd, {})) == {"? 0": weight, "? 1": other}
