"""Asking by name: a hook's parameters are the facts it wants, in any order, any subset; settled at registration."""

from __future__ import annotations

import contextlib
import functools
import inspect
from typing import Any

import pytest
import torch
from tiny import Net, batches, quiet

from hookline import Hook, HookError, OptionError, Strategy, every
from hookline.engine.events import EVENTS
from hookline.hooks import ConsoleLog, EarlyStopping, JSONLog, LRMonitor, ModelCheckpoint, Timer


def told(event, function, *, data=1, module=None, **options):
    """Fit with a function hook."""
    trainer = quiet(**options)
    trainer.on(event)(function)
    trainer.fit(module or Net(), batches(data))
    return trainer


# ---- by name -----------------------------------------------------------------------------------------------------


def test_parameters_may_come_in_any_order_and_any_subset():
    got = []
    told("train_batch_end", lambda batch_idx, trainer, loss: got.append((batch_idx, trainer, loss)), data=2)
    told("train_batch_end", lambda: got.append("nothing"))
    told("train_batch_end", lambda step: got.append(step))
    (first, second, nothing, step) = got
    assert (first[0], second[0], nothing, step) == (0, 1, "nothing", 1)
    assert isinstance(first[2], float)
    assert first[1].state.step == 2


def test_a_hook_method_a_module_and_a_strategy_ask_the_same_way():
    got = []

    class Listening(Net):
        def on_train_start(self, world_size, stage):
            got.append(("module", world_size, stage))

    class Watching(Hook):
        def on_train_start(self, stage, world_size):
            got.append(("hook", world_size, stage))

    class Own(Strategy):
        def place(self, module):
            return module

        def on_train_start(self, stage):
            got.append(("strategy", 1, stage))

    quiet(hooks=[Watching()], strategy=Own(torch.device("cpu"))).fit(Listening(), batches(1))
    assert got == [("hook", 1, "fit"), ("module", 1, "fit"), ("strategy", 1, "fit")]


@pytest.mark.parametrize(
    ("name", "others"),
    [
        ("module", ["pl_module", "model"]),
        ("dataloader_idx", ["loader_idx"]),
        ("dataloader_name", ["loader_name"]),
        ("step", ["global_step"]),
        ("epoch", ["current_epoch"]),
    ],
)
def test_every_spelling_of_a_fact_gives_the_same_thing(name, others):
    got = {}

    def listen(spelling):
        namespace = {"got": got}
        exec(f"def hook({spelling}): got[{spelling!r}] = {spelling}", namespace)
        return namespace["hook"]

    trainer = quiet()
    for spelling in (name, *others):
        trainer.on("train_batch_end")(listen(spelling))
    trainer.fit(Net(), batches(2))
    assert set(got) == {name, *others}
    assert all(value is got[name] or value == got[name] for value in got.values())


def test_the_path_of_a_checkpoint_has_two_spellings(tmp_path):
    got = []
    trainer = quiet()
    trainer.on("train_end")(lambda: trainer.save_checkpoint(tmp_path / "here"))
    trainer.on("checkpoint_save")(lambda path, checkpoint_path: got.append((path, checkpoint_path)))
    trainer.fit(Net(), batches(1))
    assert got == [(tmp_path / "here", tmp_path / "here")]


def test_facts_known_everywhere_can_be_asked_for_at_every_event():
    everywhere = [fact.name for fact in EVENTS.facts_at(EVENTS["on_fit_start"])]
    parameters = ", ".join(everywhere)
    names = [event.name for event in EVENTS if "H" in event.receivers]
    hook = eval(f"lambda {parameters}: seen.append(({parameters}))", {"seen": (seen := [])})
    trainer = quiet()
    trainer.on(*names)(hook)
    trainer.fit(Net(), batches(1), batches(1))
    at_setup = dict(zip(everywhere, seen[0], strict=True))
    assert (at_setup["trainer"], at_setup["stage"], at_setup["step"], at_setup["lr"]) == (
        trainer,
        "fit",
        0,
        None,
    )
    at_the_end = dict(zip(everywhere, seen[-1], strict=True))
    assert (at_the_end["step"], at_the_end["lr"], at_the_end["status"]) == (1, 0.1, "completed")


