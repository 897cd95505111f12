"""How an event is delivered: in which order, what a returned value does, how a run is stopped, what is computed at all."""

from __future__ import annotations

import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import Net, batches, quiet

from hookline import END_EPOCH, SKIP_BATCH, SKIP_STEP, STEP_DONE, DataModule, Hook, StopTraining, Strategy
from hookline.engine.hook import TIERS
from hookline.engine.plan import noop

# ---- order -------------------------------------------------------------------------------------------------------


def named(name, got, event="on_train_epoch_end", **settings):
    """A hook that notes its name at one event."""
    cls = type(name.title(), (Hook,), {event: lambda self: got.append(name), **settings})
    return cls(name)


def noting(got, event="on_train_epoch_end"):
    """A module that notes itself at one event."""
    return type("Noting", (Net,), {event: lambda self: got.append("module")})()


def test_hooks_then_module_then_strategy():
    got = []

    class Last(Strategy):
        def place(self, module):
            return module

        def on_train_start(self):
            got.append("strategy")

    trainer = quiet(hooks=[named("hook", got, "on_train_start")], strategy=Last(torch.device("cpu")))
    trainer.fit(noting(got, "on_train_start"), batches(1))
    assert got == ["hook", "module", "strategy"]


def test_a_hook_that_has_only_a_teardown_is_torn_down():
    got = []
    hooks = [named("both", got, "setup", teardown=lambda self: got.append("both down"))]
    hooks.append(named("only", got, "teardown"))
    quiet(hooks=hooks).fit(Net(), batches(1))
    assert got == ["both", "both down", "only"]


def test_the_data_module_comes_first_at_setup_and_teardown():
    got = []

    class Data(DataModule):
        def setup(self, stage):
            got.append("data")

        def train_dataloader(self):
            return batches(1)

    quiet(hooks=[named("hook", got, "setup")]).fit(noting(got, "setup"), datamodule=Data())
    assert got == ["data", "hook", "module"]


def test_user_hooks_by_registration_then_built_ins_then_monitors():
    got = []
    trainer = quiet(
        hooks=[
            named("monitor", got, "on_train_start", tier="monitor"),
            named("builtin", got, "on_train_start", tier="builtin"),
            named("first", got, "on_train_start"),
            named("second", got, "on_train_start"),
        ]
    )
    trainer.fit(Net(), batches(1))
    assert got == ["first", "second", "builtin", "monitor"]


def test_a_user_hook_registered_late_still_runs_before_built_ins():
    got = []
    trainer = quiet(max_epochs=2, hooks=[named("builtin", got, tier="builtin")])
    trainer.on("train_epoch_start", once=True)(lambda: trainer.add_hook(named("late", got)))
    trainer.fit(Net(), batches(1))
    assert got == ["late", "builtin"] * 2


def test_an_explicit_order_beats_tier_and_registration():
    got = []
    trainer = quiet(
        hooks=[
            named("user", got),
            named("early monitor", got, tier="monitor", order=-1, after_module=False),
            named("late user", got, order=150),
            named("builtin", got, tier="builtin"),
            named("tie", got, order=0),
        ]
    )
    trainer.fit(Net(), batches(1))
    assert got == ["early monitor", "user", "tie", "builtin", "late user"]


def test_monitors_hear_the_end_of_an_epoch_after_the_module_and_nothing_else_so():
    got = []
    hooks = [named("monitor", got, tier="monitor"), named("plain", got)]
    quiet(hooks=hooks).fit(noting(got), batches(1))
    assert got == ["plain", "module", "monitor"]
    got.clear()
    quiet(hooks=[named("monitor", got, "on_train_end", tier="monitor")]).fit(
        noting(got, "on_train_end"), batches(1)
    )
    assert got == ["monitor", "module"]


