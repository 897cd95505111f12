"""Options that are tables of settings, and older options that are keys of them now."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any, Literal

from hookline.engine.checks import Duration, OnDisk, Rule, apply_rule, check_choice, refused, rule_of
from hookline.engine.filters import parse_interval
from hookline.util.errors import HookError, OptionError, closest

OLD_NAMES = {
    "save": ("checkpoint", "write"),
    "on_save_error": ("checkpoint", "on_error"),
    "hang_action": ("hang_after", "action"),
    "val_aggregation": ("evaluation", "aggregation"),
    "accounting": ("audit", "costs"),
    "trace": ("audit", "trace"),
}
"""Options that are keys of another option now. They are still accepted."""
FIRST_KEYS = {"hang_after": "after", "audit": "changes", "digest": "every"}
"""Options that may also be a single value, and the key that the value is for."""
OLD_SAVING = {name for name, (option, _) in OLD_NAMES.items() if option == "checkpoint"}
"""Those of `checkpoint`."""


def _aggregates(name: str, value: Any) -> Any:
    if not callable(value) and not re.fullmatch("primary:.+", str(value), re.DOTALL):
        check_choice(name, value, ("micro", "macro", "primary", "primary:NAME"))
    return value


@dataclass(frozen=True, slots=True)
class Saving:
    """How a run saves: what `Trainer(checkpoint=...)` means."""

    last: bool = True
    """Keep `checkpoints/last` without being asked by a hook."""
    every: Annotated[float, Duration(" Pass last=False to write no checkpoint.")] = 300.0
    """Seconds between two writes of it while the run trains."""
    write: Literal["sync", "async"] = "sync"
    """'sync', or 'async': in the background, training waits only for a copy of the tensors."""
    on_error: Literal["raise", "warn"] = "raise"
    """A checkpoint that a hook or a signal asked for cannot be written: 'raise' ends the run, 'warn'
    continues without it.
    """
    weights: Literal["all", "trainable"] = "all"
    """'all', or 'trainable': leave out the frozen weights, which the model has when it is built again."""


@dataclass(frozen=True, slots=True)
class Hangs:
    """What the watchdog does: what `Trainer(hang_after=...)` means."""

    after: Annotated[float, Duration()] | None = 600.0
    """Seconds after which a call counts as a hang. None: no watchdog."""
    action: Literal["warn", "abort"] = "warn"
    """'warn' reports the hang, 'abort' also ends the run."""


@dataclass(frozen=True, slots=True)
class Evaluation:
    """How validation, test and prediction run: what `Trainer(evaluation=...)` means."""

    inference_mode: bool = False
    """Run the steps under torch.inference_mode instead of torch.no_grad."""
    aggregation: Annotated[
        str | Callable[[dict[str, dict[str, float]]], Mapping[str, float]], _aggregates
    ] = "micro"
    """How the results of several loaders are combined."""


@dataclass(frozen=True, slots=True)
class Audit:
    """What a run records about its hooks: what `Trainer(audit=...)` means."""

    changes: bool = False
    """Report what each hook changed: weights, gradients, modes, random streams and more."""
    costs: bool = True
    """Count the calls of each hook and measure their time."""
    trace: bool | Annotated[str | Path, OnDisk("True, False or the path of a file")] = False
    """Write every event and call as a timeline for Perfetto: to trace.json in the run's directory, or to the
    file of this path.
    """


DIGEST_STEPS = "True, False, a number of steps or text such as 'every 10 steps'"


def parse_steps(name: str, value: Any) -> int:
    """Return the number of steps between two digests; 0 is off, 1 is every step."""
    if isinstance(value, bool):
        return int(value)
    if isinstance(value, int) and value >= 0:
        return value
    if isinstance(value, str):
        try:
            number, unit = parse_interval(value.strip().removeprefix("every "), name)
        except HookError:
            number, unit = 0.0, ""
        if unit == "step":
            return int(number)
    raise refused(name, value, DIGEST_STEPS)


@dataclass(frozen=True, slots=True)
class Digests:
    """How often a run writes digests, and of what: what `Trainer(digest=...)` means."""

    every: Annotated[bool | int | str, parse_steps] = 1
    """Steps between two digests: a number, or 'every 10 steps'. The first step has one, too."""
    modules: bool = False
    """Also the output of every module, and every parameter, its gradient and its optimizer state."""

    @property
    def steps(self) -> int:
        """Steps between two digests; 0: no digests."""
        return parse_steps("digest", self.every)


TABLES: dict[str, type] = {
    "checkpoint": Saving,
    "hang_after": Hangs,
    "evaluation": Evaluation,
    "audit": Audit,
    "digest": Digests,
}
"""The options that may be tables, and what declares their keys."""


def table_rules(option: str) -> dict[str, Rule]:
    """Return the keys of a table, and their checks."""
    return {each.name: rule for each in fields(TABLES[option]) if (rule := rule_of(each.type)) is not None}


def parse_table(option: str, given: Mapping[Any, Any]) -> Any:
    """Return the settings that a table asks for; what it does not name has its default."""
    rules = table_rules(option)
    for key, value in given.items():
        if key not in rules:
            raise OptionError(
                f"{option} has no setting {key!r}.{closest(str(key), rules)} Settings: {', '.join(rules)}.",
                option=str(key),
                value=value,
                allowed=tuple(rules),
            )
    return TABLES[option](**{key: rules[key](f"{option}: {key}", value) for key, value in given.items()})


def parse_checkpoint(given: Any, name: str = "checkpoint") -> Saving:
    """Return the settings that `checkpoint=` asks for."""
    if isinstance(given, bool):
        return Saving(last=given)
    if isinstance(given, str):
        write: Any = check_choice(name, given, ("sync", "async"), "True, False or a table are allowed, too.")
        return Saving(write=write)
    if not isinstance(given, Mapping):
        raise refused(
            name, given, f"True, False, 'sync', 'async' or a table of {', '.join(table_rules(name))}"
        )
    return parse_table(name, given)  # type: ignore[no-any-return]


def parse_audit(given: Any, name: str = "audit") -> Audit:
    """Return the settings that `audit=` asks for."""
    if isinstance(given, bool):
        return Audit(changes=given)
    if not isinstance(given, Mapping):
        raise refused(name, given, f"True, False or a table of {', '.join(table_rules(name))}")
    return parse_table(name, given)  # type: ignore[no-any-return]


def parse_digest(given: Any, name: str = "digest") -> Digests:
    """Return the settings that `digest=` asks for."""
    if isinstance(given, Mapping):
        return parse_table(name, given)  # type: ignore[no-any-return]
    try:
        return Digests(every=parse_steps(name, given))
    except OptionError as error:
        if isinstance(given, bool | int | str):
            raise
        raise refused(name, given, f"{DIGEST_STEPS}, or a table of {', '.join(table_rules(name))}") from error


def with_new_names(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return these options with older names as keys of the options that they belong to now. Errors use the
    name that was given.
    """
    result = {name: value for name, value in given.items() if name not in OLD_NAMES}
    moved: dict[str, dict[str, Any]] = {}
    for name, value in given.items():
        if name in OLD_NAMES:
            option, key = OLD_NAMES[name]
            moved.setdefault(option, {})[key] = apply_rule(name, table_rules(option)[key], value)
    for option, settings in moved.items():
        old = [name for name in given if name in OLD_NAMES and OLD_NAMES[name][0] == option]
        if option in FIRST_KEYS and option in given and not isinstance(given[option], Mapping):
            first = FIRST_KEYS[option]
            settings = {first: apply_rule(option, table_rules(option)[first], given[option]), **settings}
        elif option in given:
            new = given[option]
            settings = {**new, **settings} if isinstance(new, Mapping) else settings
            raise OptionError(
                f"{option} and {' and '.join(old)} cannot be combined: {old[0]} is an older name for a part "
                f"of it. Pass {option}={settings}.",
                option=old[0],
                value=given[old[0]],
            )
        result[option] = settings
    return result