def test_a_parameter_with_a_default_that_is_no_fact_keeps_its_default():
    got = []

    def report(scale=3, epoch=None, *, verbose="no", step=-1):
        got.append((scale, epoch, verbose, step))

    told("train_epoch_end", report)
    assert got == [(3, 0, "no", 1)]


def test_a_parameter_with_a_default_that_is_a_fact_gets_the_fact():
    got = []
    told("train_epoch_end", lambda epoch="unset": got.append(epoch))
    assert got == [0]


def test_a_fact_of_another_event_keeps_its_default_too():
    got = []
    told("train_epoch_end", lambda batch="no batch here": got.append(batch))
    assert got == ["no batch here"]


def test_keyword_only_and_positional_only_parameters_are_facts_as_well():
    got = []

    def hook(epoch, /, stage, *, step):
        got.append((epoch, stage, step))

    told("train_epoch_end", hook)
    assert got == [(0, "fit", 1)]


def test_star_args_receives_the_events_documented_facts_in_order():
    got = []
    trainer = told("train_batch_start", lambda *args: got.append(args))
    (batch, batch_idx, dataloader_idx, dataloader_name) = got[0]
    assert isinstance(batch, tuple)
    assert (batch_idx, dataloader_idx) == (0, 0)
    assert dataloader_name == trainer.state.dataloader_name


def test_star_args_holds_what_was_not_asked_for_by_name():
    got = []
    told("train_batch_start", lambda batch, *rest: got.append(len(rest)))
    assert got == [3]


def test_a_default_before_star_args_keeps_its_default():
    got = []

    def hook(flag="kept", *args):
        got.append((flag, len(args)))

    told("train_batch_start", hook)
    assert got == [("kept", 4)]


def test_star_star_kwargs_receives_the_other_cheap_facts():
    got = []

    def hook(loss, **kwargs):
        got.append((loss, kwargs))

    trainer = told("train_batch_end", hook)
    loss, kwargs = got[0]
    cheap = {fact.name for fact in EVENTS.facts_at(EVENTS["on_train_batch_end"]) if not fact.costly}
    assert isinstance(loss, float)
    assert set(kwargs) == cheap
    assert kwargs["trainer"] is trainer


def test_star_star_kwargs_alone_does_not_compute_costly_facts():
    trainer = told("step_end", lambda **kwargs: None)
    assert not trainer.plan.wanted & {"loss", "grad_norm", "ctx", "tokens_seen"}


def test_a_spelling_asked_for_by_name_is_not_passed_again_in_kwargs():
    got = []
    told("train_start", lambda model, **kwargs: got.append("module" in kwargs or "model" in kwargs))
    assert got == [False]


def test_what_a_partial_has_bound_stays_bound():
    got = []

    def hook(prefix, epoch, step, stage="free"):
        got.append((prefix, epoch, step, stage))

    told("train_epoch_end", functools.partial(hook, "by position", step="by keyword"))
    told("train_epoch_end", functools.partial(functools.partial(hook, step=-1), prefix="twice"))
    assert got == [("by position", 0, "by keyword", "fit"), ("twice", 0, -1, "fit")]


def test_what_a_partial_has_bound_stays_bound_in_kwargs_too():
    got = []

    def hook(**kwargs):
        got.append((kwargs["stage"], kwargs["epoch"]))

    told("train_start", functools.partial(hook, stage="mine"))
    assert got == [("mine", 0)]


def test_any_callable_will_do():
    got = []

    class Counter:
        def __call__(self, epoch):
            got.append(("object", epoch))

        def method(self, epoch):
            got.append(("method", epoch))

        @staticmethod
        def static(epoch):
            got.append(("static", epoch))

    trainer = quiet()
    for function in (
        Counter(),
        Counter().method,
        Counter.static,
        functools.wraps(Counter.static)(lambda *a, **k: Counter.static(*a, **k)),
    ):
        trainer.on("train_epoch_end")(function)
    trainer.fit(Net(), batches(1))
    assert got == [("object", 0), ("method", 0), ("static", 0), ("static", 0)]