@pytest.mark.parametrize(
    "asked",
    [True, {"on_train_epoch_end"}, ["epoch_end"], {"on_epoch_end", "on_step_end"}],
    ids=["all", "one", "in a list", "two"],
)
def test_a_hook_can_ask_to_run_after_the_module(asked):
    got = []
    quiet(hooks=[named("after", got, after_module=asked), named("before", got)]).fit(noting(got), batches(1))
    assert got == ["before", "module", "after"]


def test_after_module_for_other_events_changes_nothing_here():
    got = []
    quiet(hooks=[named("hook", got, after_module={"on_step_end"})]).fit(noting(got), batches(1))
    assert got == ["hook", "module"]


def test_after_the_module_is_still_before_the_strategy():
    got = []

    class Last(Strategy):
        def place(self, module):
            return module

        def on_train_start(self):
            got.append("strategy")

    hook = named("hook", got, "on_train_start", after_module=True)
    quiet(hooks=[hook], strategy=Last(torch.device("cpu"))).fit(noting(got, "on_train_start"), batches(1))
    assert got == ["module", "hook", "strategy"]


@settings(max_examples=20, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(sorted(TIERS)), st.none() | st.integers(-3, 203), st.none() | st.booleans()
        ),
        min_size=1,
        max_size=8,
    )
)
def test_any_mix_of_tiers_orders_and_after_module_is_delivered_as_documented(hooks):
    got = []
    trainer = quiet()
    for index, (tier, order, after) in enumerate(hooks):
        trainer.add_hook(named(str(index), got, tier=tier, order=order, after_module=after))
    trainer.fit(noting(got), batches(1))

    before, after = [], []
    for index, (tier, order, asked) in enumerate(hooks):
        waits = asked if asked is not None else tier == "monitor"
        (after if waits else before).append((order if order is not None else TIERS[tier], index))
    assert got == [str(index) for _, index in sorted(before)] + ["module"] + [
        str(index) for _, index in sorted(after)
    ]


# ---- signals -----------------------------------------------------------------------------------------------------


def run_with(*functions, event="train_batch_start", data=4, **options):
    """Fit with function hooks, noting the batches that came to their end and the steps that were skipped."""
    trainer = quiet(**options)
    trainer.ended, trainer.skipped = [], []
    for function in functions:
        trainer.on(event)(function)
    trainer.on("train_batch_end")(lambda batch_idx: trainer.ended.append(batch_idx))
    trainer.on("step_skipped")(lambda reason: trainer.skipped.append(reason))
    trainer.fit(Net(), batches(data))
    return trainer


def test_skip_batch_leaves_one_batch_out():
    trainer = run_with(lambda batch_idx: SKIP_BATCH if batch_idx == 1 else None)
    assert (trainer.ended, trainer.state.step, trainer.skipped) == ([0, 2, 3], 3, [])


@pytest.mark.parametrize("signal", [END_EPOCH, -1], ids=repr)
def test_end_epoch_ends_this_epoch_only_and_its_validation_and_end_events_still_run(signal):
    got = []
    trainer = quiet(max_epochs=2)
    trainer.on("train_batch_start")(
        lambda batch_idx, epoch: signal if batch_idx == 2 and epoch == 0 else None
    )
    trainer.on("train_batch_end")(lambda batch_idx: got.append(batch_idx))
    trainer.on("validation_end")(lambda: got.append("validated"))
    trainer.on("train_epoch_end")(lambda: got.append("epoch end"))
    trainer.fit(Net(), batches(3), batches(1))
    assert got == [0, 1, "validated", "epoch end", 0, 1, 2, "validated", "epoch end"]


@pytest.mark.parametrize("order", [(SKIP_BATCH, END_EPOCH), (END_EPOCH, SKIP_BATCH)], ids=str)
def test_everyone_is_called_and_end_epoch_beats_skip_batch(order):
    asked = []

    def decide(signal):
        return lambda batch_idx: asked.append(signal) or (signal if batch_idx == 1 else None)

    trainer = run_with(*map(decide, order))
    assert trainer.ended == [0]
    assert asked == [*order, *order]


