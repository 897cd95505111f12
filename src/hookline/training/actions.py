"""The actions of the event table: each is installed once per run, as a callable of the state."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch.optim import Optimizer

from hookline.data.batch import map_tensors
from hookline.engine.binding import Caller, bind_by_position, publishing
from hookline.engine.events import Event
from hookline.engine.listener import Listener, make_listener, overrides
from hookline.engine.plan import Trace, noop
from hookline.run.module import Actions
from hookline.run.optimizers import needs_closure
from hookline.run.run import Run
from hookline.training.batch_events import set_loss
from hookline.training.inference import in_inference_mode
from hookline.training.pass_events import restore_modes
from hookline.training.update import NEEDS_ONE_BATCH, Closure
from hookline.util.errors import OptionError

STEP_ACTIONS = ("training_step", "validation_step", "test_step", "predict_step")


def install_actions(run: Run) -> None:
    """Install every action: the override of the data module or module, else the default.

    The strategy may wrap an action.
    """
    plan = run.plan
    for event in plan.table:
        if event.action:
            install_action(run, event.name)
    if run.strategy.device.type != "cpu" or _action_owner(run, plan.table["transfer_batch_to_device"])[2]:
        run.traits.transfers = (lambda s: plan.transfer_batch_to_device(s),)
    if (convert := run.strategy.precision.convert_tensor) is not None:
        # after the move, because a device converts faster than the CPU
        run.traits.transfers += (lambda s: map_tensors(s.current.batch, convert),)
    clips_itself = _action_owner(run, plan.table["configure_gradient_clipping"])[2]
    run.traits.clips = run.options.gradient_clip_val is not None or clips_itself
    clip_returns_norm = (
        run.traits.clips and not clips_itself and run.options.gradient_clip_algorithm != "value"
    )
    run.traits.measures_norm = not clip_returns_norm and (run.traits.clips or run.strategy.shards)
    run.state.setup.norm_takes_all = run.strategy.shards
    run.state.optimization.gradient_clip_val = run.options.gradient_clip_val
    run.state.optimization.gradient_clip_algorithm = run.options.gradient_clip_algorithm


def install_closure(run: Run) -> None:
    """Install the closure of the optimizers, which recomputes the loss for those that need it (LBFGS)."""
    recompute = any(needs_closure(each) for each in run.state.optimizers)
    if (
        recompute
        and run.options.accumulate_grad_batches > 1
        and not run.traits.rules.accumulates_with_closures
    ):
        raise OptionError(NEEDS_ONE_BATCH)
    if recompute and run.strategy.precision.scaler is not None:
        raise OptionError(
            "An optimizer that recomputes the loss (LBFGS) cannot be combined with precision='16-mixed'."
        )
    run.state.optimization.optimizer_closure = Closure(run)
    if recompute and not run.traits.is_manual:
        run.traits.recomputes = True
        # the gradients of the closure's last call are not those that the step began with
        run.traits.measures_norm = run.traits.measures_norm or not run.traits.clips
        install_action(run, "optimizer_step")


def _action_owner(run: Run, event: Event) -> tuple[str, str, bool]:
    """Return the receiver of an action, its method name, and whether a user's class overrides it."""
    if event.name == "optimizer_step" and run.traits.is_manual:
        return "M", event.name, False  # an override that calls the optimizer would call itself
    for receiver, owner in (("D", run.datamodule), ("M", run.steps)):
        if receiver in event.receivers and owner is not None:
            for name in (event.name, *event.spellings):
                if overrides(owner, name):
                    return receiver, name, True
    return "M", event.name, False


