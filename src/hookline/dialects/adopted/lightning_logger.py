"""Hookline's loggers as Lightning's callbacks and modules expect a logger."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

from hookline.dialects.adopted.lightning_parts import NotInView
from hookline.dialects.lightning.names import directory_of
from hookline.errors import closest


class Experiment:
    """`trainer.logger.experiment`: add_scalar, add_histogram, ... go to all loggers; anything else is the
    client's own.
    """

    def __init__(self, loggers: Any) -> None:
        self._loggers = loggers

    def __getattr__(self, name: str) -> Any:
        if hasattr(self._loggers, name):
            return getattr(self._loggers, name)
        client = self._loggers.client
        if hasattr(client, name):
            return getattr(client, name)
        whose = (
            f"{type(client).__name__} has it not"
            if client is not None
            else "none of the loggers has a client of its own"
        )
        raise _not_there(f"trainer.logger.experiment.{name}", whose, type(self._loggers))


class LoggerView:
    """All of Hookline's loggers as one of Lightning's."""

    group_separator = "/"

    def __init__(self, view: Any) -> None:
        self._trainer = view._own

    def __getattr__(self, name: str) -> Any:
        """Only reached for what is not here."""
        raise _not_there(f"trainer.logger.{name}", "Hookline's loggers have it not", type(self))

    @property
    def experiment(self) -> Experiment:
        """What takes add_scalar, add_histogram, add_text, ..., with the client of the first logger that has
        one behind it.
        """
        return Experiment(self._trainer.loggers)

    @property
    def save_dir(self) -> str:
        """With `name` and `version` the run's directory."""
        return str(directory_of(self._trainer).absolute().parent.parent)

    @property
    def name(self) -> str:
        """The folder that the run is in."""
        return str(directory_of(self._trainer).absolute().parent.name)

    @property
    def version(self) -> str:
        """The run's own folder."""
        return str(directory_of(self._trainer).absolute().name)

    @property
    def root_dir(self) -> str:
        """What `version` is in."""
        return str(directory_of(self._trainer).absolute().parent)

    @property
    def log_dir(self) -> str:
        """The run's directory."""
        return str(directory_of(self._trainer))

    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """A row of numbers."""
        state = self._trainer.state
        values = {name: float(value) for name, value in metrics.items()}
        self._trainer.loggers.log_metrics(values, state.step if step is None else step, state.epoch)

    def log_hyperparams(
        self, params: Mapping[str, Any] | argparse.Namespace, *args: Any, **kwargs: Any
    ) -> None:
        """What the run was made with."""
        self._trainer.loggers.log_hyperparams(
            dict(vars(params) if isinstance(params, argparse.Namespace) else params)
        )

    def log_graph(self, *args: Any, **kwargs: Any) -> None:
        """Hookline's loggers draw no graph of the model."""

    def save(self) -> None:
        """Hookline's loggers write by themselves."""

    def finalize(self, status: str) -> None:
        """Hookline closes its loggers when the run is over."""

    def after_save_checkpoint(self, checkpoint_callback: Any) -> None:
        """Hookline's loggers hear of checkpoints by themselves."""


def _not_there(path: str, why: str, owner: type) -> NotInView:
    has = [name for name in dir(owner) if not name.startswith("_")]
    return NotInView(
        f"{path}: {why}.{closest(path.rpartition('.')[2], has)} There are: {', '.join(has)}. "
        "For one logger's own interface take it from hookline.Trainer(logger=...)."
    )