def test_the_module_can_send_signals_too():
    class Decides(Net):
        def on_train_batch_start(self, batch_idx):
            return -1 if batch_idx == 2 else None

    trainer = quiet()
    trainer.fit(Decides(), batches(4))
    assert trainer.state.batches_seen == 2


def test_skip_step_leaves_the_update_out_and_says_so():
    weights = []
    trainer = quiet()
    trainer.on("before_optimizer_step", once=True)(lambda: SKIP_STEP)
    trainer.on("step_skipped")(lambda reason: weights.append(reason))
    trainer.on("train_batch_end")(
        lambda module, step: weights.append((step, module.layer.weight.detach().clone()))
    )
    module = Net()
    before = module.layer.weight.detach().clone()
    trainer.fit(module, batches(2))
    reason, (first_step, first), (second_step, second) = weights
    assert (reason, first_step, second_step) == ("hook", 0, 1)
    assert torch.equal(first, before)
    assert not torch.equal(second, before)


def test_step_done_means_the_hook_made_the_update_and_it_counts():
    got = []
    module = Net()
    before = module.layer.weight.detach().clone()

    def own_update(optimizer, module):
        with torch.no_grad():
            module.layer.weight += 1.0
        return STEP_DONE

    trainer = quiet()
    trainer.on("before_optimizer_step")(own_update)
    trainer.on("after_optimizer_step")(lambda step: got.append(("after", step)))
    trainer.on("step_skipped")(lambda: got.append("skipped"))
    trainer.fit(module, batches(2))
    assert got == [("after", 1), ("after", 2)]
    assert torch.equal(module.layer.weight, before + 1.0 + 1.0)


def test_step_done_beats_skip_step():
    trainer = run_with(lambda: SKIP_STEP, lambda: STEP_DONE, event="before_optimizer_step", data=1)
    assert (trainer.state.step, trainer.skipped) == (1, [])


# ---- stopping ----------------------------------------------------------------------------------------------------


def raising(error):
    def hook():
        raise error

    return hook


@pytest.mark.parametrize(
    "event",
    [
        "on_before_batch_transfer",
        "on_after_batch_transfer",
        "on_train_batch_start",
        "on_before_zero_grad",
        "on_before_backward",
        "on_after_backward",
        "on_before_optimizer_step",
        "on_gradient_clip",
        "on_after_optimizer_step",
        "on_train_metrics",
        "on_train_batch_end",
        "on_step_end",
        "on_validation_batch_end",
        "on_validation_end",
    ],
)
def test_stop_training_from_any_hook_lets_everyone_hear_and_the_batch_finish(event):
    got = []
    trainer = quiet(gradient_clip_val=1.0, log_every_n_steps=1, val_check_interval=1)
    trainer.on(event)(raising(StopTraining("enough")))
    trainer.on(event)(lambda: got.append("the next listener"))
    trainer.on("step_end")(lambda step: got.append(step))
    trainer.on("train_end")(lambda status: got.append(status))
    trainer.fit(Net(), batches(4), batches(1))
    assert "the next listener" in got
    assert [each for each in got if each != "the next listener"] == [1, "stopped"]
    assert trainer.state.stop_reason == "enough"


@pytest.mark.parametrize("event", ["setup", "on_fit_start", "on_train_start", "on_train_epoch_start"])
def test_stop_training_before_the_first_batch_ends_the_run_as_stopped(event):
    trainer = quiet()
    trainer.on(event)(raising(StopTraining("enough")))
    trainer.fit(Net(), batches(4))
    assert trainer.status == "stopped"
    assert trainer.state.batches_seen <= 1


def test_stop_training_at_an_epochs_end_is_honoured_before_the_next_epoch():
    trainer = quiet(max_epochs=3)
    trainer.on("train_epoch_end")(raising(StopTraining("enough")))
    trainer.fit(Net(), batches(2))
    assert (trainer.status, trainer.state.epochs_seen) == ("stopped", 1)


