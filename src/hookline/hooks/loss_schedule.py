"""Change the loss, or add terms to it, during a run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from hookline.engine.checks import Number, checked_parameters, refused
from hookline.engine.hook import Hook
from hookline.hooks._settings import Moments, current_value, facts_asked, read_moments
from hookline.util.errors import HookError, LossError, OptionError, closest, described

TERM_FACTS: dict[str, Callable[[Any], Any]] = {
    "loss": lambda s: s.live_loss,
    "batch": lambda s: s.batch,
    "outputs": lambda s: s.returned,
    "module": lambda s: s.module,
    "step": lambda s: s.step,
    "epoch": lambda s: s.epoch,
    "batch_idx": lambda s: s.batch_idx,
    "trainer": lambda s: s.trainer,
    "state": lambda s: s,
}
"""Parameters that a function may have. `outputs` is what the training step returned, with its graph."""
Weight = float | Callable[..., float] | Mapping[int | str, float]


class LossSchedule(Hook):
    """Computes the loss for the backward pass: the module's loss or a replacement, times a weight, plus
    further terms.

    >>> LossSchedule(terms={"l1": lambda module: sum(p.abs().sum() for p in module.parameters())},
    ...              weights={"l1": {0: 0.0, 1000: 1e-4}})

    A weight is a number, a function of facts (`lambda step: min(1, step / 1000)`), or a mapping from moments
    (a step, or text such as '2 epochs') to numbers. A term whose weight is 0 is not computed.
    """

    tier = "builtin"

    @checked_parameters
    def __init__(
        self,
        terms: Mapping[str, Callable[..., Any]] | None = None,
        weights: Mapping[str, Weight] | None = None,
        replace: Callable[..., Any] | Mapping[int | str, Callable[..., Any]] | None = None,
        weight: Weight = 1.0,
        log: bool = True,
        name: str | None = None,
    ) -> None:
        """Choose terms, replacements and weights.

        terms: further losses by name, functions whose parameters name facts.
        weights: their weights, by default 1. replace: a function whose loss replaces the module's from the
        start, or a mapping from moments to functions. weight: of the module's loss or its replacement.
        log: log every term as `loss/NAME` and its weight as `loss/NAME_weight`.
        """
        super().__init__(name)
        for what, given in (("terms", terms), ("weights", weights)):
            if given is not None and not isinstance(given, Mapping):
                values = "functions" if what == "terms" else "their weights"
                raise refused(f"LossSchedule: {what}", given, f"a mapping from names to {values}")
        self.terms, self.weights = dict(terms or {}), dict(weights or {})
        for term in self.weights:
            if term not in self.terms:
                raise OptionError(
                    f"LossSchedule: weights has {term!r}, which is not one of the terms "
                    f"({', '.join(self.terms) or 'none'}).{closest(str(term), self.terms)}",
                    option="weights",
                    value=term,
                    allowed=tuple(self.terms),
                )
        if not self.terms and replace is None and weight == 1.0:
            raise OptionError("LossSchedule: nothing to do: pass terms, replace or weight.")
        self.log = log
        self._terms = {
            key: _FactFunction(function, f"the term {key!r}") for key, function in self.terms.items()
        }
        self._weights = {
            key: _Weight(self.weights.get(key, 1.0), f"the weight of {key!r}") for key in self.terms
        }
        self._weight = _Weight(weight, "weight")
        moments = replace if isinstance(replace, Mapping) else {} if replace is None else {0: replace}
        self._replace = read_moments(
            {key: _FactFunction(each, f"replace[{key!r}]") for key, each in moments.items()},
            "LossSchedule: replace",
        )

    def on_fit_start(self, module: Any) -> None:
        asking = [*self._terms.values(), *(function for _, _, function in self._replace)]
        if not getattr(module, "automatic_optimization", True) and any(
            "outputs" in each.names for each in asking
        ):
            raise HookError(
                "LossSchedule: with manual optimization the loss is differentiated before the step has "
                "returned, so `outputs` is not available; use `batch` and `module`."
            )

    def on_before_backward(self, state: Any) -> Tensor | None:
        given = loss = state.live_loss
        function = current_value(self._replace, state)
        if function is not None:
            loss = function.loss(state)
        weight = self._weight.at(state)
        if weight != 1.0:
            loss = loss * weight
        for key, term in self._terms.items():
            share = self._weights[key].at(state)
            value = term.loss(state) if share else None
            if value is not None:
                loss = loss + share * value
            if self.log:
                state.trainer.log(f"loss/{key}_weight", share)
                if value is not None:
                    state.trainer.log(f"loss/{key}", value)
        if not loss.requires_grad:
            raise LossError(
                "LossSchedule: the resulting loss cannot be differentiated: its weights are 0, or a "
                "function returned a detached tensor."
            )
        return loss if loss is not given else None


class _FactFunction:
    """A function called with the facts that its parameters name."""

    def __init__(self, function: Any, what: str) -> None:
        if not callable(function):
            raise OptionError(f"LossSchedule: {what} must be a function, not {function!r}.")
        self.function, self.what = function, what
        self.names = facts_asked(function, f"LossSchedule: {what}", TERM_FACTS)

    def __call__(self, state: Any) -> Any:
        return self.function(**{name: TERM_FACTS[name](state) for name in self.names})

    def loss(self, state: Any) -> Tensor:
        value = self(state)
        if not isinstance(value, Tensor) or value.numel() != 1:
            got = (
                f"a tensor of shape {tuple(value.shape)}"
                if isinstance(value, Tensor)
                else type(value).__name__
            )
            raise LossError(
                f"LossSchedule: {self.what} must return a loss, a tensor of one element; it returned {got}."
            )
        return value.reshape(())


class _Weight:
    """A weight that may depend on the moment of the run."""

    def __init__(self, given: Any, what: str) -> None:
        self.number: float | None = None
        self.function: _FactFunction | None = None
        self.moments: Moments = []
        if callable(given):
            self.function = _FactFunction(given, what)
        elif isinstance(given, Mapping):
            for value in given.values():
                Number()(f"LossSchedule: {what}", value)
            self.moments = read_moments(given, f"LossSchedule: {what}")
        else:
            Number()(f"LossSchedule: {what}", given)
            self.number = float(given)

    def at(self, state: Any) -> float:
        if self.number is not None:
            return self.number
        if self.function is not None:
            came = self.function(state)
            try:
                return float(came)
            except (TypeError, ValueError):
                what = self.function.what
                raise LossError(
                    f"LossSchedule: {what} must return a number; it returned {described(came)}."
                ) from None
        value = current_value(self.moments, state)
        return 0.0 if value is None else float(value)
