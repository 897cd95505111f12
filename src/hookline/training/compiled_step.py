"""torch.compile for the whole training step: one graph for forward, loss and backward, one per optimizer."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from hookline.engine.binding import bind_by_position, publishing
from hookline.engine.listener import make_listener
from hookline.engine.plan import noop
from hookline.run.optimizers import bare
from hookline.run.run import Run
from hookline.run.state import State, detach_all
from hookline.training.actions import install_action, step_with_closure
from hookline.training.compile import (
    check_compilable,
    describe_graphs,
    find_splits,
    import_dynamo,
    torch_arguments,
    why_eager,
)
from hookline.util.errors import OptionError

log = logging.getLogger("hookline")

NUMBERS = r"L\['hookline_facts'\]\[[1-9]\],L\['hookline_named'\]\[.*\]"
"""Arguments of a step after the batch: numbers such as batch_idx, which must not be compiled in as constants.
"""


class CompiledStep:
    """The graphs of a run, installed as the actions that the training step calls. Events do not change.

    If nothing needs to run between the forward pass and the gradients, `training_step` also differentiates,
    and `backward` and `optimizer_zero_grad` have nothing left to do. Otherwise the step is split there: the
    forward pass is compiled alone, and torch compiles its backward pass with it. `choose_step` composes it,
    and so does a batch that finds the listeners changed.
    """

    def __init__(self, run: Run) -> None:
        check_compilable(run)
        self.run, self.plan, self.state = run, run.plan, run.state
        self.splits: list[str] = []
        """Reasons to split the forward pass from the backward pass; empty: they are one graph."""
        self._refusal = ""
        """The reason why torch did not make one graph."""
        self._text = ""
        self._seen: tuple[object, object] = (None, None)
        self._trained: list[Tensor] = []
        """The parameters of the optimizers. Their gradients are replaced at each step."""
        self._count = 0
        self._others: list[Tensor] = []
        """Parameters that no optimizer has. Their gradients add up, as they do without a graph."""
        arguments = torch_arguments(run.options.compile)
        self._is_strict = bool(arguments.pop("fullgraph", False))
        self._restore = _set_torch_options(one_shape="dynamic" not in arguments)
        self._doer = self.plan.listeners("training_step")[-1]
        self._logs = LogCapture([run.module, run.state.trainer])
        self._forward = torch.compile(self._make_forward(), **arguments)
        self._joint = torch.compile(self._make_joint(), fullgraph=True, **arguments)
        self.updates = [
            CompiledUpdate(run, each, arguments, bool(self.plan.listeners("optimizer_step")))
            for each in run.state.optimizers
        ]
        self._clips_by_default = run.traits.clips and not self.plan.listeners("configure_gradient_clipping")
        self._install_step()
        self._install_updates()

    def close(self) -> None:
        """Restore torch's options."""
        self._restore()

    # ---- composing -----------------------------------------------------------------------------------------

    def compose(self) -> None:
        """Choose the graphs for the present listeners, before each epoch and when listeners have changed."""
        run, plan = self.run, self.plan
        self._trained[:] = dict.fromkeys(_trained(self.state))
        own, self._count = set(self._trained), len(_trained(self.state))
        self._others[:] = [parameter for parameter in run.module.parameters() if parameter not in own]
        splits = [*find_splits(run), *([self._refusal] if self._refusal else [])]
        if splits and self._is_strict:
            raise OptionError(
                "compile: fullgraph=True, but the step has to be split between forward and backward: "
                f"{splits[0]}. Remove the cause, or fullgraph."
            )
        if bool(splits) != bool(self.splits) or not self._text:
            for name in ("optimizer_zero_grad", "backward"):
                if splits:
                    install_action(run, name)
                else:
                    plan.act(name, [], lambda trace: noop)
        self.splits = splits
        clips = self._clips_by_default and not (
            plan.listeners("on_gradient_clip") or plan.is_traced("on_gradient_clip")
        )
        for update in self.updates:
            update.clips = clips and not update.refusal
        self._seen = plan.asked_at, plan.tracers
        before, self._text = self._text, self.text()
        if self._text != before:
            log.info("compile='step':\n%s", self._text)

    def _install_step(self) -> None:
        """Install the graphs in place of the module's `training_step`, with the same arguments."""
        doer, plan = self._doer, self.plan

        @functools.wraps(doer.function)
        def training_step(*facts: Any, **named: Any) -> Any:
            return self._compute(facts, named)

        bound = make_listener(
            training_step,
            doer.event,
            plan.table,
            receiver=doer.receiver,
            name=doer.name,
            owner=doer.owner,
            bind=bind_by_position,
        ).binding
        call = bound.call if bound.source is None else bound.source.published(doer)
        in_type = self.run.strategy.precision.with_default_type  # autocast is in the graph
        plan.act("training_step", [doer], lambda trace: in_type(trace(doer, call)))

    def _install_updates(self) -> None:
        """Install the graphs of the optimizers, unless the user overrides the step or the clipping."""
        run, plan, updates, name = self.run, self.plan, self.updates, type(self.run.module).__name__
        if not plan.listeners("optimizer_step"):
            step = publishing("d[s.optimizer_idx](s)", f"optimizer_step of {name}", d=updates)
            plan.act("optimizer_step", [], lambda trace: step)
        if self._clips_by_default:
            clip_now = (
                "s.optimization.add_norm(f(s.optimizer, s.gradient_clip_val, s.gradient_clip_algorithm))"
            )
            clip = publishing(
                f"None if d[s.optimizer_idx].clips else {clip_now}",
                f"configure_gradient_clipping of {name}",
                run.steps.clip_gradients,
                updates,
            )
            plan.act("configure_gradient_clipping", [], lambda trace: clip)

    # ---- one batch -----------------------------------------------------------------------------------------

    def _compute(self, facts: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """Run the first graph. Its loss is a leaf: the graph has already differentiated it."""
        plan, seen = self.plan, self._seen
        if (
            plan.asked_at is not seen[0]
            or plan.tracers is not seen[1]
            or (not self.splits and self._is_outdated())
        ):
            self.compose()
        self._logs.begin()
        try:
            if self.splits:
                return self._forward(*facts, **named)
            try:
                returned, gradients = self._joint(*facts, **named)
            except _refusals() as error:
                self._refuse(error)
                return self._forward(*facts, **named)
        finally:
            self._logs.end()
            _restore_none()
        if gradients is not None:
            self._set_gradients(gradients)
            (returned if type(returned) is Tensor else returned["loss"]).requires_grad_()
        return returned

    def _set_gradients(self, gradients: list[Tensor | None]) -> None:
        for parameter, gradient in zip(self._trained, gradients, strict=False):
            parameter.grad = gradient
        if not self._others:
            return
        for parameter, gradient in zip(self._others, gradients[len(self._trained) :], strict=True):
            if gradient is not None:
                parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)

    def _is_outdated(self) -> bool:
        """Return whether a parameter was added, or has a new hook, which a graph would silently not call."""
        return len(_trained(self.state)) != self._count or any(
            each._backward_hooks or each._post_accumulate_grad_hooks for each in self._trained
        )

    def _refuse(self, error: Exception) -> None:
        """Continue with separate graphs for forward and backward. Torch has run nothing yet."""
        self._refusal = f"torch cannot compile them as one graph: {_compile_error_text(error)}"
        self._logs.forget()
        if self._is_strict:
            raise error
        log.warning("compile='step': %s. The step is compiled in smaller parts.", self._refusal)
        self.compose()

    def _make_forward(self) -> Callable[..., Any]:
        """Make the function to compile for a forward pass."""
        step, device, dtype = (
            self._doer.function,
            self.run.strategy.device.type,
            self.run.strategy.precision.dtype,
        )
        if dtype is None:

            def forward(*hookline_facts: Any, **hookline_named: Any) -> Any:
                return step(*hookline_facts, **hookline_named)

            return forward

        def mixed_forward(*hookline_facts: Any, **hookline_named: Any) -> Any:
            with torch.autocast(device, dtype):
                return step(*hookline_facts, **hookline_named)

        return mixed_forward

    def _make_joint(self) -> Callable[..., tuple[Any, list[Tensor | None] | None]]:
        """Make the function to compile for forward and backward. It returns gradients; None without a loss.

        It does not read or write `.grad`, which torch 2.13 may confuse with another None of the graph
        (`_restore_none`).
        """
        forward, trained, others = self._make_forward(), self._trained, self._others

        def forward_and_backward(
            *hookline_facts: Any, **hookline_named: Any
        ) -> tuple[Any, list[Tensor | None] | None]:
            returned = forward(*hookline_facts, **hookline_named)
            loss = returned.get("loss") if isinstance(returned, dict) else returned
            if not isinstance(loss, Tensor) or not loss.requires_grad:
                return returned, None
            parameters = [*trained, *others]
            gradients: list[Tensor | None] = list(
                torch.autograd.grad(
                    loss, [each for each in parameters if each.requires_grad], allow_unused=True
                )
            )
            for index, parameter in enumerate(parameters):
                if not parameter.requires_grad:
                    gradients.insert(index, None)
            return detach_all(returned), gradients

        return forward_and_backward

    # ---- explain -------------------------------------------------------------------------------------------

    def text(self) -> str:
        """Return a description of the graphs of the step, and of what splits them."""
        return describe_graphs(
            self.splits, [(update.name, update.clips, update.refusal) for update in self.updates]
        )