@pytest.mark.parametrize("step", ["training_step", "validation_step"])
def test_stop_training_from_a_step_of_the_module_stops_the_run(step):
    def stop(self, batch, batch_idx):
        raise StopTraining("from the step")

    trainer = quiet(max_epochs=3)
    trainer.fit(type("Stopping", (Net,), {step: stop})(), batches(2), batches(1))
    assert (trainer.status, trainer.state.stop_reason) == ("stopped", "from the step")


def test_a_stop_without_a_reason_is_a_stop():
    trainer = run_with(raising(StopTraining("")))
    assert (trainer.status, trainer.ended) == ("stopped", [0])


def test_the_first_reason_to_stop_is_kept():
    trainer = run_with(raising(StopTraining("first")), raising(StopTraining("second")))
    assert trainer.state.stop_reason == "first"


def test_a_signal_and_a_stop_at_once_are_both_honoured():
    trainer = run_with(raising(StopTraining("enough")), lambda: SKIP_BATCH)
    assert (trainer.status, trainer.ended) == ("stopped", [])


def test_stop_iteration_from_a_hook_is_an_error_like_any_other():
    with pytest.raises(StopIteration):
        run_with(raising(StopIteration("a mistake")))


# ---- replacements ------------------------------------------------------------------------------------------------


def test_replacements_of_the_loss_chain_and_reach_the_module():
    got = []

    class Scaling(Net):
        def on_before_backward(self, loss):
            got.append(loss.item())
            return loss * 3

    trainer = quiet()
    trainer.on("before_backward")(lambda loss: got.append(loss.item()) or loss * 2)
    trainer.on("before_backward")(lambda loss: got.append(loss.item()))
    trainer.on("train_batch_end")(lambda loss: got.append(loss))
    trainer.fit(Scaling(), batches(1))
    first = got[0]
    assert got == pytest.approx([first, first * 2, first * 2, first * 6])


def test_a_replaced_loss_is_the_one_that_is_differentiated():
    got = []
    for factor in (1, 2):
        torch.manual_seed(0)
        trainer = quiet()
        trainer.on("before_backward")(lambda loss, factor=factor: loss * factor)
        trainer.on("after_backward")(lambda module: got.append(module.layer.weight.grad.clone()))
        trainer.fit(Net(), batches(1))
    assert torch.allclose(got[1], got[0] * 2)


def test_replacements_of_the_batch_chain_into_the_step():
    got = []

    class Sees(Net):
        def training_step(self, batch, batch_idx):
            got.append(batch[0].mean().item())
            return super().training_step(batch, batch_idx)

        def on_after_batch_transfer(self, batch):
            return batch[0] + 1, batch[1]

    trainer = quiet()
    trainer.on("before_batch_transfer")(lambda batch: (torch.zeros_like(batch[0]), batch[1]))
    trainer.on("before_batch_transfer")(lambda batch: None)
    trainer.on("after_batch_transfer")(lambda batch: (batch[0] + 10, batch[1]))
    trainer.fit(Sees(), batches(1))
    assert got == [11.0]


def test_the_data_module_takes_the_modules_place_around_the_transfer():
    got = []

    class Data(DataModule):
        def train_dataloader(self):
            return batches(1)

        def on_before_batch_transfer(self, batch):
            got.append("data")

    class Module(Net):
        def on_before_batch_transfer(self, batch):
            got.append("module")

    trainer = quiet()
    trainer.on("before_batch_transfer")(lambda: got.append("hook"))
    trainer.fit(Module(), datamodule=Data())
    trainer.fit(Module(), batches(1))
    assert got == ["hook", "data", "hook", "module"]


def test_metrics_can_be_edited_in_place_or_replaced_before_they_are_logged():
    rows = []
    trainer = quiet(log_every_n_steps=1)
    trainer.on("train_metrics", once=True)(lambda metrics: metrics.update({"mine": 1.0}))
    trainer.on("train_metrics", once=True)(lambda metrics: {"only": metrics["mine"] + 1})
    trainer.on("train_metrics", once=True)(lambda metrics: rows.append(dict(metrics)))
    trainer.fit(Net(), batches(1))
    assert rows == [{"only": 2.0}]


