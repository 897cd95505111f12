"""Which methods of an object listen, what is refused, and what happens when a listener fails."""

from __future__ import annotations

import functools
import logging
import unittest
from typing import Any

import pytest
import torch
from tiny import Net, batches, quiet

from hookline import (
    SKIP_BATCH,
    DataModule,
    Hook,
    HookError,
    Signal,
    StopTraining,
    Strategy,
    every,
    no_event,
    on,
    once,
    when,
)
from hookline.hooks.model_checkpoint import ModelCheckpoint

# ---- which methods listen ----------------------------------------------------------------------------------------


def test_a_method_that_is_no_event_is_refused_with_the_closest_name_and_where_all_are_listed():
    class Wrong(Hook):
        def on_train_epoch_finish(self): ...

    with pytest.raises(HookError) as caught:
        quiet(hooks=[Wrong()])
    text = str(caught.value)
    assert "Wrong.on_train_epoch_finish is not an event" in text
    assert "Did you mean 'on_train_epoch_" in text
    assert "no_event" in text
    assert "`hookline events`" in text and len(text) < 300


def test_the_module_is_checked_the_same_way_before_the_run():
    class Wrong(Net):
        def on_train_begins(self): ...

    with pytest.raises(
        HookError, match=r"Wrong.on_train_begins is not an event. Did you mean 'on_train_begin'"
    ):
        quiet().fit(Wrong(), batches(1))


def test_a_plain_nn_module_is_never_a_listener():
    class Plain(torch.nn.Linear):
        def on_train_start(self, nonsense):
            raise AssertionError("called")

        def on_click(self):
            raise AssertionError("called")

    trainer = quiet()
    model = Plain(4, 2)
    trainer.fit(
        model,
        batches(1),
        loss=torch.nn.functional.mse_loss,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
    )
    assert trainer.state.step == 1


def test_a_method_marked_as_no_event_is_the_users_own():
    class Own(Hook):
        @no_event
        def on_click(self, button): ...

        @no_event
        def on_train_start(self):
            raise AssertionError("called")

        @staticmethod
        @no_event
        def on_hover(x, y): ...

    class OwnModule(Net):
        @no_event
        def on_policy(self, state_of_the_game): ...

    trainer = quiet(hooks=[Own()])
    trainer.fit(OwnModule(), batches(1))
    assert trainer.status == "completed"


def test_two_spellings_of_one_event_in_one_class_are_refused():
    class Both(Hook):
        def on_epoch_end(self): ...

        def on_train_epoch_end(self): ...

    with pytest.raises(HookError, match="on_epoch_end and on_train_epoch_end.*one event, on_train_epoch_end"):
        quiet(hooks=[Both()])


def test_two_spellings_in_a_module_are_refused():
    class Both(Net):
        def on_batch_begin(self): ...

        def on_batch_start(self): ...

    with pytest.raises(HookError, match="two spellings of one event, on_train_batch_start"):
        quiet().fit(Both(), batches(1))


def test_the_stubs_of_the_base_class_do_not_count_as_a_second_spelling():
    got = []

    class One(Hook):
        def on_epoch_end(self, **kwargs):
            super().on_train_epoch_end(**kwargs)
            got.append("heard")

    quiet(hooks=[One()]).fit(Net(), batches(1))
    assert got == ["heard"]


def test_each_method_runs_once_per_moment_whichever_spelling_it_uses():
    got = []
    trainer = quiet()
    trainer.on("batch_end", "on_train_batch_end")(lambda batch_idx: got.append(batch_idx))
    trainer.fit(Net(), batches(2))
    assert got == [0, 1]


@pytest.mark.parametrize(
    ("base", "method", "receivers", "add"),
    [
        (Hook, "on_validation_model_eval", "module, not for the hooks", lambda it: quiet(hooks=[it])),
        (
            DataModule,
            "on_train_start",
            "not for the data module",
            lambda it: quiet().fit(Net(), batches(1), datamodule=it),
        ),
        (
            Strategy,
            "on_step_end",
            "hooks and module, not for the strategy",
            lambda it: quiet(strategy=it).fit(Net(), batches(1)),
        ),
    ],
    ids=["hook", "data module", "strategy"],
)
def test_an_event_of_another_receiver_is_refused_and_names_its_receivers(base, method, receivers, add):
    wrong = type("Wrong", (base,), {method: lambda self: None, "place": lambda self, module: module})
    with pytest.raises(HookError, match=f"Wrong.{method}: this event is for .*{receivers}"):
        add(wrong(torch.device("cpu")) if base is Strategy else wrong())