def test_a_callable_whose_parameters_cannot_be_read_is_refused_with_a_way_out():
    with pytest.raises(ValueError):
        inspect.signature(max)  # or this test shows nothing
    with pytest.raises(HookError, match=r"(?s)max cannot be a hook.*lambda loss: max\(loss\)"):
        quiet().on("train_batch_end")(max)


def test_binding_is_done_once_and_never_per_call():
    trainer = quiet()
    trainer.on("train_batch_end")(lambda loss: None)
    with pytest.MonkeyPatch.context() as patch:
        trainer.on("train_start")(lambda: patch.setattr(inspect, "signature", None))
        trainer.on("train_end")(patch.undo)
        trainer.fit(Net(), batches(3))
    assert trainer.state.step == 3


# ---- what is wrong is refused when it is registered --------------------------------------------------------------


def test_a_parameter_that_is_no_fact_is_refused_with_the_closest_name_and_the_list():
    class Wrong(Hook):
        def on_train_batch_end(self, batch_indx): ...

    with pytest.raises(HookError) as caught:
        quiet(hooks=[Wrong()])
    text = str(caught.value)
    assert "Wrong.on_train_batch_end: on_train_batch_end has no argument 'batch_indx'" in text
    assert "Did you mean 'batch_idx'?" in text
    assert "arguments of on_train_batch_end: outputs, batch, batch_idx" in text
    assert "trainer, module" in text


def test_a_fact_of_another_event_is_refused():
    with pytest.raises(HookError, match="on_train_epoch_start has no argument 'grad_norm'"):
        quiet().on("epoch_start")(lambda grad_norm: None)
    said = r"no argument 'loss'. It is an argument of .*on_step_end; here use metrics\['train/loss'\]"
    with pytest.raises(HookError, match=said):
        quiet().on("train_epoch_end")(lambda loss: None)


def test_a_keyword_only_parameter_without_default_must_be_a_fact_too():
    def hook(*, nonsense): ...

    with pytest.raises(HookError, match="function hook: .* has no argument 'nonsense'"):
        quiet().on("epoch_start")(hook)


def test_a_wrong_parameter_in_the_module_is_found_before_anything_runs():
    class Wrong(Net):
        def on_train_batch_end(self, los): ...

        def setup(self):
            raise AssertionError("the run had begun")

    with pytest.raises(
        HookError,
        match=r"Wrong.on_train_batch_end: on_train_batch_end has no argument 'los'.*Did you mean 'loss'",
    ):
        quiet().fit(Wrong(), batches(1))


# ---- steps and actions: by position ------------------------------------------------------------------------------


@pytest.mark.parametrize("takes", [1, 2, 3, 4])
def test_a_step_gets_as_many_positional_facts_as_it_takes_whatever_it_calls_them(takes):
    got = []
    names = ["x", "i", "where", "called"][:takes]

    class Module(Net):
        def measure(self, *args):
            got.append(args)
            return Net.training_step(self, args[0], 0)

    Module.training_step = eval(f"lambda self, {', '.join(names)}: self.measure({', '.join(names)})")
    trainer = quiet()
    data = batches(2)
    trainer.fit(Module(), data)
    assert got[1] == (data[1], 1, 0, trainer.state.dataloader_name)[:takes]


def test_a_step_with_star_args_gets_the_index_of_the_batch():
    got = []

    class Module(Net):
        def training_step(self, batch, *rest):
            got.append(rest)
            return super().training_step(batch, 0)

    quiet().fit(Module(), batches(1))
    assert got == [(0,)]


def test_keyword_only_parameters_of_a_step_are_asked_for_by_name():
    got = []

    class Module(Net):
        def training_step(self, anything, *, step, trainer, extra="kept"):
            got.append((step, trainer, extra))
            return super().training_step(anything, 0)

    trainer = quiet()
    trainer.fit(Module(), batches(2))
    assert got == [(0, trainer, "kept"), (1, trainer, "kept")]