# ---- what is computed at all -------------------------------------------------------------------------------------


@pytest.fixture
def norms(monkeypatch):
    """Counts how often a total gradient norm is computed."""
    calls, real = [], torch.nn.utils.get_total_norm

    def counted(*args, **kwargs):
        calls.append(1)
        return real(*args, **kwargs)

    monkeypatch.setattr(torch.nn.utils, "get_total_norm", counted)
    return calls


def test_nobody_asks_and_no_norm_is_computed(norms):
    trainer = quiet()
    trainer.on("step_end")(lambda loss, lr: None)
    trainer.fit(Net(), batches(3))
    assert norms == []


def test_the_norm_is_computed_once_per_update_however_many_ask(norms):
    got = []
    trainer = quiet()
    trainer.on("step_end")(lambda grad_norm: got.append(grad_norm))
    trainer.on("step_end")(lambda ctx: got.append(ctx.grad_norm))
    trainer.on("step_end")(lambda grad_norm: got.append(grad_norm))
    trainer.fit(Net(), batches(2))
    assert len(norms) == 2
    assert got[:3] == [got[0]] * 3 and got[3:] == [got[3]] * 3 and got[0] != got[3]
    assert all(type(norm) is float and norm > 0 for norm in got)


def test_the_norm_can_also_be_had_from_the_step_context_alone(norms):
    got = []
    trainer = quiet()
    trainer.on("step_end")(lambda ctx: got.append(ctx.grad_norm))
    trainer.on("train_end")(
        lambda module: got.append(torch.stack([p.grad.norm() for p in module.parameters()]).norm().item())
    )
    trainer.fit(Net(), batches(1))
    assert len(norms) == 1
    assert got[0] == pytest.approx(got[1])


def test_a_predicate_that_asks_makes_the_norm_be_computed(norms):
    trainer = quiet()
    trainer.on("step_end", when=lambda grad_norm: grad_norm > 0)(lambda: None)
    trainer.fit(Net(), batches(2))
    assert len(norms) == 2


def test_the_norm_is_no_longer_computed_once_who_asked_has_gone(norms):
    trainer = quiet()
    removed = trainer.on("step_end")(lambda grad_norm: None)
    switched = trainer.on("step_end")(lambda grad_norm: None)
    trainer.on("train_batch_start", when=lambda step: step == 2)(removed.remove)
    trainer.on("train_batch_start", when=lambda step: step == 3)(lambda: trainer.disable_hook(switched.name))
    trainer.fit(Net(), batches(6))
    assert len(norms) == 3


def test_the_norm_of_a_run_that_clips_is_the_one_clipping_computed(norms):
    got = []
    trainer = quiet(gradient_clip_val=1e-3)
    trainer.on("step_end")(lambda grad_norm: got.append(grad_norm))
    trainer.on("gradient_clip")(lambda grad_norm: got.append(grad_norm))
    trainer.fit(Net(), batches(1))
    assert norms == []
    assert got[0] == got[1] > 1e-3


def test_tokens_are_counted_only_on_request():
    trainer = quiet()
    trainer.fit(Net(), batches(2))
    assert trainer.state.tokens_seen == 0
    got = []
    trainer.on("train_end")(lambda tokens_seen: got.append(tokens_seen))
    trainer.fit(Net(), batches(2))
    assert got == [2 * 3 * 4]


