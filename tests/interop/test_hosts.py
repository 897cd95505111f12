"""One recording hook in four loops: Hookline's, Lightning's, transformers' and one written by hand. It hears the same everywhere."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from interop.hosted import DATA, EPOCHS, LOOPS, VAL, in_hookline, in_lightning
from tiny import Net, quiet

import hookline
from hookline import Hook
from hookline.interop.hosted.host import ACCELERATE_HOST, HOSTS, LIGHTNING_HOST, RAW_LOOP, TRANSFORMERS_HOST

pytestmark = pytest.mark.filterwarnings("default")

MOVES = {"on_before_zero_grad", "on_train_metrics"}
"""Where transformers clears gradients and logs is its own affair."""
SHARED = [
    name
    for name in RAW_LOOP.offers
    if all(name in each.offers for each in HOSTS.values()) and "checkpoint" not in name
]
HAPPENS = [name for name in SHARED if name not in {*MOVES, "on_exception", "on_step_skipped"}]


class Records(Hook):
    """Writes every event down with the counters of its moment, and the losses of updates."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[Any, ...]] = []
        self.losses: list[float] = []


def recording(names: list[str]) -> Records:
    def listening_to(name: str) -> Callable[..., None]:
        def method(self: Any, step: int, batch_idx: int, epoch: int, batches_seen: int) -> None:
            self.seen.append((name, step, batch_idx, epoch, batches_seen))

        def with_loss(
            self: Any, step: int, batch_idx: int, epoch: int, batches_seen: int, loss: float, grad_norm: float
        ) -> None:
            self.losses += [round(loss, 4), round(grad_norm, 4)]
            method(self, step, batch_idx, epoch, batches_seen)

        return with_loss if name == "on_step_end" else method

    made: Records = type("Records", (Records,), {name: listening_to(name) for name in names})()
    return made


@pytest.fixture(scope="module", params=[1, 2], ids=["every batch is a step", "two batches are a step"])
def window(request: pytest.FixtureRequest) -> int:
    value: int = request.param
    return value


@pytest.fixture(scope="module")
def at_home(window: int) -> Records:
    """What the hook hears in Hookline's own trainer."""
    hook = recording(HAPPENS)
    in_hookline([hook], window)
    return hook


@pytest.mark.parametrize("host", LOOPS)
def test_the_same_hook_hears_the_same_events_with_the_same_counters(
    host: str, window: int, at_home: Records
) -> None:
    hook = recording(HAPPENS)
    LOOPS[host]([hook], window)
    assert hook.seen == at_home.seen
    assert {name for name, *_ in hook.seen} == set(HAPPENS)


@pytest.mark.parametrize("host", LOOPS)
def test_it_is_told_the_same_losses_and_norms(host: str, window: int, at_home: Records) -> None:
    """Of whole windows: Lightning and Accelerate divide a shorter last one by its full length, and train on other numbers then."""
    hook = recording(HAPPENS)
    LOOPS[host]([hook], window)
    whole = 2 * (len(DATA) // window)
    assert hook.losses[:whole] == pytest.approx(at_home.losses[:whole], abs=2e-4)
    assert len(hook.losses) == len(at_home.losses) == 2 * EPOCHS * -(-len(DATA) // window)


def test_a_step_is_an_update_and_a_batch_is_what_the_loader_yields(window: int, at_home: Records) -> None:
    names = [name for name, *_ in at_home.seen]
    assert names.count("on_train_batch_end") == EPOCHS * len(DATA)
    assert (
        names.count("on_step_end")
        == names.count("on_after_optimizer_step")
        == EPOCHS * -(-len(DATA) // window)
    )


@pytest.mark.parametrize("host", ["lightning", "raw loop"])
def test_clearing_the_gradients_comes_at_the_same_moment_where_the_host_tells_of_it(host: str) -> None:
    names = ["on_before_zero_grad", "on_before_backward", "on_after_optimizer_step", "on_train_batch_end"]
    here, there = recording(names), recording(names)
    LOOPS[host]([here], 2)
    in_hookline([there], 2)
    assert here.seen == there.seen


def test_lightning_tells_of_its_sanity_check_as_hookline_does() -> None:
    names = [
        "setup",
        "on_fit_start",
        "on_sanity_check_start",
        "on_validation_start",
        "on_validation_batch_end",
        "on_validation_end",
        "on_sanity_check_end",
        "on_train_start",
    ]
    here, there = recording(names), recording(names)
    in_lightning([here], 1, num_sanity_val_steps=1)
    net = Net()
    quiet(hooks=[there], max_epochs=EPOCHS, num_sanity_val_steps=1).fit(net, DATA, VAL)
    assert [name for name, *_ in here.seen] == [name for name, *_ in there.seen]


@pytest.mark.parametrize(
    ("host", "make"),
    [
        (LIGHTNING_HOST, hookline.hosts.lightning),
        (TRANSFORMERS_HOST, hookline.hosts.transformers),
        (ACCELERATE_HOST, partial(hookline.hosts.accelerate, Accelerator(cpu=True), torch.nn.Linear(1, 1))),
    ],
    ids=["lightning", "transformers", "accelerate"],
)
def test_what_a_host_lacks_is_refused_when_the_hook_is_added(host: Any, make: Any) -> None:
    assert host.lacks
    for name in host.lacks:
        hook = type("Asks", (Hook,), {name: lambda self: None})()
        with pytest.raises(
            hookline.HookError, match=f"'asks'.* listens to {name}, which {host.name} cannot emit: "
        ):
            make(hooks=[hook])


@pytest.mark.parametrize("host", [hookline.hosts.lightning, hookline.hosts.transformers])
def test_an_option_of_the_trainer_alone_is_refused_by_name(host: Any) -> None:
    with pytest.raises(hookline.OptionError, match=r"no option 'audit'\. Only hookline\.Trainer has it"):
        host([], audit=True)
