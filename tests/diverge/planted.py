"""Divergences that are planted into a run, each with the step and the kind that must be found.

There are 100 of them: one changed sample, a seed, a learning rate, a hook's side effect, a flag of a library.
"""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from tiny import quiet
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from hookline import SKIP_STEP, Hook, Module, Signal
from hookline.digests import compare as kinds
from hookline.digests.diverge import DivergeReport, diverge

STEPS = 6
PARAMETERS = ("first.weight", "first.bias", "norm.weight", "last.weight", "last.bias")
Change = Callable[["Net", int], None]


class Net(Module):
    """Two layers with batch norm and dropout between them. `inside` is called in every training step."""

    def __init__(self, inside: Change | None = None) -> None:
        super().__init__()
        self.first, self.norm, self.drop = nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.2)
        self.last = nn.Linear(8, 2)
        self.inside = inside
        self.rate: Callable[[int], float] = lambda step: 0.05
        self.optimizer: Callable[..., Any] = torch.optim.Adam
        self.loss: Callable[[Tensor, Tensor], Tensor] = F.mse_loss
        self.step = 0

    def forward(self, inputs: Tensor) -> Tensor:
        hidden: Tensor = self.drop(self.norm(torch.tanh(self.first(inputs))))
        outputs: Tensor = self.last(hidden)
        return outputs

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.step = self.trainer.global_step + 1
        if self.inside is not None:
            self.inside(self, self.step)
        scale = 1 + 1e6 * (torch.tensor(0.1).double() - 0.1)  # it depends on the default type
        return self.loss(self(batch[0]), batch[1]) * scale.float()

    def configure_optimizers(self) -> Any:
        made = self.optimizer(self.parameters(), lr=1.0)
        schedule = torch.optim.lr_scheduler.LambdaLR(made, lambda step: self.rate(step + 1))
        return {"optimizer": made, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def samples(batches: int = STEPS, size: int = 4) -> list[tuple[Tensor, Tensor]]:
    """The same batches every time."""
    generator = torch.Generator().manual_seed(5)
    return [
        (torch.randn(size, 4, generator=generator), torch.randn(size, 2, generator=generator))
        for _ in range(batches)
    ]


@dataclass
class Setup:
    """What a run is made of; a plant changes it."""

    data: Any = field(default_factory=samples)
    net: Callable[[], Net] = Net
    prepare: Callable[[Net], None] = lambda net: None
    hooks: list[Any] = field(default_factory=list)
    options: dict[str, Any] = field(default_factory=dict)

    def run(self, folder: Path) -> None:
        """Train into a folder."""
        torch.manual_seed(3)
        net = self.net()
        self.prepare(net)
        before = torch.get_default_dtype()
        options = {"seed": 1, "digest": {"every": 1, "modules": True}, "max_epochs": 1, **self.options}
        try:
            quiet(run_dir=folder, logger=True, control=False, hooks=self.hooks, **options).fit(net, self.data)
        finally:
            torch.set_default_dtype(before)


@dataclass(frozen=True)
class Plant:
    """A change of the second run. `base` changes both."""

    name: str
    kind: str
    step: int
    change: Callable[[Setup], None]
    base: dict[str, Any] = field(default_factory=dict)
    names: str = ""
    """A part of what must be named."""


def found(plant: Plant, folder: Path) -> DivergeReport:
    """Return what is found for a plant, from two real runs."""
    known = folder / "base" / (str(sorted(plant.base.items())) or "plain").replace("/", "_")
    if not known.exists():
        Setup(options=dict(plant.base), data=data_of(plant)).run(known)
    changed = Setup(options=dict(plant.base), data=data_of(plant))
    plant.change(changed)
    other = folder / "other"
    shutil.rmtree(other, ignore_errors=True)
    changed.run(other)
    return diverge(known, other)


def data_of(plant: Plant) -> Any:
    return samples(2 * STEPS) if "accumulate_grad_batches" in plant.base else samples()


# ---- hooks and changes ---------------------------------------------------------------------------------------------


class At(Hook):
    """Does something at one event of one step. `step` is the number of the update that comes next."""

    def __init__(self, step: int, does: Callable[[Any], Any]) -> None:
        super().__init__()
        self.at, self.does = step, does

    def act(self, state: Any) -> Any:
        return self.does(state) if state.step + 1 == self.at else None


class AtBatchStart(At):
    def on_train_batch_start(self, state: Any) -> None:
        self.act(state)


class AtStepEnd(At):
    def on_step_end(self, state: Any) -> None:
        self.act(state)


class BeforeUpdate(At):
    def on_before_optimizer_step(self, state: Any) -> None:
        self.act(state)


class BeforeBackward(At):
    def on_before_backward(self, state: Any, loss: Any) -> Any:
        return loss * 1.5 if state.step + 1 == self.at else None


class Skips(At):
    def on_before_optimizer_step(self, state: Any) -> Signal | None:
        return SKIP_STEP if state.step + 1 == self.at else None


def nudge(name: str) -> Callable[[Any], None]:
    def change(s: Any) -> None:
        parameter = s.module.get_parameter(name)
        parameter.data.view(-1)[0] += 1e-4

    return change


def scale_gradient(name: str) -> Callable[[Any], Any]:
    return lambda s: s.module.get_parameter(name).grad.mul_(1.25)


def draw(stream: str) -> Callable[[Any], Any]:
    if stream == "python":
        return lambda s: random.random()
    if stream == "numpy":
        import numpy as np

        return lambda s: np.random.rand()
    return lambda s: torch.rand(1)


def spoil_batch(s: Any) -> None:
    s.batch[0][1, 2] += 1e-3


def spoil_state(s: Any) -> None:
    next(iter(s.optimizers[0].state.values()))["exp_avg"][0] += 1e-3


def spoil_buffers(s: Any) -> None:
    s.module.norm.running_mean[0] += 1e-3


def hook(made: At) -> Callable[[Setup], None]:
    return lambda setup: setup.hooks.append(made)


def inside(does: Callable[[Net, int], None]) -> Callable[[Setup], None]:
    return lambda setup: setattr(setup, "net", lambda: Net(does))


def at(step: int, does: Callable[[Net], Any]) -> Change:
    def change(net: Net, now: int) -> None:
        if now == step:
            does(net)

    return change


class Slips(torch.optim.Adam):
    """An optimizer that computes something else in one step."""

    slips_at = 0
    slips_in = 0
    count = 0

    def step(self, closure: Any = None) -> Any:
        result = super().step(closure)  # type: ignore[no-untyped-call]
        self.count += 1
        if self.count == self.slips_at:
            with torch.no_grad():
                self.param_groups[0]["params"][self.slips_in].view(-1)[0] += 1e-4
        return result


def slipping(step: int, place: int) -> Callable[[Setup], None]:
    made = type("Slipping", (Slips,), {"slips_at": step, "slips_in": place})
    return lambda setup: setattr(setup, "prepare", lambda net: setattr(net, "optimizer", made))


def prepare(does: Callable[[Net], None]) -> Callable[[Setup], None]:
    return lambda setup: setattr(setup, "prepare", does)


def in_data(does: Callable[[list[Any]], None]) -> Callable[[Setup], None]:
    return lambda setup: does(setup.data)


def swap(one: int, other: int) -> Callable[[list[Any]], None]:
    def change(data: list[Any]) -> None:
        data[one], data[other] = data[other], data[one]

    return change


def permute(place: int) -> Callable[[list[Any]], None]:
    def change(data: list[Any]) -> None:
        data[place] = tuple(each[[1, 0, *range(2, len(each))]] for each in data[place])

    return change


def change_sample(place: int, part: int, row: int, by: float) -> Callable[[list[Any]], None]:
    def change(data: list[Any]) -> None:
        data[place][part][row, 1] += by

    return change


def gradient_hook(step: int, name: str) -> Callable[[Setup], None]:
    def does(net: Net) -> None:
        net.get_parameter(name).register_hook(lambda grad: grad * 1.01 if net.step == step else grad)

    return prepare(does)


def odd_layer(step: int, name: str) -> Callable[[Setup], None]:
    """A layer that computes something else in one step, as another kernel would."""

    def does(net: Net) -> None:
        layer = net.get_submodule(name)
        usual = layer.forward
        layer.forward = lambda x: usual(x) + 1e-4 if net.step == step else usual(x)  # type: ignore[method-assign]

    return prepare(does)


def reshuffled(setup: Setup) -> None:
    inputs, targets = (torch.cat(each) for each in zip(*samples(), strict=True))
    order = torch.randperm(len(inputs), generator=torch.Generator().manual_seed(9))
    setup.data = DataLoader(TensorDataset(inputs[order], targets[order]), batch_size=4)


def other_loss(step: int) -> Callable[[Setup], None]:
    def does(net: Net) -> None:
        net.loss = lambda a, b: F.l1_loss(a, b) if net.step == step else F.mse_loss(a, b)

    return prepare(does)


AUDIT: dict[str, Any] = {"audit": True}
CLIP: dict[str, Any] = {"gradient_clip_val": 0.05}
TWICE: dict[str, Any] = {"accumulate_grad_batches": 2}


def make_plants() -> list[Plant]:
    """Return 100 plants, the same every time."""
    chance = random.Random(11)
    made: list[Plant] = []

    def add(name: str, kind: str, step: int, change: Callable[[Setup], None], **more: Any) -> None:
        made.append(Plant(f"{len(made):02} {name} at {step}", kind, step, change, **more))

    def step() -> int:
        return chance.randint(2, STEPS - 1)

    for _ in range(9):
        n = chance.randrange(STEPS)
        changed = change_sample(n, 0, chance.randrange(4), chance.choice([1e-6, 0.5, -2.0]))
        add("one input", kinds.BATCH, n + 1, in_data(changed), names="batch[0]")
    for _ in range(4):
        n = chance.randrange(STEPS)
        add("one label", kinds.BATCH, n + 1, in_data(change_sample(n, 1, 2, 1e-3)), names="batch[1]")
    for _ in range(3):
        n = chance.randrange(2 * STEPS)
        changed = change_sample(n, 0, 1, 1e-3)
        add("one input of a window", kinds.BATCH, n // 2 + 1, in_data(changed), base=TWICE)
    for _ in range(6):
        one, other = sorted(chance.sample(range(STEPS), 2))
        add("two batches swapped", kinds.DATA_ORDER, one + 1, in_data(swap(one, other)))
    for _ in range(4):
        n = chance.randrange(STEPS)
        add("two samples swapped", kinds.DATA_ORDER, n + 1, in_data(permute(n)))
    for _ in range(2):
        add("another order", kinds.DATA_ORDER, 1, reshuffled)
    for seed in (2, 3, 4):
        changed_seed = {"seed": seed}
        add("another seed", kinds.RANDOM, 1, lambda setup, new=changed_seed: setup.options.update(new))
    for name in PARAMETERS:
        add(
            "initial " + name, kinds.WEIGHTS, 1, prepare(lambda net, name=name: _nudge(net, name)), names=name
        )
    for rate in (0.04, 0.06, 0.0500001):
        add(
            "another rate",
            kinds.RATE,
            1,
            prepare(lambda net, rate=rate: setattr(net, "rate", lambda _: rate)),
        )
    for _ in range(4):
        n = step()
        rates = prepare(lambda net, n=n: setattr(net, "rate", lambda now: 0.05 if now < n else 0.04))
        add("another schedule", kinds.RATE, n, rates, names="lr")
    for name, value in (("weight_decay", 0.1), ("eps", 1e-7), ("betas", (0.8, 0.999))):
        for n in {step(), step()}:
            changed = inside(at(n, lambda net, name=name, value=value: _set(net, name, value)))
            add("another " + name, kinds.SETTING, n, changed, names=name)
    _add_hooks(add, step, chance)
    _add_code(add, step, chance)
    return made


def _nudge(net: Net, name: str) -> None:
    net.get_parameter(name).data.view(-1)[0] += 1e-4


def _set(net: Net, name: str, value: Any) -> None:
    net.trainer.optimizers[0].param_groups[0][name] = value


def _add_hooks(add: Any, step: Callable[[], int], chance: random.Random) -> None:
    """A hook's side effects: named by the audit, and without it."""
    for kind, base, times in ((kinds.HOOK, AUDIT, 3), (kinds.WEIGHTS, {}, 3)):
        for _ in range(times):
            n, name = step(), chance.choice(PARAMETERS)
            # after the update of step n: the step that begins with other weights is n + 1
            add("weights by a hook", kind, n, hook(AtStepEnd(n, nudge(name))), base=base)
        n, name = step(), chance.choice(PARAMETERS)
        add("weights before the forward", kind, n, hook(AtBatchStart(n, nudge(name))), base=base)
    for kind, base in ((kinds.HOOK, AUDIT), (kinds.CLIPPING, {}), (kinds.CLIPPING, CLIP)):
        for _ in range(2):
            n, name = step(), chance.choice(PARAMETERS)
            add("gradients by a hook", kind, n, hook(BeforeUpdate(n, scale_gradient(name))), base=base)
    for kind, base in ((kinds.HOOK, AUDIT), (kinds.RANDOM, {})):
        for stream in ("python", "numpy", "torch"):
            n = step()
            names = stream if kind == kinds.RANDOM else ""
            add(f"{stream} drawn", kind, n, hook(AtBatchStart(n, draw(stream))), base=base, names=names)
    for kind, base in ((kinds.HOOK, AUDIT), (kinds.CHANGED_BATCH, {})):
        for _ in range(2):
            n = step()
            add("the batch by a hook", kind, n, hook(AtBatchStart(n, spoil_batch)), base=base)
    for kind, base in ((kinds.HOOK, AUDIT), (kinds.MODE, {})):
        n = step()
        add("eval mode by a hook", kind, n, hook(AtBatchStart(n, lambda s: s.module.eval())), base=base)
        n = step()
        add("dropout off", kind, n, hook(AtBatchStart(n, lambda s: s.module.drop.eval())), base=base)
    for kind, base in ((kinds.HOOK, AUDIT), (kinds.STATE, {})):
        n = step()
        add("optimizer state", kind, n, hook(AtStepEnd(n, spoil_state)), base=base)
        n = step()
        add(
            "batch statistics",
            kinds.HOOK if base else kinds.BUFFERS,
            n,
            hook(AtStepEnd(n, spoil_buffers)),
            base=base,
        )
    for kind, base in ((kinds.HOOK, AUDIT), (kinds.LOSS, {})):
        n = step()
        add("the loss replaced", kind, n, hook(BeforeBackward(n, lambda s: None)), base=base)
    n = step()
    add("a skipped update", kinds.SKIPPED, n, hook(Skips(n, lambda s: None)))
    n = step()
    add("frozen", kinds.MODE, n, hook(AtBatchStart(n, lambda s: s.module.last.bias.requires_grad_(False))))


def _add_code(add: Any, step: Callable[[], int], chance: random.Random) -> None:
    """What the code of a model, a library or an optimizer does differently."""
    for name in ("first", "norm", "drop", "last"):
        n = step()
        add(f"forward of {name}", kinds.FORWARD, n, odd_layer(n, name), names=name)
    for name in ("first.weight", "norm.weight", "last.bias"):
        n = step()
        add(f"gradient of {name}", kinds.GRADIENT, n, gradient_hook(n, name), names=name)
    for place in (0, 2, 5):
        n = step()
        add(f"update of {place}", kinds.UPDATE, n, slipping(n, place))
    for _ in range(2):
        n = step()
        add("another loss", kinds.LOSS, n, other_loss(n))
    for value in (0.04, 0.01):
        clip = {"gradient_clip_val": value}
        add(
            "another clipping",
            kinds.CLIPPING,
            1,
            lambda setup, clip=clip: setup.options.update(clip),
            base=CLIP,
        )
    for _ in range(2):
        n = step()
        add(
            "default type",
            kinds.FLAG,
            n,
            hook(AtBatchStart(n, lambda s: torch.set_default_dtype(torch.float64))),
        )


PLANTS = make_plants()