def test_inherited_static_class_and_instance_methods_listen():
    got = []

    class Base(Hook):
        def on_train_start(self):
            got.append("inherited")

    class Derived(Base):
        @staticmethod
        def on_train_end(step):
            got.append(("static", step))

        @classmethod
        def on_fit_end(cls, step):
            got.append((cls.__name__, step))

    hook = Derived()
    hook.on_train_epoch_start = lambda epoch: got.append(("instance", epoch))
    quiet(hooks=[hook]).fit(Net(), batches(1))
    assert got == ["inherited", ("instance", 0), ("static", 1), ("Derived", 1)]


def test_an_override_is_called_instead_of_what_it_overrides():
    got = []

    class Base(Hook):
        def on_train_start(self, nonsense):
            raise AssertionError("neither bound nor called")

    class Derived(Base):
        def on_train_start(self, epoch):
            got.append(epoch)

    quiet(hooks=[Derived()]).fit(Net(), batches(1))
    assert got == [0]


def test_any_object_with_event_methods_is_a_hook():
    got = []

    class Duck:
        def on_train_start(self, trainer, pl_module):
            got.append(type(pl_module).__name__)

        @no_event
        def on_click(self, button):
            raise AssertionError("it is no event")

    class Slotted:
        __slots__ = ()

        def on_train_end(self, step):
            got.append(step)

    quiet(hooks=[Duck()]).fit(Net(), batches(1))
    assert got == ["Net"]
    quiet(hooks=[Slotted()]).fit(Net(), batches(1))
    assert got == ["Net", 1]


def test_an_object_that_could_never_be_called_is_refused():
    with pytest.raises(HookError, match="object has no event method"):
        quiet(hooks=[object()])


def test_a_method_of_any_name_listens_if_marked():
    got = []

    class Marked(Hook):
        @on("train_start", "train_end")
        def note(self, step):
            got.append(step)

    quiet(hooks=[Marked()]).fit(Net(), batches(2))
    assert got == [0, 2]


# ---- what would never be called, without a word ------------------------------------------------------------------


class Awaited(Hook):
    async def on_step_end(self, step): ...


class Yields(Hook):
    def on_train_batch_start(self, step):
        yield step


class FilterOnNoEvent(Hook):
    @every("2 steps")
    def step_end(self, step): ...


class FilterOnAnyName(Hook):
    @once
    def report(self, step): ...


class WithoutOn(Hook):
    def train_batch_end(self, loss): ...


class Text(Hook):
    on_step_end = "log"


class Inherits(Text): ...


class NoPredicate(Hook):
    @when
    def on_step_end(self, step): ...


