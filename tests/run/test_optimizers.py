"""What `configure_optimizers` may return, and what it is told when it returns something else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tiny import Net, batches, quiet
from torch import nn
from torch.optim import LBFGS, SGD, Adam, Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau, StepLR

from hookline import Hook, Line, Module, OptionError
from hookline.run.optimizers import (
    Schedule,
    bare,
    follow_parameters,
    in_module_order,
    needs_closure,
    parse_optimizers,
    settle_order,
)


@pytest.fixture
def net() -> Net:
    return Net()


def sgd(net: Net) -> SGD:
    return SGD(net.parameters(), lr=1.0)


def test_nothing_one_or_several_optimizers(net: Net) -> None:
    one, two = sgd(net), sgd(net)
    assert parse_optimizers(None, "Net") == ([], [])
    assert parse_optimizers(one, "Net") == ([one], [])
    assert parse_optimizers([one, two], "Net") == ([one, two], [])
    assert parse_optimizers((one, two), "Net") == ([one, two], [])


def test_optimizers_and_schedulers_as_two_lists(net: Net) -> None:
    one, two = sgd(net), sgd(net)
    first, second = StepLR(one, 1), StepLR(two, 1)
    optimizers, schedules = parse_optimizers(
        ([one, two], [second, {"scheduler": first, "interval": "step"}]), "Net"
    )
    assert optimizers == [one, two]
    assert [(each.scheduler, each.optimizer_idx, each.interval) for each in schedules] == [
        (second, 1, "epoch"),
        (first, 0, "step"),
    ]


def test_a_schedule_that_another_system_has_read_is_kept(net: Net) -> None:
    one, two = sgd(net), sgd(net)
    schedule = Schedule(StepLR(two, 1), interval="step")
    optimizers, schedules = parse_optimizers(([one, two], [schedule]), "Net")
    assert optimizers == [one, two]
    assert schedules == [Schedule(schedule.scheduler, optimizer_idx=1, interval="step")]
    with pytest.raises(OptionError, match="wasn't returned"):
        parse_optimizers(([one], [schedule]), "Net")


def test_a_dictionary_and_a_list_of_them(net: Net) -> None:
    one, two = sgd(net), sgd(net)
    schedule = {"scheduler": StepLR(two, 1), "interval": "step", "frequency": 3, "name": "decay"}
    optimizers, schedules = parse_optimizers(
        [{"optimizer": one}, {"optimizer": two, "lr_scheduler": schedule}], "Net"
    )
    assert optimizers == [one, two]
    (only,) = schedules
    assert (only.optimizer_idx, only.interval, only.frequency, only.name) == (1, "step", 3, "decay")
    assert (
        parse_optimizers({"optimizer": one, "lr_scheduler": StepLR(one, 1)}, "Net")[1][0].interval == "epoch"
    )


def with_schedule(net: Net, make: Callable[[Any], Any]) -> dict[str, Any]:
    """An optimizer and the scheduler that is made for it."""
    optimizer = sgd(net)
    return {"optimizer": optimizer, "lr_scheduler": make(optimizer)}


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (5, "Net.configure_optimizers returned int. It may return: an optimizer"),
        ("adam", "Net.configure_optimizers returned str"),
        ([5], "int is not a torch.optim.Optimizer"),
        ({"lr_scheduler": None}, "NoneType is not a torch.optim.Optimizer"),
        (
            {"optimiser": None},
            "with 'optimiser'; allowed: 'optimizer', 'lr_scheduler'. Did you mean 'optimizer'",
        ),
        (lambda net: {"optimizer": sgd(net), "scheduler": 1}, "Did you mean 'lr_scheduler'"),
        ([5], r"Allowed: an optimizer; .*; \(\[optimizer, \.\.\.\], \[scheduler, \.\.\.\]\);"),
        (
            lambda net: (sgd(net), StepLR(sgd(net), 1)),
            r"Net.configure_optimizers: StepLR is a scheduler, in the place of an optimizer. An optimizer with its "
            r"scheduler is \(\[optimizer\], \[scheduler\]\), or {'optimizer': optimizer, 'lr_scheduler': scheduler}",
        ),
        (
            lambda net: {"optimizer": sgd(net), "lr_scheduler": {"schedular": 1}},
            "unknown key 'schedular'.*Did you mean 'scheduler'.*Keys",
        ),
        (
            lambda net: {"optimizer": sgd(net), "lr_scheduler": {"interval": "step"}},
            "needs the key 'scheduler'",
        ),
        (lambda net: {"optimizer": sgd(net), "lr_scheduler": 5}, "lr_scheduler int has no step"),
        (
            lambda net: with_schedule(net, lambda made: {"scheduler": StepLR(made, 1), "interval": "steps"}),
            "StepLR: interval='steps', allowed: 'step', 'epoch'",
        ),
        (
            lambda net: with_schedule(net, lambda made: {"scheduler": StepLR(made, 1), "frequency": 0}),
            "frequency=0 must be a whole number from 1",
        ),
        (
            lambda net: with_schedule(net, ReduceLROnPlateau),
            "ReduceLROnPlateau needs a metric to watch.*'monitor': 'val/loss'",
        ),
        (
            lambda net: {"optimizer": sgd(net), "lr_scheduler": StepLR(sgd(net), 1)},
            "StepLR is attached with an optimizer that wasn't returned .SGD.*Return that optimizer",
        ),
        (
            lambda net: ([sgd(net)], [{"scheduler": StepLR(sgd(net), 1)}]),
            "StepLR is attached with an optimizer that wasn't returned",
        ),
    ],
)
def test_anything_else_is_refused_with_what_is_allowed(net: Net, returned: Any, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        parse_optimizers(returned(net) if callable(returned) else returned, "Net")


def test_a_wrong_return_stops_the_run_before_anything_is_trained() -> None:
    class Wrong(Net):
        steps = 0

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.steps += 1
            return super().training_step(batch, batch_idx)

        def configure_optimizers(self) -> Any:
            return {"optimizr": sgd(self)}

    wrong = Wrong()
    with pytest.raises(OptionError, match="Wrong.configure_optimizers.*Did you mean 'optimizer'"):
        quiet().fit(wrong, batches(1))
    assert wrong.steps == 0


def test_only_plateau_schedulers_need_a_metric(net: Net) -> None:
    optimizer = sgd(net)
    assert Schedule(ReduceLROnPlateau(optimizer), monitor="val/loss").needs_metric
    assert not Schedule(StepLR(optimizer, 1)).needs_metric


def test_only_some_optimizers_need_a_closure(net: Net) -> None:
    assert needs_closure(LBFGS(net.parameters()))
    assert not needs_closure(sgd(net))
    assert not needs_closure(Adam(net.parameters()))


def test_a_coat_around_an_optimizer_needs_a_closure_if_either_of_them_does(net: Net) -> None:
    class Coat(Optimizer):
        def __init__(self, optimizer: Optimizer) -> None:
            self.optimizer = optimizer
            super().__init__(optimizer.param_groups, {})

        def step(self, closure: Any = None) -> Any:
            return self.optimizer.step(closure)

    class Asks(Coat):
        def step(self, closure: Any) -> Any:
            return super().step(closure)

    assert needs_closure(Coat(LBFGS(net.parameters()))) and needs_closure(Asks(sgd(net)))
    assert not needs_closure(Coat(Coat(sgd(net))))
    inner = sgd(net)
    assert bare(Coat(Coat(inner))) is inner and bare(inner) is inner


def test_any_object_with_a_step_can_be_a_scheduler() -> None:
    class Counts:
        steps = 0

        def step(self) -> None:
            self.steps += 1

        def state_dict(self) -> dict[str, Any]:
            return {}

    class Own(Net):
        scheduler = Counts()

        def configure_optimizers(self) -> Any:
            return {"optimizer": sgd(self), "lr_scheduler": {"scheduler": self.scheduler, "interval": "step"}}

    net = Own()
    quiet().fit(net, batches(3))
    assert net.scheduler.steps == 3


def test_without_an_optimizer_nothing_would_be_trained_so_it_is_refused() -> None:
    class NoOptimizer(Net):
        def configure_optimizers(self) -> Any:
            return None

    with pytest.raises(OptionError, match="NoOptimizer.configure_optimizers returned no optimizer"):
        quiet().fit(NoOptimizer(), batches(2))


def test_an_optimizer_of_another_model_is_refused() -> None:
    class Stranger(Net):
        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(Net().parameters(), lr=0.1)

    with pytest.raises(OptionError, match="SGD holds no parameter of Stranger"):
        quiet().fit(Stranger(), batches(2))


def test_a_scheduler_class_is_refused_before_the_run_needs_it() -> None:
    class Scheduled(Net):
        def configure_optimizers(self) -> Any:
            return [SGD(self.parameters(), lr=0.1)], [StepLR]

    with pytest.raises(
        OptionError, match=r"lr_scheduler StepLR is a class; pass an object of it.*StepLR\(optimizer\)"
    ):
        quiet().fit(Scheduled(), batches(1))


def test_a_new_parameter_is_not_taken_for_an_old_one_that_had_its_id() -> None:
    module = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1))
    old = nn.Parameter(torch.zeros(1, 1))
    optimizers = [SGD([module[1].weight, old], lr=0.1)]
    before = {
        id(module[1].weight): "0.weight",
        id(old): "0.weight",
    }  # the first one took the memory of an old one
    follow_parameters(optimizers, before, module)
    assert optimizers[0].param_groups[0]["params"][0] is module[1].weight
    assert optimizers[0].param_groups[0]["params"][1] is module[0].weight


# ---- the order in which a norm is summed -------------------------------------------------------------------


def deep() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8)) for _ in range(4)))


def grouped(net: nn.Module) -> SGD:
    """Weights first, then biases: not the order of the module."""
    weights, others = (
        [p for p in net.parameters() if (p.ndim > 1) is is_matrix] for is_matrix in (True, False)
    )
    return SGD([{"params": weights}, {"params": others, "lr": 0.5}], lr=1.0)


def is_same(found: list[Any], expected: Any) -> bool:
    return [id(each) for each in found] == [id(each) for each in expected]


def test_parameters_of_groups_and_of_several_optimizers_come_in_the_order_of_the_module() -> None:
    net = deep()
    one, parts = grouped(net), [SGD(net[3].parameters()), SGD(net[:3].parameters())]
    assert not is_same(in_module_order([one]), net.parameters())  # the module is not known yet
    settle_order([one, *parts], net)
    assert is_same(in_module_order([one]), net.parameters())
    assert is_same(in_module_order(parts), net.parameters())
    assert is_same(in_module_order(parts[:1]), net[3].parameters())


def test_a_group_that_is_added_later_is_put_in_order_and_a_foreign_parameter_comes_last() -> None:
    net, foreign = deep(), nn.Parameter(torch.zeros(2))
    later = SGD(net[2:].parameters())
    settle_order([later], net)
    later.add_param_group({"params": [foreign, *net[:2].parameters()]})
    assert is_same(in_module_order([later]), [*net.parameters(), foreign])


@pytest.mark.parametrize("host", ["trainer", "line"])
def test_clipping_has_the_bits_of_a_loop_that_clips_the_parameters_of_the_module(host: str) -> None:
    limit, data = 0.2, [(torch.randn(16, 8), torch.randn(16, 8)) for _ in range(12)]
    by_hand, net = deep(), deep()
    optimizer, norms, seen = grouped(by_hand), [], []
    for x, y in data:
        optimizer.zero_grad()
        nn.functional.mse_loss(by_hand(x), y).backward()
        norms.append(float(nn.utils.clip_grad_norm_(by_hand.parameters(), limit)))
        optimizer.step()

    class Norms(Hook):
        def on_step_end(self, grad_norm: float) -> None:
            seen.append(grad_norm)

    optimizer = grouped(net)
    if host == "trainer":
        trainer = quiet(max_epochs=1, gradient_clip_val=limit, hooks=[Norms()])
        trainer.fit(net, data, loss=nn.functional.mse_loss, optimizer=optimizer)
    else:
        with Line(net, optimizer, hooks=[Norms()]) as line:
            for x, y in line.epoch(data):
                optimizer.zero_grad()
                line.backward(nn.functional.mse_loss(net(x), y))
                line.clip_gradients(limit)
                optimizer.step()
    assert seen == norms
    assert all(map(torch.equal, net.parameters(), by_hand.parameters()))


# ---- an optimizer that is passed to fit --------------------------------------------------------------------------


@pytest.mark.parametrize(
    "form",
    [
        lambda optimizer, scheduler: {"optimizer": optimizer, "lr_scheduler": scheduler},
        lambda optimizer, scheduler: ([optimizer], [scheduler]),
    ],
    ids=["dictionary", "lists"],
)
def test_an_optimizer_with_its_scheduler_is_passed_to_fit(form: Callable[[Any, Any], Any]) -> None:
    model = nn.Linear(4, 2)
    optimizer = SGD(model.parameters(), lr=1.0)
    given = form(optimizer, StepLR(optimizer, 1, gamma=0.5))
    quiet(max_epochs=2).fit(model, batches(2), loss=nn.functional.mse_loss, optimizer=given)
    assert optimizer.param_groups[0]["lr"] == 0.25


class WithoutOptimizer(Net):
    configure_optimizers = Module.configure_optimizers


@pytest.mark.parametrize("make", [lambda: nn.Linear(4, 2), WithoutOptimizer], ids=["plain", "module"])
def test_a_scheduler_in_the_place_of_an_optimizer_is_told_by_what_the_user_wrote(make: Any) -> None:
    model = make()
    optimizer = SGD(model.parameters(), lr=1.0)
    more = {} if isinstance(model, Net) else {"loss": nn.functional.mse_loss}
    with pytest.raises(OptionError, match=r"fit\(optimizer=\.\.\.\): StepLR is a scheduler.*'lr_scheduler'"):
        quiet().fit(model, batches(2), optimizer=(optimizer, StepLR(optimizer, 1)), **more)


@pytest.mark.parametrize("name", ["scheduler", "lr_scheduler"])
def test_an_argument_for_a_scheduler_says_where_it_goes(name: str) -> None:
    model = nn.Linear(4, 2)
    optimizer = SGD(model.parameters(), lr=1.0)
    given: dict[str, Any] = {"optimizer": optimizer, name: StepLR(optimizer, 1)}
    with pytest.raises(OptionError, match=rf"no argument {name!r}.*'lr_scheduler': scheduler}}.*LRSchedule"):
        quiet().fit(model, batches(2), loss=nn.functional.mse_loss, **given)