def install_action(run: Run, name: str) -> None:
    """Install one action, also again after it was replaced."""
    table, s, strategy = run.plan.table, run.state, run.strategy
    event = table[name]
    receiver, method, overridden = _action_owner(run, event)
    owner = run.datamodule if receiver == "D" else run.steps
    default = DEFAULTS.get(event.name) if not overridden else None
    doer = (
        None
        if default is not None
        else make_listener(
            # `module.test_step = None` stands for a module without it
            getattr(owner, method) or getattr(Actions, method).__get__(owner),
            event,
            table,
            receiver=receiver,
            name=type(owner).__name__,
            owner=owner,
            bind=bind_by_position,
        )
    )
    around = (
        getattr(strategy, event.name) if "S" in event.receivers and overrides(strategy, event.name) else None
    )
    shown = [doer] if doer is not None and (overridden or event.name in STEP_ACTIONS) else []

    def build(trace: Trace) -> Caller:
        call = (
            default(run, f"{event.name} of {type(run.module).__name__}")
            if default is not None
            else _published(doer)
        )
        if shown:
            call = trace(shown[-1], call)
        if event.name in STEP_ACTIONS:
            call = strategy.precision.around_step(call)
            if event.name != "training_step" and run.traits.rules.uses_inference_mode(run):
                call = in_inference_mode(call)
        elif event.name == "backward":
            call = strategy.precision.with_default_type(call)
        if around is None:
            return call
        return trace(outer := _around(call), _published(outer))

    def _around(call: Caller) -> Listener:
        assert around is not None
        wrapped = functools.partial(around, functools.partial(call, s))
        return make_listener(
            wrapped, event, table, receiver="S", name=type(strategy).__name__, owner=strategy
        )

    run.plan.act(event.name, [_around(noop), *shown] if around is not None else shown, build)


def _published(listener: Listener | None) -> Caller:
    """Return the call of a listener that no slot of the plan calls."""
    assert listener is not None
    source = listener.binding.source
    return listener.binding.call if source is None else source.published(listener)


# ---- defaults that need no frame of their own on the hot path ----------------------------------------------


def _clip(run: Run, what: str) -> Caller:
    clip = "f(o.optimizer, o.gradient_clip_val, o.gradient_clip_algorithm)".replace("o.", "s.optimization.")
    return publishing(f"s.optimization.add_norm({clip})", what, run.steps.clip_gradients)


def _backward(run: Run, what: str) -> Caller:
    if run.strategy.differentiate is not None:
        return publishing(
            "f(s.current.scaled_loss, **s.current.backward_options)", what, run.strategy.differentiate
        )
    options = "**s.current.backward_options" if run.traits.is_manual else ""
    return publishing(f"s.current.scaled_loss.backward({options})", what)


def _optimizer_step(run: Run, what: str) -> Caller:
    if run.traits.recomputes:
        return publishing("f(s)", what, step_with_closure)
    return publishing(
        "s.optimization.optimizer.step(s.optimization.optimizer_closure)"
        if run.traits.is_manual
        else "s.optimization.optimizer.step()",
        what,
    )


def _to_eval(run: Run, what: str) -> Caller:
    return lambda s: run.module.eval()


DEFAULTS: dict[str, Callable[[Run, str], Caller]] = {
    "backward": _backward,
    "optimizer_zero_grad": lambda run, what: _clear_gradients,
    "optimizer_step": _optimizer_step,
    "configure_gradient_clipping": _clip,
    "on_validation_model_eval": _to_eval,
    "on_test_model_eval": _to_eval,
    "on_predict_model_eval": _to_eval,
    "on_validation_model_train": lambda run, what: restore_modes,
    "on_test_model_train": lambda run, what: restore_modes,
    "on_predict_model_train": lambda run, what: restore_modes,
}
"""Makes the default of an action from the run and the text that the watchdog shows for it."""


def _clear_gradients(s: Any) -> None:
    """Clear gradients like `Optimizer.zero_grad`, without its profiling frames, which take 13 of 14 µs."""
    if getattr(s.optimizer.zero_grad, "__func__", None) is not Optimizer.zero_grad:
        s.optimizer.zero_grad()  # the optimizer overrides it
        return
    for group in s.optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = None


def step_with_closure(s: Any) -> None:
    """Call the optimizer, with its closure if it recomputes the loss."""
    closure, loss = s.optimizer_closure, s.last_loss
    s.optimizer.step(closure if closure.recomputes(s.optimizer) else None)
    set_loss(s, loss)  # the loss of the batch is the one before the update, however often it was recomputed