class CompiledUpdate:
    """The update of one optimizer as a graph, with gradient clipping if no listener comes between them."""

    def __init__(self, run: Run, optimizer: Any, arguments: dict[str, Any], is_overridden: bool) -> None:
        self.optimizer = optimizer
        self.name = type(bare(optimizer)).__name__
        self.clips = False
        self.refusal = (
            f"{type(run.steps).__name__} overrides optimizer_step" if is_overridden else why_eager(optimizer)
        )
        """The reason why this optimizer runs without a graph; empty: it has one."""
        self._state, self._clip = run.state, run.steps.clip_gradients
        self._rates: list[tuple[float, Tensor]] = []
        """The learning rates of the groups as tensors: a float would compile a new graph for each value."""
        if not self.refusal:
            self._graph = torch.compile(self._make_graph(), fullgraph=True, **arguments)
            # calls the optimizer's own step hooks around the update
            self._with_hooks = Optimizer.profile_hook_step(self._update)

    def __call__(self, s: State) -> None:
        """Update the weights."""
        optimizer = self.optimizer
        if self.refusal:
            step_with_closure(s)
        elif (
            optimizer._optimizer_step_pre_hooks
            or optimizer._optimizer_step_post_hooks
            or _global_optimizer_pre_hooks
            or _global_optimizer_post_hooks
        ):
            self._with_hooks(optimizer)
        else:
            self._update(optimizer)

    def _update(self, optimizer: Any) -> None:
        s, groups = self._state, optimizer.param_groups
        limit = s.gradient_clip_val if self.clips else None
        norm: Tensor | None = None
        rates = [group["lr"] for group in groups]
        if len(self._rates) != len(rates):
            self._rates = [(float("nan"), torch.zeros((), dtype=torch.float64)) for _ in rates]
        try:
            for index, (group, rate) in enumerate(zip(groups, rates, strict=True)):
                if type(rate) is float:
                    known, tensor = self._rates[index]
                    if rate != known:
                        self._rates[index] = rate, tensor.fill_(rate)
                    group["lr"] = tensor
            norm = self._graph(limit, s.gradient_clip_algorithm)
        except _refusals() as error:
            self.refusal = f"torch cannot compile it: {_compile_error_text(error)}"
            log.warning("compile='step': %s.step runs without a graph, because %s.", self.name, self.refusal)
        finally:
            for group, rate in zip(groups, rates, strict=True):
                group["lr"] = rate
            _restore_none()
        if self.refusal:  # torch has run nothing yet
            self.clips = False
            if limit is not None:
                norm = self._clip(optimizer, limit, s.gradient_clip_algorithm)
            type(optimizer).step.__wrapped__(optimizer)
        if limit is not None:
            s.optimization.add_norm(norm)
        optimizer._opt_called = True  # schedulers warn if an optimizer was never called

    def _make_graph(self) -> Callable[[float | None, str | None], Tensor | None]:
        """Make the function to compile for clipping and update, without torch's wrappers around `step`."""
        optimizer, clip, step = self.optimizer, self._clip, _unwrapped(type(self.optimizer).step)

        def update(limit: float | None, algorithm: str | None) -> Tensor | None:
            with torch.no_grad():
                norm = None if limit is None else clip(optimizer, limit, algorithm)
                step(optimizer)
            return norm

        return update


