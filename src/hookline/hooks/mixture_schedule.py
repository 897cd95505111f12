"""Change the weights of mixed training loaders by phases."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from hookline.engine.filters import UNITS
from hookline.engine.hook import Hook
from hookline.hooks._settings import parse_moment
from hookline.util.errors import OptionError

WHO = "MixtureSchedule"


class MixtureSchedule(Hook):
    """Changes the weights of the loaders at a step, a number of tokens or an epoch.

    >>> MixtureSchedule({0: {"web": 0.9, "code": 0.1}, "1000 steps": {"web": 0.5, "code": 0.5}})  # doctest:
    +ELLIPSIS <...MixtureSchedule...>

    A phase takes effect at the next window of the mixture after its time has come.
    """

    tier = "builtin"
    may_listen = ("on_step_end",)

    def __init__(self, phases: Mapping[int | str, Mapping[str, float]], name: str | None = None) -> None:
        """phases: a mapping from moments ('1000 steps', '2B tokens', '3 epochs' or a number of steps) to
        weights by loader.
        """
        super().__init__(name)
        if not isinstance(phases, Mapping) or not phases:
            raise OptionError(
                f"{WHO}: phases={phases!r} must map times to weights, as in {{'1000 steps': {{'web': "
                f"0.5}}}}.",
                option="phases",
                value=phases,
            )
        self.phases = [
            (
                *parse_moment(when, f"{WHO}: a phase", ("step", "epoch", "token")),
                _phase_weights(when, weights),
            )
            for when, weights in phases.items()
        ]
        self.done = 0
        """Phases that have begun."""
        units = {unit for at, unit, _ in self.phases if at}  # 0 is the beginning in any unit
        if len(units) > 1:
            raise OptionError(
                f"{WHO}: phases use {'s and '.join(sorted(units))}s; choose one of these units.",
                option="phases",
                value=phases,
            )
        if [at for at, _, _ in self.phases] != sorted({at for at, _, _ in self.phases}):
            raise OptionError(
                f"{WHO}: phases must come in the order of their times, each later than the one before.",
                option="phases",
                value=phases,
            )
        if "token" in units:
            self.__dict__["on_step_end"] = (
                self._by_tokens
            )  # a parameter `tokens_seen` makes the run count tokens

    def setup(self, stage: str) -> None:
        if stage == "fit":
            self.done = 0

    def on_train_start(self, state: Any) -> None:
        loaders = state.trainer.loaders
        asked = dict(loaders.weights)
        for at, unit, weights in self.phases:  # check all phases now, so that none fails during the run
            asked |= weights
            try:
                loaders.check_weights(asked)
            except OptionError as error:
                raise OptionError(f"{WHO}: the phase at {at} {unit}s is not possible. {error}") from None
        self._look(state)

    def on_step_end(self, state: Any) -> None:
        self._look(state)

    on_train_epoch_start = on_step_end

    def _by_tokens(self, state: Any, tokens_seen: int) -> None:
        self._look(state)

    def _look(self, state: Any) -> None:
        while self.done < len(self.phases):
            at, unit, weights = self.phases[self.done]
            if getattr(state, UNITS[unit]) < at:
                return
            state.trainer.loaders.set_weights(weights)
            self.done += 1

    def state_dict(self) -> dict[str, Any]:
        return {"done": self.done}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.done = min(state["done"], len(self.phases))


def _phase_weights(when: Any, given: Any) -> dict[str, float]:
    if not isinstance(given, Mapping) or not given:
        raise OptionError(
            f"{WHO}: the phase at {when!r} names no loader: {given!r}; write {{'web': 0.5, 'code': 0.5}}.",
            option="phases",
            value=given,
        )
    for name, weight in given.items():
        if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 <= weight < math.inf:
            raise OptionError(
                f"{WHO}: the phase at {when!r} gives {name!r} the weight {weight!r}, which is not a number "
                "from 0.",
                option="phases",
                value=weight,
            )
    return dict(given)