def test_actions_are_bound_by_position_too():
    got = []

    class Module(Net):
        def backward(self, whatever):
            got.append(whatever.requires_grad)
            whatever.backward()

        def optimizer_zero_grad(self, a, b, c):
            got.append((a, b))
            c.zero_grad()

        def optimizer_step(self, a, b, c, closure):
            got.append((a, b, torch.is_tensor(closure())))
            c.step()

    quiet().fit(Module(), batches(1))
    assert got == [(0, 0), True, (0, 0, True)]


def test_a_step_that_demands_more_than_there_is_is_refused_before_the_run():
    class Wrong(Net):
        def training_step(self, a, b, c, d, optimizers_idx):
            raise AssertionError("called")

    with pytest.raises(
        HookError,
        match=r"Wrong.training_step: training_step has no argument 'optimizers_idx'.*Did you mean 'optimizers'",
    ):
        quiet().fit(Wrong(), batches(1))


def test_a_strategy_stands_around_a_step_and_asks_by_name():
    got = []

    class Around(Strategy):
        def place(self, module):
            return module

        def training_step(self, call, batch_idx):
            got.append(("before", batch_idx))
            value = call()
            got.append("after")
            return value

    quiet(strategy=Around(torch.device("cpu"))).fit(Net(), batches(1))
    assert got == [("before", 0), "after"]


def test_a_step_that_names_another_of_its_facts_in_the_wrong_place_is_refused() -> None:
    class Swapped(Net):
        def training_step(self, batch: Any, dataloader_idx: int) -> Any:
            return super().training_step(batch, 0)

    with pytest.raises(HookError, match=r"so 'dataloader_idx' would be the batch_idx.*`\*, dataloader_idx`"):
        quiet().fit(Swapped(), batches(1))


# ---- overrides that hand their arguments on ----------------------------------------------------------------------


def asking(*built_in: type[Hook]) -> list[Any]:
    """Each event method of these hooks that is called in a fit."""
    return [
        pytest.param(cls, method, id=f"{cls.__name__}.{method}")
        for cls in built_in
        for method in vars(cls)
        if (event := EVENTS.find(method)) and "fit" in event.stages
    ]


@pytest.mark.parametrize(
    ("cls", "method"), asking(ConsoleLog, EarlyStopping, JSONLog, LRMonitor, ModelCheckpoint, Timer)
)
def test_a_subclass_of_a_built_in_hook_may_hand_its_arguments_on(tmp_path, cls, method):
    got: list[int] = []
    source = f"def {method}(self, *args, **kwargs):\n    got.append(1)\n    return super(made[0], self).{method}(*args, **kwargs)\n"
    made: list[Any] = []
    space: dict[str, Any] = {"got": got, "made": made}
    exec(source, space)
    made.append(type("Mine", (cls,), {method: space[method]}))
    hook = made[0](monitor="val/loss") if cls is EarlyStopping else made[0]()
    trainer = quiet(hooks=[hook], run_dir=tmp_path)
    with contextlib.suppress(ZeroDivisionError):
        trainer.fit(Fails() if method == "on_exception" else Net(), batches(2), batches(1))
    assert trainer.status == ("error" if method == "on_exception" else "completed")
    assert got or method in ("on_checkpoint_failed", "on_checkpoint_load", "on_load_checkpoint")


class Fails(Net):
    def on_train_end(self):
        raise ZeroDivisionError


class Asks(Hook):
    """What the overrides below hand their arguments on to."""

    def __init__(self):
        super().__init__()
        self.got = []

    def on_train_epoch_end(self, trainer, pl_module, metrics, note="its default"):
        self.got.append((trainer.status, type(pl_module).__name__, "train/loss" in metrics, note))


def heard(hook):
    trainer = quiet(hooks=[hook])
    trainer.fit(Net(), batches(1))
    assert hook.got == [("training", "Net", True, "its default")]
    return trainer


def test_an_override_that_takes_only_star_arguments_gets_what_the_overridden_method_asks_for():
    class Both(Asks):
        def on_train_epoch_end(self, *args, **kwargs):
            super().on_train_epoch_end(*args, **kwargs)

    class Positions(Asks):
        def on_train_epoch_end(self, *args):
            super().on_train_epoch_end(*args)

    class Names(Asks):
        def on_train_epoch_end(self, **facts):
            super().on_train_epoch_end(**facts)

    class ByClass(Asks):
        def on_train_epoch_end(self, *args, **kwargs):
            Asks.on_train_epoch_end(self, *args, **kwargs)

    for cls in (Both, Positions, Names, ByClass):
        heard(cls())