class LogCapture:
    """Collect what a compiled step logs, and log it after the graph, because `log` cannot be part of it."""

    def __init__(self, owners: list[Any]) -> None:
        self._calls: list[tuple[int, Any, Any]] = []
        able = [owner for owner in owners if callable(getattr(owner, "log", None))]
        self._logs = [(vars(owner), owner.log, self._collector(index)) for index, owner in enumerate(able)]

    def _collector(self, index: int) -> Callable[..., None]:
        calls = self._calls

        def log(*given: Any, **named: Any) -> None:
            calls.append((index, detach_all(given), detach_all(named)))

        return log

    def begin(self) -> None:
        """Start to collect."""
        for attributes, _, collect in self._logs:
            attributes["log"] = collect

    def forget(self) -> None:
        """Drop what was collected, because the step runs again."""
        self._calls.clear()

    def end(self) -> None:
        """Log what was collected."""
        for attributes, _, _ in self._logs:
            del attributes["log"]
        if self._calls:
            calls = self._calls[:]
            self._calls.clear()
            for index, given, named in calls:
                self._logs[index][1](*given, **named)


# ---- optimizers --------------------------------------------------------------------------------------------


def _unwrapped(step: Any) -> Callable[[Any], Any]:
    """Return an optimizer's step without torch's wrappers, which profile and call hooks."""
    if getattr(step, "hooked", False):
        step = step.__wrapped__
    if step.__code__.co_qualname.startswith("_use_grad_for_differentiable"):
        step = step.__wrapped__
    return step  # type: ignore[no-any-return]