def test_wanted_facts_are_those_that_ranks_agreed_on_until_they_agree_again():
    trainer = quiet()
    plan = trainer.plan
    plan.agree_on_wants({"on_step_end": frozenset({"grad_norm"})})
    assert "grad_norm" in plan.wanted and plan.wanted_at == {"on_step_end": {"grad_norm"}}
    with trainer.on("step_end")(lambda tokens_seen: None):  # this rank alone
        assert "tokens_seen" not in plan.wanted
    plan.agree_on_wants({"on_step_end": frozenset({"lr"})})
    assert plan.wanted_at == {"on_step_end": {"lr"}} and "grad_norm" not in plan.wanted
    plan.agree_on_wants(None)
    assert not plan.wanted and not plan.wanted_at


def test_the_wanted_facts_are_those_of_the_listeners_and_their_filters():
    trainer = quiet()
    assert not trainer.plan.wanted
    with trainer.on("step_end", every="5 tokens")(lambda loss, model: None):
        assert trainer.plan.wanted == {"loss", "module", "tokens_seen"}
    assert not trainer.plan.wanted


def test_an_event_costs_a_no_op_again_after_its_last_listener_was_removed():
    trainer = quiet()
    assert trainer.plan.on_step_end is noop
    handle = trainer.on("step_end")(lambda: None)
    assert trainer.plan.on_step_end is not noop
    handle.remove()
    assert trainer.plan.on_step_end is noop


def test_a_slot_that_does_not_exist_is_an_error_with_the_closest_name():
    with pytest.raises(AttributeError, match="Did you mean 'on_step_end'"):
        quiet().plan.on_stepp_end


def test_an_action_belongs_to_the_module_during_its_run_and_to_nothing_after_it():
    during = []
    module, trainer = Net(), quiet()
    trainer.on("train_start")(
        lambda: during.extend(each.owner for each in trainer.plan.listeners("training_step"))
    )
    trainer.fit(module, batches(1))
    assert during == [module]
    assert not trainer.plan.listeners("training_step")
    assert trainer.plan.training_step is noop


class OneEvent:
    """A tracer of one event, which leaves all others as they are."""

    def __init__(self, event):
        self.event, self.seen = event, []

    def call(self, listener, call):
        return self._noting(listener.name, call) if listener.event.name == self.event else call

    def slot(self, event, slot):
        return self._noting(event.name, slot) if event.name == self.event else slot

    def _noting(self, what, call):
        def noted(s):
            self.seen.append(what)
            return call(s)

        return noted


def test_a_tracer_that_leaves_an_event_as_it_is_adds_nothing_to_its_calls():
    got, frames = [], []

    class Looks(Hook):
        def on_step_end(self):
            got.append("step")
            frames.append(sys._getframe(1).f_code.co_filename)

        def on_train_epoch_end(self):
            got.append("epoch")

    trainer = quiet(hooks=[Looks()])
    tracer = OneEvent("on_train_epoch_end")
    trainer.plan.attach(tracer)
    assert trainer.plan.is_traced("on_train_epoch_end") and not trainer.plan.is_traced("on_step_end")
    assert trainer.plan.on_validation_end is noop
    trainer.fit(Net(), batches(2))
    assert got == ["step", "step", "epoch"] and tracer.seen == ["on_train_epoch_end", "looks"]
    assert frames == ["<hookline binding>"] * 2  # the slot calls the listener inline
    trainer.plan.detach(tracer)
    assert not trainer.plan.is_traced("on_train_epoch_end")


def test_a_slot_can_be_had_with_a_tracer_and_the_plan_does_not_change():
    got = []
    trainer = quiet(hooks=[named("hook", got, "on_step_end")])
    tracer, before = OneEvent("on_step_end"), trainer.plan.on_step_end
    traced = trainer.plan.traced_slot("on_step_end", tracer)
    assert trainer.plan.on_step_end is before and trainer.plan.tracers == ()
    traced(trainer.state)
    assert (got, tracer.seen) == (["hook"], ["on_step_end", "hook"])
    before(trainer.state)
    assert tracer.seen == ["on_step_end", "hook"]
    assert trainer.plan.traced_slot("on_validation_end", tracer) is noop
    assert trainer.plan.traced_slot("training_step", tracer) is noop  # no run has set it
