"""Make the loggers of a trainer from `Trainer(logger=...)`."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Iterable
from typing import Any

from hookline.engine.checks import Several, refused
from hookline.engine.foreign import adopt_logger
from hookline.loggers.base import Logger, Loggers
from hookline.util.errors import OptionError


def make_loggers(given: Any, default: Callable[[], Logger]) -> Loggers:
    """Return the loggers for True, False, one logger or several, also those of Lightning.

    Loggers that may be slow get a thread.

    given: the trainer's option `logger`. default: makes the logger for True.
    """
    if given is True:
        return Loggers([default()])
    if given is False or given is None:
        return Loggers()
    members: list[Any] = (
        [given] if isinstance(given, Logger | str) or not isinstance(given, Iterable) else list(given)
    )
    members = [adopt_logger(each) for each in members]
    for logger in members:
        if not isinstance(logger, Logger):
            raise refused(
                "logger",
                logger,
                "True, False, a Logger, or a list of them",
                " hookline.loggers has ClearML, Comet, CSV, Console, JSONLines, MLflow, TensorBoard, Trackio "
                "and WandB; Lightning's loggers can be passed as they are.",
            )
        _check_methods(logger)
    from hookline.loggers.queued import Queued

    members = [Queued(logger) if logger.queued else logger for logger in members]
    direct = [logger.queued is False or isinstance(logger, Queued | Loggers) for logger in members]
    called = [
        logger if is_direct else Queued(logger, waits=True)
        for logger, is_direct in zip(members, direct, strict=True)
    ]
    return Loggers(members, called)


def _check_methods(logger: Logger) -> None:
    """Refuse a wrong signature of log_metrics, and a misspelt method, before any row is lost."""
    called: tuple[Any, ...] = ({}, 0, 0, "step") if logger.tells_rows_apart else ({}, 0, 0)
    try:
        inspect.signature(logger.log_metrics).bind(*called)
    except TypeError:
        names = ", ".join(("metrics", "step", "epoch", "over")[: len(called)])
        raise OptionError(
            f"{logger.label}.log_metrics{inspect.signature(logger.log_metrics)} is called with {names}."
        ) from None
    if logger.artifacts:
        from hookline.loggers.run_artifacts import ARTIFACTS

        Several(ARTIFACTS)(f"{logger.label}: artifacts", logger.artifacts)
    known = [name for name in vars(Logger) if name.startswith(("log_", "add_"))]
    own = {name for cls in type(logger).__mro__ if not issubclass(Logger, cls) for name in vars(cls)}
    for name in sorted(own - set(known)):
        meant = difflib.get_close_matches(name, [each for each in known if each not in own], n=1, cutoff=0.9)
        if meant and name.startswith(("log_", "add_")):
            raise OptionError(f"{logger.label}.{name} is not called by a run. Did you mean {meant[0]!r}?")