def _trained(s: State) -> list[Tensor]:
    return [
        parameter
        for optimizer in s.optimizers
        for group in optimizer.param_groups
        for parameter in group["params"]
    ]


# ---- torch -------------------------------------------------------------------------------------------------


def _set_torch_options(one_shape: bool) -> Callable[[], None]:
    """Set torch's options for graphs with a backward pass, and return a function that restores them.

    Graphs also check for module hooks that are added later, and take numbers as inputs. one_shape: make one
    graph per shape, because a graph for several shapes depends on which shape came first, and then resume is
    not bit-exact. `torch.compile(dynamic=False)` means the same, and sets these options again in every call.
    """
    dynamo: Any = import_dynamo().config
    compiler: Any = torch.compiler.config
    static = {"automatic_dynamic_shapes": False, "assume_static_by_default": True} if one_shape else {}
    options = {"trace_autograd_ops": True, "skip_nnmodule_hook_guards": False, **static}
    before = {name: getattr(dynamo, name) for name in options}
    sources = compiler.dynamic_sources
    for name, value in options.items():
        setattr(dynamo, name, value)
    compiler.dynamic_sources = ",".join(each for each in (sources, NUMBERS) if each)

    def restore() -> None:
        for name, value in before.items():
            setattr(dynamo, name, value)
        compiler.dynamic_sources = sources

    return restore


def _restore_none() -> None:
    """Clear the source that torch 2.13 sets on its shared None when it traces `parameter.grad is None`.

    Functions that are compiled later would read any None from that source
    (https://github.com/pytorch/pytorch/pull/193725).
    """
    none = _interned_none()
    if none is not None and none.source is not None:
        none.source = None


@functools.cache
def _interned_none() -> Any:
    return getattr(import_dynamo().variables.constant, "CONSTANT_VARIABLE_NONE", None)


@functools.cache
def _refusals() -> tuple[type[Exception], ...]:
    """Return the exceptions that torch raises while it compiles, before anything runs."""
    exc = import_dynamo().exc
    return exc.TorchDynamoException, exc.FailOnRecompileLimitHit


def _compile_error_text(error: Exception) -> str:
    if isinstance(error, import_dynamo().exc.FailOnRecompileLimitHit):
        return (
            "it was compiled too often, because shapes or numbers change from batch to batch "
            "(the environment variable TORCH_LOGS=recompiles shows which)"
        )
    return next(
        (line.strip().rstrip(".") for line in str(error).splitlines() if line.strip()), type(error).__name__
    )