def test_it_works_over_several_levels_with_arguments_of_their_own():
    class Middle(Asks):
        def on_train_epoch_end(self, *args, factor=2, **kwargs):
            self.factor = factor
            super().on_train_epoch_end(*args, **kwargs)

    class Top(Middle):
        def on_train_epoch_end(self, *args, step, **kwargs):
            self.step = step
            super().on_train_epoch_end(*args, **kwargs)

    class AsksToo(Asks):
        def on_train_epoch_end(self, metrics, *args, **kwargs):
            self.loss = metrics["train/loss"]
            super().on_train_epoch_end(*args, metrics=metrics, **kwargs)

    hook, other = Top(), AsksToo()
    heard(hook)
    assert (hook.factor, hook.step) == (2, 1)
    heard(other)
    assert other.loss > 0


def test_it_works_through_a_mixin_and_past_a_class_that_does_not_have_the_method():
    class Noisy:
        def on_train_epoch_end(self, *args, **kwargs):
            self.noise = True
            super().on_train_epoch_end(*args, **kwargs)

    class Between(Asks): ...

    class Mixed(Noisy, Between): ...

    hook = Mixed()
    heard(hook)
    assert hook.noise


def test_a_costly_fact_that_only_the_overridden_method_asks_for_is_captured():
    got = []

    class Base(Hook):
        def on_step_end(self, grad_norm, loss):
            got.append((grad_norm, loss))

    class Derived(Base):
        def on_step_end(self, *args, **kwargs):
            super().on_step_end(*args, **kwargs)

    trainer = quiet(hooks=[Derived()])
    assert trainer.plan.wanted == {"grad_norm", "loss"}
    trainer.fit(Net(), batches(1))
    assert got[0][0] > 0 and got[0][1] > 0


def test_a_filter_belongs_to_the_method_that_it_is_written_above():
    got = []

    class Base(Hook):
        @every("2 steps")
        def on_step_end(self, step):
            got.append(step)

    class All(Base):
        def on_step_end(self, *args, **kwargs):
            super().on_step_end(*args, **kwargs)

    class Rarer(Base):
        @every("3 steps")
        def on_step_end(self, *args, **kwargs):
            super().on_step_end(*args, **kwargs)

    for cls, steps in ((Base, [2, 4]), (All, [1, 2, 3, 4]), (Rarer, [3])):
        got.clear()
        quiet(hooks=[cls()]).fit(Net(), batches(4))
        assert got == steps


def test_an_override_that_keeps_its_star_arguments_to_itself_gets_the_events_own_facts():
    got = []

    class Keeps(Asks):
        def on_train_epoch_end(self, *args):
            got.append(args)

    class Chooses(Asks):
        def on_train_epoch_end(self, *args, **kwargs):
            got.append((args[0], sorted(kwargs)[:2]))
            super().on_train_epoch_end(kwargs["trainer"], kwargs["module"], args[1])

    trainer = quiet(hooks=[Keeps(), Chooses()])
    trainer.fit(Net(), batches(1))
    assert (got[0][0], got[1]) == (0, (0, ["batch_idx", "batches_seen"]))


def test_a_method_handed_on_to_that_asks_for_no_fact_is_refused():
    class Base(Hook):
        def on_step_end(self, los): ...

    class Derived(Base):
        def on_step_end(self, *args, **kwargs):
            super().on_step_end(*args, **kwargs)

    with pytest.raises(HookError, match=r"on_step_end has no argument 'los'. Did you mean 'loss'"):
        quiet(hooks=[Derived()])