@pytest.mark.parametrize(
    ("hook", "said"),
    [
        (Awaited, r"Awaited.on_step_end is `async def`.*Write `def`"),
        (on("step_end")(Awaited.on_step_end), r"function on_step_end is `async def`"),
        (Yields, r"Yields.on_train_batch_start contains `yield`"),
        (
            FilterOnNoEvent,
            r"FilterOnNoEvent.step_end has a filter but is not an event.* Did you mean 'on_step_end'\?.*@hookline.no_event",
        ),
        (FilterOnAnyName, r"FilterOnAnyName.report has a filter but is not an event"),
        (
            WithoutOn,
            r"WithoutOn.train_batch_end would never be called. Did you mean 'on_train_batch_end'\?.*@hookline.no_event",
        ),
        (
            Text,
            r"Text.on_step_end is 'log', which cannot be called. Write a method, `def on_step_end\(self\)",
        ),
        (Inherits, r"Inherits.on_step_end is 'log'"),
        (NoPredicate, r"`@when` above on_step_end has no predicate"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_what_is_meant_as_a_listener_and_would_never_be_called_is_refused(hook, said):
    with pytest.raises(HookError, match=said):
        quiet(hooks=[hook])


def test_async_and_a_filter_on_no_event_are_refused_in_a_module_too():
    class AwaitedNet(Net):
        async def on_train_start(self): ...

    class Filtered(Net):
        @every(2)
        def train_epoch_end(self): ...

    with pytest.raises(HookError, match="AwaitedNet.on_train_start is `async def`"):
        quiet().fit(AwaitedNet(), batches(1))
    with pytest.raises(HookError, match="Did you mean 'on_train_epoch_end'"):
        quiet().fit(Filtered(), batches(1))


class Helpers(Hook):
    """Methods and values of one's own that only look like events."""

    on_epoch_end = True
    on_train_end = None
    on_gpu = "cuda"

    def on_train_start(self, epoch, path="here"):
        self.epoch_start(epoch)
        getattr(self, "fit_start")()
        self.save_checkpoint(path)

    def epoch_start(self, epoch): ...

    def fit_start(self): ...

    def save_checkpoint(self, path): ...

    def exception(self): ...

    def test_end(self, folder): ...

    def train_end(self): ...

    on_fit_end = train_end

    @no_event
    def train_batch_end(self, loss): ...

    @no_event
    @every("2 steps")
    def step_end(self, step): ...


def test_helpers_of_ones_own_are_left_alone():
    class Template(Hook):
        def on_train_epoch_end(self, epoch):
            self.train_epoch_end(epoch)

    class Filled(Template):
        def train_epoch_end(self, epoch):
            self.seen = epoch

    class Called(Net):
        def epoch_end(self, epoch): ...

    class Overridden(Text):
        def on_step_end(self): ...

    filled = Filled()
    trainer = quiet(hooks=[Helpers(), filled, Overridden()])
    trainer.fit(Called(), batches(1))
    assert (trainer.status, filled.seen) == ("completed", 0)


def test_a_loader_may_be_written_with_yield_because_what_it_returns_is_used():
    class Brings(Net):
        def train_dataloader(self):
            yield from batches(2)

    trainer = quiet()
    trainer.fit(Brings())
    assert trainer.state.step == 2


# ---- names that are nearly right ---------------------------------------------------------------------------------


class Duck:
    def on_step_end(self, step): ...

    def on_step_edn(self, step): ...


class CamelCase(Hook):
    def onStepEnd(self, loss):  # noqa: N802
        ...


class Capital(Hook):
    def On_step_end(self, loss):  # noqa: N802
        ...


class Swapped(Hook):
    def no_step_end(self, loss): ...


class SetUp(Hook):
    def set_up(self, stage): ...


class TearDown(Hook):
    def tearDown(self):  # noqa: N802
        ...


class Loads(Hook):
    def state_dict(self):
        return {}

    def load_statedict(self, state): ...


class Keeps(Hook):
    def state_dct(self):
        return {}


class DuckKeeps:
    def on_step_end(self): ...

    def load_state_dcit(self, state): ...


class Built(ModelCheckpoint):
    def load_state_dcit(self, state): ...


class Property(Hook):
    @property
    def on_step_end(self):
        return lambda: None


class Cached(Hook):
    @functools.cached_property
    def on_step_end(self):
        return lambda: None


class SlotOfValue:
    __slots__ = ("on_step_end",)

    def __init__(self):
        self.on_step_end = 3

    def on_train_end(self): ...


@pytest.mark.parametrize(
    ("hook", "said"),
    [
        (Duck, r"Duck.on_step_edn is not an event. Did you mean 'on_step_end'\?"),
        (
            CamelCase,
            r"CamelCase.onStepEnd would never be called. Did you mean 'on_step_end'\? Mark it with @hookline.no_event",
        ),
        (Capital, r"Capital.On_step_end would never be called. Did you mean 'on_step_end'\?"),
        (Swapped, r"Swapped.no_step_end would never be called. Did you mean 'on_step_end'\?"),
        (SetUp, r"Did you mean 'setup'\?"),
        (TearDown, r"Did you mean 'teardown'\?"),
        (Loads, r"Loads.load_statedict would never be called. Did you mean 'load_state_dict'\?"),
        (Keeps, r"Keeps.state_dct would never be called. Did you mean 'state_dict'\?"),
        (DuckKeeps, r"DuckKeeps.load_state_dcit would never be called. Did you mean 'load_state_dict'\?"),
        (Built, r"Built.load_state_dcit would never be called. Did you mean 'load_state_dict'\?"),
        (Property, r"Property.on_step_end is a property\. .*Make it a method: remove the decorator"),
        (Cached, r"Cached.on_step_end is a property"),
        (SlotOfValue, r"SlotOfValue.on_step_end is 3, which cannot be called"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_name_that_is_nearly_right_or_no_method_is_refused_when_the_hook_is_added(hook, said):
    with pytest.raises(HookError, match=said):
        quiet(hooks=[hook()])


@pytest.mark.parametrize("make", [Loads, Duck], ids=["hook", "plain object"])
@pytest.mark.parametrize(
    ("value", "shown"), [(3, "3"), ("log", "'log'"), ([print], "list")], ids=["number", "text", "list"]
)
def test_a_value_in_the_place_of_an_event_method_of_an_instance_is_refused(make, value, shown):
    hook = make()
    hook.on_train_end = value
    with pytest.raises(
        HookError, match=rf"{make.__name__}.on_train_end is {shown}.*cannot be called.*def on_train_end"
    ):
        quiet(hooks=[hook])


def test_functions_put_on_an_instance_listen_under_every_event_name():
    got = []

    class Bare(Hook):
        def on_train_start(self):
            got.append("of the class")

    hook = Bare()
    hook.setup = lambda stage: got.append(stage)
    hook.on_train_start = lambda epoch: got.append(("instead", epoch))
    hook.on_train_end = functools.partial(lambda mark, step: got.append((mark, step)), "partial")
    hook.teardown = lambda: got.append("teardown")
    quiet(hooks=[hook]).fit(Net(), batches(1))
    assert got == ["fit", ("instead", 0), ("partial", 1), "teardown"]


def test_none_on_an_instance_switches_a_method_off():
    class Raises(Hook):
        def on_train_start(self):
            raise AssertionError("switched off")

    hook = Raises()
    hook.on_train_start = None
    trainer = quiet(hooks=[hook])
    trainer.fit(Net(), batches(1))
    assert trainer.status == "completed"


def test_a_misspelled_function_on_an_instance_is_refused():
    class Bare(Hook): ...

    hook = Bare()
    hook.onStepEnd = lambda loss: None
    with pytest.raises(HookError, match="Bare.onStepEnd would never be called. Did you mean 'on_step_end'"):
        quiet(hooks=[hook])


def test_partial_methods_and_slots_listen():
    got = []

    class Partial(Hook):
        def note(self, mark, step):
            got.append((mark, step))

        on_train_end = functools.partialmethod(note, "end")

    class Slotted:
        __slots__ = ("on_train_start",)

        def __init__(self):
            self.on_train_start = lambda step: got.append(step)

    quiet(hooks=[Partial(), Slotted()]).fit(Net(), batches(1))
    assert got == [0, ("end", 1)]


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        ("val_dataloder", "val_dataloader"),
        ("validation_setp", "validation_step"),
        ("training_stpe", "training_step"),
        ("configure_optimzers", "configure_optimizers"),
        ("configure_optimisers", "configure_optimizers"),
        ("predict_setp", "predict_step"),
        ("val_data_loader", "val_dataloader"),
        ("validationStep", "validation_step"),
        ("load_statedict", "load_state_dict"),
        ("setUp", "setup"),
        ("optimzer_step", "optimizer_step"),
        ("transfer_batch_to_devcie", "transfer_batch_to_device"),
        ("validaton_setp", "validation_step"),
    ],
)
def test_a_step_or_loader_of_a_module_that_is_nearly_right_is_refused_before_the_run(wrong, right):
    class Right(Net): ...

    wrong_net = type("Wrong", (Right,), {wrong: lambda self, *args: None})
    with pytest.raises(HookError, match=f"Wrong.{wrong} would never be called. Did you mean '{right}'"):
        quiet().fit(wrong_net(), batches(1))


def test_a_data_module_is_checked_the_same_way():
    class Wrong(DataModule):
        def train_dataloader(self):
            return batches(1)

        def val_dataloder(self):
            return batches(1)

    with pytest.raises(
        HookError, match="Wrong.val_dataloder would never be called. Did you mean 'val_dataloader'"
    ):
        quiet().fit(Net(), datamodule=Wrong())


@pytest.mark.parametrize(
    "put",
    [
        lambda cls: setattr(cls, "val_dataloader", property(lambda self: batches(1))),
        lambda cls: setattr(cls, "val_dataloader", batches(1)),
    ],
    ids=["property", "value"],
)
def test_a_loader_that_is_no_method_is_refused(put):
    class Wrong(Net): ...

    put(Wrong)
    with pytest.raises(HookError, match="Wrong.val_dataloader is (a property|list)"):
        quiet().fit(Wrong(), batches(1))


def test_a_loader_put_on_the_instance_is_refused_and_a_function_is_used():
    net = Net()
    net.train_dataloader = batches(1)
    with pytest.raises(
        HookError, match=r"Net.train_dataloader is list .*which cannot be called. Write a method"
    ):
        quiet().fit(net)
    net.train_dataloader = lambda: batches(3)
    net.validation_step = lambda batch: net.layer.weight.sum()
    trainer = quiet()
    trainer.fit(net, val=batches(1))
    assert trainer.state.step == 3
    assert "val/loss" in trainer.metrics


HELPERS = [
    "validation_steps",
    "test_steps",
    "training_stop",
    "text_step",
    "best_step",
    "rest_step",
    "train_step",
    "val_step",
    "eval_step",
    "setup_model",
    "setups",
    "load_state",
    "load_states",
    "state_dicts",
    "stats_dict",
    "stat_dict",
    "states_dict",
    "eval_dataloader",
    "train_loader",
    "val_loader",
    "val_dataloaders",
    "prepared_data",
    "prepare_batch",
    "configure",
    "configure_optimizer",
    "configure_loss",
    "configured_optimizers",
    "validate",
    "validation",
    "validation_loss",
    "validate_step",
    "step",
    "train",
    "reset",
    "tear",
    "shutdown",
    "start",
    "stop",
    "backwards",
    "forward_step",
    "optimizers_step",
    "scheduler_step",
    "predict",
    "predictions",
    "predicted_step",
    "onset",
    "one_step",
    "on",
    "once",
    "_on_step_end",
    "_setup",
    "_load_statedict",
    "save_state_dict",
    "get_state_dict",
    "test_setup",
    "model_setup",
]


@pytest.mark.parametrize("name", HELPERS)
def test_helpers_with_similar_names_are_left_alone(name):
    def helper(self, *args):
        return None

    hook = type("Mine", (Hook,), {name: helper})()
    plain = type("Plain", (), {name: helper, "on_step_end": lambda self: None})()
    module = type("MyNet", (Net,), {name: helper})() if not hasattr(torch.nn.Module, name) else Net()
    data = type("MyData", (DataModule,), {name: helper, "train_dataloader": lambda self: batches(1)})()
    trainer = quiet(hooks=[hook, plain])
    trainer.fit(module, datamodule=data)
    assert trainer.status == "completed"


def test_a_similar_name_is_a_helper_if_its_class_uses_it_has_the_right_one_too_or_it_takes_other_things():
    class Uses(Hook):
        def on_train_start(self):
            self.set_up()

        def set_up(self): ...

    class HasBoth(Hook):
        def on_step_end(self): ...

        def onStepEnd(self):  # noqa: N802
            ...

    class TakesOthers(Hook):
        def set_up(self, camera, tripod): ...

        def load_statedict(self, path, device): ...

    class Beside(Net):
        def train_dataloader(self):
            return batches(1)

        def train_data_loader(self, batch_size): ...

    trainer = quiet(hooks=[Uses(), HasBoth(), TakesOthers()])
    trainer.fit(Beside())
    assert trainer.status == "completed"


def test_an_override_that_is_misspelled_is_refused_although_its_base_has_the_right_name():
    class Base(Hook):
        def state_dict(self):
            return {}

        def load_state_dict(self, state): ...

    class Derived(Base):
        def load_statedict(self, state): ...

    with pytest.raises(HookError, match="Derived.load_statedict would never be called"):
        quiet(hooks=[Derived()])


def test_what_a_library_calls_its_methods_is_no_mistake():
    class Case(unittest.TestCase):  # setUp, tearDown, and more that is not ours
        def on_step_end(self): ...

    class Handler(Hook, unittest.TestCase): ...

    trainer = quiet(hooks=[Case(), Handler()])
    trainer.fit(Net(), batches(1))
    assert trainer.status == "completed"


# ---- a failing listener ------------------------------------------------------------------------------------------


class Failing(Hook):
    def __init__(self, on_error="raise"):
        super().__init__()
        self.on_error = on_error
        self.calls = 0

    def on_train_batch_start(self):
        self.calls += 1
        raise ZeroDivisionError("on purpose")


def test_by_default_a_failure_ends_the_run_and_names_the_hook_the_event_and_the_place():
    with pytest.raises(ZeroDivisionError) as caught:
        quiet(hooks=[Failing()]).fit(Net(), batches(2))
    note = caught.value.__notes__[0]
    assert "hook 'failing' in on_train_batch_start" in note
    assert "test_listener.py:" in note
    assert "epoch 0, batch 0, step 0" in note


def test_a_failing_module_is_named_as_well():
    class Wrong(Net):
        def on_train_end(self):
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError) as caught:
        quiet().fit(Wrong(), batches(1))
    assert "raised by module Wrong in on_train_end" in caught.value.__notes__[0]


def test_warn_reports_every_time_and_continues(caplog):
    hook = Failing("warn")
    trainer = quiet(hooks=[hook])
    trainer.fit(Net(), batches(3))
    assert (trainer.status, trainer.state.step, hook.calls) == ("completed", 3, 3)
    assert len(caplog.records) == 3
    assert "hook 'failing' failed in on_train_batch_start" in caplog.records[0].getMessage()
    assert caplog.records[0].exc_info[0] is ZeroDivisionError


def test_disable_reports_once_with_traceback_and_switches_the_hook_off(caplog):
    hook = Failing("disable")
    trainer = quiet(hooks=[hook])
    trainer.fit(Net(), batches(3))
    assert (trainer.status, trainer.state.step, hook.calls) == ("completed", 3, 1)
    assert [record.exc_info[0] for record in caplog.records] == [ZeroDivisionError]
    assert "failing" not in trainer.hooks.list_hooks()
    assert hook in trainer.hooks


def test_a_hook_that_was_switched_off_still_gets_its_teardown():
    got = []

    class Tidy(Failing):
        def teardown(self):
            got.append("teardown")

    quiet(hooks=[Tidy("disable")]).fit(Net(), batches(2))
    assert got == ["teardown"]


def test_everyone_else_is_called_after_a_forgiven_failure():
    got = []
    trainer = quiet(hooks=[Failing("warn")])
    trainer.on("train_batch_start")(lambda batch_idx: got.append(batch_idx))
    logging.disable(logging.CRITICAL)
    try:
        trainer.fit(Net(), batches(2))
    finally:
        logging.disable(logging.NOTSET)
    assert got == [0, 1]


@pytest.mark.parametrize("on_error", ["warn", "disable"])
def test_a_hook_that_failed_counts_as_having_returned_nothing(on_error):
    class Decides(Failing):
        def on_before_backward(self, loss):
            raise RuntimeError("no replacement")

    trainer = quiet(hooks=[Decides(on_error)])
    trainer.fit(Net(), batches(2))
    assert trainer.state.step == 2


@pytest.mark.parametrize("on_error", ["warn", "disable"])
def test_control_signals_pass_through_every_error_policy(on_error):
    class Decides(Hook):
        def on_train_batch_start(self, batch_idx):
            if batch_idx == 1:
                return SKIP_BATCH
            if batch_idx == 2:
                raise StopTraining("enough")
            return None

    hook = Decides()
    hook.on_error = on_error
    trainer = quiet(hooks=[hook])
    trainer.fit(Net(), batches(5))
    assert (trainer.status, trainer.state.batches_seen) == ("stopped", 2)
    assert trainer.hooks.list_hooks() == ["decides"]


@pytest.mark.parametrize("on_error", ["warn", "disable"])
def test_ctrl_c_is_never_forgiven(on_error):
    class Interrupted(Hook):
        def on_train_start(self):
            raise KeyboardInterrupt

    hook = Interrupted()
    hook.on_error = on_error
    trainer = quiet(hooks=[hook])
    with pytest.raises(KeyboardInterrupt):
        trainer.fit(Net(), batches(1))
    assert trainer.status == "interrupted"


def test_a_failing_predicate_fails_as_its_hook_was_told_to():
    class Picky(Hook):
        on_error = "warn"

        @when(lambda step: 1 / 0)
        def on_train_batch_end(self): ...

    trainer = quiet(hooks=[Picky()])
    trainer.fit(Net(), batches(2))
    assert trainer.status == "completed"


def steering(function):
    handle = quiet().on("train_batch_start", name="f")(function)
    (listener,) = handle.entry.listeners
    return listener.steers


class Called:
    def __call__(self, step) -> Signal | None:
        return None


def test_a_return_annotation_says_whether_a_function_steers():
    def steers(step) -> Signal | None:
        return None

    def as_text(step) -> Signal | None:
        return None

    def watches(step) -> None: ...

    def watches_as_text(step) -> None: ...

    @functools.wraps(steers)
    def wrapped(*args, **kwargs):
        return steers(*args, **kwargs)

    assert [steering(each) for each in (steers, as_text, wrapped, functools.partial(steers), Called())] == [
        True
    ] * 5
    assert [steering(each) for each in (watches, watches_as_text, functools.partial(watches))] == [False] * 3
    assert not steering(lambda step: SKIP_BATCH)  # it has no annotation, and its code is not read


@pytest.mark.parametrize(
    ("declared", "known"),
    [
        (True, (True, True)),
        (False, (False, False)),
        ({"train_batch_start"}, (True, False)),
        (["on_batch_begin"], (True, False)),
        (("on_before_optimizer_step",), (False, True)),
    ],
    ids=str,
)
def test_a_hook_declares_at_which_events_it_steers(declared, known):
    class Decides(Hook):
        steers = declared

        def on_train_batch_start(self):
            return SKIP_BATCH

        def on_before_optimizer_step(self): ...

        def on_train_batch_end(self): ...

    plan = quiet(hooks=[Decides()]).plan
    assert (
        tuple(plan.listeners(each)[0].steers for each in ("on_train_batch_start", "on_before_optimizer_step"))
        == known
    )


@pytest.mark.parametrize("declared", ["train_batch_start", 3, {"step_end"}, None], ids=str)
def test_a_wrong_declaration_is_refused_at_registration(declared):
    class Decides(Hook):
        steers = declared

    with pytest.raises(
        HookError,
        match="steers=.*allowed: True, False or a set of on_train_batch_start, on_before_optimizer_step",
    ):
        quiet(hooks=[Decides()])


def test_an_attribute_of_a_plain_object_that_is_called_steers_is_its_own():
    class Rudder:
        steers = "the ship"

        def on_train_batch_start(self): ...

    quiet(hooks=[Rudder()]).fit(Net(), batches(1))


def test_one_process_needs_no_declaration():
    trainer = quiet()
    trainer.on("train_batch_start")(lambda batch_idx: SKIP_BATCH if batch_idx == 1 else None)
    trainer.fit(Net(), batches(3))
    assert trainer.global_step == 2


def test_hooks_of_a_module_that_lightning_1_had_are_refused_unless_the_module_calls_them() -> None:
    class Old(Net):
        def validation_epoch_end(self, outputs: Any) -> None: ...

    with pytest.raises(HookError, match="would never be called. Did you mean 'on_validation_epoch_end'"):
        quiet().fit(Old(), batches(), batches())

    class Parts(Net):
        def training_step_end(self, outputs: Any) -> Any: ...

    with pytest.raises(HookError, match="would never be called. Did you mean 'on_train_batch_end'"):
        quiet().fit(Parts(), batches())

    class Own(Net):
        called = 0

        def on_train_epoch_end(self) -> None:
            self.training_epoch_end([])

        def training_epoch_end(self, outputs: Any) -> None:
            self.called += 1

    net = Own()
    quiet().fit(net, batches())
    assert net.called == 1


def test_hooks_of_lightning_1_are_refused_in_code_without_source_text() -> None:
    space: dict[str, Any] = {"Net": Net}
    exec("class Old(Net):\n    def training_epoch_end(self, outputs): ...\n", space)
    with pytest.raises(HookError, match="training_epoch_end would never be called"):
        quiet().fit(space["Old"](), batches())
    own = "    def on_train_epoch_end(self): self.training_epoch_end([])"
    exec(f"class Own(Net):\n    def training_epoch_end(self, outputs): ...\n{own}", space)
    quiet().fit(space["Own"](), batches())