def test_steps_and_actions_of_a_module_may_hand_their_arguments_on():
    got = []

    class Forwards(Net):
        def training_step(self, *args, **kwargs):
            got.append(("train", len(args)))
            return super().training_step(*args, **kwargs)

        def validation_step(self, batch, *args):
            got.append(("val", len(args)))
            return super().validation_step(batch, *args)

        def optimizer_step(self, *args, **kwargs):
            got.append(("update", len(args)))
            return super().optimizer_step(*args, **kwargs)

        def optimizer_zero_grad(self, *args):
            return super().optimizer_zero_grad(*args)

        def configure_gradient_clipping(self, optimizer, *args, **kwargs):
            return super().configure_gradient_clipping(optimizer, *args, **kwargs)

        def transfer_batch_to_device(self, *args, **kwargs):
            return super().transfer_batch_to_device(*args, **kwargs)

        def backward(self, loss, *args, **kwargs):
            return super().backward(loss, *args, **kwargs)

        def on_train_epoch_end(self, *args, **kwargs):
            return super().on_train_epoch_end(*args, **kwargs)

    trainer = quiet(gradient_clip_val=1.0)
    trainer.fit(Forwards(), batches(1), batches(1))
    assert trainer.status == "completed"
    assert got == [("train", 2), ("update", 4), ("val", 1)]


def recording(got):
    """A decorator without functools.wraps."""

    def decorate(function):
        def wrapper(*args, **kwargs):
            got.append((function.__name__, len(args) - 1, sorted(kwargs)))
            return function(*args, **kwargs)

        return wrapper

    return decorate


def test_steps_with_star_args_get_the_loaders_index_only_with_several_loaders():
    got = []

    class Starred(Net):
        def training_step(self, *args):
            got.append(("train", *args[1:]))
            return Net.training_step(self, args[0], 0)

        def validation_step(self, batch, *rest):
            got.append(("val", *rest))

        def predict_step(self, *args):
            got.append(("predict", *args[1:]))

    quiet().fit(Starred(), batches(1), batches(1))
    assert got == [("train", 0), ("val", 0)]
    got.clear()
    two = {"a": batches(1), "b": batches(1)}
    quiet().fit(Starred(), two, two)
    assert got == [("train", 0, 0), ("train", 1, 1), ("val", 0, 0), ("val", 0, 1)]
    got.clear()
    quiet().predict(Starred(), two)
    assert got == [("predict", 0, 0), ("predict", 0, 1)]


def test_a_decorator_without_wraps_changes_no_arguments():
    got = []

    class Decorated(Net):
        @recording(got)
        @recording(got)
        def training_step(self, batch):
            return Net.training_step(self, batch, 0)

        @recording(got)
        def validation_step(self, batch, batch_idx, *, epoch):
            assert epoch == 0

        @recording(got)
        def on_train_epoch_end(self, metrics): ...

    class Watches(Hook):
        @recording(got)
        def on_step_end(self, loss, *, step): ...

    quiet(hooks=Watches()).fit(Decorated(), batches(1), batches(1))
    assert got == [
        ("wrapper", 1, []),
        ("training_step", 1, []),
        ("on_step_end", 1, ["step"]),
        ("validation_step", 2, ["epoch"]),
        ("on_train_epoch_end", 1, []),
    ]


def test_a_decorator_that_adds_arguments_gets_those_of_every_step():
    def with_scale(function):
        def wrapper(self, *args):
            return function(self, 2.0, *args)

        return wrapper

    class Scaled(Net):
        @with_scale
        def training_step(self, scale, batch, batch_idx):
            return scale * Net.training_step(self, batch, batch_idx)

    trainer = quiet()
    trainer.fit(Scaled(), batches(1))
    assert trainer.status == "completed"


@pytest.mark.parametrize("where", ["instance", "class"])
def test_a_step_that_is_none_is_switched_off(where):
    class Off(Net):
        on_train_start = None

    made = Off()
    for step in ("validation_step", "test_step", "train_dataloader", "predict_step"):
        setattr(made if where == "instance" else Off, step, None)
    trainer = quiet(num_sanity_val_steps=1)
    trainer.fit(made, batches(2), batches(2))
    assert trainer.status == "completed"
    assert "val/loss" not in trainer.metrics
    with pytest.raises(OptionError, match=r"There is a test loader, but Off has no test_step"):
        trainer.test(made, batches(1))
    made.training_step = None
    with pytest.raises(OptionError, match=r"Off has no training_step"):
        quiet().fit(made, batches(1))
